r"""
Beyond equilibrium
==================

Three questions have no equilibrium answer. How likely is a walker to have crossed a
barrier after a given time? How long does the first crossing take? And which force
steers the walker across at the least cost? Such a force depends on time and need not be
the gradient of an energy.

:class:`~adjsim.Pathwise`, :class:`~adjsim.Girsanov` and
:class:`~adjsim.FiniteDifference` answer each question. The first two questions have
answers known to many digits, and the third has a lower bound on the cost of any
control. The stationary estimators cannot answer any of the questions. The comparisons
below include these estimators all the same, and list a reason instead of a number.

Units are reduced: the distance of a well from the barrier, the height of the barrier
and the friction are 1. The walkers are overdamped and integrated by
:class:`~adjsim.EulerMaruyama`.
"""

# sphinx_gallery_thumbnail_number = 6

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # few walkers are too little to share between threads

COLORS = {"Pathwise": "C0", "Girsanov": "C3", "FiniteDifference": "C2"}
BARRIER = "potential.barrier"


def parameter(value):
    return nn.Parameter(torch.tensor(value))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def refused(comparison, reason="equilibrium mean"):
    """Check that the stationary estimators, and only they, have a reason instead of a
    number.
    """
    assert set(comparison.failures) == {"ScoreFunction", "Reweighting"}
    assert not set(comparison.failures) & set(comparison.estimates)
    assert all(reason in text for text in comparison.failures.values())


# %%
# The exact answer
# ----------------
#
# A walker starts in the left well of :math:`b\,(x^2-1)^2`, with a barrier of two kT.
# After an Euler-Maruyama step from :math:`x` the position of the walker is Gaussian,
# with mean :math:`m(x) = x + F(x)\,\Delta t` and variance :math:`s^2 =
# 2\,kT\,\Delta t`, where :math:`F` is the force. So the density after a step is an
# integral over the density before the step,
#
# .. math:: p_{n+1}(y) = g(y)\int \mathrm dx\;p_n(x)\,K(x, y),\qquad K(x, y) =
#    \frac{e^{-(y-m(x))^2/2s^2}}{s\sqrt{2\pi}},
#
# with :math:`g = 1` until the section on first-passage times. There :math:`g` is the
# share of walkers that are not absorbed in a step. On quadrature nodes with weights the
# integral becomes a product with a matrix, which converges exponentially fast with the
# number of nodes. So the answers below are exact for these discrete steps and have no
# bias from :math:`\Delta t`. The share beyond the barrier is a sum over the nodes. If
# the share is counted with a sharp edge at the barrier, the last step is taken in
# closed form. Forward-mode differentiation gives the derivative with respect to the
# barrier at all times at once.

KT, DT, EDGE, WIDTH, LIFETIME = 0.5, 0.05, 2.6, 0.1, 0.2
S, START = math.sqrt(2 * KT * DT), torch.tensor([-1.0])


def landing(b, x):
    return x - 4 * b * x * (x * x - 1) * DT


def kernel(b, x, nodes):
    y, weights = nodes
    return (
        weights
        * torch.exp(-((y - landing(b, x)[:, None]) ** 2) / (2 * S * S))
        / (S * math.sqrt(2 * math.pi))
    )


def densities(b, steps, nodes, alive=torch.ones_like):
    """Compute weights times the density after 1, 2, ... steps."""
    matrix, p = (
        kernel(b, nodes[0], nodes),
        [alive(START) * kernel(b, START, nodes)[0] * alive(nodes[0])],
    )
    for _ in range(steps - 1):
        p.append((p[-1] @ matrix) * alive(nodes[0]))
    return torch.stack(p)


def whole_line():
    """Make the trapezoidal rule, whose error falls exponentially for such analytic
    functions.
    """
    x = torch.linspace(-EDGE, EDGE, 1 + math.ceil(8 * EDGE / S))
    return x, torch.full_like(x, float(x[1] - x[0]))


def sharp_share(b, steps):
    x, _ = nodes = whole_line()
    ends = torch.cat([landing(b, START), landing(b, x)])
    above = torch.erfc(-ends / (S * math.sqrt(2))) / 2
    return torch.cat([above[:1], densities(b, steps, nodes)[:-1] @ above[1:]])


def smooth_share(b, steps, width=WIDTH):
    x, _ = nodes = whole_line()
    return densities(b, steps, nodes) @ torch.sigmoid(x / width)


def exact(function, *args):
    """Compute values and derivatives with respect to the barrier after 1, 2, ... steps,
    at b = 1.
    """
    values, slopes = torch.func.jvp(
        lambda b: function(b, *args), (torch.tensor(1.0),), (torch.tensor(1.0),)
    )
    return values.numpy(), slopes.numpy()


