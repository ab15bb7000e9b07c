"""A compiled run of a known form is not evaluated at its start again, and its errors stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim
from adjsim import ODE, SDE, CheckpointAdjoint, DirectAdjoint, EulerMaruyama, RungeKutta
from adjsim.potentials import Barrier, Contact, Plane
from tests.fields import Diffusion, Net, start


def run(dynamics, y, compile=True, **options):
    solver = EulerMaruyama(0.1) if dynamics.stochastic else RungeKutta("rk4", 0.1)
    return adjsim.simulate(
        dynamics,
        dynamics.init(y),
        [0.0, 0.3],
        solver=solver,
        adjoint=DirectAdjoint(),
        compile=compile,
        generator=0,
        **options,
    )


@pytest.mark.slow
def test_the_evaluation_at_the_start_is_left_out(monkeypatch):
    known, calls = ODE.check_rates, []
    monkeypatch.setattr(ODE, "check_rates", lambda *args: calls.append(1) or known(*args))
    dynamics = ODE(Net())
    for y in (start((4,)), start((4,)) + 0.1):
        run(dynamics, y)
    assert len(calls) == 1
    # Another shape, or a run without compilation.
    run(dynamics, start((3,)))
    run(dynamics, start((4,)), compile=False)
    assert len(calls) == 3


@pytest.mark.parametrize("stochastic", [False, True])
def test_numbers_that_become_nan(stochastic):
    dynamics = SDE(Net(), Diffusion("diagonal")) if stochastic else ODE(Net())
    y = start((4,))
    run(dynamics, y)
    for name, x in dynamics.named_parameters():
        kept = x.detach().clone()
        with torch.no_grad():
            x.fill_(torch.nan)
        errors = []
        for compile in (False, True):
            with pytest.raises(ValueError, match="NaN or infinite entries at the start") as error:
                run(dynamics, y, compile)
            errors.append(str(error.value))
        assert errors[0] == errors[1], name
        with torch.no_grad():
            x.copy_(kept)
    run(dynamics, y)


@pytest.mark.parametrize("exact", [False, True])
def test_a_known_form_with_a_potential_is_checked_by_its_energy_alone(monkeypatch, exact):
    """The evaluation of the rates with a graph takes longer than that of the energy."""
    known, calls = adjsim.Hamiltonian.check_rates, []
    monkeypatch.setattr(
        adjsim.Hamiltonian, "check_rates", lambda *args: calls.append(1) or known(*args)
    )
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones())
    apart = torch.tensor([[0.0, 0.0], [1.1, 0.0]], dtype=torch.float64)

    def go(position, **options):
        return adjsim.simulate(
            dynamics,
            dynamics.init(position, torch.zeros_like(position)),
            [0.0, 0.03],
            solver=adjsim.Splitting("BAB", 0.01, exact=exact),
            compile=True,
            **options,
        ).final.position

    first = go(apart)
    assert torch.equal(go(apart, record=lambda state: state.position.sum()), first)
    with pytest.raises(ValueError, match="the energy at the start is"):
        go(torch.zeros(2, 2, dtype=torch.float64))
    assert len(calls) == 1
    # The record of saved states is no part of the form, and is evaluated at each start.
    captured = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def record(state):
        x = state.position.sum()
        return x * captured if x.detach() < 0 else x

    apart.requires_grad_()
    go(apart, record=record)
    with pytest.raises(ValueError, match="the record depends on"):
        go(apart - 2, record=record)
    with pytest.raises(TypeError, match="record must return a tensor"):
        go(apart, record=lambda state: float(state.position.detach().sum()))


def test_a_known_form_of_a_body_may_not_begin_inside_of_a_surface():
    contact = Contact(Plane([0.0, 1.0]), Barrier(1.0, 0.1))
    dynamics = adjsim.Mechanics(adjsim.Harmonic(0.1), 1.0, contact=contact)

    def go(height):
        position = torch.tensor([[0.0, height]], dtype=torch.float64)
        return adjsim.simulate(
            dynamics,
            dynamics.init(position),
            [0.0, 0.02],
            solver=adjsim.VelocityVerlet(0.01),
            compile=True,
        )

    go(0.5)
    go(0.4)
    with pytest.raises(ValueError, match="gap"):
        go(-0.1)


def test_a_captured_tensor_that_comes_to_require_grad():
    weight = torch.tensor(0.1, dtype=torch.float64)
    dynamics, y = ODE(lambda t, y: weight * y), start((4,))
    run(dynamics, y)
    weight.requires_grad_()
    with pytest.raises(ValueError, match="requires grad"):
        run(dynamics, y)


def test_another_form_is_checked():
    dynamics, y = ODE(Net()), start((4,))
    run(dynamics, y)
    dynamics.fun.inner.float()
    with pytest.raises(TypeError, match="Give both the same dtype"):
        run(dynamics, y)
    dynamics.fun.inner.double()
    run(dynamics, y)
    dynamics.fun.outer = nn.Linear(5, 2).double()
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        run(dynamics, y)


class Lazy(nn.Module):
    """A module whose first evaluation makes a parameter, a buffer and a number."""

    def __init__(self, form):
        super().__init__()
        self.form, self.width, self.weight = form, None, None
        self.layer = nn.LazyLinear(3) if form == "layer" else None
        self.register_buffer("size", None)

    def forward(self, t, y):
        if self.form == "layer":
            return self.layer(y)
        if self.form == "number":
            self.width = y.shape[-1] if self.width is None else self.width
            return -y * self.width
        if self.form == "buffer":
            self.size = torch.full((), 2.0) if self.size is None else self.size
            return -y * self.size
        if self.weight is None:
            self.weight = nn.Parameter(torch.full((), 2.0))
        return -y * self.weight


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("form", ["layer", "number", "buffer", "parameter"])
def test_what_the_first_evaluation_makes(form, compile):
    for adjoint in (DirectAdjoint(), CheckpointAdjoint()):
        torch.manual_seed(0)
        dynamics, y = ODE(Lazy(form)), torch.ones(2, 3, requires_grad=True)
        grads = []
        for _ in range(2):
            final = adjsim.simulate(
                dynamics,
                dynamics.init(y),
                [0.0, 0.3],
                solver=RungeKutta("rk4", 0.1),
                adjoint=adjoint,
                compile=compile,
            ).final.y
            # The run has its own copy, unless autograd has the graph of its steps.
            changes = form == "buffer" and (compile or isinstance(adjoint, CheckpointAdjoint))
            if changes:
                dynamics.fun.size.mul_(7)
            inputs = [y, *dynamics.parameters()]
            grads.append(torch.autograd.grad(final.sum(), inputs))
            if changes:
                dynamics.fun.size.div_(7)
        assert len(grads[0]) == {"layer": 3, "parameter": 2}.get(form, 1)
        for first, second in zip(*grads, strict=True):
            torch.testing.assert_close(first, second)


def test_another_time_of_the_start_is_checked():
    dynamics = ODE(lambda t, y: -y / t)

    def go(times):
        return adjsim.simulate(
            dynamics,
            dynamics.init(torch.ones(1)),
            times,
            solver=adjsim.BackwardEuler(0.1),
            adjoint=DirectAdjoint(),
            compile=True,
        )

    go([0.1, 0.3])
    with pytest.raises(ValueError, match="NaN or infinite entries at the start"):
        go([0.0, 0.2])
