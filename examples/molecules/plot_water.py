r"""
Flexible water: structure, diffusion, and their gradients
=========================================================

SPC/Fw is a flexible three-site water (Wu, Tepper and Voth, J. Chem. Phys. 124, 024503
(2006)). This page takes 216 of its molecules, with particle-mesh Ewald, at 298 K and
the density of water. How do the distribution of distances between oxygens, g(r), and
the diffusion coefficient D change with the charges and the Lennard-Jones numbers?

g(r) is an equilibrium mean. Its gradient is a covariance over frames, which
:class:`~adjsim.Reweighting` computes. D is a property of paths. No equilibrium
estimator gives its gradient, and the gradient along paths is of use only until
neighbouring paths have moved apart. The page shows both with numbers.

Units are eV, angstrom and picoseconds. Long runs were computed before, by
``examples/data/make_water_study.py``. The page reads their results, called *stored*
below, and computes short runs itself.
"""

# sphinx_gallery_thumbnail_number = 2

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import openmm
import openmm.app as app
import torch
from ase import units
from openmm import unit

import adjsim
from adjsim.io import from_openmm

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a small system

DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"
STUDY = json.loads((DATA / "water_study.json").read_text())
SETTINGS = STUDY["settings"]
PS, KT = 1000 * units.fs, SETTINGS["kT (eV)"]
for name in ("structure", "kinetics", "paths", "differences"):
    made = STUDY[name]
    print(f"{name}: commit {made['commit'][:10]}, seed {made['seed']}")
print(f"{made['made_by']}, {made['versions']}")

# %%
# The model
# ---------
#
# OpenMM builds the system from the file of the force field, and
# :func:`~adjsim.io.from_openmm` reads it. The Lennard-Jones energy is switched off
# smoothly between 8 and 9 angstrom, since the gradient of a path misses jumps of the
# force. The box has the density of water at 25 degrees, 0.99705 g/cm³.
#
# The page looks at three numbers: a factor of all charges, so that molecules stay
# neutral, and epsilon and sigma of oxygen. Derivatives are with respect to their
# logarithms.

pdb = app.PDBFile(str(DATA / "water.pdb"))
grams = 216 * (15.9994 + 2 * 1.008) / units.mol * 1e24
edge = (grams / SETTINGS["density (g/cm^3)"]) ** (1 / 3)
pdb.topology.setUnitCellDimensions(3 * [edge / 10] * unit.nanometer)
system = app.ForceField(str(DATA / "spcfw.xml")).createSystem(
    pdb.topology,
    nonbondedMethod=app.PME,
    nonbondedCutoff=0.9 * unit.nanometer,
    constraints=None,
    rigidWater=False,
)
for force in system.getForces():
    if isinstance(force, openmm.NonbondedForce):
        force.setUseSwitchingFunction(True)
        force.setSwitchingDistance(0.8 * unit.nanometer)
states = torch.tensor(STUDY["structure"]["states"])
potential, water = from_openmm(system, states[0].numpy() / 10, pdb.topology)
numbers = {
    "charges": potential.coulomb.charge,
    "epsilon": potential.lennard_jones.epsilon,
    "sigma": potential.lennard_jones.sigma,
}
PARAMETERS = [
    f"potential.{name}"
    for name in ("coulomb.charge", "lennard_jones.epsilon", "lennard_jones.sigma")
]
for parameter in potential.parameters():
    parameter.requires_grad_(any(parameter is x for x in numbers.values()))
print(f"{len(water.mass)} atoms in a box of {edge:.3f} angstrom")
print(f"charges {potential.coulomb.charge[:3].tolist()}")
print(
    f"epsilon {numbers['epsilon'][0]:.6f} eV, sigma {numbers['sigma'][0]:.4f} angstrom"
)


def in_logarithms(gradients):
    """Return derivatives with respect to the logarithms of the three numbers.

    The numbers of oxygen come first, and hydrogens have no Lennard-Jones energy.
    """
    charge, *rest = gradients
    first = (charge * numbers["charges"].detach()).sum(-1)
    pairs = zip(rest, list(numbers.values())[1:], strict=True)
    return torch.stack([first, *(g[..., 0] * x.detach()[0] for g, x in pairs)], -1)


