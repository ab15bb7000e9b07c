"""Expressions of OpenMM: values, derivatives, and what cannot be read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from adjsim.potentials import (
    ContinuousFunction,
    CustomBond,
    CustomCompound,
    CustomExternal,
    CustomHydrogenBond,
    DiscreteFunction,
    Expression,
)

VALUES = [
    ("-x^2", {"x": 3.0}, -9.0),
    ("2^3^2 + 0*x", {"x": 1.0}, 512.0),
    ("a-b-c", {"a": 1.0, "b": 2.0, "c": 3.0}, -4.0),
    ("a/b*c", {"a": 8.0, "b": 2.0, "c": 3.0}, 12.0),
    ("2*-x", {"x": 3.0}, -6.0),
    ("x^-2", {"x": 2.0}, 0.25),
    ("x^0.5", {"x": 2.0}, 2.0**0.5),
    ("1e-3*x + .5 - 2.", {"x": 1000.0}, -0.5),
    ("select(step(x-1),y,y^2);y=x*z;z=2", {"x": 0.5}, 1.0),
    ("select(x, 1/3, 0) + lambda", {"x": 2.0, "lambda": 5.0}, 1 / 3 + 5),
    ("min(x,2)+max(x,0.1)", {"x": 1.0}, 2.0),
    ("delta(x)+step(x)", {"x": 0.0}, 2.0),
    ("sec(x)+csc(x)+cot(x)", {"x": 0.7}, sum(1 / f(0.7) for f in (math.cos, math.sin, math.tan))),
    ("atan2(x, 1)+recip(x)+cube(x)+square(x)", {"x": 0.5}, math.atan(0.5) + 2 + 0.125 + 0.25),
    # A definition is known to what stands before it alone, as in Lepton.
    ("x*a;b=2;a=b", {"x": 3.0, "b": 5.0}, 15.0),
    ("x*a;a=2;a=3", {"x": 3.0}, 6.0),
    ("x*a;a=a*2", {"x": 3.0, "a": 5.0}, 30.0),
    ("x*f;g=h*2;f=g+h;h=2", {"x": 1.0, "g": 1.5}, 3.5),
    ("floor(x)+ceil(x)+abs(-x)+erf(x)+erfc(x)", {"x": 1.5}, 1 + 2 + 1.5 + 1),
]


def tensors(values):
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in values.items()}


@pytest.mark.parametrize(("text", "values", "expected"), VALUES)
def test_values(text, values, expected):
    found = Expression(text)
    assert found.names == set(values)
    assert float(found(tensors(values))) == pytest.approx(expected, rel=1e-15)


@given(st.recursive(
    st.sampled_from(["x", "2.5", "0.3"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"{t[0]} {t[1]} {t[2]}"),
        inner.map(lambda x: f"-({x})"),
        inner.map(lambda x: f"({x})^2"),
        inner.map(lambda x: f"cos({x})"),
    ),
    max_leaves=12,
))  # fmt: skip
def test_drawn_expressions_have_the_values_of_python(text):
    """Python has the same precedences, with ** for a power."""
    try:
        expected = eval(text.replace("^", "**"), {"x": 0.7, "cos": math.cos})
    except (ZeroDivisionError, OverflowError):
        return
    found = Expression(text)(tensors({"x": 0.7}))
    assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x+", "at place 2: a number, a name or a bracket is expected"),
        ("2*(x", r"at place 4: '\)' is expected"),
        ("1+foo(x)", "at place 2: foo is no function"),
        ("x y", "at place 2: an operator is expected"),
        ("min(x)", "min takes 2 arguments, not 1"),
        ("", "at place 0: a number"),
        ("x;y", "at place 2: a definition, name=expression, is expected"),
        ("3$x", "at place 1: an operator is expected"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        Expression(text)


def test_numbers_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"has the names k \(the first at place 0\), and numbers has c"
    ):
        CustomBond([[0, 1]], "k*r", {"c": 1.0})
    changed = CustomBond([[0, 1]], "k*r", {"k": 1.0})
    changed.expression = Expression("k*r+c")
    with pytest.raises(ValueError, match=r"has the names c \(.* at place 4\), and numbers has k"):
        changed(torch.eye(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="'types' has the name of an attribute or"):
        CustomBond([[0, 1]], "types*r", {"types": 1.0})
    with pytest.raises(ValueError, match="'r' has the name of an attribute or of the coordinate"):
        CustomBond([[0, 1]], "k*r", {"k": 1.0, "r": 1.0})


def test_tables_outside_of_their_range():
    at = torch.tensor([-3.0, -0.6, -0.4, 0.0, 1.0, 2.4, 3.0, 3.1, math.nan], dtype=torch.float64)
    whole = DiscreteFunction([1.0, 2.0, 3.0])(at)
    assert whole.nan_to_num(0).tolist() == [0, 0, 1, 1, 2, 3, 0, 0, 0]
    natural = ContinuousFunction([0.0, 1.0, 4.0, 9.0], 0.0, 3.0)(at)
    torch.testing.assert_close(
        natural[[0, 1, 2, 3, 4, 6, 7]], torch.tensor([0.0, 0, 0, 0, 1, 9, 0]).double()
    )
    wrapped = ContinuousFunction([2.0, 1.0, 4.0], 0.0, 3.0, periodic=True)
    torch.testing.assert_close(wrapped(at), wrapped(at + 3), rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(wrapped(at[[0, 4]]), torch.tensor([2.0, 1.0]).double())
    assert all(bool(f[-1].isnan()) for f in (whole, natural, wrapped(at)))


@pytest.mark.parametrize("periodic", [False, True])
def test_a_table_whose_settings_change(periodic):
    """The function is that of a table made with the present settings."""
    at = torch.linspace(0, 2.9, 7, dtype=torch.float64)
    for wanted in (
        ContinuousFunction([2.0, 1.0, 4.0], 0.0, 3.0, periodic=periodic),
        ContinuousFunction([2.0, 1.0, 4.0, 3.0, 0.0], 0.0, 3.0, periodic=periodic),
    ):
        table = ContinuousFunction([2.0, 1.0, 4.0], 0.0, 3.0, periodic=not periodic)
        assert not torch.allclose(table(at), wanted(at))
        table.periodic, table.values = periodic, wanted.values
        torch.testing.assert_close(table(at), wanted(at), rtol=0, atol=0)


CONSTANT = DiscreteFunction([1.0, 2.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ContinuousFunction([1.0], 0, 1), "at least 2 entries"),
        (lambda: ContinuousFunction([1.0, 2.0], 1, 0), "high must be above low; got 0 and 1"),
        (lambda: ContinuousFunction(torch.ones(2, 2, 2), (0, 1), 2), "of the 3 arguments; got 2"),
        (
            lambda: CustomBond([[0, 1]], "f*f(r)", {"f": 1.0}, tables={"f": CONSTANT}),
            "'f' is a number and a table",
        ),
        (
            lambda: CustomHydrogenBond([[0]], [[1]], "distance(d1,a1)", exclusions=[[-1, 0]]),
            r"exclusions\[0\] names donor -1, and donors are counted from 0 to 0",
        ),
        (lambda: CustomExternal([[0, 1]], "x"), "index must be"),
        (lambda: CustomExternal([0], "distance(p1,p1)"), "place 0: distance is no function"),
        (
            lambda: CustomBond([[0, 1]], "f(r,2)", tables={"f": DiscreteFunction([1.0, 2.0])}),
            "place 6: f takes 1 arguments, not 2",
        ),
        (
            lambda: CustomHydrogenBond([[0]], [[1]], "distance(d1,a1)", exclusions=[[0, 0]]),
            "all pairs of a donor and an acceptor are excluded",
        ),
        (lambda: changed(expression=Expression("distance(p1,p2)", ["p1", "p2"])), "make it again"),
    ],
)
def test_terms_that_cannot_be_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def changed(**settings):
    """Evaluate a term whose settings have changed since it was made."""
    potential = CustomCompound([[0, 1]], "x1+x2")
    vars(potential).update(settings)
    potential(torch.eye(3, dtype=torch.float64))


def test_places_do_not_move_with_a_box():
    with pytest.raises(TypeError, match="its expression reads Cartesian coordinates"):
        CustomExternal([0], "x^2", box=[4.0] * 3).virial(torch.eye(3, dtype=torch.float64))
