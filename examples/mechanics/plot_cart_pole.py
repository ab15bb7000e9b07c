r"""
Swinging up a pole
==================

A pole hangs from a cart on a rail. A force of at most 20 on the cart should swing it up
and keep it upright. The force is feedback by a small neural network, which sees place
and velocity of the cart and of the bob at the end of the pole. It is trained by
gradients through the simulation. Then the page asks from which starts it succeeds, the
basin of attraction of the upright pole.

Cart and bob are two masses in a plane. A stiff spring is the pole, and a stiff spring
in height keeps the cart on the rail. At the end the controller has to move a rigid
pole, which it has never seen.

Training takes some minutes and is a script of its own,
``examples/data/make_cart_pole.py``. This page runs the controller with the stored
weights.
"""

# sphinx_gallery_thumbnail_number = 5

import json
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation

import adjsim
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.signals.controls import NeuralController

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # two masses are too few to share between threads

FILE = "examples/data/cart_pole.json"
study = json.loads((Path(adjsim.__file__).parents[1] / FILE).read_text())
SETTINGS = study["settings"]
print(f"{study['made_by']}, commit {study['commit'][:10]}")
print(", ".join(f"{key} {value:g}" for key, value in SETTINGS.items()))
CART, BOB, LENGTH, G, STIFFNESS, DT = (
    SETTINGS[key] for key in ("cart", "bob", "length", "g", "stiffness", "dt")
)
MASSES = torch.tensor([[CART], [BOB]])

# %%
# Cart, pole and controller
# -------------------------
#
# :class:`~adjsim.NeuralController` gives the network one row with time, positions and
# velocities. The network ends with tanh, so the scale is the largest force, and it is
# zero for all but the cart along the rail.


class Sight(torch.nn.Module):
    """What the network sees: the cart, and the bob as seen from the cart."""

    def forward(self, seen):
        _, x, y, x_bob, y_bob, v, w, v_bob, w_bob = seen.unbind(-1)
        parts = [x, v / 2, x_bob - x, y_bob - y, (v_bob - v) / 4, (w_bob - w) / 4]
        return torch.stack(parts, -1)


hidden = SETTINGS["hidden"]
network = torch.nn.Sequential(
    Sight(),
    torch.nn.Linear(6, hidden),
    torch.nn.Tanh(),
    torch.nn.Linear(hidden, hidden),
    torch.nn.Tanh(),
    torch.nn.Linear(hidden, 4),
    torch.nn.Tanh(),
)
weights = {
    name: torch.tensor(study["weights"][name]).reshape(value.shape)
    for name, value in network.state_dict().items()
}
network.load_state_dict(weights)


class CartPole(Mechanics):
    """Cart and bob, joined by a stiff spring, and a force on the cart along a rail."""

    def __init__(self, network):
        rod = adjsim.HarmonicBond([[0, 1]], k=STIFFNESS, length=LENGTH)
        rail = adjsim.Harmonic(k=[[0.0, STIFFNESS], [0.0, 0.0]])
        scale = [[SETTINGS["largest_force"], 0.0], [0.0, 0.0]]
        super().__init__(
            rod + rail + Gravity(MASSES, G),
            MASSES,
            control=NeuralController(network, scale=scale),
        )


dynamics = CartPole(network)


def make_start(angle, rate):
    """Make starts from angles (zero is upright) and rates; the cart rests."""
    lever = torch.stack([torch.sin(angle), torch.cos(angle)], -1)
    turning = torch.stack([torch.cos(angle), -torch.sin(angle)], -1)
    cart = torch.zeros_like(lever)
    # The rail carries the weight.
    cart[..., 1] = -(CART + BOB) * G / STIFFNESS
    bob = LENGTH * rate[..., None] * turning
    return dynamics.init(
        torch.stack([cart, cart + LENGTH * lever], -2),
        velocity=torch.stack([torch.zeros_like(bob), bob], -2),
    )


def simulate(state, times, **options):
    solver = adjsim.Splitting("BAUAB", DT)
    return adjsim.simulate(dynamics, state, times, solver=solver, **options)


def cost(state):
    """Compute the cost rate: height missing, place, and velocity when upright."""
    lever = state.position[..., 1, :] - state.position[..., 0, :]
    speeds = state.momentum / MASSES
    relative = speeds[..., 1, :] - speeds[..., 0, :]
    height = lever[..., 1] / LENGTH
    return (
        (1 - height)
        + 0.1 * state.position[..., 0, 0] ** 2
        + 0.02 * speeds[..., 0, 0] ** 2
        + 0.02 * (relative**2).sum(-1) * (1 + height) / 2
    )


