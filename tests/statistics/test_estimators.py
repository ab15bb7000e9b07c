"""Every estimator against exact answers, within its own errors; and errors that cover."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import quad
from torch import nn

import adjsim
from adjsim import (
    CheckpointAdjoint,
    Final,
    FiniteDifference,
    ForwardSensitivity,
    Girsanov,
    Pathwise,
    ReversibleAdjoint,
    Reweighting,
    ScoreFunction,
    Simulation,
    TimeAverage,
    minimize,
)
from adjsim.estimators import samples
from adjsim.estimators.moments import Moments
from adjsim.estimators.probes import depends_on, reduced_energy
from adjsim.io.systems import cluster
from tests.problems import Cage, parameter, slow_but, square


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def within(estimate, exact, bias=0.0):
    """Four of its own standard errors."""
    for name, truth in exact.items():
        grad, stderr = estimate.grad[name], estimate.grad_stderr[name]
        assert bool((stderr >= 0).all()), name
        assert bool(((grad - torch.as_tensor(truth)).abs() <= 4 * stderr + bias).all()), (
            name,
            grad,
            stderr,
            truth,
        )


# The path from x = 1 in a harmonic well, by the moments of the Euler-Maruyama chain:


def path_gradient(k=1.0, kT=1.0, friction=1.0, dt=0.02, steps=50):
    """<x_T^2>, d<x_T^2>/dk and d/dkT of the chain x' = a x + s xi, exactly."""

    def mean(k, kT):
        a, s2 = 1 - k * dt / friction, 2 * kT * dt / friction
        m2 = 1.0
        for _ in range(steps):
            m2 = a * a * m2 + s2
        return m2

    h = 1e-5
    return (
        mean(k, kT),
        (mean(k + h, kT) - mean(k - h, kT)) / (2 * h),
        (mean(k, kT + h) - mean(k, kT - h)) / (2 * h),
    )


def path_problem(kT=1.0, dt=0.02):
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(1.0)), kT=kT, friction=1.0)
    return Simulation(
        dynamics,
        lambda n, generator: dynamics.init(torch.ones(n, 1, 1)),
        [0.0, 1.0],
        adjsim.EulerMaruyama(dt),
    )


def squared(state):
    return state.position[:, 0, 0] ** 2


def test_the_exact_path_gradient_is_that_of_the_reference():
    assert path_gradient(dt=0.01, steps=100)[1] == pytest.approx(-0.8646, abs=5e-5)


PATH = [
    Pathwise(),
    Pathwise(CheckpointAdjoint()),
    FiniteDifference(),
    ForwardSensitivity(),
    Girsanov(),
]


@pytest.mark.parametrize(
    "estimator",
    slow_but(
        lambda e: isinstance(e, Pathwise | Girsanov),
        PATH,
        marathon=lambda e: isinstance(e, ForwardSensitivity),
    ),
    ids=repr,
)
def test_path_gradient(estimator):
    estimate = estimator(path_problem(), Final(squared), replicas=20_000, generator=seeded())
    assert estimate.estimand == "path"
    value, dk, _ = path_gradient()
    within(estimate, {"potential.k": dk})
    assert abs(float(estimate.value) - value) < 4 * float(estimate.value_stderr)
    assert float(estimate.grad_stderr["potential.k"]) < 0.05


@pytest.mark.parametrize(
    "estimator",
    slow_but(
        lambda e: isinstance(e, Pathwise),
        [Pathwise(), FiniteDifference(), ForwardSensitivity()],
        marathon=lambda e: isinstance(e, ForwardSensitivity),
    ),
    ids=repr,
)
def test_path_gradient_by_temperature(estimator):
    estimate = estimator(
        path_problem(parameter(1.0)), Final(squared), replicas=20_000, generator=seeded()
    )
    _, dk, dkT = path_gradient()
    within(estimate, {"potential.k": dk, "kT": dkT})


