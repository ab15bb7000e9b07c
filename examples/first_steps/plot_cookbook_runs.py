"""
Cookbook: runs
==============

Each section is a recipe that checks its result. A recipe needs only the imports and
definitions at the top of this page. Units are reduced, with energies in epsilon,
lengths in sigma and masses in the mass of an atom, except where a recipe states other
units.
"""

# sphinx_gallery_thumbnail_number = 1

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import ase.io
import matplotlib.pyplot as plt
import torch
from ase import units
from torch import nn

import adjsim
from adjsim.potentials import NOBLE_GASES

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # these systems are too small to share between threads

# Four atoms near the minimum of their energy, and small momenta.
corners = [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
TETRAHEDRON = 0.85 * torch.tensor(corners)
MOMENTA = 0.3 * torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
MOMENTA -= MOMENTA.mean(0)


def parameter(value):
    return nn.Parameter(torch.tensor(value))


# %%
# From a structure file to a gradient
# -----------------------------------
#
# ASE reads the file, here liquid argon in a periodic box, and gives the units: eV,
# angstrom and amu. The gradient of the temperature after 400 fs is taken with respect
# to the parameters of the pair potential. A difference quotient checks the derivative
# with respect to sigma. The step of the quotient is small, because the force jumps
# where a pair crosses the cutoff, and a longer step would change which pairs cross.

atoms = ase.io.read(
    Path(adjsim.__file__).parents[1] / "examples" / "data" / "argon.xyz"
)
gas, edges = NOBLE_GASES["Ar"], torch.tensor(atoms.cell.lengths())
epsilon, sigma = parameter(gas.kelvin * units.kB), parameter(gas.angstrom)
argon = adjsim.Hamiltonian(
    adjsim.LennardJones(epsilon, sigma, cutoff=float(edges.min()) / 2, box=edges),
    mass=torch.tensor(atoms.get_masses()),
)
position = torch.tensor(atoms.get_positions())
momentum = argon.thermal_momentum(position, 85.0 * units.kB, generator=0)
start = argon.init(position, momentum - momentum.mean(0))  # the masses are equal


def kelvin():
    run = adjsim.simulate(
        argon,
        start,
        [0.0, 400 * units.fs],
        solver=adjsim.VelocityVerlet(4 * units.fs),
        adjoint=adjsim.ReversibleAdjoint(),
    )
    dof = 3 * len(atoms) - 3
    return adjsim.kinetic_temperature(run.final.momentum, argon.mass, dof) / units.kB


value = kelvin()
value.backward()
h, around = 1e-6, []
for shift in (h, -2 * h):
    with torch.no_grad():
        sigma += shift
        around.append(kelvin().item())
quotient = (around[0] - around[1]) / (2 * h)
print(
    f"{atoms.get_chemical_formula()}: {value.item():.2f} K after 400 fs, d/d epsilon "
    f"{epsilon.grad.item() / 1000:.3f} K/meV, d/d sigma {sigma.grad.item():.3f} "
    f"K/angstrom, by differences {quotient:.3f}"
)
assert abs(quotient / sigma.grad.item() - 1) < 1e-4

# %%
# Choosing dt
# -----------
#
# The energy of velocity Verlet oscillates with an amplitude proportional to dt squared
# and does not drift. A drift, or an amplitude that grows faster, means that dt is too
# large. The gradient has an error of the same order, so the change of the gradient on
# halving dt is three quarters of the error before halving. Choose the largest dt at
# which the errors of the energy and of the gradient are both small enough. The gradient
# here is the gradient of the radius of gyration with respect to sigma.

STEPS = [0.04, 0.02, 0.01, 0.005, 0.0025]
sigma = parameter(1.0)
newton = adjsim.Hamiltonian(adjsim.LennardJones(sigma=sigma))
energies, gradients = {}, {}
for dt in STEPS:
    run = adjsim.simulate(
        newton,
        newton.init(TETRAHEDRON, MOMENTA),
        torch.linspace(0, 2, round(2 / dt) + 1),
        solver=adjsim.VelocityVerlet(dt),
        adjoint=adjsim.ReversibleAdjoint(),
        record=newton.invariant,
    )
    energies[dt] = (run.record - run.record[0]).detach()
    size = adjsim.radius_of_gyration(run.final.position)
    gradients[dt] = torch.autograd.grad(size, sigma)[0].item()

amplitude = [energies[dt].abs().max().item() for dt in STEPS]
change = [abs(gradients[dt] - gradients[half]) for dt, half in pairwise(STEPS)]
fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for dt in STEPS[:3]:
    times = torch.linspace(0, 2, len(energies[dt]))
    axes[0].plot(times, energies[dt], label=f"dt = {dt:g}")
axes[0].set(
    xlabel="time (reduced units)",
    ylabel="energy - initial energy (epsilon)",
    title="energy along the run",
)
axes[0].legend()
axes[1].loglog(STEPS, amplitude, "o-", label="largest energy error / epsilon")
axes[1].loglog(STEPS[:-1], change, "s-", label="change of the gradient on halving dt")
line = [amplitude[-1] * (dt / STEPS[-1]) ** 2 for dt in STEPS]
axes[1].loglog(STEPS, line, "k:", lw=1, label="slope 2")
axes[1].set(
    xlabel="dt (reduced units)", ylabel="error (no unit)", title="errors against dt"
)
axes[1].set_xticks(STEPS, [f"{dt:g}" for dt in STEPS])
axes[1].set_xticks([], minor=True)
axes[1].set_ylim(top=10)  # room for the legend
axes[1].legend(loc="upper left", fontsize="small")
plt.show()

for name, errors in (("energy", amplitude), ("gradient", change)):
    ratios = [coarse / fine for coarse, fine in pairwise(errors)]
    print(f"{name}: halving dt divides the error by", [f"{r:.2f}" for r in ratios])
    assert abs(ratios[-1] - 4) < 0.2

# %%
# Many replicas in one batch
# --------------------------
#
# A leading axis of the start is an axis of replicas, and all replicas take each step
# together. One backward pass gives the gradient of the mean over replicas, both with
# respect to a parameter and with respect to the start of each replica.

k = parameter(1.0)
langevin = adjsim.Langevin(adjsim.Harmonic(k), kT=1.0, friction=1.0)
for replicas in (1, 10_000):
    generator = torch.Generator().manual_seed(0)
    start = langevin.init(torch.ones(replicas, 1, 1), generator=generator)
    start = start._replace(position=start.position.requires_grad_())
    begun = time.perf_counter()
    run = adjsim.simulate(
        langevin,
        start,
        [0.0, 5.0],
        solver=adjsim.BAOAB(0.05),
        adjoint=adjsim.ReversibleAdjoint(),
        generator=generator,
    )
    mean = (run.final.position**2).mean()
    slope, *own = torch.autograd.grad(mean, (k, start.position))
    seconds = time.perf_counter() - begun
    print(
        f"{replicas:6d} replicas in {seconds:.2f} s: mean {mean.item():.3f}, gradient "
        f"{slope.item():.3f}, gradients of starts {tuple(own[0].shape)}"
    )
assert abs(slope.item() + 1) < 0.05  # at equilibrium <q^2> = kT/k

# %%
# Saving and resuming
# -------------------
#
# A state is a named tuple of tensors, which ``torch.load`` also reads with
# ``weights_only=True``. The noise is a function of the seed and of the step within the
# run. So split a long run with noise into segments, each with its own seed. A run
# resumed from a file then equals the uninterrupted run bit for bit. Without noise, two
# runs in a row equal one long run bit for bit.

langevin = adjsim.Langevin(adjsim.LennardJones(), kT=0.1, friction=1.0)


def segment(number, state):
    run = adjsim.simulate(
        langevin,
        state,
        [number, number + 1],
        solver=adjsim.BAOAB(0.01),
        generator=number,
    )
    return run.final


state = langevin.init(TETRAHEDRON, generator=0)
with tempfile.TemporaryDirectory() as folder:
    checkpoint = Path(folder) / "checkpoint.pt"
    for number in range(4):
        state = segment(number, state)
        if number == 1:
            torch.save({"done": 2, "state": state}, checkpoint)
    saved = torch.load(checkpoint, weights_only=True)
resumed = saved["state"]
for number in range(saved["done"], 4):
    resumed = segment(number, resumed)
assert all(torch.equal(a, b) for a, b in zip(resumed, state, strict=True))

newton = adjsim.Hamiltonian(adjsim.LennardJones())


def newton_run(state, begin, end):
    verlet = adjsim.VelocityVerlet(0.01)
    return adjsim.simulate(newton, state, [begin, end], solver=verlet).final


start = newton.init(TETRAHEDRON, MOMENTA)
halves = newton_run(newton_run(start, 0.0, 1.0), 1.0, 2.0)
whole = newton_run(start, 0.0, 2.0)
assert all(torch.equal(a, b) for a, b in zip(halves, whole, strict=True))
print("resumed runs equal uninterrupted runs bit for bit")

# %%
# float32
# -------
#
# A run has the dtype of its start, and the parameters are cast to this dtype. In
# float32 the rounding error of the reversed steps comes near the default tolerance of
# 1e-6, so give a larger ``tol``. The gradient arrives in the dtype of the parameter.

sigma = parameter(1.0)
newton = adjsim.Hamiltonian(adjsim.LennardJones(sigma=sigma))


def gradient_in(dtype):
    run = adjsim.simulate(
        newton,
        newton.init(TETRAHEDRON.to(dtype), MOMENTA.to(dtype)),
        [0.0, 1.0],
        solver=adjsim.VelocityVerlet(0.01),
        adjoint=adjsim.ReversibleAdjoint(tol=1e-3),
    )
    assert run.final.position.dtype == dtype
    size = adjsim.radius_of_gyration(run.final.position)
    (gradient,) = torch.autograd.grad(size, sigma)
    return gradient.item(), run.stats["reconstruction_error"]


for dtype in (torch.float64, torch.float32):
    value, error = gradient_in(dtype)
    print(f"{dtype}: gradient {value:.8f}, reconstruction error {error:.1e}")
assert abs(value / gradient_in(torch.float64)[0] - 1) < 1e-4
