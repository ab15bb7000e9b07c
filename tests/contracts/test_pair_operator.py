"""The pair operator against torch's operations over all pairs, with a list and without."""

from __future__ import annotations

import contextlib
import math
import types
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import register_parametrization

import adjsim
from adjsim.adjoints.loops import runner
from adjsim.compiler import CompilerError
from adjsim.core import box as _box, derived as _derived
from adjsim.core.declared import declared
from adjsim.core.rows import vmap_rows
from adjsim.core.strain import Strain
from adjsim.potentials import ForceShifted, LennardJonesMixture, PairPotential, Switched
from adjsim.potentials.pairs import dense, operator as pair_operator
from adjsim.potentials.pairs.kernels import PAIR_OPERATORS, cpu, kernel as kernels
from tests.problems import lists_built, parameter, slow_but

LISTED, DENSE = 0.0, 1e9
# Sums of up to a few hundred contributions, in another order than torch's.
CLOSE = 1e-12


@pytest.fixture
def listed(monkeypatch):
    """Choose between a neighbour list and all pairs, whatever the size of the system."""

    def choose(limit):
        monkeypatch.setattr(_box, "LISTED", limit)
        monkeypatch.setattr(_box, "LISTED_WITHOUT_BOX", limit)
        _derived._known.clear()

    choose(LISTED)
    return choose


def cell(kind: str, scale: float = 1.0):
    """A box, as rows."""
    rows = {
        "cube": torch.diag(torch.tensor([6.0, 6.0, 6.0])),
        "just large enough": torch.diag(torch.tensor([5.0, 5.0, 5.0])),
        "slab": torch.diag(torch.tensor([5.0, 21.0, 6.0])),
        "tilted": torch.tensor([[6.4, 0.0, 0.0], [2.1, 6.6, 0.0], [-1.7, 1.2, 6.9]]),
    }[kind]
    return rows.double() * scale


def gas(rows, atoms: int, seed: int, spread: float = 1.0, replicas: int | None = None):
    """Random positions no closer than 0.75, some of them outside of the cell."""
    generator = torch.Generator().manual_seed(seed)
    systems = []
    for _ in range(replicas or 1):
        placed = torch.empty(0, 3, dtype=torch.float64)
        while len(placed) < atoms:
            q = torch.rand(3, generator=generator, dtype=torch.float64) @ rows
            d = placed - q
            d = d - (d @ torch.linalg.inv(rows)).round() @ rows
            if not len(placed) or float(d.norm(dim=1).min()) > 0.75:
                placed = torch.cat([placed, q[None]])
        turns = torch.randint(-1, 2, (atoms, 3), generator=generator).double()
        systems.append(placed + spread * (turns @ rows))
    return systems[0] if replicas is None else torch.stack(systems)


def box_of(kind: str):
    rows = cell(kind)
    return rows if kind == "tilted" else rows.diagonal().clone()


def both(pair, position, function):
    """Evaluate with the operator, and with torch's operations."""
    assert "torch" not in pair.path(position)
    return function(pair, pair.force), function(
        lambda q: dense.energy(pair, q), lambda q: dense.force(pair, q)
    )


def assert_equal_to_torch(pair, position, tolerance=CLOSE):
    """Energy, force, product and gradients, to a tolerance relative to the largest."""
    v = torch.randn(position.shape, generator=torch.Generator().manual_seed(1)).to(position)
    weight = torch.linspace(0.5, 1.5, max(1, position[..., 0, 0].numel())).to(position)
    weight = weight.reshape(position.shape[:-2])
    inputs = list(pair.parameters())

    def results(energy_of, force_of):
        q = position.detach().requires_grad_()
        energy, force = energy_of(q), force_of(q)
        return [
            energy,
            force,
            *torch.autograd.grad(energy, [q, *inputs], weight, allow_unused=True),
            *torch.autograd.grad(force, [q, *inputs], v, allow_unused=True),
        ]

    for x, y in zip(*both(pair, position, results), strict=True):
        if y is None:
            assert x is None or not bool(x.any())
            continue
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * float(y.detach().abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("tilted", LISTED),
        *(
            pytest.param(kind, limit, marks=pytest.mark.slow)
            for kind in ("cube", "just large enough", "slab", "tilted")
            for limit in (LISTED, DENSE)
            if limit == DENSE or kind != "tilted"
        ),
    ],
)
def test_the_operator_equals_torch(listed, kind, limit):
    listed(limit)
    pair = adjsim.LennardJones(
        parameter(1.1), parameter(0.9), cutoff=2.4, box=box_of(kind), skin=0.3
    )
    assert_equal_to_torch(pair, gas(cell(kind), 70, seed=2))


@pytest.mark.parametrize("limit", [LISTED, DENSE], ids=["list", "all pairs"])
def test_systems_of_a_batch_have_lists_of_their_own(listed, limit):
    listed(limit)
    pair = adjsim.LennardJones(parameter(1.1), parameter(0.9), cutoff=2.4, box=box_of("cube"))
    position = gas(cell("cube"), 45, seed=3, replicas=6)
    assert_equal_to_torch(pair, position)
    assert_equal_to_torch(pair, position.reshape(2, 3, 45, 3))
    assert_equal_to_torch(pair, position.transpose(-1, -2).contiguous().transpose(-1, -2))
    alone = torch.stack([pair.force(x) for x in position])
    assert torch.equal(alone, pair.force(position))


