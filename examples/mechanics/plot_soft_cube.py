r"""
A soft cube thrown onto the floor
=================================

A soft cube is thrown onto a rough floor. How far does it come, and how does the
distance depend on what the cube and the floor are made of? One backward run answers for
Young's modulus, Poisson's ratio, density, the initial velocity, the coefficient of
friction and the stiffness of the contact. The gradients go through the impact, and this
page compares each with a difference quotient. Units are m, kg and s.
"""

# sphinx_gallery_thumbnail_number = 3

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation
from mpl_toolkits.mplot3d.art3d import Poly3DCollection

import adjsim
from adjsim import meshes

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a small body

# %%
# The cube
# --------
#
# The cube has an edge of 0.1 m, 64 vertices and 162 tetrahedra. It is a
# :class:`~adjsim.NeoHookean` solid with gravity. The floor is a smooth penalty,
# :class:`~adjsim.PlaneContact`, whose width of 1 mm is two to three steps of the fall.
# Friction is that of Coulomb, smooth below a sliding velocity of 0.25 m/s.
#
# The masses of the vertices are one parameter, which body, weight and start share.

SIDE, G, END = 0.1, 9.81, 0.25
cube = meshes.box([SIDE] * 3, [3] * 3)


def turned(x, axis, angle):
    """Turn vectors about an axis."""
    axis = torch.tensor(axis) / torch.tensor(axis).norm()
    generator = torch.linalg.cross(axis.expand(3, 3), torch.eye(3))
    return x @ torch.linalg.matrix_exp(angle * generator)


def parameter(value):
    return torch.nn.Parameter(torch.tensor(value))


shape = turned(cube.vertices - SIDE / 2, [0.3, 1.0, 0.2], 0.5)
START = shape + torch.tensor([0.0, 0.0, 0.15])
spinning = torch.linalg.cross(torch.tensor([[0.0, 4.0, 0.0]]), shape)

density, velocity = parameter(1000.0), parameter([1.5, 0.3, -1.0])
mass = torch.nn.Parameter(cube.lumped_mass(density.detach()))
body = adjsim.NeoHookean(cube, parameter(3e4), parameter(0.3))
weight = adjsim.Gravity(mass, G)
floor = adjsim.PlaneContact([0.0, 0.0, 1.0], 0.0, parameter(1000.0), width=1e-3)
dynamics = adjsim.Mechanics(
    body + weight, mass, contact=floor, friction=parameter(0.25), smoothing=0.25
)


def simulate(ts=(0.0, END), dt=2.5e-4):
    # A corner that sticks is slowed down by up to e^2 in a step, and the reversed step
    # multiplies its rounding error as much. So states are stored while the cube lies.
    return adjsim.simulate(
        dynamics,
        dynamics.init(START, velocity=velocity + spinning),
        ts,
        solver=adjsim.Splitting(dynamics.scheme, dt),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=True,
    )


# %%
# Energy and momentum
# -------------------
#
# The cube lands on an edge, is pressed together, and leaves the floor turning and
# ringing. In flight the momentum along the floor and the energy are conserved. On the
# floor friction takes both, and the load is up to ten times the weight.

FRAMES = 50
with torch.no_grad():
    run = simulate(torch.linspace(0, END, FRAMES + 1))
    q, p = run.position, run.momentum
    energies = {
        "kinetic": dynamics.kinetic_energy(adjsim.PhaseState(q, p)),
        "elastic": body(q),
        "gravity": weight(q),
        "contact": floor(q),
    }
    total, momentum = sum(energies.values()), p.sum(1)
    load, pull = floor.normal_force(q).sum(1), G * mass.sum()
    gap = floor.gap(q).min(1).values
times = run.times

# The penalty is exp(-20) of its scale at a gap of ten widths.
flying = gap > 1e-2
falling = flying & (times < 0.1)
fall = momentum[0, 2] - pull * times
assert flying.sum() > 20
# Sums of 64 momenta round at 1e-15 in each of 1,000 steps.
assert (momentum[falling, 2] - fall[falling]).abs().max() < 1e-12
rebound = momentum[flying & (times > 0.1), :2]
assert (momentum[falling, :2] - momentum[0, :2]).abs().max() < 1e-12
assert (rebound - rebound[0]).abs().max() < 1e-12
assert rebound[0].norm() < momentum[0, :2].norm()
# Verlet's energy oscillates within 1e-3 of the kinetic energy, and friction takes more.
assert total.diff().max() < 1e-3 * energies["kinetic"].max()
assert total[0] - total[-1] > 0.05

fig, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
for name, values in energies.items():
    axes[0].plot(times, values, label=name)
axes[0].plot(times, total, "k", label="total")
axes[0].set(ylabel="energy (J)", ylim=(-0.1, 4.4), title="energy")
for axis, values in zip("xyz", momentum.T, strict=True):
    axes[1].plot(times, values, label=f"along {axis}")
axes[1].set(ylabel="momentum (kg m/s)", title="momentum")
axes[2].plot(times, load, label="load on the floor")
axes[2].axhline(pull, color="k", ls=":", label="weight")
axes[2].set(ylabel="force (N)", title="the impact")
for ax in axes:
    ax.set(xlabel="time (s)")
axes[0].legend(fontsize="small", ncols=3, loc="upper right")
for ax in axes[1:]:
    ax.legend(fontsize="small")
plt.show()

# %%
# Without friction the energy is conserved through the impact as well, with an error of
# the second order in the step.

errors = []
with torch.no_grad():
    dynamics.friction.zero_()
    for dt in (2.5e-4, 1.25e-4):
        end = simulate(dt=dt).final
        errors.append((dynamics.energy(end) - total[0]).item())
    dynamics.friction.fill_(0.25)
