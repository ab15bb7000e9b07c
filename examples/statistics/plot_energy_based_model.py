r"""
Training an energy-based model by contrastive divergence
========================================================

An energy-based model is a network that gives an energy :math:`U_\theta`, and so
represents the density :math:`p_\theta=e^{-U_\theta}/Z_\theta`. The gradient of the
likelihood of data needs samples of this density, which Langevin chains of k steps
provide. This example compares three methods for the gradient. The score function method
starts chains from data, and takes their ends as samples. The persistent method also
takes the ends of chains as samples, but each iteration continues the chains of the
iteration before. The pathwise method starts chains from data and also differentiates
through them.

The data are in the plane, and their density is known in closed form. Quadrature gives
:math:`Z_\theta`. The quality of a method is measured by the Kullback-Leibler divergence
of its model from the truth. The exact gradient of the likelihood serves as the
reference. kT and friction are 1.
"""

# sphinx_gallery_thumbnail_number = 1

import copy
import math
import time
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import PowerNorm
from scipy.special import digamma
from torch import nn

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # one particle is too little to share between threads

CHAINS, STEPS, DT = 256, 10, 0.03
ITERATIONS, RATE, EVERY = 240, 1.5e-2, 20


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# %%
# Truth and model
# ---------------
#
# The truth is a crescent with a disc above it. Its energy is minus the logarithm of its
# density, so that Z = 1. A potential is any module that maps positions ``(*batch, 1,
# 2)`` to energies ``(*batch,)``. The model is a small network in a wide confining well,
# without which Z might be infinite.

SHARE, BEND, BASE, ACROSS, ALONG, HEIGHT = 0.3, 0.35, -1.8, 0.45, 1.2, 1.4
WIDTH = 2.0  # standard deviation of the Gaussian density of the confining well


class Truth(nn.Module):
    def forward(self, position):
        x, y = position.squeeze(-2).unbind(-1)
        crescent = (x / ALONG) ** 2 + ((y - BEND * x**2 - BASE) / ACROSS) ** 2
        disc = (x**2 + (y - HEIGHT) ** 2) / ACROSS**2
        crescent = math.log((1 - SHARE) / (2 * math.pi * ALONG * ACROSS)) - crescent / 2
        disc = math.log(SHARE / (2 * math.pi * ACROSS**2)) - disc / 2
        return -torch.logaddexp(crescent, disc)


def draw(count, generator):
    """Draw samples of the truth, (count, 1, 2)."""
    a, b = torch.randn(2, count, generator=generator)
    disc = torch.rand(count, generator=generator) < SHARE
    x = torch.where(disc, ACROSS * a, ALONG * a)
    y = ACROSS * b + torch.where(disc, HEIGHT, BASE + BEND * x**2)
    return torch.stack([x, y], -1).unsqueeze(1)


