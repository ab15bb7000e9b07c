"""The backward sweep that checkpoint and reversible adjoints share.

With state z_k after k steps, step map Phi and cotangent lambda_k = dL/dz_k, going from the last step to the first::

    lambda_k     = lambda_k + (what the outputs say of z_k)
    z_{k-1}      = Phi^{-1}(z_k)  or  replayed from a stored state
    lambda_{k-1} = (dPhi/dz)^T lambda_k,     theta_bar += (dPhi/dtheta)^T lambda_k

move by move, so that the inverse and the product share their work. The coefficients' cotangents add up on the way and are
returned as those of inputs; autograd takes them to the parameters once, at the end. Memory is that of one step, plus
whatever :class:`Backtrack` keeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from adjsim._progress import shown
from adjsim._state import State
from adjsim._trajectory import TimeAverage
from adjsim.adjoints.base import Result, refuse_graph
from adjsim.adjoints.compiled import Loops
from adjsim.adjoints.march import March, Recorder
from adjsim.dynamics.sources import Gradients
from adjsim.solvers.base import Problem


class Backtrack(ABC):
    """Where earlier states come from. One object serves one run; it may be asked to go back more than once."""

    @abstractmethod
    def keep(self, march: March, step: int, state: State) -> None:
        """See the state after ``step`` steps on the way forward, and keep it or not."""

    def watches(self, march: March) -> Iterable[int]:
        """The steps that it keeps states of or arrives at with something to do, besides those that are saved."""
        return range(march.last + 1)

    @abstractmethod
    def begin(self, march: March, outputs: State | None, final: State) -> State:
        """The final state, from which the sweep starts. ``outputs`` are saved frames, time leading."""

    @abstractmethod
    def moves_before(self, step: int) -> list[State] | None:
        """The states before each move of the step that ends at ``step``, or None to invert."""

    @abstractmethod
    def arrive(self, step: int, state: State, grads: Gradients) -> State:
        """Having gone back to ``step``: the state to go on with."""


def run_swept(problem: Problem, backtrack: Backtrack) -> Result:
    """Run a problem with a constant-memory gradient, its earlier states supplied by ``backtrack``."""
    march = March(problem)
    recorder = Recorder(problem.record, march)
    keys = [(letter, name) for letter, group in march.coefficients.items() for name in group]
    inputs = [*problem.state, *(march.coefficients[a][n] for a, n in keys), *problem.parameters.values()]
    loops = Loops(march, list(problem.parameters.values()), recorder) if problem.compile else None
    plan = _Plan(problem, march, recorder, backtrack, keys, loops)
    outputs = _Swept.apply(plan, *inputs)
    width = len(problem.state)
    final = type(problem.state)(*outputs[-width:])
    if problem.record is None:
        return type(problem.state)(*outputs[:width]), None, final
    return None, outputs[0], final


class _Plan:
    """What one run's forward and backward share besides tensors."""

    def __init__(
        self,
        problem: Problem,
        march: March,
        recorder: Recorder,
        backtrack: Backtrack,
        keys: list[tuple[str, str]],
        loops: Loops | None,
    ) -> None:
        self.problem, self.march, self.recorder, self.backtrack, self.keys = problem, march, recorder, backtrack, keys
        self.loops = loops
        # The tensors live in autograd's care; a reference here would keep their graph alive.
        march.coefficients = {}
        self.width = len(problem.state)
        self.kind = type(problem.state)

    def unpack(self, inputs: tuple[Tensor, ...]) -> tuple[State, list[Tensor]]:
        """The start and the parameters; sets the coefficients of the march."""
        state = self.kind(*inputs[: self.width])
        middle = self.width + len(self.keys)
        coefficients: dict[str, dict[str, Tensor]] = {stage.letter: {} for stage in self.march.program.stages}
        for (letter, name), value in zip(self.keys, inputs[self.width : middle], strict=True):
            coefficients[letter][name] = value
        self.march.coefficients = coefficients  # type: ignore[assignment]
        return state, list(inputs[middle:])

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        march = self.march
        state = start = march.enter(self.unpack(inputs)[0])
        self.recorder.visit(0, march.leave(start))
        self.backtrack.keep(march, 0, start)
        steps = march.forward(start) if self.loops is None else self.loops.walk(start, self.backtrack.watches(march))
        for step, state in steps:
            self.recorder.visit(step, march.leave(state))
            self.backtrack.keep(march, step, state)
        state = march.leave(state)
        states, record = self.recorder.result()
        self.recorder.states.clear()
        self.recorder.values.clear()
        first: tuple[Any, ...] = tuple(states) if states is not None else (record,)
        return (*first, *(x.clone() if any(x is y for y in inputs) else x for x in state))

    def backward(
        self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        start, parameters = self.unpack(inputs)
        # Detached: an output that kept its graph would hold this run, and this run it, for ever.
        outputs = tuple(x.detach() for x in outputs)
        final = self.kind(*outputs[-self.width :])
        frames = self.kind(*outputs[: self.width]) if self.problem.record is None else None
        last = cotangents[-self.width :]
        grads = Gradients(
            {n: torch.zeros_like(x) if c is None else c for n, x, c in zip(final._fields, final, last, strict=True)},
            parameters,
            self.march.program.force_grid,
        )
        saved = list(cotangents[: -self.width])
        march, state = self.march, self.backtrack.begin(self.march, frames, final)
        if self.loops is None:
            self._back(state, grads, saved)
        else:
            self._back_in_loops(state, grads, saved)
        grads.finish()
        self.recorder.pull(0, march.leave(march.enter(start)), saved, grads)
        self.problem.stats["energy_evaluations"] += grads.evaluations
        found = [grads.state[name] for name in final._fields]
        return (*found, *(grads.coefficient_grads.get(key) for key in self.keys), *grads.parameter_grads)

    def _back(self, state: State, grads: Gradients, saved: list[Tensor | None]) -> None:
        march = self.march
        moves, forces = march.program.moves, march.program.forces()
        for step in shown(range(march.last, 0, -1), "backward", march.last, self.problem.progress):
            self.recorder.pull(step, march.leave(state), saved, grads)
            before, noise = self.backtrack.moves_before(step), march.noise(step - 1)
            for i in range(len(moves) - 1, -1, -1):
                stage, move = moves[i]
                grads.moving(move.writes)
                at = march.program.at(march.time(step - 1), stage, march.coefficients, noise, forces)
                state = move.retreat(state, at, grads, None if before is None else before[i])
            state = self.backtrack.arrive(step - 1, state, grads)

    def _back_in_loops(self, state: State, grads: Gradients, saved: list[Tensor | None]) -> None:
        assert self.loops is not None
        march, average = self.march, isinstance(self.problem.record, TimeAverage)
        stops = [0, *self.loops.boundaries(self.backtrack.watches(march))]
        pairs = list(pairwise(stops))[::-1]
        for start, stop in shown(pairs, "backward", len(pairs), self.problem.progress):
            if not average:
                self.recorder.pull(stop, march.leave(state), saved, grads)
            state = self.loops.backward(state, stop, start, grads, saved[0] if average else None)
            state = self.backtrack.arrive(start, state, grads)


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(plan: _Plan, *inputs: Tensor) -> tuple[Tensor, ...]:
        return plan.forward(inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plan, *tensors = inputs
        ctx.plan, ctx.count = plan, len(tensors)
        ctx.set_materialize_grads(False)
        # Whole frames are outputs anyway; keeping them costs nothing more.
        ctx.save_for_backward(*tensors, *output)
        plan.march.coefficients = {}

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_graph()
        saved = ctx.saved_tensors
        inputs, outputs = saved[: ctx.count], saved[ctx.count :]
        found = ctx.plan.backward(inputs, outputs, cotangents)
        ctx.plan.march.coefficients = {}
        return (None, *(g if wanted else None for g, wanted in zip(found, ctx.needs_input_grad[1:], strict=True)))
