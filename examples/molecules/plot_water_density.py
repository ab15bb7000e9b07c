r"""
The density of water against its force field
============================================

How do density and heat of vaporisation of flexible water change with the well depth
epsilon and the diameter sigma of oxygen, and with the charge q of hydrogen (oxygen has
-2q)? Both are means at constant pressure. This page takes their derivatives by three
estimators, checks them against runs with changed numbers, and says which of them to
take.

* :class:`~adjsim.ScoreFunction` sums a covariance at every step of a run.
* :class:`~adjsim.Reweighting` does so on stored frames, and turns them to changed
  numbers.
* :class:`~adjsim.Pathwise` differentiates the run itself.

The water is SPC/Fw (Wu, Tepper and Voth, J. Chem. Phys. 124, 024503 (2006)) with
particle-mesh Ewald at 298 K and 1 bar, in a box of 64 molecules with a cutoff of 5.3
angstrom. In so small a box the means are not those of the force field in a large one;
the questions of this page do not depend on that. The density with 216 molecules is
beside that of OpenMM in :doc:`/constant_pressure`.

Units are eV, angstrom and picoseconds. Long runs were computed before, by
``examples/data/make_water_gradients.py``. The page reads their results, called *stored*
below, and computes a short run itself.
"""

# sphinx_gallery_thumbnail_number = 1

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import adjsim

DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"
sys.path.append(str(DATA))

from make_water_gradients import (
    FS,
    GRAMS,
    NAMES,
    change,
    solver,
    water,
)

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a small system

STUDY = json.loads((DATA / "water_gradients.json").read_text())
SETTINGS = STUDY["settings"]
found = {name: part["results"] for name, part in STUDY.items() if name != "settings"}
for name in found:
    made = STUDY[name]
    print(f"{name}: commit {made['commit'][:10]}, seed {made['seed']}")

# %%
# A short run
# -----------
#
# The box is a field of the state, so a density at the end of a run has a gradient like
# any other function of the state. ``water()`` reads the system from OpenMM, makes a
# :class:`~adjsim.LangevinPiston`, and puts a parametrization on the charges, so that
# the charge of hydrogen is one parameter. The adjoint is checked against a difference
# of two runs with the same noise. The real-space part of the Ewald sum ends with a jump
# of the force of about its tolerance, 0.001, which the difference sees and the gradient
# does not, so the two are alike to a per cent or so.

dynamics, _ = water()
start = dynamics.state_type(*(torch.tensor(x) for x in found["state"].values()))
numbers = {name: dynamics.get_parameter(full) for name, full in NAMES.items()}


def density_after(steps, adjoint):
    run = adjsim.simulate(
        dynamics,
        start,
        [0.0, steps * FS],
        solver=solver(dynamics),
        adjoint=adjoint,
        generator=1,
    )
    return dynamics.density(run.final) * GRAMS


density = density_after(50, adjsim.ReversibleAdjoint())
slopes = dict(
    zip(numbers, torch.autograd.grad(density, list(numbers.values())), strict=True)
)
print(f"density after 50 fs {density:.4f} g/cm3, and its derivatives")
for name, slope in slopes.items():
    # Of the two species, oxygen is the first.
    whole = (slope * numbers[name]).detach().flatten()[0]
    print(f"  with respect to log {name:8}{whole:8.4f}")

h, ends = 1e-3, []
with torch.no_grad():
    for sign in (1, -1):
        change(dynamics, "charge", sign * h)
        ends.append(density_after(50, adjsim.DirectAdjoint()))
        change(dynamics, "charge", -sign * h)
difference = float(ends[0] - ends[1]) / (2 * h)
print(f"  difference of two runs, charge {difference:8.4f}")
assert abs(difference / (slopes["charge"] * numbers["charge"]).item() - 1) < 0.03

# %%
# Means of changed numbers
# ------------------------
#
# The heat of vaporisation is :math:`U_\mathrm{gas} + kT - (U + PV)/N` for N molecules.
# A molecule alone has the energy of two bonds and an angle, which are independent, so
# :math:`U_\mathrm{gas}` is a sum of three integrals over one variable each. It does not
# depend on the three numbers.
#
# The upper panels show runs with changed numbers, and what Reweighting makes of the
# samples at the numbers of the force field. The line is the tangent by ScoreFunction.
# Bands and bars are two standard errors, of sixteen runs. The lower panels show the
# effective share of the samples.

LABELS = (r"density / g cm$^{-3}$", r"heat of vaporisation / kJ mol$^{-1}$")
SHIFTS, BURN_IN = SETTINGS["shifts"], SETTINGS["burn-in of changed runs (ps)"]
first = round(BURN_IN / SETTINGS["window (ps)"])
reweighted, score = found["reweighting"], found["score"]
base, base_error = np.array(reweighted["value"])
print(
    f"a molecule alone {found['starts']['gas (kJ/mol)']:.3f} kJ/mol\n"
    f"density {base[0]:.4f} +- {base_error[0]:.4f} g/cm3, heat {base[1]:.2f} +- "
    f"{base_error[1]:.2f} kJ/mol"
)


def changed(name, sign):
    """Return mean and error of a run with a changed number, from its replicas."""
    windows = np.array(found["differences"][f"{name} {sign * SHIFTS[name]:+}"])
    means = windows[:, :, first:].mean(-1)
    return means.mean(-1), means.std(-1, ddof=1) / means.shape[-1] ** 0.5


