"""Densities of constrained systems against exact ones."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from scipy.integrate import quad
from torch import nn

import adjsim
from tests.constraints import WATER_LENGTHS, tensor, waters
from tests.problems import slow_but

KT = 0.7


class Fixman(nn.Module):
    """Fixman's potential of a trimer of equal masses, kT/2 ln det(G M^-1 G^T)."""

    def forward(self, position):
        bonds = position[..., 1:, :] - position[..., :-1, :]
        cosine = (bonds[..., 0, :] * bonds[..., 1, :]).sum(-1)
        return KT / 2 * torch.log(4 - cosine**2)


@pytest.mark.marathon
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
            compile=True,
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


class Bend(nn.Module):
    """An energy of the angle of a trimer, ``c + c^2/2`` with its cosine c."""

    def forward(self, position):
        bonds = position[..., 1:, :] - position[..., :-1, :]
        cosine = (bonds[..., 0, :] * bonds[..., 1, :]).sum(-1)
        return cosine + cosine**2 / 2


@pytest.mark.marathon
def test_diffusing_rods_have_the_measure_of_their_frictions():
    """det(G Z^-1 G^T)^(1/2) for frictions Z, here 1.2^2 - c^2 of mobilities 0.2, 1, 0.2."""
    rods = adjsim.DistanceConstraints([[0, 1], [1, 2]], 1.0)
    inner = adjsim.OverdampedLangevin(Bend(), KT, [5.0, 1.0, 5.0])
    dynamics = adjsim.Constrained(inner, rods)
    replicas, dt, steps = 1500, 0.0025, 2000
    position = tensor([[1.0, 0, 0], [0, 0, 0], [0, 1, 0]]).expand(replicas, 3, 3)

    def record(state):
        bonds = state.position[..., 1:, :] - state.position[..., :-1, :]
        return (bonds[..., 0, :] * bonds[..., 1, :]).sum(-1, keepdim=True) ** torch.arange(1.0, 3)

    with torch.no_grad():
        found = adjsim.simulate(
            dynamics,
            dynamics.init(position),
            [0.0, steps * dt],
            solver=adjsim.EulerMaruyama(dt),
            record=adjsim.TimeAverage(record, 1.5),
            generator=1,
            compile=True,
        ).record
    # Averages over the times of a replica are independent of those of other replicas.
    value, error = found.mean(0), found.std(0) / replicas**0.5

    def exact(determinant):
        def weight(c):
            return math.exp(-(c + c**2 / 2) / KT) * determinant(c) ** 0.5

        whole = quad(weight, -1, 1)[0]
        return tensor([quad(lambda c, k=k: c**k * weight(c), -1, 1)[0] / whole for k in (1, 2)])

    expected = exact(lambda c: 1.44 - c**2)
    # The bias of the step is below a thousandth. The density of constrained momenta of equal
    # masses, and that of stiff rods, are eight standard errors off.
    assert bool((error < tensor([0.008, 0.005])).all())
    assert bool(((value - expected).abs() < 4 * error + 0.001).all()), (value, expected, error)
    for other in (lambda c: 4 - c**2, lambda c: 1.0):
        assert bool(((exact(other) - value).abs() > 6 * error).any())


class Trap(nn.Module):
    """A well that couples all motions of two waters, and turns them."""

    def forward(self, position):
        x, y, z = position.unbind(-1)
        return (0.2 * (x + 0.5 * y) ** 4 + 0.3 * (y - z) ** 4 + 0.4 * z**2 + 0.2 * x**2).sum(-1)


THERMOSTATS = {
    "Langevin": ("BAOAB", {"friction": [1.0] * 3 + [0.4] * 3}),
    "NoseHooverChain": ("NBABN", {"tau": 0.5, "dof": 12}),
    "GeneralizedLangevin": ("BAGAB", {"rates": [2.0], "strengths": [4.0]}),
    "Bussi": ("RBABR", {"tau": 0.5, "dof": 12}),
    "Andersen": ("CBABC", {"rate": 0.7}),
    "Berendsen": ("RBABR", {"tau": 0.5, "dof": 12}),
    "VelocityRescale": ("RBABR", {"dof": 12}),
}
MASS, REPLICAS = tensor([4.0, 1, 1] * 2), 200


