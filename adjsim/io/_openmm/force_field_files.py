"""ForceField XML files of OpenMM: several of them as one, and the row that each number is from."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from adjsim.io._openmm.custom import global_numbers
from adjsim.io._openmm.library import application, kind_of, plain

SECTIONS = ("AtomTypes", "Residues", "Patches")
"""Parts of which OpenMM reads one in a file."""
FORCES = {
    "HarmonicBondForce": ("Bond",),
    "HarmonicAngleForce": ("Angle",),
    "AmoebaUreyBradleyForce": ("UreyBradley",),
    "PeriodicTorsionForce": ("Proper", "Improper"),
    "RBTorsionForce": ("Proper", "Improper"),
    "CustomBondForce": ("Bond", "GlobalParameter"),
    "CustomAngleForce": ("Angle", "GlobalParameter"),
    "CustomTorsionForce": ("Proper", "Improper", "GlobalParameter"),
    "CustomNonbondedForce": ("Atom", "GlobalParameter"),
    "CustomHbondForce": ("Donor", "Acceptor", "GlobalParameter"),
    "NonbondedForce": ("Atom",),
    "GBSAOBCForce": ("Atom",),
}
"""Parts with rows of numbers, and the rows."""
ATOMS = ("Residue/Atom", "Patch/AddAtom", "Patch/ChangeAtom")
TERMS = {
    "HarmonicBondForce": {"Bond": 2},
    "HarmonicAngleForce": {"Angle": 3},
    "PeriodicTorsionForce": {"Torsion": 4},
    "RBTorsionForce": {"Torsion": 4},
    "CustomBondForce": {"Bond": 2},
    "CustomAngleForce": {"Angle": 3},
    "CustomTorsionForce": {"Torsion": 4},
    "CustomNonbondedForce": {"Particle": 0},
    "CustomHbondForce": {"Donor": 3, "Acceptor": 3},
    "NonbondedForce": {"Particle": 0},
    "GBSAOBCForce": {"Particle": 0},
}
"""Forces with terms, OpenMM's words for a term and the number of atoms that each begins with."""
MARK = 10.0**9
"""Numbers from here on are marks. OpenMM doubles those of Urey-Bradley terms."""


class Slot(NamedTuple):
    """A number of a file: an attribute of elements that have to agree in it."""

    elements: list[Element]
    attribute: str

    @property
    def value(self) -> float:
        return float(self.elements[0].attrib[self.attribute])

    def write(self, value: float) -> None:
        for element in self.elements:
            element.set(self.attribute, repr(value))


class Use(NamedTuple):
    """A number of a term of a system: its atoms, and the value that it shall have."""

    atoms: tuple[int, ...]
    value: float


def merged(files: Sequence[str | Path]) -> Element:
    """Read files as ``ForceField(*files)`` does, and those that they include, into one element."""
    root = Element("ForceField")
    sections = {name: ElementTree.SubElement(root, name) for name in SECTIONS}
    for tree in _trees(files):
        for part in tree:
            if part.tag not in (*SECTIONS, "Include"):
                root.append(part)
        for name, section in sections.items():
            found = tree.find(name)
            section.extend([] if found is None else found)
    return root


def _trees(files: Sequence[str | Path]) -> Iterator[Element]:
    left = [str(name) for name in files]
    folders = application().forcefield._getDataDirectories()
    # The list grows while it is read.
    for name in left:
        path = next(
            (p for p in (name, *(os.path.join(f, name) for f in folders)) if os.path.isfile(p)),
            None,
        )
        if path is None:
            raise ValueError(
                f"{name!r} is no file, and none of OpenMM's own: give the names of XML files, as "
                "ForceField takes them."
            )
        tree = ElementTree.parse(path).getroot()
        yield tree
        for included in tree.findall("Include"):
            beside = os.path.join(os.path.dirname(path), included.attrib["file"])
            wanted = beside if os.path.isfile(beside) else included.attrib["file"]
            if wanted not in left:
                left.append(wanted)


def make_system(root: Element, topology: Any, options: dict[str, Any]) -> Any:
    """Make the system of a topology by the force field of an element."""
    field = application().ForceField(io.BytesIO(ElementTree.tostring(root)))
    return field.createSystem(topology, **options)


