"""Saved frames of compiled loops, which store states and read cotangents instead of stopping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import adjsim
from adjsim.adjoints.loops import runner
from adjsim.adjoints.loops.runner import LoopRunner
from adjsim.core.recent_cache import RecentCache
from tests.problems import parameter, slow_but

DT = 0.02
# Uneven, with two saves in a row, and one just before the end.
SAVES = torch.tensor([0, 1, 2, 5, 9, 10, 23, 40, 41, 59, 60])
ADJOINTS = {
    "direct": adjsim.DirectAdjoint(),
    "checkpoint": adjsim.CheckpointAdjoint(3),
    "reversible": adjsim.ReversibleAdjoint(),
}


def molecules(*batch):
    potential = adjsim.DoubleWell(parameter(1.3))
    dynamics = adjsim.Langevin(potential, kT=parameter(0.3), friction=parameter(0.4))
    position = torch.randn(*batch, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    return dynamics, dynamics.init(position, generator=1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(2, 8))
        self.outer = nn.Parameter(torch.linspace(1, -0.5, 16, dtype=torch.float64).reshape(8, 2))

    def forward(self, t, y):
        return torch.tanh(y @ self.inner) @ self.outer - 0.1 * t * y


def field(*batch):
    dynamics = adjsim.ODE(Field())
    y = torch.linspace(0.2, 1, 2 * torch.Size(batch).numel(), dtype=torch.float64)
    return dynamics, dynamics.init(y.reshape(*batch, 2))


CASES = {
    "few": (lambda: molecules(3), adjsim.BAOAB(DT), ADJOINTS),
    "replicas": (lambda: molecules(32), adjsim.BAOAB(DT), ADJOINTS),
    "exact": (
        lambda: molecules(3),
        adjsim.Splitting("BAOAB", DT, exact=True),
        ["reversible", "checkpoint"],
    ),
    "field": (lambda: field(5), adjsim.RungeKutta("rk4", DT), ["direct", "checkpoint"]),
    "copies": (lambda: field(5), adjsim.Coupled("rk4", DT, rate=3.0), ["reversible", "checkpoint"]),
    "implicit": (lambda: field(5), adjsim.ImplicitMidpoint(DT), ["checkpoint", "direct"]),
}
ROWS = [(case, adjoint) for case, (_, _, adjoints) in CASES.items() for adjoint in adjoints]
SHORT = [("few", "reversible"), ("few", "checkpoint"), ("field", "direct")]


def simulated(case, adjoint, compile, ts=SAVES * DT, record=None):
    """Return a run, and the tensors whose gradients are wanted."""
    make, solver, _ = CASES[case]
    dynamics, start = make()
    start = type(start)._make(x.requires_grad_() for x in start)
    found = adjsim.simulate(
        dynamics,
        start,
        ts,
        solver=solver,
        adjoint=ADJOINTS[adjoint],
        generator=2,
        compile=compile,
        record=record and record(dynamics),
    )
    return found, [*start, *dynamics.parameters()]


def waves(dynamics):
    """Return a function of the state and of a number of the dynamics."""

    def record(state):
        scale = dynamics.fun.inner.mean() if hasattr(dynamics, "fun") else dynamics.kT
        return torch.stack([(scale * x).sin().sum() for x in state])

    return record


def double(dynamics):
    return lambda state: 2 * state[0]


@pytest.fixture
def loops(monkeypatch):
    """The kinds and numbers of steps of the loops that are run, backward loops with a minus."""
    found, run_loop = [], LoopRunner.run_loop

    def counted(self, kind, first, count, *given):
        found.append(-count if kind.backward else count)
        return run_loop(self, kind, first, count, *given)

    monkeypatch.setattr(LoopRunner, "run_loop", counted)
    return found


def agree(found, expected):
    """To sums in another order, over 60 steps."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("case", "adjoint"), slow_but(lambda *row: row in SHORT, ROWS))
