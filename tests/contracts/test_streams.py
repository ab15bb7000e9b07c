"""Starts and steps draw from streams of their own, so that one seed serves both."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import adjsim
from adjsim.core.noise import ELEMENTS, STEPS, Noise, NoiseStream, as_generator, seed_from
from tests.problems import DYNAMICS, STOCHASTIC, THERMOSTATS

LIKE = torch.zeros((), dtype=torch.float64)
DRAWN = {**DYNAMICS, **STOCHASTIC, **THERMOSTATS}
REPLICAS = 1_000


def correlation(a, b):
    """In standard errors of what independent numbers would show."""
    a, b = a.detach().flatten(), b.detach().flatten()
    return abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) * math.sqrt(len(a))


def first_step(seed, shape):
    return Noise(seed_from(seed))(0, (shape[0], math.prod(shape[1:])), LIKE).reshape(shape)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("langevin", "momentum"),
        ("chain-3", "momentum"),
        ("esh", "direction"),
        ("generalised-2", "momentum"),
    ],
)
def test_a_drawn_start_does_not_know_the_first_step(name, field):
    dynamics = DRAWN[name](adjsim.Harmonic())
    drawn = getattr(dynamics.init(torch.zeros(REPLICAS, 4, 2), generator=0), field)
    assert correlation(drawn, first_step(0, (REPLICAS, 4, 2))) < 5


def test_memory_is_independent_of_momenta_and_of_the_first_step():
    dynamics = DRAWN["generalised-2"](adjsim.Harmonic())
    start = dynamics.init(torch.zeros(REPLICAS, 4, 2), generator=0)
    steps = first_step(0, (REPLICAS, 3, 4, 2))
    scale = dynamics.masses.thermal(start.momentum, dynamics.kT)
    for link in range(2):
        memory = start.memory[:, link] / scale
        assert correlation(memory, start.momentum / scale) < 5
        # A number of one field may be met again anywhere in another.
        flat = memory.flatten()[: REPLICAS * 4]
        assert not torch.isin(
            flat, torch.cat([steps.flatten(), (start.momentum / scale).flatten()])
        ).any()
        assert all(correlation(memory, steps[:, draw]) < 5 for draw in range(3))


def test_one_seed_keeps_the_temperature():
    """<p^2> = 1 at kT = 1 after the first step too; momenta that are its noise would have made 1 +
    2 c sqrt(1 - c^2) of it.
    """
    dynamics = adjsim.Langevin(adjsim.Harmonic(0.0))
    start = dynamics.init(torch.zeros(REPLICAS, 4, 2), generator=0)
    run = adjsim.simulate(dynamics, start, [0.0, 0.1, 0.2], solver=adjsim.BAOAB(0.1), generator=0)
    error = math.sqrt(2 / (REPLICAS * 8))
    assert all(abs(float((p**2).mean()) - 1) < 5 * error for p in run.momentum)


def test_the_noise_of_steps_is_that_of_earlier_versions():
    """A seed's path stays what it was when steps had the only stream."""
    expected = torch.tensor([[0.00021832635171843906, 0.90561506695780081, -0.059190319769685619]])
    assert torch.equal(Noise(4)(0, (1, 3), LIKE), expected)


def test_streams_share_no_numbers():
    drawn = [
        Noise(seed, stream=stream)(0, (1, 2 * ELEMENTS), LIKE).flatten()
        for seed in (0, 1)
        for stream in NoiseStream
    ]
    drawn += [Noise(0)(STEPS, (1, 2 * ELEMENTS), LIKE).flatten()]
    assert len(torch.cat(drawn).unique()) == len(drawn) * 2 * ELEMENTS


@pytest.mark.parametrize("seed", [0, 7, -1, np.int64(3), 2**64 - 1])
def test_a_seed_is_a_new_generator(seed):
    fresh = torch.Generator().manual_seed(int(seed))
    assert seed_from(seed) == seed_from(seed) == seed_from(fresh)
    made = as_generator(seed)
    assert made is not None
    assert made.initial_seed() == torch.Generator().manual_seed(int(seed)).initial_seed()
    assert as_generator(fresh) is fresh
    assert as_generator(None) is None


@pytest.mark.parametrize("name", list(DRAWN))
def test_every_start_takes_a_seed(name):
    dynamics, position, momentum = DRAWN[name](adjsim.Harmonic()), torch.zeros(5, 4, 2), None
    if name.startswith("hamiltonian"):
        momentum = dynamics.thermal_momentum(position, 1.0, generator=3)
        assert torch.equal(
            momentum, dynamics.thermal_momentum(position, 1.0, torch.Generator().manual_seed(3))
        )
    one = dynamics.init(position, momentum, generator=3)
    two = dynamics.init(position, momentum, generator=3)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    if name not in ("overdamped", *DYNAMICS) or name == "esh":
        assert not all(
            torch.equal(a, b)
            for a, b in zip(one, dynamics.init(position, momentum, generator=4), strict=True)
        )
