"""Functions of samples and of single states, solved in columns.

A function of samples, ``fun(t, y)``, takes a time that is one number and states ``(batch, n)``.

Columns have times of their own, so a function of one time is evaluated by ``torch.vmap``: each
sample is a batch of one, ``(1, n)``, at its own time. Arguments whose first axis has the length of
the batch belong to the samples. A function that gives the samples other rates in this way than all
at once is refused, such as one that reads a tensor with one row a sample without getting it as an
argument. A single state ``(n,)`` is one column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from adjsim.core.state import in_transform
from adjsim.ivp.column_solution import DenseColumns
from adjsim.ivp.histories import History, Section
from adjsim.ivp.nearby import near_start, nudged
from adjsim.ivp.piecewise import OdeResult
from adjsim.ivp.rhs import RightHandSide, as_times, describe_shape

# A function of one sample, by its number; None: of all.
OfSample = Callable[[Tensor | None], Callable[..., Any]]


class SampleRightHandSide(RightHandSide):
    """The right-hand side of samples, whose states ``(n, batch)`` are the columns of a solution."""

    of_samples: ClassVar[bool] = True

    def evaluate(self, t: Tensor, y: Tensor) -> Any:
        return self._each(lambda k: partial(self.inputs.evaluate, sample=k), t, y)

    def called(self, function: Callable[..., Any], t: Tensor, y: Tensor) -> Any:
        return self._each(partial(self.inputs.histories.bound, function), t, y)

    def _each(
        self, of: Callable[[Tensor], Callable[..., Any]], t: Tensor, y: Tensor, args: Any = None
    ) -> Any:
        """Call the function of each sample, which its number selects."""
        found, structure = tree_flatten(self.own_args if args is None else args)
        own = [isinstance(x, Tensor) and x.shape[:1] == t.shape for x in found]

        def of_one(k: Tensor, time: Tensor, state: Tensor, *rows: Tensor) -> Tensor:
            row = iter(rows)
            parts = [next(row)[None] if has else x for x, has in zip(found, own, strict=True)]
            args = self.inputs.histories.bound(tree_unflatten(parts, structure), k)
            value = of(k)(time, state[None], *args)
            if not isinstance(value, Tensor) or value.shape[:1] != (1,):
                raise ValueError(
                    "with batch_first=True a function of states (batch, n) must return a tensor "
                    f"whose first axis is the batch; for one sample (1, {len(state)}) it returned "
                    f"{describe_shape(value)}. Tensors with one row a sample go into args."
                )
            return value[0]

        rows = [x for x, has in zip(found, own, strict=True) if has]
        numbers = torch.arange(len(t), device=t.device)
        axes = 0, 0, 1, *[0] * len(rows)
        return torch.vmap(of_one, axes)(numbers, t, y, *rows).movedim(0, -1)

    def matrix(self, t: Tensor) -> Tensor:
        if isinstance(self.mass, Tensor):
            return super().matrix(t)
        return self.called(lambda t, _, *args: self.mass(t, *args)[None], t, self.like)

    def check_samples(
        self, begin: Tensor, end: Tensor, y: Tensor, events: Sequence[Callable[..., Any]]
    ) -> None:
        """Refuse functions that give samples other values alone than all at once.

        The rates are compared at the start. There equal arguments or states of all samples, or a
        zero, may hide a tensor that is shared, so all functions are compared nearby as well.
        """

        def rate(sample: Tensor | None) -> Callable[..., Any]:
            return partial(self.inputs.evaluate, sample=sample)

        self._compare("fun", "rate", rate, begin, y, self.own_args)
        args = tree_map(self._nudged, self.own_args)
        functions: list[tuple[str, str, OfSample]] = [("fun", "rate", rate)]
        histories = self.inputs.histories
        for number, event in enumerate(events):
            reset = getattr(event, "reset", None)
            for what, function in (("event", event), ("the reset of event", reset)):
                # What reads a past is called with one sample, and need not take all of them.
                if function is not None and not histories.reaches((function, self.own_args)):
                    of_sample = partial(histories.bound, function)
                    functions.append((f"{what} {number}", "value", of_sample))
        for name, kind, each in functions:
            self._compare(name, kind, each, near_start(begin, end), nudged(y), args)

    def _nudged(self, x: Any) -> Any:
        batch = self.like.shape[1:]
        moves = isinstance(x, Tensor) and x.is_floating_point() and x.shape[:1] == batch
        return nudged(x.detach()) if moves else x

    def _compare(self, name: str, kind: str, of: OfSample, t: Tensor, y: Tensor, args: Any) -> None:
        at = t.to(self.like.dtype)
        with torch.no_grad():
            known = of(None)(at, y.T.contiguous(), *args)
            found = self._each(of, at.expand(y.shape[1]), y, args).movedim(-1, 0)
        if not isinstance(known, Tensor) or known.shape != found.shape:
            raise ValueError(
                f"{name} returned {describe_shape(known)} for states of shape {tuple(y.T.shape)}."
            )
        wrong = (known - found).abs() > self.eps**0.5 * known.abs().amax()
        if wrong.any():
            raise ValueError(
                f"{name} gives sample {int(wrong.nonzero()[0, 0])} another {kind} alone than in "
                "the batch. It must treat each sample by itself. Tensors with one row a sample go "
                "into args; a shared tensor whose first axis has the length of the batch does not: "
                "read it in fun, and declare it by params=[...]."
            )


@dataclass(eq=False)
class DenseSamples(History):
    """The solution of samples as a function of time.

    Called with a time it returns the states ``(batch, n)``; with times ``(k,)`` for all samples or
    ``(batch, k)`` for each, the states ``(batch, k, n)``. There is no extrapolation.
    """

    columns: DenseColumns
    by_sample: ClassVar[bool] = True

    def __call__(self, t: Any) -> Tensor:
        times = _transposed(as_times(t, self.columns.start))
        found = self.read(times if times.ndim == 2 else times.reshape(-1, 1))
        if found is None and in_transform():
            raise ValueError(
                "fun, or an event or a reset, reads a solution of samples as a global variable: "
                "pass it in args=(..., solution.sol)."
            )
        if found is None:
            return self.columns(times).movedim(-1, 0).transpose(-1, 1)
        found = found.movedim(-1, 0).transpose(-1, 1)
        return found[:, 0] if times.ndim == 0 else found

    def sections(self) -> tuple[list[Section], int]:
        return self.columns.sections()


def samples_first(found: OdeResult) -> OdeResult:
    """Put the axis of the batch first, in a result of columns."""
    found.y = found.y.permute(2, 1, 0)
    found.t = _transposed(found.t)
    if found.sol is not None:
        found.sol = DenseSamples(found.sol)
    return found


def as_rows(t_eval: Any, like: Tensor) -> Any:
    """Return times ``(batch, times)`` with the batch last; others unchanged."""
    return None if t_eval is None else _transposed(as_times(t_eval, like))


def _transposed(times: Tensor) -> Tensor:
    return times.T if times.ndim == 2 else times


class OneRightHandSide(RightHandSide):
    """The right-hand side of one problem, whose state ``(n, 1)`` is the only column."""

    def evaluate(self, t: Tensor, y: Tensor) -> Any:
        return self.called(self.inputs.evaluate, t, y)

    def called(self, function: Callable[..., Any], t: Tensor, y: Tensor) -> Any:
        value = function(t[0], y[:, 0], *self.own_args)
        if isinstance(value, list | tuple):
            rows = [torch.as_tensor(x, dtype=y.dtype, device=y.device) for x in value]
            value = torch.stack(torch.broadcast_tensors(*rows))
        return value.unsqueeze(-1) if isinstance(value, Tensor) else value


@dataclass(eq=False)
class DenseOne(History):
    """The solution of one problem as a function of time, ``(n,)`` or ``(n, k)``."""

    columns: DenseColumns

    def __call__(self, t: Any) -> Tensor:
        times = as_times(t, self.columns.start)
        read = self.read(times.reshape(-1, 1)) if times.ndim < 2 else None
        if read is None:
            return self.columns(times).squeeze(-1)
        return read[:, 0, 0] if times.ndim == 0 else read[..., 0]

    def sections(self) -> tuple[list[Section], int]:
        return self.columns.sections()


def one_of(found: OdeResult) -> OdeResult:
    """Return the result of the only column."""
    found.y = found.y.squeeze(-1)
    found.t = found.t.squeeze(-1) if found.t.ndim == 2 else found.t
    found.sol = None if found.sol is None else DenseOne(found.sol)
    found.steps, found.rejections = int(found.steps), int(found.rejections)
    if found.t_events is not None:
        found.status = int(found.status)
        found.t_events = [x[0] for x in found.t_events]
        found.y_events = [x[0] for x in found.y_events]
    return found
