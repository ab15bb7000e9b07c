"""Trajectories as DCD and XTC files, by OpenMM's own writers."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from ase import units

from adjsim.core.box import rows_of
from adjsim.core.durable.files import replacing
from adjsim.core.openmm_units import LENGTH
from adjsim.core.trajectory import Trajectory
from adjsim.io._openmm.library import application, openmm
from adjsim.io.ase import Structure, boxes_of, positions_of_one

PICOSECOND = 1000 * units.fs
EVEN = 1e-6
"""The largest part of an interval by which a save time may be off the even one."""
LARGEST_DENOMINATOR = 1000
"""The intervals into which the one between frames is divided at most, to begin at a whole one."""


def write_trajectory(
    path: str | Path, trajectory: Trajectory[Any], structure: Structure, topology: Any
) -> None:
    """Write a trajectory as DCD or XTC, and its topology as a PDB file beside it.

    MDTraj and MDAnalysis read them together::

        write_trajectory("run.xtc", run, molecule, pdb.topology)
        mdtraj.load("run.xtc", top="run.pdb")
        MDAnalysis.Universe("run.pdb", "run.xtc")

    Times are in picoseconds. Names of residues, atoms and chains are those of the topology. The PDB
    file has the positions of the first frame. Every particle is written, virtual sites too, and the
    box of each frame. Both files are written whole or not at all, and those that have their names
    are replaced. DCD has float32, XTC thousandths of a nanometre. Neither has momenta: for these
    use :func:`to_ase` and ``adjsim.io.write``.

    Args:
        path: the file, ending in .dcd or .xtc.
        trajectory: of one system, in ASE's units, at evenly spaced and increasing times.
        structure: of :func:`from_openmm`.
        topology: the ``openmm.app.Topology``.

    Raises:
        ImportError: OpenMM is not installed.
        ValueError: another suffix; a batch; a topology of another number of atoms; times that are
            not evenly spaced, do not increase, or begin at no multiple of a thousandth of their
            interval; positions that are not finite.
    """
    path, app = Path(path), application()
    if path.suffix not in (".dcd", ".xtc"):
        raise ValueError(f"write_trajectory writes .dcd and .xtc; got {path.name!r}.")
    position = positions_of_one("write_trajectory", trajectory, structure)
    with torch.no_grad():
        # OpenMM's writer of XTC takes memory for row by row, whatever its strides are.
        particles = (structure.all_positions(position) / LENGTH).contiguous()
    if topology.getNumAtoms() != particles.shape[1]:
        raise ValueError(
            f"the topology has {topology.getNumAtoms()} atoms and the trajectory "
            f"{particles.shape[1]}: give the topology that the system was made from."
        )
    interval, first, steps = _clock((trajectory.times.double().cpu() / PICOSECOND).tolist())
    boxes = [_vectors(box) for box in boxes_of(trajectory, structure)]
    topology = copy.deepcopy(topology)
    topology.setPeriodicBoxVectors(boxes[0])
    with replacing(path) as temporary, replacing(path.with_suffix(".pdb")) as named:
        with named.open("w") as text:
            app.PDBFile.writeFile(topology, LENGTH * particles[0].numpy(), text, keepIds=True)
        # The writer of XTC takes names alone, and that of DCD open files.
        with temporary.open("r+b") as opened:
            given = str(temporary) if path.suffix == ".xtc" else opened
            kind = app.XTCFile if path.suffix == ".xtc" else app.DCDFile
            file = kind(given, topology, interval / steps, first, steps)
            for frame, box in zip(particles.numpy(), boxes, strict=True):
                file.writeModel(frame, periodicBoxVectors=box)


def _clock(times: list[float]) -> tuple[float, int, int]:
    """Return the interval of even times, and the first time and the interval in whole steps."""
    interval = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    if len(times) > 1 and not interval > 0:
        raise ValueError(
            f"the save times must increase; they go from {times[0]:g} to {times[-1]:g} ps."
        )
    for k, time in enumerate(times):
        if abs(time - times[0] - k * interval) > EVEN * interval:
            raise ValueError(
                f"a DCD or XTC file has evenly spaced times, and save time {k} is {time:g} ps, not "
                f"{times[0] + k * interval:g} ps: save at even times, or write with to_ase and "
                "adjsim.io.write, which keep any times."
            )
    interval = interval or abs(times[0]) or 1.0
    share = Fraction(times[0] / interval).limit_denominator(LARGEST_DENOMINATOR)
    if abs(float(share) * interval - times[0]) > EVEN * interval:
        raise ValueError(
            f"a DCD or XTC file begins at a whole number of steps, and the first save time, "
            f"{times[0]:g} ps, is no multiple of a thousandth of the interval, {interval:g} ps: "
            "begin at zero."
        )
    return interval, share.numerator, share.denominator


def _vectors(box: torch.Tensor | None) -> Any:
    """Return the box as OpenMM's vectors in nanometres."""
    if box is None:
        return None
    rows = rows_of(box.detach().cpu().double()) / LENGTH
    unit = openmm().unit.nanometer
    return tuple(openmm().Vec3(*row) for row in rows.tolist()) * unit
