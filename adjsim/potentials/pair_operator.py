"""The operator that evaluates a pair potential on the CPU.

Its kernels are made from the formulas of the potential (:mod:`adjsim._pairs`), and evaluate all
pairs of a small system and a neighbour list of a large one. Each atom sums its neighbours in the
order of their numbers, so the result has the same bits with a list and without, whatever its skin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjsim._cache_key import UninspectableError, cache_key
from adjsim._cpp.values import TYPES, UnprintableError
from adjsim._grid import Grid
from adjsim._layout import is_tracing
from adjsim._module import ModuleCache
from adjsim._pairs.formulas import printed, trace
from adjsim._pairs.kernel import (
    ATOM,
    ENERGY,
    FORCE,
    NO_BOX,
    NUMBER,
    ORTHOGONAL,
    PRODUCT,
    SLOPES,
    TABLE,
    TILTED,
    Kernel,
    Layout,
)
from adjsim._pairs.operator import evaluate
from adjsim._params import refuse_unknown
from adjsim._state import in_transform
from adjsim._typing import Energies, Positions
from adjsim.potentials import all_pairs
from adjsim.potentials.base import DeferredVJP, Pullback

if TYPE_CHECKING:
    from adjsim.potentials.pair import PairPotential

# The skin of a neighbour list, as a share of the cutoff, and the smallest number of atoms of which
# a list is made: in units of the neighbours in a list, or without a box. Measured, see
# benchmarks/liquid.py.
SKIN = 0.14
LISTED, LISTED_WITHOUT_BOX = 3.0, 512

# Kernels by potential and key, or the reason why there is none.
_cache: ModuleCache[Kernel | str] = ModuleCache(32)


@dataclass(frozen=True)
class PairOperator:
    """The operator of a potential for positions of one shape and type.

    Attributes:
        pair: the potential.
        names: the names of its operands: the tensors that its formulas may read.
        operands: their values, to which gradients are taken.
        kinds: their kinds.
        layout: the kernel that computes the force.
        key: the key of the potential's formulas.
    """

    pair: PairPotential
    names: tuple[str, ...]
    operands: tuple[Tensor, ...]
    layout: Layout
    key: Any

    @classmethod
    def of(cls, pair: PairPotential, position: Tensor) -> PairOperator | str:
        """Return the operator, or the reason why there is none."""
        reason = _unsupported(pair, position)
        if reason is not None:
            return reason
        try:
            key = cache_key(pair)
        except UninspectableError as error:
            return str(error)
        atoms, dim = position.shape[-2:]
        names, operands, kinds = [], [], []
        for name, value in (*pair._parameters.items(), *pair._buffers.items()):
            if value is None or name in ("box", "species"):
                continue
            # With a graph also in a sweep, which takes the gradients of operands to parameters.
            with torch.enable_grad():
                value = pair.pair_table(name)
                operands.append(value.to(position))
            kind = NUMBER if value.numel() == 1 else ATOM if value.ndim == 1 else TABLE
            if kind == ATOM and len(value) != atoms:
                return f"{name} has {len(value)} entries for {atoms} atoms"
            if value.ndim > 2 or (kind == TABLE and pair.species is None and len(value) != atoms):
                return f"{name} has shape {tuple(value.shape)} for {atoms} atoms"
            names.append(name)
            kinds.append(kind)
        if pair.species is not None and len(pair.species) != atoms:
            return f"species is for {len(pair.species)} atoms and position has {atoms}"
        box = pair.box
        image = NO_BOX if box is None else ORTHOGONAL if box.ndim == 1 else TILTED
        skin = _skin(pair, position)
        layout = Layout(
            FORCE, position.dtype, dim, image, pair.cutoff, skin, False, tuple(kinds), ()
        )
        operator = cls(pair, tuple(names), tuple(operands), layout, key)
        found = operator._kernel(FORCE)
        return found if isinstance(found, str) else operator

    @property
    def printed(self) -> bool:
        """Whether all pairs are evaluated by loops of a compiled step, which are faster."""
        return self.layout.skin is None and is_tracing()

    def energy(self, position: Positions) -> Energies:
        """Compute the energy, differentiable."""
        if self.printed:
            return all_pairs.energy(self.pair, position)
        if torch.is_grad_enabled() and self._differentiable(position):
            return _Energy.apply(self, position, *self.operands)
        return self._evaluate(ENERGY, position)[0]

    def force(self, position: Positions, grid: Grid | None) -> Positions:
        """Compute the force, differentiable."""
        if self.printed:
            return all_pairs.force(self.pair, position, grid)
        if torch.is_grad_enabled() and self._differentiable(position):
            return _Force.apply(self, grid, position, *self.operands)
        return self._evaluate(FORCE, position, grid=grid)[0]

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None
    ) -> tuple[Tensor, Pullback]:
        """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dtheta)."""
        if self.printed:
            value, product = all_pairs.force_vjp(self.pair, position, grid)

            def pullback_by_rows(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
                along, found = product(v)
                assert isinstance(found, DeferredVJP)
                return along, self._propagate(self._gradients_by_rows(found), parameters)

            return value, pullback_by_rows
        value = self._evaluate(FORCE, position, grid=grid)[0]

        def pullback(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
            _, along, *found = self._evaluate(PRODUCT, position, vector=v, grid=grid)
            return along, self._propagate(found, parameters)

        return value, pullback

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """The operands that require grad."""
        return tuple(k for k, x in enumerate(self.operands) if x.requires_grad)

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
            for x, kind in zip(self.operands, self.layout.kinds, strict=True)
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
                refuse_unknown(
                    operand, self.pair, parameters, f"the force of {type(self.pair).__name__}"
                )
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

    def _evaluate(
        self,
        mode: str,
        position: Tensor,
        *,
        vector: Tensor | None = None,
        grid: Grid | None = None,
        weight: Tensor | None = None,
    ) -> list[Tensor]:
        kernel = self._kernel(mode, grid is not None)
        if isinstance(kernel, str):
            raise RuntimeError(f"{type(self.pair).__name__} has no pair operator: {kernel}.")
        box = None if self.pair.box is None else self.pair.box.to(position)
        spacing = None if grid is None else grid.spacing
        return evaluate(
            kernel,
            position,
            self.operands,
            box,
            self.pair.species,
            vector=vector,
            spacing=spacing,
            weight=weight,
        )

    def _kernel(self, mode: str, grid: bool = False) -> Kernel | str:
        gradients = self.wanted if mode in (PRODUCT, SLOPES) else ()
        layout = replace(self.layout, mode=mode, grid=grid, gradients=gradients)
        key = (self.key, self.names, layout)
        known = _cache.get(self.pair, key)
        if known is None:
            try:
                slope = self._functions(replace(layout, mode=FORCE, gradients=()))
                functions = slope if mode == FORCE else self._functions(layout)
                known = Kernel(layout, functions, slope)
            except UnprintableError as error:
                known = str(error)
            _cache.put(self.pair, key, known)
        return known

    def _functions(self, layout: Layout) -> str:
        """Print the formulas that a kernel needs."""
        pair, names, swap = self.pair, list[str](), dict[str, str]()
        for name, kind in zip(self.names, layout.kinds, strict=True):
            names.append(name)
            if kind == ATOM:
                names.append(f"{name} of the other")
                swap |= {name: names[-1], names[-1]: name}

        def formula(method: str) -> Any:
            return lambda s, values: getattr(pair.with_operands(values), method)(s)

        slope, energy = formula("truncated_slope"), formula("truncated_energy")
        curvature = formula("truncated_curvature")
        formulas = {
            FORCE: [slope], PRODUCT: [slope, curvature], ENERGY: [energy], SLOPES: [],
        }[layout.mode]  # fmt: skip
        differentiated = {PRODUCT: slope, SLOPES: energy}.get(layout.mode)
        wanted = [self.names[k] for k in layout.gradients]
        graph = trace(formulas, differentiated, names, wanted, swap, layout.dtype)
        return printed(graph, layout.dtype)

    def by_torch(self, operands: Sequence[Tensor]) -> PairPotential:
        """Return the potential with these operands, for torch operations over all pairs."""
        values: dict[str, Tensor] = {}
        species = self.pair.species
        for name, kind, value in zip(self.names, self.layout.kinds, operands, strict=True):
            if kind == TABLE and species is not None:
                value = value[species.unsqueeze(-1), species]
            if kind == ATOM:
                values[f"{name} of the other"] = value
                value = value.unsqueeze(-1)
            values[name] = value
        return self.pair.with_operands(values)


class _Force(torch.autograd.Function):
    """The force, whose derivative is the product of the operator.

    A derivative that is to be differentiated itself is computed by torch operations.
    """

    @staticmethod
    def forward(
        ctx: Any, operator: PairOperator, grid: Grid | None, position: Tensor, *operands: Tensor
    ) -> Tensor:
        ctx.operator, ctx.grid = operator, grid
        ctx.save_for_backward(position, *operands)
        return operator._evaluate(FORCE, position, grid=grid)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (v,), (position, *operands) = cotangents, ctx.saved_tensors
        operator: PairOperator = ctx.operator
        if torch.is_grad_enabled() or in_transform():
            return (
                None,
                None,
                *_product(
                    lambda q, *values: all_pairs.force(operator.by_torch(values), q, None),
                    (position, *operands),
                    v,
                ),
            )
        _, along, *found = operator._evaluate(PRODUCT, position, vector=v)
        grads: list[Tensor | None] = [None] * len(operands)
        for k, grad in zip(operator.wanted, found, strict=True):
            grads[k] = grad
        return None, None, along, *grads


class _Energy(torch.autograd.Function):
    """The energy, whose derivative with respect to positions is minus the force."""

    @staticmethod
    def forward(ctx: Any, operator: PairOperator, position: Tensor, *operands: Tensor) -> Tensor:
        ctx.operator = operator
        ctx.save_for_backward(position, *operands)
        return operator._evaluate(ENERGY, position)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (position, *operands) = cotangents, ctx.saved_tensors
        operator: PairOperator = ctx.operator
        if torch.is_grad_enabled() or in_transform():
            return None, *_product(
                lambda q, *values: all_pairs.energy(operator.by_torch(values), q),
                (position, *operands),
                weight,
            )
        grads: list[Tensor | None] = [None] * (1 + len(operands))
        if ctx.needs_input_grad[1]:
            force = operator._evaluate(FORCE, position)[0]
            grads[0] = -force * weight[..., None, None]
        if operator.wanted:
            found = operator._evaluate(SLOPES, position, weight=weight)
            for k, grad in zip(operator.wanted, found, strict=True):
                grads[1 + k] = grad
        return None, *grads


def _product(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], cotangent: Tensor
) -> tuple[Tensor, ...]:
    """Compute a vector-Jacobian product that can be differentiated.

    Inputs may depend on each other (a position on the parameters of earlier steps), which
    ``torch.autograd.grad`` would follow.
    """
    pullback = torch.func.vjp(function, *inputs)[1]
    return pullback(cotangent)


def _unsupported(pair: PairPotential, position: Tensor) -> str | None:
    """Return why a potential has no operator for positions of this shape and type."""
    if position.device.type != "cpu":
        return f"positions are on {position.device.type}"
    if position.dtype not in TYPES or not position.dtype.is_floating_point:
        return f"positions are {position.dtype}"
    if in_transform() or torch.compiler.is_compiling():
        return "a transform of torch.func or torch.compile is active"
    if position.shape[-1] > 3:
        return "positions have more than three dimensions"
    if type(position) not in (Tensor, torch.nn.Parameter) and not is_tracing():
        return f"positions are {type(position).__name__}"
    if pair.box is not None and len(pair.box) != position.shape[-1]:
        return "box and position have different dimensions"
    if pair.box is not None and pair.box.ndim == 2 and pair.cutoff is None:
        return "a tilted box without a cutoff needs a search for the nearest image"
    return None


def _skin(pair: PairPotential, position: Tensor) -> float | None:
    """Return the skin of the neighbour list; None: evaluate all pairs."""
    if pair.cutoff is None:
        return None
    skin = SKIN * pair.cutoff if pair.skin is None else pair.skin
    atoms, dim = position.shape[-2:]
    if pair._volume is None:
        return skin if atoms >= LISTED_WITHOUT_BOX else None
    reach = pair.cutoff + skin
    ball = math.pi ** (dim / 2) / math.gamma(dim / 2 + 1) * reach**dim
    return skin if atoms > LISTED * (1 + atoms * ball / pair._volume) else None
