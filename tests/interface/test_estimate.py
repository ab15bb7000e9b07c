"""What an estimate says of itself: warnings, and effective numbers of samples."""

from __future__ import annotations

import math
import time

import pytest
import torch

import adjsim
from adjsim.estimators.estimate import FEW_CONTRIBUTING, FEW_SAMPLES, LARGE_GROWTH, GradientEstimate
from adjsim.estimators.probes import evenly_spaced
from adjsim.estimators.score_function import ess_of
from tests.problems import parameter

ONE = torch.tensor(1.0)
# Diagnostics, and what the warning says; None for no warning.
WARNINGS = [
    ({"ess": FEW_SAMPLES - 1.0, "replicas": 2}, "independent samples only"),
    ({"ess": float(FEW_SAMPLES), "replicas": 2}, None),
    ({"ess": 1.0, "replicas": 1}, None),  # an error bar is not even defined
    ({"contributing": FEW_CONTRIBUTING - 1.0, "replicas": 64}, "19 of 64 replicas make up"),
    ({"contributing": float(FEW_CONTRIBUTING), "replicas": 64}, None),
    ({"contributing": 0.0, "replicas": 64}, "the same in all replicas"),
    ({"reconstruction_error": 2e-6}, "lost the trajectory"),
    ({"reconstruction_error": 1e-6}, None),
    ({"growth": 1.1 * math.log(LARGE_GROWTH), "duration": 1.0, "lost_at": None}, "grows as exp"),
    ({"growth": 0.9 * math.log(LARGE_GROWTH), "duration": 1.0, "lost_at": None}, None),
    ({"growth": 0.1, "duration": 2.0, "lost_at": 1.5}, "beyond a time of about 1.5"),
    ({"growth": 0.1, "duration": 2.0, "lost_at": 2.5}, None),
    ({"growth": 0.1, "duration": 2.0, "lost_at": None}, None),
    ({"smooth": False}, "no derivative along a path"),
    ({"smooth": True}, None),
    ({"truncate": 0.5}, "cut off after 0.5"),
    ({"equilibration": 4.1}, "had not come to equilibrium"),
    ({"equilibration": 4.0}, None),
]


@pytest.mark.parametrize(("diagnostics", "expected"), WARNINGS)
def test_warnings(diagnostics, expected):
    found = GradientEstimate(ONE, ONE, {}, {}, "path", diagnostics).warnings
    if expected is None:
        assert found == []
    else:
        (reason,) = found
        assert expected in reason


@pytest.mark.parametrize("replicas", [2, 3])
def test_effective_samples_of_time_averages(replicas):
    """The variance of the observable over that of the mean of the replicas' averages."""
    each = torch.arange(float(replicas))
    part = {"each": each, "variance": torch.tensor(6.0), "O": each.mean()}
    expected = 6.0 / float(each.var() / replicas)
    assert ess_of([part], [replicas]) == pytest.approx(expected)


def test_effective_samples_of_what_hardly_varies_within_a_run():
    """At least one, and every replica where nothing varies."""
    each = torch.tensor([0.0, 1.0])
    part = {"each": each, "variance": torch.tensor(0.01), "O": each.mean()}
    assert ess_of([part], [2]) == 1.0
    part = {"each": 0 * each, "variance": torch.tensor(0.0), "O": torch.tensor(0.0)}
    assert ess_of([part], [2]) == 2.0
    assert ess_of([{**part, "each": each[:1]}], [1]) == 1.0


def test_girsanov_of_several_entries():
    """The explicit part of an average of several entries, and the weights of each parameter."""

    def estimates(estimator):
        dynamics = adjsim.OverdampedLangevin(
            adjsim.Harmonic(parameter(1.3)), kT=parameter(0.8), friction=1.0
        )
        dynamics.kT.requires_grad_(False)

        def observe(state):
            x = state.position[:, 0, 0]
            return torch.stack([dynamics.potential.k * x**2, x, dynamics.potential.k * x**4], -1)

        simulation = adjsim.Simulation(
            dynamics,
            lambda n, generator: dynamics.init(torch.ones(n, 1, 1)),
            [0.0, 0.4],
            adjsim.EulerMaruyama(0.02),
        )
        return estimator(
            simulation, adjsim.TimeAverage(observe), replicas=8_000, chunks=8, generator=3
        )

    path, score = estimates(adjsim.Pathwise()), estimates(adjsim.Girsanov())
    assert score.grad["potential.k"].shape == (3,)
    error = torch.hypot(path.grad_stderr["potential.k"], score.grad_stderr["potential.k"])
    assert bool(((path.grad["potential.k"] - score.grad["potential.k"]).abs() < 4 * error).all())
    assert bool((error < 0.1).all())
    # Of weights for a change of k by a tenth: many, but not all.
    assert 4_000 < score.diagnostics["ess"] < 8_000


