"""Tracing of functions of tensors to graphs of operations."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from adjsim.compiler.lines import user_line
from adjsim.compiler.shapes import ShapeMode, common_result, without_gradient

_ATEN = torch.ops.aten


def graph_of(
    function: Callable[..., Sequence[Tensor]],
    *examples: Tensor,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    by_shape: bool = True,
) -> GraphModule:
    """Trace a function to a graph of operations, for the shapes and dtypes of example tensors.

    Args:
        decompositions: functions by which operations are traced as others.
        by_shape: whether operations are evaluated for shapes alone, as they have to be where
            examples are large. With their values, operations on a few numbers take less time.
    """
    fakes = ShapeMode() if by_shape else nullcontext()
    # Autograd has a thread for each device, in which nothing is recorded.
    one_thread = torch.autograd.set_multithreading_enabled
    with _disable_autocast_cache(), one_thread(False), fakes as mode:
        recorder = Recorder(decompositions or {}, mode)
        inputs = [mode.from_tensor(x) for x in examples] if mode else examples
        for x in inputs:
            recorder.add_input(x)
        with recorder:
            outputs = function(*inputs)
        # Few graphs are called, so their Python code is not written whenever they change.
        with _use_lazy_graph_module(True):
            return recorder.finished(outputs)


def inserted(graph: GraphModule, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert an operation into a graph, with what a trace notes of it."""
    node = graph.graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*map_arg(args, lambda x: x.meta["val"]), **kwargs)
    node.meta["line"] = next((x.meta.get("line", "") for x in node.all_input_nodes), "")
    return node


class Recorder(TorchDispatchMode):
    """A mode that records operations, while they are evaluated, as the nodes of a graph.

    Operations come as torch evaluates them, after autograd and transforms. A tensor is known by its
    identity, and is kept until the recording ends; one that no operation has made is a constant of
    the graph. ``node.meta`` has an operation's ``val``, which is its result without a gradient, and
    its ``line``, see :func:`~adjsim.compiler.lines.user_line`.

    Torch's own tracer (``make_fx``) records the same. It took 0.9 ms an operation, for the classes
    that it wraps around each tensor, and this mode takes a tenth.
    """

    # For `is_tracing`, which cannot import this class.
    records = True

    def __init__(
        self, decompositions: Mapping[Any, Callable[..., Any]], fakes: ShapeMode | None
    ) -> None:
        super().__init__()
        self.graph, self.decompositions, self.fakes = Graph(), decompositions, fakes
        self._known: dict[int, tuple[Tensor, Node]] = {}
        self._constants = nn.Module()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Importing Dynamo, only to leave this class out of it, takes a second.
        return False

    def add_input(self, x: Tensor) -> None:
        """Record a tensor as the next input."""
        node = self.graph.placeholder(f"input_{len(self._known)}")
        node.meta["val"] = x
        self._known[id(x)] = x, node

    def node_of(self, x: Tensor) -> Node | None:
        """Return the node of the operation that has made a tensor; None: it is a constant."""
        return self._known[id(x)][1] if id(x) in self._known else None

    def finished(self, outputs: Sequence[Tensor]) -> GraphModule:
        """Return the graph of these outputs."""
        self.graph.output(self._recorded(list(outputs)))
        self._known.clear()
        return _make_graph_module(self._constants, self.graph)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The device of a tensor, which is no operation of torch's dispatcher.
        if func.namespace == "prim":
            return func(*args, **kwargs)
        made = self._decomposed(func, args, kwargs)
        if made is not NotImplemented:
            return made
        if func is _ATEN.detach.default and (node := self.node_of(args[0])) is not None:
            found = self._evaluated(func, args, kwargs)
            self._known[id(found)] = found, node
            return found
        if func is _ATEN._local_scalar_dense.default and self._is_number(args[0]):
            raise RuntimeError("the value of a tensor is read while its operations are recorded")
        # Before the operation is evaluated, which may write to its arguments.
        inputs = tuple(self._recorded(args)), {k: self._recorded(x) for k, x in kwargs.items()}
        found = self._evaluated(func, args, kwargs)
        # Sizes and numbers are not recorded. Operations that return nothing check, or write.
        if found is not None and not _has_tensors(found):
            return found
        # A constant is copied, since the next operation may write to it.
        target = _ATEN.lift_fresh_copy.default if func is _ATEN.lift_fresh.default else func
        name = target.overloadpacket.__name__
        node = self.graph.create_node("call_function", target, *inputs, name=name)
        node.meta["line"] = user_line(sys._getframe(1))
        self._add(found, node)
        return found

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Evaluate the operations of which an operation consists, if it is not recorded itself."""
        if func in self.decompositions:
            with self:
                return self.decompositions[func](*args, **kwargs)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented

    def _evaluated(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = NotImplemented
        if self.fakes is not None:
            found = common_result(func, args, kwargs, self.fakes)
        return func(*args, **kwargs) if found is NotImplemented else found

    def _is_number(self, x: Tensor) -> bool:
        """Whether a tensor has a value, which is that of an example."""
        return type(x) is Tensor and id(x) in self._known

    def _recorded(self, value: Any) -> Any:
        """Return an argument with nodes in the place of tensors."""
        if isinstance(value, Tensor):
            return self.node_of(value) or self._constant(value)
        if isinstance(value, list | tuple):
            return [self._recorded(x) for x in value]
        return value

    def _constant(self, x: Tensor) -> Node:
        if isinstance(x, FakeTensor):
            raise RuntimeError("a tensor without values has been made while nothing was recorded")
        name = f"constant_{len(self._known)}"
        setattr(self._constants, name, x)
        node = self.graph.get_attr(name)
        node.meta["val"] = x
        self._known[id(x)] = x, node
        return node

    def _add(self, value: Any, node: Node) -> None:
        """Record the result of an operation, or its parts."""
        node.meta["val"] = _detached(value)
        if isinstance(value, Tensor):
            self._known[id(value)] = value, node
        elif isinstance(value, list | tuple):
            for k, part in enumerate(value):
                if _has_tensors(part):
                    self._add(part, self.graph.call_function(operator.getitem, (node, k)))


def present_recorder() -> Recorder | None:
    """Return the recorder of the operations of this thread, if one is active."""
    modes = _get_current_dispatch_mode_stack()
    return next((x for x in reversed(modes) if isinstance(x, Recorder)), None)


@contextmanager
def _disable_autocast_cache() -> Generator[None]:
    """Keep parameters that autocast has cast before out of a trace."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)


def _detached(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_detached, value))
    return without_gradient(value) if isinstance(value, Tensor) else value


@cache
def _is_composite(func: Any) -> bool:
    """Whether torch evaluates an operation by others, of which autograd would record each."""
    kernels = torch._C._dispatch_has_kernel_for_dispatch_key
    return kernels(func.name(), "CompositeImplicitAutograd") and not kernels(func.name(), "Meta")
