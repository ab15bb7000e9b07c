"""Neighbour lists of iterations that a GPU repeats on fixed memory.

A list is in memory with room for more pairs. The host builds it between iterations, at the
positions that the last iteration evaluated. Each evaluation notes on the device how far atoms have
moved since; the host reads one number for all lists after some iterations. These hold if no atom
has moved by more than half of the skin, and the box is the same. Otherwise they are taken back and
run again with new lists.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor

from adjsim.core.neighbour_list import NeighbourList

# A list has room for so many times its pairs, since later ones have more.
ROOM = 1.25
# Iterations between two looks at the lists, at first and at most.
FIRST, MOST = 4, 64
# A list is built again once atoms have moved by this share of what it allows.
EARLY = 0.5


class FixedList:
    """The list of one evaluation of an iteration: neighbours of all atoms, and where each starts.

    Attributes:
        neighbours, starts: atoms in the order of their numbers, and ``(systems * atoms + 1,)``.
        share: the square of the largest distance that an atom has moved since the list was built,
            over the square of half of the skin; infinite while it is built, and in another box.
        stale: whether the iteration was captured with other memory.
    """

    def __init__(self, made: NeighbourList, position: Tensor) -> None:
        box, exclusions = (None if x is None else x.clone() for x in (made.box, made.exclusions))
        self._made = replace(made, box=box, exclusions=exclusions)
        self._latest, self._built = position.clone(), position.clone()
        self.share = position.new_zeros(())
        self.neighbours = self.starts = torch.zeros(0, dtype=torch.int64, device=position.device)
        self.build()
        self.stale = False

    def build(self) -> None:
        """Build the list at the positions that were evaluated last."""
        near = self._made.built_at(self._latest)
        starts = near.starts(self._latest.shape[:-1].numel())
        self.share.fill_(torch.inf)
        if len(near.j) > len(self.neighbours) or len(starts) != len(self.starts):
            self.stale = True
            self.neighbours = near.j.new_zeros(int(ROOM * len(near.j)) + 1)
            self.starts = torch.zeros_like(starts)
        self.neighbours[: len(near.j)] = near.j
        self.starts.copy_(starts)
        self._built.copy_(self._latest)
        self.share.zero_()

    def note(self, made: NeighbourList, position: Tensor) -> Tensor:
        """Note an evaluation, on the device; return which systems have finite positions."""
        for own, x in ((self._made.box, made.box), (self._made.exclusions, made.exclusions)):
            if own is not None and x is not None:
                self.share.masked_fill_((own != x).any(), torch.inf)
                own.copy_(x)
        self._latest.copy_(position)
        finite = torch.isfinite(position).flatten(1).all(1)
        moved = (position - self._built).square().sum(-1)
        # Systems that are not finite have no pairs.
        largest = moved.masked_fill(~finite[:, None], 0.0).amax()
        # Without a skin a list holds where it was built.
        share = (largest / (0.5 * made.skin) ** 2).masked_fill(largest == 0, 0.0)
        torch.maximum(self.share, share, out=self.share)
        return finite


class LoopLists:
    """The lists of one iteration, in the order in which it evaluates them."""

    def __init__(self) -> None:
        self._lists, self._next, self._every = list[FixedList](), 0, FIRST

    @contextmanager
    def evaluated(self) -> Generator[None, None, None]:
        """Make a context in which an iteration is run or captured."""
        self._next, token = 0, _present.set(self)
        try:
            yield
        finally:
            _present.reset(token)

    def rows(self, made: NeighbourList, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what :func:`listed_rows` returns, of the next evaluation of the iteration.

        The first time an iteration is run, its lists are built.
        """
        if self._next == len(self._lists):
            self._lists.append(FixedList(made, position))
        fixed, self._next = self._lists[self._next], self._next + 1
        return fixed.neighbours, fixed.starts, fixed.note(made, position)

    def repeat(
        self,
        count: int,
        carried: Sequence[Tensor],
        replay: Callable[[], None],
        capture: Callable[[], None],
    ) -> None:
        """Run ``count`` iterations of a carry in fixed memory.

        Args:
            replay: runs an iteration.
            capture: runs an iteration and captures it anew, where lists have other memory.
        """
        tries = 0
        while count and self._lists:
            before = [x.clone() for x in carried]
            if any(x.stale for x in self._lists):
                capture()
                for x in self._lists:
                    x.stale = False
                _take_back(carried, before)
            steps = min(count, self._every)
            for _ in range(steps):
                replay()
            moved = self._moved()
            if moved <= 1:
                count, tries = count - steps, 0
                if moved < EARLY / 2 and steps == self._every:
                    self._every = min(2 * steps, MOST)
                if not count or moved <= EARLY:
                    continue
            else:
                tries += 1
                if tries > MOST + len(self._lists):
                    raise RuntimeError(
                        "the neighbour lists of a compiled step do not settle: leave compile=True "
                        "out, and please report it."
                    )
                _take_back(carried, before)
                if steps > 1:
                    self._every = max(1, steps // 2)
                    # The positions of the first iteration, whose forces may lack pairs.
                    replay()
                    _take_back(carried, before)
            for x in self._lists:
                x.build()
        for _ in range(count):
            replay()

    def _moved(self) -> float:
        """Return the largest share of what lists allow, by one number that the host reads."""
        return float(torch.stack([x.share.double() for x in self._lists]).amax().sqrt())


def _take_back(carried: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for x, old in zip(carried, before, strict=True):
        x.copy_(old)


_present: ContextVar[LoopLists | None] = ContextVar("present", default=None)


def listed_rows(made: NeighbourList, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the neighbours of all atoms, where those of each start, and which systems are finite.

    In an iteration that is repeated they are in fixed memory.

    Args:
        position: ``(systems, atoms, dim)``.
    """
    lists = _present.get()
    if lists is not None:
        return lists.rows(made, position)
    near = made.pairs(position)
    return near.j, near.starts(position.shape[:-1].numel()), near.finite
