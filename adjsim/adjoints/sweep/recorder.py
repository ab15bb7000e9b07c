"""The saved frames or record of a run, and their cotangents in the backward sweep."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.base import ReconstructionError
from adjsim.adjoints.durable.saves import AttributeState, Saves
from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.durable.stateful import Entries
from adjsim.core.norms import norm
from adjsim.core.rows import shown_rows
from adjsim.core.state import AnyState, State
from adjsim.core.trajectory import Record, TimeAverage, check_shape, floating, sum_dtype
from adjsim.core.writes import version_of
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.clip import Clip
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.clock import Clock, VaryingClock

# The growth above which a sweep warns: half of the digits of float64 are lost in such a path.
LARGEST_GROWTH = 1e8


class Recorder:
    """The definition of the data that a run saves: states, a function of them, or its time average.

    Attributes:
        function: the function that is saved or averaged; None: states are saved.
        average: the time average, if the record is one; else None.
        frames: from the number of a step to the number of the frame that is saved after it.
        counted: the steps whose ends count for the time average.
        in_loops: whether compiled loops average, since every step counts; they stop at the steps of
            a stride.
        weight: the weight of one step in the time average, 1 for steps of varying size.
        weights: of steps of varying size, the weights of the states after each number of steps.
    """

    def __init__(self, record: Record[Any], clock: Clock | VaryingClock) -> None:
        self.average = record if isinstance(record, TimeAverage) else None
        self.function = record.function if isinstance(record, TimeAverage) else record
        self.frames = {step: i for i, step in enumerate(clock.saves)}
        self.counted, self.weight, self.weights = range(0), 1.0, None
        self.in_loops = self.average is not None and self.average.every == 1
        if self.average is not None and isinstance(clock, VaryingClock):
            self.average.refuse_stride("a run of steps of varying size")
            self.weights = clock.average_weights(self.average.burn_in)
            self.counted = range(int(self.weights.nonzero()[0][0]), clock.last + 1)
        elif self.average is not None:
            assert isinstance(clock, Clock)
            self.counted = clock.averaged(self.average)
            self.weight = 1.0 / len(self.counted)

    def value(self, state: AnyState) -> Tensor:
        """Evaluate the function on a state of the dynamics."""
        assert self.function is not None
        versions = list(map(version_of, state))
        value = self.function(state)
        if self.average is not None:
            value = floating(value, state)
        if list(map(version_of, state)) != versions:
            raise ValueError(
                "the record writes into the state that it is given, which would change the run. "
                "Use clone() in the record."
            )
        return value

    def value_at_leaves(self, state: State) -> tuple[State, Tensor]:
        """Return leaves that stand for a state, and the value of the function there."""
        with torch.enable_grad():
            leaves = type(state)._make(x.detach().requires_grad_() for x in state)
            return leaves, self.value(leaves)

    def summand(self, value: Tensor, step: int) -> Tensor:
        """Return the term of the time average's sum from the value after a step."""
        value = value.to(sum_dtype(value))
        return value if self.weights is None else value * float(self.weights[step])


class Recording(AttributeState):
    """An observer of the states of one run, which saves frames or values."""

    saved_attributes = ("frames", "total", "dtype", "last_step")

    def __init__(self, recorder: Recorder, stepper: Stepper) -> None:
        self.recorder, self.stepper = recorder, stepper
        # The fields of the saved states, or the values of the record.
        self.frames: list[Sequence[Tensor]] = []
        # For a time average: the sum so far in double precision, the dtype of its terms, and the
        # last step in the sum.
        self.total: Tensor | None = None
        self.dtype: torch.dtype | None = None
        self.last_step = -1

    def stops(self, stepper: Stepper) -> Iterable[int]:
        average = self.recorder.average
        return stepper.clock.saves if average is None else self.recorder.counted

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        recorder = self.recorder
        if recorder.average is not None:
            if step in recorder.counted and step > self.last_step:
                self.add(recorder.value(self.stepper.from_lattice(state)), step)
        elif step in recorder.frames:
            state = self.stepper.from_lattice(state)
            if recorder.function is None:
                self.frames.append(tuple(state))
            else:
                value = recorder.value(state)
                if self.frames:
                    check_shape(value, self.frames[0][0].shape, f"after step {step}")
                self.frames.append((value,))

    def add(self, value: Tensor, step: int) -> None:
        """Add the value after a step to the time average."""
        if self.total is not None:
            check_shape(value, self.total.shape, f"after step {step}")
        self.dtype, value = value.dtype, self.recorder.summand(value, step)
        self.total, self.last_step = value if self.total is None else self.total + value, step

    def state(self) -> dict[str, Any]:
        return {**super().state(), "frames": Entries(self.frames, stacked=True)}

    def result(self) -> tuple[AnyState | None, Tensor | None]:
        """Return the stacked states, or the record."""
        if self.recorder.average is not None:
            assert self.total is not None
            return None, (self.total * self.recorder.weight).to(self.dtype)
        stacks = (torch.stack(list(x)) for x in zip(*self.frames, strict=True))
        if self.recorder.function is None:
            return self.stepper.kind._make(stacks), None
        return None, next(stacks)


