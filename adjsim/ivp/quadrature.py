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

# The sums of the integrand at times, weighted with each of several rows of weights.
Integrand = Callable[..., list[list[Tensor]]]
# The uncertainty of such a sum at times with weights, for each tensor.
Uncertainty = Callable[[Array, Array], list[float]]


class Integral:
    """An integral as a sum over intervals, each computed by two quadrature formulas.

    Args:
        like: tensors with the shapes and dtypes of the integrals.
        allowed: the allowed difference of the two formulas, relative to the sum of the absolute
            contributions of all intervals so far.
    """

    def __init__(self, like: Sequence[Tensor], allowed: float) -> None:
        self.sums = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float64)) for x in like
        ]
        self.sizes, self.allowed = [0.0 for _ in like], allowed

    def error(
        self,
        found: list[Tensor],
        off: list[Tensor],
        near: float,
        *smallest: Callable[[], Sequence[float]],
    ) -> float:
        """Return the difference of the two formulas, relative to the allowed difference.

        Args:
            found: the contribution of the interval.
            off: the difference of the two formulas.
            near: a time in the interval, for messages.
            smallest: return differences that are allowed whatever the integral is, such as those
                of rounding. The next is called only if those before do not suffice.
        """
        errors, sizes = largest(off), zip(self.sizes, largest(found), strict=True)
        if not np.isfinite(errors).all():
            raise FloatingPointError(
                "the derivative of fun with respect to a parameter is not finite near t = "
                f"{near:g}."
            )
        allowed = [self.allowed * (known + more) for known, more in sizes]
        for least in smallest:
            if all(error <= most for error, most in zip(errors, allowed, strict=True)):
                break
            # A state outside the domain of fun makes an uncertainty of NaN, which fmax leaves out.
            allowed = [float(np.fmax(*both)) for both in zip(allowed, least(), strict=True)]
        tiny = float(np.finfo(float).tiny)
        return max(
            (error / max(most, tiny) for error, most in zip(errors, allowed, strict=True)),
            default=0.0,
        )

    def add(self, found: list[Tensor]) -> None:
        """Add the contribution of an interval."""
        self.sizes = [a + b for a, b in zip(self.sizes, largest(found), strict=True)]
        for total, x in zip(self.sums, found, strict=True):
            total += x


class AdaptiveLobatto(Integral):
    """Adaptive Lobatto quadrature with a seven-point Kronrod extension.

    Intervals are halved where the two formulas disagree (W. Gander and W. Gautschi, BIT 40, 84,
    2000). The integrand may change faster than the adjoint, whose step sizes do not account for it.

    Args:
        like: tensors with the shapes and dtypes of the integrals.
        rtol: the relative tolerance.
    """

    def __init__(self, like: Sequence[Tensor], rtol: float) -> None:
        # The error of the seven-point formula is much smaller than its difference from the
        # four-point formula; QUADPACK estimates it in the same way.
        super().__init__(like, max(rtol, rtol ** (2 / 3) / 200))
        self.stride = 1

    def integrate(
        self,
        times: Sequence[float],
        integrand: Integrand,
        scale: Callable[[float], list[Tensor]],
        uncertainty: Uncertainty,
    ) -> None:
        """Add the integral from the first of several times to the last.

        The integrand changes little between neighbouring times. So an interval may span several of
        them: the number doubles, up to :data:`STRIDE`, as long as no interval has to be divided.

        Args:
            times: the times.
            integrand: the integrand.
            scale: returns the size of the integrand at a time if nothing cancels in it.
            uncertainty: returns the uncertainty of a weighted sum of the integrand that the error
                of the states makes.
        """
        k, last = 0, len(times) - 1
        while k < last:
            end = min(k + self.stride, last)
            whole = self._add(times[k], times[end], integrand, scale, uncertainty)
            self.stride = min(2 * self.stride, STRIDE) if whole else max(1, self.stride // 2)
            k = end

    def _add(
        self,
        begin: float,
        end: float,
        integrand: Integrand,
        scale: Callable[[float], list[Tensor]],
        uncertainty: Uncertainty,
    ) -> bool:
        """Add the integral over an interval, and return whether it remained undivided."""
        waiting, divisions = [(begin, end)], 0
        rounding = cache(
            lambda: [ROUNDING * abs(end - begin) * x for x in largest(scale((begin + end) / 2))]
        )
        while waiting:
            a, b = waiting.pop()
            half, middle = (b - a) / 2, (a + b) / 2
            nodes, differences = middle + half * NODES, half * DIFFERENCES
            found, off = integrand(nodes, half * WEIGHTS, differences)
            unsure = partial(uncertainty, nodes, differences)
            if self.error(found, off, middle, rounding, unsure) <= 1:
                self.add(found)
                continue
            divisions += 1
            if divisions > DIVISIONS:
                raise no_convergence(middle)
            waiting += [(middle, b), (a, middle)]
        return not divisions


def no_convergence(t: float) -> RuntimeError:
    """Make the error for an integral whose two formulas keep disagreeing."""
    return RuntimeError(
        "the integral of the derivative of fun with respect to a parameter does not converge near "
        f"t = {t:g}. Either fun draws random numbers there, or the derivative is infinite."
    )


def largest(tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest absolute entry of each tensor."""
    return [float(x.abs().max()) if x.numel() else 0.0 for x in tensors]
