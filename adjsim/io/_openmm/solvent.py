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
    per_particle_names,
    plain,
)
from adjsim.potentials.solvent import GeneralizedBorn, Necks

NUMBER = r"[0-9.]+(?:e[+-]?[0-9]+)?"
SPHERES = (
    "select(step(r+sr2-or1),0.5*(1/L-1/U+0.25*(r-sr2^2/r)*(1/(U^2)-1/(L^2))+0.5*log(L/U)/r),0);"
    "U=r+sr2;L=max(or1,D);D=abs(r-sr2)"
)
NECKS = (
    "Ivdw+neckScale*Ineck;Ineck=step(radius1+radius2+neckCut-r)*getm0(radindex1,radindex2)/"
    "(1+<quadratic>*(r-getd0(radindex1,radindex2))^2"
    "+<sextic>*1000000*(r-getd0(radindex1,radindex2))^6);"
    f"Ivdw={SPHERES};radius1=or1+offset;radius2=or2+offset;"
    "neckScale=<neck>;neckCut=<reach>;offset=<offset>"
)
UNBOUNDED = "1/(1/or-I)"
BOUNDED = "1/(1/or-tanh(<polynomial>)/radius);psi=I*or;radius=or+offset;offset=<offset>"
OF_EACH = "alpha*psi-beta*psi^2+gamma*psi^3"
SCREENED = r"\(1/soluteDielectric-(1|exp\(-kappa\*[Bf]\))/solventDielectric\)"
OWN = rf"-0\.5\*({NUMBER})\*{SCREENED}\*charge\^2/B"
SURFACE = rf"({NUMBER})\*\(radius\+0\.14\)\^2\*\(radius/B\)\^6;radius=or\+offset"
PAIR = (
    rf"-({NUMBER})\*{SCREENED}\*charge1\*charge2"
    rf"(?:/f|\*\(1/f-({NUMBER})\));f=sqrt\(r\^2\+B1\*B2\*exp\(-r\^2/\(4\*B1\*B2\)\)\)"
)
CONSTANTS = ("solventDielectric", "soluteDielectric", "kappa", "offset", "cutoff")
SHAPE = ("alpha", "beta", "gamma")
TABLES = ("getd0", "getm0")


class Solvent(NamedTuple):
    """The numbers of each atom in our units, other parameters, and the settings."""

    charge: np.ndarray
    radius: np.ndarray
    scale: np.ndarray
    trained: dict[str, Any]
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
    trained = {
        name: nn.Parameter(torch.as_tensor(value, dtype=torch.float64))
        for name, value in solvent.trained.items()
    }
    return GeneralizedBorn(
        charge, nn.Parameter(radius), nn.Parameter(scale), **trained, **solvent.settings
    )


def write_solvent(part: nn.Module | None, system: Any) -> None:
    """Write the numbers of a solvent into the force of a system."""
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
    if _is_custom(force):
        _write_custom(part, force)
        return
    charge, radius, scale = (_plain(part, name) for name in ("charge", "radius", "scale"))
    force.setSurfaceAreaEnergy(float(_plain(part, "surface")) / ENERGY * LENGTH**2)
    force.setSoluteDielectric(float(_plain(part, "solute")))
    force.setSolventDielectric(float(_plain(part, "solvent")))
    for k, row in enumerate(np.stack([charge, radius / LENGTH, scale], 1).tolist()):
        force.setParticleParameters(k, *row)


