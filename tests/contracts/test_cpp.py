"""Printed programs against torch's own operations: the same bits, but for the order of sums and
functions such as exp.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from fractions import Fraction
from functools import partialmethod
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx import Node

from adjsim.compiler import LoopSpec, Operators, compile_loop, compiled, library, nests
from adjsim.compiler.halves import HalfNest
from adjsim.compiler.invariants import transposed
from adjsim.compiler.mathematics import FUNCTIONS, scalar_functions
from adjsim.compiler.nests import Nest
from adjsim.compiler.operations import TRANSCENDENTAL as TRANSCENDENTAL_PRINTERS
from adjsim.compiler.repetitions import merge_repetitions
from adjsim.compiler.reproducible import TANH
from adjsim.compiler.to_cpp import new_rows
from adjsim.compiler.tracing import graph_of
from adjsim.core.layout import materialise_contiguous
from adjsim.potentials.pairs.kernels.call import declarations, on_vectors
from tests.problems import slow_but

SHAPES = [(1,), (5,), (13, 3), (2, 7, 64), (3, 13, 13), (20, 6, 3)]


class Constants(NamedTuple):
    steps: Tensor
    inputs: tuple[Tensor, ...]


def spec(function: Callable[..., Tensor]) -> LoopSpec:
    """As many iterations as are asked for, each of which stores the function of the constants."""
    return LoopSpec(
        start=lambda given, carry: (torch.zeros_like(given.steps), carry),
        more=lambda k, count: k < count,
        body=lambda given, k, carry: (
            k + 1,
            (function(*given.inputs).detach().clone(memory_format=torch.contiguous_format),),
            (),
        ),
    )


def printed(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    exact: bool = False,
    operators: Sequence[Operators] = (),
) -> Tensor:
    """Run the printed program of a function, all of it in C++."""
    constants, carry = Constants(torch.tensor(2), inputs), (torch.zeros_like(function(*inputs)),)
    loop, path, _ = compile_loop(
        spec(function),
        nullcontext,
        constants,
        carry,
        exact=exact,
        short=False,
        what="a test",
        operators=operators,
    )
    assert path == "C++"
    return loop(constants, carry)[0][0]


def first_wrong(function: Callable[..., Tensor], *inputs: Tensor) -> str:
    """Return the operation and the line where a printed function goes wrong, or nothing.

    Its operands are printed rightly. It is found from the result on, back along wrong operands.
    """
    graph = graph_of(lambda *x: [function(*x)], *inputs).requires_grad_(False)

    def is_wrong(node: Node) -> bool:
        if node.op != "call_function" or not isinstance(node.meta["val"], Tensor):
            return False
        part = deepcopy(graph)
        *found, output = part.graph.nodes
        output.args = (next(x for x in found if x.name == node.name),)
        part.graph.eliminate_dead_code()
        part.recompile()
        expected = part(*inputs)
        return not torch.allclose(printed(part, *inputs), expected, 1e-9, 1e-12, equal_nan=True)

    *_, output = graph.graph.nodes
    wrong, place = next(filter(is_wrong, output.all_input_nodes), None), ""
    while wrong is not None:
        place = f"{wrong.name}, {wrong.meta['line']}"
        wrong = next(filter(is_wrong, wrong.all_input_nodes), None)
    return place


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arithmetic": lambda x, y: -x * y + 2 * x - 3 / y + (x - 1.5) / (y * y + 1),
    "negative constants": lambda x, y: x - -2.0 + -torch.full_like(y, -1.0) * -1e-3,
    "powers": lambda x, y: (
        x**2 + x**3 + y**-1 + y**-2 + x**1 + x**0 + (x * x + 1) ** -0.5 + (y * y).rsqrt()
    ),
    "rounding": lambda x, y: (9 * x).round() + (9 * x).floor() + (9 * y).ceil() + (9 * y).trunc(),
    "quotients": lambda x, y: (
        torch.div(9 * x, y, rounding_mode="floor") + torch.div(9 * x, y, rounding_mode="trunc")
    ),
    "remainders": lambda x, y: torch.remainder(9 * x, y) + torch.floor_divide(9 * x, y),
    "conditions": lambda x, y: (
        torch.where((x < y) & ~(x > 0.5) | (y >= 1), x, 2.0) + torch.where(x == y, 0.0, y)
    ),
    "logic": lambda x, y: (
        torch.logical_and(x > 0, y > 0).to(x)
        + torch.logical_or(x > 1, torch.logical_not(y <= 0)).to(x)
    ),
    "extremes": lambda x, y: torch.maximum(x, y) - torch.minimum(x, 0.1 * y),
    "limits": lambda x, y: x.clamp(-0.5, 0.5) + y.clamp(min=0) + y.clamp(max=1),
    "limits of tensors": lambda x, y: (
        x.clamp(-y.abs(), y[..., :1].abs()) + x.clamp(min=y) + y.clamp(max=x[..., :1])
    ),
    "signs": lambda x, y: x.sign() * y.abs() + torch.relu(x),
    "counting": lambda x, y: (
        x + torch.arange(x.shape[-1], dtype=x.dtype) + torch.arange(1, 2 * x.shape[-1], 2).to(x)
    ),
    "constants of a graph": lambda x, y: (
        x + torch.full_like(x, 0.25) * torch.zeros_like(y) + torch.ones_like(x)
    ),
    "other types": lambda x, y: (
        (x.to(torch.float32) * 1.1).to(x.dtype) + (7 * y).to(torch.int64).to(x.dtype)
    ),
}  # fmt: skip


def all_of(table: dict[str, Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """The results of a table one after the other, so that they take one program."""
    return lambda *inputs: torch.cat([function(*inputs).reshape(-1) for function in table.values()])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_elements_have_the_bits_of_torch(shape):
    function, x, y = all_of(ELEMENTWISE), numbers(*shape), numbers(*shape, seed=1)
    found, wanted = (
        f.unflatten(0, (len(ELEMENTWISE), -1))
        for f in (printed(function, x, y, exact=True), function(x, y))
    )
    assert [
        name for name, a, b in zip(ELEMENTWISE, found, wanted, strict=True) if not torch.equal(a, b)
    ] == []


@pytest.mark.parametrize("name", ["arithmetic", "powers", "conditions", "extremes"])
def test_float32_has_the_bits_of_torch(name):
    x, y = numbers(13, 3, dtype=torch.float32), numbers(13, 3, dtype=torch.float32, seed=1)
    assert torch.equal(printed(ELEMENTWISE[name], x, y), ELEMENTWISE[name](x, y))


# Torch's own kernels fuse a multiplication with an addition, and take roots from a library that
# rounds some of them wrongly.
ROUNDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "alpha": lambda x, y: (
        torch.add(x, y, alpha=-3) + torch.sub(x, y, alpha=0.1) + torch.rsub(x, y, alpha=0.7)
    ),
    "value": lambda x, y: (
        torch.addcmul(x, x, y, value=-0.7) + torch.addcdiv(x, y, x.abs() + 1, value=0.3)
    ),
    "roots": lambda x, y: x.abs().sqrt() + y.abs() ** 0.5,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_elements_agree_to_rounding(name):
    x, y = numbers(13, 3), numbers(13, 3, seed=1)
    torch.testing.assert_close(
        printed(ROUNDED[name], x, y), ROUNDED[name](x, y), rtol=0, atol=4e-15
    )


@pytest.mark.slow
def test_the_first_wrong_value_is_found(monkeypatch):
    def function(x):
        return (torch.tanh(2 * x).cumsum(-1) + x.flip(0)) * 3

    x = numbers(5)
    assert first_wrong(function, x) == ""
    monkeypatch.setitem(TRANSCENDENTAL_PRINTERS, "tanh", lambda x: f"math::sinh({x})")
    assert first_wrong(function, x).startswith(f"tanh, {__file__}:")


def test_whole_numbers():
    x = torch.tensor([-9, -4, -1, 0, 3, 8, 2**53 + 1])
    y = torch.tensor([4, -3, 2, 5, -2, 3, 7])

    def function(x: Tensor, y: Tensor) -> Tensor:
        floor, trunc = (torch.div(x, y, rounding_mode=mode) for mode in ("floor", "trunc"))
        return (
            100 * floor
            + trunc
            + torch.remainder(x, y)
            + x.abs() * (x & y)
            + (x | y)
            - (x ^ y)
            + x**2
            + x.clamp(-3, 5)
        )

    assert torch.equal(printed(function, x, y, exact=True), function(x, y))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.permute(2, 0, 1) * x.transpose(0, 1).permute(2, 1, 0),
    "sliced": lambda x: x[1:, ::2] + x[:-1, 3:] * x[0, -4:],
    "selected": lambda x: x[-1] * x[1, 3] + x.select(2, 0)[1].unsqueeze(-1),
    "expanded": lambda x: (x.unsqueeze(1) - x.unsqueeze(0)).squeeze(),
    "split": lambda x: (
        torch.cat([part * 2 for part in x.split([3, 4], 1)], 1) + torch.stack(x.unbind(2), 2)
    ),
    "stacked": lambda x: torch.stack([x, x + 1], 1) * torch.stack([x[0], x[1], x[2]]).unsqueeze(1),
    "reshaped": lambda x: (
        (x * 2).reshape(-1, 5).reshape(7, 3, 5) + x.permute(1, 0, 2).reshape(7, 3, 5)
    ),
    "flattened": lambda x: x.permute(2, 1, 0).flatten(),
    "patched": lambda x: x.select_scatter(x[0] * 2, 0, 1) + x.slice_scatter(x[:, 2:4] * 3, 1, 2, 4),
    "chosen": lambda x: (
        x[torch.tensor([2, 0, -1])]
        + x[:, torch.tensor([6, 1])][:, :1]
        + x.index_select(0, torch.tensor([1]))
    ),
    "without elements": lambda x: (
        torch.cat([x[:0], x, (x[:0] + 1).exp()])
        + x.slice_scatter(x[:, :0], 1, 2, 2)
        + torch.cat(x.split([0, 7], 1), 1)
        + x[:0].sum(0)
    ),
    "chosen in pairs": lambda x: x[:, torch.tensor([[0], [5]]), torch.tensor([[1, -2, 3]])],
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views_have_the_bits_of_torch(name):
    x = numbers(3, 7, 5)
    assert torch.equal(printed(VIEWS[name], x), VIEWS[name](x))


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: (x * x).sum(),
    "rows": lambda x: x.sum(-1),
    "columns": lambda x: (2 * x).sum(0, keepdim=True),
    "two axes": lambda x: x.sum((0, 2)),
    "pairs": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).sum((-1, -2)),
    "all pairs": lambda x: (
        (x.unsqueeze(-1) * x.unsqueeze(-2)).sum()
        + (x.unsqueeze(-1) - x.unsqueeze(-2)).square().sum(-1)
    ),
    "means": lambda x: x.mean() + x.mean(1) * (x > 0).sum(1),
    "sums of sums": lambda x: (x.sum(-1, keepdim=True) * x).sum(1),
    "of what does not vary": lambda x: (x[:1] * 2).expand(5, -1, -1).sum(0),
}


@pytest.mark.parametrize(
    ("exact", "permuted", "shape"),
    slow_but(
        lambda exact, permuted, shape: exact == permuted,
        itertools.product(
            (False, True), (False, True), [(5, 3, 13), (2, 4, 64), (3, 6, 20), (40, 9, 3)]
        ),
    ),
    ids=str,
)
def test_sums(shape, permuted, exact):
    """Only the order of the sum differs: a few roundings of its largest term, for some hundred
    terms.
    """
    x = numbers(*shape)

    def function(x: Tensor) -> Tensor:
        return all_of(SUMS)(x.permute(1, 2, 0) if permuted else x)

    found = printed(function, x, exact=exact)
    torch.testing.assert_close(found, function(x), rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("other", [0, 1])
def test_sums_of_exact_runs_have_the_same_bits_whatever_is_summed_beside_them(axis, other):
    """Loops that read other tensors run along other axes, over filled rows or not."""
    x, y, z = (numbers(42, 42, seed=seed) for seed in range(3))

    def both(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.cat([(x * x.mT).mean(axis), (y * z).sum(other)])

    alone = printed(lambda x, y, z: (x * x.mT).mean(axis), x, y, z, exact=True)
    beside = printed(both, x, y, z, exact=True)
    assert torch.equal(beside[:42], alone)


def test_second_derivatives_that_write_in_place_are_printed():
    """Autograd fills a new tensor with ones and subtracts from it."""

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            q = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.silu(q).sum(), q, create_graph=True)
            return torch.autograd.grad(slope.sum(), q)[0]

    x = numbers(20)
    torch.testing.assert_close(printed(function, x), function(x), rtol=1e-13, atol=1e-15)


# Operations that choose, move, count or scan numbers: each has torch's bits, with its derivative.
MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "scans": lambda x: x.cumsum(1) + x.cumsum(0) + x.cumprod(1) + x.T.cumsum(0).T,
    "counts": lambda x: x * ((x > 0).cumsum(1) + torch.arange(5).cumprod(0)),
    "largest": lambda x: x.max(1, keepdim=True).values + x.max(0).values * x.max(),
    "smallest": lambda x: x.min(1, keepdim=True).values + x.min(0).values * x.amin((0, 1)),
    "places": lambda x: x * (x.argmax(1, keepdim=True) + x.argmin(0) + x.argmax()),
    "any": lambda x: (
        x * ((x > 0.3).max(1, keepdim=True).values + (x > 1).any(0) + (x < 1).all(1)[:, None])
    ),
    "scattered": lambda x: x.scatter(1, ROWS, 2 * x) + x.scatter(0, ROWS[:1], 0.5),
    "embedding": lambda x: F.embedding(ROWS % 7, x, padding_idx=3)[:, 1],
    "diagonals": lambda x: (
        torch.diag_embed(x.diagonal(1), 1)[:, :5]
        + x[:5].tril()
        + x[:5].triu(1)
        + x[:5].trace().round()
        + x[:5].diag()
    ),
    "edges": lambda x: (
        F.pad(x, (2, 1), mode="reflect")[:, :5] + F.pad(x, (1, 3), mode="replicate")[:, 2:7]
    ),
    "shifts": lambda x: x * ((torch.arange(5) - 2 << 3) + (torch.arange(5) - 2 >> 1)),
}
ROWS = torch.tensor([[(3 * k + i) % 5 for i in range(5)] for k in range(7)])


def with_slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A value and its derivative, weighted so that no two numbers have the same."""
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        value = function(y).flatten()
        weight = 1 + (torch.arange(len(value)) % 7).to(value) / 8
        (grad,) = torch.autograd.grad((value * weight).sum(), y)
    return torch.cat([value.detach(), grad.flatten()])


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [
        pytest.param(torch.float64, True, marks=pytest.mark.slow),
        pytest.param(torch.float64, False, marks=pytest.mark.marathon),
        pytest.param(torch.float32, True, marks=pytest.mark.marathon),
        pytest.param(torch.float32, False, marks=pytest.mark.marathon),
    ],
)
def test_scans_and_places_and_their_derivatives(dtype, exact):
    """Values have torch's bits; derivatives have sums of a few terms in another order."""
    x = numbers(7, 5, dtype=dtype)
    functions = [lambda x, f=f: with_slope(f, x) for f in MOVED.values()]
    found = printed(lambda x: torch.cat([f(x) for f in functions]), x, exact=exact)
    parts = found.split([len(f(x)) for f in functions])
    for (name, function), part in zip(MOVED.items(), parts, strict=True):
        wanted, count = with_slope(function, x), function(x).numel()
        assert torch.equal(part[:count], wanted[:count]), name
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(part, wanted, rtol=50 * eps, atol=50 * eps, msg=name)


