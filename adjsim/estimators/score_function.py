"""The score function of the equilibrium distribution: REINFORCE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.direct import DirectAdjoint
from adjsim.core.declared import NOT_NEGATIVE
from adjsim.core.state import State
from adjsim.core.trajectory import TimeAverage
from adjsim.estimators.base import Chunk, Estimator, Request, joined_stats, weighted_mean
from adjsim.estimators.moments import Moments
from adjsim.estimators.probes import density_of, depends_on_bath
from adjsim.estimators.replicas import Observable, Replicas, Simulation, checked
from adjsim.estimators.sharing import Work

# Starts at which an observable is tested before any work.
PROBED = 4


class ScoreFunction(Estimator):
    """The gradient of an equilibrium mean from a covariance at equal times (REINFORCE)::

        d<O>/dtheta = <dO/dtheta> - <(O - <O>) (du/dtheta - <du/dtheta>)>,     u = H(q, p; theta)/kT

    See Williams, Mach. Learn. 8, 229 (1992). It answers the stationary question with any dynamics
    that samples the density, for parameters of the density: the potential's, masses and kT. No
    tangent is propagated in time, so chaos does no harm and memory does not grow with the number of
    samples. Its variance is that of a product: for Gaussian O and du/dtheta at least ``var(O)
    var(du/dtheta)`` over the number of independent samples. For large systems, where du/dtheta
    is large, pathwise or reweighted gradients are better.

    The density of variables of a bath (the memory of :class:`~adjsim.GeneralizedLangevin`, the
    momenta of a Nose-Hoover chain) enters u if the observable depends on them, which is tested by
    displacing them at the starts and at the ends of the run. Parameters that are not in the density
    have a gradient of exactly zero: friction, rates, strengths, and tau unless the observable
    depends on chain momenta.

    Raises:
        TypeError: dynamics without a known density, or an observable that is not a ``TimeAverage``.
        ValueError: an observable of the position of a Nose-Hoover chain, which has no density.

    Args:
        burn_in: time at the start that is left out, to equilibrate. If the ``TimeAverage`` has a
            burn_in too, the two must agree.
    """

    estimand = "stationary"

    def __init__(self, burn_in: float = 0.0) -> None:
        self.burn_in = NOT_NEGATIVE("burn_in", burn_in)
        # Kept between calls, since the cache of compiled loops is keyed by these objects.
        self._known: dict[bool, Moments] = {}

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        average = check_stationary(self, simulation, observable)
        common_burn_in(self, self.burn_in, average)

    def chunks(self, request: Request[State], drawn: Replicas[State], work: Work) -> list[Chunk]:
        # The moments of all chunks are about one number, whichever rank runs them.
        about = drawn.part(request.slices[0]).start
        return work.chunks(
            request.slices, lambda part: self._chunk(drawn.part(part), about), drawn.device
        )

    def _chunk(self, replicas: Replicas[State], about: State) -> Chunk:
        dynamics, average = replicas.simulation.dynamics, replicas.average
        assert average is not None
        bath = depends_on_bath(dynamics, average.function, replicas.start)
        final, runs, found = self._sample(replicas, average, bath, about)
        if not bath and depends_on_bath(dynamics, average.function, final):
            _, more, found = self._sample(replicas, average, True, about)
            runs += more
        return Chunk(found["O"], found["dO"], joined_stats(runs), found)

    @torch.no_grad()
    def _sample(
        self, replicas: Replicas[State], observable: TimeAverage, bath: bool, about: State
    ) -> tuple[State, list[dict[str, Any]], dict[str, Any]]:
        """Run in two halves, and return the final state, the costs, and the moments."""
        moments = Moments(replicas.simulation.dynamics, observable.function, bath, about)
        known = self._known.setdefault(bath, moments)
        moments = self._known[bath] = known if known.equals(moments) else moments
        skip = common_burn_in(self, self.burn_in, observable)
        steps = replicas.simulation.steps("ScoreFunction")
        counted = steps.averaged(skip, observable.every)
        last, count = steps.last, len(counted)
        middle = counted[(count - 1) // 2]
        # Each averaged state takes a pass over the energy.
        state, runs, parts = replicas.start, [{"energy_evaluations": count}], []
        for begin, end in ((0, middle), (middle, last)) if count > 1 else ((0, last),):
            average = TimeAverage(moments, 0.0 if begin else skip, observable.every)
            made = replicas.span(state, begin, end, DirectAdjoint(), average)
            assert made.record is not None
            state = made.final
            runs.append(made.stats)
            parts.append((len([k for k in counted if begin < k <= end]), made.record))
        values = checked(observable.function(state), state)
        total = torch.stack([record * (n / count) for n, record in parts]).sum(0)
        found = moments.unpack(total, values)
        early, late = (moments.unpack(record, values)["O"] for _, record in (parts[0], parts[-1]))
        dtype = values.dtype if values.is_floating_point() else state[0].dtype
        return state, runs[::-1], found | {"halves": late - early, "dtype": dtype}

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        """Compute the covariance of every chunk about the means of all chunks.

        Their mean is the covariance of all samples, and their spread gives its error.
        """
        ess = ess_of([part.extra for part in parts], sizes)
        # Bessel's correction: the covariance about the sample mean is too small by the factor
        # 1 - 1/ess.
        correction = ess / max(ess - 1, 1)
        mean = weighted_mean([part.value for part in parts], sizes)
        for name, p in simulation.dynamics.trainable().items():
            G = weighted_mean([part.extra["G"][name] for part in parts], sizes)
            for part in parts:
                g, OG, dO = (part.extra[key][name] for key in ("G", "OG", "dO"))
                centred = OG - outer(mean, g) - outer(part.value, G) + outer(mean, G)
                part.grad[name] = (dO - correction * centred).to(p.dtype)
        for part in parts:
            part.value = part.value.to(part.extra["dtype"])
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
    """Compute the effective sample size of time averages, the smallest of all entries.

    It is the variance of the observable over that of its mean over replicas.
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
    simulation.steps(name)
    probe = simulation.probes(PROBED)
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
