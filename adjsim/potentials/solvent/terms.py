"""Formulas of pairs, as terms that are summed over neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from adjsim.potentials.expressions import Expression
from adjsim.potentials.pairs.kernels.sums import Pair
from adjsim.potentials.pairs.term_sums import Terms


def terms_of(
    expression: Expression, known: Mapping[str, Tensor], unit: float
) -> tuple[list[str], Terms]:
    """Return the terms of a formula of pairs, and the names of the known numbers that it reads.

    Numbers with an axis are those of atoms, and ``unit`` is that of distances.
    """
    used = expression.names
    names = [
        name for name, x in known.items() if ({f"{name}1", f"{name}2"} if x.ndim else {name}) & used
    ]
    rows = tuple((name, bool(known[name].ndim)) for name in names)
    key = "expression", expression.text, rows, unit
    return names, Terms(key, partial(_evaluated, expression, rows, unit))


def _evaluated(
    expression: Expression, rows: Sequence[tuple[str, bool]], unit: float, pair: Pair
) -> list[Tensor]:
    """Evaluate a formula, by the names of numbers and whether atoms have their own."""
    values = {"r": pair.s.sqrt() / unit}
    for (name, of_atoms), one, two in zip(rows, pair.mine, pair.other, strict=True):
        values |= {f"{name}1": one, f"{name}2": two} if of_atoms else {name: one}
    return [expression(values) + torch.zeros_like(pair.s)]
