"""What an estimate says of itself: warnings, and effective numbers of samples."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

import adjsim
from adjsim import Pathwise
from adjsim.adjoints.sweep import passes
from adjsim.core.norms import norm
from adjsim.estimators.base import Chunk
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
    ({"reconstruction_error": 2e-3}, "lost the trajectory"),
    ({"reconstruction_error": 1e-3}, None),
    ({"growth": 1.1 * math.log(LARGE_GROWTH), "duration": 1.0, "lost_at": None}, "grows as exp"),
    ({"growth": 0.9 * math.log(LARGE_GROWTH), "duration": 1.0, "lost_at": None}, None),
    ({"growth": 0.1, "duration": 2.0, "lost_at": 1.5}, "beyond a time of about 1.5"),
    ({"growth": 0.1, "duration": 2.0, "lost_at": 2.5}, None),
    ({"growth": 0.1, "duration": 2.0, "lost_at": None}, None),
    ({"smooth": False}, "no derivative along a path"),
    ({"smooth": True}, None),
    ({"truncate": 0.5}, "cut off after 0.5"),
    # The halves of 16 chunks differ by 5.5 in one of 16,000 runs, those of 4 chunks by 33.
    ({"equilibration": 5.6, "chunks": 16}, "had not come to equilibrium"),
    ({"equilibration": 5.4, "chunks": 16}, None),
    ({"equilibration": 32.0, "chunks": 4}, None),
]


@pytest.mark.parametrize(("diagnostics", "expected"), WARNINGS)
def test_warnings(diagnostics, expected):
    found = GradientEstimate(ONE, ONE, {}, {}, "path", diagnostics).warnings
    if expected is None:
        assert found == []
    else:
        (reason,) = found
        assert expected in reason


@pytest.mark.parametrize(
    ("diagnostics", "expected"),
    [
        ({"ess": 20.0, "replicas": 20, "chunks": 16}, "independent samples only"),
        ({"growth": 5.0, "duration": 1.0, "lost_at": None, "chunks": 16}, "grows as exp"),
    ],
)
def test_a_gradient_known_to_a_tenth_is_not_accused(diagnostics, expected):
    """With 16 chunks the interval is 2.13 errors to both sides, and 0.2 of the gradient is known.

    The gradient of two samples is not known from their agreement.
    """
    for error, few, known in ((0.093, {}, True), (0.095, {}, False), (0.05, {"ess": 2.0}, False)):
        stderr, info = torch.tensor([error, 0.0]), diagnostics | few
        grad = {"k": torch.tensor([1.0, 0.0])}
        warned = GradientEstimate(ONE, ONE, grad, {"k": stderr}, "path", info).warnings
        assert any(expected in reason for reason in warned) == (not known)


def test_a_run_that_is_not_cut_off_does_not_say_so():
    last = adjsim.Final(squared)
    for cut, said in ((1.0, True), (2.0, False), (3.0, False)):
        found = adjsim.Pathwise(truncate=cut)(spring(1.0), last, replicas=64, generator=0)
        assert any("cut off" in reason for reason in found.warnings) == said


@pytest.mark.slow
def test_runs_in_equilibrium_are_not_accused():
    """Of three chunks, the halves of one entry in thirteen differ by more than four errors."""
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(1.0)), kT=1.0, friction=1.0)
    simulation = adjsim.Simulation(
        dynamics,
        lambda n, generator: dynamics.init(torch.randn(n, 1, 1, generator=generator)),
        [0.0, 2.0],
        adjsim.LeimkuhlerMatthews(0.1),
        compile=True,
    )
    bins = torch.linspace(-1.0, 1.0, 20)

    def density(state):
        return torch.exp(-((state.position[:, 0] - bins) ** 2) / 0.02)

    apart = 0
    for seed in range(8):
        average = adjsim.TimeAverage(density)
        found = adjsim.ScoreFunction()(simulation, average, replicas=24, chunks=3, generator=seed)
        apart += found.diagnostics["equilibration"] > 4
        assert not any("equilibrium" in reason for reason in found.warnings)
    assert apart > 0


def test_every_entry_is_printed():
    value, error = torch.tensor([1.0, 2.0]), torch.tensor([0.1, math.nan])
    grad = {"kT": torch.tensor([3.0, 4.0]), "k": torch.arange(300.0).reshape(2, 150)}
    stderr = {name: torch.full_like(x, 0.25) for name, x in grad.items()}
    lines = str(GradientEstimate(value, error, grad, stderr, "path")).splitlines()
    assert lines[:5] == [
        "path estimate",
        "  value[0]            1 ± 0.1",
        "  value[1]            2",
        "  d value[0]/d kT     3 ± 0.25",
        "  d value[1]/d kT     4 ± 0.25",
    ]
    assert lines[5] == "  d value[0]/d k[0]   0 ± 0.25"
    assert lines[-2:] == [
        "  d value[0]/d k[99]  99 ± 0.25",
        "  d value/d k         and 200 entries more, norm 2992.5",
    ]
    one = GradientEstimate(ONE, ONE / 8, {"k": 2 * ONE}, {"k": ONE / 4}, "stationary")
    assert str(one) == "stationary estimate\n  value  1 ± 0.12\n  d/d k  2 ± 0.25"


@pytest.mark.parametrize("replicas", [2, 3])
def test_effective_samples_of_time_averages(replicas):
    """The variance of the observable over that of the mean of the replicas' averages."""
    each = torch.arange(float(replicas))
    part = {"each": each, "variance": torch.tensor(6.5), "O": each.mean()}
    expected = 6.5 / float(each.var() / replicas)
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


