"""Factors of the matrix of an implicit step, which precondition its conjugate gradients.

The matrix is ``1 + a^2 s H s``, with s the roots of the inverse masses and H the Hessian of the
energy. Where atoms interact with near atoms alone, H is sparse and follows from some dozens of
products (:mod:`adjsim.potentials.statics.local_hessian`). On a beam of 3,000 tetrahedra these cost
as much as 85 single products. With the factors conjugate gradients end in one or two steps, where
blocks of 3 x 3 on the diagonal spare none if the body is uniform, and a third if its modulus varies
by 100.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.dynamics.forces import ForceEvaluator


class StepFactors:
    """An approximate inverse of the matrix of a step, from factors for each system of a batch.

    The matrix is 1 on atoms that are not ``free``, those of infinite mass, ``(atoms,)``.
    """

    def __init__(self, factors: list[Any], free: Tensor) -> None:
        self.factors, self.free = factors, free

    def __call__(self, r: Tensor) -> Tensor:
        """Solve for a right-hand side, ``(*batch, atoms, dim)``."""
        found = r.detach().double().cpu().clone()
        for system, factor in zip(found.reshape(-1, *r.shape[-2:]), self.factors, strict=True):
            taken = factor.solve(system[self.free].numpy().ravel())
            system[self.free] = torch.from_numpy(taken).reshape(-1, r.shape[-1])
        return found.to(r)


def step_factors(forces: ForceEvaluator, x: Tensor, a: float, root: Tensor) -> StepFactors | None:
    """Factorise the matrix of each system; None if one has no sparse Hessian or is not positive.

    Positions are ``(*batch, atoms, dim)``, and the roots s a scalar or ``(atoms, 1)``.
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
    return StepFactors(factors, free)
