"""Impacts with known answers: a bounce, a ball on a barrier, a fast fall, a collision."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

import adjsim
from adjsim.dynamics.stable_step import largest_stable_step
from adjsim.potentials import Barrier, Contact, ParticleContact, Plane, Quadratic
from adjsim.potentials.base import force
from adjsim.potentials.gravity import Gravity
from tests.problems import parameter

# The bounce of the docstring of `bounce`, and its derivatives with respect to y0, k, m and g.
BOUNCE = 0.979216444
DERIVATIVES = (1.28818870, -1.03134e-6, 0.010313414, -0.0314956)


def bounce(y0: Tensor, k: Tensor, m: Tensor, g: Tensor, T: float) -> Tensor:
    """The height at T of a ball that falls from rest at y0 on the penalty k/2 max(0, -y)^2.

    It falls for t1, and swings about its rest -s = -m g/k with the frequency w until it leaves with
    the velocity v of the impact: y = -s + s cos(w t) - v/w sin(w t) is zero again at w t = 2 pi -
    2 atan(v / (w s)).
    """
    t1, v, w = (2 * y0 / g).sqrt(), (2 * g * y0).sqrt(), (k / m).sqrt()
    contact = (2 * math.pi - 2 * torch.atan2(v, g / w)) / w
    t = T - t1 - contact
    return v * t - g * t * t / 2


def test_the_formula_of_the_bounce():
    numbers = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1, 1e4, 1, 9.81)]
    height = bounce(*numbers, T=1.0)
    assert height.item() == pytest.approx(BOUNCE, abs=5e-10)
    for found, expected in zip(torch.autograd.grad(height, numbers), DERIVATIVES, strict=True):
        assert found.item() == pytest.approx(expected, rel=2e-6)


def bounced(steps: int, **options) -> tuple[Tensor, list[Tensor]]:
    """The height of the simulated ball, and its derivatives with respect to y0, k, m and g."""
    y0, k, g = (parameter(x) for x in (1.0, 1e4, 9.81))
    m = parameter(1.0)
    potential = Gravity(m, g) + Contact(Plane([1.0]), Quadratic(k))
    dynamics = adjsim.Hamiltonian(potential, m)
    found = adjsim.simulate(
        dynamics,
        dynamics.init(y0.reshape(1, 1), torch.zeros(1, 1, dtype=torch.float64)),
        [0.0, 1.0],
        solver=adjsim.VelocityVerlet(1 / steps),
        adjoint=adjsim.ReversibleAdjoint(),
        **options,
    )
    height = found.final.position.squeeze()
    return height.detach(), list(torch.autograd.grad(height, [y0, k, m, g]))


@pytest.mark.slow
def test_the_simulated_bounce_converges_to_the_formula():
    height, _ = bounced(1000)
    # Of second order: a tenth of the square of the frequency 100 times dt.
    assert float(height) == pytest.approx(BOUNCE, abs=1e-3)


@pytest.mark.marathon
def test_derivatives_of_the_simulated_bounce_converge_with_the_first_order():
    """The error of the step in which the force begins depends on where in the step it begins, and
    so on all parameters. A value has it squared in dt, and its derivative divided by dt.
    """
    height, grads = bounced(100_000, compile=True)
    assert float(height) == pytest.approx(BOUNCE, abs=1e-6)
    # With 1000 steps the errors are 0.6 to 5.
    for found, expected in zip(grads, DERIVATIVES, strict=True):
        assert float(found) == pytest.approx(expected, rel=0.15)


@pytest.mark.marathon
def test_error_control_gives_the_derivatives_of_the_bounce():
    y0, k, m, g = (parameter(x) for x in (1.0, 1e4, 1.0, 9.81))
    potential = Gravity(m, g) + Contact(Plane([1.0]), Quadratic(k))

    def rate(t: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y[1:], force(potential, y[:1, None]).flatten() / m])

    def surface(t: Tensor, y: Tensor) -> Tensor:
        return y[0]

    # Steps end at the surface, where the curvature of the penalty jumps.
    surface.reset = lambda t, y: y  # type: ignore[attr-defined]

    found = adjsim.solve_ivp(
        rate,
        (0.0, 1.0),
        torch.cat([y0.reshape(1), torch.zeros_like(y0).reshape(1)]),
        "DOP853",
        t_eval=[1.0],
        events=surface,
        params=[potential, m],
        rtol=1e-11,
        atol=1e-12,
    )
    height = found.y[0, -1]
    assert height.item() == pytest.approx(BOUNCE, abs=1e-8)
    # The digits of the reference numbers.
    for found, expected in zip(
        torch.autograd.grad(height, [y0, k, m, g]), DERIVATIVES, strict=True
    ):
        assert found.item() == pytest.approx(expected, rel=2e-6)


def ball(kappa: float, **options) -> adjsim.potentials.SumPotential:
    return Gravity(1.0, 9.81) + Contact(Plane([1.0]), Barrier(kappa, 0.02, **options))


def fall(potential, height: float, velocity: float, dt: float, steps: int) -> adjsim.Trajectory:
    dynamics = adjsim.Hamiltonian(potential, 1.0)
    start = torch.tensor([[height]], dtype=torch.float64)
    return adjsim.simulate(
        dynamics,
        dynamics.init(start, torch.full_like(start, velocity)),
        [k * dt for k in range(steps + 1)],
        solver=adjsim.VelocityVerlet(dt),
    )


@pytest.mark.slow
def test_a_ball_on_a_barrier():
    """m = 1, g = 9.81, h0 = 1, kappa = 1e4, d = 0.02."""
    potential = ball(1e4)

    def value(function, x):
        return float(function(torch.tensor([[x]], dtype=torch.float64)))

    closest = brentq(lambda x: value(potential, x) - 9.81, 0.001, 0.01, xtol=1e-16)
    assert closest == pytest.approx(0.00123695960, abs=1e-11)
    assert closest == pytest.approx(0.001236959591203, rel=1e-12)  # By mpmath, with 30 digits.
    rest = brentq(lambda x: value(lambda q: force(potential, q), x), 0.01, 0.02, xtol=1e-16)
    assert rest == pytest.approx(0.01755160511, abs=1e-11)
    assert rest == pytest.approx(0.0175516051034723, rel=1e-12)
    # From where the barrier begins, which leaves the energy as it is. Steps of 0.01 periods of
    # the stiffest point change the energy by 1e-5 of itself, and miss the lowest point by 2e-8.
    path = fall(potential, 0.02, -math.sqrt(2 * 9.81 * 0.98), 5e-6, 1600).position
    assert float(path.min()) == pytest.approx(closest, rel=1e-4)
    assert float(path[-1]) > 0.005


def test_a_fast_fall_does_not_pass_the_floor():
    """From 1 m at 8 m/s, 41.8 J, onto a barrier that stores 108 J above its floor."""
    potential = ball(1e5)
    contact = potential.parts[1]
    limit = largest_stable_step(Gravity(1.0, 9.81), 1.0, [[1.0]], contact=contact, energy=9.81 + 32)
    assert limit == pytest.approx(2 / math.sqrt(float(contact.largest_curvature(1, 41.81))))
    path = fall(potential, 1.0, -8.0, limit / 2, int(0.25 / (limit / 2)))
    assert float(path.position.min()) > 0
    energy = path.momentum.square().squeeze() / 2 + potential(path.position)
    # Half of the largest step turns the stiffest spring by one radian.
    torch.testing.assert_close(energy, torch.full_like(energy, 41.81), rtol=0.05, atol=0)
    assert float(path.momentum[-1]) > 7


def test_an_impact_that_is_too_hard_for_a_barrier_comes_back():
    """The same fall onto a barrier that stores 11 J: it passes the surface, and stays finite."""
    potential = ball(1e4)
    path = fall(potential, 1.0, -8.0, 5e-4, 500)
    lowest = path.position.min(0).values
    assert float(lowest) < 0
    assert float(path.position[-1]) > 0.1
    with pytest.raises(ValueError, match="vertex 0 is at the gap"):
        potential.parts[1].refuse_penetration(lowest)


def test_two_balls_exchange_their_velocities():
    """x2 = x1 + 2r + v0 T - (v0 - u0) t_c/2 with t_c = pi sqrt(m/2k)."""
    r, k, m, v0, u0, T = 0.2, 1e4, 1.3, 2.0, -1.0, 0.08
    dynamics = adjsim.Hamiltonian(ParticleContact(r, k), m)
    start = torch.tensor([[-0.27, 0.1], [0.2, 0.1]], dtype=torch.float64)
    velocity = torch.tensor([[v0, 0.0], [u0, 0.0]], dtype=torch.float64)
    found = adjsim.simulate(
        dynamics, dynamics.init(start, m * velocity), [0.0, T], solver=adjsim.VelocityVerlet(1e-4)
    ).final
    contact = math.pi * math.sqrt(m / (2 * k))
    assert (0.47 - 2 * r) / (v0 - u0) + contact < T
    expected = -0.27 + 2 * r + v0 * T - (v0 - u0) * contact / 2
    # 250 steps in contact: errors of second order, 1e-7 here.
    assert float(found.position[1, 0]) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(found.momentum, m * velocity.flip(0), rtol=0, atol=1e-5)
