"""ODE solvers: backpropagation against central differences, and the continuous adjoint approaching it."""

from __future__ import annotations

import pytest
import torch
from torchdiffeq._impl.odeint import SOLVERS

import adjsim
from adjsim import BacksolveAdjoint, DirectAdjoint, ODESolver, TimeAverage
from adjsim.solvers.ode import ADAPTIVE, MULTISTEP, ONE_STEP, SCIPY
from tests.gradients.test_table import agree, moment
from tests.problems import DYNAMICS, POTENTIALS, square

TIMES = [0.0, 0.05, 0.2, 0.25, 0.5]


def solver_for(method: str, tolerance: float = 1e-10) -> ODESolver:
    if method in ONE_STEP + MULTISTEP:
        return ODESolver(method, dt=0.01)
    return ODESolver(method, rtol=tolerance, atol=tolerance)


def gradients(method, adjoint, kind="saves", dynamics="hamiltonian", potential="lennard-jones", solver=None, shift=None):
    """The gradient of a loss along 0.5 time units by every input, or the loss alone after a shift of one of them."""
    made = DYNAMICS[dynamics](POTENTIALS[potential]())
    position, momentum = square()
    inputs = {**dict(made.named_parameters()), "position": position, "momentum": momentum}
    if shift is not None:
        with torch.no_grad():
            inputs[shift[0]] += shift[1]
    position.requires_grad_()
    momentum.requires_grad_()
    record = {"record": moment, "average": TimeAverage(moment, burn_in=0.1)}.get(kind)
    run = adjsim.simulate(
        made, made.init(position, momentum), TIMES, solver=solver or solver_for(method), adjoint=adjoint, record=record
    )
    if kind == "final":
        loss = moment(run.final)
    elif kind == "saves":
        loss = sum(moment([getattr(run, f)[i] for f in run.final._fields]) * (1 + i) for i in range(len(TIMES)))
    else:
        loss = run.record.sum()
    if shift is not None:
        return float(loss.detach())
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(inputs, found, strict=True))


def test_every_method_of_torchdiffeq_is_there():
    assert set(ADAPTIVE + ONE_STEP + MULTISTEP + SCIPY) == set(SOLVERS)


@pytest.mark.parametrize("method", ADAPTIVE + ONE_STEP + MULTISTEP)
def test_direct_against_central_differences(method):
    grads = gradients(method, DirectAdjoint())
    h = 1e-5
    for name, grad in grads.items():
        direction = torch.randn_like(grad)
        ahead, behind = (gradients(method, DirectAdjoint(), shift=(name, s * h * direction)) for s in (1, -1))
        # Adaptive methods choose their steps anew for each shift, which moves the loss by their tolerance, 1e-10, over h;
        # implicit_adams iterates its corrector only to rtol.
        rel = 1e-6 if method in ONE_STEP + ("explicit_adams",) else 2e-5
        assert (ahead - behind) / (2 * h) == pytest.approx(float((grad * direction).sum()), rel=rel, abs=1e-7), name


@pytest.mark.parametrize("kind", ["final", "saves", "record", "average"])
@pytest.mark.parametrize("dynamics", ["hamiltonian", "chain-3", "esh"])
def test_continuous_adjoint_approaches_the_solver_as_tolerances_tighten(dynamics, kind):
    exact = gradients("dopri8", DirectAdjoint(), kind, dynamics, solver=ODESolver("dopri8", rtol=1e-12, atol=1e-12))
    errors = []
    for tolerance in (1e-4, 1e-6, 1e-9):
        found = gradients("dopri5", BacksolveAdjoint(), kind, dynamics, solver=ODESolver("dopri5", rtol=tolerance, atol=tolerance))
        errors.append(max(float((found[k] - exact[k]).norm() / exact[k].norm()) for k in exact))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


@pytest.mark.parametrize("method", [*ADAPTIVE, *ONE_STEP, *MULTISTEP, *SCIPY])
def test_continuous_adjoint_of_every_method(method):
    """Its own tolerance or order away from the exact flow's gradient: dt = 0.01 leaves a first-order method 5 % off."""
    exact = gradients("dopri8", DirectAdjoint(), solver=ODESolver("dopri8", rtol=1e-12, atol=1e-12))
    agree(gradients(method, BacksolveAdjoint(), solver=solver_for(method, 1e-8)), exact, 0.1 if method == "euler" else 5e-3)


def test_backward_tolerances_are_their_own():
    tight = ODESolver("dopri5", rtol=1e-11, atol=1e-11)
    exact = gradients("dopri5", DirectAdjoint(), solver=tight)
    loose = gradients("dopri5", BacksolveAdjoint(rtol=1e-3, atol=1e-3), solver=tight)
    good = gradients("dopri5", BacksolveAdjoint(rtol=1e-10, atol=1e-10), solver=tight)
    error = [max(float((g[k] - exact[k]).norm() / exact[k].norm()) for k in exact) for g in (loose, good)]
    assert error[0] > 100 * error[1]


def test_scipy_cannot_be_backpropagated_through():
    with pytest.raises(TypeError, match="BacksolveAdjoint"):
        gradients("scipy_solver", DirectAdjoint())


def test_time_average_is_the_integral():
    """A harmonic oscillator from q = 1 at rest: the mean of q^2 over [b, T] in closed form."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic())
    start = dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))
    for solver in (ODESolver("dopri8", rtol=1e-10, atol=1e-10), ODESolver("rk4", dt=0.01)):
        for burn_in in (0.0, 1.0):
            run = adjsim.simulate(
                dynamics, start, [0.0, 2.0, 3.0], solver=solver, record=TimeAverage(lambda s: s.position**2, burn_in)
            )
            exact = 0.5 + (torch.sin(torch.tensor(6.0)) - torch.sin(torch.tensor(2 * burn_in))) / (4 * (3 - burn_in))
            torch.testing.assert_close(run.record.squeeze(), exact, rtol=1e-8, atol=0)


def test_dissipation_loses_the_backward_solution_and_saving_keeps_it():
    """x' = -x: integrated backward it grows as e^t; setting it again at save times bounds that."""

    class Relax(adjsim.ForceField):
        def __init__(self):
            super().__init__()
            self.rate = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, t, position):
            return -self.rate * position**3 - 0.5 * position

    def gradient(times, adjoint):
        force = Relax()
        dynamics = adjsim.Hamiltonian(force)
        # Momentum relaxes and nothing moves: an infinitely slow position makes the force a constant of motion.
        run = adjsim.simulate(
            dynamics, dynamics.init(torch.ones(1, 1), torch.zeros(1, 1)), times, solver=ODESolver(rtol=1e-8, atol=1e-8), adjoint=adjoint
        )
        return torch.autograd.grad(run.final.position.sum(), force.rate)[0]

    direct = gradient([0.0, 3.0], DirectAdjoint())
    torch.testing.assert_close(gradient([0.0, 1.0, 2.0, 3.0], BacksolveAdjoint()), direct, rtol=1e-5, atol=0)


def test_vector_field_counts_its_work():
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(torch.nn.Parameter(torch.tensor(1.0))))
    start = dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))
    run = adjsim.simulate(dynamics, start, [0.0, 1.0], solver=ODESolver("rk4", dt=0.1))
    assert run.stats["energy_evaluations"] == 40
    run.final.position.sum().backward()
    # All but the first of rk4's last slopes reach the position; each evaluation is gone back through at most once.
    assert 70 <= run.stats["energy_evaluations"] <= 80
