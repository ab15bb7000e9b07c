"""The derivative of an energy minimum with respect to the parameters of the energy."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, eigsh, minres
from torch import Tensor, nn

from adjsim._inputs import outside_inference_mode
from adjsim._params import trainable
from adjsim._typing import Positions
from adjsim.adjoints.base import refuse_graph
from adjsim.potentials.base import DeferredVJP, force, force_vjp

# Curvature below this share of the largest counts as none: translations, rotations.
FLAT = 1e-8
NEWTON_STEPS = 20


class ImplicitDifferentiation:
    """A minimum of the energy, as a differentiable function of the parameters, by the implicit function theorem::

        F(q*(theta); theta) = 0        dq*/dtheta = H^{-1} dF/dtheta,     H = -dF/dq at q*

    The path of the minimiser is neither stored nor differentiated. The way back solves one linear system with H for each
    system of a batch, by products with H alone (MINRES), in any dimension. Displacements that cost no energy (translation and
    rotation of a free cluster) are left out of dq*: the gradient is that of the solution of least length.

    Args:
        tol: the largest force component left, relative to the largest curvature times the size of the start.
        max_iterations: of the minimiser.

    Raises:
        RuntimeError: the minimiser did not get there, or arrived at a saddle (a direction of negative curvature is left).
    """

    def __init__(self, tol: float = 1e-10, max_iterations: int = 10_000) -> None:
        if not tol > 0 or max_iterations < 1:
            raise ValueError(f"tol and max_iterations must be positive; got {tol} and {max_iterations}.")
        self.tol, self.max_iterations = tol, max_iterations

    @outside_inference_mode()
    def __call__(self, potential: nn.Module, position: Positions) -> Positions:
        """The minimum near a position ``(*batch, atoms, dim)``, connected to autograd through the potential's parameters."""
        parameters = list(trainable(potential).values())
        return _Minimum.apply(self, potential, position.detach(), *parameters)

    def find(self, potential: nn.Module, start: Tensor) -> Tensor:
        """The minimum near one system's position."""
        shape = start.shape

        def energy(x: np.ndarray) -> tuple[float, np.ndarray]:
            q = torch.from_numpy(x).to(start).reshape(shape)
            with torch.no_grad():
                return float(potential(q)), -force(potential, q).double().cpu().numpy().ravel()

        x = start.double().cpu().numpy().ravel()
        options = {"maxiter": self.max_iterations, "ftol": 0.0, "gtol": 0.0, "maxcor": 30}
        found = minimize(energy, x, jac=True, method="L-BFGS-B", options=options)
        q = torch.from_numpy(found.x).to(start).reshape(shape)
        # The quasi-Newton steps stop at the rounding of the energy; a few of Newton's reach that of the force.
        left, allowed, scale = math.inf, 0.0, max(1e-300, float(start.abs().max()))
        for _ in range(NEWTON_STEPS):
            push, hessian = force(potential, q).detach(), _Hessian(potential, q)
            stiff = max(1e-300, abs(_extreme(hessian, "LA")))
            left, allowed = float(push.abs().max()), self.tol * stiff * scale
            if left <= allowed:
                self._check_curvature(hessian, stiff)
                return q
            q = q + torch.from_numpy(_solve(hessian, push.double().cpu().numpy().ravel())).to(q).reshape(shape)
        raise RuntimeError(
            f"the minimiser stopped where a force of {left:.2g} is left ({allowed:.2g} is allowed): start nearer to a minimum, "
            "or raise max_iterations or tol."
        )

    @staticmethod
    def _check_curvature(hessian: _Hessian, stiff: float) -> None:
        lowest = _extreme(hessian, "SA")
        if lowest < -FLAT * stiff:
            raise RuntimeError(
                f"this is a saddle and no minimum: a direction of curvature {lowest:.3g} is left (the largest is {stiff:.3g}). "
                "Start elsewhere."
            )

    def __repr__(self) -> str:
        return f"ImplicitDifferentiation(tol={self.tol:g})"


class _Minimum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, method: ImplicitDifferentiation, potential: nn.Module, start: Tensor, *parameters: Tensor) -> Tensor:
        flat = start.reshape(-1, *start.shape[-2:])
        found = torch.stack([method.find(potential, q) for q in flat]).reshape(start.shape)
        ctx.potential = potential
        ctx.save_for_backward(found, *parameters)
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph()
        found, *parameters = ctx.saved_tensors
        systems, total = found.reshape(-1, *found.shape[-2:]), [torch.zeros_like(p) for p in parameters]
        for q, v in zip(systems, cotangents[0].reshape(systems.shape), strict=True):
            x = _solve(_Hessian(ctx.potential, q), v.double().cpu().numpy().ravel())
            _, pullback = force_vjp(ctx.potential, q, parameters)
            _, grads = pullback(torch.from_numpy(x).to(q).reshape(q.shape))
            listed = grads.gradient(parameters) if isinstance(grads, DeferredVJP) else grads
            total = [old if g is None else old + g.detach() for old, g in zip(total, listed, strict=True)]
        return (None, None, None, *total)


class _Hessian(LinearOperator):
    """The Hessian of the energy, by its products."""

    def __init__(self, potential: nn.Module, q: Tensor) -> None:
        super().__init__(np.dtype(np.float64), (q.numel(), q.numel()))
        self.potential, self.q = potential, q.detach()

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        _, pullback = force_vjp(self.potential, self.q, [])
        along, _ = pullback(torch.from_numpy(np.ascontiguousarray(x.ravel())).to(self.q).reshape(self.q.shape))
        return -along.detach().double().cpu().numpy().ravel()


def _solve(hessian: _Hessian, b: np.ndarray) -> np.ndarray:
    """The solution of least length of H x = b, b's part along flat directions left out."""
    if not np.any(b):
        return np.zeros_like(b)
    x, _ = minres(hessian, b, rtol=1e-14, maxiter=20 * len(b) + 100)
    return np.asarray(x)


def _extreme(hessian: _Hessian, which: Literal["LA", "SA"]) -> float:
    n = hessian.shape[0]
    if n < 4:
        values = np.linalg.eigvalsh(np.stack([hessian.matvec(unit) for unit in np.eye(n)]))
        return float(values[-1] if which == "LA" else values[0])
    start = np.random.default_rng(0).standard_normal(n)
    return float(eigsh(hessian, k=1, which=which, v0=start, return_eigenvectors=False)[0])