# %%
# Transition probability
# ----------------------
#
# The share beyond the barrier is the mean of a step function, which has no derivative
# along a path. :class:`~adjsim.Pathwise` finds zero, and warns that its zero means
# nothing. So Pathwise gets a sigmoid (the smooth question) instead of the step function
# (the sharp question), and the two questions have different answers.
# :class:`~adjsim.Girsanov` needs only the values of the observable and answers both
# questions. Finite differences can be used for the sharp question too, if the
# difference step is large enough.


def well(duration, every_step=False):
    dynamics = adjsim.OverdampedLangevin(
        adjsim.DoubleWell(parameter(1.0)), kT=KT, friction=1.0
    )
    ts = DT * torch.arange(round(duration / DT) + 1) if every_step else [0.0, duration]
    return adjsim.Simulation(
        dynamics,
        lambda n, g: dynamics.init(START.expand(n, 1, 1)),
        ts,
        adjsim.EulerMaruyama(DT),
        compile=not every_step,
    )


def x(state):
    return state.position[..., 0, 0]


def crossed(state):
    return (x(state) > 0).double()


def nearly(state):
    return torch.sigmoid(x(state) / WIDTH)


def both(state):
    return torch.stack([crossed(state), nearly(state)], -1)


pathwise, girsanov = adjsim.Pathwise(adjsim.CheckpointAdjoint()), adjsim.Girsanov()
fine, coarse = adjsim.FiniteDifference(), adjsim.FiniteDifference(0.05)
stationary = {
    "ScoreFunction": adjsim.ScoreFunction(),
    "Reweighting": adjsim.Reweighting(),
}
everyone = {
    "Pathwise": pathwise,
    "FiniteDifference": fine,
    "Girsanov": girsanov,
    **stationary,
}

step = pathwise(well(1.0), adjsim.Final(crossed), replicas=1024, generator=seeded(0))
print("Pathwise of the step function:", step, sep="\n")
assert step.grad[BARRIER] == 0
assert any("no derivative along a path" in reason for reason in step.warnings)

comparison = adjsim.compare(
    well(1.0), adjsim.Final(nearly), everyone, replicas=2048, generator=seeded(1)
)
print(comparison)
refused(comparison)
assert comparison.difference("FiniteDifference") < 1e-4

# %%
# On the same noise the pathwise gradient and the difference quotient are the same
# number, up to the square of the quotient's relative step. Girsanov's score is another
# estimator, and agrees within errors. The next figure shows runs of six lengths, with
# independent noise for each method.


def entry(estimate, i=None):
    """Return value, gradient and standard errors of one of several observables."""
    parts = (
        estimate.value,
        estimate.grad[BARRIER],
        estimate.value_stderr,
        estimate.grad_stderr[BARRIER],
    )
    return [float(part if i is None else part[i]) for part in parts]


def measure(problem, sharp, smooth, pair, durations, replicas, seed, trusted=math.inf):
    """Estimate values, gradients and standard errors by method and question.

    Each array has one row for each length of the run.
    """
    found = {}
    for i, t in enumerate(durations.tolist()):
        run = problem(t)

        def rows(estimator, observable, block, run=run, i=i):
            return estimator(
                run,
                observable,
                replicas=replicas,
                chunks=8,
                generator=seeded(seed + block + i),
            )

        made = rows(girsanov, pair, 0)
        row = {
            ("Girsanov", "smooth"): entry(made, 1),
            ("Girsanov", "sharp"): entry(made, 0),
        }
        row["FiniteDifference", "sharp"] = entry(rows(coarse, sharp, 20))
        if t <= trusted:
            row["Pathwise", "smooth"] = entry(rows(pathwise, smooth, 40))
            row["FiniteDifference", "smooth"] = entry(rows(fine, smooth, 60))
        for key, numbers in row.items():
            found.setdefault(key, []).append(numbers)
    return {key: np.array(numbers) for key, numbers in found.items()}


SHIFTS = {
    ("Pathwise", "smooth"): 0.92,
    ("FiniteDifference", "smooth"): 0.96,
    ("Girsanov", "smooth"): 1.0,
    ("FiniteDifference", "sharp"): 1.04,
    ("Girsanov", "sharp"): 1.08,
}


def show(found, durations, curves, labels):
    """Draw values and gradients with two standard errors, beside the exact curves."""
    _, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    steps = DT * np.arange(1, len(curves["sharp"][0]) + 1)
    for column, (ax, name) in enumerate(zip(axes, labels, strict=True)):
        for kind, style in (("sharp", "k-"), ("smooth", "k--")):
            ax.plot(steps, curves[kind][column], style, lw=1, label=f"exact, {kind}")
        for (method, kind), shift in SHIFTS.items():
            rows, hollow = found[method, kind], kind == "sharp"
            style = {
                "ms": 5,
                "capsize": 3,
                "color": COLORS[method],
                "mfc": "white" if hollow else COLORS[method],
            }
            marker, label = "s" if hollow else "o", f"{method}, {kind}"
            ax.errorbar(
                durations[: len(rows)] * shift,
                rows[:, column],
                2 * rows[:, 2 + column],
                fmt=marker,
                label=label,
                **style,
            )
        ax.set(
            xlabel="length of the run T (reduced units)",
            ylabel=f"{name}\n± two standard errors (reduced units)",
            xscale="log",
            xlim=(0.8 * durations[0], 1.25 * durations[-1]),
        )
        ax.set_xticks(durations, [f"{t:g}" for t in durations])
        ax.minorticks_off()
    return axes


