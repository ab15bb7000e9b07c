"""Graphs of atoms: their edges, potentials and forces from models of them, under every adjoint."""

import copy

import pytest
import torch
from torch import nn

import adjsim
from adjsim.adjoints import CompileError
from adjsim.core import neighbour_list
from adjsim.core.box import checked_box
from adjsim.potentials import (
    ForceModel,
    InPrecision,
    MessagePassing,
    PairNetwork,
    RadialBasis,
)
from adjsim.potentials.base import force, force_vjp
from adjsim.potentials.learnt.graph import GraphForce, GraphPotential, find_edges
from adjsim.potentials.learnt.mace import MACEPotential
from tests.problems import slow_but

CUTOFF = 2.0
BOXES = {
    "open": None,
    "cube": [4.5, 4.7, 4.9],
    "tilted": [[4.5, 0.0, 0.0], [1.3, 4.6, 0.0], [0.4, -1.1, 4.8]],
    "small": [3.1, 1.7, 2.3],
    "small and tilted": [[2.0, 0.0, 0.0], [1.5, 1.9, 0.0], [0.3, 0.5, 2.2]],
}
ADJOINTS = {
    "direct": (adjsim.DirectAdjoint(), False),
    "checkpoint": (adjsim.CheckpointAdjoint(), False),
    "reversible": (adjsim.ReversibleAdjoint(), False),
    "exact": (adjsim.ReversibleAdjoint(), True),
}


@pytest.fixture(autouse=True)
def no_lists():
    neighbour_list._builds.clear()


def positions(atoms=12, *batch, seed=0, spread=5.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.rand(*batch, atoms, 3, generator=generator, dtype=torch.float64)


def lattice(seed=0, batch=()):
    """Eight atoms at about 1.5, which stay apart for a short run."""
    sites = 1.5 * torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * 3)
    generator = torch.Generator().manual_seed(seed)
    return sites + 0.1 * torch.randn(*batch, 8, 3, generator=generator, dtype=torch.float64)


def graph(box=None, seed=0, **settings):
    torch.manual_seed(seed)
    model = MessagePassing(CUTOFF, species=2, hidden=6, basis=4)
    return GraphPotential(model, CUTOFF, species=[0, 1] * 4, box=box, **settings)


def brute_force(q, box, cutoff):
    """All edges of one system: receiver, sender and the vector between them."""
    numbers = torch.zeros(1, 3)
    if box is not None:
        numbers = torch.cartesian_prod(*[torch.arange(-8.0, 9)] * 3)
    cell = torch.eye(3) if box is None else torch.as_tensor(box)
    images = numbers @ (torch.diag(cell) if cell.ndim == 1 else cell)
    d = q[:, None, None] - q[None, :, None] + images
    s = d.square().sum(-1)
    return [(int(i), int(j), d[i, j, k]) for i, j, k in ((s < cutoff**2) & (s > 0)).nonzero()]


@pytest.mark.parametrize("kind", BOXES)
def test_edges_against_brute_force(kind):
    box = None if BOXES[kind] is None else checked_box(BOXES[kind], None)
    # Atoms outside of the box, too.
    q = 2 * positions() - 3 if box is not None else positions()
    (sender, receiver), shifts, finite = find_edges(q, CUTOFF, box)
    expected = brute_force(q, BOXES[kind], CUTOFF)
    vectors = q[receiver] - q[sender] + shifts

    def rows(table):
        # A millionth tells any two of these vectors apart, and is above rounding.
        return sorted((i, j, *[round(float(x) * 1e6) for x in v]) for i, j, v in table)

    found = rows(zip(receiver.tolist(), sender.tolist(), vectors, strict=True))
    assert bool(finite)
    assert len(found) == len(expected) > 20
    for a, b in zip(found, rows(expected), strict=True):
        assert a[:2] == b[:2]
        assert max(abs(x - y) for x, y in zip(a[2:], b[2:], strict=True)) <= 1
    assert bool((vectors.norm(dim=-1) < CUTOFF).all())
    assert torch.equal(receiver, receiver.sort().values)
    if box is None:
        assert not bool(shifts.any())


