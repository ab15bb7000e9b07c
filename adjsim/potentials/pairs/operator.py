"""The operator that evaluates a pair potential on the CPU.

Its kernels are made from the formulas of the potential (:mod:`adjsim.potentials.pairs.kernels`),
and evaluate all pairs of a small system and a neighbour list of a large one. Each atom sums its
neighbours in the order of their numbers, so the result has the same bits with a list and without,
whatever its skin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from adjsim.compiler.values import UnprintableError
from adjsim.core.derived import own_tensors, replaced
from adjsim.core.layout import is_tracing
from adjsim.core.refusal import Refusal
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.potentials.pairs.form import PairForm, formula_key, operand_of
from adjsim.potentials.pairs.formula import Operand, PairFormula
from adjsim.potentials.pairs.kernels.formulas import OTHER, Slot, check_elementwise, printed, trace
from adjsim.potentials.pairs.kernels.kernel import (
    ATOM,
    ENERGY,
    FORCE,
    PRODUCT,
    SLOPES,
    TABLE,
    Kernel,
    KernelSpec,
)
from adjsim.potentials.pairs.kernels.operator import evaluate as evaluate_kernel


@dataclass(frozen=True)
class PairOperator:
    """The operator of a potential for positions of one shape and type.

    Attributes:
        pair: what is computed of the potential, whatever becomes of it.
        operands: the values of its operands, to which gradients are taken.
        form: the names of the operands, and the kernels.
    """

    pair: PairFormula
    operands: tuple[Tensor, ...]
    form: PairForm

    @classmethod
    def of(cls, pair: PairFormula, form: PairForm, position: Tensor) -> PairOperator:
        """Return the operator, with the present values of operands."""
        return cls(pair, tuple(operand_of(pair, name, position) for name in form.names), form)

    @property
    def refusal(self) -> Refusal | None:
        """The reason why there is no kernel of the force; None: there is one."""
        found = self._kernel(FORCE)
        return found if isinstance(found, Refusal) else None

    @property
    def printed(self) -> bool:
        """Whether all pairs are evaluated by loops of a compiled step, which are faster.

        The loops cannot sum gradients of a table over the pairs of two species.
        """
        return self.form.spec.skin is None and is_tracing() and TABLE not in self.form.spec.kinds

    @property
    def settings(self) -> tuple[Tensor | None, ...]:
        """The tensors other than operands."""
        return self.pair.image_box, self.pair.species, self.pair.exclusions

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """The operands that require grad."""
        return tuple(k for k, x in enumerate(self.operands) if x.requires_grad)

    def has(self, *modes: str, rounds: bool = False) -> bool:
        """Return whether there are kernels for these modes."""
        return all(
            isinstance(self._kernel(mode, rounds and mode in (FORCE, PRODUCT)), Kernel)
            for mode in modes
        )

    def differentiable(self, position: Tensor) -> bool:
        """Return whether a derivative to the position or an operand may be asked for."""
        return position.requires_grad or bool(self.wanted)

    def evaluate(
        self,
        mode: str,
        position: Tensor,
        *,
        vector: Tensor | None = None,
        rounding: Rounding = UNROUNDED,
        weight: Tensor | None = None,
    ) -> list[Tensor]:
        """Evaluate the kernel of a mode, see :class:`~.kernels.kernel.Kernel`."""
        kernel = self._kernel(mode, rounding.rounds)
        if isinstance(kernel, Refusal):
            raise RuntimeError(f"{type(self.pair).__name__} has no pair operator: {kernel.reason}.")
        box = self.pair.image_box
        box = None if box is None else box.to(position)
        spacing = rounding.spacing if rounding.rounds else None
        return evaluate_kernel(
            kernel,
            position,
            self.operands,
            box,
            self.pair.species,
            self.pair.exclusions,
            vector=vector,
            spacing=spacing,
            weight=weight,
        )

    def _kernel(self, mode: str, rounds: bool = False) -> Kernel | Refusal:
        gradients = self.wanted if mode in (PRODUCT, SLOPES) else ()
        known = self.form.kernels.get((mode, rounds, gradients))
        if known is None:
            if formula_key(self.pair) != self.form.key:
                raise RuntimeError(
                    f"a value that {type(self.pair).__name__} reads has changed since the force "
                    "was evaluated, and its gradient had not been compiled yet. Call backward "
                    "before the change."
                )
            try:
                known = self._compiled(
                    replace(self.form.spec, mode=mode, rounds=rounds, gradients=gradients)
                )
            except UnprintableError as error:
                known = Refusal(str(error))
            self.form.kernels[mode, rounds, gradients] = known
        return known

    def _compiled(self, spec: KernelSpec) -> Kernel:
        if not self.form.kernels:
            methods = ("truncated_slope", "truncated_energy", "truncated_curvature")
            check_elementwise([self._formula(x) for x in methods], self._slots, spec.dtype)
        slope = self._functions(replace(spec, mode=FORCE, gradients=()))
        functions = slope if spec.mode == FORCE else self._functions(spec)
        return Kernel(spec, functions, slope)

    def _formula(self, method: str) -> Any:
        # Potentials of one class share kernels. So the values of tensors other than operands
        # cannot be read: a trace that reads one is an error.
        tensors = own_tensors(self.pair) | {"exclusions": None}
        bare = replaced(
            self.pair,
            {name: None if x is None else x.detach().to("meta") for name, x in tensors.items()},
        )

        def formula(s: Tensor, values: Mapping[Slot, Tensor]) -> Tensor:
            operands: dict[str, Operand] = {
                name: (x, values[name, 1]) if (name, 1) in values else x
                for (name, end), x in values.items()
                if end == 0
            }
            return getattr(bare.with_operands(operands), method)(s)

        return formula

    @property
    def _slots(self) -> dict[Slot, str]:
        """The operands of a pair, with their kinds: two for a number of each atom."""
        kinds: dict[Slot, str] = {}
        for name, kind in zip(self.form.names, self.form.spec.kinds, strict=True):
            kinds[name, 0] = kind
            if kind == ATOM:
                kinds[name, 1] = OTHER
        return kinds

    def _functions(self, spec: KernelSpec) -> str:
        """Print the formulas that a kernel needs."""
        slope, energy = self._formula("truncated_slope"), self._formula("truncated_energy")
        curvature = self._formula("truncated_curvature")
        formulas = {
            FORCE: [slope], PRODUCT: [slope, curvature], ENERGY: [energy], SLOPES: [],
        }[spec.mode]  # fmt: skip
        differentiated = {PRODUCT: slope, SLOPES: energy}.get(spec.mode)
        wanted = [(self.form.names[k], 0) for k in spec.gradients]
        graph = trace(formulas, differentiated, list(self._slots), wanted, spec.dtype)
        return printed(graph, spec.dtype)

    def by_torch(self, operands: Sequence[Tensor]) -> PairFormula:
        """Return the potential with these operands, for torch operations over all pairs."""
        values: dict[str, Operand] = {}
        species = self.pair.species
        for name, kind, value in zip(self.form.names, self.form.spec.kinds, operands, strict=True):
            if kind == TABLE and species is not None:
                value = value[species.unsqueeze(-1), species]
            values[name] = (value.unsqueeze(-1), value) if kind == ATOM else value
        return self.pair.with_operands(values)
