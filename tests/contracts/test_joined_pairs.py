"""Parts of a sum over the same pairs take one pass over one list, with the numbers of the parts."""

import pytest
import torch
from torch import nn

import adjsim
from adjsim.core.reading import read
from adjsim.core.rounding import Rounding
from adjsim.core.strain import Strain
from adjsim.potentials.base import SumPotential
from adjsim.potentials.pairs.base import JoinedPairs
from adjsim.potentials.strained import strained_force, strained_vjp

ATOMS, SIDE, CUTOFF = 216, 9.0, 2.1
EXCLUSIONS = [[k, k + 1] for k in range(0, ATOMS, 2)]
OPTIONS = {"cutoff": CUTOFF, "box": [SIDE] * 3, "exclusions": EXCLUSIONS}
SPECIES = torch.arange(ATOMS) % 3


def start():
    generator = torch.Generator().manual_seed(1)
    grid = torch.cartesian_prod(*[torch.arange(6.0)] * 3) * SIDE / 6
    return grid + 0.2 * torch.rand(ATOMS, 3, generator=generator)


def mixture(species=SPECIES, **options):
    numbers = [nn.Parameter(torch.tensor(x)) for x in ([0.3, 0.2, 0.0], [1.0, 0.9, 1.1])]
    return adjsim.LennardJonesMixture(species, *numbers, **{**OPTIONS, **options})


def charges():
    return nn.Parameter((-1.0) ** torch.arange(ATOMS) * (1 + 0.1 * SPECIES))


def ewald(**options):
    return adjsim.ParticleMeshEwald(charges(), tolerance=1e-3, **{**OPTIONS, **options})


def field(**options):
    return adjsim.ReactionField(charges(), **{**OPTIONS, **options})


def dispersion():
    return adjsim.potentials.LennardJonesMesh(
        SPECIES,
        *(nn.Parameter(torch.tensor(x)) for x in ([0.3, 0.2, 0.1], [1.0, 0.9, 1.1])),
        **OPTIONS,
    )


SUMS = {
    "mesh": lambda: (mixture(), ewald()),
    "mesh first": lambda: (ewald(), mixture()),
    "two meshes": lambda: (dispersion(), ewald()),
    "reaction field": lambda: (mixture(), adjsim.Harmonic(0.1), field()),
    "switched": lambda: (mixture(truncation=adjsim.potentials.Switched(1.8)), field()),
}


def is_joined(total, position):
    return any(isinstance(x, JoinedPairs) for x in read(total).summands(position))


@pytest.mark.parametrize("name", SUMS)
def test_forces_and_products_are_those_of_the_parts(name):
    """Sums of some hundred pairs an atom, in another order: relative errors of 1e-13."""
    parts, q = SUMS[name](), start()
    total = SumPotential(*parts)
    assert is_joined(total, q)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(2))
    parameters = list(total.parameters())
    value, product = total.force_vjp(q, parameters)
    along, rest = product(v)
    gradient = rest.gradient(parameters)
    separate = [part.force_vjp(q, list(part.parameters())) for part in parts]
    found = [product(v) for _, product in separate]
    expected = [
        y
        for part, (_, x) in zip(parts, found, strict=True)
        for y in (x if isinstance(x, list) else x.gradient(list(part.parameters())))
    ]
    pairs = [
        (value, sum(x for x, _ in separate)),
        (total.force(q).detach(), value),
        (along, sum(x for x, _ in found)),
        *zip(gradient, expected, strict=True),
    ]
    for x, y in pairs:
        assert float(y.abs().max()) > 1e-3
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)
    # Through the energy, whose parts are summed apart.
    x = q.clone().requires_grad_()
    (slope,) = torch.autograd.grad(total(x), x)
    torch.testing.assert_close(-slope, value, rtol=1e-10, atol=1e-11)


def test_second_derivatives_of_forces_are_those_of_the_parts():
    parts, x = SUMS["switched"](), start().requires_grad_()
    total = SumPotential(*parts)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    inputs = [x, *total.parameters()]

    def second(force):
        (along,) = torch.autograd.grad(force, x, v, create_graph=True)
        return torch.autograd.grad((along * v).sum(), inputs)

    expected = second(sum(part.force(x) for part in parts))
    for found, y in zip(second(total.force(x)), expected, strict=True):
        torch.testing.assert_close(found, y, rtol=1e-9, atol=1e-9 * float(y.abs().max()))


def test_rows_of_cotangents_go_through_joined_pairs_and_a_mesh():
    total, x = mixture() + ewald(), start().requires_grad_()
    rows = torch.randn(2, *x.shape, generator=torch.Generator().manual_seed(2))
    force, inputs = total.force(x), [x, *total.parameters()]
    found = torch.autograd.grad(force, inputs, rows, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(force, inputs, row, retain_graph=True) for row in rows]
    for y, *expected in zip(found, *each, strict=True):
        torch.testing.assert_close(y, torch.stack(expected), rtol=1e-10, atol=1e-11)


