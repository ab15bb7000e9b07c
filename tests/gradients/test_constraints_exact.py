"""Exact constrained runs: they retrace bit for bit, with the gradients of the lattice states."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.dynamics.constraints.exact import RARE, _read, _written
from tests.constraints import (
    WATER_LENGTHS,
    ClustersWithMemory,
    MixedClusters,
    tensor,
    waters,
    weighted,
)


def test_differences_come_back_from_buffers():
    differences = torch.arange(-RARE // 2, RARE // 2 + 1)
    buffers = torch.cat([torch.arange(1000), 2**33 - torch.arange(1000)])[:, None]
    written = _written(buffers.expand(-1, len(differences)), differences)
    # A bijection: every pair has a number of its own.
    assert len(written.unique()) == written.numel()
    before, found = _read(written)
    assert torch.equal(before, buffers.expand_as(before))
    assert torch.equal(found, differences.expand_as(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "scheme"),
    [
        (MixedClusters(), "BAOAB"),
        pytest.param(MixedClusters(), "OBAABO", marks=pytest.mark.slow),
        pytest.param(ClustersWithMemory(), "BAGAB", marks=pytest.mark.slow),
    ],
)
def test_exact_runs_have_the_gradient_of_backpropagation(system, scheme):
    found = []
    numbers = system.parameters()
    for adjoint in (adjsim.ReversibleAdjoint(), adjsim.DirectAdjoint()):
        path = system.run(numbers, 8, scheme, exact=True, adjoint=adjoint)
        found.append(torch.autograd.grad(weighted(path.final), list(numbers.values())))
        assert 0 < path.stats["buffer_bits"] < 2
        held = system.constrained(system.leaves).constraints
        assert float(held.excess(path.final.position).detach().abs().max()) < 1e-7
    plain = system.run(system.leaves, 8, scheme)
    # The grid moves an atom by 1e-8 in a step.
    torch.testing.assert_close(plain.position, path.position.detach(), rtol=0, atol=1e-5)
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def water_run(dynamics, start, solver, ts, adjoint=None, **options):
    start = type(start)(*(x.detach().requires_grad_() for x in start))
    path = adjsim.simulate(
        dynamics, start, ts, solver=solver, adjoint=adjoint or adjsim.ReversibleAdjoint(), **options
    )
    return path, torch.autograd.grad(weighted(path.final), start.position)[0]


@pytest.mark.parametrize("scheme", ["BAB", "NBABN"])
def test_runs_without_noise_retrace(scheme):
    position, index = waters(2)
    potential = adjsim.SoftSphere(0.5, 1.5, exclusions=index)
    inner = (
        adjsim.Hamiltonian(potential)
        if scheme == "BAB"
        else adjsim.NoseHooverChain(potential, kT=0.7, tau=0.5, dof=12)
    )
    constraints = adjsim.DistanceConstraints(index, tensor(WATER_LENGTHS * 2))
    dynamics = adjsim.Constrained(inner, constraints)
    momentum = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Two systems, of which one is colder.
    start = dynamics.init(position.expand(2, 6, 3), torch.stack([momentum, 0.1 * momentum]))
    solver = adjsim.Splitting(scheme, 0.01, exact=True)
    path, grad = water_run(dynamics, start, solver, [0.0, 0.15])
    assert path.stats["reconstruction_error"] == 0
    _, expected = water_run(dynamics, start, solver, [0.0, 0.15], adjsim.DirectAdjoint())
    torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-11)
    first = adjsim.simulate(dynamics, start, [0.0, 0.05], solver=solver)
    second = adjsim.simulate(dynamics, None, [0.05, 0.15], solver=solver, continues=first)
    assert torch.equal(second.final.position, path.final.position)


def test_words_with_too_many_drifts_are_refused():
    system = MixedClusters()
    with pytest.raises(
        ValueError, match=r"30\.8125 bits .* can take 29\. .* fewer constrained drifts"
    ):
        system.run(system.leaves, 2, f"B{17 * 'A'}OB", exact=True)
