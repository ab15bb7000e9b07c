"""Compiled implicit steps of vector fields: solutions, gradients, refusals, and their C++."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import adjsim
from adjsim import (
    BackwardEuler,
    CheckpointAdjoint,
    DirectAdjoint,
    ImplicitMidpoint,
    ReversibleAdjoint,
    TimeAverage,
)
from adjsim.adjoints.loops.runner import cache
from adjsim.compiler import (
    LoopSpec,
    compile_loop,
    has_negative_eigenvalue,
    has_negative_eigenvalue_if,
    loops,
    solve,
)
from adjsim.dynamics.fields.ode import ODE
from tests.fields import Net, equation, start
from tests.gradients.test_implicit_fields import Mean, loss_of, robertson
from tests.gradients.test_table import agree
from tests.problems import by_inductor, parameter, slow_but

SOLVERS = [BackwardEuler(0.1), ImplicitMidpoint(0.1)]
# Solutions differ by the tolerance of Newton's method, 1e-14 a step, and by rounding.
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def gradients(solver, named, batch, adjoint, compile):
    dynamics, y = equation(None, named), start(batch).requires_grad_()
    inputs = {**dict(dynamics.named_parameters()), "y": y}
    loss, made = loss_of(dynamics, y, solver, named, adjoint, compile=compile)
    return dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True)), made


@pytest.mark.parametrize(
    ("solver", "batch", "named"),
    [
        (SOLVERS[1], (2, 3), True),
        pytest.param(SOLVERS[0], (2, 3), True, marks=pytest.mark.slow),
        *(pytest.param(solver, (), False, marks=pytest.mark.marathon) for solver in SOLVERS),
    ],
    ids=repr,
)
def test_gradients(solver, batch, named):
    expected, _ = gradients(solver, named, batch, DirectAdjoint(), False)
    for adjoint in (DirectAdjoint(), CheckpointAdjoint(3)):
        found, made = gradients(solver, named, batch, adjoint, True)
        agree(found, expected, 1e-12)
        assert made.stats["compiled_forward"] == made.stats["compiled_backward"] == "C++"


@pytest.mark.slow
def test_backward_euler_is_undone():
    """Its inverse is explicit, ``y = y' - h f(y')``; that of the midpoint rule iterates."""
    expected, _ = gradients(SOLVERS[0], False, (4,), DirectAdjoint(), False)
    found, made = gradients(SOLVERS[0], False, (4,), ReversibleAdjoint(), True)
    agree(found, expected, 1e-10)
    assert made.stats["compiled_backward"] == "C++"
    with pytest.raises(
        TypeError, match=r"cannot undo the steps of ImplicitMidpoint.*takes an iteration"
    ):
        gradients(SOLVERS[1], False, (4,), ReversibleAdjoint(), True)


@pytest.mark.parametrize("by", ["torch", pytest.param("Inductor", marks=pytest.mark.marathon)])
def test_systems_that_are_not_printed(by, monkeypatch):
    """Torch solves them in a printed loop, and Inductor calls torch too."""
    expected, _ = gradients(SOLVERS[1], False, (4,), DirectAdjoint(), False)
    monkeypatch.setattr("adjsim.compiler.systems.LARGEST_SYSTEM", 1)
    if by == "Inductor":
        monkeypatch.setattr(loops, "compile_to_cpp", by_inductor)
    found, made = gradients(SOLVERS[1], False, (4,), CheckpointAdjoint(), True)
    agree(found, expected, 1e-12)
    for path in (made.stats["compiled_forward"], made.stats["compiled_backward"]):
        assert path.startswith(f"C++, and torch for {'adjsim' if by == 'torch' else by}")


class VanDerPol(nn.Module):
    def __init__(self, mu):
        super().__init__()
        self.mu = nn.Parameter(mu.double())

    def forward(self, t, y):
        x, v = y.unbind(-1)
        return torch.stack([v, self.mu * (1 - x**2) * v - x + torch.sin(t)], -1)


class Chain(nn.Module):
    """Oscillators with springs to their neighbours, far from resolved: J is not dominated by its
    diagonal, and its eigenvalues are pairs."""

    def __init__(self):
        super().__init__()
        self.stiffness = parameter(1e4)

    def forward(self, t, y):
        q, p = y.chunk(2, -1)
        stretch = torch.diff(q, prepend=torch.zeros_like(q[..., :1]))
        force = -self.stiffness * (stretch + 0.1 * stretch**3)
        return torch.cat([p, force - torch.cat([force[..., 1:], 0 * force[..., :1]], -1)], -1)


STIFF = {
    "van der Pol": (lambda: VanDerPol(torch.tensor([1.0, 30.0, 1000.0])), [[2.0, 0.0]] * 3, 0.05),
    "chain": (Chain, [[0.1, 0.2, 0.1, 0.0, 0.3, 0.0]], 0.1),
    "robertson": (lambda: robertson, [1.0, 0.0, 0.0], 0.02),
}


@pytest.mark.parametrize(
    ("name", "solver"),
    slow_but(
        lambda name, solver: (name, solver) == ("van der Pol", ImplicitMidpoint),
        itertools.product(STIFF, [BackwardEuler, ImplicitMidpoint]),
        marathon=lambda name, solver: (
            (name, solver) not in (("chain", ImplicitMidpoint), ("robertson", BackwardEuler))
        ),
    ),
)
def test_stiff_fields(name, solver):
    """With halved Newton steps, and matrices whose eigenvalues are needed."""
    make, y, dt = STIFF[name]
    results = []
    for compile in (False, True):
        torch.manual_seed(0)
        dynamics = ODE(make())
        begin = torch.tensor(y, dtype=torch.float64).requires_grad_()
        made = adjsim.simulate(
            dynamics,
            dynamics.init(begin),
            torch.arange(5) * 10 * dt,
            solver=solver(dt),
            adjoint=DirectAdjoint(),
            compile=compile,
        )
        inputs = [begin, *dynamics.parameters()]
        results.append([made.y.detach(), *torch.autograd.grad(made.y.square().sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        # Stiff matrices amplify the rounding of their linear systems.
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "adjoint",
    [
        pytest.param(DirectAdjoint(), marks=pytest.mark.marathon),
        pytest.param(CheckpointAdjoint(3), marks=pytest.mark.slow),
    ],
    ids=["direct", "ck"],
)
def test_averages(adjoint):
    def square(state):
        return state.y.square().mean()

    results = []
    for compile in (False, True):
        dynamics = ODE(Net())
        made = adjsim.simulate(
            dynamics,
            dynamics.init(start((4,))),
            [0.0, 1.5],
            solver=ImplicitMidpoint(0.1),
            adjoint=adjoint,
            record=TimeAverage(square, burn_in=0.4),
            compile=compile,
        )
        inputs = list(dynamics.parameters())
        results.append([made.record.detach(), *torch.autograd.grad(made.record, inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(None, marks=pytest.mark.marathon),
        pytest.param(TimeAverage(lambda state: state.y.square().mean()), marks=pytest.mark.slow),
    ],
    ids=["end", "average"],
)
def test_a_step_that_is_not_compiled_goes_on(record, monkeypatch):
    """Steps that a loop leaves are run by themselves; nothing else changes.

    With one iteration at most for a step, no loop solves a step.
    """
    results, left = [], []
    for most in (60, 1):
        monkeypatch.setattr("adjsim.solvers.implicit.field.LOOP_ITERATIONS", most)
        cache.drop(lambda key: True)
        dynamics = ODE(Net())
        y = start((4,)).requires_grad_()
        made = adjsim.simulate(
            dynamics,
            dynamics.init(y),
            [0.0, 0.5, 0.8],
            solver=BackwardEuler(0.1),
            adjoint=CheckpointAdjoint(2),
            record=record,
            compile=True,
        )
        value = made.y.square().sum() if record is None else made.record
        results.append([value.detach(), *torch.autograd.grad(value, [y, *dynamics.parameters()])])
        left.append(made.stats["energy_evaluations"])
    torch.testing.assert_close(results[1], results[0], **CLOSE)
    # A step is evaluated in a loop, and again alone.
    assert left[1] > left[0]


def compiled(function, *inputs):
    """Run a function of tensors once in a C++ loop."""
    return loop_of(function, *inputs)(*inputs)


def loop_of(function, *inputs):
    """Compile a C++ loop that runs a function once, on tensors of these shapes."""
    Constants, Carry = namedtuple("Constants", ["count"]), namedtuple("Carry", ["inputs", "out"])
    carry = Carry(tuple(inputs), tuple(map(torch.clone, function(*inputs))))
    spec = LoopSpec(
        lambda constants, carry: (torch.zeros_like(constants.count), carry),
        lambda k, count: k < count,
        lambda constants, k, carry: (
            k + 1,
            Carry(
                tuple(map(torch.clone, carry.inputs)),
                tuple(map(torch.clone, function(*carry.inputs))),
            ),
            (),
        ),
    )
    constants = Constants(torch.tensor(1))
    loop, path, _ = compile_loop(
        spec, nullcontext, constants, carry, exact=False, short=False, what="a test"
    )
    assert path == "C++"

    def run(*inputs):
        return loop(constants, Carry(inputs, tuple(map(torch.zeros_like, carry.out))))[0].out

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_the_solution_of_systems(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.randn(2, 3, rows, rows, generator=generator, dtype=dtype)
    # A pivot that is zero, and one that is tiny beside its column, where there are several rows.
    matrix[0, 0, 0, 0], matrix[0, 1, 0, 0] = (0, 1e-30) if rows > 1 else (1, 2)
    right = torch.randn(2, 3, rows, generator=generator, dtype=dtype)
    in_a_loop = loop_of(solve, matrix, right)
    for m, run in ((matrix, in_a_loop), (matrix.mT, loop_of(solve, matrix.mT, right))):
        found, singular = run(m, right)
        assert not singular
        left = (m @ found.unsqueeze(-1)).squeeze(-1) - right
        # The residual of elimination with pivots.
        size = m.abs().sum(-1).amax() * found.abs().amax()
        assert float(left.abs().amax()) < 10 * rows * torch.finfo(dtype).eps * float(size)
    matrix[1, 1, -1] = 0
    assert in_a_loop(matrix, right)[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_negative_eigenvalues(rows, dtype):
    generator = torch.Generator().manual_seed(rows)

    def has(matrix, wanted):
        return (has_negative_eigenvalue_if(matrix, wanted),)

    wanted, answers = torch.tensor(True), set()
    in_a_loop = loop_of(has, torch.zeros(2, rows, rows, dtype=dtype), wanted)
    for shift in torch.linspace(-2, 3, 11):
        matrix = torch.randn(2, rows, rows, generator=generator, dtype=dtype)
        matrix += shift * torch.eye(rows, dtype=dtype)
        values = torch.linalg.eigvals(matrix)
        expected = bool(((values.imag == 0) & (values.real < 0)).any())
        answers.add(expected)
        assert bool(has_negative_eigenvalue(matrix)) is expected
        assert bool(in_a_loop(matrix, wanted)[0]) is expected
        assert not in_a_loop(matrix, ~wanted)[0]
    assert answers == {True, False}
    # Of one matrix among others, of a pair that turns, and of one on its way from a double root.
    if rows > 1:
        turn = 3 * torch.eye(rows, dtype=dtype).repeat(2, 1, 1)
        turn[1, :2, :2] = torch.tensor([[-0.1, 5.0], [-5.0, -0.1]], dtype=dtype)
        assert not in_a_loop(turn, wanted)[0]
        turn[1, :2, :2] = torch.tensor([[-0.1, 5.0], [0.0, -0.1]], dtype=dtype)
        assert in_a_loop(turn, wanted)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver", [pytest.param(SOLVERS[0], marks=pytest.mark.slow), SOLVERS[1]], ids=repr
)
def test_what_is_refused(solver):
    for rates in map(torch.tensor, ([50.0], [50.0, 50.0], [50.0, 60.0, -1.0])):
        ode = ODE(lambda t, y, c=rates: c * y**3)
        begin = ode.init(torch.ones(len(rates)))
        with pytest.raises(RuntimeError, match=r"does not continue .*grows too fast.*step 1\."):
            adjsim.simulate(ode, begin, [0.0, 0.3], solver=solver, compile=True)
    blowing = ODE(lambda t, y: y**2 + 1)
    begin = blowing.init(torch.ones(2, 1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"system 0 at .* did not converge|does not continue"):
        adjsim.simulate(blowing, begin, [0.0, 3.0], solver=solver, compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", [DirectAdjoint(), CheckpointAdjoint(), ReversibleAdjoint()])
def test_systems_that_depend_on_each_other_are_refused(adjoint):
    dynamics = ODE(Mean())
    begin = dynamics.init(start((4,), 3))
    with pytest.raises(ValueError, match="depend on each other"):
        adjsim.simulate(
            dynamics, begin, [0.0, 0.4], solver=BackwardEuler(0.1), adjoint=adjoint, compile=True
        ).y.sum().backward()


@pytest.mark.slow
def test_float32():
    results = []
    for compile in (False, True):
        dynamics, y = ODE(Net().float()), start((3,)).float().requires_grad_()
        made = adjsim.simulate(
            dynamics,
            dynamics.init(y),
            [0.0, 0.5],
            solver=ImplicitMidpoint(0.1),
            adjoint=DirectAdjoint(),
            compile=compile,
        )
        results.append([made.y.detach(), *torch.autograd.grad(made.y.square().sum(), [y])])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_field_without_a_derivative():
    """Its matrix is the identity, and its parameters have no gradient."""
    dynamics = ODE(lambda t, y: torch.ones_like(y) * t)
    y = start((2,)).requires_grad_()
    made = adjsim.simulate(
        dynamics,
        dynamics.init(y),
        [0.0, 0.4],
        solver=ImplicitMidpoint(0.1),
        adjoint=DirectAdjoint(),
        compile=True,
    )
    torch.testing.assert_close(made.final.y.detach(), y.detach() + 0.08, **CLOSE)
    (grad,) = torch.autograd.grad(made.final.y.sum(), y)
    torch.testing.assert_close(grad, torch.ones_like(grad), **CLOSE)


def test_a_hamiltonian_is_not_compiled():
    dynamics = adjsim.Hamiltonian(adjsim.potentials.Harmonic(1.0))
    begin = dynamics.init(*torch.ones(2, 1, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"not for BackwardEuler\(dt=0.1\) of Hamiltonian"):
        adjsim.simulate(dynamics, begin, [0.0, 0.4], solver=BackwardEuler(0.1), compile=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver", [SOLVERS[0], pytest.param(SOLVERS[1], marks=pytest.mark.slow)], ids=repr
)
def test_rates_that_become_nan(solver):
    ode = ODE(lambda t, y: torch.where(t > 0.52, torch.nan, -y))
    begin = ode.init(torch.ones(3, 2))
    with pytest.raises(FloatingPointError, match=r"NaN or infinity in step 6 \(t = 0\.6\)"):
        adjsim.simulate(ode, begin, [0.0, 1.0], solver=solver, compile=True)


@pytest.mark.parametrize(
    ("exponent", "solver"),
    slow_but(
        lambda exponent, solver: (exponent, solver) == (12, ImplicitMidpoint),
        itertools.product((8, 12), (BackwardEuler, ImplicitMidpoint)),
        marathon=lambda exponent, solver: exponent == 8,
    ),
)
def test_stiff_systems_in_other_bases(solver, exponent):
    """Eigenvalues from 1 to 1e8 and 1e12, whose field has the rounding of the largest."""
    generator = torch.Generator().manual_seed(0)
    n = 5
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    rates = 10 ** torch.linspace(0, exponent, n, dtype=torch.float64)
    matrix = -basis @ torch.diag(rates) @ basis.mT
    y, h = torch.randn(3, n, generator=generator, dtype=torch.float64), 0.1
    theta = solver.theta
    factors = (1 - (1 - theta) * h * rates) / (1 + theta * h * rates)
    exact = y @ basis @ torch.diag(factors**5) @ basis.mT
    dynamics = ODE(lambda t, y: (matrix * y.unsqueeze(-2)).sum(-1))
    for compile in (False, True):
        final = adjsim.simulate(
            dynamics, dynamics.init(y), [0.0, 0.5], solver=solver(h), compile=compile
        ).final.y
        # An evaluation of the field is off by the rounding of its largest eigenvalue.
        allowed = 20 * 2.2e-16 * h * 10**exponent
        torch.testing.assert_close(final, exact, rtol=0, atol=allowed)


@torch.no_grad()
@pytest.mark.parametrize(
    "solver", [pytest.param(BackwardEuler, marks=pytest.mark.marathon), ImplicitMidpoint]
)
def test_the_tolerance_belongs_to_the_loop(solver):
    """A run does not read the loop of another tolerance."""
    dynamics, y, ends = ODE(lambda t, y: torch.cos(t) - y**3), start((4,)), []
    for tol in (1e-2, 1e-14):
        runs = [
            adjsim.simulate(
                dynamics, dynamics.init(y), [0.0, 0.8], solver=solver(0.2, tol=tol), compile=compile
            )
            for compile in (False, True)
        ]
        torch.testing.assert_close(runs[1].final.y, runs[0].final.y, **CLOSE)
        ends.append(runs[1].final.y)
    assert float((ends[0] - ends[1]).abs().max()) > 1e-8
    assert repr(solver(0.2, tol=1e-2)).endswith("(dt=0.2, tol=0.01)")


@pytest.mark.parametrize("rows", [2, 3])
def test_a_fold_far_from_the_fast_rate(rows):
    """A growing mode beside one that is 3e7 times as fast, in float32 with its rounding of 1e-7."""
    rates = torch.tensor([-1e9, 30.0, -1.0][:rows])
    dynamics = ODE(lambda t, y: rates * y)
    for compile in (False, True):
        with pytest.raises(RuntimeError, match="does not continue"):
            adjsim.simulate(
                dynamics,
                dynamics.init(torch.ones(rows)),
                [0.0, 0.2],
                solver=BackwardEuler(0.1),
                compile=compile,
            )


def test_a_singular_matrix_gives_nan():
    matrix = torch.tensor([[[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    right = torch.ones(2, 2, dtype=torch.float64)
    for found, singular in (solve(matrix, right), compiled(solve, matrix, right)):
        assert singular
        assert found.isnan().tolist() == [[True, True], [False, False]]


def test_large_systems_are_refused():
    """Their loops would be compiled for minutes."""
    dynamics = ODE(lambda t, y: -y)
    begin = dynamics.init(torch.ones(65))
    with pytest.raises(TypeError, match="have 65 unknowns, more than 64"):
        adjsim.simulate(dynamics, begin, [0.0, 0.2], solver=BackwardEuler(0.1), compile=True)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "stiff"), [(torch.float32, 0.0), (torch.float64, 1e12)])
def test_changes_that_grow_are_not_rounding(dtype, stiff):
    """Newton's steps grow along a logarithm, far from its root, beside a stiff entry."""
    delta = 1e-5 if dtype == torch.float32 else 1e-6

    def field(t, y):
        a, b = y.unbind(-1)
        return torch.stack([5e-2 - 1e-2 * torch.log(1 + a / delta), -stiff * (b - 1)], -1)

    dynamics, begin = ODE(field), torch.tensor([0.0, 1.0], dtype=dtype)
    # By bisection of a = 0.05 - 0.01 log(1 + a / delta).
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        below = middle < 5e-2 - 1e-2 * math.log(1 + middle / delta)
        low, high = (middle, high) if below else (low, middle)
    for compile in (False, True):
        final = adjsim.simulate(
            dynamics, dynamics.init(begin), [0.0, 1.0], solver=BackwardEuler(1.0), compile=compile
        ).final.y
        assert float(final[0]) == pytest.approx(low, rel=20 * torch.finfo(dtype).eps)


@pytest.mark.slow
def test_a_fold_in_a_batch_with_a_loose_tolerance():
    """The matrices of the last changes are checked, whichever system ends last."""

    def field(t, y):
        a, b, c = y.unbind(-1)
        return torch.stack([-0.01 * torch.atan(1e3 * a), c * b, 0 * c], -1)

    dynamics = ODE(field)
    begin = dynamics.init(torch.tensor([[4e-3, 1.0, 0.0], [0.0, 1.0, 3.0]], dtype=torch.float64))
    for compile in (False, True):
        with pytest.raises(RuntimeError, match="does not continue"):
            adjsim.simulate(
                dynamics, begin, [0.0, 1.0], solver=BackwardEuler(1.0, tol=1e-2), compile=compile
            )