# %%
# Structure
# ---------
#
# The stored g(r) is from eight runs of 12 ps with BAOAB, a frame each 0.1 ps. Hydrogens
# have 4 amu there, so that a step of 2 fs is short enough: masses do not change an
# equilibrium distribution. The starts are 6 ps apart on one run in OpenMM. Errors of
# g(r) are from 16 blocks, the halves of the runs.

found = STUDY["structure"]
r, g, error = (np.array(found[key]) for key in ("r", "g", "g error"))
top = slice(max(0, g.argmax() - 2), g.argmax() + 3)
a, b, c = np.polyfit(r[top] - r[g.argmax()], g[top], 2)
peak, height = r[g.argmax()] - b / (2 * a), c - b * b / (4 * a)
print(f"first peak at {peak:.3f} angstrom, height {height:.2f} +- {error.max():.2f}")
dip = r[(r > 3) & (r < 4)][g[(r > 3) & (r < 4)].argmin()]
shell = (r < dip) & (g > 0)
density = 216 / edge**3
neighbours = np.sum(4 * np.pi * r[shell] ** 2 * g[shell]) * (r[1] - r[0]) * density
print(f"{neighbours:.1f} neighbours up to the first minimum, {dip:.2f} angstrom")
assert abs(peak - 2.75) < 0.02
assert 3.0 < height < 3.2
assert 4.0 < neighbours < 4.5

# %%
# The first peak is at 2.75 angstrom with a height of 3.1, and a molecule has 4.2
# neighbours up to the first minimum. X-rays found 2.80(1) angstrom and 2.57(5) (Skinner
# and others, J. Chem. Phys. 138, 074506 (2013)): like other models with three sites,
# this one has more order than water. The kernel of
# :func:`~adjsim.smooth_radial_distribution` is 0.03 angstrom wide here. It is 0.1
# below, for which the peak is lower, but derivatives have smaller errors.

# %%
# The derivative of an equilibrium mean
# -------------------------------------
#
# With the energy U, the derivative of the mean of any function of positions is a
# covariance, which needs no derivative of a path:
#
# .. math:: \frac{\mathrm d\langle g\rangle}{\mathrm d\theta} = -\frac{1}{kT}
#    \operatorname{cov}\left(g, \frac{\partial U}{\partial\theta}\right).
#
# :class:`~adjsim.Reweighting` computes it for any observable. The page runs it from two
# stored states for 40 fs, which is far too short for an answer, and compares the result
# with the covariance of the same frames.

heavy = torch.where(water.mass < 2, 4.0, 15.9994 + 2 * 1.008 - 8)
langevin = adjsim.Langevin(potential, heavy, KT, friction=1 / PS)
step = SETTINGS["step of canonical runs (fs)"] * units.fs
few = torch.tensor([2.75, 3.35, 4.45])


def radial(state):
    """Return g(r) of oxygens at three distances, (systems, 3)."""
    oxygens = state.position[..., ::3, :]
    return adjsim.smooth_radial_distribution(oxygens, few, water.box, width=0.1)


def initial(count, generator):
    return langevin.init(states[:count], generator=generator)


short = adjsim.Simulation(langevin, initial, [0.0, 20 * step], adjsim.BAOAB(step))
estimate = adjsim.Reweighting(every=5 * step)(
    short, adjsim.TimeAverage(radial), replicas=2, chunks=2, generator=1
)
reweighted = in_logarithms([estimate.grad[name] for name in PARAMETERS])

generator = torch.Generator().manual_seed(1)
with torch.no_grad():
    frames = (
        adjsim.simulate(
            langevin,
            initial(2, generator),
            torch.arange(5) * 5 * step,
            solver=adjsim.BAOAB(step),
            generator=generator,
        )
        .position[1:]
        .flatten(0, 1)
    )
