"""Newton's method for the position of an implicit step, and the linear systems of its matrix.

With inverse masses c, s = sqrt(c) and a time a, the position x and a vector w solve::

    x = z + a^2 c F(x),         (1 - a^2 s J s) w = b,         J = dF/dx

In the second equation the mass is divided out from both sides, so its matrix is symmetric for a
force from an energy, and atoms of infinite mass (c = 0) keep x = z. Systems of a batch are solved
side by side, each to its own convergence.

The matrix of a small system is made from one product of as many copies of the system as it has
coordinates. A larger one is used by its products. Conjugate gradients that have not converged after
some of them are preconditioned by factors of the Hessian. It is sparse where atoms interact with
near atoms alone, and follows from some dozens of products
(:mod:`adjsim.potentials.statics.local_hessian`). Newton's next step uses the same factors.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.core.krylov import Product, solve_general
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.potentials.base import ForceField, force_vjp

NEWTON_STEPS = 50
# Halvings of a Newton step that makes the residual larger.
HALVINGS = 12
# Largest number of coordinates of a system, and of entries of its copies (16 megabytes of float64),
# for which the matrix is made.
DENSE, ENTRIES = 300, 2**21
# Products after which conjugate gradients get factors, which cost as much as 85 on a beam of 3,000
# tetrahedra.
PATIENCE = 50


class StepMatrix:
    """The matrix ``1 - a^2 s J s`` at one position x, ``(*batch, atoms, dim)``.

    The inverse mass is a scalar or ``(atoms, 1)``. The factors of ``near``, the matrix at a
    position nearby, are tried first.
    """

    def __init__(
        self,
        forces: ForceEvaluator,
        x: Tensor,
        t: Any,
        a: float,
        inverse_mass: Tensor,
        near: StepMatrix | None = None,
    ) -> None:
        self.forces, self.x, self.t, self.a = forces, x, t, a
        self.root = inverse_mass.sqrt()
        self.factors: Product | None = None if near is None else near.factors
        # The Jacobian of a force without an energy need not be symmetric.
        self.symmetric = not isinstance(forces.potential, ForceField)

    def solve(self, b: Tensor, share: float, transposed: bool = False) -> tuple[Tensor, Tensor]:
        """Solve the linear system, by products to a residual that is this share of b.

        Returns the solution, and a mask ``(*batch, 1, 1)`` of the systems whose symmetric matrix is
        not positive. There the solution is some direction in which the residual shrinks.
        """
        size = b.shape[-1] * b.shape[-2]
        if size <= DENSE and size * b.numel() <= ENTRIES:
            return self._factorised(b, transposed)
        if self.symmetric:
            return self._iterated(b, share)
        product = self._transposed if transposed else self._product

        def checked(w: Tensor) -> Tensor:
            found = product(w)
            # GMRES would not end.
            if not bool(torch.isfinite(found).all()):
                raise UnsolvedStepError(
                    f"the implicit step at t = {float(self.t):g} did not converge: the derivative "
                    "of the force is not finite. Use a smaller dt."
                )
            return found

        return solve_general(checked, b, share), torch.zeros_like(dot(b, b), dtype=torch.bool)

    def residual(self, w: Tensor, b: Tensor) -> float:
        """Compute the residual of a solution of the transposed system, relative to b."""
        left = (b - self._transposed(w)).norm()
        return float(left / b.norm().clamp(min=torch.finfo(b.dtype).tiny))

    def _factorised(self, b: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        rows = self._rows
        right = b.flatten(-2).unsqueeze(-1)
        if not self.symmetric:
            w = torch.linalg.solve(rows.mT if transposed else rows, right)
            return w.reshape(b.shape), torch.zeros_like(dot(b, b), dtype=torch.bool)
        matrix = 0.5 * (rows + rows.mT)
        factor, info = torch.linalg.cholesky_ex(matrix)
        refused = (info > 0)[..., None, None]
        w = torch.cholesky_solve(right, factor)
        if bool(refused.any()):
            values, vectors = torch.linalg.eigh(matrix)
            shrinking = vectors @ ((vectors.mT @ right) / values.abs().clamp(min=1e-8)[..., None])
            w = torch.where(refused, shrinking, w)
        return w.reshape(b.shape), refused

    @cached_property
    def _rows(self) -> Tensor:
        """The transposed matrix of each system, ``(*batch, n, n)``, made once for all b."""
        *batch, atoms, dim = self.x.shape
        size = atoms * dim
        units = torch.eye(size).to(self.x).reshape(size, *(1 for _ in batch), atoms, dim)
        copies = self.x.expand(size, *self.x.shape)
        _, pullback = force_vjp(self.forces.potential, copies, [], self.t)
        rows, _ = pullback((self.root * units).expand_as(copies))
        self.forces.count(2 * size)
        return (units - self.a**2 * self.root * rows).movedim(0, -3).reshape(*batch, size, size)

    def _iterated(self, b: Tensor, share: float) -> tuple[Tensor, Tensor]:
        x, refused, left = conjugate_gradients(
            self._transposed, b, share, self.factors, limit=PATIENCE
        )
        if not left:
            return x, refused
        own = step_factors(self.forces, self.x, self.a, self.root)
        self.factors = self.factors if own is None else own
        x, more, _ = conjugate_gradients(self._transposed, b, share, self.factors, start=x)
        return x, refused | more

    def _transposed(self, w: Tensor) -> Tensor:
        _, pullback = force_vjp(self.forces.potential, self.x, [], self.t)
        return self._applied(w, pullback(self.root * w)[0])

    def _product(self, w: Tensor) -> Tensor:
        # The derivative of u^T dF/dx in u.
        jvp: Any = torch.autograd.functional.jvp
        force = partial(self.forces.potential, self.t)
        return self._applied(w, jvp(force, self.x.detach(), self.root * w)[1])

    def _applied(self, w: Tensor, along: Tensor) -> Tensor:
        self.forces.count(2)
        return w - self.a**2 * self.root * along


def step_factors(forces: ForceEvaluator, x: Tensor, a: float, root: Tensor) -> Product | None:
    """Return an approximate inverse of the matrix, by factors of the sparse Hessian of each system.

    It is None if a system has no sparse Hessian or its matrix is not positive. Blocks of 3 x 3 on
    the diagonal would spare no step of conjugate gradients if the body is uniform.
    """
    from scipy import sparse

    from adjsim.potentials.statics.curvature import Hessian
    from adjsim.potentials.statics.local_hessian import local_hessian, positive_factor

    atoms, dim = x.shape[-2:]
    each = root.detach().double().cpu().reshape(-1).expand(atoms)
    free = each > 0
    scale: Any = sparse.diags(a * np.repeat(each[free].numpy(), dim))
    factors = list[Any]()
    for q in x.reshape(-1, atoms, dim):
        hessian = Hessian(forces.potential, q, free)
        matrix = local_hessian(hessian)
        forces.count(2 * hessian.taken)
        factor = None if matrix is None else positive_factor(scale @ matrix @ scale, 1.0)
        if factor is None:
            return None
        factors.append(factor)

    def inverse(r: Tensor) -> Tensor:
        found = r.detach().double().cpu().clone()
        for system, factor in zip(found.reshape(-1, atoms, dim), factors, strict=True):
            # The matrix is 1 on atoms of infinite mass.
            solved = torch.from_numpy(factor.solve(system[free].numpy().ravel()))
            system[free] = solved.reshape(-1, dim)
        return found.to(r)

    return inverse


class UnsolvedStepError(RuntimeError):
    """Raised if the equation of an implicit step, or of its derivative, cannot be solved."""


def solve_position(
    forces: ForceEvaluator,
    t: Any,
    a: float,
    inverse_mass: Tensor,
    z: Tensor,
    guess: Tensor,
    tol: float,
) -> Tensor:
    """Solve ``x = z + a^2 c F(x)`` for x, ``(*batch, atoms, dim)``, from a guess.

    ``tol`` is the largest error of x, relative to the largest coordinate of its system.
    """
    mobile = inverse_mass > 0
    over_root = torch.where(mobile, torch.where(mobile, inverse_mass, 1.0).rsqrt(), 0.0)
    root, epsilon = inverse_mass.sqrt(), torch.finfo(z.dtype).eps
    share, allowed = epsilon**0.5, max(tol, 4 * epsilon)
    x = torch.where(mobile, guess, z)

    def residual(at: Tensor) -> Tensor:
        return over_root * (z - at) + a**2 * root * forces.values((at,), t)[0]

    left, scale = residual(x), largest(x)
    done, before = torch.zeros_like(scale, dtype=torch.bool), torch.zeros_like(scale)
    indefinite = done
    length, matrix = scale, None
    for _ in range(NEWTON_STEPS):
        matrix = StepMatrix(forces, x, t, a, inverse_mass, matrix)
        w, refused = matrix.solve(torch.where(done, 0.0, left), share)
        indefinite = torch.where(done, indefinite, refused)
        step = root * w
        x, left, length, whole = _advance(x, step, left, residual)
        scale = torch.maximum(scale, largest(x))
        # The next correction is smaller than this one by the rate of the last two, or by the error
        # of the linear solution.
        rate = torch.where(length < before, length / before, 1.0).clamp(min=share)
        done, before = done | (whole & (rate * length <= allowed * scale)), length
        if bool(done.all()):
            if bool(indefinite.any()):
                raise UnsolvedStepError(
                    f"the implicit step at t = {float(t):g} has no unique solution: the energy has "
                    "a negative curvature that is too large for the time of the step. Use a "
                    "smaller dt."
                )
            return x
    worst = float((length / scale).max())
    raise UnsolvedStepError(
        f"the implicit step at t = {float(t):g} did not converge: after {NEWTON_STEPS} Newton "
        f"steps positions still change by {worst:.1e} of their size ({allowed:.1e} is allowed). "
        "Use a smaller dt, or start from a configuration with smaller forces."
    )


def _advance(
    x: Tensor, step: Tensor, left: Tensor, residual: Product
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take a step, halved where the residual grows; return x, residual, length, and if whole."""
    share = torch.ones_like(largest(x))
    # Below this length the residual is rounding.
    short = largest(step) <= torch.finfo(x.dtype).eps ** 0.5 * largest(x)
    size = dot(left, left)
    trial = x + step
    found = residual(trial)
    for _ in range(HALVINGS):
        worse = ~short & ~(dot(found, found) <= size)
        if not bool(worse.any()):
            break
        share = torch.where(worse, 0.5 * share, share)
        trial = x + share * step
        found = residual(trial)
    return trial, found, largest(step), share == 1


