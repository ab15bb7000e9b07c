"""adjsim: gradients through physical simulation."""

from adjsim._state import PhaseState
from adjsim._trajectory import Final, TimeAverage, Trajectory
from adjsim.adjoints import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    CompileError,
    DirectAdjoint,
    ReconstructionError,
    ReversibleAdjoint,
)
from adjsim.compare import Comparison, compare
from adjsim.dynamics import (
    ESH,
    ChainState,
    ESHState,
    GeneralizedLangevin,
    Hamiltonian,
    Langevin,
    MemoryState,
    NoseHooverChain,
    OverdampedLangevin,
    PositionState,
)
from adjsim.estimators import (
    REINFORCE,
    FiniteDifference,
    ForwardSensitivity,
    Girsanov,
    GradientEstimate,
    ImplicitDifferentiation,
    Pathwise,
    Reweighting,
    ScoreFunction,
    Simulation,
)
from adjsim.ivp import GrazingError, OdeResult, solve_ivp
from adjsim.observables import (
    first_passage_time,
    kinetic_temperature,
    mean_squared_displacement,
    mean_with_error,
    pair_distances,
    radial_distribution,
    radius_of_gyration,
    velocity_autocorrelation,
)
from adjsim.potentials import (
    AsymmetricDoubleWell,
    DoubleWell,
    ForceField,
    Harmonic,
    LennardJones,
    LennardJonesMixture,
    MullerBrown,
    force,
)
from adjsim.simulation import simulate
from adjsim.solvers import (
    BAOAB,
    EulerMaruyama,
    InstabilityError,
    LeimkuhlerMatthews,
    ODESolver,
    SDESolver,
    Splitting,
    VelocityVerlet,
)

__version__ = "0.1.0"

# Grouped by layer, as the documentation is.
__all__ = [  # noqa: RUF022
    # potentials
    "AsymmetricDoubleWell",
    "DoubleWell",
    "ForceField",
    "Harmonic",
    "LennardJones",
    "LennardJonesMixture",
    "MullerBrown",
    "force",
    # observables
    "Final",
    "TimeAverage",
    "kinetic_temperature",
    "first_passage_time",
    "mean_squared_displacement",
    "mean_with_error",
    "pair_distances",
    "radial_distribution",
    "radius_of_gyration",
    "velocity_autocorrelation",
    # dynamics and their states
    "ESH",
    "ChainState",
    "ESHState",
    "GeneralizedLangevin",
    "Hamiltonian",
    "Langevin",
    "MemoryState",
    "NoseHooverChain",
    "OverdampedLangevin",
    "PhaseState",
    "PositionState",
    # solvers
    "BAOAB",
    "EulerMaruyama",
    "InstabilityError",
    "LeimkuhlerMatthews",
    "ODESolver",
    "SDESolver",
    "Splitting",
    "VelocityVerlet",
    # adjoints
    "BacksolveAdjoint",
    "CheckpointAdjoint",
    "DirectAdjoint",
    "CompileError",
    "ReconstructionError",
    "ReversibleAdjoint",
    # simulation
    "Trajectory",
    "simulate",
    # estimators
    "FiniteDifference",
    "ForwardSensitivity",
    "Girsanov",
    "GradientEstimate",
    "ImplicitDifferentiation",
    "Pathwise",
    "REINFORCE",
    "Reweighting",
    "ScoreFunction",
    "Simulation",
    # initial value problems
    "GrazingError",
    "OdeResult",
    "solve_ivp",
    # comparison
    "Comparison",
    "compare",
]
