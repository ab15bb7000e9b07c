"""The volume of ideal gases of rigid molecules, whose density is known."""

from __future__ import annotations

import math

import pytest
import torch

import adjsim
from tests.constraints import tensor
from tests.pressure import position
from tests.problems import parameter

P, KT, BODIES = 2.0, 0.6, 5
MASS = tensor([1.3, 0.7, 2.0, 1.0, 1.5, 1.5, 1.0, 3.0])
# A rod, two rods that turn about an atom of both, and three atoms.
RODS, LENGTHS = [[1, 0], [2, 3], [3, 6]], [0.9, 1.0, 0.7]


def gas(axes="isotropic", box=(1.4, 1.5, 1.6), pressure=P, kT=KT):
    """Five molecules without forces: V has the density V^5 exp(-P V/kT)."""
    potential = adjsim.LennardJones(epsilon=0.0, cutoff=1e-12, box=box)
    inner = adjsim.LangevinPiston(
        potential, MASS, kT, 2.0, pressure, 0.4, piston_friction=4.0, axes=axes
    )
    return adjsim.Constrained(inner, adjsim.DistanceConstraints(RODS, tensor(LENGTHS)))


def start(dynamics, replicas):
    at = position((replicas,))
    for (i, j), length in zip(RODS, LENGTHS, strict=True):
        along = at[:, j] - at[:, i]
        at[:, j] = at[:, i] + length * along / along.norm(dim=-1, keepdim=True)
    return dynamics.init(at, generator=0)


@pytest.mark.parametrize(
    ("axes", "box"),
    [
        pytest.param("isotropic", [1.4, 1.5, 1.6], marks=pytest.mark.marathon),
        pytest.param(
            "each",
            [[1.4, 0.0, 0.0], [0.3, 1.5, 0.0], [-0.2, 0.4, 1.6]],
            marks=pytest.mark.marathon,
        ),
    ],
)
def test_the_volume_of_an_ideal_gas_of_molecules(axes, box):
    """Mean and spread of V, and kinetic temperatures of atoms, of centres, and of the piston."""
    dynamics = gas(axes, box)
    kick = dynamics.terms["V"]

    def record(state):
        c = kick.coefficients(1.0, state)
        centres = kick.bodies.carried(c, state.momentum)
        return torch.stack([
            dynamics.volume(state) * P / KT,
            adjsim.kinetic_temperature(state.momentum, MASS, dynamics.dof(state.position)),
            adjsim.kinetic_temperature(centres, MASS, 3 * BODIES),
            (state.strain_momentum**2 / dynamics.piston.mass(state)).mean((-1, -2)),
        ], -1)  # fmt: skip

    with torch.no_grad():
        path = adjsim.simulate(
            dynamics,
            start(dynamics, 256),
            torch.arange(0.0, 40.1, 2.0),
            solver=adjsim.Splitting(dynamics.dynamics.scheme, 0.02),
            generator=1,
            compile=True,
            record=record,
        )
    late = path.record[4:]
    x = late[..., 0]
    for found, expected in (
        (x, BODIES + 1.0),
        ((x - BODIES - 1) ** 2, BODIES + 1.0),
        (torch.log(x), float(torch.digamma(tensor(BODIES + 1.0)))),
        (late[..., 1], KT),
        (late[..., 2], KT),
        (late[..., 3], KT),
    ):
        # Replicas are independent, and so give the error of the mean over time and replicas.
        means = found.mean(0)
        error = float(means.std() / math.sqrt(len(means)))
        # The error of the steps is of order dt^2, 0.2 % at this dt. Eight atoms would have the
        # mean 9.
        assert abs(float(means.mean()) - expected) < 4 * error + 2e-3 * abs(expected)
        assert error < 0.03 * abs(expected)


@pytest.mark.marathon
def test_the_derivatives_of_the_mean_volume():
    """By ScoreFunction: <V> = 6 kT/P."""
    dynamics = gas(pressure=parameter(P), kT=parameter(KT))
    simulation = adjsim.Simulation(
        dynamics,
        lambda replicas, generator: start(dynamics, replicas),
        [0.0, 30.0],
        solver=adjsim.Splitting(dynamics.dynamics.scheme, 0.03),
        compile=True,
    )
    volume = adjsim.TimeAverage(dynamics.volume, burn_in=8.0)
    generator = torch.Generator().manual_seed(2)
    found = adjsim.ScoreFunction(burn_in=8.0)(simulation, volume, replicas=256, generator=generator)
    value = (BODIES + 1) * KT / P
    assert abs(float(found.value) - value) < 4 * float(found.value_stderr) + 4e-3 * value
    for name, slope in (("pressure", -value / P), ("kT", value / KT)):
        grad, error = (
            float(next(x for key, x in group.items() if key.endswith(name)))
            for group in (found.grad, found.grad_stderr)
        )
        assert error < 0.1 * abs(slope)
        assert abs(grad - slope) < 4 * error + 4e-3 * abs(slope)
