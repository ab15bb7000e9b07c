r"""
Lorenz: derivatives of a chaotic average
========================================

The equations of Lorenz (1963) are chaotic: nearby paths part as :math:`e^{0.906 t}`.
Their long-time averages are smooth functions of the parameters all the same. This page
asks for the derivative of the mean of z with respect to each parameter, and compares
four answers: the gradient of a path, differences of long averages, shadowing, and the
ensemble of short runs. Lyapunov exponents and covariant vectors show what separates
them.

The long measurements come from two studies that take some minutes,
``make_lorenz.py`` and ``make_lorenz_shadowing.py`` in ``examples/data``. This page
draws their stored output and computes a part of it again.
"""

# sphinx_gallery_thumbnail_number = 1

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import adjsim
from adjsim.dynamics.fields.ode import ODE
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # three numbers are too few to share between threads

DATA = Path(adjsim.__file__).parents[1] / "examples/data"
study, shadowing = (
    json.loads((DATA / name).read_text())
    for name in ("lorenz.json", "lorenz_shadowing.json")
)
SETTINGS, POINT = study["settings"], study["point"]
for made in (study, shadowing):
    print(f"{made['made_by']}, commit {made['commit'][:10]}")
    print(", ".join(f"{key} {value:g}" for key, value in made["settings"].items()))


class Lorenz(nn.Module):
    """dx/dt = sigma (v - x), dv/dt = x (rho - z) - v, dz/dt = x v - beta z."""

    def __init__(self):
        super().__init__()
        for name, value in POINT.items():
            setattr(self, name, nn.Parameter(torch.tensor(value)))

    def forward(self, t, y):
        x, v, z = y.unbind(-1)
        return torch.stack(
            [self.sigma * (v - x), x * (self.rho - z) - v, x * v - self.beta * z], -1
        )


def height(state):
    return state.y[..., 2]


dynamics = ODE(Lorenz())
solver = RungeKutta("rk4", SETTINGS["dt"])
generator = torch.Generator().manual_seed(1)
near = torch.tensor([0.0, 0.0, 25.0]) + 5 * torch.randn(32, 3, generator=generator)
with torch.no_grad():
    run = adjsim.simulate(
        dynamics, dynamics.init(near), np.linspace(0, 20, 1001), solver=solver
    )
starts, paths = run.final, run.y[250:, :3]

# %%
# Exponents and directions
# ------------------------
#
# :func:`~adjsim.lyapunov_spectrum` pushes tangent vectors through
# the steps of a run. Its covariant vectors are directions that the flow maps to each
# other: one grows, one neither grows nor shrinks, one shrinks. Each is a property of
# the point where it is measured, and not of an inner product.

spectrum = adjsim.lyapunov_spectrum(
    dynamics,
    starts,
    np.linspace(0, 7, 71),
    solver=solver,
    burn_in=2.5,
    vectors=True,
)
print(spectrum)
exponents, stderr = (
    np.array(study["spectrum"][key]) for key in ("exponents", "stderr")
)
print(f"the study: {exponents.round(4)} +- {stderr.round(4)}")
divergence = -(POINT["sigma"] + 1 + POINT["beta"])
print(f"sum of the exponents {exponents.sum():.4f}, of the equations {divergence:.4f}")
assert abs(exponents.sum() - divergence) < 2e-3
assert (np.abs(exponents - [0.9056, 0.0, -14.5723]) < 4 * stderr).all()
mean, error = spectrum.mean
assert (np.abs(mean.numpy() - exponents) < 5 * np.hypot(error.numpy(), stderr)).all()

vectors, flow = spectrum.vectors, dynamics.drift(0.0, spectrum.states).y.detach()
neutral = (vectors[..., 1] * flow).sum(-1).abs() / flow.norm(dim=-1)
print(f"cosine of the neutral vector and the flow: median {neutral.median():.6f}")
assert neutral.median() > 0.9999


def angles(i, j):
    """Return the angles between two covariant vectors, in degrees."""
    cosine = (vectors[..., i] * vectors[..., j]).sum(-1).abs().clamp(max=1)
    return torch.rad2deg(torch.arccos(cosine)).flatten().numpy()


fig, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
axes[0].plot(paths[..., 0], paths[..., 2], lw=0.3, color="0.6")
here = spectrum.states.y[0, :16].numpy()
NAMES = ("growing", "neutral", "shrinking")
for i, name in enumerate(NAMES):
    arrow = vectors[0, :16, :, i].numpy()
    axes[0].quiver(
        *here[:, [0, 2]].T,
        *arrow[:, [0, 2]].T,
        color=f"C{i}",
        label=name,
        angles="xy",
        scale=8,
        width=0.007,
        pivot="mid",
        headwidth=0,
        headlength=0,
        headaxislength=0,
        zorder=3,
    )
