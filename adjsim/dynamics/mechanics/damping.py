"""Viscous and Rayleigh damping, solved exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.core.krylov import largest_eigenvalue
from adjsim.core.parameters import leaves, point_of_differentiation
from adjsim.core.refusal import Refusal
from adjsim.core.state import PhaseState
from adjsim.dynamics.masses import Masses, per_atom
from adjsim.dynamics.moves import GeneralFlow, Move, Scale
from adjsim.dynamics.sources import Coefficient, Coefficients
from adjsim.dynamics.terms import Term
from adjsim.potentials.base import force

# Largest error of a bound of the rates, relative to the largest rate.
TOLERANCE = 1e-3


class ViscousDamping(Term[PhaseState]):
    """Viscous damping, D: ``dp/dt = -gamma p``, whose flow is ``p' = exp(-gamma h) p``."""

    def __init__(self, rate: Tensor) -> None:
        self.rate = rate

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        p = state.momentum
        return {"momentum": -per_atom(self.rate, p) * p}

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        return {"decay": torch.exp(-h * per_atom(self.rate, state.momentum))}

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        return (Scale("momentum", Coefficient("decay")),)


class RayleighDamping(Term[PhaseState]):
    """Viscous damping and damping by the stiffness, D::

        dp/dt = -(gamma + beta K M^-1) p

    K is the stiffness matrix, the second derivative of the energy of the body, at the start of the
    run. The body should rest there; a start under a load that buckles it has negative rates. The
    flow is a constant matrix exponential::

        p' = exp(-h (gamma + beta K M^-1)) p

    It is applied by a Chebyshev series in products with K, to rounding: about 15 products where the
    largest rate times h is one. The inverse is the series of the other sign, whose rounding errors
    grow by exp(h (largest - smallest rate)). Derivatives are with respect to gamma, beta, the
    masses, the parameters of the energy and the start.
    """

    no_equation = Refusal("its stiffness matrix is that of the start of a run")

    def __init__(self, masses: Masses, body: nn.Module, gamma: Tensor, beta: Tensor) -> None:
        self.masses, self.body, self.gamma, self.beta = masses, body, gamma, beta

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        rate = self._rate(self._parts(state), state.position)
        return {"momentum": -rate(state.momentum)}

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        from scipy.special import ive

        like = state.momentum
        low, high = self.bounds(state)
        centre, radius = (high + low) / 2, max((high - low) / 2, 1e-3 * (high + abs(low)), 1e-9 / h)
        # exp(-h x) is the sum of (2 - [n = 0]) (-1)^n exp(-h centre) I_n(h radius) T_n, and
        # ive(n, z) = I_n(z) exp(-z).
        n, z = np.arange(1000), h * radius
        sizes = ive(n, z) * np.where(n == 0, 1.0, 2.0)
        needed = np.flatnonzero(sizes * np.exp(min(2 * z, 35.0)) > 1e-17)
        if needed[-1] == n[-1]:
            raise ValueError(
                f"stiffness_damping: the largest rate of damping is {high:.3g}, too large for "
                f"steps of {h:g}. Use a smaller stiffness_damping or dt."
            )
        terms = slice(int(needed[-1]) + 2)
        series = sizes[terms] * np.where(n[terms] % 2, -1.0, 1.0) * np.exp(-h * (centre - radius))
        back = sizes[terms] * np.exp(h * (centre + radius))
        numbers = {"series": series, "back": back, "centre": centre, "1/radius": 1 / radius}
        found = {n: torch.as_tensor(x, dtype=torch.float64).to(like) for n, x in numbers.items()}
        return {**self._parts(state), "reference": state.position, **found}

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        def along(series: str) -> Callable[[Coefficients, Tensor], tuple[Tensor]]:
            return lambda c, p: (self._applied(c, c[series], p),)

        flow, inverse = along("series"), along("back")
        return (GeneralFlow(("momentum",), flow, inverse, reads_parameters=True),)

    @torch.no_grad()
    def bounds(self, state: PhaseState) -> tuple[float, float]:
        """Bound the rates of damping at a start, by Lanczos iterations with a margin."""
        parts, p = self._parts(state), state.momentum
        root, rate = parts["1/m"].sqrt(), self._rate(parts, state.position)
        generator = torch.Generator().manual_seed(0)
        first = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        # The symmetric matrix M^-1/2 (gamma M + beta K) M^-1/2 has the same eigenvalues.
        scale = torch.where(root > 0, 1 / root, 0.0)
        start = parts["mobile"] * first.to(p)

        def symmetric(x: Tensor) -> Tensor:
            return root * rate(scale * x)

        high = largest_eigenvalue(symmetric, start, TOLERANCE)
        # Positive, so that its error is relative to the rates where all of them are equal.
        above = 2 * abs(high)
        low = above - largest_eigenvalue(lambda x: above * x - symmetric(x), start, TOLERANCE)
        margin = 0.05 * (high - low)
        return low - margin, high + margin

    def _parts(self, state: PhaseState) -> dict[str, Tensor]:
        p = state.momentum
        return {
            "gamma": per_atom(self.gamma, p),
            "beta": self.beta.to(p),
            "1/m": 1 / self.masses(p),
            "mobile": self.masses.mobile(p),
        }

    def _rate(self, c: Coefficients, position: Tensor) -> Callable[[Tensor], Tensor]:
        product = stiffness(self.body, position)
        return lambda p: c["mobile"] * (c["gamma"] * p + c["beta"] * product(c["1/m"] * p))

    def _applied(self, c: Coefficients, series: Tensor, p: Tensor) -> Tensor:
        rate = self._rate(c, c["reference"])

        def scaled(x: Tensor) -> Tensor:
            return c["1/radius"] * (rate(x) - c["centre"] * x)

        first, *weights = series.unbind(0)
        before, now = p, scaled(p)
        total = first * p
        for weight in weights[:-1]:
            total = total + weight * now
            before, now = now, 2 * scaled(now) - before
        return total + weights[-1] * now


def stiffness(potential: nn.Module, position: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the differentiable product ``v -> -dF/dq v``; the force is evaluated once."""
    recording = torch.is_grad_enabled()
    with torch.enable_grad():
        given = position.requires_grad
        q = position.view_as(position) if given else point_of_differentiation(position)
        value = force(potential, q)
        differentiable = given or next(leaves(value), None) is not None

    def product(v: Tensor) -> Tensor:
        if not value.requires_grad:
            return torch.zeros_like(v)
        create = recording and (differentiable or v.requires_grad)
        (found,) = torch.autograd.grad(
            value, q, v, retain_graph=True, create_graph=create, allow_unused=True
        )
        return torch.zeros_like(v) if found is None else -found

    return product