def test_every_edge_has_its_reverse_bit_for_bit():
    q, box = positions(20), checked_box(BOXES["small and tilted"], None)
    (sender, receiver), shifts, _ = find_edges(q, CUTOFF, box)
    vectors = q[receiver] - q[sender] + shifts
    senders, receivers = sender.tolist(), receiver.tolist()
    ahead = set(zip(senders, receivers, map(tuple, vectors.tolist()), strict=True))
    back = set(zip(receivers, senders, map(tuple, (-vectors).tolist()), strict=True))
    assert ahead == back
    assert len(ahead) == len(shifts)


def test_edges_of_a_batch_are_those_of_its_systems():
    q, box = positions(7, 2, 3), checked_box(BOXES["cube"], None)
    (sender, receiver), shifts, finite = find_edges(q, CUTOFF, box)
    assert finite.shape == (2, 3)
    parts = [find_edges(system, CUTOFF, box) for system in q.flatten(0, 1)]
    assert torch.equal(sender, torch.cat([p.pairs[0] + 7 * k for k, p in enumerate(parts)]))
    assert torch.equal(receiver, torch.cat([p.pairs[1] + 7 * k for k, p in enumerate(parts)]))
    assert torch.equal(shifts, torch.cat([p.shifts for p in parts]))


@pytest.mark.parametrize("skin", [None, 0.0, 0.7])
def test_results_are_a_function_of_the_position(skin):
    potential = graph(BOXES["cube"], skin=skin)
    start, step = lattice(), torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
    builds, counts = set(), set()
    with torch.no_grad():
        for k in range(20):
            q = start + 0.02 * k * step
            along = [*potential.edges(q), potential(q), potential.force(q)]
            builds.add(neighbour_list._builds[0].position[0, 0].item())
            kept = list(neighbour_list._builds)
            neighbour_list._builds.clear()
            fresh = [*potential.edges(q), potential(q), potential.force(q)]
            neighbour_list._builds[:] = kept
            counts.add(along[0].shape[1])
            for x, y in zip(along, fresh, strict=True):
                assert torch.equal(x, y)
    assert len(counts) > 3
    assert (1 < len(builds) < 15) if skin != 0 else len(builds) == 20


def test_invariance():
    potential, q = graph(), lattice()
    energy, f = potential(q), potential.force(q)
    a, b = torch.tensor(0.7), torch.tensor(1.9)
    turn = torch.tensor([[a.cos(), a.sin(), 0], [-a.sin(), a.cos(), 0], [0, 0, 1]])
    turn = turn @ torch.tensor([[1, 0, 0], [0, b.cos(), b.sin()], [0, -b.sin(), b.cos()]])
    # Rounding, of numbers of order one.
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(potential(q + 3.0), energy, **close)
    torch.testing.assert_close(potential(q @ turn), energy, **close)
    torch.testing.assert_close(potential.force(q @ turn), f @ turn, **close)
    order = torch.tensor([2, 5, 0, 7, 6, 3, 4, 1])
    permuted = GraphPotential(potential.model, CUTOFF, species=potential.species[order])
    torch.testing.assert_close(permuted(q[order]), energy, **close)
    torch.testing.assert_close(permuted.force(q[order]), f[order], **close)
    assert float(f.detach().abs().max()) > 1e-3
    assert float(f.detach().sum(0).abs().max()) < 1e-13


def test_images_do_not_change_the_energy():
    """Twice a small cell has twice the energy, and atoms may be moved by whole boxes."""
    small = torch.tensor([1.9, 2.1, 2.4])
    model = graph().model
    q = positions(4, spread=1.9)
    species = torch.tensor([0, 1, 1, 0])
    one = GraphPotential(model, CUTOFF, species=species, box=small)
    doubled = torch.cat([q, q + small * torch.tensor([1.0, 0, 0])])
    two = GraphPotential(
        model, CUTOFF, species=species.repeat(2), box=small * torch.tensor([2.0, 1, 1])
    )
    torch.testing.assert_close(two(doubled), 2 * one(q), rtol=1e-12, atol=0)
    moved = q + small * torch.tensor([[3.0, -2, 0], [0, 0, 1], [0, 0, 0], [-5, 1, 2]])
    torch.testing.assert_close(one(moved), one(q), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["open", "small and tilted"])
