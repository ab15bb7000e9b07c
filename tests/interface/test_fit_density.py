"""Fits to measured densities on the command line, alone and beside g(r)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ase
import ase.io
import pytest
import torch
from ase import units
from ase.build import bulk
from typer.testing import CliRunner

import adjsim
from adjsim.cli.app import app
from adjsim.cli.curve import Curve
from adjsim.cli.density import Density, piston_job, read_densities
from adjsim.cli.fit_runs import Condition, _Observed
from adjsim.io.systems import Cutoff, structure

ROOT = Path(__file__).parents[2]
GRAMS = 1000 * units.kg / units.m**3


@pytest.fixture
def liquid(tmp_path, monkeypatch):
    """A folder with a liquid of 32 atoms and measurements."""
    monkeypatch.chdir(tmp_path)
    atoms = bulk("Ar", "fcc", a=(4 / 0.02) ** (1 / 3), cubic=True).repeat(2)
    atoms.rattle(0.3, seed=1)
    ase.io.write("argon.xyz", atoms, format="extxyz")
    (tmp_path / "g.csv").write_text("r,g\n3,0\n3.5,2\n4,2\n5,0.6\n")
    (tmp_path / "table.txt").write_text("# argon\nT density\n90 1.378\n100 1.314 0.004\n")
    return tmp_path


def run(*options):
    return CliRunner().invoke(app, ["fit", "--structure", "argon.xyz", *options])


SHORT = (
    "--steps", "24", "--burn-in", "12", "--replicas", "2", "--iterations", "1", "--no-compile",
    "--no-melt",
)  # fmt: skip


def test_a_table_of_densities_is_read(liquid):
    (liquid / "table.txt").write_text("# argon\nT,density\n90,1.378\n100,1.314\n")
    found = read_densities("table.txt", 85.0, "g/cm3", 0.01)
    assert [(x.temperature, x.value) for x in found] == [(90.0, 1.378), (100.0, 1.314)]
    assert [x.stderr for x in found] == pytest.approx([0.01378, 0.01314])
    # A gram is Avogadro's number of amu.
    assert found[0].scale == pytest.approx(0.602214, rel=1e-6)
    (liquid / "table.txt").write_text("90 1378 2\n100 1314 3\n")
    found = read_densities("table.txt", 85.0, "kg/m3", 0.01)
    assert [x.stderr for x in found] == [2.0, 3.0]
    assert found[0].scale == pytest.approx(0.602214e-3, rel=1e-6)
    (alone,) = read_densities("1.4", 85.0, "g/cm3", 0.01)
    assert (alone.temperature, alone.value, alone.stderr) == (85.0, 1.4, pytest.approx(0.014))


def test_densities_and_g_are_those_of_the_box_of_each_frame(liquid):
    """Against the mass over the volume, and g(r) of each frame in a box of its own."""
    system = structure(liquid / "argon.xyz", cutoff=Cutoff(room=0.9))
    job = piston_job(system, 90.0, 0.001, 4.0, 1.0, 1000.0, 0)
    r = torch.tensor([3.5, 4.0, 5.0], dtype=torch.float64)
    density = Density(90.0, 1.4, 0.01, "g/cm3")
    observed = _Observed(Condition(job, density, Curve(r, r, None)), 0.1)
    state = job.initial(3, torch.Generator().manual_seed(0))
    strain = torch.tensor([0.0, 0.01, 0.02], dtype=torch.float64).reshape(3, 1, 1)
    state = state._replace(strain=strain, position=state.position * torch.exp(strain))
    found = observed(state)
    edge = float(system.potential.box[0])
    for i, e in enumerate((0.0, 0.01, 0.02)):
        own = edge * math.exp(e)
        mass = 32 * float(system.mass[0]) / own**3
        assert float(found[i, 0]) == pytest.approx(mass / GRAMS, rel=1e-12)
        g = adjsim.smooth_radial_distribution(state.position[i], r, [own] * 3, width=0.1)
        torch.testing.assert_close(found[i, 1:], g, rtol=1e-10, atol=0)
    # Kept values are those of the positions and the strain.
    torch.testing.assert_close(observed(state), found, rtol=0, atol=0)
    assert not torch.allclose(observed(state._replace(strain=strain + 0.01))[:, 1:], found[:, 1:])


@pytest.mark.slow
def test_the_command_fits_a_table_and_a_curve(liquid):
    """One run for each temperature, and for that of g(r), which is none of the table."""
    (liquid / "table.txt").write_text("90 1.378 0.003\n")
    options = ("--density", "table.txt", "--target", "g.csv", "--target-error", "0.05", *SHORT)
    done = run(*options, "--temperature", "95", "--store", "kept")
    assert done.exit_code == 0, done.output
    assert "LangevinPiston, BVSAOASVB at dt = 4, 90, 95 K" in done.stdout
    assert "Pressure: 1 bar, with a correction for the pairs beyond the cutoff." in done.stdout
    assert "1.3780 ± 0.0030" in done.stdout
    assert (liquid / "adjsim-fit" / "fit.png").read_bytes()[:4] == b"\x89PNG"
    document = json.loads((liquid / "adjsim-fit" / "fit.json").read_text())
    assert document["pressure"] == 1.0
    assert document["cutoff"] == pytest.approx(0.9 * 0.5 * 2 * 200 ** (1 / 3))
    assert document["curve"]["measured_stderr"] == [0.05] * 4
    rows = document["densities"]
    assert [(row["temperature"], row["measured_stderr"]) for row in rows] == [(90.0, 0.003)]
    assert all(0.5 < row[when] < 2 for row in rows for when in ("start", "fitted"))
    # The losses add, each in units of the error.
    curve = document["curve"]
    loss = sum(((row["fitted"] - row["measured"]) / row["measured_stderr"]) ** 2 for row in rows)
    pairs = zip(curve["simulated"], curve["measured"], strict=True)
    loss += sum(((x - y) / 0.05) ** 2 for x, y in pairs)
    assert document["loss"] == pytest.approx(loss, rel=1e-10)
    again = run(*options, "--temperature", "95", "--store", "kept", "--output", "again")
    assert again.exit_code == 0, again.output
    other = json.loads((liquid / "again" / "fit.json").read_text())
    assert other["evaluations"] == document["evaluations"]
    other = run(*options, "--temperature", "96", "--store", "kept", "--output", "other")
    assert other.exit_code == 2


@pytest.mark.slow
def test_one_number_is_fitted_and_the_other_held(liquid):
    done = run("--density", "1400", "--density-unit", "kg/m3", "--parameters", "sigma", *SHORT)
    assert done.exit_code == 0, done.output
    document = json.loads((liquid / "adjsim-fit" / "fit.json").read_text())
    assert list(document["parameters"]) == ["sigma"]
    assert document["target"] is None
    assert "curve" not in document
    assert "Target" not in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "nothing is measured: give --target, --density or both"),
        (["--density", "1.4"], "1 densities do not determine 2 numbers: fit fewer, as by --para"),
        (["--density", "-1.4"], "density '-1.4': a density must be positive; got -1.4"),
        (["--density", "nan"], "density 'nan': a density must be positive; got nan"),
        (["--density", "no.txt"], "density 'no.txt' is neither a number nor a file; give a"),
        (["--density", "1.4", "--density-unit", "lb"], "unknown density unit 'lb'; choose one of"),
        (["--density", "g.csv"], "density 'g.csv': a density must be positive; got 0"),
        (["--density", "four.txt"], "line 1: '90 1 2 3' is not temperature and density, and per"),
        (["--density", "one.txt"], "density 'one.txt', line 1: '90' is not temperature and densit"),
        (["--density", "names.txt"], "line 1: '90 K 1.378' is not temperature and density, and"),
        (["--density", "kilo.txt"], "which has 1.33 g/cm3: correct it, or give --density-unit"),
        (["--density", "table.txt"], "line 4: '100 1.314 0.004' is not 2 numbers, as above"),
        (["--density", "back.txt"], "the temperature 90 follows 100; sort the lines by temperatur"),
        (["--density", "cold.txt"], "the temperature -5 is not positive; remove the line"),
        (["--density", "good.txt", "--temperature", "85"], "--temperature 85 is none of 'good.txt"),
        (["--density", "good.txt", "--structure", "free.xyz"], "constant pressure needs one"),
        (["--density", "good.txt", "--structure", "X.xyz"], "atoms without a mass, and a de"),
        (["--density", "good.txt", "--structure", "light.xyz"], "atoms without a mass, and"),
        (["--density", "good.txt", "--pressure", "nan"], "below a million bar; got nan"),
        (["--density", "good.txt", "--pressure", "1e7"], "below a million bar; got 1e+07"),
        (["--density", "good.txt", "--piston-tau", "0"], "--piston-tau must be positive; got 0"),
        (["--density", "good.txt", "--density-error", "0"], "--density-error must be positive"),
        (["--density", "good.txt", "--dynamics", "bussi"], "by a Langevin piston, not by bussi"),
        (["--density", "good.txt", "--estimator", "pathwise"], "pathwise is for --target alone"),
        (["--density", "good.txt", "--r-max", "5"], "--r-max is for --target, which was not given"),
        (["--density", "good.txt", "--target", "g.csv"], "give --target-error"),
        (["--density", "good.txt", "--target", "far.csv", "--target-error", "1"], "0.9 of half"),
        (
            [
                "--density", "1.378", "--temperature", "90", "--target", "g.csv", "--target-error",
                "0.1", "--target-density", "0.02",
            ],
            "--density 1.378 g/cm3 at 90 K is 0.02077 atoms per cubic angstrom, and the density of "
            "the target is 0.02",
        ),
    ],
)  # fmt: skip
def test_bad_densities_are_refused_in_one_line(liquid, options, says):
    for name, text in {
        "four": "90 1 2 3\n",
        "one": "90\n",
        "back": "100 1.3\n90 1.4\n",
        "cold": "-5 1.4\n",
        "names": "90 K 1.378\n95 1.35\n100 1.314\n",
        "kilo": "90 1378\n100 1314\n",
        "good": "90 1.378\n100 1.314\n",
    }.items():
        (liquid / f"{name}.txt").write_text(text)
    (liquid / "far.csv").write_text("3.5,2\n5.5,0.6\n")
    at = [[0, 0, 0], [3.8, 0, 0]]
    ase.io.write("free.xyz", ase.Atoms("Ar2", positions=at))
    ase.io.write("X.xyz", ase.Atoms("X2", positions=at, cell=[9] * 3, pbc=True))
    light = ase.Atoms("Ar2", positions=at, cell=[9] * 3, pbc=True, masses=[0, 0])
    ase.io.write("light.xyz", light, columns=["symbols", "positions", "masses"])
    if "X.xyz" in options:
        options = [*options, "--epsilon", "0.01", "--sigma", "3.4"]
    done = run(*options)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (liquid / "adjsim-fit").exists()


def measured(temperatures, epsilon, sigma, root):
    """The densities of a liquid of known numbers, by long runs at 1 bar, in g/cm3."""
    system = structure(root, epsilon, sigma, Cutoff(7.4))
    rows = []
    for i, kelvin in enumerate(temperatures):
        job = piston_job(system, kelvin, 0.001, 10.0, 1.0, 1000.0, 0)
        model, dt = job.model, job.solver.dt
        start = job.initial(16, torch.Generator().manual_seed(10 + i))
        with torch.no_grad():
            density = adjsim.simulate(
                model, start, [n * dt for n in (0, *range(2500, 10001, 25))], solver=job.solver,
                generator=20 + i, compile=True, record=model.density,
            ).record[1:]  # fmt: skip
        mean = density.mean(0) / GRAMS
        rows.append((kelvin, float(mean.mean()), float(mean.std()) / 4))
    return rows


@pytest.mark.marathon
def test_the_sigma_of_a_density_is_recovered(liquid):
    """From a start that is wrong by one and a half per cent, with the epsilon held."""
    epsilon, sigma = 0.0105, 3.38
    root = ROOT / "examples" / "data" / "argon.xyz"
    ((_, value, error),) = measured([90.0], epsilon, sigma, root)
    (liquid / "table.txt").write_text(f"90 {value} {error}\n")
    done = run(
        "--structure", str(root), "--density", "table.txt", "--cutoff", "7.4", "--epsilon",
        f"{epsilon}", "--sigma", "3.43", "--parameters", "sigma", "--dt", "10", "--steps", "5000",
        "--burn-in", "1000",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads((liquid / "adjsim-fit" / "fit.json").read_text())
    assert document["warnings"] == []
    found = document["parameters"]["sigma"]
    assert abs(found["fitted"] - sigma) < 4 * found["stderr"]
    assert found["stderr"] < 0.01
    (row,) = document["densities"]
    noise = math.hypot(row["fitted_stderr"], row["measured_stderr"])
    assert abs(row["fitted"] - value) < 4 * noise
    # The start is too thin, by three times its change of sigma.
    assert row["start"] / value == pytest.approx((sigma / 3.43) ** 3, abs=0.02)


@pytest.mark.marathon
def test_the_numbers_of_a_table_of_densities_are_recovered(liquid):
    epsilon, sigma = 0.0105, 3.38
    root = ROOT / "examples" / "data" / "argon.xyz"
    rows = measured([85.0, 100.0, 115.0], epsilon, sigma, root)
    (liquid / "table.txt").write_text("\n".join(" ".join(map(str, row)) for row in rows))
    done = run(
        "--structure", str(root), "--density", "table.txt", "--cutoff", "7.4", "--dt", "10",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads((liquid / "adjsim-fit" / "fit.json").read_text())
    for name, truth in (("epsilon", epsilon), ("sigma", sigma)):
        found = document["parameters"][name]
        assert abs(found["fitted"] - truth) < 4 * found["stderr"]
        assert found["stderr"] < 0.1 * truth
    for row in document["densities"]:
        noise = math.hypot(row["fitted_stderr"], row["measured_stderr"])
        assert abs(row["fitted"] - row["measured"]) < 4 * noise