def test_frames_and_gradients_are_those_of_single_steps(case, adjoint, loops):
    found = []
    for compile in (False, True):
        run, wanted = simulated(case, adjoint, compile)
        frames = [getattr(run, name) for name in run.final._fields]
        values = frames[0]
        weights = torch.linspace(1, 2, values.numel(), dtype=torch.float64).reshape(values.shape)
        loss = (weights * values.sin()).sum() + run.final[0].square().sum()
        grads = torch.autograd.grad(loss, wanted)
        found.append((*frames, *grads))
    agree(*found[::-1])
    # An exact run stops to look at its buffers, an implicit one where it is not solved.
    if case not in ("exact", "implicit"):
        # Each of the three segments runs forward, once more, and backward.
        assert sorted(map(abs, loops)) == ([20] * 9 if adjoint == "checkpoint" else [60, 60])


@pytest.mark.parametrize("adjoint", slow_but(lambda adjoint: adjoint == "reversible", ADJOINTS))
def test_rows_of_cotangents(adjoint):
    """Rows of cotangents of frames, in one sweep; of momenta alone, and of positions alone."""
    run, wanted = simulated("few", adjoint, True)
    for entries in (run.momentum[3:6, 0, 0, 0], run.position[1:4, 1, 0, 1]):
        rows = torch.autograd.grad(
            entries, wanted, torch.eye(3).double(), is_grads_batched=True, retain_graph=True
        )
        single = [torch.autograd.grad(x, wanted, retain_graph=True) for x in entries]
        agree(rows, [torch.stack(x) for x in zip(*single, strict=True)])
    plain, others = simulated("few", adjoint, False)
    for mine, theirs in zip(
        (run.momentum, run.position), (plain.momentum, plain.position), strict=True
    ):
        agree(
            torch.autograd.grad(mine[4].sum(), wanted, retain_graph=True),
            torch.autograd.grad(theirs[4].sum(), others, retain_graph=True),
        )


STORED = [row for row in ROWS if row[1] != "reversible"]


@pytest.mark.parametrize(("case", "adjoint"), slow_but(lambda *row: row in SHORT, STORED))
def test_functions_of_the_states_are_differentiated_where_these_are_stored(case, adjoint, loops):
    """With the gradient to a number that the function reads itself."""
    found = []
    for compile in (False, True):
        run, wanted = simulated(case, adjoint, compile, record=waves)
        weights = torch.linspace(1, 2, run.record.numel(), dtype=torch.float64)
        loss = (weights.view_as(run.record) * run.record).sum() + run.final[0].square().sum()
        grads = torch.autograd.grad(loss, wanted, retain_graph=True)
        rows = torch.autograd.grad(
            run.record[2:8, 0], wanted, torch.eye(6).double(), is_grads_batched=True
        )
        found.append((run.record.detach(), *grads, *rows, run.stats.get("cotangent_growth")))
    *found, growth = zip(*found[::-1], strict=True)
    agree(*zip(*found, strict=True))
    if case == "few" and adjoint == "direct":
        # Forward, backward, and backward with rows.
        assert loops == [60, -60, -60]
        assert growth[0] > 0


@pytest.mark.parametrize("case", slow_but(lambda case: case == "few", CASES))
@torch.no_grad()
def test_the_path_does_not_depend_on_frames(case, loops):
    """To the last bit, with states stored or not, and with a function of them saved."""
    adjoint = "direct" if "direct" in CASES[case][2] else "checkpoint"
    ends, _ = simulated(case, adjoint, True, SAVES[[0, -1]] * DT)
    dense, _ = simulated(case, adjoint, True)
    some, _ = simulated(case, adjoint, True, record=double)
    values = getattr(dense, dense.final._fields[0])
    assert torch.equal(some.record, 2 * values)
    for run in (dense, some):
        assert all(map(torch.equal, run.final, ends.final))
    if adjoint == "direct" and case != "implicit":
        assert loops == [60] * 3


def test_frames_that_are_far_apart_end_loops(loops):
    """Few saves of many steps cost less than to store the states between them."""
    run, wanted = simulated("few", "direct", True, [0.0, 1000 * DT, 2000 * DT])
    torch.autograd.grad(run.position.sum(), wanted)
    assert loops[:3] == [1000, 24, 976]


