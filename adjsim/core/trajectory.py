"""The result of a simulation, and observables of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic

import torch
from torch import Tensor

from adjsim.core.arguments import as_tensor, as_whole, describe_type, refuse_uncalled_class
from adjsim.core.declared import NOT_NEGATIVE
from adjsim.core.state import State, detached, in_transform
from adjsim.core.transforms import has_tangent


@dataclass(frozen=True)
class TimeAverage:
    """The time average of a function of the state, accumulated without storing the run.

    With steps of one size it is the mean of ``function`` over the ends of all steps with ``t -
    ts[0] > burn_in``, or over each ``every``-th of these steps, whose numbers from the start of the
    run ``every`` divides. (:class:`~adjsim.SDESolver` stores the states after these steps until the
    end of the run.) With :class:`~adjsim.Coupled` steps of varying size it is the integral of
    ``function`` over this time by the trapezoidal rule, divided by the length of this time, with an
    error of second order in the steps for any method. With :class:`~adjsim.ODESolver` the integral
    is an additional component of the equation, left out of the step-size control, so that the path
    does not change.

    Args:
        function: a function from the state to a tensor of a fixed shape. Of integers and bools the
            average has the dtype of the state.
        burn_in: time at the start that is left out, not negative.
        every: number of steps between two values of the function. Compiled loops stop at these
            steps, which takes up to two steps of time. The distances of 20 atoms of 284 and their
            squares took 173 % of an exact step with 1, 17 % with 10, 7 % with 20, and less than
            was resolved (2 %) with 50. For steps of one size; solvers of differential equations
            and steps of varying size take 1 only.
    """

    function: Callable[[Any], Tensor]
    burn_in: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        check_function("TimeAverage", self.function)
        object.__setattr__(self, "burn_in", NOT_NEGATIVE("burn_in", self.burn_in))
        object.__setattr__(self, "every", as_whole("every", self.every, least=1))

    @property
    def steps(self) -> str:
        """A description of the steps that it averages over."""
        return f"after {self.burn_in}" + f", every {self.every} steps" * (self.every > 1)

    def refuse_stride(self, what: str) -> None:
        """Refuse a stride where the average is over all steps."""
        if self.every > 1:
            raise TypeError(
                f"{what} averages over all steps, so TimeAverage takes no every={self.every} there."
            )


@dataclass(frozen=True)
class Final:
    """A function of the state at the end of the run.

    Args:
        function: a function from the state to a tensor whose leading axis is the replicas.
    """

    function: Callable[[Any], Tensor]

    def __post_init__(self) -> None:
        check_function("Final", self.function)


def check_function(what: str, function: Any) -> None:
    """Refuse a class, and an object that cannot be called."""
    refuse_uncalled_class(f"the function of {what}", function)
    if not callable(function):
        raise TypeError(
            f"{what} takes a function of the state, such as lambda state: state.position; got "
            f"{describe_type(function)}."
        )


def check_record(record: Any) -> None:
    """Refuse a value that ``record=`` does not take."""
    if isinstance(record, Final):
        raise TypeError(
            "record= takes a function of the state or a TimeAverage, not a Final: compute "
            "fn(trajectory.final) after the run."
        )
    if record is not None and not isinstance(record, TimeAverage):
        check_function("record=", record)


Record = Callable[[State], Tensor] | TimeAverage | None


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, from which another run can go on.

    Attributes:
        begin: the time of the first step, of a run that was continued the one of the first part.
        step: the number of steps since.
        seed, first: the seed of the noise, and the number of the first replica; None without noise.
        solver: describes the solver, for comparison.
        spacings, check_every: of an exact run, the spacings of the lattice, and the steps between
            two checks of the buffers.
        fields: fields of the last state that a state of the dynamics lacks: buffers, or the second
            copies of :class:`~adjsim.Coupled`.
        force: the forces with which the next compiled step begins.
        box: the box to which strains refer; None without strains.
    """

    begin: float
    step: int
    seed: int | None
    first: int
    solver: str
    spacings: dict[str, Tensor]
    check_every: int | None
    fields: dict[str, Tensor]
    force: tuple[Tensor, ...] | None
    box: Tensor | None = None


# What a trajectory has of its own, beside the fields of its states.
OWN = frozenset({"times", "record", "final", "stats", "end", "at"})


