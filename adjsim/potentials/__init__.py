"""Potentials: energy functions and their forces."""

from adjsim.core.declared import declared
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.potentials.analytic import AsymmetricDoubleWell, DoubleWell, Harmonic, MullerBrown
from adjsim.potentials.base import ForceField, Potential, SumForce, SumPotential, force
from adjsim.potentials.bonded import (
    BondedPotential,
    CosineAngle,
    ExplicitPairs,
    FlatBottomRestraint,
    HarmonicAngle,
    HarmonicBond,
    HarmonicImproper,
    MorseBond,
    PeriodicTorsion,
    PositionRestraint,
    RyckaertBellemans,
    ScaledPairs,
    UreyBradley,
)
from adjsim.potentials.charges.coulomb import Coulomb, ReactionField, Wolf
from adjsim.potentials.charges.ewald import Ewald, ParticleMeshEwald
from adjsim.potentials.contact import (
    Barrier,
    Box,
    Contact,
    Cylinder,
    Inside,
    Moving,
    MovingContact,
    ParticleContact,
    Penalty,
    Plane,
    PlaneContact,
    Quadratic,
    Softplus,
    Sphere,
    Surface,
    SurfaceContact,
)
from adjsim.potentials.force_field import ForceFieldPotential
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.learnt.graph import GraphForce, GraphPotential
from adjsim.potentials.learnt.mace import MACEPotential
from adjsim.potentials.learnt.networks import (
    ForceModel,
    InPrecision,
    MessagePassing,
    PairNetwork,
    RadialBasis,
)
from adjsim.potentials.pairs.base import PairPotential
from adjsim.potentials.pairs.lennard_jones import WCA, LennardJones
from adjsim.potentials.pairs.mie import GaussianCore, Mie, SoftSphere
from adjsim.potentials.pairs.noble import (
    NOBLE_GASES,
    LennardJonesMixture,
    NobleGas,
    kong,
    lorentz_berthelot,
)
from adjsim.potentials.pairs.radial import Buckingham, Morse, RadialPotential, Yukawa
from adjsim.potentials.pairs.tail import tail_corrections
from adjsim.potentials.pairs.truncation import ForceShifted, Shifted, Switched, Truncation
from adjsim.potentials.separable import SeparablePotential
from adjsim.potentials.signals.actuated import Actuated
from adjsim.potentials.signals.controls import Controller, NeuralController, OpenLoop
from adjsim.potentials.signals.signals import CubicSpline, Harmonics, PiecewiseLinear, Signal
from adjsim.potentials.solids import (
    CorotatedLinear,
    ElasticPotential,
    NeoHookean,
    StVenantKirchhoff,
)
from adjsim.potentials.solids.bending import HingeBending
from adjsim.potentials.solvent import GeneralizedBorn

__all__ = [
    "NOBLE_GASES",
    "UNROUNDED",
    "WCA",
    "Actuated",
    "AsymmetricDoubleWell",
    "Barrier",
    "BondedPotential",
    "Box",
    "Buckingham",
    "Contact",
    "Controller",
    "CorotatedLinear",
    "CosineAngle",
    "Coulomb",
    "CubicSpline",
    "Cylinder",
    "DoubleWell",
    "ElasticPotential",
    "Ewald",
    "ExplicitPairs",
    "FlatBottomRestraint",
    "ForceField",
    "ForceFieldPotential",
    "ForceModel",
    "ForceShifted",
    "GaussianCore",
    "GeneralizedBorn",
    "GraphForce",
    "GraphPotential",
    "Gravity",
    "Harmonic",
    "HarmonicAngle",
    "HarmonicBond",
    "HarmonicImproper",
    "Harmonics",
    "HingeBending",
    "InPrecision",
    "Inside",
    "LennardJones",
    "LennardJonesMixture",
    "MACEPotential",
    "MessagePassing",
    "Mie",
    "Morse",
    "MorseBond",
    "Moving",
    "MovingContact",
    "MullerBrown",
    "NeoHookean",
    "NeuralController",
    "NobleGas",
    "OpenLoop",
    "PairNetwork",
    "PairPotential",
    "ParticleContact",
    "ParticleMeshEwald",
    "Penalty",
    "PeriodicTorsion",
    "PiecewiseLinear",
    "Plane",
    "PlaneContact",
    "PositionRestraint",
    "Potential",
    "Quadratic",
    "RadialBasis",
    "RadialPotential",
    "ReactionField",
    "Rounding",
    "RyckaertBellemans",
    "ScaledPairs",
    "SeparablePotential",
    "Shifted",
    "Signal",
    "SoftSphere",
    "Softplus",
    "Sphere",
    "StVenantKirchhoff",
    "SumForce",
    "SumPotential",
    "Surface",
    "SurfaceContact",
    "Switched",
    "Truncation",
    "UreyBradley",
    "Wolf",
    "Yukawa",
    "declared",
    "force",
    "kong",
    "lorentz_berthelot",
    "tail_corrections",
]