@pytest.mark.parametrize("scheme", ["BAOAB", pytest.param("OBABO", marks=pytest.mark.marathon)])
def test_girsanov_on_langevin_equals_pathwise(scheme):
    """Another mass, kT and friction than one; several steps, so that all weights of the score
    count.
    """
    dynamics = adjsim.Langevin(adjsim.DoubleWell(parameter(1.0)), 1.4, 0.7, 1.3)

    def initial(n, generator):
        return dynamics.init(torch.ones(n, 2, 1), generator=generator)

    simulation = Simulation(dynamics, initial, [0.0, 0.6], adjsim.Splitting(scheme, 0.06))
    observable = Final(lambda state: (state.position**2).sum((-1, -2)))
    one = Pathwise()(simulation, observable, replicas=100_000, generator=seeded(1))
    two = Girsanov()(simulation, observable, replicas=100_000, generator=seeded(2))
    difference = float(one.grad["potential.barrier"] - two.grad["potential.barrier"])
    stderr = math.hypot(
        float(one.grad_stderr["potential.barrier"]), float(two.grad_stderr["potential.barrier"])
    )
    assert abs(difference) < 4 * stderr
    assert stderr < 0.05 * abs(float(one.grad["potential.barrier"]))


def test_girsanov_of_momenta_under_obabo():
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), 1.4, 0.7, 1.3)

    def initial(n, generator):
        return dynamics.init(torch.ones(n, 1, 1), generator=generator)

    simulation = Simulation(dynamics, initial, [0.0, 0.6], adjsim.Splitting("OBABO", 0.06))
    observable = Final(lambda state: state.momentum[:, 0, 0] * state.position[:, 0, 0])
    one = Pathwise()(simulation, observable, replicas=40_000, generator=seeded(1))
    two = Girsanov()(simulation, observable, replicas=40_000, generator=seeded(2))
    within(
        two,
        {"potential.k": one.grad["potential.k"]},
        bias=4 * float(one.grad_stderr["potential.k"]),
    )


class Tilted(nn.Module):
    """An observable with a parameter: alpha x^2, where alpha is the potential's k too."""

    def __init__(self, dynamics):
        super().__init__()
        self.dynamics = dynamics

    def __call__(self, state):
        return self.dynamics.potential.k * state.position[:, 0, 0] ** 2


@pytest.mark.parametrize(
    "estimator",
    slow_but(
        lambda e: isinstance(e, Pathwise),
        [Girsanov(), Pathwise(), ForwardSensitivity()],
        marathon=lambda e: isinstance(e, ForwardSensitivity),
    ),
    ids=repr,
)
def test_the_observable_may_depend_on_the_parameters_along_a_path(estimator):
    simulation = path_problem()
    value, dk, _ = path_gradient()
    for observable in (
        Final(Tilted(simulation.dynamics)),
        lambda run: Tilted(simulation.dynamics)(run.final),
    ):
        estimate = estimator(simulation, observable, replicas=20_000, generator=seeded())
        within(estimate, {"potential.k": dk + value})  # k = 1


# Equilibrium, by quadrature.


def boltzmann(energy, kT, function):
    weight = quad(lambda x: math.exp(-energy(x) / kT), -6, 6)[0]
    return quad(lambda x: function(x) * math.exp(-energy(x) / kT), -6, 6)[0] / weight


def derivative(f, x, h=1e-4):
    return (f(x + h) - f(x - h)) / (2 * h)


def equilibrium(potential, kT, start, time=30.0, dt=0.02, burn_in=5.0, compile=False):
    dynamics = adjsim.OverdampedLangevin(potential, kT=kT, friction=1.0)

    def initial(n, generator):
        return dynamics.init(start + 0.3 * torch.randn(n, 1, 1, generator=generator))

    solver = adjsim.LeimkuhlerMatthews(dt)
    return Simulation(dynamics, initial, [0.0, time], solver, compile=compile), burn_in


STATIONARY = [ScoreFunction, lambda burn_in: Reweighting(burn_in=burn_in)]


@pytest.mark.parametrize("make", STATIONARY, ids=["score", "reweighting"])
@pytest.mark.parametrize(
    "k", slow_but(lambda k: False, [0.5, 1.0, 2.0], marathon=lambda k: k != 1.0)
)
def test_harmonic(make, k):
    """d<x^2>/dk = -kT/k^2 and d<x^2>/dkT = 1/k; LeimkuhlerMatthews has no bias here."""
    kT = 0.8
    simulation, burn_in = equilibrium(
        adjsim.Harmonic(parameter(k)), parameter(kT), 0.0, 40.0, 0.05, 10.0, compile=True
    )
    estimate = make(burn_in)(
        simulation, TimeAverage(squared), replicas=1024, chunks=8, generator=seeded(3)
    )
    assert estimate.estimand == "stationary"
    within(estimate, {"potential.k": -kT / k**2, "kT": 1 / k})
    assert float(estimate.grad_stderr["potential.k"]) < 0.05 * kT / k**2
    assert estimate.diagnostics["ess"] > 1000
    assert not estimate.warnings


