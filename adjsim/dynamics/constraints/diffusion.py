"""Diffusion along constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from adjsim.core.refusal import Refusal
from adjsim.dynamics.constraints.distances import DistanceConstraints
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import GeneralFlow, Move
from adjsim.dynamics.sources import Coefficients, Force, Source
from adjsim.dynamics.thermostats.overdamped import Diffuse
from adjsim.potentials.base import force


class ConstrainedDiffusion(Diffuse):
    """Diffusion along constraints, by projected steps of Euler and Maruyama::

        u  = q + dt Z^-1 F(q) + sqrt(2 kT dt) Z^-1/2 xi        Z = diag(friction)
        q' = u + Z^-1 G(q)^T x                                 |q'_i - q'_j| = L gives x

    In the coordinates y = Z^1/2 q the step is projected along the normals at its start. For dt to
    zero it becomes the diffusion that P, the orthogonal projector to the constraints, makes of
    Brownian motion (in the sense of Stratonovich)::

        dy = -P grad U dt + sqrt(2 kT) P o dW

    Its stationary density is exp(-U/kT) on the surface measure of the metric Z. By the coarea
    formula this is, up to a factor of the lengths, the measure ::

        exp(-U(q)/kT) det(G Z^-1 G^T)^1/2 prod_k delta(|q_i - q_j| - L_k) dq

    Constrained dynamics with momenta has the density with the masses M in place of Z, which is
    another one unless the ratio of the determinants is constant: where frictions are proportional
    to masses, in a rigid molecule, or for a constraint by itself. Stiff bonds have the density
    without the determinant. Averages are of first order in dt. See Ciccotti, Lelievre and
    Vanden-Eijnden, Comm. Pure Appl. Math. 61, 371 (2008).
    """

    no_equation = Refusal("its constraints hold at the ends of steps")
    no_averaged_noise: ClassVar[Refusal | None] = Refusal(
        "constraints project the noise at each position, which ends the second order of averages. "
        "Use EulerMaruyama(dt), or for second order Constrained(Langevin(...)) with BAOAB, masses "
        "in place of frictions, the step sqrt(2 dt), and a friction that is large against 1/dt"
    )

    def __init__(self, term: Diffuse, constraints: DistanceConstraints, masses: Masses) -> None:
        super().__init__(term.potential, term.kT, term.friction)
        self.constraints, self.masses = constraints, masses

    def drift(self, t: Any, state: Any) -> Mapping[str, Tensor]:
        """Compute ``Z^-1 P F``, the drift in the sense of Stratonovich."""
        c = self.constraints.coefficients(self.masses, state.position)
        found = force(self.potential, state.position, t)
        return {"position": c["1/m"] * self.constraints.project(c, state.position, found)}

    def moves(self, h: float, state: Any) -> NoReturn:
        raise TypeError("constrained diffusion has no flow to split: use EulerMaruyama(dt).")

    def euler_coefficients(self, dt: float, state: Any) -> dict[str, Tensor]:
        common = self.constraints.coefficients(self.masses, state.position)
        return common | super().euler_coefficients(dt, state)

    def euler_moves(self, noise: Source) -> Sequence[Move]:
        def step(c: Coefficients, force: Tensor, xi: Tensor, q: Tensor) -> tuple[Tensor]:
            moved = q + c["mobility"] * force + c["noise"] * xi
            return (self.constraints.at_lengths(c, moved, q),)

        return (GeneralFlow(("position",), step, None, (Force(), noise)),)
