"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Yield a temporary file in the same folder, which replaces ``path`` when the block succeeds.

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
