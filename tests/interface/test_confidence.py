"""Covariance and intervals of least-squares fits, against SciPy's curve_fit."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import nn

import adjsim
from adjsim import confidence
from tests.copies import WAYS

T = torch.linspace(0.0, 3.0, 12, dtype=torch.float64)
NOISE = 0.02 * torch.cos(torch.arange(12, dtype=torch.float64) ** 2)
DATA = 1.5 * torch.exp(-0.8 * T) + 0.3 + NOISE
SIGMA = 0.01 + 0.01 * T
CORRELATED = torch.diag(SIGMA**2) + 2e-5


def decay(t, a, k, c):
    return a * np.exp(-k * t) + c


def fitted(sigma, absolute):
    """The parameters and their covariance by SciPy, with the analytic Jacobian."""

    def jacobian(t, a, k, c):
        return np.stack([np.exp(-k * t), -a * t * np.exp(-k * t), np.ones_like(t)], 1)

    return scipy.optimize.curve_fit(
        decay, T.numpy(), DATA.numpy(), [1.0, 1.0, 0.0], None if sigma is None else sigma.numpy(),
        absolute, jac=jacobian, xtol=1e-15, ftol=1e-15, gtol=1e-15,
    )  # fmt: skip


def solved(a, k, c):
    """The same model as a solution of its equation, y' = -k (y - c)."""
    return adjsim.solve_ivp(
        lambda t, y, k, c: -k * (y - c), (0, 3), (a + c)[None], t_eval=T, args=(k, c),
        rtol=1e-9, atol=1e-11,
    )  # fmt: skip


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("sigma", [None, SIGMA, CORRELATED], ids=["none", "each", "matrix"])
def test_an_analytic_model_has_the_covariance_of_curve_fit(sigma, absolute):
    values, covariance = fitted(sigma, absolute)
    p = torch.tensor(values, requires_grad=True)
    predicted = p[0] * torch.exp(-p[1] * T) + p[2]
    found = confidence(predicted, DATA, p, sigma=sigma, absolute_sigma=absolute, level=0.9)
    assert np.allclose(found.covariance, covariance, rtol=1e-7, atol=0)
    assert np.allclose(found.stderr, np.sqrt(np.diag(covariance)), rtol=1e-7)
    assert found.dof == 9
    quantile = scipy.stats.norm.ppf(0.95) if absolute else scipy.stats.t.ppf(0.95, 9)
    assert torch.allclose(found.upper - found.values, quantile * found.stderr)
    assert torch.allclose(found.values - found.lower, quantile * found.stderr)
    assert torch.allclose(found.correlation.diagonal(), torch.ones(3))


@pytest.mark.slow
def test_a_solution_has_the_covariance_of_its_closed_form():
    values, covariance = fitted(SIGMA, False)
    p = {name: torch.tensor(x, requires_grad=True) for name, x in zip("akc", values, strict=True)}
    found = confidence(solved(**p), DATA[None], p, sigma=SIGMA)
    assert np.allclose(found.covariance, covariance, rtol=1e-6)
    assert list(found.stderr) == ["a", "k", "c"]
    assert float(found.stderr["k"]) == pytest.approx(covariance[1, 1] ** 0.5, rel=1e-6)
    for way in WAYS.values():
        assert torch.equal(way(found).covariance, found.covariance)


def test_parameters_of_a_module_in_float32():
    line = nn.Linear(1, 1).float()
    x = T.float()[:, None]
    with torch.no_grad():
        solution = torch.linalg.lstsq(torch.cat([x, x**0], 1), DATA.float()[:, None]).solution
        line.weight.copy_(solution[:1])
        line.bias.copy_(solution[1])
    found = confidence(line(x)[:, 0], DATA, line)
    fit = scipy.stats.linregress(T.numpy(), DATA.numpy())
    assert found.stderr["weight"].shape == (1, 1)
    assert found.stderr["weight"].dtype == torch.float32
    assert float(found.stderr["weight"]) == pytest.approx(fit.stderr, rel=1e-5)
    assert float(found.stderr["bias"]) == pytest.approx(fit.intercept_stderr, rel=1e-5)


P = torch.tensor([1.5, 0.8, 0.3], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("predicted", "data", "options", "message"),
    [
        (lambda p: p[0] * p[1] * T + p[2], DATA, {}, r"change together along .*\[0\] .*\[1\]"),
        (lambda p: p[0] * T + p[1], DATA, {}, r"do not determine parameters\[2\]"),
        (lambda p: p[0] * T, DATA[:3], {}, "data must have the shape"),
        (lambda p: p[:2], DATA[:2], {}, "leave no degrees of freedom"),
        (lambda p: p[:2], DATA[:2], {"absolute_sigma": True}, "do not determine"),
        (lambda p: p.detach()[0] * T, DATA, {}, "do not depend on parameters"),
        (lambda p: p[0] * T, DATA / 0, {}, "NaN or infinite"),
        (lambda p: p[0] * T, DATA, {"sigma": SIGMA[:5]}, "sigma must broadcast"),
        (lambda p: p[0] * T, DATA, {"sigma": -SIGMA}, "sigma must be positive"),
        (lambda p: p[0] * T, DATA, {"level": 95.0}, "level must lie between"),
    ],
)
def test_errors(predicted, data, options, message):
    with pytest.raises(ValueError, match=message):
        confidence(predicted(P), data, P, **options)


def test_a_fit_that_has_not_converged_is_told():
    with pytest.warns(UserWarning, match=r"moves one by 0\.31 standard"):
        confidence(P[2] + 0 * P[0] + T * P[0] + T**2 * P[1], DATA, P)


def test_rounding_of_float32_is_known():
    p, x = P.detach().float().requires_grad_(), T.float()
    with pytest.raises(ValueError, match=r"change together along .*\[0\] .*\[2\]"):
        confidence(p[0] * torch.exp(-p[1] * x) * torch.exp(p[2]), DATA, p)
    # Data that single precision does not tell from the predictions.
    one = torch.tensor([1.0], dtype=torch.float32, requires_grad=True)
    found = confidence(one * torch.full_like(x, 1e4), 1e4 + 1e-3 * NOISE, one)
    assert found.chi_squared == pytest.approx(float((1e-3 * NOISE).square().sum()), rel=1e-6)


def test_a_fit_to_data_without_noise_does_not_warn(recwarn):
    for a in torch.linspace(1.5, 1.6, 5):
        p = torch.tensor([a, 0.8, 0.3], dtype=torch.float32, requires_grad=True)
        exact = decay(T.numpy(), *p.tolist())
        confidence(p[0] * torch.exp(-p[1] * T.float()) + p[2], exact, p)
    assert not recwarn
