"""The terms of mechanics keep the contract, and give the numbers of closed solutions."""

from __future__ import annotations

import math

import pytest
import torch

import adjsim
from adjsim import CheckpointAdjoint, ReversibleAdjoint, Splitting, simulate
from adjsim.core.state import detached
from adjsim.dynamics.mechanics.damping import RayleighDamping
from adjsim.dynamics.mechanics.friction import decay_ratio
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.potentials import Barrier, Contact, Plane, Quadratic
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.signals.controls import Controller
from tests.mechanics import (
    BODIES,
    Path,
    body,
    floor,
    masses,
    moving_floor,
    sliding,
    start,
    start_of,
)
from tests.problems import parameter, slow_but
from tests.suites import TermContract, disturbed, flow, unflow

ROWS = []
for name, letters in {
    "friction": "F",
    "friction-vertices": "F",
    "friction-moving": "F",
    "viscous": "D",
    "rayleigh": "D",
    "feedback": "U",
    "prescribed": "AB",
}.items():
    made = BODIES[name]()
    state = detached(start_of(made, *start()))
    state = state if made.prescribed else disturbed(state)
    ROWS += [pytest.param(made, letter, state, id=f"{name}-{letter}") for letter in letters]


@pytest.mark.parametrize(("dynamics", "letter", "state"), ROWS)
class TestTerms(TermContract):
    pass


def test_flows_act_on_each_system_of_a_batch():
    position, momentum = start()
    for name in ("friction", "friction-moving", "rayleigh", "feedback", "prescribed"):
        dynamics = BODIES[name]()
        one = start_of(dynamics, position, momentum)
        two = start_of(dynamics, position, 0.5 * momentum)
        many = type(one)(*map(torch.stack, zip(one, two, strict=True)))
        for letter in dynamics.terms:
            found = flow(dynamics, letter, many, 0.1, None)
            for i, alone in enumerate((one, two)):
                # Bounds of the rates are those of the batch, so series may differ in rounding.
                for a, b in zip(found, flow(dynamics, letter, alone, 0.1, None), strict=True):
                    torch.testing.assert_close(a[i], b, rtol=1e-12, atol=1e-12)


# Friction.


def block(v0, mu=0.3, smoothing=0.05, g=9.81, tangent=0.0):
    """A mass at rest on a plane in the direction normal to it, and its start."""
    stiffness = 1e4
    weight = Gravity(
        1.0, g, direction=[-math.sin(math.atan(tangent)), math.cos(math.atan(tangent))]
    )
    contact = Contact(Plane([0.0, 1.0], 0.0), Quadratic(stiffness))
    dynamics = Mechanics(weight, 1.0, contact=contact, friction=mu, smoothing=smoothing)
    depth = g * math.cos(math.atan(tangent)) / stiffness
    return dynamics, dynamics.init([[0.0, -depth]], velocity=[[v0, 0.0]])


def test_a_block_slides_to_rest():
    """v(0.5) = v0 - mu g t = 0.5285 and dv/dmu = -g t, where v/v_s > 10 and tanh is 1 to 1e-9."""
    mu = parameter(0.3)
    dynamics, begin = block(2.0, mu)
    found = simulate(dynamics, begin, [0.0, 0.5], solver=Splitting(dynamics.scheme, 0.01))
    assert dynamics.scheme == "FBABF"
    v = found.final.momentum[0, 0]
    assert v.item() == pytest.approx(0.5285, abs=1e-9)
    (slope,) = torch.autograd.grad(v, mu)
    assert float(slope) == pytest.approx(-4.905, abs=1e-7)


def test_the_stopping_distance_is_reached_to_second_order():
    def error(dt):
        dynamics, begin = block(2.0)
        with torch.no_grad():
            made = simulate(dynamics, begin, [0.0, 1.0], solver=Splitting("FBABF", dt))
        return float(made.final.position[0, 0]) - 0.68027733

    # v_s^2/a times the integral of x coth(x) to v0/v_s = 40, which is 40^2/2 + pi^2/12.
    distance = 0.05**2 / (0.3 * 9.81) * (800 + math.pi**2 / 12)
    assert distance == pytest.approx(0.68027733, abs=5e-9)
    coarse, fine = error(0.01), error(0.005)
    # The step is 0.3 decay times of the end of the slide, so terms of fourth order show.
    assert coarse / fine == pytest.approx(4, rel=0.05)
    assert abs((4 * fine - coarse) / 3) < 2e-7


