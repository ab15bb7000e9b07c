"""Terms of constrained dynamics: RATTLE drifts, and projected kicks and noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.core.refusal import Refusal
from adjsim.dynamics.constraints.distances import DistanceConstraints
from adjsim.dynamics.constraints.exact import Drift
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import GeneralFlow, Move, Shear
from adjsim.dynamics.sources import Coefficients, Function, Random, Source
from adjsim.dynamics.terms import Term


class ConstrainedTerm(Term[Any]):
    """A term whose changes of momenta are projected by ``P = 1 - G^T (G M^-1 G^T)^-1 G M^-1``.

    The projector depends on positions, so shears of momenta stay shears. Scales of all momenta of a
    system by one factor leave momenta tangent.
    """

    no_equation = Refusal("its constraints hold at the ends of RATTLE steps")

    def __init__(self, term: Term[Any], constraints: DistanceConstraints, masses: Masses) -> None:
        self.term, self.constraints, self.masses = term, constraints, masses
        self.draws = term.draws

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        return self._projected(state, self.term.drift(t, state))

    def diffusion(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        """Return the amplitude of the noise before it is projected."""
        return self.term.diffusion(t, state)

    def coefficients(self, h: float, state: Any) -> dict[str, Tensor]:
        common = self.constraints.coefficients(self.masses, state.momentum)
        return common | self.term.coefficients(h, state)

    def moves(self, h: float, state: Any) -> Sequence[Move]:
        return [
            Shear("momentum", self._projecting(move.source, move.coefficient))
            if isinstance(move, Shear) and move.field == "momentum"
            else move
            for move in self.term.moves(h, state)
        ]

    def _projecting(self, source: Source, coefficient: str | None) -> Function:
        projected = _Projected(self.constraints, coefficient)
        return Function(projected, ("position",), (source,))

    def _projected(self, state: Any, rates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if "momentum" not in rates:
            return dict(rates)
        c = self.constraints.coefficients(self.masses, state.momentum)
        return {**rates, "momentum": self.constraints.project(c, state.position, rates["momentum"])}


class ConstrainedStream(ConstrainedTerm):
    """Streaming along the constraints, by the drift of RATTLE over a time h::

        p_half = p + G(q)^T x        q' = q + h M^-1 p_half      |q'_i - q'_j| = L gives x
        p' = p_half - G(q')^T y                                  G(q') M^-1 p' = 0 gives y

    It is symplectic and its own inverse under p -> -p: with y from the lengths at q, and x from the
    momenta at q, the same equations lead from (q', p') to (q, p). See Andersen, J. Comput. Phys.
    52, 24 (1983), and Leimkuhler and Matthews, Proc. R. Soc. A 472, 20160138 (2016).
    """

    advances_time = True

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        """Compute ``dq/dt = p/m`` and ``dp/dt = -G^T (G M^-1 G^T)^-1 |v_i - v_j|^2``."""
        held = self.constraints
        c, d = held.coefficients(self.masses, state.momentum), held.differences(state.position)
        x = held.reactions(c, d, state.momentum)
        pull = -held.forces(x, d, c["1/m"], state.position.shape[-2])
        return {**self.term.drift(t, state), "momentum": pull}

    def moves(self, h: float, state: Any) -> Sequence[Move]:
        flow, inverse = (partial(self.constraints.drift, h=time) for time in (h, -h))
        fields = "position", "momentum"
        return (Drift(fields, flow, inverse, constraints=self.constraints, h=h),)


class ConstrainedCollisions(ConstrainedTerm):
    """Collisions of molecules, of which the atoms that constraints join collide together::

        p' = P sqrt(m kT) xi    for the atoms of a molecule that collides

    P commutes with the choice of molecules. It does not with one of atoms: then the projection of
    the momenta after a collision would have too little kinetic energy. A molecule collides where
    its first atom does.
    """

    def coefficients(self, h: float, state: Any) -> dict[str, Tensor]:
        first = self.constraints.first_atoms(state.position.shape[-2])
        return {**super().coefficients(h, state), "first": first}

    def moves(self, h: float, state: Any) -> Sequence[Move]:
        def collide(c: Coefficients, choice: Tensor, drawn: Tensor, p: Tensor) -> tuple[Tensor]:
            return (torch.where(choice[..., c["first"], :1] < c["threshold"], drawn, p),)

        reads = Random(0), self._projecting(Random(1), "thermal")
        lost = Refusal("it loses the momenta before collisions")
        return (GeneralFlow(("momentum",), collide, None, reads, lost),)


class _Projected(NamedTuple):
    """A value, times a coefficient, projected to the momenta that constraints allow."""

    constraints: DistanceConstraints
    coefficient: str | None

    def __call__(self, c: Coefficients, q: Tensor, value: Tensor) -> Tensor:
        scaled = value if self.coefficient is None else c[self.coefficient] * value
        return self.constraints.project(c, q, scaled)
