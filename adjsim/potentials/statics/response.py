"""The response of a minimum: products of a direction with the derivatives of its force."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adjsim.potentials.base import force_vjp
from adjsim.potentials.statics.curvature import Hessian, PseudoInverse

# Share of dF/dtheta along a flat direction that counts as zero.
FLAT_SHARE = 1e-6


def products(
    hessian: Hessian, x: np.ndarray, parameters: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Compute ``x^T dF_f/dq`` and ``x^T dF_f/dtheta``, for x of the free atoms."""
    _, pullback = force_vjp(hessian.potential, hessian.q, parameters)
    along, grads = pullback(hessian.embed(x))
    listed = grads if isinstance(grads, list) else grads.gradient(parameters)
    return along, [
        torch.zeros_like(p) if g is None else g.detach()
        for p, g in zip(parameters, listed, strict=True)
    ]


def held(hessian: Hessian, x: Tensor) -> Tensor:
    """Return the entries ``(atoms, dim)`` of fixed atoms, and zero for the others."""
    return torch.where(hessian.free[:, None].to(x.device), 0.0, x)


def check_flat_directions(inverse: PseudoInverse, parameters: dict[str, Tensor]) -> None:
    """Refuse a parameter, or a fixed atom, that pushes along a flat direction.

    A push counts if it exceeds the sum of two bounds: a share of the push along a direction that is
    not flat, and the rounding of forces divided by the size of the parameter.
    """
    if not inverse.flat.shape[1]:
        return
    hessian = inverse.hessian
    other = inverse.project(np.random.default_rng(0).standard_normal(hessian.shape[0]))
    other /= max(1e-300, float(np.linalg.norm(other)))
    rounding, listed = inverse.rounding * float(inverse.q.abs().max()), list(parameters.values())
    names = [*(f"parameter {name!r}" for name in parameters), "a fixed atom"]
    sizes = [*(float(p.detach().norm()) or 1.0 for p in listed), float(inverse.q.norm()) or 1.0]

    def pushes(direction: np.ndarray) -> list[float]:
        along, grads = products(hessian, direction, listed)
        return [float(g.norm()) for g in (*grads, held(hessian, along))]

    usual = pushes(other)
    for direction in inverse.flat.T:
        for name, push, scale, size in zip(names, pushes(direction), usual, sizes, strict=True):
            if push > FLAT_SHARE * scale + rounding / size:
                raise RuntimeError(
                    f"{name} pushes along a direction in which the energy has no "
                    "curvature, so there is no minimum at another value of it, and "
                    "no derivative. Restrain that direction, for example by a weak spring on the "
                    "centre."
                )
