"""
Exact reversal
==============

A step that can be undone needs no stored states for its gradient. In floating point the
undone step is off by rounding, and chaos and friction amplify this error until the path
is lost. ``Splitting(..., exact=True)`` runs the steps on a lattice, where each step is
a bijection, and undoes them bit for bit. Information buffers keep the bits that
friction removes from the momenta (:ref:`theory <exact>`). This example compares
reversal in floating point with reversal on the lattice, on a hot drop of 13
Lennard-Jones atoms. Then it counts the bits in the buffers.

Units are reduced: energies in epsilon, lengths in sigma, masses in the mass of an atom.
"""

# sphinx_gallery_thumbnail_number = 1

import math

import matplotlib.pyplot as plt
import torch
from torch import nn

import adjsim
from adjsim.io.systems import cluster

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # 13 atoms are too few to share between threads

DT, HOT, KT = 0.005, 0.8, 0.25


def parameter(value):
    return nn.Parameter(torch.tensor(value))


# %%
# The drop
# --------
#
# The cluster starts at its icosahedral minimum, with momenta hot enough to melt it. It
# runs at constant energy by velocity Verlet, and at friction 1 by BAOAB. The observable
# is the atoms' mean squared distance from the origin at the end of the run. Its
# gradient is taken with respect to epsilon and sigma, and under friction also with
# respect to the temperature of the bath and the friction.

momentum = math.sqrt(HOT) * torch.randn(
    13, 3, generator=torch.Generator().manual_seed(3)
)
momentum = momentum - momentum.mean(0)


potential = adjsim.LennardJones(parameter(1.0), parameter(1.0))
DYNAMICS = {
    "BAB": adjsim.Hamiltonian(potential),
    "BAOAB": adjsim.Langevin(potential, kT=parameter(KT), friction=parameter(1.0)),
}


def gradient(scheme, time, adjoint, exact):
    """Return gradient and stats of the run. All but direct ones are compiled."""
    dynamics = DYNAMICS[scheme]
    run = adjsim.simulate(
        dynamics,
        dynamics.init(cluster().position, momentum),
        [0.0, time],
        solver=adjsim.Splitting(scheme, DT, exact=exact),
        adjoint=adjoint,
        record=lambda state: (state.position**2).sum(-1).mean(),
        generator=torch.Generator().manual_seed(4),
        compile=not isinstance(adjoint, adjsim.DirectAdjoint),
    )
    return torch.stack(
        torch.autograd.grad(run.record[-1], list(dynamics.parameters()))
    ), run.stats


def difference(found, true):
    return ((found - true).norm() / true.norm()).item()


# %%
# Reversal in floating point and on the lattice
# ---------------------------------------------
#
# Here plain reversal runs back to the start without checkpoints and without a
# tolerance. With its default tolerance it would raise an error if the reconstruction
# error were above 1e-6. Exact reversal runs with its defaults. Both gradients are
# compared with that of :class:`~adjsim.CheckpointAdjoint` on the same steps. This
# adjoint runs the steps again from stored states, so its gradient is always exact. Over
# the shorter horizons the gradient of exact reversal is also compared with
# backpropagation through all steps (:class:`~adjsim.DirectAdjoint`).

horizons = {"BAB": [2, 7, 13, 20], "BAOAB": [2, 6, 10, 15]}
FAR, SHORT = 25, 7
unchecked = adjsim.ReversibleAdjoint(checkpoint_every=10**9, tol=math.inf)
lost, kept, off, off_exact, off_direct, size = {}, {}, {}, {}, {}, {}
for scheme, times in horizons.items():
    for time in times:
        key = scheme, time
        plain, stats = gradient(scheme, time, unchecked, exact=False)
        lost[key] = stats["reconstruction_error"]
        off[key] = difference(
            plain, gradient(scheme, time, adjsim.CheckpointAdjoint(), exact=False)[0]
        )
        exact, stats = gradient(scheme, time, adjsim.ReversibleAdjoint(), exact=True)
        kept[key] = stats["reconstruction_error"]
        off_exact[key] = difference(
            exact, gradient(scheme, time, adjsim.CheckpointAdjoint(), exact=True)[0]
        )
        if time <= SHORT:
            off_direct[key] = difference(
                exact, gradient(scheme, time, adjsim.DirectAdjoint(), exact=True)[0]
            )
        size[key] = exact.norm().item()
    # A longer horizon, at which only exact reversal runs.
    kept[scheme, FAR] = gradient(scheme, FAR, adjsim.ReversibleAdjoint(), exact=True)[
        1
    ]["reconstruction_error"]

names = {"BAB": "constant energy", "BAOAB": "friction 1"}
styles = {
    "BAB": {"color": "C0", "marker": "o"},
    "BAOAB": {"color": "C1", "marker": "s"},
}


