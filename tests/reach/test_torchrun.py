"""Scripts under torchrun, as users start them, and ranks that are killed."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reach.ranks import estimate, on_ranks

SCRIPT = """
import os, signal, sys
import torch
import adjsim
from adjsim.core.durable.store import Store

torch.set_default_dtype(torch.float64)
well = adjsim.DoubleWell(torch.nn.Parameter(torch.tensor(1.0)))
dynamics = adjsim.Langevin(well, kT=0.5, friction=1.0)
chunks = []

def initial(replicas, generator):
    return dynamics.init(torch.zeros(replicas, 1, 1), generator=generator)

def observe(state):
    chunks.append(len(state.position))
    return state.position.square().mean((-1, -2))

def dying(self, name, tree):
    write(self, name, tree)
    os.kill(os.getpid(), signal.SIGKILL)

write = Store.write
if "kill" in sys.argv and os.environ["RANK"] == "1":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Store.write = dying

simulation = adjsim.Simulation(dynamics, initial, [0.0, 1.0], solver=adjsim.BAOAB(0.05))
estimate = adjsim.Pathwise()
found = estimate(simulation, adjsim.Final(observe), replicas=12, chunks=6, generator=1,
                 store=sys.argv[1] if len(sys.argv) > 2 else None)
rank = os.environ.get("RANK", "0")
with open(f"rank-{rank}", "wb") as file:
    for x in (found.value, found.value_stderr, *found.grad.values(), *found.grad_stderr.values()):
        file.write(x.numpy().tobytes())
# Ranks share one output, where their lines may run into each other.
with open(f"evaluations-{rank}", "w") as file:
    file.write(str(len(chunks)))
"""


def launched(folder, size, *arguments, options=()):
    """Run the script, and return the evaluations of the observable and the bytes of every rank."""
    (folder / "script.py").write_text(SCRIPT)
    start = (
        [sys.executable]
        if size == 1
        else [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={size}", *options),
        ]
    )
    tree = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*start, "script.py", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": tree},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    evaluations = [int((folder / f"evaluations-{rank}").read_text()) for rank in range(size)]
    return evaluations, [(folder / f"rank-{rank}").read_bytes() for rank in range(size)]


@pytest.mark.marathon
def test_a_script_needs_no_line_for_torchrun(tmp_path):
    alone, (expected,) = launched(tmp_path, 1)
    shared, found = launched(tmp_path, 2)
    assert found == [expected] * 2
    # Each rank has run three of the six chunks.
    assert shared == [sum(alone) // 2] * 2


@pytest.mark.marathon
def test_torchrun_starts_a_rank_again(tmp_path):
    """Rank 1 is killed after its first chunk; what was finished before is not computed again."""
    alone, (expected,) = launched(tmp_path, 1)
    shared, found = launched(tmp_path, 2, "store", "kill", options=("--max-restarts=1",))
    assert found == [expected] * 2
    assert sum(shared) < sum(alone)


@pytest.mark.marathon
def test_the_script_of_a_cluster_runs_on_one_computer(tmp_path):
    """Called again, it reads all chunks; two ranks share them, and one prints."""
    data = Path(__file__).parents[2] / "examples" / "data"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(data.parents[1]),
        "SCRIPT": str(data / "ensemble.py"),
        "STORE": str(tmp_path / "store"),
    }
    printed = [
        subprocess.run(
            ["bash", str(data / "ensemble.sh")],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert printed[0] == printed[1]
    assert re.match(r"path estimate\n  value +0\.", printed[0])
    assert len(list((tmp_path / "store").glob("chunk-*.pt"))) == 32


@pytest.mark.parametrize(
    "kills", [pytest.param(3, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.marathon)]
)
def test_ranks_that_are_killed_cost_their_chunk(kills, tmp_path):
    """A random rank is killed at a random moment; two other ranks finish its work."""
    begun = time.monotonic()
    expected, _ = estimate("pathwise", 24, 12, 3)
    seconds = time.monotonic() - begun
    generator, cut = random.Random(0), 0
    for i in range(kills):
        store = str(tmp_path / f"{i}")
        kill = (generator.randrange(2), generator.uniform(0.0, seconds))
        first = on_ranks(2, estimate, "pathwise", 24, 12, 3, store, seconds=5.0, kill=kill)
        cut += first[kill[0]] is None
        known = len(list(tmp_path.glob(f"{i}/chunk-*.pt")))
        found = on_ranks(2, estimate, "pathwise", 24, 12, 3, store)
        assert [x[0] for x in found] == [expected] * 2
        assert known <= 12
    assert cut > 0
