"""Sections of ForceField XML files whose numbers are of several rows: sites, solvents, wells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any
from xml.etree.ElementTree import Element, SubElement

import numpy as np

from adjsim.io._openmm.custom import global_numbers
from adjsim.io._openmm.force_field_files import ATOMS
from adjsim.io._openmm.library import forces, particles_of, per_particle_names
from adjsim.io._openmm.sites import numbers_in_files
from adjsim.io._openmm.tables import in_files, tables_of

ROUNDING = 1e-13
"""The relative difference that a change of units makes."""
LENNARD_JONES = "LennardJones"
"""OpenMM's name of the force that a LennardJonesForce makes; that of its 1-4 pairs ends in 14."""
SIZES = "sigma", "epsilon"
COMPUTED = ("SingleParticle", "ParticlePair", "ParticlePairNoExclusions")

Pair = tuple[str, str]
Well = tuple[float, float]


def write_site_rows(root: Element, system: Any, wanted: Any, types: Sequence[str]) -> None:
    """Write the numbers of virtual sites into the rows that have their old numbers."""
    kinds: dict[str, list[Element]] = {}
    for owner in root.iterfind("*/*"):
        atoms = owner.findall("Atom")
        for row in owner.findall("VirtualSite"):
            name, place = row.get("siteName"), row.get("index")
            found = next(x for k, x in enumerate(atoms) if name == x.get("name") or place == str(k))
            kinds.setdefault(found.attrib["type"], []).append(row)
    written: dict[Element, tuple[int, list[float]]] = {}
    before: dict[Element, list[float]] = {}
    for k in (k for k in range(system.getNumParticles()) if system.isVirtualSite(k)):
        names, old = numbers_in_files(system.getVirtualSite(k))
        _, new = numbers_in_files(wanted.getVirtualSite(k))
        for row in kinds.get(types[k], []):
            if set(names) - row.attrib.keys():
                continue
            if before.setdefault(row, [float(row.attrib[name]) for name in names]) != old:
                continue
            first, known = written.setdefault(row, (k, new))
            if not _close(known, new):
                raise ValueError(
                    f"sites {first} and {k} are of one row of the file and have different "
                    f"numbers, {known} and {new}: write one into both."
                )
            for name, x, y in zip(names, old, new, strict=True):
                if not _close([x], [y]):
                    row.set(name, repr(y))


def write_functions(root: Element, wanted: Any) -> None:
    """Write the values of tables into the sections of custom forces."""
    for kind in {part.tag for part in root}:
        sections = root.findall(kind)
        found = [x for x in forces(wanted, kind) if not x.getName().startswith(LENNARD_JONES)]
        # Otherwise a script has made forces of this kind.
        for section, force in zip(sections, found, strict=False):
            tables = dict(tables_of(force)) if len(found) == len(sections) else {}
            for row in section.iterfind("Function"):
                if (table := tables.get(row.attrib["name"])) is None:
                    continue
                values = in_files(table)[1]
                if not _close(values, list(map(float, (row.text or "").split()))):
                    row.text = " ".join(map(repr, values))


def write_solvent_section(
    root: Element, wanted: Any, types: Sequence[str], residues: Mapping[int, Sequence[Element]]
) -> None:
    """Write a CustomGBForce with rows of types, in place of a script or a section of one.

    ``residues`` has the rows of residues that each atom is from, which hold the numbers that differ
    in a type, such as the radii of GBn2.
    """
    for part in [x for x in root if x.tag == "CustomGBForce" or "customgbforces" in (x.text or "")]:
        if part.tag == "Script":
            # The script sets this too.
            part.text = (
                "\nfor force in sys.getForces():\n"
                "    if hasattr(force, 'setReactionFieldDielectric'):\n"
                "        force.setReactionFieldDielectric(1)\n"
            )
        else:
            root.remove(part)
    (force,) = forces(wanted, "CustomGBForce")
    section, names = SubElement(root, "CustomGBForce"), per_particle_names(force)
    for name in names:
        SubElement(section, "PerParticleParameter", name=name)
    for name, value in global_numbers(force):
        SubElement(section, "GlobalParameter", name=name, defaultValue=repr(value))
    of_residues = root.find("NonbondedForce/UseAttributeFromResidue[@name='charge']") is not None
    if of_residues and "charge" in names:
        SubElement(section, "UseAttributeFromResidue", name="charge")
    for name, table in tables_of(force):
        attributes, values = in_files(table)
        row = SubElement(section, "Function", {"name": name, **attributes})
        row.text = " ".join(map(repr, values))
    for k in range(force.getNumComputedValues()):
        name, text, kind = force.getComputedValueParameters(k)
        SubElement(section, "ComputedValue", name=name, type=COMPUTED[kind]).text = text
    for k in range(force.getNumEnergyTerms()):
        text, kind = force.getEnergyTermParameters(k)
        SubElement(section, "EnergyTerm", type=COMPUTED[kind]).text = text
    kept = {k: name for k, name in enumerate(names) if name != "charge" or not of_residues}
    _write_atoms_of_solvent(root, section, kept, particles_of(force), types, residues)


