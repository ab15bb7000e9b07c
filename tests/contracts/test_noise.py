"""Noise is a function of (seed, step, replica), and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from adjsim.adjoints.loops.tiles import by_cpp
from adjsim.core.noise import (
    ELEMENTS,
    SEED_BITS,
    STEPS,
    Noise,
    NoiseStream,
    by_numpy,
    seed_from,
)
from adjsim.core.tiles_on_device import CLOSE, normal_tiles

LIKE = torch.zeros((), dtype=torch.float64)


def test_a_replica_has_the_same_noise_in_every_batch():
    dof = 13 * 3
    for step in (0, 5, STEPS - 1, STEPS, 100):
        large, small = Noise(3)(step, (50, dof), LIKE), Noise(3)(step, (20, dof), LIKE)
        assert torch.equal(large[:20], small)
        assert torch.equal(Noise(3, first=20)(step, (30, dof), LIKE), large[20:])


def test_it_does_not_depend_on_the_order_of_asking():
    noise = Noise(11)
    forward = [noise(k, (7, 6), LIKE) for k in range(3 * STEPS)]
    backward = [noise(k, (7, 6), LIKE) for k in reversed(range(3 * STEPS))]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))
    assert torch.equal(Noise(11)(70, (7, 6), LIKE), forward[70])


def test_spans_have_the_noise_of_their_steps_wherever_the_run_ends():
    steps = [Noise(2)(k, (5, 70), LIKE) for k in range(2 * STEPS + 9)]
    for begin in (0, 7):
        for end in (40, STEPS, 2 * STEPS + 2):
            noise = Noise(2, begin=begin)
            for first, count in ((0, 5), (3, end - 3), (end - 1, 1)):
                found = torch.cat(noise.span(first, count, (5, 70), LIKE, end))
                expected = torch.stack(steps[begin + first :][:count])
                assert torch.equal(found, expected)


def test_seeds_and_tiles_differ_and_are_normal():
    wide = Noise(0)(0, (1, 3 * ELEMENTS), LIKE).flatten()
    assert stats.kstest(wide.numpy(), "norm").pvalue > 1e-3
    series = torch.cat([Noise(5)(k, (1, 64), LIKE).flatten() for k in range(4 * STEPS)])
    assert stats.kstest(series.numpy(), "norm").pvalue > 1e-3
    # Neighbouring tiles, steps and seeds share no numbers.
    everything = torch.cat([wide, series, Noise(1)(0, (1, 3 * ELEMENTS), LIKE).flatten()])
    assert len(everything.unique()) == len(everything)


def test_float32_sees_the_same_numbers():
    single = Noise(4)(9, (3, 5), torch.zeros((), dtype=torch.float32))
    assert single.dtype == torch.float32
    assert torch.equal(single, Noise(4)(9, (3, 5), LIKE).float())


@pytest.mark.parametrize("stream", [NoiseStream.STEPS, NoiseStream.PISTON])
def test_tiles_of_a_device_have_the_bits_of_numpy(stream):
    """Forty tiles have about ninety attempts in the tail."""
    noise = Noise(2**SEED_BITS - 5, stream=stream)
    for block, steps, first in ((0, STEPS, 0), (7, 1, 900)):
        columns = range(first, first + 40)
        tiles = by_numpy(noise._key(block, first), 40, steps, range(40 * ELEMENTS))
        assert torch.equal(noise._on_device(block, columns, steps, torch.device("cpu")), tiles)


@pytest.mark.parametrize("close", [CLOSE, 1e-3, 10.0])
@pytest.mark.parametrize("threads", [1, 3])
def test_tiles_of_compiled_loops_have_the_bits_of_numpy(close, threads):
    """Also where NumPy draws some of them, or all, since their comparisons are close."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for key, steps, columns in (
            ((2**64 - 7, 2**62 + 3), STEPS, range(5, 37 * ELEMENTS - 3)),
            ((0, 0), 1, range(40 * ELEMENTS)),
            ((1, 7 << 32 | 9), 3, range(100, 120)),
        ):
            tiles = -(-columns.stop // ELEMENTS)
            found = by_cpp(key, tiles, steps, columns, close)
            assert torch.equal(found, by_numpy(key, tiles, steps, columns))
    finally:
        torch.set_num_threads(before)


def test_the_first_word_of_tiles_may_be_in_the_tail():
    """Of two thousand tiles some begin with each kind of attempt, and some end in one."""
    keys = torch.arange(2000)
    streams = torch.nn.functional.pad(keys[:, None], (0, 3))
    drawn = normal_tiles(3, streams, 2).numpy()
    for key, row in zip(keys.tolist(), drawn, strict=True):
        source = np.random.Philox(key=np.array([3, key], dtype=np.uint64))
        assert np.array_equal(np.random.Generator(source).standard_normal(2), row)


def test_the_seed_comes_from_the_generator():
    a, b = (torch.Generator().manual_seed(1) for _ in range(2))
    assert seed_from(a) == seed_from(b)
    assert seed_from(a) != seed_from(torch.Generator().manual_seed(1))
    torch.manual_seed(9)
    first = seed_from(None)
    torch.manual_seed(9)
    assert seed_from(None) == first
