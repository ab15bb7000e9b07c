"""Gradients of rollouts of mechanics: against differences, and by every adjoint."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim import (
    BackwardEuler,
    CheckpointAdjoint,
    DirectAdjoint,
    ImplicitMidpoint,
    ReconstructionError,
    ReversibleAdjoint,
    Splitting,
    simulate,
)
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.potentials import PlaneContact
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.signals.controls import OpenLoop
from adjsim.potentials.signals.signals import PiecewiseLinear
from tests.mechanics import BODIES, body, masses, start, start_of
from tests.problems import parameter, slow_but

DT, STEPS = 0.01, 12
# Bodies and implicit solvers, None for a splitting.
CASES = [
    *((name, None) for name in BODIES),
    ("prescribed", BackwardEuler),
    ("prescribed", ImplicitMidpoint),
    ("friction-moving", ImplicitMidpoint),
]


def is_marathon(name, implicit):
    return (name, implicit) in [
        ("friction-moving", ImplicitMidpoint),
        ("friction-vertices", None),
        ("rayleigh", None),
        ("prescribed", BackwardEuler),
        ("prescribed", ImplicitMidpoint),
        ("everything", None),
    ]


def is_short(name, implicit):
    return (name, implicit) == ("friction", None)


def rollout(dynamics, adjoint, *, scheme=None, exact=False, compile=False, implicit=None):
    """The final state's projection on a direction, and the final state of the run."""
    position, momentum = (x.clone().requires_grad_() for x in start())
    begin = start_of(dynamics, position, momentum)
    if implicit is None:
        solver = Splitting(scheme or dynamics.scheme, DT, exact=exact)
    else:
        solver = implicit(DT)
    ts = [0.0, 5 * DT, STEPS * DT]
    made = simulate(dynamics, begin, ts, solver=solver, adjoint=adjoint, compile=compile)
    generator = torch.Generator().manual_seed(5)
    loss = sum((torch.randn(x.shape, generator=generator) * x).sum() for x in made.final)
    loss = loss + (made.position[1] ** 2).sum()
    return loss, [position, momentum], made


def gradients(name, adjoint, **options):
    dynamics = BODIES[name]()
    loss, inputs, made = rollout(dynamics, adjoint, **options)
    names = [n for n, _ in dynamics.named_parameters()]
    found = torch.autograd.grad(loss, [*dynamics.parameters(), *inputs], allow_unused=True)
    return dict(zip([*names, "position", "momentum"], found, strict=True)), made


def agree(mine, theirs, tolerance):
    assert mine.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert grad is not None, name
        assert mine[name] is not None, name
        # A small gradient is a sum of terms of order 1e-2 and above, which round.
        size = max(float(grad.norm()), 1e-2)
        assert float((mine[name] - grad).norm()) <= tolerance * size, name


@pytest.mark.parametrize(("name", "implicit"), slow_but(is_short, CASES, is_marathon))
def test_gradients_of_every_number_are_those_of_differences(name, implicit):
    """In contact and sliding. The error of central differences is h^2, and rounding / h."""
    found, _ = gradients(name, DirectAdjoint(), implicit=implicit)
    dynamics, h = BODIES[name](), 1e-5
    for parameter_name, p in dynamics.named_parameters():
        flat = p.detach().reshape(-1)
        for i in range(len(flat)):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    before = float(flat[i])
                    flat[i] = before + sign * h
                    ends.append(float(rollout(dynamics, DirectAdjoint(), implicit=implicit)[0]))
                    flat[i] = before
            slope = (ends[0] - ends[1]) / (2 * h)
            grad = float(found[parameter_name].reshape(-1)[i])
            assert grad == pytest.approx(slope, rel=1e-6, abs=1e-8), (parameter_name, i)
        # Some vertices have no contact, and prescribed ones no mass; no number has no effect.
        assert float(found[parameter_name].abs().max()) > 1e-6, parameter_name


@pytest.mark.parametrize(("name", "implicit"), slow_but(is_short, CASES))
def test_adjoints_agree(name, implicit):
    direct, _ = gradients(name, DirectAdjoint(), implicit=implicit)
    checkpoint, _ = gradients(name, CheckpointAdjoint(3), implicit=implicit)
    agree(checkpoint, direct, 1e-12)
    reversible, made = gradients(name, ReversibleAdjoint(), implicit=implicit)
    agree(reversible, direct, 1e-10)
    assert made.stats["reconstruction_error"] < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("name", ["viscous", "prescribed"])
def test_flows_of_shears_and_scales_reverse_exactly(name):
    direct, _ = gradients(name, DirectAdjoint(), exact=True)
    reversible, made = gradients(name, ReversibleAdjoint(), exact=True)
    agree(reversible, direct, 1e-12)
    assert made.stats["reconstruction_error"] == 0.0


@pytest.mark.slow
def test_a_lost_trajectory_names_the_ways_out():
    """Exact steps are one for springs with damping, and not for friction."""
    adjoint, message = ReversibleAdjoint(checkpoint_every=50), "gradient would be wrong. "

    def lose(dynamics, velocity):
        begin = dynamics.init(torch.zeros(1, 2).double(), velocity=[[velocity, 0.0]])
        solver = Splitting(dynamics.scheme, 5e-3)
        made = simulate(dynamics, begin, [0.0, 0.3], solver=solver, adjoint=adjoint)
        made.final.position.sum().backward()

    # Sticking multiplies errors by exp(mu g / v_s) in one unit of time: by e^147 in the run.
    weight = Gravity(1.0, 9.81, direction=[0.2, 1.0])
    floor = PlaneContact([0.0, 1.0], 0.0, 1e4, 1e-3)
    with pytest.raises(ReconstructionError, match=f"{message}Pass checkpoint_every= below 50 to"):
        lose(Mechanics(weight, contact=floor, friction=parameter(0.5)), 0.1)
    with pytest.raises(
        ReconstructionError, match=f"{message}Give the solver exact=True, pass checkpoint_every"
    ):
        lose(Mechanics(adjsim.Harmonic(1.0), damping=parameter(200.0)), 1.0)


