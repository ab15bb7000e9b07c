"""Parameter offsets of a NonbondedForce: numbers of atoms and pairs that follow global ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from adjsim.io._openmm.custom import global_numbers, global_parameters
from adjsim.io._openmm.library import ENERGY, LENGTH


class Offset(nn.Module):
    """A parametrisation by global numbers, ``x = base + sum over k of number_k scale_k``.

    Args:
        numbers: the global numbers, by name.
        scales: ``(numbers, *shape of x)``.
    """

    scales: Tensor

    def __init__(self, numbers: Mapping[str, nn.Parameter], scales: Tensor) -> None:
        super().__init__()
        self.numbers = nn.ParameterDict(numbers)
        self.register_buffer("scales", scales)

    def forward(self, base: Tensor) -> Tensor:
        found = base
        for number, scale in zip(self.numbers.values(), self.scales, strict=True):
            found = found + number.to(base) * scale.to(base)
        return found


class Offsets(NamedTuple):
    """The offsets of a NonbondedForce.

    Attributes:
        numbers: the global numbers by which they are multiplied.
        particles: ``(numbers, atoms, 3)``, the scales of charge, sigma and epsilon, in our units.
        pairs: ``(numbers, exceptions, 3)``, of the product of charges, sigma and epsilon.
    """

    numbers: dict[str, nn.Parameter]
    particles: np.ndarray
    pairs: np.ndarray

    @classmethod
    def of(cls, force: Any, shared: dict[str, nn.Parameter]) -> Offsets:
        """Read the offsets of a force; its global numbers are added to those that are shared."""
        names = [name for name, _ in global_numbers(force)]
        scales: list[np.ndarray] = []
        for kind, count in (
            ("Particle", force.getNumParticles()),
            ("Exception", force.getNumExceptions()),
        ):
            found = np.zeros((len(names), count, 3))
            seen = set[tuple[str, int]]()
            for k in range(getattr(force, f"getNum{kind}ParameterOffsets")()):
                name, place, *row = getattr(force, f"get{kind}ParameterOffset")(k)
                if (name, place) in seen:
                    raise ValueError(
                        f"the NonbondedForce has two offsets of {kind.lower()} {place} by {name}. "
                        "OpenMM's Reference platform takes the last one, and others add them: "
                        "write one offset, with the sum."
                    )
                seen.add((name, place))
                found[names.index(name), place] = np.array(row) * (1.0, LENGTH, ENERGY)
            scales.append(found)
        used = [bool(x.any() or y.any()) for x, y in zip(*scales, strict=True)]
        numbers = global_parameters(force, shared) if any(used) else {}
        kept = {name: numbers[name] for name, use in zip(names, used, strict=True) if use}
        return cls(kept, scales[0][used], scales[1][used])

    def added(self, base: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Add the offsets to numbers ``(rows, 3)``."""
        values = [float(x.detach()) for x in self.numbers.values()]
        return base + np.einsum("k,k...->...", np.array(values), scales)

    def register(self, part: nn.Module, name: str, base: np.ndarray, scales: np.ndarray) -> None:
        """Let a parameter of a part follow the global numbers, from its numbers without them."""
        if not scales.any():
            return
        register_parametrization(part, name, Offset(self.numbers, torch.from_numpy(scales.copy())))
        with torch.no_grad():
            _parametrisations_of(part, name).original.copy_(torch.from_numpy(base))


def without_offsets(part: nn.Module, name: str) -> Tensor:
    """Return a parameter of a part, without what offsets add."""
    value: Tensor = getattr(part, name)
    if is_parametrized(part, name) and isinstance(_parametrisations_of(part, name)[0], Offset):
        value = _parametrisations_of(part, name).original
    return value


def write_numbers(parts: Mapping[str, Any], force: Any) -> None:
    """Write the global numbers of offsets into a force."""
    found: dict[str, Tensor] = {}
    for part in parts.values():
        for module in part.modules():
            if isinstance(module, Offset):
                found |= dict(module.numbers.items())
    for k, (name, _) in enumerate(global_numbers(force)):
        if name in found:
            force.setGlobalParameterDefaultValue(k, float(found[name].detach()))


def _parametrisations_of(part: nn.Module, name: str) -> Any:
    lists: Any = part.parametrizations
    return lists[name]