class CotangentGrowth(AttributeState):
    """The growth of the cotangents of a state in one backward sweep.

    Let ``c_i`` be the cotangents that the outputs have given to a field so far: those of the final
    state, of saved frames, and of a recorded function. Without growth the cotangent lambda of the
    field is no larger than the sum of their norms. The growth is the largest
    ``|lambda| / sum_i |c_i|`` of the sweep, for the field in which this ratio is smallest. Fields
    to which the outputs give nothing do not count. So units do not matter, and neither do the
    number of outputs or the length of a time average. Of several rows of cotangents the one that
    grows most counts. ``injected`` has the norms of the cotangents that the fields begin with.
    """

    saved_attributes = ("injected", "largest")

    def __init__(self, injected: Mapping[str, Tensor]) -> None:
        self.injected = dict(injected)
        self.largest = {name: torch.zeros_like(shown_rows(x)) for name, x in injected.items()}

    def inject(self, name: str, size: Tensor) -> None:
        """Add the norm of a cotangent that an output gives to a field."""
        self.injected[name] = self.injected[name] + size

    def observe(self, cotangents: Cotangents) -> None:
        """Compare the cotangents of the fields with those that outputs have given to them."""
        for name, injected in self.injected.items():
            size, found = shown_rows(injected), shown_rows(norm(cotangents[name]))
            ratio = torch.where(size > 0, found / size, 0.0)
            self.largest[name] = torch.fmax(ratio, self.largest[name])

    def factor(self) -> float:
        """Return the growth, and warn if it is large."""
        sizes = torch.stack(torch.broadcast_tensors(*map(shown_rows, self.injected.values())))
        least = torch.stack(torch.broadcast_tensors(*self.largest.values()))
        least = torch.where(sizes > 0, least, torch.inf).amin(0)
        growth = float(torch.where((sizes > 0).any(0), least, 0.0).amax())
        if growth > LARGEST_GROWTH:
            warnings.warn(
                f"the cotangents of the state grew by a factor of {growth:.1e} in the backward "
                "sweep. The gradient is that of one path, which diverges from its neighbours, and "
                "says little about means over paths. Run for a shorter time, or estimate the "
                "gradient of a mean: see docs/choosing_an_estimator.",
                stacklevel=2,
            )
        return growth