class Powers(PairPotential):
    """A potential of a user, with an energy alone and numbers of its own."""

    def __init__(self, **box):
        super().__init__(**box)
        self.a, self.b = parameter(1.3), parameter(0.4)

    def pair_energy(self, s):
        return self.a * torch.exp(-self.b * s) + 0.1 * self.b * s.sqrt().clamp(max=2.0) ** 2.5


def symmetric(atoms: int) -> nn.Parameter:
    """A number for each pair of atoms."""
    steps = torch.arange(atoms, dtype=torch.float64) / atoms
    return nn.Parameter(1 + 0.2 * torch.sin(steps[:, None] + steps))


def charges(atoms: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, atoms, dtype=torch.float64) ** 3)


SPECIES = [0, 1, 2] * 20
KINDS = {
    "switched": lambda box: adjsim.LennardJones(
        parameter(1.1), parameter(0.9), cutoff=2.4, box=box, truncation=Switched(2.0)
    ),
    "force shifted": lambda box: adjsim.Morse(
        parameter(1.1), parameter(1.7), parameter(1.1), cutoff=2.4, box=box,
        truncation=ForceShifted(),
    ),
    "table of species": lambda box: LennardJonesMixture(
        SPECIES,
        nn.Parameter(torch.tensor([1.0, 0.7, 0.4], dtype=torch.float64)),
        nn.Parameter(torch.tensor([0.8, 0.9, 1.0], dtype=torch.float64)),
        cutoff=2.4,
        box=box,
    ),
    "number of every pair": lambda box: adjsim.LennardJones(
        symmetric(60), parameter(0.9), cutoff=2.4, box=box
    ),
    "charges": lambda box: adjsim.Coulomb(
        charges(60), cutoff=2.4, box=box, truncation=ForceShifted()
    ),
    "of a user": lambda box: Powers(cutoff=2.4, box=box),
}  # fmt: skip
OTHERS = KINDS.keys() - {"switched", "table of species", "charges"}


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("switched", LISTED),
        ("table of species", LISTED),
        pytest.param("charges", LISTED, marks=pytest.mark.slow),
        # The neighbour list and the printed formula are separate parts of the operator.
        *(
            pytest.param(name, limit, marks=getattr(pytest.mark, mark))
            for name in KINDS
            for limit, mark in ((LISTED, "slow"), (DENSE, "marathon" if name in OTHERS else "slow"))
            if limit == DENSE or name in OTHERS
        ),
    ],
)
def test_formulas_and_their_parameters(listed, name, limit):
    listed(limit)
    pair = KINDS[name](box_of("cube"))
    assert_equal_to_torch(pair, gas(cell("cube"), 60, seed=4))
    batch = gas(cell("cube"), 60, seed=5, replicas=2)
    assert_equal_to_torch(pair, batch)


@pytest.mark.slow
def test_float32(listed):
    pair = adjsim.LennardJones(parameter(1.1), 0.9, cutoff=2.4, box=box_of("cube"))
    q = gas(cell("cube"), 60, seed=4, spread=0.0)
    found = pair.force(q.float())
    assert found.dtype == torch.float32
    (grad,) = torch.autograd.grad(found.square().sum(), [pair.epsilon])
    assert grad.dtype == torch.float64
    assert float(grad) == pytest.approx(2 / 1.1 * float(found.detach().square().sum()), rel=1e-5)
    # Differences of positions of size 6 are rounded to 5e-7, and the force is as steep as 1e3.
    torch.testing.assert_close(
        found.double(), pair.force(q), rtol=0, atol=1e-4 * float(pair.force(q).abs().max())
    )


