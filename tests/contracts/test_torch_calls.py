"""Operations that torch evaluates inside a printed loop, forward and backward."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, RungeKutta
from tests.contracts.test_cpp import numbers, run_of
from tests.problems import parameter, slow_but

SQUARE, PLACES = numbers(4, 4, seed=5), torch.tensor([[0, 1, 1, 2]] * 3)


def assigned(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[:, 1:3] = y[:, 1:3]
    z[0] = y[1]
    z[z > 1] = 0.5
    return z


def filtered(y: Tensor) -> Tensor:
    """A spectrum goes through a printed number to a second transform."""
    found = torch.fft.rfft(y, dim=1)
    return torch.fft.irfft(found * (1 + y.square().sum()).rsqrt(), n=4, dim=1)


def seen_as_complex(y: Tensor) -> Tensor:
    """A view of memory of the loop, which is used again before the view is read."""
    z = torch.view_as_complex((2 * y).reshape(3, 2, 2))
    other = (3 * y).sin().reshape(3, 4)
    other = (other @ SQUARE).cos() + other.cummax(1).values
    return torch.view_as_real(z * z + other.sum()).reshape(3, 4)


OPERATIONS = {
    "index_put": lambda y: torch.zeros(3, 4).index_put(
        (torch.tensor([0, 1, 0]),), y, accumulate=True
    ),
    "assignment": assigned,
    "gather": lambda y: torch.gather(y, 1, PLACES),
    "scatter_add": lambda y: torch.zeros_like(y).scatter_add(1, PLACES, y),
    "index_add": lambda y: (
        torch.zeros_like(y).index_add(0, torch.tensor([0, 1, 1]), y)
        + y.index_add(1, torch.tensor([2, 2]), y[:, :2], alpha=0.5)
    ),
    "every second": lambda y: torch.cat([y[:, ::2], y[:, 1::2]], 1).sin(),
    "roll and flip": lambda y: torch.roll(y, 1, 1) * y.flip(1),
    "sort": lambda y: y.sort(1).values * torch.arange(4.0),
    "cumsum, cumprod": lambda y: y.cumsum(1) + y.cumprod(0),
    "cummax, median": lambda y: y.cummax(1).values + y.median(),
    "max, min": lambda y: y.max(1, keepdim=True).values * y + y.min(),
    "amax over two axes": lambda y: y.amax((0, 1)) * y,
    "products": lambda y: (
        torch.einsum("ij,jk->ik", y, SQUARE)
        + (y.reshape(3, 2, 2) @ y.reshape(3, 2, 2)).reshape(3, 4)
    ),
    "det, inv, solve": lambda y: (
        torch.linalg.det(y.reshape(3, 2, 2) + 3 * torch.eye(2))[:, None]
        * torch.linalg.inv(y.reshape(3, 2, 2) + 3 * torch.eye(2)).reshape(3, 4)
        + torch.linalg.solve(y.reshape(3, 2, 2) + 3 * torch.eye(2), torch.ones(3, 2))[:, :1]
    ),
    "cholesky, eigvalsh": lambda y: (
        y @ torch.linalg.cholesky(y.T @ y + torch.eye(4))
        + torch.linalg.eigvalsh(y.T @ y + torch.diag(torch.arange(4.0)))
    ),
    "softmax, logsumexp": lambda y: y.softmax(1) + y.logsumexp(1, keepdim=True),
    "norms of layers": lambda y: F.layer_norm(y, (4,)) + F.group_norm(y, 2),
    "var, std": lambda y: y.var(1)[:, None] * y + y.std(),
    "conv1d, pad": lambda y: F.conv1d(
        F.pad(y[:, None], (1, 1), mode="circular"), SQUARE[None, :1, :3]
    )[:, 0],
    "embedding": lambda y: F.embedding(torch.tensor([0, 1, 2]), SQUARE) * y,
    "fmod, whole numbers": lambda y: (
        torch.fmod(y, 0.3) + (torch.arange(4) >> 1) * y + ((y > 0).sum() % 3)
    ),
    "fft": filtered,
    "modulus of a spectrum": lambda y: torch.fft.fft(y).abs(),
    "complex": seen_as_complex,
    "special functions": lambda y: torch.lgamma(y.exp()) + torch.erfinv(y.tanh()),
    "a large product": lambda y: y @ torch.kron(torch.eye(2), SQUARE[:2, :2]),
    "bits seen as another type": lambda y: y.view(torch.int64).remainder(7).to(y.dtype) * y,
    "memory seen with other axes": lambda y: y.T.contiguous().as_strided((3, 4), (4, 1)) * y,
}


EMPTY = torch.zeros(0, dtype=torch.int64)
# What a critical reader found wrong or refused.
CORNERS = {
    "a complex spread": lambda y: y * (torch.fft.fft(y).std().real + torch.fft.fft(y).var().real),
    "one place": lambda y: y * y[torch.tensor([1])],
    "a number at two places": lambda y: y.index_put((torch.tensor([0, 2]),), y[0, 0]) * y,
    "places that are computed": lambda y: y[(y[0, :1].detach() * 0 + 1).long()] * y,
    "one place of a gather": lambda y: y.gather(1, torch.tensor([[2]])) * y,
    "one row more": lambda y: y.index_add(0, torch.tensor([2]), y[:1]),
    "no places": lambda y: y * 2 + y[EMPTY].sum() + y.index_add(0, EMPTY, y[:0]),
    "products over nothing": lambda y: (y[:, :0] @ y[:0]).sum() + y * y[0, 0],
    "numbers without axes": lambda y: (
        y * y[0, 0].logsumexp(0)
        + y.sum().gather(0, torch.tensor(0))
        + y[0].gather(0, torch.tensor(3))
        + y.index_add(1, torch.tensor(1), y[:, :1])
    ),
    "short whole numbers": lambda y: y[torch.tensor([1, 0, 2], dtype=torch.int32)] * y,
    "a constant of another type": lambda y: y * torch.arange(4, dtype=torch.float16),
    "a computed row": lambda y: y[y[:, 0].detach().argmax()] + y,
}
OPERATIONS |= CORNERS
# Rows that take the same way as others.
REPEATED = (
    *("index_put", "gather", "amax over two axes", "cholesky, eigvalsh", "softmax, logsumexp"),
    *("norms of layers", "var, std", "embedding", "special functions", "a large product"),
    *("one place of a gather", "one row more", "places that are computed", "products"),
)


class Field(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.weight, self.operation = nn.Parameter(numbers(4, seed=2)), operation

    def forward(self, t, y):
        return 0.1 * self.operation(y * self.weight)


def gradients(name, adjoint, compile):
    dynamics = adjsim.ODE(Field(OPERATIONS[name]))
    y = numbers(3, 4).requires_grad_()
    run = adjsim.simulate(
        dynamics, dynamics.init(y), [0.0, 0.1], solver=RungeKutta("midpoint", 0.05),
        adjoint=adjoint, compile=compile,
    )  # fmt: skip
    inputs = [y, *dynamics.parameters()]
    return [run.final.y.detach(), *torch.autograd.grad(run.final.y.square().sum(), inputs)], run


@pytest.mark.parametrize(
    "name",
    slow_but(
        lambda name: name in ("assignment", "fft", "one place"),
        OPERATIONS,
        marathon=lambda name: name in REPEATED,
    ),
)
def test_equal_to_torch(name):
    expected, _ = gradients(name, DirectAdjoint(), False)
    for adjoint in (DirectAdjoint(), CheckpointAdjoint()):
        found, run = gradients(name, adjoint, True)
        assert run.stats["compiled_backward"].startswith("C++")
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_the_operations_and_their_lines_are_named():
    _, run = gradients("cummax, median", DirectAdjoint(), True)
    path = run.stats["compiled_forward"]
    assert path.startswith("C++, and torch for cummax.default (")
    assert "test_torch_calls.py:" in path
    assert "median.default" in path
    assert "mul" not in path


class Ranked(nn.Module):
    """A potential with an operation that is not printed."""

    def __init__(self):
        super().__init__()
        self.k = parameter(1.3)

    def forward(self, position):
        return (self.k * position.flatten(-2).cummax(-1).values ** 2).sum(-1)


@pytest.mark.slow
def test_exact_runs_come_back():
    """The same operation has the same bits in both loops, and in Python."""
    found = []
    for compile in (False, True):
        potential = Ranked()
        dynamics = adjsim.Langevin(potential, 1.0, 0.5, 1.0)
        begin = dynamics.init(numbers(4, 2), momentum=numbers(4, 2, seed=1))
        run = adjsim.simulate(
            dynamics, begin, [0.0, 0.5], solver=adjsim.Splitting("BAOAB", 0.01, exact=True),
            adjoint=ReversibleAdjoint(), compile=compile, generator=3,
        )  # fmt: skip
        run.final.position.square().sum().backward()
        assert run.stats["reconstruction_error"] == 0
        found.append((run.final.position.detach(), potential.k.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_inside_a_loop_ends_the_run(number):
    """Python runs its handler where the loop next calls torch, whose result would be lost."""

    def handle(*_: object) -> None:
        raise KeyboardInterrupt("a handler")

    def slow(x: Tensor) -> Tensor:
        return (x.unsqueeze(-1) * torch.arange(40_000.0)).sin().sum(-1).cummax(0).values * 1e-9

    run, path = run_of(slow, numbers(4), steps=100_000)
    assert path != "C++"
    before = signal.signal(number, handle)
    try:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), number))
        timer.start()
        with pytest.raises(KeyboardInterrupt, match="a handler"):
            run()
        timer.join()
    finally:
        signal.signal(number, before)


def test_assertions_are_run():
    """An operation without a value that anything reads."""

    def asserted(x: Tensor) -> Tensor:
        torch._assert_async((x < 1).all())
        return 2 * x

    run, _ = run_of(asserted, torch.linspace(0.0, 0.9, 5))
    torch.testing.assert_close(run(), torch.linspace(0.0, 1.8, 5))
    run, _ = run_of(asserted, torch.linspace(0.0, 1.1, 5))
    with pytest.raises(RuntimeError, match=r"[Aa]ssert|nonzero"):
        run()


def test_errors_of_an_operation_end_the_loop():
    """As torch raises them, and no later iteration is run."""
    seen = []

    @torch.library.custom_op("tests::failing", mutates_args=())
    def failing(x: Tensor) -> Tensor:
        seen.append(float(x[0]))
        if len(seen) == 3:
            raise KeyboardInterrupt("in the third iteration")
        return x + 1

    failing.register_fake(torch.empty_like)
    run, path = run_of(lambda x: failing(x), numbers(3), steps=6)
    assert "tests.failing" in path
    with pytest.raises(KeyboardInterrupt, match="third iteration"):
        run()
    assert len(seen) == 3


PLACE = {
    "scatter": lambda x, i: x.scatter(0, i, x),
    "gather": lambda x, i: torch.gather(x, 0, i),
    "scatter_add": lambda x, i: x.scatter_add(0, i, x),
    "index_add": lambda x, i: x.index_add(0, i, x),
    "embedding": lambda x, i: F.embedding(i, x.unsqueeze(-1)).squeeze(-1),
}


@pytest.mark.parametrize("place", [pytest.param(13, marks=pytest.mark.slow), -1])
@pytest.mark.parametrize("name", PLACE)
def test_places_out_of_range_are_refused(name, place):
    """Negative ones too, where torch refuses them."""
    run, path = run_of(
        lambda x: PLACE[name](x, torch.full_like(x, place).to(torch.int64) + (0 * x).long()),
        numbers(13),
    )
    assert path == "C++"
    with pytest.raises((RuntimeError, IndexError), match=r"out of (bounds|range)"):
        run()


def test_threads_share_a_loop():
    """Values that stay in Python belong to a run."""
    dynamics, found = adjsim.ODE(Field(OPERATIONS["complex"])), {}

    def run(seed: int) -> Tensor:
        ts, begin = torch.tensor([0.0, 1.0]), dynamics.init(numbers(3, 4, seed=seed))
        return adjsim.simulate(
            dynamics, begin, ts, solver=RungeKutta("midpoint", 0.05), compile=True
        ).final.y.detach()

    expected = [run(seed) for seed in range(4)]
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: run(seed)}))
        for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, values in enumerate(expected):
        torch.testing.assert_close(found[seed], values, rtol=1e-10, atol=1e-12)


class Filter(nn.Module):
    """A filter of complex numbers, which are a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 2).view(3, 2) * 0.3)
        self.phase = nn.Parameter(torch.polar(torch.ones(3), numbers(3)))

    def forward(self, t, y):
        return -torch.fft.irfft(torch.fft.rfft(y) * self.phase * self.weight.sum(), n=4)


@pytest.mark.marathon
def test_complex_parameters_and_records_are_left_to_inductor():
    """And named before it starts."""
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        dynamics = adjsim.ODE(Filter())
        y = numbers(2, 4).requires_grad_()
        record = adjsim.TimeAverage(lambda state: torch.fft.rfft(state.y))
        options = {"solver": RungeKutta("midpoint", 0.05), "compile": compile, "record": record}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run = adjsim.simulate(dynamics, dynamics.init(y), [0.0, 0.1], **options)
            inputs = [y, *dynamics.parameters()]
            found.append([run.record, *torch.autograd.grad(run.record.abs().sum(), inputs)])
        said = [str(x.message) for x in seen if "Inductor compiles" in str(x.message)]
        assert bool(said) == compile
        assert all("a tensor of torch.complex128" in text for text in said)
    assert run.stats["compiled_forward"].startswith("Inductor (a tensor of torch.complex128")
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-12, atol=1e-14)
