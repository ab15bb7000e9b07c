"""Steps in compiled loops.

A loop is many steps forward, or the way back over them with the cotangents, as one function of tensors. Its step is written
down once by running it on tensors that record their operations (the same moves and products that run otherwise, so there is
nothing to keep in agreement), and compiled by torch's Inductor, the loop around it included. Whatever may differ from run to
run is an input: the number of steps, the state, the time, coefficients, noise, every parameter and buffer of the dynamics, the
spacings of a lattice. So no number of steps, seed, value of a parameter or save time compiles again; another shape, dtype,
scheme or record does.

On the way back a turn of the loop begins where the position has just been changed: it finishes one step and begins the one
before it. All that asks for the force at one position is then in one turn, so that the force and its product with the
cotangents share their loop over pairs. What comes before the first turn and after the last is compiled with the loop.

What is no input is a constant of the compiled code. Of the dynamics' modules that is every Python number, so these are part of
what is looked up; of a record it is whatever it reads besides the state and the dynamics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from adjsim._grid import Grid
from adjsim._state import VECTOR, State, packed, unpacked
from adjsim._trajectory import TimeAverage
from adjsim.adjoints.inductor import Constant, NoCapture, Written, compile_loop, own
from adjsim.adjoints.march import March, Recorder
from adjsim.adjoints.settings import settings, weak
from adjsim.dynamics.sources import Gradients, holds_after
from adjsim.potentials.base import force

# Numbers of noise that are handed to a loop at once: four megabytes of float64.
DRAWN = 2**19
# Steps after which it is seen to that numbers are finite.
LOOK_EVERY = 1024

_compiled: WeakKeyDictionary[nn.Module, dict[Any, Compiled]] = WeakKeyDictionary()


@dataclass
class Compiled:
    """A loop as a function of tensors, the passes over the energy that it makes (around its turns, and in each), and what it
    has read without being given it."""

    function: Callable[..., Sequence[Tensor]]
    once: int = 0
    each: int = 0
    constants: list[Constant] = field(default_factory=list)


def is_compiled(dynamics: nn.Module) -> bool:
    """Whether steps of it have been compiled."""
    return dynamics in _compiled


class Loops:
    """The compiled steps of a march.

    Args:
        march: whose steps they are; it has its coefficients.
        parameters: those that a gradient is wanted by.
        recorder: whose time average is taken inside of them.
    """

    def __init__(self, march: March, parameters: Sequence[Tensor], recorder: Recorder) -> None:
        self.march, self.recorder, self.parameters = march, recorder, list(parameters)
        self.dynamics, self.program = march.problem.dynamics, march.program
        self.potential: nn.Module = self.dynamics.potential
        average = march.problem.record
        self.average = average if isinstance(average, TimeAverage) else None
        position = march.problem.state.position
        self.batch = position.shape[:-2]
        drawn = self.program.draws * position.numel()
        self.length = max(1, min(LOOK_EVERY, DRAWN // drawn)) if drawn else march.last
        moves = [move for _, move in self.program.moves]
        self.holds_after = holds_after(moves)
        # The last move of a step that writes the position.
        self.turn = max(i for i, move in enumerate(moves) if "position" in move.writes)
        self.keys = [(letter, name) for letter, group in march.coefficients.items() for name in group]
        coefficients = [march.coefficients[letter][name] for letter, name in self.keys]
        named = {
            **dict(self.dynamics.named_parameters(remove_duplicate=False)),
            **dict(self.dynamics.named_buffers(remove_duplicate=False)),
        }
        # A tensor that has several names is one input.
        self.registered = list({id(x): x for x in named.values()}.values())
        self.names = {name: next(i for i, x in enumerate(self.registered) if x is value) for name, value in named.items()}
        self.wanted = [i for i, c in enumerate(coefficients) if c.requires_grad]
        self.places = [next(i for i, x in enumerate(self.registered) if x is p) for p in self.parameters]
        self.sums = len(self.wanted) + len(self.places)
        self.grids = _grids(self.program)
        spacings = [x for grid in self.grids for x in (grid.spacing, grid._shift)]
        begin = torch.tensor(march.time(0), dtype=torch.float64, device=position.device)
        self.fixed = [begin, *(own(x) for x in (*coefficients, *self.registered, *spacings))]
        self.modules = tuple((ref(module), settings(module)) for module in self.dynamics.modules())
        self._drawn: tuple[int, int, Tensor] | None = None
        march.problem.stats.setdefault("compile_seconds", 0.0)

    def boundaries(self, watched: Iterable[int]) -> list[int]:
        """The steps at which loops have to end: those that are watched, the one before the first of a time average, and those
        at which the buffers of an exact run are looked at."""
        last = self.march.last
        extra = [last] if self.average is None else [last, self.recorder.first - 1]
        if self.march.lattice is not None:
            extra += range(0, last, self.march.growth.look_every)
        return sorted({step for step in (*watched, *extra) if 0 < step <= last})

    def walk(self, start: State, watched: Iterable[int]) -> Iterator[tuple[int, State]]:
        """Forward from a start that has entered, stopping after the steps that are watched."""
        push: Tensor | None = self._first_force(start)

        def advance(state: State, begin: int, end: int) -> State:
            nonlocal push
            state, push = self.forward(state, begin, end, push)
            return state

        regular = range(0, self.march.last, LOOK_EVERY)
        return self.march.forward(start, advance, self.boundaries([*watched, *regular]))

    def forward(self, state: State, start: int, stop: int, push: Tensor | None) -> tuple[State, Tensor | None]:
        """From the state after ``start`` steps to that after ``stop``, and the force there if the next step wants it."""
        while start < stop:
            count = min(self.length, stop - start)
            averaging, first = self._averages(start + 1), []
            if averaging:
                first.append(self._total(state) if self.recorder.total is None else self.recorder.total)
            if self.holds_after:
                assert push is not None
                first.append(self._pack(push))
            out = self._run(False, averaging, type(state), start, count, [], [*first, *map(self._pack, state)])
            if averaging:
                self.recorder.total, self.recorder.come_to = out.pop(0), start + count
            push = self._unpack(out.pop(0)) if self.holds_after else None
            state = type(state)(*map(self._unpack, out))
            start += count
        return state, push

    def backward(self, state: State, stop: int, start: int, grads: Gradients, cotangent: Tensor | None) -> State:
        """From the state after ``stop`` steps back to that after ``start``, with the cotangents taken along.

        ``cotangent`` is that of a time average.
        """
        fields = list(grads.state)
        sums = [self._sum(grads.coefficient_grads.get(self.keys[i]), self.fixed[1 + i]) for i in self.wanted]
        sums += [self._sum(g, p) for g, p in zip(grads.parameter_grads, self.parameters, strict=True)]
        cotangents = [grads.state[name] for name in fields]
        while stop > start:
            count = min(self.length, stop - start)
            averaging = self._averages(stop) and cotangent is not None
            before = [_plain(cotangent * self.recorder.weight)] if averaging and cotangent is not None else []
            carried = [*sums, *(self._pack(x) for x in (*cotangents, *state))]
            out = self._run(True, averaging, type(state), stop - count, count, before, carried)
            sums, out = out[: self.sums], [self._unpack(x) for x in out[self.sums :]]
            cotangents, state = out[: len(fields)], type(state)(*out[len(fields) :])
            stop -= count
        grads.state.update(zip(fields, cotangents, strict=True))
        grads.coefficient_grads.update({self.keys[i]: value for i, value in zip(self.wanted, sums, strict=False)})
        grads.parameter_grads = list(sums[len(self.wanted) :])
        return state

    # What is written down: a turn of a loop, and what comes before the first and after the last. They are functions of
    # what does not change in the loop (``given``: the number of steps, that of the first one, what is fixed, noise and the
    # cotangent of a time average), of the turn's number ``k`` and of what the loop carries.

    def _forward(self, averaging: bool, kind: type, made: Compiled) -> Written:
        def start(given: list[Tensor], carried: list[Tensor]) -> list[Tensor]:
            return [torch.zeros_like(given[0]), *carried]

        def more(k: Tensor, count: Tensor) -> Tensor:
            return k < count

        def turn(given: list[Tensor], k: Tensor, carried: list[Tensor]) -> list[Tensor]:
            stats, t, out = {"energy_evaluations": 0}, self._time(given, k), []
            forces = self.program.forces(stats)
            total = carried.pop(0) if averaging else None
            if self.holds_after:
                forces.know(self.potential, self._unpack(carried.pop(0)))
            state = kind(*map(self._unpack, carried))
            state = self.program.step(t, state, self._coefficients(given), self._seen(given, k), forces)
            if total is not None:
                assert self.average is not None
                out.append(own(total + self.average.function(self.march.leave(state))))
            if self.holds_after:
                out.append(self._pack(forces(self.potential, t, state.position)))
            made.each = stats["energy_evaluations"]
            return [k + 1, *out, *map(self._pack, state)]

        def finish(given: list[Tensor], carried: list[Tensor]) -> list[Tensor]:
            return carried

        return Written(start, more, turn, finish)

    def _backward(self, averaging: bool, kind: type, made: Compiled) -> Written:
        moves, fields = list(self.program.moves), self.march.problem.state._fields

        def begin(given: list[Tensor], carried: list[Tensor]) -> tuple[State, Gradients]:
            rest = [self._unpack(x) for x in carried[self.sums :]]
            parameters = [self._registered(given)[i] for i in self.places]
            grads = Gradients(dict(zip(fields, rest, strict=False)), parameters, self.program.force_grid)
            grads.coefficient_grads = {self.keys[i]: value for i, value in zip(self.wanted, carried, strict=False)}
            grads.parameter_grads = list(carried[len(self.wanted) : self.sums])
            return kind(*rest[len(fields) :]), grads

        def end(state: State, grads: Gradients) -> list[Tensor]:
            known = [*(grads.coefficient_grads[self.keys[i]] for i in self.wanted), *grads.parameter_grads]
            states = [self._pack(x) for x in (*(grads.state[name] for name in fields), *state)]
            return [*(own(x) for x in known if x is not None), *states]

        def back(over: Sequence[Any], k: Tensor, state: State, grads: Gradients, given: list[Tensor]) -> State:
            coefficients, t, seen = self._coefficients(given, self.wanted), self._time(given, k), self._seen(given, k)
            for stage, move in reversed(over):
                grads.moving(move.writes)
                state = move.retreat(state, self.program.at(t, stage, coefficients, seen, self.program.forces()), grads, None)
            return state

        def look(state: State, grads: Gradients, given: list[Tensor]) -> None:
            if averaging:
                assert self.average is not None
                self.recorder.pull_function(self.average.function, self.march.leave(state), given[-1], grads)

        def start(given: list[Tensor], carried: list[Tensor]) -> list[Tensor]:
            state, grads = begin(given, carried)
            look(state, grads, given)
            state = back(moves[self.turn :], given[0] - 1, state, grads, given)
            made.once += grads.evaluations
            return [given[0] - 1, *end(state, grads)]

        def more(k: Tensor, count: Tensor) -> Tensor:
            return k > 0

        def turn(given: list[Tensor], k: Tensor, carried: list[Tensor]) -> list[Tensor]:
            state, grads = begin(given, carried)
            state = back(moves[: self.turn], k, state, grads, given)
            look(state, grads, given)
            state = back(moves[self.turn :], k - 1, state, grads, given)
            made.each = grads.evaluations
            return [k - 1, *end(state, grads)]

        def finish(given: list[Tensor], carried: list[Tensor]) -> list[Tensor]:
            state, grads = begin(given, carried)
            state = back(moves[: self.turn], torch.zeros_like(given[0]), state, grads, given)
            grads.settle()
            made.once += grads.evaluations
            return end(state, grads)

        return Written(start, more, turn, finish)

    def _time(self, given: Sequence[Tensor], k: Tensor) -> Tensor:
        return given[2] + (given[1] + k).to(torch.float64) * self.march.solver.dt

    def _coefficients(self, given: Sequence[Tensor], wanted: Sequence[int] = ()) -> dict[str, Any]:
        found: dict[str, Any] = {stage.letter: {} for stage in self.program.stages}
        for i, (letter, name) in enumerate(self.keys):
            value = given[3 + i]
            found[letter][name] = value.detach().requires_grad_() if i in wanted else value
        return found

    def _registered(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        begin = 3 + len(self.keys)
        return given[begin : begin + len(self.registered)]

    def _seen(self, given: Sequence[Tensor], k: Tensor) -> list[Tensor] | None:
        """The noise that step number ``k`` of the loop sees."""
        if not self.program.draws:
            return None
        noise = given[2 + len(self.fixed)]
        steps = [noise.index_select(0, (k + i).reshape(1)).squeeze(0) for i in range(self.program.sees)]
        return [self._unpack(draw) for step in steps for draw in step.unbind(0)]

    @contextmanager
    def _given(self, around: Sequence[Tensor], back: bool, made: Compiled) -> Iterator[list[Tensor]]:
        """Parameters, buffers and spacings replaced by the inputs that stand for them."""
        given = list(around)
        begin = 3 + len(self.keys)
        for i in self.places if back else ():
            given[begin + i] = given[begin + i].detach().requires_grad_()
        registered = self._registered(given)
        known = [(grid.spacing, grid._shift) for grid in self.grids]
        begin += len(registered)
        try:
            for i, grid in enumerate(self.grids):
                grid.spacing, grid._shift = given[begin + 2 * i : begin + 2 * i + 2]
            named = {name: registered[i] for name, i in self.names.items()}
            with _reparametrize_module(self.dynamics, named), torch.no_grad(), NoCapture(self.registered, made.constants):
                yield given
        finally:
            for grid, (spacing, shift) in zip(self.grids, known, strict=True):
                grid.spacing, grid._shift = spacing, shift

    # Compiling and running it.

    def _run(
        self, back: bool, averaging: bool, kind: type, first: int, count: int, before: list[Tensor], carried: list[Tensor]
    ) -> list[Tensor]:
        device = self.march.problem.state.position.device
        numbers = [torch.tensor(x, device=device) for x in (count, first)]
        around = [*numbers, *self.fixed, *self._noise(first, count), *before]
        made = self._look_up(back, averaging, kind, around, carried)
        self.march.problem.stats["energy_evaluations"] += made.once + (count - 1 if back else count) * made.each
        return list(made.function(*around, *carried))

    def _look_up(self, back: bool, averaging: bool, kind: type, around: list[Tensor], carried: list[Tensor]) -> Compiled:
        solver, record = self.march.solver, weak(self.average.function) if averaging and self.average is not None else None
        shapes = tuple((x.shape, x.stride(), x.dtype, x.device) for x in (*around, *carried))
        wanted = (tuple(self.places), tuple(self.wanted)) if back else ()
        key = (back, record, repr(solver), solver.dt, kind, shapes, wanted, self.modules, torch.get_num_threads())
        known = _compiled.setdefault(self.dynamics, {})
        for constant in known[key].constants if key in known else ():
            constant.check()
        if key not in known or any(constant.changed() for constant in known[key].constants):
            begun = time.perf_counter()
            known[key] = self._compile(back, averaging, kind, around, carried)
            self.march.problem.stats["compile_seconds"] += time.perf_counter() - begun
        return known[key]

    def _compile(self, back: bool, averaging: bool, kind: type, around: list[Tensor], carried: list[Tensor]) -> Compiled:
        made = Compiled(lambda *_: ())
        written = (self._backward if back else self._forward)(averaging, kind, made)
        # Where less than a vector lies side by side, plain numbers are faster, and compile in half the time.
        short = max(self.march.problem.state.position.shape[-2], self.batch.numel()) < VECTOR
        what = f"a step of {type(self.dynamics).__name__}"
        made.function = compile_loop(written, lambda x: self._given(x, back, made), around, carried, short, what)
        return made

    # What goes in.

    def _pack(self, x: Tensor) -> Tensor:
        """A field as it lies in memory inside of a loop."""
        return own(packed(x, self.batch))

    def _unpack(self, x: Tensor) -> Tensor:
        return unpacked(x, self.batch)

    def _noise(self, first: int, count: int) -> list[Tensor]:
        """That of the steps of a loop, as many as a loop may have; or none."""
        if not self.program.draws:
            return []
        if self._drawn is not None and self._drawn[:2] == (first, count):
            return [self._drawn[2]]
        seen = count + self.program.sees - 1
        drawn = self.march.drawn(first, seen)
        drawn = packed(drawn, self.batch, leading=2)
        whole = drawn.new_empty((self.length + self.program.sees - 1, *drawn.shape[1:]))
        whole[:seen] = drawn
        # The way back begins with what the way forward ended with.
        self._drawn = (first, count, whole)
        return [whole]

    def _averages(self, step: int) -> bool:
        return self.average is not None and step >= self.recorder.first

    def _total(self, state: State) -> Tensor:
        assert self.average is not None
        with torch.no_grad():
            return torch.zeros_like(self.average.function(self.march.leave(state)), memory_format=torch.contiguous_format)

    def _first_force(self, start: State) -> Tensor:
        self.march.problem.stats["energy_evaluations"] += 1
        with torch.no_grad():
            push = force(self.potential, start.position, self.march.time(0), self.program.force_grid)
        if not bool(torch.isfinite(push).all()):
            # A compiled loop over pairs takes what is at no distance for the atom itself.
            raise FloatingPointError("the forces at the start are not finite: are two atoms in one place?")
        return push

    @staticmethod
    def _sum(known: Tensor | None, like: Tensor) -> Tensor:
        return torch.zeros_like(_plain(like)) if known is None else own(known)


def _plain(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def _grids(program: Any) -> list[Grid]:
    """The lattice spacings that the moves of a step know of."""
    found = [grid for _, move in program.moves if (grid := getattr(move, "grid", None)) is not None]
    if program.force_grid is not None:
        found.append(program.force_grid)
    return list({id(grid): grid for grid in found}.values())
