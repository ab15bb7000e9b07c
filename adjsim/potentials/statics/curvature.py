"""The Hessian of an energy at a minimum, for the atoms that are not fixed, and its pseudo-inverse.

Each direction is one of three kinds, by the ratio of its curvature to the largest curvature: *flat*
(zero to rounding), *stiff* (above the square root of machine epsilon), or *soft* (in between). A
linear system is solved in the stiff directions alone. A soft direction would cost the solution more
than half of its digits, so it is an error. Flat directions, such as the translations of a free
cluster, are found first and projected out: MINRES applied to a right-hand side with a component
along one diverges.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh, minres
from torch import Tensor, nn

from adjsim.potentials.base import force, force_vjp

# Largest number of coordinates for which the Hessian is formed and diagonalised.
DENSE = 600
# Rounding error of a curvature, in epsilons of the largest.
ROUNDING = 4096
# Largest allowed residual of a linear system, relative to its right-hand side.
RESIDUAL = 1e-8
# Largest number of flat directions, in addition to translations and rotations, that the search
# without a Hessian matrix finds.
SEARCHED = 32
# Share of dF/dtheta along a flat direction that counts as zero.
FLAT_SHARE = 1e-6
# Restarts of Lanczos iterations, of 64 products each.
RESTARTS = 300
# Coordinates of the copies of a system whose products are taken together: half a megabyte.
BATCH = 2**16
# The way out of an ill-conditioned minimum.
HOLD = "Hold the soft coordinate, or measure it in units in which it is stiffer."


class Hessian(LinearOperator):
    """The Hessian of the energy in the coordinates of the free atoms, as a linear operator.

    The position q is that of one system, ``(atoms, dim)``, ``free`` is a mask ``(atoms,)``, and
    ``taken`` counts the products so far.
    """

    def __init__(self, potential: nn.Module, q: Tensor, free: Tensor | None = None) -> None:
        self.potential, self.q = potential, q.detach()
        self.free = torch.ones(len(q), dtype=torch.bool) if free is None else free.cpu()
        size = int(self.free.sum()) * q.shape[-1]
        super().__init__(np.dtype(np.float64), (size, size))
        self.taken = 0

    def restrict(self, x: Tensor) -> np.ndarray:
        """Return the entries ``(..., atoms, dim)`` of the free atoms, ``(..., free x dim)``."""
        taken = x.detach().double().cpu()[..., self.free, :]
        return taken.reshape(*x.shape[:-2], -1).numpy()

    def embed(self, x: np.ndarray) -> Tensor:
        """Return a field that is zero on fixed atoms; the opposite of :meth:`restrict`."""
        field = torch.zeros(*x.shape[:-1], *self.q.shape, dtype=torch.float64)
        taken = torch.from_numpy(np.ascontiguousarray(x))
        field[..., self.free, :] = taken.reshape(*x.shape[:-1], -1, self.q.shape[-1])
        return field.to(self.q)

    def force(self) -> np.ndarray:
        """Compute the force on the free atoms."""
        return self.restrict(force(self.potential, self.q))

    def products(self, x: np.ndarray) -> np.ndarray:
        """Compute the product with each row of x, ``(count, free x dim)``."""
        chunk = max(1, BATCH // self.q.numel())
        parts = [x[start : start + chunk] for start in range(0, len(x), chunk)]
        return np.concatenate([self._product(part, part.shape[:1]) for part in parts])

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._product(x.ravel(), ())

    def _product(self, x: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
        _, pullback = force_vjp(self.potential, self.q.expand(*lead, *self.q.shape), [])
        self.taken += math.prod(lead)
        return -self.restrict(pullback(self.embed(x))[0])

    def response(self, x: np.ndarray, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Compute ``x^T dF_f/dq`` and ``x^T dF_f/dtheta``, for x of the free atoms."""
        _, pullback = force_vjp(self.potential, self.q, parameters)
        along, grads = pullback(self.embed(x))
        listed = grads if isinstance(grads, list) else grads.gradient(parameters)
        return along, [
            torch.zeros_like(p) if g is None else g.detach()
            for p, g in zip(parameters, listed, strict=True)
        ]

    def held(self, x: Tensor) -> Tensor:
        """Return the entries ``(atoms, dim)`` of fixed atoms, and zero for the others."""
        return torch.where(self.free[:, None].to(x.device), 0.0, x)