def _write_atoms_of_solvent(
    root: Element,
    section: Element,
    names: dict[int, str],
    numbers: np.ndarray,
    types: Sequence[str],
    residues: Mapping[int, Sequence[Element]],
) -> None:
    """Write numbers into rows of types, and those that differ in a type into rows of residues."""
    first = {kind: k for k, kind in reversed(list(enumerate(types)))}
    differing = {
        i: name
        for i, name in names.items()
        if not _close(numbers[:, i].tolist(), numbers[[first[x] for x in types], i].tolist())
    }
    for i, name in differing.items():
        SubElement(section, "UseAttributeFromResidue", name=name)
        for path in ATOMS:
            for row in root.iterfind(f"*/{path}"):
                if (k := first.get(row.get("type", ""))) is not None:
                    row.set(name, repr(float(numbers[k, i])))
        written: dict[Element, int] = {}
        for k, kind in enumerate(types):
            one = written.setdefault(residues[k][0], k) if k in residues else first[kind]
            if not _close([numbers[one, i]], [numbers[k, i]]):
                raise ValueError(
                    f"{name} of the solvent is {numbers[one, i]:.9g} for atom {one} and "
                    f"{numbers[k, i]:.9g} for atom {k}, which have one row, of the type {kind}: "
                    "write one number into both, or write a system with to_openmm."
                )
            for row in residues.get(k, ()):
                row.set(name, repr(float(numbers[k, i])))
    for kind, k in sorted(first.items(), key=lambda item: item[1]):
        found = {
            name: repr(float(numbers[k, i])) for i, name in names.items() if i not in differing
        }
        SubElement(section, "Atom", {"type": kind, **found})


def wells_of(system: Any, types: Sequence[str]) -> dict[Pair, Well]:
    """Return a and b of ``a / r^12 - b / r^6`` by two types, of a LennardJonesForce."""
    found: dict[Pair, Well] = {}
    for force in _named(system, LENNARD_JONES, "CustomNonbondedForce"):
        kinds = dict(zip(types, particles_of(force)[:, 0].astype(int), strict=True))
        a, b = (
            np.reshape(table.getFunctionParameters()[2], (-1, table.getFunctionParameters()[0]))
            for _, table in tables_of(force)
        )
        for pair in combinations_with_replacement(sorted(kinds), 2):
            m, n = (kinds[kind] for kind in pair)
            found[pair] = float(a[n, m]), float(b[n, m])
    return found


def write_wells(root: Element, system: Any, wanted: Any, types: Sequence[str]) -> None:
    """Write wells of types, and an NBFixPair for each two types whose well is not the mixed one."""
    sections, old = list(root.iterfind("LennardJonesForce")), wells_of(system, types)
    if not old:
        return
    wells, classes = wells_of(wanted, types), _classes(root)
    fixes = _fixed_pairs(sections, old, classes)
    own = {kind: _row_of(kind, sections, classes) for kind in sorted(set(types))}
    changed = {pair: well for pair, well in wells.items() if not _close(old[pair], well)}
    for kind in (x for x in own if (x, x) in changed and (x, x) not in fixes):
        _keep_wells_14(own[kind])
        _set_well(own[kind], wells[kind, kind])
    for kind in (x for x in own if (x, x) in fixes):
        _write_mixed(kind, own, fixes, wells, changed)
    _write_pairs(sections[-1], own, fixes, wells, changed)
    _write_wells_14(system, wanted, types, own, set(fixes))


def _fixed_pairs(
    sections: Sequence[Element], pairs: Iterable[Pair], classes: Mapping[str, str]
) -> dict[Pair, Element]:
    """Return the NBFixPair of each two types that have one."""
    rows = [row for part in sections for row in part.iterfind("NBFixPair")]
    return {pair: row for pair in pairs for row in rows if _matches(row, pair, classes)}


def _row_of(kind: str, sections: Sequence[Element], classes: Mapping[str, str]) -> Element:
    """Return the row of a type, a new one if it had that of its class."""
    *_, row = (
        x
        for part in sections
        for x in part.iterfind("Atom")
        if kind == x.get("type") or classes[kind] == x.get("class", "")
    )
    if "type" not in row.attrib:
        # OpenMM takes the last row of a type.
        row = SubElement(sections[-1], "Atom", {**row.attrib, "type": kind})
        del row.attrib["class"]
    return row


def _keep_wells_14(row: Element) -> None:
    """Write the numbers of the 1-4 pairs of a type, which are those of other pairs without them."""
    for name in SIZES:
        row.attrib.setdefault(f"{name}14", row.attrib[name])


