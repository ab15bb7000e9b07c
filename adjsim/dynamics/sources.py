"""Sources: the values that shears add and scales multiply by, with their products."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from adjsim.core.layout import number_on
from adjsim.core.state import AnyState, point_of
from adjsim.dynamics.cotangents import Cotangents, add_each, select_link
from adjsim.dynamics.forces import FORCE, ForceEvaluator

Coefficients = Mapping[str, Tensor]
# Takes the cotangent of a value, and adds its products to the cotangents of the value's inputs. It
# is None if there is nothing to differentiate.
Accumulate = Callable[[Tensor], None] | None
Linearised: TypeAlias = tuple[Tensor, Accumulate]


class MoveContext(NamedTuple):
    """The context of a move: time, letter of its term, coefficients, noise, forces.

    The noise is a tensor of the shape of position for each draw, or None where the term draws none.
    """

    t: Any
    letter: str
    coefficients: Coefficients
    noise: Sequence[Tensor] | None
    forces: ForceEvaluator


@runtime_checkable
class Source(Protocol):
    """The interface of a source: its value, and with it the function that takes its cotangent."""

    def value(self, state: AnyState, context: MoveContext) -> Tensor: ...
    def vjp(self, state: AnyState, context: MoveContext, cotangents: Cotangents) -> Linearised: ...


class _Constant(Source):
    """A source that is not differentiated."""

    def vjp(self, state: AnyState, context: MoveContext, cotangents: Cotangents) -> Linearised:
        return self.value(state, context), None


@dataclass(frozen=True)
class Field:
    """The value of another field, or of a link of it, an entry of its third-to-last axis."""

    name: str
    link: int | None = None

    def value(self, state: AnyState, context: MoveContext) -> Tensor:
        return select_link(getattr(state, self.name), self.link)

    def vjp(self, state: AnyState, context: MoveContext, cotangents: Cotangents) -> Linearised:
        value = self.value(state, context)
        return value, lambda cotangent: cotangents.add(self.name, cotangent, self.link)


@dataclass(frozen=True)
class Random(_Constant):
    """A draw of the stage's noise: standard normal numbers of the shape of position.

    Where the draws of a dynamics have another shape, ``rows`` and ``columns`` are the begin and the
    end of the part that is read.
    """

    draw: int = 0
    rows: tuple[int | None, int | None] = (None, None)
    columns: tuple[int | None, int | None] = (None, None)

    def value(self, state: AnyState, context: MoveContext) -> Tensor:
        assert context.noise is not None
        drawn = context.noise[self.draw]
        if self.rows != (None, None):
            drawn = drawn[..., slice(*self.rows), :]
        return drawn if self.columns == (None, None) else drawn[..., slice(*self.columns)]


@dataclass(frozen=True)
class Time(_Constant):
    """The time."""

    def value(self, state: AnyState, context: MoveContext) -> Tensor:
        return number_on(context.t, torch.float64, state[0].device)


@dataclass(frozen=True)
class Coefficient:
    """The value of a coefficient."""

    name: str

    def value(self, state: AnyState, context: MoveContext) -> Tensor:
        return context.coefficients[self.name]

    def vjp(self, state: AnyState, context: MoveContext, cotangents: Cotangents) -> Linearised:
        value = context.coefficients[self.name]
        if not value.requires_grad:
            return value, None
        return value, lambda cotangent: cotangents.add_coefficient(
            context.letter, self.name, unbroadcast(cotangent, value)
        )


@dataclass(frozen=True)
class Combination:
    """A weighted sum of sources, ``sum_k c_k source_k``.

    The coefficient c has one entry for each source.
    """

    coefficient: str
    sources: tuple[Source, ...]

    def value(self, state: AnyState, context: MoveContext) -> Tensor:
        return self._sum(context, [source.value(state, context) for source in self.sources])

    def vjp(self, state: AnyState, context: MoveContext, cotangents: Cotangents) -> Linearised:
        c = context.coefficients[self.coefficient]
        parts = [source.vjp(state, context, cotangents) for source in self.sources]

        def accumulate(cotangent: Tensor) -> None:
            for weight, (_, inner) in zip(c.unbind(0), parts, strict=True):
                if inner is not None:
                    inner(weight * cotangent)
            if c.requires_grad:
                found = torch.stack([(cotangent * value).sum() for value, _ in parts])
                cotangents.add_coefficient(context.letter, self.coefficient, found)

        return self._sum(context, [value for value, _ in parts]), accumulate

    def _sum(self, context: MoveContext, values: Sequence[Tensor]) -> Tensor:
        weights = context.coefficients[self.coefficient].unbind(0)
        total = weights[0] * values[0]
        for weight, value in zip(weights[1:], values[1:], strict=True):
            total = torch.addcmul(total, weight, value)
        return total


@dataclass(frozen=True)
class Force:
    """The force at the position, or along the strain of the box (``which``)."""

    which: int = FORCE

    def value(self, state: AnyState, context: MoveContext) -> Tensor:
        return context.forces.values(point_of(state), context.t)[self.which]

    def vjp(self, state: AnyState, context: MoveContext, cotangents: Cotangents) -> Linearised:
        linear, k = context.forces.linear(point_of(state), context.t), self.which
        return linear.values[k], lambda cotangent: cotangents.add_to_force(linear, k, cotangent)


class Differentiated(Source):
    """The base class of sources that are differentiated automatically.

    They are functions of the fields ``reads``, of the values of other ``sources`` and of
    coefficients, and read modules of the dynamics where ``reads_parameters``. Errors call them
    ``what``, of the letter of the term.
    """

    reads: tuple[str, ...]
    sources: tuple[Source, ...] = ()
    reads_parameters: ClassVar[bool] = False
    what: ClassVar[str] = "the function of term {!r}"

    @abstractmethod
    def evaluate(self, inputs: Sequence[Tensor], state: AnyState, context: MoveContext) -> Tensor:
        """Compute the value, with derivatives by fields, values of sources, and coefficients."""

    def value(self, state: AnyState, context: MoveContext) -> Tensor:
        fields = [getattr(state, name) for name in self.reads]
        values = [source.value(state, context) for source in self.sources]
        return self.evaluate([*fields, *values], state, context)

    def vjp(self, state: AnyState, context: MoveContext, cotangents: Cotangents) -> Linearised:
        fields = [getattr(state, name).detach().requires_grad_() for name in self.reads]
        parts = [source.vjp(state, context, cotangents) for source in self.sources]
        values = [x.detach().requires_grad_(inner is not None) for x, inner in parts]
        received = [(x, inner) for x, (_, inner) in zip(values, parts, strict=True) if inner]
        coefficients, wanted = as_leaves(context.coefficients)
        parameters = context.forces.parameters if self.reads_parameters else {}
        context = context._replace(coefficients=coefficients)
        with torch.enable_grad(), cotangents.collecting():
            value = self.evaluate([*fields, *values], state, context)
        if not value.requires_grad:
            return value, None
        known = [*fields, *values, *coefficients.values()]
        context.forces.refuse_unknown(value, known, self.what.format(context.letter))

        def accumulate(cotangent: Tensor) -> None:
            leaves = [*fields, *(x for x, _ in received), *(coefficients[k] for k in wanted)]
            leaves += parameters.values()
            found = iter(cotangents.pull([value], leaves, [cotangent]))
            add_each(cotangents.add, self.reads, islice(found, len(fields)))
            for (_, inner), along in zip(received, islice(found, len(received)), strict=True):
                if along is not None:
                    inner(along)
            add = partial(cotangents.add_coefficient, context.letter)
            add_each(add, wanted, islice(found, len(wanted)))
            add_each(cotangents.add_parameter, parameters, found)

        return value.detach(), accumulate


@dataclass(frozen=True)
class Function(Differentiated):
    """The value of ``function(coefficients, *fields, *values)``, differentiated automatically.

    The values are those of other sources.
    """

    function: Callable[..., Tensor]
    reads: tuple[str, ...]
    sources: tuple[Source, ...] = ()

    def evaluate(self, inputs: Sequence[Tensor], state: AnyState, context: MoveContext) -> Tensor:
        return self.function(context.coefficients, *inputs)


@dataclass(frozen=True)
class FunctionOfTime(Differentiated):
    """The value of ``function(t, like)``; ``like`` is the first field, detached, for its shape."""

    function: Callable[[Tensor, Tensor], Tensor]
    reads = ()
    reads_parameters = True

    def evaluate(self, inputs: Sequence[Tensor], state: AnyState, context: MoveContext) -> Tensor:
        return self.function(Time().value(state, context), state[0].detach())


def reads_force(x: Any) -> bool:
    """Return whether a move, or a source, reads the force."""
    return any(True for _ in forces_read(x))


def forces_read(x: Any) -> Iterator[Force]:
    """Find the forces that a move, or a source, reads."""
    if isinstance(x, Force):
        yield x
    parts = x if isinstance(x, tuple) else (getattr(x, name) for name in _parts(type(x)))
    for part in parts:
        yield from forces_read(part)


@cache
def _parts(kind: type) -> tuple[str, ...]:
    return tuple(part.name for part in fields(kind)) if is_dataclass(kind) else ()


def as_leaves(coefficients: Coefficients) -> tuple[dict[str, Tensor], list[str]]:
    """Detach coefficients into leaves, and list the names of those that require grad."""
    leaves = {name: c.detach().requires_grad_(c.requires_grad) for name, c in coefficients.items()}
    return leaves, [name for name, c in leaves.items() if c.requires_grad]


def unbroadcast(cotangent: Tensor, like: Tensor) -> Tensor:
    """Sum the cotangent of a broadcast value over the axes of the broadcast."""
    return cotangent if cotangent.shape == like.shape else cotangent.sum_to_size(like.shape)
