"""Stiff kinetics of the Test Set for Initial Value Problem Solvers (F. Mazzia and C. Magherini,
release 2.4, Bari 2008), with the states at the end that it lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

# POLLU: 25 reactions of 20 species of polluted air (J. G. Verwer, SIAM J. Sci. Comput. 15, 1243,
# 1994), each with its reactants, its products and its rate constant, numbers as in the set.
POLLU_REACTIONS: list[tuple[list[int], list[int], float]] = [
    ([1], [2, 3], 0.35),
    ([2, 4], [1], 26.6),
    ([5, 2], [6, 1], 12300.0),
    ([7], [5, 5, 8], 8.6e-4),
    ([7], [8], 8.2e-4),
    ([7, 6], [5, 8], 15000.0),
    ([9], [10, 5, 8], 1.3e-4),
    ([9, 6], [11], 24000.0),
    ([11, 2], [1, 10, 12], 16500.0),
    ([11, 1], [13], 9000.0),
    ([13], [11, 1], 0.022),
    ([10, 2], [14, 1], 12000.0),
    ([14], [7, 5], 1.88),
    ([1, 6], [15], 16300.0),
    ([3], [4], 4.8e6),
    ([4], [16], 3.5e-4),
    ([4], [3], 0.0175),
    ([16], [6, 6], 1e8),
    ([16], [3], 4.44e11),
    ([17, 6], [18, 5], 1240.0),
    ([19], [2], 2.1),
    ([19], [1, 3], 5.78),
    ([1, 4], [19], 0.0474),
    ([19, 1], [20], 1780.0),
    ([20], [1, 19], 3.12),
]
POLLU_START = torch.zeros(20, dtype=torch.float64)
POLLU_START[[1, 3, 6, 7, 8, 16]] = torch.tensor(
    [0.2, 0.04, 0.1, 0.3, 0.01, 0.007], dtype=torch.float64
)
POLLU_END = {0: 0.05646255480022769, 1: 0.1342484130422339, 3: 0.5523140207484359e-2}

_FIRST = torch.tensor([reactants[0] - 1 for reactants, _, _ in POLLU_REACTIONS])
# The entry after the species is one.
_SECOND = torch.tensor([(*reactants, 21)[1] - 1 for reactants, _, _ in POLLU_REACTIONS])
_CHANGES = torch.zeros(20, 25, dtype=torch.float64)
for _number, (_reactants, _products, _) in enumerate(POLLU_REACTIONS):
    for _species in _reactants:
        _CHANGES[_species - 1, _number] -= 1
    for _species in _products:
        _CHANGES[_species - 1, _number] += 1


def pollu_rates() -> Tensor:
    return torch.tensor([rate for _, _, rate in POLLU_REACTIONS], dtype=torch.float64)


def pollu(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """The rates of POLLU, of rate constants k ``(25,)``, up to t = 60."""
    padded = torch.cat([y, y.new_ones(1)])
    return _CHANGES @ (k * padded[_FIRST] * padded[_SECOND])


# HIRES: the high irradiance response of morphogenesis, up to t = 321.8122.
HIRES_START = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0.0057], dtype=torch.float64)
HIRES_RATES = torch.tensor(
    [1.71, 0.43, 8.32, 0.69, 0.035, 8.32, 280.0, 0.69, 0.69, 0.0007], dtype=torch.float64
)
HIRES_END = torch.tensor(
    [
        0.7371312573325668e-3, 0.1442485726316185e-3, 0.5888729740967575e-4,
        0.1175651343283149e-2, 0.2386356198831331e-2, 0.6238968252742796e-2,
        0.2849998395185769e-2, 0.2850001604814231e-2,
    ],
    dtype=torch.float64,
)  # fmt: skip


def hires(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """The rates of HIRES, of rate constants k1, ..., k6, k+, k-, k*, and the source."""
    k1, k2, k3, k4, k5, k6, forth, back, star, source = k
    a, b, c, d, e, f, g, h = y
    binding = forth * f * h
    return torch.stack(
        [
            -k1 * a + k2 * b + k6 * c + source,
            k1 * a - (k2 + k3) * b,
            -(k6 + k1) * c + k2 * d + k5 * e,
            k3 * b + k1 * c - (k4 + k2) * d,
            -(k5 + k1) * e + k2 * (f + g),
            -binding + k4 * d + k1 * e - k2 * f + back * g,
            binding - (k2 + back + star) * g,
            -binding + (k2 + back + star) * g,
        ]
    )
