"""
Fitting a memory kernel to a velocity autocorrelation
=====================================================

A particle in a double well is coupled to a bath with a memory: the friction has the
memory kernel :math:`K(t) = \\sum_i s_i\\,e^{-r_i t}`, with two exponentials. The data
are the velocity autocorrelation of the particle, with its statistical error. The fit
seeks the rates :math:`r_i` and strengths :math:`s_i`. In a well that is not harmonic no
formula gives the kernel from the autocorrelation. So each trial bath is simulated, and
the gradient of the misfit is taken through the noisy momentum trajectories.

Mass, kT and the height of the barrier are 1 and known.
"""

# sphinx_gallery_thumbnail_number = 2

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import minimize
from scipy.stats import chi2

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # threads cost more than they bring at this size

DT, LAGS, FRAMES, REPLICAS = 0.05, 60, 100, 8000
NAMES = ["slow rate", "fast rate", "slow strength", "fast strength"]
TRUTH = np.log([0.5, 5.0, 2.0, 20.0])
GUESS = np.log([0.2, 10.0, 1.0, 10.0])
potential = adjsim.DoubleWell(1.0)
DIRECT, REVERSIBLE = adjsim.DirectAdjoint(), adjsim.ReversibleAdjoint()

# %%
# The simulation
# --------------
#
# Starts are drawn from equilibrium: positions by inverting the distribution function,
# momenta and memory by ``init``. So the run needs no burn-in, and its frames serve as
# time origins. Many short runs are better here than few long ones, because near the
# barrier the gradient of a path grows with the length of the run. The constructor takes
# tensors with an autograd graph, so every trial rebuilds the bath from the logarithms
# of its parameters. Every trial uses the same seed, which makes the misfit a smooth
# function of the parameters.

x = torch.linspace(-3, 3, 6001)
cumulative = torch.exp(-potential(x.reshape(-1, 1, 1))).cumsum(0)
cumulative = cumulative / cumulative[-1]


def positions(generator):
    return x[
        torch.searchsorted(cumulative, torch.rand(REPLICAS, generator=generator))
    ].reshape(-1, 1, 1)


def correlations(logarithms, seed, adjoint=DIRECT):
    """Compute the velocity autocorrelation of each replica, (lags, replicas)."""
    rates, strengths = torch.exp(logarithms).reshape(2, 2)
    dynamics = adjsim.GeneralizedLangevin(potential, rates=rates, strengths=strengths)
    generator = torch.Generator().manual_seed(seed)
    trajectory = adjsim.simulate(
        dynamics,
        dynamics.init(positions(generator), generator=generator),
        torch.arange(FRAMES + 1) * DT,
        solver=adjsim.Splitting("BAGAB", DT),
        adjoint=adjoint,
        record=lambda state: state.momentum,
        generator=generator,
    )
    return adjsim.velocity_autocorrelation(trajectory.record, LAGS)


with torch.no_grad():
    known = correlations(torch.tensor(TRUTH), seed=1)
target = known.mean(1)

# %%
# The misfit
# ----------
#
# The errors of a measured autocorrelation are correlated between lags. So the misfit
# weights the residual with the inverse of its covariance, which comes from the spread
# of the replicas. Simulation and target have the same number of replicas and
# independent noise, so the covariance of the residual is twice the covariance of one of
# them. For the true bath the misfit is then chi-square divided by the number of lags,
# which is 1 on average.

covariance = 2 * torch.cov(known) / REPLICAS
weight = torch.linalg.inv(covariance)
history = []


def misfit(logarithms, adjoint):
    residual = correlations(logarithms, 2, adjoint).mean(1) - target
    return residual @ weight @ residual / LAGS


def misfit_and_gradient(values):
    logarithms = torch.tensor(values, requires_grad=True)
    loss = misfit(logarithms, REVERSIBLE)
    (gradient,) = torch.autograd.grad(loss, logarithms)
    history.append(loss.item())
    return loss.item(), gradient.numpy()


loss, gradient = misfit_and_gradient(GUESS)
start = torch.tensor(GUESS, requires_grad=True)
(direct,) = torch.autograd.grad(misfit(start, DIRECT), start)
h, quotients = 1e-4, []
with torch.no_grad():
    for step in h * torch.eye(4):
        up, down = (misfit(start + sign * step, DIRECT).item() for sign in (1, -1))
        quotients.append((up - down) / (2 * h))
print("gradient at the guess", np.round(gradient, 3))
print("central differences  ", np.round(quotients, 3))
assert np.linalg.norm(gradient - direct.numpy()) < 1e-7 * np.linalg.norm(gradient)
# A few paths stay near the barrier and add curvature even within this step.
assert np.linalg.norm(gradient - quotients) < 2e-4 * np.linalg.norm(gradient)

# %%
# The fit
# -------

history.clear()
bounds = [(low - 3, low + 3) for low in GUESS]
fit = minimize(
    misfit_and_gradient,
    GUESS,
    jac=True,
    method="L-BFGS-B",
    bounds=bounds,
    options={"ftol": 1e-5},
)
print(
    f"misfit per lag {history[0]:.1f} at the guess, {fit.fun:.2f} at the end, "
    f"{len(history)} evaluations"
)

