"""Spreading and gathering in C++, on the CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from adjsim.compiler.library import CompilerError, compiled
from adjsim.compiler.values import TYPES
from adjsim.core.layout import is_tracing
from adjsim.core.state import in_transform

# Numbers of points to which atoms spread, from which threads are used.
PARALLEL_POINTS = 2**15


class MeshOperator:
    """Spreading and gathering with splines of one order, for one type of numbers."""

    def __init__(self, order: int, dtype: torch.dtype) -> None:
        source = files("adjsim.potentials.charges.ewald").joinpath("spreading.cpp").read_text()
        text = f"#define REAL {TYPES[dtype]}\n#define ORDER {order}\n{source}"
        self.order, self.dtype, self._library = order, dtype, compiled(text, threads=True)

    def spread(self, u: Tensor, coefficients: Tensor, shape: Sequence[int]) -> Tensor:
        """Spread, as :func:`adjsim.potentials.charges.ewald.spreading.spread`."""
        mesh = torch.zeros((len(u), *shape), dtype=self.dtype)
        self._call(self._library.spread, u, coefficients.shape[-1], shape, coefficients, mesh)
        return mesh

    def gather(self, u: Tensor, mesh: Tensor, columns: int) -> Tensor:
        """Gather, as :func:`adjsim.potentials.charges.ewald.spreading.gather`."""
        found = torch.empty((*u.shape[:-1], columns), dtype=self.dtype)
        self._call(self._library.gather, u, columns, mesh.shape[1:], mesh, found)
        return found

    def _call(
        self, function: Any, u: Tensor, columns: int, shape: Sequence[int], given: Tensor,
        result: Tensor,
    ) -> None:  # fmt: skip
        u, given = (x.detach().resolve_neg().contiguous() for x in (u, given))
        atoms, points = u.shape[-2], u.numel() // 3 * self.order**3
        threads = torch.get_num_threads() if points >= PARALLEL_POINTS else 1
        counts = (ctypes.c_int64(n) for n in (len(u), atoms, columns, threads))
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (u, given, result))
        function(*counts, (ctypes.c_int64 * 3)(*shape), *pointers)


@functools.cache
def _operator(order: int, dtype: torch.dtype) -> MeshOperator | None:
    try:
        return MeshOperator(order, dtype)
    except CompilerError:
        return None


def operator_of(order: int, *tensors: Tensor) -> MeshOperator | None:
    """Return the operator for these tensors; None: torch operations are needed.

    They are where a derivative is to be recorded or a transform is active, on a GPU, and without a
    compiler.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    if in_transform() or is_tracing() or torch.compiler.is_compiling():
        return None
    dtype = tensors[0].dtype
    usable = all(
        x.device.type == "cpu" and x.dtype == dtype and type(x) in (Tensor, torch.nn.Parameter)
        for x in tensors
    )
    return _operator(order, dtype) if usable and dtype in (torch.float32, torch.float64) else None
