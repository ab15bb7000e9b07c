"""The check of the rates of a dynamics at the start of a run.

During training, a compiled run of a field skips this check after the first step, since its form has
been checked before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adjsim.core.cache_key import cache_key
from adjsim.core.module_cache import ModuleCache
from adjsim.core.parameters import refuse_unknown
from adjsim.core.reading import Reading
from adjsim.core.state import State, detached, in_transform
from adjsim.core.trajectory import Record, TimeAverage
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.fields.base import FieldDynamics
from adjsim.simulation.reproducible import describe_change, random_state
from adjsim.solvers.run import bound_record

# The forms that have been checked, of each dynamics.
_checked: ModuleCache[bool] = ModuleCache(32)
# A reading, its values, the dynamics that holds them, and the key of what a compiled run reads, or
# None.
Checked: TypeAlias = tuple[Reading[Dynamics[State]], tuple[Tensor, ...], Dynamics[State], Any]


def check_rates(
    dynamics: Dynamics[State], state: State, t: float, record: Record[State], compile: bool
) -> Checked[State]:
    """Read the dynamics, evaluate it at the start, and refuse rates with which it cannot be run."""
    found = _read(dynamics, state, t, record, compile)
    if found is None:
        # The first evaluation of a module has made tensors and numbers, which belong to it.
        dynamics.check_rates(t, state)
        found = _read(dynamics, state, t, record, compile)
    if found is None:
        reading = Reading(dynamics)
        read, start = reading.bound(reading.leaves()), detached(state)
        what = describe_change(read, lambda: read.check_rates(t, start), state[0].device)
        raise ValueError(
            f"{what or f'{type(dynamics).__name__} or a part of it makes other numbers'} whenever "
            "it is evaluated, so no run is repeated or reversed by the same numbers. Put it into "
            "eval mode (.eval()), or keep it out of the dynamics."
        )
    return found


def _read(
    dynamics: Dynamics[State], state: State, t: float, record: Record[State], compile: bool
) -> Checked[State] | None:
    """Read the dynamics and check it; None if the evaluation makes what it reads."""
    reading = Reading(dynamics)
    if reading.lazy:
        return None
    if in_transform():
        tensors = reading.connected()
        read = reading.bound(tensors)
        read.check(state)
        read.check_rates(t, state)
        return reading, tensors, read, None
    tensors = reading.leaves()
    read = reading.bound(tensors)
    read.check(state)
    graph, device = torch.is_grad_enabled(), state[0].device
    # Leaves, whose graph shows which other tensors the rates depend on.
    start = type(state)._make(x.detach().requires_grad_() for x in state) if graph else state
    key = _key(read, record) if compile and isinstance(dynamics, FieldDynamics) else None
    shapes = tuple((x.shape, x.dtype, x.device) for x in (*start, *reading.tensors))
    # Everything but numbers that the rates depend on. Numbers may make the rates infinite, which
    # ends the run, and is checked then.
    form = key, t, type(state), shapes, reading.slots, reading.wanted, graph
    if key is not None and _checked.get(reading.source, form):
        return reading, tensors, read, key
    before = random_state(device)
    rates = read.check_rates(t, start)
    if (
        random_state(device) != before
        or reading.registers_others(read)
        or reading.written(read, tensors) is not None
        or (key is not None and _key(read, record) != key)
    ):
        return None
    if graph and reading.wanted and reading.kept(read):
        at = torch.tensor(t, dtype=torch.float64)
        reading.refuse_kept(tensors, lambda copy: copy.drift(at, start))
    if graph:
        _refuse_captured(reading, tensors, read, start, rates, record)
    if key is not None:
        _checked.put(reading.source, form, True)
    return reading, tensors, read, key


def _key(dynamics: Dynamics[State], record: Record[State]) -> Any:
    """Return the key of what a compiled run reads, or None."""
    if not isinstance(record, TimeAverage | None):
        return None
    return cache_key(dynamics, None if record is None else record.function)


def _refuse_captured(
    reading: Reading[Any],
    tensors: tuple[Tensor, ...],
    dynamics: Dynamics[State],
    start: State,
    rates: Mapping[str, Tensor],
    record: Record[State],
) -> None:
    """Refuse captured tensors that require grad, to which an adjoint would give no gradient.

    A tensor that is first read later in the run is refused then.
    """
    values = dict(rates)
    bound = bound_record(record, reading, dynamics, tensors)
    if bound is not None:
        value = (bound.function if isinstance(bound, TimeAverage) else bound)(start)
        if not isinstance(value, Tensor):
            raise TypeError(f"record must return a tensor; got {type(value).__name__}.")
        values["the record"] = value
    known = [*start, *reading.trainable(tensors).values()]
    for what, value in values.items():
        refuse_unknown(value, dynamics, known, what)
