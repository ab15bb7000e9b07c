"""Virtual sites of an ``openmm.System``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjsim.core.openmm_units import LENGTH
from adjsim.io._openmm.library import kind_of, openmm, plain
from adjsim.io._openmm.types import Names, Types, grouped, types_of
from adjsim.potentials.sites.groups import (
    AverageSites,
    LocalCoordinatesSites,
    OutOfPlaneSites,
    SiteGroup,
)
from adjsim.potentials.sites.virtual_sites import VirtualSites

KINDS = {
    "TwoParticleAverageSite": "two_particle_average",
    "ThreeParticleAverageSite": "three_particle_average",
    "OutOfPlaneSite": "out_of_plane",
    "LocalCoordinatesSite": "local_coordinates",
}
# The largest error of the sum of weights, which is that of rounding.
SUM = 1e-9


def check_sites(system: Any) -> None:
    """Refuse sites without a counterpart here, by name, and constraints that hold sites."""
    sites = dict.fromkeys(_sites(system))
    for k in sites:
        site = system.getVirtualSite(k)
        kind, members = kind_of(site), _members(site)
        if kind not in KINDS:
            *names, last = KINDS
            raise ValueError(
                f"particle {k} is a virtual site of a kind without a counterpart in adjsim, such "
                f"as a SymmetrySite: it may be a {', '.join(names)} or {last}."
            )
        mass = plain(system.getParticleMass(k))
        if mass:
            raise ValueError(
                f"particle {k}, a virtual site, has the mass {mass:g}: set it to zero."
            )
        base = next((i for i in members if i in sites), None)
        if base is not None:
            raise ValueError(
                f"particle {k} is a virtual site built on particle {base}, a virtual site too: "
                "build it on the atoms that the other site follows."
            )
        for name, weights, total in _sums(site):
            if abs(sum(weights) - total) > SUM:
                raise ValueError(
                    f"the {name} of particle {k}, a virtual site, sum to {sum(weights):.12g}, and "
                    f"must sum to {total}, so that the site moves with its molecule: set the "
                    "first weight to what the others leave."
                )
    for row in range(system.getNumConstraints() if sites else 0):
        i, j, _ = system.getConstraintParameters(row)
        if i in sites or j in sites:
            raise ValueError(
                f"constraint {row} holds particle {i if i in sites else j}, a virtual site, whose "
                "place follows from its atoms: constrain these."
            )


def read_sites(
    system: Any, names: Names, atoms: dict[int, int]
) -> tuple[VirtualSites | None, dict[str, tuple[str, ...]]]:
    """Read the virtual sites of a system, and the labels of their types; None without any.

    ``atoms`` are the numbers among atoms with mass, by particle.
    """
    found: dict[str, list[int]] = {}
    for k in _sites(system):
        found.setdefault(_name(system.getVirtualSite(k)), []).append(k)
    groups: dict[str, SiteGroup] = {}
    labels: dict[str, tuple[str, ...]] = {}
    for name, particles in found.items():
        sites = [system.getVirtualSite(k) for k in particles]
        members = [_members(site) for site in sites]
        types = _types(sites, [[k, *row] for k, row in zip(particles, members, strict=True)], names)
        index = torch.tensor([[atoms[i] for i in row] for row in members])
        groups[name] = _group(kind_of(sites[0]), torch.tensor(particles), index, types)
        labels[f"sites.{name}"] = types.labels
    return (VirtualSites(system.getNumParticles(), **groups) if groups else None), labels


def write_sites(sites: VirtualSites | None, system: Any) -> None:
    """Write the numbers of sites into a copy of the system that they were read from."""
    groups: list[Any] = [] if sites is None else sites.groups
    if sorted(k for group in groups for k in group.site.tolist()) != _sites(system):
        raise ValueError(
            "the virtual sites of the system are not those of the potential: give the system that "
            "the potential was read from."
        )
    for group in groups:
        rows = {name: _rows(group, name) for name in group.__declared__}
        for place, k in enumerate(group.site.tolist()):
            site = system.getVirtualSite(k)
            numbers = {name: value[place].tolist() for name, value in rows.items()}
            system.setVirtualSite(k, _written(site, numbers))


def _sites(system: Any) -> list[int]:
    return [k for k in range(system.getNumParticles()) if system.isVirtualSite(k)]


def _written(site: Any, numbers: dict[str, Any]) -> Any:
    kind, members, mm = kind_of(site), _members(site), openmm()
    if kind == "LocalCoordinatesSite":
        weights = site.getOriginWeights(), site.getXWeights(), site.getYWeights()
        return mm.LocalCoordinatesSite(
            members, *weights, mm.Vec3(*(x / LENGTH for x in numbers["point"]))
        )
    if kind == "OutOfPlaneSite":
        return mm.OutOfPlaneSite(*members, *numbers["weight"], numbers["cross"] * LENGTH)
    others = numbers["weight"]
    return getattr(mm, kind)(*members, 1 - sum(others), *others)


def _group(kind: str, site: Tensor, index: Tensor, types: Types) -> SiteGroup:
    others, columns = index.shape[1] - 1, torch.from_numpy(types.numbers)
    if kind == "LocalCoordinatesSite":
        origin, x_axis, y_axis, point = columns.split([others, others, others, 3], 1)
        axes = origin.clone(), x_axis.clone(), y_axis.clone()
        return LocalCoordinatesSites(site, index, _parameter(point), *axes, types=types.index)
    if kind == "OutOfPlaneSite":
        numbers = _parameter(columns[:, :2]), _parameter(columns[:, 2])
        return OutOfPlaneSites(site, index, *numbers, types=types.index)
    return AverageSites(site, index, _parameter(columns), types=types.index)


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.clone())


def _types(sites: Sequence[Any], atoms: list[list[int]], names: Names) -> Types:
    numbers = np.array([_numbers(site) for site in sites], dtype=np.float64)
    if names.names is None:
        return types_of(atoms, numbers, names)
    return grouped(atoms, numbers, [tuple(names.symbols[k] for k in row) for row in atoms], names)


def _numbers(site: Any) -> list[float]:
    """Return the numbers of a site in ASE's units, without the weights of its first atom."""
    kind = kind_of(site)
    if kind == "LocalCoordinatesSite":
        weights = (weight for _, row, _ in _sums(site) for weight in row[1:])
        return [*weights, *(LENGTH * x for x in plain(site.getLocalPosition()))]
    if kind == "OutOfPlaneSite":
        return [site.getWeight12(), site.getWeight13(), site.getWeightCross() / LENGTH]
    return _sums(site)[0][1][1:]


