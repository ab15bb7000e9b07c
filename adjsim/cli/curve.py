"""Measured curves from text files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

# Units of distance, in angstrom.
UNITS = {"angstrom": 1.0, "nm": 10.0, "pm": 0.01}
# The range of the highest peak of g(r), in units of sigma. A liquid has it at 1.0 to 1.2.
PEAK = (0.5, 2.0)
SEPARATOR = re.compile(r"[,;\s]+")
# What may stand between the numbers of a line beside spaces; a line may have one number.
SEPARATED: tuple[set[str], ...] = (set(), {""}, {","}, {";"})
DENSITY = re.compile(
    r"density\D*?((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s+(?:atoms\s+)?per cubic angstrom",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Curve:
    """A measured curve: increasing distances, values, and their standard errors or None, ``(n,)``.

    ``density`` is that of the file's comments, per cubic angstrom, or None.
    """

    r: Tensor
    g: Tensor
    stderr: Tensor | None
    density: float | None = None

    def between(self, low: float, high: float) -> Curve:
        """Return the part with distances from low to high, both included."""
        inside = (self.r >= low) & (self.r <= high)
        errors = None if self.stderr is None else self.stderr[inside]
        return replace(self, r=self.r[inside], g=self.g[inside], stderr=errors)

    def in_angstrom(self, unit: str, sigma: float) -> Curve:
        """Convert the distances to angstrom, or refuse a unit in which the peak is not at sigma."""
        if unit not in UNITS:
            raise ValueError(f"unknown unit '{unit}'; choose one of {', '.join(UNITS)}.")
        peak = float(self.r[self.g.argmax()])
        fitting = [u for u, scale in UNITS.items() if PEAK[0] < peak * scale / sigma < PEAK[1]]
        if fitting and unit not in fitting:
            raise ValueError(
                f"the target has its highest peak at {peak:g} {unit}, and sigma is {sigma:.3g} "
                f"angstrom: its distances look like {fitting[0]}. Give --target-unit {fitting[0]}."
            )
        return replace(self, r=self.r * UNITS[unit])


@dataclass(frozen=True)
class Columns:
    """The words for a file of measurements in errors: its option, its numbers, and the first."""

    option: str
    numbers: str
    first: str

    def read(self, path: Path) -> tuple[Tensor, list[str]]:
        """Read two columns, or three with standard errors, ``(n, columns)``, and the comments.

        Lines that begin with ``#`` are comments, and one line without numbers, of column names, may
        come first. The first column is positive and increases.
        """
        if not path.is_file():
            raise ValueError(
                f"{self.option} file '{path}' does not exist; give a text file of {self.numbers}."
            )
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise ValueError(
                f"{self.option} '{path}' is not a text file; give columns of {self.numbers}."
            ) from None
        rows: list[list[float]] = []
        comments, first = list[str](), True
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if text.startswith("#"):
                comments.append(text)
            elif text:
                entries = _numbers(text)
                if not first or any(map(_numbers, SEPARATOR.split(text))):
                    where = f"{self.option} '{path}', line {number}"
                    rows.append(self._checked(where, text, entries, rows))
                first = False
        if not rows:
            raise ValueError(
                f"{self.option} '{path}' has no numbers; give columns of {self.numbers}."
            )
        return torch.tensor(rows, dtype=torch.float64), comments

    def _checked(
        self, where: str, text: str, entries: list[float] | None, rows: list[list[float]]
    ) -> list[float]:
        """Return the numbers of a line, or raise if they do not continue the rows."""
        count = len(rows[0]) if rows else 0
        # With a decimal comma, "3,4 1" would be three numbers.
        if {found.strip() for found in SEPARATOR.findall(text)} not in SEPARATED:
            raise ValueError(
                f"{where}: '{text}' has separators of two kinds, or an empty column. Write numbers "
                "with decimal points, and spaces, commas or semicolons between them."
            )
        if entries is None or len(entries) not in ((count,) if count else (2, 3)):
            wanted = (
                f"{count} numbers, as above" if count else f"{self.numbers}, and perhaps an error"
            )
            raise ValueError(f"{where}: '{text}' is not {wanted}.")
        if not all(math.isfinite(entry) for entry in entries):
            raise ValueError(
                f"{where}: '{text}' has a number that is not finite; correct or remove the line."
            )
        if entries[0] <= 0:
            raise ValueError(
                f"{where}: the {self.first} {entries[0]:g} is not positive; remove the line."
            )
        if rows and entries[0] <= rows[-1][0]:
            raise ValueError(
                f"{where}: the {self.first} {entries[0]:g} follows {rows[-1][0]:g}; sort the lines "
                f"by {self.first}, each once."
            )
        if len(entries) == 3 and entries[2] <= 0:
            raise ValueError(
                f"{where}: the standard error {entries[2]:g} is not positive; correct it, or "
                "remove the column."
            )
        return entries


def read_curve(path: Path) -> Curve:
    """Read distance, g(r) and an optional standard error from the columns of a text file.

    A comment may give the density, as "number density 0.02125 per cubic angstrom".
    """
    rows, comments = Columns("target", "r and g(r)", "distance").read(path)
    said = [found for found in map(DENSITY.search, comments) if found is not None]
    r, g, *errors = rows.unbind(1)
    return Curve(r, g, errors[0] if errors else None, float(said[-1][1]) if said else None)


def _numbers(text: str) -> list[float] | None:
    try:
        return [float(part) for part in SEPARATOR.split(text)]
    except ValueError:
        return None
