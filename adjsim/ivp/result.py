"""The result of solve_ivp(), and the solution as a function of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.integrate import OdeSolution
from scipy.optimize import OptimizeResult
from torch import Tensor

from adjsim.ivp.adjoint import Piece
from adjsim.ivp.rhs import as_times


class OdeResult(OptimizeResult):
    """The result of :func:`solve_ivp`: SciPy's fields, with torch tensors."""


class DenseSolution:
    """The solution as a differentiable function of time.

    Called with a time or times ``(k,)`` it returns the state ``(n,)`` or states ``(n, k)``. At the
    time of a reset it returns the state before the reset.

    Args:
        pieces: the pieces between resets, each with its interpolants and its initial state.
        like: a state.
    """

    def __init__(self, pieces: Sequence[tuple[Piece, OdeSolution, Tensor]], like: Tensor) -> None:
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
        flat, order, found = times.reshape(-1), [], []
        for (piece, inside, start), members in self._sorted(flat.detach().cpu().numpy()):
            at = flat[members]
            found.append(piece.states_at(at, inside(at.detach().cpu().numpy()), start))
            order += members
        states = (
            torch.cat(found, 1)[:, np.argsort(order)]
            if found
            else self._like.new_zeros((len(self._like), 0))
        )
        return states[:, 0] if times.ndim == 0 else states

    @property
    def _differentiable(self) -> bool:
        return torch.is_grad_enabled() and any(
            piece.path is not None for piece, _, _ in self._pieces
        )

    def _sorted(self, times: Any) -> Iterator[tuple[tuple[Piece, OdeSolution, Tensor], list[int]]]:
        """Yield each piece with the indices of the times in it."""
        sign = self._pieces[0][0].sign
        ends = [sign * piece.end for piece, _, _ in self._pieces[:-1]]
        numbers = np.searchsorted(ends, sign * times, side="left")
        for number in np.unique(numbers):
            yield self._pieces[number], np.flatnonzero(numbers == number).tolist()
