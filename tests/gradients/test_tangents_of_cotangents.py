"""Backward passes in forward mode: each is linear, so the derivative along w is the pass of w."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import adjsim
from adjsim.core import operators
from adjsim.potentials.charges.ewald import Ewald, ParticleMeshEwald
from tests.contracts import test_elastic
from tests.contracts.test_pair_operator import triple
from tests.devices.systems import SYSTEMS

ADJOINTS = {
    "direct": adjsim.DirectAdjoint(),
    "checkpoint": adjsim.CheckpointAdjoint(),
    "exact": adjsim.ReversibleAdjoint(),
}
# A run of a field, of noise, of a thermostat, of charges on a mesh, of listed pairs and of sites.
CASES = [
    (name, way, compiled)
    for name in ("rk4", "langevin", "chain-1", "mesh", "joined", "sites")
    for way in ADJOINTS
    for compiled in (False, True)
    if (name, way) != ("rk4", "exact") and not (compiled and name not in ("rk4", "langevin"))
]


def assert_linear(outputs: Tensor, wanted: list[Tensor]) -> None:
    """Compare the derivative of a backward pass along w with the pass of w."""
    drawn = torch.Generator().manual_seed(5)
    v, w = (torch.randn(outputs.shape, generator=drawn, dtype=outputs.dtype) for _ in range(2))

    def pull(row: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            outputs, wanted, row, retain_graph=True, allow_unused=True, materialize_grads=True
        )

    expected = pull(w)
    with forward_ad.dual_level():
        dual = [forward_ad.unpack_dual(x).tangent for x in pull(forward_ad.make_dual(v, w))]
    for found in (dual, torch.func.jvp(pull, (v,), (w,))[1]):
        for x, y in zip(found, expected, strict=True):
            x = torch.zeros_like(y) if x is None else x
            # Rounding errors of sums in another order, beside the largest entry of all gradients.
            scale = max(float(z.abs().max()) for z in expected)
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13 * scale)


@pytest.mark.parametrize(("name", "way", "compiled"), CASES)
def test_runs(name: str, way: str, compiled: bool) -> None:
    system = SYSTEMS[name]()
    solver = system.exact if way == "exact" else system.solver
    state = type(system.state)._make(
        x.detach().requires_grad_(x.is_floating_point()) for x in system.state
    )
    run = adjsim.simulate(
        system.dynamics, state, [0.0, 3 * solver.dt], solver=solver, adjoint=ADJOINTS[way],
        generator=1, compile=compiled,
    )  # fmt: skip
    wanted = [x for x in (*state, *system.dynamics.parameters()) if x.requires_grad]
    assert_linear(run.final[0], wanted)


def test_minima() -> None:
    potential = test_elastic.body("neo-hookean")
    position = test_elastic.moved(test_elastic.SOLID, 0.02)
    found = adjsim.minimize(potential, position, fixed=torch.arange(4))
    wanted = list(potential.parameters())
    assert_linear(found, wanted)
    # Rows share the factors of the Hessian.
    rows = torch.stack([torch.ones_like(found), found.detach()])
    together = torch.autograd.grad(found, wanted, rows, is_grads_batched=True, retain_graph=True)
    for x, y in zip(together, torch.autograd.grad(found, wanted, rows[1]), strict=True):
        assert torch.equal(x[1], y)


def end(adjoint: Any = None, compiled: bool = False) -> tuple[Tensor, Tensor]:
    """The end of a run of -r y, and the rates r."""
    rate = torch.nn.Parameter(torch.tensor([0.3, 0.7], dtype=torch.float64))
    ode = adjsim.ODE(Decay(rate))
    run = adjsim.simulate(
        ode, ode.init(torch.ones(2).double()), [0.0, 0.2], solver=adjsim.RungeKutta("rk4", 0.1),
        adjoint=adjoint or adjsim.CheckpointAdjoint(), compile=compiled,
    )  # fmt: skip
    return run.final.y, rate


def pulled(output: Tensor, wanted: Tensor, row: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(output, wanted, row, retain_graph=True, **options)[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_passes_inside_of_transforms(compiled: bool) -> None:
    """They are right where the cotangent is not of the transform, and refused where it is lost."""
    final, rate = end(compiled=compiled)
    v, one = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.ones((), dtype=torch.float64)
    expected = pulled(final, rate, v)
    for found in (
        torch.func.jvp(lambda a: a * pulled(final, rate, v), (one,), (one,))[1],
        torch.func.vmap(lambda a: a * pulled(final, rate, v))(one[None])[0],
        torch.func.jacrev(lambda a: a * pulled(final, rate, v))(one),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)
    for nested in (
        lambda: torch.func.grad(lambda a: pulled(final, rate, a * v).sum())(one),
        lambda: torch.func.jacfwd(lambda c: pulled(final, rate, c))(v),
        lambda: torch.func.jvp(
            lambda c: torch.func.grad(lambda a: (a * pulled(final, rate, c)).sum())(one), (v,), (v,)
        ),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.func\.jvp for each tangent"):
            nested()


@pytest.mark.parametrize("what", ["run", "pairs", "listed pairs", "ewald", "mesh"])
def test_rows_with_tangents(what: str) -> None:
    if what == "run":
        output, wanted = end()
    else:
        q = triple().requires_grad_()
        charge, box = torch.tensor([1.0, -0.5, -0.5]), [6.0] * 3
        potential = {
            "pairs": lambda: adjsim.LennardJones(),
            "listed pairs": lambda: adjsim.LennardJones(cutoff=2.0, box=box),
            "ewald": lambda: Ewald(charge, box=box, cutoff=2.9),
            "mesh": lambda: ParticleMeshEwald(charge, box=box, cutoff=2.9),
        }[what]()
        output, wanted = adjsim.force(potential.double(), q), q
    rows = torch.stack([torch.ones_like(output), output.detach()])
    expected = [pulled(output, wanted, row) for row in rows]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn_like(rows), rows)
        found = pulled(output, wanted, dual, is_grads_batched=True)
        tangent = forward_ad.unpack_dual(found).tangent
    torch.testing.assert_close(tangent, torch.stack(expected), rtol=1e-11, atol=1e-12)


class Decay(torch.nn.Module):
    """The field -r y."""

    def __init__(self, rate: torch.nn.Parameter) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.rate * y


def test_operators_refuse_tangents() -> None:
    @operators.operator("of_a_test")
    def halved(x: Tensor) -> Tensor:
        return 0.5 * x

    x = torch.ones(3)
    with forward_ad.dual_level():
        assert torch.equal(halved(x), 0.5 * x)
        with pytest.raises(NotImplementedError, match="has no derivative"):
            halved(forward_ad.make_dual(x, x))


class Quartic(torch.nn.Module):
    """The energy a sum(q^4), whose force is taken by autograd."""

    def __init__(self, a: Tensor) -> None:
        super().__init__()
        self.register_buffer("a", a)

    def forward(self, q: Tensor) -> Tensor:
        return self.a * (q**4).sum((-1, -2))


def dual_quartic(a: float, along: float) -> Quartic:
    one = torch.ones((), dtype=torch.float64)
    return Quartic(forward_ad.make_dual(a * one, along * one))


@pytest.mark.parametrize("graph", [False, True])
def test_forces_and_runs_by_autograd_in_forward_mode(graph: bool) -> None:
    """Tangents of the position and of a number that is a buffer."""
    q, v = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0)).double()

    def run(potential: Quartic, position: Tensor) -> Tensor:
        dynamics = adjsim.Hamiltonian(potential)
        start = dynamics.init(position, torch.zeros_like(position))
        solver = adjsim.VelocityVerlet(0.1)
        return adjsim.simulate(dynamics, start, [0.0, 0.5], solver=solver).final.position

    with torch.set_grad_enabled(graph):
        for function in (lambda u, x: adjsim.force(u, x), run):
            with forward_ad.dual_level():
                found = function(dual_quartic(0.3, 2.0), forward_ad.make_dual(q, v))
                tangent = forward_ad.unpack_dual(found).tangent
            h = 1e-5
            up, down = (
                function(Quartic(torch.tensor(0.3 + 2 * s * h).double()), q + s * h * v)
                for s in (1, -1)
            )
            torch.testing.assert_close(tangent, (up - down) / (2 * h), rtol=1e-7, atol=1e-8)


def cubic(k: Tensor) -> adjsim.ODE:
    return adjsim.ODE(lambda t, y, k: 1 - k * y**3, args=(k,))


def end_of(solver: Any) -> Any:
    def end(k: Tensor, y: Tensor) -> Tensor:
        ode = cubic(k)
        return adjsim.simulate(ode, ode.init(y), [0.0, 1.0], solver=solver).final[0]

    return end


IMPLICIT = {
    "backward euler": end_of(adjsim.BackwardEuler(0.05)),
    "midpoint": end_of(adjsim.ImplicitMidpoint(0.05)),
    "steady state": lambda k, y: adjsim.steady_state(cubic(k), y).y,
}


@pytest.mark.parametrize("name", IMPLICIT)
@pytest.mark.parametrize("graph", [False, True])
def test_implicit_equations_in_forward_mode(name: str, graph: bool) -> None:
    """Tangents of a number and of the start, by the implicit function theorem."""
    solve, one = IMPLICIT[name], torch.ones(()).double()
    k, y = 0.7 * one, torch.tensor([1.3, 0.4]).double()
    with torch.set_grad_enabled(graph):
        with forward_ad.dual_level():
            tangents = 2 * one, torch.tensor([0.3, -1.0]).double()
            duals = (forward_ad.make_dual(*x) for x in zip((k, y), tangents, strict=True))
            found = forward_ad.unpack_dual(solve(*duals)).tangent
        h = 1e-5
        up, down = (solve(k + s * h * tangents[0], y + s * h * tangents[1]) for s in (1, -1))
    torch.testing.assert_close(found, (up - down).detach() / (2 * h), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", IMPLICIT)
def test_implicit_equations_refuse_second_derivatives_in_forward_mode(name: str) -> None:
    """The theorem holds for the first one: its matrix and its point are constants."""
    leaf = torch.tensor(0.7).double().requires_grad_()
    y = torch.tensor([1.3, 0.4]).double()
    with forward_ad.dual_level():
        found = IMPLICIT[name](forward_ad.make_dual(leaf, torch.ones_like(leaf)), y).square().sum()
        for part in (found, forward_ad.unpack_dual(found).tangent):
            with pytest.raises(RuntimeError, match="a backward pass of dual tensors"):
                torch.autograd.grad(part, leaf, retain_graph=True)


def test_what_has_no_derivative_forward_in_time_refuses_tangents() -> None:
    q, one = torch.ones(1, 2, 3).double(), torch.ones(2).double()
    with forward_ad.dual_level():
        dynamics = adjsim.Hamiltonian(dual_quartic(0.3, 2.0))
        start, solver = dynamics.init(q, torch.zeros_like(q)), adjsim.VelocityVerlet(0.1)
        with pytest.raises(NotImplementedError, match="forward in time"):
            adjsim.simulate(
                dynamics, start, [0.0, 0.2], solver=solver, adjoint=adjsim.CheckpointAdjoint()
            )
        with pytest.raises(NotImplementedError, match="forward in time"):
            adjsim.simulate(dynamics, start, [0.0, 0.2], solver=solver, compile=True)
        ts = forward_ad.make_dual(torch.tensor([0.0, 0.2]).double(), one)
        with pytest.raises(ValueError, match="has a tangent"):
            adjsim.simulate(adjsim.Hamiltonian(Quartic(one[0])), start, ts, solver=solver)
        with pytest.raises(NotImplementedError, match="forward in time"):
            adjsim.minimize(dual_quartic(0.3, 2.0), q)
        with pytest.raises(NotImplementedError, match="forward in time"):
            adjsim.simulate(dynamics, start, [0.0, 0.2], solver=adjsim.BackwardEuler(0.1))
        ode = cubic(forward_ad.make_dual(one[0], one[0]))
        for method in ("dopri5", "scipy_solver"):
            with pytest.raises(NotImplementedError, match=f"{method} has no derivatives forward"):
                adjsim.simulate(ode, ode.init(one), [0.0, 1.0], solver=adjsim.ODESolver(method))
        # Of a tensor that is not registered, the rates have the tangent.
        hidden = forward_ad.make_dual(one[0], one[0])
        ode = adjsim.ODE(lambda t, y: -hidden * y)
        for adjoint in (adjsim.CheckpointAdjoint(), adjsim.BacksolveAdjoint()):
            solver = adjsim.ODESolver("rk4", dt=0.1)
            if isinstance(adjoint, adjsim.CheckpointAdjoint):
                solver = adjsim.RungeKutta("rk4", 0.1)
            with pytest.raises(NotImplementedError, match="forward in time"):
                adjsim.simulate(ode, ode.init(one), [0.0, 1.0], solver=solver, adjoint=adjoint)
    with pytest.raises(NotImplementedError, match=r"not inside of torch\.func"):
        torch.func.grad(lambda x: adjsim.minimize(Quartic(one[0]), x).sum())(q[0])
