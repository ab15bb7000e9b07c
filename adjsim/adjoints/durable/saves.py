"""Saves of a run in a store, forward and backward, from which it goes on.

A save is what the next step reads: the state with its buffers, the carried force, the sums so far.
States are immutable and noise is a function of the step, so a run that goes on from a save takes
the same steps as one that was not interrupted. What grows along a run (frames, checkpoints, spills
of buffers) is written once: each save adds a file with the entries since the last one. The part
``forward`` says how many of these files count, and is replaced as a whole.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from adjsim.core.durable.interruption import Interruption
from adjsim.core.durable.manifest import Saving, check_numbers
from adjsim.core.durable.store import Nested, StoreError, moved
from adjsim.core.state import AnyState, State
from adjsim.dynamics.cotangents import Cotangents
from adjsim.solvers.base import Problem

# Seconds of compiled steps between two looks at the clock and at signals.
PAUSE = 0.25


class Saved(ABC):
    """Data of a run that its saves contain: entries that are appended, and the rest."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of entries."""

    @abstractmethod
    def entries(self, first: int) -> Nested:
        """Return the entries from number ``first`` on."""

    @abstractmethod
    def rest(self) -> Nested:
        """Return everything else that a later step needs."""

    @abstractmethod
    def resume(self, parts: Sequence[Nested], rest: Nested, step: int, state: AnyState) -> None:
        """Take over the entries of all saves, and the rest of the last one.

        Args:
            parts: the entries, save by save.
            rest: the rest.
            step, state: where the run goes on.
        """


class Resumable(ABC):
    """A driver that can go on in the middle of a run.

    Attributes:
        force: the force with which its next step begins; None where it is evaluated again.
    """

    force: Tensor | None = None

    @abstractmethod
    def carried(self) -> Nested:
        """Return what it carries from one advance to the next."""

    @abstractmethod
    def resume(self, carried: Nested, like: Tensor) -> None:
        """Take over what another driver carried, on the device of a tensor."""

    @property
    @abstractmethod
    def divisible(self) -> bool:
        """Whether it may stop anywhere without a change of what is stored."""


class _Saves:
    """The timing of saves.

    Args:
        saving: where and how often.
        interruption: signals that end the run.
        last: the number of steps of the run.
    """

    def __init__(self, saving: Saving, interruption: Interruption, last: int) -> None:
        self.saving, self.interruption, self.last = saving, interruption, last
        self.store = saving.store
        self._written = time.monotonic()

    def _due(self, done: bool) -> bool:
        late = time.monotonic() - self._written >= self.saving.every
        return late or done or self.interruption.requested

    def _finish(self, where: str) -> None:
        self._written = time.monotonic()
        if self.interruption.requested:
            self.interruption.end(
                f"interrupted {where}. Run it again with store='{self.store.folder}' to go on."
            )


class ForwardSaves(_Saves):
    """The saves of a forward run.

    Args:
        saving: where and how often.
        interruption: signals that end the run.
        last: the number of steps of the run.
        saved: what is saved besides the state, by name.
        driver: runs the steps.
        stats: the statistics of the run, whose evaluations are saved.
    """

    def __init__(
        self,
        saving: Saving,
        interruption: Interruption,
        last: int,
        saved: Mapping[str, Saved],
        driver: Resumable,
        stats: dict[str, Any],
    ) -> None:
        super().__init__(saving, interruption, last)
        self.saved, self.driver, self.stats = saved, driver, stats
        self._files, self._counts = 0, dict.fromkeys(saved, 0)
        self._pace, self._advanced = 1, (0, time.monotonic())

    def begin(self, start: State) -> tuple[State, int, int]:
        """Return the state, the step and the spilled bits from which the run goes on."""
        if not self.store.has("forward"):
            return start, 0, 0
        found = self.store.read("forward")
        step: int = found["step"]
        state = _like(start, found["state"])
        parts = [self.store.read(_file(i)) for i in range(found["files"])]
        for name, part in self.saved.items():
            part.resume([p[name] for p in parts], found["rest"][name], step, state)
            if part.count != found["counts"][name]:
                raise StoreError(
                    f"store '{self.store.folder}' has {part.count} of {found['counts'][name]} "
                    f"entries of the {name}. Remove the folder, and run again."
                )
        self.driver.resume(found["driver"], start[0])
        self.stats["energy_evaluations"] = found["energy_evaluations"]
        self.stats["resumed_at"] = step
        self._files, self._counts = found["files"], dict(found["counts"])
        self._advanced = (step, time.monotonic())
        return state, step, found["spilled"]

    def next_stop(self, step: int, stop: int) -> int:
        """Return the step up to which the driver may advance before the next look at the clock."""
        before, at = self._advanced
        now = time.monotonic()
        if step > before:
            rate = (step - before) / max(now - at, 1e-9)
            self._pace = max(1, int(min(rate * PAUSE, 2.0 * self._pace * (1 + step - before))))
        self._advanced = (step, now)
        return min(stop, step + self._pace) if self.driver.divisible else stop

    def after(self, step: int, state: AnyState, spilled: int) -> None:
        """Save the run after a step, if it is due."""
        if not self._due(step == self.last):
            return
        new = {name: part.entries(self._counts[name]) for name, part in self.saved.items()}
        counts = {name: part.count for name, part in self.saved.items()}
        if counts != self._counts:
            self.store.write(_file(self._files), new)
            self._files += 1
        self._counts = counts
        self.store.write(
            "forward",
            {
                "step": step,
                "state": list(state),
                "spilled": spilled,
                "files": self._files,
                "counts": counts,
                "rest": {name: part.rest() for name, part in self.saved.items()},
                "driver": self.driver.carried(),
                "energy_evaluations": self.stats["energy_evaluations"],
            },
        )
        self._finish(f"after step {step} of {self.last}")


