"""Kernels: compiled sums over pairs, and the operator that evaluates them."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from adjsim.compiler import PARALLEL_WORK
from adjsim.core.layout import is_tracing
from adjsim.core.operators import operator, shapes_of
from adjsim.core.rows import are_hidden, hide_rows, level_of_rows, of_each_row, shown, shown_rows
from adjsim.potentials.pairs.kernels.call import CALL

FORCE, PRODUCT, ENERGY, SLOPES = "FORCE", "PRODUCT", "ENERGY", "SLOPES"
NUMBER, TABLE, ATOM = "NUMBER", "TABLE", "ATOM"
# The coefficients of a function, of which a formula computes the places that it reads.
FUNCTION = "FUNCTION"
# The operations that a pair counts for, in the work that threads share.
PAIR_OPERATIONS = 32
NO_BOX, ORTHOGONAL, TILTED = 0, 1, 2
# What a kernel returns for a species without a row in tables, as a printed loop does, and for an
# exclusion of an atom that there is not.
OUT_OF_RANGE, NO_SUCH_ATOM = 3, 4
# What each mode computes before derivatives by operands, which for SLOPES are those of the energy.
OUTPUTS = {FORCE: ("force",), PRODUCT: ("force", "product"), ENERGY: ("energy",), SLOPES: ()}
STRAINED = {FORCE: ("force", "virial"), PRODUCT: ("force", "virial", "product", "strain")}
# What is computed along the strains of boxes: products of differences and forces by coordinate, or
# of each coordinate with all.
DIAGONAL, WHOLE = "diagonal", "whole"


class PairInputs(NamedTuple):
    """The tensors that a kernel reads, in the order of the operator's arguments.

    ``vector`` is that of the product, ``weight`` the cotangent of the energy, ``box`` the rows by
    which nearest images are found, and ``spacing`` that of the grid of a rounding. Where systems
    have boxes of their own, ``stretch`` is the cotangent of the virial, and ``virial_spacing`` that
    of its grid. ``classes`` and ``partners`` say which pairs a list holds, see
    :class:`~adjsim.potentials.pairs.formula.PairFormula`.
    """

    position: Tensor
    vector: Tensor | None
    weight: Tensor | None
    operands: Sequence[Tensor]
    box: Tensor | None
    species: Tensor | None
    exclusions: Tensor | None
    spacing: Tensor | None
    stretch: Tensor | None = None
    virial_spacing: Tensor | None = None
    classes: Tensor | None = None
    partners: Tensor | None = None


@dataclass(frozen=True)
class KernelSpec:
    """The parts of a kernel other than its formulas.

    ``kinds`` are those of the operands, and ``gradients`` the operands with respect to which
    derivatives are computed. Without a ``skin`` all pairs are evaluated, and no neighbour list.
    ``strained``: systems have boxes of their own, and the virial is computed with the force, its
    :data:`DIAGONAL` or :data:`WHOLE`. ``lengths`` are those of functions, 0 for other operands.
    ``device`` is the type of the device of the positions, and ``tile`` the rows and columns of the
    pairs that a program of a GPU sums at once. ``several``: a product takes many cotangents, along
    the first axis of vectors, and of the cotangents of virials where boxes are those of systems.
    ``mutual``: each pair of a list is evaluated once, for both of its atoms.
    """

    mode: str
    dtype: torch.dtype
    dim: int
    image: int
    cutoff: float | None
    skin: float | None
    rounds: bool
    kinds: tuple[str, ...]
    gradients: tuple[int, ...]
    excluded: bool
    strained: str | None = None
    lengths: tuple[int, ...] = ()
    has_species: bool = False
    device: str = "cpu"
    tile: tuple[int, int] | None = None
    several: bool = False
    mutual: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the kernel computes before derivatives by operands."""
        return (OUTPUTS | STRAINED if self.strained else OUTPUTS)[self.mode]

    @property
    def can_be_mutual(self) -> bool:
        """Whether there is a kernel that evaluates each pair once, for both of its atoms."""
        return (
            self.device == "cpu"
            and self.mode in (FORCE, PRODUCT)
            and None not in (self.cutoff, self.skin)
            and not any(self.kinds[k] == FUNCTION for k in self.gradients)
        )

    def shapes(self, inputs: PairInputs) -> list[tuple[int, ...]]:
        """Return the shapes of outputs and gradients."""
        *batch, atoms, dim = inputs.position.shape
        each = tuple(inputs.vector.shape[:1]) if self.several and inputs.vector is not None else ()
        found = [each + tuple(inputs.operands[k].shape) for k in self.gradients]
        width = dim * dim if self.strained == WHOLE else dim
        known = {
            "energy": tuple(batch),
            "force": (*batch, atoms, dim),
            "virial": (*batch, atoms, width),
            "product": (*each, *batch, atoms, dim),
            "strain": (*each, *batch, atoms, width),
        }
        return [*(known[name] for name in self.outputs), *found]

    def arguments(
        self,
        systems: int,
        inputs: Any,
        results: Iterable[Any],
        field: Callable[[Any], Any],
        pointer: Callable[[Any], Any],
    ) -> dict[str, Any]:
        """Return the members of a :data:`~.call.CALL`, other than arrays and functions of lists.

        Inputs and results are tensors, or values of a printed loop. ``field`` and ``pointer``
        return the ``View`` of one and its address.
        """
        atoms, dim = inputs.position.shape[-2:]
        operands = zip(inputs.operands, self.kinds, strict=True)
        spacing, exclusions, vector = inputs.spacing, inputs.exclusions, inputs.vector
        stored = inputs._replace(operands=None)._asdict()
        stored |= zip(self.outputs, results, strict=False)
        virial_spacing = inputs.virial_spacing
        return {
            **{
                name: field(x) if CALL[name] == "View" else pointer(x)
                for name, x in stored.items()
                if x is not None
            },
            "systems": systems,
            "atoms": atoms,
            "dim": dim,
            "cotangents": vector.shape[0] if self.several and vector is not None else 1,
            "threads": self.threads(systems, inputs),
            "image": self.image,
            "spacing_step": int(spacing is not None and math.prod(spacing.shape) > 1),
            "virial_spacing_step": int(
                virial_spacing is not None and math.prod(virial_spacing.shape) > 1
            ),
            "box_step": (dim * dim if self.image == TILTED else dim) if self.strained else 0,
            "kinds": next((x.shape[0] for x, kind in operands if kind == TABLE), 1),
            "cutoff": self.cutoff or 0.0,
            "skin": self.skin or 0.0,
            "excluded": 0 if exclusions is None else exclusions.shape[0],
            "class_count": 0 if inputs.partners is None else inputs.partners.shape[0],
        }

    def threads(self, systems: int, inputs: Any) -> int:
        """Return the number of threads that share the pairs of so many systems."""
        vector, atoms = inputs.vector, inputs.position.shape[-2]
        cotangents = vector.shape[0] if self.several and vector is not None else 1
        return thread_count(cotangents * systems * atoms * (atoms if self.skin is None else 64))


