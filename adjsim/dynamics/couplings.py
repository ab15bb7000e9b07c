"""Coupling steps: the two moves that every reversible flow here is made of, and what follows from them.

A :class:`Shear` adds to a field y something that does not depend on y; a :class:`Scale` multiplies it by a positive
factor that does not depend on y. With x everything else, c the coefficients (functions of the parameters, computed once
a run) and lambda the cotangent of the result::

    Shear   y' = y + c g(x)      y = y' - c g(x)     lambda_x += c (dg/dx)^T lambda_y    lambda_c += lambda_y . g(x)
    Scale   y' = f(x) y          y = y' / f(x)       lambda_x += (df/dx)^T (lambda_y . y)    lambda_y <- f lambda_y

The inverse and the product both need g(x) (or f(x)) at the same x, which the move leaves unchanged, so going back
evaluates it once. A :class:`Map` is a flow of another kind, with its own ``flow`` and ``inverse`` (None if it destroys
information); its product is taken by automatic differentiation of ``flow``.

Moves are pure: (state, coefficients, noise, time) in, state out. What g is, a *source* says: :class:`Field`,
:class:`ForceOf` or :class:`Function`. The force is shared between moves as long as no position changes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from adjsim._state import State
from adjsim.potentials.base import force, force_vjp

Coefficients = Mapping[str, Tensor]
Pull = Callable[[Tensor], None]


class Forces:
    """The force at the current position, evaluated once however many moves ask for it.

    Passes over the energy are added to ``stats["energy_evaluations"]``, if given: one for the force, one when
    backpropagation reaches it.
    """

    def __init__(self, stats: dict[str, Any] | None = None) -> None:
        self._known: dict[int, Tensor] = {}
        self._stats = stats

    def __call__(self, potential: nn.Module, t: Any, position: Tensor) -> Tensor:
        key = id(potential)
        if key not in self._known:
            value = force(potential, position, t)
            if self._stats is not None:
                self._count()
                if value.requires_grad:
                    value.register_hook(self._count)
            self._known[key] = value
        return self._known[key]

    def _count(self, *_: Tensor) -> None:
        assert self._stats is not None
        self._stats["energy_evaluations"] += 1

    def moved(self, fields: tuple[str, ...]) -> None:
        """Forget what no longer holds after a move that wrote these fields."""
        if "position" in fields:
            self._known.clear()


class Gradients:
    """What the backward sweep accumulates: cotangents of the state, of the coefficients and of the parameters.

    The product with the force's Jacobian is linear, and no move between two uses of one force changes its cotangent
    other than by adding to it; so it is taken once, when the position is about to change.
    """

    def __init__(self, state: dict[str, Tensor], parameters: list[Tensor]) -> None:
        self.state = state
        self.parameters = parameters
        self.parameter_grads: list[Tensor | None] = [None] * len(parameters)
        self.coefficient_grads: dict[tuple[str, str], Tensor] = {}
        self.evaluations = 0
        self._forces: dict[int, _PendingForce] = {}

    def force(self, potential: nn.Module, t: Any, position: Tensor) -> _PendingForce:
        key = id(potential)
        if key not in self._forces:
            value, pullback = force_vjp(potential, position, self.parameters, t)
            self._forces[key] = _PendingForce(value, pullback)
            self.evaluations += 1
        return self._forces[key]

    def moving(self, fields: tuple[str, ...]) -> None:
        """Settle the forces before going back through a move that wrote these fields."""
        if "position" in fields:
            self.settle()

    def settle(self) -> None:
        for pending in self._forces.values():
            if pending.cotangent is not None:
                along, grads = pending.pullback(pending.cotangent)
                self.evaluations += 1
                self.state["position"] = self.state["position"] + along
                self.add_parameters(grads)
        self._forces.clear()

    def add_parameters(self, grads: list[Tensor | None]) -> None:
        for i, grad in enumerate(grads):
            if grad is not None:
                old = self.parameter_grads[i]
                self.parameter_grads[i] = grad if old is None else old + grad

    def add_coefficient(self, letter: str, name: str, grad: Tensor) -> None:
        old = self.coefficient_grads.get((letter, name))
        self.coefficient_grads[letter, name] = grad if old is None else old + grad


@dataclass
class _PendingForce:
    value: Tensor
    pullback: Callable[[Tensor], tuple[Tensor, list[Tensor | None]]]
    cotangent: Tensor | None = None

    def pull(self, cotangent: Tensor) -> None:
        self.cotangent = cotangent if self.cotangent is None else self.cotangent + cotangent


@dataclass
class At:
    """Where a move takes place: the time, its term's letter and coefficients, the step's noise, the forces."""

    t: Any
    letter: str
    coefficients: Coefficients
    noise: Any
    forces: Forces = field(default_factory=Forces)


@runtime_checkable
class Source(Protocol):
    """What a move adds or multiplies by: a value, and a way to pull a cotangent of that value back."""

    def value(self, state: State, at: At) -> Tensor: ...
    def linearise(self, state: State, at: At, grads: Gradients) -> tuple[Tensor, Pull]: ...


@dataclass(frozen=True)
class Field:
    """Another field, as it is."""

    name: str

    def value(self, state: State, at: At) -> Tensor:
        return getattr(state, self.name)

    def linearise(self, state: State, at: At, grads: Gradients) -> tuple[Tensor, Pull]:
        def pull(cotangent: Tensor) -> None:
            grads.state[self.name] = grads.state[self.name] + cotangent

        return getattr(state, self.name), pull


@dataclass(frozen=True)
class ForceOf:
    """The force of a potential at the position."""

    potential: nn.Module

    def value(self, state: State, at: At) -> Tensor:
        return at.forces(self.potential, at.t, state.position)

    def linearise(self, state: State, at: At, grads: Gradients) -> tuple[Tensor, Pull]:
        pending = grads.force(self.potential, at.t, state.position)
        return pending.value, pending.pull


@dataclass(frozen=True)
class Function:
    """``function(coefficients, *fields)`` of the fields it names; its product is taken by automatic differentiation."""

    function: Callable[..., Tensor]
    reads: tuple[str, ...]

    def value(self, state: State, at: At) -> Tensor:
        return self.function(at.coefficients, *(getattr(state, name) for name in self.reads))

    def linearise(self, state: State, at: At, grads: Gradients) -> tuple[Tensor, Pull]:
        fields = [getattr(state, name).detach().requires_grad_() for name in self.reads]
        coefficients, wanted = _leaves(at.coefficients)
        with torch.enable_grad():
            value = self.function(coefficients, *fields)

        def pull(cotangent: Tensor) -> None:
            inputs = [*fields, *(coefficients[k] for k in wanted)]
            found = torch.autograd.grad(value, inputs, cotangent, allow_unused=True)
            for name, grad in zip(self.reads, found, strict=False):
                if grad is not None:
                    grads.state[name] = grads.state[name] + grad
            for name, grad in zip(wanted, found[len(fields) :], strict=True):
                if grad is not None:
                    grads.add_coefficient(at.letter, name, grad)

        return value.detach(), pull


@dataclass(frozen=True)
class Shear:
    """``y' = y + c g(x)`` on a field, or on one link of it (an entry of its second-to-last axis)."""

    field: str
    source: Source
    coefficient: str | None = None
    link: int | None = None

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.field,)

    @property
    def invertible(self) -> bool:
        return True

    def flow(self, state: State, at: At) -> State:
        return self._add(state, self.source.value(state, at), at, 1)

    def inverse(self, state: State, at: At) -> State:
        return self._add(state, self.source.value(state, at), at, -1)

    def retreat(self, after: State, at: At, grads: Gradients, before: State | None) -> State:
        """The state before the move (found by the inverse if not given), with the cotangents taken through it."""
        value, pull = self.source.linearise(after, at, grads)
        cotangent = _take(grads.state[self.field], self.link)
        if self.coefficient is None:
            pull(cotangent.sum_to_size(value.shape))
        else:
            c = at.coefficients[self.coefficient]
            pull((c * cotangent).sum_to_size(value.shape))
            if c.requires_grad:
                grads.add_coefficient(at.letter, self.coefficient, (cotangent * value).sum_to_size(c.shape))
        return before if before is not None else self._add(after, value, at, -1)

    def _add(self, state: State, value: Tensor, at: At, sign: int) -> State:
        y = _take(getattr(state, self.field), self.link)
        if self.coefficient is None:
            y = torch.add(y, value, alpha=sign)
        else:
            y = torch.addcmul(y, at.coefficients[self.coefficient], value, value=sign)
        return _put(state, self.field, self.link, y)