def _write_custom(part: GeneralizedBorn, force: Any) -> None:
    """Write the numbers of particles, and those in the expressions."""
    known = _of_custom(force)
    offset = float(_plain(part, "offset")) / LENGTH
    columns: dict[str, np.ndarray] = dict(
        zip(per_particle_names(force), particles_of(force).T.copy(), strict=True)
    )
    small = _plain(part, "radius") / LENGTH - offset
    columns |= {"charge": _plain(part, "charge"), "or": small, "sr": _plain(part, "scale") * small}
    numbers = {
        "offset": offset,
        "soluteDielectric": float(_plain(part, "solute")),
        "solventDielectric": float(_plain(part, "solvent")),
        "neckScale": float(_plain(part, "neck")),
    }
    shape = {name: _plain(part, name) for name in SHAPE}
    polynomial = OF_EACH
    if "alpha" in columns:
        columns |= {name: np.broadcast_to(x, small.shape) for name, x in shape.items()}
    elif any(x.ndim for x in shape.values()):
        raise ValueError(
            "alpha, beta and gamma are of each atom, and the CustomGBForce has one number of each."
        )
    else:
        a, b, c = (f"{float(shape[name]):.17g}" for name in SHAPE)
        polynomial = f"{a}*psi-{b}*psi^2+{c}*psi^3".replace("--", "+").replace("+-", "-")
    area = float(_plain(part, "surface")) * 4 * np.pi / ENERGY * LENGTH**2
    if area and not known.trained["surface"]:
        raise ValueError("the potential has a surface tension, and the CustomGBForce has no term.")

    def written(text: str) -> str:
        for name, value in numbers.items():
            text = re.sub(rf"\b{name}={NUMBER}", f"{name}={value:.17g}", text)
        text = re.sub(r"tanh\([^()]*\)", f"tanh({polynomial})", text)
        return re.sub(rf"^{NUMBER}(?=\*\(radius)", f"{area:.17g}", text)

    for k in range(force.getNumComputedValues()):
        name, text, kind = force.getComputedValueParameters(k)
        force.setComputedValueParameters(k, name, written(_stripped(text)), kind)
    for k in range(force.getNumEnergyTerms()):
        text, kind = force.getEnergyTermParameters(k)
        force.setEnergyTermParameters(k, written(_stripped(text)), kind)
    for k, row in enumerate(
        np.stack([columns[name] for name in per_particle_names(force)], 1).tolist()
    ):
        force.setParticleParameters(k, row)


def _plain(part: GeneralizedBorn, name: str) -> np.ndarray:
    return getattr(part, name).detach().cpu().double().numpy()


def _is_custom(force: Any) -> bool:
    return hasattr(force, "getNumEnergyTerms")


def _of_obc(force: Any) -> Solvent:
    charge, radius, scale = particles_of(force).T
    settings = {
        "solute": float(force.getSoluteDielectric()),
        "solvent": float(force.getSolventDielectric()),
        "constant": COULOMB,
        "cutoff": cutoff_of(force),
        "contained": True,
    }
    surface = plain(force.getSurfaceAreaEnergy()) * ENERGY / LENGTH**2
    return Solvent(charge, LENGTH * radius, scale, {"surface": surface}, settings)


def _of_custom(force: Any) -> Solvent:
    """Read a CustomGBForce with the expressions of OpenMM's files, and any numbers in them.

    Their formula of the descreening leaves out the term of an atom inside another one.
    """
    values = [force.getComputedValueParameters(k) for k in range(force.getNumComputedValues())]
    kinds = [("I", force.ParticlePairNoExclusions), ("B", force.SingleParticle)]
    if [(name, kind) for name, _, kind in values] != kinds:
        raise _unknown("its computed values are not I and B")
    if any(getattr(force, f"getNum{name}")() for name in ("GlobalParameters", "Exclusions")):
        raise _unknown("it has global parameters or exclusions")
    pairs, single = (_stripped(text) for _, text, _ in values)
    columns = dict(zip(per_particle_names(force), particles_of(force).T, strict=True))
    settings, constants = _settings(force)
    surface, offset = settings.pop("surface"), constants.get("offset")
    trained: dict[str, Any] = {"surface": surface}
    found = _matched(BOUNDED, single)
    if single == UNBOUNDED:
        shape: dict[str, Any] = {"alpha": 1.0, "beta": 0.0, "gamma": 0.0}
        settings |= {"bounded": False, **shape}
    elif found is not None:
        trained |= _shape(found["polynomial"], columns)
        offset = float(found["offset"])
    else:
        raise _unknown(f"its Born radii are {single!r}")
    needed = {"charge", "or", "sr", *(SHAPE if OF_EACH in single else ())}
    necks = _matched(NECKS, pairs)
    if necks is not None:
        needed.add("radindex")
        trained["neck"] = float(necks["neck"])
        settings["necks"] = _necks(force, necks, columns)
    elif pairs != SPHERES:
        raise _unknown(f"its descreening is {pairs!r}")
    if set(columns) != needed:
        raise _unknown(f"its numbers of particles are {', '.join(columns)}")
    offsets = {offset, constants.get("offset", offset)}
    offsets |= set() if necks is None else {float(necks["offset"])}
    if offset is None or len(offsets) > 1:
        raise _unknown("its expressions have different offsets, or none")
    small = columns["or"]
    trained["offset"] = LENGTH * offset
    return Solvent(
        columns["charge"], LENGTH * (small + offset), columns["sr"] / small, trained, settings
    )


