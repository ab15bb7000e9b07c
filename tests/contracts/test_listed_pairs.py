"""Sums over the pairs of a list by torch operations, against all pairs."""

import pytest
import torch
from torch import nn

import adjsim
from adjsim.core import box as _box, derived as _derived, neighbour_list
from adjsim.core.box import checked_box
from adjsim.core.refusal import Refusal
from adjsim.core.rounding import UNROUNDED
from adjsim.potentials import PairPotential
from adjsim.potentials.pairs import base, dense, formula
from tests.contracts.test_pair_operator import KINDS, box_of, cell, gas
from tests.problems import parameter

# Sums in another order, relative to the largest result. Terms of pairs at 0.75 are a hundred times
# as large as the results in which they cancel.
CLOSE = 1e-11


@pytest.fixture(autouse=True)
def without_operator(monkeypatch):
    monkeypatch.setattr(_box, "LISTED", 0.0)
    _derived._known.clear()
    monkeypatch.setattr(_box, "LISTED_WITHOUT_BOX", 0)
    monkeypatch.setattr(base, "unsupported", lambda pair, position: Refusal("a test"))
    neighbour_list._builds.clear()


class Network(PairPotential):
    """A learnt pair energy, which is no formula of C++."""

    def __init__(self, box, cutoff=2.4):
        super().__init__(box=box, cutoff=cutoff)
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def pair_energy(self, s):
        return self.net(s.unsqueeze(-1)).squeeze(-1)


def lennard_jones(kind, **settings):
    return adjsim.LennardJones(
        parameter(1.1), parameter(0.9), cutoff=2.4, box=box_of(kind), skin=0.3, **settings
    )


