"""Linear response of an elastic body at rest, against beam theory: sag, frequency, bending.

Poisson's ratio is zero, so that an axial load does not stretch the body across, and the answers of
the one-dimensional theory are those of the solid.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim import Mechanics, meshes, minimize, simulate
from adjsim.meshes import Mesh
from adjsim.potentials import CorotatedLinear, NeoHookean, StVenantKirchhoff
from adjsim.potentials.base import force_vjp
from adjsim.potentials.gravity import Gravity
from tests.problems import parameter, slow_but

MODULUS, DENSITY, LENGTH = 1e5, 1000.0, 2.0
MATERIALS = [NeoHookean, StVenantKirchhoff, CorotatedLinear]


def column(cells: int) -> tuple[Mesh, Tensor]:
    """A column that hangs along the first axis, and which of its vertices hold it."""
    mesh = meshes.box([LENGTH, 0.4, 0.4], [cells, 2, 2])
    return mesh, mesh.vertices[:, 0] == 0


def shares_of_end(mesh: Mesh) -> Tensor:
    """The share of each vertex in the area of the end, which is zero elsewhere."""
    end = mesh.vertices[:, 0].max()
    faces = mesh.surface()
    faces = faces[(mesh.vertices[faces][..., 0] == end).all(-1)]
    sides = mesh.vertices[faces[:, 1:]] - mesh.vertices[faces[:, :1]]
    area = torch.linalg.cross(sides[:, 0], sides[:, 1]).norm(dim=-1)
    found = torch.zeros(len(mesh.vertices), dtype=torch.float64)
    found.index_add_(0, faces.flatten(), area.repeat_interleave(3))
    return found / found.sum()


@pytest.mark.parametrize("material", slow_but(lambda material: material is NeoHookean, MATERIALS))
def test_a_column_sags_by_its_own_weight(material):
    """By rho g L^2/2E, also its derivatives.

    The mean over the end of a linear body is exact on any mesh: the response to a pull on the end
    is a uniform strain, which linear elements have, and lumped masses have the centre of the
    column. The strain of 1e-5 leaves terms of this relative size.
    """
    mesh, held = column(4)
    modulus, density, g = parameter(MODULUS), parameter(DENSITY), parameter(1e-3)
    weight = Gravity(mesh.lumped_mass(density), g, direction=[-1.0, 0.0, 0.0])
    found = minimize(material(mesh, modulus, 0.0) + weight, mesh.vertices, fixed=held)
    sag = (shares_of_end(mesh) * (found - mesh.vertices)[:, 0]).sum()
    exact = DENSITY * 1e-3 * LENGTH**2 / (2 * MODULUS)
    assert sag.item() == pytest.approx(exact, rel=1e-4)
    for slope, number, power in zip(
        torch.autograd.grad(sag, [modulus, density, g]),
        (MODULUS, DENSITY, 1e-3),
        (-1, 1, 1),
        strict=True,
    ):
        assert float(slope) == pytest.approx(power * exact / number, rel=1e-4)


class Column:
    """A clamped column at rest: its stiffness and the roots of its masses, by free coordinates."""

    def __init__(self, cells: int) -> None:
        self.mesh, held = column(cells)
        self.free, count = ~held, int((~held).sum()) * 3
        units = torch.zeros(count, *self.mesh.vertices.shape, dtype=torch.float64)
        units[:, self.free] = torch.eye(count, dtype=torch.float64).reshape(count, -1, 3)
        body = NeoHookean(self.mesh, MODULUS, 0.0)
        _, pullback = force_vjp(body, self.mesh.vertices.expand_as(units), [])
        self.stiffness = -pullback(units)[0][:, self.free].reshape(count, count).numpy()
        masses = self.mesh.lumped_mass(DENSITY)
        self.mass = torch.where(held, torch.inf, masses)
        self.root = masses[self.free].sqrt().repeat_interleave(3).numpy()
        # The mode of a rod that is held at one end.
        x = self.mesh.vertices[self.free]
        sine = torch.sin(math.pi * x[:, :1] / (2 * LENGTH))
        self.sine = torch.cat([sine, torch.zeros(len(x), 2).to(x)], 1).flatten().numpy()

    def axial_mode(self) -> tuple[float, Tensor]:
        """The frequency and the displacements of the mode that is nearest to the sine."""
        squares, modes = np.linalg.eigh(self.stiffness / self.root[:, None] / self.root)
        overlap = np.abs(modes.T @ (self.root * self.sine))
        k = int(overlap.argmax())
        # Its cells are not symmetric, which mixes a mode of bending in.
        assert overlap[k] > 0.98 * np.linalg.norm(overlap)
        found = torch.zeros_like(self.mesh.vertices)
        found[self.free] = torch.from_numpy(modes[:, k] / self.root).reshape(-1, 3)
        return float(np.sqrt(squares[k])), found


ROD = math.pi / (2 * LENGTH) * math.sqrt(MODULUS / DENSITY)


@pytest.mark.parametrize("cells", [4, 8])
def test_the_frequency_of_a_column_is_that_of_a_rod(cells):
    made = Column(cells)
    w, _ = made.axial_mode()
    assert w == pytest.approx(ROD, rel=0.01)
    # A sine is a mode of a chain of lumped masses, with the frequency lowered by sin(x)/x.
    stiff = made.sine @ made.stiffness @ made.sine
    heavy = ((made.root * made.sine) ** 2).sum()
    half = math.pi / (4 * cells)
    assert math.sqrt(stiff / heavy) == pytest.approx(ROD * math.sin(half) / half, rel=1e-10)


@pytest.mark.slow
def test_a_run_swings_at_this_frequency():
    """A cosine in time, and its derivative with respect to the modulus, -A t w/2E sin(w t)."""
    made, modulus = Column(4), parameter(MODULUS)
    w, mode = made.axial_mode()
    dynamics = Mechanics(NeoHookean(made.mesh, modulus, 0.0), made.mass)
    size = 1e-6 / float(mode.abs().max())
    start = dynamics.init(made.mesh.vertices + size * mode)
    # An eighth, a quarter and half a period.
    dt = 2 * math.pi / w / 120
    times = [k * dt for k in (0, 15, 30, 60)]
    run = simulate(dynamics, start, times, solver=adjsim.VelocityVerlet(dt))
    found = ((run.position - made.mesh.vertices) * mode).sum((1, 2)) / (size * (mode**2).sum())
    for k, t in enumerate(times):
        # Steps turn the phase by (w dt)^2/24 = 1e-4 of itself, and strains are about 1e-6.
        assert found[k].item() == pytest.approx(math.cos(w * t), abs=1e-3)
        (slope,) = torch.autograd.grad(found[k], modulus, retain_graph=True)
        expected = -w * t * math.sin(w * t) / 2
        assert MODULUS * float(slope) == pytest.approx(expected, abs=2e-3)


class Load(nn.Module):
    """Constant forces on vertices."""

    def __init__(self, force: Tensor) -> None:
        super().__init__()
        self.register_buffer("force", force)

    def forward(self, position: Tensor) -> Tensor:
        return -(self.force * position).sum((-1, -2))


def deflection(cells: int) -> float:
    """The deflection of the end of a cantilever, L/h = 4, as a share of that of Timoshenko.

    Args:
        cells: over the height.
    """
    length, width, load = 4.0, 0.25, 1e-4
    mesh = meshes.box([length, width, 1.0], [4 * cells, 1, cells])
    shares = shares_of_end(mesh)
    pull = torch.zeros_like(mesh.vertices)
    pull[:, 2] = -load * shares
    potential = NeoHookean(mesh, MODULUS, 0.0) + Load(pull)
    held = mesh.vertices[:, 0] == 0
    with torch.no_grad():
        found = minimize(potential, mesh.vertices, fixed=held)
    bending = load * length**3 / (3 * MODULUS * width / 12)
    shear = load * length / (5 / 6 * MODULUS / 2 * width)
    return -float(((found - mesh.vertices)[:, 2] * shares).sum()) / (bending + shear)


def test_a_cantilever_is_too_stiff_and_less_so_on_finer_meshes():
    """Linear tetrahedra lock in bending."""
    coarse, fine = deflection(2), deflection(4)
    assert 0.5 < coarse < fine < 1


@pytest.mark.slow
def test_a_cantilever_approaches_the_beam_of_timoshenko():
    """PL^3/3EI + PL/((5/6) G A), from below; linear elements are of second order in their size."""
    shares = [deflection(cells) for cells in (2, 4, 8)]
    assert shares == sorted(shares)
    assert shares[-1] < 1
    assert (4 * shares[2] - shares[1]) / 3 == pytest.approx(1, abs=0.03)
