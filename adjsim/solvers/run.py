"""The inputs of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic

import torch
from torch import Tensor

from adjsim.core.durable.manifest import Saving
from adjsim.core.noise import Noise
from adjsim.core.reading import Reading
from adjsim.core.state import State, in_transform
from adjsim.core.trajectory import Record, RunEnd, TimeAverage
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.clip import Clip
from adjsim.dynamics.lattice import Lattice
from adjsim.solvers.base import SteppingSolver, StepPlan


@dataclass(frozen=True, eq=False)
class Run(Generic[State]):
    """The validated inputs of one run, for the adjoint.

    ``tensors`` are the values of the reading that the run uses: leaves, or tensors with a graph to
    those of the user. ``dynamics`` is the copy that holds them. The ``key`` of what a compiled run
    reads (:mod:`adjsim.core.cache_key`) and the lattice of an exact run may be known before. A
    ``clip`` bounds the cotangents of its backward sweep.
    """

    reading: Reading[Dynamics[State]]
    tensors: tuple[Tensor, ...]
    dynamics: Dynamics[State]
    state: State
    times: Tensor
    solver: Any
    record: Record[State]
    noise: Noise | None = None
    progress: bool = False
    compile: bool = False
    saving: Saving | None = None
    continues: RunEnd | None = None
    key: Any = None
    lattice: Lattice | None = None
    clip: Clip | None = None

    @property
    def needs_gradient(self) -> bool:
        """Whether the start or a parameter requires grad, and gradients are enabled."""
        trained = bool(self.reading.wanted) or any(x.requires_grad for x in self.state)
        return torch.is_grad_enabled() and trained

    @cached_property
    def plan(self) -> StepPlan:
        """The step, whose moves read the dynamics of the run."""
        assert isinstance(self.solver, SteppingSolver)
        found = self.solver.plan(self.dynamics, self.state, float(self.times[0]), self.lattice)
        return found if self.continues is None else found.with_spacings(self.continues.spacings)

    def connected(self) -> Run[State]:
        """Return the same run with values by which autograd reaches the user's tensors."""
        tensors = self.reading.connected()
        return self.with_dynamics(self.reading.bound(tensors), tensors)

    def joined(self) -> tuple[Run[State], tuple[Tensor, ...]]:
        """Return the same run with trainable values that are parts of one tensor, and this tensor.

        A product with one tensor costs less than with many. Values of several dtypes stay apart.
        """
        tensors = list(self.reading.connected())
        wanted = [tensors[k] for k in self.reading.wanted]
        found = tuple(wanted)
        if len({x.dtype for x in wanted}) == 1:
            found = (torch.cat([x.flatten() for x in wanted]),)
            parts = found[0].split([x.numel() for x in wanted])
            for k, x, part in zip(self.reading.wanted, wanted, parts, strict=True):
                tensors[k] = part.view(x.shape)
        return self.with_dynamics(self.reading.bound(tensors), tuple(tensors)), found

    def with_dynamics(self, dynamics: Dynamics[State], tensors: tuple[Tensor, ...]) -> Run[State]:
        """Return the same run, on the same lattice, of another copy of the dynamics."""
        exact = isinstance(self.solver, SteppingSolver) and self.solver.exact
        lattice = self.plan.lattice if exact else None
        return replace(self, dynamics=dynamics, tensors=tensors, lattice=lattice)

    def refuse_written(self) -> None:
        """Refuse a run that has written into the values that it began with."""
        if not in_transform():
            self.reading.refuse_written(self.dynamics, self.tensors)

    @cached_property
    def bound_record(self) -> Record[State]:
        """The record, which reads the values of the run where it names the user's dynamics."""
        return bound_record(self.record, self.reading, self.dynamics, self.tensors)


def bound_record(
    record: Record[State], reading: Reading[Any], dynamics: Any, tensors: Sequence[Tensor]
) -> Record[State]:
    """Return a record that reads a copy of the dynamics, and its tensors, where it names it."""
    if isinstance(record, TimeAverage):
        return replace(record, function=reading.on(dynamics, tensors, record.function))
    return None if record is None else reading.on(dynamics, tensors, record)