def hold(found, durations, curves, quotients):
    """Check that every number is within four of its standard errors of the exact
    answer.
    """
    at = np.round(durations / DT).astype(int) - 1
    for (method, kind), rows in found.items():
        value, slope = (curve[at[: len(rows)]] for curve in curves[kind])
        if (method, kind) == ("FiniteDifference", "sharp"):
            slope = quotients[at]
        worst = [
            np.abs((rows[:, i] - truth) / rows[:, 2 + i]).max()
            for i, truth in enumerate((value, slope))
        ]
        print(
            f"{method}, {kind}: at most {worst[0]:.1f} standard errors off in the "
            f"mean, {worst[1]:.1f} in the gradient"
        )
        assert max(worst) < 4


def quotient(function, *args):
    """Compute the exact value of the quotient that ``coarse`` estimates."""
    up, down = (
        function(torch.tensor(1 + d), *args).numpy() for d in (coarse.h, -coarse.h)
    )
    return (up - down) / (2 * coarse.h)


REPLICAS, durations = 2048, np.array([0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
steps = round(durations[-1] / DT)
curves = {"sharp": exact(sharp_share, steps), "smooth": exact(smooth_share, steps)}
found = measure(
    well,
    adjsim.Final(crossed),
    adjsim.Final(nearly),
    adjsim.Final(both),
    durations,
    REPLICAS,
    seed=100,
    trusted=2.0,
)
left, right = show(
    found,
    durations,
    curves,
    ("share beyond the barrier", "its gradient, with respect to the barrier"),
)
left.legend(fontsize="small")
plt.show()
hold(found, durations, curves, quotient(sharp_share, steps))

# %%
# Bars are two standard errors. Circles are the sigmoid, and squares are the step
# function. The marks are shifted along the axis for legibility. Every mark is within
# four of its standard errors of the exact answer. (The coarse difference quotient of
# the step function is compared with the exact value of this quotient.) Nearby paths on
# the same noise separate at the top of the barrier. So the error of the pathwise
# gradient and of the smooth difference quotient grows fast with time. Girsanov
# propagates no tangents, and its error grows more slowly.

spread = {method: found[method, "smooth"][:, 3] for method in COLORS}
for method, errors in spread.items():
    print(method, "standard errors", ", ".join(f"{error:.2g}" for error in errors))
assert spread["Pathwise"][0] < spread["Girsanov"][0]
assert spread["Pathwise"][3] > 1.5 * spread["Girsanov"][3]
assert (
    spread["Pathwise"][3] / spread["Pathwise"][0]
    > 2 * spread["Girsanov"][3] / spread["Girsanov"][0]
)

# %%
# The figure leaves out longer runs of Pathwise and of the smooth difference quotient.
# In longer runs fewer and fewer paths carry the gradient. These are the paths that stay
# near the top of the barrier. To count these paths, give each path a barrier parameter
# of its own. The derivatives with respect to these parameters are the gradients g of
# single paths, and :math:`(\sum|g|)^2/\sum g^2` is the effective number of paths that
# carry the gradient.


def carriers(t, seed):
    own = nn.Parameter(torch.ones(REPLICAS, 1, 1))
    dynamics = adjsim.OverdampedLangevin(adjsim.DoubleWell(own), kT=KT, friction=1.0)
    start, run = (
        dynamics.init(START.expand(REPLICAS, 1, 1)),
        {"solver": adjsim.EulerMaruyama(DT), "generator": seeded(seed)},
    )
    final = adjsim.simulate(
        dynamics, start, [0.0, t], adjoint=adjsim.CheckpointAdjoint(), **run
    ).final
    (g,) = torch.autograd.grad(nearly(final).sum(), own)
    return (g.abs().sum() ** 2 / g.square().sum()).item()


counts = [carriers(t, 180) for t in durations[2:5].tolist()]
for t, count in zip(durations[2:5], counts, strict=True):
    print(f"T = {t:g}: {count:.0f} of {REPLICAS} paths carry the gradient")
assert REPLICAS / 10 > counts[0] > counts[1] > counts[2]

late = durations[-1]
for seed in range(4):
    _, slope, _, error = entry(
        pathwise(
            well(late),
            adjsim.Final(nearly),
            replicas=REPLICAS,
            generator=seeded(190 + seed),
        )
    )
    print(
        f"T = {late:g}: {slope:.3f} +- {error:.3f}, "
        f"{abs(slope - curves['smooth'][1][-1]) / error:.1f} standard errors off"
    )

# %%
# A batch of long runs may contain none of the paths that carry the gradient. Then
# neither its mean nor its error bar shows that these paths are missing. The last lines
# printed above show how far four batches of the longest run are from the exact
# gradient, in units of their own standard errors.
#
# The width of the sigmoid
# ------------------------
#
# A narrow sigmoid is close to the step function, but few walkers are on its slope. A
# wide sigmoid asks another question. As the width falls, the bias relative to the sharp
# answer falls and the standard error rises.


def blurred(width):
    return adjsim.Final(lambda state: torch.sigmoid(x(state) / width))


widths, at = np.array([0.01, 0.03, 0.1, 0.3]), 1.0
rows = []
for i, width in enumerate(widths.tolist()):
    rows.append(
        entry(
            pathwise(well(at), blurred(width), replicas=8192, generator=seeded(200 + i))
        )
    )
_, grad, _, error = np.array(rows).T
score = entry(
    girsanov(well(at), adjsim.Final(crossed), replicas=8192, generator=seeded(210))
)
sharp = exact(sharp_share, round(at / DT))[1][-1]
line = np.geomspace(0.03, 0.4, 25)
curve = np.array(
    [exact(smooth_share, round(at / DT), width)[1][-1] for width in line.tolist()]
)
truth = np.array(
    [exact(smooth_share, round(at / DT), width)[1][-1] for width in widths[1:].tolist()]
)

fig, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
ax.axhline(sharp, color="k", lw=1, label="exact, sharp")
ax.plot(line, curve, "k--", lw=1, label="exact, smooth")
ax.errorbar(
    widths,
    grad,
    2 * error,
    fmt="o",
    ms=5,
    capsize=3,
    color=COLORS["Pathwise"],
    label="Pathwise, smooth",
)
style = {"fmt": "s", "ms": 5, "capsize": 3, "color": COLORS["Girsanov"], "mfc": "white"}
ax.errorbar([0.006], score[1], 2 * score[3], label="Girsanov, sharp", **style)
ax.set(
    xlabel="width of the sigmoid (reduced units)",
    ylabel=f"gradient of the share at T = {at:g}\nwith respect to the barrier\n"
    "± two standard errors (reduced units)",
    xscale="log",
)
ax.set_xticks([0.006, *widths], ["sharp", *(f"{width:g}" for width in widths)])
ax.minorticks_off()
ax.legend()
plt.show()

assert (np.abs(grad[1:] - truth) < 4 * error[1:]).all()
assert abs(score[1] - sharp) < 4 * score[3]
assert (np.diff(error) < 0).all()
assert abs(curve[-1] - sharp) > 3 * abs(curve[0] - sharp)

# %%
# Mean first-passage time
# -----------------------
#
# The observable is the time until a walker is first seen beyond the barrier, or the
# length of the run if the walker is not seen there. It is
# :func:`~adjsim.first_passage_time` with an absorption rate that is infinite beyond the
# barrier. Pathwise needs a smooth rate, :math:`\operatorname{sigmoid}(x/w)/\tau`, with
# a width :math:`w` and a lifetime :math:`\tau`. In the exact answer :math:`g =
# e^{-\mathrm{rate}\,\Delta t}` is the share of the walkers at a point that survive a
# step. The mean time within :math:`N` steps is the sum of the shares that survive,
# multiplied by the step,
#
# .. math:: \langle T\rangle = \Delta t\,\Bigl(g(-1) + \sum_{n=1}^{N-1} \int \mathrm
#    dx\;p_n(x)\Bigr) .
#
# In this formula :math:`T` is the first-passage time. In the figure below T is the
# length of the run.
#
# For the sharp edge the nodes are Gauss-Legendre nodes on the side where walkers
# survive. For a run without an end the sum is a geometric series in the matrix, and one
# linear solve gives its value.


def sharp_rate(x):
    return torch.where(x > 0, math.inf, 0.0)


def smooth_rate(x):
    return torch.sigmoid(x / WIDTH) / LIFETIME


def left_side(count=80):
    nodes, weights = (
        torch.as_tensor(array) for array in np.polynomial.legendre.leggauss(count)
    )
    return EDGE * (nodes - 1) / 2, EDGE * weights / 2


def passage_times(b, steps, nodes, rate):
    def alive(x):
        return torch.exp(-DT * rate(x))

    return DT * torch.cat(
        [alive(START), densities(b, steps, nodes, alive).sum(1)[:-1]]
    ).cumsum(0)


def forever(b):
    """Compute the mean first-passage time of runs without an end, with a sharp edge."""
    nodes = left_side()
    matrix, first = kernel(b, nodes[0], nodes), kernel(b, START, nodes)[0]
    return DT * (
        1
        + first
        @ torch.linalg.solve(torch.eye(len(first)) - matrix, torch.ones_like(first))
    ).reshape(1)


def passage(*rates):
    def observable(run):
        return torch.stack(
            [adjsim.first_passage_time(rate(x(run)), run.times) for rate in rates], -1
        ).squeeze(-1)

    return observable


def watched(duration):
    return well(duration, every_step=True)


comparison = adjsim.compare(
    watched(2.0), passage(smooth_rate), everyone, replicas=1024, generator=seeded(2)
)
print(comparison)
refused(comparison)
assert comparison.difference("FiniteDifference") < 1e-3

durations = np.array([1.0, 3.0, 9.0])
steps = round(durations[-1] / DT)
curves = {
    "sharp": exact(passage_times, steps, left_side(), sharp_rate),
    "smooth": exact(passage_times, steps, whole_line(), smooth_rate),
}
pair = passage(sharp_rate, smooth_rate)
found = measure(
    watched, passage(sharp_rate), passage(smooth_rate), pair, durations, 2048, seed=300
)
(limit,), (slope,) = exact(forever)
print(
    f"mean first-passage time {limit:.4f}, its gradient {slope:.4f}; within T = "
    f"{durations[-1]:g}, {curves['sharp'][0][-1]:.4f}"
)
left, right = show(
    found,
    durations,
    curves,
    ("mean first-passage time within T", "its gradient, with respect to the barrier"),
)
for ax, level in ((left, limit), (right, slope)):
    ax.axhline(level, color="0.6", lw=1, ls=":", label="exact, sharp, no end")
left.legend(fontsize="small")
plt.show()
hold(found, durations, curves, quotient(passage_times, steps, left_side(), sharp_rate))

# %%
# As the run gets longer, the mean first-passage time within T approaches the mean
# first-passage time of a run without an end. The gradient needs longer runs to approach
# its limit. A smooth rate absorbs some walkers before the barrier and lets others
# return from beyond the barrier.
#
# Optimal control
# ---------------
#
# A bent channel joins two wells at :math:`(\pm1, 0)`. The energy is :math:`U =
# (x^2-1)^2 + \tfrac32\,(y + x^2 - 1)^2`, and kT is a quarter of the barrier. A walker
# in the left well should be in the right well after a time T that is too short for a
# free crossing. A network applies a force :math:`u_\theta(t, q)` to the walker. The
# cost is the squared distance from the right well :math:`q^*` at the end, plus the
# squared force along the path at a price :math:`\lambda`:
#
# .. math:: J(\theta) = \Bigl\langle |q_T - q^*|^2 + \lambda\int_0^T |u_\theta(t,
#    q_t)|^2\,\mathrm dt\Bigr\rangle .
#
# Such a force depends on time and need not be the gradient of an energy, so its class
# is :class:`~adjsim.ForceField`. The observable is a function of the whole trajectory,
# and also depends on the parameters explicitly.

KT, DT, TIME, PRICE, STIFFNESS = 0.25, 0.04, 1.0, 0.1, 3.0
SIGMA = math.sqrt(2 * KT * DT)
HOME, TARGET = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 0.0])


