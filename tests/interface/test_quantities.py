"""Observables of atoms and cutoffs on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import ase
import ase.io
import pytest
import torch
from ase import units
from typer.testing import CliRunner

import adjsim
from adjsim.cli.app import app
from adjsim.cli.models import BathSettings, model_of
from adjsim.cli.quantities import quantity_of
from adjsim.io.systems import Cutoff, cluster, structure
from tests.problems import slow_but

ARGON = Path(__file__).parents[2] / "examples" / "data" / "argon.xyz"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """``adjsim compare`` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["compare", *arguments])


def observed(name, dynamics="langevin", distance=None):
    """An observable of argon, and a state of two replicas of which one has moved."""
    system = structure(ARGON)
    model = model_of(system, dynamics, BathSettings(85.0, 200.0, 0.001, [1.0], [1.0]))
    position = torch.stack([system.position, system.position + torch.tensor([0.3, 0.0, 0.4])])
    state = model.init(position, generator=torch.Generator().manual_seed(0))
    return system, model, state, quantity_of(name, system, model, distance)


@pytest.mark.slow
def test_energy_and_displacement():
    system, _, state, energy = observed("energy")
    torch.testing.assert_close(energy.value(state), system.potential(state.position) / 108)
    *_, displacement = observed("msd")
    assert displacement.value(state).tolist() == pytest.approx([0.0, 0.25])
    assert displacement.from_start


def test_pressure_and_temperature_have_units():
    _, model, state, pressure = observed("pressure")
    expected = adjsim.pressure(model, state) / (1e6 * units.Pascal)
    torch.testing.assert_close(pressure.value(state), expected)
    assert pressure.unit == "MPa"
    *_, temperature = observed("temperature")
    kinetic = adjsim.kinetic_temperature(state.momentum, model.mass)
    torch.testing.assert_close(temperature.value(state), kinetic / units.kB)
    assert temperature.unit == "K"


@pytest.mark.parametrize(
    ("dynamics", "dof"),
    [("nose-hoover", 321), ("bussi", 321), ("andersen", 324), ("langevin", 324)],
)
def test_the_temperature_counts_the_total_momentum_where_it_changes(dynamics, dof):
    _, model, state, temperature = observed("temperature", dynamics)
    kinetic = adjsim.kinetic_temperature(state.momentum, model.mass, dof)
    torch.testing.assert_close(temperature.value(state), kinetic / units.kB)


@pytest.mark.parametrize("distance", [None, 5.0])
def test_the_radial_distribution_says_where(distance):
    system, _, state, radial = observed("rdf", distance=distance)
    sigma = system.potential.sigma.item()
    r = 2 ** (1 / 6) * sigma if distance is None else distance
    assert f"{r:.4g} angstrom" in radial.title
    expected = adjsim.smooth_radial_distribution(
        state.position, torch.tensor([r]), system.potential.box, width=0.03 * sigma
    )
    torch.testing.assert_close(radial.value(state), expected[:, 0])


def test_truncations_reach_the_potential():
    made = {
        name: structure(ARGON, cutoff=Cutoff(5.0, name, skin=0.5)).potential
        for name in ("shifted", "force-shifted", "switched")
    }
    assert [repr(p.truncation) for p in made.values()] == [
        "Shifted()",
        "ForceShifted()",
        "Switched(start=4.5)",
    ]
    assert {p.cutoff for p in made.values()} == {5.0}
    assert {p.skin for p in made.values()} == {0.5}
    assert cluster(cutoff=Cutoff(2.0, "switched", 1.5)).potential.truncation.start == 1.5


@pytest.mark.parametrize(
    "observable",
    slow_but(
        lambda name: name == "temperature",
        ["msd", "pressure", "rdf", "temperature"],
        marathon=lambda name: name != "pressure",
    ),
)
def test_command_line_observables(command, tmp_path, observable):
    done = command(
        "--structure", str(ARGON), "--observable", observable, "--horizon", "12",
        "--adjoint", "direct,reversible", "--cutoff", "5", "--truncation", "force-shifted",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "neighbour list within 5 (ForceShifted())" in done.stdout
    document = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())
    assert document["pairs"] == "neighbour list"
    assert (document["cutoff"], document["truncation"]) == (5.0, "ForceShifted()")
    direct, reversible = document["runs"][0]["methods"]
    assert direct["pairs"] == {"LennardJones": "neighbour list"}
    assert reversible["relative_difference"] < 1e-10
    assert direct["grad"]["potential.sigma"] != 0


