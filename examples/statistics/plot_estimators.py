r"""
Two questions and their estimators
==================================

How does a mean change with a parameter? The mean may be taken after a given time from a
given start (the path question), or at equilibrium (the stationary question). Each
estimator answers one of these two questions, and its estimate carries the label of that
question.

The stationary question comes first, in a harmonic well, where the exact answer is
known. The example compares the estimators with the exact gradient, shows how their
errors fall with the number of replicas, and makes a fit. Then it asks both questions in
a double well, for runs of increasing length.

All quantities are in reduced units. Masses are 1, and the friction is 1 except in the
fit. In the harmonic wells kT = 0.8. The overdamped particle is stepped by
:class:`~adjsim.LeimkuhlerMatthews`, which samples a harmonic well without bias.
"""

# sphinx_gallery_thumbnail_number = 4

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # one particle is too little to share between threads

COLORS = {
    "Pathwise": "C0",
    "ScoreFunction": "C1",
    "Reweighting": "C2",
    "Girsanov": "C3",
    "FiniteDifference": "C4",
}
KT, RELAXATIONS = 0.8, 6.0


def parameter(value):
    return nn.Parameter(torch.tensor(value))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def position(state):
    return state.position[:, 0, 0]


def pair(estimate, name):
    """Return a gradient and its standard error, as floats."""
    return estimate.grad[name].item(), estimate.grad_stderr[name].item()


# %%
# The equilibrium mean in a well
# ------------------------------
#
# :math:`\langle x^2\rangle = kT/k`, so :math:`\mathrm d\langle x^2\rangle/\mathrm dk =
# -kT/k^2`. All replicas start at the bottom of the well. The first six relaxation
# times, each 1/k, are left out, and the rest of the run is averaged. In a single well,
# paths from different starts converge if they have the same noise, so the pathwise
# gradient of a long run approaches the stationary one.


def well(k, duration, dt):
    dynamics = adjsim.OverdampedLangevin(
        adjsim.Harmonic(parameter(k)), kT=KT, friction=1.0
    )

    def initial(replicas, generator):
        return dynamics.init(torch.zeros(replicas, 1, 1))

    return adjsim.Simulation(
        dynamics, initial, [0.0, duration], adjsim.LeimkuhlerMatthews(dt), compile=True
    )


def stationary(every):
    return [adjsim.Pathwise(), adjsim.ScoreFunction(), adjsim.Reweighting(every=every)]


def label(estimator):
    return type(estimator).__name__


stiffness, found = np.array([0.5, 1.0, 2.0, 4.0]), {}
for i, k in enumerate(stiffness.tolist()):
    observable = adjsim.TimeAverage(
        lambda state: position(state) ** 2, burn_in=RELAXATIONS / k
    )
    for j, estimator in enumerate(stationary(every=1 / k)):
        simulation = well(k, 4 * RELAXATIONS / k, 0.2 / k)
        estimate = estimator(
            simulation,
            observable,
            replicas=1024,
            chunks=16,
            generator=seeded(10 * i + j),
        )
        assert not estimate.warnings
        low, high = estimate.interval("potential.k")
        grad, stderr = pair(estimate, "potential.k")
        found.setdefault(label(estimator), []).append(
            (grad, stderr, low.item(), high.item())
        )
        print(
            f"k = {k:g}: {label(estimator)} {grad:.4f} +- {stderr:.4f}, exact "
            f"{-KT / k**2:.4f}"
        )

exact = -KT / stiffness**2
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
grid = np.geomspace(0.4, 5, 50)
left.loglog(grid, KT / grid**2, "k-", lw=1, label="exact, kT/k²")
right.axhline(1, color="k", lw=1)
for shift, (name, rows) in zip((0.94, 1.0, 1.06), found.items(), strict=True):
    grad, stderr, low, high = np.array(rows).T
    style = {"fmt": "o", "ms": 4, "capsize": 3, "color": COLORS[name], "label": name}
    left.errorbar(stiffness * shift, -grad, 2 * stderr, **style)
    right.errorbar(
        stiffness * shift,
        grad / exact,
        np.abs(np.array([high - grad, grad - low]) / exact),
        **style,
    )
    assert (np.abs(grad - exact) < 4 * stderr).all()
