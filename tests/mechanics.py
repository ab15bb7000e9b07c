"""A small body with every term of mechanics, whose numbers are all trainable."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import adjsim
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.potentials import Moving, MovingContact, Plane, PlaneContact, Softplus
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.signals.controls import Controller
from tests.problems import parameter, vector

EDGES = [[0, 1], [1, 3], [3, 2], [2, 0], [0, 3], [1, 2]]


class Follower(Controller):
    """A nonlinear feedback with a target: it reads time, positions and velocities."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.target = vector(0.7, 0.4), parameter(0.3)

    def forward(self, t, position: Tensor, velocity: Tensor) -> Tensor:
        away = position - self.target * torch.sin(torch.as_tensor(t, dtype=torch.float64) + 1.0)
        return -self.gain[0] * torch.tanh(velocity) - self.gain[1] * away * velocity**2


class Path(nn.Module):
    """Circles around two points, which differ in their phase."""

    def __init__(self) -> None:
        super().__init__()
        self.radius, self.rate = parameter(0.2), parameter(1.5)
        self.register_buffer("centre", torch.tensor([[0.0, 0.3], [1.0, 0.3]], dtype=torch.float64))

    def forward(self, t) -> Tensor:
        phase = self.centre.new_tensor([0.0, 0.5])
        turn = self.rate * torch.as_tensor(t, dtype=torch.float64).to(phase) + phase
        round_ = torch.stack([torch.cos(turn), torch.sin(turn)], -1)
        return self.centre + self.radius * round_


class Slide(nn.Module):
    """The path of a conveyor, which accelerates."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = parameter(0.4)

    def forward(self, t) -> Tensor:
        t = torch.as_tensor(t, dtype=torch.float64).to(self.speed)
        return torch.stack([self.speed * t + 0.1 * t**2, 0.05 * torch.sin(t)])

    def rate(self, t) -> Tensor:
        t = torch.as_tensor(t, dtype=torch.float64).to(self.speed)
        return torch.stack([self.speed + 0.2 * t, 0.05 * torch.cos(t)])


def body(mass: Tensor | float = 1.0) -> nn.Module:
    """A square of springs with weight."""
    springs = adjsim.HarmonicBond(EDGES, parameter(30.0), vector(1, 1, 1, 1, 1.4, 1.4))
    return springs + Gravity(mass, parameter(1.5))


def floor() -> PlaneContact:
    """A floor that reaches up to the lower vertices."""
    return PlaneContact(vector(0.1, 1.0), parameter(-0.05), parameter(40.0), parameter(0.05))


def moving_floor() -> MovingContact:
    plane = Plane([0.1, 1.0], parameter(-0.05))
    return MovingContact(Moving(plane, Slide()), Softplus(parameter(40.0), parameter(0.05)))


def start() -> tuple[Tensor, Tensor]:
    """Four vertices near the floor, in motion: position and momentum."""
    generator = torch.Generator().manual_seed(3)
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double()
    noise = torch.randn(2, 4, 2, generator=generator, dtype=torch.float64)
    return corners + 0.05 * noise[0], 0.5 * noise[1] + torch.tensor([0.8, 0.0], dtype=torch.float64)


def masses() -> nn.Parameter:
    return vector(1.0, 1.5, 0.8, 2.0)


def sliding(**options) -> Mechanics:
    """The body on the floor, with friction."""
    m = masses()
    given = {"contact": floor(), "friction": parameter(0.4), "smoothing": parameter(0.3)}
    return Mechanics(body(m), m, **{**given, **options})


BODIES = {
    "friction": sliding,
    "friction-vertices": lambda: sliding(friction=vector(0.4, 0.2, 0.3, 0.5)),
    "friction-moving": lambda: sliding(contact=moving_floor()),
    "viscous": lambda: Mechanics(body(), masses(), damping=vector(0.3, 0.5, 0.2, 0.7)),
    "rayleigh": lambda: Mechanics(
        body(), masses(), damping=parameter(0.3), stiffness_damping=parameter(0.01)
    ),
    "feedback": lambda: Mechanics(body(), masses(), control=Follower()),
    "prescribed": lambda: Mechanics(body(), masses(), prescribed=([3, 1], Path())),
    "everything": lambda: sliding(
        damping=parameter(0.3), stiffness_damping=parameter(0.01), control=Follower()
    ),
}


def start_of(dynamics: Mechanics, position: Tensor, momentum: Tensor, t: float = 0.0):
    """A start that agrees with the path of prescribed vertices, through which it depends on it."""
    if dynamics.prescribed is None:
        return dynamics.init(position, momentum)
    index = dynamics.prescribed.vertices.index
    mask = dynamics.prescribed.mask(position.shape[-2])
    target = dynamics.prescribed.placed(dynamics.prescribed.path(t), position)
    return dynamics.init(
        torch.where(mask, target, position),
        torch.where(mask, torch.zeros_like(momentum), momentum) if len(index) else momentum,
    )
