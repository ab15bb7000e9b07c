"""Pair potentials, their truncations, sums and mixtures, against contracts and known numbers."""

from __future__ import annotations

import math
from itertools import product
from types import MethodType

import pytest
import torch
from scipy.integrate import quad
from torch import nn

import adjsim
from adjsim.potentials import (
    ForceShifted,
    LennardJonesMixture,
    RadialPotential,
    Shifted,
    SumPotential,
    Switched,
    kong,
    lorentz_berthelot,
    tail_corrections,
)
from tests.problems import parameter, slow_but, square, vector
from tests.suites import PotentialContract

TRUNCATIONS = [Shifted(), ForceShifted(), Switched(0.9)]
CHARGES = (1.0, -0.7, 0.4, -0.7)


class Derived(RadialPotential):
    """Only an energy: slope and curvature follow."""

    def __init__(self):
        super().__init__()
        self.k = parameter(1.3)

    def radial_energy(self, r):
        return self.k * torch.sin(r) / r


def matrix(value: float) -> nn.Parameter:
    """A parameter for each pair of four atoms."""
    steps = torch.arange(4, dtype=torch.float64)
    return nn.Parameter(value * (1 + 0.03 * (steps[:, None] + steps)))


PAIRS = {
    "wca": lambda: adjsim.WCA(parameter(0.05), parameter(1.1)),
    "morse": lambda: adjsim.Morse(parameter(1.1), parameter(0.7), parameter(1.2)),
    "morse, pairs": lambda: adjsim.Morse(matrix(1.1), matrix(0.7), matrix(1.2)),
    "buckingham": lambda: adjsim.Buckingham(parameter(90.0), parameter(0.3), parameter(0.4)),
    "soft sphere": lambda: adjsim.SoftSphere(parameter(1.1), parameter(0.9), 9.0),
    "gaussian core": lambda: adjsim.GaussianCore(parameter(1.1), parameter(0.9)),
    "yukawa": lambda: adjsim.Yukawa(parameter(1.1), parameter(0.8)),
    "expression": lambda: adjsim.potentials.CustomPairs(
        "a*exp(-r/l)/r*q1*q2+b/r^6; l=c*2",
        {
            "a": parameter(1.1),
            "c": parameter(0.4),
            "q": nn.Parameter(torch.tensor([1.0, -0.7, 0.6, 0.9], dtype=torch.float64)),
            "b": nn.Parameter(torch.tensor([[0.2, 0.1], [0.1, 0.3]], dtype=torch.float64)),
        },
        species=[0, 1, 1, 0],
        unit=0.7,
        length_unit=1.3,
    ),
    "yukawa, pairs": lambda: adjsim.Yukawa(matrix(1.1), matrix(0.8)),
    "mie": lambda: adjsim.Mie(parameter(1.1), parameter(0.95), 10.5, 5.0),
    "coulomb": lambda: adjsim.Coulomb(vector(*CHARGES), 1.5),
    "reaction field": lambda: adjsim.ReactionField(vector(*CHARGES), 20.0, cutoff=1.45),
    "wolf": lambda: adjsim.Wolf(vector(*CHARGES), 0.8, cutoff=1.45),
    "derived": Derived,
    "kong": lambda: LennardJonesMixture(
        range(4), vector(1.1, 0.8, 1.3, 0.5), vector(0.95, 0.9, 1.0, 0.8), mixing=kong
    ),
    **{
        f"lennard-jones, {type(t).__name__}": lambda t=t: adjsim.LennardJones(
            parameter(1.1), parameter(0.95), cutoff=1.45, truncation=t
        )
        for t in TRUNCATIONS[1:]
    },
    "wolf, ForceShifted": lambda: adjsim.Wolf(
        vector(*CHARGES), 0.8, cutoff=1.45, truncation=ForceShifted()
    ),
    "sum": lambda: (
        adjsim.Morse(parameter(1.1)) + adjsim.Harmonic(parameter(0.3)) + Derived() + Cubic()
    ),
}


class Cubic(nn.Module):
    """A plain module as a part of a sum."""

    def __init__(self):
        super().__init__()
        self.k = parameter(0.2)

    def forward(self, position):
        return self.k * (position**3).sum((-1, -2))


