"""Compiled gradients that read what autograd saved in the forward steps, against eager ones."""

from __future__ import annotations

import itertools
from itertools import pairwise

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, RungeKutta, TimeAverage
from adjsim.adjoints.loops import backward, runner as loop_runner, saved_tensors
from adjsim.adjoints.loops.saved_tensors import SavedTensors
from tests.fields import Pair
from tests.gradients.test_table import agree
from tests.problems import slow_but

TIMES = [0.0, 0.2, 0.55]


@pytest.fixture(autouse=True)
def _unchecked():
    """The type checks of the tests cannot be written down."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Wide(nn.Module):
    """A network whose second layer is worth to be saved; the first is too short for it."""

    def __init__(self, activation: nn.Module, width: int = 40, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(3, width), activation, nn.Linear(width, width), activation
        )
        self.last = nn.Linear(width, 3)
        self.decay = nn.Parameter(torch.tensor(0.3))
        self.double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.cos(t).to(y) * self.last(self.layers(y)) - self.decay * y


class WidePair(nn.Module):
    """The same network on a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = Wide(nn.Tanh())

    def forward(self, t: Tensor, y: Pair) -> Pair:
        found = self.whole(t, torch.cat(tuple(y), -1))
        return Pair(found[..., :1], found[..., 1:])


def start(*batch: int) -> Tensor:
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(*batch, 3, generator=drawn, dtype=torch.float64)


def gradients(dynamics, y, solver, adjoint, compile, record=None):
    """The gradient with respect to start and parameters, and the evaluations that it took."""
    begin = tuple(x.clone().requires_grad_() for x in y)
    run = adjsim.simulate(
        dynamics,
        dynamics.init(type(y)._make(begin) if isinstance(y, Pair) else begin[0]),
        TIMES,
        solver=solver,
        adjoint=adjoint,
        record=record,
        generator=4,
        compile=compile,
    )
    loss = sum((1 + i) * x.square().sum() for i, x in enumerate(run.final))
    if record is not None:
        loss = loss + run.record.sum()
    named = dict(dynamics.named_parameters())
    found = torch.autograd.grad(loss, [*named.values(), *begin], retain_graph=True)
    evaluations = run.stats["energy_evaluations"]
    again = torch.autograd.grad(loss, [*named.values(), *begin])
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    return dict(zip([*named, *map(str, range(len(y)))], found, strict=True)), evaluations


def sde(activation: nn.Module) -> adjsim.SDE:
    """Two networks, one of them under the noise."""
    return adjsim.SDE(Wide(activation), Wide(nn.Sigmoid(), 33, seed=5))


EULER = adjsim.EulerMaruyama(0.05)
# Two stages, of which the second saves tensors that depend on the first.
MIDPOINT = RungeKutta("midpoint", 0.05)
EULER_ODE = RungeKutta("euler", 0.05)
ROWS = {
    "ode": (lambda: adjsim.ODE(Wide(nn.Tanh())), (start(4),), MIDPOINT),
    "ode, many systems": (lambda: adjsim.ODE(Wide(nn.SiLU())), (start(20),), MIDPOINT),
    "ode, two axes": (lambda: adjsim.ODE(Wide(nn.ReLU())), (start(2, 3),), MIDPOINT),
    "ode, named": (lambda: adjsim.ODE(WidePair()), Pair(*start(4).split([1, 2], -1)), MIDPOINT),
    "sde": (lambda: sde(nn.Tanh()), (start(4),), EULER),
    "sde, many systems": (lambda: sde(nn.Softplus()), (start(20),), EULER),
    "sde, Heun": (lambda: sde(nn.Tanh()), (start(4),), adjsim.StochasticHeun(0.05)),
}


@pytest.mark.parametrize(
    ("name", "average"),
    slow_but(
        lambda name, average: name == "sde, many systems" and not average,
        itertools.product(ROWS, (False, True)),
        # How an average reads the states does not depend on the field.
        marathon=lambda name, average: (
            name != "ode" if average else name not in ("ode", "sde, Heun", "sde, many systems")
        ),
    ),
)
def test_equal_to_eager_gradients(name, average):
    """A direct gradient counts as many evaluations as backpropagation: no step is run again."""
    make, y, solver = ROWS[name]
    dynamics = make()
    record = TimeAverage(lambda state: state[0].square().mean(-1)) if average else None
    direct, evaluations = gradients(dynamics, y, solver, DirectAdjoint(), False, record)
    for adjoint in (DirectAdjoint(), CheckpointAdjoint(3)):
        found, count = gradients(dynamics, y, solver, adjoint, True, record)
        # The same operations, in other orders of their sums.
        agree(found, direct, 1e-12)
        if isinstance(adjoint, DirectAdjoint):
            assert count == evaluations


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit", ["steps", "entries", pytest.param("no entries", marks=pytest.mark.slow)]
)
def test_without_memory_for_them(limit, monkeypatch):
    """Long runs store states alone; of a step that saves too much, the first tensors are saved."""
    if limit == "steps":
        monkeypatch.setattr(loop_runner, "MOST_STEPS", 10)
    else:
        entries = 2 * 4 * 40 if limit == "entries" else 0
        monkeypatch.setattr(saved_tensors, "MOST_ENTRIES", entries)
    make, y, solver = ROWS["ode"]
    dynamics = make()
    direct, evaluations = gradients(dynamics, y, solver, DirectAdjoint(), False)
    found, count = gradients(dynamics, y, solver, DirectAdjoint(), True)
    agree(found, direct, 1e-12)
    # Two stages of eleven steps are run again.
    assert count - evaluations == (0 if limit == "entries" else 2 * 11)


