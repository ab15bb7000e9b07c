"""Parts of a sum over the same pairs, which are joined so that one pass computes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn

from adjsim.core.derived import MADE, Made, are
from adjsim.potentials.evaluated import Evaluated

# What is equal for the same exclusions, and for the same species.
Digests: TypeAlias = tuple[Any, Any]


class Alike(NamedTuple):
    """The numbers of the first parts of a sum with the same exclusions, and the same species."""

    exclusions: int
    species: int


class ListedPairs(Protocol):
    """A sum over the pairs of a neighbour list."""

    def joined(
        self, alike: Alike, others: Sequence[Any], position: Tensor, /
    ) -> tuple[list[Any], nn.Module]:
        """Return sums over the same pairs, of this one and others, and what computes them at once.

        Others are given as pairs of a sum and what it is alike to.
        """
        ...


def numbered(digests: Sequence[Digests | None]) -> tuple[Alike | None, ...]:
    """Number the exclusions and species of parts, so that the same ones have the same number.

    Digests follow the contents of tensors, which compiled loops read anew: another set of
    exclusions, which the parts share as before, runs in the same loop.
    """
    columns = [[None if x is None else x[k] for x in digests] for k in (0, 1)]
    return tuple(
        None if x is None else Alike(*(column.index(column[k]) for column in columns))
        for k, x in enumerate(digests)
    )


def with_joined_pairs(
    whole: nn.Module, parts: Iterable[nn.Module], alike: Sequence[Alike | None], position: Tensor
) -> list[nn.Module]:
    """Return the parts of a sum, of which those over the same listed pairs are joined.

    A copy of the whole that a reading has made keeps what it has joined.
    """
    given = list(parts)
    split = [
        part.listed_pairs(position) if isinstance(part, Evaluated) else (None, [part])
        for part in given
    ]
    sums = [
        (pairs, x)
        for (pairs, _), x in zip(split, alike, strict=True)
        if pairs is not None and x is not None
    ]
    if len(sums) < 2:
        return given
    made: Made | None = vars(whole).get(MADE)
    present = [pairs for pairs, _ in sums]
    known: Any = None if made is None else made.evaluators.get(ListedPairs)
    if known is None or not are(known[0], present):
        first: ListedPairs = present[0]
        known = present, first.joined(sums[0][1], sums[1:], position)
        if made is not None:
            made.evaluators[ListedPairs] = known
    members, joint = known[1]
    if len(members) < 2:
        return given
    found = [joint]
    for part, (pairs, rest) in zip(given, split, strict=True):
        found += rest if any(pairs is x for x in members) else [part]
    return found
