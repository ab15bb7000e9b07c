"""Graphs of operations, shapes, strides and types, drawn at random: printed loops against torch.

``python -m tests.contracts.test_drawn_graphs 3600`` draws for an hour, from a seed of the clock.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.errors import NonInteractiveExampleWarning
from torch import Tensor

from adjsim.compiler import compile_loop
from tests.contracts.test_cpp import Constants, spec

FLOATS = (torch.float64, torch.float32)

# Operations that keep numbers of order one, so that errors are those of rounding.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "exp of -square": lambda x: torch.exp(-x * x),
    "sigmoid": torch.sigmoid,
    "erfc": lambda x: torch.erfc(x) - 1,
    "softplus": torch.nn.functional.softplus,
    "root": lambda x: (x * x + 0.5).sqrt(),
    "reciprocal": lambda x: 1 / (x * x + 1),
    "negative": torch.neg,
    "absolute": torch.abs,
    "cube": lambda x: (x.clamp(-2, 2)) ** 3 / 4,
    "clamp": lambda x: x.clamp(-0.7, 0.9),
    "where": lambda x: torch.where(x > 0.3, x, -0.5 * x),
    "other type": lambda x: (
        x.to(torch.float32 if x.dtype == torch.float64 else torch.float64) * 0.5
    ),
    "whole numbers": lambda x: x + (4 * x.detach()).to(torch.int64).remainder(3).to(x.dtype),
    "contiguous": lambda x: x.contiguous() * 1.0,
    "mask": lambda x: x.masked_fill((x > 0.2) & (x < 0.8), 0.1),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: 0.5 * x - y,
    "product": lambda x, y: x * torch.tanh(y),
    "quotient": lambda x, y: x / (1 + y * y),
    "maximum": torch.maximum,
    "chosen": lambda x, y: torch.where(x > y, x, 0.3 * y),
    "addcmul": lambda x, y: torch.addcmul(x, x.sin(), y, value=0.3),
}


def solved(x: Tensor, a: int) -> Tensor:
    """Solve systems whose matrices have a condition of at most three."""
    y = x.movedim(a, -1)
    n = y.shape[-1]
    coupled = torch.tanh(y.unsqueeze(-1) * y.unsqueeze(-2)) / (2 * n)
    return torch.linalg.solve(coupled + torch.eye(n, dtype=x.dtype), y)


def convolved(x: Tensor, a: int) -> Tensor:
    y = x.movedim(a, -1)
    rows = y.reshape(-1, 1, y.shape[-1])
    kernel = torch.tensor([[[0.2, 0.5, -0.3]]], dtype=x.dtype)
    return torch.nn.functional.conv1d(rows, kernel, padding=1).view(y.shape)


# Operations along an axis, which a tensor of one axis at least has.
ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, a: x.sum(a) / x.shape[a],
    "kept sum": lambda x, a: x.sum(a, keepdim=True) / x.shape[a],
    "mean": lambda x, a: x.mean(a),
    "largest": lambda x, a: x.amax(a),
    "extremes": lambda x, a: x.max(a).values + 0.5 * x.min(a).values,
    "norm": lambda x, a: (x * x).sum(a).add(0.1).sqrt(),
    "softmax": lambda x, a: x.softmax(a),
    "flip": lambda x, a: x.flip(a),
    "roll": lambda x, a: x.roll(1, a),
    "scan": lambda x, a: x.cumsum(a) / x.shape[a],
    "sort": lambda x, a: x.sort(a).values,
    "running product": lambda x, a: (1 + 0.1 * torch.tanh(x)).cumprod(a),
    "solution": solved,
    "convolution": convolved,
    "part": lambda x, a: x.narrow(a, 0, max(1, x.shape[a] - 1)),
    "every second": lambda x, a: x[(slice(None),) * a + (slice(0, None, 2),)],
    "entry": lambda x, a: x.select(a, x.shape[a] - 1),
    "row of places": lambda x, a: x.index_select(
        a, torch.arange(x.shape[a] + 1).remainder(x.shape[a])
    ),
    "assigned": lambda x, a: x.index_fill(a, torch.tensor([0]), 0.25),
    "twice": lambda x, a: torch.cat([x, 0.5 * x], a),
    "new axis": lambda x, a: x.unsqueeze(a),
    "expanded": lambda x, a: x.unsqueeze(a).expand(*x.shape[:a], 3, *x.shape[a:]),
    "last": lambda x, a: x.movedim(a, -1),
    "flat": lambda x, a: x.flatten(a),
    "split": lambda x, a: x.split(2, a)[0] + 0.1,
    "transform": lambda x, a: torch.fft.irfft(torch.fft.rfft(x, dim=a) * 0.7, x.shape[a], dim=a),
}
LARGEST = 4096


class Call(NamedTuple):
    """An operation of one of the tables, on values by their numbers."""

    table: str
    name: str
    operands: tuple[int, ...]
    axis: int = 0


class Graph(NamedTuple):
    """The shapes, layouts and types of inputs, and calls in order."""

    inputs: list[tuple[tuple[int, ...], str, torch.dtype]]
    calls: list[Call]


def applied(call: Call, values: Sequence[Tensor]) -> Tensor | None:
    """Evaluate a call; None where it does not apply to these shapes."""
    x = values[call.operands[0]]
    if call.table == "unary":
        return UNARY[call.name](x)
    if call.table == "along":
        return ALONG[call.name](x, call.axis % x.ndim) if x.ndim else None
    y = values[call.operands[1]]
    if call.table == "matrices":
        fits = x.ndim >= 2 and y.ndim >= 2 and x.shape[-1] == y.shape[-2] and x.dtype == y.dtype
        return x @ y / x.shape[-1] if fits and x.shape[:-2] == y.shape[:-2] else None
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        return None
    if x.dtype != y.dtype and call.name in ("addcmul", "maximum"):
        return None
    return BINARY[call.name](x, y)


def evaluate(graph: Graph, inputs: Sequence[Tensor]) -> Tensor:
    """Run the calls; the result has every value that no call reads."""
    values, read = list(inputs), set[int]()
    for call in graph.calls:
        made = applied(call, values)
        if made is not None and made.numel() <= LARGEST:
            values.append(made)
            read.update(call.operands)
        else:
            values.append(values[call.operands[0]])
    ends = [x for k, x in enumerate(values) if k not in read and k >= len(inputs)] or values[-1:]
    return torch.cat([x.flatten().to(torch.float64) for x in ends])


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = tuple(2 * n for n in shape) if layout == "gaps" else shape
    x = torch.randn(wide, generator=generator, dtype=torch.float64).to(dtype)
    if layout == "gaps":
        return x[tuple(slice(0, None, 2) for _ in shape)]
    return x.movedim(0, -1).contiguous().movedim(-1, 0) if layout == "turned" and shape else x


@st.composite
def graphs(draw: Any) -> Graph:
    size = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17])
    shapes = st.lists(size, max_size=3).map(tuple)
    inputs = draw(
        st.lists(
            st.tuples(
                shapes, st.sampled_from(["plain", "turned", "gaps"]), st.sampled_from(FLOATS)
            ),
            min_size=1,
            max_size=3,
        )
    )
    calls: list[Call] = []
    for k in range(draw(st.integers(1, 10))):
        known = len(inputs) + k
        table = draw(st.sampled_from(["unary", "binary", "along", "along", "matrices"]))
        number = st.integers(max(0, known - 4), known - 1) | st.integers(0, known - 1)
        names = {"unary": UNARY, "binary": BINARY, "along": ALONG, "matrices": ("product",)}[table]
        operands = tuple(draw(number) for _ in range(2 if table in ("binary", "matrices") else 1))
        calls.append(
            Call(table, draw(st.sampled_from(list(names))), operands, draw(st.integers(0, 3)))
        )
    return Graph(inputs, calls)


def compiled(function: Callable[..., Tensor], inputs: Sequence[Tensor], exact: bool) -> Tensor:
    constants, carry = Constants(torch.tensor(2), tuple(inputs)), (function(*inputs) * 0,)
    loop, _, _ = compile_loop(
        spec(function), nullcontext, constants, carry, exact=exact, short=False, what="a graph"
    )
    return loop(constants, carry)[0][0]


def plus_zero(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same numbers, by another loop."""
    return lambda *x: function(*x) + 0.0


