"""Estimates, comparisons, and the command line."""

from __future__ import annotations

import errno
import gc
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import ase
import ase.io
import numpy as np
import psutil
import pytest
import torch
from typer.testing import CliRunner

import adjsim
from adjsim import (
    CheckpointAdjoint,
    DirectAdjoint,
    Final,
    Pathwise,
    ReversibleAdjoint,
    Simulation,
    TimeAverage,
    compare,
)
from adjsim.cli.app import app
from adjsim.cli.process import run_in_process
from adjsim.estimators import GradientEstimate
from adjsim.estimators.base import chunk_slices, mean_and_stderr
from adjsim.estimators.figures import plot_sweep
from adjsim.estimators.memory import release
from adjsim.io.systems import structure
from tests.problems import parameter, slow_but, square


def simulation():
    dynamics = adjsim.NoseHooverChain(
        adjsim.LennardJones(parameter(1.1), parameter(0.95)), kT=parameter(0.3)
    )

    def initial(replicas, generator):
        position = square()[0].expand(replicas, 4, 2)
        return dynamics.init(position, generator=generator)

    return Simulation(dynamics, initial, [0.0, 0.1, 0.2], solver=adjsim.Splitting("NBABN", 0.01))


def energy(state):
    return (state.position**2).sum((-1, -2))


@pytest.mark.parametrize(
    "observable",
    [
        pytest.param(Final(energy), marks=pytest.mark.slow),
        TimeAverage(energy, 0.05),
        lambda run: (run.position**2).sum((-1, -2)).mean(0),
    ],
    ids=["final", "average", "trajectory"],
)
def test_pathwise_is_the_mean_of_the_replicas(observable):
    problem = simulation()
    estimate = Pathwise(ReversibleAdjoint())(
        problem, observable, replicas=7, chunks=3, generator=torch.Generator().manual_seed(2)
    )
    starts = problem.starts(7, torch.Generator().manual_seed(2))
    record = observable if isinstance(observable, TimeAverage) else None
    run = adjsim.simulate(
        problem.dynamics, starts, problem.ts, solver=problem.solver, record=record
    )
    values = (
        run.record
        if record
        else observable.function(run.final)
        if isinstance(observable, Final)
        else observable(run)
    )
    parameters = dict(problem.dynamics.named_parameters())
    expected = torch.autograd.grad(values.mean(), list(parameters.values()), retain_graph=True)
    torch.testing.assert_close(estimate.value, values.mean().detach(), rtol=1e-12, atol=0)
    assert list(estimate.grad) == list(parameters)
    for mine, theirs in zip(estimate.grad.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert estimate.estimand == "path"
    assert estimate.diagnostics["energy_evaluations"] > 0
    assert estimate.diagnostics["reconstruction_error"] < 1e-10


@pytest.mark.slow
def test_chunks_only_group_the_replicas():
    problem = simulation()
    found = [
        Pathwise()(
            problem, Final(energy), replicas=6, chunks=c, generator=torch.Generator().manual_seed(2)
        )
        for c in (1, 4, 6)
    ]
    for other in found[1:]:
        torch.testing.assert_close(other.value, found[0].value, rtol=1e-12, atol=0)
    assert math.isnan(float(found[0].value_stderr))
    assert float(found[2].value_stderr) > 0


def test_chunks_are_as_even_as_possible():
    sizes = [s.stop - s.start for s in chunk_slices(10, 4)]
    assert sum(sizes) == 10
    assert max(sizes) - min(sizes) == 1
    assert len(chunk_slices(3, 16)) == 3
    with pytest.raises(ValueError, match="at least 1"):
        chunk_slices(0, 4)


@pytest.mark.slow
def test_standard_error_of_uneven_chunks_is_unbiased():
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 3, 2, 2]
    squares, errors = [], []
    for _ in range(4000):
        x = torch.randn(10, generator=generator)
        mean, stderr = mean_and_stderr([part.mean() for part in x.split(sizes)], sizes)
        torch.testing.assert_close(mean, x.mean())
        squares.append(float(mean) ** 2)
        errors.append(float(stderr) ** 2)
    # Both estimate 1/10; 4,000 repetitions of 3 degrees of freedom leave 1.3 and 2.3 %.
    assert sum(errors) / 4000 == pytest.approx(0.1, rel=0.06)
    assert sum(squares) / 4000 == pytest.approx(0.1, rel=0.1)


