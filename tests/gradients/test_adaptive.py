"""Coupled steps of recorded sizes: gradients of every adjoint, and exact reversal."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, TimeAverage
from adjsim.dynamics.ode import ODE
from adjsim.solvers.coupled import Coupled
from adjsim.solvers.step_sizes import Adaptive, StepTimes
from tests.flows import DrivenPendulum, Linear, Lorenz
from tests.gradients.test_table import agree
from tests.order.test_adaptive import VanDerPol

TIMES = [0.5, 0.6, 1.0, 1.5]
TOLERANCES = Adaptive(1e-6, 1e-6)


def value(state):
    return state.y.square().sum() + state.y.sin().sum()


def pendulum(adjoint, dt=TOLERANCES, average=False, shift=0.0, **settings):
    """The loss, its inputs and the run; a shift moves every input along a fixed direction."""
    field = DrivenPendulum()
    y = torch.tensor([[1.0, 0.5], [-0.4, 1.1]], dtype=torch.float64, requires_grad=True)
    inputs = {"y": y, **dict(field.named_parameters())}
    with torch.no_grad():
        for i, x in enumerate(inputs.values()):
            x += shift * (1 + 0.3 * i)
    dynamics, record = ODE(field), TimeAverage(value, 0.3) if average else None
    solver = Coupled("dormand-prince", dt, rate=2.0, **settings)
    run = adjsim.simulate(
        dynamics, dynamics.init(y), TIMES, solver=solver, adjoint=adjoint, record=record
    )
    loss = run.record if average else (run.y.square() * torch.arange(1.0, 5.0)[:, None, None]).sum()
    return loss, inputs, run


def gradients(*args, **settings):
    loss, inputs, run = pendulum(*args, **settings)
    return dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True)), run


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_all_adjoints_agree(average, exact):
    settings = {"average": average, "exact": exact}
    direct, run = gradients(DirectAdjoint(), **settings)
    agree(gradients(CheckpointAdjoint(), **settings)[0], direct, 1e-12)
    swept, reversed_ = gradients(ReversibleAdjoint(), **settings)
    # Undone floats lose exp(rate t), which is e^2 here.
    agree(swept, direct, 1e-12 if exact else 1e-10)
    error = reversed_.stats["reconstruction_error"]
    assert error == 0.0 if exact else 0 < error < 1e-10
    assert torch.equal(run.stats["step_times"], reversed_.stats["step_times"])


@pytest.mark.parametrize("average", [False, True])
def test_direct_against_central_differences_at_frozen_sizes(average):
    grads, run = gradients(DirectAdjoint(), average=average)
    slope = sum(float(x.sum()) * (1 + 0.3 * i) for i, x in enumerate(grads.values()))
    dt, h = StepTimes(run.stats["step_times"]), 1e-4
    repeated, again = gradients(DirectAdjoint(), dt=dt, average=average)
    agree(repeated, grads, 1e-14)
    assert torch.equal(again.stats["step_times"], run.stats["step_times"])
    with torch.no_grad():
        loss = {
            k: float(pendulum(DirectAdjoint(), dt, average, shift=k * h)[0]) for k in (-2, -1, 1, 2)
        }
    found = (4 * (loss[1] - loss[-1]) / (2 * h) - (loss[2] - loss[-2]) / (4 * h)) / 3
    assert found == pytest.approx(slope, rel=1e-6)


LONG = {
    "lorenz": (Lorenz, [1.0, 2.0, 20.0], 5.0, 21.0),
    "van der pol": (VanDerPol, [2.0, 0.0], 10.0, 30.0),
    "decay": (lambda: Linear(-1.0), [1.0], 100.0, 2.0),
}


@pytest.mark.parametrize(
    ("name", "time"),
    [
        *((name, time) for name, (_, _, time, _) in LONG.items()),
        pytest.param("lorenz", 500.0, marks=pytest.mark.marathon),
    ],
)
def test_exact_steps_come_back_bit_for_bit(name, time):
    """Over horizons at which undone floats lose all digits; a fingerprint verifies the start."""
    make, start, _, rate = LONG[name]
    dynamics = ODE(make())
    y = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    solver = Coupled("bogacki-shampine", Adaptive(1e-4, 1e-4), rate=rate, exact=True)
    run = adjsim.simulate(
        dynamics, dynamics.init(y), [0.0, time], solver=solver, adjoint=ReversibleAdjoint()
    )
    (found,) = torch.autograd.grad(run.final.y.square().sum(), y)
    assert bool(torch.isfinite(found).all())
    assert run.stats["reconstruction_error"] == 0.0
    assert run.stats["buffer_bits"] > 0
