r"""
A neural SDE on a bridge
========================

An Ornstein-Uhlenbeck process starts at zero and is measured at three times, with noise:

.. math:: dX = -a X\, dt + s\, dW, \qquad y_k = X(t_k) + \sigma \varepsilon_k .

Which paths made the measurements? They follow an SDE with the same noise and another
drift, :math:`-aX + s\,u(t, X)`: a bridge through the data. This page learns :math:`u`
as a neural network, by the variational objective of neural SDEs (Li, Wong, Chen and
Duvenaud 2020). For this process the exact bridge is known, and the page asserts that
the learnt one agrees: evidence, mean and variance. The objective and its gradient
equal those of torchsde on the same Brownian paths.

The training of 500 steps comes from a stored study,
``examples/data/make_neural_sde.py``. This page computes a part of it again.
"""

# sphinx_gallery_thumbnail_number = 1

import json
import math
from pathlib import Path
from time import perf_counter

import matplotlib.pyplot as plt
import torch
import torchsde
from torch import nn

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # a small network

FILE = "examples/data/neural_sde.json"
study = json.loads((Path(adjsim.__file__).parents[1] / FILE).read_text())
SETTINGS = study["settings"]
A, S, ERROR = (SETTINGS[k] for k in ("rate", "amplitude", "error"))
MEASURED = torch.tensor(SETTINGS["measured"])
DT, REPLICAS = 1 / SETTINGS["steps_a_unit"], SETTINGS["replicas"]
TIMES = torch.arange(float(len(MEASURED) + 1))
print(f"{study['made_by']}, commit {study['commit'][:10]}, seed {SETTINGS['seed']}")

# %%
# The objective
# -------------
#
# Let Q be the law of the paths with the control :math:`u` and P that without it. By
# Girsanov's theorem
#
# .. math:: \log \frac{dQ}{dP} = \ell(T), \qquad
#    d\ell = \tfrac12 u^2\, dt + u\, dW \quad \text{along paths of Q},
#
# so :math:`\ell` is one more entry of the state, driven by the same Brownian motion
# (``noise="scalar"``). The objective is
#
# .. math:: \mathrm E_Q [\log p(y \mid X) - \ell(T)] \le \log p(y),
#
# with equality for the exact bridge only. There the bracket is the same for every path.