class BackwardSaves(_Saves):
    """The saves of a backward sweep.

    A sweep is found by its incoming cotangents, so that two losses of one run do not mix.

    Args:
        saving: where and how often.
        interruption: signals that end the sweep.
        last: the number of steps of the run.
        cotangents: the incoming cotangents.
        stats: the statistics of the run.
    """

    def __init__(
        self,
        saving: Saving,
        interruption: Interruption,
        last: int,
        cotangents: Sequence[Tensor | None],
        stats: dict[str, Any],
    ) -> None:
        super().__init__(saving, interruption, last)
        self.stats = stats
        digest = hashlib.blake2b(digest_size=8)
        for x in cotangents:
            content = b"none" if x is None else x.detach().cpu().contiguous().numpy().tobytes()
            digest.update(hashlib.blake2b(content, digest_size=16).digest())
        self.name = f"backward-{digest.hexdigest()}"

    def begin(self, state: State, cotangents: Cotangents) -> tuple[State, int, Nested]:
        """Return the state, the step, and the rest of the sweep from which it goes on.

        The cotangents are those of the save. The rest is None at the beginning of a sweep.
        """
        if not self.store.has(self.name):
            return state, self.last, None
        found = self.store.read(self.name)
        device = state[0].device
        cotangents.resume(moved(found["cotangents"], device))
        self.stats["energy_evaluations"] = found["energy_evaluations"]
        self.stats["resumed_at"] = found["step"]
        return _like(state, found["state"]), found["step"], moved(found["rest"], device)

    def after(self, step: int, state: AnyState, cotangents: Cotangents, rest: Nested) -> None:
        """Save the sweep after it has reached a step, if it is due.

        No products of forces may be outstanding.
        """
        if not self._due(step == 0):
            return
        self.store.write(
            self.name,
            {
                "step": step,
                "state": list(state),
                "cotangents": cotangents.sums(),
                "rest": rest,
                "energy_evaluations": self.stats["energy_evaluations"],
            },
        )
        self._finish(f"on the way back, before step {step}")


@contextmanager
def forward_saves(
    problem: Problem[State], last: int, saved: Mapping[str, Saved], driver: Resumable
) -> Generator[ForwardSaves | None, None, None]:
    """Hold the store of a run of ``last`` steps while it runs forward; None without a store."""
    saving = problem.saving
    if saving is None:
        yield None
        return
    with saving.store.held(saving.manifest), Interruption() as interruption:
        check_numbers(saving.store, saving.measure)
        yield ForwardSaves(saving, interruption, last, saved, driver, problem.stats)


@contextmanager
def backward_saves(
    problem: Problem[State], last: int, cotangents: Sequence[Tensor | None]
) -> Generator[BackwardSaves | None, None, None]:
    """Hold the store of a run of ``last`` steps during a sweep; None without a store."""
    saving = problem.saving
    if saving is None:
        yield None
        return
    with saving.store.held(saving.manifest), Interruption() as interruption:
        yield BackwardSaves(saving, interruption, last, cotangents, problem.stats)


def _file(number: int) -> str:
    return f"forward-{number:06}"


def _like(state: State, fields: Sequence[Tensor]) -> State:
    return type(state)._make(x.to(y.device) for x, y in zip(fields, state, strict=True))
