"""Equations of motion, as sums of terms."""

from adjsim.core.refusal import Refusal
from adjsim.core.state import PhaseState
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.density import Canonical, CanonicalPositions, StationaryDensity
from adjsim.dynamics.esh import ESH, ESHState, canonical_weights
from adjsim.dynamics.fields.base import FieldState
from adjsim.dynamics.fields.ode import ODE
from adjsim.dynamics.fields.sde import SDE
from adjsim.dynamics.hamiltonian import Hamiltonian
from adjsim.dynamics.heat import HeatLimit
from adjsim.dynamics.massive import MassiveDynamics
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.dynamics.moves import GeneralFlow, Scale, Shear
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
from adjsim.dynamics.terms import Term
from adjsim.dynamics.thermostats.andersen import Andersen
from adjsim.dynamics.thermostats.berendsen import Berendsen
from adjsim.dynamics.thermostats.bussi import Bussi
from adjsim.dynamics.thermostats.gle import GeneralizedLangevin, MemoryState
from adjsim.dynamics.thermostats.langevin import Langevin
from adjsim.dynamics.thermostats.nose_hoover import ChainState, NoseHooverChain
from adjsim.dynamics.thermostats.overdamped import OverdampedLangevin, PositionState
from adjsim.dynamics.thermostats.velocity_rescale import VelocityRescale

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
    "GeneralFlow",
    "GeneralizedLangevin",
    "Hamiltonian",
    "HeatLimit",
    "Langevin",
    "MassiveDynamics",
    "Mechanics",
    "MemoryState",
    "NoseHooverChain",
    "OverdampedLangevin",
    "PhaseState",
    "PositionState",
    "Random",
    "Refusal",
    "Scale",
    "Shear",
    "StationaryDensity",
    "Term",
    "Time",
    "VelocityRescale",
    "canonical_weights",
    "largest_stable_step",
]
