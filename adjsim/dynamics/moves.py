"""Coupling steps: the moves of reversible flows, with inverses and vector-Jacobian products.

A :class:`Shear` adds to a field y a value that does not depend on y. A :class:`Scale` multiplies y
by a positive factor that does not depend on y. A :class:`Reflection` takes y to its mirror image at
another field x. A :class:`ColumnShear` adds to the columns of a field multiples of other columns.
With x the rest of the state, c the coefficients (functions of the parameters,
computed once a run) and lambda the cotangent of the result::

    Shear   y' = y + c g(x)    y = y' - c g(x)    lambda_x += c (dg/dx)^T lambda_y
                                                  lambda_c += lambda_y . g(x)
    Scale   y' = f(x) y        y = y' / f(x)      lambda_x += (df/dx)^T (lambda_y . y)
                                                  lambda_y <- f lambda_y
    Reflection  y' = 2 x - y   y = 2 x - y'       lambda_x += 2 lambda_y    lambda_y <- -lambda_y
    ColumnShear  y' = y T      y = y' T^-1        lambda_y <- lambda_y T^T

The inverse and the product need g(x) (or f(x)) at the same x, which the move leaves unchanged. So a
backward move evaluates it once. A :class:`GeneralFlow` is any other flow, given by a function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import ClassVar

import torch
from torch import Tensor

from adjsim.core.refusal import Refusal
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.state import AnyState, State
from adjsim.dynamics.cotangents import Cotangents, add_each, replace_link, select_link
from adjsim.dynamics.sources import MoveContext, Source, as_leaves, unbroadcast


class Move(ABC):
    """One move of a flow, which writes some fields of the state.

    ``irreversible`` says why it has no inverse, and ``no_compiled_inverse`` why no compiled loop
    can have its inverse; None for a move that has one. ``has_lattice_form`` tells whether exact
    runs, which need a form on a lattice, can take it.
    """

    has_lattice_form: ClassVar[bool] = False
    irreversible: ClassVar[Refusal | None] = None
    no_compiled_inverse: ClassVar[Refusal | None] = None

    @property
    @abstractmethod
    def writes(self) -> tuple[str, ...]:
        """The fields that it writes."""

    @property
    def invertible(self) -> bool:
        """Whether the state before it follows from the state after it."""
        return self.irreversible is None

    @abstractmethod
    def flow(self, state: State, context: MoveContext) -> State:
        """Return the state after the move."""

    @abstractmethod
    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        """Propagate state and cotangents back, by the inverse if ``before`` is None."""

    def on_lattice(self, roundings: Mapping[str, Rounding]) -> Move:
        """Return its form on a lattice with these roundings of the fields."""
        return self


class Coupling(Move):
    """The base class of moves of a field or a link by a source that does not read it."""

    has_lattice_form = True
    field: str
    source: Source
    link: int | None

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.field,)

    @abstractmethod
    def moved(self, state: State, value: Tensor, context: MoveContext, sign: int) -> State:
        """Return the state after the move by a value of the source, or with sign -1 before it."""

    def flow(self, state: State, context: MoveContext) -> State:
        return self.moved(state, self.source.value(state, context), context, 1)

    def _part(self, state: AnyState) -> Tensor:
        return select_link(getattr(state, self.field), self.link)


@dataclass(frozen=True)
class Shear(Coupling):
    """A shear ``y' = y + c g(x)`` of a field, or of a link, an entry of its third-to-last axis."""

    field: str
    source: Source
    coefficient: str | None = None
    link: int | None = None

    def moved(self, state: State, value: Tensor, context: MoveContext, sign: int) -> State:
        y = self._part(state)
        if self.coefficient is None:
            y = torch.add(y, value, alpha=sign)
        else:
            y = torch.addcmul(y, context.coefficients[self.coefficient], value, value=sign)
        return replace_field(state, self.field, self.link, y)

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        value, accumulate = self.source.vjp(after, context, cotangents)
        cotangent = select_link(cotangents[self.field], self.link)
        name = self.coefficient
        if name is None:
            if accumulate is not None:
                accumulate(unbroadcast(cotangent, value))
        else:
            c = context.coefficients[name]
            if accumulate is not None:
                accumulate(unbroadcast(c * cotangent, value))
            if c.requires_grad:
                found = unbroadcast(cotangent * value, c)
                cotangents.add_coefficient(context.letter, name, found)
        return self.moved(after, value, context, -1) if before is None else before


