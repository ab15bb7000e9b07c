"""Files of meshes, by meshio, written whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import meshio
import numpy as np
from torch import Tensor

from adjsim.core.arguments import as_tensor
from adjsim.core.durable.files import replacing
from adjsim.core.typing import Array, PositionsLike, Times
from adjsim.meshes.mesh import Mesh

# Names of meshio, and cells that carry nothing: meshers write them for lines and points of a shape.
CELLS = {"tetra": "tetrahedra", "triangle": "triangles"}
IGNORED = ("line", "vertex")
# The two files of a mesh of TetGen, vertices and elements, cannot be replaced together.
TETGEN = (".node", ".ele")
# Written as one file of text, since its other form has a second file of arrays.
XDMF = (".xdmf", ".xmf")
# Largest difference of a coordinate in a file, relative to the extent of the mesh: STL has float32,
# and Nastran fields of 16 characters.
KEPT = 1e-6
# The field of an XDMF series that has the motion; ParaView's filter Warp By Vector shows it.
DISPLACEMENT = "displacement"
Frames: TypeAlias = Iterable[tuple[float, meshio.Mesh]]


def read(path: str | Path) -> Mesh:
    """Read a mesh from a file, in any format that meshio knows.

    Among them are Gmsh's .msh, .vtu and .stl. Lines and points of the file are left out. A mesh
    that is planar in the file has vertices of dim 3; ``Mesh(mesh.vertices[:, :2],
    triangles=mesh.triangles)`` is planar.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file that meshio cannot read, elements other than tetrahedra and triangles of
            straight edges, and as for :class:`Mesh`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}.")
    _known_suffix(path)
    try:
        with _packages(path):
            found = meshio.read(path)
    except (meshio.ReadError, SystemExit) as error:
        # Meshio ends the process for a file that none of its formats can read.
        raise ValueError(
            f"meshio cannot read {path}: {error or 'see its message above'}."
        ) from error
    for block in found.cells:
        if block.type not in (*CELLS, *IGNORED):
            raise ValueError(
                f"{path} has cells of type {block.type!r}; a mesh has tetrahedra and triangles of "
                "straight edges. Export first-order tetrahedra."
            )
    cells = {CELLS[kind]: data for kind, data in found.cells_dict.items() if kind in CELLS}
    if not cells:
        raise ValueError(f"{path} has no tetrahedra and no triangles.")
    return Mesh(found.points, **cells)


def write(
    path: str | Path,
    mesh: Mesh,
    *,
    point_data: Mapping[str, Array] | None = None,
    cell_data: Mapping[str, Array] | None = None,
) -> None:
    """Write a mesh with fields to a file, in the format of its suffix.

    Formats that meshio knows are written, such as .vtu for ParaView. The file is read back, and is
    written whole or not at all: a format that leaves out elements or fields is refused. Among them
    are the surface formats .obj, .off, .ply, .stl and .wkt for tetrahedra (write a mesh of the
    triangles of :meth:`Mesh.surface`), and .cgns, .f3grid and .su2 for triangles. TetGen's pair of
    .node and .ele is only read. HDF5 and netCDF formats (.cgns, .e, .h5m, .hmf, .med, .xdmf) need
    the extra ``adjsim[meshes]``. Vertices of dim 2 are written with z = 0.

    Args:
        path: the file; folders are made.
        mesh: the mesh.
        point_data: fields by name, ``(vertices,)`` or ``(vertices, components)``.
        cell_data: fields by name, ``(elements,)`` or ``(elements, components)``.

    Raises:
        ModuleNotFoundError: a format that needs the extra ``adjsim[meshes]``.
        ValueError: a format that cannot be written, a field of another length, fields of elements
            for a mesh with tetrahedra and triangles.
    """
    path = Path(path)
    suffix = _known_suffix(path)
    if suffix in TETGEN:
        raise ValueError(f"the format of {path.name!r} is a pair of files, only read; use .vtu.")
    made = _mesh(mesh, mesh.vertices, point_data or {}, cell_data or {})
    # Several formats have the suffix of Gmsh.
    kind = "gmsh" if suffix == ".msh" else meshio.extension_to_filetypes[suffix][0]
    options = {"data_format": "XML"} if suffix in XDMF else {}
    with replacing(path) as temporary, _packages(path):
        try:
            meshio.write(temporary, made, kind, **options)
        except (OSError, ModuleNotFoundError):
            raise
        except Exception as error:
            # For cells that they do not know, the writers of meshio raise errors of many types
            # (AssertionError, TypeError), some without a message.
            reason = str(error) or type(error).__name__
            raise ValueError(f"meshio cannot write {path.name!r} ({reason}); use .vtu.") from error
        try:
            found = meshio.read(temporary, kind)
        except Exception as error:
            raise ValueError(
                f"meshio writes {path.name!r}, but cannot read what it has written ({error}); use "
                ".vtu."
            ) from error
        _check_kept(path, found, made)


