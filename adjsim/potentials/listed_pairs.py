"""Sums over the pairs of a neighbour list, by torch operations.

They evaluate large systems where the pair operator cannot: on a GPU, without a compiler, and for
formulas that are not written in C++. The sums are those of :mod:`adjsim.potentials.all_pairs`.

The list is a cache. It holds the pairs within the cutoff and a skin, and is built again once the
two largest displacements since it was built sum to the skin. Of the list, the pairs within the
cutoff alone are evaluated and summed, in ascending order. These pairs are a function of the
position, so results are too, to the last bit, and nobody has to keep the list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from adjsim._box import nearest_image
from adjsim._grid import Grid
from adjsim._layout import is_tracing
from adjsim._params import refuse_unknown
from adjsim._state import in_transform
from adjsim._tree import pairs_within
from adjsim._typing import Energies, Positions
from adjsim.potentials.base import Pullback
from adjsim.potentials.pair_conditions import skin_of

if TYPE_CHECKING:
    from adjsim.potentials.pair import PairPotential


# The number of pairs on which a formula is checked.
_SAMPLE = 8


@dataclass(frozen=True)
class Pairs:
    """Pairs of different atoms of one system or several, in both orders.

    Atoms are numbered one system after another. Pairs are sorted by the first atom and then by the
    second one.
    """

    i: Tensor
    j: Tensor


@dataclass(frozen=True)
class _Listed:
    key: Any
    position: Tensor
    pairs: Pairs


_lists: deque[_Listed] = deque(maxlen=16)
_lock = Lock()


def applies(pair: PairPotential, position: Tensor, *formulas: str) -> bool:
    """Return whether a system is large enough for a list, and these formulas can use one.

    A list depends on the values of positions, so there is none while torch records or transforms.
    """
    if is_tracing() or in_transform() or torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0 or position.numel() == 0:
        return False
    if pair.box is not None and (pair.box.requires_grad or len(pair.box) != position.shape[-1]):
        return False
    if skin_of(pair, position) is None:
        return False
    return all(_is_elementwise(pair, position, formula) for formula in formulas)


def energy(pair: PairPotential, position: Positions) -> Energies:
    """Compute the energy, differentiable."""
    near = _Geometry.of(pair, position)
    rows = near.sum_rows(0.5 * near.pair.truncated_energy(near.s)[None])
    return near.checked(rows.sum((-1, -2)))


def force(pair: PairPotential, position: Positions, grid: Grid | None) -> Positions:
    """Compute the force, differentiable."""
    near = _Geometry.of(pair, position)
    parts = -2 * near.pair.truncated_slope(near.s) * near.d
    if grid is not None:
        parts = near.round(parts, grid)
    return near.checked(near.sum_rows(parts))


def force_vjp(
    pair: PairPotential, position: Positions, parameters: Sequence[Tensor], grid: Grid | None
) -> tuple[Tensor, Pullback]:
    """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dtheta)."""
    with torch.no_grad():
        near = _Geometry.of(pair, position)
        weight = -2 * near.pair.truncated_slope(near.s)
        parts = weight * near.d
        value = near.checked(near.sum_rows(parts if grid is None else near.round(parts, grid)))

    def pullback(v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        with torch.no_grad():
            w = near.differences(v)
            dw = (near.d * w).sum(0)
            curvature = -4 * near.pair.truncated_curvature(near.s) * dw
            along = near.checked(near.sum_rows(curvature * near.d + weight * w))
        with torch.enable_grad():
            slope = _with_operands(pair, near.pairs, position.shape[-2]).truncated_slope(near.s)
            total = (-dw * slope).sum()
        what = f"the force of {type(pair).__name__}"
        refuse_unknown(total, pair, parameters, what)
        if not parameters or not total.requires_grad:
            return along, [None] * len(parameters)
        return along, list(torch.autograd.grad(total, parameters, allow_unused=True))

    return value, pullback


def virial(pair: PairPotential, position: Positions) -> Tensor:
    """Compute ``sum over i<j of d_ij F_ij``, ``(*batch, dim, dim)``."""
    near = _Geometry.of(pair, position)
    weighted = -near.pair.truncated_slope(near.s) * near.d
    products = weighted.unsqueeze(0) * near.d.unsqueeze(1)
    rows = near.sum_rows(products.flatten(0, 1)).sum(-2)
    return near.checked(rows.unflatten(-1, (position.shape[-1],) * 2))


@dataclass(frozen=True)
class _Geometry:
    """The pairs within the cutoff, their differences ``(dim, pairs)`` and squared distances.

    ``pair`` is the potential with the operands of these pairs, and ``finite`` says which systems
    have finite positions. The others have no pairs.
    """

    pair: PairPotential
    pairs: Pairs
    d: Tensor
    s: Tensor
    shape: torch.Size
    finite: Tensor

    @classmethod
    def of(cls, pair: PairPotential, position: Tensor) -> _Geometry:
        assert pair.cutoff is not None
        finite = torch.isfinite(position).flatten(-2).all(-1)
        listed = _find(pair, position.detach(), finite)
        d = _differences(position, listed)
        if pair.box is not None:
            (moved,) = nearest_image([d.unsqueeze(-1)], pair.box.to(d), exact=False)
            d = moved.squeeze(-1)
        s = (d * d).sum(0)
        near = (s.detach() < pair.cutoff**2).nonzero().squeeze(-1)
        pairs = Pairs(listed.i[near], listed.j[near])
        d, s = d.index_select(1, near), s.index_select(0, near)
        operands = _with_operands(pair, pairs, position.shape[-2])
        return cls(operands, pairs, d, s, position.shape, finite)

    def differences(self, x: Tensor) -> Tensor:
        return _differences(x, self.pairs)

    def sum_rows(self, parts: Tensor) -> Tensor:
        """Sum ``(n, pairs)`` over the neighbours of each atom: ``(*batch, atoms, n)``."""
        atoms = self.shape[:-1]
        counts = torch.bincount(self.pairs.i, minlength=atoms.numel())
        rows: Tensor = _RowSum.apply(parts.T.contiguous(), self.pairs.i, counts)
        return rows.reshape(*atoms, parts.shape[0])

    def round(self, parts: Tensor, grid: Grid) -> Tensor:
        """Round the contributions to a force, of each system to its own grid."""
        spacing = grid.spacing.reshape(-1)
        if len(spacing) > 1:
            spacing = spacing[self.pairs.i // self.shape[-2]]
        return Grid(spacing).round(parts)

    def checked(self, x: Tensor) -> Tensor:
        """Set the results of systems whose positions are not finite to NaN."""
        finite = self.finite.reshape(self.finite.shape + (1,) * (x.ndim - self.finite.ndim))
        return torch.where(finite, x, torch.nan)


def _differences(x: Tensor, pairs: Pairs) -> Tensor:
    """Compute x_i - x_j, ``(dim, pairs)``."""
    flat = x.reshape(-1, x.shape[-1])
    return (flat.index_select(0, pairs.i) - flat.index_select(0, pairs.j)).T


class _RowSum(torch.autograd.Function):
    """Sums of consecutive rows in their order, which is that of one thread for each sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        return torch.segment_reduce(x, "sum", lengths=counts, axis=0, initial=0, unsafe=True)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        (row,) = ctx.saved_tensors
        return cotangents[0].index_select(0, row), None, None