def test_forces_along_strains_are_those_of_the_parts():
    parts, q = SUMS["mesh"](), start()
    total = SumPotential(*parts)
    strain = Strain(torch.tensor([[0.01, -0.02, 0.015]]))
    v, c = torch.randn_like(q), torch.randn(1, 3)
    wanted = list(total.parameters())
    values, product = strained_vjp(total, q, strain, wanted)
    separate = [strained_vjp(part, q, strain, list(part.parameters())) for part in parts]
    for x, y in zip(values, zip(*(x for x, _ in separate), strict=True), strict=True):
        torch.testing.assert_close(x, sum(y), rtol=1e-10, atol=1e-11)
    for x, y in zip(strained_force(total, q, strain), values, strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=1e-12, atol=1e-12)
    found = [product(v, c)[:2], *(x(v, c)[:2] for _, x in separate)]
    for x, *y in zip(*found, strict=True):
        torch.testing.assert_close(x, sum(y), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "parts",
    [
        lambda: (mixture(cutoff=2.0), ewald()),
        lambda: (mixture(exclusions=EXCLUSIONS[1:]), ewald()),
        lambda: (mixture(exclusions=None), ewald()),
        lambda: (mixture(skin=0.3), field()),
        lambda: (mixture(), mixture(species=SPECIES.flip(0))),
        lambda: (adjsim.LennardJones(torch.ones(ATOMS, ATOMS), 1.0, **OPTIONS), mixture()),
    ],
    ids=["cutoff", "exclusions", "no exclusions", "skin", "species", "table of atoms"],
)
def test_other_pairs_are_summed_apart(parts):
    total = SumPotential(*parts())
    assert not is_joined(total, start())


def test_tables_of_two_species_are_not_joined_to_one_list():
    """Each may be joined to charges, which have no tables."""
    parts, q = (field(), mixture(), mixture(species=SPECIES.flip(0)), mixture()), start()
    total = SumPotential(*parts)
    (joint,) = (x for x in read(total).summands(q) if isinstance(x, JoinedPairs))
    assert len(joint.members) == 3
    expected = sum(x.force(q) for x in parts)
    torch.testing.assert_close(total.force(q), expected, rtol=1e-10, atol=1e-11)


def test_exclusions_and_species_are_inputs_of_compiled_loops():
    """Others that parts share as before run in the same loop; others of one part do not."""
    lj, coulomb, q = mixture(), field(), start()
    dynamics = adjsim.Hamiltonian(lj + coulomb, mass=20.0)

    def run(compile):
        found = adjsim.simulate(
            dynamics, dynamics.init(q, torch.zeros_like(q)), [0.0, 0.1],
            solver=adjsim.VelocityVerlet(0.02), compile=compile,
        )  # fmt: skip
        return found.final.position.detach(), found.stats

    run(True)
    for parts, traced in (((lj, coulomb), False), ((lj,), True)):
        for part in parts:
            part.exclusions += 1
            part.exclusions %= ATOMS
        if not traced:
            lj.species.copy_(lj.species.flip(0))
        (found, stats), (expected, _) = run(True), run(False)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert (stats["compile_seconds"] > 0) == traced


def test_a_few_atoms_are_summed_apart():
    """Compiled loops evaluate all pairs themselves."""
    options = {"cutoff": 4.0, "box": [9.0] * 3}
    total = adjsim.LennardJones(**options) + adjsim.Yukawa(**options)
    assert not is_joined(total, torch.rand(20, 3) * 9)


def test_a_potential_with_a_force_of_its_own_is_summed_apart():
    class Halved(adjsim.LennardJones):
        def force(self, position, rounding=None):
            return 0.5 * super().force(position)

    total = SumPotential(Halved(0.3, 1.0, **OPTIONS), field())
    q = start()
    assert not is_joined(total, q)
    half = 0.5 * adjsim.LennardJones(0.3, 1.0, **OPTIONS).force(q) + field().force(q)
    torch.testing.assert_close(total.force(q), half, rtol=1e-12, atol=1e-12)


def test_an_ewald_sum_with_an_energy_of_its_own_is_summed_apart():
    class Held(adjsim.ParticleMeshEwald):
        def forward(self, position):
            return super().forward(position) + position.square().sum((-1, -2))

    own, q = Held(charges(), tolerance=1e-3, **OPTIONS), start()
    total = mixture() + own
    assert not is_joined(total, q)
    expected = mixture().force(q) + ewald().force(q) - 2 * q
    torch.testing.assert_close(total.force(q), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [field, ewald])