class Control(nn.Module):
    """A network u(t, x): the interval, the time in it and x, to the control."""

    def __init__(self):
        super().__init__()
        width, count = SETTINGS["width"], len(MEASURED)
        self.register_buffer("begin", torch.arange(float(count)))
        self.layers = nn.Sequential(
            nn.Linear(count + 2, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        )
        nn.init.zeros_(self.layers[-1].weight)
        nn.init.zeros_(self.layers[-1].bias)

    def forward(self, t, x):
        inside = ((t >= self.begin) & (t < self.begin + 1)).to(x)
        phase = (inside * (t - self.begin)).sum()
        seen = torch.cat([inside, phase.reshape(1)]).expand(*x.shape[:-1], -1)
        return self.layers(torch.cat([seen, x], -1))


class Drift(nn.Module):
    """The drift of (x, l), with l the logarithm of dQ/dP along the path."""

    def __init__(self, control):
        super().__init__()
        self.control = control

    def forward(self, t, y):
        u = self.control(t, y[..., :1])
        return torch.cat([S * u - A * y[..., :1], u**2 / 2], -1)


class Diffusion(nn.Module):
    """The diffusion of (x, l), which one Brownian motion drives."""

    def __init__(self, control):
        super().__init__()
        self.control = control

    def forward(self, t, y):
        u = self.control(t, y[..., :1])
        return torch.cat([torch.full_like(u, S), u], -1)


def paths(control, replicas, seed, times=TIMES):
    """Return x and l, (times, replicas)."""
    dynamics = adjsim.SDE(Drift(control), Diffusion(control), noise="scalar")
    start = dynamics.init(torch.zeros(replicas, 2))
    solver = adjsim.EulerMaruyama(DT)
    run = adjsim.simulate(dynamics, start, times, solver=solver, generator=seed)
    return run.y.unbind(-1)


def log_likelihood(x):
    """Return log p(measured | path), (replicas,), from x, (times, replicas)."""
    residual = (MEASURED[:, None] - x[1:]) / ERROR
    constant = math.log(2 * math.pi * ERROR**2) / 2
    return -(residual**2 / 2 + constant).sum(0)


def bounds(control, replicas, seed):
    """Return the bracket of the objective for each path."""
    x, ratio = paths(control, replicas, seed)
    return log_likelihood(x) - ratio[-1]


# %%
# The exact bridge
# ----------------
#
# The process is Gaussian. A step of Euler and Maruyama keeps it so, with :math:`c = 1 -
# a \Delta t` and
#
# .. math:: \mathrm{Cov}(X_m, X_n) = s^2 \Delta t\, c^{n-m} \sum_{j<m} c^{2j},
#    \qquad m \le n .
#
# So mean, covariance and evidence :math:`p(y)` of the steps are those of a normal
# distribution that is conditioned on the measurements. The evidence of the steps is
# exact, also at this step size. The bridge of the steps itself has slightly less noise
# in each step than Q, a difference of order :math:`\Delta t`.

STEPS = round(float(TIMES[-1]) / DT)
c, n = 1 - A * DT, torch.arange(STEPS + 1)
variance = S**2 * DT * (1 - c ** (2 * n)) / (1 - c**2)
covariance = c ** (n[:, None] - n).abs() * torch.minimum(variance[:, None], variance)
at = (TIMES[1:] / DT).round().long()
seen = covariance[at][:, at] + ERROR**2 * torch.eye(len(at))
gain = torch.linalg.solve(seen, covariance[at]).T
exact_mean = gain @ MEASURED
exact_sd = (covariance - gain @ covariance[at]).diagonal().clamp(min=0).sqrt()
normal = torch.distributions.MultivariateNormal(torch.zeros(len(at)), seen)
evidence = float(normal.log_prob(MEASURED))
print(f"log evidence {evidence:.4f}")

# %%
# The same gradient as torchsde
# -----------------------------
#
# torchsde has this objective as its option ``logqp``, which integrates
# :math:`\tfrac12 u^2` alone. Here both get the same Brownian paths. A run of
# :math:`dX = dW` with the same seed returns the path that drives every scalar SDE of
# this library, and its increments become the Brownian motion of torchsde.


class ForTorchsde(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, control):
        super().__init__()
        self.control = control

    def f(self, t, x):
        return S * self.control(t, x) - A * x

    def g(self, t, x):
        return torch.full_like(x, S)

    def h(self, t, x):
        return -A * x


class GivenPath(torchsde.BaseBrownian):
    """A Brownian path (times, replicas) at multiples of DT; torchsde wants a column
    also for the cost, whose diffusion is zero."""

    dtype, device, shape = torch.float64, torch.device("cpu"), torch.Size()
    levy_area_approximation = "none"

    def __init__(self, path):
        super().__init__()
        self.path, self.shape = path, (path.shape[1], 2)

    def __call__(self, ta, tb=None, return_U=False, return_A=False):
        first, last = (round(float(t) / DT) for t in (ta, tb))
        return (self.path[last] - self.path[first])[:, None].expand(self.shape)

    def __repr__(self):
        return "GivenPath()"


def brownian(replicas, seed):
    motion = adjsim.SDE(
        lambda t, y: torch.zeros_like(y),
        lambda t, y: torch.ones_like(y),
        noise="scalar",
    )
    return adjsim.simulate(
        motion,
        motion.init(torch.zeros(replicas, 1)),
        torch.arange(STEPS + 1) * DT,
        solver=adjsim.EulerMaruyama(DT),
        generator=seed,
    ).y[..., 0]


def trained():
    control = Control()
    stored = {name: torch.tensor(x) for name, x in study["network"].items()}
    control.load_state_dict(stored)
    return control


def gradient(loss, control):
    found = torch.autograd.grad(loss, list(control.parameters()))
    return torch.cat([g.flatten() for g in found])


def sampled_cost(control, replicas, seed):
    """Return the objective with the integral of u^2 / 2 in place of l."""
    only_x = torch.tensor([S, 0.0])
    dynamics = adjsim.SDE(
        Drift(control), lambda t, y: only_x.expand_as(y), noise="scalar"
    )
    x, cost = adjsim.simulate(
        dynamics,
        dynamics.init(torch.zeros(replicas, 2)),
        TIMES,
        solver=adjsim.EulerMaruyama(DT),
        generator=seed,
    ).y.unbind(-1)
    return (cost[-1] - log_likelihood(x)).mean()


control = Control()
stored = {name: torch.tensor(x) for name, x in study["network"].items()}
control.load_state_dict(stored)


def by_torchsde(replicas, noise):
    x, cost = torchsde.sdeint(
        ForTorchsde(control),
        torch.zeros(replicas, 1),
        TIMES,
        bm=noise,
        method="euler",
        dt=DT,
        logqp=True,
    )
    return (cost.sum(0) - log_likelihood(x[..., 0])).mean()


theirs = by_torchsde(64, GivenPath(brownian(64, 5)))
ours = sampled_cost(control, 64, 5)
their_gradient, our_gradient = gradient(theirs, control), gradient(ours, control)
value = abs(ours.item() / theirs.item() - 1)
slope = float((our_gradient - their_gradient).norm() / their_gradient.norm())
print(f"relative differences: objective {value:.0e}, gradient {slope:.0e}")
# Sums in other orders, over 96 steps.
assert value < 1e-12
assert slope < 1e-11

# %%
# The times of a gradient of both, in turn, for 128 paths:


def seconds(objective):
    begin = perf_counter()
    gradient(objective(), control)
    return perf_counter() - begin


def torchsde_cost():
    noise = torchsde.BrownianInterval(0.0, float(TIMES[-1]), (REPLICAS, 2), entropy=3)
    return by_torchsde(REPLICAS, noise)


pairs = [
    (seconds(lambda: sampled_cost(control, REPLICAS, 3)), seconds(torchsde_cost))
    for _ in range(3)
]
least = [1e3 * min(column) for column in zip(*pairs, strict=True)]
print(f"adjsim {least[0]:.0f} ms, torchsde {least[1]:.0f} ms")

# %%
# The training
# ------------
#
# The first steps of the training are repeated here, with Adam on new paths in each.

torch.manual_seed(SETTINGS["seed"])
fresh = Control()
optimiser = torch.optim.Adam(fresh.parameters(), lr=SETTINGS["learning_rate"])
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, SETTINGS["iterations"])
for k in range(3):
    optimiser.zero_grad()
    loss = -bounds(fresh, REPLICAS, SETTINGS["seed"] + k).mean()
    loss.backward()
    optimiser.step()
    schedule.step()
    print(f"step {k}: {loss.item():.6f}, study {study['losses'][k]:.6f}")
    # The file has twelve digits.
    assert abs(loss.item() / study["losses"][k] - 1) < 1e-8

