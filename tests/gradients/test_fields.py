"""Gradients of runs of vector fields: against differences, between adjoints, and against
torchdiffeq and torchsde themselves.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torchdiffeq
import torchsde

import adjsim
from adjsim import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ReversibleAdjoint,
    TimeAverage,
)
from adjsim.core.noise import Noise
from adjsim.core.tableaus import TABLEAUS
from adjsim.dynamics.fields.ode import ODE
from adjsim.dynamics.fields.sde import NOISES, SDE
from adjsim.simulation.simulate import run
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.continuous.ode import ONE_STEP, ODESolver
from adjsim.solvers.continuous.sde import SDESolver
from adjsim.solvers.reversible.reversible_heun import ReversibleHeun
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta
from adjsim.solvers.stochastic.milstein import Milstein
from adjsim.solvers.stochastic.stochastic_heun import StochasticHeun
from tests.fields import Diffusion, Net, equation, pair, start
from tests.gradients.test_sde import Coarse
from tests.gradients.test_table import agree, slope_along
from tests.problems import DYNAMICS, POTENTIALS, parameter, square

KINDS = ["final", "saves", "record", "average"]
# Every method with the final state, every kind of saved data with one method, every noise.
TABLE = [
    *((None, RungeKutta(method, 0.05), "final", False) for method in TABLEAUS),
    *((None, RungeKutta("rk4", 0.05), kind, False) for kind in KINDS[1:]),
    (None, RungeKutta("ssp3", 0.05), "saves", True),
    *((noise, adjsim.EulerMaruyama(0.05), "final", False) for noise in NOISES),
    *(("general", adjsim.EulerMaruyama(0.05), kind, False) for kind in KINDS[1:]),
    *((noise, adjsim.EulerMaruyama(0.05), "saves", True) for noise in NOISES),
    *((noise, SDESolver("midpoint", dt=0.05), "saves", False) for noise in NOISES),
    *((noise, SDESolver("milstein", dt=0.05), "final", False) for noise in NOISES[:3]),
    *((noise, SDESolver("srk", dt=0.05), "final", False) for noise in NOISES[:3]),
    ("general", SDESolver("heun", dt=0.05), "average", False),
    ("scalar", SDESolver("euler", dt=0.05), "final", True),
    *((noise, StochasticHeun(0.05), "final", False) for noise in NOISES),
    ("diagonal", StochasticHeun(0.05), "average", True),
    *((noise, Milstein(0.05), "final", False) for noise in NOISES[:2]),
    ("diagonal", Milstein(0.05), "saves", True),
    *((noise, ReversibleHeun(0.05), "final", False) for noise in (None, *NOISES)),
    ("general", ReversibleHeun(0.05), "record", True),
    ("diagonal", ReversibleHeun(0.05), "average", False),
]


def moment(state):
    return sum((torch.sin(1.3 * x) + 0.3 * x**2).sum(-1) for x in state)


def loss_of(dynamics, y, solver, kind, named, adjoint, noise=None):
    record = {"record": moment, "average": TimeAverage(moment, burn_in=0.1)}.get(kind)
    begin = dynamics.init(pair(y) if named else y)
    noise = Noise(4) if noise is None and dynamics.stochastic else noise
    result = run(dynamics, begin, [0.2, 0.3, 0.7], solver, adjoint, record, noise)
    if kind == "final":
        return moment(result.final).sum()
    if kind == "saves":
        frames = [getattr(result, name) for name in result.final._fields]
        return sum(moment([x[i] for x in frames]).sum() for i in range(3))
    return result.record.sum()


def gradients(noise, solver, kind, named, adjoint, path=None):
    dynamics, y = equation(noise, named), start().requires_grad_()
    inputs = {**dict(dynamics.named_parameters()), "y": y}
    value = loss_of(dynamics, y, solver, kind, named, adjoint, path)
    return dict(zip(inputs, torch.autograd.grad(value, list(inputs.values())), strict=True))


@pytest.mark.parametrize(("noise", "solver", "kind", "named"), TABLE, ids=str)
def test_direct_against_central_differences(noise, solver, kind, named):
    grads = gradients(noise, solver, kind, named, DirectAdjoint())
    generator = torch.Generator().manual_seed(3)
    along = {k: torch.randn(g.shape, generator=generator, dtype=g.dtype) for k, g in grads.items()}

    def loss(shifts):
        dynamics, y = equation(noise, named), start()
        inputs = {**dict(dynamics.named_parameters()), "y": y}
        with torch.no_grad():
            for name, shift in shifts.items():
                inputs[name] += shift
            return float(loss_of(dynamics, y, solver, kind, named, DirectAdjoint()))

    expected = sum(float((grads[name] * along[name]).sum()) for name in grads)
    # 1e-9 absolute: the rounding of losses of order 10 divided by h.
    assert slope_along(along, loss) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("noise", "solver", "kind", "named"),
    [row for row in TABLE if isinstance(row[1], SteppingSolver)],
    ids=str,
)
def test_checkpoint_equals_direct(noise, solver, kind, named):
    direct = gradients(noise, solver, kind, named, DirectAdjoint())
    for segments in (None, 3):
        agree(gradients(noise, solver, kind, named, CheckpointAdjoint(segments)), direct, 1e-12)


@pytest.mark.parametrize("exact", [False, True], ids=["floats", "exact"])
@pytest.mark.parametrize(
    ("noise", "kind", "named"),
    [
        *((noise, "final", False) for noise in (None, *NOISES)),
        ("diagonal", "saves", True),
        ("general", "average", False),
        ("scalar", "record", True),
    ],
    ids=str,
)
def test_reversible_heun_equals_direct(noise, kind, named, exact):
    solver = ReversibleHeun(0.05, exact=exact)
    direct = gradients(noise, solver, kind, named, DirectAdjoint())
    # Ten steps amplify rounding by a small factor.
    agree(gradients(noise, solver, kind, named, ReversibleAdjoint()), direct, 1e-12)


@pytest.mark.parametrize("name", ["hamiltonian", "chain-3", "force-field"])
def test_runge_kutta_takes_any_dynamics_without_noise(name):
    """It follows dopri5 to the order of rk4, and its checkpoint gradient equals the direct one."""
    if name == "force-field":
        dynamics = adjsim.Hamiltonian(Driven(), parameter(1.4))
    else:
        dynamics = DYNAMICS[name](POTENTIALS["double-well"]())
    begin = dynamics.init(*square())

    def grads(solver, adjoint):
        result = adjsim.simulate(dynamics, begin, [0.1, 0.3], solver=solver, adjoint=adjoint)
        value = sum((x**2).sum() for x in result.final)
        found = torch.autograd.grad(value, list(dynamics.parameters()))
        return dict(zip(dict(dynamics.named_parameters()), found, strict=True))

    direct = grads(RungeKutta("rk4", 0.01), DirectAdjoint())
    agree(grads(RungeKutta("rk4", 0.01), CheckpointAdjoint()), direct, 1e-12)
    # The tolerance of dopri5, 1e-7 of the state, and terms of a gradient that cancel.
    agree(grads(ODESolver(), DirectAdjoint()), direct, 1e-5)


class Driven(adjsim.ForceField):
    """A spring whose centre moves."""

    def __init__(self):
        super().__init__()
        self.k = parameter(1.3)

    def forward(self, t, position):
        return -self.k * (position - torch.sin(torch.as_tensor(t, dtype=position.dtype)))


@pytest.mark.parametrize("method", [*ONE_STEP, "dopri5", "bosh3", "explicit_adams"])
def test_ode_solver_equals_torchdiffeq(method):
    """States and both gradients of ODESolver with ODE(fun) are those of torchdiffeq's functions."""
    fixed = method in ONE_STEP or method == "explicit_adams"
    times = torch.tensor([0.0, 0.3, 0.5], dtype=torch.float64)
    options = {"step_size": 0.05} if fixed else {}
    if method == "explicit_adams":
        options["max_order"] = 4
    solver = ODESolver(method, dt=0.05) if fixed else ODESolver(method)
    net, y = Net(), start().requires_grad_()
    inputs = [*net.parameters(), y]

    def loss(frames):
        return moment([frames]).sum()

    for adjoint, solve in (
        (DirectAdjoint(), torchdiffeq.odeint),
        (BacksolveAdjoint(), torchdiffeq.odeint_adjoint),
    ):
        theirs = solve(net, y, times, rtol=1e-7, atol=1e-9, method=method, options=options)
        dynamics = ODE(net)
        mine = adjsim.simulate(dynamics, dynamics.init(y), times, solver=solver, adjoint=adjoint).y
        # Steps are counted in dt here and in time there, which rounds the times differently.
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        ours = torch.autograd.grad(loss(mine), inputs)
        reference = torch.autograd.grad(loss(theirs), inputs)
        # Torchdiffeq differentiates its choice of adaptive steps, which is not done here, and the
        # norms of its continuous adjoint differ: the tolerance of the solve.
        tolerance = 1e-11 if fixed else 1e-6
        for one, other in zip(ours, reference, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class OfTorchsde(torch.nn.Module):
    """The same equation written for torchsde, in time."""

    def __init__(self, sde, sde_type):
        super().__init__()
        self.sde, self.noise_type, self.sde_type = sde, sde.noise, sde_type

    def f(self, t, y):
        return self.sde.drift_fun(t, y)

    def g(self, t, y):
        g = self.sde.diffusion_fun(t, y)
        return g.unsqueeze(-1) if self.noise_type == "scalar" else g


class SamePath(torchsde.BaseBrownian):
    """The increments of a run's steps of dt, as a Brownian motion in time."""

    def __init__(self, noise, shape, dt):
        super().__init__()
        self.noise, self.rows, self.dt = noise, shape, dt

    def __call__(self, ta, tb=None, return_U=False, return_A=False):
        drawn = self.noise(round(float(ta) / self.dt), self.rows, start())
        return math.sqrt(self.dt) * drawn

    dtype, device = torch.float64, torch.device("cpu")
    levy_area_approximation = "none"

    @property
    def shape(self):
        return self.rows

    def __repr__(self):
        return "SamePath()"


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("method", ["euler", "midpoint", "heun", "euler_heun", "milstein"])
def test_sde_solver_equals_torchsde_on_the_same_path(noise, method):
    if (noise, method) == ("general", "milstein"):
        return
    # A binary fraction, so that torchsde counts the steps in time without rounding.
    dt, times = 0.0625, torch.tensor([0.0, 0.25, 0.5], dtype=torch.float64)
    sde, y = SDE(Net(), Diffusion(noise), noise=noise), start().requires_grad_()
    width = {"diagonal": 3, "scalar": 1}.get(noise, 2)
    of_torchsde = OfTorchsde(sde, "ito" if method in ("euler", "milstein") else "stratonovich")
    path = SamePath(Noise(4), (4, width), dt)
    theirs = torchsde.sdeint(of_torchsde, y, times, bm=path, method=method, dt=dt)
    solver = SDESolver(method, dt=dt)
    mine = run(sde, sde.init(y), times, solver, DirectAdjoint(), None, Noise(4)).y
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    inputs = [*sde.parameters(), y]
    ours = torch.autograd.grad(moment([mine]).sum(), inputs)
    reference = torch.autograd.grad(moment([theirs]).sum(), inputs)
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    own = {"euler": adjsim.EulerMaruyama, "heun": StochasticHeun, "milstein": Milstein}.get(method)
    if own is not None and (own is not Milstein or noise != "additive"):
        stepped = run(sde, sde.init(y), times, own(dt), DirectAdjoint(), None, Noise(4)).y
        torch.testing.assert_close(stepped, theirs, rtol=1e-12, atol=1e-12)
        for one, other in zip(
            torch.autograd.grad(moment([stepped]).sum(), inputs), reference, strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("noise", NOISES)
def test_reversible_heun_equals_torchsde(noise):
    dt, times = 0.0625, torch.tensor([0.0, 0.25, 0.5], dtype=torch.float64)
    sde, y = SDE(Net(), Diffusion(noise), noise=noise), start().requires_grad_()
    width = {"diagonal": 3, "scalar": 1}.get(noise, 2)
    theirs = torchsde.sdeint_adjoint(
        OfTorchsde(sde, "stratonovich"),
        y,
        times,
        bm=SamePath(Noise(4), (4, width), dt),
        method="reversible_heun",
        adjoint_method="adjoint_reversible_heun",
        adjoint_params=tuple(sde.parameters()),
        dt=dt,
    )
    solver, adjoint = ReversibleHeun(dt), ReversibleAdjoint()
    mine = run(sde, sde.init(y), times, solver, adjoint, None, Noise(4)).y
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    inputs = [*sde.parameters(), y]
    ours = torch.autograd.grad(moment([mine]).sum(), inputs)
    reference = torch.autograd.grad(moment([theirs]).sum(), inputs)
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_the_continuous_adjoint_approaches_direct_on_the_same_path(noise):
    """Every parameter of a neural SDE gets its gradient; the difference falls with dt."""
    errors = []
    for every in (8, 1):
        solver, path = SDESolver("midpoint", dt=0.00625 * every), Coarse(4, every)
        solve = functools.partial(gradients, noise, solver, "saves", False)
        direct, found = solve(DirectAdjoint(), path), solve(BacksolveAdjoint(), path)
        largest = max(float(g.norm()) for g in direct.values())
        errors.append(max(float((found[k] - g).norm()) for k, g in direct.items()) / largest)
    # Order 1/2 for general noise, 1 for others: a factor of 8 in dt is at least one of 2.
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.02


@pytest.mark.parametrize("adjoint", [DirectAdjoint(), CheckpointAdjoint(), BacksolveAdjoint()])
def test_every_parameter_of_a_neural_ode_receives_its_gradient(adjoint):
    solver = ODESolver() if isinstance(adjoint, BacksolveAdjoint) else RungeKutta("rk4", 0.05)
    dynamics = ODE(Net())
    final = adjsim.simulate(
        dynamics, dynamics.init(start()), [0, 1.0], solver=solver, adjoint=adjoint
    ).final
    moment(final).sum().backward()
    reference = gradients_of_a_tight_solve()
    for name, p in dynamics.named_parameters():
        # The error of rk4 at dt = 0.05, about 1e-6, and of dopri5 at its tolerances.
        torch.testing.assert_close(p.grad, reference[name], rtol=1e-5, atol=1e-5)


@functools.cache
def gradients_of_a_tight_solve():
    dynamics = ODE(Net())
    solver = ODESolver(rtol=1e-11, atol=1e-12)
    final = adjsim.simulate(dynamics, dynamics.init(start()), [0, 1.0], solver=solver).final
    found = torch.autograd.grad(moment(final).sum(), list(dynamics.parameters()))
    return dict(zip(dict(dynamics.named_parameters()), found, strict=True))


def test_float32_and_second_derivatives():
    single = ODE(Net().float())
    result = adjsim.simulate(
        single, single.init(start().float()), [0, 0.5], solver=RungeKutta("rk4", 0.05)
    )
    double = ODE(Net())
    exact = adjsim.simulate(double, double.init(start()), [0, 0.5], solver=RungeKutta("rk4", 0.05))
    assert result.y.dtype == torch.float32
    # Rounding of ten steps in float32.
    torch.testing.assert_close(result.y.double(), exact.y, rtol=1e-5, atol=1e-5)

    def final(y):
        return adjsim.simulate(
            double, double.init(y), [0, 0.2], solver=RungeKutta("heun", 0.05)
        ).final.y

    y = start((), 3).requires_grad_()
    assert torch.autograd.gradgradcheck(final, y)


@pytest.mark.parametrize("solver", [adjsim.EulerMaruyama(0.25), SDESolver(dt=0.25)], ids=repr)
def test_noise_in_a_vmap(solver):
    """A seed is drawn, which torch.func may not allow. A Brownian path belongs to times."""
    sde, y, path = SDE(Net(), Diffusion("diagonal")), start(), adjsim.BrownianPath(1, 0.125)

    def final(y, generator):
        return adjsim.simulate(
            sde, sde.init(y), [0, 0.5], solver=solver, generator=generator
        ).final.y

    single = torch.stack([final(x, path) for x in y])
    for randomness in ("error", "different"):
        many = torch.func.vmap(final, (0, None), randomness=randomness)
        with pytest.raises(RuntimeError, match=r"noise of a seed .* give generator=BrownianPath"):
            many(y, 1)
        torch.testing.assert_close(many(y, path), single, rtol=1e-14, atol=1e-14)
    with pytest.raises(RuntimeError, match=r"noise of a seed .* give generator=BrownianPath"):
        torch.func.jacfwd(final)(y[0], None)
    assert torch.func.jacfwd(final)(y[0], path).shape == (3, 3)
