"""Parameters: how physical numbers are stored, and how they enter autograd.

A float, an array or a list becomes a buffer (float64, unless an array is float32) and is cast to
the state's dtype where it is used. An ``nn.Parameter`` stays a parameter. A tensor that requires
grad (a network's output, a field of elastic moduli) becomes a buffer that keeps its graph. So
everything that a simulation can be differentiated with respect to is registered. A constant-memory
adjoint would give no gradient to any other tensor, which :func:`refuse_unknown` names. The rules
under which numbers are registered are checked again whenever a run reads them, since an optimiser
may have broken them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from adjsim.core.arguments import as_tensor, outside_inference_mode, wrong_shape
from adjsim.core.typing import Number

# Sizes of a tensor; a word stands for a size that is free.
Shape = tuple[int | str, ...]
# A turn, which may be rounded.
LARGEST_ANGLE = 2 * math.pi * (1 + 1e-6)


def register(module: nn.Module, name: str, value: Number, **rule: Any) -> None:
    """Store a physical number on a module, as a parameter or a buffer.

    Numbers, arrays and lists become buffers. The other arguments are those of :class:`NumberRule`,
    which is checked again whenever a run reads the number.

    Raises:
        TypeError: a string, None, a bool or complex numbers.
        ValueError: NaN, no entries, a number or a shape that the rule excludes, a list that holds
            a tensor that requires grad, a parameter made under ``torch.inference_mode``.
    """
    if isinstance(value, nn.Parameter) and value.is_inference():
        raise ValueError(
            f"{name} was made under torch.inference_mode, where a parameter can never be "
            "differentiated: make it outside."
        )
    with outside_inference_mode():
        value = as_tensor(name, value)
    if value.numel() == 0:
        raise ValueError(f"{name} has no entries.")
    check = NumberRule(**rule)
    check(name, value.detach())
    vars(module).setdefault("_rules", {})[name] = check
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value)


@dataclass(frozen=True)
class NumberRule:
    """The numbers that a parameter may be, checked whenever a run reads it.

    Attributes:
        finite: not infinite. The mass of a pinned atom, for one, is infinite.
        depth: the depth of a well, which is not negative.
        single: one number for a whole system.
        angle: radians, at most two pi.
        between: two limits, both excluded.
        advice: a sentence of the error of a number outside of the limits.
        shapes: the shapes that it may have; empty: any.
        each: what an entry belongs to, such as "one number for each atom".
    """

    positive: bool = False
    finite: bool = False
    depth: bool = False
    single: bool = False
    angle: bool = False
    between: tuple[float, float] | None = None
    advice: str = ""
    shapes: Sequence[Shape] = ()
    each: str = ""

    def __call__(self, name: str, value: Tensor) -> None:
        """Refuse a value that the parameter may not have."""
        if self.shapes and not any(_fits(value.shape, shape) for shape in self.shapes):
            allowed = ", ".join(map(_describe_shape, self.shapes[:-1]))
            allowed += f"{allowed and ' or '}{_describe_shape(self.shapes[-1])}"
            raise wrong_shape(name, f"{allowed}{self.each and ', ' + self.each}", value)
        if self.single and value.numel() != 1:
            raise ValueError(
                f"{name} must be one number, for all atoms and replicas; got shape "
                f"{tuple(value.shape)}. Make a simulation for each {name}."
            )
        ends = value.aminmax() if value.numel() > 1 else (value, value)
        smallest, largest = (x.item() for x in ends)
        if smallest != smallest:
            raise ValueError(f"{name} is NaN.")
        if self.positive and not smallest > 0:
            raise ValueError(f"{name} must be positive; got {describe(value)}.")
        if self.depth and smallest < 0:
            raise ValueError(
                f"{name} must not be negative; got {describe(value)}. It is the depth of a well, "
                "and with a negative one atoms fall on top of each other. adjsim.Positive keeps a "
                "fitted one positive."
            )
        if self.finite and not (math.isfinite(smallest) and math.isfinite(largest)):
            raise ValueError(f"{name} must be finite; got {value.tolist()}.")
        if self.angle and (size := max(-smallest, largest)) > LARGEST_ANGLE:
            raise ValueError(
                f"{name} must be in radians, between -2 pi and 2 pi; got {size:g}. Convert degrees "
                "with math.radians or torch.deg2rad."
            )
        if self.between is not None:
            low, high = self.between
            wrong = largest if smallest > low else smallest
            if not low < wrong < high:
                raise ValueError(
                    f"{name} must be between {low:g} and {high:g}, both excluded; got {wrong:g}."
                    f"{self.advice and ' '}{self.advice}"
                )

    def marked(self, value: Tensor) -> Tensor:
        """Replace entries that the parameter may not have by NaN, without reading them."""
        low, high = self.between or (0.0 if self.positive else -math.inf, math.inf)
        valid: list[Tensor] = []
        if low > -math.inf or self.finite:
            valid.append(value > low)
        if high < math.inf or self.finite:
            valid.append(value < high)
        if self.depth:
            valid.append(value >= 0)
        if self.angle:
            valid.append(value.abs() <= LARGEST_ANGLE)
        for holds in valid:
            value = torch.where(holds, value, math.nan)
        return value


def _fits(found: Sequence[int], shape: Shape) -> bool:
    fits = (isinstance(size, str) or size == n for n, size in zip(found, shape, strict=False))
    return len(found) == len(shape) and all(fits)


def _describe_shape(shape: Shape) -> str:
    if not shape:
        return "one number"
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def check_count(name: str, value: Tensor, atoms: int) -> None:
    """Refuse a number for each atom of a system with more or fewer atoms."""
    if value.numel() not in (1, atoms):
        raise ValueError(
            f"{name} has {value.numel()} entries and the state {atoms} atoms: give one number, or "
            "one for each atom."
        )


def describe(value: Tensor) -> str:
    """Describe a number by its value, a larger tensor by its shape and smallest entry."""
    if value.numel() == 1:
        return f"{value.item():g}"
    return f"a tensor of shape {tuple(value.shape)} whose smallest entry is {value.min().item():g}"


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """Collect every registered parameter or buffer that requires grad, by its qualified name."""
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: value for name, value in named if value.requires_grad}


def refuse_untrainable(module: nn.Module) -> None:
    """Raise if no parameter or buffer of the module requires grad."""
    if not trainable(module):
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires grad, so there is no "
            "gradient to estimate: give the number of interest as nn.Parameter(torch.tensor(...))."
        )


def point_of_differentiation(x: Tensor) -> Tensor:
    """Make a leaf with the same numbers, which :func:`leaves` does not take for a parameter.

    Of numbers with a tangent the result is a view of the leaf with this tangent.
    """
    value, tangent = forward_ad.unpack_dual(x)
    point = value.detach().requires_grad_()
    point.is_point_of_differentiation = True  # type: ignore[attr-defined]
    return point if tangent is None else forward_ad.make_dual(point, tangent)


def leaves(output: Tensor, registered: Iterable[Tensor] = ()) -> Iterator[Tensor]:
    """Find the leaf tensors of an output's graph, without searching behind registered tensors."""
    nodes = graph_nodes(output, registered)
    # An output without a node may be a leaf itself.
    alone = output.requires_grad and output.grad_fn is None
    for leaf in [output] if alone else map(_variable, nodes):
        if leaf is not None and not hasattr(leaf, "is_point_of_differentiation"):
            yield leaf


