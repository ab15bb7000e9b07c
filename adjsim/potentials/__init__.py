"""Energy functions and their forces."""

from adjsim.potentials.analytic import AsymmetricDoubleWell, DoubleWell, Harmonic, MullerBrown
from adjsim.potentials.base import ForceField, Potential, SeparablePotential, force
from adjsim.potentials.pair import LennardJones, PairPotential

__all__ = [
    "AsymmetricDoubleWell",
    "DoubleWell",
    "ForceField",
    "Harmonic",
    "LennardJones",
    "MullerBrown",
    "PairPotential",
    "Potential",
    "SeparablePotential",
    "force",
]
