r"""
Which gradient trains a protein force field
===========================================

GB99dms (Greener, Chem. Sci. 15, 4897 (2024)) is a protein force field with implicit
solvent, whose numbers were trained by gradients through long simulations. Its
cotangents were clipped every 100 steps, since they explode. This page takes ff14SB with
the solvent GBn2, the protein Trp-cage (284 atoms) and the loss of GB99dms, and compares
four gradients with their errors: the exact path, the clipped path, reweighting and the
score function.

With mean :math:`\mu` and deviation :math:`s` of a distance between alpha carbons, over
the frames of a run (Q) and in explicit water (P), the loss is the mean over pairs of

.. math:: \min(|i - j| / 10, 1) \,[\ln(1 + D(P|Q)) + \ln(1 + D(Q|P))], \qquad
   D(P|Q) = \ln\frac{s_Q}{s_P} + \frac{s_P^2 + (\mu_P - \mu_Q)^2}{2 s_Q^2} - \frac12

The runs are those of a first look on two busy cores: at most ten picoseconds, where
the published ones have five nanoseconds. They start from one structure, so they say how
a loss after this time changes, and nothing about the folded state. The script
``examples/data/make_gb99dms.py`` takes longer lengths as arguments. The page reads its
output. Units of the potential are eV, angstrom and amu.
"""

# sphinx_gallery_thumbnail_number = 1

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from ase import units

import adjsim

DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"
STUDY = json.loads((DATA / "gb99dms.json").read_text())
ROWS = {(row["steps"], row["kind"]): row for row in STUDY["gradients"]["rows"]}
LENGTHS = sorted({steps for steps, _ in ROWS})
KINDS = list(dict.fromkeys(kind for _, kind in ROWS))
# The steps of the runs of which differences were taken.
DIFFERED = 1000
PARTS = ("gradients", "differences", "training")
for part in PARTS:
    found = STUDY[part]
    print(f"{part}: commit {found['commit'][:10]}, {found['seconds']:.0f} s of a core")

# %%
# The gradient by every estimator
# -------------------------------
#
# The numbers are scaled in 200 groups: charges and wells by type, torsions by term,
# numbers of the solvent by element. The bars are the norm of the gradient by all
# scales. The lines are the norm of its standard error, over four replicas: an estimate
# below its line is noise. Four replicas give an error of an error of 40 %.

figure, axes = plt.subplots(1, len(LENGTHS), figsize=(8, 3), layout="constrained")
for axis, steps in zip(np.atleast_1d(axes), LENGTHS, strict=True):
    for i, kind in enumerate(KINDS):
        row = ROWS[steps, kind]
        axis.bar(i, np.linalg.norm(row["gradient"]), color=f"C{i}", alpha=0.6)
        axis.hlines(np.linalg.norm(row["stderr"]), i - 0.4, i + 0.4, color="k")
    axis.set(yscale="log", title=f"{steps} steps")
    axis.set_xticks(range(len(KINDS)), KINDS, rotation=30)
axes.flat[0].set_ylabel("norm")
plt.show()

for (steps, kind), row in ROWS.items():
    size, error = (np.linalg.norm(row[x]) for x in ("gradient", "stderr"))
    text = f"{steps:6d} {kind:13s} {size:9.3g} +- {error:.3g}, {row['seconds']:.0f} s"
    if row["growth"] is not None:
        text += f", cotangents grow at {row['growth'] * 1000 * units.fs:.1f} / ps"
    print(text)

# %%
# At no length is a gradient clearly larger than its error. From 1,000 steps on the
# exact path has the largest error, since its cotangents grow by a factor of ten in 0.6
# picoseconds. At 10,000 steps they have grown to :math:`10^{16}`, and the gradient of a
# path says nothing about the loss. The clip keeps the norm of the gradient near one at
# every length, below its error, so it tells no more. Reweighting and score function
# agree, since both see the same covariance, and their errors stay below 21. They need
# more independent frames: in ten picoseconds a replica has about two.
#
# Path and stationary estimates answer two questions. They would agree for runs that
# forget their start, which takes these proteins nanoseconds. Their cosines say how
# far they are from it:

for steps in LENGTHS:
    vectors = [np.array(ROWS[steps, kind]["gradient"]) for kind in KINDS]
    directions = np.array([x / np.linalg.norm(x) for x in vectors])
    print(steps, "steps, cosines:")
    print(np.round(directions @ directions.T, 2))

