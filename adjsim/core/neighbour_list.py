"""The neighbour list: pairs of atoms that are near, found again when atoms have moved.

A list holds the pairs within a cutoff and a skin, found by a tree, or by cells on the device that
holds the positions (:mod:`adjsim.core.cells_on_device`). It is built again once the two largest
displacements of a system since the list was built sum to the skin. Until then it contains
all pairs within the cutoff, so a caller that selects these pairs, in the order of the list, has a
result that is a function of the position, to the last bit. A list is therefore a cache and never a
state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adjsim.core.arguments import outside_inference_mode
from adjsim.core.box import nearest_image, perpendicular_widths, rows_of
from adjsim.core.cells_on_device import pairs_in_cells

# Lists are kept up to this number and to this number of pairs, unless one has more.
KEPT, PAIRS = 16, 2**23
# A grid of cells is made for so many axes; a tree is for any number.
MOST_AXES = 3


class NeighbourPairs(NamedTuple):
    """Pairs of atoms, sorted by the first atom, the second one and the image.

    Each pair is in both orders, unless the list is of two groups.

    Attributes:
        i, j: ``(pairs,)`` int64, the two atoms, numbered one system after another.
        shifts: ``(pairs, dim)``, so that ``q_i - q_j + shift`` is the difference of a pair; None
            where a pair is listed once, for whichever of its images is nearest.
        finite: ``(*batch,)``, which systems have finite positions. The others have no pairs.
    """

    i: Tensor
    j: Tensor
    shifts: Tensor | None
    finite: Tensor

    def starts(self, atoms: int) -> Tensor:
        """Return the numbers of the first pairs of all atoms, and the number of all pairs."""
        return torch.searchsorted(self.i, torch.arange(atoms + 1, device=self.i.device))


@dataclass(frozen=True)
class _Build:
    key: Any
    settings: list[Tensor | None]
    position: Tensor
    pairs: NeighbourPairs


# The lists that have been built, the newest first.
_builds: list[_Build] = []


@dataclass(frozen=True, eq=False)
class NeighbourList(ABC):
    """The pairs of atoms that may be within a cutoff, and a skin beyond it.

    Attributes:
        box: a box from :func:`~adjsim.core.box.checked_box`; None: no box.
        exclusions: ``(n, 2)``, pairs of atoms that are left out; None: no pairs are.
        split: of :class:`NearestImages` alone, the first atom of a second group. Pairs then have i
            in the first group and j in the second, and are listed in this order alone. None: there
            is one group.
    """

    cutoff: float
    skin: float
    box: Tensor | None = None
    exclusions: Tensor | None = None
    split: int | None = None

    def pairs(self, position: Tensor) -> NeighbourPairs:
        """Return pairs of positions ``(*batch, atoms, dim)``, among them all within the cutoff."""
        position, finite = _finite(position)
        reach = self.cutoff + self.skin
        settings = self.box, self.exclusions
        shapes = [None if x is None else x.shape for x in settings]
        key = type(self), position.shape, position.dtype, position.device, reach, shapes, self.split
        old: _Build | None = None
        for build in list(_builds):
            if build.key != key:
                continue
            same = (finite == build.pairs.finite).all()
            for x, y in zip(settings, build.settings, strict=True):
                if x is not None:
                    same = same & (x == y).all().to(same.device)
            # The host reads this number alone.
            moved = float(_largest_approach(position, build.position).where(same, math.inf))
            if moved <= self.skin:
                return build.pairs
            if moved <= 4 * self.skin:
                old = build  # The list of the same run, which does not need it again.
        with outside_inference_mode():
            copies = [None if x is None else x.clone() for x in settings]
            found = _Build(key, copies, position.clone(), self._build(position, finite, reach))
        kept = [found, *(build for build in _builds if build is not old)][:KEPT]
        while len(kept) > 1 and sum(len(build.pairs.i) for build in kept) > PAIRS:
            kept.pop()
        # One assignment: another thread loses a list at most, which it builds again.
        _builds[:] = kept
        return found.pairs

    def built_at(self, position: Tensor) -> NeighbourPairs:
        """Return the pairs of a list that is built at these positions."""
        return self._build(*_finite(position), self.cutoff + self.skin)

    def _build(self, position: Tensor, finite: Tensor, reach: float) -> NeighbourPairs:
        *_, atoms, dim = position.shape
        if position.numel():
            # Differences of positions far from the box are rounded.
            reach += 16 * torch.finfo(position.dtype).eps * float(position.abs().max())
        none = torch.empty(0, dtype=torch.int64, device=position.device)
        found: list[tuple[Tensor, ...]] = [(none, none, position.new_zeros(0, dim))]
        systems = position.reshape(finite.numel(), atoms, dim)
        if position.device.type != "cpu" and dim <= MOST_AXES and position.numel():
            i, j, *shift = self._search_on_device(systems, reach, finite)
            return NeighbourPairs(i, j, shift[0] if shift else None, finite)
        for k, q in enumerate(systems):
            if atoms and bool(finite.flatten()[k]):
                i, j, *shift = self._search(q, reach)
                found.append((i + k * atoms, j + k * atoms, *shift))
        i, j, *shifts = (torch.cat(parts) for parts in zip(*found, strict=False))
        return NeighbourPairs(i, j, shifts[0] if shifts else None, finite)

    @abstractmethod
    def _search(self, q: Tensor, reach: float) -> tuple[Tensor, ...]:
        """Find the pairs of one system within a reach, and their shifts if they have any."""

    @abstractmethod
    def _search_on_device(self, q: Tensor, reach: float, finite: Tensor) -> tuple[Tensor, ...]:
        """Find these pairs of all finite systems ``(systems, atoms, dim)`` on their device."""


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
        if self.split is not None:
            between = (i < self.split) & (j >= self.split)
            return i[between], j[between]
        i, j = torch.cat([i, j]), torch.cat([j, i])
        order = torch.argsort(i * atoms + j)
        return i[order], j[order]

    def _search_on_device(self, q: Tensor, reach: float, finite: Tensor) -> tuple[Tensor, Tensor]:
        atoms = q.shape[1]
        if self.box is not None:
            reach = min(reach, _farthest(self.box))
        i, j, _ = pairs_in_cells(q, self.box, reach, finite)
        numbers = (i * atoms + j % atoms).sort().values
        kept = numbers // atoms % atoms != numbers % atoms
        # Several images of a pair may be within a reach beyond half the width.
        kept[1:] &= numbers.diff() > 0
        if self.exclusions is not None:
            pairs = torch.cat([self.exclusions, self.exclusions.flip(-1)])
            kept &= ~torch.isin(numbers % atoms**2, pairs[:, 0] * atoms + pairs[:, 1])
        if self.split is not None:
            kept &= (numbers // atoms % atoms < self.split) & (numbers % atoms >= self.split)
        numbers = numbers[kept]
        i = numbers // atoms
        return i, numbers % atoms + i // atoms * atoms


class AllImages(NeighbourList):
    """Each pair once for each image within the reach, also of an atom itself, for any cutoff."""

    def _search(self, q: Tensor, reach: float) -> tuple[Tensor, Tensor, Tensor]:
        i, j, n = _with_images(q.detach().double().cpu().numpy(), self.box, reach)
        other = (i != j) | (n != 0).any(1)
        i, j, n = i[other], j[other], n[other]
        order = np.lexsort((*n.T[::-1], j, i))
        i, j, n = (torch.from_numpy(x[order]).to(q.device) for x in (i, j, n))
        return i, j, self._shifts(n, q)

    def _search_on_device(
        self, q: Tensor, reach: float, finite: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        i, j, n = pairs_in_cells(q, self.box, reach, finite)
        order = ((i != j) | (n != 0).any(1)).nonzero().squeeze(-1)
        for key in (*n.unbind(-1)[::-1], j, i):
            order = order[key[order].argsort(stable=True)]
        return i[order], j[order], self._shifts(n[order], q)

    def _shifts(self, n: Tensor, q: Tensor) -> Tensor:
        shift = torch.zeros_like(n, dtype=q.dtype)
        if self.box is not None:
            rows = rows_of(self.box).to(q)
            # Products and sums are elementwise, so that a shift has the same bits wherever it is in
            # the list.
            for number, row in zip(n.T, rows, strict=True):
                shift = shift - number.unsqueeze(-1) * row
        return shift


def _finite(position: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions and which systems are finite; atoms of the others are at the origin."""
    position = position.detach()
    finite = torch.isfinite(position).flatten(-2).all(-1)
    return torch.where(finite[..., None, None], position, 0.0), finite


