"""The parts of a run, and the base of stepping solvers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from adjsim.core.brownian_path import BrownianPath, PathNoise
from adjsim.core.refusal import Refusal
from adjsim.core.rounding import UNROUNDED_BOTH, Roundings
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State, all_finite, in_transform
from adjsim.core.tableaus import Tableau
from adjsim.core.trajectory import RunEnd, step_numbers
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.buffer import BufferGrowth
from adjsim.dynamics.copies import Copies
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.dynamics.lattice import Lattice
from adjsim.dynamics.moves import Move
from adjsim.dynamics.sources import Coefficients, MoveContext, reads_force
from adjsim.solvers.clock import Clock, VaryingClock, check_dt

# Maps the share of a step that has passed, from 0 to 1, to the time. The end of one step and the
# beginning of the next are the same number.
TimeInStep = Callable[[float], Any]
# The letter of a step that integrates the whole vector field.
LETTER = "Y"
# Measures the growth exponent of reversed Runge-Kutta steps of these sizes, from a state and time.
MeasureGrowth = Callable[[Dynamics[Any], Tableau, Sequence[float], Any, float], float]


@dataclass(frozen=True)
class Stage:
    """The part of a step that belongs to a letter, and begins after the share ``elapsed`` of dt."""

    letter: str
    moves: Sequence[Move]
    elapsed: float
    first_draw: int = 0
    draws: int = 0


class StepContext(NamedTuple):
    """The context of a step; ``forces`` carries its last force to the next one."""

    time: TimeInStep
    coefficients: Mapping[str, Coefficients]
    noise: Sequence[Tensor] | None
    forces: ForceEvaluator

    def of(self, stage: Stage) -> MoveContext:
        """Return the context of the moves of a stage."""
        time, coefficients, noise, forces = self
        if stage.draws:
            assert noise is not None
            noise = noise[stage.first_draw : stage.first_draw + stage.draws]
        else:
            noise = None
        return MoveContext(
            time(stage.elapsed), stage.letter, coefficients[stage.letter], noise, forces
        )


@dataclass(frozen=True)
class StepPlan:
    """A step of a scheme: its stages in order, and the scheme's order of accuracy.

    A step draws ``draws`` fields of noise, each of the shape of position, and reads those of
    ``noise_steps`` steps: its own and the following ones.
    """

    stages: Sequence[Stage]
    dt: float
    order: int
    draws: int = 0
    noise_steps: int = 1
    lattice: Lattice | None = None
    copies: Copies | None = None

    moves: tuple[tuple[Stage, Move], ...] = field(init=False)

    def __post_init__(self) -> None:
        moves = tuple((stage, move) for stage in self.stages for move in stage.moves)
        if self.lattice is not None:
            moves = tuple((stage, self.lattice.on_lattice(move)) for stage, move in moves)
        object.__setattr__(self, "moves", moves)

    def step(self, state: State, context: StepContext) -> State:
        """Run one step, as a pure function of tensors."""
        for stage, move in self.moves:
            state = move.flow(state, context.of(stage))
        return state

    def intermediate_states(
        self, state: State, context: StepContext, part: slice = slice(None)
    ) -> list[State]:
        """Run moves of one step, and return the states before each and after the last."""
        states = [state]
        for stage, move in self.moves[part]:
            states.append(move.flow(states[-1], context.of(stage)))
        return states

    def backward(
        self,
        state: State,
        context: StepContext,
        cotangents: Cotangents,
        before: Sequence[State] | None = None,
        part: slice = slice(None),
    ) -> State:
        """Reverse moves with their cotangents, by their inverses if ``before`` is not known."""
        for i in reversed(range(len(self.moves))[part]):
            stage, move = self.moves[i]
            known = None if before is None else before[i]
            state = move.backward(state, context.of(stage), cotangents, known)
        return state

    def forces(self, potential: nn.Module | None, **options: Any) -> ForceEvaluator:
        """Make an evaluator of the potential's forces, with the rounding of this plan."""
        return ForceEvaluator(
            potential,
            roundings=self.force_roundings,
            one_time_per_position=self.one_time_per_position,
            **options,
        )

    def kind(self, kind: type[Any]) -> type[Any]:
        """Return the class of the states of the steps, by that of the states of the dynamics."""
        if self.lattice is not None:
            return self.lattice.kind
        return kind if self.copies is None else self.copies.both

    @property
    def one_time_per_position(self) -> bool:
        """Whether time passes only while positions move, so that one position has one force."""
        ends = [*(stage.elapsed for stage in self.stages[1:]), 1.0]
        return all(
            abs(end - stage.elapsed) <= 1e-9
            or any("position" in move.writes for move in stage.moves)
            for stage, end in zip(self.stages, ends, strict=True)
        )

    @property
    def shares_force(self) -> bool:
        """Whether a step begins with the force with which the step before ended."""
        moving = [i for i, (_, move) in enumerate(self.moves) if "position" in move.writes]
        if not moving:
            return False
        return any(self.force_reads[: min(moving) + 1]) and any(self.force_reads[max(moving) + 1 :])

    @cached_property
    def force_reads(self) -> tuple[bool, ...]:
        """Whether each move reads the force."""
        # A letter that occurs several times has the same moves.
        known = {id(move): reads_force(move) for move in {id(m): m for _, m in self.moves}.values()}
        return tuple(known[id(move)] for _, move in self.moves)

    @property
    def force_roundings(self) -> Roundings:
        return UNROUNDED_BOTH if self.lattice is None else Roundings(**self.lattice.force_roundings)

    def with_spacings(self, spacings: Mapping[str, Tensor]) -> StepPlan:
        """Return the same step with these tensors as the spacings of its lattice."""
        lattice = self.lattice
        return self if lattice is None else replace(self, lattice=lattice.with_spacings(spacings))

    def is_valid(self, state: AnyState) -> bool:
        """Return whether a state is finite, on the lattice, and with its copies together."""
        if in_transform():
            return True
        lattice, copies = self.lattice, self.copies
        valid = all_finite(state) if lattice is None else lattice.in_range(state)
        return valid and (copies is None or copies.together(state))

    def failure(
        self,
        state: AnyState,
        good: AnyState,
        good_time: float,
        where: str,
        smaller: str,
        dynamics: Dynamics[Any],
        reason: str | None = None,
    ) -> Exception:
        """Make the error of a run that reached a state that is not valid.

        ``good`` is a valid state before it. ``where`` names the step, ``smaller`` is what to use
        where steps are too long, and ``reason`` says why numbers are not finite, if it is known.
        """
        lattice, copies = self.lattice, self.copies
        remedy = "start from a configuration with smaller forces"
        if dynamics.potential is None:
            remedy = "change the equation, whose solution may be unbounded or stiff"
        # Copies move apart over many steps. NaN and infinity come from the rates of one step.
        if copies is not None and all_finite(state) and not copies.together(state):
            return FloatingPointError(copies.describe(state, good, good_time, where, smaller))
        if lattice is not None and all_finite(state):
            return OverflowError(
                f"{lattice.describe(state)} {where}. Use {smaller}, or {remedy}. Run a system that "
                "spreads with exact=False."
            )
        why = f". Use {smaller}, or {remedy}." if reason is None else f": {reason}"
        return FloatingPointError(f"the simulation reached NaN or infinity {where}{why}")


