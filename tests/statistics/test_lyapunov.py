"""Lyapunov exponents and covariant vectors, against eigenvalues, Jacobians and the literature."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim.adjoints.sweep.stepper import prepare
from adjsim.core.noise import Noise, as_generator, seed_from
from adjsim.core.state import as_state, detached
from adjsim.core.trajectory import check_times
from adjsim.dynamics.fields.ode import ODE
from adjsim.estimators.chaos.lyapunov import LyapunovSpectrum, lyapunov_spectrum
from adjsim.estimators.chaos.tangents import TangentDriver, flatten
from adjsim.simulation.simulate import assemble
from adjsim.solvers.reversible.coupled import Coupled
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta
from tests import fields, mechanics
from tests.flows import Lorenz
from tests.problems import Case, square

# A non-normal matrix with eigenvalues -0.1, -0.7, -1.5 and eigenvectors that are far from right
# angles.
RATES = torch.tensor([-0.1, -0.7, -1.5], dtype=torch.float64)
MODES = torch.tensor([[1.0, 0.9, 0.2], [0.0, 0.4, 0.8], [0.0, 0.0, 0.5]], dtype=torch.float64)


class Matrix(nn.Module):
    def __init__(self, A: Tensor) -> None:
        super().__init__()
        self.register_buffer("A", A)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return y @ self.A.T


class HenonHeiles(nn.Module):
    """U = (x^2 + y^2)/2 + x^2 y - y^3/3."""

    def forward(self, position: Tensor) -> Tensor:
        x, y = position[..., 0].unbind(-1)
        return (x**2 + y**2) / 2 + x**2 * y - y**3 / 3


class Lorenz96(nn.Module):
    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return (y.roll(-1, -1) - y.roll(2, -1)) * y.roll(1, -1) - y + 8.0


def lorenz(batch: tuple[int, ...] = ()):
    """A start near the attractor."""
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(*batch, 3, generator=generator, dtype=torch.float64)
    return ODE(Lorenz()), drawn + torch.tensor([1.0, 1.0, 25.0], dtype=torch.float64)


def drive(dynamics, state, steps: int, solver, basis: Tensor, seed: int = 3) -> TangentDriver:
    """Push columns through so many steps, without burn-in or save times."""
    times = check_times([0.0, steps * solver.dt])
    noise = Noise(seed_from(as_generator(seed))) if dynamics.stochastic else None
    with torch.no_grad():
        run, report = assemble(dynamics, as_state(state), times, solver, None, noise)
        stepper, inputs = prepare(run, report)
        driver = TangentDriver(stepper, inputs, dynamics.potential, basis)
        stepper.run(inputs.state, inputs, driver, [], run, report)
    return driver


def jacobian(dynamics, state, steps: int, solver, seed: int = 3) -> Tensor:
    """The Jacobian of a run, (*batch, N, N), by backpropagation through it, row by row."""
    start = type(state)._make(x.detach().requires_grad_() for x in state)
    axes = len(dynamics.batch_shape(start))
    final = adjsim.simulate(
        dynamics, start, [0.0, steps * solver.dt], solver=solver, generator=seed
    ).final
    end = flatten(final, axes)
    rows = []
    for i in range(end.shape[-1]):
        found = torch.autograd.grad(
            end[..., i].sum(), tuple(start), retain_graph=True, materialize_grads=True
        )
        rows.append(flatten(found, axes))
    return torch.stack(rows, -2)


def matter(dynamics: str, scheme: str):
    case = Case(dynamics, scheme, "lennard-jones")
    physics = case.build()
    return physics, case.start(physics, *square((2,))), case.solver


def body(name: str):
    physics = mechanics.BODIES[name]()
    start = mechanics.start_of(physics, *mechanics.start())
    return physics, start, adjsim.Splitting(physics.scheme, 0.01)


def field(noise: str | None, solver):
    physics = fields.equation(noise, named=True)
    return physics, physics.init(fields.pair(fields.start((2,)))), solver


STEPS = {
    "ode": lambda: field(None, RungeKutta("heun", 0.05)),
    "sde": lambda: field("diagonal", adjsim.EulerMaruyama(0.05)),
    "hamiltonian": lambda: matter("hamiltonian-masses", "BAB"),
    "chain": lambda: matter("chain-3", "NBABN"),
    "langevin": lambda: matter("langevin", "BAOAB"),
    "memory": lambda: matter("generalised-2", "GBABG"),
    "esh": lambda: matter("esh", "EAE"),
    "overdamped": lambda: matter("overdamped", "LeimkuhlerMatthews"),
    "berendsen": lambda: matter("berendsen", "RBABR"),
    "friction": lambda: body("friction"),
}


@pytest.mark.parametrize("name", STEPS)
def test_products_with_steps_are_those_of_the_jacobian(name):
    """For every kind of dynamics, DPhi Q_0 = Q R to rounding, with the run's own noise."""
    dynamics, state, solver = STEPS[name]()
    exact = jacobian(dynamics, state, 3, solver)
    size = exact.shape[-1]
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(*exact.shape[:-1], size, generator=generator))[0]
    driver = drive(dynamics, detached(state), 3, solver, basis)
    pushed = driver.basis @ driver.triangle
    assert torch.allclose(pushed, exact @ basis, rtol=1e-11, atol=1e-11 * float(exact.abs().max()))
    # ESH keeps a direction at unit length, so its determinant is zero.
    volume = driver.growth.sum(-1).exp()
    assert torch.allclose(volume, torch.linalg.det(exact).abs(), rtol=1e-10, atol=1e-12)