@pytest.mark.marathon
@pytest.mark.parametrize("make", STATIONARY, ids=["score", "reweighting"])
@pytest.mark.parametrize(("b", "exact"), [(0.0, -1.704272), (-0.67, -0.634558)])
def test_asymmetric_double_well(make, b, exact):
    """d<x>/db of the reference, at a = 1 and kT = 0.5, sampled across the barrier."""
    kT = 0.5

    def mean(b):
        return boltzmann(lambda x: (x * x - 1) ** 2 + b * x, kT, lambda x: x)

    assert derivative(mean, b) == pytest.approx(exact, abs=2e-6)
    simulation, burn_in = equilibrium(
        adjsim.AsymmetricDoubleWell(1.0, parameter(b)), kT, 0.0, 60.0, 0.01, 20.0, compile=True
    )
    observable = TimeAverage(lambda s: s.position[:, 0, 0])
    estimate = make(burn_in)(simulation, observable, replicas=2048, chunks=8, generator=seeded(4))
    # The step's error is of order (curvature dt)^2, half a per cent, well below the standard error.
    within(estimate, {"potential.asymmetry": exact})
    assert float(estimate.grad_stderr["potential.asymmetry"]) < 0.05 * abs(exact)


@pytest.mark.marathon
def test_muller_brown_occupation():
    """The share in the deep basin and its derivative by kT, by quadrature on the plane."""
    kT, potential = 15.0, adjsim.MullerBrown()

    grid = torch.cartesian_prod(torch.linspace(-1.8, 1.3, 621), torch.linspace(-0.6, 2.2, 561))
    energies = potential(grid.unsqueeze(1))

    def share(kT):
        # Relative to the deep minimum, so that nothing overflows.
        weight = torch.exp(-(energies + 146.7) / kT)
        return float((weight * torch.sigmoid(8 * (grid[:, 1] - 0.8))).sum() / weight.sum())

    dynamics = adjsim.OverdampedLangevin(potential, kT=parameter(kT), friction=1.0)

    def initial(n, generator):
        """Drawn from the distribution itself: crossings take longer than the run."""
        pick = torch.multinomial(
            torch.exp(-(energies + 146.7) / kT), n, replacement=True, generator=generator
        )
        return dynamics.init(grid[pick].unsqueeze(1))

    simulation = Simulation(
        dynamics, initial, [0.0, 0.1], adjsim.LeimkuhlerMatthews(5e-5), compile=True
    )
    observable = TimeAverage(lambda s: torch.sigmoid(8 * (s.position[:, 0, 1] - 0.8)))
    estimate = ScoreFunction()(simulation, observable, replicas=8192, chunks=8, generator=seeded(5))
    assert abs(float(estimate.value) - share(kT)) < 4 * float(estimate.value_stderr)
    within(estimate, {"kT": derivative(share, kT, 0.05)})
    assert float(estimate.grad_stderr["kT"]) < 0.1 * abs(float(estimate.grad["kT"]))


@pytest.mark.parametrize(
    "make", [pytest.param(STATIONARY[0], marks=pytest.mark.marathon), STATIONARY[1]],
    ids=["score", "reweighting"],
)  # fmt: skip
def test_the_observable_may_depend_on_the_parameters_at_equilibrium(make):
    """<k x^2> = kT whatever k: the explicit part and the covariance cancel. The surrogate has both
    value and gradient.
    """
    simulation, burn_in = equilibrium(
        adjsim.Harmonic(parameter(1.3)), parameter(0.8), 0.0, 20.0, 0.05, 5.0
    )
    observable = TimeAverage(Tilted(simulation.dynamics))
    estimator = make(burn_in)
    estimate = estimator(simulation, observable, replicas=256, generator=seeded(3))
    within(estimate, {"potential.k": 0.0, "kT": 1.0})
    surrogates = [estimate.surrogate(simulation.dynamics)]
    if isinstance(estimator, Reweighting):
        surrogates.append(estimator.surrogate(observable))
    for surrogate in surrogates:
        assert float(surrogate) == pytest.approx(float(estimate.value), rel=1e-12)
        found = torch.autograd.grad(surrogate, list(simulation.dynamics.parameters()))
        names = [name for name, _ in simulation.dynamics.named_parameters()]
        for name, grad in zip(names, found, strict=True):
            assert float(grad) == pytest.approx(float(estimate.grad[name]), rel=1e-3, abs=1e-3)