@dataclass(frozen=True)
class Scale(Coupling):
    """A scale ``y' = f(x) y`` of a field, or of one link, f positive."""

    field: str
    source: Source
    link: int | None = None
    # The largest |log2 f| that exact runs plan with, where f depends on the state.
    bits: float = 1.0

    def moved(self, state: State, value: Tensor, context: MoveContext, sign: int) -> State:
        y = self._part(state)
        return replace_field(state, self.field, self.link, y * value if sign > 0 else y / value)

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        value, accumulate = self.source.vjp(after, context, cotangents)
        if before is None:
            before = self.moved(after, value, context, -1)
        whole = cotangents[self.field]
        cotangent = select_link(whole, self.link)
        cotangents[self.field] = replace_link(whole, self.link, cotangent * value)
        if accumulate is not None:
            accumulate(unbroadcast(cotangent * self._part(before), value))
        return before


@dataclass(frozen=True)
class RatioScale(Scale):
    """A scale by g(x)/g(x0) for a field that a shear has just taken from x0 to x.

    The source is the factor in plain steps. The lattice form multiplies by a fraction of the
    integers nearest to g, so that the products of many steps telescope: the error of a field does
    not grow with their number, and a slow shear is not lost.
    """

    of: Callable[[Tensor], Tensor] = field(kw_only=True)
    shear: Shear = field(kw_only=True)


@dataclass(frozen=True)
class Reflection(Move):
    """A reflection ``y' = 2 x - y`` at another field x, its own inverse, exact on a lattice."""

    has_lattice_form = True
    field: str
    centre: str

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.field,)

    def flow(self, state: State, context: MoveContext) -> State:
        x, y = getattr(state, self.centre), getattr(state, self.field)
        return replace_field(state, self.field, None, 2 * x - y)

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        cotangent = cotangents[self.field]
        cotangents.add(self.centre, 2 * cotangent)
        cotangents[self.field] = -cotangent
        return self.flow(after, context) if before is None else before


@dataclass(frozen=True)
class ColumnShear(Move):
    """A shear of the columns of a field, ``y' = y T``, T triangular with ones on its diagonal.

    T is a coefficient that is not differentiated, lower triangular or upper. Each column adds
    multiples of the columns on one side of it, which follow from the others in turn. ``inverse``:
    the move by T^-1.
    """

    has_lattice_form = True
    field: str
    coefficient: str
    lower: bool
    inverse: bool = False
    rounding: Rounding = UNROUNDED

    def on_lattice(self, roundings: Mapping[str, Rounding]) -> ColumnShear:
        return replace(self, rounding=roundings[self.field])

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.field,)

    def flow(self, state: State, context: MoveContext) -> State:
        return self._moved(state, context, self.inverse)

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        matrix = context.coefficients[self.coefficient].mT
        cotangents[self.field] = sheared(
            cotangents[self.field], matrix, not self.lower, self.inverse, UNROUNDED
        )
        return self._moved(after, context, not self.inverse) if before is None else before

    def _moved(self, state: State, context: MoveContext, inverse: bool) -> State:
        y, matrix = getattr(state, self.field), context.coefficients[self.coefficient]
        moved = sheared(y, matrix, self.lower, inverse, self.rounding)
        return replace_field(state, self.field, None, moved)


def sheared(y: Tensor, matrix: Tensor, lower: bool, inverse: bool, rounding: Rounding) -> Tensor:
    """Multiply columns by a triangular matrix with ones on its diagonal, or by its inverse."""
    columns, sign = list(y.split(1, -1)), -1 if inverse else 1
    places = range(len(columns))
    # A column is changed while those that it adds have the values before the move.
    for k in places if lower != inverse else reversed(places):
        others = places[k + 1 :] if lower else places[:k]
        if others:
            added = reduce(add, [columns[j] * matrix[j, k] for j in others])
            columns[k] = columns[k] + sign * rounding.round(added)
    return torch.cat(columns, -1)


