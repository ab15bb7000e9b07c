"""The check that a computation is the same whenever it is evaluated.

Batch normalisation in train mode writes to its buffers, and dropout draws random numbers. A run
that evaluates such a module cannot be repeated, recomputed or reversed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


def random_state(device: torch.device) -> bytes:
    """Return the state of torch's default generators."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return b"".join(x.numpy().tobytes() for x in states)


def describe_change(
    module: nn.Module, evaluate: Callable[[], Any], device: torch.device
) -> str | None:
    """Evaluate a module, and name the innermost part that is changed, or that draws numbers.

    Args:
        module: the module.
        evaluate: evaluates the module.
        device: where it is evaluated.

    Returns:
        the path of the part and what it does; None if nothing has changed.
    """
    found: list[str] = []
    before: dict[nn.Module, tuple[bytes, dict[str, tuple[int, int]]]] = {}

    def begin(part: nn.Module, *_: Any) -> None:
        before[part] = random_state(device), _versions(part)

    with ExitStack() as stack:
        for path, part in module.named_modules():

            def end(part: nn.Module, *_: Any, path: str = path) -> None:
                drawn, versions = before[part]
                what = _difference(drawn, versions, random_state(device), _versions(part))
                if what is not None and not found:
                    name = type(part).__name__
                    found.append(f"{path} ({name}) {what}" if path else f"{name} {what}")

            for handle in (part.register_forward_pre_hook(begin), part.register_forward_hook(end)):
                stack.callback(handle.remove)
        begin(module)
        drawn, versions = before[module]
        evaluate()
    what = _difference(drawn, versions, random_state(device), _versions(module))
    if found or what is None:
        return found[0] if found else None
    return f"{type(module).__name__} or a part of it {what}"


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the identity and the version of each tensor of a module."""
    named: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: (id(x), 0 if x.is_inference() else x._version) for name, x in named.items()}


def _difference(
    drawn: bytes, before: dict[str, Any], drawn_after: bytes, after: dict[str, Any]
) -> str | None:
    if drawn != drawn_after:
        return "draws random numbers"
    if before.keys() != after.keys():
        return "makes parameters or buffers"
    changed = next((name for name, x in before.items() if after[name] != x), None)
    if changed is None:
        return None
    return f"writes to its own parameter or buffer {changed.rpartition('.')[2]!r}"