left.set(
    xlabel="k (reduced units)",
    ylabel="minus the gradient of <x²>\nwith respect to k (reduced units)",
    title="bars: two standard errors",
)
right.set(
    xlabel="k (reduced units)",
    ylabel="gradient / exact",
    title="bars: 95 % intervals",
    xscale="log",
)
for ax in (left, right):
    ax.set_xticks(stiffness, [f"{k:g}" for k in stiffness])
    ax.minorticks_off()
left.legend()
plt.show()

# %%
# The bars on the left are two standard errors. The bars on the right are 95 % intervals
# of Student's t over 16 chunks of replicas. The marks are shifted along k for
# legibility.
#
# Errors and replicas
# -------------------
#
# The variance of each estimator falls as one over the number of replicas N. Here the
# variance is the square of the standard error that each estimate reports, from 64
# chunks. Such a variance has a relative uncertainty of :math:`\sqrt{2/63}` if chunks
# are large enough for their means to be Gaussian. The uncertainty of the fitted slope
# follows from it.

CHUNKS, sizes = 64, np.array([256, 1024, 4096])
observable = adjsim.TimeAverage(lambda state: position(state) ** 2, burn_in=RELAXATIONS)
x = np.log(sizes)
uncertain = np.sqrt(2 / (CHUNKS - 1) / ((x - x.mean()) ** 2).sum())
fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for j, name in enumerate(found):
    variances = []
    for i, size in enumerate(sizes.tolist()):
        estimator = stationary(every=0.5)[j]
        estimate = estimator(
            well(1.0, 1.5 * RELAXATIONS, 0.25),
            observable,
            replicas=size,
            chunks=CHUNKS,
            generator=seeded(100 + 10 * i + j),
        )
        variances.append(pair(estimate, "potential.k")[1] ** 2)
    slope, offset = np.polyfit(x, np.log(variances), 1)
    print(f"{name}: the variance falls as N^({slope:.3f} +- {uncertain:.3f})")
    assert abs(slope + 1) < 4 * uncertain
    ax.loglog(
        sizes,
        variances,
        "o",
        color=COLORS[name],
        label=f"{name}, slope {slope:.2f} ± {uncertain:.2f}",
    )
    ax.loglog(sizes, np.exp(offset) * sizes**slope, "-", lw=1, color=COLORS[name])
ax.set(xlabel="replicas N", ylabel="variance of the gradient (reduced units)")
ax.legend()
plt.show()

# %%
# A fit
# -----
#
# The fit seeks the stiffness k at which the well has a given :math:`\langle
# x^2\rangle`. The target is the value at k = 1, and the fit starts from four times this
# k. The loss is :math:`(\ln\langle x^2\rangle - \ln\text{target})^2`.
# ``estimate.surrogate(dynamics)`` is a tensor with the value and the gradient of the
# estimate. So a loss can use it like any other tensor, and ``backward()`` gives the
# gradient of the loss. Every iteration makes a new run, except with Reweighting, which
# reweights its frames until their effective share (the effective sample size over their
# number) falls below one half. The particle has inertia here and is stepped by BAOAB,
# which all five estimators support. BAOAB samples the positions in a harmonic well
# without bias at any stable step size.

TARGET, ITERATIONS = KT / 1.0, 16
observable = adjsim.TimeAverage(lambda state: position(state) ** 2, burn_in=RELAXATIONS)


def inertial(k, duration, dt):
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(k)), kT=KT, friction=2.0)

    def initial(replicas, generator):
        return dynamics.init(torch.zeros(replicas, 1, 1), torch.zeros(replicas, 1, 1))

    return adjsim.Simulation(
        dynamics, initial, [0.0, duration], adjsim.BAOAB(dt), compile=True
    )


