"""Fingerprints: each way of writing a function that hides a number or a formula."""

import array
import collections
import ctypes
import enum
import functools
import operator
import re
import warnings
import weakref
from contextvars import ContextVar
from datetime import timedelta
from decimal import Decimal
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn

import adjsim
from adjsim.core.cache_key import cache_key
from adjsim.core.durable.manifest import module_fingerprint, object_fingerprint


def times(n):
    def around(function):
        @functools.wraps(function)
        def scaled(*args):
            return n * function(*args)

        return scaled

    return around


def decorated_method(n):
    class Observed:
        @times(n)
        def __call__(self, state):
            return state.position

    return Observed()


def quiet(n):
    @torch.no_grad()
    def observed(state):
        return n * state.position

    return observed


def named_as_another(n):
    @functools.wraps(len)
    def observed(state):
        return n * state.position

    return observed


def _scaled(n, state):
    return n * state.position


def attribute(kind, n):
    class Observed:
        call = kind(_scaled, n) if kind is functools.partial else kind(lambda self, k, s: k * s, n)

        def __call__(self, state):
            return self.call(state)

    return Observed()


def method_of_a_container(base, n):
    if base is tuple:

        class Weights(NamedTuple):
            w: float

            def total(self, x, factor=n):
                return factor * self.w * x

        held = Weights(1.0)
    else:

        class Table(dict):
            def total(self, x, factor=n):
                return factor * x

        held = Table()
    return lambda state: held.total(state.position)


def bound(x, name):
    method = getattr(x, name)
    return lambda state: method(state)


def member(n):
    class Kind(enum.Enum):
        ONE = 1

        @property
        def factor(self, k=n):
            return k

    held = Kind.ONE
    return lambda state: held.factor * state.position


def of_base(base):
    class Same(base):
        pass

    return Same(1.0, 1.0)


def sparse(layout):
    with warnings.catch_warnings():
        # Of torch, that rows and columns are in beta state.
        warnings.simplefilter("ignore")
        return tuple((n * torch.eye(2)).to_sparse(layout=layout) for n in (1, 2))


PAIRS = {
    "decorated method": (decorated_method(1), decorated_method(2)),
    "function under no_grad": (quiet(1), quiet(2)),
    "function named as another": (named_as_another(1), named_as_another(2)),
    "cached function": tuple(functools.lru_cache(quiet(n)) for n in (1, 2)),
    "class attribute: partial": tuple(attribute(functools.partial, n) for n in (1, 2)),
    "class attribute: partialmethod": tuple(attribute(functools.partialmethod, n) for n in (1, 2)),
    "method of a named tuple": tuple(method_of_a_container(tuple, n) for n in (1, 2)),
    "method of a dictionary": tuple(method_of_a_container(dict, n) for n in (1, 2)),
    "bound builtin": (bound({1: 2}, "get"), bound({1: 3}, "get")),
    "bound method of a tensor": (bound(torch.ones(1), "mul"), bound(torch.zeros(1), "mul")),
    "attrgetter": tuple(map(operator.attrgetter, ("position", "momentum"))),
    "itemgetter": tuple(map(operator.itemgetter, (0, 1))),
    "property of a member": (member(1), member(2)),
    "sparse numbers": sparse(torch.sparse_coo),
    "sparse rows": sparse(torch.sparse_csr),
    "sparse columns": sparse(torch.sparse_csc),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "slice": (slice(0, 1), slice(0, 2)),
    "decimal number": (Decimal("1.0"), Decimal("1.5")),
    "time": tuple(map(timedelta, (1, 2))),
    "pattern": tuple(map(re.compile, "ab")),
    "transform": tuple(torch.func.vmap(_scaled, in_dims=(None, n)) for n in (0, 1)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_what_a_function_hides_is_seen(pair):
    one, other = (object_fingerprint(x, "x") for x in pair)
    assert one == object_fingerprint(pair[0], "x")
    assert one != other


def test_the_base_of_a_class_is_seen():
    found = {
        module_fingerprint(adjsim.Hamiltonian(of_base(base)))
        for base in (adjsim.LennardJones, adjsim.WCA)
    }
    assert len(found) == 2


class Caching(nn.Module):
    """A potential that keeps results as long as their positions live."""

    def __init__(self):
        super().__init__()
        self.known = WeakKeyDictionary()

    def forward(self, position):
        return position.square().sum((-1, -2))


def test_entries_of_weak_dictionaries_are_left_out():
    potential = Caching()
    before, key = module_fingerprint(potential), torch.nn.Identity()
    potential.known[key] = 1.0
    assert module_fingerprint(potential) == before


def test_a_run_leaves_the_fingerprint_of_its_solver():
    """A method keeps numbers that it computes when it is used for the first time."""
    method = adjsim.Tableau([[], [1.0]], [0.5, 0.5], error=[0.5, -0.5])
    solver, equation = adjsim.RungeKutta(method, 0.1), adjsim.ODE(lambda t, y: -y)
    before = object_fingerprint(solver, "x")
    adjsim.simulate(equation, equation.init(torch.ones(1, 1)), [0.0, 0.2], solver=solver)
    assert object_fingerprint(solver, "x") == before


class Number(float):
    """A number with a unit."""


class Row(np.ndarray):
    """An array with a unit."""


VARIABLE = ContextVar("VARIABLE")
ALIVE = []


def number(c):
    x = Number(1.0)
    x.unit = c
    return x


def row(c):
    x = np.zeros(2).view(Row)
    x.unit = c
    return x


def variable(c):
    VARIABLE.set(c)
    return VARIABLE


def referred(c):
    ALIVE.append(number(c))
    return weakref.ref(ALIVE[-1])


def table(c):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"a": [1.0, c], "b": ["x", "y"]})


@pytest.mark.parametrize(
    "made",
    [
        number,
        row,
        variable,
        referred,
        table,
        lambda c: table(c)["a"],
        lambda c: table(0.0).rename(columns={"a": str(c)}),
        lambda c: np.ma.array([1.0, 2.0], mask=[c > 1, False], fill_value=1.0),
        lambda c: collections.defaultdict(lambda: c),
        lambda c: array.array("d", [c]),
        ctypes.c_double,
    ],
)
def test_values_of_an_attribute_are_seen(made):
    """In compiled code too, which holds them; a value made anew is equal."""
    fields = nn.Module(), nn.Module(), nn.Module()
    keys = []
    for field, c in zip(fields, (1.0, 2.0, 1.0), strict=True):
        field.value = made(c)
        keys.append((cache_key(field), module_fingerprint(field)))
    assert not keys[0][0].opaque
    assert all(a != b for a, b in zip(*keys[:2], strict=True))
    assert keys[0] == keys[2]


def test_a_generator_may_draw_between_runs():
    field, generator = nn.Module(), np.random.default_rng(1)
    field.value = generator
    found = module_fingerprint(field)
    generator.normal()
    assert module_fingerprint(field) == found
