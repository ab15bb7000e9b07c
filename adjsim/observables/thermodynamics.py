"""Thermodynamic observables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_number, as_tensor
from adjsim.core.box import volume
from adjsim.core.parameters import check_count
from adjsim.core.typing import Energies, Number, PositionsLike
from adjsim.potentials.base import Potential
from adjsim.potentials.evaluated import terms_of


@runtime_checkable
class Moving(Protocol):
    """The interface of a state with positions and momenta."""

    @property
    def position(self) -> Tensor: ...
    @property
    def momentum(self) -> Tensor: ...


@runtime_checkable
class Massive(Protocol):
    """The interface of dynamics with masses and a potential."""

    @property
    def potential(self) -> nn.Module: ...
    @property
    def mass(self) -> Tensor: ...


def kinetic_temperature(
    momentum: PositionsLike, mass: Number = 1.0, dof: float | int | None = None
) -> Energies:
    """Compute the kinetic temperature ``sum p^2/m / dof``, an energy (kT), ``(*batch,)``.

    The mass is one number, ``(atoms,)`` or ``(atoms, 1)``. The degrees of freedom, ``dof``, are
    atoms x dim by default. Subtract dim if the total momentum is zero and stays zero.
    """
    p = as_tensor("momentum", momentum)
    m = _masses(as_tensor("mass", mass), p)
    count = p.shape[-1] * p.shape[-2] if dof is None else as_number("dof", dof)
    return (p**2 / m).sum((-1, -2)) / count


def pressure(dynamics: Massive, state: Moving) -> Energies:
    """Compute the instantaneous pressure of a periodic box, ``(*batch,)``::

        P = (sum p^2/m + sum over i<j of d_ij . F_ij) / (dim V)

    Its mean at equilibrium is the pressure. A tail correction is not included, see
    :func:`adjsim.potentials.tail_corrections`.

    Args:
        dynamics: dynamics with masses, whose potential has a box and a virial, or a sum of such
            potentials with one box. Terms within molecules (bonds, angles, torsions, scaled pairs)
            need no box if the positions are those of whole molecules.
        state: a state with positions and momenta, or a trajectory.

    Raises:
        ValueError: no box, or two different ones.
        TypeError: a potential without a virial.
    """
    found = stress(dynamics, state)
    return -found.diagonal(dim1=-2, dim2=-1).mean(-1)


def stress(dynamics: Massive, state: Moving) -> Tensor:
    """Compute the instantaneous stress of a periodic box, ``(*batch, dim, dim)``::

        stress = -(sum p p / m + sum over i<j of d_ij F_ij) / V

    Tension is positive, so the pressure is minus the mean of the diagonal. Arguments and errors are
    those of :func:`pressure`.
    """
    q, p = state.position, state.momentum
    size = _volume(dynamics.potential)
    if not isinstance(dynamics.potential, Potential):
        raise TypeError(
            f"{type(dynamics.potential).__name__} has no virial(position), which the pressure and "
            "the stress need. Pair potentials and sums of them have one."
        )
    kinetic = (p / _masses(dynamics.mass, p)).transpose(-1, -2) @ p
    return -(kinetic + dynamics.potential.virial(q)) / size


def _masses(mass: Tensor, p: Tensor) -> Tensor:
    """Return masses to divide momenta by, in their dtype."""
    check_count("mass", mass, p.shape[-2])
    return mass.to(p).reshape(-1, 1) if mass.numel() > 1 else mass.to(p)


def _volume(potential: nn.Module) -> Tensor:
    """Return the volume of the box of a potential, or of the parts of a sum."""
    boxes = list(_boxes(potential))
    if not boxes:
        raise ValueError(
            "pressure and stress need a potential with a periodic box, and no part of "
            f"{type(potential).__name__} has one: make the nonbonded parts with box=."
        )
    first = boxes[0]
    if any(box.shape != first.shape or not torch.equal(box, first) for box in boxes[1:]):
        raise ValueError("the parts of the potential have different boxes.")
    return volume(first)


def _boxes(potential: nn.Module) -> Iterator[Tensor]:
    """List the boxes of the parts of a potential; terms within molecules need none."""
    for part in terms_of(potential):
        box: Tensor | None = getattr(part, "box", None)
        if box is not None:
            yield box
        elif not (isinstance(part, Potential) and part.within_molecules):
            raise ValueError(
                "pressure and stress need a potential with a periodic box, and "
                f"{type(part).__name__} has none: make it with box=."
            )
