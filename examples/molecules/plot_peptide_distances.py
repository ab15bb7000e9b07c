r"""
Distances between residues, trained along runs
==============================================

Force fields with implicit solvent have been trained by differentiating whole runs: the
loss compares the distances between residues, at all times of the run, with reference
distances (Greener, Chem. Sci. 15, 4897 (2024), for disordered proteins). This page does
it for a small peptide, trialanine with capped ends in the solvent OBC2, at 300 K:

.. math:: L = \operatorname{mean}_{i<j,\,t}\,
   \bigl(d_{ij}(t) - d_{ij}^\mathrm{ref}\bigr)^2 .

Runs are exact, ``Splitting(..., exact=True)``: the backward sweep retraces the run bit
for bit, with :class:`~adjsim.ReversibleAdjoint`, so memory does not grow with the
length of the run. One sweep gives the gradient with respect to every number of the
force field.

Training and long runs were computed before, by
``examples/data/make_peptide_distances.py``. The page draws their results, called
*stored* below, and computes some of them again.
"""

# sphinx_gallery_thumbnail_number = 2

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
STUDY = json.loads((DATA / "peptide_distances.json").read_text())
SETTINGS = STUDY["settings"]
PS, DT, KT = 1000 * units.fs, SETTINGS["dt (fs)"] * units.fs, SETTINGS["kT (eV)"]
TRAINED = "ALA N-CA-C-N"
for name in ("training", "growth", "memory"):
    made = STUDY[name]
    print(f"{name}: commit {made['commit'][:10]}, seed {made['seed']}")
print(f"{made['made_by']}, {made['versions']}")
print(", ".join(f"{key} {value:.4g}" for key, value in SETTINGS.items()))

# %%
# The peptide
# -----------
#
# The force field is ff14SB with OBC2, read from OpenMM. Hydrogens have 4 amu, so that a
# step of 2 fs is short enough. All of its numbers can be trained.

pdb = app.PDBFile(str(DATA / "trialanine.pdb"))
system = app.ForceField("amber14-all.xml", "implicit/obc2.xml").createSystem(
    pdb.topology,
    nonbondedMethod=app.NoCutoff,
    constraints=None,
    rigidWater=False,
    hydrogenMass=4 * unit.amu,
)
potential, structure = from_openmm(system, pdb.positions, pdb.topology)
residues = [atom.residue.index for atom in pdb.topology.atoms()]
first, second = torch.triu_indices(residues[-1] + 1, residues[-1] + 1, 1)
langevin = adjsim.Langevin(
    potential, structure.mass, KT, friction=SETTINGS["friction (1/ps)"] / PS
)
labels = potential.labels["torsions"]
types = [i for i, label in enumerate(labels) if label == TRAINED]
k = potential.torsions.k
known = k.detach()[types].numpy().copy()
numbers = sum(p.numel() for p in potential.parameters())
print(f"{len(residues)} atoms, {residues[-1] + 1} residues, {len(first)} pairs of them")
print(f"{numbers} numbers; psi has k = {[round(x, 4) for x in known.tolist()]} eV")


def distances(position):
    """Return the distances between the centres of residues, (..., pairs)."""
    return adjsim.residue_distances(position, residues)[..., first, second]


def run(start, reference, steps, every, seed, adjoint, exact=True):
    """Return the loss of each system of a run."""
    made = adjsim.simulate(
        langevin,
        langevin.init(start, generator=torch.Generator().manual_seed(seed)),
        torch.arange(0, steps + 1, every) * DT,
        solver=adjsim.Splitting("BAOAB", DT, exact=exact),
        adjoint=adjoint,
        generator=seed,
    )
    return ((distances(made.position[1:]) - reference) ** 2).mean((0, -1))


