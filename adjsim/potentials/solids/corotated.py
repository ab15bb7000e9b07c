"""The corotated linear solid."""

from __future__ import annotations

from torch import Tensor

from adjsim.potentials.solids.base import ElasticPotential, Material
from adjsim.potentials.solids.matrices import Matrix
from adjsim.potentials.solids.rotation import rotation, rotation_along


class CorotatedMaterial(Material):
    """The energy density of :class:`CorotatedLinear` at one deformation.

    With F = R S, R a rotation, D = F - R and t = tr(S) - dim::

        psi     = mu a + lambda b       a = D:D       b = t^2/2
        P       = 2 mu D + lambda t R
        dP[dF]  = 2 mu (dF - dR) + lambda (R:dF) R + lambda t dR

    The first line has the derivative of the second because R:dR = F:dR = 0.
    """

    def __init__(self, f: Matrix) -> None:
        self.f, self.r = f, rotation(f)
        self.stretch = f - self.r
        self.growth = self.r.inner(f) - len(f)

    def energies(self) -> tuple[Tensor, Tensor]:
        return self.stretch.inner(self.stretch), 0.5 * self.growth * self.growth

    def stress(self, mu: Tensor, lam: Tensor) -> Matrix:
        return self.stretch.combined(2 * mu, lam * self.growth, self.r)

    def rates(self, df: Matrix) -> tuple[Tensor, Tensor]:
        return 2 * self.stretch.inner(df), self.growth * self.r.inner(df)

    def product(self, mu: Tensor, lam: Tensor, df: Matrix) -> Matrix:
        plain = df.combined(2 * mu, lam * self.r.inner(df), self.r)
        return plain + rotation_along(self.f, self.r, df) * (lam * self.growth - 2 * mu)


class CorotatedLinear(ElasticPotential):
    """The corotated linear solid, ``psi = mu |F - R|^2 + lambda/2 tr(S - 1)^2`` with F = R S.

    R is the rotation next to F, so that rotations are free of stress and small strains have the
    stress of linear elasticity. An inverted element returns, since R is a rotation there too. Use
    it for stiff bodies with small strains and large rotations. The product of the force is finite
    where singular values of F are equal. At rank one and at reflections with two opposite singular
    values R is not unique and the force jumps; there it is that of one of the possible rotations,
    and R counts as constant. Within about 1e-3 of the norm of F of such an F, R is approximate.

    Args:
        mesh, youngs_modulus, poissons_ratio, rest_stretch: see
            :class:`~adjsim.potentials.ElasticPotential`.
    """

    material = CorotatedMaterial
