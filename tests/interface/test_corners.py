"""Every estimator on observables of a parameter alone, and of nothing; on a parameter under two
names, and on none.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim
from adjsim import (
    CheckpointAdjoint,
    Final,
    FiniteDifference,
    ForwardSensitivity,
    Girsanov,
    Pathwise,
    Reweighting,
    ScoreFunction,
    Simulation,
    TimeAverage,
)
from tests.problems import parameter

PATH = [
    Pathwise(),
    Pathwise(CheckpointAdjoint()),
    Pathwise(truncate=0.2),
    FiniteDifference(),
    ForwardSensitivity(),
    Girsanov(),
]
STATIONARY = [ScoreFunction(), Reweighting(every=0.1)]
EVERY = [(estimator, kind) for estimator in PATH for kind in (Final, TimeAverage)]
EVERY += [(estimator, TimeAverage) for estimator in STATIONARY]
every = pytest.mark.parametrize(
    ("estimator", "kind"), EVERY, ids=lambda x: x.__name__ if isinstance(x, type) else repr(x)
)


def problem(potential, friction=1.0):
    dynamics = adjsim.OverdampedLangevin(potential, 1.0, friction)
    return Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.ones(n, 1, 1)),
        [0.0, 0.4],
        adjsim.EulerMaruyama(0.1),
    )


def estimated(estimator, simulation, observable, replicas=6):
    estimate = estimator(
        simulation,
        observable,
        replicas=replicas,
        chunks=2,
        generator=torch.Generator().manual_seed(0),
    )
    assert str(estimate)
    return estimate


def squared(state):
    return state.position[:, 0, 0] ** 2


@every
def test_an_observable_that_a_parameter_alone_enters(estimator, kind):
    simulation = problem(adjsim.Harmonic(parameter(1.5)))
    observable = kind(lambda s: simulation.dynamics.potential.k**2 * torch.ones(len(s.position)))
    estimate = estimated(estimator, simulation, observable)
    # Central differences are exact for a square.
    assert float(estimate.grad["potential.k"]) == pytest.approx(3.0, rel=1e-10)
    assert not any("no derivative" in reason for reason in estimate.warnings)


@every
def test_an_observable_of_nothing(estimator, kind):
    constant = kind(lambda s: torch.ones(len(s.position)))
    estimate = estimated(estimator, problem(adjsim.Harmonic(parameter(1.5))), constant)
    assert float(estimate.grad["potential.k"]) == 0.0


@every
def test_no_parameters_are_refused(estimator, kind):
    """Somebody has forgotten nn.Parameter."""
    with pytest.raises(ValueError, match="no parameter that requires grad"):
        estimated(estimator, problem(adjsim.Harmonic(1.5)), kind(squared))


class Twice(nn.Module):
    """One tensor under two names, one that is not used, and one without entries."""

    def __init__(self):
        super().__init__()
        self.a = self.b = parameter(1.2)
        self.idle, self.none = parameter(2.0), nn.Parameter(torch.zeros(0))

    def forward(self, position):
        return (0.5 * self.a * position**2 + 0.1 * self.b * position**4).sum((-1, -2))


@every
def test_a_parameter_under_two_names(estimator, kind):
    """By its first name, the sum over both uses; in the potential, and the same as of two uses of
    one name.
    """
    estimate = estimated(estimator, problem(Twice()), kind(squared))
    assert list(estimate.grad) == ["potential.a", "potential.idle", "potential.none"]
    once = Twice()
    once.b = None
    once.forward = lambda q: (0.5 * once.a * q**2 + 0.1 * once.a * q**4).sum((-1, -2))
    same = estimated(estimator, problem(once), kind(squared))
    torch.testing.assert_close(
        estimate.grad["potential.a"], same.grad["potential.a"], rtol=1e-12, atol=0
    )
    assert float(estimate.grad["potential.a"]) != 0
    assert float(estimate.grad["potential.idle"]) == 0
    assert estimate.grad["potential.none"].shape == (0,)


def test_a_parameter_of_potential_and_friction():
    """Pathwise, tangents and differences agree; the path score is refused, since it scales the
    noise as well.
    """
    k = parameter(1.2)
    simulation = problem(adjsim.Harmonic(k), friction=k)
    found = [
        estimated(e, simulation, Final(squared)).grad["friction"]
        for e in (Pathwise(), ForwardSensitivity())
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0)
    difference = estimated(FiniteDifference(1e-5), simulation, Final(squared)).grad["friction"]
    torch.testing.assert_close(found[0], difference, rtol=1e-8, atol=0)
    with pytest.raises(ValueError, match="'friction' scales the noise"):
        estimated(Girsanov(), simulation, Final(squared))


@pytest.mark.parametrize("kind", [Final, TimeAverage])
def test_an_observable_that_reads_a_parameter_as_a_tensor_of_its_own(kind):
    """The observable does not reach the parameter through the module, and is differentiated."""
    k = parameter(1.2)
    simulation, observable = problem(adjsim.Harmonic(k)), kind(lambda s: k * squared(s))
    exact = estimated(Pathwise(), simulation, observable).grad["potential.k"]
    difference = estimated(FiniteDifference(1e-5), simulation, observable).grad["potential.k"]
    torch.testing.assert_close(exact, difference, rtol=1e-8, atol=0)
    tangent = estimated(ForwardSensitivity(), simulation, observable).grad["potential.k"]
    torch.testing.assert_close(tangent, exact, rtol=1e-10, atol=0)


def test_a_step_times_a_parameter_is_said():
    simulation = problem(adjsim.Harmonic(parameter(1.5)))
    observable = Final(lambda s: simulation.dynamics.potential.k * (s.position[:, 0, 0] > 0.7))
    estimate = estimated(Pathwise(), simulation, observable, replicas=64)
    assert any("no derivative along a path" in reason for reason in estimate.warnings)


def test_differences_leave_parameters_as_they_were():
    """Whoever reads them sees the moved values meanwhile, and the former ones afterwards: buffers
    of a network alike.
    """
    network = parameter(0.5)
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(1.5)), network * 2.0, 1.0)
    simulation = Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.ones(n, 1, 1)),
        [0.0, 0.4],
        adjsim.EulerMaruyama(0.1),
    )
    k, kT = dynamics.potential.k, dynamics.kT
    seen, versions, before = (
        set(),
        (k._version, kT._version),
        (float(k.detach()), float(kT.detach())),
    )

    def watched(state):
        seen.add(
            (float(k.detach()), float(dynamics.potential.k.detach()), float(dynamics.kT.detach()))
        )
        return squared(state)

    estimate = estimated(FiniteDifference(), simulation, Final(watched))
    assert all(held == given for held, given, _ in seen)
    assert (float(k.detach()), float(kT.detach())) == before
    assert len({given for _, given, _ in seen}) == 3
    assert len({given for _, _, given in seen}) == 3
    assert (k._version, kT._version) == versions
    exact = estimated(Pathwise(), simulation, Final(squared))
    for name in ("kT", "potential.k"):
        assert float(estimate.grad[name]) == pytest.approx(float(exact.grad[name]), rel=1e-5)
