r"""
A material from the motion of its surface
=========================================

How stiff is a body of which only the surface is seen? A simulation with a guess of the
material predicts the motion, and gradient descent changes the guess until the
prediction is the measured motion. This page identifies Young's modulus and Poisson's
ratio of a bar, with their errors, and then a modulus that varies in space, in a slab
with a stiff disc.

The measured motion is a simulation of the true body on the same mesh, with noise. So
the errors found here are those of the noise. Units are m, kg and s.

The fits of the field were computed before, by ``examples/data/make_modulus_field.py``.
The page reads them from ``modulus_field.json``, which has their commit and seed.
"""

# sphinx_gallery_thumbnail_number = 3

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation
from matplotlib.colors import LogNorm
from scipy.optimize import minimize
from torch.nn.utils.parametrize import register_parametrization

import adjsim
from adjsim import meshes

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # small bodies

DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"
sys.path.append(str(DATA))
import make_modulus_field as study

# %%
# A bar
# -----
#
# A bar of 0.3 m is clamped at one end. It is released from its straight shape, bends
# under its weight and swings. A camera sees the vertices of its surface in 30 frames,
# each coordinate with an error of 1 mm. The body is a :class:`~adjsim.NeoHookean` solid
# of 144 tetrahedra.
#
# The optimiser works with numbers that may have any value:
# :class:`~adjsim.Positive` makes a modulus of the first, its logarithm, and
# :class:`~adjsim.Between` a Poisson's ratio of the second. So no step of the optimiser
# leaves the admissible materials.

LENGTHS, CELLS, DENSITY, G = [0.3, 0.1, 0.1], [6, 2, 2], 1000.0, 9.81
TRUE_MODULUS, TRUE_RATIO = 8e4, 0.4
FIRST_MODULUS, FIRST_RATIO = 3e4, 0.2
NOISE, DT, FRAMES, STEPS = 1e-3, 5e-4, 30, 20

bar = meshes.box(LENGTHS, CELLS)
mass = bar.lumped_mass(DENSITY)
mass[bar.vertices[:, 0] == 0] = torch.inf
free = torch.isfinite(mass)[bar.surface().unique()]
surface = bar.surface().unique()[free]

body = adjsim.NeoHookean(
    bar,
    torch.nn.Parameter(torch.tensor(TRUE_MODULUS)),
    torch.nn.Parameter(torch.tensor(TRUE_RATIO)),
)
register_parametrization(body, "youngs_modulus", adjsim.Positive())
register_parametrization(body, "poissons_ratio", adjsim.Between(0.0, 0.5))
numbers = [body.parametrizations[name].original for name in body.parametrizations]
dynamics = adjsim.Mechanics(body + adjsim.Gravity(mass, G), mass)


def simulate():
    """Return the positions at all frames, from rest."""
    return adjsim.simulate(
        dynamics,
        dynamics.init(bar.vertices),
        DT * STEPS * torch.arange(FRAMES + 1),
        solver=adjsim.VelocityVerlet(DT),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=True,
    ).position


with torch.no_grad():
    true_motion = simulate()
generator = torch.Generator().manual_seed(0)
noise = NOISE * torch.randn(FRAMES, len(surface), 3, generator=generator)
measured = true_motion[1:, surface] + noise

# %%
# Half the sum of squared residuals, in units of the noise, is minus the logarithm of
# the likelihood. L-BFGS minimises it with the gradient of the reversible adjoint.


def set_numbers(values):
    with torch.no_grad():
        for number, value in zip(numbers, values, strict=True):
            number.fill_(value)


def loss(values):
    """Return the loss and its gradient at the two unconstrained numbers."""
    set_numbers(values)
    residual = (simulate()[1:, surface] - measured) / NOISE
    value = (residual**2).sum() / 2
    gradient = torch.autograd.grad(value, numbers)
    return value.item(), np.array([g.item() for g in gradient])


def material(values):
    """Return Young's modulus and Poisson's ratio."""
    set_numbers(values)
    return body.youngs_modulus.item(), body.poissons_ratio.item()


begin = [
    module.right_inverse(torch.tensor(value)).item()
    for module, value in (
        (adjsim.Positive(), FIRST_MODULUS),
        (adjsim.Between(0.0, 0.5), FIRST_RATIO),
    )
]
path = [begin]
found = minimize(loss, begin, jac=True, method="L-BFGS-B", callback=path.append)
modulus, ratio = material(found.x)