def test_observables_with_several_entries():
    problem = simulation()
    both = Final(lambda s: torch.stack([energy(s), 2 * energy(s)], -1))
    estimate = Pathwise()(problem, both, replicas=3, generator=torch.Generator().manual_seed(2))
    assert estimate.value.shape == (2,)
    for grad in estimate.grad.values():
        torch.testing.assert_close(grad[1], 2 * grad[0])
    with pytest.raises(ValueError, match="scalar observable"):
        estimate.accumulate(problem.dynamics)


def test_accumulate_does_what_backward_does():
    problem = simulation()
    estimate = Pathwise()(
        problem, Final(energy), replicas=2, generator=torch.Generator().manual_seed(2)
    )
    estimate.accumulate(problem.dynamics)
    estimate.accumulate(problem.dynamics)
    for name, p in problem.dynamics.named_parameters():
        torch.testing.assert_close(p.grad, 2 * estimate.grad[name])
    with pytest.raises(ValueError, match="is not a parameter of Harmonic"):
        estimate.accumulate(adjsim.Harmonic())


def test_starts_are_held_fixed():
    """kT enters the drawn momenta, and the starts are called without gradients."""
    assert not simulation().starts(2, None).momentum.requires_grad
    wrong = Simulation(
        simulation().dynamics,
        lambda n, g: simulation().starts(n + 1, g),
        [0.0, 0.1],
        solver=simulation().solver,
    )
    with pytest.raises(ValueError, match="the leading axis must be the 2 replicas"):
        Pathwise()(wrong, Final(energy), replicas=2)


def test_comparison_table_and_json():
    methods = {
        "direct": Pathwise(DirectAdjoint()),
        "checkpoint": Pathwise(CheckpointAdjoint()),
        "reversible": Pathwise(ReversibleAdjoint()),
    }
    result = compare(
        simulation(), Final(energy), methods, replicas=4, generator=torch.Generator().manual_seed(1)
    )
    text = str(result)
    for word in (*methods, "d/d epsilon", "d/d sigma", "d/d kT", "reference", "energy", "seconds"):
        assert word in text
    assert result.difference("direct") is None
    assert result.difference("checkpoint") < 1e-12
    assert result.difference("reversible") < 1e-10
    rows = result.rows()
    assert rows == json.loads(json.dumps(rows))
    assert [row["method"] for row in rows] == list(methods)
    assert rows[0]["value"] == pytest.approx(float(result.estimates["direct"].value))
    assert len(result.plot().axes) == 5


@pytest.mark.parametrize("estimands", [("path",), ("path", "stationary")])
def test_a_table_names_estimands_where_there_are_several(estimands):
    one = torch.tensor(1.0)
    costs = {"energy_evaluations": 1, "seconds": 0.0, "peak_memory": 0}
    found = {
        f"method {k}": GradientEstimate(one, one, {"k": one}, {"k": one}, name, costs)
        for k, name in enumerate(estimands)
    }
    table = adjsim.estimators.compare.Comparison(found).table()
    headings = [column.header for column in table.columns]
    assert ("estimand" in headings) == (len(estimands) > 1)
    assert all(len(list(column.cells)) == len(found) for column in table.columns)
    if len(estimands) > 1:
        assert tuple(table.columns[1].cells) == estimands


@pytest.mark.slow
def test_a_lost_method_is_listed_with_its_reason():
    methods = {"direct": Pathwise(), "reversible": Pathwise(ReversibleAdjoint(tol=1e-30))}
    result = compare(
        simulation(), Final(energy), methods, replicas=2, generator=torch.Generator().manual_seed(1)
    )
    assert list(result.estimates) == ["direct"]
    assert "checkpoint_every" in result.failures["reversible"]
    assert "reversible: reversing the steps lost" in str(result)
    assert result.rows()[1] == {
        "method": "reversible",
        "failure": result.failures["reversible"],
    }


