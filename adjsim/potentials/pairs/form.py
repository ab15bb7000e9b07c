"""The form of a pair operator, which all values of its tensors share: operands and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from adjsim.core.cache_key import UninspectableError, cache_key
from adjsim.core.derived import own_tensors
from adjsim.core.refusal import Refusal
from adjsim.potentials.pairs.conditions import kind_of, misshapen, skin_of
from adjsim.potentials.pairs.formula import PairFormula
from adjsim.potentials.pairs.kernels.kernel import (
    FORCE,
    NO_BOX,
    ORTHOGONAL,
    TILTED,
    Kernel,
    KernelSpec,
)

# Kernels of a potential by mode, rounding and gradients, or the reason why there is none.
Kernels = dict[tuple[str, bool, tuple[int, ...]], Kernel | Refusal]


@dataclass(frozen=True)
class PairForm:
    """What the operator of a potential has in common for all values of its tensors.

    Attributes:
        names: the names of its operands: the tensors that its formulas may read.
        spec: that of the kernel of the force.
        key: the key of the potential's formulas.
        kernels: the kernels that have been made.
    """

    names: tuple[str, ...]
    spec: KernelSpec
    key: Any
    kernels: Kernels


def form_of(pair: PairFormula, position: Tensor) -> PairForm | Refusal:
    """Return the form for positions of a shape and type, or the reason why there is none."""
    try:
        key = formula_key(pair)
    except UninspectableError as error:
        return Refusal(str(error))
    atoms, dim = position.shape[-2:]
    operands: dict[str, tuple[str, Tensor]] = {}
    for name in pair.operand_names():
        value = operand_of(pair, name, position)
        operands[name] = (kind_of(value), value)
    reason = misshapen(pair.species, atoms, operands)
    if reason is not None:
        return reason
    box = pair.image_box
    image = NO_BOX if box is None else ORTHOGONAL if box.ndim == 1 else TILTED
    kinds = tuple(kind for kind, _ in operands.values())
    spec = KernelSpec(
        FORCE,
        position.dtype,
        dim,
        image,
        pair.cutoff,
        skin_of(pair, position),
        False,
        kinds,
        (),
        pair.exclusions is not None,
    )
    # A formula may read the shapes of tensors, such as the number of atoms, but no exclusions.
    shapes = tuple(
        (name, x.shape, x.dtype) for name, x in own_tensors(pair).items() if name != "exclusions"
    )
    return PairForm(tuple(operands), spec, key, _kernels_of(key, shapes, spec))


@lru_cache(maxsize=256)
def _kernels_of(key: Any, shapes: Any, spec: KernelSpec) -> Kernels:
    """Return the kernels of formulas and the layout of a force, which a class shares."""
    return {}


def operand_of(pair: PairFormula, name: str, position: Tensor) -> Tensor:
    # With a graph also in a sweep, which takes the gradients of operands to parameters.
    with torch.enable_grad():
        return pair.pair_table(name).to(position)


def formula_key(pair: PairFormula) -> Any:
    """Build the key of a potential's formulas, which potentials of one class share.

    Raises:
        UninspectableError: an object that the formulas may read.
    """
    found = cache_key(pair)
    if found.opaque:
        raise UninspectableError(found.opaque[0])
    first, *others = found.modules
    if others:
        return found.dtype, found.modules
    _, kind, _, *attributes = first
    return found.dtype, kind, *attributes