def test_a_block_creeps_on_an_incline():
    """Where mu N tanh(v/v_s) balances the slope: v = v_s atanh(0.6) = 0.00693147."""
    still, at = block(0.01 * math.atanh(0.6), mu=0.5, smoothing=0.01, tangent=0.3)
    # The forces along the slope, each of 2.8, balance.
    assert float(still.drift(0.0, at).momentum[0, 0]) == pytest.approx(0, abs=1e-12)
    dynamics, begin = block(0.006, mu=0.5, smoothing=0.01, tangent=0.3)
    rate, dt = 0.5 * 9.81 / 0.01, 2.5e-4
    with torch.no_grad():
        made = simulate(dynamics, begin, [0.0, 0.025, 0.03], solver=Splitting("FBABF", dt))
    speed = float(made.position[2, 0, 0] - made.position[1, 0, 0]) / 0.005
    # The error of the splitting is of the order (rate dt)^2 / 12. That of the start has decayed by
    # exp(-0.64 rate 0.025) = 4e-4 in the mean.
    assert speed == pytest.approx(0.00693147, rel=(rate * dt) ** 2 / 12)
    assert 0.01 * math.atanh(0.6) == pytest.approx(0.00693147, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.5, 30.0])
def test_the_logarithmic_form_is_right_at_any_speed(dtype, rate):
    """Against asinh(sinh(x) exp(-rate)) by logarithms of exact sums, in Python's numbers."""
    x = [1e-9, 1e-4, 0.0999, 0.1001, 0.7, 3.0, 40.0, 710.0, 1e4]

    def exact(v):
        if v < 300:
            return math.asinh(math.sinh(v) * math.exp(-rate)) / v
        return (v - rate) / v  # exp(-600) is below rounding.

    values = torch.tensor(x, dtype=dtype)
    # The square root and the quotient round, and a logarithm near zero loses some digits.
    tolerance = 40 * torch.finfo(dtype).eps
    found = decay_ratio(values**2, torch.full_like(values, rate))
    expected = torch.tensor([exact(v) for v in values.double().tolist()]).to(dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    if rate <= 0.5:
        # Beyond, the inverse amplifies rounding by exp(rate).
        back = decay_ratio((found * values) ** 2, torch.full_like(values, -rate)) * found
        torch.testing.assert_close(back, torch.ones_like(back), rtol=2 * tolerance, atol=0)


def test_friction_is_smooth_at_rest():
    """The derivative of the flow at v = 0 is exp(-a h/v_s), and the second one is zero."""
    dynamics, begin = block(0.0)
    h, speed = 0.01, torch.zeros((), requires_grad=True)

    def after(v):
        momentum = torch.stack([v, torch.zeros(())]).reshape(1, 2)
        return flow(dynamics, "F", begin._replace(momentum=momentum), h, None).momentum[0, 0]

    (slope,) = torch.autograd.grad(after(speed), speed, create_graph=True)
    decay = math.exp(-0.3 * 9.81 * h / 0.05)
    assert slope.item() == pytest.approx(decay, rel=1e-13)
    (bend,) = torch.autograd.grad(slope, speed)
    assert float(bend) == 0.0
    for v in (1e-12, 1e-6, 0.004999, 0.005001, 0.1):
        point = torch.tensor(v, requires_grad=True)
        (slope,) = torch.autograd.grad(after(point), point)
        y = math.asinh(math.sinh(v / 0.05) * decay)
        assert float(slope) == pytest.approx(math.tanh(y) / math.tanh(v / 0.05), rel=1e-11)


def test_friction_drags_vertices_along_with_a_moving_surface():
    """Relative to the surface the flow is that of a surface at rest."""
    moving, resting = BODIES["friction-moving"](), BODIES["friction"]()
    with torch.no_grad():
        resting.contact.surface.normal.copy_(moving.contact.surface.surface.normal)
    position, momentum = start()
    u = torch.tensor([0.4, 0.05])  # The rate of the path at t = 0.
    m = moving.masses(position)
    found = flow(moving, "F", moving.init(position, momentum + m * u), 0.1, None)
    expected = flow(resting, "F", resting.init(position, momentum), 0.1, None)
    torch.testing.assert_close(found.momentum - m * u, expected.momentum, rtol=1e-12, atol=1e-13)


# Damping.


def test_damping_is_exact_whatever_the_step():
    for steps in (1, 10):
        dynamics = Mechanics(adjsim.Harmonic(0.0), [1.0, 2.0], damping=0.7)
        begin = dynamics.init(torch.zeros(2, 3), torch.ones(2, 3))
        with torch.no_grad():
            made = simulate(dynamics, begin, [0.0, 2.0], solver=Splitting("DBABD", 2.0 / steps))
        assert float(made.final.momentum[0, 0]) == pytest.approx(math.exp(-1.4), rel=1e-14)


def test_stiffness_damping_is_the_exponential_of_the_matrix():
    dynamics = BODIES["rayleigh"]()
    state = disturbed(dynamics.init(*start()))
    h, size = 0.7, state.momentum.numel()
    q = state.position
    hessian = torch.autograd.functional.hessian(dynamics.body, q).reshape(size, size)
    inverse = (1 / dynamics.masses(q)).expand_as(q).reshape(-1)
    matrix = 0.3 * torch.eye(size) + 0.01 * hessian * inverse
    expected = torch.linalg.matrix_exp(-h * matrix) @ state.momentum.reshape(-1)
    found = flow(dynamics, "D", state, h, None).momentum.reshape(-1)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    low, high = dynamics.terms["D"].bounds(state)
    rates = torch.linalg.eigvals(matrix).real
    assert low <= float(rates.min())
    assert float(rates.max()) <= high < 1.1 * float(rates.max())


def test_a_mode_decays_at_half_of_its_stiffness_damping():
    """An oscillator with w^2 = k/m decays as exp(-beta w^2 t / 2), as an under-damped one does."""
    k, beta, dt, time = 4.0, 0.02, 0.01, 1.0
    dynamics = Mechanics(adjsim.Harmonic(k), 1.0, stiffness_damping=beta)
    with torch.no_grad():
        made = simulate(dynamics, dynamics.init([[1.0]]), [0, time], solver=Splitting("DBABD", dt))
    rate = beta * k / 2
    w = math.sqrt(k - rate**2)
    exact = math.exp(-rate * time) * (math.cos(w * time) + rate / w * math.sin(w * time))
    # An error of second order, (w dt)^2 / 24 = 2e-5 times the phase.
    assert float(made.final.position) == pytest.approx(exact, abs=4e-5)


@pytest.mark.parametrize("contact", [floor, moving_floor])
def test_fixed_vertices_stay_under_all_dampings(contact):
    m = torch.tensor([torch.inf, 1.0, torch.inf, 2.0])
    dynamics = sliding(contact=contact(), damping=0.3, stiffness_damping=0.01)
    dynamics.mass = nn_parameter(m)
    position, momentum = start()
    state = dynamics.init(position, velocity=momentum)
    assert not state.momentum[::2].any()
    for letter in dynamics.terms:
        after = flow(dynamics, letter, state, 0.1, None)
        assert torch.equal(after.position[::2], position[::2])
        assert torch.equal(after.momentum[::2], torch.zeros(2, 2))


def nn_parameter(x):
    return torch.nn.Parameter(x)


# Free motion.


def test_free_fall_is_exact_for_verlet_and_off_by_g_h_T_over_2_for_semi_implicit_euler():
    g, T, h = 9.81, 1.0, 0.05
    dynamics = Mechanics(Gravity(1.0, g))
    begin = dynamics.init([[0.0, 2.0]], velocity=[[1.0, 3.0]])
    exact = torch.tensor([[1.0, 2.0 + 3.0 * T - g * T**2 / 2]])

    def end(scheme):
        with torch.no_grad():
            return simulate(dynamics, begin, [0.0, T], solver=Splitting(scheme, h)).final.position

    torch.testing.assert_close(end("BAB"), exact, rtol=1e-13, atol=1e-13)
    low = exact - torch.tensor([[0.0, g * h * T / 2]])
    torch.testing.assert_close(end("BA"), low, rtol=1e-13, atol=1e-13)


def free_body():
    dynamics = Mechanics(adjsim.HarmonicBond([[0, 1], [1, 3], [3, 2], [2, 0]], 5.0, 1.0), masses())
    return dynamics, dynamics.init(*start())


def test_momentum_and_angular_momentum_are_conserved():
    dynamics, begin = free_body()
    with torch.no_grad():
        final = simulate(dynamics, begin, [0.0, 2.0], solver=Splitting("BAB", 0.02)).final

    def angular(state):
        (x, y), (px, py) = state.position.unbind(-1), state.momentum.unbind(-1)
        return (x * py - y * px).sum()

    size = float(begin.momentum.abs().sum())
    assert float((final.momentum.sum(0) - begin.momentum.sum(0)).abs().max()) < 1e-12 * size
    assert float((angular(final) - angular(begin)).abs()) < 1e-12 * size


def test_the_error_of_the_energy_is_of_second_order():
    dynamics, begin = free_body()

    def error(dt):
        with torch.no_grad():
            made = simulate(
                dynamics, begin, [0.0, 1.0], solver=Splitting("BAB", dt), record=dynamics.energy
            )
        return float(made.record[-1] - made.record[0])

    assert error(0.02) / error(0.01) == pytest.approx(4, rel=0.05)
    assert torch.equal(dynamics.invariant(begin), dynamics.energy(begin))


# Prescribed vertices.


@pytest.mark.parametrize("exact", [False, True])
def test_prescribed_vertices_follow_their_path(exact):
    dynamics = BODIES["prescribed"]()
    ts = [0.5, 0.7, 1.5]
    begin = start_of(dynamics, *start(), t=0.5)
    with torch.no_grad():
        made = simulate(dynamics, begin, ts, solver=Splitting("BAB", 0.02, exact=exact))
        for k, t in enumerate(ts):
            path = dynamics.prescribed.path(t)
            # Increments are rounded to the spacing of the lattice, once a step.
            allowed = 1e-10 if exact else 1e-13
            torch.testing.assert_close(made.position[k, [3, 1]], path, rtol=0, atol=allowed)
    assert not made.momentum[:, [3, 1]].any()


def test_prescribed_vertices_drive_the_others():
    """A spring whose end moves as A sin(w t): the forced oscillation from rest, in closed form."""
    A, w, k, T = 0.3, 1.7, 9.0, 2.0
    spring = adjsim.HarmonicBond([[0, 1]], k, 1.0)

    def path(t):
        return torch.stack([A * torch.sin(w * torch.as_tensor(t)), torch.zeros(())])[None]

    dynamics = Mechanics(spring, prescribed=([0], path))
    begin = dynamics.init([[0.0, 0.0], [1.0, 0.0]])
    with torch.no_grad():
        made = simulate(dynamics, begin, [0.0, T], solver=Splitting("BAB", 0.005))
    own = math.sqrt(k)
    exact = 1 + A * k / (k - w**2) * (math.sin(w * T) - w / own * math.sin(own * T))
    # Second order, (own dt)^2 / 24 times the phase.
    assert float(made.final.position[1, 0]) == pytest.approx(exact, abs=1e-4)


# Refusals.


def test_a_step_that_is_too_long_is_refused_with_the_bound():
    dynamics = Mechanics(adjsim.Harmonic(100.0), 4.0)
    begin = dynamics.init([[1.0]])
    with pytest.raises(ValueError, match=r"above 0\.4 \(2 / omega_max\)"):
        simulate(dynamics, begin, [0.0, 0.41], solver=Splitting("BAB", 0.41))
    with torch.no_grad():
        simulate(dynamics, begin, [0.0, 0.39], solver=Splitting("BAB", 0.39))
        # Two kicks and streams in a step are at best as stable as two steps.
        simulate(dynamics, begin, [0.0, 0.6], solver=Splitting("BABA", 0.6))
    dynamics, begin = block(0.0)
    with pytest.raises(ValueError, match=r"above 0\.02 "):
        simulate(dynamics, begin, [0.0, 0.03], solver=Splitting("FBABF", 0.03))


@pytest.mark.parametrize("compiled", slow_but(lambda compiled: not compiled, [False, True]))
def test_a_penetration_is_an_error_with_the_step(compiled):
    """A ball falls from 1 at a speed of 5 onto a barrier that is weaker than its energy."""
    contact = Contact(Plane([0.0, 1.0], 0.0), Barrier(10.0, 0.02))
    dynamics = Mechanics(Gravity(1.0, 9.81), contact=contact)
    begin = dynamics.init([[0.0, 1.0]], velocity=[[0.0, -5.0]])
    # 5 t + 4.905 t^2 = 1 at t = 0.172, so the 18th step ends behind the surface.
    # After a few steps behind the surface it is thrown out: a compiled loop ends far above.
    with torch.no_grad(), pytest.raises(ValueError, match=r"vertex 0 .* in step 18 \(t = 0\.18\)"):
        simulate(dynamics, begin, [0.0, 0.5], solver=Splitting("BAB", 0.01), compile=compiled)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="friction needs a surface"):
        Mechanics(body(), friction=0.3)
    with pytest.raises(ValueError, match="friction must not be negative"):
        Mechanics(body(), contact=floor(), friction=-0.3)
    with pytest.raises(ValueError, match="does not see the velocities of prescribed"):
        Mechanics(body(), stiffness_damping=0.1, prescribed=([0], Path()))
    with pytest.raises(ValueError, match="must not repeat a vertex"):
        Mechanics(body(), prescribed=([1, 1], Path()))
    dynamics = BODIES["prescribed"]()
    position, momentum = start()
    with pytest.raises(ValueError, match="start them with a momentum of zero"):
        dynamics.init(position, momentum)
    with pytest.raises(ValueError, match=r"away from its path at t = 0: start it on the path"):
        simulate(dynamics, dynamics.init(position), [0.0, 0.1], solver=Splitting("BAB", 0.1))
    with pytest.raises(ValueError, match="momentum or a velocity, not both"):
        BODIES["viscous"]().init(position, momentum, velocity=momentum)
    with pytest.raises(TypeError, match="exact=True needs flows made of shears and scales"):
        simulate(
            sliding(),
            sliding().init(position),
            [0, 0.1],
            solver=Splitting("FBABF", 0.1, exact=True),
        )
    rayleigh = BODIES["rayleigh"]()
    assert isinstance(rayleigh.terms["D"], RayleighDamping)
    with pytest.raises(TypeError, match="stiffness matrix is that of the start"):
        simulate(rayleigh, rayleigh.init(position), [0, 0.1], solver=adjsim.ODESolver())


