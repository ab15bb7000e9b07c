r"""
Exploding gradients
===================

In a fluid nearby paths diverge as :math:`e^{\lambda t}`, where :math:`\lambda` is the
Lyapunov exponent, and so do the gradients of single paths. This page measures the
growth under five dynamics: Newton's equations (NVE), velocity rescaling, Berendsen's
thermostat, Langevin dynamics and a Nose-Hoover chain. Then it compares two remedies,
truncation and many short runs, with estimators of the equilibrium gradient.

The fluid has 32 Lennard-Jones atoms in a periodic box, at density 0.8 and kT = 1, in
reduced units. The observable is the distance of an atom to its nearest neighbour,
averaged over atoms. The parameter is sigma.

The long measurements come from a study that takes a quarter of an hour,
``examples/data/make_exploding_gradients.py``. This page draws the stored output of the
study and computes a part of it again.
"""

# sphinx_gallery_thumbnail_number = 1

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import adjsim
from adjsim.potentials import Switched

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # 32 atoms are too few to share between threads

FILE = "examples/data/exploding_gradients.json"
study = json.loads((Path(adjsim.__file__).parents[1] / FILE).read_text())
SETTINGS, NAMES = study["settings"], list(study["dynamics"])
COLORS = dict(zip(NAMES, ("C0", "C1", "C2", "C3", "C4"), strict=True))
SHORTEST, LONGEST = "0.1", "6.0"
print(f"{study['made_by']}, commit {study['commit'][:10]}, seed {SETTINGS['seed']}")
print(", ".join(f"{key} {value:g}" for key, value in SETTINGS.items()))


def found(name, part):
    """Return a part of the study of one dynamics, with lists as arrays."""
    return {
        key: np.array(value) if isinstance(value, list) else value
        for key, value in study["dynamics"][name][part].items()
    }


# %%
# The fluid
# ---------
#
# The energy of a pair ends smoothly at the cutoff. If the force had a jump there, the
# gradient of a path would miss the effect of pairs that cross it. Momenta add up to
# zero, which all dynamics but Langevin conserve.

ATOMS, KT, DT, TAU = (SETTINGS[key] for key in ("atoms", "kT", "dt", "tau"))
SIDE, DOF = (ATOMS / SETTINGS["density"]) ** (1 / 3), 3 * ATOMS - 3
BOX = [SIDE] * 3
SCHEMES = dict(zip(NAMES, ("BAB", "BABR", "RBABR", "BAOAB", "NBABN"), strict=True))
CHECKPOINTS = adjsim.CheckpointAdjoint()


def fluid(name, sigma):
    pairs = adjsim.LennardJones(
        1.0,
        sigma,
        cutoff=SETTINGS["cutoff"],
        box=BOX,
        truncation=Switched(SETTINGS["switched_from"]),
    )
    if name == "NVE":
        return adjsim.Hamiltonian(pairs)
    if name == "velocity rescale":
        return adjsim.VelocityRescale(pairs, kT=KT, dof=DOF)
    if name == "Berendsen":
        return adjsim.Berendsen(pairs, kT=KT, tau=TAU, dof=DOF)
    if name == "Langevin":
        return adjsim.Langevin(pairs, kT=KT, friction=SETTINGS["friction"])
    return adjsim.NoseHooverChain(pairs, kT=KT, tau=TAU, dof=DOF)


def nearest(state):
    return adjsim.nearest_neighbour_distance(state.position, BOX)


# %%
# Growth
# ------
#
# The study took the gradient of the distance at the end of the run from 64 equilibrium
# starts. Langevin dynamics has noise of its own for each start. The study used forward
# mode, which gives the gradients at all times in one run. Here the adjoint computes
# some of them again, in two runs of length 0.5 and one of length 2.

starts = torch.tensor(study["starts"])
ADJOINT = {0.5: 2, 2.0: 1}


