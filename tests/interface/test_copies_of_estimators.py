"""Copies of estimators, estimates, observables, signals and constraints compute the same."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.estimators import Estimator
from adjsim.potentials.signals import signals
from adjsim.potentials.signals.signals import Signal
from tests.copies import WAYS
from tests.problems import parameter

DYNAMICS = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), friction=1.0)
ESTIMATORS = {
    "pathwise": adjsim.Pathwise(adjsim.ReversibleAdjoint()),
    "clipped": adjsim.Pathwise(adjsim.ReversibleAdjoint(), clip=adjsim.Clip(0.1, 3)),
    "score": adjsim.ScoreFunction(),
    "girsanov": adjsim.Girsanov(),
    "reweighting": adjsim.Reweighting(every=0.1),
    "difference": adjsim.FiniteDifference(),
    "forward": adjsim.ForwardSensitivity(),
    "shadowing": adjsim.Shadowing(1, 0.5),
}
SIGNALS = {
    "CubicSpline": adjsim.CubicSpline([0.0, 0.4, 1.0], [1.0, -2.0, 0.5]),
    "PiecewiseLinear": adjsim.PiecewiseLinear([0.0, 0.4, 1.0], [1.0, -2.0, 0.5]),
    "Harmonics": adjsim.Harmonics([1.0, 0.3], [0.5, 1.0], [0.0, 0.2]),
}


copied = pytest.mark.parametrize("copied", WAYS.values(), ids=WAYS)


def starts(replicas, generator):
    return DYNAMICS.init(torch.ones(replicas, 2, 1), generator=generator)


def square(state):
    return state.position.square().mean((-1, -2))


def simulation():
    return adjsim.Simulation(DYNAMICS, starts, [0.0, 1.0], solver=adjsim.BAOAB(0.1))


def estimated(estimator, made, average):
    return estimator(made, average, replicas=4, chunks=2, generator=0)


def test_the_rows_are_all_estimators_and_signals():
    def below(kind):
        return {kind.__name__} | {name for sub in kind.__subclasses__() for name in below(sub)}

    public = {name for name in below(Estimator) if hasattr(adjsim, name)} - {"Estimator"}
    assert {type(row).__name__ for row in ESTIMATORS.values()} == public
    known = {
        name
        for name, kind in vars(signals).items()
        if isinstance(kind, type) and issubclass(kind, Signal) and hasattr(adjsim, name)
    }
    assert set(SIGNALS) == known


@copied
@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"shadowing"}))
def test_a_copy_of_an_estimator_estimates_the_same(name, copied):
    """Copies of what it has estimated, and of the simulation and the observable, too."""
    estimator, made, average = ESTIMATORS[name], simulation(), adjsim.TimeAverage(square)
    found = estimated(estimator, made, average)
    # Reweighting is copied with its samples.
    again = estimated(copied(estimator), copied(made), copied(average))
    known = copied(found)
    for other in (again, known):
        assert torch.equal(other.value, found.value)
        assert list(other.grad) == list(found.grad)
        for key, x in found.grad.items():
            assert torch.equal(other.grad[key], x)
    assert str(known) == str(found)


@copied
def test_a_copy_of_shadowing_has_its_settings(copied):
    assert vars(copied(ESTIMATORS["shadowing"])) == vars(ESTIMATORS["shadowing"])


@copied
def test_a_copy_of_a_comparison_prints_the_same(copied):
    final = copied(adjsim.Final(square))
    made = adjsim.compare(
        simulation(), final, {"a": ESTIMATORS["difference"]}, replicas=4, generator=0
    )
    assert str(copied(made)) == str(made)
    assert torch.equal(copied(made).estimates["a"].value, made.estimates["a"].value)


@copied
@pytest.mark.parametrize("name", SIGNALS)
def test_a_copy_of_a_signal_has_its_values(name, copied):
    signal, other, t = SIGNALS[name], copied(SIGNALS[name]), torch.tensor(0.3)
    assert torch.equal(signal(t), other(t))


@copied
@pytest.mark.parametrize("kind", [adjsim.Positive(), adjsim.Between(0.5, 2.0)])
def test_a_copy_of_a_constraint_maps_the_same(kind, copied):
    x = torch.tensor([0.7, 1.3])
    other = copied(kind)
    assert torch.equal(other.right_inverse(x), kind.right_inverse(x))
    assert torch.equal(other(kind.right_inverse(x)), kind(kind.right_inverse(x)))
