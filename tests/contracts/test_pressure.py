"""Forces in boxes that states carry, and the terms of pistons."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.core import neighbour_list
from adjsim.core.reading import read
from adjsim.core.rounding import Rounding, Roundings
from adjsim.core.strain import Strain
from adjsim.potentials.pairs import dense
from adjsim.potentials.pairs.tail import DispersionCorrection
from adjsim.potentials.sites.force_field import SitedForceField
from adjsim.potentials.strained import (
    ByAutograd,
    energy_at,
    strained_energy,
    strained_force,
    strained_vjp,
)
from tests.pressure import OwnPairs, at, parameter, piston, position, potential, start
from tests.problems import slow_but
from tests.sites import force_field, virtual_sites
from tests.suites import TermContract, disturbed

KINDS = [
    "orthogonal", "mixture", "own", "sum", "ewald", "mesh", "bonded", "dispersion", "custom",
    "dispersed", "graph", "network", "sites",
]  # fmt: skip
TILTED = ["turned", *(f"turned {kind}" for kind in ("ewald", "mesh", "bonded", "graph"))]


def _marks(kind, axes):
    # One strain of all axes is that of each in a box that is turned too. The mesh has the waves of
    # these sums, and other pairs have the kernels of an expression.
    if (axes == 1 and kind in TILTED[1:]) or kind in ("turned ewald", "custom", "dispersed"):
        return pytest.mark.marathon
    slow = kind in ("turned mesh", "turned graph")
    # One strain of all axes: pairs and meshes have it in other rows.
    one = axes == 1 and kind in ("mixture", "ewald", "dispersion", "sites")
    return pytest.mark.slow if slow or one else []


FORMS = [
    pytest.param(kind, axes, marks=_marks(kind, axes))
    for kind in [*KINDS, "tilted", *TILTED]
    for axes in (1, 3)
] + [pytest.param("turned sites", 3, marks=pytest.mark.marathon)]
TERMS = []
for kind, axes, chains in (
    ("orthogonal", "isotropic", False),
    ("orthogonal", "each", True),
    ("tilted", "isotropic", True),
    ("turned", "each", False),
):
    for batch in ((), (3,)):
        made = piston(kind, axes, chains)
        TERMS += [
            pytest.param(made, letter, start(made, batch), id=f"{kind}-{letter}-{len(batch)}")
            for letter in (made.terms if batch else "VS")
        ]


@pytest.mark.parametrize(("dynamics", "letter", "state"), TERMS)
class TestTerms(TermContract):
    pass


def strains(batch, axes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 0.06 * torch.rand(*batch, 1, axes, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("batch", [(), (2, 2)], ids=str)
@pytest.mark.parametrize(("kind", "axes"), FORMS)
def test_closed_forms_equal_automatic_differentiation(kind, batch, axes):
    """Of energy, force, W and their products, by the operator, and by torch over all pairs."""
    module, value = read(potential(kind)), strains(batch, axes)
    strain = at(module, value)
    q = strain.dilated(position(batch), torch.exp(value))
    q = q + 3.6 * (not kind.startswith(("tilted", "turned")))
    parameters = list(module.parameters())
    v, c = torch.randn_like(q), torch.randn_like(value)
    force, along = strained_force(module, q, strain)
    expected = energy_at(module, q, strain)
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(strained_energy(module, q, strain), expected, **close)
    values, pullback = strained_vjp(module, q, strain, parameters)
    by_autograd, other = ByAutograd(module).vjp(q, strain, parameters)
    for ours, theirs in zip((force, along, *values), by_autograd * 2, strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    along_q, along_strain, rest = pullback(v, c)
    rest = rest if isinstance(rest, list) else rest.gradient(parameters)
    other_q, other_strain, others = other(v, c)
    for ours, theirs in zip(
        (along_q, along_strain, *rest), (other_q, other_strain, *others), strict=True
    ):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    leaves = [q.clone().requires_grad_(), value.clone().requires_grad_()]
    found = strained_force(module, leaves[0], at(module, leaves[1]))
    total = (found[0] * v).sum() + (found[1] * c).sum()
    grads = torch.autograd.grad(total, [*leaves, *parameters], allow_unused=True)
    for ours, theirs in zip(grads, (along_q, along_strain, *rest), strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "kind",
    # Waves of charges have rows in float32 in test_ewald, and expressions in test_pairs.
    slow_but(
        lambda kind: kind in ("orthogonal", "own", "sum", "bonded", "graph", "network", "sites"),
        [*KINDS, *TILTED],
        # Each has its rows without turns, and expressions have theirs in test_pairs.
        marathon=lambda kind: kind in (*TILTED[1:], "custom", "dispersed", "ewald"),
    ),
)
def test_float32_forms_equal_those_of_float64(kind):
    """Of the parts that read positions of any precision, and of networks that are converted."""
    made, strain = potential(kind), strains((2,), 1)
    q = position((2,)) * torch.exp(strain)
    given = q, strain, torch.randn_like(q), torch.randn_like(strain)
    found = []
    for dtype in (torch.float64, torch.float32):
        networks = kind.endswith(("graph", "network"))
        module = read(made.to(dtype) if networks else made)
        q, e, v, c = (x.to(dtype) for x in given)
        values, pullback = strained_vjp(module, q, at(module, e), [])
        found.append([*values, *pullback(v, c)[:2]])
    # The cotangent of a strain is the difference of sums as large as that of positions.
    scale = max(float(x.detach().abs().max()) for x in found[0])
    for double, single in zip(*found, strict=True):
        assert single.dtype == torch.float32
        # About a hundred rounding errors of float32.
        torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-5 * scale)


def test_a_network_of_another_precision_is_refused():
    module = read(potential("network"))
    with pytest.raises(ValueError, match="parameters of float64 and position is float32"):
        strained_force(module, position().float(), Strain(torch.zeros(1, 1)))


@pytest.mark.parametrize(("kind", "axes"), FORMS)
def test_forces_are_derivatives_of_the_energy(kind, axes):
    """Force and W against central differences of the energy in position and strain."""
    module, value = read(potential(kind)), strains((), axes)
    strain, h = at(module, value), 1e-5
    q = strain.dilated(position(), torch.exp(value))
    force, along = strained_force(module, q, strain)
    direction = torch.randn_like(q)

    def energy(x, e):
        return float(strained_energy(module, x, e).detach())

    slope = (energy(q + h * direction, strain) - energy(q - h * direction, strain)) / (2 * h)
    # The error of the differences is h^2 U''' and eps U / h, 1e-7 of forces near the core.
    assert float((force * direction).sum().detach()) == pytest.approx(-slope, rel=1e-6)
    for a in range(axes):
        e = torch.zeros_like(value)
        e[..., a] = h
        above, below = (
            energy(strain.dilated(q, torch.exp(x)), at(module, value + x)) for x in (e, -e)
        )
        slope = (above - below) / (2 * h)
        assert float(along[..., a].detach()) == pytest.approx(-slope, rel=1e-6)


def test_the_virial_is_that_at_rest():
    """W without strain is the diagonal of the virial of the potential."""
    module, q = potential(), position((2,))
    strain = torch.zeros(2, 1, 3, dtype=torch.float64)
    _, along = strained_force(read(module), q, at(module, strain))
    torch.testing.assert_close(
        along.squeeze(-2), module.virial(q).diagonal(dim1=-2, dim2=-1), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["graph", "turned graph"])
def test_a_graph_has_all_edges_in_boxes_that_move(kind):
    """A walk of boxes and positions, with one list for many steps, against lists of each box."""
    module, generator = read(potential(kind)), torch.Generator().manual_seed(2)
    q, strain = position((2,)), at(module, torch.zeros(2, 1, 3, dtype=torch.float64))
    built = neighbour_list.AllImages._build
    count = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            neighbour_list.AllImages, "_build", lambda *args: count.append(0) or built(*args)
        )
        for _ in range(40):
            move = 0.004 * torch.randn(2, 1, 3, generator=generator, dtype=torch.float64)
            q = strain.dilated(q, torch.exp(move))
            strain = strain._replace(value=strain.value + move)
            q = q + 0.01 * torch.randn(q.shape, generator=generator, dtype=torch.float64)
            found, before = strained_energy(module, q, strain), len(count)
            torch.testing.assert_close(found, energy_at(module, q, strain), rtol=1e-11, atol=0)
            # Those of the energy in each box are not counted.
            del count[before:]
    assert 1 < len(count) < 20


@pytest.mark.parametrize("precision", [None, torch.float32])
def test_a_graph_is_evaluated_once_a_step_for_all_systems(precision):
    """One pass forward and one back give force and W, and the product goes back once more."""
    graph, q = potential("graph").to(precision), position((3,))
    strain, passes = at(graph, strains((3,), 1)), []
    graph.model.register_forward_hook(lambda *args: passes.append("forward"))
    graph.model.readout.register_full_backward_hook(lambda *args: passes.append("back"))
    module = read(graph if precision is None else adjsim.potentials.InPrecision(graph))
    strained_force(module, q, strain)
    assert passes == ["forward", "back"]
    _, pullback = strained_vjp(module, q, strain, list(module.parameters()))
    assert passes == ["forward", "back"] * 2
    pullback(q, strain.value)
    assert passes.count("forward") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tilted", "axes"), [(False, 3), pytest.param(True, 1, marks=pytest.mark.slow), (True, 3)]
)
def test_lists_hold_all_pairs_in_boxes_that_move(tilted, axes):
    """A walk of box and positions, listed, against all pairs of each box: the same sums."""
    generator = torch.Generator().manual_seed(2)
    side = 7
    box = torch.full((3,), float(side), dtype=torch.float64)
    if tilted:
        box = torch.diag(box) + torch.tensor([[0, 0, 0], [1.5, 0, 0], [-1.0, 1.2, 0]])
    lattice = torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 3)
    module = read(adjsim.LennardJones(cutoff=2.5, box=box))
    assert module.path(lattice) == "neighbour list"
    q = lattice @ (box if tilted else torch.diag(box)) / side
    strain = at(module, torch.zeros(1, axes, dtype=torch.float64))
    for step in range(40):
        # Now and then a jump that no list outlives, and mostly moves of a tenth of the skin.
        scale = 0.1 if step % 13 == 12 else 0.01
        move = scale * torch.randn(1, axes, generator=generator, dtype=torch.float64)
        move = move.clamp(min=-0.02 - strain.value.amin())
        q = strain.dilated(q, torch.exp(move)) + 0.01 * torch.randn(
            q.shape, generator=generator, dtype=torch.float64
        )
        strain = strain._replace(value=strain.value + move)
        force, along = strained_force(module, q, strain)
        expected = dense.strained_force(module, q, strain)
        torch.testing.assert_close(force, expected[0], rtol=1e-10, atol=1e-9)
        torch.testing.assert_close(along, expected[1], rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("tilted", [False, True])
def test_exact_sums_do_not_depend_on_how_pairs_are_found(tilted):
    """Rounded contributions: the operator, its list and torch give the same bits of F and W."""
    box = torch.full((3,), 9.0, dtype=torch.float64)
    if tilted:
        box = torch.diag(box) + torch.tensor([[0, 0, 0], [2.0, 0, 0], [-1.0, 1.5, 0]])
    lattice = torch.cartesian_prod(*[torch.arange(9, dtype=torch.float64)] * 3)[:700]
    q = lattice + 0.1 * torch.randn(700, 3, generator=torch.Generator().manual_seed(0)).double()
    strain = Strain.of(box, torch.tensor([[0.01, 0.03, -0.02]], dtype=torch.float64))
    rounding = Rounding(torch.full((1, 1, 1), 2.0**-30, dtype=torch.float64))
    roundings = Roundings(rounding, rounding)
    found = [
        strained_force(
            read(adjsim.LennardJones(cutoff=2.5, box=box, skin=skin)), q, strain, roundings
        )
        for skin in (0.1, 0.6)
    ]
    module = read(adjsim.LennardJones(cutoff=2.5, box=box))
    found.append(dense.strained_force(module, q, strain, roundings))
    for force, along in found[1:]:
        assert torch.equal(force, found[0][0])
        assert torch.equal(along, found[0][1])


@pytest.mark.parametrize("name", ["strain", "strain_momentum"])
def test_a_strain_of_another_shape_is_refused(name):
    dynamics = piston("orthogonal", "each")
    state = start(dynamics, (2,))
    state = state._replace(**{name: getattr(state, name)[..., :1]})
    solver = adjsim.Splitting(dynamics.scheme, 0.01)
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 1, 1\); it must be \(2, 1, 3\)"):
        adjsim.simulate(dynamics, state, [0.0, 0.1], solver=solver)


@pytest.mark.parametrize(
    ("kind", "axes", "settings"),
    [
        ("orthogonal", "isotropic", {"friction": 0.0}),
        ("orthogonal", "isotropic", {"friction": 0.0, "tail": True}),
        ("orthogonal", "each", {"friction": 0.0, "tail": True}),
        ("orthogonal", "isotropic", {"chains": True, "length": 2}),
        ("orthogonal", "each", {"chains": True}),
        ("turned", "each", {"friction": 0.0, "tail": True}),
        ("turned bonded", "each", {"chains": True}),
    ],
)
def test_the_enthalpy_is_conserved_by_the_drift(kind, axes, settings):
    """With that of piston and chains."""
    dynamics = piston(kind, axes, **settings)
    state = disturbed(start(dynamics, (2,)))
    state = state._replace(strain_momentum=state.strain_momentum + 1.3)
    leaves = type(state)(*(x.requires_grad_() for x in state))
    grads = torch.autograd.grad(dynamics.invariant(leaves).sum(), leaves)
    rates = dynamics.drift(0.0, state)
    changes = [(g * r).flatten(1).sum(-1) for g, r in zip(grads, rates, strict=True)]
    change, size = sum(changes), sum(x.abs() for x in changes)
    assert bool((change.abs() < 1e-12 * size).all())


@pytest.mark.parametrize(
    ("kind", "axes"), [("orthogonal", "isotropic"), ("orthogonal", "each"), ("turned", "each")]
)
def test_the_drift_keeps_the_isothermal_isobaric_density(kind, axes):
    """Its divergence is minus the rate of log V, so V exp(-invariant/kT) stays as it is."""
    dynamics = piston(kind, axes, friction=0.0)
    state = start(dynamics)._replace(strain_momentum=1.3 * torch.ones_like(start(dynamics).strain))
    state = disturbed(state)
    sizes = [x.numel() for x in state]

    def rate(flat):
        parts = (x.reshape(y.shape) for x, y in zip(flat.split(sizes), state, strict=True))
        return torch.cat([x.flatten() for x in dynamics.drift(0.0, type(state)(*parts))])

    flat = torch.cat([x.detach().flatten() for x in state])
    divergence = torch.autograd.functional.jacobian(rate, flat).diagonal().sum()
    strain = state.strain.detach().requires_grad_()
    (slope,) = torch.autograd.grad(dynamics.volume(state._replace(strain=strain)).log(), strain)
    expected = -(slope * dynamics.drift(0.0, state).strain).sum()
    torch.testing.assert_close(divergence, expected.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("axes", ["isotropic", "each"])
def test_the_equations_are_those_of_martyna_tobias_and_klein(axes):
    """As printed: for the box alone, in terms of the pressure tensor (1994, their equation 2.7)."""
    dynamics = piston(axes=axes, friction=0.0)
    state = start(dynamics)._replace(strain_momentum=torch.full((1, 1), 1.5).double())
    if axes == "each":
        state = state._replace(strain_momentum=torch.tensor([[1.5, -0.4, 0.8]]).double())
    q, p, e, rate = (x.detach() for x in state)
    dof, d, m = 24, 3, 1.4
    W = (dof + d) * 0.6 * 0.5**2 / (1 if axes == "isotropic" else d)
    v = rate / W
    found = dynamics.drift(0.0, state)
    force, along = strained_force(read(dynamics.potential), q, at(dynamics.potential, e))
    spread = v.sum() * (d if axes == "isotropic" else 1) / dof
    torch.testing.assert_close(found.position, p / m + v * q)
    torch.testing.assert_close(found.momentum, force - (v + spread) * p)
    volume = dynamics.volume(state)
    twice = (p**2 / m).sum(-2)
    if axes == "isotropic":
        internal = (twice.sum() + along.sum()) / (d * volume)
        expected = d * volume * (internal - 0.3) + d / dof * twice.sum()
    else:
        expected = twice + along - volume * 0.3 + twice.sum() / dof
    torch.testing.assert_close(found.strain_momentum.flatten(), expected.detach().flatten())


def test_boxes_and_volumes():
    box = torch.tensor([[3.9, 4.0, 4.1], [3.8, 3.9, 4.0]], dtype=torch.float64)
    own = torch.tensor([3.6, 3.7, 3.8], dtype=torch.float64)
    each = piston(axes="each")
    state = each.init(position((2,)), box=box)
    torch.testing.assert_close(each.box(state), box)
    torch.testing.assert_close(each.volume(state), box.prod(-1))
    whole = piston()
    state = whole.init(position((2,)), box=own * 1.1)
    torch.testing.assert_close(whole.box(state), (own * 1.1).expand(2, 3))
    with pytest.raises(ValueError, match="another shape"):
        whole.init(position((2,)), box=box)
    single = whole.box(whole.init(position((2,)).float(), box=own * 1.1))
    again = whole.init(position((2,)).float(), box=single)
    torch.testing.assert_close(whole.box(again), single, rtol=1e-6, atol=0)
    for axes, factors in (("isotropic", [1.05] * 3), ("each", [1.05, 1.02, 1.1])):
        tilted = piston("turned", axes)
        rows = tilted.potential.box * torch.tensor(factors).double().unsqueeze(-1)
        state = tilted.init(position(), box=rows)
        torch.testing.assert_close(tilted.box(state), rows)
        torch.testing.assert_close(tilted.volume(state), torch.linalg.det(rows).abs())


class HiddenBox(torch.nn.Module):
    """Pairs in a box that nobody can stretch."""

    def forward(self, position):
        box = torch.tensor([3.6, 3.7, 3.8], dtype=position.dtype)
        d = position.unsqueeze(-2) - position.unsqueeze(-3)
        d = d - box * torch.round(d / box)
        return torch.exp(-(d**2).sum(-1)).sum((-1, -2))


class StaleInverse(OwnPairs):
    """A module that keeps a value that follows from its box."""

    def __init__(self, box):
        super().__init__(box)
        self.register_buffer("inverse", 1 / self.box)

    def forward(self, position):
        d = position.unsqueeze(-2) - position.unsqueeze(-3)
        d = d - self.box * torch.round(d.detach() * self.inverse)
        return torch.exp(-(d**2).sum(-1)).sum((-1, -2))


class Capped(adjsim.LennardJones):
    """A force that is not minus the derivative of the energy."""

    def force(self, position, rounding=None):
        return super().force(position).clamp(-1, 1)


class Wall(torch.nn.Module):
    def forward(self, position):
        return (position**2).sum((-1, -2))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: piston(axes="both"), ValueError, 'axes must be "isotropic" or "each"'),
        (lambda: adjsim.LangevinPiston(adjsim.LennardJones()), ValueError, "needs a periodic box"),
        (lambda: piston(friction=-1.0), ValueError, "friction must not be negative"),
        (lambda: piston(friction=[1.0] * 8), ValueError, "give that of the piston"),
        (
            lambda: adjsim.LangevinPiston(OwnPairs([3.0])).init(torch.zeros(2, 1)),
            ValueError,
            "two or three dimensions",
        ),
        (
            lambda: adjsim.LangevinPiston(adjsim.LennardJones(cutoff=1.0, box=[3.0, 3.0])).init(
                position()
            ),
            ValueError,
            "box has 2 dimensions and position 3",
        ),
        (
            lambda: piston(mass=[1.0] * 7 + [torch.inf]).init(position()),
            ValueError,
            "finite mass",
        ),
        (
            lambda: adjsim.LangevinPiston(potential() + Wall()).init(position()),
            ValueError,
            "points in space",
        ),
        (
            lambda: piston().init(position(), box=[3.0, 3.1, 3.2]),
            ValueError,
            "box has another shape",
        ),
        (
            lambda: piston().init(position() * 0.85, box=[0.85 * x for x in (3.6, 3.7, 3.8)]),
            ValueError,
            "cutoff 1.6 is above half the smallest width of the box, 1.53, at the density 0.2573",
        ),
        (
            lambda: adjsim.LangevinPiston(
                potential() + adjsim.PositionRestraint([0], 1.0, position()[:1])
            ).init(position()),
            ValueError,
            "holds them at points in space",
        ),
        (
            lambda: adjsim.LangevinPiston(StaleInverse([3.6, 3.7, 3.8])).init(position()),
            ValueError,
            "keeps a box, or a value that follows from it",
        ),
        (
            # The part, at the places of sites too, which an atom that is moved takes with it.
            lambda: adjsim.LangevinPiston(
                SitedForceField(virtual_sites(), own=StaleInverse([3.6, 3.7, 3.8]))
            ).init(position()),
            ValueError,
            "StaleInverse keeps a box, or a value that follows from it",
        ),
        (
            lambda: adjsim.LangevinPiston(Capped(cutoff=1.6, box=[3.6, 3.7, 3.8])).init(position()),
            TypeError,
            "not minus the derivative",
        ),
        (
            lambda: adjsim.LangevinPiston(OwnPairs([3.6, 3.7, 3.8]), tail=True),
            ValueError,
            "no part of OwnPairs is a pair potential with a cutoff",
        ),
        (
            lambda: adjsim.LangevinPiston(
                force_field(torch.tensor([3.6, 3.7, 3.8], dtype=torch.float64)), tail=True
            ),
            ValueError,
            "of atoms without virtual sites. With sites let OpenMM's force correct for them",
        ),
        (
            lambda: adjsim.LangevinPiston(potential() + HiddenBox()).init(
                position() * 1.1, box=[3.96, 4.07, 4.18]
            ),
            ValueError,
            "has the period of the box, and it has no box",
        ),
        (
            lambda: adjsim.LangevinPiston(potential() + HiddenBox()).init(position()),
            ValueError,
            "has the period of the box, and it has no box",
        ),
    ],
)
def test_what_no_piston_takes(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("seed", range(3))
def test_rounding_in_float32_is_no_box_that_is_kept(seed):
    """An atom that is moved by 25 rows is rounded, and so are energies in another precision."""
    pairs = adjsim.LennardJones(cutoff=1.6, box=[3.6, 3.7, 3.8])
    single = adjsim.potentials.InPrecision(pairs, torch.float32)
    adjsim.LangevinPiston(pairs, kT=0.6).init(position(seed=seed).float())
    adjsim.LangevinPiston(single, kT=0.6).init(position(seed=seed))


def test_a_potential_in_another_precision_has_the_box_of_its_sum():
    def pairs(box):
        return adjsim.LennardJones(cutoff=1.6, box=box)

    rows = [3.6, 3.7, 3.8]
    single = adjsim.potentials.InPrecision(pairs(rows).to(torch.float32))
    for other in (pairs([4.6, 3.7, 3.8]), pairs([3.6, 3.7])):
        for parts in ((single, other), (other, single)):
            with pytest.raises(ValueError, match="a sum has one box"):
                sum(parts[1:], parts[0])
    q = position(seed=0)
    for both in (single + pairs(rows), pairs(rows) + single):
        torch.testing.assert_close(both(q), 2 * pairs(rows)(q), rtol=1e-5, atol=1e-5)
    found, expected = (
        adjsim.pressure(dynamics, dynamics.init(q, torch.zeros_like(q)))
        for dynamics in map(adjsim.Hamiltonian, (single, pairs(rows)))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_a_potential_declares_holds_in_another_precision():
    pairs = adjsim.LennardJonesMixture([0] * 8, [1.0], [1.0], cutoff=1.6, box=[3.6] * 3)
    bond = adjsim.HarmonicBond([[0, 1]], 1.0, 1.0)
    single, q = adjsim.potentials.InPrecision, position(seed=0)
    corrected = single(pairs + DispersionCorrection(pairs))
    with pytest.raises(ValueError, match="the correction of a InPrecision follows the box"):
        adjsim.LangevinPiston(pairs + corrected, kT=0.6, tail=True).init(q)
    # Bonds have no box, and need none beside pairs that have one.
    found, expected = (
        adjsim.pressure(dynamics, dynamics.init(q, torch.zeros_like(q)))
        for dynamics in (adjsim.Hamiltonian(pairs + x) for x in (single(bond), bond))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_molecule_in_a_plane_of_the_box_is_not_periodic():
    """Its torsion stays the same as an atom moves along a row of the box."""
    places = position(seed=0)
    places[:4] = torch.tensor([[0.0, 1.0, 0.02], [0, 0, 0], [1, 0, 0], [1, 1, 0]])
    places[4] = torch.tensor([0.7, 0.4, 0.9])
    torsion = adjsim.PeriodicTorsion([[0, 1, 2, 3]], 1.0, 1, 0.0)
    adjsim.LangevinPiston(potential() + torsion, kT=0.6).init(places)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_forces_that_vanish_by_symmetry_are_no_wrong_forces(dtype):
    """In a perfect crystal a force is a sum of rounding errors, which two formulas have apart."""

    class OwnForce(OwnPairs, adjsim.potentials.Potential):
        def force(self, position):
            d = position.unsqueeze(-2) - position.unsqueeze(-3)
            d = d - self.box.to(d) * torch.round(d / self.box.to(d))
            return (2 * self.k * d * torch.exp(-(d**2).sum(-1, keepdim=True))).sum(-2).to(d)

    crystal = torch.cartesian_prod(*[torch.arange(5.0)] * 3).to(dtype) * 1.1 + 0.3
    adjsim.LangevinPiston(OwnForce([5.5] * 3)).init(crystal)


def test_another_shape_is_seen_in_any_unit():
    """Lengths in metres are below tolerances of lengths in nanometres."""
    rows, metre = potential("tilted").box, 1e-9
    pairs = adjsim.LennardJones(1e-21, 0.95 * metre, cutoff=1.6 * metre, box=rows * metre)
    dynamics = adjsim.LangevinPiston(pairs, 1e-26, 1e-21, tau=1e-12, friction=1e12, axes="each")
    with pytest.raises(ValueError, match="another shape"):
        dynamics.init(position() * metre, box=(rows - 2 * rows.tril(-1)) * metre)


def test_a_pressure_in_another_unit_is_asked_about():
    class Own(OwnPairs, adjsim.potentials.Potential):
        energy_unit = "eV"

    with pytest.raises(ValueError, match=r"1\.6 million bar\. Is it in another unit"):
        adjsim.LangevinPiston(Own([3.6, 3.7, 3.8]), pressure=1.0)


@pytest.mark.parametrize("compile", [False, True])
def test_a_box_that_becomes_too_small_stops_the_run(compile):
    """Large pressure: the error names the step, and the density."""
    dynamics = piston(pressure=40.0, friction=0.0)
    with pytest.raises(ValueError, match=r"at the density .* in step \d+"):
        adjsim.simulate(
            dynamics,
            start(dynamics, (2,)),
            torch.tensor([0.0, 2.0]),
            solver=adjsim.Splitting(dynamics.scheme, 0.01),
            compile=compile,
        )


def test_observables_are_those_of_the_box_of_the_state():
    """The pressure by differences of the energy, and the frames of ASE."""
    from ase import units

    from adjsim.io import to_ase
    from adjsim.io.ase import Structure

    dynamics = piston()
    state = start(dynamics, (2,))
    found, h = adjsim.pressure(dynamics, state).detach(), 1e-5

    def energy(e):
        change = torch.full((1, 1), e, dtype=torch.float64)
        moved = state.position * torch.exp(change)
        strain = at(dynamics.potential, state.strain + change)
        return strained_energy(dynamics.potential, moved, strain).detach()

    volume = dynamics.volume(state)
    slope = (energy(h) - energy(-h)) / (2 * h)
    twice = 2 * dynamics.kinetic_energy(state).detach()
    # Truncation and rounding of the differences are below 1e-6.
    torch.testing.assert_close(found, (twice - slope) / (3 * volume), rtol=1e-6, atol=1e-8)
    mass = 8 * 1.4
    torch.testing.assert_close(dynamics.density(state).detach(), mass / volume)
    for read_of in (adjsim.pressure, adjsim.stress):
        with pytest.raises(TypeError, match="does not move one"):
            read_of(adjsim.Langevin(dynamics.potential), state)
    single = type(state)(*(x[0] for x in state))
    run = adjsim.simulate(
        dynamics, single, [0.0, 0.05, 0.1], solver=adjsim.Splitting(dynamics.scheme, 0.01)
    )
    box = dynamics.potential.box
    structure = Structure(single.position, single.momentum, torch.ones(8), box, ("Ar",) * 8)
    frames = to_ase(run, structure)
    volumes = [frame.get_volume() for frame in frames]
    assert volumes == pytest.approx(dynamics.volume(run).tolist())
    assert volumes[0] != pytest.approx(volumes[2], rel=1e-3)
    assert units.bar == pytest.approx(1e5 * units.Pascal)


def test_response_by_fluctuations():
    v = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 9.0]], dtype=torch.float64)
    h = torch.tensor([[2.0, 1.0], [1.0, 1.0], [5.0, 4.0]], dtype=torch.float64)
    found = adjsim.volume_compressibility(v, 2.0)
    torch.testing.assert_close(found, v.var(0) / (v.mean(0) * 2))
    covariance = [torch.cov(torch.stack([a, b]))[0, 1] for a, b in zip(v.T, h.T, strict=True)]
    expected = torch.stack(covariance) / (4 * v.mean(0))
    torch.testing.assert_close(adjsim.thermal_expansion(v, h, 2.0), expected)
    with pytest.raises(ValueError, match="enthalpy must be"):
        adjsim.thermal_expansion(v, h[:, 0], 2.0)
    with pytest.raises(ValueError, match="at least two frames"):
        adjsim.volume_compressibility(v[:1], 2.0)


class Constant(adjsim.LennardJones, inherits_forces=True):
    def forward(self, position):
        return super().forward(position) + 3.0


class Shared(torch.nn.Module):
    """Two parts with one box, the first of which has another name for it."""

    def __init__(self):
        super().__init__()
        self.second = potential()
        self.first = torch.nn.Module()
        self.first.register_buffer("cell", self.second.box)

    def forward(self, position):
        d = position.unsqueeze(-2) - position.unsqueeze(-3)
        d = d - self.first.cell * torch.round(d.detach() / self.first.cell)
        return self.second(position) + torch.exp(-(d**2).sum(-1)).sum((-1, -2))


@pytest.mark.parametrize(
    "make",
    [
        lambda box: Constant(cutoff=1.6, box=box),
        lambda box: adjsim.ReactionField([0.5, -0.5] * 4, cutoff=1.6, box=box),
        lambda box: adjsim.Wolf([0.5, -0.5] * 4, alpha=1.0, cutoff=1.6, box=box),
        lambda box: potential() + adjsim.Coulomb([0.5, -0.5] * 4),
        lambda box: Shared(),
        lambda box: OwnPairs(box),
    ],
)
def test_energies_are_those_of_the_potential_in_the_box(make):
    """With a self energy, a part without a box, a box of two names; in a plain evaluation too."""
    own = [3.6, 3.7, 3.8]
    module, q = make(own), position() * 1.05
    dynamics = adjsim.LangevinPiston(module, pressure=0.3)
    box = torch.tensor(own, dtype=torch.float64) * 1.05
    state = dynamics.init(q, box=box, generator=0)
    expected = read(module, box)(q) + 0.3 * box.prod()
    torch.testing.assert_close(dynamics.potential_energy(state), expected, rtol=1e-12, atol=1e-12)


def test_a_module_without_trained_numbers_keeps_no_graph():
    """Nor does it seem to capture a parameter, which FiniteDifference would refuse."""
    module = OwnPairs([3.6, 3.7, 3.8])
    module.k.requires_grad_(False)
    dynamics = adjsim.LangevinPiston(module, pressure=parameter(0.3))
    state, solver = dynamics.init(position((4,)), generator=0), adjsim.Splitting("BVSAOASVB", 0.01)
    force, along = strained_force(read(module), state.position, at(module, state.strain))
    assert not force.requires_grad
    assert not along.requires_grad
    simulation = adjsim.Simulation(
        dynamics,
        lambda count, generator: dynamics.init(position((count,)), generator=generator),
        [0.0, 0.1],
        solver=solver,
    )
    estimators = adjsim.FiniteDifference(1e-4), adjsim.Pathwise(adjsim.ReversibleAdjoint())
    found, other = (
        estimator(
            simulation,
            adjsim.Final(dynamics.volume),
            replicas=4,
            chunks=2,
            generator=torch.Generator().manual_seed(0),
        )
        for estimator in estimators
    )
    for name, value in other.grad.items():
        torch.testing.assert_close(found.grad[name], value, rtol=1e-6, atol=1e-8)


def test_transforms_of_functions():
    """torch.func.grad through a run with an own module, against autograd."""
    dynamics = adjsim.LangevinPiston(OwnPairs([3.6, 3.7, 3.8]), friction=0.5)
    state, solver = dynamics.init(position(), position() * 0), adjsim.Splitting("BVSAOASVB", 0.01)

    def volume(momentum):
        end = adjsim.simulate(
            dynamics, state._replace(momentum=momentum), [0.0, 0.05], solver=solver, generator=1
        ).final
        return dynamics.volume(end)

    p = 0.1 * position(seed=2)
    by_transform = torch.func.grad(volume)(p)
    leaf = p.clone().requires_grad_()
    (expected,) = torch.autograd.grad(volume(leaf), leaf)
    torch.testing.assert_close(by_transform, expected, rtol=1e-10, atol=1e-12)


def test_continuous_solvers_stop_at_the_limit_too():
    dynamics = piston(pressure=40.0)
    with pytest.raises(ValueError, match="at the density"):
        adjsim.simulate(
            dynamics,
            start(dynamics),
            [0.0, 0.3],
            solver=adjsim.SDESolver(dt=0.002),
            generator=1,
        )


def test_a_slow_piston_moves_on_the_lattice_too():
    """Its factor of one step is nearer to one than the lattice's fractions are to each other."""
    dynamics = piston(tau=3000.0, friction=0.0)
    state = start(dynamics)
    rate = dynamics.piston.mass(state).detach() * -2e-6
    state = state._replace(strain_momentum=rate.expand_as(state.strain).clone())
    plain, exact = (
        adjsim.simulate(
            dynamics, state, [0.0, 1.0], solver=adjsim.Splitting(dynamics.scheme, 0.01, exact=exact)
        ).final
        for exact in (False, True)
    )
    change = float((plain.strain - state.strain).detach())
    assert abs(change) < 1e-5
    assert float((exact.strain - state.strain).detach()) == pytest.approx(change, rel=1e-3)
    torch.testing.assert_close(exact.position, plain.position, rtol=1e-6, atol=1e-6)


