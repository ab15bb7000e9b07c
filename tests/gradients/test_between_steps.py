"""Save times of an equation between its steps."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import adjsim
from adjsim import CheckpointAdjoint, Coupled, DirectAdjoint, ReversibleAdjoint, RungeKutta
from tests.fields import Net, Pair, PairNet
from tests.gradients.test_table import agree
from tests.problems import slow_but

TIMES = [0.0, 0.13, 0.2, 0.26, 0.283, 0.61]
ROWS = [
    (RungeKutta("rk4", 0.1), DirectAdjoint(), False),
    (RungeKutta("midpoint", 0.1), CheckpointAdjoint(2), True),
    (Coupled("rk4", 0.1), ReversibleAdjoint(), False),
    (Coupled("rk4", 0.1, exact=True), ReversibleAdjoint(), True),
    (adjsim.BackwardEuler(0.1), CheckpointAdjoint(), False),
]


def start():
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(2, 3, generator=drawn, dtype=torch.float64)


def gradients(solver, adjoint, compile, times=TIMES, record=None, shift=None):
    equation, y = adjsim.ODE(Net()), start().requires_grad_()
    named = dict(equation.named_parameters()) | {"y": y}
    with torch.no_grad():
        for name, change in (shift or {}).items():
            named[name] += change
    run = adjsim.simulate(
        equation, equation.init(y), times, solver=solver, adjoint=adjoint, compile=compile,
        record=record,
    )  # fmt: skip
    values = run.y if record is None else run.record
    weights = torch.arange(1.0, 1 + len(times), dtype=torch.float64)
    loss = (weights * values.square().flatten(1).sum(-1)).sum()
    if shift is not None:
        return loss.item()
    found = torch.autograd.grad(loss, list(named.values()))
    return run, dict(zip(named, found, strict=True))


@pytest.mark.parametrize(
    ("solver", "adjoint", "compile"),
    slow_but(
        lambda solver, adjoint, compile: not compile and not isinstance(solver, Coupled),
        ROWS,
        marathon=lambda solver, adjoint, compile: compile and isinstance(solver, Coupled),
    ),
    ids=lambda x: repr(x) if isinstance(x, bool) else type(x).__name__,
)
def test_every_adjoint_has_the_gradient_of_differences(solver, adjoint, compile):
    run, found = gradients(solver, adjoint, compile)
    assert run.times.tolist() == TIMES
    agree(found, gradients(solver, DirectAdjoint(), False)[1], 1e-9)
    along = {name: torch.randn_like(x) for name, x in found.items()}
    if getattr(solver, "exact", False):
        return  # The path is piecewise constant in its numbers.
    h, slope = 1e-5, sum(float((found[name] * d).sum()) for name, d in along.items())
    ends = [
        gradients(solver, adjoint, compile, shift={k: s * h * d for k, d in along.items()})
        for s in (1, -1)
    ]
    # Newton's iteration of an implicit step ends at 1e-10 of the state.
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=1e-6)


def test_the_interpolation_is_of_fourth_order():
    """Beside values of a run of short steps, whose own error is below."""
    equation, y = adjsim.ODE(Net()), start()
    fine = adjsim.simulate(
        equation, equation.init(y), [0.0, 0.31, 1.07], solver=RungeKutta("rk4", 0.01)
    ).y
    sizes, errors = [0.2, 0.1, 0.05], []
    for dt in sizes:
        run = adjsim.simulate(
            equation, equation.init(y), [0.0, 0.31, 1.07], solver=RungeKutta("rk4", dt)
        )
        errors.append(float((run.y[1:] - fine[1:]).abs().max()))
    assert np.polyfit(np.log(sizes), np.log(errors), 1)[0] > 3.5


def test_the_path_does_not_depend_on_save_times():
    equation, y = adjsim.ODE(Net()), start()
    solver = RungeKutta("rk4", 0.1)
    run = adjsim.simulate(equation, equation.init(y), TIMES, solver=solver)
    plain = adjsim.simulate(equation, equation.init(y), [0.0, 0.2], solver=solver)
    assert torch.equal(run.y[2], plain.y[1])
    assert torch.equal(run.final.y, run.y[-1])


def test_records_and_named_tuples():
    equation = adjsim.ODE(PairNet())
    y = Pair(*start().split([1, 2], -1))
    solver = RungeKutta("rk4", 0.1)
    run = adjsim.simulate(equation, y, TIMES, solver=solver)
    record = adjsim.simulate(
        equation, y, TIMES, solver=solver, record=lambda state: state.second.square()
    ).record
    torch.testing.assert_close(record, run.second.square(), rtol=1e-15, atol=0)
    back = adjsim.simulate(equation, run.final, TIMES[::-1], solver=solver)
    torch.testing.assert_close(back.first, run.first.flip(0), rtol=0, atol=1e-4)


def test_what_is_refused():
    equation, solver = adjsim.ODE(Net()), RungeKutta("rk4", 0.1)
    average = adjsim.TimeAverage(lambda state: state.y.sum(-1))
    with pytest.raises(ValueError, match="a time average ends at a step"):
        adjsim.simulate(equation, equation.init(start()), TIMES, solver=solver, record=average)
    well = adjsim.Hamiltonian(adjsim.Harmonic())
    state = well.init(torch.ones(1, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"ts\[3\] = 0.26 is not.*nearest are 0.2 and 0.3"):
        adjsim.simulate(well, state, TIMES, solver=adjsim.VelocityVerlet(0.1))


EVERY_STEP = [round(0.1 * k, 10) for k in range(8)]


@pytest.mark.parametrize(
    ("solver", "adjoint", "compile"),
    slow_but(lambda solver, adjoint, compile: solver is ROWS[0][0], ROWS[:3]),
    ids=lambda x: repr(x) if isinstance(x, bool) else type(x).__name__,
)
def test_a_trajectory_is_a_function_of_time(solver, adjoint, compile):
    """Values and gradients are those of a run that saves between steps."""
    equation, y = adjsim.ODE(Net()), start().requires_grad_()
    settings = {"solver": solver, "adjoint": adjoint, "compile": compile}
    run = adjsim.simulate(equation, equation.init(y), EVERY_STEP, **settings)
    assert torch.equal(run.at(run.times).y, run.y)
    saved, known = gradients(solver, adjoint, compile)
    found = run.at(TIMES).y
    torch.testing.assert_close(found, saved.y, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(saved.at(0.21).y, run.at(0.21).y, rtol=1e-14, atol=1e-15)
    weights = torch.arange(1.0, 1 + len(TIMES), dtype=torch.float64)
    loss = (weights * found.square().flatten(1).sum(-1)).sum()
    named = dict(equation.named_parameters()) | {"y": y}
    agree(
        dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)), known, 1e-10
    )


def test_times_have_a_gradient_and_may_have_any_shape():
    equation, solver = adjsim.ODE(Net()), RungeKutta("rk4", 0.1)
    for times in (EVERY_STEP, EVERY_STEP[::-1]):
        run = adjsim.simulate(equation, equation.init(start()), times, solver=solver)
        # The last one is at a step, where both sides have the rate of the equation.
        t = torch.tensor([[0.13, 0.44], [0.0, 0.3]], dtype=torch.float64, requires_grad=True)
        assert run.at(t).y.shape == (2, 2, 2, 3)
        (found,) = torch.autograd.grad(run.at(t).y.sum(), t)
        h = 1e-6
        with torch.no_grad():
            ends = [run.at(t[0] + s * h).y.flatten(1).sum(1) for s in (1, -1)]
            torch.testing.assert_close(found[0], (ends[0] - ends[1]) / (2 * h), rtol=1e-7, atol=0)
            known = [equation.drift(float(x), run.at(x))[0].sum() for x in t[1]]
        torch.testing.assert_close(found[1], torch.stack(known), rtol=1e-12, atol=0)


def test_rates_are_those_of_the_parameters_of_the_run():
    equation, solver = adjsim.ODE(Net()), RungeKutta("rk4", 0.1)
    run = adjsim.simulate(equation, equation.init(start()), EVERY_STEP, solver=solver)
    before = run.at(0.33).y.detach()
    with torch.no_grad():
        for x in equation.parameters():
            x.mul_(1.5)
    assert torch.equal(run.at(0.33).y, before)


def test_steps_of_varying_size_and_times_that_have_no_state():
    equation = adjsim.ODE(Net())
    y = equation.init(start())
    solver = Coupled("dormand-prince", adjsim.Adaptive(1e-6, 1e-8))
    sparse = adjsim.simulate(equation, y, [0.0, 2.0], solver=solver)
    steps = sparse.stats["step_times"]
    with pytest.raises(ValueError, match=r"t = 0.3 is not.*more than one step.*step_times"):
        sparse.at(0.3)
    run = adjsim.simulate(equation, y, steps, solver=solver)
    fine = adjsim.simulate(equation, y, [0.0, 0.3], solver=RungeKutta("rk4", 0.01)).final.y
    torch.testing.assert_close(run.at(0.3).y, fine, rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match=r"time span \[0, 2\] of the run; got 2.1"):
        run.at(2.1)
    with pytest.raises(ValueError, match="this trajectory is a copy"):
        copy.deepcopy(run).at(0.3)
    fixed = RungeKutta("rk4", 0.1)
    with pytest.raises(ValueError, match=r"nearest are 0 and 0.2.*at every step of dt = 0.1"):
        adjsim.simulate(equation, y, [0.0, 0.2], solver=fixed).at(0.1)
    recorded = adjsim.simulate(equation, y, [0.0, 0.1], solver=fixed, record=lambda x: x.y)
    with pytest.raises(ValueError, match="has a record and no states"):
        recorded.at(0.05)
    with pytest.raises(ValueError, match="ODESolver does not say where its steps end"):
        adjsim.simulate(equation, y, [0.0, 0.2], solver=adjsim.ODESolver()).at(0.1)
    well = adjsim.Hamiltonian(adjsim.Harmonic())
    state = well.init(torch.ones(1, 2), torch.zeros(1, 2))
    run = adjsim.simulate(well, state, [0.0, 0.1, 0.2], solver=adjsim.VelocityVerlet(0.1))
    assert torch.equal(run.at(0.2).position, run.final.position)
    with pytest.raises(ValueError, match=r"t = 0.14 is not.*0.1 and 0.2.*has no meaning"):
        run.at(0.14)