class Trajectory(Generic[State]):
    """The result of :func:`adjsim.simulate`.

    Attributes:
        times: ``(frames,)``, the save times, float64.
        position: ``(frames, *batch, atoms, dim)``; likewise every field of the state by its name.
            Absent if ``record=`` was given.
        record: the saved values: ``(frames, ...)`` of a function, ``(...)`` of a
            :class:`TimeAverage`, None without ``record=``.
        final: the state at the last time.
        end: the end of the run, for ``simulate(continues=)``; None if it had no fixed steps.
        stats: a dict. Every run has ``steps`` (None for adaptive steps of torchdiffeq),
            ``energy_evaluations`` (passes over the energy: a force is one, a product with its
            Jacobian is one, and backward adds its own) and ``reconstruction_error`` (None before
            backward and for adjoints that do not reconstruct, 0 where the reversal of an exact run
            was verified). With checkpoint and reversible adjoints there is ``cotangent_growth``,
            None before backward: how much the cotangents of the state grew in the sweep. Some runs
            have ``order`` (of a splitting), ``rate`` (of the coupling of reversible Runge-Kutta
            steps), ``step_times`` (of steps of varying size: the start and all ends, ``(steps +
            1,)``), ``rejected`` (the attempts that adaptive steps repeated with a smaller size),
            ``checkpoint_every`` and ``checkpoints`` (of a reversible adjoint: the smallest
            distance, or None, and the number of stored states), ``compiled_forward``,
            ``compiled_backward`` and ``compile_seconds`` (what compiled the loops, None before they
            run, and how long it took), ``compiled_source`` (the files of their C++ sources, forward
            loops first), ``resumed_at`` (the step from which a run with a store went
            on, or None), ``seed`` (of stochastic dynamics), ``pairs`` (how each pair potential
            evaluates them: "neighbour list", "all pairs", or by operations of torch, with the
            reason), ``buffer_bits`` and ``buffer_bound`` (of an exact run: the bits per step and
            degree of freedom that its buffers took, and that friction removes).

    A trajectory can be pickled, saved with ``torch.save``, loaded with ``torch.load``
    (``weights_only=True`` too, where adjsim has been imported), and deep-copied. The copy has the
    numbers but no graph: take gradients from the trajectory that :func:`adjsim.simulate` returned.
    ``copy.copy`` shares the tensors and their graph.
    """

    def __init__(
        self,
        times: Tensor,
        states: State | None,
        record: Tensor | None,
        final: State,
        stats: dict[str, Any],
        end: RunEnd | None = None,
        extension: Any = None,
    ) -> None:
        self.times, self.record, self.final, self.stats = times, record, final, stats
        self._states, self.end, self._extension = states, end, extension

    def at(self, t: Any) -> State:
        """Return the state at times within the run, between its steps too, with its gradient.

        A time of a frame gives this frame, to the last bit. Between the two ends of a step of an
        :class:`~adjsim.ODE` the state is that of Hermite's cubic interpolation, whose error is at
        most h^4 / 384 times the largest fourth derivative. Both ends must be frames, so save at
        every step. The rates at the ends are those of the parameters of the run, even if the
        parameters have changed since. The gradient also reaches t.

        Args:
            t: a time, or times of any shape, which leads the axes of the fields.

        Raises:
            ValueError: a time outside of the run; a time between frames that are more than one step
                apart; a time between steps of dynamics other than an ODE; a trajectory with a
                record, or one that was pickled or deep-copied.
        """
        if self.record is not None or self._extension is None:
            why = "has a record and no states" if self.record is not None else "is a copy"
            raise ValueError(
                f"at(t) reads the states of a run and its equation, and this trajectory {why}: "
                "call it on the trajectory that simulate returns without record=."
            )
        times = torch.as_tensor(t, dtype=torch.float64, device="cpu")
        return self._extension(times)

    def __getattr__(self, name: str) -> Tensor:
        # During unpickling there is no final state yet.
        final = self.__dict__.get("final")
        if name.startswith("_") or final is None or name not in final._fields:
            raise AttributeError(f"a trajectory of {type(final).__name__} has no '{name}'.")
        if self._states is None:
            raise AttributeError(
                f"'{name}' was not saved, since record= was given; trajectory.final.{name} is its "
                "last value."
            )
        return getattr(self._states, name)

    def __getstate__(self) -> dict[str, Any]:
        record = None if self.record is None else self.record.detach()
        states = None if self._states is None else detached(self._states)
        changed = {"record": record, "final": detached(self.final), "_states": states}
        return {**vars(self), **changed, "_extension": None}

    def __copy__(self) -> Trajectory[State]:
        states, others = self._states, (self.record, self.final, self.stats, self.end)
        return Trajectory(self.times, states, *others, self._extension)

    def __repr__(self) -> str:
        kept = "states" if self._states is not None else "record"
        saved = [*self.final, *([] if self.record is None else [self.record])]
        graph = "" if any(x.requires_grad for x in saved) else ", no gradient"
        return (
            f"Trajectory({len(self.times)} frames of {type(self.final).__name__}, {kept}, "
            f"t = {self.times[0]:g} to {self.times[-1]:g}, {self.final._fields[0]} "
            f"{tuple(self.final[0].shape)}{graph})"
        )


