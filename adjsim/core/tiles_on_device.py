"""Tiles of normal numbers drawn on the device that uses them, with the bits of NumPy's generator.

A tile is what ``Generator(Philox(key)).standard_normal`` gives: the words of Philox 4x64 with ten
rounds, and the ziggurat of Marsaglia and Tsang (2000). A word holds an index i in its lowest eight
bits, a sign s and 52 bits m. An attempt begins at a word and gives the number ``s m w_i`` if
``m < k_i`` (99.3 % of attempts). Otherwise it reads another word, a uniform number that accepts or
rejects (a wedge, i > 0), or pairs of words for exponential numbers until one is accepted (the tail,
i = 0)::

    wedge    (f_{i-1} - f_i) u + f_i < exp(-x^2 / 2)                f_i = exp(-x_i^2 / 2)
    tail     x = -ln(1 - u) / r,  y = -ln(1 - v),  2 y > x^2        the number is s (r + x)

So a word begins an attempt, or an attempt before has read it. Which of both follows from the few
words with ``m >= k_i``.

The device computes words and products, for all tiles at once: integer arithmetic and products have
the same bits everywhere. The host resolves wedges and tails, since logarithms have the bits of its
mathematical library, as NumPy's have.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Philox 4x64 (Salmon, Moraes, Dror and Shaw, 2011): multipliers of a round, increments of its key.
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS, LOW = 10, 0xFFFFFFFF
# Where the tail of the ziggurat with 256 layers begins, and the inverse, as NumPy rounds it.
TAIL, INVERSE = 3.6541528853610087963519472518, 0.27366123732975827203338247596
BITS = 52
# A number takes 1.01 words on average; this many more for n numbers are hardly ever too few.
SPARE, LEAST = 40, 64
# The words that are read of an attempt in the tail.
READ = 16
# A comparison of numbers that are closer is left to NumPy, since the last bits of exp decide it.
CLOSE = 1e-12
# Numbers that are drawn at once: 70 MB for each intermediate value.
CHUNK = 2**23


def signed(word: int) -> int:
    """Return the number of 64 bits that torch's signed integers have for an unsigned one."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def high(multiplier: int, x: Tensor) -> Tensor:
    """Return the upper 64 bits of a product of unsigned numbers of 64 bits."""
    a1, a0 = multiplier >> 32, multiplier & LOW
    x1, x0 = (x >> 32) & LOW, x & LOW
    low, left, right = a0 * x0, a1 * x0, a0 * x1
    carry = ((low >> 32) & LOW) + (left & LOW) + (right & LOW)
    return a1 * x1 + ((left >> 32) & LOW) + ((right >> 32) & LOW) + (carry >> 32)