def energy(q):
    return (q[..., 0] ** 2 - 1) ** 2 + STIFFNESS / 2 * (
        q[..., 1] + q[..., 0] ** 2 - 1
    ) ** 2


def wells(q):
    x, y = q[..., 0], q[..., 1]
    bend = STIFFNESS * (y + x**2 - 1)
    return torch.stack([-4 * x * (x**2 - 1) - 2 * x * bend, -bend], -1)


class Steered(adjsim.ForceField):
    """The force of the wells plus the force of a network."""

    def __init__(self, hidden=16):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )

    def control(self, t, position):
        return self.network(
            torch.cat([t + torch.zeros_like(position[..., :1]), position], -1)
        )

    def forward(self, t, position):
        return wells(position) + self.control(t, position)


def steered(field=Steered):
    torch.manual_seed(0)
    dynamics = adjsim.OverdampedLangevin(field(), kT=KT, friction=1.0)
    ts = DT * torch.arange(round(TIME / DT) + 1)
    return adjsim.Simulation(
        dynamics,
        lambda n, g: dynamics.init(HOME.expand(n, 1, 2)),
        ts,
        adjsim.EulerMaruyama(DT),
    )


def miss(position):
    return ((position - TARGET) ** 2).sum((-1, -2))


def cost(simulation):
    """Make J as an observable, with the simulation's current field."""
    field = simulation.dynamics.potential

    def observable(run):
        control_force = field.control(
            run.times[:-1].reshape(-1, 1, 1, 1), run.position[:-1]
        )
        return miss(run.position[-1]) + PRICE * DT * (control_force**2).sum((0, -1, -2))

    return observable


