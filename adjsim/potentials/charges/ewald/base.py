"""The base class of Ewald sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_number, outside_inference_mode
from adjsim.core.box import Periodic, refuse_trained_box, volume
from adjsim.core.derived import derived
from adjsim.core.layout import materialise
from adjsim.core.parameters import refuse_unknown, register
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Array, Energies, Number, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.charges.ewald.autograd import ChargeSum, force_of
from adjsim.potentials.charges.ewald.excluded import ExcludedPairs, partners_of
from adjsim.potentials.charges.ewald.screened import ScreenedCoulomb
from adjsim.potentials.charges.ewald.splitting import checked_tolerance, splitting
from adjsim.potentials.products import ParameterVJP, Pullback, VJPSum


class EwaldSum(Periodic, Potential):
    """Base class of Ewald sums: the energy of periodic point charges, in real and reciprocal space.

    Subclasses write ``reciprocal(position)``, which returns the reciprocal part.
    """

    charge: Tensor
    exclusions: Tensor | None

    def __init__(
        self,
        charge: Number,
        *,
        box: Array,
        cutoff: float,
        alpha: float | None,
        tolerance: float,
        exclusions: Array | None,
        constant: float,
        skin: float | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        for what, value in (("box", box), ("cutoff", cutoff)):
            if value is None:
                raise ValueError(f"{name} needs a {what}: its charges are periodic.")
        self.tolerance = checked_tolerance(tolerance)
        self.cutoff = as_number("cutoff", cutoff)
        self._check_cutoff()
        self._alpha = None if alpha is None else as_number("alpha", alpha)
        with outside_inference_mode():
            register(self, "charge", charge)
            # The checks of the part in real space.
            part = ScreenedCoulomb(
                self.charge, self.alpha, constant,
                cutoff=self.cutoff, box=box, exclusions=exclusions, skin=skin,
            )  # fmt: skip
            self.skin, self.constant = part.skin, part.constant
            self.register_box(box)
            self.register_buffer("exclusions", part.exclusions)
        if self.cell.shape != (3, 3):
            raise ValueError(f"{name} is for three dimensions; box has {len(self.cell)}.")
        _ = self.partners

    def validate(self) -> None:
        """Refuse a box, a cutoff or a tolerance that the constructor would refuse."""
        self._check_cutoff()
        checked_tolerance(self.tolerance)
        _ = self.alpha
        if self.skin is not None and not 0 <= self.skin < math.inf:
            raise ValueError(f"skin must be zero or positive, and finite; got {self.skin}.")
        super().validate()

    def _check_cutoff(self) -> None:
        if self.cutoff is None or not 0 < self.cutoff < math.inf:
            raise ValueError(f"cutoff must be positive and finite; got {self.cutoff}.")

    @property
    def alpha(self) -> float:
        """The inverse width of the Gaussians; unless it is given, it follows from the cutoff."""
        assert self.cutoff is not None
        return splitting(self._alpha, self.cutoff, self.tolerance)

    @alpha.setter
    def alpha(self, value: float | None) -> None:
        self._alpha = None if value is None else as_number("alpha", value)

    @property
    def real(self) -> ScreenedCoulomb:
        """The part in real space, which reads the charges and the box of the sum."""
        # Charges may be computed, by a parametrisation, also where a sweep records no graph.
        with torch.enable_grad():
            charge = self.charge
        tensors = {
            "charge": charge, "alpha": self.screening, "box": self.box, "species": None,
            "exclusions": self.exclusions, "image_box": self.image_box,
        }  # fmt: skip
        settings = {
            "cutoff": self.cutoff, "skin": self.skin, "constant": self.constant,
        }  # fmt: skip
        values = {"smallest_listed": self.smallest_listed}
        return ScreenedCoulomb.part_of(self, tensors, settings, values)

    @derived("alpha")
    def screening(self) -> Tensor:
        """Alpha as a tensor, which kernels read. A number would be compiled into them."""
        return torch.tensor(self.alpha, dtype=torch.float64)

    @derived("box")
    def cell(self) -> Tensor:
        """The rows of the box as they are given, along which waves and points are counted."""
        assert self.box is not None
        return torch.diag(self.box) if self.box.ndim == 1 else self.box.clone()

    @derived("cell")
    def volume(self) -> Tensor:
        """The volume of the box."""
        return volume(self.cell)

    @derived("exclusions", "atoms")
    def partners(self) -> Tensor | None:
        """The excluded partners of each atom."""
        return None if self.exclusions is None else partners_of(self.exclusions, self.atoms)

    @property
    def atoms(self) -> int:
        """The number of atoms."""
        return len(self.charge)

    def lengths(self) -> list[float]:
        """Return the lengths of the rows of the cell."""
        return self.cell.norm(dim=1).tolist()

    def reciprocal(self, position: Tensor) -> ChargeSum:
        """Return the sum in reciprocal space."""
        raise TypeError(f"{type(self).__name__} has no reciprocal(position).")

    def forward(self, position: Positions) -> Energies:
        charge = self._charges(position)
        energy = self.real(position) + self._constant_energy(charge)
        for part in self._parts(position):
            energy = energy + part.energy(position, charge)
        return energy

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        refuse_trained_box(self)
        charge = self._charges(position)
        value = self.real.force(position, rounding)
        for part in self._parts(position):
            value = value + _rounded(force_of(part, position, charge), rounding)
        return materialise(value)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        value, real_product = self.real.force_vjp(position, parameters, rounding)
        with torch.enable_grad():
            charge = self._charges(position)
        refuse_unknown(charge, self, parameters, f"the force of {type(self).__name__}")
        products: list[Callable[[Tensor], tuple[Tensor, Tensor]]] = []
        with torch.no_grad():
            for part in self._parts(position):
                more, product = part.linearised(position, charge.detach())
                value = value + _rounded(more, rounding)
                products.append(product)

        def pullback(v: Tensor) -> tuple[Tensor, ParameterVJP]:
            along, rest = real_product(v)
            with torch.no_grad():
                found = [product(v) for product in products]
            for more, _ in found:
                along = along + more
            cotangent = sum(weight for _, weight in found)
            return materialise(along), VJPSum((rest, _to_parameters(charge, cotangent, parameters)))

        return materialise(value), pullback

    def virial(self, position: Positions) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain.

        The cutoff, alpha and the numbers of waves or points stay as they are.
        """
        charge = self._charges(position)
        unit = torch.eye(3, dtype=position.dtype, device=position.device)
        value = self.real.virial(position) + self._background(charge) * unit
        for part in self._parts(position):
            value = value + part.virial(position, charge)
        return value

    def _charges(self, position: Tensor) -> Tensor:
        charge = self.charge.to(position)
        if position.shape[-2:] != (len(charge), 3):
            raise ValueError(
                f"charge is for {len(charge)} atoms in three dimensions; position has shape "
                f"{tuple(position.shape)}."
            )
        return charge

    def _parts(self, position: Tensor) -> list[ChargeSum]:
        parts = [self.reciprocal(position)]
        if self.partners is not None:
            assert self.image_box is not None
            box = self.image_box.to(position)
            parts.append(ExcludedPairs(self.partners, box, self.alpha, self.constant))
        return parts

    def _constant_energy(self, charge: Tensor) -> Tensor:
        """Compute the energy of each charge in its own Gaussian, and of the background."""
        own = self.constant * self.alpha / math.sqrt(math.pi) * charge.square().sum()
        return self._background(charge) - own

    def _background(self, charge: Tensor) -> Tensor:
        factor = self.constant * math.pi / (2 * self.volume.to(charge) * self.alpha**2)
        return -factor * charge.sum().square()


def _rounded(force: Tensor, rounding: Rounding) -> Tensor:
    return rounding.round(force.unsqueeze(-2)).squeeze(-2)


def _to_parameters(
    charge: Tensor, cotangent: Any, parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Propagate a cotangent of the charges to the parameters."""
    if not parameters or not charge.requires_grad:
        return [None] * len(parameters)
    found = torch.autograd.grad(charge, parameters, cotangent, allow_unused=True, retain_graph=True)
    return list(found)