def single_gradients(name, time, count):
    """Return the gradients from the first starts, by the checkpoint adjoint."""
    sigma = torch.nn.Parameter(torch.tensor(1.0))
    dynamics = fluid(name, sigma)
    final = adjsim.simulate(
        dynamics,
        dynamics.init(*starts[:, :count]),
        [0.0, time],
        solver=adjsim.Splitting(SCHEMES[name], DT),
        adjoint=CHECKPOINTS,
        generator=torch.Generator().manual_seed(study["dynamics"][name]["seed"]),
    ).final
    return np.array(
        [
            torch.autograd.grad(distance, sigma, retain_graph=True)[0].item()
            for distance in nearest(final)
        ]
    )


again, worst = {}, 0.0
for name in NAMES:
    stored = study["dynamics"][name]["growth"]["single"]
    for time, count in ADJOINT.items():
        again[name, time] = single_gradients(name, time, count)
        expected = np.array(stored[str(time)][:count])
        worst = max(worst, np.abs(again[name, time] / expected - 1).max())
print(f"adjoint and forward mode differ by {worst:.0e} at most, relatively")
# The file has seven digits.
assert worst < 1e-6

# %%
# In the figure the line is the median of the sizes of the 64 gradients, and the bands
# hold half of them and nine tenths. The crosses are the gradients computed above. The
# dashed line grows as :math:`e^{\lambda t}`, with the Lyapunov exponent measured from
# the tangent of the whole state.

fig, axes = plt.subplots(2, 3, figsize=(10, 6), layout="constrained")
growth = {name: found(name, "growth") for name in NAMES}
for ax, name in zip(axes.flat, NAMES, strict=False):
    part, color = growth[name], COLORS[name]
    times, (low, lower, median, upper, high) = part["times"], part["quantiles"]
    ax.fill_between(times, low, high, color=color, alpha=0.2, lw=0)
    ax.fill_between(times, lower, upper, color=color, alpha=0.4, lw=0)
    ax.semilogy(times, median, color=color)
    exponent, middle = part["lyapunov"][0], len(times) // 2
    line = median[middle] * np.exp(exponent * (times - times[middle]))
    ax.semilogy(times, line, "k--", lw=1, label=rf"$e^{{{exponent:.2f}\,t}}$")
    for time, count in ADJOINT.items():
        ax.plot([time] * count, np.abs(again[name, time]), "kx", ms=5)
    ax.set(title=name, ylim=(1e-3, 1e11), xlabel="length of the run t")
    ax.legend(loc="upper left")
for ax in axes[:, 0]:
    ax.set_ylabel("|gradient| (no unit)")
bars = axes.flat[-1]
rows = np.arange(len(NAMES))
for shift, key, color in ((-0.15, "lyapunov", "k"), (0.15, "rate", "C0")):
    rates = np.array([growth[name][key] for name in NAMES])
    label = {"lyapunov": "state (Lyapunov)", "rate": "gradient"}[key]
    style = {"fmt": "o", "color": color, "label": label}
    bars.errorbar(rates[:, 0], rows + shift, xerr=2 * rates[:, 1], **style)
bars.set_yticks(rows, NAMES)
bars.set(xlabel="growth rate (1/time)", title="rates")
bars.set(xlim=(2.4, 4.3), ylim=(len(NAMES) - 0.4, -0.6))
bars.legend(title="bars: two standard errors", loc="upper left", fontsize="small")
plt.show()

for name in NAMES:
    (rate, error), (exponent, own) = (growth[name][key] for key in ("rate", "lyapunov"))
    print(
        f"{name:16}: gradients grow at {rate:.2f} +- {error:.2f}, the state at "
        f"{exponent:.2f} +- {own:.2f}, Lyapunov time {1 / exponent:.2f}"
    )
    assert abs(rate - exponent) < 4 * np.hypot(error, own)
    assert growth[name]["quantiles"][2, -1] > 1e7
exponents = {name: growth[name]["lyapunov"][0] for name in NAMES}
assert max(exponents.values()) / min(exponents.values()) < 1.2
assert min(exponents, key=exponents.get) == "Langevin"

