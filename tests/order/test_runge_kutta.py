"""Orders of Runge-Kutta methods, and of the methods for SDEs on a common path."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import adjsim
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.core.noise import Noise
from adjsim.core.tableaus import Tableau
from adjsim.dynamics.fields.ode import ODE
from adjsim.dynamics.fields.sde import SDE
from adjsim.simulation.simulate import run
from adjsim.solvers.continuous.sde import SDESolver
from adjsim.solvers.reversible.reversible_heun import ReversibleHeun
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta
from adjsim.solvers.stochastic.milstein import Milstein
from adjsim.solvers.stochastic.stochastic_heun import StochasticHeun
from tests.gradients.test_sde import Coarse

ORDERS = {
    "euler": 1,
    "midpoint": 2,
    "heun": 2,
    "ralston": 2,
    "ssp3": 3,
    "bogacki-shampine": 3,
    "rk4": 4,
    "dormand-prince": 5,
}
# Kutta's method of third order, and one of order two whose coefficients are no round numbers.
GIVEN = {
    "kutta-3": Tableau([[], [0.5], [-1, 2]], [1 / 6, 2 / 3, 1 / 6]),
    "second": Tableau([[], [0.7]], [1 - 1 / 1.4, 1 / 1.4]),
}


def swing(t, y):
    """A driven pendulum, which is neither linear nor autonomous."""
    return torch.stack([y[..., 1], -torch.sin(y[..., 0]) + torch.cos(2 * t)], -1)


def end(method, dt):
    ode = ODE(swing)
    start = ode.init([0.7, -0.2])
    return adjsim.simulate(ode, start, [0.0, 2.0], solver=RungeKutta(method, dt)).final.y


@functools.cache
def reference():
    return end("dormand-prince", 0.005)


@pytest.mark.parametrize("name", [*ORDERS, *GIVEN])
def test_order_fitted_and_found_from_the_tableau(name):
    method = GIVEN.get(name, name)
    order = ORDERS.get(name, 3 if name == "kutta-3" else 2)
    exact = reference()
    steps = [0.08, 0.02]
    errors = [float((end(method, dt) - exact).norm()) for dt in steps]
    slope = math.log(errors[0] / errors[-1]) / math.log(steps[0] / steps[-1])
    assert slope == pytest.approx(order, abs=0.25), errors
    assert RungeKutta(method, 0.1).tableau.order == order


def bend(t, y):
    return -torch.sin(y)


def diagonal(t, y):
    return 0.5 + 0.3 * torch.sin(y)


def general(t, y):
    """Noise whose columns do not commute."""
    one = torch.stack([0.5 * torch.cos(y[..., 1]), 0.4 * y[..., 0]], -1)
    other = torch.stack([0.3 + 0 * y[..., 0], 0.5 * torch.sin(y[..., 0])], -1)
    return torch.stack([one, other], -1)


def additive(t, y):
    matrix = torch.tensor([[0.5, 0.2], [-0.1, 0.4]], dtype=torch.float64)
    return (matrix * (1 + torch.sin(t))).expand(*y.shape[:-1], 2, 2)


EQUATIONS = {
    "diagonal": SDE(bend, diagonal),
    "scalar": SDE(bend, diagonal, noise="scalar"),
    "additive": SDE(bend, additive, noise="additive"),
    "general": SDE(bend, general, noise="general"),
}


def strong_order(noise, make):
    """Fit the order of the mean error at the end, against the same method on the finest path."""
    sde = EQUATIONS[noise]
    generator = torch.Generator().manual_seed(1)
    start = sde.init(torch.randn(500, 2, generator=generator, dtype=torch.float64))

    def final(every):
        path = Coarse(3, every) if every > 1 else Noise(3)
        return run(sde, start, [0.0, 1.0], make(every / 512), DirectAdjoint(), None, path).final.y

    exact = final(1)
    errors = [float((final(every) - exact).norm(dim=-1).mean()) for every in (32, 8)]
    return math.log(errors[0] / errors[1]) / math.log(4)


OWN = {
    solver.__name__: solver
    for solver in (adjsim.EulerMaruyama, Milstein, StochasticHeun, ReversibleHeun)
}


# Strong orders of Kloeden and Platen (1992) and of torchsde's methods: 1/2 for Euler's method and
# for noise that does not commute, else 1. Against a reference of the same method at a finite step
# the slope is a little high, and 500 paths leave an error of about 0.05.
@pytest.mark.parametrize(
    ("noise", "method", "order"),
    [
        ("diagonal", "EulerMaruyama", 0.5),
        ("additive", "EulerMaruyama", 1.0),
        ("diagonal", "milstein", 1.0),
        ("diagonal", "Milstein", 1.0),
        ("diagonal", "StochasticHeun", 1.0),
        ("additive", "ReversibleHeun", 1.0),
        pytest.param("scalar", "Milstein", 1.0, marks=pytest.mark.slow),
        pytest.param("scalar", "StochasticHeun", 1.0, marks=pytest.mark.slow),
        pytest.param("general", "StochasticHeun", 0.5, marks=pytest.mark.slow),
        # The proof of Kidger et al. gives 1/2, and 1 for additive noise; noise that commutes is
        # better than that.
        pytest.param("diagonal", "ReversibleHeun", 1.0, marks=pytest.mark.slow),
        pytest.param("scalar", "ReversibleHeun", 1.0, marks=pytest.mark.slow),
        pytest.param("general", "ReversibleHeun", 0.5, marks=pytest.mark.slow),
        pytest.param("general", "midpoint", 0.5, marks=pytest.mark.slow),
        pytest.param("general", "EulerMaruyama", 0.5, marks=pytest.mark.slow),
        pytest.param("scalar", "EulerMaruyama", 0.5, marks=pytest.mark.slow),
        pytest.param("scalar", "milstein", 1.0, marks=pytest.mark.slow),
        pytest.param("scalar", "midpoint", 1.0, marks=pytest.mark.slow),
        pytest.param("diagonal", "midpoint", 1.0, marks=pytest.mark.slow),
        pytest.param("additive", "heun", 1.0, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_strong_order_on_a_common_path(noise, method, order):
    found = strong_order(noise, OWN.get(method, lambda dt: SDESolver(method, dt=dt)))
    assert order - 0.15 < found < order + 0.25


@pytest.mark.slow
@torch.no_grad()
def test_ito_and_stratonovich_methods_differ_by_the_drift_that_converts_them():
    """Of dy = y dW, E y stays under Ito, and grows as exp(t/2) under Stratonovich."""
    sde = SDE(lambda t, y: 0 * y, lambda t, y: y)
    start = sde.init(torch.ones(40_000, 1))
    for solver, mean in (
        (adjsim.EulerMaruyama(1 / 64), 1.0),
        (SDESolver("milstein", dt=1 / 64), 1.0),
        (SDESolver("midpoint", dt=1 / 64), math.exp(0.25)),
        (Milstein(1 / 64), 1.0),
        (StochasticHeun(1 / 64), math.exp(0.25)),
        (ReversibleHeun(1 / 64), math.exp(0.25)),
    ):
        final = adjsim.simulate(sde, start, [0.0, 0.5], solver=solver, generator=2).final.y
        # Four standard errors; the bias of dt is a tenth of one.
        error = 4 * float(final.std()) / math.sqrt(len(final))
        assert float(final.mean()) == pytest.approx(mean, abs=error)
