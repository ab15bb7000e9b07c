"""The cotangents that a backward sweep accumulates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from adjsim.core.layout import is_tracing, materialise
from adjsim.core.rows import where
from adjsim.dynamics.clip import Clip
from adjsim.dynamics.forces import LinearForce, add_to
from adjsim.dynamics.layers import RowsOfLayers
from adjsim.potentials.products import DeferredVJP

# Entries of small systems that are collected and differentiated together.
STACK = 16_384
# The fields that forces depend on, see adjsim.core.state.point_of.
POINT = "position", "strain"


class Cotangents:
    """The cotangents of the state, coefficients and parameters in one sweep.

    Those of coefficients (by letter and name) and parameters are sums, which may go on from those
    of an earlier part of the sweep. Products of forces that have received cotangents are taken when
    the cotangent of the position is read. ``parameters`` are leaves that stand for the parameters.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor] | None = None,
        coefficient_sums: Mapping[tuple[str, str], Tensor] | None = None,
        parameter_sums: Mapping[str, Tensor] | None = None,
        rows: bool = False,
    ) -> None:
        self._state = dict(state)
        self.parameters = dict(parameters or {})
        self.coefficient_sums = dict(coefficient_sums or {})
        self.parameter_sums = dict(parameter_sums or {})
        self._layers = RowsOfLayers(self.parameters, self.parameter_sums) if rows else None
        self._forces: list[LinearForce] = []
        self._deferred: dict[Callable[[Tensor], Tensor], list[DeferredVJP]] = {}

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._state)

    def __getitem__(self, name: str) -> Tensor:
        if name in POINT:
            self._take_products()
        return self._state[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._state[name] = value

    def add(self, name: str, value: Tensor, link: int | None = None) -> None:
        """Add to the cotangent of a field, or of one link of it."""
        old = self._state[name]
        self._state[name] = replace_link(old, link, select_link(old, link) + self._present(value))

    def add_to_force(self, force: LinearForce, which: int, value: Tensor) -> None:
        """Add to the cotangent of one of the forces at a point."""
        if not force.waits:
            self._forces.append(force)
        force.accumulate(which, self._present(value))

    def add_coefficient(self, letter: str, name: str, value: Tensor) -> None:
        """Add to the cotangent of a coefficient."""
        add_to(self.coefficient_sums, (letter, name), self._present(value))

    def add_parameter(self, name: str, value: Tensor) -> None:
        """Add to the cotangent of a parameter."""
        add_to(self.parameter_sums, name, self._present(value))

    def collecting(self) -> AbstractContextManager[Any]:
        """Return the context in which functions are evaluated that :meth:`pull` differentiates."""
        return nullcontext() if self._layers is None else self._layers

    def pull(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Differentiate what has been evaluated in :meth:`collecting`."""
        with nullcontext() if self._layers is None else self._layers.expecting(outputs):
            return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)

    def add_function(self, value: Tensor, leaves: Any, cotangent: Tensor) -> dict[str, Tensor]:
        """Differentiate a value, add the products, and return those for the leaves by field."""
        if not value.requires_grad:
            return {}
        found = torch.autograd.grad(
            value, (*leaves, *self.parameters.values()), cotangent, allow_unused=True
        )
        add_each(self.add, leaves._fields, found[: len(leaves)])
        add_each(self.add_parameter, self.parameters, found[len(leaves) :])
        named = zip(leaves._fields, found, strict=False)
        return {name: grad for name, grad in named if grad is not None}

    def clip(self, clip: Clip, batch: int) -> None:
        """Clip the cotangents of each system of a state with ``batch`` leading axes."""
        self._take_products()
        self._state = clip.scaled(self._state, batch)

    def complete(self) -> None:
        """Take all deferred products, after which the sums are complete."""
        self._take_products()
        for pending in self._deferred.values():
            if pending:
                self._differentiate(pending)
        if self._layers is not None:
            self._layers.complete()

    def state(self) -> dict[str, Any]:
        """Return all cotangents and sums, after :meth:`complete`, for a save."""
        return {
            "fields": dict(self._state),
            "coefficients": [[*key, value] for key, value in self.coefficient_sums.items()],
            "parameters": dict(self.parameter_sums),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the sums of a sweep that was interrupted."""
        self._state = dict(state["fields"])
        self.coefficient_sums = {(a, n): value for a, n, value in state["coefficients"]}
        self.parameter_sums.clear()
        self.parameter_sums.update(state["parameters"])

    def _present(self, value: Tensor) -> Tensor:
        """Return what a part of the sweep contributes."""
        return value

    def _take_products(self) -> None:
        for force in self._forces:
            along, deferred, grads = force.product()
            for name, product in zip(POINT, along, strict=False):
                self._state[name] = self._state[name] + product
            for found in deferred:
                pending = self._deferred.setdefault(found.function, [])
                pending.append(found)
                if is_tracing() or len(pending) * found.x.numel() >= STACK:
                    self._differentiate(pending)
            for name, grad in grads.items():
                self.add_parameter(name, grad)
        self._forces.clear()

    def _differentiate(self, pending: list[DeferredVJP]) -> None:
        found = pending[0]
        if len(pending) > 1:
            weight = torch.stack([d.weight for d in pending])
            x = torch.stack([d.x for d in pending])
            found = DeferredVJP(found.module, found.function, weight, x)
        pending.clear()
        grads = found.gradient(list(self.parameters.values()))
        add_each(self.add_parameter, self.parameters, grads)


class CotangentsUnless(Cotangents):
    """A view of cotangents for a part of a sweep, which contributes unless it is absent.

    ``absent`` is a boolean number. An absent part may have been evaluated where its derivatives are
    not finite, so zero replaces its contributions.
    """

    def __init__(self, absent: Tensor, whole: Cotangents) -> None:
        self._state, self._forces, self._deferred = whole._state, whole._forces, whole._deferred
        self.parameters = whole.parameters
        self.coefficient_sums, self.parameter_sums = whole.coefficient_sums, whole.parameter_sums
        self.absent, self.whole = absent, whole
        # Loops are compiled, and their sums are inputs and outputs of each iteration.
        self._layers = None

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, where(self.absent, self._state[name], value))

    def _take_products(self) -> None:
        # Products of forces belong to all parts; absent parts have added zero to their cotangents.
        self.whole._take_products()

    def _present(self, value: Tensor) -> Tensor:
        return where(self.absent, 0.0, value)


def add_each(
    add: Callable[[str, Tensor], None], names: Iterable[str], grads: Iterable[Tensor | None]
) -> None:
    """Add gradients by their names, apart from those that are None."""
    for name, grad in zip(names, grads, strict=True):
        if grad is not None:
            add(name, grad)


def select_link(value: Tensor, link: int | None) -> Tensor:
    """Return a link of a field, an entry of its third-to-last axis, or all of it."""
    return value if link is None else value.select(-3, link)


def replace_link(value: Tensor, link: int | None, part: Tensor) -> Tensor:
    """Return the field with one link, or all of it, replaced."""
    # Each link reads its neighbour. Without storage the compiler would recompute a field for every
    # reader, and for every reader of that reader.
    return part if link is None else materialise(torch.select_scatter(value, part, -3, link))
