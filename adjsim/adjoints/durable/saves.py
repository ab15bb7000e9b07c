"""Saves of a run in a store, forward and backward, from which it goes on.

A save is what the next step reads: the state with its buffers, the carried force, the sums so far.
States are immutable and noise is a function of the step, so a run that goes on from a save takes
the same steps as one that was not interrupted.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from adjsim.core.durable.interruption import Interruption
from adjsim.core.durable.manifest import Saving, check_numbers
from adjsim.core.durable.stateful import SavedStates, Stateful
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State
from adjsim.solvers.run import Run

# Seconds of compiled steps between two looks at the clock and at signals.
PAUSE = 0.25
# The name of the forward pass in a store.
FORWARD = "forward"


class AttributeState(Stateful):
    """An object whose state is some of its attributes."""

    saved_attributes: ClassVar[tuple[str, ...]] = ()

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved_attributes}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in self.saved_attributes:
            setattr(self, name, state[name])


@dataclass(eq=False)
class Saves:
    """The saves of one pass over the steps of a run, forward or backward, up to the step ``end``.

    ``objects`` are saved besides the state of the steps. ``where`` describes a step, for the line
    that ends an interrupted run. The driver of ``divisible`` steps may stop after any of them.
    """

    saving: Saving
    interruption: Interruption
    report: RunReport
    name: str
    objects: Mapping[str, Stateful]
    end: int
    where: str
    divisible: bool = False

    def __post_init__(self) -> None:
        self._states = SavedStates(self.saving.store, self.name, self.objects)
        self._written = time.monotonic()
        self._pace, self._advanced = 1, (self.end, 0.0)

    def begin(self, state: State, step: int) -> tuple[State, int, int]:
        """Return the state, step and spilled bits of the last save, or else those given."""
        found = self._states.load(state[0].device)
        if found is None:
            return state, step, 0
        # The save may be older than other sweeps of this run.
        known = self.report.energy_evaluations
        self.report.energy_evaluations = max(known, found["energy_evaluations"])
        self.report.resumed_at = found["step"]
        return type(state)._make(found["state"]), found["step"], found["spilled"]

    def after(self, step: int, state: AnyState, spilled: int = 0) -> None:
        """Save the pass at a step if it is due; in a sweep no product may be outstanding."""
        late = time.monotonic() - self._written >= self.saving.every
        if late or self.interruption.requested or step == self.end:
            about = {
                "step": step,
                "state": list(state),
                "spilled": spilled,
                "energy_evaluations": self.report.energy_evaluations,
            }
            self._states.save(about)
            self._written = time.monotonic()
            if self.interruption.requested:
                self.interruption.end(
                    f"interrupted {self.where.format(step)}. Run it again with "
                    f"store='{self.saving.store.folder}' to go on."
                )

    def next_stop(self, step: int, stop: int) -> int:
        """Return the step up to which the driver may advance before the next look at the clock."""
        now = time.monotonic()
        before, at = self._advanced
        if step > before:
            rate = (step - before) / max(now - at, 1e-9)
            self._pace = max(1, int(min(rate * PAUSE, 2.0 * self._pace * (1 + step - before))))
        self._advanced = (step, now)
        return min(stop, step + self._pace) if self.divisible else stop


@contextmanager
def held_saves(
    run: Run[State], report: RunReport, name: str, *settings: Any
) -> Generator[Saves | None, None, None]:
    """Hold the store of a run during a pass; None without one. :class:`Saves` has the settings."""
    saving = run.saving
    if saving is None:
        yield None
        return
    with saving.store.held(saving.manifest), Interruption() as interruption:
        if name == FORWARD:
            check_numbers(saving.store, saving.measure)
        yield Saves(saving, interruption, report, name, *settings)


def name_of_sweep(cotangents: Sequence[Tensor | None]) -> str:
    """Name a sweep by its incoming cotangents, so that two losses of one run do not mix."""
    digest = hashlib.blake2b(digest_size=8)
    for x in cotangents:
        content = b"none" if x is None else x.detach().cpu().contiguous().numpy().tobytes()
        digest.update(hashlib.blake2b(content, digest_size=16).digest())
    return f"backward-{digest.hexdigest()}"
