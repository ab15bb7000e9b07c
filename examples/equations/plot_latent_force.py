r"""
A latent force
==============

An oscillator is pushed by an unknown force :math:`u(t)`, and only its position is
measured, with noise:

.. math:: \ddot q = f(q) + u(t), \qquad y_i = q(t_i) + \sigma \varepsilon_i .

Which force was it, and how well do the data determine it? The force has a Gaussian
process as its prior. This page finds the posterior through the simulation itself: a
reversible splitting gives the motion and its derivative with respect to the force. For
the linear oscillator, :math:`f = -kq`, the exact posterior is the solution of a linear
system, and the page asserts that both agree. A pendulum, which has no such solution,
takes the same lines of code. The idea is that of latent force models (Alvarez, Luengo
and Lawrence 2009).
"""

# sphinx_gallery_thumbnail_number = 1

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import chi2
from torch import nn

import adjsim

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # one particle

K, DT, END, SIGMA = 2.0, 0.1, 20.0, 0.05
STEPS = round(END / DT)
ADJOINT = adjsim.ReversibleAdjoint()

# %%
# The prior
# ---------
#
# The force is linear between 41 nodes. Its values at the nodes have a normal
# distribution of mean zero and a covariance of Matern's family,
#
# .. math:: C(s) = a^2 (1 + \sqrt 3 |s|/\ell)\, e^{-\sqrt 3 |s|/\ell},
#
# with :math:`a = 1/2` and :math:`\ell = 2`. The force that made the data is a draw from
# it. Positions are measured at 50 times that need not be nodes.

nodes = torch.linspace(0, END, 41)
scaled = 3**0.5 * (nodes[:, None] - nodes).abs() / 2.0
covariance = 0.25 * (1 + scaled) * torch.exp(-scaled)
generator = torch.Generator().manual_seed(11)
draw = torch.linalg.cholesky(covariance) @ torch.randn(41, generator=generator)
steps = torch.randperm(STEPS, generator=generator)[:50].sort().values + 1
noise = SIGMA * torch.randn(50, generator=generator)
times = torch.cat([torch.zeros(1), steps * DT])

# %%
# The simulation
# --------------
#
# An :class:`~adjsim.OpenLoop` is a force that is a function of time. Each row of the
# batch has values of its own, so one run takes many forces, and one backward sweep
# gives the derivatives of every position with respect to every value: row :math:`i` of
# the batch contributes :math:`q(t_i)`. The steps run on a lattice (``exact=True``), so
# the sweep undoes them bit for bit and stores no states.


class Pendulum(nn.Module):
    """The energy k (1 - cos q) of a pendulum."""

    def forward(self, position):
        return K * (1 - torch.cos(position)).sum((-1, -2))


def motion(potential, values, times=times):
    """Return the positions, (times, batch), under forces of values (nodes, batch)."""
    signal = adjsim.PiecewiseLinear(nodes, values[..., None, None])
    dynamics = adjsim.Hamiltonian(adjsim.OpenLoop(signal) + potential)
    rest = torch.zeros(values.shape[1], 1, 1)
    run = adjsim.simulate(
        dynamics,
        dynamics.init(rest, rest),
        times,
        solver=adjsim.Splitting("BAB", DT, exact=True),
        adjoint=ADJOINT,
    )
    return run.position[..., 0, 0]


def jacobian(potential, value):
    """Return the positions (times,), and their derivatives (times, nodes)."""
    copies = value[:, None].repeat(1, len(steps)).requires_grad_()
    found = motion(potential, copies)[1:].diagonal()
    return found.detach(), torch.autograd.grad(found.sum(), copies)[0].T


# %%
# The posterior
# -------------
#
# With :math:`G` the Jacobian at the current force :math:`u`, a step of Gauss and Newton
# takes the motion as linear and solves for the mean and covariance of the posterior:
#
# .. math::
#
#    u' = C G^T (G C G^T + \sigma^2)^{-1} (y - q + G u), \qquad
#    \Sigma = C - C G^T (G C G^T + \sigma^2)^{-1} G C .
#
# For a linear oscillator one step is exact. Otherwise the steps are repeated until
# they change nothing, which is the most probable force, and :math:`\Sigma` is the
# covariance of Laplace's approximation around it. The posterior of a pendulum may have
# several maxima, so the start matters. The linear oscillator gives it: the path that
# its posterior finds for the data, :math:`\ddot q = -kq + u`, is also that of the
# pendulum under the force :math:`u - kq - f(q)`.


def force(potential, path):
    """Return the force on positions of any shape, without the latent force."""
    return adjsim.force(potential, path[..., None, None])[..., 0, 0]


def update(measured, value, position, jacobian):
    gain = jacobian @ covariance
    residual = measured - position + jacobian @ value
    whole = gain @ jacobian.T + SIGMA**2 * torch.eye(len(steps))
    mean = gain.T @ torch.linalg.solve(whole, residual)
    return mean, covariance - gain.T @ torch.linalg.solve(whole, gain)


spring = adjsim.Harmonic(K)
at_rest = jacobian(spring, torch.zeros(41))


def infer(potential, measured):
    """Return the mean and covariance of the posterior, the Jacobian and the changes."""
    value, _ = update(measured, torch.zeros(41), *at_rest)
    path = motion(spring, value[:, None], nodes)
    value = value + (force(spring, path) - force(potential, path))[:, 0]
    changes = []
    while not changes or (changes[-1] > 1e-4 and len(changes) < 20):
        position, slopes = jacobian(potential, value)
        mean, spread = update(measured, value, position, slopes)
        changes.append(float((mean - value).abs().max()))
        value = mean
    return value, spread, slopes, changes


