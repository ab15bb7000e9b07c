"""What a move adds or multiplies by.

A *source* is a value that depends on the state, the coefficients and the step's noise, together with a way to pull a cotangent
of that value back to them: another field (:class:`Field`), the force (:class:`ForceOf`), a coefficient
(:class:`Coefficient`), the noise (:class:`Random`), a sum of these (:class:`Combination`), or any function of fields
(:class:`Function`). The force is shared between moves as long as no position changes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from adjsim._grid import Grid
from adjsim._state import State, stored, traced
from adjsim.potentials.base import Contraction, Pullback, force, force_vjp

# Entries of small systems that wait to be contracted together: an eighth of a megabyte of float64.
STACK = 16_384

Coefficients = Mapping[str, Tensor]
# What takes the cotangent of a value on, None where nothing is to be differentiated.
Pull = Callable[[Tensor], None] | None


class Forces:
    """The force at the current position, evaluated once however many moves ask for it.

    Passes over the energy are added to ``stats["energy_evaluations"]``, if given: one for the force, one when
    backpropagation reaches it. For the grid see :meth:`adjsim.potentials.Potential.force`.
    """

    def __init__(self, stats: dict[str, Any] | None = None, grid: Grid | None = None) -> None:
        self._known: dict[int, Tensor] = {}
        self._stats, self._grid = stats, grid

    def __call__(self, potential: nn.Module, t: Any, position: Tensor) -> Tensor:
        key = id(potential)
        if key not in self._known:
            value = force(potential, position, t, self._grid)
            if self._stats is not None:
                self._count()
                if value.requires_grad:
                    value.register_hook(self._count)
            self._known[key] = value
        return self._known[key]

    def know(self, potential: nn.Module, value: Tensor) -> None:
        """Take this for the force at the current position."""
        self._known[id(potential)] = value

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

    def __init__(self, state: dict[str, Tensor], parameters: list[Tensor], grid: Grid | None = None) -> None:
        self.state = state
        self.parameters = parameters
        self._grid = grid
        self.parameter_grads: list[Tensor | None] = [None] * len(parameters)
        self.coefficient_grads: dict[tuple[str, str], Tensor] = {}
        self.evaluations = 0
        self._forces: dict[int, _PendingForce] = {}
        self._waiting: dict[Any, list[Contraction]] = {}

    def force(self, potential: nn.Module, t: Any, position: Tensor) -> _PendingForce:
        key = id(potential)
        if key not in self._forces:
            value, pullback = force_vjp(potential, position, self.parameters, t, self._grid)
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
                along, found = pending.pullback(pending.cotangent)
                self.evaluations += 1
                self.state["position"] = self.state["position"] + along
                if not self.parameters:
                    continue
                if isinstance(found, Contraction):
                    self._wait(found)
                else:
                    self.add_parameters(found)
        self._forces.clear()

    def _wait(self, found: Contraction) -> None:
        waiting = self._waiting.setdefault(found.function, [])
        waiting.append(found)
        if traced() or len(waiting) * found.x.numel() >= STACK:
            self._contract(waiting)

    def _contract(self, waiting: list[Contraction]) -> None:
        stacked = Contraction(
            waiting[0].function, torch.stack([c.weight for c in waiting]), torch.stack([c.x for c in waiting])
        )
        waiting.clear()
        self.add_parameters(stacked.gradient(self.parameters))

    def finish(self) -> None:
        """Settle everything that waits; the gradients are complete afterwards."""
        self.settle()
        for waiting in self._waiting.values():
            if waiting:
                self._contract(waiting)

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
    """A force, and the cotangent that moves give it until the position changes."""

    value: Tensor
    pullback: Pullback
    cotangent: Tensor | None = None

    def pull(self, cotangent: Tensor) -> None:
        self.cotangent = cotangent if self.cotangent is None else self.cotangent + cotangent


@dataclass(slots=True)
class At:
    """Where a move takes place: the time, its term's letter and coefficients, the noise of its stage, the forces.

    The noise is a tensor of the shape of position for each draw, or None where the term draws none.
    """

    t: Any
    letter: str
    coefficients: Coefficients
    noise: Sequence[Tensor] | None
    forces: Forces = field(default_factory=Forces)


@runtime_checkable
class Source(Protocol):
    """What a move adds or multiplies by: a value, and a way to pull a cotangent of that value back."""

    def value(self, state: State, at: At) -> Tensor: ...
    def linearise(self, state: State, at: At, grads: Gradients) -> tuple[Tensor, Pull]: ...


@dataclass(frozen=True)
class Field:
    """Another field as it is, or one link of it (an entry of its third-to-last axis)."""

    name: str
    link: int | None = None

    def value(self, state: State, at: At) -> Tensor:
        return take(getattr(state, self.name), self.link)

    def linearise(self, state: State, at: At, grads: Gradients) -> tuple[Tensor, Pull]:
        def pull(cotangent: Tensor) -> None:
            old = grads.state[self.name]
            grads.state[self.name] = insert(old, self.link, take(old, self.link) + cotangent)

        return self.value(state, at), pull


@dataclass(frozen=True)
class Random:
    """A draw of the stage's noise, standard normal, of the shape of position. Nothing is differentiated through it."""

    draw: int = 0

    def value(self, state: State, at: At) -> Tensor:
        assert at.noise is not None
        return at.noise[self.draw]

    def linearise(self, state: State, at: At, grads: Gradients) -> tuple[Tensor, Pull]:
        return self.value(state, at), None


