"""Factors of the matrix of an implicit step, which precondition its conjugate gradients.

The matrix is ``1 + a^2 s H s``, with s the roots of the inverse masses and H the Hessian of the
energy. Where atoms interact with near atoms alone, H is sparse and follows from some dozens of
products (:mod:`adjsim.potentials.statics.local_hessian`). With the factors conjugate gradients end
in one or two steps. Blocks of 3 x 3 on the diagonal spare no step if the body is uniform.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.core.krylov import Product
from adjsim.dynamics.forces import ForceEvaluator


def step_factors(forces: ForceEvaluator, x: Tensor, a: float, root: Tensor) -> Product | None:
    """Return an approximate inverse of the matrix, from factors for each system of a batch.

    It is None if a system has no sparse Hessian or its matrix is not positive. Positions are
    ``(*batch, atoms, dim)``, and the roots s a scalar or ``(atoms, 1)``.
    """
    from scipy import sparse

    from adjsim.potentials.statics.curvature import Hessian
    from adjsim.potentials.statics.local_hessian import local_hessian, positive_factor

    atoms, dim = x.shape[-2:]
    each = root.detach().double().cpu().reshape(-1).expand(atoms)
    free = each > 0
    scale: Any = sparse.diags(a * np.repeat(each[free].numpy(), dim))
    factors = list[Any]()
    for q in x.reshape(-1, atoms, dim):
        hessian = Hessian(forces.potential, q, free)
        matrix = local_hessian(hessian)
        forces.count(2 * hessian.taken)
        factor = None if matrix is None else positive_factor(scale @ matrix @ scale, 1.0)
        if factor is None:
            return None
        factors.append(factor)

    def inverse(r: Tensor) -> Tensor:
        found = r.detach().double().cpu().clone()
        for system, factor in zip(found.reshape(-1, atoms, dim), factors, strict=True):
            # The matrix is 1 on atoms of infinite mass.
            solved = torch.from_numpy(factor.solve(system[free].numpy().ravel()))
            system[free] = solved.reshape(-1, dim)
        return found.to(r)

    return inverse
