"""solve_ivp far from the scale one, and at the border of the domain of fun."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.integrate
import torch

import adjsim

METHODS = ["RK45", "DOP853", "Radau", "BDF", "LSODA"]
MASS, CHARGE = 9.109e-31, 1.602e-19


def leaf(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def accelerate(t, y, distance, field):
    return torch.stack([y[1], CHARGE * field / MASS + 0 * y[0]])


def arrive(t, y, distance, field):
    return y[0] - distance


@pytest.mark.parametrize("span", [1e-12, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_an_electron_arrives_after_a_tenth_of_a_picosecond(method, span):
    """T = sqrt(2 d m / (e E)), so dT/dd = T / (2 d) and dT/dE = -T / (2 E).

    The time is 170 times as long as the absolute accuracy of SciPy's root finder.
    """
    distance, field = leaf(2e-9), leaf(1e6)
    arrive.terminal = True
    found = adjsim.solve_ivp(
        accelerate,
        (0, span),
        [0.0, 0.0],
        method,
        args=(distance, field),
        events=arrive,
        rtol=1e-9,
        atol=1e-20,
    )
    time = found.t_events[0][0]
    time.backward()
    exactly = (2 * 2e-9 * MASS / (CHARGE * 1e6)) ** 0.5
    # The motion is a polynomial, which all methods solve to about rtol.
    measured = [float(time) / exactly, float(distance.grad) / exactly * 4e-9]
    measured.append(-float(field.grad) / exactly * 2e6)
    assert measured == pytest.approx([1.0, 1.0, 1.0], rel=1e-8)


def test_a_field_that_jumps_within_a_tenth_of_a_picosecond():
    """The field is four times as strong behind d / 4, which an electron reaches after T / 2.

    It covers the rest in t of 3/8 T^2 = T t / 2 + 2 t^2, and all times are as sqrt(d / E).
    """
    distance, field = leaf(2e-9), leaf(1e6)

    def rates(t, y, distance, field):
        force = CHARGE * field / MASS
        return torch.stack([y[1], torch.where(y[0] < distance / 4, force, 4 * force)])

    def edge(t, y, distance, field):
        return y[0] - distance / 4

    edge.reset, edge.direction, arrive.terminal = lambda t, y, *args: y, 1, True
    found = adjsim.solve_ivp(
        rates,
        (0, 1e-12),
        [0.0, 0.0],
        args=(distance, field),
        events=[edge, arrive],
        rtol=1e-9,
        atol=1e-20,
    )
    time = found.t_events[1][0]
    time.backward()
    exactly = (0.375 + 13**0.5 / 8) * (2 * 2e-9 * MASS / (CHARGE * 1e6)) ** 0.5
    # The step across the edge is of first order: its error is a hundred times its estimate.
    measured = [float(time), 4e-9 * float(distance.grad), -2e6 * float(field.grad)]
    assert measured == pytest.approx([exactly] * 3, rel=1e-6, abs=0)


@pytest.mark.parametrize("adjoint", ["interpolate", "checkpoint"])
@pytest.mark.parametrize("method", METHODS)
def test_a_tank_empties(method, adjoint):
    """y' = -k sqrt(y) from 1 is (1 - k t / 2)^2, which is 1e-4 at t = 1.98 / k.

    Trial points below zero are NaN, and LSODA accepts steps to NaN by itself.
    """
    k = leaf(1.0)

    def low(t, y, k):
        return y[0] - 1e-4

    low.terminal = True
    found = adjsim.solve_ivp(
        lambda t, y, k: -k * torch.sqrt(y),
        (0, 2.5),
        [1.0],
        method,
        args=(k,),
        events=low,
        rtol=1e-8,
        atol=1e-10,
        adjoint=adjoint,
    )
    found.t_events[0][0].backward()
    # An error of y is divided by the rate 0.01 at the end.
    assert float(found.t_events[0][0]) == pytest.approx(1.98, abs=100 * 1e-8)
    assert float(k.grad) == pytest.approx(-1.98, abs=100 * 1e-8)


def test_lsoda_fails_at_the_end_of_the_domain():
    """A tank that is empty at t = 2 has no solution to 2.5: LSODA's answer was NaN, a success."""
    with pytest.raises(RuntimeError, match="LSODA failed: Required step size"):
        adjsim.solve_ivp(lambda t, y: -torch.sqrt(y), (0, 2.5), [1.0], "LSODA", rtol=1e-8)


def test_lsoda_of_scipy_is_guarded_too():
    given = (lambda t, y: -torch.sqrt(y), (0, 1.9), [1.0])
    ours, scipys = (
        adjsim.solve_ivp(*given, method, rtol=1e-8) for method in ("LSODA", scipy.integrate.LSODA)
    )
    assert np.isfinite(ours.y.numpy()).all()
    assert torch.equal(ours.y, scipys.y)
