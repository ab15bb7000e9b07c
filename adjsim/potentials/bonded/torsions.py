"""Torsions and impropers: energies of the dihedral angle of four atoms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices
from adjsim.core.coordinates import Dihedral
from adjsim.core.declared import declared
from adjsim.core.typing import Array, Number
from adjsim.potentials.bonded.base import BondedPotential
from adjsim.potentials.bonded.bonds_and_angles import HarmonicTerm


class DihedralTerm(BondedPotential):
    """The base class of terms of the dihedral angle of four atoms."""

    members = 4
    steps = ((0, 1), (1, 2), (2, 3))
    coordinate = Dihedral
    dim = 3


class PeriodicTorsion(DihedralTerm):
    """Periodic torsions, ``U = sum over torsions of k (1 + cos(n phi - phase))``.

    phi is the dihedral angle, from -pi to pi, with the sign of IUPAC (trans is pi). Where three
    consecutive atoms are on a line, phi is undefined and the force of the term is zero.

    Args:
        index: ``(torsions, 4)``, the atoms of each torsion. Several terms may name the same atoms.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    k: Tensor = declared("half the height of the barrier, energy")
    periodicity: Tensor = declared("n, positive integers, without a gradient")
    phase: Tensor = declared("radians", angle=True)

    def __init__(
        self, index: Array, k: Number, periodicity: int | Array, phase: Number, **options: Any
    ) -> None:
        super().__init__(index, k, as_indices("periodicity", periodicity), phase, **options)
        self.validate()

    def validate(self) -> None:
        """Refuse a periodicity that the constructor would refuse."""
        super().validate()
        times = self.periodicity
        wrong = times[(times <= 0) | (times != times.round())]
        if len(wrong):
            raise ValueError(f"periodicity must be positive integers; got {float(wrong[0]):g}.")

    def element(self, x: Tensor) -> Tensor:
        k, _, turn = self._turn(x)
        return k * (1 + torch.cos(turn))

    def slope(self, x: Tensor) -> Tensor:
        k, n, turn = self._turn(x)
        return -k * n * torch.sin(turn)

    def curvature(self, x: Tensor) -> Tensor:
        k, n, turn = self._turn(x)
        return -k * n * n * torch.cos(turn)

    def _turn(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, n, phase = (self.term_parameter(name, x) for name in ("k", "periodicity", "phase"))
        return k, n, n * x - phase


class RyckaertBellemans(DihedralTerm):
    """Torsions as polynomials of a cosine, ``U = sum over torsions of sum_n c_n cos(phi - pi)^n``.

    n is 0 to 5, and phi as for :class:`PeriodicTorsion`. See Ryckaert and Bellemans, Chem. Phys.
    Lett. 30, 123 (1975).

    Args:
        index: ``(torsions, 4)``, the atoms of each torsion.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    coefficients: Tensor = declared(
        "c_0 to c_5, energy; ``(6,)``, ``(torsions, 6)`` or ``(types, 6)``", columns=(6,)
    )

    def element(self, x: Tensor) -> Tensor:
        return polynomial(-torch.cos(x), self.term_parameters("coefficients", x))

    def slope(self, x: Tensor) -> Tensor:
        c = self.term_parameters("coefficients", x)
        return torch.sin(x) * polynomial(-torch.cos(x), differentiated(c))

    def curvature(self, x: Tensor) -> Tensor:
        first = differentiated(self.term_parameters("coefficients", x))
        cosine, sine = torch.cos(x), torch.sin(x)
        return cosine * polynomial(-cosine, first) + sine * sine * polynomial(
            -cosine, differentiated(first)
        )


class HarmonicImproper(HarmonicTerm, DihedralTerm):
    """Harmonic impropers, ``U = sum over impropers of k/2 d^2``.

    d is the difference of the dihedral angle of the four atoms, in their given order, from
    ``angle``, by at most half a turn. The force jumps where d is half a turn.

    Args:
        index: ``(impropers, 4)``, the atoms of each improper.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    k: Tensor = declared("stiffness, energy / radian^2")
    angle: Tensor = declared("dihedral angle at rest, radians", angle=True)

    def change(self, x: Tensor) -> Tensor:
        d = x - self.term_parameter("angle", x)
        turns = torch.round(d.detach() * (1 / (2 * math.pi)))
        return d - 2 * math.pi * turns


def polynomial(x: Tensor, coefficients: Sequence[Tensor | float]) -> Tensor:
    """Evaluate a polynomial of the first degree or a higher one, lowest power first."""
    total, *rest = reversed(coefficients)
    for c in rest:
        total = total * x + c
    return cast(Tensor, total)


def differentiated(coefficients: Sequence[Any], order: int = 1) -> list[Any]:
    """Return the coefficients of a derivative of a polynomial."""
    for _ in range(order):
        coefficients = [n * c for n, c in enumerate(coefficients)][1:]
    return list(coefficients)
