"""Gradients of rigid molecules at constant pressure: every adjoint, compiled and on the lattice."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.compiler import to_cpp
from tests.constraints import ClustersAtPressure, weighted

ADJOINTS = (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint(), adjsim.ReversibleAdjoint())
FORMS = [
    ("orthogonal", "isotropic", False),
    ("tilted", "isotropic", True),
    ("orthogonal", "each", True),
    ("turned", "each", False),
]


def forms(*short, other=pytest.mark.slow):
    """All forms, of which others than these are slow."""
    return [
        pytest.param(
            ClustersAtPressure(*form),
            id=f"{form[0]}-{form[1]}{'-chains' * form[2]}",
            marks=[] if form in short else [other],
        )
        for form in FORMS
    ]


def gradients(system, numbers, steps=4, **options):
    path = system.run(numbers, steps, system.scheme, **options)
    found = torch.autograd.grad(weighted(path.final), list(numbers.values()))
    return path, dict(zip(numbers, found, strict=True))


@pytest.mark.parametrize("system", forms(FORMS[3]))
def test_all_adjoints_equal_central_differences(system):
    numbers, h = system.parameters(), 1e-5
    found = [gradients(system, numbers, adjoint=a)[1] for a in ADJOINTS]
    generator = torch.Generator().manual_seed(5)
    for name, number in numbers.items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], found[0][name], rtol=1e-10, atol=1e-10)
        along = torch.randn(number.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ends = [
                weighted(system.run({**numbers, name: number + s * along}, 4, system.scheme).final)
                for s in (h, -h)
            ]
        expected = (ends[0] - ends[1]) / (2 * h)
        # Truncation h^2 and rounding 1e-14 / h are below 1e-8.
        mine = (found[0][name] * along).sum()
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("system", forms(FORMS[3]))
def test_exact_runs_have_the_gradient_of_backpropagation(system):
    numbers = system.parameters()
    path, mine = gradients(system, numbers, 8, exact=True, adjoint=ADJOINTS[2])
    _, expected = gradients(system, numbers, 8, exact=True, adjoint=ADJOINTS[0])
    assert path.stats["reconstruction_error"] == 0
    held = system.constrained(system.leaves).constraints
    assert float(held.excess(path.final.position).detach().abs().max()) < 1e-7
    for name in numbers:
        torch.testing.assert_close(mine[name], expected[name], rtol=1e-11, atol=1e-11)
    plain = system.run(system.leaves, 8, system.scheme)
    for x, y in zip(plain.final, path.final, strict=True):
        # A scale on the lattice is off by up to 2^22 units, 4e-6 for a position of ten.
        torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("system", forms(other=pytest.mark.marathon))
def test_compiled_runs_agree_and_do_not_return_to_python(system, exact, monkeypatch):
    left = []
    described = to_cpp.described
    monkeypatch.setattr(to_cpp, "described", lambda x: left.append(described(x)) or left[-1])
    numbers, options = system.parameters(), {"adjoint": ADJOINTS[2], "exact": exact}
    path, plain = gradients(system, numbers, 6, **options)
    compiled_path, compiled = gradients(system, numbers, 6, compile=True, **options)
    assert not any(left)
    for x, y in zip(path.final, compiled_path.final, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    for name in numbers:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-10, atol=1e-10)
