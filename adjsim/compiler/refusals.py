"""What is refused while a step is traced, and the errors that say so."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from adjsim.compiler.lines import is_of_user, owner, runs_user_code, user_line
from adjsim.compiler.values import UnprintableError
from adjsim.core.writes import version_of

_BRANCH = (
    "has a branch on a value",
    "choose between values with torch.where(condition, a, b), and combine conditions by &, | and ~",
)
_INTEGER = ("takes a value as an integer", "index with the tensor itself, as in x[i]")
_NUMBER = ("takes a value out of its tensor", "compute with the tensor itself")
_SHAPE = (
    "has a number of elements that depends on values",
    "take torch.where(mask, x, 0.0), or multiply by the mask, in place of x[mask]",
)
_FORM = (
    "Potentials and records have to be torch operations on tensors of fixed shapes. Write them in "
    "this form, or leave compile=True out."
)
_ARRAY = ("takes a value to NumPy", "use torch's functions in place of NumPy's")
# The functions that need the values of a tensor: what they are called for, and what to write.
_READS: dict[Any, tuple[str, str]] = {
    Tensor.__bool__: _BRANCH,
    Tensor.is_nonzero: _BRANCH,
    torch.is_nonzero: _BRANCH,
    torch.equal: _BRANCH,
    torch.allclose: _BRANCH,
    Tensor.equal: _BRANCH,
    Tensor.allclose: _BRANCH,
    Tensor.__float__: (
        "takes a value as a Python number",
        "use torch's functions, such as torch.sin(t) for math.sin(t), and the tensor in place of "
        "float(x)",
    ),
    Tensor.__complex__: _NUMBER,
    Tensor.__int__: _INTEGER,
    Tensor.__index__: _INTEGER,
    Tensor.item: _NUMBER,
    Tensor.tolist: _NUMBER,
    Tensor.numpy: _ARRAY,
    Tensor.__array__: _ARRAY,
    **dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere), _SHAPE),
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), _SHAPE),
    **dict.fromkeys((torch.unique, Tensor.unique), _SHAPE),
}


class CompileError(RuntimeError):
    """Raised if a step cannot be compiled."""


def _refused(what: str, cure: str, frame: FrameType) -> str:
    place = user_line(frame)
    if not runs_user_code(frame):
        return (
            f"compile=True cannot trace {_quoted(place)}, where this library checks a value. Make "
            "what it checks, such as the distances r of a distribution, before the run, outside of "
            "the potential or the record."
        )
    return f"compile=True cannot trace {_quoted(place)}, which {what}: {cure}."


def _quoted(place: str) -> str:
    """Return a file and line with the text of the line."""
    file, _, line = place.rpartition(":")
    text = linecache.getline(file, int(line or 0)).strip()
    return f"{place} ({text})" if text else place


def explained(error: Exception, what: str, advice: str | None) -> str:
    """Return why a step could not be compiled, with the user's line if there is one."""
    if isinstance(error, UnprintableError):
        return f"compile=True could not compile {what}: {error}."
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{x.filename}:{x.lineno}" for x in frames]
    place = next((x for x in reversed(places) if is_of_user(x)), None)
    where = f" at {_quoted(place)}" if place else ""
    refused = isinstance(error, ValueError) and owner(frames[-1].filename) == "adjsim"
    # An error of this library has a way out already.
    advice = advice or ("" if refused else _FORM)
    # Errors of torch's tracer go on with instructions for its developers.
    reason, *_ = str(error).split("\n\n")
    return f"compile=True could not compile {what}{where}: {reason}\n{advice}".rstrip()


def _is_place(index: Any) -> bool:
    """Whether an index is one whole number that a trace computes."""
    whole = isinstance(index, FakeTensor) and index.ndim == 0
    return whole and not index.dtype.is_floating_point and index.dtype != torch.bool


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in the arguments of a function, which torch's way takes longer to find."""
    if isinstance(tree, Tensor):
        return [tree]
    if not isinstance(tree, (tuple, list, dict)):
        return []
    return [
        x for part in (tree.values() if isinstance(tree, dict) else tree) for x in _tensors(part)
    ]


class Constant:
    """A captured tensor of a loop, no input and not registered, which may be read ``detached``."""

    def __init__(self, x: Tensor, detached: bool) -> None:
        self.tensor, self.version, self.detached = ref(x), version_of(x), detached

    def changed(self) -> bool:
        """Test whether the tensor has been modified in place, or requires grad, since the trace."""
        x = self.tensor()
        if x is None:
            return False
        return version_of(x) != self.version or (x.requires_grad and not self.detached)


class NoCapture(TorchFunctionMode):
    """A mode that refuses registered tensors that are not read from their module.

    It is active while a loop is traced, into which such a tensor would be baked as a constant,
    without a gradient. ``constants`` receives the other tensors that are captured. Functions that
    read the value of a traced tensor are refused by their line.
    """

    def __init__(self, registered: Sequence[Tensor], constants: list[Constant]) -> None:
        super().__init__()
        self.registered, self.constants = {id(x) for x in registered}, constants

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = _tensors(args) + (_tensors(kwargs) if kwargs else [])
        masks = func is Tensor.__getitem__ and any(x.dtype == torch.bool for x in tensors[1:])
        needs = _SHAPE if masks else _READS.get(func)
        if needs is not None and any(isinstance(x, FakeTensor) for x in tensors):
            raise CompileError(_refused(*needs, sys._getframe(1)))
        if any(id(x) in self.registered for x in tensors):
            raise ValueError(
                "a potential or a record reads a parameter or buffer of the dynamics as a captured "
                "variable instead of from its module. Read it as an attribute of the module, such "
                "as dynamics.kT or self.k."
            )
        if func is Tensor.__getitem__ and _is_place(args[1]):
            # Torch takes the number out of the index. A row of one place has the same element.
            return args[0][args[1].reshape(1)].squeeze(0)
        detached = func in (Tensor.detach, torch.detach)
        found = [x for x in tensors if not isinstance(x, FakeTensor)]
        lost = next((x for x in found if x.requires_grad and not detached), None)
        if lost is not None:
            raise ValueError(
                f"a potential or a record reads a tensor of shape {tuple(lost.shape)} that "
                "requires grad and is not registered. Make it an nn.Parameter (or a buffer) of the "
                "potential or the dynamics, or detach() it."
            )
        self.constants += [Constant(x, detached) for x in found]
        return func(*args, **(kwargs or {}))
