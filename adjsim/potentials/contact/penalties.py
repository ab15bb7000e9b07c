"""Penalties: energies of one vertex as a function of its gap g."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.declared import POSITIVE, declared, setting
from adjsim.potentials.evaluated import DeclaredModule
from adjsim.potentials.products import Elementwise

# Steps of the search for a gap: half of a digit in 53 remains.
HALVINGS = 53
# The rule of a number, or one for each vertex.
VERTICES: dict[str, Any] = {
    "positive": True,
    "finite": True,
    "shapes": ((), ("atoms",)),
    "each": "one number for each vertex",
}


class Penalty(Elementwise, DeclaredModule):
    """An energy u(g) of a vertex with gap g, elementwise, with closed derivatives.

    Subclasses write ``element`` (u), ``slope`` (u' <= 0), ``curvature`` (u'') and
    ``largest_curvature``. A parameter is a number, or ``(atoms,)``, one for each vertex.

    Attributes:
        reach: the argument that allows vertices to come closer, for error messages.
    """

    reach: ClassVar[str] = "depth"
    shapes_of_declared = "a number or ``(atoms,)``"

    @property
    def lowest(self) -> float | None:
        """The gap below which a run stops with an error; None: any gap is allowed."""
        return None

    def largest_curvature(self, energy: float | None = None) -> Tensor:
        """Compute the largest u'', a number or ``(atoms,)``, where u <= ``energy`` (None: any)."""
        raise TypeError(f"{type(self).__name__} has no largest_curvature(energy).")

    def _value(self, name: str, gap: Tensor) -> Tensor:
        """Return a parameter, to broadcast against gaps ``(*batch, atoms)``."""
        value: Tensor = getattr(self, name).to(gap)
        if value.numel() == 1:
            return value.reshape(())
        if gap.ndim and gap.shape[-1] not in (1, len(value)):
            raise ValueError(
                f"{name} has {len(value)} entries and position {gap.shape[-1]} vertices."
            )
        return value


class _Sinking(Penalty):
    """A penalty that allows a penetration up to a depth, and has a largest curvature."""

    #: The largest curvature, in units of the stiffness.
    STIFFEST: ClassVar[float] = 1.0

    stiffness: Tensor = declared("k > 0, energy/length^2; a number or ``(atoms,)``", **VERTICES)
    depth: float | None = setting(
        "penetration beyond which a run stops with an error, length; None: no limit",
        POSITIVE,
        None,
        keyword=True,
    )

    @property
    def lowest(self) -> float | None:
        return None if self.depth is None else -self.depth

    def largest_curvature(self, energy: float | None = None) -> Tensor:
        return self.STIFFEST * self._value("stiffness", self.stiffness).detach()


class Quadratic(_Sinking):
    """The one-sided quadratic penalty, ``u(g) = k/2 max(0, -g)^2``.

    Value and slope are continuous, and the curvature jumps from 0 to k at the surface. A load F
    sinks in by F/k.

    Gradients are exact for the steps taken, but derivatives of a bounce converge with the first
    order of dt. With the frequency w in contact, ``w dt = 0.1`` leaves none of their digits
    correct, and ``w dt = 0.001`` errors of 0.5 to 10 %. :class:`Softplus` with a width of one step
    at the speed of impact, ``width = v dt``, leaves 0.1 % at ``w dt = 0.1``.

    Args:
        {parameters}
    """

    def element(self, gap: Tensor) -> Tensor:
        inside = gap.clamp(max=0)
        return 0.5 * self._value("stiffness", gap) * inside * inside

    def slope(self, gap: Tensor) -> Tensor:
        return self._value("stiffness", gap) * gap.clamp(max=0)

    def curvature(self, gap: Tensor) -> Tensor:
        return torch.where(gap < 0, self._value("stiffness", gap), 0.0)


class Softplus(_Sinking):
    """The smooth one-sided penalty, ``u(g) = k/2 s^2`` with ``s = w ln(1 + exp(-g/w))``.

    It is smooth everywhere and tends to :class:`Quadratic` as the width w goes to zero. It acts
    before contact: the force is ``k w ln(2)/2 = 0.35 k w`` at the surface, and 2e-9 ``k w`` at
    ``g = 10 w``. The curvature is at most 1.0454 k, at ``g = -3.1 w``.

    Args:
        {parameters}
    """

    #: The maximum over x of a^2 + ln(1 + exp(x)) a (1 - a), with a = 1 / (1 + exp(-x)).
    STIFFEST: ClassVar[float] = 1.0454

    width: Tensor = declared("w > 0, length; a number or ``(atoms,)``", **VERTICES)

    def _parts(self, gap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = self._value("width", gap)
        x = -gap / width
        behind = x > 0
        # One formula on each side, so that derivatives are right at a gap of zero too.
        e = torch.exp(torch.where(behind, -x, x))
        soft = width * (torch.where(behind, x, 0.0) + e.log1p())
        return soft, torch.where(behind, 1.0, e) / (1 + e), width

    def element(self, gap: Tensor) -> Tensor:
        soft, _, _ = self._parts(gap)
        return 0.5 * self._value("stiffness", gap) * soft * soft

    def slope(self, gap: Tensor) -> Tensor:
        soft, share, _ = self._parts(gap)
        return -self._value("stiffness", gap) * soft * share

    def curvature(self, gap: Tensor) -> Tensor:
        soft, share, width = self._parts(gap)
        return self._value("stiffness", gap) * share * (share + soft * (1 - share) / width)


class Barrier(Penalty):
    """The logarithmic barrier, ``u(g) = -kappa (g - d)^2 ln(g/d)``.

    See Li et al., ACM Trans. Graph. 39, 49 (2020). It is zero from the distance d on, with two
    continuous derivatives, and infinite at contact. Below the floor f it is the quadratic function
    with the same value, slope and curvature as at f, so that an explicit step that jumps over the
    surface comes back. With x = g/d::

        u'(g) = kappa d (1 - x) (2 ln(x) + 1 - 1/x)     (negative below d)
        u''(g) = kappa (-2 ln(x) - 3 + 2/x + 1/x^2)     (decreases with g)

    The stiffness at the floor bounds the step of the run: ``u''(f) = 443 kappa`` at f = d/20.

    Args:
        {parameters}

    Raises:
        ValueError: numbers that are not positive and finite, a floor at or above the distance.
    """

    reach = "distance"

    stiffness: Tensor = declared("kappa, energy / length^2", **VERTICES)
    distance: Tensor = declared("d, length", **VERTICES)
    floor: Tensor | None = declared("f, length, below d, and d/20 if None", None, **VERTICES)

    @property
    def lowest(self) -> float:
        return 0.0

    def validate(self) -> None:
        """Refuse a floor at or above the distance."""
        if self.floor is None:
            return
        low, high = self._range(self.distance.detach())
        if not bool((low.detach() < high).all()):
            raise ValueError(
                f"floor must be below distance; got {low.tolist()} and {high.tolist()}."
            )

    def element(self, gap: Tensor) -> Tensor:
        g, x, scale, distance = self._parts(gap)
        log, rest, beyond = x.log(), 1 - x, gap - g
        value = -distance * distance * rest * rest * log
        value = value + beyond * (_slope(distance, x, log) + 0.5 * beyond * _bend(x, log))
        return torch.where(gap >= distance, 0.0, scale * value)

    def slope(self, gap: Tensor) -> Tensor:
        g, x, scale, distance = self._parts(gap)
        log = x.log()
        value = _slope(distance, x, log) + (gap - g) * _bend(x, log)
        return torch.where(gap >= distance, 0.0, scale * value)

    def curvature(self, gap: Tensor) -> Tensor:
        _, x, scale, distance = self._parts(gap)
        return torch.where(gap >= distance, 0.0, scale * _bend(x, x.log()))

    def largest_curvature(self, energy: float | None = None) -> Tensor:
        with torch.no_grad():
            floor, distance = self._range(self.distance)
            gap, _ = torch.broadcast_tensors(floor, self.stiffness)
            if energy is not None:
                # The energy decreases with the gap, so halving finds where it is that of a vertex.
                low, high = gap, distance.expand_as(gap)
                for _ in range(HALVINGS):
                    middle = (low + high) / 2
                    above = self.element(middle) > energy
                    low, high = torch.where(above, middle, low), torch.where(above, high, middle)
                gap = torch.where(self.element(gap) > energy, low, gap)
            return self.curvature(gap)

    def _range(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gaps where the quadratic function ends and where the energy ends."""
        distance = self._value("distance", like)
        return distance / 20 if self.floor is None else self._value("floor", like), distance

    def _parts(self, gap: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the point g of the barrier that is nearest to a gap, g/d, the stiffness and d."""
        floor, distance = self._range(gap)
        # NaN fails both comparisons, and comes back by the distance to the floor.
        g = torch.where(gap > floor, torch.where(gap < distance, gap, distance), floor)
        return g, g / distance, self._value("stiffness", gap), distance


def _slope(distance: Tensor, x: Tensor, log: Tensor) -> Tensor:
    """Compute u' / stiffness of the barrier, which is negative."""
    return distance * (1 - x) * (2 * log + 1 - 1 / x)


def _bend(x: Tensor, log: Tensor) -> Tensor:
    """Compute u'' / stiffness of the barrier."""
    return 1 / (x * x) + 2 / x - 3 - 2 * log
