"""Observables: quantities measured on trajectories."""

from adjsim.observables.averages import (
    Mean as Mean,
    autocorrelation_time as autocorrelation_time,
    mean_with_error,
)
from adjsim.observables.conformation import (
    dihedral_distribution,
    dihedral_histogram,
    dihedrals,
    end_to_end_distance,
    ramachandran,
)
from adjsim.observables.distributions import (
    angular_distribution,
    histogram,
    radial_distribution,
    smooth_radial_distribution,
)
from adjsim.observables.neighbours import neighbour_pairs as neighbour_pairs
from adjsim.observables.proximity import (
    closest_distances,
    contacts,
    hydrogen_bonds,
    native_contacts,
    residue_distances,
)
from adjsim.observables.shape import (
    aligned,
    distance_rmsd,
    flexibility,
    mean_squared_deviation,
    rmsd,
)
from adjsim.observables.structure import (
    bond_order,
    coordination_number,
    density,
    dipole,
    gyration_tensor,
    nearest_neighbour_distance,
    pair_distances,
    principal_moments,
    radius_of_gyration,
    straightness,
    structure_factor,
)
from adjsim.observables.thermodynamics import (
    compressibility,
    dielectric_constant,
    heat_capacity,
    kinetic_temperature,
    pressure,
    stress,
    thermal_expansion,
    volume_compressibility,
)
from adjsim.observables.transport import (
    diffusion_coefficient,
    first_passage_time,
    mean_squared_displacement,
    velocity_autocorrelation,
    viscosity,
)

__all__ = [
    "aligned",
    "angular_distribution",
    "bond_order",
    "closest_distances",
    "compressibility",
    "contacts",
    "coordination_number",
    "density",
    "dielectric_constant",
    "diffusion_coefficient",
    "dihedral_distribution",
    "dihedral_histogram",
    "dihedrals",
    "dipole",
    "distance_rmsd",
    "end_to_end_distance",
    "first_passage_time",
    "flexibility",
    "gyration_tensor",
    "heat_capacity",
    "histogram",
    "hydrogen_bonds",
    "kinetic_temperature",
    "mean_squared_deviation",
    "mean_squared_displacement",
    "mean_with_error",
    "native_contacts",
    "nearest_neighbour_distance",
    "pair_distances",
    "pressure",
    "principal_moments",
    "radial_distribution",
    "radius_of_gyration",
    "ramachandran",
    "residue_distances",
    "rmsd",
    "smooth_radial_distribution",
    "straightness",
    "stress",
    "structure_factor",
    "thermal_expansion",
    "velocity_autocorrelation",
    "viscosity",
    "volume_compressibility",
]
