"""Isotropic elastic materials, and the solids made of them."""

from __future__ import annotations

from torch import Tensor

from adjsim.potentials.solids.base import ElasticPotential, Material
from adjsim.potentials.solids.matrices import Matrix, rotation, rotation_along


class StVenantKirchhoffMaterial(Material):
    """The energy density of :class:`StVenantKirchhoff` at one deformation.

    With the strain of Green ``E = (F^T F - 1)/2`` and ``S = 2 mu E + lambda tr(E)``::

        psi     = mu a + lambda b       a = E:E       b = tr(E)^2/2
        P       = F S
        dP[dF]  = dF S + F dS           dE = (dF^T F + F^T dF)/2
    """

    def __init__(self, f: Matrix) -> None:
        self.f, self.strain = f, (f.T @ f).plus(-1.0) * 0.5
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

    Arguments and errors are those of :class:`~adjsim.potentials.ElasticPotential`.
    """

    material = StVenantKirchhoffMaterial


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

    Arguments and errors are those of :class:`~adjsim.potentials.ElasticPotential`.
    """

    material = CorotatedMaterial


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

    Arguments and errors are those of :class:`~adjsim.potentials.ElasticPotential`.
    """

    material = NeoHookeanMaterial
