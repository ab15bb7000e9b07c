"""The choice of kernels, a list or all pairs, made once for each copy that a reading makes.

A run computes with such a copy, so it asks once, at its first force.
"""

from __future__ import annotations

from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from adjsim.compiler.values import TYPES
from adjsim.core.derived import MADE, Made, own_tensors
from adjsim.core.layout import is_tracing
from adjsim.core.refusal import Refusal
from adjsim.core.state import in_transform
from adjsim.potentials.pairs import dense, kernel_sums, listed
from adjsim.potentials.pairs.formula import PairFormula
from adjsim.potentials.pairs.kernels.kernel import FORCE
from adjsim.potentials.pairs.operator import PairForm, PairOperator, form_of


def unsupported(pair: PairFormula, position: Tensor) -> Refusal | None:
    """Return why a potential has no operator for positions of this shape and type."""
    if in_transform() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return Refusal("a transform of torch.func, torch.compile or torch.jit.trace is active")
    box, dtype, kind = pair.box, position.dtype, type(position)
    reasons = {
        f"positions are on {position.device.type}": position.device.type != "cpu",
        f"positions are {dtype}": dtype not in TYPES or not dtype.is_floating_point,
        "there are no atoms": position.numel() == 0,
        "forward-mode differentiation is active": forward_ad._current_level >= 0,
        "the box requires grad": box is not None and box.requires_grad,
        "it has modules with tensors": any(
            own_tensors(part) for part in pair.modules() if part is not pair
        ),
        "positions have more than three dimensions": position.shape[-1] > 3,
        f"positions are {kind.__name__}": kind not in (Tensor, Parameter) and not is_tracing(),
        "box and position have different dimensions": (
            box is not None and len(box) != position.shape[-1]
        ),
        "a tilted box without a cutoff needs a search for the nearest image": (
            box is not None and box.ndim == 2 and pair.cutoff is None
        ),
    }
    reason = next((words for words, holds in reasons.items() if holds), None)
    return None if reason is None else Refusal(reason)


class PairEvaluator:
    """How a potential is evaluated, for positions of one shape and type.

    The potential keeps its evaluators, and is an argument of their methods, since a reference to it
    would be a cycle.
    """

    def __init__(self, pair: PairFormula, position: Tensor) -> None:
        form = unsupported(pair, position) or form_of(pair, position)
        if isinstance(form, PairForm):
            # The kernel of the force is the same for all values of operands.
            found = PairOperator(pair, (), form).kernel(FORCE)
            form = found if isinstance(found, Refusal) else form
        self._form = form
        self._listed: dict[str, bool] = {}

    def way(self, pair: PairFormula, position: Tensor, *formulas: str) -> tuple[Any, Any]:
        """Return the module whose functions sum these formulas, and their first argument."""
        if isinstance(self._form, PairForm):
            return kernel_sums, PairOperator.of(pair, self._form, position)
        return self.by_torch(pair, position, *formulas), pair

    def by_torch(self, pair: PairFormula, position: Tensor, *formulas: str) -> Any:
        """Return the module by whose torch operations these formulas are summed."""
        for formula in formulas:
            if formula not in self._listed:
                self._listed[formula] = listed.applies(pair, position, formula)
        return listed if all(self._listed[formula] for formula in formulas) else dense

    def path(self, pair: PairFormula, position: Tensor) -> str:
        """Say how pairs are evaluated, and why not by kernels."""
        if isinstance(self._form, PairForm):
            return "all pairs" if self._form.spec.skin is None else "neighbour list"
        near = self.by_torch(pair, position, "truncated_slope") is listed
        return f"{'neighbour list' if near else 'all pairs'}, by torch: {self._form.reason}"


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
        *listed.recording(),
    )
    attributes = list(vars(pair).values())
    known = made.evaluators.get(place)
    if known is None or len(known[0]) != len(attributes) or any(map(is_not, known[0], attributes)):
        known = made.evaluators[place] = attributes, PairEvaluator(pair, position)
    evaluator: Any = known[1]
    return evaluator
