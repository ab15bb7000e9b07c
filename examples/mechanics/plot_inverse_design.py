r"""
Designs that answer a question
==============================

How stiff must a beam be to sag by 30 cm? Which springs make a triangle with an area of
0.1, at rest, and while it swings? Both questions ask for a parameter whose
result is known. Newton's method answers them in a few steps, since the derivative of
the result is known too: by the implicit function theorem for a minimum of the energy,
and by the reversible adjoint for a motion.

Units are m, s and kg, for plane bodies of thickness 1 m. The triangle has no units.
"""

# sphinx_gallery_thumbnail_number = 1

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

LENGTH, HEIGHT, DENSITY, G, POISSON = 1.0, 0.1, 1000.0, 9.81, 0.3

# %%
# A beam that sags by 30 cm
# -------------------------
#
# A beam of triangles is clamped at its left end and bends under its weight.
# :func:`~adjsim.minimize` finds where it comes to rest, as a function of Young's
# modulus E. Sags are between zero and the length and moduli are positive, so Newton's
# method takes the logarithms of both. In the linear regime they are on a straight line.


class Beam:
    """A clamped beam, which remembers its last shape as the next start."""

    def __init__(self, cells):
        self.mesh = adjsim.meshes.sheet((LENGTH, HEIGHT), cells, dim=2)
        self.mass = self.mesh.lumped_mass(DENSITY)
        self.shape = self.mesh.vertices
        self.clamped = self.mesh.vertices[:, 0] == 0
        self.tip = self.mesh.vertices[:, 0] == LENGTH

    def sag(self, log_modulus, g=G):
        """Return how far the right end hangs down."""
        solid = adjsim.NeoHookean(self.mesh, log_modulus.exp(), POISSON)
        energy = solid + adjsim.Gravity(self.mass, g)
        rest = adjsim.minimize(energy, self.shape, fixed=self.clamped)
        self.shape = rest.detach()
        return (self.mesh.vertices - rest)[self.tip, 1].mean()


def find_modulus(beam, target, guess):
    """Return the modulus with a sag, and the moduli, sags and shapes on the way."""
    x, way = torch.tensor(math.log(guess)), []
    for _ in range(10):
        x = x.detach().requires_grad_()
        sag = beam.sag(x)
        way.append((math.exp(x.item()), sag.item(), beam.shape))
        if abs(sag.item() - target) < 1e-9:
            return way[-1][0], way
        (slope,) = torch.autograd.grad(sag.log(), x)
        x = x + (math.log(target) - sag.log()) / slope
    raise RuntimeError(f"the sag is {sag.item():g} after {len(way)} steps")


beam, TARGET = Beam((60, 6)), 0.3
modulus, way = find_modulus(beam, TARGET, 1e7)
for step, (value, sag, _) in enumerate(way):
    print(f"step {step}: E = {value:.6e} Pa, sag {sag:.9f} m")
assert abs(way[-1][1] - TARGET) < 1e-6

# %%
# The derivative of the sag agrees with a difference quotient. A second test needs no
# quotient. The shape depends on E and g through E/g alone, so the derivatives by the
# logarithms of both are opposite.

x = torch.tensor(math.log(modulus), requires_grad=True)
g = torch.tensor(G, requires_grad=True)
by_modulus, by_g = torch.autograd.grad(beam.sag(x, g), (x, g))
with torch.no_grad():
    above, below = (beam.sag(x + shift).item() for shift in (1e-3, -1e-3))
quotient = (above - below) / 2e-3
print(
    f"dsag/dlog E = {by_modulus:.10f}, by differences {quotient:.10f}, "
    f"-dsag/dlog g = {-G * by_g:.10f}"
)
# The quotient is off by a share of the square of its step, 4e-8.
assert abs(by_modulus / quotient - 1) < 1e-6
assert abs(by_modulus / (G * by_g) + 1) < 1e-9

# %%
# Is it the modulus of a beam?
# ----------------------------
#
# For a small sag s the theory of Timoshenko has a closed form. In plane strain the
# modulus of bending is :math:`E/(1 - \nu^2)`, so
#
# .. math:: E = \frac{\rho g}{s} \left( \frac{3 (1 - \nu^2) L^4}{2 h^2}
#               + \frac{6}{5} (1 + \nu) L^2 \right) .
#
# Linear triangles are too stiff in bending, so a mesh needs a softer material than the
# beam. The error falls as the square of the size of a cell, and extrapolation
# (Richardson) removes it.

SMALL = 0.01
bending = 1.5 * (1 - POISSON**2) * LENGTH**4 / HEIGHT**2
theory = DENSITY * G / SMALL * (bending + 1.2 * (1 + POISSON) * LENGTH**2)
layers, found = np.array([6, 8, 12]), []
for n in layers.tolist():
    small = Beam((10 * n, n))
    value, small_way = find_modulus(small, SMALL, theory)
    assert abs(small_way[-1][1] - SMALL) < 1e-6
    found.append(value)
    print(f"{n:2} layers of cells: E = {value:.6e} Pa")
