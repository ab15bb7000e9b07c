"""Adaptive quadrature along a solution, with an error control of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from adjsim.ivp.rhs import Array

# The nodes and weights of the seven-point Kronrod extension of the four-point Lobatto rule, and the
# differences of the weights from those of the four-point rule. The nodes include the ends of the
# interval, so that a jump near an end is detected.
NODES = np.array([-1.0, -((2 / 3) ** 0.5), -(0.2**0.5), 0.0, 0.2**0.5, (2 / 3) ** 0.5, 1.0])
WEIGHTS = np.array([77, 432, 625, 672, 625, 432, 77]) / 1470
DIFFERENCES = WEIGHTS - np.array([1, 0, 5, 0, 5, 0, 1]) / 6

# Smallest tolerance, relative to the integral of the size that the integrand has without
# cancellation in its products.
ROUNDING = 1e-13
# Largest number of bisections of one interval; a jump takes fifty.
DIVISIONS = 2_000

# Largest number of forward steps in one interval, about one node per step.
STRIDE = 8

# The sums of the integrand at times, weighted with each of two rows of weights.
Integrand = Callable[[Array, Array, Array], list[list[Tensor]]]
# The uncertainty of such a sum at times with weights, for each tensor and row.
Uncertainty = Callable[[Array, Array], Array]
# The size of each row of each tensor, ``(tensors, k)``.
Largest = Callable[[Sequence[Tensor]], Array]


class Integral:
    """An integral of rows ``(k, ...)``, as a sum over intervals by two quadrature formulas.

    Their allowed difference is relative to the sum of the absolute contributions of a row so far.
    ``largest`` measures contributions; None: by their largest entries.
    """

    def __init__(self, like: Sequence[Tensor], rows: int, largest: Largest | None = None) -> None:
        self._largest = largest or largest_entries
        self.sums = [
            x.new_zeros((rows, *x.shape), dtype=torch.promote_types(x.dtype, torch.float64))
            for x in like
        ]
        self.sizes = np.zeros((len(like), rows))

    def error(
        self,
        found: list[Tensor],
        off: list[Tensor],
        tolerance: float,
        near: float,
        *smallest: Callable[[], Array],
    ) -> float:
        """Return the difference of the two formulas, relative to the allowed difference.

        ``found`` is the contribution of the interval, ``off`` the difference of the two formulas,
        ``tolerance`` is relative, and ``near`` is a time in the interval. ``smallest`` return
        differences that are allowed whatever the integral is, such as those of rounding. The next
        is called only if those before do not suffice.
        """
        errors = self._largest(off)
        allowed = tolerance * (self.sizes + self._largest(found))
        if not np.isfinite(errors).all():
            raise FloatingPointError(
                "the derivative of fun with respect to a parameter is not finite near t = "
                f"{near:g}."
            )
        for least in smallest:
            if np.all(errors <= allowed):
                break
            # A state outside the domain of fun makes an uncertainty of NaN, which fmax leaves out.
            allowed = np.fmax(allowed, least())
        return float(np.max(errors / np.maximum(allowed, np.finfo(float).tiny), initial=0.0))

    def add(self, found: list[Tensor]) -> None:
        """Add the contribution of an interval."""
        self.sizes = self.sizes + self._largest(found)
        for total, x in zip(self.sums, found, strict=True):
            total += x


class AdaptiveLobatto(Integral):
    """Adaptive Lobatto quadrature with a seven-point Kronrod extension.

    Intervals are halved where the two formulas disagree (W. Gander and W. Gautschi, BIT 40, 84,
    2000). The integrand may change faster than the adjoint, whose step sizes do not account for it.
    """

    def __init__(self, like: Sequence[Tensor], rows: int, rtol: float, largest: Largest) -> None:
        # The error of the seven-point formula is much smaller than its difference from the
        # four-point formula; QUADPACK estimates it in the same way.
        super().__init__(like, rows, largest)
        self.tolerance, self.stride = max(rtol, rtol ** (2 / 3) / 200), 1

    def integrate(
        self,
        times: Sequence[float],
        integrand: Integrand,
        rounding: Callable[[float, float], Array],
        uncertainty: Uncertainty,
    ) -> None:
        """Add the integral from the first of several times to the last.

        The integrand changes little between neighbouring times. So an interval may span several of
        them: the number doubles, up to :data:`STRIDE`, as long as no interval has to be divided.
        ``rounding`` takes the length and the middle of an interval to the error of rounding there.
        """
        k, last = 0, len(times) - 1
        while k < last:
            end = min(k + self.stride, last)
            waiting, divisions = [(times[k], times[end])], 0
            length, center = abs(times[end] - times[k]), (times[k] + times[end]) / 2
            least = cache(partial(rounding, length, center))
            while waiting:
                a, b = waiting.pop()
                half, middle = (b - a) / 2, (a + b) / 2
                nodes, differences = middle + half * NODES, half * DIFFERENCES
                found, off = integrand(nodes, half * WEIGHTS, differences)
                unsure = partial(uncertainty, nodes, differences)
                if self.error(found, off, self.tolerance, middle, least, unsure) <= 1:
                    self.add(found)
                    continue
                divisions += 1
                if divisions > DIVISIONS:
                    raise no_convergence(middle)
                waiting += [(middle, b), (a, middle)]
            self.stride = max(1, self.stride // 2) if divisions else min(2 * self.stride, STRIDE)
            k = end


def no_convergence(t: float) -> RuntimeError:
    """Make the error for an integral whose two formulas keep disagreeing."""
    return RuntimeError(
        "the integral of the derivative of fun with respect to a parameter does not converge near "
        f"t = {t:g}. Either fun draws random numbers there, or the derivative is infinite."
    )


def largest_entries(tensors: Sequence[Tensor]) -> Array:
    """Return the largest absolute entry of each row of each tensor, ``(tensors, k)``."""
    rows = [x.detach().unsqueeze(-1).flatten(1) for x in tensors]
    sizes = [_largest(x) if x.shape[1] else x.new_zeros(len(x)) for x in rows]
    return np.array([x.double().cpu().numpy() for x in sizes])


def _largest(rows: Tensor) -> Tensor:
    """Return the largest absolute entry of each row."""
    if rows.is_complex():
        return rows.abs().amax(1)
    # Rows of the weights of a network do not stay in the cache, and would be written once more.
    return torch.maximum(rows.amax(1), -rows.amin(1))
