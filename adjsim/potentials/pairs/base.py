"""Pair potentials, written as a function of the squared distance.

:mod:`adjsim.potentials.pairs.evaluators` chooses how they are summed: by kernels on the CPU
(``operator.py``), or by torch over a neighbour list (``listed.py``) or all pairs (``dense.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from adjsim.core.reading import read
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.evaluated import terms_of
from adjsim.potentials.pairs import listed
from adjsim.potentials.pairs.evaluators import evaluator_of
from adjsim.potentials.pairs.formula import PairFormula
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
            charge in its own field (:class:`~adjsim.ReactionField`, :class:`~adjsim.Wolf`) and
            :func:`~adjsim.potentials.tail_corrections` do not depend on exclusions.

    Raises:
        ValueError: a cutoff above half the smallest perpendicular width of the box (of its least
            skewed rows), beyond which an atom would interact with two images of another;
            exclusions that are not pairs of different integers from 0; at evaluation, of atoms
            that position does not have.
    """

    def forward(self, position: Positions) -> Energies:
        way, pair = evaluator_of(self, position).way(self, position, "truncated_energy")
        energy: Tensor = way.energy(pair, position)
        if self.cutoff is None or way is listed:
            return energy
        # The sums leave out a pair whose distance is NaN, which compares as beyond the cutoff.
        return energy + (0.0 * position).sum((-1, -2))

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        way, pair = evaluator_of(self, position).way(self, position, "truncated_slope")
        return way.force(pair, position, rounding)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        formulas = "truncated_slope", "truncated_curvature"
        way, pair = evaluator_of(self, position).way(self, position, *formulas)
        return way.force_vjp(pair, position, parameters, rounding)

    def virial(self, position: Positions) -> Tensor:
        """Compute ``sum over i<j of d_ij F_ij``, ``(*batch, dim, dim)``.

        F_ij is the force on i from j. In a periodic box this is minus the derivative of the energy
        with respect to the strain of the box.
        """
        way = evaluator_of(self, position).by_torch(self, position, "truncated_slope")
        return way.virial(self, position)

    def path(self, position: Positions) -> str:
        """Say how pairs are evaluated for such positions, and why not by the operator."""
        pair = read(self)
        return evaluator_of(pair, position).path(pair, position)


def pair_paths(potential: nn.Module, position: Positions) -> dict[str, str]:
    """Say how a potential, or the parts of a sum, evaluate pairs, by the name of their class."""
    parts = terms_of(potential)
    found: dict[str, str] = {}
    for k, part in enumerate(parts):
        if isinstance(part, PairPotential):
            number = f" {k}" if len(parts) > 1 else ""
            found[f"{type(part).__name__}{number}"] = part.path(position)
    return found