def check(graph: Graph) -> None:
    inputs = [laid_out(*row, seed) for seed, row in enumerate(graph.inputs)]

    def forward(*x: Tensor) -> Tensor:
        return evaluate(graph, x)

    def backward(*x: Tensor) -> Tensor:
        leaves = [y.detach().requires_grad_() for y in x]
        with torch.enable_grad():
            value = evaluate(graph, leaves)
            weight = torch.linspace(0.5, 1.5, len(value), dtype=torch.float64)
            total = (value * weight).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return torch.cat([y.flatten().to(torch.float64) for y in found])

    single = any(dtype == torch.float32 for _, _, dtype in graph.inputs) or any(
        call.name == "other type" for call in graph.calls
    )
    # Rounding of sums and functions, which later functions do not magnify by more than ten.
    tolerance = 3e-5 if single else 1e-12
    for function, exact in itertools.product((forward, backward), (False, True)):
        expected = function(*inputs)
        found = compiled(function, inputs, exact)
        torch.testing.assert_close(found, expected.detach(), rtol=tolerance, atol=tolerance)
        if exact:
            again = compiled(plus_zero(function), inputs, True)
            assert torch.equal(again, found)


QUICK = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@settings(QUICK, max_examples=2)
@given(graphs())
def test_drawn_graphs(graph):
    check(graph)


