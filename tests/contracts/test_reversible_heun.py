"""Reversible Heun steps: exact reversal, weak orders, stability, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import adjsim
from adjsim import CheckpointAdjoint, ReversibleAdjoint
from adjsim.dynamics.fields.ode import ODE
from adjsim.dynamics.fields.sde import NOISES, SDE
from adjsim.solvers.reversible.reversible_heun import ReversibleHeun
from adjsim.solvers.stochastic.milstein import Milstein
from adjsim.solvers.stochastic.stochastic_heun import StochasticHeun
from tests.fields import Diffusion, Net, equation, start
from tests.flows import Linear
from tests.problems import parameter


class Turn(torch.nn.Module):
    """A rotation, whose spectrum is imaginary, and a diffusion that keeps the circle."""

    def __init__(self) -> None:
        super().__init__()
        self.speed, self.size = parameter(1.0), parameter(0.3)

    def drift(self, t, y):
        return self.speed * torch.stack([-y[..., 1], y[..., 0]], -1)

    def diffusion(self, t, y):
        return self.size * torch.stack([-y[..., 1], y[..., 0]], -1)


def turning(noise):
    turn = Turn()
    if noise is None:
        return ODE(turn.drift)
    return SDE(turn.drift, turn.diffusion, noise="scalar")


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, pytest.param("scalar", marks=pytest.mark.slow)])
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exact_steps_come_back_bit_for_bit(noise, compile):
    steps = 20_000 if compile else 500
    dynamics, solver = turning(noise), ReversibleHeun(0.01, exact=True)
    y = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)

    def gradient(adjoint, compile=False):
        run = adjsim.simulate(
            dynamics,
            dynamics.init(y),
            [0.0, steps * solver.dt],
            solver=solver,
            adjoint=adjoint,
            generator=1,
            compile=compile,
        )
        return run, torch.autograd.grad(
            run.y[-1].sum(), list(dynamics.parameters()), materialize_grads=True, allow_unused=True
        )

    run, mine = gradient(ReversibleAdjoint(), compile)
    assert run.stats["reconstruction_error"] == 0.0
    assert run.stats["buffer_bits"] == 0.0
    if noise is not None:
        # Scalar noise along the circle, in the sense of Stratonovich, keeps the radius up to the
        # error of the steps.
        radii = run.y[-1].detach().norm(dim=-1)
        torch.testing.assert_close(radii, y.norm(dim=-1), rtol=0.05, atol=0)
    if not compile:
        _, theirs = gradient(CheckpointAdjoint())
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("noise", [None, *NOISES])
def test_a_system_does_not_depend_on_its_batch(noise):
    dynamics, y = equation(noise), start((2, 3))
    for solver in (ReversibleHeun(0.1), ReversibleHeun(0.1, exact=True)):
        run = adjsim.simulate(dynamics, dynamics.init(y), [0, 1.0], solver=solver, generator=5)
        one = adjsim.simulate(dynamics, dynamics.init(y[:1]), [0, 1.0], solver=solver, generator=5)
        torch.testing.assert_close(run.final.y[:1], one.final.y, rtol=1e-13, atol=1e-13)


@torch.no_grad()
def test_second_order_without_noise():
    dynamics = ODE(Net())
    errors = []
    exact = adjsim.simulate(
        dynamics, dynamics.init(start()), [0, 0.8], solver=adjsim.RungeKutta("rk4", 0.005)
    ).final.y
    for dt in (0.02, 0.01):
        found = adjsim.simulate(
            dynamics, dynamics.init(start()), [0, 0.8], solver=ReversibleHeun(dt)
        ).final.y
        errors.append(float((found - exact).norm()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.1)


# Averages of linear equations obey linear recursions: with unit and zero noise the mean map of a
# step is known exactly, so no sampling error enters. For dy = a y dt + s y o dW in the sense of
# Stratonovich E y = exp((a + s^2/2) t), in that of Ito E y = exp(a t); E y^2 has twice a and
# 4 s^2/2 or s^2 more.
NODES = (
    torch.tensor([-math.sqrt(3.0), 0.0, math.sqrt(3.0)], dtype=torch.float64),
    torch.tensor([1 / 6, 2 / 3, 1 / 6], dtype=torch.float64),
)


class ThreePoints(adjsim.core.noise.Noise):
    """Gauss-Hermite nodes in place of one step's normal numbers: exact up to the fifth moment."""

    def __init__(self) -> None:
        super().__init__(0)

    def __call__(self, step, shape, like):
        return NODES[0].reshape(3, 1).expand(shape)