def impact(adjoint, *, compile=False):
    """A dumbbell thrown at a floor: in the impact its load is 50 times its weight."""
    numbers = [parameter(x) for x in (2e4, 0.5, 300.0, 9.81)]
    stiffness, friction, spring, g = numbers
    floor = PlaneContact([0.0, 1.0], 0.0, stiffness, 1e-3)
    body = adjsim.HarmonicBond([[0, 1]], spring, 0.5) + Gravity(1.0, g)
    dynamics = Mechanics(body, contact=floor, friction=friction, smoothing=0.05)
    begin = dynamics.init([[0.0, 0.03], [0.5, 0.04]], velocity=[[2.0, -3.0], [1.5, -3.0]])
    made = simulate(
        dynamics,
        begin,
        [0.0, 0.05],
        solver=Splitting(dynamics.scheme, 1e-3),
        adjoint=adjoint,
        compile=compile,
    )
    loss = (made.final.position**2).sum()
    return dict(enumerate(torch.autograd.grad(loss, numbers))), made


@pytest.mark.parametrize(
    "compile",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.marathon)],
)
def test_checkpoints_follow_the_load(compile):
    """With the distance that the weight alone allows, the impact would lose the trajectory."""
    checkpoint, _ = impact(CheckpointAdjoint())
    reversible, made = impact(ReversibleAdjoint(), compile=compile)
    agree(reversible, checkpoint, 1e-10)
    assert made.stats["reconstruction_error"] < 1e-11
    # One vertex resting: ln(tol/eps)/3 over mu g / v_s times the step.
    resting = int(7.4 / (0.5 * 9.81 / 0.05 * 1e-3))
    assert made.stats["checkpoint_every"] < 4 < 50 < resting
    with pytest.raises(ReconstructionError):
        impact(ReversibleAdjoint(checkpoint_every=resting))
    # In flight errors do not grow, so few states are stored.
    assert made.stats["checkpoints"] < made.stats["steps"] / 2


COMPILED = slow_but(
    lambda name: False,
    ["friction", "friction-moving", "viscous", "rayleigh", "prescribed"],
    marathon=lambda name: name in ("rayleigh", "friction-moving"),
)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_gradients_are_those_of_uncompiled_runs(name):
    eager, one = gradients(name, ReversibleAdjoint())
    compiled, two = gradients(name, ReversibleAdjoint(), compile=True)
    agree(compiled, eager, 1e-11)
    for x, y in zip(one.final, two.final, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)
    assert two.stats["compiled_forward"] == two.stats["compiled_backward"] == "C++"


def test_a_compiled_run_with_feedback_is_refused_if_it_needs_a_gradient():
    with pytest.raises(TypeError, match=r"compile=True cannot undo term 'U' .* iteration"):
        gradients("feedback", ReversibleAdjoint(), compile=True)


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(), ReversibleAdjoint()])
def test_a_run_keeps_the_numbers_with_which_it_began(adjoint):
    """A step of an optimiser between forward and backward leaves the gradient as it was."""
    expected, _ = gradients("friction", adjoint)
    dynamics = BODIES["friction"]()
    loss, inputs, _ = rollout(dynamics, adjoint)
    with torch.no_grad():
        for p in dynamics.parameters():
            p.mul_(1.5)
    found = torch.autograd.grad(loss, [*dynamics.parameters(), *inputs])
    for mine, theirs in zip(found, expected.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_controls_that_see_no_velocity_are_part_of_the_force():
    signal = PiecewiseLinear([0.0, 0.1], torch.nn.Parameter(torch.randn(2, 1, 2)))
    dynamics = Mechanics(body(), masses(), control=OpenLoop(signal, [2]))
    assert dynamics.scheme == "BAB"
    loss, _, _ = rollout(dynamics, DirectAdjoint())
    direct = torch.autograd.grad(loss, signal.values)
    loss, _, _ = rollout(dynamics, ReversibleAdjoint())
    reversible = torch.autograd.grad(loss, signal.values)
    torch.testing.assert_close(direct, reversible, rtol=1e-11, atol=1e-13)
    assert float(direct[0].abs().min()) > 1e-8


def test_coupled_copies_under_friction_of_a_surface():
    """The growth of errors under friction is that of the first copy."""
    found = []
    for adjoint in (DirectAdjoint(), ReversibleAdjoint()):
        dynamics, (position, momentum) = BODIES["friction"](), start()
        begin = dynamics.init(position, momentum)
        solver = adjsim.Coupled("rk4", DT, rate=1.0)
        end = simulate(dynamics, begin, [0, 3 * DT], solver=solver, adjoint=adjoint).final
        end.position.square().sum().backward()
        found.append({name: x.grad for name, x in dynamics.named_parameters()})
    agree(found[1], found[0], 1e-9)
    solver = adjsim.Coupled("dormand-prince", adjsim.Adaptive(1e-3, 1e-3), rate=1.0)
    with pytest.raises(TypeError, match=r"grow unevenly .* Use CheckpointAdjoint"):
        simulate(dynamics, begin, [0, DT], solver=solver, adjoint=ReversibleAdjoint())
