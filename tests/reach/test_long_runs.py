"""Runs that save themselves, that are killed, and that go on."""

import os
import random
import shutil
import signal
import time

import pytest
import torch

import adjsim
from adjsim.adjoints.durable import saves
from adjsim.core.durable.store import StoreError
from tests.problems import slow_but
from tests.reach.long_run import numbers, problem, started

KINDS = [
    "exact",
    "exact frames",
    "exact average",
    "checkpoint average",
    "reset",
    "reset average",
    "compiled exact",
    "compiled exact average",
    "compiled exact frames",
    "compiled reset average",
    "compiled checkpoint",
    "compiled checkpoint exact average",
    "compiled direct average",
]
# With each of the adjoints that save themselves, eager and compiled; the rest are marathons.
SHORT = ("exact average", "checkpoint average", "reset")


class KilledError(Exception):
    """Ends a run in the middle, as a kill does."""


def run_of(steps, kind, store=None, **options):
    dynamics, start, times, given = problem(steps, kind)
    run = adjsim.simulate(dynamics, start, times, generator=2, store=store, **given, **options)
    return run, dynamics


@pytest.mark.parametrize(
    "kind",
    slow_but(
        lambda kind: kind == "exact",
        KINDS,
        marathon=lambda kind: kind not in SHORT,
    ),
)
def test_interrupted_runs_end_with_the_same_bits(kind, tmp_path, monkeypatch):
    """A run that is killed after some saves forward, and after every save backward."""
    steps, save = 520, saves.SavedStates.save
    expected = numbers(*run_of(steps, kind))
    forward, backward = [], []

    def killed(self, about):
        save(self, about)
        known, step = forward if self.name == saves.FORWARD else backward, about["step"]
        if step not in known:
            known.append(step)
            if known is backward or len(known) in (2, 3, 200):
                raise KilledError

    monkeypatch.setattr(saves.SavedStates, "save", killed)
    attempts, found = 0, None
    while found is None:
        attempts += 1
        try:
            found = numbers(*run_of(steps, kind, tmp_path, every=1e-9))
        except KilledError:
            continue
    assert found == expected
    # Backward saves are at most 256 eager steps or 1,024 compiled steps apart.
    assert len(forward) > 1
    assert len(backward) >= (1 if "compiled" in kind else 3)
    assert attempts > 1 + len(backward)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["", "compiled"])
def test_a_finished_run_is_read(compiled, tmp_path):
    kind = f"exact average {compiled}"
    expected = numbers(*run_of(300, kind, tmp_path))
    run, dynamics = run_of(300, kind, tmp_path)
    evaluations = run.stats["energy_evaluations"]
    assert run.stats["resumed_at"] == 300
    assert numbers(run, dynamics) == expected
    # Neither steps nor products were taken again.
    assert run.stats["energy_evaluations"] >= evaluations
    assert run.stats["resumed_at"] == 0


def test_a_sweep_that_was_read_knows_its_error(tmp_path):
    dynamics = adjsim.Langevin(adjsim.DoubleWell(torch.nn.Parameter(torch.tensor(1.0))), kT=1.0)
    start = dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))

    def error():
        run = adjsim.simulate(
            dynamics,
            start,
            torch.linspace(0.0, 3.0, 4),
            solver=adjsim.BAOAB(0.05),
            adjoint=adjsim.ReversibleAdjoint(),
            generator=1,
            store=tmp_path,
        )
        torch.autograd.grad(run.final.position.sum(), dynamics.potential.barrier)
        return run.stats["reconstruction_error"]

    first = error()
    assert first > 0
    assert error() == first


