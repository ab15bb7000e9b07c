"""Save times of an equation between its steps."""

from __future__ import annotations

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
    slow_but(lambda solver, adjoint, compile: not compile, ROWS),
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