def slots_of(root: Element) -> list[Slot]:
    """Return the numbers of a file that terms may be from.

    Residues with the same atoms share theirs, and so do equal atoms of patches: of two templates
    that match a residue, OpenMM takes any if they are identical, and refuses them if they are not.
    """
    shared: dict[Any, Slot] = {}
    rows = list[Slot]()
    for path in ATOMS:
        parent, _, child = path.partition("/")
        for owner in root.iterfind(f"*/{parent}"):
            atoms = [(atom, tuple(sorted(atom.attrib.items()))) for atom in owner.findall(child)]
            whole = tuple(sorted(key for _, key in atoms)) if parent == "Residue" else child
            for atom, key in atoms:
                for name in sorted(atom.attrib.keys() - {"name", "type"}):
                    shared.setdefault((whole, key, name), Slot([], name)).elements.append(atom)
    for force, tags in FORCES.items():
        for row in (row for part in root.iterfind(force) for row in part if row.tag in tags):
            rows += [Slot([row], name) for name, x in row.attrib.items() if _varies(force, name, x)]
    return list(shared.values()) + rows


def residue_rows(root: Element, uses: Mapping[int, Sequence[Use]]) -> dict[int, list[Element]]:
    """Return the rows of residues and patches from which the charge of each atom is."""
    slots, found = slots_of(root), dict[int, list[Element]]()
    for k, used in uses.items():
        if slots[k].attribute == "charge" and "name" in slots[k].elements[0].attrib:
            found |= {use.atoms[0]: slots[k].elements for use in used}
    return found


def _varies(force: str, name: str, text: str) -> bool:
    """Return whether an attribute is a number of a term; terms without strength are left out."""
    if name.startswith(("type", "class", "periodicity")) or name == "name":
        return False
    always = force.startswith("Custom") or force in ("NonbondedForce", "GBSAOBCForce")
    return always or not name.startswith("k") or float(text) != 0


def uses_of(
    root: Element, topology: Any, options: dict[str, Any], system: Any
) -> tuple[dict[int, list[Use]], list[str]]:
    """Return the numbers of a system by the slot that they are from, and the types of its atoms.

    OpenMM itself finds the rows: it makes the system again from a copy in which each number is the
    mark of its slot, and each mass that of its type.
    """
    marked = copy.deepcopy(root)
    for k, slot in enumerate(slots_of(marked)):
        slot.write(MARK + k)
    names: dict[str, int] = {}
    for kind in marked.iterfind("AtomTypes/Type"):
        kind.set("mass", repr(MARK + names.setdefault(kind.attrib["name"], len(names))))
    options = {name: value for name, value in options.items() if name != "hydrogenMass"}
    found = make_system(marked, topology, options)
    uses: dict[int, list[Use]] = {}
    for force, wanted in zip(found.getForces(), system.getForces(), strict=True):
        for (atoms, marks), (_, values) in zip(_terms(force), _terms(wanted), strict=True):
            for mark, value in zip(marks, values, strict=True):
                factor = mark // MARK
                if factor > 0:
                    use = Use(atoms, value / factor)
                    uses.setdefault(round(mark / factor - MARK), []).append(use)
    types = list(names)
    masses = (plain(found.getParticleMass(k)) for k in range(found.getNumParticles()))
    return uses, [types[round(mass - MARK)] for mass in masses]


def _terms(force: Any) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    """Yield atoms and numbers of each term, in OpenMM's units."""
    words = TERMS.get(kind_of(force), {})
    for word, members in words.items():
        get = getattr(force, f"get{word}Parameters")
        for k in range(getattr(force, f"getNum{word}s")()):
            row = list(get(k))
            # A donor or an acceptor of fewer than three atoms has -1 in place of the others.
            atoms, numbers = [i for i in row[:members] if i >= 0], row[members:]
            if numbers and isinstance(numbers[0], tuple):
                numbers = list(numbers[0])
            yield tuple(atoms or [k]), [plain(x) for x in numbers]
    if words and hasattr(force, "getNumGlobalParameters"):
        yield (), [value for _, value in global_numbers(force)]
