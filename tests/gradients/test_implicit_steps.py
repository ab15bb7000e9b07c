"""Gradients through implicit steps: against differences, and between the adjoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim
from adjsim import (
    BackwardEuler,
    CheckpointAdjoint,
    DirectAdjoint,
    ImplicitMidpoint,
    ReversibleAdjoint,
    TimeAverage,
    meshes,
)
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.potentials import Contact, NeoHookean, Plane, Softplus
from adjsim.potentials.gravity import Gravity
from adjsim.solvers.implicit import newton
from tests.problems import POTENTIALS, Cage, parameter, slow_but, square, vector

SOLVERS = [BackwardEuler, ImplicitMidpoint]


class Driven(adjsim.ForceField):
    """A force that turns, with a drive in time: its Jacobian is not symmetric."""

    def __init__(self):
        super().__init__()
        self.turn, self.stiffness, self.drive = parameter(0.9), parameter(2.0), parameter(0.4)

    def forward(self, t, position):
        x, y = position.unbind(-1)
        turned = torch.stack([-y, x * x + x], -1)
        phase = torch.as_tensor(3.0 * t, dtype=position.dtype)
        return self.turn * turned - self.stiffness * position + self.drive * torch.cos(phase)


FORCES = {
    "lennard-jones": POTENTIALS["lennard-jones"],
    "plain-module": Cage,
    "sum": lambda: POTENTIALS["bonded"]() + POTENTIALS["lennard-jones"](),
    "force-field": Driven,
}
ADJOINTS = {
    "direct": DirectAdjoint,
    "checkpoint": lambda: CheckpointAdjoint(2),
    "reversible": ReversibleAdjoint,
}


@pytest.fixture(params=["factorised", "products"])
def _way(request, monkeypatch):
    """The matrix of a step factorised, and by its products alone."""
    if request.param == "products":
        monkeypatch.setattr(newton, "DENSE", 0)


def loss(dynamics, q, p, solver, adjoint, **options):
    """A function of the end and of a frame on the way."""
    run = adjsim.simulate(
        dynamics,
        dynamics.init(q, p),
        [0.3, 0.4, 0.5],
        solver=solver,
        adjoint=adjoint,
        **options,
    )
    end = run.final
    return (end.position**3).sum() + (end.momentum * run.position[1]).sum()


def gradients(dynamics, q, p, solver, adjoint, **options):
    """The loss, and its gradients with respect to start and parameters."""
    q, p = q.clone().requires_grad_(), p.clone().requires_grad_()
    value = loss(dynamics, q, p, solver, adjoint, **options)
    value.backward()
    found = [q.grad, p.grad, *(x.grad for x in dynamics.parameters())]
    dynamics.zero_grad()
    return value.detach(), found


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "force",
    slow_but(
        lambda name: name in ("plain-module", "force-field"), FORCES, lambda name: name == "sum"
    ),
)
def test_gradients_against_differences_and_between_adjoints(force, solver):
    """Along one random direction in start, parameters of the force and masses together."""
    dynamics = adjsim.Hamiltonian(FORCES[force](), vector(1.0, 1.5, 0.8, 2.0))
    q, p = square()
    runs = {k: gradients(dynamics, q, p, solver(0.05), make()) for k, make in ADJOINTS.items()}
    value, direct = runs["direct"]
    for name, (same, found) in runs.items():
        assert torch.equal(same, value)
        for x, y in zip(found, direct, strict=True):
            allowed = (1e-10 if name == "reversible" else 1e-12) * float(y.abs().max())
            torch.testing.assert_close(x, y, rtol=0, atol=allowed)
    inputs = [q, p, *(x.data for x in dynamics.parameters())]
    along = [torch.randn_like(x) for x in inputs]
    slope = float(sum((g * d).sum() for g, d in zip(direct, along, strict=True)))
    values, h = [], 1e-5
    for sign in (1, -1):
        for x, d in zip(inputs, along, strict=True):
            x.add_(sign * h * d)
        with torch.no_grad():
            values.append(float(loss(dynamics, q, p, solver(0.05), DirectAdjoint())))
        for x, d in zip(inputs, along, strict=True):
            x.sub_(sign * h * d)
    # Truncation h^2 of the third derivative, and rounding 1e-14/h of the loss: both about 1e-9.
    assert slope == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_oscillator_against_its_closed_form(solver):
    """q after three steps by the matrix of a step, differentiated by autograd."""
    h, k, m, start = 0.4, parameter(2.3), parameter(1.7), vector(0.8, -0.3)
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(k), m)
    state = adjsim.PhaseState(start[0].reshape(1, 1), start[1].reshape(1, 1))
    run = adjsim.simulate(dynamics, state, [0.0, 3 * h], solver=solver(h))
    found = torch.autograd.grad(run.final.position.sum(), [k, m, start])
    theta = solver.theta
    zero = torch.zeros(())
    rate = torch.stack([torch.stack([zero, 1 / m]), torch.stack([-k, zero])])
    step = torch.linalg.solve(
        torch.eye(2) - theta * h * rate, torch.eye(2) + (1 - theta) * h * rate
    )
    expected = torch.autograd.grad((step @ step @ step @ start)[0], [k, m, start])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("solver", SOLVERS)
def test_pinned_atoms_get_the_gradient_of_what_they_hold(solver):
    """The position of a pinned atom is a parameter of the others' motion."""
    q, p = square()
    mass = torch.tensor([1.0, torch.inf, 0.8, 1.2])
    dynamics = adjsim.Hamiltonian(POTENTIALS["lennard-jones"](), mass)
    value, direct = gradients(dynamics, q, p, solver(0.05), DirectAdjoint())
    _, reversed_ = gradients(dynamics, q, p, solver(0.05), ReversibleAdjoint())
    for x, y in zip(reversed_, direct, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    shift, h = torch.zeros_like(q), 1e-5
    shift[1] = torch.tensor([0.6, -0.8])
    with torch.no_grad():
        ends = [
            float(loss(dynamics, q + s * h * shift, p, solver(0.05), DirectAdjoint()))
            for s in (1, -1)
        ]
    assert float((direct[0] * shift).sum()) == pytest.approx(
        (ends[0] - ends[1]) / (2 * h), rel=1e-6
    )
    assert value.isfinite()


@pytest.mark.parametrize("solver", SOLVERS)
def test_batches_and_other_terms(solver):
    """A thermostat around the step, two replicas, the same noise."""
    potential = POTENTIALS["lennard-jones"]()
    dynamics = adjsim.Langevin(potential, parameter(1.4), parameter(0.6), parameter(0.8))
    q, p = square((2,))
    found = {
        name: gradients(dynamics, q, p, solver(0.05), make(), generator=3)[1]
        for name, make in ADJOINTS.items()
    }
    for name, tolerance in (("checkpoint", 1e-12), ("reversible", 1e-10)):
        for x, y in zip(found[name], found["direct"], strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=tolerance * float(y.abs().max()))


def test_a_time_average_of_a_stiff_pair():
    """A bond at h omega = 100 whose mean square length has a gradient in its rest length: backward
    Euler keeps it at rest, where the length is that of the spring.
    """
    length = nn.Parameter(torch.tensor(1.2))
    bond = adjsim.HarmonicBond(torch.tensor([[0, 1]]), 2e4, length)
    dynamics = adjsim.Hamiltonian(bond, 1.0)
    q = torch.tensor([[0.0, 0.0], [1.2, 0.0]])
    start = dynamics.init(q, torch.zeros_like(q))
    record = TimeAverage(lambda s: (s.position[1] - s.position[0]).square().sum(), burn_in=2.0)
    for adjoint in (DirectAdjoint(), CheckpointAdjoint()):
        run = adjsim.simulate(
            dynamics, start, [0.0, 5.0], solver=BackwardEuler(0.5), adjoint=adjoint, record=record
        )
        (slope,) = torch.autograd.grad(run.record.sum(), length)
        # Of the start of length l0 a share (1 + (h omega)^2)^-1/2 = 1/100 is left a step.
        assert float(slope) == pytest.approx(2 * 1.2, rel=1e-6)


def test_a_tensor_that_is_computed_gets_its_gradient():
    """A stiffness with a graph of its own, under every adjoint."""
    root = parameter(1.1)
    slopes = []
    for make in ADJOINTS.values():
        dynamics = adjsim.Hamiltonian(adjsim.Harmonic(root**2), 1.3)
        run = adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.5],
            solver=ImplicitMidpoint(0.1),
            adjoint=make(),
        )
        slopes.append(float(torch.autograd.grad((run.final.position**2).sum(), root)[0]))
    assert slopes[1:] == pytest.approx(slopes[:1] * 2, rel=1e-12)


