"""The noise of compiled loops, drawn by a thread for the loop that is expected next."""

import pytest
import torch

import adjsim
from adjsim.adjoints.loops import loop_noise, runner
from tests.problems import square


@pytest.mark.slow
@pytest.mark.parametrize("noise", [3, adjsim.BrownianPath(3, 2.0**-12)], ids=["seed", "path"])
def test_a_thread_draws_what_the_loops_read(noise, monkeypatch):
    """In pieces of 8 steps, up to each save: forward and backward have the same numbers."""
    monkeypatch.setattr(runner, "FINITE_EVERY", 8)
    position, momentum = square()
    dynamics = adjsim.Langevin(adjsim.LennardJones(torch.nn.Parameter(torch.tensor(1.1))), 1, 1, 1)
    taken = loop_noise.LoopNoise._taken
    found = []

    def noted(*place):
        parts = taken(*place)
        found.append(parts is not None)
        return parts

    monkeypatch.setattr(loop_noise.LoopNoise, "_taken", noted)

    def gradient(on_cpu):
        monkeypatch.setattr(loop_noise, "ON_CPU", on_cpu)
        found.clear()
        run = adjsim.simulate(
            dynamics, dynamics.init(position, momentum), [0.0, 11 * 2.0**-9, 38 * 2.0**-9],
            solver=adjsim.Splitting("BAOAB", 2.0**-9), generator=noise, compile=True,
            adjoint=adjsim.ReversibleAdjoint(),
        )  # fmt: skip
        loss = run.position.square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(dynamics.parameters()))]

    expected = gradient(False)
    assert not any(found)
    assert all(torch.equal(x, y) for x, y in zip(gradient(True), expected, strict=True))
    # The first loop of a run has no loop before.
    assert found.count(False) == 1
    assert len(found) > 8
