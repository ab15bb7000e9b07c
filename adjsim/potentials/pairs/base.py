"""Pair potentials, written as a function of the squared distance, and the way they are summed.

They are summed by kernels (``operator.py``), or by torch over a neighbour list (``listed.py``) or
all pairs (``dense.py``). The choice is made once for each copy that a reading
makes. A run computes with such a copy, so it asks once, at its first force.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.compiler import TYPES
from adjsim.core.derived import MADE, Made, are, own_tensors
from adjsim.core.layout import is_tracing
from adjsim.core.reading import read
from adjsim.core.refusal import Refusal
from adjsim.core.rounding import UNROUNDED, UNROUNDED_BOTH, Rounding, Roundings
from adjsim.core.state import in_transform
from adjsim.core.strain import Strain
from adjsim.core.transforms import in_forward_mode
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.evaluated import Evaluated
from adjsim.potentials.joining import Alike
from adjsim.potentials.pairs import dense, kernel_sums, listed, strained_sums
from adjsim.potentials.pairs.formula import PairFormula, skin_of
from adjsim.potentials.pairs.joined import JoinedFormula, members_of
from adjsim.potentials.pairs.kernels.exclusions import check_exclusions
from adjsim.potentials.pairs.kernels.kernel import FORCE
from adjsim.potentials.pairs.operator import KERNEL_CLASSES, PairForm, PairOperator, form_of
from adjsim.potentials.pairs.term_sums import StagedSums
from adjsim.potentials.products import ParameterVJP, Pullback, Tensors
from adjsim.potentials.strained import Forced, StrainedPullback, energy_at, reference_box


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
        self, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        formulas = "truncated_slope", "truncated_curvature"
        way, pair = evaluator_of(self, position).way(self, position, *formulas)
        return way.force_vjp(pair, position, parameters, rounding)

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        if self.box is None or type(self).forward is not PairPotential.forward:
            # An energy that differs by a constant is another one.
            return energy_at(self, position, strain)
        operator = _strained(self, position, strain)
        if operator is not None:
            return strained_sums.energy(operator, position)
        return dense.strained_energy(self, position, strain)

    def strained_force(
        self, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
    ) -> Forced:
        if self.box is None:
            return super().strained_force(position, strain, roundings)
        operator = _strained(self, position, strain)
        if operator is not None:
            return strained_sums.force(operator, position, roundings)
        return dense.strained_force(self, position, strain, roundings)

    def strained_vjp(
        self,
        position: Positions,
        strain: Strain,
        parameters: Tensors,
        roundings: Roundings = UNROUNDED_BOTH,
    ) -> tuple[Forced, StrainedPullback]:
        if self.box is None:
            return super().strained_vjp(position, strain, parameters, roundings)
        with torch.no_grad():
            operator = _strained(self, position, strain)
        if operator is not None:
            values, product = strained_sums.force_vjp(operator, position, parameters, roundings)
        else:
            values, product = dense.strained_vjp(self, position, strain, roundings)

        def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, ParameterVJP]:
            with torch.no_grad():
                return strained_sums.with_strain(position, strain, values, v, c, product)

        return values, pullback

    def listed_pairs(self, position: Tensor) -> tuple[PairPotential | None, list[nn.Module]]:
        listed = (
            keeps(self, PairPotential, *FORCES)
            and position.device.type == "cpu"
            and skin_of(self, position) is not None
        )
        # The functions of tables and the classes of atoms of a member would be those of all.
        plain = listed and not self.tables and self.classes is None
        if not plain or unsupported(self, position) is not None:
            return None, [self]
        return self, []

    def joined(
        self, alike: Alike, others: Sequence[tuple[PairPotential, Alike]], position: Tensor, /
    ) -> tuple[list[PairPotential], PairPotential]:
        given = [(self, alike), *others]
        members = members_of(given[0], others)
        found = object.__new__(JoinedPairs)
        found.join(members)
        if evaluator_of(found, position).has_kernel:
            return members, found
        # A member without a kernel would have the others evaluated by torch too.
        able = [(x, y) for x, y in given if evaluator_of(x, position).has_kernel]
        if 1 < len(able) < len(given):
            (first, y), *rest = able
            return first.joined(y, rest, position)
        return [self], found

    def virial(self, position: Positions) -> Tensor:
        """Compute ``sum over i<j of d_ij F_ij``, ``(*batch, dim, dim)``.

        F_ij is the force on i from j. In a periodic box this is minus the derivative of the energy
        with respect to the strain of the box.
        """
        way = evaluator_of(self, position).by_torch(self, position, "truncated_slope")
        return way.virial(self, position)

    def path(
        self, position: Positions, strain: Strain | None = None, compiled: bool = False
    ) -> str:
        """Say how pairs are evaluated for such positions, and why not by the operator.

        ``strain`` is that of the boxes of systems; None: all have the box of the potential.
        ``compiled``: in a compiled loop.
        """
        pair = read(self)
        evaluator = evaluator_of(pair, position)
        operator = evaluator.operator(pair, position)
        if pair.box is not None and strain is not None:
            strained = _strained(pair, position, strain)
            operator = operator if strained is None else strained.usable
            if isinstance(operator, Refusal):
                return f"all pairs, by torch: {operator.reason}"
        if isinstance(operator, PairOperator):
            spec = operator.form.spec
            near = "all pairs" if spec.skin is None else "neighbour list"
            return near + KERNEL_CLASSES[spec.device].by
        near = not compiled and evaluator.by_torch(pair, position, "truncated_slope") is listed
        return f"{'neighbour list' if near else 'all pairs'}, by torch: {operator.reason}"


# The methods that an evaluation with others replaces.
FORCES = "force", "force_vjp", "strained_force", "strained_vjp"


def keeps(module: nn.Module, base: type, *methods: str) -> bool:
    """Return whether a module has these methods of a base class, and none of its own."""
    return all(
        x not in vars(module) and getattr(type(module), x) is getattr(base, x) for x in methods
    )


class JoinedPairs(JoinedFormula, PairPotential):
    """The sum of pair potentials over the same pairs, which takes one pass over them."""


def _strained(pair: PairPotential, position: Tensor, strain: Strain) -> PairOperator | None:
    """Return the operator in the boxes of systems, None where there is none."""
    form = evaluator_of(pair, position).form
    return PairOperator.of(pair, form, position, strain) if isinstance(form, PairForm) else None


def pair_paths(
    potential: nn.Module,
    position: Positions,
    strain: Tensor | None = None,
    compiled: bool = False,
) -> dict[str, str]:
    """Say how a potential, or the parts of a sum, evaluate pairs, by the name of their class.

    ``strain`` is that of a state whose box moves. ``compiled``: in a compiled loop.
    """
    parts, moved = [potential], None
    if strain is not None:
        moved = Strain.of(reference_box(potential), strain)
    if isinstance(potential, Evaluated):
        parts, position = potential.evaluated_parts(position)
    found: dict[str, str] = {}
    for k, part in enumerate(parts):
        if isinstance(part, PairPotential | StagedSums):
            number = f" {k}" if len(parts) > 1 else ""
            found[f"{type(part).__name__}{number}"] = part.path(position, moved, compiled)
    return found


def unsupported(pair: PairFormula, position: Tensor) -> Refusal | None:
    """Return why a potential has no operator for positions of this shape and type."""
    if in_transform() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return Refusal("a transform of torch.func, torch.compile or torch.jit.trace is active")
    box, dtype, kind = pair.box, position.dtype, type(position)
    reasons = {
        f"positions are on {position.device.type}": position.device.type not in KERNEL_CLASSES,
        f"positions are {dtype}": dtype not in TYPES or not dtype.is_floating_point,
        "there are no atoms": position.numel() == 0,
        "forward-mode differentiation is active": in_forward_mode(),
        "the box requires grad": box is not None and box.requires_grad,
        "it has modules with tensors": any(own_tensors(part) for part in pair.other_modules()),
        "positions have more than three dimensions": position.shape[-1] > 3,
        f"positions are {kind.__name__}": kind not in (Tensor, nn.Parameter) and not is_tracing(),
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
    """The kernel, list or sum of all pairs that evaluates positions of one shape and type.

    The potential keeps its evaluators, and is an argument of their methods, since a reference to it
    would be a cycle.
    """

    def __init__(self, pair: PairFormula, position: Tensor) -> None:
        form = unsupported(pair, position) or form_of(pair, position)
        if isinstance(form, PairForm):
            # The kernel of the force is the same for all values of operands.
            found = PairOperator(pair, (), form).kernel(FORCE)
            form = found if isinstance(found, Refusal) else form
        if pair.exclusions is not None and not (is_tracing() or torch.compiler.is_compiling()):
            # Neither kernels of a GPU nor lists report exclusions of atoms that do not exist.
            check_exclusions(pair.exclusions, position.shape[-2])
        self.form = form
        self._listed: dict[str, bool] = {}

    @property
    def has_kernel(self) -> bool:
        """Whether there is a kernel of the force."""
        return isinstance(self.form, PairForm)

    def way(self, pair: PairFormula, position: Tensor, *formulas: str) -> tuple[Any, Any]:
        """Return the module whose functions sum these formulas, and their first argument."""
        operator = self.operator(pair, position)
        if isinstance(operator, PairOperator):
            return kernel_sums, operator
        return self.by_torch(pair, position, *formulas), pair

    def operator(self, pair: PairFormula, position: Tensor) -> PairOperator | Refusal:
        """Return the operator with the present operands, or the reason why there is none."""
        if not isinstance(self.form, PairForm):
            return self.form
        return PairOperator.of(pair, self.form, position).usable

    def by_torch(self, pair: PairFormula, position: Tensor, *formulas: str) -> Any:
        """Return the module by whose torch operations these formulas are summed."""
        for formula in formulas:
            if formula not in self._listed:
                self._listed[formula] = listed.applies(pair, position, formula)
        return listed if all(self._listed[formula] for formula in formulas) else dense


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
    attributes = pair.attributes()
    known = made.evaluators.get(place)
    if known is None or not are(known[0], attributes):
        known = made.evaluators[place] = attributes, PairEvaluator(pair, position)
    evaluator: Any = known[1]
    return evaluator