@pytest.mark.parametrize(
    ("make", "word", "adjoint"),
    [
        ("langevin", "BAOAB", "reversible"),
        pytest.param("langevin", "BAOAB", "checkpoint", marks=pytest.mark.slow),
        ("chain", "NBABN", "reversible"),
    ],
)
def test_exact_loops_end_where_a_buffer_is_full(make, word, adjoint, loops):
    """And not at each look at the buffers. The states have the bits of single steps."""
    potential = adjsim.DoubleWell(parameter(1.3))
    dynamics = (
        adjsim.Langevin(potential, kT=parameter(0.3), friction=parameter(20.0))
        if make == "langevin"
        else adjsim.NoseHooverChain(potential, parameter(0.3), 0.5)
    )
    position = torch.randn(3, 2, 1, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        start = dynamics.init(position, generator=1)
    found = []
    for compile in (False, True):
        run = adjsim.simulate(
            dynamics,
            start,
            DT * torch.tensor([0, 3, 250, 400]),
            solver=adjsim.Splitting(word, DT, exact=True),
            adjoint=ADJOINTS[adjoint],
            generator=2,
            compile=compile,
        )
        loss = run.position.sin().sum() + run.final.momentum.square().sum()
        grads = torch.autograd.grad(loss, list(dynamics.parameters()))
        found.append(((run.position, *run.final), grads))
        assert run.stats.get("reconstruction_error", 0) in (0.0, None)
    (states, expected), (compiled, grads) = found
    assert all(map(torch.equal, compiled, states))
    agree(grads, expected)
    # Each of the six buffers is spilled after 33 bits; its last bits stay in it.
    spills = run.stats["buffer_bits"] * 400 // 33
    assert spills >= 5 if make == "langevin" else spills == 0
    assert len(loops) <= 2 * (len(run.times) + 6 * spills) + (9 if adjoint == "checkpoint" else 0)


@pytest.mark.parametrize("adjoint", slow_but(lambda adjoint: adjoint == "reversible", ADJOINTS))
def test_fields_without_axes(adjoint):
    """The logarithm of the speed of one system is one number."""
    found = []
    for compile in (False, True):
        potential = adjsim.DoubleWell(parameter(1.3))
        dynamics = adjsim.ESH(potential)
        start = dynamics.init(torch.tensor([[0.3, 1.1]]).double(), torch.ones(1, 2).double())
        run = adjsim.simulate(
            dynamics,
            start,
            SAVES * DT,
            solver=adjsim.Splitting("EAE", DT),
            adjoint=ADJOINTS[adjoint],
            compile=compile,
        )
        loss = (torch.linspace(1, 2, len(SAVES)).double() * run.log_speed).sum()
        found.append((run.log_speed, *torch.autograd.grad(loss, potential.barrier)))
    agree(*found)


@torch.no_grad()
def test_a_loop_that_stores_fewer_states_is_not_one_of_a_longer_run(monkeypatch):
    """Steps whose tensors are saved have loops of at most 100 steps."""
    monkeypatch.setattr(runner, "cache", RecentCache(16))
    with torch.enable_grad():
        simulated("field", "checkpoint", True)
    ts = torch.arange(501) * DT
    long, _ = simulated("field", "direct", True, ts)
    expected, _ = simulated("field", "direct", False, ts)
    agree(long.y[None], expected.y[None])


@pytest.mark.parametrize("record", [None, adjsim.TimeAverage(lambda s: s.position.sum((-1, -2)))])
def test_errors_are_relative_to_saved_frames(record):
    """A period ends where it began, at rest; the momenta between are those that count."""
    steps, k = 60, parameter(1.0)
    dt = 2 * math.sin(math.pi / steps)
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(k))
    run = adjsim.simulate(
        dynamics,
        dynamics.init(torch.ones(1, 1).double(), torch.zeros(1, 1).double()),
        torch.arange(0, steps + 1, 3) * dt,
        solver=adjsim.VelocityVerlet(dt),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=True,
        record=record,
    )
    assert run.final.momentum.abs() < 1e-12
    torch.autograd.grad((run.position if record is None else run.record).sum(), k)
    assert run.stats["reconstruction_error"] < 1e-12