def test_pairs_beyond_the_cutoff_count_once():
    mixture = potential("mixture")
    whole = mixture + DispersionCorrection(mixture)
    with pytest.raises(ValueError, match="twice"):
        adjsim.LangevinPiston(whole, tail=True)
    liquid = adjsim.LennardJones(cutoff=1.6, box=[3.6, 3.7, 3.8])
    plain, tailed = (adjsim.LangevinPiston(liquid, tail=tail) for tail in (False, True))
    state = plain.init(position() * 1.1, box=[x * 1.1 for x in (3.6, 3.7, 3.8)])
    _, tail = adjsim.potentials.tail_corrections(liquid, 8, float(plain.volume(state)))
    change = adjsim.pressure(tailed, state) - adjsim.pressure(plain, state)
    assert float(change) == pytest.approx(float(tail), rel=1e-10)


@pytest.mark.parametrize(
    ("kind", "axes"),
    [("orthogonal", "each"), *((x, "isotropic") for x in ("tilted", "mixture", "ewald", "mesh"))],
)
def test_the_stress_in_the_boxes_of_states(kind, axes):
    """Its trace is that of the pressure, and it is the stress of a potential made with the box."""
    dynamics = piston(kind, axes)
    state = start(dynamics, (2, 2))
    found = adjsim.stress(dynamics, state)
    # The mesh that finds the energy's derivative by a stretch is that of the virial.
    torch.testing.assert_close(
        found.diagonal(dim1=-2, dim2=-1).mean(-1), -adjsim.pressure(dynamics, state), rtol=1e-10,
        atol=1e-10,
    )  # fmt: skip
    if kind not in ("ewald", "mesh"):
        boxed = potential(kind)
        boxed.box = dynamics.box(state)[1, 0].detach()
        fixed = adjsim.Langevin(boxed, dynamics.mass)
        other = adjsim.PhaseState(state.position[1, 0], state.momentum[1, 0])
        torch.testing.assert_close(found[1, 0], adjsim.stress(fixed, other), rtol=1e-11, atol=1e-11)
    direction, h = torch.randn_like(state.strain), 1e-5
    strain = state.strain.clone().requires_grad_()
    (slope,) = torch.autograd.grad(
        adjsim.stress(dynamics, state._replace(strain=strain)).sum(), strain
    )
    up, down = (
        adjsim.stress(dynamics, state._replace(strain=state.strain + s * direction)).sum().detach()
        for s in (h, -h)
    )
    # The truncation is h^2/6 times a third derivative of some ten thousand.
    torch.testing.assert_close(
        (slope * direction).sum(), (up - down) / (2 * h), rtol=1e-6, atol=1e-6
    )


