"""Potentials: energy functions and their forces."""

from adjsim.potentials.analytic import AsymmetricDoubleWell, DoubleWell, Harmonic, MullerBrown
from adjsim.potentials.base import (
    ForceField,
    Potential,
    SeparablePotential,
    SumForce,
    SumPotential,
    force,
)
from adjsim.potentials.bending import HingeBending
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
from adjsim.potentials.buckingham import Buckingham
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
from adjsim.potentials.controls import Controller, NeuralController, OpenLoop
from adjsim.potentials.coulomb import Coulomb, ReactionField, Wolf
from adjsim.potentials.driven import Actuated
from adjsim.potentials.elastic import (
    CorotatedLinear,
    ElasticPotential,
    NeoHookean,
    StVenantKirchhoff,
)
from adjsim.potentials.ewald import Ewald, ParticleMeshEwald
from adjsim.potentials.force_field import ForceFieldPotential
from adjsim.potentials.gaussian_core import GaussianCore
from adjsim.potentials.graph import GraphForce, GraphPotential
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.learnt import (
    ForceModel,
    InPrecision,
    MessagePassing,
    PairNetwork,
    RadialBasis,
)
from adjsim.potentials.lennard_jones import LennardJones
from adjsim.potentials.mace import MACEPotential
from adjsim.potentials.mie import Mie, SoftSphere
from adjsim.potentials.mixing import kong, lorentz_berthelot
from adjsim.potentials.morse import Morse
from adjsim.potentials.noble import NOBLE_GASES, LennardJonesMixture, NobleGas
from adjsim.potentials.pair import PairPotential
from adjsim.potentials.radial import RadialPotential
from adjsim.potentials.signals import CubicSpline, Harmonics, PiecewiseLinear, Signal
from adjsim.potentials.solvent import GeneralizedBorn
from adjsim.potentials.tail import tail_corrections
from adjsim.potentials.truncation import ForceShifted, Shifted, Switched, Truncation
from adjsim.potentials.wca import WCA
from adjsim.potentials.yukawa import Yukawa

__all__ = [
    "NOBLE_GASES",
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
    "force",
    "kong",
    "lorentz_berthelot",
    "tail_corrections",
]