axes[0].set(xlabel="x", ylabel="z", title="covariant vectors")
axes[0].legend(fontsize="small", loc="upper left")
for i, j, color in ((0, 1, "C3"), (0, 2, "C4"), (1, 2, "C5")):
    axes[1].hist(
        angles(i, j),
        bins=np.linspace(0, 90, 46),
        histtype="step",
        color=color,
        label=f"{NAMES[i]}, {NAMES[j]}",
    )
axes[1].set(xlabel="angle (degrees)", ylabel="count", title="angles between them")
axes[1].legend(fontsize="small")
plt.show()

smallest = {(i, j): angles(i, j).min() for i, j in ((0, 1), (0, 2), (1, 2))}
print(", ".join(f"{NAMES[i]}, {NAMES[j]}: {a:.2g}" for (i, j), a in smallest.items()))
assert min(smallest[0, 2], smallest[1, 2]) > 5 > smallest[0, 1]

# %%
# The shrinking direction keeps away from the other two, while the growing and the
# neutral one come as close as a degree or so.
#
# The neutral vector is the direction of the flow: a shift along it is a shift of time,
# which no average feels. Shadowing has to remove it. The growing direction is what
# makes gradients of paths explode, and shadowing cancels it.
#
# The gradient of a path
# ----------------------
#
# :class:`~adjsim.Pathwise` answers how the mean along a path changes if its start is
# held fixed. The answer is exact, and grows with the largest exponent.


def simulation(duration):
    return adjsim.Simulation(
        dynamics,
        lambda count, generator: type(starts)(starts.y[:count]),
        [0.0, duration],
        solver,
    )


sizes = {}
for duration in (1.0, 3.0, 5.0):
    estimate = adjsim.Pathwise()(
        simulation(duration), adjsim.TimeAverage(height), replicas=16, chunks=3
    )
    slope, error = (
        part["fun.rho"].item() for part in (estimate.grad, estimate.grad_stderr)
    )
    sizes[duration] = error
    print(f"a path of {duration:g}: d<z>/d rho = {slope:.3g} +- {error:.2g}")
print(estimate.warnings[-1])
assert sizes[5.0] > 2 * sizes[1.0]

# %%
# Long averages
# -------------
#
# The mean of z, over millions of units of time, is known to about 0.0003, and
# differences give its slopes. The mean is not straight in sigma, so its slope depends
# on the step; the smallest step is used, whose error is the largest, since the two
# means are independent.

truth = {}
for name, steps in study["differences"].items():
    for h, (slope, error) in steps.items():
        print(f"d<z>/d{name}, step {h}: {slope:.4f} +- {error:.4f}")
    truth[name] = steps[min(steps, key=float)]
assert abs(truth["rho"][0] - 1.0) < 0.01

growth, short = study["growth"], study["ensemble"]
fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
times, quantiles = np.array(growth["times"]), np.array(growth["average"])
axes[0].fill_between(times, quantiles[0], quantiles[2], alpha=0.3, lw=0)
axes[0].semilogy(times, quantiles[1], label="gradient of the mean of a path (median)")
guide = np.exp(exponents[0] * (times - times[-1])) * times[-1] / times
guide *= quantiles[1, -1]
axes[0].semilogy(
    times[10:],
    guide[10:],
    "k--",
    lw=1,
    label=rf"$\propto e^{{{exponents[0]:.3f} t}}/t$",
)
axes[0].axhline(truth["rho"][0], color="C2", label="derivative of the long average")
axes[0].set(xlabel="length of the path", ylabel=r"|d<z>/d$\rho$|", title="one path")
axes[0].legend(fontsize="small")
times = np.array(short["times"])
mean, error = np.array(short["mean"]), np.array(short["stderr"])
axes[1].fill_between(times, mean - 2 * error, mean + 2 * error, alpha=0.3, lw=0)
axes[1].plot(times, mean, label=f"mean of {SETTINGS['ensemble']:,} paths, 95 %")
axes[1].axhline(truth["rho"][0], color="C2", label="derivative of the long average")
axes[1].set(
    xlabel="length of the paths",
    ylabel=r"d<z>/d$\rho$",
    ylim=(-1, 3),
    title="the ensemble of short runs",
)
axes[1].legend(fontsize="small")
plt.show()

rate, error = growth["rate"]
print(f"gradients of paths grow at the rate {rate:.3f} +- {error:.3f}")
assert abs(rate - exponents[0]) < 0.05

