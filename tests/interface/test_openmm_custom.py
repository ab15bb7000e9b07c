"""OpenMM's custom forces of several atoms, groups, places and hydrogen bonds, and offsets."""

from __future__ import annotations

from unittest.mock import patch

import openmm
import pytest
import torch

import adjsim
from adjsim.core.refusal import Refusal
from adjsim.io import from_openmm, to_openmm
from adjsim.potentials.base import force_vjp
from adjsim.potentials.pairs import base
from tests.openmm_custom import (
    FORCES,
    balls,
    computed_values,
    offsets,
    pair_tables,
    sites,
    steep,
    system_with,
)
from tests.openmm_systems import assert_openmm_agrees


def assert_equal(potential, position, system, positions):
    assert_openmm_agrees(system, positions, potential, position, 1e-9)


def equal_to_openmm(system, positions):
    potential, structure = from_openmm(system, positions)
    assert_equal(potential, structure.position, system, positions)
    return potential, structure


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("name", FORCES)
def test_read_and_written(name, periodic):
    """Energies and forces are OpenMM's, also after every number has changed."""
    system, positions = system_with(FORCES[name](periodic)), sites()
    if periodic:
        # Atoms apart by whole boxes. Groups, and Cartesian coordinates, stay where they are.
        positions[0 if name != "centroid" else 7] += (2.0, 0.0, -2.2)
    potential, structure = equal_to_openmm(system, positions)
    with torch.no_grad():
        for key, parameter in potential.named_parameters():
            if not key.endswith(".t"):
                parameter.mul_(1.03)
    written = to_openmm(potential, system)
    assert_equal(potential, structure.position, written, positions)
    again, _ = from_openmm(written, positions)
    assert again(structure.position).item() == potential(structure.position).item()


# Those of solvents are in tests/contracts/test_solvent.py.
@pytest.mark.parametrize("name", [x for x in FORCES if x != "solvent"])
def test_gradients_against_differences(name):
    potential, structure = from_openmm(system_with(FORCES[name](True)), sites())
    q, v = structure.position, torch.randn_like(structure.position)
    named = {k: x for k, x in potential.named_parameters() if not k.endswith(".t")}
    parameters = list(named.values())
    value, pullback = force_vjp(potential, q, parameters)
    along, rest = pullback(v)
    scale = float(value.norm() * v.norm())

    def slope(change):
        ends = []
        for sign in (1, -1):
            change(sign * 1e-5)
            ends.append(float((adjsim.force(potential, q) * v).sum().detach()))
            change(-sign * 1e-5)
        return (ends[0] - ends[1]) / 2e-5

    moved = torch.randn_like(q)
    with torch.no_grad():
        found = slope(lambda h: q.add_(h * moved))
        assert float((along * moved).sum()) == pytest.approx(found, rel=1e-6, abs=1e-7 * scale)
        for (key, x), grad in zip(named.items(), rest.gradient(parameters), strict=True):
            direction = x * torch.rand_like(x) + 1e-3 * float(x.abs().max())
            found = slope(lambda h, x=x, d=direction: x.add_(h * d))
            mine = 0.0 if grad is None else float((grad * direction).sum())
            assert mine == pytest.approx(found, rel=1e-6, abs=1e-9 * scale), key


@pytest.fixture
def no_kernels():
    """Kernels take seconds to compile."""
    with patch.object(base, "unsupported", lambda *_: Refusal("left out")):
        yield


@pytest.mark.parametrize("periodic", [False, True])
def test_tables_in_pairs(periodic, no_kernels):
    """Tables are functions, but those of one type of both atoms alone, which are numbers."""
    system, positions = system_with(pair_tables(periodic)), sites()
    potential, structure = equal_to_openmm(system, positions)
    pairs = potential.custom_pairs
    assert pairs.numbers == ("c", "k", "types", "q", "t", "u")
    assert pairs.tables == ("f", "g", "h", "d")
    with torch.no_grad():
        for name, x in potential.named_parameters():
            if not name.endswith((".t", ".u")):
                x.mul_(1.03)
    written = to_openmm(potential, system)
    assert_equal(potential, structure.position, written, positions)
    again, _ = from_openmm(written, positions)
    assert again(structure.position).item() == potential(structure.position).item()
    # A pair has one number, so numbers that the potential refuses are not written.
    with torch.no_grad():
        pairs.k[0, 1] *= 1.1
    with pytest.raises(ValueError, match="k must be symmetric"):
        to_openmm(potential, system)


