"""Reversible Runge-Kutta steps: their order, and how small the rate of the coupling may be."""

from __future__ import annotations

import functools
import math
import re
import sys

import pytest
import torch

import adjsim
from adjsim.adjoints.loops.contraction import reversed_growth_in_loops
from adjsim.core.tableaus import TABLEAUS
from adjsim.dynamics.fields.ode import ODE
from adjsim.solvers.reversible.coupled import Coupled, coupling
from adjsim.solvers.reversible.increment import reversed_growth
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta
from tests.flows import DrivenPendulum, Linear, Lorenz
from tests.problems import slow_but


@torch.no_grad()
def end(solver):
    dynamics = ODE(DrivenPendulum())
    start = dynamics.init(torch.tensor([1.0, 0.5], dtype=torch.float64))
    return adjsim.simulate(dynamics, start, [0.0, 1.6], solver=solver).final.y


@functools.cache
def exact_end():
    return end(RungeKutta("dormand-prince", 0.0025))


@pytest.mark.parametrize("method", TABLEAUS)
def test_order_is_that_of_the_method(method):
    """On a field that depends on the time."""
    order = Coupled(method, 0.1).order
    assert order == RungeKutta(method, 0.1).order
    # The fifth-order method comes near rounding at the smaller steps.
    steps = (0.05, 0.025) if order == 5 else (0.025, 0.0125)
    errors = [float((end(Coupled(method, h, rate=10.0)) - exact_end()).norm()) for h in steps]
    # The next term of the error is one power of the step smaller: a tenth of a power here.
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.1), errors


FIELDS = {
    "-x": (lambda: Linear(-1.0), [1.0], 100.0, 0.01),
    "-20 x": (lambda: Linear(-20.0), [1.0], 10.0, 0.01),
    "lorenz": (Lorenz, [1.0, 1.0, 1.0], 30.0, 0.01),
}
# When y or z blows up (None: never), by the prototype whose figures are in the reference answers.
BLOW_UP = [
    ("-x", 0.999, 37.0),
    ("-x", 0.99, None),
    ("-20 x", 0.999, 0.93),
    ("-20 x", 0.99, 0.97),
    ("-20 x", 0.9, 1.96),
    ("-20 x", 0.5, None),
    ("lorenz", 0.999, 1.39),
    ("lorenz", 0.99, 1.50),
    ("lorenz", 0.9, 5.6),
    ("lorenz", 0.5, None),
]


@torch.no_grad()
def stop(name, rate):
    """The time at which the copies moved apart, and the rate of the message; None if never."""
    make, start, time, dt = FIELDS[name]
    dynamics, solver = ODE(make()), Coupled("rk4", dt, rate=rate)
    y = torch.tensor(start, dtype=torch.float64)
    try:
        run = adjsim.simulate(dynamics, dynamics.init(y), [0.0, time], solver=solver)
    except FloatingPointError as error:
        time, suggested = re.findall(r"t = ([0-9.]+)\): .* Use rate=([0-9.]+)", str(error))[0]
        return float(time), float(suggested)
    assert float(run.final.y.abs().max()) <= 60.0
    return None


@pytest.mark.parametrize(
    ("name", "c", "time"),
    slow_but(
        lambda name, c, time: name != "lorenz" and time is not None and time < 2,
        BLOW_UP,
        marathon=lambda name, c, time: time is None or time > 10,
    ),
)
def test_copies_move_apart_where_the_rate_is_below_the_contraction(name, c, time):
    rate = -math.log(c) / FIELDS[name][3]
    assert float(coupling(rate, FIELDS[name][3])) == pytest.approx(c, abs=1e-12)
    found = stop(name, rate)
    if time is None:
        assert found is None
    else:
        # A run stops when the copies are apart by a tenth of the state, before it blows up.
        assert found is not None
        assert 0.7 * time <= found[0] <= time
        assert found[1] > rate


@pytest.mark.marathon
def test_rate_of_the_message_and_the_top_exponent_of_lorenz():
    """Reversed Lorenz has the exponent 14.46: a rate of 12 fails, the rate it names does not."""
    found = stop("lorenz", 12.0)
    assert found is not None
    assert 14.46 < found[1] < 40
    assert stop("lorenz", 15.0) is None
    assert stop("lorenz", found[1]) is None


@pytest.mark.slow
def test_rate_is_estimated_from_the_start():
    """1.5 times the contraction, rounded up to two digits: 1.5 of x' = -x, and the published
    coupling where nothing contracts.
    """
    rk4, start = TABLEAUS["rk4"], torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    for a, rate in ((-1.0, 1.5), (-20.0, 30.0), (0.0, 0.1), (1.0, 0.1)):
        dynamics = ODE(Linear(a))
        # An RK4 step of 0.2 differs from the flow by 0.2^5 / 120, or 1.3e-5 of its exponent.
        growth = reversed_growth(dynamics, rk4, [0.01] * 20, dynamics.init(start), 0.0)
        assert growth == pytest.approx(-a, rel=2e-5, abs=1e-12)
        run = adjsim.simulate(
            dynamics, dynamics.init(start), [0.0, 0.1], solver=Coupled("rk4", 0.01)
        )
        assert run.stats["rate"] == pytest.approx(rate, rel=1e-12)
        assert run.stats["order"] == 4


class Contracting(torch.nn.Module):
    """A field of two states whose contraction varies in time."""

    def __init__(self):
        super().__init__()
        a = torch.tensor([[-1.0, 0.3], [0.2, -4.0]], dtype=torch.float64)
        self.a = torch.nn.Parameter(a)

    def forward(self, t, y):
        return (y @ self.a) * (1 + torch.sin(7 * t)) - 0.1 * y**3


@pytest.mark.parametrize("batch", [3, pytest.param(32, marks=pytest.mark.slow)])
def test_compiled_runs_estimate_their_rate_in_loops(batch, monkeypatch):
    """The same exponent, in a tenth of the evaluations in Python of 200 steps ahead, 1,600."""
    dynamics, found = ODE(Contracting()), []
    start = dynamics.init(torch.linspace(-1, 1, 2 * batch, dtype=torch.float64).reshape(batch, 2))

    def measured(*given):
        found.append((reversed_growth_in_loops(*given), reversed_growth(*given[3:])))
        return found[-1][0]

    def run():
        adjsim.simulate(
            dynamics,
            start,
            [0.5, 2.5],
            solver=Coupled("rk4", 0.01),
            adjoint=adjsim.ReversibleAdjoint(),
            compile=True,
        )

    module = sys.modules[adjsim.simulate.__module__]
    monkeypatch.setattr(module, "reversed_growth_in_loops", measured)
    run()
    ((mine, expected),) = found
    assert mine == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(module, "reversed_growth_in_loops", reversed_growth_in_loops)
    code, evaluations = Contracting.forward.__code__, []
    sys.setprofile(
        lambda frame, event, _: frame.f_code is code and evaluations.append(event == "call")
    )
    try:
        run()
    finally:
        sys.setprofile(None)
    assert 0 < sum(evaluations) < 160
