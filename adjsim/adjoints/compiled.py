"""Steps in compiled chunks.

A chunk is some steps forward, or the way back over them with the cotangents, as one function of tensors. It is written down
once by running it on tensors that record their operations (the same moves and products that run otherwise, so there is nothing
to keep in agreement), and compiled by torch's Inductor. Whatever may differ from run to run is an input: the state, the time,
coefficients, noise, every parameter and buffer of the dynamics, the spacings of a lattice. So no number of steps, seed, value
of a parameter or save time compiles again; another shape, dtype, scheme or record does.

Between chunks a force that still holds is passed on, and on the way back its cotangent. On the way back it is also evaluated
again, once for each chunk, in the loop that takes the cotangent on.

What is no input is a constant of the compiled code. Of the dynamics' modules that is every Python number, so these are part of
what is looked up; of a record it is whatever it reads besides the state and the dynamics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn
from torch._inductor import compile as inductor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from adjsim._grid import Grid
from adjsim._state import State, kept
from adjsim._trajectory import TimeAverage
from adjsim.adjoints.march import March, Recorder
from adjsim.dynamics.sources import Gradients, holds_after, holds_before
from adjsim.potentials.base import force

# Steps of a chunk: few where a step is long beside the call of a compiled function, more where it is short. Compiling takes as
# long as there are.
STEPS, STEPS_SMALL, SMALL = 2, 8, 128
# What a pair of atoms needs is computed in its loop, and not stored for each; what an atom needs is kept, see keep().
OPTIONS = {"realize_reads_threshold": 64, "realize_opcount_threshold": 256, "unroll_reductions_threshold": 1}
# Steps after which it is seen to that numbers are finite.
LOOK_EVERY = 1024

_compiled: WeakKeyDictionary[nn.Module, dict[Any, Compiled]] = WeakKeyDictionary()


class CompileError(RuntimeError):
    """A step could not be compiled."""


@dataclass
class Compiled:
    """A chunk as a function of tensors, and the passes over the energy that it makes."""

    function: Callable[..., Sequence[Tensor]]
    evaluations: int


class Chunks:
    """The compiled steps of a march.

    Args:
        march: whose steps they are; it has its coefficients.
        parameters: those that a gradient is wanted by.
        recorder: whose time average is taken inside of them.
    """

    def __init__(self, march: March, parameters: Sequence[Tensor], recorder: Recorder) -> None:
        self.march, self.recorder, self.parameters = march, recorder, list(parameters)
        self.dynamics, self.program = march.problem.dynamics, march.program
        self.potential: nn.Module = self.dynamics.potential
        average = march.problem.record
        self.average = average if isinstance(average, TimeAverage) else None
        self.length = STEPS_SMALL if march.problem.state.position.numel() <= SMALL else STEPS
        moves = [move for _, move in self.program.moves]
        self.holds_after, self.holds_before = holds_after(moves), holds_before(moves)
        self.keys = [(letter, name) for letter, group in march.coefficients.items() for name in group]
        coefficients = [march.coefficients[letter][name] for letter, name in self.keys]
        named = {
            **dict(self.dynamics.named_parameters(remove_duplicate=False)),
            **dict(self.dynamics.named_buffers(remove_duplicate=False)),
        }
        # A tensor that has several names is one input.
        self.registered = list({id(x): x for x in named.values()}.values())
        self.names = {name: next(i for i, x in enumerate(self.registered) if x is value) for name, value in named.items()}
        self.wanted = [i for i, c in enumerate(coefficients) if c.requires_grad]
        self.places = [next(i for i, x in enumerate(self.registered) if x is p) for p in self.parameters]
        self.grids = _grids(self.program)
        spacings = [x for grid in self.grids for x in (grid.spacing, grid._shift)]
        self.fixed = [_plain(x) for x in (*coefficients, *self.registered, *spacings)]
        self.modules = tuple((ref(module), _settings(module)) for module in self.dynamics.modules())
        march.problem.stats.setdefault("compile_seconds", 0.0)

    def boundaries(self, watched: Iterable[int]) -> list[int]:
        """The steps at which chunks have to end: those that are watched, the one before the first of a time average, and those
        at which the buffers of an exact run are looked at."""
        last = self.march.last
        extra = [last] if self.average is None else [last, self.recorder.first - 1]
        if self.march.lattice is not None:
            extra += range(0, last, self.march.growth.look_every)
        return sorted({step for step in (*watched, *extra) if 0 < step <= last})

    def walk(self, start: State, watched: Iterable[int]) -> Iterator[tuple[int, State]]:
        """Forward from a start that has entered, stopping after the steps that are watched."""
        push: Tensor | None = None

        def advance(state: State, begin: int, end: int) -> State:
            nonlocal push
            state, push = self.forward(state, begin, end, push)
            return state

        regular = range(0, self.march.last, LOOK_EVERY)
        return self.march.forward(start, advance, self.boundaries([*watched, *regular]))

    def forward(self, state: State, start: int, stop: int, push: Tensor | None) -> tuple[State, Tensor | None]:
        """From the state after ``start`` steps to that after ``stop``, and the force there if the next step wants it."""
        while start < stop:
            count = self.length if stop - start >= self.length else 1
            inputs = self._inputs(start, count)
            if self.holds_after:
                inputs.append(self._force(state, start) if push is None else push)
            averaging = self._averages(start + 1)
            if averaging:
                inputs.append(self._total(state) if self.recorder.total is None else self.recorder.total)
            inputs += map(_plain, state)
            chunk = self._chunk(self._forward, count, averaging, type(state), inputs)
            out = list(chunk.function(*inputs))
            push = out.pop(0) if self.holds_after else None
            if averaging:
                self.recorder.total, self.recorder.come_to = out.pop(0), start + count
            state = type(state)(*out)
            self.march.problem.stats["energy_evaluations"] += chunk.evaluations
            start += count
        return state, push

    def backward(self, state: State, stop: int, start: int, grads: Gradients, cotangent: Tensor | None) -> State:
        """From the state after ``stop`` steps back to that after ``start``, with the cotangents taken along.

        ``cotangent`` is that of a time average.
        """
        fields, width = list(grads.state), len(grads.state)
        sums = [self._sum(grads.coefficient_grads.get(self.keys[i]), self.fixed[i]) for i in self.wanted]
        sums += [self._sum(g, p) for g, p in zip(grads.parameter_grads, self.parameters, strict=True)]
        pending = grads.take_pending(self.potential)
        cotangents = [grads.state[name] for name in fields]
        while stop > start:
            count = self.length if stop - start >= self.length else 1
            first = stop - count
            inputs = self._inputs(first, count)
            if self.holds_before:
                inputs.append(torch.zeros_like(state.position) if pending is None else _plain(pending))
            averaging = self._averages(stop) and cotangent is not None
            if averaging:
                assert cotangent is not None
                inputs.append(_plain(cotangent * self.recorder.weight))
            inputs += map(_plain, (*sums, *cotangents, *state))
            chunk = self._chunk(self._backward, count, averaging, type(state), inputs)
            out = list(chunk.function(*inputs))
            pending = out.pop(0) if self.holds_before else None
            sums, out = out[: len(sums)], out[len(sums) :]
            cotangents, state = out[:width], type(state)(*out[width:])
            grads.evaluations += chunk.evaluations
            stop = first
        for name, value in zip(fields, cotangents, strict=True):
            grads.state[name] = value
        for i, value in zip(self.wanted, sums, strict=False):
            grads.coefficient_grads[self.keys[i]] = value
        grads.parameter_grads = list(sums[len(self.wanted) :])
        if pending is not None:
            grads.force(self.potential, self.march.time(start), state.position).pull(pending)
        return state

    # What is written down.

    def _forward(self, count: int, averaging: bool, kind: type, inputs: list[Tensor]) -> tuple[list[Tensor], int]:
        t, coefficients, draws, rest = self._unpack(inputs, count, ())
        stats = {"energy_evaluations": 0}
        forces = self.program.forces(stats)
        if self.holds_after:
            forces.know(self.potential, rest.pop(0))
        total = rest.pop(0) if averaging else None
        state = kind(*rest)
        for k in range(count):
            state = self.program.step(t + k * self.march.solver.dt, state, coefficients, self._seen(draws, k), forces)
            if total is not None:
                assert self.average is not None
                total = total + self.average.function(self.march.leave(state))
        push = [forces(self.potential, t, state.position)] if self.holds_after else []
        return [*push, *([] if total is None else [total]), *state], stats["energy_evaluations"]

    def _backward(self, count: int, averaging: bool, kind: type, inputs: list[Tensor]) -> tuple[list[Tensor], int]:
        t, coefficients, draws, rest = self._unpack(inputs, count, self.wanted)
        parameters = [self._registered(inputs)[i] for i in self.places]
        pending = rest.pop(0) if self.holds_before else None
        cotangent = rest.pop(0) if averaging else None
        sums, rest = rest[: len(self.wanted) + len(parameters)], rest[len(self.wanted) + len(parameters) :]
        fields = self.march.problem.state._fields
        grads = Gradients(dict(zip(fields, rest, strict=False)), parameters, self.program.force_grid)
        state = kind(*rest[len(fields) :])
        grads.coefficient_grads = {self.keys[i]: value for i, value in zip(self.wanted, sums, strict=False)}
        grads.parameter_grads = list(sums[len(self.wanted) :])
        dt = self.march.solver.dt
        if pending is not None:
            grads.force(self.potential, t + count * dt, state.position).pull(pending)
        for k in range(count - 1, -1, -1):
            if cotangent is not None:
                assert self.average is not None
                self.recorder.pull_function(self.average.function, self.march.leave(state), cotangent, grads)
            for stage, move in reversed(self.program.moves):
                grads.moving(move.writes)
                at = self.program.at(t + k * dt, stage, coefficients, self._seen(draws, k), self.program.forces())
                state = move.retreat(state, at, grads, None)
        left = grads.take_pending(self.potential)
        first = [torch.zeros_like(state.position) if left is None else left] if self.holds_before else []
        sums = [grads.coefficient_grads[self.keys[i]] for i in self.wanted]
        sums += [g for g in grads.parameter_grads if g is not None]
        return [*first, *sums, *(grads.state[name] for name in fields), *state], grads.evaluations

    def _unpack(
        self, inputs: list[Tensor], count: int, wanted: Sequence[int]
    ) -> tuple[Tensor, dict[str, Any], list[Tensor], list[Tensor]]:
        """Time, coefficients, draws, and what follows them."""
        fixed, drawn = len(self.fixed), self._draws(count)
        coefficients: dict[str, Any] = {stage.letter: {} for stage in self.program.stages}
        for i, (letter, name) in enumerate(self.keys):
            value = inputs[1 + i]
            coefficients[letter][name] = value.detach().requires_grad_() if i in wanted else value
        return inputs[0], coefficients, inputs[1 + fixed : 1 + fixed + drawn], list(inputs[1 + fixed + drawn :])

    def _registered(self, inputs: list[Tensor]) -> list[Tensor]:
        begin = 1 + len(self.keys)
        return inputs[begin : begin + len(self.registered)]

    @contextmanager
    def _given(self, inputs: list[Tensor], places: Sequence[int]) -> Iterator[list[Tensor]]:
        """Parameters, buffers and spacings replaced by the inputs that stand for them."""
        inputs = list(inputs)
        for i in places:
            j = 1 + len(self.keys) + i
            inputs[j] = inputs[j].detach().requires_grad_()
        begin = 1 + len(self.keys) + len(self.registered)
        known = [(grid.spacing, grid._shift) for grid in self.grids]
        try:
            for i, grid in enumerate(self.grids):
                grid.spacing, grid._shift = inputs[begin + 2 * i : begin + 2 * i + 2]
            given = self._registered(inputs)
            with _reparametrize_module(self.dynamics, {name: given[i] for name, i in self.names.items()}), torch.no_grad():
                yield inputs
        finally:
            for grid, (spacing, shift) in zip(self.grids, known, strict=True):
                grid.spacing, grid._shift = spacing, shift

    def _chunk(
        self, body: Callable[..., tuple[list[Tensor], int]], count: int, averaging: bool, kind: type, inputs: list[Tensor]
    ) -> Compiled:
        solver, record = self.march.solver, _weak(self.average.function) if averaging and self.average is not None else None
        shapes = tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
        back = body == self._backward
        places = tuple(self.places) if back else ()
        wanted = tuple(self.wanted) if back else ()
        threads = torch.get_num_threads()
        key = (back, count, record, repr(solver), solver.dt, kind, shapes, places, wanted, self.modules, threads)
        known = _compiled.setdefault(self.dynamics, {})
        if key not in known:
            begun = time.perf_counter()
            known[key] = self._compile(body, count, averaging, kind, inputs, places)
            self.march.problem.stats["compile_seconds"] += time.perf_counter() - begun
        return known[key]

    def _compile(
        self,
        body: Callable[..., tuple[list[Tensor], int]],
        count: int,
        averaging: bool,
        kind: type,
        inputs: list[Tensor],
        places: Sequence[int],
    ) -> Compiled:
        evaluations, width = 0, 0

        def function(*values: Tensor) -> list[Tensor]:
            nonlocal evaluations, width
            with self._given(list(values), places) as given, _NoCapture(self.registered):
                kept()
                out, evaluations = body(count, averaging, kind, given)
                width = len(out)
                known = {id(x) for x in (*values, *given)}
                return [x.detach() for x in (*out, *(x for x in kept() if id(x) not in known))]

        try:
            graph = make_fx(function)(*inputs)
            compiled: Any = inductor(graph, list(inputs), options=OPTIONS)
        except Exception as error:
            raise CompileError(
                f"compile=True could not compile a step of {type(self.dynamics).__name__}: {error}\n"
                "Potentials and records have to be torch operations whose course does not depend on values (no float(x), "
                "x.item() or `if` on a tensor). Write them so, or leave compile=True out."
            ) from error
        return Compiled(lambda *values: compiled(*values)[:width], evaluations)

    # What goes in.

    def _inputs(self, start: int, count: int) -> list[Tensor]:
        position = self.march.problem.state.position
        t = torch.tensor(self.march.time(start), dtype=torch.float64, device=position.device)
        drawn = [x for k in range(start, start + self._steps_seen(count)) for x in self.march.draws(k)]
        return [t, *self.fixed, *map(_plain, drawn)]

    def _steps_seen(self, count: int) -> int:
        return count + self.program.sees - 1 if self.program.draws else 0

    def _draws(self, count: int) -> int:
        return self._steps_seen(count) * self.program.draws

    def _seen(self, draws: list[Tensor], k: int) -> list[Tensor] | None:
        each = self.program.draws
        return draws[k * each : (k + self.program.sees) * each] if each else None

    def _averages(self, step: int) -> bool:
        return self.average is not None and step >= self.recorder.first

    def _total(self, state: State) -> Tensor:
        assert self.average is not None
        with torch.no_grad():
            return torch.zeros_like(self.average.function(self.march.leave(state)))

    def _force(self, state: State, step: int) -> Tensor:
        self.march.problem.stats["energy_evaluations"] += 1
        with torch.no_grad():
            return _plain(force(self.potential, state.position, self.march.time(step), self.program.force_grid))

    @staticmethod
    def _sum(known: Tensor | None, like: Tensor) -> Tensor:
        return torch.zeros_like(_plain(like)) if known is None else known


class _NoCapture(TorchFunctionMode):
    """Refuses a registered tensor that is reached past its module: it would be a constant, and have no gradient."""

    def __init__(self, registered: Sequence[Tensor]) -> None:
        super().__init__()
        self.registered = {id(x) for x in registered}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(id(x) in self.registered for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
            raise ValueError(
                "a potential or a record reads a parameter or buffer of the dynamics past its module, as a variable of its "
                "own; read it as an attribute of the module, such as dynamics.kT or self.k."
            )
        return func(*args, **(kwargs or {}))


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """The Python numbers and words of a module, and which tensors it has that are not registered, in which version."""
    found: list[Any] = []
    for name, value in vars(module).items():
        if isinstance(value, bool | int | float | str):
            found.append((name, value))
        elif isinstance(value, Tensor):
            found.append((name, id(value), value._version))
    return tuple(found)


def _weak(record: Callable[..., Any]) -> Any:
    """A record as part of a key that does not keep it alive: it may hold the dynamics whose code is looked up."""
    return WeakMethod(record) if isinstance(record, MethodType) else ref(record)


def _plain(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def _grids(program: Any) -> list[Grid]:
    """The lattice spacings that the moves of a step know of."""
    found = [grid for _, move in program.moves if (grid := getattr(move, "grid", None)) is not None]
    if program.force_grid is not None:
        found.append(program.force_grid)
    return list({id(grid): grid for grid in found}.values())
