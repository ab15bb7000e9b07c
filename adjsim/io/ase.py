"""Structures from ASE, trajectories to ASE, and calculators both ways."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import ase
import ase.io
import numpy as np
import torch
from ase.calculators.calculator import Calculator, all_changes
from ase.io.formats import filetype
from torch import Tensor

from adjsim.core.box import rows_of, volume
from adjsim.core.durable.files import replacing
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.strain import Strain
from adjsim.core.trajectory import Trajectory
from adjsim.core.typing import Energies, Positions
from adjsim.dynamics.constraints.distances import DistanceConstraints
from adjsim.potentials.base import Potential, force
from adjsim.potentials.evaluated import terms_of
from adjsim.potentials.products import Pullback
from adjsim.potentials.sites.virtual_sites import VirtualSites

# Columns of velocities that extended XYZ files have. ASE reads momenta alone.
VELOCITIES = ("vel", "velo", "velocity", "velocities")


class Structure(NamedTuple):
    """Atoms with their positions, momenta, masses, box and symbols, in ASE's units.

    ``position`` and ``momentum`` are ``(atoms, 3)``, ``mass`` is ``(atoms,)``. ``box`` is ``(3,)``
    edge lengths, ``(3, 3)`` rows, or None without periodic boundaries. ``pressure`` (eV/angstrom^3)
    and ``temperature`` (kelvin) are those of a barostat, None without one. ``constraints`` are for
    :class:`~adjsim.Constrained`, None without any, and ``sites`` are the virtual sites of the
    potential, which are no atoms of the structure; only ``from_openmm`` reads them.
    """

    position: Tensor
    momentum: Tensor
    mass: Tensor
    box: Tensor | None
    symbols: tuple[str, ...]
    pressure: float | None = None
    temperature: float | None = None
    constraints: DistanceConstraints | None = None
    sites: VirtualSites | None = None

    def all_positions(self, position: Positions) -> Positions:
        """Compute the positions of all particles, ``(*batch, particles, 3)``, in their order.

        They are those of the atoms, as given, without virtual sites. Places of sites are
        differentiable in positions and in the numbers of the sites.
        """
        return position if self.sites is None else self.sites(position)


def from_ase(atoms: ase.Atoms) -> Structure:
    """Take the numbers of an ``ase.Atoms``, as float64 tensors.

    Raises:
        ValueError: no atoms, numbers that are not finite, a cell that is periodic along some axes
            only, or without a volume, velocities in a column whose unit is not known, constraints.
    """
    if len(atoms) == 0:
        raise ValueError("the ase.Atoms has no atoms.")
    if atoms.constraints:
        held = ", ".join(sorted({type(x).__name__ for x in atoms.constraints}))
        raise ValueError(
            f"the ase.Atoms has constraints ({held}), which are not read: what they hold would "
            "move. Call atoms.set_constraint() to leave them out; adjsim.Constrained holds "
            "distances."
        )
    _refuse_unread_velocities(atoms)
    position, momentum = atoms.get_positions(), atoms.get_momenta()
    refuse_not_finite("position", position)
    refuse_not_finite("momentum", momentum)
    q, p, mass = map(torch.from_numpy, (position, momentum, atoms.get_masses()))
    return Structure(q, p, mass, box_of(atoms), tuple(atoms.get_chemical_symbols()))


def refuse_not_finite(name: str, values: np.ndarray) -> None:
    """Refuse numbers ``(atoms, 3)`` that are not finite."""
    bad = np.flatnonzero(~np.isfinite(values).all(1))
    if len(bad):
        raise ValueError(
            f"the {name} of atom {bad[0]} is {values[bad[0]].tolist()}, which is not finite."
        )


def _refuse_unread_velocities(atoms: ase.Atoms) -> None:
    """Refuse velocities that ASE keeps in a column of a file's own, beside zero momenta.

    Some programs write these columns in angstrom / fs, others in ASE's unit.
    """
    if atoms.get_momenta().any():
        return
    for name in VELOCITIES:
        if name in atoms.arrays and atoms.arrays[name].any():
            column = f"atoms.arrays[{name!r}]"
            raise ValueError(
                f"the ase.Atoms has velocities in {column} and no momenta, and ASE does not know "
                f"the unit of this column. Call atoms.set_velocities({column}) if the unit is "
                f"ASE's, atoms.set_velocities({column} / ase.units.fs) if the unit is angstrom/fs "
                f"(as GPUMD writes), or del {column}."
            )


def box_of(atoms: ase.Atoms) -> Tensor | None:
    """Return edge lengths of an orthogonal cell, rows of a tilted one, None without periodicity."""
    if not atoms.pbc.any():
        return None
    if not atoms.pbc.all():
        raise ValueError(
            "the cell is periodic along some axes only; make it periodic along all three, or none."
        )
    cell = np.array(atoms.cell)
    if not volume(torch.from_numpy(cell)) > 0:
        raise ValueError(
            f"the atoms are periodic and their cell {cell.tolist()} has no volume: set the cell, "
            "or pbc=False."
        )
    return torch.from_numpy(shortest_box(cell))


def shortest_box(rows: np.ndarray) -> np.ndarray:
    """Return the edge lengths of a cell if it is orthogonal, and its rows otherwise."""
    lengths = np.diag(rows)
    return rows if np.abs(rows - np.diag(lengths)).max() > 1e-12 else lengths.copy()


def to_ase(trajectory: Trajectory[Any], structure: Structure) -> list[ase.Atoms]:
    """Make an ``ase.Atoms`` of each frame, with momenta, cell and the time in ``info["time"]``.

    Args:
        trajectory: of one system, in ASE's units.
        structure: the symbols, masses and box. At constant pressure it is the box of the potential,
            which the strain of each frame stretches.

    Raises:
        ValueError: a trajectory of a batch, without frames, or of another number of atoms.
    """
    position = positions_of_one("to_ase", trajectory, structure)
    momentum = getattr(trajectory, "momentum", None)
    frames, boxes = list[ase.Atoms](), boxes_of(trajectory, structure)
    for k, (time, box) in enumerate(zip(trajectory.times.tolist(), boxes, strict=True)):
        framed = structure._replace(box=box)
        atoms = _atoms(framed, positions=position[k].numpy(), info={"time": time})
        if momentum is not None:
            atoms.set_momenta(momentum[k].detach().cpu().double().numpy())
        frames.append(atoms)
    return frames


def positions_of_one(what: str, trajectory: Trajectory[Any], structure: Structure) -> Tensor:
    """Return the positions of a trajectory of one system, and refuse those of a batch."""
    position = trajectory.position.detach().cpu().double()
    expected = (len(structure.symbols), 3)
    if position.ndim != 3 or tuple(position.shape[1:]) != expected:
        raise ValueError(
            f"{what} takes a trajectory of one system, (time, atoms, 3) with {expected[0]} atoms; "
            f"got position of shape {tuple(position.shape)}. For a batch, set the positions "
            "of one replica in an ase.Atoms."
        )
    return position


def boxes_of(trajectory: Trajectory[Any], structure: Structure) -> list[Tensor | None]:
    """Return the box of each frame, which a strain stretches."""
    strain, box = getattr(trajectory, "strain", None), structure.box
    if strain is None or box is None:
        return [box] * len(trajectory.times)
    own = box.detach().cpu()
    stretched = (Strain.of(own, x.detach().cpu().double()).stretched(own) for x in strain)
    return [x.reshape(own.shape) for x in stretched]


def _atoms(structure: Structure, **more: Any) -> ase.Atoms:
    symbols, box = list(structure.symbols), structure.box
    masses = structure.mass.detach().cpu().expand(len(symbols)).numpy()
    cell = None if box is None else rows_of(box.detach().cpu().double()).numpy()
    return ase.Atoms(symbols=symbols, masses=masses, cell=cell, pbc=box is not None, **more)


def write(path: str | Path, frames: Sequence[ase.Atoms], **options: Any) -> None:
    """Write frames with ASE, in the format of the file name, whole or not at all.

    Args:
        path: the file; a file of this name is replaced when the new one is complete.
        frames: see :func:`to_ase`.
        options: of ``ase.io.write``, such as ``format``.
    """
    path = Path(path)
    options.setdefault("format", filetype(str(path), read=False))
    with replacing(path) as temporary:
        ase.io.write(str(temporary), list(frames), **options)


class ASECalculator(Calculator):
    """An ASE calculator of a potential: energy, forces, and the stress of a periodic box.

    Args:
        potential: takes positions in angstrom to an energy in eV. Its box, if it has one, has to be
            the cell of the atoms.

    Raises:
        ValueError: when atoms are calculated whose cell is not the potential's box.
    """

    def __init__(self, potential: torch.nn.Module) -> None:
        super().__init__()
        self.implemented_properties = ["energy", "forces", "stress"]
        self.potential = potential

    def calculate(
        self,
        atoms: ase.Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Evaluate the potential, as ASE's calculators do."""
        super().calculate(atoms, list(properties), list(system_changes))
        assert isinstance(self.atoms, ase.Atoms)
        box = box_of(self.atoms)
        _check_box(self.potential, box)
        tensors = chain(self.potential.parameters(), self.potential.buffers())
        device = next((x.device for x in tensors), None)
        position = torch.from_numpy(self.atoms.get_positions()).to(device)
        with torch.no_grad():
            self.results = {
                "energy": float(self.potential(position)),
                "forces": force(self.potential, position).cpu().numpy(),
            }
            if "stress" in properties:
                if box is None or not isinstance(self.potential, Potential):
                    raise ValueError("the stress needs a pair potential with a periodic box.")
                stress = -self.potential.virial(position).cpu() / volume(box)
                self.results["stress"] = stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]].numpy()


