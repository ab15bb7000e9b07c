"""The check of the rates of a dynamics at the start of a run.

After the first compiled run of a form only its numbers are checked: those of a start with a
potential or a body here, those of a field by the run itself. Batch normalisation in train mode
writes to its buffers, and dropout draws random numbers, so a run that evaluates such a module
cannot be repeated, recomputed or reversed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from adjsim.core.cache_key import Identity, cache_key
from adjsim.core.parameters import refuse_unknown
from adjsim.core.reading import Reading
from adjsim.core.recent_cache import RecentCache
from adjsim.core.state import State, detached, in_transform
from adjsim.core.trajectory import Record, TimeAverage
from adjsim.core.writes import version_of
from adjsim.dynamics.base import Dynamics
from adjsim.solvers.run import bound_record

# The state of the generators, and the identity and the version of each tensor of a module.
_Snapshot = tuple[bytes, dict[str, tuple[int, int]]]
# The forms that have been checked, each of one dynamics.
_checked: RecentCache[bool] = RecentCache(256)
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
    _refuse_other_devices(reading, state)
    tensors = reading.connected() if in_transform() else reading.leaves()
    read = reading.bound(tensors)
    read.check(state)
    if in_transform():
        read.check_rates(t, state)
        return reading, tensors, read, None
    graph, device = torch.is_grad_enabled(), state[0].device
    # Leaves, whose graph shows which other tensors the rates depend on.
    start = type(state)._make(x.detach().requires_grad_() for x in state) if graph else state
    average = record if isinstance(record, TimeAverage) else None
    function = None if average is None else average.function
    key = cache_key(read, function) if compile else None
    shapes = tuple((x.shape, x.dtype, x.device) for x in (*start, *reading.tensors))
    # Everything but numbers that the rates depend on. Numbers may make the rates of a field
    # infinite, which ends the run, and is checked then.
    source = Identity(reading.source)
    form = source, key, t, type(state), shapes, reading.slots, reading.wanted, graph
    # The values that must not depend on tensors without a gradient.
    values: dict[str, Any] = {}
    known = key is not None and bool(_checked.get(form))
    if known:
        read.check_values(t, start)
    else:
        before = random_state(device)
        values |= read.check_rates(t, start)
        if (
            random_state(device) != before
            or reading.registers_others(read)
            or reading.written(read, tensors) is not None
            or (key is not None and cache_key(read, function) != key)
        ):
            return None
        if graph and reading.wanted and reading.kept(read):
            at = torch.tensor(t, dtype=torch.float64)
            reading.refuse_kept(tensors, lambda copy: copy.drift(at, start))
    # The key has what a time average reads, and not what a record of saved states reads.
    if graph and record is not None and not (known and average is not None):
        bound = bound_record(record, reading, read, tensors)
        assert bound is not None
        value = (bound.function if isinstance(bound, TimeAverage) else bound)(start)
        if not isinstance(value, Tensor):
            raise TypeError(f"record must return a tensor; got {type(value).__name__}.")
        values["the record"] = value
    if graph and values:
        # An adjoint would give no gradient to captured tensors that require grad. A tensor that is
        # first read later in the run is refused then.
        leaves = [*start, *reading.trainable(tensors).values()]
        for what, value in values.items():
            refuse_unknown(value, read, leaves, what)
    if key is not None:
        _checked.put(form, True)
    return reading, tensors, read, key


def _refuse_other_devices(reading: Reading[Dynamics[State]], state: State) -> None:
    """Refuse tensors on another device than the state, which every step would copy."""
    device = state[0].device
    for name, x in zip(reading.names, reading.tensors, strict=True):
        if x.device != device:
            kind = type(reading.source).__name__
            raise ValueError(
                f"{name} of {kind} is on {x.device}, and the start is on {device}: move the "
                f"dynamics by .to({str(device)!r}), or the start."
            )


def random_state(device: torch.device) -> bytes:
    """Return the state of torch's default generators."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return b"".join(x.numpy().tobytes() for x in states)


def describe_change(
    module: nn.Module, evaluate: Callable[[], Any], device: torch.device
) -> str | None:
    """Evaluate a module, and say which innermost part is changed, or draws numbers, if any."""
    found: list[str] = []
    before: dict[nn.Module, _Snapshot] = {}

    def begin(part: nn.Module, *_: Any) -> None:
        before[part] = _snapshot(part, device)

    with ExitStack() as stack:
        for path, part in module.named_modules():

            def end(part: nn.Module, *_: Any, path: str = path) -> None:
                what = _difference(before[part], _snapshot(part, device))
                if what is not None and not found:
                    name = type(part).__name__
                    found.append(f"{path} ({name}) {what}" if path else f"{name} {what}")

            for handle in (part.register_forward_pre_hook(begin), part.register_forward_hook(end)):
                stack.callback(handle.remove)
        first = _snapshot(module, device)
        evaluate()
    what = _difference(first, _snapshot(module, device))
    if what is not None:
        found.append(f"{type(module).__name__} or a part of it {what}")
    return found[0] if found else None


def _snapshot(module: nn.Module, device: torch.device) -> _Snapshot:
    named = chain(module.named_parameters(), module.named_buffers())
    return random_state(device), {name: (id(x), version_of(x)) for name, x in named}


def _difference(before: _Snapshot, after: _Snapshot) -> str | None:
    if before[0] != after[0]:
        return "draws random numbers"
    if before[1].keys() != after[1].keys():
        return "makes parameters or buffers"
    changed = next((name for name, x in before[1].items() if after[1][name] != x), None)
    if changed is None:
        return None
    return f"writes to its own parameter or buffer {changed.rpartition('.')[2]!r}"
