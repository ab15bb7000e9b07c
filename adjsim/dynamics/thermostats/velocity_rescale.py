"""Velocity rescaling: the kinetic energy is set once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.refusal import Refusal
from adjsim.core.state import PhaseState
from adjsim.dynamics.moves import Move
from adjsim.dynamics.terms import Term
from adjsim.dynamics.thermostats.base import Rescale, Rescaling, rescaling


class SetKineticEnergy(Rescale):
    """The rescaling, R, which sets the kinetic energy K of each system to its mean::

        p' = sqrt(K_0/K) p,      K_0 = dof kT/2

    It acts once for each R in the scheme, whatever the step, so it has no rate: its drift is empty.
    All momenta of one direction have one image, so there is no inverse. The product removes the
    part of a cotangent along the momentum.
    """

    no_equation = Refusal(
        "it sets the kinetic energy once a step, and has no rate in continuous time"
    )

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        return {}

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        target = self.thermostat.target(state.position)
        return {**super().coefficients(h, state), "target": target}

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        lost = Refusal("it loses the kinetic energy before the step")
        return (rescaling(lambda c, T: torch.sqrt(c["target"] / T), None, irreversible=lost),)


class VelocityRescale(Rescaling[PhaseState]):
    """Newton's equations, with the kinetic energy of each system set to dof kT/2 once a step.

    Terms: A (stream), B (kick), R (:class:`SetKineticEnergy`). Schemes: "BABR"; "RBABR" starts at
    the temperature too. After R the kinetic energy is exactly ``dof kT/2``.

    Use it to bring a system to a temperature. It does not sample the canonical distribution: the
    kinetic energy does not fluctuate, and even where the motion is ergodic, positions are
    distributed as at the temperature ``kT dof/(dof - 1)``. It also moves energy from fast into slow
    motions, such as that of the whole system (the flying ice cube; Harvey, Tan and Cheatham, J.
    Comput. Chem. 19, 726 (1998)). For averages use :class:`~adjsim.Bussi`. It conserves no energy.
    Steps cannot be undone: gradients come from :class:`~adjsim.CheckpointAdjoint` or
    :class:`~adjsim.DirectAdjoint`. Momenta that are all zero stay zero.

    Args:
        potential, mass: see :class:`~adjsim.dynamics.MassiveDynamics`.
        kT: temperature, energy; one number.
        dof: degrees of freedom of one system; see :class:`~adjsim.NoseHooverChain`.

    Raises:
        ValueError: a dof above atoms x dim, in ``init`` or ``simulate``.
        TypeError: in ``simulate``, :class:`~adjsim.ReversibleAdjoint`, ``exact=True`` or a
            continuous solver.
    """

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {**self.motion, "R": SetKineticEnergy(self)}
