"""The score function of the equilibrium distribution: REINFORCE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.adjoints.direct import DirectAdjoint
from adjsim.core.arguments import as_number
from adjsim.core.noise import Noise
from adjsim.core.state import State, select
from adjsim.core.trajectory import TimeAverage, check_times, first_averaged_step, step_numbers
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.base import (
    Chunk,
    ChunkedEstimator,
    Estimator,
    Observable,
    Simulation,
    checked,
    weighted_mean,
)
from adjsim.estimators.moments import Moments
from adjsim.estimators.probes import density_of, depends_on_bath
from adjsim.estimators.sharing import Work
from adjsim.simulation.simulate import run
from adjsim.solvers.base import SteppingSolver

# Starts at which an observable is tested before any work.
PROBED = 4


class ScoreFunction(ChunkedEstimator):
    """The gradient of an equilibrium mean from a covariance at equal times (REINFORCE)::

        d<O>/dtheta = <dO/dtheta> - <(O - <O>) (du/dtheta - <du/dtheta>)>,     u = H(q, p; theta)/kT

    See Williams, Mach. Learn. 8, 229 (1992). It answers the stationary question with any dynamics
    that samples the density, for parameters of the density: the potential's, masses and kT. No
    tangent is propagated in time, so chaos does no harm and memory does not grow with the number of
    samples. Its variance is that of a product: for Gaussian O and du/dtheta at least ``var(O)
    var(du/dtheta)`` over the number of independent samples. For large systems, where du/dtheta
    is large, pathwise or reweighted gradients are better.

    Variables of a bath (the memory of :class:`~adjsim.GeneralizedLangevin`, the momenta of a
    Nose-Hoover chain) have a density too. The terms of this density enter u if the observable
    depends on these variables. This is tested by displacing the variables at the starts and at
    the ends of the run. Parameters that are not in the density have a gradient of exactly
    zero: friction, rates, strengths, and tau unless the observable depends on chain momenta.

    Raises:
        TypeError: dynamics without a known density, or an observable that is not a ``TimeAverage``.
        ValueError: an observable of the position of a Nose-Hoover chain, which has no stationary
            density.

    Args:
        burn_in: time at the start that is left out, to equilibrate. If the ``TimeAverage`` has a
            burn_in too, the two must agree.
    """

    estimand: ClassVar[str] = "stationary"

    def __init__(self, burn_in: float = 0.0) -> None:
        burn_in = as_number("burn_in", burn_in)
        if not burn_in >= 0:
            raise ValueError(f"burn_in must be zero or a positive time; got {burn_in}.")
        self.burn_in = burn_in
        # Kept between calls, since the cache of compiled loops is keyed by these objects.
        self._known: dict[bool, Moments] = {}

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        average = check_stationary(self, simulation, observable)
        common_burn_in(self, self.burn_in, average)

    def run_chunks(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        starts: State,
        slices: list[slice],
        seed: int | None,
        work: Work,
    ) -> list[Chunk]:
        # The moments of all chunks are about one number, whichever rank runs them.
        first = select(starts, slices[0])

        def chunk(i: int) -> Chunk:
            noise = None if seed is None else Noise(seed, slices[i].start)
            return self.chunk(simulation, observable, select(starts, slices[i]), noise, first)

        return work.chunks(len(slices), chunk, starts[0].device)

    def chunk(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        start: State,
        noise: Noise | None,
        first: State | None = None,
    ) -> Chunk:
        assert isinstance(observable, TimeAverage)
        dynamics, function = simulation.dynamics, observable.function
        about = start if first is None else first
        bath = depends_on_bath(dynamics, function, start)
        moments = self._moments(dynamics, function, bath, about)
        final, evaluations, found = self._sample(simulation, observable, start, noise, moments)
        if not bath and depends_on_bath(dynamics, function, final):
            moments = self._moments(dynamics, function, True, about)
            final, more, found = self._sample(simulation, observable, start, noise, moments)
            evaluations += more
        stats = {"energy_evaluations": evaluations, "pairs": found.pop("pairs")}
        return Chunk(found["O"], found["dO"], stats, found)

    def _moments(
        self,
        dynamics: Dynamics[State],
        function: Callable[[State], Tensor],
        bath: bool,
        start: State,
    ) -> Moments:
        """Make the moments about a start, or return the last ones if they are equal."""
        moments, last = Moments(dynamics, function, bath, start), self._known.get(bath)
        if last is None or not last.equals(moments):
            last = self._known[bath] = moments
        return last

    @torch.no_grad()
    def _sample(
        self,
        simulation: Simulation[State],
        observable: TimeAverage,
        start: State,
        noise: Noise | None,
        moments: Moments,
    ) -> tuple[State, int, dict[str, Any]]:
        """Run, and return the final state, the passes over the energy, and the moments.

        The run has two parts, whose averages are compared to test for equilibrium.
        """
        assert isinstance(simulation.solver, SteppingSolver)
        dynamics = simulation.dynamics
        skip, times, dt = (
            common_burn_in(self, self.burn_in, observable),
            check_times(simulation.ts),
            simulation.solver.dt,
        )
        last = step_numbers(times, dt)[-1]
        first = first_averaged_step(skip, dt, last)
        middle = first + (last - first) // 2
        state, evaluations, parts = start, last - first + 1, []
        pairs: Any = None
        for begin, end in ((0, middle), (middle, last)) if middle < last else ((0, last),):
            span = [float(times[0]) + begin * dt, float(times[0]) + end * dt]
            shifted = None if noise is None else Noise(noise.seed, noise.first, noise.begin + begin)
            average = TimeAverage(moments, 0.0 if begin else skip)
            made = run(
                dynamics,
                state,
                span,
                simulation.solver,
                DirectAdjoint(),
                average,
                shifted,
                compile=simulation.compile,
            )
            assert made.record is not None
            state, evaluations = made.final, evaluations + made.stats["energy_evaluations"]
            pairs = made.stats.get("pairs")
            parts.append((end - max(begin, first - 1), made.record))
        values = checked(observable.function(state), state)
        total = torch.stack([record * (count / (last - first + 1)) for count, record in parts]).sum(
            0
        )
        found = moments.unpack(total, values)
        early, late = (moments.unpack(record, values)["O"] for _, record in (parts[0], parts[-1]))
        found.update(
            halves=late - early,
            pairs=pairs,
            dtype=values.dtype if values.is_floating_point() else state[0].dtype,
        )
        return state, evaluations, found

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        """Compute the covariance of every chunk about the means of all chunks.

        The mean of these covariances is that of all samples, and their spread gives its error.
        """
        ess = ess_of([part.extra for part in parts], sizes)
        # Bessel's correction: the covariance about the sample mean is too small by the factor
        # 1 - 1/ess.
        correction = ess / max(ess - 1, 1)
        mean, dtype = weighted_mean([part.value for part in parts], sizes), parts[0].extra["dtype"]
        parameters = simulation.dynamics.trainable()
        for name, p in parameters.items():
            G = weighted_mean([part.extra["G"][name] for part in parts], sizes)
            for part in parts:
                g = part.extra["G"][name]
                centred = (
                    part.extra["OG"][name] - outer(mean, g) - outer(part.value, G) + outer(mean, G)
                )
                part.grad[name] = (part.extra["dO"][name] - correction * centred).to(p.dtype)
        for part in parts:
            part.value = part.value.to(dtype)
        halves = torch.stack([part.extra["halves"] for part in parts])
        return {"ess": ess, "equilibration": equilibration(halves)}

    def __repr__(self) -> str:
        return f"ScoreFunction(burn_in={self.burn_in:g})"


def outer(mean: Tensor, grad: Tensor) -> Tensor:
    """Multiply every entry of a mean with every entry of a parameter's gradient."""
    return mean.reshape(mean.shape + (1,) * grad.ndim) * grad


