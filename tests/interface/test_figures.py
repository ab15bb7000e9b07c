"""Animations: the file is whole, shows the frames that were asked for, or says why not."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

import adjsim
from adjsim.io import animation as _animation
from adjsim.io.animation import animate

TILTED = [[4.0, 0.0, 0.0], [1.0, 4.0, 0.0], [0.0, 0.5, 4.0]]


def path_of(frames, dim, atoms=5):
    generator = torch.Generator().manual_seed(0)
    return 4 * torch.rand(frames, atoms, dim, generator=generator)


def pictures(file):
    with Image.open(file) as image:
        found = []
        for k in range(getattr(image, "n_frames", 1)):
            image.seek(k)
            found.append(np.asarray(image.convert("RGB"), dtype=int))
        return found


def different(one, other):
    """Count the pixels that differ by more than the rounding of colours to the palette of a GIF."""
    return int((abs(one - other) > 40).any(-1).sum())


@pytest.mark.parametrize(("dim", "box"), [(2, [4.0, 5.0]), (3, TILTED), (2, None)])
def test_frames_are_drawn_and_evenly_chosen(tmp_path, dim, box):
    q = path_of(7, dim)
    animate(q, tmp_path / "a.gif", box, frames=3)
    chosen = pictures(tmp_path / "a.gif")
    assert len(chosen) == 3
    # Each picture differs from the next, and the second is frame 3, as in a film of all frames.
    assert all((a != b).any() for a, b in pairwise(chosen))
    animate(q[3:4], tmp_path / "b.gif", box)
    (third,) = pictures(tmp_path / "b.gif")
    if box is not None:
        # The titles above line 100 differ; without a box so do the limits.
        assert different(chosen[1][100:], third[100:]) < 0.1 * different(
            chosen[0][100:], third[100:]
        )
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.gif", "b.gif"]
    animate(q, tmp_path / "a.gif", box, frames=1)
    (alone,) = pictures(tmp_path / "a.gif")
    if box is not None:
        assert different(alone, chosen[0]) == 0


@pytest.mark.parametrize("box", [[4.0, 5.0], [[4.0, 0.0], [1.0, 5.0]]])
def test_atoms_are_wrapped_into_the_box(tmp_path, box):
    q, cell = path_of(1, 2), torch.as_tensor(box)
    cell = torch.diag(cell) if cell.ndim == 1 else cell
    shift = torch.tensor([[3.0, -2.0], [0.0, 1.0], [5.0, 5.0], [-1.0, 0.0], [0.0, 0.0]]) @ cell
    animate(q, tmp_path / "a.gif", box)
    animate(q + shift, tmp_path / "b.gif", box)
    inside, outside = (pictures(tmp_path / name)[0] for name in ("a.gif", "b.gif"))
    animate(q + 0.2 * shift, tmp_path / "c.gif", box)
    # Rounding errors of a coordinate may change the shade of a pixel at the edge of an atom.
    (elsewhere,) = pictures(tmp_path / "c.gif")
    assert different(inside, outside) < 0.05 * different(inside, elsewhere)


def test_a_trajectory_of_simulate(tmp_path):
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic())
    start = dynamics.init(path_of(1, 2)[0], path_of(1, 2)[0])
    run = adjsim.simulate(dynamics, start, [0.0, 0.5, 1.0], solver=adjsim.VelocityVerlet(0.1))
    animate(run, tmp_path / "new" / "a.gif", frames=2, fps=10)
    assert len(pictures(tmp_path / "new" / "a.gif")) == 2
    assert "pyplot" not in vars(_animation)
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a.gif"
    file.write_bytes(b"old")

    def fail(self, *args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(_animation.PillowWriter, "finish", fail)
    with pytest.raises(OSError, match="no space left"):
        animate(path_of(2, 2), file)
    assert file.read_bytes() == b"old"
    assert [x.name for x in tmp_path.iterdir()] == ["a.gif"]


@pytest.mark.parametrize(
    ("q", "options", "says"),
    [
        (path_of(2, 2), {"frames": 0}, "frames must be at least 1"),
        (path_of(2, 2), {"fps": 0.0}, "fps must be positive"),
        (path_of(2, 1), {}, "two or three dimensions"),
        (path_of(2, 2)[None], {}, r"trajectory.position\[:, 0\]"),
        (path_of(2, 2) / 0, {}, "frame 0 has NaN or infinite"),
        (path_of(2, 2), {"box": [4.0] * 3}, "box has 3 dimensions and position 2"),
    ],
)
def test_bad_input_is_named(tmp_path, q, options, says):
    with pytest.raises(ValueError, match=says):
        animate(q, tmp_path / "a.gif", **options)
    assert not list(tmp_path.iterdir())


def test_formats_that_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"writes .gif and .mp4; got a.png"):
        animate(path_of(2, 2), tmp_path / "a.png")
    monkeypatch.setattr(_animation.FFMpegWriter, "isAvailable", classmethod(lambda cls: False))
    with pytest.raises(RuntimeError, match=r"install ffmpeg, or write a.gif"):
        animate(path_of(2, 2), tmp_path / "a.mp4")
