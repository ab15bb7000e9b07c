"""Tracing of functions of tensors to graphs of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule


def graph_of(
    function: Callable[..., Sequence[Tensor]],
    *examples: Tensor,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> GraphModule:
    """Trace a function to a graph of operations, for the shapes and dtypes of example tensors."""
    # Importing the tracer takes a second, and most runs do not need it.
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx

    # Few graphs are called, so their Python code is not written whenever they change.
    with _use_lazy_graph_module(True):
        return make_fx(function, decompositions, "fake", _allow_non_fake_inputs=True)(*examples)
