"""What people do with modules of torch also works with those of this library."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset

import adjsim
from tests.fields import Net


class Model(nn.Module):
    """A layer before a neural ODE."""

    def __init__(self, adjoint: adjsim.ReversibleAdjoint | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.ode = adjsim.ODE(Net())
        self.solver = adjsim.Coupled("rk4", 0.25, rate=1.0)
        self.adjoint = adjsim.ReversibleAdjoint() if adjoint is None else adjoint

    def forward(self, x: Tensor) -> Tensor:
        start = self.ode.init(self.layer(x))
        times = [0.0, 0.5]
        return adjsim.simulate(
            self.ode, start, times, solver=self.solver, adjoint=self.adjoint
        ).final.y

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return (self(x) - y).square().mean()


def data(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2), torch.randn(n, 3)


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor], call=None) -> Tensor:
    x, y = batch
    loss = ((model if call is None else call)(x) - y).square().mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def changed(model: nn.Module, factor: float) -> nn.Module:
    """Return a copy with other parameters, which has run before."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(factor)
    gradient(found, data())
    return found


def through_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_whole_model_is_saved_and_copied():
    model, batch = Model(), data()
    expected = gradient(model, batch)
    assert torch.equal(gradient(through_file(model), batch), expected)
    assert torch.equal(gradient(copy.deepcopy(model), batch), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_replaces_the_numbers_of_a_model_that_has_run(assign):
    model, batch = Model(), data()
    other = changed(model, 1.3)
    assert not torch.allclose(gradient(other, batch), gradient(model, batch))
    numbers = copy.deepcopy(model.state_dict())
    other.load_state_dict(numbers, assign=assign)
    assert torch.equal(gradient(other, batch), gradient(model, batch))


def test_an_exponential_average_runs_with_its_own_numbers():
    model, batch = Model(), data()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(model)
    later = changed(model, 1.5)
    average.update_parameters(later)
    mean = copy.deepcopy(model)
    with torch.no_grad():
        for p, a, b in zip(mean.parameters(), model.parameters(), later.parameters(), strict=True):
            p.copy_(0.9 * a + 0.1 * b)
    torch.testing.assert_close(
        gradient(average, batch), gradient(mean, batch), rtol=1e-12, atol=1e-14
    )


def test_a_training_step_accumulates_and_clips():
    """The loop of a trainer: parts of a batch, a bound on the norm, a step of the optimiser."""
    model, (x, y) = Model(), data()
    whole = gradient(model, (x, y))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    for index, part in enumerate(zip(x.split(3), y.split(3), strict=True)):
        (model.training_step(part, index) / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimiser.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert norm > 0.1
    torch.testing.assert_close(norm, whole.norm(), rtol=1e-12, atol=0)
    step = 0.01 * whole / (whole.norm() + 1e-6)
    torch.testing.assert_close(before - after, step, rtol=1e-9, atol=1e-12)


def test_hooks_of_gradients_fire_once_a_parameter():
    """Distributed trainers average gradients in such hooks."""
    model, batch = Model(), data()
    plain, seen = gradient(model, batch), []
    for name, p in model.named_parameters():
        p.register_hook(lambda g: 0.5 * g)
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    model.training_step(batch, 0).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, 0.5 * plain, rtol=1e-13, atol=0)
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())


def test_parametrised_layers_have_the_gradient_of_differences():
    model, batch = Model(), data()
    parametrizations.weight_norm(model.ode.fun.inner)
    parametrizations.orthogonal(model.layer)
    size = model.ode.fun.inner.parametrizations.weight.original0

    def loss() -> Tensor:
        return model.training_step(batch, 0)

    (found,) = torch.autograd.grad(loss(), size)
    h, values = 1e-5, []
    with torch.no_grad():
        for sign in (1, -1):
            size[0, 0] += sign * h
            values.append(loss())
            size[0, 0] -= sign * h
    torch.testing.assert_close(found[0, 0], (values[0] - values[1]) / (2 * h), rtol=1e-6, atol=1e-9)


def test_gradients_are_recomputed_once_inside_of_a_checkpoint():
    model, batch, calls = Model(), data(), []
    expected = gradient(model, batch)

    def counted(x: Tensor) -> Tensor:
        calls.append(x)
        return model(x)

    def call(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(counted, x, use_reentrant=False)

    assert torch.equal(gradient(model, batch, call), expected)
    assert len(calls) == 2


@pytest.mark.slow
def test_torch_compile_leaves_the_run_to_python():
    model, batch = Model(), data()
    expected = gradient(model, batch)
    torch._dynamo.reset()
    found = gradient(model, batch, torch.compile(model, backend="aot_eager"))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Single(nn.Module):
    """A layer, and a field that returns the dtype of its layer or that of the state."""

    def __init__(self, cast_start: bool, cast_rate: bool) -> None:
        super().__init__()
        self.cast_start, self.cast_rate = cast_start, cast_rate
        self.layer, self.field = nn.Linear(2, 3).float(), nn.Linear(3, 3).float()
        self.ode = adjsim.ODE(Rate(self.field, cast_rate))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        start = self.ode.init(y.float() if self.cast_start else y)
        solver = adjsim.Coupled("rk4", 0.25, rate=1.0)
        return adjsim.simulate(
            self.ode, start, [0.0, 0.5], solver=solver, adjoint=adjsim.CheckpointAdjoint()
        ).final.y


class Rate(nn.Module):
    def __init__(self, layer: nn.Module, cast: bool) -> None:
        super().__init__()
        self.layer, self.cast = layer, cast

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        found = -self.layer(torch.tanh(y))
        return found.to(y.dtype) if self.cast else found


def test_autocast_is_refused_in_words_of_autocast_or_right():
    x = torch.randn(4, 2, dtype=torch.float32)
    for casts, message in (
        ((False, True), r"y is torch\.bfloat16.*torch\.autocast.*y\.float\(\)"),
        ((True, False), r"torch\.autocast.*\.to\(y\.dtype\)"),
    ):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=message):
            Single(*casts)(x)
    model = Single(True, True)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    found = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    assert y.dtype == torch.float32
    for ours, plain in zip(found, expected, strict=True):
        assert not torch.equal(ours, plain)
        # bfloat16 rounds to 4e-3.
        assert (ours - plain).norm() < 2e-2 * plain.norm()


class Simulated(Dataset):
    """Noisy paths, each with the noise of its own number."""

    def __init__(self) -> None:
        self.dynamics = adjsim.Langevin(adjsim.Harmonic(1.0), 1.0, 0.5)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> Tensor:
        start = self.dynamics.init(torch.ones(2, 1).double(), torch.zeros(2, 1).double())
        with torch.no_grad():
            run = adjsim.simulate(
                self.dynamics, start, [0.0, 0.2], solver=adjsim.BAOAB(0.1), generator=k
            )
        return run.final.position


@pytest.mark.parametrize(
    ("context", "workers"),
    [(None, 0), pytest.param("fork", 2, marks=pytest.mark.slow),
     pytest.param("spawn", 1, marks=pytest.mark.slow)],
)  # fmt: skip
def test_workers_of_a_loader_simulate_the_same_numbers(context, workers):
    dataset = Simulated()
    loader = DataLoader(dataset, batch_size=2, num_workers=workers, multiprocessing_context=context)
    found = torch.cat(list(loader))
    assert torch.equal(found, torch.stack([dataset[k] for k in range(4)]))
    assert len(found.unique()) == 8