def flat(parts):
    return torch.cat([part.flatten() for part in parts.values()])


# %%
# The stationary estimators are asked for the gradient of this mean cost, and for the
# gradient of a time average under this force.

simulation = steered()
asked = {"Pathwise": adjsim.Pathwise(), **stationary}
average = adjsim.TimeAverage(lambda state: miss(state.position))
for observable, reason in (
    (cost(simulation), "equilibrium mean"),
    (average, "no known stationary density"),
):
    comparison = adjsim.compare(
        simulation, observable, asked, replicas=256, generator=seeded(3)
    )
    refused(comparison, reason)
    print(*comparison.remarks(), sep="\n")

# %%
# Even the time average is refused: under a force that is not a gradient no stationary
# density is known, so there is no score. The three path estimators give every entry of
# the gradient at the start of the training.


def taken(estimator, replicas, seed, **rest):
    estimate = estimator(
        simulation, cost(simulation), replicas=replicas, generator=seeded(seed), **rest
    )
    return flat(estimate.grad).numpy(), flat(estimate.grad_stderr).numpy()


few, many = 256, 2048
(grad, error), (quotients, _) = (
    taken(adjsim.Pathwise(), few, 4),
    taken(fine, few, 4, chunks=2),
)
score, score_error = taken(girsanov, many, 5)
off = (score - grad) / np.hypot(error, score_error)
apart = np.abs(quotients - grad).max() / np.abs(grad).max()
print(
    f"{len(grad)} entries: Girsanov at most {np.abs(off).max():.1f} combined standard "
    "errors off; on the same noise the"
)
print(f"difference quotients are off by {apart:.0e} of the largest entry")
noisier = math.sqrt(many / few) * np.linalg.norm(score_error) / np.linalg.norm(error)
print(
    f"with as many replicas the error of Girsanov is {noisier:.1f} times that of "
    "Pathwise"
)

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
ends = np.array([grad.min(), grad.max()]) * 1.1
left.plot(ends, ends, color="0.6", lw=1)
style = {"fmt": "o", "ms": 3, "lw": 0.8, "color": COLORS["Girsanov"]}
left.errorbar(
    grad, score, 2 * score_error, 2 * error, label="Girsanov, noise of its own", **style
)
left.plot(
    grad,
    quotients,
    "o",
    ms=8,
    mfc="none",
    color=COLORS["FiniteDifference"],
    label="FiniteDifference, same noise",
)
left.set(
    xlabel="Pathwise (reduced units)",
    ylabel="Girsanov, finite differences\n± two standard errors (reduced units)",
    title="entries of the gradient",
)
left.legend()
right.axhspan(-2, 2, color="0.9")
right.plot(off, "o", ms=3, color=COLORS["Girsanov"])
right.plot((quotients - grad) / error, "o", ms=3, color=COLORS["FiniteDifference"])
right.set(
    xlabel="entry",
    ylabel="standard errors",
    title="difference from Pathwise",
    ylim=(-5, 5),
)
plt.show()

