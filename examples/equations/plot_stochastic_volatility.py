r"""
Stochastic volatility
=====================

The returns of a price fluctuate, and how much they fluctuate varies in turn. A model of
this is an SDE for the log-price :math:`s` and the log-variance :math:`v`,

.. math::

   ds = e^{v/2}\, dW_1, \qquad dv = \kappa (\theta - v)\, dt + \xi\,
   (\rho\, dW_1 + \sqrt{1 - \rho^2}\, dW_2),

with time in days. From returns alone, what are :math:`\kappa`, :math:`\theta`,
:math:`\xi` and :math:`\rho`? The likelihood has no closed form. This page fits the
model by simulated moments, with pathwise gradients, and gives standard errors. The
series are synthetic, so it is known which intervals hold the truth. For steps of a day
the moments are known exactly, and the page asserts that the simulated moments and their
gradients agree with them, and with torchsde on the same Brownian paths.

The fits of 40 series come from a stored study,
``examples/data/make_stochastic_volatility.py``. This page computes a part of it again.
"""

# sphinx_gallery_thumbnail_number = 2

import json
import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torchsde
from scipy.stats import binom, t
from torch import nn

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # small tensors

FILE = "examples/data/stochastic_volatility.json"
study = json.loads((Path(adjsim.__file__).parents[1] / FILE).read_text())
SETTINGS = study["settings"]
DAYS, LAGS, REPLICAS = (SETTINGS[k] for k in ("days", "lags", "replicas"))
LABELS = (r"$\log\kappa$", r"$\theta$", r"$\log\xi$", r"$\mathrm{artanh}\,\rho$")
NAMES = ("log kappa", "theta", "log xi", "artanh rho")
LOG_MEAN, LOG_VARIANCE = -0.5772156649015329 - math.log(2), math.pi**2 / 2
print(f"{study['made_by']}, commit {study['commit'][:10]}, seed {SETTINGS['seed']}")

# %%
# The model
# ---------
#
# The two entries share a Brownian motion, so the diffusion is a matrix,
# ``noise="general"``. :class:`~adjsim.SDE` takes the methods of one module, whose four
# free numbers :math:`\phi = (\log\kappa, \theta, \log\xi, \mathrm{artanh}\,\rho)` are
# the parameters of the dynamics. Steps of Euler and Maruyama of one day make this the
# model of Taylor (1986), in which :math:`v` is autoregressive with factor
# :math:`c = 1 - \kappa`. Its start is drawn from its stationary distribution, which
# depends on the parameters, so gradients also go through the start.


def numbers_of(phi):
    first, theta, third, fourth = phi.unbind(-1)
    return torch.exp(first), theta, torch.exp(third), torch.tanh(fourth)


class Volatility(nn.Module):
    def __init__(self, phi):
        super().__init__()
        self.phi = nn.Parameter(phi)

    def drift(self, t, y):
        kappa, theta, _, _ = numbers_of(self.phi)
        v = y[..., 1]
        return torch.stack([torch.zeros_like(v), kappa * (theta - v)], -1)

    def diffusion(self, t, y):
        _, _, xi, rho = numbers_of(self.phi)
        v = y[..., 1]
        none = torch.zeros_like(v)
        across, along = xi * rho + none, xi * torch.sqrt(1 - rho**2) + none
        entries = torch.stack([torch.exp(v / 2), none, across, along], -1)
        return entries.unflatten(-1, (2, 2))


def start(model, replicas, seed):
    kappa, theta, xi, _ = numbers_of(model.phi)
    draws = torch.randn(replicas, generator=torch.Generator().manual_seed(seed))
    v = theta + xi / torch.sqrt(1 - (1 - kappa) ** 2) * draws
    return torch.stack([torch.zeros_like(v), v], -1)


def simulate(model, y, seed, days=DAYS):
    """Return the states, (days + 1, replicas, 2)."""
    dynamics = adjsim.SDE(model.drift, model.diffusion, noise="general")
    return adjsim.simulate(
        dynamics,
        dynamics.init(y),
        range(days + 1),
        solver=adjsim.EulerMaruyama(1.0),
        generator=seed,
    ).y


def returns(model, replicas, seed):
    return simulate(model, start(model, replicas, seed), seed)[..., 0].diff(dim=0)


# %%
# Moments
# -------
#
# A return is :math:`r = e^{v/2} \varepsilon`, so :math:`x = \log r^2 - \mathrm E \log
# \varepsilon^2` is :math:`v` plus noise of variance :math:`\pi^2/2`. With
# :math:`V = \xi^2 / (1 - c^2)` the moments of the fit and their exact values are
#
# .. math::
#
#    \langle x \rangle = \theta, \quad \langle x^2 \rangle = \theta^2 + V + \pi^2/2,
#    \quad \langle x_n x_{n+k} \rangle = \theta^2 + V c^k,
#    \langle \mathrm{sign}(r_n)\, x_{n+1} \rangle = \sqrt{2/\pi}\, \xi \rho .
#
# The last one is the leverage effect: a fall of the price raises the volatility. The
# sign of a return is that of its Gaussian, which no parameter changes, so pathwise
# gradients hold.


