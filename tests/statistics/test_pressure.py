"""What pistons sample: the ideal gas exactly, and NIST's liquid."""

from __future__ import annotations

import math

import pytest
import torch

import adjsim
from adjsim.observables import mean_with_error
from adjsim.potentials import tail_corrections
from tests.pressure import position
from tests.problems import parameter

P, KT = 2.0, 0.6


BOX = [1.4, 1.5, 1.6]
TILTED = [[1.4, 0.0, 0.0], [0.3, 1.5, 0.0], [-0.2, 0.4, 1.6]]


def gas(axes="isotropic", replicas=256, seed=0, pressure=P, tail=False, box=BOX):
    """Eight atoms without forces: V has the density V^8 exp(-P V/kT), a gamma distribution."""
    potential = adjsim.LennardJones(epsilon=0.0, cutoff=1e-12, box=box)
    dynamics = adjsim.LangevinPiston(
        potential,
        1.3,
        KT,
        2.0,
        parameter(pressure),
        0.3,
        axes=axes,
        piston_friction=4.0,
        tail=tail,
    )
    return dynamics, dynamics.init(position((replicas,)), generator=seed)


@pytest.mark.parametrize(
    ("axes", "box"),
    [
        ("isotropic", BOX),
        pytest.param("each", BOX, marks=pytest.mark.slow),
        pytest.param("each", TILTED, marks=pytest.mark.marathon),
    ],
)
def test_the_volume_of_an_ideal_gas(axes, box):
    """Mean and spread of V, of its logarithm, and kinetic temperatures of atoms and piston."""
    dynamics, state = gas(axes, box=box)
    state = type(state)(*(x.detach() for x in state))
    # Decorrelation takes about a time of one: P V / kT starts at 11 and has the mean 9.
    ts = torch.arange(0.0, 40.1, 2.0)
    trajectory = adjsim.simulate(
        dynamics,
        state,
        ts,
        solver=adjsim.Splitting(dynamics.scheme, 0.02),
        generator=1,
        compile=True,
    )
    late = adjsim.PistonState(*(x[3:].detach() for x in (
        trajectory.position, trajectory.momentum, trajectory.strain, trajectory.strain_momentum
    )))  # fmt: skip
    x = (dynamics.volume(late) * P / KT).detach()
    twice = dynamics.piston.mass(late).detach()
    for found, expected in (
        (x, 9.0),
        ((x - 9) ** 2, 9.0),
        (torch.log(x), float(torch.digamma(torch.tensor(9.0, dtype=torch.float64)))),
        (adjsim.kinetic_temperature(late.momentum, 1.3), KT),
        ((late.strain_momentum**2 / twice).mean((-1, -2)), KT),
    ):
        # Replicas are independent, and so give the error of the mean over time and replicas.
        means = found.mean(0)
        error = float(means.std() / math.sqrt(len(means)))
        # The error of the steps is of order dt^2, 0.2 % at this dt.
        assert abs(float(means.mean()) - expected) < 4 * error + 2e-3 * abs(expected)
        assert error < 0.03 * abs(expected)


@pytest.mark.slow
def test_stiff_vibrations_do_not_change_the_pressure():
    """A gas of four diatomics with omega dt = 0.7: V has the density V^4 exp(-P V/kT).

    The kinetic energy at the ends of steps is 12 % too small for a vibration there. A piston that
    saw it would find 4.79 in place of 5.
    """
    mass, omega, dt = 1.3, 20.0, 1 / 28
    gas_of_atoms = adjsim.LennardJones(epsilon=0.0, cutoff=1e-12, box=[1.8] * 3)
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    bonds = adjsim.HarmonicBond(pairs, omega**2 * mass / 2, 1.0)
    dynamics = adjsim.LangevinPiston(
        gas_of_atoms + bonds, mass, KT, 2.0, P, 0.3, piston_friction=4.0
    )
    start = position((1024,))
    start[:, 1::2] = start[:, ::2] + torch.tensor([1.0, 0, 0], dtype=torch.float64)
    state = dynamics.init(start, generator=0)
    x = adjsim.simulate(
        dynamics,
        state,
        torch.arange(0.0, 61.0),
        solver=adjsim.Splitting(dynamics.scheme, dt),
        generator=1,
        compile=True,
        record=lambda s: dynamics.volume(s) * P / KT,
    ).record[10:]
    means = x.mean(0)
    error = float(means.std() / math.sqrt(len(means)))
    assert error < 0.02
    assert abs(float(means.mean()) - 5) < 3 * error


@pytest.mark.marathon
def test_the_derivative_of_the_volume_by_the_pressure():
    """By ScoreFunction and Reweighting: -(<V V> - <V>^2)/kT, here -9 kT/P^2."""
    dynamics, _ = gas(tail=True)

    def starts(replicas, generator):
        return gas(replicas=replicas)[1]

    simulation = adjsim.Simulation(
        dynamics,
        starts,
        torch.tensor([0.0, 30.0]),
        solver=adjsim.Splitting(dynamics.scheme, 0.03),
        compile=True,
    )
    found = adjsim.ScoreFunction(burn_in=6.0)(
        simulation,
        adjsim.TimeAverage(dynamics.volume, burn_in=6.0),
        replicas=256,
        generator=torch.Generator().manual_seed(2),
    )
    value, slope = 9 * KT / P, -9 * KT / P**2
    assert abs(float(found.value) - value) < 4 * float(found.value_stderr) + 2e-3 * value
    grad, error = float(found.grad["pressure"]), float(found.grad_stderr["pressure"])
    assert error < 0.1 * abs(slope)
    assert abs(grad - slope) < 4 * error + 4e-3 * abs(slope)


