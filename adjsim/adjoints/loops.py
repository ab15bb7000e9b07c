"""A loop of steps as one compiled function of tensors.

The parts of a loop are traced by running them on tensors that record their operations, one part after the other, and put around
torch's own ``while_loop``; torch's Inductor compiles the whole, so that no iteration comes back to Python. The caller says in
:class:`LoopSpec` what the loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import RLock
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# What a pair of atoms needs is computed in its loop, and not stored for each; what an atom needs is stored, see materialise().
# With the C++ wrapper an iteration does not come back to Python. Steps of the noise are counted here and need no check.
OPTIONS = {
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 1024,
    "unroll_reductions_threshold": 1,
    "cpp_wrapper": True,
    "assert_indirect_indexing": False,
    # Graphs of loops are part of the key of torch's cache, so that a loop may be remembered across processes.
    "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.while_loop": "adjsim"},
}
# Inductor's options are those of the process while it compiles, so one thread compiles at a time.
_compiling = RLock()

Constants = TypeVar("Constants")
Carry = TypeVar("Carry")


class CompileError(RuntimeError):
    """A step could not be compiled."""


@dataclass(frozen=True)
class LoopSpec(Generic[Constants, Carry]):
    """What a loop does: functions of its constants, which do not change in the loop, and of what it carries; both are named
    tuples (of tuples and dictionaries) of tensors.

    Attributes:
        start: before the first iteration, to the number ``k`` of the first one and what is carried.
        more: of ``k`` and of the number of steps, whether another iteration comes.
        body: one iteration, to the next ``k`` and what is carried.
        finish: after the last iteration, to what is carried in the end.
    """

    start: Callable[[Constants, Carry], tuple[Tensor, Carry]]
    more: Callable[[Tensor, Tensor], Tensor]
    body: Callable[[Constants, Tensor, Carry], tuple[Tensor, Carry]]
    finish: Callable[[Constants, Carry], Carry]


def compile_loop(
    spec: LoopSpec[Constants, Carry],
    within: Callable[[Constants], AbstractContextManager[Constants]],
    constants: Constants,
    carry: Carry,
    short: bool,
    what: str,
) -> Callable[[Constants, Carry], Carry]:
    """The loop as a function of its constants, of which the first is the number of steps, and of what is carried.

    Args:
        spec: what the loop does.
        within: the context in which it is traced, with the tensors that stand for the constants.
        constants, carry: examples, by shape and type.
        short: whether less lies side by side than fills a vector.
        what: whose loop it is, for the error.

    Raises:
        CompileError: it cannot be compiled.
    """
    # Inductor takes a second to import, which most runs have no use for.
    from torch._inductor import compile as inductor

    while_loop = torch.ops.higher_order.while_loop
    constant_leaves, constants_tree = tree_flatten(constants)
    carry_leaves, carry_tree = tree_flatten(carry)
    constants_size, carry_size = len(constant_leaves), len(carry_leaves)

    def start(*values: Tensor) -> list[Tensor]:
        with within(tree_unflatten(list(values[:constants_size]), constants_tree)) as traced:
            k, first = spec.start(traced, tree_unflatten(list(values[constants_size:]), carry_tree))
        return [k, *tree_leaves(first)]

    def body(k: Tensor, *values: Tensor) -> list[Tensor]:
        with within(tree_unflatten(list(values[carry_size:]), constants_tree)) as traced:
            k, next_carry = spec.body(traced, k, tree_unflatten(list(values[:carry_size]), carry_tree))
        return [k, *tree_leaves(next_carry)]

    def finish(*values: Tensor) -> list[Tensor]:
        with within(tree_unflatten(list(values[carry_size:]), constants_tree)) as traced:
            return tree_leaves(spec.finish(traced, tree_unflatten(list(values[:carry_size]), carry_tree)))

    try:
        with _compiling:
            # One by one, since no gradient is taken inside of torch's loop.
            first, each = (
                _trace(start, *constant_leaves, *carry_leaves),
                _trace(body, constant_leaves[0].clone(), *carry_leaves, *constant_leaves),
            )
            last, read = _trace(finish, *carry_leaves, *constant_leaves), _lift(each)

            def whole(*values: Tensor) -> list[Tensor]:
                def more(k: Tensor, *inside: Tensor) -> Tensor:
                    return spec.more(k, inside[carry_size])

                begun = first(*values)
                _, *out = while_loop(more, each, tuple(begun), (*values[:constants_size], *read))
                # What a loop of no iterations gives lies where its input lay, which Inductor would take for free if it were not
                # asked for.
                return [*last(*out, *values[:constants_size]), *begun]

            graph = _trace(whole, *constant_leaves, *carry_leaves)
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

    def loop(constants: Constants, carry: Carry) -> Carry:
        return tree_unflatten(list(compiled(*tree_leaves(constants), *tree_leaves(carry))[:carry_size]), carry_tree)

    return loop


class Constant:
    """A tensor that a loop has read without being given it."""

    def __init__(self, x: Tensor) -> None:
        self.tensor, self.version = ref(x), _version(x)

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
        return x is not None and _version(x) != self.version


class NoCapture(TorchFunctionMode):
    """Refuses, while a loop is traced, a tensor that is reached past its module: it would be a constant, and have no gradient.

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


def clone(x: Tensor) -> Tensor:
    """A copy: nothing that a loop takes or gives may share memory."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _trace(function: Callable[..., list[Tensor]], *inputs: Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def _lift(graph: Any) -> list[Tensor]:
    """Make inputs of the constants of a graph, which torch's loop does not take, and return them."""
    constants, after = [], [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        constants.append(clone(getattr(graph, node.target)))
        with graph.graph.inserting_after(after):
            after = graph.graph.placeholder(f"constant_{len(constants)}")
        node.replace_all_uses_with(after)
        graph.graph.erase_node(node)
    graph.recompile()
    return constants
