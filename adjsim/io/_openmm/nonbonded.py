"""Charges, Lennard-Jones numbers and exceptions of an ``openmm.System``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.core.typing import Energies, Positions
from adjsim.io._openmm.library import (
    COULOMB,
    ENERGY,
    LENGTH,
    box_of_system,
    cutoff_of,
    forces,
    particles_of,
    plain,
    table,
)
from adjsim.io._openmm.offsets import Offsets, without_offsets, write_numbers
from adjsim.io._openmm.types import Names, Types, grouped, types_of
from adjsim.potentials.base import Potential
from adjsim.potentials.bonded.pairs import ExplicitPairs, ScaledPairs
from adjsim.potentials.charges.coulomb import Coulomb, ReactionField
from adjsim.potentials.charges.ewald import Ewald, LennardJonesMesh, ParticleMeshEwald
from adjsim.potentials.charges.ewald.base import splitting
from adjsim.potentials.charges.ewald.particle_mesh import mesh_size
from adjsim.potentials.pairs.base import PairPotential
from adjsim.potentials.pairs.noble import LennardJonesMixture
from adjsim.potentials.pairs.tail import DispersionCorrection
from adjsim.potentials.pairs.truncation import SwitchedDistance, Truncation, Unshifted

UNITS = np.array([1.0, LENGTH, ENERGY])
"""Our units of a charge, sigma and epsilon in OpenMM's."""
SAME = 1e-9
"""The relative difference of a 1-4 pair from its combination that rounding makes."""
METHODS = ("NoCutoff", "CutoffNonPeriodic", "CutoffPeriodic", "Ewald", "PME", "LJPME")
ORDER = 5
"""The order of OpenMM's splines."""


class Particles(NamedTuple):
    """The numbers of a NonbondedForce, in our units: of atoms, and of exceptions ``pairs``."""

    charge: np.ndarray
    sigma: np.ndarray
    epsilon: np.ndarray
    pairs: np.ndarray
    product: np.ndarray
    pair_sigma: np.ndarray
    pair_epsilon: np.ndarray
    offsets: Offsets

    @classmethod
    def of(cls, force: Any, shared: dict[str, nn.Parameter]) -> Particles:
        """Read the numbers of a force, without the offsets."""
        rows = table(force.getExceptionParameters, force.getNumExceptions()).reshape(-1, 5)
        pairs, values = rows[:, :2].astype(np.int64), rows[:, 2:]
        charge, sigma, epsilon = (particles_of(force) * UNITS).T
        product, pair_sigma, pair_epsilon = (values * UNITS).T
        offsets = Offsets.of(force, shared)
        return cls(charge, sigma, epsilon, pairs, product, pair_sigma, pair_epsilon, offsets)

    @property
    def interacting(self) -> np.ndarray:
        """Which exceptions are pairs with numbers of their own, and no exclusions."""
        return (self.product != 0) | (self.pair_epsilon != 0) | self.offsets.pairs.any((0, 2))

    def with_offsets(self) -> Particles:
        """Return the numbers with the present offsets."""
        particles = np.stack([self.charge, self.sigma, self.epsilon], 1)
        pairs = np.stack([self.product, self.pair_sigma, self.pair_epsilon], 1)
        charge, sigma, epsilon = self.offsets.added(particles, self.offsets.particles).T
        product, pair_sigma, pair_epsilon = self.offsets.added(pairs, self.offsets.pairs).T
        return Particles(
            *(charge, sigma, epsilon, self.pairs, product, pair_sigma, pair_epsilon), self.offsets
        )

    def with_lengths(self) -> Particles:
        """Return the numbers with a length as the sigma of atoms and pairs without a well.

        Such a sigma has no effect. A well that is zero now may have an offset.
        """
        offsets = self.offsets
        wells = (self.epsilon != 0) | offsets.particles[..., 2].any(0)
        pair_wells = (self.pair_epsilon != 0) | offsets.pairs[..., 2].any(0)
        return self._replace(
            sigma=np.where(wells | (self.sigma > 0), self.sigma, 1.0),
            pair_sigma=np.where(pair_wells, self.pair_sigma, 1.0),
        )

    def scales(self) -> tuple[float, float] | None:
        """Return the factors of all 1-4 pairs, of charges and of epsilon, if there are any.

        None: the numbers of a pair are not those of its atoms times one factor.
        """
        if self.offsets.numbers:
            return None
        at = self.interacting
        i, j = self.pairs[at].T
        charges = _factor(self.product[at], self.charge[i] * self.charge[j])
        depths = _factor(self.pair_epsilon[at], np.sqrt(self.epsilon[i] * self.epsilon[j]))
        matters = self.pair_epsilon[at] != 0
        difference = self.pair_sigma[at] - (self.sigma[i] + self.sigma[j]) / 2
        same = np.abs(difference[matters]) <= SAME * self.pair_sigma[at][matters]
        if charges is None or depths is None or not same.all():
            return None
        return charges, depths


