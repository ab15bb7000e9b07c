"""Lennard-Jones liquids: conservation, reversal and the numbers of NIST."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import adjsim
from adjsim.core import box as _box, derived as _derived
from adjsim.observables import pressure
from adjsim.potentials import Switched, tail_corrections
from tests.problems import parameter

pytestmark = pytest.mark.marathon


def liquid(atoms: int, density: float, kT: float, **options):
    """A potential and a state of the equilibrated liquid at this temperature."""
    length = (atoms / density) ** (1 / 3)
    potential = adjsim.LennardJones(parameter(1.0), parameter(1.0), box=[length] * 3, **options)
    side = int(np.ceil(round(atoms ** (1 / 3), 9)))
    sites = torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 3)
    chosen = torch.randperm(side**3, generator=torch.Generator().manual_seed(0))[:atoms]
    bath = adjsim.Langevin(potential, kT=kT, friction=1.0)
    with torch.no_grad():
        state = adjsim.simulate(
            bath,
            bath.init((sites[chosen] + 0.5) * (length / side), generator=1),
            [0.0, 40.0],
            solver=adjsim.BAOAB(0.004),
            compile=True,
            generator=2,
        ).final
    return potential, state._replace(momentum=state.momentum - state.momentum.mean(0))


def test_energy_and_momentum_over_a_hundred_thousand_steps():
    """The drift by a linear fit stays below 1e-5 an atom, at dt = 0.002 with a smooth switch."""
    atoms = 500
    potential, state = liquid(atoms, 0.8, 1.0, cutoff=2.5, truncation=Switched(2.0))
    dynamics = adjsim.Hamiltonian(potential)
    # The energy of a frame fluctuates by 2.1e-5, without a correlation between frames, so the drift
    # of 1,001 frames has an error of 2.3e-6.
    ts = 0.2 * np.arange(1001)
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics, dynamics.init(*state), ts, solver=adjsim.VelocityVerlet(0.002), compile=True
        )
        states = [type(run.final)(q, p) for q, p in zip(run.position, run.momentum, strict=True)]
        energy = np.array([float(dynamics.invariant(s)) for s in states]) / atoms
    assert run.stats["steps"] == 100_000
    assert run.stats["pairs"] == {"LennardJones": "neighbour list"}
    slope = np.polyfit(ts, energy, 1)[0]
    assert abs(slope) * ts[-1] < 1e-5
    # Forces of a pair are opposite to the last bit, and their sums are rounded.
    assert float(run.momentum.sum(-2).abs().max()) / atoms < 1e-12


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("limit", [0.0, 1e9], ids=["list", "all pairs"])
def test_a_liquid_retraces_a_hundred_thousand_steps(monkeypatch, threads, limit):
    """The start comes back bit for bit, with one gradient for lists and all pairs."""
    monkeypatch.setattr(_box, "LISTED", limit)
    _derived._known.clear()
    potential, state = liquid(108, 0.8, 1.0, cutoff=2.3)
    dynamics, before = adjsim.Hamiltonian(potential), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run = adjsim.simulate(
            # Long enough to lose all digits of a plain run, and too short for an overflow of the
            # gradient, which grows like exp(3 t).
            dynamics, dynamics.init(*state), [0.0, 100.0],
            solver=adjsim.Splitting("BAB", 0.001, exact=True),
            adjoint=adjsim.ReversibleAdjoint(), compile=True,
        )  # fmt: skip
        run.final.position.square().sum().backward()
    finally:
        torch.set_num_threads(before)
    assert run.stats["steps"] == 100_000
    assert run.stats["reconstruction_error"] == 0
    assert bool(torch.isfinite(potential.sigma.grad))


@pytest.mark.parametrize(
    ("density", "energy", "mean_pressure"), [(0.776, -5.5121, 0.0067714), (0.820, -5.7947, 0.55355)]
)
def test_nist_liquid(density, energy, mean_pressure):
    """Monte Carlo means of NIST at T* = 0.85: 500 atoms, cutoff 3 and tail corrections."""
    atoms, kT = 500, 0.85
    potential, state = liquid(atoms, density, kT, cutoff=3.0)
    bath = adjsim.Langevin(potential, kT=kT, friction=0.5)
    volume = atoms / density
    tails = tail_corrections(potential, atoms, volume)
    tail_energy, tail_pressure = (float(x.detach()) for x in tails)
    # Pairs within the cutoff get back the shift of the energy.
    shift = float(potential.pair_energy(torch.tensor(9.0, dtype=torch.float64)).detach())
    box = potential.box

    def energy_of(position):
        d = position[:, None] - position
        d = d - box * torch.round(d / box)
        within = ((d * d).sum(-1) < 9.0).sum() - atoms
        return (float(potential(position)) + shift * 0.5 * float(within) + tail_energy) / atoms

    ts = 0.8 * np.arange(1001)
    with torch.no_grad():
        run = adjsim.simulate(
            bath, bath.init(*state), ts, solver=adjsim.BAOAB(0.004), compile=True, generator=3
        )
        energies = np.array([energy_of(q) for q in run.position])
        frames = [type(run.final)(q, p) for q, p in zip(run.position, run.momentum, strict=True)]
        pressures = np.array([float(pressure(bath, s)) for s in frames]) + tail_pressure
    for series, expected, widest in ((energies, energy, 0.01), (pressures, mean_pressure, 0.05)):
        found = adjsim.observables.mean_with_error(torch.as_tensor(series))
        error = float(found.stderr)
        assert error < widest / 3
        # NIST's own errors are below 0.0006 and 0.003.
        assert abs(float(found.value) - expected) < 4 * error + widest / 5
