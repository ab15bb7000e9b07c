"""What a run is made of, and solvers whose steps are lists of moves that the adjoints walk forward and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from adjsim._grid import Grid
from adjsim._inputs import as_number
from adjsim._noise import Noise
from adjsim._state import State
from adjsim._trajectory import Record
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.couplings import Move
from adjsim.dynamics.lattice import Lattice
from adjsim.dynamics.sources import At, Coefficients, Forces


@dataclass(frozen=True)
class Stage:
    """One letter's turn in a step.

    ``elapsed`` is the share of dt that has passed when it begins; its draws are ``noise[first_draw : first_draw + draws]``.
    """

    letter: str
    moves: Sequence[Move]
    elapsed: float
    first_draw: int = 0
    draws: int = 0


@dataclass(frozen=True)
class Program:
    """A step of a scheme: stages carried out one after the other, and the scheme's order of accuracy.

    A step draws ``draws`` fields of noise, each of the shape of position, and sees those of ``sees`` steps: its own and the
    next ones. On a lattice it steps the lattice's states, which have information buffers besides.
    """

    stages: Sequence[Stage]
    dt: float
    order: int
    draws: int = 0
    sees: int = 1
    lattice: Lattice | None = None

    moves: tuple[tuple[Stage, Move], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "moves", tuple((stage, move) for stage in self.stages for move in stage.moves))

    def step(
        self,
        t: Any,
        state: State,
        coefficients: dict[str, Coefficients],
        noise: Sequence[Tensor] | None,
        forces: Forces | None = None,
    ) -> State:
        """The state a step later: a pure function of its tensors. ``forces`` carries the last force between steps."""
        forces = self.forces() if forces is None else forces
        for stage, move in self.moves:
            state = move.flow(state, self.at(t, stage, coefficients, noise, forces))
            forces.moved(move.writes)
        return state

    def inverse(
        self,
        t: Any,
        state: State,
        coefficients: dict[str, Coefficients],
        noise: Sequence[Tensor] | None,
        forces: Forces | None = None,
    ) -> State:
        """The state a step earlier; t is the time at which the step began."""
        forces = self.forces() if forces is None else forces
        for stage, move in reversed(self.moves):
            forces.moved(move.writes)
            state = move.inverse(state, self.at(t, stage, coefficients, noise, forces))
        return state

    def forces(self, stats: dict[str, Any] | None = None) -> Forces:
        """An empty store of forces, as this program wants them rounded."""
        return Forces(stats, self.force_grid)

    @property
    def force_grid(self) -> Grid | None:
        return None if self.lattice is None else self.lattice.force_grid

    def at(
        self, t: Any, stage: Stage, coefficients: dict[str, Coefficients], noise: Sequence[Tensor] | None, forces: Forces
    ) -> At:
        drawn = None
        if stage.draws:
            assert noise is not None
            drawn = noise[stage.first_draw : stage.first_draw + stage.draws]
        return At(t + stage.elapsed * self.dt, stage.letter, coefficients[stage.letter], drawn, forces)


@dataclass
class Problem:
    """Everything about one run, validated: what an adjoint is given."""

    dynamics: Dynamics
    state: State
    times: Tensor
    solver: Any
    record: Record
    parameters: dict[str, Tensor]
    noise: Noise | None = None
    progress: bool = False
    compile: bool = False
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


def check_dt(dt: Any) -> float:
    step = as_number("dt", dt)
    if not 0 < step < float("inf"):
        raise ValueError(f"dt must be a positive time; got {dt}.")
    return step