@pytest.mark.parametrize(
    "length", [33, *(pytest.param(n, marks=pytest.mark.marathon) for n in (1, 7, 8, 9, 100))]
)
def test_sorts(length):
    """Of equal numbers the first goes first, as in a stable sort of torch."""
    x = (3 * numbers(4, length)).round() * 0.5

    def function(x: Tensor) -> Tensor:
        found = [x.sort(1), x.sort(1, descending=True), x.T.contiguous().sort(0), x.topk(length, 1)]
        return torch.cat([part.flatten() for pair in found for part in pair])

    pairs = [x.sort(dim=1, descending=down, stable=True) for down in (False, True)]
    turned = [part.T.flatten() for part in pairs[0]]
    wanted = [*(y.flatten() for p in pairs for y in p), *turned, *(y.flatten() for y in pairs[1])]
    assert torch.equal(printed(function, x), torch.cat(wanted))


@pytest.mark.slow
def test_sorts_and_extremes_of_special_numbers():
    """NaN is the largest number, and the largest and the smallest of any; the first of equal ones
    is taken.
    """
    x = torch.tensor([[0.0, math.nan, -math.inf, 1.0, math.nan], [-0.0, 0.0, 5.0, 5.0, math.inf]])
    x = x.to(torch.float64)

    def function(x: Tensor) -> Tensor:
        found = [x.sort(1), x.sort(1, descending=True), x.max(1), x.min(1), (x.argmax(1),)]
        return torch.cat([part.flatten().to(x.dtype) for pair in found for part in pair])

    torch.testing.assert_close(printed(function, x), function(x), rtol=0, atol=0, equal_nan=True)


