"""The result of solve_ivp(), and the solution as a function of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.integrate import OdeSolution
from scipy.optimize import OptimizeResult
from torch import Tensor
from torch.utils._pytree import tree_map

from adjsim.ivp.adjoint import Piece
from adjsim.ivp.rhs import Array, as_times


class OdeResult(OptimizeResult):
    """The result of :func:`solve_ivp`: SciPy's fields, with torch tensors.

    A copy, and a result from a file, have no gradient.
    """

    def __copy__(self) -> OdeResult:
        return OdeResult(self)

    def __reduce__(self) -> Any:
        fields = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, dict(self))
        return OdeResult, (fields,)


class _Values(NamedTuple):
    """A piece of a solution that has values and no gradient."""

    start: float
    end: float
    sign: float
    path: None = None

    def states_at(self, times: Tensor, states: Array, start: Tensor) -> Tensor:
        return torch.as_tensor(states).to(start)


class DenseSolution:
    """The solution as a differentiable function of time.

    Called with a time or times ``(k,)`` it returns the state ``(n,)`` or states ``(n, k)``. At the
    time of a reset it returns the state before the reset. A copy, and a solution from a file, have
    no gradient.

    Args:
        pieces: the pieces between resets, each with its interpolants and its initial state.
        like: a state.
    """

    def __init__(
        self, pieces: Sequence[tuple[Piece | _Values, OdeSolution, Tensor]], like: Tensor
    ) -> None:
        self._pieces, self._like = pieces, like
        ends = [pieces[0][0].start, pieces[-1][0].end]
        self.t_min, self.t_max = min(ends), max(ends)

    def __call__(self, t: Any) -> Tensor:
        times = as_times(t, self._like)
        if times.ndim > 1:
            raise ValueError(f"t must be a time or times (k,); got shape {tuple(times.shape)}.")
        if self._differentiable and bool(((times < self.t_min) | (times > self.t_max)).any()):
            raise ValueError(
                f"there is no gradient outside of [{self.t_min:g}, {self.t_max:g}]: call the "
                "solution under torch.no_grad()."
            )
        flat = times.reshape(-1)
        at, sign = flat.detach().cpu().numpy(), self._pieces[0][0].sign
        ends = [sign * piece.end for piece, _, _ in self._pieces[:-1]]
        numbers = np.searchsorted(ends, sign * at, side="left")
        found = [self._like.new_zeros((len(self._like), 0))]
        for number in np.unique(numbers):
            piece, inside, start = self._pieces[number]
            members = np.flatnonzero(numbers == number)
            found.append(piece.states_at(flat[members], inside(at[members]), start))
        states = torch.cat(found, 1)[:, np.argsort(np.argsort(numbers, kind="stable"))]
        return states[:, 0] if times.ndim == 0 else states

    def __copy__(self) -> DenseSolution:
        return DenseSolution(self._pieces, self._like)

    def __reduce__(self) -> Any:
        # The gradient needs fun, which may be a local function, and the graph of the start.
        pieces = [
            (_Values(piece.start, piece.end, piece.sign), inside, start.detach())
            for piece, inside, start in self._pieces
        ]
        return DenseSolution, (pieces, self._like)

    @property
    def _differentiable(self) -> bool:
        return torch.is_grad_enabled() and any(
            piece.path is not None for piece, _, _ in self._pieces
        )
