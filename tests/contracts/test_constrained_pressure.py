"""Pistons that move the centres of rigid bodies: equations, flows and what they conserve."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import adjsim
from adjsim.io import to_ase
from adjsim.io.ase import Structure
from adjsim.potentials.strained import strained_energy
from tests.constraints import ClustersAtPressure, tensor
from tests.suites import DriftContract, FlowContract, disturbed

FORMS = [
    ("orthogonal", "isotropic", False),
    ("orthogonal", "each", True),
    ("turned", "each", False),
]
NAMES = ["-".join([kind, axes]) for kind, axes, _ in FORMS]


def moving(kind, axes, chains, batch=(), **more):
    """Clusters, each number a parameter, and a state of theirs with a moving piston."""
    system = ClustersAtPressure(kind, axes, chains)
    numbers = system.parameters()
    if not chains:
        more = {"piston_friction": nn.Parameter(tensor(0.3))} | more
    dynamics = system.constrained(numbers, **more)
    state = system.start(dynamics, numbers)
    state = type(state)(*(x.detach().expand(*batch, *x.shape).clone() for x in state))
    more = 0.7 + torch.arange(state.strain.numel(), dtype=torch.float64)
    return dynamics, state._replace(strain_momentum=more.reshape(state.strain.shape))


TERMS = [
    pytest.param(dynamics, letter, state, id=f"{name}-{letter}")
    for form, name in zip(FORMS, NAMES, strict=True)
    for dynamics, state in [moving(*form, (2,))]
    for letter in (dynamics.terms if form is FORMS[2] else "VS")
]


@pytest.mark.parametrize(("dynamics", "letter", "state"), TERMS)
class TestTerms(DriftContract, FlowContract):
    """The noise of O is projected, and its diffusion is stated before that."""


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_the_enthalpy_is_conserved_by_the_drift(form):
    off = {} if form[2] else {"piston_friction": 0.0, "friction": 0.0}
    dynamics, state = moving(*form, (2,), tail=True, **off)
    leaves = type(state)(*(x.requires_grad_() for x in state))
    grads = torch.autograd.grad(dynamics.invariant(leaves).sum(), leaves)
    rates = dynamics.drift(0.0, state)
    changes = [(g * r).flatten(1).sum(-1) for g, r in zip(grads, rates, strict=True)]
    change, size = sum(changes), sum(x.abs() for x in changes)
    assert bool((change.abs() < 1e-12 * size).all())


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_dilations_and_kicks_keep_the_isothermal_isobaric_density(form):
    """Streaming and projected kicks keep the measure on the constraints; S and V move freely."""
    dynamics, state = moving(*form)
    state, sizes = disturbed(state), [x.numel() for x in state]
    terms = dynamics.terms

    def rate(flat):
        parts = (x.reshape(y.shape) for x, y in zip(flat.split(sizes), state, strict=True))
        at = type(state)(*parts)
        rates = {}
        for letter in "SV":
            rates |= terms[letter].drift(0.0, at)
        return torch.cat(
            [rates.get(k, torch.zeros_like(x)).flatten() for k, x in at._asdict().items()]
        )

    flat = torch.cat([x.flatten() for x in state])
    divergence = torch.autograd.functional.jacobian(rate, flat).diagonal().sum()
    strain = state.strain.requires_grad_()
    (slope,) = torch.autograd.grad(dynamics.volume(state._replace(strain=strain)).log(), strain)
    expected = -(slope * terms["S"].drift(0.0, state)["strain"]).sum()
    torch.testing.assert_close(divergence, expected.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_the_force_on_the_piston_is_that_of_centres(form):
    """W_q and 2K against differences of the energies, as centres of molecules are stretched."""
    dynamics, state = moving(*form)
    inner, mass = dynamics.dynamics, dynamics.mass.detach()[:, None]
    bodies = [[0, 1, 2], [3, 4, 5], [6, 7], [8]]
    h, q, p = 1e-5, state.position, state.momentum

    def energies(change):
        """U + P V with centres stretched, and 2K of the centres with momenta shrunk."""
        strain = inner.piston.strain(state)
        at, twice = q.clone(), 0.0
        for body in bodies:
            m = mass[body]
            centre = (m * q[body]).sum(0) / m.sum()
            at[body] = at[body] + strain.dilated(centre, torch.exp(change)) - centre
            total = strain.pulled_back(p[body].sum(0), torch.exp(-change))
            twice = twice + (total**2).sum() / m.sum()
        moved = strain._replace(value=strain.value + change)
        energy = strained_energy(inner.potential, at, moved)
        volume = inner.volume(state._replace(strain=moved.value))
        return (energy + inner.pressure * volume).detach(), twice.detach()

    found = dynamics.terms["V"].drift(0.0, state)["strain_momentum"].detach()
    twice = energies(torch.zeros_like(state.strain))[1]
    share = 3 / state.strain.shape[-1] / (3 * len(bodies))
    for k in range(state.strain.shape[-1]):
        change = torch.zeros_like(state.strain)
        change[..., k] = h
        above, below = energies(change), energies(-change)
        slopes = [float((a - b) / (2 * h)) for a, b in zip(above, below, strict=True)]
        # d(2K)/de of shrinking momenta is minus twice the part of 2K.
        expected = -slopes[0] - slopes[1] / 2 + share * float(twice)
        assert float(found[..., k]) == pytest.approx(expected, rel=1e-6)


def test_the_pressure_of_a_state_includes_constraints():
    """Of rigid bodies, the pressure of all forces on atoms is that of forces on centres."""
    for form in FORMS:
        dynamics, state = moving(*form, (2,))
        _, dim = state.position.shape[-2:]
        volume = dynamics.volume(state)
        V, c = dynamics.terms["V"], dynamics.terms["V"].coefficients(1.0, state)
        p = V.bodies.carried(c, state.momentum)
        twice = (p**2 * c["1/m"]).sum((-1, -2))
        rate = V.drift(0.0, state)["strain_momentum"].sum((-1, -2))
        # The kick has d V P less, and d/N_f 2K more, where N_f is d times four bodies.
        expected = (rate - 3 / 12 * twice) / (dim * volume) + dynamics.dynamics.pressure
        torch.testing.assert_close(adjsim.pressure(dynamics, state), expected, rtol=1e-11, atol=0)
        stress = adjsim.stress(dynamics, state)
        mean = stress.diagonal(dim1=-2, dim2=-1).mean(-1)
        torch.testing.assert_close(adjsim.pressure(dynamics, state), -mean, rtol=1e-11, atol=0)


def test_a_frame_has_the_cell_of_its_state():
    dynamics, state = moving(*FORMS[2])
    structure = Structure(*state[:2], dynamics.mass, dynamics.reference_box, tuple("H" * 9))
    run = adjsim.simulate(
        dynamics,
        state,
        [0.0, 0.04],
        solver=adjsim.Splitting(dynamics.dynamics.scheme, 0.02),
        generator=1,
    )
    last = to_ase(run, structure)[-1]
    box = dynamics.box(run.final).detach()
    torch.testing.assert_close(tensor(last.cell.array), box, rtol=1e-14, atol=0)
    assert last.get_volume() == pytest.approx(float(dynamics.volume(run.final).detach()))
    mass = float(dynamics.density(run.final).detach()) * last.get_volume()
    assert mass == pytest.approx(float(dynamics.mass.sum().detach()))
    kinetic, potential = (
        f(run.final) for f in (dynamics.kinetic_energy, dynamics.potential_energy)
    )
    torch.testing.assert_close(dynamics.enthalpy(run.final), kinetic + potential)


def test_a_box_that_is_too_small_stops_a_run():
    dynamics, state = moving(*FORMS[0])
    squeezed = state._replace(strain=state.strain - 0.6, strain_momentum=-60 + 0 * state.strain)
    solver = adjsim.Splitting(dynamics.dynamics.scheme, 0.02)
    with pytest.raises(ValueError, match=r"cutoff 2\.5 is above half .* happened in step"):
        adjsim.simulate(dynamics, squeezed, [0.0, 2.0], solver=solver, generator=1)


def test_what_pistons_of_bodies_cannot_take_is_refused():
    system = ClustersAtPressure("orthogonal", "isotropic")
    numbers = system.leaves
    friction = torch.linspace(1.0, 2.0, 9)
    with pytest.raises(ValueError, match="one friction"):
        system.constrained(numbers, friction=friction, piston_friction=1.0)
    pinned = system.constrained(numbers, mass=tensor([math.inf] + 8 * [1.0]))
    with pytest.raises(ValueError, match="give every atom a finite mass"):
        pinned.init(numbers["position"], generator=0)
    chains = ClustersAtPressure("orthogonal", "isotropic", True)
    with pytest.raises(ValueError, match="dof = atoms x dim - constraints"):
        chains.constrained(chains.leaves, dof=None)
    with pytest.raises(ValueError, match="leave 20 degrees of freedom"):
        chains.constrained(chains.leaves, dof=21).init(numbers["position"], generator=0)
