"""
Barrier crossing in a double well
=================================

A particle starts in the left well of :math:`U = b\\,(q^2 - 1)^2`, and noise carries it
over the barrier, whose height is :math:`b`. This example answers three questions. How
long does the crossing take? For overdamped dynamics the exact answer is known and
checks the simulation. How does the share of particles that have crossed change with the
barrier, the friction and the temperature? The answer is a gradient, computed by
differentiating the noisy paths. And how far back can a path with friction be reversed?

Lengths are in units of the distance of a well from the barrier, and masses in units of
the particle's mass. A friction of 1 sets the unit of time.
"""

# sphinx_gallery_thumbnail_number = 1

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # one particle is too little to share between threads

BARRIER = 1.0


def parameter(value):
    return nn.Parameter(torch.tensor(value))


# %%
# The time to cross
# -----------------
#
# For the overdamped equation with unit friction the mean time from -1 to a point
# :math:`e` is a double integral,
#
# .. math:: \tau = \frac1{kT}\int_{-1}^{e}\mathrm
#    dy\;e^{U(y)/kT}\int_{-\infty}^{y}\mathrm dx\;e^{-U(x)/kT} .
#
# Euler-Maruyama sees the path at its steps only and misses excursions beyond the target
# between two steps. On average this has the effect of a target that is 0.5826 standard
# deviations of a step's noise further out (Broadie, Glasserman and Kou, Math. Finance
# 7, 325 (1997)). So the exact time is computed for the shifted target. Paths are run in
# blocks of steps, and paths that have arrived are dropped after each block.

DT, REPLICAS, BLOCK = 0.01, 4096, 500


def exact_time(kT, end):
    y = np.linspace(-2.5, end, 20001)
    energy = BARRIER * (y**2 - 1) ** 2
    weight = np.exp(-energy / kT)
    below = np.concatenate([[0], np.cumsum((weight[1:] + weight[:-1]) / 2)]) * (
        y[1] - y[0]
    )
    inside = y >= -1
    return np.trapezoid(np.exp(energy[inside] / kT) * below[inside], y[inside]) / kT


def crossing_times(kT, generator):
    """Return the first time at which each path from -1 is at or beyond 1."""
    dynamics = adjsim.OverdampedLangevin(adjsim.DoubleWell(BARRIER), kT=kT)
    position, elapsed, found = -torch.ones(REPLICAS, 1, 1), 0.0, []
    while len(position) > 0:
        run = adjsim.simulate(
            dynamics,
            dynamics.init(position),
            torch.arange(BLOCK + 1) * DT,
            solver=adjsim.EulerMaruyama(DT),
            generator=generator,
        )
        beyond = run.position[1:, :, 0, 0] >= 1
        arrived = beyond.any(0)
        found.append(elapsed + DT * (1 + beyond.double().argmax(0)[arrived]))
        position, elapsed = run.final.position[~arrived], elapsed + BLOCK * DT
    return torch.cat(found)


temperatures = np.array([0.3, 0.4, 0.6, 1.0])
generator = torch.Generator().manual_seed(1)
measured, errors, expected = [], [], []
for kT in temperatures:
    times = crossing_times(kT, generator)
    measured.append(times.mean().item())
    errors.append(times.std().item() / REPLICAS**0.5)
    expected.append(exact_time(kT, 1 + 0.5826 * np.sqrt(2 * kT * DT)))
    print(
        f"kT = {kT:g}: {measured[-1]:.3f} +- {errors[-1]:.3f}, exact {expected[-1]:.3f}"
    )

grid = np.linspace(0.27, 1.2, 60)
fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
ax.semilogy(1 / grid, [exact_time(kT, 1.0) for kT in grid], label="exact integral")
ax.semilogy(
    1 / grid,
    np.pi / (2 * np.sqrt(2) * BARRIER) * np.exp(BARRIER / grid),
    "--",
    label="Kramers' formula",
)
ax.errorbar(
    1 / temperatures,
    measured,
    3 * np.array(errors),
    fmt="ko",
    ms=4,
    capsize=3,
    label="simulated, 3 standard errors",
)
ax.set(
    xlabel="barrier / kT",
    ylabel="mean time from one well\nto the other (reduced units)",
)
ax.set_yticks([3, 5, 10, 20, 30, 50], ["3", "5", "10", "20", "30", "50"])
ax.minorticks_off()
ax.legend()
plt.show()

# %%
# Kramers' formula, :math:`2\pi\,e^{b/kT}/\sqrt{U''(-1)\,|U''(0)|}`, holds in the limit
# of a high barrier. The simulation holds for any barrier.