# %%
# Gradients grow at the Lyapunov exponent, by a factor of 36 to 58 in a unit of time.
# The exponent is nearly the same under four of the dynamics, and Langevin dynamics has
# a tenth less. So no thermostat at these settings is a remedy.

# %%
# Sign and size
# -------------
#
# The upper row shows the 64 gradients of the shortest runs. The lower row shows those
# of the longest runs by the logarithm of their size, with positive gradients above the
# axis and negative ones below.

fig, axes = plt.subplots(2, 5, figsize=(11, 5), layout="constrained", sharey="row")
positive = {}
for (top, bottom), name in zip(axes.T, NAMES, strict=True):
    single = growth[name]["single"]
    early, late = (np.array(single[key]) for key in (SHORTEST, LONGEST))
    top.hist(early, bins=np.linspace(-0.5, 1, 16), color=COLORS[name])
    top.axvline(0, color="k", lw=1)
    top.set(title=name, xlabel="gradient (no unit)")
    bins = np.linspace(5.5, 11, 23)
    for sign, color in ((1, COLORS[name]), (-1, "0.5")):
        counts, _ = np.histogram(np.log10(np.abs(late[sign * late > 0])), bins)
        bottom.stairs(sign * counts, bins, fill=True, color=color)
    bottom.axhline(0, color="k", lw=1)
    bottom.set(xlabel=r"$\log_{10}$ |gradient|")
    positive[name] = [int((x > 0).sum()) for x in (early, late)]
axes[0, 0].set_ylabel(f"runs of length {SHORTEST}")
axes[1, 0].set_ylabel(f"runs of length {LONGEST}\nnegative | positive")
plt.show()

for name in NAMES:
    late = np.array(growth[name]["single"][LONGEST])
    share = np.sort(np.abs(late))[-3:].sum() / np.abs(late).sum()
    print(
        f"{name:16}: {positive[name][0]} of 64 gradients positive at t = {SHORTEST}, "
        f"{positive[name][1]} at t = {LONGEST}; mean {late.mean():.1g} +- "
        f"{late.std(ddof=1) / 8:.1g}; the three largest are {share:.0%} of all sizes"
    )
    assert positive[name][0] == 64
    # Four standard deviations of 64 throws of a coin.
    assert abs(positive[name][1] - 32) < 16
    assert late.std(ddof=1) / 8 > 1e7
    assert share > 0.2

# %%
# After less than half a Lyapunov time all gradients are positive. After more than
# twenty Lyapunov times the sign is a matter of chance, and three of 64 runs make up
# more than a fifth of the sum of all sizes. Each of these gradients is right for its
# run: the end of the run does change that much with sigma. But their mean says nothing,
# with a standard error of ten million or more.

# %%
# Truncation and short runs
# -------------------------
#
# The stationary question has an answer without such growth: how does the mean over a
# long run change? Two remedies use path gradients. Many short runs start from
# equilibrium states, and the gradient is that of the distance at their end. Truncation
# cuts the gradient of a long run to parts, so that sigma acts only within a part. The
# parts of a run in equilibrium are such short runs too, with the average of the
# distance along the run as the observable. So the length of the runs or parts is the
# choice to be made in both.
#
# The figure shows the means over 1,024 runs of each length, with bands of two standard
# errors. The line is the derivative of the mean over long runs, by differences of runs
# with two values of sigma, and it is the right answer. It depends on the dynamics: in
# NVE a change of sigma changes the energy of a given start for ever, while the others
# return to their own temperature.

truth = {name: np.array(study["dynamics"][name]["stationary"]) for name in NAMES}
response = {name: found(name, "response") for name in NAMES}
fig, axes = plt.subplots(1, 5, figsize=(12, 3.6), layout="constrained", sharey=True)
for ax, name in zip(axes, NAMES, strict=True):
    part, (value, error) = response[name], truth[name]
    for key, color, label in (
        ("final", "C0", "end of short runs"),
        ("average", "C1", "parts of a long run"),
    ):
        mean, stderr = part[key]
        low, high = mean - 2 * stderr, mean + 2 * stderr
        ax.fill_between(part["times"], low, high, color=color, alpha=0.3, lw=0)
        ax.plot(part["times"], mean, color=color, label=label)
    ax.axhspan(value - 2 * error, value + 2 * error, color="0.6", lw=0)
    ax.axhline(value, color="k", lw=1, label="long runs, differences")
    ax.set(title=name, ylim=(0, 1.2), xlim=(0, 2), xlabel="length of run or part")
