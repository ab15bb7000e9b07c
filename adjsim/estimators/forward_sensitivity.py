"""Forward sensitivity: forward-mode differentiation of the run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.state import State
from adjsim.estimators.base import Chunk, ChunkedEstimator, joined_stats, stacked
from adjsim.estimators.replicas import Observable, Replicas, Simulation


class ForwardSensitivity(ChunkedEstimator):
    """The pathwise gradient in forward mode: the run propagates the tangent of the state.

    It equals :class:`Pathwise` to rounding. Every entry of every parameter costs one run, with the
    memory of a run without a gradient. Additional observables along the run are free. Use it for
    few parameters and many observables, such as a whole curve in time, and :class:`Pathwise` for
    many parameters.

    Raises:
        TypeError: exact steps, which have no forward derivative.
    """

    estimand = "path"
    compilable: ClassVar[bool] = False

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        if getattr(simulation.solver, "exact", False):
            raise TypeError(
                "ForwardSensitivity is not for exact=True, which has no forward derivative; "
                "use Pathwise."
            )
        simulation.refuse_captured_force("ForwardSensitivity")

    def chunk(self, replicas: Replicas[State]) -> Chunk:
        plain = replace(replicas, simulation=replace(replicas.simulation, compile=False))
        runs: list[dict[str, Any]] = []
        trainable = replicas.simulation.dynamics.trainable()
        parameters = {name: p.detach() for name, p in trainable.items()}
        mean, value = partial(plain.mean_at, costs=runs), None
        columns: dict[str, list[Tensor]] = {name: [] for name in parameters}
        for name, p in parameters.items():
            for i in range(p.numel()):
                along = {key: torch.zeros_like(x) for key, x in parameters.items()}
                along[name].reshape(-1)[i] = 1.0
                value, column = torch.func.jvp(mean, (parameters,), (along,))[:2]
                columns[name].append(column.detach())
        value = (plain.mean_at({}, runs) if value is None else value).detach()
        grads = {name: stacked(columns[name], value, p) for name, p in parameters.items()}
        return Chunk(value, grads, joined_stats(runs))
