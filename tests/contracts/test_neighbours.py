"""Pairs found by a tree, against all pairs, in observables and alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adjsim
from adjsim.core.box import checked_box, perpendicular_widths
from adjsim.observables import neighbour_pairs
from adjsim.observables.neighbours import pair_matrix
from tests.contracts.test_observables import FCC, SIDES, TILTED, crystal
from tests.problems import slow_but

# Boxes of a liquid of 343 atoms at density 0.8, more atoms than the tree is used from.
LARGE_BOXES = {
    "sides": [7.2, 7.6, 7.9],
    "tilted": [[7.4, 0.0, 0.0], [1.5, 7.5, 0.0], [-0.9, 1.2, 7.8]],
}
PAIR_OBSERVABLES = {
    "smooth radial distribution": lambda q, box: adjsim.smooth_radial_distribution(
        q, torch.linspace(0.8, 3.4, 3), box, width=0.05
    ),
    "coordination": lambda q, box: adjsim.coordination_number(q, 1.5, width=0.05, box=box),
    "bond order": lambda q, box: adjsim.bond_order(q, 1.5, width=0.05, box=box),
}


def liquid(box, side=7, seed=0):
    """Atoms near the points of a grid, of which some are far outside of the box."""
    generator = torch.Generator().manual_seed(seed)
    cell = torch.as_tensor(box)
    cell = torch.diag(cell) if cell.ndim == 1 else cell
    points = torch.cartesian_prod(*[torch.arange(float(side))] * 3) / side
    images = torch.randint(-2, 3, points.shape, generator=generator)
    return (points + images) @ cell + 0.1 * torch.randn(points.shape, generator=generator)


def all_within(q, box, radius):
    """Pairs within the radius and their vectors, from all pairs."""
    cell = None if box is None else checked_box(box, None)
    i, j = torch.triu_indices(len(q), len(q), offset=1)
    d = pair_matrix(q, cell)[:, i, j].T
    near = d.norm(dim=-1) <= radius
    return i[near], j[near], d[near]


def check_pairs(q, box, radius):
    i, j, shift = neighbour_pairs(q, box, radius)
    known_i, known_j, known = all_within(q, box, radius)
    assert torch.equal(i, known_i)
    assert torch.equal(j, known_j)
    torch.testing.assert_close(q[i] - q[j] - shift, known, rtol=0, atol=1e-12)
    return len(i)


@pytest.mark.parametrize("box", [SIDES, TILTED, None], ids=["sides", "tilted", "open"])
def test_pairs_are_those_of_all_pairs(box):
    q = liquid(SIDES if box is None else box, side=4)
    half = 3.0 if box is None else float(perpendicular_widths(checked_box(box, None)).min()) / 2
    # The last box is just large enough.
    assert [check_pairs(q, box, x * half) > 0 for x in (1e-3, 0.5, 1.0)] == [False, True, True]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_pairs_of_any_box_and_radius(data):
    number = st.floats(-1.0, 1.0)
    dim = data.draw(st.integers(1, 3))
    atoms = data.draw(st.integers(1, 12))
    lengths = torch.tensor(data.draw(st.lists(st.floats(0.5, 4.0), min_size=dim, max_size=dim)))
    tilt = [data.draw(st.lists(number, min_size=dim, max_size=dim)) for _ in range(dim)]
    box = data.draw(st.sampled_from(["open", "sides", "tilted"]))
    cell = {
        "open": None,
        "sides": lengths,
        "tilted": torch.diag(lengths) + 3 * torch.tensor(tilt).tril(-1),
    }[box]
    seed = data.draw(st.integers(0, 2**31))
    q = 10 * torch.randn(atoms, dim, generator=torch.Generator().manual_seed(seed))
    half = 10.0 if cell is None else float(perpendicular_widths(checked_box(cell, None)).min()) / 2
    check_pairs(q, cell, half * data.draw(st.floats(0.01, 1.0)))


def test_atoms_on_the_faces_of_the_box():
    """Rounding takes -1e-17 to the upper face, and 0 and L are one place."""
    q = torch.tensor([[-1e-17, 0.0, 4.0], [4.0, 4.0, 0.5], [0.0, -1e-300, 7.9]])
    assert check_pairs(q, [4.0] * 3, 1.0) == 3
    assert check_pairs(q, 4.0 * torch.eye(3), 1.0) == 3


@pytest.mark.parametrize(
    ("name", "box"),
    slow_but(
        lambda name, box: box == "sides" or name == "coordination",
        itertools.product(PAIR_OBSERVABLES, LARGE_BOXES),
    ),
)
def test_large_systems_are_as_all_pairs(name, box):
    """Transforms of torch.func take all pairs; the tree is exact beyond half the box too."""
    cell = LARGE_BOXES[box]
    q = torch.stack([liquid(cell, seed=seed) for seed in (0, 1)])

    def observable(q):
        return PAIR_OBSERVABLES[name](q, cell)

    found, known = observable(q), torch.func.vmap(observable)(q)
    assert found.shape == known.shape
    torch.testing.assert_close(found, known, rtol=1e-12, atol=1e-13)
    leaf = q.clone().requires_grad_()
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    (grad,) = torch.autograd.grad((observable(leaf) * weight).sum(), leaf)
    exact = torch.func.grad(lambda q: (observable(q) * weight).sum())(q)
    torch.testing.assert_close(grad, exact, rtol=1e-12, atol=1e-12 * float(exact.abs().max()))
    single = observable(q.float())
    assert single.dtype == torch.float32
    # Positions of size 20 have errors of 1e-6, a fiftieth of a thousandth of the widths.
    torch.testing.assert_close(single.double(), found, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("box", LARGE_BOXES)
def test_the_histogram_of_a_large_system_is_that_of_all_pairs(box):
    cell = LARGE_BOXES[box]
    q, edges = liquid(cell), torch.linspace(0.5, 3.4, 20)
    counts = torch.histogram(adjsim.pair_distances(q, cell), edges).hist
    volume = float(torch.linalg.det(torch.as_tensor(cell))) if box == "tilted" else math.prod(cell)
    shells = 4 / 3 * math.pi * (edges[1:] ** 3 - edges[:-1] ** 3)
    known = counts / (343 * 342 / 2) * volume / shells
    torch.testing.assert_close(
        adjsim.radial_distribution(q, edges, cell), known, rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("box", [SIDES, TILTED, None], ids=["sides", "tilted", "open"])
def test_angles_by_the_tree_are_those_of_all_triples(box):
    q = liquid(SIDES if box is None else box, side=3)[None]
    q = q if box is not None else 0.2 * q

    def observable(q):
        return adjsim.angular_distribution(
            q, torch.linspace(0.2, 3.0, 5), box, cutoff=1.8, width=0.1
        )

    torch.testing.assert_close(
        observable(q), torch.func.vmap(observable)(q), rtol=1e-12, atol=1e-12
    )
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(observable(leaf).square().sum(), leaf)
    exact = torch.func.grad(lambda q: observable(q).square().sum())(q)
    torch.testing.assert_close(grad, exact, rtol=1e-11, atol=1e-12 * float(exact.abs().max()))


class LargestTensor(TorchDispatchMode):
    """Record the number of entries of the largest tensor that is computed."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.entries = max([self.entries, *sizes])
        return result


