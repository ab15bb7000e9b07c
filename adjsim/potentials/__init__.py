"""Potentials: energy functions and their forces."""

from adjsim.core.declared import declared as declared
from adjsim.core.rounding import UNROUNDED as UNROUNDED, Rounding as Rounding
from adjsim.potentials.analytic import (
    AsymmetricDoubleWell,
    DoubleWell,
    Harmonic,
    MullerBrown,
    SeparablePotential as SeparablePotential,
)
from adjsim.potentials.base import (
    ForceField,
    Potential as Potential,
    SumForce as SumForce,
    SumPotential as SumPotential,
    force,
)
from adjsim.potentials.bonded.base import BondedPotential as BondedPotential
from adjsim.potentials.bonded.bonds_and_angles import (
    CosineAngle,
    HarmonicAngle,
    HarmonicBond,
    MorseBond,
    UreyBradley,
)
from adjsim.potentials.bonded.centroids import CustomCentroid as CustomCentroid
from adjsim.potentials.bonded.compound import (
    CompoundTerm as CompoundTerm,
    CustomCompound as CustomCompound,
    CustomExternal as CustomExternal,
)
from adjsim.potentials.bonded.custom import (
    CustomAngle as CustomAngle,
    CustomBond as CustomBond,
    CustomTerm as CustomTerm,
    CustomTorsion as CustomTorsion,
)
from adjsim.potentials.bonded.hydrogen_bonds import CustomHydrogenBond as CustomHydrogenBond
from adjsim.potentials.bonded.maps import TorsionMap
from adjsim.potentials.bonded.pairs import ExplicitPairs, ScaledPairs
from adjsim.potentials.bonded.restraints import FlatBottomRestraint, PositionRestraint
from adjsim.potentials.bonded.tabulated import (
    ContinuousFunction as ContinuousFunction,
    DiscreteFunction as DiscreteFunction,
    TabulatedFunction as TabulatedFunction,
)
from adjsim.potentials.bonded.torsions import HarmonicImproper, PeriodicTorsion, RyckaertBellemans
from adjsim.potentials.charges.coulomb import Coulomb, ReactionField, Wolf
from adjsim.potentials.charges.ewald import (
    Ewald,
    LennardJonesMesh as LennardJonesMesh,
    ParticleMeshEwald,
)
from adjsim.potentials.contact.base import (
    Contact,
    MovingContact,
    PlaneContact,
    SurfaceContact as SurfaceContact,
)
from adjsim.potentials.contact.particles import ParticleContact
from adjsim.potentials.contact.penalties import Barrier, Penalty as Penalty, Quadratic, Softplus
from adjsim.potentials.contact.surfaces import (
    Box as Box,
    Cylinder as Cylinder,
    Inside as Inside,
    Moving as Moving,
    Plane as Plane,
    Sphere as Sphere,
    Surface as Surface,
)
from adjsim.potentials.expressions import Expression as Expression
from adjsim.potentials.force_field import ForceFieldPotential as ForceFieldPotential
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.learnt.graph import GraphForce as GraphForce, GraphPotential
from adjsim.potentials.learnt.mace import MACEPotential as MACEPotential
from adjsim.potentials.learnt.networks import (
    ForceModel as ForceModel,
    MessagePassing as MessagePassing,
    PairNetwork as PairNetwork,
    RadialBasis as RadialBasis,
)
from adjsim.potentials.learnt.precision import InPrecision as InPrecision
from adjsim.potentials.pairs.base import PairPotential as PairPotential
from adjsim.potentials.pairs.custom import CustomPairs as CustomPairs
from adjsim.potentials.pairs.noble import (
    NOBLE_GASES as NOBLE_GASES,
    LennardJonesMixture,
    NobleGas as NobleGas,
    kong as kong,
    lorentz_berthelot as lorentz_berthelot,
)
from adjsim.potentials.pairs.powers import WCA, LennardJones, Mie, SoftSphere
from adjsim.potentials.pairs.radial import (
    Buckingham,
    GaussianCore,
    Morse,
    RadialPotential as RadialPotential,
    Yukawa,
)
from adjsim.potentials.pairs.tail import tail_corrections as tail_corrections
from adjsim.potentials.pairs.truncation import (
    ForceShifted as ForceShifted,
    Shifted as Shifted,
    Switched as Switched,
    Truncation as Truncation,
)
from adjsim.potentials.signals.actuated import Actuated
from adjsim.potentials.signals.controls import Controller, NeuralController, OpenLoop
from adjsim.potentials.signals.signals import (
    CubicSpline,
    Harmonics,
    PiecewiseLinear,
    Signal as Signal,
)
from adjsim.potentials.sites.force_field import SitedForceField as SitedForceField
from adjsim.potentials.sites.groups import (
    AverageSites as AverageSites,
    LocalCoordinatesSites as LocalCoordinatesSites,
    OutOfPlaneSites as OutOfPlaneSites,
)
from adjsim.potentials.sites.virtual_sites import VirtualSites as VirtualSites
from adjsim.potentials.solids.base import ElasticPotential as ElasticPotential
from adjsim.potentials.solids.bending import HingeBending
from adjsim.potentials.solids.materials import CorotatedLinear, NeoHookean, StVenantKirchhoff
from adjsim.potentials.solvent import (
    CustomSolvent as CustomSolvent,
    GeneralizedBorn,
    Necks as Necks,
    Stage as Stage,
)

__all__ = [
    "WCA",
    "Actuated",
    "AsymmetricDoubleWell",
    "Barrier",
    "Buckingham",
    "Contact",
    "Controller",
    "CorotatedLinear",
    "CosineAngle",
    "Coulomb",
    "CubicSpline",
    "DoubleWell",
    "Ewald",
    "ExplicitPairs",
    "FlatBottomRestraint",
    "ForceField",
    "GaussianCore",
    "GeneralizedBorn",
    "GraphPotential",
    "Gravity",
    "Harmonic",
    "HarmonicAngle",
    "HarmonicBond",
    "HarmonicImproper",
    "Harmonics",
    "HingeBending",
    "LennardJones",
    "LennardJonesMixture",
    "Mie",
    "Morse",
    "MorseBond",
    "MovingContact",
    "MullerBrown",
    "NeoHookean",
    "NeuralController",
    "OpenLoop",
    "ParticleContact",
    "ParticleMeshEwald",
    "PeriodicTorsion",
    "PiecewiseLinear",
    "PlaneContact",
    "PositionRestraint",
    "Quadratic",
    "ReactionField",
    "RyckaertBellemans",
    "ScaledPairs",
    "SoftSphere",
    "Softplus",
    "StVenantKirchhoff",
    "TorsionMap",
    "UreyBradley",
    "Wolf",
    "Yukawa",
    "force",
]
