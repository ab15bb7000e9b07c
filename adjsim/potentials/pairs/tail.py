"""Corrections for the interactions beyond a cutoff: at uniform density, and OpenMM's."""

from __future__ import annotations

import math
from functools import cache
from typing import cast

import numpy as np
import torch
from torch import Tensor

from adjsim.core.arguments import as_number, as_whole, describe_type
from adjsim.core.box import volume as volume_of
from adjsim.core.derived import derived
from adjsim.core.layout import is_tracing
from adjsim.core.rounding import UNROUNDED, UNROUNDED_BOTH, Rounding, Roundings
from adjsim.core.strain import Strain
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import Potential
from adjsim.potentials.pairs.base import PairPotential
from adjsim.potentials.pairs.formula import kind_of
from adjsim.potentials.pairs.kernels.kernel import ATOM, FUNCTION, NUMBER
from adjsim.potentials.pairs.noble import LennardJonesMixture
from adjsim.potentials.products import DeferredVJP, Tensors
from adjsim.potentials.strained import Forced, StrainedPullback

NODES = 200


def tail_corrections(potential: Potential, atoms: int, volume: float) -> tuple[Tensor, Tensor]:
    """Compute the energy and pressure of the pairs that a cutoff leaves out, at uniform density::

        energy   =  N^2/(2 V)   integral from a to infinity of 4 pi r^2 (u - v) dr
        pressure = -N^2/(6 V^2) integral from a to infinity of 4 pi r^3 d(u - v)/dr dr

    Here u is the energy of a pair without the cutoff, and v the energy with it, zero beyond it. The
    length a is the cutoff, or the start of :class:`~adjsim.potentials.Switched`. Shifts inside the
    cutoff are not restored. Do not use the corrections in a slab, a droplet or a crystal, whose
    density is not uniform, nor with a start inside the first shell of neighbours.

    Args:
        potential: a pair potential with a cutoff, or a sum of such potentials.
        atoms: N.
        volume: V, of a box in three dimensions.

    Returns:
        Two scalars, differentiable in the parameters of the potential. If a parameter has a number
        for each pair, u - v is averaged over all pairs of atoms.

    Raises:
        TypeError: a potential that is not a pair potential.
        ValueError: no cutoff, a switch from zero distance, an energy that does not fall faster than
            about 1/r^3.3, fewer than two atoms, or a volume that is not positive.
    """
    terms = potential.terms()
    if len(terms) > 1 or terms[0] is not potential:
        parts = [tail_corrections(cast(Potential, part), atoms, volume) for part in terms]
        energies, pressures = zip(*parts, strict=True)
        return torch.stack(energies).sum(), torch.stack(pressures).sum()
    if not isinstance(potential, PairPotential):
        raise TypeError(f"tail_corrections takes pair potentials; got {describe_type(potential)}.")
    if potential.cutoff is None:
        raise ValueError("tail_corrections takes a potential with a cutoff; this one has none.")
    atoms, volume = as_whole("atoms", atoms), as_number("volume", volume)
    if atoms < 2 or not 0 < volume < math.inf:
        raise ValueError(
            f"tail_corrections needs at least two atoms and a positive volume; got {atoms} and "
            f"{volume}."
        )
    if potential.box is not None and len(potential.box) != 3:
        raise ValueError(f"tail_corrections is for three dimensions; box has {len(potential.box)}.")
    begin = potential.truncation.begin(potential.cutoff)
    if not begin > 0:
        raise ValueError("tail_corrections needs a switch that starts at a positive distance.")
    if not is_tracing():
        _check_decay(potential, atoms, potential.cutoff)
    energy, pressure = _integrals(potential, atoms, potential.cutoff, math.inf)
    if begin < potential.cutoff:
        within = _integrals(potential, atoms, begin, potential.cutoff)
        energy, pressure = energy + within[0], pressure + within[1]
    density = atoms / volume
    return 0.5 * atoms * density * energy, -(density**2) / 6 * pressure


