"""The check that a computation is the same whenever it is evaluated.

Batch normalisation in train mode writes to its buffers, and dropout draws random numbers. A run
that evaluates such a module cannot be repeated, recomputed or reversed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import nn

from adjsim.core.module_cache import version_of

# The state of the generators, and the identity and the version of each tensor of a module.
_Snapshot = tuple[bytes, dict[str, tuple[int, int]]]


def random_state(device: torch.device) -> bytes:
    """Return the state of torch's default generators."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return b"".join(x.numpy().tobytes() for x in states)


def describe_change(
    module: nn.Module, evaluate: Callable[[], Any], device: torch.device
) -> str | None:
    """Evaluate a module, and say which innermost part is changed, or draws numbers, if any."""
    found: list[str] = []
    before: dict[nn.Module, _Snapshot] = {}

    def begin(part: nn.Module, *_: Any) -> None:
        before[part] = _snapshot(part, device)

    with ExitStack() as stack:
        for path, part in module.named_modules():

            def end(part: nn.Module, *_: Any, path: str = path) -> None:
                what = _difference(before[part], _snapshot(part, device))
                if what is not None and not found:
                    name = type(part).__name__
                    found.append(f"{path} ({name}) {what}" if path else f"{name} {what}")

            for handle in (part.register_forward_pre_hook(begin), part.register_forward_hook(end)):
                stack.callback(handle.remove)
        first = _snapshot(module, device)
        evaluate()
    what = _difference(first, _snapshot(module, device))
    if found or what is None:
        return found[0] if found else None
    return f"{type(module).__name__} or a part of it {what}"


def _snapshot(module: nn.Module, device: torch.device) -> _Snapshot:
    named = chain(module.named_parameters(), module.named_buffers())
    return random_state(device), {name: (id(x), version_of(x)) for name, x in named}


def _difference(before: _Snapshot, after: _Snapshot) -> str | None:
    if before[0] != after[0]:
        return "draws random numbers"
    if before[1].keys() != after[1].keys():
        return "makes parameters or buffers"
    changed = next((name for name, x in before[1].items() if after[1][name] != x), None)
    if changed is None:
        return None
    return f"writes to its own parameter or buffer {changed.rpartition('.')[2]!r}"
