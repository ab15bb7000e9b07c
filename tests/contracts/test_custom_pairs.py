"""Groups of custom pairs, and the correction for their energy beyond a cutoff."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import adjsim
from adjsim import Splitting
from adjsim.core import box
from adjsim.core.rounding import UNROUNDED
from adjsim.potentials import (
    ContinuousFunction,
    CustomPairs,
    DiscreteFunction,
    ForceShifted,
    Yukawa,
)
from adjsim.potentials.base import force_vjp
from adjsim.potentials.pairs import dense
from adjsim.potentials.pairs.long_range import LongRangeCorrection
from adjsim.potentials.pairs.truncation import SwitchedDistance, Unshifted
from tests.problems import parameter
from tests.retracing import forth_and_back

ATOMS = 7
NUMBER = torch.arange(ATOMS)
BOX = [5.0, 5.5, 6.0]
# Atoms 2 and 3 are in both sets, atom 6 is in none.
GROUP = NUMBER < 4, (NUMBER > 1) & (NUMBER < 6)


def interact(i, j):
    one, other = GROUP
    return bool(one[i] & other[j] | one[j] & other[i])


def yukawa(**options):
    charge = nn.Parameter(torch.linspace(-1, 1.4, ATOMS, dtype=torch.float64))
    numbers = {"c": parameter(1.3), "l": parameter(0.9), "q": charge}
    return CustomPairs("c*q1*q2*exp(-r/l)/r", numbers, **options)


def position():
    generator = torch.Generator().manual_seed(1)
    return 2 * torch.rand(ATOMS, 3, generator=generator, dtype=torch.float64)


@pytest.mark.slow
def test_groups_leave_out_the_other_pairs():
    options = {"cutoff": 1.4, "box": BOX}
    left_out = [[i, j] for i in range(ATOMS) for j in range(i) if not interact(i, j)]
    assert 0 < len(left_out) < ATOMS * (ATOMS - 1) / 2
    grouped, excluding = yukawa(groups=[GROUP], **options), yukawa(exclusions=left_out, **options)
    assert grouped.path(position()) == "all pairs"
    q, v = position(), position().cos()
    q[6] = q[0]  # Atom 6 interacts with none.
    parameters = list(grouped.parameters())
    force, product = force_vjp(grouped, q, parameters)
    found = [force, *torch.autograd.grad(grouped(q), parameters)]
    along, grads = product(v)
    parameters = list(excluding.parameters())
    expected, others = dense.force_vjp(excluding, q, parameters, UNROUNDED)
    wanted = [expected, *torch.autograd.grad(dense.energy(excluding, q), parameters)]
    expected, rest = others(v)
    for one, other in zip(
        [along, *grads, *found], [expected, *rest.gradient(parameters), *wanted], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_pair_of_two_groups_counts_twice():
    once, twice = (yukawa(groups=[GROUP] * count) for count in (1, 2))
    q = position()
    for function in (dense.energy, dense.force):
        torch.testing.assert_close(function(twice, q), 2 * function(once, q), rtol=1e-14, atol=0)
    assert list(once.state_dict()) == ["c", "l", "q", "set_0", "set_1"]


def assert_equal_to_dense(pairs, q, parameters):
    """The force, its product with a cotangent, and all gradients, relative to the largest."""
    v = q.cos()
    value, product = force_vjp(pairs, q, parameters)
    along, grads = product(v)
    expected, others = dense.force_vjp(pairs, q, parameters, UNROUNDED)
    wanted, rest = others(v)
    found = [value, along, *grads, *torch.autograd.grad(pairs(q), parameters)]
    known = torch.autograd.grad(dense.energy(pairs, q), parameters)
    for one, other in zip(
        found, [expected, wanted, *rest.gradient(parameters), *known], strict=True
    ):
        size = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * size)


@pytest.mark.marathon
@pytest.mark.parametrize("options", [{"box": [6.0, 6.5, 7.0]}, {"cutoff": 1.9}], ids=str)
def test_a_list_holds_the_pairs_of_groups(options):
    """Without a cutoff too, at any place of the atoms, in runs that come back, for other groups."""
    atoms, generator = 64, torch.Generator().manual_seed(4)
    q = 4 * torch.rand(atoms, 3, generator=generator, dtype=torch.float64)
    charge = nn.Parameter(torch.rand(atoms, generator=generator, dtype=torch.float64))
    few = torch.zeros(atoms, dtype=torch.bool)
    few[torch.randperm(atoms, generator=generator)[:4]] = True
    numbers = {"c": parameter(0.3), "q": charge}
    pairs = CustomPairs("c*q1*q2*exp(-r)", numbers, groups=[(few, ~few)] * 2, **options)
    parameters = list(pairs.parameters())
    for shift in (0.0, 9.0):
        q = q + shift * torch.rand(atoms, 3, generator=generator, dtype=torch.float64)
        assert pairs.path(q) == "neighbour list"
        assert pairs.pair_share == pytest.approx(2 * int(few.sum()) * int((~few).sum()) / atoms**2)
        assert_equal_to_dense(pairs, q, parameters)
        # Other atoms, of the same list otherwise.
        few = few.roll(1)
        pairs.set_0.copy_(few)
        pairs.set_1.copy_(~few)
    dynamics = adjsim.Hamiltonian(pairs)
    before, after, back = forth_and_back(
        dynamics, dynamics.init(q, q.cos()), Splitting("BAB", 0.05, exact=True), 40
    )
    assert float((before.position - after.position).abs().max()) > 0.1
    assert torch.equal(before.position, back.position)


def test_numbers_of_pairs_are_shifted_one_by_one():
    """The slope at the cutoff, a derivative of the expression there, is that of each pair."""
    table = torch.tensor([[1.0, 0.4], [0.4, 2.0]])
    options = {"cutoff": 1.4, "truncation": ForceShifted()}
    custom = CustomPairs("k*exp(-r)/r", {"k": table}, species=[0, 1, 0, 1, 1, 0, 1], **options)
    plain = Yukawa(table[custom.species][:, custom.species], 1.0, **options)
    q = position()
    torch.testing.assert_close(dense.energy(custom, q), dense.energy(plain, q))
    torch.testing.assert_close(dense.force(custom, q), dense.force(plain, q))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([([0, 1], [2])], r"\(atoms,\) booleans; got shape \(2,\) of torch.int64"),
        ([(NUMBER > 2,)], r"got \[1\] sets of \[7\] atoms"),
        ([(NUMBER > 2, NUMBER[:3] > 2)], r"got \[2\] sets of \[7, 3\] atoms"),
    ],
)
def test_groups_that_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        yukawa(groups=groups)


def tabulated(atoms, periodic=False, **options):
    """Two reads of one spline, and values of atoms by whole numbers."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

    tables = {
        "f": ContinuousFunction(drawn(11), 0.3, 1.9, periodic=periodic),
        "h": DiscreteFunction(drawn(3)),
    }
    kinds = (torch.arange(atoms) % 3).double()
    numbers = {"k": parameter(0.7), "q": drawn(atoms), "t": kinds}
    return CustomPairs("q1*q2*f(r)+k*f(r/2)^2*h(t1)*h(t2)", numbers, tables=tables, **options)


