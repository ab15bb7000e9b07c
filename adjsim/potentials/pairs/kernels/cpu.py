"""Kernels of the CPU, compiled from C++, and the neighbour lists that they share."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
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
    Kernel,
    KernelSpec,
    PairInputs,
)


class CppKernel(Kernel):
    """A kernel of the CPU, compiled from C++."""

    by, slower_than_loops, lists_need_cutoff = "", True, False
    sums_tables, takes_rows = True, True

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
        super().__init__(spec, source, slope)

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
        rows = self.rows_of(given)
        moving = {
            name: torch.empty((*rows, *spec.shape_of(name, shape)), dtype=spec.dtype, device="cpu")
            for name in spec.outputs
        }
        found = [
            torch.empty((*rows, *given.operands[k].shape), dtype=spec.dtype, device="cpu")
            for k in spec.gradients
        ]
        outcome = [*moving.values(), *found]
        results, gradients = list(moving.values()), found
        if rows:
            assert given.vector is not None
            moving["vector"] = given.vector
            given = given._replace(vector=given.vector[0])
            results, gradients = ([x[0] for x in part] for part in (results, found))

        def field(x: Tensor) -> ViewStruct:
            x = x.reshape(*flat.shape[:-1], x.shape[-1])
            return ViewStruct(x.data_ptr(), *x.stride())

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
        for _ in range(1, math.prod(rows)):
            # All but what belongs to a row stays, so rows cost no more than their loops over pairs.
            for name, x in moving.items():
                place: Any = getattr(call, name)
                place.data += x.stride(0) * x.element_size()
            for k, x in enumerate(found):
                sums[k] += x.stride(0) * x.element_size()
            status = status or self._library.pairs(ctypes.byref(call))
        if status == OUT_OF_RANGE:
            raise IndexError(f"species must be indices from 0 to {call.kinds - 1}.")
        if status == NO_SUCH_ATOM and given.exclusions is not None:
            check_exclusions(given.exclusions, shape[-2])
        if status:
            raise MemoryError("there is no memory for the pairs of atoms.")
        return outcome


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def lists(dtype: torch.dtype) -> ctypes.CDLL:
    """Load the library of neighbour lists."""
    parts = declarations(dtype), text("cells.cpp"), text("neighbours.cpp")
    library = compiled("\n".join(parts), threads=True)
    library.neighbours_builds.restype = ctypes.c_int64
    return library
