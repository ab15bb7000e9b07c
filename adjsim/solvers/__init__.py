"""How the dynamics is integrated."""

from adjsim.solvers.ode import ODESolver
from adjsim.solvers.splitting import Splitting, VelocityVerlet

__all__ = ["ODESolver", "Splitting", "VelocityVerlet"]
