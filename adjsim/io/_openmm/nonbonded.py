"""Charges, Lennard-Jones numbers and exceptions of an ``openmm.System``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.core.typing import Energies, Positions
from adjsim.io._openmm.library import COULOMB, LENGTH, box_of_system, forces, plain
from adjsim.io._openmm.particles import UNITS, Particles
from adjsim.io._openmm.types import Names, Types, grouped
from adjsim.potentials.base import Potential
from adjsim.potentials.bonded.pairs import ExplicitPairs, ScaledPairs
from adjsim.potentials.charges.coulomb import Coulomb, ReactionField
from adjsim.potentials.charges.ewald import Ewald, ParticleMeshEwald
from adjsim.potentials.charges.ewald.splitting import mesh_size, splitting
from adjsim.potentials.pairs.base import PairPotential
from adjsim.potentials.pairs.noble import LennardJonesMixture
from adjsim.potentials.pairs.tail import DispersionCorrection
from adjsim.potentials.pairs.truncation import SwitchedDistance, Truncation, Unshifted

METHODS = ("NoCutoff", "CutoffNonPeriodic", "CutoffPeriodic", "Ewald", "PME", "LJPME")
ORDER = 5
"""The order of OpenMM's splines."""


class UncorrectedReactionField(ReactionField):
    """A reaction field without the energy of each charge in its own field, as in OpenMM."""

    def forward(self, position: Positions) -> Energies:
        return PairPotential.forward(self, position)


