"""Equations of motion, as sums of terms."""

from adjsim.core.refusal import Refusal as Refusal
from adjsim.core.state import FieldState, PhaseState
from adjsim.dynamics.base import Dynamics as Dynamics
from adjsim.dynamics.clip import Clip
from adjsim.dynamics.constraints.constrained import Constrained
from adjsim.dynamics.constraints.distances import DistanceConstraints
from adjsim.dynamics.density import (
    Canonical as Canonical,
    CanonicalPositions as CanonicalPositions,
    StationaryDensity as StationaryDensity,
)
from adjsim.dynamics.esh import ESH, ESHState, canonical_weights as canonical_weights
from adjsim.dynamics.fields.ode import ODE
from adjsim.dynamics.fields.sde import SDE
from adjsim.dynamics.masses import HeatLimit as HeatLimit
from adjsim.dynamics.massive import Hamiltonian, MassiveDynamics as MassiveDynamics
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.dynamics.moves import GeneralFlow as GeneralFlow, Scale as Scale, Shear as Shear
from adjsim.dynamics.pressure.langevin_piston import LangevinPiston
from adjsim.dynamics.pressure.nose_hoover_piston import NoseHooverPiston, PistonChainState
from adjsim.dynamics.pressure.terms import PistonState
from adjsim.dynamics.sources import (
    Coefficient as Coefficient,
    Combination as Combination,
    Field as Field,
    Force as Force,
    Function as Function,
    FunctionOfTime as FunctionOfTime,
    Random as Random,
    Time as Time,
)
from adjsim.dynamics.stable_step import largest_stable_step as largest_stable_step
from adjsim.dynamics.terms import Term as Term
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
    "ChainState",
    "Clip",
    "Constrained",
    "DistanceConstraints",
    "ESHState",
    "FieldState",
    "GeneralizedLangevin",
    "Hamiltonian",
    "Langevin",
    "LangevinPiston",
    "Mechanics",
    "MemoryState",
    "NoseHooverChain",
    "NoseHooverPiston",
    "OverdampedLangevin",
    "PhaseState",
    "PistonChainState",
    "PistonState",
    "PositionState",
    "VelocityRescale",
]
