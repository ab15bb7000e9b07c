"""Programs of Triton for sums over pairs, run by NumPy, and compiled for a card that is away."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from adjsim.adjoints.loops.runner import cache
from adjsim.potentials.pairs import operator
from adjsim.potentials.pairs.kernels import gpu
from adjsim.potentials.pairs.kernels.tiles import arguments_of

# The program that Triton compiles, which by_tiles() replaces.
PROGRAM: Any = vars(gpu.TritonKernel)["program"]


class Pointer:
    """A place in the memory of a tensor, or an array of places."""

    def __init__(self, memory: Any, place: Any = 0) -> None:
        self.memory, self.place = memory, place

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.place + more)


def load(at: Pointer, mask: Any = True, other: Any = 0) -> Any:
    if mask is True:
        return at.memory[at.place]
    place, mask = np.broadcast_arrays(at.place, mask)
    found = np.full(place.shape, other, at.memory.dtype)
    found[mask] = at.memory[place[mask]]
    return found


def store(at: Pointer, value: Any, mask: Any) -> None:
    place, value, mask = np.broadcast_arrays(at.place, value, mask)
    at.memory[place[mask]] = value[mask]


def memory_of(x: Tensor) -> Any:
    """Return what follows the first number of a tensor in its memory."""
    x = getattr(x, "held", x)
    length = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((length,), (1,)).numpy()


class Program:
    """A function of Triton, whose programs run one after another."""

    number: int
    # How often programs have been launched.
    launches = 0

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*args: Any, num_warps: int, enable_fp_fusion: bool, **sizes: int) -> None:
            Program.launches += 1
            given = [Pointer(memory_of(x)) if isinstance(x, Tensor) else x for x in args]
            with np.errstate(all="ignore"):
                for Program.number in range(*grid):
                    self.function(*given, **sizes)

        return run


class Libdevice(ModuleType):
    """The functions of numbers, by torch."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, {"nearbyint": "round"}.get(name, name))
        return lambda *x: function(*map(torch.as_tensor, x)).numpy()


def modules() -> dict[str, ModuleType]:
    """Return modules of NumPy's functions with the names of Triton's."""
    language, triton = ModuleType("language"), ModuleType("triton")
    vars(language).update(
        abs=np.abs, arange=np.arange, where=np.where, zeros=np.zeros, full=np.full,
        float64=np.float64, float32=np.float32, int64=np.int64, constexpr=int,
        cast=lambda x, dtype: dtype(x), cdiv=lambda a, b: -(-a // b),
        program_id=lambda axis: Program.number, sum=np.sum, max=np.max, load=load, store=store,
    )  # fmt: skip
    vars(triton).update(jit=lambda **options: Program, language=language)
    extra = ModuleType("extra")
    vars(extra)["libdevice"] = Libdevice("libdevice")
    return {"triton": triton, "triton.language": language, "triton.language.extra": extra}


def forget() -> None:
    """Let kernels and loops be made anew, which are kept for all potentials of a class."""
    operator._kernels_of.cache_clear()
    cache.drop(lambda key: True)


@contextmanager
def by_tiles(*devices: str) -> Generator[Callable[[bool], None], None, None]:
    """Let programs evaluate pairs on these devices; return how to say whether Triton is there."""

    def program(kernel: gpu.TritonKernel) -> Any:
        found: dict[str, Any] = {}
        # Torch asks for Triton too, so it is there for the imports of the program alone.
        with patch.dict(sys.modules, modules()):
            exec(compile(kernel.source, kernel.name, "exec"), found)
        return found["pairs"]

    classes = dict.fromkeys(devices, gpu.TritonKernel)
    with (
        patch.object(gpu.TritonKernel, "program", property(program)),
        patch.dict(operator.KERNEL_CLASSES, classes),
        patch.object(gpu, "has_triton") as has_triton,
    ):

        def turn(on: bool) -> None:
            has_triton.return_value = on
            forget()

        try:
            turn(True)
            yield turn
        finally:
            forget()


def machine_code(kernel: gpu.TritonKernel, capability: int = 90) -> bytes:
    """Compile a program for a card of NVIDIA, which need not be there."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tensors, numbers = arguments_of(kernel.spec)
    indices = dict.fromkeys({"species", "excluded", "neighbours", "starts"} & {*tensors}, "*i64")
    real = "*fp64" if kernel.spec.dtype == torch.float64 else "*fp32"
    options = dict(kernel.options)
    sizes = {name: options.pop(name) for name in ("ROWS", "COLUMNS")}
    signature = {
        **dict.fromkeys(tensors, real), **indices, **dict.fromkeys(numbers, "i32"),
        **dict.fromkeys(sizes, "constexpr"),
    }  # fmt: skip
    source = ASTSource(PROGRAM.func(kernel), signature, sizes)
    return compiled(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]