@runtime_checkable
class ByStepSize(Protocol):
    """What depends on the size of a step, where steps differ in size."""

    def coefficients(self, h: float) -> dict[str, Coefficients]:
        """Return the coefficients of a step of size h, by letter."""
        ...

    def buffer_growth(self, plan: StepPlan, clock: VaryingClock) -> BufferGrowth | None:
        """Return how the buffers of an exact run fill; None for any other run."""
        ...


class SteppingSolver(ABC):
    """The base class of solvers that take steps, on a lattice if ``exact``."""

    exact: bool = False
    # Whether the steps solve the equation of Ito, where it differs from that of Stratonovich.
    of_ito: ClassVar[bool] = False
    dt: float

    @property
    def one_size(self) -> bool:
        """Whether all steps have one size, ``dt``."""
        return True

    def __init__(self, dt: float) -> None:
        self.dt = check_dt(dt)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dt={self.dt:g}{', exact=True' if self.exact else ''})"

    @abstractmethod
    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        """List the moves of a step without a lattice, for runs from a start at the time t."""

    def plan(
        self, dynamics: Dynamics[State], state: State, t: float, lattice: Lattice | None = None
    ) -> StepPlan:
        """List the moves of a step, for runs from a start like this one at the time t."""
        plan = self.plain_plan(dynamics, state, t)
        if not self.exact:
            return plan
        if lattice is None:
            lattice = lattice_of(plan, dynamics, state, t)
        return replace(plan, lattice=lattice)

    def coefficients(self, dynamics: Dynamics[State], state: State) -> dict[str, Coefficients]:
        """Compute each letter's coefficients, differentiable in the parameters."""
        return {LETTER: {}}

    def supports_compiling(
        self, dynamics: Dynamics[Any], state: AnyState | None = None, *, undone: bool = False
    ) -> Refusal | None:
        """Return why its steps, undone too, cannot be compiled from a start; None if they can."""
        return None

    def resolved(
        self,
        dynamics: Dynamics[State],
        state: State,
        times: Tensor,
        path: BrownianPath | None = None,
        measure: MeasureGrowth | None = None,
    ) -> SteppingSolver:
        """Return the solver with the numbers that it chooses by start, save times and path.

        ``measure`` measures a growth of perturbations by compiled steps; None: without compilation.
        """
        return self

    def clock(self, times: Tensor, end: RunEnd | None = None) -> Clock | VaryingClock:
        """Return the times of the steps of a run, which may go on from the end of another."""
        begin, before = (float(times[0]), 0) if end is None else (end.begin, end.step)
        return Clock(begin, self.dt, tuple(step_numbers(times, self.dt)), before)

    def on_path(
        self, path: BrownianPath, dynamics: Dynamics[State], state: State, t: float
    ) -> PathNoise | None:
        """Return the noise of steps from a start on a Brownian path."""
        plan = self.plain_plan(dynamics, state, t)
        if plan.draws * plan.noise_steps != 1:
            raise TypeError(
                f"a BrownianPath has one increment a step, and a step of {self!r} draws or reads "
                "more: give a seed as generator, or use a method with one draw a step."
            )
        return path.steps(t, self.dt)

    def varying(self, state: AnyState) -> ByStepSize | None:
        """Return what depends on the size of a step; None if all steps have one size."""
        return None

    def report_choices(self, report: RunReport) -> None:
        """Report what the solver has chosen before the run, and what it took to choose."""
        return

    def damping(self, dynamics: Dynamics[State], state: State) -> float:
        """Return the rate (1/time) at which rounding errors grow in reversed steps."""
        return dynamics.damping(state)

    def steps_within(self, dynamics: Dynamics[State], state: State, growth: float) -> float | None:
        """Return how many reversed steps let errors grow by exp(growth); None: they do not grow."""
        rate = self.damping(dynamics, state)
        return None if rate == 0 else growth / (rate * self.dt)

    def check(self, plan: StepPlan, dynamics: Dynamics[State], state: State, t: float) -> None:
        """Refuse, before any work, a step that is too long for the dynamics at a start."""
        return


def lattice_of(plan: StepPlan, dynamics: Dynamics[State], state: State, t: float) -> Lattice:
    """Make the lattice of an exact run."""
    moves: dict[str, tuple[Move, ...]] = {}
    for stage in plan.stages:
        moves[stage.letter] = (*moves.get(stage.letter, ()), *stage.moves)
    return Lattice(dynamics, t, state, moves, plan.dt, plan.copies)


def refuse_no_equation(solver: object, dynamics: Dynamics[Any], *, noise: bool = False) -> None:
    """Refuse dynamics that are no differential equation; with noise only if that is taken."""
    solves, name = type(solver).__name__, type(dynamics).__name__
    for letter, term in dynamics.terms.items():
        if term.no_equation is not None:
            raise TypeError(
                f"{solves} cannot take term {letter!r} of {name}: {term.no_equation.reason}. Use "
                f"{term.solved_by}."
            )
    if dynamics.stochastic and not noise:
        steps = ", EulerMaruyama(dt) or StochasticHeun(dt)"
        others = steps if dynamics.potential is None else " or a splitting"
        raise TypeError(f"{solves} has no noise, and {name} has: use SDESolver(dt=...){others}.")
