"""Pair potentials, written as a function of the squared distance.

On the CPU the pair operator evaluates them (:mod:`adjsim.potentials.pairs.operator`). Torch
operations evaluate what the operator does not, over the pairs of a neighbour list
(:mod:`adjsim.potentials.pairs.listed`) or over all pairs (:mod:`adjsim.potentials.pairs.dense`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from adjsim.core.refusal import Refusal
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.evaluated import terms_of
from adjsim.potentials.pairs import dense, kernel_sums, listed
from adjsim.potentials.pairs.formula import PairFormula
from adjsim.potentials.pairs.operator import PairOperator
from adjsim.potentials.products import Pullback


class PairPotential(PairFormula, Potential):
    """A sum over pairs i<j of ``pair_energy(s)``, with s the squared distance.

    Subclasses write ``pair_energy``; ``pair_slope`` (du/ds) and ``pair_curvature`` (d2u/ds2) follow
    from it, or are written too.

    Args:
        cutoff: pairs at or beyond this distance are excluded. None: no cutoff.
        truncation: how the energy ends at the cutoff: :class:`~adjsim.potentials.Shifted` (to
            zero), :class:`~adjsim.potentials.ForceShifted` or
            :class:`~adjsim.potentials.Switched`.
        box: ``(dim,)`` edge lengths or ``(dim, dim)`` rows of a periodic cell; distances are to the
            nearest image. For tilted rows it is found by the least skewed rows of the same lattice.
        skin: how far beyond the cutoff the neighbour list of a large system reaches. It is built
            again when atoms have moved by half of it. None: chosen by the library. Results do not
            depend on it, to the last bit.
        exclusions: ``(n, 2)`` integers, pairs of atoms that do not interact, in any order and as
            often as they come: in a molecule, often the atoms one to three bonds apart. They
            are stored with i < j, sorted, each once. None: all pairs interact. An excluded pair
            has no energy at any image, nor any term that a truncation adds to it. The energy of a
            charge in its own field (:class:`~adjsim.ReactionField`,
            :class:`~adjsim.Wolf`) and
            :func:`~adjsim.potentials.tail_corrections` do not depend on exclusions.

    Raises:
        ValueError: a cutoff above half the smallest perpendicular width of the box. The
            width is taken after tilted rows are replaced, which makes it as large as
            possible. Up to half this width no atom interacts with two images of another.
            Exclusions that are not integers from 0, not pairs, or of an atom with itself, and,
            when evaluated, of atoms that position does not have.
    """

    def forward(self, position: Positions) -> Energies:
        operator = PairOperator.of(self, position)
        if isinstance(operator, PairOperator):
            return kernel_sums.energy(operator, position)
        if listed.applies(self, position, "truncated_energy"):
            return listed.energy(self, position)
        return dense.energy(self, position)

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        operator = PairOperator.of(self, position)
        if isinstance(operator, PairOperator):
            return kernel_sums.force(operator, position, rounding)
        if listed.applies(self, position, "truncated_slope"):
            return listed.force(self, position, rounding)
        return dense.force(self, position, rounding)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        operator = PairOperator.of(self, position)
        if isinstance(operator, PairOperator):
            return kernel_sums.force_vjp(operator, position, parameters, rounding)
        if listed.applies(self, position, "truncated_slope", "truncated_curvature"):
            return listed.force_vjp(self, position, parameters, rounding)
        return dense.force_vjp(self, position, rounding)

    def virial(self, position: Positions) -> Tensor:
        """Compute ``sum over i<j of d_ij F_ij``, ``(*batch, dim, dim)``.

        F_ij is the force on i from j. In a periodic box this is minus the derivative of the energy
        with respect to the strain of the box.
        """
        if listed.applies(self, position, "truncated_slope"):
            return listed.virial(self, position)
        return dense.virial(self, position)

    def path(self, position: Positions) -> str:
        """Say how pairs are evaluated for such positions, and why not by the operator."""
        operator = PairOperator.of(self, position)
        if isinstance(operator, Refusal):
            near = listed.applies(self, position, "truncated_slope")
            return f"{'neighbour list' if near else 'all pairs'}, by torch: {operator.reason}"
        return "all pairs" if operator.form.spec.skin is None else "neighbour list"


def pair_paths(potential: nn.Module, position: Positions) -> dict[str, str]:
    """Say how a potential, or the parts of a sum, evaluate pairs, by the name of their class."""
    parts = terms_of(potential)
    return {
        type(part).__name__ if len(parts) == 1 else f"{type(part).__name__} {k}": part.path(
            position
        )
        for k, part in enumerate(parts)
        if isinstance(part, PairPotential)
    }
