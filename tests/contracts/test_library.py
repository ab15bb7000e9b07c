"""Libraries of printed programs: their sources, who may load them, and how many are kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adjsim.cli.app import app
from adjsim.compiler import cache, library


def test_libraries_without_a_folder_that_can_be_written(tmp_path, monkeypatch):
    """A folder of this process serves instead, and a library that was cut short is built again."""
    source = 'extern "C" int run(const void* const* in, void* const* out) { return 42; }'
    (tmp_path / "file").touch()
    monkeypatch.setenv("ADJSIM_CACHE", str(tmp_path / "file" / "below"))
    assert library.compiled(source, False).run(None, None) == 42
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADJSIM_CACHE", ".")
    (tmp_path / library.path_of(source, False).name).write_text("")
    assert library.compiled(source, False).run(None, None) == 42


SOURCE = """extern "C" int run(const void* const* in, void* const* out) {
if (in) {
return 1;
}
return 42; // user.py:7
}"""


def test_sources_are_beside_their_libraries(tmp_path, monkeypatch):
    """Indented, with comments, which do not belong to the key."""
    monkeypatch.setenv("ADJSIM_CACHE", str(tmp_path))
    assert library.compiled(SOURCE, False).run(None, None) == 42
    path = library.path_of(SOURCE, False)
    assert path == library.path_of(SOURCE.replace("user.py:7", "user.py:9"), False)
    lines = path.with_suffix(".cpp").read_text().split("\n")
    assert lines[1:] == ["  if (in) {", "    return 1;", "  }", "  return 42; // user.py:7", "}"]
    assert {x.name for x in tmp_path.iterdir()} == {path.name, path.with_suffix(".cpp").name}


@pytest.mark.parametrize(
    "what", ["the library", pytest.param("the folder", marks=pytest.mark.slow)]
)
def test_libraries_that_others_can_write_are_not_loaded(what, tmp_path, monkeypatch):
    other = SOURCE.replace("42", "13")
    monkeypatch.setenv("ADJSIM_CACHE", str(tmp_path))
    library.compiled(other, False)
    path = library.path_of(SOURCE, False)
    library.path_of(other, False).rename(path)
    if what == "the folder":
        tmp_path.chmod(0o777)
        (mine,) = {library.path_of(SOURCE, False).parent} - {tmp_path}
        assert mine.parent == tmp_path
        assert mine.stat().st_mode & 0o777 == 0o700
    else:
        path.chmod(0o777)
    assert library.compiled(SOURCE, False).run(None, None) == 42


def test_a_library_of_another_user_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("ADJSIM_CACHE", str(tmp_path))
    library.compiled(SOURCE, False)
    path, me = library.path_of(SOURCE, False), os.getuid()
    assert cache.usable(path)
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert not cache.usable(path)
    # Neither is the folder, which the process cannot make its own.
    assert tmp_path not in cache.cache_folder().parents


def test_the_cache_has_a_bound(tmp_path, monkeypatch):
    """The libraries used least recently go first; using one counts."""
    monkeypatch.setenv("ADJSIM_CACHE", str(tmp_path))
    paths = []
    for number in range(3):
        source = SOURCE.replace("42", str(number))
        library.compiled(source, False)
        paths.append(library.path_of(source, False))
        os.utime(paths[-1], (number, number))
    library.compiled(SOURCE.replace("42", "0"), False)
    found = cache.cache_entries(tmp_path)
    assert [entry.files[0] for entry in found] == [paths[1], paths[2], paths[0]]
    cache.trim_cache(tmp_path, sum(entry.size for entry in found) - 1)
    assert not paths[1].exists()
    assert not paths[1].with_suffix(".cpp").exists()
    assert paths[2].exists()
    cache.trim_cache(tmp_path, found[0].size)
    assert [entry.files[0] for entry in cache.cache_entries(tmp_path)] == [paths[0]]
    shown = CliRunner().invoke(app, ["cache"])
    assert f"{tmp_path}: 1 libraries" in shown.output
    assert CliRunner().invoke(app, ["cache", "--clear"]).output.startswith("Removed 1 libraries")
    assert not list(tmp_path.iterdir())


DEBUGGED = """
import sys, torch
from adjsim.compiler import values
from tests.contracts.test_cpp import numbers, printed

if sys.argv[1:]:
    values.offset = lambda index, strides: values.Index(1000)
x = numbers(13, 3)
y = printed(lambda x: x.sin() @ x.mT[:, :3], x)
torch.testing.assert_close(y, x.sin() @ x.mT[:, :3], rtol=1e-13, atol=0)
"""


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(False, marks=pytest.mark.marathon), pytest.param(True, marks=pytest.mark.slow)],
)
def test_a_debug_build_checks_bounds(wrong, tmp_path):
    """A wrong index of a statement ends the process with its line and the name of the buffer."""
    made = subprocess.run(
        [sys.executable, "-c", DEBUGGED, *(["wrong"] if wrong else [])],
        env={**os.environ, "ADJSIM_DEBUG": "1", "ADJSIM_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    if wrong:
        assert made.returncode == -signal.SIGABRT
        file, line = re.search(
            r"adjsim: (.+):(\d+): index 1000 of \w+, which has \d+ elements", made.stderr
        ).groups()
        assert "1000" in Path(file).read_text().splitlines()[int(line) - 1]
    else:
        assert made.returncode == 0, made.stderr
