"""Mutation testing: the share of small changes of the source that a test notices.

::

    pip install -c constraints.txt -e ".[test,mutation]"
    python -m tests.mutants --count 200 --seed 0

The default tests run once, recording which test executes which line (about fifteen minutes).
Mutants are drawn at random places of ``dynamics``, ``adjoints`` and ``estimators``, and each is run
against the tests that execute its line, the shortest first, up to a minute of them. A mutant
survives if they all pass. The survivors are printed as differences.

A child process for each mutant is forked from this one, which has imported torch but not adjsim, so
that a mutant costs a second in addition to its tests.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import coverage
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
FOLDERS = ("dynamics", "adjoints", "estimators")
# Seconds of tests for a mutant, and the least number of tests.
BUDGET, LEAST = 60.0, 4
# A test that traces its loops itself is recorded at the lines that they are traced from.
OWN_LOOPS = "--own-loops"
PRELOADED = (
    "torch", "torchdiffeq", "torchsde", "scipy.integrate", "scipy.stats", "hypothesis",
    "jaxtyping", "beartype", "pytest",
)  # fmt: skip


class Mutant(NamedTuple):
    """A change of one place in a file."""

    path: str
    line: int
    operator: str
    occurrence: int


def places(path: Path) -> dict[tuple[int, int], list[Mutant]]:
    """The mutants of a file by line and column, without those of annotations."""
    source = path.read_text()
    annotations = [
        (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        for node in _annotations(ast.parse(source))
    ]
    found: dict[tuple[int, int], list[Mutant]] = {}
    nodes = list(ast_nodes(get_ast(source)))
    for name in operator_names():
        if name.split("/")[1].startswith("Variable"):  # These need the names of variables.
            continue
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
            for begin, _ in operator.mutation_positions(node):
                inside = any((a, b) <= begin <= (c, d) for a, b, c, d in annotations)
                if not inside:
                    relative = str(path.relative_to(ROOT))
                    mutant = Mutant(relative, begin[0], name, occurrence)
                    found.setdefault(begin, []).append(mutant)
                occurrence += 1
    return found


def _annotations(module: ast.Module) -> Iterator[Any]:
    for node in ast.walk(module):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                yield getattr(node, name)
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            yield node.value  # An alias of a type.


def draw(count: int, seed: int) -> list[tuple[Mutant, str]]:
    """Mutants and their sources: a random place each, and a random change of it."""
    generator, sources = random.Random(seed), {}
    everywhere = [
        options
        for folder in FOLDERS
        for path in sorted((ROOT / "adjsim" / folder).glob("**/*.py"))
        for _, options in sorted(places(path).items())
    ]
    while len(sources) < count:
        mutant = generator.choice(generator.choice(everywhere))
        if mutant in sources:
            continue
        before = (ROOT / mutant.path).read_text()
        after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
        try:
            if after is not None and ast.dump(ast.parse(after)) != ast.dump(ast.parse(before)):
                sources[mutant] = after
        except SyntaxError:
            continue
    return list(sources.items())


def copy_of_source(folder: Path) -> Path:
    """Copy the repository, without what is built and hidden, into a folder."""
    ignored = shutil.ignore_patterns("__pycache__", "_build", "*.egg-info", ".*")
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=ignored))


class Tests:
    """Which test executes which line, and how long it takes, in a copy of the repository."""

    def __init__(self, folder: Path) -> None:
        self.data, self.tree = coverage.CoverageData(str(folder / "coverage")), folder / "tree"
        if not (folder / "tests.xml").exists():
            self._record(folder)
        self.data.read()
        self.seconds = {
            f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(
                case.get("time", 0)
            )
            for case in ElementTree.parse(folder / "tests.xml").iter("testcase")
        }

    def _record(self, folder: Path) -> None:
        tree = copy_of_source(folder)
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "--cov=adjsim", "--cov-context=test"),
                *("--cov-report=", f"--junitxml={folder / 'tests.xml'}", OWN_LOOPS),
            ],
            cwd=tree,
            env={
                **os.environ,
                "COVERAGE_FILE": str(folder / "coverage"),
                "PYTHONPATH": str(tree),
            },
            check=True,
        )

    def of(self, mutant: Mutant) -> list[str]:
        """The shortest tests of a line; of the whole file, for a line that imports execute."""
        lines = self.data.contexts_by_lineno(str(self.tree / mutant.path))
        names = {context.split("|")[0] for context in lines.get(mutant.line, [])} - {""}
        if not names and "" in lines.get(mutant.line, []):
            names = {c.split("|")[0] for contexts in lines.values() for c in contexts} - {""}
        chosen, total = [], 0.0
        for name in sorted(names & self.seconds.keys(), key=lambda name: self.seconds[name]):
            total += self.seconds[name]
            if total > BUDGET and len(chosen) >= LEAST:
                break
            chosen.append(name)
        return chosen


def run(mutant: Mutant, source: str, tests: list[str], work: Path) -> str:
    """Run tests on a mutant, and return "killed", "survived", "timeout" or "not tested"."""
    if not tests:
        return "not tested"
    tree = copy_of_source(Path(tempfile.mkdtemp(dir=work)))
    (tree / mutant.path).write_text(source)
    child = os.fork()
    if child == 0:
        _test(tree, tests)
    deadline = time.monotonic() + 4 * BUDGET + 60
    status = None
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    shutil.rmtree(tree.parent)
    if status is None or time.monotonic() >= deadline:
        return "timeout"
    return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"


def _test(tree: Path, tests: list[str]) -> None:
    """Run tests in this process, and end it."""
    code = 1
    try:
        os.setsid()
        os.chdir(tree)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "adjsim")]:
            del sys.modules[name]
        import pytest

        plugins = ("-p", "no:cacheprovider", "-p", "no:xdist")
        options = ["-x", "-q", *plugins, "-o", "addopts=", OWN_LOOPS]
        code = int(pytest.main([*options, *tests]))
    finally:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the recorded lines are kept")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    tests = Tests(folder)
    for name in PRELOADED:
        importlib.import_module(name)
    mutants = draw(arguments.count, arguments.seed)
    results: list[tuple[Mutant, str]] = []

    def judged(drawn: tuple[Mutant, str]) -> None:
        mutant, source = drawn
        chosen = tests.of(mutant)
        outcome = run(mutant, source, chosen, folder)
        results.append((mutant, outcome))
        print(f"{len(results):4d} {outcome:10s} {len(chosen):4d} tests {mutant}", flush=True)
        if outcome in ("survived", "not tested"):
            before = (ROOT / mutant.path).read_text().splitlines()
            lines = difflib.unified_diff(before, source.splitlines(), lineterm="", n=1)
            print(
                "\n".join(line for line in lines if not re.match(r"---|\+\+\+", line)), flush=True
            )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(judged, mutants))
    counts = {k: sum(x == k for _, x in results) for k in sorted({x for _, x in results})}
    print(json.dumps({"seed": arguments.seed, "mutants": len(results), **counts}))


if __name__ == "__main__":
    main()
