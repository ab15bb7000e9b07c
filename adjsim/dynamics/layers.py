"""Layers of networks under several rows of cotangents at once."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from adjsim.core.rows import are_hidden, hide_rows, level_of_rows, shown_rows
from adjsim.core.state import in_transform
from adjsim.dynamics.forces import add_to

# The gradients of fewer weights stay in the cache for some rows.
SMALLEST = 8192
# The products of so many evaluations, at least, are taken together.
FEWEST = 256
_core: Any = torch._C


class Waiting(NamedTuple):
    """The inputs ``(samples, in)`` of a layer, and cotangents ``(rows, samples, out)``."""

    inputs: list[Tensor]
    cotangents: list[Tensor]


class RowsOfLayers(TorchFunctionMode):
    """The gradients by the weights W of layers ``x W^T + b``, for rows c_r of cotangents::

        dL_r/dW = sum_k c_{r,k}^T x_k = [c_{r,1} ... c_{r,K}]^T [x_1 ... x_K]

    The products of one evaluation would read and write the gradients of all rows, in the time of
    the memory. So inputs x and cotangents c are kept, and the product of K samples is taken when
    the cotangents take as much memory as the gradients. All rows pass a layer by one operation.

    Functions are to be evaluated in this context. In the pass of autograd from outputs that are
    expected, the gradients of the leaves ``weights`` are added to ``sums`` by name, and autograd
    receives none. Rows are those that ``is_grads_batched`` hides.
    """

    def __init__(self, weights: Mapping[str, Tensor], sums: dict[Any, Tensor]) -> None:
        super().__init__()
        self._sums, self._waiting, self._pass = sums, dict[str, Waiting](), -1
        self._weights = {id(x): (name, x) for name, x in weights.items() if _is_matrix(x)}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func is functional.linear and not kwargs and _is_plain(args):
            x, weight, *bias = args
            if id(weight) in self._weights and all(b is None or b.ndim < 2 for b in bias):
                # Of a leaf torch does not say whether its gradient is asked for.
                name = self._weights[id(weight)][0]
                return _Linear.apply(self, name, x, weight.view_as(weight), *(bias or [None]))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def expecting(self, outputs: Sequence[Tensor]) -> Generator[None, None, None]:
        """Let gradients wait in the pass that begins at these outputs, and in none inside of it."""

        def begin(cotangent: Tensor) -> None:
            self._pass = _core._current_graph_task_id()

        hooks = [output.register_hook(begin) for output in outputs]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def is_expected(self) -> bool:
        """Whether the pass of autograd that runs is one that is expected."""
        return self._pass == _core._current_graph_task_id()

    def wait(self, name: str, inputs: Tensor, cotangents: Tensor) -> None:
        """Keep the inputs of a layer, and the cotangents of its outputs."""
        waiting = self._waiting.setdefault(name, Waiting([], []))
        # A function may write the inputs of its next evaluation into the same memory.
        waiting.inputs.append(inputs.clone())
        waiting.cotangents.append(cotangents)
        if sum(map(len, waiting.inputs)) >= max(inputs.shape[1], FEWEST):
            self._take(name)

    def complete(self) -> None:
        """Take all products that wait."""
        for name in list(self._waiting):
            self._take(name)

    def _take(self, name: str) -> None:
        inputs, cotangents = self._waiting.pop(name)
        found = torch.cat(cotangents, 1).mT @ torch.cat(inputs)
        add_to(self._sums, name, hide_rows(found, level_of_rows()))


def _is_matrix(x: Tensor) -> bool:
    return x.ndim == 2 and x.numel() >= SMALLEST and x.is_floating_point()


def _is_plain(args: Sequence[Any]) -> bool:
    """Return whether autograd alone differentiates a function, with the dtypes of its arguments.

    What is computed again on the way back, as by ``torch.utils.checkpoint``, is not.
    """
    return (
        all(type(x) in (Tensor, nn.Parameter) for x in args if x is not None)
        and not in_transform()
        and not torch.is_autocast_enabled(args[0].device.type)
        and _core._autograd._top_saved_tensors_default_hooks(True) is None
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: RowsOfLayers, name: str, x: Tensor, weight: Tensor, bias: Any
    ) -> Tensor:
        ctx.rows, ctx.name = rows, name
        ctx.save_for_backward(x, weight)
        found = functional.linear(x, weight, bias)
        # Autograd forbids a layer that changes a view in place, and of several axes torch's own
        # result is one.
        return torch.ops.aten._unsafe_view(found, found.shape) if found._is_view() else found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (c,) = cotangents
        (x, weight), (_, _, by_x, by_weight, by_bias) = ctx.saved_tensors, ctx.needs_input_grad
        hidden, level = are_hidden(c), level_of_rows()
        whole = shown_rows(c) if hidden else c[None]
        inputs = x.reshape(-1, x.shape[-1])
        samples = whole.reshape(len(whole), len(inputs), len(weight))
        found = [whole @ weight if by_x else None, None, samples.sum(1) if by_bias else None]
        if by_weight and _core._will_engine_execute_node(ctx.next_functions[1][0]):
            if hidden and ctx.rows.is_expected:
                ctx.rows.wait(ctx.name, inputs, samples)
            else:
                found[1] = samples.mT @ inputs
        if not hidden:
            return None, None, *(None if y is None else y[0] for y in found)
        return None, None, *(None if y is None else hide_rows(y, level) for y in found)