# Others of the table have numbers of every pair, and a force that is shifted, too.
MARKS = dict.fromkeys(("yukawa, pairs", "wolf, ForceShifted"), pytest.mark.marathon)
# The formulas of these are parts of others: of pairs with numbers of their own, a power, a sum, a
# field of charges, another truncation.
MARKS |= dict.fromkeys(
    ("kong", "morse", "soft sphere", "derived", "coulomb", "lennard-jones, ForceShifted"),
    pytest.mark.slow,
)


# Two pairs of the square are at 1.15 and 1.2, others at 1.5: cutoffs of 1.45 exclude some.
@pytest.mark.parametrize(
    "potential",
    [pytest.param(make(), id=name, marks=MARKS.get(name, ())) for name, make in PAIRS.items()],
)
@pytest.mark.parametrize("position", [square()[0]], ids=["square"])
class TestPairs(PotentialContract):
    # Below, since each is another kernel.
    test_float32_follows = None


@pytest.mark.parametrize(
    "name",
    # The functions that formulas are made of, and a number for each pair.
    slow_but(
        lambda name: name in ("morse, pairs", "mie", "wolf"),
        PAIRS,
        marathon=lambda name: name in MARKS or name in ("morse", "yukawa", "soft sphere"),
    ),
)
def test_float32_follows(name):
    PotentialContract().test_float32_follows(PAIRS[name](), square()[0])


def pair(r: float) -> torch.Tensor:
    return torch.tensor([[0.0, 0.0, 0.0], [r, 0.0, 0.0]])


def test_mie_is_lennard_jones():
    for r in (0.9, 1.1, 2.3):
        torch.testing.assert_close(
            adjsim.Mie(1.3, 1.1)(pair(r)),
            adjsim.LennardJones(1.3, 1.1)(pair(r)),
            rtol=1e-13,
            atol=0,
        )


@pytest.mark.slow
def test_wells_have_their_depth_and_place():
    assert float(adjsim.Morse(1.7, 0.4, 1.3)(pair(1.3))) == pytest.approx(-1.7, rel=1e-14)
    assert float(adjsim.force(adjsim.Morse(1.7, 0.4, 1.3), pair(1.3)).abs().max()) < 1e-13
    n, m = 14.0, 7.0
    minimum = 1.1 * (n / m) ** (1 / (n - m))
    assert float(adjsim.Mie(1.3, 1.1, n, m)(pair(minimum))) == pytest.approx(-1.3, rel=1e-13)


@pytest.mark.slow
def test_wca_ends_at_the_minimum():
    potential, end = adjsim.WCA(1.3, 1.1), 2 ** (1 / 6) * 1.1
    assert float(potential(pair(1.1))) == pytest.approx(1.3, rel=1e-14)
    assert 0 < float(potential(pair(end - 1e-6))) < 1e-9
    assert float(potential(pair(end + 1e-6))) == 0
    # The same as Lennard-Jones shifted at a cutoff there.
    cut = adjsim.LennardJones(1.3, 1.1, cutoff=end)
    assert float(potential(pair(1.2))) == pytest.approx(float(cut(pair(1.2))), rel=1e-12)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=repr)
def test_what_is_continuous_at_the_cutoff(truncation):
    potential = adjsim.LennardJones(cutoff=2.5, truncation=truncation)
    inside = pair(2.5 - 1e-9)
    energy, force = float(potential(inside)), float(adjsim.force(potential, inside)[1, 0])
    smooth = 0 if isinstance(truncation, Shifted) else 1
    slope = 24 * (2 * 2.5**-13 - 2.5**-7)
    assert abs(energy) < 1e-9
    assert force == pytest.approx(0 if smooth else slope, abs=1e-9)
    if isinstance(truncation, Switched):
        # Third order at both ends.
        for end, sign in ((2.5, -1), (0.9, 1)):
            for h in (1e-2, 1e-3):
                r = end + sign * h
                v = float(potential(pair(r)))
                full = float(adjsim.LennardJones()(pair(r)))
                reached = v if end == 2.5 else v - full
                assert abs(reached) < 40 * h**3 * abs(full)


