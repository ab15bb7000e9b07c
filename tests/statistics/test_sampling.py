"""What the thermostats sample, against exact averages."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import quad

import adjsim
from adjsim import ReversibleAdjoint, Splitting, TimeAverage
from adjsim.observables import autocorrelation_time, mean_with_error

MASSES = [
    pytest.param(1.0, marks=pytest.mark.marathon),
    pytest.param(2.0, marks=pytest.mark.slow),
]


def within(samples: torch.Tensor, exact: float, bias: float = 0.0) -> None:
    """Independent replicas' averages agree with the exact value to four standard errors (and the
    integrator's bias).
    """
    mean = float(samples.mean())
    stderr = float(samples.std()) / math.sqrt(samples.numel())
    assert stderr < 0.05 * abs(exact), "too few samples to tell"
    assert abs(mean - exact) < 4 * stderr + bias, (mean, exact, stderr)


def chain_average(dynamics, position, function, steps, dt, burn_in, exact=False):
    start = dynamics.init(position, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, steps * dt],
            solver=Splitting("NBABN", dt, exact=exact),
            adjoint=ReversibleAdjoint(),
            record=TimeAverage(function, burn_in),
            compile=True,
        )
    return run.record


@pytest.mark.parametrize("mass", MASSES)
def test_chain_on_one_harmonic_oscillator(mass):
    """Ergodic with three links: <q^2> = kT/k and <p^2/m> = kT, at mass 2 as at mass 1."""
    kT, k, dt = 0.7, 1.5, 0.05
    dynamics = adjsim.NoseHooverChain(adjsim.Harmonic(k), mass, kT, tau=0.8, length=3)

    def moments(state):
        return torch.stack([state.position**2, state.momentum**2 / mass], -1).flatten(1)

    position = torch.randn(256, 1, 1, generator=torch.Generator().manual_seed(1))
    samples = chain_average(dynamics, position, moments, 8000, dt, 20.0)
    # Velocity Verlet's own error in <q^2> is (omega dt)^2 / 4 of it.
    within(samples[:, 0], kT / k, bias=kT / k * (k / mass) * dt**2 / 4)
    within(samples[:, 1], kT, bias=kT * (k / mass) * dt**2 / 4)


@pytest.mark.parametrize("mass", MASSES)
def test_chain_keeps_the_temperature_of_bound_atoms(mass):
    """Eight atoms in three dimensions: the kinetic temperature is kT whatever the mass; one
    thermostat a system.
    """
    kT = 0.4
    dynamics = adjsim.NoseHooverChain(adjsim.Harmonic(2.0), mass, kT, tau=0.5)
    generator = torch.Generator().manual_seed(2)
    position = torch.randn(32, 8, 3, generator=generator) * math.sqrt(kT / 2.0)

    def temperature(state):
        return adjsim.kinetic_temperature(state.momentum, mass)

    samples = chain_average(dynamics, position, temperature, 3000, 0.05, 10.0)
    within(samples, kT, bias=kT * (2.0 / mass) * 0.05**2 / 4)


@pytest.mark.slow
def test_esh_weights_make_time_averages_canonical():
    """Three double wells in the plane: <q^2> at kT = 1, by quadrature; weighted by speed it is
    right, unweighted not.
    """

    def boltzmann(x):
        return math.exp(-((x * x - 1) ** 2))

    exact = quad(lambda x: x * x * boltzmann(x), -6, 6)[0] / quad(boltzmann, -6, 6)[0]
    assert exact == pytest.approx(0.832745487128, abs=1e-11)
    dynamics = adjsim.ESH(adjsim.DoubleWell(1.0))
    generator = torch.Generator().manual_seed(4)
    start = dynamics.init(torch.randn(256, 3, 2, generator=generator), generator=generator)
    times = torch.arange(0, 8001, 4) * 0.1
    with torch.no_grad():
        run = adjsim.simulate(dynamics, start, times, solver=Splitting("EAE", 0.1), compile=True)
    kept = slice(200, None)
    weights = adjsim.dynamics.canonical_weights(run.log_speed[kept])
    square = run.position[kept].square().mean((-1, -2))
    samples = (weights * square).sum(0)
    within(samples, exact, bias=0.002)  # the step's own error, measured to fall as dt^2
    plain = square.mean(0)
    # It is off by 9 or 10 errors, since a chaotic run depends on the bits of the machine.
    assert abs(float(plain.mean()) - exact) > 5 * float(plain.std()) / 16


def test_errors_of_a_correlated_series_are_right():
    """An autoregressive series with known autocorrelation time (1 + a) / (1 - a)."""
    a, n = 0.9, 200_000
    noise = torch.randn(n, generator=torch.Generator().manual_seed(3)).tolist()
    x, series = 0.0, []
    for xi in noise:
        x = a * x + math.sqrt(1 - a * a) * xi
        series.append(x)
    series = torch.tensor(series)
    assert autocorrelation_time(series) == pytest.approx(
        19.0, rel=0.1
    )  # its own error is about tau sqrt(2 window tau / n)
    mean = mean_with_error(series)
    assert mean.ess == pytest.approx(n / 19.0, rel=0.1)
    assert abs(mean.value) < 4 * mean.stderr
    assert autocorrelation_time(torch.randn(10_000)) == pytest.approx(1.0, abs=0.1)
    # Squares of these overflow, or vanish.
    for scale in (1e200, 1e-200):
        scaled = mean_with_error(scale * series.double())
        assert scaled.ess == pytest.approx(mean.ess, rel=1e-4)
        assert scaled.stderr == pytest.approx(scale * mean.stderr, rel=1e-4)
        several = mean_with_error(scale * series.double().reshape(-1, 4))
        assert several.stderr == pytest.approx(
            scale * mean_with_error(series.reshape(-1, 4)).stderr, rel=1e-4
        )
