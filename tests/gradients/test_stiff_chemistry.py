"""Stiff kinetics with known ends: values, gradients, and the passes of a backward run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import adjsim
from tests.chemistry import (
    HIRES_END,
    HIRES_RATES,
    HIRES_START,
    POLLU_END,
    POLLU_START,
    hires,
    pollu,
    pollu_rates,
)
from tests.problems import slow_but

STIFF = ["Radau", "BDF", "LSODA"]


def solved(method, k, times=(60.0,), **options):
    return adjsim.solve_ivp(
        pollu, (0, 60), POLLU_START, method, list(times), args=(k,), jac="autodiff", **options
    ).y


@pytest.mark.marathon
@pytest.mark.parametrize("method", ["Radau", "BDF"])
def test_pollu_has_its_known_end_and_three_gradients_agree(method):
    options = {"rtol": 1e-8, "atol": 1e-13}
    k = pollu_rates().requires_grad_()
    y = solved(method, k, **options)
    for species, value in POLLU_END.items():
        assert float(y[species, 0].detach()) == pytest.approx(value, rel=1e-6)
    rows = torch.autograd.grad(y[[0, 3], 0], k, torch.eye(2), is_grads_batched=True)[0]
    # Of reactions 1 and 15 in opposite directions: by differences, and forward in time.
    step, h = torch.zeros(25), 1e-3
    step[[0, 14]] = torch.tensor([1.0, -0.5])
    with torch.no_grad():
        more, less = (solved(method, k * (sign * h * step).exp(), **options) for sign in (1, -1))
    difference = ((more - less) / (2 * h))[[0, 3], 0]
    found = rows @ (k * step).detach()
    assert torch.allclose(found, difference, rtol=1e-4, atol=1e-9)
    start = k.detach()
    _, along = torch.func.jvp(lambda k: solved(method, k, **options), (start,), (start * step,))
    assert torch.allclose(found, along[[0, 3], 0], rtol=1e-6, atol=0)


@pytest.mark.marathon
@pytest.mark.parametrize("method", STIFF)
def test_hires_has_its_known_end_and_gradient(method):
    """To eight digits of the set's, with the gradient of differences and of the other adjoint."""

    def end(k, adjoint="interpolate"):
        return adjsim.solve_ivp(
            hires, (0, 321.8122), HIRES_START, method, [321.8122], args=(k,), jac="autodiff",
            rtol=1e-10, atol=1e-15, adjoint=adjoint,
        ).y[:, 0]  # fmt: skip

    k, weights = HIRES_RATES.clone().requires_grad_(), torch.cos(torch.arange(8.0)) / HIRES_END
    y = end(k)
    assert torch.allclose(y, HIRES_END, rtol=1e-8, atol=0)
    (found,), (other,) = (
        torch.autograd.grad(weights @ y, k) for y in (y, end(k, adjoint="checkpoint"))
    )
    assert torch.allclose(other, found, rtol=1e-10, atol=0)
    along, h = torch.cos(torch.arange(10.0) + 1), 1e-4
    with torch.no_grad():
        values = [weights @ end(HIRES_RATES * (s * h * along).exp()) for s in (2, 1, -1, -2)]
    # The difference of order four in h.
    difference = float(torch.tensor([-1.0, 8.0, -8.0, 1.0]) @ torch.stack(values)) / (12 * h)
    assert float((found * HIRES_RATES) @ along) == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "times"),
    slow_but(
        lambda *_: False,
        itertools.product(STIFF, [1, 10]),
        marathon=lambda method, times: (method, times) != ("LSODA", 10),
    ),
)
def test_the_gradient_of_twenty_species_takes_few_passes(method, times, monkeypatch):
    """Of autograd; ``benchmarks/kinetics.py`` measures the time."""
    options = {"times": np.linspace(60 / times, 60, times), "rtol": 1e-6, "atol": 1e-9}
    calls, grad = [], torch.autograd.grad
    y = solved(method, pollu_rates().requires_grad_(), **options)

    def counted(*given, **settings):
        calls.append(1)
        return grad(*given, **settings)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    y.sum().backward()
    # 105 to 153 passes for one time, 246 to 278 for ten: three for each step, one for each step
    # that is rejected.
    assert len(calls) < 12 * times + 180


def test_a_function_that_vmap_does_not_take():
    """A branch on the time is evaluated at one time after the other, to the same gradient."""

    def branch(t, y, k):
        return -k * y if t < 2 else y

    def without(t, y, k):
        return -k * y

    grads = []
    for fun in (branch, without):
        k = torch.tensor([0.5, 40.0], requires_grad=True)
        y = adjsim.solve_ivp(fun, (0, 1), [1.0, 2.0], "BDF", [0.1, 1.0], args=(k,), rtol=1e-6).y
        grads += torch.autograd.grad(y.sum(), k)
    assert torch.allclose(*grads, rtol=1e-12, atol=0)
