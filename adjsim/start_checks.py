"""The check of the rates of a dynamics at the start of a run.

A compiled run of a field whose form has been checked before is not evaluated at its start again. In
a training that is every step but the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from adjsim._cache_key import cache_key
from adjsim._module import ModuleCache, ModuleTensors
from adjsim._params import refuse_unknown
from adjsim._reproducible import evaluate_twice_if_changed
from adjsim._state import AnyState, State, in_transform
from adjsim._trajectory import Record, TimeAverage
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.vector_field import FieldDynamics

# The forms that have been checked, of each dynamics.
_checked: ModuleCache[bool] = ModuleCache(32)


def check_rates(
    dynamics: Dynamics[State], state: State, t: float, record: Record[State], compile: bool
) -> tuple[ModuleTensors, Any]:
    """Evaluate the dynamics at the start, and refuse rates with which it cannot be run.

    Args:
        dynamics: the dynamics.
        state: the start.
        t: its time.
        record: the record of the run.
        compile: whether the run is compiled.

    Returns:
        the tensors of the dynamics, and the key of what a compiled run reads; None where it is not
        known.
    """
    graph = torch.is_grad_enabled() and not in_transform()
    # Leaves, whose graph shows which other tensors the rates depend on.
    start = type(state)._make(x.detach().requires_grad_() for x in state) if graph else state
    keyed = compile and not in_transform() and isinstance(dynamics, FieldDynamics)
    key = _key(dynamics, record) if keyed else None
    tensors = ModuleTensors(dynamics)
    if key is not None and _checked.get(dynamics, _form(key, t, start, tensors, graph)):
        return tensors, key

    def evaluate() -> dict[str, Tensor]:
        return dynamics.check_rates(t, start)

    if in_transform():
        evaluate()
        return ModuleTensors(dynamics), None
    rates, tensors = evaluate_twice_if_changed(tensors, evaluate, state[0].device)
    # The first evaluation of a module may have made parameters and numbers.
    key = _key(dynamics, record) if keyed else None
    if graph:
        _check_captured(dynamics, tensors, start, rates, record)
    if key is not None:
        _checked.put(dynamics, _form(key, t, start, tensors, graph), True)
    return tensors, key


def _key(dynamics: Dynamics[State], record: Record[State]) -> Any:
    """Return the key of what a compiled run reads, or None."""
    if not isinstance(record, TimeAverage | None):
        return None
    if any(is_lazy(x) for x in (*dynamics.parameters(), *dynamics.buffers())):
        return None
    return cache_key(dynamics, None if record is None else record.function)


def _form(key: Any, t: float, state: AnyState, tensors: ModuleTensors, graph: bool) -> Any:
    """Return everything but numbers that the rates at a start depend on.

    Numbers may make the rates infinite. That ends the run, and is checked then.
    """
    shapes = tuple((x.shape, x.dtype, x.device) for x in (*state, *tensors.tensors))
    return key, t, type(state), shapes, tensors.slots, tensors.wanted, graph


def _check_captured(
    dynamics: Dynamics[State],
    tensors: ModuleTensors,
    start: State,
    rates: Mapping[str, Tensor],
    record: Record[State],
) -> None:
    """Refuse captured tensors that require grad, to which an adjoint would give no gradient.

    A tensor that is first read later in the run is refused then.

    Args:
        dynamics: the physics.
        tensors: its tensors.
        start: the start as leaves that require grad.
        rates: drift and diffusion at these leaves, by descriptions of them.
        record: the record of the run.
    """
    values = dict(rates)
    if record is not None:
        function = record.function if isinstance(record, TimeAverage) else record
        value = function(start)
        if not isinstance(value, Tensor):
            raise TypeError(f"record must return a tensor; got {type(value).__name__}.")
        values["the record"] = value
    known = [*start, *tensors.trainable(tensors.tensors).values()]
    for what, value in values.items():
        refuse_unknown(value, dynamics, known, what)