class Energy(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        layers = (
            nn.Linear(2, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 1),
        )
        self.net = nn.Sequential(*layers)

    def forward(self, position):
        x = position.squeeze(-2)
        return self.net(x).squeeze(-1) + x.square().sum(-1) / (2 * WIDTH**2)


class Quadrature:
    """Sums over a square grid."""

    def __init__(self, points, span=6.0):
        self.x = torch.linspace(-span, span, points)
        self.cell = (2 * span / (points - 1)) ** 2
        self.points = torch.stack(
            torch.meshgrid(self.x, self.x, indexing="xy"), -1
        ).reshape(-1, 1, 2)

    def log_partition(self, energy):
        return torch.logsumexp(-energy, 0) + math.log(self.cell)

    @torch.no_grad()
    def log_density(self, model):
        energy = model(self.points)
        return -energy - self.log_partition(energy)


def in_disc(position):
    x, y = position.squeeze(-2).unbind(-1)
    return x**2 + (y - HEIGHT) ** 2 < (3 * ACROSS) ** 2


truth, fine, coarse = Truth(), Quadrature(121), Quadrature(61)
weight, disc = fine.log_density(truth).exp() * fine.cell, in_disc(fine.points)
ENTROPY, TRUE_SHARE = (weight @ truth(fine.points)).item(), weight[disc].sum().item()


def measure(model, region):
    """Compute KL(truth || model), and the model's probability of a region."""
    log_density = fine.log_density(model)
    return -(weight @ log_density).item() - ENTROPY, log_density[
        region
    ].exp().sum().item() * fine.cell


data = draw(8192, seeded(1))
total = fine.log_partition(truth(fine.points)).exp().item()
print(f"Z of the truth by quadrature: {total:.5f}")
print(
    f"share of the disc: truth {TRUE_SHARE:.3f}, data "
    f"{in_disc(data).double().mean():.3f}"
)
assert abs(total - 1) < 1e-3

# %%
# The chains
# ----------
#
# Which integrator is unbiased enough? Chains that start from draws of the truth, and
# run in the energy of the truth, should keep the distribution of the truth. A change of
# their mean energy shows the bias of the integrator.

true_dynamics, starts, bias = (
    adjsim.OverdampedLangevin(truth),
    draw(20000, seeded(2)),
    {},
)
for solver in (adjsim.EulerMaruyama(DT), adjsim.LeimkuhlerMatthews(DT)):
    with torch.no_grad():
        run = adjsim.simulate(
            true_dynamics,
            true_dynamics.init(starts),
            [0.0, STEPS * DT],
            solver=solver,
            generator=seeded(3),
        )
        change = truth(run.final.position) - truth(starts)
    mean, stderr = change.mean().item(), change.std().item() / len(change) ** 0.5
    bias[type(solver).__name__] = mean / stderr
    print(f"{solver}: mean energy off by {mean:.4f} +- {stderr:.4f}")
assert abs(bias["LeimkuhlerMatthews"]) < 4
assert bias["EulerMaruyama"] > 5

# %%
# The chains of Euler-Maruyama end at too high an energy, and a network trained on them
# would have to compensate for this bias. :class:`~adjsim.LeimkuhlerMatthews` costs the
# same and shows no bias, so it is used throughout.
#
# Three terms
# -----------
#
# Let :math:`p_0` be the density of the data, and :math:`p_k` the density of the ends of
# chains of k steps that start from the data. The gradient of minus the log likelihood
# is
#
# .. math:: \frac{\mathrm d}{\mathrm d\theta}\,\mathrm{KL}(p_0\|p_\theta)
#    = \Big\langle\frac{\partial U}{\partial\theta}\Big\rangle_{p_0}
#    - \Big\langle\frac{\partial U}{\partial\theta}\Big\rangle_{p_\theta} .
#
# The second mean is a score function, the derivative of :math:`-\log Z`. It needs
# samples only, so no tangent is propagated through a chain. Contrastive divergence
# (Hinton, Neural Comput. 14, 1771 (2002)) replaces :math:`p_\theta` by :math:`p_k` in
# the second mean. The method is motivated by the loss
#
# .. math:: L = \mathrm{KL}(p_0\|p_\theta) - \mathrm{KL}(p_k\|p_\theta)
#    = \langle U\rangle_{p_0} - \langle U\rangle_{p_k} + H(p_k) - H(p_0) ,
#
# where H is the entropy and Z cancels. But the chains depend on :math:`\theta`, so the
# gradient of L has a third term, which contrastive divergence leaves out:
#
# .. math:: \frac{\mathrm dL}{\mathrm d\theta}
#    = \Big\langle\frac{\partial U}{\partial\theta}\Big\rangle_{p_0}
#    - \Big\langle\frac{\partial U}{\partial\theta}\Big\rangle_{p_k}
#    - \frac{\mathrm d}{\mathrm d\theta}\Big[\langle\bar U(x_k(\theta))\rangle -
#    H(p_k)\Big] ,
#
# where :math:`\bar U` is U with its parameters held fixed. The bracket is
# :math:`\mathrm{KL}(p_k\|p_\theta)` as a function of :math:`p_k` alone, up to a
# constant. The derivative of the bracket is a pathwise gradient, taken through the
# chain.
#
# What is the effect of the third term? Close to the fit, let :math:`\log p_\theta -
# \log p_0 = \varepsilon\,\varphi`, with :math:`\varphi` a mode of unit variance that
# the chain relaxes as :math:`e^{-\lambda t}`. For chains of length t, the derivatives
# with respect to :math:`\varepsilon` are
#
# .. math:: \underbrace{\varepsilon}_{\text{likelihood}}\qquad
#    \underbrace{\varepsilon\,(1-e^{-\lambda t})}_{\text{two terms}}\qquad
#    \underbrace{\varepsilon\,(1-e^{-2\lambda t})}_{\text{three terms}}\qquad
#    \underbrace{\varepsilon\,(1-e^{-\lambda t})^2}_{\text{third, opposite sign}}
#
# All four vanish at the fit. They differ in slow modes, such as the weight of the disc
# relative to the crescent. In a slow mode the three terms give twice as much as the
# first two terms. The last expression has the third term with the opposite sign, and is
# of second order in :math:`\lambda t`.
#
# The last expression matters because it is in use. Du, Li, Tenenbaum and Mordatch,
# "Improved contrastive divergence training of energy-based models" (ICML 2021), showed
# that the third term can be estimated. The code published with the paper adds the
# bracket to the loss, for the last step of chains from a replay buffer. Adding the
# bracket draws the chains closer to the model, while the gradient of L pushes them
# away. This example tries both signs.
#
# The entropy comes from the distances between the ends (Kozachenko and Leonenko, Probl.
# Inf. Transm. 23, 95 (1987)),
#
# .. math:: H \approx \psi(n) - \psi(m) + \ln\pi + 2\,\langle\ln r_m\rangle ,
#
# with :math:`\psi` the digamma function and :math:`r_m` the distance from one of n ends
# to its m-th neighbour. The derivative of the logarithm with respect to the distance is
# :math:`1/r_m`. In the plane :math:`r_1^2` is distributed exponentially, so
# :math:`1/r_1^2` has no mean, and the variance of the gradient from nearest neighbours
# is infinite. For m > 1 the variance is finite, but the bias of the entropy grows with
# m. Here m = 8.

NEIGHBOUR = 8


def entropies(position, neighbour=NEIGHBOUR):
    """Return one number for each position. Their mean estimates the entropy of the
    density that the positions are drawn from.
    """
    x = position.squeeze(-2)
    with torch.no_grad():
        other = torch.cdist(x, x).topk(neighbour + 1, largest=False).indices[:, -1]
    constant = digamma(len(x)) - digamma(neighbour) + math.log(math.pi)
    return constant + torch.log((x - x[other]).square().sum(-1))


def two_means(potential, neighbour=NEIGHBOUR):
    """Return an observable of the ends of chains with two entries: the energy with the
    ends fixed, and the energy with the parameters fixed less the entropy (the bracket).
    """
    fixed = copy.deepcopy(potential).requires_grad_(False)

    def means(state):
        x = state.position
        return torch.stack(
            [potential(x.detach()), fixed(x) - entropies(x, neighbour)], -1
        )

    return adjsim.Final(means)


def chains(dynamics, starts):
    """Make the simulation of chains from given positions."""
    solver = adjsim.LeimkuhlerMatthews(DT)
    return adjsim.Simulation(
        dynamics,
        lambda replicas, generator: dynamics.init(starts),
        [0.0, STEPS * DT],
        solver,
    )


off = np.array([entropies(part).mean().item() for part in data.split(CHAINS)]) - ENTROPY
print(
    f"entropy of {CHAINS} data, estimated less exact: {off.mean():.3f} +- "
    f"{off.std() / len(off) ** 0.5:.3f}"
)
assert abs(off.mean()) < 0.1

# %%
# The sign
# --------
#
# The first test compares the sign and size of the third term with exact answers. The
# data are normal with variance 1, and :math:`U = \kappa\,|x|^2/2`. The ends of the
# chains are then normal too, and their variance follows from the recursion of the
# steps. So L and its derivative are known.


def exact_terms(kappa, h=1e-5):
    """Compute the sum of the first two terms of dL/dkappa, and the third term, for
    LeimkuhlerMatthews.
    """

    def variance(kappa):
        a, s = 1 - kappa * DT, math.sqrt(2 * DT)
        square, shared = 1.0, 0.0
        for _ in range(STEPS):
            square, shared = a * a * square + a * s * shared + s * s / 2, s / 2
        return square

    def loss(kappa):
        # In the plane, KL(N(0, v) || N(0, 1/kappa)) = kappa v - 1 - ln(kappa v).
        v = variance(kappa)
        return (kappa - math.log(kappa)) - (kappa * v - math.log(kappa * v))

    two = 1 - variance(kappa)
    return two, (loss(kappa + h) - loss(kappa - h)) / (2 * h) - two


PARTS, KAPPA = 64, 2.0
two, third = exact_terms(KAPPA)
print(f"exact: two terms {two:.4f}, third {third:.4f}")
assert 0 < third < two
errors = {}
for neighbour in (1, NEIGHBOUR):
    dynamics = adjsim.OverdampedLangevin(
        adjsim.Harmonic(nn.Parameter(torch.tensor(KAPPA)))
    )
    simulation = chains(
        dynamics, torch.randn(PARTS * CHAINS, 1, 2, generator=seeded(4))
    )
    observable = two_means(dynamics.potential, neighbour)
    estimate = adjsim.Pathwise()(
        simulation,
        observable,
        replicas=PARTS * CHAINS,
        chunks=PARTS,
        generator=seeded(5),
    )
    (negative, slope), stderr = (
        estimate.grad["potential.k"].tolist(),
        estimate.grad_stderr["potential.k"].tolist(),
    )
    print(
        f"m = {neighbour}: two terms {1 - negative:.4f} +- {stderr[0]:.4f}, third "
        f"{-slope:.4f} +- {stderr[1]:.4f}"
    )
    errors[neighbour] = stderr[1]
assert abs(1 - negative - two) < 4 * stderr[0]
assert abs(-slope - third) < 4 * stderr[1] < third
assert errors[1] > 4 * errors[NEIGHBOUR]
assert errors[NEIGHBOUR] > stderr[0]

# %%
# The third term has the same sign as the sum of the first two, as derived, and the sum
# of all three is less than twice the sum of the first two. With nearest neighbours (m =
# 1) the noise would hide the third term. With the eighth neighbour the third term is
# still noisier than the sum of the first two.
#
# The second test uses the network. The pathwise derivative of the bracket along a
# random direction in parameter space is compared with a central difference. Both use
# the same noise.

torch.manual_seed(0)
untrained = Energy()
direction, observable = (
    [torch.randn_like(p) for p in untrained.parameters()],
    two_means(untrained),
)


def moved(h):
    """Estimate with displaced parameters in the chains, and the parameters of
    ``untrained`` in the observable.
    """
    dynamics = adjsim.OverdampedLangevin(copy.deepcopy(untrained))
    with torch.no_grad():
        for p, along in zip(dynamics.parameters(), direction, strict=True):
            p += h * along
    return adjsim.Pathwise()(
        chains(dynamics, data[:CHAINS]),
        observable,
        replicas=CHAINS,
        chunks=1,
        generator=seeded(6),
    )


h = 1e-6
quotient = (moved(h).value[1] - moved(-h).value[1]).item() / (2 * h)
slope = sum(
    (grad[1] * along).sum().item()
    for grad, along in zip(moved(0.0).grad.values(), direction, strict=True)
)
print(f"along a direction: pathwise {slope:.8f}, central difference {quotient:.8f}")
assert abs(slope - quotient) < 1e-5 * abs(quotient)

# %%
# Training
# --------
#
# A method is a function of the dynamics, a batch of data and the current positions of
# its chains. It returns a loss whose gradient is the method's estimate, and the new
# positions of the chains. Training needs no error bars, so the chains come from
# :func:`~adjsim.simulate` instead of an estimator. For the third term ``backward``
# differentiates through the chains. The persistent chains (Tieleman, ICML 2008) begin
# as draws from the density of the confining well. All methods have the same initial
# network, the same batches and the same optimizer, whose learning rate falls to a
# tenth.


def ends_of(dynamics, starts, generator):
    run = chains(dynamics, starts)
    return adjsim.simulate(
        dynamics,
        dynamics.init(starts),
        run.ts,
        solver=run.solver,
        generator=generator,
        compile=True,
    ).final.position


def likelihood(dynamics, batch, at, generator):
    """Return minus the log likelihood, with Z by quadrature. Its gradient is exact."""
    model = dynamics.potential
    return model(batch).mean() + coarse.log_partition(model(coarse.points)), at


def score_function(dynamics, batch, at, generator):
    model = dynamics.potential
    with torch.no_grad():
        ends = ends_of(dynamics, batch, generator)
    return model(batch).mean() - model(ends).mean(), at


def persistent(dynamics, batch, at, generator, restarted=0.0):
    model = dynamics.potential
    fresh = torch.rand(CHAINS, 1, 1, generator=generator) < restarted
    starts = torch.where(
        fresh, WIDTH * torch.randn(CHAINS, 1, 2, generator=generator), at
    )
    with torch.no_grad():
        ends = ends_of(dynamics, starts, generator)
    return model(batch).mean() - model(ends).mean(), ends


def pathwise(dynamics, batch, at, generator, sign=-1.0):
    model = dynamics.potential
    fixed = copy.deepcopy(model).requires_grad_(False)
    ends = ends_of(dynamics, batch, generator)
    bracket = (fixed(ends) - entropies(ends)).mean()
    return model(batch).mean() - model(ends.detach()).mean() + sign * bracket, at


def train(model, way, region, at=None, iterations=ITERATIONS, rate=RATE):
    """Train the model; return the values of :func:`measure` at regular iterations, and
    the seconds of training.
    """
    dynamics, batches, noise = adjsim.OverdampedLangevin(model), seeded(7), seeded(8)
    at = WIDTH * torch.randn(CHAINS, 1, 2, generator=noise) if at is None else at
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, iterations)
    history, seconds = [measure(model, region)], 0.0
    for i in range(iterations):
        begun = time.perf_counter()
        batch = data[torch.randint(len(data), (CHAINS,), generator=batches)]
        loss, at = way(dynamics, batch, at, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        seconds += time.perf_counter() - begun
        if (i + 1) % EVERY == 0:
            history.append(measure(model, region))
    return np.array(history), seconds


ways = {
    "likelihood, by quadrature": likelihood,
    "score function": score_function,
    "persistent": persistent,
    "pathwise": pathwise,
    "pathwise, opposite sign": partial(pathwise, sign=1.0),
}
COLORS = dict(
    zip(
        (*ways, "persistent, 5 % restarted"),
        ("k", "C1", "C2", "C0", "C3", "C4"),
        strict=True,
    )
)
models, histories, seconds = {}, {}, {}
for name, way in ways.items():
    models[name] = copy.deepcopy(untrained)
    histories[name], seconds[name] = train(models[name], way, disc)
    kl, share = histories[name][-1]
    print(
        f"{name}: KL(truth || learnt) = {kl:.3f}, disc {share:.3f} of "
        f"{TRUE_SHARE:.3f}, {seconds[name]:.1f} s"
    )

# %%
# The colour scale is the square root of the density, so that low densities are visible.

SIDE = 4.2
norm = PowerNorm(0.5, 0.0, weight.max().item() / fine.cell)


def show(ax, model, title):
    ax.set(xlim=(-SIDE, SIDE), ylim=(-SIDE, SIDE), aspect="equal", title=title)
    density = fine.log_density(model).exp().reshape(len(fine.x), -1)
    return ax.pcolormesh(
        fine.x,
        fine.x,
        density,
        norm=norm,
        cmap="magma",
        shading="gouraud",
        rasterized=True,
    )


fig, axes = plt.subplots(
    2, 3, figsize=(9.5, 6.4), layout="constrained", sharex=True, sharey=True
)
image = show(axes[0, 0], truth, "truth,\nand some of the data")
axes[0, 0].plot(*data[:400, 0].T, ".", ms=2, color="C9", alpha=0.7)
for ax, (name, model) in zip(axes.flat[1:], models.items(), strict=True):
    show(ax, model, f"{name},\nKL = {histories[name][-1, 0]:.3f}")
fig.supxlabel("x (no unit)")
fig.supylabel("y (no unit)")
fig.colorbar(image, ax=axes, label="density", shrink=0.8)
plt.show()

# %%
# The next figure shows the progress of training. The weight of the disc, which is its
# probability in the model, is the slow mode.

fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.3), layout="constrained")
right.axhline(TRUE_SHARE, color="0.75", lw=4, label="truth")
for name, history in histories.items():
    at = EVERY * np.arange(len(history))
    left.semilogy(at, history[:, 0], color=COLORS[name], lw=1.5, label=name)
    right.plot(at, history[:, 1], color=COLORS[name], lw=1.5)
