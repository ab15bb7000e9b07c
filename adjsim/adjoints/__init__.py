"""Adjoints: methods to compute the gradient of a simulation."""

from adjsim.adjoints.backsolve import BacksolveAdjoint
from adjsim.adjoints.base import Adjoint as Adjoint, ReconstructionError
from adjsim.adjoints.checkpoint import CheckpointAdjoint
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.adjoints.reversible import ReversibleAdjoint
from adjsim.compiler import CompileError

__all__ = [
    "BacksolveAdjoint",
    "CheckpointAdjoint",
    "CompileError",
    "DirectAdjoint",
    "ReconstructionError",
    "ReversibleAdjoint",
]
