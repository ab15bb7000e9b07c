"""Statics: minima of the energy, differentiable in parameters and boundary values."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn

from adjsim.core.arguments import (
    as_indices,
    as_positive,
    as_tensor,
    as_whole,
    outside_inference_mode,
)
from adjsim.core.reading import Reading
from adjsim.core.rows import pulled_together
from adjsim.core.second_derivative import refuse_second_derivative
from adjsim.core.state import check_position, in_transform
from adjsim.core.transforms import has_tangent
from adjsim.core.typing import Positions, PositionsLike
from adjsim.potentials.base import force, with_energy
from adjsim.potentials.bonded.selection import check_range
from adjsim.potentials.statics.curvature import (
    DENSE,
    DenseInverse,
    Hessian,
    IterativeInverse,
    PseudoInverse,
)
from adjsim.potentials.statics.local_hessian import (
    LocalInverse,
    atom_pattern,
    local_hessian,
    positive_factor,
)

NEWTON_STEPS = 20
# Free coordinates above which factors of a sparse Hessian are tried first. Against diagonalisation,
# beams with 216 to 378 free coordinates take 0.09 to 0.18 of the time, and those with 135 to 189 as
# long; thicker beams with 252 and 288 as long.
LOCAL = 200
# Multiple of the unit matrix that is added to every Hessian, as a share of its norm, so that
# rounding does not drive a free body along flat directions; and the smallest one that is added to a
# Hessian that is not positive.
GAUGE, SHIFT = 1e-10, 1e-6
# Share of the expected decrease of the energy that a step must reach.
SUFFICIENT = 1e-4
# Share of the sum of all forces from which a net force is more than rounding.
NET_SHARE = 1e-8
# Rounding errors of a coordinate that the residual force may come from.
ROUNDED = 64


@outside_inference_mode()
def minimize(
    potential: nn.Module,
    position: PositionsLike,
    *,
    fixed: Any = None,
    tol: float = 1e-10,
    max_iterations: int = 10_000,
) -> Positions:
    """Find the energy minimum near a position, as a function of parameters and fixed positions::

        F_f(q*; theta) = 0        dq_f = H_ff^+ (dF_f/dtheta dtheta - H_fc dq_c)

    by the implicit function theorem, with f the free atoms, c the fixed ones and H = -dF/dq at q*,
    the Hessian of the energy. The path of the minimiser is neither stored nor differentiated. The
    backward pass solves one linear system with H_ff for each system of a batch, and its gradient
    has no graph.

    A Hessian of more than 200 free coordinates is factorised if each atom interacts with near atoms
    alone, as in an elastic body or a network of springs. Others are diagonalised, up to 600
    coordinates, or used by their products (MINRES). With factors the minimiser follows Newton steps
    (Levenberg-Marquardt); elsewhere it is L-BFGS, with Newton steps at its end.

    ``H^+`` is the pseudo-inverse. The minima of a free cluster form a family, so the theorem leaves
    the part of dq* along flat directions open. The least-norm solution has none. It is the
    derivative of a minimiser that follows forces, which neither translates nor rotates the cluster.
    If a parameter pushes along a flat direction (``dF/dtheta`` has a component there), there is no
    minimum at another value of the parameter, which is an error.

    Do not use it for a mean at a temperature (see ScoreFunction), or where the minimum changes its
    basin with the parameter: the derivative is that of one basin.

    Args:
        potential: energy module.
        position: where to start, ``(*batch, atoms, dim)`` as the result. The fixed atoms stay
            there, and gradients reach their positions. The minimum does not depend on the start of
            the others.
        fixed: the atoms that are held: a mask ``(atoms,)`` or numbers of atoms; None: no atom.
        tol: the largest residual force component, relative to the largest curvature times a length:
            the extent of the atoms, or the largest displacement. A force that is left since the
            coordinates are rounded is always allowed.
        max_iterations: the largest number of iterations of the minimiser.

    Raises:
        TypeError: a force without an energy.
        ValueError: a fixed atom that does not exist, or no free atom.
        RuntimeError: the minimiser did not converge; it converged to a saddle (a direction has
            negative curvature); the minimum is ill-conditioned (a nonzero curvature, as a share of
            the largest, is below the square root of machine epsilon, which leaves fewer than half
            of the derivative's digits); a parameter or a fixed atom pushes along a flat direction;
            a load moves all atoms together, and nothing holds them.
    """
    potential = with_energy(potential)
    tol, max_iterations = as_positive("tol", tol), as_whole("max_iterations", max_iterations, 1)
    start = as_tensor("position", position)
    check_position(start)
    if not bool(torch.isfinite(start.detach()).all()):
        raise ValueError("position has NaN or infinite entries.")
    reading = Reading(potential)
    if in_transform() or reading.has_tangents or has_tangent(start):
        raise NotImplementedError(
            "minimize has a gradient by torch.autograd alone: not inside of torch.func, and not "
            "forward in time (jvp, jacfwd, dual tensors)."
        )
    leaves = reading.leaves()
    free = _free(fixed, start.shape[-2])
    search = _Search(reading.bound(leaves), free, tol, max_iterations)
    if bool(free.all()):
        start = start.detach()
    parameters = reading.trainable(leaves)
    found = _Minimum.apply(search, parameters, start, *reading.trainable(reading.tensors).values())
    if reading.wanted and reading.kept(search.potential):
        reading.refuse_kept(leaves, lambda copy: copy(start.detach()))
    return found


def _free(fixed: Any, atoms: int) -> Tensor:
    """Return the mask of the atoms that are not fixed."""
    free = torch.ones(atoms, dtype=torch.bool)
    if fixed is None:
        return free
    given = fixed if isinstance(fixed, Tensor) else np.asarray(fixed)
    if given.dtype in (torch.bool, np.bool_):
        mask = torch.as_tensor(given).cpu()
        if mask.shape != (atoms,):
            raise ValueError(
                f"fixed is a mask of shape {tuple(mask.shape)}; it must be ({atoms},), one entry "
                "for each atom."
            )
        free = ~mask
    elif len(given):
        index = as_indices("fixed", given).cpu().reshape(-1)
        check_range("fixed", index, atoms)
        free[index] = False
    if not bool(free.any()):
        raise ValueError("all atoms are fixed, so there is nothing to minimise: leave one free.")
    return free


class _Search:
    """The search for a minimum of a potential in the free atoms of a system."""

    def __init__(self, potential: nn.Module, free: Tensor, tol: float, max_iterations: int) -> None:
        self.potential, self.free = potential, free
        self.tol, self.max_iterations = tol, max_iterations

    def find(self, start: Tensor) -> Tensor:
        """Find the minimum near one system's position."""
        q = self._descend_by_factors(start)
        q = self._descend(start) if q is None else q
        # The steps above stop at the rounding of the energy; a few Newton steps reach the rounding
        # of the force.
        left, allowed, inverse = math.inf, 0.0, self.pseudo_inverse(q)
        self._refuse_unheld(start, inverse)
        for _ in range(NEWTON_STEPS):
            left, allowed = inverse.residual_force, self._allowed(start, inverse)
            step = inverse.estimate(inverse.hessian.force())
            nearer = self.pseudo_inverse(inverse.q + inverse.hessian.embed(step), inverse)
            if left <= allowed and nearer.residual_force >= 0.5 * left:
                inverse.check()
                return inverse.q
            inverse = nearer
        raise RuntimeError(
            f"the minimiser stopped where a force of {left:.2g} is left ({allowed:.2g} is "
            "allowed): start nearer to a minimum, or raise max_iterations or tol."
        )

    def _allowed(self, start: Tensor, inverse: PseudoInverse) -> float:
        """Return the largest residual force component of a minimum."""
        q = inverse.q
        size = max(_extent(start), _extent(q), float((q - start).abs().max()))
        # Coordinates far from the origin are coarse, and so are the forces at them.
        coarse = ROUNDED * inverse.epsilon * float(q.abs().max())
        return inverse.largest_curvature * max(self.tol * size, coarse)

    def _refuse_unheld(self, start: Tensor, inverse: PseudoInverse) -> None:
        """Refuse a body that a force has moved far away, since no curvature holds it."""
        moved, extent = (inverse.q - start).mean(0), (start - start.mean(0)).abs().max()
        if not bool(self.free.all()) or not bool(moved.norm() > extent):
            return
        forces = Hessian(self.potential, start).force().reshape(start.shape)
        net = forces.sum(0)
        if not np.linalg.norm(net) > NET_SHARE * np.abs(forces).sum():
            return
        along = np.tile(net / np.linalg.norm(net), (len(start), 1)).ravel()
        for q in (start, inverse.q):
            if np.linalg.norm(Hessian(self.potential, q).matvec(along)) > inverse.rounding:
                return
        raise RuntimeError(
            f"there is no minimum: a force of {np.linalg.norm(net):.2g} moves all atoms together, "
            "and nothing holds them. Fix atoms (fixed=...), or add a support or a weak spring."
        )

    def pseudo_inverse(self, q: Tensor, near: PseudoInverse | None = None) -> PseudoInverse:
        """Make the pseudo-inverse of the Hessian, first with the zeros of that ``near`` q."""
        hessian = Hessian(self.potential, q, self.free)
        size, known = hessian.shape[0], near.matrix if isinstance(near, LocalInverse) else None
        if size > min(DENSE, LOCAL) and (near is None or known is not None):
            pattern = None if known is None else atom_pattern(known, q.shape[-1])
            matrix = local_hessian(hessian, pattern)
            if matrix is not None:
                return LocalInverse(hessian, matrix)
        return DenseInverse(hessian) if size <= DENSE else IterativeInverse(hessian)

    def _descend_by_factors(self, start: Tensor) -> Tensor | None:
        """Follow Newton steps to the rounding of the energy; None if the Hessian is not sparse."""
        hessian = Hessian(self.potential, start, self.free)
        small = hessian.shape[0] <= min(DENSE, LOCAL)
        matrix = None if small else local_hessian(hessian)
        energy, shift = self._energy(start), 0.0
        epsilon = float(torch.finfo(start.dtype).eps)
        for _ in range(self.max_iterations):
            if matrix is None:
                return None
            force, scale = hessian.force(), float(abs(matrix).sum(0).max())
            factor = positive_factor(matrix, max(shift, GAUGE) * scale)
            if factor is not None:
                step = factor.solve(force)
                expected = float(force @ step)
                # The rounding of coordinates changes the energy by this, also where it is zero.
                coarse = scale * float((epsilon * hessian.q).square().sum())
                if expected <= max(1e3 * epsilon * abs(energy), coarse):
                    break
                q = hessian.q + hessian.embed(step)
                lower = self._energy(q)
                if lower <= energy - SUFFICIENT * expected:
                    hessian, energy = Hessian(self.potential, q, self.free), lower
                    matrix = local_hessian(hessian, atom_pattern(matrix, q.shape[-1]))
                    shift = 0.1 * shift if shift > SHIFT else 0.0
                    continue
            # The Hessian is not positive, or the step does not lower the energy as it should.
            shift = max(10 * shift, SHIFT)
        return hessian.q

    @torch.no_grad()
    def force(self, q: Tensor) -> Tensor:
        """Compute the force at a position."""
        return force(self.potential, q)

    def _energy(self, q: Tensor) -> float:
        with torch.no_grad():
            return float(self.potential(q))

    def _descend(self, start: Tensor) -> Tensor:
        """Follow quasi-Newton steps down to the rounding of the energy."""
        frame = Hessian(self.potential, start, self.free)
        length, first = _step_length(frame), self._energy(start)
        # Differences of energies, in units of the work of the first step.
        work = length * float(np.linalg.norm(frame.force()))
        if not 0 < work < math.inf:
            return start

        def place(x: np.ndarray) -> Tensor:
            return start + frame.embed(length * x)

        def energy(x: np.ndarray) -> tuple[float, np.ndarray]:
            q = place(x)
            slope = -frame.restrict(self.force(q))
            return (self._energy(q) - first) / work, slope * (length / work)

        options = {"maxiter": self.max_iterations, "ftol": 0.0, "gtol": 0.0, "maxcor": 30}
        x = np.zeros(frame.shape[0])
        found = scipy.optimize.minimize(energy, x, jac=True, method="L-BFGS-B", options=options)
        return place(found.x)


def _step_length(hessian: Hessian) -> float:
    """Estimate the length of a step along the force, at most the extent of the body."""
    f = hessian.force()
    size = float(np.linalg.norm(f))
    if not 0 < size < math.inf:
        return 0.0
    curvature = abs(float(f @ hessian.matvec(f / size))) / size
    longest = _extent(hessian.q) or float(hessian.q.abs().max()) or 1.0
    return min(size / curvature, longest) if curvature > 0 else longest


def _extent(q: Tensor) -> float:
    """Return the largest distance of a coordinate from the mean of the atoms."""
    return float((q - q.mean(0)).abs().max())


class _Minimum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, search: _Search, parameters: dict[str, Tensor], start: Tensor, *inputs: Tensor
    ) -> Tensor:
        flat = start.detach().reshape(-1, *start.shape[-2:])
        found = torch.stack([search.find(q) for q in flat]).reshape(start.shape)
        ctx.search, ctx.parameters = search, parameters
        ctx.save_for_backward(found, search.force(found))
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the gradient of a minimum comes from a linear system")
        found, residual = ctx.saved_tensors
        search, parameters = ctx.search, ctx.parameters

        @cache
        def inverses() -> list[Any]:
            if not torch.equal(search.force(found), residual):
                raise RuntimeError(
                    f"a value that {type(search.potential).__name__} reads (a list, an array, a "
                    "global) has changed since the minimum was found, so the force there is "
                    "another. Call backward before the change."
                )
            made = [search.pseudo_inverse(q) for q in found.reshape(-1, *found.shape[-2:])]
            for inverse in made:
                inverse.check()
                inverse.refuse_pushes(parameters)
            return made

        def pull(cotangent: Tensor) -> list[Tensor]:
            total = [torch.zeros_like(p) for p in parameters.values()]
            positions: list[Tensor] = []
            each = cotangent.reshape(-1, *found.shape[-2:])
            for inverse, v in zip(inverses(), each, strict=True):
                hessian = inverse.hessian
                x = inverse.solve(hessian.restrict(v))
                along, grads = hessian.response(x, list(parameters.values()))
                positions.append(hessian.held(v + along))
                total = [old + g for old, g in zip(total, grads, strict=True)]
            return [torch.stack(positions).reshape(found.shape), *total]

        return (None, None, *pulled_together(pull, cotangents, one_by_one=True))