def numbers_in_files(site: Any) -> tuple[list[str], list[float]]:
    """Return the names and the values of the numbers of a site in OpenMM's files."""
    kind = kind_of(site)
    if kind == "OutOfPlaneSite":
        numbers = [site.getWeight12(), site.getWeight13(), site.getWeightCross()]
        return ["weight12", "weight13", "weightCross"], numbers
    count = range(1, site.getNumParticles() + 1)
    if kind != "LocalCoordinatesSite":
        return [f"weight{k}" for k in count], _sums(site)[0][1]
    names = [f"w{axis}{k}" for axis in "oxy" for k in count]
    values = [weight for _, row, _ in _sums(site) for weight in row]
    return [*names, "p1", "p2", "p3"], [*values, *plain(site.getLocalPosition())]


def _sums(site: Any) -> list[tuple[str, list[float], int]]:
    """Return the weights of all atoms, their name, and what they have to sum to."""
    kind = kind_of(site)
    if kind == "OutOfPlaneSite":
        return []
    if kind == "LocalCoordinatesSite":
        return [
            ("origin weights", list(site.getOriginWeights()), 1),
            ("x weights", list(site.getXWeights()), 0),
            ("y weights", list(site.getYWeights()), 0),
        ]
    return [("weights", [site.getWeight(i) for i in range(site.getNumParticles())], 1)]


def _name(site: Any) -> str:
    """Return the name of the kind of a site, with the number of atoms where it is not the usual."""
    kind, count = kind_of(site), site.getNumParticles()
    unusual = kind == "LocalCoordinatesSite" and count != 3
    return f"{KINDS[kind]}_{count}" if unusual else KINDS[kind]


def _members(site: Any) -> list[int]:
    return [site.getParticle(i) for i in range(site.getNumParticles())]


def _rows(group: SiteGroup, name: str) -> Tensor:
    """Return the numbers of each site of a group."""
    value: Tensor = getattr(group, name).detach().cpu().double()
    return value if group.types is None else value[group.types.cpu()]