def axis_with_zero(ax, bottom):
    """Make a logarithmic axis whose lower end stands for zero."""
    ticks = [10.0**k for k in range(-15, 4, 3)]
    ax.set_yscale("log")
    ax.set_yticks(
        [bottom, *ticks], ["0", *(f"$10^{{{round(math.log10(t))}}}$" for t in ticks)]
    )
    ax.minorticks_off()
    ax.set_ylim(bottom, 100)


def at_zero(ax, values, scheme, label):
    """Draw points at the lower end of the axis, after checking that they are zero."""
    times = [time for word, time in values if word == scheme]
    assert all(values[scheme, time] == 0.0 for time in times)
    style = {
        **styles[scheme],
        "mfc": "none",
        "ms": 9 if scheme == "BAB" else 5,
        "ls": "",
    }
    ax.plot(
        times,
        [ax.get_ylim()[0]] * len(times),
        **style,
        label=label,
        clip_on=False,
        zorder=5,
    )


fig, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
axis_with_zero(ax, 1e-16)
for scheme, times in horizons.items():
    ax.plot(
        times,
        [lost[scheme, time] for time in times],
        **styles[scheme],
        label=f"floating point, {names[scheme]}",
    )
for scheme in horizons:
    at_zero(ax, kept, scheme, f"exact, {names[scheme]}: 0")
ax.axhline(1e-6, color="0.7", lw=1, zorder=0)
ax.text(FAR, 1.5e-6, "default tolerance", color="0.4", ha="right", va="bottom")
ax.set(
    xlabel="horizon (reduced units; one unit is 200 steps)",
    ylabel="reconstruction error",
    xlim=(0, FAR + 1),
)
ax.legend(loc="center right", fontsize="small", bbox_to_anchor=(1.0, 0.33))
plt.show()

# %%
# In floating point the error of the recovered start grows exponentially with the
# horizon, and faster under friction. At the end of either curve the path is lost. On
# the lattice the recovered state equals the start, also beyond the ends of the curves.

for key, error in lost.items():
    print(
        f"{names[key[0]]}, horizon {key[1]:2}: state off by {error:.1e}, gradient by "
        f"{off[key]:.1e}; exact {kept[key]:g}"
    )
for scheme in horizons:
    print(f"{names[scheme]}, horizon {FAR}: exact {kept[scheme, FAR]:g}")
    assert lost[scheme, horizons[scheme][0]] < 1e-11
    assert lost[scheme, horizons[scheme][-1]] > 1e-3
assert all(error == 0.0 for error in kept.values())

# %%
# The gradient
# ------------
#
# The recovered states have the same bits as the states of the forward run. So the
# gradients computed from them agree with those of the checkpoint and the direct adjoint
# to rounding at every horizon. They differ by rounding, since a compiled loop, the
# checkpoint adjoint and backpropagation add the same products in different orders.

fig, ax = plt.subplots(figsize=(9.5, 4), layout="constrained")
ax.set_yscale("log")
for scheme, times in horizons.items():
    ax.plot(
        times,
        [off[scheme, time] for time in times],
        **styles[scheme],
        label=f"floating point, {names[scheme]}",
    )
for other, found, line in (
    ("direct", off_direct, ":"),
    ("checkpoint", off_exact, "--"),
):
    for scheme in horizons:
        rows = {time: value for (word, time), value in found.items() if word == scheme}
        style = {
            "color": styles[scheme]["color"],
            "marker": "x" if scheme == "BAB" else "+",
            "ms": 8,
        }
        ax.plot(
            rows.keys(),
            rows.values(),
            line,
            **style,
            label=f"exact against {other}, {names[scheme]}",
        )
ax.set(
    xlabel="horizon (reduced units; one unit is 200 steps)",
    ylabel="relative difference of the gradient",
    xlim=(0, 21),
)
ax.set_xticks(range(0, 21, 5))
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
plt.show()

# %%
# The gradient itself grows with the horizon, since nearby paths diverge. This growth is
# not an error: the gradient is that of this one path. As the gradient of an average it
# is useless (:doc:`/choosing_an_adjoint`).

for scheme, times in horizons.items():
    print(
        f"{names[scheme]}: size of the gradient",
        ", ".join(f"{size[scheme, time]:.1e}" for time in times),
    )
    assert off[scheme, times[-1]] > 1e-3
    assert 0 < max(off_exact[scheme, time] for time in times) < 1e-12
assert max(off_direct.values()) < 1e-11

