"""The check of a potential at a start, before any step."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from adjsim.core.module_cache import refuse_written, version_of
from adjsim.core.neighbour_list import closest_atoms
from adjsim.core.state import in_transform
from adjsim.potentials.base import ForceField, Potential, force
from adjsim.potentials.evaluated import terms_of
from adjsim.potentials.force_field import refuse_high_energy


def check_potential(potential: nn.Module, position: Tensor) -> None:
    """Refuse a potential of the wrong shape, and a start without a finite energy.

    Raises:
        ValueError: an energy that is not ``(*batch,)`` or not finite, such as that of two atoms at
            one place; a force that is not of the shape of position, or not finite; a potential that
            writes into its argument; an energy of a force field that tells of wrong units.
    """
    # A copy, to find a potential that writes into its argument.
    copy = position.detach().clone()
    version = version_of(copy)
    with torch.no_grad():
        if isinstance(potential, ForceField):
            value, what, expected = potential(0.0, copy), "force", copy.shape
        else:
            value, what, expected = potential(copy), "energy", copy.shape[:-2]
    refuse_written(potential, copy, version)
    if value.shape != expected:
        raise ValueError(
            f"the potential maps position {tuple(position.shape)} to {what} {tuple(value.shape)}; "
            f"it must be {tuple(expected)}."
        )
    if not in_transform() and not bool(torch.isfinite(value).all()):
        raise ValueError(describe_not_finite(potential, copy, value, what))
    if in_transform():
        return
    if what == "energy" and any(map(_in_ev, (potential, *terms_of(potential)))):
        refuse_high_energy(cast(Potential, potential), copy, value)
    elif what == "force":
        for part in filter(_in_ev, terms_of(potential)):
            refuse_high_energy(cast(Potential, part), copy, part(copy).detach())


def describe_not_finite(potential: nn.Module, position: Tensor, value: Tensor, what: str) -> str:
    """Name the first number that is not finite, its system, and the closest atoms there."""
    index = tuple((~torch.isfinite(value)).nonzero()[0].tolist())
    system = index[: position.ndim - 2]
    where = f" of system {', '.join(map(str, system))}" if system else ""
    text = f"the {what} at the start{where} is {float(value[index]):g}"
    remedy = f"check the parameters of {type(potential).__name__}."
    if position.shape[-2] < 2:
        return f"{text}: {remedy}"
    i, j, distance = closest_atoms(position[system], _box_of(potential))
    return f"{text}. The closest atoms, {i} and {j}, are {distance:g} apart: move them, or {remedy}"


def describe_force_not_finite(potential: nn.Module, position: Tensor, t: float) -> str | None:
    """Describe the force at a start if it is not finite; return None if it is.

    An energy may be finite where its force is not, such as that of a root at zero.
    """
    found = force(potential, position, t)
    if bool(torch.isfinite(found).all()):
        return None
    return describe_not_finite(potential, position, found, "force")


def _in_ev(part: nn.Module) -> bool:
    return isinstance(part, Potential) and part.energy_unit == "eV"


def _box_of(potential: nn.Module) -> Tensor | None:
    boxes = (getattr(part, "box", None) for part in terms_of(potential))
    return next((box for box in boxes if box is not None), None)
