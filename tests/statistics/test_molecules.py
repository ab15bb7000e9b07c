"""Alanine dipeptide: conservation, equipartition and exact reversal over long runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import units

import adjsim
from adjsim.io import from_openmm
from tests.openmm_systems import DATA

pytest.importorskip("openmm")
from openmm import app

pytestmark = pytest.mark.marathon
KT, FS = 300 * units.kB, units.fs


def dipeptide(*files):
    """The force field and structure of Amber 14, in vacuum or with the files of a solvent."""
    pdb = app.PDBFile(str(DATA / "dipeptide.pdb"))
    system = app.ForceField("amber14-all.xml", *files).createSystem(
        pdb.topology, constraints=None, rigidWater=False
    )
    return from_openmm(system, pdb.positions, pdb.topology)


def warm(potential, structure, *replicas, steps=4000):
    """States after 2 ps with strong friction."""
    bath = adjsim.Langevin(potential, structure.mass, KT, 0.01 / FS)
    start = structure.position.expand(*replicas, -1, -1)
    with torch.no_grad():
        return adjsim.simulate(
            bath, bath.init(start, generator=0), [0.0, 0.5 * FS * steps],
            solver=adjsim.BAOAB(0.5 * FS), generator=1, compile=True,
        ).final  # fmt: skip


def energies(potential, structure, state, dt, ts):
    """Total energies at the save times, in a run of velocity Verlet."""
    dynamics = adjsim.Hamiltonian(potential, structure.mass)
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics, state, ts, solver=adjsim.VelocityVerlet(dt * FS), compile=True
        )
        return dynamics.invariant(adjsim.PhaseState(run.position, run.momentum)).numpy()


def test_energy_is_conserved():
    """The error is the square of the step, and does not grow over 20 ps at 0.5 fs."""
    potential, structure = dipeptide()
    # Over 0.1 ps the paths of both steps are the same to the order of the error, and the fourth
    # order is (h omega)^2 / 4 of the second: 3 % for the stretch of N-H, 0.69/fs, at 0.5 fs.
    states = warm(potential, structure, 16)
    ts = np.arange(0, 51) * 2.0 * FS
    deviation = {
        dt: energies(potential, structure, states, dt, ts).std(0).mean() for dt in (0.25, 0.5)
    }
    assert 3.8 < deviation[0.5] / deviation[0.25] < 4.3
    # A drift would be a difference between quarters. The vibrations exchange their energies within
    # picoseconds, so the mean of a quarter, 5 ps, has an error below half the deviation.
    state = type(states)(*(x[0] for x in states))
    energy = energies(potential, structure, state, 0.5, np.arange(0, 4001) * 5.0 * FS)
    quarter = len(energy) // 4
    assert abs(energy[-quarter:].mean() - energy[:quarter].mean()) < 0.5 * energy.std()


def test_equipartition_over_bonds_angles_and_torsions():
    """The kinetic energy along every internal coordinate is kT/2.

    The rate of a coordinate x has the variance kT sum_i |dx/dq_i|^2 / m_i. BAOAB's momenta are cold
    by (h omega)^2 / 4, which is 0.5 % for the stretch of a C-H bond, omega = 0.56/fs, at 0.25 fs.
    """
    potential, structure = dipeptide()
    state = warm(potential, structure, 64)
    bath = adjsim.Langevin(potential, structure.mass, KT, 0.01 / FS)
    with torch.no_grad():
        run = adjsim.simulate(
            bath, state, np.arange(0, 101) * 100.0 * FS, solver=adjsim.BAOAB(0.25 * FS),
            generator=2, compile=True,
        )  # fmt: skip
    position, momentum = (x[1:].flatten(0, 1) for x in (run.position, run.momentum))
    inverse = 1 / structure.mass.unsqueeze(-1)
    for part in (potential.bonds, potential.angles, potential.torsions):
        q = position.clone().requires_grad_()
        values = part.geometry(q).value.squeeze(-2)
        ratios = []
        for k in range(values.shape[-1]):
            (slope,) = torch.autograd.grad(values[:, k].sum(), q, retain_graph=True)
            rate = (slope * momentum * inverse).sum((-1, -2))
            ratios.append(rate.square() / (slope.square() * inverse).sum((-1, -2)) / KT)
        # Frames of one replica are 0.1 ps apart, the time of the friction; errors from replicas.
        means = torch.stack(ratios).mean(0).unflatten(0, (100, 64)).mean(0)
        mean, error = float(means.mean()), float(means.std()) / 8
        assert error < 0.01
        assert abs(mean - 1) < 4 * error + 0.005


@pytest.mark.parametrize("files", [(), ("implicit/obc2.xml",)], ids=["vacuum", "OBC2"])
def test_a_hundred_thousand_steps_come_back(files):
    potential, structure = dipeptide(*files)
    bath = adjsim.Langevin(potential, structure.mass, KT, 0.005 / FS)
    run = adjsim.simulate(
        bath, bath.init(structure.position, generator=0), [0.0, 50_000 * FS],
        solver=adjsim.Splitting("BAOAB", 0.5 * FS, exact=True),
        adjoint=adjsim.ReversibleAdjoint(), generator=1, compile=True,
    )  # fmt: skip
    run.final.position.square().sum().backward()
    assert run.stats["steps"] == 100_000
    assert run.stats["reconstruction_error"] == 0
    assert float((run.final.position - structure.position).detach().abs().max()) > 1.0