def matrices(x: Tensor, rows: int) -> Tensor:
    """Matrices whose pivots are not on the diagonal."""
    count = x.numel() // rows**2
    return x.flatten()[: count * rows**2].view(count, rows, rows) + 2 * torch.eye(rows).to(x).flip(
        0
    )


FACTORED: dict[str, Callable[[Tensor], Tensor]] = {
    "determinants": lambda x: torch.cat([torch.linalg.det(matrices(x, n)) for n in (1, 2, 3, 4)]),
    "determinants of transposes": lambda x: (
        torch.linalg.det(matrices(x, 3).mT) * torch.linalg.slogdet(matrices(x, 3).mT).logabsdet
    ),
    "their logarithms": lambda x: (
        torch.linalg.slogdet(matrices(x, 3)).logabsdet * torch.linalg.slogdet(matrices(x, 3)).sign
    ),
    "inverses": lambda x: torch.linalg.inv(matrices(x, 4)) + torch.linalg.inv(matrices(x, 4).mT),
    "determinant of one": lambda x: torch.linalg.det(matrices(x, 5)[0]) * x[0],
    "solutions": lambda x: torch.linalg.solve(matrices(x, 4), x.flatten()[:16].view(4, 4)),
    "of one side": lambda x: torch.linalg.solve(matrices(x, 3), x[:3, :3].unsqueeze(0)),
    "of vectors": lambda x: torch.linalg.solve(matrices(x, 3), x[:8, :3].clone()),
    "from the right": lambda x: torch.linalg.solve(
        matrices(x, 3), x.flatten()[:48].view(8, 2, 3), left=False
    ),
    "convolutions": lambda x: (
        F.conv1d(x.view(2, 4, 10), x.flatten()[:60].view(5, 4, 3), x[0, :5], padding=1).sum(-1)
        + F.conv1d(x.view(2, 4, 10), x.flatten()[:60].view(5, 4, 3), stride=2, dilation=2).sum(-1)
    ),
    "their transposes": lambda x: F.conv_transpose1d(
        x.view(2, 4, 10), x.flatten()[:60].view(4, 5, 3), x[0, :5], 2, 1, 1, 1, 3
    ),
    "norms": lambda x: F.group_norm(x, 2, 2 * x[0], 2 * x[1]),
    "norms of weights": lambda x: torch._weight_norm(x, x[:, :1] + 3, 0),
    "products of all": lambda x: (1 + 0.1 * x).prod(1) * (1 + 0.1 * x).prod(),
}  # fmt: skip


# Torch's determinant has no derivative in float32 where float64 is the default.
IN_FLOAT64 = ("determinants", "determinants of transposes", "determinant of one")


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float64, marks=pytest.mark.slow),
        pytest.param(torch.float32, marks=pytest.mark.marathon),
    ],
)
def test_small_systems_and_convolutions_with_their_derivatives(dtype):
    """Several roundings each, of matrices whose condition is at most a few hundred."""
    x = numbers(8, 10, dtype=dtype, seed=4)
    names = [name for name in FACTORED if dtype == torch.float64 or name not in IN_FLOAT64]
    functions = [lambda x, f=FACTORED[name]: with_slope(f, x) for name in names]
    found = printed(lambda x: torch.cat([f(x) for f in functions]), x)
    parts = found.split([len(f(x)) for f in functions])
    for name, function, part in zip(names, functions, parts, strict=True):
        wanted = function(x)
        size = 1000 * torch.finfo(dtype).eps * wanted.abs().max()
        torch.testing.assert_close(part, wanted, rtol=0, atol=float(size), msg=name)