size = 1 / layers**2
slope = (found[2] - found[1]) / (size[2] - size[1])
limit = found[2] - slope * size[2]
print(f"extrapolated {limit:.5e}, theory {theory:.5e} Pa")
# The clamp holds the section, which theory leaves free to contract.
assert abs(limit / theory - 1) < 0.03
assert np.all(np.diff(found) > 0)
# The finest two meshes predict the coarsest one: the error is of order two.
assert abs((limit + slope * size[0]) / found[0] - 1) < 0.01

linear = found[0] * SMALL / TARGET
print(f"on the same mesh, a linear beam would need {linear:.4e} Pa for {TARGET} m")
assert modulus < linear

fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for step, color in ((0, "0.6"), (-1, "C0")):
    value, _, shape = way[step]
    mesh_lines, _ = axes[0].triplot(*shape.T, beam.mesh.triangles, lw=0.5, color=color)
    mesh_lines.set_label(f"E = {value:.3g} Pa")
axes[0].axhline(HEIGHT / 2 - TARGET, color="C3", ls="--", label="target of the end")
axes[0].set(xlabel="x (m)", ylabel="y (m)", title="first and last step")
axes[0].set(aspect="equal", ylim=(-0.48, 0.15))
axes[0].legend(loc="lower left", fontsize="small")
axes[1].plot(size, found, "o", label="meshes")
axes[1].plot(
    [0, size[0]], [limit, limit + slope * size[0]], "--", label="extrapolation"
)
axes[1].plot(0, theory, "k*", ms=10, label="Timoshenko")
axes[1].set(
    xlabel="1 / layers²", ylabel="E (Pa)", title=f"modulus for a sag of {SMALL} m"
)
axes[1].legend()
plt.show()

# %%
# The beam of 30 cm must be softer than a linear beam on the same mesh. Its weight moves
# inwards as it bends, and has a shorter lever.
#
# A triangle with an area of 0.1
# ------------------------------
#
# Three masses are joined by three springs. Which rest lengths give the triangle an area
# of 0.1? The free triangle may move and turn. :func:`~adjsim.minimize` knows that these
# directions are flat, and its derivative has no part along them. Three lengths have one
# task, so there are many answers. Each step of Newton's method takes the smallest
# change.

SIDES, STIFFNESS, AREA = [[0, 1], [1, 2], [2, 0]], 10.0, 0.1
START = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.3]])
EQUAL = 0.4 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(0.75)]])


def area(position):
    (ax, ay), (bx, by), (cx, cy) = (x.unbind(-1) for x in position.unbind(-2))
    return ((bx - ax) * (cy - ay) - (by - ay) * (cx - ax)) / 2


def sides(position):
    return torch.stack([(position[j] - position[i]).norm() for i, j in SIDES])


def springs(lengths):
    return adjsim.HarmonicBond(SIDES, STIFFNESS, lengths)


def area_at_rest(lengths, start):
    return area(adjsim.minimize(springs(lengths), start))


def find_lengths(area_of, start):
    """Return rest lengths that give the area, beginning with the sides of the start."""
    lengths = sides(start)
    for _ in range(10):
        lengths = lengths.detach().requires_grad_()
        found = area_of(lengths, start)
        if abs(found.item() - AREA) < 1e-12:
            return lengths.detach()
        (slope,) = torch.autograd.grad(found, lengths)
        lengths = lengths + (AREA - found.item()) * slope / (slope @ slope)
    raise RuntimeError(f"the area is {found.item():g}")


def heron(lengths):
    """Return the area of a triangle with given sides."""
    half = lengths.sum() / 2
    return (half * torch.prod(half - lengths)).sqrt()


resting = find_lengths(area_at_rest, START)
print(f"rest lengths {resting.numpy().round(8)}, Heron's area {heron(resting):.12f}")
assert abs(heron(resting) - AREA) < 1e-6

# %%
# At rest the sides have their rest lengths, so Heron's formula knows the derivative.
# From an equilateral start the answer stays equilateral, and its side is
# :math:`\sqrt{4 A/\sqrt 3}`.

lengths = resting.clone().requires_grad_()
(by_minimum,) = torch.autograd.grad(area_at_rest(lengths, START), lengths)
(by_heron,) = torch.autograd.grad(heron(lengths), lengths)
print("dA/dlength", by_minimum.numpy().round(8), "Heron", by_heron.numpy().round(8))
# The minimum is found to 1e-10.
assert torch.allclose(by_minimum, by_heron, rtol=1e-8, atol=0)

SIDE = math.sqrt(4 * AREA / math.sqrt(3))
equal = find_lengths(area_at_rest, EQUAL)
print(f"equilateral: {equal.numpy().round(10)}, by hand {SIDE:.10f}")
assert torch.allclose(equal, torch.tensor(SIDE), rtol=0, atol=1e-9)

# %%
# The triangle in motion
# ----------------------
#
# Now the springs are changed while the triangle is at rest, and it begins to swing.
# Which rest lengths give it the area at t = 2? The derivative comes from the reversible
# adjoint. With damping and more time the triangle comes to rest, and the answer is that
# of the minimum.

