"""The pathwise gradient: differentiation through the run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.base import Adjoint
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.adjoints.reversible import ReversibleAdjoint
from adjsim.core.arguments import as_positive
from adjsim.core.norms import norm
from adjsim.core.state import State, detached
from adjsim.core.trajectory import TimeAverage, Trajectory, step_numbers
from adjsim.dynamics import Clip
from adjsim.estimators.base import Chunk, ChunkedEstimator, jacobian, joined_stats, mean_and_stderr
from adjsim.estimators.replicas import Observable, Replicas, Simulation, checked, state_function


class Pathwise(ChunkedEstimator):
    """The pathwise gradient ``d<O>/dtheta = <dO/dtheta>``, with noise and start held fixed.

    It answers the path question, with little variance at short times. In a chaotic system the
    gradient of a single path grows as exp(lambda T) while the gradient of the mean does not. Beyond
    a few Lyapunov times its variance makes it useless, even if the gradient of each path is exact.

    ``diagnostics["growth"]`` is the rate lambda, from the derivative of the observable with respect
    to the start over that with respect to the end, as a root mean square over replicas.
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
        clip: a :class:`~adjsim.Clip` of the cotangents of each replica's own observable, the
            practice of fits of force fields (Greener, Chem. Sci. 15, 4897 (2024): norm 0.1 every
            100 steps). It bounds the growth and changes the question: with c_k the factors of the
            clips, the effect of a parameter through step k is scaled by the product of all factors
            after step k::

                estimate = sum over k of lambda_k dPhi_k/dtheta
                bias     = sum over k of (lambda_k - lambda_k') dPhi_k/dtheta,  lambda_k' with c = 1

            The result is no derivative of any mean. The bias does not fall with the number of
            replicas, and no error bar contains it. Its estimand is its own, "clipped path".

    Raises:
        TypeError: a clip with a solver without fixed steps.
        ValueError: clip and truncate together.
    """

    def __init__(
        self,
        adjoint: Adjoint = DirectAdjoint(),
        *,
        truncate: float | None = None,
        clip: Clip | None = None,
    ) -> None:
        if clip is not None and truncate is not None:
            raise ValueError("clip and truncate both bound the gradient; give one of them.")
        self.adjoint, self.clip = adjoint, clip
        self.estimand = "path" if clip is None else "clipped path"
        self.truncate = None if truncate is None else as_positive("truncate", truncate)

    def can_compile(self, simulation: Simulation[State]) -> bool:
        """Return whether forward run and backward sweep can be compiled."""
        undone = isinstance(self.adjoint, ReversibleAdjoint)
        accepted = isinstance(simulation.solver, self.adjoint.accepts)
        return accepted and simulation.compiles(undone=undone)

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        if self.clip is not None:
            simulation.steps("clip")
        if self.truncate is None:
            return
        dt = simulation.steps("truncate").dt
        if isinstance(observable, TimeAverage):
            observable.refuse_stride("Pathwise with truncate")
        if state_function(observable) is None:
            raise TypeError(
                "truncate is for Final(fn) and TimeAverage(fn), which can be computed in parts."
            )
        step_numbers(torch.tensor([0.0, self.truncate], dtype=torch.float64), dt)

    def chunk(self, replicas: Replicas[State]) -> Chunk:
        parameters, start = replicas.simulation.dynamics.trainable(), replicas.start
        with torch.enable_grad():
            begin = type(start)._make(x.detach().requires_grad_() for x in start)
            runs: list[Trajectory[State]] = []
            values = self._run(replace(replicas, start=begin), runs)
            mean = values.mean(0)
        found = jacobian(mean, {**parameters, "": begin[0]})
        growth, in_state = _growth(replicas, found.pop(""), detached(runs[-1].final))
        # An observable of parameters alone is smooth. A step function times a parameter is not: its
        # derivative through the state is missing.
        parameters_only = mean.requires_grad and bool((values == values[:1]).all())
        smooth = parameters_only or (mean.requires_grad if in_state is None else in_state)
        stats = joined_stats([trajectory.stats for trajectory in runs])
        return Chunk(mean.detach(), found, stats, (growth, smooth, len(runs) > 1))

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        duration = simulation.duration
        found: dict[str, Any] = {
            "duration": duration,
            "growth": None,
            # None where a run is no longer, and nothing was cut off.
            "truncate": self.truncate if parts[0].extra[2] else None,
            "lost_at": None,
            "smooth": all(part.extra[1] for part in parts),
        }
        growths = zip([part.extra[0] for part in parts], sizes, strict=True)
        known = [(log, n) for log, n in growths if log is not None]
        if not known or self.truncate is not None or self.clip is not None:
            return found
        logs, counts = (torch.tensor(x, dtype=torch.float64) for x in zip(*known, strict=True))
        square = torch.logsumexp(logs + counts.log(), 0) - counts.sum().log()
        found["growth"] = growth = 0.5 * float(square) / duration
        ratios = []
        for name in parts[0].grad:
            grad, stderr = mean_and_stderr([part.grad[name] for part in parts], sizes)
            ratios.append(float(norm(grad) / norm(stderr)))
        ratios = [ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0]
        if growth > 0 and ratios:
            found["lost_at"] = max(0.0, duration + math.log(min(ratios)) / growth)
        return found

    def _run(self, replicas: Replicas[State], runs: list[Trajectory[State]]) -> Tensor:
        """Run, whole or in parts, append these, and return the observable."""
        if self.truncate is None:
            adjoint = self.adjoint
            if self.clip is not None:
                # The cotangents are those of the mean over the replicas of the chunk.
                norm = self.clip.norm / len(replicas.start[0])
                adjoint = adjoint.clipped(replace(self.clip, norm=norm))
            values, trajectory = replicas.observe(adjoint)
            runs.append(trajectory)
            return values
        steps, state = replicas.simulation.steps("truncate"), replicas.start
        last, width = steps.last, round(self.truncate / steps.dt)

        def part(first: int, stop: int, record: TimeAverage | None = None) -> Tensor | None:
            nonlocal state
            runs.append(replicas.span(detached(state), first, stop, self.adjoint, record))
            state = runs[-1].final
            return runs[-1].record

        function, average = replicas.function, replicas.average
        assert function is not None
        begin = max(0, last - width)
        if average is not None:
            begin = steps.averaged(average.burn_in)[0] - 1
        if begin > 0:
            with torch.no_grad():
                part(0, begin)
        if average is None:
            part(begin, last)
            return checked(function(state), state)
        total = torch.zeros(())
        for first in range(begin, last, width):
            stop = min(first + width, last)
            mean = part(first, stop, TimeAverage(function))
            assert mean is not None
            total = total + mean * (stop - first)
        return checked(total / (last - begin), state)

    def __repr__(self) -> str:
        cut = "" if self.truncate is None else f", truncate={self.truncate:g}"
        clip = "" if self.clip is None else f", clip={self.clip!r}"
        return f"Pathwise({self.adjoint!r}{cut}{clip})"


def _growth(
    replicas: Replicas[State], at_start: Tensor, final: State
) -> tuple[float | None, bool | None]:
    """Compute the growth of derivatives from end to start, and the observable's smoothness.

    The growth is the logarithm of the mean square over replicas, since the few paths that diverge
    make up the variance. The smoothness is whether the observable has a derivative with respect to
    the state.
    """
    if replicas.function is None:
        return None, None
    with torch.enable_grad():
        leaves = type(final)._make(x.requires_grad_() for x in final)
        ends = replicas.function(leaves)
        if not ends.requires_grad:
            return None, False
        slopes = torch.autograd.grad(ends.mean(0).sum(), list(leaves), allow_unused=True)
    at_end = slopes[0]
    if at_end is None:
        return None, any(slope is not None for slope in slopes)
    axes = list(range(at_start.ndim - at_end.ndim))
    whole = norm((at_start.sum(axes) if axes else at_start).flatten(1), 1)
    end = norm(at_end.flatten(1), 1)
    logs = 2 * (whole.log() - end.log())[whole.isfinite() & (end > 0)]
    square = float(torch.logsumexp(logs, 0)) - math.log(max(1, len(logs)))
    return (square if math.isfinite(square) else None), True