found = {}
for name, potential in (("oscillator", spring), ("pendulum", Pendulum())):
    with torch.no_grad():
        measured = motion(potential, draw[:, None])[1:, 0] + noise
    found[name] = (potential, measured, *infer(potential, measured))
    changes = found[name][-1]
    sizes = ", ".join(f"{x:.0e}" for x in changes)
    print(f"{name:10}: steps of Gauss and Newton change the force by {sizes}")
    # Steps converge quadratically near the end, so the last change is far above the
    # error that is left.
    assert changes[-1] < 1e-4

# %%
# The exact answer
# ----------------
#
# Velocity Verlet takes the linear oscillator from rest to
#
# .. math::
#
#    q_n = \Delta t^2 \sum_{m < n} w_m \frac{\sin((n - m)\varphi)}{\sin\varphi} u(m
#    \Delta t), \qquad \cos\varphi = 1 - k \Delta t^2 / 2,
#
# with :math:`w_0 = 1/2` and else 1. So the Jacobian and the posterior are known in
# closed form, without a simulation.

grid = DT * np.arange(STEPS)
hats = np.stack([np.interp(grid, nodes, row) for row in np.eye(41)], 1)
hats[0] /= 2
angle = np.arccos(1 - K * DT**2 / 2)
ahead = steps.numpy()[:, None] - np.arange(STEPS)
green = np.where(ahead > 0, DT**2 * np.sin(ahead * angle) / np.sin(angle), 0.0)
exact = torch.tensor(green @ hats)

_, measured, mean, spread, slopes, changes = found["oscillator"]
known, known_spread = update(measured, torch.zeros(41), torch.zeros(len(steps)), exact)
errors = {
    "Jacobian": float((slopes - exact).abs().max() / exact.abs().max()),
    "mean": float((mean - known).abs().max() / known.abs().max()),
    "covariance": float((spread - known_spread).abs().max() / known_spread.max()),
}
print("relative errors: " + ", ".join(f"{k} {x:.0e}" for k, x in errors.items()))
# Positions on the lattice are rounded at each step, relative to their size by 1e-12.
assert max(errors.values()) < 1e-9
# The start is the answer already, since the motion is linear.
assert len(changes) == 1

# %%
# Two tests of the bands
# ----------------------
#
# Laplace's approximation needs a motion that is nearly linear over the width of the
# posterior. So 50 forces are drawn from the band, and their motions are compared with
# the linearised ones. The differences must be small beside the noise of the data.
#
# The true force is a draw from the prior, so its distance from the mean, measured by
# the covariance of the posterior, follows the distribution of chi squared with as many
# degrees of freedom as there are nodes: exactly for the oscillator, approximately for
# the pendulum. The assertion refuses one draw in a hundred of a correct posterior.

prior = covariance.diagonal().sqrt()
for name, (potential, _, mean, spread, slopes, _) in found.items():
    near = torch.linalg.cholesky(spread) @ torch.randn(41, 50, generator=generator)
    near = torch.cat([torch.zeros(41, 1), near], 1)
    with torch.no_grad():
        moved = motion(potential, mean[:, None] + near)[1:]
    bent = (
        moved[:, 1:] - moved[:, :1] - slopes @ near[:, 1:]
    ).square().mean().sqrt() / SIGMA
    apart = draw - mean
    distance = float(apart @ torch.linalg.solve(spread, apart))
    share = chi2.cdf(distance, 41)
    width = float((spread.diagonal().sqrt() / prior).mean())
    inside = int((apart.abs() < 1.96 * spread.diagonal().sqrt()).sum())
    print(
        f"{name:10}: departure from linear {float(bent):.0e} of the noise; chi squared "
        f"{distance:.1f} for 41 degrees of freedom (quantile {share:.2f}); {inside} of "
        f"41 nodes within 95 %; the band has {width:.2f} of the width of the prior"
    )
    assert bent < 0.2
    assert 0.005 < share < 0.995
    assert width < 0.5

curve = torch.linspace(0, END, STEPS + 1)
fig, axes = plt.subplots(2, 2, figsize=(10, 5.6), sharex=True, layout="constrained")
for (top, bottom), (name, (potential, measured, mean, spread, _, _)) in zip(
    axes.T, found.items(), strict=True
):
    error = 1.96 * spread.diagonal().sqrt()
    with torch.no_grad():
        position = motion(potential, mean[:, None], curve)[:, 0]
    top.plot(curve, position, color="C0", label="under the mean force")
    top.errorbar(times[1:], measured, SIGMA, fmt="k.", ms=4, lw=0.8, label="measured")
    top.set(title=name)
    bottom.axhspan(
        -1.96 * prior[0], 1.96 * prior[0], color="0.93", lw=0, label="prior, 95 %"
    )
    bottom.fill_between(
        nodes,
        mean - error,
        mean + error,
        color="C1",
        alpha=0.3,
        lw=0,
        label="posterior, 95 %",
    )
    bottom.plot(nodes, mean, color="C1", label="posterior mean")
    bottom.plot(nodes, draw, "k--", lw=1.2, label="true force")
    bottom.set(xlabel="time", ylim=(-1.9, 1.9))
axes[0, 0].set_ylabel("position")
axes[1, 0].set_ylabel("force u(t)")
axes[0, 0].legend(loc="lower left", fontsize="small")
axes[1, 0].legend(loc="upper left", fontsize="small", ncols=2)
plt.show()