def test_linear_flow_has_the_eigenvalues_and_eigenvectors_of_its_matrix():
    """The step of RK4 on y' = A y is P(hA), so the exponents are log P(h a) / h. Covariant vectors
    are the eigenvectors, and not the orthonormal ones: those are at right angles.
    """
    h = 0.5
    A = MODES @ torch.diag(RATES) @ torch.linalg.inv(MODES)
    dynamics = ODE(Matrix(A))
    # Directions align as exp(-0.6 t), which is 1e-11 after 42.
    spectrum = lyapunov_spectrum(
        dynamics,
        dynamics.init([1.0, 2.0, 3.0]),
        torch.linspace(0, 88, 45),
        solver=RungeKutta("rk4", h),
        burn_in=42.0,
        vectors=True,
    )
    z = h * RATES
    exact = torch.log(1 + z + z**2 / 2 + z**3 / 6 + z**4 / 24) / h
    assert torch.allclose(spectrum.exponents, exact, rtol=0, atol=1e-10)
    assert float(spectrum.stderr.max()) < 1e-10
    columns = MODES / MODES.norm(dim=0)
    assert spectrum.vectors is not None
    assert spectrum.vector_times.tolist() == [42.0, 44.0, 46.0]
    assert spectrum.vectors.shape == (3, 3, 3)
    alignment = (spectrum.vectors * columns).sum(-2).abs()
    assert torch.allclose(alignment, torch.ones_like(alignment), rtol=0, atol=1e-12)


def test_sum_of_exponents_is_the_divergence():
    """The divergence of the Lorenz equations is -(sigma + 1 + beta), and RK4's is off by h^4: the
    error falls by 16 when h is halved.
    """
    errors = []
    for h in (0.02, 0.01):
        dynamics, y = lorenz()
        spectrum = lyapunov_spectrum(
            dynamics, dynamics.init(y), [0.0, 1.0], solver=RungeKutta("rk4", h)
        )
        errors.append(float(spectrum.exponents.sum()) + 10 + 1 + 8 / 3)
    assert 12 < errors[0] / errors[1] < 20
    assert abs(errors[1]) < 2e-2


def test_exponents_of_a_symplectic_step_come_in_pairs():
    """Orthonormalisation keeps a symplectic basis (q_1 .. q_n, p_n .. p_1) symplectic up to signs,
    so that its exponents are pairs at every time, to rounding.
    """
    dynamics = adjsim.Hamiltonian(HenonHeiles())
    state = dynamics.init([[[0.0], [-0.15]]], [[[0.46], [0.1]]])
    basis = torch.eye(4)[:, [0, 1, 3, 2]].expand(1, 4, 4)
    driver = drive(dynamics, state, 150, adjsim.VelocityVerlet(0.2), basis)
    growth = driver.growth[0]
    assert float(growth[0]) > 0.5
    assert torch.allclose(growth + growth.flip(0), torch.zeros(4), rtol=0, atol=1e-10)


