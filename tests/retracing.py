"""Running an exact splitting forth and back by its inverse, without gradients."""

from __future__ import annotations

from collections import deque

import torch

from adjsim._noise import Noise
from adjsim._state import State
from adjsim.adjoints.march import March
from adjsim.dynamics import Dynamics
from adjsim.solvers.base import Problem
from adjsim.solvers.splitting import Splitting


@torch.no_grad()
def forth_and_back(
    dynamics: Dynamics, start: State, solver: Splitting, steps: int, seed: int = 0
) -> tuple[State, State, State]:
    """States of the lattice, buffers included: the start, the end, and the start as it was found again."""
    times = torch.tensor([0.0, steps * solver.dt], dtype=torch.float64)
    march = March(Problem(dynamics, start, times, solver, None, {}, Noise(seed), stats={"energy_evaluations": 0}))
    march.spills = {}
    before = march.enter(start)
    ((_, after),) = deque(march.forward(before), maxlen=1)
    assert march.lattice is not None
    state, forces = after, march.program.forces()
    for step in range(steps, 0, -1):
        state = march.lattice.refill(state, march.spills.get(step, ()))
        state = march.program.inverse(march.time(step - 1), state, march.coefficients, march.noise(step - 1), forces)
    return before, after, state
