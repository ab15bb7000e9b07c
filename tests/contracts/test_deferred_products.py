"""Products that iterations add to the carry wait for each other, and are added as one."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import adjsim
from adjsim.compiler import LoopSpec, compile_loop
from tests.problems import slow_but


class Constants(NamedTuple):
    steps: Tensor
    inputs: tuple[Tensor, ...]


class Carry(NamedTuple):
    sums: tuple[Tensor, ...]
    other: Tensor


Step = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def run(step: Step, sums, inputs, steps, exact=False):
    """The sums after some numbers of steps, compiled and not, and the source of the loop."""
    constants = Constants(torch.tensor(0), tuple(inputs))
    carry = Carry(tuple(sums), torch.ones(3, dtype=inputs[0].dtype))

    def body(given, k, carry):
        x = carry.other * 0.9
        scale = 1 + 0.1 * x[0] + k.to(x)
        after = step(scale, given.inputs, carry.sums)
        return k + 1, Carry(tuple(y.clone() for y in after), x), ()

    spec = LoopSpec(
        start=lambda given, carry: (torch.zeros_like(given.steps), carry),
        more=lambda k, count: k < count,
        body=body,
    )
    settings = {"exact": exact, "short": False, "what": "a test"}
    loop = compile_loop(spec, nullcontext, constants, carry, **settings)
    found, expected, after = [], [], carry
    for k in range(max(steps) + 1):
        if k in steps:
            given = constants._replace(steps=torch.tensor(k))
            found.append(loop.function(given, carry)[0].sums)
            expected.append(after.sums)
        _, after, _ = body(constants, torch.tensor(k), after)
    return found, expected, loop.source.read_text()


def check(step, sums, inputs, steps=(0, 1, 13), waits=1, **settings):
    found, expected, source = run(step, sums, inputs, steps, **settings)
    assert source.count("int64_t waiting") == waits
    for k, pair in zip(sorted(steps), zip(found, expected, strict=True), strict=True):
        for x, y in zip(*pair, strict=True):
            # The terms of a sum are added in another order.
            rounding = 8 * torch.finfo(x.dtype).eps * max(1.0, float(y.abs().max()))
            torch.testing.assert_close(x, y, rtol=0, atol=rounding * max(1, k) ** 0.5)


def numbers(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def one(scale, x, sums):
    a, *others = x
    return [c + (a[:, : len(c)] * scale).T @ b for c, b in zip(sums, others, strict=True)]


def three(scale, x, sums):
    """Three products of each sum, of which one has a factor that is no value of its own."""

    def terms(c, b):
        a = x[0][:, : len(c)]
        return ((a * scale).T @ b + a.T @ (b * scale)) + a.sin().T @ b

    return [c + terms(c, b) for c, b in zip(sums, x[1:], strict=True)]


def turned(scale, x, sums):
    a, *others = x
    return [(b.T @ (a[:, : len(c)] * scale)).T + c for c, b in zip(sums, others, strict=True)]


def reshaped(scale, x, sums):
    rows = sums[0].shape[0] * sums[0].shape[1]
    product = (x[0][:, :rows] * scale).T @ x[1]
    return [sums[0] + product.view(sums[0].shape)]


def copies(scale, x, sums):
    """Gradients of the weights of layers, for rows of cotangents, as vmap has them."""
    rows = (x[0] * scale).sin()
    return [c + gradient(rows, b, c.shape) for c, b in zip(sums, x[1:], strict=True)]


def turned_copies(scale, x, sums):
    rows = (x[0] * scale).sin()
    pairs = zip(sums, x[1:], strict=True)
    return [c + gradient(rows, b, c.mT.shape).mT.contiguous() for c, b in pairs]


def gradient(rows, b, shape):
    product = rows[..., : shape[1]].mT.reshape(-1, rows.shape[1]) @ b
    return product.view(shape)


@pytest.mark.parametrize(
    ("step", "dtype", "inner"),
    slow_but(
        lambda step, dtype, inner: inner == {one: 1, three: 3, turned: 16}[step],
        product((one, three, turned), (torch.float64, torch.float32), (1, 3, 16, 70)),
    ),
)
def test_sums_are_those_of_each_iteration(step, dtype, inner):
    shapes = [(8, 8), (9, 13), (65, 63), (100, 8), (8, 130)]
    inputs = [numbers(inner, n, dtype=dtype, seed=n) for n in (100, *(n for _, n in shapes))]
    sums = [numbers(*shape, dtype=dtype) for shape in shapes]
    # Products wait for up to 64 iterations.
    check(step, sums, inputs, (0, 1, 2, 20, 21, 22, 64, 65, 130), waits=len(shapes))


@pytest.mark.parametrize("inner", slow_but(lambda n: n in (1, 5), [1, 2, 5, 16]))
@pytest.mark.parametrize("count", slow_but(lambda n: n == 7, [1, 2, 7]))
@pytest.mark.parametrize("step", [copies, turned_copies])
def test_rows_of_cotangents_have_a_sum_each(step, count, inner):
    shapes = [(8, 8), (13, 9), (110, 64)]
    if step is turned_copies:
        shapes = [shape[::-1] for shape in shapes]
    others = [n for shape in shapes for n in shape[slice(1, 2) if step is copies else slice(1)]]
    inputs = [numbers(count, inner, 111), *(numbers(inner, n, seed=n) for n in others)]
    sums = [numbers(count, *shape) for shape in shapes]
    check(step, sums, inputs, (0, 1, 13, 70), waits=len(shapes))


@pytest.mark.parametrize("exact", [False, True])
def test_views_of_products_wait_too(exact):
    inputs = [numbers(3, 12), numbers(3, 10)]
    check(reshaped, [numbers(3, 4, 10)], inputs, exact=exact)


def test_several_sums_of_the_same_factors():
    def step(scale, x, sums):
        a, b = x[0] * scale, x[1]
        return [sums[0] + a.T @ b, sums[1] + a.T @ a, sums[2] + b.sum(0)]

    inputs = [numbers(4, 12), numbers(4, 9)]
    check(step, [numbers(12, 9), numbers(12, 12), numbers(9)], inputs, waits=2)


OTHERS = {
    "read": lambda s, x, c: [c[0] + (x[0] * s).T @ x[1] * c[0].mean()],
    "read beside": lambda s, x, c: [c[0] + (x[0] * s).T @ x[1], c[1] + c[0].sum(1)],
    "decayed": lambda s, x, c: [0.5 * c[0] + (x[0] * s).T @ x[1]],
    "twice": lambda s, x, c: [c[0] + c[0] + (x[0] * s).T @ x[1]],
    "subtracted": lambda s, x, c: [c[0] - (x[0] * s).T @ x[1]],
    "scaled": lambda s, x, c: [torch.add(c[0], (x[0] * s).T @ x[1], alpha=2)],
    "and a number": lambda s, x, c: [c[0] + (x[0] * s).T @ x[1] + s],
    "of other lengths": lambda s, x, c: [c[0] + x[0].T @ x[1] + x[0][:1].T @ x[1][:1]],
    "used twice": lambda s, x, c: (lambda y: [c[0] + y, c[1] + y.sum(1)])((x[0] * s).T @ x[1]),
    "in two sums": lambda s, x, c: (lambda y: [c[0] + y, c[1], c[2] + y])((x[0] * s).T @ x[1]),
    "returned twice": lambda s, x, c: (lambda y: [y, c[1], y])(c[0] + (x[0] * s).T @ x[1]),
    "few": lambda s, x, c: [c[0][:0], c[1] + (x[0] * s).T @ x[1][:, 0]],
    "turned": lambda s, x, c: [c[0][:0], c[1], c[2], c[3] + ((x[0] * s).T @ x[1]).T],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_sums_are_computed_in_each_iteration(kind):
    """Sums that are read, or have other terms, and products that are."""
    step = OTHERS[kind]
    inputs = [0.1 * numbers(5, 12), 0.1 * numbers(5, 9, seed=1)]
    sums = [numbers(12, 9), numbers(12), numbers(12, 9, seed=2), numbers(9, 12)]

    def whole(scale, x, given):
        found = step(scale, x, given)
        return [y if y.numel() else z for y, z in zip(found, given, strict=False)] + list(
            given[len(found) :]
        )

    check(whole, sums, inputs, waits=int(kind == "turned"))


def test_threads_that_share_products_have_the_sums_of_one():
    found, before = [], torch.get_num_threads()
    inputs = [numbers(4, 20, 191), numbers(20, 65)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            ((sums,), _, source) = run(copies, [numbers(4, 190, 65)], inputs, [40])
        finally:
            torch.set_num_threads(before)
        assert ("Team adding0" in source) == (threads > 1)
        found.append(sums[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("width", slow_but(lambda n: n == 9, [5, 8, 9, 15, 63]))
def test_stored_rows_do_not_write_into_each_other(width):
    """A value that is stored anyway, with padded rows, by a loop that goes back."""
    weight, steps = numbers(width, width) / width, 6
    carry = Carry((), numbers(width, seed=1))
    constants = Constants(torch.tensor(steps), (weight,))

    def body(given, k, carry):
        y = carry.other.sin()
        return k - 1, carry._replace(other=(y[None] @ given.inputs[0])[0]), (y,)

    spec = LoopSpec(
        start=lambda given, carry: (given.steps - 1, carry),
        more=lambda k, count: k >= 0,
        body=body,
    )
    settings = {"exact": False, "short": False, "what": "a test", "capacity": steps}
    loop = compile_loop(spec, nullcontext, constants, carry, **settings)
    _, (rows,) = loop.function(constants, carry)
    for k in reversed(range(steps)):
        _, carry, (row,) = body(constants, torch.tensor(k), carry)
        torch.testing.assert_close(rows[k], row, rtol=1e-13, atol=1e-15)


class Sines(torch.nn.Module):
    """A layer whose inputs are computed from the state alone, in padded rows."""

    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(0.3 * numbers(width, width))

    def forward(self, t, y):
        return torch.sin(y) @ self.weight


@pytest.mark.parametrize("width", slow_but(lambda n: n == 9, [8, 9, 13, 15, 63, 65]))
@pytest.mark.parametrize("batch", slow_but(lambda n: n == 0, [0, 1, 3]))
def test_padded_factors_do_not_write_into_each_other(width, batch):
    """A loop over padded rows writes the padding too."""
    ode = adjsim.ODE(Sines(width))
    y = numbers(batch, width, seed=1) if batch else numbers(width, seed=1)
    start = ode.init(y.requires_grad_())
    found = []
    for compiled in (False, True):
        run = adjsim.simulate(
            ode,
            start,
            [0.0, 0.7],
            solver=adjsim.RungeKutta("rk4", 0.01),
            adjoint=adjsim.CheckpointAdjoint(),
            compile=compiled,
        )
        found.append(torch.autograd.grad(run.final.y.sum(), list(ode.parameters()))[0])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
