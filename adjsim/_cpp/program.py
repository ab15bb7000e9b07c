"""A loop of steps as one C++ function.

The parts of the loop are graphs: before the first iteration, whether another comes, an iteration,
and after the last. What is carried lies in two sets of buffers, of which an iteration reads one and
writes the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from adjsim._cpp.graph import Lowering
from adjsim._cpp.library import compiled
from adjsim._cpp.nests import Function, Output
from adjsim._cpp.operations import PRELUDE
from adjsim._cpp.values import TYPES, Body, Buffer, UnprintableError, laid_out

# Constants of more numbers are read where they are.
COPIED = 65_536
# What a program returns instead of 0, for what torch's own operations would have refused.
STATUS: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "there is no memory for the buffers of a compiled loop."),
    2: (ZeroDivisionError, "a compiled step divided an integer by zero."),
    3: (IndexError, "a compiled step indexed a tensor out of range."),
}


@dataclass(frozen=True)
class Part:
    """A graph, and the tensors that it has read without being given them: its last inputs."""

    graph: GraphModule
    baked: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Parts:
    """The graphs of a loop.

    Attributes:
        start: of constants and what is carried, to the number of the first iteration and what is
            carried.
        more: of the number of an iteration and of the number of steps, to whether it is carried
            out.
        body: of the number, what is carried, and constants, to the next number and what is carried.
        finish: of what is carried and constants, to what is carried in the end.
    """

    start: Part
    more: Part
    body: Part
    finish: Part


def program(
    parts: Parts, constants: Sequence[Tensor], carry: Sequence[Tensor], exact: bool, threads: int
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]:
    """The loop, compiled: of constants, the first of which is the number of steps, and of what is
    carried, to the latter.

    Args:
        constants, carry: examples.
        exact: whether results must have the last bit of torch's operations.
        threads: that share large loops.

    Raises:
        UnprintableError: the loop has operations that are not printed, or there is no compiler.
    """
    text = _Program(parts, constants, carry, exact, threads)
    library = compiled(text.source, text.shared)
    run = library.run
    run.argtypes, run.restype = [ctypes.POINTER(ctypes.c_void_p)] * 2, ctypes.c_int
    shapes = [(x.shape, x.dtype) for x in carry]
    kind_in = ctypes.c_void_p * (len(constants) + len(text.baked) + len(carry))
    kind_out = ctypes.c_void_p * len(carry)

    def loop(constants: Sequence[Tensor], carry: Sequence[Tensor]) -> list[Tensor]:
        results = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        inputs = [x.contiguous() for x in (*constants, *text.baked, *carry)]
        status = run(
            kind_in(*(x.data_ptr() for x in inputs)), kind_out(*(x.data_ptr() for x in results))
        )
        if status:
            error, message = STATUS[status]
            raise error(message)
        return results

    return loop


class _Program:
    """The source of a loop.

    Attributes:
        source: C++, with ``int run(const void* const* inputs, void* const* outputs)``.
        shared: whether threads share a loop in it.
        baked: tensors that the graphs have read without being given them, inputs after the
            constants.
    """

    def __init__(
        self,
        parts: Parts,
        constants: Sequence[Tensor],
        carry: Sequence[Tensor],
        exact: bool,
        threads: int,
    ) -> None:
        if any(x.device.type != "cpu" or x.dtype not in TYPES for x in (*constants, *carry)):
            raise UnprintableError("tensors of other types, or not on the CPU")
        self.exact, self.threads = exact, threads
        self.large = 2 * max(x.numel() for x in carry)
        self.functions: list[str] = []
        self.baked: list[Tensor] = []
        self.work = 0
        given = [_given(f"c{i}", x) for i, x in enumerate(constants)]
        outside = [_buffer(f"x{i}", x, fill=False) for i, x in enumerate(carry)]
        inside = [_buffer(f"a{i}", x, fill=True) for i, x in enumerate(carry)]
        after = [_buffer(f"n{i}", x, fill=True) for i, x in enumerate(carry)]
        number = Buffer("k", torch.int64, (), (), variable=True)
        count = Buffer("count", torch.int64, (), (), variable=True)
        begun = self._function("start", parts.start, [*given, *outside], inside, "int64_t")
        self._function("more", parts.more, [number, count], [], "bool")
        each = self._function("body", parts.body, [number, *inside, *given], after, "int64_t")
        last = self._function("finish", parts.finish, [*inside, *given], outside, None)
        all_given = [*given, *begun, *each, *last]
        self.source = "\n".join(
            [PRELUDE, *self.functions, *self._run(given, begun, each, last, outside, inside, after)]
        )
        self.shared = "omp parallel" in self.source
        assert len(all_given) == len(constants) + len(self.baked)

    def _function(
        self, name: str, part: Part, inputs: list[Buffer], outputs: list[Buffer], result: str | None
    ) -> list[Buffer]:
        """Print a function that writes outputs, and gives back the first of its results if that has
        a type.

        Returns: the buffers of what is baked in, its last inputs.
        """
        baked = [_given(f"c_{name}{i}", x) for i, x in enumerate(part.baked)]
        self.baked += part.baked
        inputs = [*inputs, *baked]
        part.graph.graph.eliminate_dead_code()
        lowering = Lowering(part.graph, inputs, self.large, self.exact)
        kept = lowering.outputs[1:] if result else lowering.outputs
        goals = [Output(v, b) for v, b in zip(kept, outputs, strict=True)]
        function = Function(lowering, goals, self.threads, lowering.outputs[0] if result else None)
        at, lines = 0, []
        for buffer in function.scratch:
            kind = TYPES[buffer.dtype]
            lines.append(f"{kind}* __restrict {buffer.name} = ({kind}*)(work + {at});")
            at += _bytes(buffer)
        lines += function.lines
        if result:
            body = Body("r")
            text = lowering.outputs[0].load(body, ())
            lines += [*body.lines, f"return {text};"]
        self.work = max(self.work, at)
        names = [_parameter(b, const=True) for b in inputs] + [
            _parameter(b, const=False) for b in outputs
        ]
        self.functions.append(
            "\n".join(
                [
                    f"static {result or 'void'} "
                    f"{name}({', '.join([*names, 'char* __restrict work', 'int* refused'])}) {{",
                    *lines,
                    "}",
                ]
            )
        )
        return baked

    def _run(
        self,
        given: list[Buffer],
        begun: list[Buffer],
        each: list[Buffer],
        last: list[Buffer],
        outside: list[Buffer],
        inside: list[Buffer],
        after: list[Buffer],
    ) -> list[str]:
        constants = [*given, *begun, *each, *last]
        lines, at = [], 0
        for i, buffer in enumerate(constants):
            kind, name = TYPES[buffer.dtype], buffer.name
            if buffer.variable:
                lines.append(f"const {kind} {name} = *(const {kind}*)in[{i}];")
            elif buffer.row:
                size, row = buffer.inner, buffer.row
                rows = torch.Size(buffer.shape).numel() // size
                lines.append(f"{kind}* {name} = ({kind}*)(memory + {at});")
                lines.append(
                    f"for (int64_t r = 0; r < {rows}; ++r) std::memcpy({name} + r * {row}, "
                    f"(const {kind}*)in[{i}] + r * {size}, {size} * sizeof({kind}));"
                )
                at += _bytes(buffer)
            else:
                lines.append(f"const {kind}* {name} = (const {kind}*)in[{i}];")
        for buffer in [*inside, *after]:
            kind = TYPES[buffer.dtype]
            lines.append(f"{kind}* {buffer.name} = ({kind}*)(memory + {at});")
            at += _bytes(buffer)
        for i, buffer in enumerate(outside):
            kind = TYPES[buffer.dtype]
            lines.append(f"{kind}* {buffer.name} = ({kind}*)in[{len(constants) + i}];")
            lines.append(f"{kind}* y{i} = ({kind}*)out[{i}];")

        def call(function: str, *buffers: Buffer | str) -> str:
            names = [b if isinstance(b, str) else b.name for b in buffers]
            return f"{function}({', '.join([*names, 'work', '&refused'])})"

        lines += [
            f"char* work = memory + {at};",
            "int refused = 0;",
            f"int64_t k = {call('start', *given, *outside, *begun, *inside)};",
            f"while ({call('more', 'k', given[0])}) {{",
            f"k = {call('body', 'k', *inside, *given, *each, *after)};",
            *(f"std::swap({a.name}, {n.name});" for a, n in zip(inside, after, strict=True)),
            "}",
            f"{call('finish', *inside, *given, *last, *(f'y{i}' for i in range(len(outside))))};",
        ]
        return [
            'extern "C" int run(const void* const* in, void* const* out) {',
            f"char* block = (char*)std::calloc({at + self.work + 64}, 1);",
            "if (!block) return 1;",
            "char* memory = block + (64 - (uintptr_t)block % 64);",
            *lines,
            "std::free(block);",
            "return refused;",
            "}",
        ]


def _buffer(name: str, x: Tensor, fill: bool) -> Buffer:
    return laid_out(name, x.dtype, x.shape, torch.empty(x.shape, device="meta").stride(), fill)


def _given(name: str, x: Tensor) -> Buffer:
    """The buffer of a constant: a variable if it is a single number; long ones are read where they
    are.
    """
    if x.numel() == 1:
        return Buffer(name, x.dtype, tuple(x.shape), (0,) * x.ndim, variable=True)
    return _buffer(name, x, fill=x.numel() <= COPIED)


def _bytes(buffer: Buffer) -> int:
    """Of a buffer, in whole cache lines."""
    return -(-buffer.size * buffer.dtype.itemsize // 64) * 64


def _parameter(buffer: Buffer, const: bool) -> str:
    kind = TYPES[buffer.dtype]
    if buffer.variable:
        return f"const {kind} {buffer.name}"
    return f"{'const ' if const else ''}{kind}* __restrict {buffer.name}"
