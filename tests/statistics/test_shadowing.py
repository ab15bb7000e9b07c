"""Shadowing against exact derivatives, dense solves and the figures of the reference answers."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from scipy.special import stdtrit
from torch import nn

import adjsim
from adjsim import TimeAverage
from adjsim.dynamics.fields.ode import ODE
from adjsim.estimators.base import Chunk
from adjsim.estimators.chaos.shadowing import Shadowing, _growth
from adjsim.estimators.chaos.shadowing_steps import refuse_rest
from adjsim.estimators.chaos.shadowing_sweep import (
    Cotangents,
    StepMap,
    averages,
    derivative,
    solve_segments,
    sweep,
    trajectory,
)
from tests.problems import parameter


class Lorenz(nn.Module):
    def __init__(self):
        super().__init__()
        self.sigma, self.rho, self.beta = parameter(10.0), parameter(28.0), parameter(8 / 3)

    def forward(self, t, y):
        x, u, z = y.unbind(-1)
        rates = [self.sigma * (u - x), x * (self.rho - z) - u, x * u - self.beta * z]
        return torch.stack(rates, -1)


class Lorenz96(nn.Module):
    def __init__(self):
        super().__init__()
        self.forcing = parameter(8.0)

    def forward(self, t, y):
        return (y.roll(-1, -1) - y.roll(2, -1)) * y.roll(1, -1) - y + self.forcing


def height(state):
    return state.y[..., 2]


def lorenz(estimator, time, replicas, chunks=16, dt=0.01, observable=height, seed=0):
    dynamics = ODE(Lorenz())

    def initial(count, generator):
        noise = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        return dynamics.init(noise + torch.tensor([0.0, 0.0, 25.0]))

    run = adjsim.Simulation(dynamics, initial, [0.0, time], adjsim.RungeKutta("rk4", dt))
    return estimator(run, TimeAverage(observable), replicas=replicas, chunks=chunks, generator=seed)


# Shadowing with M = 2, T = 200 and 96 runs (shared reference answers).
FIGURES = {"fun.rho": (1.0159, 0.0012), "fun.sigma": (0.1328, 0.0006), "fun.beta": (-1.663, 0.005)}


def agrees(estimate, figures):
    for name, (value, error) in figures.items():
        total = math.hypot(error, float(estimate.grad_stderr[name]))
        assert abs(float(estimate.grad[name]) - value) < 4 * total, name


@pytest.mark.marathon
def test_lorenz():
    # The longer run below has half the step. At both the error of RK4 is far below the statistics.
    found = lorenz(Shadowing(2, 1.0, burn_in=5.0), 17.0, 16, dt=0.02)
    agrees(found, FIGURES)
    assert found.estimand == "shadowing"
    assert "only where shadowing holds" in str(found)
    assert float(found.grad_stderr["fun.rho"]) < 0.03
    assert abs(float(found.value) - 23.5504) < 4 * float(found.value_stderr)
    assert found.diagnostics["exponents"][0] == pytest.approx(0.906, abs=0.08)
    assert not found.warnings


@pytest.mark.marathon
def test_several_observables_and_segments():
    """Each observable has the derivative that it has alone, and segments make no difference."""

    def both(state):
        return torch.stack([state.y[..., 2], state.y[..., 0].square()], -1)

    pair = lorenz(Shadowing(2, 0.5, burn_in=5.0), 15.0, 8, observable=both)
    one = lorenz(Shadowing(2, 0.5, burn_in=5.0), 15.0, 8)
    assert pair.grad["fun.rho"].shape == (2,)
    for name in FIGURES:
        torch.testing.assert_close(pair.grad[name][0], one.grad[name], rtol=1e-9, atol=1e-9)
    # From x' = 0 on average: <x u> = <x^2>, and from z' = 0, <x u> = beta <z>.
    assert float(pair.value[1]) == pytest.approx(8 / 3 * float(pair.value[0]), rel=0.05)
    for segment in (1.0, 2.0):
        longer = lorenz(Shadowing(2, segment, burn_in=5.0), 15.0, 8)
        for name in FIGURES:
            # Segments change the numbers by the error of the steps only, far below the statistics.
            error = float(one.grad_stderr[name])
            assert abs(float(one.grad[name] - longer.grad[name])) < error


@pytest.mark.marathon
def test_the_figures_of_lorenz():
    found = lorenz(Shadowing(2, 1.0, burn_in=20.0), 220.0, 96)
    agrees(found, FIGURES)
    assert float(found.grad_stderr["fun.rho"]) < 0.002


@pytest.mark.marathon
def test_the_figures_of_lorenz_96():
    dynamics = ODE(Lorenz96())

    def initial(count, generator):
        return dynamics.init(8 + torch.randn(count, 40, generator=generator, dtype=torch.float64))

    def observed(state):
        return torch.stack([state.y.mean(-1), 0.5 * state.y.square().mean(-1)], -1)

    run = adjsim.Simulation(dynamics, initial, [0.0, 420.0], adjsim.RungeKutta("rk4", 0.02))
    estimator = Shadowing(20, 0.2, burn_in=20.0, penalty=1e-3)
    found = estimator(run, TimeAverage(observed), replicas=8, chunks=8, generator=0)
    expected = torch.tensor([0.1090, 1.589], dtype=torch.float64)
    error = torch.tensor([0.0016, 0.008], dtype=torch.float64)
    total = (error**2 + found.grad_stderr["fun.forcing"] ** 2).sqrt()
    assert bool(((found.grad["fun.forcing"] - expected).abs() < 4 * total).all()), found.grad
    exponents = found.diagnostics["exponents"]
    assert int((exponents > 0).sum()) == 13
    assert float(exponents[0]) == pytest.approx(1.66, abs=0.05)
    with pytest.raises(RuntimeError, match="more unstable directions than unstable = 8"):
        Shadowing(8, 0.2, burn_in=20.0)(
            run, TimeAverage(observed), replicas=2, chunks=2, generator=0
        )


def test_the_system_is_solved_as_by_a_dense_solve():
    count, replicas, basis, outputs, penalty = 5, 3, 2, 2, 0.1
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    half = random(count, replicas, basis, basis)
    metric = half @ half.mT + torch.eye(basis)
    segments = Cotangents(
        random(0),
        random(0),
        metric,
        random(count, outputs, replicas, basis),
        random(count, replicas, basis, basis),
        random(count, outputs, replicas, basis),
    )
    found = solve_segments(segments, penalty)
    for r in range(replicas):
        rows, size = (count - 1) * basis, count * basis
        e, c = torch.zeros(rows, size).double(), torch.block_diag(*metric[:, r])
        for i in range(1, count):
            row = slice((i - 1) * basis, i * basis)
            e[row, row] = torch.eye(basis).double()
            e[row, i * basis : (i + 1) * basis] = -segments.triangles[i, r]
        kkt = torch.cat(
            [torch.cat([c, e.T], 1), torch.cat([e, -penalty * torch.eye(rows).double()], 1)]
        )
        for m in range(outputs):
            right = torch.cat(
                [-segments.mixed[:, m, r].flatten(), segments.removed[1:, m, r].flatten()]
            )
            dense = torch.linalg.solve(kkt, right)[:size].reshape(count, basis)
            torch.testing.assert_close(found[:, m, r], dense, rtol=1e-10, atol=1e-10)


class Oscillator(nn.Module):
    def __init__(self, mu=1.0):
        super().__init__()
        self.mu = parameter(mu)

    def forward(self, t, y):
        x, v = y.unbind(-1)
        return torch.stack([v, self.mu * (1 - x**2) * v - x], -1)


def period_average(mu):
    """The mean of x^2 over a period of van der Pol's cycle, by SciPy."""
    from scipy.integrate import solve_ivp

    def rates(t, y):
        return [y[1], mu * (1 - y[0] ** 2) * y[1] - y[0], y[0] ** 2]

    def crossing(t, y):
        return y[0]

    crossing.direction = 1
    options = {"rtol": 1e-12, "atol": 1e-13, "method": "DOP853"}
    run = solve_ivp(rates, [0, 100], [0.1, 2.0, 0.0], events=crossing, **options)
    (times,), (states,) = run.t_events, run.y_events
    return (states[-1, 2] - states[-2, 2]) / (times[-1] - times[-2])