def moments(r):
    x = torch.log(r**2) - LOG_MEAN
    lagged = [(x[:-lag] * x[lag:]).mean(0) for lag in LAGS]
    leverage = (r[:-1].sign() * x[1:]).mean(0)
    return torch.stack([x.mean(0), x.square().mean(0), *lagged, leverage], -1)


def expected(phi):
    kappa, theta, xi, rho = numbers_of(phi)
    kept = 1 - kappa
    variance = xi**2 / (1 - kept**2)
    lagged = [theta**2 + variance * kept**lag for lag in LAGS]
    leverage = (2 / math.pi) ** 0.5 * xi * rho
    second = theta**2 + variance + LOG_VARIANCE
    return torch.stack([theta, second, *lagged, leverage], -1)


kappa, theta, xi, rho = SETTINGS["truth"]
truth = torch.tensor([math.log(kappa), theta, math.log(xi), math.atanh(rho)])
exact = torch.func.jacrev(expected)(truth)
mean, error = (torch.tensor(x) for x in study["jacobian_at_truth"])
# The derivative of the mean of x by theta is one for every path, without an error.
random = error > 1e-9
score = ((mean - exact)[random] / error[random]).abs().max()
print(f"Jacobian of simulated moments: {score:.1f} errors from the exact one at most")
# Four errors, with 23 entries. The entry without an error is rounded to nine digits.
assert score < 4
assert (mean - exact)[~random].abs().max() < 1e-8

# %%
# The same gradient as torchsde
# -----------------------------
#
# A run of :math:`dX = dW` with the same seed returns the Brownian paths of the library,
# and torchsde gets their increments.


class ForTorchsde(nn.Module):
    noise_type, sde_type = "general", "ito"

    def __init__(self, model):
        super().__init__()
        self.f, self.g = model.drift, model.diffusion


class GivenPath(torchsde.BaseBrownian):
    """Brownian paths (days, replicas, 2) at whole days."""

    dtype, device, shape = torch.float64, torch.device("cpu"), torch.Size()
    levy_area_approximation = "none"

    def __init__(self, path):
        super().__init__()
        self.path, self.shape = path, path.shape[1:]

    def __call__(self, ta, tb=None, return_U=False, return_A=False):
        return self.path[round(float(tb))] - self.path[round(float(ta))]

    def __repr__(self):
        return "GivenPath()"


def brownian(replicas, seed, days):
    motion = adjsim.SDE(
        lambda t, y: torch.zeros_like(y),
        lambda t, y: torch.eye(2).expand(*y.shape, 2),
        noise="general",
    )
    return adjsim.simulate(
        motion,
        motion.init(torch.zeros(replicas, 2)),
        range(days + 1),
        solver=adjsim.EulerMaruyama(1.0),
        generator=seed,
    ).y


def gradient(states, model):
    value = moments(states[..., 0].diff(dim=0)).mean(0)
    weights = torch.linspace(1, 2, len(value))
    return torch.autograd.grad((weights * value).sum(), model.phi)[0]


model = Volatility(truth.clone())
days = 100
ours = simulate(model, start(model, 32, 7), 7, days)
theirs = torchsde.sdeint(
    ForTorchsde(model),
    start(model, 32, 7),
    torch.arange(float(days + 1)),
    bm=GivenPath(brownian(32, 7, days)),
    method="euler",
    dt=1.0,
)
apart = (ours - theirs).abs().max().item()
our_gradient, their_gradient = gradient(ours, model), gradient(theirs, model)
slope = float((our_gradient - their_gradient).norm() / their_gradient.norm())
print(f"differences: paths {apart:.0e}, gradient {slope:.0e}")
# Rounding of increments. The smallest return of 3,200 is about 1e-4 of a typical one,
# and its logarithm amplifies the rounding by the inverse.
assert apart < 1e-11
assert slope < 1e-8

# %%
# One series
# ----------
#
# The first series of the study, 2,000 days.

with torch.no_grad():
    path = simulate(
        Volatility(truth.clone()),
        start(Volatility(truth.clone()), 1, SETTINGS["data_seed"]),
        SETTINGS["data_seed"],
    )[:, 0]
measured = moments(path[:, 0].diff())
assert torch.allclose(measured, torch.tensor(study["data"][0]), rtol=1e-7)

