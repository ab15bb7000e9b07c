"""The structure of the package keeps its limits, and the counts see what breaks them."""

import pytest

from tests.structure import measured


def test_the_package_keeps_its_limits():
    assert not measured().faults


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