@pytest.mark.marathon
@settings(QUICK, max_examples=100)
@given(graphs())
def test_more_drawn_graphs(graph):
    check(graph)


@pytest.mark.parametrize("shape", [(17, 3, 1), (5, 2), (9,)])
def test_a_largest_value_is_equal_to_one_of_them(shape):
    """A function of two last bits, in vectors and in single numbers, would have no largest value,
    and a derivative that is not finite. Found by a drawn graph.
    """

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = torch.addcmul(leaf, leaf.sin(), leaf, value=0.3)
            scanned = (y.amax(0) * torch.tanh(y)).cumsum(0)
            total = (torch.cat([scanned.flatten(), y.flatten()]) ** 2).sum()
        return torch.autograd.grad(total, leaf)[0]

    x = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(compiled(gradient, [x], False), gradient(x), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_systems_along_an_axis_of_length_one():
    """Torch steps through factors by the last axis of a batch, even if its length is one."""
    solutions = [Call("along", "solution", (k,), 3) for k in range(2)]
    check(Graph([((1, 9, 2), "plain", torch.float64)], solutions))


def draw(seconds: float) -> tuple[int, int]:
    """Draw graphs for so long, print those that fail, and return how many were drawn and failed."""
    warnings.simplefilter("ignore", NonInteractiveExampleWarning)
    torch.set_num_threads(1)
    end, drawn, failed = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        graph = graphs().example()
        drawn += 1
        try:
            check(graph)
        except Exception:
            failed += 1
            print(f"{graph}\n{traceback.format_exc()[-1500:]}", flush=True)
    return drawn, failed


def main(seconds: float) -> None:
    """Draw graphs for so long, in one process after another.

    Libraries stay loaded, and Linux limits the maps of a process: one of 3,561 graphs ended there.
    """
    part, drawn, failed = 300.0, 0, 0
    while seconds > 0:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            more = pool.apply(draw, (min(part, seconds),))
        drawn, failed, seconds = drawn + more[0], failed + more[1], seconds - part
        print(f"{drawn} graphs, {failed} failures", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