@pytest.mark.slow
@pytest.mark.parametrize("dim", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fewer_dimensions(listed, dim):
    box = torch.tensor([40.0, 11.0][:dim], dtype=torch.float64)
    # Places at least 0.3 apart, so that no pair dominates the others.
    places = torch.cartesian_prod(*[torch.arange(0.0, float(x), 0.66) for x in box]).reshape(
        -1, dim
    )
    shifts = torch.rand(places.shape, generator=torch.Generator().manual_seed(0)).double()
    q = places[:60] + 0.36 * shifts[:60] + 3 * box * (torch.arange(len(places[:60])) % 2)[:, None]
    pair = adjsim.SoftSphere(parameter(1.0), parameter(0.7), 4.0, cutoff=2.4, box=box)
    assert_equal_to_torch(pair, q)


@pytest.mark.slow
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    tilt=st.tuples(*[st.floats(-3, 3)] * 3),
    sides=st.tuples(*[st.floats(3, 12)] * 3),
    share=st.floats(0.2, 1.0),
    skin=st.sampled_from([0.0, 0.05, 0.4, 1.5]),
    tilted=st.booleans(),
)
def test_any_box_cutoff_and_skin(listed, seed, tilt, sides, share, skin, tilted):
    rows = torch.diag(torch.tensor(sides, dtype=torch.float64))
    if tilted:
        rows[1, 0], rows[2, 0], rows[2, 1] = tilt
    box = rows if tilted else rows.diagonal().clone()
    # The box is reduced, so its width is at least that of the rows.
    width = float((1 / torch.linalg.inv(rows).norm(dim=0)).min())
    cutoff = share * width / 2
    generator = torch.Generator().manual_seed(seed)
    q = (3 * torch.rand(25, 3, generator=generator, dtype=torch.float64) - 1) @ rows
    pair = adjsim.GaussianCore(1.0, 1.0, cutoff=cutoff, box=box, skin=skin)
    moved = q + 0.2 * torch.randn(25, 3, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        for position in (q, moved, q + 1e-3, moved):
            listed(LISTED)
            found = pair.force(position)
            listed(DENSE)
            assert torch.equal(found, pair.force(position))
            exact = dense.force(pair, position)
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("far", [1e5, pytest.param(1e9, marks=pytest.mark.slow), 1e30])
@pytest.mark.parametrize("unit", [1.0, 1e-10])
def test_a_cluster_and_an_atom_far_away(listed, far, unit):
    """Cells as wide as the system hold the cluster, and single precision would lose its pairs."""
    q = gas(cell("cube"), 70, seed=8)
    q[7, 0], q[40, 0] = far, -far
    pair = adjsim.LennardJones(parameter(1.1), parameter(0.9 * unit), cutoff=2.4 * unit)
    assert pair.path(q * unit) == "neighbour list"
    assert_equal_to_torch(pair, q * unit)


@pytest.mark.parametrize("far", [1e17, 1e300])
def test_a_diverged_atom_of_a_tilted_box_takes_no_cells(listed, far):
    q = gas(cell("tilted"), 70, seed=8)
    q[3, 1] = far
    pair = adjsim.LennardJones(cutoff=2.4, box=box_of("tilted"))
    assert pair.force(q).shape == q.shape


def test_bits_do_not_depend_on_the_list(listed):
    """Whatever is in the list beyond the cutoff, and whichever list was there before."""
    pairs = [
        adjsim.LennardJones(1.1, 0.9, cutoff=2.4, box=box_of("cube"), skin=skin)
        for skin in (0.0, 0.1, 0.6)
    ]
    position = gas(cell("cube"), 70, seed=6)
    generator = torch.Generator().manual_seed(0)
    before = lists_built()
    for _ in range(40):
        position = position + 0.02 * torch.randn(70, 3, generator=generator, dtype=torch.float64)
        listed(DENSE)
        energy, force = pairs[0](position), pairs[0].force(position)
        listed(LISTED)
        for pair in pairs:
            assert torch.equal(pair(position), energy)
            assert torch.equal(pair.force(position), force)
    # 40 for the first, and at least ten for the second, whose skin is five displacements.
    assert lists_built() - before > 50


def test_two_systems_of_one_size_alternate(listed):
    """Neither uses the list of the other, and neither makes the other build again."""
    pair = adjsim.LennardJones(1.1, 0.9, cutoff=2.4, box=box_of("cube"))
    systems = [gas(cell("cube"), 70, seed=seed) for seed in (7, 8, 9)]
    for q in systems:
        pair.force(q)
    before = lists_built()
    for _ in range(5):
        for q in systems:
            torch.testing.assert_close(pair.force(q), dense.force(pair, q), rtol=1e-10, atol=1e-10)
    assert lists_built() == before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("number", marks=pytest.mark.slow),
        "table of species",
        pytest.param("charges", marks=pytest.mark.marathon),
    ],
)
def test_threads_and_lists_do_not_change_bits(listed, name):
    """Nor those of gradients, also where all systems of a batch share the rows of a table."""
    make = {"number": lambda box: adjsim.LennardJones(parameter(1.1), 0.9, cutoff=2.4, box=box)}
    pair = (make | KINDS)[name](box_of("cube"))
    # In the second half of the systems atoms have other places in the list.
    position = gas(cell("cube"), 60, seed=6, replicas=40)
    position[20:] += 3.0
    v = torch.randn(position.shape, generator=torch.Generator().manual_seed(0)).double()
    found, threads = [], torch.get_num_threads()
    try:
        for limit in (LISTED, DENSE):
            for count in (1, 2, 2, 2):
                listed(limit)
                torch.set_num_threads(count)
                assert kernels.thread_count(10**6) == count
                force = pair.force(position)
                found.append([force, *torch.autograd.grad(force, list(pair.parameters()), v)])
    finally:
        torch.set_num_threads(threads)
    for results in found[1:]:
        for x, y in zip(results, found[0], strict=True):
            assert torch.equal(x, y)


