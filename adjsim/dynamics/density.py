"""The stationary densities that dynamics declare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from adjsim.core.state import AnyState
from adjsim.core.typing import Energies
from adjsim.potentials.base import ForceField


class StationaryDensity(ABC):
    """A density that the equations of motion sample, known up to a constant.

    ``bath_fields`` are fields of the state that are Gaussian about zero, independently of position
    and momentum.
    """

    bath_fields: tuple[str, ...] = ()

    @abstractmethod
    def reduced_energy(self, state: AnyState) -> Energies:
        """Compute minus the logarithm of the density, up to a constant, ``(*batch,)``.

        It is differentiable in the parameters of the density.
        """


class CanonicalPositions(StationaryDensity):
    """The canonical density of positions, ``exp(-U(q)/kT)``.

    Args:
        dynamics: the dynamics, with a ``potential`` and ``kT``.

    Raises:
        TypeError: a potential that is a force field.
    """

    def __init__(self, dynamics: Any) -> None:
        if isinstance(dynamics.potential, ForceField):
            raise TypeError(
                f"{type(dynamics).__name__} has no known stationary density: "
                f"{type(dynamics.potential).__name__} is a force that need not come from an "
                "energy. Use Pathwise, Girsanov or FiniteDifference."
            )
        self.dynamics = dynamics

    def reduced_energy(self, state: AnyState) -> Energies:
        energy = self.dynamics.potential_energy(state)
        return energy / self.dynamics.kT.to(energy)


class Canonical(CanonicalPositions):
    """The canonical density ``exp(-(U(q) + sum p^2/2m + sum b^2/2w)/kT)``, with bath variables b.

    Args:
        dynamics: the dynamics, with a ``potential``, ``kT`` and masses.
        bath: for each field of bath variables, a function from the state to their weights w, of the
            shape of the field or one that broadcasts to it.

    Raises:
        TypeError: a potential that is a force field.
    """

    def __init__(
        self, dynamics: Any, bath: Mapping[str, Callable[[Any], Tensor]] | None = None
    ) -> None:
        super().__init__(dynamics)
        self.bath = dict(bath or {})
        self.bath_fields = tuple(self.bath)

    def reduced_energy(self, state: AnyState) -> Energies:
        energy = self.dynamics.potential_energy(state) + self.dynamics.kinetic_energy(state)
        kT = self.dynamics.kT.to(energy)
        found = energy / kT
        for name, weight in self.bath.items():
            squares: Tensor = getattr(state, name) ** 2 / weight(state)
            found = found + squares.sum(tuple(range(found.ndim, squares.ndim))) / (2 * kT)
        return found
