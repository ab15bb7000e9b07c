"""Virtual sites of OpenMM: energies, forces, steps, gradients to their numbers, the way back."""

from __future__ import annotations

import numpy as np
import openmm
import pytest
import torch
from ase import units
from openmm import app, unit

import adjsim
from adjsim.core.openmm_units import LENGTH
from adjsim.io import from_openmm, to_openmm
from adjsim.io._openmm.library import ENERGY
from adjsim.potentials import ForceFieldPotential
from tests.openmm_systems import velocity_verlet
from tests.retracing import forth_and_back

KT, FEMTOSECONDS = 300 * units.kB, units.fs
PME = {"nonbondedMethod": app.PME, "nonbondedCutoff": 0.55 * unit.nanometer}


def water(name, molecules=64, model="tip4pew", **options):
    """A box of water with sites, its positions in nm and its topology."""
    made = app.Modeller(app.Topology(), [] * unit.nanometer)
    field = app.ForceField(name)
    made.addSolvent(field, numAdded=molecules, model=model)
    system = field.createSystem(made.topology, rigidWater=True, **options)
    return system, made.positions.value_in_unit(unit.nanometer), made.topology


def artificial(site, others=4, box=None):
    """Atoms with charges and wells, and a site on the first of them in the middle of the system."""
    rng = np.random.default_rng(3)
    system = openmm.System()
    nonbonded, bonds = openmm.NonbondedForce(), openmm.HarmonicBondForce()
    where = iter(rng.permutation(27))
    positions = []
    for k in range(others + 3):
        system.addParticle(0.0 if k == 2 else rng.uniform(1, 20))
        corner = np.unravel_index(next(where), (3, 3, 3))
        positions.append(0.28 * np.array(corner) + 0.05 * rng.random(3))
        nonbonded.addParticle(rng.normal(), rng.uniform(0.1, 0.2), rng.random())
    system.setVirtualSite(2, site)
    for k in range(site.getNumParticles()):
        nonbonded.addException(2, site.getParticle(k), 0.0, 0.1, 0.0)
    bonds.addBond(2, others + 2, 0.3, 200.0)
    if box is not None:
        system.setDefaultPeriodicBoxVectors(*(box * np.eye(3)))
        nonbonded.setNonbondedMethod(nonbonded.PME)
        nonbonded.setCutoffDistance(0.6)
    system.addForce(nonbonded)
    system.addForce(bonds)
    return system, np.array(positions), None


V = openmm.Vec3
# Made anew for each system, which owns its sites.
SITES = {
    "two": lambda: openmm.TwoParticleAverageSite(0, 3, 0.7, 0.3),
    "three": lambda: openmm.ThreeParticleAverageSite(3, 0, 1, 0.5, 0.2, 0.3),
    "plane": lambda: openmm.OutOfPlaneSite(0, 1, 3, 0.3, -0.4, 1.7),
    "local": lambda: openmm.LocalCoordinatesSite(
        1, 3, 0, V(0.6, 0.3, 0.1), V(-1, 0.5, 0.5), V(0, -1, 1), V(0.03, -0.05, 0.02)
    ),
    "four": lambda: openmm.LocalCoordinatesSite(
        [4, 1, 3, 0], [1, 0, 0, 0], [-1, 0.5, 0.2, 0.3], [0, -1, 1, 0], V(0.05, 0.03, -0.04)
    ),
}


def in_openmm(system, positions):
    """Energy, forces on the atoms and positions of all particles, of the Reference platform."""
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
    context.setPositions(positions)
    context.computeVirtualSites()
    state = context.getState(energy=True, forces=True, positions=True)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    forces = state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer)
    return (
        energy * ENERGY,
        forces * ENERGY / LENGTH,
        LENGTH * state.getPositions(asNumpy=True)._value,
    )


def atoms_of(system):
    return [k for k in range(system.getNumParticles()) if not system.isVirtualSite(k)]