def conjugate_gradients(
    product: Product,
    b: Tensor,
    share: float,
    precondition: Product | None = None,
    *,
    start: Tensor | None = None,
    limit: int | None = None,
) -> tuple[Tensor, Tensor, bool]:
    """Solve a symmetric positive system for each system of a batch, ``(*batch, atoms, dim)``.

    It stops where a direction has no positive curvature, at a residual of this share of b, or after
    ``limit`` products (None: 20 for each coordinate, and 100). ``precondition`` is a symmetric
    positive approximate inverse. Returns the solution, which systems have a matrix that is not
    positive, and whether one has not converged.
    """
    nearly: Product = (lambda r: r) if precondition is None else precondition
    x = torch.zeros_like(b) if start is None else start
    r = b if start is None else b - product(start)
    z = nearly(r)
    d, size, along_z = z, dot(r, r), dot(r, z)
    target, refused = share**2 * dot(b, b), torch.zeros_like(size, dtype=torch.bool)
    for _ in range(limit or 100 + 20 * b.shape[-1] * b.shape[-2]):
        active = (size > target) & ~refused
        if not bool(active.any()):
            break
        along = product(d)
        curvature = dot(d, along)
        refused = refused | (active & ~(curvature > 0))
        active = active & ~refused
        alpha = torch.where(active, along_z / torch.where(active, curvature, 1.0), 0.0)
        x, r = x + alpha * d, r - alpha * along
        z = nearly(r)
        found = dot(r, z)
        d = torch.where(active, z + found / torch.where(active, along_z, 1.0) * d, 0.0)
        size, along_z = dot(r, r), torch.where(active, found, along_z)
    # Without any step, b itself is the direction of steepest descent.
    x = torch.where(refused & (dot(x, x) == 0), b, x)
    return x, refused, bool(((size > target) & ~refused).any())


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum the products of each system's entries, ``(*batch, 1, 1)``."""
    return (a * b).sum((-1, -2), keepdim=True)


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute entry of each system, ``(*batch, 1, 1)``."""
    return x.abs().amax((-1, -2), keepdim=True)
