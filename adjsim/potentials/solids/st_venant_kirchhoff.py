"""The solid of St. Venant and Kirchhoff."""

from __future__ import annotations

from torch import Tensor

from adjsim.potentials.solids.base import ElasticPotential, Material
from adjsim.potentials.solids.matrices import Matrix


class StVenantKirchhoffMaterial(Material):
    """The energy density of :class:`StVenantKirchhoff` at one deformation.

    With the strain of Green ``E = (F^T F - 1)/2`` and ``S = 2 mu E + lambda tr(E)``::

        psi     = mu a + lambda b       a = E:E       b = tr(E)^2/2
        P       = F S
        dP[dF]  = dF S + F dS           dE = (dF^T F + F^T dF)/2
    """

    def __init__(self, f: Matrix) -> None:
        self.f = f
        self.strain = Matrix(
            [0.5 * (x - 1) if i == j else 0.5 * x for j, x in enumerate(row)]
            for i, row in enumerate(f.T @ f)
        )
        self.growth = self.strain.trace()

    def energies(self) -> tuple[Tensor, Tensor]:
        return self.strain.inner(self.strain), 0.5 * self.growth * self.growth

    def stress(self, mu: Tensor, lam: Tensor) -> Matrix:
        return self.f @ self._second(mu, lam)

    def rates(self, df: Matrix) -> tuple[Tensor, Tensor]:
        change = self._change(df)
        return 2 * self.strain.inner(change), self.growth * change.trace()

    def product(self, mu: Tensor, lam: Tensor, df: Matrix) -> Matrix:
        change = self._change(df)
        turned = (change * (2 * mu)).plus(lam * change.trace())
        return df @ self._second(mu, lam) + self.f @ turned

    def _second(self, mu: Tensor, lam: Tensor) -> Matrix:
        """Compute the second Piola-Kirchhoff stress S."""
        return (self.strain * (2 * mu)).plus(lam * self.growth)

    def _change(self, df: Matrix) -> Matrix:
        """Compute the derivative of the strain along dF."""
        half = df.T @ self.f
        return (half + half.T) * 0.5


class StVenantKirchhoff(ElasticPotential):
    """The solid of St. Venant and Kirchhoff, ``psi = mu E:E + lambda/2 tr(E)^2``.

    ``E = (F^T F - 1)/2`` is the strain of Green: stress is linear in it, so that large rotations
    are free of stress. Use it for large rotations with small strains. It softens in compression: a
    bar pressed below 58 % of its length loses its resistance, and an inverted element does not
    return. :class:`NeoHookean` has neither fault.

    Args:
        mesh, youngs_modulus, poissons_ratio, rest_stretch: see
            :class:`~adjsim.potentials.ElasticPotential`.
    """

    material = StVenantKirchhoffMaterial