class ASEPotential(Potential):
    """The energy and the forces of an ASE calculator, as reference values without a gradient.

    Use it to make data, or to run dynamics without a gradient. It runs on the CPU, one system at a
    time.

    Args:
        calculator: an ASE calculator. It has no derivative with respect to parameters, and its
            forces have no derivative at all.
        structure: the symbols, masses and box of the atoms.

    Raises:
        TypeError: in a backward pass through the energy or the forces.
    """

    def __init__(self, calculator: Any, structure: Structure) -> None:
        super().__init__()
        self.calculator, self.structure = calculator, structure

    def forward(self, position: Positions) -> Energies:
        return _WithoutDerivative.apply(position, self._evaluated(position)[0], self._refusal)

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        return _WithoutDerivative.apply(position, self._evaluated(position)[1], self._refusal)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        raise self._refusal

    @property
    def _refusal(self) -> TypeError:
        return TypeError(
            f"the numbers of {type(self.calculator).__name__}, an ASE calculator, have no "
            "derivative. Run it under torch.no_grad(), and use its numbers as data."
        )

    def _evaluated(self, position: Tensor) -> tuple[Tensor, Tensor]:
        atoms = _atoms(self.structure)
        atoms.calc = self.calculator
        energies, forces = list[float](), list[Tensor]()
        for system in position.detach().cpu().double().reshape(-1, *position.shape[-2:]):
            atoms.set_positions(system.numpy())
            energies.append(float(atoms.get_potential_energy()))
            forces.append(torch.from_numpy(np.array(atoms.get_forces())))
        energy = torch.tensor(energies, dtype=torch.float64).reshape(position.shape[:-2])
        return energy.to(position), torch.stack(forces).reshape(position.shape).to(position)


class _WithoutDerivative(torch.autograd.Function):
    """A value that depends on the position, and raises an error when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, position: Tensor, value: Tensor, refusal: TypeError) -> Tensor:
        ctx.refusal = refusal
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.refusal


def _check_box(potential: torch.nn.Module, box: Tensor | None) -> None:
    """Refuse a potential whose box is not that of the atoms, up to the choice of its rows."""
    for part in terms_of(potential):
        own: Tensor | None = getattr(part, "box", None)
        if not hasattr(part, "box") or (own is None and box is None):
            continue
        if own is None:
            raise ValueError(
                "the atoms are periodic and the potential has no box. Make the potential with "
                "box=from_ase(atoms).box."
            )
        if box is None:
            raise ValueError("the potential has a periodic box and the atoms are not periodic.")
        cell, given = rows_of(box), rows_of(own.detach().cpu().double())
        integers = cell @ torch.linalg.inv(given)
        whole = integers.round()
        off = float((integers - whole).abs().max())
        if max(off, abs(float(volume(whole)) - 1)) > 1e-9:
            raise ValueError(
                f"the cell of the atoms is {cell.tolist()}, and the potential's box is "
                f"{given.tolist()}. Make the potential with box=from_ase(atoms).box."
            )