def test_truncations_say_what_they_need():
    with pytest.raises(ValueError, match="needs a cutoff"):
        adjsim.LennardJones(truncation=ForceShifted())
    with pytest.raises(ValueError, match="from 0 to below the cutoff 2"):
        adjsim.LennardJones(cutoff=2.0, truncation=Switched(2.0))
    # The annotation refuses it here, and the library outside the tests.
    with pytest.raises(TypeError, match="truncation"):
        adjsim.LennardJones(cutoff=2.0, truncation=ForceShifted)
    with pytest.raises(ValueError, match="positive and finite"):
        adjsim.LennardJones(cutoff=math.inf)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: adjsim.WCA(cutoff=1.0), "WCA ends at"),
        (lambda: adjsim.Wolf([1.0], 0.3, cutoff=3.0, truncation=Switched(2.0)), "sum is shifted"),
        (lambda: adjsim.Wolf([1.0], 0.3, cutoff=3.0)(square()[0]), "charge is for 1 atoms"),
        (lambda: adjsim.Mie(exponent=math.inf), "positive and finite"),
        (lambda: adjsim.Mie(exponent=6.0, attraction=7.0), "below the exponent"),
        (lambda: adjsim.Coulomb([1.0], math.nan), "constant must be finite"),
        (lambda: adjsim.Coulomb(1.0), r"charge must be \(atoms,\)"),
        (lambda: adjsim.LennardJones(torch.ones(1, 1, 1)), r"number or \(atoms, atoms\)"),
        (lambda: LennardJonesMixture([0, 1], [1.0, 0.0], [1.0, 1.0], mixing=kong), "finite number"),
        (
            lambda: LennardJonesMixture(
                [0, 1], [1.0, 2.0], [1.0, 1.1], mixing=lambda a, b, c, d: (a + 0 * c, b + 0 * d)
            ),
            "must be symmetric",
        ),
        (
            lambda: LennardJonesMixture(
                [0, 1], [1.0, 2.0], [1.0, 1.1], mixing=lambda a, b, c, d: (c, d)
            ),
            "for each pair of species",
        ),
    ],
)
def test_bad_pairs_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.slow
def test_excluded_pairs_stay_finite_in_short_ranges():
    q = square()[0].float().requires_grad_()
    for potential in (adjsim.Buckingham(1000.0, 1e-5, 1.0), adjsim.Yukawa(1.0, 1e-20)):
        force = adjsim.force(potential, q)
        force.sum().backward()
        assert bool(torch.isfinite(force).all())
        assert bool(torch.isfinite(q.grad).all())


def test_kong():
    """Alike atoms keep their parameters; argon and krypton, by the formulas as published."""
    values = [torch.tensor(x) for x in (1.3, 0.9, 1.3, 0.9)]
    for rule in (kong, lorentz_berthelot):
        for found, given in zip(rule(*values), values[:2], strict=True):
            torch.testing.assert_close(found, given, rtol=1e-13, atol=0)
    (e1, s1), (e2, s2) = (116.79, 3.3952), (162.58, 3.6274)
    epsilon, sigma = kong(*(torch.tensor(x) for x in (e1, s1, e2, s2)))
    # Kong's equations: epsilon sigma^6 and epsilon sigma^12 of the pair, written for species i.
    ratio = (e2 * s2**12 / (e1 * s1**12)) ** (1 / 13)
    twelfth = e1 * s1**12 / 2**13 * (1 + ratio) ** 13
    assert float(epsilon * sigma**12) == pytest.approx(twelfth, rel=1e-12)
    assert float(epsilon * sigma**6) == pytest.approx(math.sqrt(e1 * s1**6 * e2 * s2**6), rel=1e-12)


@pytest.mark.slow
def test_wolf_gives_the_madelung_energy():
    """Of rock salt, -1.74756459 per ion pair at the distance 1, as the cutoff grows."""
    sides = torch.tensor([12.0, 12.0, 12.0])
    grid = torch.cartesian_prod(*[torch.arange(12.0)] * 3)
    potential = adjsim.Wolf(1.0 - 2.0 * (grid.sum(-1) % 2), 0.6, cutoff=5.99, box=sides)
    energy = float(potential(grid)) / (len(grid) / 2)
    # Left out are exp(-3 pi^2 / (4 alpha^2)) = 1e-9 of the reciprocal sum, and
    # erfc(alpha r_c) = 4e-7 beyond the cutoff, for some ten shells of ions.
    assert energy == pytest.approx(-1.747564594633, abs=1e-5)


