"""Fits to measured curves, in Python and on the command line."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import ase
import ase.io
import numpy as np
import pytest
import torch
from ase import units
from ase.build import bulk
from scipy.stats import ttest_1samp
from typer.testing import CliRunner

import adjsim
from adjsim import Reweighting, Simulation, TimeAverage
from adjsim.cli.app import app
from adjsim.cli.curve import read_curve
from adjsim.estimators.figures import plot_fit
from adjsim.estimators.fit.fit import _drifting, fit
from adjsim.estimators.fit.gauss_newton import Target, chance_of_drift, gauss_newton
from tests.problems import parameter

WIDTH, R = 0.3, torch.linspace(-2.0, 3.0, 11)


def wells(k=1.0, center=0.4, at=0.0, burn_in=10.0):
    """Three atoms in a harmonic well, the density of their positions, and the exact density.

    BAOAB samples these positions without an error of the step.
    """
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(k), parameter(center)), friction=2.0)
    simulation = Simulation(
        dynamics,
        lambda n, generator: dynamics.init(torch.full((n, 3, 1), at), generator=generator),
        [0.0, 75.0],
        solver=adjsim.BAOAB(0.5),
    )

    def density(state):
        z = (R - state.position) / WIDTH
        return (-0.5 * z**2).exp().mean(1) / (WIDTH * math.sqrt(2 * math.pi))

    return simulation, TimeAverage(density, burn_in=burn_in), partial(Reweighting, every=2.5)


def exact(k=1.0, center=0.4):
    variance = 1 / k + WIDTH**2
    return (-((R - center) ** 2) / (2 * variance)).exp() / math.sqrt(2 * math.pi * variance)


def fitted(seed, target=None, start=(1.5, 0.1), **options):
    simulation, observable, make = wells(*start)
    target = exact() if target is None else target
    options = {"replicas": 64, "generator": seed, "largest_change": math.inf, **options}
    return fit(simulation, observable, target, make, **options), simulation.dynamics


@pytest.mark.slow
def test_the_fit_finds_the_well():
    """A step of Gauss and Newton from far away, and more until it is small beside the errors."""
    found, dynamics = fitted(0)
    assert found.converged
    assert found.warnings == []
    assert list(found.values) == ["potential.k", "potential.center"]
    for (name, value), truth in zip(found.values.items(), (1.0, 0.4), strict=True):
        assert abs(float(value) - truth) < 4 * float(found.errors[name])
        # 64 replicas of three atoms and some ten independent times each.
        assert 0.005 < float(found.errors[name]) < 0.1
        assert torch.equal(dict(dynamics.named_parameters())[name].detach(), value)
    assert [float(x) for x in found.history[0].values.values()] == [1.5, 0.1]
    first, last = found.history[0].loss, found.history[-1].loss
    assert last < 0.01 * first
    assert len(found.history) < 10


def at_temperatures(*temperatures):
    """Wells of one potential at several temperatures, and the exact means of q and q^2."""
    well = adjsim.Harmonic(parameter(1.5), parameter(0.1))
    simulations, exact = [], []
    for kT in temperatures:
        dynamics = adjsim.Langevin(well, kT=kT, friction=2.0)

        def initial(n, generator, dynamics=dynamics):
            return dynamics.init(torch.zeros(n, 3, 1), generator=generator)

        simulations.append(Simulation(dynamics, initial, [0.0, 75.0], solver=adjsim.BAOAB(0.5)))
        exact += [0.4, kT / 2.0 + 0.16]

    def moments(state):
        return torch.cat([state.position.mean(1), state.position.square().mean(1)], -1)

    observables = [TimeAverage(moments, burn_in=10.0)] * len(temperatures)
    return simulations, observables, torch.tensor(exact)


@pytest.mark.slow
def test_several_simulations_fit_one_potential():
    """Two temperatures, with different numbers of data, find the well k = 2 at 0.4."""
    simulations, observables, target = at_temperatures(1.0, 0.5)
    observables[1] = TimeAverage(lambda state: state.position.mean(1), burn_in=10.0)
    found = fit(
        simulations, observables, target[:3], partial(Reweighting, every=2.5), replicas=64,
        generator=0, stderr=[0.01] * 3, largest_change=math.inf,
    )  # fmt: skip
    assert found.warnings == []
    for (name, value), truth in zip(found.values.items(), (2.0, 0.4), strict=True):
        assert abs(float(value) - truth) < 4 * float(found.errors[name])
        assert 0.005 < float(found.errors[name]) < 0.1


def test_chunks_share_the_replicas():
    simulation, observable, make = wells()
    drawn = list[int]()

    def initial(n, generator):
        drawn.append(n)
        return simulation.initial(n, generator)

    counted = Simulation(simulation.dynamics, initial, [0.0, 75.0], solver=simulation.solver)
    fit(counted, observable, exact(), make, replicas=7, chunks=3, iterations=1, generator=0)
    # Probes draw other numbers.
    assert {2, 3} <= set(drawn)


def test_simulations_that_do_not_go_together_are_refused():
    simulations, observables, target = at_temperatures(1.0, 0.5)
    make = partial(Reweighting, every=2.5)
    with pytest.raises(ValueError, match="each simulation needs an observable; got 2 and 1"):
        fit(simulations, observables[:1], target, make, replicas=4)
    with pytest.raises(ValueError, match="each simulation needs an observable; got 0 and 0"):
        fit([], [], target, make, replicas=4)
    others = [simulations[0], at_temperatures(0.5)[0][0]]
    with pytest.raises(ValueError, match=r"share their parameters.*potential\.k"):
        fit(others, observables, target, make, replicas=4)


@pytest.mark.marathon
def test_the_errors_are_those_of_repeated_fits():
    """Forty fits of two numbers: the mean square of value over error has an error of a quarter,
    with the tails of Student's t of seven degrees of freedom.
    """
    squares, values = [], []
    for seed in range(40):
        found, _ = fitted(seed, start=(1.0, 0.4))
        values.append([float(x) for x in found.values.values()])
        for (name, value), truth in zip(found.values.items(), (1.0, 0.4), strict=True):
            squares.append(((float(value) - truth) / float(found.errors[name])) ** 2)
    assert 0.4 < np.mean(squares) < 2.0
    # Without a bias beyond three errors of the mean.
    mean, error = np.mean(values, 0), np.std(values, 0, ddof=1) / math.sqrt(40)
    assert (np.abs(mean - [1.0, 0.4]) < 3 * error).all()


def test_errors_of_the_target_add_to_those_of_the_fit():
    """They dominate here, so the errors of the fit are nearly in proportion."""
    small, large = (
        fitted(0, start=(1.0, 0.4), iterations=1, stderr=torch.full_like(R, size))[0]
        for size in (0.1, 1.0)
    )
    for name in small.errors:
        ratio = float(large.errors[name] / small.errors[name])
        assert 9 < ratio <= 10
    # By hand: the derivatives of the exact curve by differences.
    h = 1e-4
    J = torch.stack(
        [
            (exact(1 + h) - exact(1 - h)) / (2 * h),
            (exact(1.0, 0.4 + h) - exact(1.0, 0.4 - h)) / (2 * h),
        ],
        1,
    )
    expected = torch.linalg.inv(J.T @ J).diagonal().sqrt()
    for entry, name in zip(expected, large.errors, strict=True):
        # The derivatives have errors of some per cent.
        assert float(large.errors[name]) == pytest.approx(float(entry), rel=0.25)


def test_runs_that_are_not_at_equilibrium_are_found():
    """From far away without a burn-in, a part of the first halves is on the way to the well."""
    warned = []
    for at, burn_in in ((0.4, 10.0), (1e3, 0.0)):
        simulation, observable, make = wells(at=at, burn_in=burn_in)
        found = fit(simulation, observable, exact(), make, replicas=64, iterations=1, generator=0)
        warned.append(any("not come to equilibrium" in warning for warning in found.warnings))
    assert warned == [False, True]


def test_without_noise_a_step_is_that_of_weighted_least_squares():
    generator = torch.Generator().manual_seed(0)
    values, stderr, curve = torch.rand(3, 6, generator=generator, dtype=torch.float64) + 0.5
    slope = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    share = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    target = Target.of(values, stderr)
    step = gauss_newton(curve.expand(3, 6), slope.expand(3, 6, 2), share, target)
    solved = np.linalg.lstsq(slope / stderr[:, None], torch.diag(1 / stderr), rcond=None)[0]
    torch.testing.assert_close(step.response, torch.as_tensor(solved), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step.change, step.response @ (values - curve))
    # Errors of the target alone.
    covariance = step.response @ torch.diag(stderr**2) @ step.response.T
    torch.testing.assert_close(step.covariance, covariance)


def test_errors_without_those_of_the_target_are_from_the_scatter_about_the_fit():
    values, slope = torch.tensor([0.4, 0.9, -0.3, 0.5, 0.1, 0.2]).double(), torch.eye(6, 2).double()
    chunks, share = torch.zeros(2, 6).double(), torch.full((2,), 0.5).double()
    step = gauss_newton(chunks, slope.expand(2, 6, 2), share, Target.of(values, None))
    scatter = float(values @ values) / (6 - 2)
    torch.testing.assert_close(step.covariance, scatter * torch.eye(2).double())


def test_a_target_of_as_many_numbers_as_parameters_has_no_scatter():
    values, slope = torch.tensor([0.4, 0.9]).double(), torch.tensor([[1.0, 0.5], [0.2, 2.0]])
    chunks = torch.zeros(2, 2, dtype=torch.float64)
    share = torch.full((2,), 0.5, dtype=torch.float64)
    step = gauss_newton(chunks, slope.double().expand(2, 2, 2), share, Target.of(values, None))
    torch.testing.assert_close(slope.double() @ step.change, values)
    # The sum of squares itself stands for the error that nothing is left to estimate.
    inverse = torch.linalg.inv(slope.double().T @ slope.double())
    torch.testing.assert_close(step.covariance, float(values @ values) * inverse)


def test_the_chance_of_a_drift_is_a_probability():
    """With one parameter it is that of Student's t test of two sides. Without a drift it is
    distributed evenly, whatever the units of the parameters.
    """
    noise = torch.randn(2000, 8, 5, generator=torch.Generator().manual_seed(0)).double()
    response = torch.tensor([[1e-6, 0, 2e-6, 0, 0], [1e4, 1e4, 0, -1e4, 0]], dtype=torch.float64)
    for drift in noise[:5]:
        alone = chance_of_drift(drift, response[:1])
        assert alone == pytest.approx(ttest_1samp(drift @ response[0], 0.0).pvalue)
    found = np.array([chance_of_drift(drift, response) for drift in noise])
    for chance in (0.01, 0.1, 0.5):
        # Four standard errors of a share of 2000.
        assert np.mean(found < chance) == pytest.approx(
            chance, abs=4 * math.sqrt(chance * (1 - chance) / 2000)
        )
    assert chance_of_drift(noise[0] + 3.0, response) < 1e-3
    assert chance_of_drift(noise[0, :2], response) == 1.0


def test_halves_that_fit_different_numbers_are_found():
    """The drift is along one parameter, and the noise of the curve is elsewhere."""
    noise = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)).double()
    response = torch.zeros(2, 40, dtype=torch.float64)
    response[0, 0] = response[1, 1] = 1.0
    shifted = noise.clone()
    shifted[:, 0] += 3.0
    ones = torch.ones(40, dtype=torch.float64)
    assert _drifting(noise, ones, response) == []
    assert "halves of the runs fit different parameters" in _drifting(shifted, ones, response)[0]


def test_a_long_step_is_shortened():
    found, _ = fitted(0, iterations=2, largest_change=0.1)
    before, after = (torch.stack(list(entry.values.values())) for entry in found.history)
    assert float(((after - before) / before).abs().max()) == pytest.approx(0.1)
    step = torch.stack(list(found.history[0].step.values()))
    torch.testing.assert_close((after - before) / step, ((after - before) / step)[:1].expand(2))
    assert not found.converged
    assert "has not converged; give more iterations" in found.warnings[-1]


def test_the_picture_has_both_curves_and_their_difference():
    found, _ = fitted(0, replicas=16, iterations=2)
    top, bottom = plot_fit(found, R.tolist(), "k = 1").axes
    assert [label.get_text() for label in top.get_legend().get_texts()] == [
        "simulated, start",
        "simulated, fit (± 2 standard errors)",
        "measured",
    ]
    measured = next(line for line in top.lines if line.get_label() == "measured")
    assert list(measured.get_ydata()) == found.target.tolist()
    difference = bottom.lines[-1].get_ydata()
    assert list(difference) == (found.simulated - found.target).tolist()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": exact()[:5]}, "has shape (11,) and the target (5,)"),
        ({"target": exact()[:1]}, "2 parameters cannot be fitted to 1 numbers"),
        ({"target": exact() * math.nan}, "target has NaN"),
        ({"target": torch.zeros(0)}, "target must be (n,)"),
        ({"stderr": torch.zeros_like(R)}, "stderr must be 11 positive numbers"),
        ({"replicas": 1}, "replicas must be at least 2"),
        ({"chunks": 1}, "chunks must be at least 2"),
        ({"largest_change": 0.0}, "largest_change must be positive"),
        ({"iterations": 0}, "iterations must be at least 1"),
    ],
)
def test_nonsense_is_refused(options, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        fitted(0, **options)


def test_a_curve_that_does_not_determine_the_parameters_is_refused():
    """Two constants of one sum."""
    simulation, _, make = wells()
    potential = simulation.dynamics.potential
    average = TimeAverage(
        lambda state: (potential.k + potential.center) * torch.ones(len(state.position), 3),
        burn_in=10.0,
    )
    with pytest.raises(ValueError, match="does not determine the parameters"):
        fit(simulation, average, torch.ones(3), make, replicas=4, generator=0)


# Files.


def test_a_curve_is_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("# measured\nr_angstrom,g\n3.0,0.5\n\n3.5, 2.0\n4;1.5\n")
    curve = read_curve(path)
    assert curve.r.tolist() == [3.0, 3.5, 4.0]
    assert curve.g.tolist() == [0.5, 2.0, 1.5]
    assert curve.stderr is None
    assert curve.between(3.2, 4.0).r.tolist() == [3.5, 4.0]
    assert curve.density is None
    scaled = curve.in_angstrom("angstrom", 3.4)
    assert scaled.r.tolist() == curve.r.tolist()
    path.write_text("# number density 0.02125 per cubic angstrom: g(r)\n0.35 2.5\n0.5 0.6\n")
    curve = read_curve(path)
    assert curve.density == 0.02125
    assert curve.in_angstrom("nm", 3.4).r.tolist() == [3.5, 5.0]
    path.write_text("3 0.5 0.1\n3.5 2.0 0.2\n")
    assert read_curve(path).stderr.tolist() == [0.1, 0.2]
    path.write_text("# density .02125 per cubic angstrom\n3 0.5\n")
    assert read_curve(path).density == 0.02125


@pytest.mark.parametrize("line", ["3,4 1", "3,4;1", "3.4,,1"])
def test_a_decimal_comma_or_an_empty_column_is_no_separator(line, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"r g\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2: '{line}' has separators of two kinds, or an"):
        read_curve(path)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """``adjsim fit`` in a folder of its own, with a liquid of 32 atoms."""
    monkeypatch.chdir(tmp_path)
    atoms = bulk("Ar", "fcc", a=(4 / 0.02) ** (1 / 3), cubic=True).repeat(2)
    ase.io.write(tmp_path / "argon.xyz", atoms, format="extxyz")
    (tmp_path / "g.csv").write_text("r,g\n3,0\n3.5,2\n4,2\n5,0.6\n")
    given = {"--structure": "argon.xyz", "--target": "g.csv"}

    def run(*options):
        named = dict(zip(options[::2], options[1::2], strict=False))
        words = [word for pair in (given | named).items() for word in pair if word is not None]
        return CliRunner().invoke(app, ["fit", *words])

    return run


def test_command_line_writes_numbers_and_a_picture(command, tmp_path):
    done = command(
        "--steps", "60", "--burn-in", "20", "--replicas", "3", "--iterations", "1", "--output",
        "out", "--no-compile", None, "--no-melt", None, "--target-density", "0.021",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "fit.png").read_bytes()[:4] == b"\x89PNG"
    document = json.loads((tmp_path / "out" / "fit.json").read_text())
    assert document["curve"]["r"] == [3.0, 3.5, 4.0, 5.0]
    assert document["curve"]["measured"] == [0.0, 2.0, 2.0, 0.6]
    assert list(document["parameters"]) == ["epsilon", "epsilon/kB", "sigma"]
    assert document["parameters"]["epsilon/kB"]["start"] == pytest.approx(116.79)
    assert not document["converged"]
    assert "4 distances from 3 to 5 angstrom" in done.stdout
    assert "has not converged" in done.stdout
    assert "all pairs within" in done.stdout
    assert "fitting" not in done.stderr  # no progress bar into a pipe
    # A perfect crystal at another density, which is not melted.
    assert document["order"]["peak"] == pytest.approx(32, abs=0.01)
    assert document["melted_at"] is None
    assert "The structure has long-range order (S(k) reaches 32" in done.stdout
    assert (
        "not to be trusted, the structure has long-range order, and was not melted" in done.stdout
    )
    assert "the structure has 0.02 atoms per cubic angstrom, and the target 0.021" in done.stdout


@pytest.mark.marathon
def test_a_crystal_and_a_liquid_give_the_same_numbers(tmp_path, monkeypatch):
    """The crystal without the melting gives 197 +- 9 K, and the liquid 143 +- 13 K."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    atoms = bulk("Ar", "fcc", a=(4 / 0.02125) ** (1 / 3), cubic=True).repeat(3)
    atoms.rattle(0.04, seed=1)
    ase.io.write("crystal.xyz", atoms, format="extxyz")
    found = {}
    for name in ("crystal.xyz", str(root / "examples" / "data" / "argon.xyz")):
        target = str(root / "tests" / "data" / "argon_85K_rdf.csv")
        words = ["fit", "--structure", name, "--target", target, "--r-max", "8.5"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        document = json.loads((tmp_path / "adjsim-fit" / "fit.json").read_text())
        assert not any("order" in warning for warning in document["warnings"])
        found[document["melted_at"] is not None] = document["parameters"]
    solid, liquid = found[True], found[False]
    for name in ("epsilon", "sigma"):
        a, b = solid[name], liquid[name]
        assert abs(a["fitted"] - b["fitted"]) < 3 * math.hypot(a["stderr"], b["stderr"])


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param("reweighting", marks=pytest.mark.marathon),
        pytest.param("pathwise", marks=pytest.mark.marathon),
    ],
)
def test_command_line_recovers_the_numbers_of_a_liquid(command, tmp_path, estimator):
    """The target is a long run of the same liquid with known numbers, and its errors."""
    epsilon, sigma = 0.0115, 3.35
    atoms = ase.io.read(tmp_path / "argon.xyz")
    box = torch.from_numpy(atoms.get_cell().lengths())
    potential = adjsim.LennardJones(epsilon, sigma, cutoff=5.7, box=box)
    mass = torch.from_numpy(atoms.get_masses())
    dynamics = adjsim.Langevin(potential, mass, 120 * units.kB, 0.002 / units.fs)
    start = torch.from_numpy(atoms.get_positions()).expand(16, -1, -1)
    r = torch.arange(3.0, 5.6, 0.1)
    frames = adjsim.simulate(
        dynamics,
        dynamics.init(start, generator=1),
        torch.cat([torch.zeros(1), torch.arange(500, 4001, 25) * 4 * units.fs]),
        solver=adjsim.BAOAB(4 * units.fs),
        generator=2,
    ).position[1:]
    g = adjsim.smooth_radial_distribution(frames, r, box, width=0.04).mean(0)
    rows = zip(r.tolist(), g.mean(0).tolist(), (g.std(0) / 4).tolist(), strict=True)
    (tmp_path / "g.csv").write_text("\n".join(f"{x},{y},{max(e, 5e-3)}" for x, y, e in rows))
    short = {"reweighting": "4000", "pathwise": "450"}[estimator]
    done = command(
        "--temperature", "120", "--friction", "0.002", "--cutoff", "5.7", "--width", "0.04",
        "--steps", short, "--burn-in", "300", "--estimator", estimator,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "adjsim-fit" / "fit.json").read_text())["parameters"]
    for name, truth in (("epsilon", epsilon), ("sigma", sigma)):
        error = found[name]["stderr"]
        assert abs(found[name]["fitted"] - truth) < 4 * error
        # A short path says little about epsilon, and its error says so.
        assert error < (0.1 if estimator == "reweighting" else 0.5) * truth


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--structure", "no.xyz"], "structure file 'no.xyz' does not exist"),
        (["--structure", "."], "structure file '.' is a folder"),
        (["--structure", "g.csv"], "ASE knows no format of the name 'g.csv'"),
        (["--structure", "symbol.xyz"], "'symbol.xyz': it does not know 'Zz', where a symbol"),
        (
            [
                "--structure",
                "two.xyz",
                "--steps",
                "4",
                "--burn-in",
                "0",
                "--no-compile",
                None,
                "--target-density",
                "0.02",
                "--replicas",
                "2",
            ],
            "determine the parameters: some change of them leaves the curve as it is. Fit fewer "
            "parameters, or give more target. Note: the structure has 0.00025 atoms per cubic",
        ),
        (["--structure", "iron.xyz"], "no Lennard-Jones parameters for Fe in 'iron.xyz'"),
        (["--parameters", "mass"], "unknown parameter 'mass'; choose from epsilon, sigma"),
        (["--pressure", "2"], "--pressure is for --density, which was not given"),
        (["--target-error", "0"], "--target-error must be positive; got 0"),
        (["--target", "error-column.csv", "--target-error", "1"], "leave out --target-error"),
        (["--structure", "cluster.xyz"], "'cluster.xyz' has no periodic cell, and g(r) needs a de"),
        (["--structure", "nan.xyz"], "'nan.xyz': atom 1 (Ar) is at (nan, 0, 0), which is not fin"),
        (["--target", "no.csv"], "target file 'no.csv' does not exist"),
        (["--target", "empty.csv"], "target 'empty.csv' has no numbers"),
        (["--target", "nan.csv"], "target 'nan.csv', line 2: '3.5,nan' has a number that is not"),
        (["--target", "text.csv"], "target 'text.csv', line 2: 'a,b' is not 2 numbers, as above"),
        (["--target", "order.csv"], "target 'order.csv', line 2: the distance 3 follows 4; sort"),
        (["--target", "zero.csv"], "target 'zero.csv', line 1: the distance 0 is not positive"),
        (["--target", "error.csv"], "line 1: the standard error 0 is not positive"),
        (
            ["--target", "far.csv"],
            "target 'far.csv' has distances up to 9 angstrom, beyond half the box of 'argon.xyz', "
            "5.848: give --r-max 5.84, or a larger box",
        ),
        (["--r-min", "7"], "target 'g.csv' has no distances from 7 to inf angstrom; it has 3 to 5"),
        (["--temperature", "-5"], "--temperature must not be negative; got -5"),
        (["--temperature", "nan"], "--temperature must not be negative; got nan"),
        (["--estimator", "magic"], "unknown estimator 'magic'; choose one of reweighting, pathwi"),
        (["--dynamics", "hamiltonian"], "unknown thermostat 'hamiltonian'; choose one of nose"),
        (["--dynamics", "berendsen"], "Berendsen"),
        (["--tau", "10"], "--tau is for nose-hoover and bussi and berendsen, not for langevin"),
        (["--steps", "500"], "--steps 500 leaves 0 after the burn-in of 500"),
        (["--burn-in", "-1"], "--burn-in must be at least 0; got -1"),
        (["--width", "-1"], "--width must be positive; got -1"),
        (["--width", "inf"], "--width must be finite; got inf"),
        # In femtoseconds, as given, and not in units of the run.
        (["--dt", "-4"], "--dt must be positive; got -4."),
        (["--dt", "1e9", "--no-compile", None, "--no-melt", None], "are in units of 10.18 fs"),
        (["--friction", "-1"], "--friction must be positive; got -1."),
        (["--dynamics", "bussi", "--tau", "-1"], "--tau must be positive; got -1."),
        (["--r-min", "nan"], "--r-min must not be negative; got nan"),
        (["--switch-start", "-1"], "--switch-start must not be negative; got -1"),
        (["--steps", "99999999999"], "--steps must be at most 2147483647; got 99999999999"),
        (["--seed", str(2**64)], "--seed must be an integer of at most 64 bits, from -9223372036"),
        (["--target-density", "0"], "--target-density must be positive; got 0"),
        (["--target", "nm.csv"], "its distances look like nm. Give --target-unit nm."),
        (["--target-unit", "pm"], "its distances look like angstrom. Give --target-unit angstrom"),
        (["--target-unit", "mile"], "unknown unit 'mile'; choose one of angstrom, nm, pm"),
        (["--replicas", "1"], "--replicas must be at least 2"),
        (["--iterations", "0"], "--iterations must be at least 1"),
        (["--cutoff", "9"], "cutoff 9 is above half the smallest perpendicular width"),
        (["--output", "g.csv"], "output 'g.csv' is a file"),
    ],
)
def test_command_line_refuses_in_one_line(command, tmp_path, options, says):
    at = [[0, 0, 0], [3.8, 0, 0]]
    ase.io.write(tmp_path / "iron.xyz", ase.Atoms("Fe2", positions=at, cell=[9] * 3, pbc=True))
    ase.io.write(tmp_path / "cluster.xyz", ase.Atoms("Ar2", positions=at))
    pair = ase.Atoms("Ar2", positions=[[0, 0, 0], [9, 0, 0]], cell=[20] * 3, pbc=True)
    ase.io.write(tmp_path / "two.xyz", pair)
    (tmp_path / "symbol.xyz").write_text("2\n\nZz 0 0 0\nAr 4 0 0\n")
    (tmp_path / "nan.xyz").write_text("2\n\nAr 0 0 0\nAr nan 0 0\n")
    for name, text in {
        "empty": "# nothing\nr,g\n",
        "nan": "3,1\n3.5,nan\n",
        "text": "3,1\na,b\n",
        "order": "4,1\n3,1\n",
        "zero": "0,1\n",
        "error": "3,1,0\n",
        "far": "3,1\n9,1\n",
        "error-column": "3,0,0.1\n3.5,2,0.1\n",
        "nm": "0.3,0\n0.37,3\n0.5,0.6\n",
    }.items():
        (tmp_path / f"{name}.csv").write_text(text)
    done = command(*options)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "adjsim-fit").exists()