@pytest.mark.parametrize(
    ("atoms", "options", "path"),
    [
        pytest.param(
            8,
            {"cutoff": 1.4, "truncation": ForceShifted(), "periodic": True},
            "all pairs",
            marks=pytest.mark.marathon,
        ),
        pytest.param(
            60,
            {"cutoff": 1.4, "truncation": Unshifted(), "skin": 0.3},
            "neighbour list",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tables_in_kernels(atoms, options, path, monkeypatch):
    """Energy, force, product and gradients are those of torch, also after a change of values."""
    monkeypatch.setattr(box, "LISTED_WITHOUT_BOX", 50)
    pairs = tabulated(atoms, **options)
    generator = torch.Generator().manual_seed(5)
    q = torch.rand(atoms, 3, generator=generator, dtype=torch.float64)
    q *= 2 * (atoms / 8) ** (1 / 3)
    assert pairs.path(q) == path
    parameters = list(pairs.parameters())
    for _ in range(2):
        assert_equal_to_dense(pairs, q, parameters)
        with torch.no_grad():
            pairs.f.values.mul_(1.1)
            pairs.h.values[1] += 0.3


def test_expressions_that_an_exchange_changes_in_few_pairs_are_refused():
    """Forces of such pairs would not sum to zero: of a rare flag, and of far atoms alone."""
    flag = (torch.arange(200) == 5).double()
    with pytest.raises(ValueError, match="changes the expression"):
        CustomPairs("exp(-r)*(1+a1*(1-a2))", {"a": flag})
    with pytest.raises(ValueError, match="changes the expression"):
        CustomPairs("exp(-r)*(1+step(r-1.2)*a1)", {"a": torch.linspace(0.1, 1.0, ATOMS)})
    CustomPairs("exp(-r)*(1+a1*(1-a2)+a2*(1-a1))", {"a": flag})


def test_tables_that_are_refused():
    """A name of two, places beyond float32, and a correction beyond the cutoff."""
    table = DiscreteFunction([1.0, 2.0])
    with pytest.raises(ValueError, match="the number or table 'k' has the name of another one"):
        CustomPairs("k*k(t1)*k(t2)", {"k": 1.0, "t": [0.0, 1.0]}, tables={"k": table})
    with pytest.raises(ValueError, match=r"place 7: f takes 1 arguments, not 2"):
        CustomPairs("f(r, r)", {}, tables={"f": table})
    with pytest.raises(ValueError, match="changes the expression"):
        CustomPairs("f(t1)*r", {"t": [0.0, 1.0]}, tables={"f": table})
    with pytest.raises(ValueError, match="may have 16777216 entries; got 16777217"):
        DiscreteFunction(torch.zeros(1).expand(2**24 + 1))
    with pytest.raises(ValueError, match=r"calls the table f at place 6, .*Correction\(False\)"):
        LongRangeCorrection(tabulated(ATOMS, cutoff=1.4, box=BOX), ATOMS)


def exact(pairs, groups):
    """Sum the integrals of exp(-r/l) r over pairs of atoms, beyond the cutoff."""
    c, length, q = pairs.c, pairs.l, pairs.q
    integral = length * torch.exp(-pairs.cutoff / length) * (pairs.cutoff + length)
    total = sum(
        q[i] * q[j]
        for i in range(ATOMS)
        for j in range(i + (not groups))
        if not groups or interact(i, j)
    )
    return 4 * math.pi * ATOMS / (ATOMS + 1) * c * integral * total / math.prod(BOX)


@pytest.mark.parametrize("groups", [(), (GROUP,)], ids=["all", "groups"])
def test_the_correction_beyond_the_cutoff(groups):
    pairs = yukawa(cutoff=1.4, box=BOX, truncation=Unshifted(), groups=groups)
    correction = LongRangeCorrection(pairs, ATOMS)
    # Two atoms of one class share the derivative with respect to its number.
    with torch.no_grad():
        pairs.q[3] = pairs.q[2]
    energy, expected = correction(position()), exact(pairs, groups)
    torch.testing.assert_close(energy, expected, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(x, list(pairs.parameters())) for x in (energy, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
    # The value that runs take follows the numbers.
    with torch.no_grad():
        for scale in (1.0, 2.0):
            pairs.c.mul_(scale)
            torch.testing.assert_close(correction(position()), scale * energy.detach())
    assert not correction.force(position()).any()


def test_the_correction_has_what_a_switch_takes():
    """A sum of the energies with two cutoffs, since both have the same whole energy."""
    numbers = {"a": torch.tensor([[1.0, 0.4], [0.4, 2.0]]), "n": 6.5}
    total = []
    for truncation in (Unshifted(), SwitchedDistance(1.1)):
        pairs = CustomPairs(
            "a/r^n",
            numbers,
            species=[0, 1, 1],
            cutoff=1.9,
            box=BOX,
            truncation=truncation,
            unit=0.7,
            length_unit=1.2,
        )
        total.append(LongRangeCorrection(pairs, 3)(position()[:3]))
    # a, over 0-0, 0-1 twice, and 1-1 three times.
    a = 1.0 + 2 * 0.4 + 3 * 2.0
    volume = math.prod(BOX) / 1.2**3
    beyond = 0.7 * 4 * math.pi * 3 / 4 * a / volume * (1.9 / 1.2) ** -3.5 / 3.5
    assert float(total[0]) == pytest.approx(beyond, rel=1e-12)
    x = torch.linspace(0, 1, 20001, dtype=torch.float64)
    r = (1.1 + 0.8 * x) / 1.2
    missing = x**3 * (10 - 15 * x + 6 * x**2) * r**-4.5
    more = 0.7 * 4 * math.pi * 3 / 4 * a / volume * float(torch.trapezoid(missing, r))
    assert float(total[1]) == pytest.approx(beyond + more, rel=1e-7)


def test_corrections_that_are_refused():
    with pytest.raises(ValueError, match="needs a box and a cutoff"):
        LongRangeCorrection(yukawa(), ATOMS)
    slow = CustomPairs("k/r^3", {"k": 1.0}, cutoff=1.4, box=BOX)
    with pytest.raises(ValueError, match=r"'k/r\^3' does not fall faster.*Correction\(False\)"):
        LongRangeCorrection(slow, ATOMS)(position())
    with pytest.raises(ValueError, match="numbers of 7 atoms, and atoms is 8"):
        LongRangeCorrection(yukawa(cutoff=1.4, box=BOX), 8)(position())
