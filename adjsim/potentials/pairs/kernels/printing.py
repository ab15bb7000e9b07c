"""Kernels in compiled steps: the call from a printed loop, and forces taken from products.

A backward step needs the force at a position before it knows the vector of the product there, so it
asks for the force and then for the product, which computes the force again. In a trace both are
known, and the force is taken from the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.tools_common import legalize_graph

from adjsim.compiler import (
    Address,
    Call,
    Operators,
    UnprintableError,
    Value,
    address_of,
    dense_copy,
    in_order,
    pointer_to,
)
from adjsim.potentials.pairs.kernels.call import CALL, declarations
from adjsim.potentials.pairs.kernels.cpu import CppKernel
from adjsim.potentials.pairs.kernels.exclusions import matrix
from adjsim.potentials.pairs.kernels.kernel import (
    FORCE,
    KERNELS,
    PRODUCT,
    PairInputs,
    pairs,
)

_OPERATOR = pairs
# The arguments other than the vectors of a product.
_SAME = tuple(i for i, name in enumerate(PairInputs._fields) if name not in ("vector", "stretch"))


class PairCall(Call):
    """The evaluation of a kernel, with the arguments of the operator as values."""

    def __init__(
        self, args: Sequence[Any], outputs: Sequence[torch.Tensor], store: Callable[..., None]
    ) -> None:
        *given, kernel = args
        found_kernel: Any = KERNELS[kernel]
        self.kernel: CppKernel = found_kernel
        self._store, self.batch = store, given[0].shape[:-2]
        found = dict(zip(PairInputs._fields, given, strict=True))
        values = found.pop("operands")
        stored: Any = {name: value and self._stored(name, value) for name, value in found.items()}
        operands: Any = [self._stored("operands", value) for value in values]
        self.arguments: Any = PairInputs(**stored, operands=operands)
        self.inputs = tuple(y for y in (*stored.values(), *operands) if y is not None)
        self.outputs = tuple(map(self.output, outputs))
        self.addresses = (self.kernel.address, *self.kernel.list_addresses)
        # A loop hands pointers on, whatever they point to, and may have kernels of two precisions.
        self.declarations = declarations(torch.float64)
        self.parallel = (
            found_kernel.spec.threads(torch.Size(self.batch).numel(), self.arguments) > 1
        )

    def lines(self, functions: Sequence[str]) -> list[str]:
        spec, x = self.kernel.spec, self.arguments
        systems, gradients = torch.Size(self.batch).numel(), self.outputs[len(spec.outputs) :]
        members = {
            **spec.arguments(systems, x, self.outputs, self._view, pointer_to),
            **({"threads": "team.threads"} if self.parallel else {}),
            "operands": "operands",
            "gradients": "gradients",
            "acquire": f"(Acquire*){functions[1]}",
            "release": f"(Release*){functions[2]}",
        }
        return [
            "{",
            f"const REAL* operands[] = {{{_list(x.operands)}}};",
            f"REAL* gradients[] = {{{_list(gradients)}}};",
            "Call call = {};",
            *(f"call.{m} = (decltype(call.{m})){value};" for m, value in members.items()),
            f"const int status = ((int (*)(const Call*)){functions[0]})(&call);",
            "if (status) *refused = status;",
            "}",
        ]

    def _stored(self, name: str, value: Value) -> Value:
        """Store an argument, a field ``(*batch, atoms, dim)`` so that its batch axes are one."""
        real = self.kernel.spec.dtype
        if value.dtype != (torch.int64 if "int64_t" in CALL[name] else real):
            raise UnprintableError("pairs of mixed types")
        if CALL[name] != "View":
            return in_order(value, self._store)
        address = address_of(value)
        if address is None or self._system_stride(value, address) is None:
            value = dense_copy(value, value.strides)
            self._store(value, fill=False)
        return value

    def _system_stride(self, value: Value, address: Address) -> int | None:
        """Return the distance of systems in memory; None if it is not the same for all."""
        strides = address.strides[self._cotangent_axes(value) :]
        axes = [(n, strides[a]) for a, n in enumerate(self.batch) if n > 1]
        for (_, outer), (n, inner) in pairwise(axes):
            if outer != n * inner:
                return None
        return axes[-1][1] if axes else 0

    def _cotangent_axes(self, value: Value) -> int:
        return len(value.shape) - len(self.batch) - 2

    def _view(self, value: Value) -> str:
        address = address_of(value)
        assert address is not None
        system = self._system_stride(value, address)
        if system is None:
            raise UnprintableError("pairs of systems that are not evenly spaced")
        first = address.strides[0] if self._cotangent_axes(value) else 0
        strides = ", ".join(str(x) for x in (first, system, *address.strides[-2:]))
        return f"View{{(REAL*){address.pointer}, {strides}}}"


def _list(values: Iterable[Value]) -> str:
    return ", ".join([*(f"(REAL*){pointer_to(x)}" for x in values), "nullptr"])


def merge_pairs(graph: GraphModule) -> None:
    """Take forces from the products at the same position, unless the vector depends on them."""
    calls = [node for node in graph.graph.nodes if node.target is _OPERATOR]
    products = [node for node in calls if _mode(node) == PRODUCT]
    changed = False
    for force in [node for node in calls if _mode(node) == FORCE]:
        same = (x for x in products if _same(force, x) and not _depends(x, force))
        if (product := next(same, None)) is not None:
            force.replace_all_uses_with(product)
            graph.graph.erase_node(force)
            changed = True
    if changed:
        legalize_graph(graph)
        graph.recompile()


def _mode(node: Node) -> str:
    return KERNELS[str(node.args[-1])].spec.mode


def _same(force: Node, product: Node) -> bool:
    kernels = KERNELS[str(force.args[-1])], KERNELS[str(product.args[-1])]
    return kernels[0].shares_force(kernels[1]) and all(
        _origin(force.args[i]) == _origin(product.args[i]) for i in _SAME
    )


def _origin(x: Any) -> Any:
    """Return the node of which an argument is a copy without history."""
    if isinstance(x, (list, tuple)):
        return [_origin(y) for y in x]
    while isinstance(x, Node) and x.target is torch.ops.aten.detach.default:
        x = x.args[0]
    return x


def _depends(node: Node, on: Node) -> bool:
    seen, todo = {node}, [node]
    while todo:
        for before in todo.pop().all_input_nodes:
            if before is on:
                return True
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return False


# Exclusions do not change in a loop.
_MATRIX = {matrix}
PAIR_OPERATORS = Operators({_OPERATOR: PairCall}, _MATRIX, _MATRIX, merge_pairs)
