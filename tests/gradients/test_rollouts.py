"""Gradients of runs of whole systems with respect to every number: against differences and between
the adjoints, in contact and sliding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import adjsim
from adjsim import (
    BackwardEuler,
    CheckpointAdjoint,
    DirectAdjoint,
    ImplicitMidpoint,
    ReversibleAdjoint,
    Splitting,
)
from tests.problems import slow_but
from tests.rollouts import SYSTEMS, Numbers, random


def solver_of(kind: str, scheme: str, dt: float, exact: bool):
    if kind == "euler":
        return BackwardEuler(2 * dt)
    if kind == "midpoint":
        return ImplicitMidpoint(2 * dt)
    return Splitting(scheme, dt, exact=exact)


class Run:
    """A system with its numbers, which can be run many times."""

    def __init__(self, name: str, kind: str = "splitting", **options) -> None:
        self.system, self.numbers, self.options = SYSTEMS[name], Numbers(), options
        self.kind = kind
        self.system.make(self.numbers, **options)

    def __call__(self, adjoint, *, exact=False, compile=False) -> tuple[Tensor, adjsim.Trajectory]:
        """Return a loss of the end and of a frame on the way, and the run."""
        dynamics, start = self.system.make(self.numbers, **self.options)
        dt, steps = self.system.dt, self.system.steps
        made = adjsim.simulate(
            dynamics,
            start,
            [0.0, dt * (steps // 4 * 2), dt * steps],
            solver=solver_of(self.kind, dynamics.scheme, dt, exact),
            adjoint=adjoint,
            compile=compile,
        )
        q, p = made.final
        loss = (random(*q.shape, seed=8) * q).sum() + (random(*p.shape, seed=9) * p**2).sum()
        return loss + (random(*q.shape, seed=10) * made.position[1] ** 2).sum(), made

    def gradients(self, adjoint, **options) -> tuple[dict[str, Tensor], adjsim.Trajectory]:
        loss, made = self(adjoint, **options)
        found = torch.autograd.grad(loss, list(self.numbers.leaves.values()))
        return dict(zip(self.numbers.leaves, found, strict=True)), made

    def slope(self, along: dict[str, Tensor], h: float) -> float:
        """The derivative along a direction, by central differences of fourth order."""
        values = []
        for step in (-2, -1, 1, 2):
            with torch.no_grad():
                for name, direction in along.items():
                    self.numbers.leaves[name] += step * h * direction
                values.append(float(self(DirectAdjoint())[0]))
                for name, direction in along.items():
                    self.numbers.leaves[name] -= step * h * direction
        a, b, c, d = values
        return (a - 8 * b + 8 * c - d) / (12 * h)


def directions(run: Run, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random steps, a share of the largest entry of a number, whose effects do not cancel."""
    found: dict[str, Tensor] = {}
    for k, (name, grad) in enumerate(grads.items()):
        size = float(run.numbers.leaves[name].detach().abs().max()) or 1.0
        steps = random(*grad.shape, seed=20 + k).abs() * torch.where(grad < 0, -1.0, 1.0)
        found[name] = size * steps
    return found


def agree(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, grad in theirs.items():
        # An effect that is small against the others is a difference of larger terms.
        size = max(float(grad.norm()), 1e-2)
        assert float((mine[name] - grad).norm()) <= tolerance * size, name


ROWS = [(name, "splitting") for name in SYSTEMS]
ROWS += [(name, kind) for name in ("thrown", "particles") for kind in ("euler", "midpoint")]
FEW = slow_but(lambda *_: False, ROWS, marathon=lambda *row: row != ("thrown", "splitting"))


@pytest.mark.parametrize(("name", "kind"), FEW)
def test_every_adjoint_gives_the_gradient_of_differences(name, kind):
    """By a direction in which each number changes the loss by the same amount."""
    run = Run(name, kind)
    direct, _ = run.gradients(DirectAdjoint())
    agree(run.gradients(CheckpointAdjoint(3))[0], direct, 1e-12)
    reversible, made = run.gradients(ReversibleAdjoint())
    agree(reversible, direct, 1e-10)
    assert made.stats["reconstruction_error"] < 1e-10
    along = directions(run, direct)
    terms = {k: float((direct[k] * d).sum()) for k, d in along.items()}
    # No number is without effect: the bodies touch and slide.
    weakest = min(terms.values())
    assert weakest > 1e-7 * max(terms.values())
    slope = run.slope({k: weakest / terms[k] * d for k, d in along.items()}, 3e-4)
    # Truncation of fourth order, and rounding: 1e-14 of the loss against 1e-4 of the weakest term.
    assert slope == pytest.approx(len(terms) * weakest, rel=1e-6, abs=1e-10)


@pytest.mark.marathon
@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_gradients_of_single_numbers_against_differences(name, kind):
    run = Run(name, kind)
    grads, _ = run.gradients(ReversibleAdjoint())
    for number, along in directions(run, grads).items():
        expected = float((grads[number] * along).sum())
        # The rounding of a loss of order ten, divided by h.
        found = run.slope({number: along}, 1e-4)
        assert found == pytest.approx(expected, rel=1e-6, abs=2e-10), number


@pytest.mark.parametrize(
    "name",
    slow_but(
        lambda name: False,
        ["thrown", "network", "shell", "particles", "driven"],
        marathon=lambda name: name in ("network", "shell"),
    ),
)
def test_shears_and_scales_are_reversed_exactly(name):
    """Contact, damping, paths and actuators, on a lattice; friction has a flow of another kind."""
    run = Run(name, friction=False)
    direct, one = run.gradients(DirectAdjoint(), exact=True)
    reversible, two = run.gradients(ReversibleAdjoint(), exact=True)
    assert two.stats["reconstruction_error"] == 0
    assert torch.equal(one.final.position, two.final.position)
    agree(reversible, direct, 1e-12)


# Feedback is undone by iteration, which is refused.
COMPILED = [name for name in SYSTEMS if name != "feedback"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.marathon) for name in COMPILED],
)
def test_compiled_runs_equal_eager_ones(name):
    run = Run(name)
    eager, one = run.gradients(ReversibleAdjoint())
    compiled, two = run.gradients(ReversibleAdjoint(), compile=True)
    agree(compiled, eager, 1e-10)
    for x, y in zip(one.final, two.final, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
    assert two.stats["compiled_forward"] == two.stats["compiled_backward"] == "C++"