slopes = torch.stack(
    [
        in_logarithms(torch.autograd.grad(potential(q), list(numbers.values())))
        for q in frames
    ]
)
with torch.no_grad():
    seen = radial(adjsim.PhaseState(frames, frames))
covariance = -(seen - seen.mean(0)).T @ (slopes - slopes.mean(0)) / len(seen) / KT
print(f"Reweighting\n{reweighted}\ncovariance\n{covariance}")
# Both are sums of the same numbers, which cancel to a thousandth of the energies.
assert torch.allclose(reweighted, covariance, rtol=1e-8, atol=1e-8)

# %%
# Stored covariances are of 960 frames. Their errors are from the eight runs, since the
# energy of the charges changes slowly. The check beside them is the difference of g(r)
# between runs with all charges 3 % larger and 3 % smaller, which needs no derivative:
# four runs of 2 ps each at constant energy, from starts that had 3 ps at 298 K to
# adapt.

at = np.array(found["r wide"])
halves = np.array(found["derivatives"])
runs = halves.reshape(-1, 2, *halves.shape[1:]).mean(1)
derivative = runs.mean(0)
derivative_error = runs.std(0, ddof=1) / len(runs) ** 0.5
series = np.array(found["slopes of U/kT"])
for i, name in enumerate(numbers):
    independent = adjsim.mean_with_error(series[..., i].T).ess
    print(f"{name}: {independent:.0f} independent samples of {series[..., 0].size}")
print(f"the energy of the charges fluctuates by {series[..., 0].std() / 2:.0f} kT")
for change, expected in ((0.003, 0.74), (0.01, 0.07)):
    weights = np.exp(-change * series[..., 0])
    share = weights.sum() ** 2 / (weights**2).sum() / weights.size
    print(f"charges {change:.1%} larger: share of samples {share:.2f}")
    assert abs(share - expected) < 0.01

kinetics = STUDY["kinetics"]["runs"]
shift = kinetics["more"]["shift"] - kinetics["less"]["shift"]


def difference(key, change=lambda x: x):
    """Return a mean's derivative with respect to the log of the charges, and its error.

    It is the difference of the runs with larger and with smaller charges.
    """
    ends = [change(np.array(kinetics[name][key])) for name in ("more", "less")]
    means = [x.mean(0) for x in ends]
    variances = [x.var(0, ddof=1) / len(x) for x in ends]
    return (means[0] - means[1]) / shift, np.sqrt(sum(variances)) / shift


quotient, quotient_error = difference("g wide")
fig, axes = plt.subplots(2, 2, figsize=(9.5, 7), layout="constrained")
axes[0, 0].plot(r, g, "C0")
axes[0, 0].fill_between(r, g - 2 * error, g + 2 * error, color="C0", alpha=0.3)
axes[0, 0].errorbar(2.80, 2.57, 0.05, 0.01, "k", capsize=2, label="measured first peak")
axes[0, 0].set(ylabel="g(r) of oxygens")
axes[0, 0].legend()
for i, (ax, name) in enumerate(zip(axes.flat[1:], numbers, strict=True)):
    middle, width = derivative[:, i], 2 * derivative_error[:, i]
    ax.plot(at, middle, "C0", label="reweighting")
    ax.fill_between(at, middle - width, middle + width, color="C0", alpha=0.3)
    ax.axhline(0, color="k", lw=0.5)
    ax.set(ylabel=f"derivative of g(r), log {name}")
axes[0, 1].errorbar(
    at, quotient, 2 * quotient_error, fmt="C3.", lw=1, label="difference of runs"
)
axes[0, 1].legend()
for ax in axes.flat:
    ax.set(xlabel="r (angstrom)", xlim=(2.3, 8.7))
plt.show()

