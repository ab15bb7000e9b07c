"""The pathwise gradient: differentiate the run itself."""

from __future__ import annotations

import time
from typing import ClassVar

import torch
from torch import Tensor

from adjsim._noise import Noise, seed_from
from adjsim._state import State, select
from adjsim._trajectory import Final, TimeAverage, Trajectory
from adjsim.adjoints.base import Adjoint
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.estimators.base import (
    Estimator,
    GradientEstimate,
    Observable,
    Simulation,
    chunk_slices,
    mean_and_stderr,
)
from adjsim.estimators.memory import PeakMemory
from adjsim.simulation import run


class Pathwise(Estimator):
    """``d<O>/dtheta = <dO/dtheta>`` along each path, its noise and its start held fixed, by any adjoint.

    It answers the path question, with little variance at short times. In a chaotic system the gradient of a single path
    grows as exp(lambda T) while that of the mean does not: beyond a few Lyapunov times its variance makes it useless, however
    exact each path's gradient is.

    Args:
        adjoint: how each path is differentiated.
    """

    estimand: ClassVar[str] = "path"

    def __init__(self, adjoint: Adjoint = DirectAdjoint()) -> None:
        self.adjoint = adjoint

    def __call__(
        self,
        simulation: Simulation,
        observable: Observable,
        *,
        replicas: int,
        chunks: int = 16,
        generator: torch.Generator | None = None,
    ) -> GradientEstimate:
        starts = simulation.starts(replicas, generator)
        seed = seed_from(generator) if simulation.dynamics.stochastic else None
        parameters = simulation.dynamics.trainable()
        values, grads, sizes = [], [], []
        stats: dict[str, float | None] = {"energy_evaluations": 0, "reconstruction_error": None}
        with PeakMemory(starts.position.device) as memory:
            begun = time.perf_counter()
            for part in chunk_slices(replicas, chunks):
                noise = None if seed is None else Noise(seed, part.start)
                value, grad, trajectory = self._chunk(simulation, observable, select(starts, part), parameters, noise)
                values.append(value)
                grads.append(grad)
                sizes.append(part.stop - part.start)
                stats["energy_evaluations"] += trajectory.stats["energy_evaluations"]  # type: ignore[operator]
                error = trajectory.stats.get("reconstruction_error")
                if error is not None:
                    stats["reconstruction_error"] = max(stats["reconstruction_error"] or 0.0, error)
                del trajectory
            seconds = time.perf_counter() - begun
        value, value_stderr = mean_and_stderr(values, sizes)
        pairs = {name: mean_and_stderr([g[name] for g in grads], sizes) for name in parameters}
        return GradientEstimate(
            value,
            value_stderr,
            {name: pair[0] for name, pair in pairs.items()},
            {name: pair[1] for name, pair in pairs.items()},
            self.estimand,
            {**stats, "seconds": seconds, "peak_memory": memory.bytes, "ess": float(replicas)},
        )

    def _chunk(
        self,
        simulation: Simulation,
        observable: Observable,
        state: State,
        parameters: dict[str, Tensor],
        noise: Noise | None,
    ) -> tuple[Tensor, dict[str, Tensor], Trajectory]:
        with torch.enable_grad():
            record = observable if isinstance(observable, TimeAverage) else None
            trajectory = run(simulation.dynamics, state, simulation.ts, simulation.solver, self.adjoint, record, noise)
            values = _observe(observable, trajectory)
            count = state.position.shape[0]
            if values.shape[:1] != (count,):
                raise ValueError(
                    f"the observable has shape {tuple(values.shape)}; its leading axis must be the {count} replicas."
                )
            mean = values.mean(0)
        return mean.detach(), _jacobian(mean, parameters), trajectory

    def __repr__(self) -> str:
        return f"Pathwise({self.adjoint!r})"


def _observe(observable: Observable, trajectory: Trajectory) -> Tensor:
    if isinstance(observable, TimeAverage):
        assert trajectory.record is not None
        return trajectory.record
    if isinstance(observable, Final):
        return observable.function(trajectory.final)
    return observable(trajectory)


def _jacobian(mean: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The derivative of each entry of the mean, by parameter; zero where it does not depend on one."""
    if not parameters or not mean.requires_grad:
        return {name: torch.zeros((*mean.shape, *p.shape), dtype=p.dtype) for name, p in parameters.items()}
    wanted = list(parameters.values())
    rows: list[list[Tensor]] = []
    entries = mean.reshape(-1)
    for i, entry in enumerate(entries):
        found = torch.autograd.grad(entry, wanted, retain_graph=i + 1 < len(entries), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, wanted, strict=True)])
    columns = zip(*rows, strict=True)
    return {
        name: torch.stack(column).reshape((*mean.shape, *p.shape))
        for (name, p), column in zip(parameters.items(), columns, strict=True)
    }