@pytest.mark.slow
def test_methods_that_evaluate_pairs_otherwise_say_so(command, tmp_path):
    """A displacement has no equilibrium, and forward mode has no operator of pairs."""
    done = command(
        "--structure", str(ARGON), "--observable", "msd", "--horizon", "8", "--replicas", "2",
        "--estimators", "forward-sensitivity,finite-difference,reweighting",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "mean squared displacement from the start at the horizon" in done.stdout
    assert "reweighting: does not apply" in done.stdout
    assert "forward-sensitivity: pairs by another path: all pairs, by torch" in done.stdout
    (run,) = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())["runs"]
    pairs = {row["method"]: row.get("pairs") for row in run["methods"]}
    assert pairs["finite-difference"] == {"LennardJones": "all pairs"}
    assert pairs["forward-sensitivity"]["LennardJones"].startswith("all pairs, by torch")


@pytest.mark.parametrize(
    "observable",
    [
        pytest.param("msd", marks=pytest.mark.marathon),
        pytest.param("pressure", marks=pytest.mark.marathon),
        pytest.param("rdf", marks=pytest.mark.marathon),
        pytest.param("temperature", marks=pytest.mark.slow),
    ],
)
def test_observables_are_compiled(command, tmp_path, observable):
    """In a compiled loop they have the values that they have in Python."""
    values = []
    for option in ([], ["--compile"]):
        done = command(
            "--structure", str(ARGON), "--observable", observable, "--horizon", "40",
            "--estimators", "finite-difference", "--replicas", "2", *option,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        (run,) = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())["runs"]
        assert run["methods"][0]["compiled"] == bool(option)
        values.append(run["methods"][0]["value"])
    # Ten steps, after which rounding has grown by less than a thousand.
    assert values[0] == pytest.approx(values[1], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--observable", "pressure"], "--observable pressure needs a periodic box, and the 13"),
        (["--observable", "rdf"], "--observable rdf needs a periodic box"),
        (
            ["--observable", "temperature", "--dynamics", "overdamped"],
            "--observable temperature needs momenta, which OverdampedLangevin does not have",
        ),
        (
            ["--observable", "pressure", "--dynamics", "overdamped", "--structure", "gas.extxyz"],
            "--observable pressure needs momenta",
        ),
        (
            ["--observable", "rdf", "--distance", "8", "--structure", "gas.extxyz"],
            "--distance 8 is not between 0 and 7, half the smallest perpendicular width of the box",
        ),
        (["--distance", "2"], "--distance is for --observable rdf, not for energy"),
        (["--truncation", "sharp", "--cutoff", "2"], "choose one of shifted, force-shifted, swit"),
        (["--truncation", "switched"], "--truncation switched needs a cutoff; give --cutoff"),
        (["--skin", "0.3"], "--skin needs a cutoff; give --cutoff"),
        (["--cutoff", "2", "--switch-start", "1"], "--switch-start is for --truncation switched"),
        (
            ["--cutoff", "2", "--truncation", "switched", "--switch-start", "3"],
            "needs a start from 0 to below the cutoff 2; got 3",
        ),
        (
            ["--structure", "gas.extxyz", "--cutoff", "9"],
            "cutoff 9 is above half the smallest perpendicular width of the box, 7",
        ),
        (["--structure", "nan.xyz"], "'nan.xyz': atom 1 (Kr) is at (nan, 0, 0), which is not fini"),
        (["--structure", "iron.extxyz"], "The first such atom is number 2"),
    ],
)
def test_command_line_refuses_in_one_line(command, tmp_path, options, says):
    at = [[0, 0, 0], [3.8, 0, 0]]
    gas = ase.Atoms("ArKr", positions=at, cell=[14, 14, 14], pbc=True)
    ase.io.write(tmp_path / "gas.extxyz", gas)
    ase.io.write(tmp_path / "iron.extxyz", ase.Atoms("ArFe", positions=at))
    (tmp_path / "nan.xyz").write_text("2\n\nAr 0 0 0\nKr nan 0 0\n")
    done = command(*options, "--output", "out")
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
