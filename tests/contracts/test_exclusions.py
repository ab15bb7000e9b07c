"""Excluded pairs, on every path of a pair potential, against a sum over the allowed pairs."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

import adjsim
from adjsim.core import box as _box, derived as _derived, neighbour_list
from adjsim.core.refusal import Refusal
from adjsim.potentials import (
    WCA,
    Buckingham,
    Coulomb,
    ForceShifted,
    GaussianCore,
    LennardJonesMixture,
    Mie,
    Morse,
    ReactionField,
    SoftSphere,
    Switched,
    Wolf,
    Yukawa,
    tail_corrections,
)
from adjsim.potentials.pairs import base, dense
from adjsim.potentials.pairs.kernels import kernel as kernels
from tests.contracts.test_pair_operator import DENSE, LISTED, cell, gas
from tests.problems import lists_built, parameter

ATOMS = 36
# Sums of a few hundred contributions in another order, relative to the largest result.
CLOSE = 1e-12
BOXES = {
    "none": None,
    "orthogonal": cell("cube").diagonal().clone(),
    "tilted": cell("tilted"),
}


@pytest.fixture
def listed(monkeypatch):
    """Choose between a neighbour list and all pairs, whatever the size of the system."""

    def choose(limit):
        monkeypatch.setattr(_box, "LISTED", limit)
        monkeypatch.setattr(_box, "LISTED_WITHOUT_BOX", limit)
        _derived._known.clear()

    choose(LISTED)
    return choose


@pytest.fixture
def by_torch(monkeypatch):
    monkeypatch.setattr(base, "unsupported", lambda pair, position: Refusal("a test"))


def vector(low: float, high: float, size: int = ATOMS) -> nn.Parameter:
    return nn.Parameter(torch.linspace(low, high, size, dtype=torch.float64))


def symmetric(middle: float) -> nn.Parameter:
    generator = torch.Generator().manual_seed(8)
    x = torch.rand(ATOMS, ATOMS, generator=generator, dtype=torch.float64)
    return nn.Parameter(middle + 0.05 * (x + x.T))


SPECIES = [k % 3 for k in range(ATOMS)]
# All take the same settings, so all have a cutoff.
KINDS = {
    "Lennard-Jones": lambda **o: adjsim.LennardJones(parameter(0.7), parameter(0.9), **o),
    "a table": lambda **o: adjsim.LennardJones(symmetric(0.7), symmetric(0.8), **o),
    "mixture": lambda **o: LennardJonesMixture(
        SPECIES, vector(0.4, 1.2, 3), vector(0.7, 0.9, 3), **o
    ),
    "switched": lambda **o: adjsim.LennardJones(
        parameter(0.7), parameter(0.9), truncation=Switched(2.0), **o
    ),
    "Coulomb": lambda **o: Coulomb(vector(-0.9, 1.1), 14.4, **o),
    "reaction field": lambda **o: ReactionField(vector(-0.9, 1.1), 78.3, 14.4, **o),
    "Wolf": lambda **o: Wolf(vector(-0.9, 1.1), 0.4, truncation=ForceShifted(), **o),
    "WCA": lambda **o: WCA(parameter(0.7), parameter(0.9), **o),
    "Morse": lambda **o: Morse(parameter(0.7), parameter(0.3), parameter(1.1), **o),
    "Buckingham": lambda **o: Buckingham(parameter(900.0), parameter(0.2), parameter(1.3), **o),
    "Mie": lambda **o: Mie(parameter(0.7), parameter(0.9), 10.0, 5.0, **o),
    "soft sphere": lambda **o: SoftSphere(parameter(0.7), parameter(0.9), **o),
    "Yukawa": lambda **o: Yukawa(parameter(0.7), parameter(0.9), **o),
    "Gaussian core": lambda **o: GaussianCore(parameter(0.7), parameter(0.9), **o),
}


def molecule(kind: str, replicas: int | None = None):
    """Positions, some on top of each other, and exclusions, those among them."""
    rows = cell("tilted" if kind == "tilted" else "cube")
    q = gas(rows, ATOMS, seed=4, spread=0.0 if kind == "none" else 1.0, replicas=replicas)
    q[..., 1, :] = q[..., 0, :] + 0.05
    q[..., 20, :] = q[..., 3, :]
    pairs = [(0, 1), (20, 3), (3, 20), (ATOMS - 1, 0), *((k, k + 1) for k in range(4, 30))]
    pairs += [(k + 2, k) for k in range(8, 20)]
    return q, pairs


def brute(pair, q, box):
    """The energy of one system: a loop over allowed pairs, by hand."""
    excluded = {(min(p), max(p)) for p in pair.exclusions.tolist()}
    allowed = [
        (i, j) for i in range(len(q)) for j in range(i + 1, len(q)) if (i, j) not in excluded
    ]
    i, j = torch.tensor(allowed).T
    d = q[i] - q[j]
    if box is not None:
        rows = (torch.diag(box) if box.ndim == 1 else box).to(q)
        d = d - (d @ torch.linalg.inv(rows)).detach().round() @ rows
        images = torch.tensor(list(product((-1, 0, 1), repeat=3))).to(q) @ rows
        nearest = (d.detach().unsqueeze(1) + images).norm(dim=-1).argmin(1)
        d = d + images[nearest]
    within = d.detach().norm(dim=-1) < (math.inf if pair.cutoff is None else pair.cutoff)
    i, j, d = i[within], j[within], d[within]
    s = (d * d).sum(-1)
    a, b = (i, j) if pair.species is None else (pair.species[i], pair.species[j])
    values = {}
    for name in ("epsilon", "sigma", "charge", "depth", "width", "distance"):
        if not hasattr(pair, name):
            continue
        x = pair.pair_table(name)
        values |= {name: x[a, b] if x.ndim == 2 else (x[i], x[j]) if x.ndim == 1 else x}
    u = pair.with_operands({**dict(pair.named_parameters()), **values}).truncated_energy(s).sum()
    if isinstance(pair, ReactionField):
        u = u - 0.5 * pair.constant * pair.shift * pair.charge.square().sum()
    if isinstance(pair, Wolf):
        own = math.erfc(pair.alpha * pair.cutoff) / (2 * pair.cutoff)
        own += pair.alpha / math.sqrt(math.pi)
        u = u - pair.constant * own * pair.charge.square().sum()
    return u, d


def assert_equal_to_brute(pair, q, box, tolerance=CLOSE):
    """Energy, force, products, gradients and virial, relative to the largest."""
    inputs = list(pair.parameters())
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    x = q.detach().requires_grad_()
    energy, d = brute(pair, x, box)
    (dd,) = torch.autograd.grad(energy, d, retain_graph=True)
    dq, *dp = torch.autograd.grad(energy, [x, *inputs], create_graph=True)
    products = torch.autograd.grad(-dq, [x, *inputs], v)
    expected = [energy, -dq, dq, *dp, *products, *products, -torch.einsum("pa,pb->ab", d, dd)]

    y = q.detach().requires_grad_()
    mine, force = pair(y), pair.force(y)
    value, pullback = pair.force_vjp(q, inputs)
    along, rest = pullback(v)
    rest = rest if isinstance(rest, list) else rest.gradient(inputs)
    assert torch.equal(value, force.detach())
    found = [
        mine,
        force,
        *torch.autograd.grad(mine, [y, *inputs]),
        *torch.autograd.grad(force, [y, *inputs], v),
        along,
        *rest,
        pair.virial(q),
    ]
    for a, b in zip(found, expected, strict=True):
        scale = max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a, b.to(a), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("limit", [DENSE, LISTED], ids=["dense", "list"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Lennard-Jones", "orthogonal"),
        pytest.param("a table", "tilted", marks=pytest.mark.marathon),
        pytest.param("mixture", "none", marks=pytest.mark.marathon),
        pytest.param("reaction field", "orthogonal", marks=pytest.mark.marathon),
        pytest.param("Wolf", "tilted", marks=pytest.mark.slow),
    ],
)
def test_the_operator(listed, name, kind, limit):
    listed(limit)
    q, pairs = molecule(kind)
    pair = KINDS[name](cutoff=2.4, box=BOXES[kind], exclusions=pairs)
    assert pair.path(q) == ("all pairs" if limit == DENSE else "neighbour list")
    assert_equal_to_brute(pair, q, BOXES[kind])


@pytest.mark.parametrize("limit", [DENSE, LISTED], ids=["dense", "list"])
@pytest.mark.parametrize("name", KINDS)
def test_torch_operations(listed, by_torch, name, limit):
    listed(limit)
    kind = list(BOXES)[list(KINDS).index(name) % 3]
    q, pairs = molecule(kind)
    pair = KINDS[name](cutoff=2.4, box=BOXES[kind], exclusions=pairs)
    assert pair.path(q).startswith("all pairs, by" if limit == DENSE else "neighbour list, by")
    assert_equal_to_brute(pair, q, BOXES[kind])


def test_without_a_cutoff(by_torch):
    """No mask but that of exclusions."""
    for kind, box in BOXES.items():
        q, pairs = molecule(kind)
        pair = Coulomb(vector(-0.9, 1.1), box=box, exclusions=pairs)
        assert_equal_to_brute(pair, q, box)


@pytest.mark.slow
def test_without_a_cutoff_by_the_operator():
    q, pairs = molecule("orthogonal")
    pair = Coulomb(vector(-0.9, 1.1), box=BOXES["orthogonal"], exclusions=pairs)
    assert pair.path(q) == "all pairs"
    assert_equal_to_brute(pair, q, BOXES["orthogonal"])


@pytest.mark.slow
@pytest.mark.parametrize("limit", [DENSE, LISTED], ids=["dense", "list"])
def test_systems_of_a_batch(listed, limit):
    listed(limit)
    q, pairs = molecule("orthogonal", replicas=3)
    pair = KINDS["Lennard-Jones"](cutoff=2.4, box=BOXES["orthogonal"], exclusions=pairs)
    for k in range(3):
        assert torch.equal(pair(q)[k], pair(q[k]))
        assert torch.equal(pair.force(q)[k], pair.force(q[k]))
        assert_equal_to_brute(pair, q[k], BOXES["orthogonal"])


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(DENSE, marks=pytest.mark.marathon),
        pytest.param(LISTED, marks=pytest.mark.marathon),
    ],
    ids=["dense", "list"],
)
def test_float32(listed, limit):
    listed(limit)
    q, pairs = molecule("orthogonal")
    pair = KINDS["mixture"](cutoff=2.4, box=BOXES["orthogonal"], exclusions=pairs)
    # Contributions are rounded to single precision, and some cancel.
    torch.testing.assert_close(
        pair.force(q.float()).double(),
        pair.force(q),
        rtol=0,
        atol=2e-5 * float(pair.force(q).detach().max()),
    )
    assert pair(q.float()).dtype == torch.float32


@pytest.mark.slow
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pairs=st.lists(
        st.tuples(st.integers(0, ATOMS - 1), st.integers(0, ATOMS - 1)).filter(
            lambda p: p[0] != p[1]
        ),
        max_size=300,
    )
)
def test_any_exclusions(listed, pairs):
    """The list and all pairs have the same bits, which are those of the allowed pairs."""
    q = gas(cell("cube"), ATOMS, seed=4)
    pair = KINDS["Lennard-Jones"](cutoff=2.4, box=BOXES["orthogonal"], exclusions=pairs)
    stored = sorted({(min(p), max(p)) for p in pairs})
    assert (pair.exclusions is None and not pairs) or pair.exclusions.tolist() == list(
        map(list, stored)
    )
    listed(DENSE)
    dense = pair.force(q), pair(q)
    listed(LISTED)
    assert torch.equal(pair.force(q), dense[0])
    assert torch.equal(pair(q), dense[1])
    if pairs:
        energy, _ = brute(pair, q, BOXES["orthogonal"])
        torch.testing.assert_close(dense[1], energy, rtol=CLOSE, atol=CLOSE)


def test_potentials_share_kernels_and_not_lists(listed):
    """Exclusions are data: two potentials that differ in them alternate."""
    q, pairs = molecule("orthogonal")
    others = [*pairs[:-3], (30, 31), (31, 32), (32, 33)]
    made = [
        KINDS["Lennard-Jones"](cutoff=2.4, box=BOXES["orthogonal"], exclusions=e)
        for e in (pairs, others)
    ]
    assert len(made[0].exclusions) == len(made[1].exclusions)
    for limit in (DENSE, LISTED):
        listed(limit)
        expected = [dense.force(pair, q) for pair in made]
        assert not torch.allclose(*expected)
        made[0].force(q)
        before = set(kernels.KERNELS)
        builds = lists_built()
        for _ in range(3):
            for pair, force in zip(made, expected, strict=True):
                torch.testing.assert_close(pair.force(q), force, rtol=CLOSE, atol=1e-9)
        assert set(kernels.KERNELS) == before
        assert lists_built() - builds == (limit == LISTED)


@pytest.mark.parametrize("limit", [DENSE, LISTED], ids=["dense", "list"])
@pytest.mark.parametrize("torch_alone", [False, True], ids=["operator", "torch"])
def test_exclusions_written_in_another_order(listed, limit, torch_alone, request):
    """The larger atom may come first, and a pair may come twice."""
    if torch_alone:
        request.getfixturevalue("by_torch")
    listed(limit)
    q, pairs = molecule("orthogonal")
    made = [
        KINDS["Lennard-Jones"](cutoff=2.4, box=BOXES["orthogonal"], exclusions=pairs)
        for _ in range(2)
    ]
    stored = made[0].exclusions
    made[1].exclusions = torch.cat([stored.flip(0, 1), stored[:1]])
    assert torch.equal(made[1].force(q), made[0].force(q))
    assert torch.equal(made[1](q), made[0](q))


def test_results_depend_on_position_and_exclusions_alone(listed, by_torch):
    """Torch's lists of other exclusions, skins and positions do not change a bit."""
    q, pairs = molecule("orthogonal")
    box = BOXES["orthogonal"]
    found = []
    for skin in (0.0, 0.2, 0.5):
        neighbour_list._builds.clear()
        for other in (None, pairs[:-1], [*pairs[:-1], (30, 31)], pairs):
            pair = KINDS["Lennard-Jones"](cutoff=2.4, box=box, skin=skin, exclusions=other)
            pair.force(q + 0.01)
        found.append(pair.force(q))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    "exact",
    [pytest.param(False, marks=pytest.mark.marathon), pytest.param(True, marks=pytest.mark.slow)],
    ids=["plain", "exact"],
)
def test_runs(listed, exact):
    """With a list and without, compiled and not, under every adjoint."""
    q = gas(cell("cube"), ATOMS, seed=10, spread=0.0)
    pairs = [(k, k + 1) for k in range(0, 30, 2)]
    q[1:31:2] = q[0:30:2] + torch.tensor([0.3, 0.0, 0.0])
    found = {}
    for limit in (DENSE, LISTED):
        listed(limit)
        pair = adjsim.LennardJones(
            parameter(0.5), parameter(0.8), cutoff=2.4, box=BOXES["orthogonal"], skin=0.05,
            truncation=Switched(2.0), exclusions=pairs,
        )  # fmt: skip
        dynamics = adjsim.Langevin(pair, kT=1.5, friction=0.2)
        start = dynamics.init(q, generator=torch.Generator().manual_seed(0))
        for adjoint, compile in (
            (adjsim.DirectAdjoint(), False),
            (adjsim.CheckpointAdjoint(), False),
            (adjsim.ReversibleAdjoint(), False),
            (adjsim.ReversibleAdjoint(), True),
        ):
            run = adjsim.simulate(
                dynamics, start, [0.0, 0.1], solver=adjsim.Splitting("BAOAB", 0.002, exact=exact),
                adjoint=adjoint, compile=compile, generator=3,
            )  # fmt: skip
            value = (run.final.position * run.final.momentum).sum()
            grads = torch.autograd.grad(value, list(dynamics.parameters()))
            if compile:
                assert run.stats["compiled_forward"] == run.stats["compiled_backward"] == "C++"
            found[limit, type(adjoint).__name__, compile] = run.final.position, *grads
    first = found[DENSE, "DirectAdjoint", False]
    for (_, name, compile), (position, *grads) in found.items():
        if exact or not compile:
            assert torch.equal(position, first[0])
        # Sums in another order, over 50 steps.
        torch.testing.assert_close(position, first[0], rtol=1e-11, atol=1e-11)
        for x, y in zip(grads, first[1:], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
        if exact and name == "CheckpointAdjoint":
            torch.testing.assert_close(grads, list(first[1:]), rtol=CLOSE, atol=CLOSE)


@pytest.mark.slow
def test_exclusions_are_inputs_of_compiled_loops():
    """Another set of as many pairs runs in the same loops, with and without saves."""
    q = gas(cell("cube"), 12, seed=3, spread=0.0)
    pair = adjsim.LennardJones(parameter(0.5), 0.8, exclusions=[(0, 1), (2, 3)])
    dynamics = adjsim.Hamiltonian(pair)
    start = dynamics.init(q, torch.zeros_like(q))

    def run(compile):
        found = adjsim.simulate(
            dynamics, start, [0.0, 0.05, 0.1], solver=adjsim.VelocityVerlet(0.01),
            adjoint=adjsim.ReversibleAdjoint(), compile=compile,
        )  # fmt: skip
        value = found.position.square().sum()
        return found, torch.autograd.grad(value, list(dynamics.parameters()))[0]

    seconds = []
    for pairs in ([(0, 1), (2, 3)], [(4, 7), (5, 6)]):
        pair.exclusions.copy_(torch.tensor(pairs))
        (compiled, gradient), (eager, expected) = run(True), run(False)
        seconds.append(compiled.stats["compile_seconds"])
        torch.testing.assert_close(compiled.position, eager.position, rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)
    assert seconds[1] == 0.0


@pytest.mark.slow
def test_derivatives_of_second_order():
    q, pairs = molecule("orthogonal")
    pair = KINDS["reaction field"](cutoff=2.4, box=BOXES["orthogonal"], exclusions=pairs)
    x = q.clone().requires_grad_()
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(2), dtype=q.dtype)

    def second(energy):
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        (along,) = torch.autograd.grad((gradient * v).sum(), x, create_graph=True)
        return torch.autograd.grad((along * v).sum(), [x, pair.charge])

    expected = second(brute(pair, x, BOXES["orthogonal"])[0])
    for found, y in zip(second(pair(x)), expected, strict=True):
        torch.testing.assert_close(found, y, rtol=0, atol=1e-11 * float(y.abs().max()))


