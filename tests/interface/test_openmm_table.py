"""The table of docs/molecules.rst: adjsim beside OpenMM, over the files that OpenMM ships."""

from __future__ import annotations

import importlib

import pytest

from tests.openmm_systems import DATA


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(DATA))
    return importlib.import_module("make_openmm_table")


def assert_within_limits(script, row):
    cells = dict(zip(script.COLUMNS, row, strict=True))
    if cells["force field"] == "swm4ndp.xml":
        assert cells["numbers"].startswith("refused: DrudeForce, force 2 of the system, is polar")
        return
    assert int(cells["numbers"]) > 0
    for name, limit in script.LIMITS.items():
        assert 0 <= float(cells[name]) < limit, (name, cells)


def test_stored_rows_keep_the_limits(script):
    rows = script.stored()
    assert list(rows) == script.CASES
    for row in rows.values():
        assert_within_limits(script, row)
        assert len(row[-1]) == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swm4ndp.xml", "charmm36.xml"])
def test_rows_made_again(script, name):
    number = next(k for k, (files, _) in enumerate(script.CASES) if files == name)
    row = script.row(number)
    assert_within_limits(script, [*row, ""])
    stored = script.stored()[script.CASES[number]]
    assert list(map(str, row[:4])) == stored[:4]