axes[0].set_ylabel("mean gradient (no unit)")
axes[0].legend(fontsize="small", loc="upper left")
plt.show()

for name in NAMES:
    part, (value, error) = response[name], truth[name]
    rows = [np.abs(part["times"] - t).argmin() for t in (0.3, 0.6, 1.0, 2.0)]
    each = "; ".join(
        f"t = {part['times'][k]:.1f}: {part['final'][0, k]:.2f} +- "
        f"{part['final'][1, k]:.2f}"
        for k in rows
    )
    print(f"{name:16}: long runs {value:.3f} +- {error:.3f}; short runs {each}")
    assert part["final"][1, -1] > 1


def short_runs(name, time):
    """Return the mean gradient of short runs of a length, and its standard error."""
    part = response[name]
    return part["final"][:, np.abs(part["times"] - time).argmin()]


for name in ("NVE", "velocity rescale"):
    (value, error), (right, own) = short_runs(name, 0.3), truth[name]
    assert abs(value - right) < 3 * np.hypot(error, own)
energy = truth["NVE"][0]
for name in NAMES[2:]:
    (value, error), (right, _) = short_runs(name, 0.3), truth[name]
    assert value < right - 8 * error
    assert abs(value - energy) < abs(value - right)

# %%
# In NVE and under velocity rescaling the short runs reach the right answer within 0.3
# time units, a bit more than a Lyapunov time, before their errors grow. Structure
# follows sigma that fast, and the temperature has nothing to wait for: in NVE it is
# free, and velocity rescaling sets it in every step. There truncation works.
#
# The other three thermostats take about half a time unit or more, by their settings, to
# remove the heat of a change of sigma. After 0.3 time units the gradients are small in
# error and wrong: they are closer to the answer of NVE than to their own. The answer
# comes only at lengths where the error grows. At a length of 2 the standard errors of
# 1,024 runs are above 1 everywhere. Parts of a long run lag behind short runs, since
# they average the gradient over all lengths up to their own.

# %%
# The equilibrium estimators
# --------------------------
#
# :class:`~adjsim.ScoreFunction` and :class:`~adjsim.Reweighting` propagate no tangents.
# They need dynamics with a known stationary density, and refuse the others.

for name in NAMES[:3]:
    dynamics = fluid(name, torch.nn.Parameter(torch.tensor(1.0)))
    refused = adjsim.Simulation(
        dynamics,
        lambda count, generator, d=dynamics: d.init(*starts[:, :count]),
        [0.0, 1.0],
        adjsim.Splitting(SCHEMES[name], DT),
    )
    try:
        adjsim.ScoreFunction()(refused, adjsim.TimeAverage(nearest), replicas=2)
    except TypeError as error:
        print(f"{name}: {error}")
    else:
        raise AssertionError(f"{name} should have been refused")

for label, estimate in study["estimators"].items():
    value, error = estimate["gradient"]
    print(f"{label}: {value:.3f} +- {error:.3f}")
    assert not estimate["warnings"]
    own, spread = truth[label.split(", ")[1]]
    assert abs(value - own) < 4 * np.hypot(error, spread)

# %%
# The estimates agree with the long runs. The next figure compares all methods at equal
# simulated time, that of 64 runs of 60 time units, which the equilibrium estimators
# took. The error is the root of the sum of the squares of bias and standard error. The
# bias is the difference from the long runs, and is known to the standard error of 1,024
# runs, which makes the lines rough. The standard error is that of as many runs as fit
# into this time.