RUNS = [
    (adjsim.DirectAdjoint(), False),
    (adjsim.CheckpointAdjoint(), False),
    (adjsim.ReversibleAdjoint(), False),
    (adjsim.ReversibleAdjoint(), True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "exact", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "exact"]
)
def test_every_adjoint_with_a_list(listed, exact):
    """Runs with at least ten builds, with a list and without: the same path and gradients."""
    box = box_of("cube")
    position = gas(cell("cube"), 64, seed=10, spread=0.0)
    found = {}
    for limit in (LISTED, DENSE):
        listed(limit)
        pair = adjsim.LennardJones(parameter(0.5), parameter(0.8), cutoff=2.4, box=box, skin=0.025)
        dynamics = adjsim.Langevin(pair, kT=1.5, friction=0.2)
        start = dynamics.init(position, generator=torch.Generator().manual_seed(0))
        before = lists_built()
        for adjoint, compile in RUNS if limit == LISTED else RUNS[:1]:
            run = adjsim.simulate(
                dynamics, start, [0.0, 0.15], solver=adjsim.Splitting("BAOAB", 0.002, exact=exact),
                adjoint=adjoint, compile=compile, generator=3,
            )  # fmt: skip
            value = (run.final.position * run.final.momentum).sum()
            grads = torch.autograd.grad(value, list(dynamics.parameters()))
            found[limit, type(adjoint).__name__, compile] = (run.final, grads)
        if limit == LISTED:
            assert lists_built() - before >= 40
    first, _ = found[DENSE, "DirectAdjoint", False]
    _, gradients = found[DENSE, "DirectAdjoint", False]
    for (_, _, compile), (final, grads) in found.items():
        same_bits = exact or not compile
        for x, y in zip(final, first, strict=True):
            if same_bits:
                assert torch.equal(x, y)
            else:
                torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
        for x, y in zip(grads, gradients, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


def test_a_compiled_step_takes_force_and_product_in_one_pass(listed, monkeypatch):
    forces, products = [], []

    def counted(graph):
        PAIR_OPERATORS.merge(graph)
        modes = [
            kernels.KERNELS[node.args[-1]].spec.mode
            for node in graph.graph.nodes
            if node.target is torch.ops.adjsim.pairs.default
        ]
        if kernels.PRODUCT in modes:
            forces.append(modes.count(kernels.FORCE))
            products.append(modes.count(kernels.PRODUCT))

    monkeypatch.setattr(runner, "PAIR_OPERATORS", replace(PAIR_OPERATORS, merge=counted))
    pair = adjsim.LennardJones(parameter(0.5), parameter(0.8), cutoff=2.4, box=box_of("cube"))
    dynamics = adjsim.Hamiltonian(pair)
    position = gas(cell("cube"), 64, seed=10, spread=0.0)
    start = dynamics.init(position, torch.zeros_like(position))
    run = adjsim.simulate(
        dynamics, start, [0.0, 0.02], solver=adjsim.VelocityVerlet(0.002),
        adjoint=adjsim.ReversibleAdjoint(), compile=True,
    )  # fmt: skip
    run.final.position.square().sum().backward()
    assert run.stats["compiled_forward"] == run.stats["compiled_backward"] == "C++"
    # The forces at the two ends of a step, and their products.
    assert max(products) == 1
    assert not any(forces)
    assert run.stats["pairs"] == {"LennardJones": "neighbour list"}


def tabulated(box):
    spline = adjsim.potentials.ContinuousFunction(
        nn.Parameter(torch.linspace(-1, 1, 11, dtype=torch.float64) ** 3), 0.3, 2.9
    )
    numbers = {"k": parameter(1.3), "q": charges(60)}
    return adjsim.potentials.CustomPairs(
        "f(r) + k*q1*q2/r", numbers, tables={"f": spline}, cutoff=2.4, box=box
    )


SEVERAL = {
    "list": (
        lambda box: adjsim.LennardJones(parameter(1.1), parameter(0.9), cutoff=2.4, box=box),
        LISTED, None,
    ),
    "functions and charges, list": (tabulated, LISTED, None),
    "tables, all pairs, strained": (KINDS["table of species"], DENSE, 1),
    "all pairs, whole strain": (
        lambda box: adjsim.LennardJones(1.1, 0.9, cutoff=2.4, box=torch.diag(box)), DENSE, 3,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(lambda name: name == "list", SEVERAL))
def test_one_pass_over_pairs_takes_all_rows_of_cotangents(listed, monkeypatch, name):
    make, limit, width = SEVERAL[name]
    listed(limit)
    pair, q = make(box_of("cube")), gas(cell("cube"), 60, seed=4, replicas=2)
    generator, passes = torch.Generator().manual_seed(6), []
    strain = None
    # More rows than vectors have lanes, and a vector that is not full.
    rows = [torch.randn(11, *q.shape, generator=generator, dtype=torch.float64)]
    if width is not None:
        value = 0.01 * torch.randn(2, 1, width, generator=generator, dtype=torch.float64)
        strain = Strain.of(pair.box, value)
        rows.append(torch.randn(11, *value.shape, generator=generator, dtype=torch.float64))
    form = pair_operator.form_of(pair, q)
    operator = pair_operator.PairOperator.of(pair, form, q, strain)

    def product(v, *c):
        stretch = None if strain is None else strain.matrix(c[0], 3)
        return tuple(operator.evaluate(kernels.PRODUCT, q, vector=v, stretch=stretch))

    expected = [torch.stack(x) for x in zip(*map(product, *rows), strict=True)]
    computed = cpu.CppKernel.computed
    monkeypatch.setattr(
        cpu.CppKernel, "computed", lambda *given: passes.append(1) or computed(*given)
    )
    found = vmap_rows(product, rows)
    assert len(passes) == 1
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.expand_as(y), y, rtol=0, atol=1e-14 * float(y.abs().max()))


def test_derivatives_of_second_order(listed):
    pair = adjsim.LennardJones(parameter(0.5), parameter(0.8), cutoff=2.4, box=box_of("cube"))
    q = gas(cell("cube"), 40, seed=11, spread=0.0).requires_grad_()
    inputs = [q, *pair.parameters()]

    def second(energy_of, force_of):
        force = force_of(q)
        first = torch.autograd.grad(force.square().sum(), inputs, create_graph=True)
        found = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
        energy = torch.autograd.grad(energy_of(q), inputs, create_graph=True)
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in energy), inputs)]

    for x, y in zip(*both(pair, q, second), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("limit", [LISTED, DENSE], ids=["list", "all pairs"])
def test_positions_that_are_not_finite_are_not_hidden(listed, limit):
    listed(limit)
    pair = adjsim.LennardJones(parameter(1.1), parameter(0.9), cutoff=2.4, box=box_of("cube"))
    q = gas(cell("cube"), 40, seed=11)
    for bad in (math.nan, math.inf):
        broken = q.clone()
        broken[7, 1] = bad
        assert bool(pair.force(broken)[7].isnan().any())
    at_one_place = q.clone()
    at_one_place[7] = at_one_place[12]
    force = pair.force(at_one_place)
    assert not bool(torch.isfinite(force[7]).all())
    assert not bool(torch.isfinite(force[12]).all())
    # A list with a broken position is not kept for the next one.
    torch.testing.assert_close(pair.force(q), dense.force(pair, q))


class Summed(PairPotential):
    """Not elementwise: a pair depends on all pairs."""

    def pair_energy(self, s):
        return s / s.sum()


class Captured(PairPotential):
    """Reads numbers that are no parameter of a pair."""

    def __init__(self, **box):
        super().__init__(**box)
        self.coefficients = parameter(1.0)
        self.powers = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def pair_energy(self, s):
        return self.coefficients * torch.exp(-s * self.powers[0]) + torch.exp(-s * self.powers[1])


class Branching(PairPotential):
    """Its formula depends on values."""

    def pair_energy(self, s):
        return s if float(s.max()) > 1 else -s


@pytest.mark.parametrize("kind", [Summed, Captured, Branching])
def test_formulas_without_an_operator_take_torch(kind):
    pair = kind(cutoff=2.4, box=box_of("cube"))
    q = gas(cell("cube"), 12, seed=11).requires_grad_()
    assert pair.path(q).startswith("all pairs, by torch: ")
    force = pair.force(q)
    assert torch.equal(force, dense.force(pair, q))
    torch.autograd.grad(force.sum(), q)


@pytest.mark.slow
def test_a_changed_number_makes_another_kernel():
    pair = adjsim.SoftSphere(1.0, 1.0, 4.0)
    q = torch.tensor([[0.0, 0.0], [1.3, 0.0]], dtype=torch.float64)
    for exponent in (4.0, 6.0):
        pair.exponent = exponent
        assert float(pair(q)) == pytest.approx(1.3**-exponent, rel=1e-14)


class Rule(PairPotential):
    """A potential whose formula is a function of itself and of the squared distance."""

    def __init__(self, rule, **options):
        super().__init__(**options)
        self.rule, self.a, self.b = rule, parameter(1.3), parameter(0.7)

    def pair_energy(self, s):
        return self.rule(self, s)


RULES = {
    "a bond": lambda p, s: 0.5 * p.a * (s.sqrt() - p.b) ** 2,
    "length of the row": lambda p, s: p.a * s / (s.shape[-1] if s.ndim else 12),
    "number of axes": lambda p, s: s * (p.a if s.ndim > 1 else p.b),
    "size of a number": lambda p, s: s * (p.a if p.a.numel() == 1 else 2 * p.a),
    "axes of a number": lambda p, s: s * (p.a if p.a.ndim == 0 else 2 * p.a),
    "ordered conditions": lambda p, s: torch.where((s > 1) < (s < 4), p.a * s, 2 * s),
    "conditions": lambda p, s: torch.where((s > 1) & ~(s > 4) | (s == 0), p.a * s, 2 * s),
    "subtraction with a factor": lambda p, s: torch.rsub(p.a * s, 3.0, alpha=2),
    "clamped": lambda p, s: (p.a * s).clamp(0.5, 3.0) * s,
    "clamped by a parameter": lambda p, s: torch.minimum(s, p.a) * s,
    "signs": lambda p, s: torch.sign(s - p.a) * (s - p.a) ** 3 + (s - 2).abs() ** 3,
    "powers": lambda p, s: p.a * s**0 + s**-2 + s**1.7 + s**3 + (1 + s) ** p.b,
    "functions": lambda p, s: torch.erfc(p.a * s) + torch.tanh(s) * torch.log1p(p.b * s),
    "functions of two": lambda p, s: torch.hypot(s, p.a) + p.b * torch.fmod(s, 1.5),
}


@pytest.mark.parametrize(
    "name",
    [
        name if k % 3 == 0 else pytest.param(name, marks=pytest.mark.slow)
        for k, name in enumerate(RULES)
    ],
)
def test_rules(name):
    """Any formula gives the numbers of torch, by the operator or without it."""
    pair = Rule(RULES[name], cutoff=2.9, box=box_of("cube"))
    q = gas(cell("cube"), 12, seed=12, spread=0.0)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).double()

    def results(energy, force):
        x = q.clone().requires_grad_()
        value, f = energy(x), force(x)
        inputs = [x, pair.a, pair.b]
        first = torch.autograd.grad(value, inputs, allow_unused=True)
        return [value, f, *first, *torch.autograd.grad(f, inputs, v, allow_unused=True)]

    found = results(pair, pair.force)
    expected = results(lambda x: dense.energy(pair, x), lambda x: dense.force(pair, x))
    for x, y in zip(found, expected, strict=True):
        if y is None:
            assert x is None or not bool(x.any())
        else:
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["conditions", "functions of two"])
def test_what_loops_print_has_an_operator(name):
    """Both read one table, and the functions of vectors are those of numbers."""
    pair = Rule(RULES[name], cutoff=2.9, box=box_of("cube"))
    assert "by torch" not in pair.path(gas(cell("cube"), 12, seed=12))


