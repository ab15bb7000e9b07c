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

The runs have up to 100 picoseconds, where the published ones have five nanoseconds.
They start from one structure, and the second half of a run counts. So they say how a
loss after this time changes, and nothing about the folded state. The script
``examples/data/make_gb99dms.py`` takes longer lengths as arguments. The page reads its
output. Units of the potential are eV, angstrom and amu.
"""

# sphinx_gallery_thumbnail_number = 1

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from ase import units
from scipy.stats import t as student

import adjsim

DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"
STUDY = json.loads((DATA / "gb99dms.json").read_text())


def parts_of(word):
    """Return the parts of the study whose name begins with a word."""
    return {
        name.removeprefix(f"{word}-"): part
        for name, part in STUDY.items()
        if name.startswith(f"{word}-")
    }


GRADIENTS = {int(name): part for name, part in parts_of("gradients").items()}
LENGTHS = sorted(GRADIENTS)
ROWS = {
    (steps, row["kind"]): row for steps in LENGTHS for row in GRADIENTS[steps]["rows"]
}
KINDS = list(dict.fromkeys(kind for _, kind in ROWS))
AT = {steps: [kind for kind in KINDS if (steps, kind) in ROWS] for steps in LENGTHS}
for name in ("gradients", "differences", "training"):
    for length, part in parts_of(name).items():
        plan, commits = part["settings"]["plan"], [x["commit"] for x in part["rows"]]
        # Those of a process that was killed are missing.
        least = "at least " * any(row.get("resumed") for row in part["rows"])
        print(
            f"{name} {length}: {plan['replicas']} replicas of {plan['steps']} steps, "
            f"{least}{part['seconds']:.0f} s of a core, commit "
            + ", ".join(x[:10] for x in dict.fromkeys(commits))
        )


def size(x):
    """Return the norm of numbers whose squares may overflow."""
    largest = np.abs(x).max()
    return largest * np.linalg.norm(np.array(x) / largest)


# %%
# The gradient by every estimator
# -------------------------------
#
# The numbers are scaled in 200 groups: charges and wells by type, torsions by term,
# numbers of the solvent by element. The bars are the norm of the gradient by all
# scales, and the lines the norm of its standard error over the replicas. An estimate
# below its line is noise as a whole, though single numbers of it may be known.

figure, axes = plt.subplots(1, len(LENGTHS), figsize=(9, 3), layout="constrained")
for axis, steps in zip(np.atleast_1d(axes), LENGTHS, strict=True):
    for i, kind in enumerate(AT[steps]):
        row = ROWS[steps, kind]
        axis.bar(i, size(row["scales"]), color=f"C{KINDS.index(kind)}", alpha=0.6)
        axis.hlines(size(row["scales stderr"]), i - 0.4, i + 0.4, color="k")
    axis.set(yscale="log", title=f"{steps} steps")
    axis.set_ylim(bottom=0.1)
    axis.set_xticks(range(len(AT[steps])), AT[steps], rotation=40, ha="right")
axes.flat[0].set_ylabel("norm")
plt.show()

for (steps, kind), row in ROWS.items():
    value, error = (np.array(row[x]) for x in ("scales", "scales stderr"))
    known = np.abs(value) > 3 * error
    text = f"{steps:6d} {kind:13s} {size(value):9.3g} +- {size(error):.3g}, "
    text += f"{known.sum():3d} of {len(value)} beyond three errors"
    replicas = STUDY[f"gradients-{steps}"]["settings"]["plan"]["replicas"]
    chance = 2 * len(value) * student.sf(3, replicas - 1)
    text += f" ({chance:.0f} by chance)"
    if row["growth"] is not None:
        rate = row["growth"] * 1000 * units.fs / np.log(10)
        text += f", cotangents grow by 10^({rate:.2f} t/ps)"
        if rate > 0:
            largest = np.log10(np.finfo(float).max)
            text += f", to the largest double in {largest / rate:.0f} ps"
    print(text)

# %%
# The exact path is right about each path, and these diverge: cotangents grow by a
# factor of ten in 0.7 picoseconds, later in half of one. At 1,000 steps its error is
# more than half of the gradient, at 10,000 steps both are near :math:`10^{18}`, and at
# 100,000 steps near :math:`10^{185}`. This gradient is exact, and says nothing about
# the loss. The clip keeps the norm near one. At 1,000 steps it knows more single
# numbers than any other estimate, and at 10,000 steps few. Reweighting and score
# function agree, since both see the same covariance. They need independent frames: at
# 1,000 steps they know nothing, and at 10,000 steps 14 numbers. Beyond three errors of
# four replicas are also numbers without a gradient, as many as are printed. So at
# 100,000 steps no estimate knows much. (Two rows there are of an earlier commit, whose
# functions had other last bits, so that the replicas are other ones.) At a million
# steps, a nanosecond, the cotangents of the exact path are beyond the largest double.
# Clipped, they are retraced to the bit, by ``benchmarks/protein.py``.
#
# Path and stationary estimates answer two questions. They would agree for runs that
# forget their start, which takes these proteins nanoseconds. Their cosines say how far
# they are from it:

for steps in LENGTHS:
    vectors = [np.array(ROWS[steps, kind]["scales"]) for kind in AT[steps]]
    directions = np.array([x / size(x) for x in vectors])
    print(steps, "steps, cosines of", ", ".join(AT[steps]))
    print(np.round(directions @ directions.T, 2))

# %%
# Against differences
# -------------------
#
# The common scales of all numbers of six kinds were changed to both sides, by 2 % in
# runs of 1,000 steps and by 5 % in runs of 10,000, with the same starts and noise on
# both sides, and 16 replicas. The difference by one type alone would be noise.
#
# At 1,000 steps the clipped path agrees with all six differences within 0.6 of the
# combined error, and its own errors are three to thirteen times smaller. So the bias of
# the clip, which no error bar contains, is smaller than can be seen here. The exact
# path agrees within 2.2 errors, most of which are larger than those of the differences.
# At 10,000 steps the exact path is no estimate. The clipped path has lost what
# differences show of radii and scales of the solvent, and is 1.9 and 2.6 errors away.
# Reweighting and score function agree with five of six within 1.1 errors, and are 2.0
# away by the scales, the only difference that is beyond two of its own errors. So the
# clip is worth following for a picosecond, and for ten there is a hint, and no proof,
# that a covariance is.

DIFFERENCES = {int(name): part for name, part in parts_of("differences").items()}
figure, axes = plt.subplots(
    1, len(DIFFERENCES), figsize=(9, 3), layout="constrained", sharey=True
)
for axis, steps in zip(axes, sorted(DIFFERENCES), strict=True):
    rows = DIFFERENCES[steps]["rows"]
    known = np.array([[row["value"], row["stderr"]] for row in rows])
    numbers = np.arange(len(known))
    axis.errorbar(numbers - 0.3, *known.T, fmt="ks", label="difference")
    for i, kind in enumerate(KINDS):
        row = ROWS[steps, kind]
        value, error = (np.array(row[x])[numbers] for x in ("kinds", "kinds stderr"))
        axis.errorbar(
            numbers - 0.15 * (1 - i), value, error, fmt="o", color=f"C{i}", label=kind
        )
        distance = np.abs(value - known[:, 0]) / np.hypot(error, known[:, 1])
        same = np.corrcoef(value, known[:, 0])[0, 1]
        print(
            f"{steps:6d} {kind:13s} correlation {same:5.2f}, distance in errors",
            distance.round(1),
        )
    axis.axhline(0, color="grey", lw=0.5)
    axis.set_yscale("symlog", linthresh=1)
    axis.set(ylim=(-100, 100), title=f"{steps} steps")
    axis.set_xticks(numbers, [row["kind"] for row in rows], rotation=30, ha="right")
axes[0].set_ylabel("derivative by the scale of a kind")
handles = axes[0].get_legend_handles_labels()
figure.legend(*handles, fontsize="small", loc="outside upper center", ncols=5)
plt.show()

# %%
# Three trainings
# ---------------
#
# Fifteen steps of Adam, of 0.5 % each, follow the gradient of runs of 1,000 steps with
# eight replicas. Each iteration has its own noise, which is the same in all trainings.
# The test has one noise for the first and the last numbers, which no iteration saw.
#
# Along the exact and the clipped path the loss of Trp-cage fell by a third, five to six
# times its error. Adam takes steps of one size, so it bears gradients of the exact path
# that are mostly error, one of them with the norm 920. The loss of BBA (504 atoms, not
# trained on) changed by no more than 1.3 of its errors along the paths. So what was
# learnt is how this protein moves in its first picosecond, and nothing shows that
# another one gains. Along the reweighted gradient both losses rose, by many errors: it
# answers the question of equilibrium, of which runs of a picosecond are no sample, and
# it is noise besides.

TRAININGS = parts_of("training")
TRAININGS = dict(
    sorted(TRAININGS.items(), key=lambda x: KINDS.index(x[1]["settings"]["kind"]))
)
figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for i, (word, part) in enumerate(TRAININGS.items()):
    rows = part["rows"]
    losses, errors = ([row[x] for row in rows] for x in ("loss", "stderr"))
    color = f"C{KINDS.index(part['settings']['kind'])}"
    axes[0].errorbar(range(len(rows)), losses, errors, color=color, label=word)
    for j, name in enumerate(("trp-cage", "bba")):
        rows = STUDY[f"test-{word}-{name}"]["rows"]
        pair = [[row[x] for row in rows] for x in ("loss", "stderr")]
        place = j + 0.2 * (i - 1)
        axes[1].errorbar([place - 0.05, place + 0.05], *pair, fmt="o-", color=color)
        change, error = np.diff(pair[0])[0], np.hypot(*pair[1])
        text = f"{word}, {name}: {pair[0][0]:.3f}, then {pair[0][1]:.3f}"
        print(f"{text}: {change:+.3f} +- {error:.3f}")
axes[0].set(xlabel="iteration", ylabel="loss of Trp-cage")
axes[0].legend(fontsize="small")
axes[1].set_xticks(range(2), ["Trp-cage", "BBA"])
axes[1].set_ylabel("before and after")
plt.show()

# %%
# What a nanosecond costs
# -----------------------
#
# Exact steps on one core, forward, and forward and backward for the gradient by all
# trained numbers. The runs above have flexible bonds and steps of a femtosecond, as the
# published trainings. The published long simulations have constraints of the bonds of
# hydrogen, heavier hydrogen (here of four atomic mass units) and steps of four
# femtoseconds. ``CONSTRAINED`` in ``examples/data/gb99dms.py`` is such a model. Its
# steps cost more, since the constraints are solved, forward and backward, and there
# are four times fewer. An error of zero says that the backward run ended with the bits
# of the start. A longer proof is ``benchmarks/protein.py``: a million steps.

for row in STUDY["costs"]["rows"]:
    print(
        f"{row['kind']:30s} {row['dt']:.0f} fs: a nanosecond takes "
        f"{row['forward']:.0f} s, with the gradient {row['gradient']:.0f} s "
        f"({row['gradient'] / row['forward']:.2f}), reconstruction error "
        f"{row['reconstruction error']:g}, commit {row['commit'][:10]}"
    )

# %%
# The published changes
# ---------------------
#
# Root mean squares of relative changes by kind, and the share of numbers that grew: in
# GB99dms after its training, and in the trainings here. The two have different groups
# and starts (GB99dms began with a99SB-disp), so they are compared by kind. In both
# trainings along a path scale and neck of the solvent grew and its offset fell, as in
# the published one. Three signs agree by chance once in eight times. The radii, which
# changed most in the published training, changed less than most kinds here.

print("                          published        " + "    ".join(TRAININGS))
for kind, rows in STUDY["published"].items():
    change = np.array([x for _, x in rows])
    own = [k.split()[0] == kind for k in STUDY["keys"]]
    text = (
        f"{kind:24s} {np.sqrt((change**2).mean()):.3f}, {np.mean(change > 0):.2f} grew"
    )
    for part in TRAININGS.values():
        moved = np.array(part["scales"])[own] - 1
        text += f"  {np.sqrt((moved**2).mean()):.3f}, {np.mean(moved > 0):.2f}"
    print(text)
