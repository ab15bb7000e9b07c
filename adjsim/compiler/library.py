"""Compilation of C++ sources to shared libraries, which are cached on disk."""

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
from contextlib import suppress
from pathlib import Path

from adjsim.compiler.values import UnprintableError

# No contraction to fused multiply-add, so that results equal those of the traced operations bit for
# bit. Without floating-point traps both branches of a condition may be evaluated. Integers wrap
# around as in torch. Of what -O3 adds, two are of use to loops, in three quarters of its time.
FLAGS = [
    "-std=c++17", "-O2", "-fvect-cost-model", "-fpeel-loops", "-march=native",
    "-mprefer-vector-width=512", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fwrapv", "-fopenmp-simd", "-shared", "-fPIC",
]  # fmt: skip


class CompilerError(UnprintableError):
    """Raised if there is no C++ compiler, or if it fails."""


def folder() -> Path:
    """Return the folder of cached libraries.

    This is ``ADJSIM_CACHE``, or else ``adjsim`` in the user's cache folder. If it is not writable,
    a temporary folder of this process is used.
    """
    try:
        caches = os.environ.get("XDG_CACHE_HOME")
        given = os.environ.get("ADJSIM_CACHE")
        found = Path(given or Path(caches or Path.home() / ".cache") / "adjsim").absolute()
        found.mkdir(parents=True, exist_ok=True)
        if os.access(found, os.W_OK | os.X_OK):
            return found
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder.
        pass
    own = Path(_own_folder().name)
    own.mkdir(mode=0o700, exist_ok=True)  # A process forked from this one may have removed it.
    return own


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="adjsim-")


def compiled(source: str, threads: bool) -> ctypes.CDLL:
    """Load the library of a source, and compile it if it is not cached.

    ``threads`` is whether it has loops that threads share.
    """
    compiler, flags = _compiler(), _flags(threads)
    try:
        path = path_of(source, threads)
        # A truncated file, or one from another system, is built again.
        with suppress(OSError):
            return ctypes.CDLL(str(path))
        _build(source, [*compiler, *flags], path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(
            f"{shlex.join(compiler)} could not be run, or its library could not be loaded: {error}"
        ) from error


def path_of(source: str, threads: bool) -> Path:
    """Return the path of the cached library of a source."""
    compiler = _compiler()
    key_parts = [source, *compiler, _version(compiler), *_flags(threads), _processor()]
    return folder() / f"{hashlib.sha256(chr(0).join(key_parts).encode()).hexdigest()[:32]}.so"


def _build(source: str, command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        code, built = Path(work) / "loop.cpp", Path(work) / "loop.so"
        code.write_text(source)
        process = subprocess.run(
            [*command, str(code), "-o", str(built)], capture_output=True, text=True
        )
        if process.returncode:
            raise CompilerError(
                f"{shlex.join(command)} rejected the loop:\n{process.stderr[-2000:]}"
            )
        # An atomic replacement: other processes see a complete library or none.
        os.replace(built, path)


def _flags(threads: bool) -> list[str]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    flags = [flag for flag in FLAGS if "vector-width" not in flag or is_x86]
    return [*flags, "-fopenmp"] if threads else flags


@functools.cache
def _compiler() -> tuple[str, ...]:
    """Find the compiler command, which may have arguments, such as ``ccache g++``."""
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
    """Return the instruction set extensions of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
