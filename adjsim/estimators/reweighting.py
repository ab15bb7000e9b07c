"""Reweighting: stored samples with weights for other parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.direct import DirectAdjoint
from adjsim.core.arguments import as_positive
from adjsim.core.declared import NOT_NEGATIVE
from adjsim.core.durable.manifest import tensor_fingerprint
from adjsim.core.durable.ranks import Ranks
from adjsim.core.durable.store import Nested, moved
from adjsim.core.reading import Reading
from adjsim.core.state import State
from adjsim.core.trajectory import TimeAverage, check_times, step_numbers
from adjsim.estimators.base import Chunk, Estimator, Request, weighted_mean
from adjsim.estimators.probes import density_of, reduced_energy
from adjsim.estimators.replicas import Observable, Replicas, Simulation, checked
from adjsim.estimators.samples import Samples, Weights, support_of, weighted
from adjsim.estimators.score_function import check_stationary, common_burn_in, equilibration, outer
from adjsim.estimators.sharing import Work
from adjsim.observables.averages import mean_with_error


class Reweighting(Estimator):
    """Equilibrium means and gradients from stored samples, for nearby parameters too::

        <O>_theta = sum_i w_i O_i / sum_i w_i,     u = H/kT
        w_i = exp(-(u_i(theta) - u_i(theta_0)))

    The method is known as DiffTRe (Thaler and Zavadlav, Nat. Commun. 12, 6884 (2021)) and
    thermodynamic perturbation. It answers the stationary question. The frames of a run at theta_0
    are stored and used again while their effective share at the current parameters theta,
    ``(sum w)^2 / sum w^2 / n``, is at least ``threshold``, so a fit needs few simulations. With
    another simulation, number of replicas, number of chunks or burn_in, and after a change of a
    box or of the lengths, pairs or masses of constraints, it samples again.

    ``diagnostics["weights_ess"]`` is the effective share, ``["sampled"]`` whether this call
    sampled, and ``["ess"]`` the number of independent samples that are left. ``["drift"]`` is the
    difference between the second and the first half of the stored frames, for each entry of the
    observable. :meth:`surrogate` returns the weighted mean as a differentiable tensor, and
    :meth:`effective_shares` tells which parameters have used the frames up.

    Args:
        every: time between stored frames; None: that of the ``TimeAverage`` if it has a stride,
            else ten steps.
        burn_in: time at the start that is left out, to equilibrate. If the ``TimeAverage`` has a
            burn_in too, the two must agree.
        threshold: the effective share of samples below which the estimator samples again.
    """

    estimand = "stationary"

    def __init__(
        self, *, every: float | None = None, burn_in: float = 0.0, threshold: float = 0.5
    ) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must be a share between 0 and 1; got {threshold}.")
        self.every = None if every is None else as_positive("every", every)
        self.burn_in, self.threshold = NOT_NEGATIVE("burn_in", burn_in), threshold
        self._samples: Samples[Any] | None = None

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        average = check_stationary(self, simulation, observable)
        self._frames(simulation, average)

    def drawn(self, request: Request[State]) -> Replicas[State]:
        # Starts and noise are drawn only if this call samples.
        return Replicas(request.simulation, request.observable, request.simulation.probes(1))

    def described(self, request: Request[State], drawn: Replicas[State]) -> dict[str, str]:
        source = request.generator or torch.default_generator
        state = source.get_state()
        replicas = replace(request.draw(), noise=None)
        source.set_state(state)
        seed = "none" if request.generator is None else tensor_fingerprint(state)
        return {**super().described(request, replicas), "the generator": seed}

    def chunks(self, request: Request[State], drawn: Replicas[State], work: Work) -> list[Chunk]:
        observable, device = drawn.average, drawn.device
        assert observable is not None
        # Not stored: weights depend on the parameters, which may differ from those of the samples.
        alone = replace(work, store=None)
        kept = self._kept(request, observable, alone)
        if kept is None:
            samples = self._samples = self._sample(request, observable, device, work)
            weights = samples.weigh(observable, alone)
        else:
            samples, weights = kept
        reweighted = partial(samples.reweighted, observable=observable, weights=weights)
        parts = alone.chunks(range(len(request.slices)), reweighted, device)
        for part in parts:
            part.stats |= {"pairs": samples.pairs, "sampled": kept is None}
        if kept is None:
            parts[0].stats["energy_evaluations"] += samples.evaluations
        return parts

    def surrogate(self, observable: TimeAverage) -> Tensor:
        """Compute the weighted mean over the stored samples, differentiable in the parameters.

        The observable may depend on the parameters too.
        """
        samples = self._samples
        if samples is None:
            raise RuntimeError("Reweighting has no samples yet; call it first.")
        if len(samples.states) < len(samples.sizes):
            raise RuntimeError(
                "surrogate needs the samples of all chunks, and other ranks have some of them."
            )
        samples.check_support()
        with torch.enable_grad():
            bath = samples.depends_on_bath(observable, Ranks(None))
            reading = Reading(samples.simulation.dynamics)
            tensors = reading.connected()
            dynamics = reading.bound(tensors)
            function = reading.on(dynamics, tensors, observable.function)
            logs = torch.cat([samples.log_weight(i, bath, dynamics) for i in samples.states])
            values = torch.cat([checked(function(x), x) for x in samples.states.values()])
            return weighted(torch.softmax(logs, 0), values).sum(0)

    def effective_shares(
        self, groups: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, float]:
        """Compute the effective share of the stored frames for each group of parameters alone.

        The share of a group is ``(sum w)^2 / sum w^2 / n`` with the weights of dynamics whose
        parameters of this group have their present numbers, and all others that require grad those
        with which the frames were sampled. It tells which parameters have used the frames up. A
        group takes one evaluation of the energies of all frames. Every rank calls this method.
        Energies of the bath's own variables are left out, so for an observable of them the share is
        not that of ``weights_ess``.

        Args:
            groups: the names of the parameters of each group, as in ``estimate.grad``; None: a
                group for each parameter that requires grad.

        Raises:
            RuntimeError: there are no samples yet, or a box or a constraint has changed since.
            ValueError: a name that is not of a parameter with which the frames were sampled.
        """
        samples = self._samples
        if samples is None:
            raise RuntimeError("Reweighting has no samples yet; call it first.")
        samples.check_support()
        found = {name: [name] for name in samples.start} if groups is None else groups
        unknown = [name for names in found.values() for name in names if name not in samples.start]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is no parameter that required grad when the frames were sampled; "
                f"these are {', '.join(samples.start) or 'none'}."
            )
        ranks = Ranks.of(None)
        return {group: samples.share_of({*names}, ranks) for group, names in found.items()}

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        """Linearise the ratio A/B of means over chunks, whose spread then gives its error."""
        A, B = (weighted_mean([part.extra[key] for part in parts], sizes) for key in ("A", "B"))
        R = A / B
        for part in parts:
            part.value = R + (part.extra["A"] - R * part.extra["B"]) / B
        for name in parts[0].grad:
            slopes = [[part.extra[key][name] for part in parts] for key in ("dA", "dB")]
            dA, dB = (weighted_mean(column, sizes) for column in slopes)
            dR = (dA - outer(R, dB)) / B
            for part in parts:
                e = part.extra
                own = e["dA"][name] - outer(R, e["dB"][name]) - outer(part.value - R, dB)
                part.grad[name] = dR + (own - dR * e["B"]) / B
        weights = torch.cat([part.extra["w"] for part in parts])
        share = float(weights.sum() ** 2 / (weights**2).sum() / len(weights))
        seen = [part.extra["O"] for part in parts]
        series = torch.cat(seen, 1)
        each = [mean_with_error(column).ess for column in series.unbind(2)]
        half = len(series) // 2
        halves = [x[half:].mean((0, 1)) - x[:half].mean((0, 1)) for x in seen]
        return {
            "sampled": parts[0].stats["sampled"],
            "weights_ess": share,
            "ess": share * min(each),
            "equilibration": equilibration(torch.stack(halves)) if half > 0 else None,
            "drift": weighted_mean(halves, sizes) if half > 0 else None,
        }

    def _frames(self, simulation: Simulation[State], observable: TimeAverage) -> list[float]:
        """List the time of the start and the times of the stored frames."""
        skip = common_burn_in(self, self.burn_in, observable)
        steps, stride = simulation.steps("Reweighting"), observable.every
        width = 10 if stride == 1 else stride
        if self.every is not None:
            width = step_numbers(check_times([0.0, self.every]), steps.dt)[-1]
        if stride not in (1, width):
            raise ValueError(
                f"Reweighting stores frames every {width} steps and the observable takes every "
                f"{stride}; they must agree."
            )
        frames = range(steps.averaged(skip)[0] - 1 + width, steps.last + 1, width)
        if len(frames) < 2:
            raise ValueError(
                f"Reweighting: a run of {steps.last} steps has only {len(frames)} frames; run "
                "longer, or give a smaller every."
            )
        return [steps.begin, *map(steps.time, frames)]

    def _kept(
        self, request: Request[State], observable: TimeAverage, work: Work
    ) -> tuple[Samples[State], Weights] | None:
        """Return the stored samples and their weights, None where a call has to sample."""
        samples = self._samples
        skip = common_burn_in(self, self.burn_in, observable)
        if samples is None or not samples.serve(request, skip, work.ranks):
            return None
        weights = samples.weigh(observable, work)
        return (samples, weights) if weights.effective_share >= self.threshold else None

    def _sample(
        self, request: Request[State], observable: TimeAverage, device: torch.device, work: Work
    ) -> Samples[State]:
        simulation, replicas = request.simulation, request.draw()
        dynamics, times = simulation.dynamics, self._frames(simulation, observable)
        skip = common_burn_in(self, self.burn_in, observable)
        has_bath = bool(density_of(dynamics).bath_fields)
        kind, names = type(replicas.start), replicas.start._fields
        states, energies = dict[int, State](), dict[int, list[Tensor]]()

        @torch.no_grad()
        def sample(i: int) -> Nested:
            made = replicas.part(request.slices[i]).run(DirectAdjoint(), ts=times)
            frames = kind._make(getattr(made, name)[1:].flatten(0, 1) for name in names)
            u = reduced_energy(dynamics, frames, False)
            with_bath = reduced_energy(dynamics, frames, True) if has_bath else u
            stats = made.stats
            return [list(frames), [u, with_bath], stats["energy_evaluations"], stats.get("pairs")]

        def kept(i: int) -> Nested:
            found = moved(work.stored(f"samples-{i:05}", sample, i), device)
            fields, energies[i], *counts = found
            states[i] = kind._make(fields)
            return counts

        # Frames stay where they were sampled, so chunks are dealt to ranks.
        counts = work.ranks.share(len(request.slices), kept)
        return Samples(
            simulation,
            request.sizes,
            skip,
            states,
            energies,
            sum(count for count, _ in counts),
            counts[-1][1],
            work.ranks.rank,
            support_of(dynamics),
            {name: x.detach().clone() for name, x in dynamics.trainable().items()},
        )

    def __repr__(self) -> str:
        return f"Reweighting(threshold={self.threshold:g})"
