"""What the operator of a pair potential has in common for all values of its tensors.

The form is found once for each copy that a reading makes, and so once a run.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from operator import is_not
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from adjsim.core.cache_key import UninspectableError, cache_key
from adjsim.core.derived import MADE, Made, own_tensors
from adjsim.core.refusal import Refusal
from adjsim.potentials.pairs.conditions import misshapen, skin_of
from adjsim.potentials.pairs.formula import PairFormula
from adjsim.potentials.pairs.kernels.kernel import (
    ATOM,
    FORCE,
    NO_BOX,
    NUMBER,
    ORTHOGONAL,
    TABLE,
    TILTED,
    Kernel,
    KernelSpec,
)

# Kernels of a potential by mode, rounding and gradients, or the reason why there is none.
Kernels = dict[tuple[str, bool, tuple[int, ...]], Kernel | Refusal]
# Those of formulas and the layout of a force, shared by potentials of one class.
_cache: OrderedDict[Any, Kernels] = OrderedDict()
_lock = Lock()
CAPACITY = 256


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
    """Return the form for positions of a shape and type, or the reason why there is none.

    A copy that a reading has made keeps its forms, as long as its own code sets no attribute, which
    a formula may read.
    """
    made: Made | None = vars(pair).get(MADE)
    if made is None:
        return _form(pair, position)
    place = (position.shape[-2:], position.dtype, torch.get_default_dtype())
    attributes = list(vars(pair).values())
    known = made.forms.get(place)
    if known is None or len(known[0]) != len(attributes) or any(map(is_not, known[0], attributes)):
        known = made.forms[place] = attributes, _form(pair, position)
    return known[1]


def _form(pair: PairFormula, position: Tensor) -> PairForm | Refusal:
    try:
        key = formula_key(pair)
    except UninspectableError as error:
        return Refusal(str(error))
    atoms, dim = position.shape[-2:]
    operands: dict[str, tuple[str, Tensor]] = {}
    for name, value in own_tensors(pair).items():
        if name in ("box", "species") or not value.is_floating_point():
            continue
        value = operand_of(pair, name, position)
        kind = NUMBER if value.numel() == 1 else ATOM if value.ndim == 1 else TABLE
        operands[name] = (kind, value)
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
    place = (key, shapes, spec)
    with _lock:
        kernels = _cache.setdefault(place, Kernels())
        _cache.move_to_end(place)
        if len(_cache) > CAPACITY:
            _cache.popitem(last=False)
    return PairForm(tuple(operands), spec, key, kernels)


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
