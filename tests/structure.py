"""Counts of the package's structure, with the limits that they must keep.

    python -m tests.structure

Imports are those of the text: at the top of a file, in functions, and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "adjsim"
# Entries beside __init__.py, __main__.py and py.typed; floors of entries; lines of one file.
ENTRIES, FLOORS, LINES = 14, 12, 400

Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Structure:
    """The structure of a package.

    Attributes:
        entries: its files and folders.
        floors: the largest number of entries that import each other in a chain.
        circles: groups of files that import each other in a circle.
        long_files: files with more lines than allowed, with their number.
        lines: the lines of each entry.
    """

    entries: list[str]
    floors: int
    circles: list[list[str]]
    long_files: dict[str, int]
    lines: dict[str, int]

    @property
    def faults(self) -> list[str]:
        """Describe the limits that are broken."""
        found = [f"a circle of imports: {', '.join(circle)}" for circle in self.circles]
        found += [f"{name} has {lines} lines" for name, lines in self.long_files.items()]
        if len(self.entries) > ENTRIES:
            found.append(f"{len(self.entries)} entries: {', '.join(self.entries)}")
        if self.floors > FLOORS:
            found.append(f"{self.floors} floors")
        return found


def measured(root: Path = ROOT) -> Structure:
    """Measure the structure of a package."""
    files = {_name(path, root): path for path in sorted(root.rglob("*.py"))}
    graph = {name: _imported(path.read_text(), files) - {name} for name, path in files.items()}
    hidden = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    entries = sorted(path.name for path in root.iterdir() if path.name not in hidden)
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        room = _entry(name)
        rooms.setdefault(room, set()).update({_entry(other) for other in others} - {room})
    total: dict[str, int] = {}
    for name, count in lines.items():
        total[_entry(name)] = total.get(_entry(name), 0) + count
    return Structure(
        entries,
        _longest_chain(rooms),
        [circle for circle in _components(graph) if len(circle) > 1],
        {name: count for name, count in lines.items() if count > LINES},
        total,
    )


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _entry(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def _imported(text: str, known: Iterable[str]) -> set[str]:
    names = set(known)
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in names else node.module)
    return found & names


def _longest_chain(graph: Graph) -> int:
    components = _components(graph)
    place = {name: k for k, circle in enumerate(components) for name in circle}

    @cache
    def height(k: int) -> int:
        below = {place[other] for name in components[k] for other in graph.get(name, set())} - {k}
        return len(components[k]) + max((height(other) for other in below), default=0)

    return max(height(k) for k in range(len(components)))


def _components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph.get(name, set())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def main() -> None:
    """Print the counts, and end with an error if a limit is broken."""
    found = measured()
    print(f"entries {len(found.entries)} of {ENTRIES}, floors {found.floors} of {FLOORS}")
    print(f"circles {len(found.circles)}, files above {LINES} lines {len(found.long_files)}")
    for name, lines in sorted(found.lines.items(), key=lambda x: -x[1]):
        print(f"{lines:7,} {name}")
    print(f"{sum(found.lines.values()):7,} lines")
    if found.faults:
        sys.exit("\n".join(found.faults))


if __name__ == "__main__":
    main()
