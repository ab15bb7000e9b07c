"""Runs with a thermostat that blow up stop, and hot runs with a reason do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, Splitting

BATHS = {
    "langevin": (lambda potential, kT: adjsim.Langevin(potential, 1.0, kT, 0.1), "BAOAB"),
    "bussi": (lambda potential, kT: adjsim.Bussi(potential, 1.0, kT, 5.0), "BABR"),
    "andersen": (lambda potential, kT: adjsim.Andersen(potential, 1.0, kT, 0.1), "BABC"),
    "chain": (lambda potential, kT: adjsim.NoseHooverChain(potential, 1.0, kT, 1e3), "NBABN"),
    "memory": (
        lambda potential, kT: adjsim.GeneralizedLangevin(potential, 1.0, kT, [1.0], [0.1]),
        "BAGAB",
    ),
}


def run(dynamics, word, dt, steps, position, momentum=None, *, adjoint=None, **options):
    start = dynamics.init(position, momentum, generator=0)
    return adjsim.simulate(
        dynamics,
        start,
        [0.0, steps * dt],
        solver=Splitting(word, dt),
        adjoint=adjoint or DirectAdjoint(),
        generator=1,
        **options,
    )


SAYS = (
    r"^the kinetic temperature of system 1 is \d.* in step \d+ \(.*\): .* times kT = 1, .*"
    r"use a smaller dt \(it is 2\.5\)\. Or units are mixed: kT is an energy"
)


class OneOfTwo(nn.Module):
    """Springs for the second of two systems."""

    def forward(self, position):
        strength = torch.tensor([0.0, 1.0], dtype=position.dtype)
        return 0.5 * strength * position.square().sum((-1, -2))


@pytest.mark.parametrize("bath", BATHS)
def test_a_step_beyond_the_stable_one_stops(bath):
    """A spring of frequency 1 is stable below dt = 2. The free system beside it is not named."""
    make, word = BATHS[bath]
    dynamics = make(OneOfTwo(), 1.0)
    with pytest.raises(FloatingPointError, match=SAYS):
        run(dynamics, word, 2.5, 5, torch.ones(2, 3, 2))
    run(dynamics, word, 0.5, 15, torch.ones(2, 3, 2))


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(4), ReversibleAdjoint()])
@pytest.mark.parametrize("compile", [False, True])
def test_the_step_is_that_of_every_adjoint(adjoint, compile):
    """The first step above the limit is named, whichever loop ran it."""
    dynamics = adjsim.Langevin(adjsim.Harmonic(1.0), 1.0, 1.0, 0.1)
    position = torch.ones(2, 3, 2).requires_grad_()
    path = []
    with torch.no_grad():
        for steps in range(1, 30):
            try:
                path.append(run(dynamics, "BAOAB", 2.1, steps, position).final)
            except FloatingPointError:
                break
    first = len(path) + 1
    limit = 100 * dynamics.kinetic_energy(dynamics.init(position, generator=0)).clamp(min=3.0)
    assert all(bool((dynamics.kinetic_energy(state) <= limit).all()) for state in path)
    with pytest.raises(FloatingPointError, match=rf"temperature of .* in step {first} "):
        run(dynamics, "BAOAB", 2.1, 30, position, adjoint=adjoint, compile=compile)


@pytest.mark.parametrize("kT", [1e-12, 1e-3])
def test_heat_from_the_potential_is_no_blow_up(kT):
    """The energy of a stretched spring, of a fall and of a fast start are far above kT."""
    dynamics = adjsim.Langevin(adjsim.Harmonic(1.0), 1.0, kT, 1e-3)
    made = run(dynamics, "BAOAB", 0.3, 40, torch.ones(2, 1, 1), torch.zeros(2, 1, 1))
    assert float(dynamics.kinetic_energy(made.final).max()) > 100 * kT
    run(dynamics, "BAOAB", 0.3, 40, torch.zeros(2, 1, 1), torch.ones(2, 1, 1))
    fall = adjsim.Langevin(adjsim.potentials.Gravity(1.0, 1.0), 1.0, kT, 1e-3)
    run(fall, "BAOAB", 0.1, 100, torch.zeros(1, 1, 3), torch.zeros(1, 1, 3))


def test_a_start_at_rest_is_heated():
    """A crystal at rest comes to kT, and one atom keeps the tails of its distribution."""
    dynamics = adjsim.Langevin(adjsim.Harmonic(1.0), 1.0, 1.0, 5.0)
    run(dynamics, "BAOAB", 0.1, 200, torch.zeros(2000, 1, 1), torch.zeros(2000, 1, 1))
    rescaled = adjsim.VelocityRescale(adjsim.Harmonic(1.0), 1.0, 1e-3)
    run(rescaled, "BABR", 0.1, 100, torch.zeros(3, 4, 2), torch.full((3, 4, 2), 1e-6))


def test_forces_without_an_energy_may_do_any_work():
    class Swing(adjsim.ForceField):
        def forward(self, t, position):
            return torch.full_like(position, 10.0)

    dynamics = adjsim.Langevin(Swing(), 1.0, 1e-6, 0.1)
    made = run(dynamics, "BAOAB", 0.1, 100, torch.zeros(1, 1, 1))
    assert float(dynamics.kinetic_energy(made.final)) > 1.0
