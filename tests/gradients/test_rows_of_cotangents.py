"""Rows of cotangents go through one backward sweep, as through the passes of autograd."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import adjsim
from adjsim import BacksolveAdjoint, CheckpointAdjoint, ReversibleAdjoint, TimeAverage
from adjsim.core.rows import pulled_together
from adjsim.dynamics import layers
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


KINDS = [
    "field", "no bias", "gradient of an energy", "divergence", "weight elsewhere", "recomputed",
]  # fmt: skip
KINDS += ["compiled", "compiled, undone", "compiled, average"]


class Elementwise(nn.Module):
    """A field that compiles in a second."""

    def __init__(self):
        super().__init__()
        self.k = parameter(0.7)

    def forward(self, t, y):
        return torch.sin(t) - self.k * torch.sin(y)


def made(kind, folder):
    """A run, whose outputs are its frames, and the tensors that they depend on."""
    if kind in ("pairs", "implicit pairs"):
        pairs, solver = adjsim.LennardJones(sigma=parameter(0.9)), adjsim.ImplicitMidpoint(0.01)
        dynamics = adjsim.Hamiltonian(pairs)
        if kind == "pairs":
            dynamics = adjsim.Langevin(pairs, friction=parameter(1))
            solver = adjsim.Splitting("BAOAB", 0.01, exact=True)
        q, p = square()
        q.requires_grad_()
        run = adjsim.simulate(
            dynamics, dynamics.init(q, p), [0.0, 0.01, 0.02], solver=solver,
            adjoint=ReversibleAdjoint(), generator=0,
        )  # fmt: skip
        return run, [run.position], [q, *dynamics.parameters()]
    field = Elementwise() if "," in kind else Field()
    dynamics, solver, adjoint = adjsim.ODE(field), adjsim.RungeKutta("rk4", 0.1), None
    if kind == "implicit":
        solver, adjoint = adjsim.ImplicitMidpoint(0.1), ReversibleAdjoint()
    if kind == "compiled, undone":
        solver, adjoint = adjsim.Coupled("rk4", 0.1, rate=5.0), ReversibleAdjoint()
    y = torch.tensor([[1.0, 0.2], [0.3, 0.4]], dtype=torch.float64, requires_grad=True)
    record = RECORDS["average"] if kind == "compiled, average" else None
    run = adjsim.simulate(
        dynamics, dynamics.init(y), TS, solver=solver, adjoint=adjoint or CheckpointAdjoint(),
        record=record, store=folder if kind == "store" else None, compile="compiled" in kind,
    )  # fmt: skip
    values = [run.final.y, run.y if record is None else run.record]
    return run, values, [y, *dynamics.parameters()]


@pytest.mark.parametrize(
    "kind",
    slow_but(
        lambda kind: kind in ("store", "implicit"), KINDS, marathon=lambda kind: kind == "compiled"
    ),
)
def test_other_runs_have_the_rows_of_single_sweeps(kind, tmp_path):
    """All but a store, which belongs to one sweep, go through one."""
    run, values, inputs = made(kind, tmp_path)
    rows = rows_of(values, 3)
    before = run.stats["energy_evaluations"]
    expected = one_by_one(values, inputs, rows)
    each = run.stats["energy_evaluations"] - before
    for pull in (at_once, mapped):
        before = run.stats["energy_evaluations"]
        found = pull(values, inputs, rows)
        together = run.stats["energy_evaluations"] - before
        # A store keeps each sweep, and linear systems have a solution for each row.
        if kind not in ("store", "implicit pairs"):
            assert together == each // 3
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def decay(p, kind, **settings):
    """A run of dy/dt = -p y^2, back in time unless ``ts`` are given."""
    equation = adjsim.ODE(lambda t, y, p: -p * y**2, args=(p,))
    solver, adjoint = adjsim.RungeKutta("rk4", 0.1), CheckpointAdjoint()
    if kind == "backsolve":
        solver, adjoint = adjsim.ODESolver("dopri5", rtol=1e-10, atol=1e-12), BacksolveAdjoint()
    if kind == "undone":
        solver, adjoint = adjsim.Coupled("rk4", 0.1, rate=5.0), ReversibleAdjoint()
    if kind == "direct":
        adjoint = adjsim.DirectAdjoint()
    start = equation.init(torch.tensor([[1.0, 0.5]], dtype=torch.float64))
    given = {"solver": solver, "adjoint": adjoint, "compile": kind == "compiled"} | settings
    return adjsim.simulate(equation, start, given.pop("ts", [0.4, 0.25, 0.0]), **given)


P = torch.tensor([0.7, 0.3], dtype=torch.float64)


@pytest.mark.parametrize(
    "kind",
    slow_but(
        lambda kind: kind == "checkpoint",
        ["checkpoint", "undone", "backsolve", "compiled"],
        marathon=lambda kind: kind == "backsolve",
    ),
)
def test_jacrev_goes_around_a_run(kind):
    """Each output, with save times between steps, back in time."""

    def outputs(p):
        run, steps = decay(p, kind), [0.1 * k for k in range(5)]
        values = [run.y, run.final.y]
        if kind in ("checkpoint", "undone"):
            record, average = lambda s: p * s.y, TimeAverage(lambda s: s.y.prod(-1))
            values.append(decay(p, kind, ts=steps, record=record).record)
            values.append(decay(p, kind, ts=[0.0, 0.4], record=average).record)
            values.append(decay(p, kind, ts=steps).at(0.1 * p).y)
        return torch.cat([x.flatten() for x in values])

    found = torch.func.jacrev(outputs)(P)
    leaf = P.clone().requires_grad_()
    values = outputs(leaf)
    pull, unit = (one_by_one if kind == "backsolve" else at_once), torch.eye(len(values)).double()
    (rows,) = pull([values], [leaf], [unit])
    torch.testing.assert_close(found.detach(), rows, rtol=1e-12, atol=1e-14)
    ends = [outputs(P + s * torch.tensor([1e-5, 0.0])).detach() for s in (1, -1)]
    slope = (ends[0] - ends[1]) / 2e-5
    torch.testing.assert_close(found[:, 0].detach(), slope, rtol=1e-6, atol=1e-8)
    total = torch.func.grad(lambda p: outputs(p).sum())(P)
    # A continuous adjoint chooses its steps by its cotangent.
    rtol = 1e-8 if kind == "backsolve" else 1e-12
    torch.testing.assert_close(total.detach(), rows.sum(0), rtol=rtol, atol=0)
    weight = torch.linspace(1, 2, len(values), dtype=torch.float64)
    _, pull = torch.func.vjp(outputs, P)
    expected = weight @ rows
    torch.testing.assert_close(pull(weight)[0].detach(), expected, rtol=rtol, atol=0)


def test_jacrev_takes_one_sweep_and_parameters_of_modules():
    field = Counted()
    equation = adjsim.ODE(field)
    holder, y = nn.Module(), torch.tensor([[1.0, 0.2]], dtype=torch.float64)
    holder.equation = equation
    holder.forward = lambda adjoint: (
        adjsim.simulate(
            equation, equation.init(y), TS, solver=adjsim.RungeKutta("rk4", 0.1), adjoint=adjoint
        ).final.y
    )

    def end(weight, adjoint):
        name = {"equation.fun.net.0.weight": weight}
        return torch.func.functional_call(holder, name, (adjoint,))

    weight = field.net[0].weight.detach()
    found, calls = counted(torch.func.jacrev(end), weight, CheckpointAdjoint())
    known = torch.func.jacrev(end)(weight, adjsim.DirectAdjoint())
    torch.testing.assert_close(found.detach(), known.detach(), rtol=1e-10, atol=1e-14)
    # The check of the start, 2 x 4 stages, and these twice more on the way back.
    assert calls <= 2 + 3 * 8


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (torch.func.jacfwd, "need DirectAdjoint"),
        (torch.func.hessian, "cannot be differentiated again"),
        (lambda f: torch.func.jacrev(torch.func.jacrev(f)), "cannot be differentiated again"),
        (lambda f: lambda p: torch.func.vmap(f)(torch.stack([p, p])), "leading batch axis"),
    ],
    ids=["jacfwd", "hessian", "twice", "vmap"],
)
def test_what_goes_through_direct_alone(transform, why):
    with pytest.raises((RuntimeError, NotImplementedError), match=why):
        transform(lambda p: decay(p, "checkpoint").final.y.sum())(P)
    transform(lambda p: decay(p, "direct").final.y.sum())(P)


def test_dual_starts_go_through_direct_alone():
    equation = adjsim.ODE(lambda t, y: -y)
    with torch.autograd.forward_ad.dual_level():
        start = equation.init(torch.autograd.forward_ad.make_dual(P, torch.ones_like(P)))

        def end(adjoint):
            run = adjsim.simulate(
                equation, start, [0.0, 0.1], solver=adjsim.RungeKutta("rk4", 0.1), adjoint=adjoint
            )
            return torch.autograd.forward_ad.unpack_dual(run.final.y).tangent

        torch.testing.assert_close(end(adjsim.DirectAdjoint()), torch.full_like(P, 0.9048375))
        with pytest.raises(NotImplementedError, match="need DirectAdjoint"):
            end(CheckpointAdjoint())


def test_a_tensor_that_is_not_registered_is_refused_in_a_transform():
    def end(p):
        equation = adjsim.ODE(lambda t, y: -p * y)
        start = equation.init(torch.ones(2, dtype=torch.float64))
        return adjsim.simulate(
            equation, start, TS, solver=adjsim.RungeKutta("rk4", 0.1), adjoint=CheckpointAdjoint()
        ).final.y

    with pytest.raises(ValueError, match=r"is not registered.*args="):
        torch.func.jacrev(end)(P)
    leaf = P.clone().requires_grad_()
    outer = torch.func.grad(lambda p: decay(p, "checkpoint").final.y.sum())(leaf)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(outer.sum(), leaf)


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


class Wide(nn.Module):
    """A layer whose rows of gradients wait, used twice, beside others that do not."""

    def __init__(self, kind="field"):
        super().__init__()
        torch.manual_seed(0)
        self.kind, width = kind, 96
        self.first, self.last = (
            nn.Linear(2, width),
            nn.Linear(width, 2, bias=kind not in KINDS[1:3]),
        )
        self.wide, self.frozen = nn.Linear(width, width), nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.double()

    def hidden(self, y):
        x = self.frozen(self.first(y).tanh()).sin()
        return self.wide(self.wide(x).tanh()).tanh()

    def forward(self, t, y):
        if self.kind == "gradient of an energy":
            with torch.enable_grad():
                x = y if y.requires_grad else y.detach().requires_grad_()
                energy = self.last(self.hidden(x)).sum()
                return -torch.autograd.grad(energy, x, create_graph=True)[0]
        if self.kind == "divergence":
            units = torch.eye(2, dtype=y.dtype).expand(*y.shape, 2).unbind(-2)
            push = [torch.func.jvp(lambda z: self.last(self.hidden(z)), (y,), (u,)) for u in units]
            value, along = push[0][0], (tangent for _, tangent in push)
            return value * sum((x * u).sum() for x, u in zip(along, units, strict=True))
        if self.kind == "weight elsewhere":
            return self.last(self.hidden(y)) * self.wide.weight.square().sum().rsqrt()
        if self.kind == "recomputed":
            hidden = torch.utils.checkpoint.checkpoint(self.hidden, y, use_reentrant=False)
            return self.last(hidden)
        return self.last(self.hidden(y))


class Doubled(torch.autograd.Function):
    """A layer that differentiates a graph of its own, and doubles the gradient by its weights."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        with torch.enable_grad():
            ctx.inputs = x.detach().requires_grad_(), weight, bias
            ctx.output = nn.functional.linear(*ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, c):
        found = torch.autograd.grad(ctx.output, ctx.inputs, c, retain_graph=True, allow_unused=True)
        return found[0], 2 * found[1], found[2]