torch.serialization.add_safe_globals([Trajectory, RunEnd])


# The share of a step by which a save time may miss it.
ON_GRID = 1e-3


def check_times(ts: Any, either: bool = False) -> Tensor:
    """Convert save times to a float64 tensor, and check that they increase, or either way."""
    if isinstance(ts, Tensor) and (ts.requires_grad or has_tangent(ts)):
        raise ValueError(
            "ts requires grad or has a tangent, and simulate has no derivative with respect to "
            "times: pass ts.detach(), or use solve_ivp, which has one."
        )
    times = as_tensor("ts", ts).to(device="cpu", dtype=torch.float64)
    if times.ndim != 1 or len(times) < 2:
        raise ValueError(
            "ts must list the initial time and at least one save time; got shape "
            f"{tuple(times.shape)}."
        )
    numbers = _numbers(times)
    sign = -1 if either and numbers[1] < numbers[0] else 1
    before = -math.inf
    for k, t in enumerate(numbers):
        if not before < sign * t < math.inf:
            after = f" after ts[{k - 1}] = {numbers[k - 1]:g}" if k else ""
            raise ValueError(
                f"ts must be finite and {'decrease' if sign < 0 else 'increase'}; got ts[{k}] = "
                f"{t:g}{after}."
            )
        before = sign * t
    return times


def _numbers(times: Tensor) -> list[float]:
    # In a function transform a tensor has no memory from which all numbers could be read at once.
    return [float(t) for t in times] if in_transform() else times.tolist()


def step_numbers(times: Tensor, dt: float) -> list[int]:
    """Convert save times, on the grid of dt to a thousandth of a step, to step numbers."""
    values = _numbers(times)
    first = values[0]
    exact = [(t - first) / dt for t in values]
    steps = [round(x) for x in exact]
    errors = [abs(x - step) for x, step in zip(exact, steps, strict=True)]
    worst = errors.index(max(errors))
    if errors[worst] > ON_GRID:
        low = first + math.floor(exact[worst]) * dt
        raise ValueError(
            f"ts[{worst}] = {values[worst]:.12g} is not an integer number of steps of dt = "
            f"{dt:g} after ts[0]; the nearest are {low:.12g} and {low + dt:.12g}."
        )
    if any(b <= a for a, b in pairwise(steps)):
        raise ValueError(f"two save times fall on one step of dt = {dt:g}.")
    return steps


def floating(value: Tensor, state: Any) -> Tensor:
    """Convert a value of an averaged function to a floating-point dtype, that of the state."""
    if value.is_floating_point() or value.is_complex():
        return value
    return value.to(state[0].real.dtype)


def sum_dtype(value: Tensor) -> torch.dtype:
    """Choose a dtype in which sums over many steps keep their digits."""
    return torch.complex128 if value.is_complex() else torch.float64


def check_shape(value: Tensor, shape: torch.Size, when: str) -> None:
    """Refuse a value of a recorded or averaged function with another shape than before."""
    if value.shape != shape:
        raise ValueError(
            f"the record has shape {tuple(value.shape)} {when}, and had shape {tuple(shape)} "
            "before. A recorded or averaged function must keep its shape: pad the value, or reduce "
            "it to a fixed shape."
        )


def averaged_steps(burn_in: float, dt: float, last: int, every: int = 1) -> range:
    """List the steps whose ends enter a time average."""
    first = math.floor(burn_in / dt + 1e-3) + 1
    found = range(-(-first // every) * every, last + 1, every)
    if not found:
        stride = f" and every = {every} steps" if every > 1 else ""
        raise ValueError(
            f"burn_in = {burn_in:g}{stride} leaves nothing of a run of {last * dt:g} to average."
        )
    return found
