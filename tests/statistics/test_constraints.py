"""Densities of constrained systems against exact ones."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import quad
from torch import nn

import adjsim
from tests.constraints import tensor

KT = 0.7


class Fixman(nn.Module):
    """Fixman's potential of a trimer of equal masses, kT/2 ln det(G M^-1 G^T)."""

    def forward(self, position):
        bonds = position[..., 1:, :] - position[..., :-1, :]
        cosine = (bonds[..., 0, :] * bonds[..., 1, :]).sum(-1)
        return KT / 2 * torch.log(4 - cosine**2)


@pytest.mark.slow
@pytest.mark.parametrize("corrected", [False, True])
def test_a_trimer_of_rods_has_its_density_and_temperature(corrected):
    potential = Fixman() if corrected else adjsim.Harmonic(0.0)
    rods = adjsim.DistanceConstraints([[0, 1], [1, 2]], 1.0)
    dynamics = adjsim.Constrained(adjsim.Langevin(potential, kT=KT), rods)
    replicas, dt = 400, 0.2
    position = tensor([[1.0, 0, 0], [0, 0, 0], [0, 1, 0]]).expand(replicas, 3, 3)
    start = dynamics.init(position, generator=0)

    def record(state):
        bonds = state.position[..., 1:, :] - state.position[..., :-1, :]
        cosine = (bonds[..., 0, :] * bonds[..., 1, :]).sum(-1)
        dof = dynamics.dof(state.position)
        temperature = adjsim.kinetic_temperature(state.momentum, 1.0, dof)
        return torch.stack([cosine**2, temperature], -1)

    with torch.no_grad():
        path = adjsim.simulate(
            dynamics,
            start,
            [dt * k for k in range(1201)],
            solver=adjsim.BAOAB(dt),
            record=record,
            generator=1,
        )
    # From a right angle, forgotten after 100 steps: a time of 20, with friction and rotation of 1.
    # Means over the times of a replica are independent of those of other replicas.
    means = path.record[100:].mean(0)
    value, error = means.mean(0), means.std(0) / replicas**0.5
    weight = (lambda c: 1.0) if corrected else (lambda c: (1 - c**2 / 4) ** 0.5)
    mean = quad(lambda c: c**2 * weight(c), -1, 1)[0] / quad(weight, -1, 1)[0]
    assert float(error[0]) < 0.0015
    # The two densities differ by 0.0117, eight standard errors. The bias of the step is below
    # a thousandth.
    assert abs(float(value[0]) - mean) < 4 * float(error[0])
    # Three degrees of freedom of the centre and four others.
    assert dynamics.dof(start.position) == 7
    assert abs(float(value[1]) - KT) < 4 * float(error[1])


class Pull(nn.Module):
    """A field that turns a dimer into the first axis, ``-strength (x_1 - x_0)``."""

    def __init__(self, strength):
        super().__init__()
        self.strength = nn.Parameter(tensor(strength))

    def forward(self, position):
        return -self.strength * (position[..., 1, 0] - position[..., 0, 0])


@pytest.mark.slow
def test_the_score_function_has_the_response_of_a_rod_in_a_field():
    strength, dt, burn_in = 0.9, 0.2, 10.0
    inner = adjsim.Langevin(Pull(strength), kT=KT)
    dynamics = adjsim.Constrained(inner, adjsim.DistanceConstraints([[0, 1]], 1.0))
    position = tensor([[0.0, 0, 0], [1, 0, 0]])

    def initial(replicas, generator):
        return dynamics.init(position.expand(replicas, 2, 3), generator=generator)

    simulation = adjsim.Simulation(dynamics, initial, [0.0, 60.0], solver=adjsim.BAOAB(dt))
    cosine = adjsim.TimeAverage(lambda s: s.position[..., 1, 0] - s.position[..., 0, 0], burn_in)
    found = adjsim.ScoreFunction(burn_in)(simulation, cosine, replicas=300, chunks=8, generator=0)
    # Langevin's function of a = strength / kT, and its derivative; the measure of a rod is uniform.
    a = strength / KT
    mean, slope = 1 / math.tanh(a) - 1 / a, (1 / a**2 - 1 / math.sinh(a) ** 2) / KT
    (grad,), (error,) = found.grad.values(), found.grad_stderr.values()
    assert float(error) < 0.02
    # The bias of the step is a few thousandths of the slope of 0.37.
    assert abs(float(grad) - slope) < 4 * float(error) + 0.003
    assert abs(float(found.value) - mean) < 4 * float(found.value_stderr) + 0.003