# %%
# The learnt bridge
# -----------------
#
# The mean of the brackets is a lower bound of the log evidence, and their spread says
# how far the network is from the exact control. The brackets are also weights: their
# exponentials average to the evidence whatever the control is, and the better the
# control, the fewer paths it takes. Both claims are checked on new paths.

COUNT = 2000
with torch.no_grad():
    x, ratio = paths(control, COUNT, 123, torch.arange(STEPS + 1) * DT)
    bracket = log_likelihood(x[:: SETTINGS["steps_a_unit"]]) - ratio[-1]
bound, spread = float(bracket.mean()), float(bracket.std())
weights = torch.exp(bracket - evidence)
ratio, error = float(weights.mean()), float(weights.std()) / COUNT**0.5
print(
    f"lower bound {bound:.4f} +- {spread / COUNT**0.5:.4f}, log evidence {evidence:.4f}"
)
print(
    f"spread of the brackets {spread:.3f}; evidence over its exact value {ratio:.4f} "
    f"+- {error:.4f}"
)
assert bound < evidence + 4 * spread / COUNT**0.5
assert evidence - bound < 0.15
assert abs(ratio - 1) < 4 * error

mean, sd = x.mean(1), x.std(1)
mean_error = float((mean - exact_mean).abs().max())
sd_error = float((sd - exact_sd).abs().max())
print(f"largest errors: mean {mean_error:.3f}, standard deviation {sd_error:.3f}")
# Against the largest standard deviation of the bridge. The spread of 2,000 paths is
# 0.015, and what the network does not represent makes up the rest.
assert max(mean_error, sd_error) < 0.15 * float(exact_sd.max())

time = n * DT
fig, (bridge, curve) = plt.subplots(
    1, 2, figsize=(10.5, 4), width_ratios=(2, 1), layout="constrained"
)
bridge.plot(time, x[:, :40], color="C0", lw=0.5, alpha=0.35)
bridge.plot(time, mean, color="C0", lw=2, label="neural SDE, mean")
for sign in (-2, 2):
    label = "two standard deviations" if sign > 0 else None
    bridge.plot(time, mean + sign * sd, color="C0", lw=1, label=label)
bridge.fill_between(
    time,
    exact_mean - 2 * exact_sd,
    exact_mean + 2 * exact_sd,
    color="0.85",
    lw=0,
    label="exact bridge",
)
bridge.plot(time, exact_mean, "k--", lw=1.2, label="exact mean")
bridge.errorbar(TIMES[1:], MEASURED, 2 * ERROR, fmt="ko", ms=5, label="measured")
bridge.set(xlabel="time", ylabel="x")
bridge.legend(fontsize="small", loc="lower left", ncols=2)
curve.plot(-torch.tensor(study["losses"]), lw=0.7, label="objective")
curve.axhline(evidence, color="k", ls="--", lw=1, label="log evidence")
curve.set(xlabel="training step", ylim=(evidence - 4, evidence + 0.5))
curve.legend(loc="lower right")
plt.show()