with torch.no_grad():
    before, after = (
        correlations(torch.tensor(values), seed=2).mean(1) for values in (GUESS, fit.x)
    )
lags = DT * np.arange(LAGS)
band = 2 * known.std(1) / REPLICAS**0.5
fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
axes[0].fill_between(
    lags, target - band, target + band, color="0.8", label="target, 2 standard errors"
)
axes[0].plot(lags, target, "k", lw=1)
axes[0].plot(lags, before, "C3--", label="guess")
axes[0].plot(lags, after, "C0", label="fit")
axes[0].set(xlabel="lag (reduced time)", ylabel="velocity autocorrelation (kT/m)")
axes[0].legend()
axes[1].semilogy(np.minimum.accumulate(history), "-", color="0.7")
axes[1].semilogy(history, "o", ms=3)
axes[1].axhline(1, color="k", lw=1, ls=":", label="expected of the true bath")
axes[1].set(xlabel="evaluation", ylabel="misfit per lag (no unit)")
axes[1].set_xticks(range(0, len(history), 3))
axes[1].legend()
plt.show()

# %%
# What the data determine
# -----------------------
#
# With :math:`J` the derivative of the autocorrelation with respect to the logarithms of
# the parameters and :math:`C` the covariance of the residual, the errors of the fit
# have the covariance :math:`(J^\top C^{-1} J)^{-1}`. Its eigenvectors show which
# combinations the data determine. The best combination is known tens of times more
# precisely than the worst.

with torch.no_grad():
    columns = [
        (
            correlations(torch.tensor(fit.x) + step, 2)
            - correlations(torch.tensor(fit.x) - step, 2)
        ).mean(1)
        / (2 * h)
        for step in h * torch.eye(4)
    ]
J = torch.stack(columns, 1)
spread = torch.linalg.inv(J.T @ weight @ J).numpy()
stderr = np.sqrt(np.diag(spread))
for name, value, error, truth in zip(NAMES, fit.x, stderr, TRUTH, strict=True):
    print(
        f"{name:14s} {np.exp(value):6.2f} x/ {np.exp(error):.2f}   truth "
        f"{np.exp(truth):5.2f}"
    )
widths, directions = np.linalg.eigh(spread)
print(
    "standard errors along the eigenvectors:",
    ", ".join(f"{w:.3f}" for w in np.sqrt(widths)),
)
print(
    "worst determined:",
    " ".join(
        f"{c:+.2f} log({name})"
        for c, name in zip(directions[:, -1], NAMES, strict=True)
    ),
)

off = fit.x - TRUTH
distance = off @ np.linalg.solve(spread, off)
print(
    f"chi-square of the four errors: {distance:.1f}; of the misfit: "
    f"{LAGS * fit.fun:.1f} for {LAGS - 4} degrees of freedom"
)
assert distance < chi2.ppf(0.999, 4)
assert LAGS * fit.fun < chi2.ppf(0.999, LAGS - 4)
assert widths[-1] > 1000 * widths[0]

# %%
# The fast rate and strength are known to a few per cent, the slow rate and strength to
# tens of per cent. The autocorrelation depends on them only through the kernel. The
# errors of the slow rate and the slow strength are correlated so that the slow part of
# the kernel stays nearly the same over the fitted lags. So the figure shows the kernel
# itself. Its error, propagated from the four parameters, is small over the fitted lags.


def kernel(logarithms, t):
    rates, strengths = np.exp(logarithms).reshape(2, 2)
    return np.exp(-np.outer(t, rates)) @ strengths


t = np.linspace(0, 5, 200)
draws = np.random.default_rng(3).multivariate_normal(fit.x, spread, 2000)
low, high = np.quantile([kernel(draw, t) for draw in draws], [0.023, 0.977], axis=0)
fig, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
ax.fill_between(t, low, high, color="C0", alpha=0.25, label="fit, 95 %")
ax.semilogy(t, kernel(fit.x, t), "C0", label="fit")
ax.semilogy(t, kernel(TRUTH, t), "k--", label="truth")
ax.semilogy(t, kernel(GUESS, t), "C3:", label="guess")
ax.axvline(lags[-1], color="0.7", lw=1, zorder=0)
ax.text(lags[-1] + 0.04, 15, "last lag fitted", color="0.4")
ax.set(xlabel="time (reduced units)", ylabel="memory kernel K (reduced units)")
ax.legend()
plt.show()

total, true_total = (kernel(values, [0.0])[0] for values in (fit.x, TRUTH))
print(f"K(0) = {total:.2f}, truth {true_total:.2f}")

# %%
# With noise that the fit did not use, the fitted bath still reproduces the target
# within errors.

with torch.no_grad():
    fresh = correlations(torch.tensor(fit.x), seed=7).mean(1)
residual = fresh - target
unseen = float(residual @ weight @ residual)
print(f"chi-square on unseen noise: {unseen:.1f} for {LAGS} lags")
# In the directions of its four parameters the fit removes the target's noise from the
# residual, and brings in as much noise of its own simulations. So the residual has LAGS
# degrees of freedom.
assert unseen < chi2.ppf(0.999, LAGS)
