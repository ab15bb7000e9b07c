"""Implicit steps: closed forms of the oscillator, orders, stability, conservation, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import adjsim
from adjsim import BackwardEuler, ImplicitMidpoint, minimize
from tests.problems import DYNAMICS, POTENTIALS, parameter, square

SOLVERS = [BackwardEuler, ImplicitMidpoint]


def run(dynamics, start, times, solver, **options):
    with torch.no_grad():
        return adjsim.simulate(dynamics, start, times, solver=solver, **options)


def oscillator(omega, mass=1.7):
    return adjsim.Hamiltonian(adjsim.Harmonic(mass * omega**2), mass)


def amplification(solver, h, omega, mass=1.7):
    """The matrix of a step for (q, p), in closed form: with A the matrix of the equations,
    (1 - h A)^-1 for backward Euler, and Cayley's (1 - h A/2)^-1 (1 + h A/2) for the midpoint rule.
    """
    a, k = h / mass, h * mass * omega**2
    if solver is BackwardEuler:
        return torch.tensor([[1.0, a], [-k, 1.0]]) / (1 + a * k)
    x = a * k / 4
    return torch.tensor([[1 - x, a], [-k, 1 - x]]) / (1 + x)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("h_omega", [0.1, 1.0, 100.0])
def test_a_step_of_an_oscillator_is_its_amplification_matrix(solver, h_omega):
    h, start = 0.5, torch.tensor([0.8, -0.3])
    dynamics = oscillator(h_omega / h)
    state = dynamics.init(start[0].reshape(1, 1), start[1].reshape(1, 1))
    end = run(dynamics, state, [0.0, h], solver(h)).final
    q, p = amplification(solver, h, h_omega / h) @ start
    # Positions are solved to 1e-14 of their size, and a force is k times as far off.
    size = 0.8 * (1 + h * 1.7 * (h_omega / h) ** 2)
    assert float(end.position) == pytest.approx(float(q), abs=2e-14)
    assert float(end.momentum) == pytest.approx(float(p), abs=2e-14 * size)


@pytest.mark.parametrize("solver", SOLVERS)
def test_stiff_oscillators_stay_bounded(solver):
    """At h omega = 100, fifty times the bound of explicit steps: after n steps backward Euler has
    the size of its eigenvalues to the power n, and the midpoint rule its energy.
    """
    h, steps = 0.5, 100
    omega = 100 / h
    dynamics = oscillator(omega)
    state = dynamics.init(torch.tensor([[0.8]]), torch.tensor([[-0.3]]))
    energies = run(
        dynamics, state, [0.0, 5 * h, steps * h], solver(h), record=dynamics.invariant
    ).record
    if solver is BackwardEuler:
        # The matrix is a rotation divided by sqrt(1 + (h omega)^2).
        expected = energies[0] / (1 + (h * omega) ** 2) ** 5
        # A step's error of 1e-14 enters the momentum multiplied by h k, which is h omega times the
        # momentum's own size.
        torch.testing.assert_close(energies[1], expected, rtol=1e-11, atol=0.0)
        assert float(energies[2]) < 1e-300
    else:
        # 1e-14 h omega a step, 100 times.
        torch.testing.assert_close(energies[1:], energies[:1].expand(2), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_order_against_a_tight_solution_of_the_same_equations(solver):
    dynamics = DYNAMICS["hamiltonian-masses"](POTENTIALS["lennard-jones"]())
    start, time = dynamics.init(*square()), 0.05
    tight = adjsim.ODESolver("dopri8", rtol=1e-13, atol=1e-13)
    exact = run(dynamics, start, [0.0, time], tight).final
    steps = (0.0025, 0.00125)
    errors = []
    for dt in steps:
        end = run(dynamics, start, [0.0, time], solver(dt))
        assert end.stats["order"] == solver.order
        errors.append(
            math.sqrt(
                sum(float(((a - b) ** 2).sum()) for a, b in zip(end.final, exact, strict=True))
            )
        )
    # The next term of the error is dt (for backward Euler) smaller.
    assert math.log2(errors[0] / errors[1]) == pytest.approx(solver.order, abs=0.1), errors


@pytest.mark.slow
def test_the_midpoint_rule_conserves_energy_over_long_times_and_reverses():
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(), torch.tensor([1.0, 1.5, 0.8, 2.0]))
    start = dynamics.init(*square())
    times = torch.arange(0, 121) * 0.02
    whole = run(dynamics, start, times, ImplicitMidpoint(0.02))
    frames = adjsim.PhaseState(whole.position, whole.momentum)
    error = (dynamics.invariant(frames) - dynamics.invariant(start)).abs()
    # The error oscillates: it is no larger in the second half than twice that in the first.
    assert float(error[60:].max()) < 2 * float(error[:60].max()) < 0.02
    back = run(
        dynamics,
        whole.final._replace(momentum=-whole.final.momentum),
        times,
        ImplicitMidpoint(0.02),
    ).final
    # Chaos of four atoms amplifies 120 errors of 1e-14 by less than 1e3 in this time.
    torch.testing.assert_close(back.position, start.position, rtol=0, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_pinned_atoms_stay_and_the_others_move_as_in_their_field(solver):
    q, p = square()
    mass = torch.tensor([1.0, torch.inf, 0.8, torch.inf])
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(), mass)
    end = run(dynamics, dynamics.init(q, p), [0.0, 0.5], solver(0.05)).final
    assert torch.equal(end.position[1::2], q[1::2])
    assert torch.equal(end.momentum[1::2], p[1::2])

    class Rest(adjsim.LennardJones):
        def forward(self, position):
            held = q[1::2].expand(*position.shape[:-2], 2, 2)
            x = torch.stack([position[..., 0, :], held[..., 0, :]], -2)
            y = torch.stack([position[..., 1, :], held[..., 1, :]], -2)
            return super().forward(torch.cat([x, y], -2))

        def force(self, position, grid=None):
            return -torch.autograd.functional.jacobian(
                lambda x: self.forward(x).sum(), position, create_graph=True
            )

        def force_vjp(self, position, parameters, grid=None):
            x = position.detach().requires_grad_()
            with torch.enable_grad():
                value = self.force(x)
            return value.detach(), lambda v: (torch.autograd.grad(value, x, v)[0], [])

    rest = adjsim.Hamiltonian(Rest(), mass[::2])
    alone = run(rest, rest.init(q[::2], p[::2]), [0.0, 0.5], solver(0.05)).final
    torch.testing.assert_close(end.position[::2], alone.position, rtol=1e-11, atol=1e-11)


def springs(shape, stiffness):
    """A cubic lattice of springs with diagonals."""
    q = torch.tensor(list(itertools.product(*map(range, shape)))).double()
    distance = torch.cdist(q, q)
    i, j = torch.nonzero(torch.triu(distance < 1.75, 1), as_tuple=True)
    return q, adjsim.HarmonicBond(torch.stack([i, j], 1), stiffness, distance[i, j])


class Hanging(torch.nn.Module):
    """A body with weight, as an energy."""

    def __init__(self, body, g):
        super().__init__()
        self.body, self.g = body, g

    def forward(self, position):
        return self.body(position) + self.g * position[..., -1].sum(-1)


@pytest.mark.slow
def test_a_stiff_body_comes_to_rest_at_a_hundred_times_the_explicit_bound():
    """Backward Euler ends in the minimum of the energy, where the clamped atoms stay."""
    q, body = springs((4, 2, 2), 1e4)
    potential, mass = Hanging(body, 5.0), torch.ones(len(q))
    clamped = q[:, 0] == 0
    mass[clamped] = torch.inf
    # Largest frequency: sqrt(1e4 lambda), lambda at most twice the springs of an atom, here 11.
    dt = 100 * 2 / math.sqrt(1e4 * 22)
    dynamics = adjsim.Hamiltonian(potential, mass)
    end = run(dynamics, dynamics.init(q, torch.zeros_like(q)), [0.0, 60 * dt], BackwardEuler(dt))
    rest = minimize(potential, q, fixed=clamped)
    assert float((rest - q).norm()) > 1e-3
    torch.testing.assert_close(end.final.position, rest, rtol=0, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_momentum_is_conserved(solver):
    q, body = springs((3, 2, 2), 1e4)
    dynamics = adjsim.Hamiltonian(body, 0.5 + torch.rand(len(q)))
    p = torch.randn_like(q)
    end = run(dynamics, dynamics.init(q, p), [0.0, 2.0], solver(0.1)).final
    # The sum of 12 forces, each exact to 1e-14 of k h q = 4e3.
    torch.testing.assert_close(end.momentum.sum(0), p.sum(0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_other_terms_act_for_half_a_step_before_and_after(solver):
    """Without a force an implicit step is a stream, so a Langevin step is "OABAO" with the same
    noise.
    """
    dynamics = adjsim.Langevin(adjsim.Harmonic(0.0), 1.3, 0.6, 0.8)
    start = dynamics.init(*square((3,)))
    mine = run(dynamics, start, [0.0, 1.0], solver(0.1), generator=4).final
    same = run(dynamics, start, [0.0, 1.0], adjsim.Splitting("OABAO", 0.1), generator=4).final
    for x, y in zip(mine, same, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


class Driven(adjsim.ForceField):
    """A force that turns, with a drive: its Jacobian is not symmetric."""

    def __init__(self, turn=0.9, stiffness=2.0, drive=0.4):
        super().__init__()
        self.turn, self.stiffness, self.drive = turn, stiffness, drive

    def forward(self, t, position):
        x, y = position.unbind(-1)
        turned = torch.stack([-y, x], -1)
        phase = torch.as_tensor(3.0 * t, dtype=position.dtype)
        return self.turn * turned - self.stiffness * position + self.drive * torch.cos(phase)


@pytest.mark.parametrize("solver", SOLVERS)
def test_force_fields_are_evaluated_at_the_time_of_the_inner_position(solver):
    """A turning, driven, linear force: one step of each scheme solved as a dense system."""
    h, field = 0.7, Driven()
    dynamics = adjsim.Hamiltonian(field, 1.3)
    q, p = torch.tensor([[0.3, -0.2]]), torch.tensor([[0.5, 0.1]])
    end = run(dynamics, dynamics.init(q, p), [2.0, 2.0 + h], solver(h)).final
    theta = solver.theta
    jacobian = torch.tensor([[-2.0, -0.9], [0.9, -2.0]])
    a = theta * h
    drive = torch.full((2,), 0.4 * math.cos(3.0 * (2.0 + a)))
    matrix = torch.eye(2) - a**2 / 1.3 * jacobian
    x = torch.linalg.solve(matrix, q[0] + a * p[0] / 1.3 + a**2 / 1.3 * drive)
    f = jacobian @ x + drive
    torch.testing.assert_close(end.momentum[0], p[0] + h * f, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        end.position[0], q[0] + h / 1.3 * (p[0] + a * f), rtol=1e-13, atol=1e-13
    )


def test_replicas_of_a_batch_converge_for_themselves():
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(), 1.2)
    q, p = square((3,))
    start = dynamics.init(q, p * torch.tensor([0.1, 1.0, 3.0]).reshape(3, 1, 1))
    together = run(dynamics, start, [0.0, 0.5], ImplicitMidpoint(0.05)).final
    for i in range(3):
        one = dynamics.init(start.position[i], start.momentum[i])
        alone = run(dynamics, one, [0.0, 0.5], ImplicitMidpoint(0.05)).final
        torch.testing.assert_close(together.position[i], alone.position, rtol=0, atol=1e-12)


def test_what_cannot_be_solved_is_an_error():
    well = adjsim.Hamiltonian(adjsim.DoubleWell(parameter(1.0)))
    top = well.init(torch.zeros(1, 1), torch.zeros(1, 1))
    # The curvature on top is -4, so a step is unique up to h^2 = 1/4.
    with pytest.raises(RuntimeError, match=r"at t = 0\.6 has no unique .* step 1\."):
        run(well, top, [0.0, 0.6], BackwardEuler(0.6))
    run(well, top, [0.0, 0.4], BackwardEuler(0.4))

    class Jump(adjsim.ForceField):
        def forward(self, t, position):
            return torch.where(position > 0, -1.0, 1.0) + 0 * position

    edge = adjsim.Hamiltonian(Jump())
    beside = edge.init(torch.full((1, 1), 0.011), torch.zeros(1, 1))
    with pytest.raises(RuntimeError, match=r"at t = 0\.2 did not converge: after 50 .* step 2\."):
        run(edge, beside, [0.0, 0.3], BackwardEuler(0.1))


def test_a_derivative_that_is_not_finite_is_an_error():
    """Of so many coordinates that GMRES is used; its iterations would not end."""

    class Cusp(adjsim.ForceField):
        def forward(self, t, position):
            return (position - position.detach()).abs().sqrt()

    dynamics = adjsim.Hamiltonian(Cusp())
    start = dynamics.init(torch.zeros(101, 3), torch.ones(101, 3))
    with pytest.raises(RuntimeError, match=r"at t = 0\.1 .* derivative of the force is not finite"):
        run(dynamics, start, [0.0, 0.1], BackwardEuler(0.1))


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_force_is_taken_where_prescribed_vertices_are_at_its_time(solver):
    """The equations of a step, with a spring to a vertex on a path that bends."""
    h, stiffness = 0.1, 3.0
    path = adjsim.CubicSpline([0.0, 0.3, 1.0], torch.tensor([[[0.0]], [[0.4]], [[-1.0]]]))
    spring = adjsim.HarmonicBond([[0, 1]], stiffness, 0.0)
    dynamics = adjsim.Mechanics(spring, 2.0, prescribed=([0], path))
    times = torch.arange(11) * h
    made = run(dynamics, dynamics.init([[0.0], [0.7]]), times, solver(h))
    (led, free), p = made.position.squeeze(-1).T, made.momentum[:, 1, 0]
    at = times[:-1] + solver.theta * h
    expected = torch.stack([path(float(t)) for t in times]).flatten()
    torch.testing.assert_close(led, expected, rtol=0, atol=1e-14)
    q = free[:-1] + solver.theta * free.diff()
    f = stiffness * (torch.stack([path(float(t)) for t in at]).flatten() - q)
    torch.testing.assert_close(p.diff(), h * f, rtol=0, atol=1e-13)
    v = (p[:-1] + solver.theta * p.diff()) / 2.0
    torch.testing.assert_close(free.diff(), h * v, rtol=0, atol=1e-13)


def test_what_does_not_go_together_is_refused():
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    start = dynamics.init(torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(TypeError, match=r"compile=True is not for BackwardEuler\(.*products"):
        run(dynamics, start, [0.0, 0.3], BackwardEuler(0.1), compile=True)
    esh = adjsim.ESH(adjsim.Harmonic())
    with pytest.raises(TypeError, match="ESH has no such terms; use a splitting"):
        run(esh, esh.init(torch.ones(2, 2), generator=0), [0.0, 0.3], ImplicitMidpoint(0.1))
    with pytest.raises(ValueError, match="tol must be positive; got 0"):
        BackwardEuler(0.1, tol=0.0)
    with pytest.raises(ValueError, match="dt must be a positive time"):
        ImplicitMidpoint(-0.1)

    def end(q):
        state = start._replace(position=q)
        return adjsim.simulate(
            dynamics, state, [0, 0.1], solver=BackwardEuler(0.1)
        ).final.position.sum()

    with pytest.raises(RuntimeError, match=r"does not go through torch\.func transforms"):
        torch.func.grad(end)(start.position)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.functional.hessian(end, start.position)
