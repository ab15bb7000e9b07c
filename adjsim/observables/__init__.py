"""Observables: quantities measured on trajectories."""

from adjsim.observables.averages import Mean, autocorrelation_time, mean_with_error
from adjsim.observables.kinetics import (
    first_passage_time,
    mean_squared_displacement,
    velocity_autocorrelation,
)
from adjsim.observables.structure import (
    bond_order,
    coordination_number,
    nearest_neighbour_distance,
    pair_distances,
    radial_distribution,
    radius_of_gyration,
    smooth_radial_distribution,
    structure_factor,
)
from adjsim.observables.thermodynamics import kinetic_temperature, pressure, stress

__all__ = [
    "Mean",
    "autocorrelation_time",
    "bond_order",
    "coordination_number",
    "first_passage_time",
    "kinetic_temperature",
    "mean_squared_displacement",
    "mean_with_error",
    "nearest_neighbour_distance",
    "pair_distances",
    "pressure",
    "radial_distribution",
    "radius_of_gyration",
    "smooth_radial_distribution",
    "stress",
    "structure_factor",
    "velocity_autocorrelation",
]
