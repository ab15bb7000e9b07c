r"""
A force learnt from where it leads
==================================

Three pseudo-atoms start at rest. A neural network gives the force between the first and
the last of them from their distance, and nothing else acts but a thermostat, which
takes energy out. Which network makes the mean side of the triangle equal to one at the
end of the run? The network is trained through the whole simulation, 400 steps in each
epoch, and sees neither forces nor energies to copy. The problem is the example of a
neural network force in the documentation of Molly.jl.

Units are nm, ps and atomic mass units, so energies are in kJ/mol. All numbers are in
single precision, as is usual for networks.
"""

# sphinx_gallery_thumbnail_number = 1

import matplotlib.pyplot as plt
import torch
from matplotlib.animation import FuncAnimation
from torch import nn

import adjsim

torch.set_default_dtype(torch.float32)
torch.set_num_threads(1)  # three atoms are too few to share between threads

START = torch.tensor([[2.3, 2.07, 0.0], [2.5, 2.93, 0.0], [2.7, 2.07, 0.0]])
MASS, DT, STEPS, TARGET = 10.0, 0.02, 400, 1.0
COLD, TAU = 8.314e-5, 0.5  # a hundredth of a kelvin in kJ/mol; ps

# %%
# The force
# ---------
#
# The force need not come from an energy, so it is a :class:`~adjsim.ForceField`, a
# module of time and position. The network maps the distance of the two atoms to a
# number between -1 and 1, which multiplies the unit vector between them. The seed gives
# a network that pushes the atoms apart from the beginning. A network that pulls brings
# them to one place, where the direction of its force jumps and no gradient exists.


class LearntForce(adjsim.ForceField):
    """The force of a network along the line between the first and the last atom."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(1, 5), nn.ReLU(), nn.Linear(5, 1), nn.Tanh()
        )

    def forward(self, t, position):
        apart = position[..., 2, :] - position[..., 0, :]
        distance = apart.norm(dim=-1, keepdim=True)
        push = self.network(distance) * apart / distance
        return torch.stack([-push, torch.zeros_like(push), push], -2)


torch.manual_seed(2)
force = LearntForce()
dynamics = adjsim.Berendsen(force, MASS, COLD, TAU)
rest = dynamics.init(START, torch.zeros_like(START))


def simulate(adjoint, frames=1):
    """Run from the start and return the positions at the times saved."""
    return adjsim.simulate(
        dynamics,
        rest,
        torch.linspace(0, STEPS * DT, frames + 1),
        solver=adjsim.Splitting("BABR", DT),
        adjoint=adjoint,
    ).position


def sides(position):
    """Return the three sides of each triangle, (..., 3)."""
    return (position - position.roll(1, -2)).norm(dim=-1)


# %%
# The gradient
# ------------
#
# Backpropagation through the steps stores them all. Checkpoints give the same gradient
# from about twenty stored states, and run the segments between them again.

gradient = {}
for adjoint in (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint()):
    side = sides(simulate(adjoint)[-1]).mean()
    found = torch.autograd.grad(side, list(force.parameters()))
    gradient[adjoint] = torch.cat([g.flatten() for g in found])
direct, checkpointed = gradient.values()
difference = float((direct - checkpointed).norm() / direct.norm())
print(f"mean side before: {side.item():.3f}; gradients differ by {difference:.1e}")
# Both sum the same products in single precision, whose rounding is 6e-8.
assert difference < 1e-5

# %%
# The training
# ------------
#
# The loss is the distance between the mean side and its target. Adam takes twenty
# steps of 0.02.

optimiser = torch.optim.Adam(force.parameters(), lr=0.02)
distance = torch.linspace(0.2, 1.6, 57).unsqueeze(-1)
with torch.no_grad():
    before, first_force = simulate(adjsim.DirectAdjoint(), 100), force.network(distance)
history = []
for epoch in range(20):
    optimiser.zero_grad()
    side = sides(simulate(adjsim.DirectAdjoint())[-1]).mean()
    (side - TARGET).abs().backward()
    optimiser.step()
    history.append(side.item())
    print(f"epoch {epoch + 1:2}: mean side {side.item():.4f} nm")
with torch.no_grad():
    after, last_force = simulate(adjsim.DirectAdjoint(), 100), force.network(distance)
learned = sides(after[-1]).mean().item()
print(f"mean side after the training: {learned:.4f} nm, target {TARGET}")
# The gradient of the loss keeps its size up to the target, so the last steps go to and
# fro by about 0.02 in each parameter.
assert abs(learned - TARGET) < 0.03

fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
axes[0].plot(range(1, 22), [*history, learned], "o-")
axes[0].axhline(TARGET, color="k", ls="--", lw=1, label="target")
axes[0].set(xlabel="epoch", ylabel="mean side at the end (nm)")
axes[0].set_xticks(range(1, 22, 4))
axes[1].plot(distance, first_force, color="0.6", label="before")
axes[1].plot(distance, last_force, color="C1", label="after")
axes[1].axhline(0, color="k", lw=0.5)
axes[1].set(xlabel="distance (nm)", ylabel="force that pushes apart (kJ/mol/nm)")
for ax in axes:
    ax.legend()
plt.show()

# %%
# Before and after
# ----------------
#
# The second atom feels no force and stays. The others move apart until the thermostat
# has taken their speed, or for as long as the network pushes.

TRIANGLE = [0, 1, 2, 0]
fig, axes = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
lines = []
for ax, title in zip(axes, ("before", "after"), strict=True):
    lines += ax.plot([], [], "o-", ms=10, color="C0")
    ax.set(xlim=(1.6, 3.4), ylim=(1.7, 3.2), aspect="equal", title=title)


def draw(frame):
    """Draw the triangles of one frame."""
    for line, path in zip(lines, (before, after), strict=True):
        line.set_data(*path[frame, TRIANGLE, :2].T)
    fig.suptitle(f"t = {frame * STEPS * DT / 100:.1f} ps")
    return lines


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
movie = FuncAnimation(fig, draw, range(0, 101, 4), interval=80)
plt.show()