@cache
def quadrature(low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return distances and weights of an integral dr between two distances.

    Gauss-Legendre nodes in t, with r = low / t^4, make inverse powers smooth at infinity.
    """
    nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(NODES))
    bottom = (low / high) ** 0.25
    t = (1 - bottom) / 2 * nodes + (1 + bottom) / 2
    r = low / t**4
    return r, (1 - bottom) / 2 * weights * (4 * r / t)


def _integrals(
    potential: PairPotential, atoms: int, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Integrate 4 pi r^2 (u - v) and 4 pi r^3 d(u - v)/dr between two distances."""
    r, weight = quadrature(low, high)
    energy, slope = _means(potential, atoms, r, high < math.inf)
    shell = 4 * math.pi * r**2 * weight
    return (shell * energy).sum(), (shell * r * slope).sum()


def _check_decay(potential: PairPotential, atoms: int, cutoff: float) -> None:
    """Refuse an energy that falls like r^-3.25 or more slowly."""
    factors = torch.tensor([1e2, 1e8], dtype=torch.float64)
    near, far = _means(potential, atoms, factors * cutoff, False)[0].detach().abs() * factors**3
    if bool(far > 10**-1.5 * near):
        raise ValueError(
            f"the energy of {type(potential).__name__} does not fall faster than about 1/r^3.3, so "
            "the integral over its tail is infinite, or nearly so."
        )


def _means(
    potential: PairPotential, atoms: int, r: Tensor, truncated: bool
) -> tuple[Tensor, Tensor]:
    """Average u - v and its derivative at distances over all pairs of different atoms."""
    tables = {name: potential.pair_table(name) for name in potential.operand_names()}
    kinds, species = {kind_of(x) for x in tables.values()}, potential.species
    if species is None and kinds <= {NUMBER, FUNCTION}:
        return _missing(potential, r, truncated)
    if species is not None and len(species) == atoms and not kinds & {ATOM, FUNCTION}:
        # Pairs of two species are equal, so each is evaluated once.
        of_species = potential.with_operands(tables)
        size = max((len(x) for x in tables.values() if x.ndim == 2), default=1)
        count = torch.bincount(species, minlength=size).to(r)
        share = (count.unsqueeze(-1) * count - torch.diag(count)) / (atoms * (atoms - 1))
        found = _missing(of_species, r[:, None, None], truncated)
        energy, slope = ((x * share).sum((-1, -2)) for x in found)
        return energy, slope
    # One distance at a time, since a table has an entry for each pair.
    rows = zip(*(_missing(potential, x, truncated) for x in r.unbind(0)), strict=True)
    energy, slope = (torch.stack([_mean(x, atoms) for x in column]) for column in rows)
    return energy, slope


def _missing(potential: PairPotential, r: Tensor, truncated: bool) -> tuple[Tensor, Tensor]:
    """Compute u - v of pairs, and its derivative, at a distance; at several for equal pairs."""
    s = r * r
    energy, slope = potential.pair_energy(s), potential.pair_slope(s)
    if truncated:
        energy = energy - potential.truncated_energy(s)
        slope = slope - potential.truncated_slope(s)
    return energy, 2 * r * slope


def _mean(x: Tensor, atoms: int) -> Tensor:
    """Average over pairs of different atoms."""
    if x.numel() == 1:
        return x.reshape(())
    if x.shape != (atoms, atoms):
        raise ValueError(f"the potential is for {x.shape[-1]} atoms, and atoms is {atoms}.")
    return (x.sum() - x.diagonal().sum()) / (atoms * (atoms - 1))


class UniformCorrection(Potential):
    """Base class of energies that a cutoff leaves out, at uniform density: inverse to the volume.

    Such an energy gives no force, but a virial and gradients. Subclasses have the pairs that end at
    the cutoff, and the energy times the volume.
    """

    corrects_tail = True

    @property
    def pairs(self) -> PairPotential:
        """The pairs that end at the cutoff."""
        raise TypeError(f"{type(self).__name__} has no pairs.")

    def energy_times_volume(self) -> Tensor:
        """Compute the energy times the volume, a scalar that is differentiable in parameters."""
        raise TypeError(f"{type(self).__name__} has no energy_times_volume.")

    @property
    def cutoff(self) -> float:
        """The cutoff of the pairs."""
        assert self.pairs.cutoff is not None
        return self.pairs.cutoff

    @property
    def box(self) -> Tensor | None:
        """The box of the pairs."""
        return self.pairs.box

    def forward(self, position: Positions) -> Energies:
        assert self.pairs.box is not None
        energy = self.energy_times_volume() / volume_of(self.pairs.box)
        return energy.to(position).expand(position.shape[:-2])

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        return torch.zeros_like(position)

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        return self.forward(position) * _shrink(strain.value)

    def strained_force(
        self, position: Positions, strain: Strain, roundings: Roundings = UNROUNDED_BOTH
    ) -> Forced:
        along = 3 / strain.value.shape[-1] * self.strained_energy(position, strain)
        return torch.zeros_like(position), along[..., None, None].expand_as(strain.value)

    def strained_vjp(
        self,
        position: Positions,
        strain: Strain,
        parameters: Tensors,
        roundings: Roundings = UNROUNDED_BOTH,
    ) -> tuple[Forced, StrainedPullback]:
        with torch.no_grad():
            values = self.strained_force(position, strain)

        def pullback(v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, DeferredVJP]:
            along = 3 / c.shape[-1] * c.sum(-1, keepdim=True)
            weight = along[..., 0, 0] * _shrink(strain.value)
            deferred = DeferredVJP(self, self.forward, weight, position)
            return torch.zeros_like(v), -along * values[1], deferred

        return values, pullback

    def virial(self, position: Positions) -> Tensor:
        """Compute the energy times the unit matrix, since the energy is inverse to the volume."""
        unit = torch.eye(3, dtype=position.dtype, device=position.device)
        return self.forward(position)[..., None, None] * unit


class DispersionCorrection(UniformCorrection):
    """The Lennard-Jones energy that a cutoff leaves out, at uniform density, as OpenMM adds it::

        U = 2 pi N^2 / V  <4 epsilon (sigma^12 I_12 - sigma^6 I_6)>
        I_n = integral from 0 to infinity of (1 - S(r)) r^(2 - n) dr

    S is the share of the energy that the cutoff leaves: 1 within it, 0 beyond it, and a switch in
    between. The mean is over all pairs of atoms, an atom paired with itself included, which
    :func:`~adjsim.potentials.tail_corrections` leaves out. The energy gives no force, but a virial
    and a gradient with respect to epsilon and sigma.

    ``start`` is that of a :class:`~adjsim.potentials.pairs.truncation.SwitchedDistance`; None: no
    switch.
    """

    def __init__(self, lennard_jones: LennardJonesMixture, start: float | None = None) -> None:
        super().__init__()
        if lennard_jones.box is None or lennard_jones.cutoff is None:
            raise ValueError("the dispersion correction needs a box and a cutoff.")
        self.lennard_jones = lennard_jones
        self.start = None if start is None else as_number("start", start)
        self.validate()

    def validate(self) -> None:
        """Refuse a switch that begins beyond the cutoff."""
        if self.start is not None and not 0 < self.start <= self.cutoff:
            raise ValueError(
                f"start must be positive and at most the cutoff, {self.cutoff:g}; got "
                f"{self.start:g}."
            )

    @property
    def pairs(self) -> PairPotential:
        """The Lennard-Jones potential."""
        return self.lennard_jones

    @property
    def species(self) -> Tensor:
        """The species of the Lennard-Jones potential."""
        assert self.lennard_jones.species is not None
        return self.lennard_jones.species

    @property
    def kinds(self) -> int:
        """The number of species."""
        return len(self.lennard_jones.epsilon)

    @derived("species", "kinds")
    def share(self) -> Tensor:
        """The share of each two species in the pairs."""
        count = torch.bincount(self.species, minlength=self.kinds).double()
        atoms = count.sum()
        return (count.unsqueeze(-1) * count + torch.diag(count)) / (atoms * (atoms + 1))

    @derived("cutoff", "start")
    def integrals(self) -> tuple[float, float]:
        """The integrals I_12 and I_6."""
        begin = self.cutoff if self.start is None else self.start
        return _integral(12, begin, self.cutoff), _integral(6, begin, self.cutoff)

    def energy_times_volume(self) -> Tensor:
        epsilon, sigma = (self.lennard_jones.pair_table(name) for name in ("epsilon", "sigma"))
        sixth = sigma**6
        repulsion, attraction = self.integrals
        mean = 4 * epsilon * sixth * (sixth * repulsion - attraction)
        return 2 * math.pi * len(self.species) ** 2 * (self.share.to(mean) * mean).sum()


def _shrink(strain: Tensor) -> Tensor:
    """Compute the volume without strain over that at a strain, ``(*batch,)``."""
    return torch.exp(-3 / strain.shape[-1] * strain.sum(-1)).squeeze(-1)


def _integral(n: int, begin: float, cutoff: float) -> float:
    """Integrate (1 - S(r)) r^(2 - n) from the start of the switch to infinity."""
    beyond = cutoff ** (3 - n) / (n - 3)
    # The integrand is smooth within the switch, so that Gauss-Legendre nodes converge at once.
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    x = (1 + nodes) / 2
    r = begin + (cutoff - begin) * x
    missing = x**3 * (10 - 15 * x + 6 * x**2)
    return beyond + float((cutoff - begin) / 2 * (weights * missing * r ** (2.0 - n)).sum())
