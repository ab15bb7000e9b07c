"""Implicit steps of vector fields: gradients, stiff problems, stability, and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import solve_ivp
from torch import nn

import adjsim
from adjsim import (
    BackwardEuler,
    CheckpointAdjoint,
    DirectAdjoint,
    ImplicitMidpoint,
    ReversibleAdjoint,
)
from adjsim.dynamics.fields.ode import ODE
from adjsim.dynamics.fields.sde import SDE
from tests.fields import Diffusion, Net, equation, pair, start
from tests.flows import Linear
from tests.gradients.test_table import agree, slope_along
from tests.problems import parameter

SOLVERS = [BackwardEuler(0.1), ImplicitMidpoint(0.1)]


def moment(state):
    return sum((torch.sin(1.3 * x) + 0.3 * x**2).sum() for x in state)


def loss_of(dynamics, y, solver, named, adjoint, **options):
    begin = dynamics.init(pair(y) if named else y)
    made = adjsim.simulate(
        dynamics, begin, [0.2, 0.5, 0.8], solver=solver, adjoint=adjoint, **options
    )
    frames = [getattr(made, name) for name in made.final._fields]
    return sum(moment([x[i] for x in frames]) for i in range(3)), made


def gradients(solver, named, adjoint):
    dynamics, y = equation(None, named), start((4,)).requires_grad_()
    inputs = {**dict(dynamics.named_parameters()), "y": y}
    loss, made = loss_of(dynamics, y, solver, named, adjoint)
    return dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True)), made


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_gradients(solver, named):
    """Against differences, and between the adjoints."""
    direct, _ = gradients(solver, named, DirectAdjoint())
    agree(gradients(solver, named, CheckpointAdjoint())[0], direct, 1e-12)
    reversed_, made = gradients(solver, named, ReversibleAdjoint())
    agree(reversed_, direct, 1e-10)
    assert made.stats["reconstruction_error"] < 1e-12
    generator = torch.Generator().manual_seed(3)
    along = {k: torch.randn(g.shape, generator=generator, dtype=g.dtype) for k, g in direct.items()}

    def loss(shifts):
        dynamics, y = equation(None, named), start((4,))
        inputs = {**dict(dynamics.named_parameters()), "y": y}
        with torch.no_grad():
            for name, shift in shifts.items():
                inputs[name] += shift
            return float(loss_of(dynamics, y, solver, named, DirectAdjoint())[0])

    expected = sum(float((direct[name] * along[name]).sum()) for name in direct)
    assert slope_along(along, loss) == pytest.approx(expected, rel=1e-6)


class Rates(nn.Module):
    """A field with a parameter for each system, of the shape of the batch."""

    def __init__(self, batch):
        super().__init__()
        self.p = nn.Parameter(torch.linspace(0.5, 1.5, batch, dtype=torch.float64))

    def forward(self, t, y):
        a, b = y.unbind(-1)
        return torch.stack([-self.p * a + b, -a - b**2], -1)


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_parameters_of_the_shape_of_the_batch(solver, batch):
    dynamics = ODE(Rates(batch))
    y = torch.linspace(0.2, 1.0, 2 * batch, dtype=torch.float64).reshape(batch, 2)

    def loss(p):
        with torch.no_grad():
            dynamics.fun.p.copy_(p)
        return (
            adjsim.simulate(dynamics, dynamics.init(y), [0.0, 0.4], solver=solver)
            .final.y.square()
            .sum()
        )

    p = dynamics.fun.p.detach().clone()
    (grad,) = torch.autograd.grad(loss(p), dynamics.fun.p)
    for i in range(batch):
        step = 1e-4 * torch.eye(batch, dtype=torch.float64)[i]
        quotient = float((loss(p + step) - loss(p - step)).detach()) / 2e-4
        # The third derivative of a loss of order one, times 1e-8.
        assert float(grad[i]) == pytest.approx(quotient, abs=1e-8)


class Mean(nn.Module):
    """A field in which the systems of a batch depend on each other."""

    def __init__(self):
        super().__init__()
        self.rate = parameter(1.0)

    def forward(self, t, y):
        return -self.rate * y**3 + y.mean(0, keepdim=True)


def test_systems_that_depend_on_each_other_are_refused():
    class Exchange(nn.Module):
        """What leaves one entry arrives at the other, at a rate that the batch sets."""

        def __init__(self):
            super().__init__()
            self.rate = parameter(1.0)

        def forward(self, t, y):
            moved = self.rate * y[..., 0] * (1 + y[..., 1].mean(0) ** 2)
            return torch.stack([-moved, moved], -1)

    for field, n in ((Mean(), 3), (Exchange(), 2)):
        dynamics = ODE(field)
        for solver in SOLVERS:
            begin = dynamics.init(start((4,), n))
            with pytest.raises(ValueError, match="depend on each other"):
                adjsim.simulate(dynamics, begin, [0.0, 0.4], solver=solver)


@torch.no_grad()
@pytest.mark.parametrize(("solver", "order"), [(BackwardEuler, 1), (ImplicitMidpoint, 2)])
def test_order(solver, order):
    dynamics, y = ODE(Net()), start((4,))
    exact = adjsim.simulate(
        dynamics, dynamics.init(y), [0.0, 0.8], solver=adjsim.RungeKutta("rk4", 0.01)
    ).final.y
    errors = [
        float(
            (
                adjsim.simulate(dynamics, dynamics.init(y), [0.0, 0.8], solver=solver(h)).final.y
                - exact
            ).norm()
        )
        for h in (0.04, 0.02)
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.1)


@torch.no_grad()
def test_stability_far_beyond_explicit_steps():
    """One step of x' = -a x at a h = 1e4: 1/(1 + a h), and (1 - a h/2)/(1 + a h/2)."""
    dynamics = ODE(Linear(-1e5))
    one = dynamics.init(torch.ones(1, dtype=torch.float64))
    for solver, factor in (
        (BackwardEuler(0.1), 1 / 10001),
        (ImplicitMidpoint(0.1), (1 - 5000) / (1 + 5000)),
    ):
        found = adjsim.simulate(dynamics, one, [0.0, 0.1], solver=solver).final.y
        assert float(found) == pytest.approx(factor, rel=1e-11)