def words(first: int, streams: Tensor, count: int) -> Tensor:
    """Return ``count`` words of each stream, as ``(tiles, count)``; see :func:`normal_tiles`."""
    # NumPy increments the counter before it is used.
    counter = torch.arange(1, -(-count // 4) + 1, device=streams.device)
    left_key, (right_key, *rest) = first, streams[..., None].unbind(1)
    x = [counter.expand(len(streams), -1), *rest]
    for _ in range(ROUNDS):
        left, right = (high(m, y) for m, y in zip(MULTIPLIERS, x[::2], strict=True))
        low_left, low_right = (signed(m) * y for m, y in zip(MULTIPLIERS, x[::2], strict=True))
        x = [right ^ x[1] ^ left_key, low_right, left ^ x[3] ^ right_key, low_left]
        left_key, right_key = signed(left_key + WEYL[0]), right_key + signed(WEYL[1])
    return torch.stack(torch.broadcast_tensors(*x), -1).flatten(1)[:, :count]


@functools.cache
def ziggurat() -> tuple[np.ndarray, np.ndarray]:
    """Return the widths w_i and bounds k_i of NumPy's table, read from its generator.

    A generator whose buffer holds a chosen word tells its number, and whether it read another.
    """
    source = np.random.Philox(key=0)
    generator, state = np.random.Generator(source), source.state

    def number(word: int) -> tuple[float, bool]:
        state["buffer"], state["buffer_pos"] = np.array([word, 0, 1 << 63, 0], dtype=np.uint64), 0
        source.state = state
        found = generator.standard_normal()
        return found, source.state["buffer_pos"] == 1

    widths, bounds = np.empty(256), np.empty(256, dtype=np.int64)
    for i in range(256):
        # The words that follow are uniform numbers that accept, in a wedge and in the tail.
        widths[i] = number(i | 1 << 9)[0]
        # The bound k_i is nearly 2^52 w_{i-1} / w_i, and 2^52 r / x_0 for the layer with the tail.
        x = (widths[i - 1] if i > 1 else 0.0) if i else TAIL / 2.0**BITS
        bounds[i] = int(x / widths[i] * 2.0**BITS)
        while number(i | int(bounds[i]) << 9)[1]:
            bounds[i] += 1
        while bounds[i] > 0 and not number(i | int(bounds[i] - 1) << 9)[1]:
            bounds[i] -= 1
    return widths, bounds


@functools.cache
def layers() -> np.ndarray:
    """Return f_i = exp(-x_i^2 / 2) of the layers, up to its last bits."""
    found = np.exp(-0.5 * (ziggurat()[0] * 2.0**BITS) ** 2)
    found[0] = 1.0
    return found


def uniform(word: Any) -> Any:
    """Return the number in [0, 1) of a word that is read as a signed integer."""
    return (word >> 11 & (1 << 53) - 1) / (1 << 53)


def in_tail(read: list[int]) -> tuple[int, float] | None:
    """Return how many words an attempt in the tail reads, and its number; None if NumPy decides."""
    for used in range(1, READ - 1, 2):
        x = -INVERSE * math.log1p(-uniform(read[used]))
        y = -math.log1p(-uniform(read[used + 1]))
        if abs(y + y - x * x) < CLOSE:
            return None
        if y + y > x * x:
            return used + 2, -(TAIL + x) if read[0] >> 17 & 1 else TAIL + x
    return None


def normal_tiles(first: int, streams: Tensor, count: int) -> Tensor:
    """Return ``count`` normal numbers of each stream, ``(tiles, count)``, float64.

    A stream ``(key, c1, c2, c3)`` is a row of ``streams``, int64 words, on the device that draws
    it. Its numbers have the bits of ``Generator(Philox(key=[first, key], counter=[0, c1, c2,
    c3])).standard_normal(count)`` on the CPU.
    """
    parts = streams.split(max(1, CHUNK // count))
    return torch.cat([_chunk(signed(first), part, count) for part in parts])


def _chunk(first: int, streams: Tensor, count: int) -> Tensor:
    device, tiles, size = streams.device, len(streams), count + count // SPARE + LEAST
    widths, bounds = (torch.from_numpy(x).to(device) for x in ziggurat())
    word = words(first, streams, size)
    index, magnitude = word & 0xFF, word >> 9 & (1 << BITS) - 1
    number = magnitude.to(torch.float64) * widths[index]
    number = torch.where(word >> 8 & 1 == 1, -number, number)
    further = magnitude >= bounds[index]
    # The last words, which are spare, begin no attempt that would read words of the next tile.
    further[:, -READ:] = False
    begin = further.flatten().nonzero()[:, 0]
    near = begin[:, None] + torch.arange(READ, device=device)
    read = word.flatten()[near.clamp_(max=word.numel() - 1)]
    needed = (begin, read, number.flatten()[begin])
    unread, tail, left = _resolve(*(x.cpu().numpy() for x in needed))
    number, emits = number.flatten(), torch.ones(word.numel(), dtype=torch.bool, device=device)
    emits[torch.from_numpy(unread).to(device)] = False
    number[torch.tensor(list(tail), dtype=torch.int64, device=device)] = torch.tensor(
        list(tail.values()), dtype=torch.float64, device=device
    )
    # Numbers after the last one wanted go to a place that is not read.
    order = emits.reshape(tiles, size).cumsum(1) - 1
    row = torch.arange(tiles, device=device)[:, None]
    place = torch.where(
        emits.reshape(tiles, size) & (order < count), row * count + order, tiles * count
    )
    out = number.new_empty(tiles * count + 1)
    out[place.flatten()] = number
    out = out[:-1].reshape(tiles, count)
    few = np.bincount(unread // size, minlength=tiles) > size - READ - count
    few[left // size] = True
    for tile in few.nonzero()[0].tolist():
        key, *counter = streams[tile].tolist()
        source = np.random.Philox(
            key=np.array([first, key], dtype=np.int64).view(np.uint64),
            counter=np.array([0, *counter], dtype=np.int64).view(np.uint64),
        )
        drawn = np.random.Generator(source).standard_normal(count)
        out[tile] = torch.from_numpy(drawn).to(device)
    return out


def _resolve(
    begin: np.ndarray, read: np.ndarray, number: np.ndarray
) -> tuple[np.ndarray, dict[int, float], np.ndarray]:
    """Resolve attempts that need further words, from their places, words and numbers.

    Return the places of words that give no number, the numbers of tails by their places, and the
    places of attempts that are left to NumPy.
    """
    layer = layers()
    index = read[:, 0] & 0xFF
    margin = (layer[index - 1] - layer[index]) * uniform(read[:, 1]) + layer[index]
    margin -= np.exp(-0.5 * number * number)
    rejected, left = margin >= 0, np.abs(margin) < CLOSE
    length = np.full(len(begin), 2)
    tails: dict[int, float] = {}
    for k in (index == 0).nonzero()[0].tolist():
        found = in_tail(read[k].tolist())
        rejected[k], left[k] = False, found is None
        length[k], tails[k] = found or (1, 0.0)
    # An attempt is one if no attempt before it has read its word: a recurrence from left to right,
    # whose iteration converges after as many passes as attempts follow directly on each other.
    alive = np.ones(len(begin), dtype=bool)
    while True:
        reach = np.maximum.accumulate(np.where(alive, begin + length, 0))
        after = begin >= np.concatenate([[0], reach[:-1]])
        if np.array_equal(after, alive):
            break
        alive = after
    more = [np.arange(begin[k] + 1, begin[k] + length[k]) for k in tails if alive[k]]
    wedge = alive & (index > 0)
    unread = np.concatenate([begin[wedge] + 1, begin[alive & rejected], *more])
    kept = {int(begin[k]): x for k, x in tails.items() if alive[k]}
    return unread, kept, begin[left & alive]
