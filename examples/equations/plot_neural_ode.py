r"""
A neural ODE on a spiral
========================

A neural ODE is a differential equation whose right-hand side is a network,
:math:`\dot y = f_\theta(t, y)` (Chen, Rubanova, Bettencourt and Duvenaud 2018). This
page fits one to the spiral of the example of torchdiffeq,

.. math:: \dot y = A^T y^3, \qquad A = \begin{pmatrix} -0.1 & 2 \\ -2 & -0.1
   \end{pmatrix}, \qquad y(0) = (2, 0),

with the cube of each entry. It shows that training with this library, torchdiffeq and
diffrax is the same training, step for step, and what a gradient costs in each. Then it
compares the gradients that one run has under different adjoints.

The training of 3,000 steps, diffrax, and the measurements of time and memory come from
a stored study, ``examples/data/make_neural_ode.py``. This page computes a part of it
again.
"""

# sphinx_gallery_thumbnail_number = 1

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torchdiffeq
from torch import nn

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a small network

FILE = "examples/data/neural_ode.json"
study = json.loads((Path(adjsim.__file__).parents[1] / FILE).read_text())
SETTINGS, TRAINED = study["settings"], study["training"]["found"]
DT, STEPS, BATCH, HORIZON = (SETTINGS[k] for k in ("dt", "steps", "batch", "horizon"))
made = study["training"]["commit"][:10]
print(f"{study['made_by']}, commit {made}, seed {SETTINGS['seed']}")
print(", ".join(f"{name} {version}" for name, version in study["versions"].items()))

# %%
# The spiral and the network
# --------------------------
#
# An :class:`~adjsim.ODE` takes any function of time and state, so a network is a
# dynamics as it is. What torchdiffeq calls ``rk4`` is the 3/8 rule of Kutta, not the
# classical method. :class:`~adjsim.RungeKutta` takes its coefficients as a
# :class:`~adjsim.Tableau`.

A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
RULE = adjsim.Tableau(
    [[], [1 / 3], [-1 / 3, 1], [1, -1, 1]], [1 / 8, 3 / 8, 3 / 8, 1 / 8]
)
STEPPER, DIRECT = adjsim.RungeKutta(RULE, DT), adjsim.DirectAdjoint()


class Network(nn.Module):
    """Two layers, of the cubes of y as in the example of torchdiffeq."""

    def __init__(self):
        super().__init__()
        width = SETTINGS["width"]
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
        for layer in self.layers[::2]:
            nn.init.normal_(layer.weight, std=0.1)
            nn.init.zeros_(layer.bias)

    def forward(self, t, y):
        return self.layers(y**3)


def solve(field, start, times, solver=STEPPER, adjoint=DIRECT):
    dynamics = adjsim.ODE(field)
    start = dynamics.init(start)
    return adjsim.simulate(dynamics, start, times, solver=solver, adjoint=adjoint).y


def spiral(t, y):
    return y**3 @ A


times = torch.arange(STEPS + 1) * DT
with torch.no_grad():
    path = solve(spiral, [2.0, 0.0], times)
    again = torchdiffeq.odeint(spiral, torch.tensor([2.0, 0.0]), times, method="rk4")
difference = float((path - again).abs().max())
print(f"a method of order {RULE.order}; paths differ by {difference:.0e}")
# The sums of a step are ordered differently, and the spiral contracts.
assert difference < 1e-12

# %%
# The same training in three libraries
# ------------------------------------
#
# The loss is the mean squared distance from the data over ten steps, from twenty
# points of the spiral. Network, batches and optimiser are the same for all three. The
# first 40 steps are trained again here; the study has 300 for each library.


