"""The dynamics and the solvers of the command line, by their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adjsim.dynamics import (
    Andersen,
    Berendsen,
    Bussi,
    Dynamics,
    GeneralizedLangevin,
    Hamiltonian,
    Langevin,
    NoseHooverChain,
    OverdampedLangevin,
    VelocityRescale,
)
from adjsim.io.systems import System
from adjsim.solvers import EulerMaruyama, LeimkuhlerMatthews, Splitting
from adjsim.solvers.base import SteppingSolver

SCHEMES = {
    "hamiltonian": "BAB",
    "nose-hoover": "NBABN",
    "langevin": "BAOAB",
    "generalised": "BAGAB",
    "overdamped": "LeimkuhlerMatthews",
    "bussi": "BABR",
    "andersen": "BABC",
    "berendsen": "BABR",
    "velocity-rescale": "BABR",
}
# The dynamics whose steps have no inverse, and those that continuous solvers cannot take.
NO_INVERSE = ("overdamped", "andersen", "velocity-rescale")
NO_EQUATION = ("bussi", "andersen", "velocity-rescale")
OVERDAMPED = {"EulerMaruyama": EulerMaruyama, "LeimkuhlerMatthews": LeimkuhlerMatthews}


@dataclass
class BathSettings:
    """The numbers of a thermostat, in the units of the command line."""

    temperature: float
    tau: float
    friction: float
    rates: list[float]
    strengths: list[float]


def model_of(system: System, dynamics: str, bath: BathSettings) -> Dynamics[Any]:
    def number(value: float | list[float] | torch.Tensor, unit: float) -> nn.Parameter:
        return nn.Parameter(torch.as_tensor(value, dtype=torch.float64) * unit)

    potential, mass, time = system.potential, system.mass, system.time
    if dynamics == "hamiltonian":
        return Hamiltonian(potential, mass)
    kT = number(bath.temperature, system.temperature)
    atoms, dim = system.position.shape
    dof = atoms * dim - dim
    relaxing = {"nose-hoover": NoseHooverChain, "bussi": Bussi, "berendsen": Berendsen}
    if dynamics in relaxing:
        return relaxing[dynamics](potential, mass, kT, number(bath.tau, time), dof=dof)
    if dynamics == "velocity-rescale":
        return VelocityRescale(potential, mass, kT, dof=dof)
    if dynamics == "andersen":
        return Andersen(potential, mass, kT, bath.friction / time)
    if dynamics == "langevin":
        return Langevin(potential, mass, kT, number(bath.friction, 1 / time))
    if dynamics == "generalised":
        return GeneralizedLangevin(
            potential, mass, kT, number(bath.rates, 1 / time), number(bath.strengths, 1 / time**2)
        )
    common = mass if len(mass.unique()) > 1 else mass.unique()[0]
    return OverdampedLangevin(potential, kT, number(common * bath.friction, 1 / time))


def solver_of(scheme: str, dynamics: str, dt: float, exact: bool) -> SteppingSolver:
    if dynamics != "overdamped":
        return Splitting(scheme, dt, exact=exact)
    if exact:
        raise ValueError(
            "--exact needs invertible steps, and the steps of overdamped have no inverse; choose "
            "another dynamics."
        )
    if scheme not in OVERDAMPED:
        raise ValueError(
            f"scheme '{scheme}' is not for overdamped; choose from {', '.join(OVERDAMPED)}."
        )
    return OVERDAMPED[scheme](dt)