def test_reaction_field_in_a_conductor():
    """Energy and force vanish at the cutoff, and a charge has the energy of its own field."""
    potential = adjsim.ReactionField([1.0, -2.0], cutoff=3.0)
    own = -0.5 * (1.5 / 3.0) * (1 + 4)
    assert float(potential(pair(3.0 - 1e-9))) == pytest.approx(own, abs=1e-8)
    assert float(adjsim.force(potential, pair(3.0 - 1e-9)).abs().max()) < 1e-8
    r = 1.7
    expected = -2 * (1 / r + 0.5 * r**2 / 27 - 0.5) + own
    assert float(potential(pair(r))) == pytest.approx(expected, rel=1e-13)


def test_tails_of_lennard_jones():
    """8/3 pi N rho (1/3 rc^-9 - rc^-3) and 16/3 pi rho^2 (2/3 rc^-9 - rc^-3); NIST's number."""
    n, volume, cutoff = 30, 8.0**3, 3.0
    density = n / volume
    potential = adjsim.LennardJones(parameter(1.0), parameter(1.0), cutoff=cutoff)
    tail, pressure = tail_corrections(potential, n, volume)
    energy, pressure = tail.detach(), pressure.detach()
    assert float(energy) == pytest.approx(-0.54517, abs=5e-6)
    ninth, third = cutoff**-9, cutoff**-3
    assert float(energy) == pytest.approx(
        8 / 3 * math.pi * n * density * (ninth / 3 - third), rel=1e-12
    )
    assert float(pressure) == pytest.approx(
        16 / 3 * math.pi * density**2 * (2 * ninth / 3 - third), rel=1e-12
    )
    (slope,) = torch.autograd.grad(tail, potential.sigma)
    # By sigma^12 and sigma^6, with sigma = 1.
    exact = 8 / 3 * math.pi * n * density * (12 * ninth / 3 - 6 * third)
    assert float(slope) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda **end: adjsim.LennardJones(1.2, 1.1, **end),
        # It falls exponentially as Yukawa's does.
        pytest.param(lambda **end: adjsim.Morse(1.2, 0.8, 1.1, **end), marks=pytest.mark.marathon),
        lambda **end: adjsim.Yukawa(1.2, 0.6, **end),
    ],
    ids=["lennard-jones", "morse", "yukawa"],
)
def test_tails_by_quadrature(make):
    n, volume, start, cutoff = 100, 150.0, 2.0, 2.5
    potential, full = make(cutoff=cutoff, truncation=Switched(start)), make()

    def integral(f, low, high):
        return quad(f, low, high, epsabs=1e-13, epsrel=1e-11, limit=200)[0]

    def missing(r):
        return float(full(pair(r)) - (potential(pair(r)) if r < cutoff else 0.0))

    def slope(r):
        cut = adjsim.force(potential, pair(r)) if r < cutoff else torch.zeros(2, 3)
        return float((cut - adjsim.force(full, pair(r)))[1, 0])

    density = n / volume
    parts = [(start, cutoff), (cutoff, 60.0)]
    exact_energy = sum(integral(lambda r: 4 * math.pi * r**2 * missing(r), *p) for p in parts)
    exact_pressure = sum(integral(lambda r: 4 * math.pi * r**3 * slope(r), *p) for p in parts)
    energy, pressure = tail_corrections(potential, n, volume)
    # Beyond 60 an inverse sixth power leaves 1e-4 of its tail.
    rest = 3e-4 if isinstance(full, adjsim.LennardJones) else 1e-9
    assert float(energy) == pytest.approx(0.5 * n * density * exact_energy, rel=rest)
    assert float(pressure) == pytest.approx(-(density**2) / 6 * exact_pressure, rel=rest)


