"""Tiles of normal numbers that C++ draws for compiled loops, with the bits of NumPy's generator."""

from __future__ import annotations

import ctypes
import functools
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from adjsim.compiler import CompilerError, compiled
from adjsim.core.noise import ELEMENTS, Draw, by_numpy, overlap
from adjsim.core.tiles_on_device import (
    BITS,
    CLOSE,
    INVERSE,
    MULTIPLIERS,
    ROUNDS,
    TAIL,
    WEYL,
    layers,
    ziggurat,
)

# Threads share tiles that have so many steps together, which take half a millisecond.
PARALLEL_STEPS = 512


def fastest_draw() -> Draw:
    """Return the function that draws tiles: by C++, or by NumPy where there is no compiler."""
    return by_numpy if _library() is None else by_cpp


def by_cpp(
    key: tuple[int, int], tiles: int, steps: int, columns: range, close: float = CLOSE
) -> Tensor:
    """Draw tiles; see :data:`~adjsim.core.noise.Draw`.

    NumPy draws those in which numbers closer than ``close`` are compared.
    """
    library = _library()
    assert library is not None
    found = torch.empty(steps, len(columns), dtype=torch.float64)
    unsure = np.zeros(tiles, dtype=np.int8)
    threads = torch.get_num_threads() if tiles * steps >= PARALLEL_STEPS else 1
    tables = [x.ctypes.data_as(ctypes.c_void_p) for x in (*ziggurat(), layers())]
    # NumPy refuses a key of more than 64 bits.
    first, second, _ = np.array([*key, key[1] + tiles - 1], dtype=np.uint64).tolist()
    library.draw(
        *map(ctypes.c_uint64, (first, second)),
        *map(ctypes.c_int64, (tiles, steps, columns.start, len(columns))),
        *tables,
        ctypes.c_double(close),
        ctypes.c_void_p(found.data_ptr()),
        unsure.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(threads),
    )
    for tile in unsure.nonzero()[0].tolist():
        place, own = overlap(tile, columns)
        found[:, place.start : place.stop] = by_numpy((first, second + tile), 1, steps, own)
    return found


@functools.cache
def _library() -> ctypes.CDLL | None:
    constants = {
        "ELEMENTS": ELEMENTS,
        "ROUNDS": ROUNDS,
        "BITS": BITS,
        "TAIL": TAIL.hex(),
        "INVERSE": INVERSE.hex(),
        **{f"MULTIPLIER_{n}": f"UINT64_C({x})" for n, x in enumerate(MULTIPLIERS)},
        **{f"WEYL_{n}": f"UINT64_C({x})" for n, x in enumerate(WEYL)},
    }
    defined = "\n".join(f"#define {name} {value}" for name, value in constants.items())
    source = files("adjsim.adjoints.loops").joinpath("tiles.cpp").read_text()
    try:
        return compiled(f"{defined}\n{source}", threads=True)
    except CompilerError:
        return None