@pytest.mark.marathon
def test_second_derivatives_of_systems_and_convolutions_are_printed():
    names = ("their logarithms", "inverses", "of vectors", "convolutions", "norms of weights")

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            total = torch.stack([FACTORED[name](y).square().sum() for name in names]).sum()
            (slope,) = torch.autograd.grad(total, y, create_graph=True)
            return torch.autograd.grad(slope.cos().sum(), y)[0]

    x = 0.3 * numbers(8, 10, seed=4)
    found, wanted = printed(function, x), function(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inverses", "convolutions"])
def test_exact_loops_call_the_libraries_of_torch(name):
    """Their last bits are not printed."""
    x = numbers(8, 10, seed=4)
    function = lambda x: FACTORED[name](x).sum() + x  # noqa: E731
    loop, path, _ = compile_loop(
        spec(function), nullcontext, Constants(torch.tensor(1), (x,)), (x,),
        exact=True, short=False, what="a test",
    )  # fmt: skip
    assert path.startswith("C++, and torch for")
    torch.testing.assert_close(loop(Constants(torch.tensor(1), (x,)), (x,))[0][0], function(x))


def test_singular_matrices_are_refused():
    singular = (torch.arange(3.0) * torch.ones(2, 3, 3)).to(torch.float64)
    run, path = run_of(lambda m: torch.linalg.solve(m, m[:1]) + torch.linalg.inv(m), singular)
    assert path == "C++"
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        run()


# Odd powers and the two sides of zero, infinities, and the ends of exp's range.
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.inf,
    -math.inf,
    math.nan,
    709.7,
    710.0,
    -708.5,
    -744.0,
    -750.0,
]
TRANSCENDENTAL: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in (*FUNCTIONS, "sigmoid")},
    "atan2": lambda x: torch.atan2(x, 1.5 - x),
    "hypot": lambda x: torch.hypot(x, 1.5 - x),
    "pow of tensors": lambda x: x.abs() ** (1.5 - x),
    "pow": lambda x: x.abs() ** 1.7,
    "small powers": lambda x: x**4 + x**-5 + x**6 + x**-7 + x**13,
    "large powers": lambda x: x**41,
    "infinite powers": lambda x: x.abs() ** math.inf + (1 + x.abs()) ** -math.inf,
}


F = torch.nn.functional
COMPOSITE: dict[str, Callable[[Tensor], Tensor]] = {
    "lengths": lambda x: x.norm(dim=-1) + torch.linalg.vector_norm(x, dim=-1),
    "activations": lambda x: F.softplus(x) + F.silu(x) + F.gelu(x) + F.relu(x) + F.elu(x),
    "more activations": lambda x: F.leaky_relu(x) + F.logsigmoid(x) + x.tanh() + x.clamp(-1, 1),
    "products": lambda x: torch.linalg.cross(x[:1], x[1:2]) + torch.dot(x[0], x[1]),
    "losses": lambda x: F.mse_loss(x, x * x) + F.huber_loss(x, x * x),
    "repeated": lambda x: x.repeat(2, 1) * x.norm() + F.normalize(x, dim=-1).repeat(2, 1),
    "others": lambda x: torch.sinc(x) + x.frac() + torch.logaddexp(x, 1 - x),
}


@pytest.mark.slow
def test_composite_operations_and_their_gradients_are_printed():
    """Several roundings each."""
    x = numbers(5, 3)

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            values = torch.cat([f(y).flatten() for f in COMPOSITE.values()])
            (grad,) = torch.autograd.grad((values * values).sum(), y)
        return torch.cat([values.detach(), grad.flatten()])

    torch.testing.assert_close(printed(function, x), function(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("exact", [False, True])
def test_functions_agree_to_the_last_bits(exact):
    """The C library's vectorised functions have errors of up to 4 units in the last place; a small
    power has one rounding for each factor.
    """
    x = torch.cat([numbers(1000), 20 * numbers(900, seed=1), torch.tensor(SPECIAL)])
    found, wanted = (
        f.unflatten(0, (len(TRANSCENDENTAL), -1))
        for f in (
            printed(all_of(TRANSCENDENTAL), x, exact=exact),
            all_of(TRANSCENDENTAL)(x),
        )
    )
    for name, a, b in zip(TRANSCENDENTAL, found, wanted, strict=True):
        torch.testing.assert_close(
            a, b, rtol=7 * 2.3e-16, atol=5e-324, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("function", [torch.exp, torch.tanh], ids=["exp", "tanh"])
def test_functions_of_float32_agree_to_the_last_bits(function, exact):
    parts = [numbers(1000), 20 * numbers(900, seed=1), torch.tensor(SPECIAL)]
    x = torch.cat(parts).to(torch.float32)
    found, wanted = printed(function, x, exact=exact), function(x)
    # Torch's float32 underflows to zero where the printed exp gives subnormal numbers.
    torch.testing.assert_close(found, wanted, rtol=4 * 1.2e-7, atol=1.2e-38, equal_nan=True)


@pytest.mark.parametrize(("kind", "bits", "error"), [("double", 53, 5e-17), ("float", 24, 3e-8)])
def test_polynomials_of_tanh(kind, bits, error):
    """exp(2 r) - 1 by rational numbers, of which 40 terms of the series are exact enough."""
    q = [Fraction(float.fromhex(x)) for x in TANH[kind]]
    assert all(c.numerator.bit_length() <= bits for c in q)
    for i in range(-50, 51):
        r = Fraction(math.log(2) / 4) * i / 50
        found = 2 * r + r**2 * sum(c * r**k for k, c in enumerate(q))
        wanted = sum((2 * r) ** k / math.factorial(k) for k in range(1, 40))
        assert abs(found - wanted) <= Fraction(error) * abs(wanted)


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "tan", "pow"])
def test_functions_of_an_exact_run_have_the_same_bits_in_every_loop(name):
    """In rows filled up to whole vectors, and in rows of seven, which are scalars. The vectorised
    exp, log, tan and pow of other runs differ in 32, 32, 207 and 14 of these numbers.
    """
    x, function = 20 * numbers(60, 9).abs(), TRANSCENDENTAL[name]
    rows, cut = (printed(f, x, exact=True) for f in (function, lambda x: function(x[:, 2:])))
    assert torch.equal(cut, rows[:, 2:])


def test_exp_of_an_exact_run_is_good_to_a_unit_in_the_last_place():
    x = torch.cat([torch.linspace(-745, 709.7, 20_011), 0.4 * numbers(20_000)])
    found = printed(torch.exp, x, exact=True).numpy()
    wanted = np.exp(x.numpy().astype(np.longdouble))
    assert (np.abs(found - wanted) <= np.spacing(wanted.astype(np.float64))).all()


def test_log_of_an_exact_run_is_good_to_a_unit_in_the_last_place():
    """Near 1, where the logarithm is small, over all magnitudes, and for subnormal numbers."""
    exponents = torch.linspace(-1074, 1023.9, 20_011)
    x = torch.cat([exponents.exp2(), 1 + 0.01 * numbers(20_000), 1 + 1e-12 * numbers(1000)])
    found = printed(torch.log, x, exact=True).numpy()
    wanted = np.log(x.numpy().astype(np.longdouble))
    assert (np.abs(found - wanted) <= np.spacing(np.abs(wanted).astype(np.float64))).all()


def units(found: Tensor, wanted: np.ndarray) -> np.ndarray:
    """Return errors in units in the last place of numbers of higher precision."""
    return np.abs(found.numpy() - wanted) / np.spacing(np.abs(wanted).astype(np.float64))


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sines_of_an_exact_run_are_good_to_a_unit_in_the_last_place(name):
    """Near multiples of pi/2, where one of the two is small, and up to the largest angles."""
    quarters = (torch.arange(-20_000, 20_000).double() * (math.pi / 2)).numpy()
    near = [torch.from_numpy(np.nextafter(quarters, way)) for way in (-np.inf, np.inf)]
    large = numbers(20_000) * (2.0 ** torch.linspace(-60, 48, 20_000))
    x = torch.cat([torch.linspace(-9, 9, 20_011), torch.from_numpy(quarters), *near, large])
    function = getattr(torch, name)
    found = printed(function, x, exact=True)
    wanted = getattr(np, name)(x.numpy().astype(np.longdouble))
    assert (units(found, wanted) <= 1).all()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**50, 2.0**51])
    found = printed(function, special, exact=True)
    torch.testing.assert_close(found[:6], function(special)[:6], rtol=3e-16, atol=0, equal_nan=True)
    assert found[6].isnan()
    assert torch.equal(found[:2].signbit(), function(special)[:2].signbit())