def fit(estimator, seed):
    simulation = inertial(4.0, 2 * RELAXATIONS, 0.2)
    k, generator, history = simulation.dynamics.potential.k, seeded(seed), []
    optimizer = torch.optim.SGD([k], lr=0.5)
    for _ in range(ITERATIONS):
        estimate = estimator(
            simulation, observable, replicas=1024, chunks=4, generator=generator
        )
        loss = torch.log(estimate.surrogate(simulation.dynamics) / TARGET) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        info = estimate.diagnostics
        history.append(
            (loss.item(), info["energy_evaluations"], info.get("sampled", True))
        )
    # The remaining error: the standard error of the last mean, as an error of k.
    return (
        k.item(),
        abs(estimate.value_stderr / estimate.grad["potential.k"]).item(),
        history,
    )


fig, (left, right) = plt.subplots(
    1, 2, figsize=(9, 3.8), layout="constrained", sharey=True
)
runs = {}
for j, estimator in enumerate(
    [*stationary(every=0.4), adjsim.Girsanov(), adjsim.FiniteDifference()]
):
    name = label(estimator)
    k, stderr, history = fit(estimator, seed=200 + j)
    losses, passes, sampled = (
        np.array(column) for column in zip(*history, strict=True)
    )
    runs[name], spent = int(sampled.sum()), np.cumsum(passes)
    print(
        f"{name}: k = {k:.4f} +- {stderr:.4f} after {runs[name]} runs and {spent[-1]} "
        "passes over the energy"
    )
    assert abs(k - 1) < 4 * stderr
    assert losses[-1] < 1e-2 * losses[0]
    left.semilogy(
        np.arange(ITERATIONS),
        losses,
        "-",
        color=COLORS[name],
        label=f"{name}, {runs[name]} runs",
    )
    right.loglog(spent, losses, "-", color=COLORS[name])
    left.semilogy(
        np.arange(ITERATIONS)[sampled], losses[sampled], "o", ms=4, color=COLORS[name]
    )
    right.loglog(spent[sampled], losses[sampled], "o", ms=4, color=COLORS[name])
assert runs["Reweighting"] < 0.5 * runs["ScoreFunction"]
left.set(xlabel="iteration", ylabel="loss (reduced units)")
right.set(xlabel="passes over the energy")
left.legend(title="dots: a new run")
plt.show()

# %%
# The loss falls until it reaches the noise of the mean. Reweighting keeps its frames,
# so it finds the minimum of the loss on these frames, to any number of digits. This
# minimum is not at the exact k. The difference is the sampling error of the frames,
# which the printed standard error includes.
#
# Path and stationary
# -------------------
#
# The figure shows both questions for increasing lengths of the run. The left panel is
# for the harmonic well with k = 1, and the observable is the square of the last
# position. The line "path, exact" is the derivative of the second moment of x, from the
# recursion of the discrete steps. The right panel is for a particle with inertia in the
# double well :math:`(x^2-1)^2 + b\,x` at b = 0, kT = 0.5 and friction 1, integrated by
# BAOAB. The observable is the last position. Every run in the double well starts at
# rest in the left well.


def exact_path(duration, dt, k=1.0, h=1e-5):
    """Differentiate the second moment of LeimkuhlerMatthews' steps from 0 with respect
    to k.
    """

    def moment(k):
        a, s = 1 - k * dt, np.sqrt(2 * KT * dt)
        square = shared = 0.0
        for _ in range(round(duration / dt)):
            square, shared = a * a * square + a * s * shared + s * s / 2, s / 2
        return square

    return (moment(k + h) - moment(k - h)) / (2 * h)


