"""An exact run stays a faithful discretisation: temperature, averages, energy and the chain's
invariant.
"""

from __future__ import annotations

import math

import pytest
import torch

import adjsim
from adjsim import ReversibleAdjoint, Splitting
from adjsim.io.systems import cluster
from tests.statistics.test_moments import covariance, generalised, langevin
from tests.statistics.test_sampling import chain_average, within as replicas_within
from tests.statistics.test_stochastic import boltzmann, series, within


class Fractions(Splitting):
    """A plain splitting whose factors are the fractions that the exact one uses."""

    def coefficients(self, dynamics, state):
        found = super().coefficients(dynamics, state)
        lattice = Splitting(self.scheme, self.dt, exact=True).plan(dynamics, state, 0.0).lattice
        rational = lattice.rationals(found)
        for letter, group in found.items():
            for name in group:
                if f"{name} n" in rational[letter]:
                    group[name] = rational[letter][f"{name} n"] / rational[letter][f"{name} d"]
        return found


@pytest.mark.parametrize("friction", [1e-3, 0.1, 1.0, 10.0])
def test_the_fraction_keeps_the_temperature(friction):
    """kT to 1e-7 by the Lyapunov equation, whatever the friction: the fraction is near in terms of
    1 - c.
    """
    for scheme in ("BAOAB", "OBABO"):
        plain, mine = (
            covariance(langevin(1.6, 0.7, 1.3, friction), kind(scheme, 0.05))
            for kind in (Splitting, Fractions)
        )
        assert mine[0, 0] == pytest.approx(plain[0, 0], rel=2e-7)
        assert mine[1, 1] == pytest.approx(plain[1, 1], rel=2e-7)


@pytest.mark.parametrize("dt", [0.01, 0.1])
def test_the_fractions_of_a_bath_keep_the_temperature(dt):
    for scheme in ("BAGAB", "GBABG"):
        plain, mine = (
            covariance(generalised(1.6, 0.7, 1.3), kind(scheme, dt))
            for kind in (Splitting, Fractions)
        )
        assert mine[0, 0] == pytest.approx(plain[0, 0], rel=2e-6)
        assert mine[1, 1] == pytest.approx(plain[1, 1], rel=2e-6)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("BAOAB", marks=pytest.mark.slow),
        pytest.param("BAGAB", marks=pytest.mark.marathon),
    ],
)
def test_averages_of_a_double_well(name):
    """<q^2>, <q^4> by quadrature, and <p^2>, within four standard errors."""
    dt, kT, mass = 0.05, 0.6, 1.4
    well = adjsim.DoubleWell(1.0)
    dynamics = {
        "BAOAB": adjsim.Langevin(well, mass, kT, 1.0),
        "BAGAB": adjsim.GeneralizedLangevin(well, mass, kT, (1.0, 4.0), (1.0, 8.0)),
    }[name]

    def observe(state):
        q, p = state.position[..., 0, 0], state.momentum[..., 0, 0]
        return torch.stack([q**2, q**4, p**2], -1)

    found = series(
        dynamics,
        Splitting(name, dt, exact=True),
        torch.ones(256, 1, 1),
        250.0,
        0.5,
        observe,
        25.0,
        compile=True,
    )
    for i, power in enumerate((2, 4)):
        exact = boltzmann(lambda x: (x * x - 1) ** 2, kT, power)
        within(found[..., i], exact, exact)
    # The scheme's own error in <p^2>, with the curvature of the wells.
    within(found[..., 2], mass * kT, mass * kT, bias=mass * kT * 8 / mass * dt**2 / 4)


@pytest.mark.marathon
def test_a_chain_keeps_its_temperature():
    kT, k, mass, dt = 0.7, 1.5, 2.0, 0.05
    dynamics = adjsim.NoseHooverChain(adjsim.Harmonic(k), mass, kT, tau=0.8, length=3)
    position = torch.randn(256, 1, 1, generator=torch.Generator().manual_seed(1))

    def moments(state):
        return torch.stack([state.position**2, state.momentum**2 / mass], -1).flatten(1)

    samples = chain_average(dynamics, position, moments, 8000, dt, 20.0, exact=True)
    replicas_within(samples[:, 0], kT / k, bias=kT / k * (k / mass) * dt**2 / 4)
    replicas_within(samples[:, 1], kT, bias=kT * (k / mass) * dt**2 / 4)


def errors_of_invariant(dynamics, start, scheme, dt, steps):
    """The invariant less its start, at every 20th step, in floating point and exactly."""
    times = torch.arange(0, steps + 1, 20) * dt
    with torch.no_grad():
        runs = [
            adjsim.simulate(
                dynamics,
                start,
                times,
                solver=Splitting(scheme, dt, exact=exact),
                adjoint=ReversibleAdjoint(),
                record=dynamics.invariant,
                compile=True,
            ).record
            for exact in (False, True)
        ]
    return [run - run[0] for run in runs]


def hot(dynamics):
    momentum = math.sqrt(0.25) * torch.randn(13, 3, generator=torch.Generator().manual_seed(3))
    return dynamics.init(cluster().position, momentum - momentum.mean(0))


@pytest.mark.marathon
def test_energy_is_kept_as_in_floating_point():
    """20,000 steps of thirteen atoms: no drift, and the swings of the step."""
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones())
    plain, exact = errors_of_invariant(dynamics, hot(dynamics), "BAB", 0.004, 20_000)
    assert float(exact.std()) < 1.2 * float(plain.std())
    halves = exact.chunk(2)
    assert abs(float(halves[1].mean() - halves[0].mean())) < 0.5 * float(exact.std())


@pytest.mark.marathon
def test_the_invariant_of_a_chain_walks_within_its_bound():
    """Each of two scales of momenta a step errs by a factor uniform within 2^-23 and by 2^22 units;
    both walk at random.
    """
    kT, dt, steps = 0.25, 0.002, 10_000
    dynamics = adjsim.NoseHooverChain(adjsim.LennardJones(), 1.0, kT, 0.3)
    start = hot(dynamics)
    plain, exact = errors_of_invariant(dynamics, start, "NBABN", dt, steps)
    kinetic = 39 * kT / 2
    lattice = Splitting("NBABN", dt, exact=True).plan(dynamics, start, 0.0).lattice
    roughness = 2**22 * float(lattice.roundings["momentum"].spacing) / math.sqrt(6)
    walk = math.sqrt(2 * steps) * (
        2 * kinetic * 2**-23 / math.sqrt(3) + math.sqrt(2 * kinetic) * roughness
    )
    assert float(exact.abs().max()) < float(plain.abs().max()) + 4 * walk
    assert 4 * walk < 1e-3 * kinetic
