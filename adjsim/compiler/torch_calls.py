"""Calls of torch's own operations from a printed loop.

Operations that are not printed are evaluated by torch while the loop runs: the loop calls a Python
function, which takes a few microseconds more than the operations do. They are collected in regions,
of which each is one call. The level of an operation is the number of regions that have to run
before it, and torch's operations of one level are one region. Values of types that are not printed,
such as complex numbers, stay in Python, where later regions read them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from adjsim.compiler.calls import Address, Call, Called, address_of, in_order, pointer_to
from adjsim.compiler.values import TYPES, Store, UnprintableError, Value

Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
# The status of a loop in which a called function raised an error, and what a function returns that
# did not. (What ctypes returns for a function that raises is not defined.)
FAILED, SINGULAR, DONE = 5, 6, 1_234_567


class Run:
    """The state of one run of a loop: values that stay in Python, and an error of a call."""

    def __init__(self) -> None:
        self.values: dict[Node, Tensor] = {}
        self.error: BaseException | None = None


class Region:
    """Operations of a graph that torch evaluates together, as one function of tensors.

    Attributes:
        printed, kept: the values that it reads, from the loop and from earlier regions.
        results, left: the values that it computes for the loop and for later regions.
        checks: whether an operation has an effect beside its value, such as an assertion.
    """

    def __init__(self, nodes: Sequence[Node], by_torch: Iterable[Node]) -> None:
        inside, elsewhere = set(nodes), set(by_torch)
        read = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside)
        self.kept = [x for x in read if x in elsewhere and not is_printable(x)]
        self.printed = [x for x in read if x not in self.kept]
        used = [node for node in nodes if any(user not in inside for user in node.users)]
        self.results = [node for node in used if is_printable(node)]
        self.left = [node for node in used if not is_printable(node)]
        graph, known = Graph(), {}
        for node in (*self.printed, *self.kept):
            known[node] = graph.placeholder(node.name)
        for node in nodes:
            first = node.args[0] if node.args else None
            if mutates(node) and isinstance(first, Node) and first not in inside:
                known[first] = graph.call_function(torch.ops.aten.clone.default, (known[first],))
            known[node] = graph.node_copy(node, known.__getitem__)
            # Parts and expanded tensors are dense in the loop, with strides other than traced.
            if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
                known[node].target = torch.ops.aten.reshape.default
            if node.target is torch.ops.aten.as_strided.default and not _is_dense(first):
                raise UnprintableError("as_strided of a part of a tensor")
        graph.output(tuple(known[node] for node in (*self.results, *self.left)))
        self.checks = any(has_effect(node) for node in nodes)
        self.function = GraphModule(torch.nn.Module(), graph)


def _is_dense(node: Any) -> bool:
    meta = node.meta["val"]
    last = sum((n - 1) * stride for n, stride in zip(meta.shape, meta.stride(), strict=True))
    return meta.numel() == 1 + last and not meta.storage_offset()


def has_effect(node: Node) -> bool:
    """Whether a node counts even if nothing reads its value, such as an assertion."""
    target: Any = node.target
    return node.is_impure() or (hasattr(target, "_schema") and not target._schema.returns)


def mutates(node: Node) -> bool:
    """Whether an operation writes to one of its arguments."""
    target: Any = node.target
    return hasattr(target, "_schema") and target._schema.is_mutable


def overwrites_its_own(node: Node) -> bool:
    """Whether an operation in place overwrites a new tensor that nothing else reads.

    Formulas of autograd do, such as that of ``clamp``.
    """
    target: Any = node.target
    if not target._schema.is_mutable or not isinstance(node.args[0], Node):
        return False
    made: Any = node.args[0]
    return (
        len(made.users) == 1
        and made.op == "call_function"
        and hasattr(made.target, "_schema")
        and (
            overwrites_its_own(made)
            or not any(result.alias_info for result in made.target._schema.returns)
        )
    )


def is_printable(node: Node) -> bool:
    """Whether the value of a node is a tensor of a type that is printed."""
    meta = node.meta.get("val")
    return isinstance(meta, Tensor) and meta.device.type == "cpu" and meta.dtype in TYPES


def described(nodes: Iterable[Node]) -> str:
    """Name operations and the lines of code from which they come, each once."""
    calls = [node for node in nodes if hasattr(node.target, "_schema")]
    names = (f"{str(x.target).removeprefix('aten.')} ({x.meta.get('line', '')})" for x in calls)
    return ", ".join(dict.fromkeys(names))


def schedule(graph: GraphModule, by_torch: set[Node]) -> list[Node | Region]:
    """Return the nodes of a graph in an order in which torch's operations are in few regions."""
    levels: dict[Node, int] = {}
    for node in graph.graph.nodes:
        after = node not in by_torch
        found = (levels[x] + (after and x in by_torch) for x in node.all_input_nodes)
        levels[node] = max(found, default=0)
    order: list[Node | Region] = []
    for level in range(max(levels.values(), default=0) + 1):
        nodes = [node for node in graph.graph.nodes if levels[node] == level]
        order += [node for node in nodes if node not in by_torch]
        called = [node for node in nodes if node in by_torch]
        order += [Region(called, by_torch)] if called else []
    return order