def test_large_frames_are_differentiated_once_for_all_entries(monkeypatch):
    potential = adjsim.DoubleWell(parameter(1.0))
    simulation, burn_in = equilibrium(potential, 0.5, 0.0, 2.0, 0.05, 0.5)
    asked: list[int] = []

    def counted(dynamics, states, bath):
        asked.append(len(states[0]))
        return reduced_energy(dynamics, states, bath)

    def entries(state):
        powers = state.position[:, 0] ** torch.arange(1, 31)
        return powers * (1 + 0.1 * potential.barrier)

    estimator, observable = Reweighting(burn_in=burn_in), TimeAverage(entries)

    def estimate():
        return estimator(simulation, observable, replicas=4, chunks=2, generator=seeded(1))

    estimate()
    potential.barrier.data.fill_(1.1)
    together = estimate()
    monkeypatch.setattr(samples, "LARGE", 0)
    monkeypatch.setattr(samples, "reduced_energy", counted)
    found = estimate()
    assert not found.diagnostics["sampled"]
    # Two replicas in each of two chunks, three frames of each.
    assert asked.count(1) == 4 * 3
    assert asked.count(6) == len(asked) - 4 * 3 == 2
    for x, y in zip(found.grad.values(), together.grad.values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("large", [0, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reweighting_takes_comparisons_and_parameters_of_any_precision(monkeypatch, large, dtype):
    """Weights are numbers where the observable is true or false."""
    monkeypatch.setattr(samples, "LARGE", large)
    potential = adjsim.DoubleWell(nn.Parameter(torch.tensor(1.0, dtype=dtype)))
    simulation, burn_in = equilibrium(potential, 0.5, 0.0, 2.0, 0.05, 0.5)

    def near(state):
        return state.position[:, 0, 0] < 0.5

    estimator, found = Reweighting(burn_in=burn_in), []
    for observable in (near, lambda state: near(state).long(), lambda state: near(state).double()):
        potential.barrier.data.fill_(1.0)
        estimator(simulation, TimeAverage(observable), replicas=4, chunks=2, generator=seeded(1))
        potential.barrier.data.fill_(1.1)
        average = TimeAverage(observable)
        found.append(estimator(simulation, average, replicas=4, chunks=2, generator=seeded(1)))
        assert not found[-1].diagnostics["sampled"]
    *others, plain = found
    for other in others:
        torch.testing.assert_close(other.value.double(), plain.value.double())
        for x, y in zip(other.grad.values(), plain.grad.values(), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_moments_of_parameters_in_other_precision_than_positions(compile):
    """With a pass for each replica, of which there are two in a chunk."""
    found = []
    for dtype in (torch.float32, torch.float64):
        well = adjsim.DoubleWell(nn.Parameter(torch.tensor(1.0, dtype=dtype)))
        simulation, _ = equilibrium(well, parameter(0.5), 0.0, 1.0, 0.05, 0.5, compile)
        average = TimeAverage(lambda state: state.position[:, 0] ** torch.arange(1, 6), 0.5)
        estimate = ScoreFunction()(simulation, average, replicas=4, chunks=2, generator=seeded(1))
        found.append(torch.cat([x.double() for x in estimate.grad.values()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [3, 8])
def test_moments_take_a_pass_for_each_entry_or_for_each_replica(monkeypatch, replicas):
    well = adjsim.Langevin(adjsim.DoubleWell(parameter(1.3)), kT=parameter(0.7))
    q = torch.linspace(-1.4, 1.6, replicas, dtype=torch.float64)[:, None, None]
    state = well.init(q, momentum=0.3 + q)

    def entries(state):
        return state.position[:, 0] ** torch.arange(1, 6)

    moments = Moments(well, entries, False, state)
    u, seen = reduced_energy(well, state, False), entries(state) - moments.shift
    # The mean over replicas of du, and of O du.
    rows = torch.cat([torch.ones(1, replicas), seen.T]) / replicas
    wanted = list(well.trainable().values())
    expected = [torch.stack(torch.autograd.grad(u, wanted, row, retain_graph=True)) for row in rows]
    calls, slopes = [], Moments._slopes
    counted = staticmethod(lambda *given: calls.append(given) or slopes(*given))
    monkeypatch.setattr(Moments, "_slopes", counted)
    found = moments(state)[5 * replicas + 5 :].reshape(6, 2)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-13, atol=1e-14)
    assert len(calls) == min(replicas, 6)


@pytest.mark.slow
def test_reweighting_keeps_its_samples_until_they_wear_out():
    potential = adjsim.Harmonic(parameter(1.0))
    simulation, burn_in = equilibrium(potential, 0.8, 0.0, 20.0, 0.05, 5.0)
    estimator, observable = Reweighting(burn_in=burn_in, threshold=0.5), TimeAverage(squared)
    first = estimator(simulation, observable, replicas=512, generator=seeded(1))
    assert first.diagnostics["sampled"]
    assert first.diagnostics["weights_ess"] == pytest.approx(1.0)
    potential.k.data.fill_(1.15)
    near = estimator(simulation, observable, replicas=512, generator=seeded(2))
    assert not near.diagnostics["sampled"]
    assert 0.9 < near.diagnostics["weights_ess"] < 1
    assert near.diagnostics["energy_evaluations"] < 0.1 * first.diagnostics["energy_evaluations"]
    within(near, {"potential.k": -0.8 / 1.15**2})
    assert abs(float(near.value) - 0.8 / 1.15) < 4 * float(near.value_stderr)
    potential.k.data.fill_(8.0)
    assert estimator(simulation, observable, replicas=512, generator=seeded(3)).diagnostics[
        "sampled"
    ]


@pytest.mark.marathon
def test_variance_of_the_score_falls_as_one_over_the_samples():
    """Slope -1 within 0.1 in log-log, over two decades, from the spread of repetitions."""
    simulation, burn_in = equilibrium(
        adjsim.Harmonic(parameter(1.0)), 1.0, 0.0, 6.0, 0.05, 4.0, compile=True
    )
    sizes = [16, 64, 256, 1024]
    spreads = []
    for size in sizes:
        found = [
            float(
                ScoreFunction(burn_in)(
                    simulation, TimeAverage(squared), replicas=size, chunks=1, generator=seeded(s)
                ).grad["potential.k"]
            )
            for s in range(120)
        ]
        spreads.append(float(torch.tensor(found).var()))
    x, y = (
        torch.log(torch.tensor(sizes, dtype=torch.float64)),
        torch.log(torch.tensor(spreads, dtype=torch.float64)),
    )
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    # 120 repetitions know a variance to 13 %, and the slope over a factor of 64 to 0.04.
    assert abs(slope + 1) < 0.1, slope


@pytest.mark.slow
def test_girsanov_wears_out_with_time():
    """The variance of the score grows with the time, and the effective sample size falls."""
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(1.0)), 1.0, 1.0)

    def initial(n, generator):
        return dynamics.init(torch.randn(n, 1, 1, generator=generator))

    ess, errors = [], []
    for time in (1.0, 4.0, 16.0, 64.0):
        simulation = Simulation(
            dynamics, initial, [0.0, time], adjsim.EulerMaruyama(0.1), compile=True
        )
        estimate = Girsanov()(
            simulation, Final(squared), replicas=8192, chunks=8, generator=seeded()
        )
        ess.append(estimate.diagnostics["ess"])
        errors.append(float(estimate.grad_stderr["potential.k"]))
    assert ess == sorted(ess, reverse=True)
    # Twice the error for four times the time, once the start is forgotten.
    assert 1.5 < errors[3] / errors[2] < 2.7


# Errors that cover.


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("path", marks=pytest.mark.marathon),
        pytest.param("girsanov", marks=pytest.mark.marathon),
        pytest.param("stationary", marks=pytest.mark.marathon),
    ],
)
def test_intervals_cover(kind):
    """95 % intervals hold the truth in 90 to 99 % of 200 repetitions."""
    if kind == "stationary":
        k, kT = 1.0, 1.0
        simulation, burn_in = equilibrium(adjsim.Harmonic(parameter(k)), kT, 0.0, 10.0, 0.1, 4.0)
        observable, estimator, truth = TimeAverage(squared), ScoreFunction(burn_in), -kT / k**2
    else:
        simulation, observable, truth = (
            path_problem(dt=0.05),
            Final(squared),
            path_gradient(dt=0.05, steps=20)[1],
        )
        estimator = Girsanov() if kind == "girsanov" else Pathwise()
    covered = 0
    for seed in range(200):
        estimate = estimator(
            simulation, observable, replicas=256, chunks=8, generator=seeded(1000 + seed)
        )
        low, high = estimate.interval("potential.k")
        covered += bool(low <= truth <= high)
    assert 180 <= covered <= 198, covered


# What each says of itself.


def test_a_step_along_a_path_is_said():
    estimate = Pathwise()(
        path_problem(),
        Final(lambda s: (s.position[:, 0, 0] > 0).double()),
        replicas=64,
        generator=seeded(),
    )
    assert any("no derivative along a path" in reason for reason in estimate.warnings)


def test_growth_is_the_rate_of_the_flow():
    """A stable well contracts at k/friction, a barrier expands at its curvature: the tangent's
    rate, exactly.
    """
    for k in (1.0, -0.8):
        dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(k)), 1.0, 1.0)
        simulation = Simulation(
            dynamics,
            lambda n, generator, d=dynamics: d.init(torch.ones(n, 1, 1)),
            [0.0, 2.0],
            adjsim.EulerMaruyama(0.01),
        )
        estimate = Pathwise(CheckpointAdjoint())(
            simulation,
            Final(lambda s: s.position[:, 0, 0]),
            replicas=64,
            chunks=1,
            generator=seeded(),
        )
        # log(1 - k dt)/dt, which is -k to the first order.
        assert estimate.diagnostics["growth"] == pytest.approx(
            math.log(1 - k * 0.01) / 0.01, rel=1e-9
        )


