"""Smooth Coulomb friction, solved exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.core.state import PhaseState
from adjsim.dynamics.masses import Masses, per_atom
from adjsim.dynamics.moves import GeneralFlow, Move
from adjsim.dynamics.sources import Coefficients, Field, Time
from adjsim.dynamics.terms import Term
from adjsim.potentials import SurfaceContact

# Series in the square of the argument are used below this square. Both the first term left out of
# them, and the cancellation in the derivative of the closed forms above it, are below 1e-14.
SMALL = 0.01
_SINH = [1 / math.factorial(2 * n + 1) for n in range(6)]
_COSH = [1 / math.factorial(2 * n) for n in range(7)]
_ASINH = [(-0.25) ** n * math.comb(2 * n, n) / (2 * n + 1) for n in range(9)]


class CoulombFriction(Term[PhaseState]):
    """Smooth Coulomb friction, F, at fixed position.

    The velocity w of a vertex along the surface and relative to it decays as::

        m dw/dt = -mu N(q) tanh(abs(w)/v_s) w/abs(w),      w = (1 - n n^T)(p/m - u)

    with the normal force N, the normal n and the velocity u of the surface. There is no static
    friction: a vertex under a load f < mu N creeps, at ``v_s atanh(f/(mu N))``. With ``a = mu N/m``
    the flow over h is exact::

        w' = w abs(w')/abs(w)        abs(w') = v_s asinh(sinh(abs(w)/v_s) exp(-a h/v_s))

    The inverse is the flow over -h. It multiplies rounding errors of a vertex that sticks by
    exp(a h/v_s), and of one that slides fast by about one. N, n and u are differentiated with
    respect to the position and the parameters of the contact.
    """

    def __init__(
        self, masses: Masses, contact: SurfaceContact, friction: Tensor, smoothing: Tensor
    ) -> None:
        self.masses, self.contact = masses, contact
        self.friction, self.smoothing = friction, smoothing

    def drift(self, t: Any, state: PhaseState) -> Mapping[str, Tensor]:
        slip, force = self._slip_and_force(t, state)
        return {"momentum": -self.masses.mobile(state.momentum) * force * slip}

    def rate(self, t: Any, state: PhaseState) -> Tensor:
        """Compute the fastest rate at which the slip of each vertex decays, ``(*batch, atoms, 1)``.

        It is ``mu N/m tanh(x)/(x v_s)`` with ``x = abs(w)/v_s``, across the slip.
        """
        return self._slip_and_force(t, state)[1] / self.masses(state.momentum)

    def _slip_and_force(self, t: Any, state: PhaseState) -> tuple[Tensor, Tensor]:
        """Return the velocity along the surface, and the friction divided by it."""
        q, p = state
        slip, load = self._slip(1 / self.masses(p), q, t, p)
        mu, width = per_atom(self.friction, p), self.smoothing.to(p)
        ratio = tanh_ratio((slip * slip).sum(-1, keepdim=True) / width**2)
        return slip, mu * load / width * ratio

    def coefficients(self, h: float, state: PhaseState) -> dict[str, Tensor]:
        p = state.momentum
        m, width = self.masses(p), self.smoothing.to(p)
        inverse_mass, finite = 1 / m, torch.where(torch.isfinite(m), m, 0.0)
        rate = h * per_atom(self.friction, p) * inverse_mass / width
        return {"h mu/(m v_s)": rate, "1/m": inverse_mass, "m": finite, "v_s": width}

    def moves(self, h: float, state: PhaseState) -> Sequence[Move]:
        def along(sign: int) -> Any:
            return lambda c, q, t, p: (self._decayed(c, q, t, p, sign),)

        reads = (Field("position"), Time())
        return (GeneralFlow(("momentum",), along(1), along(-1), reads, reads_parameters=True),)

    def _decayed(self, c: Coefficients, q: Tensor, t: Any, p: Tensor, sign: int) -> Tensor:
        slip, load = self._slip(c["1/m"], q, t, p)
        square = (slip * slip).sum(-1, keepdim=True) / c["v_s"] ** 2
        factor = decay_ratio(square, sign * c["h mu/(m v_s)"] * load)
        return p + c["m"] * (factor - 1) * slip

    def _slip(self, inverse_mass: Tensor, q: Tensor, t: Any, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity along the surface, and the normal force ``(*batch, atoms, 1)``."""
        contact = self.contact
        normal = contact.normal(q, t)
        relative = p * inverse_mass - contact.surface_velocity(q, t)
        slip = relative - (relative * normal).sum(-1, keepdim=True) * normal
        return slip, contact.normal_force(q, t).unsqueeze(-1)


def decay_ratio(square: Tensor, rate: Tensor) -> Tensor:
    """Compute ``asinh(sinh(x) exp(-rate)) / x`` from the square of x, smoothly at zero."""
    # The inverse has a negative rate. One at which nothing is left to invert is limited, so that
    # zero stays zero; the error that this makes is measured as any other is.
    limit = 0.4 * math.log(torch.finfo(square.dtype).max)
    rate = rate.clamp(min=-limit)
    small = square < SMALL
    Q = torch.where(small, square, 0.0)
    part = _series(_SINH, Q) * torch.exp(-rate)
    slow = part * asinh_ratio(Q * part * part)
    x = torch.where(small, 1.0, square).sqrt()
    # The logarithm of sinh(x) exp(-rate), and from it asinh, for either sign without overflow.
    log = x - rate + torch.log1p(-torch.exp(-2 * x)) - math.log(2)
    E = torch.exp(-log.abs())
    root = torch.sqrt(1 + E * E)
    y = torch.where(log > 0, log + torch.log(1 + root), torch.log1p(E + E * E / (1 + root)))
    return torch.where(small, slow, y / x)


def asinh_ratio(square: Tensor) -> Tensor:
    """Compute ``asinh(z) / z`` from the square of z, smoothly at zero."""
    small = square < SMALL
    Z = torch.where(small, 1.0, square)
    z = Z.sqrt()
    closed = torch.log1p(z + Z / (1 + torch.sqrt(1 + Z))) / z
    return torch.where(small, _series(_ASINH, torch.where(small, square, 0.0)), closed)


def tanh_ratio(square: Tensor) -> Tensor:
    """Compute ``tanh(x) / x`` from the square of x, smoothly at zero."""
    small = square < SMALL
    Q, x = torch.where(small, square, 0.0), torch.where(small, 1.0, square).sqrt()
    return torch.where(small, _series(_SINH, Q) / _series(_COSH, Q), torch.tanh(x) / x)


def _series(coefficients: Sequence[float], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total
