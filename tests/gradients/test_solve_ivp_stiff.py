"""Stiff problems: time and error of the backward pass, where jumps of the adjoint decay at once."""

from __future__ import annotations

import functools
import itertools
import time

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import torch

import adjsim
from adjsim.ivp.collocation import STAGES, TIMES, Step
from tests.problems import slow_but

STIFF = ["Radau", "BDF", "LSODA"]
K = (0.04, 3e7, 1e4)
SAVED = np.linspace(1.6, 40, 25)


def robertson(t, y, k1, k2, k3):
    slow, fast, back = k1 * y[0], k2 * y[1] ** 2, k3 * y[1] * y[2]
    return torch.stack([-slow + back, slow - back - fast, fast])


@functools.cache
def robertson_variations() -> np.ndarray:
    """dy/d(k1, k2, k3) at the times that are saved, by the variational equations, written out: S' =
    J S + df/dk.
    """
    k1, k2, k3 = K

    def both(t, z):
        y, s = z[:3], z[3:].reshape(3, 3)
        slow, fast, back = k1 * y[0], k2 * y[1] ** 2, k3 * y[1] * y[2]
        jacobian = np.array(
            [
                [-k1, k3 * y[2], k3 * y[1]],
                [k1, -k3 * y[2] - 2 * k2 * y[1], -k3 * y[1]],
                [0.0, 2 * k2 * y[1], 0.0],
            ]
        )
        by_k = np.array(
            [[-y[0], 0.0, y[1] * y[2]], [y[0], -(y[1] ** 2), -y[1] * y[2]], [0.0, y[1] ** 2, 0.0]]
        )
        rates = np.array([-slow + back, slow - back - fast, fast])
        return np.concatenate([rates, (jacobian @ s + by_k).ravel()])

    start = np.concatenate([[1.0, 0.0, 0.0], np.zeros(9)])
    # Entries differ by ten orders of magnitude: each has its own scale.
    scales = np.concatenate(
        [[1.0, 1e-5, 1.0], np.tile([1.0, 1e-9, 1e-6], 3) * np.repeat([1.0, 1e-4, 1.0], 3)]
    )
    found = scipy.integrate.solve_ivp(
        both, (0, 40), start, "Radau", SAVED, rtol=1e-11, atol=1e-11 * scales
    )
    return found.y[3:].reshape(3, 3, len(SAVED))


@pytest.mark.parametrize(
    ("method", "error", "adjoint"),
    [
        ("Radau", 1e-6, "interpolate"),
        pytest.param("BDF", 1e-4, "checkpoint", marks=pytest.mark.slow),
        pytest.param("Radau", 1e-6, "checkpoint", marks=pytest.mark.slow),
        pytest.param("BDF", 1e-4, "interpolate", marks=pytest.mark.marathon),
    ],
)
def test_stiff_robertson(method, error, adjoint):
    """Relative to each answer. BDF at rtol 1e-8 is good to 1e-5."""
    k = [torch.tensor(x, requires_grad=True) for x in K]
    found = adjsim.solve_ivp(
        robertson, (0, 40), [1.0, 0.0, 0.0], method, [40.0], args=tuple(k),
        rtol=1e-8, atol=[1e-10, 1e-14, 1e-10],
        jac="autodiff", adjoint=adjoint,
    )  # fmt: skip
    for component in range(3):
        grads = torch.autograd.grad(found.y[component, -1], k, retain_graph=True)
        for grad, answer in zip(grads, robertson_variations()[component, :, -1], strict=True):
            assert float(grad) == pytest.approx(answer, rel=error)


