"""Build alanine dipeptide, a helix of 20 residues and a box of flexible water.

The peptides are placed atom by atom from bond lengths, angles and dihedrals. Lengths
and angles are the equilibrium values of Amber's parm99 (Cornell et al., J. Am. Chem.
Soc. 117, 5179 (1995)), which ff14SB keeps, so that the structures are close to a
minimum of such a force field. Atom names are Amber's.

The water has the geometry of SPC/Fw (Wu, Tepper and Voth, J. Chem. Phys. 124, 024503
(2006)), on a cubic lattice at 1 g/cm^3, in random orientations. ``spcfw.xml`` is this
model for OpenMM.

Run ``python examples/data/build_dipeptide.py`` to write the three files again.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent

# Lengths in angstrom, by the atoms that they join.
C_N, N_C, C_C, C_CT = 1.335, 1.449, 1.522, 1.526
C_O, N_H, C_H = 1.229, 1.010, 1.090
# Angles in degrees, by their three atoms, CT a saturated carbon.
CT_C_N, C_N_CT, N_CT_C, CT_C_O = 116.6, 121.9, 110.1, 120.4
C_N_H, N_CT_CT, X_CT_H = 120.0, 109.7, 109.5
# Dihedrals of substituents at a tetrahedral carbon, relative to the chain.
TURN = 120.0

# Each atom: name, the three atoms that place it (bonded to the first), length, angle,
# dihedral. A minus sign marks an atom of the residue before. Dihedrals phi, psi and
# omega are filled in.
METHYL_FIRST = [
    ("CH3", (), 0.0, 0.0, 0.0),
    ("C", ("CH3",), C_C, 0.0, 0.0),
    ("O", ("C", "CH3"), C_O, CT_C_O, 0.0),
    ("HH31", ("CH3", "C", "O"), C_H, X_CT_H, 0.0),
    ("HH32", ("CH3", "C", "O"), C_H, X_CT_H, TURN),
    ("HH33", ("CH3", "C", "O"), C_H, X_CT_H, -TURN),
]
CHAIN = [
    ("N", ("-C", "-CA", "-N"), C_N, CT_C_N, "psi"),
    ("CA", ("N", "-C", "-CA"), N_C, C_N_CT, "omega"),
    ("H", ("N", "-C", "-CA"), N_H, C_N_H, "omega+180"),
    ("C", ("CA", "N", "-C"), C_C, N_CT_C, "phi"),
    ("O", ("C", "CA", "N"), C_O, CT_C_O, "psi+180"),
]
ALANINE = [
    ("CB", ("CA", "N", "-C"), C_CT, N_CT_CT, "phi-120"),
    ("HA", ("CA", "N", "-C"), C_H, X_CT_H, "phi+120"),
    ("HB1", ("CB", "CA", "N"), C_H, X_CT_H, 180.0),
    ("HB2", ("CB", "CA", "N"), C_H, X_CT_H, 180.0 + TURN),
    ("HB3", ("CB", "CA", "N"), C_H, X_CT_H, 180.0 - TURN),
]
GLYCINE = [
    ("HA2", ("CA", "N", "-C"), C_H, X_CT_H, "phi+120"),
    ("HA3", ("CA", "N", "-C"), C_H, X_CT_H, "phi-120"),
]
METHYL_LAST = [
    ("N", ("-C", "-CA", "-N"), C_N, CT_C_N, "psi"),
    ("H", ("N", "-C", "-CA"), N_H, C_N_H, "omega+180"),
    ("CH3", ("N", "-C", "-CA"), N_C, C_N_CT, "omega"),
    ("HH31", ("CH3", "N", "-C"), C_H, X_CT_H, 180.0),
    ("HH32", ("CH3", "N", "-C"), C_H, X_CT_H, 180.0 + TURN),
    ("HH33", ("CH3", "N", "-C"), C_H, X_CT_H, 180.0 - TURN),
]
RESIDUES = {
    "ACE": METHYL_FIRST,
    "ALA": CHAIN + ALANINE,
    "GLY": CHAIN + GLYCINE,
    "NME": METHYL_LAST,
}
# The atoms of the cap at the start that stand for those of a residue.
CAP = {"CA": "CH3", "N": "O"}

# SPC/Fw, and the mass of a molecule in amu.
OH, HOH, WATER_MASS = 1.012, 113.24, 18.0154
AVOGADRO = 6.02214076e23


def place(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, r: float, theta: float, phi: float
):
    """Place d at distance r of a, with the angle d, a, b and the dihedral to c."""
    theta, phi = math.radians(theta), math.radians(phi)
    along = (a - b) / np.linalg.norm(a - b)
    normal = np.cross(b - c, along)
    normal /= np.linalg.norm(normal)
    across = np.cross(normal, along)
    direction = np.array(
        [
            -math.cos(theta),
            math.sin(theta) * math.cos(phi),
            math.sin(theta) * math.sin(phi),
        ]
    )
    return a + r * (
        direction[0] * along + direction[1] * across + direction[2] * normal
    )


def build(sequence: list[str], phi: float, psi: float, omega: float = 180.0):
    """Build a chain: number, residue and name of each atom, positions in angstrom."""
    atoms: list[tuple[int, str, str]] = []
    placed: list[dict[str, np.ndarray]] = []
    for number, residue in enumerate(sequence):
        here: dict[str, np.ndarray] = {}

        def find(name: str, here=here) -> np.ndarray:
            if not name.startswith("-"):
                return here[name]
            before, name = placed[-1], name[1:]
            return before[name if name in before else CAP[name]]

        for name, references, r, theta, dihedral in RESIDUES[residue]:
            points = [find(reference) for reference in references]
            if len(points) == 0:
                here[name] = np.zeros(3)
            elif len(points) == 1:
                here[name] = points[0] + np.array([r, 0.0, 0.0])
            elif len(points) == 2:
                off = points[1] + np.array([0.0, 1.0, 0.0])
                here[name] = place(*points, off, r, theta, 0.0)
            else:
                here[name] = place(
                    *points,
                    r,
                    theta,
                    angle_of(dihedral, residue, number, phi, psi, omega),
                )
            atoms.append((number + 1, residue, name))
        placed.append(here)
    return atoms, np.array([placed[k - 1][name] for k, _, name in atoms])


def angle_of(
    dihedral, residue: str, number: int, phi: float, psi: float, omega: float
) -> float:
    """Return a dihedral in degrees."""
    if not isinstance(dihedral, str):
        return dihedral
    if dihedral == "psi" and number == 1:
        # After the cap, the dihedral is to its oxygen.
        return 180.0
    for name, value in (("phi", phi), ("psi", psi), ("omega", omega)):
        if dihedral.startswith(name):
            return value + float(dihedral[len(name) :] or 0.0)
    raise ValueError(f"unknown dihedral {dihedral!r} of {residue}")


def water(side: int = 6, seed: int = 0):
    """Build side^3 molecules of water on a lattice: atoms, positions, and the edge."""
    generator = np.random.default_rng(seed)
    edge = (side**3 * WATER_MASS / AVOGADRO * 1e24) ** (1 / 3)
    half = math.radians(HOH) / 2
    molecule = OH * np.array(
        [
            [0, 0, 0],
            [math.sin(half), math.cos(half), 0],
            [-math.sin(half), math.cos(half), 0],
        ]
    )
    atoms, positions = [], []
    for k in range(side**3):
        corner = np.array([k // side**2, k // side % side, k % side])
        turn, _ = np.linalg.qr(generator.standard_normal((3, 3)))
        atoms += [(k + 1, "HOH", name) for name in ("O", "H1", "H2")]
        positions.append(molecule @ turn + (corner + 0.5) * edge / side)
    return atoms, np.concatenate(positions), edge


def write_pdb(
    name: str, atoms, positions: np.ndarray, edge: float | None = None
) -> None:
    """Write a PDB file."""
    lines = []
    if edge is not None:
        lines.append(
            "CRYST1" + 3 * f"{edge:9.3f}" + 3 * f"{90:7.2f}" + " P 1           1"
        )
    record = "ATOM  " if edge is None else "HETATM"
    for k, ((number, residue, atom), q) in enumerate(
        zip(atoms, positions, strict=True), 1
    ):
        x = "".join(f"{value:8.3f}" for value in q)
        padded = f" {atom:<3s}" if len(atom) < 4 else atom
        lines.append(
            f"{record}{k:5d} {padded} {residue:>3s} A{number:4d}    {x}"
            f"  1.00  0.00          {atom[0]:>2s}"
        )
    (HERE / name).write_text("\n".join([*lines, "END", ""]))


if __name__ == "__main__":
    # Both dihedrals extended (C5), a minimum of the dipeptide in vacuum.
    write_pdb("dipeptide.pdb", *build(["ACE", "ALA", "NME"], phi=-150.0, psi=155.0))
    # An alpha helix: Arnott and Dover, J. Mol. Biol. 30, 209 (1967).
    helix = build(["ACE", *["ALA", "GLY"] * 9, "NME"], phi=-57.4, psi=-47.5)
    write_pdb("peptide.pdb", *helix)
    write_pdb("water.pdb", *water())
