"""The folder of cached libraries: where it is, what of it may be loaded, and how large it grows.

A library is code that a process runs. So a library is loaded only if it and its folder are the
user's own, and nobody else can write to them. In a folder that others own or can write to, each
user has a folder of the user's own.
"""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# The bytes that libraries and their sources may take. Those used least recently go first.
CACHE_LIMIT = 2**29
# The number of libraries that are built before the size is looked at again.
EVERY = 32


def cache_folder() -> Path:
    """Return the folder of cached libraries.

    This is ``ADJSIM_CACHE``, or else ``adjsim`` in the user's cache folder, or in either a folder
    of the user's own. If it is not writable, a temporary folder of this process is used.
    """
    try:
        caches = os.environ.get("XDG_CACHE_HOME")
        given = os.environ.get("ADJSIM_CACHE")
        found = Path(given or Path(caches or Path.home() / ".cache") / "adjsim").absolute()
        found.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_private(found):
            found = found / f"user-{os.getuid()}"
            found.mkdir(exist_ok=True, mode=0o700)
        if os.access(found, os.W_OK | os.X_OK) and is_private(found):
            return found
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder.
        pass
    own = Path(_own_folder().name)
    own.mkdir(mode=0o700, exist_ok=True)  # A process forked from this one may have removed it.
    return own


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="adjsim-")


def is_private(path: Path) -> bool:
    """Whether a file or folder is the user's own, and nobody else can write to it."""
    if not hasattr(os, "getuid"):
        return True
    found = os.lstat(path)
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.getuid() and not others and not stat.S_ISLNK(found.st_mode)


def usable(path: Path) -> bool:
    """Whether a cached library may be loaded; it then counts as used."""
    try:
        if is_private(path):
            os.utime(path)
            return True
    except OSError:
        pass
    return False


class Entry(NamedTuple):
    """A library with its source: the time of its last use, its bytes and its files."""

    used: float
    size: int
    files: tuple[Path, ...]


def cache_entries(at: Path) -> list[Entry]:
    """Return the libraries of a folder, the one used least recently first."""
    found = []
    for path in at.glob("*.so"):
        files = (path, path.with_suffix(".cpp"))
        with suppress(OSError):  # Another process may remove it.
            sizes = [file.stat().st_size for file in files if file.exists()]
            found.append(Entry(path.stat().st_mtime, sum(sizes), files))
    return sorted(found)


def trim_cache(at: Path, limit: int = CACHE_LIMIT) -> None:
    """Remove the libraries used least recently until a folder is within a limit."""
    found = cache_entries(at)
    total = sum(entry.size for entry in found)
    for entry in found:
        if total <= limit:
            return
        for file in entry.files:
            file.unlink(missing_ok=True)
        total -= entry.size
