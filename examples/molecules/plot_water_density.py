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
LENGTHS = SETTINGS["lengths (ps)"]
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


STEPS = {part: SETTINGS["replicas"] * x * 1000 for part, x in LENGTHS.items()}
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
for estimator, part in (("ScoreFunction", "score"), ("Reweighting", "reweighting")):
    each = 1000 * SECONDS[estimator] / STEPS[part]
    print(f"{estimator}: {STEPS[part] / 1000:.0f} ps, {each:.1f} ms a step")
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
# All three agree. They differ in what their errors come from. That of a covariance
# comes from all of the energy that a number enters: dU/d log sigma of 64 molecules
# fluctuates by some hundred kT, most of it as fast as molecules collide.

memory = found["fluctuations"]
lags, correlations = np.array(memory["lags (ps)"]), np.array(memory["correlations"])
for (name, size), row in zip(memory["sizes"].items(), correlations, strict=True):
    what, unit = (name, "g/cm3") if name == "density" else (f"dU/d log {name}", "kT")
    at = [f"{np.interp(lag, lags, row):.2f} after {lag} ps" for lag in (0.05, 0.1, 0.4)]
    print(f"{what:16} size {size:.3g} {unit}, correlation {', '.join(at)}")

# %%
# The mean over neighbouring steps is rid of much of this noise. The stored frames of
# Reweighting were 0.4 ps apart, and each has all of it. ScoreFunction reads every step.
# From a third of the time simulated its derivatives of the density have smaller errors,
# although a step with the derivatives of the energy takes five times as long. So frames
# should be as close as the memory of dU, not as that of the density: some tens of
# femtoseconds here.
#
# The difference of two runs has no covariance in it, and its error is that of two means
# over the step. It is the cheapest here by far, for each of three numbers. But its step
# has to be chosen so large that the means are well apart, and so small that the curve
# is straight between them, which the figure above shows for these three. A force field
# with fifty numbers takes a hundred runs, and a fit as many in each iteration.
#
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
    limit = 2 * np.abs(value[length < 0.5]).max()
    ax.set_ylim(-limit, limit)  # the longest paths are far outside
    for t, x, dx in zip(length, value, error, strict=True):
        print(f"{name:8}{t:5.2f} ps: {x:8.3f} +- {dx:.3f}")
axes[0].set(ylabel="derivative of density")
axes[0].legend(fontsize="small")
plt.show()

# %%
# After 20 fs the pressure has changed, and the box has not yet: the derivative has an
# error of one or two per cent, and is a tenth of that of equilibrium. After 0.2 ps the
# box is beyond its new equilibrium, since a piston oscillates. The value at 0.1 ps is
# close to that of equilibrium for sigma by accident, and twice as large for epsilon. At
# 0.4 ps the values agree with those of equilibrium, with errors of a fifth to a third,
# and 0.2 ps later nothing is left: the error grows about tenfold in this time, as paths
# with and without a small change part. The error bar shows the noise, and not the bias,
# so the curve does not tell where to stop.
#
# Which estimator to take
# -----------------------
#
# * A few numbers, and a run is affordable for both signs of each: changed numbers, with
#   steps of some per cent.
# * Many numbers: ScoreFunction, or Reweighting with frames some steps apart. One run
#   has all derivatives of all means.
# * A fit: Reweighting, which uses its frames again while their share is large. In a
#   small box this allows for steps of about one per cent of the charges, and the share
#   falls with the number of molecules.
# * The heat of vaporisation takes much less: by the last column its derivatives are
#   known to a tenth after a part of the time that the density takes.
# * A response in time, from a given state, up to about 0.2 ps: Pathwise, which has
#   small errors there, and the derivatives with respect to all numbers and to the start
#   from one sweep. Not for a density of equilibrium.