def test_figures_of_failures_alone_are_refused():
    result = adjsim.compare(
        simulation(), Final(energy), {"score": adjsim.ScoreFunction()}, replicas=2, generator=1
    )
    assert list(result.failures) == ["score"]
    for plot in (result.plot, lambda: plot_sweep({0.2: result}), lambda: plot_sweep({})):
        with pytest.raises(ValueError, match="no method gave an estimate"):
            plot()


def test_the_picture_of_one_comparison_has_rows():
    def estimate(slope, error, estimand):
        info = {"seconds": 1.0, "peak_memory": 2e6, "reconstruction_error": None}
        info["energy_evaluations"] = 1
        found = [torch.tensor(x) for x in (1.0, error, slope, error)]
        return GradientEstimate(
            found[0], found[1], {"k": found[2]}, {"k": found[3]}, estimand, info
        )

    comparison = adjsim.Comparison(
        {
            "reweighting": estimate(-1.1, 0.1, "stationary"),
            "pathwise": estimate(-0.8, 0.05, "path"),
            "score-function": estimate(-0.9, 0.2, "stationary"),
        }
    )
    headings = [str(column.header) for column in comparison.table().columns]
    assert headings[:3] == ["method", "estimand", "value"]
    alone = adjsim.Comparison({"pathwise": estimate(-0.8, 0.05, "path")}).table()
    assert [str(column.header) for column in alone.columns][:2] == ["method", "value"]
    figure = plot_sweep({2.0: comparison}, "horizon", "eV")
    gradient = figure.axes[0]
    labels = [label.get_text() for label in gradient.get_yticklabels()]
    assert labels == [
        "pathwise (path)",
        "reweighting (stationary)",
        "score-function (stationary)",
    ]
    assert "± 2 standard errors (eV)" in gradient.get_xlabel()
    bars = [bar[2][0].get_segments()[0] for bar in gradient.containers]
    expected = [(-0.9, -0.7), (-1.3, -0.9), (-1.3, -0.5)]
    assert [tuple(bar[:, 0]) for bar in bars] == [pytest.approx(ends) for ends in expected]
    borders = [line.get_ydata()[0] for line in gradient.lines if line.get_color() == "0.8"]
    assert borders == [0.5]


def test_the_picture_of_several_comparisons_has_their_numbers():
    """Without noise as lines, and a method that has no number there as a shorter one."""

    def estimate(slope, error):
        info = {"seconds": 1.0, "peak_memory": 2e6, "reconstruction_error": error}
        found = [torch.tensor(x) for x in (1.0, 0.0, slope, 0.0)]
        return GradientEstimate(found[0], found[1], {"k": found[2]}, {"k": found[3]}, "path", info)

    figure = plot_sweep(
        {
            1.0: adjsim.Comparison({"direct": estimate(0.5, None), "rev": estimate(0.6, 1e-3)}),
            2.0: adjsim.Comparison({"direct": estimate(0.7, None), "rev": estimate(0.8, 1e-2)}),
        }
    )
    slopes, lost = figure.axes[0], figure.axes[1]
    assert [list(line.get_ydata()) for line in slopes.lines[:2]] == [[0.5, 0.7], [0.6, 0.8]]
    assert "reconstruct" in lost.get_title()
    assert [list(line.get_ydata()) for line in lost.lines[:2]] == [[], [1e-3, 1e-2]]


