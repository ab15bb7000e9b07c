"""The line of the user's code from which an operation of a trace comes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType

import torch

# Code in these folders, those of torch, this library and Python, is not the user's.
_TORCH, _ADJSIM, _PYTHON = (
    str(Path(file).parents[n])
    for file, n in ((torch.__file__, 0), (__file__, 1), (contextlib.__file__, 0))
)
# A trace begins in `graph_of`, and its operations go through the modes of these files.
_TRACING, *_MODES = (
    str(Path(_ADJSIM, name))
    for name in ("compiler/tracing.py", "compiler/refusals.py", "core/rebinding.py")
)


def user_line(frame: FrameType | None) -> str:
    """Return the file and line of the innermost code of a trace, from a frame on, of the user.

    Without such code, as in a step's own arithmetic, it is that of this library.
    """
    found = _innermost(frame, ("user",)) or _innermost(frame, ("adjsim",))
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found else ""


def runs_user_code(frame: FrameType | None) -> bool:
    """Whether the innermost code, from a frame on, is the user's and not of this library."""
    found = _innermost(frame, ("user", "adjsim"))
    return found is not None and owner(found.f_code.co_filename) == "user"


def is_of_user(line: str) -> bool:
    """Whether a file and line are of the user's code."""
    return owner(line.rpartition(":")[0]) == "user"


def _innermost(frame: FrameType | None, owners: Sequence[str]) -> FrameType | None:
    """Return the innermost frame of a trace, from one on, of code of these owners."""
    while frame is not None:
        code = frame.f_code
        if owner(code.co_filename) in owners:
            return frame
        if code.co_name == "graph_of" and code.co_filename == _TRACING:
            break
        frame = frame.f_back
    return None


@cache
def owner(file: str) -> str:
    """Return whose code a file has: the user's, this library's, or that of another library."""
    if file == _TRACING or file in _MODES:
        return "library"
    if file.startswith(_ADJSIM):
        return "adjsim"
    # Code that torch writes has names such as <eval_with_key>.
    others = (_TORCH, _PYTHON, "<eval", "<frozen", "<string")
    return "library" if file.startswith(others) else "user"