class PseudoInverse(ABC):
    """Curvatures at a position, and least-norm solutions of ``H x = b``.

    ``flat`` holds orthonormal flat directions, ``(free x dim, count)``.
    """

    def __init__(self, hessian: Hessian) -> None:
        self.hessian, self.q = hessian, hessian.q
        self.epsilon = float(torch.finfo(self.q.dtype).eps)
        self.residual_force = float(np.abs(hessian.force()).max())
        self.largest_curvature = max(1e-300, self._largest())
        # Where a residual force is left, a rotation has the curvature force/radius.
        q = hessian.restrict(self.q).reshape(-1, self.q.shape[-1])
        radius = math.sqrt(float(((q - q.mean(0)) ** 2).sum(-1).mean()))
        turning = 10 * self.residual_force / radius if radius > 0 else 0.0
        self.rounding = ROUNDING * self.epsilon * self.largest_curvature + turning
        self.soft_limit = max(math.sqrt(self.epsilon) * self.largest_curvature, self.rounding)
        self.flat = self._flat()

    @abstractmethod
    def _largest(self) -> float:
        """Compute the largest absolute curvature."""

    @abstractmethod
    def _flat(self) -> np.ndarray:
        """Find flat directions."""

    @abstractmethod
    def check(self) -> None:
        """Refuse a saddle and an ill-conditioned minimum; may add flat directions."""

    @abstractmethod
    def estimate(self, b: np.ndarray) -> np.ndarray:
        """Estimate the least-norm solution of ``H x = b``, without b along flat directions."""

    def solve(self, b: np.ndarray) -> np.ndarray:
        """Compute the least-norm solution, or raise if its residual is not small."""
        x, wanted = self.estimate(b), self.project(b)
        size = float(np.linalg.norm(wanted))
        residual = float(np.linalg.norm(self.project(self.hessian.matvec(x)) - wanted))
        # If b is along flat directions alone, its projection is rounding, and any x will do.
        rounding = ROUNDING * self.epsilon
        if not residual <= max(RESIDUAL, rounding) * size + rounding * float(np.linalg.norm(b)):
            raise RuntimeError(
                f"the linear system of the minimum was not solved: {residual / size:.1e} of its "
                f"right-hand side is left as residual. The minimum is ill-conditioned. {HOLD}"
            )
        return x

    def project(self, b: np.ndarray) -> np.ndarray:
        """Remove the part of b along flat directions, in two passes against rounding."""
        for _ in range(2):
            b = b - self.flat @ (self.flat.T @ b)
        return b

    def _check_lowest(self, lowest: float) -> None:
        """Refuse a negative or soft curvature, given the lowest that is not flat."""
        largest = self.largest_curvature
        if lowest < -self.rounding:
            raise RuntimeError(
                "this is a saddle, not a minimum: it has a direction of curvature "
                f"{lowest:.3g} (the largest curvature is {largest:.3g}). Start elsewhere."
            )
        if lowest < self.soft_limit:
            raise RuntimeError(
                f"the minimum is ill-conditioned: its curvatures are between {lowest:.2g} and "
                f"{largest:.2g}, a condition number of {largest / lowest:.1e}. Above "
                f"{largest / self.soft_limit:.1e} too few digits of the derivative are left. {HOLD}"
            )

    def refuse_pushes(self, parameters: dict[str, Tensor]) -> None:
        """Refuse a parameter, or a fixed atom, that pushes along a flat direction.

        A push counts if it exceeds the sum of two bounds: a share of the push along a direction
        that is not flat, and the rounding of forces divided by the size of the parameter.
        """
        if not self.flat.shape[1]:
            return
        hessian, listed = self.hessian, list(parameters.values())
        other = self.project(np.random.default_rng(0).standard_normal(hessian.shape[0]))
        other /= max(1e-300, float(np.linalg.norm(other)))
        rounding = self.rounding * float(self.q.abs().max())
        names = [*(f"parameter {name!r}" for name in parameters), "a fixed atom"]
        sizes = [float(x.detach().norm()) or 1.0 for x in (*listed, self.q)]

        def pushes(direction: np.ndarray) -> list[float]:
            along, grads = hessian.response(direction, listed)
            return [float(g.norm()) for g in (*grads, hessian.held(along))]

        usual = pushes(other)
        for direction in self.flat.T:
            for name, push, scale, size in zip(names, pushes(direction), usual, sizes, strict=True):
                if push > FLAT_SHARE * scale + rounding / size:
                    raise RuntimeError(
                        f"{name} pushes along a direction in which the energy has no curvature, so "
                        "there is no minimum at another value of it, and no derivative. Restrain "
                        "that direction, for example by a weak spring on the centre."
                    )


class DenseInverse(PseudoInverse):
    """The pseudo-inverse from all eigenvalues and eigenvectors."""

    def _largest(self) -> float:
        matrix = self.hessian.products(np.eye(self.hessian.shape[0]))
        if not np.isfinite(matrix).all():
            raise RuntimeError(
                f"a second derivative of the energy is NaN or infinite in {self.q.dtype}. Take "
                "positions in float64, or units in which lengths and energies are near one."
            )
        self.values, self.vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
        return float(np.abs(self.values).max())

    def _flat(self) -> np.ndarray:
        curved = np.abs(self.values) > self.rounding
        self.curvatures, self.directions = self.values[curved], self.vectors[:, curved]
        return self.vectors[:, ~curved]

    def check(self) -> None:
        if len(self.curvatures):
            self._check_lowest(float(self.curvatures[0]))

    def estimate(self, b: np.ndarray) -> np.ndarray:
        return self.directions @ ((self.directions.T @ b) / self.curvatures)


