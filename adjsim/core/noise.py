"""Noise as a function of (seed, step, replica), drawn again instead of stored.

Gaussians are drawn in whole tiles of 256 degrees of freedom by 32 steps, each tile from its own
counter-based Philox generator keyed by (seed, tile). The number for replica r, degree of freedom d
and step k is element ``r * dof + d`` of step ``k``. It does not depend on the number of replicas,
the save times, the segments, the adjoint or the direction of the run. Keys have 128 bits, so no
two tiles share a stream. (Torch's own CPU generator takes 32 bits of seed, and would repeat a tile
after some tens of thousands.) Numbers are drawn in float64 and then cast, and have the same bits on
every device, so a float32 or GPU run gets the same noise. A GPU draws many tiles itself, and
compiled loops draw theirs in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from adjsim.core.arguments import describe_type
from adjsim.core.state import in_transform
from adjsim.core.tiles_on_device import normal_tiles
from adjsim.core.typing import Seed

ELEMENTS, STEPS = 256, 32
# The number of tiles from which a GPU draws them. It took 16 ms for 624 tiles (H100), where the CPU
# takes 83; how much of this is the same for one tile, was not measured.
FROM_TILES = 32
# A function that draws the first steps of tiles side by side, from the key of the first tile, the
# numbers of tiles and of steps, and the columns wanted. It returns ``(steps, columns)``.
Draw = Callable[[tuple[int, int], int, int, range], Tensor]
# Seeds lie below 2^62, which leaves two bits of a key's first word for the stream. The stream of
# steps has zeros there.
SEED_BITS = 62


class NoiseStream(IntEnum):
    """The use of the numbers of one seed, so that start and run are not correlated."""

    STEPS = 0
    MOMENTA = 1
    MEMORY = 2
    PISTON = 3


def as_generator(seed: Seed) -> torch.Generator | None:
    """Make a generator from a seed; return a generator, or None for the default one, unchanged."""
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
        raise TypeError(
            "generator must be a torch.Generator, an integer that seeds one, or None; got "
            f"{describe_type(seed)}."
        )
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"generator must be a seed of at most 64 bits; got {seed}.")
    return torch.Generator().manual_seed(int(seed))


def seed_from(generator: Seed) -> int:
    """Draw one integer, the seed of a run, from a generator, or from a new one of this seed.

    A generator advances by one draw. It may be on another device than the state.
    """
    generator = as_generator(generator)
    device = None if generator is None else generator.device
    return int(torch.randint(2**SEED_BITS, (), generator=generator, device=device))


def seed_of_run(generator: Seed) -> int:
    """Draw the seed of a run, which takes random numbers that torch.func may not give."""
    try:
        return seed_from(generator)
    except RuntimeError as reason:
        if not in_transform():
            raise
        raise RuntimeError(
            "the noise of a seed cannot be drawn in torch.func.vmap, nor in what it is made of "
            "(jacfwd, hessian), with randomness='error', the default, or 'different': give "
            "generator=BrownianPath(seed, tol), whose noise belongs to times, or randomness='same'."
            " Every sample has the same noise with both; for noise of its own give the state a "
            "batch axis instead."
        ) from reason


def overlap(tile: int, columns: range) -> tuple[range, range]:
    """Return where the numbers of a tile are among the columns wanted, and which of its own."""
    at = tile * ELEMENTS - columns.start
    place = range(max(0, at), min(len(columns), at + ELEMENTS))
    return place, range(place.start - at, place.stop - at)


def by_numpy(key: tuple[int, int], tiles: int, steps: int, columns: range) -> Tensor:
    """Draw tiles by NumPy's generator; see :data:`Draw`."""
    first, second = key
    found = np.empty((steps, len(columns)))
    for tile in range(tiles):
        source = np.random.Philox(key=np.array([first, second + tile], dtype=np.uint64))
        drawn = np.random.Generator(source).standard_normal((steps, ELEMENTS))
        place, own = overlap(tile, columns)
        found[:, place.start : place.stop] = drawn[:, own.start : own.stop]
    return torch.from_numpy(found)


