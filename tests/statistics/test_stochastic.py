"""What stochastic dynamics sample, against quadrature; errors corrected for autocorrelation, or
from independent replicas.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import quad

import adjsim
from adjsim import SDESolver, Splitting
from adjsim.observables import mean_with_error
from tests.problems import STOCHASTIC, STOCHASTIC_SCHEMES, slow_but, start as start_of

REPLICAS = 256
LANGEVIN = {"mass": 1.6, "kT": 0.7, "friction": 1.2}


def series(dynamics, solver, position, time, every, observe, burn_in, seed=1, compile=False):
    """Values of an observable every so often after burn-in, ``(time, replicas)``."""
    momentum = torch.zeros_like(position)
    frames = torch.arange(round(time / every) + 1) * every
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics,
            start_of(dynamics, position, momentum),
            frames,
            solver=solver,
            record=observe,
            generator=torch.Generator().manual_seed(seed),
            compile=compile,
        )
    return run.record[round(burn_in / every) :]


def within(values, exact, scale, bias=0.0):
    """Four standard errors, from the spread of independent replicas, and the scheme's own bias
    where it has one.
    """
    mean = mean_with_error(values)
    assert mean.ess > 100
    assert abs(mean.value - exact) < 4 * mean.stderr + bias, (mean, exact)
    # A test that cannot fail is none: the error is a small part of what the observable spans.
    assert mean.stderr < 0.05 * scale, mean


def boltzmann(energy, kT, power):
    weight = [quad(lambda x, n=n: x**n * math.exp(-energy(x) / kT), -4, 4)[0] for n in (0, power)]
    return weight[1] / weight[0]


# The moments of a harmonic oscillator are exact for every scheme (test_moments): here a symmetric
# scheme of each dynamics, and those of first order, are enough for CI.
FEW = ("BAOAB", "BAO", "BAGAB", "EulerMaruyama", "LeimkuhlerMatthews")
WORDS = slow_but(
    lambda name, scheme: False,
    [
        (name, scheme)
        for name, words in STOCHASTIC_SCHEMES.items()
        for scheme in words
        if name not in ("langevin-atoms", "generalised-1")  # of the same terms as others
    ],
    marathon=lambda name, scheme: scheme not in FEW,
)


def solver_of(scheme, dt):
    named = {"EulerMaruyama": adjsim.EulerMaruyama, "LeimkuhlerMatthews": adjsim.LeimkuhlerMatthews}
    return named[scheme](dt) if scheme in named else Splitting(scheme, dt)


def first_order(scheme):
    return scheme in ("EulerMaruyama", "BAO")


@pytest.mark.parametrize(("name", "scheme"), WORDS)
def test_double_well_and_moments(name, scheme):
    """<q>, <q^2>, <q^4> of a double well, and <p>, <p^2>, against quadrature."""
    barrier, dt = 1.0, 0.05 if name != "overdamped" else 0.02
    dynamics = STOCHASTIC[name](adjsim.DoubleWell(barrier))
    mass, kT = torch.as_tensor(getattr(dynamics, "mass", 1.0)).detach().mean().item(), 0.6
    # One atom of each mass the dynamics knows, all replicas of one another where masses do not
    # matter.
    atoms = dynamics.mass.numel() if name != "overdamped" else 1

    def observe(state):
        q = state.position[..., 0, 0]
        values = [q, q**2, q**4]
        if name != "overdamped":
            p = state.momentum[..., 0, 0]
            values += [p, p**2]
        return torch.stack(values, -1)

    start = torch.ones(REPLICAS, atoms, 1)
    start[::2] = -1.0
    values = series(dynamics, solver_of(scheme, dt), start, 120.0, 0.2, observe, 20.0, compile=True)
    first = (
        mass
        if name == "langevin"
        else float(dynamics.mass.reshape(-1)[0])
        if name != "overdamped"
        else 1.0
    )
    exact = [
        0.0,
        *(boltzmann(lambda x: barrier * (x * x - 1) ** 2, kT, n) for n in (2, 4)),
        0.0,
        first * kT,
    ]
    scale = [exact[1] ** 0.5, *exact[1:3], exact[4] ** 0.5, exact[4]]
    for i in range(values.shape[-1]):
        # Bias of the scheme at this step, measured at half the step by the order tests: 2 % for
        # first order, 0.5 % for second.
        bias = (0.04 if first_order(scheme) else 0.006) * abs(exact[i])
        within(values[..., i], exact[i], scale[i], bias)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        pytest.param("langevin", "BAOAB", marks=pytest.mark.marathon),
        pytest.param("generalised-2", "BAGAB", marks=pytest.mark.marathon),
        pytest.param("overdamped", "LeimkuhlerMatthews", marks=pytest.mark.marathon),
    ],
)
def test_muller_brown_basin(name, scheme):
    """<x>, <y> and <U> of the whole surface at kT = 30, where basins mix, by quadrature. The bias
    of dt is below the errors.
    """
    kT = 30.0
    potential = adjsim.MullerBrown()
    dynamics = {
        "langevin": lambda: adjsim.Langevin(potential, kT=kT, friction=10.0),
        "generalised-2": lambda: adjsim.GeneralizedLangevin(
            potential, kT=kT, rates=(5.0, 50.0), strengths=(25.0, 250.0)
        ),
        "overdamped": lambda: adjsim.OverdampedLangevin(potential, kT=kT, friction=1.0),
    }[name]()
    dt, time, every = (0.0005, 10.0, 0.02) if name != "overdamped" else (5e-5, 0.8, 0.002)
    start = torch.tensor([[-0.5582, 1.4417]]).repeat(REPLICAS, 1, 1)
    start[::2] = torch.tensor([[0.6235, 0.0280]])

    def observe(state):
        return torch.cat([state.position[..., 0, :], potential(state.position).unsqueeze(-1)], -1)

    solver, burn_in = solver_of(scheme, dt), time / 2
    values = series(dynamics, solver, start, time, every, observe, burn_in, compile=True)

    # The trapezoidal rule, whose error falls exponentially for such a function.
    grid = torch.cartesian_prod(torch.linspace(-2.5, 2.0, 901), torch.linspace(-1.2, 3.0, 841))
    energy = potential(grid.unsqueeze(-2))
    weight = torch.softmax(-energy / kT, 0)
    for i, f in enumerate((*grid.unbind(-1), energy)):
        exact = float((f * weight).sum())
        mean = mean_with_error(values[..., i])
        assert abs(mean.value - exact) < 4 * mean.stderr, (i, mean, exact)
        assert mean.stderr < (0.05, 0.05, 3.0)[i], mean


SDE_ROWS = [
    pytest.param(
        name,
        method,
        marks=(
            pytest.mark.marathon
            if method == "srk"
            or method == "heun"
            or (method == "midpoint" and name != "overdamped")
            or (method == "euler" and name != "langevin")
            else pytest.mark.slow
        ),
    )
    for name in ("langevin", "generalised-2", "overdamped")
    for method in ("midpoint", "heun", "srk", "euler")
]


@pytest.mark.parametrize(("name", "method"), SDE_ROWS)
def test_sde_solvers_sample_too(method, name):
    """Moments of the double well by every kind of SDE method, to its own bias at this step."""
    dynamics = STOCHASTIC[name](adjsim.DoubleWell(1.0))
    atoms = dynamics.mass.numel() if name != "overdamped" else 1
    start = torch.ones(REPLICAS, atoms, 1)
    start[::2] = -1.0
    values = series(
        dynamics,
        # The stages of srk make it the slowest, and it is the most accurate.
        SDESolver(method, dt=0.04 if method == "srk" else 0.02),
        start,
        45.0,
        0.2,
        lambda s: torch.stack([s.position[..., 0, 0], s.position[..., 0, 0] ** 2], -1),
        10.0,
    )
    exact = boltzmann(lambda x: (x * x - 1) ** 2, 0.6, 2)
    within(values[..., 0], 0.0, exact**0.5)
    within(values[..., 1], exact, exact, (0.05 if method == "euler" else 0.01) * exact)


def test_velocity_autocorrelation_of_the_generalised_bath():
    """A free particle in a bath of one exponential: <p(t) p(0)> = m kT e^{-rt/2} (cos wt + r sin wt
    / 2w), w^2 = s - r^2/4.
    """
    rate, strength, mass, kT = 1.0, 4.0, 1.7, 0.6
    dynamics = adjsim.GeneralizedLangevin(adjsim.Harmonic(1e-9), mass, kT, (rate,), (strength,))
    start = dynamics.init(torch.zeros(4096, 1, 1), generator=torch.Generator().manual_seed(2))
    frames = torch.arange(16) * 0.2
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics,
            start,
            frames,
            solver=Splitting("BAGAB", 0.1),
            generator=torch.Generator().manual_seed(3),
        )
    products = (run.momentum * run.momentum[0])[..., 0, 0]
    w = math.sqrt(strength - rate**2 / 4)
    exact = (
        mass
        * kT
        * torch.exp(-rate * frames / 2)
        * (torch.cos(w * frames) + rate / (2 * w) * torch.sin(w * frames))
    )
    error = products.std(1) / products.shape[1] ** 0.5
    assert bool(((products.mean(1) - exact).abs() < 4 * error).all())


def test_drawn_bath_is_at_equilibrium():
    """Means of p^2 and z^2 stay m kT from the first frame on."""
    dynamics = adjsim.GeneralizedLangevin(adjsim.Harmonic(1.0), 1.7, 0.6, (1.0, 4.0), (1.0, 8.0))
    start = dynamics.init(torch.zeros(8192, 1, 1), generator=torch.Generator().manual_seed(2))
    for field in (start.momentum, start.memory):
        square = field.square().flatten(1)
        error = square.std(0) / square.shape[0] ** 0.5
        assert bool(((square.mean(0) - 1.7 * 0.6).abs() < 4 * error).all())
    correlation = (start.momentum * start.memory[:, 0]).mean() / (1.7 * 0.6)
    assert abs(float(correlation)) < 4 / 8192**0.5
