"""Learnt energies and forces: networks of pairs and of graphs, and adapters of models."""

from adjsim.potentials.learnt.graph import GraphForce, GraphPotential
from adjsim.potentials.learnt.mace import MACEPotential
from adjsim.potentials.learnt.networks import (
    ForceModel,
    InPrecision,
    MessagePassing,
    PairNetwork,
    RadialBasis,
)

__all__ = [
    "ForceModel",
    "GraphForce",
    "GraphPotential",
    "InPrecision",
    "MACEPotential",
    "MessagePassing",
    "PairNetwork",
    "RadialBasis",
]
