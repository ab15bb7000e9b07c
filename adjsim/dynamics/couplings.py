"""Coupling steps: the two moves that every reversible flow here is made of, and what follows from them.

A :class:`Shear` adds to a field y something that does not depend on y; a :class:`Scale` multiplies it by a positive
factor that does not depend on y. With x everything else, c the coefficients (functions of the parameters, computed once
a run) and lambda the cotangent of the result::

    Shear   y' = y + c g(x)      y = y' - c g(x)     lambda_x += c (dg/dx)^T lambda_y    lambda_c += lambda_y . g(x)
    Scale   y' = f(x) y          y = y' / f(x)       lambda_x += (df/dx)^T (lambda_y . y)    lambda_y <- f lambda_y

The inverse and the product both need g(x) (or f(x)) at the same x, which the move leaves unchanged, so going backward evaluates
it once. A :class:`Map` is a flow of another kind, with a function and its inverse (None if it destroys information); its
product is taken by automatic differentiation of the function.

Moves are pure: (state, coefficients, noise, time) in, state out. What g is, a source says (:mod:`adjsim.dynamics.sources`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adjsim._state import State
from adjsim.dynamics.cotangents import Cotangents, insert, take
from adjsim.dynamics.sources import At, Source, cut, reduce


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
        """The state after the move."""
        return self._add(state, self.source.value(state, at), at, 1)

    def backward(self, after: State, at: At, cotangents: Cotangents, before: State | None = None) -> State:
        """The state before the move (by its inverse if it is not given), with the cotangents taken through the move."""
        value, accumulate = self.source.vjp(after, at, cotangents)
        cotangent = take(cotangents[self.field], self.link)
        if self.coefficient is None:
            if accumulate is not None:
                accumulate(reduce(cotangent, value))
        else:
            c = at.coefficients[self.coefficient]
            if accumulate is not None:
                accumulate(reduce(c * cotangent, value))
            if c.requires_grad:
                cotangents.add_coefficient(at.letter, self.coefficient, reduce(cotangent * value, c))
        return before if before is not None else self._add(after, value, at, -1)

    def _add(self, state: State, value: Tensor, at: At, sign: int) -> State:
        y = take(getattr(state, self.field), self.link)
        if self.coefficient is None:
            y = torch.add(y, value, alpha=sign)
        else:
            y = torch.addcmul(y, at.coefficients[self.coefficient], value, value=sign)
        return put(state, self.field, self.link, y)


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
        """The state after the move."""
        return self._multiply(state, self.source.value(state, at), at)

    def backward(self, after: State, at: At, cotangents: Cotangents, before: State | None = None) -> State:
        """The state before the move (by its inverse if it is not given), with the cotangents taken through the move."""
        factor, accumulate = self.source.vjp(after, at, cotangents)
        if before is None:
            before = self._divide(after, factor, at)
        whole = cotangents[self.field]
        cotangent = take(whole, self.link)
        cotangents[self.field] = insert(whole, self.link, cotangent * factor)
        if accumulate is not None:
            accumulate(reduce(cotangent * take(getattr(before, self.field), self.link), factor))
        return before

    def _multiply(self, state: State, factor: Tensor, at: At) -> State:
        return put(state, self.field, self.link, take(getattr(state, self.field), self.link) * factor)

    def _divide(self, state: State, factor: Tensor, at: At) -> State:
        return put(state, self.field, self.link, take(getattr(state, self.field), self.link) / factor)


@dataclass(frozen=True)
class Map:
    """A flow that is not a coupling: ``function(coefficients, *fields) -> fields``, or ``(coefficients, force, *fields) ->
    fields`` where ``force`` is set. Without an inverse it destroys information and can only be recomputed."""

    fields: tuple[str, ...]
    function: Callable[..., tuple[Tensor, ...]]
    inverse: Callable[..., tuple[Tensor, ...]] | None
    force: bool = False

    @property
    def writes(self) -> tuple[str, ...]:
        return self.fields

    @property
    def invertible(self) -> bool:
        return self.inverse is not None

    def flow(self, state: State, at: At) -> State:
        """The state after the move."""
        force = (at.forces.force(state.position, at.t),) if self.force else ()
        return self._replace(state, self.function(at.coefficients, *force, *self._fields(state)))

    def backward(self, after: State, at: At, cotangents: Cotangents, before: State | None = None) -> State:
        """The state before the move (by its inverse if it is not given), with the cotangents taken through the move."""
        # Where the flow moves the position, its force was that of the position before, which has then been kept.
        where = after if before is None else before
        linear = at.forces.linear(where.position, at.t) if self.force else None
        force = () if linear is None else (linear.value,)
        if before is None:
            if self.inverse is None:
                raise TypeError("this flow has no inverse; use CheckpointAdjoint or DirectAdjoint.")
            before = self._replace(after, self.inverse(at.coefficients, *force, *self._fields(after)))
        inner = [x.detach().requires_grad_() for x in (*force, *self._fields(before))]
        coefficients, wanted = cut(at.coefficients)
        with torch.enable_grad():
            out = self.function(coefficients, *inner)
        inputs = [*inner, *(coefficients[k] for k in wanted)]
        outer = tuple(cotangents[name] for name in self.fields)
        pairs = [(value, c) for value, c in zip(out, outer, strict=True) if value.requires_grad]
        for value, _ in pairs:
            at.forces.refuse_unknown(value, [*inner, *coefficients.values()], f"the flow of term {at.letter!r}")
        found = [torch.zeros_like(x) for x in inputs]
        if pairs:
            values, given = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(values, inputs, given, allow_unused=True, materialize_grads=True))
        for name in self.fields:
            cotangents[name] = found.pop(len(force))
        if linear is not None:
            cotangents.add_to_force(linear, found.pop(0))
        for name, grad in zip(wanted, found, strict=True):
            cotangents.add_coefficient(at.letter, name, grad)
        return before

    def _fields(self, state: State) -> tuple[Tensor, ...]:
        return tuple(getattr(state, name) for name in self.fields)

    def _replace(self, state: State, values: tuple[Tensor, ...]) -> State:
        return state._replace(**dict(zip(self.fields, values, strict=True)))


Move = Shear | Scale | Map


def put(state: State, name: str, link: int | None, part: Tensor) -> State:
    """The state with one field, or one link of it, replaced."""
    # Half the cost of _replace, which is a tenth of a step of a small system.
    i = state._fields.index(name)
    return type(state)(*state[:i], insert(state[i], link, part), *state[i + 1 :])
