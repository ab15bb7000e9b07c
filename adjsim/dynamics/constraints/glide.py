"""Energy-sampling Hamiltonian dynamics along constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.core.derived import has_values
from adjsim.dynamics.constraints.terms import ConstrainedTerm
from adjsim.dynamics.esh import Turn
from adjsim.dynamics.moves import GeneralFlow, Move
from adjsim.dynamics.sources import Coefficients, Force
from adjsim.potentials.base import force

# Steps of Newton's method without derivatives. Two more, which change rounding alone, have them:
# one for each order of a derivative.
SEARCHED = 3


class ConstrainedGlide(ConstrainedTerm):
    """The glide of ESH along constraints, over a scaled time h, by a chord of the length h::

        q' = q + n u + G(q)^T x    |q'_i - q'_j| = L gives x    n^2 + |G^T x|^2 = h^2 gives n
        v  = P(q') (q' - q)/h      u' = v/|v|                   r' = r + log(h |v| / n)

    With p = e^r u and m the momentum at half the drift, it is the drift of RATTLE in a time
    ``h/|m|``: n/h and the norm of v are ``|p|/|m|`` and ``|p'|/|m|``. It is its own inverse under
    u -> -u. It keeps volumes of (q, p): the drifts over different times are canonical maps, the
    Hamiltonian of their change with the time is ``|m|^2/2``, and the time is a function of ``|m|``,
    with which it commutes. The direction u stays a unit vector with G u = 0. A chord longer than
    about half of the shortest length may have no multipliers, which is an error.
    """

    advances_time = True

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        """Compute ``dq/ds = u`` and the turn of u with the constraints."""
        held, u = self.constraints, state.direction
        c, d = held.coefficients(self.masses, u), held.differences(state.position)
        pull = -held.forces(held.reactions(c, d, u), d, c["1/m"], u.shape[-2])
        return {**self.term.drift(t, state), "direction": pull}

    def coefficients(self, h: float, state: Any) -> dict[str, Tensor]:
        return self.constraints.coefficients(self.masses, state.position)

    def moves(self, h: float, state: Any) -> Sequence[Move]:
        flow, inverse = (partial(self._glide, h) for h in (h, -h))
        return (GeneralFlow(("position", "direction", "log_speed"), flow, inverse),)

    def _glide(
        self, h: float, c: Coefficients, q: Tensor, u: Tensor, r: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        held, w, atoms = self.constraints, c["1/m"], q.shape[-2]
        d, v = held.differences(q), held.differences(u)

        def pulled(n: Tensor) -> tuple[Tensor, Tensor]:
            ends = d + n * v
            pull = held.forces(held.length_multipliers(c, ends, d, 1.0), d, w, atoms)
            return pull, ends + held.differences(pull)

        def newton(n: Tensor) -> tuple[Tensor, Tensor]:
            pull, ends = pulled(n)
            change = held.forces(held.length_slopes(c, ends, d, v), d, w, atoms)
            excess = (n * n - h * h + (pull * pull).sum((-1, -2), keepdim=True)) / 2
            return n - excess / (n + (pull * change).sum((-1, -2), keepdim=True)), excess

        n = torch.full_like(q[..., :1, :1], h)
        with torch.no_grad():
            for _ in range(SEARCHED):
                n, _ = newton(n)
        n, _ = newton(n)
        n, excess = newton(n)
        enough = torch.finfo(q.dtype).eps ** 0.5 * h * h
        found = excess.detach().abs() <= enough
        if has_values() and not bool(found.all()):
            raise FloatingPointError(
                f"constraints: no chord of the length {abs(h):g} was found along the constraints. "
                "Use a smaller dt: a chord may have about half of the shortest length."
            )
        n = torch.where(found, n, torch.nan)
        pull, _ = pulled(n)
        moved = n * u + pull
        end = q + moved
        along = held.project(c, end, moved) / h
        size = along.square().sum((-1, -2), keepdim=True).sqrt()
        return end, along / size, r + torch.log(size * h / n)[..., 0, 0]


class ConstrainedTurn(ConstrainedTerm):
    """The turn of ESH along constraints, by the projected force P F in place of F."""

    term: Turn

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        q = state.position
        c = self.constraints.coefficients(self.masses, q)
        found = self.constraints.project(c, q, force(self.term.potential, q, t))
        return self.term.rates(state, found)

    def coefficients(self, h: float, state: Any) -> dict[str, Tensor]:
        return self.constraints.coefficients(self.masses, state.position)

    def moves(self, h: float, state: Any) -> Sequence[Move]:
        return self.term.turns(h, self._projecting(Force(), None))