def assert_equal_in_openmm(system, potential, structure, positions):
    energy, forces, places = in_openmm(system, positions)
    q, scale = structure.position, np.abs(forces).max()
    with torch.no_grad():
        assert potential(q).item() == pytest.approx(energy, rel=1e-9, abs=1e-9 * scale)
        mine = adjsim.force(potential, q).numpy()
        found = structure.all_positions(q).numpy()
    # Both sides sum the same terms in another order; 1e-9 is below the 1e-7 that is promised.
    assert np.abs(mine - forces[atoms_of(system)]).max() <= 1e-9 * scale
    assert np.abs(found - places).max() <= 1e-13 * np.abs(places).max()


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("amber14/tip4pew.xml", "tip4pew"),
        ("amber14/opc.xml", "tip4pew"),
        pytest.param("tip5p.xml", "tip5p", marks=pytest.mark.slow),
    ],
)
def test_water(name, model):
    system, positions, topology = water(name, model=model, **PME)
    potential, structure = from_openmm(system, positions, topology)
    assert_equal_in_openmm(system, potential, structure, positions)
    assert structure.symbols == ("O", "H", "H") * 64
    assert structure.mass.shape == (192,)
    assert len(structure.constraints.length) == 192
    assert int(structure.constraints.index.max()) == 191
    assert potential.coulomb.charge.shape == (64 * (5 if model == "tip5p" else 4),)


