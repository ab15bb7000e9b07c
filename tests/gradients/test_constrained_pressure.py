"""Gradients of rigid molecules at constant pressure: every adjoint, compiled and on the lattice."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.compiler import to_cpp
from tests.constraints import (
    TRIANGLE,
    WATER,
    WATER_LENGTHS,
    ClustersAtPressure,
    tensor,
    weighted,
)
from tests.problems import chaotic

ADJOINTS = (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint(), adjsim.ReversibleAdjoint())
FORMS = [
    ("orthogonal", "isotropic", False),
    ("tilted", "isotropic", True),
    ("orthogonal", "each", True),
    ("turned", "each", False),
]


def forms(*short):
    """All forms, of which others than these are marathons: a minute each where they compile."""
    return [
        pytest.param(
            ClustersAtPressure(*form),
            id=f"{form[0]}-{form[1]}{'-chains' * form[2]}",
            marks=[] if form in short else [pytest.mark.marathon],
        )
        for form in FORMS
    ]


def gradients(system, numbers, steps, **options):
    path = system.run(numbers, steps, system.scheme, **options)
    found = torch.autograd.grad(weighted(path.final), list(numbers.values()))
    return path, dict(zip(numbers, found, strict=True))


@pytest.mark.parametrize("system", forms(FORMS[3]))
def test_all_adjoints_equal_central_differences(system):
    numbers, h = system.parameters(), 1e-5
    found = [gradients(system, numbers, 2, adjoint=a)[1] for a in ADJOINTS]
    generator = torch.Generator().manual_seed(5)
    for name, number in numbers.items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], found[0][name], rtol=1e-10, atol=1e-10)
        along = torch.randn(number.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ends = [
                weighted(system.run({**numbers, name: number + s * along}, 2, system.scheme).final)
                for s in (h, -h)
            ]
        expected = (ends[0] - ends[1]) / (2 * h)
        # Truncation h^2 and rounding 1e-14 / h are below 1e-8.
        mine = (found[0][name] * along).sum()
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("system", forms(FORMS[3]))
def test_exact_runs_have_the_gradient_of_backpropagation(system):
    numbers = system.parameters()
    path, mine = gradients(system, numbers, 4, exact=True, adjoint=ADJOINTS[2])
    _, expected = gradients(system, numbers, 4, exact=True, adjoint=ADJOINTS[0])
    assert path.stats["reconstruction_error"] == 0
    held = system.constrained(system.leaves).constraints
    # A chain scales momenta by fractions of 2^22, to units of which multipliers are rounded.
    allowed = 1e-6 if system.chains else 1e-7
    assert float(held.excess(path.final.position).detach().abs().max()) < allowed
    for name in numbers:
        torch.testing.assert_close(mine[name], expected[name], rtol=1e-11, atol=1e-11)
    plain = system.run(system.leaves, 4, system.scheme)
    for x, y in zip(plain.final, path.final, strict=True):
        # A scale on the lattice is off by up to 2^22 units, 4e-6 for a position of ten.
        torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-4)


@pytest.fixture
def left(monkeypatch):
    """What compiled functions leave to torch, of each of them."""
    found, described = [], to_cpp.described
    monkeypatch.setattr(to_cpp, "described", lambda x: found.append(described(x)) or found[-1])
    return found


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("system", forms())
def test_compiled_runs_agree_and_do_not_return_to_python(system, exact, left):
    numbers, options = system.parameters(), {"adjoint": ADJOINTS[2], "exact": exact}
    path, plain = gradients(system, numbers, 6, **options)
    compiled_path, compiled = gradients(system, numbers, 6, compile=True, **options)
    assert left
    assert not any(left)
    for x, y in zip(path.final, compiled_path.final, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    for name in numbers:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-10, atol=1e-10)


def liquid(molecules, spacing, shape, length, pairs, **numbers):
    """A cube of rigid molecules in a box, with a start of theirs."""
    side = round(molecules ** (1 / 3))
    sites = spacing * torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 3)
    position = (shape + sites[:, None]).flatten(0, 1)
    index = torch.cat([tensor(pairs).long() + len(shape) * k for k in range(molecules)])
    liquid = adjsim.LennardJones(
        sigma=numbers.pop("sigma"),
        cutoff=2.4,
        box=[side * spacing] * 3,
        truncation=adjsim.potentials.Switched(1.8),
        exclusions=index,
    )
    held = adjsim.DistanceConstraints(index, tensor(length).repeat(molecules))
    dynamics = adjsim.Constrained(adjsim.LangevinPiston(liquid, **numbers), held)
    return dynamics, dynamics.init(position, generator=0)


def retraced(dynamics, start, dt, steps):
    """Run and undo compiled exact steps, and return the gradient of the volume by momenta."""
    start = type(start)(*(x.detach().requires_grad_() for x in start))
    path = adjsim.simulate(
        dynamics,
        start,
        [0.0, steps * dt],
        solver=adjsim.Splitting(dynamics.dynamics.scheme, dt, exact=True),
        adjoint=adjsim.ReversibleAdjoint(),
        generator=1,
        compile=True,
    )
    dynamics.volume(path.final).backward()
    assert path.stats["steps"] == steps
    assert path.stats["reconstruction_error"] == 0
    assert float(dynamics.constraints.excess(path.final.position).detach().abs().max()) < 1e-7
    volumes = [float(dynamics.volume(x).detach()) for x in (start, path.final)]
    assert volumes[0] != pytest.approx(volumes[1])
    return start.momentum.grad


@chaotic
@pytest.mark.marathon
def test_two_thousand_exact_steps_of_rods_come_back():
    rod = tensor([[0.0, 0, 0], [0.6, 0, 0]])
    made = liquid(
        64, 1.7, rod, [0.6], [[0, 1]], sigma=1.0, mass=1.0, kT=1.2, friction=0.3, pressure=1.0
    )
    grad = retraced(*made, 0.005, 2000)
    assert bool(grad.isfinite().all())


@chaotic
@pytest.mark.marathon
def test_a_hundred_thousand_exact_steps_of_rigid_waters_come_back():
    """States alone: cotangents grow by 1e14 in 2,000 steps of this liquid, and overflow."""
    made = liquid(
        27,
        2.5,
        WATER,
        WATER_LENGTHS,
        TRIANGLE.tolist(),
        sigma=1.2,
        mass=[16.0, 1, 1] * 27,
        kT=0.8,
        friction=0.3,
        pressure=0.1,
    )
    retraced(*made, 0.005, 100_000)