@pytest.mark.parametrize(
    ("method", "error"),
    slow_but(
        lambda method, error: False,
        [("Radau", 1e-6), ("BDF", 1e-5), ("LSODA", 1e-5)],
        marathon=lambda method, error: method != "Radau",
    ),
)
def test_robertson_at_many_times(method, error):
    """Each of 25 times is a jump. That of y[1] is almost all of what decays within 1e-3 of the time
    to the next.
    """
    k = [torch.tensor(x, requires_grad=True) for x in K]
    found = adjsim.solve_ivp(
        robertson,
        (0, 40),
        [1.0, 0.0, 0.0],
        method,
        SAVED,
        args=tuple(k),
        rtol=1e-8,
        atol=[1e-10, 1e-14, 1e-10],
    )
    weights = np.cos(np.arange(len(SAVED)))
    for y, answers in zip(found.y, robertson_variations() @ weights, strict=True):
        grads = torch.autograd.grad((torch.tensor(weights) * y).sum(), k, retain_graph=True)
        for grad, answer in zip(grads, answers, strict=True):
            assert float(grad) == pytest.approx(answer, rel=error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "first"),
    slow_but(lambda method, first: first == 1e-3, itertools.product(STIFF, [1e-6, 1e-3, 1.0])),
)
def test_what_decays_is_right_at_the_start(method, first):
    """Where the first time that is read lies in the layer of what decays, and where it lies far
    behind it; in closed form.
    """
    rates = np.array([1.0, 10.0, 1e2, 1e3, 1e4, 1e5])
    matrix = 0.3 * np.diag(rates[1:], -1) - np.diag(rates)
    matrix[0, -1] = 0.3
    start = torch.ones(6, requires_grad=True)
    times = np.array([first, 2.0, 3.5])
    weights = np.random.default_rng(0).normal(size=(6, 3))
    a = torch.tensor(matrix)
    found = adjsim.solve_ivp(lambda t, y: a @ y, (0, 4), start, method, times, rtol=1e-7, atol=1e-9)
    (found.y * torch.tensor(weights)).sum().backward()
    expected = sum(
        scipy.linalg.expm(matrix * t).T @ w for t, w in zip(times, weights.T, strict=True)
    )
    np.testing.assert_allclose(start.grad, expected, rtol=0, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("method", "rtol", "stiffness"),
    [
        ("Radau", 1e-10, 1e2),
        ("BDF", 1e-8, 1e5),
        ("BDF", 1e-8, 1e7),
        ("LSODA", 1e-8, 1e7),
    ],
)
def test_a_derivative_of_which_only_the_error_of_the_states_remains(method, rtol, stiffness):
    """Prothero and Robinson's y' = -L (y - a cos t) - a sin t has y = a cos t for every L, so dy/dL
    = 0: the rate's derivative with respect to L is y - a cos t, the error of the states.
    """
    a, rate = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1.0, stiffness))
    found = adjsim.solve_ivp(
        lambda t, y, a, rate: -rate * (y - a * torch.cos(t)) - a * torch.sin(t),
        (0, 1),
        a[None],
        method,
        args=(a, rate),
        rtol=rtol,
        atol=rtol / 100,
    )
    found.y[0, -1].backward()
    # The error of the states is below rtol, and that of the adjoint a tenth of this.
    assert abs(float(a.grad) - np.cos(1)) < rtol
    assert abs(stiffness * float(rate.grad)) < rtol


@pytest.mark.parametrize("degree", range(STAGES + 1))
def test_the_area_of_a_layer_is_that_of_polynomials(degree):
    """z' = -z/tau, g' = phi z' with phi = (1 - t)^degree: g(1) = -phi(0) z(0) for tau to zero, up
    to degree s - 1.
    """
    rate = 1e9
    step = Step(1.0, np.array([[1.0]]), np.full((STAGES + 1, 1, 1), -rate))
    found = float(step.weighted()[0, 0] @ (-rate * (1 - TIMES) ** degree))
    assert (abs(found + 1) < 1e-7) == (degree < STAGES)


def test_the_error_of_what_decays_is_none_where_the_way_goes_on():
    """Of an adjoint that is almost all layer: 1e-3 of it is left behind the step, and is no error
    unless the way ends there.
    """
    matrix = np.array([[-1e4, 0.0], [1.0, -0.1]])
    step = Step(1.0, np.array([[1.0], [1.0]]), np.tile(matrix, (STAGES + 1, 1, 1)))
    exact = scipy.linalg.expm(matrix) @ step.start
    end = step.values[-1]
    assert abs(end[0]) > 1e-4
    assert abs(end[1] + 1e-4 * end[0] - exact[1]) < 1e-10
    assert step.error(1e-6, 1e-9, remaining=0.0)[0] > 1
    assert step.error(1e-6, 1e-9, remaining=10.0)[0] <= 1


@pytest.mark.slow
def test_save_times_cost_little():
    """Robertson's way back with 25 save times takes four times its way forward at the most, by the
    clock of this process; and fewer evaluations of the right-hand side, whatever the clock says."""
    ratios, calls = [], 0

    def counted(t, y, k1, k2, k3):
        nonlocal calls
        calls += 1
        return robertson(t, y, k1, k2, k3)

    for _ in range(3):
        k = [torch.tensor(x, requires_grad=True) for x in K]
        calls, begin = 0, time.process_time()
        found = adjsim.solve_ivp(
            counted,
            (0, 40),
            [1.0, 0.0, 0.0],
            "Radau",
            SAVED,
            args=tuple(k),
            rtol=1e-7,
            atol=[1e-9, 1e-13, 1e-9],
        )
        forward, middle = calls, time.process_time()
        found.y[0].sum().backward()
        ratios.append((time.process_time() - middle) / (middle - begin))
        assert calls - forward < found.nfev
    assert min(ratios) <= 4