class IterativeInverse(PseudoInverse):
    """The pseudo-inverse from products alone, with a search for flat directions."""

    def _largest(self) -> float:
        # An estimate is enough: it is the scale of the other curvatures.
        value, _ = extreme(self.hessian, "LM", 1e-2)
        return abs(value)

    def _flat(self) -> np.ndarray:
        rigid = rigid_motions(self.hessian.restrict(self.q).reshape(-1, self.q.shape[-1]))
        curvature = self.hessian.products(np.ascontiguousarray(rigid.T)).T
        # A combination, such as a rotation about one axis, may be flat where its parts are not.
        _, sizes, mixtures = np.linalg.svd(curvature, full_matrices=False)
        return rigid @ mixtures[sizes <= self.rounding].T

    def check(self) -> None:
        for _ in range(SEARCHED + 1):
            direction = self.project(self._softest())
            direction /= np.linalg.norm(direction)
            # The error of Rayleigh's quotient is of second order in the vector's error.
            lowest = float(direction @ self.hessian.matvec(direction))
            if abs(lowest) > self.rounding:
                self._check_lowest(lowest)
                return
            self.flat = np.concatenate([self.flat, direction[:, None]], 1)
        raise RuntimeError(
            f"the minimum has more than {SEARCHED} directions without curvature in addition to "
            "translations and rotations. Restrain the atoms on which no force acts."
        )

    def estimate(self, b: np.ndarray) -> np.ndarray:
        b, size = self.project(b), float(np.linalg.norm(b))
        if float(np.linalg.norm(b)) <= self.epsilon * size:
            return np.zeros_like(b)
        x, _ = minres(self._deflated(), b, rtol=1e-14, maxiter=20 * len(b) + 100)
        return self.project(np.asarray(x))

    def _softest(self) -> np.ndarray:
        """Find the direction of the lowest curvature that is not known to be flat."""
        # The lowest curvature is the largest eigenvalue of a shifted operator. Lanczos converges
        # relative to the size of that eigenvalue.
        shifted = self._deflated(-1.0, 1.1 * self.largest_curvature)
        return extreme(shifted, "LA", 0.1 * math.sqrt(self.epsilon))[1]

    def _deflated(self, sign: float = 1.0, shift: float = 0.0) -> LinearOperator:
        """Return ``sign (H + largest P) + shift``, with P the projector on flat directions."""
        flat, largest = self.flat, self.largest_curvature

        def product(x: np.ndarray) -> np.ndarray:
            x = x.ravel()
            return sign * (self.hessian.matvec(x) + largest * (flat @ (flat.T @ x))) + shift * x

        return operator(self.hessian.shape, product)


def operator(shape: tuple[int, int], product: Callable[[np.ndarray], np.ndarray]) -> LinearOperator:
    """Make a linear operator of its product with a vector."""
    make: Any = LinearOperator
    return make(shape, product, dtype=np.float64)


def extreme(
    matrix: LinearOperator, which: Literal["LA", "SA", "LM"], tol: float
) -> tuple[float, np.ndarray]:
    """Find an extreme eigenvalue of a symmetric operator, and its vector."""
    n = matrix.shape[0]
    start = np.random.default_rng(0).standard_normal(n)
    options: dict[str, Any] = {"v0": start, "ncv": min(n, 64), "maxiter": RESTARTS, "tol": tol}
    try:
        values, vectors = eigsh(matrix, k=1, which=which, **options)
    except ArpackNoConvergence as failure:
        raise RuntimeError(
            "the softest curvature of the minimum could not be distinguished from the others, "
            f"since it is a small share of the largest: the minimum is ill-conditioned. {HOLD}"
        ) from failure
    return float(values[0]), vectors[:, 0]


def rigid_motions(q: np.ndarray) -> np.ndarray:
    """Compute orthonormal translations and rotations of atoms, ``(atoms x dim, count)``."""
    atoms, dim = q.shape
    motions = [np.tile(axis, (atoms, 1)) for axis in np.eye(dim)]
    x = q - q.mean(0)
    for i, j in combinations(range(dim), 2):
        turned = np.zeros_like(x)
        turned[:, i], turned[:, j] = -x[:, j], x[:, i]
        motions.append(turned)
    columns = np.stack(
        [motion.ravel() / max(1e-300, float(np.linalg.norm(motion))) for motion in motions], 1
    )
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return left[:, sizes > 1e-6]