# Everything that a force depends on is that of the forward evaluation.


def triple():
    return torch.tensor([[0.0, 0, 0], [1.3, 0.2, 0], [3.6, 0.1, 0.3]], dtype=torch.float64)


def test_a_box_that_requires_grad_is_differentiated():
    pair = adjsim.LennardJones(cutoff=2.4, box=[5.0] * 3)
    shares = torch.tensor([[0.05, 0, 0], [0.95, 0, 0]], dtype=torch.float64)

    def energy(x):
        box = torch.stack([x, x.detach(), x.detach()])
        return torch.func.functional_call(pair, {"box": box}, (shares * box,))

    x = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(energy(x), x)
    step = (energy(x + 1e-4) - energy(x - 1e-4)) / 2e-4
    assert float(slope) == pytest.approx(float(step.detach()), rel=1e-6)


def test_the_backward_has_the_box_of_the_forward():
    box = torch.full((3,), 5.0, dtype=torch.float64)
    pair = adjsim.LennardJones(cutoff=2.4, box=box)
    q = triple().requires_grad_()
    (expected,) = torch.autograd.grad(pair.force(q).square().sum(), q)
    force = pair.force(q)
    pair.box = 2 * box
    assert torch.equal(torch.autograd.grad(force.square().sum(), q)[0], expected)
    called = torch.func.functional_call(pair, {"box": box}, (q,))
    torch.testing.assert_close(
        torch.autograd.grad(called, q)[0],
        -adjsim.LennardJones(cutoff=2.4, box=box).force(q),
        rtol=1e-13,
        atol=1e-13,
    )
    energy = pair(q)
    (expected,) = torch.autograd.grad(pair(q), q)
    pair.box.mul_(0.5)
    assert torch.equal(torch.autograd.grad(energy, q)[0], expected)