fig, axes = plt.subplots(2, 1, figsize=(9, 4.4), sharex=True, layout="constrained")
axes[0].plot(path[:, 0], "k", lw=0.8)
axes[0].set(ylabel="log-price (%)", title="a synthetic series")
scale = torch.exp(path[:, 1] / 2)
axes[1].fill_between(
    range(DAYS + 1),
    -2 * scale,
    2 * scale,
    color="C1",
    alpha=0.35,
    lw=0,
    label="twice the hidden volatility",
)
axes[1].plot(range(1, DAYS + 1), path[:, 0].diff(), "k", lw=0.5, label="returns")
axes[1].set(xlabel="day", ylabel="return (%)")
axes[1].legend(loc="lower right")
plt.show()

# %%
# The fit
# -------
#
# The fit simulates 16 series as long as the data, from fixed seeds, and takes steps of
# Gauss and Newton until their mean moments equal those of the data as well as four
# numbers can make them. The Jacobian :math:`J` is that of the simulation. With weights
# :math:`W` and the covariance :math:`S` of the moments over the 16 series, the
# covariance of the estimate is
#
# .. math::
#
#    (1 + \tfrac1{16})\, (J^T W J)^{-1} J^T W S W J\, (J^T W J)^{-1} .
#
# The factor counts the noise of the simulation. At the estimate of the study for the
# first series, the next step must be small beside the standard error.

weights = torch.tensor(study["weights"])
estimates, errors, exact_estimates = (
    torch.tensor(study[key]) for key in ("estimates", "errors", "exact")
)
model = Volatility(estimates[0].clone())
found = moments(returns(model, REPLICAS, SETTINGS["seed"]))
jacobian = torch.stack(
    [
        torch.autograd.grad(x, model.phi, retain_graph=True)[0]
        for x in found.mean(0).unbind()
    ]
)
left = jacobian.T * weights
bread = torch.linalg.inv(left @ jacobian)
covariance = bread @ left @ torch.cov(found.detach().T) @ left.T @ bread
error = ((1 + 1 / REPLICAS) * covariance).diagonal().sqrt()
step = bread @ left @ (measured - found.detach().mean(0))
for name, x, e, stored, y in zip(
    NAMES,
    estimates[0],
    error,
    errors[0],
    truth,
    strict=True,
):
    print(f"{name:10}: {x:6.3f} +- {e:.3f} (study {stored:.3f}), truth {y:6.3f}")
assert (step.abs() / error).max() < 0.1
# The errors of the study were taken one step earlier.
assert (error / errors[0] - 1).abs().max() < 0.1

# %%
# Are the standard errors honest?
# -------------------------------
#
# An interval of 95 % should hold the truth in 95 % of all series. The covariance comes
# from 16 series, so the intervals use Student's t with 15 degrees of freedom.

z = (estimates - truth) / errors
limit = t.ppf(0.975, REPLICAS - 1)
covered = (z.abs() < limit).sum(0)
count = len(z)
for name, inside, spread in zip(NAMES, covered.tolist(), z.std(0), strict=True):
    chance = binom.cdf(inside, count, 0.95)
    print(
        f"{name}: {inside} of {count} intervals hold the truth (as few or fewer with "
        f"probability {chance:.2f}); estimates scatter by {spread:.2f} standard errors"
    )
print(f"all: {int(covered.sum())} of {4 * count}")
# The counts that a right interval has in all but one of a thousand studies.
low = binom.ppf(0.0005, count, 0.95)
assert covered.min() >= low
simulation = (estimates - exact_estimates) / errors
print(
    "estimates by simulated and by exact moments differ by "
    f"{simulation.square().mean().sqrt():.2f} standard errors; the noise of "
    f"{REPLICAS} series is {REPLICAS**-0.5:.2f}"
)

fig, axes = plt.subplots(1, 4, figsize=(11, 4.2), layout="constrained")
for k, (ax, name) in enumerate(zip(axes, LABELS, strict=True)):
    order = estimates[:, k].argsort()
    inside = z[order, k].abs() < limit
    for mask, color in ((inside, "C0"), (~inside, "C3")):
        rows = torch.arange(count)[mask]
        values, bars = estimates[order, k][mask], limit * errors[order, k][mask]
        ax.errorbar(values, rows, xerr=bars, fmt="o", ms=2.5, lw=0.8, color=color)
    ax.axvline(truth[k], color="k", ls="--", lw=1)
    ax.set(title=f"{name}: {int(covered[k])} of {count}", yticks=[])
    middle, width = estimates[:, k].median(), 3 * limit * errors[:, k].median()
    ax.set_xlim(float(middle - width), float(middle + width))
axes[0].set_ylabel("series, sorted by estimate")
fig.suptitle("intervals of 95 % and the truth", fontsize="medium")
plt.show()