def test_atan2_of_an_exact_run_is_good_to_three_units_in_the_last_place():
    """For all directions, all magnitudes, and all pairs of zeros, infinities and extremes."""
    turn = torch.linspace(-4, 4, 40_011)
    size = 2.0 ** torch.linspace(-1000, 1000, 40_011)
    slope = 2.0 ** torch.linspace(-40, 40, 40_011)
    y, x = torch.cat([turn.sin() * size, slope]), torch.cat([turn.cos() * size, -1 / slope])
    found = printed(torch.atan2, y, x, exact=True)
    wanted = np.arctan2(*(a.numpy().astype(np.longdouble) for a in (y, x)))
    assert (units(found, wanted) <= 3).all()
    special = torch.tensor([*SPECIAL, 1.7e308, -1.7e308, 1e-310, 5e-324, -5e-324])
    y, x = (a.flatten() for a in torch.meshgrid(special, special, indexing="ij"))
    found, wanted = printed(torch.atan2, y, x, exact=True), torch.atan2(y, x)
    torch.testing.assert_close(found, wanted, rtol=6.7e-16, atol=5e-324, equal_nan=True)
    assert torch.equal(found.signbit()[~wanted.isnan()], wanted.signbit()[~wanted.isnan()])


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erfc"])
def test_functions_of_vectors_have_the_bits_of_those_of_numbers(name):
    """Kernels of pairs inline them, in place of calls of the C library."""
    source = [
        scalar_functions(True), declarations(torch.float64), "#define WIDTH 4\n#define DIM 3",
        *on_vectors("", torch.float64),
        'extern "C" void values(const double* x, double* y, int64_t n) {',
        "for (int64_t i = 0; i < n; i += W) {",
        "V a; memcpy(&a, x + i, sizeof a);",
        f"a = math::{name}(a); memcpy(y + i, &a, sizeof a);",
        "} }",
    ]  # fmt: skip
    special = torch.tensor([*SPECIAL, 1e-310, 5e-324, 27.0, -27.0])
    x = torch.cat([special, numbers(1000), 20 * numbers(1000, seed=1)])
    y = torch.empty_like(x)
    library = compiled("\n".join(source), threads=False)
    library.values(*(ctypes.c_void_p(a.data_ptr()) for a in (x, y)), ctypes.c_int64(len(x)))
    wanted = printed(getattr(torch, name), x, exact=True)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        y, getattr(torch, name)(x), rtol=7 * 2.3e-16, atol=5e-324, equal_nan=True
    )


def test_threads_do_not_change_a_bit():
    """Rows are summed by one thread each, whichever it is."""
    x, before = numbers(400), torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            results.append(printed(lambda x: ((x[:, None] - x) ** 2 + 1).reciprocal().sum(1), x))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*results)


def rounded(d: Tensor, q: Tensor) -> Tensor:
    """Round to multiples of 2^-20, in float64."""
    shift = (q[0] * 0 + 1.5) * 2.0**32
    return ((d**3 / (d * d + 1) + shift) - shift).sum(1)


# Sums over pairs i, j of points: the term of i is plus or minus that of j, or differs in a factor.
PAIR_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "even": lambda d, q: ((d * d + 1).rsqrt() * (q[:, None] * q)).sum(1),
    "odd": lambda d, q: (torch.where(d.abs() < 2, d, 0.0) / (d**2 + 1) * 0.5).sum(-1),
    "over rows": lambda d, q: (-(d**3) * torch.exp(-d * d)).sum(0, keepdim=True)[0],
    "with a factor": lambda d, q: (torch.exp(-d * d - d.abs()) / (d * d + 1) * q).sum(1),
    "in stages": lambda d, q: torch.where(
        d.abs() < 2, torch.exp(-(torch.exp(-d * d) + 1).rsqrt()) * q, d.abs().sqrt()
    ).sum(1),
    "of sigmoids": lambda d, q: torch.ops.aten.sigmoid_backward(d, d / (d * d + 1)).sum(1),
    "rounded": rounded,
}
# These are not halved: the terms of i and j have little in common.
OTHER_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of a power": lambda d, q: (d.abs() + 1).pow(q).sum(1),
    "of a sine": lambda d, q: (d.sin() + d.cos()).sum(1),
}


@pytest.mark.parametrize(
    ("atoms", "dtype", "exact"), [(37, torch.float64, True), (371, torch.float32, False)], ids=str
)
def test_sums_over_pairs_compute_each_pair_once(atoms, dtype, exact, monkeypatch):
    """For numbers of points that fill no vector, of which the larger one is shared by parts."""
    x, q = numbers(atoms, dtype=dtype), numbers(atoms, dtype=dtype, seed=1)
    nests: list[tuple[HalfNest, list[str]]] = []
    lines = HalfNest.lines
    monkeypatch.setattr(
        HalfNest, "lines", lambda nest, *n: [nests.append((nest, lines(nest))), lines(nest, *n)][1]
    )

    def function(x: Tensor, q: Tensor) -> Tensor:
        d = x[:, None] - x
        return torch.stack([f(d, q) for f in (PAIR_SUMS | OTHER_SUMS).values()])

    found, wanted = printed(function, x, q, exact=exact), function(x, q)
    halved = {id(task.buffer) for nest, _ in nests for task in nest.tasks}
    assert len(halved) == len(PAIR_SUMS)
    # An exponential, a root, and an exponential of them end stages of a loop.
    assert any(sum("at = step - block" in x for x in printed) > 3 for _, printed in nests)
    # Sums of terms of up to about 10.
    allowed = 10 * atoms * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=allowed, atol=allowed)
    if dtype == torch.float64:
        # Sums of multiples of a power of two have no rounding error.
        at = list(PAIR_SUMS).index("rounded")
        assert torch.equal(found[at], wanted[at])


