r"""
From rest to rest with least effort
===================================

A mass of 1 should move by D = 2 within T = 1.5, from rest to rest. Which force u(t)
does this with the least effort, :math:`\int_0^T u^2 dt`? The answer is known: the force
falls linearly, :math:`u = (6D/T^2)(1 - 2t/T)`, and its effort is :math:`12 D^2/T^3`.

Then the mass pulls a second one by a spring, and both should be at rest at the end.
Control theory knows this answer too, from the Gramian of controllability.
"""

# sphinx_gallery_thumbnail_number = 3

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation
from scipy.linalg import expm

import adjsim
from adjsim.potentials.signals.controls import OpenLoop
from adjsim.potentials.signals.signals import PiecewiseLinear

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # two atoms are too few to share between threads

D, T, SPRING, LENGTH = 2.0, 1.5, 9.0, 1.0

# %%
# The problem
# -----------
#
# The force acts on the first mass. It is linear between its values at the steps, and
# the values are the parameters.


def make_push(values):
    times = torch.linspace(0, T, len(values))
    return PiecewiseLinear(times, torch.nn.Parameter(values[:, None, None]))


def move(push, masses, frames=1):
    """Run from rest, and return positions and momenta ``(frames, masses)``."""
    force = OpenLoop(push, [0])
    if masses > 1:
        force = adjsim.HarmonicBond([[0, 1]], k=SPRING, length=LENGTH) + force
    dynamics = adjsim.Hamiltonian(force)
    start = -LENGTH * torch.arange(masses, dtype=torch.float64)[:, None]
    run = adjsim.simulate(
        dynamics,
        dynamics.init(start, torch.zeros_like(start)),
        torch.linspace(0, T, frames + 1),
        solver=adjsim.VelocityVerlet(T / (len(push.values) - 1)),
    )
    return (run.position - start)[..., 0], run.momentum[..., 0]


def mass_matrix(steps):
    """Return M, with which the effort of a piecewise linear force is u M u."""
    M = np.zeros((steps + 1, steps + 1))
    for n in range(steps):
        M[n : n + 2, n : n + 2] += T / steps * np.array([[2, 1], [1, 2]]) / 6
    return M


# %%
# The end of the run, all displacements and momenta, is linear in the values. So its
# gradients A, one backward pass each, are the same for all forces, and the least effort
# under the conditions :math:`A u = b` is a linear system: :math:`u = M^{-1} A^T (A
# M^{-1} A^T)^{-1} b`.


def least_effort(masses, steps):
    """Return the values of the best force, and its effort."""
    push = make_push(torch.zeros(steps + 1))
    end = torch.cat([x[-1] for x in move(push, masses)])
    A = torch.stack(
        [torch.autograd.grad(x, push.values, retain_graph=True)[0] for x in end]
    )
    A, b = A.numpy()[..., 0, 0], np.repeat([D, 0.0], masses)
    along = np.linalg.solve(mass_matrix(steps), A.T)
    values = along @ np.linalg.solve(A @ along, b)
    return values, values @ mass_matrix(steps) @ values


# %%
# One mass
# --------
#
# Velocity Verlet has an error of second order in the step, and so has the effort.

known, efforts = 12 * D**2 / T**3, {}
for steps in (10, 20, 40, 80):
    values, efforts[steps] = least_effort(1, steps)
    print(f"{steps:3} steps: effort {efforts[steps]:.8f}, by hand {known:.8f}")
errors = np.array(list(efforts.values())) - known
orders = np.log2(errors[:-1] / errors[1:])
limit = (4 * efforts[80] - efforts[40]) / 3
print("orders", ", ".join(f"{order:.3f}" for order in orders), f"; limit {limit:.8f}")
assert abs(orders[-1] - 2) < 0.01
# The first and the last interval leave an error of third order, 80^-3 = 2e-6.
assert abs(limit / known - 1) < 1e-5

times = np.linspace(0, T, 81)
by_hand = 6 * D / T**2 * (1 - 2 * times / T)
worst = np.abs(values - by_hand).max()
print(f"the force differs by {worst:.1e} at most")
# The first and the last value have half an interval, and are off in first order.
assert worst < 2 * by_hand.max() / 80

with torch.no_grad():
    place, momentum = (x.numpy() for x in move(make_push(torch.tensor(values)), 1, 80))
# The conditions hold to rounding.
assert abs(place[-1, 0] - D) < 1e-12
assert abs(momentum[-1, 0]) < 1e-12

fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
axes[0].plot(times, values, label="force")
axes[0].plot(times, momentum, label="momentum")
axes[0].plot(times, place, label="place")
axes[0].plot(times[::5], by_hand[::5], "k.", label="force by hand")
axes[0].set(xlabel="time", title="one mass")
axes[0].legend(fontsize="small")
axes[1].loglog(list(efforts), np.abs(errors), "o-", label="simulation")
axes[1].loglog(
    [10, 80], abs(errors[0]) * np.array([1, 1 / 64]), "k--", lw=1, label="order 2"
)
axes[1].set(xlabel="steps", ylabel="error of the effort", title="convergence")
axes[1].set_xticks(list(efforts), list(efforts))
axes[1].minorticks_off()
axes[1].legend()
plt.show()

# %%
# Two masses and a spring
# -----------------------
#
# A force that is linear in time brings both masses to D on the average, but they swing.
# The best force has to leave the spring at rest. For a linear system :math:`\dot z = A
# z + B u` the least effort to a state z is :math:`z^T W^{-1} z`, with the force
# :math:`u = B^T e^{A^T (T - t)} W^{-1} z` and the Gramian :math:`W = \int_0^T e^{A s} B
# B^T e^{A^T s} ds`.

rows = np.zeros((4, 4))
rows[:2, 2:] = np.eye(2)
rows[2:, :2] = SPRING * np.array([[-1, 1], [1, -1]])
B, goal = np.array([0, 0, 1.0, 0]), np.array([D, D, 0, 0])
# Van Loan (1978): the Gramian from one exponential.
block = expm(T * np.block([[-rows, np.outer(B, B)], [np.zeros((4, 4)), rows.T]]))
gramian = block[4:, 4:].T @ block[:4, 4:]
weights = np.linalg.solve(gramian, goal)
least = goal @ weights

STEPS = 160
times = np.linspace(0, T, STEPS + 1)
exact = np.array([B @ expm(rows.T * (T - t)) @ weights for t in times])
half, values = least_effort(2, STEPS // 2)[1], least_effort(2, STEPS)
best, effort = values
limit = (4 * effort - half) / 3
print(f"effort {effort:.6f}, extrapolated {limit:.6f}, by the Gramian {least:.6f}")
assert abs(limit / least - 1) < 1e-5
# As above, the first and the last value are off in first order.
assert np.abs(best - exact).max() < 4 * np.abs(exact).max() / STEPS

linear = 2 * 6 * D / T**2 * (1 - 2 * times / T)
paths = {}
for name, force in (("linear force", linear), ("least effort", best)):
    with torch.no_grad():
        paths[name] = move(make_push(torch.tensor(force)), 2, STEPS)
at_rest = {
    name: max((x[-1] - D).abs().max().item(), p[-1].abs().max().item())
    for name, (x, p) in paths.items()
}
print("missed at the end:", at_rest)
assert at_rest["least effort"] < 1e-9
assert at_rest["linear force"] > 0.05

fig, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
axes[0].plot(times, best, label="least effort")
axes[0].plot(times[::8], exact[::8], "k.", label="by the Gramian")
axes[0].plot(times, linear, color="0.6", ls="--", label="linear")
axes[0].set(xlabel="time", ylabel="force", title="force on the first mass")
axes[0].legend(fontsize="small")
for ax, (name, (x, _)) in zip(axes[1:], paths.items(), strict=True):
    ax.plot(times, x[:, 0], label="first mass")
    ax.plot(times, x[:, 1], label="second mass")
    ax.axhline(D, color="k", ls=":", lw=1)
    ax.set(xlabel="time", ylabel="displacement", title=name)
    ax.legend(fontsize="small")
plt.show()

# %%
# The movement
# ------------
#
# Above the linear force, below the least effort. The line from the first mass is the
# force.

fig, axes = plt.subplots(2, 1, figsize=(6.4, 3.2), layout="constrained", sharex=True)
drawn = []
for ax, name, force in zip(axes, paths, (linear, best), strict=True):
    ax.axvline(D, color="k", ls=":", lw=1)
    ax.axvline(D - LENGTH, color="k", ls=":", lw=1)
    ax.set(xlim=(-1.8, 3.2), ylim=(-1, 1), yticks=[], title=name)
    (spring,) = ax.plot([], [], color="0.6", lw=2)
    (arrow,) = ax.plot([], [], color="C3", lw=3)
    (bodies,) = ax.plot([], [], "o", ms=16, color="C0")
    drawn.append((paths[name][0].numpy(), force, spring, arrow, bodies))


def draw(frame):
    """Draw the masses, the spring and the force of both runs."""
    for x, force, spring, arrow, bodies in drawn:
        first, second = x[frame, 0], x[frame, 1] - LENGTH
        coils = np.linspace(second, first, 14)
        spring.set_data(coils, 0.15 * np.array([0, *[1, -1] * 6, 0]))
        arrow.set_data([first, first + 0.03 * force[frame]], [0, 0])
        bodies.set_data([second, first], [0, 0])
    fig.suptitle(f"t = {times[frame]:.2f}")
    return bodies


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
movie = FuncAnimation(fig, draw, range(0, STEPS + 1, 5), interval=80)
plt.show()
