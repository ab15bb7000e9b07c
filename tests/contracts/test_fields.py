"""Vector fields: states, times, batches, estimators, compiled runs, and what is refused."""

from __future__ import annotations

import copy
import io
from collections import namedtuple

import pytest
import torch
from torch import nn

import adjsim
from adjsim import BacksolveAdjoint, CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint
from adjsim.core.state import FieldState
from adjsim.core.tableaus import Tableau
from adjsim.dynamics.fields.ode import ODE
from adjsim.dynamics.fields.sde import NOISES, SDE
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.solvers.continuous.sde import SDESolver
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta
from tests.fields import Diffusion, Net, Pair, equation, pair, start

RK4 = RungeKutta("rk4", 0.1)


class Decay(nn.Module):
    def __init__(self, k=0.5):
        super().__init__()
        self.k = nn.Parameter(torch.tensor(k))

    def forward(self, t, y):
        return -self.k * y


class Size(nn.Module):
    def __init__(self, size=0.3):
        super().__init__()
        self.size = size

    def forward(self, t, y):
        return self.size * torch.ones_like(y)


def final(dynamics, y, solver, times=(0.0, 1.0), **options):
    return adjsim.simulate(dynamics, dynamics.init(y), times, solver=solver, **options).final


def test_a_state_is_a_tensor_or_a_named_tuple():
    ode, y = ODE(Net()), start()
    begin = ode.init(y.tolist())
    assert isinstance(begin, FieldState)
    assert begin.y.dtype == torch.float64
    named = equation(None, named=True)
    found = final(named, pair(y), RK4)
    assert isinstance(found, Pair)
    torch.testing.assert_close(torch.cat(tuple(found), -1), final(ode, y, RK4).y, rtol=0, atol=0)
    assert next(iter(dict(ode.named_parameters()))) == "fun.decay"