# %%
# One sweep, every gradient
# -------------------------
#
# The page takes two of the stored starts, with their references, and the torsions of
# psi at zero, as the training did at first. The bars show by how much a change of each
# number by one per cent changes the loss of these runs of 40 fs, summed over the
# numbers of a kind. The gradient agrees with backpropagation through the steps, and
# with central differences. An exact run rounds its states, and the gradient is that of
# the steps without rounding. So the differences are those of plain runs.

group = STUDY["training"]["groups"][0]
start = torch.tensor(group["starts"])[:2]
reference = torch.tensor(group["reference"])[:2]
short = {"steps": 20, "every": 4, "seed": 1}


def put(values):
    with torch.no_grad():
        k[types] = torch.as_tensor(values)


put(torch.zeros(len(types)))
names, parameters = zip(*potential.named_parameters(), strict=True)
loss = run(start, reference, adjoint=adjsim.ReversibleAdjoint(), **short).mean()
reversed_run = torch.autograd.grad(loss, parameters)
loss = run(start, reference, adjoint=adjsim.DirectAdjoint(), **short).mean()
direct = torch.autograd.grad(loss, parameters)
off = max(
    float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))
    for a, b in zip(reversed_run, direct, strict=True)
)
print(f"reversible and direct gradients differ by {off:.0e} at most, relatively")
assert off < 1e-9

checked = {
    "torsions.k": types[1],
    "coulomb.charge": 0,
    "solvent.radius": 5,
    "bonds.length": 0,
}
h = 1e-5
plain = {"adjoint": adjsim.DirectAdjoint(), "exact": False, **short}
for name, entry in checked.items():
    parameter, pair = parameters[names.index(name)], []
    for shift in (h, -h):
        with torch.no_grad():
            parameter[entry] += shift
            pair.append(run(start, reference, **plain).mean().item())
            parameter[entry] -= shift
    quotient = (pair[0] - pair[1]) / (2 * h)
    adjoint = float(reversed_run[names.index(name)][entry])
    print(f"{name}[{entry}]: adjoint {adjoint:.8f}, differences {quotient:.8f}")
    # The states of an exact run are rounded, which moves the gradient by about 1e-8.
    assert abs(adjoint - quotient) < 1e-6 * max(1.0, abs(adjoint))

effect = {
    name: (0.01 * parameter * grad).abs().sum().item()
    for name, parameter, grad in zip(names, parameters, reversed_run, strict=True)
}
effect = dict(sorted(effect.items(), key=lambda item: item[1]))
fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
ax.barh(list(effect), list(effect.values()), color="C0")
ax.set(xscale="log", xlabel="change of the loss by one per cent (square angstrom)")
plt.show()

# %%
# Training
# --------
#
# The study set the three torsions of psi to zero, and trained them with Adam. The
# starts are 16 conformations of a run at 900 K. The reference of each start is the mean
# of its distances over eight runs of 0.3 ps with the known numbers. Noise differs in
# each epoch.
#
# The loss L has a flaw. The mean of a squared difference is the square of the mean
# difference plus the variance, and a stiffer peptide has less variance. So the known
# numbers are not its minimum. A second loss has no such bias: the product of the
# differences of two runs with independent noise, a and b,
#
# .. math:: L_2 = \operatorname{mean}_{i<j,\,t}\,
#    \bigl(d^a_{ij}(t) - d_{ij}^\mathrm{ref}\bigr)
#    \bigl(d^b_{ij}(t) - d_{ij}^\mathrm{ref}\bigr) .
#
# There are two trainings with each, with starts, references and noise of their own.

COLORS = {"square": "C1", "product": "C0"}
TITLES = {"square": "L, squares", "product": "$L_2$, products of two runs"}
fig, axes = plt.subplots(1, 3, figsize=(11.5, 3.8), layout="constrained")
psi = np.linspace(-np.pi, np.pi, 181)
periodicity = potential.torsions.periodicity[types].numpy()
phase = potential.torsions.phase[types].detach().numpy()


def barrier(values):
    """Return the energy of the torsions of psi along psi, in meV, its mean zero."""
    return 1000 * np.cos(np.outer(psi, periodicity) - phase) @ np.asarray(values)


