"""Pairs of a list that are evaluated once, for both of their atoms, against pairs at each atom."""

import platform
import shutil

import pytest
import torch
from torch import nn

import adjsim
from adjsim.compiler import library
from adjsim.core.rounding import UNROUNDED, UNROUNDED_BOTH, Rounding, Roundings
from adjsim.core.strain import Strain
from adjsim.potentials.pairs import operator as pair_operator
from adjsim.potentials.pairs.kernels import cpu
from tests.contracts.test_pair_operator import KINDS, box_of, cell, charges, gas, listed
from tests.problems import parameter, slow_but

assert listed  # A fixture.
ATOMS = 60


def screened(box):
    """Gradients by more numbers of each atom than quads of coordinates have room for."""
    numbers = {"a": charges(ATOMS), "k": parameter(1.3), "b": charges(ATOMS), "c": charges(ATOMS)}
    numbers["l"] = parameter(0.7)
    formula = "k*(a1*a2 + (b1 + b2)*r + c1*c2*r^2)*exp(-l*r)"
    return adjsim.potentials.CustomPairs(formula, numbers, cutoff=2.4, box=box)


def tabulated(box):
    """With a gradient by the coefficients of a function."""
    values = nn.Parameter(torch.linspace(-1, 1, 11, dtype=torch.float64) ** 3)
    tables = {"f": adjsim.potentials.ContinuousFunction(values, 0.3, 2.9)}
    numbers = {"q": charges(ATOMS)}
    return adjsim.potentials.CustomPairs(
        "f(r) + q1*q2/r", numbers, tables=tables, cutoff=2.4, box=box
    )


def asymmetric(formula):
    numbers = {"k": parameter(1.3), "q": charges(ATOMS)}
    return lambda box: adjsim.potentials.CustomPairs(formula, numbers, cutoff=2.4, box=box)


FORMULAS = KINDS | {"screened": screened, "tabulated": tabulated}
MADE = FORMULAS | {
    "asymmetric": asymmetric("k*q1*q2*exp(-r)"),
    # Here autograd sums three terms, in another order for exchanged atoms.
    "asymmetric gradient": asymmetric("exp(-r)*(k*q1 + k*q2 + k*r)"),
    "asymmetric for some": asymmetric(
        "select(step(q1 - 5)*step(q2 - 5), k*q1*q2, q1*q2*k)*exp(-r)"
    ),
}


@pytest.fixture
def evaluated(monkeypatch, listed):
    """Return the force, its products and the kernels' specifications, of a formula made anew."""

    def results(name, mutual, dtype=torch.float64, replicas=None, rounding=UNROUNDED, box="cube"):
        monkeypatch.setattr(pair_operator, "is_costly", lambda graph: mutual)
        pair_operator._kernels_of.cache_clear()
        pair = MADE[name](box_of(box)).to(dtype)
        q = gas(cell(box), ATOMS, seed=6, replicas=replicas).to(dtype)
        v = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
        assert pair.path(q) == "neighbour list"
        value, product = pair.force_vjp(q, list(pair.parameters()), rounding)
        along, rest = product(v)
        made = pair_operator.form_of(pair, q).kernels.made.values()
        return [value, along, *rest], [x.spec for x in made]

    yield results
    pair_operator._kernels_of.cache_clear()


def assert_same_bits(one, other):
    assert len(one) == len(other)
    for x, y in zip(one, other, strict=True):
        assert 0 < float(x.abs().max()) < float("inf")
        assert torch.equal(x, y)


GRID = Rounding(torch.tensor(2.0**-40, dtype=torch.float64))
SETTINGS = {
    "one system": {},
    "tilted box": {"box": "tilted"},
    "batch on a grid": {"replicas": 3, "rounding": GRID},
}


@pytest.mark.parametrize("settings", slow_but(lambda x: x == "batch on a grid", SETTINGS))
@pytest.mark.parametrize("name", slow_but(lambda name: name == "screened", FORMULAS))
def test_sums_have_the_bits_of_sums_at_each_atom(evaluated, name, settings):
    once, specs = evaluated(name, True, **SETTINGS[settings])
    # Gradients by coefficients of functions are summed at each atom.
    expected = {"tabulated": {"FORCE"}}.get(name, {"FORCE", "PRODUCT"})
    assert {x.mode for x in specs if x.mutual} == expected
    each, specs = evaluated(name, False, **SETTINGS[settings])
    assert not any(x.mutual for x in specs)
    assert_same_bits(once, each)