def test_a_parameter_that_changes_before_backward_does_not_change_the_gradient():
    k = parameter(1.3)
    dynamics = adjsim.Hamiltonian(adjsim.DoubleWell(k), 1.3)

    def end():
        start = dynamics.init(*square())
        return adjsim.simulate(dynamics, start, [0.0, 0.5], solver=BackwardEuler(0.1)).final

    (expected,) = torch.autograd.grad(end().position.sum(), k)
    held = end().position.sum()
    dynamics.potential.barrier = nn.Parameter(torch.tensor(5.0))
    (found,) = torch.autograd.grad(held, k)
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver", [pytest.param(BackwardEuler, marks=pytest.mark.slow), ImplicitMidpoint]
)
def test_a_soft_cube_on_a_floor_with_friction(solver):
    """Contact, friction and damping around an implicit step, by the modulus and the friction."""
    mesh = meshes.box([1.0, 1.0, 1.0], [1, 1, 1])
    mass = mesh.lumped_mass(1000.0)
    modulus, friction = parameter(1e5), parameter(0.3)
    body = NeoHookean(mesh, modulus, 0.3) + Gravity(mass, 9.81)
    floor = Contact(Plane([0.0, 0.0, 1.0], 0.0), Softplus(1e5, 0.01))
    dynamics = Mechanics(body, mass, contact=floor, friction=friction, damping=0.5)
    q, p = mesh.vertices.clone(), torch.zeros(8, 3)
    q[:, 2] += 0.02
    p[:, 0] = mass

    def place(adjoint):
        run = adjsim.simulate(
            dynamics, dynamics.init(q, p), [0.0, 0.12], solver=solver(0.03), adjoint=adjoint
        )
        return run.final.position[:, 0].mean() + run.final.position[:, 2].mean()

    found = [
        torch.autograd.grad(place(adjoint), [modulus, friction])
        for adjoint in (DirectAdjoint(), CheckpointAdjoint(2))
    ]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=0)
    # Truncation is of order (h/size)^2, and rounding 1e-15/h of a change of 1e-5 (modulus) or 0.1.
    for number, slope, h in ((modulus, found[0][0], 100.0), (friction, found[0][1], 1e-5)):
        ends = []
        for sign in (1, -1):
            number.data.add_(sign * h)
            with torch.no_grad():
                ends.append(float(place(DirectAdjoint())))
            number.data.sub_(sign * h)
        assert float(slope) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)


