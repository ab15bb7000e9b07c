"""Runs in contact: every parameter, every adjoint, exact reversal and compiled steps."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.potentials import ParticleContact
from adjsim.potentials.signals.signals import CubicSpline
from tests.bonded import close
from tests.contact import EVERY, POINTS, SHORT, contact, moving
from tests.problems import parameter, slow_but

MOMENTA = torch.randn(12, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
TIMES = torch.tensor([0.0, 0.2, 0.4], dtype=torch.float64)
# Moving contact has one path in closed form and one through nodes.
CASES = [(*row, kind) for row in EVERY for kind in ("at rest", "moving", "spline")]
FEW = [(*row, "at rest") for row in SHORT] + [("box", "barrier", "moving")]


def make(surface: str, penalty: str, kind: str):
    if kind == "at rest":
        return contact(surface, penalty, index=range(10))
    path = None
    if kind == "spline":
        nodes = torch.tensor([[0.0, 0, 0], [0.1, 0.2, -0.1], [0.2, 0.1, 0.1]], dtype=torch.float64)
        path = CubicSpline(TIMES, torch.nn.Parameter(nodes))
    return moving(surface, penalty, path, index=range(10))


def run(potential, adjoint, *, exact=False, compile=False, steps=40):
    dynamics = adjsim.Hamiltonian(potential, 1.3)
    return adjsim.simulate(
        dynamics,
        dynamics.init(POINTS, MOMENTA),
        [0.0, 0.01 * steps],
        solver=adjsim.Splitting("BAB", 0.01, exact=exact),
        adjoint=adjoint,
        compile=compile,
    )


def gradients(potential, adjoint, **options):
    found = run(potential, adjoint, **options)
    parameters = dict(potential.named_parameters())
    loss = (found.final.position**2).sum()
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return found, dict(zip(parameters, grads, strict=True))


@pytest.mark.parametrize(
    ("surface", "penalty", "kind"),
    slow_but(lambda *row: row in FEW, CASES, marathon=lambda *_: True),
)
def test_every_adjoint_gives_the_gradient_of_differences(surface, penalty, kind):
    potential = make(surface, penalty, kind)
    _, direct = gradients(potential, adjsim.DirectAdjoint())
    assert all(float(grad.abs().max()) > 0 for grad in direct.values())
    # The rounding of 40 steps: recomputed states are the same, reversed ones are off by 1e-15.
    for adjoint, tolerance in (
        (adjsim.CheckpointAdjoint(), 1e-12),
        (adjsim.ReversibleAdjoint(), 1e-10),
    ):
        _, found = gradients(potential, adjoint)
        for name, grad in direct.items():
            close(found[name], grad, tolerance)
    h, total = 1e-6, 0.0
    directions = [torch.randn_like(p) for p in potential.parameters()]
    with torch.no_grad():
        for sign in (1, -1):
            for p, d in zip(potential.parameters(), directions, strict=True):
                p += sign * h * d
            total += sign * float(
                (run(potential, adjsim.DirectAdjoint()).final.position ** 2).sum()
            )
            for p, d in zip(potential.parameters(), directions, strict=True):
                p -= sign * h * d
    terms = [(g * d).sum() for g, d in zip(direct.values(), directions, strict=True)]
    rates = float(sum(terms))
    # Truncation h^2, times 1e6 where a deep point is thrown out, and rounding 1e-14 / h.
    scale = float(sum(abs(term) for term in terms))
    assert total / (2 * h) == pytest.approx(rates, abs=1e-6 * scale)


@pytest.mark.parametrize(
    ("surface", "penalty", "kind"),
    [
        ("sphere", "barrier", "at rest"),
        ("box", "softplus", "moving"),
        pytest.param("cylinder", "softplus", "spline", marks=pytest.mark.slow),
    ],
)
def test_exact_runs_go_back_bit_for_bit(surface, penalty, kind):
    found, _ = gradients(
        make(surface, penalty, kind), adjsim.ReversibleAdjoint(), exact=True, steps=300
    )
    assert found.stats["reconstruction_error"] == 0
    assert float((found.final.position - POINTS).detach().abs().max()) > 0.5


@pytest.mark.parametrize(
    ("surface", "penalty", "kind", "exact"),
    [
        pytest.param(*row, marks=pytest.mark.marathon)
        for row in (("sphere", "barrier", "at rest", True), ("box", "softplus", "spline", False))
    ]
    + [
        pytest.param(*row, exact, marks=pytest.mark.marathon)
        for row in CASES
        for exact in (False, True)
    ],
)
def test_compiled_runs_equal_eager_ones(surface, penalty, kind, exact):
    potential = make(surface, penalty, kind)
    eager, expected = gradients(potential, adjsim.ReversibleAdjoint(), exact=exact)
    found, grads = gradients(potential, adjsim.ReversibleAdjoint(), exact=exact, compile=True)
    assert found.stats["compiled_forward"] == found.stats["compiled_backward"] == "C++"
    if exact:
        assert found.stats["reconstruction_error"] == 0
    # Functions such as log have other last bits, which 40 steps enlarge.
    close(found.final.position, eager.final.position, 1e-12)
    for name, grad in expected.items():
        close(grads[name], grad, 1e-10)


@pytest.mark.slow
def test_particles_that_collide():
    potential = ParticleContact(parameter(0.4), parameter(50.0))
    _, direct = gradients(potential, adjsim.DirectAdjoint())
    found, reversible = gradients(potential, adjsim.ReversibleAdjoint(), exact=True)
    assert found.stats["reconstruction_error"] == 0
    assert set(direct) == {"radius", "stiffness"}
    for name, grad in direct.items():
        # The lattice moves positions by 1e-12 or so.
        close(reversible[name], grad, 1e-8)