left.set(xlabel="iteration", ylabel="KL(truth || learnt)")
right.set(xlabel="iteration", ylabel="probability of the disc", ylim=(0, None))
fig.legend(loc="outside lower center", ncols=3)
plt.show()

half, far = ITERATIONS // EVERY // 2, weight < 1e-4 * weight.max()
late = {name: history[half:, 0].mean() for name, history in histories.items()}
swing = {name: history[half // 2 :, 1].std() for name, history in histories.items()}
astray = {name: measure(model, far)[1] for name, model in models.items()}
for name in ways:
    print(
        f"{name}: mean KL {late[name]:.3f}, swing of the disc {swing[name]:.3f}, far "
        f"from the truth {astray[name]:.3f}"
    )
ratio = seconds["pathwise"] / seconds["score function"]
print(f"pathwise takes {ratio:.1f} times as long as the score function")

# %%
# On average over the second half of the iterations, the KL divergence of the plain
# score function is within a factor of two of the divergence of the exact gradient. The
# divergence of the pathwise method is within a factor of two of the divergence of the
# score function. But the pathwise method takes longer, so here the third term is not
# worth its noise and its cost. With the opposite sign the network stays further from
# the truth.
#
# The weight of the disc is the quantity that the chains determine least precisely. The
# swing is the standard deviation of this weight over the iterations after the first
# quarter. The swing of the score function is larger than that of the exact gradient. Of
# the score function, persistent and pathwise methods, the persistent method has the
# largest swing. Persistent chains also lag behind, since they have to follow a changing
# model while they cross between the disc and the crescent.
#
# Contrastive divergence is known to leave density in regions that its chains do not
# visit. Here the three methods leave little density where the density of the truth is
# below 1e-4 of its maximum.

three = ("score function", "persistent", "pathwise")
assert late["score function"] < 2 * late["likelihood, by quadrature"]
assert 0.5 < late["pathwise"] / late["score function"] < 2
assert late["pathwise, opposite sign"] > 1.5 * late["pathwise"]
assert swing["score function"] > 1.3 * swing["likelihood, by quadrature"]
assert late["persistent"] > 1.2 * late["score function"]
assert max(three, key=swing.get) == "persistent"
assert max(astray[name] for name in three) < 0.03

# %%
# Density that no chain sees
# --------------------------
#
# The model was wide at the start, so the chains visited every region where its density
# had to be lowered. This is not always the case. Now the network trained by the score
# function gets a hole in its energy, far from the data and deep enough to hold three
# tenths of the probability, and training continues. The persistent chains start from
# data here. They are tried without and with restarts: in every iteration each chain is
# replaced, with a probability of 5 %, by a draw from the density of the confining well.


class Holed(nn.Module):
    def __init__(self, model, depth, centre=(-3.2, -3.2), radius=0.5):
        super().__init__()
        self.model, self.depth, self.centre, self.radius = (
            model,
            depth,
            torch.tensor(centre),
            radius,
        )

    def well(self, position):
        return torch.exp(
            -(position.squeeze(-2) - self.centre).square().sum(-1)
            / (2 * self.radius**2)
        )

    def forward(self, position):
        return self.model(position) - self.depth * self.well(position)


taught = models["score function"]
shape = Holed(taught, 0.0).well(fine.points)
hole, log_density, low, high = shape > 0.1, fine.log_density(taught), 0.0, 100.0
while high - low > 1e-6:
    depth = (low + high) / 2
    held = torch.softmax(log_density + depth * shape, 0)[hole].sum()
    low, high = (depth, high) if held < 0.3 else (low, depth)

reached = {}
for name, starts in (
    ("data", data),
    (
        "draws of the confining well",
        WIDTH * torch.randn(data.shape, generator=seeded(9)),
    ),
):
    model = Holed(taught, depth)
    with torch.no_grad():
        ends = ends_of(adjsim.OverdampedLangevin(model), starts, seeded(10))
    reached[name] = (model.well(ends) > 0.1).double().mean().item()
    print(f"chains from {name}: {reached[name]:.4f} end in the hole")
assert reached["data"] == 0 < reached["draws of the confining well"]

trials = {
    "score function": score_function,
    "persistent": persistent,
    "persistent, 5 % restarted": partial(persistent, restarted=0.05),
}
fig, (left, middle, right) = plt.subplots(
    1, 3, figsize=(9.5, 3.7), layout="constrained", width_ratios=(1, 1, 1.3)
)
show(left, Holed(taught, depth), "the hole")
mended = {}
for name, way in trials.items():
    model = Holed(copy.deepcopy(taught), depth)
    history, _ = train(model, way, hole, data[:CHAINS], iterations=160, rate=1e-3)
    right.plot(
        EVERY * np.arange(len(history)),
        history[:, 1],
        "o-",
        ms=3,
        color=COLORS[name],
        label=name,
    )
    mended[name] = history[-1, 1]
    print(
        f"{name}: hole {history[0, 1]:.3f} before, {history[-1, 1]:.3f} after; KL "
        f"{history[0, 0]:.3f}, {history[-1, 0]:.3f}"
    )
show(middle, model, "after restarts")
for ax in (left, middle):
    ax.set(xlabel="x (no unit)", ylabel="y (no unit)")
right.set(xlabel="iteration", ylabel="probability of the hole", ylim=(0, None))
fig.legend(loc="outside lower center", ncols=3)
plt.show()

# %%
# Some of the restarted chains fall into the hole, and the network fills the hole.
# Chains from the data do not reach the hole, so no term of the gradient contains it,
# and without restarts more than a third of the hole is left. So the score function can
# train a model that is wide from the start. Where the model may be narrow, restart some
# of the chains.

assert mended.pop("persistent, 5 % restarted") < 0.05
assert min(mended.values()) > 0.1
