"""What every adjoint is: a way to run a problem so that its result can be differentiated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim._state import State
from adjsim.solvers.base import Problem, SteppingSolver
from adjsim.solvers.continuous import ContinuousSolver

Result = tuple[State | None, Tensor | None, State]


class ReconstructionError(RuntimeError):
    """Going back along a run did not give back what was stored of it."""


def refuse_graph() -> None:
    """Called in a backward that has no graph of its own: refuse to be part of one."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this gradient was swept backward in constant memory and has no graph of its own, so it cannot be "
            "differentiated again (create_graph=True, double backward, torch.func). Use DirectAdjoint() for that."
        )


class Adjoint(ABC):
    """How a gradient is taken. ``accepts`` lists the kinds of solver it goes with."""

    accepts: ClassVar[tuple[type, ...]] = (SteppingSolver, ContinuousSolver)

    @abstractmethod
    def run(self, problem: Problem) -> Result:
        """Frames (None if recorded), record (None if not) and final state, connected to autograd."""

    def check(self, problem: Problem) -> None:
        """Refuse, before any work, a problem this adjoint cannot take."""
        return

    def __repr__(self) -> str:
        settings: dict[str, Any] = vars(self)
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in settings.items() if v is not None)})"
