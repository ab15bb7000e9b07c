"""Constraints of an ``openmm.System``."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from adjsim.core.openmm_units import LENGTH
from adjsim.dynamics.constraints.distances import DistanceConstraints
from adjsim.io._openmm.library import atoms_of, plain


def read_constraints(system: Any, atoms: dict[int, int]) -> DistanceConstraints | None:
    """Read the constraints of a system, in their order; None without any.

    ``atoms`` are the numbers among atoms with mass, by particle.
    """
    rows = _rows(system)
    if not rows:
        return None
    length = torch.tensor([plain(length) for _, _, length in rows], dtype=torch.float64)
    return DistanceConstraints([[atoms[i], atoms[j]] for i, j, _ in rows], LENGTH * length)


def warn_of_bonds(constrained: Tensor, bonds: Tensor) -> None:
    """Tell of bonds, ``(n, 2)``, on constrained pairs, which change no motion."""
    held = {tuple(pair) for pair in constrained.sort(-1).values.tolist()}
    both = [pair for pair in bonds.sort(-1).values.tolist() if tuple(pair) in held]
    if both:
        warnings.warn(
            f"constraints hold the pairs of harmonic bonds, such as that of atoms {both[0][0]} and "
            f"{both[0][1]} ({len(both)} in all). These bonds add to the energy and change no "
            "motion. flexibleConstraints=True leaves them in a system.",
            stacklevel=3,
        )


def write_constraints(constraints: DistanceConstraints, system: Any) -> None:
    """Write lengths into the constraints of a system, whose pairs they are."""
    rows, atoms = _rows(system), atoms_of(system)
    pairs = [[atoms[i], atoms[j]] for i, j, _ in rows]
    if constraints.index.tolist() != pairs:
        raise ValueError(
            "the constraints of the system are not of the pairs of these constraints: give the "
            "system that they were read from."
        )
    lengths = constraints.length.detach().cpu().double().expand(len(pairs)) / LENGTH
    for k, ((i, j, _), length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        system.setConstraintParameters(k, i, j, length)


def _rows(system: Any) -> list[Any]:
    return [system.getConstraintParameters(k) for k in range(system.getNumConstraints())]