def in_trap(kind, **numbers):
    _, index = waters(2)
    potential = adjsim.SoftSphere(0.5, 1.5, exclusions=index) + Trap()
    inner = getattr(adjsim, kind)(potential, MASS, kT=KT, **numbers)
    return adjsim.Constrained(inner, adjsim.DistanceConstraints(index, tensor(WATER_LENGTHS * 2)))


@lru_cache
def equilibrated():
    """Positions of two waters in the trap, of independent replicas."""
    position, _ = waters(2)
    dynamics = in_trap("Langevin", friction=1.0)
    start = dynamics.init((position - position.mean(0)).expand(REPLICAS, 6, 3), generator=0)
    with torch.no_grad():
        path = adjsim.simulate(dynamics, start, [0.0, 10.0], solver=adjsim.BAOAB(0.05), generator=3)
    return path.final.position


@pytest.mark.parametrize(
    "name",
    slow_but(
        lambda name: False,
        THERMOSTATS,
        marathon=lambda name: name != "NoseHooverChain",
    ),
)
def test_thermostats_give_all_degrees_of_freedom_their_kinetic_energy(name):
    scheme, numbers = THERMOSTATS[name]
    dynamics = in_trap(name, **numbers)
    start = dynamics.init(equilibrated(), generator=1)
    assert dynamics.dof(start.position) == 12

    def temperatures(state):
        p = state.momentum
        centres = p.unflatten(-2, (2, 3)).sum(-2)
        of_centres = adjsim.kinetic_temperature(centres, 6.0, 6)
        whole = adjsim.kinetic_temperature(p, MASS, 12)
        found = [whole, of_centres, 2 * whole - of_centres]
        if "memory" in state._fields:
            # The memory has all 18 components.
            found.append(adjsim.kinetic_temperature(state.memory[..., 0, :, :], MASS, 18))
        return torch.stack(found, -1)

    with torch.no_grad():
        found = adjsim.simulate(
            dynamics,
            start,
            [0.0, 8.0],
            solver=adjsim.Splitting(scheme, 0.05),
            record=adjsim.TimeAverage(temperatures, 2.0),
            generator=1,
        ).record
    # Of the whole, the centres, rotations, and a memory. Averages of independent replicas have no
    # time of autocorrelation.
    value, error = found.mean(0), found.std(0) / REPLICAS**0.5
    assert float(error.max()) < 0.03 * KT
    # The bias of the step: (omega dt)^2 / 12 of the fastest libration. Without fluctuations of the
    # kinetic energy parts may differ from kT.
    canonical = name not in ("Berendsen", "VelocityRescale")
    within = (value - KT).abs() < 4 * error + 0.003 * KT
    assert bool(within[: None if canonical else 1].all()), (value, error)


class Pull(nn.Module):
    """A field that turns a dimer into the first axis, ``-strength (x_1 - x_0)``."""

    def __init__(self, strength):
        super().__init__()
        self.strength = nn.Parameter(tensor(strength))

    def forward(self, position):
        return -self.strength * (position[..., 1, 0] - position[..., 0, 0])


@pytest.mark.marathon
def test_the_score_function_has_the_response_of_a_rod_in_a_field():
    strength, dt, burn_in = 0.9, 0.2, 10.0
    inner = adjsim.Langevin(Pull(strength), kT=KT)
    dynamics = adjsim.Constrained(inner, adjsim.DistanceConstraints([[0, 1]], 1.0))
    position = tensor([[0.0, 0, 0], [1, 0, 0]])

    def initial(replicas, generator):
        return dynamics.init(position.expand(replicas, 2, 3), generator=generator)

    simulation = adjsim.Simulation(
        dynamics, initial, [0.0, 60.0], solver=adjsim.BAOAB(dt), compile=True
    )
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
