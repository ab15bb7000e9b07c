"""The derivative of an energy minimum with respect to the parameters of the energy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from adjsim._inputs import outside_inference_mode
from adjsim._params import trainable
from adjsim._typing import Positions
from adjsim.adjoints.base import refuse_graph
from adjsim.estimators.curvature import PseudoInverse, pseudo_inverse
from adjsim.potentials.base import force, force_vjp

NEWTON_STEPS = 20
# Share of dF/dtheta along a flat direction that counts as zero.
FLAT_SHARE = 1e-6


class ImplicitDifferentiation:
    """An energy minimum as a differentiable function of the parameters::

        F(q*(theta); theta) = 0        dq*/dtheta = H^+ dF/dtheta,     H = -dF/dq at q*

    by the implicit function theorem. The path of the minimiser is neither stored nor
    differentiated. The backward pass solves one linear system with H for each system of a batch. It
    diagonalises H up to 600 coordinates, and uses products with H (MINRES) beyond.

    ``H^+`` is the pseudo-inverse. A free cluster may be translated and rotated without a change of
    energy, so its minima form a family, and the theorem gives ``dq* = H^+ dF/dtheta dtheta + n``
    with any n along the flat directions. The least-norm solution has n = 0. It is the derivative of
    a minimiser that follows forces: where the energy is flat for every theta, forces have no
    component along flat directions, so the cluster is neither translated nor rotated. A loss that
    depends on the position or orientation of the cluster gets the derivative of this minimiser. If
    a parameter pushes along a flat direction (``dF/dtheta`` has a component there), there is no
    minimum at another value of the parameter, which is an error.

    Args:
        tol: the largest residual force component, relative to the largest curvature times the size
            of start and minimum.
        max_iterations: of the minimiser.

    Raises:
        RuntimeError: the minimiser did not converge; it converged to a saddle (a direction has
            negative curvature); the minimum is ill-conditioned (a nonzero curvature, as a share of
            the largest, is below the square root of machine epsilon, 1.5e-8 in float64), so that
            fewer than half of the derivative's digits are left; a parameter pushes along a flat
            direction.
    """

    def __init__(self, tol: float = 1e-10, max_iterations: int = 10_000) -> None:
        if not tol > 0 or max_iterations < 1:
            raise ValueError(
                f"tol and max_iterations must be positive; got {tol} and {max_iterations}."
            )
        self.tol, self.max_iterations = tol, max_iterations

    @outside_inference_mode()
    def __call__(self, potential: nn.Module, position: Positions) -> Positions:
        """Find the minimum near a position, differentiable in the parameters.

        The position is ``(*batch, atoms, dim)``.
        """
        parameters = list(trainable(potential).values())
        return _Minimum.apply(self, potential, position.detach(), *parameters)

    def find(self, potential: nn.Module, start: Tensor) -> Tensor:
        """Find the minimum near one system's position."""
        shape = start.shape

        def energy(x: np.ndarray) -> tuple[float, np.ndarray]:
            q = torch.from_numpy(x).to(start).reshape(shape)
            with torch.no_grad():
                return float(potential(q)), -force(potential, q).double().cpu().numpy().ravel()

        x = start.double().cpu().numpy().ravel()
        options = {"maxiter": self.max_iterations, "ftol": 0.0, "gtol": 0.0, "maxcor": 30}
        found = minimize(energy, x, jac=True, method="L-BFGS-B", options=options)
        q = torch.from_numpy(found.x).to(start).reshape(shape)
        # The quasi-Newton steps stop at the rounding of the energy; a few Newton steps reach the
        # rounding of the force.
        left, allowed, inverse = math.inf, 0.0, pseudo_inverse(potential, q)
        for _ in range(NEWTON_STEPS):
            scale = max(1e-300, float(start.abs().max()), float(q.abs().max()))
            left, allowed = inverse.residual_force, self.tol * inverse.largest_curvature * scale
            nearer = pseudo_inverse(potential, self._newton(potential, inverse))
            if left <= allowed and nearer.residual_force >= 0.5 * left:
                inverse.check()
                return inverse.q
            inverse = nearer
        raise RuntimeError(
            f"the minimiser stopped where a force of {left:.2g} is left ({allowed:.2g} is "
            "allowed): start nearer to a minimum, or raise max_iterations or tol."
        )

    @staticmethod
    def _newton(potential: nn.Module, inverse: PseudoInverse) -> Tensor:
        q = inverse.q
        step = inverse.estimate(force(potential, q).detach().double().cpu().numpy().ravel())
        return q + torch.from_numpy(step).to(q).reshape(q.shape)

    def __repr__(self) -> str:
        return f"ImplicitDifferentiation(tol={self.tol:g})"


class _Minimum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        method: ImplicitDifferentiation,
        potential: nn.Module,
        start: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        flat = start.reshape(-1, *start.shape[-2:])
        found = torch.stack([method.find(potential, q) for q in flat]).reshape(start.shape)
        ctx.potential, ctx.names = potential, list(trainable(potential))
        ctx.save_for_backward(found, *parameters)
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph()
        found, *parameters = ctx.saved_tensors
        systems, total = (
            found.reshape(-1, *found.shape[-2:]),
            [torch.zeros_like(p) for p in parameters],
        )
        for q, v in zip(systems, cotangents[0].reshape(systems.shape), strict=True):
            inverse = pseudo_inverse(ctx.potential, q)
            inverse.check()
            _check_flat_directions(
                ctx.potential, inverse, dict(zip(ctx.names, parameters, strict=True))
            )
            x = inverse.solve(v.double().cpu().numpy().ravel())
            total = [
                old + g
                for old, g in zip(
                    total, _parameter_gradient(ctx.potential, q, x, parameters), strict=True
                )
            ]
        return (None, None, None, *total)


def _parameter_gradient(
    potential: nn.Module, q: Tensor, x: np.ndarray, parameters: list[Tensor]
) -> list[Tensor]:
    """Compute ``x^T dF/dtheta``."""
    _, pullback = force_vjp(potential, q, parameters)
    _, grads = pullback(torch.from_numpy(x).to(q).reshape(q.shape))
    listed = grads if isinstance(grads, list) else grads.gradient(parameters)
    return [
        torch.zeros_like(p) if g is None else g.detach()
        for p, g in zip(parameters, listed, strict=True)
    ]


def _check_flat_directions(
    potential: nn.Module, inverse: PseudoInverse, parameters: dict[str, Tensor]
) -> None:
    """Refuse a parameter that pushes along a flat direction.

    A push counts if it exceeds the sum of two bounds: a share of the push along a direction that is
    not flat, and the rounding of forces divided by the size of the parameter.
    """
    if not inverse.flat.shape[1]:
        return
    other = inverse.project(np.random.default_rng(0).standard_normal(inverse.q.numel()))
    other /= max(1e-300, float(np.linalg.norm(other)))
    rounding, listed = inverse.rounding * float(inverse.q.abs().max()), list(parameters.values())
    usual = _parameter_gradient(potential, inverse.q, other, listed)
    for direction in inverse.flat.T:
        pushes = _parameter_gradient(potential, inverse.q, direction, listed)
        for (name, p), g, scale in zip(parameters.items(), pushes, usual, strict=True):
            size = float(p.detach().norm()) or 1.0
            if float(g.norm()) > FLAT_SHARE * float(scale.norm()) + rounding / size:
                raise RuntimeError(
                    f"parameter {name!r} pushes along a direction in which the energy has no "
                    "curvature, so there is no minimum at another value of the parameter, and "
                    "no derivative. Restrain that direction, for example by a weak spring on the "
                    "centre."
                )
