"""An estimate is of one dynamics: a change between its chunks is refused."""

from threading import Thread

import pytest
import torch
from torch import nn

import adjsim
from tests.problems import parameter

# What another thread does at the 40th evaluation of the observable. A change by the observable
# itself would reach the copy of a run alone.
CHANGE = []


def observed(state):
    COUNT[0] += 1
    if COUNT[0] == 40:
        thread = Thread(target=CHANGE[0])
        thread.start()
        thread.join()
    return state.position.square().sum((-2, -1))


COUNT = [0]


def estimate(estimator, dynamics, change, store=None):
    COUNT[0], CHANGE[:] = 0, [change]

    start = torch.zeros(8, 1, 1, dtype=torch.float64)
    simulation = adjsim.Simulation(
        dynamics,
        lambda replicas, generator: dynamics.init(start[:replicas], start[:replicas]),
        [0.0, 1.0],
        solver=adjsim.BAOAB(0.1),
    )
    return estimator(
        simulation,
        adjsim.TimeAverage(observed),
        replicas=8,
        chunks=8,
        generator=0,
        store=store,
    )


def langevin():
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), kT=1.0, friction=1.0)
    dynamics.potential.scale = 1.0
    return dynamics


@pytest.mark.parametrize("estimator", [adjsim.Pathwise(), adjsim.ScoreFunction()])
def test_a_parameter_that_changes_is_named(estimator):
    dynamics = langevin()

    def step():
        with torch.no_grad():
            dynamics.potential.k.mul_(1.1)

    with pytest.raises(RuntimeError, match=r"potential\.k.* has changed while an estimate"):
        estimate(estimator, dynamics, step)


def test_data_that_changes_is_not_stored(tmp_path):
    dynamics = langevin()
    with pytest.raises(RuntimeError, match=r"potential\.k.* has changed"):
        estimate(
            adjsim.Pathwise(),
            dynamics,
            lambda: dynamics.potential.k.data.mul_(1.1),
            tmp_path / "store",
        )
    # A chunk evaluates the observable at its ten steps, and at its start in a check.
    assert len(list((tmp_path / "store").glob("chunk-*"))) == 3


@pytest.mark.parametrize("change", ["attribute", "parameter"])
def test_what_is_replaced_is_refused(change):
    dynamics = langevin()

    def step():
        if change == "attribute":
            dynamics.potential.scale = 2.0
        else:
            dynamics.potential.k = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    with pytest.raises(RuntimeError, match="has changed while an estimate"):
        estimate(adjsim.Pathwise(), dynamics, step)


def test_a_module_that_is_made_by_its_first_evaluation_is_estimated():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1)).double()

        def forward(self, position):
            return self.net(position.flatten(-2)).squeeze(-1)

    dynamics = adjsim.Langevin(Net(), kT=1.0, friction=1.0)
    found = estimate(adjsim.Pathwise(), dynamics, lambda: None)
    assert all(torch.isfinite(x).all() for x in found.grad.values())
