"""A loop of steps as one compiled function of tensors.

What a loop does is written down by running it on tensors that record their operations, one part after the other, and put around
torch's own ``while_loop``; torch's Inductor compiles the whole, so that no turn comes back to Python. What the loop is of, its
caller says in :class:`Written`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from adjsim._state import writing_down

# What a pair of atoms needs is computed in its loop, and not stored for each; what an atom needs is stored, see stored(). With
# the C++ wrapper a turn of the loop does not come back to Python. Steps of the noise are counted here and need no check.
OPTIONS = {
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 1024,
    "unroll_reductions_threshold": 1,
    "cpp_wrapper": True,
    "assert_indirect_indexing": False,
    # Its graphs are part of what is looked up, so that a loop may be remembered across processes.
    "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.while_loop": "adjsim"},
}


class CompileError(RuntimeError):
    """A step could not be compiled."""


@dataclass
class Written:
    """A loop as it is written down.

    Its parts are functions of what does not change in the loop (``given``), of the turn's number ``k`` and of what the loop
    carries. ``start`` comes before the first turn and gives ``k`` and what is carried, ``more(k, count)`` says whether another
    turn comes, where ``count`` is the first of what is given, and ``finish`` comes after the last.
    """

    start: Callable[[list[Tensor], list[Tensor]], list[Tensor]]
    more: Callable[[Tensor, Tensor], Tensor]
    turn: Callable[[list[Tensor], Tensor, list[Tensor]], list[Tensor]]
    finish: Callable[[list[Tensor], list[Tensor]], list[Tensor]]


def compile_loop(
    written: Written,
    within: Callable[[Sequence[Tensor]], AbstractContextManager[list[Tensor]]],
    around: list[Tensor],
    carried: list[Tensor],
    short: bool,
    what: str,
) -> Callable[..., list[Tensor]]:
    """A function of tensors like ``around`` and ``carried`` that gives what is carried in the end.

    Args:
        written: what the loop does.
        within: the context in which it is written down, with the tensors that stand for ``around``; it says what is given.
        around: what does not change in the loop.
        carried: what does.
        short: whether less lies side by side than fills a vector.
        what: whose loop it is, for the error.

    Raises:
        CompileError: it cannot be compiled.
    """
    # Inductor takes a second to import, which most runs have no use for.
    from torch._inductor import compile as inductor

    while_loop = torch.ops.higher_order.while_loop
    split, kept = len(around), len(carried)

    def start(*values: Tensor) -> list[Tensor]:
        with within(values[:split]) as given:
            return written.start(given, list(values[split:]))

    def turn(k: Tensor, *values: Tensor) -> list[Tensor]:
        with within(values[kept:]) as given:
            return written.turn(given, k, list(values[:kept]))

    def finish(*values: Tensor) -> list[Tensor]:
        with within(values[kept:]) as given:
            return written.finish(given, list(values[:kept]))

    try:
        # One by one, since no gradient is taken inside of torch's loop.
        first, each = _write_down(start, *around, *carried), _write_down(turn, around[0].clone(), *carried, *around)
        last, constants = _write_down(finish, *carried, *around), _lift(each)

        def whole(*values: Tensor) -> list[Tensor]:
            def more(k: Tensor, *inside: Tensor) -> Tensor:
                return written.more(k, inside[kept])

            begun = first(*values)
            _, *out = while_loop(more, each, tuple(begun), (*values[:split], *constants))
            # What a loop of no turns gives lies where what went in lay, which Inductor would take for free if it were not
            # asked for.
            return [*last(*out, *values[:split]), *begun]

        graph = _write_down(whole, *around, *carried)
        like = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        # Where less than a vector lies side by side, plain numbers are faster, and compile in half the time.
        options = {**OPTIONS, "cpp.simdlen": 1} if short else OPTIONS
        with tracing(TracingContext(like[0].fake_mode)):
            compiled: Any = inductor(graph, like, options=options)
    except Exception as error:
        raise CompileError(
            f"compile=True could not compile {what}: {error}\n"
            "Potentials and records have to be torch operations whose course does not depend on values (no float(x), "
            "x.item() or `if` on a tensor). Write them so, or leave compile=True out."
        ) from error
    return lambda *values: list(compiled(*values)[:kept])


class Constant:
    """A tensor that a loop has read without being given it."""

    def __init__(self, x: Tensor) -> None:
        self.tensor, self.version = ref(x), x._version

    def check(self) -> None:
        """Refuse one that a gradient is wanted by."""
        x = self.tensor()
        if x is not None and x.requires_grad:
            raise ValueError(
                f"a potential or a record reads a tensor of shape {tuple(x.shape)} that requires grad and is not registered. "
                "Make it an nn.Parameter (or a buffer) of the potential or the dynamics, or detach() it."
            )

    def changed(self) -> bool:
        """Whether it was written to since."""
        x = self.tensor()
        return x is not None and x._version != self.version


class NoCapture(TorchFunctionMode):
    """Refuses, while a loop is written down, a tensor that is reached past its module: it would be a constant, and have no
    gradient.

    Args:
        registered: the tensors for which inputs stand.
        constants: where those go that are read and will be constants.
    """

    def __init__(self, registered: Sequence[Tensor], constants: list[Constant]) -> None:
        super().__init__()
        self.registered, self.constants = {id(x) for x in registered}, constants

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(id(x) in self.registered for x in tensors):
            raise ValueError(
                "a potential or a record reads a parameter or buffer of the dynamics past its module, as a variable of its "
                "own; read it as an attribute of the module, such as dynamics.kT or self.k."
            )
        found = [Constant(x) for x in tensors if not isinstance(x, FakeTensor)]
        for constant in found:
            constant.check()
        self.constants.extend(found)
        return func(*args, **(kwargs or {}))


def own(x: Tensor) -> Tensor:
    """A copy: nothing that a loop takes or gives may share memory."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _write_down(function: Callable[..., list[Tensor]], *inputs: Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    with writing_down():
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def _lift(graph: Any) -> list[Tensor]:
    """Make inputs of the constants of a graph, which torch's loop does not take, and return them."""
    constants, after = [], [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        constants.append(own(getattr(graph, node.target)))
        with graph.graph.inserting_after(after):
            after = graph.graph.placeholder(f"constant_{len(constants)}")
        node.replace_all_uses_with(after)
        graph.graph.erase_node(node)
    graph.recompile()
    return constants
