"""The neo-Hookean solid."""

from __future__ import annotations

from torch import Tensor

from adjsim.potentials.solids.base import ElasticPotential, Material
from adjsim.potentials.solids.matrices import Matrix


class NeoHookeanMaterial(Material):
    """The energy density of :class:`NeoHookean` at one deformation.

    With J = det F and C = dJ/dF, the cofactors of F::

        psi     = mu a + lambda b       a = (F:F - dim)/2 - (J - 1) + b       b = (J - 1)^2/2
        P       = mu F + t C            t = (lambda + mu) (J - 1) - mu
        dP[dF]  = mu dF + t dC[dF] + (lambda + mu) (C:dF) C
    """

    def __init__(self, f: Matrix) -> None:
        self.f, self.cofactors = f, f.cofactors()
        self.growth = f.determinant(self.cofactors) - 1

    def energies(self) -> tuple[Tensor, Tensor]:
        b = 0.5 * self.growth * self.growth
        return 0.5 * (self.f.inner(self.f) - len(self.f)) - self.growth + b, b

    def stress(self, mu: Tensor, lam: Tensor) -> Matrix:
        return self.f.combined(mu, (lam + mu) * self.growth - mu, self.cofactors)

    def rates(self, df: Matrix) -> tuple[Tensor, Tensor]:
        growth = self.cofactors.inner(df)
        b = self.growth * growth
        return self.f.inner(df) - growth + b, b

    def product(self, mu: Tensor, lam: Tensor, df: Matrix) -> Matrix:
        both = lam + mu
        t, rate = both * self.growth - mu, both * self.cofactors.inner(df)
        turned = self.f.cofactors_along(df)
        return df.each(lambda x, y, z: mu * x + t * y + rate * z, turned, self.cofactors)


class NeoHookean(ElasticPotential):
    """The neo-Hookean solid, ``psi = mu/2 (I_C - 3) - mu (J - 1) + (lambda + mu)/2 (J - 1)^2``.

    I_C = F:F and J = det F. Around the rest shape the moduli are exactly those of Lame. The energy
    is a polynomial in F, smooth through inversion (J < 0) and at every rank. J is a triple product:
    the second derivative of a determinant by factorisation is not finite at rank one. In two
    dimensions (plane strain) 3 is replaced by 2. The first term is that of rubber (Treloar), the
    rest is that of Smith, de Goes and Kim, ACM Trans. Graph. 37, 12 (2018), without their term that
    vanishes at rest.

    An inverted element returns by a finite force, but meanwhile its volume is negative: shorten the
    step or refine the mesh where this happens. Linear tetrahedra are too stiff in bending, and
    close to ``poissons_ratio`` = 1/2 (locking); refine until the result does not change.

    Args:
        mesh, youngs_modulus, poissons_ratio, rest_stretch: see
            :class:`~adjsim.potentials.ElasticPotential`.
    """

    material = NeoHookeanMaterial
