"""Central differences on common random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_positive
from adjsim.core.state import State
from adjsim.estimators.base import Chunk, ChunkedEstimator, joined_stats, stacked
from adjsim.estimators.replicas import Observable, Replicas, Simulation


class FiniteDifference(ChunkedEstimator):
    """Central differences ``(O(theta + step) - O(theta - step)) / 2 step`` on common noise.

    Every run has the same starts and the same noise. It answers the path question, and only
    evaluates the observable and the force. It costs two runs for every entry of every parameter.
    Where single paths depend smoothly on the parameter, it has the variance of the pathwise
    gradient and an error of step^2. Where they do not (chaos, discontinuous observables), its
    variance grows as the step shrinks, so use a larger step there.

    Each run has a copy of the dynamics with the shifted value. An observable that names the
    dynamics or the parameter reads the shifted value too, also behind ``float()`` or ``detach()``.

    Args:
        h: the step, relative to the size of the entry (absolute for an entry that is zero).
    """

    estimand = "path"

    def __init__(self, h: float = 1e-3) -> None:
        self.h = as_positive("h", h)

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        simulation.refuse_captured_force("FiniteDifference")

    @torch.no_grad()
    def chunk(self, replicas: Replicas[State]) -> Chunk:
        runs, grads = list[dict[str, Any]](), dict[str, Tensor]()
        value = replicas.mean_at({}, runs)
        for name, parameter in replicas.simulation.dynamics.trainable().items():
            entries, columns = parameter.detach().reshape(-1), []
            for i, entry in enumerate(entries.tolist()):
                step, ends = self.h * (abs(entry) or 1.0), []
                for sign in (1, -1):
                    shifted = entries.clone()
                    shifted[i] += sign * step
                    ends.append(replicas.mean_at({name: shifted.reshape(parameter.shape)}, runs))
                columns.append((ends[0] - ends[1]) / (2 * step))
            grads[name] = stacked(columns, value, parameter)
        return Chunk(value, grads, joined_stats(runs))

    def __repr__(self) -> str:
        return f"FiniteDifference(h={self.h:g})"
