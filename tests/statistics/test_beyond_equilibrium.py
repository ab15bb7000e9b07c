"""Questions that have no equilibrium answer: transition probability, first passage, and control.

The first two have answers to many digits, dt and all. A step of Euler-Maruyama is a Gaussian
kernel,

    K(x, y) = exp(-(y - m(x))^2 / 2 s^2) / (s sqrt(2 pi)),
    m(x) = x + F(x) dt/friction,    s^2 = 2 kT dt/friction,

so the density of the walkers after n + 1 steps is an integral over that after n,

    p_1(y) = g(start) K(start, y) g(y),    p_{n+1}(y) = g(y) int p_n(x) K(x, y) dx,

where g = exp(-rate dt) is the share that a visit leaves alive: 1 everywhere for a transition
probability. On nodes with weights the integral is a product with a matrix. Everything that is
integrated is analytic where it is integrated: over the whole line, the trapezoid rule with a
spacing of s/4 or less then has an error of about exp(-2 pi^2 16); up to a sharp absorbing boundary,
Gauss-Legendre nodes on the side that is left alive converge as fast. From the densities,

    P(x_n > 0) = int p_{n-1}(x) Phi(m(x)/s) dx,    <f(x_n)> = int p_n f dx,
    <T> = dt (g(start) + sum_{n=1}^{N-1} int p_n dx),

the first with the last step done in closed form, since a step function is not smooth; the last is
the mean of :func:`adjsim.first_passage_time` over N steps. Forward-mode differentiation through the
products gives the derivative by the barrier at all horizons at once.

A linear control of a free walker has moments in closed form instead, and an optimum.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import adjsim
from adjsim import (
    CheckpointAdjoint,
    Final,
    FiniteDifference,
    Girsanov,
    Pathwise,
    Reweighting,
    ScoreFunction,
    Simulation,
    TimeAverage,
)
from tests.problems import parameter, slow_but

KT, DT, START, EDGE = 0.5, 0.02, -1.0, 2.6
WIDTH, LIFETIME = 0.1, 0.2
S = math.sqrt(2 * KT * DT)
BARRIER = "potential.barrier"


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def within(estimate, value, grads):
    """Value and gradients, four of their own standard errors."""
    pairs = [(estimate.value, estimate.value_stderr, value)]
    pairs += [
        (estimate.grad[name], estimate.grad_stderr[name], truth) for name, truth in grads.items()
    ]
    for found, stderr, truth in pairs:
        assert bool((stderr > 0).all())
        assert bool(((found - torch.as_tensor(truth)).abs() < 4 * stderr).all()), (
            found,
            stderr,
            truth,
        )


def together(one, two):
    """Two estimates on different noise, entry by entry, within four of their combined standard
    errors.
    """
    for name in one.grad:
        stderr = torch.hypot(one.grad_stderr[name], two.grad_stderr[name])
        assert bool(((one.grad[name] - two.grad[name]).abs() < 4 * stderr).all()), name


def norms(estimate):
    """Of the whole gradient, and of its standard error."""
    return tuple(
        torch.cat([x.flatten() for x in d.values()]).norm().item()
        for d in (estimate.grad, estimate.grad_stderr)
    )


# The exact answers.


def whole_line(spacing=S / 4):
    x = torch.linspace(-EDGE, EDGE, 1 + math.ceil(2 * EDGE / spacing))
    return x, torch.full_like(x, float(x[1] - x[0]))


def left_side(count=80):
    x, w = (torch.as_tensor(array) for array in np.polynomial.legendre.leggauss(count))
    return EDGE * (x - 1) / 2, EDGE * w / 2


def double_well(barrier, x):
    return -4 * barrier * x * (x * x - 1)


def landing(theta, x, drift):
    return x + drift(theta, x) * DT


def beyond(theta, x, drift):
    """The probability that a step from x ends above 0."""
    return torch.erfc(-landing(theta, x, drift) / (S * math.sqrt(2))) / 2


def kernel(theta, a, nodes, drift=double_well):
    """Weights times K(a, y) at the nodes y, a row for each a."""
    y, w = nodes
    return (
        w
        * torch.exp(-((y - landing(theta, a, drift)[:, None]) ** 2) / (2 * S * S))
        / (S * math.sqrt(2 * math.pi))
    )


def densities(theta, steps, nodes, alive=torch.ones_like, drift=double_well):
    """Weights times p_n at the nodes, n = 1 to steps."""
    y, begin = nodes[0], torch.tensor([START])
    step, p = (
        kernel(theta, y, nodes, drift),
        [alive(begin) * kernel(theta, begin, nodes, drift)[0] * alive(y)],
    )
    for _ in range(steps - 1):
        p.append((p[-1] @ step) * alive(y))
    return torch.stack(p)


def shares_beyond(theta, steps, nodes, drift=double_well):
    """P(x_n > 0), n = 1 to steps."""
    p = densities(theta, steps, nodes, drift=drift)
    return torch.cat(
        [beyond(theta, torch.tensor([START]), drift), p[:-1] @ beyond(theta, nodes[0], drift)]
    )


def smooth_shares(theta, steps, nodes):
    """<sigmoid(x_n / width)>, n = 1 to steps."""
    return densities(theta, steps, nodes) @ torch.sigmoid(nodes[0] / WIDTH)


def smooth_rate(x):
    return torch.sigmoid(x / WIDTH) / LIFETIME


def sharp_rate(x):
    return torch.where(x > 0, math.inf, 0.0)


def passage_times(theta, steps, nodes, rate):
    """<first_passage_time> of 1 to ``steps`` steps. With the sharp rate the nodes are the side that
    is left alive.
    """

    def alive(x):
        return torch.exp(-DT * rate(x))

    left = densities(theta, steps, nodes, alive).sum(1)
    return DT * torch.cat([alive(torch.tensor([START])), left[:-1]]).cumsum(0)


def answer(function, *args, at=1.0):
    """The last of its values, and its derivative by the barrier."""
    theta = torch.tensor(at)
    values, slopes = torch.func.jvp(
        lambda b: function(b, *args), (theta,), (torch.ones_like(theta),)
    )
    return float(values[-1]), float(slopes[-1])


def test_the_exact_answers_do_not_depend_on_the_nodes():
    """Nor does their derivative, which central differences have too."""
    coarse, fine = whole_line(), whole_line(S / 7)
    cases = [
        (shares_beyond, coarse, fine, ()),
        (smooth_shares, coarse, fine, ()),
        (passage_times, coarse, fine, (smooth_rate,)),
        (passage_times, left_side(), left_side(130), (sharp_rate,)),
    ]
    for function, few, many, rest in cases:
        one, two = (answer(function, 50, nodes, *rest) for nodes in (few, many))
        assert one == pytest.approx(two, rel=1e-9)
        h = 1e-4
        ends = [float(function(torch.tensor(1 + sign * h), 50, few, *rest)[-1]) for sign in (1, -1)]
        assert one[1] == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)


def test_the_exact_answers_are_those_of_a_linear_drift():
    """There every density is Gaussian: x_n has mean a^n start and variance s^2 (1 - a^2n)/(1 -
    a^2).
    """
    k, steps = 4.0, 10
    a = 1 - k * DT
    deviation = S * math.sqrt((1 - a ** (2 * steps)) / (1 - a * a))
    expected = math.erfc(-(a**steps) * START / (deviation * math.sqrt(2))) / 2
    found = shares_beyond(torch.tensor(k), steps, whole_line(), drift=lambda k, x: -k * x)
    assert float(found[-1]) == pytest.approx(expected, rel=1e-10)


# Transition probability.


def from_the_left(duration, every_step=False):
    dynamics = adjsim.OverdampedLangevin(adjsim.DoubleWell(parameter(1.0)), kT=KT, friction=1.0)
    ts = DT * torch.arange(round(duration / DT) + 1) if every_step else [0.0, duration]
    return Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.full((n, 1, 1), START)),
        ts,
        adjsim.EulerMaruyama(DT),
    )


def x(state):
    return state.position[..., 0, 0]


CROSSED = Final(lambda state: (x(state) > 0).double())
NEARLY = Final(lambda state: torch.sigmoid(x(state) / WIDTH))
# Difference quotients have pathwise as their limit, and answers of their own below.
SMOOTH = slow_but(
    lambda e: not isinstance(e, FiniteDifference),
    [Pathwise(CheckpointAdjoint()), Girsanov(), FiniteDifference()],
)


@pytest.mark.parametrize("estimator", SMOOTH, ids=repr)
def test_smooth_transition_probability(estimator):
    estimate = estimator(from_the_left(1.0), NEARLY, replicas=40_000, chunks=10, generator=seeded())
    value, slope = answer(smooth_shares, 50, whole_line())
    within(estimate, value, {BARRIER: slope})
    assert float(estimate.grad_stderr[BARRIER]) < 0.05 * abs(slope)
    assert estimate.estimand == "path"
    assert not estimate.warnings


def test_sharp_transition_probability():
    """Girsanov of the step function itself. A difference quotient has it too, at a step that is
    large enough to be seen; it is held against the exact difference quotient."""
    nodes, h = whole_line(), 0.1
    value, slope = answer(shares_beyond, 50, nodes)
    estimate = Girsanov()(
        from_the_left(1.0), CROSSED, replicas=40_000, chunks=10, generator=seeded(1)
    )
    within(estimate, value, {BARRIER: slope})
    assert float(estimate.grad_stderr[BARRIER]) < 0.05 * abs(slope)
    up, down = (float(shares_beyond(torch.tensor(1 + d), 50, nodes)[-1]) for d in (h, -h))
    estimate = FiniteDifference(h)(
        from_the_left(1.0), CROSSED, replicas=40_000, chunks=10, generator=seeded(2)
    )
    within(estimate, value, {BARRIER: (up - down) / (2 * h)})
    # The smooth question has another answer.
    assert abs(answer(smooth_shares, 50, nodes)[1] - slope) > 0.01 * abs(slope)


def test_the_pathwise_zero_of_a_step_function_is_said():
    for simulation, observable in (
        (from_the_left(1.0), CROSSED),
        (from_the_left(1.0, True), passage(sharp_rate)),
    ):
        estimate = Pathwise(CheckpointAdjoint())(
            simulation, observable, replicas=512, generator=seeded()
        )
        assert float(estimate.grad[BARRIER]) == 0.0
        assert any(
            "no derivative along a path (is it a step?)" in reason for reason in estimate.warnings
        )
        assert "not to be trusted" in str(estimate)


@pytest.mark.parametrize("case", ["transition", "passage"])
def test_pathwise_is_the_limit_of_difference_quotients(case):
    """On one noise a central difference is off by h^2/6 of the third derivative, a share of 1e-5 at
    most, since paths that part at the barrier make that large: four times less for half the step.
    Extrapolated to none, by a term in h^4."""
    simulation, observable = {
        "transition": (from_the_left(1.0), NEARLY),
        "passage": (from_the_left(2.0, every_step=True), passage(smooth_rate)),
    }[case]
    estimators = (Pathwise(CheckpointAdjoint()), FiniteDifference(4e-4), FiniteDifference(2e-4))
    exact, coarse, fine = (
        float(e(simulation, observable, replicas=2000, chunks=1, generator=seeded(3)).grad[BARRIER])
        for e in estimators
    )
    assert fine == pytest.approx(exact, rel=1e-5)
    assert (coarse - exact) / (fine - exact) == pytest.approx(4.0, rel=1e-2)
    assert (4 * fine - coarse) / 3 == pytest.approx(exact, rel=1e-7)


# First passage.


def passage(rate):
    return lambda run: adjsim.first_passage_time(rate(x(run)), run.times)


def test_first_passage_of_known_paths():
    """Absorbed at the frame that first finds it beyond, on frames of any spacing; otherwise at the
    last. At a constant rate, a geometric series."""
    times = torch.tensor([1.0, 1.1, 1.3, 1.6, 2.0])
    paths = (
        torch.tensor(
            [[-1, -1, -1, -1, -1], [-1, -1, 1, -1, 1], [-1, -1, -1, -1, 1], [1, -1, -1, -1, -1]]
        )
        .double()
        .T
    )
    found = adjsim.first_passage_time(sharp_rate(paths), times)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.3, 1.0, 0.0]))
    even, rate = torch.arange(6) * 0.2, 0.7
    q = math.exp(-0.2 * rate)
    assert float(adjsim.first_passage_time(torch.full((6,), rate), even)) == pytest.approx(
        0.2 * q * (1 - q**5) / (1 - q)
    )


@pytest.mark.parametrize("estimator", SMOOTH, ids=repr)
def test_smooth_first_passage(estimator):
    estimate = estimator(
        from_the_left(2.0, every_step=True),
        passage(smooth_rate),
        replicas=8000,
        chunks=8,
        generator=seeded(4),
    )
    value, slope = answer(passage_times, 100, whole_line(), smooth_rate)
    within(estimate, value, {BARRIER: slope})
    assert float(estimate.grad_stderr[BARRIER]) < 0.08 * slope
    assert not estimate.warnings


@pytest.mark.slow
def test_sharp_first_passage():
    nodes, h = left_side(), 0.1
    value, slope = answer(passage_times, 100, nodes, sharp_rate)
    estimate = Girsanov()(
        from_the_left(2.0, every_step=True),
        passage(sharp_rate),
        replicas=8000,
        chunks=8,
        generator=seeded(5),
    )
    within(estimate, value, {BARRIER: slope})
    assert float(estimate.grad_stderr[BARRIER]) < 0.08 * slope
    up, down = (
        float(passage_times(torch.tensor(1 + d), 100, nodes, sharp_rate)[-1]) for d in (h, -h)
    )
    estimate = FiniteDifference(h)(
        from_the_left(2.0, every_step=True),
        passage(sharp_rate),
        replicas=8000,
        chunks=8,
        generator=seeded(6),
    )
    within(estimate, value, {BARRIER: (up - down) / (2 * h)})


@pytest.mark.marathon
def test_a_long_run_has_the_mean_first_passage_time():
    """Without a horizon <T> = dt int (1 - K)^-1 (start, y) dy. After 24 time units a share of
    exp(-24/5) is still to come.
    """
    nodes, steps = left_side(), 1200
    (first,), step = densities(1.0, 1, nodes), kernel(1.0, nodes[0], nodes)
    forever = DT * (
        1 + float(first @ torch.linalg.solve(torch.eye(len(step)) - step, torch.ones(len(step))))
    )
    value, slope = answer(passage_times, steps, nodes, sharp_rate)
    assert value == pytest.approx(forever, rel=0.02)
    estimate = Girsanov()(
        from_the_left(24.0, every_step=True),
        passage(sharp_rate),
        replicas=8192,
        chunks=8,
        generator=seeded(7),
    )
    within(estimate, value, {BARRIER: slope})
    assert float(estimate.grad_stderr[BARRIER]) < 0.15 * slope
    assert abs(float(estimate.value) - forever) < 0.02 * forever + 4 * float(estimate.value_stderr)


# Control by a network.


class Steered(adjsim.ForceField):
    """Two wells along x and one along y, and a network's force on top: of the time and no gradient
    of anything.
    """

    def __init__(self, hidden=4):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2))
        for weights in self.network.parameters():
            nn.init.normal_(weights)

    def control(self, t, position):
        return self.network(torch.cat([t + torch.zeros_like(position[..., :1]), position], -1))

    def forward(self, t, position):
        x, y = position[..., :1], position[..., 1:]
        return torch.cat([-4 * x * (x * x - 1), -2 * y], -1) + self.control(t, position)


def steered(solver, duration, kind=adjsim.OverdampedLangevin):
    torch.manual_seed(5)
    dynamics = kind(Steered(), kT=0.4, friction=1.3)

    def initial(replicas, generator):
        position = torch.tensor([-1.0, 0.0]).repeat(replicas, 1, 1)
        return dynamics.init(
            position, None if kind is adjsim.OverdampedLangevin else torch.zeros_like(position)
        )

    return Simulation(
        dynamics, initial, solver.dt * torch.arange(round(duration / solver.dt) + 1), solver
    )


def cost(simulation, weight=0.1):
    """|q_T - target|^2 + weight int |u|^2 dt: of the path and, by itself, of the parameters."""
    target, control, dt = (
        torch.tensor([1.0, 0.0]),
        simulation.dynamics.potential.control,
        simulation.solver.dt,
    )

    def observable(run):
        push = control(run.times[:-1].reshape(-1, 1, 1, 1), run.position[:-1])
        return ((run.position[-1] - target) ** 2).sum((-1, -2)) + weight * dt * (push**2).sum(
            (0, -1, -2)
        )

    return observable


CONTROLLED = {
    "overdamped": lambda: steered(adjsim.EulerMaruyama(0.05), 1.0),
    "BAOAB": lambda: steered(
        adjsim.BAOAB(0.1), 1.0, lambda *args, **kw: adjsim.Langevin(*args, mass=1.4, **kw)
    ),
    "OBABO": lambda: steered(
        adjsim.Splitting("OBABO", 0.1),
        1.0,
        lambda *args, **kw: adjsim.Langevin(*args, mass=1.4, **kw),
    ),
}


def test_the_control_depends_on_time_and_has_a_curl():
    field = CONTROLLED["overdamped"]().dynamics.potential
    place = torch.tensor([[0.3, -0.2]])
    jacobian = torch.autograd.functional.jacobian(lambda q: field.control(0.5, q), place).reshape(
        2, 2
    )
    assert abs(float(jacobian[0, 1] - jacobian[1, 0])) > 0.05
    assert float((field.control(0.0, place) - field.control(1.0, place)).detach().norm()) > 0.05


@pytest.mark.parametrize("case", CONTROLLED)
def test_control_pathwise_is_the_difference_quotient(case):
    """On one noise. A step of h = 1e-4 leaves an error of h^2 = 1e-8, and rounding of 1e-16/h."""
    simulation = CONTROLLED[case]()
    adjoint = CheckpointAdjoint() if case == "overdamped" else adjsim.ReversibleAdjoint()
    one, two = (
        e(simulation, cost(simulation), replicas=64, chunks=1, generator=seeded(8))
        for e in (Pathwise(adjoint), FiniteDifference(1e-4))
    )
    torch.testing.assert_close(one.value, two.value, rtol=1e-12, atol=0)
    largest = max(float(grad.abs().max()) for grad in one.grad.values())
    for name in one.grad:
        torch.testing.assert_close(one.grad[name], two.grad[name], rtol=0, atol=1e-7 * largest)


@pytest.mark.parametrize(
    "case",
    slow_but(lambda case: False, CONTROLLED, marathon=lambda case: case != "BAOAB"),
)
def test_control_girsanov_agrees_with_pathwise(case):
    """Steps that are long against the clock of the control, so that a force taken a step early or
    late would be seen.
    """
    simulation = CONTROLLED[case]()
    one = Pathwise()(simulation, cost(simulation), replicas=3000, generator=seeded(9))
    two = Girsanov()(simulation, cost(simulation), replicas=12_000, generator=seeded(10))
    together(one, two)
    assert abs(float(one.value - two.value)) < 4 * math.hypot(
        float(one.value_stderr), float(two.value_stderr)
    )
    size, stderr = norms(two)
    assert stderr < 0.05 * size


# Linear control of a free walker, q' = (1 - k_n dt/friction) q + s xi, at the cost <q_N^2> + weight
# dt sum <(k_n q_n)^2>.

FRICTION, WEIGHT, BEGIN, STRIDE, STEPS = 1.3, 0.2, 0.5, 0.1, 12


class Linear(adjsim.ForceField):
    """-(k_0 + k_1 t) q."""

    def __init__(self):
        super().__init__()
        self.k = nn.Parameter(torch.tensor([0.2, 0.4]))

    def gains(self, t):
        return self.k[0] + self.k[1] * t

    def forward(self, t, position):
        return -self.gains(t) * position


class Scheduled(adjsim.ForceField):
    """-k_n q, with a gain for every step."""

    def __init__(self, gains):
        super().__init__()
        self.k = nn.Parameter(gains)

    def gains(self, t):
        return self.k[torch.as_tensor((t - BEGIN) / STRIDE).round().long()]

    def forward(self, t, position):
        return -self.gains(t) * position


def regulated(field):
    dynamics = adjsim.OverdampedLangevin(field, kT=KT, friction=FRICTION)
    ts = BEGIN + STRIDE * torch.arange(STEPS + 1)
    return Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.full((n, 1, 1), 1.5)),
        ts,
        adjsim.EulerMaruyama(STRIDE),
    )


def quadratic(simulation):
    def observable(run):
        k = simulation.dynamics.potential.gains(run.times[:-1]).reshape(-1, 1)
        return x(run)[-1] ** 2 + WEIGHT * STRIDE * ((k * x(run)[:-1]) ** 2).sum(0)

    return observable


def expected(field):
    """The cost by the second moment, m_{n+1} = (1 - k_n dt/friction)^2 m_n + s^2."""
    total, m = torch.zeros(()), torch.tensor(1.5**2)
    for k in field.gains(BEGIN + STRIDE * torch.arange(STEPS)):
        total = total + WEIGHT * STRIDE * k**2 * m
        m = (1 - k * STRIDE / FRICTION) ** 2 * m + 2 * KT * STRIDE / FRICTION
    return total + m


def best_gains():
    """The cost to go is P_n q^2 and a constant. Its least over k_n of weight dt k_n^2 + P_{n+1} (1
    - k_n dt/friction)^2 is at k_n = P_{n+1}/(weight friction + P_{n+1} dt/friction)."""
    P, gains = 1.0, []
    for _ in range(STEPS):
        k = P / (WEIGHT * FRICTION + P * STRIDE / FRICTION)
        P = WEIGHT * STRIDE * k**2 + P * (1 - k * STRIDE / FRICTION) ** 2
        gains.append(k)
    return torch.tensor(gains[::-1])


def slopes(field):
    return torch.autograd.grad(expected(field), field.k)[0]


@pytest.mark.parametrize("estimator", SMOOTH, ids=repr)
def test_linear_control(estimator):
    """Time begins at ts[0], and the cost depends on the parameters itself."""
    simulation = regulated(Linear())
    field = simulation.dynamics.potential
    estimate = estimator(
        simulation, quadratic(simulation), replicas=40_000, chunks=10, generator=seeded(11)
    )
    within(estimate, expected(field).detach(), {"potential.k": slopes(field)})
    size, stderr = norms(estimate)
    assert stderr < 0.05 * size


@pytest.mark.parametrize("estimator", SMOOTH[:2], ids=repr)
def test_the_gradient_vanishes_at_the_optimal_control(estimator):
    best = best_gains()
    assert float(slopes(Scheduled(best)).abs().max()) < 1e-12
    found = []
    for scale in (1.0, 0.5):
        simulation = regulated(Scheduled(scale * best))
        field = simulation.dynamics.potential
        estimate = estimator(
            simulation, quadratic(simulation), replicas=20_000, generator=seeded(12)
        )
        within(estimate, expected(field).detach(), {"potential.k": slopes(field)})
        found.append(norms(estimate))
    assert found[0][0] < 3 * found[0][1]
    assert found[1][0] > 10 * found[1][1]


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(Pathwise(), marks=pytest.mark.slow),
        pytest.param(Girsanov(), marks=pytest.mark.marathon),
    ],
    ids=repr,
)
def test_training_finds_the_optimal_control(estimator):
    """From no control, by the estimates' own gradients; what is left of the excess is the noise of
    the last of them.
    """
    simulation = regulated(Scheduled(torch.zeros(STEPS)))
    dynamics, generator = simulation.dynamics, seeded(13)
    least, most = expected(Scheduled(best_gains())).detach(), expected(dynamics.potential).detach()
    optimizer = torch.optim.Adam(dynamics.parameters(), lr=0.15)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    for _ in range(60):
        estimate = estimator(
            simulation, quadratic(simulation), replicas=2000, chunks=1, generator=generator
        )
        optimizer.zero_grad()
        estimate.accumulate(dynamics)
        optimizer.step()
        schedule.step()
    left = expected(dynamics.potential).detach() - least
    assert 0 < float(left) < 0.01 * float(most - least)


# The stationary estimators.


def average_cost():
    simulation = CONTROLLED["overdamped"]()
    return simulation, TimeAverage(lambda state: (state.position**2).sum((-1, -2)))


PATH_QUESTIONS = {
    "transition, sharp": lambda: (from_the_left(1.0), CROSSED),
    "transition, smooth": lambda: (from_the_left(1.0), NEARLY),
    "passage": lambda: (from_the_left(1.0, every_step=True), passage(sharp_rate)),
    "control": lambda: (simulation := CONTROLLED["overdamped"](), cost(simulation)),
    "control, average": average_cost,
    "control with inertia": lambda: (simulation := CONTROLLED["OBABO"](), cost(simulation)),
}


@pytest.mark.parametrize("case", PATH_QUESTIONS)
def test_stationary_estimators_are_refused_with_the_reason(case):
    simulation, observable = PATH_QUESTIONS[case]()
    reason = (
        "has no known stationary density"
        if case == "control, average"
        else r"equilibrium mean.*is a path question: use Pathwise"
    )
    stationary = {"score": ScoreFunction(), "reweighting": Reweighting(every=simulation.solver.dt)}
    for estimator in stationary.values():
        with pytest.raises(TypeError, match=reason):
            estimator(simulation, observable, replicas=8)


@pytest.mark.parametrize("case", ["passage", "control, average"])
def test_a_comparison_says_why_a_stationary_estimator_does_not_apply(case):
    simulation, observable = PATH_QUESTIONS[case]()
    stationary = {"score": ScoreFunction(), "reweighting": Reweighting(every=simulation.solver.dt)}
    table = adjsim.compare(
        simulation, observable, {"path": Pathwise(), **stationary}, replicas=4, generator=seeded()
    )
    assert set(table.estimates) == {"path"}
    assert set(table.failures) == set(stationary)
    for name in stationary:
        assert table.failures[name].startswith("does not apply. ")
        assert f"{name}: does not apply" in str(table)