def _largest_approach(one: Tensor, other: Tensor) -> Tensor:
    """Return by how much two atoms of a system may have come closer between two positions."""
    if not one.numel():
        return one.new_zeros(())
    moved = (one - other).norm(dim=-1)
    return moved.topk(min(2, moved.shape[-1])).values.sum(-1).max()


def _farthest(cell: Tensor) -> float:
    """Return the sum of the edges of a cell: no nearest image is farther."""
    return float(rows_of(cell).norm(dim=1).sum())


def pairs_within(q: Tensor, cell: Tensor | None, radius: float) -> tuple[Tensor, Tensor]:
    """Find the pairs i<j, sorted, whose nearest images are within a radius of any size.

    The search runs on the CPU, in float64. Positions ``(atoms, dim)`` are finite, and may be
    outside the box, which is one from :func:`~adjsim.core.box.checked_box` or None.
    """
    points = q.detach().double().cpu().numpy()
    if cell is not None:
        radius = min(radius, _farthest(cell))
    if cell is None:
        pairs = _tree(points).query_pairs(radius, output_type="ndarray")
    elif cell.ndim == 1:
        lengths = cell.cpu().numpy()
        wrapped = points - lengths * np.floor(points / lengths)
        # Rounding takes a coordinate near a face beyond it, which the tree refuses.
        wrapped[(wrapped < 0) | (wrapped >= lengths)] = 0.0
        tree = _tree(wrapped, boxsize=lengths)
        pairs = tree.query_pairs(radius, output_type="ndarray")
    else:
        i, j, _ = _with_images(points, cell, radius)
        pairs = np.stack([i, j], 1)[i < j]
    numbers = np.sort(pairs[:, 0] * len(points) + pairs[:, 1])
    # In a tilted cell several images of a pair may be within a radius beyond half the width.
    numbers = numbers[np.diff(numbers, prepend=-1) > 0]
    i, j = torch.from_numpy(np.stack(np.divmod(numbers, len(points)))).to(q.device)
    return i, j


