"""The interface of adjoints, which run a simulation so that its result can be differentiated."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from copy import copy
from typing import Any, ClassVar

from torch import Tensor

from adjsim.core.run_report import RunReport
from adjsim.core.state import State
from adjsim.core.trajectory import RunEnd
from adjsim.dynamics.clip import Clip
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.continuous.base import ContinuousSolver
from adjsim.solvers.run import Run

Result = tuple[State | None, Tensor | None, State, RunEnd | None]


class ReconstructionError(RuntimeError):
    """Raised when the backward sweep does not recover the stored states of its run."""


class Adjoint(ABC):
    """A method to compute a gradient, combined with solvers of the classes ``accepts``."""

    accepts: ClassVar[tuple[type, ...]] = (SteppingSolver, ContinuousSolver)
    # The bound of the cotangents of a backward sweep over steps.
    clip: Clip | None = None
    # Whether autograd's graph has every operation of an uncompiled run.
    keeps_graph: ClassVar[bool] = False

    @abstractmethod
    def run(self, run: Run[State], report: RunReport) -> Result[State]:
        """Run the simulation, report what it costs, and return its differentiable results.

        They are the frames (None with a record), the record (or None), the final state, and the end
        of the run (None without fixed steps).
        """

    def clipped(self, clip: Clip) -> Adjoint:
        """Return a copy whose backward sweep clips cotangents."""
        found = copy(self)
        if math.isfinite(clip.norm):
            found.clip = clip
        return found

    def check(self, run: Run[State]) -> None:
        """Refuse, before the run, one that this adjoint does not support."""
        return

    def __repr__(self) -> str:
        settings: dict[str, Any] = vars(self)
        given = [f"{name}={value}" for name, value in settings.items() if value is not None]
        return f"{type(self).__name__}({', '.join(given)})"
