"""Peak memory of forward and backward, as resident-set growth in a fresh process; and time against
steps.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref

import pytest
import torch

import adjsim
from adjsim.apart import apart
from tests.memory.measure import measured
from tests.problems import parameter, square

MB = 1e6


def growth(method: str, steps: int, problem: str | int) -> int:
    return apart(measured, method, steps, problem)


def test_reversible_is_flat_in_the_number_of_steps():
    assert growth("reversible", 5_000, "cluster") - growth("reversible", 1_000, "cluster") < 4 * MB


@pytest.mark.parametrize("problem", ["langevin", "generalised"])
def test_reversible_is_flat_under_friction_too(problem):
    """512 replicas; what there is of growth is a checkpoint of 25 kB (37 with memory) every few
    hundred steps.
    """
    assert growth("reversible", 5_000, problem) - growth("reversible", 1_000, problem) < 4 * MB


def test_exact_reversal_is_flat_up_to_what_friction_takes():
    """Nine thousand steps at friction dt = 0.05 spill 0.07 bits a step for each of 39 degrees of
    freedom: 4 kB.
    """
    assert growth("reversible", 10_000, "exact") - growth("reversible", 1_000, "exact") < 2 * MB


def test_checkpoint_grows_as_the_root():
    """Sixteen times the steps, four times the memory; linear growth would be sixteen. Each state
    here is 0.3 MB.
    """
    ratio = growth("checkpoint", 6_400, "batch") / growth("checkpoint", 400, "batch")
    assert 2.5 < ratio < 6


def test_the_score_function_is_flat_in_the_samples():
    """Five times the frames of 256 replicas, a sample each: they are used and forgotten. Their
    positions take 15 MB.
    """
    assert growth("score", 3_000, 256) - growth("score", 600, 256) < 4 * MB


def test_pathwise_by_reversal_is_flat_in_the_steps():
    """Of a time average over 256 replicas. The frames of 1,500 more steps take 18 MB, without any
    graph.
    """
    assert growth("pathwise", 2_000, 256) - growth("pathwise", 500, 256) < 6 * MB


def test_solve_ivp_by_checkpoints_is_flat():
    """Over six thousand steps, whose interpolants take eight megabytes: of these at most 64 are
    held, and 128 states.
    """
    flat, dense = (growth(adjoint, 160, "ivp") for adjoint in ("checkpoint", "interpolate"))
    assert dense > 6 * MB
    assert flat < 0.25 * dense


def test_direct_keeps_every_state():
    """The measurement sees what there is to see: a position and a momentum of 160 kB for each of
    800 steps.
    """
    kept = growth("direct", 800, "batch")
    assert kept > 800 * 2 * (512 * 13 * 3 * 8)
    assert kept > 20 * max(growth("reversible", 800, "batch"), MB)


@pytest.mark.parametrize(
    "adjoint",
    [
        adjsim.DirectAdjoint(),
        adjsim.CheckpointAdjoint(),
        adjsim.ReversibleAdjoint(),
        adjsim.BacksolveAdjoint(),
    ],
    ids=repr,
)
def test_backward_time_is_linear_in_the_steps(adjoint):
    """Four times the steps, less than five times the processor time, with every 20th step saved."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    start = dynamics.init(*square())
    backsolve = isinstance(adjoint, adjsim.BacksolveAdjoint)
    solver = adjsim.ODESolver("rk4", dt=0.01) if backsolve else adjsim.VelocityVerlet(0.01)

    def seconds(steps: int) -> float:
        times = torch.arange(0, steps + 1, 20) * 0.01
        run = adjsim.simulate(dynamics, start, times, solver=solver, adjoint=adjoint)
        loss = run.position.square().sum()
        gc.collect()
        begun = time.process_time()
        loss.backward()
        return time.process_time() - begun

    seconds(100)
    # Pairs measured next to each other, so that the speed of the machine at the time cancels.
    assert statistics.median(seconds(800) / seconds(200) for _ in range(3)) < 5


@pytest.mark.parametrize(
    "adjoint", [adjsim.CheckpointAdjoint(), adjsim.ReversibleAdjoint()], ids=repr
)
def test_a_finished_run_is_freed(adjoint):
    """No cycle through the graph keeps a run alive after its last use."""
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(parameter(1.0)))
    run = adjsim.simulate(
        dynamics,
        dynamics.init(*square()),
        [0.0, 0.1],
        solver=adjsim.VelocityVerlet(0.01),
        adjoint=adjoint,
    )
    run.final.position.sum().backward()
    watch = weakref.ref(run.final.position)
    del run
    assert watch() is None


def test_many_saves_stay_linear_under_direct():
    """Saving every step must not make the backward quadratic."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    start = dynamics.init(*(x.repeat(50, 1) for x in square()))

    def seconds(steps: int, solver) -> float:
        run = adjsim.simulate(dynamics, start, torch.arange(steps + 1) * 0.01, solver=solver)
        loss = run.position.square().sum()
        begun = time.process_time()
        loss.backward()
        return time.process_time() - begun

    for solver in (adjsim.VelocityVerlet(0.01), adjsim.ODESolver("rk4", dt=0.01)):
        seconds(50, solver)
        short = min(seconds(150, solver) for _ in range(3))
        # Eight times the steps: 8 if linear, 64 if quadratic.
        assert min(seconds(1200, solver) for _ in range(2)) / short < 16
