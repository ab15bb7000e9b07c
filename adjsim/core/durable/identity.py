"""Fingerprints of a dynamics and of functions, which are equal in every process.

A fingerprint covers the formulas, the settings and the code that a run reads, as far as the keys of
compiled code do (:mod:`adjsim.core.cache_key`). Values of registered tensors have fingerprints of
their own. Names of files, line numbers, addresses and the standard library, with the environment
and the time, are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor, nn

from adjsim.core.cache_key import Identity, UninspectableError, bytes_of, cache_key, object_key
from adjsim.core.libraries import is_library


def module_fingerprint(module: nn.Module, function: Callable[..., Any] | None = None) -> str:
    """Hash everything that a module and a function read, except registered tensors.

    Objects of the module that cannot be inspected are left out, those of the function refused.
    """
    key = cache_key(module, function, is_library)
    opaque = set(key.opaque).difference(cache_key(module, None, is_library).opaque)
    if opaque:
        raise UninspectableError(min(opaque))
    return _digest(key)


def object_fingerprint(x: Any, where: str) -> str:
    """Hash everything that an object reads; ``where`` names it in errors."""
    return _digest(object_key(x, where, is_library))


def tensor_fingerprint(x: Tensor) -> str:
    """Hash dtype, shape and numbers of a tensor; a number is shown in full."""
    if x.numel() == 1 and not x.is_complex():
        return f"{x.detach().item()!r} ({x.dtype}, shape {tuple(x.shape)})"
    digest = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)}".encode(), digest_size=8)
    digest.update(bytes_of(x).data)
    return digest.hexdigest()


def _digest(key: Any) -> str:
    return hashlib.blake2b(repr(_plain(key, {})).encode(), digest_size=8).hexdigest()


def _plain(key: Any, numbers: dict[int, int]) -> Any:
    """Convert a key to nested tuples of strings; modules are numbered as they first appear."""
    if isinstance(key, Identity):
        key = key.referent
        if not isinstance(key, type):
            return "module", numbers.setdefault(id(key), len(numbers))
    if isinstance(key, tuple):
        return tuple(_plain(part, numbers) for part in key)
    if isinstance(key, frozenset):
        return sorted(repr(_plain(part, numbers)) for part in key)
    if isinstance(key, CodeType):
        names = key.co_names, key.co_varnames, key.co_freevars, key.co_cellvars
        return key.co_name, key.co_code, names, _plain(key.co_consts, numbers)
    if callable(key):
        kind = type(key)
        return getattr(key, "__qualname__", None) or getattr(key, "__name__", kind.__qualname__)
    return repr(key)