assert np.abs(off).max() < 4
assert apart < 1e-5
assert noisier > 1.5
assert np.linalg.norm(score_error) < 0.1 * np.linalg.norm(score)

# %%
# Bars, and the grey band, are two standard errors. On the same noise a difference
# quotient equals the pathwise gradient. Girsanov's score, on noise of its own, agrees
# within the errors.
#
# What is the least cost of any control? A force :math:`u` shifts the mean of a step by
# :math:`u\,\Delta t`. So the relative entropy of the controlled paths with respect to
# the free paths is the mean of :math:`\sum|u|^2\Delta t/4kT`. The cost is the mean
# squared distance from the target at the end, plus :math:`c = 4\lambda\,kT` times this
# entropy. The minimum of such a sum over all distributions of paths is known (Kappen,
# Phys. Rev. Lett. 95, 200201 (2005)):
#
# .. math:: J \ge -c\,\ln\psi(0, q_0),\qquad \psi(t, q) = \bigl\langle
#    e^{-|q_T-q^*|^2/c}\bigr\rangle_{q_t = q,\,u = 0} .
#
# The bound holds for the discrete steps. In the distribution that attains the bound, a
# step from :math:`q` has the mean control force
#
# .. math:: u(t, q) = 2\,kT\,\nabla_m \ln\bigl\langle\psi(t+\Delta t,\,m +
#    \sigma\xi)\bigr\rangle,\quad m = q + F(q)\,\Delta t .
#
# In this formula :math:`\sigma^2 = 2\,kT\,\Delta t` and :math:`\xi` is standard normal.
# In the limit of short steps the optimal distribution differs from the free
# distribution by this force alone, so a force attains the bound. Here :math:`\psi` is
# propagated backward on nodes in the plane, as the densities were propagated forward on
# the line.

