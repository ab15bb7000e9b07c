"""Runs that go on from the end of another run, in memory."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

import adjsim
from tests.problems import parameter, slow_but
from tests.reach.long_run import problem

KINDS = ["", "exact", "checkpoint", "compiled", "compiled exact", "compiled checkpoint", "direct"]
DT, HALF, STEPS = 0.005, 300, 700


def halves(kind, steps=STEPS, first=HALF):
    """Return the trajectories and the parameters of a whole run and of its two halves."""
    found = []
    for parts in ((0, steps), (0, first, steps)):
        dynamics, start, _, options = problem(steps, kind)
        options["record"] = None
        runs = []
        for a, b in itertools.pairwise(parts):
            ts = torch.arange(a, b + 1, 50, dtype=torch.float64) * DT
            given = {"continues": runs[-1]} if runs else {"generator": 2}
            runs.append(adjsim.simulate(dynamics, None if runs else start, ts, **given, **options))
        found.append((runs, list(dynamics.parameters())))
    return found


@pytest.mark.parametrize("kind", slow_but(lambda kind: kind == "compiled exact", KINDS))
def test_two_halves_are_one_whole(kind):
    ((whole,), parameters), ((first, second), again) = halves(kind)
    frames = torch.cat([first.position, second.position[1:]])
    assert torch.equal(frames, whole.position)
    for a, b in zip(whole.final, second.final, strict=True):
        assert torch.equal(a, b)

    def loss(position):
        return position[-1].square().sum() + position[:4].sum()

    expected = torch.autograd.grad(loss(whole.position), parameters)
    found = torch.autograd.grad(loss(frames), again)
    for a, b in zip(expected, found, strict=True):
        # Sums over steps are added in another order; without exact=True the reversed paths differ.
        torch.testing.assert_close(b, a, rtol=1e-9 if "exact" in kind else 1e-6, atol=0.0)


@pytest.mark.slow
def test_buffers_are_checked_at_the_same_steps():
    """Friction fills the buffers in some hundred steps; they are spilled in both halves."""
    dynamics = adjsim.Langevin(adjsim.Harmonic(1.0), kT=parameter(1.0), friction=8.0)
    start = dynamics.init(torch.zeros(3, 1), generator=0)
    solver = adjsim.Splitting("BAOAB", 0.02, exact=True)
    options = {"solver": solver, "adjoint": adjsim.ReversibleAdjoint()}
    whole = adjsim.simulate(dynamics, start, [0.0, 12.0], generator=1, **options)
    half = adjsim.simulate(dynamics, start, [0.0, 5.02], generator=1, **options)
    rest = adjsim.simulate(dynamics, None, [5.02, 12.0], continues=half, **options)
    assert torch.equal(rest.final.position, whole.final.position)
    assert torch.equal(rest.final.momentum, whole.final.momentum)
    expected = torch.autograd.grad(whole.final.position.sum(), dynamics.kT, retain_graph=True)[0]
    found = torch.autograd.grad(rest.final.position.sum(), dynamics.kT)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)
    # The bits of both halves are those of the whole run.
    bits = 251 * half.stats["buffer_bits"] + 349 * rest.stats["buffer_bits"]
    assert bits / 600 == pytest.approx(whole.stats["buffer_bits"], rel=0.02)


@pytest.mark.parametrize("compiled", [False, True])
def test_time_goes_on(compiled):
    """A force that depends on time is that of the whole run."""

    class Driven(adjsim.potentials.ForceField):
        def __init__(self):
            super().__init__()
            self.size = parameter(0.3)

        def forward(self, t, position):
            return -position + self.size * torch.cos(3.0 * torch.as_tensor(t))

    dynamics = adjsim.Hamiltonian(Driven())
    start = dynamics.init(torch.ones(2, 1), torch.zeros(2, 1))
    options = {
        "solver": adjsim.VelocityVerlet(0.05),
        "adjoint": adjsim.ReversibleAdjoint(),
        "compile": compiled,
    }
    whole = adjsim.simulate(dynamics, start, [0.5, 10.5], **options)
    half = adjsim.simulate(dynamics, start, [0.5, 3.5], **options)
    rest = adjsim.simulate(dynamics, None, [3.5, 10.5], continues=half, **options)
    assert torch.equal(rest.final.position, whole.final.position)
    a, b = (
        torch.autograd.grad(run.final.position.sum(), dynamics.potential.size)[0]
        for run in (whole, rest)
    )
    torch.testing.assert_close(b, a, rtol=1e-10, atol=0.0)


@pytest.mark.slow
def test_a_trajectory_that_was_loaded_goes_on():
    ((whole,), _), ((first, _), _) = halves("exact")
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    dynamics, _, _, options = problem(STEPS, "exact")
    options["record"] = None
    for run in (torch.load(file, weights_only=True), copy.deepcopy(first)):
        rest = adjsim.simulate(dynamics, None, [HALF * DT, STEPS * DT], continues=run, **options)
        assert torch.equal(rest.final.position, whole.final.position)


@pytest.mark.slow
def test_continues_with_a_store(tmp_path):
    ((whole,), _), ((first, _), _) = halves("exact")
    dynamics, _, _, options = problem(STEPS, "exact")
    options["record"] = None
    for _ in range(2):
        rest = adjsim.simulate(
            dynamics,
            None,
            [HALF * DT, STEPS * DT],
            continues=first,
            store=tmp_path,
            **options,
        )
        assert torch.equal(rest.final.position, whole.final.position)


def test_arguments_that_do_not_fit_are_refused():
    dynamics, start, _, options = problem(100, "exact")
    run = adjsim.simulate(dynamics, start, [0.0, 0.5], generator=2, **options)

    def go_on(state=None, ts=(0.5, 1.0), **given):
        return adjsim.simulate(dynamics, state, list(ts), **{"continues": run, **options, **given})

    with pytest.raises(ValueError, match="give None as state"):
        go_on(state=run.final)
    with pytest.raises(ValueError, match="leave generator out"):
        go_on(generator=2)
    with pytest.raises(ValueError, match=r"ends at t = 0\.5, and ts begins at 0"):
        go_on(ts=(0.0, 1.0))
    with pytest.raises(ValueError, match="give the same solver"):
        go_on(solver=adjsim.Splitting("BAOAB", 0.0025, exact=True))
    with pytest.raises(TypeError, match="steps of a fixed size"):
        go_on(solver=adjsim.SDESolver(dt=0.005))
    with pytest.raises(TypeError, match="state must be a start"):
        adjsim.simulate(dynamics, None, [0.0, 0.5], **options)
    dynamics.friction.mul_(1000.0)
    with pytest.raises(ValueError, match="have changed since the run"):
        go_on()


@pytest.mark.parametrize("rate", [1.0, None])
def test_steps_with_a_second_copy_are_refused(rate):
    field = nn.Linear(2, 2)
    dynamics = adjsim.ODE(lambda t, y: field(y))
    solver = adjsim.Coupled("rk4", 0.1, rate=rate)
    with torch.no_grad():
        run = adjsim.simulate(dynamics, dynamics.init(torch.ones(2)), [0.0, 1.0], solver=solver)
        with pytest.raises(TypeError, match="second copy of the state"):
            adjsim.simulate(dynamics, None, [1.0, 2.0], solver=solver, continues=run)