def test_stiff_backward_euler_is_reversed_from_checkpoints_alone():
    """At h omega = 100 a reversed step multiplies the rounding of a bond by 100."""
    length = parameter(1.2)
    bond = adjsim.HarmonicBond(torch.tensor([[0, 1]]), 2e4, length)
    dynamics = adjsim.Hamiltonian(bond, 1.0)
    start = dynamics.init(torch.tensor([[0.0, 0.0], [1.3, 0.1]]), torch.tensor([[0.4, 0.1]] * 2))

    def slope(adjoint):
        run = adjsim.simulate(
            dynamics, start, [0.0, 5.0], solver=BackwardEuler(0.5), adjoint=adjoint
        )
        return torch.autograd.grad(run.final.position[1, 0], length)[0]

    torch.testing.assert_close(
        slope(ReversibleAdjoint(checkpoint_every=1)), slope(DirectAdjoint()), rtol=1e-10, atol=0
    )
    # The sweep stops where the curvature of a lost state, or the state at the start, is wrong.
    with pytest.raises(RuntimeError, match=r"CheckpointAdjoint\(\)"):
        slope(ReversibleAdjoint())


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("size", [1e160, 1e-165, float("nan")])
def test_a_cotangent_of_any_size_gives_the_gradient_or_nan(size):
    """Its squares overflow or vanish, and conjugate gradients then took no step: zero, in silence.

    The last system has the cotangent, beside one of an ordinary size.
    """
    dynamics = adjsim.Hamiltonian(Cage())
    generator = torch.Generator().manual_seed(0)
    q, p = torch.randn(2, 2, 3, 2, generator=generator, dtype=torch.float64)
    scale = torch.tensor([1.0, size], dtype=torch.float64)

    def found(weights):
        start = dynamics.init(q.clone().requires_grad_(), p)
        end = adjsim.simulate(dynamics, start, [0.0, 0.4], solver=BackwardEuler(0.2)).final
        total = ((end.position**3).sum((-1, -2)) * weights).sum()
        return torch.autograd.grad(total, [start.position, *dynamics.parameters()])

    known, one = found(torch.ones_like(scale))[0], found(scale)
    torch.testing.assert_close(one[0][0], known[0])
    if size != size:
        assert all(bool(x.isnan().any()) for x in (one[0][1], *one[1:]))
    else:
        torch.testing.assert_close(one[0][1] / size, known[1])


class Kinked(adjsim.ForceField):
    """A spring to (1, 0), whose derivative by autograd is NaN at zero."""

    def forward(self, t, position):
        rest = torch.tensor([[1.0], [0.0]], dtype=position.dtype)
        return rest - position - 0.0 * position.abs().sqrt()


def test_a_derivative_that_is_not_finite_is_refused():
    """Newton's step arrives at the kink, and none of its matrices is taken there."""
    dynamics, tiny = adjsim.Hamiltonian(Kinked()), 2.0**-54
    q, p = torch.tensor([[1.0], [tiny]]).double(), torch.tensor([[0.0], [-2 * tiny]]).double()
    start = dynamics.init(q.requires_grad_(), p)
    end = adjsim.simulate(dynamics, start, [0.0, 0.5], solver=BackwardEuler(0.5)).final
    assert end.position[1] == 0
    with pytest.raises(RuntimeError, match=r"derivative of the implicit step .* not solved"):
        end.momentum.sum().backward()
