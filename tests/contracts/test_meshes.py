"""Meshes: shapes, masses, neighbours, files and the errors that name a wrong element."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import meshio
import numpy as np
import pytest
import torch
from torch import nn

from adjsim import meshes
from adjsim.core.bounds import Between, Positive
from adjsim.meshes import Mesh
from adjsim.potentials import NeoHookean

CORNERS = torch.tensor(
    [[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], dtype=torch.float64
)
TETRAHEDRA = [[0, 1, 2, 3], [1, 2, 3, 4]]
BOX = meshes.box([2.0, 1.0, 0.5], [3, 2, 2])


def test_a_box_has_its_volume_and_its_mass():
    assert len(BOX.tetrahedra) == 6 * 3 * 2 * 2
    # All tetrahedra of a grid have the volume of a sixth of a cell, up to rounding of corners.
    torch.testing.assert_close(BOX.volumes(), torch.full((72,), 1 / 72), rtol=1e-13, atol=0)
    assert float(BOX.lumped_mass(3.0).sum()) == pytest.approx(3.0, rel=1e-14)
    assert len(BOX.vertices) == 4 * 3 * 3


def test_neighbouring_cells_fit():
    """Each face inside belongs to two tetrahedra: the surface is that of the box, and closed."""
    surface = Mesh(BOX.vertices[BOX.surface().unique()], triangles=_renumbered(BOX.surface()))
    assert float(surface.areas().sum()) == pytest.approx(2 * (2 + 1 + 0.5), rel=1e-13)
    assert len(surface.triangles) == 2 * 2 * (3 * 2 + 3 * 2 + 2 * 2)
    # A closed surface has no boundary: each edge has two triangles of opposite orientation.
    assert len(surface.hinges()) == len(surface.edges()) == 3 * len(surface.triangles) // 2
    # Gauss: the outward normals give the volume.
    a, b, c = surface.vertices[surface.triangles].unbind(1)
    assert float((torch.linalg.cross(a, b) * c).sum() / 6) == pytest.approx(1.0, rel=1e-13)


def _renumbered(triangles):
    return triangles.unique(return_inverse=True)[1]


def test_masses_are_differentiable_in_density():
    density = nn.Parameter(torch.linspace(1.0, 2.0, 72, dtype=torch.float64))
    mass = BOX.lumped_mass(density)
    total = float((density.detach() * BOX.volumes()).sum())
    assert float(mass.detach().sum()) == pytest.approx(total, rel=1e-14)
    weight = torch.linspace(0.0, 1.0, 36, dtype=torch.float64)
    (grad,) = torch.autograd.grad((mass * weight).sum(), density)
    expected = BOX.volumes() * weight[BOX.tetrahedra].mean(-1)
    torch.testing.assert_close(grad, expected, rtol=1e-13, atol=0)
    number = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    (grad,) = torch.autograd.grad(BOX.lumped_mass(number).sum(), number)
    assert float(grad) == pytest.approx(1.0, rel=1e-13)


@pytest.mark.parametrize("dim", [2, 3])
def test_sheets(dim):
    sheet = meshes.sheet([2.0, 1.5], [4, 3], dim=dim)
    assert sheet.vertices.shape == (20, dim)
    assert float(sheet.areas().sum()) == pytest.approx(3.0, rel=1e-14)
    assert float(sheet.lumped_mass(2.0).sum()) == pytest.approx(6.0, rel=1e-14)
    # Euler: vertices - edges + triangles is 1 for a disc; 14 edges are on the boundary.
    assert 20 - len(sheet.edges()) + 24 == 1
    assert len(sheet.hinges()) == len(sheet.edges()) - 14
    if dim == 3:
        a, b = (sheet.vertices[sheet.triangles[:, k]] for k in (1, 2))
        first = sheet.vertices[sheet.triangles[:, 0]]
        assert bool((torch.linalg.cross(a - first, b - first)[:, 2] > 0).all())


def test_hinges_are_chains_over_the_shared_edge():
    sheet = Mesh(CORNERS[:4], triangles=[[0, 1, 2], [1, 3, 2]])
    ((i, j, k, tip),) = sheet.hinges().tolist()
    assert {i, tip} == {0, 3}
    assert {j, k} == {1, 2}
    triangles = {frozenset(t) for t in sheet.triangles.tolist()}
    assert {frozenset((i, j, k)), frozenset((tip, k, j))} == triangles
    assert BOX.edges().shape[1] == 2


def test_the_edges_of_two_tetrahedra():
    mesh = Mesh(CORNERS, TETRAHEDRA)
    pairs = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [1, 4], [2, 3], [2, 4], [3, 4]]
    assert mesh.edges().tolist() == pairs
    assert len(mesh.surface()) == 6
    assert repr(mesh) == "Mesh(5 vertices, 2 tetrahedra)"


WRONG = [
    (lambda: Mesh(CORNERS, [[0, 1, 2, 3], [1, 3, 2, 4]]), "tetrahedron 1 is inverted.*-0.3333"),
    (
        lambda: Mesh(
            torch.cat([CORNERS, CORNERS[:1] + CORNERS[1:2] / 2]), [*TETRAHEDRA, [0, 5, 1, 2]]
        ),
        "tetrahedron 2 is degenerate: its volume is 0",
    ),
    (lambda: Mesh(CORNERS, [[0, 1, 2, 3]]), "vertex 4 belongs to no element"),
    (lambda: Mesh(CORNERS, [[0, 1, 2, 3], [1, 2, 3, 9]]), "tetrahedron 1 is .*has 5 vertices"),
    (lambda: Mesh(CORNERS, [[0, 1, 2, 3], [1, 2, 2, 4]]), "tetrahedron 1 names a vertex twice"),
    (lambda: Mesh(CORNERS, [[0, 1, 2]]), r"tetrahedra must be \(tetrahedra, 4\).*\(1, 3\)"),
    (lambda: Mesh(CORNERS), "needs tetrahedra or triangles"),
    (lambda: Mesh(CORNERS[:, :2], TETRAHEDRA), "tetrahedra need vertices of dim 3"),
    (lambda: Mesh(CORNERS[:, 0], TETRAHEDRA), r"\(vertices, 3\) or"),
    (lambda: Mesh(CORNERS / 0, TETRAHEDRA), "vertex 0 is not finite"),
    (lambda: Mesh(nn.Parameter(CORNERS), TETRAHEDRA), "cannot require grad.*rest_stretch"),
    (lambda: Mesh(CORNERS[:3, :2], triangles=[[0, 2, 1]]), "triangle 0 is inverted: its area"),
    (
        lambda: Mesh([[0.0, 0, 0], [1, 1, 1], [2, 2, 2]], triangles=[[0, 1, 2]]),
        "triangle 0 is degenerate",
    ),
    (lambda: BOX.lumped_mass([1.0, 2.0]), r"density must be a number or \(72,\)"),
    (lambda: BOX.lumped_mass(-1.0), "density must be positive and finite; got -1"),
    (lambda: BOX.areas(), "no areas"),
    (lambda: BOX.hinges(), "no hinges"),
    (lambda: meshes.sheet([1, 1], [1, 1]).volumes(), "no volumes"),
    (lambda: meshes.sheet([1, 1], [1, 1]).surface(), "is a surface"),
    (
        lambda: Mesh(CORNERS, triangles=[[0, 1, 2], [0, 1, 3], [1, 0, 4]]).hinges(),
        r"edge \[0, 1\] has 3 triangles",
    ),
    (
        lambda: Mesh(CORNERS[:4], triangles=[[0, 1, 2], [1, 2, 3]]).hinges(),
        "opposite orientations",
    ),
    (lambda: meshes.box([1, 1], [1, 1, 1]), "3 lengths and 3 numbers of cells; got 2 and 3"),
    (lambda: meshes.box([1, 1, 1], [1, 0, 1]), "must be positive"),
    (lambda: meshes.box([1, 1, 1], [1, 1.5, 1]), "must be an integer"),
    (lambda: meshes.sheet([1, 1], [1, 1], dim=4), "dim must be 2 or 3"),
]


@pytest.mark.parametrize(("make", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_meshes_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# Files.


@pytest.mark.parametrize("suffix", [".vtu", ".vtk", ".msh"])
def test_files_keep_mesh_and_fields(tmp_path: Path, suffix):
    path = tmp_path / "deep" / f"body{suffix}"
    height = BOX.vertices[:, 2].sqrt()
    modulus = torch.linspace(1.0, 2.0, 72)
    meshes.write(path, BOX, point_data={"height": height}, cell_data={"modulus": modulus})
    found = meshes.read(path)
    # Formats of text have 16 digits.
    torch.testing.assert_close(found.vertices, BOX.vertices, rtol=1e-15, atol=0)
    assert torch.equal(found.tetrahedra, BOX.tetrahedra)
    raw = meshio.read(path, "gmsh" if suffix == ".msh" else None)
    np.testing.assert_allclose(raw.point_data["height"].ravel(), height, rtol=1e-15)
    np.testing.assert_allclose(raw.cell_data["modulus"][0].ravel(), modulus, rtol=1e-15)
    assert [x.name for x in path.parent.iterdir()] == [path.name]


# Formats that are not written for tetrahedra, and what their refusal says: surfaces (most drop or
# cut tetrahedra without a word), Well-known Text, a picture, one whose reader of meshio needs the
# number format in the name of the file, and the pair of files of TetGen.
NO_TETRAHEDRA = {
    ".obj": "only contain triangle",
    ".off": "does not keep the tetrahedra",
    ".ply": "does not keep the tetrahedra",
    ".stl": "does not keep the tetrahedra",
    ".wkt": "does not keep the tetrahedra",
    ".svg": "flat 2D",
    ".ugrid": "cannot read what it has written",
    ".node": "pair of files",
    ".ele": "pair of files",
}


@pytest.mark.parametrize("suffix", sorted(meshio.extension_to_filetypes))
def test_every_format_keeps_tetrahedra_or_refuses_them(tmp_path: Path, suffix):
    path = tmp_path / f"body{suffix}"
    # Coordinates that no format has by chance.
    mesh = Mesh(BOX.vertices / 3 + 0.1, BOX.tetrahedra)
    if suffix in NO_TETRAHEDRA:
        with pytest.raises(ValueError, match=NO_TETRAHEDRA[suffix]):
            meshes.write(path, mesh)
        assert not list(tmp_path.iterdir())
        return
    meshes.write(path, mesh)
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    found = meshes.read(path)
    # Permas has 6 digits and Nastran fields of 16 characters; the others all of float64.
    digits = {".post": 1e-6, ".dato": 1e-6, ".post.gz": 1e-6, ".dato.gz": 1e-6}
    digits |= dict.fromkeys((".bdf", ".fem", ".nas"), 1e-10)
    error = float((found.vertices - mesh.vertices).abs().max())
    assert error <= digits.get(suffix, 1e-14), error
    assert torch.equal(found.tetrahedra, mesh.tetrahedra)


@pytest.mark.parametrize("suffix", [".obj", ".off", ".ply", ".stl", ".wkt", ".vtu", ".xdmf"])
def test_surface_formats_keep_triangles(tmp_path: Path, suffix):
    path = tmp_path / f"sheet{suffix}"
    sheet = meshes.sheet([1.0, 2.0], [3, 2])
    meshes.write(path, sheet)
    # STL has float32.
    torch.testing.assert_close(meshes.read(path).areas(), sheet.areas(), rtol=1e-6, atol=0)


def test_triangles_are_kept_or_refused(tmp_path: Path):
    """These formats drop triangles, or make them something else."""
    sheet = meshes.sheet([1.0, 2.0], [3, 2])
    for suffix in (".cgns", ".ele", ".f3grid", ".node", ".su2", ".svg", ".ugrid"):
        with pytest.raises(ValueError, match=r"use \.vtu"):
            meshes.write(tmp_path / f"sheet{suffix}", sheet)
    assert not list(tmp_path.iterdir())


def test_files_of_tetgen_are_read(tmp_path: Path):
    meshio.write(tmp_path / "body.node", meshio.Mesh(BOX.vertices, [("tetra", BOX.tetrahedra)]))
    for suffix in (".node", ".ele"):
        found = meshes.read(tmp_path / f"body{suffix}")
        torch.testing.assert_close(found.vertices, BOX.vertices, rtol=1e-15, atol=0)
        assert torch.equal(found.tetrahedra, BOX.tetrahedra)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ModuleNotFoundError, match=r"'body.med' needs h5py.*adjsim\[meshes\]"):
        meshes.write(tmp_path / "body.med", BOX)
    assert not list(tmp_path.iterdir())


def test_planar_surfaces_are_written_with_a_third_coordinate(tmp_path: Path):
    sheet = meshes.sheet([1.0, 2.0], [2, 2], dim=2)
    meshes.write(tmp_path / "sheet.vtu", sheet)
    found = meshes.read(str(tmp_path / "sheet.vtu"))
    assert torch.equal(
        Mesh(found.vertices[:, :2], triangles=found.triangles).areas(), sheet.areas()
    )


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    path = tmp_path / "body.vtu"
    meshes.write(path, BOX)
    before = path.read_bytes()

    def fails(name, *arguments, **options):
        if isinstance(name, Path):
            name.write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr(meshio, "write", fails)
    with pytest.raises(OSError, match="no space"):
        meshes.write(path, BOX)
    monkeypatch.setattr(meshio.xdmf.TimeSeriesWriter, "write_data", fails)
    for name in ("run.pvd", "run.xdmf"):
        with pytest.raises(OSError, match="no space"):
            meshes.write_series(tmp_path / name, BOX, [0.0], BOX.vertices[None])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_time_series(tmp_path: Path):
    path, times = tmp_path / "run.pvd", [0.0, 0.1, 0.25]
    moved = torch.stack([BOX.vertices + t for t in times])
    speed = torch.stack([torch.full((36,), t) for t in times])
    # The second series replaces the first, with its frames.
    for _ in range(2):
        meshes.write_series(path, BOX, times, moved, point_data={"speed": speed})
    assert len(list(tmp_path.iterdir())) == 2
    rows = list(ElementTree.parse(path).iter("DataSet"))
    assert [float(row.get("timestep")) for row in rows] == times
    for row, x, v in zip(rows, moved, speed, strict=True):
        frame = meshio.read(tmp_path / row.get("file"))
        np.testing.assert_array_equal(frame.points, x)
        np.testing.assert_array_equal(frame.point_data["speed"], v)


def test_a_time_series_in_one_file(tmp_path: Path):
    path, times = tmp_path / "run.xdmf", [0.0, 0.1, 0.25]
    moved = torch.stack([BOX.vertices / 3 + t for t in times])
    speed = torch.stack([torch.full((36,), t) for t in times])
    for _ in range(2):
        meshes.write_series(path, BOX, times, moved, point_data={"speed": speed})
    assert list(tmp_path.iterdir()) == [path]
    with meshio.xdmf.TimeSeriesReader(path) as reader:
        points, cells = reader.read_points_cells()
        np.testing.assert_array_equal(points, BOX.vertices)
        np.testing.assert_array_equal(cells[0].data, BOX.tetrahedra)
        assert reader.num_steps == 3
        for number, (t, x) in enumerate(zip(times, moved, strict=True)):
            time, fields, _ = reader.read_data(number)
            assert time == t
            np.testing.assert_allclose(points + fields["displacement"], x, rtol=0, atol=1e-15)
            np.testing.assert_array_equal(fields["speed"], speed[number])
    with pytest.raises(ValueError, match="'displacement', the field in which"):
        meshes.write_series(path, BOX, times, moved, point_data={"displacement": moved})


def test_wrong_files_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no file"):
        meshes.read(tmp_path / "none.vtu")
    broken = tmp_path / "broken.msh"
    broken.write_text("nothing\n")
    with pytest.raises(ValueError, match="cannot read"):
        meshes.read(broken)
    cube = meshio.Mesh(np.eye(8, 3), [("hexahedron", np.arange(8)[None])])
    meshio.write(tmp_path / "cube.vtu", cube)
    with pytest.raises(ValueError, match="'hexahedron'"):
        meshes.read(tmp_path / "cube.vtu")
    meshio.write(tmp_path / "line.vtu", meshio.Mesh(np.eye(2, 3), [("line", [[0, 1]])]))
    with pytest.raises(ValueError, match="no tetrahedra and no triangles"):
        meshes.read(tmp_path / "line.vtu")
    inverted = meshio.Mesh(CORNERS.numpy(), [("tetra", [[0, 1, 2, 3], [1, 3, 2, 4]])])
    meshio.write(tmp_path / "inverted.vtu", inverted)
    with pytest.raises(ValueError, match="tetrahedron 1 is inverted"):
        meshes.read(tmp_path / "inverted.vtu")
    height = BOX.vertices[:, 2]
    both = Mesh(BOX.vertices, BOX.tetrahedra, BOX.surface())
    for write, says in (
        (lambda: meshes.write(tmp_path / "a.inp", BOX, point_data={"x": height}), "not keep x"),
        (lambda: meshes.write(tmp_path / "a.png", BOX), r"no format for 'a.png'.*\.vtu"),
        (lambda: meshes.write(tmp_path / "a.vtu", BOX, point_data={"x": [1.0]}), "needs 36 rows"),
        (lambda: meshes.write(tmp_path / "a.vtu", both, cell_data={"x": [1.0]}), "one kind"),
        (lambda: meshes.write_series(tmp_path / "a.vtu", BOX, [0], BOX.vertices[None]), ".pvd"),
        (lambda: meshes.write_series(tmp_path / "a.pvd", BOX, [0, 1], BOX.vertices[None]), "times"),
    ):
        with pytest.raises(ValueError, match=says):
            write()
    assert not list(tmp_path.glob("*a.*"))


# Parametrisations.


def test_constrained_moduli_stay_admissible():
    from torch.nn.utils.parametrize import register_parametrization

    body = NeoHookean(
        BOX,
        nn.Parameter(torch.tensor(1e5, dtype=torch.float64)),
        nn.Parameter(torch.full((72,), 0.3, dtype=torch.float64)),
    )
    register_parametrization(body, "youngs_modulus", Positive())
    register_parametrization(body, "poissons_ratio", Between(0.0, 0.5))
    assert float(body.youngs_modulus.detach()) == pytest.approx(1e5, rel=1e-14)
    torch.testing.assert_close(body.poissons_ratio, torch.full((72,), 0.3), rtol=1e-15, atol=0)
    bent = BOX.vertices * torch.tensor([1.2, 0.9, 1.0])
    optimizer = torch.optim.SGD(body.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        (1e-3 * body(bent)).backward()
        optimizer.step()
    assert float(body.youngs_modulus.detach()) > 0
    assert bool(((body.poissons_ratio > 0) & (body.poissons_ratio < 0.5)).all())
    assert float(body.youngs_modulus.detach()) != pytest.approx(1e5, rel=1e-3)


def test_a_constraint_has_its_slope_and_refuses_other_starts():
    x = torch.tensor([0.2, 0.5, 7.0], dtype=torch.float64)
    torch.testing.assert_close(Positive()(Positive().right_inverse(x)), x, rtol=1e-15, atol=0)
    between = Between(-1.0, 8)
    y = between.right_inverse(x).requires_grad_()
    torch.testing.assert_close(between(y), x, rtol=1e-14, atol=1e-15)
    (slope,) = torch.autograd.grad(between(y).sum(), y)
    torch.testing.assert_close(slope, (x + 1) * (8 - x) / 9, rtol=1e-14, atol=0)
    for make, says in (
        (lambda: Positive().right_inverse(x - 0.5), "got -0.3"),
        (lambda: between.right_inverse(x + 1), r"Between\(-1, 8\) excludes 8"),
        (lambda: Between(1.0, 1.0), "low must be below high"),
        (lambda: Between(0.0, math.inf), "the bounds of Between must be finite; got 0 and inf"),
        (lambda: Between(0.0, 1.0).right_inverse(x * math.nan), "excludes nan"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
