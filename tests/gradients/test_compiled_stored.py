"""Compiled gradients from stored states, of direct and checkpoint adjoints, against eager ones."""

from __future__ import annotations

import jaxtyping
import pytest
import torch

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, TimeAverage
from adjsim.adjoints import checkpoint
from adjsim.adjoints.loops import runner as loop_runner
from adjsim.compiler import loops
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta
from tests.fields import equation, pair, start
from tests.gradients.test_fields import moment
from tests.gradients.test_table import agree
from tests.problems import by_inductor, parameter, square

EULER = adjsim.EulerMaruyama(0.05)
# The noise (None: an ODE), the solver, the saved data, whether the state is a named tuple, and the
# batch, of which a large one is innermost in memory.
ROWS = [
    pytest.param(None, RungeKutta("midpoint", 0.05), "saves", True, (4,), marks=pytest.mark.slow),
    ("general", EULER, "average", False, (4,)),
    *(
        pytest.param(*row, marks=pytest.mark.marathon)
        for row in [
            (None, RungeKutta("rk4", 0.05), "saves", True, (4,)),
            (None, RungeKutta("heun", 0.05), "average", True, (20,)),
            (None, RungeKutta("dormand-prince", 0.05), "record", False, (2, 3)),
            ("diagonal", EULER, "saves", True, (20,)),
            ("scalar", EULER, "record", False, ()),
            ("additive", EULER, "saves", False, (4,)),
        ]
    ),
]