def test_four_thousand_atoms_take_few_pairs():
    q, box = crystal(FCC, 10).requires_grad_(), [10.0] * 3
    with LargestTensor() as largest:
        order = adjsim.bond_order(q, 0.85, width=0.005, box=box)
        neighbours = adjsim.coordination_number(q, 0.85, width=0.005, box=box)
        smooth = adjsim.smooth_radial_distribution(
            q, torch.tensor([0.6, 0.7, 0.8]), box, width=0.02
        )
        angles = adjsim.angular_distribution(q, [1.0, 2.0], box, cutoff=0.85, width=0.05)
        adjsim.radial_distribution(q, [0.5, 0.9], box)
        torch.autograd.grad(order + neighbours + smooth.sum() + angles.sum(), q)
    # There are 264,000 triples, with vectors of three coordinates, and 16 million pairs.
    assert largest.entries <= 3 * 264_000
    assert float(order.detach()) == pytest.approx(0.574524, abs=1e-6)
    assert float(neighbours.detach()) == pytest.approx(12, rel=1e-8)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("angles", marks=pytest.mark.slow),
        pytest.param("bond order", marks=pytest.mark.slow),
        pytest.param("smooth radial distribution", marks=pytest.mark.marathon),
        pytest.param("coordination", marks=pytest.mark.marathon),
    ],
)
def test_compiled_averages_take_all_pairs(name):
    box = [4.2, 4.4, 4.6]
    q = liquid(box, side=3)
    observables = {
        **PAIR_OBSERVABLES,
        "smooth radial distribution": lambda q, box: adjsim.smooth_radial_distribution(
            q, [1.0, 1.5], box, width=0.1
        ),
        "angles": lambda q, box: adjsim.angular_distribution(
            q, [1.0, 2.0], box, cutoff=1.8, width=0.1
        ),
        "bond order": lambda q, box: adjsim.bond_order(q, 1.5, width=0.05, degree=2, box=box),
    }
    average = adjsim.TimeAverage(lambda state: observables[name](state.position, box))
    found = []
    for compiled in (False, True):
        leaf = q.clone().requires_grad_()
        dynamics = adjsim.Hamiltonian(adjsim.Harmonic(0.1))
        run = adjsim.simulate(
            dynamics,
            adjsim.PhaseState(leaf, torch.zeros_like(q)),
            [0.0, 0.02],
            solver=adjsim.VelocityVerlet(0.01),
            record=average,
            adjoint=adjsim.ReversibleAdjoint(),
            compile=compiled,
        )
        found.append((run.record.detach(), *torch.autograd.grad(run.record.sum(), leaf)))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda q: neighbour_pairs(q, SIDES, 2.5), "half the smallest"),
        (lambda q: neighbour_pairs(q, SIDES, 0.0), "radius must be positive"),
        (lambda q: neighbour_pairs(q, None, math.inf), "radius must be positive and finite"),
        (lambda q: neighbour_pairs(q[None], SIDES, 1.0), r"\(atoms, dim\), one system"),
        (lambda q: neighbour_pairs(q / 0, SIDES, 1.0), "NaN or infinite"),
        (lambda q: neighbour_pairs(q, SIDES[:2], 1.0), "box has 2 dimensions and position 3"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call(liquid(SIDES, side=2))