def closest_atoms(q: Tensor, cell: Tensor | None) -> tuple[int, int, float]:
    """Find the two closest atoms of one system ``(atoms, dim)``, for an error message.

    In a periodic cell the search is in fractions of the cell. Atoms at one place are always found.
    """
    points, size = q.detach().double().cpu().numpy(), None
    if cell is not None:
        points, size = points @ np.linalg.inv(rows_of(cell).cpu().numpy()), 1.0
        points = points - np.floor(points)
        # Rounding takes a small negative coordinate to the upper face, which the tree refuses.
        points[points >= 1] = 0.0
    found = _tree(points, boxsize=size).query(points, k=2)
    distances, others = (np.asarray(part) for part in found)
    i = int(distances[:, 1].argmin())
    j = next(int(k) for k in others[i].tolist() if k != i)
    d = (q[i] - q[j]).detach().double().cpu().reshape(-1, 1, 1)
    if cell is not None:
        (d,) = nearest_image([d], cell.cpu())
    return min(i, j), max(i, j), float(d.norm())


def _with_images(points: np.ndarray, cell: Tensor | None, radius: float) -> list[np.ndarray]:
    """Find i, j and n of all pairs with ``|q_j + n cell - q_i|`` at most the radius.

    A pair occurs in both orders, an atom is paired with itself too.
    """
    whole = np.zeros_like(points)
    if cell is None:
        images, owners, offsets = points, np.arange(len(points)), whole
    else:
        rows = rows_of(cell).cpu().numpy()
        fractions = points @ np.linalg.inv(rows)
        whole = np.floor(fractions)
        margin = radius / perpendicular_widths(cell).cpu().numpy()
        near, owners, offsets = _images(fractions - whole, margin)
        points, images = (fractions - whole) @ rows, near @ rows
    found = _tree(points).sparse_distance_matrix(_tree(images), radius, output_type="ndarray")
    i, image = found["i"], found["j"]
    j = owners[image]
    return [i, j, np.rint(offsets[image] + whole[i] - whole[j]).astype(np.int64)]


def _images(fractions: np.ndarray, margin: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return images in fractions of a cell up to a margin, the atom of each, and its move."""
    found: list[tuple[np.ndarray, ...]] = []
    for offset in product(*(range(-math.ceil(x), math.ceil(x) + 1) for x in margin)):
        moved = fractions + np.array(offset, dtype=np.float64)
        # A small excess keeps images that rounding would put beyond the margin.
        near = ((moved >= -margin - 1e-9) & (moved <= 1 + margin + 1e-9)).all(1)
        atoms = np.flatnonzero(near)
        found.append((moved[near], atoms, np.tile(offset, (len(atoms), 1))))
    return tuple(map(np.concatenate, zip(*found, strict=True)))


def _tree(points: np.ndarray, boxsize: Any = None) -> Any:
    from scipy.spatial import KDTree

    return KDTree(points, boxsize=boxsize)
