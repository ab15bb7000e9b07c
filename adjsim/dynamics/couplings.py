"""Coupling steps: the two moves that every reversible flow here is made of, and what follows from them.

A :class:`Shear` adds to a field y something that does not depend on y; a :class:`Scale` multiplies it by a positive
factor that does not depend on y. With x everything else, c the coefficients (functions of the parameters, computed once
a run) and lambda the cotangent of the result::

    Shear   y' = y + c g(x)      y = y' - c g(x)     lambda_x += c (dg/dx)^T lambda_y    lambda_c += lambda_y . g(x)
    Scale   y' = f(x) y          y = y' / f(x)       lambda_x += (df/dx)^T (lambda_y . y)    lambda_y <- f lambda_y

The inverse and the product both need g(x) (or f(x)) at the same x, which the move leaves unchanged, so going back
evaluates it once. A :class:`Map` is a flow of another kind, with its own ``flow`` and ``inverse`` (None if it destroys
information); its product is taken by automatic differentiation of ``flow``.

Moves are pure: (state, coefficients, noise, time) in, state out. What g is, a source says (:mod:`adjsim.dynamics.sources`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adjsim._state import State
from adjsim.dynamics.sources import At, Gradients, Source, cut, insert, reduce, take


@dataclass(frozen=True)
class Shear:
    """``y' = y + c g(x)`` on a field, or on one link of it (an entry of its third-to-last axis)."""

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
        cotangent = take(grads.state[self.field], self.link)
        if self.coefficient is None:
            if pull is not None:
                pull(reduce(cotangent, value))
        else:
            c = at.coefficients[self.coefficient]
            if pull is not None:
                pull(reduce(c * cotangent, value))
            if c.requires_grad:
                grads.add_coefficient(at.letter, self.coefficient, reduce(cotangent * value, c))
        return before if before is not None else self._add(after, value, at, -1)

    def _add(self, state: State, value: Tensor, at: At, sign: int) -> State:
        y = take(getattr(state, self.field), self.link)
        if self.coefficient is None:
            y = torch.add(y, value, alpha=sign)
        else:
            y = torch.addcmul(y, at.coefficients[self.coefficient], value, value=sign)
        return self._put(state, y)

    def _put(self, state: State, y: Tensor) -> State:
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
        return self._multiply(state, self.source.value(state, at), at)

    def inverse(self, state: State, at: At) -> State:
        return self._divide(state, self.source.value(state, at), at)

    def retreat(self, after: State, at: At, grads: Gradients, before: State | None) -> State:
        factor, pull = self.source.linearise(after, at, grads)
        if before is None:
            before = self._divide(after, factor, at)
        cotangent = take(grads.state[self.field], self.link)
        grads.state[self.field] = insert(grads.state[self.field], self.link, cotangent * factor)
        if pull is not None:
            pull(reduce(cotangent * take(getattr(before, self.field), self.link), factor))
        return before

    def _multiply(self, state: State, factor: Tensor, at: At) -> State:
        return self._put(state, take(getattr(state, self.field), self.link) * factor)

    def _divide(self, state: State, factor: Tensor, at: At) -> State:
        return self._put(state, take(getattr(state, self.field), self.link) / factor)

    def _put(self, state: State, y: Tensor) -> State:
        return _put(state, self.field, self.link, y)


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
        # Where the flow moves the position, its force was that of the position before, which has then been kept.
        where = after if before is None else before
        pending = [grads.force(self.potential, at.t, where.position)] if self.potential is not None else []
        push = tuple(entry.value for entry in pending)
        if before is None:
            before = self._invert(after, at, push)
        fields = [x.detach().requires_grad_() for x in (*push, *self._fields(before))]
        coefficients, wanted = cut(at.coefficients)
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


def _put(state: State, name: str, link: int | None, part: Tensor) -> State:
    # Half the cost of _replace, which is a tenth of a step of a small system.
    i = state._fields.index(name)
    return type(state)(*state[:i], insert(state[i], link, part), *state[i + 1 :])
