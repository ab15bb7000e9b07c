"""
The adjoint against backpropagation
===================================

To get the gradient of a simulation, one can write the integrator in PyTorch and call
``backward()``. The result is right, but every step stays in memory. This example first
writes such a loop by hand and counts its memory. Then the four adjoints of the library
compute the gradient of the same observable.

The system is a block of 32 Lennard-Jones atoms in free space, in reduced units:
energies in epsilon, lengths in sigma, masses in the mass of an atom. The observable is
the radius of gyration at the end of the run. Its gradient is taken with respect to
epsilon and sigma, which act through the force of every step.
"""

# sphinx_gallery_thumbnail_number = 1

import time
import weakref

import matplotlib.pyplot as plt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a few dozen atoms are too few to share between threads

DT = 0.005
TEMPERATURE = 0.1
epsilon, sigma = (torch.nn.Parameter(torch.tensor(1.0)) for _ in range(2))
dynamics = adjsim.Hamiltonian(adjsim.LennardJones(epsilon, sigma))

# The start: two by two by two cells of a face-centred cubic lattice, and thermal
# momenta that add up to zero.
cells = torch.cartesian_prod(*[torch.arange(2.0)] * 3)
basis = torch.tensor(
    [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]
)
position = 1.55 * (cells[:, None] + basis).reshape(1, 32, 3)
momentum = dynamics.thermal_momentum(
    position, torch.tensor(TEMPERATURE), torch.Generator().manual_seed(0)
)
start = dynamics.init(position, momentum - momentum.mean(-2, keepdim=True))

# %%
# Backpropagation by hand
# -----------------------
#
# The loop needs a pair energy, its force by automatic differentiation, and velocity
# Verlet. ``create_graph=True`` lets the final ``backward()`` pass through the forces.

i, j = torch.triu_indices(32, 32, offset=1)


def by_hand(steps):
    """Return the radius of gyration after a number of steps."""

    def force(q):
        x = (sigma**2 / ((q[i] - q[j]) ** 2).sum(-1)) ** 3
        energy = (4 * epsilon * x * (x - 1)).sum()
        return -torch.autograd.grad(energy, q, create_graph=True)[0]

    q, p = position[0].clone().requires_grad_(), start.momentum[0]
    current_force = force(q)
    for _ in range(steps):
        p = p + DT / 2 * current_force
        q = q + DT * p
        current_force = force(q)
        p = p + DT / 2 * current_force
    return adjsim.radius_of_gyration(q)


# %%
# Counting memory
# ---------------
#
# Every operation passes through a dispatch mode, forward and backward. The mode adds
# the size of each new storage to a count and subtracts it when the storage is freed. So
# the peak is the largest size of all tensors alive at one time. It is exact to the byte
# and leaves out the interpreter and the allocator.


