"""
Potentials and integrators
==========================

This example shows the systems that the library simulates, and the accuracy of its
integrators. It draws the potentials, checks the order of velocity Verlet, and compares
two deterministic samplers with exact averages. Then it runs all dynamics of the library
in the same potential and compares each with the exact density. All quantities are in
reduced units.
"""

# sphinx_gallery_thumbnail_number = 1

import matplotlib.pyplot as plt
import numpy as np
import torch

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

# %%
# Potentials
# ----------
#
# A potential maps positions of shape ``(*batch, atoms, dim)`` to energies of shape
# ``(*batch,)``. So one call evaluates a curve or a surface, with its points as the
# batch.

fig, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")

x = torch.linspace(-1.6, 1.6, 200)
axes[0].plot(x, adjsim.DoubleWell(barrier=1.0)(x[:, None, None]), label="DoubleWell(1)")
axes[0].plot(
    x,
    adjsim.AsymmetricDoubleWell(1.0, 0.3)(x[:, None, None]),
    "--",
    label="AsymmetricDoubleWell(1, 0.3)",
)
axes[0].set(
    xlabel="q (reduced units)",
    ylabel="U (reduced units)",
    title="double wells",
    ylim=(-0.6, 3.2),
)
axes[0].legend(fontsize="small", loc="upper center")

r = torch.linspace(0.95, 3.0, 200)
pair = torch.zeros(200, 2, 3)
pair[:, 1, 0] = r
axes[1].plot(r, adjsim.LennardJones()(pair), label="all pairs")
axes[1].plot(r, adjsim.LennardJones(cutoff=1.8)(pair), "--", label="cutoff = 1.8 sigma")
axes[1].axhline(0, color="0.8", lw=1, zorder=0)
axes[1].set(
    xlabel="r / sigma",
    ylabel="U / epsilon",
    title="Lennard-Jones, one pair",
    ylim=(-1.1, 1.2),
)
axes[1].legend(fontsize="small")

gx, gy = torch.meshgrid(
    torch.linspace(-1.5, 1.2, 150), torch.linspace(-0.3, 2.0, 150), indexing="xy"
)
surface = adjsim.MullerBrown()(torch.stack([gx, gy], -1)[..., None, :])
lines = axes[2].contourf(
    gx, gy, surface.clamp(max=120), levels=np.arange(-150, 121, 15), cmap="viridis"
)
fig.colorbar(lines, ax=axes[2], label="U (units of the surface, cut at 120)")
axes[2].set(
    xlabel="x (units of the surface)",
    ylabel="y (units of the surface)",
    title="Muller-Brown",
)
plt.show()

# %%
# Energy error of velocity Verlet
# -------------------------------
#
# Velocity Verlet is symplectic and of second order. Its energy does not drift but
# oscillates about a constant, and the amplitude falls with the square of the step. A
# particle in the double well shows this.

dynamics = adjsim.Hamiltonian(adjsim.DoubleWell())
start = dynamics.init(torch.tensor([[1.5]]), torch.tensor([[0.0]]))
steps = [0.08, 0.04, 0.02, 0.01, 0.005]
swings = []
with torch.no_grad():
    for dt in steps:
        run = adjsim.simulate(
            dynamics,
            start,
            torch.arange(round(8 / dt) + 1) * dt,
            solver=adjsim.VelocityVerlet(dt),
            record=dynamics.invariant,
        )
        swings.append(float((run.record - run.record[0]).abs().max()))
slope, offset = np.polyfit(np.log(steps), np.log(swings), 1)
print(f"the energy error falls as dt to the power {slope:.3f}")
# The next term of the error is smaller than the first by a factor of about dt^2, here
# less than a hundredth. It moves the fitted slope by less than that.
assert abs(slope - 2) < 0.03

fig, ax = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
ax.loglog(steps, swings, "o", label="largest energy error")
ax.loglog(
    steps,
    np.exp(offset) * np.array(steps) ** slope,
    "-",
    color="0.6",
    label=f"fit, slope {slope:.2f}",
    zorder=0,
)
ax.set(
    xlabel="dt (reduced units)",
    ylabel="max |E(t) - E(0)| (reduced units)",
    title="velocity Verlet, double well",
)
ax.set_xticks(steps, [f"{dt:g}" for dt in steps])
ax.set_xticks([], minor=True)
ax.legend()
plt.show()

# %%
# The phase portrait has closed orbits. Orbits below the barrier stay inside one well,
# and orbits above the barrier go around both wells. One call runs all orbits, as a
# batch of replicas.

position = torch.tensor([1.05, 1.15, 1.25, 1.35, 1.4, 1.43, 1.5, 1.58])
position = torch.cat([position, -position[position < 2**0.5]])[:, None, None]
orbits = dynamics.init(position, torch.zeros_like(position))
with torch.no_grad():
    run = adjsim.simulate(
        dynamics, orbits, torch.arange(801) * 0.01, solver=adjsim.VelocityVerlet(0.01)
    )
energy = dynamics.invariant(orbits)

