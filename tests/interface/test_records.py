"""Recorded and averaged functions: the dtype of an average, and a shape that changes."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ODESolver,
    ReversibleAdjoint,
    SDESolver,
    TimeAverage,
)

SPLITTING = [DirectAdjoint(), CheckpointAdjoint(), ReversibleAdjoint()]
CONTINUOUS = [ODESolver(rtol=1e-3, atol=1e-3), ODESolver("rk4", dt=0.1), SDESolver(dt=0.1)]
RUNS = [(adjsim.BAOAB(0.1), adjoint, False) for adjoint in SPLITTING]
RUNS += [(solver, adjoint, False) for solver in CONTINUOUS for adjoint in
         (DirectAdjoint(), BacksolveAdjoint())]  # fmt: skip
COMPILED = [(adjsim.BAOAB(0.1), adjoint, True) for adjoint in SPLITTING]


def run(solver, adjoint, compiled, record):
    potential = adjsim.Harmonic(torch.ones((), dtype=torch.float64))
    dynamics = (
        adjsim.Hamiltonian(potential)
        if isinstance(solver, ODESolver)
        else adjsim.Langevin(potential, kT=1.0, friction=0.5)
    )
    start = dynamics.init(torch.ones(2, 1).double(), torch.zeros(2, 1).double())
    return adjsim.simulate(
        dynamics, start, [0.0, 0.2, 0.5, 0.8],
        solver=solver, adjoint=adjoint, record=record, compile=compiled, generator=3,
    ).record  # fmt: skip


@pytest.mark.parametrize(("solver", "adjoint", "compiled"), RUNS + COMPILED, ids=repr)
def test_an_average_of_counts_has_the_dtype_of_the_state(solver, adjoint, compiled):
    torch.set_default_dtype(torch.float32)
    for function in (lambda s: s.position > 0, lambda s: (s.position > 0).sum(-1))[: 2 - compiled]:
        found = run(solver, adjoint, compiled, TimeAverage(function))
        # No position becomes negative in this time.
        torch.testing.assert_close(found, torch.ones_like(found, dtype=torch.float64))


class Growing:
    """A function of the state whose value gains a row with every evaluation."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state):
        self.calls += 1
        return state.position.sum(-1)[:1].expand(self.calls)


@pytest.mark.parametrize("average", [False, True], ids=["record", "average"])
@pytest.mark.parametrize(("solver", "adjoint", "compiled"), RUNS, ids=repr)
def test_a_shape_that_changes_is_refused(solver, adjoint, compiled, average):
    record = TimeAverage(Growing()) if average else Growing()
    with pytest.raises(
        ValueError, match=r"the record has shape \(\d+,\) (after step|at t =) .*had shape \(\d+,\)"
    ):
        run(solver, adjoint, compiled, record)


@pytest.mark.parametrize(("solver", "adjoint", "compiled"), COMPILED, ids=repr)
def test_a_shape_that_changes_is_refused_between_compiled_loops(solver, adjoint, compiled):
    with pytest.raises(ValueError, match=r"has shape \(\d+,\) after step .*had shape \(\d+,\)"):
        run(solver, adjoint, compiled, Growing())