def test_forces_products_and_virial_against_differences(kind):
    potential, q = graph(BOXES[kind]), lattice()
    v = torch.randn(8, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    parameters = list(potential.parameters())
    h = 1e-5
    with torch.no_grad():
        slope = (potential(q + h * v) - potential(q - h * v)) / (2 * h)
        change = (potential.force(q + h * v) - potential.force(q - h * v)) / (2 * h)
        value, pullback = potential.force_vjp(q, parameters)
        along, rest = pullback(v)
    # The error of central differences, h^2 and eps / h.
    close = {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(-(value * v).sum(), slope, **close)
    assert torch.equal(value, potential.force(q).detach())
    torch.testing.assert_close(along, change, **close)
    work = (potential.force(q) * v).sum()
    expected = torch.autograd.grad(work, parameters, allow_unused=True)
    for x, y in zip(rest, expected, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    strain = 0.01 * torch.randn(3, 3, generator=torch.Generator().manual_seed(6))

    def energy(size):
        deform = torch.eye(3) + size * strain
        box = None if potential.box is None else potential.box @ deform
        edge = GraphPotential(potential.model, CUTOFF, species=potential.species, box=box)
        return edge(q @ deform)

    with torch.no_grad():
        change = (energy(1e-3) - energy(-1e-3)) / 2e-3
    torch.testing.assert_close(-(potential.virial(q) * strain).sum(), change, **close)


@pytest.mark.parametrize("kind", ["cube", "small and tilted"])
def test_the_energy_has_a_derivative_by_the_box(kind):
    """Also that of the shifts of edges, which are multiples of its rows."""
    potential, q = graph(BOXES[kind]), positions(8)
    box = checked_box(BOXES[kind], None).requires_grad_()
    energy = potential(q, box=box)
    (found,) = torch.autograd.grad(energy, box)
    direction = torch.randn(box.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        up, down = (potential(q, box=box + h * direction) for h in (1e-5, -1e-5))
    change = (up - down) / 2e-5
    torch.testing.assert_close((found * direction).sum(), change, rtol=1e-6, atol=1e-8)
    assert float(change.abs()) > 1e-6


def test_smooth_at_the_cutoff():
    """The energy, the force and its derivative vanish as a pair reaches the cutoff."""
    basis = RadialBasis(4, CUTOFF)
    s = torch.tensor(CUTOFF**2, requires_grad=True)
    value = basis(s).sum()
    (first,) = torch.autograd.grad(value, s, create_graph=True)
    (second,) = torch.autograd.grad(first, s)
    assert value == first == second == 0
    potential = graph()
    single = MessagePassing(CUTOFF, hidden=6, basis=4)
    pair = GraphPotential(single, CUTOFF)

    def at(r):
        q, v = torch.tensor([[0.0, 0, 0], [r, 0, 0]]), torch.tensor([[0.0, 0, 0], [1, 0, 0]])
        value, pullback = force_vjp(pair, q, [])
        return pair(q).detach(), value[1, 0], pullback(v)[0][1, 0]

    near, far = at(CUTOFF - 1e-4), at(CUTOFF + 1e-4)
    # (1 - x)^3 is 1e-12 there, its second derivative 6e-4 of the scale of the energy.
    for x, y, close in zip(near, far, (1e-11, 1e-7, 1e-3), strict=True):
        assert abs(float(x - y)) < close
    assert far[1] == far[2] == 0
    # Coincident atoms have finite forces, since no square root is taken.
    assert bool(torch.isfinite(potential.force(torch.zeros(8, 3))).all())


def gradient(potential, adjoint, exact, start=None, steps=5, compile=False):
    dynamics = adjsim.Hamiltonian(potential, mass=2.0)
    q = lattice() if start is None else start
    p = torch.randn(q.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    run = adjsim.simulate(
        dynamics, dynamics.init(q, p), [0.0, steps * 0.02],
        solver=adjsim.Splitting("BAB", 0.02, exact=exact), adjoint=adjoint, compile=compile,
    )  # fmt: skip
    end = run.final.position
    total = end.square().mean()
    named = dict(potential.named_parameters())
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return end.detach(), dict(zip(named, found, strict=True)), run.stats


def assert_all_adjoints_equal(potential, close=1e-10, **settings):
    _, expected, _ = gradient(potential, *ADJOINTS["direct"], **settings)
    end, exact_expected, _ = gradient(potential, adjsim.DirectAdjoint(), True, **settings)
    assert any(x is not None and float(x.abs().max()) > 1e-6 for x in expected.values())
    for name in ("checkpoint", "reversible", "exact"):
        last, found, stats = gradient(potential, *ADJOINTS[name], **settings)
        right = exact_expected if name == "exact" else expected
        for key, x in found.items():
            y = right[key]
            if x is None or y is None:
                assert (0 if x is None else x.abs().max()) == (0 if y is None else y.abs().max())
                continue
            assert x.dtype == potential.get_parameter(key).dtype
            scale = float(y.abs().max())
            torch.testing.assert_close(x, y, rtol=0, atol=close * scale)
        if name == "exact":
            assert stats["reconstruction_error"] == 0
            assert torch.equal(last, end)
    return expected


@pytest.mark.parametrize(
    "kind", ["small", *(pytest.param(x, marks=pytest.mark.slow) for x in ("open", "cube"))]
)
def test_gradients_of_weights_under_every_adjoint(kind):
    potential = graph(BOXES[kind])
    expected = assert_all_adjoints_equal(potential)
    # Against differences along one direction of all weights.
    generator = torch.Generator().manual_seed(2)
    along = {k: torch.randn(x.shape, generator=generator) for k, x in potential.named_parameters()}
    h, values = 1e-5, []
    for sign in (1, -1):
        other = copy.deepcopy(potential)
        with torch.no_grad():
            for k, x in other.named_parameters():
                x.add_(sign * h * along[k])
        end, _, _ = gradient(other, adjsim.DirectAdjoint(), False)
        values.append(float(end.square().mean()))
    total = sum(float((x * along[k]).sum()) for k, x in expected.items() if x is not None)
    assert total == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-6)


def test_a_batch_is_its_systems():
    potential, q = graph(BOXES["cube"]), lattice(batch=(2, 2))
    torch.testing.assert_close(
        potential(q), torch.stack([potential(x) for x in q.flatten(0, 1)]).reshape(2, 2),
        rtol=1e-13, atol=1e-14,
    )  # fmt: skip
    assert potential.virial(q).shape == (2, 2, 3, 3)
    torch.testing.assert_close(potential.virial(q)[1, 0], potential.virial(q[1, 0]))
    assert_all_adjoints_equal(potential, start=q[0])


def test_exact_runs_with_friction_are_retraced():
    potential = graph(BOXES["cube"])
    dynamics = adjsim.Langevin(potential, mass=2.0, kT=0.3, friction=1.0)
    run = adjsim.simulate(
        dynamics, dynamics.init(lattice(), generator=1), [0.0, 0.2], generator=2,
        solver=adjsim.Splitting("BAOAB", 0.02, exact=True), adjoint=adjsim.ReversibleAdjoint(),
    )  # fmt: skip
    run.final.position.square().sum().backward()
    assert run.stats["reconstruction_error"] == 0


class Counted(nn.Module):
    """A model with an integer buffer, which returns the energy of one system."""

    def __init__(self):
        super().__init__()
        self.register_buffer("charges", torch.tensor([1, 3]))
        self.k = nn.Parameter(torch.tensor(0.4))

    def forward(self, position, edges, shifts, species):
        d = position[edges[1]] - position[edges[0]] + shifts
        z = self.charges[species]
        x = (1 - (d * d).sum(-1) / CUTOFF**2) ** 3
        return self.k * (z[edges[0]] * z[edges[1]] * x).sum()


def test_integer_buffers_and_one_energy_for_a_system():
    potential = GraphPotential(Counted(), CUTOFF, species=[0, 1] * 4)
    assert_all_adjoints_equal(potential)
    with pytest.raises(ValueError, match="one energy for a whole batch"):
        potential(lattice(batch=(3,)))
    assert potential(lattice(batch=(1,))).shape == (1,)


@pytest.mark.parametrize("box", [None, [4.5, 4.7, 4.9]])
def test_the_pair_network(box):
    torch.manual_seed(0)
    pair = PairNetwork(6, CUTOFF, box, basis=4)
    assert float(pair.pair_energy(torch.tensor(CUTOFF**2)).detach()) == 0
    if box is not None:
        assert_all_adjoints_equal(pair)

    class AsGraph(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = pair

        def forward(self, position, edges, shifts, species):
            d = position[edges[1]] - position[edges[0]] + shifts
            half = 0.5 * self.pair.pair_energy((d * d).sum(-1))
            return torch.zeros(len(position)).index_add(0, edges[1], half)

    # Sums in another order.
    other, q = GraphPotential(AsGraph(), CUTOFF, box=box), lattice()
    torch.testing.assert_close(other(q), pair(q), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(other.force(q), pair.force(q), rtol=1e-11, atol=1e-13)
    if box is not None:
        torch.testing.assert_close(other.virial(q), pair.virial(q), rtol=1e-11, atol=1e-13)


class Drive(nn.Module):
    """A force without an energy, with or without time."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, position):
        turned = position.roll(1, -1) * torch.tensor([1.0, -1.0, 0.5])
        return self.net(position - position.mean(-2, keepdim=True)) + turned


class Timed(Drive):
    def forward(self, t, position):
        return super().forward(position) * torch.cos(torch.as_tensor(3.0 * t))


class Kicked(nn.Module):
    """Forces of a graph, which are not a gradient."""

    def __init__(self):
        super().__init__()
        self.k = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, position, edges, shifts, species):
        d = position[edges[1]] - position[edges[0]] + shifts
        x = (1 - (d * d).sum(-1, keepdim=True) / CUTOFF**2) ** 3
        push = self.k[species[edges[0]], None] * x * d.roll(1, -1)
        return torch.zeros_like(position).index_add(0, edges[1], push)


FORCES = {
    "position": lambda: ForceModel(Drive()),
    "time and position": lambda: ForceModel(Timed()),
    "graph": lambda: GraphForce(Kicked(), CUTOFF, species=[0, 1] * 4, box=[4.5, 4.7, 4.9]),
    "float32": lambda: ForceModel(Drive().float(), dtype=torch.float32),
}


@pytest.mark.parametrize("kind", FORCES)
def test_forces_without_an_energy_under_every_adjoint(kind):
    torch.manual_seed(1)
    model = FORCES[kind]()
    q = lattice(batch=(2,))
    if kind != "float32":
        v = torch.randn(q.shape, dtype=torch.float64)
        _, pullback = force_vjp(model, q, list(model.parameters()), 0.3)
        h = 1e-5
        with torch.no_grad():
            change = (force(model, q + h * v, 0.3) - force(model, q - h * v, 0.3)) / (2 * h)
        found = (pullback(torch.ones_like(q))[0] * v).sum()
        # Not symmetric: the product is that of the transpose.
        torch.testing.assert_close(found, change.sum(), rtol=1e-6, atol=1e-8)
    # Reversal recovers states to rounding of float64, which float32 may amplify to its own.
    assert_all_adjoints_equal(model, 1e-10 if kind != "float32" else 1e-5, start=q)


@pytest.mark.slow
def test_float32_networks_in_float64_runs():
    torch.manual_seed(0)
    model = MessagePassing(CUTOFF, species=2, hidden=6, basis=4)
    double = GraphPotential(model, CUTOFF, species=[0, 1] * 4, box=BOXES["cube"])
    single = InPrecision(copy.deepcopy(double).to(torch.float32))
    q = lattice()
    assert single(q).dtype == single.force(q).dtype == single.virial(q).dtype == torch.float64
    # Rounding of float32.
    torch.testing.assert_close(single.force(q), double.force(q), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(single.virial(q), double.virial(q), rtol=1e-4, atol=1e-6)
    assert_all_adjoints_equal(single, 1e-4)
    rough = gradient(single, *ADJOINTS["exact"])[1]
    fine = gradient(double, *ADJOINTS["exact"])[1]
    for key, x in fine.items():
        found = rough[f"potential.{key}"]
        assert found is None or found.dtype == torch.float32
        if x is not None:
            scale = float(x.abs().max())
            torch.testing.assert_close(found.double(), x, rtol=0, atol=1e-4 * scale)


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, position, edges, shifts, species):
        return self.value(position)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (lambda q: q, ValueError, r"returns shape \(8, 3\) for 8 atoms"),
        (lambda q: q.sum(-1)[:-1], ValueError, r"must be the energies of the atoms, \(8,\)"),
        (lambda q: {"energy": q.sum()}, TypeError, "returns dict in place of a tensor"),
        (lambda q: None, TypeError, "returns NoneType in place of a tensor"),
        (lambda q: q.sum(-1).float(), ValueError, r"returns float32 .* float64.*InPre"),
    ],
)
def test_models_without_a_right_energy(value, error, message):
    dynamics = adjsim.Hamiltonian(GraphPotential(Returns(value), CUTOFF))
    start = dynamics.init(lattice(), torch.zeros(8, 3))
    # Before any step.
    with pytest.raises(error, match=message):
        adjsim.simulate(dynamics, start, [0.0, 1.0], solver=adjsim.VelocityVerlet(1.0))


@pytest.mark.usefixtures("unchecked")
def test_errors():
    model, q = graph().model, lattice()
    with pytest.raises(ValueError, match="cutoff must be positive and finite; got 0"):
        GraphPotential(model, 0)
    with pytest.raises(ValueError, match="skin must be zero or positive"):
        GraphPotential(model, 1.0, skin=-1.0)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module"):
        GraphPotential(3, 1.0)
    with pytest.raises(TypeError, match="not the class MessagePassing"):
        GraphPotential(MessagePassing, 1.0)
    with pytest.raises(ValueError, match="species must be integers"):
        GraphPotential(model, 1.0, species=[0.5])
    with pytest.raises(ValueError, match=r"species must be \(atoms,\)"):
        GraphPotential(model, 1.0, species=[[0, 1]])
    with pytest.raises(ValueError, match="species is for 3 atoms and position has 8"):
        GraphPotential(model, 1.0, species=[0, 1, 0])(q)
    with pytest.raises(ValueError, match="Species are 0 to 2; the model may know fewer"):
        GraphPotential(model, 1.0, species=[0, 1, 2, 0, 0, 0, 0, 0])(q)
    with pytest.raises(ValueError, match="box has 2 dimensions and position 3"):
        GraphPotential(model, 1.0, box=[3.0, 3.0])(q)
    with pytest.raises(ValueError, match=r"parameters of float32 and position is float64.*InPre"):
        GraphPotential(copy.deepcopy(model).float(), CUTOFF)(q)
    with pytest.raises(ValueError, match=r"returns shape .*the forces on the atoms are"):
        GraphForce(Counted(), CUTOFF, species=[0, 1] * 4)(0.0, q)
    with pytest.raises(TypeError, match="takes 3 required arguments"):
        ForceModel(Three())
    with pytest.raises(TypeError, match="potential must be a module with an energy"):
        InPrecision(ForceModel(Drive()))
    with pytest.raises(TypeError, match="dtype must be a floating-point type"):
        InPrecision(graph(), torch.int64)


class Three(nn.Module):
    def forward(self, a, b, c):
        return a


def test_transforms_are_refused():
    with pytest.raises(ValueError, match="plain autograd"):
        torch.func.vmap(graph())(lattice(batch=(2,)))


def assert_compiled(potential, **settings):
    """Compiled runs have the states and the gradients of eager ones."""
    for name in ("reversible", "exact"):
        adjoint, exact = ADJOINTS[name]
        end, expected, _ = gradient(potential, adjoint, exact, **settings)
        last, found, stats = gradient(potential, adjoint, exact, compile=True, **settings)
        torch.testing.assert_close(last, end, rtol=0, atol=1e-13)
        for key, y in expected.items():
            x = found[key]
            if y is None:
                assert x is None or not x.any()
                continue
            torch.testing.assert_close(x, y, rtol=0, atol=1e-11 * float(y.abs().max()))
        if exact:
            assert stats["reconstruction_error"] == 0


@pytest.mark.parametrize(
    "kind",
    slow_but(lambda _: False, BOXES, marathon=lambda kind: kind != "cube"),
)
def test_compiled_loops_have_the_same_gradients(kind):
    potential = graph(BOXES[kind])
    edges = len(potential.edges(lattice()).shifts)
    assert_compiled(graph(BOXES[kind], capacity=edges + 30))


@pytest.mark.marathon
def test_compiled_batches_and_sums():
    batch = lattice(batch=(3,))
    potential = graph(BOXES["tilted"], capacity=600)
    assert len(potential.edges(batch).shifts) < 600
    assert_compiled(potential + adjsim.Harmonic(0.3), start=batch)


@pytest.mark.marathon
@pytest.mark.parametrize("kind", ["cube", "tilted"])
def test_compiled_loops_in_a_box_that_a_state_carries(kind):
    potential = graph(BOXES[kind], capacity=400)
    dynamics = adjsim.LangevinPiston(
        potential, mass=2.0, kT=0.3, friction=1.0, pressure=0.05, tau=0.5, piston_friction=1.0
    )
    start, found = dynamics.init(lattice(), generator=1), []
    for compile in (False, True):
        run = adjsim.simulate(
            dynamics, start, [0.0, 0.2], generator=2, compile=compile,
            solver=adjsim.Splitting("VBSAOASBV", 0.02), adjoint=adjsim.ReversibleAdjoint(),
        )  # fmt: skip
        loss = run.final.position.square().sum() + run.final.strain.sum()
        slope = torch.autograd.grad(loss, potential.model.embedding.weight)[0]
        found.append((loss.detach(), slope))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_the_capacity_of_compiled_loops():
    with pytest.raises(CompileError, match="give the potential capacity="):
        gradient(graph(), adjsim.ReversibleAdjoint(), False, compile=True)
    edges = len(graph().edges(lattice()).shifts)
    with pytest.raises(ValueError, match=f"{edges} edges does not fit into capacity=3"):
        gradient(graph(capacity=3), adjsim.ReversibleAdjoint(), False, compile=True)
    with pytest.raises(ValueError, match="capacity must be"):
        graph(capacity=0)


class Averaged(MessagePassing):
    """A model that divides by the number of edges, which compiled loops cannot follow."""

    def forward(self, position, edges, shifts, species):
        return 100 / edges.shape[1] * super().forward(position, edges, shifts, species)


@pytest.mark.slow
def test_a_model_that_counts_edges_is_refused():
    potential = GraphPotential(
        Averaged(CUTOFF, hidden=6, basis=4),
        CUTOFF,
        species=[0] * 8,
        box=BOXES["cube"],
        capacity=400,
    )
    with pytest.raises(RuntimeError, match="from the same step without compilation"):
        gradient(potential, adjsim.ReversibleAdjoint(), False, compile=True)


def test_systems_that_are_not_finite():
    potential, q = graph(BOXES["cube"]), lattice(batch=(3,))
    expected = potential.force(q)
    q[1, 4, 2] = torch.nan
    assert torch.isnan(potential(q)).tolist() == [False, True, False]
    found = potential.force(q)
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=1e-12, atol=1e-14)


def test_unregistered_tensors_are_named():
    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = [torch.tensor(2.0, requires_grad=True)]

        def forward(self, position, edges, shifts, species):
            return self.plain[0] * position.square().sum(-1)

    with pytest.raises(ValueError, match="not registered"):
        gradient(GraphPotential(Loose(), CUTOFF), adjsim.ReversibleAdjoint(), False)


@pytest.mark.slow
def test_parts_of_a_sum():
    potential = graph(BOXES["cube"]) + adjsim.Harmonic(nn.Parameter(torch.tensor(0.7)))
    assert_all_adjoints_equal(potential)


class Stub(nn.Module):
    """Takes and returns what a MACE model does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("r_max", torch.tensor(CUTOFF))
        self.register_buffer("atomic_numbers", torch.tensor([1, 8]))
        self.atomic_energies_fn = nn.Identity()
        self.model = MessagePassing(CUTOFF, species=2, hidden=6, basis=4)

    def forward(self, data, compute_force):
        assert not compute_force
        data["positions"].requires_grad_(True)
        data["node_attrs"].requires_grad_(True)
        species = data["node_attrs"].argmax(-1)
        energies = self.model(data["positions"], data["edge_index"], data["shifts"], species)
        return {"node_energy": energies + 0 * data["node_attrs"].sum(-1)}


def test_the_interface_of_mace():
    torch.manual_seed(0)
    stub, q = Stub(), lattice()
    potential = MACEPotential(stub, [1, 8] * 4, box=BOXES["small"])
    same = GraphPotential(stub.model, CUTOFF, species=[0, 1] * 4, box=BOXES["small"])
    with torch.no_grad():
        assert torch.equal(potential.force(q), same.force(q))
    assert not q.requires_grad
    assert_all_adjoints_equal(potential)
    with pytest.raises(ValueError, match=r"does not know atomic numbers \[6, 7\]; it knows"):
        MACEPotential(stub, [1, 6, 7])
    with pytest.raises(ValueError, match="head must be one of 0 to 0"):
        MACEPotential(stub, [1], head=1)
    with pytest.raises(TypeError, match="MessagePassing is not a MACE model: it has no r_max"):
        MACEPotential(stub.model, [1])