def _variable(node: Any) -> Tensor | None:
    """Return the tensor of a leaf's node, which has nothing behind it."""
    return None if node.next_functions else getattr(node, "variable", None)


def graph_nodes(output: Tensor, registered: Iterable[Tensor] = ()) -> Iterator[Any]:
    """Yield the nodes of an output's graph, without those of registered tensors and behind them."""
    seen: set[Any] = {None, *[value.grad_fn for value in registered]}
    nodes: list[Any] = [] if output.grad_fn in seen else [output.grad_fn]
    # The list grows while it is read.
    for node in nodes:
        yield node
        for parent, _ in node.next_functions:
            if parent not in seen:
                seen.add(parent)
                nodes.append(parent)


def refuse_unknown(output: Tensor, module: nn.Module, known: Sequence[Tensor], what: str) -> None:
    """Raise if ``output`` has a leaf that is neither in ``known`` nor registered on ``module``."""
    if unknown_leaf(output, known) is None:
        return
    # Collecting the tensors of a module is slow, so it is done only if the fast check fails.
    leaf = unknown_leaf(output, [*known, *trainable(module).values()])
    if leaf is not None:
        raise ValueError(
            f"{what} depends on {_name_of(leaf, module)}, which requires grad but is not "
            "registered, or is read as a variable instead of from its module, so an adjoint would "
            "lose its gradient. Make it an nn.Parameter, or a buffer if it is computed, of the "
            "potential or the dynamics and read it as an attribute of its module, or detach() it."
        )


def unknown_leaf(output: Tensor, known: Sequence[Tensor]) -> Tensor | None:
    """Find a leaf that the output depends on and that is not known."""
    ids = {id(x) for x in known}
    return next((leaf for leaf in leaves(output, known) if id(leaf) not in ids), None)


def _name_of(leaf: Tensor, module: nn.Module) -> str:
    registered = {id(value) for value in trainable(module).values()}
    for path, child in module.named_modules():
        for attribute, value in vars(child).items():
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in registered:
                where = f"{path}.{attribute}" if path else attribute
                return f"'{where}' (a plain attribute of {type(child).__name__})"
    return f"a captured tensor of shape {tuple(leaf.shape)}"


def check_numbers(part: nn.Module) -> None:
    """Refuse numbers of one module that its constructor would refuse."""
    for name, rule in vars(part).get("_rules", {}).items():
        # An attribute lookup of a module takes as long as the check.
        x = part._buffers.get(name, part._parameters.get(name))
        x = getattr(part, name) if x is None else x
        if isinstance(x, Tensor) and not is_lazy(x):
            rule(name, x.detach() if x.requires_grad else x)
    validate = getattr(type(part), "validate", None)
    if validate is not None:
        validate(part)
