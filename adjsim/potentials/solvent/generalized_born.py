"""Generalised Born solvents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_flag, describe_type
from adjsim.core.declared import (
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    Declaring,
    Limits,
    declared,
    setting,
)
from adjsim.core.parameters import describe, register
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Array, Energies, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.pairs.term_sums import Neighbours, StagedSums, virial_of
from adjsim.potentials.products import (
    DeferredVJP,
    ParameterVJP,
    Pullback,
    derived_force,
    energy_vjp,
)
from adjsim.potentials.solvent import listed as by_list
from adjsim.potentials.solvent.necks import Necks
from adjsim.potentials.solvent.pairs import NUMBERS, SHAPE, BornPairs, BornTangent


def _as_necks(name: str, value: Any) -> Necks:
    if not isinstance(value, Necks):
        raise TypeError(f"{name} must be Necks(depth, place); got {describe_type(value)}.")
    return value


# The rule of one number, which is given by name.
ONE: dict[str, Any] = {"keyword": True, "shapes": ((),)}


class GeneralizedBorn(Declaring, StagedSums, Potential):
    """Generalised Born solvent with surface area: HCT, OBC1, OBC2, GBn and GBn2.

    ::

        U      = -1/2 sum over i, j of tau(f_ij) q_i q_j / f_ij
                 + sum over i of 4 pi surface (radius_i + probe)^2 (radius_i / B_i)^6
        tau(f) = constant (1/solute - exp(-kappa f)/solvent)
        f_ij^2 = r_ij^2 + B_i B_j exp(-r_ij^2 / (4 B_i B_j)),    so that f_ii = B_i
        1/B_i  = 1/rho_i - tanh(alpha psi_i - beta psi_i^2 + gamma psi_i^3) / radius_i
        psi_i  = rho_i sum over j != i of H(r_ij; rho_i, scale_j rho_j) + neck N_ij
        rho_i  = radius_i - offset

    ========= ======================================================================
    B         Born radius: the smaller, the more solvent there is around an atom
    H         what atom j displaces of the solvent around atom i (see descreening.py)
    N         what the neck between two spheres displaces (:class:`~.necks.Necks`)
    tau / f   interaction through the polarised solvent, of pairs and of each atom with itself
    ========= ======================================================================

    The defaults are those of OBC2. Lengths are in angstrom:

    ======= ========== ============ ============== ======== ======== =========================
    model   alpha      beta         gamma          offset   neck
    ======= ========== ============ ============== ======== ======== =========================
    HCT     1          0            0              0.09     0        ``bounded=False``
    OBC1    0.8        0            2.909125       0.09     0
    OBC2    1          0.8          4.85           0.09     0
    GBn     1.09511284 1.907992938  2.50798245     0.09     0.361825 ``necks=Necks(...)``
    GBn2    of each    of each      of each        0.195141 0.826836 ``necks=Necks(...)``
    ======= ========== ============ ============== ======== ======== =========================

    :func:`~adjsim.io.from_openmm` makes all of them from OpenMM's force-field files. Sources: HCT
    Hawkins, Cramer and Truhlar, J. Phys. Chem. 100, 19824 (1996); OBC Onufriev, Bashford and Case,
    Proteins 55, 383 (2004); GBn Mongan, Simmerling, McCammon, Case and Onufriev, J. Chem. Theory
    Comput. 3, 156 (2007); GBn2 Nguyen, Roe and Simmerling, J. Chem. Theory Comput. 9, 2020 (2013).

    U is the energy of solvation alone. Add the Coulomb energy of the solute, with the same charges,
    in a medium of permittivity ``solute``. Bonded pairs are summed too. Large systems with a cutoff
    take the pairs of a neighbour list, in time that is linear in the number of atoms. Without a
    cutoff, on a GPU and at constant pressure, the time grows with the square of this number. The
    surface term estimates the exposed area of an atom from its Born radius, as the ACE model does
    (Schaefer, Bartels and Karplus, J. Mol. Biol. 284, 835 (1998)) with the sixth power that Tinker
    and OpenMM use.

    Force and product of all pairs are closed forms, whose contributions are rounded in exact runs
    before they are added. Those of a list are derivatives, and functions of positions to the last
    bit. Two atoms at one position give NaN where the sphere of one contains the other. The force is
    continuous where spheres begin to touch; its derivative is not. With a cutoff the force jumps at
    it: use one only to reproduce such a run. A negative scale, as that of sulfur in GBn2, makes the
    force jump where the sphere begins to count.

    Args:
        {parameters}
        box: ``(dim,)`` lengths or ``(dim, dim)`` rows of a periodic cell, in which pairs are of
            nearest images.

    Raises:
        ValueError: arrays that are not one number for each atom, numbers out of range, a cutoff
            that the box is too small for, positions of another number of atoms.
    """

    charge: Tensor = declared("``(atoms,)``")
    radius: Tensor = declared("``(atoms,)``, intrinsic radius, larger than the offset")
    scale: Tensor = declared("``(atoms,)``, share of an atom's radius that displaces solvent")
    solute: Tensor = declared("permittivity inside, at least 1", 1.0, **ONE)
    solvent: Tensor = declared("permittivity outside, at least 1", 78.5, **ONE)
    constant: float = setting("see :class:`~adjsim.Coulomb`", FINITE, 1.0, keyword=True)
    offset: Tensor = declared(
        "length by which radii are reduced for the Born radii; the default is in angstrom",
        0.09,
        **ONE,
    )
    alpha: Tensor = declared("one number, or ``(atoms,)``", 1.0, keyword=True)
    beta: Tensor = declared("likewise", 0.8, keyword=True)
    gamma: Tensor = declared("likewise", 4.85, keyword=True)
    neck: Tensor = declared("weight of the necks", 0.0, **ONE)
    necks: Necks | None = setting(
        "a :class:`~.necks.Necks` for a neck that is not zero", _as_necks, None, keyword=True
    )
    bounded: bool = setting(
        "whether tanh bounds the displaced solvent; False: 1/B is 1/rho (1 - alpha psi + ...)",
        as_flag,
        True,
        keyword=True,
    )
    surface: Tensor = declared(
        "energy per area. OpenMM uses 2.25936 kJ/mol/nm^2, which is 2.34166e-4 eV per square "
        "angstrom",
        0.0,
        **ONE,
    )
    probe: float = setting(
        "radius of a solvent molecule; the default is in angstrom", NOT_NEGATIVE, 1.4, keyword=True
    )
    kappa: float = setting(
        "inverse screening length of a dissolved salt, 1/length", NOT_NEGATIVE, 0.0, keyword=True
    )
    cutoff: float | None = setting(
        "pairs beyond it neither displace solvent nor interact; None: all pairs. The interaction "
        "is shifted to zero there, as if f were the distance",
        Limits("positive and finite, or None for all pairs", POSITIVE.hold),
        None,
        keyword=True,
    )
    contained: bool = setting(
        "whether an atom inside of another one's sphere gets the term that makes H the integral "
        "there. OpenMM's ``GBSAOBCForce`` has it; its ``implicit/obc2.xml`` has not",
        as_flag,
        True,
        keyword=True,
    )

    def __init__(self, *values: Any, box: Array | None = None, **named: Any) -> None:
        given = self.given(values, named)
        super().__init__()
        self.store(given, partial(register, self))
        self.register_box(box)
        self.validate()

    def validate(self) -> None:
        """Refuse numbers that the constructor would refuse."""
        self.check_settings()
        super().validate()
        for name in ("solute", "solvent"):
            value: Tensor = getattr(self, name)
            if float(value.detach()) < 1:
                raise ValueError(
                    f"{name} must be at least 1, the permittivity of vacuum; got {describe(value)}."
                )
        shapes = [tuple(x.shape) for x in (self.charge, self.radius, self.scale)]
        if len(shapes[0]) != 1 or len(set(shapes)) > 1:
            raise ValueError(
                "charge, radius and scale must be (atoms,), one number for each atom; got shapes "
                f"{', '.join(map(str, shapes))}."
            )
        for name in SHAPE:
            shape = tuple(getattr(self, name).shape)
            if shape not in ((), shapes[0]):
                raise ValueError(
                    f"{name} must be one number, or one for each atom, {shapes[0]}; got the shape "
                    f"{shape}."
                )
        radius, offset = self.radius.detach(), float(self.offset.detach())
        if not bool((radius > offset).all()):
            atom = int(radius.argmin())
            raise ValueError(
                f"radius must be above the offset, {offset:g}; atom {atom} has "
                f"{float(radius[atom]):g}. In nanometres the offset is 0.009."
            )
        if self.necks is None:
            if self.neck.requires_grad or float(self.neck.detach()) != 0:
                raise ValueError(
                    "neck is the weight of necks: give their tables, necks=Necks(...)."
                )
        elif len(self.necks.depth) != len(radius):
            raise ValueError(
                f"necks are of {len(self.necks.depth)} atoms and radius of {len(radius)}."
            )

    def forward(self, position: Positions) -> Energies:
        if self.is_listed(position):
            return self._listed_energy(position)
        pairs = BornPairs(self, position)
        energy = pairs.within(pairs.polarisation.energy())
        polar = 0.5 * (pairs.charge.unsqueeze(-1) * pairs.charge * energy).sum((-1, -2))
        return polar + pairs.surface * pairs.areas().sum(-1)

    def virial(self, position: Positions) -> Tensor:
        """Compute ``sum over i<j of d_ij F_ij``, ``(*batch, dim, dim)``."""
        if self.is_listed(position):
            return virial_of(self._listed_energy, position)
        return BornPairs(self, position).virial()

    def born_radii(self, position: Positions) -> Tensor:
        """Compute the Born radii, ``(*batch, atoms)``."""
        if self.is_listed(position):
            return by_list.born_radii(self, Neighbours(self, position), self._given(position))
        return BornPairs(self, position).born.value

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        if self.is_listed(position):
            return derived_force(self, position, rounding)
        return BornPairs(self, position, rounding).force()

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        if self.is_listed(position):
            return energy_vjp(self, position, parameters, rounding)
        with torch.no_grad():
            pairs = BornPairs(self, position, rounding)
            value = pairs.force()

        def pullback(v: Tensor) -> tuple[Tensor, ParameterVJP]:
            names = self._trained()
            with torch.no_grad():
                along = BornTangent(pairs, v)
                product = along.force()
                if not names:
                    return product, list[Tensor | None]([None] * len(parameters))
                weights = along.weights(names)
            return product, DeferredVJP(self, self._numbers, weights, position.new_zeros(()))

        return value, pullback

    def _given(self, position: Tensor) -> dict[str, Tensor]:
        """Return all numbers, in the dtype of a position whose atoms they are of."""
        atoms = len(self.charge)
        if position.shape[-2] != atoms:
            raise ValueError(f"charge is for {atoms} atoms and position has {position.shape[-2]}.")
        return {name: getattr(self, name).to(position) for name in NUMBERS}

    def _listed_energy(self, position: Tensor, stretch: Tensor | None = None) -> Energies:
        near = Neighbours(self, position, stretch=stretch)
        return by_list.energy(self, near, self._given(position))

    def _trained(self) -> list[str]:
        return [name for name in NUMBERS if getattr(self, name).requires_grad]

    def _numbers(self, like: Tensor) -> Tensor:
        """Join all numbers that are trained, in the dtype of another tensor."""
        return torch.cat([getattr(self, name).to(like).reshape(-1) for name in self._trained()])
