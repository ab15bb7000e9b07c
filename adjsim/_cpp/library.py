"""C++ compiled into a library that is kept on disk, by what it was made of."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from adjsim._cpp.values import UnprintableError

# Without contraction into fused multiply-add, so that bits are those of the traced operations.
# No number traps, so both sides of a condition may be computed; integers wrap around as torch's do.
FLAGS = [
    "-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fopenmp-simd", "-shared", "-fPIC",
]  # fmt: skip


class CompilerError(UnprintableError):
    """There is no compiler, or it refused."""


def folder() -> Path:
    """Where libraries are kept: ``ADJSIM_CACHE``, or the user's folder for caches, or where that
    cannot be written one for this process."""
    try:
        given = os.environ.get("ADJSIM_CACHE")
        found = (
            Path(given)
            if given
            else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adjsim"
        )
        found = found.absolute()
        found.mkdir(parents=True, exist_ok=True)
        if os.access(found, os.W_OK | os.X_OK):
            return found
    except (OSError, RuntimeError):  # RuntimeError: a user without a home.
        pass
    own = Path(_own_folder().name)
    own.mkdir(mode=0o700, exist_ok=True)  # A process forked from this one may have removed it.
    return own


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="adjsim-")


def compiled(source: str, threads: bool) -> ctypes.CDLL:
    """The library of a source.

    Args:
        threads: whether it has loops that threads share.

    Raises:
        CompilerError: there is no C++ compiler, or it does not take the source.
    """
    compiler, flags = _compiler(), _flags(threads)
    try:
        path = path_of(source, threads)
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                pass  # Cut short, or made on another system: built again.
        _build(source, [*compiler, *flags], path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"{shlex.join(compiler)} could not be used: {error}") from error


def path_of(source: str, threads: bool) -> Path:
    """Where the library of a source is kept."""
    compiler = _compiler()
    made_of = [source, *compiler, _version(compiler), *_flags(threads), _processor()]
    return folder() / f"{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:32]}.so"


def _build(source: str, command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        code, made = Path(work) / "loop.cpp", Path(work) / "loop.so"
        code.write_text(source)
        done = subprocess.run(
            [*command, str(code), "-o", str(made)], capture_output=True, text=True
        )
        if done.returncode:
            raise CompilerError(f"{shlex.join(command)} refused the loop:\n{done.stderr[-2000:]}")
        # Whole or not at all, and the first of several processes serves all.
        os.replace(made, path)


def _flags(threads: bool) -> list[str]:
    flags = [
        flag
        for flag in FLAGS
        if "vector-width" not in flag or platform.machine() in ("x86_64", "AMD64")
    ]
    return [*flags, "-fopenmp"] if threads else flags


@functools.cache
def _compiler() -> tuple[str, ...]:
    """The command, which may have arguments, such as ``ccache g++``."""
    for command in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        name, *arguments = shlex.split(command) or [""]
        found = shutil.which(name) if name else None
        if found:
            return (found, *arguments)
    raise CompilerError("no C++ compiler was found (CXX, g++, clang++, c++)")


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout


@functools.cache
def _processor() -> str:
    """What code for this machine may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
