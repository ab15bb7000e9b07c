"""Compilation of a loop of steps to one C++ function.

The carry (the tensors that each iteration takes from the one before) is in two sets of buffers. An
iteration reads one set and writes the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from adjsim.compiler.calls import Call
from adjsim.compiler.deferred_products import defer_products
from adjsim.compiler.function import FunctionPrinter
from adjsim.compiler.graph import lowered
from adjsim.compiler.invariants import LoopInvariant
from adjsim.compiler.library import compiled, debugging
from adjsim.compiler.mathematics import CHECKED, scalar_functions
from adjsim.compiler.nests import Task
from adjsim.compiler.products import MatrixProduct
from adjsim.compiler.rows import fitting_buffer, new_rows, stored_examples
from adjsim.compiler.teams import declaration
from adjsim.compiler.torch_calls import FAILED, SINGULAR, Run, TorchCall, described, has_effect
from adjsim.compiler.values import (
    TYPES,
    Body,
    Buffer,
    UnprintableError,
    UnprintableTypeError,
    make_buffer,
    row_major,
)
from adjsim.compiler.views import Checked

# A compiled loop of constants and carry, which returns the final carry and the rows. One of a GPU
# takes functions too, which the host calls while the GPU works.
Results = tuple[list[Tensor], list[Tensor]]
Compiled = Callable[..., Results]
# Constants with more elements are read in place, without copying them to padded rows.
COPY_LIMIT = 65_536
# The last parameters of each function of a program.
EXTRA = ("char* __restrict work", "int* refused", "void* const* functions")
# Nonzero return values of a program, for errors that torch's own operations would raise.
STATUS: dict[int, tuple[type[BaseException], str]] = {
    1: (MemoryError, "there is no memory for the buffers of a compiled loop."),
    2: (ZeroDivisionError, "a compiled step divided an integer by zero."),
    3: (IndexError, "a compiled step indexed a tensor out of range."),
    4: (ValueError, "exclusions have an atom that position does not have."),
    SINGULAR: (torch.linalg.LinAlgError, "a compiled step inverted or solved a singular matrix."),
    FAILED: (KeyboardInterrupt, "a signal handler raised an error inside a compiled loop."),
}


@dataclass(frozen=True)
class Part:
    """A graph, and its last inputs: captured tensors, and values of constants alone."""

    graph: GraphModule
    baked: Sequence[Tensor] = ()
    once: Sequence[LoopInvariant] = ()


@dataclass(frozen=True)
class Parts:
    """The graphs of a loop.

    Attributes:
        start: (constants, carry) to (number of the first iteration, carry).
        more: (number of an iteration, number of steps) to whether the iteration is run.
        body: (number, carry, constants) to (next number, carry, tensors that it stores).
        iterations: returns their number for a number of steps; None if it follows from the state.
    """

    start: Part
    more: Part
    body: Part
    iterations: Callable[[int], int] | None = None


def compile_to_cpp(
    parts: Parts,
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    exact: bool,
    threads: int,
    capacity: int = 0,
) -> tuple[Compiled, str, Path]:
    """Compile a loop to a function of constants and carry, of which there are examples.

    Returned with it are the operations that torch evaluates, with lines of code, and the file of
    its source.

    The function returns the final carry, and for each stored tensor a tensor ``(capacity, *shape)``
    whose row k was stored by the last iteration of number k. The first constant is the number of
    steps. With ``exact``, functions such as exp, and sums, have the same bits in every program.

    Raises:
        UnprintableError: the loop has tensors of other types, or there is no compiler.
    """
    rows = stored_examples(parts.body.graph, len(carry))
    text = _CppLoop(parts, constants, carry, exact, threads, rows)
    library = compiled(text.source, text.parallel)
    run = library.run
    run.argtypes, run.restype = [ctypes.POINTER(ctypes.c_void_p)] * 3, ctypes.c_int
    InputPointers = ctypes.c_void_p * (len(constants) + text.fixed + len(carry))
    OutputPointers = ctypes.c_void_p * (len(carry) + len(rows))
    functions = (ctypes.c_void_p * max(1, len(text.addresses)))(*text.addresses)
    Functions = type(functions)
    shapes = [((capacity, *x.shape), x.dtype) for x in rows]

    def loop(constants: Sequence[Tensor], carry: Sequence[Tensor]) -> Results:
        results = [torch.empty(x.shape, dtype=x.dtype) for x in carry]
        stored = new_rows(shapes)
        fixed = last_inputs((parts.start, parts.body), constants)
        inputs = [x.contiguous() for x in (*constants, *(x for p in fixed for x in p), *carry)]
        state, called = Run(), functions
        if text.by_torch:
            bound = {at: call.bound(state) for at, call in text.by_torch.items()}
            called = Functions(*functions)
            for at, function in bound.items():
                called[at] = ctypes.cast(function, ctypes.c_void_p).value
        with torch.no_grad():
            status = run(
                InputPointers(*(x.data_ptr() for x in inputs)),
                OutputPointers(*(x.data_ptr() for x in (*results, *stored))),
                called,
            )
        if state.error is not None:
            raise state.error
        if status:
            error, message = STATUS[status]
            raise error(message)
        return results, stored

    return loop, described(text.unprinted), Path(library._name).with_suffix(".cpp")


def last_inputs(parts: Sequence[Part], constants: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the last inputs of parts of a loop, for its constants."""
    once = dict.fromkeys(x for part in parts for x in part.once)
    values = {x: x.value(constants) for x in once}
    return [[*part.baked, *(values[x] for x in part.once)] for part in parts]