# %%
# The gradient
# ------------
#
# The cost of a run is the mean of a cost rate, which :class:`~adjsim.TimeAverage` takes
# along the run. Its gradient by the weights agrees with a difference quotient and
# between adjoints.

some = make_start(torch.tensor([0.3, 2.0, 3.1]), torch.tensor([0.0, -1.0, 0.5]))


def mean_cost(**options):
    record = adjsim.TimeAverage(cost)
    return simulate(some, [0.0, 0.5], record=record, **options).record.mean()


first = network[1].weight
along = torch.randn(first.shape, generator=torch.Generator().manual_seed(0))
slopes = {}
for adjoint in (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint()):
    (gradient,) = torch.autograd.grad(mean_cost(adjoint=adjoint), first)
    slopes[type(adjoint).__name__] = (gradient * along).sum().item()
with torch.no_grad():
    values = []
    for shift in (1e-5, -1e-5):
        first.add_(shift * along)
        values.append(mean_cost().item())
        first.sub_(shift * along)
slopes["difference quotient"] = (values[0] - values[1]) / 2e-5
for name, slope in slopes.items():
    print(f"{name}: {slope:.9f}")
direct = slopes["DirectAdjoint"]
assert abs(slopes["CheckpointAdjoint"] / direct - 1) < 1e-12
# Rounding of the quotient is 1e-16/1e-5, of a slope of the order of 0.1.
assert abs(slopes["difference quotient"] / direct - 1) < 1e-6

# %%
# Training
# --------
#
# The gradient of a long run grows exponentially with its length, because the upright
# pole is unstable. So the script halves the gradient with respect to the state every
# 0.5 time units, and later costs count less. It starts near upright, and widens the
# range of the starts until they are anywhere. That makes the task harder, so the cost
# of 64 runs of length 3 rises at first.

history = np.array(study["cost"])
smooth = np.convolve(history, np.ones(15) / 15, mode="valid")
fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.plot(history, color="0.7", lw=1, label="64 runs")
ax.plot(7 + np.arange(len(smooth)), smooth, color="C0", label="mean of 15 updates")
ax.axvspan(0, 0.45 * len(history), color="C1", alpha=0.15, lw=0, label="starts widen")
ax.set(xlabel="update", ylabel="mean cost rate")
ax.legend(fontsize="small")
plt.show()
assert history[-20:].mean() < 0.8 * smooth.max()

# %%
# The swing-up
# ------------
#
# The pole hangs at rest. The network has to pump it up, catch it and bring the cart
# back.

FRAMES, END = 150, 6.0


def readings(position, momentum):
    """Return the angle of the pole and its rate, and the place of the cart."""
    lever = position[..., 1, :] - position[..., 0, :]
    speeds = momentum / MASSES
    relative = speeds[..., 1, :] - speeds[..., 0, :]
    angle = torch.atan2(lever[..., 0], lever[..., 1])
    rate = (relative[..., 0] * lever[..., 1] - relative[..., 1] * lever[..., 0]) / (
        lever**2
    ).sum(-1)
    return angle, rate, position[..., 0, 0]


def is_upright(position, momentum):
    """Test for angles below 0.2 and rates below 0.3, near the middle of the rail."""
    angle, rate, place = readings(position, momentum)
    return (angle.abs() < 0.2) & (rate.abs() < 0.3) & (place.abs() < 0.5)


hanging = make_start(torch.tensor([math.pi]), torch.zeros(1))
with torch.no_grad():
    run = simulate(hanging, torch.linspace(0, END, FRAMES + 1))
    force = dynamics.control(0.0, run.position, run.momentum / MASSES)[:, 0, 0, 0]
angle, rate, place = (x[:, 0] for x in readings(run.position, run.momentum))
lengths = (run.position[:, 0, 1] - run.position[:, 0, 0]).norm(dim=-1)
print(
    f"at the end: angle {angle[-1]:.4f}, rate {rate[-1]:.4f}, place {place[-1]:.4f}; "
    f"the pole's length from {lengths.min():.3f} to {lengths.max():.3f}"
)
assert is_upright(run.position[-1], run.momentum[-1]).all()
assert (lengths - LENGTH).abs().max() < 0.1