def as_a_user(*arguments, cwd):
    """``adjsim compare`` in a process of its own, where nothing is checked against annotations in
    every step.
    """
    return subprocess.run(
        [sys.executable, "-m", "adjsim", "compare", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def command(tmp_path, monkeypatch):
    """``adjsim compare`` in a folder of its own, without the seconds that a fresh process takes to
    import.
    """
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["compare", *arguments])


# CI runs the command itself, from the README.
@pytest.mark.marathon
def test_command_line_on_the_default(tmp_path):
    done = as_a_user("--horizon", "0.1,0.2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "adjsim-compare/compare.png" in done.stdout
    assert (tmp_path / "adjsim-compare" / "compare.png").read_bytes()[:4] == b"\x89PNG"
    document = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())
    assert [run["horizon"] for run in document["runs"]] == [0.1, 0.2]
    methods = {row["method"]: row for row in document["runs"][1]["methods"]}
    assert set(methods) == {"direct", "checkpoint", "reversible", "backsolve"}
    assert methods["reversible"]["relative_difference"] < 1e-10
    assert methods["backsolve"]["relative_difference"] < 0.05
    assert "compar" not in done.stderr  # no progress bar into a pipe
    for name, row in methods.items():
        assert f"{row['value']:.8g}" in done.stdout, name


@pytest.mark.marathon
def test_command_line_on_a_structure(command, tmp_path):
    atoms = ase.Atoms(
        "Ar4Kr",
        positions=[[0, 0, 0], [3.8, 0, 0], [0, 3.8, 0], [0, 0, 3.8], [3.8, 3.8, 3.8]],
        cell=[14, 14, 14],
        pbc=True,
    )
    for name in ("a.xyz", "a.cif", "a.pdb"):
        ase.io.write(tmp_path / name, atoms)
        system = structure(tmp_path / name)
        assert system.potential.box.tolist() == [14, 14, 14]
        assert system.potential.cutoff == 7.0
        assert (system.position - torch.tensor(atoms.positions)).abs().max() < 1e-3
    done = command(
        "--structure",
        "a.cif",
        "--horizon",
        "40",
        "--adjoint",
        "direct,reversible",
        "--dynamics",
        "nose-hoover",
    )
    assert done.exit_code == 0, done.output
    assert "Ar4Kr" in done.stdout


def test_a_cluster_file_without_a_cell_is_not_periodic(tmp_path):
    ase.io.write(
        tmp_path / "w.xyz", ase.Atoms("W2", positions=[[0, 0, 0], [3, 0, 0]]), format="xyz"
    )
    assert structure(tmp_path / "w.xyz", epsilon=0.1, sigma=2.5).potential.box is None
    tilted = ase.Atoms(
        "Xe2",
        positions=[[0, 0, 0], [4.4, 0, 0]],
        cell=[[20, 0, 0], [6, 19, 0], [0, 0, 22]],
        pbc=True,
    )
    ase.io.write(tmp_path / "x.extxyz", tilted)
    assert structure(tmp_path / "x.extxyz").potential.box.shape == (3, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--structure", "missing.xyz"], "structure file 'missing.xyz' does not exist"),
        (["--structure", "empty.xyz"], "holds no atoms"),
        (["--structure", "garbage.xyz"], "ASE cannot read a structure from 'garbage.xyz'"),
        (
            ["--structure", "iron.xyz"],
            "no Lennard-Jones parameters for Fe in 'iron.xyz' (built in: Ne, Ar, Kr, Xe); give "
            "--epsilon",
        ),
        (["--structure", "iron.xyz", "--epsilon", "1"], "--epsilon was given without --sigma"),
        (["--structure", "slab.extxyz"], "periodic along some axes only"),
        (["--structure", "flat.extxyz"], "'flat.extxyz': the atoms are periodic and their cell"),
        (
            ["--structure", "nan.xyz"],
            "'nan.xyz': atom 1 (Ar) is at (3.8, nan, 0), which is not finite; correct",
        ),
        (["--structure", "twice.xyz"], "The closest atoms, 0 and 2, are 0 apart"),
        (["--structure", "box.extxyz", "--cutoff", "5"], "cutoff 5 is above half the smallest"),
        (
            ["--adjoint", "magic"],
            "unknown adjoint 'magic'; choose from direct, checkpoint, reversible, backsolve",
        ),
        (
            ["--horizon", "0.0125"],
            "horizon 0.0125 is not a multiple of dt = 0.005; the nearest are 0.01 and 0.015",
        ),
        (["--horizon", "soon"], "horizon 'soon' is not a number"),
        (["--horizon", "-1"], "horizon -1 is not a positive time"),
        (["--dynamics", "brownian"], "unknown dynamics 'brownian'"),
        (["--scheme", "BOB"], "has no term 'O'"),
        (["--dt", "0"], "--dt must be positive; got 0"),
        (["--temperature", "inf"], "temperature must be finite"),
        (["--skin", "nan"], "--skin must not be negative; got nan"),
        (
            ["--seed", str(2**64)],
            "--seed must be an integer of at most 64 bits, from -9223372036854",
        ),
        (["--replicas", "99999999999999999999"], "replicas must be at most 2147483647"),
        (["--rates", "1,nan", "--dynamics", "generalised"], "--rates must be positive numbers"),
        (["--epsilon", "-1"], "--epsilon must be positive"),
        (["--replicas", "0"], "replicas must be at least 1"),
        (["--temperature", "-3"], "temperature must not be negative"),
        (["--cutoff", "-1"], "cutoff must be positive"),
        (["--output", "iron.xyz"], "output 'iron.xyz' is a file"),
    ],
)
def test_command_line_refuses_in_one_line(command, tmp_path, arguments, says):
    (tmp_path / "empty.xyz").write_text("0\n\n")
    (tmp_path / "garbage.xyz").write_text("not a structure\nat all\n")
    ase.io.write(tmp_path / "iron.xyz", ase.Atoms("Fe2", positions=[[0, 0, 0], [2.5, 0, 0]]))
    ase.io.write(
        tmp_path / "slab.extxyz",
        ase.Atoms("Ar2", positions=[[0, 0, 0], [3.8, 0, 0]], cell=[9, 9, 9], pbc=[1, 1, 0]),
    )
    argon = ase.Atoms("Ar3", positions=[[0, 0, 0], [3.8, 0, 0], [0, 3.8, 0]])
    ase.io.write(tmp_path / "flat.extxyz", ase.Atoms(argon, pbc=True))
    ase.io.write(tmp_path / "box.extxyz", ase.Atoms(argon, cell=[9, 9, 9], pbc=True))
    argon.positions[2] = 0
    ase.io.write(tmp_path / "twice.xyz", argon)
    argon.positions[1, 1] = np.nan
    ase.io.write(tmp_path / "nan.xyz", argon)
    before = sorted(path.name for path in tmp_path.iterdir())
    done = command(*arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_written_is_found_before_the_run(command, tmp_path, monkeypatch):
    """A parent that is a file, and a disk that says no, which no permission tells of; nothing is
    left behind.
    """
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    monkeypatch.setattr("adjsim.cli.compare_command.run_sweep", lambda *_: pytest.fail("it ran"))

    def refused(folder, why):
        done = command("--output", folder, "--horizon", "0.1")
        assert done.exit_code == 2, done.output
        assert f"output '{folder}' cannot be written ({why}" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1

    refused("file/out", "Not a directory")
    with monkeypatch.context() as patch:

        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(tempfile, "NamedTemporaryFile", full)
        refused("full", "No space left on device")
        refused("new/out", "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def given_back() -> tuple[float, float]:
    """How much less is resident once tensors are left, and once memory is released; in MB."""
    gc.disable()
    # Smaller than the blocks that the allocator returns at once.
    held: list = [torch.zeros(1000, dtype=torch.float64) for _ in range(10_000)]
    held.append(held)
    process = psutil.Process()
    before = process.memory_info().rss
    del held
    left = before - process.memory_info().rss
    release()
    return left / 1e6, (before - process.memory_info().rss) / 1e6


@pytest.mark.marathon
def test_what_is_freed_is_given_back():
    """A list of small tensors in a cycle, which only a full collection finds: 80 MB less are
    resident afterwards, in a process that has run nothing else.
    """
    left, released = run_in_process(given_back)
    assert left < 8
    assert released > 60


def test_version_of_the_readme_data():
    """The liquid argon that ships with the examples is what its file says: 108 atoms at the density
    of the measurement.
    """
    atoms = ase.io.read(Path(__file__).parents[2] / "examples" / "data" / "argon.xyz")
    assert len(atoms) == 108
    assert 108 / atoms.get_volume() == pytest.approx(0.02125, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "parameters", "refused"),
    slow_but(
        lambda *_: False,
        [
            (
                ["--dynamics", "langevin", "--friction", "0.5"],
                {"kT", "friction", "potential.epsilon", "potential.sigma"},
                None,
            ),
            (
                ["--dynamics", "langevin", "--friction", "30"],
                {"kT", "friction", "potential.epsilon", "potential.sigma"},
                "backsolve",
            ),
            (
                ["--dynamics", "generalised", "--rates", "1,4", "--strengths", "0.5,2"],
                {"kT", "rates", "strengths", "potential.epsilon", "potential.sigma"},
                None,
            ),
            (
                ["--dynamics", "overdamped", "--dt", "0.0005"],
                {"kT", "friction", "potential.epsilon", "potential.sigma"},
                "backsolve",
            ),
        ],
    ),
)
def test_command_line_on_stochastic_dynamics(command, tmp_path, options, parameters, refused):
    # A stiff friction is lost in six of its times.
    horizon = "0.2" if refused else "0.05"
    done = command(*options, "--horizon", horizon, "--output", "out")
    assert done.exit_code == 0, done.output
    (horizon,) = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    methods = {row["method"]: row for row in horizon["methods"]}
    lost = {name for name, row in methods.items() if "failure" in row}
    assert lost == ({refused} if refused else set())
    assert set(methods["direct"]["grad"]) == parameters
    for name in ("checkpoint", "reversible"):
        if name in methods:
            assert methods[name]["relative_difference"] < 1e-10
    assert ("reversible" in methods) == ("overdamped" not in options)
    if refused is None:
        # Another discretisation of the same path: of order dt.
        assert methods["backsolve"]["value"] == pytest.approx(methods["direct"]["value"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "parameters", "adjoints"),
    slow_but(
        lambda *_: False,
        [
            (["bussi", "--tau", "0.2"], {"kT", "tau"}, {"direct", "checkpoint", "reversible"}),
            (["andersen", "--friction", "20"], {"kT"}, {"direct", "checkpoint"}),
            (
                ["berendsen", "--tau", "0.2"],
                {"kT", "tau"},
                {"direct", "checkpoint", "reversible", "backsolve"},
            ),
            (["velocity-rescale"], {"kT"}, {"direct", "checkpoint"}),
        ],
        marathon=lambda options, *_: options[0] not in ("bussi", "velocity-rescale"),
    ),
)
def test_command_line_on_thermostats(command, tmp_path, options, parameters, adjoints):
    done = command("--dynamics", *options, "--horizon", "0.05", "--output", "out")
    assert done.exit_code == 0, done.output
    (horizon,) = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    methods = {row["method"]: row for row in horizon["methods"]}
    assert set(methods) == adjoints
    assert set(methods["direct"]["grad"]) == parameters | {"potential.epsilon", "potential.sigma"}
    for name in adjoints - {"direct", "backsolve"}:
        assert methods[name]["relative_difference"] < 1e-10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dynamics", "langevin", "--friction", "-1"], "friction must be positive; got -1"),
        (
            ["--dynamics", "bussi", "--adjoint", "backsolve"],
            "needs a continuous solver, which bussi does not have; choose from direct, checkpoint, "
            "reversible",
        ),
        (["--dynamics", "andersen", "--exact"], "Use exact=False with CheckpointAdjoint()"),
        (
            ["--dynamics", "overdamped", "--adjoint", "reversible"],
            "choose from direct, checkpoint, backsolve",
        ),
        (
            ["--dynamics", "overdamped", "--scheme", "BAOAB"],
            "choose from EulerMaruyama, LeimkuhlerMatthews",
        ),
        (
            ["--dynamics", "langevin", "--tau", "1"],
            "--tau is for nose-hoover and bussi and berendsen, not for langevin",
        ),
        (["--rates", "1,2"], "--rates is for generalised, not for hamiltonian"),
        (
            ["--dynamics", "generalised", "--strengths", "3"],
            "--strengths was given without --rates",
        ),
        (["--dynamics", "generalised", "--rates", "1,x"], "--rates '1,x' is not a list of numbers"),
        (
            ["--dynamics", "generalised", "--rates", "1", "--strengths", "1,2"],
            "give equally many",
        ),
    ],
)
def test_command_line_refuses_stochastic_nonsense(command, tmp_path, options, says):
    done = command(*options, "--output", "out")
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.marathon
def test_command_line_exact(tmp_path):
    """Reversal on the lattice beside the plain one, which is shown with what it loses."""
    done = as_a_user(
        "--exact",
        "--horizon",
        "1,20",
        "--adjoint",
        "checkpoint,reversible",
        "--output",
        "out",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "BAB exact at dt" in done.stdout
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document["exact"] is True
    short, long = ({row["method"]: row for row in h["methods"]} for h in document["runs"])
    for methods in (short, long):
        assert methods["reversible"]["reconstruction_error"] == 0.0
        assert methods["reversible"]["relative_difference"] < 1e-12
    assert short["reversible, plain"]["reconstruction_error"] < 1e-10
    assert long["reversible, plain"]["reconstruction_error"] > 1e-3


def test_command_line_refuses_exact_steps_that_cannot_be_undone(command, tmp_path):
    done = command("--exact", "--dynamics", "overdamped", "--output", "out")
    assert done.exit_code == 2
    assert "the steps of overdamped have no inverse" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_command_line_refuses_stationary_estimators_of_a_displacement(command, tmp_path):
    done = command(
        "--estimators",
        "girsanov,score-function",
        "--observable",
        "msd",
        "--replicas",
        "4",
        "--horizon",
        "0.5,1",
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.count("score-function: does not apply.") == 2
    document = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())
    assert [run["horizon"] for run in document["runs"]] == [0.5, 1.0]


@pytest.mark.marathon
def test_command_line_sweeps_over_replicas(command, tmp_path):
    """Errors fall with the replicas, and the gradients agree within them."""
    done = command(
        "--estimators", "pathwise,score-function", "--replicas", "16,128", "--horizon", "0.1"
    )
    assert done.exit_code == 0, done.output
    runs = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())["runs"]
    assert [run["replicas"] for run in runs] == [16, 128]
    few, many = ({row["method"]: row for row in run["methods"]} for run in runs)
    for method, row in many.items():
        for name, error in row["grad_stderr"].items():
            before = few[method]["grad_stderr"][name]
            # The root of an eighth, and the scatter of an error bar of 16 replicas.
            assert error < 0.6 * before
            assert abs(row["grad"][name] - few[method]["grad"][name]) < 5 * (error + before)


