"""Orders of accuracy, conservation, symplecticity and reversibility of the schemes."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import adjsim
from adjsim import ODESolver, Splitting
from adjsim.dynamics.cotangents import Cotangents
from adjsim.solvers.base import StepContext
from tests.problems import DYNAMICS, POTENTIALS, SCHEMES, slow_but, square

WORDS = [(d, s) for d, words in SCHEMES.items() for s in words]
TIME = 0.2


def end(dynamics, scheme, dt):
    start = dynamics.init(*square())
    with torch.no_grad():
        return adjsim.simulate(dynamics, start, [0.0, TIME], solver=Splitting(scheme, dt)).final


@functools.cache
def exact_end(name):
    dynamics = DYNAMICS[name](POTENTIALS["lennard-jones"]())
    solver = ODESolver("dopri8", rtol=1e-13, atol=1e-13)
    with torch.no_grad():
        return adjsim.simulate(dynamics, dynamics.init(*square()), [0.0, TIME], solver=solver).final


@pytest.mark.parametrize(
    ("name", "scheme"),
    slow_but(lambda name, scheme: name in ("hamiltonian", "esh") or scheme == "NBABN", WORDS),
)
def test_order_against_a_tight_solution_of_the_same_equations(name, scheme):
    dynamics, exact = DYNAMICS[name](POTENTIALS["lennard-jones"]()), exact_end(name)
    steps = [0.0025, 0.00125]
    errors = [
        math.sqrt(
            sum(
                float(((a - b) ** 2).sum())
                for a, b in zip(end(dynamics, scheme, dt), exact, strict=True)
            )
        )
        for dt in steps
    ]
    slope = math.log2(errors[0] / errors[1])
    expected = Splitting(scheme, 0.01).order
    assert expected == (2 if scheme == scheme[::-1] else 1)
    # The next term of the error is dt^2 smaller: a tenth of a power at the smallest steps.
    assert slope == pytest.approx(expected, abs=0.1), errors


@pytest.mark.parametrize(("name", "scheme"), WORDS)
def test_steps_are_reversible(name, scheme):
    """Forward 50 steps and back as a sweep does: the start, to rounding."""
    dynamics = DYNAMICS[name](POTENTIALS["lennard-jones"]())
    start = state = dynamics.init(*square())
    solver = Splitting(scheme, 0.005)
    plan, coefficients = (
        solver.plan(dynamics, start, 0.0),
        solver.coefficients(dynamics, start),
    )
    with torch.no_grad():
        forces = plan.forces(dynamics.potential)
        context = StepContext(lambda share: 0.0, coefficients, None, forces)
        for _ in range(50):
            state = plan.step(state, context)
        nothing = Cotangents({field: torch.zeros_like(x) for field, x in state._asdict().items()})
        for _ in range(50):
            state = plan.backward(state, context, nothing)
    for found, true in zip(state, start, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)


def test_velocity_verlet_is_symplectic():
    """J^T Omega J = Omega for ten steps of four atoms."""
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(), mass=torch.tensor([1.0, 2.0, 0.7, 1.3]))
    q, p = square()

    def flow(z):
        state = dynamics.init(z[:8].reshape(4, 2), z[8:].reshape(4, 2))
        final = adjsim.simulate(
            dynamics, state, [0.0, 0.1], solver=adjsim.VelocityVerlet(0.01)
        ).final
        return torch.cat([final.position.flatten(), final.momentum.flatten()])

    jacobian = torch.autograd.functional.jacobian(flow, torch.cat([q.flatten(), p.flatten()]))
    omega = torch.kron(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.eye(8))
    torch.testing.assert_close(jacobian.T @ omega @ jacobian, omega, rtol=0, atol=1e-12)


def test_velocity_verlet_on_a_harmonic_oscillator():
    """It conserves p^2/2 + (1 - h^2/4) q^2/2; from q = 1, p = 0 at h = 1/2, q_1000 is known."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic())
    start = dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))
    run = adjsim.simulate(
        dynamics, start, torch.arange(1001) * 0.5, solver=adjsim.VelocityVerlet(0.5)
    )
    # Rounding grows in proportion to the steps: 1e3 x 1e-16, amplified by the phase it accumulates.
    assert float(run.final.position) == pytest.approx(-0.906487473830, abs=5e-11)
    shadow = 0.5 * run.momentum**2 + (1 - 0.25 / 4) * 0.5 * run.position**2
    torch.testing.assert_close(shadow, shadow[:1].expand_as(shadow), rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme", "dt"),
    slow_but(
        lambda name, scheme, dt: name == "esh",
        [("hamiltonian", "BAB", 0.01), ("chain-3", "NBABN", 0.01), ("esh", "EAE", 0.02)],
    ),
)
def test_invariant_drift_is_bounded(name, scheme, dt):
    """The invariant's error over 2,000 steps is no larger in the last quarter than three times that
    in the first, and small.
    """
    dynamics = DYNAMICS[name](POTENTIALS["lennard-jones"]())
    times = torch.arange(0, 2001, 10) * dt
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            times,
            solver=Splitting(scheme, dt),
            record=dynamics.invariant,
        )
    error = (run.record - run.record[0]).abs()
    assert float(error[-50:].max()) < 3 * float(error[:50].max())
    assert float(error.max()) < 0.02


def test_a_ball_with_linear_drag():
    """y'' = -(b/m) y' - g as an ODE with a force on a drag-scaled clock: dopri8 against the closed
    form.
    """

    class Thrown(adjsim.Hamiltonian):
        def __init__(self, b, g):
            super().__init__(adjsim.Harmonic(0.0))
            self.b, self.g = (
                torch.nn.Parameter(torch.tensor(b)),
                torch.nn.Parameter(torch.tensor(g)),
            )

        def drift(self, t, state):
            v = state.momentum
            return adjsim.PhaseState(v, -self.b * v - self.g)

    thrown = Thrown(0.1, 9.81)
    v0 = torch.full((1, 1), 10.0, requires_grad=True)
    start = thrown.init(torch.zeros(1, 1), v0)
    for adjoint in (adjsim.DirectAdjoint(), adjsim.BacksolveAdjoint()):
        run = adjsim.simulate(
            thrown,
            start,
            [0.0, 1.0],
            solver=ODESolver("dopri5", rtol=1e-10, atol=1e-10),
            adjoint=adjoint,
        )
        y = run.final.position.squeeze()
        found = torch.autograd.grad(y, (thrown.b, thrown.g, v0), retain_graph=True)
        assert float(y.detach()) == pytest.approx(4.77075110, abs=5e-8)
        for value, expected in zip(found, (-3.123191, -0.483742, 0.951626), strict=True):
            assert float(value) == pytest.approx(expected, abs=1e-6)
