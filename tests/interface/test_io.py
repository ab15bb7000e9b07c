"""Structures and trajectories from ASE and to ASE, and calculators both ways."""

from __future__ import annotations

import ase
import ase.constraints
import ase.io
import numpy as np
import pytest
import torch
from ase import units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones as ASELennardJones

import adjsim
from adjsim.io import ASECalculator, ASEPotential, from_ase, to_ase, write
from tests.problems import parameter


def argon(tilted=False):
    """27 or 32 atoms of argon, displaced, with velocities of 85 K."""
    atoms = bulk("Ar", "fcc", a=5.4, cubic=not tilted) * ((3, 3, 3) if tilted else (2, 2, 2))
    generator = np.random.default_rng(0)
    atoms.positions += 0.1 * generator.standard_normal(atoms.positions.shape)
    scale = np.sqrt(units.kB * 85 * atoms.get_masses())[:, None]
    atoms.set_momenta(scale * generator.standard_normal(atoms.positions.shape))
    return atoms


def potential_of(structure, **options):
    half = float(adjsim.core.box.perpendicular_widths(structure.box).min()) / 2
    return adjsim.LennardJones(0.0103, 3.4, cutoff=0.99 * half, box=structure.box, **options)


@pytest.mark.parametrize("tilted", [False, True])
def test_there_and_back(tilted, tmp_path):
    atoms = argon(tilted)
    structure = from_ase(atoms)
    assert structure.box.shape == ((3, 3) if tilted else (3,))
    dynamics = adjsim.Hamiltonian(potential_of(structure), structure.mass)
    start = dynamics.init(structure.position, structure.momentum)
    times = torch.arange(3) * 4 * units.fs
    run = adjsim.simulate(dynamics, start, times, solver=adjsim.VelocityVerlet(4 * units.fs))
    frames = to_ase(run, structure)
    path = tmp_path / "run.extxyz"
    write(path, frames)
    assert [p.name for p in tmp_path.iterdir()] == ["run.extxyz"]
    assert path.stat().st_mode & 0o777 == 0o644
    for k, atoms in enumerate(ase.io.read(str(path), ":")):
        again = from_ase(atoms)
        # The file has eight digits.
        torch.testing.assert_close(again.position, run.position[k], rtol=0, atol=1e-7)
        torch.testing.assert_close(again.momentum, run.momentum[k], rtol=0, atol=1e-6)
        torch.testing.assert_close(again.box, structure.box, rtol=1e-12, atol=0)
        assert again.symbols == structure.symbols
        assert atoms.info["time"] == pytest.approx(float(run.times[k]), rel=1e-9)
    kinetic = frames[1].get_kinetic_energy()
    assert kinetic == pytest.approx(float(dynamics.kinetic_energy(start._make(
        x[1] for x in (run.position, run.momentum)
    ))), rel=1e-12)  # fmt: skip


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "run.xyz"
    write(path, [argon()])
    before = path.read_text()
    with pytest.raises(AttributeError):
        write(path, [argon(), "not atoms"])
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.xyz"]


