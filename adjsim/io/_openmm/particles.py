"""The numbers of the particles and exceptions of a NonbondedForce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from adjsim.io._openmm.library import ENERGY, LENGTH, plain

UNITS = np.array([1.0, LENGTH, ENERGY])
"""Our units of a charge, sigma and epsilon in OpenMM's."""
SAME = 1e-9
"""How far, relative, the numbers of a 1-4 pair may be from their combination: rounding alone."""


@dataclass(frozen=True)
class Particles:
    """The numbers of a NonbondedForce, in our units.

    Args:
        charge, sigma, epsilon: ``(atoms,)``.
        pairs: ``(exceptions, 2)``.
        product, pair_sigma, pair_epsilon: ``(exceptions,)``; the product is of charges.
    """

    charge: np.ndarray
    sigma: np.ndarray
    epsilon: np.ndarray
    pairs: np.ndarray
    product: np.ndarray
    pair_sigma: np.ndarray
    pair_epsilon: np.ndarray

    @classmethod
    def of(cls, force: Any) -> Particles:
        """Read a NonbondedForce."""
        atoms = [
            [plain(x) for x in force.getParticleParameters(k)]
            for k in range(force.getNumParticles())
        ]
        numbers = np.array(atoms, dtype=np.float64) * UNITS
        rows = [force.getExceptionParameters(k) for k in range(force.getNumExceptions())]
        pairs = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2)
        values = np.array([[plain(x) for x in row[2:]] for row in rows], dtype=np.float64)
        charge, sigma, epsilon = numbers.T
        product, pair_sigma, pair_epsilon = (values.reshape(-1, 3) * UNITS).T
        return cls(charge, sigma, epsilon, pairs, product, pair_sigma, pair_epsilon)

    @property
    def interacting(self) -> np.ndarray:
        """Which exceptions are pairs with numbers of their own, and no exclusions."""
        return (self.product != 0) | (self.pair_epsilon != 0)

    def scales(self) -> tuple[float, float] | None:
        """Return the factors of all 1-4 pairs, of charges and of epsilon, if there are any.

        None: the numbers of a pair are not those of its atoms times one factor.
        """
        at = self.interacting
        i, j = self.pairs[at].T
        charges = _factor(self.product[at], self.charge[i] * self.charge[j])
        depths = _factor(self.pair_epsilon[at], np.sqrt(self.epsilon[i] * self.epsilon[j]))
        matters = self.pair_epsilon[at] != 0
        difference = self.pair_sigma[at] - (self.sigma[i] + self.sigma[j]) / 2
        same = np.abs(difference[matters]) <= SAME * self.pair_sigma[at][matters]
        if charges is None or depths is None or not same.all():
            return None
        return charges, depths


def _factor(found: np.ndarray, combined: np.ndarray) -> float | None:
    """Return the one factor between two arrays, zero if all are zero, None if there is none."""
    if not found.any():
        return 0.0
    largest = int(np.abs(combined).argmax())
    if combined[largest] == 0:
        return None
    factor = float(found[largest] / combined[largest])
    same = np.abs(found - factor * combined) <= SAME * np.abs(found)
    return factor if same.all() else None
