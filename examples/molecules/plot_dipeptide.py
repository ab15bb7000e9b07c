r"""
Alanine dipeptide: torsions from a distribution of dihedrals
============================================================

Can the torsions of a force field be recovered from the distribution of the dihedral
angles phi and psi that they made? The molecule is alanine dipeptide with Amber's
ff14SB, read from OpenMM's ``amber14-all.xml``, in vacuum and in the implicit solvent
OBC2. Five of its torsions are set to zero and fitted. The answer is known: the numbers
of ff14SB.

The question is about an equilibrium mean, so :class:`~adjsim.Reweighting` of stored
frames answers it. Beside it stands :class:`~adjsim.ReversibleAdjoint`, the gradient
along short runs, which answers another question, and can fit in another way.

Units are eV, angstrom and picoseconds. The temperature is 900 K: there the molecule
crosses its barriers within tens of picoseconds, and the parameters are the same.
Hydrogens have 4 amu, so that a step of 3 fs is short enough. Masses do not change the
distribution. Longer runs were computed before, by
``examples/data/make_dipeptide_study.py``. The page reads their results, called *stored*
below, and computes some of them again.
"""

# sphinx_gallery_thumbnail_number = 1

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import openmm.app as app
import torch
from ase import units
from openmm import unit

import adjsim
from adjsim.io import from_openmm

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a small molecule

DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"
STUDY = json.loads((DATA / "dipeptide_study.json").read_text())
SETTINGS = STUDY["settings"]
PS, DT, KT = 1000 * units.fs, SETTINGS["dt (fs)"] * units.fs, SETTINGS["kT (eV)"]
for part in ("vacuum", "OBC2", "paths"):
    made = STUDY[part]
    seed = made.get("target", made)["seed"]
    print(f"{part}: commit {made['commit'][:10]}, seed {seed}, {made['versions']}")
print(", ".join(f"{key} {value:.4g}" for key, value in SETTINGS.items()))

# %%
# The force field
# ---------------
#
# With a topology, :func:`~adjsim.io.from_openmm` gives one number to all torsions of a
# type, under a name. The energy of a torsion is :math:`k\,(1 + \cos(n\varphi -
# \varphi_0))`. Psi has three terms of its own, n = 1, 2, 3. For phi the fit takes n = 1
# and 2 of the dihedral C-N-CA-CB, which differs from phi by about 120 degrees.


def force_field(*files):
    pdb = app.PDBFile(str(DATA / "dipeptide.pdb"))
    system = app.ForceField(*files).createSystem(
        pdb.topology,
        nonbondedMethod=app.NoCutoff,
        constraints=None,
        rigidWater=False,
        hydrogenMass=4 * unit.amu,
    )
    return *from_openmm(system, pdb.positions, pdb.topology), pdb.topology


potential, structure, topology = force_field("amber14-all.xml")
for parameter in potential.parameters():
    parameter.requires_grad_(False)
k = potential.torsions.k.requires_grad_(True)
orders = potential.torsions.periodicity.int().tolist()
names = list(zip(potential.labels["torsions"], orders, strict=True))
types = [names.index(tuple(chosen)) for chosen in STUDY["chosen"]]
known = k.detach()[types].clone()
LABELS = [f"{name.split()[1]}\nn = {n}" for name, n in STUDY["chosen"]]
for i, (name, order) in enumerate(names):
    chosen = "  <- fitted" if i in types else ""
    print(f"{name:17} n = {order}: k = {k[i].item():.5f} eV{chosen}")
# The file has six digits.
assert np.allclose(known, STUDY["vacuum"]["fit"]["known"], rtol=1e-5)

# %%
# Ramachandran plots
# ------------------
#
# The stored frames show the joint distribution of phi and psi, as free energies
# :math:`-kT \log p`: with the five torsions at zero, with the fitted ones, and with the
# known ones. Each is from 32 runs. White bins were not visited.

edges = np.linspace(-180, 180, 1 + len(STUDY["vacuum"]["target"]["counts"]))
fig, axes = plt.subplots(2, 3, figsize=(9.6, 6.4), layout="constrained")
distribution = {}
for row, solvent in zip(axes, ("vacuum", "OBC2"), strict=True):
    fit = STUDY[solvent]["fit"]
    found = {"before": fit["before"], "after": fit["after"]}
    found["target"] = STUDY[solvent]["target"]
    for ax, (name, part) in zip(row, found.items(), strict=True):
        counts = np.array(part["counts"])
        distribution[solvent, name] = counts / counts.sum()
        with np.errstate(divide="ignore"):
            energy = -KT * np.log(counts / counts.max())
        image = ax.pcolormesh(edges, edges, energy.T, vmin=0, vmax=0.5, cmap="viridis")
        ticks = (-180, -90, 0, 90, 180)
        ax.set(title=f"{solvent}, {name}", xticks=ticks, yticks=ticks, aspect="equal")
        print(f"{solvent}, {name}: {part['duration']:.0f} ps, ess {part['ess']:.0f}")