def double_well(duration, b=0.0):
    dynamics = adjsim.Langevin(
        adjsim.AsymmetricDoubleWell(1.0, parameter(b)), kT=0.5, friction=1.0
    )

    def initial(replicas, generator):
        return dynamics.init(
            torch.full((replicas, 1, 1), -1.0), torch.zeros(replicas, 1, 1)
        )

    return adjsim.Simulation(
        dynamics, initial, [0.0, duration], adjsim.BAOAB(0.1), compile=True
    )


def exact_stationary(b, kT=0.5, h=1e-4):
    """Compute d<x>/db by quadrature."""
    x = np.linspace(-4, 4, 8001)

    def mean(b):
        weight = np.exp(-((x**2 - 1) ** 2 + b * x) / kT)
        return (x * weight).sum() / weight.sum()

    return (mean(b + h) - mean(b - h)) / (2 * h)


REPLICAS = 4096
square, last = adjsim.Final(lambda state: position(state) ** 2), adjsim.Final(position)
lengths = np.array([0.2, 0.4, 0.8, 1.6, 3.2, 6.4])
in_well = [
    pair(
        adjsim.Pathwise()(
            well(1.0, t, 0.05), square, replicas=REPLICAS, generator=seeded(300 + i)
        ),
        "potential.k",
    )
    for i, t in enumerate(lengths.tolist())
]
times, across = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), {}
for j, estimator in enumerate((adjsim.Pathwise(), adjsim.Girsanov())):
    across[label(estimator)] = [
        estimator(
            double_well(t), last, replicas=REPLICAS, generator=seeded(400 + 10 * i + j)
        )
        for i, t in enumerate(times.tolist())
    ]
average = adjsim.TimeAverage(position, burn_in=40.0)
score = adjsim.ScoreFunction()(
    double_well(80.0), average, replicas=4096, chunks=8, generator=seeded(500)
)
middle, stderr = pair(score, "potential.asymmetry")
print(score)
print(f"by quadrature {exact_stationary(0.0):.4f}")
assert abs(middle - exact_stationary(0.0)) < 4 * stderr

fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), layout="constrained")
grad, error = np.array(in_well).T
fine = 0.05 * np.arange(1, 131)
left.axhline(-KT, color="k", lw=1, ls="--", label="stationary, exact")
left.plot(fine, [exact_path(t, 0.05) for t in fine], color="0.6", label="path, exact")
left.errorbar(
    lengths,
    grad,
    2 * error,
    fmt="o",
    ms=4,
    capsize=3,
    color=COLORS["Pathwise"],
    label="Pathwise",
)
left.set(
    xlabel="length of the run (reduced units)",
    ylabel="gradient of <x²> with respect to k\n(reduced units)",
    title="one well",
)
left.legend(title="bars: two standard errors")
for name, shift in (("Pathwise", 0.95), ("Girsanov", 1.05)):
    rows = np.array(
        [pair(estimate, "potential.asymmetry") for estimate in across[name]]
    )
    right.errorbar(
        times * shift,
        rows[:, 0],
        2 * rows[:, 1],
        fmt="o",
        ms=4,
        capsize=3,
        color=COLORS[name],
        label=name,
    )
right.axhline(
    exact_stationary(0.0), color="k", lw=1, ls="--", label="stationary, exact"
)
color = COLORS["ScoreFunction"]
right.errorbar(
    [1.5 * times[-1]],
    middle,
    2 * stderr,
    fmt="o",
    ms=4,
    capsize=3,
    color=color,
    label="ScoreFunction",
)
right.set(
    xlabel="length of the run (reduced units)",
    ylabel="gradient of <x> with respect to b\n(reduced units)",
    title="two wells",
    xscale="log",
    ylim=(-3.4, 0.6),
)
right.set_xticks(times, [f"{t:g}" for t in times])
right.minorticks_off()
right.legend(loc="lower left")
plt.show()