# %%
# Gradients of paths grow at the rate of the first exponent. After 20 units of time they
# are ten thousand times too large, and their sign is random. A longer run does not
# help.
#
# The ensemble
# ------------
#
# The mean over many starts does converge: the derivative of the mean of z a time t
# after a change of rho tends to that of the long average (Eyink, Haine and Lea 2004).
# It has to be read where the response is complete and the error still small. The error
# grows as fast as a path's gradient, and the distribution has so heavy a tail that the
# error bars themselves jump. Here the response still swings about its limit when the
# error takes over, so no length gives more than a digit.

for length in (0.5, 1.0, 2.0):
    k = round(length / SETTINGS["short_every"]) - 1
    print(f"paths of {length:g}: {short['mean'][k]:.3f} +- {short['stderr'][k]:.3f}")
assert min(short["stderr"][round(1.2 / SETTINGS["short_every"]) :]) > 0.1

# %%
# Shadowing
# ---------
#
# A path with another rho leaves the old one, but some path with this rho stays near the
# old one for all times: its shadow. The growing direction is what tells the two apart,
# and :class:`~adjsim.Shadowing` computes the derivative along the
# shadow, for all parameters at once, from a single sweep.

estimate = adjsim.Shadowing(2, 1.0)(
    simulation(8.0), adjsim.TimeAverage(height), replicas=16, generator=2
)
print(estimate)

gaps = {}
for name in POINT:
    (shadow, error), (right, own) = shadowing["gradient"][name], truth[name]
    gaps[name] = (shadow - right) / np.hypot(error, own)
    print(
        f"d<z>/d{name}: differences {right:.4f} +- {own:.4f}, shadowing {shadow:.4f} "
        f"+- {error:.4f}: {100 * (shadow / right - 1):+.1f} %, {gaps[name]:+.1f} errors"
    )
    live, spread = (
        part[f"fun.{name}"].item() for part in (estimate.grad, estimate.grad_stderr)
    )
    assert abs(live - shadow) < 5 * np.hypot(spread, error)

fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
points = [
    (row["at"]["sigma"], *row["mean"])
    for row in study["averages"]
    if row["at"] == {**POINT, "sigma": row["at"]["sigma"]}
]
sigma, means, errors = np.array(sorted(points)).T
axes[0].errorbar(sigma, means, errors, fmt="ko", ms=4, label="long averages")
centre, line = means[sigma == POINT["sigma"]][0], np.linspace(sigma[0], sigma[-1], 2)
for label, slope, style in (
    ("differences", truth["sigma"][0], "C2-"),
    ("shadowing", shadowing["gradient"]["sigma"][0], "C0--"),
):
    axes[0].plot(line, centre + slope * (line - POINT["sigma"]), style, label=label)
axes[0].set(xlabel=r"$\sigma$", ylabel="<z>", title="the mean and two slopes")
axes[0].legend(fontsize="small")
for column, label, style in ((0, "differences", "C2o"), (1, "shadowing", "C0s")):
    rows = [(truth[name], shadowing["gradient"][name])[column] for name in POINT]
    scale = np.array([truth[name][0] for name in POINT])
    axes[1].errorbar(
        np.arange(3) + 0.2 * column - 0.1,
        [row[0] for row in rows] / scale,
        [row[1] for row in rows] / abs(scale),
        fmt=style,
        label=label,
    )
axes[1].set_xticks(range(3), [rf"$\{name}$" for name in POINT])
axes[1].set(ylabel="slope / slope of differences", xlim=(-0.5, 2.5))
axes[1].legend(fontsize="small")
plt.show()

assert abs(shadowing["gradient"]["rho"][0] / truth["rho"][0] - 1) < 0.03
assert shadowing["gradient"]["sigma"][0] < truth["sigma"][0] - 4 * truth["sigma"][1]

# %%
# For rho and beta shadowing is right to two per cent, and for sigma it is nearly a
# tenth too small. These are not errors of sampling, which are much smaller. A
# shadow is one special path, and nothing says that averages along it are those of
# typical paths; this is known as the bias of shadowing. The error bar does not contain
# it.
#
# Advice
# ------
#
# * Measure the exponents first. A gradient of a path is useful for a few times
#   1/lambda, here for about 3 units of time.
# * For few parameters use differences of long averages, with steps so large that the
#   change exceeds the error. They have no bias but that of the step.
# * For many parameters use shadowing, with one more direction than there are growing
#   ones. Read the result as a direction for an optimiser, and check the end of the
#   optimisation by long averages.
# * An ensemble of short runs needs a response that is faster than 1/lambda, and a
#   number of runs that grows as exp(2 lambda t).
# * With noise in the equations, :class:`~adjsim.Girsanov` needs no shadow and has no
#   bias, but a variance that grows with time (:doc:`/choosing_an_estimator`).