# %%
# The inverse of the second derivative of the loss is the covariance of both numbers.
# Differences of gradients give it. The derivative of each parametrisation takes it to
# modulus and ratio.

SHIFT = 1e-4
rows = [
    (loss(found.x + step)[1] - loss(found.x - step)[1]) / (2 * SHIFT)
    for step in SHIFT * np.eye(2)
]
# From the logarithm and from the logistic function.
scale = np.array([modulus, 2 * ratio * (0.5 - ratio)])
covariance = np.linalg.inv((rows + np.transpose(rows)) / 2) * np.outer(scale, scale)
stderr = np.sqrt(np.diag(covariance))
misfit = 2 * found.fun / measured.numel()
print(
    f"E = {modulus:.0f} +- {stderr[0]:.0f}, nu = {ratio:.4f} +- {stderr[1]:.4f} after "
    f"{found.nfev} runs; mean square of the residuals {misfit:.3f} of the noise"
)
assert abs(modulus / TRUE_MODULUS - 1) < 0.01
assert abs(ratio / TRUE_RATIO - 1) < 0.01
# Both are Gaussian: within 3.5 standard errors in all but 2 of 1,000 draws.
away = np.array([modulus - TRUE_MODULUS, ratio - TRUE_RATIO])
assert away @ np.linalg.solve(covariance, away) < 3.5**2
# 30 frames of 56 vertices: the mean of squares has a standard error of 0.02.
assert abs(misfit - 1) < 0.07

fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
steps = np.array([material(values) for values in path])
axes[0].plot(steps[:, 0] / 1e3, steps[:, 1], ".-", label="path of the optimiser")
axes[0].plot(TRUE_MODULUS / 1e3, TRUE_RATIO, "k+", ms=12, label="truth")
axes[0].set(xlabel="Young's modulus (kPa)", ylabel="Poisson's ratio", title="the fit")
turn = np.linspace(0, 2 * np.pi, 200)
circle = np.linalg.cholesky(covariance) @ [np.cos(turn), np.sin(turn)]
for size in (1, 2, 3):
    ring = np.array([[modulus], [ratio]]) + size * circle
    label = "1, 2, 3 standard errors" if size == 1 else None
    axes[1].plot(ring[0] / 1e3, ring[1], "C0", lw=1, label=label)
axes[1].plot(modulus / 1e3, ratio, "C0o", label="found")
axes[1].plot(TRUE_MODULUS / 1e3, TRUE_RATIO, "k+", ms=12, label="truth")
axes[1].set(xlabel="Young's modulus (kPa)", ylabel="Poisson's ratio", title="its error")
for ax in axes:
    ax.legend(fontsize="small")
plt.show()

# %%
# The motion of the first guess, and of the material found. Dots are what the camera
# sees.

shown = {}
with torch.no_grad():
    set_numbers(begin)
    shown["first guess"] = simulate()
    set_numbers(found.x)
    shown["found"] = simulate()
edges = bar.edges()
# Edges of the side that faces the camera.
edges = edges[(bar.vertices[edges][..., 1] == 0).all(1)]
seen = bar.vertices[surface][:, 1] == 0
fig, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
parts = []
for ax, title in zip(axes, shown, strict=True):
    lines = [ax.plot([], [], "C0", lw=1)[0] for _ in edges]
    (dots,) = ax.plot([], [], "k.", ms=4)
    ax.set(xlim=(-0.02, 0.4), ylim=(-0.3, 0.15), aspect="equal", title=title)
    parts.append((lines, dots))


def draw_bar(frame):
    """Draw both motions at one frame, and the measurement."""
    for (lines, dots), motion in zip(parts, shown.values(), strict=True):
        for line, ends in zip(lines, motion[frame, edges][..., [0, 2]], strict=True):
            line.set_data(*ends.T)
        dots.set_data(*measured[frame - 1, seen][:, [0, 2]].T)
    fig.suptitle(f"t = {frame * STEPS * DT:.2f} s")


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
bar_movie = FuncAnimation(fig, draw_bar, range(1, FRAMES + 1), interval=100)
plt.show()

# %%
# A modulus that varies in space
# ------------------------------
#
# A slab of 0.4 m by 0.4 m is clamped at two edges. A disc in it has a modulus of 5e5,
# the rest one of 1e5, with a smooth rim. Three blows set the slab in motion: along it,
# across it and out of its plane. A camera sees the upper face for 64 ms, with an error
# of 0.3 mm. Each of the 100 cells of the mesh has a modulus of its own, by
# :class:`~adjsim.Positive`, and all begin at 2e5.
#
# One backward run gives the derivatives with respect to all moduli. The loss is half
# the sum of squared residuals, and a regularisation
#
# .. math:: \frac{s}{2} \sum_{\text{neighbours}} (\ln E_i - \ln E_j)^2 .
#
# How strong should it be? A strong one blurs the disc, and a weak one fits the noise.
# Every fourth frame is held out of the fits. Their misfit tells, without the truth:
# the best strength s is that with the least misfit of frames that the fit has not seen.