def test_the_stress_has_the_tail():
    state = start(piston(), (2,))
    dynamics = piston(tail=True)
    change = adjsim.stress(dynamics, state) - adjsim.stress(piston(), state)
    pressure = adjsim.pressure(dynamics, state) - adjsim.pressure(piston(), state)
    assert bool((pressure < 0).all())
    torch.testing.assert_close(change, -pressure[:, None, None] * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["orthogonal", "tilted"])
def test_radial_distributions_in_the_boxes_of_states(kind):
    """They are the mean of the distributions of single systems, each in its box."""
    dynamics = piston(kind)
    state = start(dynamics, (2, 2))
    q, box, edges = state.position, dynamics.box(state).detach(), torch.linspace(0.8, 1.6, 5)
    found = adjsim.radial_distribution(q, edges, box)
    flat, boxes = q.flatten(0, 1), box.flatten(0, 1)
    alone = [adjsim.radial_distribution(x, edges, b) for x, b in zip(flat, boxes, strict=True)]
    torch.testing.assert_close(found, torch.stack(alone).mean(0), rtol=1e-14, atol=0)
    other = adjsim.radial_distribution(q, edges, dynamics.reference_box)
    assert not torch.allclose(found, other, rtol=0.02)
    smooth = adjsim.smooth_radial_distribution(q, edges, box, width=0.05)
    one = adjsim.smooth_radial_distribution(q[1, 0], edges, box[1, 0], width=0.05)
    torch.testing.assert_close(smooth[1, 0], one, rtol=1e-14, atol=0)
    leaf, h = box.clone().requires_grad_(), 1e-6
    (slope,) = torch.autograd.grad(
        adjsim.smooth_radial_distribution(q, edges, leaf, width=0.05).sum(), leaf
    )
    up, down = (
        adjsim.smooth_radial_distribution(q, edges, box * (1 + s), width=0.05).sum()
        for s in (h, -h)
    )
    # The third derivative is some ten thousand, and h^2/6 times it 1e-9.
    torch.testing.assert_close((slope * box).sum(), (up - down) / (2 * h), rtol=1e-6, atol=1e-7)
    for wrong in (box[0], box[:, :1], box[..., :2]):
        with pytest.raises(ValueError, match="box"):
            adjsim.radial_distribution(q, edges, wrong)