def test_conserved_energy_gives_two_zeros():
    """The direction of the flow and the gradient of the energy grow at most linearly, so their
    exponents fall as log(T)/T.
    """
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(k=1.0))
    duration = 30.0
    spectrum = lyapunov_spectrum(
        dynamics,
        dynamics.init([[1.0]], [[0.0]]),
        [0.0, duration],
        solver=adjsim.VelocityVerlet(0.2),
    )
    assert float(spectrum.exponents.abs().max()) < math.log(duration) / duration
    assert float(spectrum.exponents.sum().abs()) < 1e-12


def test_langevin_oscillator_has_the_eigenvalues_of_its_step():
    """The map of a step is affine, so its exponents are half the logarithm of the determinant of a
    complex pair, whatever the noise: -friction/2 each for BAOAB.
    """
    dynamics = adjsim.Langevin(adjsim.Harmonic(k=4.0), friction=1.0)
    spectrum = lyapunov_spectrum(
        dynamics,
        dynamics.init([[[1.0]]] * 3, generator=1),
        torch.linspace(0, 40, 41),
        solver=adjsim.BAOAB(0.1),
        generator=2,
    )
    assert torch.allclose(spectrum.exponents.sum(-1), torch.tensor(-1.0), rtol=0, atol=1e-12)
    # A pair rotates, so each alone is off by a bounded growth over the time.
    assert torch.allclose(spectrum.exponents, torch.full((3, 2), -0.5), rtol=0, atol=1.0 / 40)


@pytest.mark.slow
def test_covariant_vectors_are_mapped_to_each_other_and_hold_the_flow():
    """The Jacobian of a run maps each vector to a multiple of itself later, and the neutral vector
    is the right-hand side, which the flow carries along itself.
    """
    dynamics, y = lorenz((2,))
    solver = RungeKutta("rk4", 0.02)
    spectrum = lyapunov_spectrum(
        dynamics,
        dynamics.init(y),
        torch.linspace(0, 10, 51),
        solver=solver,
        burn_in=4.0,
        vectors=True,
    )
    V, states = spectrum.vectors, detached(spectrum.states)
    assert V.shape == (11, 2, 3, 3)
    assert states.y.shape == (11, 2, 3)
    mapped = jacobian(dynamics, type(states)(states.y[4]), 10, solver) @ V[4]
    growth = mapped.norm(dim=-2)
    assert torch.allclose(mapped / growth.unsqueeze(-2), V[5], rtol=0, atol=1e-9)
    assert bool((growth[:, 2] < 0.2).all())
    f = dynamics.drift(0.0, states).y.detach()
    sines = torch.linalg.cross(V[..., 1], f / f.norm(dim=-1, keepdim=True)).norm(dim=-1)
    # The recursion began at the end with another vector, and forgets it backward as the first two
    # directions grow apart forward, of which the rates know the growth.
    apart = 0.2 * (spectrum.rates[..., 0] - spectrum.rates[..., 1])
    left = torch.exp(-apart.flip(0).cumsum(0).flip(0))[:11]
    assert float((sines / left).max()) < 10
    assert float(left[0].max()) < 0.01
    assert float(sines[0].max()) < 0.01


def test_batch_equals_its_systems_one_by_one():
    dynamics, y = lorenz((3,))
    solver, ts = RungeKutta("rk4", 0.02), torch.linspace(0, 1, 6)
    whole = lyapunov_spectrum(dynamics, dynamics.init(y), ts, solver=solver, count=2)
    assert whole.exponents.shape == whole.stderr.shape == (3, 2)
    assert whole.rates.shape == (5, 3, 2)
    for i in range(3):
        one = lyapunov_spectrum(dynamics, dynamics.init(y[i]), ts, solver=solver, count=2)
        assert torch.allclose(one.exponents, whole.exponents[i], rtol=0, atol=1e-11)
        assert torch.allclose(one.stderr, whole.stderr[i], rtol=1e-9)


