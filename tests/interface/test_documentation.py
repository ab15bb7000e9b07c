"""The code that the documentation shows runs, and prints what stands beside it."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

import adjsim
from tests.problems import slow_but

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", re.MULTILINE)


@pytest.fixture(autouse=True)
def _default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_the_reference_lists_every_public_name():
    listed = (DOCS / "api.rst").read_text()
    assert not [name for name in adjsim.__all__ if not re.search(rf"\b{name}\b", listed)]


@pytest.mark.slow
def test_sessions_print_what_the_page_shows():
    failed, tried = doctest.testfile(
        str(DOCS / "getting_started.rst"), module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert tried > 20
    assert not failed


@pytest.mark.parametrize(
    "page",
    slow_but(
        lambda page: page in ("index", "coming_from", "scaling", "molecules"),
        [
            "index",
            "initial_value_problems",
            "extending",
            "molecules",
            "mechanics",
            "constraints",
            "constant_pressure",
            "vector_fields",
            "recipes",
            "coming_from",
            "scaling",
        ],
    ),
)
def test_blocks_of_code_run(page, capsys, monkeypatch):
    # Files are named as from the root of the repository.
    monkeypatch.chdir(DOCS.parent)
    names: dict = {"__name__": page}
    blocks = [
        re.sub(r"^   ", "", block, flags=re.MULTILINE)
        for block in BLOCK.findall((DOCS / f"{page}.rst").read_text())
    ]
    assert blocks
    for block in blocks:
        # Rows of tables in the tests and classes of tests are shown as they would be written there.
        if not re.search(r"^ *\.\.\.", block, re.MULTILINE) and "pytest" not in block:
            exec(block, names)
        shown = re.findall(r"print\(.*\)  # (-?[\d.]+)(?:, (-?[\d.]+))?", block)
        if shown:
            printed = [
                float(x)
                for x in re.findall(r"(?<![\w.])-?\d+\.\d*(?:e-?\d+)?", capsys.readouterr().out)
            ]
            expected = [float(x) for x in shown[0] if x]
            assert printed[: len(expected)] == pytest.approx(expected, rel=1e-3, abs=1e-6)
