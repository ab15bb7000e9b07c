"""The energy of custom pairs beyond a cutoff, an integral of their expression."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjsim.core.arguments import as_whole
from adjsim.core.derived import derived
from adjsim.potentials.expressions import place_of
from adjsim.potentials.pairs.custom import CustomPairs
from adjsim.potentials.pairs.formula import Operand, kind_of
from adjsim.potentials.pairs.kernels.kernel import ATOM, TABLE
from adjsim.potentials.pairs.tail import UniformCorrection, quadrature


class LongRangeCorrection(UniformCorrection):
    """The energy of custom pairs that a cutoff leaves out, at uniform density, as OpenMM adds it::

        U = 2 pi N^2 / V  <integral from 0 to infinity of (1 - S(r)) u(r) r^2 dr>

    S is the share of the energy that the cutoff leaves: 1 within it, 0 beyond it, and a switch in
    between. The mean is the sum over pairs of atoms, an atom paired with itself included, over
    N (N + 1) / 2. With groups the sum is over the pairs that interact. Exclusions do not matter.

    The integrals are by Gauss-Legendre nodes and good to about twelve digits. OpenMM takes
    midpoints in single precision, refined until the sum changes by 1e-5 of itself, so its
    correction is good to about six digits. The energy gives no force, but a virial and gradients
    with respect to the numbers of the pairs.

    Args:
        custom: pairs with a cutoff and a box.
        atoms: N.

    Raises:
        ValueError: no cutoff or no box; pairs with functions of tables; at evaluation, an energy
            that does not fall faster than about 1/r^3.3, numbers of other atoms.
    """

    def __init__(self, custom: CustomPairs, atoms: int) -> None:
        super().__init__()
        if custom.box is None or custom.cutoff is None:
            raise ValueError("the long-range correction needs a box and a cutoff.")
        if custom.tables:
            raise ValueError(
                f"the expression {custom.text!r} calls the table {custom.tables[0]} at place "
                f"{place_of(custom.tables[0], custom.text)}, and the integral beyond the cutoff is "
                "of smooth functions alone: leave the correction out, with "
                "setUseLongRangeCorrection(False)."
            )
        self.custom = custom
        self.atoms = as_whole("atoms", atoms)

    @property
    def pairs(self) -> CustomPairs:
        """The custom pairs."""
        return self.custom

    @property
    def contents(self) -> Tensor:
        """The present numbers, species and sets of the pairs, one after the other."""
        found = [getattr(self.custom, name) for name in self.custom.operand_names()]
        found += [] if self.custom.species is None else [self.custom.species]
        values = [x.detach().double().flatten() for x in found]
        return torch.cat([*values, self._new([0.0])])

    @property
    def formula(self) -> tuple[object, ...]:
        """The expression, the groups, the cutoff and the truncation."""
        custom = self.custom
        return custom.text, custom.groups, custom.cutoff, custom.truncation

    @derived("contents", "atoms")
    def classes(self) -> Tensor:
        """The class of each atom; atoms of a class have the same numbers."""
        pairs = self.custom
        tables = (getattr(pairs, name) for name in pairs.operand_names())
        columns = [x.detach().double() for x in tables if kind_of(x) == ATOM]
        columns += [] if pairs.species is None else [pairs.species.double()]
        if any(len(x) != self.atoms for x in columns):
            raise ValueError(
                f"the pairs have numbers of {max(map(len, columns))} atoms, and atoms is "
                f"{self.atoms}."
            )
        columns.append(self._new([0.0]).expand(self.atoms))
        return torch.unique(torch.stack(columns, 1), dim=0, return_inverse=True)[1]

    @derived("classes")
    def count(self) -> Tensor:
        """The number of atoms of each class."""
        return torch.bincount(self.classes).double()

    @derived("classes")
    def index(self) -> Tensor:
        """Pairs of classes, ``(2, pairs)``."""
        kinds = int(self.classes.max()) + 1
        return torch.triu_indices(kinds, kinds, device=self.classes.device)

    @derived("index", "count", "formula")
    def share(self) -> Tensor:
        """The number of pairs of atoms of each two classes."""
        i, j = self.index
        count = self.count
        # Without groups the pairs of an atom with itself, too.
        own = -1.0 if self.custom.groups else 1.0
        return torch.where(i == j, count[i] * (count[i] + own) / 2, count[i] * count[j])

    @derived("classes", "contents")
    def species(self) -> Tensor | None:
        """The species of each class."""
        species = self.custom.species
        if species is None:
            return None
        found = torch.zeros_like(self.count, dtype=torch.int64)
        return found.scatter(0, self.classes, species)

    @derived("contents", "atoms", "formula")
    def product(self) -> Tensor:
        """The energy times the volume at the present numbers."""
        pairs = self._of_classes()
        far = self._new([1e2 * self.cutoff, 1e8 * self.cutoff])
        near, beyond = (self._energies(pairs, far) * far**3).abs().mT
        if bool((beyond > 10**-1.5 * near).any()):
            raise ValueError(
                f"the energy {self.custom.text!r} does not fall faster than about 1/r^3.3, so the "
                "integral beyond the cutoff is infinite, or nearly so: leave the correction out, "
                "with setUseLongRangeCorrection(False)."
            )
        return self._integrated().detach()

    def energy_times_volume(self) -> Tensor:
        return self._integrated() if torch.is_grad_enabled() else self.product

    def _integrated(self) -> Tensor:
        pairs, cutoff = self._of_classes(), self.cutoff
        begin = self.custom.truncation.begin(cutoff)
        r, weight = map(self._new, quadrature(cutoff, math.inf))
        total = (self._energies(pairs, r) * (weight * r**2)).sum(-1)
        if begin < cutoff:
            r, weight = map(self._new, quadrature(begin, cutoff))
            missing = self._energies(pairs, r) - self._energies(pairs, r, truncated=True)
            total = total + (missing * (weight * r**2)).sum(-1)
        return 4 * math.pi * self.atoms / (self.atoms + 1) * (self.share * total).sum()

    def _new(self, values: Tensor | list[float]) -> Tensor:
        """Return numbers on the device of the pairs."""
        assert self.custom.box is not None
        return torch.as_tensor(values, dtype=torch.float64, device=self.custom.box.device)

    def _of_classes(self) -> CustomPairs:
        """Return the custom pairs with the numbers of pairs of classes."""
        custom, found = self.custom, dict[str, Operand]()
        i, j = self.index
        for name in custom.operand_names():
            value = custom.pair_table(name).double()
            if kind_of(value) == ATOM:
                # Atoms of a class share the derivative with respect to its number.
                sums = torch.zeros_like(self.count).index_add(0, self.classes, value)
                mean = (sums / self.count).unsqueeze(-1)
                found[name] = mean[i], mean[j]
            elif kind_of(value) == TABLE and self.species is not None:
                found[name] = value[self.species[i], self.species[j]].unsqueeze(-1)
            else:
                found[name] = value
        return custom.with_operands(found)

    def _energies(self, pairs: CustomPairs, r: Tensor, truncated: bool = False) -> Tensor:
        """Compute energies at distances, ``(pairs of classes, distances)``."""
        s = (r * r).expand(self.index.shape[1], -1)
        return pairs.truncated_energy(s) if truncated else pairs.pair_energy(s)