fig, axes = plt.subplots(
    3, 3, figsize=(10, 8), sharex="col", sharey="row", layout="constrained"
)
for column, name in zip(axes.T, SHIFTS, strict=True):
    rows = sorted(
        [*reweighted["curves"][name], {"shift": 0.0, "share": 1.0}],
        key=lambda row: row["shift"],
    )
    shift = np.array([row["shift"] for row in rows])
    values, errors = np.array(
        [row.get("value", reweighted["value"]) for row in rows]
    ).transpose(1, 2, 0)
    for k in range(2):
        ax, slope = column[k], score["slopes"][name][0][k]
        ax.plot(shift, values[k], "C0", label="Reweighting")
        low, high = values[k] - 2 * errors[k], values[k] + 2 * errors[k]
        ax.fill_between(shift, low, high, color="C0", alpha=0.3, lw=0)
        ax.plot(shift, base[k] + slope * shift, "k--", lw=0.8, label="ScoreFunction")
        for sign in (1, -1):
            mean, error = changed(name, sign)
            ax.errorbar(
                sign * SHIFTS[name], mean[k], 2 * error[k], fmt="C3o", capsize=3,
                label="changed numbers" if sign > 0 else None,
            )  # fmt: skip
    column[2].semilogy(shift, [row["share"] for row in rows], "C0.-")
    column[2].set(xlabel=f"change of log {name}")
for ax, label in zip(axes[:, 0], (*LABELS, "effective share"), strict=True):
    ax.set(ylabel=label)
axes[0, 0].legend(fontsize="small")
plt.show()

# %%
# A run at the numbers of the force field has few of the states that another force
# field visits. The share of the samples falls to a half for a change of sigma by a
# quarter of a per cent, of the charges by one per cent, and of epsilon by three. Where
# only some per cent are left, the curve bends to the density of a few frames, and its
# error bar, the spread of these, is too small. Read the share, and sample again below
# a half, as Reweighting does with its default ``threshold``.
#
# Derivatives, and what they cost
# -------------------------------
#
# All derivatives are with respect to logarithms. The last columns of the table are the
# minutes of one core until the derivative is known to a tenth, the time of the stored
# runs times the square of their relative error over a tenth. The differences took two
# runs for each number, and the other two estimators one run for all numbers.


def central(name):
    """Return the difference of the runs with changed numbers, and its error."""
    (more, more_error), (less, less_error) = (changed(name, sign) for sign in (1, -1))
    twice = 2 * SHIFTS[name]
    return (more - less) / twice, np.hypot(more_error, less_error) / twice


SECONDS = {
    "ScoreFunction": STUDY["score"]["seconds"],
    "Reweighting": reweighted["seconds of samples"],
    "differences": STUDY["differences"]["seconds"] / len(SHIFTS),
}
derivatives = {
    name: {
        "ScoreFunction": np.array(score["slopes"][name]),
        "Reweighting": np.array(reweighted["slopes"][name]),
        "differences": np.array(central(name)),
    }
    for name in SHIFTS
}
print("number, estimator: density, heat; minutes to a tenth")
for name, row in derivatives.items():
    for estimator, (value, error) in row.items():
        minutes = SECONDS[estimator] / 60 * (error / (0.1 * value)) ** 2
        print(
            f"{name:8} {estimator:14}{value[0]:8.3f} +- {error[0]:.3f},"
            f"{value[1]:9.2f} +- {error[1]:.2f};{minutes[0]:8.1f},{minutes[1]:8.2f}"
        )

fig, axes = plt.subplots(2, 3, figsize=(10, 5.5), layout="constrained")
for column, (name, row) in zip(axes.T, derivatives.items(), strict=True):
    for k, ax in enumerate(column):
        value, error = np.array(list(row.values()))[:, :, k].T
        ax.bar(range(3), value, yerr=2 * error, capsize=4, color=["C1", "C0", "C3"])
        ax.axhline(0, color="k", lw=0.5)
        ax.set_xticks(range(3), list(row), fontsize="small")
    column[0].set(title=f"log {name}")
for ax, label in zip(axes[:, 0], ("density", "heat of vaporisation"), strict=True):
    ax.set(ylabel=f"derivative of {label}")
plt.show()

for row in derivatives.values():
    exact, exact_error = row["differences"]
    for estimator in ("ScoreFunction", "Reweighting"):
        value, error = row[estimator]
        assert (np.abs(value - exact) < 4 * np.hypot(error, exact_error)).all()

# %%
# Along the paths
# ---------------
#
# :class:`~adjsim.Pathwise` answers another question: how does the density at the end of
# a run change, if the run began at a given state? The start was drawn with the numbers
# of the force field, and the box needs time to follow new ones.

rows = found["paths"]
length = np.array([row["length"] for row in rows])
fig, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
for ax, name in zip(axes, SHIFTS, strict=True):
    value, error = np.array([row["slopes"][name] for row in rows]).T
    for estimator, color in (("Reweighting", "C0"), ("differences", "C3")):
        middle, width = derivatives[name][estimator][:, 0]
        ax.axhspan(
            middle - 2 * width, middle + 2 * width, color=color, alpha=0.3, lw=0,
            label=f"equilibrium, {estimator}",
        )  # fmt: skip
    ax.errorbar(length, value, 2 * error, fmt="ko-", ms=3, capsize=3, label="Pathwise")
    ax.axhline(0, color="k", lw=0.5)
    ax.set(xlabel="length of the path / ps", title=f"log {name}")
    print(name)
    for row, x, dx in zip(rows, value, error, strict=True):
        growth = row["growth"]
        rate = "" if growth is None else f", growth {growth * 1000 * FS:.1f} / ps"
        print(f"  {row['length']:5.2f} ps: {x:9.3f} +- {dx:.3f}{rate}")
axes[0].set(ylabel="derivative of density")
axes[0].legend(fontsize="small")
plt.show()
