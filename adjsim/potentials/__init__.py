"""Potentials: energy functions and their forces."""

from adjsim.potentials.analytic import AsymmetricDoubleWell, DoubleWell, Harmonic, MullerBrown
from adjsim.potentials.base import ForceField, Potential, SeparablePotential, force
from adjsim.potentials.noble import NOBLE_GASES, LennardJonesMixture, NobleGas
from adjsim.potentials.pair import LennardJones, PairPotential

__all__ = [
    "NOBLE_GASES",
    "AsymmetricDoubleWell",
    "DoubleWell",
    "ForceField",
    "Harmonic",
    "LennardJones",
    "LennardJonesMixture",
    "MullerBrown",
    "NobleGas",
    "PairPotential",
    "Potential",
    "SeparablePotential",
    "force",
]
