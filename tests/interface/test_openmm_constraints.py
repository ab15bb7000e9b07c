"""Systems of OpenMM with constraints: energies, steps, gradients to lengths, and the way back."""

from __future__ import annotations

import numpy as np
import openmm
import pytest
import torch
from ase import units
from openmm import app, unit
from torch import nn

import adjsim
from adjsim.core.openmm_units import LENGTH
from adjsim.io import from_openmm, to_openmm
from tests.constraints import tensor
from tests.openmm_systems import AMBER14, molecule, reference, structure, velocity_verlet

KT = 300 * units.kB
# Both sides sum the same terms in float64 and in another order.
ROUNDING = 1e-10


def solvated(
    topology=None, positions=None, water="amber14/tip3p.xml", box=None, molecules=8, **options
):
    """A system in rigid water, its positions and its topology."""
    positions = [] * unit.nanometer if positions is None else positions
    model = app.Modeller(topology or app.Topology(), positions)
    field = app.ForceField(AMBER14, water)
    model.addSolvent(field, **({"numAdded": molecules} if box is None else {"boxSize": box}))
    system = field.createSystem(model.topology, rigidWater=True, **options)
    return system, model.positions, model.topology


def dipeptide(**options):
    system, positions, _ = molecule("dipeptide.pdb", AMBER14, constraints=app.HBonds, **options)
    return system, positions, structure("dipeptide.pdb").topology


