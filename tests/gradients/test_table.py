"""Every parameter x every scheme x every adjoint, and for one scheme of each dynamics every loss.

A loss reads the end, saves, a record or a time average.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, TimeAverage
from tests.problems import Case, potentials, schemes, slow_but, square

STEPS = [0, 1, 4, 9, 10, 25]  # saves at uneven distances
WEIGHTS = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
LOSSES = ["final", "saves", "record", "average"]
# One scheme of each dynamics with every loss, and all others with saves: what a loss reads does not
# depend on the scheme.
FIRST = {case.dynamics: case for case in reversed(schemes())}
ROWS = [(case, kind) for case in FIRST.values() for kind in LOSSES]
ROWS += [(case, "saves") for case in [*schemes(), *potentials()] if case not in FIRST.values()]


def by_default(case, kind):
    """Each dynamics with its first scheme and the end, and one without noise and one with noise
    with an average and a cutoff too.
    """
    both = case.dynamics in ("hamiltonian", "langevin")
    # A chain of three and two modes have what one has.
    first = kind == "final" and case.dynamics not in ("chain-1", "generalised-1")
    return first or (both and (kind == "average" or case.potential == "cutoff"))


def in_a_marathon(case, kind):
    """Other potentials under a dynamics whose every scheme is a row: none knows its potential. And
    what is read along a run, which two dynamics have: it does not depend on their terms.
    """
    others = ("chain-3", "esh", "langevin", "overdamped")
    read = kind in ("record", "average") and case.dynamics not in ("hamiltonian", "langevin")
    return read or (case.potential != "lennard-jones" and case.dynamics in others)


TABLE = slow_but(by_default, ROWS, in_a_marathon)


def moment(state):
    """A smooth function of every field of the state."""
    return sum((torch.sin(1.3 * x) + 0.3 * x**2).sum() for x in state)


def loss_of(case: Case, dynamics, position, momentum, kind: str, adjoint) -> torch.Tensor:
    """One number from a run of 25 steps."""
    times = torch.tensor(STEPS, dtype=torch.float64) * case.dt
    record = {"record": moment, "average": TimeAverage(moment, burn_in=5 * case.dt)}.get(kind)
    start = case.start(dynamics, position, momentum)
    generator = torch.Generator().manual_seed(11)
    run = adjsim.simulate(
        dynamics,
        start,
        times,
        solver=case.solver,
        adjoint=adjoint,
        record=record,
        generator=generator,
    )
    if kind == "final":
        return moment(run.final)
    if kind == "saves":
        frames = [
            type(run.final)(*(getattr(run, f)[i] for f in run.final._fields))
            for i in range(len(STEPS))
        ]
        return sum(w * moment(frame) for w, frame in zip(WEIGHTS, frames, strict=True))
    if kind == "record":
        return (WEIGHTS * run.record).sum() + moment(run.final)
    return run.record + 0.1 * moment(run.final)


def gradients(case: Case, kind: str, adjoint) -> dict[str, torch.Tensor]:
    """The gradient of the loss by everything there is."""
    dynamics = case.build()
    position, momentum = (x.requires_grad_() for x in square())
    inputs = {**dict(dynamics.named_parameters()), "position": position, "momentum": momentum}
    value = loss_of(case, dynamics, position, momentum, kind, adjoint)
    found = torch.autograd.grad(value, list(inputs.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(inputs.items(), found, strict=True)
    }


@functools.cache
def direct_gradients(case: Case, kind: str) -> dict[str, torch.Tensor]:
    return gradients(case, kind, DirectAdjoint())


def slope_along(
    directions: dict[str, torch.Tensor], loss: Callable[[dict[str, torch.Tensor]], float]
) -> float:
    """Central differences of a loss of shifts of its inputs, along one direction in all of them."""
    # With h = 1e-4 and Richardson's step at 2e-4, truncation is h^4 and rounding 1e-16 / h: 1e-12
    # of the loss.
    h = 1e-4
    with torch.no_grad():
        values = {
            k: loss({name: k * h * x for name, x in directions.items()}) for k in (-2, -1, 1, 2)
        }
    near, far = (values[1] - values[-1]) / (2 * h), (values[2] - values[-2]) / (4 * h)
    return (4 * near - far) / 3


def agrees_with_differences(
    grads: dict[str, torch.Tensor],
    loss: Callable[[dict[str, torch.Tensor]], float],
    tolerance: float,
) -> None:
    """Check gradients along one random direction of all parameters and one of the start."""
    generator = torch.Generator().manual_seed(3)
    along = {k: torch.randn(g.shape, generator=generator, dtype=g.dtype) for k, g in grads.items()}
    start = ("position", "momentum")
    for names in ([k for k in grads if k not in start], [k for k in grads if k in start]):
        expected = sum(float((grads[name] * along[name]).sum()) for name in names)
        slope = slope_along({name: along[name] for name in names}, loss)
        assert slope == pytest.approx(expected, rel=1e-6, abs=tolerance), names


def shifted_loss(case: Case, kind: str, shifts: dict[str, torch.Tensor]) -> float:
    dynamics = case.build()
    position, momentum = square()
    inputs = {**dict(dynamics.named_parameters()), "position": position, "momentum": momentum}
    for name, shift in shifts.items():
        inputs[name] += shift
    return float(loss_of(case, dynamics, position, momentum, kind, DirectAdjoint()))


def agree(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    # A gradient that is small because its terms cancel keeps their rounding: it is held to 1e-3 of
    # the largest.
    largest = max(float(value.norm()) for value in theirs.values())
    for name, value in theirs.items():
        scale = max(float(value.norm()), 1e-3 * largest)
        assert float((mine[name] - value).norm()) <= tolerance * scale, name


@pytest.mark.parametrize(("case", "kind"), TABLE, ids=str)
def test_direct_against_central_differences(case, kind):
    # 1e-9 absolute: the rounding of losses of order 10 to 100 divided by h.
    loss = functools.partial(shifted_loss, case, kind)
    agrees_with_differences(direct_gradients(case, kind), loss, 1e-9)


@pytest.mark.parametrize(("case", "kind"), TABLE, ids=str)
def test_constant_memory_adjoints_equal_direct(case, kind):
    direct = direct_gradients(case, kind)
    # Where segments end does not depend on the scheme or on what is saved.
    for segments in (None, 1, 3, 25) if kind == "final" else (3,):
        agree(gradients(case, kind, CheckpointAdjoint(segments)), direct, 1e-12)
    if not case.invertible:
        with pytest.raises(TypeError, match="has no inverse"):
            gradients(case, kind, ReversibleAdjoint())
        return
    for every in (None, 7) if kind == "final" else (None,):
        agree(gradients(case, kind, ReversibleAdjoint(checkpoint_every=every)), direct, 1e-10)


def of_a_longer_run(adjoint):
    dynamics = Case("chain-3", "NBABN", "lennard-jones").build()
    solver = adjsim.Splitting("NBABN", 0.01)
    start = dynamics.init(*square())
    run = adjsim.simulate(dynamics, start, [0, 2.0], solver=solver, adjoint=adjoint)
    return torch.autograd.grad(moment(run.final), list(dynamics.parameters()))


@functools.cache
def direct_of_a_longer_run():
    return of_a_longer_run(DirectAdjoint())


@pytest.mark.parametrize(
    "adjoint",
    [
        pytest.param(CheckpointAdjoint(), marks=pytest.mark.marathon),
        pytest.param(ReversibleAdjoint(), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_longer_runs_agree_to_their_reach(adjoint):
    """200 steps of four atoms bound in a chain's bath."""
    for mine, theirs in zip(of_a_longer_run(adjoint), direct_of_a_longer_run(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=0)
