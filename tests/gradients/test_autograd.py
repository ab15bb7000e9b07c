"""How gradients behave towards autograd: who gets one, what is refused, what happens twice."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, VelocityVerlet
from adjsim.core.transforms import has_tangent
from adjsim.solvers.base import StepPlan
from tests.problems import Cage, chaotic, parameter, square

SWEPT = [CheckpointAdjoint(), ReversibleAdjoint()]
ALL = [DirectAdjoint(), *SWEPT]
TIMES = torch.linspace(0.0, 0.2, 3)


def run(dynamics, adjoint, position=None, momentum=None, **options):
    if position is None:
        position, momentum = square()
    start = dynamics.init(position, momentum)
    return adjsim.simulate(
        dynamics, start, TIMES, solver=VelocityVerlet(0.01), adjoint=adjoint, **options
    )


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_only_what_requires_grad_gets_one(adjoint):
    frozen = nn.Parameter(torch.tensor(1.0), requires_grad=False)
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(frozen, parameter(1.0)), mass=1.3)
    run(dynamics, adjoint).final.position.square().sum().backward()
    assert frozen.grad is None
    assert dynamics.potential.sigma.grad is not None
    assert dynamics.mass.grad is None


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_nothing_requires_grad(adjoint):
    result = run(adjsim.Hamiltonian(adjsim.LennardJones()), adjoint)
    assert not result.final.position.requires_grad
    assert not result.position.requires_grad


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_a_parameter_never_used_gets_nothing(adjoint):
    potential = adjsim.LennardJones(parameter(1.0))
    potential.idle = parameter(3.0)
    dynamics = adjsim.Hamiltonian(potential)
    run(dynamics, adjoint).final.position.sum().backward()
    assert potential.idle.grad is None or float(potential.idle.grad) == 0.0
    assert potential.epsilon.grad is not None


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_a_network_output_is_differentiated_through(adjoint):
    """A tensor with a graph of its own, given to a constructor, hands its gradient on."""
    weight = parameter(0.4)
    dynamics = adjsim.Hamiltonian(
        adjsim.Harmonic(k=torch.exp(weight) * torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    )
    loss = run(dynamics, adjoint).final.position.square().sum()
    (grad,) = torch.autograd.grad(loss, weight)
    h, values = 1e-5, []
    for shift in (h, -h):
        moved = adjsim.Hamiltonian(
            adjsim.Harmonic(
                k=torch.exp(weight.detach() + shift) * torch.tensor([[1.0], [2.0], [3.0], [4.0]])
            )
        )
        values.append(float(run(moved, adjoint).final.position.square().sum()))
    assert float(grad) == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-7)


class Captures(nn.Module):
    def __init__(self):
        super().__init__()
        self.strength = torch.tensor(1.5, requires_grad=True)  # a plain attribute, not a parameter

    def forward(self, position):
        return (self.strength * position**2).sum((-1, -2))


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_a_captured_tensor_is_named(adjoint):
    with pytest.raises(
        ValueError, match=r"'potential\.strength' \(a plain attribute of Captures\).*not registered"
    ):
        run(adjsim.Hamiltonian(Captures()), adjoint)


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_a_tensor_captured_by_the_record_is_refused(adjoint):
    outside = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(
        ValueError, match=r"the record depends on a captured tensor of shape \(2,\)"
    ):
        run(
            adjsim.Hamiltonian(adjsim.Harmonic()),
            adjoint,
            record=lambda s: (s.position * outside).sum((-1, -2)),
        )


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_a_record_may_depend_on_parameters(adjoint):
    dynamics = adjsim.Hamiltonian(
        adjsim.LennardJones(parameter(1.1), parameter(0.95)), parameter(1.4)
    )
    result = run(dynamics, adjoint, record=dynamics.invariant)
    found = torch.autograd.grad(result.record.sum(), list(dynamics.parameters()))
    frames = run(dynamics, DirectAdjoint())
    energies = [
        dynamics.invariant(adjsim.PhaseState(frames.position[i], frames.momentum[i]))
        for i in range(3)
    ]
    expected = torch.autograd.grad(sum(energies), list(dynamics.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_backward_twice(adjoint):
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(parameter(1.1), parameter(0.95)))
    loss = run(dynamics, adjoint).final.position.square().sum()
    first = torch.autograd.grad(loss, list(dynamics.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(dynamics.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, list(dynamics.parameters()))


@pytest.mark.parametrize("adjoint", SWEPT, ids=repr)
def test_double_backward_names_the_way_out(adjoint):
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(parameter(1.1), parameter(0.95)))
    loss = run(dynamics, adjoint).final.position.square().sum()
    with pytest.raises(RuntimeError, match=r"Use DirectAdjoint\(\)"):
        torch.autograd.grad(loss, list(dynamics.parameters()), create_graph=True)


@pytest.mark.parametrize("potential", [adjsim.LennardJones, Cage], ids=["closed", "automatic"])
def test_double_backward_through_direct(potential):
    """The second derivative with respect to the mass, against a central difference of the first."""

    def first(mass):
        dynamics = adjsim.Hamiltonian(potential(), mass)
        loss = run(dynamics, DirectAdjoint()).final.position.square().sum()
        return torch.autograd.grad(loss, dynamics.mass, create_graph=True)[0]

    mass = parameter(1.2)
    second = torch.autograd.grad(first(mass), mass)[0]
    h = 1e-5
    slope = (first(parameter(1.2 + h)) - first(parameter(1.2 - h))) / (2 * h)
    torch.testing.assert_close(second, slope.detach(), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("potential", [adjsim.LennardJones, Cage], ids=["closed", "automatic"])
def test_torch_func_through_direct(potential):
    dynamics = adjsim.Hamiltonian(potential())
    q, p = square()

    def loss(position):
        return run(dynamics, DirectAdjoint(), position, p).final.position.square().sum()

    x = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(q).detach(), expected, rtol=1e-12, atol=1e-12)
    _, tangent = torch.func.jvp(loss, (q,), (p,))
    torch.testing.assert_close(tangent.detach(), (expected * p).sum(), rtol=1e-11, atol=1e-12)
    many = torch.func.vmap(loss)(torch.stack([q, q + 0.01]))
    torch.testing.assert_close(many.detach()[0], loss(q).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dual", [False, True], ids=["jvp", "dual tensors"])
def test_steps_forward_in_time_read_tensors_with_tangents(dual, monkeypatch):
    # Torch takes ten times as long for a product of which one factor has no tangent.
    tangents, step = [], StepPlan.step

    def counted(self, state, context):
        given = [x for group in context.coefficients.values() for x in group.values()]
        tangents.extend(map(has_tangent, [*given, *context.noise]))
        return step(self, state, context)

    monkeypatch.setattr(StepPlan, "step", counted)
    dynamics = adjsim.Langevin(adjsim.DoubleWell())
    q, p = square()

    def loss(position):
        start, solver = dynamics.init(position, p), adjsim.BAOAB(0.01)
        found = adjsim.simulate(dynamics, start, TIMES, solver=solver, generator=1)
        return found.final.position.square().sum()

    x = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    assert not any(tangents)
    tangents.clear()
    if dual:
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(loss(forward_ad.make_dual(q, p))).tangent
    else:
        _, found = torch.func.jvp(loss, (q,), (p,))
    assert tangents
    assert all(tangents)
    torch.testing.assert_close(found, (expected * p).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adjoint", SWEPT, ids=repr)
def test_reverse_transforms_go_through_the_others(adjoint):
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones())
    q, p = square()

    def loss(position, adjoint=adjoint):
        return run(dynamics, adjoint, position, p).final.position.square().sum()

    expected = torch.func.grad(lambda x: loss(x, DirectAdjoint()))(q).detach()
    for transform in (torch.func.grad, torch.func.jacrev):
        torch.testing.assert_close(transform(loss)(q).detach(), expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="leading batch axis"):
        torch.func.vmap(loss)(torch.stack([q, q]))


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_a_step_of_an_optimiser_between_runs(adjoint):
    """Two steps of training give falling losses: nothing stale is kept."""
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(sigma=parameter(0.9)))
    target = run(adjsim.Hamiltonian(adjsim.LennardJones(sigma=1.0)), DirectAdjoint()).final.position
    optimiser = torch.optim.SGD(dynamics.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = (run(dynamics, adjoint).final.position - target).square().sum()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("adjoint", ALL, ids=repr)
def test_time_dependent_forces(adjoint):
    """A driven oscillator, against the closed form of one kick-stream-kick at its own times."""

    class Drive(adjsim.ForceField):
        def __init__(self):
            super().__init__()
            self.amplitude, self.k = parameter(0.7), parameter(1.3)

        def forward(self, t, position):
            return self.amplitude * torch.cos(torch.as_tensor(3.0 * t)) - self.k * position

    drive = Drive()
    dynamics = adjsim.Hamiltonian(drive)
    result = run(dynamics, adjoint)
    grads = torch.autograd.grad(result.final.position.square().sum(), list(drive.parameters()))
    q, p = square()
    a, k, h = parameter(0.7), parameter(1.3), 0.01
    for n in range(20):
        p = p + h / 2 * (a * torch.cos(torch.tensor(3.0 * n * h)) - k * q)
        q = q + h * p
        p = p + h / 2 * (a * torch.cos(torch.tensor(3.0 * (n + 1) * h)) - k * q)
    torch.testing.assert_close(result.final.position, q, rtol=1e-13, atol=1e-13)
    expected = torch.autograd.grad(q.square().sum(), (a, k))
    for mine, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


class Kicked(nn.Module):
    """Of which steps of size one are the standard map."""

    def __init__(self, k):
        super().__init__()
        self.k = parameter(k)

    def forward(self, position):
        return (self.k * torch.cos(position)).sum((-1, -2))


@chaotic
def test_reversal_beyond_its_tolerance_raises():
    """In the standard map of k = 10 errors grow fivefold a step: fifty steps lose the start, and
    segments of five keep it.
    """
    dynamics = adjsim.Hamiltonian(Kicked(10.0))
    start = dynamics.init(*square())
    options = {"solver": VelocityVerlet(1.0), "record": lambda s: s.position}
    lost = adjsim.simulate(dynamics, start, [0.0, 50.0], adjoint=ReversibleAdjoint(), **options)
    assert lost.stats["reconstruction_error"] is None
    with pytest.raises(adjsim.ReconstructionError, match="checkpoint_every"):
        lost.final.position.sum().backward()
    kept = adjsim.simulate(
        dynamics, start, [0.0, 50.0], adjoint=ReversibleAdjoint(checkpoint_every=5), **options
    )
    kept.final.position.sum().backward()
    assert 0 < kept.stats["reconstruction_error"] < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("friction", [1e-9, 1.0])
def test_a_tolerance_may_be_huge(dtype: torch.dtype, friction: float):
    """It switches the comparison off; in units of rounding it is beyond the largest float."""
    well = adjsim.Harmonic(1.0)
    dynamics = adjsim.Langevin(well, kT=1e-20, friction=friction)
    start = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    run = adjsim.simulate(
        dynamics,
        dynamics.init(start, torch.zeros_like(start)),
        [0.0, 1.0],
        solver=adjsim.BAOAB(0.1),
        adjoint=ReversibleAdjoint(tol=1e300),
    )
    (slope,) = torch.autograd.grad(run.final.position.sum(), start)
    # The slope of a linear flow is its value, to rounding of float32.
    assert float(slope) == pytest.approx(float(run.final.position.detach()), rel=1e-5)


def test_the_continuous_adjoint_refuses_to_be_differentiated_twice():
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.3)))
    start = dynamics.init(*square())
    record = lambda state: state.position.square().sum()  # noqa: E731
    for options in ({}, {"record": record}):
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.2],
            solver=adjsim.ODESolver(),
            adjoint=adjsim.BacksolveAdjoint(),
            **options,
        )
        loss = run.record.sum() if options else run.final.position.square().sum()
        with pytest.raises(RuntimeError, match=r"Use DirectAdjoint\(\)"):
            torch.autograd.grad(loss, dynamics.potential.k, create_graph=True)


def test_second_derivative_through_an_adaptive_solver_from_rest():
    """A field that starts at zero leaks no NaN from the choice of steps. d^2/dk^2 cos(sqrt(k) t) in
    closed form.
    """
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.3)))
    start = dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))
    run = adjsim.simulate(
        dynamics, start, [0.0, 1.0], solver=adjsim.ODESolver("dopri5", rtol=1e-9, atol=1e-9)
    )
    k = dynamics.potential.k
    (first,) = torch.autograd.grad(run.final.position.sum(), k, create_graph=True)
    (second,) = torch.autograd.grad(first, k)
    w = float(k) ** 0.5
    exact = (math.sin(w) / w - math.cos(w)) / (4 * w**2)
    assert float(second) == pytest.approx(exact, rel=1e-6)


def test_a_factor_that_needs_no_gradient():
    """A friction-like scale by a number, and one that names a field it ignores."""

    class Drag(adjsim.dynamics.Term):
        def drift(self, t, state):
            return {"momentum": -0.3 * state.momentum}

        def moves(self, h, state):
            plain = adjsim.dynamics.Function(lambda c: torch.tensor(math.exp(-0.15 * h)), ())
            blind = adjsim.dynamics.Function(
                lambda c, q: torch.tensor(math.exp(-0.15 * h)), ("position",)
            )
            return (
                adjsim.dynamics.Scale("momentum", plain),
                adjsim.dynamics.Scale("momentum", blind),
            )

    class Dragged(adjsim.Hamiltonian):
        @property
        def terms(self):
            return super().terms | {"D": Drag()}

    dynamics = Dragged(adjsim.Harmonic(parameter(1.3)))
    start = dynamics.init(*square())
    grads = []
    for adjoint in ALL:
        run = adjsim.simulate(
            dynamics, start, [0.0, 0.2], solver=adjsim.Splitting("DBABD", 0.01), adjoint=adjoint
        )
        grads.append(
            torch.autograd.grad(run.final.position.square().sum(), dynamics.potential.k)[0]
        )
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-11, atol=0)
