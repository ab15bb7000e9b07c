"""Folders of results that outlive the process that computes them.

A store is a folder with a manifest, which says what is computed there, and with parts, one file
each. A part is a tree of tensors and plain values, written by ``torch.save`` and read with
``weights_only``, so reading one runs no code of the file. Each file is written whole or not at all,
and has a checksum.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from adjsim.core.durable.files import check_writable, replacing

# A tree is None, a bool, an int, a float, a string, bytes, a dtype, a tensor, or a list or a dict
# of trees. Tuples become lists.
Nested = Any

# Of the bytes, and of the states of objects that they hold.
FORMAT = "adjsim 4"
# The empty bytes of a tree are read by a call of their class.
torch.serialization.add_safe_globals([bytes])
MANIFEST, LOCK, SUFFIX, CLAIM = "manifest.json", "lock", ".pt", ".claim"


class StoreError(ValueError):
    """Raised for a store that cannot be used."""


def to_bytes(tree: Nested, label: str = "") -> bytes:
    """Write a tree as bytes, with a checksum, and a label that reading asks for."""
    file = BytesIO()
    torch.save([label, _plain(tree)], file)
    body = file.getvalue()
    return b"".join((FORMAT.encode(), len(body).to_bytes(8, "little"), _checksum(body), body))


def from_bytes(data: bytes, label: str = "") -> Nested:
    """Read the tree of :func:`to_bytes`."""
    start = len(FORMAT)
    known, size = data[:start], data[start : start + 8]
    checksum, body = data[start + 8 : start + 24], data[start + 24 :]
    if known != FORMAT.encode() and known.startswith(b"adjsim "):
        found = known.decode(errors="replace")
        raise StoreError(f"has the format {found!r}, and this version reads {FORMAT!r}")
    if known != FORMAT.encode() or int.from_bytes(size, "little") != len(body):
        raise StoreError("is cut short, or was not written by adjsim")
    if checksum != _checksum(body):
        raise StoreError("is damaged: its checksum does not fit")
    there, tree = torch.load(BytesIO(body), weights_only=True)
    if there != label:
        raise StoreError("is of another computation, or another part of it")
    return tree


def _plain(tree: Nested) -> Nested:
    """Copy a tree, with tensors that have their own memory, and without subclasses."""
    if tree is None or isinstance(tree, torch.dtype | bytes):
        return tree
    if isinstance(tree, Tensor):
        # The order of axes in memory is kept, since sums depend on it in their last bits.
        return tree.detach().cpu().clone()
    if isinstance(tree, Mapping):
        return {str(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(value) for value in tree]
    for kind in (bool, int, float, str):
        if isinstance(tree, kind):
            return kind(tree)
    raise TypeError(f"a store has no form for {type(tree).__name__}.")


def moved(tree: Nested, device: torch.device) -> Nested:
    """Move all tensors of a tree to a device."""
    return tree_map_only(Tensor, lambda x: x.to(device), tree)


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may write, whatever the umask."""
    return os.open(path, flags, 0o644)


class Store:
    """The parts of one computation in a folder, which is made if it is absent.

    Every method raises a :class:`StoreError` where the folder or a file cannot be used.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._digest: str | None = None
        self._make()

    def __repr__(self) -> str:
        return f"Store('{self.folder}')"

    def path(self, name: str) -> Path:
        """Return the path of a part."""
        return self.folder / (name + SUFFIX)

    def has(self, name: str) -> bool:
        """Return whether there is a part of this name."""
        return self.path(name).exists()

    def read(self, name: str) -> Nested:
        """Read a part."""
        path = self.path(name)
        try:
            return from_bytes(path.read_bytes(), self._label(name))
        except OSError as error:
            raise StoreError(f"'{path}' cannot be read ({error.strerror or error}).") from None
        except StoreError as reason:
            raise StoreError(f"'{path}' {reason}. Remove it, and run again.") from None

    def write(self, name: str, tree: Nested) -> None:
        """Write a part, whole or not at all."""
        self._replace(self.path(name), to_bytes(tree, self._label(name)))

    def claim(self, name: str) -> bool:
        """Claim a part for this process, and return whether no other process has."""
        path = self.folder / (name + CLAIM)
        try:
            os.close(_private(f"{path}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        except OSError as error:
            raise _unwritten(path, error) from None
        return True

    def release(self) -> None:
        """Remove all claims, also those of processes that have ended."""
        for path in self.folder.glob("*" + CLAIM):
            path.unlink(missing_ok=True)

    @contextmanager
    def held(self, manifest: Mapping[str, str]) -> Generator[None, None, None]:
        """Keep other processes out of the store, and check that it is of this computation.

        The manifest says what is computed, by names that are shown where it differs.
        """
        # The folder may have been removed since, as between a run and its gradient.
        self._make()
        with open(self.folder / LOCK, "a+", encoding="utf-8", opener=_private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise StoreError(
                    f"store '{self.folder}' is in use by {owner}. Wait for it, or give another "
                    "folder."
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            self._check({"the format of the store": FORMAT, **manifest})
            self._digest = None
            yield

    def _make(self) -> None:
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            check_writable(self.folder, "store")
        except OSError as error:
            raise StoreError(
                f"store '{self.folder}' cannot be made ({error.strerror or error}); name another "
                "folder."
            ) from None
        except ValueError as reason:
            raise StoreError(str(reason)) from None

    def _check(self, manifest: Mapping[str, str]) -> None:
        path = self.folder / MANIFEST
        if not path.exists():
            if any(self.folder.glob("*" + SUFFIX)):
                raise StoreError(
                    f"store '{self.folder}' has parts and no {MANIFEST}; give another folder."
                )
            self._replace(path, json.dumps(dict(manifest), indent=2).encode())
            return
        try:
            known: dict[str, str] = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise StoreError(
                f"'{path}' is not a manifest of adjsim; give another folder."
            ) from None
        for name, here, there in differing(manifest, known):
            raise StoreError(
                f"store '{self.folder}' is of another computation: {name} is {here} here and "
                f"{there} there. Give another folder."
            )

    def _replace(self, path: Path, data: bytes) -> None:
        try:
            with replacing(path) as temporary, open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritten(path, error) from None

    def _label(self, name: str) -> str:
        """Return what a part says of itself: its name, and a hash of the manifest."""
        path = self.folder / MANIFEST
        if self._digest is None:
            try:
                self._digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            except FileNotFoundError:
                return name
            except OSError as error:
                raise StoreError(f"'{path}' cannot be read ({error.strerror or error}).") from None
        return f"{name} {self._digest}"


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the entries in which two descriptions differ, with both values."""
    for name in {**other, **one}:
        x, y = one.get(name, "absent"), other.get(name, "absent")
        if x != y:
            yield name, x, y


def _unwritten(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"'{path}' cannot be written ({error.strerror or error}). The parts that were written "
        "before are whole: run again with the same store to go on."
    )