def _find(pair: PairPotential, position: Tensor, finite: Tensor) -> Pairs:
    """Return pairs that contain all pairs within the cutoff."""
    skin, box = skin_of(pair, position), pair.box
    assert pair.cutoff is not None
    assert skin is not None
    cell = None if box is None else tuple(box.flatten().tolist())
    key = (position.shape, position.dtype, position.device, pair.cutoff + skin, cell)
    with _lock:
        known = [entry for entry in _lists if entry.key == key]
    for entry in known:
        moved = (position - entry.position).norm(dim=-1)
        largest = moved.topk(min(2, moved.shape[-1])).values.sum(-1)
        if bool((largest < skin).all()):
            return entry.pairs
    found = _search(position, finite, box, pair.cutoff + skin)
    with _lock:
        _lists.appendleft(_Listed(key, position.clone(), found))
    return found


def _search(position: Tensor, finite: Tensor, box: Tensor | None, reach: float) -> Pairs:
    # Differences of positions far from the box are rounded.
    rounded = 16 * torch.finfo(position.dtype).eps * float(position.nan_to_num(0, 0, 0).abs().max())
    atoms, found = position.shape[-2], list[Tensor]()
    systems = position.reshape(-1, *position.shape[-2:])
    for k, (q, whole) in enumerate(zip(systems, finite.flatten().tolist(), strict=True)):
        if whole:
            i, j = pairs_within(q, box, reach + rounded)
            found.append(torch.stack([torch.cat([i, j]), torch.cat([j, i])]) + k * atoms)
    i, j = torch.cat(found, 1) if found else torch.empty(2, 0, dtype=torch.int64).to(finite.device)
    order = torch.argsort(i * systems.shape[:2].numel() + j)
    return Pairs(i[order], j[order])


def _with_operands(pair: PairPotential, pairs: Pairs, atoms: int) -> PairPotential:
    """Return the potential with the operands of pairs, for formulas on one axis of pairs."""
    values: dict[str, Tensor] = {}
    i, j = pairs.i % atoms, pairs.j % atoms
    for name, registered in (*pair._parameters.items(), *pair._buffers.items()):
        if registered is None or name in ("box", "species") or not registered.is_floating_point():
            continue
        value = pair.pair_table(name)
        if value.numel() > 1 and value.ndim == 2:
            species = pair.species
            a, b = (i, j) if species is None else (species[i], species[j])
            value = value[a, b]
        elif value.numel() > 1:
            values[f"{name} of the other"] = value.index_select(0, j)
            value = value.index_select(0, i)
        values[name] = value
    return pair.with_operands(values)


def _is_elementwise(pair: PairPotential, position: Tensor, formula: str) -> bool:
    """Return whether a formula takes pairs on one axis, whatever their number.

    A formula that reads a table by itself does not, nor does one that depends on all distances.
    """
    assert pair.cutoff is not None
    atoms = position.shape[-2]
    s = pair.cutoff**2 * torch.linspace(0.3, 0.9, _SAMPLE).to(position.detach())
    j = torch.arange(_SAMPLE, device=position.device) % atoms
    pairs = Pairs(torch.zeros_like(j), j)

    def evaluated(count: int) -> Tensor:
        few = Pairs(pairs.i[:count], pairs.j[:count])
        return getattr(_with_operands(pair, few, atoms), formula)(s[:count])

    with torch.no_grad():
        try:
            all_of_them, three = evaluated(_SAMPLE), evaluated(3)
        except (RuntimeError, ValueError, IndexError):
            # Tensors of two shapes: the sums over all pairs evaluate the formula, or say its error.
            return False
    if all_of_them.shape not in ((), s.shape):
        return False
    # Sums of a matrix product may be rounded in another order.
    rounding = torch.finfo(s.dtype).eps ** 0.5
    first = all_of_them.expand_as(s)[:3]
    return torch.allclose(first, three.expand(3), rtol=rounding, atol=0, equal_nan=True)
