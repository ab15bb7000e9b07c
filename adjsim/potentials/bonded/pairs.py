"""Listed pairs: those that a force field treats apart, such as the ends of torsions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_flag, describe_type, outside_inference_mode
from adjsim.core.box import refuse_other_boxes
from adjsim.core.coordinates import SquaredDistance
from adjsim.core.declared import FINITE, declared, setting
from adjsim.core.typing import Array, Number
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.selection import Selection
from adjsim.potentials.pairs.base import PairPotential
from adjsim.potentials.pairs.formula import Operand, kind_of, read_at
from adjsim.potentials.pairs.kernels.kernel import FUNCTION


class ScaledPairs(BondedPotential):
    """A pair potential between listed pairs, ``U = sum over pairs of scale u(r)``.

    u is that of the given potential, whose parameters are shared: the gradient with respect to an
    epsilon has the contributions of both. The listed pairs should be among the exclusions of the
    potential, which are ignored here. For numbers of their own see :class:`ExplicitPairs`.

    Args:
        potential: a :class:`~adjsim.potentials.PairPotential`. Its species must not change later.
        index: ``(pairs, 2)``, the atoms of each pair.
        scale: a number, one for each pair or one for each type.
        truncated: whether u ends at the cutoff of the potential. By default every listed pair has
            its whole energy, at any distance.
        types: see :class:`~adjsim.potentials.BondedPotential`.
        box: likewise. None: the box of the potential.

    Raises:
        TypeError: a potential that is not a pair potential.
    """

    coordinate = SquaredDistance

    scale: Tensor = declared("factor of u")

    def __init__(
        self,
        potential: PairPotential,
        index: Array,
        scale: Number = 1.0,
        *,
        truncated: bool = False,
        types: Array | None = None,
        box: Array | None = None,
    ) -> None:
        if not isinstance(potential, PairPotential):
            raise TypeError(
                "potential must be a pair potential, such as LennardJones(...); got "
                f"{describe_type(potential)}."
            )
        super().__init__(index, scale, types=types, box=potential.box if box is None else box)
        self.potential, self._shares_box = potential, box is None
        self.truncated = as_flag("truncated", truncated)
        self.operands = nn.ModuleDict()
        with outside_inference_mode():
            self._select_operands()

    def element(self, x: Tensor) -> Tensor:
        return self._scaled("energy", x)

    def slope(self, x: Tensor) -> Tensor:
        return self._scaled("slope", x)

    def curvature(self, x: Tensor) -> Tensor:
        return self._scaled("curvature", x)

    def _scaled(self, formula: str, x: Tensor) -> Tensor:
        pair, scale = self._of_pairs(), self.term_parameter("scale", x)
        if not self.truncated or pair.cutoff is None:
            return scale * getattr(pair, f"pair_{formula}")(x)
        outside = x >= pair.cutoff**2
        # Formulas that end at the cutoff may not be finite beyond it.
        near = torch.where(outside, pair.safe_distance(x), x)
        return torch.where(outside, 0.0, scale * getattr(pair, f"truncated_{formula}")(near))

    def _select_operands(self) -> None:
        """Prepare the selection of numbers of atoms, and of entries of tables, for the pairs."""
        pair, (i, j) = self.potential, self.index.unbind(-1)
        if pair.species is not None and self._most >= len(pair.species):
            raise ValueError(
                f"index names atom {self._most} and the potential has species of "
                f"{len(pair.species)} atoms."
            )
        self._shapes = _shapes(pair)
        for name in pair.operand_names():
            value = pair.pair_table(name)
            if value.numel() == 1 or kind_of(value) == FUNCTION:
                continue
            count, atoms = len(value), value.ndim == 1
            if (atoms or pair.species is None) and self._most >= count:
                raise ValueError(
                    f"index names atom {self._most} and {name} of the potential is for {count} "
                    "atoms."
                )
            for key, places in (("i", i), ("j", j)) if atoms else (("ij", self._entries(count)),):
                self.operands[f"{count} {key}"] = Selection(places, count ** len(key))

    def _entries(self, count: int) -> Tensor:
        """Return the places of the pairs in a flat table of so many species."""
        i, j = self.index.unbind(-1)
        species = self.potential.species
        return i * count + j if species is None else species[i] * count + species[j]

    def validate(self) -> None:
        """Refuse other species than those for which the entries of tables were chosen."""
        super().validate()
        pair = self.potential
        if self._shares_box:
            refuse_other_boxes([pair, self])
        for name, shape in _shapes(pair).items():
            if shape != self._shapes.get(name, ()):
                raise ValueError(
                    f"{name} of the potential has another shape than when ScaledPairs was made of "
                    "it: make it again."
                )
        for key, selection in self.operands._modules.items():
            known: Any = selection
            if key.endswith("ij") and not torch.equal(
                known.index, self._entries(math.isqrt(known.count))
            ):
                raise ValueError(
                    "the species of the potential have changed since ScaledPairs was made of it: "
                    "make it again."
                )

    def _of_pairs(self) -> PairPotential:
        """Return the potential with the operands of the listed pairs."""
        values: dict[str, Operand] = {}
        for name in self.potential.operand_names():
            value = self.potential.pair_table(name)
            if kind_of(value) == FUNCTION:
                values[name] = read_at(value)
                continue
            if value.numel() == 1:
                values[name] = value.reshape(())
                continue
            keys = ("i", "j") if value.ndim == 1 else ("ij",)
            found = [self.operands[f"{len(value)} {key}"](value.flatten()) for key in keys]
            values[name] = (found[0], found[1]) if value.ndim == 1 else found[0]
        return self.potential.with_operands(values)


def _shapes(pair: PairPotential) -> dict[str, tuple[int, ...]]:
    """Return the shape of each operand of a potential, that of a number for one entry."""
    found = {name: pair.pair_table(name) for name in pair.operand_names()}
    return {name: tuple(x.shape) if x.numel() > 1 else () for name, x in found.items()}


class ExplicitPairs(BondedPotential):
    """Lennard-Jones and Coulomb energies of listed pairs, each with numbers of its own::

        U = sum over pairs of 4 epsilon ((sigma/r)^12 - (sigma/r)^6) + constant product / r

    These are the exceptions of OpenMM and the 1-4 pairs of CHARMM. The listed pairs should be among
    the exclusions of the potentials of all pairs.

    Args:
        index: ``(pairs, 2)``, the atoms of each pair.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    epsilon: Tensor = declared("depth of the well, energy", depth=True)
    sigma: Tensor = declared("distance where the Lennard-Jones energy is zero")
    product: Tensor = declared("product of the two charges, with the scale of the pair", 0.0)
    constant: float = setting("1/(4 pi epsilon_0), see :class:`~adjsim.Coulomb`", FINITE, 1.0)

    def element(self, x: Tensor) -> Tensor:
        epsilon, sixth, charge, inverse = self._powers(x)
        return 4 * epsilon * sixth * (sixth - 1) + charge * inverse

    def slope(self, x: Tensor) -> Tensor:
        epsilon, sixth, charge, inverse = self._powers(x)
        return (24 * epsilon * sixth * (1 - 2 * sixth) - charge * inverse) * inverse

    def curvature(self, x: Tensor) -> Tensor:
        epsilon, sixth, charge, inverse = self._powers(x)
        well = 24 * epsilon * sixth * (26 * sixth - 7)
        return (well + 2 * charge * inverse) * inverse * inverse

    def _powers(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute epsilon, (sigma/r)^6, constant product and 1/r."""
        epsilon, sigma, product = (
            self.term_parameter(name, x) for name in ("epsilon", "sigma", "product")
        )
        inverse = 1 / x
        square = (sigma * inverse) ** 2
        return epsilon, square * square * square, self.constant * product, inverse
