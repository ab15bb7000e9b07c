"""Sums over the pairs of a neighbour list, by torch operations.

They evaluate large systems where the pair operator cannot: the largest on a GPU, without a
compiler, and for formulas that are not printed. The sums are those of
:mod:`adjsim.potentials.pairs.dense`.

Of the list (:mod:`adjsim.core.neighbour_list`), the pairs within the cutoff alone are evaluated and
summed, in ascending order. These pairs are a function of the position, so results are too, to the
last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.box import nearest_image
from adjsim.core.layout import is_tracing
from adjsim.core.neighbour_list import NearestImages
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.state import in_transform
from adjsim.core.transforms import in_forward_mode
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.pairs.formula import (
    Operand,
    PairFormula,
    kind_of,
    misshapen,
    read_at,
    skin_of,
)
from adjsim.potentials.pairs.kernels.kernel import ATOM, FUNCTION, TABLE
from adjsim.potentials.products import DeferredVJP, Pullback, Tensors

# The squared distances on which a formula is checked, in units of the squared cutoff, and those on
# which it is evaluated again: in another order, and without the smallest and the largest.
_SAMPLE = (0.62, 0.35, 0.88, 0.47, 0.71, 0.3, 0.9, 0.55)
_SUBSET = (4, 0, 3)


def recording() -> tuple[bool, ...]:
    """Return which of torch's ways to record or to transform operations are active."""
    return (
        is_tracing(),
        in_transform(),
        torch.compiler.is_compiling(),
        torch.jit.is_tracing(),
        in_forward_mode(),
    )


def applies(pair: PairFormula, position: Tensor, formula: str) -> bool:
    """Return whether a system is large enough for a list, and this formula can use one.

    A list depends on the values of positions, so there is none while torch records or transforms.
    """
    if any(recording()) or type(position) not in (Tensor, nn.Parameter):
        return False
    if position.is_meta or position.numel() == 0:
        return False
    if pair.box is not None and (pair.box.requires_grad or len(pair.box) != position.shape[-1]):
        return False
    if pair.cutoff is None:
        return False
    return skin_of(pair, position) is not None and _is_elementwise(pair, position, formula)


def energy(pair: PairFormula, position: Positions) -> Energies:
    """Compute the energy, differentiable."""
    near = _Geometry.of(pair, position)
    energies = near.pair.truncated_energy(near.s).expand_as(near.s)
    rows = near.sum_rows(0.5 * energies[None])
    return near.checked(rows.sum((-1, -2)))


