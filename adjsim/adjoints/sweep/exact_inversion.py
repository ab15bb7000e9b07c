"""Bit-exact reversal of an exact run, verified by fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from adjsim.adjoints.base import ReconstructionError
from adjsim.adjoints.sweep.history import History, Rewind, rounding_tolerance
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.durable.stateful import Entries
from adjsim.core.state import AnyState, State, detached
from adjsim.dynamics.buffer import Spill, fingerprint
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.run import Run


class Fingerprints(History):
    """The stored data of a run on a lattice, with fingerprints that verify its reversal.

    It stores the final state with its information buffers, the spills of the buffers, and
    fingerprints (128 bits) of state and buffers. There are fingerprints at the start, at every save
    time, and optionally every ``every`` steps. The buffers are empty at the start, so the
    fingerprint of the start also verifies that they are empty again.

    Args:
        stepper: the steps of the run.
        every: the number of steps between additional fingerprints; None: no additional ones.
        run: what is computed.
    """

    def __init__(self, stepper: Stepper, every: int | None, run: Run[State]) -> None:
        self.stepper, self.every, self.run = stepper, every, run
        self.spills: dict[int, Sequence[Spill]] = {}
        self.fingerprints: dict[int, bytes] = {}
        self.last: AnyState | None = None

    def stops(self, stepper: Stepper) -> Iterable[int]:
        regular = () if self.every is None else range(0, stepper.clock.last + 1, self.every)
        return {*stepper.clock.saves, *regular}

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        if spills:
            self.spills[step] = spills
        if step in self.stepper.clock.saves or (self.every is not None and step % self.every == 0):
            self.fingerprints[step] = fingerprint(state)
        if step == self.stepper.clock.last:
            self.last = detached(state)

    def state(self) -> dict[str, Any]:
        spills = [
            [step, [list(vars(x).values()) for x in found]] for step, found in self.spills.items()
        ]
        return {
            "spills": Entries(spills),
            "fingerprints": Entries(list(self.fingerprints.items())),
            "last": self.last,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.spills = {step: [Spill(*x) for x in found] for step, found in state["spills"]}
        self.fingerprints = dict(state["fingerprints"])
        self.last = None if state["last"] is None else self.stepper.state_of(state["last"])

    def rewind(
        self, inputs: Inputs, forces: ForceEvaluator, frames: AnyState | None, final: AnyState
    ) -> Rewind:
        assert self.last is not None
        return ExactInversion(self, self.last)


class ExactInversion(Rewind):
    """Earlier states of a run on a lattice, recovered by inverting its moves exactly."""

    error = 0.0

    def __init__(self, history: Fingerprints, last: AnyState) -> None:
        self.history, self.last, self.lattice = history, last, history.stepper.plan.lattice
        self.tolerance = rounding_tolerance(last[0].dtype)

    def final(self) -> AnyState:
        return self._before_spill(self.history.stepper.clock.last, self.last)

    def restore(self, step: int, state: AnyState) -> AnyState:
        if (
            step in self.history.fingerprints
            and fingerprint(state) != self.history.fingerprints[step]
        ):
            raise ReconstructionError(
                f"reversing an exact run did not recover the state of step {step}, so the gradient "
                f"would be wrong. {self._cause(step, state)}"
            )
        return self._before_spill(step, state)

    def _before_spill(self, step: int, state: AnyState) -> AnyState:
        assert self.lattice is not None
        return self.lattice.refill(state, self.history.spills.get(step, ()))

    def _cause(self, step: int, state: AnyState) -> str:
        """Say what had other bits in the backward pass, after computing the drift here twice."""
        history = self.history
        run, t = history.run, history.stepper.clock.time(step)
        here: Any = history.stepper.from_lattice(state)
        with torch.no_grad():
            drifts = [fingerprint(run.dynamics.drift(t, here)) for _ in range(2)]
        if drifts[0] != drifts[1]:
            return (
                "The force is random or comes from nondeterministic kernels: computed twice at one "
                "position it has different bits. Make it reproducible (see "
                "torch.use_deterministic_algorithms), or use CheckpointAdjoint() with exact=False."
            )
        if run.compile:
            return (
                "The force is reproducible without compile=True. So the compiled loops of both "
                "passes differ in the last bits of a result, or a value that the force reads has "
                "changed since the run. Leave compile=True out, or use CheckpointAdjoint() with "
                "exact=False."
            )
        return (
            "The force is not random, so it depends on a value that has changed since the run (a "
            "plain attribute, a mode, the number of threads). Keep the value until the backward "
            "pass, or use CheckpointAdjoint() with exact=False."
        )