@pytest.mark.slow
def test_a_gradient_compiled_after_a_change_is_refused():
    pair = adjsim.SoftSphere(1.0, 1.0, 4.0)
    q, v = triple().requires_grad_(), torch.ones(3, 3, dtype=torch.float64)
    force = pair.force(q)
    pair.exponent = 6.0
    with contextlib.suppress(RuntimeError):  # Compiled already, it is the gradient of the force.
        (found,) = torch.autograd.grad(force, q, v)
        pair.exponent = 4.0
        assert torch.equal(found, torch.autograd.grad(pair.force(q), q, v)[0])
    pair.exponent = 4.0
    (after,) = torch.autograd.grad(pair.force(q), q, v)
    other = adjsim.SoftSphere(1.0, 1.0, 4.0)
    assert torch.equal(after, torch.autograd.grad(other.force(q), q, v)[0])


class Nested(PairPotential):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("c", torch.tensor(2.0, dtype=torch.float64))

    def pair_energy(self, s):
        return float(self.inner.c) * s


def test_numbers_of_a_module_inside_are_read_each_time():
    pair, q = Nested(), triple()
    before = float(pair(q))
    pair.inner.c.fill_(5.0)
    assert float(pair(q)) == pytest.approx(2.5 * before)


def test_species_out_of_range_are_refused():
    for wrong in (40, -1):
        pair = LennardJonesMixture([0, 1, 1], [1.0, 0.5], [1.0, 0.9])
        pair.species[1] = wrong
        with pytest.raises(IndexError):
            pair.force(triple())


class TwoTables(PairPotential):
    def __init__(self):
        super().__init__()
        self.species = torch.tensor([0, 1, 0])
        self.a = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
        self.b = nn.Parameter(torch.arange(9.0, dtype=torch.float64).reshape(3, 3))

    def pair_energy(self, s):
        return s * self.pair_parameter("a", s) + s * s * self.pair_parameter("b", s)


def test_tables_of_two_sizes():
    pair, q = TwoTables(), triple()
    assert torch.equal(pair(q), dense.energy(pair, q))


class Averaged(PairPotential):
    """Reads the number of atoms from the shape of a tensor."""

    def __init__(self, atoms):
        super().__init__()
        self.charge = nn.Parameter(torch.ones(atoms, dtype=torch.float64))

    def pair_energy(self, s):
        return s / len(self.charge)