def _write_mixed(
    kind: str,
    own: Mapping[str, Element],
    fixes: Mapping[Pair, Element],
    wells: Mapping[Pair, Well],
    changed: Mapping[Pair, Well],
) -> None:
    """Write the numbers of a type with an NBFixPair of two such atoms, which mixing alone reads.

    They are those that give the well with the first type whose own well is that of its numbers.
    """
    free = (x for x in own if x != kind and (x, x) not in fixes)
    pairs = {other: _ordered(kind, other) for other in free}
    mixed = (x for x, pair in pairs.items() if pair not in fixes and min(wells[pair]) > 0)
    other = next(mixed, None)
    if other is None or pairs[other] not in changed:
        return
    _keep_wells_14(own[kind])
    (a, b), (size, depth) = wells[pairs[other]], (float(own[other].attrib[x]) for x in SIZES)
    own[kind].set("sigma", repr(2 * (a / b) ** (1 / 6) - size))
    own[kind].set("epsilon", repr((b * b / (4 * a)) ** 2 / depth))


def _write_pairs(
    section: Element,
    own: Mapping[str, Element],
    fixes: dict[Pair, Element],
    wells: Mapping[Pair, Well],
    changed: Mapping[Pair, Well],
) -> None:
    """Write the changed wells of two types with an NBFixPair, and of those that need one now."""
    for pair, well in wells.items():
        if pair not in fixes and not _close(_mixed(*(own[kind] for kind in pair)), well):
            fixes[pair] = SubElement(
                section, "NBFixPair", type1=pair[0], type2=pair[1], sigma="1", epsilon="0"
            )
            _set_well(fixes[pair], well)
        elif pair in fixes and pair in changed:
            _set_well(fixes[pair], well)


def _mixed(one: Element, other: Element) -> Well:
    """Return the well that mixing the rows of two types gives."""
    (s1, e1), (s2, e2) = ([float(x.attrib[name]) for name in SIZES] for x in (one, other))
    sigma6, depth = ((s1 + s2) / 2) ** 6, 4 * math.sqrt(e1 * e2)
    return depth * sigma6 * sigma6, depth * sigma6


def _write_wells_14(
    system: Any, wanted: Any, types: Sequence[str], own: dict[str, Element], fixed: set[Any]
) -> None:
    """Write the numbers of types from which the wells of 1-4 pairs are mixed."""
    found: dict[Pair, Well] = {}
    changed = False
    for one, other in zip(
        *(_named(x, f"{LENNARD_JONES}14", "CustomBondForce") for x in (system, wanted)), strict=True
    ):
        for k in range(one.getNumBonds()):
            i, j, new = other.getBondParameters(k)
            pair = _ordered(types[int(i)], types[int(j)])
            changed |= not _close(one.getBondParameters(k)[2], new)
            if pair not in fixed:
                found[pair] = new
    if not changed or not found:
        return
    kinds = sorted({kind for pair in found for kind in pair})
    each = np.zeros((len(found), len(kinds)))
    for row, pair in zip(each, found, strict=True):
        for kind in pair:
            row[kinds.index(kind)] += 0.5
    for name, values in zip(SIZES, zip(*found.values(), strict=True), strict=True):
        start = [float(own[kind].get(f"{name}14", own[kind].attrib[name])) for kind in kinds]
        target = np.array(values)
        if name == "epsilon":
            # Depths are mixed as the root of a product; those of zero stay.
            with np.errstate(divide="ignore"):
                start, target = np.log(start), np.log(target)
        used = np.isfinite(target)
        rest = target[used] - each[used] @ np.where(np.isfinite(start), start, 0.0)
        new = start + np.linalg.lstsq(each[used], rest, rcond=None)[0]
        for kind, x in zip(kinds, np.exp(new) if name == "epsilon" else new, strict=True):
            own[kind].set(f"{name}14", repr(float(x)))


def _set_well(row: Element, well: Well) -> None:
    """Write sigma and epsilon of a well; one without depth keeps its sigma."""
    a, b = well
    if a == b == 0:
        row.set("epsilon", "0")
        return
    if not (a > 0 and b > 0):
        raise ValueError(
            f"the well {a:.9g} / r^12 - {b:.9g} / r^6 of the row {row.attrib} has no sigma and "
            "epsilon, which both numbers must be positive for: write a system with to_openmm."
        )
    row.set("sigma", repr((a / b) ** (1 / 6)))
    row.set("epsilon", repr(b * b / (4 * a)))


def _ordered(one: str, other: str) -> Pair:
    return (one, other) if one <= other else (other, one)


def _classes(root: Element) -> dict[str, str]:
    """Return the class of each type."""
    return {x.attrib["name"]: x.attrib["class"] for x in root.iterfind("AtomTypes/Type")}


def _matches(row: Element, pair: Pair, classes: Mapping[str, str]) -> bool:
    """Return whether an NBFixPair is of two types, in either order."""

    def holds(end: str, kind: str) -> bool:
        given = row.get(f"type{end}"), row.get(f"class{end}")
        return kind == given[0] or (given[0] is None and classes[kind] == given[1])

    one, other = pair
    return (holds("1", one) and holds("2", other)) or (holds("1", other) and holds("2", one))


def _named(system: Any, name: str, kind: str) -> list[Any]:
    return [x for x in forces(system, kind) if x.getName() == name]


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(x, y, rel_tol=ROUNDING) for x, y in zip(one, other, strict=True))