class TorchCall(Call):
    """A call of a region, whose last output is a token that later regions read."""

    declarations = "typedef int (*Callback)(void* const*);"
    # The address of the function is that of a run.
    addresses = (0,)

    def __init__(
        self, region: Region, values: Sequence[Value], before: Called | None, store: Store
    ) -> None:
        self.region, self.checks = region, region.checks
        like = [node.meta["val"] for node in region.printed]
        inputs = [in_order(x, store, y.stride()) for x, y in zip(values, like, strict=True)]
        self.inputs = (*inputs, *([before] if before else []))
        made = [node.meta["val"] for node in region.results]
        token = torch.empty(1, dtype=torch.int64, device="meta")
        self.outputs = tuple(map(self.output, [*made, token]))
        stored = [*inputs, *self.outputs[:-1]]
        self.places = [
            (x.dtype, x.shape, _strides(address_of(x), meta))
            for x, meta in zip(stored, [*like, *made], strict=True)
        ]

    def lines(self, functions: Sequence[str]) -> list[str]:
        stored = [*self.inputs[: len(self.region.printed)], *self.outputs[:-1]]
        pointers = ", ".join(f"(void*){pointer_to(x)}" for x in stored) or "nullptr"
        return [
            f"{{ void* const at[] = {{{pointers}}};",
            f"if (!*refused && ((Callback){functions[0]})(at) != {DONE}) *refused = {FAILED};",
            f"*{pointer_to(self.outputs[-1])} = 0; }}",
        ]

    def bound(self, run: Run) -> Any:
        """Return the function that a run of the loop calls."""
        region, places, count = self.region, self.places, len(self.places)
        read, function = len(region.printed), self.region.function.forward
        known: dict[tuple[int, ...], list[Tensor]] = {}

        def served() -> Generator[int, Any, None]:
            # Python runs the handlers of signals where code begins to run. So a generator is
            # called, which goes on inside of its try. Nothing may be raised into C++.
            status = 0
            while True:
                try:
                    while True:
                        pointers = yield status
                        addresses = tuple(pointers[:count])
                        tensors = known.get(addresses)
                        if tensors is None:
                            made = (_tensor(*x) for x in zip(addresses, places, strict=True))
                            tensors = known[addresses] = list(made)
                        kept = [run.values[node] for node in region.kept]
                        found = function(*tensors[:read], *kept)
                        for to, x in zip(tensors[read:], found, strict=False):
                            to.copy_(x)
                        if region.left:
                            # A view of the loop's memory is copied, since the loop uses that memory
                            # again before later regions read the view.
                            shared = {x.untyped_storage().data_ptr() for x in tensors}
                            for node, x in zip(region.left, found[count - read :], strict=True):
                                own = x.untyped_storage().data_ptr() not in shared
                                run.values[node] = x if own else x.clone()
                        status = DONE
                except GeneratorExit:
                    return
                except BaseException as error:
                    run.error, status = error, 0

        serving = served()
        next(serving)
        return Callback(serving.send)


def _strides(address: Address | None, meta: Tensor) -> tuple[int, ...]:
    """Return the strides of a value, those of the trace for axes of length one.

    A loop has zero there, and torch's libraries step from matrix to matrix by the last axis of a
    batch even if its length is one.
    """
    if address is None:
        return ()
    pairs = zip(meta.shape, address.strides, meta.stride(), strict=True)
    return tuple(traced if n == 1 else own for n, own, traced in pairs)


def _tensor(address: int, place: tuple[torch.dtype, Sequence[int], Sequence[int]]) -> Tensor:
    """Return the tensor in memory from an address on."""
    dtype, shape, strides = place
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * ((1 + last) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
