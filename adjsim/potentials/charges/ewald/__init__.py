"""Ewald's sum for periodic point charges, direct and with a mesh, and for dispersion."""

from adjsim.potentials.charges.ewald.direct import Ewald
from adjsim.potentials.charges.ewald.dispersion import LennardJonesMesh
from adjsim.potentials.charges.ewald.particle_mesh import ParticleMeshEwald

__all__ = ["Ewald", "LennardJonesMesh", "ParticleMeshEwald"]