@pytest.fixture(autouse=True)
def _unchecked():
    """The type checks of the tests cannot be written down."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def gradients(dynamics, y, solver, kind, adjoint, compile, times=(0.2, 0.3, 0.7, 1.45)):
    """The gradient of every kind of saved data with respect to start and parameters."""
    begin = tuple(x.clone().requires_grad_() for x in y)
    start = type(y)._make(begin)
    record = {"record": moment, "average": TimeAverage(moment, burn_in=0.1)}.get(kind)
    run = adjsim.simulate(
        dynamics,
        start,
        list(times),
        solver=solver,
        adjoint=adjoint,
        record=record,
        generator=4,
        compile=compile,
    )
    if record is None:
        fields = [getattr(run, name) for name in run.final._fields]
        loss = sum((1 + i) * moment([x[i] for x in fields]).sum() for i in range(len(times)))
    else:
        loss = run.record.sum() + 0.1 * moment(run.final).sum()
    named = dict(dynamics.named_parameters())
    found = torch.autograd.grad(loss, [*named.values(), *begin], retain_graph=True)
    again = torch.autograd.grad(loss, [*named.values(), *begin])
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    return dict(zip([*named, *y._fields], found, strict=True)), run


@pytest.mark.parametrize(("noise", "solver", "kind", "named", "batch"), ROWS, ids=str)
def test_equal_to_eager_gradients(noise, solver, kind, named, batch, monkeypatch):
    """In parts of six steps, which neither save times nor segments are multiples of."""
    dynamics, y = equation(noise, named), start(batch)
    y = dynamics.init(pair(y) if named else y)
    monkeypatch.setattr(loop_runner, "NUMBERS_PER_LOOP", 6 * y[0].numel() + 1)
    direct, _ = gradients(dynamics, y, solver, kind, DirectAdjoint(), False)
    for adjoint in (DirectAdjoint(), CheckpointAdjoint(3)):
        found, run = gradients(dynamics, y, solver, kind, adjoint, True)
        # The same operations, in other orders of their sums.
        agree(found, direct, 1e-12)
        assert run.stats["compiled_backward"] == "C++"


@pytest.mark.slow
@pytest.mark.usefixtures("own_loops")
def test_frozen_parameters_and_buffers():
    """They are inputs of the loops, so that a new value needs no new compilation."""
    dynamics = equation(None)
    dynamics.fun.inner.weight.requires_grad_(False)
    dynamics.fun.outer.bias = None
    y, seconds = dynamics.init(start()), []
    trained = [name for name, p in dynamics.named_parameters() if p.requires_grad]
    for scale in (1.0, 1.3):
        with torch.no_grad():
            dynamics.fun.inner.weight *= scale
        found = []
        for compile in (False, True):
            run = adjsim.simulate(
                dynamics, y, [0.0, 0.5], solver=RungeKutta("midpoint", 0.05), compile=compile
            )
            grads = torch.autograd.grad(
                moment(run.final).sum(), [dict(dynamics.named_parameters())[n] for n in trained]
            )
            found.append(dict(zip(trained, grads, strict=True)))
        agree(found[1], found[0], 1e-12)
        seconds.append(run.stats["compile_seconds"])
    assert seconds[0] > 0 == seconds[1]


def test_loops_of_small_states_have_many_steps(monkeypatch):
    """A loop takes as long to begin as a hundred steps, so segments of sqrt(steps) took twice.

    A hundred steps of a vector field keep activations.
    """
    counts, loop = {False: [], True: []}, loop_runner.LoopRunner.run_loop

    def counted(self, kind, first, count, *rest, **more):
        counts[kind.backward].append(count)
        return loop(self, kind, first, count, *rest, **more)

    monkeypatch.setattr(loop_runner.LoopRunner, "run_loop", counted)
    dynamics = adjsim.Langevin(adjsim.DoubleWell(parameter(0.7)), kT=parameter(0.6))
    begin, solver, times = dynamics.init(*square()), adjsim.BAOAB(0.02), (0.0, 4.2)
    found, _ = gradients(dynamics, begin, solver, "saves", CheckpointAdjoint(), True, times)
    # The gradient is taken twice.
    assert counts == {False: [210] * 3, True: [210] * 2}
    known, _ = gradients(dynamics, begin, solver, "saves", CheckpointAdjoint(7), True, times)
    assert counts[True][-7:] == 7 * [30]
    monkeypatch.setattr(checkpoint, "LARGE", 1)
    ode, counts[True] = equation(None), []
    run = adjsim.simulate(
        ode, ode.init(start()), times, solver=RungeKutta("midpoint", 0.02),
        adjoint=CheckpointAdjoint(), compile=True,
    )  # fmt: skip
    moment(run.final).sum().backward()
    assert counts[True] == [10, 100, 100]
    agree(found, known, 1e-12)


@pytest.mark.marathon
@pytest.mark.parametrize("exact", [False, True])
def test_splittings(exact):
    """Several moves a step, with the force shared between steps, on and off the lattice."""
    dynamics = adjsim.Langevin(adjsim.DoubleWell(parameter(0.7)), kT=parameter(0.6))
    begin, solver = dynamics.init(*square()), adjsim.Splitting("BAOAB", 0.02, exact=exact)
    times = (0.0, 0.2, 0.74)
    direct, _ = gradients(dynamics, begin, solver, "saves", DirectAdjoint(), False, times)
    for adjoint in (DirectAdjoint(), CheckpointAdjoint(6)):
        agree(gradients(dynamics, begin, solver, "saves", adjoint, True, times)[0], direct, 1e-12)


@pytest.mark.slow
def test_steps_without_an_inverse():
    """Collisions destroy momenta; eager steps alone used to have their gradient."""
    dynamics = adjsim.Andersen(
        adjsim.DoubleWell(parameter(0.7)), mass=parameter(1.2), kT=parameter(0.6), rate=2.0
    )
    begin, solver = dynamics.init(*square()), adjsim.Splitting("BABC", 0.02)
    times = (0.0, 0.2, 0.74)
    direct, _ = gradients(dynamics, begin, solver, "saves", DirectAdjoint(), False, times)
    found, run = gradients(dynamics, begin, solver, "saves", CheckpointAdjoint(6), True, times)
    agree(found, direct, 1e-12)
    assert run.stats["compiled_backward"] == "C++"


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.marathon)])
def test_operations_that_are_not_printed(inductor, monkeypatch):
    """Torch evaluates them. Inductor's iterations return to Python, where states are stored."""
    if inductor:
        monkeypatch.setattr(loops, "compile_to_cpp", by_inductor)

    class Solved(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.m = torch.nn.Parameter(2 * torch.eye(3, dtype=torch.float64) + 0.1)

        def forward(self, t, y):
            return -torch.linalg.solve(self.m, y.mT).mT - torch.logcumsumexp(y, -1)

    dynamics = adjsim.ODE(Solved())
    y, solver = dynamics.init(start()), RungeKutta("midpoint", 0.05)
    direct, _ = gradients(dynamics, y, solver, "saves", DirectAdjoint(), False)
    for adjoint in (DirectAdjoint(), CheckpointAdjoint(3)):
        found, run = gradients(dynamics, y, solver, "saves", adjoint, True)
        agree(found, direct, 1e-12)
        path = run.stats["compiled_backward"]
        assert path == "C++, and torch for Inductor" if inductor else "logcumsumexp" in path
