"""A step of Gauss and Newton from noisy averages (:mod:`adjsim.estimators.fit`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adjsim.core.arguments import as_tensor
from adjsim.core.durable.manifest import tensor_fingerprint
from adjsim.core.typing import Array

# With a smaller eigenvalue of the scaled M, changes of the parameters cancel in the curve.
DEGENERATE = 1e-6


class Target(NamedTuple):
    """The target, its weights, and whether the weights are those of its errors."""

    values: Tensor
    weight: Tensor
    known: bool

    @classmethod
    def of(cls, target: Array, stderr: Array | None) -> Target:
        y = as_tensor("target", target).detach().double().cpu()
        if y.ndim != 1 or len(y) == 0:
            raise ValueError(f"target must be (n,); got shape {tuple(y.shape)}.")
        if not bool(torch.isfinite(y).all()):
            raise ValueError("target has NaN or infinite entries.")
        if stderr is None:
            return cls(y, torch.ones_like(y), False)
        error = as_tensor("stderr", stderr).detach().double().cpu()
        if error.shape != y.shape or not bool(((error > 0) & torch.isfinite(error)).all()):
            raise ValueError(
                f"stderr must be {len(y)} positive numbers, one for each of the target; got shape "
                f"{tuple(error.shape)}, from {float(error.min()):g}."
            )
        return cls(y, 1 / error**2, True)

    def describe(self) -> dict[str, str]:
        return {
            "the target": tensor_fingerprint(self.values),
            "the weight of the target": tensor_fingerprint(self.weight),
        }


class Step(NamedTuple):
    """The step of the parameters, ``(p,)``, their covariance, and reasons to doubt the step.

    ``response`` is the change of the parameters with the target, ``(p, n)``.
    """

    change: Tensor
    covariance: Tensor
    response: Tensor
    doubts: list[str]

    @property
    def errors(self) -> Tensor:
        return self.covariance.diagonal().sqrt()


def gauss_newton(g: Tensor, J: Tensor, share: Tensor, target: Target) -> Step:
    """Compute the step and the covariance of the parameters from the chunks."""
    mean, slope = torch.einsum("k,kn->n", share, g), torch.einsum("k,knp->np", share, J)
    residual, count, weight = target.values - mean, len(share), target.weight
    # Deviations of the chunks, scaled so that sums of their products are covariances of the means.
    scale = (count / (count - 1)) ** 0.5 * share
    dg, dJ = scale[:, None] * (g - mean), scale[:, None, None] * (J - slope)
    weighted = weight[:, None] * slope
    biased = slope.T @ weighted
    M = biased - torch.einsum("knp,n,knq->pq", dJ, weight, dJ)
    inverse, warnings = _inverse(M), list[str]()
    if inverse is None:
        inverse = _inverse(biased)
        warnings.append(
            "the derivatives of the curve are mostly noise; give longer runs or more replicas"
        )
    if inverse is None:
        raise ValueError(
            "the target does not determine the parameters: some change of them leaves the curve "
            "as it is. Fit fewer parameters, or give more target."
        )
    gradient = slope.T @ (weight * residual)
    step = inverse @ (gradient + torch.einsum("knp,n,kn->p", dJ, weight, dg))
    z = (torch.einsum("knp,n->kp", dJ, weight * residual) - dg @ weighted) @ inverse
    scatter = 1.0
    if not target.known:
        excess = float((residual**2).sum() - (dg**2).sum())
        scatter = max(0.0, excess) / max(1, len(residual) - len(step))
    return Step(step, z.T @ z + scatter * inverse, inverse @ (slope.T * weight), warnings)


def chance_of_drift(drift: Tensor, response: Tensor) -> float:
    """Compute the probability, at equilibrium, of as large a difference of the two halves of runs.

    With m and C, the mean and the covariance over chunks of z = response drift, Hotelling's
    T^2 = K m^T C^-1 m is distributed as p (K - 1) / (K - p) times F of p and K - p degrees of
    freedom. With no more chunks than parameters nothing is known, and the result is 1.
    """
    z = drift @ response.T
    count, p = z.shape
    if count <= p:
        return 1.0
    spread = z.std(0)
    # In units of their spread, since parameters have different units.
    z = z / torch.where(spread > 0, spread, 1.0)
    mean, centred = z.mean(0), z - z.mean(0)
    inverse = torch.linalg.pinv(centred.T @ centred / (count - 1), hermitian=True)
    from scipy.stats import f as fdist

    T2 = count * float(mean @ inverse @ mean)
    return float(fdist.sf(T2 * (count - p) / (p * (count - 1)), p, count - p))


def _inverse(M: Tensor) -> Tensor | None:
    """Return the inverse of a matrix that is positive definite, and otherwise None."""
    if not bool((M.diagonal() > 0).all()):
        return None
    # Scaled to ones on the diagonal, since parameters have different units.
    scale = M.diagonal().sqrt()
    units = scale * scale[:, None]
    eigenvalues, vectors = torch.linalg.eigh(M / units)
    if float(eigenvalues[0]) < DEGENERATE:
        return None
    return (vectors / eigenvalues) @ vectors.T / units
