"""Bit-exact reversal of an exact run, verified by fingerprints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adjsim.adjoints.base import ReconstructionError
from adjsim.adjoints.sweep.history import History, Rewind, SweepStart
from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.durable.stateful import Entries
from adjsim.core.state import AnyState, State
from adjsim.dynamics.buffer import Spill, fingerprint
from adjsim.solvers.run import Run


class Fingerprints(History):
    """The stored data of a run on a lattice, with fingerprints that verify its reversal.

    It stores the final state with its information buffers, the spills of the buffers, and
    fingerprints (128 bits) of state and buffers: at the start, at every save time, and every
    ``every`` steps. The buffers are empty at the start, so the fingerprint of the start also
    verifies that they are empty again.
    """

    def __init__(self, stepper: Stepper, every: int | None, run: Run[State]) -> None:
        super().__init__(stepper, every)
        self.run = run
        self.spills: dict[int, Sequence[Spill]] = {}
        self.fingerprints: dict[int, bytes] = {}

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        if spills:
            self.spills[step] = spills
        if step in self.stepper.clock.saves or self.is_regular(step):
            self.fingerprints[step] = fingerprint(state)
        if step == self.stepper.clock.last:
            self.store(step, state)

    def state(self) -> dict[str, Any]:
        spills = [
            [step, [list(vars(x).values()) for x in found]] for step, found in self.spills.items()
        ]
        fingerprints = Entries(list(self.fingerprints.items()))
        return {**super().state(), "spills": Entries(spills), "fingerprints": fingerprints}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.spills = {step: [Spill(*x) for x in found] for step, found in state["spills"]}
        self.fingerprints = dict(state["fingerprints"])

    def rewind(self, given: SweepStart) -> Rewind:
        return ExactInversion(self)


class ExactInversion(Rewind):
    """Earlier states of a run on a lattice, recovered by inverting its moves exactly."""

    error = 0.0

    def __init__(self, history: Fingerprints) -> None:
        self.history, last = history, history.stepper.clock.last
        super().__init__(self._before_spill(last, history.checkpoints[last]))

    def restore(self, step: int, state: AnyState) -> AnyState:
        known = self.history.fingerprints.get(step)
        if known is not None and fingerprint(state) != known:
            raise ReconstructionError(
                f"reversing an exact run did not recover the state of step {step}, so the gradient "
                f"would be wrong. {self._cause(step, state)}"
            )
        return self._before_spill(step, state)

    def _before_spill(self, step: int, state: AnyState) -> AnyState:
        lattice = self.history.stepper.plan.lattice
        assert lattice is not None
        return lattice.refill(state, self.history.spills.get(step, ()))

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
