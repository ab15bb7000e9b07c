"""A device that is not there: CPU tensors that report another device, on torch's backend for such.

Each operation is computed on the CPU, and noted with the line of the library that asked for it if
on a GPU it would mix devices, wait for the device (a synchronisation), copy numbers to it, or run a
kernel. Some functions of torch are replaced, so a process that imports this module is used for
nothing else. Inductor runs nowhere here, and ``segment_reduce`` would wait twice without being
noted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import adjsim
from adjsim.potentials.pairs.kernels import kernel

_setup_privateuseone_for_python_backend("gpu")
torch._C._set_only_lift_cpu_tensors(True)

DEVICE = torch.device("gpu:0")
LIBRARY = str(Path(adjsim.__file__).parent) + "/"
TESTS = str(Path(__file__).parents[1]) + "/"


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


# Operations whose result, or whose size, the host has to read.
WAITS = _names(
    "_local_scalar_dense is_nonzero equal nonzero masked_select _unique2 unique_consecutive "
    "unique_dim item allclose bincount repeat_interleave _linalg_check_errors histc"
)
INDEXING = _names("index index_put index_put_ _index_put_impl_")
# Operations that take a number as a tensor of the CPU without waiting for it.
TAKES_NUMBERS = _names("fill_ fill masked_fill masked_fill_ index_fill_ lerp where")
# Operations that only allocate, or return another view of their memory.
NO_KERNELS = _names(
    "_local_scalar_dense detach empty empty_like new_empty empty_strided new_empty_strided "
    "lift_fresh _unsafe_view alias"
)

# Operators of the library whose operations are noted.
RUN_AS_WRITTEN = {kernel.pairs: kernel.of_kernel}


@dataclass
class Log:
    """What would have happened on a GPU, by operation and line."""

    mixes: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)


_log = Log()


@contextmanager
def pretended() -> Generator[Log, None, None]:
    """Run code with the device; return the log of it."""
    global _log
    outer, _log = _log, Log()
    try:
        with _Mode():
            yield _log
    finally:
        _log = outer


class Pretended(Tensor):
    """A tensor that reports the device; ``held`` is the tensor of the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretended(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees operations whose tensors are all on the CPU, or that make a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _held(x: Any) -> Any:
    return x.held if isinstance(x, Pretended) else x


def _wrapped(x: Any) -> Any:
    return Pretended(x) if isinstance(x, Tensor) and not isinstance(x, Pretended) else x


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to what lists and tuples hold. The trees of torch take much longer."""
    if isinstance(x, list | tuple):
        return type(x)([_mapped(function, y) for y in x])
    return function(x)


def _tensors(x: Any) -> Generator[Tensor, None, None]:
    """List the tensors of arguments."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for y in x:
            yield from _tensors(y)


def _place() -> str:
    """Return the innermost lines of the library, or of a test, that asked for an operation."""
    frame, found = sys._getframe(3), list[str]()
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        for root in (LIBRARY, TESTS):
            if name.startswith(root) and name != __file__:
                found.append(f"{name[len(root) :]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if name == "aten::to":
        # Within an operator it arrives before it is decomposed.
        with _Mode():
            return func.decompose(*args, **kwargs)
    tensors = [*_tensors(args), *_tensors([*kwargs.values()])]
    ours = [x for x in tensors if isinstance(x, Pretended)]
    others = [x for x in tensors if not isinstance(x, Pretended)]
    device = kwargs.get("device")
    held = {**kwargs, "device": torch.device("cpu")} if _is_pretended(device) else kwargs
    if name in ("aten::_to_copy", "prims::device_put"):
        return _moved(func, args, held, ours, device)
    if name == "aten::copy_":
        to, source = (isinstance(x, Pretended) for x in args[:2])
        log = _log.kernels if to == source else _log.copies if to else _log.waits
        if to or source:
            log[name, _place()] += 1
        func(*_mapped(_held, args), **held)
        return args[0]
    if not ours and not _is_pretended(device):
        return func(*args, **kwargs)
    if func in RUN_AS_WRITTEN:
        with _Mode():
            return RUN_AS_WRITTEN[func](*args)
    _note(func, name, args, ours, others, kwargs.get("generator"))
    there = {key: _mapped(_held, x) for key, x in held.items()}
    out = func(*_mapped(_held, args), **there)
    if device is not None and not _is_pretended(device):
        return out
    wrapped = _mapped(_wrapped, out)
    if not ours:
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _moved(func: Any, args: Any, held: Any, ours: list[Any], device: Any) -> Any:
    """Copy a tensor to a device or dtype."""
    there = _is_pretended(device) if device is not None else bool(ours)
    if ours:
        (_log.kernels if there else _log.waits)[func._schema.name, _place()] += 1
    elif there:
        _log.copies[func._schema.name, _place()] += 1
    out = func(*_mapped(_held, args), **held)
    if there and not ours and out.data_ptr() == args[0].data_ptr():
        out = out.clone()
    return Pretended(out) if there else out


def _note(
    func: Any, name: str, args: Any, ours: list[Any], others: list[Tensor], generator: Any
) -> None:
    """Note what an operation does on the device."""
    indexed = name in INDEXING
    masked = indexed and any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))
    if name in WAITS or masked:
        _log.waits[name, _place()] += 1
    numbers = all(x.ndim == 0 for x in others)
    pointwise = torch.Tag.pointwise in func.tags or name in TAKES_NUMBERS
    if others and indexed and isinstance(args[0], Pretended):
        _log.copies[name, _place()] += 1
    elif others and not (numbers and pointwise and ours):
        shapes = [tuple(x.shape) for x in others]
        _log.mixes[f"{name} with {shapes} of the CPU", _place()] += 1
    if generator is not None and generator.device.type == "cpu":
        _log.mixes[f"{name} with a generator of the CPU", _place()] += 1
    schema = func._schema
    view = any(x.alias_info is not None for x in schema.returns) and not schema.is_mutable
    if not view and name not in NO_KERNELS:
        _log.kernels[name, _place()] += 1


# torch.tensor and torch.as_tensor of another device make a tensor of the backend's own class.
_tensor, _as_tensor = torch.tensor, torch.as_tensor


def _made(data: Any, *, device: Any = None, requires_grad: bool = False, **settings: Any) -> Tensor:
    if not _is_pretended(device):
        return _tensor(data, device=device, requires_grad=requires_grad, **settings)
    held = _tensor(_held(data), **settings)
    return held.to(device).requires_grad_(requires_grad)


def _made_or_moved(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    if not _is_pretended(device):
        return _as_tensor(data, dtype=dtype, device=device)
    if isinstance(data, Tensor):
        return data.to(device=device, dtype=dtype or data.dtype)
    return _made(data, dtype=dtype, device=device)


torch.tensor, torch.as_tensor = _made, _made_or_moved
