"""Operators of torch for the linear systems of implicit steps.

A traced step contains the operators, which a printed loop calls by functions of its own. Anywhere
else torch's own functions are called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.layout import is_tracing


def solve(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Solve ``matrix x = right`` for each system of ``(*batch, n, n)`` and ``(*batch, n)``.

    Returns:
        x, ``(*batch, n)``, which is NaN for a singular matrix, and whether there is one, a scalar.
    """
    if is_tracing():
        return solve_operator(matrix, right)
    solution, failed = torch.linalg.solve_ex(matrix, right.unsqueeze(-1))
    singular = failed > 0
    x = torch.where(singular.unsqueeze(-1), torch.nan, solution.squeeze(-1))
    return x, singular.any()


@torch.library.custom_op("adjsim::solve", mutates_args=())
def solve_operator(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Solve linear systems; see :func:`solve`."""
    return solve(matrix, right)


@solve_operator.register_fake
def _(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(right.shape).to(right), right.new_empty((), dtype=torch.bool)


def has_negative_eigenvalue(matrix: Tensor) -> Tensor:
    """Return whether a matrix of a batch ``(*batch, n, n)`` has a real negative eigenvalue."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    # The left ends of Gershgorin's discs. Where all are positive, eigenvalues are not needed.
    lowest = diagonal + diagonal.abs() - matrix.abs().sum(-1)
    if bool((lowest > 0).all()):
        return torch.zeros((), dtype=torch.bool, device=matrix.device)
    values = torch.linalg.eigvals(matrix)
    is_real = values.imag.abs() <= torch.finfo(matrix.dtype).eps ** 0.5 * values.abs()
    return (is_real & (values.real < 0)).any()


@torch.library.custom_op("adjsim::has_negative_eigenvalue", mutates_args=())
def has_negative_eigenvalue_if(matrix: Tensor, wanted: Tensor) -> Tensor:
    """Return :func:`has_negative_eigenvalue` if it is wanted, and False otherwise."""
    return has_negative_eigenvalue(matrix) if bool(wanted) else torch.zeros_like(wanted)


@has_negative_eigenvalue_if.register_fake
def _(matrix: Tensor, wanted: Tensor) -> Tensor:
    return torch.empty_like(wanted)