def outer_mean(values: Tensor, grads: Tensor) -> Tensor:
    """Average :func:`outer` over replicas, the leading axis of both."""
    product = values.reshape(len(values), -1).T @ grads.reshape(len(grads), -1)
    return (product / len(values)).reshape(values.shape[1:] + grads.shape[1:])


def ess_of(parts: list[dict[str, Any]], sizes: list[int]) -> float:
    """Compute the effective sample size of the time averages of the observable.

    This is the variance of the observable over the variance of its mean, which comes from the
    spread of the replicas' averages. The result is the minimum over entries.
    """
    each = torch.cat([part["each"] for part in parts])
    if len(each) < 2:
        return 1.0
    mean = each.mean(0)
    within = weighted_mean([part["variance"] + (part["O"] - mean) ** 2 for part in parts], sizes)
    ratio = within / (each.var(0) / len(each))
    ratio = ratio[torch.isfinite(ratio)]
    return max(1.0, float(ratio.min())) if ratio.numel() else float(len(each))


def equilibration(halves: Tensor) -> float | None:
    """Compute the difference between the halves of the run, in standard errors over chunks."""
    if len(halves) < 3:
        return None
    score = (halves.mean(0) / (halves.std(0) / len(halves) ** 0.5)).abs()
    score = score[torch.isfinite(score)]
    return float(score.max()) if score.numel() else None


def check_stationary(
    estimator: Estimator, simulation: Simulation[State], observable: Observable[State]
) -> TimeAverage:
    """Return the observable as a time average, or raise if it has no stationary mean."""
    name = type(estimator).__name__
    if not isinstance(observable, TimeAverage):
        raise TypeError(
            f"{name} estimates how an equilibrium mean changes, so it takes TimeAverage(fn). An "
            "observable at a given time, such as a first passage or a final state, is a path "
            "question: use Pathwise, Girsanov or FiniteDifference."
        )
    if not isinstance(simulation.solver, SteppingSolver):
        raise TypeError(
            f"{name} needs a solver of a fixed step, not {type(simulation.solver).__name__}."
        )
    probe = simulation.starts(PROBED, torch.Generator().manual_seed(0))
    density_of(simulation.dynamics)
    depends_on_bath(simulation.dynamics, observable.function, probe)
    return observable


def common_burn_in(estimator: Estimator, own: float, observable: TimeAverage) -> float:
    """Return the burn-in of estimator or observable, and refuse two that differ."""
    if own and observable.burn_in and own != observable.burn_in:
        raise ValueError(
            f"{type(estimator).__name__} has burn_in = {own:g} and the observable "
            f"{observable.burn_in:g}; they must agree."
        )
    return own or observable.burn_in


REINFORCE = ScoreFunction