def _factor(found: np.ndarray, combined: np.ndarray) -> float | None:
    """Return the one factor between two arrays, zero if all are zero, None if there is none."""
    if not found.any():
        return 0.0
    largest = int(np.abs(combined).argmax())
    if combined[largest] == 0:
        return None
    factor = float(found[largest] / combined[largest])
    same = np.abs(found - factor * combined) <= SAME * np.abs(found)
    return factor if same.all() else None


class UncorrectedReactionField(ReactionField):
    """A reaction field without the energy of each charge in its own field, as in OpenMM."""

    def forward(self, position: Positions) -> Energies:
        return PairPotential.forward(self, position)


def read_nonbonded(
    system: Any, names: Names, shared: dict[str, nn.Parameter]
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]], dict[str, nn.Parameter]]:
    """Read the NonbondedForce of a system.

    Returns:
        Its parts, the labels of their types, and the global numbers of its offsets.
    """
    found = forces(system, "NonbondedForce")
    if not found:
        return {}, {}, {}
    force = found[0]
    _check(force)
    base = Particles.of(force, shared).with_lengths()
    particles, offsets = base.with_offsets(), base.offsets
    box = box_of_system(system) if force.usesPeriodicBoundaryConditions() else None
    parts: dict[str, Any] = {}
    labels: dict[str, tuple[str, ...]] = {}
    exclusions = torch.from_numpy(particles.pairs) if len(particles.pairs) else None
    options: dict[str, Any] = {"exclusions": exclusions}
    if cutoff_of(force) is not None:
        options |= {"cutoff": cutoff_of(force), "box": box}
    mixture = None
    if particles.epsilon.any() or offsets.particles[..., 2].any():
        species, mixture = _lennard_jones(force, base, names, options)
        parts["lennard_jones"], labels["lennard_jones"] = mixture, species.labels
    if particles.charge.any() or offsets.particles[..., 0].any():
        parts["coulomb"] = _coulomb(force, particles, options)
        offsets.register(parts["coulomb"], "charge", base.charge, offsets.particles[..., 0])
    # Exceptions are not cut off, and are to the nearest image only where the force says so.
    near = box if force.getExceptionsUsePeriodicBoundaryConditions() else None
    parts.update(_pairs(base, parts, labels, names, near))
    corrected = force.getUseDispersionCorrection() and not _is_mesh(force)
    if mixture is not None and box is not None and corrected:
        parts["dispersion"] = DispersionCorrection(mixture, _start(force))
    return parts, labels, offsets.numbers


def _check(force: Any) -> None:
    method = METHODS[force.getNonbondedMethod()]
    if method == "LJPME" and force.getUseSwitchingFunction():
        raise ValueError(
            "NonbondedForce uses LJPME with a switch, whose forces are not the derivatives of its "
            "energy in OpenMM: call setUseSwitchingFunction(False)."
        )
    if not force.getIncludeDirectSpace():
        raise ValueError(
            "NonbondedForce leaves direct space out: call setIncludeDirectSpace(True)."
        )


def _start(force: Any) -> float | None:
    """Return where the switch of the Lennard-Jones energy begins; None: it has none."""
    switched = cutoff_of(force) is not None and force.getUseSwitchingFunction()
    return LENGTH * plain(force.getSwitchingDistance()) if switched else None