@pytest.mark.parametrize("box", [None, pytest.param(2.2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SITES)
def test_sites_of_each_kind(kind, box):
    system, positions, _ = artificial(SITES[kind](), box=box)
    potential, structure = from_openmm(system, positions)
    assert_equal_in_openmm(system, potential, structure, positions)


@pytest.mark.parametrize("kind", SITES)
def test_numbers_of_sites_against_differences_of_openmm(kind):
    """Gradients of the energy against systems into which changed numbers were written."""
    system, positions, _ = artificial(SITES[kind]())
    potential, structure = from_openmm(system, positions)
    potential(structure.position).backward()
    h = 1e-5
    for p in potential.sites.parameters():
        direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                p.add_(sign * h * direction)
                ends.append(in_openmm(to_openmm(potential, system), positions)[0])
                p.sub_(sign * h * direction)
        along = float((p.grad * direction).sum())
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(along, rel=1e-6, abs=1e-8)


def test_types_and_labels():
    system, positions, topology = water("amber14/tip4pew.xml", 8)
    potential, _ = from_openmm(system, positions, topology)
    assert potential.labels["sites.three_particle_average"] == ("HOH M-O-H1-H2",)
    assert potential.sites.three_particle_average.weight.shape == (1, 2)
    without, _ = from_openmm(system, positions)
    assert without.sites.three_particle_average.weight.shape == (8, 2)


def test_without_sites_all_positions_are_those_of_the_atoms():
    system, positions, topology = water("amber14/tip3p.xml", 8, "tip3p")
    potential, structure = from_openmm(system, positions, topology)
    assert type(potential) is ForceFieldPotential
    assert structure.sites is None
    assert structure.all_positions(structure.position) is structure.position


def test_fitted_numbers_are_written_back():
    for kind, site in SITES.items():
        system, positions, _ = artificial(site())
        potential, structure = from_openmm(system, positions)
        with torch.no_grad():
            for p in potential.parameters():
                p.mul_(1.02)
        written = to_openmm(potential, system)
        again, _ = from_openmm(written, positions)
        for (name, p), other in zip(potential.named_parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(other, p, rtol=1e-13, atol=0, msg=f"{kind}: {name}")
        assert_equal_in_openmm(written, potential, structure, positions)
    other = artificial(SITES["two"]())[0]
    other.setVirtualSite(1, openmm.TwoParticleAverageSite(0, 3, 0.5, 0.5))
    other.setParticleMass(1, 0)
    with pytest.raises(ValueError, match="virtual sites of the system are not those"):
        to_openmm(potential, other)


def held(system, positions):
    """Positions in nm that satisfy the constraints: Modeller's waters have those of TIP4P-Ew."""
    context = openmm.Context(system, openmm.VerletIntegrator(0.001))
    context.setPositions(positions)
    context.applyConstraints(1e-8)
    return context.getState(positions=True).getPositions(asNumpy=True)


def started(system, positions, topology):
    potential, structure = from_openmm(system, held(system, positions), topology)
    inner = adjsim.Langevin(potential, structure.mass, KT, 0.01 / FEMTOSECONDS)
    dynamics = adjsim.Constrained(inner, structure.constraints)
    return dynamics, dynamics.init(structure.position, generator=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:init moved an atom")
def test_ten_steps_of_rigid_water_with_sites_equal_those_of_openmm():
    system, positions, topology = water("amber14/tip4pew.xml", 8)
    potential, structure = from_openmm(system, positions, topology)
    dynamics = adjsim.Constrained(
        adjsim.Hamiltonian(potential, structure.mass), structure.constraints
    )
    momentum = (structure.mass[:, None] * KT).sqrt() * torch.randn(
        structure.position.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    start = dynamics.init(structure.position, momentum)
    kept, steps = atoms_of(system), 10
    velocity = torch.zeros(len(positions), 3, dtype=torch.float64)
    velocity[kept] = start.momentum.detach() / structure.mass[:, None]
    theirs = velocity_verlet(
        system, structure.all_positions(start.position).detach(), velocity, 0.002, steps
    )
    dt = 2 * FEMTOSECONDS
    mine = adjsim.simulate(
        dynamics, start, [0.0, steps * dt], solver=adjsim.VelocityVerlet(dt)
    ).final.position
    assert float((mine - start.position).detach().abs().max()) > 0.1
    # OpenMM holds rigid waters to lengths in single precision: 6e-8 of an angstrom.
    torch.testing.assert_close(mine, theirs[kept], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:init moved an atom")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("amber14/tip4pew.xml", marks=pytest.mark.slow),
        pytest.param("amber14/opc.xml", marks=pytest.mark.marathon),
    ],
)
def test_runs_at_300_kelvin_come_back(name):
    dynamics, start = started(*water(name, **PME))
    dt = 2 * FEMTOSECONDS
    solver = adjsim.Splitting("BAOAB", dt, exact=True)
    before, after, found = forth_and_back(dynamics, start, solver, 50)
    assert not torch.equal(before.position, after.position)
    assert all(map(torch.equal, found, before))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:init moved an atom")
@pytest.mark.parametrize("name", ["amber14/tip4pew.xml", "amber14/opc.xml"])
def test_every_number_against_differences_through_a_run(name):
    """Without a cutoff, at which energies of OpenMM jump."""
    dynamics, start = started(*water(name, 8))
    dt = 2 * FEMTOSECONDS

    def value():
        final = adjsim.simulate(
            dynamics, start, [0.0, 3 * dt], solver=adjsim.BAOAB(dt), generator=1,
            adjoint=adjsim.ReversibleAdjoint(),
        ).final  # fmt: skip
        potential = dynamics.potential
        return final.position[:3].square().sum() + potential(final.position)

    value().backward()
    h = 1e-4
    for p in dynamics.potential.parameters():
        direction = p.detach() * torch.randn(
            p.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
        ends = []
        for sign in (2, 1, -1, -2):
            with torch.no_grad():
                p.add_(sign * h * direction)
                ends.append(float(value()))
                p.sub_(sign * h * direction)
        slope = (8 * (ends[1] - ends[2]) - (ends[0] - ends[3])) / (12 * h)
        along = float((p.grad * direction).sum())
        assert slope == pytest.approx(along, rel=1e-6)


def symmetric(system):
    rows = V(1, 0, 0), V(0, 1, 0), V(0, 0, 1)
    system.setVirtualSite(2, openmm.SymmetrySite(0, *rows, V(0, 0, 0), False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            symmetric,
            "particle 2 is a virtual site of a kind without a counterpart.*SymmetrySite",
        ),
        (
            lambda s: (
                s.setParticleMass(4, 0),
                s.setVirtualSite(4, openmm.TwoParticleAverageSite(2, 1, 0.5, 0.5)),
            ),
            "particle 4 is a virtual site built on particle 2, a virtual site too",
        ),
        (lambda s: s.addConstraint(2, 5, 0.1), "constraint 0 holds particle 2, a virtual site"),
        (lambda s: s.setParticleMass(2, 1.0), "particle 2, a virtual site, has the mass 1"),
        (lambda s: s.setParticleMass(5, 0.0), "mass of particle 5 is 0.*but a virtual site"),
        (
            lambda s: s.setVirtualSite(2, openmm.TwoParticleAverageSite(0, 3, 0.5, 0.4)),
            "weights of particle 2, a virtual site, sum to 0.9, and must sum to 1",
        ),
    ],
)
def test_what_is_refused(change, message):
    system, positions, _ = artificial(SITES["two"]())
    change(system)
    with pytest.raises(ValueError, match=message):
        from_openmm(system, positions)
