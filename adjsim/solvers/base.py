"""The two kinds of solver.

A :class:`SteppingSolver` takes steps of its own fixed size, each a list of moves; the adjoints walk them forward and back.
A :class:`ContinuousSolver` hands the summed drift (and diffusion) to a library and owns both ways of differentiating it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from adjsim._state import State
from adjsim._trajectory import Record
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.couplings import At, Coefficients, Forces, Move


@dataclass(frozen=True)
class Stage:
    """One letter's turn in a step: its moves, and the share of dt that has passed when it begins."""

    letter: str
    moves: Sequence[Move]
    elapsed: float


@dataclass(frozen=True)
class Program:
    """A step of a scheme: stages carried out one after the other, and the scheme's order of accuracy."""

    stages: Sequence[Stage]
    dt: float
    order: int

    def moves(self) -> list[tuple[Stage, Move]]:
        return [(stage, move) for stage in self.stages for move in stage.moves]

    def step(
        self, t: Any, state: State, coefficients: dict[str, Coefficients], noise: Any, forces: Forces | None = None
    ) -> State:
        """The state a step later: a pure function of its tensors. ``forces`` carries the last force between steps."""
        forces = Forces() if forces is None else forces
        for stage, move in self.moves():
            state = move.flow(state, self.at(t, stage, coefficients, noise, forces))
            forces.moved(move.writes)
        return state

    def inverse(
        self, t: Any, state: State, coefficients: dict[str, Coefficients], noise: Any, forces: Forces | None = None
    ) -> State:
        """The state a step earlier; t is the time at which the step began."""
        forces = Forces() if forces is None else forces
        for stage, move in reversed(self.moves()):
            forces.moved(move.writes)
            state = move.inverse(state, self.at(t, stage, coefficients, noise, forces))
        return state

    def at(self, t: Any, stage: Stage, coefficients: dict[str, Coefficients], noise: Any, forces: Forces) -> At:
        return At(t + stage.elapsed * self.dt, stage.letter, coefficients[stage.letter], noise, forces)


@dataclass
class Problem:
    """Everything about one run, validated: what an adjoint is given."""

    dynamics: Dynamics
    state: State
    times: Tensor
    solver: SteppingSolver | ContinuousSolver
    record: Record
    parameters: dict[str, Tensor]
    progress: bool = False
    stats: dict[str, Any] = field(default_factory=dict)


class SteppingSolver(ABC):
    """Steps of a fixed size dt."""

    dt: float

    @abstractmethod
    def program(self, dynamics: Dynamics, state: State) -> Program:
        """The moves of a step, for states like this one."""

    @abstractmethod
    def coefficients(self, dynamics: Dynamics, state: State) -> dict[str, Coefficients]:
        """Each letter's coefficients, differentiable in the parameters."""


class ContinuousSolver(ABC):
    """Another library's solver for the summed drift and diffusion."""

    @abstractmethod
    def solve(self, problem: Problem, backsolve: dict[str, Any] | None) -> tuple[State | None, Tensor | None, State]:
        """Frames, record and final state; ``backsolve`` holds the options of the continuous adjoint, None for none."""


def check_dt(dt: float) -> float:
    if not 0 < float(dt) < float("inf"):
        raise ValueError(f"dt must be a positive time; got {dt}.")
    return float(dt)
