r"""
Many levels of one Brownian path
================================

The mean of a stochastic equation costs much if it is to be accurate: small steps for
the bias, many paths for the noise. Multilevel Monte Carlo (Giles, Operations Research
56, 607 (2008)) takes most paths with long steps, and few with short ones:

.. math::

   E[P_L] = E[P_0] + \sum_{l=1}^{L} E[P_l - P_{l-1}],

where :math:`P_l` is the result with steps :math:`h_l = h_0/2^l`. The differences are
small where both results follow one Brownian path, so few samples do. A
:class:`~adjsim.BrownianPath` is such a path: runs with any step read its increments.
The same sum holds for derivatives, so this page computes a mean and its gradient.

The example is a population with noisy growth, :math:`dN = r N (1 - N)\, dt + \sigma N\,
dW` (Ito). Its stationary law is a gamma distribution, with the mean :math:`1 -
\sigma^2/2r`, so the answers are known: 0.75 and, for its derivative with respect to
:math:`r`, :math:`\sigma^2/2r^2 = 0.125` at :math:`r = 2, \sigma = 1`.
"""

import math

import matplotlib.pyplot as plt
import torch

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # small tensors

RATE, SIGMA, TIME, LONGEST, LEVELS = 2.0, 1.0, 6.0, 0.25, 5
EXACT = torch.tensor([1 - SIGMA**2 / (2 * RATE), SIGMA**2 / (2 * RATE**2)])

# %%
# Runs on one path
# ----------------
#
# The logarithm :math:`u = \ln N` stays finite and has additive noise, :math:`du = (r (1
# - e^u) - \sigma^2/2)\, dt + \sigma\, dW`, for which the paths of Euler and Maruyama
# are of order one. Each path gets a rate of its own, all of the same value, so that one
# backward run gives the derivative of every path.


class Growth(torch.nn.Module):
    def __init__(self, paths):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.full((paths, 1), RATE))

    def forward(self, t, u):
        return self.rate * (1 - torch.exp(u)) - SIGMA**2 / 2


def noise(t, u):
    return SIGMA * torch.ones_like(u)


def results(paths, level, path):
    """The population at the end and its derivative, for each path, (2, paths)."""
    field = Growth(paths)
    sde = adjsim.SDE(field, noise)
    run = adjsim.simulate(
        sde,
        sde.init(torch.zeros(paths, 1)),
        [0.0, TIME],
        solver=adjsim.EulerMaruyama(LONGEST / 2**level),
        adjoint=adjsim.CheckpointAdjoint(),
        generator=path,
        record=lambda state: torch.exp(state.y[..., 0]),
        compile=True,
    )
    end = run.record[-1]
    (slopes,) = torch.autograd.grad(end.sum(), field.rate)
    return torch.stack([end.detach(), slopes[:, 0]])


def samples(paths, level, seed, coupled=True):
    """Samples of a level: a result, or the difference of two levels."""
    path = adjsim.BrownianPath(seed, LONGEST / 2**LEVELS)
    fine = results(paths, level, path)
    if level == 0:
        return fine
    other = path if coupled else adjsim.BrownianPath(seed + 1000, path.tol)
    return fine - results(paths, level - 1, other)


# %%
# The differences of a level
# --------------------------
#
# On one path the variance of a difference falls by four from level to level, as
# :math:`h^2`; with two independent paths it does not fall at all.

pilot = [samples(400, level, seed=level) for level in range(LEVELS + 1)]
spread = torch.stack([x.var(-1) for x in pilot])
apart = [
    samples(400, level, seed=level, coupled=False) for level in range(1, LEVELS + 1)
]
independent = torch.stack([x.var(-1) for x in apart])
steps = [TIME / LONGEST * 2**level for level in range(LEVELS + 1)]
costs = torch.tensor([n + (n / 2 if level else 0) for level, n in enumerate(steps)])
ratios = spread[2:] / spread[1:-1]
print("variance over that of the level before:", ratios[:, 0].tolist())

# %%
# How many samples
# ----------------
#
# The cost of the sum at a given variance is least for numbers of samples proportional
# to :math:`(V_l/C_l)^{1/2}`, with the variance :math:`V_l` and the cost :math:`C_l`, in
# steps, of a sample. Here both quantities have to be accurate, so :math:`V_l` is the
# sum of their relative variances. Plain sampling takes all paths at the last level.

relative = (spread / EXACT**2).sum(-1)
wanted = 0.02  # the standard error of both, relative to their exact values, together
share = (relative * costs).sqrt().sum() / wanted**2
counts = [max(64, math.ceil(float(x))) for x in share * (relative / costs).sqrt()]
found = [samples(n, level, seed=100 + level) for level, n in enumerate(counts)]
total = sum(x.mean(-1) for x in found)
error = sum(x.var(-1) / x.shape[-1] for x in found).sqrt()
cost = sum(n * c for n, c in zip(counts, costs.tolist(), strict=True))
plain_paths = float((pilot[0].var(-1) / EXACT**2).sum() / wanted**2)
plain = plain_paths * steps[-1]
for name, value, spread_of, exact in zip(
    ("mean of N", "d/dr"), total, error, EXACT, strict=True
):
    off = float((value - exact) / spread_of)
    print(f"{name:9} {value:.4f} +- {spread_of:.4f}, exact {exact:.4f} ({off:+.1f})")
    assert abs(off) < 4
print(f"steps: {cost:.3g} on {LEVELS + 1} levels, {plain:.3g} on the last alone")

# %%
# A picture
# ---------

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
sizes = [LONGEST / 2**level for level in range(1, LEVELS + 1)]
for i, (name, color) in enumerate((("N", "C0"), ("dN/dr", "C1"))):
    left.loglog(sizes, spread[1:, i], "o-", color=color, label=f"{name}, one path")
    left.loglog(sizes, independent[:, i], "x:", color=color, label=f"{name}, two paths")
left.loglog(sizes, [0.3 * h**2 for h in sizes], "k--", lw=0.8, label=r"$\propto h^2$")
left.set(xlabel="step h", ylabel=r"variance of $P_l - P_{l-1}$")
left.legend(fontsize=8)
right.bar(
    range(LEVELS + 1), [n * c for n, c in zip(counts, costs.tolist(), strict=True)]
)
for level, n in enumerate(counts):
    right.annotate(
        f"{n}", (level, n * costs[level]), ha="center", va="bottom", fontsize=8
    )
right.axhline(plain, color="k", lw=0.8, ls="--", label="all paths at the last level")
right.set(
    xlabel="level", ylabel="steps", yscale="log", title="numbers: paths of a level"
)
right.legend(fontsize=8)
plt.show()

# %%
# What this does not do
# ---------------------
#
# The variance falls as :math:`h^2` since these paths are of strong order one. With
# general noise, of order 1/2, it falls as :math:`h`, and levels gain less. For the
# derivative of a result that jumps, such as a probability, paths have no derivative:
# use :class:`~adjsim.Girsanov`, or smooth the result.