def assert_equal_to_all_pairs(pair, position):
    """Energy, force, virial, gradients, and the product of the adjoint."""
    assert pair.path(position).startswith("neighbour list, by torch")
    parameters = list(pair.parameters())
    v = torch.randn(position.shape, generator=torch.Generator().manual_seed(1)).to(position)

    def results(energy, force, virial, vjp):
        q = position.detach().requires_grad_()
        outputs = [energy(q), force(q), virial(q)]
        value, pullback = vjp(q.detach())
        along, rest = pullback(v)
        rest = rest if isinstance(rest, list) else rest.gradient(parameters)
        grads = [
            torch.autograd.grad(x, [q, *parameters], torch.cos(x.detach()), allow_unused=True)
            for x in outputs
        ]
        second = torch.autograd.grad(
            (torch.autograd.grad(force(q), q, v, create_graph=True)[0] ** 2).sum(), q
        )
        return [*outputs, *(g for row in grads for g in row), value, along, *rest, *second]

    listed = results(pair, pair.force, pair.virial, lambda q: pair.force_vjp(q, parameters))
    every = results(
        lambda q: dense.energy(pair, q),
        lambda q: dense.force(pair, q),
        lambda q: dense.virial(pair, q),
        lambda q: dense.force_vjp(pair, q, (), UNROUNDED),
    )
    for x, y in zip(listed, every, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            scale = max(1.0, float(y.detach().abs().max()))
            torch.testing.assert_close(x, y, rtol=0, atol=CLOSE * scale)


@pytest.mark.parametrize("kind", ["cube", "tilted", "slab", "just large enough"])
def test_boxes(kind):
    assert_equal_to_all_pairs(lennard_jones(kind), gas(cell(kind), 60, seed=2))


@pytest.mark.parametrize("name", sorted(KINDS))
def test_formulas_and_their_parameters(name):
    pair = KINDS[name](box_of("cube"))
    assert_equal_to_all_pairs(pair, gas(cell("cube"), 60, seed=4, replicas=2))


def test_without_a_box():
    pair = adjsim.LennardJones(parameter(1.1), parameter(0.9), cutoff=2.4)
    assert_equal_to_all_pairs(pair, gas(cell("cube"), 60, seed=4))


def test_a_network():
    torch.manual_seed(3)
    assert_equal_to_all_pairs(Network(box_of("cube")), gas(cell("cube"), 60, seed=2))


class Centred(PairPotential):
    """Depends on all distances."""

    def pair_energy(self, s):
        return (s - s.mean()) ** 2


class Tabled(PairPotential):
    """Reads a table of pairs of atoms by itself."""

    table = torch.linspace(0.5, 1.5, 3600, dtype=torch.float64).reshape(60, 60)

    def pair_energy(self, s):
        return (self.table + self.table.T) * s


@pytest.mark.parametrize("kind", [Centred, Tabled])
def test_formulas_that_cannot_take_a_list(kind):
    pair, q = kind(cutoff=2.4, box=box_of("cube")), gas(cell("cube"), 60, seed=2)
    assert pair.path(q).startswith("all pairs, by torch")
    assert torch.equal(pair.force(q), dense.force(pair, q))


class Smallest(PairPotential):
    """Depends on the smallest distance."""

    def pair_energy(self, s):
        return s - torch.sort(s.flatten()).values[0]


class Polynomial(PairPotential):
    """Has coefficients, which are numbers of nothing."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.coefficients = nn.Parameter(torch.linspace(0.5, 1.0, 16, dtype=torch.float64))

    def pair_energy(self, s):
        return sum(c * s**k for k, c in enumerate(self.coefficients))


class Masked(PairPotential):
    """Has a table of the pairs that interact."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.register_buffer("mask", ~torch.eye(60, dtype=torch.bool).roll(1, 0))

    def pair_energy(self, s):
        return s * self.pair_parameter("mask", s)


@pytest.mark.parametrize("kind", [Smallest, Polynomial, Masked])
def test_formulas_that_need_all_pairs(kind):
    pair, q = kind(cutoff=2.4, box=box_of("cube")), gas(cell("cube"), 60, seed=2)
    assert pair.path(q).startswith("all pairs, by torch")
    assert torch.equal(pair(q), dense.energy(pair, q))


class Constant(PairPotential):
    """Has one energy for all pairs."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.depth = nn.Linear(1, 1).double()

    def pair_energy(self, s):
        return -(self.depth.bias[0] ** 2)

    def truncated_energy(self, s):
        return self.pair_energy(s)


def test_a_formula_that_is_one_number():
    pair, q = Constant(cutoff=2.4), gas(cell("cube"), 60, seed=2, spread=0.0)
    assert pair.path(q).startswith("neighbour list")
    torch.testing.assert_close(pair(q), dense.energy(pair, q), rtol=1e-13, atol=0)


def test_a_list_of_inference_mode_serves_gradients():
    pair, q = lennard_jones("cube"), gas(cell("cube"), 60, seed=2)
    with torch.inference_mode():
        pair(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(pair(leaf), leaf)[0], -pair.force(q), rtol=CLOSE, atol=CLOSE
    )


def test_positions_at_the_faces_of_the_box():
    """A coordinate just below a multiple of the length wraps to just below zero."""
    pair = adjsim.LennardJones(cutoff=2.4, box=[6.3] * 3)
    q = gas(torch.eye(3, dtype=torch.float64) * 6.3, 60, seed=2)
    q[5, 1] = 31.499999999999996
    torch.testing.assert_close(pair.force(q), dense.force(pair, q), rtol=CLOSE, atol=CLOSE)


def test_lists_of_a_run_replace_each_other():
    pair, start = lennard_jones("cube"), gas(cell("cube"), 60, seed=2)
    step = torch.ones_like(start)
    for k in range(100):
        pair.force(start + 0.05 * k * step)
    assert len(neighbour_list._builds) == 1


@pytest.mark.slow
def test_results_are_a_function_of_the_position():
    pair = lennard_jones("cube")
    start = gas(cell("cube"), 60, seed=2)
    step = torch.randn(start.shape, generator=torch.Generator().manual_seed(0)).double()
    builds = set()
    with torch.no_grad():
        for k in range(60):
            q = start + 0.005 * k * step
            along = pair(q), pair.force(q), pair.force_vjp(q, [])[1](step)[0]
            builds.add(neighbour_list._builds[0].position[0, 0].item())
            kept = list(neighbour_list._builds)
            neighbour_list._builds.clear()
            fresh = pair(q), pair.force(q), pair.force_vjp(q, [])[1](step)[0]
            for x, y in zip(along, fresh, strict=True):
                assert torch.equal(x, y)
            neighbour_list._builds.clear()
            neighbour_list._builds.extend(kept)
    assert 5 < len(builds) < 50


@pytest.mark.slow
def test_an_exact_run_is_retraced():
    pair = lennard_jones("cube")
    dynamics = adjsim.Hamiltonian(pair)
    q = gas(cell("cube"), 40, seed=2, spread=0.0)
    p = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).double()

    def gradient():
        start = q.clone().requires_grad_()
        run = adjsim.simulate(
            dynamics, dynamics.init(start, p), [0.0, 0.4],
            solver=adjsim.Splitting("BAB", 0.002, exact=True), adjoint=adjsim.ReversibleAdjoint(),
        )  # fmt: skip
        grads = torch.autograd.grad(run.final.position.square().sum(), [start, *pair.parameters()])
        assert run.stats["reconstruction_error"] == 0
        return run.final.position.detach(), grads

    end, listed = gradient()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_box, "LISTED", 1e9)
        _derived._known.clear()
        other, every = gradient()
    # Sums of lattice multiples are exact in any order.
    assert torch.equal(end, other)
    for x, y in zip(listed, every, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_systems_that_are_not_finite():
    pair = lennard_jones("cube")
    q = gas(cell("cube"), 60, seed=2, replicas=3)
    expected = pair.force(q)
    q[1, 3, 0] = torch.nan
    found = pair.force(q)
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(pair(leaf).sum(), leaf)
    assert torch.isnan(grad).flatten(1).all(1).tolist() == [False, True, False]
    along, rest = pair.force_vjp(q, list(pair.parameters()))[1](torch.ones_like(q))
    assert torch.isnan(along).flatten(1).all(1).tolist() == [False, True, False]
    assert all(bool(torch.isnan(x)) for x in rest)
    assert bool(torch.isnan(found[1]).all())
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(torch.isnan(pair(q)), torch.tensor([False, True, False]))


def test_virial_of_a_potential_with_an_operator(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(_box, "LISTED", 0.0)
    _derived._known.clear()
    pair = lennard_jones("tilted")
    q = gas(cell("tilted"), 60, seed=2)
    assert pair.path(q) == "neighbour list"
    torch.testing.assert_close(pair.virial(q), dense.virial(pair, q), rtol=CLOSE, atol=CLOSE * 100)


@pytest.mark.parametrize("kind", [None, "cube", "slab", "tilted"])
def test_cells_find_the_pairs_of_the_tree(kind):
    """Those that a GPU builds: in all systems but one that is not finite."""
    box = None if kind is None else checked_box(box_of(kind), None)
    q, atoms = gas(cell(kind or "cube"), 40, seed=2, replicas=3), 40
    allowed = torch.tensor([True, False, True])
    exclusions = torch.tensor([[3, 1], [0, 7], [12, 13]])
    lists = [
        (neighbour_list.NearestImages, reach, excluded)
        for reach, excluded in ((0.9, None), (2.4, exclusions), (9.0, exclusions))
    ]
    lists = [(*x, split) for x in lists for split in (None, 13)]
    for made, reach, excluded, split in [*lists, (neighbour_list.AllImages, 5.2, None, None)]:
        near = made(reach, 0.0, box, excluded, split)
        found = near._search_on_device(q, reach, allowed)
        rows = [(k, near._search(q[k], reach)) for k in (0, 2)]
        moved = [(i + k * atoms, j + k * atoms, *shift) for k, (i, j, *shift) in rows]
        for x, *parts in zip(found, *moved, strict=True):
            assert torch.equal(x, torch.cat(parts))


def test_cells_of_atoms_in_little_of_their_space():
    """Atoms on a line, and two that are far from all others."""
    line = torch.arange(30.0, dtype=torch.float64)[:, None] * torch.tensor([0.0, 1.0, 0.0])
    q = torch.cat([line, torch.tensor([[1e9, 0.0, 0.0], [1e9, 0.0, 0.5]])])
    near = neighbour_list.NearestImages(1.5, 0.0)
    found = near._search_on_device(q[None], 1.5, torch.tensor([True]))
    for x, y in zip(found, near._search(q, 1.5), strict=True):
        assert torch.equal(x, y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", sorted(KINDS))
def test_on_a_gpu(name, monkeypatch):
    monkeypatch.setattr(formula, "LISTED_ON_GPU", 0)
    pair, q = KINDS[name](box_of("cube")), gas(cell("cube"), 60, seed=4, replicas=2)
    expected = dense.force(pair, q)
    pair, q = pair.cuda(), q.cuda()
    assert pair.path(q).startswith("neighbour list, by torch")
    found = pair.force(q)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-10, atol=1e-10)
