"""The necks between spheres, which no solvent enters."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.declared import NOT_NEGATIVE, POSITIVE, declared, setting
from adjsim.potentials.evaluated import DeclaredModule


class Necks(DeclaredModule):
    """The necks between spheres, whose volumes :class:`~adjsim.GeneralizedBorn` adds to H::

        N_ij = depth_ij / (1 + quadratic x^2 + sextic x^6)        x = r - place_ij
                                                  for r < radius_i + radius_j + reach

    H counts solvent between two spheres where no molecule of it fits. N jumps to zero at the end of
    its reach, from about 1e-5 of its depth. The two tables cannot be trained. See Mongan,
    Simmerling, McCammon, Case and Onufriev, J. Chem. Theory Comput. 3, 156 (2007).

    Args:
        {parameters}

    Raises:
        ValueError: tables that are not square, of two sizes or trained, numbers out of range.
    """

    depth: Tensor = declared("``(atoms, atoms)``, 1/length, around an atom i beside an atom j")
    place: Tensor = declared("``(atoms, atoms)``, length")
    reach: float = setting(
        "how far apart two spheres may be; the default is in angstrom", NOT_NEGATIVE, 6.8
    )
    quadratic: float = setting("1/length^2; the default is in angstrom", POSITIVE, 1.0)
    sextic: float = setting("1/length^6; the default is in angstrom", POSITIVE, 0.3)

    def validate(self) -> None:
        """Refuse tables and numbers that the constructor would refuse."""
        super().validate()
        shapes = tuple(self.depth.shape), tuple(self.place.shape)
        if len(shapes[0]) != 2 or len({*shapes, shapes[0][::-1]}) > 1:
            raise ValueError(
                f"depth and place must be (atoms, atoms); got shapes {', '.join(map(str, shapes))}."
            )
        trained = [name for name in ("depth", "place") if getattr(self, name).requires_grad]
        if trained:
            raise ValueError(
                f"{trained[0]} requires grad, and no gradient with respect to it is provided; pass "
                f"{trained[0]}.detach(). The weight of all necks, neck, has a gradient."
            )


class NeckPairs:
    """N of pairs, and its derivatives with respect to s = r^2, elementwise.

    With D = 1 + a x^2 + b x^6::

        dN/dr = -N D'/D        d2N/dr2 = N (2 (D'/D)^2 - D''/D)
        dN/ds = dN/dr / (2 r)  d2N/ds2 = (d2N/dr2 - dN/dr / r) / (4 r^2)

    ``inverse`` is 1/r, ``depth`` and ``place`` are those of the pairs, and ``radii`` are sums of
    two radii.
    """

    def __init__(
        self,
        necks: Necks,
        r: Tensor,
        inverse: Tensor,
        depth: Tensor,
        place: Tensor,
        radii: Tensor,
        included: Tensor,
    ) -> None:
        x = r - place
        square = x * x
        fourth = square * square
        a, b = necks.quadratic, necks.sextic
        self.inverse = inverse
        over = 1 / (1 + square * (a + b * fourth))
        near = torch.where(included, r, torch.inf) < radii + necks.reach
        self.n = torch.where(near, depth * over, 0.0)
        self.first = -x * (2 * a + 6 * b * fourth) * over
        self.second = (2 * a + 30 * b * fourth) * over

    def value(self) -> Tensor:
        """Compute N."""
        return self.n

    def slope(self) -> Tensor:
        """Compute dN/ds."""
        return 0.5 * self.n * self.first * self.inverse

    def curvature(self) -> Tensor:
        """Compute d2N/ds2."""
        second = 2 * self.first * self.first - self.second
        bend = second - self.first * self.inverse
        return 0.25 * self.n * bend * self.inverse * self.inverse
