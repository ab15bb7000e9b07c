"""SciPy's initial value solver with gradients."""

from adjsim.ivp.events import GrazingError
from adjsim.ivp.solve import OdeResult, solve_ivp

__all__ = ["GrazingError", "OdeResult", "solve_ivp"]
