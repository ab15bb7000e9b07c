"""Elastic solids: energies of meshes by the deformation of each element."""

from adjsim.potentials.solids.base import ElasticPotential, Material
from adjsim.potentials.solids.corotated import CorotatedLinear
from adjsim.potentials.solids.neo_hookean import NeoHookean
from adjsim.potentials.solids.st_venant_kirchhoff import StVenantKirchhoff

__all__ = ["CorotatedLinear", "ElasticPotential", "Material", "NeoHookean", "StVenantKirchhoff"]
