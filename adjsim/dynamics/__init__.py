"""Equations of motion, as sums of terms."""

from adjsim._state import PhaseState
from adjsim.dynamics.base import Dynamics, MassiveDynamics, Term
from adjsim.dynamics.couplings import Field, ForceOf, Function, Map, Scale, Shear
from adjsim.dynamics.esh import ESH, ESHState, canonical_weights
from adjsim.dynamics.hamiltonian import Hamiltonian
from adjsim.dynamics.nose_hoover import ChainState, NoseHooverChain

__all__ = [
    "ESH",
    "ChainState",
    "Dynamics",
    "ESHState",
    "Field",
    "ForceOf",
    "Function",
    "Hamiltonian",
    "Map",
    "MassiveDynamics",
    "NoseHooverChain",
    "PhaseState",
    "Scale",
    "Shear",
    "Term",
    "canonical_weights",
]
