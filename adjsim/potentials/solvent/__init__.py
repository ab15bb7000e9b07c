"""Implicit solvent."""

from adjsim.potentials.solvent.generalized_born import GeneralizedBorn

__all__ = ["GeneralizedBorn"]