C, SPACING = 4 * PRICE * KT, SIGMA / 2
nodes_x, nodes_y = torch.arange(-1.9, 2.1, SPACING), torch.arange(-1.8, 2.4, SPACING)
plane = torch.stack(torch.meshgrid(nodes_x, nodes_y, indexing="ij"), -1)


def gaussian(nodes, middle):
    return (
        SPACING
        * torch.exp(-((nodes - middle[:, None]) ** 2) / (2 * SIGMA**2))
        / (SIGMA * math.sqrt(2 * math.pi))
    )


def back(psi, q):
    """Compute the mean of psi after a step from each q, and the optimal force."""
    middle = (q + wells(q) * DT).requires_grad_()
    mean = (
        (gaussian(nodes_x, middle[:, 0]) @ psi) * gaussian(nodes_y, middle[:, 1])
    ).sum(-1)
    (slope,) = torch.autograd.grad(torch.log(mean).sum(), middle)
    return mean.detach(), 2 * KT * slope


psi, forces = torch.exp(-miss(plane[..., None, :]) / C), []
for _ in range(round(TIME / DT)):
    bound = -C * math.log(back(psi, HOME[None])[0].item())
    psi, control_force = back(psi, plane.reshape(-1, 2))
    psi, forces = (
        psi.reshape(plane.shape[:2]),
        [control_force.reshape(plane.shape), *forces],
    )
print(f"no control costs less than {bound:.4f}")


class Tabled(adjsim.ForceField):
    """The optimal force, at the nearest node."""

    def control(self, t, position):
        step = torch.round((t + torch.zeros_like(position[..., 0:1])) / DT).long()[
            ..., 0
        ]
        i, j = torch.round((position - plane[0, 0]) / SPACING).long().unbind(-1)
        return torch.stack(forces)[
            step, i.clamp(0, len(nodes_x) - 1), j.clamp(0, len(nodes_y) - 1)
        ]

    def forward(self, t, position):
        return wells(position) + self.control(t, position)


# %%
# Adam trains one network with the gradients of Pathwise, and another with the gradients
# of Girsanov. ``estimate.accumulate(dynamics)`` adds the gradients into ``.grad``, as
# ``backward()`` does.

ITERATIONS, RATE = 24, 0.2


def train(estimator, seed):
    simulation, generator, history = steered(), seeded(seed), []
    dynamics = simulation.dynamics
    optimizer = torch.optim.Adam(dynamics.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, ITERATIONS, RATE / 10
    )
    for _ in range(ITERATIONS):
        estimate = estimator(
            simulation, cost(simulation), replicas=512, chunks=4, generator=generator
        )
        optimizer.zero_grad()
        estimate.accumulate(dynamics)
        optimizer.step()
        schedule.step()
        history.append(
            [float(number) for number in (estimate.value, *estimate.interval())]
        )
    return simulation, np.array(history)


def price(simulation, seed):
    """Compute the cost and its standard error, on fresh noise."""
    with torch.no_grad():
        run = adjsim.simulate(
            simulation.dynamics,
            simulation.initial(8192, None),
            simulation.ts,
            solver=simulation.solver,
            generator=seeded(seed),
        )
        paid = cost(simulation)(run)
    return paid.mean().item(), paid.std().item() / math.sqrt(len(paid)), run


before, before_error, wild = price(steered(), 7)
table, table_error, _ = price(steered(Tabled), 12)
print(f"the force of the bound costs {table:.4f} +- {table_error:.4f}")
trained, runs, reached = {}, {}, {}
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for j, (name, estimator) in enumerate(
    {"Pathwise": adjsim.Pathwise(), "Girsanov": girsanov}.items()
):
    trained[name], history = train(estimator, 8 + j)
    *reached[name], runs[name] = price(trained[name], 10 + j)
    print(
        f"{name}: from {before:.3f} +- {before_error:.3f} to {reached[name][0]:.4f} "
        f"+- {reached[name][1]:.4f}"
    )
    mean, low, high = history.T
    for ax, base in ((left, 0.0), (right, bound)):
        ax.fill_between(
            np.arange(ITERATIONS),
            low - base,
            high - base,
            color=COLORS[name],
            alpha=0.2,
            lw=0,
        )
        ax.plot(
            np.arange(ITERATIONS), mean - base, lw=1.5, color=COLORS[name], label=name
        )
left.axhline(bound, color="k", lw=1, ls="--", label=f"bound, {bound:.3f}")
for ax, base in ((left, 0.0), (right, bound)):
    ax.axhline(
        table - base,
        color="k",
        lw=1,
        ls=":",
        label=f"optimal force, {table:.3f} ± {table_error:.3f}",
    )
left.set(xlabel="iteration", ylabel="cost J (reduced units)")
right.set(
    xlabel="iteration", ylabel="cost above the bound (reduced units)", yscale="log"
)
left.legend()
plt.show()

