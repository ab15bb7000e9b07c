"""The backward pass in compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.adjoints.durable.saves import Saves
from adjsim.adjoints.loops.frames import frame_cotangents, received_frames
from adjsim.adjoints.loops.loop import (
    FrameCotangent,
    Loop,
    LoopConstants,
    LoopKind,
    lengthened,
    row,
)
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.loops.saved_tensors import SavedTensors
from adjsim.adjoints.sweep.history import Rewind
from adjsim.adjoints.sweep.recorder import CotangentGrowth, RecordSweep
from adjsim.compiler import LoopSpec, clone, filled, leaves, mapped
from adjsim.core.layout import packed
from adjsim.core.progress import with_progress
from adjsim.core.rows import (
    hide_rows,
    level_of_rows,
    outside_vmap,
    rows_of,
    shown,
    vmap_rows,
    where,
)
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState
from adjsim.dynamics.cotangents import Cotangents, CotangentsUnless
from adjsim.solvers.base import StepContext


class Cotangent(NamedTuple):
    """The cotangents, and the norms ``injected`` of those that outputs have given."""

    coefficients: dict[tuple[str, str], Tensor]
    parameters: dict[str, Tensor]
    fields: dict[str, Tensor]
    injected: dict[str, Tensor]


class BackwardCarry(NamedTuple):
    """The carry: the cotangent, or rows of cotangents on leading axes, and the state."""

    cotangent: Cotangent
    state: tuple[Tensor, ...]


class BackwardLoops:
    """Run the backward pass in compiled loops."""

    def __init__(self, runner: LoopRunner) -> None:
        self.runner = runner

    def sweep(
        self, saved: RecordSweep, rewind: Rewind, progress: bool, saves: Saves | None = None
    ) -> AnyState:
        """Propagate the cotangents from the last state to the start, and return the start."""
        runner = self.runner
        state, last = saved.begin(rewind.final, saves, runner.stepper)
        pairs = [pair for pair in pairwise([0, *runner.stops]) if pair[1] <= last][::-1]
        for start, stop in with_progress(pairs, "backward", len(pairs), progress):
            if not runner.records_in_loops:
                saved.accumulate(stop, runner.stepper.from_lattice(state))
            state = self._traverse(state, stop, start, saved, rewind)
            saved.growth.observe(saved.sums)
            saved.clip_after(start)
            state = rewind.restore(start, state)
            if saves is not None:
                saves.after(start, state)
        return state

    def _traverse(
        self, state: AnyState, stop: int, start: int, saved: RecordSweep, rewind: Rewind
    ) -> AnyState:
        """Propagate state and cotangents backward from ``stop`` steps to ``start`` steps."""
        runner, average, cotangents = self.runner, saved.average_cotangent, saved.sums
        received = dict[str, Tensor]()
        if runner.saves_frames:
            received = received_frames(runner, saved, rewind, state, start, stop)
        coefficients, sums = runner.fixed.coefficients, cotangents.coefficient_sums
        parameter_sums, parameters = cotangents.parameter_sums, cotangents.parameters
        given = Cotangent(
            {(a, n): _sum(sums.get((a, n)), coefficients[a][n]) for a, n in runner.wanted},
            {name: _sum(parameter_sums.get(name), p) for name, p in parameters.items()},
            {name: packed(cotangents[name], runner.batch) for name in cotangents.fields},
            dict(saved.growth.injected),
        )
        others = () if average is None else (average,)
        level, count = level_of_rows(), rows_of([*leaves(given), *received.values(), *others])
        if count:
            given = mapped(lambda x: shown(x, level, count), given)
            average = None if average is None else shown(average, level, count)
        kind = ROWS if count else BACKWARD
        carry = BackwardCarry(mapped(clone, given), runner.pack_state(state))
        while stop > start:
            # The parts of the forward run, which begin at ``start``.
            steps = (stop - start - 1) % runner.length + 1
            averaged = () if average is None or not runner.averages(stop) else (clone(average),)
            stop -= steps
            frames = frame_cotangents(runner, received, start, stop, steps, level, count)
            states = rewind.states_from(stop, runner) if runner.keeps_states else ()
            # Loops are compiled for rows of one length, and read those of their steps.
            states = tuple(lengthened(x, runner.capacity) for x in states)
            with outside_vmap():
                inputs = runner.fixed._replace(average=averaged, frames=frames, states=states)
                carry, _ = runner.run_loop(kind, stop, steps, carry, inputs)
        found = carry.cotangent
        if count:
            found = mapped(lambda x: hide_rows(x, level), found)
        for name, cotangent in found.fields.items():
            cotangents[name] = runner.unpack(cotangent)
        sums.update(found.coefficients)
        parameter_sums.update(found.parameters)
        saved.growth.injected.update(found.injected)
        return runner.unpack_state(carry.state)


class _TracedSweep:
    """The backward pass inside a trace, rebuilt from its carry."""

    def __init__(
        self, runner: LoopRunner, constants: LoopConstants, state: Any, given: Cotangent
    ) -> None:
        self.runner, self.constants, self.report = runner, constants, RunReport()
        self.state = state
        trainable = runner.reading.trainable(constants.parameters)
        fields = {name: runner.unpack(x) for name, x in given.fields.items()}
        self.sums = Cotangents(fields, trainable, given.coefficients, given.parameters)
        self.growth = CotangentGrowth(given.injected)
        self.plan = runner.plan.with_spacings(constants.spacings)
        self.forces = self.plan.forces(
            runner.dynamics.potential, parameters=trainable, report=self.report
        )

    def traverse(self, k: Tensor) -> None:
        """Run the backward pass over step number k, from the state before it if it is stored."""
        runner, constants = self.runner, self.constants
        context, before, tensors = runner.context(constants, k, self.forces), None, list[Tensor]()
        if runner.keeps_states:
            start = runner.state_before(constants, k)
            before = self.plan.intermediate_states(start, context, slice(-1))
            tensors = [row(x, k) for x in constants.states[runner.width :]]
        counted, saved = self.report.energy_evaluations, SavedTensors(tensors)
        with saved.hooks() if tensors else nullcontext():
            self.state = self.plan.backward(self.state, context, self.sums, before)
        if tensors:
            saved.finish()
            # The step is not run again, and that half of its evaluations does not count.
            self.report.energy_evaluations -= (self.report.energy_evaluations - counted) // 2

    def traverse_unless(self, absent: Tensor, part: range, k: Tensor) -> None:
        """Run the backward pass over the moves ``part`` of step number k, if there is one.

        An absent step has the noise and the times of the nearest step of the loop.
        """
        runner, constants = self.runner, self.constants
        steps, time = constants.steps, runner.time(constants, k)
        first = runner.time(constants, torch.zeros_like(steps))(0.0)
        last = runner.time(constants, steps)(0.0)
        noise = runner.noise_of(constants, k.clamp(min=0).minimum(steps - 1))
        context = StepContext(
            lambda share: time(share).maximum(first).minimum(last),
            constants.coefficients,
            noise,
            self.forces,
        )
        sums = CotangentsUnless(absent, self.sums)
        for i in reversed(part):
            before = self.plan.backward(self.state, context, sums, part=slice(i, i + 1))
            self.state = runner.state_class._make(
                new if new is old else torch.where(absent, old, new)
                for old, new in zip(self.state, before, strict=True)
            )

    def add_average(self, absent: Tensor | None) -> None:
        """Add the contribution of a time average to the cotangent of the state, if there is one."""
        if not self.constants.average:
            return
        sums = self.sums if absent is None else CotangentsUnless(absent, self.sums)
        state, before = self.runner.stepper.from_lattice(self.state), dict(self.growth.injected)
        saved = RecordSweep(self.runner.recorder, (), sums, self.forces, self.growth)
        saved.add_function(state, self.constants.average[0])
        if absent is not None:
            for name, x in before.items():
                after = self.growth.injected[name]
                self.growth.injected[name] = where(absent, x, after)

    def add_frame(self, frame: Mapping[str, FrameCotangent], absent: Tensor | None) -> None:
        """Add the cotangents of the frame that is saved after a step."""
        sums = self.sums if absent is None else CotangentsUnless(absent, self.sums)
        for name, cotangent in frame.items():
            sums.add(name, self.runner.unpack(cotangent.value))
            size = cotangent.size if absent is None else where(absent, 0.0, cotangent.size)
            self.growth.inject(name, size)

    def cotangent(self) -> Cotangent:
        runner, sums = self.runner, self.sums
        sums.complete()
        return Cotangent(
            {key: sums.coefficient_sums[key] for key in runner.wanted},
            {name: sums.parameter_sums[name] for name in sums.parameters},
            {name: packed(sums[name], runner.batch) for name in sums.fields},
            dict(self.growth.injected),
        )


def _specify(rows: bool, runner: LoopRunner, loop: Loop) -> LoopSpec[LoopConstants, BackwardCarry]:
    """Specify an iteration: step k up to its last position move, and the rest of step k - 1.

    Iteration ``steps`` has no step k, and iteration 0 no step before it. Such a part is evaluated,
    and its state and its contributions are dropped. So a loop contains its force once. Where no
    move after the last position move reads the force, and where states are stored, an iteration is
    a whole step.
    """
    late = range(runner.last_position_move + 1, len(runner.plan.moves))
    shared = not runner.keeps_states and any(runner.plan.force_reads[i] for i in late)
    early = range(runner.last_position_move + 1)

    def start(constants: LoopConstants, carry: BackwardCarry) -> tuple[Tensor, BackwardCarry]:
        return (constants.steps.clone() if shared else constants.steps - 1), carry

    def body(
        constants: LoopConstants, k: Tensor, carry: BackwardCarry
    ) -> tuple[Tensor, BackwardCarry, tuple[()]]:
        before, after = runner.unpack_state(carry.state), list[Any]()

        def traverse(
            given: Cotangent, average: tuple[Tensor, ...], frame: Mapping[str, FrameCotangent]
        ) -> Cotangent:
            sweep = _TracedSweep(runner, constants._replace(average=average), before, given)
            if shared:
                sweep.traverse_unless(k == constants.steps, early, k)
                sweep.add_average(k == 0)
                sweep.add_frame(frame, k == 0)
                sweep.traverse_unless(k == 0, late, k - 1)
            else:
                sweep.add_average(None)
                sweep.add_frame(frame, None)
                sweep.traverse(k)
            after[:] = runner.pack_state(sweep.state)
            found = sweep.cotangent()
            # With the products that the sums of the cotangent complete.
            loop.evaluations_per_step = sweep.report.energy_evaluations
            loop.fixed_evaluations = loop.evaluations_per_step if shared else 0
            return found

        step = (k - 1).clamp(min=0) if shared else k
        frame = mapped(lambda x: row(x, step), constants.frames)
        given = carry.cotangent, constants.average, frame
        found = of_rows(traverse, given) if rows else traverse(*given)
        return k - 1, BackwardCarry(mapped(clone, found), tuple(after)), ()

    return LoopSpec(start, lambda k, _: k >= 0, body, lambda steps: steps + shared)


def _sum(known: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if known is None else known


def of_rows(function: Callable[..., Any], tree: Any) -> Any:
    """Return the nested values of a function of rows on the leading axes of all tensors."""
    made: list[Any] = []

    def row(*tensors: Tensor) -> tuple[Tensor, ...]:
        made[:] = [function(*filled(tree, iter(tensors)))]
        return tuple(leaves(made[0]))

    found = vmap_rows(row, leaves(tree))
    return filled(made[0], iter(found))


BACKWARD = LoopKind(partial(_specify, False), differentiates=True, backward=True)
ROWS = LoopKind(partial(_specify, True), differentiates=True, backward=True, optional=True)