def train(solve, count):
    """Return the losses of the first steps of the training."""
    torch.manual_seed(SETTINGS["seed"])
    net = Network()
    optimiser = torch.optim.Adam(net.parameters(), lr=SETTINGS["rate"])
    generator = torch.Generator().manual_seed(SETTINGS["seed"] + 1)
    losses = []
    for _ in range(count):
        first = torch.randperm(STEPS - HORIZON, generator=generator)[:BATCH]
        target = torch.stack([path[first + step] for step in range(HORIZON + 1)])
        optimiser.zero_grad()
        found = solve(net, path[first], times[: HORIZON + 1])
        loss = (found - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return np.array(losses)


def torchdiffeq_solve(net, start, times):
    return torchdiffeq.odeint(net, start, times, method="rk4")


ours, theirs = train(solve, 40), train(torchdiffeq_solve, 40)
stored = {name: np.array(losses) for name, losses in TRAINED["losses"].items()}
apart = {
    "torchdiffeq, here": np.abs(theirs / ours - 1).max(),
    "torchdiffeq, study": np.abs(stored["torchdiffeq"] / stored["adjsim"] - 1).max(),
    "diffrax, study": np.abs(stored["diffrax"] / stored["adjsim"] - 1).max(),
    "this page and the study": np.abs(stored["adjsim"][:40] / ours - 1).max(),
}
for name, difference in apart.items():
    print(f"{name}: losses differ by {difference:.0e} at most, relatively")
# Rounding of 1e-16, which training amplifies in 300 steps by a factor that depends on
# the batches.
assert max(apart.values()) < 1e-8

# %%
# What was learnt
# ---------------
#
# The study went on for 3,000 steps, with a learning rate that falls to zero. The page
# takes its network and predicts 25 steps from each of 40 points of the spiral. It was
# fitted to ten steps, so the error of its phase adds up over the whole spiral.

net = Network()
net.load_state_dict({k: torch.tensor(x) for k, x in TRAINED["network"].items()})
with torch.no_grad():
    whole = solve(net, [2.0, 0.0], times)
    learnt = solve(net, path[:-1:25], times[:26]).transpose(0, 1)
    rate, true_rate = net(None, path), spiral(None, path)
pieces = path[:-1].unflatten(0, (40, 25))


def relative(x, y):
    return float((x - y).norm() / y.norm())


piece_error, whole_error = relative(learnt[:, :-1], pieces), relative(whole, path)
rate_error = relative(rate, true_rate)
print(
    f"relative errors: 25 steps {piece_error:.3f}, 1,000 steps {whole_error:.2f}, the "
    f"field on the spiral {rate_error:.3f}"
)
# The network has 252 numbers, and the field is a few per cent off.
assert piece_error < 0.1
assert rate_error < 0.05

side = torch.linspace(-2.1, 2.1, 22)
points = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
with torch.no_grad():
    arrows = net(None, points)
arrows = arrows / (arrows.norm(dim=-1, keepdim=True) + 0.2)
fig, (plane, curves) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
plane.quiver(*points.unbind(-1), *arrows.unbind(-1), color="0.75", scale=32)
plane.plot(*path.T, color="k", lw=2.5, alpha=0.35, label="spiral")
for k, piece in enumerate(learnt):
    label = "neural ODE, pieces of 25 steps" if k == 0 else None
    plane.plot(*piece.T, color="C3", lw=1, label=label)
plane.set(xlabel="$y_1$", ylabel="$y_2$", aspect="equal")
plane.set_title("the learnt field and its paths", fontsize="medium")
plane.legend(loc="upper right")
for width, (name, losses) in zip((5, 3, 1), stored.items(), strict=True):
    label = f"{name}, {TRAINED['milliseconds'][name]:.1f} ms a step"
    curves.semilogy(losses, lw=width, alpha=0.35 if width > 1 else 1, label=label)
curves.set(xlabel="training step", ylabel="loss")
curves.set_title("the same training three times", fontsize="medium")
curves.legend()
plt.show()

# %%
# Eager torch takes most of its time between operations on such small tensors, and JAX
# compiles the whole step. The times are the fastest tenth of the training steps of the
# study, one thread, without compilation.
#
# A known answer
# --------------
#
# If the network has the form of the field, a linear map of the cubes, then the loss has
# its minimum of zero at :math:`A` exactly, because the data were made by the same
# steps. L-BFGS must find it.


class Cubes(nn.Module):
    """A linear map of the cubes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))

    def forward(self, t, y):
        return y**3 @ self.weight


linear = Cubes()
starts = torch.arange(0, STEPS - HORIZON, 50)
target = torch.stack([path[starts + step] for step in range(HORIZON + 1)])
lbfgs = torch.optim.LBFGS(
    linear.parameters(),
    max_iter=50,
    tolerance_grad=1e-14,
    tolerance_change=1e-16,
    line_search_fn="strong_wolfe",
)


def closure():
    lbfgs.zero_grad()
    found = solve(linear, path[starts], times[: HORIZON + 1])
    loss = (found - target).square().mean()
    loss.backward()
    return loss


lbfgs.step(closure)
found = linear.weight.detach()
print(f"found {found.tolist()}; error {float((found - A).abs().max()):.0e}")
# The loss is quadratic near its minimum, and L-BFGS stops at a loss of about 1e-16.
assert (found - A).abs().max() < 1e-6

# %%
# One gradient from different adjoints
# ------------------------------------
#
# The scalar is the squared distance of the learnt path from the origin after 200 steps.
# Checkpoints give the gradient of direct backpropagation. A Runge-Kutta step has no
# inverse, but :class:`~adjsim.Coupled` steps of the same method have one, and on a
# lattice (``exact=True``) it is exact. :class:`~adjsim.ReversibleAdjoint` then gives
# the gradient of these steps without storing states. The coupled steps are another
# discretisation, of the same order, so their gradient differs from that of the plain
# steps as the steps themselves do.


def gradient(solver, adjoint):
    end = solve(net, [2.0, 0.0], [0.0, 200 * DT], solver, adjoint)[-1]
    found = torch.autograd.grad(end.square().sum(), list(net.parameters()))
    return torch.cat([g.flatten() for g in found])


coupled = adjsim.Coupled(RULE, DT, exact=True)
gradients = {
    (type(solver).__name__, type(adjoint).__name__): gradient(solver, adjoint)
    for solver, adjoint in (
        (STEPPER, DIRECT),
        (STEPPER, adjsim.CheckpointAdjoint()),
        (coupled, adjsim.CheckpointAdjoint()),
        (coupled, adjsim.ReversibleAdjoint()),
    )
}
plain, checkpointed, copied, reversed_ = gradients.values()
exact = gradient(adjsim.ODESolver(rtol=1e-12, atol=1e-12), DIRECT)
discretisation = relative(plain, exact)
print(
    f"checkpoints and direct differ by {relative(checkpointed, plain):.0e}, reversible "
    f"and checkpoints on coupled steps by {relative(reversed_, copied):.0e}; the steps "
    f"themselves cost {discretisation:.0e} (plain) and {relative(copied, exact):.0e}"
)
# Both sum the same products in other orders.
assert relative(checkpointed, plain) < 1e-12
assert relative(reversed_, copied) < 1e-10

# %%
# The continuous adjoint solves an equation of its own backward in time, and its
# gradient is right only to the tolerance of the two solves. The figure on the left
# shows its error, against the gradient of a solve at a tolerance of 1e-12. The middle
# and the right show memory and time of a gradient by the number of steps, from the
# study, which ran on a busy machine and without ``compile=True``.

tolerances = np.logspace(-3, -9, 4)
errors = []
for tolerance in tolerances:
    solver = adjsim.ODESolver(rtol=tolerance, atol=tolerance)
    errors.append(relative(gradient(solver, adjsim.BacksolveAdjoint()), exact))
print("continuous adjoint: " + ", ".join(f"{x:.0e}" for x in errors))
assert errors[0] > 1e3 * errors[-1]
assert min(errors) > 10 * relative(reversed_, copied)

COLORS = ("C0", "C0", "C0", "C1", "C1", "C2")
STYLES = ("o-", "s--", "^:", "o-", "s--", "s--")
fig, axes = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
axes[0].loglog(tolerances, errors, "kD-", label="continuous adjoint")
axes[0].axhline(discretisation, color="C0", label="Runge-Kutta steps")
axes[0].axhline(relative(copied, exact), color="C0", ls=":", label="coupled steps")
axes[0].invert_xaxis()
axes[0].set(xlabel="tolerance", ylabel="relative error of the gradient")
axes[0].legend(fontsize="small")
LONG, counts = study["long"]["found"], SETTINGS["long_steps"]
for (name, rows), color, style in zip(LONG.items(), COLORS, STYLES, strict=True):
    for ax, key in zip(axes[1:], ("MB", "seconds"), strict=True):
        # Less than one megabyte is below what the measurement resolves.
        values = [max(row[key], 1.0) if key == "MB" else row[key] for row in rows]
        ax.loglog(counts, values, style, color=color, label=name)
axes[1].set(xlabel="steps", ylabel="memory of a gradient (MB)")
axes[2].set(xlabel="steps", ylabel="time of a gradient (s)")
axes[2].legend(fontsize="x-small")
plt.show()

memory = {name: [row["MB"] for row in rows] for name, rows in LONG.items()}
for name, rows in LONG.items():
    row = rows[-1]
    print(
        f"{name:22}: {row['MB']:7.1f} MB, {row['seconds']:5.2f} s, {counts[-1]} steps"
    )
# With four times the steps backpropagation takes at least three times the memory, and
# the reversible gradient no more than the measurement resolves.
for name in ("adjsim, direct", "torchdiffeq, direct"):
    assert memory[name][-1] > 3 * memory[name][-2]
assert memory["adjsim, reversible"][-1] < 5