@pytest.mark.slow
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


# Found by mutants that no test noticed.


class Ramp(adjsim.ForceField):
    """A force a t."""

    def __init__(self):
        super().__init__()
        self.a = parameter(0.7)

    def forward(self, t, position):
        return self.a * t + 0 * position


@pytest.mark.parametrize("truncate", [0.3, 5.0])
def test_truncated_gradients_of_a_ramp(truncate):
    """x' = x + a t dt + noise, from t = 1 on: the derivative is a sum of times, cut where the
    docstring says.
    """
    dt, steps, width = 0.1, 10, min(10, round(truncate / 0.1))
    dynamics = adjsim.OverdampedLangevin(Ramp(), kT=0.1, friction=1.0)
    simulation = adjsim.Simulation(
        dynamics,
        lambda n, generator: dynamics.init(torch.zeros(n, 1, 1)),
        [1.0, 2.0],
        adjsim.EulerMaruyama(dt),
    )
    pushes = [dt * (1.0 + dt * n) for n in range(steps)]

    def gradient(observable):
        whole, found = (
            adjsim.Pathwise(truncate=cut)(simulation, observable, replicas=4, chunks=2, generator=0)
            for cut in (None, truncate)
        )
        # The path is the same.
        torch.testing.assert_close(found.value, whole.value, rtol=1e-13, atol=0)
        return float(found.grad["potential.a"])

    final = gradient(adjsim.Final(lambda state: state.position[:, 0, 0]))
    assert final == pytest.approx(sum(pushes[-width:]), rel=1e-12)
    means = [
        sum(pushes[first : step + 1])
        for first in range(0, steps, width)
        for step in range(first, min(first + width, steps))
    ]
    mean = gradient(adjsim.TimeAverage(lambda state: state.position[:, 0, 0]))
    assert mean == pytest.approx(sum(means) / steps, rel=1e-12)


def spring(k, time=2.0, dt=0.1, solver=adjsim.EulerMaruyama):
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(k)), kT=0.5, friction=1.0)
    return adjsim.Simulation(
        dynamics,
        lambda n, generator: dynamics.init(torch.ones(n, 1, 1)),
        [0.0, time],
        solver(dt),
    )