def test_computed_values_of_pairs(no_kernels):
    system, positions = system_with(computed_values(True)), sites()
    potential, structure = equal_to_openmm(system, positions)
    assert potential.custom_pairs.numbers == ("w", "t", "q")
    with torch.no_grad():
        potential.custom_pairs.q.mul_(1.03)
        potential.custom_pairs.w.mul_(1.03)
    assert_equal(potential, structure.position, to_openmm(potential, system), positions)


@pytest.mark.parametrize("method", ["CutoffPeriodic", "LJPME"])
def test_offsets(method, no_kernels):
    check_offsets(method)


def test_a_well_that_grows_from_zero(no_kernels):
    force = openmm.NonbondedForce()
    for _ in range(9):
        force.addParticle(0.0, 0.2, 0.4)
    force.addException(6, 8, 0.0, 0.25, 0.0)
    force.addGlobalParameter("steric", 0.0)
    force.addExceptionParameterOffset("steric", 0, 0.0, 0.0, 0.6)
    system, positions = system_with(force, 9), sites(9)
    potential, structure = from_openmm(system, positions)
    for value in (0.0, 0.5):
        force = system.getForce(0)
        force.setGlobalParameterDefaultValue(0, value)
        with torch.no_grad():
            potential.steric.fill_(value)
        assert_equal(potential, structure.position, system, positions)
    written = to_openmm(potential, system)
    assert_equal(potential, structure.position, written, positions)
    assert written.getForce(0).getExceptionParameters(0)[3]._value == pytest.approx(0.25)


def test_a_well_that_grows_needs_a_length():
    force = offsets("CutoffPeriodic")
    force.addParticleParameterOffset("steric", 11, 0.0, 0.0, 0.5)
    with pytest.raises(ValueError, match="particle 11 has epsilon 0 eV with sigma 0 angstrom"):
        from_openmm(system_with(force), sites())


def test_two_offsets_of_one_number_are_refused():
    """OpenMM's Reference platform takes the last one, and its other platforms the sum."""
    force = offsets("NoCutoff")
    force.addParticleParameterOffset("steric", 2, 0.1, 0.0, 0.0)
    with pytest.raises(ValueError, match="two offsets of particle 2 by steric"):
        from_openmm(system_with(force), sites())


@pytest.mark.slow
def test_offsets_in_kernels():
    potential, structure = check_offsets("PME")
    assert "torch" not in potential.lennard_jones.path(structure.position)


def check_offsets(method):
    """Numbers at any value of the global ones are OpenMM's, with the gradient of the energy."""
    system, positions = system_with(offsets(method)), sites()
    potential, structure = equal_to_openmm(system, positions)
    assert not hasattr(potential, "unused")
    with torch.no_grad():
        for parameter in potential.parameters():
            parameter.mul_(1.02)
        potential.steric.fill_(0.4)
    written = to_openmm(potential, system)
    assert_equal(potential, structure.position, written, positions)
    potential(structure.position).backward()
    h = 1e-5
    for number in (potential.electric, potential.steric):
        ends = []
        with torch.no_grad():
            for sign in (1, -1):
                number += sign * h
                ends.append(float(potential(structure.position)))
                number -= sign * h
        assert float(number.grad) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)
    return potential, structure