@pytest.mark.slow
def test_chaos_is_said():
    """A chaotic cluster: the gradient of a path grows, the estimate says so and when it is lost."""
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(parameter(1.0), parameter(1.0)))

    def initial(n, generator):
        position = cluster().position.expand(n, -1, -1)
        return dynamics.init(position, 0.9 * torch.randn(position.shape, generator=generator))

    observable = Final(lambda s: (s.position**2).mean((-1, -2)))
    found = []
    for time in (1.0, 8.0):
        simulation = Simulation(
            dynamics, initial, [0.0, time], adjsim.Splitting("BAB", 0.005, exact=True), compile=True
        )
        found.append(
            Pathwise(ReversibleAdjoint())(
                simulation, observable, replicas=8, chunks=4, generator=seeded()
            )
        )
    assert found[1].diagnostics["growth"] > 0.5
    assert any("grows as exp(" in reason for reason in found[1].warnings)
    assert "not to be trusted" in str(found[1])
    assert found[1].diagnostics["lost_at"] < 8.0


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_no_two_systems_share_noise_if_replicas_have_several(batch):
    """Chunks with common noise would agree too well, and standard errors would be too small."""
    well, rate = adjsim.Harmonic(parameter(1.0)), nn.Parameter(torch.ones(1, dtype=torch.float64))
    langevin = adjsim.Langevin(well, kT=1.0)
    sde = adjsim.SDE(lambda t, y, k: -k * y, lambda t, y, k: k.expand(y.shape), args=(rate,))
    for dynamics, solver, start in (
        (langevin, adjsim.BAOAB(0.1), lambda x: langevin.init(x[..., None], 0 * x[..., None])),
        (sde, adjsim.EulerMaruyama(0.1), sde.init),
        (sde, adjsim.SDESolver("midpoint", dt=0.1), sde.init),
    ):
        simulation = Simulation(
            dynamics,
            lambda n, _, start=start: start(torch.zeros(n, *batch, 1, dtype=torch.float64)),
            [0.0, 0.3],
            solver,
        )
        # Every system starts alike, so those with the same noise have the same end.
        values = list[torch.Tensor]()
        for chunks in (1, 4):
            ends = list[torch.Tensor]()

            def squared(state, ends=ends):
                ends.append(state[0].detach())
                return state[0].flatten(1).square().mean(1)

            found = Pathwise()(
                simulation, Final(squared), replicas=4, chunks=chunks, generator=seeded()
            )
            values.append(found.value)
            different = {float(x) for end in ends for x in end.flatten()}
            assert len(different) == 4 * math.prod(batch)
        torch.testing.assert_close(*values)