@pytest.mark.slow
@torch.no_grad()
def test_the_midpoint_rule_keeps_a_quadratic_invariant():
    """The length of a vector under Euler's equations of a free top."""

    def top(t, y):
        return torch.linalg.cross(y, y * torch.tensor([1.0, 0.5, 0.3], dtype=y.dtype))

    dynamics = ODE(top)
    y = torch.tensor([0.3, 1.0, -0.4], dtype=torch.float64)
    final = adjsim.simulate(
        dynamics, dynamics.init(y), [0.0, 100.0], solver=ImplicitMidpoint(0.5)
    ).final.y
    # The tolerance of 200 Newton solutions.
    assert float(final.norm()) == pytest.approx(float(y.norm()), rel=1e-13)


def robertson(t, y):
    a, b, c = y.unbind(-1)
    one, two, three = 0.04 * a, 3e7 * b**2, 1e4 * b * c
    return torch.stack([three - one, one - two - three, two], -1)


@pytest.mark.marathon
@torch.no_grad()
def test_robertson():
    dynamics = ODE(robertson)
    y = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    found = adjsim.simulate(
        dynamics, dynamics.init(y), [0.0, 8.0], solver=ImplicitMidpoint(0.02)
    ).final.y

    def rates(t, y):
        return robertson(t, torch.as_tensor(y)).numpy()

    exact = solve_ivp(rates, [0, 8], y.numpy(), method="Radau", rtol=1e-10, atol=1e-14).y[:, -1]
    # The transient of b is not resolved by this step, and the rule does not damp it: its error in b
    # alternates in sign, while the sum is kept.
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-13)
    assert float(found[0]) == pytest.approx(exact[0], rel=1e-4)
    damped = adjsim.simulate(
        dynamics, dynamics.init(y), [0.0, 8.0], solver=BackwardEuler(0.02)
    ).final.y
    for x, expected in zip(damped.tolist(), exact, strict=True):
        # First order: half a step of the slow rate.
        assert x == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
