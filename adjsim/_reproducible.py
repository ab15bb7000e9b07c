"""The check that a computation is the same whenever it is evaluated.

Batch normalisation in train mode writes to its buffers, and dropout draws random numbers. A run
that evaluates such a module cannot be repeated, recomputed or reversed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adjsim._module import ModuleTensors

T = TypeVar("T")


@dataclass(frozen=True)
class _Traces:
    """What evaluations of a module must leave as they are.

    Attributes:
        generators: the states of torch's default generators.
        tensors: the parameters and buffers, by name.
        versions: how often each has been written to.
    """

    generators: tuple[Tensor, ...]
    tensors: dict[str, Tensor]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, tensors: ModuleTensors, device: torch.device) -> _Traces:
        generators = [torch.get_rng_state()]
        if device.type == "cuda":
            generators.append(torch.cuda.get_rng_state(device))
        named = dict(zip(tensors.names, tensors.tensors, strict=True))
        # The version of a lazy or an inference tensor cannot be read.
        versions = tuple(
            0 if is_lazy(x) or x.is_inference() else x._version for x in tensors.tensors
        )
        return cls(tuple(generators), named, versions)

    def describe(self, later: _Traces) -> str | None:
        """Say what an evaluation has changed; None if nothing."""
        if not all(map(torch.equal, self.generators, later.generators)):
            return "draws random numbers"
        if self.tensors.keys() != later.tensors.keys():
            return "makes parameters or buffers"
        for (name, x), y, before, after in zip(
            self.tensors.items(),
            later.tensors.values(),
            self.versions,
            later.versions,
            strict=True,
        ):
            if x is not y or before != after:
                return f"writes to its own parameter or buffer {name.rpartition('.')[2]!r}"
        return None


def evaluate_twice_if_changed(
    tensors: ModuleTensors, evaluate: Callable[[], T], device: torch.device
) -> tuple[T, ModuleTensors]:
    """Evaluate a module, and refuse one that each evaluation changes.

    The first evaluation may make parameters and numbers, so only a second one is refused.

    Args:
        tensors: the tensors of the module.
        evaluate: evaluates the module.
        device: where it is evaluated.

    Returns:
        the value, and the tensors after the evaluation.

    Raises:
        ValueError: an evaluation draws random numbers, or writes to a parameter or buffer.
    """
    module, before = tensors.module, _Traces.of(tensors, device)
    value, tensors = evaluate(), ModuleTensors(module)
    after = _Traces.of(tensors, device)
    if before.describe(after) is None:
        return value, tensors
    finder = _Finder(module, device)
    with finder.watching():
        value = evaluate()
    tensors = ModuleTensors(module)
    reason = after.describe(_Traces.of(tensors, device))
    if reason is None:
        return value, tensors
    raise ValueError(
        f"{finder.found or type(module).__name__} {reason} whenever it is evaluated, so no run is "
        "repeated or reversed by the same numbers. Put it into eval mode (.eval()), or keep it out "
        "of the dynamics."
    )


class _Finder:
    """Finds the innermost module that an evaluation changes.

    Attributes:
        found: describes the module; None if there is none.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.found: str | None = None
        self._before: dict[nn.Module, _Traces] = {}

    def watching(self) -> ExitStack:
        """Make the context of the evaluation."""
        stack = ExitStack()
        for path, part in self.module.named_modules():

            def after(part: nn.Module, *_: Any, path: str = path) -> None:
                now = _Traces.of(ModuleTensors(part), self.device)
                changed = self._before[part].describe(now) is not None
                if changed and self.found is None:
                    self.found = f"{path} ({type(part).__name__})" if path else type(part).__name__

            for handle in (
                part.register_forward_pre_hook(self._begin),
                part.register_forward_hook(after),
            ):
                stack.callback(handle.remove)
        return stack

    def _begin(self, part: nn.Module, *_: Any) -> None:
        self._before[part] = _Traces.of(ModuleTensors(part), self.device)
