"""
Fitting sigma through a trajectory
==================================

The fit seeks one parameter of a force from a trajectory that this force produced. Here
the target comes from the 13-atom Lennard-Jones cluster with a known sigma, and the fit
starts from a wrong sigma. The fit compares pair distances along the two trajectories
and follows the gradient of their mean squared difference.
:class:`~adjsim.ReversibleAdjoint` computes this gradient in memory that does not grow
with the number of steps.

Lengths are in units of the true sigma, energies in epsilon, masses in the mass of an
atom, which fixes the unit of time.
"""

# sphinx_gallery_thumbnail_number = 2

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import minimize

import adjsim
from adjsim.io.systems import cluster

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # thirteen atoms are too few to share between threads

TRUTH, GUESS, DT = 1.0, 1.06, 0.005
position = cluster().position
generator = torch.Generator().manual_seed(3)
momentum = 0.6 * torch.randn(position.shape, generator=generator)
momentum -= momentum.mean(0)


def distances(sigma, horizon, frames=10):
    """Return pair distances at equal intervals along a run, (frames, pairs),
    differentiable in sigma.
    """
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(epsilon=1.0, sigma=sigma))
    trajectory = adjsim.simulate(
        dynamics,
        dynamics.init(position, momentum),
        torch.linspace(0, horizon, frames + 1),
        solver=adjsim.VelocityVerlet(DT),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=True,  # in C++: the scan below takes 153 runs
        record=lambda state: adjsim.pair_distances(state.position),
    )
    return trajectory.record[1:]  # the start is the same for every sigma


def loss(sigma, target, horizon):
    return ((distances(sigma, horizon) - target) ** 2).mean()


# %%
# The loss and the horizon
# ------------------------
#
# The figure shows the square root of the loss for three lengths of the run, from
# forward runs alone. A longer run carries more information on sigma, and its loss is
# steeper near the truth. For the longest run the loss is rugged further away from the
# truth. This is the effect of instability on a fit: the gradient stays right, but its
# direction is useful over a distance that shrinks as the run becomes longer. So the fit
# uses a short run.

HORIZONS = [0.5, 2.0, 8.0]
scan = np.linspace(0.95, 1.05, 51)
with torch.no_grad():
    targets = {horizon: distances(torch.tensor(TRUTH), horizon) for horizon in HORIZONS}
    curves = {
        h: np.sqrt([float(loss(torch.tensor(s), targets[h], h)) for s in scan])
        for h in HORIZONS
    }

fig, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
for horizon, curve in curves.items():
    ax.plot(scan, curve, ".-", label=f"horizon {horizon:g} (reduced units)")
ax.axvline(TRUTH, color="0.7", lw=1, zorder=0)
ax.set(
    xlabel="sigma (units of the true one)",
    ylabel="rms difference of distances\n(units of sigma)",
    ylim=(0, None),
)
ax.legend()
plt.show()

# Near the truth the loss of a longer run is steeper. Only the loss of the longest run
# has valleys other than the one at the truth.
near = [curves[h][26] for h in HORIZONS]
valleys = [int(((c[1:-1] < c[:-2]) & (c[1:-1] < c[2:])).sum()) for c in curves.values()]
print(f"valleys: {valleys}")
assert near == sorted(near)
assert valleys[0] == valleys[1] == 1 < valleys[2]

# %%
# The fit
# -------
#
# Sigma is an ``nn.Parameter``, so the potential keeps it trainable. SciPy's L-BFGS-B
# calls a function that returns the loss and its gradient. The first step of L-BFGS-B
# has no scale, so bounds keep sigma in the range where the cluster holds together.

horizon = HORIZONS[0]
target = targets[horizon]
sigma = torch.nn.Parameter(torch.tensor(GUESS))
history = []


def loss_and_gradient(x):
    with torch.no_grad():
        sigma.copy_(torch.tensor(x[0]))
    value = loss(sigma, target, horizon)
    (gradient,) = torch.autograd.grad(value, sigma)
    history.append((x[0], value.item()))
    return value.item(), np.array([gradient.item()])


found = minimize(
    loss_and_gradient,
    [GUESS],
    jac=True,
    method="L-BFGS-B",
    bounds=[(0.9, 1.1)],
    options={"ftol": 1e-16, "gtol": 1e-10},
)

sigmas, losses = np.array(history).T
fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
axes[0].semilogy(losses, "o-")
axes[0].set(xlabel="evaluation", ylabel="loss (squared length)", title="loss")
axes[1].semilogy(np.abs(sigmas - TRUTH), "o-", color="C1")
axes[1].set(
    xlabel="evaluation",
    ylabel="|sigma - truth|",
    title="error of sigma (units of the true one)",
)
for ax in axes:
    ax.set_xticks(range(0, len(history), 2))
plt.show()

# %%
# The fit recovers the true sigma. The target has no noise, and the model that made the
# target is the model of the fit, so only rounding and the optimiser limit the
# precision.

print(f"sigma = {found.x[0]:.10f} after {len(history)} evaluations")
assert abs(found.x[0] - TRUTH) < 1e-7

# %%
# The gradient itself
# -------------------
#
# At the first guess the gradient agrees with a central difference. The loss has a large
# third derivative there, so the difference quotient has an error of its own, of the
# order of the square of the step times this derivative. The check asks for six digits.

h = 1e-5
with torch.no_grad():
    up, down = (loss(torch.tensor(GUESS + s * h), target, horizon) for s in (1, -1))
guess = torch.nn.Parameter(torch.tensor(GUESS))
loss(guess, target, horizon).backward()
quotient = float(up - down) / (2 * h)
print(f"adjoint {float(guess.grad):.10f}, central difference {quotient:.10f}")
assert abs(float(guess.grad) / quotient - 1) < 1e-6
