"""Solvers: ways to integrate the dynamics."""

from adjsim.solvers.euler_maruyama import EulerMaruyama, LeimkuhlerMatthews
from adjsim.solvers.implicit import BackwardEuler, ImplicitMidpoint
from adjsim.solvers.ode import ODESolver
from adjsim.solvers.sde import InstabilityError, SDESolver
from adjsim.solvers.splitting import BAOAB, Splitting, VelocityVerlet

__all__ = [
    "BAOAB",
    "BackwardEuler",
    "EulerMaruyama",
    "ImplicitMidpoint",
    "InstabilityError",
    "LeimkuhlerMatthews",
    "ODESolver",
    "SDESolver",
    "Splitting",
    "VelocityVerlet",
]