def test_a_store_that_was_removed_is_made_again(tmp_path):
    expected = numbers(*run_of(100, "exact"))
    run, dynamics = run_of(100, "exact", tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    assert numbers(run, dynamics) == expected


def test_two_losses_of_one_run_do_not_mix(tmp_path):
    run, dynamics = run_of(100, "exact", tmp_path)
    parameters = list(dynamics.parameters())
    first = torch.autograd.grad(run.record.sum(), parameters, retain_graph=True)
    second = torch.autograd.grad((2 * run.record).sum(), parameters)
    plain, dynamics = run_of(100, "exact")
    wanted = torch.autograd.grad(plain.record.sum(), list(dynamics.parameters()))
    for a, b, c in zip(first, second, wanted, strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(b, 2 * c, rtol=1e-12, atol=0.0)


def test_a_sweep_that_is_read_keeps_the_count_of_other_sweeps(tmp_path):
    run, dynamics = run_of(100, "exact", tmp_path)
    parameters = list(dynamics.parameters())

    def gradient(loss):
        return torch.autograd.grad(loss, parameters, retain_graph=True)

    first = gradient(run.record.sum())
    gradient((2 * run.record).sum())
    evaluations = run.stats["energy_evaluations"]
    again = gradient(run.record.sum())
    assert all(map(torch.equal, first, again))
    assert run.stats["energy_evaluations"] == evaluations


def test_another_run_is_named(tmp_path):
    dynamics, start, times, options = problem(20, "exact")

    def run(generator=2, times=times):
        return adjsim.simulate(
            dynamics, start, times, generator=generator, store=tmp_path, **options
        )

    run()
    with pytest.raises(StoreError, match=r"the seed is .* here and .* there"):
        run(generator=3)
    with pytest.raises(StoreError, match="ts is"):
        run(times=times * 2)
    with torch.no_grad():
        dynamics.potential.sigma.mul_(1.01)
    with pytest.raises(StoreError, match=r"potential\.sigma is 1\.01 .* here and 1\.0 "):
        run()
    with torch.no_grad():
        dynamics.potential.sigma.fill_(1.0)
    options["record"] = lambda state: state.position.mean((-1, -2))
    with pytest.raises(StoreError, match="the formulas of the dynamics and of the observable"):
        run()


def test_runs_that_cannot_be_saved_are_refused(tmp_path):
    dynamics, start, times, options = problem(20, "exact direct")
    with pytest.raises(TypeError, match=r"the graph of DirectAdjoint\(\) cannot be saved"):
        adjsim.simulate(dynamics, start, times, store=tmp_path, **options)
    with torch.no_grad():
        adjsim.simulate(dynamics, start, times, store=tmp_path, generator=2, **options)
    with pytest.raises(ValueError, match="every must be a positive number"):
        adjsim.simulate(dynamics, start, times, store=tmp_path, every=0.0, **options)
    with pytest.raises(TypeError, match="for solvers that take steps"):
        adjsim.simulate(
            dynamics,
            start,
            times,
            solver=adjsim.SDESolver(dt=0.005),
            store=tmp_path / "other",
        )


def test_a_damaged_save_is_named(tmp_path):
    run_of(100, "exact", tmp_path)
    path = tmp_path / "forward.pt"
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(StoreError, match=r"forward\.pt' is damaged"):
        run_of(100, "exact", tmp_path)


@pytest.mark.slow
def test_a_signal_ends_a_sweep_with_one_line(tmp_path, capfd, monkeypatch):
    """The sweep is saved where no product of a force is outstanding, and goes on from there."""
    expected = numbers(*run_of(500, "exact"))
    accumulate = adjsim.adjoints.sweep.recorder.RecordSweep.accumulate

    def interrupted(self, step, *rest):
        if step == 400:
            os.kill(os.getpid(), signal.SIGTERM)
        return accumulate(self, step, *rest)

    run, dynamics = run_of(500, "exact", tmp_path)
    monkeypatch.setattr(adjsim.adjoints.sweep.recorder.RecordSweep, "accumulate", interrupted)
    with pytest.raises(SystemExit):
        numbers(run, dynamics)
    assert "interrupted on the way back, before step 256." in capfd.readouterr().err
    monkeypatch.undo()
    run, dynamics = run_of(500, "exact", tmp_path)
    assert numbers(run, dynamics) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_signals_end_a_run_with_one_line(number, tmp_path, capfd, monkeypatch):
    """The signal comes amid steps that run without a look, and the process ends after them."""
    expected, stops = numbers(*run_of(500, "exact")), []
    advance = adjsim.adjoints.sweep.passes.EagerDriver.advance

    def interrupted(self, state, start, stop):
        if start <= 123 < stop:
            stops.append(stop)
            os.kill(os.getpid(), number)
        return advance(self, state, start, stop)

    monkeypatch.setattr(adjsim.adjoints.sweep.passes.EagerDriver, "advance", interrupted)
    # A process that was started in the background may ignore the signal, and then goes on doing so.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            run_of(500, "exact", tmp_path)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number
    line = capfd.readouterr().err
    assert line == (
        f"adjsim: interrupted after step {stops[0]} of 500. Run it again with store='{tmp_path}' "
        "to go on.\n"
    )
    monkeypatch.undo()
    run, dynamics = run_of(500, "exact", tmp_path)
    assert run.stats["resumed_at"] == stops[0]
    assert numbers(run, dynamics) == expected


@pytest.mark.slow
def test_two_processes_in_one_folder(tmp_path):
    process, pipe = started(20_000, "exact", str(tmp_path))
    assert pipe.recv() == "ready"
    deadline = time.monotonic() + 300
    while not (tmp_path / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(StoreError, match=f"in use by process {process.pid} on "):
        run_of(20_000, "exact", tmp_path)
    process.kill()
    process.join()


def killed_once(generator, phase, kind, steps, folder, seconds):
    """Kill a run at a random moment of a phase; return the numbers of the run that goes on."""
    process, pipe = started(steps, kind, str(folder), every=0.02)
    assert pipe.recv() == "ready"
    if phase == "backward":
        assert pipe.recv() == "forward"
    time.sleep(generator.uniform(0.0, seconds[phase]))
    process.kill()
    process.join()
    process, pipe = started(steps, kind, str(folder), every=0.02)
    assert [pipe.recv(), pipe.recv()] == ["ready", "forward"]
    found = pipe.recv()
    process.join()
    return found


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param("exact", 1, marks=pytest.mark.marathon),
        *(
            pytest.param(kind, 50, marks=pytest.mark.marathon)
            for kind in ("exact", "exact average", "compiled exact", "compiled reset average")
        ),
    ],
)
def test_killed_processes_end_with_the_same_bits(kind, kills, tmp_path):
    steps = 40_000 if "compiled" in kind else 1000
    process, pipe = started(steps, kind, None)
    marks = []
    for _ in range(3):
        found = pipe.recv()
        marks.append(time.monotonic())
    process.join()
    seconds = {"forward": marks[1] - marks[0], "backward": marks[2] - marks[1]}
    generator = random.Random(0)
    for phase in seconds:
        for i in range(kills):
            folder = tmp_path / f"{phase}-{i}"
            assert killed_once(generator, phase, kind, steps, folder, seconds) == found
