"""Gradients of expectations."""

from adjsim.estimators.base import Estimator, GradientEstimate, Simulation
from adjsim.estimators.pathwise import Pathwise

__all__ = ["Estimator", "GradientEstimate", "Pathwise", "Simulation"]