@dataclass(eq=False)
class RecordSweep(AttributeState):
    """The contributions of the saved frames or record to one backward sweep.

    The sweep evaluates a recorded function again and compares the values with the saved values,
    since a function that is random, or that has changed since the run, has no gradient.

    Attributes:
        received: the cotangents of the saved fields, or of the record.
        sums, forces, growth: receive the contributions, evaluate forces, and receive their sizes.
        record: the saved record, if the run has one.
        tolerance: allowed relative difference between the values and the saved values.
        total: the sum of a time average so far; ``summed`` is the last state in it.
        clip, batch: the bound of the cotangents, and the number of batch axes of the state.
    """

    saved_attributes = ("total",)
    recorder: Recorder
    received: Sequence[Tensor | None]
    sums: Cotangents
    forces: ForceEvaluator
    growth: CotangentGrowth
    record: Tensor | None = None
    tolerance: float = 0.0
    total: Tensor | None = None
    summed: AnyState | None = None
    clip: Clip | None = None
    batch: int = 0

    def clip_after(self, step: int) -> None:
        """Clip the cotangents of the state after a number of steps, if they are to be."""
        if self.clip is not None and self.clip.at(step):
            self.sums.clip(self.clip, self.batch)
            # Their products have been taken.
            self.forces.forget()

    def begin(self, final: State, saves: Saves | None, stepper: Stepper) -> tuple[State, int]:
        """Return the state and the step from which a sweep goes on."""
        if saves is None:
            return final, stepper.clock.last
        state, step, _ = saves.begin(final, stepper.clock.last)
        self.summed = stepper.from_lattice(state)
        return state, step

    @property
    def average_cotangent(self) -> Tensor | None:
        """The cotangent of the averaged function at each step that counts.

        For steps of varying size it is that of a weight of one.
        """
        cotangent = self.received[0] if self.recorder.average is not None else None
        return None if cotangent is None else cotangent * self.recorder.weight

    def accumulate(self, step: int, state: AnyState) -> None:
        """Add the cotangents of the data saved after ``step`` steps."""
        recorder, frame = self.recorder, self.recorder.frames.get(step)
        if recorder.average is not None:
            cotangent = self.average_cotangent
            if step in recorder.counted and cotangent is not None:
                if recorder.weights is not None:
                    cotangent = cotangent * float(recorder.weights[step])
                value = recorder.summand(self.add_function(state, cotangent), step)
                self.total = value if self.total is None else self.total + value
                self.summed = state
        elif frame is not None and recorder.function is None:
            for name, cotangent in zip(state._fields, self.received, strict=True):
                if cotangent is not None:
                    self.sums.add(name, cotangent[frame])
                    self.growth.inject(name, cotangent[frame].norm())
        elif frame is not None and self.received[0] is not None:
            value = self.add_function(state, self.received[0][frame])
            assert self.record is not None
            self._compare(value, self.record[frame], f"the record after step {step}", state)

    def add_function(self, state: AnyState, cotangent: Tensor) -> Tensor:
        """Add a cotangent's product with the function's derivative; return the value."""
        leaves, value = self.recorder.value_at_leaves(state)
        if value.requires_grad:
            self.forces.refuse_unknown(value, list(leaves), "the record")
            added = self.sums.add_function(value, leaves, cotangent.to(value))
            for name, product in added.items():
                self.growth.inject(name, product.norm())
        return value.detach()

    def finish(self) -> None:
        """Compare a time average with the saved one."""
        if self.total is not None and self.record is not None:
            found = (self.total * self.recorder.weight).to(self.record.dtype)
            self._compare(found, self.record, "the time average", self.summed)

    def _compare(self, found: Tensor, saved: Tensor, what: str, state: AnyState | None) -> None:
        known = torch.isfinite(saved)
        if bool((known != torch.isfinite(found)).any()):
            raise _changed(f"{what} was finite in other entries")
        if not saved.numel():
            return
        error = float(torch.where(known, (found - saved).abs(), 0.0).amax())
        size = float(torch.where(known, saved.abs(), 0.0).amax())
        # The error of a value in which terms cancel, such as a conserved total momentum, is
        # compared with the size of the terms.
        if error > self.tolerance * size and error > self.tolerance * self._terms(state):
            raise _changed(f"{what} was {error:.1e} off")

    def _terms(self, state: AnyState | None) -> float:
        """Estimate the size of the terms in the value, by sum(abs(derivative * entry))."""
        if state is None:
            return 0.0
        leaves, value = self.recorder.value_at_leaves(state)
        if not value.requires_grad:
            return 0.0
        with torch.enable_grad():
            total = torch.view_as_real(value).sum() if value.is_complex() else value.sum()
        slopes = torch.autograd.grad(
            total, tuple(leaves), allow_unused=True, materialize_grads=True
        )
        return sum(float((slope * x).abs().sum()) for slope, x in zip(slopes, leaves, strict=True))


def _changed(difference: str) -> ReconstructionError:
    """Make the error of a recorded value that differs from the saved one."""
    return ReconstructionError(
        f"{difference} when the backward sweep computed it again, so its gradient would be wrong. "
        "The recorded function is random, or reads a value that has changed since the run (a plain "
        "attribute, a mode). Make it reproducible, or use DirectAdjoint()."
    )
