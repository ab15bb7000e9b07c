"""Backpropagation through the solver."""

from __future__ import annotations

from adjsim.adjoints.base import Adjoint, Result
from adjsim.adjoints.compiled import Loops
from adjsim.adjoints.march import March, Recorder
from adjsim.solvers.base import Problem
from adjsim.solvers.continuous import ContinuousSolver


class DirectAdjoint(Adjoint):
    """Backpropagation through every operation of the solver (BPTT, discretise then optimise).

    The gradient is exact for the discrete steps, to rounding, and may itself be differentiated. Every step's
    intermediate tensors stay in memory until backward, which grows in proportion to the number of steps: the naive way,
    and the reference that the others are checked against. For more than some hundred steps use
    :class:`ReversibleAdjoint` or :class:`CheckpointAdjoint`, which give the same numbers.
    """

    def check(self, problem: Problem) -> None:
        if isinstance(problem.solver, ContinuousSolver):
            problem.solver.check(problem, None)

    def run(self, problem: Problem) -> Result:
        if isinstance(problem.solver, ContinuousSolver):
            return problem.solver.solve(problem, None)
        march = March(problem)
        recorder = Recorder(problem.record, march)
        state = start = march.enter(problem.state)
        recorder.visit(0, march.leave(start))
        steps = march.forward(start)
        if problem.compile:
            steps = Loops(march, [], recorder).walk(start, march.frames)
        for step, state in steps:
            recorder.visit(step, march.leave(state))
        states, record = recorder.result()
        return states, record, march.leave(state)