@pytest.mark.slow
def test_command_line_estimators_on_the_cluster(command, tmp_path):
    """By epsilon and sigma, the bath being held; path and stationary estimates of the same mean
    apart.
    """
    done = command(
        "--estimators",
        "pathwise,girsanov,score-function",
        "--observable",
        "gyration",
        "--horizon",
        "0.5",
        "--replicas",
        "8",
    )
    assert done.exit_code == 0, done.output
    assert "radius of gyration, mean over the second half of the run" in done.stdout
    (run,) = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())["runs"]
    methods = {row["method"]: row for row in run["methods"]}
    assert set(methods) == {"pathwise", "girsanov", "score-function"}
    for row in methods.values():
        assert set(row["grad"]) == {"potential.epsilon", "potential.sigma"}


@pytest.mark.slow
def test_command_line_adjoints_of_another_observable(command, tmp_path):
    done = command(
        "--observable",
        "gyration",
        "--adjoint",
        "direct,reversible",
        "--horizon",
        "0.1",
        "--replicas",
        "1,3",
    )
    assert done.exit_code == 0, done.output
    assert "Value: radius of gyration at the horizon" in done.stdout
    runs = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())["runs"]
    assert [run["replicas"] for run in runs] == [1, 3]
    for run in runs:
        assert run["methods"][0]["value"] == pytest.approx(1.03, abs=0.05)
        assert run["methods"][1]["relative_difference"] < 1e-10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--estimators", "reinforce"], "unknown estimator 'reinforce'; choose from pathwise"),
        (["--estimators", "all", "--replicas", "1"], "replicas must be at least 2"),
        (["--horizon", "0.003"], "not a multiple of dt"),
        (
            ["--estimators", "girsanov", "--adjoint", "direct"],
            "--adjoint compares adjoints, and --estimators compares estimators",
        ),
        (["--observable", "square"], "unknown observable 'square'; choose from energy, gyration"),
        (
            ["--horizon", "1,2", "--replicas", "64,128"],
            "several horizons or several numbers of replicas, not both",
        ),
        (["--replicas", "many"], "replicas 'many' is not an integer"),
    ],
)
def test_command_line_refuses_nonsense(command, tmp_path, options, says):
    done = command(*options, "--output", "out")
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