for mean, error in [*reached.values(), (table, table_error)]:
    assert mean > bound - 4 * error
    assert mean - bound < 0.1 * (before - bound)

# %%
# Bands are 95 % intervals from four chunks of replicas. Both trainings reduce the cost
# alike, although Girsanov's gradients are noisier. The dotted line is the cost of the
# optimal force, looked up at the nearest node. This cost does not reach the bound
# because the time step is finite.
#
# The last figure shows walkers before and after training, over the contours of the
# energy. The lower panels show the force trained by Pathwise beside the optimal force
# (the force of the bound), at two times and at places where walkers are.

mesh_x, mesh_y = np.meshgrid(np.linspace(-1.8, 1.8, 121), np.linspace(-1.2, 1.8, 101))
height = energy(torch.tensor(np.stack([mesh_x, mesh_y], -1))).numpy()
field, run = trained["Pathwise"].dynamics.potential, runs["Pathwise"]
fig, axes = plt.subplots(
    2, 2, figsize=(10, 8), layout="constrained", sharex=True, sharey=True
)
for ax in axes.flat:
    ax.contour(
        mesh_x,
        mesh_y,
        height,
        levels=np.arange(0.25, 4, 0.5),
        colors="0.75",
        linewidths=0.8,
    )
    ax.plot(*HOME, "ko", ms=6, zorder=5)
    ax.plot(*TARGET, "k*", ms=10, zorder=5)
for ax, shown, title in ((axes[0, 0], wild, "before"), (axes[0, 1], run, "after")):
    ax.plot(
        *shown.position[:, :25, 0].permute(2, 0, 1),
        lw=0.7,
        alpha=0.7,
        color=COLORS["Pathwise"],
    )
    ax.set(title=f"{title} training")
for ax, part in zip(axes[1], (0.25, 0.75), strict=True):
    step = round(part * TIME / DT)
    time, cloud = run.times[step].item(), run.position[step, :400, 0]
    best = forces[step]
    i, j = torch.round((cloud - plane[0, 0]) / SPACING).long().T
    there, control_force = (
        best[i, j],
        field.control(time, plane[i, j][:, None]).detach()[:, 0],
    )
    apart = ((control_force - there).norm() / there.norm()).item()
    print(
        f"t = {time:g}: where walkers are, the network's force differs from the "
        f"bound's by {100 * apart:.0f} % of its size"
    )
    assert apart < 0.5
    places, best = plane[::3, ::3].reshape(-1, 2), best[::3, ::3].reshape(-1, 2)
    near = torch.cdist(places, cloud).min(1).values < 0.15
    control_force = field.control(time, places[near][:, None]).detach()[:, 0]
    ax.plot(*cloud.T, ".", ms=2, color="0.6")
    arrows = {"angles": "xy", "scale_units": "xy", "scale": 15, "width": 0.004}
    ax.quiver(*places[near].T, *best[near].T, color="k", label="of the bound", **arrows)
    ax.quiver(
        *places[near].T,
        *control_force.T,
        color=COLORS["Pathwise"],
        label="of the network",
        **arrows,
    )
    ax.set(title=f"the force at t = {time:g}")
axes[1, 0].legend(loc="lower left", fontsize="small")
for ax in axes[:, 0]:
    ax.set_ylabel("y (reduced units)")
for ax in axes[1]:
    ax.set_xlabel("x (reduced units)")
axes[0, 0].set(xlim=(-1.8, 1.8), ylim=(-1.2, 1.8))
plt.show()

# %%
# The trained force is not a gradient: it has a curl, :math:`\partial_x u_y - \partial_y
# u_x`. It also changes with time.

times = run.times[:-1].reshape(-1, 1, 1, 1)
places = run.position[:-1, :64].requires_grad_()
control_force = field.control(times, places)
along_x, along_y = (
    torch.autograd.grad(control_force[..., i].sum(), places, retain_graph=True)[0]
    for i in range(2)
)
curl = (along_y[..., 0] - along_x[..., 1]).square().mean().sqrt().item()
size = torch.cat([along_x, along_y], -1).square().sum(-1).mean().sqrt().item()
print(f"root mean square curl {curl:.2f}, of a derivative of size {size:.2f}")
changed = (
    (field.control(0.75 * TIME, places) - field.control(0.25 * TIME, places))
    .square()
    .sum(-1)
    .mean()
    .sqrt()
    .item()
)
print(
    "between a quarter and three quarters of the time the force changes by "
    f"{changed:.2f}"
)
assert curl > 0.05 * size
assert changed > 0.1

arrived = {
    title: (shown.final.position[:, 0, 0] > 0).double().mean().item()
    for title, shown in (("before", wild), ("after", run))
}
print(
    "share in the right half at the end:",
    {title: round(share, 3) for title, share in arrived.items()},
)
assert arrived["before"] < 0.1 < 0.9 < arrived["after"]