@pytest.mark.parametrize("tilted", [False, True])
def test_a_calculator_has_the_numbers_of_the_potential(tilted):
    atoms = argon(tilted)
    structure = from_ase(atoms)
    potential = potential_of(structure)
    atoms.calc = ASECalculator(potential)
    assert atoms.get_potential_energy() == pytest.approx(float(potential(structure.position)))
    force = adjsim.force(potential, structure.position)
    np.testing.assert_allclose(atoms.get_forces(), force.numpy(), rtol=1e-12)
    # ASE's own Lennard-Jones, with the same shift at the cutoff.
    other = argon(tilted)
    other.calc = ASELennardJones(epsilon=0.0103, sigma=3.4, rc=potential.cutoff, smooth=False)
    assert atoms.get_potential_energy() == pytest.approx(other.get_potential_energy(), rel=1e-10)
    np.testing.assert_allclose(atoms.get_forces(), other.get_forces(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(atoms.get_stress(), other.get_stress(), rtol=1e-9, atol=1e-14)


def test_a_calculator_refuses_another_box():
    atoms = argon()
    atoms.calc = ASECalculator(potential_of(from_ase(atoms)))
    atoms.get_potential_energy()
    atoms.set_cell(atoms.cell * 1.01)
    with pytest.raises(ValueError, match="the potential's box is"):
        atoms.get_potential_energy()
    atoms.pbc = False
    with pytest.raises(ValueError, match="the atoms are not periodic"):
        atoms.get_potential_energy()
    atoms = argon()
    atoms.calc = ASECalculator(adjsim.LennardJones(0.0103, 3.4))
    with pytest.raises(ValueError, match="the potential has no box"):
        atoms.get_potential_energy()


def test_a_reference_calculator_runs_and_has_no_gradient():
    """EMT copper: its numbers, a run at constant energy, and a refusal of every gradient."""
    atoms = bulk("Cu", cubic=True) * 2
    atoms.positions += 0.05 * np.random.default_rng(1).standard_normal(atoms.positions.shape)
    structure = from_ase(atoms)
    reference = ASEPotential(EMT(), structure)
    atoms.calc = EMT()
    batch = torch.stack([structure.position, structure.position + 0.01])
    assert float(reference(batch)[0]) == pytest.approx(atoms.get_potential_energy(), rel=1e-12)
    forces = adjsim.force(reference, batch)
    assert forces.shape == batch.shape
    np.testing.assert_allclose(forces[0].numpy(), atoms.get_forces(), rtol=1e-12, atol=1e-14)
    # Displaced together, the atoms have the same energies and forces.
    torch.testing.assert_close(forces[1], forces[0], rtol=1e-9, atol=1e-10)
    dynamics = adjsim.Hamiltonian(reference, structure.mass)
    start = dynamics.init(structure.position, 0 * structure.momentum)
    drifts = []
    for dt in (2.0, 1.0):
        solver = adjsim.VelocityVerlet(dt * units.fs)
        times = [0.0, 20 * units.fs]
        run = adjsim.simulate(dynamics, start, times, solver=solver, record=dynamics.invariant)
        drifts.append(float(run.record[1] - run.record[0]))
    # Second order in dt.
    assert drifts[0] / drifts[1] == pytest.approx(4, abs=0.4)
    trained = adjsim.Hamiltonian(reference, parameter(63.5))
    for adjoint in (adjsim.DirectAdjoint(), adjsim.ReversibleAdjoint(), adjsim.CheckpointAdjoint()):
        with pytest.raises(TypeError, match="EMT, an ASE calculator, have no derivative"):
            adjsim.simulate(
                trained,
                trained.init(structure.position, structure.momentum),
                [0.0, 0.4],
                solver=adjsim.VelocityVerlet(0.2),
                adjoint=adjoint,
            ).final.position.sum().backward()


@pytest.mark.parametrize("name", ["vel", "velo", "velocity", "velocities"])
def test_velocities_that_ase_does_not_read_are_refused(name, tmp_path):
    path = tmp_path / "argon.xyz"
    path.write_text(f"1\nProperties=species:S:1:pos:R:3:{name}:R:3\nAr 0 0 0 0.001 0 0.002\n")
    atoms = ase.io.read(str(path))
    with pytest.raises(ValueError, match=rf"velocities in atoms.arrays\['{name}'\] and no momenta"):
        from_ase(atoms)
    # The ways out of the message.
    column = atoms.arrays[name]
    atoms.set_velocities(column / units.fs)
    expected = atoms.get_masses()[0] * column[0] / units.fs
    assert from_ase(atoms).momentum[0].tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    atoms.set_momenta(0 * column)
    del atoms.arrays[name]
    assert not from_ase(atoms).momentum.any()


def test_bad_structures_are_named():
    atoms = argon()
    atoms.set_constraint(ase.constraints.FixAtoms([0]))
    with pytest.raises(ValueError, match=r"has constraints \(FixAtoms\), which are not read"):
        from_ase(atoms)
    atoms = argon()
    atoms.positions[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"position of atom 3 is .*nan.*not finite"):
        from_ase(atoms)
    atoms = argon()
    atoms.pbc = [True, True, False]
    with pytest.raises(ValueError, match="some axes only"):
        from_ase(atoms)
    atoms.set_cell([5.0, 5.0, 0.0])
    atoms.pbc = True
    with pytest.raises(ValueError, match=r"cell .* has no volume: set the cell, or pbc=False"):
        from_ase(atoms)
    with pytest.raises(ValueError, match="no atoms"):
        from_ase(ase.Atoms())
    structure = from_ase(argon())
    dynamics = adjsim.Hamiltonian(potential_of(structure))
    start = dynamics.init(
        structure.position.expand(2, -1, -1), structure.momentum.expand(2, -1, -1)
    )
    run = adjsim.simulate(dynamics, start, [0.0, 0.1], solver=adjsim.VelocityVerlet(0.1))
    with pytest.raises(ValueError, match="of one system"):
        to_ase(run, structure)
