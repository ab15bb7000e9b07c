"""Tracing of functions of tensors to graphs of operations."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from adjsim.compiler.recording import recording

# Code in these folders, those of torch, this library and Python, is not the user's.
_TORCH, _ADJSIM, _PYTHON = (
    str(Path(file).parents[n])
    for file, n in ((torch.__file__, 0), (__file__, 1), (contextlib.__file__, 0))
)
# Every operation of a trace goes through these files.
_MODES = [str(Path(__file__).with_name(name)) for name in ("refusals.py", "recording.py")]


def graph_of(
    function: Callable[..., Sequence[Tensor]],
    *examples: Tensor,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> GraphModule:
    """Trace a function to a graph of operations, for the shapes and dtypes of example tensors.

    ``node.meta["line"]`` is the line of code from which an operation comes, of :func:`user_line`.
    """
    # Importing the tracer takes a second, and most runs do not need it.
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

    def noted(*inputs: Any) -> Sequence[Tensor]:
        mode: Any = get_proxy_mode()
        graph = mode.tracer.graph
        create = graph.create_node

        def create_noted(*args: Any, **kwargs: Any) -> Node:
            node = create(*args, **kwargs)
            node.meta["line"] = user_line(sys._getframe(1))
            return node

        graph.create_node = create_noted
        mode.__torch_dispatch__ = recording(mode, inputs[0].fake_mode)
        try:
            return function(*inputs)
        finally:
            del graph.create_node, mode.__torch_dispatch__

    make = make_fx(
        noted,
        decompositions,
        "fake",
        _allow_non_fake_inputs=True,
        # The functions of torch that a step calls are not counted.
        _disable_torch_fn_metadata_mode=True,
    )
    # Few graphs are called, so their Python code is not written whenever they change.
    with _use_lazy_graph_module(True):
        return make(*examples)


def user_line(frame: FrameType | None) -> str:
    """Return the file and line of the innermost code of a trace, from a frame on, of the user.

    Without such code, as in a step's own arithmetic, it is that of this library.
    """
    found = _innermost(frame, ("user",)) or _innermost(frame, ("adjsim",))
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found else ""


def runs_user_code(frame: FrameType | None) -> bool:
    """Whether the innermost code, from a frame on, is the user's and not of this library."""
    found = _innermost(frame, ("user", "adjsim"))
    return found is not None and _owner(found.f_code.co_filename) == "user"


def is_of_user(line: str) -> bool:
    """Whether a file and line are of the user's code."""
    return _owner(line.rpartition(":")[0]) == "user"


def _innermost(frame: FrameType | None, owners: Sequence[str]) -> FrameType | None:
    """Return the innermost frame of a trace, from one on, of code of these owners."""
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner in owners:
            return frame
        if owner == "tracer":
            break
        frame = frame.f_back
    return None


@cache
def _owner(file: str) -> str:
    if file == __file__:
        return "tracer"
    if file in _MODES:
        return "library"
    if file.startswith(_ADJSIM):
        return "adjsim"
    # Code that torch writes has names such as <eval_with_key>.
    others = (_TORCH, _PYTHON, "<eval", "<frozen", "<string")
    return "library" if file.startswith(others) else "user"
