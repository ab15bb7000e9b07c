"""Reweighting: stored samples with weights for other parameters."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from adjsim.adjoints.direct import DirectAdjoint
from adjsim.core.arguments import outside_inference_mode
from adjsim.core.durable.manifest import tensor_fingerprint
from adjsim.core.durable.ranks import Ranks
from adjsim.core.durable.store import Nested, moved
from adjsim.core.noise import Noise, as_generator, seed_from
from adjsim.core.parameters import refuse_untrainable
from adjsim.core.reading import Reading
from adjsim.core.state import State, select
from adjsim.core.trajectory import TimeAverage, check_times, first_averaged_step, step_numbers
from adjsim.core.typing import Seed
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.base import (
    Chunk,
    Estimator,
    Observable,
    Simulation,
    chunk_slices,
    jacobian,
    weighted_mean,
)
from adjsim.estimators.estimate import GradientEstimate
from adjsim.estimators.memory import PeakMemory
from adjsim.estimators.probes import density_of, depends_on_bath, reduced_energy
from adjsim.estimators.score_function import check_stationary, common_burn_in, equilibration, outer
from adjsim.estimators.sharing import (
    Work,
    costs_of,
    describe_estimate,
    measured,
    same_generator,
    shared,
    unadvanced,
)
from adjsim.estimators.unchanged import Unchanged
from adjsim.observables.averages import mean_with_error
from adjsim.simulation.simulate import run
from adjsim.solvers.base import SteppingSolver


class Reweighting(Estimator):
    """Equilibrium means and gradients from stored samples, for nearby parameters too::

        <O>_theta = sum_i w_i O_i / sum_i w_i,     u = H/kT
        w_i = exp(-(u_i(theta) - u_i(theta_0)))

    The method is known as DiffTRe (Thaler and Zavadlav, Nat. Commun. 12, 6884 (2021)) and
    thermodynamic perturbation. It answers the stationary question. The frames of a run at theta_0
    are stored and used again while their effective share at the current parameters theta,
    ``(sum w)^2 / sum w^2 / n``, is at least ``threshold``, so a fit needs few simulations. One
    object serves one simulation; with another simulation, number of replicas, number of chunks or
    burn_in, it samples again.

    ``diagnostics["weights_ess"]`` is the effective share, ``["sampled"]`` whether this call
    sampled, and ``["ess"]`` the number of independent samples that are left. ``["drift"]`` is the
    difference between the second and the first half of the stored frames, for each entry of the
    observable. :meth:`surrogate` returns the weighted mean as a differentiable tensor.

    Args:
        every: time between stored frames; None: ten steps.
        burn_in: time at the start that is left out, to equilibrate. If the ``TimeAverage`` has a
            burn_in too, the two must agree.
        threshold: the effective share of samples below which the estimator samples again.
    """

    estimand: ClassVar[str] = "stationary"

    def __init__(
        self, *, every: float | None = None, burn_in: float = 0.0, threshold: float = 0.5
    ) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must be a share between 0 and 1; got {threshold}.")
        if not burn_in >= 0 or (every is not None and not every > 0):
            raise ValueError(
                "every must be positive and burn_in must not be negative; got "
                f"{every} and {burn_in}."
            )
        self.every, self.burn_in, self.threshold = every, burn_in, threshold
        self._samples: _Samples[Any] | None = None

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        average = check_stationary(self, simulation, observable)
        self._frames(simulation, common_burn_in(self, self.burn_in, average))

    @outside_inference_mode()
    def __call__(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        *,
        replicas: int,
        chunks: int = 16,
        generator: Seed = None,
        store: str | Path | None = None,
        group: Any = None,
    ) -> GradientEstimate:
        refuse_untrainable(simulation.dynamics)
        ranks = Ranks.of(group)
        slices = chunk_slices(replicas, chunks)
        generator = same_generator(ranks, as_generator(generator))
        self.check(simulation, observable)
        assert isinstance(observable, TimeAverage)
        sizes, samples, begun = (
            [part.stop - part.start for part in slices],
            self._samples,
            time.perf_counter(),
        )
        skip = common_burn_in(self, self.burn_in, observable)
        if samples is not None and (
            samples.simulation is not simulation
            or (samples.sizes, samples.skip, samples.rank) != (sizes, skip, ranks.rank)
            or not samples.is_in_boxes_of(simulation.dynamics)
        ):
            samples = None
        probe = simulation.starts(1, torch.Generator().manual_seed(0))
        device = probe[0].device

        def describe() -> dict[str, str]:
            seed = "none" if generator is None else tensor_fingerprint(generator.get_state())
            with unadvanced(generator):
                starts = simulation.starts(replicas, generator)
            about = describe_estimate(self, simulation, observable, starts, slices, None)
            return {**about, "the generator": seed}

        measure = measured(simulation, observable, probe)
        unchanged = Unchanged(simulation.dynamics)
        with (
            shared(ranks, store, describe, measure, unchanged) as work,
            PeakMemory(device) as memory,
        ):
            alone = replace(work, store=None)
            bath = samples is not None and samples.depends_on_bath(observable, ranks)
            sampled = samples is None or samples.effective_share(bath, alone) < self.threshold
            if sampled:
                samples = self._samples = self._sample(simulation, skip, slices, generator, work)
                bath = samples.depends_on_bath(observable, ranks)
            assert samples is not None
            kept, largest = samples, float(samples.log_weights(bath, alone).max())

            def reweighted(i: int) -> Chunk:
                return self._reweight(kept, i, observable, bath, largest)

            # Not stored: they depend on the parameters, which may differ from those of the samples.
            parts = alone.chunks(len(sizes), reweighted, device)
            if sampled:
                parts[0].stats["energy_evaluations"] += samples.evaluations
            diagnostics = self._combine(parts, sizes)
        diagnostics.update(
            sampled=sampled,
            compiled=simulation.compile,
            pairs=samples.pairs,
            **costs_of(ranks, time.perf_counter() - begun, memory.bytes),
        )
        return self.finish(parts, sizes, diagnostics)

    def surrogate(self, observable: TimeAverage) -> Tensor:
        """Compute the weighted mean over the stored samples, differentiable in the parameters.

        The observable may depend on the parameters too.
        """
        if self._samples is None:
            raise RuntimeError("Reweighting has no samples yet; call it first.")
        if len(self._samples.states) < len(self._samples.sizes):
            raise RuntimeError(
                "surrogate needs the samples of all chunks, and other ranks have some of them."
            )
        samples = self._samples
        with torch.enable_grad():
            bath = samples.depends_on_bath(observable, Ranks(None))
            reading = Reading(samples.simulation.dynamics)
            tensors = reading.connected()
            dynamics = reading.bound(tensors)
            function = reading.on(dynamics, tensors, observable.function)
            logs = torch.cat([samples.log_weight(i, bath, dynamics) for i in samples.states])
            values = torch.cat([function(state) for state in samples.states.values()])
            return (_like(torch.softmax(logs, 0), values) * values).sum(0)

    @staticmethod
    def _combine(parts: list[Chunk], sizes: list[int]) -> dict[str, Any]:
        """Linearise the ratio A/B of means over chunks.

        The linearised values of the chunks average to the ratio, and their spread gives its error.
        """
        A, B = (weighted_mean([part.extra[key] for part in parts], sizes) for key in ("A", "B"))
        R = A / B
        for part in parts:
            part.value = R + (part.extra["A"] - R * part.extra["B"]) / B
        for name in parts[0].grad:
            dA, dB = (
                weighted_mean([part.extra[key][name] for part in parts], sizes)
                for key in ("dA", "dB")
            )
            dR = (dA - outer(R, dB)) / B
            for part in parts:
                e = part.extra
                own = e["dA"][name] - outer(R, e["dB"][name]) - outer(part.value - R, dB)
                part.grad[name] = dR + (own - dR * e["B"]) / B
        weights = torch.cat([part.extra["w"] for part in parts])
        share = float(weights.sum() ** 2 / (weights**2).sum() / len(weights))
        series = torch.cat([part.extra["O"] for part in parts], 1)
        each = [mean_with_error(column).ess for column in series.unbind(2)]
        half = len(series) // 2
        halves = [
            part.extra["O"][half:].mean((0, 1)) - part.extra["O"][:half].mean((0, 1))
            for part in parts
        ]
        return {
            "weights_ess": share,
            "ess": share * min(each),
            "equilibration": equilibration(torch.stack(halves)) if half > 0 else None,
            "drift": weighted_mean(halves, sizes) if half > 0 else None,
        }

    def _frames(self, simulation: Simulation[State], skip: float) -> list[float]:
        """List the time of the start and the times of the stored frames."""
        assert isinstance(simulation.solver, SteppingSolver)
        times, dt = check_times(simulation.ts), simulation.solver.dt
        last, begin = step_numbers(times, dt)[-1], float(times[0])
        width = 10 if self.every is None else step_numbers(check_times([0.0, self.every]), dt)[-1]
        first = first_averaged_step(skip, dt, last)
        steps = range(first - 1 + width, last + 1, width)
        if len(steps) < 2:
            raise ValueError(
                f"Reweighting: a run of {last} steps has only {len(steps)} frames; run longer, or "
                "give a smaller every."
            )
        return [begin, *(begin + k * dt for k in steps)]

    def _sample(
        self,
        simulation: Simulation[State],
        skip: float,
        slices: list[slice],
        generator: torch.Generator | None,
        work: Work,
    ) -> _Samples[State]:
        starts = simulation.starts(slices[-1].stop, generator)
        seed, bath = (
            seed_from(generator) if simulation.dynamics.stochastic else None,
            bool(density_of(simulation.dynamics).bath_fields),
        )
        times, device = self._frames(simulation, skip), starts[0].device
        states, energies = dict[int, State](), dict[int, dict[bool, Tensor]]()

        @torch.no_grad()
        def sample(i: int) -> Nested:
            part = slices[i]
            made = run(
                simulation.dynamics,
                select(starts, part),
                times,
                simulation.solver,
                DirectAdjoint(),
                None,
                None if seed is None else Noise(seed, part.start),
                compile=simulation.compile,
            )
            frames = type(starts)._make(
                getattr(made, name)[1:].flatten(0, 1) for name in starts._fields
            )
            u = reduced_energy(simulation.dynamics, frames, False)
            with_bath = reduced_energy(simulation.dynamics, frames, True) if bath else u
            stats = made.stats
            return [list(frames), [u, with_bath], stats["energy_evaluations"], stats.get("pairs")]

        def kept(i: int) -> Nested:
            found = moved(work.stored(f"samples-{i:05}", sample, i), device)
            fields, (u, with_bath), *counts = found
            states[i] = type(starts)._make(fields)
            energies[i] = {False: u, True: with_bath}
            return counts

        # Frames stay where they were sampled, so chunks are dealt to ranks.
        counts = work.ranks.share(len(slices), kept)
        return _Samples(
            simulation,
            [part.stop - part.start for part in slices],
            skip,
            states,
            energies,
            sum(count for count, _ in counts),
            counts[-1][1],
            work.ranks.rank,
            boxes_of(simulation.dynamics),
        )

    def _reweight(
        self, samples: _Samples[State], i: int, observable: TimeAverage, bath: bool, largest: float
    ) -> Chunk:
        """Compute one chunk's means of w O and of w, and their derivatives.

        Weights are relative to the largest of all chunks. This changes neither the ratio of the
        means nor its gradient, and prevents overflow if a constant is added to the energy.
        """
        parameters = samples.simulation.dynamics.trainable()
        with torch.enable_grad():
            values, w = (
                observable.function(samples.states[i]),
                torch.exp(samples.log_weight(i, bath) - largest),
            )
            A, B = (_like(w, values) * values).mean(0), w.mean()
            both = jacobian(torch.cat([A.reshape(-1), B.reshape(1)]), parameters)
        size = A.numel()
        frames = len(w) // samples.sizes[i]
        extra: dict[str, Any] = {
            "A": A.detach(),
            "B": B.detach(),
            "dA": {
                name: x[:size].reshape((*A.shape, *parameters[name].shape))
                for name, x in both.items()
            },
            "dB": {name: x[size] for name, x in both.items()},
            "w": w.detach(),
            "O": values.detach().reshape(frames, samples.sizes[i], -1),
        }
        return Chunk(extra["A"], dict(extra["dA"]), {"energy_evaluations": 1}, extra)

    def __repr__(self) -> str:
        return f"Reweighting(threshold={self.threshold:g})"


@dataclass
class _Samples(Generic[State]):
    """Frames of each chunk, flattened over time and replicas, and their reduced energies.

    A rank has those of its own chunks, by number.
    The energies are those at sampling, with the terms of the bath and without.
    """

    simulation: Simulation[State]
    sizes: list[int]
    skip: float
    states: dict[int, State]
    energies: dict[int, dict[bool, Tensor]]
    evaluations: int
    pairs: Any
    rank: int
    boxes: list[Tensor]

    def depends_on_bath(self, observable: TimeAverage, ranks: Ranks) -> bool:
        own = any(
            depends_on_bath(self.simulation.dynamics, observable.function, state)
            for state in self.states.values()
        )
        return any(ranks.exchange(own))

    def log_weight(self, i: int, bath: bool, dynamics: Dynamics[State] | None = None) -> Tensor:
        """Compute the log weights of a chunk's frames for a dynamics; None: that of the runs."""
        now = self.simulation.dynamics if dynamics is None else dynamics
        return self.energies[i][bath] - reduced_energy(now, self.states[i], bath)

    def is_in_boxes_of(self, dynamics: Dynamics[State]) -> bool:
        """Return whether the boxes of a dynamics are those of the runs.

        A box bounds the positions, which no weight can change.
        """
        now = boxes_of(dynamics)
        return len(now) == len(self.boxes) and all(map(torch.equal, now, self.boxes))

    @torch.no_grad()
    def log_weights(self, bath: bool, work: Work) -> Tensor:
        """Return the log weights of all chunks, on every rank."""
        return torch.cat(work.trees("weights", len(self.sizes), lambda i: self.log_weight(i, bath)))

    def effective_share(self, bath: bool, work: Work) -> float:
        w = torch.softmax(self.log_weights(bath, work), 0)
        return 1.0 / float((w**2).sum() * len(w))


def boxes_of(dynamics: Dynamics[State]) -> list[Tensor]:
    """Return copies of the boxes of all parts of a dynamics."""
    found = (part._buffers.get("box") for part in dynamics.modules())
    return [box.detach().clone() for box in found if box is not None]


def _like(weights: Tensor, values: Tensor) -> Tensor:
    return weights.reshape(-1, *[1] * (values.ndim - 1))
