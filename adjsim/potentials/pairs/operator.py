"""The operator that evaluates a pair potential, by kernels made from its formulas.

On the CPU they evaluate all pairs of a small system and a neighbour list of a large one
(:mod:`~.kernels.kernel`). Each atom sums its neighbours in the order of their numbers, so the
result has the same bits with a list and without, whatever its skin. On a GPU they evaluate all
pairs, and a neighbour list of the largest systems (:mod:`~.kernels.gpu`).

A pair of a list whose formula is costly is evaluated once, and its terms are added to the sums of
both atoms, in the same order. With u' the derivative of the energy by the squared distance, the
force on atom i is ``-2 u' d_ij``, and that on atom j is its opposite. The terms of the product with
a vector are opposite too. The terms of a virial, and of the gradient by a number of all pairs, are
the same for both atoms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from adjsim.compiler import UnprintableError
from adjsim.core.cache_key import UninspectableError
from adjsim.core.layout import is_tracing
from adjsim.core.refusal import Refusal
from adjsim.core.rounding import UNROUNDED_BOTH, Roundings
from adjsim.core.rows import vmap_depth
from adjsim.core.strain import Strain
from adjsim.potentials.pairs.formula import (
    Operand,
    PairFormula,
    kind_of,
    misshapen,
    read_at,
    skin_of,
)
from adjsim.potentials.pairs.kernels.cpu import CppKernel
from adjsim.potentials.pairs.kernels.formulas import (
    OTHER,
    Slot,
    is_costly,
    is_symmetric,
    trace,
    trace_elementwise,
)
from adjsim.potentials.pairs.kernels.gpu import TritonKernel
from adjsim.potentials.pairs.kernels.kernel import (
    ATOM,
    DIAGONAL,
    ENERGY,
    FORCE,
    FUNCTION,
    NO_BOX,
    ORTHOGONAL,
    PRODUCT,
    SLOPES,
    TABLE,
    TILTED,
    WHOLE,
    Kernel,
    KernelSpec,
    PairInputs,
    evaluate,
)

# The kernels of the types of devices.
KERNEL_CLASSES: dict[str, type[CppKernel] | type[TritonKernel]] = {
    "cpu": CppKernel,
    "cuda": TritonKernel,
}


@dataclass
class Kernels:
    """The kernels of the formulas of a class, for one layout of a force.

    ``graph`` is the trace of slope, energy and curvature, once they have been found elementwise,
    ``mutual`` whether their kernels of a list evaluate each pair once, where they can, and ``made``
    has kernels by mode, rounding, gradients and what is computed along strains, or the reason why
    there is none.
    """

    graph: GraphModule | None = None
    mutual: bool = False
    made: dict[tuple[str, bool, tuple[int, ...], str | None], Kernel | Refusal] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class PairForm:
    """The parts of a potential's operator that do not depend on the values of its tensors.

    ``names`` are those of its operands, the tensors that its formulas may read; ``spec`` is that of
    the kernel of the force, and ``key`` the key of the formulas.
    """

    names: tuple[str, ...]
    spec: KernelSpec
    key: Any
    kernels: Kernels


def form_of(pair: PairFormula, position: Tensor) -> PairForm | Refusal:
    """Return the form for positions of a shape and type, or the reason why there is none."""
    try:
        key = pair.formula_key()
    except UninspectableError as error:
        return Refusal(str(error))
    atoms, dim = position.shape[-2:]
    operands = {name: _operand_of(pair, name, position) for name in pair.operand_names()}
    reason = misshapen(pair.species, atoms, operands)
    if reason is not None:
        return reason
    box, device = pair.image_box, position.device.type
    kernels, skin = KERNEL_CLASSES[device], skin_of(pair, position)
    if kernels.lists_need_cutoff:
        skin = None if pair.cutoff is None else skin_of(pair, position, by_tiles=True)
    spec = KernelSpec(
        mode=FORCE,
        dtype=position.dtype,
        dim=dim,
        image=NO_BOX if box is None else ORTHOGONAL if box.ndim == 1 else TILTED,
        cutoff=pair.cutoff,
        skin=skin,
        rounds=False,
        kinds=tuple(map(kind_of, operands.values())),
        gradients=(),
        excluded=pair.exclusions is not None,
        lengths=tuple(x.numel() if kind_of(x) == FUNCTION else 0 for x in operands.values()),
        has_species=pair.species is not None,
        device=device,
        tile=kernels.tile_of(atoms, skin is not None),
    )
    return PairForm(tuple(operands), spec, key, _kernels_of(key, pair.layout(), spec))


@lru_cache(maxsize=256)
def _kernels_of(key: Any, shapes: Any, spec: KernelSpec) -> Kernels:
    """Return the kernels of formulas and the layout of a force, which a class shares."""
    return Kernels()


def _operand_of(pair: PairFormula, name: str, position: Tensor) -> Tensor:
    # With a graph also in a sweep, which takes the gradients of operands to parameters.
    with torch.enable_grad():
        return pair.pair_table(name).to(position)


@dataclass(frozen=True)
class PairOperator:
    """The operator of a potential for positions of one shape, with gradients to its operands.

    ``strain`` is that of the boxes of systems; None: all have that of the potential.
    """

    pair: PairFormula
    operands: tuple[Tensor, ...]
    form: PairForm
    strain: Strain | None = None

    @classmethod
    def of(
        cls, pair: PairFormula, form: PairForm, position: Tensor, strain: Strain | None = None
    ) -> PairOperator:
        """Return the operator, with the present values of operands, and strains of boxes if any."""
        operands = tuple(_operand_of(pair, name, position) for name in form.names)
        return cls(pair, operands, form, strain)

    @property
    def present_strain(self) -> Strain:
        """The strain of an operator that has one."""
        assert self.strain is not None
        return self.strain

    @cached_property
    def box(self) -> Tensor | None:
        """The rows by which nearest images are found, of each system where it has a strain."""
        box = self.pair.image_box
        return box if self.strain is None or box is None else self.strain.stretched(box)

    @property
    def strained(self) -> str | None:
        """What is computed along strains: products by coordinate, or the whole virial."""
        return None if self.strain is None else WHOLE if self.strain.full else DIAGONAL

    @property
    def printed(self) -> bool:
        """Whether all pairs are evaluated by loops of a compiled step, which are faster."""
        # The loops cannot sum gradients of a table over the pairs of two species.
        spec = self.form.spec
        small = spec.skin is None and not {TABLE, FUNCTION} & {*spec.kinds}
        slower = KERNEL_CLASSES[spec.device].slower_than_loops
        # Their product differentiates in the loop, which no rows of cotangents go through.
        alone = vmap_depth() == 0
        return small and slower and is_tracing() and not self.pair.costly and alone

    @property
    def usable(self) -> PairOperator | Refusal:
        """The operator, or why its kernels lack a gradient or boxes that may be asked for."""
        spec = self.form.spec
        if self.strain is not None:
            try:
                KERNEL_CLASSES[spec.device].check(replace(spec, strained=self.strained))
            except UnprintableError as error:
                return Refusal(str(error))
        tables = any(spec.kinds[k] in (TABLE, FUNCTION) for k in self.wanted)
        if tables and not KERNEL_CLASSES[spec.device].sums_tables:
            return Refusal("a table of its parameters requires grad")
        return self

    @property
    def settings(self) -> tuple[Tensor | None, ...]:
        """The tensors other than operands."""
        return self.box, self.pair.species, self.pair.exclusions

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """The operands that require grad."""
        return tuple(k for k, x in enumerate(self.operands) if x.requires_grad)

    def has(self, *modes: str, rounds: bool = False) -> bool:
        """Return whether there are kernels for these modes."""
        return all(
            isinstance(self.kernel(mode, rounds and mode in (FORCE, PRODUCT)), Kernel)
            for mode in modes
        )

    def differentiable(self, position: Tensor) -> bool:
        """Return whether a derivative to the position or an operand may be asked for."""
        return torch.is_grad_enabled() and (position.requires_grad or bool(self.wanted))

    def evaluate(
        self,
        mode: str,
        position: Tensor,
        *,
        vector: Tensor | None = None,
        roundings: Roundings = UNROUNDED_BOTH,
        weight: Tensor | None = None,
        stretch: Tensor | None = None,
    ) -> list[Tensor]:
        """Evaluate the kernel of a mode, see :class:`~.kernels.kernel.Kernel`."""
        rounding, virial = roundings
        kernel = self.kernel(mode, rounding.rounds)
        if isinstance(kernel, Refusal):
            raise RuntimeError(f"{type(self.pair).__name__} has no pair operator: {kernel.reason}.")
        box, species, exclusions = self.settings
        inputs = PairInputs(
            position=position,
            vector=vector,
            weight=weight,
            operands=self.operands,
            box=None if box is None else box.to(position),
            species=species,
            exclusions=exclusions,
            spacing=rounding.spacing if rounding.rounds else None,
            stretch=stretch,
            classes=self.pair.classes,
            partners=self.pair.partners,
            virial_spacing=virial.spacing if virial.rounds else None,
        )
        return evaluate(kernel, inputs)

    def kernel(self, mode: str, rounds: bool = False) -> Kernel | Refusal:
        """Return the kernel of a mode, or the reason why there is none."""
        gradients = self.wanted if mode in (PRODUCT, SLOPES) else ()
        made, key = self.form.kernels.made, (mode, rounds, gradients, self.strained)
        known = made.get(key)
        if known is None:
            if self.pair.formula_key() != self.form.key:
                raise RuntimeError(
                    f"a value that {type(self.pair).__name__} reads has changed since the force "
                    "was evaluated, and its gradient had not been compiled yet. Call backward "
                    "before the change."
                )
            spec = replace(
                self.form.spec,
                mode=mode,
                rounds=rounds,
                gradients=gradients,
                strained=self.strained,
            )
            try:
                known = self._compiled(spec)
            except UnprintableError as error:
                known = Refusal(str(error))
            made[key] = known
        return known

    def _compiled(self, spec: KernelSpec) -> Kernel:
        Made = KERNEL_CLASSES[spec.device]
        Made.check(spec)
        slope, energy, curvature = map(
            self._formula, ("truncated_slope", "truncated_energy", "truncated_curvature")
        )
        # The operands of a pair with their kinds: two for a number of each atom.
        slots: dict[Slot, str] = {}
        lengths: dict[Slot, int] = {}
        for name, kind, length in zip(self.form.names, spec.kinds, spec.lengths, strict=True):
            slots[name, 0] = kind
            if kind == FUNCTION:
                lengths[name, 0] = length
            if kind == ATOM:
                slots[name, 1] = OTHER
        graph = self.form.kernels.graph
        if graph is None:
            graph = trace_elementwise([slope, energy, curvature], slots, spec.dtype, lengths)
            self.form.kernels.graph = graph
            # A cheap formula gains nothing: to add a pair to the sums of both atoms takes as long.
            # An asymmetric one would give the force other bits than kernels that sum at each atom.
            self.form.kernels.mutual = (
                self.form.spec.can_be_mutual
                and is_costly(graph)
                and is_symmetric(graph, list(slots), spec.dtype, lengths, range(3))
            )
        spec = replace(spec, mutual=spec.can_be_mutual and self.form.kernels.mutual)
        force = Made.printed(graph, spec, [0])
        wanted = [(self.form.names[k], 0) for k in spec.gradients]
        if not wanted:
            chosen = {FORCE: [0], PRODUCT: [0, 2], ENERGY: [1], SLOPES: []}[spec.mode]
            return Made(spec, Made.printed(graph, spec, chosen), force)
        formulas, differentiated = {PRODUCT: ([slope, curvature], slope), SLOPES: ([], energy)}[
            spec.mode
        ]
        graph, places = trace(
            formulas, list(slots), spec.dtype, lengths, differentiated=differentiated, wanted=wanted
        )
        if spec.mutual:
            # The kernel evaluates gradients by numbers of each atom twice, once for either atom.
            alike = [2 + n for n, k in enumerate(spec.gradients) if spec.kinds[k] != ATOM]
            symmetric = is_symmetric(graph, list(slots), spec.dtype, lengths, alike)
            spec = replace(spec, mutual=symmetric)
        return Made(spec, Made.printed(graph, spec), force, places)

    def _formula(self, method: str) -> Any:
        bare = self.pair.bare()

        def formula(s: Tensor, values: Mapping[Slot, Any]) -> Tensor:
            operands: dict[str, Operand] = {
                name: (x, values[name, 1]) if (name, 1) in values else x
                for (name, end), x in values.items()
                if end == 0
            }
            return getattr(bare.with_operands(operands), method)(s)

        return formula

    def by_torch(self, operands: Sequence[Tensor], fixed: bool = False) -> PairFormula:
        """Return the potential with these operands, for torch operations over all pairs.

        With ``fixed``, numbers of the second atoms of pairs have no gradient.
        """
        values: dict[str, Operand] = {}
        species = self.pair.species
        for name, kind, value in zip(self.form.names, self.form.spec.kinds, operands, strict=True):
            if kind == TABLE and species is not None:
                value = value[species.unsqueeze(-1), species]
            values[name] = (
                read_at(value)
                if kind == FUNCTION
                else (value.unsqueeze(-1), value.detach() if fixed else value)
                if kind == ATOM
                else value
            )
        return self.pair.with_operands(values)
