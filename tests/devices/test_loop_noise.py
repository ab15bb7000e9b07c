"""The noise of loops of a GPU, drawn by a thread for the next loop, with copies that are late."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import adjsim
from adjsim.adjoints.loops import loop_noise, runner
from adjsim.adjoints.loops.loop_noise import LoopNoise
from adjsim.adjoints.sweep.stepper import StepNoise
from adjsim.compiler import loops
from adjsim.core.noise import Draw, Noise
from tests.devices.test_replays import by_replays
from tests.problems import square


class Late:
    """A queue whose copies read the memory of the host as late as they may."""

    def __init__(self) -> None:
        self.calls, self.threads = list[str](), set[int]()

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    def allocate(self, numbers: int, dtype: torch.dtype) -> Tensor:
        self.note("allocate")
        return torch.full((numbers,), torch.nan, dtype=dtype)

    def copy(self, rows: Tensor, length: int) -> tuple[Tensor, Any]:
        self.note("copy")
        found = torch.full((length, *rows.shape[1:]), torch.nan, dtype=rows.dtype)

        def synchronize() -> None:
            self.note("wait")
            found[: len(rows)] = rows

        return found, SimpleNamespace(synchronize=synchronize)

    def receive(self, x: Tensor, copied: Any) -> Tensor:
        copied.synchronize()
        return x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("noise", [3, adjsim.BrownianPath(3, 2.0**-12)], ids=["seed", "path"])
def test_a_thread_draws_what_the_loops_read(
    noise: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of 8 steps, up to each save: forward and backward have the same numbers."""
    monkeypatch.setattr(runner, "FINITE_EVERY", 8)
    monkeypatch.setattr(loops, "compile_to_cpp", by_replays)
    position, momentum = (x.to(dtype) for x in square())
    pairs = adjsim.LennardJones(torch.nn.Parameter(torch.tensor(1.1)), 1.0)
    dynamics = adjsim.Langevin(pairs, 1.0, 1.0, 1.0).to(dtype)

    def gradient(queue: Late | None) -> list[Tensor]:
        monkeypatch.setattr(loop_noise, "queue_of", lambda device: queue)
        run = adjsim.simulate(
            dynamics, dynamics.init(position, momentum), [0.0, 11 * 2.0**-9, 38 * 2.0**-9],
            solver=adjsim.Splitting("BAOAB", 2.0**-9), generator=noise, compile=True,
            adjoint=adjsim.ReversibleAdjoint(),
        )  # fmt: skip
        loss = run.position.square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(dynamics.parameters()))]

    queue = Late()
    results = zip(gradient(queue), gradient(None), strict=True)
    assert all(torch.equal(x, y) for x, y in results)
    # Six loops forward and six backward. The first has no loop before, and the backward pass begins
    # with the noise of the last loop forward. In float32 the budget of errors ends loops too.
    assert queue.calls.count("copy") >= 10
    # A loop before the longest one has fewer numbers.
    assert 2 <= queue.calls.count("allocate") <= 4
    assert queue.threads == {threading.get_ident()}


def test_a_buffer_is_written_once_its_copy_has_ended() -> None:
    """Also where the loop that was expected does not come."""
    queue, plan = Late(), SimpleNamespace(draws=1, noise_steps=1)
    source: Any = StepNoise(
        Noise(3), plan, torch.Size(), torch.Size([4, 2]), torch.zeros(4, 2), end=100
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_noise, "queue_of", lambda device: queue)
        drawn = LoopNoise(source, 8, 0, torch.device("cpu"))
    (send,) = drawn.meanwhile
    for first in (8, 16, 24):
        drawn.draw_ahead(first, 8)
        send()
        # The steps after these were expected.
        assert torch.equal(drawn.of(first + 1, 7)[:7], torch.cat(source.of_steps(first + 1, 7)).mT)
    assert queue.calls == ["allocate", "copy", "allocate", "copy", "wait", "copy"]


def test_an_error_of_the_thread_is_raised_by_the_loop() -> None:
    class Broken(Noise):
        def span(self, *_: Any) -> list[Tensor]:
            raise MemoryError("no memory for numbers")

        def twin(self, draw: Draw) -> Noise:
            return self

    plan = SimpleNamespace(draws=1, noise_steps=1)
    source: Any = StepNoise(
        Broken(3), plan, torch.Size(), torch.Size([4, 2]), torch.zeros(4, 2), end=100
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_noise, "queue_of", lambda device: Late())
        drawn = LoopNoise(source, 8, 0, torch.device("cpu"))
    drawn.draw_ahead(8, 8)
    (send,) = drawn.meanwhile
    send()
    with pytest.raises(MemoryError, match="no memory for numbers"):
        drawn.of(8, 8)
