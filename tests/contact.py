"""Contact of points with every surface by every penalty, with parameters that require grad."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from adjsim.potentials import (
    Barrier,
    Box,
    Contact,
    Cylinder,
    Inside,
    Moving,
    MovingContact,
    Plane,
    Quadratic,
    Softplus,
    Sphere,
    Surface,
)
from tests.problems import parameter, vector

# In and out of each surface, none nearer than 0.005 to a point where a penalty has a kink.
POINTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
CENTER = (0.1, -0.2, 0.3)

SURFACES = {
    "plane": lambda: Plane(vector(0.2, -0.3, 1.0), parameter(-0.4)),
    "sphere": lambda: Sphere(vector(*CENTER), parameter(0.8)),
    "cylinder": lambda: Cylinder(vector(*CENTER), vector(0.3, 0.5, 1.0), parameter(0.7)),
    "box": lambda: Box(vector(*CENTER), vector(0.6, 0.8, 0.7)),
    "bowl": lambda: Inside(Sphere(vector(*CENTER), parameter(1.2))),
}
PENALTIES = {
    "quadratic": lambda: Quadratic(parameter(30.0)),
    "softplus": lambda: Softplus(parameter(30.0), parameter(0.2)),
    "barrier": lambda: Barrier(parameter(30.0), parameter(0.4)),
    "barrier, floor": lambda: Barrier(parameter(30.0), parameter(0.4), parameter(0.05)),
}
EVERY = list(itertools.product(SURFACES, PENALTIES))
# Each surface once and each penalty once.
SHORT = [
    ("plane", "quadratic"),
    ("sphere", "barrier"),
    ("cylinder", "softplus"),
    ("box", "softplus"),
    ("bowl", "barrier, floor"),
]


class Swing(nn.Module):
    """A path: a vector times a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.width = vector(0.3, -0.2, 0.5)
        self.speed = parameter(3.0)

    def forward(self, t) -> Tensor:
        return self.width * torch.sin(self.speed * t)

    def rate(self, t) -> Tensor:
        return self.width * self.speed * torch.cos(self.speed * t)


def contact(surface: str, penalty: str, index=None) -> Contact:
    return Contact(SURFACES[surface](), PENALTIES[penalty](), index=index)


def moving(surface: str, penalty: str, path=None, index=None) -> MovingContact:
    found: Surface = SURFACES[surface]()
    path = Swing() if path is None else path
    return MovingContact(Moving(found, path), PENALTIES[penalty](), index=index)