fig, ax = plt.subplots(figsize=(5.5, 4), layout="constrained")
for k in range(len(position)):
    colour = "C0" if energy[k] < 1 else "C3"
    ax.plot(run.position[:, k, 0, 0], run.momentum[:, k, 0, 0], color=colour, lw=1)
ax.plot([], [], color="C0", label="below the barrier")
ax.plot([], [], color="C3", label="above the barrier")
ax.set(
    xlabel="q (reduced units)",
    ylabel="p (reduced units)",
    title="orbits at dt = 0.01",
    ylim=(-2.4, 3.1),
)
ax.legend(loc="upper center", ncols=2)
plt.show()

crosses = (run.position[:, :, 0, 0].amin(0) < 0) & (
    run.position[:, :, 0, 0].amax(0) > 0
)
assert torch.equal(crosses, energy > 1)  # the barrier is 1

# %%
# A Nose-Hoover chain
# -------------------
#
# A harmonic oscillator with a chain of three thermostats samples the canonical
# distribution without noise. The position of the oscillator is Gaussian with variance
# kT/k.

k, kT, dt = 1.5, 0.8, 0.1
chain = adjsim.NoseHooverChain(adjsim.Harmonic(k), kT=kT, tau=1.0, length=3)
replicas = torch.zeros(200, 1, 1)
start = chain.init(replicas, generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    run = adjsim.simulate(
        chain,
        start,
        torch.arange(0, 1501) * dt,
        solver=adjsim.Splitting("NBABN", dt),
        record=lambda state: state.position[..., 0, 0],
    )
samples = run.record[200:]  # without the first 20 time units
variance = adjsim.mean_with_error(samples**2)
print(f"<q^2> = {variance.value:.4f} +- {variance.stderr:.4f}; exact {kT / k:.4f}")
# Four standard errors, and the step's own bias, which for this scheme is below (omega
# dt)^2 / 4.
assert abs(variance.value - kT / k) < 4 * variance.stderr + k * dt**2 / 4 * kT / k

# %%
# Energy-sampling dynamics
# ------------------------
#
# In scaled time, which is the length of the path, :class:`~adjsim.ESH` moves at unit
# rate along a direction. The force turns this direction. Frames are equally spaced in
# scaled time, not in physical time, so a plain average over them is not canonical. The
# average weighted by the speed is canonical, at kT = 1;
# :func:`~adjsim.dynamics.canonical_weights` returns these weights. Here one particle
# moves in a plane with four wells, at plus and minus one in each coordinate.

barrier, ds = 1.5, 0.1
esh = adjsim.ESH(adjsim.DoubleWell(barrier))
generator = torch.Generator().manual_seed(2)
start = esh.init(torch.randn(200, 1, 2, generator=generator), generator=generator)
with torch.no_grad():
    path = adjsim.simulate(
        esh, start, torch.arange(3001) * ds, solver=adjsim.Splitting("EAE", ds)
    )
weights = adjsim.dynamics.canonical_weights(path.log_speed)

grid = torch.linspace(-3, 3, 4001)
density = torch.exp(-adjsim.DoubleWell(barrier)(grid[:, None, None]))
density /= torch.trapezoid(density, grid)
exact = float(torch.trapezoid(density * grid**2, grid))

square = (path.position**2).mean((-1, -2))  # (time, replicas): the mean of x^2 and y^2
weighted = (weights * square).sum(0)
mean, stderr = float(weighted.mean()), float(weighted.std()) / len(weighted) ** 0.5
plain = adjsim.mean_with_error(square)
print(
    f"<x^2>: weighted {mean:.4f} +- {stderr:.4f}, not weighted {plain.value:.4f} +- "
    f"{plain.stderr:.4f}, exact {exact:.4f}"
)

fig, axes = plt.subplots(1, 3, figsize=(11.5, 3.5), layout="constrained")
axes[0].hist(
    samples.flatten().numpy(),
    bins=60,
    range=(-3, 3),
    density=True,
    color="C0",
    alpha=0.5,
    label="Nose-Hoover chain",
)
q = np.linspace(-3, 3, 300)
axes[0].plot(
    q,
    np.exp(-k * q**2 / (2 * kT)) * np.sqrt(k / (2 * np.pi * kT)),
    "k",
    lw=1.2,
    label="exact Gaussian",
)
axes[0].set(
    xlabel="q (reduced units)",
    ylabel="density",
    title="harmonic oscillator",
    ylim=(0, 0.75),
)
axes[0].legend(fontsize="small")
x = path.position[..., 0, 0].flatten().numpy()
edges = np.linspace(-1.8, 1.8, 73)
style = {"bins": edges, "density": True}
axes[1].hist(x, histtype="step", color="C1", label="ESH, all frames equal", **style)
axes[1].hist(
    x,
    weights=weights.flatten().numpy(),
    color="C0",
    alpha=0.5,
    label="ESH, weighted",
    **style,
)
axes[1].plot(grid, density, "k", lw=1.2, label="exact")
axes[1].set(
    xlabel="x (reduced units)",
    ylabel="density",
    title="double well, one coordinate",
    xlim=(-1.8, 1.8),
    ylim=(0, 1.0),
)
axes[1].legend(fontsize="small", loc="upper center")
axes[2].plot(path.position[:1501, 0, 0, 0], path.position[:1501, 0, 0, 1], lw=0.6)
axes[2].set(
    xlabel="x (reduced units)",
    ylabel="y (reduced units)",
    title="one ESH path",
    aspect="equal",
)
plt.show()

# Four standard errors, plus a hundredth for the step ds and for a start that was not
# drawn from the distribution.
assert abs(mean - exact) < 4 * stderr + 0.01 * exact
assert abs(plain.value - exact) > abs(mean - exact)  # the weights are needed

# %%
# All dynamics in one potential
# -----------------------------
#
# Each row of the figure shows one dynamics of the library at kT = 1, in a potential
# with the same two wells in each of two coordinates. On the left is one path. On the
# right are the density of all replicas over the second half of the run and the exact
# density. Dynamics at constant energy does not sample the canonical density, but
# preserves it. So the starts of the constant-energy runs are drawn from the canonical
# density, with momenta. The other runs start at one point. Frames of ESH are weighted
# as above, and the time of ESH is the scaled time.

potential, replicas = adjsim.DoubleWell(1.0), 400
reference = torch.exp(-potential(grid[:, None, None]))
spread = torch.multinomial(
    reference, 2 * replicas, replacement=True, generator=generator
)
drawn, corner = grid[spread].reshape(replicas, 1, 2), torch.ones(replicas, 1, 2)
reference /= torch.trapezoid(reference, grid)

cases = {
    "Hamiltonian, BAB": (
        adjsim.Hamiltonian(potential),
        adjsim.VelocityVerlet(0.05),
        drawn,
    ),
    "NoseHooverChain, NBABN": (
        adjsim.NoseHooverChain(potential, tau=0.5),
        adjsim.Splitting("NBABN", 0.05),
        corner,
    ),
    "ESH, EAE": (adjsim.ESH(potential), adjsim.Splitting("EAE", 0.05), corner),
    "Langevin, BAOAB": (adjsim.Langevin(potential), adjsim.BAOAB(0.05), corner),
    "GeneralizedLangevin, BAGAB": (
        adjsim.GeneralizedLangevin(potential, rates=(2.0,), strengths=(4.0,)),
        adjsim.Splitting("BAGAB", 0.05),
        corner,
    ),
    "OverdampedLangevin, LeimkuhlerMatthews": (
        adjsim.OverdampedLangevin(potential),
        adjsim.LeimkuhlerMatthews(0.02),
        corner,
    ),
}
steps, every, edges = 2000, 2, np.linspace(-2.0, 2.0, 41)
centres = (edges[1:] + edges[:-1]) / 2
expected = np.interp(centres, grid.numpy(), reference.numpy())

fig, axes = plt.subplots(
    len(cases), 2, figsize=(9, 11), layout="constrained", width_ratios=[2.2, 1]
)
for (left, right), (name, (dynamics, solver, position)) in zip(
    axes, cases.items(), strict=True
):
    momentum = (
        torch.randn(position.shape, generator=generator)
        if isinstance(dynamics, adjsim.Hamiltonian)
        else None
    )
    start = dynamics.init(position, momentum, generator)
    times = torch.arange(0, steps + 1, every) * solver.dt
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics, start, times, solver=solver, generator=generator
        )
    frames = run.position[..., 0, 0]
    left.plot(times, frames[:, 0], lw=0.7)
    left.set(ylabel="x (reduced units)", title=name)
    left.set(ylim=(-2.2, 2.2), xlim=(0, float(times[-1])))
    weights = (
        adjsim.dynamics.canonical_weights(run.log_speed)
        if name.startswith("ESH")
        else torch.ones_like(frames)
    )
    half = slice(len(times) // 2, None)
    # One histogram for each replica gives the error of the mean histogram, whatever the
    # correlation between the frames of a replica.
    counts = np.stack(
        [
            np.histogram(
                frames[half, i],
                bins=edges,
                weights=weights[half, i] / weights[half, i].sum(),
            )[0]
            for i in range(replicas)
        ]
    ) / (edges[1] - edges[0])
    found, stderr = counts.mean(0), counts.std(0, ddof=1) / replicas**0.5
    right.bar(centres, found, width=edges[1] - edges[0], color="C0", alpha=0.5)
    right.errorbar(centres, found, 2 * stderr, fmt="none", ecolor="C0", lw=0.8)
    right.plot(grid, reference, "k", lw=1.2, label="exact")
    right.set(xlim=(-2, 2), ylim=(0, 0.75), title="density ± 2 standard errors")
    seen = stderr > 1e-3
    off = float((np.abs(found - expected)[seen] / stderr[seen]).max())
    print(f"{name}: at most {off:.1f} standard errors from the exact density")
    assert off < 4.5  # the largest of about thirty bins, for each of six dynamics
axes[-1, 0].set_xlabel("t (reduced units)")
axes[-1, 1].set_xlabel("x (reduced units)")
axes[0, 1].legend(fontsize="small")
plt.show()
