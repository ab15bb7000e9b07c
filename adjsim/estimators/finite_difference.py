"""Central differences on common random numbers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim._inputs import as_number
from adjsim._module import exclusive
from adjsim._noise import Noise
from adjsim._state import State
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.estimators.base import Chunk, ChunkedEstimator, Observable, Simulation, observe, stacked


class FiniteDifference(ChunkedEstimator):
    """Central differences ``(O(theta + step) - O(theta - step)) / 2 step`` on common noise.

    Every run has the same starts and the same noise. It answers the path question, and only
    evaluates the observable and the force. It costs two runs for every entry of every parameter.
    Where single paths depend smoothly on the parameter, it has the variance of the pathwise
    gradient and an error of step^2. Where they do not (chaos, discontinuous observables), its
    variance grows as the step shrinks, so use a larger step there.

    The shifted values are written into the parameter, and the former values are restored, while no
    other thread runs the dynamics. So a force or an observable that reads the parameter behind
    ``float()`` or ``detach()`` gets the shifted values too.

    Args:
        h: the step, relative to the size of the entry (absolute for an entry that is zero).
    """

    estimand: ClassVar[str] = "path"

    def __init__(self, h: float = 1e-3) -> None:
        h = as_number("h", h)
        if not h > 0:
            raise ValueError(f"h must be positive; got {h}.")
        self.h = h

    @torch.no_grad()
    def chunk(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        start: State,
        noise: Noise | None,
    ) -> Chunk:
        evaluations, pairs = 0, None

        def mean() -> Tensor:
            nonlocal evaluations, pairs
            values, trajectory = observe(simulation, observable, start, DirectAdjoint(), noise)
            evaluations += trajectory.stats["energy_evaluations"]
            pairs = trajectory.stats.get("pairs")
            return values.mean(0)

        value = mean()
        grads: dict[str, Tensor] = {}
        for name, parameter in simulation.dynamics.trainable().items():
            entries, columns = parameter.detach().reshape(-1), []
            for i, entry in enumerate(entries.tolist()):
                step, ends = self.h * (abs(entry) or 1.0), []
                for sign in (1, -1):
                    shifted = entries.clone()
                    shifted[i] += sign * step
                    with (
                        exclusive(simulation.dynamics),
                        _TemporaryValue(parameter, shifted.reshape(parameter.shape)),
                    ):
                        ends.append(mean())
                columns.append((ends[0] - ends[1]) / (2 * step))
            grads[name] = stacked(columns, value, parameter)
        return Chunk(value, grads, {"energy_evaluations": evaluations, "pairs": pairs})

    def __repr__(self) -> str:
        return f"FiniteDifference(h={self.h:g})"


class _TemporaryValue:
    """A context manager that gives a parameter another value."""

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        self.parameter, self.value = parameter, value

    def __enter__(self) -> None:
        self.before = self.parameter.detach().clone()
        self.parameter.data.copy_(self.value)

    def __exit__(self, *_: Any) -> None:
        self.parameter.data.copy_(self.before)