times = run.times.numpy()
turned = np.unwrap(angle.numpy())
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
axes[0].plot(times, turned / math.pi, label="angle / pi")
axes[0].plot(times, place, label="place of the cart")
axes[0].plot(times, force / SETTINGS["largest_force"], lw=1, label="force / largest")
axes[0].set(xlabel="time", title="from hanging to upright")
axes[0].legend(fontsize="small")
colors = plt.get_cmap("viridis")
q = run.position[:, 0].numpy()
for frame in range(0, FRAMES // 2 + 1, 2):
    color = colors(2 * frame / FRAMES)
    axes[1].plot(*q[frame].T, "o-", color=color, ms=4, lw=1)
axes[1].axhline(0, color="0.4", lw=1)
axes[1].set(aspect="equal", title="the first half", xlabel="place", ylabel="height")
plt.show()

# %%
# The basin of attraction
# -----------------------
#
# The figure shows all angles, and rates up to 12, with the cart at rest in the middle.
# A start counts as inside if the pole is upright after 8 time units. The starts of the
# training had rates of the order of 1.

COUNT, FAST = 31, 12.0
angles = torch.linspace(-math.pi, math.pi, COUNT)
rates = torch.linspace(-FAST, FAST, COUNT)
grid = torch.meshgrid(rates, angles, indexing="ij")
with torch.no_grad():
    final = simulate(make_start(grid[1].ravel(), grid[0].ravel()), [0.0, 8.0]).final
inside = is_upright(*final).reshape(COUNT, COUNT)
slow = rates.abs() <= 2.5
print(
    f"inside: {inside.double().mean():.1%} of all starts, "
    f"{inside[slow].double().mean():.1%} of those with rates up to 2.5"
)

fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
ax.pcolormesh(
    angles / math.pi, rates, inside.double(), cmap="Blues", vmin=0, vmax=1.6, lw=0
)
ax.plot(turned / math.pi - 2 * np.round(turned / 2 / math.pi), rate, "C3.", ms=3)
ax.set(xlabel="angle / pi (zero is upright)", ylabel="rate", xlim=(-1, 1))
ax.set_title("inside (blue), and the swing-up above (red)")
plt.show()
assert inside[slow].double().mean() > 0.9

# %%
# A rigid pole
# ------------
#
# The textbook's cart-pole has a rigid pole and two coordinates, :math:`\ddot x = (u + m
# \sin\theta (l \dot\theta^2 - g \cos\theta)) / (M + m \sin^2\theta)` and :math:`l
# \ddot\theta = g \sin\theta - \ddot x \cos\theta`. The same network is its feedback in
# :func:`~adjsim.solve_ivp`, at all times in place of once a step. The rigid pole may go
# up on the other side, since a hanging pole has two.


def rigid(t, state):
    x, angle, v, rate = state
    s, c = torch.sin(angle), torch.cos(angle)
    zero = torch.zeros_like(x)
    seen = [t + zero, x, zero, x + LENGTH * s, LENGTH * c, v, zero]
    seen += [v + LENGTH * rate * c, -LENGTH * rate * s]
    u = SETTINGS["largest_force"] * network(torch.stack(seen))[0]
    moved = (u + BOB * s * (LENGTH * rate**2 - G * c)) / (CART + BOB * s**2)
    return torch.stack([v, rate, moved, (G * s - moved * c) / LENGTH])


with torch.no_grad():
    solution = adjsim.solve_ivp(
        rigid, (0, END), [0.0, math.pi, 0.0, 0.0], t_eval=times, rtol=1e-6
    ).y.numpy()
print(
    f"rigid pole at the end: angle {math.remainder(solution[1, -1], 2 * math.pi):.4f}, "
    f"rate {solution[3, -1]:.4f}, place {solution[0, -1]:.4f}"
)
assert abs(math.remainder(solution[1, -1], 2 * math.pi)) < 0.2
assert abs(solution[3, -1]) < 0.3

fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.plot(times, np.cos(turned), label="stiff spring")
ax.plot(times, np.cos(solution[1]), "--", label="rigid pole")
ax.set(xlabel="time", ylabel="height of the bob / length")
ax.legend()
plt.show()

# %%
# The movement
# ------------

reach = float(np.abs(q[..., 0]).max()) + 0.3
fig, ax = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
ax.set(xlim=(-max(reach, 1.6), max(reach, 1.6)), ylim=(-1.3, 1.3), aspect="equal")
ax.axhline(0, color="0.4", lw=1, zorder=0)
(arrow,) = ax.plot([], [], "C3", lw=3)
(pole,) = ax.plot([], [], color="0.3", lw=3)
(cart,) = ax.plot([], [], "s", ms=18, color="C0")
(bob,) = ax.plot([], [], "o", ms=10, color="C1")


def draw(frame):
    """Draw the cart, the pole and the force as a line from the cart."""
    (x, y), (x_bob, y_bob) = q[frame]
    end = x + float(force[frame]) / SETTINGS["largest_force"]
    arrow.set_data([x, end], [y, y])
    pole.set_data([x, x_bob], [y, y_bob])
    cart.set_data([x], [y])
    bob.set_data([x_bob], [y_bob])
    ax.set_title(f"t = {times[frame]:.2f}")
    return cart, bob


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
movie = FuncAnimation(fig, draw, range(0, FRAMES + 1, 3), interval=120)
plt.show()
