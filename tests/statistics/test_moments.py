"""Stationary covariances without sampling: for a linear force a step is an affine map, and they
solve a Lyapunov equation.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm, solve_continuous_lyapunov, solve_discrete_lyapunov

import adjsim
from adjsim.solvers.base import StepContext, SteppingSolver


def affine(dynamics, solver: SteppingSolver):
    """A and B of z' = A z + B xi, for one particle in one dimension and z its fields."""
    start = zero(dynamics)
    plan, coefficients = (
        solver.plan(dynamics, start, 0.0),
        solver.coefficients(dynamics, start),
    )
    sizes = [x.numel() for x in start]
    count = plan.draws * plan.noise_steps

    def step(z, xi):
        parts = torch.split(torch.as_tensor(z), sizes)
        state = type(start)(*(part.reshape(x.shape) for part, x in zip(parts, start, strict=True)))
        with torch.no_grad():
            noise = torch.as_tensor(xi).reshape(-1, 1, 1).unbind(0)
            forces = plan.forces(dynamics.potential)
            after = plan.step(state, StepContext(lambda share: 0.0, coefficients, noise, forces))
        return torch.cat([x.reshape(-1) for x in after]).numpy()

    n, none = sum(sizes), np.zeros(count)
    A = np.stack([step(unit, none) for unit in np.eye(n)], 1)
    B = np.stack([step(np.zeros(n), unit) for unit in np.eye(count)], 1)
    return A, B, plan


def zero(dynamics):
    at = torch.zeros(1, 1)
    start = (
        dynamics.init(at)
        if isinstance(dynamics, adjsim.OverdampedLangevin)
        else dynamics.init(at, at)
    )
    return type(start)(*(torch.zeros_like(x) for x in start))


def covariance(dynamics, solver):
    """The stationary covariance; a step that sees the next step's noise carries it along in the
    state.
    """
    A, B, plan = affine(dynamics, solver)
    n, draws = len(A), plan.draws
    if plan.noise_steps == 2:
        own, following = B[:, :draws], B[:, draws:]
        A = np.block([[A, own], [np.zeros((draws, n + draws))]])
        B = np.concatenate([following, np.eye(draws)])
    return solve_discrete_lyapunov(A, B @ B.T)[:n, :n]


def langevin(mass=1.0, kT=1.0, k=1.0, friction=1.0):
    return adjsim.Langevin(adjsim.Harmonic(k), mass, kT, friction)


def generalised(mass=1.0, kT=1.0, k=1.0, rates=(1.0, 4.0), strengths=(1.0, 8.0)):
    return adjsim.GeneralizedLangevin(adjsim.Harmonic(k), mass, kT, rates, strengths)


SETTINGS = [(1.0, 1.0, 1.0, 1.0), (2.5, 0.6, 1.7, 0.3), (0.4, 1.3, 0.9, 5.0)]


@pytest.mark.parametrize(("mass", "kT", "k", "friction"), SETTINGS)
@pytest.mark.parametrize("scheme", ["BAOAB", "OBABO", "ABOBA"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.7, 0.95])
def test_langevin_splittings(scheme, mass, kT, k, friction, share):
    """<q^2> and <p^2> in closed form at every stable step, h omega < 2."""
    omega = math.sqrt(k / mass)
    h = share * 2 / omega
    S = covariance(langevin(mass, kT, k, friction), adjsim.Splitting(scheme, h))
    q, p = S[0, 0] * k / kT, S[1, 1] / (mass * kT)
    less, more = 1 - (h * omega) ** 2 / 4, 1 / (1 - (h * omega) ** 2 / 4)
    expected = {"BAOAB": (1, less), "ABOBA": (1, more), "OBABO": (more, 1)}[scheme]
    # Near the limit of stability the equation is ill-conditioned, as 1/(1 - share).
    assert (q, p) == pytest.approx(expected, rel=1e-12 / (1 - share))


def test_one_step_of_one_half():
    for scheme, expected in {
        "BAOAB": (1, 0.9375),
        "ABOBA": (1, 1.0667),
        "OBABO": (1.0667, 1),
    }.items():
        S = covariance(langevin(), adjsim.Splitting(scheme, 0.5))
        assert (S[0, 0], S[1, 1]) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("mass", "kT", "k", "rates", "strengths"),
    [
        (1.0, 1.0, 1.0, (1.0, 4.0), (1.0, 8.0)),
        (2.5, 0.6, 1.7, (0.7,), (3.0,)),
        (0.4, 1.3, 0.9, (0.2, 2.0, 9.0), (0.5, 4.0, 1.0)),
    ],
)
@pytest.mark.parametrize("h", [0.01, 0.1, 0.25])
def test_generalised_splittings(mass, kT, k, rates, strengths, h):
    """BAGAB leaves <q^2> exact and GBABG <p^2>, with <q^2> 1/(1 - h^2 omega^2/4), whatever the
    bath.
    """
    dynamics = generalised(mass, kT, k, rates, strengths)
    more = 1 / (1 - h * h * k / mass / 4)
    S = covariance(dynamics, adjsim.Splitting("BAGAB", h))
    assert S[0, 0] * k / kT == pytest.approx(1.0, rel=1e-12)
    S = covariance(dynamics, adjsim.Splitting("GBABG", h))
    assert S[0, 0] * k / kT == pytest.approx(more, rel=1e-12)
    assert S[1, 1] / (mass * kT) == pytest.approx(1.0, rel=1e-12)
    assert np.diag(S)[2:] == pytest.approx(mass * kT, rel=1e-12)


