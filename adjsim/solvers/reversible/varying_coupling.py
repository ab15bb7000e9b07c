"""The coupling of reversible Runge-Kutta steps that differ in size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.dynamics.buffer import BufferGrowth
from adjsim.dynamics.sources import Coefficients
from adjsim.solvers.base import LETTER, StepPlan
from adjsim.solvers.clock import VaryingClock

# The denominator of all couplings.
DENOMINATOR = 4096


@dataclass(frozen=True)
class VaryingCoupling:
    """The coupling c of steps of a size h, a fraction with the denominator 4096::

        c = 1 - m/4096        m = ceil(4096 (1 - exp(-rate h)))

    So c is at most exp(-rate h), between 1/4096 and 4095/4096. Where rate h exceeds ln 4096 = 8.3,
    c stays 1/4096, and only smaller steps help. Steps on a lattice, ``exact``, need numerator and
    denominator. ``like`` is a field, for dtype and device.
    """

    rate: float
    like: Tensor
    exact: bool

    def coefficients(self, h: float) -> dict[str, Coefficients]:
        c = Fraction(DENOMINATOR - int(_gaps(self.rate, h)), DENOMINATOR)
        values: dict[str, Tensor] = {
            # A number for Python, so it stays on the CPU.
            "h": torch.tensor(h, dtype=torch.float64),
            "c": self._tensor(float(c), self.like.dtype),
            "1-c": self._tensor(float(1 - c), self.like.dtype),
        }
        if self.exact:
            values["c n"] = self._tensor(c.numerator, torch.int64)
            values["c d"] = self._tensor(c.denominator, torch.int64)
        return {LETTER: values}

    def buffer_growth(self, plan: StepPlan, clock: VaryingClock) -> BufferGrowth | None:
        if not self.exact:
            return None
        fastest = self._fastest(plan)
        assert fastest.bits is not None
        mean = float(decays(self.rate, clock.sizes).mean())
        bits = torch.tensor(mean / np.log(2.0), dtype=torch.float64)
        return replace(fastest, bits=dict.fromkeys(fastest.bits, bits))

    def limit(self, plan: StepPlan) -> float:
        """Return the upper bound of the buffers at a check."""
        return self._fastest(plan).limit if self.exact else 0.0

    def _fastest(self, plan: StepPlan) -> BufferGrowth:
        """Return the growth at the smallest coupling, which bounds that of any step to come."""
        assert plan.lattice is not None
        coefficients = self.coefficients(float("inf"))
        moves = [(stage.letter, move) for stage, move in plan.moves]
        return replace(plan.lattice.buffer_growth(coefficients, moves), check_every=1)

    def _tensor(self, value: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=self.like.device)


def _gaps(rate: float, h: Any) -> Any:
    """Return 4096 (1 - c) for steps of size h."""
    return np.clip(np.ceil(-DENOMINATOR * np.expm1(-rate * h)), 1, DENOMINATOR - 1)


def decays(rate: float, h: np.ndarray) -> np.ndarray:
    """Return -ln c for steps of size h."""
    return -np.log1p(-_gaps(rate, h) / DENOMINATOR)


def steps_within(rate: float, sizes: np.ndarray, damping: np.ndarray, growth: float) -> int:
    """Return how many consecutive steps undo at most a decay of exp(-growth).

    The count holds for the parts of a run that are each as many steps long. ``damping`` is the
    decay of the dynamics in each step.
    """
    total = np.concatenate([[0.0], np.cumsum(decays(rate, sizes) + damping)])
    count = len(sizes)
    while count > 1 and np.diff(total[[*range(0, len(sizes), count), -1]]).max() > growth:
        count = count * 3 // 4
    return count
