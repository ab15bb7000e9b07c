"""The pair operator against torch's operations over all pairs, with a list and without."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import adjsim
from adjsim._cpp.library import CompilerError
from adjsim._pairs import kernel as kernels
from adjsim.potentials import (
    ForceShifted,
    LennardJonesMixture,
    PairPotential,
    Switched,
    all_pairs,
    pair_operator,
)
from tests.problems import parameter

LISTED, DENSE = 0.0, 1e9
# Sums of up to a few hundred contributions, in another order than torch's.
CLOSE = 1e-12


@pytest.fixture
def listed(monkeypatch):
    """Choose between a neighbour list and all pairs, whatever the size of the system."""

    def choose(limit):
        monkeypatch.setattr(pair_operator, "LISTED", limit)
        monkeypatch.setattr(pair_operator, "LISTED_WITHOUT_BOX", limit)

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
        lambda q: all_pairs.energy(pair, q), lambda q: all_pairs.force(pair, q, None)
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


@pytest.mark.parametrize("limit", [LISTED, DENSE], ids=["list", "all pairs"])
@pytest.mark.parametrize("kind", ["cube", "just large enough", "slab", "tilted"])
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


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "limit", [LISTED, pytest.param(DENSE, marks=pytest.mark.slow)], ids=["list", "all pairs"]
)
def test_formulas_and_their_parameters(listed, name, limit):
    listed(limit)
    pair = KINDS[name](box_of("cube"))
    assert_equal_to_torch(pair, gas(cell("cube"), 60, seed=4))
    batch = gas(cell("cube"), 60, seed=5, replicas=2)
    assert_equal_to_torch(pair, batch)


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


@pytest.mark.parametrize("dim", [1, 2])
def test_fewer_dimensions(listed, dim):
    box = torch.tensor([40.0, 11.0][:dim], dtype=torch.float64)
    q = torch.rand(60, dim, generator=torch.Generator().manual_seed(0)).double() * box * 3
    pair = adjsim.SoftSphere(parameter(1.0), parameter(0.2), 4.0, cutoff=2.4, box=box)
    assert_equal_to_torch(pair, q)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
            exact = all_pairs.force(pair, position, None)
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


def test_bits_do_not_depend_on_the_list(listed):
    """Whatever is in the list beyond the cutoff, and whichever list was there before."""
    pairs = [
        adjsim.LennardJones(1.1, 0.9, cutoff=2.4, box=box_of("cube"), skin=skin)
        for skin in (0.0, 0.1, 0.6)
    ]
    position = gas(cell("cube"), 70, seed=6)
    generator = torch.Generator().manual_seed(0)
    before = kernels.builds()
    for _ in range(40):
        position = position + 0.02 * torch.randn(70, 3, generator=generator, dtype=torch.float64)
        listed(DENSE)
        energy, force = pairs[0](position), pairs[0].force(position)
        listed(LISTED)
        for pair in pairs:
            assert torch.equal(pair(position), energy)
            assert torch.equal(pair.force(position), force)
    # 40 for the first, and at least ten for the second, whose skin is five displacements.
    assert kernels.builds() - before > 50


def test_two_systems_of_one_size_alternate(listed):
    """Neither uses the list of the other, and neither makes the other build again."""
    pair = adjsim.LennardJones(1.1, 0.9, cutoff=2.4, box=box_of("cube"))
    systems = [gas(cell("cube"), 70, seed=seed) for seed in (7, 8, 9)]
    for q in systems:
        pair.force(q)
    before = kernels.builds()
    for _ in range(5):
        for q in systems:
            torch.testing.assert_close(
                pair.force(q), all_pairs.force(pair, q, None), rtol=1e-10, atol=1e-10
            )
    assert kernels.builds() == before


@pytest.mark.parametrize("limit", [LISTED, DENSE], ids=["list", "all pairs"])
def test_threads_do_not_change_bits(listed, limit):
    listed(limit)
    pair = adjsim.LennardJones(parameter(1.1), parameter(0.9), cutoff=2.4, box=box_of("cube"))
    position = gas(cell("cube"), 70, seed=6, replicas=40)
    v = torch.randn(position.shape, dtype=torch.float64)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert kernels.thread_count(10**6) == count
            force = pair.force(position)
            found.append([force, *torch.autograd.grad(force, list(pair.parameters()), v)])
    finally:
        torch.set_num_threads(threads)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
def test_every_adjoint_with_a_list(listed, exact):
    """Runs with at least ten builds, with a list and without: the same path and gradients."""
    box = box_of("cube")
    position = gas(cell("cube"), 64, seed=10, spread=0.0)
    found = {}
    for limit in (LISTED, DENSE):
        listed(limit)
        pair = adjsim.LennardJones(
            parameter(0.5), parameter(0.8), cutoff=2.4, box=box, skin=0.05,
            truncation=Switched(2.0),
        )  # fmt: skip
        dynamics = adjsim.Langevin(pair, kT=1.5, friction=0.2)
        start = dynamics.init(position, generator=torch.Generator().manual_seed(0))
        before = kernels.builds()
        for adjoint, compile in (
            (adjsim.DirectAdjoint(), False),
            (adjsim.CheckpointAdjoint(), False),
            (adjsim.ReversibleAdjoint(), False),
            (adjsim.ReversibleAdjoint(), True),
        ):
            run = adjsim.simulate(
                dynamics, start, [0.0, 0.3], solver=adjsim.Splitting("BAOAB", 0.002, exact=exact),
                adjoint=adjoint, compile=compile, generator=3,
            )  # fmt: skip
            value = (run.final.position * run.final.momentum).sum()
            grads = torch.autograd.grad(value, list(dynamics.parameters()))
            found[limit, type(adjoint).__name__, compile] = (run.final, grads)
        if limit == LISTED:
            assert kernels.builds() - before >= 40
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


def test_a_compiled_step_takes_force_and_product_in_one_pass(listed):
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
    assert run.stats["pairs"] == {"LennardJones": "neighbour list"}


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
    torch.testing.assert_close(pair.force(q), all_pairs.force(pair, q, None))


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
    assert torch.equal(force, all_pairs.force(pair, q, None))
    torch.autograd.grad(force.sum(), q)


def test_a_changed_number_makes_another_kernel():
    pair = adjsim.SoftSphere(1.0, 1.0, 4.0)
    q = torch.tensor([[0.0, 0.0], [1.3, 0.0]], dtype=torch.float64)
    for exponent in (4.0, 6.0):
        pair.exponent = exponent
        assert float(pair(q)) == pytest.approx(1.3**-exponent, rel=1e-14)


def test_without_a_compiler_torch_is_taken(monkeypatch):
    def refuse(source, threads):
        raise CompilerError("no C++ compiler was found")

    monkeypatch.setattr(kernels, "compiled", refuse)
    pair = adjsim.LennardJones(parameter(1.0), 1.0)
    q = torch.tensor([[0.0, 0.0], [1.3, 0.0]], dtype=torch.float64)
    assert "no C++ compiler" in pair.path(q)
    assert torch.equal(pair.force(q), all_pairs.force(pair, q, None))