class Noise:
    """Standard normal numbers addressed by step.

    Args:
        seed: identifies the sequence.
        first, begin: the numbers of the first replica and of the first step, where a batch or a run
            is a part of a larger one.
        stream: the use of the numbers.
        draw: draws tiles on the host, always with the same bits.
    """

    # Whether the numbers of its first replica and step say how it goes on after a run.
    continues: ClassVar[bool] = True

    def __init__(
        self,
        seed: int,
        first: int = 0,
        begin: int = 0,
        stream: NoiseStream = NoiseStream.STEPS,
        draw: Draw = by_numpy,
    ) -> None:
        self.seed, self.first, self.begin, self.stream = seed, first, begin, stream
        self._draw = draw
        self._blocks: dict[tuple[Any, ...], Tensor] = {}

    def describe(self) -> str:
        """Describe what the numbers are a function of, apart from step and replica."""
        return f"{self.seed}"

    def __call__(self, step: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the numbers of one step for ``shape = (replicas, dof)``, like ``like``."""
        replicas, dof = shape
        step += self.begin
        return self._block(step // STEPS, replicas, dof, like)[step % STEPS]

    def span(
        self, step: int, count: int, shape: tuple[int, ...], like: Tensor, end: int
    ) -> list[Tensor]:
        """Return the numbers of ``count`` steps in parts ``(steps, replicas, dof)``.

        No numbers are drawn after ``end``, the number of steps of the run.
        """
        replicas, dof = shape
        first, last, end = step + self.begin, step + self.begin + count, end + self.begin
        return [
            self._block(at // STEPS, replicas, dof, like, min(STEPS, end - at))[
                max(0, first - at) : last - at
            ]
            for at in range(first - first % STEPS, last, STEPS)
        ]

    def twin(self, draw: Draw) -> Noise:
        """Return noise of the same numbers, for another thread, whose tiles ``draw`` draws."""
        found = copy(self)
        found._draw, found._blocks = draw, {}
        return found

    def drawn_by_host(self, shape: tuple[int, ...], count: int) -> bool:
        """Return whether the host draws the numbers of ``count`` steps, also for a GPU."""
        return len(self._columns(*shape)) < FROM_TILES

    def _columns(self, replicas: int, dof: int) -> range:
        start = self.first * dof
        return range(start // ELEMENTS, (start + replicas * dof - 1) // ELEMENTS + 1)

    def _block(
        self, block: int, replicas: int, dof: int, like: Tensor, steps: int = STEPS
    ) -> Tensor:
        """Return the first steps of a block.

        The last two blocks are cached, for steps that use their neighbours' noise.
        """
        key = (block, steps, replicas, dof, like.dtype, like.device)
        if key not in self._blocks:
            if len(self._blocks) > 1:
                del self._blocks[next(iter(self._blocks))]
            start, count, columns = self.first * dof, replicas * dof, self._columns(replicas, dof)
            offset = start - columns.start * ELEMENTS
            part = range(offset, offset + count)
            if like.device.type == "cuda" and len(columns) >= FROM_TILES:
                tiles = self._on_device(block, columns, steps, like.device)
                # A view would keep whole tiles alive.
                drawn = tiles[:, part.start : part.stop].clone()
            else:
                drawn = self._draw(self._key(block, columns.start), len(columns), steps, part)
            rows = drawn.to(like.device, like.dtype)
            self._blocks[key] = rows.reshape(steps, replicas, dof)
        return self._blocks[key]

    def _on_device(self, block: int, columns: range, steps: int, device: torch.device) -> Tensor:
        """Draw the first steps of tiles side by side, as :meth:`_tile` does, on a device."""
        first, second = self._key(block, columns.start)
        streams = torch.zeros(len(columns), 4, dtype=torch.int64, device=device)
        streams[:, 0] = second + torch.arange(len(columns), device=device)
        tiles = normal_tiles(first, streams, steps * ELEMENTS)
        return tiles.reshape(-1, steps, ELEMENTS).transpose(0, 1).flatten(1)

    def _key(self, block: int, column: int) -> tuple[int, int]:
        return self.seed | self.stream << SEED_BITS, (block << 32) | column
