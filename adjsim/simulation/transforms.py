"""Runs inside of transforms of ``torch.func``, whose gradients do not come from a graph of steps.

Inside of ``torch.func.grad``, ``vjp`` and ``jacrev`` a tensor is a wrapper around its values. With
an adjoint other than :class:`~adjsim.DirectAdjoint`, or compiled, the run computes with the values,
outside of the transforms, and its results are one function of the start and of the tensors of the
dynamics. The product of this function with rows of cotangents is that of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from adjsim.core.reading import Reading
from adjsim.core.rows import pulled_rows
from adjsim.core.state import State
from adjsim.core.trajectory import Record, Trajectory
from adjsim.core.transforms import FunctionOfRows, RefuseWrapped, is_wrapped, unwrapped
from adjsim.dynamics.base import Dynamics
from adjsim.solvers.run import bound_record

TWICE = partial(
    RuntimeError,
    "this gradient was swept backward and has no graph of its own, so it cannot be differentiated "
    "again (nested transforms, hessian). Use DirectAdjoint() without compile=True.",
)
NO_BATCH = partial(
    RuntimeError,
    "only DirectAdjoint() without compile=True goes through torch.func.vmap over a run: give "
    "the state a leading batch axis instead. vmap over cotangents, and jacrev, do go through.",
)
FORWARD = partial(
    NotImplementedError,
    "derivatives forward in time (jvp, jacfwd, hessian, dual tensors) need DirectAdjoint() without "
    "compile=True; jacrev goes through every adjoint.",
)
UNREGISTERED = partial(
    ValueError,
    "the dynamics or the record reads a tensor that torch.func differentiates and that is not "
    "registered, so an adjoint would lose its gradient. Pass it in args= of the equation, or put "
    "it into a module by torch.func.functional_call, or use DirectAdjoint().",
)


def run_outside(
    run: Callable[[Dynamics[State], State, Record[State]], Trajectory[State]],
    dynamics: Dynamics[State],
    state: State,
    record: Record[State],
) -> Trajectory[State]:
    """Run outside of the active transforms, and connect the results to what they wrap."""
    reading = Reading(dynamics)
    given = (*state, *reading.tensors)
    with temporarily_clear_interpreter_stack(), RefuseWrapped(UNREGISTERED):
        values = [_value(x) for x in given]
        inside, tensors = type(state)._make(values[: len(state)]), values[len(state) :]
        copy = reading.bound(tensors)
        found = run(copy, inside, bound_record(record, reading, copy, tensors))
    tracked = [k for k, x in enumerate(given) if _is_tracked(x)]
    join = Connection([given[k] for k in tracked], [values[k] for k in tracked])
    inner, states = found._extension, found._states
    frames = None if states is None else join.state(states)
    saved = None if found.record is None else join([found.record])[0]
    others = found.times, frames, saved, join.state(found.final), found.stats, found.end
    return Trajectory(*others, None if inner is None else _Extension(inner, join))


@dataclass(frozen=True, eq=False)
class Connection:
    """Gives values that a run has computed from ``leaves`` their derivatives by the ``inputs``."""

    inputs: Sequence[Tensor]
    leaves: Sequence[Tensor]

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values as functions of the inputs."""

        def pull(*rows: Tensor) -> list[Tensor]:
            return pulled_rows(values, self.leaves, rows)

        plain = [x.detach() for x in values]
        if not self.inputs:
            return plain
        return list(_Connected.apply(pull, len(values), *plain, *self.inputs))

    def state(self, state: State) -> State:
        """Return a state as a function of the inputs."""
        return type(state)._make(self(list(state)))


@dataclass(frozen=True, eq=False)
class _Extension:
    """The states of a run as a function of time, connected to the inputs and to the time."""

    extension: Callable[[Tensor], Any]
    connection: Connection

    def __call__(self, t: Tensor) -> Any:
        inputs, leaves = self.connection.inputs, self.connection.leaves
        with temporarily_clear_interpreter_stack():
            value = _value(t)
            found = self.extension(value)
        if _is_tracked(t):
            inputs, leaves = [*inputs, t], [*leaves, value]
        return Connection(inputs, leaves).state(found)


def _is_tracked(x: Tensor) -> bool:
    """Return whether a derivative with respect to a tensor is recorded now."""
    return is_wrapped(x) or (torch.is_grad_enabled() and x.requires_grad)


def _value(x: Tensor) -> Tensor:
    """Return the value of a tensor, as a leaf if a derivative with respect to it is recorded."""
    tracked, x = _is_tracked(x), unwrapped(x, NO_BATCH, TWICE)
    return x.detach().clone().requires_grad_() if tracked else x


class _Connected(torch.autograd.Function):
    """Values, the first ``count`` tensors, as a function of the others."""

    @staticmethod
    def forward(pull: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.pull, ctx.count, *tensors = inputs
        # A second derivative is an error because of them.
        ctx.save_for_backward(*tensors[ctx.count :])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        given = ctx.saved_tensors
        rows = [x[None] for x in cotangents]
        found = FunctionOfRows.apply(ctx.pull, TWICE, ctx.count, *rows, *given)
        return None, None, *[None] * ctx.count, *(x[0] for x in found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise FORWARD()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        raise NO_BATCH()