def test_a_trajectory_names_its_field_and_can_be_saved_and_continued():
    ode = ODE(Net())
    trajectory = adjsim.simulate(ode, ode.init(start()), [0.3, 0.5, 0.8], solver=RK4)
    assert repr(trajectory) == (
        "Trajectory(3 frames of FieldState, states, t = 0.3 to 0.8, y (4, 3))"
    )
    file = io.BytesIO()
    torch.save(trajectory, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded.y, trajectory.y)
    assert torch.equal(copy.deepcopy(trajectory).y, trajectory.y)
    half = FieldState(trajectory.y[1])
    rest = adjsim.simulate(ode, half, [0.5, 0.8], solver=RK4)
    # Times are begin + k dt, which rounds differently from another begin.
    torch.testing.assert_close(rest.final.y, trajectory.final.y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("noise", [None, *NOISES])
def test_a_system_does_not_depend_on_its_batch(noise):
    dynamics, y = equation(noise), start((2, 3))
    solver = RK4 if noise is None else adjsim.EulerMaruyama(0.1)
    whole = final(dynamics, y, solver, generator=3).y
    flat = final(dynamics, y.reshape(6, 3), solver, generator=3).y
    torch.testing.assert_close(whole.reshape(6, 3), flat, rtol=1e-14, atol=1e-14)
    some = final(dynamics, y.reshape(6, 3)[:2], solver, generator=3).y
    torch.testing.assert_close(some, flat[:2], rtol=1e-14, atol=1e-14)
    alone = final(dynamics, y[0, 0], solver, generator=3).y
    torch.testing.assert_close(alone, flat[0], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("noise", NOISES)
def test_named_tuples_have_the_path_of_one_tensor(noise):
    y = start()
    for solver in (adjsim.EulerMaruyama(0.1), SDESolver("midpoint", dt=0.1)):
        one = final(equation(noise), y, solver, generator=3).y
        named = final(equation(noise, named=True), pair(y), solver, generator=3)
        torch.testing.assert_close(torch.cat(tuple(named), -1), one, rtol=1e-13, atol=1e-13)


def test_noise_has_the_variance_of_its_amplitude():
    """Of y' = g dW, y(1) has the covariance g g^T; a scalar noise moves all entries together."""
    matrix = torch.tensor([[0.5, 0.2, 0.0], [-0.1, 0.4, 0.3]])
    cases = {
        "diagonal": (lambda t, y: 0.4 + 0 * y, 0.16 * torch.eye(2)),
        "scalar": (lambda t, y: 0.4 + 0 * y, 0.16 * torch.ones(2, 2)),
        "additive": (lambda t, y: matrix.expand(*y.shape[:-1], 2, 3), matrix @ matrix.T),
        "general": (lambda t, y: matrix.expand(*y.shape[:-1], 2, 3), matrix @ matrix.T),
    }
    for noise, (diffusion, expected) in cases.items():
        sde = SDE(lambda t, y: 0 * y, diffusion, noise=noise)
        ends = final(sde, torch.zeros(4000, 2), adjsim.EulerMaruyama(0.25), generator=1).y
        # Four standard errors of an entry of the covariance.
        torch.testing.assert_close(torch.cov(ends.T), expected, rtol=0, atol=4 * 0.3 / 4000**0.5)


@pytest.mark.parametrize(
    "estimator",
    [adjsim.Pathwise(), adjsim.Pathwise(CheckpointAdjoint()), adjsim.FiniteDifference()],
    ids=repr,
)
@pytest.mark.parametrize("observable", ["average", "final"])
def test_estimators_on_an_ornstein_uhlenbeck_process(estimator, observable):
    """E y(1) = y0 exp(-k), and the mean over time is y0 (1 - exp(-k)) / k."""
    sde = SDE(Decay(), Size())
    observe = (
        adjsim.TimeAverage(lambda s: s.y[:, 0])
        if observable == "average"
        else adjsim.Final(lambda s: s.y[:, 0])
    )
    simulation = adjsim.Simulation(
        sde, lambda n, g: sde.init(torch.ones(n, 1)), [0, 1.0], solver=adjsim.EulerMaruyama(0.05)
    )
    found = estimator(simulation, observe, replicas=400, chunks=4, generator=0)
    k = torch.tensor(0.5, requires_grad=True)
    exact = torch.exp(-k) if observable == "final" else (1 - torch.exp(-k)) / k
    (slope,) = torch.autograd.grad(exact, k)
    # The bias of dt = 0.05, and six standard errors of four chunks.
    for value, error, expected in (
        (found.value, found.value_stderr, exact.detach()),
        (found.grad["drift_fun.k"], found.grad_stderr["drift_fun.k"], slope),
    ):
        assert abs(float(value - expected)) < 0.02 + 6 * float(error)


def test_a_vector_field_has_no_forces():
    field = ODE(Net())
    assert field.potential is None
    with pytest.raises(TypeError, match="the dynamics has no potential"):
        ForceEvaluator(field.potential).values((torch.zeros(1, 1),), 0.0)


def test_girsanov_on_an_ornstein_uhlenbeck_process():
    """The gradient of the discrete steps: E y = (1 - k dt)^n."""
    sde = SDE(Decay(), Size())
    simulation = adjsim.Simulation(
        sde, lambda n, g: sde.init(torch.ones(n, 1)), [0, 1.0], solver=adjsim.EulerMaruyama(0.1)
    )
    found = adjsim.Girsanov()(
        simulation, adjsim.Final(lambda s: s.y[:, 0]), replicas=2000, chunks=8, generator=0
    )
    grad, error = found.grad["drift_fun.k"], found.grad_stderr["drift_fun.k"]
    # Five standard errors of eight chunks.
    assert abs(float(grad) + 0.95**9) < 5 * float(error)
    assert float(error) < 0.1
    noisy = SDE(Decay(), Decay())
    with pytest.raises(ValueError, match="the diffusion has a parameter that requires grad"):
        adjsim.Girsanov()(
            adjsim.Simulation(
                noisy,
                lambda n, g: noisy.init(torch.ones(n, 1)),
                [0, 1.0],
                adjsim.EulerMaruyama(0.1),
            ),
            adjsim.Final(lambda s: s.y[:, 0]),
            replicas=4,
        )


@pytest.mark.slow
def test_compare_shows_estimators_side_by_side():
    sde = SDE(Decay(), Size())
    simulation = adjsim.Simulation(
        sde, lambda n, g: sde.init(torch.ones(n, 1)), [0, 0.5], solver=adjsim.EulerMaruyama(0.1)
    )
    table = adjsim.compare(
        simulation,
        adjsim.Final(lambda s: s.y[:, 0]),
        {"pathwise": adjsim.Pathwise(), "differences": adjsim.FiniteDifference()},
        replicas=64,
        generator=0,
    )
    assert "differences" in str(table)
    # On common noise they agree to the error of the differences.
    pathwise, differences = table.estimates.values()
    torch.testing.assert_close(
        pathwise.grad["drift_fun.k"], differences.grad["drift_fun.k"], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("noise", [None, "diagonal", "general"])
@torch.no_grad()
def test_compiled_equals_eager(noise):
    dynamics = (
        ODE(Elementwise()) if noise is None else SDE(Elementwise(), Diffusion(noise), noise=noise)
    )
    solver = RK4 if noise is None else adjsim.EulerMaruyama(0.1)
    record = adjsim.TimeAverage(lambda s: s.y.square().sum(-1))
    runs = [
        adjsim.simulate(
            dynamics,
            dynamics.init(start()),
            [0.1, 1.1],
            solver=solver,
            record=record,
            generator=2,
            compile=compile,
        )
        for compile in (False, True)
    ]
    torch.testing.assert_close(runs[0].final.y, runs[1].final.y, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(runs[0].record, runs[1].record, rtol=1e-13, atol=1e-13)
    assert runs[0].stats["energy_evaluations"] == runs[1].stats["energy_evaluations"]


class Elementwise(nn.Module):
    """A field without matrix products, which compiles in a second."""

    def __init__(self):
        super().__init__()
        self.k = nn.Parameter(torch.tensor([0.5, 0.7, 0.9]))

    def forward(self, t, y):
        return torch.sin(t) - self.k * torch.sin(y)


@pytest.mark.parametrize("adjoint", [DirectAdjoint(), CheckpointAdjoint(2)], ids=str)
def test_a_compiled_gradient_has_no_graph(adjoint):
    ode = ODE(Elementwise())
    last = final(ode, start(), RK4, adjoint=adjoint, compile=True)
    with pytest.raises(RuntimeError, match="DirectAdjoint\\(\\) without compile=True"):
        torch.autograd.grad(last.y.sum(), ode.fun.k, create_graph=True)


def test_evaluations_are_counted():
    ode = ODE(Net())
    for adjoint, backward in ((DirectAdjoint(), 40), (CheckpointAdjoint(), 120)):
        result = adjsim.simulate(ode, ode.init(start()), [0, 1.0], solver=RK4, adjoint=adjoint)
        assert result.stats["energy_evaluations"] == 40
        result.final.y.sum().backward()
        # Checkpoint runs every step again (40), evaluates it and takes its products (80).
        assert result.stats["energy_evaluations"] == 40 + backward


def test_a_bound_method_registers_its_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Parameter(torch.tensor(0.5))

        def rate(self, t, y):
            return -self.k * y

    ode = ODE(Model().rate)
    final(ode, start(), RK4, adjoint=CheckpointAdjoint()).y.sum().backward()
    assert [p.grad is not None for p in ode.parameters()] == [True]


W = torch.ones(3, requires_grad=True)
nets = {
    "no time": lambda: ODE(nn.Linear(3, 3)),
    "class": lambda: ODE(Net),
    "number": lambda: ODE(3.0),
    "noise": lambda: SDE(Net(), Net(), noise="white"),
}


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        ("no time", TypeError, r"fun\(t, y\), and Linear takes .*it may ignore t"),
        ("class", TypeError, "not the class Net"),
        ("number", TypeError, r"must be a function of \(t, y\)"),
        ("noise", ValueError, "unknown noise 'white'; choose from diagonal"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_functions_that_are_refused(make, kind, says):
    with pytest.raises(kind, match=says):
        nets[make]()


@pytest.mark.parametrize(
    ("fun", "kind", "says"),
    [
        (lambda t, y: y[..., :2], ValueError, r"fun maps y of shape \(4, 3\) to \(4, 2\)"),
        (lambda t, y: y.float(), ValueError, "to torch.float32: give the start and the module"),
        (lambda t, y: [y], TypeError, "fun must return a tensor for y; got list"),
        (lambda t, y: y / 0, ValueError, "the drift of y has NaN or infinite entries at the start"),
        (lambda t, y: W * y, ValueError, "requires grad but is not registered"),
        (lambda t, y: y.mul_(-1), ValueError, "fun writes into y .an operation in place"),
        (
            nn.Bilinear(1, 3, 3, dtype=torch.float32),
            TypeError,
            r"fun failed at .*: fun\.weight is torch\.float32 on cpu, and the start torch\.float64",
        ),
    ],
)
def test_drifts_that_are_refused(fun, kind, says):
    with pytest.raises(kind, match=says):
        final(ODE(fun), start(), RK4)


def test_the_checks_of_the_start_share_one_evaluation():
    calls = []
    sde = SDE(
        lambda t, y: calls.append("drift") or -y, lambda t, y: calls.append("diffusion") or 0.1 * y
    )
    y = start().requires_grad_()
    adjsim.simulate(sde, sde.init(y), [0.0, 0.5], solver=adjsim.EulerMaruyama(0.1), generator=1)
    assert calls.count("drift") == calls.count("diffusion") == 1 + 5


def test_large_numbers_are_finite_though_their_sum_is_not():
    ode, y = ODE(lambda t, y: -y), torch.full((4, 1), 1e308, dtype=torch.float64)
    assert torch.equal(ode.init(y).y, y)
    y[2] = torch.inf
    with pytest.raises(ValueError, match="y has NaN or infinite entries at the start"):
        ode.init(y)


@pytest.mark.parametrize(
    ("noise", "diffusion", "says"),
    [
        ("diagonal", lambda t, y: y.unsqueeze(-1), r"to \(4, 3, 1\); it must be \(4, 3\)"),
        ("scalar", lambda t, y: y[..., :1], r"to \(4, 1\); it must be \(4, 3\)"),
        ("general", lambda t, y: y, r"it must be \(4, 3, 'm'\), a column for"),
        ("additive", lambda t, y: y.unsqueeze(-1), "use noise='general'"),
        ("diagonal", lambda t, y: y.log(), "the diffusion of y has NaN"),
        ("diagonal", lambda t, y: W * y, "requires grad but is not registered"),
        ("diagonal", lambda t, y: y.clamp_(0, 1), "diffusion writes into y .an operation in"),
    ],
)
def test_diffusions_that_are_refused(noise, diffusion, says):
    sde = SDE(Decay(), diffusion, noise=noise)
    for solver in (adjsim.EulerMaruyama(0.1), SDESolver("midpoint", dt=0.1)):
        with pytest.raises(ValueError, match=says):
            final(sde, start(), solver)


@pytest.mark.parametrize(
    ("solver", "says"),
    [
        (RK4, r"reached NaN or infinity in step 6 \(t = 0\.6\)"),
        (adjsim.Coupled("rk4", 0.1, rate=1.0), r"reached NaN or infinity in step 6 \(t = 0\.6\)"),
        (adjsim.Coupled("rk4", 0.1, rate=1.0, exact=True), "NaN or infinity in step 6"),
        (adjsim.BackwardEuler(0.1), r"reached NaN or infinity in step 6 \(t = 0\.6\)"),
        (adjsim.ImplicitMidpoint(0.1), r"reached NaN or infinity in step 6 \(t = 0\.6\)"),
    ],
    ids=repr,
)
def test_rates_that_become_nan_are_an_error_with_the_step(solver, says):
    ode = ODE(lambda t, y: torch.where(t > 0.52, torch.nan, -y))
    with pytest.raises(FloatingPointError, match=says):
        final(ode, torch.ones(2), solver)


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (torch.tensor(1.0), r"y has shape \(\); it must be \(\*batch, n\)"),
        (torch.zeros(4, 0), r"y has shape \(4, 0\)"),
        (torch.tensor([1.0, float("nan")]), "y has NaN or infinite entries"),
        (torch.ones(2).half(), r"y is torch\.float16; a state is float32 or float64"),
        (torch.ones(2).bfloat16(), r"y is torch\.bfloat16; a state is float32 or float64"),
        (Pair(torch.zeros(4, 1), torch.zeros(3, 2)), r"the axes before the last are the batch"),
        (Pair(torch.zeros(4, 1), torch.zeros(4, 2).half()), "the same dtype and device"),
    ],
)
def test_starts_that_are_refused(y, says):
    with pytest.raises(ValueError, match=says):
        ODE(Decay()).init(y)


@pytest.mark.parametrize(
    ("dynamics", "solver", "adjoint", "kind", "says"),
    [
        (ODE(Decay()), adjsim.VelocityVerlet(0.1), None, ValueError, "its terms are Y"),
        (ODE(Decay()), adjsim.Splitting("Y", 0.1), None, TypeError, "no flow to split"),
        (ODE(Decay()), adjsim.EulerMaruyama(0.1), None, TypeError, "use a splitting or SDESolver"),
        (ODE(Decay()), SDESolver(dt=0.1), None, TypeError, "has none: use ODESolver"),
        (SDE(Decay(), Size()), RK4, None, TypeError, "use SDESolver.*EulerMaruyama"),
        (SDE(Decay(), Size()), adjsim.ODESolver(), None, TypeError, "use SDESolver"),
        (ODE(Decay()), RK4, ReversibleAdjoint(), TypeError, "has no inverse"),
        (ODE(Decay()), RK4, BacksolveAdjoint(), TypeError, "does not go with RungeKutta"),
        (
            SDE(Decay(), lambda t, y: y.flip(-1)),
            SDESolver("milstein", dt=0.1),
            None,
            ValueError,
            "the diffusion of y mixes entries",
        ),
        (
            SDE(Decay(), lambda t, y: y.unsqueeze(-1), noise="general"),
            SDESolver("srk", dt=0.1),
            None,
            TypeError,
            "general noise takes euler",
        ),
    ],
)
def test_solvers_that_do_not_fit(dynamics, solver, adjoint, kind, says):
    with pytest.raises(kind, match=says):
        final(dynamics, start(), solver, adjoint=adjoint or DirectAdjoint())


def test_a_blow_up_names_its_step():
    """y' = y^2 from 1 leaves at t = 1; a step of Euler on y' = -50 y multiplies by -4."""
    with pytest.raises(FloatingPointError, match=r"in step 1\d \(t = 1.*Use a smaller dt"):
        final(ODE(lambda t, y: y**2), torch.ones(1), RungeKutta("rk4", 0.1), (0, 10.0))
    stiff = ODE(lambda t, y: -50 * y)
    with pytest.raises(FloatingPointError, match=r"in step \d+ .*may be unbounded or stiff"):
        final(stiff, torch.ones(1), RungeKutta("euler", 0.1), (0, 100.0))


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: RungeKutta("rk5", 0.1), ValueError, "unknown Runge-Kutta method 'rk5'; choose"),
        (lambda: RungeKutta(4, 0.1), TypeError, "a name such as 'rk4' or a Tableau"),
        (lambda: RungeKutta("rk4", 0.0), ValueError, "dt must be a positive time"),
        (lambda: Tableau([[0.5]], [1]), ValueError, "the method is implicit"),
        (lambda: Tableau([[], []], [0.5, 0.5]), ValueError, r"a\[1\] has 0 entries"),
        (lambda: Tableau([[]], [0.5, 0.5]), ValueError, "1 rows and b 2 weights"),
        (lambda: Tableau([[], [1]], [0.5, 0.4]), ValueError, "the sum of b must be 1; got 0.9"),
        (lambda: Tableau([[], [1]], [0.5, 0.5], [0, 2]), ValueError, "sums of the rows"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_methods_that_are_refused(make, kind, says):
    with pytest.raises(kind, match=says):
        make()


def test_score_function_says_that_the_density_is_not_known():
    sde = SDE(Decay(), Size())
    simulation = adjsim.Simulation(
        sde, lambda n, g: sde.init(torch.ones(n, 1)), [0, 1.0], solver=adjsim.EulerMaruyama(0.1)
    )
    with pytest.raises(TypeError, match="no stationary density"):
        adjsim.ScoreFunction()(
            simulation, adjsim.TimeAverage(lambda s: s.y[:, 0]), replicas=4, generator=0
        )


class Starting(nn.Module):
    """A decay with a rate that is infinite at t = 0."""

    def forward(self, t, y):
        return -y * t**-2


@pytest.mark.parametrize(
    "solver",
    [
        adjsim.Coupled("rk4", 0.01, rate=3.0, exact=True),
        adjsim.Coupled("dormand-prince", adjsim.Adaptive(1e-6, 1e-8), rate=3.0, exact=True),
        adjsim.ReversibleHeun(0.01, exact=True),
    ],
    ids=repr,
)
def test_sizes_come_from_the_time_of_the_start(solver):
    """y = e^(1/t - 1) from t = 1; at t = 0 the rate is infinite."""
    dynamics = ODE(Starting())
    y = torch.ones(1, dtype=torch.float64, requires_grad=True)
    run = adjsim.simulate(
        dynamics, dynamics.init(y), [1.0, 2.0], solver=solver, adjoint=ReversibleAdjoint()
    )
    expected = torch.exp(torch.tensor(-0.5, dtype=torch.float64))
    # The second-order steps err by dt^2 times a number of order one.
    torch.testing.assert_close(run.final.y[0], expected, rtol=2e-4, atol=0)
    run.final.y.sum().backward()
    torch.testing.assert_close(y.grad[0], expected, rtol=2e-4, atol=0)
    shifted = ODE(lambda t, y: -y * (t + 1) ** -2)
    lattices = [
        solver.resolved(field, field.init(y), torch.tensor([t, t + 1])).plan(
            field, field.init(y), t
        )
        for field, t in ((dynamics, 1.0), (shifted, 0.0))
    ]
    first, second = (plan.lattice.spacings() for plan in lattices)
    assert first == second


def test_the_size_of_noise_comes_from_the_time_of_the_start():
    def huge(t, y):
        return 0.1 * y * (t + 1e-3) ** -20

    dynamics = SDE(Decay(), huge)
    solver = adjsim.ReversibleHeun(0.01, exact=True)
    spacing = solver.plan(dynamics, dynamics.init([1.0]), 1.0).lattice.spacings()["y"]
    # 2^7 or more times the size, of the 2^51 units.
    assert float(spacing) < 2.0**-30


@pytest.mark.parametrize(
    "solver", [adjsim.EulerMaruyama(0.1), adjsim.StochasticHeun(0.1), adjsim.ReversibleHeun(0.1)]
)
@pytest.mark.parametrize("adjoint", [DirectAdjoint(), CheckpointAdjoint()], ids=repr)
def test_additive_noise_that_depends_on_y_later_is_refused(solver, adjoint):
    """The diffusion depends on y above 1/2, which the drift reaches along the run."""

    class Later(Size):
        def forward(self, t, y):
            return self.size * (1 + torch.relu(y - 0.5)).unsqueeze(-1)

    drift = Size(0.5)
    simulate = adjsim.simulate
    later = SDE(drift, Later(0.01), noise="additive")
    options = {"solver": solver, "adjoint": adjoint, "generator": 0}
    with pytest.raises(ValueError, match=r"noise='general'.* after step 64 \(t = 6.4\)"):
        simulate(later, later.init(torch.zeros(2, 1)), [0.0, 10.0], **options)
    assert simulate(later, later.init(torch.zeros(2, 1)), [0.0, 0.5], **options).final.y.max() < 0.5


@pytest.mark.parametrize(
    "state", [(torch.ones(2),), namedtuple("Empty", [])()], ids=["bare", "empty"]
)
def test_a_state_is_a_named_tuple_of_tensors(state, unchecked):
    with pytest.raises(TypeError, match="a named tuple of tensors, not a"):
        ODE(Decay()).check(state)
