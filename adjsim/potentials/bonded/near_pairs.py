"""Pairs of a point of one group and one of another that are near, in rows of a fixed length.

Each system of a batch has a row of pairs in ascending order, so sums over a row have a fixed order
and are a function of the position. A row is filled up with a pair that is marked as absent. A
compiled loop holds rows of the same length in all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.core.box import nearest_image
from adjsim.core.layout import is_tracing
from adjsim.core.neighbour_list import NearestImages
from adjsim.core.operators import operator, shapes_of
from adjsim.core.state import in_transform
from adjsim.core.strain import Strain


class Reach(NamedTuple):
    """What a list of pairs of two groups is made for.

    Attributes:
        exclusions: ``(n, 2)``, pairs of a point of each group that are left out; None: none are.
        filling: the pair with which rows are filled up.
        capacity: the pairs of each system in a compiled loop.
    """

    cutoff: float
    skin: float
    box: Tensor | None
    exclusions: Tensor | None
    filling: tuple[int, int]
    capacity: int | None


class Gathered:
    """The linear map x -> x[index] along the last axis, with an index of each system."""

    def __init__(self, index: Tensor, count: int) -> None:
        self.index, self.count = index, count

    def __call__(self, x: Tensor) -> Tensor:
        """Select ``(*batch, rows, pairs)`` from ``(*batch, rows, count)`` or ``(count,)``."""
        rows = x if x.ndim > 1 else x.unsqueeze(0)
        lead = torch.broadcast_shapes(rows.shape[:-2], self.index.shape[:-2])
        index = self.index.expand(*lead, rows.shape[-2], self.index.shape[-1])
        return rows.expand(*lead, *rows.shape[-2:]).gather(-1, index)

    def transpose(self, x: Tensor, length: int) -> Tensor:
        """Sum ``(*batch, rows, pairs)`` to ``(*batch, rows, length)``, of at least ``count``."""
        none = torch.zeros((*x.shape[:-1], length), dtype=x.dtype, device=x.device)
        return none.scatter_add(-1, self.index.expand_as(x), x)


def find_near(
    first: Tensor, second: Tensor, reach: Reach, strain: Strain | None
) -> tuple[Gathered, Gathered, Tensor]:
    """Find the pairs of points ``(*batch, n, dim)``, and which entries are present.

    At a strain, the box of each system is stretched.
    """
    cutoff, skin, box, exclusions, filling, capacity = reach
    value, rows = (None, None) if strain is None else strain
    points = first.detach(), second.detach()
    box, value, rows = (None if x is None else x.detach() for x in (box, value, rows))
    known = *points, box, exclusions, value, rows, cutoff, skin, list(filling)
    if is_tracing():
        if capacity is None or first.device.type != "cpu":
            raise ValueError(
                "a compiled loop holds a fixed number of pairs of a donor and an acceptor, and on "
                "the CPU alone: set capacity of the CustomHydrogenBond, such as to 1.5 times its "
                f"near_pairs(position), or use compile=False; got capacity={capacity} on "
                f"{first.device}."
            )
        found = near_pairs(*known, capacity)
    elif in_transform() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        raise ValueError(
            "a neighbour list depends on the values of positions, which transforms of torch.func "
            "and torch.compile hide: use plain autograd."
        )
    else:
        found = _near(*known, None)
    i, j, present = found
    return Gathered(i, first.shape[-2]), Gathered(j, second.shape[-2]), present


def _near(
    first: Tensor,
    second: Tensor,
    box: Tensor | None,
    exclusions: Tensor | None,
    strain: Tensor | None,
    rows: Tensor | None,
    cutoff: float,
    skin: float,
    filling: Sequence[int],
    capacity: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of each system, ``(*batch, 1, pairs)``, and which are present.

    With a capacity, as in a step of a compiled loop, there are so many entries.
    """
    points, split, reach = torch.cat([first, second], -2), first.shape[-2], cutoff
    if strain is not None and box is not None:
        points, reach = Strain(strain, rows).at_rest(points, cutoff)
    *batch, count, dim = points.shape
    excluded = None if exclusions is None else exclusions + exclusions.new_tensor([0, split])
    i, j, _, finite = NearestImages(reach, skin, box, excluded, split).pairs(points)
    flat = points.reshape(-1, dim)
    d = (flat.index_select(0, i) - flat.index_select(0, j)).T.unsqueeze(-1)
    if box is not None:
        (d,) = nearest_image([d], box.to(d))
    # The margin is for rounding: the distances of the pairs themselves decide.
    farthest = float(flat.nan_to_num(0, 0, 0).abs().max()) if len(flat) else 0.0
    margin = 16 * torch.finfo(d.dtype).eps * (farthest + reach)
    near = ((d * d).sum(0).squeeze(-1) < (reach + margin) ** 2).nonzero().squeeze(-1)
    i, j = i.index_select(0, near), j.index_select(0, near)
    system = i // count
    counts = torch.bincount(system, minlength=finite.numel())
    largest = max(counts.tolist(), default=0)
    most = max(largest, 1) if capacity is None else capacity
    if largest > most:
        raise ValueError(
            f"{largest} pairs of a donor and an acceptor within the cutoff do not fit "
            f"into capacity={capacity}: set a larger capacity of the CustomHydrogenBond."
        )
    place = torch.arange(len(i), device=i.device) - (counts.cumsum(0) - counts)[system]
    found = [torch.full((len(counts), most), k, device=i.device) for k in filling]
    found[0][system, place], found[1][system, place] = i % count, j % count - split
    # All entries of a system with a point that is not finite have this point, and so its energy.
    broken, worst = (~flat.isfinite().all(-1)).reshape(len(counts), count).long().max(-1)
    for side, start, stop in ((found[0], 0, split), (found[1], split, count)):
        here = (broken > 0) & (worst >= start) & (worst < stop)
        side[here] = (worst[here] - start).unsqueeze(-1)
    present = torch.arange(most, device=i.device) < counts.unsqueeze(-1)
    present |= ~finite.reshape(-1, 1)
    one, other, there = (x.reshape(*batch, 1, most) for x in (*found, present))
    return one, other, there


near_pairs = operator("near_pairs")(_near)


@shapes_of(near_pairs)
def _(first: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*first.shape[:-2], 1, rest[-1])
    whole = [first.new_empty(shape, dtype=torch.int64) for _ in range(2)]
    return whole[0], whole[1], first.new_empty(shape, dtype=torch.bool)
