r"""Solutions that a later right-hand side reads, as those of delay equations, with gradients.

A run replaces each solution that its right-hand side, events or resets reach by a twin of its own.

A right-hand side of another solution :math:`y_1`, such as :math:`f(t, y, y_1(t - \tau))`, reads it
at a few hundred times, and an adjoint run of its own for each would be far too much. So the later
run reads the polynomials through the states at the Chebyshev points of each step of :math:`y_1`.
These states are one more parameter :math:`Y` of the later run. It is connected to all that
:math:`y_1` depends on by one adjoint run, which carries the cotangents of all states at once. The
degree is above that of the interpolants, so the values are theirs to rounding; the derivative of
:math:`y_1` is that of smooth functions through exact values.

The products of the adjoint with :math:`\partial f/\partial Y` are not smooth in time, since each
state acts in one step of :math:`y_1` alone. A change of the solution, which is smooth, sees sums
over them. So the quadrature compares sums with polynomials in time, and with the states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from adjsim.core.rebinding import OfRun, reached, rebound
from adjsim.core.state import in_transform
from adjsim.core.transforms import outside_transforms

V = TypeVar("V")

# Times by which a solution may be read beyond its ends, relative to its length: rounding.
BEYOND = 1e-9
# Number of polynomials with which the products with a history are compared.
COMPARED = 5

# Times ``(steps + 1, batch)`` of a smooth section of a solution in columns, and its states
# ``(n, times, batch)`` at times ``(times, batch)``, with their gradient. One state is one column.
Section = tuple[Any, Callable[[Any], Tensor]]


class Table(NamedTuple):
    """Polynomials of a solution; the last axis is that of its columns.

    Attributes:
        values: the states ``(n, nodes, batch)``.
        begins, lengths: the time at which each step begins, and its length ``(steps, batch)``.
        ends: the times at which the steps end, times the sign.
        sign: 1 forward in time, -1 backward ``(batch,)``.
        earliest: the first step of each column that is not empty ``(batch,)``.
    """

    values: Tensor
    begins: Tensor
    lengths: Tensor
    ends: Tensor
    sign: Tensor
    earliest: Tensor


class Polynomials:
    """The polynomials through the states of a solution at the nodes of each of its steps."""

    def __init__(self, sections: Sequence[Section], degree: int) -> None:
        begins, lengths, values = [], [], []
        self._points = points = (1 - np.cos(np.pi * np.arange(degree + 1) / degree)) / 2
        # The coefficients of Lagrange's polynomials through the points, in 2 x - 1.
        basis = np.linalg.inv(np.vander(2 * points - 1, increasing=True))
        for times, states in sections:
            ends = np.asarray(times, float)
            sizes = np.diff(ends, axis=0)
            taken = (sizes != 0).any(1)
            begins.append(ends[:-1][taken])
            lengths.append(sizes[taken])
            nodes = begins[-1][:, None] + lengths[-1][:, None] * points[:, None]
            # A step ends where the next one begins.
            last = begins[-1][-1:] + lengths[-1][-1:]
            every = np.concatenate([nodes[:, :-1].reshape(-1, ends.shape[1]), last])
            values.append(states(np.clip(every, ends.min(0), ends.max(0))))
            if len(values) > 1:
                _refuse_jump(float(ends[0, 0]), *(x.detach() for x in (values[-2], values[-1])))
        counts = [degree * np.arange(len(x)) for x in begins]
        offsets = np.cumsum([0, *(x.shape[1] for x in values[:-1])])
        first = np.concatenate([c + o for c, o in zip(counts, offsets, strict=True)])
        #: The states at the nodes ``(n, nodes, batch)``, which have their gradient.
        self.values = torch.cat(values, 1)
        device = self.values.device
        self._first, self._begins, self._lengths, self._basis = (
            torch.as_tensor(x, device=device)
            for x in (first, np.concatenate(begins), np.concatenate(lengths), basis)
        )
        self._range = torch.arange(degree + 1, device=device)

    def table(self, values: Tensor) -> Table:
        """Return the table of the polynomials through given states at the nodes."""
        begins, lengths, empty = self._begins, self._lengths, self._lengths == 0
        sign = torch.where(lengths.sum(0) < 0, -1.0, 1.0).to(lengths)
        return Table(
            values, begins, lengths.masked_fill(empty, 1.0), sign * (begins + lengths), sign,
            (~empty).long().argmax(0),
        )  # fmt: skip

    def at(self, table: Table, t: Tensor, column: Tensor | None, refuse: bool) -> Tensor:
        """Return the states ``(n, k, batch)`` at times ``(k, batch)``, or ``(k, 1)`` for all.

        They are those of one ``column``, as a batch of one, if it is given. Outside of the time
        span they are NaN, or refused where vmap does not hide the times.
        """
        columns = torch.arange(len(table.sign), device=t.device)
        if column is not None:
            columns = column[None]
            picked = (x.index_select(-1, columns) for x in table[1:])
            table = Table(table.values, *picked)
        known = table.sign * t.detach()
        low, high = table.sign * table.begins[0], table.ends[-1]
        beyond = BEYOND * (high - low)
        outside = (known < low - beyond) | (known > high + beyond)
        if refuse and not in_transform() and outside.any():
            raise _outside(table, t.detach(), outside)
        step = (table.ends[None] < known.minimum(high)[:, None]).sum(1).maximum(table.earliest)
        begin, length = (x.gather(0, step) for x in (table.begins, table.lengths))
        x = (2 * (t - begin) / length - 1)[..., None]
        weights = self._basis[-1]
        for row in self._basis[:-1].flip(0):
            weights = weights * x + row
        nodes = self._first[step][..., None] + self._range
        found = table.values[:, nodes, columns[:, None]]
        return (found * weights.to(found)).sum(-1).masked_fill(outside, torch.nan)

    def compared(self, values: Tensor) -> Tensor:
        """Return weights ``(n, nodes, batch, m)`` by which products with the states are compared.

        They are polynomials in time, and the states.
        """
        points = torch.as_tensor(self._points).to(self._begins)[:, None]
        times = self._begins.new_empty(values.shape[1:])
        nodes = self._begins[:, None] + self._lengths[:, None] * points
        times[self._first[:, None] + self._range] = nodes
        low, high = times.amin(0), times.amax(0)
        x = 2 * (times - low) / (high - low).clamp(min=1e-300) - 1
        of_time = torch.cos(torch.arange(COMPARED).to(x) * x.clamp(-1, 1).arccos()[..., None])
        scale = values.abs().amax(1, keepdim=True).clamp(min=1e-300)
        of_time = of_time.to(values).expand(len(values), -1, -1, -1)
        return torch.cat([of_time, (values / scale)[..., None]], -1)


def _outside(table: Table, t: Tensor, outside: Tensor) -> ValueError:
    k, column = outside.nonzero()[0].tolist()
    t = t.expand(outside.shape)
    ends = sorted(float(x[column]) for x in (table.begins[0], table.sign * table.ends[-1]))
    return ValueError(
        f"fun reads a solution at t = {float(t[k, column]):.9g}, outside of its time span "
        f"[{ends[0]:g}, {ends[1]:g}]."
    )


def _refuse_jump(t: float, before: Tensor, after: Tensor) -> None:
    """Refuse a reset that changes the state: its time moves, and with it that of a jump of fun."""
    old, new = before[:, -1], after[:, 0]
    if bool(
        ((old - new).abs() > torch.finfo(old.dtype).eps ** 0.5 * (old.abs() + new.abs())).any()
    ):
        raise ValueError(
            f"fun reads a solution whose state jumps at t = {t:.9g}, where it is reset, so the "
            "derivative across this time would be wrong. End the solution there by a terminal "
            "event, and begin solutions of their own from its time and state."
        )


class History(OfRun, ABC):
    """A solution that a later right-hand side may read with gradients."""

    #: Whether its columns are samples, of which vmap evaluates one at a time.
    by_sample: ClassVar[bool] = False
    _polynomials: Polynomials | None = None
    # The solution of which this is the twin of a run, and how the run reads it.
    _original: History | None = None
    _reads: Callable[[Tensor], Tensor | None] | None = None

    @abstractmethod
    def sections(self) -> tuple[list[Section], int]:
        """Return the sections between resets, and a degree; none: the states may jump."""

    def read(self, t: Tensor) -> Tensor | None:
        """Return the states ``(n, k, batch)`` at times ``(k, batch)`` in a later right-hand side.

        Times ``(k, 1)`` are those of all columns. None: no gradient is wanted there.
        """
        return None if self._reads is None else self._reads(t)

    @property
    def is_connected(self) -> bool:
        """Whether the states may have a gradient."""
        return True

    @property
    def original(self) -> History:
        """The solution itself, where this is the twin of a run."""
        return self._original or self

    def twin(self, reads: Callable[[Tensor], Tensor | None]) -> History:
        """Return the solution as a run reads it."""
        found: History = object.__new__(type(self))
        vars(found).update(vars(self), _original=self, _reads=reads)
        return found

    def __getstate__(self) -> dict[str, Any]:
        # A copy, and a solution from a file, have no gradient.
        return {name: x for name, x in vars(self).items() if name != "_polynomials"}

    def as_polynomials(self) -> Polynomials | None:
        """Return the polynomials through the states, which are those of all later runs."""
        if self._polynomials is None:
            # A run without a gradient may be the first, and later ones have one.
            with torch.enable_grad():
                sections, degree = self.sections()
                self._polynomials = Polynomials(sections, degree) if sections else None
        return self._polynomials


class HistoryReader:
    """The solutions that the right-hand side of a run reads, as parameters of the run.

    ``originals`` and ``leaves`` are the tensors of the run with a gradient, and their stand-ins.
    ``of_samples`` tells of a right-hand side that vmap evaluates.
    """

    def __init__(
        self,
        originals: list[Tensor],
        leaves: list[Tensor],
        batch: torch.Size,
        of_samples: bool = False,
    ) -> None:
        self._originals, self._leaves, self._batch = originals, leaves, batch
        self._of_samples = of_samples
        self._records, self._open = torch.is_grad_enabled(), True
        self._by_sample = False
        self._known: dict[History, Table | None] = {}
        #: For each stand-in of a history, by its number, the weights of its comparison.
        self.compared: dict[int, Tensor] = {}

    @property
    def reads_any(self) -> bool:
        """Whether the run reads a history, as far as is known."""
        return bool(self._known)

    def reaches(self, value: Any) -> bool:
        """Whether a function or another value holds a history."""
        return any(isinstance(x, History) for x in reached(value))

    def close(self) -> None:
        """Take no further histories: the parameters of the run are known now."""
        self._open = False

    def twins_in(self, value: V, sample: Tensor | None = None) -> V:
        """Replace the histories inside a function or another value by their twins of this run.

        Histories of samples are read for one ``sample``, a number that vmap hides; None: for all.
        """
        known = {id(x): x.original for x in reached(value) if isinstance(x, History)}
        twins = {k: x.twin(partial(self.read, x, sample)) for k, x in known.items()}
        self._by_sample |= any(x.by_sample for x in known.values())
        return rebound(value, twins) if twins else value

    def bound(self, value: V, sample: Tensor | None) -> V:
        """Replace the twins inside a value, which read all samples, by those of a sample."""
        return value if sample is None or not self._by_sample else self.twins_in(value, sample)

    def read(self, history: History, sample: Tensor | None, t: Tensor) -> Tensor | None:
        """Return states as :meth:`History.read` does."""
        table = self.add(history)
        polynomials = history.as_polynomials() if table is not None else None
        if table is None or polynomials is None:
            return None
        column = sample if history.by_sample else None
        if column is not None and table.sign.shape != self._batch:
            raise ValueError(
                f"fun reads a solution of {len(table.sign)} samples in a batch of "
                f"{self._batch.numel()}: solve both for the same samples."
            )
        return polynomials.at(table, t, column, not history.by_sample)

    def add(self, history: History) -> Table | None:
        """Return the table of a history, with the stand-in of its states if they have a gradient.

        None: the solution itself is read.
        """
        if history not in self._known:
            with outside_transforms():
                self._known[history] = self._table(history)
        return self._known[history]

    def _table(self, history: History) -> Table | None:
        # Vmap reads polynomials alone: the solution itself computes with NumPy.
        needed = history.by_sample or self._of_samples
        wanted = needed or (self._records and history.is_connected)
        found = history.as_polynomials() if wanted else None
        if history.by_sample and found is None:
            raise ValueError(
                "fun reads a solution of samples with resets, at which its states may jump: "
                "end it by a terminal event, and begin another at its times and states."
            )
        if found is None or not (needed or found.values.requires_grad):
            return None
        if not self._open:
            raise ValueError(
                "fun reads a solution that it does not read at the start of the time span: "
                "declare it by params=[solution.sol]."
            )
        values = found.values.detach().clone()
        if self._records and found.values.requires_grad:
            self.compared[len(self._leaves)] = found.compared(values)
            self._originals.append(found.values)
            self._leaves.append(values.requires_grad_())
        return found.table(values)

    def smoothed(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Replace products with the states ``(k, n, nodes, batch)`` of histories by their sums."""
        found = list(sums)
        for number, weights in self.compared.items():
            found[number] = torch.einsum("knjb,njbm->knbm", found[number].to(weights), weights)
        return found
