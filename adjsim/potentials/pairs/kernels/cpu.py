"""Kernels of the CPU, compiled from C++, and the neighbour lists that they share."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from adjsim.compiler import compiled, print_on_vectors, scalar_functions
from adjsim.potentials.pairs.kernels.call import (
    CallStruct,
    ViewStruct,
    declarations,
    on_vectors,
    text,
)
from adjsim.potentials.pairs.kernels.exclusions import check_exclusions
from adjsim.potentials.pairs.kernels.kernel import (
    ATOM,
    FUNCTION,
    NO_BOX,
    NO_SUCH_ATOM,
    NUMBER,
    ORTHOGONAL,
    OUT_OF_RANGE,
    OUTPUTS,
    PRODUCT,
    TABLE,
    TILTED,
    WHOLE,
    Kernel,
    KernelSpec,
    PairInputs,
)

# Sums of a function's coefficients are over so many parts of the pairs, whichever thread has them.
PARTS = 16


class CppKernel(Kernel):
    """A kernel of the CPU, compiled from C++."""

    by, slower_than_loops, lists_need_cutoff = "", True, False
    sums_tables = True

    def __init__(
        self, spec: KernelSpec, functions: str, slope: str, lookups: Sequence[int] = ()
    ) -> None:
        source = _source(spec, functions, lookups)
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
        spec = replace(self.spec, several=True, mutual=False)
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


def _source(spec: KernelSpec, functions: str, lookups: Sequence[int] = ()) -> str:
    """Write the C++ source of the kernel around its formulas.

    ``lookups`` has, for each place at which the formulas read a function, the number of the
    function among the gradients.
    """
    numbers = (
        f"splat(c.operands[{k}][0])" if kind == NUMBER else "V{}"
        for k, kind in enumerate(spec.kinds)
    )
    functions_of_tables = [
        f"call.operands[{k}]" for k, kind in enumerate(spec.kinds) if kind == FUNCTION
    ]
    lengths = [spec.lengths[k] for k in spec.gradients]
    defined = {
        **{mode: number for number, mode in enumerate(OUTPUTS)},
        "MODE": spec.mode,
        "WIDTH": 8 if spec.mode == PRODUCT and not spec.several else 4,
        "NO_BOX": NO_BOX,
        "ORTHOGONAL": ORTHOGONAL,
        "TILTED": TILTED,
        "IMAGE": spec.image,
        "DIM": spec.dim,
        "CUTOFF": int(spec.cutoff is not None),
        "LISTED": int(spec.skin is not None),
        "GRID": int(spec.rounds),
        "STRAINED": int(spec.strained is not None),
        "SEVERAL": int(spec.several),
        "MUTUAL": int(spec.mutual),
        "VIRIAL": spec.dim**2 if spec.strained == WHOLE else spec.dim,
        "OPERANDS": len(spec.kinds),
        "SLOTS": len(spec.kinds) + spec.kinds.count(ATOM) - spec.kinds.count(FUNCTION),
        "GRADIENTS": len(spec.gradients),
        "LOOKUPS": len(lookups),
        "PARTS": PARTS,
        "FUNCTIONS": f"{{{', '.join([*functions_of_tables, 'nullptr'])}}}",
        "SQUARED_DISTANCE": " + ".join(f"d[{a}] * d[{a}]" for a in range(spec.dim)),
        "LOAD_OPERANDS": _loads(spec),
        # The operand whose numbers are in the rows of a list, behind the positions.
        "PACKED": spec.kinds.index(ATOM) if ATOM in spec.kinds else -1,
        "NUMBERS": f"{{{', '.join(numbers)}}}",
        **({"EXCLUDED": ""} if spec.excluded else {}),
    }
    return "\n".join(
        [
            scalar_functions(spec.rounds),
            declarations(spec.dtype),
            *(f"#define {name} {value}" for name, value in defined.items()),
            "enum Kind { NUMBER, TABLE, ATOM, FUNCTION };",
            _array("Kind KIND", [*spec.kinds, NUMBER]),
            _array("Kind GRADIENT_KIND", [*(spec.kinds[k] for k in spec.gradients), NUMBER]),
            # The lengths of functions with gradients, and where they begin one after the other.
            _array("int64_t LENGTH", [*lengths, 0]),
            _array("int64_t BEGIN", [0, *accumulate(lengths)]),
            _array("int LOOKUP_GRADIENT", [*lookups, 0]),
            *(
                f"constexpr bool {kind}S = {str(kind in spec.kinds).lower()};"
                for kind in (TABLE, ATOM)
            ),
            *on_vectors(functions, spec.dtype),
            text("rows.cpp")
            .replace("COTANGENTS\n", text("cotangents.cpp") * spec.several)
            .replace("MUTUAL_SUMS\n", text("mutual.cpp") * spec.mutual),
        ]
    )


def _loads(spec: KernelSpec) -> str:
    """Write the statements that load the operands of pairs into ``found``."""
    loads: list[str] = []
    listed = spec.skin is not None
    for k, kind in enumerate(spec.kinds):
        values = f"operands.atoms[{k}]"
        if kind == NUMBER:
            loads.append(f"= numbers[{k}]")
        elif kind == TABLE and listed:
            held = f"among(beside(operands.few[{k}]), entries)"
            loads.append(f"= few ? {held} : lanes(call.operands[{k}], entries)")
        elif kind == TABLE:
            loads.append(f"= beside(operands.tables[{k}] + first)")
        elif kind == ATOM:
            other = f"lanes({values}, other)" if listed else f"splat({values}[other[0]])"
            packed = listed and k == spec.kinds.index(ATOM)
            loads += [f"= own[{k}]", "= packed" if packed else f"= {other}"]
    places = {
        True: "const bool few = call.kinds * call.kinds <= W; "
        "const Places entries = row + columns(operands.column, other);",
        False: "const int64_t first = entry(mine[0], call.kinds, operands.column[other[0]]);",
    }
    needed = [places[listed]] if TABLE in spec.kinds else []
    return " ".join([*needed, *(f"found[{k}] {load};" for k, load in enumerate(loads))])


def _array(name: str, entries: Iterable[Any]) -> str:
    return f"constexpr {name}[] = {{{', '.join(map(str, entries))}}};"
