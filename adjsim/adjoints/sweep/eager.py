"""The eager driver, which runs steps one by one in Python."""

from __future__ import annotations

from collections.abc import Sequence

from adjsim.adjoints.durable.saves import AttributeState, Saves
from adjsim.adjoints.sweep.history import Rewind
from adjsim.adjoints.sweep.recorder import RecordSweep
from adjsim.adjoints.sweep.stepper import Inputs, Stepper, naming
from adjsim.core.progress import with_progress
from adjsim.core.state import AnyState, State
from adjsim.dynamics.forces import ForceEvaluator

# Steps of a sweep after which no product is outstanding, so that the sweep can be saved there. Also
# done without a store, so that both runs sum in the same order.
SETTLE_EVERY = 256


class EagerDriver(AttributeState):
    """Runs steps one by one, in Python."""

    divisible = True
    # The first force of a run is evaluated again.
    force = None

    def __init__(self, stepper: Stepper, inputs: Inputs, forces: ForceEvaluator) -> None:
        self.stepper, self.inputs, self.forces = stepper, inputs, forces

    def stops(self, wanted: set[int]) -> Sequence[int]:
        return range(1, self.stepper.clock.last + 1)

    def advance(self, state: State, start: int, stop: int) -> tuple[State, int]:
        for step in range(start, stop):
            state = self.stepper.step(step, state, self.inputs, self.forces)
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
            if (step - 1) % SETTLE_EVERY == 0:
                cotangents.complete()
                saved.growth.observe(cotangents)
                self.forces.forget()
                if saves is not None:
                    saves.after(step - 1, state)
        return state
