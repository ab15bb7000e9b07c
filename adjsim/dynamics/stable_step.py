"""The largest stable step of velocity Verlet."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_number, as_tensor
from adjsim.core.typing import Number, PositionsLike
from adjsim.dynamics.masses import check_per_atom, per_atom
from adjsim.dynamics.starts import as_start
from adjsim.potentials.base import force_vjp
from adjsim.potentials.contact.base import SurfaceContact

# Iterations between checks of convergence.
CHECK_EVERY = 8


def largest_stable_step(
    potential: nn.Module,
    mass: Number,
    position: PositionsLike,
    *,
    contact: SurfaceContact | None = None,
    energy: float | None = None,
    tolerance: float = 1e-9,
) -> float:
    """Compute the largest stable step of velocity Verlet, ``2 / omega_max``.

    ``omega_max^2`` is the largest eigenvalue of ``M^(-1/2) (K + c) M^(-1/2)``. K is the Hessian of
    the potential at the position, and c the largest curvature that the contact can reach, for each
    vertex in every direction. So the result is a lower bound for any vertices in contact, and exact
    for a linear body without contact. Semi-implicit Euler has the same bound, and so have all
    schemes that kick once a step. The eigenvalue is found by Lanczos iterations on products with K
    (Golub and Van Loan, Matrix computations, section 10.1), for all systems of a batch together.

    A body that becomes stiffer when it is deformed needs a smaller step than at the position: use a
    deformed position, or half of the result. Steps near the bound are stable but inaccurate.

    Args:
        potential: the energy without the contact, or a force field with a symmetric Jacobian, which
            is taken at time zero.
        mass: a number, ``(atoms,)`` or ``(atoms, 1)``; infinite for pinned atoms.
        position: ``(*batch, atoms, dim)``; the result is for the stiffest system.
        contact: contact whose force is added to that of the potential.
        energy: the largest energy that contact with one vertex can store, such as the total energy
            of the body. It bounds the curvature of a :class:`~adjsim.Barrier`, which
            otherwise is that at its floor. Other penalties do not need it.
        tolerance: the relative change of the eigenvalue in eight iterations that ends them.

    Returns:
        The step, in units of time; infinity if nothing is stiff.

    Raises:
        ValueError: a position, mass or energy of a wrong shape or sign; a Hessian that is not
            finite.
    """
    at = as_start(position)[0].detach()
    added: Tensor | None = None
    if contact is not None:
        if energy is not None and not as_number("energy", energy) > 0:
            raise ValueError(f"energy must be positive; got {energy}.")
        added = contact.largest_curvature(at.shape[-2], energy).to(at).unsqueeze(-1)
    root = _inverse_masses(mass, at).sqrt()

    def multiply(rows: Tensor) -> Tensor:
        v = root * rows.reshape(at.shape)
        _, pullback = force_vjp(potential, at, [])
        along = -pullback(v)[0].detach()
        if added is not None:
            along = along + added * v
        return (root * along).reshape(rows.shape)

    size = math.prod(at.shape[-2:])
    largest = _largest_eigenvalue(multiply, at.reshape(-1, size), tolerance)
    return 2 / math.sqrt(largest) if largest > 0 else math.inf


def _largest_eigenvalue(
    multiply: Callable[[Tensor], Tensor], like: Tensor, tolerance: float
) -> float:
    """Find the largest eigenvalue of symmetric matrices, one for each row, by Lanczos iterations.

    ``multiply`` maps ``(systems, size)`` to its products. Each vector is made orthogonal to all
    before it, so rounding makes no copies of an eigenvalue.
    """
    size = like.shape[-1]
    v = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = (v / v.norm()).to(like).expand_as(like)
    found, basis = -math.inf, v.unsqueeze(-2)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for step in range(1, size + 1):
        w = multiply(v)
        if not bool(torch.isfinite(w).all()):
            raise ValueError("the Hessian of the potential is not finite at this position.")
        diagonal.append((w * v).sum(-1))
        for _ in range(2):
            w = w - (basis.transpose(-1, -2) @ (basis @ w.unsqueeze(-1))).squeeze(-1)
        length = w.norm(dim=-1)
        if step % CHECK_EVERY == 0 or step == size or not bool(length.any()):
            known, found = found, float(_ritz_values(diagonal, beside).max())
            if abs(found - known) <= tolerance * abs(found) or not bool(length.any()):
                break
        beside.append(length)
        v = w / torch.where(length > 0, length, 1.0).unsqueeze(-1)
        basis = torch.cat([basis, v.unsqueeze(-2)], -2)
    return found


def _ritz_values(diagonal: list[Tensor], beside: list[Tensor]) -> Tensor:
    """Compute the eigenvalues of tridiagonal matrices."""
    matrix = torch.diag_embed(torch.stack(diagonal, -1).double())
    if beside:
        off = torch.stack(beside, -1).double()
        matrix = matrix + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    return torch.linalg.eigvalsh(matrix)


def _inverse_masses(mass: Number, position: Tensor) -> Tensor:
    """Compute inverse masses, a scalar or ``(atoms, 1)``, zero for pinned atoms."""
    value = as_tensor("mass", mass).detach()
    check_per_atom("mass", value)
    atoms = position.shape[-2]
    if value.numel() not in (1, atoms) or not bool((value > 0).all()):
        raise ValueError(
            f"mass must be positive, one number or {atoms} of them; got {value.tolist()}."
        )
    return 1 / per_atom(value, position)
