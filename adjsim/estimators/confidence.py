"""Confidence of the parameters of a least-squares fit."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from adjsim.core.arguments import as_flag, as_number, as_tensor, describe_type
from adjsim.core.rows import pulled_rows

# Rows of the Jacobian in one backward pass.
BLOCK = 256
# Gauss-Newton step, in standard errors, from which parameters are not those of a fit.
UNFITTED = 0.1


@dataclass(frozen=True)
class Confidence:
    """Standard errors and intervals of the parameters of a least-squares fit.

    Attributes:
        values, stderr, lower, upper: the parameters, their standard errors, and the ends of their
            intervals, in the shapes and the container in which the parameters were given.
        covariance: of all entries of the parameters, one after the other, ``(p, p)``.
        correlation: the same, divided by the standard errors.
        chi_squared: the sum of the squared residuals, each divided by its sigma.
        dof: the degrees of freedom, data minus parameters.
        level: the probability that an interval covers its parameter.
    """

    values: Any
    stderr: Any
    lower: Any
    upper: Any
    covariance: Tensor
    correlation: Tensor
    chi_squared: float
    dof: int
    level: float


def confidence(
    solution: Any,
    data: Any,
    parameters: Any,
    *,
    sigma: Any = None,
    absolute_sigma: bool = False,
    level: float = 0.95,
) -> Confidence:
    r"""Compute the covariance and the intervals of the parameters of a least-squares fit.

    With the residuals r = (f - data)/sigma at the fitted parameters and J = (df/dp)/sigma,

    .. math:: C = s^2 (J^T J)^{-1}, \qquad s^2 = r^T r / (m - p), \qquad
       p_i \pm q \sqrt{C_{ii}},

    for m numbers of data and p parameters, as SciPy's ``curve_fit``; q is the quantile of Student's
    distribution of m - p degrees of freedom. With ``absolute_sigma`` the errors of the data are
    known: s = 1, and q is the quantile of the normal distribution. The rows of J come from one
    backward pass through :func:`~adjsim.solve_ivp` and through operations of torch, and from one
    for each number elsewhere.

    The covariance is that of a model which is linear within the errors. Do not use it where the
    intervals are so wide that the model bends in them, where a parameter lies on a bound, or before
    the fit has converged, of which a warning tells.

    Args:
        solution: the predictions at the fitted parameters, with their graph: a tensor, or a result
            of ``solve_ivp``, whose ``y`` is taken.
        data: the measured numbers, in the shape of the predictions.
        parameters: what was fitted: a tensor, a list, tuple or dict of tensors, or a module.
        sigma: the standard deviations of the data, of a shape that broadcasts to theirs, or their
            covariance ``(m, m)``; None: all are equal.
        absolute_sigma: whether sigma is known, or only the ratios of its entries.
        level: the probability of the intervals.

    Raises:
        ValueError: data of another shape or not finite, too few of them, predictions without a
            graph to a parameter, or parameters that the data do not determine (the message names
            the direction).
    """
    from scipy.stats import norm, t

    absolute_sigma, level = as_flag("absolute_sigma", absolute_sigma), as_number("level", level)
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1; got {level:g}.")
    predicted = as_tensor("solution", getattr(solution, "y", solution))
    if isinstance(parameters, nn.Module):
        parameters = {k: x for k, x in parameters.named_parameters() if x.requires_grad}
    found, tree = tree_flatten_with_path(parameters)
    names, tensors = [f"parameters{keystr(path)}" for path, _ in found], [x for _, x in found]
    for name, x in zip(names, tensors, strict=True):
        if not isinstance(x, Tensor) or not x.requires_grad:
            raise ValueError(
                f"{name} must be a tensor that requires grad, as in the fit; got "
                f"{describe_type(x)}."
            )
    measured = as_tensor("data", data).detach().to(predicted.device, torch.float64)
    if measured.shape != predicted.shape:
        raise ValueError(
            f"data must have the shape {tuple(predicted.shape)} of the predictions; got "
            f"{tuple(measured.shape)}."
        )
    if not bool(torch.isfinite(measured).all()) or not bool(torch.isfinite(predicted).all()):
        raise ValueError(
            "data or predictions have NaN or infinite entries: leave them out of both."
        )
    count, sizes = measured.numel(), [x.numel() for x in tensors]
    dof = count - sum(sizes)
    if dof <= 0 and not absolute_sigma:
        raise ValueError(
            f"{count} numbers of data for {sum(sizes)} parameters leave no degrees of freedom for "
            "their error: give sigma with absolute_sigma=True."
        )
    units = torch.eye(count).to(predicted.detach()).reshape(count, *predicted.shape)
    blocks = [pulled_rows([predicted], tensors, [block]) for block in units.split(BLOCK)]
    rows = [torch.cat(parts) for parts in zip(*blocks, strict=True)]
    for name, x in zip(names, rows, strict=True):
        if not bool(x.any()):
            raise ValueError(
                f"the predictions do not depend on {name}, or have no graph to it: compute "
                "them with this tensor, and not under torch.no_grad()."
            )
    jacobian = torch.cat([x.double().reshape(count, -1) for x in rows], 1)
    residuals = (predicted.detach().double() - measured).reshape(count, 1)
    jacobian, residuals = _whitened(jacobian, residuals, sigma, measured)
    entries = [f"{n}[{k}]" for n, s in zip(names, sizes, strict=True) for k in range(s)]
    eps = torch.finfo(predicted.dtype).eps
    inverse = _inverse(jacobian, entries, eps)
    chi_squared = float(residuals.square().sum())
    covariance = inverse if absolute_sigma else inverse * (chi_squared / dof)
    errors = covariance.diagonal().sqrt()
    step = (inverse @ (jacobian.T @ residuals)).squeeze(1)
    values = torch.cat([x.detach().double().flatten() for x in tensors])
    # The errors of a fit to data without noise are rounding, and so are its steps.
    far = (step.abs() > UNFITTED * errors) & (step.abs() > 16 * eps * values.abs())
    if bool(far.any()):
        warnings.warn(
            "the parameters are not those of the least squares: a step towards these moves one by "
            f"{float((step.abs() / errors)[far].max()):.2g} standard errors. Fit on before the "
            "errors are taken.",
            stacklevel=2,
        )
    half = (1 + level) / 2
    quantile = float(norm.ppf(half) if absolute_sigma else t.ppf(half, dof))

    def in_tree(x: Tensor) -> Any:
        parts = zip(x.split(sizes), tensors, strict=True)
        return tree_unflatten([part.reshape(p.shape).to(p.detach()) for part, p in parts], tree)

    return Confidence(
        in_tree(values), in_tree(errors), in_tree(values - quantile * errors),
        in_tree(values + quantile * errors), covariance, covariance / errors / errors[:, None],
        chi_squared, dof, level,
    )  # fmt: skip


def _whitened(
    jacobian: Tensor, residuals: Tensor, sigma: Any, data: Tensor
) -> tuple[Tensor, Tensor]:
    """Divide the rows by the standard deviations of the data, or by a factor of the covariance."""
    if sigma is None:
        return jacobian, residuals
    errors, count = as_tensor("sigma", sigma).detach().to(data).double(), len(residuals)
    if errors.shape == (count, count) and data.shape != (count, count):
        factor, failed = torch.linalg.cholesky_ex(errors)
        if bool(failed) or not torch.allclose(errors, errors.mT, atol=0.0):
            raise ValueError("sigma, a covariance of the data, must be symmetric and positive.")
        both = torch.linalg.solve_triangular(
            factor, torch.cat([jacobian, residuals], 1), upper=False
        )
        return both[:, :-1], both[:, -1:]
    try:
        each = errors.expand(data.shape).reshape(count, 1)
    except RuntimeError as error:
        raise ValueError(
            f"sigma must broadcast to the shape {tuple(data.shape)} of the data, or be their "
            f"covariance ({count}, {count}); got {tuple(errors.shape)}."
        ) from error
    if not bool((each > 0).all()):
        raise ValueError("sigma must be positive.")
    return jacobian / each, residuals / each


def _inverse(jacobian: Tensor, entries: list[str], eps: float) -> Tensor:
    """Return ``(J^T J)^-1``, and refuse a direction without effect, to the precision of J."""
    lengths = jacobian.norm(dim=0)
    unused = [name for name, x in zip(entries, lengths.tolist(), strict=True) if x == 0]
    if unused:
        raise ValueError(f"the data do not determine {', '.join(unused[:8])}: fix it.")
    _, sizes, right = torch.linalg.svd(jacobian / lengths, full_matrices=False)
    least = 8 * len(entries) * eps * sizes[0]
    if len(jacobian) < len(entries) or bool(sizes[-1] <= least):
        weights = torch.linalg.svd(jacobian / lengths)[2][-1] / lengths
        weights = weights / weights[weights.abs().argmax()]
        pairs = zip(weights.tolist(), entries, strict=True)
        named = [f"{weight:+.3g} {name}" for weight, name in pairs if abs(weight) > 1e-3]
        raise ValueError(
            "the data do not determine the parameters: they may change together along "
            f"{' '.join(named[:8])}. Fix one of these, or add data."
        )
    scaled = right / sizes[:, None] / lengths
    return scaled.T @ scaled
