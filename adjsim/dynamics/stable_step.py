"""The largest stable step of velocity Verlet."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_positive, as_tensor
from adjsim.core.krylov import largest_eigenvalue
from adjsim.core.parameters import NumberRule
from adjsim.core.typing import Number, PositionsLike
from adjsim.dynamics.masses import PER_ATOM, Masses
from adjsim.dynamics.starts import as_start
from adjsim.potentials.base import force_vjp
from adjsim.potentials.contact.base import SurfaceContact


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

    ``omega_max^2`` is the largest eigenvalue of ``M^(-1/2) (K + c) M^(-1/2)``, by Lanczos
    iterations (Golub and Van Loan, Matrix computations, section 10.1). K is the Hessian of the
    potential at the position, and c the largest curvature that the contact can reach, for each
    vertex in every direction. So the result is a lower bound for any vertices in contact, and exact
    for a linear body without contact. All schemes that kick once a step have the same bound.

    A body that becomes stiffer when it is deformed needs a smaller step: use a deformed position,
    or half of the result. Steps near the bound are stable but inaccurate.

    Args:
        potential: the energy without the contact, or a force field with a symmetric Jacobian, which
            is taken at time zero.
        mass: a number, ``(atoms,)`` or ``(atoms, 1)``; infinite for pinned atoms.
        position: ``(*batch, atoms, dim)``; the result is for the stiffest system.
        contact: contact whose force is added to that of the potential.
        energy: the largest energy that contact with one vertex can store. It bounds the curvature
            of a :class:`~adjsim.Barrier`, which otherwise is that at its floor.
        tolerance: the largest relative error of the eigenvalue.

    Returns:
        The step, in units of time; infinity if nothing is stiff.

    Raises:
        ValueError: a position, mass or energy of a wrong shape or sign; a Hessian that is not
            finite.
    """
    at = as_start(position)[0].detach()
    added: Tensor | None = None
    if contact is not None:
        if energy is not None:
            as_positive("energy", energy)
        added = contact.largest_curvature(at.shape[-2], energy).to(at).unsqueeze(-1)
    masses = as_tensor("mass", mass).detach()
    NumberRule(positive=True, shapes=PER_ATOM)("mass", masses)
    root = (1 / Masses(masses)(at)).sqrt()

    def multiply(rows: Tensor) -> Tensor:
        v = root * rows
        _, pullback = force_vjp(potential, at, [])
        along = -pullback(v)[0].detach()
        if added is not None:
            along = along + added * v
        if not bool(torch.isfinite(along).all()):
            raise ValueError("the Hessian of the potential is not finite at this position.")
        return root * along

    generator = torch.Generator().manual_seed(0)
    system = torch.randn(at.shape[-2:], generator=generator, dtype=torch.float64)
    largest = largest_eigenvalue(multiply, system.to(at).expand_as(at), tolerance)
    return 2 / math.sqrt(largest) if largest > 0 else math.inf