def sine_of(view):
    """A network that takes the sine of a view and the cosine of the whole, both saved."""
    return lambda h: torch.sin(view(h)) * torch.cos(h)


VIEWS = {
    "transposed": lambda h: torch.sin(h.mT).mT,
    "with another axis": lambda h: torch.sin(h.unsqueeze(-1)).squeeze(-1),
    "cloned": sine_of(torch.clone),
    "itself": sine_of(lambda h: h.view_as(h)),
    "sliced": sine_of(lambda h: h[..., :]),
    "halves": lambda h: torch.cat([torch.sin(x) for x in h.chunk(2, -1)], -1) * torch.cos(h),
    "flattened": lambda h: torch.sin(h.flatten()).view_as(h),
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
}


class Activated(nn.Module):
    """A network with several activations, one after another."""

    def __init__(self, names) -> None:
        super().__init__()
        torch.manual_seed(2)
        sizes = [3, *[40] * len(names)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.last = nn.Linear(40, 3)
        self.names = tuple(names)
        self.double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        for layer, name in zip(self.layers, self.names, strict=True):
            y = VIEWS[name](layer(y))
        return self.last(y)


@pytest.mark.parametrize(
    ("first", "batch"),
    slow_but(
        lambda first, batch: (first, batch) == (0, (2,)),
        itertools.product(range(3), [(2,), (1,)]),
        marathon=lambda first, batch: first != 0,
    ),
)
def test_views_of_saved_tensors(first, batch):
    """A value that is saved as it is and as a view has two rows."""
    dynamics = adjsim.ODE(Activated(list(VIEWS)[first::3]))
    direct, _ = gradients(dynamics, (start(*batch),), MIDPOINT, DirectAdjoint(), False)
    found, _ = gradients(dynamics, (start(*batch),), MIDPOINT, DirectAdjoint(), True)
    agree(found, direct, 1e-11)


@pytest.mark.slow
def test_one_system_without_an_axis():
    """The product of a row is saved without its first axis."""
    dynamics = adjsim.ODE(Activated(["silu", "silu"]))
    direct, _ = gradients(dynamics, (start(),), MIDPOINT, DirectAdjoint(), False)
    agree(gradients(dynamics, (start(),), MIDPOINT, DirectAdjoint(), True)[0], direct, 1e-12)


class Captures(Wide):
    """A network whose rates are scaled by a number and a vector that are no parts of it."""

    number, vector = torch.tensor(1.2), torch.tensor([0.7, 1.1, 0.9], dtype=torch.float64)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.number * self.vector * super().forward(t, y)


@pytest.mark.slow
def test_captured_tensors_are_not_saved():
    """They are constants of both loops."""
    dynamics = adjsim.ODE(Captures(nn.Tanh()))
    direct, _ = gradients(dynamics, (start(4),), MIDPOINT, DirectAdjoint(), False)
    agree(gradients(dynamics, (start(4),), MIDPOINT, DirectAdjoint(), True)[0], direct, 1e-12)


class InPlace(nn.Module):
    """A network that changes a tensor after autograd has saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Wide(nn.Tanh())

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        h = torch.exp(self.net(t, y))
        product = h * y
        h.mul_(2.0)
        return product + h


@pytest.mark.slow
def test_saved_tensors_that_are_changed_in_place_are_refused():
    """As torch refuses them without compilation."""
    with pytest.raises(adjsim.CompileError, match="modified by an inplace operation"):
        gradients(adjsim.ODE(InPlace()), (start(4),), MIDPOINT, DirectAdjoint(), True)


class ChangedLater(nn.Module):
    """A network whose saved tensor is changed in place, where no gradient needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Wide(nn.Tanh())

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.net(t, y))
        before = 3.0 * h.detach()
        h.mul_(0.0)
        return self.net(t, y) * before


@pytest.mark.slow
def test_tensors_that_are_changed_after_their_last_use():
    """What is computed from such a tensor is computed again from its numbers before the change."""
    dynamics = adjsim.ODE(ChangedLater())
    direct, _ = gradients(dynamics, (start(4),), EULER_ODE, DirectAdjoint(), False)
    agree(gradients(dynamics, (start(4),), EULER_ODE, DirectAdjoint(), True)[0], direct, 1e-12)


class Reordered(nn.Module):
    """A network with an index, whose derivative is not printed as C++."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Wide(nn.Tanh())

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(t, y)[..., torch.tensor([2, 1, 0])]


@pytest.mark.slow
def test_a_scatter_reads_saved_tensors():
    """The derivative of an index, which torch evaluates."""
    dynamics = adjsim.ODE(Reordered())
    direct, _ = gradients(dynamics, (start(4),), EULER_ODE, DirectAdjoint(), False)
    agree(gradients(dynamics, (start(4),), EULER_ODE, DirectAdjoint(), True)[0], direct, 1e-12)


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x + x[-1:]])
def test_tensors_that_the_backward_step_does_not_save(change, monkeypatch):
    """Its trace would read numbers of other tensors."""
    monkeypatch.setattr(backward, "SavedTensors", lambda tensors: SavedTensors(change(tensors)))
    make, y, solver = ROWS["ode"]
    with pytest.raises(adjsim.CompileError, match="saves other tensors backward than forward"):
        gradients(make(), y, solver, DirectAdjoint(), True)