def read_nonbonded(system: Any, names: Names) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Read the NonbondedForce of a system: its parts, and the labels of their types.

    Raises:
        ValueError: LJPME, parameter offsets, a method without direct space, an epsilon with sigma
            zero.
    """
    found = forces(system, "NonbondedForce")
    if not found:
        return {}, {}
    force = found[0]
    _check(force)
    particles = Particles.of(force)
    box = box_of_system(system) if force.usesPeriodicBoundaryConditions() else None
    parts: dict[str, Any] = {}
    labels: dict[str, tuple[str, ...]] = {}
    exclusions = torch.from_numpy(particles.pairs) if len(particles.pairs) else None
    if particles.epsilon.any():
        species, lennard_jones = _lennard_jones(force, particles, names, box, exclusions)
        parts["lennard_jones"], labels["lennard_jones"] = lennard_jones, species.labels
    if particles.charge.any():
        charge = nn.Parameter(torch.from_numpy(particles.charge.copy()))
        parts["coulomb"] = _coulomb(force, charge, box, exclusions)
    # Exceptions are not cut off, and are to the nearest image only where the force says so.
    near = box if force.getExceptionsUsePeriodicBoundaryConditions() else None
    parts.update(_pairs(particles, parts, labels, names, near))
    lennard_jones = parts.get("lennard_jones")
    if (
        isinstance(lennard_jones, LennardJonesMixture)
        and box is not None
        and force.getUseDispersionCorrection()
    ):
        parts["dispersion"] = DispersionCorrection(lennard_jones, _start(force))
    return parts, labels


def _check(force: Any) -> None:
    method = METHODS[force.getNonbondedMethod()]
    if method == "LJPME":
        raise ValueError(
            "NonbondedForce uses LJPME, which is not provided: take PME, or CutoffPeriodic."
        )
    if force.getNumParticleParameterOffsets() or force.getNumExceptionParameterOffsets():
        raise ValueError(
            "NonbondedForce has parameter offsets, which are not provided: set the parameters of "
            "its particles and exceptions to the numbers of the run, and leave the offsets out."
        )
    if not force.getIncludeDirectSpace():
        raise ValueError(
            "NonbondedForce leaves direct space out: call setIncludeDirectSpace(True)."
        )


def _cutoff(force: Any) -> float | None:
    if METHODS[force.getNonbondedMethod()] == "NoCutoff":
        return None
    return LENGTH * plain(force.getCutoffDistance())


def _start(force: Any) -> float | None:
    """Return where the switch of the Lennard-Jones energy begins; None: it has none."""
    if _cutoff(force) is None or not force.getUseSwitchingFunction():
        return None
    return LENGTH * plain(force.getSwitchingDistance())


def _lennard_jones(
    force: Any,
    particles: Particles,
    names: Names,
    box: np.ndarray | None,
    exclusions: Tensor | None,
) -> tuple[Types, LennardJonesMixture]:
    bad = np.flatnonzero((particles.epsilon != 0) & (particles.sigma <= 0))
    if len(bad):
        raise ValueError(
            f"particle {bad[0]} has epsilon {particles.epsilon[bad[0]]:g} eV with sigma "
            f"{particles.sigma[bad[0]]:g} angstrom: set a positive sigma, or epsilon to zero."
        )
    # The sigma of an atom without a well has no effect; zero would not be a length.
    sigma = np.where((particles.epsilon == 0) & (particles.sigma <= 0), 1.0, particles.sigma)
    numbers = np.stack([particles.epsilon, sigma], 1)
    known = names.names is not None
    patterns = list(names.symbols) if known else [None] * len(numbers)
    species = grouped([[k] for k in range(len(numbers))], numbers, patterns, names)
    assert species.index is not None
    cutoff, start = _cutoff(force), _start(force)
    options: dict[str, Any] = {}
    if cutoff is not None:
        truncation: Truncation = Unshifted() if start is None else SwitchedDistance(start)
        options = {"cutoff": cutoff, "truncation": truncation, "box": box}
    return species, LennardJonesMixture(
        species.index,
        species.parameter(0),
        species.parameter(1),
        exclusions=exclusions,
        **options,
    )


def _coulomb(
    force: Any, charge: nn.Parameter, box: np.ndarray | None, exclusions: Tensor | None
) -> Potential:
    method, cutoff = METHODS[force.getNonbondedMethod()], _cutoff(force)
    if cutoff is None:
        return Coulomb(charge, COULOMB, exclusions=exclusions)
    if method.startswith("Cutoff"):
        permittivity = float(force.getReactionFieldDielectric())
        return UncorrectedReactionField(
            charge, permittivity, COULOMB, cutoff=cutoff, box=box, exclusions=exclusions
        )
    assert box is not None
    common: dict[str, Any] = {
        "box": box,
        "cutoff": cutoff,
        "exclusions": exclusions,
        "constant": COULOMB,
    }
    tolerance = float(force.getEwaldErrorTolerance())
    if method == "Ewald":
        return Ewald(charge, tolerance=tolerance, **common)
    alpha, *mesh = [plain(x) for x in force.getPMEParameters()]
    if alpha > 0:
        return ParticleMeshEwald(charge, alpha=alpha / LENGTH, grid=mesh, **common)
    # OpenMM counts the points along the axes, not along the rows of a tilted box.
    alpha, sides = splitting(None, cutoff, tolerance), np.diag(box) if box.ndim == 2 else box
    mesh = mesh_size(alpha, sides.tolist(), tolerance, ORDER)
    return ParticleMeshEwald(charge, alpha=alpha, grid=mesh, order=ORDER, **common)


def _pairs(
    particles: Particles,
    parts: dict[str, Any],
    labels: dict[str, tuple[str, ...]],
    names: Names,
    box: np.ndarray | None,
) -> dict[str, Potential]:
    """Make the parts of the exceptions that are not exclusions."""
    at = particles.interacting
    if not at.any():
        return {}
    index = torch.from_numpy(particles.pairs[at])
    scales = particles.scales()
    if scales is None:
        return {"pairs_14": _explicit(particles, labels, names, index, box)}
    charges, depths = scales
    found: dict[str, Potential] = {}
    if depths:
        mixture = parts["lennard_jones"]
        bare = LennardJonesMixture(mixture.species, mixture.epsilon, mixture.sigma, box=box)
        found["lennard_jones_14"] = ScaledPairs(bare, index, _scalar(depths))
    if charges:
        charge = parts["coulomb"].charge
        bare = Coulomb(charge, COULOMB, box=box)
        found["coulomb_14"] = ScaledPairs(bare, index, _scalar(charges))
    return found


def _explicit(
    particles: Particles,
    labels: dict[str, tuple[str, ...]],
    names: Names,
    index: Tensor,
    box: np.ndarray | None,
) -> ExplicitPairs:
    at = particles.interacting
    sigma = np.where(particles.pair_epsilon == 0, 1.0, particles.pair_sigma)
    numbers = np.stack([particles.pair_epsilon, sigma, particles.product], 1)[at]
    atoms = index.tolist()
    if names.names is None:
        types = Types(numbers, None, tuple(map(names.label, atoms)))
    else:
        types = grouped(atoms, numbers, [names.pattern(pair) for pair in atoms], names)
    labels["pairs_14"] = types.labels
    epsilon, length, product = map(types.parameter, range(3))
    return ExplicitPairs(
        index, epsilon, length, product, constant=COULOMB, types=types.index, box=box
    )


def _scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def write_nonbonded(parts: dict[str, Any], system: Any) -> None:
    """Write charges, Lennard-Jones numbers and 1-4 pairs into the NonbondedForce of a system.

    Raises:
        ValueError: the system has no NonbondedForce, or another number of atoms or exceptions.
    """
    mine = ("lennard_jones", "coulomb", "pairs_14")
    found = forces(system, "NonbondedForce")
    if not found:
        if any(name in parts for name in mine):
            raise ValueError("the potential has nonbonded parts and the system no NonbondedForce.")
        return
    force = found[0]
    before = Particles.of(force)
    charge, epsilon, sigma = before.charge, before.epsilon, before.sigma
    if "coulomb" in parts:
        charge = _array(parts["coulomb"].charge)
    mixture = parts.get("lennard_jones")
    if isinstance(mixture, LennardJonesMixture):
        assert mixture.species is not None
        species = mixture.species.cpu().numpy()
        epsilon, sigma = _array(mixture.epsilon)[species], _array(mixture.sigma)[species]
    if not len(charge) == len(epsilon) == len(before.charge):
        raise ValueError(
            f"the potential is for {len(charge)} atoms and the system has {len(before.charge)}: "
            "give the system that the potential was read from."
        )
    for k, row in enumerate((np.stack([charge, sigma, epsilon], 1) / UNITS).tolist()):
        force.setParticleParameters(k, *row)
    at = before.interacting
    i, j = before.pairs.T
    product, length, depth = before.product, before.pair_sigma, before.pair_epsilon
    for name in ("lennard_jones_14", "coulomb_14", "pairs_14"):
        if name in parts and parts[name].index.tolist() != before.pairs[at].tolist():
            raise ValueError(
                f"the exceptions of the system are not the pairs of {name!r} in the potential: "
                "give the system that the potential was read from."
            )
    if "coulomb_14" in parts:
        product = np.where(at, _array(parts["coulomb_14"].scale) * charge[i] * charge[j], product)
    if "lennard_jones_14" in parts:
        scale = _array(parts["lennard_jones_14"].scale)
        depth = np.where(at, scale * np.sqrt(epsilon[i] * epsilon[j]), depth)
        length = np.where(at, (sigma[i] + sigma[j]) / 2, length)
    if "pairs_14" in parts:
        pairs = parts["pairs_14"]
        product, length, depth = product.copy(), length.copy(), depth.copy()
        for values, name in ((product, "product"), (length, "sigma"), (depth, "epsilon")):
            value: Tensor = getattr(pairs, name)
            values[at] = _array(value if pairs.types is None else value[pairs.types])
    rows = (np.stack([product, length, depth], 1) / UNITS).tolist()
    for k in np.flatnonzero(at).tolist():
        force.setExceptionParameters(k, int(i[k]), int(j[k]), *rows[k])


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().double().numpy()