def test_sums_over_pairs_wait_for_each_other(monkeypatch):
    """One loop has the sums that are known from the start, and those that need other numbers."""
    x, q = (numbers(40, dtype=torch.float64, seed=seed) for seed in (0, 1))
    nests: list[HalfNest] = []
    lines = HalfNest.lines
    monkeypatch.setattr(
        HalfNest, "lines", lambda nest, *n: [nests.append(nest), lines(nest, *n)][1]
    )

    def function(x: Tensor, q: Tensor) -> Tensor:
        d = x[:, None] - x
        early = torch.cat([PAIR_SUMS["even"](d, q), PAIR_SUMS["odd"](d, q)])
        # A sum over rows with little in common, whose values another sum over pairs reads.
        inner = OTHER_SUMS["of a sine"](d, q)
        return torch.cat([early, PAIR_SUMS["even"](d, inner)])

    found, wanted = printed(function, x, q), function(x, q)
    assert [len(nest.tasks) for nest in nests] == [3]
    # Sums of terms of up to about 100.
    allowed = 100 * 40 * torch.finfo(torch.float64).eps
    torch.testing.assert_close(found, wanted, rtol=allowed, atol=allowed)


# Sums of rows, of pairs, of columns and along few rows, of which threads have parts.
SHARED_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of rows": lambda d, q: sum((d.abs() + k).pow(q) * d for k in range(1, 8)).sum(1),
    "of pairs": lambda d, q: sum((d**2 + k).rsqrt() * torch.exp(-d.abs()) for k in range(1, 9)).sum(
        1
    ),
    "of columns": lambda d, q: sum((d.abs() + k).pow(q) * d for k in range(1, 8)).sum(0),
    "of columns and rows": lambda d, q: (
        (terms := sum((d.abs() + k).pow(q) * d for k in range(1, 8))).sum(0) + terms.sum(1)
    ),
    "of no axis": lambda d, q: chain(materialise_contiguous(d).reshape(-1)[:41999]),
    "along few rows": lambda d, q: chain(materialise_contiguous(d).reshape(5, -1)[:, :8399]),
    "of few terms": lambda d, q: chain(materialise_contiguous(d).reshape(5, -1)[:, :8399]).sum(0),
    "of a middle axis": lambda d, q: chain(materialise_contiguous(d)[:140].reshape(7, 20, 205)).sum(
        1
    ),
    "of short vectors": lambda d, q: chain(
        materialise_contiguous(d).reshape(-1)[:42000].reshape(7, -1, 6)
    ),
}


def chain(x: Tensor) -> Tensor:
    """Return a number of many operations for each element."""
    return sum((x.abs() + k).pow(0.3) * torch.sin(x + k) for k in range(1, 9))


@pytest.mark.parametrize("name", SHARED_SUMS)
@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
def test_threads_have_the_sums_of_one(name, exact, monkeypatch):
    """To the last bit, for numbers of points that fill no vector."""
    x, q = numbers(205, dtype=torch.float64), numbers(205, dtype=torch.float64, seed=1)
    shared: list[bool] = []
    lines = {kind: kind.lines for kind in (Nest, HalfNest)}

    def seen(nest: Nest, threads: int, kind: type[Nest]) -> list[str]:
        shared.append(nest.shared(threads))
        return lines[kind](nest, threads)

    for kind in lines:
        monkeypatch.setattr(kind, "lines", partialmethod(seen, kind=kind))

    def function(x: Tensor, q: Tensor) -> Tensor:
        return SHARED_SUMS[name](x[:, None] - x, q)

    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(printed(function, x, q, exact=exact))
            assert any(shared) == (threads > 1)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], x) for x in found[1:])
    torch.testing.assert_close(found[0], function(x, q), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("atoms", [33, 40, 205])
@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
def test_long_chains_of_rows_have_the_same_bits_in_stages(atoms, exact, monkeypatch):
    """A matrix that is stored too, for the sums of its columns, and rows that fill no vector."""
    x, q = numbers(atoms, dtype=torch.float64), numbers(atoms, dtype=torch.float64, seed=1)

    def function(x: Tensor, q: Tensor) -> Tensor:
        d = x[:, None] - x
        terms = [torch.log(k + torch.exp(-d * q) / (1 + d * d)).sqrt() for k in range(1, 9)]
        matrix = sum(t * d + q for t in terms)
        rows = torch.where(x > 0, matrix.sum(1), 0.0)
        return rows + (materialise_contiguous(terms[0] * q) * x[:, None]).sum(0)

    printed_lines: list[str] = []
    lines = Nest.lines
    monkeypatch.setattr(
        Nest, "lines", lambda nest, *n: [printed_lines.extend(lines(nest)), lines(nest, *n)][1]
    )
    found = printed(function, x, q, exact=exact)
    assert sum("at = step - block" in x for x in printed_lines) > 2
    printed_lines.clear()
    monkeypatch.setattr(nests, "LONG_CHAIN", sys.maxsize)
    assert torch.equal(found, printed(function, x, q, exact=exact))
    assert not any("at = step - block" in x for x in printed_lines)
    torch.testing.assert_close(found, function(x, q), rtol=1e-12, atol=1e-12)


TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"power {n}": lambda d, n=n: (d + 4) ** n + d ** abs(n) for n in (-3, -2, -1, 2, 3, 4, 5)},
    "shifted": lambda d: (d + 1.0) * (1.0 - d) / 2.5 - 3 * d,
    "reciprocals": lambda d: (d + 5).reciprocal() + 2 / (d * d + 1),
    "functions": lambda d: d.tanh() + d.sin() * d.cos() + d.exp() + torch.erf(d) + d.sigmoid(),
    "parts": lambda d: d.clamp(-0.3, 0.5) + d.floor() + torch.remainder(d, 0.7) + d.relu(),
    "conditions": lambda d: torch.where(d > 0, d, 0.0) + torch.where(d.abs() > 0.3, d, 2 * d),
    "masks": lambda d: (d > 0).to(d) * d + (d != 0).to(d) + d.sign(),
    "nested": lambda d: -(((2 * d + d * d) * -d) ** 3),
}


@pytest.mark.parametrize("other", [lambda d: d, lambda d: d**3 / (d * d + 1), torch.ones_like])
def test_sums_over_pairs_of_any_terms(other):
    """A term whose sign is lost in the other order is wrong by as much as itself."""
    x, q = numbers(40), numbers(40, seed=1)

    def function(x: Tensor, q: Tensor) -> Tensor:
        d = x[:, None] - x
        return torch.stack([(f(d) * other(d) * q[:, None] * q).sum(1) for f in TERMS.values()])

    found, wanted = printed(function, x, q), function(x, q)
    # Sums of forty terms, in another order.
    allowed = 40 * torch.finfo(x.dtype).eps * wanted.abs().amax(1, keepdim=True)
    assert ((found - wanted).abs() <= 10 * allowed).all()


