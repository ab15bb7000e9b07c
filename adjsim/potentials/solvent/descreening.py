"""How much of the solvent around an atom another atom displaces.

Atom i is a sphere of radius rho, atom j a sphere of radius t at the distance r. The integral of
``1 / (4 pi x^4)`` around atom i, over the part of sphere j outside of sphere i, is::

    H = (1/L - 1/U + (r - t^2/r) (1/U^2 - 1/L^2) / 4 + log(L/U) / (2 r)) / 2
    U = r + t        L = max(rho, |r - t|)

It is zero where sphere i contains sphere j. Where sphere j contains sphere i, ``1/rho - 1/L`` is
added. See Hawkins, Cramer and Truhlar, J. Phys. Chem. 100, 19824 (1996).
"""

from __future__ import annotations

import torch
from torch import Tensor


def descreening(r: Tensor, rho: Tensor, t: Tensor, contained: bool) -> Tensor:
    """Compute H, elementwise; with ``contained``, the term of a contained sphere is added."""
    outer, gap = r + t, (r - t).abs()
    inner = torch.maximum(gap, rho)
    far, near, inverse = 1 / outer, 1 / inner, 1 / r
    value = near - far + 0.25 * (r - t * t * inverse) * (far * far - near * near)
    value = 0.5 * (value + 0.5 * inverse * torch.log(inner * far))
    if contained:
        value = value + torch.where(r + rho < t, 1 / rho - near, 0.0)
    return torch.where(outer > rho, value, 0.0)