print(f"energy error without friction {errors[0]:.2e} J, half the step {errors[1]:.2e}")
assert 3 < errors[0] / errors[1] < 5

# %%
# Gradients through the impact
# ----------------------------
#
# The distance is that of the centre of mass after 0.25 s. The gradient with respect to
# the masses becomes that of the density by the chain rule.

NUMBERS = {
    "Young's modulus": body.youngs_modulus,
    "Poisson's ratio": body.poissons_ratio,
    "density": density,
    "velocity": velocity,
    "friction": dynamics.friction,
    "contact stiffness": floor.penalty.stiffness,
}


def distance(**options):
    """Return how far the centre of mass has come at the end."""
    x = simulate(**options).final.position[:, 0]
    return (mass * x).sum() / mass.sum()


def distance_and_gradient(**options):
    """Return the distance and its gradient with respect to all numbers."""
    masses = cube.lumped_mass(density)
    with torch.no_grad():
        mass.copy_(masses)
    far = distance(**options)
    others = [number for number in NUMBERS.values() if number is not density]
    by_mass, *rest = torch.autograd.grad(far, [mass, *others])
    (by_density,) = torch.autograd.grad(masses, density, by_mass)
    found = iter(rest)
    return far.item(), {
        name: by_density if number is density else next(found)
        for name, number in NUMBERS.items()
    }


@torch.no_grad()
def quotient(number, entry, shift=1e-5):
    """Return the central difference of the distance for one entry of a number."""
    flat, values = number.view(-1), []
    before, h = flat[entry].item(), shift * number.abs().max().item()
    for value in (before + h, before - h):
        flat[entry] = value
        mass.copy_(cube.lumped_mass(density))
        values.append(distance().item())
    flat[entry] = before
    mass.copy_(cube.lumped_mass(density))
    return (values[0] - values[1]) / (2 * h)


far, gradient = distance_and_gradient()
_, finer = distance_and_gradient(dt=1.25e-4)
print(f"distance {far:.4f} m")
print(f"{'':18} {'value':>8} {'gradient':>14} {'difference':>14} {'half the step':>14}")
effect = {}
for name, number in NUMBERS.items():
    for entry, value in enumerate(number.detach().view(-1).tolist()):
        label = f"{name} {'xyz'[entry]}" if number.ndim else name
        slope, check = gradient[name].view(-1)[entry].item(), quotient(number, entry)
        half = finer[name].view(-1)[entry].item()
        print(f"{label:18} {value:8g} {slope:14.7e} {check:14.7e} {half:14.7e}")
        # Differences have an error of the square of the shift, and rounding.
        assert abs(slope / check - 1) < 1e-6
        effect[label] = (slope * value / 100, half * value / 100)
# The derivatives converge with the step, since the penalty is smooth on its scale.
largest = max(abs(effect[label][0]) for label in effect)
assert max(abs(a - b) for a, b in effect.values()) < 0.01 * largest

# %%
# A gradient that is exact for the steps taken is of use if it tells where a change
# leads. The lines are the gradients at points of the curves. Above a friction of about
# 0.35 the vertices on the floor stick, and more friction has little effect.

CHANGES = {
    "friction": np.linspace(0.05, 0.65, 5),
    "Young's modulus": np.linspace(1e4, 5e4, 5),
}
fig, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
axes[0].barh(list(effect), [1e3 * change for change, _ in effect.values()])
axes[0].axvline(0, color="k", lw=0.5)
axes[0].invert_yaxis()
axes[0].set(xlabel="change of the distance (mm)", title="one per cent more of ...")
for ax, (name, values) in zip(axes[1:], CHANGES.items(), strict=True):
    number, scans = NUMBERS[name], []
    before = number.item()
    for value in values:
        with torch.no_grad():
            number.fill_(value)
        scanned, slopes = distance_and_gradient()
        scans.append((value, scanned, slopes[name].item()))
    with torch.no_grad():
        number.fill_(before)
    x, y, slopes = np.array(scans).T
    reach = 0.3 * np.diff(x).min() * np.array([[-1.0], [1.0]])
    ax.plot(x + reach, y + reach * slopes, "C1", lw=2)
    ax.plot(x, y, "C0o", ms=4)
    ax.set(xlabel=name, ylabel="distance (m)", title=f"distance by {name}")
    ax.locator_params(axis="x", nbins=4)
plt.show()

# %%
# The throw
# ---------

faces = cube.surface()
fig = plt.figure(figsize=(6, 3.6), layout="constrained")
ax = fig.add_subplot(projection="3d", computed_zorder=False)
ax.set(xlim=(-0.1, 0.5), ylim=(-0.12, 0.18), zlim=(0, 0.25), yticks=[], zticks=[0, 0.2])
ax.set_box_aspect((0.6, 0.3, 0.25), zoom=1.2)
ax.view_init(12, -75)
skin = Poly3DCollection(q[0, faces].numpy(), edgecolor="0.3", lw=0.4)
ax.add_collection3d(skin)
LIGHT = np.array([0.3, -0.8, 0.5])


def draw(frame):
    """Draw the surface of the cube, lit from the front."""
    corners = q[frame, faces].numpy()
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    bright = 0.55 + 0.45 * (normals @ LIGHT)
    skin.set_verts(corners)
    skin.set_facecolor(plt.cm.Blues_r(0.15 + 0.6 * bright.clip(0, 1)))
    ax.set_title(f"t = {times[frame]:.2f} s")
    return (skin,)


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
movie = FuncAnimation(fig, draw, range(0, FRAMES + 1, 2), interval=80)
plt.show()
