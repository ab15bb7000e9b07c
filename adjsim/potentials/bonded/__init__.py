"""Bonded terms of molecules, over lists of atoms."""

from adjsim.potentials.bonded.angles import CosineAngle, HarmonicAngle, UreyBradley
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.bonds import HarmonicBond, MorseBond
from adjsim.potentials.bonded.pairs import ExplicitPairs, ScaledPairs
from adjsim.potentials.bonded.restraints import FlatBottomRestraint, PositionRestraint
from adjsim.potentials.bonded.torsions import HarmonicImproper, PeriodicTorsion, RyckaertBellemans

__all__ = [
    "BondedPotential",
    "CosineAngle",
    "ExplicitPairs",
    "FlatBottomRestraint",
    "HarmonicAngle",
    "HarmonicBond",
    "HarmonicImproper",
    "MorseBond",
    "PeriodicTorsion",
    "PositionRestraint",
    "RyckaertBellemans",
    "ScaledPairs",
    "UreyBradley",
]