def test_tails_that_do_not_exist():
    with pytest.raises(ValueError, match=r"does not fall faster than about 1/r\^3.3"):
        tail_corrections(adjsim.SoftSphere(exponent=3.0, cutoff=2.0), 10, 100.0)
    with pytest.raises(ValueError, match="takes a potential with a cutoff"):
        tail_corrections(adjsim.LennardJones(), 10, 100.0)
    with pytest.raises(TypeError, match="takes pair potentials; got Harmonic"):
        tail_corrections(adjsim.Harmonic(), 10, 100.0)
    cut = adjsim.LennardJones(cutoff=2.5)
    for atoms, volume in ((10, -100.0), (10, math.nan), (1, 100.0)):
        with pytest.raises(ValueError, match="two atoms and a positive volume"):
            tail_corrections(cut, atoms, volume)
    with pytest.raises(ValueError, match="starts at a positive distance"):
        tail_corrections(adjsim.LennardJones(cutoff=2.5, truncation=Switched(0.0)), 10, 100.0)
    with pytest.raises(ValueError, match="for 4 atoms, and atoms is 10"):
        tail_corrections(adjsim.LennardJones(matrix(1.0), cutoff=2.5), 10, 100.0)


@pytest.mark.parametrize("exponent", [3.5, 4.0, 6.0, 12.0])
def test_tails_of_inverse_powers(exponent):
    potential = adjsim.SoftSphere(1.3, 1.1, exponent, cutoff=2.5)
    energy, pressure = tail_corrections(potential, 100, 150.0)
    density, u = 100 / 150.0, 1.3 * (1.1 / 2.5) ** exponent
    integral = 4 * math.pi * 2.5**3 * u / (exponent - 3)
    assert float(energy) == pytest.approx(0.5 * 100 * density * integral, rel=1e-10)
    assert float(pressure) == pytest.approx(density**2 / 6 * exponent * integral, rel=1e-10)
    # Of a sum, and of a number for each pair.
    twice = tail_corrections(potential + potential, 100, 150.0)[0]
    assert float(twice) == pytest.approx(2 * float(energy), rel=1e-14)
    each = torch.full((100, 100), 1.3).fill_diagonal_(7.0)
    pairs = adjsim.SoftSphere(each, 1.1, exponent, cutoff=2.5)
    assert float(tail_corrections(pairs, 100, 150.0)[0]) == pytest.approx(float(energy), rel=1e-12)


def test_sums_are_flat_and_have_energies():
    a, b, c = adjsim.Harmonic(), adjsim.DoubleWell(), adjsim.Morse()
    total = a + (b + c)
    assert list(total.parts) == [a, b, c]
    assert list((Cubic() + a).parts)[1] is a
    with pytest.raises(TypeError, match="is a module with an energy"):
        SumPotential(a, adjsim.ForceField())
    with pytest.raises(ValueError, match="at least one part"):
        SumPotential()
    with pytest.raises(ValueError, match=r"Whole, a part of a sum, maps position \(3, 4, 2\)"):
        (a + Whole())(torch.zeros(3, 4, 2))


def test_a_subclass_of_a_sum_stays_whole():
    q = square()[0]
    half = Half(adjsim.Harmonic(), adjsim.Morse())
    total = half + adjsim.DoubleWell()
    assert len(total.parts) == 2
    torch.testing.assert_close(total(q), half(q) + adjsim.DoubleWell()(q), rtol=1e-14, atol=0)
    hooked = adjsim.Harmonic() + adjsim.Morse()
    hooked.register_forward_hook(lambda module, inputs, energy: 2 * energy)
    assert len((hooked + adjsim.DoubleWell()).parts) == 2


class Half(SumPotential):
    def forward(self, position):
        return 0.5 * super().forward(position)


class Whole(nn.Module):
    """An energy summed over the batch, which is wrong."""

    def forward(self, position):
        return position.square().sum()


def mixed() -> adjsim.potentials.SumPotential:
    """Every printed formula, in one potential of the square's four atoms, with the numbers of the
    table, whose kernels it shares.
    """
    switched = adjsim.LennardJones(
        parameter(0.7), parameter(0.9), cutoff=1.45, truncation=Switched(0.9)
    )
    bounded = adjsim.Morse(parameter(0.5), cutoff=1.6, truncation=ForceShifted())
    return (
        switched
        + bounded
        + adjsim.WCA(parameter(0.4), parameter(1.2))
        + adjsim.Buckingham(parameter(90.0), parameter(0.3), parameter(0.4))
        + adjsim.SoftSphere(parameter(0.2), parameter(0.9), 9.0)
        + adjsim.GaussianCore(parameter(0.6), parameter(0.9))
        + adjsim.Yukawa(parameter(0.5), parameter(0.8))
        + adjsim.Mie(parameter(0.3), parameter(0.95), 10.5, 5.0)
        + adjsim.Wolf(vector(*CHARGES), 0.8, cutoff=1.45)
        + adjsim.ReactionField(vector(*CHARGES), 20.0, cutoff=1.45)
        + adjsim.Harmonic(parameter(0.3))
    )


