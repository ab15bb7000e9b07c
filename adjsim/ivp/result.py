"""The result of solve_ivp(), and the solution as a function of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.integrate import OdeSolution
from scipy.optimize import OptimizeResult
from torch import Tensor
from torch.utils._pytree import tree_map

from adjsim.ivp.piecewise import Piece
from adjsim.ivp.rhs import as_times


class OdeResult(OptimizeResult):
    """The result of :func:`solve_ivp`: SciPy's fields, with torch tensors.

    A copy, and a result from a file, have no gradient.
    """

    def __copy__(self) -> OdeResult:
        return OdeResult(self)

    def __reduce__(self) -> Any:
        fields = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, dict(self))
        return OdeResult, (fields,)


class DenseSolution:
    """The solution as a differentiable function of time.

    Called with a time or times ``(k,)`` it returns the state ``(n,)`` or states ``(n, k)``. At the
    time of a reset it returns the state before the reset. A copy, and a solution from a file, have
    no gradient.

    Args:
        pieces: the pieces between resets, each with its interpolants; None: they have no gradient.
        like: a state.
    """

    def __init__(self, pieces: Sequence[tuple[OdeSolution, Piece | None]], like: Tensor) -> None:
        self._pieces, self._like = pieces, like
        begin, end = float(pieces[0][0].ts[0]), float(pieces[-1][0].ts[-1])
        self._sign = 1.0 if end >= begin else -1.0
        self.t_min, self.t_max = min(begin, end), max(begin, end)

    def __call__(self, t: Any) -> Tensor:
        times = as_times(t, self._like)
        if times.ndim > 1:
            raise ValueError(f"t must be a time or times (k,); got shape {tuple(times.shape)}.")
        outside = bool(((times < self.t_min) | (times > self.t_max)).any())
        if outside and torch.is_grad_enabled() and any(x and x.path for _, x in self._pieces):
            raise ValueError(
                f"there is no gradient outside of [{self.t_min:g}, {self.t_max:g}]: call the "
                "solution under torch.no_grad()."
            )
        flat = times.reshape(-1)
        at = flat.detach().cpu().numpy()
        ends = [self._sign * inside.ts[-1] for inside, _ in self._pieces[:-1]]
        numbers = np.searchsorted(ends, self._sign * at, side="left")
        found = [self._like.new_zeros((len(self._like), 0))]
        for number in np.unique(numbers):
            inside, piece = self._pieces[number]
            members = np.flatnonzero(numbers == number)
            states = inside(at[members])
            found.append(
                torch.as_tensor(states).to(self._like)
                if piece is None
                else piece.states_at(flat[members], states)
            )
        states = torch.cat(found, 1)[:, np.argsort(np.argsort(numbers, kind="stable"))]
        return states[:, 0] if times.ndim == 0 else states

    def __copy__(self) -> DenseSolution:
        return DenseSolution(self._pieces, self._like)

    def __reduce__(self) -> Any:
        # The gradient needs fun, which may be a local function, and the graph of the start.
        return DenseSolution, ([(inside, None) for inside, _ in self._pieces], self._like)