off = (np.array(measured) - expected) / errors
print("standard errors off:", np.round(off, 2))
assert np.abs(off).max() < 4

# %%
# The gradient of having crossed
# ------------------------------
#
# A step function has no useful derivative along a path. So the observable is smooth:
# the mean of a sigmoid of the position after a time T. The particle has inertia here,
# is integrated by BAOAB, and starts with thermal momenta. :class:`~adjsim.Pathwise`
# averages the gradient over replicas. :class:`~adjsim.ReversibleAdjoint` reverses each
# path and draws its noise again.

kT, FRICTION, TIME, DT = 0.6, 1.0, 2.0, 0.05
crossed = adjsim.Final(lambda state: torch.sigmoid(6 * state.position[:, 0, 0]))


def simulation(solver, time=TIME, **values):
    values = {"potential.barrier": BARRIER, "kT": kT, "friction": FRICTION, **values}
    potential = adjsim.DoubleWell(parameter(values["potential.barrier"]))
    dynamics = adjsim.Langevin(
        potential, kT=parameter(values["kT"]), friction=parameter(values["friction"])
    )
    # The starts are drawn at a constant kT, not at the parameter kT. Every estimator
    # holds the starts fixed, so the finite differences below must hold them fixed too.
    thermal = adjsim.Langevin(potential, kT=kT)

    def initial(replicas, generator):
        return thermal.init(-torch.ones(replicas, 1, 1), generator=generator)

    return adjsim.Simulation(dynamics, initial, [0.0, time], solver)


def estimate(solver, adjoint, seed, time=TIME):
    pathwise = adjsim.Pathwise(adjoint)
    generator = torch.Generator().manual_seed(seed)
    return pathwise(
        simulation(solver, time),
        crossed,
        replicas=16384,
        generator=generator,
    )


def value(name, at):
    """Return the mean observable on the noise of seed 2, with one parameter changed.

    The noise depends on the seed alone.
    """
    generator = torch.Generator().manual_seed(2)
    run = simulation(adjsim.BAOAB(DT), **{name: at})
    return adjsim.Pathwise()(
        run, crossed, replicas=16384, generator=generator
    ).value.item()


splitting = estimate(adjsim.BAOAB(DT), adjsim.ReversibleAdjoint(), seed=2)
# Other noise, another solver, another adjoint.
equation = estimate(adjsim.SDESolver(dt=DT), adjsim.DirectAdjoint(), seed=3)
names, h = {"potential.barrier": BARRIER, "friction": FRICTION, "kT": kT}, 1e-5
differences = {
    name: (value(name, at + h) - value(name, at - h)) / (2 * h)
    for name, at in names.items()
}
print(splitting)
print(
    "central differences on the same noise:",
    {name: round(found, 6) for name, found in differences.items()},
)
print(equation)

fig, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for shift, label, found in (
    (-0.12, "BAOAB, reversible adjoint", splitting),
    (0.12, "SDE midpoint, direct", equation),
):
    heights = [found.grad[name].item() for name in names]
    bars = [2 * found.grad_stderr[name].item() for name in names]
    ax.errorbar(
        np.arange(3) + shift,
        heights,
        bars,
        fmt="o",
        capsize=4,
        label=f"{label}, 2 standard errors",
    )
ax.plot(
    np.arange(3) - 0.12,
    list(differences.values()),
    "kx",
    ms=9,
    label="central difference, noise of BAOAB's run",
)
ax.axhline(0, color="0.7", lw=1, zorder=0)
ax.set_xticks(range(3), ["barrier", "friction", "kT"])
ax.set(
    xlim=(-0.5, 2.5),
    ylabel=f"derivative of the share crossed\nat T = {TIME:g} (reduced units)",
)
ax.legend()
plt.show()

# %%
# On the same noise the adjoint and the difference quotient give the same derivative. On
# other noise the two solvers agree within their errors. A higher barrier keeps the
# particle in its well, and a higher temperature frees it.

for name in names:
    gradient, stderr = splitting.grad[name].item(), splitting.grad_stderr[name].item()
    other, other_stderr = equation.grad[name].item(), equation.grad_stderr[name].item()
    assert abs(gradient - differences[name]) < 1e-6
    assert abs(gradient - other) < 4 * np.hypot(stderr, other_stderr)
assert (
    splitting.grad["potential.barrier"]
    < -10 * splitting.grad_stderr["potential.barrier"]
)
assert splitting.grad["kT"] > 10 * splitting.grad_stderr["kT"]