class TensorMemory(TorchDispatchMode):
    """Records the peak of the bytes in live tensors that were made inside this mode."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.alive:
                    self.alive.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.free, key, size)
        return out

    def free(self, key, size):
        self.alive.discard(key)
        self.now -= size


def peak_memory(run):
    """Return the peak memory of ``run()`` and of the gradient of its result, and that
    gradient.
    """
    with TensorMemory() as memory:
        gradient = torch.autograd.grad(run(), (epsilon, sigma))
    return memory.peak, torch.stack(gradient)


# %%
# Four adjoints
# -------------
#
# A run of the library is one call. The first three adjoints differentiate the discrete
# steps. :class:`~adjsim.BacksolveAdjoint` differentiates the exact flow, so it takes an
# ODE solver with a tight tolerance.

verlet = adjsim.VelocityVerlet(DT)
methods = {
    "direct": (verlet, adjsim.DirectAdjoint()),
    "checkpoint": (verlet, adjsim.CheckpointAdjoint()),
    "reversible": (verlet, adjsim.ReversibleAdjoint()),
    "backsolve": (
        adjsim.ODESolver("dopri5", rtol=1e-7, atol=1e-9),
        adjsim.BacksolveAdjoint(),
    ),
}


def by_library(name, steps):
    solver, adjoint = methods[name]
    trajectory = adjsim.simulate(
        dynamics, start, [0.0, steps * DT], solver=solver, adjoint=adjoint
    )
    return adjsim.radius_of_gyration(trajectory.final.position).sum()


counts = [50, 100, 200]
peaks, gradients = {}, {}
for steps in counts:
    peaks["hand-written loop", steps], gradients["hand-written loop", steps] = (
        peak_memory(lambda n=steps: by_hand(n))
    )
    for name in methods:
        peaks[name, steps], gradients[name, steps] = peak_memory(
            lambda m=name, n=steps: by_library(m, n)
        )

markers = {
    "hand-written loop": "v",
    "direct": "o",
    "checkpoint": "s",
    "reversible": "D",
    "backsolve": "^",
}
colours = {name: f"C{k}" for k, name in enumerate(markers)}
fig, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
for name, marker in markers.items():
    ax.loglog(
        counts,
        [peaks[name, n] / 1e6 for n in counts],
        marker=marker,
        color=colours[name],
        mfc="none",
        label=name,
    )
ax.set(
    xlabel="steps (for backsolve: the same length of time)",
    ylabel="peak of live tensors / MB",
)
ax.set_xticks(counts, [str(n) for n in counts])
ax.set_xticks([], minor=True)
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %%
# The memory of backpropagation grows in proportion to the number of steps, both in the
# hand-written loop and with the direct adjoint. The direct adjoint takes far less for
# each step: the operator that evaluates pairs keeps positions and momenta, while the
# loop above keeps the intermediate values of every pair. The memory of the checkpoint
# adjoint grows at most as the square root of the number of steps. The memory of the
# reversible adjoint and of backsolve does not grow.


def growth(name):
    """Return the growth of the peak over the last doubling of the steps."""
    return peaks[name, counts[-1]] / peaks[name, counts[-2]]


for name in markers:
    print(
        f"{name:18} {peaks[name, counts[-1]] / 1e6:6.2f} MB at {counts[-1]} steps, "
        f"grows by {growth(name):.2f} on doubling"
    )
assert abs(growth("hand-written loop") - 2) < 0.1
assert abs(growth("direct") - 2) < 0.1
assert growth("checkpoint") < 2**0.5
assert growth("reversible") < 1.01
assert growth("backsolve") < 1.01

# %%
# The gradients of direct, checkpoint and reversible equal the hand-written gradient to
# rounding. The instability of the system amplifies rounding errors, so the tolerance is
# far above the sixteenth digit.

for (name, steps), gradient in gradients.items():
    if name != "backsolve":
        torch.testing.assert_close(
            gradient, gradients["hand-written loop", steps], rtol=1e-10, atol=0
        )

# %%
# Gradient and time
# -----------------
#
# The same call is now made for five lengths of the run. The forward and the backward
# pass of each call are timed together.

horizons = range(40, 201, 40)
seconds, curve = {}, {}
for name in methods:
    torch.autograd.grad(
        by_library(name, 1), (epsilon, sigma)
    )  # the first call also pays for loading code
    for steps in horizons:
        begun = time.perf_counter()
        curve[name, steps] = torch.stack(
            torch.autograd.grad(by_library(name, steps), (epsilon, sigma))
        )
        seconds[name, steps] = time.perf_counter() - begun

fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.4), layout="constrained")
for size, name in zip((10, 7.5, 5, 7), methods, strict=True):
    style = {
        "marker": markers[name],
        "color": colours[name],
        "ms": size,
        "mfc": "none",
        "label": name,
    }
    at = [n * DT for n in horizons]
    axes[0].plot(at, [curve[name, n][0] for n in horizons], **style)
    axes[1].plot(at, [curve[name, n][1] for n in horizons], **style)
    axes[2].plot(at, [seconds[name, n] for n in horizons], **style)
axes[0].set(
    ylabel="d(radius of gyration)/d epsilon", title="gradient with respect to epsilon"
)
axes[1].set(
    ylabel="d(radius of gyration)/d sigma", title="gradient with respect to sigma"
)
axes[2].set(ylabel="forward and backward / s", title="time", ylim=(0, None))
for ax in axes:
    ax.set(xlabel="horizon (reduced units)", xlim=(0, None))
axes[2].legend()
plt.show()

# %%
# A comparison
# ------------
#
# :func:`adjsim.compare` runs estimators on the same starts and prints their results and
# costs. The printed memory is the growth of the resident set of the process. This
# number is good to about a megabyte, so it is coarser than the count above.

observable = adjsim.Final(lambda state: adjsim.radius_of_gyration(state.position))


def compared(solver, names, steps):
    """Compare some of the adjoints, with one solver."""
    simulation = adjsim.Simulation(
        dynamics, lambda replicas, generator: start, [0.0, steps * DT], solver=solver
    )
    estimators = {name: adjsim.Pathwise(methods[name][1]) for name in names}
    return adjsim.compare(simulation, observable, estimators, replicas=1)


discrete = compared(verlet, ["direct", "checkpoint", "reversible"], 100)
continuous = compared(methods["backsolve"][0], ["backsolve"], 100)
comparison = adjsim.Comparison(
    {**discrete.estimates, **continuous.estimates}, reference="direct"
)
print(comparison)
assert comparison.difference("checkpoint") < 1e-10
assert comparison.difference("reversible") < 1e-10

# %%
# The gradient of the continuous adjoint
# --------------------------------------
#
# Backsolve gives the gradient of the exact flow. It differs from the other gradients by
# the discretisation error of velocity Verlet, which is of second order: halving the
# step divides the difference by four.

exact = continuous.estimates["backsolve"].grad["potential.sigma"]
coarse = discrete.estimates["reversible"].grad["potential.sigma"]
finer = compared(adjsim.VelocityVerlet(DT / 2), ["reversible"], 100)
fine = finer.estimates["reversible"].grad["potential.sigma"]
ratio = float((coarse - exact) / (fine - exact))
print(
    f"difference at dt {float(coarse - exact):.2e}, at dt/2 "
    f"{float(fine - exact):.2e}, ratio {ratio:.2f}"
)
# The next term of the error is smaller by a factor of order dt^2. A margin of a tenth
# covers this term and the tolerances of the ODE solver.
assert abs(ratio - 4) < 0.4