# %%
# Bars are two standard errors. The mark of ScoreFunction is at the right edge, since a
# stationary gradient does not depend on the length of a run. In one well the pathwise
# gradient agrees with the exact path gradient at every length, and approaches the
# stationary one after a few relaxation times. In two wells this approach needs
# crossings of the barrier, and neighbouring paths with the same noise diverge at each
# crossing. As an answer to the stationary question, the pathwise gradient therefore has
# a bias that falls with the length of the run and a spread that grows with it. No
# length makes both small. The next figure shows the standard errors, including those
# whose bars leave the frame here.

truth = np.array([exact_path(t, 0.05) for t in lengths])
assert (np.abs(grad - truth) < 4 * error).all()
assert abs(grad[0] + KT) > 10 * error[0]
assert abs(grad[-1] + KT) < 4 * error[-1]
first, first_error = pair(across["Pathwise"][0], "potential.asymmetry")
assert abs(first - exact_stationary(0.0)) > 10 * first_error
for one, two in zip(*across.values(), strict=True):
    a, b = pair(one, "potential.asymmetry"), pair(two, "potential.asymmetry")
    assert abs(a[0] - b[0]) < 4 * np.hypot(a[1], b[1])

# %%
# The error of a path score
# -------------------------
#
# :class:`~adjsim.Girsanov` propagates no tangents. Its error is the spread of the score
# S, whose variance grows in proportion to the length T of the run. Here the force F has
# :math:`\partial F/\partial b = -1` everywhere, so S is Gaussian with variance
# :math:`T/(2\gamma\,m\,kT)`. If the paths are reweighted for a change :math:`\delta` of
# b, their effective share (the effective sample size over their number) is
# :math:`e^{-\delta^2\operatorname{var}S}`. ``diagnostics["ess"]`` is the effective
# sample size for a change of the parameter by a tenth of its value, or by 0.1 if its
# value is zero, as here.

spread = {
    name: np.array([pair(e, "potential.asymmetry")[1] for e in rows])
    for name, rows in across.items()
}
share = (
    np.array([estimate.diagnostics["ess"] for estimate in across["Girsanov"]])
    / REPLICAS
)
late = times >= 4
slope, offset = np.polyfit(np.log(times[late]), np.log(spread["Girsanov"][late]), 1)
chunks = across["Girsanov"][0].diagnostics["chunks"]
x = np.log(times[late])
uncertain = np.sqrt(1 / (2 * (chunks - 1)) / ((x - x.mean()) ** 2).sum())
for name, errors in spread.items():
    print(name, "standard errors", ", ".join(f"{error:.2g}" for error in errors))
print(
    f"Girsanov: as T^({slope:.2f} +- {uncertain:.2f}); share of the paths left",
    np.round(share, 3),
)

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
left.loglog(times, spread["Pathwise"], "o-", color=COLORS["Pathwise"], label="Pathwise")
left.loglog(times, spread["Girsanov"], "o", color=COLORS["Girsanov"], label="Girsanov")
power = f"slope {slope:.2f} ± {uncertain:.2f}"
left.loglog(
    times[late],
    np.exp(offset) * times[late] ** slope,
    "-",
    lw=1,
    color=COLORS["Girsanov"],
    label=power,
)
left.set(
    xlabel="length of the run (reduced units)",
    ylabel="standard error of the gradient\n(reduced units)",
)
left.legend()
right.plot(times, share, "o", color=COLORS["Girsanov"], label="Girsanov")
fine = np.linspace(0, times[-1], 50)
right.plot(
    fine,
    np.exp(-(0.1**2) * fine / (2 * 0.5)),
    "k-",
    lw=1,
    label="exact, in the limit of short steps",
)
right.set(
    xlabel="length of the run (reduced units)",
    ylabel="effective share of the paths",
    ylim=(0.6, 1.02),
)
right.legend()
left.set_xticks(times, [f"{t:g}" for t in times])
left.minorticks_off()
plt.show()

assert abs(slope - 0.5) < 4 * uncertain
assert (np.diff(share) < 0).all()
assert spread["Pathwise"][0] < 0.5 * spread["Girsanov"][0]
assert spread["Pathwise"][-1] > 5 * spread["Girsanov"][-1]
