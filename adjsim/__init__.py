"""adjsim: gradients through physical simulation. One physics, every gradient."""

# dynamics
from adjsim._state import PhaseState
from adjsim._trajectory import TimeAverage, Trajectory
from adjsim.adjoints import BacksolveAdjoint, CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint
from adjsim.dynamics import ESH, Hamiltonian, NoseHooverChain, canonical_weights
from adjsim.potentials import AsymmetricDoubleWell, DoubleWell, Harmonic, LennardJones, MullerBrown, force
from adjsim.simulation import simulate
from adjsim.solvers import ODESolver, Splitting, VelocityVerlet
