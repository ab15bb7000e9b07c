"""Systems for the command line: the built-in cluster, and structures from files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

import ase
import ase.io
import numpy as np
import torch
from ase import units
from ase.io.formats import UnknownFileTypeError
from torch import Tensor, nn

from adjsim.core.box import perpendicular_widths
from adjsim.io import box_of
from adjsim.potentials.pairs.noble import NOBLE_GASES, LennardJonesMixture
from adjsim.potentials.pairs.powers import LennardJones
from adjsim.potentials.pairs.truncation import ForceShifted, Shifted, Switched, Truncation

# Made from the distance at which a switch starts.
TRUNCATIONS: dict[str, Callable[[float], Truncation]] = {
    "shifted": lambda start: Shifted(),
    "force-shifted": lambda start: ForceShifted(),
    "switched": Switched,
}
# Errors that ASE's readers raise for a file whose content does not match its name.
MALFORMED = (OSError, ValueError, LookupError, AssertionError, RuntimeError, ParseError)
# Where a switch starts by default, in units of the cutoff.
SWITCH_START = 0.9


@dataclass(frozen=True)
class Cutoff:
    """The options of a cutoff.

    Attributes:
        distance: the cutoff; None: the default of the system.
        truncation: how the energy ends there, one of ``TRUNCATIONS``.
        switch_start: the distance from which "switched" switches off; None: 0.9 of the cutoff.
        skin: of the neighbour list; None: chosen by the library.
        room: the largest default in a box, as a share of half its smallest perpendicular width.
    """

    distance: float | None = None
    truncation: str = "shifted"
    switch_start: float | None = None
    skin: float | None = None
    room: float = 1.0

    def arguments(self, default: float | None) -> dict[str, Any]:
        """Return the arguments of a pair potential whose default cutoff is given."""
        distance = default if self.distance is None else self.distance
        if self.truncation not in TRUNCATIONS:
            raise ValueError(
                f"unknown truncation '{self.truncation}'; choose one of {', '.join(TRUNCATIONS)}."
            )
        if self.switch_start is not None and self.truncation != "switched":
            raise ValueError(
                f"--switch-start is for --truncation switched, not for {self.truncation}."
            )
        if distance is not None:
            start = SWITCH_START * distance if self.switch_start is None else self.switch_start
            truncation = TRUNCATIONS[self.truncation](start)
            return {"cutoff": distance, "truncation": truncation, "skin": self.skin}
        if self.truncation != "shifted":
            raise ValueError(f"--truncation {self.truncation} needs a cutoff; give --cutoff.")
        if self.skin is not None:
            raise ValueError("--skin needs a cutoff; give --cutoff.")
        return {}


NO_CUTOFF = Cutoff()


@dataclass(frozen=True)
class System:
    """A Lennard-Jones system: positions, masses, potential, and the units of the command line.

    ``time`` and ``temperature`` are the command line's units of time and temperature, expressed in
    the system's own units (as kT for the temperature). ``species`` are the symbols of a mixture, in
    the order of its parameters.
    """

    name: str
    position: Tensor
    mass: Tensor
    potential: LennardJones
    time: float
    temperature: float
    time_name: str
    temperature_name: str
    species: tuple[str, ...] = ()


def cluster(
    epsilon: float | None = None, sigma: float | None = None, cutoff: Cutoff = NO_CUTOFF
) -> System:
    """Make the 13-atom Lennard-Jones cluster at its icosahedral minimum, in reduced units."""
    atoms = ase.io.read(str(files("adjsim.io") / "data" / "lj13.xyz"))
    assert isinstance(atoms, ase.Atoms)
    depth, scale = (1.0 if x is None else x for x in (epsilon, sigma))
    numbers = [nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (depth, scale)]
    potential = LennardJones(*numbers, **cutoff.arguments(None))
    position, mass = torch.from_numpy(atoms.get_positions() * scale), torch.ones(())
    name = "13-atom Lennard-Jones cluster"
    return System(name, position, mass, potential, 1.0, 1.0, "time units", "epsilon/kB")


def structure(
    path: Path,
    epsilon: float | None = None,
    sigma: float | None = None,
    cutoff: Cutoff = NO_CUTOFF,
) -> System:
    """Read a structure file, in ASE's units: eV, angstrom, amu.

    On the command line times are in femtoseconds and temperatures in kelvin. The file's cell, if it
    has one, is the periodic box. In a box the default cutoff is 3 sigma, or ``cutoff.room`` times
    half the smallest perpendicular width of the box if that is less.
    """
    atoms = _read(path)
    species = tuple(sorted(set(atoms.get_chemical_symbols())))
    potential = _potential(path, atoms, species, epsilon, sigma, cutoff)
    position, mass = torch.from_numpy(atoms.get_positions()), torch.from_numpy(atoms.get_masses())
    name = f"{atoms.get_chemical_formula()} from {path.name}"
    return System(name, position, mass, potential, units.fs, units.kB, "fs", "K", species)


def _read(path: Path) -> ase.Atoms:
    if path.is_dir():
        raise ValueError(f"structure file '{path}' is a folder; give a file in it.")
    if not path.is_file():
        raise ValueError(
            f"structure file '{path}' does not exist; give a file that ASE reads (xyz, extxyz, "
            "pdb, cif)."
        )
    try:
        atoms = ase.io.read(str(path))
    except UnknownFileTypeError:
        raise ValueError(
            f"ASE knows no format of the name '{path.name}'; give a structure as xyz, extxyz, pdb "
            "or cif, with that suffix."
        ) from None
    except (StopIteration, *MALFORMED) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        why = f" ({reason});"
        if isinstance(error, KeyError):
            why = f": it does not know {error}, where a symbol or a name is expected;"
        elif isinstance(error, StopIteration):
            why = ": the file ends before a structure does;"
        raise ValueError(
            f"ASE cannot read a structure from '{path}'{why} is it xyz, extxyz, pdb or cif?"
        ) from error
    if not isinstance(atoms, ase.Atoms) or len(atoms) == 0:
        raise ValueError(f"'{path}' holds no atoms; give a structure with at least two.")
    if len(atoms) < 2:
        raise ValueError(f"'{path}' holds one atom; a pair potential needs at least two.")
    bad = np.flatnonzero(~np.isfinite(atoms.get_positions()).all(1))
    if len(bad):
        place = ", ".join(f"{x:g}" for x in atoms.get_positions()[bad[0]])
        raise ValueError(
            f"'{path}': atom {bad[0]} ({atoms.symbols[bad[0]]}) is at ({place}), which is not "
            "finite; correct the file. Atoms are numbered from 0."
        )
    return atoms


def _potential(
    path: Path,
    atoms: ase.Atoms,
    species: Sequence[str],
    epsilon: float | None,
    sigma: float | None,
    cutoff: Cutoff,
) -> LennardJones:
    symbols = atoms.get_chemical_symbols()
    if (epsilon is None) != (sigma is None):
        given, absent = ("--epsilon", "--sigma") if sigma is None else ("--sigma", "--epsilon")
        raise ValueError(f"{given} was given without {absent}; give both.")
    if epsilon is None or sigma is None:
        unknown = [symbol for symbol in species if symbol not in NOBLE_GASES]
        if unknown:
            first = symbols.index(unknown[0]) + 1
            raise ValueError(
                f"no Lennard-Jones parameters for {', '.join(unknown)} in '{path}' (built in: "
                f"{', '.join(NOBLE_GASES)}); give --epsilon in eV and --sigma in angstrom. The "
                f"first such atom is number {first}."
            )
        gases = [NOBLE_GASES[symbol] for symbol in species]
        epsilons, sigmas = [gas.kelvin * units.kB for gas in gases], [x.angstrom for x in gases]
    else:
        species, symbols, epsilons, sigmas = ["all"], ["all"] * len(symbols), [epsilon], [sigma]
    try:
        box = box_of(atoms)
    except ValueError as error:
        raise ValueError(f"'{path}': {error}") from None
    default = None
    if box is not None:
        half = 0.5 * float(perpendicular_widths(box).min())
        default = min(3.0 * max(sigmas), cutoff.room * half)
    # One number is a scalar.
    values = [torch.tensor(x, dtype=torch.float64).squeeze() for x in (epsilons, sigmas)]
    numbers = [nn.Parameter(value) for value in values]
    options: dict[str, Any] = {"box": box, **cutoff.arguments(default)}
    if len(species) == 1:
        return LennardJones(*numbers, **options)
    index = torch.tensor([species.index(symbol) for symbol in symbols])
    return LennardJonesMixture(index, *numbers, **options)