class Doubling(Wide):
    def hidden(self, y):
        return Doubled.apply(self.first(y).tanh(), self.wide.weight, self.wide.bias).tanh()


class Drifting(Wide):
    """The gradient of an energy by a leaf of its own, whose product by the weights is not asked."""

    def forward(self, t, y):
        with torch.enable_grad():
            x = y.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.hidden(x).sum(), x)
        return self.last(self.hidden(y)) - slope.detach()


KINDS = [
    "field",
    "no bias",
    "gradient of an energy",
    "divergence",
    "weight elsewhere",
    "recomputed",
]


@pytest.mark.parametrize("way", ["checkpoint", "reversible", "noise"])
@pytest.mark.parametrize("kind", [*KINDS, "drifting", "doubling"])
@pytest.mark.parametrize("batch", [pytest.param((), marks=pytest.mark.slow, id="one state"), (5,)])
def test_rows_of_wide_layers_wait_for_each_other(kind, way, batch, monkeypatch):
    """Products are taken after every two evaluations, whatever the states and the adjoint."""
    monkeypatch.setattr(layers, "FEWEST", 2 * max(1, *batch, 1))
    taken, take = [], layers.RowsOfLayers._take
    monkeypatch.setattr(
        layers.RowsOfLayers, "_take", lambda x, name: [taken.append(name), take(x, name)][1]
    )
    field = {"drifting": Drifting, "doubling": Doubling}.get(kind, Wide)(kind)
    solver, adjoint = FIELDS[way]
    dynamics = adjsim.SDE(field, Spread(parameter(0.3))) if way == "noise" else adjsim.ODE(field)
    y = torch.rand(*batch, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y.requires_grad_()
    run = adjsim.simulate(
        dynamics, dynamics.init(y), [0.0, 0.3], solver=solver, adjoint=adjoint, generator=0
    )
    inputs = [y, *(x for x in dynamics.parameters() if x.requires_grad)]
    rows = rows_of([run.final.y], 3)
    expected = one_by_one([run.final.y], inputs, rows)
    assert not taken
    for pull in (at_once, mapped):
        for x, z in zip(pull([run.final.y], inputs, rows), expected, strict=True):
            torch.testing.assert_close(x, z, rtol=1e-12, atol=1e-13 * float(z.abs().max()))
    # Autograd differentiates what has a derivative inside.
    assert bool(taken) == (kind not in ("divergence", "recomputed", "doubling"))


class Reused(Wide):
    """A field that writes the inputs of a layer into the same memory in each evaluation."""

    memory = torch.zeros(96, dtype=torch.float64)

    def forward(self, t, y):
        self.memory.copy_(torch.sin(t + torch.arange(96)))
        return self.last((self.wide(self.memory) + self.first(y)).tanh())


class Changed(Wide):
    """Layers of several axes whose results are changed in place, and of a part of no samples."""

    def forward(self, t, y):
        x = self.wide(self.first(y).tanh()[:, None].expand(-1, 3, -1)).sin_()
        return self.last(x).mean(1) + self.wide(self.first(y)[y[:, 0] > 9]).sum()


class Bare(Wide):
    """A layer called without a bias, and with one bias for each sample."""

    def forward(self, t, y):
        hidden = nn.functional.linear(self.first(y).tanh(), self.wide.weight).sin()
        bias = self.wide.bias.expand(len(y), -1)
        return self.last(nn.functional.linear(hidden, self.wide.weight, bias).tanh())


@pytest.mark.parametrize("field", [Reused, Changed, Bare])
def test_unusual_wide_layers_have_the_rows_of_single_sweeps(field):
    """In one sweep for all rows."""
    dynamics = adjsim.ODE(field())
    y = torch.rand(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    run = adjsim.simulate(
        dynamics, dynamics.init(y.requires_grad_()), [0.0, 0.3],
        solver=adjsim.RungeKutta("euler", 0.1), adjoint=CheckpointAdjoint(),
    )  # fmt: skip
    wide = dynamics.fun.wide.weight
    inputs, rows = [y, wide, dynamics.fun.first.weight], rows_of([run.final.y], 3)
    before = run.stats["energy_evaluations"]
    expected = one_by_one([run.final.y], inputs, rows)
    each = run.stats["energy_evaluations"] - before
    found = at_once([run.final.y], inputs, rows)
    assert run.stats["energy_evaluations"] - before - each == each // 3
    for x, z in zip(found, expected, strict=True):
        torch.testing.assert_close(x, z, rtol=1e-12, atol=1e-13)


def test_compiled_loops_of_flows_undo_the_part_of_a_step_that_may_be_absent():
    potential = adjsim.Harmonic(parameter(0.7))
    dynamics, found = adjsim.ESH(potential), []
    for compiled in (False, True):
        run = adjsim.simulate(
            dynamics, dynamics.init(torch.eye(3, 2).double(), torch.ones(3, 2).double()),
            [0.0, 0.3], solver=adjsim.Splitting("EAE", 0.1), adjoint=ReversibleAdjoint(),
            compile=compiled,
        )  # fmt: skip
        found += torch.autograd.grad(run.final.position.sum(), potential.parameters())
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


class InThread(torch.autograd.Function):
    """Squares, whose products are taken in a thread, as autograd takes those of a GPU."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, c):
        (x,) = ctx.saved_tensors
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(pulled_together, lambda y: [2 * x * y], [c]).result()[0]


def test_rows_reach_threads_of_autograd():
    x = torch.linspace(0.1, 1.0, 4, dtype=torch.float64, requires_grad=True)
    rows = rows_of([x], 3)[0]
    (found,) = torch.autograd.grad(InThread.apply(x), x, rows, is_grads_batched=True)
    torch.testing.assert_close(found, rows * 2 * x.detach(), rtol=1e-15, atol=0)