class Kernel(ABC):
    """A sum over pairs, from printed formulas.

    ``slope``, the formula of the force alone, tells whether another kernel computes the same force.
    """

    # The ending of the name of the way by which pairs are evaluated.
    by: ClassVar[str]
    # Whether loops of a compiled step evaluate all pairs faster.
    slower_than_loops: ClassVar[bool]
    # Whether pairs without a cutoff are never taken from a neighbour list.
    lists_need_cutoff: ClassVar[bool]
    # Whether they sum the gradients of tables and of functions in tables.
    sums_tables: ClassVar[bool]

    def __init__(self, spec: KernelSpec, source: str, slope: Any) -> None:
        self.spec, self.source, self._slope = spec, source, slope
        written = f"{source}\n{spec.cutoff!r} {spec.skin!r}"
        #: Identifies the kernel, in this process and in others.
        self.name = hashlib.sha256(written.encode()).hexdigest()[:32]
        KERNELS[self.name] = self

    @staticmethod
    @abstractmethod
    def tile_of(atoms: int, listed: bool) -> tuple[int, int] | None:
        """Return the tile of a specification for a number of atoms, with a list or without."""

    @staticmethod
    @abstractmethod
    def check(spec: KernelSpec) -> None:
        """Refuse a specification that there is no kernel of, before anything is printed."""

    @staticmethod
    @abstractmethod
    def printed(graph: GraphModule, spec: KernelSpec, chosen: Sequence[int] | None = None) -> Any:
        """Print the chosen formulas of a trace; None: all of them."""

    @cached_property
    def of_several(self) -> Kernel | None:
        """The kernel that takes many cotangents at once, where there is one."""
        return None

    @abstractmethod
    def computed(self, shape: torch.Size, given: PairInputs) -> list[Tensor]:
        """Compute the outputs and the gradients.

        ``shape`` is that of positions, of which ``given`` has the systems along one axis.
        """

    def shares_force(self, other: Kernel) -> bool:
        """Return whether it computes the same force, to the last bit, as another kernel."""
        first, second = (
            replace(x.spec, mode=FORCE, gradients=(), several=False, mutual=False)
            for x in (self, other)
        )
        modes = {self.spec.mode, other.spec.mode}
        return modes <= {FORCE, PRODUCT} and first == second and self._slope == other._slope

    def __call__(self, inputs: PairInputs) -> list[Tensor]:
        """Compute the outputs of the specification, and the gradients."""
        spec, shape = self.spec, inputs.position.shape

        def plain(x: Tensor, dtype: torch.dtype = spec.dtype) -> Tensor:
            return x.detach().resolve_neg().to(dtype)

        def dense(x: Tensor | None, dtype: torch.dtype = spec.dtype) -> Any:
            return None if x is None else plain(x, dtype).contiguous()

        flat = plain(inputs.position).reshape(-1, *shape[-2:])
        each = inputs.vector.shape[:1] if spec.several and inputs.vector is not None else ()
        given = PairInputs(
            position=flat,
            vector=None
            if inputs.vector is None
            else plain(inputs.vector).reshape(*each, *flat.shape),
            weight=dense(inputs.weight),
            operands=[dense(x) for x in inputs.operands],
            box=dense(inputs.box),
            species=dense(inputs.species, torch.int64),
            exclusions=dense(inputs.exclusions, torch.int64),
            spacing=dense(inputs.spacing),
            stretch=dense(inputs.stretch),
            virial_spacing=dense(inputs.virial_spacing),
            classes=dense(inputs.classes, torch.int64),
            partners=dense(inputs.partners, torch.int64),
        )
        return self.computed(shape, given)


