"""Brownian paths, whose increments over any interval are drawn again instead of stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.core.arguments import as_number, as_tensor, describe_type
from adjsim.core.noise import ELEMENTS, FROM_TILES, SEED_BITS, STEPS, Draw, Noise
from adjsim.core.tiles_on_device import normal_tiles

# The numbers of a span of steps from which a GPU draws them, as it draws those of seeds. A step
# takes about two numbers an entry.
MANY = FROM_TILES * STEPS * ELEMENTS // 2
# The numbers of a span that are drawn at a time: two gigabytes with the halves of intervals.
MOST = 2**26
CPU = torch.device("cpu")
# Normal numbers of all entries, by level and interval.
Drawn = dict[tuple[int, int], Tensor]
# Intervals of 2^TOP tol are independent; shorter ones are parts of them.
TOP = 32
# How far from a multiple of tol, as a part of tol, a time may be.
ROUNDING = 1e-6


@dataclass(frozen=True)
class BrownianPath:
    """A Brownian path that can be refined: the same for every step size, method and direction.

    Given as the ``generator`` of :func:`~adjsim.simulate`, it drives a run with its increments
    W(t + dt) - W(t), so runs with other steps, forward or backward in time, follow one path. The
    path is a function of (seed, tol, entry, t) alone, and does not depend on the size of the batch.
    On the grid of multiples of ``tol``, intervals of 2^32 tol have independent increments, and the
    increments of the halves of an interval of length h with the increment D are those of the
    Brownian bridge::

        W(t + h/2) - W(t) = D/2 + (h/4)^(1/2) xi        xi ~ N(0, 1)

    where xi comes from a counter-based generator (Philox) at the counter of the interval (Lévy's
    construction). A step of 2^n tol costs about two numbers an entry, another step about
    4 log2(dt/tol).

    Fixed steps without a path to share cost less with a seed, whose numbers belong to steps and not
    to times. Methods with more than one draw a step (two stochastic letters, srk,
    :class:`~adjsim.LeimkuhlerMatthews`) take seeds only.

    Args:
        seed: identifies the path, an integer from 0 to 2^62 - 1.
        tol: the length of the shortest interval, time. Steps and starts are multiples of it. Paths
            with different tol are different.

    Raises:
        TypeError: a seed that is not an integer.
        ValueError: a seed out of range; a tol that is not positive.
    """

    seed: int
    tol: float

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int | np.integer) or isinstance(self.seed, bool):
            raise TypeError(f"seed must be an integer; got {describe_type(self.seed)}.")
        if not 0 <= self.seed < 2**SEED_BITS:
            raise ValueError(f"seed must be from 0 to 2^{SEED_BITS} - 1; got {self.seed}.")
        tol = as_number("tol", self.tol)
        if not 0 < tol < math.inf:
            raise ValueError(f"tol must be a positive time; got {self.tol}.")
        object.__setattr__(self, "seed", int(self.seed))
        object.__setattr__(self, "tol", tol)

    def increments(self, times: Any, shape: Sequence[int] = ()) -> Tensor:
        """Return W(times[k+1]) - W(times[k]) as ``(len(times) - 1, *shape)``, float64.

        A run with diagonal noise of a state of this shape has the same increments. Times are
        multiples of ``tol``, and may decrease.
        """
        times = as_tensor("times", times).detach().to("cpu", torch.float64)
        if times.ndim != 1 or len(times) < 2:
            raise ValueError(f"times must be two numbers or more; got shape {tuple(times.shape)}.")
        ticks = [self.ticks(f"times[{i}]", t) for i, t in enumerate(times.tolist())]
        read = self.reader(math.prod(shape))
        rows = [read(a, b) if a <= b else -read(b, a) for a, b in pairwise(ticks)]
        return torch.stack(rows).reshape(len(rows), *shape)

    def ticks(self, name: str, t: float) -> int:
        """Return a time in units of ``tol``."""
        ratio = t / self.tol
        if not abs(ratio) < 2**53:
            raise ValueError(
                f"{name} must be a time within 2^53 tol = {2**53 * self.tol:g} of zero; got {t:g}."
            )
        found = round(ratio)
        # The time and tol are rounded, and far from zero a ratio has few digits after the point.
        if abs(ratio - found) > max(ROUNDING, 2 * math.ulp(ratio)):
            raise ValueError(
                f"a BrownianPath is read at multiples of its tol = {self.tol:g}, and {name} = "
                f"{t:g} is not one: give a tol that divides all steps and starts, such as dt/2^10."
            )
        return found

    def reader(self, count: int, device: torch.device = CPU) -> Reader:
        """Return the function that reads increments of ``count`` entries, drawn on a device."""
        return Reader(self, count, device)

    def steps(self, begin: float, dt: float) -> PathNoise:
        """Return the noise of steps of size dt from the time ``begin``."""
        first, size = self.ticks("ts[0]", begin), self.ticks("dt", dt)
        return PathNoise(self, lambda step: first + step * size)

    def steps_between(self, ticks: Sequence[int]) -> PathNoise:
        """Return the noise of steps between these ticks."""
        return PathNoise(self, ticks.__getitem__)

    def reversed(self) -> BrownianPath:
        """Return the path that runs back: W(-t) at the time t."""
        return _Reversed(self.seed, self.tol)


class _Reversed(BrownianPath):
    """A path that runs back in time."""

    def reader(self, count: int, device: torch.device = CPU) -> Reader:
        return _ReversedReader(self, count, device)

    def reversed(self) -> BrownianPath:
        return BrownianPath(self.seed, self.tol)

    def __repr__(self) -> str:
        return f"{self.reversed()!r}.reversed()"


class Reader:
    """Reads increments of all entries, in units of the grid, and keeps the last intervals.

    For each level the two halves of the last interval are kept, so neighbouring steps, forward or
    backward, draw each interval once. Sums and products of the bridge have the same bits on every
    device, if each is an operation of its own.
    """

    def __init__(self, path: BrownianPath, count: int, device: torch.device = CPU) -> None:
        self._path, self._count, self._device = path, count, device
        self._tiles = [_Tile(path.seed, k) for k in range((max(count, 1) - 1) // ELEMENTS + 1)]
        self._halves: dict[int, tuple[int, Tensor, Tensor]] = {}

    def __call__(self, begin: int, end: int) -> Tensor:
        """Return the increment from one tick to a later one, ``(count,)``, float64."""
        return self.rows([(begin, end)])[0]

    def rows(self, steps: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the increments of steps, each from one tick to a later one."""
        parts = [list(_dyadic(begin, end)) for begin, end in steps]
        drawn: Drawn = {}
        if self._device.type != "cpu":
            drawn = self._drawn_on_device(self._needed(chain.from_iterable(parts)))
        rows = []
        for intervals in parts:
            total = torch.zeros(self._count, dtype=torch.float64, device=self._device)
            for level, index in intervals:
                total = total + self._increment(level, index, drawn)
            rows.append(total)
        return rows

    def _increment(self, level: int, index: int, drawn: Drawn) -> Tensor:
        """Return the increment from ``index`` 2^level ticks to ``index + 1`` times as many.

        ``drawn`` has numbers that have been drawn already.
        """
        length = self._path.tol * 2.0**level
        if level == TOP:
            return math.sqrt(length) * self._normal(level, index, drawn)
        kept = self._halves.get(level)
        if kept is None or kept[0] != index >> 1:
            half = self._increment(level + 1, index >> 1, drawn) / 2
            bridge = math.sqrt(length / 2) * self._normal(level, index >> 1, drawn)
            kept = self._halves[level] = index >> 1, half + bridge, half - bridge
        _, left, right = kept
        return right if index % 2 else left

    def _normal(self, level: int, index: int, drawn: Drawn) -> Tensor:
        if (level, index) in drawn:
            return drawn[level, index]
        tiles = np.concatenate([tile(level, index) for tile in self._tiles])
        return torch.from_numpy(tiles[: self._count]).to(self._device)

    def _needed(self, intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return what increments of these intervals, read in turn, draw."""
        kept = {level: halves[0] for level, halves in self._halves.items()}
        found: dict[tuple[int, int], None] = {}
        for level, index in intervals:
            while level < TOP and kept.get(level) != index >> 1:
                kept[level] = index = index >> 1
                found[level, index] = None
                level += 1
            if level == TOP:
                found[level, index] = None
        return list(found)

    def _drawn_on_device(self, needed: Sequence[tuple[int, int]]) -> Drawn:
        """Draw the numbers of many intervals at once, on the device."""
        if not needed:
            return {}
        columns = len(self._tiles)
        level, index = (
            torch.tensor(needed).to(self._device).repeat_interleave(columns, 0).unbind(-1)
        )
        column = torch.arange(columns, device=self._device).repeat(len(needed))
        streams = torch.stack([column, index, level, torch.ones_like(level)], -1)
        tiles = normal_tiles(self._path.seed, streams, ELEMENTS)
        drawn = tiles.reshape(len(needed), -1)[:, : self._count]
        return dict(zip(needed, drawn.unbind(0), strict=True))


class _ReversedReader(Reader):
    def rows(self, steps: Sequence[tuple[int, int]]) -> list[Tensor]:
        return [-row for row in super().rows([(-end, -begin) for begin, end in steps])]


class _Tile:
    """Standard normal numbers of one column of entries, addressed by level and interval."""

    def __init__(self, seed: int, column: int) -> None:
        self._philox = np.random.Philox(key=np.array([seed, column], dtype=np.uint64))
        self._normal = np.random.Generator(self._philox)
        # A new generator has used no number of its buffer.
        self._state: Any = self._philox.state

    def __call__(self, level: int, index: int) -> np.ndarray:
        # The noise of steps has counters whose last word is zero.
        self._state["state"]["counter"][:] = (0, index % 2**64, level, 1)
        self._philox.state = self._state
        return self._normal.standard_normal(ELEMENTS)


def _dyadic(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Divide an interval of ticks into the fewest intervals of 2^level ticks, at most 2^TOP."""
    while begin < end:
        aligned = (begin & -begin).bit_length() - 1 if begin else TOP
        level = min(aligned, (end - begin).bit_length() - 1, TOP)
        yield level, begin >> level
        begin += 1 << level


class PathNoise(Noise):
    """The increments of a path over the steps of a run, as standard normal numbers."""

    continues = False

    def __init__(self, path: BrownianPath, tick: Callable[[int], int]) -> None:
        super().__init__(path.seed)
        self._path, self._tick = path, tick
        self._readers: dict[tuple[int, torch.device], Reader] = {}

    def describe(self) -> str:
        return f"{self._path}"

    def __call__(self, step: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self._rows(step, 1, shape, like)[0]

    def span(
        self, step: int, count: int, shape: tuple[int, ...], like: Tensor, end: int
    ) -> list[Tensor]:
        each, last = max(1, MOST // max(1, math.prod(shape))), min(step + count, end)
        parts = range(step, last, each)
        return [self._rows(at, min(each, last - at), shape, like) for at in parts]

    def twin(self, draw: Draw) -> PathNoise:
        return PathNoise(self._path, self._tick)

    def drawn_by_host(self, shape: tuple[int, ...], count: int) -> bool:
        return math.prod(shape) * count < MANY

    def _rows(self, step: int, count: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        entries = math.prod(shape)
        many = like.device.type == "cuda" and not self.drawn_by_host(shape, count)
        place = entries, like.device if many else CPU
        if place not in self._readers:
            self._readers[place] = self._path.reader(*place)
        steps = list(pairwise(self._tick(step + i) for i in range(count + 1)))
        rows = [
            _divided(row, math.sqrt((b - a) * self._path.tol))
            for row, (a, b) in zip(self._readers[place].rows(steps), steps, strict=True)
        ]
        return torch.stack(rows).to(like.device, like.dtype).reshape(count, *shape)


def _divided(x: Tensor, number: float) -> Tensor:
    """Divide by a number; a GPU would multiply by the inverse of a number of the host."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)
