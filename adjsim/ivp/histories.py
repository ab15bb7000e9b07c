r"""Solutions that a later right-hand side reads, as those of delay equations, with gradients.

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
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Times by which a solution may be read beyond its ends, relative to its length: rounding.
BEYOND = 1e-9
# Number of polynomials with which the products with a history are compared.
COMPARED = 5

#: The history reader of the run that evaluates its right-hand side now.
READER: ContextVar[HistoryReader | None] = ContextVar("READER", default=None)

# Times of steps of a smooth section of a solution, and its states (n, times) with their gradient.
Section = tuple[Any, Callable[[Any], Tensor]]


class Polynomials:
    """The states ``(n, nodes)`` of a solution, and the polynomials through them."""

    def __init__(self, sections: Sequence[Section], degree: int) -> None:
        begins, lengths, values = [], [], []
        self._points = points = (1 - np.cos(np.pi * np.arange(degree + 1) / degree)) / 2
        # The coefficients of Lagrange's polynomials through the points, in 2 x - 1.
        basis = np.linalg.inv(np.vander(2 * points - 1, increasing=True))
        for times, states in sections:
            ends = np.asarray(times, float)
            sizes = np.diff(ends)
            begins.append(ends[:-1][sizes != 0])
            lengths.append(sizes[sizes != 0])
            nodes = begins[-1][:, None] + lengths[-1][:, None] * points
            # A step ends where the next one begins.
            last = begins[-1][-1:] + lengths[-1][-1:]
            values.append(states(np.append(nodes[:, :-1].ravel(), last)))
            if len(values) > 1:
                _refuse_jump(float(ends[0]), *(x.detach() for x in (values[-2], values[-1])))
        counts = [degree * np.arange(len(x)) for x in begins]
        offsets = np.cumsum([0, *(x.shape[1] for x in values[:-1])])
        first = np.concatenate([c + o for c, o in zip(counts, offsets, strict=True)])
        #: The states at the nodes, which have their gradient.
        self.values = torch.cat(values, 1)
        device = self.values.device
        self._first = torch.as_tensor(first, device=device)
        self._begins, self._lengths = (
            torch.as_tensor(np.concatenate(x), device=device) for x in (begins, lengths)
        )
        self._sign = self._lengths[0].sign()
        self._ends = self._sign * (self._begins + self._lengths)
        self._basis = torch.as_tensor(basis, device=device)
        self._range = torch.arange(degree + 1, device=device)

    def at(self, values: Tensor, t: Tensor) -> Tensor:
        """Return the states ``(n,)`` or ``(n, k)`` at times, from those at the nodes."""
        flat = t.double().reshape(-1)
        known = self._sign * flat.detach()
        low, high = self._sign * self._begins[0], self._ends[-1]
        beyond = BEYOND * (high - low)
        outside = (known < low - beyond) | (known > high + beyond)
        if outside.any():
            ends = sorted(float(self._sign * x) for x in (low, high))
            raise ValueError(
                f"fun reads a solution at t = {float(flat.detach()[outside][0]):.9g}, outside of "
                f"its time span [{ends[0]:g}, {ends[1]:g}]."
            )
        step = torch.searchsorted(self._ends, known).clamp(max=len(self._ends) - 1)
        x = (2 * (flat - self._begins[step]) / self._lengths[step] - 1)[:, None]
        weights = self._basis[-1]
        for row in self._basis[:-1].flip(0):
            weights = weights * x + row
        found = (values[:, self._first[step][:, None] + self._range] * weights.to(values)).sum(-1)
        return found[:, 0] if t.ndim == 0 else found

    def compared(self, values: Tensor) -> Tensor:
        """Return the weights ``(n, nodes, m)`` with which products with the states are compared."""
        points = torch.as_tensor(self._points).to(self._begins)
        times = self._begins.new_empty(values.shape[1])
        nodes = self._begins[:, None] + self._lengths[:, None] * points
        times[self._first[:, None] + self._range] = nodes
        x = 2 * (times - times.min()) / (times.max() - times.min()) - 1
        of_time = torch.cos(torch.arange(COMPARED).to(x) * x.clamp(-1, 1).arccos()[:, None])
        scale = values.abs().amax(1, keepdim=True).clamp(min=1e-300)
        of_time = of_time.to(values).expand(len(values), -1, -1)
        return torch.cat([of_time, (values / scale)[..., None]], -1)


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


class History(ABC):
    """A solution that a later right-hand side may read with gradients."""

    _polynomials: Polynomials | None = None

    @abstractmethod
    def sections(self) -> tuple[list[Section], int]:
        """Return the sections between resets, and a degree; none: there is no gradient."""

    def read(self, t: Any) -> Tensor | None:
        """Return the states in a later right-hand side; None: no gradient is wanted there."""
        reader = READER.get()
        return None if reader is None else reader.read(self, t)

    def polynomials(self) -> Polynomials | None:
        """Return the polynomials through the states, which are those of all later runs."""
        if self._polynomials is None:
            sections, degree = self.sections()
            self._polynomials = Polynomials(sections, degree) if sections else None
        return self._polynomials


class HistoryReader:
    """The solutions that the right-hand side of a run reads, as parameters of the run.

    ``originals`` and ``leaves`` are the tensors of the run with a gradient, and their stand-ins.
    """

    def __init__(self, originals: list[Tensor], leaves: list[Tensor]) -> None:
        self._originals, self._leaves = originals, leaves
        self._records, self._open = torch.is_grad_enabled(), True
        self._known: dict[History, Tensor | None] = {}
        #: For each stand-in of a history, by its number, the weights of its comparison.
        self.compared: dict[int, Tensor] = {}

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Read histories by this reader."""
        token = READER.set(self)
        try:
            yield
        finally:
            READER.reset(token)

    def close(self) -> None:
        """Take no further histories: the parameters of the run are known now."""
        self._open = False

    def read(self, history: History, t: Any) -> Tensor | None:
        leaf = self.add(history)
        polynomials = history.polynomials() if leaf is not None else None
        if leaf is None or polynomials is None:
            return None
        return polynomials.at(leaf, torch.as_tensor(t, device=leaf.device))

    def add(self, history: History) -> Tensor | None:
        """Return the stand-in of the states of a history; None: it has no gradient."""
        if history in self._known:
            return self._known[history]
        token, leaf = READER.set(None), None
        try:
            with torch.set_grad_enabled(self._records):
                found = history.polynomials() if self._records else None
            if found is not None and found.values.requires_grad:
                if not self._open:
                    raise ValueError(
                        "fun reads a solution with a gradient that it does not read at the start "
                        "of the time span: declare it by params=[solution.sol]."
                    )
                leaf = found.values.detach().clone().requires_grad_()
                self.compared[len(self._leaves)] = found.compared(leaf.detach())
                self._originals.append(found.values)
                self._leaves.append(leaf)
        finally:
            READER.reset(token)
        self._known[history] = leaf
        return leaf

    def smoothed(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Replace products with the states ``(k, n, nodes)`` of histories by their sums."""
        found = list(sums)
        for number, weights in self.compared.items():
            found[number] = torch.einsum("knj,njm->knm", found[number].to(weights), weights)
        return found