# %%
# Against differences
# -------------------
#
# Six scales were changed by 2 % to both sides, with the same starts and noise, in
# runs of 1,000 steps: a charge scale, a well, a torsion and three numbers of the
# solvent. Five differences are within two errors of zero, so they cannot judge a
# gradient, and a correlation over six numbers of which five are noise says nothing.
# The difference by the scale of the neck is beyond its error. The exact path has it
# within its own large error. The clipped path is 4.5 errors away: this is its bias,
# which its error bar leaves out.

DIFFERENCES = STUDY["differences"]["rows"]
places = [STUDY["keys"].index(row["key"]) for row in DIFFERENCES]
known = np.array([[row["value"], row["stderr"]] for row in DIFFERENCES])
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
numbers = np.arange(len(known))
axis.errorbar(numbers - 0.3, *known.T, fmt="ks", label="difference")
for i, kind in enumerate(KINDS):
    row = ROWS[DIFFERED, kind]
    value, error = (np.array(row[x])[places] for x in ("gradient", "stderr"))
    axis.errorbar(numbers - 0.15 * (1 - i), value, error, fmt="o", label=kind)
    distance = np.abs(value - known[:, 0]) / np.hypot(error, known[:, 1])
    same = np.corrcoef(value, known[:, 0])[0, 1]
    print(f"{kind:13s} correlation {same:5.2f}, distance in errors", distance.round(1))
axis.axhline(0, color="grey", lw=0.5)
axis.set_yscale("symlog", linthresh=0.1)
axis.set_xticks(numbers, [row["key"].split()[0] for row in DIFFERENCES], rotation=20)
axis.set_ylabel("derivative by scale")
figure.legend(fontsize="small", loc="outside upper center", ncols=5)
plt.show()

# %%
# A short training
# ----------------
#
# Five steps of Adam, of 0.3 % each, follow the gradient of the exact path through 400
# steps, whose norm is one to two times that of its error. Each iteration has its own
# noise. The test has one noise for the first and the last numbers, which no iteration
# saw. Neither Trp-cage nor BBA (504 atoms, not trained on) changed beyond its error,
# and the losses of the iterations scatter as much from noise to noise. So nothing
# improved: five small steps along a gradient of so short runs are less than the noise
# of four replicas.

TRAINING = STUDY["training"]
losses, errors = ([row[x] for row in TRAINING["rows"]] for x in ("loss", "stderr"))
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
axes[0].errorbar(range(len(losses)), losses, errors, marker="o")
axes[0].set(xlabel="iteration", ylabel="loss of Trp-cage")
tests = [name for name in ("trp-cage", "bba") if f"test-{name}" in STUDY]
for i, name in enumerate(tests):
    rows = STUDY[f"test-{name}"]["rows"]
    pair = [[row[x] for row in rows] for x in ("loss", "stderr")]
    axes[1].errorbar([i - 0.1, i + 0.1], *pair, fmt="o")
    change, error = np.diff(pair[0])[0], np.hypot(*pair[1])
    text = f"{name}: {pair[0][0]:.3f}, then {pair[0][1]:.3f}"
    print(f"{text}: {change / error:.1f} errors")
axes[1].set_xticks(range(len(tests)), tests)
axes[1].set_ylabel("before and after")
plt.show()

# %%
# The published changes
# ---------------------
#
# Root mean squares of relative changes by kind, and the share of numbers that grew:
# of GB99dms after its training, and of the step downhill along the exact path at
# 1,000 steps, scaled to a norm of one. The two have different groups and starts
# (GB99dms began with a99SB-disp), so they are compared by kind, and sizes only among
# kinds. The gradient here is noise but for the scale of the neck, whose difference
# says that it should grow. It grew by 3 % in the published training. Other agreements
# of signs may be chance.

downhill = -np.array(ROWS[DIFFERED, "exact path"]["gradient"])
kinds = [key.split()[0] for key in STUDY["keys"]]
print("                          published          here")
for kind, rows in STUDY["published"].items():
    change = np.array([x for _, x in rows])
    own = downhill[[k == kind for k in kinds]]
    own = own / np.linalg.norm(downhill)
    print(
        f"{kind:24s} {np.sqrt((change**2).mean()):.4f}, {np.mean(change > 0):.2f} grew"
        f"   {np.sqrt((own**2).mean()):.4f}, {np.mean(own > 0):.2f} grow"
    )