@pytest.mark.parametrize(
    ("make", "ito"), [(adjsim.EulerMaruyama, True), (Milstein, True), (StochasticHeun, False)]
)
def test_weak_order_one_and_the_right_calculus(make, ito):
    a, s = -0.7, 0.6
    sde = SDE(lambda t, y: a * y, lambda t, y: s * y)
    one = sde.init(torch.ones(3, 1, dtype=torch.float64))
    means = (a, 2 * a + s * s) if ito else (a + s * s / 2, 2 * a + 2 * s * s)
    errors = []
    for dt in (0.1, 0.05, 0.025):
        found = adjsim.simulation.simulate.run(
            sde, one, [0.0, dt], make(dt), adjsim.DirectAdjoint(), None, ThreePoints()
        ).final.y[:, 0]
        # Steps multiply y by independent factors, so moments are powers of one step's.
        moments = [(NODES[1] * found**k).sum() ** round(1 / dt) for k in (1, 2)]
        errors.append(
            sum(abs(float(m) - math.exp(rate)) for m, rate in zip(moments, means, strict=True))
        )
    slopes = [math.log2(x / y) for x, y in itertools.pairwise(errors)]
    assert slopes[-1] == pytest.approx(1.0, abs=0.1), errors


def test_copies_move_apart_under_contraction_at_the_rate_of_the_docstring():
    dynamics = ODE(Linear(-1.0))
    y = torch.ones(1, dtype=torch.float64)
    # With e = a dt, d = y - z obeys d' = -(1 + e) d + e^2 z/2. From d = 0 its alternating part is
    # e^2/4 exp(a t). The size of y is estimated by 256 steps of the drift at the start.
    dt = 0.01
    expected = math.log(0.1 * 256 * dt / (dt**2 / 4))
    with pytest.raises(FloatingPointError, match=r"contracts .* Use Coupled") as error:
        adjsim.simulate(dynamics, dynamics.init(y), [0.0, 40.0], solver=ReversibleHeun(dt))
    time = float(str(error.value).split("t = ")[1].split(")")[0])
    # The next order is e of the exponent.
    assert time == pytest.approx(expected, rel=dt)
    adjsim.simulate(dynamics, dynamics.init(y), [0.0, 4.0], solver=ReversibleHeun(dt))


@pytest.mark.parametrize(
    ("dynamics", "solver", "kind", "says"),
    [
        (lambda: adjsim.Hamiltonian(adjsim.Harmonic()), ReversibleHeun, TypeError, "splitting"),
        (lambda: ODE(Net()), StochasticHeun, TypeError, "RungeKutta"),
        (lambda: ODE(Net()), Milstein, TypeError, "is for SDE"),
        (lambda: equation("general"), Milstein, ValueError, "use EulerMaruyama"),
        (lambda: equation("additive"), Milstein, ValueError, "use EulerMaruyama"),
        (
            # Cross terms that vanish at the start, where the first and second entry are zero.
            lambda: SDE(Net(), lambda t, y: y * y.roll(1, -1) ** 2),
            Milstein,
            ValueError,
            "depends on other entries",
        ),
        (
            lambda: SDE(Net(), lambda t, y: y.flip(-1)),
            Milstein,
            ValueError,
            "depends on other entries",
        ),
    ],
)
def test_what_is_refused(dynamics, solver, kind, says):
    made = dynamics()
    y = start() if isinstance(made, (ODE, SDE)) else torch.zeros(1, 1)
    if solver is Milstein and isinstance(made, SDE):
        y = y * torch.tensor([0.0, 0.0, 1.0], dtype=y.dtype)
    begin = made.init(y) if isinstance(made, (ODE, SDE)) else made.init(y, y)
    with pytest.raises(kind, match=says):
        adjsim.simulate(made, begin, [0.0, 0.1], solver=solver(0.1), generator=0)


def test_steps_without_an_inverse_name_the_adjoints_that_fit():
    sde = SDE(Net(), Diffusion("diagonal"))
    with pytest.raises(TypeError, match="use CheckpointAdjoint"):
        adjsim.simulate(
            sde, sde.init(start()), [0.0, 0.1], solver=Milstein(0.1), adjoint=ReversibleAdjoint()
        )