# %%
# Nearby paths separate at the top of the barrier. So the gradients of single paths grow
# with the length of the run, while their mean does not. The standard error of the mean
# grows with the gradients of single paths. For much longer runs, ask instead how the
# equilibrium mean changes (the stationary question in :doc:`/choosing_an_adjoint`).

lengths = [1.0, 2.0, 4.0, 6.0]
longer = [
    estimate(adjsim.BAOAB(DT), adjsim.ReversibleAdjoint(), seed=4, time=time)
    for time in lengths
]
bars = {name: [found.grad_stderr[name].item() for found in longer] for name in names}
for name in names:
    print(name, "standard errors", ", ".join(f"{bar:.1e}" for bar in bars[name]))
    assert bars[name][-1] > 10 * bars[name][0]

# %%
# Reversal under friction
# -----------------------
#
# Backward in time, friction acts as antifriction. Without checkpoints, the reversal of
# a path amplifies rounding errors of 1e-16 by :math:`e^{\gamma t}`, where
# :math:`\gamma` is the friction. By default the reversible adjoint stores checkpoints,
# which keep the error under the tolerance of the adjoint at any length. The error of
# the continuous adjoint of the SDE starts from the discretisation error of the solver
# instead of from rounding, so this error has much less room to grow. The continuous
# adjoint is refused beyond :math:`\gamma T = 5` between save times.

DT = 1 / 64
products = np.array([1, 2, 3, 4, 5, 8, 16, 32])


def traced(product, solver, adjoint):
    potential = adjsim.DoubleWell(parameter(BARRIER))
    dynamics = adjsim.Langevin(
        potential, kT=parameter(kT), friction=parameter(FRICTION)
    )
    start = dynamics.init(-torch.ones(64, 1, 1), torch.zeros(64, 1, 1))
    generator = torch.Generator().manual_seed(5)
    run = adjsim.simulate(
        dynamics,
        start,
        [0.0, product / FRICTION],
        solver=solver,
        adjoint=adjoint,
        generator=generator,
    )
    found = torch.autograd.grad(
        (run.final.position**2).mean(), list(dynamics.parameters())
    )
    return torch.stack(found), run.stats


unchecked = adjsim.ReversibleAdjoint(checkpoint_every=10**9, tol=float("inf"))
plain = [
    traced(p, adjsim.BAOAB(DT), unchecked)[1]["reconstruction_error"] for p in products
]
default = [traced(p, adjsim.BAOAB(DT), adjsim.ReversibleAdjoint())[1] for p in products]
kept = [stats["reconstruction_error"] for stats in default]

allowed = products[products <= 5]
swept = [
    traced(p, adjsim.SDESolver(dt=DT), adjsim.BacksolveAdjoint())[0] for p in allowed
]
direct = [
    traced(p, adjsim.SDESolver(dt=DT), adjsim.DirectAdjoint())[0] for p in allowed
]
solved = [
    ((a - b).norm() / b.norm()).item() for a, b in zip(swept, direct, strict=True)
]
try:
    traced(6, adjsim.SDESolver(dt=DT), adjsim.BacksolveAdjoint())
except adjsim.InstabilityError as error:
    print(error)
else:
    raise AssertionError("friction x time = 6 should have been refused")

fig, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
ax.semilogy(products, plain, "o-", label="reversed BAOAB, no checkpoints: state")
ax.semilogy(
    products,
    kept,
    "s-",
    label="reversed BAOAB, a checkpoint every "
    f"{default[0]['checkpoint_every']} steps: state",
)
ax.semilogy(allowed, solved, "^-", label="continuous adjoint of the SDE: gradient")
ax.semilogy(
    products,
    plain[0] * np.exp(products - products[0]),
    "k:",
    lw=1,
    label=r"$e^{\gamma T}$",
)
ax.axhline(1e-6, color="0.7", lw=1, zorder=0)
ax.text(33, 1.3e-6, "tol", color="0.4", ha="right", va="bottom")
ax.set(xlabel="friction x time", ylabel="relative error", ylim=(1e-17, 10))
ax.legend(fontsize="small")
plt.show()

slope = np.polyfit(products[1:], np.log(plain[1:]), 1)[0]
print(f"without checkpoints the error grows as exp({slope:.2f} friction T)")
assert 0.7 < slope < 1.3
assert max(kept) < 1e-6

# %%
# The limit of five is not a guarantee. Some of these 64 paths stay at the barrier, and
# the instability of the barrier adds to the instability under friction. At the limit
# the first digit of the continuous gradient is wrong. Save more often, or use the
# splitting (BAOAB).

print("continuous adjoint off by", ", ".join(f"{error:.1e}" for error in solved))
assert max(solved[:4]) < 0.01 < 0.05 < solved[4]
