"""Generalised Born solvent of an ``openmm.System``."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.io._openmm.library import (
    COULOMB,
    ENERGY,
    LENGTH,
    cutoff_of,
    forces,
    particles_of,
    plain,
)
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
SCREENED = r"\(1/soluteDielectric-(1|exp\(-kappa\*[Bf]\))/solventDielectric\)"
OWN = rf"-0\.5\*{NUMBER}\*{SCREENED}\*charge\^2/B"
SURFACE = rf"{NUMBER}\*\(radius\+0\.14\)\^2\*\(radius/B\)\^6;radius=or\+offset"
PAIR = (
    rf"-{NUMBER}\*{SCREENED}\*charge1\*charge2"
    rf"(?:/f|\*\(1/f-{NUMBER}\));f=sqrt\(r\^2\+B1\*B2\*exp\(-r\^2/\(4\*B1\*B2\)\)\)"
)


class Solvent(NamedTuple):
    """The numbers of each atom in our units, and the other arguments of the potential."""

    charge: np.ndarray
    radius: np.ndarray
    scale: np.ndarray
    settings: dict[str, Any]


def read_solvent(system: Any, charge: Tensor | None) -> GeneralizedBorn | None:
    """Read the generalised Born force of a system.

    The solvent shares the parameter ``charge`` of the other forces if its charges are the same, so
    that a fit moves both.
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
    solvent = _of_custom(force) if _is_custom(force) else _of_obc(force)
    own, radius, scale = (torch.from_numpy(x.copy()) for x in solvent[:3])
    if charge is None or not torch.equal(charge.detach(), own):
        charge = nn.Parameter(own)
    surface = nn.Parameter(torch.tensor(solvent.settings.pop("surface"), dtype=torch.float64))
    return GeneralizedBorn(
        charge, nn.Parameter(radius), nn.Parameter(scale), surface=surface, **solvent.settings
    )


def write_solvent(part: nn.Module | None, system: Any) -> None:
    """Write charges, radii, scales and surface tension into the force of a system."""
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
    if _is_custom(force):
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


def _is_custom(force: Any) -> bool:
    return hasattr(force, "getNumEnergyTerms")


def _of_obc(force: Any) -> Solvent:
    charge, radius, scale = particles_of(force).T
    settings = {
        "solute": float(force.getSoluteDielectric()),
        "solvent": float(force.getSolventDielectric()),
        "surface": plain(force.getSurfaceAreaEnergy()) * ENERGY / LENGTH**2,
        "constant": COULOMB,
        "cutoff": cutoff_of(force),
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
    found = [(name, re.sub(r"\s", "", text), kind) for name, text, kind in values]
    more = ("GlobalParameters", "Exclusions", "TabulatedFunctions", "Functions")
    has_more = any(getattr(force, f"getNum{name}")() for name in more)
    if found != known or sorted(_names(force)) != ["charge", "or", "sr"] or has_more:
        raise _unknown("its Born radii are not those of OBC2")
    columns = dict(zip(_names(force), particles_of(force).T, strict=True))
    charge, small, descreening = (columns[name] for name in ("charge", "or", "sr"))
    return Solvent(charge, LENGTH * (small + OFFSET), descreening / small, _settings(force))


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
        body, constants = _split(re.sub(r"\s", "", text))
        for name, (formula, wanted) in formulas.items():
            match = re.fullmatch(formula, body)
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
    cutoff, inverse = cutoff_of(force), found["pair"][3]
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


def _names(force: Any) -> list[str]:
    count = force.getNumPerParticleParameters()
    return [force.getPerParticleParameterName(k) for k in range(count)]


def _unknown(why: str) -> ValueError:
    return ValueError(
        f"the CustomGBForce of the system is not the OBC2 of implicit/obc2.xml: {why}. Make the "
        "system with ForceField(..., 'implicit/obc2.xml'), or with GBSAOBCForce."
    )
