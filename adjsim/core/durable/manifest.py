"""Descriptions of a computation, by which a store knows that it is called again.

Fingerprints of a dynamics and of functions are equal in every process. They cover the formulas, the
settings and the code that a run reads, as far as the keys of compiled code do
(:mod:`adjsim.core.cache_key`). Values of registered tensors have fingerprints of their own. Names
of files, line numbers, addresses and the standard library, with the environment and the time, are
left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.agreement import difference, rounding
from adjsim.core.arguments import describe_type
from adjsim.core.autocast import autocast_state
from adjsim.core.cache_key import Identity, UninspectableError, cache_key, object_key
from adjsim.core.contents import bytes_of
from adjsim.core.durable.store import Store, StoreError
from adjsim.core.libraries import is_library
from adjsim.core.parameters import trainable

# Evaluates a computation at a start whose numbers are changed by this part of themselves, and
# returns its rates by descriptions of them.
Measure = Callable[[float], dict[str, Tensor]]
# The part of the start by which its numbers are changed, to see what rounding may change in rates.
CHANGE, MARGIN = 1e-6, 4.0


@dataclass(frozen=True)
class Saving:
    """The store of a run, the seconds between two saves, and how the store knows the run."""

    store: Store
    every: float
    manifest: dict[str, str]
    measure: Measure


def versions() -> dict[str, str]:
    """Describe the versions whose change may change numbers."""
    return {"adjsim": version("adjsim"), "torch": torch.__version__}


def describe_module(module: nn.Module, function: Callable[..., Any] | None) -> dict[str, str]:
    """Describe a dynamics, the function that is observed, and the values of all tensors."""
    try:
        formulas = module_fingerprint(module, function)
    except UninspectableError as reason:
        raise StoreError(f"store=: {reason}") from None
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "the autocast on CPU and GPU": f"{autocast_state()}",
        "the formulas of the dynamics and of the observable": formulas,
        **{name: tensor_fingerprint(x) for name, x in tensors.items()},
        "the parameters that require grad": ", ".join(trainable(module)),
    }


def check_numbers(store: Store, measure: Measure) -> None:
    """Compare a computation at its start, up to rounding, with that of the store, or store it."""
    found = measure(0.0)
    if not store.has("start"):
        store.write("start", found)
        return
    known = store.read("start")
    for name, x in found.items():
        y = known[name].to(x.device)
        by = difference(x, y)
        if by > rounding(x, y) and by > MARGIN * difference(measure(CHANGE)[name], x):
            raise StoreError(
                f"store '{store.folder}' is of another computation: {name} at the start differs by "
                f"{by:.1e}, although no value that can be seen has changed. The potential, the "
                "dynamics or the observable reads another one (a patched function, a computed "
                "name, an object that cannot be inspected). Give another folder."
            )


def describe_function(function: Callable[..., Any], where: str) -> str:
    """Describe a function as far as it can be inspected."""
    try:
        return object_fingerprint(function, where)
    except UninspectableError:
        return "a function that cannot be inspected"


def describe_object(x: Any, where: str) -> str:
    """Describe an object such as a solver."""
    try:
        return f"{x!r} [{object_fingerprint(x, where)}]"
    except UninspectableError as reason:
        raise StoreError(f"store=: {where} is {describe_type(x)}: {reason}") from None


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
    return hashlib.blake2b(repr(_plain(key)).encode(), digest_size=8).hexdigest()


def _plain(key: Any) -> Any:
    """Convert a key to nested tuples of strings."""
    if isinstance(key, Identity):
        key = key.referent
        if not isinstance(key, type):
            return "an object that cannot be inspected"
    if isinstance(key, tuple):
        return tuple(map(_plain, key))
    if isinstance(key, frozenset):
        return sorted(repr(_plain(part)) for part in key)
    if isinstance(key, CodeType):
        names = key.co_names, key.co_varnames, key.co_freevars, key.co_cellvars
        return key.co_name, key.co_code, names, _plain(key.co_consts)
    if callable(key):
        kind = type(key)
        return getattr(key, "__qualname__", None) or getattr(key, "__name__", kind.__qualname__)
    return repr(key)