def started(potential, atoms, constraints, inner=None):
    """Constrained dynamics and a start of 300 K."""
    inner = adjsim.Hamiltonian(potential, atoms.mass) if inner is None else inner
    dynamics = adjsim.Constrained(inner, constraints)
    momentum = (atoms.mass[:, None] * KT).sqrt() * torch.randn(
        atoms.position.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return dynamics, dynamics.init(atoms.position, momentum)


def assert_energies_equal(system, potential, atoms):
    energy, forces = reference(system, atoms.position.numpy() / LENGTH)
    scale = np.abs(forces).max()
    with torch.no_grad():
        assert abs(potential(atoms.position).item() - energy) <= ROUNDING * max(abs(energy), scale)
        mine = adjsim.force(potential, atoms.position).numpy()
    assert np.abs(mine - forces).max() <= ROUNDING * scale


def test_a_peptide_with_constrained_hydrogens():
    system, positions, topology = dipeptide()
    potential, atoms = from_openmm(system, positions, topology)
    assert_energies_equal(system, potential, atoms)
    assert not atoms.constraints.length.requires_grad
    rows = [system.getConstraintParameters(k) for k in range(12)]
    assert atoms.constraints.index.tolist() == [[i, j] for i, j, _ in rows]
    lengths = torch.tensor([x.value_in_unit(unit.angstrom) for _, _, x in rows])
    torch.testing.assert_close(atoms.constraints.length, lengths.double())
    dynamics, start = started(potential, atoms, atoms.constraints)
    assert dynamics.dof(start.position) == 3 * 22 - 12
    # The distances of the file have three decimals of an angstrom.
    assert float((start.position - atoms.position).abs().max()) < 0.05


def test_without_constraints_there_are_none():
    system, positions, topology = molecule("dipeptide.pdb", AMBER14)
    assert from_openmm(system, positions, topology)[1].constraints is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:init moved an atom")
def test_a_solvated_peptide_as_it_is_made():
    pdb = structure("dipeptide.pdb")
    system, positions, topology = solvated(
        pdb.topology,
        pdb.positions,
        "amber14/tip3pfb.xml",
        openmm.Vec3(2, 2, 2) * unit.nanometer,
        constraints=app.HBonds,
        nonbondedMethod=app.PME,
        nonbondedCutoff=0.9 * unit.nanometer,
    )
    potential, atoms = from_openmm(system, positions, topology)
    assert_energies_equal(system, potential, atoms)
    inner = adjsim.Langevin(potential, atoms.mass, KT, 0.001 / units.fs)
    dynamics, start = started(potential, atoms, atoms.constraints, inner)
    waters = (len(atoms.mass) - 22) // 3
    assert dynamics.dof(start.position) == 3 * 22 - 12 + 6 * waters
    dt = 2 * units.fs
    final = adjsim.simulate(
        dynamics, start, [0.0, 5 * dt], solver=adjsim.BAOAB(dt), generator=1
    ).final
    # Rounding of positions, of 20 angstrom, over a length of one.
    assert float(atoms.constraints.excess(final.position).detach().abs().max()) < 1e-13


def assert_steps_equal(system, dynamics, start, steps, atol):
    """Compare velocity Verlet with OpenMM's, by its Reference platform, at 2 fs."""
    dt = 0.002
    velocity = start.momentum / dynamics.dynamics.mass[:, None]
    theirs = velocity_verlet(system, start.position, velocity, dt, steps)
    step = dt * 1000 * units.fs
    with torch.no_grad():
        mine = adjsim.simulate(
            dynamics, start, [0.0, steps * step], solver=adjsim.VelocityVerlet(step)
        ).final.position
    moved = float((mine - start.position).abs().max())
    assert moved > 0.1
    torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


def test_ten_steps_of_rigid_water_equal_those_of_openmm():
    system, positions, topology = solvated()
    potential, atoms = from_openmm(system, positions, topology)
    dynamics, start = started(potential, atoms, atoms.constraints)
    # OpenMM holds rigid waters to lengths in single precision: 6e-8 of an angstrom.
    assert_steps_equal(system, dynamics, start, 10, 1e-6)


@pytest.mark.parametrize(
    "name", ["dipeptide.pdb", pytest.param("peptide.pdb", marks=pytest.mark.slow)]
)
def test_all_bonds_of_a_peptide_are_one_cluster(name):
    system, positions, topology = molecule(name, AMBER14, constraints=app.AllBonds)
    potential, atoms = from_openmm(system, positions, topology)
    dynamics, start = started(potential, atoms, atoms.constraints)
    bonds = topology.getNumBonds()
    ((_, stop, size, width, _),) = dynamics.constraints.groups
    assert stop == size == bonds
    assert width == 13
    assert dynamics.dof(start.position) == 3 * len(atoms.mass) - bonds
    assert_steps_equal(system, dynamics, start, 10, 1e-6)


@pytest.mark.marathon
@pytest.mark.filterwarnings("ignore:the cotangents of the state grew")
def test_a_hundred_thousand_exact_steps_of_rigid_water_come_back():
    system, positions, topology = solvated(
        molecules=27,
        nonbondedMethod=app.CutoffPeriodic,
        nonbondedCutoff=0.4 * unit.nanometer,
    )
    potential, atoms = from_openmm(system, positions, topology)

    def run(friction, start, dt, steps, **options):
        inner = adjsim.Langevin(
            potential.requires_grad_(False), atoms.mass, KT, friction / units.fs
        )
        dynamics, drawn = started(potential, atoms, atoms.constraints, inner)
        solver = adjsim.Splitting("BAOAB", dt * units.fs, exact="adjoint" in options)
        start, ts = drawn if start is None else start, [0.0, steps * dt * units.fs]
        options |= {"solver": solver, "generator": 1, "compile": True}
        return dynamics, adjsim.simulate(dynamics, start, ts, **options)

    # Modeller leaves overlaps at the faces of a box of this size.
    _, relaxed = run(0.02, None, 0.2, 2000)
    start = type(relaxed.final)(*(x.detach().requires_grad_() for x in relaxed.final))
    assert start.position.shape == (81, 3)
    dynamics, path = run(0.001, start, 2.0, 100_000, adjoint=adjsim.ReversibleAdjoint())
    # Cotangents of a liquid overflow in 200 ps. The start is compared bit for bit.
    torch.autograd.grad(path.final.position.square().sum(), start.position)
    assert path.stats["reconstruction_error"] == 0
    # The scale of momenta by friction is exact to 1e-5 of them, which move an atom by 0.06 a step.
    excess = atoms.constraints.excess(path.final.position.detach())
    assert float(excess.abs().max()) < 2e-6
    found = adjsim.kinetic_temperature(
        path.final.momentum.detach(), atoms.mass, dynamics.dof(start.position)
    )
    # One draw of chi squared with 162 degrees of freedom.
    assert abs(float(found) / KT - 1) < 5 * (2 / 162) ** 0.5


@pytest.mark.slow
def test_the_energy_of_rigid_water_is_of_second_order():
    system, positions, topology = solvated()
    potential, atoms = from_openmm(system, positions, topology)
    dynamics, start = started(potential.requires_grad_(False), atoms, atoms.constraints)
    errors = []
    for dt in (2.0, 1.0, 0.5):
        path = adjsim.simulate(
            dynamics,
            start,
            torch.arange(0, 101, 2, dtype=torch.float64) * units.fs,
            solver=adjsim.VelocityVerlet(dt * units.fs),
        )
        energy = dynamics.invariant(dynamics.state_type(path.position, path.momentum))
        errors.append(float((energy - energy[0]).square().mean().sqrt()))
    # The next term of the error is smaller by the square of the step over a libration's time.
    print(errors)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)