@pytest.mark.parametrize("shape", [(), (2,)])
def test_the_surrogate_of_a_parameter_with_axes(shape):
    """Its value and its gradient, for each entry of the observable and of the parameter."""
    module = torch.nn.Module()
    module.k = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    value, grad = torch.rand(shape), torch.rand(*shape, 2, 3)
    made = GradientEstimate(value, value, {"k": grad}, {"k": grad}, "path")
    surrogate = made.surrogate(module)
    assert torch.equal(surrogate, value)
    for index in [()] if shape == () else [(0,), (1,)]:
        (found,) = torch.autograd.grad(surrogate[index], module.k, retain_graph=True)
        assert torch.equal(found, grad[index])


def test_an_estimator_that_is_used_again_reads_the_dynamics_it_is_given():
    """One observable, one estimator, two dynamics."""
    estimator, observable = adjsim.ScoreFunction(burn_in=1.0), adjsim.TimeAverage(squared)
    for k in (0.5, 2.0):
        estimate = estimator(harmonic(k), observable, replicas=512, chunks=8, generator=0)
        error = estimate.grad_stderr["potential.k"]
        assert abs(float(estimate.grad["potential.k"]) + 1 / k**2) < 4 * float(error) < 1 / k**2


@pytest.mark.parametrize("make", [adjsim.ScoreFunction, adjsim.Reweighting])
def test_an_estimator_that_is_used_again_reads_the_observable_it_is_given(make):
    """And an observable of several entries has the gradients of each alone, up to the correction
    for the number of independent samples, which is one for all entries.
    """
    simulation = harmonic(1.3, 3.0)

    def joined(state):
        return torch.stack([squared(state), state.position[:, 0, 0] + 3], -1)

    def entry(i):
        return lambda state: joined(state)[:, i]

    def run(estimator, function):
        observable = adjsim.TimeAverage(function, burn_in=0.5)
        return estimator(simulation, observable, replicas=32, chunks=2, generator=1)

    together, again = run(make(), joined), make()
    for i in range(2):
        begun = time.perf_counter()
        alone = run(again if make is adjsim.ScoreFunction else make(), entry(i))
        assert 0 < alone.diagnostics["seconds"] <= time.perf_counter() - begun
        for name, grad in alone.grad.items():
            torch.testing.assert_close(together.grad[name][i], grad, rtol=0.02, atol=1e-12)
        torch.testing.assert_close(together.value[i], alone.value, rtol=1e-12, atol=0)


def test_passes_over_the_energy_of_a_score():
    """Forty steps, and one gradient at each of the twenty that are averaged."""
    observable = adjsim.TimeAverage(squared, burn_in=1.0)
    estimate = adjsim.ScoreFunction()(harmonic(1.0, 2.0), observable, replicas=4, chunks=1)
    assert estimate.diagnostics["energy_evaluations"] == 40 + 20


def test_steps_that_are_probed_are_spread_over_the_run():
    assert evenly_spaced(5, 21, 8) == {7, 9, 11, 13, 15, 17, 19, 21}
    assert evenly_spaced(0, 2, 8) == {1, 2}


def squared(state):
    return state.position[:, 0, 0] ** 2


def harmonic(k: float, time: float = 6.0) -> adjsim.Simulation:
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(k)), kT=1.0, friction=1.0)
    return adjsim.Simulation(
        dynamics,
        lambda n, generator: dynamics.init(torch.zeros(n, 1, 1)),
        [0.0, time],
        adjsim.LeimkuhlerMatthews(0.05),
    )
