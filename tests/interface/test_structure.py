"""The structure of the package keeps its limits, and the counts see what breaks them."""

import subprocess
import sys

import pytest

from tests.structure import measured

# Packages that are imported where they are used.
HEAVY = {
    "ase", "matplotlib", "meshio", "openmm", "rich", "scipy", "torchdiffeq", "torchsde", "typer",
}  # fmt: skip


def test_the_package_keeps_its_limits():
    assert not measured().faults


@pytest.mark.slow
def test_heavy_packages_are_imported_where_they_are_used():
    code = "import sys, adjsim; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"a.py": "import package.b", "b.py": "def f():\n    import package.a"}, "a circle"),
        (
            {
                "a.py": "from package import b",
                "b.py": "if TYPE_CHECKING:\n    from package.a import c",
            },
            "a circle",
        ),
        ({"a.py": "\n" * 401}, "package.a has 401 lines"),
        ({f"file{k}.py": "" for k in range(15)}, "15 entries"),
        ({f"f{k:02}.py": f"import package.f{k + 1:02}" for k in range(13)}, "13 floors"),
    ],
)
def test_what_breaks_a_limit_is_seen(tmp_path, files, fault):
    root = tmp_path / "package"
    root.mkdir()
    for name, text in {"__init__.py": "", **files}.items():
        (root / name).write_text(text)
    assert any(found.startswith(fault) for found in measured(root).faults)