class Reading(PairPotential):
    """Reads the value of a tensor that is not a parameter of pairs."""

    def __init__(self, what, value):
        super().__init__(cutoff=2.0, box=[6.0 + value] * 3)
        self.what = what
        self.register_buffer("number", torch.tensor(value))
        self.register_buffer("on", torch.tensor(value == 1))
        self.table = nn.Parameter(torch.full((3, 3), float(value), dtype=torch.float64))

    def pair_energy(self, s):
        if self.what == "on":
            return s if self.on else -s
        return (
            s
            * {
                "number": lambda: int(self.number),
                "table": lambda: self.table.tolist()[0][0],
                "box": lambda: self.box.tolist()[0],
                "volume": lambda: float(self.box.prod()),
            }[self.what]()
        )


@pytest.mark.parametrize("what", ["number", "on", "table", "box", "volume"])
def test_values_that_formulas_read_are_not_shared(what):
    q = triple()
    for value in (1, 2):
        pair = Reading(what, value)
        torch.testing.assert_close(pair(q), dense.energy(pair, q), rtol=1e-14, atol=0)


@pytest.mark.slow
def test_potentials_of_one_class_share_kernels_of_one_shape():
    q = triple()
    for atoms in (3, 2, 3):
        pair = Averaged(atoms)
        expected = dense.energy(pair, q[:atoms])
        torch.testing.assert_close(pair(q[:atoms]), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(0, 3), (0, 5, 3), (0, 600, 3)])
def test_nothing_to_evaluate(shape):
    pair = adjsim.LennardJones(
        nn.Parameter(torch.ones(5, 5, dtype=torch.float64)) if shape[-2] == 5 else parameter(1.0),
        cutoff=2.0,
        box=[20.0] * 3,
    )
    for _ in range(2):
        q = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        force = pair.force(q)
        assert force.shape == shape
        force.sum().backward()


@pytest.mark.slow
def test_other_ways_of_differentiation():
    pair, q = adjsim.LennardJones(parameter(1.1), cutoff=3.0), triple()
    direction = torch.ones(3, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0])[:, None]
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(pair.force(forward_ad.make_dual(q, direction))).tangent
    x = q.clone().requires_grad_()
    force = pair.force(x)
    # The Jacobian of a force that has a potential is symmetric.
    (product,) = torch.autograd.grad(force, x, direction, retain_graph=True)
    torch.testing.assert_close(tangent, product, rtol=1e-12, atol=1e-12)
    (rows,) = torch.autograd.grad(
        force, x, torch.stack([direction, 2 * direction]), is_grads_batched=True
    )
    torch.testing.assert_close(rows, torch.stack([product, 2 * product]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("what", ["energy", "force", "energy at a strain", "force at a strain"])
def test_rows_of_cotangents_take_the_operator_one_by_one(monkeypatch, what):
    """All pairs of all rows at once took the memory and the time of torch's operations."""
    box = box_of("cube")
    pair = adjsim.LennardJones(parameter(1.1), parameter(0.9), cutoff=2.4, box=box)
    q = gas(cell("cube"), 45, seed=3, replicas=2)
    strain = Strain(torch.full((2, 1, 1), 0.01, dtype=torch.float64))
    inputs = list(pair.parameters())
    if "force" in what:
        q.requires_grad_()
        inputs.append(q)
    outputs = {
        "energy": lambda: pair(q),
        "force": lambda: pair.force(q),
        "energy at a strain": lambda: pair.strained_energy(q, strain),
        "force at a strain": lambda: pair.strained_force(q, strain)[0],
    }[what]()
    rows = torch.randn(3, *outputs.shape, generator=torch.Generator().manual_seed(1)).to(outputs)

    def pull(row):
        return torch.autograd.grad(outputs, inputs, row, retain_graph=True)

    expected = [torch.stack(x) for x in zip(*map(pull, rows), strict=True)]
    for name in ("energy", "force", "strained_energy", "strained_force"):
        monkeypatch.delattr(dense, name)
    hidden = torch.autograd.grad(outputs, inputs, rows, is_grads_batched=True, retain_graph=True)
    for found in (hidden, torch.vmap(pull)(rows)):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("what", ["energy", "force"])
def test_backward_passes_are_differentiated_and_transformed(what):
    pair, q = adjsim.LennardJones(parameter(1.1), cutoff=3.0), triple().requires_grad_()
    outputs = pair(q) if what == "energy" else pair.force(q)
    v = torch.linspace(0.5, 1.5, outputs.numel(), dtype=torch.float64).reshape(outputs.shape)

    def pull(v):
        return torch.autograd.grad(outputs, [q, pair.epsilon], v, retain_graph=True)

    def rows_in_rows(scale):
        rows = scale * torch.stack([v, 2 * v])
        inputs = [q, pair.epsilon]
        return torch.autograd.grad(outputs, inputs, rows, is_grads_batched=True, retain_graph=True)

    # A backward pass is linear, so its derivative along v is its value.
    expected = pull(v)
    with forward_ad.dual_level():
        dual = [forward_ad.unpack_dual(x).tangent for x in pull(forward_ad.make_dual(v, v))]
    apart = torch.func.jvp(
        lambda t: tuple(t * x for x in pull(v)), (torch.ones(()).double(),), (torch.ones(()),)
    )
    scales = torch.tensor([1.0, 3.0], dtype=torch.float64)
    rows = [x[0, 0] for x in torch.vmap(rows_in_rows)(scales)]
    for found in (dual, torch.func.jvp(pull, (v,), (v,))[1], apart[1], rows):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y.to(x), rtol=1e-12, atol=1e-12)


def test_views_types_and_devices():
    pair, q = adjsim.LennardJones(parameter(1.1), cutoff=3.0), triple()
    mirrored = torch.complex(q, -q).conj().imag
    assert mirrored.is_neg()
    assert torch.equal(pair.force(mirrored), pair.force(q))
    v = torch.ones(3, 3)
    found, expected = (pair.force_vjp(q, [])[1](x)[0] for x in (v, v.double()))
    assert torch.equal(found, expected)
    with torch.device("meta"):
        found = pair.force(q)
    assert torch.equal(found, pair.force(q))


def test_without_a_compiler_torch_is_taken(monkeypatch):
    def refuse(source, threads):
        raise CompilerError("no C++ compiler was found")

    monkeypatch.setattr(cpu, "compiled", refuse)
    monkeypatch.setattr(pair_operator, "_kernels_of", lambda *_: pair_operator.Kernels())
    pair = adjsim.LennardJones(parameter(1.0), 1.0)
    q = torch.tensor([[0.0, 0.0], [1.3, 0.0]], dtype=torch.float64)
    assert "no C++ compiler" in pair.path(q)
    assert torch.equal(pair.force(q), dense.force(pair, q))


@pytest.mark.slow
def test_a_constant_of_a_module_inside_a_module_is_part_of_the_key(monkeypatch):
    outer, inner = types.ModuleType("outer"), types.ModuleType("outer.inner")
    outer.inner = inner
    monkeypatch.setitem(globals(), "OUTER", outer)

    class Scaled(PairPotential):
        def pair_energy(self, s):
            return OUTER.inner.scale * s

    q = triple()
    for value in (1.0, 3.0):
        inner.scale = value
        pair = Scaled()
        torch.testing.assert_close(pair(q), dense.energy(pair, q), rtol=1e-14, atol=0)


class OfPairs(PairPotential):
    strength: torch.Tensor = declared("strength")

    def pair_energy(self, s):
        return self.pair_parameter("strength", s) * torch.exp(-s)


class OfItself(OfPairs):
    """It reads its parameter by its attribute, which a parametrisation computes."""

    def pair_energy(self, s):
        return self.strength * torch.exp(-s)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(OfPairs, marks=pytest.mark.slow), OfItself])
