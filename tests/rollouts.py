"""Runs of several parts of mechanics together, by the numbers that they depend on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import adjsim
from adjsim import meshes
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.potentials import (
    Barrier,
    Box,
    Contact,
    CorotatedLinear,
    Cylinder,
    Inside,
    Moving,
    MovingContact,
    NeoHookean,
    ParticleContact,
    Plane,
    PlaneContact,
    Quadratic,
    Softplus,
    Sphere,
    StVenantKirchhoff,
)
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.signals.actuated import Actuated
from adjsim.potentials.signals.controls import NeuralController, OpenLoop
from adjsim.potentials.signals.signals import CubicSpline, Harmonics, PiecewiseLinear
from adjsim.potentials.solids.bending import HingeBending

CUBE = meshes.box([1.0, 1.0, 1.0], [1, 1, 1])
SHEET = meshes.sheet([1.0, 1.0], [2, 2])
PLATE = meshes.sheet([1.0, 1.0], [2, 2], dim=2)
EDGES = [[0, 1], [1, 3], [3, 2], [2, 0], [0, 3], [1, 2]]
# Between steps: at a node a difference with respect to its time would see a kink.
TIMES = [0.0033, 0.0471, 0.0823, 0.1342]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class Numbers:
    """The leaves of a run, by name. Each is made at its first use."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)

    def __call__(self, name: str, value: Any, spread: float = 0.0) -> Tensor:
        """Return a number, or a tensor of numbers around a value."""
        if name not in self.leaves:
            found = torch.as_tensor(value, dtype=torch.float64).clone()
            found = found + spread * random(*found.shape, seed=len(self.leaves))
            self.leaves[name] = nn.Parameter(found)
        return self.leaves[name]

    def module(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a module, whose parameters are among the numbers."""
        if name not in self.modules:
            made = self.modules[name] = make()
            self.leaves.update({f"{name}.{k}": x for k, x in made.named_parameters()})
        return self.modules[name]


Made = tuple[Mechanics, adjsim.PhaseState]


def each(count: int, value: float) -> Tensor:
    return torch.full((count,), value, dtype=torch.float64)


def rubbing(n: Numbers, friction: bool) -> dict[str, Any]:
    if not friction:
        return {}
    return {"friction": n("friction", 0.4), "smoothing": n("smoothing", 0.2)}


def cube_at(n: Numbers, height: float) -> tuple[Tensor, Tensor]:
    """A cube above the floor, turned and deformed a little, which falls and slides."""
    shift = torch.tensor([0.0, 0.0, height], dtype=torch.float64)
    position = n("position", CUBE.vertices + shift + 0.02 * random(8, 3, seed=3))
    aim = torch.tensor([1.5, -0.5, -2.0], dtype=torch.float64)
    return position, n("velocity", aim + 0.2 * random(8, 3, seed=4))


def thrown(n: Numbers, friction: bool = True) -> Made:
    """A soft cube hits a floor, slides and is damped."""
    mass = CUBE.lumped_mass(n("density", each(6, 1.0), 0.1))
    body = NeoHookean(
        CUBE,
        n("youngs_modulus", each(6, 200.0), 10.0),
        n("poissons_ratio", each(6, 0.3), 0.03),
        rest_stretch=n("rest_stretch", [1.05, 0.95, 1.02]),
    )
    weight = Gravity(mass, n("g", 9.81), direction=n("direction", [0.05, 0.02, 1.0]))
    floor = PlaneContact(
        n("normal", [0.1, 0.05, 1.0]),
        n("offset", 0.02),
        n("stiffness", 600.0),
        n("width", 0.02),
    )
    dynamics = Mechanics(
        body + weight,
        mass,
        contact=floor,
        damping=n("damping", 0.7),
        **rubbing(n, friction),
    )
    position, velocity = cube_at(n, 0.1)
    return dynamics, dynamics.init(position, velocity=velocity)


def barrier(n: Numbers, friction: bool = True) -> Made:
    """A corotated cube that a force presses on a barrier."""
    mass = CUBE.lumped_mass(n("density", 1.0))
    body = CorotatedLinear(CUBE, n("youngs_modulus", 100.0), n("poissons_ratio", 0.3))
    # Gravity by a control: a constant force on all vertices.
    pull = OpenLoop(Harmonics(n("pull", 1.0), n("frequency", 1.2), n("phase", 0.7)))
    floor = Contact(
        Plane(n("normal", [0.1, 0.0, 1.0]), n("offset", 0.03)),
        Barrier(n("stiffness", 100.0), n("distance", 0.2), n("floor", 0.1)),
        index=range(0, 8, 2),
    )
    dynamics = Mechanics(
        body,
        mass,
        contact=floor,
        control=pull,
        damping=n("damping", 0.3),
        **rubbing(n, friction),
    )
    position, velocity = cube_at(n, 0.1)
    return dynamics, dynamics.init(position, velocity=velocity)


def network(n: Numbers, friction: bool = True) -> Made:
    """A square of springs that contract by a gait, on a floor that moves."""
    gait = Harmonics(
        n("amplitude", torch.zeros(2, 6), 0.1),
        n("frequency", [1.0, 2.3]),
        n("phase", torch.zeros(2, 6), 1.0),
        n("offset of gait", [1.0, 1.0, 1.0, 1.0, 1.4, 1.4]),
    )
    body = Actuated(
        adjsim.HarmonicBond(EDGES, n("springs", each(6, 60.0), 5.0), torch.ones(6).double()),
        length=gait,
    )
    path = CubicSpline(
        n("times", TIMES), n("path", torch.zeros(4, 2), 0.1), slopes=n("slopes", 0.3)
    )
    floor = MovingContact(
        Moving(Plane(n("normal", [0.1, 1.0]), n("offset", 0.0)), path),
        Softplus(n("stiffness", each(4, 300.0), 20.0), n("width", each(4, 0.03))),
    )
    mass = n("mass", [1.0, 1.5, 0.8, 2.0])
    dynamics = Mechanics(
        body + Gravity(mass, n("g", 2.0)),
        mass,
        contact=floor,
        damping=n("damping", each(4, 0.5), 0.1),
        **rubbing(n, friction),
    )
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double()
    state = dynamics.init(
        n("position", corners, 0.05), velocity=n("velocity", corners * 0 + 0.5, 0.5)
    )
    return dynamics, state


def shell(n: Numbers, friction: bool = True) -> Made:
    """A shell that a moving ball dents, with a barrier between them."""
    edges, hinges = SHEET.edges(), len(SHEET.hinges())
    lengths = (SHEET.vertices[edges[:, 0]] - SHEET.vertices[edges[:, 1]]).norm(dim=-1)
    body = adjsim.HarmonicBond(edges, n("springs", 30.0), n("lengths", lengths, 0.01))
    body = body + HingeBending(
        SHEET, n("bending", each(hinges, 0.05), 0.005), n("rest angles", each(hinges, 0.2), 0.1)
    )
    path = Harmonics(
        n("amplitude", [[0.1, 0.05, 0.2]]), n("frequency", 1.5), n("phase", [[0.0, 1.0, 0.3]])
    )
    ball = Moving(Sphere(n("center", [0.45, 0.55, -0.55]), n("radius", 0.4)), path)
    contact = MovingContact(ball, Barrier(n("stiffness", 20.0), n("distance", 0.3)))
    dynamics = Mechanics(body, n("mass", 0.3), contact=contact, **rubbing(n, friction))
    state = dynamics.init(
        n("position", SHEET.vertices, 0.02), velocity=n("velocity", SHEET.vertices * 0, 0.2)
    )
    return dynamics, state


def particles(n: Numbers, friction: bool = True) -> Made:
    """Balls of several sizes that collide in a bowl."""
    balls = ParticleContact(n("radii", each(5, 0.3), 0.02), n("stiffness", 300.0), cutoff=0.9)
    bowl = Contact(
        Inside(Sphere(n("center", [0.0, 0.1, 0.6]), n("radius of bowl", 0.8))),
        Softplus(n("stiffness of bowl", 500.0), n("width", 0.05)),
    )
    mass = n("mass", each(5, 1.0), 0.1)
    dynamics = Mechanics(
        balls + Gravity(mass, n("g", 5.0)), mass, contact=bowl, **rubbing(n, friction)
    )
    places = [[0.0, 0.0, 0.1], [0.5, 0.1, 0.3], [-0.4, 0.3, 0.3], [0.0, 0.5, 0.3], [0.1, 0.1, 0.7]]
    state = dynamics.init(
        n("position", places, 0.01), velocity=n("velocity", torch.zeros(5, 3), 0.8)
    )
    return dynamics, state


def driven(n: Numbers, friction: bool = True) -> Made:
    """A plate whose left side follows a path and whose right side is pulled, beside a block."""
    body = StVenantKirchhoff(
        PLATE,
        n("youngs_modulus", each(8, 60.0), 5.0),
        n("poissons_ratio", 0.25),
        rest_stretch=torch.ones(2).double(),
    )
    stretch = PiecewiseLinear(n("times of stretch", TIMES), n("stretch", torch.ones(4, 2), 0.05))
    left = [0, 1, 2]
    path = CubicSpline(
        n("times of path", TIMES), n("path", PLATE.vertices[left] + torch.zeros(4, 3, 2), 0.03)
    )
    pull = OpenLoop(
        PiecewiseLinear(n("times", TIMES), n("pull", torch.zeros(4, 3, 2), 2.0)), [6, 7, 8]
    )
    block = Contact(
        Box(n("block", [0.6, -0.55]), n("sizes", [0.5, 0.5])),
        Softplus(n("stiffness", 300.0), n("width", 0.05)),
    )
    dynamics = Mechanics(
        Actuated(body, rest_stretch=stretch),
        n("mass", each(9, 0.2), 0.02),
        contact=block,
        control=pull,
        prescribed=(left, path),
        damping=n("damping", 0.5),
        **rubbing(n, friction),
    )
    free = torch.ones(9, 1)
    free[left] = 0
    begin = dynamics.prescribed.placed(path(0.0), PLATE.vertices)
    position = torch.where(free > 0, n("position", PLATE.vertices, 0.02), begin)
    velocity = n("velocity", torch.tensor([0.5, -0.5]).double().expand(9, 2), 0.3)
    return dynamics, dynamics.init(position, velocity=free * velocity)


def feedback(n: Numbers, friction: bool = True) -> Made:
    """A spring of two balls on a log, steered by a network and damped by its stiffness."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(13, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    control = NeuralController(n.module("network", make), index=[1], scale=n("scale", 2.0))
    log = Contact(
        Cylinder(n("center", [0.0, 0.0, 0.0]), n("axis", [0.1, 1.0, 0.0]), n("radius", 0.5)),
        Quadratic(n("stiffness", 400.0)),
    )
    body = adjsim.HarmonicBond([[0, 1]], n("springs", 40.0), n("length", 0.5))
    mass = n("mass", [1.0, 0.7])
    dynamics = Mechanics(
        body + Gravity(mass, n("g", 9.81)),
        mass,
        contact=log,
        control=control,
        damping=n("damping", 0.3),
        stiffness_damping=n("stiffness_damping", 2e-3),
        **rubbing(n, friction),
    )
    state = dynamics.init(
        n("position", [[0.1, 0.0, 0.48], [-0.1, 0.5, 0.52]]),
        velocity=n("velocity", [[1.0, 0.3, -1.0], [0.8, 0.1, -1.2]]),
    )
    return dynamics, state


# The systems of the reference numbers.


def bounce(n: Numbers) -> Made:
    m = n("mass", 1.0)
    contact = Contact(Plane([1.0]), Quadratic(n("stiffness", 1e4)))
    dynamics = Mechanics(Gravity(m, n("g", 9.81)), m, contact=contact)
    return dynamics, dynamics.init(n("height", [[1.0]]))


def barrier_ball(n: Numbers) -> Made:
    m = n("mass", 1.0)
    contact = Contact(Plane([1.0]), Barrier(n("stiffness", 1e4), n("distance", 0.02)))
    dynamics = Mechanics(Gravity(m, n("g", 9.81)), m, contact=contact)
    return dynamics, dynamics.init(n("height", [[0.02]]), velocity=n("velocity", [[-2.0]]))


def block(n: Numbers, v0: float, mu: float, width: float, tangent: float) -> Made:
    angle = torch.atan(n("tangent", tangent))
    g, m = n("g", 9.81), n("mass", 1.0)
    weight = Gravity(m, g, direction=torch.stack([-torch.sin(angle), torch.cos(angle)]))
    contact = Contact(Plane([0.0, 1.0], n("offset", 0.0)), Quadratic(n("stiffness", 1e4)))
    options = {"friction": n("friction", mu), "smoothing": n("smoothing", width)}
    dynamics = Mechanics(weight, m, contact=contact, **options)
    depth = 9.81 * math.cos(math.atan(tangent)) / 1e4
    return dynamics, dynamics.init(
        n("position", [[0.0, -depth]]), velocity=n("velocity", [[v0, 0.0]])
    )


def balls(n: Numbers) -> Made:
    m = n("mass", [1.3, 1.3])
    dynamics = Mechanics(ParticleContact(n("radius", 0.2), n("stiffness", 1e4)), m)
    state = dynamics.init(
        n("position", [[-0.21, 0.1], [0.2, 0.1]]),
        velocity=n("velocity", [[2.0, 0.0], [-1.0, 0.0]]),
    )
    return dynamics, state


@dataclass(frozen=True)
class System:
    """How a system is made of its numbers, and its step and number of steps."""

    make: Callable[..., Made]
    dt: float
    steps: int


SYSTEMS = {
    "thrown": System(thrown, 0.008, 24),
    "barrier": System(barrier, 0.006, 16),
    "network": System(network, 0.008, 24),
    "shell": System(shell, 0.008, 24),
    "particles": System(particles, 0.008, 24),
    "driven": System(driven, 0.008, 24),
    "feedback": System(feedback, 0.008, 16),
    "bounce": System(bounce, 0.005, 200),
    "barrier ball": System(barrier_ball, 2e-5, 200),
    "slide": System(lambda n: block(n, 2.0, 0.3, 0.05, 0.0), 0.01, 75),
    "incline": System(lambda n: block(n, 0.006, 0.5, 0.01, 0.3), 5e-4, 60),
    "two balls": System(balls, 5e-4, 60),
}
