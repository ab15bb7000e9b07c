"""Tests of whether an observable depends on a field, from its values.

Automatic differentiation does not see a dependence behind ``detach()`` or through a comparison. So
the fields are displaced by sizes over several decades, and the values are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjsim.core.state import AnyState, State
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.density import StationaryDensity

# In units of the field's root mean square, or of one if it is zero.
SIZES = (1e-3, 1.0, 10.0, 1e3)


def density_of(dynamics: Dynamics[State]) -> StationaryDensity:
    """Return the stationary density that dynamics declare, or raise a TypeError."""
    density = dynamics.stationary_density()
    if density is None:
        raise TypeError(
            f"{type(dynamics).__name__} has no stationary density that it declares. Use dynamics "
            "that sample a known density, such as Langevin or Bussi, or Pathwise or "
            "FiniteDifference. Dynamics of your own that sample the canonical density declare it: "
            "define stationary_density(self), and return adjsim.dynamics.Canonical(self)."
        )
    return density


def depends_on(function: Callable[[Any], Tensor], state: AnyState, name: str) -> bool:
    """Return whether a function of states along a leading axis depends on a field."""
    x = getattr(state, name).detach()
    generator = torch.Generator().manual_seed(0)
    shift = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) * (
        float(x.square().mean().sqrt()) or 1.0
    )
    with torch.no_grad():
        before = function(state)
        after = (function(state._replace(**{name: x + size * shift})) for size in SIZES)
        return any(
            y.shape != before.shape
            or not torch.allclose(y, before, rtol=0.0, atol=0.0, equal_nan=True)
            for y in after
        )


def depends_on_bath(
    dynamics: Dynamics[State], function: Callable[[Any], Tensor], state: State
) -> bool:
    """Return whether an observable depends on bath variables, or refuse one without a density."""
    others = [
        name
        for name in state._fields
        if name not in ("position", "momentum") and depends_on(function, state, name)
    ]
    density = density_of(dynamics)
    for name in others:
        if not depends_on(density.reduced_energy, state, name):
            raise ValueError(
                f"the observable reads {name}, which has no stationary density under "
                f"{type(dynamics).__name__}, so its mean has no equilibrium value. Use "
                "Pathwise or FiniteDifference for its mean along a path."
            )
    return any(name in density.bath_fields for name in others)


def reduced_energy(dynamics: Dynamics[State], state: State, bath: bool) -> Tensor:
    """Compute the reduced energy, with or without the terms of the bath.

    Of an observable that does not depend on the bath, these add to a covariance's variance only.
    They and their derivatives vanish where the bath's variables are zero.
    """
    density = density_of(dynamics)
    if not bath:
        state = state._replace(
            **{name: torch.zeros_like(getattr(state, name)) for name in density.bath_fields}
        )
    return density.reduced_energy(state)


def evenly_spaced(first: int, last: int, count: int) -> set[int]:
    """Choose integers from first to last, as evenly as possible, including the last."""
    return {last - (last - first) * i // count for i in range(count)}