def test_results_have_the_dtype_of_the_state():
    dynamics, y = lorenz()
    single = dynamics.float().init(y.float())
    found = lyapunov_spectrum(
        dynamics, single, [0.0, 0.1, 0.2], solver=RungeKutta("rk4", 0.02), vectors=True
    )
    for x in (found.exponents, found.rates, found.stderr, found.vectors, found.dimension):
        assert x.dtype == torch.float32


def test_a_direction_that_each_step_destroys():
    """ESH keeps its direction at unit length: one exponent is the logarithm of rounding."""
    dynamics, state, solver = matter("esh", "EAE")
    found = lyapunov_spectrum(dynamics, state, [0.0, 0.02, 0.04], solver=solver)
    assert bool((found.exponents[:, -1] < math.log(1e-12) / solver.dt).all())
    assert bool(torch.isfinite(found.exponents[:, :-1]).all())
    assert "17 of 17" in str(found)


def test_dimension_and_entropy():
    """By hand: 2 + (0.9 + 0)/14.5, and 0.9; a Hamiltonian system fills its space."""
    three = torch.tensor([[0.9, 0.0, -14.5], [1.0, 0.5, -1.5], [-1.0, -2.0, -3.0]])
    rates, times = three.expand(4, 3, 3), torch.arange(5.0)
    found = LyapunovSpectrum(three, rates, times, 3)
    assert torch.allclose(found.dimension, torch.tensor([2 + 0.9 / 14.5, 3.0, 0.0]))
    assert torch.allclose(found.entropy, torch.tensor([0.9, 1.5, 0.0]))
    some = LyapunovSpectrum(three, rates, times, 4)
    assert torch.isnan(some.dimension).tolist() == [False, True, False]
    assert not bool(torch.isnan(some.entropy).any())
    assert torch.isnan(LyapunovSpectrum(three[1, :2], rates[:, 1, :2], times, 4).entropy)


def test_standard_errors():
    """Independent intervals: the spread over the root of their number. One interval has none."""
    generator = torch.Generator().manual_seed(1)
    rates = torch.randn(400, 1, generator=generator, dtype=torch.float64)
    times = torch.arange(401.0)
    found = LyapunovSpectrum(rates.mean(0), rates, times, 1)
    # White noise, whose autocorrelation time is found to be 1 up to some tenths.
    assert 0.9 < float(found.stderr) * 400**0.5 / float(rates.std()) < 1.4
    one = LyapunovSpectrum(rates[0], rates[:1], times[:2], 1)
    assert bool(torch.isnan(one.stderr).all())
    assert "+-" not in str(one)
    systems = LyapunovSpectrum(rates[:16], rates[:16].expand(2, 16, 1), times[:3], 1)
    assert float(systems.mean[1]) == pytest.approx(float(rates[:16].std()) / 4)


def test_prints_exponents_with_errors():
    dynamics, y = lorenz((2,))
    ts = torch.linspace(0, 2, 11)
    solver = RungeKutta("rk4", 0.02)
    text = str(lyapunov_spectrum(dynamics, dynamics.init(y), ts, solver=solver, burn_in=1.0))
    assert text.startswith("3 of 3 Lyapunov exponents, t = 1 to 2, 2 systems\n")
    assert text.count("+-") == 3
    assert "Kaplan-Yorke dimension 2." in text
    short = str(lyapunov_spectrum(dynamics, dynamics.init(y[0]), ts, solver=solver, count=1))
    assert short.startswith("1 of 3 Lyapunov exponents, t = 0 to 2, 1 system\n")
    assert "needs more exponents" in short