deviation = (derivative[:, 0] - quotient) / np.hypot(
    derivative_error[:, 0], quotient_error
)
print(
    f"reweighting and differences: {np.abs(deviation).max():.1f} errors apart at most,"
)
print(f"  root mean square {np.sqrt(np.mean(deviation**2)):.2f}")
first = np.abs(at - 2.6).argmin()
print(
    f"charges, at {at[first]:.1f} angstrom: {derivative[first, 0]:.1f} +- "
    f"{derivative_error[first, 0]:.1f}, differences {quotient[first]:.1f} +- "
    f"{quotient_error[first]:.1f}"
)
assert np.abs(deviation).max() < 3.5
assert np.sqrt(np.mean(deviation**2)) < 1.5
assert derivative[first, 0] > 4 * derivative_error[first, 0]
assert abs(derivative[first, 1] / derivative[first, 2] - 0.075) < 0.002

# %%
# Bands and bars are two standard errors. Larger charges draw neighbours in and make the
# first shell sharper. A larger sigma pushes them out, and a larger epsilon does nearly
# the same with 7.5 % of the size, since the first peak lies on the repulsive side of
# Lennard-Jones. Reweighting agrees with the differences of runs within the errors, at
# all distances.
#
# All of these derivatives are from one set of runs. The price is noise: the energy of
# the charges of 216 molecules fluctuates by 87 kT, and has 22 independent samples in
# 960 frames. So the error at the first peak is a seventh of the value. For the same
# reason, stored frames serve for small changes only. With charges that are 0.3 %
# larger, three quarters of the samples are left, and with 1 % only 7 %. A fit has to
# sample again after each small step, as ``Reweighting`` does by itself.
#
# Diffusion
# ---------
#
# D is a sixth of the slope of the mean squared displacement (MSD) of oxygens. The runs
# are at constant energy with the real masses. Reweighting refuses such a question: a
# displacement is no function of one state.

newton = adjsim.Hamiltonian(potential, water.mass)
verlet = adjsim.VelocityVerlet(SETTINGS["step at constant energy (fs)"] * units.fs)


def at_rest(count, generator):
    """Return states with thermal momenta, without motion of the whole."""
    momentum = newton.thermal_momentum(states[:count], KT, generator)
    share = water.mass[:, None] / water.mass.sum()
    return newton.init(
        states[:count], momentum - share * momentum.sum(-2, keepdim=True)
    )


def displacement(run):
    """Return the mean squared displacement of oxygens at the end, (systems,)."""
    moved = run.position[-1] - run.position[0]
    return moved[..., ::3, :].square().sum(-1).mean(-1)


path = adjsim.Simulation(newton, at_rest, [0.0, 20 * units.fs], verlet)
try:
    adjsim.Reweighting()(path, displacement, replicas=4)
except (TypeError, ValueError) as refusal:
    print(f"Reweighting: {refusal}")
else:
    raise AssertionError("Reweighting took a function of the path")

# %%
# :class:`~adjsim.Pathwise` takes it: it differentiates along the paths, with their
# starts held fixed. For a run of 20 fs the page checks it against differences. Their
# step has to be tiny: the real-space part of the Ewald sum is cut off at 9 angstrom,
# where the force jumps by about its tolerance. A larger step moves pairs across the
# cutoff, and adds what the gradient of a path misses.

options = {"replicas": 1, "chunks": 1, "generator": 3}
pathwise = adjsim.Pathwise(adjsim.ReversibleAdjoint())(path, displacement, **options)
along = in_logarithms([pathwise.grad[name] for name in PARAMETERS])
start = path.starts(1, torch.Generator().manual_seed(3))


@torch.no_grad()
def central(parameter, h):
    """Return the central difference with respect to the logarithm of a parameter."""
    pair, kept = [], parameter.clone()
    for factor in (1 + h, 1 - h):
        parameter.copy_(kept * factor)
        run = adjsim.simulate(newton, start, path.ts, solver=verlet)
        pair.append(displacement(run).item())
    parameter.copy_(kept)
    return (pair[0] - pair[1]) / (2 * h)


for (name, parameter), exact in zip(numbers.items(), along.tolist(), strict=True):
    tiny, large = (central(parameter, h) for h in (1e-7, 1e-3))
    print(
        f"{name}: adjoint {exact:.4e}, differences {tiny:.4e}, large step {large:.4e}"
    )
    # Rounding of the displacement, 0.01 square angstrom, is divided by the step.
    assert abs(tiny - exact) < 1e-5 * abs(exact) + 1e-9

