"""Starts of a run: positions and momenta, their random numbers, and the check of the energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_tensor
from adjsim.core.neighbour_list import closest_atoms
from adjsim.core.noise import Noise, NoiseStream, seed_from
from adjsim.core.parameters import leaves
from adjsim.core.state import AnyState, check_position, in_transform
from adjsim.core.strain import Strain
from adjsim.core.typing import Positions, PositionsLike, Seed
from adjsim.core.writes import refuse_written, version_of
from adjsim.potentials.base import ForceField, Forces, Potential
from adjsim.potentials.evaluated import Evaluated, terms_of
from adjsim.potentials.force_field import refuse_high_energy
from adjsim.potentials.learnt.precision import refuse_other_dtype
from adjsim.potentials.points import ForcesAt
from adjsim.potentials.strained import reference_box, strained_energy


def as_start(
    position: PositionsLike, momentum: PositionsLike | None = None
) -> tuple[Positions, Positions | None]:
    """Convert position and momentum to tensors of one shape, dtype and device."""
    at = as_tensor("position", position)
    check_position(at)
    if momentum is None:
        return at, None
    p = as_tensor("momentum", momentum)
    check_momentum(p, at)
    return at, p.to(at)


def check_momentum(momentum: Tensor, position: Tensor) -> None:
    """Refuse a momentum of another shape than the position."""
    if momentum.shape != position.shape:
        raise ValueError(
            f"momentum has shape {tuple(momentum.shape)} and position {tuple(position.shape)}; "
            "they must be equal."
        )


def check_shape(state: AnyState, name: str, expected: tuple[int, ...]) -> None:
    """Refuse a field of another shape."""
    shape = tuple(getattr(state, name).shape)
    if shape != expected:
        raise ValueError(f"{name} has shape {shape}; it must be {expected}.")


def check_dof(dof: float | None, position: Tensor) -> None:
    """Refuse more degrees of freedom than a system has coordinates."""
    coordinates = position.shape[-2:].numel()
    if dof is not None and dof > coordinates:
        raise ValueError(
            f"dof is {dof:g}, more than atoms x dim = {coordinates} of one system: give "
            f"at most {coordinates}, or None."
        )


def standard_normal(
    position: Tensor,
    generator: Seed,
    stream: NoiseStream = NoiseStream.MOMENTA,
    links: tuple[int, ...] = (),
) -> Tensor:
    """Draw ``(*batch, *links, atoms, dim)`` numbers, for a replica the same in any batch."""
    *batch, atoms, dim = position.shape
    noise, entries = Noise(seed_from(generator), stream=stream), math.prod((*links, atoms, dim))
    drawn = noise(0, (math.prod(batch), entries), position)
    return drawn.reshape((*batch, *links, atoms, dim))


def check_potential(
    potential: nn.Module | None, position: Tensor, strain: Tensor | None = None
) -> None:
    """Refuse a potential of the wrong shape, or that writes, and a start without finite energy."""
    if potential is None:
        return
    # A copy, to find a potential that writes into its argument.
    copy = position.detach().clone()
    version = version_of(copy)
    with torch.no_grad():
        if isinstance(potential, ForceField):
            value, what, expected = potential(0.0, copy), "force", copy.shape
        else:
            if strain is None:
                value = _energy_at(potential, copy)
            else:
                at = Strain.of(reference_box(potential), strain)
                value = strained_energy(potential, copy, at)
            what, expected = "energy", copy.shape[:-2]
    refuse_written(potential, copy, version)
    if value.shape != expected:
        raise ValueError(
            f"the potential maps position {tuple(position.shape)} to {what} {tuple(value.shape)}; "
            f"it must be {tuple(expected)}."
        )
    if in_transform():
        return
    if not bool(torch.isfinite(value).all()):
        raise ValueError(describe_not_finite(potential, copy, value, what))
    parts = terms_of(potential)
    if what == "energy" and strain is None and any(map(_in_ev, (potential, *parts))):
        refuse_high_energy(cast(Potential, potential), copy, value)
    elif what == "force":
        for part in filter(_in_ev, parts):
            refuse_high_energy(cast(Potential, part), copy, part(copy).detach())


def _energy_at(potential: nn.Module, position: Tensor) -> Tensor:
    """Compute the energy; refuse a module whose graph does not lead to the position.

    Its force would be zero. A module of this library may write its force itself.
    """
    plain = not isinstance(potential, Evaluated)
    if not plain or in_transform() or torch.is_inference_mode_enabled():
        return potential(position)
    leaf = position.detach().requires_grad_()
    try:
        with torch.enable_grad():
            given = leaf.clone()
            version = version_of(given)
            value = potential(given)
    except RuntimeError:
        refuse_other_dtype(potential, position)
        raise
    refuse_written(potential, given, version)
    if not any(x is leaf for x in leaves(value)):
        away = torch.linspace(0.0, 0.1, position.numel()).to(position).reshape(position.shape)
        if not torch.equal(potential(position + away), value):
            raise ValueError(
                f"the energy of {type(potential).__name__} depends on positions in a way that "
                "torch does not differentiate, such as detach() or NumPy, so its force would be "
                "zero. Compute it by operations of torch, or write the force: "
                "adjsim.ForceField."
            )
    return value.detach()


def describe_not_finite(potential: nn.Module, position: Tensor, value: Tensor, what: str) -> str:
    """Name the first number that is not finite, its system, and the closest atoms there."""
    index = tuple((~torch.isfinite(value)).nonzero()[0].tolist())
    system = index[: position.ndim - 2]
    where = f" of system {', '.join(map(str, system))}" if system else ""
    text = f"the {what} at the start{where} is {float(value[index]):g}"
    remedy = f"check the parameters of {type(potential).__name__}."
    if position.shape[-2] < 2:
        return f"{text}: {remedy}"
    boxes = (getattr(part, "box", None) for part in terms_of(potential))
    box = next((box for box in boxes if box is not None), None)
    i, j, distance = closest_atoms(position[system], box)
    return f"{text}. The closest atoms, {i} and {j}, are {distance:g} apart: move them, or {remedy}"


def describe_force_not_finite(
    potential: nn.Module | None, point: Sequence[Tensor], t: float
) -> str | None:
    """Describe a force at a start that is not finite, as that of a root at zero; None if it is."""
    if potential is None:
        return None
    position = point[0]
    found = ForcesAt(Forces(potential)).values(t, point)[0]
    if bool(torch.isfinite(found).all()):
        return None
    return describe_not_finite(potential, position, found, "force")


def describe_time(potential: nn.Module | None, t: float) -> str:
    """Write a time, with its picoseconds where the potential says that its units are ASE's."""
    parts = () if potential is None else (potential, *terms_of(potential))
    if not any(map(_in_ev, parts)):
        return f"t = {t:g}"
    from ase import units

    return f"t = {t:g}, {t / (1000 * units.fs):.6g} ps"


def _in_ev(part: nn.Module) -> bool:
    return isinstance(part, Potential) and part.energy_unit == "eV"