def force(pair: PairFormula, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
    """Compute the force, differentiable."""
    near = _Geometry.of(pair, position)
    return near.force(-2 * near.pair.truncated_slope(near.s), rounding)


def force_vjp(
    pair: PairFormula, position: Positions, parameters: Tensors, rounding: Rounding
) -> tuple[Tensor, Pullback]:
    """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dtheta)."""
    with torch.no_grad():
        near = _Geometry.of(pair, position)
        weight = -2 * near.pair.truncated_slope(near.s)
        value = near.force(weight, rounding)

    def slope(s: Tensor) -> Tensor:
        return _with_operands(pair, near.i, near.j, position.shape[-2]).truncated_slope(s)

    def pullback(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        with torch.no_grad():
            w = _differences(v, near.i, near.j)
            dw = (near.d * w).sum(0)
            curvature = -4 * near.pair.truncated_curvature(near.s) * dw
            along = near.checked(near.sum_rows(curvature * near.d + weight * w))
        grads = DeferredVJP(pair, slope, -dw, near.s).gradient(parameters)
        lost = torch.where(near.finite.all(), 1.0, torch.nan)
        return along, [None if g is None else g * lost.to(g) for g in grads]

    return value, pullback


def virial(pair: PairFormula, position: Positions) -> Tensor:
    """Compute ``sum over i<j of d_ij F_ij``, ``(*batch, dim, dim)``."""
    near = _Geometry.of(pair, position)
    weighted = -near.pair.truncated_slope(near.s) * near.d
    products = weighted.unsqueeze(0) * near.d.unsqueeze(1)
    rows = near.sum_rows(products.flatten(0, 1)).sum(-2)
    return near.checked(rows.unflatten(-1, (position.shape[-1],) * 2))


@dataclass(frozen=True)
class _Geometry:
    """The pairs i, j within the cutoff, their differences ``(dim, pairs)`` and squared ones.

    ``pair`` is the potential with the operands of these pairs, and ``finite`` says which systems
    have finite positions. The others have no pairs.
    """

    pair: PairFormula
    i: Tensor
    j: Tensor
    d: Tensor
    s: Tensor
    position: Tensor
    finite: Tensor

    @classmethod
    def of(cls, pair: PairFormula, position: Tensor) -> _Geometry:
        assert pair.cutoff is not None
        skin, excluded = skin_of(pair, position), pair.exclusions
        assert skin is not None
        i, j, _, finite = NearestImages(pair.cutoff, skin, pair.image_box, excluded).pairs(position)
        d = _differences(position, i, j)
        if pair.image_box is not None:
            (moved,) = nearest_image([d.unsqueeze(-1)], pair.image_box.to(d), exact=False)
            d = moved.squeeze(-1)
        s = (d * d).sum(0)
        near = (s.detach() < pair.cutoff**2).nonzero().squeeze(-1)
        if pair.classes is not None and pair.partners is not None:
            (a, b), atoms = (i[near], j[near]), position.shape[-2]
            near = near[pair.partners[pair.classes[a % atoms], pair.classes[b % atoms]] != 0]
        i, j, d, s = i[near], j[near], d.index_select(1, near), s.index_select(0, near)
        operands = _with_operands(pair, i, j, position.shape[-2])
        return cls(operands, i, j, d, s, position, finite)

    def sum_rows(self, parts: Tensor) -> Tensor:
        """Sum ``(n, pairs)`` over the neighbours of each atom: ``(*batch, atoms, n)``."""
        atoms = self.position.shape[:-1]
        ends = torch.arange(atoms.numel() + 1, device=self.i.device)
        counts = torch.searchsorted(self.i, ends).diff()
        rows: Tensor = _RowSum.apply(parts.T.contiguous(), self.i, counts)
        return rows.reshape(*atoms, parts.shape[0])

    def force(self, weight: Tensor, rounding: Rounding) -> Tensor:
        """Sum weighted differences, each rounded to the grid of its system."""
        if rounding.rounds:
            spacing = rounding.spacing.reshape(-1)
            if len(spacing) > 1:
                spacing = spacing[self.i // self.position.shape[-2]]
            rounding = Rounding(spacing)
        return self.checked(self.sum_rows(rounding.round(weight * self.d)))

    def checked(self, x: Tensor) -> Tensor:
        """Set results and gradients of systems whose positions are not finite to NaN."""
        factor = torch.where(self.finite, 0.0, torch.nan).to(x)
        zero = (self.position * factor[..., None, None]).sum((-1, -2))
        return x + zero.reshape(zero.shape + (1,) * (x.ndim - zero.ndim))


def _differences(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Compute x_i - x_j, ``(dim, pairs)``."""
    flat = x.reshape(-1, x.shape[-1])
    return (flat.index_select(0, i) - flat.index_select(0, j)).T


class _RowSum(torch.autograd.Function):
    """Sums of consecutive rows in their order, which is that of one thread for each sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        # The lengths are right, and a check of them waits for a GPU.
        return torch.segment_reduce(x, "sum", lengths=counts, axis=0, initial=0, unsafe=True)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        (row,) = ctx.saved_tensors
        return cotangents[0].index_select(0, row), None, None


def _with_operands(pair: PairFormula, i: Tensor, j: Tensor, atoms: int) -> PairFormula:
    """Return the potential with the operands of pairs, for formulas on one axis of pairs."""
    values: dict[str, Operand] = {}
    i, j = i % atoms, j % atoms
    a, b = (i, j) if pair.species is None else (pair.species[i], pair.species[j])
    given = {name: pair.pair_table(name) for name in pair.operand_names()}
    reason = misshapen(pair.species, atoms, given)
    if reason is not None:
        raise ValueError(reason.reason)
    for name, value in given.items():
        if (kind := kind_of(value)) == ATOM:
            # Autograd sums the two cotangents in the order in which they are selected here.
            second = value.index_select(0, j)
            values[name] = value.index_select(0, i), second
        elif kind == FUNCTION:
            values[name] = read_at(value)
        else:
            values[name] = value[a, b] if kind == TABLE else value.reshape(())
    return pair.with_operands(values)


def _is_elementwise(pair: PairFormula, position: Tensor, formula: str) -> bool:
    """Return whether a formula takes pairs on one axis, whatever their number and order.

    A formula that reads a table by itself does not, nor does one that depends on all distances.
    """
    assert pair.cutoff is not None
    atoms = position.shape[-2]
    s = pair.cutoff**2 * torch.tensor(_SAMPLE, dtype=torch.float64).to(position.detach())
    j = torch.arange(len(s), device=position.device) % atoms
    some = torch.tensor(_SUBSET, device=position.device)

    def evaluated(chosen: Tensor) -> Tensor:
        few = _with_operands(pair, torch.zeros_like(chosen), j[chosen], atoms)
        return getattr(few, formula)(s[chosen])

    with torch.no_grad():
        try:
            whole, part = evaluated(torch.arange(len(s), device=s.device)), evaluated(some)
        except Exception:
            # The sums over all pairs evaluate the formula as well, and raise its own errors.
            return False
    if whole.shape not in ((), s.shape) or part.shape not in ((), some.shape):
        return False
    # Sums of a matrix product may be rounded in another order.
    rounding = torch.finfo(s.dtype).eps ** 0.5
    expected = whole.expand_as(s)[some]
    return torch.allclose(part.expand_as(expected), expected, rtol=rounding, atol=0, equal_nan=True)