# Rows, inner length and columns of products: below, at and above the lengths of vectors and tiles.
SIZES = [(1, 1, 1), (4, 3, 5), (7, 5, 33), (13, 9, 16), (2, 40, 64), (25, 6, 130)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_matrix_products_of_any_shape_and_layout(dtype):
    """Plain, transposed and sliced factors, and products of products."""
    pairs = [(numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype, seed=1)) for m, k, n in SIZES]

    def function(*x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for a, b in zip(x[::2], x[1::2], strict=True):
            found += [a @ b, b.T @ a.T, (2 * a)[:, :1] @ b[:1], a @ b @ b.T]
            found.append(torch.tanh(torch.nn.functional.linear(a, b.T, b[0])))
        return torch.cat([value.flatten() for value in found])

    inputs = [x for pair in pairs for x in pair]
    # Sums of up to 130 terms of up to about 100, in another order, and with fused multiply-adds.
    allowed = 13_000 * torch.finfo(dtype).eps
    torch.testing.assert_close(printed(function, *inputs), function(*inputs), rtol=0, atol=allowed)


def test_activations_are_printed_with_their_derivatives():
    x = numbers(40)
    functions = [
        torch.tanh, torch.relu, torch.sigmoid, torch.nn.functional.silu,
        torch.nn.functional.softplus, torch.nn.functional.gelu, torch.nn.functional.elu,
    ]  # fmt: skip

    def slopes(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = torch.cat([function(leaf) for function in functions])
            return torch.cat([value, torch.autograd.grad(value.sum(), leaf)[0]])

    # Vectorised functions are off by up to four units in the last place, a few of them per value.
    torch.testing.assert_close(printed(slopes, x), slopes(x).detach(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("width", [1, 6, 70])
def test_rows_hold_the_carry_before_each_iteration(width):
    """One number in a row, rows that are filled up, and long ones; the capacity is not used up."""
    x = numbers(3, width)
    loop, path, _ = compile_loop(
        LoopSpec(
            start=lambda given, carry: (torch.zeros_like(given.steps), carry),
            more=lambda k, count: k < count,
            body=lambda given, k, carry: (k + 1, (carry[0] + 1, 2 * carry[1]), (carry[1],)),
        ),
        nullcontext,
        Constants(torch.tensor(4), ()),
        (torch.zeros(2), x),
        exact=False,
        short=False,
        what="a test",
        capacity=5,
    )
    assert path == "C++"
    (_, last), (rows,) = loop(Constants(torch.tensor(4), ()), (torch.zeros(2), x))
    assert rows.shape == (5, 3, width)
    assert torch.equal(rows[:4], torch.stack([x, 2 * x, 4 * x, 8 * x]))
    assert torch.equal(last, 16 * x)


JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "of two lengths": lambda x: (
        torch.cat([x * 2, x[:, :1] * 4], 1) * torch.stack([x[:, 0] * 2, x[:, 1]]).sum(0)[:, None]
    ),
    "patched at the end": lambda x: (
        x.slice_scatter(x[:, 9:] * 3, 1, 9) + x.select_scatter(x[:, 0] * 2, 1, -1)
    ),
    "of other types": lambda x: (
        (3 * torch.arange(12) - (x > 0).to(torch.int64) * 2) * x.unsqueeze(1)
    ),
    "of sums of conditions": lambda x: (
        x[:, :1] + (x[:, :, None] > x[:, None]).sum((1, 2), keepdim=True)[0]
    ),
    "chosen twice": lambda x: x.index_select(0, torch.tensor([1]))[:, torch.tensor([3, -2])],
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_rows_that_are_filled_up_end_where_they_should(name):
    """The end of a row that is filled up is not written over what comes after it."""
    x = numbers(3, 12)
    assert torch.equal(printed(JOINED[name], x), JOINED[name](x))


def run_of(
    function: Callable[[Tensor], Tensor], x: Tensor, steps: int = 1
) -> tuple[Callable[[], Tensor], str]:
    """Compile a function that torch may refuse to evaluate at these numbers."""
    constants, carry = Constants(torch.tensor(steps), (x,)), (torch.zeros_like(x),)
    loop, path, _ = compile_loop(
        spec(function), nullcontext, constants, carry, exact=False, short=False, what="a test"
    )
    return lambda: loop(constants, carry)[0][0], path


def test_filled_ends_of_rows_are_no_addresses():
    x, table = numbers(13).abs() + 1, numbers(50)

    def function(x: Tensor) -> Tensor:
        return table[((x + 1e-12).reciprocal() * 40).to(torch.int64)] * x

    assert torch.equal(printed(function, x), function(x))


TABLE = numbers(50)
OUT_OF_RANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "many": lambda x: TABLE[(x * 1e9).to(torch.int64)],
    "one": lambda x: x + TABLE.index_select(0, (x[:1] + 100).to(torch.int64)),
    "one from the end": lambda x: x + TABLE.index_select(0, (-1 - 0 * x[:1]).to(torch.int64)),
    "beyond the beginning": lambda x: x + TABLE[(-51 - 0 * x).to(torch.int64)],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused(name):
    run, path = run_of(OUT_OF_RANGE[name], numbers(13).abs() + 1)
    assert path == "C++"
    with pytest.raises(IndexError, match="out of range"):
        run()


def costly(x: Tensor) -> Tensor:
    """A value that is stored where it is read more than once."""
    return (x * x + 1) * x + x


def elementwise(x: Tensor) -> Tensor:
    y = costly(x)
    z = costly(y - y * x)
    return z * y - z


def several(x: Tensor) -> Tensor:
    """A value that a sum reads, and that two later values read element by element."""
    y = costly(x)
    z = costly(y * x)
    joined = torch.cat([z, y * z])
    return joined * y.sum() + joined


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one loop": elementwise,
    "a transposed value": lambda x: (lambda y: costly(y.T * y) * y)(
        costly(x.reshape(10, 10))
    ).reshape(100),
    "other places": lambda x: costly(x)[1:] * costly(x)[:-1] + elementwise(x)[:1],
    "a reshaped value": lambda x: elementwise(x).reshape(4, 25)[1] * elementwise(x)[:25],
    "by index": lambda x: (lambda y: y[torch.arange(99, -1, -1)] * y)(elementwise(x)),
    "a concatenation": lambda x: (lambda y: torch.cat([y, y * y]))(elementwise(x)),
}


@pytest.mark.parametrize("name", READERS)
def test_values_that_one_loop_reads(name):
    x = numbers(100)
    assert torch.equal(printed(READERS[name], x), READERS[name](x))


def test_values_that_one_loop_reads_are_not_stored(monkeypatch):
    sources: list[str] = []

    def compiled(source: str, threads: bool) -> object:
        sources.append(source)
        return library.compiled(source, threads)

    monkeypatch.setattr("adjsim.compiler.to_cpp.compiled", compiled)
    for function in (elementwise, several, lambda x: elementwise(x).sum() * x):
        printed(function, numbers(100))
    counts = [source.count("__restrict b") for source in sources]
    # A loop that sums keeps both of the values that it reads.
    assert counts == [0, 2, 2]
    # One loop computes what the sum, the concatenation and the product read.
    body = sources[1].partition("int64_t body(")[2].partition("\nstatic")[0]
    assert body.count("#pragma omp simd") == 3


def test_a_value_that_several_loops_read():
    x = numbers(100)
    # The order of the sum is not that of torch.
    torch.testing.assert_close(printed(several, x), several(x), rtol=1e-14, atol=0)


# Of 13 rows, which are padded: from the beginning, from the end, and columns of different ranges.
PLACES = torch.tensor([[k % 5, -1 - k % 7, k + 30] for k in range(13)])


def test_parts_of_constants_have_ranges_of_their_own():
    x, places = numbers(50), PLACES.T.contiguous()

    def function(x: Tensor, places: Tensor, own: Tensor) -> Tensor:
        return x[:5][places[0]] * x[places[1]] * x[43:][places[1]] + x[places[2]] * x[own]

    own = torch.arange(13)
    assert torch.equal(printed(function, x, places, own), function(x, places, own))


@pytest.mark.parametrize("wrong", [50, -51])
def test_constant_indices_out_of_range_are_refused(wrong):
    places = torch.arange(13)
    places[7] = wrong
    constants = Constants(torch.tensor(2), (numbers(50), torch.arange(13)))
    loop, path, _ = compile_loop(
        spec(lambda x, places: x[places]),
        nullcontext,
        constants,
        (torch.zeros(13, dtype=torch.float64),),
        exact=False,
        short=False,
        what="a test",
    )
    assert path == "C++"
    with pytest.raises(IndexError, match="out of range"):
        loop(constants._replace(inputs=(numbers(50), places)), (numbers(13),))


@pytest.mark.parametrize("mode", ["floor", "trunc", "rest"])
def test_division_of_whole_numbers_by_zero_is_refused(mode):
    def divide(x: Tensor) -> Tensor:
        zero = (0 * x).to(torch.int64)
        found = (
            torch.remainder(zero + 3, zero)
            if mode == "rest"
            else torch.div(zero + 3, zero, rounding_mode=mode)
        )
        return found.to(x.dtype)

    run, path = run_of(divide, numbers(13))
    assert path == "C++"
    with pytest.raises(ZeroDivisionError):
        run()


def test_conversion_to_integers_and_back():
    """Compilers take it for a truncation, which keeps NaN, infinities and the sign of zero."""
    x = torch.tensor([-0.3, 0.3, -1.7, math.nan, math.inf, -math.inf, 1e30, 2.5, -0.0, -2.5])

    def function(x: Tensor) -> Tensor:
        return x.to(torch.int64).to(x.dtype)

    for dtype in (torch.float64, torch.float32):
        found, expected = printed(function, x.to(dtype)), function(x.to(dtype))
        assert torch.equal(found, expected)
        assert torch.equal(found.signbit(), expected.signbit())


def test_whole_numbers_wrap_around():
    i = torch.tensor([1, -1, 0, 2**62, -(2**63)])

    def function(i: Tensor) -> Tensor:
        above = ((i + 2**62) * 2 > 0).to(torch.int64)
        return above + (i - 2**62) * 3 + torch.div(i, -1 + 0 * i, rounding_mode="floor")

    assert torch.equal(printed(function, i), function(i))


def test_special_numbers_have_the_bits_of_torch():
    x = torch.tensor([0.0, -0.0, 1.0, torch.nan, -torch.inf] * 4, dtype=torch.float64)
    y = torch.tensor([-0.0, 0.0, torch.nan, 2.0] * 5, dtype=torch.float64)

    def function(x: Tensor, y: Tensor) -> Tensor:
        extremes = [
            torch.maximum(x, y),
            torch.minimum(x, y),
            x.clamp(max=y),
            x.clamp(torch.nan),
            x.sign(),
        ]
        return torch.stack(
            [*extremes, 1 / x.relu(), 1 / x.clamp(0, 1), 1 / torch.full_like(x, -0.0).neg()]
        )

    torch.testing.assert_close(
        printed(function, x, y), function(x, y), rtol=0, atol=0, equal_nan=True
    )


def test_memory_of_rows_is_lent_once():
    """To the next run only when no part of it is in use."""
    shapes = [((3, 5), torch.float64), ((3, 2, 2), torch.float32)]
    first, second = new_rows(shapes), new_rows(shapes)
    assert [x.shape for x in first] == [(3, 5), (3, 2, 2)]
    places = {x.data_ptr() for x in (*first, *second)}
    assert len(places) == 4
    assert all(place % 64 == 0 for place in places)
    assert first[0].untyped_storage().data_ptr() != first[1].untyped_storage().data_ptr()
    kept, address = first[1][2], first[0].data_ptr()
    del first
    third = new_rows(shapes)
    assert third[0].data_ptr() not in places
    del kept
    assert new_rows(shapes)[0].data_ptr() == address


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (4, 1)])
def test_transposes_share_no_memory_with_their_matrix(shape):
    """The transpose of one row is contiguous, and torch's loops refuse inputs that share memory."""
    x = torch.randn(shape)
    y = transposed(x)
    assert torch.equal(y, x.T)
    assert y.is_contiguous()
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("size", "exact"),
    [
        pytest.param(75, True),
        *(pytest.param(n, False, marks=pytest.mark.slow) for n in (5, 20, 72, 75)),
    ],
)
def test_matrices_are_filled_and_summed_in_one_loop(size, exact):
    """Rows and columns, of lengths that are and are not multiples of a vector."""
    x = numbers(size)

    def sums(x: Tensor) -> Tensor:
        d = x.unsqueeze(-1) - x
        first, second = (materialise_contiguous(f(d) + x) for f in (torch.exp, torch.sin))
        return torch.cat([(first * d).sum(-1), first.sum(-1), (second * first).sum(-2)])

    torch.testing.assert_close(printed(sums, x, exact=exact), sums(x), rtol=1e-13, atol=1e-13)


def test_repeated_operations_are_one():
    def repeats(x: Tensor) -> list[Tensor]:
        return [(x.sin() * 1).sum() + (x.sin() * 1.0).sum() + x.clone().mul_(2) + x.clone()]

    graph = graph_of(repeats, numbers(3))
    before = graph(numbers(3))[0]
    merge_repetitions(graph)
    assert torch.equal(graph(numbers(3))[0], before)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count("aten.sin.default") == 1
    # 1 and 1.0 are two numbers, and a copy that is overwritten is of its own.
    assert names.count("aten.mul.Tensor") == names.count("aten.clone.default") == 2
