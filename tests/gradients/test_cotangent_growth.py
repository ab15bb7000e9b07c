"""Sweeps measure how cotangents grow, and say where the gradient of a path means little."""

from __future__ import annotations

import warnings

import pytest
import torch

import adjsim
from adjsim import CheckpointAdjoint, ReversibleAdjoint, TimeAverage
from adjsim.adjoints.sweep.recorder import CotangentGrowth
from adjsim.dynamics.cotangents import Cotangents
from tests.problems import parameter


def hill(steps, compile=False, record=None, frames=1):
    """A path on a hill, x' = 1.1 x in each step of the map, whose cotangents grow likewise."""
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(-1.0)), kT=1e-6)
    return adjsim.simulate(
        dynamics,
        dynamics.init(torch.full((2, 3, 2), 0.5)),
        torch.linspace(0.0, 0.1 * steps, frames + 1),
        solver=adjsim.EulerMaruyama(0.1),
        adjoint=CheckpointAdjoint(),
        compile=compile,
        record=record,
        generator=0,
    )


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_growth_is_that_of_the_map(compile):
    """For the final state, for frames, for a record and for a time average."""
    made = hill(20, compile=compile)
    assert made.stats["cotangent_growth"] is None
    (3.0 * made.final.position).sum().backward()
    assert made.stats["cotangent_growth"] == pytest.approx(1.1**20, rel=1e-12)
    # Frames after 10 and 20 steps, and the given start.
    for record in (None, lambda state: state.position):
        made = hill(20, compile=compile, record=record, frames=2)
        (made.position if record is None else made.record).sum().backward()
        expected = (1.1**20 + 1.1**10) / 2
        assert made.stats["cotangent_growth"] == pytest.approx(expected, rel=1e-12)
    made = hill(20, compile=compile, record=TimeAverage(lambda state: state.position))
    made.record.sum().backward()
    expected = sum(1.1**k for k in range(1, 21)) / 20
    assert made.stats["cotangent_growth"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("ignore:the cotangents of the state grew")
def test_the_growth_may_be_beyond_the_largest_square():
    """1.1^4000 is 4e165, whose square is no double."""
    made = hill(4000, compile=True)
    made.final.position.sum().backward()
    # Each step rounds, and the rounding errors of the map are multiplied.
    assert made.stats["cotangent_growth"] == pytest.approx(1.1**4000, rel=1e-10)


def test_a_large_growth_is_said_once():
    """1.1^200 is 1.9e8, and 1.1^190 is below the limit."""
    made = hill(200)
    with pytest.warns(UserWarning, match=r"grew by a factor of 1\.9e\+08 .*choosing_an_estimator"):
        made.final.position.sum().backward()
    # Warnings of adjsim are errors in the tests.
    hill(190).final.position.sum().backward()


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(), ReversibleAdjoint()])
def test_units_and_fields_that_outputs_hardly_reach_do_not_matter(adjoint):
    """A well has no growth: for large times in small units, and for an energy at its minimum."""

    def growth(mass, dt, loss):
        dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(mass)), mass)
        start = dynamics.init(torch.full((1, 1, 1), 1e-16), torch.ones(1, 1, 1))
        made = adjsim.simulate(
            dynamics,
            start,
            [0.0, 40 * dt],
            solver=adjsim.VelocityVerlet(dt),
            adjoint=adjoint,
        )
        loss(made.final).backward()
        return made.stats["cotangent_growth"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert growth(1e-26, 0.1, lambda s: s.position.sum()) == pytest.approx(1.0, abs=0.4)
        energy = growth(1.0, 0.1, lambda s: (s.position.square() + s.momentum.square()).sum())
    assert energy < 2.0


def test_an_interrupted_sweep_goes_on_from_its_growth():
    one = CotangentGrowth({"position": torch.tensor(2.0), "momentum": torch.tensor(0.0)})
    one.inject("position", torch.tensor(1.0))
    one.observe(Cotangents({"position": torch.full((4,), 6.0), "momentum": torch.ones(4)}))
    other = CotangentGrowth({"position": torch.tensor(0.0), "momentum": torch.tensor(0.0)})
    other.load_state(one.state())
    assert other.factor() == one.factor() == 4.0
