"""Reversible Runge-Kutta steps: gradients of every adjoint, and exact reversal at any horizon."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim import (
    CheckpointAdjoint,
    DirectAdjoint,
    Hamiltonian,
    Langevin,
    ReversibleAdjoint,
    TimeAverage,
)
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.fields.ode import ODE
from adjsim.solvers.reversible.coupled import Coupled
from tests.flows import DrivenPendulum, Linear, Lorenz
from tests.gradients.test_table import agree
from tests.problems import POTENTIALS, chaotic, slow_but, square

TIMES = [0.5, 0.6, 1.0, 1.5]
KINDS = ("final", "saves", "record", "average")


class Pair(NamedTuple):
    angle: Tensor
    velocity: Tensor


class Separate(nn.Module):
    """The driven pendulum as a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = DrivenPendulum()

    def forward(self, t: Tensor, y: Pair) -> tuple[Tensor, ...]:
        rates = self.whole(t, torch.stack([y.angle, y.velocity], -1))
        return rates.unbind(-1)


def pendulum():
    y = torch.tensor([[1.0, 0.5], [-0.4, 1.1]], dtype=torch.float64)
    dynamics = ODE(DrivenPendulum())
    return dynamics, {"y": y}, lambda y: dynamics.init(y)


def separate():
    parts = {
        "angle": torch.tensor([[1.0], [-0.4]], dtype=torch.float64),
        "velocity": torch.tensor([[0.5], [1.1]], dtype=torch.float64),
    }
    dynamics = ODE(Separate())
    return dynamics, parts, lambda angle, velocity: dynamics.init(Pair(angle, velocity))


def atoms():
    position, momentum = square()
    dynamics = Hamiltonian(POTENTIALS["lennard-jones"]())
    return dynamics, {"position": position, "momentum": momentum}, dynamics.init


PROBLEMS = {"pendulum": pendulum, "named tuple": separate, "atoms": atoms}


def value(state):
    return sum((i + 1) * (x.square() + x.sin()).sum() for i, x in enumerate(state))


def loss_of(problem, kind, adjoint, compile=False, shift=None, **settings):
    dynamics, start, make = PROBLEMS[problem]()
    inputs = {**dict(dynamics.named_parameters()), **start}
    with torch.no_grad():
        for name, change in (shift or {}).items():
            inputs[name] += change
    for x in start.values():
        x.requires_grad_()
    settings = {"rate": 2.0, **settings}
    run = adjsim.simulate(
        dynamics,
        make(**start),
        TIMES,
        solver=Coupled("rk4", 0.05 if problem != "atoms" else 0.025, **settings),
        adjoint=adjoint,
        compile=compile,
        record={"record": value, "average": TimeAverage(value, 0.3)}.get(kind),
    )
    if kind == "final":
        return value(run.final), inputs, run
    if kind == "saves":
        frames = [[getattr(run, f)[i] for f in run.final._fields] for i in range(len(TIMES))]
        return sum(value(frame) * (1 + i) for i, frame in enumerate(frames)), inputs, run
    return run.record.sum(), inputs, run