# %%
# The stored runs show D and its response. D is from four runs of 2 ps for each value of
# the charges, with lags of 0.8 to 1.5 ps. The gradients along paths are of four runs of
# 0.05 to 0.5 ps, each by one sweep backward for all numbers.

lags = np.arange(31) * SETTINGS["frames (ps)"]
window = lags > 0.79


def diffusion(msd):
    """Return D of each run, in square angstrom per picosecond."""
    return np.polyfit(lags[window], msd[:, window].T, 1)[0] / 6


rows = STUDY["paths"]["rows"]
durations = np.array([row["duration"] for row in rows])
values = np.array([row["values"] for row in rows])
paths = np.array([row["gradients"] for row in rows]) / values.mean(1)[:, None, None]
mean, spread = paths.mean(1), paths.std(1, ddof=1)
stderr = spread / paths.shape[1] ** 0.5
middle = np.array(kinetics["model"]["msd"]).mean(0)
total, total_error = (x[1:] / middle[1:] for x in difference("msd"))

fig, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
D = {}
for color, (name, label) in zip(
    ("C0", "C3", "C2"),
    {"model": "SPC/Fw", "more": "charges + 3 %", "less": "charges - 3 %"}.items(),
    strict=True,
):
    msd = np.array(kinetics[name]["msd"])
    each = diffusion(msd)
    D[name] = each.mean(), each.std(ddof=1) / len(each) ** 0.5
    band = 2 * msd.std(0, ddof=1) / len(msd) ** 0.5
    axes[0].plot(lags, msd.mean(0), color, label=label)
    axes[0].fill_between(
        lags, msd.mean(0) - band, msd.mean(0) + band, color=color, alpha=0.3
    )
    warmth = np.mean(kinetics[name]["temperature"])
    drift = np.ptp(np.array(kinetics[name]["energies"]), axis=1).max()
    print(f"{label}: D = {D[name][0]:.3f} +- {D[name][1]:.3f} angstrom^2/ps, ", end="")
    print(f"{warmth:.1f} K, energies change by {drift:.3f} eV at most")
slope, slope_error = (x / D["model"][0] for x in difference("msd", diffusion))
print(f"d log D / d log charges = {slope:.1f} +- {slope_error:.1f}")
axes[0].set(xlabel="lag (ps)", ylabel="MSD of oxygens (angstrom²)")
axes[0].legend()
axes[1].fill_between(
    lags[1:],
    total - 2 * total_error,
    total + 2 * total_error,
    color="C3",
    alpha=0.3,
    label="difference of runs",
)
axes[1].errorbar(
    durations,
    mean[:, 0],
    2 * stderr[:, 0],
    fmt="C0o",
    ms=4,
    capsize=3,
    label="along paths",
)
axes[1].axhline(0, color="k", lw=0.5)
axes[1].set(
    xlabel="time (ps)",
    ylabel="d log MSD / d log charges",
    xlim=(0, 0.6),
    ylim=(-16, 8),
)
axes[1].legend()
for i, name in enumerate(numbers):
    axes[2].semilogy(durations, spread[:, i], f"C{i}o-", ms=4, label=name)
axes[2].semilogy(lags[1:], np.abs(total), "C3--", lw=1, label="response to charges")
axes[2].set(
    xlabel="time (ps)",
    ylabel="spread of d log MSD between paths",
    xlim=(0, 0.6),
)
axes[2].legend(fontsize="small")
plt.show()

for t, row, value, error in zip(durations, mean, spread, stderr, strict=True):
    seen = np.interp(t, lags[1:], total)
    print(
        f"{t:.2f} ps: charges along paths {row[0]:.2f} +- {error[0]:.2f}, spread "
        f"{value[0]:.2f}; of the mean {seen:.2f}; sigma {row[2]:.1f} +- {error[2]:.1f}"
    )
