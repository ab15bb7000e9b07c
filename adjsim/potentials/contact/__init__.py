"""Contact: penalties of the gaps between vertices and surfaces, and between particles."""

from adjsim.potentials.contact.base import Contact, MovingContact, PlaneContact, SurfaceContact
from adjsim.potentials.contact.particles import ParticleContact
from adjsim.potentials.contact.penalties import Barrier, Penalty, Quadratic, Softplus
from adjsim.potentials.contact.surfaces import (
    Box,
    Cylinder,
    Inside,
    Moving,
    Plane,
    Sphere,
    Surface,
)

__all__ = [
    "Barrier",
    "Box",
    "Contact",
    "Cylinder",
    "Inside",
    "Moving",
    "MovingContact",
    "ParticleContact",
    "Penalty",
    "Plane",
    "PlaneContact",
    "Quadratic",
    "Softplus",
    "Sphere",
    "Surface",
    "SurfaceContact",
]