def test_a_parametrised_number_is_never_a_constant_of_a_kernel(kind):
    q = triple()
    for value in (1.0, 2.0):
        plain, pair = OfPairs(parameter(value)), kind(parameter(value))
        register_parametrization(pair, "strength", adjsim.Positive())
        assert ("torch" in pair.path(q)) == (kind is OfItself)
        for found, expected in ((pair(q), plain(q)), (pair.force(q), plain.force(q))):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
        (slope,) = torch.autograd.grad(pair(q), list(pair.parameters()))
        (expected,) = torch.autograd.grad(plain(q), list(plain.parameters()))
        # Positive() stores the logarithm.
        torch.testing.assert_close(slope, value * expected, rtol=1e-13, atol=0)
        before = pair.force(q)
        with torch.no_grad():
            pair.parametrizations.strength.original.add_(math.log(2.0))
        torch.testing.assert_close(pair.force(q), 2 * before, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kinds", [1, 2])
def test_tables_in_a_vector_have_the_bits_of_tables_in_memory(kinds, dtype, listed):
    """A table of one entry or four, and one of sixteen, of which the same ones are read."""
    position = gas(cell("cube"), 60, 1).to(dtype)
    v = torch.randn(position.shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def computed(count):
        numbers = ([1.1, 0.8, 0.3, 0.2], [0.95, 0.9, 1.0, 1.1])
        made = (nn.Parameter(torch.tensor(x[:count], dtype=dtype)) for x in numbers)
        pair = LennardJonesMixture(
            torch.arange(60) % kinds, *made, cutoff=1.9, skin=0.3, box=[6.0] * 3
        )
        assert pair.path(position) == "neighbour list"
        value, product = pair.force_vjp(position, list(pair.parameters()))
        along, rest = product(v)
        gradients = [x[:kinds] for x in rest]
        return [value, along, *gradients, pair(position).detach()]

    for x, y in zip(computed(kinds), computed(4), strict=True):
        assert float(x.abs().max()) > 0
        assert torch.equal(x, y)


@pytest.mark.slow
def test_a_loop_has_kernels_of_two_precisions():
    def pairs():
        return adjsim.LennardJones(parameter(1.0), parameter(0.3), cutoff=2.0, box=[6.3] * 3)

    potential = pairs() + adjsim.potentials.InPrecision(pairs().to(torch.float32))
    start = torch.cartesian_prod(*[torch.arange(4.0, dtype=torch.float64)] * 3) * 1.5

    def gradients(compiled):
        dynamics = adjsim.Hamiltonian(potential)
        momentum = dynamics.thermal_momentum(start, 0.5, 0)
        run = adjsim.simulate(
            dynamics,
            dynamics.init(start, momentum),
            [0.0, 0.04],
            solver=adjsim.VelocityVerlet(0.004),
            compile=compiled,
        )
        return torch.autograd.grad(run.final.position.sin().sum(), [*potential.parameters()])

    # Sums of a kernel and of torch have other rounding errors, here those of float32.
    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