@pytest.mark.slow
def test_a_start_out_of_equilibrium_is_said():
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(1.0)), 1.0, 1.0)
    simulation = Simulation(
        dynamics,
        lambda n, generator: dynamics.init(torch.full((n, 1, 1), 9.0)),
        [0.0, 6.0],
        adjsim.EulerMaruyama(0.05),
        compile=True,
    )
    raw = ScoreFunction()(simulation, TimeAverage(squared), replicas=256, generator=seeded())
    assert any("had not come to equilibrium" in reason for reason in raw.warnings)


def test_few_samples_are_said():
    simulation = path_problem()
    estimate = Pathwise()(simulation, Final(squared), replicas=20, generator=seeded())
    assert any("worth 20 independent samples" in reason for reason in estimate.warnings)


@pytest.mark.marathon
def test_truncation_is_another_question_and_says_so():
    """With one piece it is the whole gradient; with a shorter one it is that of the last part, by
    the chain's moments.
    """
    simulation, observable = path_problem(), Final(squared)
    whole = Pathwise()(simulation, observable, replicas=512, generator=seeded())
    same = Pathwise(truncate=1.0)(simulation, observable, replicas=512, generator=seeded())
    assert torch.equal(whole.value, same.value)
    torch.testing.assert_close(
        whole.grad["potential.k"], same.grad["potential.k"], rtol=1e-12, atol=0
    )
    cut = Pathwise(truncate=0.3)(simulation, observable, replicas=20_000, generator=seeded())
    # From x_35, with its own second moment m: m2 = a^30 m + s2 (1 - a^30)/(1 - a^2), differentiated
    # by k with m held fixed.
    dt, steps = 0.02, 15
    start = path_gradient(steps=35)[0]

    def mean(k):
        a = (1 - k * dt) ** 2
        return a**steps * start + 2 * dt * (1 - a**steps) / (1 - a)

    within(cut, {"potential.k": derivative(mean, 1.0)})
    assert any("cut off after 0.3" in reason for reason in cut.warnings)
    average = TimeAverage(squared)
    one, many = (
        Pathwise(truncate=t)(simulation, average, replicas=512, generator=seeded())
        for t in (1.0, 0.1)
    )
    plain = Pathwise()(simulation, average, replicas=512, generator=seeded())
    torch.testing.assert_close(
        one.grad["potential.k"], plain.grad["potential.k"], rtol=1e-12, atol=0
    )
    torch.testing.assert_close(many.value, plain.value, rtol=1e-12, atol=0)
    assert abs(float(many.grad["potential.k"])) < 0.5 * abs(float(plain.grad["potential.k"]))


