"""Adaptive steps of an SDE read one Brownian path, whatever they reject."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim import Adaptive, BrownianPath, Milstein, StepTimes, StochasticHeun
from tests.contracts.test_brownian_path import growth

DTYPE = torch.float64
PATH = BrownianPath(3, 2.0**-20)
CHECKPOINT = adjsim.CheckpointAdjoint()
TS = [0.0, 0.25, 0.5]


class Driven(torch.nn.Module):
    """Entry 0 is the Brownian motion itself; entry 1 has strong noise in a stiff well."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor(40.0, dtype=DTYPE))

    def drift(self, t, y):
        well = -self.rate * (y[..., 1:] ** 3 - y[..., 1:])
        return torch.cat([torch.zeros_like(well), well], -1)

    def diffusion(self, t, y):
        return torch.stack([torch.ones_like(y[..., 0]), 1 + y[..., 1] ** 2], -1)


def driven():
    field = Driven()
    sde = adjsim.SDE(field.drift, field.diffusion)
    return field, sde, sde.init(torch.tensor([[0.0, 1.0], [0.0, -0.5]], dtype=DTYPE))


def run(sde, start, solver, ts=TS, adjoint=CHECKPOINT, generator=PATH):
    return adjsim.simulate(sde, start, ts, solver=solver, adjoint=adjoint, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StochasticHeun, Milstein])
def test_the_error_follows_the_tolerances(kind):
    field, sde, start = growth()
    W = PATH.increments([0.0, 0.5], (20, 3))[0]
    ito = field.s**2 / 2 if kind.of_ito else 0.0
    exact = torch.exp((field.a - ito) / 2 + field.s * W).detach()
    errors, steps = [], []
    for tol in (1e-2, 1e-3):
        found = run(sde, start, kind(Adaptive(tol, tol)))
        errors.append(float((found.final.y.detach() - exact).square().mean().sqrt()))
        steps.append(found.stats["steps"])
    # Local errors of order h^(3/2) at h ~ tol^(2/3) add up to the order tol^(2/3), a factor of 4.6.
    assert errors[1] < errors[0] / 2.3
    assert errors[1] < 0.01, errors
    assert steps[1] > 2 * steps[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StochasticHeun, Milstein])
def test_rejections_skip_nothing_of_the_path(kind):
    _, sde, start = driven()
    found = run(sde, start, kind(Adaptive(1e-2, 1e-2)))
    assert found.stats["rejected"] > 10
    sizes = torch.diff(found.stats["step_times"])
    assert float(sizes.max() / sizes.min()) >= 4
    # The sum of all increments, to rounding.
    expected = PATH.increments(TS, (2, 2))[..., 0].cumsum(0)
    torch.testing.assert_close(found.y[1:, :, 0].detach(), expected, rtol=0, atol=1e-13)


@pytest.mark.slow
def test_gradients_hold_the_times_fixed():
    field, sde, start = driven()
    recorded = run(sde, start, StochasticHeun(Adaptive(1e-2, 1e-2)))
    steps = StochasticHeun(StepTimes(recorded.stats["step_times"]))

    def loss(adjoint):
        return run(sde, start, steps, adjoint=adjoint).final.y.square().sum()

    assert torch.equal(run(sde, start, steps).y, recorded.y)
    wanted = [field.rate]
    (grad,) = torch.autograd.grad(recorded.final.y.square().sum(), wanted)
    for adjoint in (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint()):
        (other,) = torch.autograd.grad(loss(adjoint), wanted)
        torch.testing.assert_close(grad, other, rtol=1e-10, atol=0)
    ends = []
    with torch.no_grad():
        for change in (1e-5, -1e-5):
            field.rate.add_(change)
            ends.append(float(loss(adjsim.DirectAdjoint())))
            field.rate.sub_(change)
    assert float(grad) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_steps_go_back_in_time():
    _, sde, start = growth()
    there = run(sde, start, StochasticHeun(Adaptive(1e-3, 1e-3)))
    back = run(sde, there.final, StochasticHeun(Adaptive(1e-3, 1e-3)), ts=[0.5, 0.0])
    assert bool((torch.diff(back.stats["step_times"]) < 0).all())
    assert float((back.final.y.detach() - start.y).abs().max()) < 0.02


@pytest.mark.slow
def test_what_is_refused():
    _, sde, start = growth()
    with pytest.raises(TypeError, match="noise of a seed"):
        run(sde, start, StochasticHeun(Adaptive()), generator=3)
    with pytest.raises(FloatingPointError, match="smaller tol"):
        run(sde, start, Milstein(Adaptive(1e-6, 1e-6)), generator=BrownianPath(3, 2.0**-8))
    with pytest.raises(ValueError, match=r"ts\[0\] = 0 is not the end of a step"):
        run(sde, start, StochasticHeun(StepTimes([0.125, 0.25, 0.5])))
    with pytest.raises(ValueError, match="multiples of its tol"):
        run(sde, start, StochasticHeun(Adaptive(1e-2, 1e-2)), ts=[0.0, 0.1])
    with pytest.raises(TypeError, match="differ in size"):
        adjsim.simulate(
            sde, start, TS, solver=StochasticHeun(Adaptive()), generator=PATH, compile=True
        )
    ode = adjsim.ODE(lambda t, y: -y)
    with pytest.raises(TypeError, match="StochasticHeun is for SDE"):
        run(ode, start, StochasticHeun(Adaptive()))
