"""Tables of the numbers that a fit has changed."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adjsim.core.durable.files import replacing
from adjsim.core.typing import Array, Number


class Change(NamedTuple):
    """A number before and after a fit; ``error`` is None where none was given."""

    parameter: str
    entry: tuple[int, ...]
    label: str
    before: float
    after: float
    error: float | None


@dataclass(frozen=True)
class ParameterChanges:
    """The numbers that a fit has changed, which print as a table.

    Attributes:
        rows: one :class:`Change` a number, in the order of the parameters.
    """

    rows: tuple[Change, ...]

    def save(self, path: str | Path) -> None:
        """Write the table as CSV, with every digit; whole or not at all."""
        with replacing(Path(path)) as temporary, temporary.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(Change._fields)
            for row in self.rows:
                table.writerow([row.parameter, " ".join(map(str, row.entry)), *row[2:]])

    def __str__(self) -> str:
        if not self.rows:
            return "no number has changed"
        errors = any(row.error is not None for row in self.rows)
        cells = [list(Change._fields)]
        for row in self.rows:
            numbers = ["" if x is None else f"{x:.6g}" for x in row[3:]]
            cells.append([row.parameter, " ".join(map(str, row.entry)), row.label, *numbers])
        kept = [k for k in range(6) if (k < 5 or errors) and any(row[k] for row in cells[1:])]
        widths = [max(len(row[k]) for row in cells) for k in kept]
        text = StringIO()
        for row in cells:
            columns = zip(kept, widths, strict=True)
            line = "  ".join(f"{row[k]:{'<' if k < 3 else '>'}{width}}" for k, width in columns)
            text.write(line.rstrip() + "\n")
        return text.getvalue().rstrip()


def parameter_changes(
    before: nn.Module | Mapping[str, Array],
    after: nn.Module,
    errors: Mapping[str, Number] | None = None,
) -> ParameterChanges:
    """List the numbers that a fit has changed, with the labels of their types.

    Numbers are in the units of the potential: eV, angstrom and radians for those of
    :func:`from_openmm`, and OpenMM's for its expressions. A number that a parametrisation of torch
    makes is listed itself, under its name without ``parametrizations``::

        before = copy.deepcopy(potential)
        ...  # a fit
        changes = parameter_changes(before, potential, errors)
        print(changes)
        changes.save("changes.csv")

    Args:
        before: the potential as it was, or its numbers by name, such as ``potential.state_dict()``
            of a potential without parametrisations. A state has other names for what these make.
        after: the fitted potential. Rows of a part are named by its ``labels``, if it has any.
        errors: standard errors by name, of the shape of the parameter or of one number; any of the
            parameters may be left out.

    Raises:
        ValueError: parameters with other names or shapes than before; an error of no parameter.
    """
    new, shown = _numbers(after), dict[str, Tensor]()
    old = _numbers(before) if isinstance(before, nn.Module) else _plain(before)
    spread = _plain(errors or {})
    if unknown := spread.keys() - new.keys():
        raise ValueError(
            f"errors has {sorted(unknown)[0]!r}, which is no parameter: the names are "
            f"{', '.join(new)}."
        )
    if isinstance(before, nn.Module) and (lost := old.keys() - new.keys()):
        raise ValueError(
            f"{sorted(lost)[0]} is a parameter before and none after: give the potential as it was "
            "before the fit, such as copy.deepcopy(potential)."
        )
    for name, value in new.items():
        if name not in old or old[name].shape != value.shape:
            found = f"of shape {tuple(old[name].shape)}" if name in old else "absent"
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} and was {found} before: give the potential "
                "as it was before the fit, such as copy.deepcopy(potential)."
            )
        if name in spread:
            try:
                shown[name] = spread[name].expand(value.shape)
            except RuntimeError:
                raise ValueError(
                    f"the error of {name} has shape {tuple(spread[name].shape)} and the parameter "
                    f"{tuple(value.shape)}; give one number, or one for each."
                ) from None
    labels: Mapping[str, Any] = getattr(after, "labels", {})
    return ParameterChanges(
        tuple(
            Change(
                name,
                index := tuple(place),
                _label(labels, name, index, value),
                old[name][index].item(),
                value[index].item(),
                shown[name][index].item() if name in shown else None,
            )
            for name, value in new.items()
            for place in (old[name] != value).nonzero().tolist()
        )
    )


def _numbers(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name, each once, and those that parametrisations make."""
    return {name: x.detach().cpu().double() for name, x in _parameters(module)}


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # A parametrisation makes a tensor at each reading, whose id others have once it is dropped.
    seen = dict[int, Tensor]()
    for path, part in module.named_modules():
        if "parametrizations" in path.split("."):
            continue
        for name in (*part._parameters, *getattr(part, "parametrizations", ())):
            value = getattr(part, name)
            if value is not None and id(value) not in seen:
                seen[id(value)] = value
                yield f"{path}.{name}" if path else name, value


def _plain(numbers: Mapping[str, Number]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(x).detach().cpu().double() for name, x in numbers.items()}


def _label(labels: Mapping[str, Any], name: str, index: tuple[int, ...], value: Tensor) -> str:
    """Return the label of a row of a parameter; empty without one."""
    parts = [part for part in labels if name.startswith(f"{part}.")]
    found = labels[max(parts, key=len)] if parts else ()
    return found[index[0]] if index and len(found) == len(value) else ""
