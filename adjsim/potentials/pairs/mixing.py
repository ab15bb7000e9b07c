"""Rules that give the Lennard-Jones parameters of a pair of species."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MixingRule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def lorentz_berthelot(
    epsilon_i: Tensor, sigma_i: Tensor, epsilon_j: Tensor, sigma_j: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix by ``epsilon = sqrt(epsilon_i epsilon_j)`` and ``sigma = (sigma_i + sigma_j) / 2``.

    The rules overestimate the depth of the well between atoms of different sizes. The derivative
    of the root is infinite at epsilon zero, as of hydrogen in many force fields. The gradient with
    respect to such an epsilon is given as zero, so training leaves it at zero.
    """
    return _root(epsilon_i) * _root(epsilon_j), sigma_i / 2 + sigma_j / 2


def kong(
    epsilon_i: Tensor, sigma_i: Tensor, epsilon_j: Tensor, sigma_j: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix attractions as dispersion, and repulsions by Smith's model of distorted atoms::

        A = epsilon sigma^6  = sqrt(A_i A_j)
        B = epsilon sigma^12 = ((B_i^(1/13) + B_j^(1/13)) / 2)^13

    so sigma^6 = B/A and epsilon = A^2/B. See Kong, J. Chem. Phys. 59, 2464 (1973). For noble gases
    it is closer to measured mixtures than :func:`lorentz_berthelot`. Epsilon has to be positive.
    """
    sixth_i, sixth_j = sigma_i**6, sigma_j**6
    attraction = (epsilon_i * sixth_i).sqrt() * (epsilon_j * sixth_j).sqrt()
    roots = [
        (epsilon * sixth * sixth) ** (1 / 13)
        for epsilon, sixth in ((epsilon_i, sixth_i), (epsilon_j, sixth_j))
    ]
    repulsion = ((roots[0] + roots[1]) / 2) ** 13
    return attraction * attraction / repulsion, (repulsion / attraction) ** (1 / 6)


def _root(x: Tensor) -> Tensor:
    """Compute the square root, with derivative zero at zero."""
    return torch.where(x == 0, 0.0, torch.where(x == 0, 1.0, x).sqrt())
