"""Methods of the command line in processes of their own: the same numbers, memory of their own, and
every way to fail.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
import torch
from typer.testing import CliRunner

from adjsim import CheckpointAdjoint, Pathwise, ReversibleAdjoint
from adjsim.cli import process
from adjsim.cli.app import app
from adjsim.cli.job import ADJOINTS, PLAIN, Job
from adjsim.cli.models import BathSettings, model_of, solver_of
from adjsim.cli.sweep import Method, Sweep, run_sweep
from adjsim.io.systems import cluster


def job(dynamics="hamiltonian", scheme="BAB"):
    system = cluster()
    model = model_of(system, dynamics, BathSettings(0.1, 0.25, 1.0, [5.0], [5.0]))
    return Job(system, model, scheme, solver_of(scheme, dynamics, 0.005, False), 0.1, 0)


# What the processes do.


def sines():
    return torch.sin(torch.linspace(0, 1, 1_000_000, dtype=torch.float64))


def fail(error):
    raise error


def end_by(number):
    os.kill(os.getpid(), number)


class Stubborn(Exception):
    """An error that pickles and cannot be read back."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_stubborn():
    raise Stubborn("this", "that")


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.slow
def test_parallel_loops_run_in_forks():
    """After parallel loops of the caller, in one process after the other: the server has no threads
    to lose.
    """
    torch.set_num_threads(2)
    here = sines()
    for _ in range(2):
        assert torch.equal(here, process.run_in_process(sines))
        # Functions that import nothing: the modules of this file may start threads of their own.
        threads = process.run_in_process(os.listdir, "/proc/self/task")
        assert len(threads) == 2  # its own, and the one that watches the caller
        assert not process.run_in_process(torch.cuda.is_initialized)


@pytest.mark.slow
def test_processes_that_import_the_library_themselves(monkeypatch):
    monkeypatch.setattr(process, "START", "spawn")
    assert process.run_in_process(max, 1, 2) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [ValueError("of this kind"), FloatingPointError("lost at step 3")]
)
def test_errors_come_back(error):
    with pytest.raises(type(error), match=str(error)) as caught:
        process.run_in_process(fail, error)
    assert "in fail" in caught.value.__notes__[0]  # where in the process it was raised


@pytest.mark.slow
def test_errors_that_do_not_pickle_are_described():
    with pytest.raises(RuntimeError, match=r"Stubborn: this and that"):
        process.run_in_process(raise_stubborn)


