"""Compilation of C++ sources to shared libraries, which are cached on disk."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path

from adjsim.compiler.cache import EVERY, cache_folder, trim_cache, usable
from adjsim.compiler.values import UnprintableError

# No contraction to fused multiply-add, so that results equal those of the traced operations bit for
# bit. Without floating-point traps both branches of a condition may be evaluated. Integers wrap
# around as in torch.
FLAGS = [
    "-std=c++17", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fopenmp-simd", "-shared", "-fPIC",
]  # fmt: skip
# Of what -O3 adds, two are of use to loops, in three quarters of its time.
OPTIMISED = ["-O2", "-fvect-cost-model", "-fpeel-loops"]
# Most loops are as fast without some searches of -O2 for common expressions, in two thirds of its
# time. Kernels of pairs, and loops that threads share, are a twentieth slower.
OPTIMISED_BY_GCC = [
    "-O1", "-ftree-loop-vectorize", "-ftree-slp-vectorize", "-fvect-cost-model", "-fpeel-loops",
    "-fcaller-saves", "-fcode-hoisting", "-fexpensive-optimizations", "-finline-small-functions",
    "-fipa-cp", "-fipa-ra", "-fstore-merging", "-fstrict-aliasing", "-fthread-jumps", "-ftree-vrp",
]  # fmt: skip
# Linking with the C library alone takes two thirds of the time of linking with that of C++ too.
LIBRARIES = ["-nodefaultlibs", "-lm", "-lc", "-lgcc"]


# Counts the libraries that this process builds.
_built = count(1)


class CompilerError(UnprintableError):
    """Raised if there is no C++ compiler, or if it fails."""


def compiled(source: str, threads: bool, containers: bool = False) -> ctypes.CDLL:
    """Load the library of a source, and compile it if it is not cached.

    ``threads`` is whether it has loops that threads share, and ``containers`` whether it uses those
    of C++'s own library, and its exceptions.
    """
    compiler, flags = _compiler(), _flags(threads, containers)
    try:
        path = path_of(source, threads, containers)
        # A truncated file, or one from another system, is built again.
        if usable(path):
            with suppress(OSError):
                return ctypes.CDLL(str(path))
        _build(source, [*compiler, *flags], _libraries(threads, containers), path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(
            f"{shlex.join(compiler)} could not be run, or its library could not be loaded: {error}"
        ) from error


def path_of(source: str, threads: bool, containers: bool = False) -> Path:
    """Return the path of the cached library of a source, beside which its source is."""
    compiler = _compiler()
    # Comments have lines of the user's code, which move.
    code = re.sub(r"//[^\n]*", "", source)
    key_parts = [code, *compiler, _version(compiler), *_flags(threads, containers)]
    key_parts += [*_libraries(threads, containers), _processor()]
    return cache_folder() / f"{hashlib.sha256(chr(0).join(key_parts).encode()).hexdigest()[:32]}.so"


def _build(source: str, command: list[str], libraries: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        code, built = Path(work) / "loop.cpp", Path(work) / "loop.so"
        code.write_text(indented(source))
        kept = path.with_suffix(".cpp")
        # Debuggers and the checks of bounds name the file that is kept.
        names = [f"-ffile-prefix-map={code}={kept}"] if debugging() else []
        process = subprocess.run(
            [*command, *names, str(code), *libraries, "-o", str(built)],
            capture_output=True,
            text=True,
        )
        if process.returncode:
            raise CompilerError(
                f"{shlex.join(command)} rejected the loop:\n{process.stderr[-2000:]}"
            )
        built.chmod(0o700)
        # An atomic replacement: other processes see a complete library or none.
        os.replace(code, kept)
        os.replace(built, path)
    if next(_built) % EVERY == 0:
        trim_cache(path.parent)


def indented(source: str) -> str:
    """Indent lines of C++ by the braces around them."""
    lines, depth = [], 0
    for line in source.split("\n"):
        text = line.strip()
        code = text.split("//")[0]
        closing = len(code) - len(code.lstrip("}"))
        level = 0 if text.startswith("#") else max(0, depth - closing)
        lines.append("  " * level + text if text else "")
        depth += code.count("{") - code.count("}")
    return "\n".join(lines)


def debugging() -> bool:
    """Whether ``ADJSIM_DEBUG`` asks for libraries that check bounds and that debuggers can read."""
    return os.environ.get("ADJSIM_DEBUG", "0") not in ("", "0")


def _flags(threads: bool, containers: bool) -> list[str]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    flags = [flag for flag in FLAGS if "vector-width" not in flag or is_x86]
    if debugging():
        flags += ["-O1", "-g"]
    elif not threads and _is_gcc():
        flags += OPTIMISED_BY_GCC
    else:
        flags += OPTIMISED
    flags += [] if containers else ["-fno-exceptions", "-fno-asynchronous-unwind-tables"]
    return [*flags, "-fopenmp"] if threads else flags


def _libraries(threads: bool, containers: bool) -> list[str]:
    # Other compilers have libraries of threads of their own, and know them.
    if containers or platform.system() != "Linux" or (threads and not _is_gcc()):
        return []
    return [*LIBRARIES, "-lgomp"] if threads else LIBRARIES


def _is_gcc() -> bool:
    return "Free Software Foundation" in _version(_compiler())


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