for ax in axes[-1]:
    ax.set_xlabel("phi (degrees)")
for ax in axes[:, 0]:
    ax.set_ylabel("psi (degrees)")
fig.colorbar(image, ax=axes, label="free energy (eV)", shrink=0.8)
plt.show()

overlap = {
    key: np.minimum(p, distribution[key[0], "target"]).sum()
    for key, p in distribution.items()
}
for (solvent, name), share in overlap.items():
    print(f"{solvent}, {name}: overlap with the target {share:.2f}")
for solvent in ("vacuum", "OBC2"):
    assert overlap[solvent, "after"] > overlap[solvent, "before"] + 0.1
    assert overlap[solvent, "after"] > 0.75

# %%
# The fit by Reweighting
# ----------------------
#
# A torsion enters the energy with the factor :math:`s = \partial U/\partial k = 1 +
# \cos(n\varphi - \varphi_0)`. The mean of s is a Fourier coefficient of the
# distribution of the dihedral. The likelihood of the dihedrals is largest where the
# model has the same five means as the target, so no other function of the distribution
# determines the five numbers better. :class:`~adjsim.Reweighting` gives the means and
# their derivatives,
#
# .. math:: \frac{\partial \langle s_i \rangle}{\partial k_j} =
#    -\frac{\operatorname{cov}(s_i, s_j)}{kT},
#
# and Newton steps of at most 0.02 eV solve for the torsions. There are three rounds.
# The steps of a round use the same frames, whose effective share must be at least a
# fifth. The next round samples again, with the numbers reached so far. The runs of the
# fit begin from a single extended structure and never see a state of the target.

colors = ("C0", "C2")
fig, axes = plt.subplots(1, 3, figsize=(11.5, 3.7), layout="constrained")
for color, (ax, solvent) in zip(
    colors, zip(axes[:2], ("vacuum", "OBC2"), strict=True), strict=True
):
    fit = STUDY[solvent]["fit"]
    rows = np.array([row["k"] for row in fit["history"]] + [fit["last"]])
    lines = ax.plot(1000 * rows, ".-", lw=1, ms=4)
    for line, value in zip(lines, fit["known"], strict=True):
        ax.axhline(1000 * value, color=line.get_color(), ls=":", lw=1)
    for i, row in enumerate(fit["history"]):
        if row["sampled"]:
            ax.axvline(i, color="0.8", lw=1, zorder=0)
    ax.set(title=f"{solvent}", xlabel="Newton step", ylabel="k (meV)", ylim=(-5, 140))
    text = [x.replace("\n", ", ") for x in LABELS]
    ax.legend(lines, text, fontsize="x-small", ncols=2, loc="upper center")
    errors = 1000 * np.sqrt(np.diag(fit["covariance"]))
    axes[2].errorbar(
        np.arange(len(types)) + (0.1 if solvent == "OBC2" else -0.1),
        1000 * (np.array(fit["fitted"]) - fit["known"]),
        2 * errors,
        fmt="o",
        color=color,
        ms=4,
        capsize=3,
        label=solvent,
    )
axes[2].axhline(0, color="k", lw=1)
axes[2].set_xticks(range(len(types)), LABELS, fontsize="x-small")
axes[2].set(title="fitted - known", ylabel="k (meV)")
axes[2].legend(title="two standard errors", fontsize="small")
plt.show()


def distance(fit):
    """Return the squared distance to the known numbers, in standard errors."""
    difference = np.array(fit["fitted"]) - fit["known"]
    return difference @ np.linalg.solve(np.array(fit["covariance"]), difference)


for solvent in ("vacuum", "OBC2"):
    fit = STUDY[solvent]["fit"]
    for label, k0, k1, error in zip(
        LABELS,
        fit["known"],
        fit["fitted"],
        np.sqrt(np.diag(fit["covariance"])),
        strict=True,
    ):
        label = label.replace("\n", ", ")
        print(f"{solvent}, {label}: {k1:.4f} +- {error:.4f} eV, known {k0:.4f}")
    sampled = sum(row["sampled"] for row in fit["history"])
    print(f"{solvent}: {len(fit['history'])} Newton steps with {sampled} samples")
    print(f"  chi^2 of the five numbers {distance(fit):.1f}")
    # Chi squared of five numbers is above 20.5 once in a thousand fits.
    assert distance(fit) < 20.5
    assert sampled < len(fit["history"]) / 2
    assert min(row["share"] for row in fit["history"]) >= 0.2