@pytest.mark.marathon
def test_a_limit_cycle_has_the_derivative_of_its_period_average():
    dynamics = ODE(Oscillator())

    def initial(count, generator):
        return dynamics.init(torch.tensor([2.0, 0.0], dtype=torch.float64).expand(count, 2))

    run = adjsim.Simulation(dynamics, initial, [0.0, 120.0], adjsim.RungeKutta("rk4", 0.05))
    found = Shadowing(0, 1.0, burn_in=30.0)(
        run, TimeAverage(lambda s: s.y[..., 0] ** 2), replicas=1, chunks=1
    )
    h = 1e-3
    expected = (period_average(1 + h) - period_average(1 - h)) / (2 * h)
    # The parts of a period at both ends of 13 periods.
    assert float(found.grad["fun.mu"]) == pytest.approx(expected, rel=0.02)


@pytest.mark.marathon
def test_intervals_cover_on_a_hyperbolic_map():
    """The cat map in coordinates that s bends: x' = h(A h^-1(x)), h(x) = x + s sin(2 pi x)/2 pi.

    Its paths are those of the cat map, bent by h, so shadowing paths are typical, and averages are
    those of J(h(x)) over the square. At s = 0, where h^-1 is known to first order, the derivative
    of <cos 2 pi x> is -<sin^2 2 pi x> = -1/2.
    """
    s = parameter(0.0)

    def bend(x, by):
        first = x[..., :1]
        return torch.cat([first + by * torch.sin(2 * math.pi * first), x[..., 1:]], -1)

    def step(state):
        x, u = bend(state, -s / (2 * math.pi)).unbind(-1)
        turned = torch.remainder(torch.stack([2 * x + u, x + u], -1), 1.0)
        return bend(turned, s / (2 * math.pi))

    steps = StepMap(step, None, lambda state: torch.cos(2 * math.pi * state[..., :1]), 1.0)
    repetitions, group, length, count = 100, 12, 5, 200
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(repetitions * group, 2, generator=generator, dtype=torch.float64)
    states = trajectory(steps, start, count)
    found = sweep(steps, states, averages(steps, states), length, 1)
    values = torch.stack(
        [
            derivative(steps, states[:, i : i + 1], found.of(slice(i, i + 1)), 0.0, {"s": s})["s"]
            for i in range(repetitions * group)
        ]
    ).reshape(repetitions, group)
    stderr = values.std(1) / math.sqrt(group)
    # The interval of GradientEstimate: Student's t, at 97.5 % with 11 degrees of freedom.
    covered = int(((values.mean(1) + 0.5).abs() < stdtrit(group - 1, 0.975) * stderr).sum())
    assert 90 <= covered <= 99
    assert float(values.mean()) == pytest.approx(-0.5, abs=0.01)
    # With a combination that is not the smallest one the mean is another.
    other = found._replace(mixed=0 * found.mixed, removed=0 * found.removed)
    lost = float(derivative(steps, states, other, 0.0, {"s": s})["s"])
    assert abs(lost + 0.5) > 4 * float(values.std()) / math.sqrt(values.numel())
    rates = found.triangles[..., 0, 0].abs().log().mean() / length
    # The exponent of the cat map: the logarithm of the square of the golden ratio.
    # A random vector takes a few of the 200 steps to turn into its direction.
    assert float(rates) == pytest.approx(2 * math.log((1 + math.sqrt(5)) / 2), rel=0.01)