@dataclass(frozen=True)
class Coefficient:
    """A coefficient, as it is."""

    name: str

    def value(self, state: State, at: At) -> Tensor:
        return at.coefficients[self.name]

    def linearise(self, state: State, at: At, grads: Gradients) -> tuple[Tensor, Pull]:
        value = at.coefficients[self.name]
        if not value.requires_grad:
            return value, None

        def pull(cotangent: Tensor) -> None:
            grads.add_coefficient(at.letter, self.name, reduce(cotangent, value))

        return value, pull


@dataclass(frozen=True)
class Combination:
    """``sum_k c_k source_k``, c a coefficient with one entry for each source."""

    coefficient: str
    sources: tuple[Source, ...]

    def value(self, state: State, at: At) -> Tensor:
        weights = at.coefficients[self.coefficient].unbind(0)
        total = weights[0] * self.sources[0].value(state, at)
        for weight, source in zip(weights[1:], self.sources[1:], strict=True):
            total = torch.addcmul(total, weight, source.value(state, at))
        return total

    def linearise(self, state: State, at: At, grads: Gradients) -> tuple[Tensor, Pull]:
        c = at.coefficients[self.coefficient]
        weights = c.unbind(0)
        parts = [source.linearise(state, at, grads) for source in self.sources]
        total = weights[0] * parts[0][0]
        for weight, (value, _) in zip(weights[1:], parts[1:], strict=True):
            total = torch.addcmul(total, weight, value)

        def pull(cotangent: Tensor) -> None:
            for weight, (_, inner) in zip(weights, parts, strict=True):
                if inner is not None:
                    inner(weight * cotangent)
            if c.requires_grad:
                found = torch.stack([(cotangent * value).sum() for value, _ in parts])
                grads.add_coefficient(at.letter, self.coefficient, found)

        return total, pull


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
        coefficients, wanted = cut(at.coefficients)
        with torch.enable_grad():
            value = self.function(coefficients, *fields)

        if not value.requires_grad:
            return value, None

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


def holds_after(moves: Sequence[Any]) -> bool:
    """Whether a step leaves a force behind that still holds: one used after the position was last written."""
    holds = False
    for move in moves:
        holds = (holds or _uses_force(move)) and "position" not in move.writes
    return holds


def _uses_force(move: Any) -> bool:
    return getattr(move, "potential", None) is not None or _is_force(getattr(move, "source", None))


def _is_force(source: Source | None) -> bool:
    return isinstance(source, ForceOf) or (isinstance(source, Combination) and any(map(_is_force, source.sources)))


def cut(coefficients: Coefficients) -> tuple[dict[str, Tensor], list[str]]:
    """Coefficients cut from their graph, and the names of those whose cotangent is wanted."""
    leaves = {name: c.detach().requires_grad_(c.requires_grad) for name, c in coefficients.items()}
    return leaves, [name for name, c in leaves.items() if c.requires_grad]


def reduce(cotangent: Tensor, like: Tensor) -> Tensor:
    """The cotangent of a value that was broadcast: summed over the axes it was broadcast along."""
    return cotangent if cotangent.shape == like.shape else cotangent.sum_to_size(like.shape)


def take(value: Tensor, link: int | None) -> Tensor:
    """One link of a field, or all of it."""
    return value if link is None else value.select(-3, link)


def insert(value: Tensor, link: int | None, part: Tensor) -> Tensor:
    """The field with one link, or all of it, replaced."""
    # Links read links: what is not stored would be written out again wherever it is read, and again in each of those.
    return part if link is None else stored(torch.select_scatter(value, part, -3, link))
