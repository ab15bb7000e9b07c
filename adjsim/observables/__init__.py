"""Observables: quantities measured on trajectories."""

from adjsim.observables.averages import Mean, autocorrelation_time, mean_with_error
from adjsim.observables.distributions import (
    angular_distribution,
    radial_distribution,
    smooth_radial_distribution,
)
from adjsim.observables.fluctuations import compressibility, heat_capacity
from adjsim.observables.kinetics import (
    first_passage_time,
    mean_squared_displacement,
    velocity_autocorrelation,
)
from adjsim.observables.neighbours import neighbour_pairs
from adjsim.observables.structure import (
    bond_order,
    coordination_number,
    nearest_neighbour_distance,
    pair_distances,
    radius_of_gyration,
    structure_factor,
)
from adjsim.observables.thermodynamics import kinetic_temperature, pressure, stress
from adjsim.observables.transport import diffusion_coefficient, viscosity

__all__ = [
    "Mean",
    "angular_distribution",
    "autocorrelation_time",
    "bond_order",
    "compressibility",
    "coordination_number",
    "diffusion_coefficient",
    "first_passage_time",
    "heat_capacity",
    "kinetic_temperature",
    "mean_squared_displacement",
    "mean_with_error",
    "nearest_neighbour_distance",
    "neighbour_pairs",
    "pair_distances",
    "pressure",
    "radial_distribution",
    "radius_of_gyration",
    "smooth_radial_distribution",
    "stress",
    "structure_factor",
    "velocity_autocorrelation",
    "viscosity",
]