class _CppLoop:
    """The C++ source of a loop, with a function ``run``.

    Attributes:
        parallel: whether it has a loop that threads share.
        fixed: the number of inputs after the constants: captured tensors and values of constants.
    """

    def __init__(
        self,
        parts: Parts,
        constants: Sequence[Tensor],
        carry: Sequence[Tensor],
        exact: bool,
        threads: int,
        stored: Sequence[Tensor],
    ) -> None:
        baked = (x for part in (parts.start, parts.body) for x in part.baked)
        others = [
            f"a tensor of {x.dtype} on {x.device}"
            for x in (*constants, *carry, *stored, *baked)
            if x.device.type != "cpu" or x.dtype not in TYPES
        ]
        if others:
            raise UnprintableTypeError(others[0])
        self.threads, self.exact = threads, exact
        self.large = 2 * max(x.numel() for x in carry)
        self.functions: list[str] = []
        self.addresses: list[int] = []
        self.by_torch: dict[int, TorchCall] = {}
        self.unprinted: list[Node] = []
        self.parallel = False
        self.declarations: dict[type[Call], str] = {}
        # Of each function, by the names of their copies.
        self.checked: dict[str, dict[str, Checked]] = {}
        self.work = 0
        consts = [_constant_buffer(f"c{i}", x) for i, x in enumerate(constants)]
        self.deferred = defer_products(parts.body.graph, len(carry))
        factors = [x for product in self.deferred for x in product.factors()]
        sums = {x.number for x in self.deferred}
        self.carry_in = [_buffer(f"x{i}", x, fill=False) for i, x in enumerate(carry)]
        self.current = [_buffer(f"a{i}", x, fill=i not in sums) for i, x in enumerate(carry)]
        others = ((i, x) for i, x in enumerate(carry) if i not in sums)
        self.next_carry = [_buffer(f"n{i}", x, fill=True) for i, x in others]
        self.rows = [_buffer(f"row{i}", x, fill=False) for i, x in enumerate(stored)]
        number = Buffer("k", torch.int64, (), (), variable=True)
        count = Buffer("count", torch.int64, (), (), variable=True)
        start = self._function("start", parts.start, [*consts, *self.carry_in], self.current)
        self._function("more", parts.more, [number, count], [], "bool")
        inputs = [number, *self.current, *consts]
        stores = [*self.rows, *factors]
        body = self._function("body", parts.body, inputs, self.next_carry, rows=stores)
        if self.deferred:
            self.declarations[MatrixProduct] = MatrixProduct.declarations
        self.parallel |= any(x.is_shared(threads) for x in self.deferred)
        self.fixed = len(start) + len(body)
        found = [*sorted({*self.declarations.values()}), *self.functions]
        found = [declaration(threads), *found] if self.parallel else found
        found = [CHECKED, *found] if debugging() else found
        self.source = "\n".join([scalar_functions(exact), *found, *self._run(consts, start, body)])

    def _function(
        self,
        name: str,
        part: Part,
        inputs: list[Buffer],
        outputs: list[Buffer],
        result: str = "int64_t",
        rows: Sequence[Buffer] = (),
    ) -> list[Buffer]:
        """Print the function of one graph, and return the buffers of the last inputs of the part.

        The function returns the first output, of the C++ type ``result``. It writes the other
        outputs and, after them, the rows.
        """
        examples = [*part.baked, *(x.example for x in part.once)]
        fixed = [_constant_buffer(f"c_{name}{i}", x) for i, x in enumerate(examples)]
        for buffer, once in zip(fixed[len(part.baked) :], part.once, strict=True):
            buffer.symmetric = once.symmetric
        inputs = [*inputs, *fixed]
        part.graph.graph.eliminate_dead_code(has_effect)
        lowering = lowered(part.graph, inputs, self.large, self.exact)
        self.unprinted += lowering.unprinted
        targets: list[Task] = []
        # The rows that are the memory of values stored anyway.
        held: dict[str, str] = {}
        for value, buffer in zip(lowering.outputs[1:], [*outputs, *rows], strict=True):
            own = fitting_buffer(value, buffer) if buffer in rows else None
            if own and own not in held:
                held[own] = buffer.name
            elif value.numel:
                targets.append(Task(buffer, value))
        self.checked[name] = {x.buffer.name: x for x in lowering.checked}
        first_function = len(self.addresses)
        function = FunctionPrinter(lowering, targets, self.threads, first_function, held)
        self.parallel |= function.parallel
        for call in lowering.calls:
            if isinstance(call, TorchCall):
                self.by_torch[len(self.addresses)] = call
            self.addresses += call.addresses
            # Kernels of pairs declare the type of their numbers.
            if self.declarations.setdefault(type(call), call.declarations) != call.declarations:
                raise UnprintableError("calls with different declarations")
        scratch, at = _pointers(function.scratch, "__restrict ", "work", 0)
        self.work, body = max(self.work, at), Body("r")
        text = lowering.outputs[0].load(body, ())
        parameters = [
            *(_parameter(b, const=True) for b in inputs),
            *(_parameter(b, const=False) for b in (*outputs, *rows)),
            *(_parameter(x.buffer, const=True) for x in self.checked[name].values()),
            *EXTRA,
        ]
        head = f"static {result} {name}({', '.join(parameters)}) {{"
        if debugging():
            read = [*inputs, *outputs, *rows, *(x.buffer for x in self.checked[name].values())]
            scratch += _checked([*read, *function.scratch])
        end = [f"return {text};", *["}"] * (2 if debugging() else 1)]
        lines = [head, *scratch, *function.lines, *body.lines, *end]
        names = (f"#define {name} {other}" for name, other in function.aliases.items())
        ends = (f"#undef {name}" for name in function.aliases)
        self.functions.append("\n".join([*names, *lines, *ends]))
        return fixed

    def _run(self, consts: list[Buffer], start: list[Buffer], body: list[Buffer]) -> list[str]:
        """Print the function ``run``; the parts have the last inputs ``start`` and ``body``."""
        constants = [*consts, *start, *body]
        lines, at = [], 0
        for i, buffer in enumerate(constants):
            kind, name = TYPES[buffer.dtype], buffer.name
            if buffer.variable:
                lines.append(f"const {kind} {name} = *(const {kind}*)in[{i}];")
            elif buffer.row:
                size, row = buffer.inner, buffer.row
                count = torch.Size(buffer.shape).numel() // size
                copy, at = _pointers([buffer], "", "memory", at)
                lines += [
                    *copy,
                    f"for (int64_t r = 0; r < {count}; ++r) memcpy({name} + r * {row}, "
                    f"(const {kind}*)in[{i}] + r * {size}, {size} * sizeof({kind}));",
                ]
            else:
                lines.append(f"const {kind}* {name} = (const {kind}*)in[{i}];")
        checked = {name: x for found in self.checked.values() for name, x in found.items()}
        waiting = [x for product in self.deferred for x in product.stored()]
        buffers = [x.buffer for x in checked.values()]
        buffers += [*self.current, *self.next_carry, *waiting]
        pointers, at = _pointers(buffers, "", "memory", at)
        lines += pointers
        for i, buffer in enumerate(self.carry_in):
            kind = TYPES[buffer.dtype]
            lines.append(f"{kind}* {buffer.name} = ({kind}*)in[{len(constants) + i}];")
            lines.append(f"{kind}* y{i} = ({kind}*)out[{i}];")

        def call(function: str, *arguments: str, buffers: Sequence[Buffer]) -> str:
            given = [*arguments, *(b.name for b in buffers), *self.checked[function]]
            return f"{function}({', '.join([*given, 'work', '&refused', 'functions'])})"

        at_start = [*consts, *self.carry_in, *start, *self.current]
        factors = [x for product in self.deferred for x in product.factors()]
        at_body = [*self.current, *consts, *body, *self.next_carry, *self.rows, *factors]
        sums = {x.number: self.current[x.number].name for x in self.deferred}
        exchanged = [x for i, x in enumerate(self.current) if i not in sums]
        pairs = zip(exchanged, self.next_carry, strict=True)
        rows = [
            f"{TYPES[row.dtype]}* {row.name} = ({TYPES[row.dtype]}*)out[{i}] + k * "
            f"{torch.Size(row.shape).numel()};"
            for i, row in enumerate(self.rows, len(self.current))
        ]
        return [
            'extern "C" int run(const void* const* in, void* const* out, void* const* functions) {',
            f"char* block = (char*)calloc({at + self.work + 64}, 1);",
            "if (!block) return 1;",
            "char* memory = block + (64 - (uintptr_t)block % 64);",
            *lines,
            f"char* work = memory + {at};",
            "int refused = 0;",
            *(line for x in checked.values() for line in x.lines),
            *(["if (refused) { free(block); return refused; }"] if checked else []),
            f"int64_t k = {call('start', buffers=at_start)};",
            *(line for x in self.deferred for line in x.before_loop(sums[x.number], self.threads)),
            *(["team.begun = omp_get_wtime();"] if self.parallel else []),
            f"while (!refused && {call('more', 'k', buffers=consts[:1])}) {{",
            *rows,
            *(line for x in self.deferred for line in x.before_iteration()),
            f"k = {call('body', 'k', buffers=at_body)};",
            *(f"exchange({a.name}, {n.name});" for a, n in pairs),
            *(["team.iterated();"] if self.parallel else []),
            *(x.after_iteration() for x in self.deferred),
            *(["team.begun = omp_get_wtime();"] if self.parallel and self.deferred else []),
            "}",
            *(x.after_loop() for x in self.deferred),
            *(_copy_out(buffer, f"y{i}") for i, buffer in enumerate(self.current)),
            "free(block);",
            "return refused;",
            "}",
        ]


