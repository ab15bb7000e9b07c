"""SciPy's initial value problem solver, with gradients."""

from adjsim.ivp.events import GrazingError
from adjsim.ivp.piecewise import DenseSolution as DenseSolution, OdeResult
from adjsim.ivp.solve import solve_ivp

__all__ = [
    "GrazingError",
    "OdeResult",
    "solve_ivp",
]
