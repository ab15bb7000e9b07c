"""Hydrogen bonds by a neighbour list, against all pairs of donors and acceptors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim
from adjsim.compiler import CompileError
from adjsim.core.strain import Strain
from adjsim.io import from_openmm, to_openmm
from adjsim.potentials import CustomHydrogenBond
from adjsim.potentials.bonded import hydrogen_bonds
from tests import openmm_custom
from tests.bonded import close
from tests.openmm_systems import reference
from tests.problems import parameter

SIDE, COUNT = 5.0, 12
BOXES = {
    "none": None,
    "sides": [SIDE, 5.2, 5.1],
    "tilted": [[SIDE, 0.0, 0.0], [1.0, 5.0, 0.0], [-1.0, 0.5, 5.0]],
}


def made(monkeypatch, listed, box=None, **options):
    """Bonds of 12 molecules of three atoms, the last of which only gives."""
    monkeypatch.setattr(hydrogen_bonds, "LISTED", 1 if listed else 10**9)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.rand(n, generator=generator).double() for n in (COUNT, COUNT - 1)]
    found = CustomHydrogenBond(
        [[3 * k, 3 * k + 1] for k in range(COUNT)],
        [[3 * k, 3 * k + 2] for k in range(COUNT - 1)],
        "depth*q*p*exp(-distance(d1,a1)^2)*cos(angle(d2,d1,a1))^2*cos(angle(d1,a1,a2))",
        {"depth": parameter(2.0)},
        donor_numbers={"q": nn.Parameter(drawn[0])},
        acceptor_numbers={"p": nn.Parameter(drawn[1])},
        exclusions=[[k, k] for k in reversed(range(COUNT - 1))],
        cutoff=2.0,
        box=box,
        **options,
    )
    assert found.listed == listed
    return found


def places(*batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return SIDE * torch.rand(*batch, 3 * COUNT, 3, generator=generator, dtype=torch.float64)


def grads(found, parameters):
    return found if isinstance(found, list) else found.gradient(parameters)


@pytest.mark.parametrize(
    ("kind", "batch"),
    [("none", ()), ("sides", (2, 2)), pytest.param("tilted", (2,), marks=pytest.mark.slow)],
)
def test_a_list_has_the_sums_of_all_pairs(kind, batch, monkeypatch):
    box = BOXES[kind]
    pair = [made(monkeypatch, listed, box) for listed in (False, True)]
    numbers = [list(x.parameters()) for x in pair]
    # The second position still has the list of the first, with other pairs within the cutoff.
    for q in (places(*batch), places(*batch) + 0.02 * places(*batch, seed=1)):
        v = torch.randn_like(q)
        assert 0 < pair[1].near_pairs(q) < 0.5 * COUNT**2
        values = []
        for potential, given in zip(pair, numbers, strict=True):
            force, product = potential.force_vjp(q, given)
            along, rest = product(v)
            rows = [potential(q), force, potential.virial(q), along, *grads(rest, given)]
            if box is not None:
                drawn = torch.linspace(-0.06, 0.05, 3 * q[..., 0, 0].numel(), dtype=q.dtype)
                strain = Strain.of(potential.box, drawn.reshape(*batch, 1, 3))
                (force, work), product = potential.strained_vjp(q, strain, given)
                along, stretched, rest = product(v, torch.ones_like(work))
                rows += [potential.strained_energy(q, strain), force, work, along, stretched]
                rows += grads(rest, given)
            values.append(rows)
        for one, other in zip(*values, strict=True):
            close(other, one, 1e-13)


def test_derivatives_and_systems_without_pairs(monkeypatch):
    potential = made(monkeypatch, True, BOXES["sides"])
    q = places(2).requires_grad_()
    force = adjsim.force(potential, q)
    (by_energy,) = torch.autograd.grad(potential(q).sum(), q)
    close(-by_energy, force, 1e-13)
    assert torch.autograd.gradcheck(potential, (q,), eps=1e-6, atol=1e-6, fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda x: adjsim.force(potential, x), (q,), eps=1e-6, atol=1e-6, fast_mode=True
    )
    free = made(monkeypatch, True)
    apart = torch.arange(3.0 * COUNT).mul(9.0).double().unsqueeze(-1).expand(-1, 3)
    broken = torch.full_like(apart, torch.nan)
    energies = free(torch.stack([apart, q[0].detach(), broken]))
    assert energies[0] == 0
    assert energies[1] == free(q[0])
    assert bool(energies[2].isnan())
    assert bool((adjsim.force(free, apart) == 0).all())
    # The first atoms of a donor and of an acceptor, of which lists find no pair.
    for atom in (18, 21):
        apart = q[0].detach().clone()
        apart[atom] = torch.nan
        assert bool(free(apart).isnan())


def run(potential, adjoint, exact, compile):
    """A run that crosses the cutoff often, its end and the gradients of all numbers."""
    bonds = adjsim.HarmonicBond([[k, k + 1] for k in range(3 * COUNT - 1)], 5.0, 1.0)
    dynamics = adjsim.Langevin(potential + bonds, 1.0, kT=0.5, friction=0.3)
    q = (0.8 * places(seed=4)).requires_grad_()
    solver = adjsim.Splitting("BAOAB", 0.02, exact=exact)
    found = adjsim.simulate(
        dynamics,
        dynamics.init(q, generator=3),
        [0.0, 0.3],
        solver=solver,
        adjoint=adjoint,
        generator=5,
        compile=compile,
    )
    given = [q, *potential.parameters()]
    return found.final.position.detach(), torch.autograd.grad(
        (found.final.position**2).sum(), given
    )


@pytest.mark.parametrize(
    "compile",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.marathon)],
)
def test_runs_are_retraced_bit_for_bit(compile, monkeypatch):
    """In exact runs the list does not change a bit; gradients are those of all pairs."""
    by_list = made(monkeypatch, True, capacity=132 if compile else None)
    all_pairs = made(monkeypatch, False)
    end, found = run(by_list, adjsim.ReversibleAdjoint(), True, compile)
    other, expected = run(all_pairs, adjsim.ReversibleAdjoint(), True, False)
    assert torch.equal(end, other)
    for x, y in zip(found, expected, strict=True):
        close(x, y, 1e-10)
    _, found = run(by_list, adjsim.CheckpointAdjoint(), False, compile)
    _, expected = run(by_list, adjsim.DirectAdjoint(), False, False)
    for x, y in zip(found, expected, strict=True):
        close(x, y, 1e-10)


@pytest.mark.slow
def test_the_capacity_of_compiled_loops(monkeypatch):
    with pytest.raises(CompileError, match=r"set capacity .* near_pairs\(position\), or use"):
        run(made(monkeypatch, True), adjsim.CheckpointAdjoint(), False, True)
    few = made(monkeypatch, True, capacity=2)
    with pytest.raises(ValueError, match=r"\d+ pairs .* do not fit into capacity=2: set a larger"):
        run(few, adjsim.CheckpointAdjoint(), False, True)


@pytest.mark.parametrize("periodic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lists_of_forces_from_openmm(periodic, monkeypatch):
    monkeypatch.setattr(hydrogen_bonds, "LISTED", 1)
    force = openmm_custom.hydrogen_bonds(periodic)
    system, positions = openmm_custom.system_with(force), openmm_custom.sites()
    potential, molecule = from_openmm(system, positions)
    part = potential.hydrogen_bonds
    assert part.listed
    assert part.capacity == -(-3 * part.near_pairs(molecule.position) // 2)
    energy, forces = reference(to_openmm(potential, system), positions)
    assert abs(potential(molecule.position).item() - energy) < 1e-9 * abs(energy)
    close(adjsim.force(potential, molecule.position), torch.as_tensor(forces), 1e-7)


def test_wrong_lists():
    sides = [[[k] for k in range(130)]] * 2
    bonds = CustomHydrogenBond(*sides, "distance(d1,a1)", cutoff=2.0)
    assert bonds.listed
    assert not CustomHydrogenBond(*sides, "distance(d1,a1)", cutoff=torch.inf).listed
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        CustomHydrogenBond(*sides, "distance(d1,a1)", cutoff=2.0, capacity=0)
    with pytest.raises(ValueError, match=r"transforms of torch\.func"):
        torch.func.grad(bonds)(torch.rand(130, 3))
    for name, value, rule in (("skin", -1.0, "skin must be zero"), ("cutoff", None, "for a list")):
        kept = getattr(bonds, name)
        setattr(bonds, name, value)
        with pytest.raises(ValueError, match=rule):
            bonds(torch.rand(130, 3))
        setattr(bonds, name, kept)


@pytest.mark.parametrize("listed", [True, False])
def test_expressions_that_are_no_numbers_beyond_the_cutoff(listed, monkeypatch):
    """Also in a system without pairs, of a batch whose other system has one."""
    monkeypatch.setattr(hydrogen_bonds, "LISTED", 1 if listed else 10**9)
    potential = CustomHydrogenBond(
        [[0], [1]], [[2], [3]], "(3-distance(d1,a1))^1.5", cutoff=3.0, length_unit=1.0
    )
    x = torch.tensor([[0.0, 20.0, 2.0, 10.0], [0.0, 40.0, 4.0, 20.0]], dtype=torch.float64)
    q = torch.stack([x, 0 * x, 0 * x], -1).requires_grad_()
    force = adjsim.force(potential, q)
    expected = torch.zeros_like(force)
    expected[0, [0, 2], 0] = torch.tensor([-1.5, 1.5], dtype=torch.float64)
    close(force, expected, 1e-13)
    (along,) = torch.autograd.grad(force.sum(), q, retain_graph=True)
    close(along, torch.zeros_like(along), 1e-13)
