r"""
Learning the angle of a molecule
================================

Which rest angle gives two triatomic molecules a wanted distance between their ends?
Each has two harmonic bonds and one harmonic angle. A weak thermostat cools them, and
the loss is taken at the end of the run. Trigonometry knows the answer: with bonds of
0.7 nm the ends are 1.0 nm apart at :math:`2 \arcsin(1.0/1.4) = 91.2` degrees. The
problem is an example of differentiable simulation in the documentation of Molly.jl.

Units are nm, ps and atomic mass units, so energies are in kJ/mol.
"""

# sphinx_gallery_thumbnail_number = 2

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # six atoms are too few to share between threads

MASS, DT, STEPS, SIDE = 10.0, 0.05, 150, 3.0
COLD, TAU = 4.157e-4, 0.5  # 0.05 K in kJ/mol; ps
LENGTH, TARGET = 0.7, 1.0
THEORY = np.degrees(2 * np.arcsin(TARGET / (2 * LENGTH)))
box = torch.full((3,), SIDE)
START = torch.tensor(
    [
        [0.8, 0.75, 1.5],
        [1.5, 0.70, 1.5],
        [2.3, 0.75, 1.5],
        [0.8, 2.25, 1.5],
        [1.5, 2.20, 1.5],
        [2.3, 2.25, 1.5],
    ]
)
BONDS = [[0, 1], [1, 2], [3, 4], [4, 5]]
ANGLES = [[0, 1, 2], [3, 4, 5]]
ENDS = [0, 3], [2, 5]

# %%
# The simulation
# --------------
#
# Bonds and angles are potentials, and their sum is one. Each takes an index with a row
# for each term. The rest angle is one number, which both molecules share. The steps run
# in compiled loops, since the page needs many runs.

angle = torch.nn.Parameter(torch.tensor(np.radians(110.0)))
molecules = adjsim.HarmonicBond(BONDS, k=100.0, length=LENGTH, box=box)
molecules += adjsim.HarmonicAngle(ANGLES, k=10.0, angle=angle, box=box)
dynamics = adjsim.Berendsen(molecules, MASS, COLD, TAU)
rest = dynamics.init(START, torch.zeros_like(START))


def simulate(frames=1, **options):
    """Run from rest and return positions at the times saved."""
    return adjsim.simulate(
        dynamics,
        rest,
        torch.linspace(0, STEPS * DT, frames + 1),
        solver=adjsim.Splitting("BABR", DT),
        **{"adjoint": adjsim.ReversibleAdjoint(), "compile": True, **options},
    ).position


def end_distance(position):
    """Return the mean distance between the ends of the molecules."""
    return (position[..., [0, 3], :] - position[..., [2, 5], :]).norm(dim=-1).mean(-1)


def loss_and_gradient(degrees, **options):
    """Return the distance, the loss and its derivative, in nm and nm/degree."""
    with torch.no_grad():
        angle.fill_(np.radians(degrees))
    distance = end_distance(simulate(**options)[-1])
    loss = (distance - TARGET).abs()
    (gradient,) = torch.autograd.grad(loss, angle)
    return distance.item(), loss.item(), np.radians(gradient.item())


# %%
# The derivative by the reversible adjoint agrees with backpropagation, and with a
# difference quotient.

_, _, gradient = loss_and_gradient(110.0)
_, _, backpropagated = loss_and_gradient(
    110.0, adjoint=adjsim.DirectAdjoint(), compile=False
)
up, down = (loss_and_gradient(110.0 + shift)[1] for shift in (1e-4, -1e-4))
quotient = (up - down) / 2e-4
print(
    f"gradient at 110 degrees: {gradient:.8f} nm/degree, by backpropagation "
    f"{backpropagated:.8f}, by differences {quotient:.8f}"
)
# Undoing the thermostat multiplies rounding by e^(7.5/0.5) between the checkpoints.
assert abs(gradient / backpropagated - 1) < 1e-6
# The quotient has a rounding error of 1e-16/1e-4 nm/degree.
assert abs(gradient / quotient - 1) < 1e-6

# %%
# The gradient over all angles
# ----------------------------
#
# The loss is the distance from the target. Its gradient is negative below the answer
# and positive above it, from 6 to 174 degrees, so gradient descent finds the answer
# from anywhere. The molecules still vibrate a little at the end of the run, so the loss
# is least near the answer of trigonometry and not quite at it.

degrees = np.linspace(6, 174, 57)
distance, loss, slope = np.array([loss_and_gradient(d) for d in degrees]).T
(turn,) = np.flatnonzero(np.diff(np.sign(slope)))
assert degrees[turn] < THEORY < degrees[turn + 1]
assert slope[0] < 0 < slope[-1]

# %%
# The fit
# -------
#
# Gradient descent starts at 110 degrees. Near the target a gradient of about 0.01
# nm/degree asks for steps of degrees, so the rate falls as 1/epoch.

RATE, EPOCHS = 1000.0, 20
fitted = [110.0]
for epoch in range(EPOCHS):
    _, _, gradient = loss_and_gradient(fitted[-1])
    fitted.append(fitted[-1] - RATE / (epoch + 1) * gradient)
print(f"learned angle: {fitted[-1]:.1f} degrees, theory {THEORY:.1f}")
# The last steps go to and fro by RATE/EPOCHS * 0.01 nm/degree, half a degree, about an
# answer that the vibrations move by about as much.
assert abs(fitted[-1] - THEORY) < 2

fig, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
axes[0].plot(degrees, distance)
axes[0].axhline(TARGET, color="k", ls="--", lw=1, label="target")
axes[0].set(ylabel="distance of the ends (nm)")
axes[1].plot(degrees, slope, ".-", color="C1")
axes[1].axhline(0, color="k", lw=0.5)
axes[1].set(ylabel="gradient of the loss (nm/degree)")
for ax in axes[:2]:
    ax.set(xlabel="rest angle (degrees)", xticks=range(0, 181, 30))
    ax.axvline(THEORY, color="0.6", ls=":", label="theory")
axes[2].plot(range(EPOCHS + 1), fitted, "o-", color="C2", label="learned")
axes[2].axhline(THEORY, color="0.6", ls=":", label="theory")
axes[2].set(xlabel="epoch", ylabel="rest angle (degrees)", xticks=range(0, 21, 4))
for ax in axes:
    ax.legend()
plt.show()

# %%
# Before and after
# ----------------
#
# The molecules begin almost straight and bend to their rest angle.

paths = {}
for name, value in (("before, 110 degrees", fitted[0]), ("after", fitted[-1])):
    with torch.no_grad():
        angle.fill_(np.radians(value))
        paths[name] = simulate(STEPS // 3)

fig, axes = plt.subplots(1, 2, figsize=(7, 3.6), layout="constrained")
lines = []
for ax, title in zip(axes, paths, strict=True):
    lines += [ax.plot([], [], "o-", ms=9, color="C0")[0] for _ in range(2)]
    ax.set(xlim=(0, SIDE), ylim=(0, SIDE), aspect="equal", title=title)


def draw(frame):
    """Draw both molecules of both runs at one time."""
    shown = [q[frame, atoms] for q in paths.values() for atoms in ANGLES]
    for line, points in zip(lines, shown, strict=True):
        line.set_data(*points[:, :2].T)
    fig.suptitle(f"t = {3 * DT * frame:.2f} ps")
    return lines


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
movie = FuncAnimation(fig, draw, range(0, STEPS // 3 + 1, 2), interval=80)
plt.show()
