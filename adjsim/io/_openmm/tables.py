"""The tabulated functions of custom forces of an ``openmm.System``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from adjsim.io._openmm.library import plain
from adjsim.potentials.bonded.tabulated import (
    ContinuousFunction,
    DiscreteFunction,
    TabulatedFunction,
)

KINDS = {
    f"{kind}{count}DFunction": (kind == "Continuous", count)
    for kind in ("Continuous", "Discrete")
    for count in (1, 2, 3)
}


def read_tables(force: Any) -> dict[str, TabulatedFunction]:
    """Read the tables of a force, with their values as parameters, by name."""
    return {name: _read(table) for name, table in tables_of(force)}


def write_tables(part: nn.Module, force: Any) -> None:
    """Write the values of a part's functions into the tables of a force."""
    for name, table in tables_of(force):
        function: Any = getattr(part, name)
        if not isinstance(function, TabulatedFunction):
            continue
        values = function.values.detach().cpu().double().numpy()
        smooth, count = KINDS[type(table).__name__]
        if smooth and function.periodic:
            values = np.pad(values, [(0, 1)] * count, mode="wrap")
        sizes = values.shape if count > 1 else ()
        _, limits, _ = _parts(table)
        table.setFunctionParameters(*sizes, values.flatten("F").tolist(), *limits)


def tables_of(force: Any) -> list[tuple[str, Any]]:
    """Return the tables of a force by name."""
    if not hasattr(force, "getNumTabulatedFunctions"):
        return []
    return [
        (force.getTabulatedFunctionName(k), force.getTabulatedFunction(k))
        for k in range(force.getNumTabulatedFunctions())
    ]


def in_files(table: Any) -> tuple[dict[str, str], list[float]]:
    """Return the attributes and the values of a table in a ForceField file."""
    values, limits, periodic = _parts(table)
    smooth, count = KINDS[type(table).__name__]
    axes = "xyz"[:count] if count > 1 else ("",)
    found = {"type": type(table).__name__.removesuffix("Function")}
    if count > 1:
        found |= {f"{axis}size": str(size) for axis, size in zip(axes, values.shape, strict=True)}
    if smooth:
        ends = (f"{axis}{end}" for axis in axes for end in ("min", "max"))
        found |= dict(zip(ends, map(repr, limits), strict=True)) | {"periodic": str(periodic)}
    return found, values.flatten("F").tolist()


def _parts(table: Any) -> tuple[np.ndarray, list[float], bool]:
    """Return values, limits (low and high of each axis) and whether it is periodic."""
    smooth, count = KINDS[type(table).__name__]
    given = table.getFunctionParameters()
    # One that has values alone is given without a list around them.
    rows = list(given) if smooth or count > 1 else [given]
    sizes = tuple(rows.pop(0) for _ in range(count)) if count > 1 else (len(rows[0]),)
    values, *limits = rows
    values = np.array(plain(values), dtype=np.float64).reshape(sizes, order="F")
    periodic = bool(table.getPeriodic()) if smooth else False
    return values, [float(plain(x)) for x in limits[: 2 * count]], periodic


def _read(table: Any) -> TabulatedFunction:
    values, limits, periodic = _parts(table)
    if periodic:
        # The last value of each axis is the first one.
        values = values[(slice(-1),) * values.ndim]
    parameter = nn.Parameter(torch.from_numpy(values.copy(order="C")))
    if not limits:
        return DiscreteFunction(parameter)
    return ContinuousFunction(parameter, limits[::2], limits[1::2], periodic=periodic)
