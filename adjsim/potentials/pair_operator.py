"""The operator that evaluates a pair potential on the CPU.

Its kernels are made from the formulas of the potential (:mod:`adjsim._pairs`), and evaluate all
pairs of a small system and a neighbour list of a large one. Each atom sums its neighbours in the
order of their numbers, so the result has the same bits with a list and without, whatever its skin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjsim._cpp.values import UnprintableError
from adjsim._derived import own_tensors, replaced
from adjsim._grid import Grid
from adjsim._layout import is_tracing
from adjsim._pairs.formulas import OTHER, check_elementwise, printed, trace
from adjsim._pairs.kernel import (
    ATOM,
    ENERGY,
    FORCE,
    NUMBER,
    PRODUCT,
    SLOPES,
    TABLE,
    Kernel,
    Layout,
)
from adjsim._pairs.operator import evaluate as evaluate_kernel
from adjsim._params import refuse_unknown
from adjsim._reading import read
from adjsim._typing import Energies, Positions
from adjsim.potentials import all_pairs
from adjsim.potentials.base import DeferredVJP, Pullback
from adjsim.potentials.pair_autograd import PairEnergy, PairForce
from adjsim.potentials.pair_conditions import unsupported
from adjsim.potentials.pair_form import PairForm, form_of, formula_key, operand_of

if TYPE_CHECKING:
    from adjsim.potentials.pair import PairPotential


@dataclass(frozen=True)
class PairOperator:
    """The operator of a potential for positions of one shape and type.

    Attributes:
        pair: what is computed of the potential, whatever becomes of it.
        operands: the values of its operands, to which gradients are taken.
        form: the names of the operands, and the kernels.
    """

    pair: PairPotential
    operands: tuple[Tensor, ...]
    form: PairForm

    @classmethod
    def of(cls, potential: PairPotential, position: Tensor) -> PairOperator | str:
        """Return the operator, or the reason why there is none."""
        reason = unsupported(potential, position)
        if reason is not None:
            return reason
        pair = read(potential)
        form = form_of(pair, position)
        if isinstance(form, str):
            return form
        operands = tuple(operand_of(pair, name, position) for name in form.names)
        operator = cls(pair, operands, form)
        found = operator._kernel(FORCE)
        return found if isinstance(found, str) else operator

    @property
    def printed(self) -> bool:
        """Whether all pairs are evaluated by loops of a compiled step, which are faster.

        The loops cannot sum gradients of a table over the pairs of two species.
        """
        return (
            self.form.layout.skin is None and is_tracing() and TABLE not in self.form.layout.kinds
        )

    def energy(self, position: Positions) -> Energies:
        """Compute the energy, differentiable."""
        differentiable = torch.is_grad_enabled() and self._differentiable(position)
        modes = (ENERGY, SLOPES) if differentiable else (ENERGY,)
        if self.printed or not self._has(*modes):
            return all_pairs.energy(self.by_torch(self.operands), position)
        if differentiable:
            return PairEnergy.apply(self, position, *self._settings, *self.operands)
        return self.evaluate(ENERGY, position)[0]

    def force(self, position: Positions, grid: Grid | None) -> Positions:
        """Compute the force, differentiable."""
        differentiable = torch.is_grad_enabled() and self._differentiable(position)
        modes = (FORCE, PRODUCT) if differentiable else (FORCE,)
        if self.printed or not self._has(*modes, grid=grid is not None):
            return all_pairs.force(self.by_torch(self.operands), position, grid)
        if differentiable:
            return PairForce.apply(self, grid, position, *self._settings, *self.operands)
        return self.evaluate(FORCE, position, grid=grid)[0]

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None
    ) -> tuple[Tensor, Pullback]:
        """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dtheta)."""
        if self.printed or not self._has(FORCE, PRODUCT, grid=grid is not None):
            value, product = all_pairs.force_vjp(self.by_torch(self.operands), position, grid)

            def pullback_by_rows(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
                along, found = product(v)
                assert isinstance(found, DeferredVJP)
                return along, self._propagate(self._gradients_by_rows(found), parameters)

            return value, pullback_by_rows
        value = self.evaluate(FORCE, position, grid=grid)[0]

        def pullback(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
            _, along, *found = self.evaluate(PRODUCT, position, vector=v, grid=grid)
            return along, self._propagate(found, parameters)

        return value, pullback

    @property
    def _settings(self) -> tuple[Tensor | None, ...]:
        """The tensors other than operands."""
        return self.pair.image_box, self.pair.species, self.pair.exclusions

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """The operands that require grad."""
        return tuple(k for k, x in enumerate(self.operands) if x.requires_grad)

    def _has(self, *modes: str, grid: bool = False) -> bool:
        """Return whether there are kernels for these modes."""
        return all(
            isinstance(self._kernel(mode, grid and mode in (FORCE, PRODUCT)), Kernel)
            for mode in modes
        )

    def _differentiable(self, position: Tensor) -> bool:
        return position.requires_grad or bool(self.wanted)

    def _gradients_by_rows(self, deferred: DeferredVJP) -> list[Tensor]:
        """Compute the cotangents of operands, with numbers expanded over the rows of pairs.

        The compiler then fuses the sum over each row with the loop over pairs of the compiled step,
        while a sum over all pairs would need another loop.
        """
        rows = (*deferred.x.shape[:-1], 1)
        leaves = [
            (x.detach().expand(rows) if kind == NUMBER else x.detach()).requires_grad_()
            for x, kind in zip(self.operands, self.form.layout.kinds, strict=True)
        ]
        with torch.enable_grad():
            slope = self.by_torch(leaves).truncated_slope(deferred.x)
            total = (deferred.weight * slope).sum()
        wanted = [leaves[k] for k in self.wanted]
        if not wanted:
            return []
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        found: list[Tensor] = []
        for k, grad in zip(self.wanted, grads, strict=True):
            like = self.operands[k]
            if grad is None:
                found.append(torch.zeros_like(like))
            else:
                found.append(grad.sum().reshape(like.shape) if like.numel() == 1 else grad)
        return found

    def _propagate(
        self, found: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Propagate the cotangents of operands to parameters."""
        grads: list[Tensor | None] = [None] * len(parameters)

        def add(k: int, grad: Tensor) -> None:
            old = grads[k]
            grads[k] = grad if old is None else old + grad

        rest: list[tuple[Tensor, Tensor]] = []
        for k, grad in zip(self.wanted, found, strict=True):
            operand = self.operands[k]
            same = [i for i, p in enumerate(parameters) if p is operand]
            if same:
                add(same[0], grad)
            else:
                what = f"the force of {type(self.pair).__name__}"
                refuse_unknown(operand, self.pair, parameters, what)
                rest.append((operand, grad))
        if rest and parameters:
            outputs, cotangents = zip(*rest, strict=True)
            more = torch.autograd.grad(
                outputs, parameters, cotangents, allow_unused=True, retain_graph=True
            )
            for k, grad in enumerate(more):
                if grad is not None:
                    add(k, grad)
        return grads

    def evaluate(
        self,
        mode: str,
        position: Tensor,
        *,
        vector: Tensor | None = None,
        grid: Grid | None = None,
        weight: Tensor | None = None,
    ) -> list[Tensor]:
        """Evaluate the kernel of a mode, see :class:`~adjsim._pairs.kernel.Kernel`."""
        kernel = self._kernel(mode, grid is not None)
        if isinstance(kernel, str):
            raise RuntimeError(f"{type(self.pair).__name__} has no pair operator: {kernel}.")
        box = self.pair.image_box
        box = None if box is None else box.to(position)
        spacing = None if grid is None else grid.spacing
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

    def _kernel(self, mode: str, grid: bool = False) -> Kernel | str:
        gradients = self.wanted if mode in (PRODUCT, SLOPES) else ()
        known = self.form.kernels.get((mode, grid, gradients))
        if known is None:
            if formula_key(self.pair) != self.form.key:
                raise RuntimeError(
                    f"a value that {type(self.pair).__name__} reads has changed since the force "
                    "was evaluated, and its gradient had not been compiled yet. Call backward "
                    "before the change."
                )
            try:
                known = self._compiled(
                    replace(self.form.layout, mode=mode, grid=grid, gradients=gradients)
                )
            except UnprintableError as error:
                known = str(error)
            self.form.kernels[mode, grid, gradients] = known
        return known

    def _compiled(self, layout: Layout) -> Kernel:
        if not self.form.kernels:
            kinds: dict[str, str] = {}
            for name, kind in zip(self.form.names, layout.kinds, strict=True):
                kinds[name] = kind
                if kind == ATOM:
                    kinds[f"{name} of the other"] = OTHER
            methods = ("truncated_slope", "truncated_energy", "truncated_curvature")
            check_elementwise([self._formula(x) for x in methods], kinds, layout.dtype)
        slope = self._functions(replace(layout, mode=FORCE, gradients=()))
        functions = slope if layout.mode == FORCE else self._functions(layout)
        return Kernel(layout, functions, slope)

    def _formula(self, method: str) -> Any:
        # Potentials of one class share kernels. So the values of tensors other than operands
        # cannot be read: a trace that reads one is an error.
        tensors = own_tensors(self.pair) | {"exclusions": None}
        bare = replaced(
            self.pair,
            {name: None if x is None else x.detach().to("meta") for name, x in tensors.items()},
        )
        return lambda s, values: getattr(bare.with_operands(values), method)(s)

    def _functions(self, layout: Layout) -> str:
        """Print the formulas that a kernel needs."""
        names, swap = list[str](), dict[str, str]()
        for name, kind in zip(self.form.names, layout.kinds, strict=True):
            names.append(name)
            if kind == ATOM:
                names.append(f"{name} of the other")
                swap |= {name: names[-1], names[-1]: name}

        slope, energy = self._formula("truncated_slope"), self._formula("truncated_energy")
        curvature = self._formula("truncated_curvature")
        formulas = {
            FORCE: [slope], PRODUCT: [slope, curvature], ENERGY: [energy], SLOPES: [],
        }[layout.mode]  # fmt: skip
        differentiated = {PRODUCT: slope, SLOPES: energy}.get(layout.mode)
        wanted = [self.form.names[k] for k in layout.gradients]
        graph = trace(formulas, differentiated, names, wanted, swap, layout.dtype)
        return printed(graph, layout.dtype)

    def by_torch(self, operands: Sequence[Tensor]) -> PairPotential:
        """Return the potential with these operands, for torch operations over all pairs."""
        values: dict[str, Tensor] = {}
        species = self.pair.species
        for name, kind, value in zip(
            self.form.names, self.form.layout.kinds, operands, strict=True
        ):
            if kind == TABLE and species is not None:
                value = value[species.unsqueeze(-1), species]
            if kind == ATOM:
                values[f"{name} of the other"] = value
                value = value.unsqueeze(-1)
            values[name] = value
        return self.pair.with_operands(values)
