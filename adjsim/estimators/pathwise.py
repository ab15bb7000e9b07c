"""The pathwise gradient: differentiation through the run."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.adjoints.base import Adjoint
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.adjoints.reversible import ReversibleAdjoint
from adjsim.core.noise import Noise
from adjsim.core.state import State, detached
from adjsim.core.trajectory import (
    Final,
    TimeAverage,
    Trajectory,
    check_times,
    first_averaged_step,
    step_numbers,
)
from adjsim.estimators.base import (
    Chunk,
    ChunkedEstimator,
    Observable,
    Simulation,
    checked,
    jacobian,
    mean_and_stderr,
    observe,
)
from adjsim.simulation.simulate import run
from adjsim.solvers.base import SteppingSolver


class Pathwise(ChunkedEstimator):
    """The pathwise gradient ``d<O>/dtheta = <dO/dtheta>``, with noise and start held fixed.

    It answers the path question, with little variance at short times. In a chaotic system the
    gradient of a single path grows as exp(lambda T) while the gradient of the mean does not. Beyond
    a few Lyapunov times its variance makes it useless, even if the gradient of each path is exact.

    ``diagnostics["growth"]`` is the rate lambda. It comes from the derivative of the observable
    with respect to the start, divided by the derivative with respect to the end, as a root mean
    square over replicas. It is positive where neighbouring paths of some replicas diverge.
    ``diagnostics["lost_at"]`` is the time at which, at this rate, the standard error becomes as
    large as the gradient. If only rare paths diverge, as at a barrier, they carry the gradient, and
    no diagnostic of a batch without such a path shows that it is missing. :class:`Girsanov` does
    not have this weakness.

    Args:
        adjoint: how each path is differentiated.
        truncate: length of the backward sweep, a time that is a multiple of dt. With a
            :class:`Final`, parameters act only through the last part of the run, of this length.
            With a :class:`TimeAverage` the run is cut into parts of this length, and parameters act
            only within each part. This bounds the growth and changes the question: effects that
            last longer are left out, and the error bar does not contain them. The estimate carries
            a warning.
    """

    estimand: ClassVar[str] = "path"

    def __init__(
        self, adjoint: Adjoint = DirectAdjoint(), *, truncate: float | None = None
    ) -> None:
        if truncate is not None and not truncate > 0:
            raise ValueError(f"truncate must be a positive time; got {truncate}.")
        self.adjoint, self.truncate = adjoint, truncate

    def can_compile(self, simulation: Simulation[State]) -> bool:
        """Return whether forward run and backward sweep can be compiled."""
        solver, undone = simulation.solver, isinstance(self.adjoint, ReversibleAdjoint)
        return (
            isinstance(solver, SteppingSolver)
            and isinstance(solver, self.adjoint.accepts)
            and solver.supports_compiling(simulation.dynamics, undone=undone) is None
        )

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        if self.truncate is None:
            return
        if not isinstance(simulation.solver, SteppingSolver):
            raise TypeError(
                "truncate is for solvers of a fixed step, not for "
                f"{type(simulation.solver).__name__}."
            )
        if not isinstance(observable, TimeAverage | Final):
            raise TypeError(
                "truncate is for Final(fn) and TimeAverage(fn), which can be computed in parts."
            )
        step_numbers(torch.tensor([0.0, self.truncate], dtype=torch.float64), simulation.solver.dt)

    def chunk(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        start: State,
        noise: Noise | None,
    ) -> Chunk:
        parameters = simulation.dynamics.trainable()
        with torch.enable_grad():
            begin = type(start)._make(x.detach().requires_grad_() for x in start)
            if self.truncate is None:
                values, trajectory = observe(simulation, observable, begin, self.adjoint, noise)
                final, runs = trajectory.final, [trajectory.stats]
            else:
                values, final, runs = self._truncated_run(simulation, observable, begin, noise)
            mean = values.mean(0)
        found = jacobian(mean, {**parameters, "": begin[0]})
        growth, in_state = self._growth(observable, found.pop(""), detached(final))
        # An observable of parameters alone is smooth. A step function times a parameter is not: its
        # derivative through the state is missing.
        parameters_only = mean.requires_grad and bool((values == values[:1]).all())
        smooth = parameters_only or (mean.requires_grad if in_state is None else in_state)
        errors = [e for stats in runs if (e := stats.get("reconstruction_error")) is not None]
        stats = {
            "energy_evaluations": sum(stats["energy_evaluations"] for stats in runs),
            "reconstruction_error": max(errors) if errors else None,
            "pairs": runs[0].get("pairs"),
        }
        return Chunk(mean.detach(), found, stats, (growth, smooth, len(runs) > 1))

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        duration = simulation.duration
        squares = [
            (part.extra[0], n)
            for part, n in zip(parts, sizes, strict=True)
            if part.extra[0] is not None
        ]
        found: dict[str, Any] = {
            "duration": duration,
            "growth": None,
            # None where a run is no longer, and nothing was cut off.
            "truncate": self.truncate if parts[0].extra[2] else None,
            "lost_at": None,
        }
        found["smooth"] = all(part.extra[1] for part in parts)
        if not squares or self.truncate is not None:
            return found
        square = sum(n * x for x, n in squares) / sum(n for _, n in squares)
        found["growth"] = growth = 0.5 * math.log(square) / duration
        ratios = []
        for name in parts[0].grad:
            grad, stderr = mean_and_stderr([part.grad[name] for part in parts], sizes)
            ratios.append(float(grad.norm() / stderr.norm()))
        known = [ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0]
        if growth > 0 and known:
            found["lost_at"] = max(0.0, duration + math.log(min(known)) / growth)
        return found

    @staticmethod
    def _growth(
        observable: Observable[State], at_start: Tensor, final: State
    ) -> tuple[float | None, bool | None]:
        """Compute the growth of derivatives from end to start, and the observable's smoothness.

        The growth is the mean square over replicas, since the few paths that diverge make up the
        variance. The smoothness is whether the observable has a derivative with respect to the
        state, None where this is unknown.
        """
        if not isinstance(observable, TimeAverage | Final):
            return None, None
        with torch.enable_grad():
            leaves = type(final)._make(x.requires_grad_() for x in final)
            ends = observable.function(leaves)
            if not ends.requires_grad:
                return None, False
            slopes = torch.autograd.grad(ends.mean(0).sum(), list(leaves), allow_unused=True)
        at_end = dict(zip(final._fields, slopes, strict=True))[final._fields[0]]
        if at_end is None:
            return None, any(slope is not None for slope in slopes)
        axes = list(range(at_start.ndim - at_end.ndim))
        whole = (at_start.sum(axes) if axes else at_start).flatten(1).norm(dim=1)
        ratio = whole / at_end.flatten(1).norm(dim=1)
        square = float(ratio[torch.isfinite(ratio)].square().mean())
        return (square if square > 0 else None), True

    def _truncated_run(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        state: State,
        noise: Noise | None,
    ) -> tuple[Tensor, State, list[dict[str, Any]]]:
        """Run with the graph cut at the start of the last or of every part.

        Returns the observable, the final state, and the stats of the parts.
        """
        assert isinstance(simulation.solver, SteppingSolver)
        assert self.truncate is not None
        times, dt = check_times(simulation.ts), simulation.solver.dt
        last, width = step_numbers(times, dt)[-1], round(self.truncate / dt)
        runs: list[dict[str, Any]] = []

        def part(
            state: State, first: int, stop: int, record: TimeAverage | None = None
        ) -> Trajectory[State]:
            span = [float(times[0]) + first * dt, float(times[0]) + stop * dt]
            shifted = None if noise is None else Noise(noise.seed, noise.first, first)
            made = run(
                simulation.dynamics,
                detached(state),
                span,
                simulation.solver,
                self.adjoint,
                record,
                shifted,
                compile=simulation.compile,
            )
            runs.append(made.stats)
            return made

        if isinstance(observable, Final):
            if last > width:
                with torch.no_grad():
                    state = part(state, 0, last - width).final
            final = part(state, max(0, last - width), last).final
            values = observable.function(final)
        else:
            assert isinstance(observable, TimeAverage)
            begin = first_averaged_step(observable.burn_in, dt, last) - 1
            if begin > 0:
                with torch.no_grad():
                    state = part(state, 0, begin).final
            total = torch.zeros(())
            for first in range(begin, last, width):
                stop = min(first + width, last)
                piece = part(state, first, stop, TimeAverage(observable.function))
                assert piece.record is not None
                total, state = total + piece.record * (stop - first), piece.final
            values, final = total / (last - begin), state
        return checked(values, state), final, runs

    def __repr__(self) -> str:
        cut = "" if self.truncate is None else f", truncate={self.truncate:g}"
        return f"Pathwise({self.adjoint!r}{cut})"
