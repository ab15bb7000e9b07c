"""The neighbour list: pairs of atoms that are near, found again when atoms have moved.

A list holds the pairs within a cutoff and a skin. It is built again once the two largest
displacements of a system since the list was built sum to the skin. Until then it contains all pairs
within the cutoff, so a caller that selects these pairs, in the order of the list, has a result that
is a function of the position, to the last bit. A list is therefore a cache and never a state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.core.arguments import outside_inference_mode
from adjsim.core.box import rows_of
from adjsim.core.neighbour_search import images_within, pairs_within

# Lists are kept up to this number and to this number of pairs, unless one has more.
KEPT, PAIRS = 16, 2**23


class NeighbourPairs(NamedTuple):
    """Pairs of atoms, each in both orders, sorted by the first atom, the second one and the image.

    Atoms are numbered one system after another.

    Attributes:
        i, j: ``(pairs,)`` int64, the first and the second atom.
        shifts: ``(pairs, dim)``, so that ``q_i - q_j + shift`` is the difference of a pair; None
            where a pair is listed once, for whichever of its images is nearest.
        finite: ``(*batch,)``, which systems have finite positions. The others have no pairs.
    """

    i: Tensor
    j: Tensor
    shifts: Tensor | None
    finite: Tensor


@dataclass(frozen=True)
class _Build:
    key: Any
    exclusions: Tensor | None
    position: Tensor
    pairs: NeighbourPairs


# The lists that have been built, the newest first.
_builds: list[_Build] = []


@dataclass(frozen=True, eq=False)
class NeighbourList(ABC):
    """The pairs of atoms that may be within a cutoff.

    Attributes:
        cutoff: the largest distance of a pair.
        skin: how far beyond the cutoff the list reaches.
        box: a box from :func:`~adjsim.core.box.checked_box`; None: no box.
        exclusions: ``(n, 2)``, pairs of atoms that are left out; None: no pairs are.
    """

    cutoff: float
    skin: float
    box: Tensor | None = None
    exclusions: Tensor | None = None

    def pairs(self, position: Tensor) -> NeighbourPairs:
        """Return pairs of positions ``(*batch, atoms, dim)``, among them all within the cutoff."""
        position = position.detach()
        finite = torch.isfinite(position).flatten(-2).all(-1)
        # Atoms of systems that are not finite stay where they are.
        position = torch.where(finite[..., None, None], position, 0.0)
        cell = None if self.box is None else tuple(self.box.flatten().tolist())
        whole, reach = tuple(finite.flatten().tolist()), self.cutoff + self.skin
        place = position.shape, position.dtype, position.device
        key = (type(self), *place, reach, cell, whole)
        old: _Build | None = None
        for build in list(_builds):
            if build.key != key or not self._excludes(build):
                continue
            moved = _largest_approach(position, build.position)
            if moved <= self.skin:
                return build.pairs
            if moved <= 4 * self.skin:
                old = build  # The list of the same run, which does not need it again.
        with outside_inference_mode():
            excluded = None if self.exclusions is None else self.exclusions.clone()
            found = _Build(key, excluded, position.clone(), self._build(position, finite, reach))
        kept = [found, *(build for build in _builds if build is not old)][:KEPT]
        while len(kept) > 1 and sum(len(build.pairs.i) for build in kept) > PAIRS:
            kept.pop()
        # One assignment: another thread loses a list at most, which it builds again.
        _builds[:] = kept
        return found.pairs

    def _excludes(self, build: _Build) -> bool:
        """Return whether a list leaves out these exclusions and no others."""
        if self.exclusions is None or build.exclusions is None:
            return self.exclusions is build.exclusions
        return torch.equal(self.exclusions, build.exclusions)

    def _build(self, position: Tensor, finite: Tensor, reach: float) -> NeighbourPairs:
        *_, atoms, dim = position.shape
        if position.numel():
            # Differences of positions far from the box are rounded.
            reach += 16 * torch.finfo(position.dtype).eps * float(position.abs().max())
        none = torch.empty(0, dtype=torch.int64, device=position.device)
        found: list[tuple[Tensor, ...]] = [(none, none, position.new_zeros(0, dim))]
        for k, q in enumerate(position.reshape(finite.numel(), atoms, dim)):
            if atoms and bool(finite.flatten()[k]):
                i, j, *shift = self._search(q, reach)
                found.append((i + k * atoms, j + k * atoms, *shift))
        i, j, *shifts = (torch.cat(parts) for parts in zip(*found, strict=False))
        return NeighbourPairs(i, j, shifts[0] if shifts else None, finite)

    @abstractmethod
    def _search(self, q: Tensor, reach: float) -> tuple[Tensor, ...]:
        """Find the pairs of one system within a reach, and their shifts if they have any."""


class NearestImages(NeighbourList):
    """Each pair once, for a cutoff of at most half the smallest width of the box."""

    def _search(self, q: Tensor, reach: float) -> tuple[Tensor, Tensor]:
        atoms = len(q)
        i, j = pairs_within(q, self.box, reach)
        if self.exclusions is not None:
            # Values that are written later need not be in order.
            low, high = self.exclusions.sort(-1).values.unbind(-1)
            allowed = ~torch.isin(i * atoms + j, low * atoms + high)
            i, j = i[allowed], j[allowed]
        i, j = torch.cat([i, j]), torch.cat([j, i])
        order = torch.argsort(i * atoms + j)
        return i[order], j[order]


class AllImages(NeighbourList):
    """Each pair once for each of its images within the reach, and atoms with images of their own.

    The cutoff may be larger than the box.
    """

    def _search(self, q: Tensor, reach: float) -> tuple[Tensor, Tensor, Tensor]:
        i, j, n = images_within(q, self.box, reach)
        shift = torch.zeros_like(n, dtype=q.dtype)
        if self.box is not None:
            rows = rows_of(self.box).to(q)
            # Products and sums are elementwise, so that a shift has the same bits wherever it is in
            # the list.
            for number, row in zip(n.T, rows, strict=True):
                shift = shift - number.unsqueeze(-1) * row
        return i, j, shift


def _largest_approach(one: Tensor, other: Tensor) -> float:
    """Return by how much two atoms of a system may have come closer between two positions."""
    if not one.numel():
        return 0.0
    moved = (one - other).norm(dim=-1)
    return float(moved.topk(min(2, moved.shape[-1])).values.sum(-1).max())
