"""Force fields from OpenMM, and their fitted numbers back to OpenMM.

OpenMM itself is needed when a system is read or written: ``pip install 'adjsim[openmm]'``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from ase import units
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from adjsim.core.reading import read
from adjsim.dynamics.constraints.distances import DistanceConstraints
from adjsim.io._openmm.bonded import read_bonded, write_bonded
from adjsim.io._openmm.constraints import read_constraints, warn_of_bonds, write_constraints
from adjsim.io._openmm.custom import read_custom, write_custom
from adjsim.io._openmm.custom_pairs import read_custom_pairs, write_custom_pairs
from adjsim.io._openmm.external import read_external, write_external
from adjsim.io._openmm.hydrogen_bonds import read_hydrogen_bonds, write_hydrogen_bonds
from adjsim.io._openmm.library import (
    atoms_of,
    barostat_of,
    box_of_system,
    check_system,
    lengths,
    masses_of,
)
from adjsim.io._openmm.maps import read_maps, write_maps
from adjsim.io._openmm.nonbonded import read_nonbonded, write_nonbonded
from adjsim.io._openmm.sites import check_sites, read_sites, write_sites
from adjsim.io._openmm.solvents import read_solvents, write_solvents
from adjsim.io._openmm.types import Names
from adjsim.io.ase import Structure
from adjsim.potentials.force_field import ForceFieldPotential, refuse_high_energy
from adjsim.potentials.sites.force_field import SitedForceField


def from_openmm(
    system: Any, positions: Any, topology: Any = None
) -> tuple[ForceFieldPotential, Structure]:
    """Read the force field of an ``openmm.System``, in eV, angstrom and amu::

        U = sum over bonds, angles, torsions, ... of their energies, as OpenMM computes them

    Each number of the force field is an ``nn.Parameter`` of the potential, except multiplicities,
    permittivities, cutoffs, settings of Ewald sums, weights of atoms in groups and scales of
    offsets. A part is there if the system has it:

    ==================== =================================== ====================================
    part                 parameters                          OpenMM
    ==================== =================================== ====================================
    bonds                k, length                           HarmonicBondForce
    angles               k, angle                            HarmonicAngleForce
    torsions             k, phase                            PeriodicTorsionForce
    ryckaert_bellemans   coefficients                        RBTorsionForce
    maps                 energy                              CMAPTorsionForce
    custom_bonds         those of its expression             CustomBondForce
    custom_angles        those of its expression             CustomAngleForce
    custom_torsions      those of its expression             CustomTorsionForce
    custom_compounds     those of its expression             CustomCompoundBondForce
    custom_centroids     those of its expression             CustomCentroidBondForce
    custom_externals     those of its expression             CustomExternalForce
    hydrogen_bonds       those of its expression             CustomHbondForce
    custom_pairs         those of its expression             CustomNonbondedForce
    long_range           those of custom_pairs               its long-range correction
    restraints           k, position, radius                 a CustomExternalForce of the form of
                                                             PositionRestraint or
                                                             FlatBottomRestraint
    lennard_jones        epsilon, sigma                      NonbondedForce
    coulomb              charge                              NonbondedForce, every method
    lennard_jones_14     scale                               its exceptions
    coulomb_14           scale                               its exceptions
    pairs_14             epsilon, sigma, product             its exceptions
    dispersion           those of lennard_jones              its dispersion correction
    solvent              radius, scale, surface, offset,     GBSAOBCForce, or a CustomGBForce of
                         alpha, beta, gamma, neck            ``implicit/*.xml``
    solvent              those of its expressions            any other CustomGBForce
    sites                weight, cross, point                virtual sites, see below
    ==================== =================================== ====================================

    The name of a parameter begins with its part, such as ``bonds.k``. A second force of a custom
    class is the part ``custom_bonds_2``. Numbers of expressions have OpenMM's units and names. A
    tabulated function f of an expression has its values in ``custom_compounds.f.values``.

    The global numbers of parameter offsets are those of the potential itself, by their names in
    OpenMM, such as ``potential.lambda_sterics``. The charges, wells and exceptions of offsets are
    parametrisations: ``coulomb.charge`` follows the global numbers, and
    ``coulomb.parametrizations.charge.original`` is the number without offsets. Such a potential is
    copied by ``copy.deepcopy`` and ``state_dict``; torch pickles no parametrised module. The
    dispersion correction follows the global numbers, while a context of OpenMM keeps that of their
    defaults.

    With a topology, terms of a part that have identical numbers and join the same elements (in
    either direction) are of one type, and a parameter has one number for each type.
    ``potential.labels["bonds"]`` names the first term of each type, such as "ALA N-CA". Without a
    topology each term has numbers of its own, but Lennard-Jones numbers, which are mixed by the
    rules of Lorentz and Berthelot, are by sets of identical numbers. Charges, radii and scales are
    by atom.

    Exceptions with zero charge product and zero epsilon are exclusions. If the numbers of all
    others are the combined numbers of their atoms times one factor for charges and one for epsilon,
    as in Amber, they are scaled pairs, with the two factors as parameters. Otherwise they are pairs
    with numbers of their own. In the reciprocal part of Ewald sums their atoms are nearest images
    of each other, while OpenMM takes positions as they are; this is the same for whole molecules
    that are smaller than half the box. Bonded terms take nearest images only if their force is
    periodic.

    Constraints, such as those of ``constraints=HBonds, rigidWater=True``, are
    ``Structure.constraints``, which do not require grad. A run needs them: OpenMM leaves the bonds
    and the angles that they fix out of the system, so the potential alone does not hold these atoms
    together. The dynamics is ``Constrained(Langevin(potential, structure.mass, kT, friction),
    structure.constraints)``, with :class:`~adjsim.Constrained`. A bond on a constrained pair, which
    ``flexibleConstraints=True`` leaves in, is part of the energy, as in OpenMM. Its force is along
    the constraint and changes no motion; a warning tells of such bonds.

    A potential with virtual sites is a :class:`~adjsim.potentials.SitedForceField` of the atoms
    with mass. Positions, masses, symbols and constraints of the structure are theirs, in the order
    of the system, and its ``all_positions(position)`` gives every particle. Numbers of charges and
    the like are those of all particles. ``potential.sites`` has the sites by kind:
    ``two_particle_average``, ``three_particle_average``, ``out_of_plane``, ``local_coordinates``.
    Sites are placed on the atoms, wherever the positions have them. The weight of the first atom of
    a site is no parameter: it is what the others leave of one.

    Where hydrogen bonds have a list, its ``hydrogen_bonds.capacity`` in compiled loops is 1.5 times
    the number of pairs at these positions.

    The solvent shares the charges of ``coulomb`` if they are equal. A CMMotionRemover is ignored. A
    MonteCarloBarostat is no potential: its pressure and temperature are ``Structure.pressure`` and
    ``.temperature``, for :class:`~adjsim.LangevinPiston`.

    Args:
        system: an ``openmm.System``.
        positions: ``(particles, 3)``, an OpenMM Quantity or, as in OpenMM, numbers in nanometres.
        topology: the ``openmm.app.Topology``, for elements, names and types. Without it, elements
            are those of the nearest mass.

    Returns:
        The potential, and the positions, masses, box, symbols, constraints and sites. Momenta are
        zero; give ``dynamics.init`` a position only to draw them. Positions are those given;
        ``init`` of :class:`~adjsim.Constrained` moves them to where the constraints hold.

    Raises:
        ImportError: OpenMM is not installed.
        TypeError: not an ``openmm.System``.
        ValueError: anything in the system that has no counterpart, by name (particles
            without mass that are no virtual sites, which OpenMM does not move, sites of other kinds
            or on sites, other forces and barostats); a constraint that holds a site, constraints
            that :class:`~adjsim.DistanceConstraints` refuses; positions or a topology
            for another number of atoms; an energy of 1e6 eV, or 100 eV an atom, or more, which
            tells of wrong units.
    """
    check_system(system)
    check_sites(system)
    masses = masses_of(system)
    particles = torch.from_numpy(lengths("positions", positions))
    if len(particles) != len(masses):
        raise ValueError(f"positions are of {len(particles)} atoms; the system has {len(masses)}.")
    names = Names.of(masses, topology)
    shared: dict[str, nn.Parameter] = {}
    bonded = (
        read_bonded(system, names)
        | read_maps(system, names)
        | read_custom(system, names, shared)
        | read_external(system, names, shared)
    )
    nonbonded, labels, numbers = read_nonbonded(system, names, shared)
    parts: dict[str, Any] = {name: part for name, (part, _) in bonded.items()} | nonbonded
    # Charges with offsets are not those of the solvent.
    charged = "coulomb" in parts and not is_parametrized(parts["coulomb"], "charge")
    parts |= read_solvents(system, parts["coulomb"].charge if charged else None, shared)
    parts |= read_hydrogen_bonds(system, particles, shared)
    parts |= read_custom_pairs(system, shared)
    if not parts:
        raise ValueError("the system has no forces.")
    labels |= {name: types.labels for name, (_, types) in bonded.items()}
    atoms = atoms_of(system)
    kept, (sites, types) = list(atoms), read_sites(system, names, atoms)
    if sites is None:
        potential = ForceFieldPotential(labels, **parts)
    else:
        potential = SitedForceField(sites, labels | types, **parts)
    potential.add_numbers(numbers)
    position = particles[kept]
    with torch.no_grad():
        refuse_high_energy(potential, position, potential(position))
    box, (bar, kelvin) = box_of_system(system), barostat_of(system)
    constraints = read_constraints(system, atoms)
    if constraints is not None and "bonds" in parts:
        warn_of_bonds(torch.tensor(kept)[constraints.index], parts["bonds"].index)
    return potential, Structure(
        position,
        torch.zeros_like(position),
        torch.tensor(masses, dtype=torch.float64)[kept],
        None if box is None else torch.from_numpy(box),
        tuple(names.symbols[k] for k in kept),
        None if bar is None else bar * units.bar,
        kelvin,
        constraints,
        sites,
    )


def to_openmm(
    potential: ForceFieldPotential, system: Any, constraints: DistanceConstraints | None = None
) -> Any:
    """Write fitted numbers into a copy of the system that they were read from.

    The system itself is not changed. Cutoffs, permittivities, multiplicities and masses are those
    of the system. :func:`write_force_field` writes a file by types of atoms.

    Args:
        potential: from :func:`from_openmm`, with the same terms, after a fit for instance.
        system: the ``openmm.System`` that it was read from.
        constraints: those of the system, with fitted lengths; None leaves its lengths as they are.

    Returns:
        An ``openmm.System``.

    Raises:
        TypeError: not a :class:`~adjsim.potentials.ForceFieldPotential`.
        ValueError: a system with other terms, exceptions, constraints, sites or atoms; several
            numbers where the force has a global one; numbers that a ``GBSAOBCForce`` has not, or
            that the potential refuses.
    """
    refuse_unwritable("to_openmm", potential)
    check_system(system)
    check_sites(system)
    written = copy.deepcopy(system)
    parts: dict[str, Any] = dict(potential.named_children())
    write_bonded(parts, written)
    write_maps(parts.get("maps"), written)
    write_custom(parts, written)
    write_external(parts, written)
    write_hydrogen_bonds(parts, written)
    write_custom_pairs(parts, written)
    write_nonbonded(parts, written)
    write_solvents(parts, written)
    write_sites(parts.get("sites"), written)
    if constraints is not None:
        write_constraints(constraints, written)
    return written


def refuse_unwritable(name: str, potential: Any) -> None:
    """Refuse another potential than a force field's, and numbers that the potential refuses.

    Such numbers, as a table of pairs that is not symmetric, would have another meaning in OpenMM.
    """
    if not isinstance(potential, ForceFieldPotential):
        raise TypeError(
            f"{name} takes the potential of from_openmm; got {type(potential).__name__}."
        )
    for parameter, x in potential.named_parameters():
        if not bool(torch.isfinite(x).all()):
            raise ValueError(
                f"{parameter} has numbers that are not finite; go back to those before the fit "
                "failed."
            )
    read(potential)
