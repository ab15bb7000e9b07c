"""Implicit solvents."""

from adjsim.potentials.solvent.custom import CustomSolvent, Stage
from adjsim.potentials.solvent.generalized_born import GeneralizedBorn
from adjsim.potentials.solvent.necks import Necks

__all__ = ["CustomSolvent", "GeneralizedBorn", "Necks", "Stage"]
