"""Generalised Born solvent of an ``openmm.System``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.io._openmm.library import COULOMB, ENERGY, LENGTH, forces, plain
from adjsim.potentials.solvent import GeneralizedBorn

NUMBER = r"([0-9.]+(?:e[+-]?[0-9]+)?)"
OFFSET = 0.009
"""The nanometres by which OpenMM reduces radii."""
DESCREENING = (
    "select(step(r+sr2-or1),0.5*(1/L-1/U+0.25*(r-sr2^2/r)*(1/(U^2)-1/(L^2))+0.5*log(L/U)/r),0);"
    "U=r+sr2;L=max(or1,D);D=abs(r-sr2)"
)
BORN_RADIUS = (
    "1/(1/or-tanh(psi-0.8*psi^2+4.85*psi^3)/radius);psi=I*or;radius=or+offset;offset=0.009"
)
OWN = r"-0\.5\*N\*\(1/soluteDielectric-(E)/solventDielectric\)\*charge\^2/B"
SURFACE = r"N\*\(radius\+0\.14\)\^2\*\(radius/B\)\^6;radius=or\+offset"
PAIR = (
    r"-N\*\(1/soluteDielectric-(E)/solventDielectric\)\*charge1\*charge2"
    r"(?:/f|\*\(1/f-N\));f=sqrt\(r\^2\+B1\*B2\*exp\(-r\^2/\(4\*B1\*B2\)\)\)"
)


@dataclass(frozen=True)
class Solvent:
    """The numbers of a generalised Born force, in our units.

    Args:
        charge, radius, scale: ``(atoms,)``.
        settings: of :class:`~adjsim.GeneralizedBorn`.
    """

    charge: np.ndarray
    radius: np.ndarray
    scale: np.ndarray
    settings: dict[str, Any]


def read_solvent(system: Any, charge: Tensor | None) -> GeneralizedBorn | None:
    """Read the generalised Born force of a system.

    Args:
        system: the system.
        charge: the parameter with the charges of the other forces. The solvent shares it if its
            charges are the same, so that a fit moves both.

    Raises:
        ValueError: a CustomGBForce that is not the one of ``implicit/obc2.xml``, a periodic cutoff.
    """
    found = forces(system, "GBSAOBCForce", "CustomGBForce")
    if not found:
        return None
    force = found[0]
    if force.usesPeriodicBoundaryConditions():
        raise ValueError(
            f"{type(force).__name__} has a periodic cutoff, which is not provided: make the system "
            "with NoCutoff or CutoffNonPeriodic."
        )
    solvent = _of_custom(force) if hasattr(force, "getNumEnergyTerms") else _of_obc(force)
    own = torch.from_numpy(solvent.charge.copy())
    if charge is None or not torch.equal(charge.detach(), own):
        charge = nn.Parameter(own)
    radius, scale = (nn.Parameter(torch.from_numpy(x)) for x in (solvent.radius, solvent.scale))
    surface = nn.Parameter(torch.tensor(solvent.settings.pop("surface"), dtype=torch.float64))
    return GeneralizedBorn(charge, radius, scale, surface=surface, **solvent.settings)


def write_solvent(part: nn.Module | None, system: Any) -> None:
    """Write charges, radii, scales and surface tension into the force of a system.

    Raises:
        ValueError: one of the two has a solvent and the other has none, other numbers of atoms, a
            surface tension that has changed in a CustomGBForce, whose expressions hold it.
    """
    found = forces(system, "GBSAOBCForce", "CustomGBForce")
    if (part is None) != (not found):
        raise ValueError(
            "one of the potential and the system has an implicit solvent and the other has none: "
            "give the system that the potential was read from."
        )
    if not isinstance(part, GeneralizedBorn):
        return
    force = found[0]
    if len(part.charge) != force.getNumParticles():
        raise ValueError(
            f"the solvent is for {len(part.charge)} atoms and the system has "
            f"{force.getNumParticles()}."
        )
    charge, radius, scale = (
        x.detach().cpu().double() for x in (part.charge, part.radius, part.scale)
    )
    surface = float(part.surface.detach())
    if hasattr(force, "getNumEnergyTerms"):
        before = _of_custom(force).settings["surface"]
        if abs(surface - before) > 1e-12 * abs(before):
            raise ValueError(
                "the surface tension was changed, which a CustomGBForce holds as a number in its "
                "expressions: make the system with GBSAOBCForce to write it back."
            )
        small = radius / LENGTH - OFFSET
        named = {"charge": charge, "or": small, "sr": scale * small}
        rows = torch.stack([named[name] for name in _names(force)], 1).tolist()
        for k, row in enumerate(rows):
            force.setParticleParameters(k, row)
        return
    force.setSurfaceAreaEnergy(surface / ENERGY * LENGTH**2)
    for k, row in enumerate(torch.stack([charge, radius / LENGTH, scale], 1).tolist()):
        force.setParticleParameters(k, *row)


def _of_obc(force: Any) -> Solvent:
    rows = [
        [plain(x) for x in force.getParticleParameters(k)] for k in range(force.getNumParticles())
    ]
    charge, radius, scale = np.array(rows, dtype=np.float64).T.copy()
    settings = {
        "solute": float(force.getSoluteDielectric()),
        "solvent": float(force.getSolventDielectric()),
        "surface": plain(force.getSurfaceAreaEnergy()) * ENERGY / LENGTH**2,
        "constant": COULOMB,
        "cutoff": _cutoff(force),
        "contained": True,
    }
    return Solvent(charge, LENGTH * radius, scale, settings)


def _of_custom(force: Any) -> Solvent:
    """Read a CustomGBForce whose expressions are those of OpenMM's OBC2.

    Its formula of the descreening leaves out the term of an atom inside another one.
    """
    values = [force.getComputedValueParameters(k) for k in range(force.getNumComputedValues())]
    known = [
        ("I", DESCREENING, force.ParticlePairNoExclusions),
        ("B", BORN_RADIUS, force.SingleParticle),
    ]
    found = [(name, _without_spaces(text), kind) for name, text, kind in values]
    plainly = (
        force.getNumGlobalParameters()
        + force.getNumExclusions()
        + force.getNumTabulatedFunctions()
        + force.getNumFunctions()
        == 0
    )
    if found != known or sorted(_names(force)) != ["charge", "or", "sr"] or not plainly:
        raise _unknown("its Born radii are not those of OBC2")
    settings = _settings(force)
    rows = [list(force.getParticleParameters(k)) for k in range(force.getNumParticles())]
    columns = dict(zip(_names(force), np.array(rows, dtype=np.float64).T, strict=True))
    small = columns["or"]
    return Solvent(
        columns["charge"].copy(), LENGTH * (small + OFFSET), columns["sr"] / small, settings
    )


def _settings(force: Any) -> dict[str, Any]:
    """Read the settings from the expressions of the energy."""
    found: dict[str, re.Match[str]] = {}
    constants: dict[str, float] = {}
    formulas = {
        "own": (OWN, force.SingleParticle),
        "surface": (SURFACE, force.SingleParticle),
        "pair": (PAIR, force.ParticlePairNoExclusions),
    }
    for k in range(force.getNumEnergyTerms()):
        text, kind = force.getEnergyTermParameters(k)
        body, constants = _split(_without_spaces(text))
        for name, (formula, wanted) in formulas.items():
            match = _match(formula, body)
            if match and kind == wanted and name not in found:
                found[name] = match
                break
        else:
            raise _unknown(f"it has the term {body!r}")
    if not {"own", "pair"} <= set(found) or found["own"][1] != found["pair"][1]:
        raise _unknown("it has no term of pairs or no term of single particles")
    salted = constants["kappa"] > 0
    if any((found[name][2] != "1") != salted for name in ("own", "pair")):
        raise _unknown("its terms have different kappa")
    cutoff, inverse = _cutoff(force), found["pair"][3]
    if (cutoff is None) != (inverse is None) or (
        cutoff is not None and abs(float(inverse) * cutoff / LENGTH - 1) > 1e-9
    ):
        raise _unknown("its cutoff is not the one of its expressions")
    surface = float(found["surface"][1]) if "surface" in found else 0.0
    return {
        "solute": constants["soluteDielectric"],
        "solvent": constants["solventDielectric"],
        # The potential multiplies by 4 pi, and the expression has the product.
        "surface": surface / (4 * np.pi) * ENERGY / LENGTH**2,
        "constant": float(found["own"][1]) * ENERGY * LENGTH,
        "kappa": constants["kappa"] / LENGTH,
        "cutoff": cutoff,
        "contained": False,
    }


def _split(text: str) -> tuple[str, dict[str, float]]:
    """Split an expression into its formula and the constants that are defined at its end."""
    names = ("solventDielectric", "soluteDielectric", "kappa", "offset", "cutoff")
    kept: list[str] = []
    constants: dict[str, float] = {}
    for piece in text.split(";"):
        name, _, value = piece.partition("=")
        if name in names and re.fullmatch(NUMBER, value):
            constants[name] = float(value)
        else:
            kept.append(piece)
    if not {"solventDielectric", "soluteDielectric", "kappa"} <= set(constants):
        raise _unknown(f"it has the term {kept[0]!r}")
    if constants.get("offset", OFFSET) != OFFSET:
        raise _unknown(f"its offset is {constants['offset']:g} nm, not {OFFSET:g}")
    return ";".join(kept), constants


def _match(pattern: str, text: str) -> re.Match[str] | None:
    """Match a formula in which N is a number and E the factor of a salt, or 1."""
    salt = r"1|exp\(-kappa\*[Bf]\)"
    return re.fullmatch(pattern.replace("(E)", f"({salt})").replace("N", NUMBER), text)


def _names(force: Any) -> list[str]:
    count = force.getNumPerParticleParameters()
    return [force.getPerParticleParameterName(k) for k in range(count)]


def _cutoff(force: Any) -> float | None:
    return None if force.getNonbondedMethod() == 0 else LENGTH * plain(force.getCutoffDistance())


def _without_spaces(text: str) -> str:
    return re.sub(r"\s", "", text)


def _unknown(why: str) -> ValueError:
    return ValueError(
        f"the CustomGBForce of the system is not the OBC2 of implicit/obc2.xml: {why}. Make the "
        "system with ForceField(..., 'implicit/obc2.xml'), or with GBSAOBCForce."
    )
