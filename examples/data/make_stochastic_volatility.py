"""Write stochastic_volatility.json: parameters of a stochastic volatility model fitted
to many synthetic series by simulated moments, with standard errors.

The file holds the estimates of all series by simulated and by exact moments, and the
Jacobian of the simulated moments at the truth; plot_stochastic_volatility.py draws it.
Run: python examples/data/make_stochastic_volatility.py
"""

import json
import math
import time
from importlib.metadata import version
from pathlib import Path

import torch
from studies import commit, rounded
from torch import nn

import adjsim
from adjsim.core.durable.files import replacing

FILE = Path(__file__).with_name("stochastic_volatility.json")
SETTINGS = {
    "days": 2000,
    "lags": [1, 5, 20],
    # kappa, theta, xi, rho.
    "truth": [0.1, 0.0, 0.6, -0.5],
    "guess": [0.2, 0.0, 0.4, 0.0],
    "series": 40,
    "replicas": 16,
    "iterations": 5,
    "largest_step": 0.5,
    "data_seed": 1,
    "seed": 2,
}
DAYS, LAGS = SETTINGS["days"], SETTINGS["lags"]
SERIES, REPLICAS = SETTINGS["series"], SETTINGS["replicas"]
MOMENTS = 3 + len(LAGS)
# The mean and variance of the logarithm of chi squared with one degree of freedom.
LOG_MEAN, LOG_VARIANCE = -0.5772156649015329 - math.log(2), math.pi**2 / 2


def free(numbers):
    """Map (kappa, theta, xi, rho) to four free numbers."""
    kappa, theta, xi, rho = numbers
    return torch.tensor([math.log(kappa), theta, math.log(xi), math.atanh(rho)])


def numbers_of(phi):
    first, theta, third, fourth = phi.unbind(-1)
    return torch.exp(first), theta, torch.exp(third), torch.tanh(fourth)


class Volatility(nn.Module):
    """The log-price and log-variance of a day, for free numbers phi, (*batch, 4)."""

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


def returns(model, series, replicas, seed):
    """Simulate returns, (days, series, replicas), from stationary starts."""
    kappa, theta, xi, _ = numbers_of(model.phi)
    draws = torch.stack(
        [
            torch.randn(replicas, generator=torch.Generator().manual_seed(seed + k))
            for k in range(series)
        ]
    )
    v = theta + xi / torch.sqrt(1 - (1 - kappa) ** 2) * draws
    dynamics = adjsim.SDE(model.drift, model.diffusion, noise="general")
    y = adjsim.simulate(
        dynamics,
        dynamics.init(torch.stack([torch.zeros_like(v), v], -1)),
        range(DAYS + 1),
        solver=adjsim.EulerMaruyama(1.0),
        generator=seed,
    ).y
    return y[..., 0].diff(dim=0)


def moments(r):
    """Return the moments of returns (days, ...), (..., moments)."""
    x = torch.log(r**2) - LOG_MEAN
    lagged = [(x[:-lag] * x[lag:]).mean(0) for lag in LAGS]
    leverage = (r[:-1].sign() * x[1:]).mean(0)
    return torch.stack([x.mean(0), x.square().mean(0), *lagged, leverage], -1)


def expected(phi):
    """Return the exact moments of the steps, (..., moments)."""
    kappa, theta, xi, rho = numbers_of(phi)
    kept = 1 - kappa
    variance = xi**2 / (1 - kept**2)
    lagged = [theta**2 + variance * kept**lag for lag in LAGS]
    leverage = (2 / math.pi) ** 0.5 * xi * rho
    second = theta**2 + variance + LOG_VARIANCE
    return torch.stack([theta, second, *lagged, leverage], -1)


def simulated(phi, seed):
    """Return moments (series, replicas, moments) and Jacobians (series, moments, 4)."""
    model = Volatility(phi[:, None])
    found = moments(returns(model, len(phi), REPLICAS, seed))
    rows = [
        torch.autograd.grad(column.mean(1).sum(), model.phi, retain_graph=True)[0]
        for column in found.unbind(-1)
    ]
    return found.detach(), torch.stack([row[:, 0] for row in rows], 1)


