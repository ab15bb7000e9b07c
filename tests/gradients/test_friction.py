"""Reversal under friction: what grows is seen, checkpoints are chosen for it, and the gradient
stays exact.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReconstructionError, ReversibleAdjoint
from tests.problems import (
    POTENTIALS,
    STOCHASTIC,
    UNDERDAMPED,
    parameter,
    slow_but,
    square,
    start as start_of,
    vector,
)


def gradients(dynamics, scheme, dt, time, adjoint, dtype=torch.float64):
    position, momentum = (x.to(dtype).requires_grad_() for x in square())
    generator = torch.Generator().manual_seed(2)
    run = adjsim.simulate(
        dynamics,
        start_of(dynamics, position, momentum),
        [0.0, time],
        solver=adjsim.Splitting(scheme, dt),
        adjoint=adjoint,
        generator=generator,
    )
    loss = sum((x**2).sum() for x in run.final)
    inputs = [*dynamics.parameters(), position, momentum]
    return torch.autograd.grad(loss, inputs, allow_unused=True), run.stats


def agree(mine, theirs, tolerance):
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert float((a - b).norm()) <= tolerance * float(b.norm())


STRONG = {
    "langevin": lambda: adjsim.Langevin(
        adjsim.DoubleWell(parameter(0.7)), parameter(1.4), parameter(0.6), parameter(20.0)
    ),
    "langevin-atoms": lambda: adjsim.Langevin(
        adjsim.LennardJones(parameter(1.1), parameter(0.95)),
        vector(1.0, 1.5, 0.8, 2.0),
        parameter(0.2),
        vector(20, 5, 9, 3),
    ),
    "generalised": lambda: adjsim.GeneralizedLangevin(
        adjsim.DoubleWell(parameter(0.7)),
        parameter(1.4),
        parameter(0.6),
        vector(5.0, 20.0),
        vector(20.0, 80.0),
    ),
}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("langevin", "BAOAB"),
        pytest.param("langevin", "OBABO", marks=pytest.mark.marathon),
        pytest.param("langevin", "ABOBA", marks=pytest.mark.marathon),
        pytest.param("langevin-atoms", "BAOAB", marks=pytest.mark.slow),
        pytest.param("generalised", "BAGAB", marks=pytest.mark.marathon),
    ],
)
def test_exact_up_to_friction_times_time_of_a_hundred(name, scheme):
    """friction T = 100 with the checkpoints it chooses itself."""
    make = STRONG[name]
    time = 100.0 / make().damping(start_of(make(), *square()))
    dt = 0.005
    time = round(time / dt) * dt
    direct, _ = gradients(make(), scheme, dt, time, DirectAdjoint())
    mine, stats = gradients(make(), scheme, dt, time, ReversibleAdjoint())
    agree(mine, direct, 1e-10)
    assert 0 < stats["reconstruction_error"] < 1e-10
    growth = stats["checkpoint_every"] * dt * make().damping(start_of(make(), *square()))
    assert 0.5 < growth < 8


@pytest.mark.slow
def test_growth_that_goes_unchecked_is_seen():
    """One checkpoint for friction T = 100 loses the state, and says so instead of returning a
    number.
    """
    make = STRONG["langevin"]
    with pytest.raises(ReconstructionError, match="checkpoint_every"):
        gradients(make(), "BAOAB", 0.0025, 5.0, ReversibleAdjoint(checkpoint_every=10_000))


def test_a_state_that_is_not_finite_is_named_with_checkpoints_within_the_run():
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), friction=500.0)
    with pytest.raises(
        ReconstructionError, match=r"is not finite, .* checkpoint_every= below 200 to"
    ):
        gradients(dynamics, "BAOAB", 0.01, 2.0, ReversibleAdjoint(checkpoint_every=1000))


def test_the_error_grows_as_the_exponential_of_friction_times_time():
    """Over friction T = 4, 8, 12 on the double well: e^4 between them, to a factor of five for the
    potential's part.
    """
    errors = []
    for time in (0.2, 0.4, 0.6):
        _, stats = gradients(
            STRONG["langevin"](), "BAOAB", 0.0025, time, ReversibleAdjoint(checkpoint_every=10_000)
        )
        errors.append(stats["reconstruction_error"])
    for before, after in itertools.pairwise(errors):
        assert math.exp(4) / 5 < after / before < math.exp(4) * 5


def test_checkpoints_follow_friction_step_dtype_and_tolerance():
    def every(friction=1.0, dt=0.01, dtype=torch.float64, **options):
        dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), friction=friction)
        _, stats = gradients(dynamics, "BAOAB", dt, 10 * dt, ReversibleAdjoint(**options), dtype)
        return stats["checkpoint_every"]

    base = every()
    assert every(friction=2.0) == pytest.approx(base / 2, abs=1)
    assert every(dt=0.02) == pytest.approx(base / 2, abs=1)
    assert every(tol=1e-4) > base > every(tol=1e-8)
    assert every(dtype=torch.float32, tol=1e-4) < base
    assert every(checkpoint_every=3) == 3
    hamiltonian = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    run = adjsim.simulate(
        hamiltonian,
        hamiltonian.init(*square()),
        [0.0, 0.1],
        solver=adjsim.VelocityVerlet(0.01),
        adjoint=ReversibleAdjoint(),
    )
    assert run.stats["checkpoint_every"] is None


@pytest.mark.slow
def test_float32_keeps_within_a_tolerance_that_fits_it():
    dynamics = adjsim.Langevin(adjsim.DoubleWell(parameter(0.7)), friction=parameter(2.0))
    direct, _ = gradients(dynamics, "BAOAB", 0.01, 5.0, DirectAdjoint())
    mine, stats = gradients(
        dynamics, "BAOAB", 0.01, 5.0, ReversibleAdjoint(tol=1e-3), torch.float32
    )
    assert stats["reconstruction_error"] < 1e-3
    # The float32 path itself is about 1e-5 off the float64 one.
    agree([x.double() for x in mine[:1]], direct[:1], 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme"),
    slow_but(lambda name, scheme: scheme in ("BAOAB", "GBABG"), UNDERDAMPED),
)
def test_the_same_path_and_gradient_whatever_is_saved(name, scheme):
    """To the last bit the same path for any save times, segments and adjoint; and the same gradient
    to rounding.
    """
    paths, grads = [], []
    for times, adjoint in [
        ([0.0, 0.5], DirectAdjoint()),
        ([0.0, 0.07, 0.31, 0.5], DirectAdjoint()),
        ([0.0, 0.5], CheckpointAdjoint(1)),
        ([0.0, 0.33, 0.5], CheckpointAdjoint(7)),
        ([0.0, 0.5], ReversibleAdjoint()),
        ([0.0, 0.13, 0.5], ReversibleAdjoint(checkpoint_every=11)),
    ]:
        dynamics = STOCHASTIC[name](POTENTIALS["lennard-jones"]())
        generator = torch.Generator().manual_seed(6)
        run = adjsim.simulate(
            dynamics,
            start_of(dynamics, *square()),
            times,
            solver=adjsim.Splitting(scheme, 0.01),
            adjoint=adjoint,
            generator=generator,
        )
        paths.append(run.final)
        grads.append(
            torch.autograd.grad(run.final.position.square().sum(), list(dynamics.parameters()))
        )
    for path in paths[1:]:
        assert all(torch.equal(a, b) for a, b in zip(path, paths[0], strict=True))
    for found in grads[1:]:
        agree(found, grads[0], 1e-10)


@pytest.mark.parametrize("name", ["langevin", "generalised-2", "overdamped"])
def test_a_replica_has_its_own_noise_in_any_batch(name):
    """Replica i of fifty is replica i of twenty: several atoms and dimensions, bath variables
    included.
    """
    dynamics = STOCHASTIC[name](POTENTIALS["harmonic"]())
    solver = (
        adjsim.EulerMaruyama(0.01)
        if name == "overdamped"
        else adjsim.Splitting({"langevin": "BAOAB"}.get(name, "BAGAB"), 0.01)
    )
    ends = []
    for count in (50, 20):
        position, momentum = (x.expand(count, 4, 2) for x in square())
        run = adjsim.simulate(
            dynamics,
            start_of(dynamics, position, momentum),
            [0.0, 0.4],
            solver=solver,
            generator=torch.Generator().manual_seed(9),
        )
        ends.append(run.final)
    for large, small in zip(*ends, strict=True):
        assert torch.equal(large[:20], small)
        assert len(large.flatten().unique()) > 50 * 4


def test_drawn_starts_do_not_depend_on_the_batch_either():
    for name in ("langevin", "generalised-2"):
        dynamics = STOCHASTIC[name](POTENTIALS["harmonic"]())
        starts = [
            dynamics.init(
                square()[0].expand(count, 4, 2), generator=torch.Generator().manual_seed(3)
            )
            for count in (50, 20)
        ]
        for large, small in zip(*starts, strict=True):
            assert torch.equal(large[:20], small)


def test_pathwise_chunks_run_on_their_part_of_the_noise():
    dynamics = STOCHASTIC["langevin"](POTENTIALS["double-well"]())

    def initial(replicas, generator):
        return dynamics.init(square()[0].expand(replicas, 4, 2), generator=generator)

    simulation = adjsim.Simulation(dynamics, initial, [0.0, 0.3], solver=adjsim.BAOAB(0.01))
    observable = adjsim.Final(lambda state: (state.position**2).sum((-1, -2)))
    found = [
        adjsim.Pathwise(ReversibleAdjoint())(
            simulation,
            observable,
            replicas=10,
            chunks=chunks,
            generator=torch.Generator().manual_seed(4),
        )
        for chunks in (1, 3, 10)
    ]
    for other in found[1:]:
        torch.testing.assert_close(other.value, found[0].value, rtol=1e-13, atol=0)
        for key, grad in other.grad.items():
            torch.testing.assert_close(grad, found[0].grad[key], rtol=1e-10, atol=1e-13)