assert 13 < distance(STUDY["vacuum"]["fit"]) < 14

# %%
# Vertical lines mark new samples, and dotted lines the known numbers. The fitted
# numbers on the right are one more Newton step, by the means of longer runs. The errors
# come from the spread of independent runs, of the fit and of the target. They include
# the covariance of the five means. The torsion with n = 1 at phi is the least certain:
# it moves weight between the basins with phi below and above zero, and the runs change
# basin rarely. The chi squared of the fit in vacuum is not small: two of a hundred fits
# have a larger one. But covariances from 32 runs are uncertain themselves.
#
# The same here
# -------------
#
# The page continues the stored runs with the fitted numbers for a short time, and calls
# the estimator itself. Means and derivatives agree with the stored ones within their
# errors. With torsions of zero the same frames give the means of the stored runs at
# zero, by their weights. Then they are worth about half as many samples.

atoms = [(atom.residue.name, atom.name) for atom in topology.atoms()]
chain = [("ACE", "C"), ("ALA", "N"), ("ALA", "CA"), ("ALA", "CB"), ("ALA", "C")]
c, n, ca, cb, carbonyl = (atoms.index(atom) for atom in chain)
index = [[n, ca, carbonyl, atoms.index(("NME", "N"))], [c, n, ca, cb]]
periodicity = potential.torsions.periodicity[types]
phase = potential.torsions.phase[types]
column = [0 if "N-CA-C-N" in name else 1 for name, _ in STUDY["chosen"]]


def slopes(state):
    """Return dU/dk of the five torsions, (systems, 5)."""
    angles = adjsim.dihedrals(state.position, index)[..., column]
    return 1 + torch.cos(periodicity * angles - phase)


def put(values):
    with torch.no_grad():
        k[types] = torch.tensor(values)


fit = STUDY["vacuum"]["fit"]
start = torch.tensor(fit["states"])
langevin = adjsim.Langevin(
    potential, structure.mass, KT, friction=SETTINGS["friction (1/ps)"] / PS
)


def initial(count, generator):
    return langevin.init(start[:count], generator=generator)


put(fit["last"])
simulation = adjsim.Simulation(
    langevin, initial, [0.0, 240 * DT], solver=adjsim.BAOAB(DT)
)
reweighting = adjsim.Reweighting(every=40 * DT, threshold=0.001)
estimates = []
for at in (fit["last"], np.zeros(len(types))):
    put(at)
    estimates.append(
        reweighting(
            simulation,
            adjsim.TimeAverage(slopes),
            replicas=len(start),
            chunks=8,
            generator=3,
        )
    )
here, far = estimates
grad, stderr = (
    x["potential.torsions.k"][:, types] for x in (here.grad, here.grad_stderr)
)
pull = (grad - torch.tensor(fit["jacobian"])) / stderr
means = np.array(STUDY["vacuum"]["target"]["means"])
aim, spread = means.mean(0), means.std(0, ddof=1) / np.sqrt(len(means))
offset = (here.value.numpy() - aim) / np.hypot(here.value_stderr.numpy(), spread)
print(f"means: off the target by {np.abs(offset).max():.1f} standard errors at most")
print(f"derivatives: off the stored ones by {pull.abs().max():.1f} at most")
zero = np.array(fit["before"]["means"])
aim, spread = zero.mean(0), zero.std(0, ddof=1) / np.sqrt(len(zero))
back = (far.value.numpy() - aim) / np.hypot(far.value_stderr.numpy(), spread)
share = far.diagnostics["weights_ess"]
print(f"reweighted to zero: off the stored means by {np.abs(back).max():.1f} at most")
print(f"effective samples {here.diagnostics['ess']:.0f}, share at zero {share:.2f}")
assert np.abs(offset).max() < 4
assert np.abs(back).max() < 4
# Errors come from eight chunks, whose t is above 6 once in two thousand times.
assert pull.abs().max() < 6
assert here.diagnostics["weights_ess"] > 1 - 1e-9
assert 0.3 < share < 0.8

# %%
# The gradient along short runs
# -----------------------------
#
# :class:`~adjsim.Pathwise` with :class:`~adjsim.ReversibleAdjoint` differentiates the
# means at the end of runs whose starts are held fixed. For the steps taken the gradient
# is exact: here the page checks it for eight runs of 0.06 ps against differences.