@dataclass(frozen=True)
class GeneralFlow(Move):
    """A flow that is not a coupling, given by a function and its inverse.

    The function is ``function(coefficients, *values, *fields) -> fields``, with the values of the
    sources ``reads``. If it has an inverse, the sources must not read what it writes. Without one,
    ``irreversible`` says which information it destroys. If the function evaluates modules of the
    dynamics, such as a contact, ``reads_parameters`` includes their parameters in the product.
    """

    fields: tuple[str, ...]
    function: Callable[..., tuple[Tensor, ...]]
    inverse: Callable[..., tuple[Tensor, ...]] | None
    reads: tuple[Source, ...] = ()
    irreversible: Refusal | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    reads_parameters: bool = False
    no_compiled_inverse: Refusal | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def writes(self) -> tuple[str, ...]:
        return self.fields

    @property
    def invertible(self) -> bool:
        return self.inverse is not None

    def flow(self, state: State, context: MoveContext) -> State:
        values = [source.value(state, context) for source in self.reads]
        return self._replaced(self.function, state, context, values)

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        # A flow that moves the position took the force at ``before``, and ``before`` is given then.
        where = after if before is None else before
        parts = [source.vjp(where, context, cotangents) for source in self.reads]
        if before is None:
            if self.inverse is None:
                raise TypeError("this flow has no inverse; use CheckpointAdjoint or DirectAdjoint.")
            before = self._replaced(self.inverse, after, context, [value for value, _ in parts])
        read = [x.detach().requires_grad_(inner is not None) for x, inner in parts]
        fields = [x.detach().requires_grad_() for x in self._fields(before)]
        coefficients, wanted = as_leaves(context.coefficients)
        with torch.enable_grad(), cotangents.collecting():
            out = self.function(coefficients, *read, *fields)
        received = [(x, inner) for x, (_, inner) in zip(read, parts, strict=True) if inner]
        parameters = context.forces.parameters if self.reads_parameters else {}
        inputs = [*fields, *(x for x, _ in received), *(coefficients[k] for k in wanted)]
        outer = tuple(cotangents[name] for name in self.fields)
        pairs = [(value, c) for value, c in zip(out, outer, strict=True) if value.requires_grad]
        known = [*read, *fields, *coefficients.values()]
        for value, _ in pairs:
            context.forces.refuse_unknown(value, known, f"the flow of term {context.letter!r}")
        leaves = (*inputs, *parameters.values())
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            found = cotangents.pull(outputs, leaves, given)
        add_each(cotangents.add_parameter, parameters, found[len(inputs) :])
        grads = [
            torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=False)
        ]
        for name in self.fields:
            cotangents[name] = grads.pop(0)
        for _, inner in received:
            inner(grads.pop(0))
        add_each(partial(cotangents.add_coefficient, context.letter), wanted, grads)
        return before

    def _fields(self, state: AnyState) -> tuple[Tensor, ...]:
        return tuple(map(partial(getattr, state), self.fields))

    def _replaced(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        state: State,
        context: MoveContext,
        values: Sequence[Tensor],
    ) -> State:
        found = function(context.coefficients, *values, *self._fields(state))
        new = dict(zip(self.fields, found, strict=True))
        return type(state)._make(map(new.get, state._fields, state))


@dataclass(frozen=True)
class BufferedFlow(GeneralFlow):
    """A flow with a form of its own on a lattice, which writes into information buffers.

    Its buffer is a field ``buffered`` of the states of exact runs. A flow takes ``bits`` bits of
    each entry of it at most. A coefficient "units" of an exact run is the largest number of units
    of the lattice that scales are off by.
    """

    has_lattice_form = True
    buffered: ClassVar[str]
    bits: ClassVar[float]

    @abstractmethod
    def empty_buffer(self, state: AnyState) -> Tensor:
        """Return the buffer at the start."""

    @abstractmethod
    def on_lattice(self, roundings: Mapping[str, Rounding]) -> Move: ...


def replace_field(state: State, name: str, link: int | None, part: Tensor) -> State:
    """Return the state with one field, or one link of it, replaced."""
    # Three times as fast as _replace, which takes a tenth of the time of a step of a small system.
    values, i = list(state), state._fields.index(name)
    values[i] = replace_link(values[i], link, part)
    return type(state)._make(values)
