"""Runs backwards in time, as runs of the mirrored equation forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjsim.core.brownian_path import BrownianPath
from adjsim.core.noise import Noise
from adjsim.core.refusal import Refusal
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.fields.sde import SDE


def mirrored(
    dynamics: Dynamics[Any], noise: Noise | BrownianPath | None, solver: Any, times: Tensor
) -> tuple[Dynamics[Any], BrownianPath | None]:
    """Return the dynamics and the path whose run over the times -t is that over decreasing t.

    The increment of a Stratonovich equation over a step back is minus that over the same step
    forward, so it is solved on the path W(-t). The equation of Ito has another drift backwards.
    """
    back = dynamics.in_reverse()
    if isinstance(back, Refusal):
        raise ValueError(
            f"ts decrease, and {back.reason} for {type(dynamics).__name__}; got ts[0] = "
            f"{float(times[0]):g} and ts[1] = {float(times[1]):g}. Times may decrease for an ODE, "
            "and for an SDE on a BrownianPath."
        )
    if not dynamics.stochastic:
        return back, None
    if not isinstance(noise, BrownianPath):
        raise ValueError(
            "ts decrease, and noise of a seed belongs to steps, which have no order back: give "
            "generator=BrownianPath(seed, tol), whose noise belongs to times."
        )
    if solver.of_ito and not (isinstance(dynamics, SDE) and dynamics.noise == "additive"):
        raise ValueError(
            f"ts decrease, and {solver!r} solves the equation of Ito, whose solution does not "
            "solve it backwards: use StochasticHeun(dt) or ReversibleHeun(dt)."
        )
    return back, noise.reversed()
