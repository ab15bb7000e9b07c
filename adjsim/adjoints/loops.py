"""A loop of steps as one compiled function of tensors.

The parts of a loop are traced by running them on tensors that record their operations, one part
after the other. Their graphs are printed as one C++ function (:mod:`adjsim._cpp`), which takes a
compiler about a second. Torch's Inductor compiles them (:mod:`adjsim.adjoints.inductor`) where a
graph has an operation that is not printed, on a GPU, and without a C++ compiler. Either way no
iteration comes back to Python. The caller says in :class:`LoopSpec` what the loop does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import RLock
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from adjsim._cpp.program import Part, Parts, program
from adjsim._cpp.values import UnprintableError
from adjsim.adjoints.inductor import by_inductor
from adjsim.adjoints.versions import untested_torch

# The tracer, and Inductor's options while it compiles, are those of the process, so one thread
# compiles at a time.
_compiling = RLock()

Constants = TypeVar("Constants")
Carry = TypeVar("Carry")


class CompileError(RuntimeError):
    """A step could not be compiled."""


@dataclass(frozen=True)
class LoopSpec(Generic[Constants, Carry]):
    """What a loop does: functions of its constants, which do not change in the loop, and of what it
    carries; both are named tuples (of tuples and dictionaries) of tensors.

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
    *,
    exact: bool,
    short: bool,
    what: str,
) -> tuple[Callable[[Constants, Carry], Carry], str]:
    """Compile a loop: a function of its constants, the first of which is the number of steps, and
    of the carry.

    Args:
        spec: what the loop does.
        within: the context in which it is traced, with the tensors that stand for the constants.
        constants, carry: examples, by shape and type.
        exact: whether results must have the last bit of the operations as they are carried out
            otherwise.
        short: whether less lies side by side than fills a vector.
        what: whose loop it is, for the error.

    Returns: the loop, and the path that was taken: "C++", or "Inductor" with the reason.

    Raises:
        CompileError: it cannot be compiled.
    """
    constants_list, constants_tree = tree_flatten(constants)
    carry_list, carry_tree = tree_flatten(carry)
    constants_size, carry_size = len(constants_list), len(carry_list)

    def start(*values: Tensor) -> list[Tensor]:
        with within(tree_unflatten(list(values[:constants_size]), constants_tree)) as traced:
            k, first = spec.start(traced, tree_unflatten(list(values[constants_size:]), carry_tree))
        return [k, *tree_leaves(first)]

    def more(k: Tensor, count: Tensor) -> list[Tensor]:
        return [spec.more(k, count)]

    def body(k: Tensor, *values: Tensor) -> list[Tensor]:
        with within(tree_unflatten(list(values[carry_size:]), constants_tree)) as traced:
            k, next_carry = spec.body(
                traced, k, tree_unflatten(list(values[:carry_size]), carry_tree)
            )
        return [k, *tree_leaves(next_carry)]

    def finish(*values: Tensor) -> list[Tensor]:
        with within(tree_unflatten(list(values[carry_size:]), constants_tree)) as traced:
            return tree_leaves(
                spec.finish(traced, tree_unflatten(list(values[:carry_size]), carry_tree))
            )

    untested = untested_torch()
    try:
        with _compiling:
            number = constants_list[0].clone()
            parts = Parts(
                start=_trace(start, *constants_list, *carry_list),
                more=_trace(more, number, constants_list[0]),
                body=_trace(body, number, *carry_list, *constants_list),
                finish=_trace(finish, *carry_list, *constants_list),
            )
            try:
                compiled, path = (
                    program(parts, constants_list, carry_list, exact, torch.get_num_threads()),
                    "C++",
                )
            except UnprintableError as reason:
                compiled, path = (
                    by_inductor(parts, constants_list, carry_list, short),
                    f"Inductor ({reason})",
                )
    except Exception as error:
        advice = untested or (
            "Potentials and records have to be torch operations whose course does not depend on "
            "values (no float(x), "
            "x.item() or `if` on a tensor). Write them so, or leave compile=True out."
        )
        raise CompileError(f"compile=True could not compile {what}: {error}\n{advice}") from error
    if untested is not None:
        warnings.warn(untested, stacklevel=2)

    def loop(constants: Constants, carry: Carry) -> Carry:
        return tree_unflatten(compiled(tree_leaves(constants), tree_leaves(carry)), carry_tree)

    return loop, path


class Constant:
    """A tensor that a loop has read without being given it."""

    def __init__(self, x: Tensor) -> None:
        self.tensor, self.version = ref(x), _version(x)

    def check(self) -> None:
        """Refuse one that a gradient is wanted by."""
        x = self.tensor()
        if x is not None and x.requires_grad:
            raise ValueError(
                f"a potential or a record reads a tensor of shape {tuple(x.shape)} that requires "
                "grad and is not registered. "
                "Make it an nn.Parameter (or a buffer) of the potential or the dynamics, or "
                "detach() it."
            )

    def changed(self) -> bool:
        """Whether it was written to since."""
        x = self.tensor()
        return x is not None and _version(x) != self.version


class NoCapture(TorchFunctionMode):
    """Refuses, while a loop is traced, a tensor that is reached past its module: it would be a
    constant, and have no gradient.

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
                "a potential or a record reads a parameter or buffer of the dynamics past its "
                "module, as a variable of its "
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


def _trace(function: Callable[..., list[Tensor]], *inputs: Tensor) -> Part:
    """A part of a loop, traced by itself, since no gradient is taken inside of a loop."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    return Part(graph, _lift(graph))


def _lift(graph: Any) -> list[Tensor]:
    """Make inputs of the constants of a graph, and return them."""
    constants, after = [], [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        constants.append(clone(getattr(graph, node.target)))
        with graph.graph.inserting_after(after):
            after = graph.graph.placeholder(f"constant_{len(constants)}")
        node.replace_all_uses_with(after)
        graph.graph.erase_node(node)
    graph.recompile()
    return constants