def test_errors_and_growth_of_gradients_whose_squares_overflow():
    """On a hill of curvature -1 a step of dt = 1 doubles distances."""
    last = adjsim.Final(lambda state: state.position[:, 0, 0])
    # 2^560 is 4e168, and its square overflows.
    large = adjsim.Pathwise()(spring(-1.0, 560.0, 1.0), last, replicas=64, chunks=8, generator=0)
    grad, stderr = large.grad["potential.k"], large.grad_stderr["potential.k"]
    assert 1e155 < float(stderr) < 1e180
    assert float(large.value_stderr) > 1e160
    assert large.diagnostics["growth"] == pytest.approx(math.log(2), rel=1e-12)
    lost = 560 + math.log(abs(float(grad / stderr))) / math.log(2)
    assert large.diagnostics["lost_at"] == pytest.approx(lost, rel=1e-9)
    # The gradient of this sum is known; with an error of its size it would not be.
    assert large.warnings == []
    unknown = replace(large, grad_stderr={"potential.k": grad.abs()})
    assert any("grows as exp(0.693 t)" in reason for reason in unknown.warnings)
    steep = adjsim.Final(lambda state: 1e150 * state.position[:, 0, 0].sin())
    beyond = adjsim.Pathwise()(spring(-1.0, 560.0, 1.0), steep, replicas=4, chunks=2, generator=0)
    assert beyond.diagnostics["growth"] is None
    assert "potential.k is not finite" in beyond.warnings[0]


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_norms_do_not_overflow_or_vanish(scale):
    x = scale * torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    assert float(norm(x)) == pytest.approx(5 * scale, rel=1e-15)
    assert norm(x, 1).tolist() == pytest.approx([5 * scale, 0.0], rel=1e-15)
    assert norm(1j * x, 0).tolist() == pytest.approx([3 * scale, 4 * scale], rel=1e-15)
    assert float(norm(x[:0])) == 0.0
    assert math.isnan(float(norm(x / 0.0)))
    assert math.isinf(float(norm(x + math.inf)))


def test_growth_and_the_time_at_which_a_gradient_is_lost():
    last = adjsim.Final(lambda state: state.position[:, 0, 0] ** 2)
    # On a hill of curvature -1 a step multiplies distances by 1.1.
    found = adjsim.Pathwise()(spring(-1.0), last, replicas=64, chunks=8, generator=0)
    growth = math.log(1.1) / 0.1
    assert found.diagnostics["growth"] == pytest.approx(growth, rel=1e-12)
    ratio = abs(float(found.grad["potential.k"])) / float(found.grad_stderr["potential.k"])
    assert found.diagnostics["lost_at"] == pytest.approx(2 + math.log(ratio) / growth, rel=1e-9)
    # A step of k dt = 1 forgets its start: there is no rate.
    found = adjsim.Pathwise()(spring(10.0), last, replicas=8, chunks=2, generator=0)
    assert found.diagnostics["growth"] is None
    # In a well paths converge, and nothing is lost.
    found = adjsim.Pathwise()(spring(1.0), last, replicas=8, chunks=2, generator=0)
    assert found.diagnostics["growth"] == pytest.approx(math.log(0.9) / 0.1, rel=1e-12)
    assert found.diagnostics["lost_at"] is None


def test_intervals_are_those_of_student():
    last = adjsim.Final(lambda state: state.position[:, 0, 0])
    found = adjsim.Pathwise()(spring(1.0), last, replicas=12, chunks=3, generator=0)
    # The 97.5 % point of Student's t with two degrees of freedom.
    for name, middle, error in (
        (None, found.value, found.value_stderr),
        ("potential.k", found.grad["potential.k"], found.grad_stderr["potential.k"]),
    ):
        low, high = found.interval(name)
        assert float(middle - low) == pytest.approx(4.302652729911275 * float(error), rel=1e-10)
        assert float(high - middle) == pytest.approx(4.302652729911275 * float(error), rel=1e-10)


@pytest.mark.parametrize("burn_in", [0.0, 0.3, 1.1])
def test_a_score_averages_every_step_after_the_burn_in_once(burn_in):
    square = adjsim.TimeAverage(lambda state: state.position[:, 0, 0] ** 2, burn_in=burn_in)
    found, plain = (
        estimator(spring(1.0), square, replicas=4, chunks=2, generator=0)
        for estimator in (adjsim.ScoreFunction(), adjsim.Pathwise())
    )
    # On the same noise.
    torch.testing.assert_close(found.value, plain.value, rtol=1e-13, atol=0)