# %%
# The bits in the buffers
# -----------------------
#
# Without friction the buffers stay empty. Friction multiplies momenta by
# :math:`e^{-\gamma\Delta t}` in a step, so on average :math:`e^{\gamma\Delta t}`
# lattice values of a momentum are mapped to one value. Recording which of these values
# it was takes :math:`\gamma\,\Delta t/\ln 2` bits. In the long run no exact inverse
# needs fewer bits. ``trajectory.stats`` has the bits that the buffers took, per step
# and degree of freedom, and this bound. The runs start twice as hot as the bath, since
# half of the kinetic energy turns into potential energy at once.


dynamics = DYNAMICS["BAOAB"]


def counted(friction, steps):
    """Return the bits per step and degree of freedom, the bound, and the heat that
    friction removes, also per step and degree of freedom, in units of kT ln 2.
    """
    dynamics.friction.data.fill_(friction)
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics,
            dynamics.init(cluster().position, momentum * math.sqrt(2 * KT / HOT)),
            [0.0, steps * DT],
            solver=adjsim.Splitting("BAOAB", DT, exact=True),
            adjoint=adjsim.ReversibleAdjoint(),
            record=adjsim.TimeAverage(dynamics.kinetic_energy),
            generator=torch.Generator().manual_seed(1),
            compile=True,
        )
    heat = friction * DT * 2 * run.record.item() / momentum.numel()
    return (
        run.stats["buffer_bits"],
        run.stats["buffer_bound"],
        heat / (KT * math.log(2)),
    )


frictions, lengths = [1.0, 3.0, 10.0, 30.0, 100.0], [500, 1000, 1500, 2000]
found = {(gamma, 2000): counted(gamma, 2000) for gamma in frictions}
found.update(
    {(gamma, n): counted(gamma, n) for gamma in (1.0, 3.0, 10.0) for n in lengths[:-1]}
)

fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for gamma, colour in ((10.0, "C3"), (3.0, "C2"), (1.0, "C1")):
    axes[0].plot(
        [n * DT for n in lengths],
        [n * found[gamma, n][0] for n in lengths],
        "o",
        color=colour,
    )
    axes[0].plot(
        [0, 10],
        [0, 10 * gamma / math.log(2)],
        "-",
        color=colour,
        lw=1,
        label=rf"friction {gamma:g}",
    )
axes[0].set(
    xlabel="time (reduced units)",
    ylabel="bits in the buffer per degree of freedom",
    xlim=(0, 10.4),
    ylim=(0, None),
)
axes[0].legend(title=r"$\gamma\,t/\ln 2$", loc="upper left")
bits, bound, heat = zip(*(found[gamma, 2000] for gamma in frictions), strict=True)
axes[1].loglog(frictions, bits, "ko", label="bits in the buffer")
axes[1].loglog(frictions, heat, "rx", ms=8, label=r"heat / ($kT\,\ln 2$)")
axes[1].loglog(frictions, bound, "k-", lw=1, label=r"$\gamma\,\Delta t/\ln 2$")
axes[1].set(
    xlabel="friction (reduced units)", ylabel="bits per step and degree of freedom"
)
axes[1].legend(loc="upper left")
plt.show()

# %%
# The buffer holds the entropy that the momenta give to the bath. In a step friction
# takes the heat :math:`\gamma\,\Delta t\,p^2/m` from a degree of freedom, on average
# :math:`\gamma\,\Delta t\,kT`. Divided by :math:`kT` this heat is an entropy of
# :math:`\gamma\,\Delta t` (in units of Boltzmann's constant), which a real bath would
# keep in the motion of its molecules. Noise returns as much heat. The noise is a
# function of the seed, so it needs no memory.
#
# The count does not equal the bound exactly. A system's buffers are emptied together,
# by 32 bits each. Each time at most one more 32-bit word is stored, which names the
# system of the batch. And buffers that hold only a few bits are below the bound by a
# fraction of a bit.

for gamma, b, least, h in zip(frictions, bits, bound, heat, strict=True):
    print(
        f"friction {gamma:5g}: {b:.5f} bits, bound {least:.5f}, ratio "
        f"{b / least:.3f}, heat over kT ln 2 {h:.5f}"
    )
for (gamma, n), (b, least, _) in found.items():
    # Allowed are a bit or two, and the word that names the system.
    assert abs(n * b - n * least) < 2 + n * least / 39, (gamma, n)
    assert abs(least / (gamma * DT / math.log(2)) - 1) < 1e-6
# Over many relaxation times the mean kinetic energy of 39 degrees of freedom is thermal
# within a few hundredths.
assert all(abs(h / least - 1) < 0.1 for least, h in zip(bound, heat, strict=True))
per_step = momentum.numel() * found[1.0, 2000][1]
print(
    f"a million steps at friction 1 put {1e6 * per_step / 8e3:.0f} kB into the "
    "buffers; their states would be 624 MB"
)
