"""Formulas of pairs that share one pass over one neighbour list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from adjsim.core.derived import replaced
from adjsim.core.reading import as_part
from adjsim.potentials.joining import Alike
from adjsim.potentials.pairs.formula import Operand, PairFormula, kind_of
from adjsim.potentials.pairs.kernels.kernel import TABLE

P = TypeVar("P", bound=PairFormula)


class JoinedFormula(PairFormula):
    """The sum of the formulas of members, ``u(s) = sum_k u_k(s)``, each truncated by its own rule.

    Members have one cutoff, skin and box, and the same exclusions. Their operands have names that
    begin with the number of the member, and tables have one species an atom.
    """

    @property
    def members(self) -> list[PairFormula]:
        """The formulas that are summed."""
        return cast(list[PairFormula], list(self._modules.values()))

    def join(self, members: Sequence[PairFormula]) -> None:
        """Make a module that has been allocated the sum of these members."""
        nn.Module.__init__(self)
        first, tabled = members[0], [x for x in members if _has_tables(x)]
        self._buffers.update(
            box=first.box,
            image_box=first.image_box,
            exclusions=first.exclusions,
            species=tabled[0].species if tabled else None,
        )
        self._modules.update({str(k): member for k, member in enumerate(members)})
        vars(self).update(
            cutoff=first.cutoff,
            skin=first.skin,
            truncation=first.truncation,
            skin_share=min(x.skin_share for x in members),
        )
        as_part(self, first, smallest_listed=first.smallest_listed)

    def truncated_energy(self, s: Tensor) -> Tensor:
        return reduce(add, [x.truncated_energy(s) for x in self.members])

    def truncated_slope(self, s: Tensor) -> Tensor:
        return reduce(add, [x.truncated_slope(s) for x in self.members])

    def truncated_curvature(self, s: Tensor) -> Tensor:
        return reduce(add, [x.truncated_curvature(s) for x in self.members])

    def safe_distance(self, s: Tensor) -> Tensor:
        return reduce(torch.maximum, [x.safe_distance(s) for x in self.members])

    def operand_names(self) -> list[str]:
        return [f"{k}.{name}" for k, x in self._numbered() for name in x.operand_names()]

    def pair_table(self, name: str) -> Tensor:
        member, _, own = name.partition(".")
        return self.members[int(member)].pair_table(own)

    def with_operands(self, values: Mapping[str, Operand]) -> JoinedFormula:
        return self._with(
            x.with_operands({name: values[f"{k}.{name}"] for name in x.operand_names()})
            for k, x in self._numbered()
        )

    def bare(self) -> JoinedFormula:
        return self._with(x.bare() for x in self.members)

    def layout(self) -> tuple[Any, ...]:
        return tuple(x.layout() for x in self.members)

    def attributes(self) -> list[Any]:
        return [*super().attributes(), *(y for x in self.members for y in x.attributes())]

    def formula_key(self) -> tuple[Any, ...]:
        return tuple(x.formula_key() for x in self.members)

    def other_modules(self) -> list[nn.Module]:
        return [part for x in self.members for part in x.other_modules()]

    def _numbered(self) -> list[tuple[int, PairFormula]]:
        return list(enumerate(self.members))

    def _with(self, members: Any) -> JoinedFormula:
        twin = replaced(self, {})
        vars(twin)["_modules"] = {str(k): x for k, x in enumerate(members)}
        return twin


def members_of(first: tuple[P, Alike], others: Sequence[tuple[P, Alike]]) -> list[P]:
    """Return a formula and those of others with the same pairs, and tables of the same species.

    The answer must be the same where a step is traced, so no contents of tensors are compared.
    """
    pair, alike = first
    members, species = [pair], alike.species if _has_tables(pair) else None
    for other, x in others:
        tabled = _has_tables(other)
        if (
            other.box is pair.box
            and (other.cutoff, other.skin) == (pair.cutoff, pair.skin)
            and x.exclusions == alike.exclusions
            and not (tabled and species not in (None, x.species))
        ):
            members.append(other)
            species = x.species if tabled else species
    return members


def _has_tables(pair: PairFormula) -> bool:
    return any(kind_of(pair.pair_table(name)) == TABLE for name in pair.operand_names())
