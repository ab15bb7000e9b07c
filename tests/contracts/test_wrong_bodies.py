"""Wrong input of mechanics is one clear line, before the run or with the step."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim import Mechanics, Splitting, meshes, minimize, simulate
from adjsim.meshes import Mesh
from adjsim.potentials import Barrier, Contact, NeoHookean, Plane, PlaneContact, Quadratic
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.signals.controls import OpenLoop
from adjsim.potentials.signals.signals import CubicSpline, PiecewiseLinear

CUBE = meshes.box([1.0, 1.0, 1.0], [1, 1, 1])
NAN, INF = float("nan"), float("inf")
CORNERS = [[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]


def body() -> NeoHookean:
    return NeoHookean(CUBE, 100.0, 0.3)


def floor() -> PlaneContact:
    return PlaneContact([0.0, 0, 1], -0.5, 100.0, 0.05)


def pulled(*shape: int) -> Mechanics:
    return Mechanics(body(), control=OpenLoop(PiecewiseLinear([0.0, 1.0], torch.ones(2, *shape))))


def held(*shape: int) -> Mechanics:
    path = PiecewiseLinear([0.0, 1.0], torch.zeros(2, *shape))
    return Mechanics(body(), prescribed=([0, 1], path))


def run(dynamics: Mechanics, dt: float = 0.01, steps: int = 10, **start):
    begin = dynamics.init(CUBE.vertices, **start)
    solver = Splitting(dynamics.scheme, dt)
    with torch.no_grad():
        return simulate(dynamics, begin, [0.0, steps * dt], solver=solver)


def falls_through():
    contact = Contact(Plane([0.0, 0, 1], -0.1), Barrier(0.01, 0.05))
    fast = torch.tensor([0.0, 0, -4]).expand(8, 3)
    return run(Mechanics(body(), contact=contact), velocity=fast)


WRONG = {
    "orphan": (lambda: Mesh(CORNERS, [[0, 1, 2, 3]]), "vertex 4 belongs to no element"),
    "inverted": (
        lambda: Mesh(CORNERS, [[0, 1, 2, 3], [1, 3, 2, 4]]),
        "tetrahedron 1 is inverted: its volume is -0.33.*Exchange two",
    ),
    "modulus": (lambda: NeoHookean(CUBE, NAN, 0.3), "youngs_modulus is NaN"),
    "ratio": (lambda: NeoHookean(CUBE, 1.0, NAN), "poissons_ratio is NaN"),
    "half": (lambda: NeoHookean(CUBE, 1.0, 0.5), "both excluded; got 0.5.*has 0.49"),
    "density": (lambda: CUBE.lumped_mass(NAN), "density must be positive and finite; got nan"),
    "infinite density": (lambda: CUBE.lumped_mass(INF), "density must be .* finite; got inf"),
    "infinite modulus": (lambda: NeoHookean(CUBE, INF, 0.3), "youngs_modulus must be finite"),
    "infinite gravity": (lambda: Gravity(1.0, INF), "g must be finite; got inf"),
    "friction": (lambda: Mechanics(body(), friction=0.3), "friction needs a surface: give a c"),
    "infinite friction": (
        lambda: Mechanics(body(), contact=floor(), friction=INF),
        "friction must be finite; got inf",
    ),
    "infinite damping": (lambda: Mechanics(body(), damping=INF), "damping must be finite"),
    "step": (lambda: run(Mechanics(body()), 1.0), r"dt = 1 is too long.*above 0.157 \(2 / omega"),
    "velocity": (
        lambda: run(Mechanics(body()), velocity=torch.full((8, 3), NAN)),
        "momentum has NaN or infinite entries at the start",
    ),
    "penetration": (falls_through, r"vertex \d is at the gap -0.0.*in step 3 \(t = 0.03\)"),
    "start behind": (
        lambda: run(Mechanics(body(), contact=Contact(Plane([0.0, 0, 1], 0.5), Barrier(1, 0.1)))),
        "vertex 0 is at the gap -0.5 from the surface",
    ),
    "vertices": (
        lambda: run(Mechanics(body(), contact=Contact(Plane([0.0, 0, 1]), Quadratic([1.0, 2.0])))),
        "stiffness has 2 entries and position 8 vertices",
    ),
    "times": (lambda: CubicSpline([0.0, 1, 1], [0.0, 1, 2]), "increasing numbers; times"),
    "values": (lambda: PiecewiseLinear([0.0, 1], [0.0, NAN]), "values is NaN"),
    "count": (lambda: PiecewiseLinear([0.0, 1], [0.0, 1, 2]), r"values must be \(2, ...\)"),
    "control": (lambda: run(pulled(5, 3)), r"a control must be \(8, 3\).*got shape \(5, 3\)"),
    "turned control": (lambda: run(pulled(3, 8)), r"got shape \(3, 8\)"),
    "path": (lambda: run(held(3, 3)), r"path of prescribed vertices must be \(2, 3\).*\(3, 3\)"),
    "statics": (lambda: minimize(body(), CUBE.vertices * NAN), "position has NaN or infinite"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_clear_line(name):
    call, says = WRONG[name]
    with pytest.raises(ValueError, match=says) as found:
        call()
    assert "\n" not in str(found.value)


def test_a_body_that_falls_has_no_minimum():
    """Nothing holds it, so the minimiser would follow it for ever."""
    with pytest.raises(RuntimeError, match="there is no minimum: a force of"):
        minimize(adjsim.HarmonicBond([[0, 1]], 1.0, 1.0) + Gravity(1.0, 1.0), torch.eye(2, 3))
