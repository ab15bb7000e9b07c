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
for name in ("gradients", "differences", "training"):
    for length, part in parts_of(name).items():
        plan = part["settings"]["plan"]
        print(
            f"{name} {length}: {plan['replicas']} replicas of {plan['steps']} steps, "
            f"{part['seconds']:.0f} s of a core, commit {part['commit'][:10]}"
        )


def size(x):
    """Return the norm of numbers whose squares may overflow."""
    largest = np.abs(x).max()
    return largest * np.linalg.norm(np.array(x) / largest)


# %%
# The gradient by every estimator
# -------------------------------
#
# TEXT1

figure, axes = plt.subplots(1, len(LENGTHS), figsize=(9, 3), layout="constrained")
for axis, steps in zip(np.atleast_1d(axes), LENGTHS, strict=True):
    for i, kind in enumerate(KINDS):
        row = ROWS[steps, kind]
        axis.bar(i, size(row["scales"]), color=f"C{i}", alpha=0.6)
        axis.hlines(size(row["scales stderr"]), i - 0.4, i + 0.4, color="k")
    axis.set(yscale="log", title=f"{steps} steps")
    axis.set_xticks(range(len(KINDS)), KINDS, rotation=40, ha="right")
axes.flat[0].set_ylabel("norm")
plt.show()

for (steps, kind), row in ROWS.items():
    value, error = (np.array(row[x]) for x in ("scales", "scales stderr"))
    known = np.abs(value) > 3 * error
    text = f"{steps:6d} {kind:13s} {size(value):9.3g} +- {size(error):.3g}, "
    text += f"{known.sum():3d} of {len(value)} beyond three errors"
    if row["growth"] is not None:
        rate = row["growth"] * 1000 * units.fs / np.log(10)
        text += f", cotangents grow by 10^({rate:.2f} t/ps)"
    print(text)

# %%
# TEXT2

for steps in LENGTHS:
    vectors = [np.array(ROWS[steps, kind]["scales"]) for kind in KINDS]
    directions = np.array([x / size(x) for x in vectors])
    print(steps, "steps, cosines:")
    print(np.round(directions @ directions.T, 2))

# %%
# Against differences
# -------------------
#
# TEXT3

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
        value, error = (np.array(row[x]) for x in ("kinds", "kinds stderr"))
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
# TEXT4

TRAININGS = parts_of("training")
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
# The published changes
# ---------------------
#
# TEXT5

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