# What is refused.


def test_a_score_of_parameters_that_scale_the_noise_is_refused():
    with pytest.raises(ValueError, match="'kT' scales the noise"):
        Girsanov()(path_problem(parameter(1.0)), Final(squared), replicas=10)


def test_girsanov_refuses_what_it_has_no_density_of():
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)))

    def initial(n, generator):
        return dynamics.init(torch.ones(n, 1, 1), generator=generator)

    with pytest.raises(TypeError, match="has the path density of"):
        Girsanov()(
            Simulation(dynamics, initial, [0.0, 1.0], adjsim.Splitting("ABOBA", 0.1)),
            Final(squared),
            replicas=10,
        )
    with pytest.raises(ValueError, match="depends on momenta"):
        Girsanov()(
            Simulation(dynamics, initial, [0.0, 1.0], adjsim.BAOAB(0.1)),
            Final(lambda s: s.momentum[:, 0, 0] ** 2),
            replicas=10,
        )


@pytest.mark.parametrize("estimator", [ScoreFunction(), Reweighting()], ids=repr)
def test_stationary_estimators_refuse_path_questions(estimator):
    with pytest.raises(TypeError, match=r"first passage.*use Pathwise"):
        estimator(path_problem(), Final(squared), replicas=10)
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    simulation = Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.ones(n, 1, 1), torch.ones(n, 1, 1)),
        [0.0, 1.0],
        adjsim.VelocityVerlet(0.1),
    )
    with pytest.raises(TypeError, match="has no stationary density"):
        estimator(simulation, TimeAverage(squared), replicas=10)


def test_burn_ins_that_disagree_are_refused():
    with pytest.raises(ValueError, match="burn_in = 2 and the observable 1"):
        ScoreFunction(2.0)(path_problem(), TimeAverage(squared, burn_in=1.0), replicas=10)


# Minima.


