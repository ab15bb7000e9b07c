"""Backward passes in forward mode: each is linear, so the derivative along w is the pass of w."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import adjsim
from adjsim.core import operators
from tests.contracts import test_elastic
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
    assert_linear(found, list(potential.parameters()))


def test_transforms_around_the_derivative_of_a_pass_are_refused() -> None:
    rate = torch.nn.Parameter(torch.tensor([0.3, 0.7], dtype=torch.float64))
    ode = adjsim.ODE(Decay(rate))
    final = adjsim.simulate(
        ode, ode.init(torch.ones(2).double()), [0.0, 0.2], solver=adjsim.RungeKutta("rk4", 0.1),
        adjoint=adjsim.CheckpointAdjoint(),
    ).final.y  # fmt: skip

    def pull(row: Tensor) -> Tensor:
        return torch.autograd.grad(final, rate, row, retain_graph=True)[0]

    with pytest.raises(NotImplementedError, match=r"call torch\.func\.jvp for each tangent"):
        torch.func.jacfwd(pull)(torch.ones(2).double())


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
