"""Torsions: energies of the dihedral angle of four atoms."""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, outside_inference_mode
from adjsim.core.coordinates import Dihedral
from adjsim.core.declared import declared
from adjsim.core.typing import Array, Number
from adjsim.potentials.bonded.base import BondedPotential


class PeriodicTorsion(BondedPotential):
    """Periodic torsions, ``U = sum over torsions of k (1 + cos(n phi - phase))``.

    phi is the dihedral angle, from -pi to pi, with the sign of IUPAC (trans is pi). Where three
    consecutive atoms are on a line, phi is undefined and the force of the term is zero.

    Args:
        index: ``(torsions, 4)``, the atoms of each torsion. Several terms may name the same atoms.
        k: half the height of the barrier, energy; a number, one for each torsion or one for each
            type.
        periodicity: n, positive integers; likewise. It has no gradient.
        phase: radians; likewise.
        types, box: see :class:`~adjsim.potentials.BondedPotential`.

    Raises:
        ValueError: a periodicity that is not a positive integer.
    """

    members = 4
    steps = ((0, 1), (1, 2), (2, 3))
    coordinate = Dihedral
    dim = 3

    k: Tensor
    periodicity: Tensor
    phase: Tensor

    def __init__(
        self,
        index: Array,
        k: Number,
        periodicity: int | Array,
        phase: Number,
        *,
        types: Array | None = None,
        box: Array | None = None,
    ) -> None:
        super().__init__(index, types=types, box=box)
        self.register_term_parameter("k", k)
        with outside_inference_mode():
            times = as_indices("periodicity", periodicity)
            self.register_term_parameter("periodicity", times)
        self.register_term_parameter("phase", phase, angle=True)
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


class RyckaertBellemans(BondedPotential):
    """Torsions as polynomials of a cosine, ``U = sum over torsions of sum_n c_n cos(phi - pi)^n``.

    n is 0 to 5, and phi as for :class:`PeriodicTorsion`. See Ryckaert and Bellemans, Chem. Phys.
    Lett. 30, 123 (1975).

    Args:
        index: ``(torsions, 4)``, the atoms of each torsion.
        {parameters}
        types, box: see :class:`~adjsim.potentials.BondedPotential`.
    """

    members = 4
    steps = ((0, 1), (1, 2), (2, 3))
    coordinate = Dihedral
    dim = 3

    coefficients: Tensor = declared(
        "c_0 to c_5, energy; ``(6,)``, ``(torsions, 6)`` or ``(types, 6)``", columns=(6,)
    )

    def element(self, x: Tensor) -> Tensor:
        return _polynomial(-torch.cos(x), self.term_parameters("coefficients", x))

    def slope(self, x: Tensor) -> Tensor:
        c = self.term_parameters("coefficients", x)
        return torch.sin(x) * _polynomial(-torch.cos(x), _derived(c))

    def curvature(self, x: Tensor) -> Tensor:
        first = _derived(self.term_parameters("coefficients", x))
        cosine, sine = torch.cos(x), torch.sin(x)
        return cosine * _polynomial(-cosine, first) + sine * sine * _polynomial(
            -cosine, _derived(first)
        )


def _polynomial(x: Tensor, coefficients: list[Tensor]) -> Tensor:
    """Evaluate a polynomial, lowest power first."""
    total = coefficients[-1].expand_as(x)
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def _derived(coefficients: list[Tensor]) -> list[Tensor]:
    """Return the coefficients of the derivative of a polynomial."""
    return [n * c for n, c in enumerate(coefficients)][1:]
