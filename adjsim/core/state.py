"""States: immutable named tuples of tensors, with a field for each physical quantity.

A state of matter begins with ``position``, ``(*batch, atoms, dim)``, and a state of a vector field
has fields ``(*batch, n)``. The first field gives the batch, the dtype and the device. A step
returns a new state and never writes into an old one, so states may be shared without copying.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, Self, TypeVar, cast, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from adjsim.core.arguments import as_tensor
from adjsim.core.autocast import under_autocast
from adjsim.core.typing import Positions, Vectors


@runtime_checkable
class AnyState(Protocol):
    """A state of unknown type: a named tuple of tensors."""

    @property
    def _fields(self) -> tuple[str, ...]: ...
    @classmethod
    def _make(cls, iterable: Iterable[Tensor], /) -> Self: ...
    def _asdict(self) -> dict[str, Tensor]: ...
    def _replace(self, **fields: Tensor) -> Self: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Tensor]: ...
    @overload
    def __getitem__(self, index: int, /) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[Tensor, ...]: ...


@runtime_checkable
class AnyMomentumState(AnyState, Protocol):
    """A state of unknown type that has a position and a momentum."""

    @property
    def position(self) -> Tensor: ...
    @property
    def momentum(self) -> Tensor: ...


# The type of the states of a dynamics, and of dynamics with momenta.
State = TypeVar("State", bound=AnyState)
MomentumState = TypeVar("MomentumState", bound=AnyMomentumState)


class PhaseState(NamedTuple):
    """Position and momentum, each ``(*batch, atoms, dim)``."""

    position: Positions
    momentum: Positions


class FieldState(NamedTuple):
    """The state y of a vector field, ``(*batch, n)``."""

    y: Vectors


def position_of(state: AnyState) -> Tensor:
    """Return the position of a state that has one."""
    return cast(Any, state).position


def point_of(state: AnyState) -> tuple[Tensor, ...]:
    """Return the fields that forces depend on: the position, and the strain of a box that moves."""
    strain = getattr(state, "strain", None)
    position = position_of(state)
    return (position,) if strain is None else (position, strain)


def momentum_of(state: AnyState) -> Tensor:
    """Return the momentum of a state that has one."""
    return cast(Any, state).momentum


def detached(state: State) -> State:
    """Detach every field of a state."""
    return type(state)._make(x.detach() for x in state)


def select(state: State, index: Any) -> State:
    """Index the leading axis of every field: one replica, a slice of replicas, one frame."""
    return type(state)._make(x[index] for x in state)


def stack(states: list[State]) -> State:
    """Stack states along a new leading axis (time)."""
    return type(states[0])._make(torch.stack(field) for field in zip(*states, strict=True))


def in_transform() -> bool:
    """Return whether a torch.func transform (grad, vmap, jvp) is active."""
    # Torch has no public function for it.
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]


def all_finite(state: AnyState) -> bool:
    """Return whether the sum of all numbers of the state is finite, as it is only if each is."""
    return math.isfinite(float(sum(x.detach().sum(dtype=torch.float64) for x in state)))


def is_finite(x: Tensor) -> bool:
    """Return whether every entry of a tensor is finite."""
    x = x.detach()
    # A sum takes fewer operations than the entries, which may be finite where it is not.
    return math.isfinite(float(x.sum(dtype=torch.float64))) or bool(torch.isfinite(x).all())


def magnitudes(state: AnyState) -> list[Tensor]:
    """Return the largest absolute value of each field, as float64 scalars."""
    return [x.detach().abs().amax().double() for x in state]


def as_state(state: Any) -> Any:
    """Convert arrays to tensors, and lists to tensors like the first field.

    Anything that is not a named tuple is left for ``check`` of the dynamics to refuse.
    """
    if not isinstance(state, tuple) or not hasattr(state, "_fields") or not state:
        return state
    fields = list(map(as_tensor, cast(Any, state)._fields, state))
    made = [
        x if isinstance(given, Tensor | np.ndarray) else x.to(fields[0])
        for x, given in zip(fields, state, strict=True)
    ]
    return type(state)(*made)


def check_position(position: Tensor) -> None:
    """Refuse a shape that is not ``(*batch, atoms, dim)``."""
    if position.ndim < 2:
        raise ValueError(
            f"position has shape {tuple(position.shape)}; it must be (*batch, atoms, dim). "
            "One particle in one dimension is (1, 1)."
        )
    if position.numel() == 0:
        raise ValueError(
            f"position has shape {tuple(position.shape)}: there is nothing to simulate."
        )


def check_kind(state: AnyState, kind: type[Any]) -> None:
    """Refuse a start of the wrong kind."""
    if not isinstance(state, kind):
        raise TypeError(
            f"this dynamics steps a {kind.__name__}, not a {type(state).__name__}: "
            f"make the start with dynamics.init({kind._fields[0]}, ...)."
        )


def check_fields(state: AnyState) -> None:
    """Refuse fields of several dtypes or devices, or not finite."""
    name, first = state._fields[0], state[0]
    if not isinstance(first, Tensor) or not first.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor.")
    if first.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} is {first.dtype}; a state is float32 or float64, since sums over steps lose "
            "their digits in fewer bits. A network may compute in fewer inside of its forward."
            f"{under_autocast(f'give the start {name}.float().')}"
        )
    for other, value in zip(state._fields, state, strict=True):
        if value.dtype != first.dtype or value.device != first.device:
            raise ValueError(
                f"{other} is {value.dtype} on {value.device} and {name} {first.dtype} on "
                f"{first.device}: give all fields the same dtype and device."
            )
        if not in_transform() and not is_finite(value):
            raise ValueError(f"{other} has NaN or infinite entries at the start.")