put(fit["last"])
path = adjsim.simulate(
    langevin,
    initial(8, torch.Generator().manual_seed(5)),
    [0.0, 20 * DT],
    solver=adjsim.BAOAB(DT),
    adjoint=adjsim.ReversibleAdjoint(),
    generator=5,
).final
(gradient,) = torch.autograd.grad(slopes(path).sum(-1).mean(), k)


def end(shift, i):
    """Return the mean of all five at the end, with one torsion shifted."""
    with torch.no_grad():
        k[types[i]] += shift
        final = adjsim.simulate(
            langevin,
            initial(8, torch.Generator().manual_seed(5)),
            [0.0, 20 * DT],
            solver=adjsim.BAOAB(DT),
            generator=5,
        ).final
        k[types[i]] -= shift
        return float(slopes(final).sum(-1).mean())


h = 1e-5
for i in (1, 3):
    quotient = (end(h, i) - end(-h, i)) / (2 * h)
    adjoint = float(gradient[types[i]])
    print(f"{LABELS[i]!r}: adjoint {adjoint:.8f}, differences {quotient:.8f} per eV")
    # Truncation and rounding of the differences are about 1e-7 of the largest entry.
    assert abs(adjoint - quotient) < 1e-6 * float(gradient[types].abs().max())

# %%
# The derivative at equilibrium is approached as the runs forget their starts. The share
# of it which a run has seen is a fifth of the trace of :math:`J^{-1} R`, with the
# derivatives J at equilibrium and R at the end of the runs. But neighbouring paths
# diverge exponentially, and with them the error of R. The weights of the basins respond
# only after tens of picoseconds, which no gradient along a run can reach.
#
# A fit does not need it. If the starts are states of the target and the torsions are
# the known ones, the distribution stays as it is. So the study asked for torsions that
# leave the five means unchanged after short runs, and took Newton steps with R.
# Contrastive divergence trains energy-based models in this way. It needs states of the
# target, where Reweighting needs five means.

paths = STUDY["paths"]
durations = [row["duration"] for row in paths["rows"]]
shares = np.array([row["share"] for row in paths["rows"]])
errors = np.array([row["error"] for row in paths["rows"]])
fig, axes = plt.subplots(1, 3, figsize=(11.5, 3.7), layout="constrained")
axes[0].errorbar(durations, shares, errors, fmt="C1o-", ms=4, lw=1, capsize=3)
axes[0].axhline(1, color="k", ls="--", lw=1, label="equilibrium")
axes[0].set(xlabel="length of the run (ps)", ylabel="share of the response")
axes[0].legend(title="one standard error", fontsize="small")
axes[1].semilogy(durations, errors, "C1o-", ms=4, lw=1)
axes[1].set(xlabel="length of the run (ps)", ylabel="standard error of the share")
fits = {"Reweighting": fit, f"runs of {paths['length']:g} ps": paths}
for shift, color, (label, each) in zip(
    (-0.1, 0.1), ("C0", "C1"), fits.items(), strict=True
):
    axes[2].errorbar(
        np.arange(len(types)) + shift,
        1000 * (np.array(each["fitted"]) - each["known"]),
        2000 * np.sqrt(np.diag(each["covariance"])),
        fmt="o",
        color=color,
        ms=4,
        capsize=3,
        label=label,
    )
    print(f"{label}: chi^2 of five numbers {distance(each):.1f}")
axes[2].axhline(0, color="k", lw=1)
axes[2].set_xticks(range(len(types)), LABELS, fontsize="x-small")
axes[2].set(title="fitted - known, vacuum", ylabel="k (meV)")
axes[2].legend(title="two standard errors", fontsize="small")
plt.show()

for duration, share, error in zip(durations, shares, errors, strict=True):
    print(f"{duration:.2f} ps: share {share:.3f} +- {error:.3f}")
assert shares[0] < 0.3
assert 60 < errors[-1] / errors[0] < 150
assert errors[-1] > 1 - shares[-1]
assert abs(shares[durations.index(paths["length"])] - 0.5) < 0.1
assert distance(paths) < 20.5

# %%
# Left and middle: within 0.2 ps the runs see most of the response, since dihedrals move
# fast within a basin. But the error grows a hundredfold from the shortest runs to the
# longest, where it exceeds what is left to be seen. Right: both fits find the known
# numbers within their errors. The one along short runs needs no run that leaves its
# basin, since its starts have the right weights already. But its errors are larger for
# psi, since these runs have seen half of the response. Reweighting takes nothing but
# five means, and waits for the basins.