def test_reweighted_samples_and_halves_of_two_observables():
    simulation = spring(1.0, time=4.0, solver=adjsim.LeimkuhlerMatthews)
    kT = simulation.dynamics.kT.requires_grad_()
    estimator = adjsim.Reweighting(every=0.2)
    with pytest.raises(RuntimeError, match="no samples yet"):
        estimator.effective_shares()
    both = adjsim.TimeAverage(
        lambda state: torch.stack([state.position[:, 0, 0], state.position[:, 0, 0] ** 2], -1)
    )
    first = estimator(simulation, both, replicas=64, generator=0)
    assert first.diagnostics["weights_ess"] == pytest.approx(1, rel=1e-12)
    # The start at 1 is a standard deviation and a half from the mean: the halves differ.
    assert first.diagnostics["equilibration"] > 3
    simulation.dynamics.potential.k.data.fill_(1.1)
    second = estimator(simulation, both, replicas=64, generator=0)
    assert not second.diagnostics["sampled"]
    share = second.diagnostics["weights_ess"]
    assert 0.9 < share < 0.9999
    expected = share * first.diagnostics["ess"]
    assert second.diagnostics["ess"] == pytest.approx(expected, rel=1e-9)
    # One parameter has changed.
    alone = {"potential.k": pytest.approx(share, rel=1e-12), "kT": pytest.approx(1, rel=1e-12)}
    assert estimator.effective_shares() == alone
    kT.data.mul_(0.9)
    third = estimator(simulation, both, replicas=64, generator=0).diagnostics["weights_ess"]
    assert abs(third - share) > 0.01
    found = estimator.effective_shares({"k": ["potential.k"], "all": ["kT", "potential.k"]})
    assert found == {"k": alone["potential.k"], "all": pytest.approx(third, rel=1e-12)}
    with pytest.raises(ValueError, match=r"'mass' is no parameter.*these are (kT|potential\.k), "):
        estimator.effective_shares({"all": ["mass"]})


@pytest.mark.parametrize("h", [0.0, -0.5])
def test_difference_steps_are_positive(h):
    with pytest.raises(ValueError, match="h must be positive"):
        adjsim.FiniteDifference(h)


def test_damping_of_overdamped_dynamics():
    """The largest curvature over the friction, and none on a hill."""
    for k, rate in ((0.3, 0.15), (-0.3, 0.0)):
        dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(k), friction=2.0)
        state = dynamics.init(torch.ones(3, 4, 2))
        assert dynamics.damping(state) == pytest.approx(rate, rel=1e-6)


def test_friction_that_stops_a_step_has_a_checkpoint_at_each():
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), friction=100.0)
    start = dynamics.init(torch.ones(2, 1, 1), torch.zeros(2, 1, 1))
    grads = []
    for adjoint in (adjsim.ReversibleAdjoint(), adjsim.DirectAdjoint()):
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.5],
            solver=adjsim.BAOAB(0.1),
            adjoint=adjoint,
            generator=torch.Generator().manual_seed(0),
        )
        grads.append(torch.autograd.grad(run.final.position.sum(), dynamics.potential.k)[0])
        if isinstance(adjoint, adjsim.ReversibleAdjoint):
            assert run.stats["checkpoint_every"] == 1
    # Reversing a step amplifies rounding by exp(10).
    torch.testing.assert_close(*grads, rtol=1e-9, atol=0)


def test_the_invariant_of_esh_has_one_number_a_system():
    dynamics = adjsim.ESH(adjsim.Harmonic(1.0))
    position, generator = torch.ones(3, 4, 2), torch.Generator().manual_seed(0)
    state = dynamics.init(position, torch.randn(3, 4, 2, generator=generator))
    state = state._replace(log_speed=torch.tensor([0.1, 0.2, 0.3]))
    expected = 4.0 + 8 * state.log_speed
    torch.testing.assert_close(dynamics.invariant(state), expected, rtol=1e-14, atol=0)


