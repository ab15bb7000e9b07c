"""Walking a stepping solver forward, and what is kept on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from adjsim._progress import shown
from adjsim._state import State, all_finite, detached, in_transform, stack
from adjsim._trajectory import Record, TimeAverage, first_averaged_step, grid
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.sources import Coefficients, Gradients
from adjsim.solvers.base import Problem, SteppingSolver

FINITE_EVERY = 64
# Takes a state after some steps to that after more.
Advance = Callable[[State, int, int], State]


class March:
    """A run on a fixed grid: its program, coefficients, save steps; steps forward from any state."""

    def __init__(self, problem: Problem, coefficients: dict[str, Coefficients] | None = None) -> None:
        assert isinstance(problem.solver, SteppingSolver)
        self.problem, self.solver = problem, problem.solver
        self.saves = grid(problem.times, self.solver.dt)
        self.frames = frozenset(self.saves)
        self.last, self._begin = self.saves[-1], float(problem.times[0])
        self.program = self.solver.program(problem.dynamics, problem.state)
        if coefficients is None:
            coefficients = self.solver.coefficients(problem.dynamics, problem.state)
        self.lattice = self.program.lattice
        self.coefficients = coefficients if self.lattice is None else self.lattice.rationals(coefficients)
        if self.lattice is not None:
            moves = [(stage.letter, move) for stage, move in self.program.moves]
            self.growth = self.lattice.growth(self.coefficients, moves)
            problem.stats.update(buffer_bits=None, buffer_bound=self.growth.mean(problem.state))
        # What the buffers spilled, by step; None where the run is not to be retraced.
        self.spills: dict[int, list[Spill]] | None = None
        problem.stats.update(steps=self.last, order=self.program.order)
        *self._batch, atoms, dim = problem.state.position.shape
        self._replicas, self._dof = math.prod(self._batch), atoms * dim

    def time(self, step: int) -> float:
        """The time at which step number ``step`` begins, the same number however it was reached."""
        return self._begin + step * self.solver.dt

    def noise(self, step: int) -> tuple[Tensor, ...] | None:
        """What step number ``step`` sees of the noise, the same numbers whenever it is asked for."""
        if self.program.draws == 0:
            return None
        seen = [draw for k in range(step, step + self.program.sees) for draw in self.draws(k)]
        return tuple(seen)

    def draws(self, step: int) -> tuple[Tensor, ...]:
        """The noise that is drawn for step number ``step``."""
        assert self.problem.noise is not None
        draws, position = self.program.draws, self.problem.state.position
        drawn = self.problem.noise(step, (self._replicas, draws * self._dof), position)
        if draws == 1:
            return (drawn.reshape(position.shape),)
        return drawn.reshape(*self._batch, draws, *position.shape[-2:]).unbind(-3)

    def drawn(self, step: int, count: int) -> Tensor:
        """The noise that is drawn for ``count`` steps from number ``step``: ``(count, draws, *batch, atoms, dim)``."""
        assert self.problem.noise is not None
        draws, position = self.program.draws, self.problem.state.position
        rows = self.problem.noise.span(step, count, (self._replicas, draws * self._dof), position)
        return rows.reshape(count, *self._batch, draws, *position.shape[-2:]).movedim(-3, 1)

    def enter(self, state: State) -> State:
        """What the steps step: the state, or the nearest one on the lattice of an exact run, with its buffers."""
        return state if self.lattice is None else self.lattice.enter(state)

    def leave(self, state: State) -> State:
        """The state of the dynamics, of what the steps step."""
        return state if self.lattice is None else self.lattice.leave(state)

    def forward(
        self, start: State, advance: Advance | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[tuple[int, State]]:
        """(k, state after k steps) for k from 1 to the last, from a start that has entered.

        Args:
            start: the state.
            advance: takes a state from one stop to the next; None: step by step.
            stops: the steps to stop after, if not all.

        Raises:
            FloatingPointError: numbers that are no longer finite, with the step that made them.
            OverflowError: numbers that have left the lattice of an exact run, likewise.
        """
        advance = advance or self._stepper()
        state, k, good, good_step, spilled = start, 0, detached(start), 0, 0
        stops = range(1, self.last + 1) if stops is None else stops
        for stop in shown(stops, "forward", len(stops), self.problem.progress):
            state, k = advance(state, k, stop), stop
            state, entries = self._spill(k, state)
            if entries:
                spilled += sum(entry.bits for entry in entries)
                if self.spills is not None:
                    self.spills[k] = entries
            if k - good_step >= FINITE_EVERY or k == self.last:
                if not self._sound(state):
                    self._name_the_step(good, good_step, k)
                good, good_step = detached(state), k
            yield k, state
        if self.lattice is not None:
            bits = spilled + self.lattice.held(state)
            self.problem.stats["buffer_bits"] = bits / (self.last * state.position.numel()) if self.last else 0.0

    def _stepper(self) -> Advance:
        forces = self.program.forces(self.problem.stats)

        def advance(state: State, start: int, stop: int) -> State:
            for k in range(start, stop):
                state = self.program.step(self.time(k), state, self.coefficients, self.noise(k), forces)
            return state

        return advance

    def trail(self, state: State, start: int, stop: int) -> list[State]:
        """Every state before every move of steps start to stop - 1, in order."""
        forces, states = self.program.forces(self.problem.stats), []
        for k in range(start, stop):
            noise = self.noise(k)
            for stage, move in self.program.moves:
                states.append(state)
                state = move.flow(state, self.program.at(self.time(k), stage, self.coefficients, noise, forces))
                forces.moved(move.writes)
            state, _ = self._spill(k + 1, state)
        return states

    def _spill(self, step: int, state: State) -> tuple[State, list[Spill]]:
        """Relieve the buffers of an exact run where they are full: a function of the step and the state alone."""
        if self.lattice is None or step % self.growth.look_every:
            return state, []
        return self.lattice.spill(state, self.growth.limit)

    def _sound(self, state: State) -> bool:
        if in_transform():
            return True
        return all_finite(state) if self.lattice is None else self.lattice.inside(state)

    @torch.no_grad()
    def _name_the_step(self, state: State, start: int, stop: int) -> None:
        k = start
        while self._sound(state) and k < stop:
            state = self.program.step(self.time(k), state, self.coefficients, self.noise(k))
            state, _ = self._spill(k + 1, state)
            k += 1
        where = f"in step {k} (t = {self.time(k):g})"
        remedy = f"Use a smaller dt (it is {self.solver.dt:g}), or start from a configuration with smaller forces."
        if self.lattice is not None and all_finite(state):
            raise OverflowError(
                f"{self.lattice.describe(state)} {where}. {remedy} A system that spreads is run with exact=False."
            )
        raise FloatingPointError(f"the simulation left the finite numbers {where}. {remedy}")


class Recorder:
    """What a run keeps: whole states, a function of them, or its time average; and its part in the backward sweep."""

    def __init__(self, record: Record, march: March) -> None:
        self.record, self.frame = record, {step: i for i, step in enumerate(march.saves)}
        self.states: list[State] = []
        self.values: list[Tensor] = []
        # Of a time average: the sum so far, and the step it has come to.
        self.total: Tensor | None = None
        self.come_to = 0
        if isinstance(record, TimeAverage):
            self.first = first_averaged_step(record.burn_in, march.solver.dt, march.last)
            self.weight = 1.0 / (march.last - self.first + 1)

    def visit(self, step: int, state: State) -> None:
        """See the state after ``step`` steps."""
        if isinstance(self.record, TimeAverage):
            if step >= self.first and step > self.come_to:
                value = self.record.function(state)
                self.total, self.come_to = value if self.total is None else self.total + value, step
        elif step in self.frame:
            if self.record is None:
                self.states.append(state)
            else:
                self.values.append(self.record(state))

    def result(self) -> tuple[State | None, Tensor | None]:
        """Stacked states, or the record."""
        if isinstance(self.record, TimeAverage):
            assert self.total is not None
            return None, self.total * self.weight
        if self.record is None:
            return stack(self.states), None
        return None, torch.stack(self.values)

    def pull(self, step: int, state: State, cotangents: list[Tensor | None], grads: Gradients) -> None:
        """Add to the sweep what the output's cotangents say about the state after ``step`` steps."""
        if isinstance(self.record, TimeAverage):
            cotangent = cotangents[0]
            if step >= self.first and cotangent is not None:
                self.pull_function(self.record.function, state, cotangent * self.weight, grads)
        elif step in self.frame:
            if self.record is None:
                for name, cotangent in zip(state._fields, cotangents, strict=True):
                    if cotangent is not None:
                        grads.state[name] = grads.state[name] + cotangent[self.frame[step]]
            elif cotangents[0] is not None:
                self.pull_function(self.record, state, cotangents[0][self.frame[step]], grads)

    @staticmethod
    def pull_function(function: Callable[[State], Tensor], state: State, cotangent: Tensor, grads: Gradients) -> None:
        """Add what the cotangent of a function's value says about the state."""
        with torch.enable_grad():
            leaves = type(state)(*(x.detach().requires_grad_() for x in state))
            value = function(leaves)
        if not value.requires_grad:
            return
        found = torch.autograd.grad(value, (*leaves, *grads.parameters), cotangent, allow_unused=True)
        for name, grad in zip(state._fields, found, strict=False):
            if grad is not None:
                grads.state[name] = grads.state[name] + grad
        grads.add_parameters(list(found[len(state) :]))
