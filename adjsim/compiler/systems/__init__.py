"""Small dense linear systems in compiled loops: their solution, and the signs of eigenvalues."""

from adjsim.compiler.systems.operators import (
    has_negative_eigenvalue,
    has_negative_eigenvalue_if,
    solve,
)
from adjsim.compiler.systems.printing import LARGEST, NegativeEigenvalueCall, SolveCall

__all__ = [
    "LARGEST",
    "NegativeEigenvalueCall",
    "SolveCall",
    "has_negative_eigenvalue",
    "has_negative_eigenvalue_if",
    "solve",
]