gradients = dict(
    zip(durations, np.array([row["gradients"] for row in rows]), strict=True)
)
for t, h, quotient in STUDY["differences"]["rows"]:
    exact = gradients[t][0, 0]
    print(f"first path, {t} ps: {exact:.4f}; step {h:g}: {quotient:.4f}")
    # The part of the jumps, and at 0.5 ps the divergence of the two runs.
    assert abs(quotient / exact - 1) < (0.06 if t < 0.4 else 0.2)
value, value_error = D["model"]
length = edge * 1e-10
smaller = 2.837 * 1.380649e-23 * 298 / (6 * np.pi * 0.89e-3 * length) * 1e8
print(f"D is lower than in a large box by about {smaller:.3f} angstrom^2/ps")
assert abs(value - 0.23) < 2 * value_error < 0.08
assert slope < -3 * slope_error
assert abs(smaller - 0.037) < 0.002
stretch = potential.bonds.k.item() * (1 / 15.9994 + 1 / 1.008)
rate = np.sqrt(stretch) * SETTINGS["step at constant energy (fs)"] * units.fs
print(f"stretch of O-H: {rate:.2f} per step, momenta cold by {rate**2 / 4:.0%}")
assert abs(rate - 0.68) < 0.01
early = durations < 0.35
now = np.interp(durations, lags[1:], total)
now_error = np.interp(durations, lags[1:], total_error)
assert (mean[early, 0] > 0).all()
assert (now < 0).all()
apart = (mean[:, 0] - now) / np.hypot(stderr[:, 0], now_error)
print(f"along paths minus of the mean, in errors: {apart.round(1)}")
assert (apart[(durations > 0.15) & early] > 3).all()
assert 8 < spread[-1, 0] / spread[-2, 0] < 20
assert stderr[-1, 0] > 3

# %%
# Left: D is 0.21(3) square angstrom per picosecond. Wu, Tepper and Voth give 0.23 for
# their model, as in water. Eight picoseconds in all are short, and the error is a
# sixth. The window is short too, and a box of this size lowers D by about 0.04 (Yeh and
# Hummer, J. Phys. Chem. B 108, 15873 (2004), with the viscosity of water).
# The kinetic temperature, 290 to 295 K, is low since Verlet's momenta of O-H stretches
# are: with :math:`\omega = 0.68` per femtosecond, by :math:`(h\omega)^2/4` or 12 % at
# 1 fs. D answers strongly to the charges: with 1 % more it falls by 15(4) %.
#
# Middle, with two standard errors: the response of the mean, from the difference of
# runs, and the gradient along paths. Up to 0.3 ps the latter has an error of 0.4 or
# less, and the wrong sign. The starts are the reason. The derivative of the mean is
#
# .. math:: \frac{\mathrm d\langle\mathrm{MSD}\rangle}{\mathrm d\theta} =
#    \left\langle\frac{\partial\,\mathrm{MSD}}{\partial\theta}\right\rangle -
#    \frac{1}{kT}\operatorname{cov}\left(\mathrm{MSD},
#    \frac{\partial U(q_0)}{\partial\theta}\right),
#
# and paths give the first part. From fixed starts larger charges pull harder; starts
# that have adapted are bound more tightly. The first part becomes the whole when paths
# have forgotten their starts, after picoseconds.
#
# Right: it does not have this time. Between 0.3 and 0.5 ps the spread between paths
# grows more than tenfold, beyond the response itself. At 0.5 ps the mean of four paths
# has an error of 5. The gradients themselves are right: that of the first path agrees
# with differences of steps of 1e-4 and 1e-3 to 5 % and 1 % up to 0.3 ps, and to 20 % at
# 0.5 ps. What is left are jumps at the cutoff, and at 0.5 ps divergence within a step.
#
# So an equilibrium estimator gives the gradient of g(r) and not that of D. A gradient
# along paths exists at any time, but for water it is lost before it becomes that of D,
# which is best taken as it was here, by a difference of runs. In a simpler liquid both
# parts can be had, see the page on :doc:`argon <plot_argon>`.