def _check_kept(path: Path, found: meshio.Mesh, made: meshio.Mesh) -> None:
    """Raise if a format has left out elements or fields, as some do without a word."""
    lost = {*made.point_data} - {*found.point_data} | {*made.cell_data} - {*found.cell_data}
    if lost:
        raise ValueError(
            f"the format of {path.name!r} does not keep {', '.join(sorted(lost))}; use .vtu."
        )
    allowed = KEPT * np.ptp(made.points, axis=0).max()
    for kind in made.cells_dict:
        # Formats may number vertices anew, so corners are compared.
        corners = made.points[made.cells_dict[kind]]
        if kind in found.cells_dict:
            kept = found.points[found.cells_dict[kind]][..., : corners.shape[-1]]
            if kept.shape == corners.shape and np.abs(kept - corners).max() <= allowed:
                continue
        raise ValueError(
            f"the format of {path.name!r} does not keep the {CELLS[kind]} of the mesh; use .vtu."
        )


@contextmanager
def _packages(path: Path) -> Generator[None, None, None]:
    """Name the extra that has the package which a format needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the format of {path.name!r} needs {error.name}: pip install 'adjsim[meshes]'.",
            name=error.name,
        ) from error


def write_series(
    path: str | Path,
    mesh: Mesh,
    times: Times,
    positions: PositionsLike,
    *,
    point_data: Mapping[str, Array] | None = None,
) -> None:
    """Write a moving mesh as a ``.pvd`` or ``.xdmf`` file, which ParaView opens as an animation.

    The frames of a ``.pvd`` file are VTU files in a folder beside it. An ``.xdmf`` file has the
    rest shape once, and the motion as the field ``displacement``, which the filter Warp By Vector
    of ParaView shows. It is one file of text, so it is larger. A file is written, or replaces an
    earlier one, when all frames are there.

    Args:
        path: the ``.pvd`` or ``.xdmf`` file; folders are made.
        mesh: the mesh.
        times: ``(frames,)``, such as ``trajectory.times``.
        positions: ``(frames, vertices, dim)``, such as ``trajectory.position``.
        point_data: fields by name, ``(frames, vertices)`` or ``(frames, vertices, components)``.

    Raises:
        ValueError: another suffix, or other shapes.
    """
    path = Path(path)
    x, t = as_tensor("positions", positions).detach(), as_tensor("times", times).detach()
    shape = (len(x), *mesh.vertices.shape)
    if x.shape != shape or t.shape != shape[:1]:
        raise ValueError(
            f"positions must be (frames, {shape[1]}, {shape[2]}) and times (frames,); got shapes "
            f"{tuple(x.shape)} and {tuple(t.shape)}. Write the replicas of a batch one by one."
        )
    fields = {name: as_tensor(name, value).detach() for name, value in (point_data or {}).items()}
    for name, value in fields.items():
        if value.shape[:2] != shape[:2]:
            raise ValueError(
                f"point_data[{name!r}] must be {shape[:2]} or ({shape[0]}, {shape[1]}, "
                f"components); got shape {tuple(value.shape)}."
            )
    frames = (
        (time, _mesh(mesh, x[k], {name: values[k] for name, values in fields.items()}, {}))
        for k, time in enumerate(t.tolist())
    )
    if path.suffix in XDMF:
        if DISPLACEMENT in fields:
            raise ValueError(
                f"point_data has {DISPLACEMENT!r}, the field in which an .xdmf file has the "
                "motion; give it another name, or write a .pvd file."
            )
        _write_xdmf(path, _mesh(mesh, mesh.vertices, {}, {}), frames)
    elif path.suffix == ".pvd":
        _write_pvd(path, frames)
    else:
        raise ValueError(
            f"a time series is a .pvd or an .xdmf file, which ParaView opens; got {path.name!r}."
        )


def _write_xdmf(path: Path, rest: meshio.Mesh, frames: Frames) -> None:
    """Write one file of text: the rest shape once, and displacements from it for each frame."""
    with (
        replacing(path) as temporary,
        meshio.xdmf.TimeSeriesWriter(temporary, data_format="XML") as writer,
    ):
        writer.write_points_cells(rest.points, rest.cells)
        for t, frame in frames:
            moved = {DISPLACEMENT: frame.points - rest.points}
            writer.write_data(t, point_data={**frame.point_data, **moved})


def _write_pvd(path: Path, frames: Frames) -> None:
    """Write a ``.pvd`` file, and its frames as VTU files in a new folder beside it.

    The file names the folder, and replaces an earlier one when all frames are written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = _frames_of(path)
    folder = Path(tempfile.mkdtemp("", f"{path.stem}.", path.parent))
    try:
        folder.chmod(0o755)
        root = ElementTree.Element("VTKFile", type="Collection", version="0.1")
        listed = ElementTree.SubElement(root, "Collection")
        for number, (t, mesh) in enumerate(frames):
            file = f"{folder.name}/{number:06d}.vtu"
            meshio.write(path.parent / file, mesh)
            ElementTree.SubElement(listed, "DataSet", timestep=repr(t), part="0", file=file)
        with replacing(path) as temporary:
            ElementTree.ElementTree(root).write(temporary, "utf-8", xml_declaration=True)
    except BaseException:
        shutil.rmtree(folder)
        raise
    for old in earlier:
        shutil.rmtree(old)


