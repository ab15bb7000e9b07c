"""SDE solvers: their gradients against central differences and against their continuous adjoint,
and what they refuse.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import adjsim
from adjsim import BacksolveAdjoint, DirectAdjoint, InstabilityError, SDESolver, TimeAverage
from adjsim.core.noise import Noise
from adjsim.simulation.simulate import run
from adjsim.solvers.continuous.sde import ITO, STRATONOVICH
from tests.gradients.test_table import agrees_with_differences
from tests.problems import POTENTIALS, STOCHASTIC, parameter, slow_but, square, start as start_of

KINDS = ["final", "saves", "record", "average"]
NAMES = ["langevin", "langevin-atoms", "generalised-2", "overdamped"]


class Coarse(Noise):
    """The same Brownian path seen in steps ``every`` times longer."""

    def __init__(self, seed: int, every: int) -> None:
        super().__init__(seed)
        self.every = every

    def __call__(self, step, shape, like):
        fine = [
            super(Coarse, self).__call__(step * self.every + i, shape, like)
            for i in range(self.every)
        ]
        return torch.stack(fine).sum(0) / math.sqrt(self.every)


def moment(state):
    return sum((torch.sin(1.3 * x) + 0.3 * x**2).sum() for x in state)


def loss_of(dynamics, position, momentum, kind, solver, adjoint, noise, time=0.24, seed=5):
    times = [0.0, time / 3, time]
    record = {"record": moment, "average": TimeAverage(moment, burn_in=time / 3)}.get(kind)
    result = run(
        dynamics,
        start_of(dynamics, position, momentum, seed),
        times,
        solver,
        adjoint,
        record,
        noise,
    )
    if kind == "final":
        return moment(result.final)
    if kind == "saves":
        return sum(moment([getattr(result, f)[i] for f in result.final._fields]) for i in range(3))
    return result.record.sum()


def gradients(name, kind, solver, adjoint, noise, potential="plain-module", time=0.24, seed=5):
    dynamics = STOCHASTIC[name](POTENTIALS[potential]())
    position, momentum = (x.requires_grad_() for x in square((2,)))
    inputs = {**dict(dynamics.named_parameters()), "position": position, "momentum": momentum}
    value = loss_of(dynamics, position, momentum, kind, solver, adjoint, noise, time, seed)
    found = torch.autograd.grad(value, list(inputs.values()), allow_unused=True)
    return {
        k: torch.zeros_like(x) if g is None else g
        for (k, x), g in zip(inputs.items(), found, strict=True)
    }


def distance(mine, theirs):
    largest = max(float(g.norm()) for g in theirs.values())
    return max(
        float((mine[k] - g).norm()) / max(float(g.norm()), 1e-2 * largest)
        for k, g in theirs.items()
    )


@pytest.mark.parametrize(
    ("name", "method", "kind"),
    slow_but(
        lambda name, method, kind: (
            (method, kind) == ("midpoint", "saves")
            or (name == NAMES[0] and (method != "midpoint" or kind == "average"))
        ),
        [
            (name, *row)
            for name in NAMES
            for row in (
                *(("midpoint", kind) for kind in KINDS),
                ("srk", "final"),
                ("euler", "average"),
                ("heun", "saves"),
            )
        ],
        # The other methods have one dynamics.
        marathon=lambda name, method, kind: name != NAMES[0] and method != "midpoint",
    ),
)
def test_direct_against_central_differences_on_common_noise(name, method, kind):
    solver = SDESolver(method, dt=0.02)

    def loss(shifts):
        dynamics = STOCHASTIC[name](POTENTIALS["plain-module"]())
        position, momentum = square((2,))
        inputs = {**dict(dynamics.named_parameters()), "position": position, "momentum": momentum}
        for key, shift in shifts.items():
            inputs[key] += shift
        return float(loss_of(dynamics, position, momentum, kind, solver, DirectAdjoint(), Noise(4)))

    # 1e-8 absolute for terms that cancel.
    grads = gradients(name, kind, solver, DirectAdjoint(), Noise(4))
    agrees_with_differences(grads, loss, 1e-8)


@pytest.mark.parametrize(
    ("name", "method", "order"),
    slow_but(
        lambda name, method, order: (name, method) == ("langevin", "midpoint"),
        [
            (name, method, 1)
            for name in ("langevin", "generalised-2", "overdamped")
            for method in ("midpoint", "heun", "euler", "euler_heun", "milstein", "srk")
        ],
        # Every method with one dynamics, and every dynamics with one method of each kind.
        marathon=lambda name, method, order: (
            name == "generalised-2" or (name != "overdamped" and method not in ("midpoint", "heun"))
        ),
    ),
)
def test_the_continuous_adjoint_approaches_direct_on_the_same_path(name, method, order):
    """The difference falls with dt at least at the order of the method (that of the adjoint's own
    method, for srk).
    """
    errors = []
    for every in (4, 1):
        solver = SDESolver(method, dt=0.002 * every)
        noise = Coarse(4, every)
        # A draw of the memory in which the gradient by no parameter nearly cancels, which would
        # make its relative error large.
        direct = gradients(name, "saves", solver, DirectAdjoint(), noise, "harmonic", seed=7)
        errors.append(
            distance(
                gradients(name, "saves", solver, BacksolveAdjoint(), noise, "harmonic", seed=7),
                direct,
            )
        )
    slope = math.log2(errors[0] / errors[-1]) / 2
    assert slope > order - 0.2, errors
    assert errors[-1] < 0.02


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_but(lambda name, kind: kind == "saves", itertools.product(NAMES, KINDS)),
)
def test_reversible_heun_equals_backpropagation_at_decimal_steps(name, kind):
    solver = SDESolver("reversible_heun", dt=0.003)
    direct = gradients(name, kind, solver, DirectAdjoint(), Noise(4), "double-well", 0.09)
    swept = gradients(name, kind, solver, BacksolveAdjoint(), Noise(4), "double-well", 0.09)
    assert distance(swept, direct) < 1e-12


@pytest.mark.parametrize("method", STRATONOVICH + ITO)
def test_the_path_does_not_depend_on_save_times_adjoint_or_batch(method):
    dynamics = STOCHASTIC["langevin"](POTENTIALS["lennard-jones"]())
    position, momentum = square((7,))
    solver = SDESolver(method, dt=0.01)

    def path(times, adjoint, count=7):
        start = dynamics.init(position[:count], momentum[:count])
        generator = torch.Generator().manual_seed(2)
        return adjsim.simulate(
            dynamics, start, times, solver=solver, adjoint=adjoint, generator=generator
        )

    every, few = (
        path(torch.arange(21) * 0.01, DirectAdjoint()),
        path([0.0, 0.07, 0.2], DirectAdjoint()),
    )
    assert torch.equal(few.position, every.position[[0, 7, 20]])
    assert torch.equal(path([0.0, 0.2], BacksolveAdjoint()).final.momentum, every.final.momentum)
    # torch adds the terms of a row in another order for another length, which the pair sums may
    # feel in the last bit.
    torch.testing.assert_close(
        path([0.0, 0.2], DirectAdjoint(), count=3).final.momentum,
        every.final.momentum[:3],
        rtol=1e-13,
        atol=1e-13,
    )


def test_a_seed_reproduces_a_run():
    dynamics = STOCHASTIC["generalised-1"](POTENTIALS["double-well"]())
    start = start_of(dynamics, *square())
    solver = SDESolver(dt=0.01)
    torch.manual_seed(8)
    a = adjsim.simulate(dynamics, start, [0.0, 0.1], solver=solver).final
    b = adjsim.simulate(dynamics, start, [0.0, 0.1], solver=solver).final
    torch.manual_seed(8)
    c = adjsim.simulate(dynamics, start, [0.0, 0.1], solver=solver).final
    d = adjsim.simulate(
        dynamics, start, [0.0, 0.1], solver=solver, generator=torch.Generator().manual_seed(8)
    ).final
    assert torch.equal(a.momentum, c.momentum)
    assert torch.equal(a.momentum, d.momentum)
    assert not torch.equal(a.momentum, b.momentum)


def test_float32_follows():
    dynamics = STOCHASTIC["langevin"](POTENTIALS["double-well"]())
    position, momentum = square()
    single = dynamics.init(position.float(), momentum.float())
    double = dynamics.init(position, momentum)
    for method in ("midpoint", "srk", "reversible_heun"):
        ends = []
        for start in (single, double):
            generator = torch.Generator().manual_seed(1)
            ends.append(
                adjsim.simulate(
                    dynamics,
                    start,
                    [0.0, 0.2],
                    solver=SDESolver(method, dt=0.01),
                    generator=generator,
                ).final
            )
        assert ends[0].position.dtype == torch.float32
        torch.testing.assert_close(
            ends[0].position.double(), ends[1].position, rtol=1e-5, atol=1e-5
        )


def langevin(friction):
    dynamics = adjsim.Langevin(adjsim.DoubleWell(parameter(1.0)), friction=friction)
    return dynamics, dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))


def test_the_continuous_adjoint_is_refused_beyond_its_reach():
    dynamics, start = langevin(4.0)
    solver = SDESolver(dt=1 / 64)
    options = {"solver": solver, "adjoint": BacksolveAdjoint()}
    with pytest.raises(
        InstabilityError,
        match=r"friction x time is 8 here and the limit 5. Save at least every 1\.25",
    ):
        adjsim.simulate(dynamics, start, [0.0, 2.0], **options)
    # Saved often enough, or differentiated directly, it runs.
    adjsim.simulate(dynamics, start, [0.0, 1.0, 2.0], **options)
    adjsim.simulate(dynamics, start, [0.0, 2.0], solver=solver)
    weak, start = langevin(0.1)
    adjsim.simulate(weak, start, [0.0, 2.0], **options)


@pytest.mark.marathon
def test_saving_more_often_keeps_the_gradient():
    """What the refusal advises is true: at friction T = 16 with 16 save times the gradient is that
    of direct.
    """
    dynamics, start = langevin(parameter(4.0))
    grads = []
    for adjoint in (DirectAdjoint(), BacksolveAdjoint()):
        result = adjsim.simulate(
            dynamics,
            start,
            torch.linspace(0.0, 4.0, 17),
            solver=SDESolver(dt=1 / 256),
            adjoint=adjoint,
            generator=torch.Generator().manual_seed(1),
        )
        grads.append(
            torch.stack(
                torch.autograd.grad(result.final.position.sum(), list(dynamics.parameters()))
            )
        )
    # The order-one difference of the two at this dt.
    torch.testing.assert_close(grads[1], grads[0], rtol=0.02, atol=0.0)


def test_reversible_heun_is_refused_beyond_its_reach():
    dynamics, start = langevin(4.0)
    with pytest.raises(InstabilityError, match=r"friction x time is 4 here.*BAOAB"):
        adjsim.simulate(dynamics, start, [0.0, 1.0], solver=SDESolver("reversible_heun", dt=1 / 64))
    adjsim.simulate(dynamics, start, [0.0, 0.5], solver=SDESolver("reversible_heun", dt=1 / 64))


def test_the_rate_of_the_overdamped_equation_is_its_curvature():
    """Two harmonic directions: the stiffer, over the friction."""
    stiffness = torch.tensor([[2.0], [7.0]])
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(stiffness), friction=0.5)
    assert dynamics.damping(dynamics.init(torch.randn(2, 1))) == pytest.approx(14.0, rel=1e-9)
    with pytest.raises(
        InstabilityError, match="curvature / friction x time is 14 here and the limit 5"
    ):
        adjsim.simulate(
            dynamics,
            dynamics.init(torch.ones(2, 1)),
            [0.0, 1.0],
            solver=SDESolver(dt=0.01),
            adjoint=BacksolveAdjoint(),
        )


def test_what_is_refused():
    dynamics, start = langevin(1.0)
    hamiltonian = adjsim.Hamiltonian(adjsim.Harmonic())
    still = hamiltonian.init(torch.ones(1, 1), torch.zeros(1, 1))
    with pytest.raises(TypeError, match="Langevin has: use SDESolver"):
        adjsim.simulate(dynamics, start, [0.0, 0.1], solver=adjsim.ODESolver())
    with pytest.raises(TypeError, match="Hamiltonian has none: use ODESolver"):
        adjsim.simulate(hamiltonian, still, [0.0, 0.1], solver=SDESolver(dt=0.01))
    with pytest.raises(ValueError, match="unknown SDE method 'log_ode'"):
        SDESolver("log_ode", dt=0.01)
    with pytest.raises(ValueError, match="takes no tolerances"):
        adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.1],
            solver=SDESolver(dt=0.01),
            adjoint=BacksolveAdjoint(rtol=1e-3),
        )
    with pytest.raises(TypeError, match="these do: BacksolveAdjoint, DirectAdjoint"):
        adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.1],
            solver=SDESolver(dt=0.01),
            adjoint=adjsim.ReversibleAdjoint(),
        )
    with pytest.raises(TypeError, match="EulerMaruyama is for OverdampedLangevin"):
        adjsim.simulate(dynamics, start, [0.0, 0.1], solver=adjsim.EulerMaruyama(0.01))
    bussi = adjsim.Bussi(adjsim.Harmonic())  # SDESolver cannot take it either
    for solver in (adjsim.EulerMaruyama, adjsim.Milstein, adjsim.StochasticHeun):
        with pytest.raises(TypeError, match=r"for Bussi use (RungeKutta\(.*\), )?a splitting\.$"):
            adjsim.simulate(bussi, start, [0.0, 0.1], solver=solver(0.01))
    with pytest.raises(ValueError, match="not an integer number of steps"):
        adjsim.simulate(dynamics, start, [0.0, 0.105], solver=SDESolver(dt=0.01))
    overdamped = adjsim.OverdampedLangevin(adjsim.Harmonic())
    with pytest.raises(ValueError, match="no momentum"):
        overdamped.init(torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(TypeError, match="EulerMaruyama"):
        adjsim.simulate(
            overdamped,
            overdamped.init(torch.ones(1, 1)),
            [0.0, 0.1],
            solver=adjsim.Splitting("D", 0.01),
        )
    with pytest.raises(ValueError, match="as many of each"):
        adjsim.GeneralizedLangevin(adjsim.Harmonic(), rates=(1.0, 2.0))
    with pytest.raises(ValueError, match="friction must be positive"):
        adjsim.Langevin(adjsim.Harmonic(), friction=0.0)


def test_the_bath_refuses_a_step_too_long_for_couplings():
    """One exponential, coupling 3, rate 1: the pivot of exp(-M h) is zero near h = 0.57, from its
    own closed form.
    """
    dynamics = adjsim.GeneralizedLangevin(adjsim.Harmonic(), rates=(1.0,), strengths=(9.0,))
    start = dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))
    w = math.sqrt(9.0 - 0.25)
    # p(h) = exp(-h/2) (cos wh + sin wh / 2w) from p = 1, z = 0: its first zero.
    zero = (math.pi - math.atan(2 * w)) / w
    with pytest.raises(ValueError, match=f"which needs h < {zero:.3g}"):
        adjsim.simulate(dynamics, start, [0.0, 0.6], solver=adjsim.Splitting("BAGAB", 0.6))
    adjsim.simulate(dynamics, start, [0.0, 0.55], solver=adjsim.Splitting("BAGAB", 0.55))
    # G occurring twice takes half the step each.
    adjsim.simulate(dynamics, start, [0.0, 1.1], solver=adjsim.Splitting("GBABG", 1.1))


@pytest.mark.parametrize(
    ("adjoint", "burn_in"), [(DirectAdjoint(), 0.12), (BacksolveAdjoint(), 0.0)], ids=repr
)
@pytest.mark.parametrize("method", STRATONOVICH + ITO)
def test_time_average_is_over_the_ends_of_steps(method, adjoint, burn_in):
    """The stages of a step with noise have other moments than the state: with friction 3 and dt =
    0.05 the mean of p^2 at the midpoints is 0.93, and after the steps 0.994.
    """
    dynamics = adjsim.Langevin(adjsim.Harmonic(), kT=1.0, friction=parameter(3.0))
    start = dynamics.init(*(torch.ones(2, 1, dtype=torch.float64) for _ in range(2)))
    noise, solver = Noise(1), SDESolver(method, dt=0.05)

    def square(state):
        return (state.momentum**2).sum(-1)

    found = []
    for times, record in (
        ([0.0, 0.2, 0.5], TimeAverage(square, burn_in)),
        ([0.05 * k for k in range(11)], square),
    ):
        run_ = run(dynamics, start, times, solver, adjoint, record, noise)
        # Steps 3 to 10, or all, end after the burn-in.
        first = 3 if burn_in else 1
        mean = run_.record if isinstance(record, TimeAverage) else run_.record[first:].mean(0)
        (slope,) = torch.autograd.grad(mean.sum(), dynamics.friction)
        found.append([*mean.tolist(), float(slope)])
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_an_equation_takes_arguments():
    """A computed tensor that drift and diffusion read has the gradient of differences."""
    raw, start = torch.tensor([0.7, 0.4], requires_grad=True), torch.ones(3, 2)

    def end(raw, adjoint, **options):
        equation = adjsim.SDE(
            lambda t, y, p: -p[0] * y**3, lambda t, y, p: p[1] * torch.cos(y), args=(raw.exp(),)
        )
        run = adjsim.simulate(
            equation, equation.init(start), [0.0, 0.2], solver=adjsim.EulerMaruyama(0.1),
            adjoint=adjoint, generator=0, **options,
        )  # fmt: skip
        return run.final.y.square().sum()

    along, h = torch.tensor([1.0, -0.5]), 1e-5
    with torch.no_grad():
        more, less = (end(raw + s * h * along, adjsim.DirectAdjoint()) for s in (1, -1))
    found = [
        torch.autograd.grad(end(raw, adjoint), raw)[0]
        for adjoint in (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint())
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)
    assert float((found[0] * along).sum()) == pytest.approx(float(more - less) / (2 * h), rel=1e-6)
    with pytest.raises(TypeError, match="the state and 1 args, and <lambda> takes"):
        adjsim.SDE(lambda t, y: y, lambda t, y, p: p * y, args=(1.0,))
