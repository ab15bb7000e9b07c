"""The cost of a gradient is proportional to the number of steps, also where the force is a
derivative of a user's energy.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import adjsim
from tests.problems import parameter

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


def ratio(work):
    """Of the processor times of four times as many steps, the least of three."""
    work(20)
    seconds = []
    for steps in (STEPS, 4 * STEPS):
        each = []
        for _ in range(3):
            begun = time.process_time()
            work(steps)
            each.append(time.process_time() - begun)
        seconds.append(min(each))
    return seconds[1] / seconds[0]


@pytest.mark.parametrize(
    "adjoint",
    # The swept ones keep no graph: they are slower, and would show it last.
    [
        pytest.param(x, id=name, marks=() if name == "direct" else pytest.mark.marathon)
        for name, x in ADJOINTS.items()
    ],
)
@pytest.mark.parametrize("potential", POTENTIALS.values(), ids=POTENTIALS)
def test_adjoints(potential, adjoint):
    # Four if it is linear; sixteen in the limit, and ten at this length, where every step walked
    # the whole graph.
    assert ratio(lambda steps: by_adjoint(potential(), adjoint, steps)) < 6.5


@pytest.mark.marathon
@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_estimators(estimator):
    assert ratio(lambda steps: by_estimator(estimator, steps)) < 6.5
