"""SciPy's own tests of solve_ivp, as shipped inside SciPy, run against :func:`adjsim.solve_ivp`.

An adapter gives them tensors as arrays and nothing else: every test is SciPy's, in its own words.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.integrate._ivp
import torch

import adjsim


def as_array(x: Any) -> Any:
    return x.detach().numpy() if isinstance(x, torch.Tensor) else x


class Dense:
    """A dense solution whose values are arrays; all else is that of ours."""

    def __init__(self, solution: Any) -> None:
        self.solution = solution

    def __getattr__(self, name: str) -> Any:
        return as_array(getattr(self.solution, name))

    def __call__(self, t: Any) -> np.ndarray:
        return as_array(self.solution(t))


def solve_ivp(*args: Any, **options: Any) -> Any:
    """Ours, with arrays in its result."""
    found = adjsim.solve_ivp(*args, **options)
    for name, value in found.items():
        found[name] = [as_array(x) for x in value] if isinstance(value, list) else as_array(value)
    if not len(found.t):
        # SciPy's result for no time at all, of which arrays have no truth value.
        found.t, found.y = [], []
    found.sol = None if found.sol is None else Dense(found.sol)
    return found


def load() -> ModuleType:
    path = Path(scipy.integrate._ivp.__file__).parent / "tests" / "test_ivp.py"
    spec = importlib.util.spec_from_file_location("scipy_suite", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.solve_ivp = solve_ivp
    return module


# Tests of a second and more: Jacobians by differences, and arguments under all methods.
LONG = ("test_integration_sparse_difference", "test_args")


def rows(name: str, test: Any) -> list[Any]:
    """A test of SciPy's with each set of its parameters, and marked slow where SciPy does."""
    marks = getattr(test, "pytestmark", [])
    long = name in LONG or any(mark.name == "slow" for mark in marks)
    slow = [pytest.mark.slow] if long else []
    sets = [{}]
    for mark in (mark for mark in marks if mark.name == "parametrize"):
        sets = [{**one, mark.args[0]: value} for one in sets for value in mark.args[1]]
    return [
        pytest.param(test, values, id="-".join([name, *map(str, values.values())]), marks=slow)
        for values in sets
    ]


SUITE = load()
TESTS = [
    row
    for name, test in vars(SUITE).items()
    if name.startswith("test_")
    for row in rows(name, test)
]


@pytest.mark.parametrize(("test", "values"), TESTS)
@pytest.mark.filterwarnings("ignore")
def test_of_scipy(test, values):
    test(
        **values,
        **(
            {"num_parallel_threads": 1}
            if "num_parallel_threads" in inspect.signature(test).parameters
            else {}
        ),
    )


def test_all_of_them_are_here():
    assert len(TESTS) == 58
