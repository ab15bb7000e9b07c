"""The divergence of the paths of an SDE from those of another drift."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import pytest
import torch
import torchsde

import adjsim

DTYPE = torch.float64
PATH = adjsim.BrownianPath(1, 2.0**-8)
TS, DT = [0.0, 0.5, 1.0], 2.0**-6


class Pair(NamedTuple):
    x: torch.Tensor
    v: torch.Tensor


class Latent(torch.nn.Module):
    """A posterior drift f, a prior drift h and a diffusion g, by torchsde's names."""

    noise_type: ClassVar[str] = "diagonal"
    sde_type: ClassVar[str] = "ito"

    def __init__(self, noise: str = "diagonal") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.noise = noise
        self.mix = torch.nn.Parameter(torch.randn(3, 3, generator=generator, dtype=DTYPE))
        self.rate = torch.nn.Parameter(torch.tensor(0.7, dtype=DTYPE))

    def f(self, t, y):
        return torch.tanh(y @ self.mix)

    def h(self, t, y):
        return -self.rate * y

    def g(self, t, y):
        if self.noise == "additive":
            return (torch.eye(3, dtype=DTYPE) + 0.3).expand(*y.shape, 3)
        amplitude = 0.5 + 0.1 * torch.sigmoid(y)
        return torch.diag_embed(amplitude) + 0.1 if self.noise == "general" else amplitude

    def equation(self) -> adjsim.SDE:
        return adjsim.SDE(self.f, self.g, noise=self.noise)


def start(rows=5):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(2), dtype=DTYPE)


class Read:
    """The increments of PATH for torchsde, which wants a column for logqp too."""

    shape, dtype, device = (5, 4), DTYPE, torch.device("cpu")
    levy_area_approximation = "none"

    def __call__(self, begin, end, return_U=False, return_A=False):
        drawn = PATH.increments([float(begin), float(end)], (5, 3))[0]
        return torch.cat([drawn, torch.zeros(5, 1, dtype=DTYPE)], 1)


@pytest.mark.parametrize(
    "solver", [adjsim.EulerMaruyama(DT), adjsim.SDESolver("euler", dt=DT)], ids=["own", "torchsde"]
)
def test_it_is_that_of_torchsde_on_one_path(solver):
    latent, y = Latent(), start()
    theirs, rises = torchsde.sdeint(
        latent, y, torch.tensor(TS, dtype=DTYPE), bm=Read(), method="euler", dt=DT, logqp=True
    )
    sde = latent.equation().logqp(latent.h)
    run = adjsim.simulate(sde, sde.init(y), TS, solver=solver, generator=PATH)
    assert torch.equal(run.y, theirs)
    torch.testing.assert_close(run.logqp[1:, :, 0], rises.cumsum(0), rtol=1e-13, atol=0)


@pytest.mark.parametrize("noise", ["diagonal", "additive", "general"])
def test_the_path_is_that_without_it(noise):
    latent = Latent(noise)
    sde, y = latent.equation(), start()
    more = sde.logqp(latent.h)
    settings = {"solver": adjsim.StochasticHeun(DT), "generator": 3}
    run = adjsim.simulate(more, more.init(y), TS, **settings)
    assert torch.equal(run.y, adjsim.simulate(sde, sde.init(y), TS, **settings).y)
    with torch.no_grad():
        g, difference = latent.g(0.0, y), latent.f(0.0, y) - latent.h(0.0, y)
        u = difference / g if noise == "diagonal" else torch.linalg.solve(g, difference)
        (_, rate) = more.drift(0.0, more.init(y))
    torch.testing.assert_close(rate[:, 0], 0.5 * u.square().sum(-1))


def test_scalar_noise_of_a_known_divergence():
    """Drifts that differ by c g along the noise: u = c, and half of c^2 a unit of time."""

    def g(t, y):
        return torch.stack([y[..., 1].cos() + 2, y[..., 0].sin() + 3], -1)

    sde = adjsim.SDE(lambda t, y: 0.7 * g(t, y) - y, g, noise="scalar").logqp(lambda t, y: -y)
    run = adjsim.simulate(
        sde, sde.init(start()[:, :2]), TS, solver=adjsim.EulerMaruyama(DT), generator=0
    )
    expected = 0.245 * torch.tensor(TS, dtype=DTYPE)
    torch.testing.assert_close(run.logqp[..., 0], expected[:, None].expand(3, 5))


@pytest.mark.slow
def test_gradients():
    latent = Latent()
    sde = latent.equation().logqp(latent.h)

    def loss(adjoint, compile=False):
        solver = adjsim.ReversibleHeun(DT)
        settings = {"solver": solver, "adjoint": adjoint, "generator": PATH, "compile": compile}
        run = adjsim.simulate(sde, sde.init(start()), TS, **settings)
        return run.logqp[-1].mean() + run.y[-1].square().mean()

    parameters = list(latent.parameters())
    direct = torch.autograd.grad(loss(adjsim.DirectAdjoint()), parameters)
    for compile in (False, True):
        found = torch.autograd.grad(loss(adjsim.ReversibleAdjoint(), compile), parameters)
        for one, other in zip(found, direct, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        ends = []
        for change in (1e-5, -1e-5):
            latent.rate.add_(change)
            ends.append(float(loss(adjsim.DirectAdjoint())))
            latent.rate.sub_(change)
    assert float(direct[1]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-7)


def test_it_runs_back_on_its_path():
    """Two systems and more, since the field of the divergence draws no numbers."""
    latent = Latent()
    sde = latent.equation().logqp(latent.h)
    settings = {"solver": adjsim.StochasticHeun(2.0**-8), "generator": PATH}
    with torch.no_grad():
        there = adjsim.simulate(sde, sde.init(start()), TS, **settings)
        back = adjsim.simulate(sde, there.final, TS[::-1], **settings)
    # The distances that the method has for the plain equation, and for the divergence.
    assert float((back.y[-1] - start()).abs().max()) < 1e-4
    assert float(back.logqp[-1].abs().max()) < 1e-2


def test_an_entry_without_noise_counts_nothing_where_the_drifts_agree():
    def drift(t, y):
        return torch.stack([-y[..., 0], y[..., 1]], -1)

    sde = adjsim.SDE(drift, lambda t, y: torch.tensor([0.0, 0.5], dtype=DTYPE).expand_as(y))
    more = sde.logqp(lambda t, y: torch.stack([-y[..., 0], 0 * y[..., 1]], -1))
    at = more.init(torch.ones(2, 2, dtype=DTYPE))
    torch.testing.assert_close(more.drift(0.0, at).logqp, torch.full((2, 1), 2.0, dtype=DTYPE))


def test_what_is_refused():
    latent = Latent()
    sde = latent.equation()
    with pytest.raises(TypeError, match="prior"):
        sde.logqp(lambda y: y)
    with pytest.raises(TypeError, match="on the SDE itself"):
        sde.logqp(latent.h).logqp(latent.h)
    with pytest.raises(TypeError, match="one tensor"):
        sde.logqp(latent.h).init(Pair(start(), start()))
    wrong = sde.logqp(lambda t, y: y[..., :1])
    with pytest.raises(ValueError, match="prior maps y"):
        adjsim.simulate(wrong, wrong.init(start()), TS, solver=adjsim.EulerMaruyama(DT))
