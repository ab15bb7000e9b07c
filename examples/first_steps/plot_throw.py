r"""
Gravity from a throw
====================

A ball is thrown upwards, and its height is measured 50 times within a second, with
noise. How high did it start, how fast, and what is g? The height is :math:`y_0 + v_0 t
- g t^2/2`, so linear least squares knows the answer and its errors. Here the answer
comes from a simulation and its gradients, which need no formula for the height.

Units are m and s. The truth is :math:`y_0 = 2`, :math:`v_0 = 3` and :math:`g = 9.81`,
and the noise has a standard deviation of 0.01 m.
"""

# sphinx_gallery_thumbnail_number = 3

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation
from scipy.optimize import least_squares

import adjsim
from adjsim.potentials.gravity import Gravity

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

NAMES = ["start height (m)", "start velocity (m/s)", "g (m/s²)"]
TRUTH, GUESS, NOISE, POINTS = np.array([2.0, 3.0, 9.81]), [0.0, 0.0, 5.0], 0.01, 50
times = np.linspace(0, 1, POINTS + 1)
t = times[1:]
design = np.stack([np.ones(POINTS), t, -(t**2) / 2], axis=1)
data = design @ TRUTH + NOISE * np.random.default_rng(0).standard_normal(POINTS)

# %%
# The simulation
# --------------
#
# One atom of mass 1 in one dimension falls in a uniform field. Velocity Verlet is exact
# for a constant force, so the step may be as long as the time between two points.


def heights(parameters):
    """Return the simulated heights at the measured times."""
    start, velocity, g = parameters
    dynamics = adjsim.Hamiltonian(Gravity(1.0, g))
    state = dynamics.init(start.reshape(1, 1), velocity.reshape(1, 1))
    solver = adjsim.VelocityVerlet(1 / POINTS)
    return adjsim.simulate(dynamics, state, times, solver=solver).position[1:, 0, 0]


def residuals(x):
    with torch.no_grad():
        return (heights(torch.tensor(x)).numpy() - data) / NOISE


def sensitivities(x):
    """Return the derivative of every height by every parameter, in units of the noise.

    Each row is one backward pass of the adjoint.
    """
    parameters = torch.tensor(x, requires_grad=True)
    rows = [
        torch.autograd.grad(height, parameters, retain_graph=True)[0]
        for height in heights(parameters)
    ]
    return torch.stack(rows).numpy() / NOISE


# %%
# The fit
# -------
#
# Gauss and Newton's method takes the residuals and their sensitivities. The covariance
# of the parameters is :math:`(S^T S)^{-1}`, with the sensitivities S in units of the
# noise. Both agree with linear least squares.

fit = least_squares(residuals, GUESS, jac=sensitivities, method="lm")
S = sensitivities(fit.x)
covariance = np.linalg.inv(S.T @ S)
errors = np.sqrt(np.diag(covariance))
linear, *_ = np.linalg.lstsq(design, data)
for name, value, error, known in zip(NAMES, fit.x, errors, TRUTH, strict=True):
    print(f"{name:20}: {value:.8f} +- {error:.7f}, true {known}")
print(
    f"chi squared {2 * fit.cost:.1f} of {POINTS} points and 3 parameters, "
    f"{fit.nfev} simulations"
)

# Published digits of both; the last one is rounded.
assert np.allclose(fit.x, [2.00307882, 2.96668310, 9.72145741], rtol=0, atol=6e-9)
assert np.allclose(errors, [0.0044182, 0.0199826, 0.0379853], rtol=0, atol=6e-8)
assert np.allclose(fit.x, linear, rtol=1e-9)
# A sum of 50 steps rounds by about 50 units in the last place.
assert np.allclose(S * NOISE, design, rtol=0, atol=1e-13)