@dataclass(frozen=True)
class Scale:
    """``y' = f(x) y``, f positive, on a field, or on one link of it."""

    field: str
    source: Source
    link: int | None = None

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.field,)

    @property
    def invertible(self) -> bool:
        return True

    def flow(self, state: State, at: At) -> State:
        y = _take(getattr(state, self.field), self.link)
        return _put(state, self.field, self.link, y * self.source.value(state, at))

    def inverse(self, state: State, at: At) -> State:
        y = _take(getattr(state, self.field), self.link)
        return _put(state, self.field, self.link, y / self.source.value(state, at))

    def retreat(self, after: State, at: At, grads: Gradients, before: State | None) -> State:
        factor, pull = self.source.linearise(after, at, grads)
        if before is None:
            y = _take(getattr(after, self.field), self.link) / factor
            before = _put(after, self.field, self.link, y)
        cotangent = _take(grads.state[self.field], self.link)
        y = _take(getattr(before, self.field), self.link)
        grads.state[self.field] = _insert(grads.state[self.field], self.link, cotangent * factor)
        pull((cotangent * y).sum_to_size(factor.shape))
        return before


@dataclass(frozen=True)
class Map:
    """A flow that is no coupling: ``(coefficients, *fields) -> fields``, or ``(coefficients, force, *fields) -> fields``
    where a potential is given. ``backward`` is its inverse; None means that it destroys information and can only be
    replayed."""

    fields: tuple[str, ...]
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]] | None
    potential: nn.Module | None = None

    @property
    def writes(self) -> tuple[str, ...]:
        return self.fields

    @property
    def invertible(self) -> bool:
        return self.backward is not None

    def flow(self, state: State, at: At) -> State:
        return self._replace(state, self.forward(at.coefficients, *self._push(state, at), *self._fields(state)))

    def inverse(self, state: State, at: At) -> State:
        return self._invert(state, at, self._push(state, at))

    def retreat(self, after: State, at: At, grads: Gradients, before: State | None) -> State:
        pending = [grads.force(self.potential, at.t, after.position)] if self.potential is not None else []
        push = tuple(entry.value for entry in pending)
        if before is None:
            before = self._invert(after, at, push)
        fields = [x.detach().requires_grad_() for x in (*push, *self._fields(before))]
        coefficients, wanted = _leaves(at.coefficients)
        with torch.enable_grad():
            out = self.forward(coefficients, *fields)
        cotangents = tuple(grads.state[name] for name in self.fields)
        inputs = [*fields, *(coefficients[k] for k in wanted)]
        found = [
            torch.zeros_like(x) if g is None else g
            for x, g in zip(inputs, torch.autograd.grad(out, inputs, cotangents, allow_unused=True), strict=True)
        ]
        for entry in pending:
            entry.pull(found.pop(0))
        for name in self.fields:
            grads.state[name] = found.pop(0)
        for name, grad in zip(wanted, found, strict=True):
            grads.add_coefficient(at.letter, name, grad)
        return before

    def _invert(self, state: State, at: At, push: tuple[Tensor, ...]) -> State:
        if self.backward is None:
            raise TypeError("this flow has no inverse; use CheckpointAdjoint or DirectAdjoint.")
        return self._replace(state, self.backward(at.coefficients, *push, *self._fields(state)))

    def _push(self, state: State, at: At) -> tuple[Tensor, ...]:
        return () if self.potential is None else (at.forces(self.potential, at.t, state.position),)

    def _fields(self, state: State) -> tuple[Tensor, ...]:
        return tuple(getattr(state, name) for name in self.fields)

    def _replace(self, state: State, values: tuple[Tensor, ...]) -> State:
        return state._replace(**dict(zip(self.fields, values, strict=True)))


Move = Shear | Scale | Map


def _leaves(coefficients: Coefficients) -> tuple[dict[str, Tensor], list[str]]:
    """Coefficients cut from their graph, and the names of those whose cotangent is wanted."""
    cut = {name: c.detach().requires_grad_(c.requires_grad) for name, c in coefficients.items()}
    return cut, [name for name, c in cut.items() if c.requires_grad]


def _take(value: Tensor, link: int | None) -> Tensor:
    return value if link is None else value[..., link : link + 1, :]


def _insert(value: Tensor, link: int | None, part: Tensor) -> Tensor:
    return part if link is None else torch.slice_scatter(value, part, -2, link, link + 1)


def _put(state: State, name: str, link: int | None, part: Tensor) -> State:
    return state._replace(**{name: _insert(getattr(state, name), link, part)})
