"""What a step would do on a GPU: nothing in a wrong place, no waiting for the device, no copies."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices.systems import SYSTEMS, TILED
from tests.devices.test_gpu import RTOL, UNCOMPILED
from tests.problems import slow_but

BY_TILES = [f"{name}, by tiles" for name in TILED]
LISTED = "listed, by lists of programs"
# Synchronisations and copies of a step, forward and backward, with the reason.
ALLOWED = {
    "chain-1": (0.5, "the buffer of an exact run is checked at times"),
    "chain-3": (0.5, "the buffer of an exact run is checked at times"),
    LISTED: (3, "the host reads how far atoms have moved"),
    "listed": (4, "the host reads how far atoms have moved, and how many pairs are near"),
    "listed mixture": (4, "the host reads how far atoms have moved, and how many pairs are near"),
    "joined": (8, "each of its two sums does: without a kernel they are not joined"),
    "ewald": (5, "excluded pairs are checked, and reciprocal vectors are made from the box"),
    "mesh": (5, "excluded pairs are checked, and the influence function is made from the box"),
    "sites": (5, "excluded pairs are checked"),
    "piston": (4, "the host reads whether the box is large enough"),
    "piston, chains": (4, "the host reads whether the box is large enough"),
    "piston, mesh": (4, "the host reads whether the box is large enough"),
    "graph": (4, "edges follow from the positions"),
    "implicit": (18, "the host ends Newton's iteration"),
    "own module": (13, "the module makes its indices on the CPU"),
    "feedback": (4, "the controller makes its time on the CPU"),
    "everything": (4, "the controller makes its time on the CPU"),
    "friction-moving": (8, "the path makes its time on the CPU"),
}
# A segment of one step is compared with its end by one number that the host reads.
SEGMENT = 1
# Torch's backend of the pretended device cannot differentiate their derivatives.
UNKNOWN = {"prescribed", "Milstein, diagonal"}
NAMES = [name for name in SYSTEMS if name not in UNKNOWN]
# Systems of more than a thousand operations in a step. Shorter ones have each of their parts.
LONG = {
    "chain-3", "everything", "friction-moving", "friction-vertices", "piston, chains",
    "piston, mesh", "rayleigh", "sites",
}  # fmt: skip
# Systems that take the moves of others, with other numbers.
ALIKE = {
    "andersen", "berendsen", "ewald", "EulerMaruyama, additive", "EulerMaruyama, diagonal",
    "generalised-1", "hamiltonian-masses", "langevin-atoms", "StochasticHeun, diagonal",
    "velocity-rescale", "viscous",
}  # fmt: skip
MARATHONS = [name for name in NAMES if name in LONG | ALIKE]
IN_CI = ("rk4, compiled", "langevin, compiled")
LOOPS = [f"{name}, compiled" for name in SYSTEMS if name not in UNCOMPILED]


@functools.cache
def costs(*names: str) -> dict[str, dict[str, Any]]:
    """Return what steps cost, of a process that uses the device for nothing else."""
    command = [sys.executable, "-m", "tests.devices.costs", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {key: row for line in done.stdout.splitlines() for key, row in json.loads(line).items()}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([x for x in NAMES if x not in MARATHONS], marks=pytest.mark.slow, id="in CI"),
        pytest.param(MARATHONS, marks=pytest.mark.marathon, id="others"),
    ],
)
def test_steps_keep_to_their_device(names):
    rows = costs(*names)
    for name in names:
        keeps_to_its_device(name, rows[name])


@pytest.mark.parametrize(
    "name", slow_but(lambda _: False, LOOPS, marathon=lambda name: name not in IN_CI)
)
def test_loops_keep_to_their_device(name):
    """The traced iteration of each loop, repeated: with the numbers of C++."""
    rows = costs(name)[name]
    assert "direct" in rows
    for row in rows.values():
        assert row["error"] < RTOL
        assert row["iterations"] > 1
        assert not row["noted"]


@pytest.mark.slow
def test_calls_keep_to_their_device():
    """Estimators, adaptive steps, solve_ivp, minima, steady states and constraints."""
    rows = costs("calls")["calls"]
    assert len(rows) > 20
    for row in rows.values():
        assert row["error"] < RTOL
        assert row["there"]
        assert not row["mixes"]


@pytest.mark.marathon
def test_numbers_that_a_device_draws_have_the_bits_of_the_cpu():
    assert costs("drawn")["drawn"] == {"same": True, "there": True, "mixes": []}


@pytest.mark.marathon
@pytest.mark.parametrize("name", BY_TILES)
def test_programs_keep_to_their_device(name):
    keep_to_their_device(name, "all pairs, by Triton")


def keep_to_their_device(name, path):
    """Eager, and in loops whose iteration is repeated; there with the numbers of C++."""
    rows = dict(costs(name)[name])
    loops = {adjoint: rows.pop(adjoint) for adjoint in [*rows] if adjoint.endswith("compiled")}
    keeps_to_its_device(name, rows)
    assert len(loops) == len(rows)
    for row in loops.values():
        assert row["paths"] == [path]
        assert row["error"] < 1e-13
        assert row["iterations"] > 1
        assert not row["noted"]


@pytest.mark.marathon
def test_programs_of_lists_keep_to_their_device():
    keep_to_their_device(LISTED, "neighbour list, by Triton")


@pytest.mark.marathon
def test_the_benchmark_compares_the_ways_to_sum_pairs():
    row = costs("benchmark")["benchmark"]
    assert not row["failed"]
    assert row["agrees"]
    assert set(row["microseconds a step"]) == {"tiles", "list", "list, by torch", "torch"}


@pytest.mark.marathon
def test_a_dry_run_of_the_benchmark(tmp_path):
    script, out = Path(__file__).parents[2] / "benchmarks" / "gpu.py", tmp_path / "gpu.json"
    settings = ["--device", "cpu", "--small", "--out", str(out)]
    parts = ["checks", "exact", "noise", "loops"]
    subprocess.run([sys.executable, str(script), *settings, *parts], check=True, timeout=300)
    found = json.loads(out.read_text())
    assert not found["checks"][0]["failed"]
    rows = [*found["exact"], *found["noise"], *found["loops"]]
    assert len(rows) == 4
    for row in rows:
        assert not row["failed"]
        assert len(row["microseconds a step"]) == 2
    assert found["exact"][0]["agrees"]
    assert found["loops"][0]["agrees"]


def keeps_to_its_device(name, rows):
    """Assert that eager steps mix no devices, and wait and copy as often as a row may."""
    assert rows
    allowed, _ = ALLOWED.get(name, (0, ""))
    for adjoint, row in rows.items():
        assert "error" not in row, row
        assert not row["mixes"], (name, row["mixes"])
        assert not row["on the CPU"], name
        for side in ("forward", "backward"):
            found = row[f"waits {side}"] + row[f"copies {side}"]
            segment = SEGMENT if adjoint == "checkpoint" and side == "backward" else 0
            assert found <= allowed + segment, (name, adjoint, side, row)
