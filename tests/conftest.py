"""Every test runs in float64 on one thread, the default ones with annotations checked."""

import gc

import jaxtyping
import pytest
import torch

from adjsim.adjoints.loops.runner import cache
from tests.annotations import check_annotations


def pytest_addoption(parser):
    parser.addoption(
        "--own-loops", action="store_true", help="let every test compile the loops that it runs"
    )


def pytest_configure(config):
    """Check annotations in the default tests, since the others make the same calls."""
    if "not slow" in config.option.markexpr:
        check_annotations()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Refuse tests with both marks: ``-m slow`` would run a marathon."""
    marks = ("slow", "marathon")
    if both := [x.nodeid for x in items if all(map(x.get_closest_marker, marks))]:
        raise pytest.UsageError(f"marked slow and marathon: {', '.join(both)}")


def pytest_collection_finish():
    """Leave modules and tests, a million objects, out of collections, and collect less often.

    Traces make so many objects that the usual threshold costs the tests a twentieth of their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def _setting(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    # A test that patches the library neither takes the loops of others nor leaves its own.
    if "monkeypatch" in request.fixturenames or request.config.getoption("--own-loops"):
        request.getfixturevalue("own_loops")
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def own_loops():
    """Drop all compiled loops before and after a test that counts compilations, or patches."""
    cache.drop(lambda key: True)
    yield
    cache.drop(lambda key: True)


@pytest.fixture
def unchecked():
    """Leave arguments of wrong types to the library, which has errors of its own for them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
