"""Gradients through solve_ivp: every method, output and input against finite differences, and
against known answers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import scipy.integrate
import torch
from torch import nn

import adjsim
import adjsim.ivp.collocation_sweep
import adjsim.ivp.quadrature
import adjsim.ivp.rhs
from tests.problems import slow_but

METHODS = ["RK23", "RK45", "DOP853", "Radau", "BDF", "LSODA"]
ADJOINTS = ["interpolate", "checkpoint", "backsolve"]
# RK23 takes many steps.
RTOL = {"RK23": 1e-6}


class Driven(nn.Module):
    """A damped quartic oscillator that is driven: k is an argument, damping a parameter, the drive
    is declared.
    """

    def __init__(self, damping, drive):
        super().__init__()
        self.damping, self.drive = damping, drive

    def forward(self, t, y, k):
        force = -k * y[0] - y[0] ** 3 - self.damping * y[1] + self.drive[0] * torch.cos(2.0 * t)
        return torch.stack([y[1], force])


START = {
    "y0": [1.0, 0.3],
    "k": 2.0,
    "damping": 0.3,
    "drive": 0.7,
    "t0": 0.1,
    "t1": 3.4,
    "t_eval": [0.4, 0.9, 1.7],
    "height": 0.15,
    "restitution": 0.8,
    "t": [1.1, 2.05],
}


def crossing(height):
    def event(t, y, k):
        return y[0] - height * (1 + 0.1 * t)

    return event


def loss(output: str, values: dict, method: str, adjoint: str = "interpolate", **options):
    """A number that depends on one kind of output."""
    v = values
    fun = Driven(v["damping"], [v["drive"]])
    event = crossing(v["height"])
    if output in ("terminal", "reset"):
        event.terminal = output == "terminal"
        event.direction = -1
    if output == "reset":
        event.reset = lambda t, y, k: torch.stack(
            [v["height"] * (1 + 0.1 * t), -v["restitution"] * y[1] * k / 2 + 0.2 * t]
        )
    solution = adjsim.solve_ivp(
        fun,
        (v["t0"], v["t1"]),
        v["y0"],
        method,
        v["t_eval"] if output in ("saved", "reset") else None,
        output == "dense",
        event if output in ("t_events", "y_events", "terminal", "reset") else None,
        args=(v["k"],),
        params=[v["damping"], v["drive"]],
        adjoint=adjoint,
        **options,
    )
    weights = torch.tensor([[1.0, -0.6, 0.4], [0.3, 0.8, -0.5]])
    if output in ("saved", "reset"):
        return (weights * solution.y).sum() + (weights[0] * solution.t).sum()
    if output == "last":
        return (
            (weights[:, 0] * solution.y[:, -1]).sum()
            + 0.3 * solution.t[-1]
            + 0.2 * solution.y[1, 0]
        )
    if output == "dense":
        return (weights[:, :2] * solution.sol(v["t"])).sum()
    if output == "t_events":
        assert len(solution.t_events[0]) == 2
        return (solution.t_events[0] * weights[0, :2]).sum()
    if output == "y_events":
        return (solution.y_events[0] * weights[:, :2]).sum()
    return solution.t[-1] + (solution.y[:, -1] * weights[:, 0]).sum() + solution.y_events[0][0, 1]


def tensors(**changed) -> dict:
    return {name: torch.tensor(value) for name, value in {**START, **changed}.items()}


def directions() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(x.shape, generator=generator) for name, x in tensors().items()}


@functools.cache
def slope(output: str) -> torch.Tensor:
    """Central differences along a direction in all inputs, of a solution of tolerance 1e-13.

    They are good to 1e-7.
    """
    h, ends = 1e-4, []
    with torch.no_grad():
        for sign in (1, -1):
            along = directions()
            values = {name: x + sign * h * along[name] for name, x in tensors().items()}
            ends.append(loss(output, values, "DOP853", rtol=1e-13, atol=1e-14))
    return (ends[0] - ends[1]) / (2 * h)


@functools.cache
def gradients(output: str, method: str, adjoint: str) -> dict[str, torch.Tensor]:
    values = {name: value.requires_grad_() for name, value in tensors().items()}
    # A parameter of a module, and one with a history.
    values["damping"] = nn.Parameter(values["damping"].detach())
    source = values["drive"]
    rtol = RTOL.get(method, 1e-8)
    loss(
        output, {**values, "drive": source * 1.0}, method, adjoint, rtol=rtol, atol=rtol / 10
    ).backward()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in values.items()}


OUTPUTS = ["saved", "last", "dense", "t_events", "y_events", "terminal", "reset"]
# How an output enters the adjoint does not depend on the method: one method has all outputs but
# times of events, which states at events contain, and the other adjoints have events, which enter
# last.
DEFAULT = {
    ("RK45", "interpolate"): [x for x in OUTPUTS if x not in ("t_events", "last", "dense")],
    ("Radau", "interpolate"): ["dense"],
    ("RK45", "checkpoint"): ["y_events"],
    ("RK45", "backsolve"): ["reset"],
}


@pytest.mark.parametrize(
    ("method", "adjoint", "output"),
    slow_but(
        lambda method, adjoint, output: output in DEFAULT.get((method, adjoint), []),
        [
            (*row, output)
            for row in (
                *((method, "interpolate") for method in METHODS),
                *((m, a) for m in ("RK45", "Radau", "LSODA") for a in ADJOINTS[1:]),
            )
            for output in OUTPUTS
        ],
        # RK23 takes many steps; what it has of its own is its interpolant.
        marathon=lambda method, adjoint, output: (
            (adjoint != "interpolate" and output not in ("dense", "reset"))
            or (method not in ("RK45", "Radau") and output != "dense")
        ),
    ),
)
def test_table(method, adjoint, output):
    """To thirty times the tolerance of the solution (BDF and LSODA are known to miss theirs by
    more: a thousand).
    """
    rtol = RTOL.get(method, 1e-8) * (1000 if method in ("BDF", "LSODA") else 30)
    found = gradients(output, method, adjoint)
    # A direction at random, to which every input adds.
    along = directions()
    mine = sum((found[name] * along[name]).sum() for name in found)
    torch.testing.assert_close(mine, slope(output), rtol=rtol, atol=rtol + 1e-7)


@pytest.mark.slow
def test_the_table_can_fail():
    """Every input matters to some output, and every output depends on most inputs."""
    sizes = {
        output: {
            name: float(x.abs().max())
            for name, x in gradients(output, "DOP853", "interpolate").items()
        }
        for output in OUTPUTS
    }
    for name in START:
        assert max(sizes[output][name] for output in OUTPUTS) > 1e-2, name
    for output in OUTPUTS:
        assert sum(size > 1e-2 for size in sizes[output].values()) >= 5, output


def quick(t, y, p):
    return -0.1 * y + p * torch.sin(20 * t)


def switched(t, y, p):
    return -0.1 * y + p * (t > 1)


@pytest.mark.parametrize(
    ("fun", "method", "adjoint"),
    slow_but(
        lambda fun, method, adjoint: method == "RK45" and adjoint == "interpolate",
        [
            (fun, method, adjoint)
            for fun in (quick, switched)
            for method in ("RK45", "DOP853", "BDF")
            for adjoint in ADJOINTS
            # The state of backsolve has a kink at the switch that no step knows of.
            if (fun, adjoint) != (switched, "backsolve")
        ],
        marathon=lambda fun, method, adjoint: (
            method == "DOP853" or (method == "BDF" and adjoint != "interpolate")
        ),
    ),
)
def test_what_changes_faster_than_the_adjoint(fun, method, adjoint):
    """The adjoint of y' = -0.1 y + p s(t) is an exponential, whatever s is; so are its steps. Over
    steps as long as ten, which DOP853 takes here, SciPy's interpolant of order seven is good to
    1e-5 only: 1/8! of what the step is."""
    p = leaf(0.0)  # the way forward knows nothing of s either
    found = adjsim.solve_ivp(
        fun, (0, 10), [1.0], method, [10.0], args=(p,), rtol=1e-8, atol=1e-11, adjoint=adjoint
    )
    found.y[0, -1].backward()
    s = (lambda t: math.sin(20 * t)) if fun is quick else (lambda t: float(t > 1))
    exact = scipy.integrate.quad(
        lambda t: math.exp(-0.1 * (10 - t)) * s(t), 0, 10, points=[1.0], limit=500, epsabs=1e-13
    )[0]
    assert float(p.grad) == pytest.approx(
        exact, abs=1e-6 if fun is quick or method != "DOP853" else 1e-4
    )


@pytest.mark.parametrize("method", ["RK45", "BDF"])
def test_a_derivative_that_cancels_takes_no_time(method):
    """What is left of it is rounding, which no division makes smooth."""
    p, q = leaf(0.3), leaf(0.2)
    evaluations = []

    def rotate(t, y, p, q):
        evaluations.append(t)
        push = p * torch.sin(3 * t) * (y[0] + 0.1)
        return torch.stack([push - q * y[1], push - q * y[1]])

    found = adjsim.solve_ivp(
        rotate, (0, 3), [1.0, 0.3], method, [3.0], args=(p, q), rtol=1e-8, atol=1e-10
    )
    (found.y[0, -1] - found.y[1, -1]).backward()
    assert abs(float(p.grad)) < 1e-12
    assert abs(float(q.grad)) < 1e-12
    assert len(evaluations) < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("method", ["RK45", pytest.param("Radau", marks=pytest.mark.slow)])
def test_a_derivative_that_is_not_finite_or_random_is_refused(method, monkeypatch):
    for module in (adjsim.ivp.quadrature, adjsim.ivp.collocation_sweep):
        monkeypatch.setattr(module, "DIVISIONS", 200)
    p = leaf(0.0)
    endless = adjsim.solve_ivp(
        lambda t, y, p: -y + torch.sqrt(p * t), (0, 1), [1.0], method, args=(p,), rtol=1e-6
    )
    with pytest.raises(FloatingPointError, match="with respect to a parameter is not finite"):
        endless.y[0, -1].backward()
    p = leaf(0.0)
    noisy = adjsim.solve_ivp(
        lambda t, y, p: -y + p * torch.randn(()), (0, 1), [1.0], method, args=(p,), rtol=1e-6
    )
    with pytest.raises(RuntimeError, match="does not converge"):
        noisy.y[0, -1].backward()


def test_an_event_that_reads_its_parameter_late():
    p = leaf(1.0)
    found = adjsim.solve_ivp(
        lambda t, y: -y, (0, 2), [1.0], events=lambda t, y: p * t - 1 if t > 0.5 else 0 * y[0] - 1
    )
    found.t_events[0].sum().backward()
    assert float(p.grad) == pytest.approx(-1.0, abs=1e-9)


def test_many_read_times_take_few_evaluations():
    """A thousand read times take about as many evaluations of fun backward as a tenth of them."""
    counts, slopes = [], []
    for many in (100, 1000):
        evaluations, k = [], leaf(1.3)

        def spring(t, y, k, evaluations=evaluations):
            evaluations.append(t)
            return torch.stack([y[1], -k * y[0]])

        times = torch.linspace(0, 10, many)
        found = adjsim.solve_ivp(
            spring, (0, 10), [1.0, 0.0], "DOP853", times, args=(k,), rtol=1e-9, atol=1e-11
        )
        forward = len(evaluations)
        found.y[0].sum().backward()
        counts.append(len(evaluations) - forward)
        root = leaf(1.3).sqrt()
        exact = torch.autograd.grad(torch.cos(root * times).sum(), root)[0] / (2 * root)
        slopes.append(float(k.grad / exact - 1))
    assert counts[0] < 100
    assert counts[1] < 2 * counts[0]
    assert max(map(abs, slopes)) < 1e-8


@pytest.mark.parametrize("read", [pytest.param("few", marks=pytest.mark.slow), "steps"])
def test_controls_that_jump_are_as_accurate_as_other_parameters(read, monkeypatch):
    """The error of a step over a jump is as large as the difference of its two results.

    With the states read at the ends of all forward steps, none is inside an interval.
    """
    monkeypatch.setattr(adjsim.ivp.collocation_sweep, "DIVISIONS", 60)
    many, end = 8, 2.0
    borders = torch.linspace(0, end, many + 1)
    controls = leaf(torch.cos(torch.arange(many) ** 2.0).tolist())

    def fun(t, y, controls):
        k = (torch.searchsorted(borders, t) - 1).clamp(0, many - 1)
        return torch.stack([y[1], -y[0] + controls[k]])

    at = None if read == "steps" else torch.tensor([0.7, end])
    run = adjsim.solve_ivp(
        fun, (0, end), [1.0, 0.0], t_eval=at, args=(controls,), rtol=1e-6, atol=1e-9
    )
    run.y.sum().backward()
    begins = (run.t[:, None] - borders[:-1]).clamp(min=0)
    ends = (run.t[:, None] - borders[1:]).clamp(min=0)
    exact = ends.cos() - begins.cos() + begins.sin() - ends.sin()
    missed = (controls.grad - exact.detach().sum(0)).abs().max()
    assert missed < 3e-6 * controls.grad.abs().max()


def test_read_times_that_nearly_coincide_take_few_evaluations():
    """An interval of 1e-13 does not make the step behind the next jump as short."""
    evaluations, k = [], leaf(1.3)

    def spring(t, y, k):
        evaluations.append(t)
        return torch.stack([y[1], -k * y[0]])

    times = torch.linspace(0, 4, 61)
    times = torch.cat([times, times[:-1] + 1e-13, times[:-1] + 1e-5]).unique()
    found = adjsim.solve_ivp(spring, (0, 4), [1.0, 0.0], t_eval=times, args=(k,), rtol=1e-6)
    forward = len(evaluations)
    found.y[0].sum().backward()
    assert len(evaluations) - forward < 150


TOGETHER = itertools.product(
    ["even", "uneven", "backward", "complex", "stiff", "reset"],
    ["RK45", "BDF"],
    ["interpolate", "checkpoint"],
)


@pytest.mark.parametrize(
    ("case", "method", "adjoint"),
    slow_but(
        lambda *row: row[1:] == ("RK45", "interpolate") and row[0] not in ("stiff", "backward"),
        TOGETHER,
    ),
)
def test_intervals_together_are_those_one_by_one(case, method, adjoint, monkeypatch):
    """To the tolerance: each interval takes the same step, with the matrices of many at once."""
    generator = torch.Generator().manual_seed(1)
    even = torch.linspace(0, 4, 80)
    uneven = torch.cat([even[::8], 4 * torch.rand(70, generator=generator) ** 3]).unique()
    times = even if case in ("even", "complex", "stiff", "reset") else uneven
    weights = torch.randn(2, len(times), generator=generator)

    def fun(t, y, p):
        fast = 300.0 if case == "stiff" else 1.0
        turn = 1j if case == "complex" else 1.0
        return torch.stack(
            [turn * p[0] * y[1], -y[0] * (1 + p[1] * y[0] ** 2) - fast * p[2] * y[1]]
        )

    def down(t, y, p):
        return y[0] - 0.3

    down.direction, down.reset = -1, lambda t, y, p: torch.stack([y[0] + 0.5 * p[0], y[1]])
    events = {"events": down} if case == "reset" else {}
    found = []
    for most in (1, 32):
        monkeypatch.setattr(adjsim.ivp.collocation_sweep, "MOST_TOGETHER", most)
        p, start = leaf([1.1, 0.4, 0.2]), leaf([1.0, 0.5])
        y0 = start * (1 + 0.3j) if case == "complex" else start
        span = (4, 0) if case == "backward" else (0, 4)
        at = times.flip(0) if case == "backward" else times
        run = adjsim.solve_ivp(
            fun, span, y0, method, at, args=(p,), rtol=1e-7, atol=1e-9, adjoint=adjoint, **events
        )
        y = torch.view_as_real(run.y).sum(-1) if case == "complex" else run.y
        loss = (weights[:, : y.shape[1]] * y).sum()
        found.append(torch.cat(torch.autograd.grad(loss, [p, start])))
    assert torch.allclose(*found, rtol=1e-7, atol=1e-7)


# Known answers.


def van_der_pol(t, y, mu):
    return [y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]]


def of_van_der_pol(method, rtol, adjoint="interpolate", end=10.0):
    mu = torch.tensor(5.0, requires_grad=True)
    found = adjsim.solve_ivp(
        van_der_pol,
        (0, end),
        [2.0, 0.0],
        method,
        [end],
        args=(mu,),
        rtol=rtol,
        atol=rtol / 1000,
        adjoint=adjoint,
    )
    found.y[0, -1].backward()
    return float(mu.grad)


@pytest.mark.parametrize(
    ("method", "rtol", "error", "adjoint"),
    [
        *slow_but(
            lambda method, rtol, error, adjoint: (
                (method, rtol, adjoint)
                in (("RK45", 1e-6, "interpolate"), ("BDF", 1e-6, "checkpoint"))
            ),
            [
                (method, *row)
                for method in METHODS
                for row in (
                    (1e-3, 5e-2, "interpolate"),
                    (1e-6, 1e-4, "interpolate"),
                    (1e-6, 1e-4, "checkpoint"),
                    (1e-9, 1e-7, "interpolate"),
                )
                if (method, row[0]) != ("RK23", 1e-9)
            ],
            marathon=lambda method, rtol, error, adjoint: (
                method in ("RK23", "DOP853") or (rtol == 1e-9 and method in ("RK45", "BDF"))
            ),
        ),
        # A method of third order needs 10 s.
        pytest.param("RK23", 1e-9, 1e-7, "interpolate", marks=pytest.mark.marathon),
    ],
)
@pytest.mark.filterwarnings("ignore:a gradient at rtol")
def test_van_der_pol(method, rtol, error, adjoint):
    assert abs(of_van_der_pol(method, rtol, adjoint) + 0.631501703) < error


@pytest.mark.slow
def test_backsolve_loses_what_its_docstring_says():
    """Right where the state can be integrated backward, as in the table; on van der Pol lost, with
    a warning.
    """
    with pytest.warns(UserWarning, match="misses the start by"):
        found = {adjoint: of_van_der_pol("RK45", 1e-6, adjoint, 5.0) for adjoint in ADJOINTS}
    assert found["interpolate"] == pytest.approx(1.90196, abs=1e-4)
    assert found["checkpoint"] == pytest.approx(1.90196, abs=1e-4)
    assert abs(found["backsolve"] - 1.90196) > 1
    with pytest.raises(RuntimeError, match=r"adjoint failed at t = .* step size"):
        of_van_der_pol("RK45", 1e-6, "backsolve", 10.0)


def drag(t, y, b, m, g):
    return torch.stack([y[1], -(b / m) * y[1] ** 2 - g])


def linear_drag(t, y, b, m, g):
    return torch.stack([y[1], -(b / m) * y[1] - g])


BALLS = {
    "quadratic": (drag, 9.8, 3.31616078, (-12.86249251, 1.28624925, -0.41137688, 0.60614050)),
    "linear": (linear_drag, 9.81, 4.77075110, (-3.123191, 0.312319, -0.483742, 0.951626)),
}


@pytest.mark.parametrize(
    ("ball", "method"),
    slow_but(
        lambda ball, method: ball == "quadratic" and method != "RK23",
        itertools.product(BALLS, METHODS),
        marathon=lambda ball, method: method == "RK23",
    ),
)
def test_balls_with_drag(ball, method):
    """To 1e-7, or to half of the last digit that is known of the answer."""
    fun, gravity, height, answers = BALLS[ball]
    b, m, g, v0 = (torch.tensor(x, requires_grad=True) for x in (0.1, 1.0, gravity, 10.0))
    found = adjsim.solve_ivp(fun, (0, 1), [0.0, v0], method, args=(b, m, g), rtol=1e-10, atol=1e-12)
    found.y[0, -1].backward()
    assert abs(float(found.y[0, -1]) - height) < 1e-7
    known = 1e-7 if ball == "quadratic" else 6e-7
    for x, answer in zip((b, m, g, v0), answers, strict=True):
        assert abs(float(x.grad) - answer) < known
    # A scale of both b and m changes nothing.
    assert abs(float(m * m.grad + b * b.grad)) < 1e-7


@pytest.mark.parametrize("method", METHODS)
def test_linear_drag_in_closed_form(method):
    """To 1e-7, where the answers above have six digits."""
    numbers = [0.1, 1.0, 9.81, 10.0]
    mine, known = ([leaf(x) for x in numbers] for _ in range(2))
    b, m, g, v0 = known
    ((v0 + g * m / b) * (m / b) * (1 - torch.exp(-b / m)) - g * m / b).backward()
    found = adjsim.solve_ivp(
        linear_drag, (0, 1), [0.0, mine[3]], method, args=tuple(mine[:3]), rtol=1e-10, atol=1e-12
    )
    found.y[0, -1].backward()
    for x, y in zip(mine, known, strict=True):
        assert abs(float(x.grad - y.grad)) < 1e-7


@pytest.mark.marathon
def test_backward_tolerances_are_their_own():
    """A tenth of the forward ones by default; looser, the gradient is worse though the solution is
    the same.
    """

    def error(**options):
        mu = leaf(5.0)
        found = adjsim.solve_ivp(
            van_der_pol,
            (0, 10),
            [2.0, 0.0],
            t_eval=[10.0],
            args=(mu,),
            rtol=1e-9,
            atol=1e-12,
            **options,
        )
        found.y[0, -1].backward()
        return abs(float(mu.grad) + 0.631501703)

    default, written, loose = (
        error(),
        error(adjoint_rtol=1e-10, adjoint_atol=1e-13),
        error(adjoint_rtol=1e-4),
    )
    # The steps backward cover at most eight forward ones, so that a loose tolerance costs a factor
    # of eleven here.
    assert default == written < 1e-8
    assert 5 * default < loose < 1e-6


def test_a_backward_tolerance_of_zero_is_not_the_default():
    """A relative one is the smallest that SciPy accepts."""

    def slope(**options):
        # So many states that the method integrates the adjoint too.
        start = leaf([1.0] * 20)
        found = adjsim.solve_ivp(lambda t, y: -y, (0, 1), start, "DOP853", t_eval=[1.0], **options)
        return float(torch.autograd.grad(found.y.sum(), start)[0][0])

    assert abs(slope(adjoint_rtol=0) - math.exp(-1)) < 1e-13 < abs(slope() - math.exp(-1))
    assert slope(adjoint_atol=0) != slope()


@pytest.mark.parametrize("name", ["adjoint_rtol", "adjoint_atol"])
def test_a_backward_tolerance_that_no_step_meets_is_refused(name):
    """Before the run: with NaN the adjoint would take steps without an end."""
    for value, why in [
        (math.nan, "zero or positive"),
        (-1.0, "zero or positive"),
        ([1.0], "number"),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"{name} must be .*{why}"):
            adjsim.solve_ivp(lambda t, y: -y, (0, 1), leaf([1.0]), **{name: value})


@pytest.mark.parametrize("method", ["RK45", "Radau"])
def test_parameters_do_not_shorten_the_steps(method, monkeypatch):
    """Each tensor's integral has an error of its own: thirty numbers take the steps of the adjoint
    that one takes.
    """
    counts = []
    name = "state_vjp" if method == "RK45" else "transposed_jacobians"
    pull = getattr(adjsim.ivp.rhs.RightHandSide, name)
    for many in (1, 30):
        seen = []
        monkeypatch.setattr(
            adjsim.ivp.rhs.RightHandSide,
            name,
            lambda *a, seen=seen: (seen.append(a[1]), pull(*a))[1],
        )
        p = torch.ones(many, requires_grad=True)

        def spring(t, y, p):
            one = p.sum() / p.sum().detach()
            return one * torch.cat([y[1:2], -y[:1] - y[:1] ** 3, -y[2:]])

        # So many states that the explicit method integrates the adjoint too.
        start = [1.0] + [0.0] * 19
        found = adjsim.solve_ivp(
            spring, (0, 3), start, method, [3.0], args=(p,), rtol=1e-7, atol=1e-9
        )
        found.y[0, -1].backward()
        assert p.grad.shape == (many,)
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0


def leaf(x: float) -> torch.Tensor:
    return torch.tensor(x, requires_grad=True)


TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def free_fall(t, y, g):
    return torch.stack([y[1], -g])


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("method", METHODS)
def test_bouncing_ball(method, adjoint):
    y0, v0, g, e = leaf(1.0), leaf(0.0), leaf(9.81), leaf(0.9)

    def floor(t, y, g):
        return y[0]

    floor.reset = lambda t, y, g: torch.stack([y[0], -e * y[1]])
    found = adjsim.solve_ivp(
        free_fall, (0, 1), [y0, v0], method, events=floor, args=(g,), **TIGHT, adjoint=adjoint
    )
    found.y[0, -1].backward()
    assert abs(float(found.y[0, -1]) - 0.71094914) < 1e-8
    for x, answer in zip(
        (y0, v0, g, e), (1.40797457, 0.14210508, -0.07105254, 2.42944692), strict=True
    ):
        assert abs(float(x.grad) - answer) < 1e-7


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("method", METHODS)
def test_event_time(method, adjoint):
    y0, v0, g, h = leaf(1.0), leaf(2.0), leaf(9.81), leaf(0.2)

    def ground(t, y, g):
        return y[0] - h

    ground.terminal = True
    found = adjsim.solve_ivp(
        free_fall, (0, 5), [y0, v0], method, events=ground, args=(g,), **TIGHT, adjoint=adjoint
    )
    found.t_events[0][0].backward()
    assert abs(float(found.t[-1]) - 0.65627090) < 1e-8
    for x, answer in zip(
        (y0, v0, g, h), (0.22532583, 0.14787479, -0.04852296, -0.22532583), strict=True
    ):
        assert abs(float(x.grad) - answer) < 1e-7


# Events.


def derivative(
    function: Callable[[torch.Tensor], torch.Tensor], at: float, h: float = 1e-5
) -> float:
    with torch.no_grad():
        return float(function(torch.tensor(at + h)) - function(torch.tensor(at - h))) / (2 * h)


@pytest.mark.parametrize("kind", ["counted", "terminal", "reset"])
def test_an_event_at_a_save_time(kind):
    """What is saved there is the state before a reset at a held time, whatever the event does."""
    g = leaf(9.81)
    when = math.sqrt(2 / 9.81)

    def floor(t, y, g):
        return y[0]

    floor.terminal, floor.direction = kind == "terminal", -1
    if kind == "reset":
        floor.reset = lambda t, y, g: torch.stack([y[0], -0.5 * y[1]])
    with torch.no_grad():
        exactly = adjsim.solve_ivp(
            free_fall, (0, 0.7), [1.0, 0.0], "DOP853", events=floor, args=(g,), rtol=1e-10
        )
    t_eval = [0.1, float(exactly.t_events[0][0]), 0.6]
    found = adjsim.solve_ivp(
        free_fall, (0, 0.7), [1.0, 0.0], "DOP853", t_eval, events=floor, args=(g,), rtol=1e-10
    )
    at = 1
    assert abs(float(found.y[0, at])) < 1e-12
    assert abs(float(found.y[1, at]) + 9.81 * when) < 1e-9
    found.y[0, at].backward(retain_graph=True)
    assert abs(float(g.grad) + when**2 / 2) < 1e-9
    if kind == "reset":
        g.grad = None
        found.y[0, 2].backward()

        def later(g):
            te = torch.sqrt(2 / g)
            return 0.5 * g * te * (0.6 - te) - g * (0.6 - te) ** 2 / 2

        assert abs(float(g.grad) - derivative(later, 9.81)) < 1e-7


def test_several_events_and_counts():
    """Two walls and a counter; the third bounce off the left wall ends it without a reset."""
    speed = leaf(1.0)

    def fly(t, y):
        return torch.stack([y[1], torch.zeros_like(y[1])])

    def left(t, y):
        return y[0]

    def right(t, y):
        return 1.0 - y[0]

    def middle(t, y):
        return y[0] - 0.5

    left.reset = right.reset = lambda t, y: torch.stack([y[0], -y[1]])
    left.terminal = 3
    found = adjsim.solve_ivp(
        fly, (0, 20), [0.25, -speed], "RK45", events=[left, right, middle], rtol=1e-9, atol=1e-12
    )
    assert [len(t) for t in found.t_events] == [3, 2, 4]
    assert found.status == 1
    # The distance of 4.25 at this speed.
    assert float(found.t[-1]) == pytest.approx(4.25, abs=1e-9)
    assert float(found.y[1, -1]) == pytest.approx(-1.0, abs=1e-9)
    found.t[-1].backward()
    assert float(speed.grad) == pytest.approx(-4.25, abs=1e-7)


def test_two_resets_at_one_time():
    """A ball that runs into a corner turns round in both directions."""
    x = leaf(1.0)

    def fly(t, y):
        return torch.stack([y[2], y[3], 0 * y[0], 0 * y[1]])

    def bottom(t, y):
        return y[1]

    def side(t, y):
        return y[0]

    bottom.reset = lambda t, y: y * torch.tensor([1.0, 1.0, 1.0, -1.0])
    side.reset = lambda t, y: y * torch.tensor([1.0, 1.0, -1.0, 1.0])
    found = adjsim.solve_ivp(
        fly, (0, 2), [x, 1.0, -1.0, -1.0], events=[bottom, side], rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(found.y[:, -1].detach(), torch.ones(4), rtol=0, atol=1e-9)
    found.y[0, -1].backward()
    assert float(x.grad) == pytest.approx(-1.0, abs=1e-9)


@pytest.mark.slow
def test_saltation_through_many_bounces():
    """A ball in a time-dependent field that bounces eight times, on a floor that moves; against
    differences.
    """

    def height(e, method="DOP853"):
        def floor(t, y):
            return y[0] - 0.05 * torch.sin(9 * t)

        def bounce(t, y):
            speed = 0.45 * torch.cos(9 * t)
            return torch.stack([y[0], speed - e * (y[1] - speed)])

        floor.reset, floor.direction = bounce, -1
        fun = lambda t, y: torch.stack([y[1], -9.81 - 0.1 * y[1] + torch.sin(t)])  # noqa: E731
        found = adjsim.solve_ivp(
            fun, (0, 3), [1.0, 0.0], method, events=floor, rtol=1e-11, atol=1e-12, max_step=0.05
        )
        assert len(found.t_events[0]) == 8
        return found.y[0, -1]

    e = leaf(0.85)
    height(e).backward()
    assert float(e.grad) == pytest.approx(derivative(height, 0.85, 1e-6), rel=1e-6)


@pytest.mark.slow
def test_a_change_of_mode():
    """An event whose reset changes nothing leaves the gradient as it is without it."""
    k = leaf(2.0)
    grads = []
    for with_reset in (False, True):

        def event(t, y, k):
            return y[0] - 0.3

        event.reset = lambda t, y, k: y
        spring = lambda t, y, k: torch.stack([y[1], -k * y[0]])  # noqa: E731
        found = adjsim.solve_ivp(
            spring,
            (0, 5),
            [1.0, 0.0],
            "DOP853",
            events=event if with_reset else None,
            args=(k,),
            rtol=1e-10,
            atol=1e-12,
        )
        grads.append(torch.autograd.grad(found.y[0, -1], k)[0])
        assert not with_reset or len(found.t_events[0]) == 2
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-8, atol=0)


@pytest.mark.parametrize("top", [0.5, 0.5 - 1e-8, 0.5 + 1e-8], ids=["touch", "cross", "miss"])
def test_grazing_is_refused(top):
    """A ball thrown up to a ceiling at 0.5: the time at which it touches has no derivative."""
    v0 = leaf(math.sqrt(9.81))

    def ceiling(t, y, g):
        return y[0] - top

    with pytest.raises(adjsim.GrazingError, match="touches event 0"):
        adjsim.solve_ivp(
            free_fall,
            (0, 0.8),
            [0.0, v0],
            events=ceiling,
            args=(torch.tensor(9.81),),
            rtol=1e-6,
            atol=1e-6,
        )


def test_what_is_clear_of_grazing_is_not_refused():
    v0 = leaf(math.sqrt(9.81))
    for top, times in ((0.49, 2), (0.51, 0)):

        def ceiling(t, y, g, top=top):
            return y[0] - top

        found = adjsim.solve_ivp(
            free_fall,
            (0, 0.8),
            [0.0, v0],
            events=ceiling,
            args=(torch.tensor(9.81),),
            rtol=1e-6,
            max_step=0.02,
        )
        assert len(found.t_events[0]) == times


def test_zeno_is_refused():
    """Bounces of a ball accumulate at sqrt(2 h/g) (1 + e)/(1 - e) = 1.35."""

    def floor(t, y, g):
        return y[0]

    floor.reset = lambda t, y, g: torch.stack([0 * y[0], -0.5 * y[1]])
    arguments = {"events": floor, "args": (torch.tensor(9.81),), "rtol": 1e-9, "atol": 1e-12}
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"accumulate at t = 1\.35.*Zeno"):
        adjsim.solve_ivp(free_fall, (0, 2), [1.0, 0.0], **arguments)
    with pytest.raises((RuntimeError, adjsim.GrazingError), match=r"Zeno|hardly crosses"):
        adjsim.solve_ivp(free_fall, (0, 2), [leaf(1.0), 0.0], **arguments)


# Whatever else.


@pytest.mark.parametrize("method", slow_but(lambda method: method in ("RK45", "Radau"), METHODS))
def test_backward_in_time(method):
    """From t1 to t0: with an event, save times and a module."""
    k = leaf(2.0)

    def run(k, method, rtol):
        def event(t, y, k):
            return y[0] - 0.2

        event.reset = lambda t, y, k: torch.stack([y[0], 0.7 * y[1] + 0.1 * t])
        event.direction = -1
        spring = lambda t, y, k: torch.stack([y[1], -k * y[0] + torch.cos(t)])  # noqa: E731
        found = adjsim.solve_ivp(
            spring,
            (3.0, 0.5),
            [1.0, 0.0],
            method,
            [3.0, 2.0, 0.5],
            events=event,
            args=(k,),
            rtol=rtol,
            atol=rtol / 10,
        )
        assert len(found.t_events[0]) == 1
        return found.y.sum() + found.t_events[0].sum()

    rtol = RTOL.get(method, 1e-8)
    run(k, method, rtol).backward()
    expected = derivative(lambda k: run(k, "DOP853", 1e-13), 2.0)
    assert float(k.grad) == pytest.approx(
        expected, rel=rtol * (1000 if method in ("BDF", "LSODA") else 30)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["RK45", pytest.param("BDF", marks=pytest.mark.slow)])
def test_complex_states(method):
    """y' = (i omega - c) y with a conjugate, which is no function of a complex variable; against
    its real form.
    """
    values = []
    for kind in ("complex", "real"):
        omega, c = leaf(1.3), leaf(0.2)

        def rotate(t, y):
            return (1j * omega - c) * y + 0.3 * y.conj()  # noqa: B023

        def as_real(t, y):
            return torch.stack([(0.3 - c) * y[0] - omega * y[1], omega * y[0] - (0.3 + c) * y[1]])  # noqa: B023

        fun, y0 = (rotate, [1.0 + 0.5j]) if kind == "complex" else (as_real, [1.0, 0.5])
        start = torch.tensor(y0, requires_grad=True)
        found = adjsim.solve_ivp(
            fun, (0, 2), start, method, params=[omega, c], rtol=1e-9, atol=1e-12
        )
        last = found.y[:, -1]
        out = (
            last[0].real ** 2 + 0.5 * last[0].imag
            if kind == "complex"
            else last[0] ** 2 + 0.5 * last[1]
        )
        out.backward()
        grad = torch.view_as_real(start.grad)[0] if kind == "complex" else start.grad
        values.append(torch.stack([out.detach(), omega.grad, c.grad, *grad]))
    torch.testing.assert_close(*values, rtol=1e-6, atol=1e-7)


def test_a_network_learns_through_it():
    """A module in float32: every parameter has a gradient, and it is that of float64 to its
    precision.
    """
    torch.manual_seed(0)
    grads = []
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    class Net(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, t, y):
            return self.inner(torch.cat([y, t[None]]))

    for dtype in (torch.float64, torch.float32):
        net = net.to(dtype)
        y0 = torch.tensor([1.0, -0.5], dtype=dtype, requires_grad=True)
        found = adjsim.solve_ivp(Net(net), (0, 1), y0, t_eval=[0.5, 1.0], rtol=1e-5, atol=1e-6)
        assert found.y.dtype == found.t.dtype == dtype
        net.zero_grad()
        (found.y**2).sum().backward()
        assert y0.grad.dtype == dtype
        assert all(p.grad.dtype == dtype for p in net.parameters())
        grads.append(
            torch.cat([p.grad.reshape(-1).double() for p in net.parameters()] + [y0.grad.double()])
        )
    assert float(grads[0].abs().min()) > 0
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)
