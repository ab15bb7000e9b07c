"""The driver that runs steps in compiled loops.

A loop is one function of tensors: many forward steps, or the backward pass over them with the
cotangents. Its step is traced once, by running the moves and vector-Jacobian products of an
uncompiled step on tensors that record their operations, and is compiled together with the loop
(:mod:`adjsim.adjoints.loops`). Everything that may differ from run to run is an input
(:class:`~adjsim.adjoints.loop_runner.LoopConstants`): the number of steps, the state, the time,
coefficients, noise, every parameter and buffer of the dynamics, and the spacings of a lattice. So
another number of steps, seed, parameter value or save time needs no new compilation. Another shape,
dtype, scheme or record does.

A backward iteration begins in the middle of a step, with the last move of the position. It finishes
the backward pass over one step and begins the pass over the step before. All moves that need the
force at one position are then in one iteration, so the force and its vector-Jacobian product share
one loop over pairs. The first iteration has no step to finish, and the last none to begin.

Anything not passed as an input is baked in, and is part of the key by which a loop is looked up
(:mod:`adjsim._cache_key`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim._progress import with_progress
from adjsim._state import AnyState, State, position_of
from adjsim.adjoints.error_growth import ErrorGrowth, growth_in_step
from adjsim.adjoints.history import Rewind, StoredStates
from adjsim.adjoints.loop_runner import Loop, LoopConstants, LoopRunner, MakeSpec
from adjsim.adjoints.loops import LoopSpec, clone
from adjsim.adjoints.recorder import Recording, RecordSweep, sum_dtype
from adjsim.adjoints.stepper import Inputs, Stepper
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.cotangents import Cotangents, CotangentsUnless
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.dynamics.sources import reads_force
from adjsim.solvers.base import Problem, TimeInStep


class ForwardCarry(NamedTuple):
    """The carry of forward steps.

    Attributes:
        total: the sum of a time average; empty without one.
        force: the force that the next step begins with; empty if steps do not share forces.
        growth: the growth of rounding errors; empty where it does not vary.
        margin: the smallest distances to states that the dynamics refuses; empty without such.
        state: the fields of the state.
    """

    total: tuple[Tensor, ...]
    force: tuple[Tensor, ...]
    growth: tuple[Tensor, ...]
    margin: tuple[Tensor, ...]
    state: tuple[Tensor, ...]


class BackwardCarry(NamedTuple):
    """The carry of the backward pass.

    Attributes:
        coefficients: the sums of the cotangents of coefficients.
        parameters: the sums of the cotangents of parameters.
        cotangents: the cotangents of the fields.
        state: the fields of the state.
    """

    coefficients: dict[tuple[str, str], Tensor]
    parameters: dict[str, Tensor]
    cotangents: dict[str, Tensor]
    state: tuple[Tensor, ...]


class ForwardLoops:
    """Run forward steps in compiled loops.

    A loop that shares forces between steps begins with a force that is given. An exact run
    evaluates this force again in the loop: functions such as exp may have other last bits in torch
    than in the loops that reverse the run.
    """

    def __init__(
        self,
        driver: LoopRunner,
        recording: Recording | None,
        growth: ErrorGrowth | None = None,
        stored: StoredStates | None = None,
    ) -> None:
        self.driver, self.recording, self.growth, self.stored = driver, recording, growth, stored
        # The growth in a step, as far as it is known.
        self.pace = 0.0
        self.forces = driver.program.forces(driver.dynamics.potential, stats=driver.problem.stats)
        self.force: Tensor | None = None

    def stops(self, wanted: set[int]) -> Sequence[int]:
        return self.driver.boundaries(wanted)

    def advance(self, state: State, start: int, stop: int) -> tuple[State, int]:
        driver = self.driver
        if start == 0 and driver.program.shares_force:
            with torch.no_grad():
                self.forces.force(position_of(state), driver.clock.time(0))
            # None where the force depends on a time that passes while the position stays.
            self.force = self.forces.cached(position_of(state))
        while start < stop:
            count = min(driver.length, stop - start)
            if self.growth is not None:
                return self._advance_within(self.growth, state, start, count)
            carry, rows = self._run(state, start, count)
            if _is_refused(carry) and count > 1:
                # Half of the loop is run again, down to the step that ends in a refused state.
                stop = start + count // 2
                continue
            if self.stored is not None:
                self.stored[start] = rows
            state, start = self._accept(carry, state, start, count)
        return state, start

    def _advance_within(
        self, growth: ErrorGrowth, state: State, start: int, count: int
    ) -> tuple[State, int]:
        """Run as many steps, up to ``count``, as errors may grow in; one at least.

        A loop in which they have grown by more is run again with fewer steps.
        """
        if self.pace > 0:
            count = max(1, min(count, int(growth.left / self.pace)))
        while True:
            carry, _ = self._run(state, start, count)
            found = growth.largest(carry.growth[0], count)
            self.pace = found / count
            if count == 1 or (found <= growth.left and not _is_refused(carry)):
                break
            shorter = count // 2
            if found > growth.left:
                shorter = min(shorter, int(growth.left / self.pace))
            count = max(1, shorter)
        # Half of the budget is left for the next loop.
        growth.add(carry.growth[0], count, growth.budget / 2)
        if start + count not in self.driver.stops:
            insort(self.driver.stops, start + count)
        return self._accept(carry, state, start, count)

    def _run(
        self, state: AnyState, start: int, count: int
    ) -> tuple[ForwardCarry, tuple[Tensor, ...]]:
        """Run a loop of ``count`` steps, and return the stored states too."""
        driver = self.driver
        averaged = self.recording if driver.averages(start + 1) else None
        carry = ForwardCarry(
            () if averaged is None else (clone(self._total(averaged, state)),),
            () if self.force is None else (driver.pack(self.force),),
            self._no_growth(state, start),
            self._no_margin(state, start),
            tuple(map(driver.pack, state)),
        )
        spec = FORWARD if self.stored is None else STORING
        return driver.run(spec, averaged is not None, type(state), start, count, carry)

    def _accept(
        self, carry: ForwardCarry, state: State, start: int, count: int
    ) -> tuple[State, int]:
        """Continue from the end of a loop."""
        driver, recording = self.driver, self.recording
        if carry.total:
            assert recording is not None
            recording.total, recording.last_step = carry.total[0], start + count
        self.force = driver.unpack(carry.force[0]) if carry.force else None
        return type(state)._make(map(driver.unpack, carry.state)), start + count

    @torch.no_grad()
    def _no_growth(self, state: AnyState, start: int) -> tuple[Tensor, ...]:
        if self.growth is None:
            return ()
        clock = self.driver.clock
        like = growth_in_step(self.driver.dynamics, clock.dt, clock.time(start), state)
        return (torch.zeros_like(clone(like)),)

    @torch.no_grad()
    def _no_margin(self, state: AnyState, start: int) -> tuple[Tensor, ...]:
        found = _margin(self.driver, self.driver.clock.time(start), state)
        return () if found is None else (torch.full_like(clone(found), torch.inf),)

    def _total(self, recording: Recording, state: AnyState) -> Tensor:
        """Return the sum of the time average so far."""
        if recording.total is None:
            with torch.no_grad():
                value = self.driver.recorder.value(self.driver.stepper.from_lattice(state))
            recording.add(torch.zeros_like(value), recording.last_step)
        assert recording.total is not None
        return recording.total

    @staticmethod
    def spec(
        driver: LoopRunner, averaging: bool, kind: type[AnyState], loop: Loop
    ) -> LoopSpec[LoopConstants, ForwardCarry]:
        """Specify an iteration: one step."""

        def start(constants: LoopConstants, carry: ForwardCarry) -> tuple[Tensor, ForwardCarry]:
            k = torch.zeros_like(constants.steps)
            if driver.exact and carry.force:
                stats = {"energy_evaluations": 0}
                position = position_of(kind._make(map(driver.unpack, carry.state)))
                program = driver.program.with_spacings(constants.spacings)
                forces = program.forces(driver.dynamics.potential, stats=stats)
                force = forces.force(position, driver.time(constants, k)(0.0))
                carry = carry._replace(force=(driver.pack(force),))
                loop.fixed_evaluations += stats["energy_evaluations"]
            return k, carry

        def more(k: Tensor, count: Tensor) -> Tensor:
            return k < count

        def body(
            constants: LoopConstants, k: Tensor, carry: ForwardCarry
        ) -> tuple[Tensor, ForwardCarry]:
            stats, t = {"energy_evaluations": 0}, driver.time(constants, k)
            state = kind._make(map(driver.unpack, carry.state))
            known = (position_of(state), driver.unpack(carry.force[0])) if carry.force else None
            program = driver.program.with_spacings(constants.spacings)
            forces = program.forces(driver.dynamics.potential, known=known, stats=stats)
            state = program.step(
                t, state, constants.coefficients, driver.noise_of(constants, k), forces
            )
            total = carry.total
            if averaging:
                value = driver.recorder.value(driver.stepper.from_lattice(state))
                total = (clone(total[0] + value.to(sum_dtype(value))),)
            force = (driver.pack(forces.force(position_of(state), t(1.0))),) if carry.force else ()
            loop.evaluations_per_step = stats["energy_evaluations"]
            growth = tuple(
                clone(x + growth_in_step(driver.dynamics, driver.clock.dt, t(1.0), state))
                for x in carry.growth
            )
            margin = carry.margin
            if margin and (found := _margin(driver, t(1.0), state)) is not None:
                margin = (clone(torch.minimum(margin[0], found)),)
            packed = tuple(map(driver.pack, state))
            return k + 1, ForwardCarry(total, force, growth, margin, packed)

        def finish(constants: LoopConstants, carry: ForwardCarry) -> ForwardCarry:
            return carry

        return LoopSpec(start, more, body, finish)


def _is_refused(carry: ForwardCarry) -> bool:
    return any(bool((x < 0).any()) for x in carry.margin)


def _margin(driver: LoopRunner, t: Any, state: AnyState) -> Tensor | None:
    dynamics: Dynamics[Any] = driver.dynamics
    return dynamics.margin(t, driver.stepper.from_lattice(state))


class BackwardLoops:
    """Run the backward pass in compiled loops."""

    def __init__(self, driver: LoopRunner, forces: ForceEvaluator) -> None:
        self.driver, self.forces = driver, forces

    def sweep(
        self,
        state: AnyState,
        cotangents: Cotangents,
        saved: RecordSweep,
        rewind: Rewind,
        progress: bool,
    ) -> AnyState:
        """Propagate the cotangents from the last state to the start, and return the start."""
        pairs = list(pairwise([0, *self.driver.stops]))[::-1]
        for start, stop in with_progress(pairs, "backward", len(pairs), progress):
            if self.driver.recorder.average is None:
                saved.accumulate(
                    stop, self.driver.stepper.from_lattice(state), cotangents, self.forces
                )
            state = self._traverse(state, stop, start, cotangents, saved.average_cotangent, rewind)
            state = rewind.restore(start, state)
        return state

    def _traverse(
        self,
        state: State,
        stop: int,
        start: int,
        cotangents: Cotangents,
        average: Tensor | None,
        rewind: Rewind,
    ) -> State:
        """Propagate state and cotangents backward from ``stop`` steps to ``start`` steps."""
        driver, fields = self.driver, cotangents.fields
        coefficients, sums = driver.fixed.coefficients, cotangents.coefficient_sums
        carry = BackwardCarry(
            {(a, n): _sum(sums.get((a, n)), coefficients[a][n]) for a, n in driver.wanted},
            {
                name: _sum(cotangents.parameter_sums.get(name), p)
                for name, p in cotangents.parameters.items()
            },
            {name: driver.pack(cotangents[name]) for name in fields},
            tuple(map(driver.pack, state)),
        )
        while stop > start:
            # The parts of the forward run, which begin at ``start``.
            count = (stop - start - 1) % driver.length + 1
            averaging = average is not None and driver.averages(stop)
            average_cotangents = [average] if averaging and average is not None else []
            first = stop - count
            carry, _ = driver.run(
                BACKWARD,
                averaging,
                type(state),
                first,
                count,
                carry,
                average_cotangents,
                rewind.states_from(first, driver) if driver.stored else (),
            )
            stop = first
        for name, cotangent in carry.cotangents.items():
            cotangents[name] = driver.unpack(cotangent)
        cotangents.coefficient_sums.update(carry.coefficients)
        cotangents.parameter_sums.update(carry.parameters)
        return type(state)._make(map(driver.unpack, carry.state))

    @staticmethod
    def spec(
        driver: LoopRunner, averaging: bool, kind: type[AnyState], loop: Loop
    ) -> LoopSpec[LoopConstants, BackwardCarry]:
        """Specify an iteration: step k up to its last position move, and the rest of step k - 1.

        Iteration ``steps`` has no step k, and iteration 0 no step before it. Such a part is
        evaluated, and its state and its contributions are dropped. So a loop contains its force
        once. Where no move after the last position move reads the force, and where states are
        stored, an iteration is a whole step.
        """
        moves = driver.program.moves
        late = range(driver.last_position_move + 1, len(moves))
        shared = not driver.stored and any(reads_force(moves[i][1]) for i in late)
        early = range(driver.last_position_move + 1 if shared else len(moves))

        class Sweep:
            """The backward pass inside a trace, rebuilt from its carry."""

            def __init__(self, constants: LoopConstants, carry: BackwardCarry) -> None:
                self.constants, self.stats = constants, {"energy_evaluations": 0}
                self.state = kind._make(map(driver.unpack, carry.state))
                trainable = driver.tensors.trainable(constants.parameters)
                fields = {name: driver.unpack(x) for name, x in carry.cotangents.items()}
                self.sums = Cotangents(fields, trainable, carry.coefficients, carry.parameters)
                self.program = driver.program.with_spacings(constants.spacings)
                self.forces = self.program.forces(
                    driver.dynamics.potential, parameters=trainable, stats=self.stats
                )

            def traverse(self, part: range, k: Tensor) -> None:
                """Run the backward pass over the moves ``part`` of step number k."""
                t, noise = driver.time(self.constants, k), driver.noise_of(self.constants, k)
                for i in reversed(part):
                    self.state = self._before(i, t, noise, self.sums)

            def traverse_stored(self, k: Tensor) -> None:
                """Run the backward pass over step number k, from the stored state before it."""
                t, noise = driver.time(self.constants, k), driver.noise_of(self.constants, k)
                coefficients = self.constants.coefficients
                start = driver.state_before(self.constants, k, kind)
                before = self.program.states_before(t, start, coefficients, noise, self.forces)
                self.state = self.program.backward(
                    t, self.state, coefficients, noise, self.forces, self.sums, before
                )

            def traverse_unless(self, absent: Tensor, part: range, k: Tensor) -> None:
                """Run the backward pass over the moves ``part`` of step number k, if there is one.

                An absent step has the noise and the times of the nearest step of the loop.
                """
                steps, time = self.constants.steps, driver.time(self.constants, k)
                first = driver.time(self.constants, torch.zeros_like(steps))(0.0)
                last = driver.time(self.constants, steps)(0.0)
                noise = driver.noise_of(self.constants, k.clamp(min=0).minimum(steps - 1))
                sums = CotangentsUnless(absent, self.sums)
                for i in reversed(part):
                    before = self._before(
                        i, lambda share: time(share).maximum(first).minimum(last), noise, sums
                    )
                    self.state = kind._make(
                        new if new is old else torch.where(absent, old, new)
                        for old, new in zip(self.state, before, strict=True)
                    )

            def _before(
                self,
                i: int,
                t: TimeInStep,
                noise: Sequence[Tensor] | None,
                sums: Cotangents,
            ) -> AnyState:
                """Run the backward pass over a move, and return the state before it."""
                coefficients, part = self.constants.coefficients, slice(i, i + 1)
                return self.program.backward(
                    t, self.state, coefficients, noise, self.forces, sums, None, part
                )

            def add_average(self, absent: Tensor | None) -> None:
                """Add the contribution of a time average to the cotangent of the state."""
                if averaging:
                    sums = self.sums if absent is None else CotangentsUnless(absent, self.sums)
                    state = driver.stepper.from_lattice(self.state)
                    RecordSweep(driver.recorder, (), None, 0.0).add_function(
                        state, self.constants.average[0], sums, self.forces
                    )

            def carry(self) -> BackwardCarry:
                self.sums.complete()
                return BackwardCarry(
                    {key: clone(self.sums.coefficient_sums[key]) for key in driver.wanted},
                    {name: clone(self.sums.parameter_sums[name]) for name in self.sums.parameters},
                    {name: driver.pack(self.sums[name]) for name in self.sums.fields},
                    tuple(map(driver.pack, self.state)),
                )

        def start(constants: LoopConstants, carry: BackwardCarry) -> tuple[Tensor, BackwardCarry]:
            return (constants.steps.clone() if shared else constants.steps - 1), carry

        def more(k: Tensor, count: Tensor) -> Tensor:
            return k >= 0

        def body(
            constants: LoopConstants, k: Tensor, carry: BackwardCarry
        ) -> tuple[Tensor, BackwardCarry]:
            sweep = Sweep(constants, carry)
            if shared:
                sweep.traverse_unless(k == constants.steps, early, k)
                sweep.add_average(k == 0)
                sweep.traverse_unless(k == 0, late, k - 1)
            else:
                sweep.add_average(None)
                if driver.stored:
                    sweep.traverse_stored(k)
                else:
                    sweep.traverse(early, k)
            found = sweep.carry()
            loop.evaluations_per_step = sweep.stats["energy_evaluations"]
            loop.fixed_evaluations = loop.evaluations_per_step if shared else 0
            return k - 1, found

        def finish(constants: LoopConstants, carry: BackwardCarry) -> BackwardCarry:
            return carry

        return LoopSpec(start, more, body, finish)


def _sum(known: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(clone(like)) if known is None else clone(known)


FORWARD, BACKWARD = MakeSpec(False, ForwardLoops.spec), MakeSpec(True, BackwardLoops.spec)
STORING = MakeSpec(False, ForwardLoops.spec, stores=True)


class CompiledDriver:
    """The steps of a run in compiled loops, forward and backward.

    Args:
        stepper: the steps.
        inputs: the inputs of the run.
        problem: the problem that is run.
        stored: whether the backward pass reads stored states, instead of inverting the steps.
    """

    def __init__(
        self, stepper: Stepper, inputs: Inputs, problem: Problem[State], stored: bool = False
    ) -> None:
        self.runner = LoopRunner(stepper, inputs, problem, stored)

    def forward(
        self,
        recording: Recording,
        growth: ErrorGrowth | None = None,
        stored: StoredStates | None = None,
    ) -> ForwardLoops:
        """Return forward steps.

        Args:
            recording: they add to its time average.
            growth: they add to the growth of errors; None: it is not needed.
            stored: receives the states before their steps; None: no states are stored.
        """
        return ForwardLoops(self.runner, recording, growth, stored)

    def backward(self, forces: ForceEvaluator) -> BackwardLoops:
        """Return the backward pass, with the forces of its uncompiled parts."""
        return BackwardLoops(self.runner, forces)