BUDGET = SETTINGS["starts"] * SETTINGS["average"]
CANONICAL = ("Langevin", "Nose-Hoover")
fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
best = {}
for ax, name in zip(axes, CANONICAL, strict=True):
    part = response[name]
    times = part["times"]
    for key, color, label in (
        ("final", "C0", "end of short runs"),
        ("average", "C1", "parts of a long run"),
    ):
        mean, stderr = part[key]
        bias = mean - truth[name][0]
        stderr = stderr * np.sqrt(part["runs"] * times / BUDGET)
        error = np.hypot(bias, stderr)
        best[name, key] = error.min()
        ax.semilogy(times, error, color=color, label=label)
        ax.semilogy(times, stderr, ":", color=color)
    for estimator, color in (("ScoreFunction", "C2"), ("Reweighting", "C4")):
        error = study["estimators"][f"{estimator}, {name}"]["gradient"][1]
        ax.axhline(error, color=color, ls="--", label=estimator)
        best[name, estimator] = error
    ax.set(title=name, xlabel="length of run or part", xlim=(0, 2))
axes[0].set_ylabel("error of the gradient (no unit)\ndotted: standard error alone")
axes[0].legend(fontsize="small")
plt.show()

for (name, what), error in best.items():
    print(f"{name}, {what}: smallest error {error:.3f}")
    assert error >= best[name, "ScoreFunction"]

# %%
# At no length are bias and standard error both as small as the error of
# :class:`~adjsim.ScoreFunction`. And without the right answer the best length is not
# known.
#
# A small error bar is no proof
# -----------------------------
#
# Here are eight Langevin runs of one time unit, estimated by
# ``Pathwise(truncate=0.25)`` and by ScoreFunction.

sigma = torch.nn.Parameter(torch.tensor(1.0))
langevin = fluid("Langevin", sigma)
simulation = adjsim.Simulation(
    langevin,
    lambda count, generator: langevin.init(*starts[:, :count]),
    [0.0, 1.0],
    adjsim.BAOAB(DT),
)
off = {}
for estimator in (adjsim.Pathwise(CHECKPOINTS, truncate=0.25), adjsim.ScoreFunction()):
    estimate = estimator(
        simulation, adjsim.TimeAverage(nearest), replicas=8, chunks=4, generator=0
    )
    error = estimate.grad_stderr["potential.sigma"].item()
    gap = abs(estimate.grad["potential.sigma"].item() - truth["Langevin"][0]) / error
    off[type(estimator).__name__] = gap
    print(estimator, estimate, sep="\n")
    print(f"  {gap:.1f} standard errors from the long runs\n")
assert off["Pathwise"] > 20
assert off["ScoreFunction"] < 4

# %%
# The truncated gradient has the smaller error bar by far, and is wrong by tens of error
# bars. Its warning says why: the bar does not contain the effects that were cut off.
#
# Advice
# ------
#
# * The gradient of one path is right at any length, and useful for a few Lyapunov
#   times. Measure the exponent first: here a Lyapunov time is 0.25 time units, or 50
#   steps. ``diagnostics["growth"]`` of :class:`~adjsim.Pathwise` measures the growth.
# * Do not expect a thermostat to stop the growth. Do not average more long runs either:
#   the error grows with the length much faster than it falls with their number.
# * For an equilibrium mean use :class:`~adjsim.ScoreFunction`, or
#   :class:`~adjsim.Reweighting` in a fit, with dynamics that samples the canonical
#   distribution. Velocity rescaling and Berendsen do not, and have no such estimator.
# * Many short runs and truncation work only if the observable has responded fully
#   before the gradients grow. Vary the length: a plateau that lasts for some Lyapunov
#   times is a good sign, and a slope is a bias. Slow variables, such as the temperature
#   under a weak thermostat, are held fixed by truncation.
# * Between the two use short runs and their end rather than parts of a long run. Both
#   need starts in equilibrium.
# * If a mean after a given time is the question, and the time is long,
#   :class:`~adjsim.Girsanov` does not differentiate the path
#   (:doc:`/choosing_an_estimator`).
