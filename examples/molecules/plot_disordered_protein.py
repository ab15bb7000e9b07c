r"""
A disordered protein, one bead a residue
========================================

How sticky are the residues of a disordered protein? The page takes a coarse-grained
model from OpenMM, with its custom forces, and fits one number to a measured radius of
gyration: the factor by which all residues stick more than the model says. The protein
is two histatin-5 chains in one, 48 residues, whose radius was found by X-ray
scattering. The model is CALVADOS 2 (Tesei and Lindorff-Larsen, Open Research Europe 2,
94 (2022)).

The radius is an equilibrium mean, so :class:`~adjsim.Reweighting` of stored frames
gives its derivative, by the factor and by each residue, with errors. A chain relaxes
within 30 ps of this model's time, which runs faster than that of a protein in water.

Units of the potential are eV, angstrom and amu. Long runs were computed before, by
``examples/data/make_disordered_protein.py``. The page reads their results, called
*stored* below, and computes some of them again.
"""

# sphinx_gallery_thumbnail_number = 1

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import openmm
import torch
from ase import units

import adjsim

DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"
sys.path.append(str(DATA))

from make_disordered_protein import (
    ASHBAUGH_HATCH,
    DT,
    EVERY,
    MEASURED,
    MEASURED_ERROR,
    PS,
    REPLICAS,
    SEQUENCE,
    YUKAWA,
    Protein,
    square,
)

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a small system

STUDY = json.loads((DATA / "disordered_protein.json").read_text())
print(f"stored: commit {STUDY['commit'][:10]}, {STUDY['minutes']} minutes")

# %%
# The model
# ---------
#
# Beads of neighbouring residues are joined by springs. All others repel each other by
# their size and attract each other by their stickiness :math:`\lambda`, as in the
# potential of Ashbaugh and Hatch: a Lennard-Jones potential whose well is scaled by
# :math:`\lambda` and whose wall is not. Charges are screened by the salt. In OpenMM
# each is a ``CustomNonbondedForce``, with numbers of the beads and of all:
#
# .. code-block:: python
#
#    sticky = openmm.CustomNonbondedForce(ASHBAUGH_HATCH)
#    sticky.addPerParticleParameter("s")     # size
#    sticky.addPerParticleParameter("l")     # stickiness
#    sticky.addGlobalParameter("scale", 1.0) # ours: the factor of all
#
# :func:`~adjsim.io.from_openmm` makes kernels from the text, whose energy is that of
# OpenMM.

print(ASHBAUGH_HATCH, YUKAWA, sep="\n")
protein = Protein()
for name, parameter in protein.potential.named_parameters():
    print(f"{name:22}{tuple(parameter.shape)}")

context = openmm.Context(
    protein.system,
    openmm.VerletIntegrator(0.001),
    openmm.Platform.getPlatformByName("Reference"),
)
starts = torch.tensor(STUDY["starts"])
context.setPositions(starts[0].numpy() / 10)
state = context.getState(energy=True)
expected = state.getPotentialEnergy()._value * units.kJ / units.mol
energy = float(protein.potential(starts[0]).detach())
print(f"energy {energy:.12f} eV, by OpenMM {expected:.12f} eV")
assert abs(energy - expected) < 1e-9 * abs(expected)

# %%
# The fit
# -------
#
# Stored: Newton steps for the factor, from one. Each takes the mean of the squared
# radius of 16 chains over 1.6 ns and its derivative,
#
# .. math:: \frac{\partial \langle R^2 \rangle}{\partial \theta} =
#    -\frac{1}{kT} \operatorname{cov}\left(R^2, \frac{\partial U}{\partial
#    \theta}\right).
#
# A step that changes the factor little takes the same frames with other weights. Beside
# the fit stand runs at other factors, which use no gradient.

fit, curve = STUDY["fit"], STUDY["curve"]
for k, row in enumerate(fit[:4]):
    print(
        f"step {k}: factor {row['scale']:.4f}, mean square {row['square']:.3f} +- "
        f"{row['square error']:.3f} nm2, slope {row['slope']:.2f} +- "
        f"{row['slope error']:.2f}, {'new' if row['sampled'] else 'same'} frames"
    )
last = fit[-1]
scale = last["scale"]
of_data = 2 * MEASURED * MEASURED_ERROR / abs(last["slope"])
of_runs = last["square error"] / abs(last["slope"])
error = float(np.hypot(of_data, of_runs))
print(
    f"factor {scale:.2f} +- {error:.2f}: {of_data:.2f} of the measurement, "
    f"{of_runs:.2f} of the runs"
)
again = curve[-1]
print(
    f"radius of other runs at this factor {again['radius']:.3f} +- "
    f"{again['error']:.3f} nm, measured {MEASURED} +- {MEASURED_ERROR} nm"
)
assert sum(row["sampled"] for row in fit) == 2
assert abs(last["square"] - MEASURED**2) < 1e-4
# The runs of the fit and these have an error each.
spread = np.hypot(again["error"], last["square error"] / (2 * MEASURED))
assert abs(again["radius"] - MEASURED) < 3 * spread

