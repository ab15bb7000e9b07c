"""Solvers: ways to integrate the dynamics."""

from adjsim.solvers.coupled import Coupled
from adjsim.solvers.euler_maruyama import EulerMaruyama, LeimkuhlerMatthews
from adjsim.solvers.implicit import BackwardEuler, ImplicitMidpoint
from adjsim.solvers.milstein import Milstein
from adjsim.solvers.ode import ODESolver
from adjsim.solvers.reversible_heun import ReversibleHeun
from adjsim.solvers.runge_kutta import RungeKutta
from adjsim.solvers.sde import InstabilityError, SDESolver
from adjsim.solvers.splitting import BAOAB, Splitting, VelocityVerlet
from adjsim.solvers.step_sizes import Adaptive, StepTimes
from adjsim.solvers.stochastic_heun import StochasticHeun
from adjsim.solvers.tableaus import Tableau

__all__ = [
    "BAOAB",
    "Adaptive",
    "BackwardEuler",
    "Coupled",
    "EulerMaruyama",
    "ImplicitMidpoint",
    "InstabilityError",
    "LeimkuhlerMatthews",
    "Milstein",
    "ODESolver",
    "ReversibleHeun",
    "RungeKutta",
    "SDESolver",
    "Splitting",
    "StepTimes",
    "StochasticHeun",
    "Tableau",
    "VelocityVerlet",
]
