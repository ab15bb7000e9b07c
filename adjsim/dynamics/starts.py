"""Starts of a run: positions and momenta from what the user gives, and random numbers."""

from __future__ import annotations

import math

from torch import Tensor

from adjsim.core.arguments import as_tensor
from adjsim.core.noise import Noise, NoiseStream, seed_from
from adjsim.core.state import AnyState, check_position, position_of
from adjsim.core.typing import Positions, PositionsLike, Seed


def as_start(
    position: PositionsLike, momentum: PositionsLike | None = None
) -> tuple[Positions, Positions | None]:
    """Convert position and momentum to tensors of one shape, dtype and device.

    Raises:
        ValueError: a position that is not ``(*batch, atoms, dim)``, or a momentum of another shape.
    """
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


def check_dof(dof: float | None, state: AnyState) -> None:
    """Refuse more degrees of freedom than a system has coordinates.

    Frozen coordinates and conserved momenta make them fewer.
    """
    coordinates = math.prod(position_of(state).shape[-2:])
    if dof is not None and dof > coordinates:
        raise ValueError(
            f"dof is {dof:g}, more than atoms x dim = {coordinates} of one system: give at most "
            f"{coordinates}, or None."
        )


def standard_normal(
    position: Tensor,
    generator: Seed,
    stream: NoiseStream = NoiseStream.MOMENTA,
    links: tuple[int, ...] = (),
) -> Tensor:
    """Draw numbers for a start, ``(*batch, *links, atoms, dim)``.

    Replica i gets the same numbers in a batch of any size.
    """
    *batch, atoms, dim = position.shape
    noise, entries = Noise(seed_from(generator), stream=stream), math.prod((*links, atoms, dim))
    drawn = noise(0, (math.prod(batch), entries), position)
    return drawn.reshape((*batch, *links, atoms, dim))
