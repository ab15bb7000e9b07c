"""Krylov methods of SciPy for matrices that are known by their products with tensors.

A product takes and returns tensors of one shape, of any device and dtype. A batch counts as one
vector, so its matrix has a block for each system. SciPy's own vectors are float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def largest_eigenvalue(product: Product, start: Tensor, tolerance: float) -> float:
    """Find the largest eigenvalue of a symmetric matrix to a relative tolerance (Lanczos).

    Invariant subspaces without a part of the start, which may have any length, are missed.
    """
    from scipy.sparse.linalg import eigsh

    first, v = _to_numpy(product(start)), _to_numpy(start)
    # ARPACK takes neither a matrix of zeros nor one of a single row.
    if v.size == 1 or not first.any():
        return float(first @ v / max(v @ v, np.finfo(float).tiny))
    options: dict[str, Any] = {"v0": v, "tol": tolerance, "return_eigenvectors": False}
    return float(eigsh(_operator(product, start), 1, which="LA", **options)[0])


def solve_general(product: Product, b: Tensor, share: float) -> Tensor:
    """Solve a linear system of any matrix by GMRES, to a residual that is this share of b.

    See Saad and Schultz, SIAM J. Sci. Stat. Comput. 7, 856 (1986). The solution after the last
    restart is returned where the residual does not become as small.
    """
    from scipy.sparse.linalg import gmres

    x, _ = gmres(_operator(product, b), _to_numpy(b), rtol=share, restart=50, maxiter=40)
    return _to_tensor(x, b)


def _operator(product: Product, like: Tensor) -> Any:
    from scipy.sparse.linalg import LinearOperator

    options: dict[str, Any] = {"dtype": np.float64}
    shape = (like.numel(), like.numel())
    return LinearOperator(shape, lambda x: _to_numpy(product(_to_tensor(x, like))), **options)


def _to_numpy(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy().ravel()


def _to_tensor(x: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(x).to(like).reshape(like.shape)
