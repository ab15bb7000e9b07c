"""Elastic solids: energies of meshes by the deformation of each element."""

from adjsim.potentials.elastic.base import ElasticPotential, Material
from adjsim.potentials.elastic.neo_hookean import NeoHookean

__all__ = ["ElasticPotential", "Material", "NeoHookean"]