class Twisted(Shifted):
    """A truncation of the user's, whose slope is not elementwise in epsilon."""

    def slope(self, pair, s):
        return pair.pair_slope(s) * pair.epsilon.sum()

    def curvature(self, pair, s):
        return pair.pair_curvature(s) * pair.epsilon.sum()


class Raw(adjsim.LennardJones):
    """A parameter that is computed from others."""

    def __init__(self):
        super().__init__()
        del self._buffers["epsilon"]
        self.raw = parameter(0.9)
        self.register_buffer("w", torch.tensor([0.5, 0.6]))

    @property
    def epsilon(self):
        return (self.raw * self.w).sum()


def with_own_slope():
    potential = adjsim.LennardJones(parameter(0.9))
    for name in ("pair_slope", "pair_curvature"):
        formula = getattr(adjsim.LennardJones, name)
        own = MethodType(lambda self, s, f=formula: f(self, s) * self.epsilon.sum(), potential)
        setattr(potential, name, own)
    return potential


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: adjsim.LennardJones(parameter(0.9), cutoff=1.5, truncation=Twisted()),
        Raw,
        with_own_slope,
        lambda: adjsim.Morse(matrix(0.5)) + adjsim.LennardJones(matrix(0.9)),
    ],
    ids=["truncation", "property", "instance", "matrices"],
)
def test_compiled_gradients_of_what_is_not_elementwise(make):
    expected = gradients(False, adjsim.DirectAdjoint(), make)
    found = gradients(False, adjsim.ReversibleAdjoint(), make, compile=True)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12, msg=name)


def test_a_matrix_that_an_optimiser_made_asymmetric_is_taken_as_its_symmetric_part():
    potential = PAIRS["morse, pairs"]()
    potential.depth.data[0, 1] += 0.3
    q = square()[0]
    force = adjsim.force(potential, q).detach()
    torch.testing.assert_close(force.sum(0), torch.zeros(2), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        force, -adjsim.potentials.products.derivative(potential, q).detach(), rtol=1e-11, atol=1e-11
    )


def gradients(exact: bool, adjoint, make=mixed, **options):
    potential = make()
    dynamics = adjsim.Hamiltonian(potential, parameter(1.2))
    run = adjsim.simulate(
        dynamics,
        dynamics.init(*square((2,))),
        [0.0, 0.4],
        solver=adjsim.Splitting("BAB", 0.01, exact=exact),
        adjoint=adjoint,
        **options,
    )
    parameters = dynamics.trainable()
    grads = torch.autograd.grad((run.final.position**3).sum(), list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


@pytest.mark.parametrize(
    ("exact", "compile"),
    slow_but(
        lambda *_: False,
        product((False, True), repeat=2),
        marathon=lambda exact, compile: exact or compile,
    ),
)
def test_a_sum_under_every_adjoint(exact, compile):
    expected = gradients(exact, adjsim.DirectAdjoint())
    reversible = adjsim.ReversibleAdjoint()
    for adjoint in [reversible] if compile else [reversible, adjsim.CheckpointAdjoint()]:
        found = gradients(exact, adjoint, compile=compile)
        for name, grad in expected.items():
            # Rounding of 40 steps, of forces with strong repulsions.
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("formula", ["kernel", "torch"])
def test_a_position_that_is_not_finite_has_no_energy(formula, bad):
    pair = adjsim.LennardJones(1.0, 1.0, cutoff=2.0)
    if formula == "torch":
        pair.inner = nn.Linear(1, 1)  # a module with tensors, for which there is no kernel
    good, _ = square()
    position = good.clone()
    position[1, 1] = bad
    assert ("by torch" in pair.path(position)) == (formula == "torch")
    assert bool(pair(position).isnan())
    batch = torch.stack([position, good])
    assert pair(batch).isnan().tolist() == [True, False]
    assert torch.equal(pair(batch)[1], pair(good))
