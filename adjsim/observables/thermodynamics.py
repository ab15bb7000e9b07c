"""Temperature."""

from __future__ import annotations

from torch import Tensor

from adjsim._typing import Energies, Number, Positions


def kinetic_temperature(momentum: Positions, mass: Number = 1.0, dof: float | int | None = None) -> Energies:
    """``sum p^2/m / dof``, an energy (kT), ``(*batch,)``.

    Args:
        momentum: ``(*batch, atoms, dim)``.
        mass: scalar, ``(atoms,)`` or ``(atoms, 1)``.
        dof: degrees of freedom; None: atoms x dim. Take off dim where the total momentum is zero and stays so.
    """
    if isinstance(mass, Tensor) and mass.numel() > 1:
        mass = mass.reshape(-1, 1)
    count = momentum.shape[-1] * momentum.shape[-2] if dof is None else dof
    return (momentum**2 / mass).sum((-1, -2)) / count
