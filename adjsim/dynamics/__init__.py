"""Equations of motion, as sums of terms."""

from adjsim._state import PhaseState
from adjsim.dynamics.andersen import Andersen
from adjsim.dynamics.base import Dynamics, MassiveDynamics, Term
from adjsim.dynamics.berendsen import Berendsen
from adjsim.dynamics.bussi import Bussi
from adjsim.dynamics.couplings import Map, Scale, Shear
from adjsim.dynamics.density import Canonical, CanonicalPositions, StationaryDensity
from adjsim.dynamics.esh import ESH, ESHState, canonical_weights
from adjsim.dynamics.gle import GeneralizedLangevin, MemoryState
from adjsim.dynamics.hamiltonian import Hamiltonian
from adjsim.dynamics.heat import HeatLimit
from adjsim.dynamics.langevin import Langevin
from adjsim.dynamics.mechanics import Mechanics
from adjsim.dynamics.nose_hoover import ChainState, NoseHooverChain
from adjsim.dynamics.ode import ODE
from adjsim.dynamics.overdamped import OverdampedLangevin, PositionState
from adjsim.dynamics.sde import SDE
from adjsim.dynamics.sources import (
    Coefficient,
    Combination,
    Field,
    Force,
    Function,
    FunctionOfTime,
    Random,
    Time,
)
from adjsim.dynamics.stable_step import largest_stable_step
from adjsim.dynamics.vector_field import FieldState
from adjsim.dynamics.velocity_rescale import VelocityRescale

__all__ = [
    "ESH",
    "ODE",
    "SDE",
    "Andersen",
    "Berendsen",
    "Bussi",
    "Canonical",
    "CanonicalPositions",
    "ChainState",
    "Coefficient",
    "Combination",
    "Dynamics",
    "ESHState",
    "Field",
    "FieldState",
    "Force",
    "Function",
    "FunctionOfTime",
    "GeneralizedLangevin",
    "Hamiltonian",
    "HeatLimit",
    "Langevin",
    "Map",
    "MassiveDynamics",
    "Mechanics",
    "MemoryState",
    "NoseHooverChain",
    "OverdampedLangevin",
    "PhaseState",
    "PositionState",
    "Random",
    "Scale",
    "Shear",
    "StationaryDensity",
    "Term",
    "Time",
    "VelocityRescale",
    "canonical_weights",
    "largest_stable_step",
]