def gradients(problem, kind, adjoint, compile=False, **settings):
    loss, inputs, run = loss_of(problem, kind, adjoint, compile, **settings)
    found = torch.autograd.grad(
        loss, list(inputs.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(inputs, found, strict=True)), run


# Whole frames alone for atoms, whose potential costs the most.
PAIRS = [(p, kind) for p in PROBLEMS for kind in KINDS if p != "atoms" or kind == "saves"]
ROWS = [(problem, kind, exact) for problem, kind in PAIRS for exact in (False, True)]


def by_default(problem, kind, exact=False):
    return problem == "pendulum" and (exact or kind == "saves")


def is_of_atoms(problem, *_):
    return problem == "atoms"


@pytest.mark.parametrize(("problem", "kind", "exact"), slow_but(by_default, ROWS, is_of_atoms))
def test_all_adjoints_agree(problem, kind, exact):
    direct, _ = gradients(problem, kind, DirectAdjoint(), exact=exact)
    agree(gradients(problem, kind, CheckpointAdjoint(), exact=exact)[0], direct, 1e-12)
    reversed_, run = gradients(problem, kind, ReversibleAdjoint(), exact=exact)
    # Undone floats lose exp(rate t) of their rounding, which is e^2 here, and less between
    # checkpoints; the lattice loses nothing.
    agree(reversed_, direct, 1e-12 if exact else 1e-10)
    error = run.stats["reconstruction_error"]
    assert error == 0.0 if exact else 0 < error < 1e-10


@pytest.mark.parametrize(
    ("problem", "kind"),
    slow_but(
        lambda problem, kind: kind == "saves" and problem != "atoms",
        PAIRS,
        marathon=lambda problem, kind: problem != "pendulum",
    ),
)
def test_direct_against_central_differences(problem, kind):
    grads, _ = gradients(problem, kind, DirectAdjoint())
    generator = torch.Generator().manual_seed(3)
    for name, grad in grads.items():
        along = torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
        h = 1e-4
        with torch.no_grad():
            loss = {
                k: float(loss_of(problem, kind, DirectAdjoint(), shift={name: k * h * along})[0])
                for k in (-2, -1, 1, 2)
            }
        slope = (4 * (loss[1] - loss[-1]) / (2 * h) - (loss[2] - loss[-2]) / (4 * h)) / 3
        # 1e-8 absolute: the rounding of losses of order 100, divided by h.
        assert slope == pytest.approx(float((grad * along).sum()), rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize(
    ("problem", "kind", "exact"),
    slow_but(
        lambda problem, kind, exact: (problem, kind, exact) == ROWS[3],
        ROWS,
        pytest.mark.marathon,
    ),
)
def test_compiled_equals_eager(problem, kind, exact):
    eager, run = gradients(problem, kind, ReversibleAdjoint(), exact=exact)
    found, compiled = gradients(problem, kind, ReversibleAdjoint(), compile=True, exact=exact)
    # Functions such as the sine may differ in the last bit between torch and compiled code.
    agree(found, eager, 1e-10)
    assert compiled.stats["energy_evaluations"] == run.stats["energy_evaluations"]


@pytest.fixture
def bits_of_words(monkeypatch):
    """Count bits without the byte that says which systems of a batch a spill belongs to."""
    monkeypatch.setattr(Spill, "bits", property(lambda spill: 8 * len(spill.words)))


def long_run(field, start, dt, steps, adjoint, compile=False, **settings):
    dynamics, y = ODE(field), torch.tensor(start, dtype=torch.float64, requires_grad=True)
    run = adjsim.simulate(
        dynamics,
        dynamics.init(y),
        [0.0, steps * dt],
        solver=Coupled("rk4", dt, exact=True, **settings),
        adjoint=adjoint,
        compile=compile,
    )
    found = torch.autograd.grad(run.final.y.square().sum(), [y, *field.parameters()])
    return dict(zip(("y", *dict(field.named_parameters())), found, strict=True)), run


@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.marathon)])
@pytest.mark.usefixtures("bits_of_words")
@chaotic
def test_lorenz_comes_back_bit_for_bit(steps):
    """Where reversed floats are lost after 300 steps; the start is verified by its fingerprint."""
    start = [1.0, 2.0, 20.0]
    grads, run = long_run(Lorenz(), start, 0.005, steps, ReversibleAdjoint(), True, rate=21.0)
    assert run.stats["reconstruction_error"] == 0.0
    assert all(bool(torch.isfinite(x).all()) for x in grads.values())
    # Measured: 0.15199 over 1e5 steps. The fractions of bits in the buffers are up to two bits an
    # entry.
    assert run.stats["buffer_bits"] == pytest.approx(0.15199, abs=2 / steps + 2e-5)
    assert run.stats["buffer_bound"] == pytest.approx(math.log2(10 / 9), rel=1e-6)