@pytest.mark.marathon
def test_a_sum_of_potentials(listed):
    """One part has exclusions and the other has not."""
    q, pairs = molecule("orthogonal")
    q[1], q[20] = q[0] + 0.8, q[3] + 0.9
    box = BOXES["orthogonal"]
    excluding = KINDS["reaction field"](cutoff=2.4, box=box, exclusions=pairs)
    plain = KINDS["Lennard-Jones"](cutoff=2.4, box=box)
    total = excluding + plain
    for limit in (DENSE, LISTED):
        listed(limit)
        torch.testing.assert_close(total(q), excluding(q) + plain(q), rtol=CLOSE, atol=0)
        expected = dense.force(excluding, q) + dense.force(plain, q)
        atol = CLOSE * float(expected.detach().abs().max())
        torch.testing.assert_close(total.force(q), expected, rtol=0, atol=atol)


def test_atoms_outside_of_the_box(listed):
    """A pair is excluded at whichever image it is nearest."""
    q, pairs = molecule("orthogonal")
    pair = KINDS["Lennard-Jones"](cutoff=2.4, box=BOXES["orthogonal"], exclusions=pairs)
    moved = q + 6.0 * torch.randint(-3, 4, q.shape, generator=torch.Generator().manual_seed(0))
    for limit in (DENSE, LISTED):
        listed(limit)
        # Differences of positions as far away are rounded, and the force is steep.
        torch.testing.assert_close(pair.force(moved), pair.force(q), rtol=1e-10, atol=1e-10)


