"""Solvers: ways to integrate the dynamics."""

from adjsim.core.tableaus import Tableau
from adjsim.solvers.continuous.ode import ODESolver
from adjsim.solvers.continuous.sde import InstabilityError, SDESolver
from adjsim.solvers.implicit.steps import BackwardEuler, ImplicitMidpoint
from adjsim.solvers.reversible.coupled import Coupled
from adjsim.solvers.reversible.reversible_heun import ReversibleHeun
from adjsim.solvers.runge_kutta.adaptive_steps import Adaptive, StepTimes
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta
from adjsim.solvers.splitting import BAOAB, Splitting, VelocityVerlet
from adjsim.solvers.stochastic.euler_maruyama import EulerMaruyama, LeimkuhlerMatthews
from adjsim.solvers.stochastic.milstein import Milstein
from adjsim.solvers.stochastic.stochastic_heun import StochasticHeun

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
