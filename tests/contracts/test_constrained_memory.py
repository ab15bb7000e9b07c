"""The bath with a memory under constraints: its flow has the closed form of its docstring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import adjsim
from tests.constraints import WATER_LENGTHS, tensor, waters
from tests.suites import DriftContract, FlowContract, flow

MASS, KT = tensor([4.0, 1.0, 2.0]), 0.7
POSITION, INDEX = waters(1)
# An underdamped bath, one of three exponentials in no order, and one with slaved variables.
BATHS = {
    "underdamped": ((1.0,), (9.0,), 0.1),
    "three": ((3.0, 0.5, 10.0), (2.0, 4.0, 100.0), 0.1),
    "stiff": ((100.0, 200.0), (100.0, 200.0), 0.02),
}


def free(rates, strengths):
    return adjsim.GeneralizedLangevin(adjsim.Harmonic(0.0), MASS, KT, rates, strengths)


def water(rates, strengths):
    constraints = adjsim.DistanceConstraints(INDEX, tensor(WATER_LENGTHS))
    return adjsim.Constrained(free(rates, strengths), constraints)


def columns(dynamics, h, y: Tensor, xi: Tensor) -> Tensor:
    """Flow of G from the columns of y, (p, z_1, ...), with the columns of noise."""
    starts, noise = (x.mT.reshape(x.shape[1], -1, 3, 3) for x in (y, xi))
    state = dynamics.state_type(POSITION.expand(len(starts), 3, 3), starts[:, 0], starts[:, 1:])
    end = flow(dynamics, "G", state, h, noise.unbind(1))
    return torch.cat([end.momentum[:, None], end.memory], 1).flatten(1).mT


@pytest.mark.parametrize("name", BATHS)
def test_the_flow_is_exact_and_keeps_the_canonical_density(name):
    rates, strengths, h = BATHS[name]
    held, count = water(rates, strengths), len(rates)
    c = held.constraints.coefficients(held.masses, POSITION)
    one = torch.eye(9, dtype=torch.float64).reshape(9, 3, 3)
    P = held.constraints.project(c, POSITION.expand(9, 3, 3), one).flatten(1).mT
    assert round(float(P.trace())) == 9 - 3
    every = torch.block_diag(*[P] * (count + 1))
    allowed = torch.block_diag(P, *[torch.eye(9, dtype=torch.float64)] * count)
    nothing, xi = torch.zeros_like(allowed), torch.eye(len(allowed), dtype=torch.float64)
    moved = columns(held, h, allowed, nothing)
    # Tangent parts move as without constraints, normal ones decay.
    unheld = columns(free(rates, strengths), h, every, nothing)
    torch.testing.assert_close(moved @ every, unheld, rtol=0, atol=1e-14)
    decay = torch.exp(-h * tensor((0.0, *rates))).repeat_interleave(9).diag()
    torch.testing.assert_close(moved @ (allowed - every), decay @ (allowed - every))
    # The covariance of tangent momenta and of all memories is kept.
    thermal = torch.diag(MASS.repeat_interleave(3)) * KT
    density = torch.block_diag(P @ thermal, *[thermal] * count)
    noise = columns(held, h, nothing, xi)
    torch.testing.assert_close(
        moved @ density @ moved.mT + noise @ noise.mT, density, rtol=0, atol=1e-13
    )


def in_water():
    dynamics = water(*BATHS["three"][:2])
    return dynamics, "G", dynamics.init(POSITION.expand(2, 3, 3), generator=0)


@pytest.mark.parametrize(("dynamics", "letter", "state"), [in_water()])
class TestBath(DriftContract, FlowContract):
    """Its flow starts along the drift, and its inverse and product are those of the flow."""


def test_single_atoms_move_as_without_constraints():
    """Of a rod and a free atom in a well that is harmonic, the atom has a path of its own."""
    numbers = {"mass": MASS, "kT": KT, "rates": (1.0, 4.0), "strengths": (1.0, 8.0)}
    inner = adjsim.GeneralizedLangevin(adjsim.Harmonic(1.5), **numbers)
    held = adjsim.Constrained(inner, adjsim.DistanceConstraints([[0, 2]], 1.2))
    ends = []
    for dynamics in (inner, held):
        start = dynamics.init(1.2 * POSITION / WATER_LENGTHS[1], generator=0)
        ends.append(
            adjsim.simulate(
                dynamics, start, [0.0, 2.0], solver=adjsim.Splitting("BAGAB", 0.1), generator=1
            ).final
        )
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one[..., 1, :], other[..., 1, :], rtol=0, atol=1e-13)
    assert float((ends[0].momentum - ends[1].momentum).abs().max()) > 0.1


def test_a_step_too_long_for_shears_is_refused():
    # The memory that a momentum leaves after h, exp(-h/2) 3 sin(wh)/w, is zero at h = pi/w.
    w = (9 - 0.25) ** 0.5
    dynamics = water(*BATHS["underdamped"][:2])
    start = dynamics.init(POSITION, generator=0)
    with pytest.raises(ValueError, match=f"which needs h < {torch.pi / w:.3g}: use a smaller dt"):
        adjsim.simulate(dynamics, start, [0.0, 1.1], solver=adjsim.Splitting("BAGAB", 1.1))
