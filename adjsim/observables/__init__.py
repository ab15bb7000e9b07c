"""Observables: quantities measured on trajectories."""

from adjsim.observables.averages import Mean, autocorrelation_time, mean_with_error
from adjsim.observables.kinetics import (
    first_passage_time,
    mean_squared_displacement,
    velocity_autocorrelation,
)
from adjsim.observables.structure import pair_distances, radial_distribution, radius_of_gyration
from adjsim.observables.thermodynamics import kinetic_temperature

__all__ = [
    "Mean",
    "autocorrelation_time",
    "first_passage_time",
    "kinetic_temperature",
    "mean_squared_displacement",
    "mean_with_error",
    "pair_distances",
    "radial_distribution",
    "radius_of_gyration",
    "velocity_autocorrelation",
]
