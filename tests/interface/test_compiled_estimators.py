"""Estimators in compiled loops: the same numbers, and a refusal where there is no such loop."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

import adjsim
from adjsim import (
    CheckpointAdjoint,
    Final,
    FiniteDifference,
    ForwardSensitivity,
    Girsanov,
    Pathwise,
    ReversibleAdjoint,
    Reweighting,
    ScoreFunction,
    Simulation,
    TimeAverage,
    compare,
)
from adjsim.adjoints.loops import runner
from adjsim.adjoints.loops.runner import cache
from adjsim.cli.app import app
from adjsim.core.recent_cache import RecentCache
from tests.problems import parameter, slow_but


def double_well():
    """One particle; the observable depends on a parameter too."""
    dynamics = adjsim.Langevin(
        adjsim.DoubleWell(parameter(1.0)), parameter(1.2), parameter(0.7), 1.3
    )
    simulation = Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.ones(n, 1, 1), generator=g),
        [0.0, 1.0],
        adjsim.BAOAB(0.05),
    )
    return simulation, lambda s: dynamics.kT * s.position[:, 0, 0] ** 2


def same_numbers(make, burn_in=0.0):
    simulation, look = double_well()
    found = []
    for compiled in (False, True):
        estimate = make()(
            dataclasses.replace(simulation, compile=compiled),
            TimeAverage(look, burn_in),
            replicas=8,
            chunks=2,
            generator=torch.Generator().manual_seed(0),
        )
        assert estimate.diagnostics["compiled"] is compiled
        found.append(estimate)
    plain, compiled = found
    torch.testing.assert_close(compiled.value, plain.value, rtol=1e-10, atol=0)
    for name, grad in plain.grad.items():
        # Differences divide rounding by the step.
        rounding = 1e-10 if make is not FiniteDifference else 1e-9
        torch.testing.assert_close(compiled.grad[name], grad, rtol=1e-10, atol=rounding)
        torch.testing.assert_close(
            compiled.grad_stderr[name], plain.grad_stderr[name], rtol=1e-8, atol=rounding
        )


def test_the_score_function_in_a_compiled_loop():
    same_numbers(ScoreFunction)


def boxed_pairs(box):
    """A potential of eight atoms in a periodic box, its dynamics, and their positions."""
    potential = adjsim.LennardJones(sigma=parameter(1.0), cutoff=1.4, box=box)
    dynamics = adjsim.Langevin(potential, kT=0.5, friction=1.0)
    corners = torch.cartesian_prod(*(torch.tensor([0.0, 1.3], dtype=torch.float64),) * 3)
    return potential, dynamics, corners


BOXES = {
    "rectangular": [2.9, 2.9, 2.9],
    "tilted": [[2.9, 0.0, 0.0], [0.2, 2.9, 0.0], [0.0, 0.1, 2.9]],
}
# Which has the checks of a rectangular box, and others.
TILTED = slow_but(lambda name: name == "tilted", BOXES, marathon=lambda name: True)


@pytest.mark.parametrize("box", TILTED)
def test_the_score_function_of_pairs_in_a_box(box):
    """The checks of a box read its numbers, which a step that is traced does not have."""
    potential, dynamics, corners = boxed_pairs(BOXES[box])
    simulation = Simulation(
        dynamics,
        lambda n, g: dynamics.init(corners.expand(n, 8, 3), generator=g),
        [0.0, 0.02],
        adjsim.BAOAB(0.002),
    )
    observable = TimeAverage(lambda s: potential(s.position))
    plain, compiled = (
        ScoreFunction()(
            dataclasses.replace(simulation, compile=choice),
            observable,
            replicas=4,
            chunks=2,
            generator=0,
        )
        for choice in (False, True)
    )
    torch.testing.assert_close(compiled.value, plain.value, rtol=1e-10, atol=0)
    torch.testing.assert_close(compiled.grad, plain.grad, rtol=1e-10, atol=0)


# What a test names as a global variable.
named: adjsim.LennardJones


@pytest.mark.parametrize(
    "box",
    slow_but(lambda name: False, BOXES, marathon=lambda name: name != "tilted"),
)
def test_a_record_that_names_a_potential_in_a_box_as_a_global_variable(box, monkeypatch):
    potential, dynamics, corners = boxed_pairs(BOXES[box])
    monkeypatch.setitem(globals(), "named", potential)
    start = dynamics.init(corners, generator=0)

    def found(choice):
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.02],
            solver=adjsim.BAOAB(0.002),
            adjoint=ReversibleAdjoint(),
            record=TimeAverage(lambda s: named(s.position)),
            generator=1,
            compile=choice,
        )
        return run.record.detach(), torch.autograd.grad(run.record, potential.sigma)[0]

    torch.testing.assert_close(found(True), found(False), rtol=1e-10, atol=0)
    potential.box.mul_(1.1)
    torch.testing.assert_close(found(True), found(False), rtol=1e-10, atol=0)


@pytest.mark.slow
def test_the_score_function_with_a_density_of_bath_variables():
    """A density with the weights of a chain reads masses, as every step of the loop does."""
    dynamics = adjsim.NoseHooverChain(adjsim.Harmonic(), kT=parameter(0.5))
    found = [
        ScoreFunction()(
            Simulation(
                dynamics,
                lambda n, g: dynamics.init(torch.ones(n, 1, 1), generator=g),
                [0.0, 0.5],
                adjsim.Splitting("NBABN", 0.05),
                compile=choice,
            ),
            TimeAverage(lambda s: s.bath_momentum.square().sum((-1, -2, -3))),
            replicas=4,
            chunks=2,
            generator=0,
        )
        for choice in (False, True)
    ]
    torch.testing.assert_close(found[1].grad, found[0].grad, rtol=1e-10, atol=0)


@pytest.mark.marathon
@pytest.mark.parametrize(
    "make",
    [
        ScoreFunction,
        FiniteDifference,
        lambda: Reweighting(every=0.25),
        lambda: Pathwise(ReversibleAdjoint()),
        Pathwise,
        lambda: Pathwise(CheckpointAdjoint()),
    ],
    ids=["score", "differences", "reweighting", "reversible", "direct", "checkpoint"],
)
def test_estimators_in_compiled_loops(make):
    """With a burn-in, whose steps are compiled apart."""
    same_numbers(make, burn_in=0.4)


@pytest.mark.marathon
def test_chunks_of_one_size_compile_once(monkeypatch):
    """Neither four chunks nor a second call compile a loop again."""
    simulation, look = double_well()
    simulation, estimator = dataclasses.replace(simulation, compile=True), ScoreFunction()
    compiled, compile_loop = [], runner.compile_loop
    monkeypatch.setattr(
        runner,
        "compile_loop",
        lambda *given, **more: compiled.append(given) or compile_loop(*given, **more),
    )
    monkeypatch.setattr(runner, "cache", RecentCache(256))
    estimator(simulation, TimeAverage(look), replicas=8, chunks=1)
    once = len(compiled)
    assert once > 0
    monkeypatch.setattr(runner, "cache", RecentCache(256))
    for _ in range(2):
        estimator(simulation, TimeAverage(look), replicas=32, chunks=4)
    assert len(compiled) == 2 * once


@pytest.mark.marathon
def test_adjoints_compared_in_compiled_loops():
    """With the gradients of uncompiled runs, to the rounding of a sum in another order."""
    simulation, look = double_well()
    methods = {
        "direct": Pathwise(),
        "checkpoint": Pathwise(CheckpointAdjoint()),
        "reversible": Pathwise(ReversibleAdjoint()),
    }
    plain, compiled = (
        compare(simulation, Final(look), methods, replicas=4, chunks=2, generator=0, compile=on)
        for on in (False, True)
    )
    assert not compiled.failures
    for name, estimate in compiled.estimates.items():
        assert estimate.diagnostics["compiled"], name
        for parameter_name, grad in plain.estimates["direct"].grad.items():
            torch.testing.assert_close(estimate.grad[parameter_name], grad, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
def test_what_does_not_go_in_a_compiled_loop():
    simulation, look = double_well()
    compiled = dataclasses.replace(simulation, compile=True)
    with pytest.raises(TypeError, match="compile=True is for solvers of fixed steps"):
        dataclasses.replace(compiled, solver=adjsim.SDESolver(dt=0.1))
    methods = {"tangents": ForwardSensitivity()}
    apart = compare(simulation, Final(look), methods, replicas=4, chunks=2, compile=True)
    assert [e.diagnostics["compiled"] for e in apart.estimates.values()] == [False]
    assert [e.diagnostics["chunks"] for e in apart.estimates.values()] == [2]
    ode = adjsim.ODE(lambda t, y: -y)
    implicit = Simulation(
        ode, lambda n, g: ode.init(torch.ones(n, 1)), [0.0, 1.0], adjsim.ImplicitMidpoint(0.1)
    )
    assert Pathwise().can_compile(implicit)
    assert not Pathwise(adjsim.ReversibleAdjoint()).can_compile(implicit)
    adaptive = dataclasses.replace(
        implicit, solver=adjsim.Coupled("dormand-prince", adjsim.Adaptive())
    )
    assert not Pathwise().can_compile(adaptive)
    assert not Pathwise(adjsim.BacksolveAdjoint()).can_compile(simulation)
    bare = adjsim.Langevin(adjsim.DoubleWell(parameter(1.0)))
    scored = dataclasses.replace(compiled, dynamics=bare)
    assert not Girsanov()(scored, Final(lambda s: s.position[:, 0, 0]), replicas=4).diagnostics[
        "compiled"
    ]


def test_command_line_refuses_to_compile_what_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (["--adjoint", "backsolve"], ["--estimators", "girsanov"]):
        done = CliRunner().invoke(app, ["compare", *arguments, "--compile"])
        assert done.exit_code == 2
        assert "--compile: none of these methods can be compiled" in done.stderr


@pytest.mark.marathon
def test_command_line_in_compiled_loops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["compare", "--horizon", "1", "--compile", "--adjoint", "direct,checkpoint,reversible"]
    )
    assert done.exit_code == 0, done.output
    (run,) = json.loads((tmp_path / "adjsim-compare" / "compare.json").read_text())["runs"]
    assert [method["compiled"] for method in run["methods"]] == [True] * 3
    for method in run["methods"][1:]:
        assert method["relative_difference"] < 1e-10
        assert method["seconds"] < 5


@pytest.mark.parametrize(
    ("make", "offset"),
    [
        (ScoreFunction, 0.0),
        (ScoreFunction, 1e4),
        (Reweighting, 0.0),
        (lambda: Pathwise(ReversibleAdjoint()), 0.0),
    ],
)
@pytest.mark.usefixtures("own_loops")
def test_an_estimator_made_anew_with_other_starts_compiles_nothing(make, offset):
    """Of an offset that is subtracted two values are possible, by the spread of the starts."""
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)))
    simulation = Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.randn(n, 1, 1, generator=g), generator=g),
        [0.0, 1.0],
        adjsim.BAOAB(0.05),
        compile=True,
    )
    kept = []
    for seed in range(6):
        observable = TimeAverage(lambda s: offset + s.position[:, 0, 0] ** 2)
        make()(simulation, observable, replicas=64, chunks=2, generator=seed)
        kept.append(len(cache))
    assert kept[-1] - kept[0] <= (1 if offset else 0)
