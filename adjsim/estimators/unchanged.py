"""The check that the chunks of an estimate are of the same dynamics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.cache_key import CacheKey, cache_key
from adjsim.core.reading import Reading


class Unchanged:
    """Refuses a module that another thread, or the observable, changes during an estimate.

    Each run reads the module when it begins, and an estimate has many runs. Tensors are compared by
    their versions and contents, and other values by the key of compiled loops, from the end of the
    first run on, since the first evaluation of a module may make tensors and numbers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.known: list[tuple[str, Tensor, int, Tensor]] | None = None
        self.key: CacheKey | None = None
        reading = Reading(module)
        if not reading.lazy:
            self.known = _values(reading)

    def check(self) -> None:
        """Compare the module with what it was.

        Raises:
            RuntimeError: the name of the tensor that has changed.
        """
        reading, key = Reading(self.module), cache_key(self.module)
        if self.known is None:
            self.known = _values(reading)
        now = dict(zip(reading.names, reading.tensors, strict=True))
        for name, tensor, version, value in self.known:
            x: Any = now.get(name)
            if x is not tensor or _version(x) != version or not _equal(x, value):
                self._refuse(repr(name))
        if self.key is not None and key != self.key:
            self._refuse("an attribute, or a value that it reads,")
        self.key = key

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"{what} of {type(self.module).__name__} has changed while an estimate was computed, "
            "in another thread or by the observable, so its runs are of different dynamics. "
            "Change it before or after the estimate, or give each thread a copy "
            "(copy.deepcopy)."
        )


def _values(reading: Reading[Any]) -> list[tuple[str, Tensor, int, Tensor]]:
    return [
        (name, x, _version(x), x.detach().clone())
        for name, x in zip(reading.names, reading.tensors, strict=True)
    ]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.detach().nan_to_num(), y.nan_to_num())