def test_transforms_take_torch():
    """Vectorised over systems, and differentiated in forward mode."""
    q, pairs = molecule("none", replicas=2)
    pair = KINDS["Lennard-Jones"](cutoff=2.4, exclusions=pairs)
    expected = dense.energy(pair, q)
    torch.testing.assert_close(torch.func.vmap(pair)(q), expected, rtol=CLOSE, atol=0)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(2), dtype=q.dtype)
    along = torch.func.jvp(pair, (q,), (v,))[1]
    power = -(dense.force(pair, q) * v).sum((-1, -2))
    torch.testing.assert_close(along, power, rtol=CLOSE, atol=0)


def test_tail_corrections():
    """Tail corrections are those of the potential without exclusions."""
    plain = KINDS["Lennard-Jones"](cutoff=2.4)
    pair = KINDS["Lennard-Jones"](cutoff=2.4, exclusions=[(0, 1)])
    assert tail_corrections(pair, 100, 900.0) == tail_corrections(plain, 100, 900.0)


def test_tail_corrections_of_species_are_those_of_their_atoms():
    """Of species, of a species for each atom, and of a table of atoms."""
    epsilon, sigma = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 0.8], [1.0, 0.9]))
    species = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    settings = {"cutoff": 2.5, "truncation": Switched(2.0)}
    found, expected = (
        tail_corrections(adjsim.LennardJonesMixture(*given, **settings), 7, 30.0)
        for given in (
            (species, epsilon, sigma),
            (torch.arange(7), epsilon[species], sigma[species]),
        )
    )
    # The mean over pairs leaves out each atom with itself, by species too.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    tables = adjsim.LennardJones(
        *(
            adjsim.LennardJonesMixture(species, epsilon, sigma).pair_parameter(
                name, torch.zeros(7, 7)
            )
            for name in ("epsilon", "sigma")
        ),
        **settings,
    )
    torch.testing.assert_close(tail_corrections(tables, 7, 30.0), expected, rtol=1e-12, atol=0)


