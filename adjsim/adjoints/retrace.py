"""Going back along an exact run: by the inverses, bit for bit, with the proof that it was so."""

from __future__ import annotations

from collections.abc import Iterable

from adjsim._state import State, detached
from adjsim.adjoints.base import ReconstructionError
from adjsim.adjoints.march import March
from adjsim.adjoints.sweep import Backtrack
from adjsim.dynamics.buffer import Spill, fingerprint
from adjsim.dynamics.sources import Gradients
from adjsim.solvers.base import Problem


class Retrace(Backtrack):
    """Earlier states of a run on a lattice.

    What is kept is the final state with its information buffers, what they spilled, and 128 bits of fingerprint of state and
    buffers at the start, at every save time, and every so many steps if that is asked for. The start has empty buffers, so
    its fingerprint proves them empty again.
    """

    def __init__(self, problem: Problem, every: int | None) -> None:
        self.problem, self.every = problem, every
        self.spills: dict[int, list[Spill]] = {}
        self.prints: dict[int, bytes] = {}

    def keep(self, march: March, step: int, state: State) -> None:
        march.spills = self.spills
        if step == 0 or step in march.frames or (self.every is not None and step % self.every == 0):
            self.prints[step] = fingerprint(state)
        if step == march.last:
            self.final = detached(state)

    def watches(self, march: March) -> Iterable[int]:
        return {*march.frames, *([] if self.every is None else range(0, march.last + 1, self.every))}

    def begin(self, march: March, outputs: State | None, final: State) -> State:
        self.problem.stats["reconstruction_error"] = 0.0
        self.lattice = march.lattice
        return self._before_spill(march.last, self.final)

    def moves_before(self, step: int) -> list[State] | None:
        return None

    def arrive(self, step: int, state: State, grads: Gradients) -> State:
        if step in self.prints and fingerprint(state) != self.prints[step]:
            raise ReconstructionError(
                f"retracing an exact run did not give back the state of step {step}, so the gradient would be wrong. The force "
                "at a position had other bits on the way back: it is random, depends on something that changed meanwhile (a "
                "parameter, a mode, the number of threads), or comes from kernels that are not deterministic. Make it "
                "reproducible (see torch.use_deterministic_algorithms), or use CheckpointAdjoint() with exact=False."
            )
        return self._before_spill(step, state)

    def _before_spill(self, step: int, state: State) -> State:
        assert self.lattice is not None
        return self.lattice.refill(state, self.spills.get(step, ()))
