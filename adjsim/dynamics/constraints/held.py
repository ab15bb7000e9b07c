"""The forms of terms that constraints hold."""

from __future__ import annotations

from typing import Any, NamedTuple

from adjsim.dynamics.bodies import Bodies
from adjsim.dynamics.constraints.diffusion import ConstrainedDiffusion
from adjsim.dynamics.constraints.distances import DistanceConstraints
from adjsim.dynamics.constraints.glide import ConstrainedGlide, ConstrainedTurn
from adjsim.dynamics.constraints.memory import ConstrainedBath
from adjsim.dynamics.constraints.terms import (
    ConstrainedCollisions,
    ConstrainedStream,
    ConstrainedTerm,
)
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.terms import Term


class Held(NamedTuple):
    """Constraints and masses, by which terms are held."""

    constraints: DistanceConstraints
    masses: Masses

    @property
    def bodies(self) -> Bodies:
        return self.constraints.bodies

    def streaming(self, term: Term[Any]) -> Term[Any]:
        return ConstrainedStream(term, *self)

    def projecting(self, term: Term[Any]) -> Term[Any]:
        return ConstrainedTerm(term, *self)

    def remembering(self, term: Any) -> Term[Any]:
        return ConstrainedBath(term, *self)

    def colliding(self, term: Term[Any]) -> Term[Any]:
        return ConstrainedCollisions(term, *self)

    def diffusing(self, term: Any) -> Term[Any]:
        return ConstrainedDiffusion(term, *self)

    def gliding(self, term: Term[Any]) -> Term[Any]:
        return ConstrainedGlide(term, *self)

    def turning(self, term: Any) -> Term[Any]:
        return ConstrainedTurn(term, *self)
