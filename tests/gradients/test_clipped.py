"""Clipped cotangents, against backpropagation through time by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import adjsim
from tests.problems import parameter

DT, STEPS, EVERY = 0.2, 20, 6
ADJOINTS = {
    "direct": adjsim.DirectAdjoint(),
    "checkpoint": adjsim.CheckpointAdjoint(),
    "reversible": adjsim.ReversibleAdjoint(),
}


class Wells(nn.Module):
    """Double wells in a row, joined by springs."""

    def __init__(self):
        super().__init__()
        self.k = parameter([0.7, 1.3])

    def forward(self, position):
        barrier, spring = self.k
        wells = barrier * (position.square() - 1).square()
        joined = spring * position.diff(dim=-2).square()
        return wells.sum((-1, -2)) + joined.sum((-1, -2))


class Decay(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = parameter(1.0)

    def forward(self, t, y):
        return -self.rate * y


def start(batch=(3,)):
    generator = torch.Generator().manual_seed(1)
    position = torch.randn(*batch, 4, 1, generator=generator, dtype=torch.float64)
    return position, position.flip(-2).clone()


def step(potential, position, momentum):
    """Take a step of velocity Verlet of unit masses."""
    momentum = momentum - DT / 2 * slope(potential, position)
    position = position + DT * momentum
    return position, momentum - DT / 2 * slope(potential, position)


def slope(potential, position):
    return torch.autograd.grad(potential(position).sum(), position, create_graph=True)[0]


def scaled(cotangents, norm):
    """Scale the cotangents of each replica to a joint norm."""
    squares = sum(c.square().sum((-1, -2), keepdim=True) for c in cotangents)
    share = torch.clamp(norm / squares.sqrt(), max=1.0)
    return [c * share for c in cotangents]


def by_hand(potential, frames, norm):
    """Backpropagate the mean square of the positions after all steps, and clip."""
    grad, scale, clipped = torch.zeros_like(potential.k), 2.0 / frames[0].numel(), 0
    cotangents = [scale * frames[0][-1], torch.zeros_like(frames[1][-1])]
    for k in range(STEPS - 1, -1, -1):
        leaves = [x[k].clone().requires_grad_() for x in frames]
        after = step(potential, *leaves)
        *cotangents, along = torch.autograd.grad(after, [*leaves, potential.k], cotangents)
        grad += along
        if k and k % EVERY == 0:
            before, cotangents = cotangents, scaled(cotangents, norm)
            changed = before[0] != cotangents[0]
            clipped += int(changed.any((-1, -2)).sum())
        cotangents[0] = cotangents[0] + scale * frames[0][k]
    return [grad, *cotangents], clipped


EAGER = [(name, exact, False) for name in ADJOINTS for exact in (False, True)]
COMPILED = [("direct", False, True), ("reversible", True, True)]


@pytest.mark.parametrize(
    ("name", "exact", "compile"),
    [*EAGER, *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED)],
)
def test_clipped_sweeps_are_those_by_hand(name, exact, compile):
    potential, norm = Wells(), 0.3
    dynamics, ts = adjsim.Hamiltonian(potential), torch.arange(STEPS + 1) * DT
    state = dynamics.init(*(x.requires_grad_() for x in start()))

    def swept(adjoint):
        solver = adjsim.Splitting("BAB", DT, exact=exact)
        run = adjsim.simulate(dynamics, state, ts, solver=solver, adjoint=adjoint, compile=compile)
        loss = run.position.square().mean()
        return run, torch.autograd.grad(loss, [potential.k, *state])

    run, found = swept(ADJOINTS[name].clipped(adjsim.Clip(norm, EVERY)))
    frames = [run.position.detach(), run.momentum.detach()]
    expected, clipped = by_hand(potential, frames, norm)
    # Some clips change a replica and some do not.
    assert 0 < clipped < 3 * 3
    # An exact run rounds the momentum in the middle of a step too.
    share = 1e-8 if exact else 1e-10
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=share, atol=share * float(y.abs().max()))
    _, free = swept(ADJOINTS[name])
    _, unbounded = swept(ADJOINTS[name].clipped(adjsim.Clip(math.inf, EVERY)))
    assert all(map(torch.equal, free, unbounded))


def observed(adjoint, observable, *, norm=None, chunks=1, exact=False):
    dynamics = adjsim.Langevin(Wells(), kT=parameter(0.2), friction=parameter(0.5))
    simulation = adjsim.Simulation(
        dynamics,
        lambda n, generator: dynamics.init(start((n,))[0], generator=generator),
        [0.0, STEPS * DT],
        solver=adjsim.Splitting("BAOAB", DT, exact=exact),
    )
    clip = None if norm is None else adjsim.Clip(norm, EVERY)
    estimator = adjsim.Pathwise(adjoint, clip=clip)
    return estimator(simulation, observable, replicas=3, chunks=chunks, generator=3)


def square(state):
    return state.position.square().sum((-1, -2))


def largest_difference(one, other):
    return max(float((one.grad[name] - x).norm() / x.norm()) for name, x in other.grad.items())


@pytest.mark.parametrize(
    ("name", "exact"), [("checkpoint", False), ("reversible", False), ("reversible", True)]
)
def test_adjoints_clip_alike_under_friction(name, exact):
    average = adjsim.TimeAverage(square)
    direct = observed(ADJOINTS["direct"], average, norm=0.1, exact=exact)
    found = observed(ADJOINTS[name], average, norm=0.1, exact=exact)
    assert found.estimand == direct.estimand == "clipped path"
    assert largest_difference(found, direct) < 1e-10
    assert largest_difference(found, observed(ADJOINTS[name], average, exact=exact)) > 1e-3
    assert "no derivative of a mean" in str(found)


def test_clips_do_not_depend_on_the_chunks_of_replicas():
    final = adjsim.Final(square)
    one, three = (observed(ADJOINTS["reversible"], final, norm=0.1, chunks=n) for n in (1, 3))
    assert largest_difference(one, three) < 1e-10


def test_an_infinite_norm_gives_the_path_bit_for_bit():
    average = adjsim.TimeAverage(square)
    for name in ("direct", "reversible"):
        free, bound = (observed(ADJOINTS[name], average, norm=norm) for norm in (None, math.inf))
        assert all(torch.equal(bound.grad[name], x) for name, x in free.grad.items())


def test_large_cotangents_do_not_overflow():
    clip = adjsim.Clip(2.0, 1)
    found = clip.scaled(
        {"a": torch.tensor([[3e200], [0.0]]), "b": torch.tensor([[4e200], [1.0]])}, 1
    )
    torch.testing.assert_close(found["a"], torch.tensor([[1.2], [0.0]]))
    torch.testing.assert_close(found["b"], torch.tensor([[1.6], [1.0]]))
    # The norm of these overflows too.
    (wide,) = adjsim.Clip(1.0, 1).scaled({"a": torch.full((1, 2500), 1e37).float()}, 1).values()
    torch.testing.assert_close(wide, torch.full((1, 2500), 0.02).float())


def test_clips_are_refused_where_there_are_no_steps():
    with pytest.raises(ValueError, match="norm must be positive"):
        adjsim.Clip(0.0, 100)
    with pytest.raises(ValueError, match="clip and truncate"):
        adjsim.Pathwise(truncate=1.0, clip=adjsim.Clip(1.0, 1))
    ode = adjsim.ODE(Decay())
    simulation = adjsim.Simulation(
        ode, lambda n, _: ode.init(torch.ones(n, 1)), [0.0, 1.0], solver=adjsim.ODESolver()
    )
    with pytest.raises(TypeError, match="clip needs a solver of a fixed step"):
        adjsim.Pathwise(clip=adjsim.Clip(1.0, 1))(
            simulation, adjsim.Final(lambda state: state.y), replicas=1
        )
