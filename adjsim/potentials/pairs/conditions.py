"""When a pair potential has an operator, and when the operator has a neighbour list."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from adjsim.compiler.values import TYPES
from adjsim.core.layout import is_tracing
from adjsim.core.refusal import Refusal
from adjsim.core.state import in_transform
from adjsim.potentials.pairs.formula import PairFormula
from adjsim.potentials.pairs.kernels.kernel import ATOM, NUMBER, TABLE


def recording() -> tuple[bool, ...]:
    """Return which of torch's ways to record or to transform operations are active."""
    return (
        is_tracing(),
        in_transform(),
        torch.compiler.is_compiling(),
        torch.jit.is_tracing(),
        forward_ad._current_level >= 0,
    )


def unsupported(pair: PairFormula, position: Tensor) -> Refusal | None:
    """Return why a potential has no operator for positions of this shape and type."""
    if position.device.type != "cpu":
        return Refusal(f"positions are on {position.device.type}")
    if position.dtype not in TYPES or not position.dtype.is_floating_point:
        return Refusal(f"positions are {position.dtype}")
    if in_transform() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return Refusal("a transform of torch.func, torch.compile or torch.jit.trace is active")
    if position.numel() == 0:
        return Refusal("there are no atoms")
    if forward_ad._current_level >= 0:
        return Refusal("forward-mode differentiation is active")
    if pair.box is not None and pair.box.requires_grad:
        return Refusal("the box requires grad")
    inner = (part for part in pair.modules() if part is not pair)
    if any(
        x is not None
        for part in inner
        for x in (*part._parameters.values(), *part._buffers.values())
    ):
        return Refusal("it has modules with tensors")
    if position.shape[-1] > 3:
        return Refusal("positions have more than three dimensions")
    if type(position) not in (Tensor, torch.nn.Parameter) and not is_tracing():
        return Refusal(f"positions are {type(position).__name__}")
    if pair.box is not None and len(pair.box) != position.shape[-1]:
        return Refusal("box and position have different dimensions")
    if pair.box is not None and pair.box.ndim == 2 and pair.cutoff is None:
        return Refusal("a tilted box without a cutoff needs a search for the nearest image")
    return None


def kind_of(operand: Tensor) -> str:
    """Return the kind of an operand: a number, one for each atom, or a table by species."""
    return NUMBER if operand.numel() == 1 else ATOM if operand.ndim == 1 else TABLE


def misshapen(
    species: Tensor | None, atoms: int, operands: dict[str, tuple[str, Tensor]]
) -> Refusal | None:
    """Return what is wrong with the shapes of operands."""
    if species is not None and species.shape != (atoms,):
        return Refusal(f"species has shape {tuple(species.shape)} for {atoms} atoms")
    rows = {len(x) for kind, x in operands.values() if kind == TABLE}
    if species is None:
        rows.add(atoms)
    for name, (kind, x) in operands.items():
        square = kind != TABLE or (x.ndim == 2 and x.shape[0] == x.shape[1] and len(rows) == 1)
        if not square or (kind == ATOM and len(x) != atoms):
            return Refusal(f"{name} has shape {tuple(x.shape)} for {atoms} atoms")
    return None


def skin_of(pair: PairFormula, position: Tensor) -> float | None:
    """Return the skin of the neighbour list; None: evaluate all pairs."""
    smallest = pair.smallest_listed
    return None if smallest is None or position.shape[-2] < smallest else pair.list_skin