@pytest.mark.usefixtures("bits_of_words")
def test_decay_comes_back_bit_for_bit():
    """x' = -x over a time of 100, in which x falls to 1e-44 and the lattice's x to its noise."""
    rate = -math.log(0.99) / 0.01
    _, run = long_run(Linear(-1.0), [1.0], 0.01, 10_000, ReversibleAdjoint(), True, rate=rate)
    assert run.stats["reconstruction_error"] == 0.0
    # Measured by the prototype: 0.01458, with a lattice of another spacing.
    assert run.stats["buffer_bits"] == pytest.approx(0.01458, abs=2 / 10_000)
    assert float(run.final.y.detach().abs()) < 1e-9


@pytest.mark.parametrize(
    "steps",
    [pytest.param(300, marks=pytest.mark.slow), pytest.param(5000, marks=pytest.mark.marathon)],
)
@chaotic
def test_exact_equals_direct_at_long_horizons(steps):
    """The gradient of Lorenz grows as exp(0.9 t), over a time of 1.5 and 25."""
    settings = {"rate": 21.0}
    field, start = Lorenz(), [1.0, 2.0, 20.0]
    direct, run = long_run(field, start, 0.005, steps, DirectAdjoint(), **settings)
    grads, other = long_run(field, start, 0.005, steps, ReversibleAdjoint(), **settings)
    assert torch.equal(run.final.y, other.final.y)
    agree(grads, direct, 1e-12)


@pytest.mark.slow
def test_float_reversal_stores_checkpoints_by_the_rate():
    """Undone steps amplify rounding by exp(22 t), so a third of the digits lasts 70 steps."""
    y = torch.tensor([1.0, 2.0, 20.0], dtype=torch.float64, requires_grad=True)
    dynamics = ODE(Lorenz())

    def run(adjoint):
        solver = Coupled("rk4", 0.005, rate=21.0)
        found = adjsim.simulate(
            dynamics, dynamics.init(y), [0.0, 0.8], solver=solver, adjoint=adjoint
        )
        return torch.autograd.grad(found.final.y.sum(), y)[0], found

    direct, _ = run(DirectAdjoint())
    found, swept = run(ReversibleAdjoint())
    agree({"y": found}, {"y": direct}, 1e-10)
    assert 50 < swept.stats["checkpoint_every"] < 100
    # Without checkpoints the error is about 1e-16 exp(22 0.8) = 4e-9 of the state.
    with pytest.raises(adjsim.ReconstructionError, match="exact=True"):
        run(ReversibleAdjoint(checkpoint_every=10_000, tol=1e-11))


@pytest.mark.usefixtures("unchecked")
def test_refusals():
    start = torch.ones(2, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="unknown Runge-Kutta method"):
        Coupled("rk5", 0.01)
    with pytest.raises(ValueError, match="rate must be positive; got -1"):
        Coupled("rk4", 0.01, rate=-1)
    with pytest.raises(ValueError, match=r"rate = 1e-09 is too small for dt = 0\.001"):
        Coupled("rk4", 0.001, rate=1e-9)
    with pytest.raises(ValueError, match=r"rate = 1e\+09 is too large for dt = 0\.01"):
        Coupled("rk4", 0.01, rate=1e9)
    dynamics = ODE(Linear(-1.0))

    def run(solver, dynamics=dynamics, state=None):
        state = dynamics.init(start) if state is None else state
        return adjsim.simulate(dynamics, state, [0.0, 1.0], solver=solver)

    single = ODE(Linear(-1.0).float())
    with pytest.raises(ValueError, match="exact=True needs a float64 state"):
        run(Coupled("rk4", 0.01, rate=1.0, exact=True), single, single.init(start.float()))
    noisy = Langevin(POTENTIALS["lennard-jones"](), 1.0, 1.0, 1.0)
    with pytest.raises(TypeError, match="Coupled has no noise, and Langevin has"):
        run(Coupled("rk4", 0.01), noisy, noisy.init(*square()))
    with pytest.raises(FloatingPointError, match=r"large enough .* Use a smaller dt \(it is 0.1\)"):
        run(Coupled("rk4", 0.1, rate=100.0), ODE(Linear(-40.0)))
