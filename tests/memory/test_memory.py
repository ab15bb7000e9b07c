"""Peak memory of forward and backward, as resident-set growth in a fresh process."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch

import adjsim
from adjsim.adjoints.direct import AllStates
from adjsim.cli.process import run_in_process
from tests.memory.measure import measured
from tests.problems import parameter, square

MB = 1e6


@functools.cache
def growth(method: str, steps: int, problem: str | int) -> int:
    return run_in_process(measured, method, steps, problem)


@pytest.mark.slow
def test_reversible_is_flat_in_the_number_of_steps():
    """The states of 600 more steps take 192 MB."""
    assert growth("reversible", 800, "batch") - growth("reversible", 200, "batch") < 4 * MB


@pytest.mark.parametrize(
    "problem", ["langevin", pytest.param("generalised", marks=pytest.mark.marathon)]
)
def test_reversible_is_flat_under_friction_too(problem):
    """A checkpoint of 0.2 MB (0.3 with memory) every few hundred steps; all states take 118 MB."""
    assert growth("reversible", 800, problem) - growth("reversible", 200, problem) < 4 * MB


@pytest.mark.slow
def test_exact_reversal_is_flat_up_to_what_friction_takes():
    """Friction dt = 0.05 spills 0.07 bits a step for each of 2,496 degrees of freedom: 11 kB in 500
    steps, whose states take 20 MB. Measured peaks are 10.8, 11.1 and 12.3 MB at 500, 1,000 and
    2,000 steps. Runs of a hundred steps are too short: their peak is 4.7 or 9.4 MB, as the
    allocator has it.
    """
    assert growth("reversible", 1000, "exact") - growth("reversible", 500, "exact") < 4 * MB


@pytest.mark.marathon
def test_a_graph_model_by_reversal_is_flat_in_the_steps():
    """Of a message-passing network of 64 atoms, whose graphs take 2 MB a step: 438 MB kept by
    DirectAdjoint in 200 steps, 4.7 and 5.1 MB in 50 and 200 steps by reversal.
    """
    assert growth("reversible", 200, "graph") - growth("reversible", 50, "graph") < 4 * MB
    assert growth("direct", 50, "graph") > 50 * MB


@pytest.mark.marathon
def test_checkpoint_grows_as_the_root():
    """Sixteen times the steps, four times the memory; linear growth would be sixteen.

    Each state takes 0.3 MB.
    """
    ratio = growth("checkpoint", 3_200, "batch") / growth("checkpoint", 200, "batch")
    assert 2.5 < ratio < 6


@pytest.mark.marathon
def test_the_score_function_is_flat_in_the_samples():
    """400 more frames of 2,048 replicas are used and forgotten. Their positions take 20 MB."""
    assert growth("score", 500, 2048) - growth("score", 100, 2048) < 4 * MB


@pytest.mark.marathon
def test_pathwise_by_reversal_is_flat_in_the_steps():
    """Of a time average over 2,048 replicas. The frames of 400 more steps take 39 MB."""
    assert growth("pathwise", 500, 2048) - growth("pathwise", 100, 2048) < 6 * MB


@pytest.mark.marathon
def test_solve_ivp_by_checkpoints_is_flat():
    """Over three thousand steps, whose interpolants take four megabytes. At most 64 of them are
    held, and 128 states: with them 0.7 MB were measured.
    """
    flat, dense = (growth(adjoint, 80, "ivp") for adjoint in ("checkpoint", "interpolate"))
    assert dense > 3 * MB
    assert flat < 0.4 * dense


@pytest.mark.slow
def test_direct_keeps_every_state():
    """The measurement sees what there is to see: a position and a momentum of 160 kB for each of
    800 steps.
    """
    kept = growth("direct", 800, "batch")
    assert kept > 800 * 2 * (512 * 13 * 3 * 8)
    assert kept > 20 * max(growth("reversible", 800, "batch"), MB)


def test_saved_states_keep_no_empty_rows(monkeypatch):
    """Compiled loops that end at every save store one state each, of the many that they could."""
    kept, rewind = [], AllStates.rewind

    def counted(self, given):
        kept.extend(x for rows in self.rows.values() for x in rows)
        return rewind(self, given)

    monkeypatch.setattr(AllStates, "rewind", counted)
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), kT=1.0, friction=1.0)
    ends, found = 0.01 * torch.arange(21), {}
    for name, saves in (("ends", ends[[0, -1]]), ("saves", ends)):
        start = dynamics.init(torch.zeros(64, 1, 1, dtype=torch.float64), generator=0)
        run = adjsim.simulate(
            dynamics, start, saves, solver=adjsim.BAOAB(0.01), generator=0, compile=True
        )
        (found[name],) = torch.autograd.grad(run.final.position.sum(), dynamics.potential.k)
        # Twenty states of a position and a momentum.
        assert sum(x.untyped_storage().nbytes() for x in kept) == 20 * 2 * 64 * 8
        kept.clear()
    torch.testing.assert_close(found["saves"], found["ends"], rtol=1e-12, atol=0)


class Saved:
    """A tensor that autograd keeps for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


SOLVERS = [
    (adjsim.VelocityVerlet(0.01), adjsim.DirectAdjoint()),
    (adjsim.VelocityVerlet(0.01), adjsim.CheckpointAdjoint()),
    (adjsim.VelocityVerlet(0.01), adjsim.ReversibleAdjoint()),
    (adjsim.Splitting("BAB", 0.01, exact=True), adjsim.DirectAdjoint()),
    (adjsim.ODESolver("rk4", dt=0.01), adjsim.DirectAdjoint()),
    (adjsim.ODESolver("rk4", dt=0.01), adjsim.BacksolveAdjoint()),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("solver", "adjoint"), SOLVERS, ids=repr)
def test_a_finished_run_is_freed(solver, adjoint, backward):
    """No cycle through autograd's graph, which the garbage collector cannot see, keeps a run."""
    # The collection below walks this run alone, not what other tests have left.
    gc.freeze()
    saved: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(x: torch.Tensor) -> Saved:
        kept = Saved(x.detach())  # With its graph, an output would keep the node that keeps it.
        saved.add(kept)
        return kept

    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(parameter(1.0)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        start = dynamics.init(*square())
        run = adjsim.simulate(dynamics, start, [0.0, 0.1], solver=solver, adjoint=adjoint)
        if backward:
            run.final.position.sum().backward()
        else:
            assert saved or not isinstance(adjoint, adjsim.DirectAdjoint)
    watch = weakref.ref(run.final.position)
    del run
    gc.collect()
    assert watch() is None
    assert not saved
