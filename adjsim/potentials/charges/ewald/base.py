"""The base class of Ewald sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_indices, as_number, as_whole, outside_inference_mode
from adjsim.core.box import Periodic, inverse
from adjsim.core.declared import NOT_NEGATIVE, POSITIVE, Declaring, Limits, setting
from adjsim.core.derived import MADE, Made, are, derived
from adjsim.core.parameters import register
from adjsim.core.reading import as_part
from adjsim.core.strain import Strain
from adjsim.core.typing import Array, Energies, Number, Positions
from adjsim.potentials.base import SummedForces
from adjsim.potentials.charges.ewald.autograd import ChargeSum, Maker
from adjsim.potentials.charges.ewald.complement import Complement
from adjsim.potentials.charges.ewald.excluded import ExcludedPairs, places_of
from adjsim.potentials.charges.ewald.waves import Waves, influence
from adjsim.potentials.pairs.base import FORCES, PairPotential, keeps
from adjsim.potentials.pairs.formula import SHIFTED, skin_of
from adjsim.potentials.pairs.kernels.exclusions import digest_of

P = TypeVar("P", bound=PairPotential)
TOLERANCE = Limits("between 0 and 0.5", lambda x: 0 < x < 0.5)


class EwaldSum(Declaring, Periodic, SummedForces, inherits_forces=True):
    """Base class of Ewald sums: periodic pairs by a part in real and one in reciprocal space.

    Each pair has the energy ``constant q_i q_j / r^power``, with a charge q of each atom, which
    Gaussians split. The part in real space may have more.
    """

    tolerance: float = setting(
        "the approximate relative error of forces, between 0 and 0.5", TOLERANCE, 5e-4, keyword=True
    )
    power: ClassVar[int]
    # The number of atoms, in messages.
    of_atoms: ClassVar[str]
    constant: float
    exclusions: Tensor | None
    species: Tensor | None
    # Of the waves that subclasses sum, see :class:`~.ewald.waves.Waves`.
    numbers: Any
    share: Any
    multiplicity: Any

    def __init__(
        self,
        *values: Number,
        box: Array,
        cutoff: float,
        alpha: float | None = None,
        exclusions: Array | None = None,
        skin: float | None = None,
        species: Array | None = None,
        **named: Any,
    ) -> None:
        given = self.given(values, named)
        super().__init__()
        name = type(self).__name__
        for what, value in (("box", box), ("cutoff", cutoff)):
            if value is None:
                raise ValueError(f"{name} needs a {what}: its atoms are periodic.")
        if species is not None and "species" in self.omitted_arguments:
            raise TypeError(f"{name} takes no species; only LennardJonesMesh does.")
        with outside_inference_mode():
            self.store(given, partial(register, self))
            index = None if species is None else as_indices("species", species)
            self.register_buffer("species", index)
            self.cutoff, self.alpha = POSITIVE("cutoff", cutoff), alpha
            # The checks of the part in real space.
            part = self.checked(cutoff=self.cutoff, box=box, exclusions=exclusions, skin=skin)
            self.skin = part.skin
            self.register_box(box)
            self.register_buffer("exclusions", part.exclusions)
        if self.cell.shape != (3, 3):
            raise ValueError(f"{name} is for three dimensions; box has {len(self.cell)}.")
        _ = self.places

    def validate(self) -> None:
        """Refuse a box, a cutoff or a setting that the constructor would refuse."""
        POSITIVE("cutoff", self.cutoff)
        self.check_settings()
        _ = self.alpha
        if self.skin is not None:
            NOT_NEGATIVE("skin", self.skin)
        super().validate()

    @property
    def alpha(self) -> float:
        """The inverse width of the Gaussians; unless it is given, it follows from the cutoff."""
        assert self.cutoff is not None
        if self._alpha is None:
            return splitting(self.cutoff, self.tolerance)
        return POSITIVE("alpha", self._alpha)

    @alpha.setter
    def alpha(self, value: float | None) -> None:
        self._alpha = None if value is None else as_number("alpha", value)

    def checked(self, **options: Any) -> PairPotential:
        """Make the part in real space, which checks its numbers and these options."""
        raise TypeError(f"{type(self).__name__} has no checked(**options).")

    @property
    def real(self) -> PairPotential:
        """The part in real space, of numbers and a box that the sum has checked."""
        raise TypeError(f"{type(self).__name__} has no part in real space.")

    def part(self, kind: type[P], settings: Mapping[str, Any], **tensors: Tensor | None) -> P:
        """Make the part in real space of a class, with these settings and tensors of its own."""
        buffers = {
            "alpha": self.screening, "box": self.box, "species": None,
            "exclusions": self.exclusions, "image_box": self.image_box, **tensors,
        }  # fmt: skip
        given = {"truncation": SHIFTED, "cutoff": self.cutoff, "skin": self.skin, **settings}
        made: Made | None = vars(self).get(MADE)
        present = [*buffers.values(), *given.values()]
        if made is not None and kind in made.evaluators:
            known, same = made.evaluators[kind]
            if are(known, present):
                return same
        part = object.__new__(kind)
        nn.Module.__init__(part)
        part._buffers.update(buffers)
        vars(part).update(given)
        as_part(part, self, smallest_listed=self.smallest_listed)
        if made is not None:
            made.evaluators[kind] = present, part
        return part

    @property
    def digests(self) -> tuple[str | None, str | None]:
        return digest_of(self.exclusions), digest_of(self.species)

    @derived("alpha", "cell")
    def screening(self) -> Tensor:
        """Alpha as a tensor, which kernels read. A number would be compiled into them."""
        return torch.tensor(self.alpha, dtype=torch.float64, device=self.cell.device)

    @derived("box")
    def cell(self) -> Tensor:
        """The rows of the box as they are given, along which waves and points are counted."""
        assert self.box is not None
        return torch.diag(self.box) if self.box.ndim == 1 else self.box.clone()

    @derived("cell")
    def dual(self) -> Tensor:
        """The rows of the reciprocal cell, without the factor of 2 pi."""
        return inverse(self.cell).mT.contiguous()

    @property
    def waves(self) -> Waves:
        """The waves of the sum in reciprocal space."""
        whole = self.numbers, self.share, self.multiplicity, self.dual
        return Waves(*whole, self.alpha, self.power)

    @derived("numbers", "share", "multiplicity", "dual", "alpha")
    def influence(self) -> Tensor:
        """The influence of waves in the box of the potential, ``(1, waves)``."""
        return influence(self.waves, self.dual.new_zeros(1, 1))[..., :1, :]

    def influence_at(self, strain: Strain | None) -> Callable[..., Tensor]:
        """Return a function of no cotangent or one, see :func:`~.ewald.waves.influence`."""
        if strain is not None:
            return partial(influence, self.waves, strain.value)
        return lambda c=None: self.influence

    @derived("exclusions")
    def excluded(self) -> Tensor | None:
        """The first atoms of exclusions, each once, and then the second ones."""
        if self.exclusions is None:
            return None
        return self.exclusions.sort(-1).values.unique(dim=0).T.flatten()

    @derived("excluded", "atoms")
    def places(self) -> Tensor | None:
        """The places of each atom among the first and the second atoms of exclusions."""
        return None if self.excluded is None else places_of(self.excluded, self.atoms)

    @property
    def atoms(self) -> int:
        """The number of atoms."""
        raise TypeError(f"{type(self).__name__} has no number of atoms.")

    def charges(self) -> Tensor:
        """Compute the charge of each atom, ``(atoms,)``."""
        raise TypeError(f"{type(self).__name__} has no charges.")

    def own(self) -> float:
        """Compute the energy of a unit charge in its own Gaussian."""
        raise TypeError(f"{type(self).__name__} has no energy of its own.")

    def reciprocal(self, position: Tensor, strain: Strain | None = None) -> ChargeSum:
        """Return the sum in reciprocal space, in the box of the potential or at a strain."""
        raise TypeError(f"{type(self).__name__} has no reciprocal(position).")

    def forward(self, position: Positions) -> Energies:
        beyond = self.beyond(position)
        return self.real(position) + beyond

    def beyond(self, position: Tensor, strain: Strain | None = None) -> Energies:
        """Compute the energy other than that in real space."""
        charge = self.checked_charges(position)
        own = self.own() * charge.square().sum()
        parts = (make(strain).energy(position, charge) for make in self.charge_sums(position))
        return reduce(add, parts) - own

    def summands(self, position: Tensor) -> list[nn.Module]:
        # A position of other atoms is refused before its pairs are.
        self.checked_charges(position)
        return [self.real, as_part(Complement(self), self)]

    def listed_pairs(self, position: Tensor) -> tuple[PairPotential | None, list[nn.Module]]:
        # A force or summands of a subclass are not those of a part in real space and the rest.
        if not keeps(self, EwaldSum, *FORCES, "summands") or skin_of(self, position) is None:
            return None, [self]
        real, complement = self.summands(position)
        pairs, _ = cast(PairPotential, real).listed_pairs(position)
        return (None, [self]) if pairs is None else (pairs, [complement])

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        return self.real.strained_energy(position, strain) + self.beyond(position, strain)

    def virial(self, position: Positions) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain.

        The cutoff, alpha and the numbers of waves or points stay as they are.
        """
        charge = self.checked_charges(position)
        value = self.real.virial(position)
        for make in self.charge_sums(position):
            value = value + make(None).virial(position, charge)
        return value

    def checked_charges(self, position: Tensor) -> Tensor:
        charge = self.charges().to(position)
        if position.shape[-2:] != (len(charge), 3):
            raise ValueError(
                f"{self.of_atoms} is for {len(charge)} atoms in three dimensions; position has "
                f"shape {tuple(position.shape)}."
            )
        return charge

    def charge_sums(self, position: Tensor) -> list[Maker]:
        """Return functions that make a part, in the box of the potential or at a strain."""
        parts: list[Maker] = [partial(self.reciprocal, position)]
        if self.exclusions is not None and len(self.exclusions):
            parts.append(partial(self._excluded, position))
        return parts

    def _excluded(self, position: Tensor, strain: Strain | None) -> ExcludedPairs:
        assert self.image_box is not None
        assert self.excluded is not None
        assert self.places is not None
        box = self.image_box.to(position)
        law = self.alpha, self.constant, self.power
        return ExcludedPairs(self.excluded, self.places, box, *law, strain)


def splitting(cutoff: float, tolerance: float) -> float:
    """Compute the inverse width of the Gaussians from a tolerance, as OpenMM chooses it."""
    return math.sqrt(-math.log(2 * tolerance)) / cutoff


def three_numbers(name: str, value: int | Sequence[int], least: int) -> tuple[int, ...]:
    """Convert a count, or one for each row of the cell, to three ints."""
    given = list(value) if isinstance(value, Sequence) else [value] * 3
    counts = tuple(as_whole(name, x) for x in given)
    if len(counts) != 3 or min(counts) < least:
        raise ValueError(f"{name} must be an integer, or three, of at least {least}; got {value}.")
    return counts
