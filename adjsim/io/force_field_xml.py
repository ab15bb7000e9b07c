"""Fitted numbers as a ForceField XML file of OpenMM."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import torch

from adjsim.core.durable.files import replacing
from adjsim.io._openmm.force_field_files import (
    Slot,
    Use,
    make_system,
    merged,
    residue_rows,
    slots_of,
    uses_of,
)
from adjsim.io._openmm.force_field_sections import (
    LENNARD_JONES,
    ROUNDING,
    wells_of,
    write_functions,
    write_site_rows,
    write_solvent_section,
    write_wells,
)
from adjsim.io._openmm.library import forces, openmm
from adjsim.io._openmm.maps import map_values
from adjsim.io._openmm.solvents import read_solvents
from adjsim.io.openmm import refuse_unwritable, to_openmm
from adjsim.potentials.bonded.maps import TorsionMap
from adjsim.potentials.force_field import ForceFieldPotential

SAME = 1e-12
"""The relative difference of a system of the file from the potential that is allowed."""
SCALES = {"coulomb14scale": "coulomb_14", "lj14scale": "lennard_jones_14"}
# The options of createSystem that scripts of solvents read, and no section of one.
IN_EXPRESSIONS = "soluteDielectric", "solventDielectric", "implicitSolventKappa", "sasaMethod"
# Parts whose forces a script or a program adds to a system.
WITHOUT_SECTION = {
    "custom_compounds": "CustomCompoundBondForce",
    "custom_centroids": "CustomCentroidBondForce",
    "custom_externals": "CustomExternalForce",
    "restraints": "CustomExternalForce",
}
# The place in a row of an improper torsion of each atom of its term: the centre is third.
CENTRE_FIRST = (2, 0, 1, 3)


def write_force_field(
    path: str | Path,
    potential: ForceFieldPotential,
    topology: Any,
    files: Sequence[str | Path],
    **options: Any,
) -> None:
    """Write fitted numbers by type, as one ForceField XML file of OpenMM.

    The file is a copy of the files that the force field was made of, with the fitted numbers in the
    rows that they came from::

        field = app.ForceField("amber14-all.xml")
        system = field.createSystem(topology, constraints=None)
        potential, molecule = from_openmm(system, positions, topology)
        ...  # a fit
        write_force_field("mine.xml", potential, topology, ["amber14-all.xml"], constraints=None)
        system = app.ForceField("mine.xml").createSystem(topology, constraints=None)

    So the fitted numbers serve other molecules with the same types. A row that holds for any atom
    (``type1=""``), with terms whose numbers differ after the fit, stays, and each of these terms
    has a row of its types beside it.

    Written are the numbers of bonds, angles, torsions, Urey-Bradley terms, custom bonded terms,
    hydrogen bonds and custom pairs (of types, global ones and tables), maps of torsions, charges
    (of types or of residues), sigma, epsilon and the two 1-4 scales, virtual sites, and charges,
    radii and scales of a ``GBSAOBCForce``. OpenMM's files have no section for the forces of
    ``custom_compounds``, ``custom_centroids``, ``custom_externals`` and ``restraints``; changed
    numbers of them are refused. Three are written so:

    - A changed solvent of ``implicit/*.xml``, whose numbers a script computes, becomes a
      ``CustomGBForce`` with a row for each type of the topology. Numbers that differ in a type, as
      radii of GBn2 do, are in the rows of residues. Its expressions have the settings of
      ``options`` in them: kappa, permittivities, the surface term and the cutoff. So leave
      ``implicitSolventKappa``, ``soluteDielectric``, ``solventDielectric`` and ``sasaMethod`` out
      of ``createSystem`` of the written file, which refuses them. A changed ``CustomGBForce`` of
      another form is written so too, if the system has one alone.
    - Changed wells of CHARMM's ``LennardJonesForce`` become sigma and epsilon of types, and an
      ``NBFixPair`` of two types whose well is not the mixed one.
    - Changed 1-4 wells of it become ``sigma14`` and ``epsilon14`` of types, if mixing gives them.
      OpenMM takes an ``NBFixPair`` for 1-4 pairs of its types too.

    Lengths of constraints must be as they were; :func:`to_openmm` writes them into a system. Parts
    that were added to the potential after it was read belong to no force of OpenMM, and are not
    written.

    The file is read by OpenMM before it is kept: the system that it makes of the topology has to
    have every number of the potential to 1e-12. It is written whole or not at all.

    Args:
        path: the file to write.
        potential: of :func:`from_openmm`, of the system that the files make of the topology.
        topology: the ``openmm.app.Topology``.
        files: the names that ``app.ForceField`` was given.
        options: those of ``createSystem``.

    Raises:
        ImportError: OpenMM is not installed.
        TypeError: ``files`` is an ``app.ForceField``, which does not keep its files; another
            potential than one of :func:`from_openmm`.
        ValueError: a name of no file; a potential of another system; terms of one row with
            different numbers; a changed number that has no row; numbers that are not finite.
    """
    if hasattr(files, "createSystem"):
        raise TypeError(
            "files are the names of XML files, as ForceField takes them; a ForceField does not "
            "keep them."
        )
    names = [files] if isinstance(files, (str, Path)) else list(files)
    root = merged(names)
    refuse_unwritable("write_force_field", potential)
    system = make_system(root, topology, options)
    try:
        wanted = to_openmm(potential, system)
    except ValueError as error:
        raise ValueError(
            "the potential is not of the system that these files make of this topology with these "
            f"options of createSystem: {error}"
        ) from error
    parts: dict[str, Any] = dict(potential.named_children())
    _refuse_parts_of_no_file(parts, system)
    uses, types = uses_of(root, topology, options, wanted)
    residues = residue_rows(root, uses)
    _write_rows(root, uses, types)
    _write_scales(root, parts)
    _write_maps(root, parts.get("maps"), wanted)
    write_functions(root, wanted)
    write_site_rows(root, system, wanted, types)
    write_wells(root, system, wanted, types)
    if len(forces(wanted, "CustomGBForce")) == 1 and _changed(system, parts):
        write_solvent_section(root, wanted, types, residues)
        # OpenMM refuses options that nothing in a file reads.
        options = {name: x for name, x in options.items() if name not in IN_EXPRESSIONS}
    origin = Element("Info")
    ElementTree.SubElement(origin, "Source").text = f"{', '.join(map(str, names))}: fitted"
    root.insert(0, origin)
    ElementTree.indent(root, " ")
    with replacing(Path(path)) as temporary:
        ElementTree.ElementTree(root).write(temporary, encoding="utf-8")
        found = make_system(ElementTree.parse(temporary).getroot(), topology, options)
        _check(found, wanted, parts, types)


def _refuse_parts_of_no_file(parts: dict[str, Any], system: Any) -> None:
    """Refuse parts of forces that files have no section for and that no script of them adds."""
    found: dict[str, list[str]] = {}
    for name in parts:
        if kind := WITHOUT_SECTION.get(re.sub(r"_\d+$", "", name)):
            found.setdefault(kind, []).append(name)
    for kind, names in found.items():
        if len(names) > len(forces(system, kind)):
            raise _no_section(kind, f"the part {names[-1]!r}")


def _no_section(kind: str, lost: str) -> ValueError:
    return ValueError(
        f"OpenMM's ForceField files have no section for a {kind}, so {lost} would be lost: write "
        "the system openmm.XmlSerializer.serialize(to_openmm(potential, system)) instead."
    )


def _write_rows(root: Element, uses: dict[int, list[Use]], types: list[str]) -> None:
    """Write the numbers of terms into their rows, and rows of types beside those for any atom."""
    slots = slots_of(root)
    parents = {row: part for part in root for row in part}
    rows: dict[Element, list[tuple[Slot, list[Use]]]] = {}
    for k, found in uses.items():
        rows.setdefault(slots[k].elements[0], []).append((slots[k], found))
    for row, columns in rows.items():
        differing = [_differing(found) for _, found in columns]
        if not any(differing):
            for slot, found in columns:
                if not math.isclose(slot.value, found[0].value, rel_tol=ROUNDING):
                    slot.write(found[0].value)
            continue
        ends = [x for name, x in row.attrib.items() if name.startswith(("type", "class"))]
        if row.tag not in ("Proper", "Improper") or "" not in ends:
            slot = next(slot for (slot, _), bad in zip(columns, differing, strict=True) if bad)
            raise _one_row(row, slot, next(bad for bad in differing if bad))
        parent = parents[row]
        place = list(parent).index(row) + 1
        parent[place:place] = _split(row, columns, types)


def _split(row: Element, columns: list[tuple[Slot, list[Use]]], types: list[str]) -> list[Element]:
    """Return rows of types for the terms of a row for any atom."""
    groups: dict[tuple[str, ...], Element] = {}
    written: dict[tuple[Element, str], Use] = {}
    for slot, found in columns:
        for use in found:
            ends = tuple(types[k] for k in use.atoms)
            if row.tag == "Improper":
                ends = tuple(ends[k] for k in CENTRE_FIRST)
            else:
                ends = min(ends, ends[::-1])
            if ends not in groups:
                groups[ends] = copy.deepcopy(row)
                for k, name in enumerate(ends, 1):
                    groups[ends].attrib.pop(f"class{k}", None)
                    groups[ends].set(f"type{k}", name)
            one = groups[ends]
            other = written.setdefault((one, slot.attribute), use)
            if differ := _differing([other, use]):
                raise _one_row(one, slot, differ)
            Slot([one], slot.attribute).write(use.value)
    return list(groups.values())


def _differing(uses: Sequence[Use]) -> tuple[Use, Use] | None:
    """Return two uses with different values, if there are any."""
    pairs = pairwise(sorted(uses, key=lambda use: use.value))
    return next(
        ((x, y) for x, y in pairs if not math.isclose(x.value, y.value, rel_tol=ROUNDING)), None
    )


def _one_row(row: Element, slot: Slot, uses: tuple[Use, Use]) -> ValueError:
    (one, x), (other, y) = uses
    text = ElementTree.tostring(row, encoding="unicode").strip()
    first, second = ("-".join(map(str, atoms)) for atoms in (one, other))
    return ValueError(
        f"{slot.attribute} of the row {text} is {x:.9g} for atoms {first} and {y:.9g} for atoms "
        f"{second}, in OpenMM's units, and a row has one number: write one number, such as their "
        "mean, into both in place (terms that are read with the topology share theirs, charges do "
        "not), or write a system with to_openmm."
    )


def _write_scales(root: Element, parts: dict[str, Any]) -> None:
    """Write the factors of 1-4 pairs."""
    for name, part in SCALES.items():
        found = list(root.iterfind("NonbondedForce")) if part in parts else []
        if not found:
            continue
        value = parts[part].scale.item()
        # OpenMM takes the first one.
        if not math.isclose(float(found[0].attrib[name]), value, rel_tol=ROUNDING):
            for force in found:
                force.set(name, repr(value))


def _write_maps(root: Element, part: TorsionMap | None, wanted: Any) -> None:
    """Write the maps of torsions, which have the numbers of a system in the order of the file."""
    if part is None:
        return
    force = forces(wanted, "CMAPTorsionForce")[0]
    for k, element in enumerate(root.iterfind("CMAPTorsionForce/Map")):
        text = (element.text or "").split()
        element.text = " ".join(
            old if math.isclose(float(old), new, rel_tol=ROUNDING) else repr(new)
            for old, new in zip(text, map_values(force, k), strict=True)
        )


def _changed(system: Any, parts: dict[str, Any]) -> str | None:
    """Return the first number of the solvent that a system has otherwise than the potential."""
    for part, solvent in read_solvents(system, None, {}).items():
        for name, x in solvent.state_dict().items():
            expected = attrgetter(name)(parts[part]).detach().to(x)
            if not torch.allclose(x, expected, rtol=SAME, atol=0):
                return f"{name} of the {part}"
    return None


def _check(found: Any, wanted: Any, parts: dict[str, Any], types: Sequence[str]) -> None:
    """Refuse a system that has not the numbers of the potential."""
    write = openmm().XmlSerializer.serialize
    one, other = (ElementTree.fromstring(write(x)) for x in (found, wanted))
    # A script adds its force after all others, and a section where it stands.
    for part in (x for element in (one, other) for x in element.iterfind("Forces")):
        for solvent in part.findall("Force[@type='CustomGBForce']"):
            part.remove(solvent)
    for old, new in zip(one.iterfind("Forces/Force"), other.iterfind("Forces/Force"), strict=False):
        kind = new.attrib["type"]
        if kind in WITHOUT_SECTION.values() and (reason := _difference(old, new, "")):
            raise _no_section(kind, reason)
    reason = _difference(one, other, "") or _changed(found, parts)
    wells, expected = (wells_of(x, types) for x in (found, wanted))
    for pair, well in expected.items():
        if reason is None and not all(map(_near, wells[pair], well)):
            reason = f"the well of the types {' and '.join(pair)}"
    if reason is not None:
        raise ValueError(
            f"the file cannot hold every number of the potential: {reason} would differ. Numbers "
            "without a row in the file (lengths of constraints, wells of 1-4 pairs that no mixing "
            "gives), and strengths of zero, cannot be written: hold them with "
            "requires_grad_(False), or write a system with to_openmm."
        )


def _difference(found: Element, wanted: Element, where: str) -> str | None:
    """Return the name of the first number that differs.

    Tables of types are compared by the wells in them.
    """
    if wanted.get("name") == LENNARD_JONES:
        return None
    where = f"{where} {wanted.attrib.get('type') or wanted.tag}".strip()
    if len(found) != len(wanted):
        return f"the number of terms of {where}"
    for name, x in wanted.attrib.items():
        y = found.attrib.get(name, "")
        # The size of a pair without a well has no effect.
        empty = name == "sig" and found.attrib["eps"] == wanted.attrib["eps"] == "0"
        if x != y and not _close(x, y) and not empty:
            return f"{name} of {where}, {x} in the potential and {y} in the file,"
    for k, (one, other) in enumerate(zip(found, wanted, strict=True)):
        reason = _difference(one, other, f"{where} {k}" if where else "")
        if reason is not None:
            return reason
    return None


def _close(x: str, y: str) -> bool:
    try:
        return _near(float(x), float(y))
    except ValueError:
        return False


def _near(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=SAME)