def _lennard_jones(
    force: Any, base: Particles, names: Names, options: dict[str, Any]
) -> tuple[Types, Any]:
    particles, scales = base.with_offsets(), base.offsets.particles[..., 1:]
    bad = np.flatnonzero(particles.sigma <= 0)
    if len(bad):
        raise ValueError(
            f"particle {bad[0]} has epsilon {particles.epsilon[bad[0]]:g} eV with sigma "
            f"{particles.sigma[bad[0]]:g} angstrom: set a positive sigma, or epsilon and its "
            "offsets to zero."
        )
    numbers = np.stack([particles.epsilon, particles.sigma], 1)
    # Atoms of a species have the same offsets.
    symbols = [None] * len(numbers) if names.names is None else names.symbols
    rows = [(*scales[:, k].flat, base.epsilon[k], base.sigma[k]) for k in range(len(numbers))]
    patterns = list(zip(symbols, rows, strict=True)) if scales.any() else symbols
    species = grouped([[k] for k in range(len(numbers))], numbers, patterns, names)
    assert species.index is not None
    start = _start(force)
    numbers = species.index, species.parameter(0), species.parameter(1)
    if _is_mesh(force):
        # Half as many points as for charges.
        mesh = _mesh(force, force.getLJPMEParameters(), options, 0.5)
        return species, _followed(LennardJonesMesh(*numbers, **options, **mesh), species, base)
    if "cutoff" in options:
        truncation: Truncation = Unshifted() if start is None else SwitchedDistance(start)
        options = {**options, "truncation": truncation}
    mixture = LennardJonesMixture(*numbers, **options)
    return species, _followed(mixture, species, base)


def _followed(mixture: Any, species: Types, base: Particles) -> Any:
    """Return a mixture whose wells follow the global numbers of the offsets."""
    assert species.index is not None
    firsts = np.unique(species.index.numpy(), return_index=True)[1]
    scales = base.offsets.particles[:, firsts, 1:]
    base.offsets.register(mixture, "epsilon", base.epsilon[firsts], scales[..., 1])
    base.offsets.register(mixture, "sigma", base.sigma[firsts], scales[..., 0])
    return mixture


def _is_mesh(force: Any) -> bool:
    """Whether the dispersion has a mesh."""
    return METHODS[force.getNonbondedMethod()] == "LJPME"


def _mesh(force: Any, given: Any, options: dict[str, Any], share: float = 1.0) -> dict[str, Any]:
    """Return alpha and the mesh that are given, or that OpenMM chooses."""
    alpha, *mesh = map(plain, given)
    if alpha > 0:
        return {"alpha": alpha / LENGTH, "grid": mesh}
    # OpenMM counts the points along the axes, not along the rows of a tilted box.
    box, tolerance = options["box"], float(force.getEwaldErrorTolerance())
    alpha, sides = splitting(options["cutoff"], tolerance), np.diag(box) if box.ndim == 2 else box
    mesh = mesh_size(alpha, (share * sides).tolist(), tolerance, ORDER)
    return {"alpha": alpha, "grid": mesh, "order": ORDER}


def _coulomb(force: Any, particles: Particles, options: dict[str, Any]) -> Potential:
    charge = nn.Parameter(torch.from_numpy(particles.charge.copy()))
    method = METHODS[force.getNonbondedMethod()]
    if "cutoff" not in options:
        return Coulomb(charge, COULOMB, **options)
    if method.startswith("Cutoff"):
        permittivity = float(force.getReactionFieldDielectric())
        return UncorrectedReactionField(charge, permittivity, COULOMB, **options)
    common: dict[str, Any] = {**options, "constant": COULOMB}
    if method == "Ewald":
        return Ewald(charge, tolerance=float(force.getEwaldErrorTolerance()), **common)
    return ParticleMeshEwald(charge, **common, **_mesh(force, force.getPMEParameters(), options))


