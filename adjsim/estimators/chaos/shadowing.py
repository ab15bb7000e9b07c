"""Shadowing: derivatives of long-time averages of chaotic flows."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.arguments import as_number, as_whole
from adjsim.core.declared import NOT_NEGATIVE
from adjsim.core.state import State, detached
from adjsim.core.trajectory import TimeAverage
from adjsim.dynamics.fields.ode import ODE
from adjsim.estimators.base import Chunk, ChunkedEstimator, Request
from adjsim.estimators.chaos.shadowing_steps import last_finite, refuse_rest, refuse_time, step_map
from adjsim.estimators.chaos.shadowing_sweep import (
    Cotangents,
    averages,
    derivative,
    divergence,
    sweep,
    trajectory,
)
from adjsim.estimators.replicas import Observable, Replicas, Simulation
from adjsim.estimators.score_function import common_burn_in
from adjsim.estimators.sharing import Work
from adjsim.simulation.start_checks import check_rates
from adjsim.solvers.run import bound_record
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta

# The factor by which the particular cotangent may grow along the run, from its largest size in the
# second half to its smallest in the first quarter. It is about 0.1 where the basis holds all
# unstable directions of Lorenz' equations, and exp(0.4 lambda T) or more for one of exponent lambda
# that is missing.
LARGEST_GROWTH = 1e2
# The smallest tail index with which the mean of the combined cotangents has a finite variance.
SMALLEST_TAIL = 2.0


class Shadowing(ChunkedEstimator):
    """Estimate the derivative of a long-time average of a chaotic ODE by shadowing.

    The derivative of one chaotic path grows without bound. A shadowing path of the changed equation
    stays near instead, from another start. The method is adjoint non-intrusive least squares
    (Ni and Talnikar, J. Comput. Phys. 395, 690 (2019)) on the discrete adjoint of the steps: M =
    ``unstable`` basis cotangents W and one particular cotangent v are taken backward together,
    orthonormalised where a segment ends, and kept orthogonal to the flow's own direction. The
    combination v + W a that is smallest along the whole trajectory gives all derivatives at once::

        d<J>/ds = <(v + W a) . d(step)/ds> / dt + <dJ/ds>

    **The estimate is not the derivative of the average unless the shadowing path is typical of the
    changed equation.** The error does not fall with the length of the run and is not in the
    standard error. It is 1.4 % for d<z>/drho of Lorenz' equations, -8 % for d<z>/dsigma, and -20 %
    for d<x>/dF of Lorenz 96. Compare it with differences of averages before relying on it.

    Draw the starts from the attractor, or bring them there by ``burn_in``. A replica stores all of
    its states, and M + 1 cotangents for each segment.

    The diagnostics have the ``exponents`` of Lyapunov of the M directions and their standard
    errors, and the ``tail_index`` 2 lambda/D of the exponents next to zero, with D the variance of
    the exponent times the length of the run. Below 2 the size of the cotangents has no finite
    variance, and longer runs are worse without a ``penalty``. Shadowing does not hold either where
    an exponent is zero within its error: a second neutral direction, such as that of a conserved
    quantity, which shows with a spare cotangent only. The estimate says so in both cases.

    Args:
        unstable: M, the number of unstable directions and one more, which shows that there are no
            others; two more do no harm. 0 for a stable periodic solution.
        segment: time between orthonormalisations, about 1/(largest exponent); a multiple of dt.
        burn_in: time at the start of a run that is left out. If the ``TimeAverage`` has a burn_in
            too, the two must agree.
        penalty: added to the diagonal of the least-squares system. Where many exponents are near
            zero, 1e-3 bounds the size of the combination at the price of a bias.

    Raises:
        TypeError: dynamics that are not an :class:`~adjsim.ODE`, another solver than
            :class:`~adjsim.RungeKutta`, an observable that is not a ``TimeAverage``.
        ValueError: a field that depends on the time, too many directions, a run that is not a
            multiple of the segment, or one that settles on a fixed point.
        RuntimeError: there are more unstable directions than ``unstable``.
    """

    estimand = "shadowing"
    compilable: ClassVar[bool] = False

    def __init__(
        self,
        unstable: int,
        segment: float | int,
        *,
        burn_in: float | int = 0.0,
        penalty: float | int = 0.0,
    ) -> None:
        self.unstable = as_whole("unstable", unstable)
        if self.unstable < 0:
            raise ValueError(f"unstable must not be negative; got {unstable}.")
        self.segment = as_number("segment", segment)
        if not 0 < self.segment < math.inf:
            raise ValueError(f"segment must be a positive time; got {segment}.")
        self.burn_in = NOT_NEGATIVE("burn_in", burn_in)
        self.penalty = NOT_NEGATIVE("penalty", penalty)

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        if not isinstance(observable, TimeAverage):
            raise TypeError(
                "Shadowing is for long-time averages: give it TimeAverage(fn). For the mean after "
                "a given time use Pathwise."
            )
        if not isinstance(simulation.dynamics, ODE):
            raise TypeError(
                "Shadowing is for the flow of an ODE without conserved quantities, not for "
                f"{type(simulation.dynamics).__name__}. For equilibrium averages use ScoreFunction "
                "or Reweighting."
            )
        if not isinstance(simulation.solver, RungeKutta):
            raise TypeError(f"Shadowing takes RungeKutta(method, dt), not {simulation.solver!r}.")
        self._count(simulation, observable)

    def _count(
        self, simulation: Simulation[State], observable: TimeAverage
    ) -> tuple[int, int, int]:
        """Count the steps of the burn-in, of a segment and of all segments."""
        steps = simulation.steps("Shadowing")
        dt = steps.dt
        observable.refuse_stride("Shadowing")
        skip = steps.averaged(common_burn_in(self, self.burn_in, observable))[0] - 1
        length = round(self.segment / dt)
        if length < 1 or abs(length * dt - self.segment) > 1e-3 * dt:
            raise ValueError(
                f"segment = {self.segment:g} must be a multiple of the step, dt = {dt:g}."
            )
        count = steps.last - skip
        if count % length or count < 2 * length:
            raise ValueError(
                f"the run after the burn-in takes {count * dt:g}, which must be two or more "
                f"segments of {self.segment:g}, without a rest."
            )
        return skip, length, count

    def chunks(self, request: Request[State], drawn: Replicas[State], work: Work) -> list[Chunk]:
        """Sweep all replicas at once, or with several ranks or a store each chunk alone.

        The last bits can differ: a matrix product of fewer rows may be rounded in another way.
        """
        if work.ranks.size > 1 or work.store is not None:
            return super().chunks(request, drawn, work)
        found = self._sweep(drawn, request.slices)
        work.unchanged.check()
        return found

    def chunk(self, replicas: Replicas[State]) -> Chunk:
        return self._sweep(replicas, [slice(0, len(replicas.start[0]))])[0]

    def _sweep(self, replicas: Replicas[State], slices: list[slice]) -> list[Chunk]:
        simulation, starts, average = replicas.simulation, replicas.start, replicas.average
        solver = simulation.solver
        assert average is not None
        assert isinstance(solver, RungeKutta)
        begin = float(simulation.ts[0])
        skip, length, count = self._count(simulation, average)
        # What is computed is a reading, as in a run.
        with torch.enable_grad():
            reading, leaves, dynamics, _ = check_rates(
                simulation.dynamics, detached(starts), begin, average, False
            )
        record = bound_record(average, reading, dynamics, leaves)
        assert isinstance(record, TimeAverage)
        y = torch.cat(tuple(x.detach() for x in starts), -1)
        n = y.shape[-1]
        if self.unstable > n - 1:
            raise ValueError(
                f"unstable = {self.unstable} is too many for a state of {n} numbers, of whose "
                f"directions one is that of the flow: at most {n - 1}."
            )
        refuse_time(dynamics, simulation.ts, starts)
        steps, shape = step_map(dynamics, solver, begin, record, starts)
        if skip:
            y = last_finite(trajectory(steps, y, skip), 0, steps.h)
        states = trajectory(steps, y, count)
        last_finite(states, skip, steps.h)
        refuse_rest(steps, states)
        widths = [x.shape[-1] for x in starts]
        for i in torch.linspace(0, count, 4, dtype=torch.float64).long().tolist():
            refuse_time(dynamics, simulation.ts, type(starts)._make(states[i].split(widths, -1)))
        mean = averages(steps, states)
        found = sweep(steps, states, mean, length, self.unstable)
        growth = _growth(found)
        if growth > LARGEST_GROWTH:
            raise divergence(f"by a factor of {growth:.1g}", self.unstable)
        parameters = reading.trainable(leaves)
        passes = skip + 3 * count + 2 * length * len(slices)
        evaluations = passes * len(solver.tableau.b)
        sizes = found.triangles.diagonal(dim1=-2, dim2=-1).abs()
        parts: list[Chunk] = []
        for part in slices:
            grads = derivative(
                steps, states[:, part].contiguous(), found.of(part), self.penalty, parameters
            )
            parts.append(
                Chunk(
                    mean[part].mean(0).reshape(shape),
                    {k: g.reshape((*shape, *parameters[k].shape)) for k, g in grads.items()},
                    {"energy_evaluations": 0 if parts else evaluations},
                    sizes[:, part].log() / self.segment,
                )
            )
        reading.refuse_written(dynamics, leaves)
        return parts

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        rates = torch.cat([part.extra for part in parts], 1)
        exponents, errors, spread = _exponents(rates, self.segment)
        values, size = exponents.tolist(), exponents.abs()
        # The smallest positive and the largest negative exponent.
        sides = [side for side in (exponents > 0, exponents < 0) if (side & size.isfinite()).any()]
        nearest = [int(torch.where(side, size, math.inf).argmin()) for side in sides]
        tails = {values[i]: 2 * abs(values[i]) / float(spread[i]) for i in nearest if spread[i] > 0}
        reasons: list[str] = []
        if values and float(exponents.min()) > 0:
            reasons.append(
                f"all {self.unstable} exponents are positive, so there may be more unstable "
                "directions: use one more"
            )
        reasons += [
            f"an exponent is zero within its error ({x:.2g} +- {error:.1g}): a second neutral "
            "direction (is a quantity conserved?), for which shadowing does not hold"
            for x, error in zip(values, errors.tolist(), strict=True)
            if abs(x) < max(2 * error, 1 / (len(rates) * self.segment))
        ]
        reasons += [
            f"the tail index of the exponent {x:.2g} is {tail:.2g}, below 2, so longer runs are "
            "worse: give a penalty, such as 1e-3"
            for x, tail in tails.items()
            if tail < SMALLEST_TAIL and not self.penalty
        ]
        return {
            "exponents": exponents,
            "exponents_stderr": errors,
            "tail_index": tails,
            # Correlated samples of the attractor; the spread of the chunks gives the error.
            "ess": None,
            "reasons": reasons,
        }

    def __repr__(self) -> str:
        rest = f", burn_in={self.burn_in:g}" if self.burn_in else ""
        rest += f", penalty={self.penalty:g}" if self.penalty else ""
        return f"Shadowing({self.unstable}, {self.segment:g}{rest})"


def _growth(found: Cotangents) -> float:
    """Return the factor by which v grows from the second half of the run to its first quarter."""
    sizes = found.particular.norm(dim=-1).flatten(1).amax(-1)
    late = float(sizes[len(sizes) // 2 :].max())
    early = float(sizes[: max(1, len(sizes) // 4)].min())
    return early / late if late > 0 else 1.0


def _exponents(rates: Tensor, segment: float) -> tuple[Tensor, Tensor, Tensor]:
    """Average rates ``(segments, replicas, M)``: exponents, standard errors, and D.

    D comes from blocks of about sqrt(segments) segments, which are long enough to be independent.
    """
    if not rates.shape[-1]:
        empty = rates.new_zeros(0)
        return empty, empty, empty
    width = max(1, math.isqrt(len(rates)))
    count = len(rates) // width
    blocks = rates[: count * width].reshape(count, width, *rates.shape[1:]).mean(1).flatten(0, 1)
    spread = width * segment * blocks.var(0)
    time = len(rates) * rates.shape[1] * segment
    return rates.mean((0, 1)), (spread / time).sqrt(), spread