def _frames_of(path: Path) -> set[Path]:
    """Return the folders of frames that a series of the same name refers to."""
    if not path.exists():
        return set()
    files = [Path(x.get("file", "")) for x in ElementTree.parse(path).iter("DataSet")]
    folders = {path.parent / file.parent for file in files if len(file.parts) == 2}
    return {x for x in folders if x.name.startswith(f"{path.stem}.") and x.is_dir()}


def _mesh(
    mesh: Mesh, vertices: Tensor, point_data: Mapping[str, Array], cell_data: Mapping[str, Array]
) -> meshio.Mesh:
    points = vertices.detach().cpu().double().numpy()
    if points.shape[1] == 2:
        points = np.pad(points, ((0, 0), (0, 1)))
    names = {ours: theirs for theirs, ours in CELLS.items()}
    blocks: list[Any] = [(names[name], index.numpy()) for name, index in mesh.cells().items()]
    if cell_data and len(blocks) > 1:
        raise ValueError(
            "cell_data needs a mesh with one kind of element; write Mesh(vertices, tetrahedra) and "
            "the triangles apart."
        )
    count = len(blocks[0][1])
    return meshio.Mesh(
        points,
        blocks,
        {name: _field("point_data", name, x, len(points)) for name, x in point_data.items()},
        {name: [_field("cell_data", name, x, count)] for name, x in cell_data.items()},
    )


def _field(kind: str, name: str, value: Array, count: int) -> np.ndarray:
    found = as_tensor(f"{kind}[{name!r}]", value).detach().cpu().numpy()
    if found.ndim == 0 or len(found) != count:
        raise ValueError(f"{kind}[{name!r}] needs {count} rows; got shape {found.shape}.")
    return found


def _known_suffix(path: Path) -> str:
    """Return the last suffix, or the last two where meshio knows them together (.vol.gz)."""
    for suffix in ("".join(path.suffixes[-2:]), path.suffix):
        if suffix in meshio.extension_to_filetypes:
            return suffix
    known = ", ".join(sorted(meshio.extension_to_filetypes))
    raise ValueError(f"meshio has no format for {path.name!r}; its suffixes are {known}.")
