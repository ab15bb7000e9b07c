"""Staged sums over pairs: numbers of atoms that are sums over their neighbours, differentiable.

For each atom i, a sum of terms of pairs within a cutoff reads numbers a of both atoms::

    S_i = sum over j of f(s_ij, d_ij, a_i, a_j)

With the cotangent g of S, and the terms of both orders of a pair, the cotangents of numbers and
positions are sums of the same form, of terms that read a and g::

    E_ij = g_i f(s_ij, d_ij, a_i, a_j) + g_j f(s_ij, -d_ij, a_j, a_i)
    dS.g/da_i = sum over j of dE_ij/da_i
    dS.g/dq_i = sum over j of dE_ij/dd_ij + 2 d_ij dE_ij/ds_ij

So derivatives of any order are sums over a neighbour list in time that is linear in the number of
atoms. Kernels (:mod:`~.kernels.sums`) compute them. An atom takes its neighbours in the order of
their numbers, so a sum is a function of positions and numbers to the last bit, whatever the list.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial, reduce
from operator import add, mul
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.compiler import TYPES, CompilerError, UnprintableError
from adjsim.core.box import Periodic
from adjsim.core.derived import derived
from adjsim.core.layout import is_tracing
from adjsim.core.rows import of_each_row, pulled_together
from adjsim.core.state import in_transform
from adjsim.core.strain import Strain
from adjsim.core.transforms import in_forward_mode
from adjsim.potentials.pairs.kernels.cpu import lists
from adjsim.potentials.pairs.kernels.exclusions import check_exclusions
from adjsim.potentials.pairs.kernels.kernel import NO_BOX, ORTHOGONAL, TILTED
from adjsim.potentials.pairs.kernels.sums import Pair, SumKernel, SumSpec, printed
from adjsim.potentials.products import derivative

# How many times longer a list takes beside all pairs in compiled loops, which evaluate symmetric
# terms of all pairs once for both atoms. Measured, see benchmarks/README.md.
IN_LOOPS = 3.0


@dataclass(frozen=True)
class Terms:
    """Terms of pairs, elementwise: ``function(pair)`` returns them.

    Attributes:
        key: identifies the function, of which equal terms share kernels.
    """

    key: Hashable
    function: Callable[[Pair], Sequence[Tensor]] = field(compare=False)

    def slopes(self, count: int, wanted: tuple[bool, ...], positions: bool) -> Terms:
        """Return the terms of the cotangents of positions, if these are asked for, and of numbers.

        They read ``count`` numbers and then the cotangents of the sums. ``wanted`` says of which
        numbers cotangents are computed.
        """
        return Terms(
            (self.key, count, wanted, positions), partial(self._slopes, count, wanted, positions)
        )

    def _slopes(
        self, count: int, wanted: tuple[bool, ...], positions: bool, pair: Pair
    ) -> list[Tensor]:
        def work(pair: Pair) -> Tensor:
            given = pair._replace(mine=pair.mine[:count], other=pair.other[:count])
            parts = zip(self.function(given), pair.mine[count:], strict=True)
            return reduce(add, [x * y for x, y in parts])

        with torch.enable_grad():
            s, *d = map(_differentiable, (pair.s, *pair.d))
            own = [*wanted, *(False for _ in pair.mine[count:])]
            mine = [_differentiable(x) if y else x for x, y in zip(pair.mine, own, strict=True)]
            here = pair._replace(s=s, d=d, mine=mine)
            total = work(here) + work(here.exchanged())
            inputs = [s, *d] if positions else []
            inputs += [x for x, y in zip(mine, own, strict=True) if y]
            whole = total.sum()
            if whole.requires_grad:
                found = torch.autograd.grad(
                    whole, inputs, create_graph=True, materialize_grads=True
                )
            else:  # Terms such as a count of neighbours have no slope.
                found = [torch.zeros_like(x) for x in inputs]
            if not positions:
                return list(found)
            moved, along = found[0], found[1 : 1 + len(d)]
            by_position = [x + 2 * y * moved for x, y in zip(along, d, strict=True)]
            return [*by_position, *found[1 + len(d) :]]


def _differentiable(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


@lru_cache(maxsize=256)
def _kernel(terms: Terms, spec: SumSpec) -> SumKernel:
    return SumKernel(terms.function, spec)


@lru_cache(maxsize=256)
def printable(terms: Terms, numbers: int, dim: int = 3) -> bool:
    """Return whether kernels can compute terms of so many numbers, and two derivatives of them."""
    try:
        for _ in range(3):
            spec = SumSpec(torch.float64, dim, NO_BOX, 1.0, 1.0, numbers, 0)
            _, sums = printed(terms.function, spec)
            terms = terms.slopes(numbers, (True,) * numbers, True)
            numbers += sums
    except UnprintableError:
        return False
    return True


class StagedSums(Periodic):
    """The base class of energies of staged sums over pairs, with a list where it is faster."""

    @derived("box", "cutoff", "skin")
    def smallest_listed_in_loops(self) -> int | None:
        """The smallest number of atoms of which compiled loops use a list; None: they use none."""
        return self.listed_from(IN_LOOPS)

    def is_listed(self, position: Tensor, compiled: bool | None = None) -> bool:
        """Return whether sums go over a neighbour list, for positions of a shape and type.

        ``compiled``: in a compiled loop; None: as they are evaluated now.
        """
        box, kind = self.box, type(position)
        return (
            self.cutoff is not None
            and position.numel() > 0
            and position.shape[-1] <= 3
            and position.device.type == "cpu"
            and position.dtype in TYPES
            and position.is_floating_point()
            and (kind in (Tensor, nn.Parameter) or is_tracing())
            and (box is None or (not box.requires_grad and len(box) == position.shape[-1]))
            and not in_transform()
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and not in_forward_mode()
            and self._is_large(position, is_tracing() if compiled is None else compiled)
            and _compiles(position.dtype)
        )

    def _is_large(self, position: Tensor, compiled: bool) -> bool:
        smallest = self.smallest_listed_in_loops if compiled else self.smallest_listed
        return smallest is not None and position.shape[-2] >= smallest

    def path(self, position: Tensor, strain: Strain | None = None, compiled: bool = False) -> str:
        """Say how pairs are summed for such positions; all pairs where boxes are strained."""
        near = (strain is None or self.box is None) and self.is_listed(position, compiled)
        return "neighbour list" if near else "all pairs, by torch"


@cache
def _compiles(dtype: torch.dtype) -> bool:
    """Return whether there is a compiler for kernels."""
    try:
        lists(dtype)
    except CompilerError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The pairs of positions ``(*batch, atoms, dim)`` within the cutoff of a potential.

    Attributes:
        exclusions: pairs that are left out.
        stretch: ``(*batch, dim, dim)``, zeros by which differences d are d + d @ stretch, for
            derivatives by strain.
    """

    part: StagedSums
    position: Tensor
    exclusions: Tensor | None = None
    stretch: Tensor | None = None

    def sums(
        self, terms: Terms, numbers: Sequence[Tensor], tables: Sequence[Tensor] = ()
    ) -> Sequence[Tensor]:
        """Sum terms over the neighbours of each atom, each ``(*batch, atoms)``, differentiable.

        Numbers are ``(*batch, atoms)``, or broadcast to that shape. Tables ``(atoms, atoms)`` have
        no gradient.
        """
        if self.exclusions is not None and not is_tracing():
            check_exclusions(self.exclusions, self.position.shape[-2])
        shape = self.position.shape[:-1]
        if self.stretch is not None:
            numbers = [*self.stretch.flatten(-2).unsqueeze(-2).unbind(-1), *numbers]
            terms = Terms((terms.key, "stretched"), partial(_stretched, terms.function))
        given = [x.to(self.position).expand(shape) for x in numbers]
        return TermSums.apply(self, terms, tables, self.position, *given).unbind(0)

    def evaluate(
        self, terms: Terms, position: Tensor, numbers: Sequence[Tensor], tables: Sequence[Tensor]
    ) -> Tensor:
        """Evaluate the kernel of terms, or record its evaluation in a trace."""
        part = self.part
        box, cutoff = part.image_box, part.cutoff
        assert cutoff is not None
        spec = SumSpec(
            dtype=position.dtype,
            dim=position.shape[-1],
            image=NO_BOX if box is None else ORTHOGONAL if box.ndim == 1 else TILTED,
            cutoff=cutoff,
            skin=part.list_skin,
            numbers=len(numbers),
            tables=len(tables),
        )
        name = _kernel(terms, spec).name
        cell = None if box is None else box.detach().to(position)
        constants = [x.detach().to(position) for x in tables]

        def evaluated(given: dict[str, Any]) -> list[Tensor]:
            q, stacked = given["position"], given["numbers"]
            return [torch.ops.adjsim.pair_sums(q, stacked, cell, self.exclusions, constants, name)]

        none = position.new_empty(0, *position.shape[:-1])
        stacked = torch.stack(list(numbers)) if numbers else none
        (found,) = of_each_row(evaluated, {"position": position, "numbers": stacked})
        return found