fig, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
rows = sorted(curve, key=lambda row: row["scale"])
axes[0].axhspan(
    MEASURED - MEASURED_ERROR, MEASURED + MEASURED_ERROR, color="0.85", label="measured"
)
axes[0].errorbar(
    [row["scale"] for row in rows],
    [row["radius"] for row in rows],
    [2 * row["error"] for row in rows],
    fmt="C0o-",
    ms=4,
    capsize=3,
    label="runs",
)
for row in fit[:2]:
    # The tangent that the gradient gives.
    radius, step = row["square"] ** 0.5, np.array([-0.3, 0.3])
    tangent = radius + row["slope"] / (2 * radius) * step
    axes[0].plot(row["scale"] + step, tangent, "C1-", lw=2)
axes[0].plot([], [], "C1-", lw=2, label="gradient of the fit")
axes[0].errorbar(scale, MEASURED, xerr=2 * error, fmt="C3*", ms=12, label="fit")
axes[0].set(xlabel="factor of stickiness", ylabel="radius of gyration (nm)")
axes[0].legend()
edges = np.linspace(1, 4, 1 + len(curve[0]["counts"]))
colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(rows)))
for row, color in zip(rows, colors, strict=True):
    counts = np.array(row["counts"]).reshape(-1, 3).sum(1)
    density = counts / counts.sum() / (3 * (edges[1] - edges[0]))
    axes[1].stairs(density, edges[::3], color=color, label=f"{row['scale']:.2f}")
axes[1].set(xlabel="radius of gyration (nm)", ylabel="density (1/nm)")
axes[1].legend(title="factor")
slope, slope_error = (np.array(STUDY["residues"][x]) for x in ("grad", "error"))
number = np.arange(1, len(SEQUENCE) + 1)
sort = np.array(["YF".find(x) >= 0 for x in SEQUENCE])
for chosen, color, label in ((sort, "C3", "Y, F"), (~sort, "C0", "others")):
    axes[2].bar(number[chosen], slope[chosen], color=color, label=label)
axes[2].errorbar(number, slope, 2 * slope_error, fmt="none", color="k", lw=0.7)
axes[2].set(
    xlabel="residue", ylabel=r"$\partial\langle R^2\rangle/\partial\lambda_i$ (nm$^2$)"
)
axes[2].legend()
plt.show()
# The energy depends on the products of the factor and each number.
stickiness = protein.stickiness.detach().numpy()
assert abs(stickiness @ slope / scale / last["slope"] - 1) < 1e-3

# %%
# Left: the factor is above one, so the protein is more compact than the model says.
# Bars are two standard errors, and most of the error of the factor is that of the
# measured radius. Middle: stickier chains are smaller, and at twice the stickiness they
# collapse. Right: the derivative by the stickiness of each residue, all from the same
# frames. It is largest for the tyrosine in the middle of the chain, but place, size and
# charge matter too. The derivative by the factor is their sum, weighted by
# :math:`\lambda_i` over the factor.
#
# One measured radius determines one number. The 48 derivatives show how a fit to many
# proteins, as that of CALVADOS, would distribute the change over residues.
#
# The same here
# -------------
#
# The page continues the stored runs at the fitted factor, in compiled steps, and calls
# the estimator itself. Means and derivatives agree with the stored ones within errors.

protein.put(scale)
LENGTH = 60 * PS
found = adjsim.Reweighting(every=EVERY)(
    protein.simulation(starts, LENGTH),
    adjsim.TimeAverage(square),
    replicas=REPLICAS,
    chunks=8,
    generator=5,
)
name = "potential.custom_pairs.scale"
value, slope = float(found.value), float(found.grad[name])
value_error, slope_error = float(found.value_stderr), float(found.grad_stderr[name])
print(f"mean square {value:.2f} +- {value_error:.2f} nm2, stored {last['square']:.2f}")
print(f"slope {slope:.2f} +- {slope_error:.2f} nm2, stored {last['slope']:.2f}")
print(f"{found.diagnostics['ess']:.0f} independent samples")
for one, its_error, other in (
    (value, value_error, "square"),
    (slope, slope_error, "slope"),
):
    # Errors come from eight chunks, whose t is above 5 once in six hundred times.
    assert abs(one - last[other]) < 5 * np.hypot(its_error, last[f"{other} error"])

# %%
# The gradient along a path
# -------------------------
#
# The same number has a derivative along one path, too, with the noise held fixed. For
# the steps taken it is exact: :class:`~adjsim.ReversibleAdjoint` retraces the path bit
# for bit, and the page checks the derivative against differences. It answers how the
# radius changes at the end of this path, not how the mean changes, so the fit above
# does not use it.


def end(steps, exact=True):
    run = adjsim.simulate(
        protein.dynamics,
        protein.dynamics.init(starts[:2], generator=1),
        [0.0, steps * DT],
        solver=adjsim.Splitting("BAOAB", DT, exact=exact),
        adjoint=adjsim.ReversibleAdjoint() if exact else adjsim.DirectAdjoint(),
        generator=1,
    )
    return square(run.final).mean(), run


radius, run = end(40)
(gradient,) = torch.autograd.grad(radius, protein.scale)
h, ends = 1e-5, []
with torch.no_grad():
    for shift in (h, -h):
        protein.put(scale + shift)
        ends.append(float(end(40, exact=False)[0]))
    protein.put(scale)
quotient = (ends[0] - ends[1]) / (2 * h)
print(f"after 40 steps: {float(gradient):.8f} nm2, by differences {quotient:.8f} nm2")
print(f"error of the retraced path {run.stats['reconstruction_error']}")
assert abs(float(gradient) - quotient) < 1e-5 * abs(quotient)