def test_external_forces_of_harmonic_form():
    """A restraint, unless another force has its stiffness: then the number is one of both."""
    for periodic in (False, True):
        system, positions = system_with(steep(periodic)), sites()
        potential, structure = equal_to_openmm(system, positions)
        assert [name for name, _ in potential.named_children()] == ["restraints"]
        # A stiffness of each atom becomes a number of each particle.
        potential.restraints.k = torch.nn.Parameter(torch.tensor([3.0, 2.0]).double())
        assert_equal(potential, structure.position, to_openmm(potential, system), positions)
        bond = openmm.CustomBondForce("k*r^2")
        bond.addGlobalParameter("k", 300.1)
        bond.addBond(0, 1)
        bond.addBond(1, 2)
        system.addForce(bond)
        potential, _ = equal_to_openmm(system, positions)
        assert potential.custom_externals.k is potential.custom_bonds.k
        several = torch.nn.Parameter(torch.ones(2).double())
        potential.custom_externals.k = several
        with pytest.raises(ValueError, match=r"were one tensor and are two"):
            to_openmm(potential, system)
        potential.custom_bonds.k = several
        with pytest.raises(ValueError, match=r"k is a global number .* the potential has \(2,\)"):
            to_openmm(potential, system)
        system.getForce(1).setGlobalParameterDefaultValue(0, 2.0)
        with pytest.raises(ValueError, match=r"number k with the defaults 2 and 300\.1"):
            from_openmm(system, positions)


@pytest.mark.parametrize(
    "text",
    [
        "k*max(0,r-r0)^2;r=periodicdistance(x,y,z,x0,y0,z0)",
        "0.5*k*max(sqrt((x-x0)^2+(y-y0)^2+(z-z0)^2)-r0, 0)^2",
        "(k/2)*step(r-r0)*(r-r0)^2; r=sqrt(dx^2+dy^2+dz^2); dx=x-x0; dy=y-y0; dz=z-z0;",
        "k*d^2; d=max(0, r - r0); r=sqrt((x-x0)^2+(y-y0)^2+(z-z0)^2)",
    ],
)
def test_restraints_to_balls(text):
    system, positions = system_with(balls(text)), sites()
    potential, structure = equal_to_openmm(system, positions)
    assert isinstance(potential.restraints, adjsim.FlatBottomRestraint)
    with torch.no_grad():
        for x in potential.parameters():
            x.mul_(1.02)
    assert_equal(potential, structure.position, to_openmm(potential, system), positions)
    # A radius of each atom becomes a number of each particle.
    potential.restraints.radius = torch.nn.Parameter(torch.tensor([1.0, 1.2, 1.1]).double())
    written = to_openmm(potential, system)
    assert_equal(potential, structure.position, written, positions)
    again, _ = from_openmm(written, positions)
    assert torch.equal(again.restraints.radius, potential.restraints.radius)


@pytest.mark.parametrize(
    "text",
    [
        # A stiffness or a point is named twice, two points, two radii, and other powers.
        "x0*((x-x0)^2+(y-y0)^2+(z-z0)^2)",
        "k*((x-x0)^2+(y-x0)^2+(z-z0)^2)",
        "k*step(r-x0)*(r-r0)^2; r=periodicdistance(x,y,z,x0,y0,z0)",
        "k*max(0,r-r0)^3; r=periodicdistance(x,y,z,x0,y0,z0)",
        "k*max(0,a-r0)^2; a=r+1; r=periodicdistance(x,y,z,x0,y0,z0)",
        "k*step(a-r0)*(b-r0)^2; a=periodicdistance(x,y,z,x0,y0,z0);"
        "b=periodicdistance(x,y,z,z0,y0,x0)",
    ],
)
def test_external_forces_that_are_no_restraints(text):
    system, positions = system_with(balls(text)), sites()
    potential, _ = equal_to_openmm(system, positions)
    assert [name for name, _ in potential.named_children()] == ["custom_externals"]


def missing_atom():
    force = openmm.CustomHbondForce("angle(d1,d2,a1)")
    force.addDonor(0, -1, -1, [])
    force.addAcceptor(3, -1, -1, [])
    return force


def compound(text):
    def make():
        force = openmm.CustomCompoundBondForce(2, text)
        force.addBond([0, 1], [])
        return force

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (compound("1+distance(p1,p3)"), "at place 11: .*p1 p2"),
        (compound("distance(p1,p2)*k"), "names k .*at place 16"),
        (compound("3*4"), "'3.4' reads no coordinate of atoms"),
        (missing_atom, r"donor 0 of the CustomHbondForce has no atom d2.*'angle\(d1,d2,a1\)'"),
        (lambda: openmm.CustomManyParticleForce(3, "r"), "CustomManyParticleForce 'r', force 0"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        from_openmm(system_with(make()), sites())
