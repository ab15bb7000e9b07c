"""States with a second copy of every field, which some reversible steps need, and field sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.core.state import AnyState, State, detached, in_transform
from adjsim.dynamics.base import Dynamics

# The distance between the copies, as a share of the size of a field, above which a run stops. The
# copies of an accurate run differ by the error of its steps.
LARGEST_DISTANCE = 0.1
# Steps over which the drift at the start shows how large a field becomes.
AHEAD = 256


class Copies:
    """The second copy z of a state y, in fields named ``<field>_copy``.

    A run starts with equal copies, and users see y alone. It stops where the distance between the
    copies is above ``limit``, a share of the size of a field: the typical one of each system, or
    the largest entry if that is larger. ``remedy`` maps a state, its time and what to use where
    steps are too long to the reason and the way out.
    """

    def __init__(
        self,
        dynamics: Dynamics[State],
        t: float,
        state: State,
        dt: float,
        remedy: Callable[[Any, float, str], str],
        limit: float = LARGEST_DISTANCE,
    ) -> None:
        self.kind: type[Any] = type(state)
        self.remedy, self.limit = remedy, limit
        self.sizes = {} if in_transform() else typical_sizes(dynamics, t, state, dt)
        self.names: tuple[str, ...] = tuple(map(copy_name, self.kind._fields))
        self.both: type[Any] = extended(self.kind, "WithCopy", self.names)

    def add(self, state: AnyState) -> Any:
        """Return a state with its copy."""
        return self.both._make((*state, *state))

    def remove(self, state: AnyState) -> Any:
        """Return y alone."""
        return self.kind._make(state[: len(self.kind._fields)])

    def distance(self, state: AnyState) -> float:
        """Return the largest distance between the copies, as a share of the size of the field."""
        shares = [self._distance(state, name) for name in self.kind._fields]
        return max(math.inf if math.isnan(share) else share for share in shares)

    def _distance(self, state: AnyState, name: str) -> float:
        y, z = getattr(state, name).detach(), getattr(state, copy_name(name)).detach()
        size = self.sizes[name]
        axes = [i - y.ndim for i in range(y.ndim) if size.shape[i] == 1]
        largest = torch.maximum(y.abs().amax(axes, keepdim=True), size) if axes else size
        return float(((y - z).abs() / largest).amax())

    def together(self, state: AnyState) -> bool:
        """Return whether the copies are close enough for both to be solutions."""
        return self.distance(state) <= self.limit

    def describe(self, state: AnyState, good: AnyState, t: float, where: str, smaller: str) -> str:
        """Describe copies that have moved apart since a good state at a time, and the way out."""
        return (
            f"the two copies of the state moved apart by {self.distance(state):.1g} of its size "
            f"{where}: {self.remedy(self.remove(good), t, smaller)}"
        )


def copy_name(field: str) -> str:
    return f"{field}_copy"


@lru_cache(maxsize=128)
def extended(kind: type[Any], suffix: str, added: tuple[str, ...]) -> Any:
    """Make the class of states with added fields."""
    names: tuple[str, ...] = (*kind._fields, *added)
    fields = [(name, Tensor) for name in names]
    return NamedTuple(kind.__name__ + suffix, fields)


def typical_sizes(
    dynamics: Dynamics[State], t: float, state: State, dt: float
) -> dict[str, Tensor]:
    """Estimate the largest entry of each field, for each system and link, from the start at t."""
    start = detached(state)
    with torch.no_grad():
        known_scales = dynamics.characteristic_scales(t, start, AHEAD * dt)
        rates = dynamics.drift(t, start)._asdict()
    found, axes = {}, tuple(range(-dynamics.system_axes, 0))
    for name, value in start._asdict().items():
        sizes = [value.abs(), AHEAD * dt * rates[name].abs()]
        if name in known_scales:
            sizes.append(known_scales[name].detach().abs().expand_as(value))
        largest = torch.stack(sizes).amax(0)
        largest = largest.amax(axes, keepdim=True) if value.ndim >= state[0].ndim else largest
        found[name] = torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)
    return found