def _stretched(function: Callable[[Pair], Sequence[Tensor]], pair: Pair) -> Sequence[Tensor]:
    """Evaluate terms of a pair whose difference is stretched by the first of its numbers."""
    dim = len(pair.d)
    columns = [pair.mine[b : dim**2 : dim] for b in range(dim)]
    more = [reduce(add, map(mul, pair.d, column)) for column in columns]
    d = [x + y for x, y in zip(pair.d, more, strict=True)]
    s = pair.s + reduce(add, [y * (2 * x + y) for x, y in zip(pair.d, more, strict=True)])
    mine, other = pair.mine[dim**2 :], pair.other[dim**2 :]
    return function(Pair(s, d, mine, other, pair.tables, pair.turned))


def virial_of(energy: Callable[[Tensor, Tensor], Tensor], position: Tensor) -> Tensor:
    """Compute minus the derivative of an energy of position and stretch, ``(*batch, dim, dim)``."""
    *batch, _, dim = position.shape
    zero = position.new_zeros(*batch, dim, dim)
    return -derivative(lambda stretch: energy(position, stretch), zero)


class TermSums(torch.autograd.Function):
    """The sums ``(sums, *batch, atoms)`` of terms, whose cotangents are sums of their slopes."""

    @staticmethod
    def forward(
        ctx: Any,
        near: Neighbours,
        terms: Terms,
        tables: Sequence[Tensor],
        position: Tensor,
        *numbers: Tensor,
    ) -> Tensor:
        ctx.near, ctx.terms, ctx.tables = near, terms, tables
        ctx.save_for_backward(position, *numbers)
        return near.evaluate(terms, position, numbers, tables)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        position, *numbers = ctx.saved_tensors
        near: Neighbours = ctx.near
        by_position, *wanted = ctx.needs_input_grad[3:]
        slopes = ctx.terms.slopes(len(numbers), tuple(wanted), by_position)

        width = position.shape[-1] if by_position else 0

        def pull(c: Tensor) -> list[Tensor]:
            given = [*numbers, *c.unbind(0)]
            if torch.is_grad_enabled():
                found = TermSums.apply(near, slopes, ctx.tables, position, *given)
            else:
                found = near.evaluate(slopes, position, given, ctx.tables)
            along = [torch.stack([*found[:width]], -1)] if by_position else []
            return [*along, *found[width:]]

        parts = pull(*cotangents) if torch.is_grad_enabled() else pulled_together(pull, cotangents)
        found = iter(parts)
        return None, None, None, *(next(found) if x else None for x in (by_position, *wanted))