for i, group in enumerate(STUDY["training"]["groups"]):
    for each in group["trainings"]:
        color, label = COLORS[each["kind"]], TITLES[each["kind"]] if i == 0 else None
        middle = [row["k"][1] for row in each["rows"]] + [each["trained"][1]]
        axes[0].plot(1000 * np.array(middle), color, lw=1, label=label)
        axes[1].plot(np.degrees(psi), barrier(each["trained"]), color, lw=1)
axes[0].axhline(1000 * known[1], color="k", ls="--", lw=1, label="known")
axes[0].set(xlabel="epoch", ylabel="k of psi, n = 2 (meV)")
axes[0].legend(fontsize="small")
axes[1].plot(np.degrees(psi), barrier(known), "k--", lw=1)
axes[1].set(xlabel="psi (degrees)", ylabel="energy of the torsions (meV)")
rows = np.arange(len(first))
for shift, color, name in (
    (-0.3, "0.7", "before"),
    (-0.1, "C1", "square"),
    (0.1, "C0", "product"),
    (0.3, "k", "known"),
):
    off = [
        np.array(group["compared"][name]["distances"]) - group["reference"]
        for group in STUDY["training"]["groups"]
    ]
    rms = np.sqrt((np.concatenate(off) ** 2).mean(0))
    axes[2].bar(rows + shift, rms, 0.2, color=color, label=TITLES.get(name, name))
ticks = [f"{i + 1}-{j + 1}" for i, j in zip(first, second, strict=True)]
axes[2].set_xticks(rows, ticks, fontsize="small")
axes[2].set(xlabel="residues", ylabel="mean distance off (angstrom)", ylim=(0, 0.36))
axes[2].legend(fontsize="small")
plt.show()


def misfit(values):
    """Return the rms difference of the energy along psi from the known one, in meV."""
    return float(np.sqrt(np.mean((barrier(values) - barrier(known)) ** 2)))


slopes = {kind: [] for kind in COLORS}
excess = []
middle = {kind: [] for kind in COLORS}
print(f"known {np.round(known, 4)} eV, zero off by {misfit(0 * known):.0f} meV")
for i, group in enumerate(STUDY["training"]["groups"]):
    for each in group["trainings"]:
        kind, values = each["kind"], each["trained"]
        slopes[kind] += group["at known"][kind]
        middle[kind].append(values[1])
        print(f"group {i + 1}, {kind}: {np.round(values, 4)} eV", end=", ")
        print(f"off by {misfit(values):.0f} meV")
        assert misfit(values) < 0.6 * misfit(0 * known)
    before, best = (
        np.array(group["compared"][name]["square"]) for name in ("before", "known")
    )
    excess += (before - best).tolist()
    print(f"  L with the known numbers {best.mean():.3f}")
fall, error = np.mean(excess), np.std(excess, ddof=1) / len(excess) ** 0.5
print(f"L falls from zero to the known numbers by {fall:.3f} +- {error:.3f}")
for kind, rows in slopes.items():
    mean, error = np.mean(rows, 0), np.std(rows, 0, ddof=1) / len(rows) ** 0.5
    print(f"gradient of {kind} at the known numbers: {mean.round(3)}")
    print(f"  +- {error.round(3)} square angstrom per eV")
    assert (np.abs(mean) < 4 * error).all()
for square, product in zip(*middle.values(), strict=True):
    assert square > product > float(known[1])

# %%
# Right, from eight runs of each start: trained mean distances are as close to the
# references as those with the known numbers. What is left is noise, of the references
# and of these runs.
#
# Middle: all four trainings find the shape of the energy along psi, to less than 0.6 of
# the difference at zero. None finds the three numbers exactly, and these runs
# cannot fix them: the fall of L from zero to the known numbers is a tenth of L, since
# the rest is variance, and its standard error is half of itself. In both groups squares
# end with a larger n = 2 than products. The gradients at the known numbers are zero
# within their errors for both losses. So 32 starts show the bias of squares in
# the trainings at most. A fit that has to recover numbers needs an equilibrium mean, as
# on the page on :doc:`alanine dipeptide <plot_dipeptide>`.