@torch.no_grad()
def test_systems_of_different_stiffness_are_solved_alone():
    """Van der Pol's equation from mild to stiff: each system is what it is alone."""

    class Columns(nn.Module):
        def __init__(self, mu):
            super().__init__()
            self.register_buffer("mu", mu)

        def forward(self, t, y):
            x, v = y.unbind(-1)
            return torch.stack([v, self.mu * (1 - x**2) * v - x], -1)

    mu = torch.tensor([1.0, 30.0, 1000.0], dtype=torch.float64)
    y = torch.tensor([2.0, 0.0], dtype=torch.float64).expand(3, 2)
    dynamics = ODE(Columns(mu))
    solver = BackwardEuler(0.05)
    final = adjsim.simulate(dynamics, dynamics.init(y), [0.0, 2.0], solver=solver).final.y
    for i in range(3):
        alone = ODE(Columns(mu[i]))
        one = adjsim.simulate(alone, alone.init(y[i]), [0.0, 2.0], solver=solver).final.y
        torch.testing.assert_close(final[i], one, rtol=1e-11, atol=1e-11)


def test_float32():
    dynamics = ODE(Net().float())
    made = adjsim.simulate(
        dynamics, dynamics.init(start().float()), [0.0, 0.5], solver=ImplicitMidpoint(0.1)
    )
    assert made.y.dtype == torch.float32
    moment(made.final).backward()
    double, _ = ODE(Net()), None
    exact = adjsim.simulate(double, double.init(start()), [0.0, 0.5], solver=ImplicitMidpoint(0.1))
    torch.testing.assert_close(made.y.double(), exact.y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_a_solution_beyond_a_blow_up_is_refused(solver):
    """y' = c y^3 from 1 blows up at 1/(2 c). Each step beyond has another, negative root."""
    for rates in map(torch.tensor, ([50.0], [50.0, 50.0], [50.0, 60.0, -1.0])):
        ode = ODE(lambda t, y, c=rates: c * y**3)
        with pytest.raises(RuntimeError, match=r"does not continue .*: the field grows too fast"):
            adjsim.simulate(ode, ode.init(torch.ones(len(rates))), [0.0, 0.3], solver=solver)
    # A rotation that is far from resolved has eigenvalues 1 - a (0.5 + 200 i), and its one branch.
    matrix = torch.tensor([[0.5, 200.0], [-200.0, 0.5]])
    turning = ODE(lambda t, y: y @ matrix)
    adjsim.simulate(turning, turning.init(torch.ones(2)), [0.0, 0.3], solver=solver)


def test_what_is_refused():
    def grows(t, y):
        return y**2 + 1

    dynamics = ODE(grows)
    y = torch.ones(2, 1, dtype=torch.float64)
    # y = 1 + h (y^2 + 1) has no real solution for this h.
    with pytest.raises(RuntimeError, match=r"system 0 at t = 0.5 did not converge.*step 1\."):
        adjsim.simulate(dynamics, dynamics.init(y), [0.0, 0.5], solver=BackwardEuler(0.5))
    sde = SDE(Net(), Diffusion("diagonal"))
    with pytest.raises(TypeError, match=r"StochasticHeun"):
        adjsim.simulate(sde, sde.init(start()), [0.0, 0.5], solver=BackwardEuler(0.5), generator=0)
    net = ODE(Net())
    y = start().requires_grad_()
    final = adjsim.simulate(net, net.init(y), [0.0, 0.2], solver=BackwardEuler(0.1)).final.y
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(final.sum(), y, create_graph=True)
