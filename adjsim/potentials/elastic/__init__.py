"""Elastic solids: energies of meshes by the deformation of each element."""

from adjsim.potentials.elastic.base import ElasticPotential, Material
from adjsim.potentials.elastic.corotated import CorotatedLinear
from adjsim.potentials.elastic.neo_hookean import NeoHookean
from adjsim.potentials.elastic.st_venant_kirchhoff import StVenantKirchhoff

__all__ = ["CorotatedLinear", "ElasticPotential", "Material", "NeoHookean", "StVenantKirchhoff"]
