"""The choice of kernels, a list or all pairs, made once for each copy that a reading makes.

A run computes with such a copy, so it asks once, at its first force.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from adjsim.core.derived import MADE, Made
from adjsim.core.rounding import Rounding
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.pairs import dense, kernel_sums, listed
from adjsim.potentials.pairs.conditions import recording, unsupported
from adjsim.potentials.pairs.form import PairForm, form_of
from adjsim.potentials.pairs.formula import PairFormula
from adjsim.potentials.pairs.operator import PairOperator
from adjsim.potentials.products import Pullback


class PairEvaluator:
    """Energy, force and products of a potential, for positions of one shape and type.

    Kernels evaluate the pairs where there are any. Otherwise torch operations do, over a neighbour
    list if the formulas can use one, or over all pairs.

    The potential keeps its evaluators, and is an argument of their methods, since a reference to it
    would be a cycle.
    """

    def __init__(self, pair: PairFormula, position: Tensor) -> None:
        form = unsupported(pair, position) or form_of(pair, position)
        if isinstance(form, PairForm):
            # The kernel of the force is the same for all values of operands.
            form = PairOperator(pair, (), form).refusal or form
        self._form = form
        self._listed: dict[str, bool] = {}

    def energy(self, pair: PairFormula, position: Positions) -> Energies:
        if isinstance(self._form, PairForm):
            found = kernel_sums.energy(PairOperator.of(pair, self._form, position), position)
        elif self._uses_list(pair, position, "truncated_energy"):
            return listed.energy(pair, position)
        else:
            found = dense.energy(pair, position)
        # The sums leave out a pair whose distance is NaN, which compares as beyond the cutoff.
        return found if pair.cutoff is None else found + (0.0 * position).sum((-1, -2))

    def force(self, pair: PairFormula, position: Positions, rounding: Rounding) -> Positions:
        if isinstance(self._form, PairForm):
            operator = PairOperator.of(pair, self._form, position)
            return kernel_sums.force(operator, position, rounding)
        near = self._uses_list(pair, position, "truncated_slope")
        return (listed if near else dense).force(pair, position, rounding)

    def force_vjp(
        self,
        pair: PairFormula,
        position: Positions,
        parameters: Sequence[Tensor],
        rounding: Rounding,
    ) -> tuple[Tensor, Pullback]:
        if isinstance(self._form, PairForm):
            operator = PairOperator.of(pair, self._form, position)
            return kernel_sums.force_vjp(operator, position, parameters, rounding)
        if self._uses_list(pair, position, "truncated_slope", "truncated_curvature"):
            return listed.force_vjp(pair, position, parameters, rounding)
        return dense.force_vjp(pair, position, rounding)

    def virial(self, pair: PairFormula, position: Positions) -> Tensor:
        near = self._uses_list(pair, position, "truncated_slope")
        return (listed if near else dense).virial(pair, position)

    def path(self, pair: PairFormula, position: Positions) -> str:
        """Say how pairs are evaluated, and why not by kernels."""
        if isinstance(self._form, PairForm):
            return "all pairs" if self._form.spec.skin is None else "neighbour list"
        near = self._uses_list(pair, position, "truncated_slope")
        return f"{'neighbour list' if near else 'all pairs'}, by torch: {self._form.reason}"

    def _uses_list(self, pair: PairFormula, position: Positions, *formulas: str) -> bool:
        """Return whether torch operations evaluate these formulas over a neighbour list."""
        for formula in formulas:
            if formula not in self._listed:
                self._listed[formula] = listed.applies(pair, position, formula)
        return all(self._listed[formula] for formula in formulas)


def evaluator_of(pair: PairFormula, position: Tensor) -> PairEvaluator:
    """Return the evaluator for positions of a shape and type.

    A copy that a reading has made keeps its evaluators until its own code sets an attribute, which
    a formula may read.
    """
    made: Made | None = vars(pair).get(MADE)
    if made is None or torch.compiler.is_compiling():
        return PairEvaluator(pair, position)
    place = (
        position.shape,
        position.dtype,
        position.device,
        type(position),
        torch.get_default_dtype(),
        *recording(),
    )
    attributes = list(vars(pair).values())
    known = made.evaluators.get(place)
    if known is None or len(known[0]) != len(attributes) or any(map(is_not, known[0], attributes)):
        known = made.evaluators[place] = attributes, PairEvaluator(pair, position)
    evaluator: Any = known[1]
    return evaluator