def test_the_tail_index_of_rates_that_are_drawn():
    """Independent rates of variance s^2 over segments of length h: 2 exponent / (h s^2)."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1024, 16, 2, generator=generator, dtype=torch.float64)
    rates = torch.tensor([0.5, -0.25]) + torch.tensor([1.2, 0.4]) * drawn
    parts = [Chunk(torch.zeros(()), {}, {}, x) for x in rates.split(8, 1)]
    rest = ODE(lambda t, y: -y)
    run = adjsim.Simulation(
        rest, lambda n, _: rest.init(torch.ones(n, 2)), [0.0, 1.0], adjsim.RungeKutta("rk4", 0.1)
    )
    for penalty in (0.0, 1e-3):
        found = Shadowing(2, 0.5, penalty=penalty).combine(run, parts, [8, 8])
        (grows, steep), (decays, flat) = found["tail_index"].items()
        # Means of 16384 rates, and variances of 512 blocks: four standard errors.
        assert grows == pytest.approx(0.5, abs=4 * 1.2 / 128)
        assert decays == pytest.approx(-0.25, abs=4 * 0.4 / 128)
        assert steep == pytest.approx(2 * 0.5 / (0.5 * 1.2**2), rel=4 * math.sqrt(2 / 512))
        assert flat == pytest.approx(2 * 0.25 / (0.5 * 0.4**2), rel=4 * math.sqrt(2 / 512))
        worse = [reason for reason in found["reasons"] if "longer runs are worse" in reason]
        assert len(worse) == (penalty == 0)


def test_growth_is_from_the_second_half_to_the_first_quarter():
    """Of the largest numbers of the particular solutions, whose sweep goes back in time."""
    sizes = torch.tensor([6.0, 4.0, 1.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    none = torch.zeros(0)
    found = Cotangents(none, sizes[:, None, None, None], *[none] * 4)
    assert _growth(found) == 4.0 / 2.0
    few = torch.tensor([6.0, 4.0, 1.0, 2.0])[:, None, None, None]
    assert _growth(found._replace(particular=few)) == 6.0 / 2.0
    assert _growth(found._replace(particular=torch.zeros(8, 1, 1, 1))) == 1.0


@pytest.mark.parametrize(("duration", "rests"), [(3.6, False), (4.4, True)])
def test_a_rate_that_falls_to_a_twentieth_settles(duration, rests):
    """The largest rate of exp(-t) in the last quarter is exp(-3/4 duration): 0.067 and 0.037."""
    step = StepMap(lambda y: y, lambda y: -y, lambda y: y, duration / 1000)
    states = torch.exp(-torch.linspace(0, duration, 1001))[:, None, None]
    with pytest.raises(ValueError, match="at rest") if rests else nullcontext():
        refuse_rest(step, states)


@pytest.mark.marathon
def test_a_conserved_quantity_is_said():
    """Lorenz' equations beside a constant c: the exponent of c is zero."""

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.lorenz = Lorenz()

        def forward(self, t, y):
            return torch.cat([self.lorenz(t, y[..., :3]), 0 * y[..., 3:]], -1)

    dynamics = ODE(Beside())

    def initial(count, generator):
        noise = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        return dynamics.init(noise + torch.tensor([0.0, 0.0, 25.0, 0.0]))

    run = adjsim.Simulation(dynamics, initial, [0.0, 15.0], adjsim.RungeKutta("rk4", 0.01))
    found = Shadowing(2, 0.5, burn_in=5.0)(
        run, TimeAverage(height), replicas=4, chunks=4, generator=0
    )
    assert any("second neutral direction" in reason for reason in found.warnings)


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        pytest.param(
            lambda: lorenz(Shadowing(0, 1.0), 24.0, 2),
            RuntimeError,
            "more unstable directions",
            marks=pytest.mark.marathon,
        ),
        (lambda: lorenz(Shadowing(3, 1.0), 20.0, 2), ValueError, "at most 2"),
        (lambda: lorenz(Shadowing(2, 0.333), 20.0, 2), ValueError, "multiple of the step"),
        (lambda: lorenz(Shadowing(2, 1.0), 20.5, 2), ValueError, "without a rest"),
        (lambda: lorenz(Shadowing(2, 1.0, burn_in=19.0), 20.0, 2), ValueError, "two or more"),
        (lambda: lorenz(Shadowing(2, 1.0), 20.0, 2, dt=0.25), FloatingPointError, "smaller dt"),
        (lambda: Shadowing(-1, 1.0), ValueError, "negative"),
        (lambda: Shadowing(1, 0.0), ValueError, "positive time"),
        (lambda: Shadowing(1, 1.0, penalty=-1.0), ValueError, "penalty"),
    ],
)
def test_what_is_refused(make, kind, says):
    with pytest.raises(kind, match=says):
        make()