def test_a_gradient_to_lengths_equals_differences():
    system, positions, topology = solvated()
    potential, atoms = from_openmm(system, positions, topology)
    read, dt = atoms.constraints, 2 * units.fs
    direction = torch.randn(
        read.length.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )

    def value(length):
        inner = adjsim.Langevin(potential, atoms.mass, KT, 0.01 / units.fs)
        held = adjsim.DistanceConstraints(read.index, length)
        dynamics, start = started(potential, atoms, held, inner)
        final = adjsim.simulate(
            dynamics,
            start,
            [0.0, 3 * dt],
            solver=adjsim.BAOAB(dt),
            adjoint=adjsim.ReversibleAdjoint(),
            generator=2,
        ).final
        return (final.position[0] - final.position[12]).norm() + potential(final.position)

    length = nn.Parameter(read.length.clone())
    value(length).backward()
    h = 1e-5
    with torch.no_grad():
        ends = [float(value(read.length + s * h * direction)) for s in (1, -1)]
    # Differences have an error of h^2 times a third derivative, and rounding over h.
    along = float((length.grad * direction).sum())
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(along, rel=1e-6)


def test_a_bond_on_a_constrained_pair_changes_the_energy_and_no_motion():
    system, positions, topology = solvated()
    without, atoms = from_openmm(system, positions, topology)
    bond = openmm.HarmonicBondForce()
    bond.addBond(0, 1, 0.11, 1e5)
    system.addForce(bond)
    with pytest.warns(UserWarning, match=r"such as that of atoms 0 and 1 \(1 in all"):
        potential, atoms = from_openmm(system, positions, topology)
    assert_energies_equal(system, potential, atoms)
    finals = []
    for one in (without, potential):
        inner = adjsim.Langevin(one, atoms.mass, KT, 0.01 / units.fs)
        dynamics, start = started(one, atoms, atoms.constraints, inner)
        dt = 2 * units.fs
        run = adjsim.simulate(dynamics, start, [0.0, 5 * dt], solver=adjsim.BAOAB(dt), generator=3)
        finals.append(run.final.position)
    assert (potential(finals[0]) - without(finals[0])).item() > 0.05
    # The projection leaves rounding of a force of some eV/angstrom.
    torch.testing.assert_close(finals[1], finals[0], rtol=0, atol=1e-11)


def test_fitted_lengths_are_written_back():
    system, positions, topology = dipeptide()
    potential, atoms = from_openmm(system, positions, topology)
    with torch.no_grad():
        atoms.constraints.length.mul_(1.01)
    written = to_openmm(potential, system, atoms.constraints)
    again = from_openmm(written, positions, topology)[1].constraints
    torch.testing.assert_close(again.length, atoms.constraints.length, rtol=1e-15, atol=0)
    # Without constraints, and in the system that was read, lengths stay.
    for same in (system, to_openmm(potential, system)):
        unchanged = from_openmm(same, positions, topology)[1].constraints
        torch.testing.assert_close(1.01 * unchanged.length, again.length, rtol=1e-15, atol=0)


