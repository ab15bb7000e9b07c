"""Observables of a system of atoms, by the names of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ase import units
from torch import Tensor

from adjsim.core.box import perpendicular_widths
from adjsim.dynamics import Andersen, Dynamics, GeneralizedLangevin, Langevin, MassiveDynamics
from adjsim.io.systems import System
from adjsim.observables import (
    kinetic_temperature,
    mean_squared_displacement,
    pressure,
    radius_of_gyration,
    smooth_radial_distribution,
)

# Of the kernel of the radial distribution function, in units of sigma. It lowers the first peak of
# liquid argon by some 5 %.
WIDTH = 0.03


@dataclass(frozen=True)
class Quantity:
    """An observable of atoms, whose value is a function from the state to ``(replicas,)``.

    ``unit`` is its unit, where not one of the system's own. An observable that is measured from the
    start of the run has no mean at equilibrium.
    """

    title: str
    value: Callable[[Any], Tensor]
    unit: str = ""
    from_start: bool = False


def quantity_of(
    name: str, system: System, model: Dynamics[Any], distance: float | None
) -> Quantity:
    """Make an observable by its name; ``distance`` is that of g(r), None: near its first peak."""
    if name not in QUANTITIES:
        raise ValueError(f"unknown observable '{name}'; choose from {', '.join(QUANTITIES)}.")
    if distance is not None and name != "rdf":
        raise ValueError(f"--distance is for --observable rdf, not for {name}.")
    return QUANTITIES[name](system, model, distance)


def _energy(system: System, model: Dynamics[Any], distance: float | None) -> Quantity:
    atoms = len(system.position)
    return Quantity(
        "potential energy per atom", lambda state: system.potential(state.position) / atoms
    )


def _displacement(system: System, model: Dynamics[Any], distance: float | None) -> Quantity:
    """Make the displacement from the start. Positions of a run are never wrapped into the box."""
    start = system.position

    def value(state: Any) -> Tensor:
        frames = torch.stack([start.expand_as(state.position), state.position])
        return mean_squared_displacement(frames)[1]

    return Quantity("mean squared displacement from the start", value, from_start=True)


def _temperature(system: System, model: Dynamics[Any], distance: float | None) -> Quantity:
    model = _require_momenta("temperature", model)
    # A copy, since a compiled loop refuses a captured tensor of the dynamics.
    mass, unit = system.mass.clone(), system.temperature
    atoms, dim = system.position.shape
    # Momenta start with a total of zero, and only noise on single atoms changes the total.
    kept = not isinstance(model, Langevin | GeneralizedLangevin | Andersen)
    dof = atoms * dim - (dim if kept else 0)
    return Quantity(
        f"kinetic temperature ({system.temperature_name})",
        lambda state: kinetic_temperature(state.momentum, mass, dof) / unit,
        system.temperature_name,
    )


def _pressure(system: System, model: Dynamics[Any], distance: float | None) -> Quantity:
    _require_box("pressure", system)
    model = _require_momenta("pressure", model)
    unit = 1e6 * units.Pascal
    return Quantity(
        "pressure (MPa, without the tail beyond the cutoff)",
        lambda state: pressure(model, state) / unit,
        "MPa",
    )


def _radial(system: System, model: Dynamics[Any], distance: float | None) -> Quantity:
    box = _require_box("rdf", system)
    sigma = float(system.potential.sigma.detach().mean())
    width, reach = WIDTH * sigma, 0.5 * float(perpendicular_widths(box).min())
    r = 2 ** (1 / 6) * sigma if distance is None else distance
    if not 0 < r <= reach:
        raise ValueError(
            f"--distance {r:g} is not between 0 and {reach:g}, half the smallest perpendicular "
            "width of the box; give a distance within, or a larger box."
        )
    at = torch.tensor([r], dtype=torch.float64)
    where = "r = 2^(1/6) sigma =" if distance is None else "r ="
    return Quantity(
        f"g(r) at {where} {r:.4g} angstrom (Gaussian kernel of {width:.2g} angstrom)",
        lambda state: smooth_radial_distribution(state.position, at, box, width=width)[..., 0],
    )


def _require_momenta(name: str, model: Dynamics[Any]) -> MassiveDynamics[Any]:
    if not isinstance(model, MassiveDynamics):
        raise ValueError(
            f"--observable {name} needs momenta, which {type(model).__name__} does not have; "
            "choose another --dynamics or another observable."
        )
    return model


def _require_box(name: str, system: System) -> Tensor:
    box = system.potential.box
    if box is None:
        raise ValueError(
            f"--observable {name} needs a periodic box, and the {system.name} has none; give "
            "--structure with a file that has a cell, or choose another observable."
        )
    # A copy, since a compiled loop refuses a captured tensor of the dynamics.
    return box.clone()


QUANTITIES: dict[str, Callable[[System, Dynamics[Any], float | None], Quantity]] = {
    "energy": _energy,
    "gyration": lambda *_: Quantity("radius of gyration", lambda x: radius_of_gyration(x.position)),
    "rdf": _radial,
    "msd": _displacement,
    "pressure": _pressure,
    "temperature": _temperature,
}
