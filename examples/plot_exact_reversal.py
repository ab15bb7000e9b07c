"""
Exact reversal
==============

A step that can be undone needs no stored states for its gradient. In floating point the undoing is off by rounding. Chaos and
friction multiply that error until the path is lost. ``Splitting(..., exact=True)`` carries the steps out on a lattice, where
each is a bijection, and undoes them bit for bit. What friction takes from the momenta is kept in information buffers
(:ref:`theory <exact>`). Here the two are set side by side, on a hot drop of 13 Lennard-Jones atoms. Then the bits in the
buffers are counted.

Units are reduced: energies in epsilon, lengths in sigma, masses in the mass of an atom.
"""

# sphinx_gallery_thumbnail_number = 1

import math

import matplotlib.pyplot as plt
import torch
from torch import nn

import adjsim
from adjsim.systems import cluster

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # 13 atoms are too few to share between threads

DT, HOT, KT = 0.005, 0.8, 0.25


def parameter(value):
    return nn.Parameter(torch.tensor(value))


# %%
# The drop
# --------
#
# The cluster starts at its icosahedral minimum, with momenta hot enough to melt it. It is run at constant energy by velocity
# Verlet, and at friction 1 by BAOAB. The gradient is that of the atoms' mean squared distance from the origin at the end of the
# run, with respect to epsilon and sigma, and with the bath to its temperature and friction too.

momentum = math.sqrt(HOT) * torch.randn(13, 3, generator=torch.Generator().manual_seed(3))
momentum = momentum - momentum.mean(0)


def drop(scheme, friction=1.0):
    potential = adjsim.LennardJones(parameter(1.0), parameter(1.0))
    if scheme == "BAB":
        return adjsim.Hamiltonian(potential)
    return adjsim.Langevin(potential, kT=parameter(KT), friction=parameter(friction))


def gradient(scheme, time, adjoint, exact):
    """The gradient, and what the run has to say of itself."""
    dynamics = drop(scheme)
    run = adjsim.simulate(
        dynamics,
        dynamics.init(cluster().position, momentum),
        [0.0, time],
        solver=adjsim.Splitting(scheme, DT, exact=exact),
        adjoint=adjoint,
        record=lambda state: (state.position**2).sum(-1).mean(),
        generator=torch.Generator().manual_seed(4),
    )
    return torch.stack(torch.autograd.grad(run.record[-1], list(dynamics.parameters()))), run.stats


def difference(found, true):
    return ((found - true).norm() / true.norm()).item()


# %%
# Reversal in floating point and on the lattice
# ---------------------------------------------
#
# Plain reversal is made to go all the way, with no checkpoints and no tolerance. By default it would raise where the error
# exceeds 1e-6. The exact one is left as it comes. The gradient of each is held against that of
# :class:`~adjsim.CheckpointAdjoint` on the same steps, which runs them again from stored states and is never wrong. Over the
# shorter horizons the exact one is also held against backpropagation.

horizons = {"BAB": [2, 5, 10, 15, 20], "BAOAB": [2, 5, 8, 11, 15]}
FAR, SHORT = 25, 8
unchecked = adjsim.ReversibleAdjoint(checkpoint_every=10**9, tol=math.inf)
lost, kept, off, off_exact, off_direct, size = {}, {}, {}, {}, {}, {}
for scheme, times in horizons.items():
    for time in times:
        key = scheme, time
        plain, stats = gradient(scheme, time, unchecked, exact=False)
        lost[key] = stats["reconstruction_error"]
        off[key] = difference(plain, gradient(scheme, time, adjsim.CheckpointAdjoint(), exact=False)[0])
        exact, stats = gradient(scheme, time, adjsim.ReversibleAdjoint(), exact=True)
        kept[key] = stats["reconstruction_error"]
        off_exact[key] = difference(exact, gradient(scheme, time, adjsim.CheckpointAdjoint(), exact=True)[0])
        if time <= SHORT:
            off_direct[key] = difference(exact, gradient(scheme, time, adjsim.DirectAdjoint(), exact=True)[0])
        size[key] = exact.norm().item()
    # And further, where there is nothing left to compare with.
    kept[scheme, FAR] = gradient(scheme, FAR, adjsim.ReversibleAdjoint(), exact=True)[1]["reconstruction_error"]

