"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Yield a temporary file beside ``path``, which replaces it when the block succeeds.

    The temporary file has the same last two suffixes, and is removed if the block raises an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = ".tmp" + "".join(path.suffixes[-2:])
    handle, name = tempfile.mkstemp(suffix, f".{path.name}.", path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path, what: str = "output") -> None:
    """Refuse a folder that cannot be written; ``what`` names it in the error.

    A file is written and removed, since permission bits do not show a full disk, a quota or a
    read-only mount.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{what} '{folder}' is a file; name a folder.")
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".adjsim-") as file:
            file.write(b"adjsim")
    except OSError as error:
        raise ValueError(
            f"{what} '{folder}' cannot be written ({error.strerror or error}); name another folder."
        ) from error
    finally:
        for path in absent:
            if path.is_dir():
                path.rmdir()
