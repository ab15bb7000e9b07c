"""The largest stable step of velocity Verlet."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from adjsim._inputs import as_number, as_tensor
from adjsim._typing import Number, PositionsLike
from adjsim.dynamics.base import as_start, check_per_atom, per_atom
from adjsim.potentials.base import force_vjp
from adjsim.potentials.contact.base import SurfaceContact

# Coordinates up to which all eigenvalues are computed; an iteration needs more than a few.
DENSE = 48
# Relative error of the largest eigenvalue.
TOLERANCE = 1e-8


def largest_stable_step(
    potential: nn.Module,
    mass: Number,
    position: PositionsLike,
    *,
    contact: SurfaceContact | None = None,
    energy: float | None = None,
) -> float:
    """Compute the largest stable step of velocity Verlet, ``2 / omega_max``.

    ``omega_max^2`` is the largest eigenvalue of ``M^(-1/2) (K + c) M^(-1/2)``. K is the Hessian of
    the potential at the position, and c the largest curvature that the contact can reach, for each
    vertex in every direction. So the result is a lower bound for any vertices in contact, and exact
    for a linear body without contact. Semi-implicit Euler has the same bound, and so have all
    schemes that kick once a step. The eigenvalue is found by Lanczos iterations on products with K
    (Lehoucq, Sorensen and Yang, ARPACK users' guide, SIAM 1998).

    A body that becomes stiffer when it is deformed needs a smaller step than at the position: use a
    deformed position, or half of the result. Steps near the bound are stable but inaccurate.

    Args:
        potential: the energy without the contact, or a force field with a symmetric Jacobian, which
            is taken at time zero.
        mass: a number, ``(atoms,)`` or ``(atoms, 1)``; infinite for pinned atoms.
        position: ``(*batch, atoms, dim)``; the result is for the stiffest system.
        contact: contact whose force is added to that of the potential.
        energy: the largest energy that contact with one vertex can store, such as the total energy
            of the body. It bounds the curvature of a :class:`~adjsim.potentials.Barrier`, which
            otherwise is that at its floor. Other penalties do not need it.

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
    stiffness = _Stiffness(potential, at, _inverse_masses(mass, at).sqrt(), added)
    largest = stiffness.largest_eigenvalue()
    return 2 / math.sqrt(largest) if largest > 0 else math.inf


class _Stiffness(LinearOperator):
    """The Hessian, with a number added for each vertex, between the roots of inverse masses."""

    def __init__(
        self, potential: nn.Module, position: Tensor, root: Tensor, added: Tensor | None
    ) -> None:
        super().__init__(np.dtype(np.float64), (position.numel(), position.numel()))
        self._potential, self._position = potential, position
        self._root, self._added = root, added

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        row = torch.from_numpy(np.ascontiguousarray(x.ravel()))
        v = self._root * row.to(self._position).reshape(self._position.shape)
        _, pullback = force_vjp(self._potential, self._position, [])
        along = -pullback(v)[0].detach()
        if self._added is not None:
            along = along + self._added * v
        found = (self._root * along).double().cpu().numpy().ravel()
        if not np.isfinite(found).all():
            raise ValueError("the Hessian of the potential is not finite at this position.")
        return found

    def largest_eigenvalue(self) -> float:
        size = self.shape[0]
        if size <= DENSE:
            matrix = np.stack([self._matvec(row) for row in np.eye(size)])
            return float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])
        start = np.random.default_rng(0).standard_normal(size)
        if not self._matvec(start).any():
            return 0.0  # Of which no iteration can find a direction.
        options: dict[str, Any] = {"v0": start, "tol": TOLERANCE, "return_eigenvectors": False}
        return float(eigsh(self, k=1, which="LA", **options)[0])


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
