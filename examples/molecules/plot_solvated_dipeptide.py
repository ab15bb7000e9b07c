r"""
A dipeptide in rigid water, as everybody makes it
=================================================

Alanine dipeptide with Amber14 in TIP3P-FB water: bonds of hydrogen are constrained,
waters are rigid, charges are summed by particle-mesh Ewald, steps take 2 fs, and a
piston holds 1 bar at 300 K. This page reads the system from OpenMM, differentiates a
run of it, also with respect to the lengths of its rigid molecules, compares its density
and energy with those of OpenMM, and says how long gradients of its paths are of use.

Units are eV, angstrom and picoseconds. Long runs were computed before, by
``examples/data/make_solvated_dipeptide.py``. The page reads their results, called
*stored* below, and computes a short run itself.
"""

# sphinx_gallery_thumbnail_number = 1

import json
import sys
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import adjsim
from adjsim.observables import mean_with_error

DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"
sys.path.append(str(DATA))

from make_solvated_dipeptide import BURN_IN, DT, EVERY, FS, GRAMS, STEPS, Solvated

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a small system

STUDY = json.loads((DATA / "solvated_dipeptide.json").read_text())
found = {name: part["results"] for name, part in STUDY.items()}
for name, part in STUDY.items():
    print(f"{name}: commit {part['commit'][:10]}, seed {part['seed']}")

# %%
# The system
# ----------
#
# ``Solvated`` makes the system with ``constraints=HBonds`` and ``rigidWater=True``, and
# reads it by :func:`~adjsim.io.from_openmm`. The potential alone does not hold rigid
# molecules together: ``Structure.constraints`` has their lengths, and
# :class:`~adjsim.Constrained` holds any dynamics to them. The piston moves the centres
# of mass of rigid molecules and of X-H groups, which leaves all lengths as they are.
#
# .. code-block:: python
#
#    potential, atoms = from_openmm(system, positions, topology)
#    piston = adjsim.LangevinPiston(potential, atoms.mass, kT, ...)
#    lengths = torch.nn.Parameter(atoms.constraints.length.clone())
#    held = adjsim.DistanceConstraints(atoms.constraints.index, lengths)
#    dynamics = adjsim.Constrained(piston, held)

solvated = Solvated()
dynamics, piston = solvated.dynamics, solvated.piston
start = solvated.start(found["starts"][:1])
print(
    f"{start.position.shape[-2]} atoms, {len(solvated.lengths)} constraints, "
    f"{dynamics.dof(start.position):.0f} degrees of freedom"
)

# %%
# A short run
# -----------
#
# With ``exact=True`` the steps are undone bit for bit, so the gradient is that of the
# very path, in memory that does not grow with its length. Here it is the derivative of
# the density after five steps, by the distances of rigid water and by charges, in one
# backward run. It is checked against the difference of two runs, whose waters have
# longer O-H bonds from the start on.


def density_after(steps, exact):
    run = adjsim.simulate(
        dynamics,
        solvated.start(found["starts"][:1]),
        [0.0, steps * DT * FS],
        solver=solvated.solver(exact=exact),
        adjoint=adjsim.ReversibleAdjoint() if exact else adjsim.DirectAdjoint(),
        generator=1,
    )
    return piston.density(run.final).sum() * GRAMS, run


density, run = density_after(5, exact=True)
density.backward()
slope = solvated.lengths.grad
print(f"density after 5 steps {density:.4f} g/cm3")
print(f"  by O-H of all waters   {slope[solvated.bonds].sum():10.4f} g/cm3/angstrom")
print(f"  by H-H of all waters   {slope[solvated.sides].sum():10.4f} g/cm3/angstrom")
charge = solvated.potential.coulomb.charge.grad
print(f"  by charges, norm       {charge.norm():10.4f} g/cm3/e")
print(f"  error of the retraced path {run.stats['reconstruction_error']}")