def test_the_derivative_of_a_minimum():
    """A pair at 2^(1/6) sigma, a cluster by central differences, and the harmonic centre in many
    dimensions.
    """
    potential = adjsim.LennardJones(parameter(1.3), parameter(1.1))
    pair = minimize(potential, torch.tensor([[0.0, 0.0, 0.0], [1.3, 0.1, 0.0]]))
    distance = (pair[1] - pair[0]).norm()
    assert float(distance) == pytest.approx(2 ** (1 / 6) * 1.1, rel=1e-9)
    epsilon, sigma = torch.autograd.grad(distance, [potential.epsilon, potential.sigma])
    assert float(sigma) == pytest.approx(2 ** (1 / 6), rel=1e-7)
    assert abs(float(epsilon)) < 1e-8
    center = nn.Parameter(torch.randn(20, 3))
    bowl = adjsim.Harmonic(torch.rand(20, 3) + 0.5, center)
    found = minimize(bowl, torch.zeros(20, 3))
    (slope,) = torch.autograd.grad((found * torch.arange(60.0).reshape(20, 3)).sum(), center)
    torch.testing.assert_close(slope, torch.arange(60.0).reshape(20, 3), rtol=1e-7, atol=1e-7)


@pytest.mark.slow
def test_the_derivative_of_a_cluster_against_differences():
    def size(value=None):
        torch.manual_seed(0)
        cage = Cage()
        if value is not None:
            cage.width.data.fill_(value)
        found = minimize(cage, torch.cat([square()[0], square()[0] + torch.tensor([0.5, 2.0])]))
        return (found**2).sum(), cage

    total, cage = size()
    grads = torch.autograd.grad(total, list(cage.parameters()))
    h = 1e-4
    slope = float(size(1.1 + h)[0] - size(1.1 - h)[0]) / (2 * h)
    assert float(grads[1]) == pytest.approx(slope, rel=1e-5)


class Kink(torch.nn.Module):
    """An energy with a minimum at which the force jumps."""

    def forward(self, position):
        return ((position - 0.3).abs() + 0.5 * position**2).sum((-1, -2))


def test_saddles_and_unfinished_minima_are_errors():
    with pytest.raises(RuntimeError, match="saddle"):
        minimize(adjsim.DoubleWell(parameter(1.0)), torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match="the minimiser stopped"):
        minimize(Kink(), torch.tensor([[1.0, 0.7]]))


def test_batches_of_minima():
    potential = adjsim.AsymmetricDoubleWell(parameter(1.0), parameter(0.2))
    found = minimize(potential, torch.tensor([[[-1.1]], [[1.2]]]))
    (slope,) = torch.autograd.grad(found.sum(), potential.asymmetry)
    expected = sum(-1 / (12 * float(q) ** 2 - 4) for q in found.detach().flatten())
    assert float(slope) == pytest.approx(expected, rel=1e-8)


class Soft(nn.Module):
    """A spring whose number is large, in a unit that is small."""

    def __init__(self):
        super().__init__()
        self.k = parameter(1e8)

    def forward(self, position):
        return 0.5e-8 * self.k * (position**2).sum((-1, -2))


def test_differences_are_relative_to_the_number():
    """Rounding would leave five digits of a difference with the step h itself."""
    dynamics = adjsim.Hamiltonian(Soft())
    position, momentum = square()
    simulation = adjsim.Simulation(
        dynamics,
        lambda n, g: dynamics.init(position.expand(n, -1, -1), momentum.expand(n, -1, -1)),
        [0.0, 0.5],
        adjsim.VelocityVerlet(0.05),
    )
    found = [
        estimator(simulation, adjsim.Final(squared), replicas=2, generator=seeded())
        for estimator in (FiniteDifference(), Pathwise())
    ]
    assert float(found[0].grad["potential.k"]) == pytest.approx(
        float(found[1].grad["potential.k"]), rel=1e-7, abs=0.0
    )


def test_a_probe_is_relative_to_the_state():
    """A shift of size one would change no digit of these positions."""
    state = adjsim.PhaseState(*(1e20 * torch.stack([x, x]) for x in square()))
    assert depends_on(lambda s: s.position.sum((-1, -2)), state, "position")
    assert not depends_on(lambda s: s.position.sum((-1, -2)), state, "momentum")
    at_rest = adjsim.PhaseState(*(torch.zeros(2, 4, 2) for _ in range(2)))
    assert depends_on(lambda s: s.momentum.sum((-1, -2)), at_rest, "momentum")