def liquid(pressure, density, replicas, axes="isotropic"):
    """256 Lennard-Jones atoms with cutoff 3 and tail corrections, melted at kT = 3."""
    cell = torch.tensor([[0.0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    places = (torch.cartesian_prod(*[torch.arange(4.0)] * 3)[:, None] + cell).reshape(-1, 3) / 4
    edge = (256 / density) ** (1 / 3)
    start = (places * edge).double().expand(replicas, 256, 3)
    potential = adjsim.LennardJones(cutoff=3.0, box=[edge] * 3)
    state = adjsim.Langevin(potential, 1.0, 3.0, 1.0).init(start, generator=0)
    for kT in (3.0, 0.85):
        melt = adjsim.Langevin(potential, 1.0, kT, 1.0)
        state = adjsim.simulate(
            melt, state, torch.tensor([0.0, 8.0]), solver=adjsim.BAOAB(0.004), generator=1,
            compile=True,
        ).final  # fmt: skip
    dynamics = adjsim.LangevinPiston(potential, 1.0, 0.85, 1.0, pressure, 1.0, axes=axes, tail=True)
    return dynamics, dynamics.init(state.position, generator=2)


@pytest.mark.marathon
@pytest.mark.parametrize(
    ("pressure", "density", "tolerance"), [(0.55355, 0.820, 0.004), (0.0067714, 0.776, 0.008)]
)
def test_the_density_of_nist(pressure, density, tolerance):
    """NIST's Monte Carlo at kT 0.85, and kinetic temperatures to 0.5 %."""
    replicas = 4
    dynamics, state = liquid(pressure, density, replicas)
    ts = torch.arange(0.0, 400.1, 0.2)
    found = adjsim.simulate(
        dynamics,
        state,
        ts,
        solver=adjsim.Splitting(dynamics.scheme, 0.004),
        generator=3,
        compile=True,
        record=lambda s: torch.stack(
            [256 / dynamics.volume(s), adjsim.kinetic_temperature(s.momentum)], -1
        ),
    ).record[100:]
    for column, expected, allowed in ((0, density, tolerance), (1, 0.85, 0.005 * 0.85)):
        means = [mean_with_error(found[:, r, column]) for r in range(replicas)]
        mean = sum(float(m.value) for m in means) / replicas
        error = math.sqrt(sum(float(m.stderr) ** 2 for m in means)) / replicas
        print(f"pressure {pressure}: {mean:.5f} +- {error:.5f} for {expected}")
        assert error < allowed / 2
        assert abs(mean - expected) < allowed


@pytest.mark.marathon
def test_compressibility_by_fluctuations_and_by_differences():
    """<dV^2>/(kT <V>) at 0.55355, against the volumes at 0.4 and 0.7."""
    volumes = {}
    for pressure in (0.4, 0.55355, 0.7):
        dynamics, state = liquid(pressure, 0.82, 4)
        volumes[pressure] = adjsim.simulate(
            dynamics, state, torch.arange(0.0, 400.1, 0.2), compile=True, generator=4,
            solver=adjsim.Splitting(dynamics.scheme, 0.004), record=dynamics.volume,
        ).record[100:]  # fmt: skip
    middle = volumes[0.55355]
    by_fluctuations = ((middle - middle.mean(0)) ** 2).mean() / (0.85 * middle.mean())
    means = {p: v.mean() for p, v in volumes.items()}
    by_differences = -(means[0.7] - means[0.4]) / 0.3 / means[0.55355]
    each = [
        float(mean_with_error((v - v.mean()) ** 2).stderr) / (0.85 * float(v.mean()))
        for v in middle.unbind(1)
    ]
    first = math.sqrt(sum(x**2 for x in each)) / 4
    second = (
        math.sqrt(
            sum(
                sum(float(mean_with_error(v).stderr) ** 2 for v in volumes[p].unbind(1)) / 16
                for p in (0.4, 0.7)
            )
        )
        / 0.3
        / float(means[0.55355])
    )
    print(
        f"{float(by_fluctuations):.4f} +- {first:.4f}, {float(by_differences):.4f} +- {second:.4f}"
    )
    assert first < 0.1 * by_fluctuations
    assert second < 0.1 * by_differences
    assert abs(by_fluctuations - by_differences) < 3 * math.hypot(first, second)


def test_the_tail_is_that_of_the_volume():
    """The piston feels the tail's pressure at its own volume."""
    potential = adjsim.LennardJones(cutoff=1.6, box=[3.6, 3.7, 3.8])
    plain, tailed = (
        adjsim.LangevinPiston(potential, kT=KT, pressure=P, tail=tail) for tail in (False, True)
    )
    state = plain.init(position() * 1.1, box=[x * 1.1 for x in (3.6, 3.7, 3.8)])
    volume = float(plain.volume(state))
    _, pressure = tail_corrections(potential, 8, volume)
    change = tailed.drift(0.0, state).strain_momentum - plain.drift(0.0, state).strain_momentum
    assert float(change) == pytest.approx(3 * volume * float(pressure), rel=1e-12)
