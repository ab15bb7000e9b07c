"""Programs of coupling steps on the lattice: whatever they are, they come back bit for bit, with
empty buffers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

import adjsim
from adjsim.core.rounding import Rounding, power_of_two
from adjsim.dynamics import Coefficient, Dynamics, Field, Function, Random, Scale, Shear, Term
from adjsim.dynamics.buffer import (
    FULL,
    buffer_name,
    fractions,
    refill,
    simpler_products,
    spill,
)
from adjsim.dynamics.lattice import DENOMINATOR
from tests.problems import Case, square
from tests.retracing import forth_and_back


class ToyState(NamedTuple):
    """Two fields of the particles, and three links."""

    position: Tensor
    momentum: Tensor
    chain: Tensor


class One(Term):
    """One coupling step of a time h."""

    def __init__(self, make, **coefficients):
        self.make, self.numbers = make, coefficients
        self.draws = 1 if make is noise else 0

    def drift(self, t, state):
        return {}

    def coefficients(self, h, state):
        return {
            name: torch.as_tensor(value).to(state.position) for name, value in self.numbers.items()
        }

    def moves(self, h, state):
        return (self.make(h),)


def stream(h):
    return Shear("position", Field("momentum"), "c")


def kick(h):
    return Shear(
        "momentum",
        Function(lambda c, q: -c["c"] * torch.sin(q / c["unit"]) * c["unit"], ("position",)),
    )


def noise(h):
    return Shear("momentum", Random(), "c")


def decay(h):
    return Scale("momentum", Coefficient("f"))


def stretch(h):
    """Some entries by more than one, some by less, as the state says."""
    return Scale(
        "position",
        Function(lambda c, p: torch.exp(0.005 * torch.sin(p / c["unit"])), ("momentum",)),
    )


def link_drag(h):
    def factor(c, b):
        return torch.exp(-0.005 * torch.tanh(b / c["unit"]))[..., 2, :, :]

    return Scale("chain", Function(factor, ("chain",)), link=1)


def link_push(h):
    def heat(c, p):
        return c["c"] * (p**2 / c["unit"]).mean((-1, -2), keepdim=True)

    return Shear("chain", Function(heat, ("momentum",)), link=0)


@st.composite
def plans(draw):
    """Letters, each a coupling step with its numbers; the unit of length; a number of steps; a
    batch.
    """
    unit = 10.0 ** draw(st.integers(-25, 15))
    small, factor = st.floats(0.01, 0.05), st.floats(0.75, 0.99) | st.floats(1.001, 1.004)
    steps = {
        stream: {"c": draw(small)},
        kick: {"c": draw(small), "unit": unit},
        noise: {"c": draw(small) * unit},
        decay: {"f": draw(factor)},
        stretch: {"unit": unit},
        link_drag: {"unit": unit},
        link_push: {"c": draw(small), "unit": unit},
    }
    chosen = draw(st.lists(st.sampled_from(list(steps)), min_size=1, max_size=6))
    terms = {chr(ord("a") + i): One(make, **steps[make]) for i, make in enumerate(chosen)}
    return (
        terms,
        unit,
        draw(st.integers(1, 150)),
        draw(st.sampled_from([(), (3,), (2, 2)])),
        draw(st.integers(0, 2**31)),
    )


def toy(terms, unit, batch, seed):
    class Toy(Dynamics):
        state_type = ToyState

        @property
        def terms(self):
            return terms

    dynamics = Toy(adjsim.Harmonic())
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*batch, 2, 2), (*batch, 2, 2), (*batch, 3, 1, 1))
    return dynamics, ToyState(
        *(unit * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    )


@pytest.mark.slow
@settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(plans())
def test_any_program_comes_back(drawn):
    terms, unit, steps, batch, seed = drawn
    dynamics, start = toy(terms, unit, batch, seed)
    solver = adjsim.Splitting("".join(terms), 0.1, exact=True)
    before, after, back = forth_and_back(dynamics, start, solver, steps, seed)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for name, a, b in zip(before._fields, before, back, strict=True):
        assert torch.equal(a, b), name


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(1e-5, 30.0).filter(lambda factor: abs(1 - factor) >= 1e-8))
def test_fractions_keep_the_distance_from_one(factor):
    tensor = torch.tensor(factor, dtype=torch.float64)
    n, d = fractions("it", tensor)
    assert 1 <= int(d) <= 2**26
    assert abs(int(n) / int(d) - factor) <= 1.01e-7 * min(abs(1 - factor), factor) + 1e-16


def test_products_of_fractions_are_as_near_with_smaller_numbers():
    factor = torch.exp(-torch.tensor([2e-3, 4e-3, 0.02, 1.0], dtype=torch.float64))
    n, d = simpler_products(factor, *fractions("it", factor))
    distance = ((n.double() / d).prod(0) - factor).abs()
    assert bool((distance <= 1.01e-7 * (1 - factor)).all())
    # Single fractions have numerators of 1,499,000, 374,500, 29,701 and 1,001.
    assert n.sum(0).tolist() == [3998, 12135, 1629, 1002]


def test_one_is_one():
    n, d = fractions("it", torch.ones(2, dtype=torch.float64))
    assert n.tolist() == d.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("factor", "way"), [(1e-9, "smaller"), (1 - 1e-10, "larger"), (0.0, "smaller")]
)
def test_factors_no_fraction_is_near_to_are_refused(factor, way):
    near = "0" if way == "smaller" else "1"
    with pytest.raises(ValueError, match=f"close to {near} for a fraction. Use a {way} dt"):
        fractions("it", torch.tensor(factor, dtype=torch.float64))


@given(st.floats(1e-300, 1e300))
def test_powers_of_two(x):
    found = float(power_of_two(torch.tensor(x, dtype=torch.float64)))
    assert found / 2 < x <= found


@given(st.integers(-900, 900), st.floats(-1e15, 1e15))
def test_rounding_goes_to_the_nearest_multiple(exponent, x):
    spacing = 2.0**exponent
    rounding, value = (
        Rounding(torch.tensor(spacing, dtype=torch.float64)),
        torch.tensor(x * spacing, dtype=torch.float64),
    )
    assert float(rounding.round(value)) / spacing == float(round(x))  # both to the even one of two


def test_rounding_has_the_derivative_of_the_identity():
    x = torch.tensor([0.3, 1.7], dtype=torch.float64, requires_grad=True)
    rounded = Rounding(torch.tensor(1.0, dtype=torch.float64)).round(x)
    assert rounded.tolist() == [0.0, 2.0]
    (slope,) = torch.autograd.grad((rounded**2).sum(), x, create_graph=True)
    assert slope.tolist() == [0.0, 4.0]


def test_a_lone_spill_of_a_large_batch_is_numbered():
    buffers = torch.ones(1000, 2, dtype=torch.int64)
    buffers[777, 1] = 2**34 + 3
    state = NamedTuple("S", [("momentum_buffer", Tensor)])(buffers)
    after, entry = spill(state, "momentum", 1000, 2.0**40)
    assert entry.numbered
    assert entry.bits == 32 * 3
    assert torch.equal(getattr(refill(after, entry, 1000), buffer_name("momentum")), buffers)


def test_a_spill_is_given_back():
    """Systems in which a buffer is full, and only those."""
    state = NamedTuple("S", [("momentum_buffer", Tensor)])(
        torch.tensor([[2**33 + 5, 7], [3, 4], [2**34 - 1, 2**36]], dtype=torch.int64)
    )
    name = buffer_name("momentum")
    after, entry = spill(state, "momentum", 3, 2.0**40)
    assert getattr(after, name).tolist() == [[2, 0], [3, 4], [3, 16]]
    assert entry.bits == 32 * 4 + 8  # four words, and a bit for each system
    assert torch.equal(getattr(refill(after, entry, 3), name), getattr(state, name))
    assert spill(after, "momentum", 3, 2.0**40) == (after, None)
    with pytest.raises(OverflowError, match="smaller dt"):
        spill(state, "momentum", 3, 2.0**35)


@pytest.mark.parametrize("name", ["langevin", "chain-3", "generalised-2"])
def test_a_buffer_below_its_limit_fits_an_integer(name):
    """A scale multiplies a buffer by the denominator of its factor, in 64 bits with a sign."""
    scheme = {"langevin": "BAOAB", "chain-3": "NBABN", "generalised-2": "BAGAB"}[name]
    case = Case(name, scheme, "lennard-jones", exact=True)
    dynamics = case.build()
    start = case.start(dynamics, *square())
    plan = case.solver.plan(dynamics, start, 0.0)
    coefficients = plan.lattice.rationals(case.solver.coefficients(dynamics, start))
    denominators = [
        int(x.max()) for group in coefficients.values() for n, x in group.items() if n[-2:] == " d"
    ]
    moves = [(stage.letter, move) for stage, move in plan.moves]
    growth = plan.lattice.buffer_growth(coefficients, moves)
    assert growth.limit * max([DENOMINATOR if name == "chain-3" else 1, *denominators]) < 2**63
    assert growth.limit > 2**FULL


def test_spacings_and_checks():
    """2^-40 of the scale, which is a power of two; 2^-44 for a field that is scaled. The buffers
    are checked before they can be full.
    """
    dynamics = adjsim.Langevin(adjsim.Harmonic(1.0), kT=1e-6, friction=0.5)
    start = dynamics.init(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 5.0]]))
    solver = adjsim.Splitting("BAOAB", 0.001, exact=True)
    plan = solver.plan(dynamics, start, 0.0)
    roundings = plan.lattice.roundings
    assert roundings["position"].spacing == 4 * 2.0**-40
    assert roundings["momentum"].spacing == 8 * 2.0**-44
    coefficients = plan.lattice.rationals(solver.coefficients(dynamics, start))
    growth = plan.lattice.buffer_growth(coefficients, [(s.letter, move) for s, move in plan.moves])
    (bits,) = (float(x) for x in growth.bits.values())
    assert bits == pytest.approx(0.0005 / math.log(2), rel=1e-6)
    assert FULL + bits * growth.check_every < math.log2(growth.limit)
    assert growth.check_every == 4096
