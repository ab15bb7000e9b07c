"""Every term of every dynamics keeps the contract."""

from __future__ import annotations

import inspect

import pytest
import torch

import adjsim
from adjsim.dynamics.base import Dynamics
from tests.problems import DYNAMICS, POTENTIALS, STOCHASTIC, THERMOSTATS, square, start as start_of
from tests.suites import DriftContract, FlowContract, TermContract, disturbed

ROWS, MULTIPLICATIVE, SUDDEN = [], [], []
LONGER = {"chain-5": lambda potential: adjsim.NoseHooverChain(potential, 1.4, 0.6, 0.5, length=5)}
for name, build in {**DYNAMICS, **STOCHASTIC, **LONGER, **THERMOSTATS}.items():
    if name == "overdamped":
        continue  # its term has no flow
    for potential in ("lennard-jones", "plain-module"):
        for replicas in ((), (3,)):
            made = build(POTENTIALS[potential]())
            position, momentum = square(replicas)
            start = disturbed(start_of(made, position, momentum))
            # The stream and the kick of thermostats are those of other dynamics.
            for letter in [*made.terms][2:] if name in THERMOSTATS else made.terms:
                rows = {"bussi-R": MULTIPLICATIVE, "velocity-rescale-R": SUDDEN}.get(
                    f"{name}-{letter}", ROWS
                )
                row = f"{name}-{letter}-{potential}-{len(replicas)}"
                rows.append(pytest.param(made, letter, start, id=row))


@pytest.mark.parametrize(("dynamics", "letter", "state"), ROWS)
class TestTerms(TermContract):
    pass


@pytest.mark.parametrize(("dynamics", "letter", "state"), MULTIPLICATIVE)
class TestTermsWithMultiplicativeNoise(DriftContract, FlowContract):
    pass


@pytest.mark.parametrize(("dynamics", "letter", "state"), SUDDEN)
class TestTermsThatActAtOnce(FlowContract):
    pass


def test_drift_is_the_sum_of_the_terms():
    """And, for the chain, the equations as printed by Martyna, Klein and Tuckerman."""
    dynamics = adjsim.NoseHooverChain(adjsim.Harmonic(1.3), mass=2.0, kT=0.7, tau=0.5, length=3)
    state = disturbed(dynamics.init(*square()))
    rate = dynamics.drift(0.0, state)
    q, p, _, b = state
    Q = 0.7 * 0.5**2 * torch.tensor([8.0, 1.0, 1.0])[:, None, None]
    torch.testing.assert_close(rate.position, p / 2)
    torch.testing.assert_close(rate.momentum, -1.3 * q - p * b[0] / Q[0])
    torch.testing.assert_close(rate.bath_position, b / Q)
    first = (p * p / 2).sum() - 8 * 0.7 - b[0] * b[1] / Q[1]
    second = b[0] ** 2 / Q[0] - 0.7 - b[1] * b[2] / Q[2]
    third = b[1] ** 2 / Q[1] - 0.7
    torch.testing.assert_close(rate.bath_momentum, torch.stack([first, second, third]))


def test_invariants_are_conserved_by_the_drift():
    """d(invariant)/dt = grad(invariant) . drift = 0 at a generic state."""
    for name, build in DYNAMICS.items():
        dynamics = build(POTENTIALS["lennard-jones"]())
        state = disturbed(dynamics.init(*square()))
        leaves = type(state)(*(x.detach().requires_grad_() for x in state))
        grads = torch.autograd.grad(
            dynamics.invariant(leaves), leaves, materialize_grads=True, allow_unused=True
        )
        rate = dynamics.drift(0.0, state)
        change = sum((g * r).sum() for g, r in zip(grads, rate, strict=True))
        size = sum((g * r).abs().sum() for g, r in zip(grads, rate, strict=True))
        assert abs(float(change)) < 1e-13 * float(size), name


def test_esh_turn_is_the_published_one():
    """The flow against the closed form in delta, at ordinary and at small and large angles."""
    from adjsim.dynamics.esh import turn

    for size in (1e-9, 1e-3, 0.5, 4.0):
        u = torch.randn(4, 2)
        u /= u.norm()
        g = torch.randn(4, 2) * size
        r = torch.tensor(0.3)
        d, h = 8, 0.7
        e, delta = -g / g.norm(), torch.tensor(h * float(g.norm()) / d)
        along = (u * e).sum()
        Z = torch.cosh(delta) + along * torch.sinh(delta)
        turned = (u + e * (torch.sinh(delta) + along * (torch.cosh(delta) - 1))) / Z
        found, speed = turn(h / d, -g, u, r)
        torch.testing.assert_close(found, turned, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(speed, r + torch.log(Z), rtol=1e-12, atol=1e-14)


def test_esh_leaves_a_head_on_direction_alone():
    push = torch.randn(3, 2)
    u = push / push.norm()
    from adjsim.dynamics.esh import turn

    for sign in (1.0, -1.0):
        turned, _ = turn(0.3, push, sign * u, torch.zeros(()))
        torch.testing.assert_close(turned, sign * u, rtol=1e-12, atol=1e-12)


def test_esh_is_smooth_where_the_force_vanishes():
    from adjsim.dynamics.esh import turn

    push = torch.zeros(2, 2, requires_grad=True)
    u = torch.tensor([[0.6, 0.0], [0.0, 0.8]])
    turned, speed = turn(0.3, push, u, torch.zeros(()))
    (grad,) = torch.autograd.grad(turned.sum() + speed, push)
    h = 1e-6
    for i in range(2):
        shift = torch.zeros(2, 2)
        shift[0, i] = h
        ahead, behind = turn(0.3, shift, u, torch.zeros(())), turn(0.3, -shift, u, torch.zeros(()))
        slope = (ahead[0].sum() + ahead[1] - behind[0].sum() - behind[1]) / (2 * h)
        torch.testing.assert_close(grad[0, i], slope, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "kind", [x for x in vars(adjsim).values() if inspect.isclass(x) and issubclass(x, Dynamics)]
)
def test_numbers_that_are_not_given_are_one(kind):
    given = inspect.signature(kind).parameters
    for name in {"mass", "kT", "tau", "friction", "rate"} & given.keys():
        assert given[name].default == (
            0.0 if kind is adjsim.Mechanics and name == "friction" else 1
        )


def test_chains_have_three_variables():
    box = torch.full((2,), 7.0, dtype=torch.float64)
    pair = adjsim.LennardJones(1.0, 1.0, cutoff=2.5, box=box)
    for dynamics in (adjsim.NoseHooverChain(pair), adjsim.NoseHooverPiston(pair)):
        assert dynamics.init(square(())[0]).bath_position.shape == (3, 1, 1)


def test_diffusion_is_driven_by_the_force_over_the_friction():
    friction = torch.tensor([0.5, 2.0, 1.5, 4.0], dtype=torch.float64)
    position, kT = square((3,))[0], 0.7
    well = adjsim.Harmonic(1.3)
    dynamics = adjsim.OverdampedLangevin(well, kT=kT, friction=friction)
    state = dynamics.init(position)
    found = dynamics.drift(0.0, state)
    torch.testing.assert_close(found.position, -1.3 * position / friction[:, None])
    noise = dynamics.diffusion(0.0, state).position
    expected = torch.sqrt(2 * kT / friction)[:, None].expand_as(position)
    torch.testing.assert_close(noise.expand_as(position), expected)
