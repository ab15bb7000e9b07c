"""Kernels that sum terms of pairs over the neighbours of each atom."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from adjsim.compiler import (
    compiled,
    graph_of,
    merge_repetitions,
    print_on_vectors,
    scalar_functions,
)
from adjsim.core.operators import operator, shapes_of
from adjsim.potentials.pairs.kernels.call import (
    CallStruct,
    ViewStruct,
    declarations,
    on_vectors,
    text,
)
from adjsim.potentials.pairs.kernels.cpu import lists
from adjsim.potentials.pairs.kernels.exclusions import check_exclusions
from adjsim.potentials.pairs.kernels.kernel import (
    NO_BOX,
    NO_SUCH_ATOM,
    ORTHOGONAL,
    TILTED,
    thread_count,
)

# The length of a row of pairs for which terms are traced.
_ROW = 8
# What the list of a call with threads has of an atom, as in the kernels of pair potentials.
_NEIGHBOURS = 64


class Pair(NamedTuple):
    """What terms of a pair (i, j) read, elementwise.

    Attributes:
        s: the squared distance, independent of ``d``.
        d: the difference q_i - q_j by coordinate.
        mine, other: numbers of atom i, and those of atom j.
        tables, turned: the entries (i, j) of tables ``(atoms, atoms)``, and the entries (j, i).
    """

    s: Tensor
    d: Sequence[Tensor]
    mine: Sequence[Tensor]
    other: Sequence[Tensor]
    tables: Sequence[Tensor] = ()
    turned: Sequence[Tensor] = ()

    def exchanged(self) -> Pair:
        """Return the pair (j, i)."""
        d = [-x for x in self.d]
        return Pair(self.s, d, self.other, self.mine, self.turned, self.tables)


Function = Callable[[Pair], Sequence[Tensor]]


@dataclass(frozen=True)
class SumSpec:
    """The parts of a kernel of sums other than its terms."""

    dtype: torch.dtype
    dim: int
    image: int
    cutoff: float
    skin: float
    numbers: int
    tables: int


class SumKernel:
    """The sums over j of terms of pairs (i, j) within a cutoff, for each atom i."""

    def __init__(self, function: Function, spec: SumSpec) -> None:
        self.spec = spec
        functions, self.sums = printed(function, spec)
        loads, others = _loads(functions, spec)
        defined = {
            "NO_BOX": NO_BOX,
            "ORTHOGONAL": ORTHOGONAL,
            "TILTED": TILTED,
            "IMAGE": spec.image,
            "DIM": spec.dim,
            "WIDTH": 4,
            "NUMBERS": spec.numbers,
            "SUMS": self.sums,
            "SLOTS": spec.dim + 2 * (spec.numbers + spec.tables),
            "SQUARED_DISTANCE": " + ".join(f"d[{a}] * d[{a}]" for a in range(spec.dim)),
            "LOAD_NUMBERS": loads,
            "GROUPS": -(-len(others) // 4),
            "READ_OF_OTHERS": ", ".join(map(str, [*others, -1])),
        }
        source = "\n".join(
            [
                scalar_functions(False),
                declarations(spec.dtype),
                *(f"#define {name} {value}" for name, value in defined.items()),
                *on_vectors(functions, spec.dtype),
                text("sums.cpp"),
            ]
        )
        self._library, self._lists = compiled(source, threads=True), lists(spec.dtype)
        #: Identifies the kernel, in this process and in others.
        written = f"{source}\n{spec.cutoff!r} {spec.skin!r}"
        self.name = hashlib.sha256(written.encode()).hexdigest()[:32]
        SUM_KERNELS[self.name] = self

    def __call__(
        self,
        position: Tensor,
        numbers: Tensor,
        box: Tensor | None,
        exclusions: Tensor | None,
        tables: Sequence[Tensor],
    ) -> Tensor:
        """Return the sums ``(sums, *batch, atoms)`` for ``(numbers, *batch, atoms)``."""
        spec, shape = self.spec, position.shape
        atoms, dim = shape[-2:]
        q = position.detach().to(spec.dtype).reshape(-1, atoms, dim)
        given = [x.detach().to(spec.dtype).contiguous() for x in (numbers, *tables)]
        cell = None if box is None else box.detach().to(spec.dtype).contiguous()
        left_out = None if exclusions is None else exclusions.detach().contiguous()
        found = torch.empty((self.sums, *shape[:-1]), dtype=spec.dtype, device="cpu")
        pointers = (ctypes.c_void_p * len(given))(*map(Tensor.data_ptr, given))
        results = (ctypes.c_void_p * 1)(found.data_ptr())
        call = CallStruct(
            systems=len(q),
            atoms=atoms,
            dim=dim,
            threads=thread_count(len(q) * atoms * _NEIGHBOURS),
            image=spec.image,
            position=ViewStruct(q.data_ptr(), 0, *q.stride()),
            box=0 if cell is None else cell.data_ptr(),
            operands=ctypes.addressof(pointers),
            gradients=ctypes.addressof(results),
            cutoff=spec.cutoff,
            skin=spec.skin,
            acquire=_address(self._lists.neighbours_acquire),
            release=_address(self._lists.neighbours_release),
            exclusions=0 if left_out is None else left_out.data_ptr(),
            excluded=0 if left_out is None else len(left_out),
        )
        status = self._library.pair_sums(ctypes.byref(call))
        if status == NO_SUCH_ATOM and exclusions is not None:
            check_exclusions(exclusions, atoms)
        if status:
            raise MemoryError("there is no memory for the pairs of atoms.")
        return found


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def printed(function: Function, spec: SumSpec) -> tuple[str, int]:
    """Print terms as C++ on vectors of pairs, and count them."""
    counts = spec.dim, spec.numbers, spec.numbers, spec.tables, spec.tables

    def outputs(s: Tensor, *given: Tensor) -> list[Tensor]:
        rest = iter(given)
        parts = [[next(rest) for _ in range(count)] for count in counts]
        with torch.no_grad():
            return [x.expand(s.shape) for x in function(Pair(s, *parts))]

    # A kernel may be made while a step is traced, which must not see this trace.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        examples = [torch.full((_ROW,), 1.1, dtype=spec.dtype) for _ in range(1 + sum(counts))]
        graph = graph_of(outputs, *examples, by_shape=False)
    merge_repetitions(graph)
    graph.graph.eliminate_dead_code()
    outcome: Any = graph.graph.output_node().args[0]
    return print_on_vectors(graph, spec.dtype), len(outcome)


def _loads(functions: str, spec: SumSpec) -> tuple[str, list[int]]:
    """Write the statements that load what the printed terms read into ``found``.

    Returned with them are the numbers of other atoms that are read, in the order of ``read``.
    """
    lanes, dim, count = "for (int l = 0; l < W; ++l)", spec.dim, spec.numbers
    used = {int(k) for k in re.findall(r"operands\[(\d+)\]", functions)}
    others = [k for k in range(count) if dim + count + k in used]
    entries = [f"d[{a}]" for a in range(dim)] + [f"own[{k}]" for k in range(count)]
    entries += [f"read[{others.index(k)}]" if k in others else "" for k in range(count)]
    statements = [f"found[{k}] = {entries[k]};" for k in sorted(used) if k < len(entries)]
    places = [
        f"call.operands[{1 + k}][call.atoms * atom[{row}[l]] + atom[{column}[l]]]"
        for row, column in (("mine", "other"), ("other", "mine"))
        for k in range(spec.tables)
    ]
    for k, place in enumerate(places, len(entries)):
        if k in used:
            statements.append(f"{lanes} found[{k}][l] = {place};")
    return " ".join(statements), others


# Kernels of this process by name, for the operators that name them.
SUM_KERNELS: dict[str, SumKernel] = {}


@operator("pair_sums")
def pair_sums(
    position: Tensor,
    numbers: Tensor,
    box: Tensor | None,
    exclusions: Tensor | None,
    tables: list[Tensor],
    kernel: str,
) -> Tensor:
    """Evaluate the kernel of a name. A traced step contains such operators."""
    return SUM_KERNELS[kernel](position, numbers, box, exclusions, tables)


@shapes_of(pair_sums)
def _(
    position: Tensor, numbers: Tensor, box: Any, exclusions: Any, tables: Any, kernel: str
) -> Tensor:
    return numbers.new_empty((SUM_KERNELS[kernel].sums, *position.shape[:-1]))