names = {"BAB": "constant energy", "BAOAB": "friction 1"}
styles = {"BAB": {"color": "C0", "marker": "o"}, "BAOAB": {"color": "C1", "marker": "s"}}


def axis_with_zero(ax, bottom):
    """A logarithmic axis whose lower end stands for zero."""
    ticks = [10.0**k for k in range(-15, 4, 3)]
    ax.set_yscale("log")
    ax.set_yticks([bottom, *ticks], ["0", *(f"$10^{{{round(math.log10(t))}}}$" for t in ticks)])
    ax.minorticks_off()
    ax.set_ylim(bottom, 100)


def at_zero(ax, values, scheme, label):
    """Points at the lower end of the axis; only what is zero may stand there."""
    times = [time for (word, time), value in values.items() if word == scheme and value == 0.0]
    style = {**styles[scheme], "mfc": "none", "ms": 9 if scheme == "BAB" else 5, "ls": ""}
    ax.plot(times, [ax.get_ylim()[0]] * len(times), **style, label=label, clip_on=False, zorder=5)


fig, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
axis_with_zero(ax, 1e-16)
for scheme, times in horizons.items():
    ax.plot(times, [lost[scheme, time] for time in times], **styles[scheme], label=f"floating point, {names[scheme]}")
for scheme in horizons:
    at_zero(ax, kept, scheme, f"exact, {names[scheme]}: 0")
ax.axhline(1e-6, color="0.7", lw=1, zorder=0)
ax.text(FAR, 1.5e-6, "default tolerance", color="0.4", ha="right", va="bottom")
ax.set(xlabel="horizon (reduced units; one is 200 steps)", ylabel="reconstruction error", xlim=(0, FAR + 1))
ax.legend(loc="center right", fontsize="small", bbox_to_anchor=(1.0, 0.33))
plt.show()

# %%
# In floating point the error of the state found at the start grows exponentially with the horizon, and faster under friction.
# By the end of either curve the path is lost. On the lattice the state found is the start, also where the curves have stopped.

for key, error in lost.items():
    print(f"{names[key[0]]}, horizon {key[1]:2}: state off by {error:.1e}, gradient by {off[key]:.1e}; exact {kept[key]:g}")
for scheme in horizons:
    print(f"{names[scheme]}, horizon {FAR}: exact {kept[scheme, FAR]:g}")
    assert lost[scheme, horizons[scheme][0]] < 1e-11
    assert lost[scheme, horizons[scheme][-1]] > 1e-3
assert all(error == 0.0 for error in kept.values())

# %%
# The gradient
# ------------
#
# The states being the same bits, so is everything that is computed from them.

fig, ax = plt.subplots(figsize=(9.5, 4), layout="constrained")
axis_with_zero(ax, 1e-17)
for scheme, times in horizons.items():
    ax.plot(times, [off[scheme, time] for time in times], **styles[scheme], label=f"floating point, {names[scheme]}")
for scheme in horizons:
    near = {time: value for (word, time), value in off_direct.items() if word == scheme}
    style = {"color": styles[scheme]["color"], "marker": "x" if scheme == "BAB" else "+", "ms": 8}
    ax.plot(near.keys(), near.values(), ":", **style, label=f"exact, {names[scheme]}, from direct")
for scheme in horizons:
    at_zero(ax, off_exact, scheme, f"exact, {names[scheme]}, from checkpoint: 0")
ax.set(xlabel="horizon (reduced units; one is 200 steps)", ylabel="relative difference of the gradient", xlim=(0, 21))
ax.set_xticks(range(0, 21, 5))
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
plt.show()

# %%
# Direct adds the same products up in another order, so it differs by rounding. The gradient itself grows with the horizon,
# since nearby paths part. That is no error: it is the gradient of this one path. It is of no use as that of an average
# (:doc:`/choosing_an_adjoint`).

for scheme, times in horizons.items():
    print(f"{names[scheme]}: size of the gradient", ", ".join(f"{size[scheme, time]:.1e}" for time in times))
    assert off[scheme, times[-1]] > 1e-3
    # The same bits on this machine; elsewhere a sum may be taken in another order.
    assert max(off_exact[scheme, time] for time in times) < 1e-12
assert max(off_direct.values()) < 1e-11