def exact_jacobian(phi):
    """Return the derivatives of the exact moments, (series, moments, 4)."""
    leaf = phi.clone().requires_grad_()
    columns = expected(leaf).unbind(-1)
    rows = [
        torch.autograd.grad(column.sum(), leaf, retain_graph=True)[0]
        for column in columns
    ]
    return torch.stack(rows, -2)


def covariance_of(found):
    """Return the covariance of moments over replicas, (series, moments, moments)."""
    centred = found - found.mean(1, keepdim=True)
    return centred.transpose(1, 2) @ centred / (found.shape[1] - 1)


def steps_of(jacobian, weights, residual):
    """Return the steps of Gauss and Newton, (series, 4)."""
    left = jacobian.transpose(1, 2) * weights
    normal = left @ jacobian
    # A thousandth of the diagonal keeps the system regular far from the solution.
    normal = normal + 1e-3 * torch.diag_embed(normal.diagonal(dim1=1, dim2=2))
    steps = torch.linalg.solve(normal, (left @ residual[..., None])[..., 0])
    return steps.clamp(-SETTINGS["largest_step"], SETTINGS["largest_step"])


def standard_errors(jacobian, weights, covariance):
    """Return those of an estimate by simulated moments, (series, 4)."""
    left = jacobian.transpose(1, 2) * weights
    bread = torch.linalg.inv(left @ jacobian)
    meat = left @ covariance @ left.transpose(1, 2)
    # Data and the mean of the replicas both vary.
    spread = (bread @ meat @ bread) * (1 + 1 / REPLICAS)
    return spread.diagonal(dim1=1, dim2=2).sqrt()


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # small tensors
    made, begun = commit(__file__), time.perf_counter()
    truth = free(SETTINGS["truth"])
    with torch.no_grad():
        model = Volatility(truth.expand(SERIES, 1, 4).clone())
        data = moments(returns(model, SERIES, 1, SETTINGS["data_seed"]))[:, 0]
        guess = free(SETTINGS["guess"])
        model = Volatility(guess.expand(SERIES, 1, 4).clone())
        first = moments(returns(model, SERIES, REPLICAS, SETTINGS["seed"]))
    weights = 1 / first.flatten(0, 1).var(0)
    exact = guess.expand(SERIES, 4).clone()
    for _ in range(200):
        residual = data - expected(exact)
        exact = exact + steps_of(exact_jacobian(exact), weights, residual)
    print(f"exact moments: {time.perf_counter() - begun:.0f} s", flush=True)
    phi = exact.clone()
    for _ in range(SETTINGS["iterations"]):
        found, jacobian = simulated(phi, SETTINGS["seed"])
        step = steps_of(jacobian, weights, data - found.mean(1))
        phi = phi + step
        sizes = step.abs().amax(1).sort().values
        print(
            f"largest step {sizes[-1]:.1e}, median {sizes[SERIES // 2]:.1e}", flush=True
        )
    errors = standard_errors(jacobian, weights, covariance_of(found))
    _, at_truth = simulated(truth.expand(SERIES, 4).clone(), SETTINGS["seed"] + 1000)
    study = {
        "made_by": "examples/data/make_stochastic_volatility.py",
        "commit": made,
        "versions": {name: version(name) for name in ("torch", "torchsde")},
        "settings": SETTINGS,
        "weights": rounded(weights.tolist(), 9),
        "data": rounded(data.tolist(), 9),
        "exact": rounded(exact.tolist(), 9),
        "estimates": rounded(phi.tolist(), 9),
        "errors": rounded(errors.tolist(), 9),
        "last_steps": rounded(step.tolist(), 3),
        "jacobian_at_truth": [
            rounded(at_truth.mean(0).tolist(), 9),
            rounded((at_truth.std(0) / SERIES**0.5).tolist()),
        ],
    }
    text = json.dumps(study, separators=(",", ":"))
    with replacing(FILE) as file:
        file.write_text(text + "\n")
    print(f"{FILE.name}: {len(text) / 1e3:.0f} kB, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