def _shape(polynomial: str, columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """Read the coefficients alpha, beta and gamma of psi."""
    if polynomial == OF_EACH:
        return {name: columns[name].copy() for name in SHAPE if name in columns}
    term = rf"(?:({NUMBER})\*)?psi(?:-({NUMBER})\*psi\^2)?(?:\+({NUMBER})\*psi\^3)?"
    found = re.fullmatch(term, polynomial)
    if found is None:
        raise _unknown(f"its Born radii have tanh({polynomial})")
    given = zip(found.groups(), (1, 0, 0), strict=True)
    return dict(zip(SHAPE, (float(x or default) for x, default in given), strict=True))


def _necks(force: Any, found: re.Match[str], columns: dict[str, np.ndarray]) -> Necks:
    """Read the tables of necks by atoms."""
    count = force.getNumTabulatedFunctions()
    names = {force.getTabulatedFunctionName(k): force.getTabulatedFunction(k) for k in range(count)}
    if set(names) != set(TABLES):
        raise _unknown(f"its tables are {', '.join(names)}")
    index = columns["radindex"].astype(int)
    tables = list[np.ndarray]()
    for name in TABLES:
        first, second, values = names[name].getFunctionParameters()
        # The first index runs fastest.
        table = np.reshape(values, (second, first)).T
        tables.append(table[np.ix_(index, index)])
    place, depth = tables
    return Necks(
        depth / LENGTH,
        place * LENGTH,
        float(found["reach"]) * LENGTH,
        float(found["quadratic"]) / LENGTH**2,
        1e6 * float(found["sextic"]) / LENGTH**6,
    )


def _settings(force: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Read the settings, and the constants, from the expressions of the energy."""
    found: dict[str, re.Match[str]] = {}
    constants: dict[str, float] = {}
    formulas = {
        "own": (OWN, force.SingleParticle),
        "surface": (SURFACE, force.SingleParticle),
        "pair": (PAIR, force.ParticlePairNoExclusions),
    }
    for k in range(force.getNumEnergyTerms()):
        text, kind = force.getEnergyTermParameters(k)
        body, named = _split(_stripped(text))
        if constants and named != constants:
            raise _unknown("its terms have different constants")
        constants = named
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
    settings = {
        "solute": constants["soluteDielectric"],
        "solvent": constants["solventDielectric"],
        # The potential multiplies by 4 pi, and the expression has the product.
        "surface": surface / (4 * np.pi) * ENERGY / LENGTH**2,
        "constant": float(found["own"][1]) * ENERGY * LENGTH,
        "kappa": constants["kappa"] / LENGTH,
        "cutoff": cutoff,
        "contained": False,
    }
    return settings, constants


def _split(text: str) -> tuple[str, dict[str, float]]:
    """Split an expression into its formula and the constants that are defined at its end."""
    kept: list[str] = []
    constants: dict[str, float] = {}
    for piece in text.split(";"):
        name, _, value = piece.partition("=")
        if name in CONSTANTS and re.fullmatch(NUMBER, value):
            constants[name] = float(value)
        else:
            kept.append(piece)
    if not {"solventDielectric", "soluteDielectric", "kappa"} <= set(constants):
        raise _unknown(f"it has the term {kept[0]!r}")
    return ";".join(kept), constants


def _matched(template: str, text: str) -> re.Match[str] | None:
    """Match a text with a template, in which ``<name>`` stands for a number."""
    pieces = re.split(r"<(\w+)>", template)
    parts = [re.escape(x) for x in pieces]
    parts[1::2] = [f"(?P<{x}>{'[^()]*' if x == 'polynomial' else NUMBER})" for x in pieces[1::2]]
    return re.fullmatch("".join(parts), text)


def _stripped(text: str) -> str:
    return re.sub(r"\s", "", text)


def _unknown(why: str) -> ValueError:
    return ValueError(
        "the CustomGBForce of the system is none of the solvents of OpenMM's files (hct, obc1, "
        f"obc2, gbn and gbn2 in implicit/): {why}. Make the system with "
        "ForceField(..., 'implicit/gbn2.xml'), or with GBSAOBCForce."
    )
