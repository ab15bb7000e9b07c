"""The driver that runs steps in compiled loops.

A loop is one function of tensors: many forward steps, or the backward pass over them with the
cotangents. Its step is traced once, by running the moves and vector-Jacobian products of an
uncompiled step on tensors that record their operations, and is compiled together with the loop
(:mod:`adjsim.adjoints.loops.compilation`). Everything that may differ from run to run is an input
(:class:`~adjsim.adjoints.loops.runner.LoopConstants`): the number of steps, the state, the time,
coefficients, noise, every parameter and buffer of the dynamics, and the spacings of a lattice. So
another number of steps, seed, parameter value or save time needs no new compilation. Another shape,
dtype, scheme or record does.

A backward iteration begins in the middle of a step, with the last move of the position. It finishes
the backward pass over one step and begins the pass over the step before. All moves that need the
force at one position are then in one iteration, so the force and its vector-Jacobian product share
one loop over pairs. The first iteration has no step to finish, and the last none to begin.

Anything not passed as an input is baked in, and is part of the key by which a loop is looked up
(:mod:`adjsim.core.cache_key`).
"""

from __future__ import annotations

from adjsim.adjoints.loops.backward import BackwardLoops
from adjsim.adjoints.loops.forward import ForwardLoops
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.adjoints.sweep.error_growth import ErrorGrowth
from adjsim.adjoints.sweep.history import StoredStates
from adjsim.adjoints.sweep.recorder import Recording
from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.run_report import RunReport
from adjsim.core.state import State
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.run import Run


class CompiledDriver:
    """The steps of a run in compiled loops, forward and backward.

    Args:
        stepper: the steps.
        inputs: the inputs of the run.
        run: what is computed.
        report: receives what it costs.
        kept: the number of steps before which states are stored at a time; 0: the backward pass
            inverts the steps.
    """

    def __init__(
        self,
        stepper: Stepper,
        inputs: Inputs,
        run: Run[State],
        report: RunReport,
        kept: int = 0,
    ) -> None:
        self.runner = LoopRunner(stepper, inputs, run, report, kept)

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
