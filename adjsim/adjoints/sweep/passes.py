"""The forward run that all adjoints of steps share, and the backward sweep.

Let z_k be the state after k steps, Phi the step map and lambda_k = dL/dz_k. From the last step to
the first, the backward sweep computes::

    lambda_k     = lambda_k + (cotangent of the saved data of z_k)
    z_{k-1}      = Phi^{-1}(z_k)  or  computed again from a stored state
    lambda_{k-1} = (dPhi/dz)^T lambda_k,     theta_bar += (dPhi/dtheta)^T lambda_k

move by move, so that the inverse and the product share their work. The sweep sums the cotangents
of the coefficients and returns them as cotangents of inputs; autograd propagates them to the
parameters once, at the end. The sweep needs the memory of one step and of the
:class:`~adjsim.adjoints.sweep.history.History`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from adjsim.adjoints.base import Result
from adjsim.adjoints.durable.run_end import run_end
from adjsim.adjoints.durable.saves import FORWARD, AttributeState, Saves, held_saves, name_of_sweep
from adjsim.adjoints.loops.backward import BackwardLoops
from adjsim.adjoints.loops.forward import ForwardLoops
from adjsim.adjoints.loops.frames import LoopRecording
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.history import History, Rewind, SweepStart
from adjsim.adjoints.sweep.recorder import CotangentGrowth, Recorder, Recording, RecordSweep
from adjsim.adjoints.sweep.stepper import Inputs, Stepper, naming, prepare
from adjsim.core.autocast import autocast_state, restored_autocast
from adjsim.core.box import refuse_trained_box
from adjsim.core.norms import norm
from adjsim.core.progress import with_progress
from adjsim.core.rows import are_hidden, pulled_together
from adjsim.core.run_report import RunReport
from adjsim.core.second_derivative import refuse_second_derivative
from adjsim.core.state import AnyState, State
from adjsim.core.trajectory import RunEnd
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.run import Run

# Steps of a sweep after which no product is outstanding, so that the sweep can be saved there. Also
# done without a store, so that both runs sum in the same order.
SETTLE_EVERY = 256


class EagerDriver(AttributeState):
    """Runs steps one by one, in Python, and stops after each of them only if ``each``."""

    divisible = True
    # The first force of a run is evaluated again.
    force = None

    def __init__(
        self,
        stepper: Stepper,
        inputs: Inputs,
        forces: ForceEvaluator,
        each: bool = True,
        clip: Callable[[Any, int], Any] | None = None,
    ) -> None:
        self.stepper, self.inputs, self.forces = stepper, inputs, forces
        self.each, self.clip = each, clip

    def stops(self, wanted: set[int]) -> Sequence[int]:
        last = self.stepper.clock.last
        return range(1, last + 1) if self.each else sorted({*wanted, *self.stepper.looks(last)})

    def advance(self, state: State, start: int, stop: int) -> tuple[State, int]:
        # The state is clipped before a step.
        ends = [stop] if self.clip is None else range(start + 1, stop + 1)
        for begin, end in zip([start, *ends], ends, strict=False):
            state = state if self.clip is None else self.clip(state, begin)
            state = self.stepper.steps(begin, end, state, self.inputs, self.forces)
        self.forces.count_backward(state)
        return state, stop

    def sweep(
        self, saved: RecordSweep, rewind: Rewind, progress: bool, saves: Saves | None = None
    ) -> AnyState:
        """Propagate the cotangents from the last state to the start, and return the start."""
        stepper, cotangents = self.stepper, saved.sums
        state, last = saved.begin(rewind.final, saves, stepper)
        for step in with_progress(range(last, 0, -1), "backward", last, progress):
            saved.accumulate(step, stepper.from_lattice(state))
            context = stepper.context(step - 1, self.inputs, self.forces)
            before = rewind.before(step)
            with naming(step):
                state = stepper.plan.backward(state, context, cotangents, before)
            state = rewind.restore(step - 1, state)
            saved.clip_after(step - 1)
            if (step - 1) % SETTLE_EVERY == 0:
                cotangents.complete()
                saved.growth.observe(cotangents)
                self.forces.forget()
                if saves is not None:
                    saves.after(step - 1, state)
        return state


def run_forward(
    run: Run[State],
    report: RunReport,
    stepper: Stepper,
    inputs: Inputs,
    runner: LoopRunner | None,
    history: History | None = None,
) -> Result[State]:
    """Run all steps, in compiled loops if there is a runner; the history is for a sweep."""
    budget, rows = (None, None) if history is None else (history.error_budget, history.state_rows)
    if runner is None:
        recording = Recording(Recorder(run.bound_record, stepper.clock), stepper)
        forces = stepper.plan.forces(run.dynamics.potential, report=report)
        clip = None
        if run.clip is not None and history is None and run.needs_gradient:
            clip = partial(run.clip.inserted, batch=len(run.dynamics.batch_shape(run.state)))
        # These look at the state after every step.
        each = run.progress or run.dynamics.limit is not None or budget is not None
        driver: EagerDriver | ForwardLoops = EagerDriver(stepper, inputs, forces, each, clip)
    else:
        recording = LoopRecording(runner)
        driver = ForwardLoops(runner, recording, budget, rows)
    # The history reads the growth of the same step.
    given = {"record": recording, "error_budget": budget, "history": history}
    observers = {name: x for name, x in given.items() if x is not None}
    start, visited = stepper.to_lattice(inputs.state), list(observers.values())
    last, objects = stepper.clock.last, {**observers, "driver": driver}
    where, divisible = f"after step {{}} of {last}", driver.divisible
    with held_saves(run, report, FORWARD, objects, last, where, divisible) as saves:
        final = stepper.run(start, inputs, driver, visited, run, report, saves)
    run.refuse_written()
    end = run_end(run, stepper, final, driver.force)
    return cast("Result[State]", (*recording.result(), stepper.from_lattice(final), end))


def run_swept(
    run: Run[State], report: RunReport, make_history: Callable[[Stepper], History]
) -> Result[State]:
    """Run a simulation with a constant-memory gradient, and report its cost in both directions."""
    refuse_trained_box(run.dynamics)
    stepper, inputs = prepare(run, report, run.connected())
    swept = _SweptRun(run, report, stepper, make_history(stepper), inputs)
    report.cotangent_growth = None
    outputs = _SweptFunction.apply(swept, *swept.flat(inputs))
    make, width = type(run.state)._make, len(run.state)
    first, final = outputs[:-width], make(outputs[-width:])
    return (
        (make(first), None, final, swept.end)
        if run.record is None
        else (None, first[0], final, swept.end)
    )


class _SweptRun:
    """The shared data of a forward run and its backward sweeps, written by the former alone."""

    end: RunEnd | None = None

    def __init__(
        self, run: Run[State], report: RunReport, stepper: Stepper, history: History, inputs: Inputs
    ) -> None:
        self.run, self.report, self.stepper, self.history = run, report, stepper, history
        self.width, self.kind = len(run.state), type(run.state)
        self.keys = [(letter, name) for letter, x in inputs.coefficients.items() for name in x]
        self.autocast = autocast_state()
        self.runner = None
        if run.compile:
            given = history.block_length, history.stops_at_frames
            self.runner = LoopRunner(stepper, inputs, run, report, *given)

    @property
    def one_by_one(self) -> bool:
        """Whether each row of cotangents has a sweep, as saves need."""
        return self.run.saving is not None

    def flat(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """List the tensors that autograd sees: start, coefficients and trainable parameters."""
        coefficients = (inputs.coefficients[letter][name] for letter, name in self.keys)
        trainable = self.run.reading.trainable(inputs.parameters)
        return (*inputs.state, *coefficients, *trainable.values())

    def inputs(self, flat: tuple[Tensor, ...]) -> Inputs:
        """Rebuild the inputs from which :meth:`flat` was made, with the values of the run."""
        coefficients: dict[str, dict[str, Tensor]] = {
            stage.letter: {} for stage in self.stepper.plan.stages
        }
        for (letter, name), value in zip(self.keys, flat[self.width :], strict=False):
            coefficients[letter][name] = value
        return Inputs(self.kind._make(flat[: self.width]), coefficients, self.run.tensors)

    def forward(self, flat: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states, record, final, self.end = run_forward(
            self.run, self.report, self.stepper, self.inputs(flat), self.runner, self.history
        )
        first: tuple[Any, ...] = (record,) if states is None else tuple(states)
        return (*first, *(x.clone() if any(x is y for y in flat) else x for x in final))

    def backward(
        self,
        flat: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        cotangents: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...]:
        run, stepper = self.run, self.stepper
        trainable, inputs = run.reading.trainable(run.tensors), self.inputs(flat)
        # Detached: an output with its graph and this run would keep each other alive.
        outputs = tuple(x.detach() for x in outputs)
        final, copies = self.kind._make(outputs[-self.width :]), stepper.plan.copies
        received = {
            n: torch.zeros_like(x) if c is None else c
            for n, x, c in zip(final._fields, final, cotangents[-self.width :], strict=True)
        }
        if copies is not None:
            zeros = map(torch.zeros_like, final)
            received |= dict(zip(copies.names, zeros, strict=True))
        rows = any(are_hidden(x) for x in cotangents if x is not None)
        sums = Cotangents(received, trainable, rows=rows and self.runner is None)
        potential = run.dynamics.potential
        forces = stepper.plan.forces(potential, parameters=trainable, report=self.report)
        frames = self.kind._make(outputs[: self.width]) if run.record is None else None
        rewind = self.history.rewind(SweepStart(inputs, forces, frames, final))
        if rewind.error is not None:
            self.report.reconstruction_error = rewind.error
        growth = CotangentGrowth({name: norm(x) for name, x in received.items()})
        saved = RecordSweep(
            Recorder(run.bound_record, stepper.clock),
            cotangents[: -self.width],
            sums,
            forces,
            growth,
            None if run.record is None else outputs[0],
            rewind.tolerance,
            clip=run.clip,
            batch=len(run.dynamics.batch_shape(run.state)),
        )
        driver = (
            EagerDriver(stepper, inputs, forces)
            if self.runner is None
            else BackwardLoops(self.runner)
        )
        objects = {"cotangents": sums, "record": saved, "rewind": rewind, "growth": growth}
        name = "" if run.saving is None else name_of_sweep(cotangents)
        where = "on the way back, before step {}"
        with (
            restored_autocast(self.autocast),
            held_saves(run, self.report, name, objects, 0, where) as saves,
        ):
            driver.sweep(saved, rewind, run.progress, saves)
            saved.accumulate(0, stepper.from_lattice(stepper.to_lattice(inputs.state)))
            saved.finish()
            sums.complete()
        run.refuse_written()
        self.report.cotangent_growth = growth.factor()
        if rewind.error is not None:
            # After a resume, earlier processes have restored a part of the states.
            self.report.reconstruction_error = rewind.error
        found = [sums[name] for name in final._fields]
        if copies is not None:
            # A run starts with equal copies.
            found = [x + sums[name] for x, name in zip(found, copies.names, strict=True)]
        return (
            *found,
            *(sums.coefficient_sums.get(key) for key in self.keys),
            *(sums.parameter_sums.get(name) for name in trainable),
        )


class _SweptFunction(torch.autograd.Function):
    @staticmethod
    def forward(swept: _SweptRun, *flat: Tensor) -> tuple[Tensor, ...]:
        return swept.forward(flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        swept, *flat = inputs
        ctx.swept = swept
        ctx.set_materialize_grads(False)
        # Whole frames are outputs anyway, so keeping them costs nothing more. Parameters are not
        # saved: the run has copies, and may outlive the next optimiser step.
        ctx.saved = len(swept.keys) + swept.width
        ctx.save_for_backward(*flat[: ctx.saved], *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(
            "this gradient was swept backward in constant memory",
            "Use DirectAdjoint() without compile=True.",
        )
        saved = ctx.saved_tensors
        swept, flat, outputs = ctx.swept, saved[: ctx.saved], saved[ctx.saved :]
        found = pulled_together(
            lambda *row: swept.backward(flat, outputs, row), cotangents, swept.one_by_one
        )
        wanted = zip(found, ctx.needs_input_grad[1:], strict=True)
        return (None, *(g if needed else None for g, needed in wanted))