# %%
# What the buffers hold
# ---------------------
#
# Without friction nothing has to be kept. Friction multiplies momenta by :math:`e^{-\gamma\Delta t}` in a step, and so sends
# :math:`e^{\gamma\Delta t}` values of each to one. To know which it was takes :math:`\gamma\,\Delta t/\ln 2` bits. In the long
# run no inverse can do with less. ``trajectory.stats`` has the bits that the buffers took in, for each step and degree of
# freedom, and this bound. The runs start twice as hot as the bath, since half of the heat goes into the bonds at once.


def counted(friction, steps):
    """Bits for each step and degree of freedom, the bound, and the heat that friction took in units of kT ln 2."""
    dynamics = drop("BAOAB", friction)
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics,
            dynamics.init(cluster().position, momentum * math.sqrt(2 * KT / HOT)),
            [0.0, steps * DT],
            solver=adjsim.Splitting("BAOAB", DT, exact=True),
            record=adjsim.TimeAverage(dynamics.kinetic_energy),
            generator=torch.Generator().manual_seed(1),
        )
    heat = friction * DT * 2 * run.record.item() / momentum.numel()
    return run.stats["buffer_bits"], run.stats["buffer_bound"], heat / (KT * math.log(2))


frictions, lengths = [1.0, 3.0, 10.0, 30.0, 100.0], [500, 1000, 1500, 2000]
found = {(gamma, 2000): counted(gamma, 2000) for gamma in frictions}
found.update({(gamma, n): counted(gamma, n) for gamma in (1.0, 3.0, 10.0) for n in lengths[:-1]})

fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for gamma, colour in ((10.0, "C3"), (3.0, "C2"), (1.0, "C1")):
    axes[0].plot([n * DT for n in lengths], [n * found[gamma, n][0] for n in lengths], "o", color=colour)
    axes[0].plot([0, 10], [0, 10 * gamma / math.log(2)], "-", color=colour, lw=1, label=rf"friction {gamma:g}")
axes[0].set(xlabel="time", ylabel="bits in the buffer of a degree of freedom", xlim=(0, 10.4), ylim=(0, None))
axes[0].legend(title=r"$\gamma\,t/\ln 2$", loc="upper left")
bits, bound, heat = zip(*(found[gamma, 2000] for gamma in frictions), strict=True)
axes[1].loglog(frictions, bits, "ko", label="bits in the buffer")
axes[1].loglog(frictions, heat, "rx", ms=8, label=r"heat / ($kT\,\ln 2$)")
axes[1].loglog(frictions, bound, "k-", lw=1, label=r"$\gamma\,\Delta t/\ln 2$")
axes[1].set(xlabel="friction", ylabel="bits a step and degree of freedom")
axes[1].legend(loc="upper left")
plt.show()

# %%
# The buffer holds the entropy of the bath. In a step friction takes the heat :math:`\gamma\,\Delta t\,p^2/m` out of a degree of
# freedom, on average :math:`\gamma\,\Delta t\,kT`. Divided by :math:`kT` that is an entropy of :math:`\gamma\,\Delta t` (in
# units of Boltzmann's constant), which a real bath would keep in the motion of its molecules. Noise brings as much heat back.
# It is a function of the seed, so there is nothing to be kept of it.
#
# The count is not the bound to the last bit. A system's buffers are emptied 32 bits at a time, with one more word to say which
# system it was: one in 39 here. And buffers that hold a few bits only are short of the bound by a fraction of one.

for gamma, b, least, h in zip(frictions, bits, bound, heat, strict=True):
    print(f"friction {gamma:5g}: {b:.5f} bits, bound {least:.5f}, ratio {b / least:.3f}, heat over kT ln 2 {h:.5f}")
for (gamma, n), (b, least, _) in found.items():
    # A bit or two, and the word that says which system.
    assert abs(n * b - n * least) < 2 + n * least / 39, (gamma, n)
    assert abs(least / (gamma * DT / math.log(2)) - 1) < 1e-6
# Over many relaxation times the mean kinetic energy of 39 degrees of freedom is thermal within a few hundredths.
assert all(abs(h / least - 1) < 0.1 for least, h in zip(bound, heat, strict=True))
per_step = momentum.numel() * found[1.0, 2000][1]
print(f"a million steps at friction 1 put {1e6 * per_step / 8e3:.0f} kB into the buffers; their states would be 624 MB")