def test_refusals():
    dynamics, y = lorenz()
    state, rk4, ts = dynamics.init(y), RungeKutta("rk4", 0.1), [0.0, 0.5, 1.0]

    def run(solver=rk4, times=ts, start=state, physics=dynamics, **options):
        return lyapunov_spectrum(physics, start, times, solver=solver, **options)

    with pytest.raises(ValueError, match="count must be from 1 to 3, the numbers in y"):
        run(count=4)
    with pytest.raises(ValueError, match="got 0"):
        run(count=0)
    with pytest.raises(ValueError, match="leaves no interval of save times of a run of 1;"):
        run(burn_in=1.0)
    with pytest.raises(ValueError, match="left out at both ends, leaves no save time"):
        run(burn_in=0.7, vectors=True)
    with pytest.raises(ValueError, match="zero or a positive time"):
        run(burn_in=-1.0)
    with pytest.raises(ValueError, match="at least one save time"):
        run(times=[0.0])
    with pytest.raises(ValueError, match="not an integer number of steps"):
        run(times=[0.0, 0.55])
    with pytest.raises(TypeError, match="fixed steps"):
        run(solver=adjsim.ODESolver())
    with pytest.raises(TypeError, match="second copy"):
        run(solver=Coupled("rk4", 0.1, rate=20.0))
    with pytest.raises(TypeError, match="leave exact out"):
        run(solver=Coupled("rk4", 0.1, rate=20.0, exact=True))
    with pytest.raises(FloatingPointError, match="in step"):
        run(solver=RungeKutta("euler", 1.0), times=[0.0, 30.0])
    oscillator = adjsim.Hamiltonian(adjsim.Harmonic())
    start = oscillator.init([[1.0]], [[0.0]])
    with pytest.raises(TypeError, match="implicit"):
        run(physics=oscillator, start=start, solver=adjsim.ImplicitMidpoint(0.1))
    # Euler's step multiplies the first direction by 1001, so 50 steps by exp(345).
    steep, euler = ODE(Matrix(torch.diag(torch.tensor([1e3, 1.0])))), RungeKutta("euler", 1.0)
    start = steep.init([0.0, 1.0])
    with pytest.raises(ValueError, match=r"exp\(345\) .* t = 50, .* closer together"):
        run(physics=steep, start=start, solver=euler, times=[0.0, 50.0], vectors=True)


def test_refuses_dynamics_that_are_not_for_a_further_batch_axis():
    def turned(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([-y[:, 1], y[:, 0]], 1)

    dynamics = ODE(turned)
    # Two replicas of two numbers: the shapes agree, and the numbers do not.
    state = dynamics.init([[1.0, 0.0], [0.3, 0.5]])
    with pytest.raises(ValueError, match=r"y\[\.\.\., 0\]"):
        lyapunov_spectrum(dynamics, state, [0.0, 1.0], solver=RungeKutta("rk4", 0.1))


def attractor(dynamics, y: Tensor, solver, duration: float):
    with torch.no_grad():
        return adjsim.simulate(
            dynamics, dynamics.init(y), [0.0, duration], solver=solver, compile=True
        ).final


@pytest.mark.marathon
def test_lorenz_has_the_known_exponents():
    """0.9056, 0, -14.5723 (Sprott 2003), and the dimension 2.062."""
    dynamics, y = lorenz((1000,))
    # At 0.02 the error of RK4 is as large as the sampling error.
    solver = RungeKutta("rk4", 0.01)
    start = attractor(dynamics, y, solver, 20.0)
    spectrum = lyapunov_spectrum(
        dynamics, start, torch.linspace(0, 10, 11), solver=solver, burn_in=4.0
    )
    means, errors = spectrum.mean
    assert float(errors.max()) < 0.01
    exact = torch.tensor([0.9056, 0.0, -14.5723])
    assert bool(((means - exact).abs() < 4 * errors).all())
    assert float(spectrum.dimension.mean()) == pytest.approx(2.062, abs=0.002)


@pytest.mark.marathon
def test_lorenz_96_has_the_known_exponents():
    """13 positive exponents, from 1.66 to 0.03, then 0 and -0.10 (40 variables, F = 8)."""
    dynamics, solver = ODE(Lorenz96()), RungeKutta("rk4", 0.02)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(32, 40, generator=generator, dtype=torch.float64)
    start = attractor(dynamics, 8 + drawn, solver, 20.0)
    spectrum = lyapunov_spectrum(
        dynamics, start, torch.linspace(0, 120, 121), solver=solver, burn_in=20.0, count=30
    )
    means, errors = spectrum.mean
    assert float(errors.max()) < 0.02
    for i, known in ((0, 1.66), (12, 0.03), (13, 0.0), (14, -0.10)):
        # The figures are known to two digits.
        assert abs(float(means[i]) - known) < 0.005 + 4 * float(errors[i])
    assert bool((means[:13] > 4 * errors[:13]).all())
    assert bool((means[14:] < -4 * errors[14:]).all())
