"""Truncations: the energy of a pair close to its cutoff.

With u(s) the energy of a pair, s the squared distance and c the squared cutoff, a truncation gives
the energy v(s) for s < c, and its derivatives v' and v''. Beyond the cutoff the energy is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adjsim.core.arguments import as_number


class Untruncated(Protocol):
    """The energy of a pair before it is truncated, its derivatives du/ds, and the cutoff."""

    cutoff: float | None

    def pair_energy(self, s: Tensor) -> Tensor: ...

    def pair_slope(self, s: Tensor) -> Tensor: ...

    def pair_curvature(self, s: Tensor) -> Tensor: ...


class Truncation:
    """The base class of truncations, by which the energy of a pair ends at its cutoff.

    ``energy``, ``slope`` and ``curvature`` take a :class:`~adjsim.potentials.PairPotential` with a
    cutoff, and squared distances s below the squared cutoff. v(s) is the energy with the cutoff.
    """

    def check(self, cutoff: float) -> None:
        """Refuse a cutoff that this truncation cannot have."""

    def begin(self, cutoff: float) -> float:
        """Return the distance from which tail corrections restore the energy."""
        return cutoff

    def energy(self, pair: Untruncated, s: Tensor) -> Tensor:
        """Compute v(s)."""
        raise TypeError(f"{type(self).__name__} has no energy(pair, s).")

    def slope(self, pair: Untruncated, s: Tensor) -> Tensor:
        """Compute dv/ds."""
        raise TypeError(f"{type(self).__name__} has no slope(pair, s).")

    def curvature(self, pair: Untruncated, s: Tensor) -> Tensor:
        """Compute d2v/ds2."""
        raise TypeError(f"{type(self).__name__} has no curvature(pair, s).")


def _at_cutoff(pair: Untruncated, s: Tensor) -> Tensor:
    """Return the squared cutoff as a scalar tensor."""
    assert pair.cutoff is not None
    return torch.full((), pair.cutoff**2, dtype=s.dtype, device=s.device)


@dataclass(frozen=True)
class Shifted(Truncation):
    """The energy is shifted to zero at the cutoff r_c: ``v = u(r) - u(r_c)``.

    The force has a jump at the cutoff, so the energy of a run at constant energy drifts.
    """

    def energy(self, pair: Untruncated, s: Tensor) -> Tensor:
        return pair.pair_energy(s) - pair.pair_energy(_at_cutoff(pair, s))

    def slope(self, pair: Untruncated, s: Tensor) -> Tensor:
        return pair.pair_slope(s)

    def curvature(self, pair: Untruncated, s: Tensor) -> Tensor:
        return pair.pair_curvature(s)


@dataclass(frozen=True)
class Unshifted(Shifted):
    """The energy ends at the cutoff as it is: ``v(s) = u(s)``.

    Energy and force have a jump at the cutoff. Use it only to meet the energies of a program that
    cuts off so, as OpenMM does without a switch; the forces are those of :class:`Shifted`.
    """

    def energy(self, pair: Untruncated, s: Tensor) -> Tensor:
        return pair.pair_energy(s)


@dataclass(frozen=True)
class ForceShifted(Truncation):
    """Energy and force are shifted to zero at the cutoff r_c::

        v = u(r) - u(r_c) - (r - r_c) du/dr(r_c)

    The force is changed by a constant at every distance. Its derivative has a jump at the cutoff.
    The force between two atoms at one place is undefined, even if u is smooth there.
    """

    def energy(self, pair: Untruncated, s: Tensor) -> Tensor:
        c = _at_cutoff(pair, s)
        linear = 2 * c.sqrt() * pair.pair_slope(c) * (s.sqrt() - c.sqrt())
        return pair.pair_energy(s) - pair.pair_energy(c) - linear

    def slope(self, pair: Untruncated, s: Tensor) -> Tensor:
        return pair.pair_slope(s) - self._at_end(pair, s) / s.sqrt()

    def curvature(self, pair: Untruncated, s: Tensor) -> Tensor:
        return pair.pair_curvature(s) + 0.5 * self._at_end(pair, s) / (s * s.sqrt())

    def _at_end(self, pair: Untruncated, s: Tensor) -> Tensor:
        """Compute du/ds at the cutoff, times the cutoff."""
        c = _at_cutoff(pair, s)
        return c.sqrt() * pair.pair_slope(c)


@dataclass(frozen=True)
class Switched(Truncation):
    """The energy is multiplied by a polynomial that falls from 1 to 0::

        v = u (1 - 10 x^3 + 15 x^4 - 6 x^5),     x = (s - a) / (c - a)

    where s is the squared distance, c the squared cutoff and a the square of ``start``, and x = 0
    below ``start``. Energy, force and the derivative of the force are continuous.

    Args:
        start: the distance from which the energy is switched off, below the cutoff.
    """

    start: float

    def check(self, cutoff: float) -> None:
        if not 0 <= as_number("start", self.start) < cutoff:
            raise ValueError(
                f"Switched(start) needs a start from 0 to below the cutoff {cutoff:g}; got "
                f"{self.start}."
            )

    def begin(self, cutoff: float) -> float:
        return self.start

    def energy(self, pair: Untruncated, s: Tensor) -> Tensor:
        x, _ = self._share(pair, s)
        return pair.pair_energy(s) * _factor(x)

    def slope(self, pair: Untruncated, s: Tensor) -> Tensor:
        x, rate = self._share(pair, s)
        return pair.pair_slope(s) * _factor(x) + pair.pair_energy(s) * (rate * _first(x))

    def curvature(self, pair: Untruncated, s: Tensor) -> Tensor:
        x, rate = self._share(pair, s)
        return (
            pair.pair_curvature(s) * _factor(x)
            + pair.pair_slope(s) * (2 * rate * _first(x))
            + pair.pair_energy(s) * self._second(x, rate, s)
        )

    def _share(self, pair: Untruncated, s: Tensor) -> tuple[Tensor, float | Tensor]:
        """Compute x, and dx/ds."""
        assert pair.cutoff is not None
        rate = 1 / (pair.cutoff**2 - self.start**2)
        return ((s - self.start**2) * rate).clamp(0.0, 1.0), rate

    def _second(self, x: Tensor, rate: float | Tensor, s: Tensor) -> Tensor:
        """Compute the second derivative of the polynomial with respect to s."""
        return rate * rate * (-60 * x * (1 - x) * (1 - 2 * x))


@dataclass(frozen=True)
class SwitchedDistance(Switched):
    """The energy is multiplied by a polynomial of the distance, as OpenMM and CHARMM switch it::

        v = u (1 - 10 x^3 + 15 x^4 - 6 x^5),     x = (r - a) / (r_c - a)

    where r is the distance, r_c the cutoff and a ``start``. :class:`Switched`, in the squared
    distance, needs no root; use this one where the numbers of a force field have to be met.
    """

    def _share(self, pair: Untruncated, s: Tensor) -> tuple[Tensor, Tensor]:
        assert pair.cutoff is not None
        inverse, r = 1 / (pair.cutoff - self.start), s.sqrt()
        return ((r - self.start) * inverse).clamp(0.0, 1.0), 0.5 * inverse / r

    def _second(self, x: Tensor, rate: float | Tensor, s: Tensor) -> Tensor:
        return super()._second(x, rate, s) - rate / (2 * s) * _first(x)


def _factor(x: Tensor) -> Tensor:
    """Compute the polynomial of :class:`Switched`."""
    return 1 - x * x * x * (10 - x * (15 - 6 * x))


def _first(x: Tensor) -> Tensor:
    """Compute its derivative."""
    y = x * (1 - x)
    return -30 * y * y
