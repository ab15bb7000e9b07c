"""Kernels: compiled sums over pairs, and the neighbour lists that they share."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from adjsim.compiler.library import compiled
from adjsim.compiler.mathematics import HEADER, REPRODUCIBLE, VECTORISED
from adjsim.compiler.nests import PARALLEL_WORK
from adjsim.compiler.values import TYPES
from adjsim.potentials.pairs.kernels.exclusions import check_exclusions

FORCE, PRODUCT, ENERGY, SLOPES = "FORCE", "PRODUCT", "ENERGY", "SLOPES"
NUMBER, TABLE, ATOM = "NUMBER", "TABLE", "ATOM"
NO_BOX, ORTHOGONAL, TILTED = 0, 1, 2
# What a kernel returns for a species without a row in tables, as a printed loop does, and for an
# exclusion of an atom that there is not.
OUT_OF_RANGE, NO_SUCH_ATOM = 3, 4
_ORDER = (FORCE, PRODUCT, ENERGY, SLOPES)


@dataclass(frozen=True)
class KernelSpec:
    """The parts of a kernel other than its formulas.

    Attributes:
        mode: what it computes: the force, the force and its product with a vector, the energy, or
            the derivatives of the energy with respect to operands.
        dtype: the type of all numbers.
        dim: the number of dimensions, up to three.
        image: the kind of box.
        cutoff: the cutoff; None: all pairs.
        skin: how far beyond the cutoff a neighbour list reaches; None: all pairs are evaluated.
        rounds: whether contributions to the force are rounded to a grid.
        kinds: for each operand, a number, a table by species or a number for each atom.
        gradients: the operands with respect to which derivatives are computed.
        excluded: whether there are exclusions, which are an argument of the kernel.
    """

    mode: str
    dtype: torch.dtype
    dim: int
    image: int
    cutoff: float | None
    skin: float | None
    rounds: bool
    kinds: tuple[str, ...]
    gradients: tuple[int, ...]
    excluded: bool

    def source(self, functions: str) -> str:
        """Write the C++ source of the kernel around its formulas."""
        slots = sum(2 if kind == ATOM else 1 for kind in self.kinds)
        squared = " + ".join(f"d[{a}] * d[{a}]" for a in range(self.dim))
        wrapped = sorted(set(re.findall(r"math::(\w+)|\b(absolute)\(", functions)))
        names = sorted({a or b for a, b in wrapped})
        functions = functions.replace("math::", "lanes::").replace("absolute(", "lanes::absolute(")
        return "\n".join(
            [
                HEADER,
                f"#define REAL {TYPES[self.dtype]}",
                text("call.h"),
                *(f"#define {name} {number}" for number, name in enumerate(_ORDER)),
                f"#define MODE {_ORDER.index(self.mode)}",
                *(
                    f"#define {name} {n}"
                    for n, name in enumerate(("NO_BOX", "ORTHOGONAL", "TILTED"))
                ),
                f"#define IMAGE {self.image}",
                f"#define DIM {self.dim}",
                f"#define CUTOFF {int(self.cutoff is not None)}",
                f"#define LISTED {int(self.skin is not None)}",
                f"#define GRID {int(self.rounds)}",
                f"#define OPERANDS {len(self.kinds)}",
                f"#define SLOTS {slots}",
                f"#define GRADIENTS {len(self.gradients)}",
                *(["#define EXCLUDED"] if self.excluded else ()),
                f"#define SQUARED_DISTANCE {squared}",
                "enum Kind { NUMBER, TABLE, ATOM };",
                _array("KIND", self.kinds),
                _array("GRADIENT_KIND", [self.kinds[k] for k in self.gradients]),
                f"#define LOAD_OPERANDS {self._loads()}",
                f"#define NUMBERS {{{', '.join(self._numbers())}}}",
                *(
                    f"constexpr bool {kind}S = {str(kind in self.kinds).lower()};"
                    for kind in (TABLE, ATOM)
                ),
                "typedef REAL V __attribute__((vector_size(W * sizeof(REAL))));",
                "typedef decltype(V{} < V{}) Mask;",
                "static inline V splat(REAL x) { return V{} + x; }",
                *(_lanes(names, self.rounds) if names else ()),
                functions,
                text("rows.cpp"),
            ]
        )

    def _loads(self) -> str:
        """Write the statements that load the operands of pairs into ``found``."""
        statements: list[str] = []
        for k, kind in enumerate(self.kinds):
            lanes, slot = "for (int l = 0; l < W; ++l)", len(statements)
            if kind == NUMBER:
                statements.append(f"found[{slot}] = numbers[{k}];")
            elif kind == TABLE:
                row, column = (f"operands.column[{side}[l]]" for side in ("mine", "other"))
                entry = f"call.operands[{k}][call.kinds * {row} + {column}]"
                statements.append(f"{lanes} found[{slot}][l] = {entry};")
            else:
                statements += [
                    f"{lanes} found[{slot + i}][l] = operands.atoms[{k}][{side}[l]];"
                    for i, side in enumerate(("mine", "other"))
                ]
        return " ".join(statements)

    def _numbers(self) -> list[str]:
        """Write the numbers among the operands as vectors."""
        return [
            f"splat(c.operands[{k}][0])" if kind == NUMBER else "V{}"
            for k, kind in enumerate(self.kinds)
        ]


def _array(name: str, kinds: Sequence[str]) -> str:
    return f"constexpr Kind {name}[] = {{{', '.join([*kinds, 'NUMBER'])}}};"


def _lanes(names: Sequence[str], exact: bool) -> list[str]:
    """Define functions of vectors by those of numbers."""
    lines = [REPRODUCIBLE if exact else VECTORISED, "namespace lanes {"]
    for name in names:
        two = name in ("pow", "atan2")
        if name == "pow":
            lines.append("static inline V pow(V x, V y);")
            lines.append("static inline V pow(V x, REAL y) { return pow(x, splat(y)); }")
        of = "math::fabs" if name == "absolute" else f"math::{name}"
        given, call = ("V x, V y", "a[l], b[l]") if two else ("V x", "a[l]")
        second = "REAL b[W]; memcpy(b, &y, sizeof b);" if two else ""
        lines.append(
            f"static inline V {name}({given}) {{ alignas(64) REAL a[W]; V r;"
            f" memcpy(a, &x, sizeof a); {second}\n"
            f"#pragma omp simd\nfor (int l = 0; l < W; ++l) a[l] = {of}({call});\n"
            "memcpy(&r, a, sizeof r); return r; }"
        )
    return [*lines, "}"]


@functools.cache
def text(name: str) -> str:
    return files("adjsim.potentials.pairs.kernels").joinpath(name).read_text()


class _View(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("system", ctypes.c_int64),
        ("atom", ctypes.c_int64),
        ("axis", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("systems", ctypes.c_int64),
        ("atoms", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("image", ctypes.c_int64),
        ("position", _View),
        ("vector", _View),
        ("force", _View),
        ("product", _View),
        ("box", ctypes.c_void_p),
        ("spacing", ctypes.c_void_p),
        ("spacing_step", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("energy", ctypes.c_void_p),
        ("operands", ctypes.c_void_p),
        ("gradients", ctypes.c_void_p),
        ("species", ctypes.c_void_p),
        ("kinds", ctypes.c_int64),
        ("cutoff", ctypes.c_double),
        ("skin", ctypes.c_double),
        ("acquire", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("exclusions", ctypes.c_void_p),
        ("excluded", ctypes.c_int64),
    )


class Kernel:
    """A compiled sum over pairs.

    Args:
        spec: the parts other than the formulas.
        functions: the printed formulas.
        slope: the printed formula of the force alone, which tells whether another kernel computes
            the same force.

    Raises:
        UnprintableError: there is no C++ compiler, or it rejects the formulas.
    """

    def __init__(self, spec: KernelSpec, functions: str, slope: str) -> None:
        self.spec, self._slope = spec, slope
        source = spec.source(functions)
        self._library = compiled(source, threads=True)
        self._lists = lists(spec.dtype) if spec.skin is not None else None
        written = f"{source}\n{spec.cutoff!r} {spec.skin!r}"
        #: Identifies the kernel, in this process and in others.
        self.name = hashlib.sha256(written.encode()).hexdigest()[:32]
        KERNELS[self.name] = self

    def shares_force(self, other: Kernel) -> bool:
        """Return whether it computes the same force, to the last bit, as another kernel."""
        forces = (FORCE, PRODUCT)
        first, second = (replace(kernel.spec, mode=FORCE, gradients=()) for kernel in (self, other))
        return (
            self.spec.mode in forces
            and other.spec.mode in forces
            and first == second
            and self._slope == other._slope
        )

    @property
    def address(self) -> int:
        """The address of the function."""
        return _address(self._library.pairs)

    @property
    def list_addresses(self) -> tuple[int, int]:
        """The addresses of the functions that provide and release lists; zeros without a list."""
        if self._lists is None:
            return 0, 0
        return _address(self._lists.neighbours_acquire), _address(self._lists.neighbours_release)

    def __call__(
        self,
        position: Tensor,
        operands: Sequence[Tensor],
        box: Tensor | None,
        species: Tensor | None,
        exclusions: Tensor | None,
        *,
        vector: Tensor | None = None,
        spacing: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> list[Tensor]:
        """Evaluate it for positions ``(*batch, atoms, dim)``.

        Returns:
            the force, the product, the energy and the gradients, as far as it computes them.
        """
        spec, mode = self.spec, self.spec.mode
        batch, (atoms, dim) = position.shape[:-2], position.shape[-2:]
        flat = position.detach().resolve_neg().reshape(-1, atoms, dim)
        dtype, results = spec.dtype, list[Tensor]()
        call = _Call(systems=len(flat), atoms=atoms, dim=dim, image=spec.image)
        call.threads = thread_count(len(flat) * atoms * (atoms if spec.skin is None else 64))
        held: list[Any] = [flat]

        def pointer(x: Tensor | None, dtype: torch.dtype) -> int | None:
            if x is None:
                return None
            held.append(x.detach().resolve_neg().to(dtype).contiguous())
            return held[-1].data_ptr()

        def pointers(tensors: Sequence[Tensor]) -> int:
            held.append((ctypes.c_void_p * max(1, len(tensors)))(*(x.data_ptr() for x in tensors)))
            return ctypes.addressof(held[-1])

        call.position = _view(flat)
        if vector is not None:
            held.append(vector.detach().resolve_neg().to(dtype).reshape(flat.shape))
            call.vector = _view(held[-1])
        if mode in (FORCE, PRODUCT):
            results.append(torch.empty(flat.shape, dtype=dtype, device="cpu"))
            call.force = _view(results[-1])
        if mode == PRODUCT:
            results.append(torch.empty(flat.shape, dtype=dtype, device="cpu"))
            call.product = _view(results[-1])
        results = [x.reshape(position.shape) for x in results]
        if mode == ENERGY:
            results.append(torch.empty(batch, dtype=dtype, device="cpu"))
            call.energy = results[-1].data_ptr()
        call.box = pointer(box, dtype)
        call.spacing = pointer(spacing, dtype)
        call.spacing_step = int(spacing is not None and spacing.numel() > 1)
        call.weight = pointer(weight, dtype)
        values = [x.detach().resolve_neg().to(dtype).contiguous() for x in operands]
        held.append(values)
        call.operands = pointers(values)
        call.species = pointer(species, torch.int64)
        call.kinds = table_size(spec, values)
        gradients = [torch.empty_like(values[k]) for k in spec.gradients]
        call.gradients = pointers(gradients)
        call.cutoff, call.skin = spec.cutoff or 0.0, spec.skin or 0.0
        call.acquire, call.release = self.list_addresses
        call.exclusions = pointer(exclusions, torch.int64)
        call.excluded = 0 if exclusions is None else len(exclusions)
        status = self._library.pairs(ctypes.byref(call))
        if status == OUT_OF_RANGE:
            raise IndexError(f"species must be indices from 0 to {call.kinds - 1}.")
        if status == NO_SUCH_ATOM and exclusions is not None:
            check_exclusions(exclusions, atoms)
        if status:
            raise MemoryError("there is no memory for the pairs of atoms.")
        return [*results, *gradients]


# Kernels of this process by name, for the operators that name them.
KERNELS: dict[str, Kernel] = {}


def table_size(spec: KernelSpec, operands: Sequence[Any]) -> int:
    """Return the number of rows of the tables among operands."""
    return next(
        (x.shape[0] for x, kind in zip(operands, spec.kinds, strict=True) if kind == TABLE), 1
    )


def thread_count(pairs: int) -> int:
    """Return the number of threads that share this number of pairs."""
    return torch.get_num_threads() if pairs >= PARALLEL_WORK else 1


def _view(x: Tensor) -> _View:
    return _View(x.data_ptr(), *x.stride())


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def lists(dtype: torch.dtype) -> ctypes.CDLL:
    """Load the library of neighbour lists."""
    parts = (text(name) for name in ("call.h", "cells.cpp", "neighbours.cpp"))
    source = "\n".join([f"#define REAL {TYPES[dtype]}", *parts])
    library = compiled(source, threads=True)
    library.neighbours_builds.restype = ctypes.c_int64
    return library


def builds(dtype: torch.dtype = torch.float64) -> int:
    """Return how many neighbour lists this process has built."""
    return int(lists(dtype).neighbours_builds())