def test_constraints_of_another_system_are_refused():
    system, positions, topology = dipeptide()
    potential, atoms = from_openmm(system, positions, topology)
    other = adjsim.DistanceConstraints(atoms.constraints.index[1:], atoms.constraints.length[1:])
    with pytest.raises(ValueError, match="not of the pairs of these constraints"):
        to_openmm(potential, system, other)
    system.addConstraint(*atoms.constraints.index[0].tolist()[::-1], 0.2)
    with pytest.raises(ValueError, match=r"pair .* rows \[0, 12\].*contradict each other"):
        from_openmm(system, positions, topology)


def water_at_pressure(axes="isotropic", friction=0.0):
    """About 60 rigid waters in a box, at rest about their lattice, whose energy is smooth."""
    nm = unit.nanometer
    system, positions, topology = solvated(
        box=openmm.Vec3(1.3, 1.3, 1.3) * nm, nonbondedMethod=app.PME, nonbondedCutoff=0.55 * nm
    )
    forces = [x for x in system.getForces() if isinstance(x, openmm.NonbondedForce)]
    forces[0].setUseSwitchingFunction(True)
    forces[0].setSwitchingDistance(0.4 * nm)
    forces[0].setPMEParameters(8.0, 32, 32, 32)
    potential, atoms = from_openmm(system, positions, topology)
    inner = adjsim.LangevinPiston(
        potential.requires_grad_(False),
        atoms.mass,
        KT,
        friction,
        units.bar,
        200 * units.fs,
        axes=axes,
    )
    dynamics = adjsim.Constrained(inner, atoms.constraints)
    return dynamics, atoms


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:init moved an atom")
@pytest.mark.parametrize("axes", ["isotropic", "each"])
def test_the_virial_of_rigid_water_is_that_of_centres(axes):
    dynamics, atoms = water_at_pressure(axes)
    box = dynamics.reference_box * (1.02 if axes == "isotropic" else tensor([1.02, 1.01, 1.03]))
    state = dynamics.init(atoms.position, generator=0, box=box)
    still = state._replace(momentum=0 * state.momentum)
    centre = (atoms.mass[:, None] * state.position).reshape(-1, 3, 3).sum(1) / atoms.mass[:3].sum()
    away = state.position.reshape(-1, 3, 3) - centre[:, None]
    h, found = 1e-5, dynamics.terms["V"].drift(0.0, still)["strain_momentum"]

    def enthalpy(change):
        moved = (centre * torch.exp(change))[:, None] + away
        at = still._replace(position=moved.reshape(-1, 3), strain=state.strain + change)
        return float(dynamics.potential_energy(at))

    for k in range(state.strain.shape[-1]):
        change = torch.zeros_like(state.strain)
        change[..., k] = h
        slope = (enthalpy(change) - enthalpy(-change)) / (2 * h)
        # The truncation is h^2 times a third derivative, a thousand times as large.
        assert float(found[..., k]) == pytest.approx(-slope, rel=1e-6)


@pytest.mark.marathon
@pytest.mark.filterwarnings("ignore:init moved an atom")
def test_the_enthalpy_of_rigid_water_is_of_second_order():
    dynamics, atoms = water_at_pressure()
    start, errors = dynamics.init(atoms.position, generator=0), []
    for dt in (1.0, 0.5, 0.25):
        with torch.no_grad():
            path = adjsim.simulate(
                dynamics,
                start,
                torch.arange(0, 21, 1, dtype=torch.float64) * units.fs,
                solver=adjsim.Splitting(dynamics.dynamics.scheme, dt * units.fs),
                generator=1,
            )
        states = type(path.final)(*(getattr(path, name) for name in path.final._fields))
        energy = dynamics.invariant(states)
        errors.append(float((energy - energy[0]).square().mean().sqrt()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)
