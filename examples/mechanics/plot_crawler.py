r"""
A soft crawler learns its gait
==============================

A soft block lies on a floor with friction. It has a muscle in each of its cells, which
lengthens and shortens once a second. Which amplitudes and phases carry it forward? At
the start all muscles work together, and the block stays where it is. Gradients of the
travel through contact and friction then find a gait.

Units are m, s and kg, for a plane body of thickness 1 m. Training takes some minutes
and is a script of its own, ``examples/data/make_crawler.py``. This page runs the stored
gait again.
"""

# sphinx_gallery_thumbnail_number = 3

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation
from matplotlib.collections import PolyCollection

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # forty triangles are too few to share between threads

FILE = "examples/data/crawler.json"
study = json.loads((Path(adjsim.__file__).parents[1] / FILE).read_text())
SETTINGS = study["settings"]
print(f"{study['made_by']}, commit {study['commit'][:10]}")
print(", ".join(f"{key} {value}" for key, value in SETTINGS.items()))
COLUMNS, ROWS = SETTINGS["cells"]
CELLS, DT, TIME = COLUMNS * ROWS, SETTINGS["dt"], SETTINGS["time"]

# %%
# Body, muscles and floor
# -----------------------
#
# The body is a grid of cells with two triangles each. The diagonals of its right half
# mirror those of its left half, so that no direction is preferred by the mesh.


def make_mesh():
    """Make the body, and the cell of each triangle."""
    grid = adjsim.meshes.sheet(SETTINGS["lengths"], SETTINGS["cells"], dim=2).vertices
    triangles, owners = [], []
    for i in range(COLUMNS):
        for j in range(ROWS):
            a, b = i * (ROWS + 1) + j, (i + 1) * (ROWS + 1) + j
            rising = [[a, b, b + 1], [a, b + 1, a + 1]]
            falling = [[a, b, a + 1], [b, b + 1, a + 1]]
            triangles += rising if i < COLUMNS // 2 else falling
            owners += 2 * [i * ROWS + j]
    return adjsim.meshes.Mesh(grid, triangles=triangles), torch.tensor(owners)


mesh, owners = make_mesh()
mass = mesh.lumped_mass(SETTINGS["density"])

# %%
# A muscle stretches the rest shape of its cell along the body by a factor of :math:`1 +
# a \sin(2 \pi t + \varphi)`. :class:`~adjsim.Actuated` makes the rest shape a function
# of time, and :class:`~adjsim.Harmonics` is that function, with an amplitude a and a
# phase for each triangle. The floor is a smooth penalty, whose force is the normal
# force of the friction.


def make_crawler(amplitude, phase, friction=SETTINGS["friction"]):
    """Make the dynamics from an amplitude and a phase for each cell."""
    wave, turn = (
        torch.stack([x[owners], torch.zeros(len(owners))], -1)[None]
        for x in (amplitude, phase)
    )
    muscles = adjsim.Harmonics(wave, SETTINGS["frequency"], turn, 1.0)
    body = adjsim.NeoHookean(
        mesh,
        SETTINGS["youngs_modulus"],
        SETTINGS["poissons_ratio"],
        rest_stretch=torch.ones(len(owners), 2),
    )
    floor = adjsim.PlaneContact(
        [0.0, 1.0], 0.0, SETTINGS["contact_stiffness"], SETTINGS["contact_width"]
    )
    return adjsim.Mechanics(
        adjsim.Actuated(body, rest_stretch=muscles)
        + adjsim.Gravity(mass, SETTINGS["g"]),
        mass,
        contact=floor,
        friction=friction,
        smoothing=SETTINGS["smoothing"],
        damping=SETTINGS["damping"],
    )


def run(dynamics, time=TIME, frames=1, compile=True):
    """Return positions of a run that starts at rest on the floor."""
    return adjsim.simulate(
        dynamics,
        dynamics.init(mesh.vertices),
        torch.linspace(0, time, frames + 1),
        solver=adjsim.Splitting(dynamics.scheme, DT),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=compile,
    ).position


def travel(position):
    """Return how far the centre of mass has come."""
    return (position - mesh.vertices)[..., 0] @ mass / mass.sum()


amplitude = torch.tensor(study["amplitude"])
phase = torch.tensor(study["phase"])
before = torch.full((CELLS,), SETTINGS["first_amplitude"]), torch.zeros(CELLS)

# %%
# The gradient
# ------------
#
# Friction is smooth, and the normal force is differentiated with it, so the travel has
# a gradient. A vertex that sticks to the floor forgets its velocity. The reversible
# adjoint would have to recall it, so it stores a checkpoint every few steps. Along the
# gradient the travel must grow by the norm of the gradient.

PERIOD = 1 / SETTINGS["frequency"]
gait = torch.stack([amplitude, phase]).requires_grad_()
(gradient,) = torch.autograd.grad(travel(run(make_crawler(*gait), PERIOD)[-1]), gait)
uphill = gradient / gradient.norm()
with torch.no_grad():
    above, below = (
        travel(run(make_crawler(*(gait + shift * uphill)), PERIOD)[-1]).item()
        for shift in (1e-5, -1e-5)
    )
quotient = (above - below) / 2e-5
print(f"norm of the gradient {gradient.norm():.10f}, by differences {quotient:.10f}")
# The quotient is off by the square of its step times a third derivative, about 1e-8.
assert abs(gradient.norm() / quotient - 1) < 1e-6

