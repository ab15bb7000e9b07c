"""The cost of a gradient is proportional to the number of steps, also where the force is a
derivative of a user's energy.
"""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn

import adjsim
from tests.problems import parameter, square

STEPS = 150


class Own(nn.Module):
    """An energy without closed forms."""

    def __init__(self):
        super().__init__()
        self.k = parameter(1.0)

    def forward(self, position):
        return self.k * (position**4).sum((-1, -2))


class OwnPair(adjsim.potentials.PairPotential):
    """A pair energy whose slope is taken by automatic differentiation."""

    def __init__(self):
        super().__init__()
        self.k = parameter(1.0)

    def pair_energy(self, s):
        return self.k * torch.exp(-s)


POTENTIALS = {"own": Own, "pair": OwnPair, "muller-brown": adjsim.MullerBrown}
ADJOINTS = {
    "direct": adjsim.DirectAdjoint(),
    "checkpoint": adjsim.CheckpointAdjoint(),
    "reversible": adjsim.ReversibleAdjoint(),
}
AVERAGE = adjsim.TimeAverage(lambda state: (state.position**2).sum((-1, -2)))
ESTIMATORS = {
    "pathwise": adjsim.Pathwise(),
    "score": adjsim.ScoreFunction(),
    "reweighting": adjsim.Reweighting(),
    "forward": adjsim.ForwardSensitivity(),
    "differences": adjsim.FiniteDifference(),
}


def by_adjoint(potential, adjoint, steps):
    dynamics = adjsim.Hamiltonian(potential, parameter(1.0))
    start = dynamics.init(torch.tensor([[0.1, 0.3], [1.2, 0.2]]), torch.zeros(2, 2))
    solver = adjsim.VelocityVerlet(1e-4)
    run = adjsim.simulate(dynamics, start, [0.0, steps * 1e-4], solver=solver, adjoint=adjoint)
    (run.final.position**2).sum().backward()


def by_estimator(estimator, steps):
    dynamics = adjsim.Langevin(Own(), kT=1.0)
    simulation = adjsim.Simulation(
        dynamics,
        lambda n, generator: dynamics.init(torch.ones(n, 1, 2), generator=generator),
        [0.0, steps * 0.01],
        adjsim.BAOAB(0.01),
    )
    estimator(simulation, AVERAGE, replicas=2, chunks=2, generator=0)


def ratio(prepare, steps, times=4):
    """Of the processor time of ``times`` as many steps to that of ``steps``.

    ``prepare`` does what is not timed, and returns what is. Other work on the machine only adds
    time, so the least of several measurements is compared with the least.
    """

    def seconds(steps):
        work = prepare(steps)
        gc.collect()
        begun = time.process_time()
        work()
        return time.process_time() - begun

    seconds(20)
    pairs = [(seconds(steps), seconds(times * steps)) for _ in range(3)]
    short, long = (min(each) for each in zip(*pairs, strict=True))
    return long / short


def mark(potential, adjoint):
    """The swept adjoints keep no graph: they are slower, and would show it last."""
    return [
        pytest.mark.slow if (potential, adjoint) == ("pair", "direct") else pytest.mark.marathon
    ]


@pytest.mark.parametrize(
    ("potential", "adjoint"),
    [pytest.param(p, a, marks=mark(p, a), id=f"{p}-{a}") for p in POTENTIALS for a in ADJOINTS],
)
def test_adjoints(potential, adjoint):
    # Four if it is linear; sixteen in the limit, and ten at this length, where every step walked
    # the whole graph.
    make, adjoint = POTENTIALS[potential], ADJOINTS[adjoint]
    assert ratio(lambda steps: lambda: by_adjoint(make(), adjoint, steps), STEPS) < 6.5


@pytest.mark.marathon
@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_estimators(estimator):
    assert ratio(lambda steps: lambda: by_estimator(estimator, steps), STEPS) < 6.5


def backward_of_saves(solver, adjoint, every):
    """A backward pass of a run that saves each ``every``-th step."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    start = dynamics.init(*(x.repeat(50, 1) for x in square()))

    def prepare(steps):
        times = torch.arange(0, steps + 1, every) * 0.01
        run = adjsim.simulate(dynamics, start, times, solver=solver, adjoint=adjoint)
        return run.position.square().sum().backward

    return prepare


@pytest.mark.parametrize(
    "adjoint",
    [
        pytest.param(adjoint, marks=pytest.mark.slow if name == "direct" else pytest.mark.marathon)
        for name, adjoint in {**ADJOINTS, "backsolve": adjsim.BacksolveAdjoint()}.items()
    ],
    ids=repr,
)
def test_backward_passes_with_saves(adjoint):
    backsolve = isinstance(adjoint, adjsim.BacksolveAdjoint)
    solver = adjsim.ODESolver("rk4", dt=0.01) if backsolve else adjsim.VelocityVerlet(0.01)
    steps = 40 if backsolve else 120
    # Four if it is linear; sixteen if each saved step walked the whole graph.
    assert ratio(backward_of_saves(solver, adjoint, every=20), steps) < 6.5


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(adjsim.VelocityVerlet(0.01), marks=pytest.mark.slow),
        pytest.param(adjsim.ODESolver("rk4", dt=0.01), marks=pytest.mark.marathon),
    ],
    ids=repr,
)
def test_many_saves_under_direct(solver):
    prepare = backward_of_saves(solver, adjsim.DirectAdjoint(), every=1)
    # Six if it is linear, 36 if each saved step walked the whole graph.
    assert ratio(prepare, 60, times=6) < 12
