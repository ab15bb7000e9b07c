"""Time averages with a stride in steps."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.adjoints.loops.runner import LoopRunner
from tests.problems import parameter

DT, STEPS, EVERY, SKIP = 0.1, 50, 7, 1.2
COUNTED = [14, 21, 28, 35, 42, 49]
ADJOINTS = [adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint(), adjsim.ReversibleAdjoint()]


def moments(state):
    """Return means and squares of the distances of neighbours, and a soft histogram of them."""
    r = (state.position.diff(dim=-2).square().sum(-1) + 0.1).sqrt()
    bins = torch.exp(-((r.unsqueeze(-1) - torch.linspace(0, 2, 5)) ** 2)).sum(-2)
    return torch.cat([r, r.square(), bins], -1)


def langevin():
    potential = adjsim.DoubleWell(parameter(1.3))
    return adjsim.Langevin(potential, kT=parameter(0.3), friction=parameter(0.4))


def gradients(dynamics, adjoint, record, *, exact=False, compile=False, ts=(0.0, STEPS * DT)):
    generator = torch.Generator().manual_seed(0)
    position = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    run = adjsim.simulate(
        dynamics,
        dynamics.init(position, generator=1),
        ts,
        solver=adjsim.Splitting("BAOAB", DT, exact=exact),
        adjoint=adjoint,
        record=record,
        generator=2,
        compile=compile,
    )
    mean = run.record if isinstance(record, adjsim.TimeAverage) else run.record[COUNTED].mean(0)
    return mean, torch.autograd.grad(mean.square().sum(), list(dynamics.parameters()))


CASES = [(adjoint, exact, False) for adjoint in ADJOINTS for exact in (False, True)]


@pytest.mark.parametrize(
    ("adjoint", "exact", "compile"),
    [
        *CASES,
        pytest.param(ADJOINTS[2], True, True, marks=pytest.mark.slow),
    ],
)
def test_a_strided_average_is_that_of_the_frames(adjoint, exact, compile):
    dynamics = langevin()
    average = adjsim.TimeAverage(moments, burn_in=SKIP, every=EVERY)
    mean, found = gradients(dynamics, adjoint, average, exact=exact, compile=compile)
    frames = torch.arange(STEPS + 1) * DT
    known, expected = gradients(dynamics, ADJOINTS[0], moments, exact=exact, ts=frames)
    torch.testing.assert_close(mean, known, rtol=1e-12, atol=1e-12)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "adjoint",
    [ADJOINTS[0], *(pytest.param(adjoint, marks=pytest.mark.slow) for adjoint in ADJOINTS[1:])],
)
def test_compiled_loops_do_not_stop_for_an_average_of_all_steps(adjoint, monkeypatch):
    counts, loop = [], LoopRunner.run_loop

    def counted(self, kind, first, count, *rest, **more):
        counts.append(count)
        return loop(self, kind, first, count, *rest, **more)

    monkeypatch.setattr(LoopRunner, "run_loop", counted)
    average = adjsim.TimeAverage(moments, burn_in=SKIP)
    mean, found = gradients(langevin(), adjoint, average, compile=True)
    # Parts end with the burn-in, and with the blocks of checkpoints.
    assert len(counts) < STEPS - round(SKIP / DT)
    known, expected = gradients(langevin(), adjoint, average)
    torch.testing.assert_close(mean, known, rtol=1e-12, atol=1e-12)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def first(state):
    return moments(state)[:, 0]


def simulation(dynamics, steps=STEPS):
    start = torch.linspace(-1, 1, 4, dtype=torch.float64).unsqueeze(-1)
    return adjsim.Simulation(
        dynamics,
        lambda n, generator: dynamics.init(start.repeat(n, 1, 1), generator=generator),
        [0.0, steps * DT],
        solver=adjsim.BAOAB(DT),
    )


def test_estimators_take_the_stride():
    made, average = simulation(langevin()), adjsim.TimeAverage(first, burn_in=SKIP, every=EVERY)
    options = {"replicas": 6, "chunks": 3, "generator": 0}
    score = adjsim.ScoreFunction()(made, average, **options)
    path = adjsim.Pathwise()(made, average, **options)
    sampled = adjsim.Reweighting()(made, average, **options)
    # The means are over the same states of the same paths.
    torch.testing.assert_close(score.value, path.value, rtol=1e-12, atol=0)
    assert not torch.isclose(
        path.value, adjsim.Pathwise()(made, adjsim.TimeAverage(first, SKIP), **options).value
    )
    # Fewer passes than with all steps, each of which takes one and one more for the averaged state.
    assert score.diagnostics["energy_evaluations"] < 1.5 * STEPS * 3
    assert sampled.diagnostics["sampled"]


def test_strides_are_refused_where_all_steps_count():
    average, made = adjsim.TimeAverage(first, every=EVERY), simulation(langevin())
    with pytest.raises(TypeError, match="Pathwise with truncate averages over all steps"):
        adjsim.Pathwise(truncate=1.0)(made, average, replicas=2)
    with pytest.raises(ValueError, match="frames every 2 steps and the observable takes every 7"):
        adjsim.Reweighting(every=0.2)(made, average, replicas=2)
    with pytest.raises(ValueError, match="every = 51 steps leaves nothing"):
        adjsim.Pathwise()(made, adjsim.TimeAverage(first, every=51), replicas=2)
    with pytest.raises(ValueError, match="every"):
        adjsim.TimeAverage(first, every=0)
    ode, average = adjsim.ODE(lambda t, y: -y), adjsim.TimeAverage(lambda state: state.y, every=2)
    for solver in (adjsim.ODESolver(), adjsim.ODESolver("rk4", dt=0.1)):
        with pytest.raises(TypeError, match="ODESolver averages over all steps"):
            adjsim.simulate(ode, ode.init(torch.ones(1)), [0.0, 1.0], solver=solver, record=average)