SWING, LONG, DAMPING, DT = 2.0, 10.0, 4.0, 0.02


def run(lengths, start, time, damping=0.0, frames=1, adjoint=None):
    """Return positions of triangles with masses of one, which start at rest."""
    dynamics = adjsim.Mechanics(springs(lengths), damping=damping)
    return adjsim.simulate(
        dynamics,
        dynamics.init(start),
        torch.linspace(0, time, frames + 1),
        solver=adjsim.Splitting(dynamics.scheme, DT),
        adjoint=adjoint or adjsim.ReversibleAdjoint(),
    ).position


def area_in_swing(lengths, start):
    return area(run(lengths, start, SWING)[-1])


def area_after_damping(lengths, start):
    return area(run(lengths, start, LONG, DAMPING)[-1])


swinging = find_lengths(area_in_swing, START)
damped = find_lengths(area_after_damping, START)
for name, lengths in (("at t = 2", swinging), ("damped", damped), ("at rest", resting)):
    print(f"{name:8}: {lengths.numpy().round(9)}")
assert abs(area_in_swing(swinging, START) - AREA) < 1e-6
# What damping leaves of the swing is exp(-20) = 2e-9.
assert torch.allclose(damped, resting, rtol=0, atol=1e-7)

# %%
# The derivative agrees with backpropagation and with difference quotients.

lengths = swinging.clone().requires_grad_()
(gradient,) = torch.autograd.grad(area_in_swing(lengths, START), lengths)
direct = run(lengths, START, SWING, adjoint=adjsim.DirectAdjoint())
(backpropagated,) = torch.autograd.grad(area(direct[-1]), lengths)
shifts = 1e-5 * torch.eye(3)
quotients = torch.stack(
    [
        (area_in_swing(swinging + s, START) - area_in_swing(swinging - s, START)) / 2e-5
        for s in shifts
    ]
)
print("reversible     ", gradient.numpy().round(10))
print("backpropagation", backpropagated.numpy().round(10))
print("differences    ", quotients.numpy().round(10))
assert torch.allclose(gradient, backpropagated, rtol=1e-10)
# Quotients have errors of 1e-10, by the square of the shift and by rounding over it.
assert torch.allclose(gradient, quotients, rtol=1e-6)

# %%
# From an equilateral start the triangle stays equilateral. Its sides swing with
# :math:`\omega^2 = 3k/m`, and velocity Verlet turns by :math:`\cos\theta = 1 -
# \omega^2 h^2/2` in a step. So a side is :math:`l + (s_0 - l) \cos n\theta` after n
# steps, which gives the rest length l by hand.

equal = find_lengths(area_in_swing, EQUAL)
turn = math.cos(round(SWING / DT) * math.acos(1 - 1.5 * STIFFNESS * DT**2))
by_hand = (SIDE - 0.4 * turn) / (1 - turn)
print(f"equilateral: {equal.numpy().round(10)}, by hand {by_hand:.10f}")
assert torch.allclose(equal, torch.tensor(by_hand), rtol=0, atol=1e-9)

# %%
# The three designs
# -----------------
#
# The lengths for rest miss the area in a swing without damping, and the lengths for t =
# 2 have it only then.

FRAMES = 50
designs = {
    "for rest, undamped": (resting, 0.0),
    "for t = 2, undamped": (swinging, 0.0),
    "for rest, damped": (resting, DAMPING),
}
with torch.no_grad():
    paths = {
        name: run(lengths, START, SWING, damping, FRAMES)
        for name, (lengths, damping) in designs.items()
    }
frames = np.linspace(0, SWING, FRAMES + 1)
fig, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name, path in paths.items():
    ax.plot(frames, area(path), label=name)
ax.axhline(AREA, color="k", ls="--", lw=1, label="target")
ax.plot(SWING, AREA, "k.", ms=9, clip_on=False)
ax.set(xlabel="time", ylabel="area", ylim=(0.07, 0.145))
ax.legend(ncols=2)
plt.show()
assert abs(area(paths["for rest, undamped"][-1]) - AREA) > 1e-3

fig, axes = plt.subplots(1, 3, figsize=(8, 2.9), layout="constrained", sharey=True)
outlines = []
for ax, name in zip(axes, paths, strict=True):
    ax.set(xlim=(-0.15, 0.65), ylim=(-0.15, 0.5), aspect="equal", title=name)
    outlines.append(ax.fill(*START.T, facecolor="C0", alpha=0.4, edgecolor="C0")[0])


def draw(frame):
    """Draw the triangles at one time, with their areas."""
    for ax, outline, path in zip(axes, outlines, paths.values(), strict=True):
        outline.set_xy(path[frame].numpy())
        ax.set_xlabel(f"area {area(path[frame]):.4f}")
    fig.suptitle(f"t = {frames[frame]:.2f}")
    return outlines


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
movie = FuncAnimation(fig, draw, range(0, FRAMES + 1, 2), interval=80)
plt.show()