class Stubborn(torch.autograd.Function):
    """The identity, whose derivative reads a number and so takes no rows of cotangents."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * float(cotangent.numel() > 0 and cotangent.sum() == cotangent.sum())


@pytest.mark.parametrize("stubborn", [False, True])
def test_one_sweep_takes_the_entries_of_an_observable(stubborn, monkeypatch):
    sweeps, backward = [], passes._SweptRun.backward

    def counted(self, *given):
        sweeps.append(self)
        return backward(self, *given)

    def powers(state):
        x = state.position.flatten(1)
        found = torch.stack([x**k for k in range(1, 6)], 1).mean(-1)
        return Stubborn.apply(found) if stubborn else found

    monkeypatch.setattr(passes._SweptRun, "backward", counted)
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.2)), kT=parameter(0.7))

    def initial(count, generator):
        position = torch.randn(count, 1, 1, dtype=torch.float64, generator=generator)
        return dynamics.init(position, generator=generator)

    simulation = adjsim.Simulation(dynamics, initial, [0.0, 0.6], adjsim.BAOAB(0.1))
    estimates = [
        adjsim.Pathwise(adjoint)(
            simulation, adjsim.Final(powers), replicas=8, chunks=2, generator=3
        )
        for adjoint in (adjsim.ReversibleAdjoint(), adjsim.DirectAdjoint())
    ]
    # An observable that refuses rows has a sweep for each of its entries.
    assert len(sweeps) == (2 * 5 if stubborn else 2)
    for name, grad in estimates[1].grad.items():
        torch.testing.assert_close(estimates[0].grad[name], grad, rtol=1e-11, atol=1e-12)


def test_complex_observables_are_refused():
    """A row of cotangents would give the derivative of the real part alone."""
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.2)), kT=0.7)
    start = dynamics.init(torch.ones(4, 1, 1), torch.ones(4, 1, 1))
    simulation = adjsim.Simulation(
        dynamics,
        lambda n, _: type(start)(*(x[:n] for x in start)),
        [0.0, 0.2],
        adjsim.BAOAB(0.1),
    )

    def phase(trajectory):
        return torch.exp(1j * trajectory.final.position[:, 0, 0])

    with pytest.raises(TypeError, match=r"observable is complex.*view_as_real"):
        adjsim.Pathwise()(simulation, phase, replicas=4, chunks=2, generator=0)
    whole = adjsim.Pathwise()(
        simulation, lambda run: torch.view_as_real(phase(run)), replicas=4, chunks=2, generator=0
    )
    assert whole.value.shape == (2,)


@pytest.mark.parametrize(
    "estimator", [adjsim.Pathwise(), adjsim.ScoreFunction(), adjsim.Reweighting()], ids=repr
)
@pytest.mark.parametrize(
    ("observed", "message"),
    [
        (lambda state: state.position.sum(), r"has shape \(\).*must be theirs"),
        (lambda state: state.position[:, 0, :0], "has no entries"),
    ],
    ids=["of all replicas", "empty"],
)
def test_observables_without_replicas_or_entries_are_refused(estimator, observed, message):
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.2)), kT=0.7)

    def initial(n, generator):
        return dynamics.init(torch.ones(n, 1, 1).double(), generator=generator)

    simulation = adjsim.Simulation(dynamics, initial, [0.0, 4.0], adjsim.BAOAB(0.1))
    with pytest.raises(ValueError, match=message):
        estimator(simulation, adjsim.TimeAverage(observed), replicas=4, chunks=2, generator=0)


def test_a_gradient_that_is_zero_says_nothing_about_when_gradients_are_lost():
    """That of b is twice its error, and grows by a factor of two along the run."""
    parts = [
        Chunk(ONE, {"a": a * ONE, "b": b * ONE}, {}, (math.log(4.0), True, False))
        for a, b in ((1.0, 1.0), (-1.0, 3.0))
    ]
    well = adjsim.OverdampedLangevin(adjsim.Harmonic(1.0))
    simulation = adjsim.Simulation(
        well, lambda n, _: well.init(torch.ones(n, 1, 1)), [0.0, 2.0], adjsim.EulerMaruyama(0.1)
    )
    found = Pathwise().combine(simulation, parts, [1, 1])
    assert found["growth"] == pytest.approx(math.log(2) / 2)
    assert found["lost_at"] == pytest.approx(2 * 2.0)
    for part in parts:
        part.grad["b"] = part.grad["b"] * torch.tensor(1e-6) + part.grad["a"]
    # A gradient far below its error is lost from the start.
    assert Pathwise().combine(simulation, parts, [1, 1])["lost_at"] == 0.0


@pytest.mark.parametrize("estimator", [adjsim.Pathwise(), adjsim.Girsanov()], ids=repr)
def test_estimates_say_how_pairs_are_evaluated(estimator):
    pair = adjsim.LennardJones(parameter(1.0), 1.0, cutoff=2.5)
    dynamics = adjsim.OverdampedLangevin(pair)
    start = 1.2 * torch.eye(3, dtype=torch.float64)
    simulation = adjsim.Simulation(
        dynamics,
        lambda n, _: dynamics.init(start.expand(n, 3, 3)),
        [0.0, 0.01],
        adjsim.EulerMaruyama(0.005),
    )
    average = adjsim.TimeAverage(lambda state: state.position.square().sum((-1, -2)))
    found = estimator(simulation, average, replicas=2, chunks=2, generator=0)
    assert found.diagnostics["pairs"] == {"LennardJones": "all pairs"}
