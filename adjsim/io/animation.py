"""Animations of positions, as GIF or MP4."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.animation import AbstractMovieWriter, FFMpegWriter, PillowWriter
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from adjsim.core.arguments import as_positive, as_tensor, as_whole
from adjsim.core.box import checked_box, rows_of
from adjsim.core.durable.files import replacing
from adjsim.core.trajectory import Trajectory
from adjsim.core.typing import Array

DPI = 100


def animate(
    trajectory: Trajectory[Any] | Array,
    path: str | Path,
    box: Array | None = None,
    *,
    frames: int = 100,
    fps: float | int = 20.0,
) -> None:
    """Draw the positions of one system as a GIF or MP4.

    Two dimensions are drawn as a plane, three as a perspective view. The file is written whole or
    not at all. Drawing takes some 30 ms a frame.

    Args:
        trajectory: a trajectory, whose times are shown, or positions ``(time, atoms, dim)``, of two
            or three dimensions. Of a batch, give one system: ``trajectory.position[:, 0]``.
        path: the file, ending in .gif, or in .mp4 where ffmpeg is installed.
        box: ``(dim,)`` lengths or ``(dim, dim)`` rows. The box is drawn, and atoms are wrapped into
            it. None: positions are drawn as they are.
        frames: the largest number of frames. Of a longer trajectory, evenly spaced frames are
            drawn, the first and the last among them; with ``frames=1`` the first alone.
        fps: frames per second.

    Raises:
        ValueError: a suffix other than .gif and .mp4, positions that are not one system of two or
            three dimensions or not finite, a number that is not positive.
        RuntimeError: an .mp4 without ffmpeg.
    """
    path, most, rate = Path(path), as_whole("frames", frames, least=1), as_positive("fps", fps)
    times = trajectory.times if isinstance(trajectory, Trajectory) else None
    q, chosen = _positions(trajectory, most)
    rows = None
    if box is not None:
        dim = len(checked_box(box, None))
        if dim != q.shape[-1]:
            raise ValueError(f"box has {dim} dimensions and position {q.shape[-1]}.")
        # The rows as given, which the check may reduce.
        rows = rows_of(as_tensor("box", box).double().cpu()).numpy()
        fractions = q @ np.linalg.inv(rows)
        q = (fractions - np.floor(fractions)) @ rows
    writer = _writer(path, rate)
    figure = Figure(figsize=(5, 5))
    FigureCanvasAgg(figure)
    axes, atoms = _draw(figure, q, rows)
    with replacing(path) as temporary, writer.saving(figure, str(temporary), DPI):
        for number, points in zip(chosen, q, strict=True):
            if q.shape[-1] == 3:
                atoms.set_data_3d(*points.T)
            else:
                atoms.set_data(*points.T)
            axes.set_title(f"frame {number}" if times is None else f"t = {float(times[number]):g}")
            writer.grab_frame()


def _positions(trajectory: Trajectory[Any] | Array, most: int) -> tuple[np.ndarray, list[int]]:
    """Return the positions of the frames that are drawn, and the numbers of these frames."""
    given = trajectory.position if isinstance(trajectory, Trajectory) else trajectory
    q = as_tensor("position", given).detach()
    if q.ndim != 3 or q.shape[-1] not in (2, 3) or q.numel() == 0:
        raise ValueError(
            "animate draws one system (time, atoms, dim) of two or three dimensions; got shape "
            f"{tuple(q.shape)}. Of a batch, give trajectory.position[:, 0]."
        )
    numbers = np.linspace(0, len(q) - 1, min(len(q), most)).round().astype(int).tolist()
    points = q[numbers].to(device="cpu", dtype=torch.float64).numpy()
    finite = np.isfinite(points).all((1, 2))
    if not finite.all():
        raise ValueError(f"frame {numbers[int(finite.argmin())]} has NaN or infinite positions.")
    return points, numbers


def _writer(path: Path, fps: float) -> AbstractMovieWriter:
    suffix = path.suffix.lower()
    if suffix == ".gif":
        return PillowWriter(fps=fps)  # pyright: ignore[reportArgumentType]
    if suffix != ".mp4":
        raise ValueError(f"animate writes .gif and .mp4; got {path.name}.")
    if not FFMpegWriter.isAvailable():
        raise RuntimeError(
            "an .mp4 needs ffmpeg, which is not installed: install ffmpeg, or write "
            f"{path.with_suffix('.gif').name}."
        )
    return FFMpegWriter(fps=fps)  # pyright: ignore[reportArgumentType]


def _draw(figure: Figure, q: np.ndarray, rows: np.ndarray | None) -> tuple[Any, Any]:
    """Draw the box, and return the axes and the artist of the atoms."""
    dim = q.shape[-1]
    axes: Any = figure.add_subplot(projection="3d" if dim == 3 else None)
    corners = q.reshape(-1, dim)
    if rows is not None:
        axes.grid(False)
        ends = np.array(list(product((0.0, 1.0), repeat=dim)))
        corners = ends @ rows
        for a, b in product(range(len(ends)), repeat=2):
            if a < b and abs(ends[a] - ends[b]).sum() == 1:
                axes.plot(*zip(corners[a], corners[b], strict=True), color="0.6", lw=0.8)
    low, high = corners.min(0), corners.max(0)
    margin = 0.03 * float((high - low).max()) or 1.0
    for name, a, b in zip("xyz", low, high, strict=False):
        getattr(axes, f"set_{name}lim")(a - margin, b + margin)
    axes.set_aspect("equal")
    # Atoms of a liquid nearly touch, and a few atoms are not larger than points of a plot.
    size = min(12.0, 220 / q.shape[1] ** (1 / dim))
    (atoms,) = axes.plot(*q[0].T, "o", ms=size / (2 if dim == 3 else 1), mec="k", mew=0.4)
    return axes, atoms
