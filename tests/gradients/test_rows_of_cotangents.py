"""Rows of cotangents go through one backward sweep, as through the passes of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim
from adjsim import BacksolveAdjoint, CheckpointAdjoint, ReversibleAdjoint, TimeAverage
from tests.problems import parameter, slow_but, square

TS = [0.0, 0.1, 0.2]
FIELDS = {
    "checkpoint": (adjsim.RungeKutta("rk4", 0.1), CheckpointAdjoint()),
    "reversible": (adjsim.Coupled("rk4", 0.1, rate=5.0), ReversibleAdjoint()),
    "exact": (adjsim.Coupled("rk4", 0.1, rate=5.0, exact=True), ReversibleAdjoint()),
    "adaptive": (
        adjsim.Coupled("dormand-prince", adjsim.Adaptive(1e-4, 1e-6), rate=5.0),
        ReversibleAdjoint(),
    ),
    "noise": (adjsim.ReversibleHeun(0.1), ReversibleAdjoint()),
}
SHORT = [("checkpoint", "states"), ("exact", "average"), ("noise", "record")]
RECORDS = {"states": None, "record": lambda s: s.y.prod(-1), "average": TimeAverage(lambda s: s.y)}


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)
        self.net = nn.Sequential(*layers).double()

    def forward(self, t, y):
        return self.net(torch.cat([y, t.expand(*y.shape[:-1], 1).to(y)], -1))


class Counted(Field):
    calls = 0

    def forward(self, t, y):
        Counted.calls += 1
        return super().forward(t, y)


def outputs(name, record, field=Field, **settings):
    """The outputs of a run with frames or a record, and the tensors that they depend on."""
    solver, adjoint = FIELDS[name]
    noisy, drift = name == "noise", field()
    dynamics = adjsim.SDE(drift, Spread(parameter(0.3))) if noisy else adjsim.ODE(drift)
    y = torch.tensor([[1.0, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=torch.float64, requires_grad=True)
    run = adjsim.simulate(
        dynamics, dynamics.init(y), TS, solver=solver, adjoint=adjoint, record=RECORDS[record],
        generator=0, **settings,
    )  # fmt: skip
    found = run.y if record == "states" else run.record
    return [found, run.final.y], [y, *dynamics.parameters()]


class Spread(nn.Module):
    def __init__(self, amplitude):
        super().__init__()
        self.amplitude = amplitude

    def forward(self, t, y):
        return self.amplitude * torch.sigmoid(y)


def rows_of(values, count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, *x.shape, generator=generator, dtype=x.dtype) for x in values]


def one_by_one(values, inputs, rows):
    each = [
        torch.autograd.grad(values, inputs, [x[k] for x in rows], retain_graph=True)
        for k in range(len(rows[0]))
    ]
    return [torch.stack(x) for x in zip(*each, strict=True)]


def at_once(values, inputs, rows):
    return torch.autograd.grad(values, inputs, rows, retain_graph=True, is_grads_batched=True)


def mapped(values, inputs, rows):
    def pull(*row):
        return torch.autograd.grad(values, inputs, row, retain_graph=True)

    return torch.func.vmap(pull)(*rows)


def counted(pull, *given):
    Counted.calls = 0
    return pull(*given), Counted.calls


@pytest.mark.parametrize(
    ("name", "record", "count"),
    slow_but(
        lambda name, record, _: (name, record) in SHORT,
        [(n, r, 25 if (n, r) == SHORT[0] else 4) for n in FIELDS for r in RECORDS],
    ),
)
def test_rows_are_those_of_single_sweeps_and_cost_one(name, record, count):
    """In evaluations of the field, which are the same for one row and for all rows."""
    values, inputs = outputs(name, record, Counted)
    rows = rows_of(values, count)
    expected, calls = counted(one_by_one, values, inputs, rows)
    assert calls >= 2 * count
    for pull in (at_once, mapped):
        found, together = counted(pull, values, inputs, rows)
        assert together == calls // count
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_single_row_and_nested_maps():
    values, inputs = outputs("reversible", "states")
    rows = rows_of(values, 6)
    expected = one_by_one(values, inputs, rows)
    for x, y in zip(at_once(values, inputs, [x[:1] for x in rows]), expected, strict=True):
        torch.testing.assert_close(x, y[:1], rtol=1e-12, atol=1e-12)
    folded = [x.unflatten(0, (2, 3)) for x in rows]

    def inner(*part):
        return mapped(values, inputs, part)

    for x, y in zip(torch.func.vmap(inner)(*folded), expected, strict=True):
        torch.testing.assert_close(x.flatten(0, 1), y, rtol=1e-12, atol=1e-12)

    def beside(row):
        # The cotangent of the second output is the same for all rows.
        return torch.autograd.grad(values, inputs, [row, rows[1][0]], retain_graph=True)

    constant = one_by_one(values, inputs, [rows[0], rows[1][:1].expand_as(rows[1])])
    for x, y in zip(torch.func.vmap(beside)(rows[0]), constant, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kind", slow_but(lambda kind: kind == "store", ["store", "pairs", "compile"])
)
def test_rows_that_do_not_go_together_have_sweeps_of_their_own(kind, tmp_path):
    """The kernel of pairs takes one cotangent, and a loop or a store belongs to one sweep."""
    if kind == "pairs":
        dynamics = adjsim.Langevin(adjsim.LennardJones(sigma=parameter(0.9)), friction=parameter(1))
        q, p = square()
        q.requires_grad_()
        made = adjsim.simulate(
            dynamics, dynamics.init(q, p), [0.0, 0.01, 0.02],
            solver=adjsim.Splitting("BAOAB", 0.01, exact=True), adjoint=ReversibleAdjoint(),
            generator=0,
        )  # fmt: skip
        values, inputs = [made.position], [q, *dynamics.parameters()]
    else:
        given = {"store": tmp_path} if kind == "store" else {"compile": True}
        values, inputs = outputs("checkpoint", "states", **given)
    rows = rows_of(values, 3)
    expected = one_by_one(values, inputs, rows)
    for pull in (at_once, mapped):
        for x, y in zip(pull(values, inputs, rows), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_the_growth_is_that_of_the_row_that_grows_most():
    """x' = 1.1 x in each step for one entry, and 0.9 x for the other."""
    rate = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
    dynamics = adjsim.ODE(lambda t, y: rate * y)
    dynamics.register_parameter("weight", rate)
    made = adjsim.simulate(
        dynamics, dynamics.init(torch.ones(2, dtype=torch.float64)), [0.0, 2.0],
        solver=adjsim.RungeKutta("euler", 0.1), adjoint=CheckpointAdjoint(),
    )  # fmt: skip
    rows = torch.diag(torch.tensor([1.0, 1e6], dtype=torch.float64))
    torch.autograd.grad(made.final.y, rate, rows, is_grads_batched=True)
    assert made.stats["cotangent_growth"] == pytest.approx(1.1**20, rel=1e-12)


def test_a_continuous_adjoint_names_the_loop_as_the_way_out():
    dynamics = adjsim.ODE(Field())
    start = dynamics.init(torch.ones(2, dtype=torch.float64))
    made = adjsim.simulate(
        dynamics, start, TS, solver=adjsim.ODESolver("dopri5"), adjoint=BacksolveAdjoint()
    )
    for pull in (at_once, mapped):
        with pytest.raises(RuntimeError, match=r"one cotangent at a time .*: loop over the rows"):
            pull([made.y], list(dynamics.parameters()), rows_of([made.y], 2))