def test_no_exclusions():
    q, _ = molecule("none")
    q[1], q[20] = q[0] + 0.8, q[3] + 0.9
    plain = adjsim.LennardJones()
    for nothing in ([], torch.empty(0, 2, dtype=torch.int64), None):
        pair = adjsim.LennardJones(exclusions=nothing)
        assert pair.exclusions is None
        assert torch.equal(pair.force(q), plain.force(q))
    everything = [(i, j) for i in range(ATOMS) for j in range(i)]
    assert not bool(adjsim.LennardJones(exclusions=everything).force(q).any())


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([(0, 1), (2, 2)], r"two different atoms; row 1 is \(2, 2\)"),
        ([(0, 1), (-1, 2)], r"from 0; row 1 is \(-1, 2\)"),
        ([(0.5, 1)], r"integers; row 0 is \(0.5, 1\)"),
        ([(0, math.inf)], r"integers; row 0 is \(0, inf\)"),
        ([0, 1, 2], r"must be \(n, 2\).*got shape \(3,\)"),
        ([(0, 1, 2)], r"must be \(n, 2\).*got shape \(1, 3\)"),
    ],
)
def test_bad_exclusions_are_refused(pairs, says):
    with pytest.raises(ValueError, match=says):
        adjsim.LennardJones(exclusions=pairs)


