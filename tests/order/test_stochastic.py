"""Strong order on one Brownian path, weak order on moments: fitted slopes."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm, solve_continuous_lyapunov

import adjsim
from adjsim import DirectAdjoint, SDESolver, Splitting
from adjsim.core.noise import Noise
from adjsim.simulation.simulate import run
from tests.gradients.test_sde import Coarse
from tests.problems import STOCHASTIC, Cage, slow_but, square, start as start_of

FINE = 1 / 2048
EVERY = (64, 32, 16, 8)


def final(dynamics, solver, noise, time=1.0):
    position, momentum = square((64,))
    with torch.no_grad():
        return run(
            dynamics,
            start_of(dynamics, position, momentum),
            [0.0, time],
            solver,
            DirectAdjoint(),
            None,
            noise,
        ).final


@functools.cache
def exact_end(name):
    reference = "EulerMaruyama" if name == "overdamped" else "sde heun"
    return final(STOCHASTIC[name](Cage()), solver_of(reference, FINE), Coarse(7, 1))


def slope(errors):
    return float(np.polyfit(np.log(EVERY), np.log(errors), 1)[0])


def solver_of(scheme, dt):
    if scheme in ("EulerMaruyama", "LeimkuhlerMatthews"):
        return getattr(adjsim, scheme)(dt)
    return SDESolver(scheme[4:], dt=dt) if scheme.startswith("sde ") else Splitting(scheme, dt)


@pytest.mark.parametrize(
    ("name", "scheme", "order"),
    slow_but(
        lambda name, scheme, order: scheme == "LeimkuhlerMatthews",
        [
            ("langevin", "BAOAB", 1),
            ("langevin", "BAO", 1),
            ("langevin", "sde midpoint", 1),
            ("langevin", "sde euler", 1),
            ("langevin", "sde heun", 1),
            ("langevin", "sde reversible_heun", 1),
            ("generalised-2", "BAGAB", 1),
            ("generalised-2", "sde midpoint", 1),
            ("overdamped", "EulerMaruyama", 1),
            ("overdamped", "LeimkuhlerMatthews", 0.5),
            ("overdamped", "sde midpoint", 1),
            ("overdamped", "sde milstein", 1),
        ],
        marathon=lambda name, scheme, order: (
            scheme in ("BAO", "BAOAB", "BAGAB", "sde euler")
            or (scheme == "sde midpoint" and name != "overdamped")
        ),
    ),
)
def test_strong_order_on_the_same_path(name, scheme, order):
    """Root mean square distance at the end from a solution on a path eight times finer than the
    finest, against dt.
    """
    dynamics, exact = STOCHASTIC[name](Cage()), exact_end(name)
    errors = []
    for every in EVERY:
        found = final(dynamics, solver_of(scheme, FINE * every), Coarse(7, every))
        errors.append(
            math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(found, exact, strict=True)))
        )
    # Noise is additive, so order one throughout; the reference itself is off by an eighth of the
    # smallest error at most.
    assert slope(errors) == pytest.approx(order, abs=0.15), errors


@pytest.mark.parametrize(
    ("scheme", "order"),
    [
        ("BAOAB", 2),
        ("OBABO", 2),
        ("ABOBA", 2),
        ("BAO", 1),
        ("sde euler", 1),
        ("sde midpoint", 2),
        ("sde heun", 2),
    ],
)
def test_weak_order_on_moments(scheme, order):
    """Mean and covariance of a harmonic oscillator after t = 1 from one start, exactly: the step is
    affine.
    """
    mass, kT, k, friction = 1.7, 0.6, 1.3, 0.8
    dynamics = adjsim.Langevin(adjsim.Harmonic(k), mass, kT, friction)
    M = np.array([[0, 1 / mass], [-k, -friction]])
    S = solve_continuous_lyapunov(M, -np.diag([0, 2 * friction * mass * kT]))
    E = expm(M)
    mean, cov = E @ np.array([1.0, 0.5]), S - E @ S @ E.T
    errors = []
    for every in EVERY:
        dt = FINE * every
        A, B = _affine(dynamics, solver_of(scheme, dt), dt)
        z, C = np.array([1.0, 0.5]), np.zeros((2, 2))
        for _ in range(round(1 / dt)):
            z, C = A @ z, A @ C @ A.T + B @ B.T
        errors.append(np.abs(z - mean).sum() + np.abs(C - cov).sum())
    assert slope(errors) == pytest.approx(order, abs=0.1), errors


class Unit(Noise):
    """One for one draw, zero for the others."""

    def __init__(self, draw):
        super().__init__(0)
        self.draw = draw

    def __call__(self, step, shape, like):
        return (
            torch.eye(shape[1], dtype=like.dtype)[self.draw : self.draw + 1]
            if self.draw is not None
            else torch.zeros(shape)
        )


def _affine(dynamics, solver, dt):
    """A and B of one step, by running it from unit vectors without noise, and from zero on each
    draw.
    """

    def step(q, p, draw):
        start = dynamics.init(torch.tensor([[q]]), torch.tensor([[p]]))
        with torch.no_grad():
            end = run(dynamics, start, [0.0, dt], solver, DirectAdjoint(), None, Unit(draw)).final
        return np.array([float(end.position), float(end.momentum)])

    draws = (
        solver.plan(dynamics, dynamics.init(torch.zeros(1, 1)), 0.0).draws
        if isinstance(solver, Splitting)
        else 1
    )
    A = np.stack([step(1.0, 0.0, None), step(0.0, 1.0, None)], 1)
    return A, np.stack([step(0.0, 0.0, i) for i in range(draws)], 1)
