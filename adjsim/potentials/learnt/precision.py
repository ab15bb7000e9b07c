"""The precision of models, and the errors of models of another precision than the run's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adjsim.core.strain import Strain
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import Potential, with_energy
from adjsim.potentials.evaluated import terms_of
from adjsim.potentials.strained import strained_energy

ADVICE = (
    "Wrap the potential in InPrecision(potential, dtype), or convert the model with "
    "model.to(dtype)."
)


class InPrecision(Potential):
    """An energy that is evaluated in another precision than that of the run.

    Positions are rounded to ``dtype``, and energies and forces are converted back, as for a float32
    network in float64 dynamics. The state and exact reversal stay in the precision of the run.
    Energy is conserved to the errors of ``dtype``, and gradients of weights are summed in that of
    the weights; compare with ``potential.double()`` once.

    Args:
        potential: maps position to energy, and has parameters of ``dtype``.
        dtype: the precision of the evaluation.
    """

    def __init__(self, potential: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point type; got {dtype}.")
        self.potential, self.dtype = with_energy(potential), dtype

    @property
    def box(self) -> Tensor | None:
        """The periodic box of the potential, which a sum compares with its own."""
        return getattr(self.potential, "box", None)

    @property
    def corrects_tail(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(getattr(x, "corrects_tail", False) for x in terms_of(self.potential))

    @property
    def within_molecules(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(getattr(x, "within_molecules", False) for x in terms_of(self.potential))

    @property
    def energy_unit(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        units = (getattr(x, "energy_unit", None) for x in terms_of(self.potential))
        return next((unit for unit in units if unit is not None), None)

    def forward(self, position: Positions) -> Energies:
        return self.potential(position.to(self.dtype)).to(position.dtype)

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        given = position.to(self.dtype), strain.to(self.dtype)
        return strained_energy(self.potential, *given).to(position.dtype)

    def virial(self, position: Positions) -> Tensor:
        if not isinstance(self.potential, Potential):
            return super().virial(position)
        return self.potential.virial(position.to(self.dtype)).to(position.dtype)


def refuse_other_dtype(model: nn.Module, position: Tensor) -> None:
    """Refuse a model whose parameters have another dtype than positions."""
    known = {x.dtype for x in model.parameters() if x.is_floating_point()}
    if known and known != {position.dtype}:
        raise ValueError(
            f"{type(model).__name__} has parameters of {names_of(known)} and position is "
            f"{names_of({position.dtype})}. {ADVICE}"
        )


def names_of(dtypes: set[torch.dtype]) -> str:
    """Return the names of dtypes, without that of torch."""
    return " and ".join(sorted(str(x).removeprefix("torch.") for x in dtypes))