def _pairs(
    base: Particles,
    parts: dict[str, Any],
    labels: dict[str, tuple[str, ...]],
    names: Names,
    box: np.ndarray | None,
) -> dict[str, Potential]:
    """Make the parts of the exceptions that are not exclusions."""
    particles, at = base.with_offsets(), base.interacting
    if not at.any():
        return {}
    index, scales = torch.from_numpy(particles.pairs[at]), particles.scales()
    if scales is None:
        columns = particles.pair_epsilon, particles.pair_sigma, particles.product
        numbers = np.stack(columns, 1)[at]
        # Offsets are those of pairs, so pairs with offsets have no types.
        offsets, each = base.offsets, base.offsets.pairs[:, at]
        terms = index.tolist()
        types = types_of(terms, numbers, names)
        if each.any():
            types = Types(numbers, None, tuple(map(names.label, terms)))
        labels["pairs_14"] = types.labels
        columns = map(types.parameter, range(3))
        pairs = ExplicitPairs(index, *columns, constant=COULOMB, types=types.index, box=box)
        offsets.register(pairs, "epsilon", base.pair_epsilon[at], each[..., 2])
        offsets.register(pairs, "sigma", base.pair_sigma[at], each[..., 1])
        offsets.register(pairs, "product", base.product[at], each[..., 0])
        return {"pairs_14": pairs}
    charges, depths = scales
    found: dict[str, Potential] = {}
    if depths:
        mixture = parts["lennard_jones"]
        bare = LennardJonesMixture(mixture.species, mixture.epsilon, mixture.sigma, box=box)
        found["lennard_jones_14"] = ScaledPairs(bare, index, _scalar(depths))
    if charges:
        bare = Coulomb(parts["coulomb"].charge, COULOMB, box=box)
        found["coulomb_14"] = ScaledPairs(bare, index, _scalar(charges))
    return found


def _scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def write_nonbonded(parts: dict[str, Any], system: Any) -> None:
    """Write charges, Lennard-Jones numbers and 1-4 pairs into the NonbondedForce of a system."""
    found = forces(system, "NonbondedForce")
    if not found:
        if any(name in parts for name in ("lennard_jones", "coulomb", "pairs_14")):
            raise ValueError("the potential has nonbonded parts and the system no NonbondedForce.")
        return
    force = found[0]
    before = Particles.of(force, {})
    charge, epsilon, sigma = before.charge, before.epsilon, before.sigma
    if "coulomb" in parts:
        charge = _array(without_offsets(parts["coulomb"], "charge"))
    if "lennard_jones" in parts:
        mixture = parts["lennard_jones"]
        epsilon, sigma = (
            _array(without_offsets(mixture, name)[mixture.species]) for name in ("epsilon", "sigma")
        )
    if not len(charge) == len(epsilon) == len(before.charge):
        raise ValueError(
            f"the potential is for {len(charge)} atoms and the system has {len(before.charge)}: "
            "give the system that the potential was read from."
        )
    for k, row in enumerate((np.stack([charge, sigma, epsilon], 1) / UNITS).tolist()):
        force.setParticleParameters(k, *row)
    at = before.interacting
    i, j = before.pairs[at].T
    product, length, depth = before.product[at], before.pair_sigma[at], before.pair_epsilon[at]
    for name in ("lennard_jones_14", "coulomb_14", "pairs_14"):
        if name in parts and parts[name].index.tolist() != before.pairs[at].tolist():
            raise ValueError(
                f"the exceptions of the system are not the pairs of {name!r} in the potential: "
                "give the system that the potential was read from."
            )
    if "coulomb_14" in parts:
        product = _array(parts["coulomb_14"].scale) * charge[i] * charge[j]
    if "lennard_jones_14" in parts:
        depth = _array(parts["lennard_jones_14"].scale) * np.sqrt(epsilon[i] * epsilon[j])
        length = (sigma[i] + sigma[j]) / 2
    if "pairs_14" in parts:
        pairs = parts["pairs_14"]
        types = slice(None) if pairs.types is None else pairs.types
        product, length, depth = (
            _array(without_offsets(pairs, name)[types]) for name in ("product", "sigma", "epsilon")
        )
    write_numbers(parts, force)
    rows = (np.stack([product, length, depth], 1) / UNITS).tolist()
    for k, first, second, row in zip(np.flatnonzero(at).tolist(), i, j, rows, strict=True):
        force.setExceptionParameters(k, int(first), int(second), *row)


def _array(value: Tensor) -> np.ndarray:
    return value.detach().cpu().double().numpy()