def test_fields_may_be_written_for_one_batch_axis():
    """An axis counted from the front means the same in the sweeps as in the run."""

    class FromTheFront(Lorenz96):
        def forward(self, t, y):
            return (y.roll(-1, 1) - y.roll(2, 1)) * y.roll(1, 1) - y + self.forcing

    found = []
    for make in (Lorenz96, FromTheFront):
        dynamics = ODE(make())

        def initial(count, generator, dynamics=dynamics):
            return dynamics.init(8 + torch.randn(count, 6, generator=generator).double())

        run = adjsim.Simulation(dynamics, initial, [0.0, 3.0], adjsim.RungeKutta("rk4", 0.05))
        mean = TimeAverage(lambda state: state.y.mean(-1))
        found.append(Shadowing(4, 0.5, penalty=1.0)(run, mean, replicas=3, chunks=3, generator=0))
    one, other = (x.grad["fun.forcing"] for x in found)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_an_observable_may_read_a_parameter():
    """d<z - 100 rho>/drho is d<z>/drho - 100, for one sweep of one chunk and of several."""
    dynamics, path = ODE(Lorenz()), Shadowing(2, 0.5, burn_in=0.5)

    def initial(count, generator):
        noise = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        return dynamics.init(noise + torch.tensor([0.0, 0.0, 25.0]))

    def below(state):
        return state.y[..., 2] - 100 * dynamics.fun.rho

    run = adjsim.Simulation(dynamics, initial, [0.0, 2.0], adjsim.RungeKutta("rk4", 0.025))
    for chunks in (1, 2):
        plain, shifted = (
            path(run, TimeAverage(fn), replicas=2, chunks=chunks, generator=0)
            for fn in (height, below)
        )
        for name, shift in {"fun.rho": 100.0, "fun.sigma": 0.0, "fun.beta": 0.0}.items():
            expected = plain.grad[name] - shift
            # The mean of z - 2,800 carries thirteen digits.
            torch.testing.assert_close(shifted.grad[name], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("burn_in", [0.0, 60.0])
def test_runs_that_settle_are_refused(burn_in):
    """At rho = 10 the fixed points attract, at a rate of 0.6; after 60 only rounding moves."""
    dynamics = ODE(Lorenz())
    with torch.no_grad():
        dynamics.fun.rho.fill_(10.0)

    def initial(count, generator):
        return dynamics.init(torch.tensor([4.0, 5.0, 9.0], dtype=torch.float64).expand(count, 3))

    run = adjsim.Simulation(dynamics, initial, [0.0, burn_in + 20], adjsim.RungeKutta("rk4", 0.05))
    with pytest.raises(ValueError, match="settles on a fixed point: its largest rate is"):
        Shadowing(1, 1.0, burn_in=burn_in)(run, TimeAverage(height), replicas=1, chunks=1)


def test_pulses_and_rest_are_refused():
    class Pulse(Oscillator):
        def forward(self, t, y):
            push = 5.0 * ((t % 1.0) < 0.5) * torch.tensor([0.0, 1.0], dtype=y.dtype)
            return super().forward(t, y) + push

    class Relax(nn.Module):
        def __init__(self):
            super().__init__()
            self.rest = parameter(1.0)

        def forward(self, t, y):
            return self.rest - y

    mean = TimeAverage(lambda state: state.y.square().mean(-1))
    for make, says in ((Pulse, "differs between t = 0"), (Relax, "at rest")):
        dynamics = ODE(make())

        def initial(count, generator, dynamics=dynamics):
            return dynamics.init(torch.ones(count, 2, dtype=torch.float64))

        run = adjsim.Simulation(dynamics, initial, [0.0, 100.0], adjsim.RungeKutta("rk4", 0.1))
        with pytest.raises(ValueError, match=says):
            Shadowing(0, 1.0)(run, mean, replicas=2, chunks=2)


def test_runs_that_do_not_fit_are_refused():
    average = TimeAverage(lambda state: state[0].sum(-1))

    class Forced(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = parameter(1.0)

        def forward(self, t, y):
            return torch.sin(t) - self.rate * y

    forced = ODE(Forced())

    def initial(count, generator):
        return forced.init(torch.zeros(count, 2, dtype=torch.float64))

    run = adjsim.Simulation(forced, initial, [0.0, 4.0], adjsim.RungeKutta("rk4", 0.1))
    with pytest.raises(ValueError, match="differs between t = 0 and"):
        Shadowing(1, 1.0)(run, average, replicas=2)
    with pytest.raises(TypeError, match="TimeAverage"):
        Shadowing(1, 1.0)(run, adjsim.Final(lambda s: s.y.sum(-1)), replicas=2)
    other = adjsim.Simulation(forced, initial, [0.0, 4.0], adjsim.Coupled("rk4", 0.1, rate=2.0))
    with pytest.raises(TypeError, match="RungeKutta"):
        Shadowing(1, 1.0)(other, average, replicas=2)
    molecular = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    atoms = adjsim.Simulation(
        molecular,
        lambda n, g: molecular.init(torch.ones(n, 1, 1), torch.ones(n, 1, 1)),
        [0.0, 4.0],
        adjsim.VelocityVerlet(0.1),
    )
    with pytest.raises(TypeError, match="ScoreFunction or Reweighting"):
        Shadowing(1, 1.0)(atoms, average, replicas=2)