# Kernels of this process by name, for the operators that name them.
KERNELS: dict[str, Kernel] = {}

_SORTS = {"position": "Tensor", "operands": "Tensor[]"}
_SCHEMA = ", ".join(f"{_SORTS.get(name, 'Tensor?')} {name}" for name in PairInputs._fields)


def of_kernel(*given: Any) -> list[Tensor]:
    """Evaluate the kernel of a name, the last argument. A traced step contains such operators."""
    return KERNELS[given[-1]](PairInputs(*given[:-1]))


pairs = operator("pairs", f"({_SCHEMA}, str kernel) -> Tensor[]")(of_kernel)


@shapes_of(pairs)
def _(*given: Any) -> list[Tensor]:
    inputs = PairInputs(*given[:-1])
    # Gradients are contiguous, whatever the strides of operands.
    return [inputs.position.new_empty(shape) for shape in KERNELS[given[-1]].spec.shapes(inputs)]


def evaluate(kernel: Kernel, inputs: PairInputs) -> list[Tensor]:
    """Evaluate a kernel, or record its evaluation in a trace, for each row of cotangents."""
    given, level = inputs._asdict(), level_of_rows()
    hidden = {name for name, x in given.items() if isinstance(x, Tensor) and are_hidden(x)}
    several = kernel.of_several if hidden and hidden <= {"vector", "stretch"} else None
    if several is None:
        return of_each_row(partial(_evaluate, kernel), given)
    count = max(len(shown_rows(given[name])) for name in hidden)
    rows = {
        name: shown(x, level, count)
        for name in ("vector", "stretch")
        if (x := given[name]) is not None
    }
    found = _evaluate(several, given | rows)
    alone = sum(name in ("force", "virial") for name in kernel.spec.outputs)
    return [*found[:alone], *(hide_rows(x, level) for x in found[alone:])]


def _evaluate(kernel: Kernel, inputs: dict[str, Any]) -> list[Tensor]:
    if not is_tracing():
        return kernel(PairInputs(**inputs))
    given = {
        name: [y.detach() for y in x] if name == "operands" else x if x is None else x.detach()
        for name, x in inputs.items()
    }
    return torch.ops.adjsim.pairs(*given.values(), kernel.name)


def thread_count(pairs: int) -> int:
    """Return the number of threads that share this number of pairs."""
    return torch.get_num_threads() if pairs * PAIR_OPERATIONS >= PARALLEL_WORK else 1
