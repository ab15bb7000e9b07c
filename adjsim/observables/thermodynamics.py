"""Thermodynamic observables."""

from __future__ import annotations

from adjsim._inputs import as_number, as_tensor
from adjsim._typing import Energies, Number, PositionsLike


def kinetic_temperature(
    momentum: PositionsLike, mass: Number = 1.0, dof: float | int | None = None
) -> Energies:
    """Compute the kinetic temperature ``sum p^2/m / dof``, an energy (kT), ``(*batch,)``.

    Args:
        momentum: ``(*batch, atoms, dim)``.
        mass: scalar, ``(atoms,)`` or ``(atoms, 1)``.
        dof: degrees of freedom; None: atoms x dim. Subtract dim if the total momentum is zero and
            stays zero.
    """
    p, m = as_tensor("momentum", momentum), as_tensor("mass", mass)
    if m.numel() > 1:
        m = m.reshape(-1, 1)
    count = p.shape[-1] * p.shape[-2] if dof is None else as_number("dof", dof)
    return (p**2 / m.to(p)).sum((-1, -2)) / count
