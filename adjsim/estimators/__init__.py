"""Gradients of expectations."""

from adjsim.estimators.base import Estimator as Estimator
from adjsim.estimators.chaos.lyapunov import LyapunovSpectrum, lyapunov_spectrum
from adjsim.estimators.chaos.shadowing import Shadowing
from adjsim.estimators.estimate import GradientEstimate
from adjsim.estimators.finite_difference import FiniteDifference
from adjsim.estimators.forward_sensitivity import ForwardSensitivity
from adjsim.estimators.girsanov import Girsanov
from adjsim.estimators.pathwise import Pathwise
from adjsim.estimators.replicas import Simulation
from adjsim.estimators.reweighting import Reweighting
from adjsim.estimators.score_function import REINFORCE, ScoreFunction

__all__ = [
    "REINFORCE",
    "FiniteDifference",
    "ForwardSensitivity",
    "Girsanov",
    "GradientEstimate",
    "LyapunovSpectrum",
    "Pathwise",
    "Reweighting",
    "ScoreFunction",
    "Shadowing",
    "Simulation",
    "lyapunov_spectrum",
]