@pytest.mark.parametrize(
    ("work", "says"),
    [
        pytest.param(
            partial(end_by, signal.SIGKILL),
            "ended by SIGKILL, as the system does when memory runs out",
            marks=pytest.mark.slow,
        ),
        pytest.param(partial(end_by, signal.SIGSEGV), "ended by SIGSEGV", marks=pytest.mark.slow),
        pytest.param(partial(os._exit, 3), "ended with exit status 3", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_says_how(work, says):
    with pytest.raises(process.ProcessDied, match=says):
        process.run_in_process(work)


@pytest.mark.slow
def test_a_method_that_dies_is_listed_with_its_reason():
    direct, checkpoint = job().adjoints(
        {name: ADJOINTS[name] for name in ("direct", "checkpoint")}, "energy", False
    )
    killed = Method("killed", partial(end_by, signal.SIGKILL), direct.question, 0.005, 0, False)
    (result,) = run_sweep([direct, killed, checkpoint], Sweep([0.05], [1]), "direct", None).values()
    assert list(result.estimates) == ["direct", "checkpoint"]
    assert "killed: its process was ended by SIGKILL" in str(result)


# Made in the test, so that a process that imports this file has run nothing.
@pytest.mark.parametrize(
    ("make", "horizon", "replicas"),
    [
        pytest.param(
            lambda: job("nose-hoover", "NBABN").adjoints(ADJOINTS, "energy", False),
            0.05,
            2,
            marks=pytest.mark.marathon,
        ),
        pytest.param(
            lambda: job("langevin", "BAOAB").adjoints(
                {**ADJOINTS, PLAIN: ReversibleAdjoint()}, "gyration", False
            ),
            0.05,
            2,
            marks=pytest.mark.marathon,
        ),
        (lambda: job().adjoints({"lost": ReversibleAdjoint(tol=1e-30)}, "energy", False), 0.1, 1),
        pytest.param(
            lambda: job("langevin", "BAOAB").estimators(
                ["pathwise", "score-function"], "energy", False
            ),
            0.1,
            4,
            marks=pytest.mark.slow,
        ),
        (
            lambda: job("langevin", "BAOAB").estimators(["score-function"], "msd", False),
            0.1,
            4,
        ),
    ],
    ids=["nose-hoover", "langevin", "lost", "estimators", "unfit"],
)
def test_numbers_are_those_of_this_process(make, horizon, replicas):
    methods = make()
    for method in methods:
        here, there = method(horizon, replicas), process.run_in_process(method, horizon, replicas)
        assert here.failures == there.failures
        assert list(here.estimates) == list(there.estimates)
        for mine, theirs in zip(here.estimates.values(), there.estimates.values(), strict=True):
            assert torch.equal(mine.value, theirs.value)
            assert list(mine.grad) == list(theirs.grad)
            assert all(torch.equal(mine.grad[key], theirs.grad[key]) for key in mine.grad)
            assert mine.warnings == theirs.warnings
            for key in ("energy_evaluations", "reconstruction_error", "ess", "compiled"):
                assert mine.diagnostics[key] == theirs.diagnostics[key]


@pytest.mark.marathon
def test_memory_of_a_method_is_its_own(tmp_path, monkeypatch):
    """Whatever ran before it: other methods, shorter horizons, or nothing. A resident set is good
    to a megabyte, and backpropagation through 800 steps takes seven."""
    monkeypatch.chdir(tmp_path)
    peaks = []
    for order, horizons in (
        ("direct,reversible,checkpoint", "4"),
        ("checkpoint,reversible,direct", "2,4"),
    ):
        done = CliRunner().invoke(app, ["compare", "--adjoint", order, "--horizon", horizons])
        assert done.exit_code == 0, done.output
        *_, run = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())["runs"]
        peaks.append({row["method"]: row["peak_memory"] for row in run["methods"]})
    assert peaks[0]["direct"] > 4e6
    for name, peak in peaks[0].items():
        assert abs(peak - peaks[1][name]) < 1.5e6


@pytest.mark.skipif(sys.platform != "linux", reason="processes are told by their groups")
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.marathon),
        pytest.param(signal.SIGKILL, marks=pytest.mark.marathon),
    ],
)
def test_nothing_is_left_of_a_command_that_is_stopped(tmp_path, number):
    """Ctrl-C reaches every process of a terminal, and the caller alone may be killed."""
    caller = psutil.Popen(
        [sys.executable, "-m", "adjsim", "compare", "--adjoint", "direct", "--horizon", "400"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # The default action, which a test runner in the background does not hand on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline, started = time.monotonic() + 120, []
    while time.monotonic() < deadline and not started:
        time.sleep(0.05)
        # The fork server's child, once it has worked for half a second.
        started = [
            p
            for p in caller.children(recursive=True)
            if p.ppid() != caller.pid and p.cpu_times().user > 0.5
        ]
    assert started, caller.communicate()
    everything = caller.children(recursive=True)
    if number == signal.SIGINT:
        os.killpg(caller.pid, number)
    else:
        caller.kill()
    _, said = caller.communicate(timeout=60)
    assert psutil.wait_procs(everything, timeout=60)[1] == []
    assert caller.returncode != 0
    assert "Traceback" not in said
    assert not (tmp_path / "adjsim-compare").exists()


def test_estimators_of_the_command_line_begin_anew():
    """Each use of a method makes its estimator: what one has sampled is not there for the next."""
    (method,) = job().estimators(["pathwise"], "energy", False)
    made = method.make()
    assert isinstance(made, Pathwise)
    assert isinstance(made.adjoint, CheckpointAdjoint)
    assert method.make() is not made