class Strong(Controller):
    """A brake so strong that a step overshoots."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = parameter(200.0)

    def forward(self, t, position, velocity):
        return -self.gain * torch.sin(velocity)


def test_feedback_that_cannot_be_undone_says_so():
    dynamics = Mechanics(adjsim.Harmonic(1.0), control=Strong())
    begin = dynamics.init([[1.0, 0.3]], [[0.5, -0.4]])

    def gradient(adjoint):
        made = simulate(dynamics, begin, [0, 0.3], solver=Splitting("UBABU", 0.1), adjoint=adjoint)
        return torch.autograd.grad(made.final.position.sum(), dynamics.control.gain)

    with pytest.raises(ArithmeticError, match=r"does not converge .* CheckpointAdjoint\(\)"):
        gradient(ReversibleAdjoint())
    assert torch.isfinite(gradient(CheckpointAdjoint())[0])


def test_feedback_is_undone_to_rounding():
    dynamics = BODIES["feedback"]()
    state = disturbed(dynamics.init(*start()))
    after = flow(dynamics, "U", state, 0.2, None)
    before = unflow(dynamics, "U", after, 0.2, None)
    assert float((after.momentum - state.momentum).abs().max()) > 1e-2
    torch.testing.assert_close(before.momentum, state.momentum, rtol=1e-14, atol=1e-14)
