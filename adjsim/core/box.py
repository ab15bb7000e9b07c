"""Periodic cells, orthogonal or tilted.

An orthogonal cell is given by ``(dim,)`` lengths, a tilted one by ``(dim, dim)`` rows. Rounding
fractional coordinates finds the nearest image if the image is closer than w/2, with w the smallest
distance between opposite faces: each fractional coordinate of a difference d shorter than w/2 has
the size ``|d . n_i| / w_i < 1/2``, with n_i the unit normal of a pair of faces and w_i their
distance. For skewed rows w may be arbitrarily small. So tilted cells are reduced first, to
the rows of the lattice with the largest possible w. These rows are dual to a Minkowski-reduced
basis of the reciprocal lattice: 1/w_i is the length of a reciprocal vector, and in up to three
dimensions the longest vector of such a basis is as short as possible (Nguyen and Stehle, ACM Trans.
Algorithms 5, 46 (2009)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import product
from operator import add, mul
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_tensor, outside_inference_mode, wrong_shape
from adjsim.core.coordinates import cross
from adjsim.core.derived import derived
from adjsim.core.typing import Array


def differences(x: Tensor) -> Tensor:
    """Compute q_i - q_j of all pairs, of shape ``(*batch, dim, atoms, atoms)``."""
    columns = x.transpose(-1, -2)
    return columns.unsqueeze(-1) - columns.unsqueeze(-2)


def perpendicular_widths(box: Tensor) -> Tensor:
    """Compute the distances between opposite faces of a cell, ``(dim,)``."""
    return box if box.ndim == 1 else inverse(box).square().sum(0).rsqrt()


def is_orthogonal(box: Tensor) -> bool:
    """Return whether a box, or the boxes of systems, have lengths alone."""
    return box.ndim == 1 or box.shape[-2] == 1


def rows_of(box: Tensor) -> Tensor:
    """Return the rows of a cell."""
    return torch.diag(box) if box.ndim == 1 else box


def volume(box: Tensor) -> Tensor:
    """Compute the volume of a cell."""
    if box.ndim == 1:
        return reduce(mul, box.unbind(0))
    if len(box) > 3:
        return torch.linalg.det(box).abs()
    rows = [row.unbind(0) for row in box.unbind(0)]
    return _dot(rows[0], _normals(rows)[0]).abs()


def inverse(rows: Tensor) -> Tensor:
    """Invert the rows of a cell of up to three dimensions, by operations that loops can contain."""
    columns = _fractions([row.unbind(0) for row in rows.unbind(0)])
    return torch.stack([torch.stack(column) for column in columns], -1)


# The skin of a neighbour list, as a share of the cutoff. Pairs whose functions cost more than the
# list have a smaller one. Measured for liquids of Lennard-Jones atoms, and for flexible water.
SKIN, COSTLY_SKIN = 0.14, 0.08
# A list is faster than all pairs for more than LISTED (n + LIST_COST) atoms, with n in reach of
# each, or for a number of atoms without a box. Measured, see benchmarks/README.md.
LISTED, LIST_COST, LISTED_WITHOUT_BOX = 1.1, 37.0, 512
# The skin of a list without a cutoff, which is never built again.
EVERYWHERE = 1e300


class Periodic(nn.Module):
    """The base class of potentials that may have a periodic box."""

    box: Tensor | None
    #: The largest distance of a pair, None without one, which a box has to be large enough for.
    cutoff: float | None = None
    skin: float | None = None
    #: The skin that is taken where none is given, as a share of the cutoff.
    skin_share: float = SKIN
    #: The share of all pairs that interact at some distance, all of which a list may hold.
    pair_share: float = 1.0

    def register_box(self, box: Array | None) -> None:
        """Store a box as it is given, and check it."""
        with outside_inference_mode():
            self.register_buffer("box", None if box is None else as_box(box))
            if self.box is not None:
                if self.box.requires_grad:
                    raise ValueError(
                        "box cannot require grad: give the box of an evaluation, "
                        "potential(position, box=box), for its derivative."
                    )
                checked_box(self.box, self.image_cutoff)

    def validate(self) -> None:
        """Refuse a box with which the potential could not have been made."""
        # Made with the reading, and again where the box or the cutoff has changed.
        _ = self.image_box

    @property
    def image_cutoff(self) -> float | None:
        """The distance up to which a pair has to have one image in the box."""
        return self.cutoff

    @derived("box", "image_cutoff")
    def image_box(self) -> Tensor | None:
        """The rows of the lattice of the box by which nearest images are found."""
        # A copy, since the box itself may be written into.
        return None if self.box is None else checked_box(self.box, self.image_cutoff).clone()

    @derived("box", "cutoff", "skin", "pair_share")
    def smallest_listed(self) -> int | None:
        """The smallest number of atoms of which a neighbour list is made; None: no list is."""
        return self.listed_from(1.0)

    def listed_from(self, times: float) -> int | None:
        """Return this number where a list takes so many times longer beside all pairs."""
        share = LISTED * times * self.pair_share
        if self.cutoff is None:
            return _smallest(share)
        if self.box is None:
            few = round(LISTED_WITHOUT_BOX * times)
            return few if self.pair_share == 1 else _smallest(share)
        dim, reach = len(self.box), self.cutoff + self.list_skin
        ball = math.pi ** (dim / 2) / math.gamma(dim / 2 + 1) * reach**dim
        return _smallest(share * ball / float(volume(self.box.detach())))

    @property
    def list_skin(self) -> float:
        """How far beyond the cutoff a neighbour list reaches."""
        if self.cutoff is None:
            return EVERYWHERE
        return self.skin_share * self.cutoff if self.skin is None else self.skin


def _smallest(share: float) -> int | None:
    return None if share >= 1 else math.floor(LISTED * LIST_COST / (1 - share)) + 1


def refuse_trained_box(module: nn.Module) -> None:
    """Refuse a box that requires grad where the gradient with respect to it would be lost."""
    for part in module.modules():
        if isinstance(part, Periodic) and part.box is not None and part.box.requires_grad:
            raise ValueError(
                f"the box of {type(part).__name__} requires grad, and forces have no derivative "
                "with respect to it here. Differentiate energies, potential(position, box=box), or "
                "detach() the box."
            )


def as_box(box: Array) -> Tensor:
    """Convert a box to float64."""
    return as_tensor("box", box).to(torch.float64)


def share_box(module: nn.Module) -> None:
    """Make all parts of a tree that have equal boxes hold one tensor."""
    boxes: list[Tensor] = []
    for part in module.modules():
        box = part._buffers.get("box")
        if box is not None:
            boxes.append(box)
            same = (x for x in boxes if x.shape == box.shape and torch.equal(x, box))
            part._buffers["box"] = next(same, box)


def refuse_other_boxes(parts: Iterable[nn.Module]) -> None:
    """Refuse parts of a sum whose boxes differ."""
    found = [part for part in parts if isinstance(getattr(part, "box", None), Tensor)]
    for part in found[1:]:
        known: Any = found[0].box
        box: Any = part.box
        if box is known:
            continue
        # Parts in several precisions have one box up to the rounding of the coarsest.
        dtype = min(box.dtype, known.dtype, key=lambda x: x.itemsize)
        rows, others = rows_of(box.to(dtype)), rows_of(known.to(box.device, dtype))
        if rows.shape != others.shape or not torch.equal(rows, others):
            raise ValueError(
                f"a sum has one box, and {type(found[0]).__name__} has {known.tolist()} where "
                f"{type(part).__name__} has {box.tolist()}. Make the parts with the same box, and "
                "write a new one into all of them."
            )


def checked_box(box: Array, cutoff: float | None) -> Tensor:
    """Convert a cell to float64, check it, and reduce it if it is tilted.

    The rows of a tilted cell may change; its lattice does not. With a cutoff of at most half the
    smallest perpendicular width of the reduced cell, rounding finds the nearest image of every pair
    within the cutoff, and no atom interacts with two images of another, since no vector of the
    lattice is shorter than the width.
    """
    given = as_box(box)
    cell = given.detach()
    if cell.ndim not in (1, 2) or (cell.ndim == 2 and cell.shape[0] != cell.shape[1]):
        raise wrong_shape("box", "(dim,) lengths or (dim, dim) rows", cell)
    smallest = float(cell.min() if cell.ndim == 1 else volume(cell))
    if not bool(torch.isfinite(cell).all()) or smallest <= 0:
        raise ValueError(f"box must have positive lengths and a volume; got {cell.tolist()}.")
    if cell.ndim == 2:
        if len(cell) > 3:
            raise ValueError(
                f"a tilted box has one to three dimensions; got {len(cell)}. Give (dim,) lengths."
            )
        integers = _reduction(cell)
        given = given if integers is None else integers @ given
        cell = given.detach()
    width = float(perpendicular_widths(cell).min())
    if cutoff is not None and cutoff > width / 2 * (1 + 1e-12):
        raise ValueError(
            f"cutoff {cutoff:g} is above half the smallest perpendicular width of the box, "
            f"{width / 2:g}: an atom would interact with two images of another. Use a smaller "
            "cutoff or a larger box."
        )
    return given


def _reduction(cell: Tensor) -> Tensor | None:
    """Find integers that take a cell to the rows of its lattice with the largest width, if any."""
    from ase.geometry import minkowski_reduce

    count = len(cell)
    periodic: Any = np.arange(3) < count
    reciprocal = np.zeros((3, 3))
    # Entry by entry, since the wrapper of a transform of torch.func has no storage.
    entries = np.array([float(x) for x in cell.flatten()])
    reciprocal[:count, :count] = np.linalg.inv(entries.reshape(count, count)).T
    # ASE compares lengths with an absolute tolerance, so the cell is given in units of its size.
    _, found = minkowski_reduce(reciprocal / np.abs(reciprocal).max(), periodic)
    # The transpose of the inverse takes the given rows to those dual to the reduced basis.
    integers = np.rint(np.linalg.inv(found[:count, :count]).T)
    if bool((np.abs(integers).sum(1) == 1).all()):
        return None
    return torch.from_numpy(integers).to(cell)


def nearest_image(parts: Sequence[Tensor], box: Tensor, *, exact: bool = True) -> list[Tensor]:
    """Move differences to the nearest image.

    The differences are one tensor ``(*batch, dim, ...)`` with the coordinates third from the end,
    or one tensor ``(*batch, 1, ...)`` for each coordinate. The box comes from :func:`checked_box`,
    or is such a box of each system from :meth:`~adjsim.core.strain.Strain.stretched`.
    In a tilted cell rounding finds the nearest image only within half the smallest width, which a
    cutoff guarantees; ``exact`` also searches the neighbouring images of the reduced cell.
    """
    dim = sum(part.shape[-3] for part in parts)
    if box.shape[-1] != dim:
        raise ValueError(f"box has {box.shape[-1]} dimensions and position {dim}.")
    box = box.to(parts[0].device)
    if is_orthogonal(box):
        columns = box[..., None, None] if box.ndim == 1 else box.transpose(-1, -2)[..., None]
        lengths = [columns] if len(parts) == 1 else list(columns.split(1, -3))
        return [
            d - x * torch.round(d.detach() * (1 / x)) for d, x in zip(parts, lengths, strict=True)
        ]
    planes = parts[0].split(1, -3) if len(parts) == 1 else parts
    moved = list(map(add, planes, _shifts([d.detach() for d in planes], box, exact)))
    return [torch.cat(moved, -3)] if len(parts) == 1 else moved


def _shifts(d: Sequence[Tensor], box: Tensor, exact: bool) -> list[Tensor]:
    """Compute the shifts of differences to their nearest image in a tilted cell, by coordinate.

    They are written in scalar entries of the cell, which a compiled loop over pairs can contain.
    """
    entries = box if box.ndim == 2 else box[..., None, None, None]
    axis = box.ndim - 2
    rows = [row.unbind(axis) for row in entries.unbind(axis)]
    integers = [-torch.round(_dot(d, fraction)) for fraction in _fractions(rows)]
    shift = [_dot(integers, column) for column in zip(*rows, strict=True)]
    if not exact:
        return shift
    near = list(map(add, d, shift))
    best, extra = _dot(near, near), [torch.zeros_like(x) for x in near]
    for offset in product((-1.0, 0.0, 1.0), repeat=len(rows)):
        step = [sum(map(mul, offset, column)) for column in zip(*rows, strict=True)]
        other = list(map(add, near, step))
        distance = _dot(other, other)
        closer = distance < best
        best = torch.where(closer, distance, best)
        extra = [torch.where(closer, y, x) for x, y in zip(extra, step, strict=True)]
    return list(map(add, shift, extra))


def _fractions(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Invert a cell: a difference times the i-th column is its i-th fractional coordinate."""
    normals = _normals(rows)
    size = _dot(rows[0], normals[0])
    return [[x / size for x in normal] for normal in normals]


def _normals(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Compute the normal of each pair of faces, as long as the area of a face."""
    if len(rows) == 1:
        return [[torch.ones_like(rows[0][0])]]
    if len(rows) == 2:
        return [[rows[1][1], -rows[1][0]], [-rows[0][1], rows[0][0]]]
    return [list(cross(rows[k - 2], rows[k - 1])) for k in range(3)]


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return reduce(add, map(mul, a, b))


def refuse_kept_boxes(copy: nn.Module, box: Tensor) -> None:
    """Refuse a copy of which a part has kept its own box."""
    for part in copy.modules():
        own = getattr(part, "box", box)
        if own is None or own is box:
            continue
        if not isinstance(own, Tensor) or own.shape != box.shape or not torch.equal(own, box):
            raise ValueError(
                f"{type(part).__name__} has a box that potential(position, box=...) cannot "
                "replace: register it as a buffer with the name 'box', and read it there."
            )
