"""Kernels of the CPU, compiled from C++, and the neighbour lists that they share."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from adjsim.compiler import compiled, print_on_vectors
from adjsim.potentials.pairs.kernels.call import CallStruct, ViewStruct, declarations, text
from adjsim.potentials.pairs.kernels.exclusions import check_exclusions
from adjsim.potentials.pairs.kernels.kernel import (
    ATOM,
    FUNCTION,
    NO_SUCH_ATOM,
    OUT_OF_RANGE,
    PRODUCT,
    Kernel,
    KernelSpec,
    PairInputs,
)


class CppKernel(Kernel):
    """A kernel of the CPU, compiled from C++."""

    by, slower_than_loops, lists_need_cutoff = "", True, False
    sums_tables = True

    def __init__(
        self, spec: KernelSpec, functions: str, slope: str, lookups: Sequence[int] = ()
    ) -> None:
        source = spec.source(functions, lookups)
        self._library = compiled(source, threads=True)
        #: The addresses of its function, and of those that provide and release lists, if any.
        self.address, self.list_addresses = _address(self._library.pairs), (0, 0)
        if spec.skin is not None:
            found = lists(spec.dtype)
            functions_of_lists = found.neighbours_acquire, found.neighbours_release
            self.list_addresses = tuple(map(_address, functions_of_lists))
        self._functions, self._lookups = functions, lookups
        super().__init__(spec, source, slope)

    @functools.cached_property
    def of_several(self) -> CppKernel | None:
        if self.spec.mode != PRODUCT:
            return None
        spec = replace(self.spec, several=True)
        return CppKernel(spec, self._functions, self._slope, self._lookups)

    @staticmethod
    def tile_of(atoms: int, listed: bool) -> None:
        return None

    @staticmethod
    def check(spec: KernelSpec) -> None:
        pass

    @staticmethod
    def printed(graph: GraphModule, spec: KernelSpec, chosen: Sequence[int] | None = None) -> str:
        # A number of each atom is two inputs of a formula.
        inputs = [x for kind in spec.kinds for x in ([kind] * (2 if kind == ATOM else 1))]
        tables = [k for k, kind in enumerate(inputs) if kind == FUNCTION]
        return print_on_vectors(graph, spec.dtype, chosen, tables)

    def computed(self, shape: torch.Size, given: PairInputs) -> list[Tensor]:
        # The call holds addresses of the tensors given.
        spec, flat = self.spec, given.position
        shapes = spec.shapes(given)
        outcome = [torch.empty(x, dtype=spec.dtype, device="cpu") for x in shapes]
        results, gradients = outcome[: len(spec.outputs)], outcome[len(spec.outputs) :]

        def field(x: Tensor) -> ViewStruct:
            *cotangent, system, atom, axis = x.stride()
            return ViewStruct(x.data_ptr(), *(cotangent or [0]), system, atom, axis)

        operands, sums = (
            (ctypes.c_void_p * (len(x) + 1))(*map(Tensor.data_ptr, x))
            for x in (given.operands, gradients)
        )
        acquire, release = self.list_addresses
        call = CallStruct(
            **spec.arguments(len(flat), given, results, field, Tensor.data_ptr),
            operands=ctypes.addressof(operands),
            gradients=ctypes.addressof(sums),
            acquire=acquire,
            release=release,
        )
        status = self._library.pairs(ctypes.byref(call))
        if status == OUT_OF_RANGE:
            raise IndexError(f"species must be indices from 0 to {call.kinds - 1}.")
        if status == NO_SUCH_ATOM and given.exclusions is not None:
            check_exclusions(given.exclusions, shape[-2])
        if status:
            raise MemoryError("there is no memory for the pairs of atoms.")
        batched = spec.shapes(given._replace(position=given.position.reshape(shape)))
        return [x.reshape(y) for x, y in zip(outcome, batched, strict=True)]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def lists(dtype: torch.dtype) -> ctypes.CDLL:
    """Load the library of neighbour lists."""
    parts = declarations(dtype), text("cells.cpp"), text("neighbours.cpp")
    library = compiled("\n".join(parts), threads=True, containers=True)
    library.neighbours_builds.restype = ctypes.c_int64
    return library
