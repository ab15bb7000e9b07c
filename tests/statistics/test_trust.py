"""What estimators must not do in silence: overflow, miss what an observable reads, or rest on a handful of replicas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim
from adjsim import Reweighting, Simulation, TimeAverage
from tests.problems import parameter


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def squared(state):
    return state.position[:, 0, 0] ** 2


class Offset(nn.Module):
    """A harmonic well above a constant."""

    def __init__(self):
        super().__init__()
        self.k, self.offset = parameter(1.0), parameter(0.0)

    def forward(self, position):
        return 0.5 * self.k * (position**2).sum((-1, -2)) + self.offset


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_reweighting_does_not_see_a_constant_in_the_energy(offset):
    """exp(-1000) is zero, and its inverse infinite."""
    dynamics = adjsim.OverdampedLangevin(Offset(), 1.0, 1.0)
    simulation = Simulation(dynamics, lambda n, g: dynamics.init(torch.ones(n, 1, 1)), [0.0, 2.0], adjsim.EulerMaruyama(0.1))
    estimator, observable = Reweighting(), TimeAverage(squared)
    estimator(simulation, observable, replicas=32, chunks=4, generator=seeded())
    with torch.no_grad():
        dynamics.potential.k += 0.1
    before = estimator(simulation, observable, replicas=32, chunks=4, generator=seeded())
    with torch.no_grad():
        dynamics.potential.offset += offset
    after = estimator(simulation, observable, replicas=32, chunks=4, generator=seeded())
    assert not after.diagnostics["sampled"]
    # Energies of 1,000 are rounded to 1e-13.
    torch.testing.assert_close(after.value, before.value, rtol=1e-11, atol=0)
    torch.testing.assert_close(after.grad["potential.k"], before.grad["potential.k"], rtol=1e-10, atol=0)
    torch.testing.assert_close(after.grad_stderr["potential.k"], before.grad_stderr["potential.k"], rtol=1e-10, atol=0)
    assert abs(float(after.grad["potential.offset"])) < 1e-12