def _pointers(
    buffers: Sequence[Buffer], restrict: str, memory: str, at: int
) -> tuple[list[str], int]:
    """Print the pointers of buffers in a block of memory from a place on; return the end too."""
    lines: list[str] = []
    for buffer in buffers:
        kind = TYPES[buffer.dtype]
        lines.append(f"{kind}* {restrict}{buffer.name} = ({kind}*)({memory} + {at});")
        # Whole cache lines.
        at += -(-buffer.size * buffer.dtype.itemsize // 64) * 64
    return lines, at


def _checked(buffers: Sequence[Buffer]) -> list[str]:
    """Print the pointers of a debug build, in a block where they hide those of the same names."""
    known = [buffer for buffer in buffers if not buffer.variable]
    outer = [f"auto* const {x.name}_raw = {x.name};" for x in known]
    inner = [f'const auto {x.name} = checked({x.name}_raw, {x.size}, "{x.name}");' for x in known]
    return [*outer, "{", *inner]


def _buffer(name: str, x: Tensor, fill: bool) -> Buffer:
    return make_buffer(name, x.dtype, x.shape, row_major(x.shape), fill)


def _constant_buffer(name: str, x: Tensor) -> Buffer:
    """Make the buffer of a constant: a variable for a scalar, else rows, padded unless large."""
    if x.numel() == 1:
        return Buffer(name, x.dtype, tuple(x.shape), (0,) * x.ndim, variable=True, constant=True)
    return replace(_buffer(name, x, fill=x.numel() <= COPY_LIMIT), constant=True)


def _copy_out(buffer: Buffer, result: str) -> str:
    """Print the copy of a buffer, whose rows may be padded, to a dense result."""
    kind, numbers = TYPES[buffer.dtype], torch.Size(buffer.shape).numel()
    size, pitch = (buffer.inner, buffer.row) if buffer.row else (numbers, numbers)
    return (
        f"for (int64_t r = 0; r < {numbers // max(1, size)}; ++r) memcpy({result} + r * {size}, "
        f"{buffer.name} + r * {pitch}, {size} * sizeof({kind}));"
    )


def _parameter(buffer: Buffer, const: bool) -> str:
    kind = TYPES[buffer.dtype]
    if buffer.variable:
        return f"const {kind} {buffer.name}"
    return f"{'const ' if const else ''}{kind}* __restrict {buffer.name}"
