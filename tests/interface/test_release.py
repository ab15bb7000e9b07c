"""One version in every place that states it, and lower bounds that are tested."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from packaging.requirements import Requirement
from packaging.version import Version

import adjsim
import adjsim_command
from adjsim.cli.app import app
from adjsim.compiler import versions

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def constraints() -> dict[str, Version]:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return {name: Version(number) for name, number in (line.split("==") for line in lines)}


def test_one_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["adjsim", "--version"])
    adjsim_command.main()
    assert capsys.readouterr().out == f"adjsim {adjsim.__version__}\n"
    assert (
        re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
        == adjsim.__version__
    )
    assert re.search(
        r"^## (\S+) - (unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )[1] == (adjsim.__version__)


def test_the_list_of_commands_is_that_of_the_library():
    listed, real = (typer.main.get_command(x).commands for x in (adjsim_command.overview, app))
    assert list(listed) == list(real)
    for name, command in real.items():
        assert command.help.startswith(listed[name].help)


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_version_and_the_list_of_commands_are_printed_without_torch(option):
    """Importing torch takes seconds."""
    code = (
        f"import sys; sys.argv[1:] = [{option!r}]\n"
        "try: import adjsim_command; adjsim_command.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'adjsim', 'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "adjsim" in done.stdout


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    return [
        Requirement(text)
        for text in (*PROJECT["build-system"]["requires"], *project["dependencies"], *extras)
    ]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_lower_bounds_are_what_is_tested(requirement):
    """The bound is the tested version, to as many parts as the bound has; and the tested version is
    within all bounds.
    """
    version = constraints()[requirement.name]
    (lower,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
    assert version.release[: len(lower.release)] == lower.release
    assert version in requirement.specifier


def test_scipy_is_capped_below_its_next_minor_version():
    (scipy,) = (r for r in requirements() if r.name == "scipy")
    major, minor, *_ = constraints()["scipy"].release
    assert f"{major}.{minor + 1}.0" not in scipy.specifier


def test_compiling_names_the_torch_that_is_tested(monkeypatch):
    assert ".".join(map(str, constraints()["torch"].release[:2])) == versions.TESTED
    for version in (f"{versions.TESTED}.0", f"{versions.TESTED}.1+cpu"):
        monkeypatch.setattr(torch, "__version__", version)
        assert versions.untested_torch() is None
    for version in ("2.12.1", "3.0.0+cu130"):
        monkeypatch.setattr(torch, "__version__", version)
        assert (
            f"tested with torch {versions.TESTED} and not with {version}"
            in versions.untested_torch()
        )