def test_a_force_that_an_object_is_given_is_not_joined(make):
    own, q = make(), start()
    own.force = lambda position, rounding=None: 0 * position
    total = mixture() + own
    assert not is_joined(total, q)
    torch.testing.assert_close(total.force(q), mixture().force(q), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [True, False])
def test_parts_with_kernels_are_not_joined_to_one_without(first):
    """All would be evaluated by torch. The others are still joined."""

    class Unprinted(adjsim.potentials.PairPotential):
        def pair_energy(self, s):
            return torch.special.i0(s) * torch.exp(-s)

    own, parts, q = Unprinted(**OPTIONS), [mixture(), field()], start()
    total = SumPotential(own, *parts) if first else SumPotential(*parts, own)
    joint, other = read(total).summands(q)
    assert [type(x) for x in joint.members] == [type(x) for x in parts]
    assert joint.path(q) == "neighbour list"
    assert isinstance(other, Unprinted)
    expected = sum(x.force(q) for x in total.parts)
    torch.testing.assert_close(total.force(q), expected, rtol=1e-12, atol=1e-12)


def test_converted_parts_keep_one_box():
    """Each part converts its tensors by itself."""
    total, q = mixture() + field(), start().float()
    total.float()
    assert is_joined(total, q)
    assert total.parts[0].box is total.parts[1].box
    expected = sum(x.force(q) for x in total.parts)
    torch.testing.assert_close(total.force(q), expected, rtol=1e-4, atol=1e-4)


def test_changes_between_evaluations_are_read():
    """Nothing of the parts is stored beside them."""
    lj, coulomb, q = mixture(), field(), start()
    total = lj + coulomb
    before = total.force(q).detach()
    with torch.no_grad():
        lj.sigma[0] = 0.8
        coulomb.charge *= 1.2
    after = (lj.force(q) + coulomb.force(q)).detach()
    torch.testing.assert_close(total.force(q).detach(), after, rtol=1e-12, atol=1e-12)
    assert float((after - before).abs().max()) > 1e-2
    total.box = torch.tensor([9.3] * 3)
    expected = (lj.force(q) + coulomb.force(q)).detach()
    torch.testing.assert_close(total.force(q).detach(), expected, rtol=1e-12, atol=1e-12)
    coulomb.constant = 2.0
    expected = (lj.force(q) + coulomb.force(q)).detach()
    torch.testing.assert_close(total.force(q).detach(), expected, rtol=1e-12, atol=1e-12)


def test_a_frozen_number_of_a_part_has_no_gradient():
    total, q = mixture() + ewald(), start()
    total.parts[0].epsilon.requires_grad_(False)
    wanted = [total.parts[1].charge]
    _, product = total.force_vjp(q, wanted)
    v = torch.randn_like(q)
    rest = product(v)[1]
    (found,) = rest if isinstance(rest, list) else rest.gradient(wanted)
    (expected,) = torch.autograd.grad((total.force(q) * v).sum(), wanted)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", [pytest.param("mesh", marks=pytest.mark.slow), "reaction field"])
def test_exact_runs_are_retraced_and_compiled_to_the_last_bit(name):
    parts = [x for x in SUMS[name]() if not isinstance(x, adjsim.Harmonic)]
    total, q = SumPotential(*parts), start()
    dynamics = adjsim.Langevin(total, mass=20.0, kT=0.1, friction=0.3)
    state = dynamics.init(q, torch.zeros_like(q))

    def run(compile, adjoint):
        total.zero_grad()
        found = adjsim.simulate(
            dynamics, state, [0.0, 0.3], solver=adjsim.Splitting("BAOAB", 0.02, exact=True),
            adjoint=adjoint, generator=3, compile=compile,
        ).final  # fmt: skip
        (found.position**2).sum().backward()
        return found.position.detach(), [x.grad for x in total.parameters()]

    eager = run(False, adjsim.ReversibleAdjoint())
    compiled = run(True, adjsim.ReversibleAdjoint())
    stored = run(False, adjsim.DirectAdjoint())
    assert torch.equal(eager[0], compiled[0])
    assert torch.equal(eager[0], stored[0])
    for x, y, z in zip(eager[1], compiled[1], stored[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(x, z, rtol=1e-9, atol=1e-10)


def test_a_rounding_is_that_of_the_whole_contribution_of_a_pair():
    total, q = read(mixture() + field()), start()
    rounding = Rounding(torch.tensor(2.0**-30).reshape(1, 1, 1))
    force = total.force(q, rounding).detach()
    assert torch.equal(force, (force * 2.0**30).round() / 2.0**30)
    torch.testing.assert_close(force, total.force(q).detach(), rtol=0, atol=200 * 2.0**-30)
