"""Stiff kinetics with known ends: values, gradients, and the time of the backward pass."""

from __future__ import annotations

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

STIFF = ["Radau", "BDF", "LSODA"]


def solved(method, k, times=(60.0,), **options):
    return adjsim.solve_ivp(
        pollu, (0, 60), POLLU_START, method, list(times), args=(k,), jac="autodiff", **options
    ).y


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("Radau", marks=pytest.mark.slow),
        pytest.param("BDF", marks=pytest.mark.marathon),
    ],
)
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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["BDF", "LSODA"])
def test_hires_has_its_known_end(method):
    k = HIRES_RATES.clone().requires_grad_()
    y = adjsim.solve_ivp(
        hires, (0, 321.8122), HIRES_START, method, [321.8122], args=(k,), jac="autodiff",
        rtol=1e-8, atol=1e-12,
    ).y[:, 0]  # fmt: skip
    assert torch.allclose(y, HIRES_END, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", STIFF)
def test_ten_read_times_of_twenty_species_take_few_products(method, monkeypatch):
    """A product is a pass of autograd; the time of the passes is that of a backward run."""
    k, calls, grad = pollu_rates().requires_grad_(), [], torch.autograd.grad

    def counted(*given, **settings):
        calls.append(1)
        return grad(*given, **settings)

    y = solved(method, k, np.linspace(6, 60, 10), rtol=1e-6, atol=1e-9)
    monkeypatch.setattr(torch.autograd, "grad", counted)
    y.sum().backward()
    # 309 to 344 passes. With four points in the comparison it was 174 to 215, less accurate at
    # jumps.
    assert len(calls) < 400