STUDY = json.loads((DATA / "modulus_field.json").read_text())
assert STUDY["settings"] == study.SETTINGS
fits = STUDY["fits"]
truth = study.true_field()
fields = torch.tensor([fit["field"] for fit in fits])
held_out = np.array([fit["held_out"] for fit in fits])
fitted = np.array([fit["fitted"] for fit in fits])
strengths = [fit["strength"] for fit in fits]
best = int(held_out.argmin())
correlations = [torch.corrcoef(torch.stack([f, truth]))[0, 1].item() for f in fields]
for fit, field, correlation in zip(fits, fields, correlations, strict=True):
    print(
        f"s = {fit['strength']:5g}: misfit {fit['fitted']:.4f}, held out "
        f"{fit['held_out']:.4f}, correlation {correlation:.4f}, modulus from "
        f"{field.min():.3g} to {field.max():.3g}, {fit['runs']} runs"
    )
chosen = fields[best]
print(f"chosen by the held-out frames: s = {strengths[best]:g}")
# The strength is neither the largest nor the smallest one.
assert 0 < best < len(fits) - 1
assert correlations[best] > 0.98
assert abs(chosen.min() / 1e5 - 1) < 0.05
assert abs(chosen.max() / 5e5 - 1) < 0.05

# %%
# The stored field is what it says: a run with it reproduces the stored misfits.

with torch.no_grad():
    motion = study.observe(study.make_slab(chosen)[0])
    again = study.misfits(motion, study.measure())
# The stored moduli are rounded at 1e-6 of them.
assert abs(again[0].item() / fitted[best] - 1) < 1e-5
assert abs(again[1].item() / held_out[best] - 1) < 1e-5

shown_fields = {
    "truth": truth,
    f"s = {strengths[0]:g}": fields[0],
    f"s = {strengths[best]:g}, chosen": chosen,
    f"s = {strengths[-1]:g}": fields[-1],
}
fig, axes = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained", sharey=True)
for ax, (title, field) in zip(axes, shown_fields.items(), strict=True):
    image = ax.imshow(
        field.reshape(10, 10).T / 1e3,
        origin="lower",
        extent=(0, 0.4, 0, 0.4),
        norm=LogNorm(90, 560),
        cmap="viridis",
    )
    ax.set(title=title, xlabel="x (m)")
axes[0].set(ylabel="y (m)")
bar_of_colors = fig.colorbar(image, ax=axes, label="Young's modulus (kPa)")
bar_of_colors.set_ticks([100, 200, 300, 400, 500], labels=[100, 200, 300, 400, 500])
bar_of_colors.minorticks_off()
plt.show()

# %%
# The misfit of the fitted frames can only fall as the regularisation becomes weaker.
# That of the held-out frames rises again, by little: the motion determines this field
# so well that a regularisation too weak does less harm than one too strong.

fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
axes[0].semilogx(strengths, fitted - fitted[best], "o-", label="fitted frames")
axes[0].semilogx(strengths, held_out - held_out[best], "s-", label="held-out frames")
axes[0].set_yscale("symlog", linthresh=1e-4)
axes[0].axhline(0, color="k", lw=0.5)
axes[0].axvline(strengths[best], color="0.6", ls=":", label="chosen")
axes[0].set(xlabel="strength s", ylabel="misfit above the chosen one")
axes[1].loglog(truth / 1e3, fields[0] / 1e3, ".", label=f"s = {strengths[0]:g}")
axes[1].loglog(truth / 1e3, chosen / 1e3, ".", label=f"s = {strengths[best]:g}, chosen")
axes[1].axline((100, 100), (500, 500), color="k", lw=0.8)
axes[1].set(xlabel="true modulus (kPa)", ylabel="recovered modulus (kPa)")
for axis in (axes[1].xaxis, axes[1].yaxis):
    axis.set_ticks([100, 200, 300, 500], labels=[100, 200, 300, 500])
    axis.set_tick_params(which="minor", labelbottom=False, labelleft=False)
for ax in axes:
    ax.legend(fontsize="small")
plt.show()
