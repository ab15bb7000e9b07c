"""The check that nobody changes the dynamics of an estimate while it is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.cache_key import CacheKey, cache_key
from adjsim.core.reading import Reading
from adjsim.core.writes import version_of


class Unchanged:
    """Refuses a module that another thread, or the observable, changes during an estimate.

    Values other than tensors are compared from the end of the first run on, since the first
    evaluation of a module may make some.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, reading = module, Reading(module)
        self.known = None if reading.lazy else _values(reading)
        self.key: CacheKey | None = None

    def check(self) -> None:
        """Refuse a module that is not what it was, by the name of the tensor that has changed."""
        reading, key = Reading(self.module), cache_key(self.module)
        if self.known is None:
            self.known = _values(reading)
        now = dict(zip(reading.names, reading.tensors, strict=True))
        changed = [
            repr(name)
            for name, x, version, value in self.known
            if now.get(name) is not x
            or version_of(x) != version
            or not torch.equal(x.detach().nan_to_num(), value.nan_to_num())
        ]
        if self.key is not None and key != self.key:
            changed.append("an attribute, or a value that it reads,")
        if changed:
            raise RuntimeError(
                f"{changed[0]} of {type(self.module).__name__} has changed while an estimate was "
                "computed, in another thread or by the observable, so its runs are of different "
                "dynamics. Change it before or after the estimate, or give each thread a copy "
                "(copy.deepcopy)."
            )
        self.key = key


def _values(reading: Reading[Any]) -> list[tuple[str, Tensor, int, Tensor]]:
    return [
        (name, x, version_of(x), x.detach().clone())
        for name, x in zip(reading.names, reading.tensors, strict=True)
    ]
