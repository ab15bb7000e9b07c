"""Elastic solids: energies of meshes by the deformation of each element."""
