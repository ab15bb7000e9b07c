"""Steady states of reaction networks and equilibrium networks: values, stability, derivative."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

import adjsim
from adjsim import steady_state
from tests.copies import WAYS


class Brusselator(nn.Module):
    """Two species, with the steady state (a, b/a), stable if b < 1 + a^2."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.as_tensor(a)), nn.Parameter(torch.as_tensor(b))

    def forward(self, t, y):
        x, z = y.unbind(-1)
        autocatalysis = x**2 * z
        return torch.stack(
            [self.a - (self.b + 1) * x + autocatalysis, self.b * x - autocatalysis], -1
        )


class Equilibrium(nn.Module):
    """The layer z = tanh(W z + U x + c) of an equilibrium network, as the field g(z, x) - z."""

    def __init__(self, x, width=5):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(x.shape[-1], width)
        nn.init.orthogonal_(self.inner.weight, 0.8)
        self.x = x

    def forward(self, t, z):
        return torch.tanh(self.inner(z) + self.outer(self.x)) - z


class Pair(NamedTuple):
    u: torch.Tensor
    v: torch.Tensor


def test_reaction_network_in_a_batch_with_its_stability():
    a, b = torch.tensor([1.0, 1.3, 0.7]), torch.tensor([1.5, 3.2, 1.0])
    network = Brusselator(a, b)
    found = steady_state(adjsim.ODE(network), torch.ones(3, 2))
    assert torch.allclose(found.y, torch.stack([a, b / a], -1), rtol=1e-13)
    trace, determinant = b - 1 - a**2, a**2
    exact = trace / 2 + ((trace / 2) ** 2 - determinant).to(torch.complex128).sqrt()
    assert torch.allclose(found.eigenvalue, exact, rtol=1e-12)
    assert found.stable.tolist() == [True, False, True]
    found.y[..., 1].sum().backward()
    assert torch.allclose(network.a.grad, -b / a**2, rtol=1e-12)
    assert torch.allclose(network.b.grad, 1 / a, rtol=1e-12)


def test_equilibrium_network_has_the_gradient_of_a_long_run_and_of_differences():
    x = torch.randn(4, 3)
    weight = torch.randn(4, 5)
    layer = Equilibrium(x)
    equation, start = adjsim.ODE(layer), torch.zeros(4, 5)
    parameters = list(layer.parameters())
    found = steady_state(equation, start)
    assert bool(found.stable.all())
    grads = torch.autograd.grad((weight * found.y).sum(), parameters)
    run = adjsim.simulate(
        equation, equation.init(start), [0.0, 160.0], solver=adjsim.RungeKutta("rk4", 0.5)
    )
    assert torch.allclose(run.final.y, found.y, rtol=1e-12)
    direct = torch.autograd.grad((weight * run.final.y).sum(), parameters)
    for found_grad, other in zip(grads, direct, strict=True):
        assert torch.allclose(found_grad, other, rtol=1e-10, atol=1e-12)
    h, slot, values = 1e-5, parameters[0].data[0], []
    for sign in (1, -1):
        slot[1] += sign * h
        values.append((weight * steady_state(equation, start).y).sum().item())
        slot[1] -= sign * h
    assert float(grads[0][0, 1]) == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-6)


def test_the_value_does_not_depend_on_recorded_gradients():
    field = adjsim.ODE(Brusselator([1.1, 1.3], [1.5, 1.7]))
    recorded = steady_state(field, torch.ones(2, 2), tol=1e-3).y
    with torch.no_grad():
        assert torch.equal(steady_state(field, torch.ones(2, 2), tol=1e-3).y, recorded)


def test_rows_of_a_jacobian_in_one_backward_pass():
    network = Brusselator(1.2, 2.0)
    y = steady_state(adjsim.ODE(network), torch.ones(2)).y
    rows = torch.autograd.grad(y, network.b, torch.eye(2), is_grads_batched=True)[0]
    assert torch.allclose(rows, torch.tensor([0.0, 1 / 1.2]), atol=1e-13)


def test_float32_named_states_constants_and_copies():
    p = torch.tensor([2.0, 3.0], dtype=torch.float32, requires_grad=True)
    equation = adjsim.ODE(lambda t, y: (y.v - y.u, p - y.v))
    found = steady_state(equation, Pair(torch.zeros(2).float(), torch.ones(2).float()))
    assert isinstance(found.y, Pair)
    assert found.y.u.dtype == torch.float32
    assert torch.equal(found.y.u, p)
    found.y.u.sum().backward()
    assert torch.equal(p.grad, torch.ones(2).float())
    for way in WAYS.values():
        again = way(found)
        assert torch.equal(again.y.u, found.y.u)
        assert torch.equal(again.stable, found.stable)
        assert not again.y.u.requires_grad
    with torch.no_grad():
        assert not steady_state(equation, found.y).y.u.requires_grad


def test_conserved_quantities_are_named():
    k = torch.tensor([2.0, 1.0, 0.5])

    def network(t, y):
        # A <-> B and 2 B <-> C.
        first = k[0] * y[..., 0] - k[1] * y[..., 1]
        second = k[2] * y[..., 1] ** 2 - y[..., 2]
        return torch.stack([-first, first - 2 * second, second], -1)

    with pytest.raises(RuntimeError, match=r"\+0.5 y\[0\] \+0.5 y\[1\] \+1 y\[2\] is conserved"):
        steady_state(adjsim.ODE(network), torch.tensor([1.0, 0.0, 0.0]))

    def with_total(t, y):
        c = (3.0 - y[..., 0] - y[..., 1]) / 2
        return network(t, torch.stack([*y.unbind(-1), c], -1))[..., :2]

    y = steady_state(adjsim.ODE(with_total), torch.ones(2)).y
    assert torch.allclose(y[1], 2 * y[0])
    assert torch.allclose((3 - y.sum()) / 2, 0.5 * y[1] ** 2)


@pytest.mark.parametrize(
    ("fun", "start", "error", "message"),
    [
        (lambda t, y: -(y**3), [0.0, 0.0], RuntimeError, "the branch of steady states folds"),
        (lambda t, y: 1 + y**2, [0.7], RuntimeError, "after 50 Newton steps rates of"),
        (lambda t, y: torch.cos(t) - y, [0.7], ValueError, "depends on the time"),
        # At the start nothing is multiplied by the time, and then at the root.
        (lambda t, y: 1 - y * (1 + t), [0.0], ValueError, "depends on the time"),
        (lambda t, y: (1 - y) * (1 + t * y), [0.0], ValueError, "depends on the time"),
        (lambda t, y: y.mean(0) - 2 * y + 1, [[0.7], [0.2]], ValueError, "systems depend on each"),
        (lambda t, y: y.new_ones(2), [0.0, 0.0], RuntimeError, "singular"),
        (lambda t, y: (y - 1) ** 2, [1.5], RuntimeError, "a multiple root"),
        (lambda t, y: (y - 1) ** 2, [[1.5], [1.8]], RuntimeError, "of system 0 is a multiple root"),
    ],
)
def test_errors(fun, start, error, message):
    with pytest.raises(error, match=message):
        steady_state(adjsim.ODE(fun), start)


def test_functions_are_refused():
    def root(a):
        fun = adjsim.ODE(lambda t, y, a: a - y, args=(a,))
        return adjsim.steady_state(fun, torch.zeros(1, dtype=torch.float64)).y

    with pytest.raises(ValueError, match="with is_grads_batched=True for a Jacobian"):
        torch.func.jacrev(root)(torch.ones(1, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"Wrap a function: ODE\(fun\)"):
        steady_state(lambda t, y: -y, [1.0])
