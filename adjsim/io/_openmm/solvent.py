"""Generalised Born solvent of an ``openmm.System``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.io._openmm.library import (
    COULOMB,
    ENERGY,
    LENGTH,
    box_of_system,
    cutoff_of,
    particles_of,
    per_particle_names,
    plain,
)
from adjsim.potentials.solvent import GeneralizedBorn, Necks

NUMBER = r"[0-9.]+(?:e[+-]?[0-9]+)?"
# A fit may take a surface term, an offset or a weight of necks below zero.
SIGNED = f"-?{NUMBER}"
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
INTERACTION = "<constant>*(1/soluteDielectric-{screen}/solventDielectric)"
SCREENS = ("1", "exp(-kappa*{length})")
DISTANCE = "f=sqrt(r^2+B1*B2*exp(-r^2/(4*B1*B2)))"
TERMS = {
    "own": tuple(
        f"-0.5*{INTERACTION}*charge^2/B".format(screen=x.format(length="B")) for x in SCREENS
    ),
    "surface": ("<constant>*(radius+0.14)^2*(radius/B)^6;radius=or+offset",),
    "pair": tuple(
        f"-{INTERACTION}*charge1*charge2{end};{DISTANCE}".format(screen=x.format(length="f"))
        for x in SCREENS
        for end in ("/f", "*(1/f-<inverse>)")
    ),
}
"""The terms of the energy, with ``<name>`` for a number."""
CONSTANTS = ("solventDielectric", "soluteDielectric", "kappa", "offset", "cutoff")
SHAPE = ("alpha", "beta", "gamma")
TABLES = ("getd0", "getm0")
# The numbers that a GBSAOBCForce has, in our units.
FIXED = {"alpha": 1.0, "beta": 0.8, "gamma": 4.85, "offset": 0.09}


class Solvent(NamedTuple):
    """The numbers of each atom in our units, other parameters, and the settings."""

    charge: np.ndarray
    radius: np.ndarray
    scale: np.ndarray
    trained: dict[str, Any]
    settings: dict[str, Any]


def read_solvent(system: Any, force: Any, charge: Tensor | None) -> GeneralizedBorn | None:
    """Read a generalised Born force; None for a CustomGBForce of another form.

    The solvent shares the parameter ``charge`` of the other forces if its charges are the same, so
    that a fit moves both.
    """
    solvent = _of_custom(force) if _is_custom(force) else _of_obc(force)
    if solvent is None:
        return None
    own, radius, scale = (torch.from_numpy(x.copy()) for x in solvent[:3])
    if charge is None or not torch.equal(charge.detach(), own):
        charge = nn.Parameter(own)
    trained = {
        name: nn.Parameter(torch.as_tensor(value, dtype=torch.float64))
        for name, value in solvent.trained.items()
    }
    return GeneralizedBorn(
        charge,
        nn.Parameter(radius),
        nn.Parameter(scale),
        **trained,
        **solvent.settings,
        box=box_of_system(system) if force.usesPeriodicBoundaryConditions() else None,
    )


def write_solvent(part: GeneralizedBorn, force: Any) -> None:
    """Write the numbers of a solvent into its force."""
    if len(part.charge) != force.getNumParticles():
        raise ValueError(
            f"the solvent is for {len(part.charge)} atoms and the system has "
            f"{force.getNumParticles()}."
        )
    if _is_custom(force):
        _write_custom(part, force)
        return
    changed = [name for name, value in FIXED.items() if not (_plain(part, name) == value).all()]
    if changed or part.kappa or part.necks is not None or not part.bounded:
        fixed = ", ".join(f"{name} {value:g}" for name, value in FIXED.items())
        raise ValueError(
            f"a GBSAOBCForce has fixed numbers, {fixed}, without salt and necks, and the solvent "
            "of the potential has others: make the system with ForceField(..., "
            "'implicit/obc2.xml'), where they can be written."
        )
    charge, radius, scale = (_plain(part, name) for name in ("charge", "radius", "scale"))
    force.setSurfaceAreaEnergy(float(_plain(part, "surface")) / ENERGY * LENGTH**2)
    force.setSoluteDielectric(float(_plain(part, "solute")))
    force.setSolventDielectric(float(_plain(part, "solvent")))
    for k, row in enumerate(np.stack([charge, radius / LENGTH, scale], 1).tolist()):
        force.setParticleParameters(k, *row)


def _write_custom(part: GeneralizedBorn, force: Any) -> None:
    """Write the numbers of particles, and those in the expressions."""
    known = _of_custom(force)
    if known is None:
        raise ValueError(
            "the CustomGBForce of the system is none of the generalised Born solvents of OpenMM's "
            "files, as the solvent of the potential is: give the system that it was read from."
        )
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
    of_atoms = any(x.ndim for x in shape.values())
    if of_atoms and "alpha" not in columns:
        for name in SHAPE:
            force.addPerParticleParameter(name)
    if of_atoms or "alpha" in columns:
        columns |= {name: np.broadcast_to(x, small.shape) for name, x in shape.items()}
    else:
        a, b, c = (f"{float(shape[name]):.17g}" for name in SHAPE)
        polynomial = f"{a}*psi-{b}*psi^2+{c}*psi^3".replace("--", "+").replace("+-", "-")
    area = float(_plain(part, "surface")) * 4 * np.pi / ENERGY * LENGTH**2
    if area and not known.trained["surface"]:
        constants = {**_split(force.getEnergyTermParameters(0)[0])[1], "offset": offset}
        ends = ";".join(f"{name}={value:.17g}" for name, value in constants.items())
        text = TERMS["surface"][0].replace("<constant>", "1")
        force.addEnergyTerm(f"{text};{ends}", force.SingleParticle)

    def written(text: str) -> str:
        for name, value in numbers.items():
            text = re.sub(rf"\b{name}={SIGNED}", f"{name}={value:.17g}", text)
        text = re.sub(r"tanh\([^()]*\)", f"tanh({polynomial})", text)
        return re.sub(rf"^{SIGNED}(?=\*\(radius)", f"{area:.17g}", text)

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


def _of_custom(force: Any) -> Solvent | None:
    """Read a CustomGBForce with the expressions of OpenMM's files, and any numbers in them.

    Their formula of the descreening leaves out the term of an atom inside another one. A force of
    another form is None.
    """
    values = [force.getComputedValueParameters(k) for k in range(force.getNumComputedValues())]
    kinds = [("I", force.ParticlePairNoExclusions), ("B", force.SingleParticle)]
    found = _settings(force)
    if found is None or [(name, kind) for name, _, kind in values] != kinds:
        return None
    if any(getattr(force, f"getNum{name}")() for name in ("GlobalParameters", "Exclusions")):
        return None
    settings, constants = found
    pairs, single = (_stripped(text) for _, text, _ in values)
    columns = dict(zip(per_particle_names(force), particles_of(force).T, strict=True))
    trained: dict[str, Any] = {"surface": settings.pop("surface")}
    offsets = {constants["offset"]} if "offset" in constants else set[float]()
    bounded = _matched(BOUNDED, single)
    if single == UNBOUNDED:
        settings |= {"bounded": False, "alpha": 1.0, "beta": 0.0, "gamma": 0.0}
    elif bounded is None or (shape := _shape(bounded["polynomial"], columns)) is None:
        return None
    else:
        trained |= shape
        offsets.add(float(bounded["offset"]))
    needed = {"charge", "or", "sr", *(SHAPE if OF_EACH in single else ())}
    necks = _matched(NECKS, pairs)
    if necks is not None:
        needed.add("radindex")
        offsets.add(float(necks["offset"]))
    elif pairs != SPHERES:
        return None
    names = {force.getTabulatedFunctionName(k) for k in range(force.getNumTabulatedFunctions())}
    # A solvent of the files has one offset, and these expressions may have several.
    if set(columns) != needed or len(offsets) != 1 or names != (set(TABLES) if necks else set()):
        return None
    if necks is not None:
        trained["neck"], settings["necks"] = float(necks["neck"]), _necks(force, necks, columns)
    small, offset = columns["or"], offsets.pop()
    trained["offset"] = LENGTH * offset
    return Solvent(
        columns["charge"], LENGTH * (small + offset), columns["sr"] / small, trained, settings
    )


def _shape(polynomial: str, columns: dict[str, np.ndarray]) -> dict[str, Any] | None:
    """Read the coefficients alpha, beta and gamma of a cubic of psi."""
    if polynomial == OF_EACH:
        return {name: columns[name].copy() for name in SHAPE if name in columns}
    term = rf"(?:(-?{NUMBER})\*)?psi(?:([+-]{NUMBER})\*psi\^2)?(?:([+-]{NUMBER})\*psi\^3)?"
    found = re.fullmatch(term, polynomial)
    if found is None:
        return None
    alpha, beta, gamma = (
        float(x or default) for x, default in zip(found.groups(), (1, 0, 0), strict=True)
    )
    return {"alpha": alpha, "beta": -beta, "gamma": gamma}


def _necks(force: Any, found: re.Match[str], columns: dict[str, np.ndarray]) -> Necks:
    """Read the tables of necks by atoms."""
    count = force.getNumTabulatedFunctions()
    named = {force.getTabulatedFunctionName(k): force.getTabulatedFunction(k) for k in range(count)}
    index = np.floor(columns["radindex"] + 0.5).astype(int)
    tables = list[np.ndarray]()
    for name in TABLES:
        first, second, values = named[name].getFunctionParameters()
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


def _settings(force: Any) -> tuple[dict[str, Any], dict[str, float]] | None:
    """Read the settings, and the constants, from the expressions of the energy."""
    found: dict[str, re.Match[str]] = {}
    constants: dict[str, float] = {}
    for k in range(force.getNumEnergyTerms()):
        text, kind = force.getEnergyTermParameters(k)
        body, named = _split(text)
        if constants not in ({}, named):
            return None
        constants = named
        of_pairs = kind == force.ParticlePairNoExclusions
        matches = {
            name: _matched_any(TERMS[name], body)
            for name in TERMS
            if (name == "pair") == of_pairs and name not in found
        }
        name = next((name for name, match in matches.items() if match), None)
        if name is None or kind == force.ParticlePair:
            return None
        found[name] = matches[name]
    needed = {"solventDielectric", "soluteDielectric", "kappa"}
    if not ({"own", "pair"} <= set(found) and needed <= set(constants)):
        return None
    salted, cutoff = constants["kappa"] > 0, cutoff_of(force)
    inverse = float(found["pair"].groupdict().get("inverse") or 0)
    expected = 0.0 if cutoff is None else LENGTH / cutoff
    if (
        found["own"]["constant"] != found["pair"]["constant"]
        or any(("exp(-kappa" in found[name][0]) != salted for name in ("own", "pair"))
        or abs(inverse - expected) > 1e-9 * expected
    ):
        return None
    surface = float(found["surface"]["constant"]) if "surface" in found else 0.0
    settings = {
        "solute": constants["soluteDielectric"],
        "solvent": constants["solventDielectric"],
        # The potential multiplies by 4 pi, and the expression has the product.
        "surface": surface / (4 * np.pi) * ENERGY / LENGTH**2,
        "constant": float(found["own"]["constant"]) * ENERGY * LENGTH,
        "kappa": constants["kappa"] / LENGTH,
        "cutoff": cutoff,
        "contained": False,
    }
    return settings, constants


def _split(text: str) -> tuple[str, dict[str, float]]:
    """Split an expression into its formula and the constants that are defined at its end."""
    kept: list[str] = []
    constants: dict[str, float] = {}
    for piece in _stripped(text).split(";"):
        name, _, value = piece.partition("=")
        if name in CONSTANTS and re.fullmatch(SIGNED, value):
            constants[name] = float(value)
        else:
            kept.append(piece)
    return ";".join(kept), constants


def _matched(template: str, text: str) -> re.Match[str] | None:
    """Match a text with a template, in which ``<name>`` stands for a number."""
    pieces = re.split(r"<(\w+)>", template)
    parts = [re.escape(x) for x in pieces]
    parts[1::2] = [f"(?P<{x}>{'[^()]*' if x == 'polynomial' else SIGNED})" for x in pieces[1::2]]
    return re.fullmatch("".join(parts), text)


def _matched_any(templates: Sequence[str], text: str) -> Any:
    return next(filter(None, (_matched(template, text) for template in templates)), None)


def _stripped(text: str) -> str:
    return re.sub(r"\s", "", text)
