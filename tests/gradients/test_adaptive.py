"""Coupled steps of recorded sizes: gradients of every adjoint, and exact reversal."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, TimeAverage
from adjsim.dynamics.fields.ode import ODE
from adjsim.solvers.reversible.coupled import Coupled
from adjsim.solvers.runge_kutta.adaptive_steps import Adaptive, StepTimes, look_ahead
from tests.flows import DrivenPendulum, Linear, Lorenz
from tests.gradients.test_table import agree
from tests.order.test_adaptive import VanDerPol
from tests.problems import chaotic, slow_but

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
        *slow_but(
            lambda name, time: name != "lorenz", [(name, row[2]) for name, row in LONG.items()]
        ),
        pytest.param("lorenz", 500.0, marks=pytest.mark.marathon),
    ],
)
@chaotic
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


def repeated(ts, exact):
    dynamics = ODE(lambda t, y: 3.7 + torch.sin(9 * t) - y)

    def steps(dt):
        solver = Coupled("dormand-prince", dt, rate=2.0, exact=exact)
        return adjsim.simulate(dynamics, dynamics.init([1e-9]), ts, solver=solver)

    first = steps(Adaptive(1e-6, 1e-9))
    return first, steps(StepTimes(first.stats["step_times"]))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("saves", [1, 40])
def test_step_times_repeat_an_adaptive_run_bit_for_bit(saves, exact):
    """The start is small, so the lattice follows from the rates and the size of the steps."""
    first, second = repeated([0.2 * i / saves for i in range(saves + 1)], exact)
    assert torch.equal(first.y, second.y)
    for key in ("steps", "rate", *(("buffer_bits",) if exact else ())):
        assert first.stats[key] == second.stats[key]


def test_steps_found_on_another_lattice_are_found_again(monkeypatch):
    """The first pass has a lattice by sizes that are ten times those of the run."""
    evaluations = repeated([0.0, 2.0], True)[0].stats["energy_evaluations"]

    def too_long(*args):
        return [10 * size for size in look_ahead(*args)]

    monkeypatch.setattr("adjsim.solvers.reversible.coupled.look_ahead", too_long)
    first, second = repeated([0.0, 2.0], True)
    assert torch.equal(first.y, second.y)
    assert first.stats["energy_evaluations"] > 1.4 * evaluations


@pytest.mark.marathon
def test_a_stiffness_parameter_against_initial_value_problems():
    """d(y)/d(mu) of van der Pol's equation, from adaptive steps and from ``solve_ivp``."""
    mu = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    start = torch.tensor([2.0, 0.0], dtype=torch.float64)

    def rate(t, y, mu):
        return torch.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])

    expected = adjsim.solve_ivp(
        rate, (0.0, 4.0), start, args=(mu,), t_eval=[4.0], rtol=1e-10, atol=1e-12
    )
    (reference,) = torch.autograd.grad(expected.y[0, -1], mu)
    field = VanDerPol()
    dynamics = ODE(field)
    run = adjsim.simulate(
        dynamics,
        dynamics.init(start),
        [0.0, 4.0],
        solver=Coupled("dormand-prince", Adaptive(1e-8, 1e-10), rate=40.0, exact=True),
        adjoint=ReversibleAdjoint(),
    )
    (found,) = torch.autograd.grad(run.final.y[0], field.mu)
    # A hundred times the tolerance of one step, for the errors of all steps and their growth.
    torch.testing.assert_close(found, reference, rtol=1e-6, atol=0)