def test_a_formula_that_rounds_otherwise_for_exchanged_atoms_is_summed_at_each(evaluated):
    """Or the force that a backward pass takes back would have other bits."""
    for name in ("asymmetric", "asymmetric for some"):
        assert not any(x.mutual for x in evaluated(name, True)[1])
    found, specs = evaluated("asymmetric gradient", True)
    assert {x.mode for x in specs if x.mutual} == {"FORCE"}
    assert_same_bits(found, evaluated("asymmetric gradient", False)[0])


def test_a_distance_that_is_no_number_is_not_hidden(evaluated, monkeypatch):
    """The difference of two finite positions may be infinite, and its nearest image no number."""
    monkeypatch.setattr(pair_operator, "is_costly", lambda graph: True)
    q = gas(cell("cube"), ATOMS, seed=6)
    q[0, 0], q[1, 0] = 1e308, -1e308
    pair = MADE["screened"](box_of("cube"))
    assert pair.path(q) == "neighbour list"
    assert bool(pair.force(q)[:2, 0].isnan().all())


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize(("shape", "width"), [("cube", 1), ("cube", 3), ("tilted", 3)])
@pytest.mark.parametrize(
    "name",
    [
        "screened",
        *(pytest.param(x, marks=pytest.mark.marathon) for x in FORMULAS if x != "screened"),
    ],
)
def test_virials_have_the_bits_of_virials_at_each_atom(
    listed, monkeypatch, name, shape, width, rounds
):
    """Of systems with boxes of their own, by coordinate, and whole in a tilted box."""
    generator = torch.Generator().manual_seed(2)
    q, box = gas(cell(shape), ATOMS, seed=6, replicas=2), box_of(shape)
    v = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    value = 0.01 * torch.randn(2, 1, width, generator=generator, dtype=torch.float64)
    strain = Strain.of(box, value)
    stretch = strain.matrix(torch.randn(value.shape, generator=generator).double(), 3)
    roundings = Roundings(GRID, GRID) if rounds else UNROUNDED_BOTH

    def results(mutual):
        monkeypatch.setattr(pair_operator, "is_costly", lambda graph: mutual)
        pair_operator._kernels_of.cache_clear()
        pair = MADE[name](box)
        form = pair_operator.form_of(pair, q)
        operator = pair_operator.PairOperator.of(pair, form, q, strain)
        found = [
            *operator.evaluate("FORCE", q, roundings=roundings),
            *operator.evaluate("PRODUCT", q, vector=v, stretch=stretch, roundings=roundings),
        ]
        specs = [x.spec for x in form.kernels.made.values()]
        assert any(x.mutual for x in specs) == mutual
        return found

    assert_same_bits(results(True), results(False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_threads_do_not_change_bits(evaluated, dtype):
    """Threads share the systems of a batch, and each evaluates the pairs of its atoms of one."""
    threads = torch.get_num_threads()
    try:
        for replicas in (None, 40):
            found = []
            for count in (1, 2):
                torch.set_num_threads(count)
                found.append(evaluated("screened", True, dtype, replicas)[0])
            assert_same_bits(*found)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def narrow(monkeypatch):
    """Compile for processors with vectors of this width."""

    def clear():
        library._compiler.cache_clear()
        cpu.lists.cache_clear()
        pair_operator._kernels_of.cache_clear()

    def choose(option):
        monkeypatch.setenv("CXX", f"g++ {option}")
        clear()

    yield choose
    monkeypatch.undo()
    clear()


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="options of GCC for x86-64"
)
@pytest.mark.parametrize("name", slow_but(lambda name: name == "table of species", FORMULAS))
@pytest.mark.parametrize("mutual", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_narrow_vectors_do_not_change_bits(evaluated, narrow, name, mutual):
    """Kernels of each width are compiled, and only gradients by functions depend on it."""
    wide, _ = evaluated(name, mutual)
    narrow("-mno-avx512f")
    found, _ = evaluated(name, mutual)
    if name == "tabulated":
        torch.testing.assert_close(found.pop(), wide.pop(), rtol=0, atol=1e-12)
    assert_same_bits(found, wide)