def test_the_bath_is_the_exact_exponential():
    """Against scipy's matrix exponential, and the covariance by Lyapunov's equation."""
    dynamics = generalised(2.5, 0.6, 1.7)
    M, h = dynamics.bath.matrix().numpy(), 0.3
    E, C = (x.numpy() for x in dynamics.bath.flow(h))
    np.testing.assert_allclose(E, expm(-M * h), rtol=0, atol=1e-14)
    np.testing.assert_allclose(C, np.eye(3) - E @ E.T, rtol=0, atol=1e-14)
    # dC/dt = -M C - C M^T + Q vanishes at the stationary covariance, the unit matrix.
    Q = np.diag([0.0, 2.0, 8.0])
    np.testing.assert_allclose(solve_continuous_lyapunov(M, Q), np.eye(3), atol=1e-13)


def test_the_covariance_keeps_its_digits_at_small_steps():
    """The momentum's noise over a short time is 2/3 r s h^3 to leading order; the difference 1 - E
    E^T keeps none of it.
    """
    dynamics = generalised(rates=(2.0,), strengths=(3.0,))
    for h in (1e-3, 1e-5):
        _, C = dynamics.bath.flow(h)
        assert float(C[0, 0]) == pytest.approx(2 / 3 * 2.0 * 3.0 * h**3, rel=5 * h)


def test_continuous_equations_sample_the_canonical_distribution():
    """The linear SDE of drift and diffusion has covariance (kT/k, m kT, ..., m kT)."""
    for dynamics in (langevin(2.5, 0.6, 1.7, 0.3), generalised(2.5, 0.6, 1.7)):
        start = zero(dynamics)
        sizes = [x.numel() for x in start]

        def rate(z, dynamics=dynamics, start=start, sizes=sizes):
            parts = torch.split(torch.as_tensor(z), sizes)
            state = type(start)(
                *(part.reshape(x.shape) for part, x in zip(parts, start, strict=True))
            )
            return torch.cat([x.detach().reshape(-1) for x in dynamics.drift(0.0, state)]).numpy()

        M = np.stack([rate(unit) for unit in np.eye(sum(sizes))], 1)
        amplitude = torch.cat([x.reshape(-1) for x in dynamics.diffusion(0.0, start)]).numpy()
        S = solve_continuous_lyapunov(M, -np.diag(amplitude**2))
        np.testing.assert_allclose(S, np.diag([0.6 / 1.7] + [2.5 * 0.6] * (len(M) - 1)), atol=1e-13)


@pytest.mark.parametrize("dt", [0.02, 0.2, 0.8])
def test_overdamped_schemes(dt):
    """Euler-Maruyama is out by 1/(1 - k dt/(2 friction)); averaging the noise of two steps makes it
    exact.
    """
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(1.5), kT=0.7, friction=2.0)
    S = covariance(dynamics, adjsim.EulerMaruyama(dt))
    assert S[0, 0] * 1.5 / 0.7 == pytest.approx(1 / (1 - 1.5 * dt / 4.0), rel=1e-12)
    S = covariance(dynamics, adjsim.LeimkuhlerMatthews(dt))
    assert S[0, 0] * 1.5 / 0.7 == pytest.approx(1.0, rel=1e-12)


# Orders of <q^2>, <p^2> and <q p>, inf where the moment is exact. The core of a palindrome
# conserves a quadratic form without the product q p; that of BAO (symplectic Euler) has one of
# order h, which friction hands on to <q^2>: <p^2>/m - k <q^2> = friction <q p> at equilibrium.
@pytest.mark.parametrize(
    ("build", "scheme", "orders"),
    [
        (langevin, "OBABO", (2, math.inf, math.inf)),
        (langevin, "OABAO", (2, math.inf, math.inf)),
        (langevin, "BAOAB", (math.inf, 2, math.inf)),
        (langevin, "ABOBA", (math.inf, 2, math.inf)),
        (langevin, "BAO", (1, 2, 1)),
        (langevin, "AOB", (1, 2, 1)),
        (generalised, "GBABG", (2, math.inf, math.inf)),
        (generalised, "BAGAB", (math.inf, 2, math.inf)),
        (generalised, "BAG", (1, 1, 1)),
    ],
)
def test_orders_of_the_moments(build, scheme, orders):
    dynamics = build(1.7, 0.6, 1.3)
    q, p = 0.6 / 1.3, 1.7 * 0.6
    errors = []
    for h in (0.02, 0.01, 0.005):
        S = covariance(dynamics, adjsim.Splitting(scheme, h))
        errors.append([abs(S[0, 0] / q - 1), abs(S[1, 1] / p - 1), abs(S[0, 1]) / math.sqrt(q * p)])
    for i, order in enumerate(orders):
        found = [e[i] for e in errors]
        if order == math.inf:
            assert max(found) < 1e-12
        else:
            # The next power of h is a few per cent at these steps.
            assert all(
                math.log2(a / b) == pytest.approx(order, abs=0.1)
                for a, b in itertools.pairwise(found)
            ), found