h, ends = 1e-4, []
with torch.no_grad(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for sign in (1, -1):
        solvated.lengths[solvated.bonds] += sign * h
        ends.append(density_after(5, exact=False)[0])
        solvated.lengths[solvated.bonds] -= sign * h
difference = float(ends[0] - ends[1]) / (2 * h)
print(f"  difference of two runs {difference:10.4f} g/cm3/angstrom")
assert abs(difference / slope[solvated.bonds].sum() - 1) < 0.02

# %%
# Beside OpenMM
# -------------
#
# Stored: four runs of each program from the same states. Errors are two standard errors
# of the mean, corrected for autocorrelation. OpenMM's barostat changes volumes by Monte
# Carlo; both sample the isothermal-isobaric ensemble. The dihedrals of a peptide take
# nanoseconds to equilibrate, so their histograms show where it has been so far.

records = {name: np.array(found[name]["records"]) for name in ("openmm", "piston")}
first = BURN_IN * 1000 // (DT * EVERY)
time = np.arange(1, records["piston"].shape[1] + 1) * DT * EVERY / 1000
labels = ("density / g cm$^{-3}$", "potential energy / kJ mol$^{-1}$")
titles = {"openmm": "OpenMM", "piston": "adjsim"}
fig, axes = plt.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
for column, label in enumerate(labels):
    means = {}
    for name, color in (("openmm", "C1"), ("piston", "C0")):
        each = [mean_with_error(run[first:, column].tolist()) for run in records[name]]
        value = np.mean([x.value for x in each])
        error = np.linalg.norm([x.stderr for x in each]) / len(each)
        means[name] = value, error
        print(f"{label:34}{titles[name]:8}{value:12.4f} +- {2 * error:.4f}")
        axes[0, column].plot(time, records[name][0, :, column], color, lw=0.6)
        axes[0, column].axhspan(
            value - 2 * error, value + 2 * error, color=color, alpha=0.3
        )
    gap = abs(means["openmm"][0] - means["piston"][0])
    assert gap < 4 * np.hypot(means["openmm"][1], means["piston"][1]), label
    axes[0, column].set(xlabel="time / ps", ylabel=label)
for name in records:
    milliseconds = 1e3 * found[name]["seconds a step"]
    print(f"{titles[name]:8} {milliseconds:.2f} ms a step, one thread")
for column, angle in enumerate((r"$\phi$", r"$\psi$")):
    for name, color in (("openmm", "C1"), ("piston", "C0")):
        values = np.degrees(records[name][:, first:, 2 + column]).ravel()
        axes[1, column].hist(
            values,
            np.arange(-180, 181, 10),
            density=True,
            histtype="step",
            color=color,
            label=titles[name],
        )
    axes[1, column].set(xlabel=f"{angle} / degrees", ylabel="density of samples")
axes[1, 0].legend()
plt.show()

# %%
# How long a gradient is of use
# -----------------------------
#
# Stored: the gradient of the density at the end of exact paths. Each path is retraced
# without an error. In a liquid the gradient grows exponentially with the length of the
# path: it is exact, and after a picosecond it says nothing about the mean density. For
# means at equilibrium take :class:`~adjsim.ScoreFunction` or
# :class:`~adjsim.Reweighting` (:doc:`plot_water_density`). Gradients by lengths need
# :class:`~adjsim.Pathwise` over short times, since the measure of constrained states
# depends on them.

rows = found["path"]
assert [row["steps"] for row in rows] == list(STEPS)
assert all(row["reconstruction error"] == 0 for row in rows)
print("  steps   d density/d(O-H)   bits   forward  backward   memory of backward")
for row in rows:
    print(
        f"{row['steps']:7}{row['by bonds of water']:18.3g}{row['buffer bits']:7.1f}"
        f"{row['seconds forward']:9.1f} s{row['seconds backward']:9.1f} s"
        f"{row['megabytes of backward']:13.0f} MB"
    )
fig, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
axis.loglog(
    [row["steps"] * DT / 1000 for row in rows],
    [abs(row["by bonds of water"]) for row in rows],
    "o-",
    label="O-H of all waters",
)
axis.loglog(
    [row["steps"] * DT / 1000 for row in rows],
    [row["norm"] for row in rows],
    "s-",
    label="norm over all lengths",
)
axis.set(xlabel="length of the path / ps", ylabel="slope / g cm$^{-3}$ angstrom$^{-1}$")
axis.legend()
plt.show()