curve = design @ fit.x
band = 2 * np.sqrt(np.einsum("ni,ij,nj->n", design, covariance, design))
correlation = covariance / np.outer(errors, errors)
assert 0.965 < correlation[1, 2] < 0.975
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
axes[0].plot(t, data, "k.", label="data")
axes[0].plot(t, curve, color="C3", label="fit")
axes[0].set(xlabel="time (s)", ylabel="height (m)", title="the throw")
inset = axes[0].inset_axes([0.1, 0.12, 0.5, 0.36])
inset.errorbar(t, 1e3 * (data - curve), 1e3 * NOISE, fmt="k.", ms=3, lw=0.6)
inset.fill_between(t, -1e3 * band, 1e3 * band, color="C3", alpha=0.4, lw=0)
inset.axhline(0, color="C3", lw=1)
inset.set_title("data - fit (mm)", fontsize="small")
inset.tick_params(labelsize="small")
axes[0].legend(loc="upper right")
shown = axes[1].imshow(correlation, cmap="RdBu_r", vmin=-1, vmax=1)
for (row, column), value in np.ndenumerate(correlation):
    color = "white" if abs(value) > 0.5 else "black"
    axes[1].text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
short = ["$y_0$", "$v_0$", "$g$"]
axes[1].set_xticks(range(3), short)
axes[1].set_yticks(range(3), short)
axes[1].set_title("correlation of the parameters")
fig.colorbar(shown, ax=axes[1])
plt.show()

# %%
# The velocity and g are correlated by 0.97: a faster throw in a stronger field has
# almost the same height at all times. So their own errors are several times larger than
# the error of any height, whose band of two standard errors is drawn in red beside the
# residuals.

# %%
# Are these the errors?
# ---------------------
#
# Two thousand measurements of the same throw have noise of their own. The heights are
# linear in the parameters, so one step with the same sensitivities fits each of them.

REPEATS = 2000
noise = np.random.default_rng(1).standard_normal((REPEATS, POINTS))
found = TRUTH + noise @ S @ covariance
scatter = found.std(axis=0, ddof=1)
for name, value, error in zip(NAMES, scatter, errors, strict=True):
    print(f"{name:20}: scatter {value:.5f}, error of the fit {error:.5f}")
# The scatter of 2,000 numbers is known to 1/sqrt(4000); four times that.
assert np.allclose(scatter / errors, 1, atol=4 / np.sqrt(2 * REPEATS))

inside = np.einsum("ni,ij,nj->n", found - TRUTH, S.T @ S, found - TRUTH) < 7.815
print(f"{inside.mean():.1%} of the fits lie in the region that should hold 95%")
assert abs(inside.mean() - 0.95) < 4 * np.sqrt(0.95 * 0.05 / REPEATS)

circle = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
fig, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
for ax, (i, j) in zip(axes, ((0, 1), (1, 2), (0, 2)), strict=True):
    # A chi squared of two degrees of freedom is below 5.991 in 95% of cases.
    root = np.linalg.cholesky(covariance[np.ix_([i, j], [i, j])]) * np.sqrt(5.991)
    ellipse = root @ np.stack([circle.real, circle.imag])
    ax.plot(found[:, i], found[:, j], ".", ms=2, color="0.6", label="repeated")
    ax.plot(*(ellipse + TRUTH[[i, j], None]), color="C3", label="95% by the covariance")
    ax.plot(TRUTH[i], TRUTH[j], "k+", ms=10, label="truth")
    ax.plot(fit.x[i], fit.x[j], "C0x", ms=7, mew=2, label="the fit above")
    ax.set(xlabel=NAMES[i], ylabel=NAMES[j])
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
plt.show()

# %%
# The throw
# ---------
#
# The ball on the left moves as fitted. The points appear as they are measured.

fig, axes = plt.subplots(
    1, 2, figsize=(6.4, 3.6), layout="constrained", width_ratios=[1, 4], sharey=True
)
axes[0].set(xlim=(-1, 1), xticks=[], ylim=(-0.2, 2.8), ylabel="height (m)")
axes[0].axhline(0, color="0.3", lw=1)
axes[1].set(xlim=(0, 1), xlabel="time (s)")
(ball,) = axes[0].plot([], [], "o", ms=14, color="C3")
(line,) = axes[1].plot([], [], color="C3", label="fit")
(dots,) = axes[1].plot([], [], "k.", label="data")
axes[1].legend(loc="lower left")


def draw(frame):
    """Draw the ball and the points up to one time."""
    ball.set_data([0], [curve[frame]])
    line.set_data(t[: frame + 1], curve[: frame + 1])
    dots.set_data(t[: frame + 1], data[: frame + 1])
    return ball, line, dots


# The frames keep the layout of the first one.
fig.draw_without_rendering()
fig.set_layout_engine("none")
movie = FuncAnimation(fig, draw, range(0, POINTS, 2), interval=80)
plt.show()