def test_atoms_that_position_does_not_have_are_named(listed, monkeypatch):
    q, _ = molecule("orthogonal")
    pair = KINDS["Lennard-Jones"](
        cutoff=2.4, box=BOXES["orthogonal"], exclusions=[(0, 1), (3, ATOMS)]
    )
    says = rf"the pair \(3, {ATOMS}\), and position has {ATOMS} atoms"
    for path in ("operator", "torch"):
        for limit in (DENSE, LISTED):
            listed(limit)
            for function in (pair, pair.force, pair.virial):
                with pytest.raises(ValueError, match=says):
                    function(q)
        monkeypatch.setattr(base, "unsupported", lambda pair, q, why=path: Refusal(why))
    monkeypatch.undo()
    dynamics = adjsim.Hamiltonian(pair)
    with pytest.raises(ValueError, match=says):
        adjsim.simulate(
            dynamics, dynamics.init(q, torch.zeros_like(q)), [0.0, 0.1],
            solver=adjsim.VelocityVerlet(0.01), compile=True,
        )  # fmt: skip


def test_state_and_copies():
    """Exclusions are kept by a copy, a state dict and another precision."""
    pair = adjsim.LennardJones(exclusions=[(3, 1), (0, 2)])
    other = adjsim.LennardJones(exclusions=[(5, 6), (7, 8)])
    other.load_state_dict(pair.state_dict())
    assert other.exclusions.tolist() == [[0, 2], [1, 3]]
    assert pair.float().exclusions.dtype == torch.int64