# %%
# Growth
# ------
#
# The gradient of a run is exact at any length, but what it says is less and less: paths
# diverge, and the gradient grows exponentially with the length of the run. The figure
# shows stored gradients of twelve single runs with the known numbers, with respect to
# the n = 2 torsion of psi. Crosses are central differences of the first run.

growth = STUDY["growth"]
lengths = np.array(growth["lengths"])
gradients = np.array(growth["gradients"])
sizes = np.abs(gradients)
quotients = np.array(growth["differences"])
rate = np.polyfit(lengths[2:], np.log(np.median(sizes, 1))[2:], 1)[0]
memory = {
    kind: np.array([row[1:] for row in STUDY["memory"]["rows"] if row[0] == kind])
    for kind in ("exact", "direct")
}
fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
axes[0].semilogy(lengths, sizes, "C0.", ms=4)
axes[0].semilogy(lengths, np.median(sizes, 1), "C0", lw=1, label="median")
axes[0].semilogy(lengths, np.abs(quotients), "kx", ms=6, label="differences, first run")
axes[0].set(xlabel="length of the run (ps)", ylabel="|gradient| (angstrom$^2$/eV)")
axes[0].legend()
labels = {"exact": "exact, reversible", "direct": "backpropagation"}
for color, (kind, rows) in zip(("C0", "C3"), memory.items(), strict=True):
    axes[1].loglog(rows[:, 0], rows[:, 1] / 1e6, f"{color}o-", ms=4, label=labels[kind])
axes[1].set(xlabel="steps", ylabel="growth of memory (MB)")
axes[1].legend()
plt.show()

agreement = np.abs(quotients / gradients[:, 0] - 1)
for length, column, difference in zip(lengths, sizes, agreement, strict=True):
    print(
        f"{length:.1f} ps: gradients from {column.min():.2g} to {column.max():.2g}; "
        f"the first is {difference:.0e} off its difference"
    )
print(f"growth rate {rate:.1f} per ps")
for kind, rows in memory.items():
    for steps, size, _ in rows:
        print(f"{labels[kind]}: {steps:.0f} steps, {size / 1e6:.1f} MB")

# Truncation and rounding of the differences and of the exact runs, grown by the path.
assert (agreement[:3] < 1e-5).all()
assert np.median(sizes, 1)[-1] > 100 * np.median(sizes, 1)[0]
late = gradients[-1]
assert late.min() < 0 < late.max()
exact, direct = memory["exact"], memory["direct"]
largest = exact[:, 1].max() / 1e6
slope = np.polyfit(direct[:, 0], direct[:, 1], 1)[0]
print(f"exact: at most {largest:.1f} MB, for up to {exact[-1, 0]:.0f} steps")
print(f"backpropagation: {slope / 1e6:.2f} MB a step")
assert largest < 32
# From the second longest run to the longest, four times as long.
assert exact[-1, 1] < 1.5 * exact[-2, 1]
assert 130e9 < slope * exact[-1, 0] < 170e9

# %%
# Left: up to 0.4 ps the gradient agrees with the differences to 1e-5. It grows by a
# factor of a hundred and more within three picoseconds, and its sign becomes a matter
# of chance. It stays the exact gradient of the steps, but says little about the mean,
# so the trainings used runs of 0.3 ps. The page on :doc:`exploding gradients
# </gallery/statistics/plot_exploding_gradients>` has remedies.
#
# Right: each point is the growth of the resident set in a fresh process. The exact run
# retraces itself: it takes some megabytes for buffers, and no more for longer runs.
# Backpropagation keeps every step, and would need some 150 GB for the longest run.