# %%
# Learning
# --------
#
# Adam changes the amplitudes, which a parametrisation keeps below 0.2
# (:class:`~adjsim.Between`), and the phases. The first gait is the same on the left and
# on the right, so it does not travel at all, and its gradient is what breaks the
# symmetry. The mirror image of the learnt gait travels as far to the other side.


def mirrored(x):
    return x.reshape(COLUMNS, ROWS).flip(0).flatten()


with torch.no_grad():
    FRAMES = round(TIME / 0.05)
    paths = {
        "before": run(make_crawler(*before), frames=FRAMES),
        "after": run(make_crawler(amplitude, phase), frames=FRAMES),
    }
    way = {name: travel(path) for name, path in paths.items()}
    back = travel(run(make_crawler(mirrored(amplitude), mirrored(phase)))[-1])
print(
    f"travel before {way['before'][-1]:.2e} m, after {way['after'][-1]:.6f} m, "
    f"of the mirror image {back:.6f} m"
)
print(f"stored by the training: {study['travel'][-1]:.6f} m")
# Sums in another order round differently.
assert abs(way["before"]).max() < 1e-10
assert abs(back + way["after"][-1]) < 1e-8
assert abs(way["after"][-1] - study["travel"][-1]) < 1e-8
assert way["after"][-1] > 0.1

frames = np.linspace(0, TIME, FRAMES + 1)
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
axes[0].plot(100 * np.array(study["travel"]))
axes[0].set(xlabel="update", ylabel=f"travel in {TIME:g} s (cm)", title="learning")
for name, value in way.items():
    axes[1].plot(frames, 100 * value, label=name)
axes[1].set(xlabel="time (s)", ylabel="travel (cm)", title="the centre of mass")
axes[1].legend()
plt.show()

# %%
# What it has learnt
# ------------------
#
# The phases of the lower cells fall towards the front, so that the muscles along the
# floor lengthen and shorten in a wave that runs forward. The upper cells have other
# phases than the lower ones, so the block also bends. Almost all amplitudes have grown
# to the limit.

columns = np.arange(COLUMNS)
fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for row, name in reversed(list(enumerate(("lower cells", "upper cells")))):
    axes[0].plot(columns, amplitude.reshape(COLUMNS, ROWS)[:, row], "o-", label=name)
    axes[1].plot(columns, phase.reshape(COLUMNS, ROWS)[:, row], "o-", label=name)
axes[0].axhline(SETTINGS["largest_amplitude"], color="k", lw=1, ls="--", label="limit")
axes[0].set(xlabel="column of cells", ylabel="amplitude", ylim=(0, None))
axes[1].set(xlabel="column of cells", ylabel="phase (rad)")
for ax in axes:
    ax.legend(loc="lower left")
plt.show()

lower = phase.reshape(COLUMNS, ROWS)[:, 0].numpy()
assert np.polyfit(columns, lower, 1)[0] < 0
assert amplitude.median() > 0.95 * SETTINGS["largest_amplitude"]

# %%
# All of the travel is due to friction. Without it the muscles cannot move the centre of
# mass at all, since their forces come in pairs. The gait was learnt at a coefficient of
# friction of 0.5. It travels less far where that is smaller, and where it is larger.

MUS = [0.1, 1.0]
with torch.no_grad():
    smooth = make_crawler(amplitude, phase, friction=0.0)
    slips = travel(run(smooth, 0.5, compile=False)[-1])
    ways = [travel(run(make_crawler(amplitude, phase, mu))[-1]).item() for mu in MUS]
print(f"without friction {slips:.2e} m")
for mu, value in zip(MUS, ways, strict=True):
    print(f"friction {mu:4}: {100 * value:.2f} cm")
assert abs(slips) < 1e-12
assert 0 < max(ways) < way["after"][-1]

# %%
# Before and after
# ----------------
#
# Red cells are lengthened by their muscles, and blue ones shortened.

fig, axes = plt.subplots(2, 1, figsize=(7, 3.6), layout="constrained", sharex=True)
right = 1.2 + float(way["after"][-1])
bodies, gaits = [], (before, (amplitude, phase))
limit = SETTINGS["largest_amplitude"]
for ax, (name, path) in zip(axes, paths.items(), strict=True):
    corners = path[0][mesh.triangles].numpy()
    cells = PolyCollection(corners, cmap="coolwarm", edgecolor="0.3", lw=0.4)
    cells.set_clim(-limit, limit)
    bodies.append(ax.add_collection(cells))
    ax.axhline(0, color="k", lw=1)
    ax.axvline(1, color="0.6", ls=":", lw=1)
    ax.set(xlim=(-0.15, right), ylim=(-0.05, 0.32), aspect="equal", ylabel=name)


def draw(frame):
    """Draw both bodies at one time."""
    turn = 2 * np.pi * SETTINGS["frequency"] * frames[frame]
    for cells, path, (a, phi) in zip(bodies, paths.values(), gaits, strict=True):
        cells.set_verts(path[frame][mesh.triangles].numpy())
        cells.set_array((a * torch.sin(turn + phi))[owners].numpy())
    axes[0].set_title(f"t = {frames[frame]:.2f} s")
    return bodies


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
movie = FuncAnimation(fig, draw, range(0, FRAMES + 1, 2), interval=100)
plt.show()
