"""The score function of the equilibrium distribution: REINFORCE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim._noise import Noise
from adjsim._state import State
from adjsim._trajectory import TimeAverage, Trajectory, check_times, first_averaged_step, grid
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.base import Chunk, ChunkedEstimator, Estimator, Observable, Simulation, checked, weighted_mean
from adjsim.estimators.probes import reads_bath, reduced_energy
from adjsim.simulation import run
from adjsim.solvers.base import SteppingSolver

# Starts at which an observable is looked at before any work.
PROBED = 4


class ScoreFunction(ChunkedEstimator):
    """How an equilibrium mean changes, from a covariance at equal times (REINFORCE; Williams, Mach. Learn. 8, 229 (1992))::

        d<O>/dtheta = <dO/dtheta> - <(O - <O>) (du/dtheta - <du/dtheta>)>,     u = H(q, p; theta)/kT

    It answers the stationary question, whatever the dynamics that sampled, for parameters of the density: the potential's,
    masses and kT. Nothing is propagated in time, so chaos does no harm and memory does not grow with the number of samples.
    Its variance is that of a product, ``var(O) var(du/dtheta)`` and more over the number of independent samples: for large
    systems, where du/dtheta is large, pathwise or reweighted gradients are better.

    Variables of a bath (the memory of :class:`~adjsim.GeneralizedLangevin`, the momenta of a Nose-Hoover chain) have a density
    too. Its terms count where the observable is found to read them, at the starts or at the ends, by moving them. Parameters
    that the density does not know have gradient zero, exactly: friction, rates, strengths, and tau where no chain momentum is
    read.

    Raises:
        TypeError: dynamics without a known density, or an observable that is no ``TimeAverage``.
        ValueError: an observable of the position of a Nose-Hoover chain, which has no stationary density.

    Args:
        burn_in: time to equilibrate, left out. With a ``TimeAverage`` that gives one too, the two must agree.
    """

    estimand: ClassVar[str] = "stationary"

    def __init__(self, burn_in: float = 0.0) -> None:
        if not burn_in >= 0:
            raise ValueError(f"burn_in must be zero or a positive time; got {burn_in}.")
        self.burn_in = burn_in

    def check(self, simulation: Simulation, observable: Observable) -> None:
        average = stationary(self, simulation, observable)
        burn_in(self, self.burn_in, average)

    def chunk(self, simulation: Simulation, observable: Observable, start: State, noise: Noise | None) -> Chunk:
        assert isinstance(observable, TimeAverage)
        assert isinstance(simulation.solver, SteppingSolver)
        dynamics, function = simulation.dynamics, observable.function
        made, moments = self._sample(simulation, observable, start, noise, reads_bath(dynamics, function, start))
        evaluations = made.stats["energy_evaluations"]
        if not moments["bath"] and reads_bath(dynamics, function, made.final):
            made, moments = self._sample(simulation, observable, start, noise, True)
            evaluations += made.stats["energy_evaluations"]
        return Chunk(moments["O"], moments["dO"], {"energy_evaluations": evaluations}, moments)

    def _sample(
        self, simulation: Simulation, observable: TimeAverage, start: State, noise: Noise | None, bath: bool
    ) -> tuple[Trajectory, dict[str, Any]]:
        """A run, and the moments that it gives with the terms of the bath or without."""
        assert isinstance(simulation.solver, SteppingSolver)
        skip, times, dt = burn_in(self, self.burn_in, observable), check_times(simulation.ts), simulation.solver.dt
        last = grid(times, dt)[-1]
        sums = _Sums(simulation.dynamics, observable, start, last - first_averaged_step(skip, dt, last) + 1, bath)
        with torch.no_grad():
            made = run(
                simulation.dynamics, start, simulation.ts, simulation.solver, DirectAdjoint(), TimeAverage(sums, skip), noise
            )
        made.stats["energy_evaluations"] += sums.evaluations
        return made, {**sums.means(), "bath": bath}

    def combine(self, simulation: Simulation, parts: list[Chunk], sizes: list[int]) -> dict[str, Any]:
        """Every chunk's covariance about the means of all: their mean is the covariance of all, and their spread its error."""
        ess = ess_of([part.extra for part in parts], sizes)
        # The covariance about the sample's own mean is short by one part in the number of independent samples.
        whole = ess / max(ess - 1, 1)
        mean = weighted_mean([part.value for part in parts], sizes)
        for name in parts[0].grad:
            G = weighted_mean([part.extra["G"][name] for part in parts], sizes)
            for part in parts:
                g = part.extra["G"][name]
                centred = part.extra["OG"][name] - outer(mean, g) - outer(part.value, G) + outer(mean, G)
                part.grad[name] = part.extra["dO"][name] - whole * centred
        halves = torch.stack([part.extra["halves"] for part in parts])
        return {"ess": ess, "equilibration": equilibration(halves)}

    def __repr__(self) -> str:
        return f"ScoreFunction(burn_in={self.burn_in:g})"


class _Sums:
    """Sums over steps and replicas of the observable, of du/dtheta, and of their product: a function of the state to be
    averaged, so that nothing is stored."""

    def __init__(self, dynamics: Dynamics, observable: TimeAverage, start: State, steps: int, bath: bool) -> None:
        self.dynamics, self.function, self.steps = dynamics, observable.function, steps
        self.parameters, self.start, self.bath = dynamics.trainable(), start, bath
        self.count = self.evaluations = 0
        self.replicas = start.position.shape[0]
        self.offset: Tensor | None = None

    def __call__(self, state: State) -> Tensor:
        with torch.enable_grad():
            seen = checked(self.function(state), self.start)
            u, entries = reduced_energy(self.dynamics, state, self.bath), seen.sum(0).reshape(-1).unbind()
        self.evaluations += 1
        values = seen.detach()
        if self.offset is None:
            # What is subtracted cancels; it keeps the product's sum from being a difference of large numbers.
            self.offset = values.mean(0)
            self.O, self.OO = torch.zeros_like(self.offset), torch.zeros_like(self.offset)
            self.each = torch.zeros_like(values)
            self.early = torch.zeros_like(values)
            self.G = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
            self.OG = {n: p.new_zeros((*self.offset.shape, *p.shape)) for n, p in self.parameters.items()}
            self.dO = {name: torch.zeros_like(x) for name, x in self.OG.items()}
        centred = values - self.offset
        self.O += centred.sum(0)
        self.OO += (centred**2).sum(0)
        self.each += centred
        if 2 * self.count < self.steps:
            self.early += centred
        self.count += 1
        names, wanted = list(self.parameters), list(self.parameters.values())
        if wanted and u.requires_grad:
            self._add(self.G, torch.autograd.grad(u, wanted, torch.ones_like(u), retain_graph=True, allow_unused=True), names)
            columns = centred.reshape(self.replicas, -1).unbind(1)
            rows = [torch.autograd.grad(u, wanted, column, retain_graph=True, allow_unused=True) for column in columns]
            self._add(self.OG, self._stacked(rows), names)
        if wanted and seen.requires_grad:
            rows = [torch.autograd.grad(entry, wanted, retain_graph=True, allow_unused=True) for entry in entries]
            self._add(self.dO, self._stacked(rows), names)
        return torch.zeros(())

    def _stacked(self, rows: Sequence[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
        assert self.offset is not None
        found: list[Tensor | None] = []
        for column, p in zip(zip(*rows, strict=True), self.parameters.values(), strict=True):
            if all(g is None for g in column):
                found.append(None)
            else:
                filled = [torch.zeros_like(p) if g is None else g for g in column]
                found.append(torch.stack(filled).reshape((*self.offset.shape, *p.shape)))
        return found

    @staticmethod
    def _add(total: dict[str, Tensor], found: Any, names: list[str]) -> None:
        for name, grad in zip(names, found, strict=True):
            if grad is not None:
                total[name] += grad.detach()

    def means(self) -> dict[str, Any]:
        """Means over steps and replicas, and what the errors are made from."""
        assert self.offset is not None
        n = self.count * self.replicas
        mean = self.O / n + self.offset
        G = {name: g / n for name, g in self.G.items()}
        half = (self.count + 1) // 2
        early, late = self.early / half, (self.each - self.early) / max(1, self.count - half)
        return {
            "O": mean,
            "dO": {name: g / n for name, g in self.dO.items()},
            "G": G,
            "OG": {name: g / n + outer(self.offset, G[name]) for name, g in self.OG.items()},
            "variance": self.OO / n - (self.O / n) ** 2,
            "each": self.each / self.count + self.offset,
            "halves": (late - early).mean(0),
        }


def outer(mean: Tensor, grad: Tensor) -> Tensor:
    """The product of every entry of a mean with every entry of a parameter's gradient."""
    return mean.reshape(mean.shape + (1,) * grad.ndim) * grad


def outer_mean(values: Tensor, grads: Tensor) -> Tensor:
    """The mean over replicas, the leading axis of both, of :func:`outer`."""
    product = values.reshape(len(values), -1).T @ grads.reshape(len(grads), -1)
    return (product / len(values)).reshape(values.shape[1:] + grads.shape[1:])


def ess_of(parts: list[dict[str, Any]], sizes: list[int]) -> float:
    """How many independent samples the time averages of the observable are worth: its variance over that of the mean, from
    the spread of the replicas' own averages; the least over its entries."""
    each = torch.cat([part["each"] for part in parts])
    if len(each) < 2:
        return 1.0
    mean = each.mean(0)
    within = weighted_mean([part["variance"] + (part["O"] - mean) ** 2 for part in parts], sizes)
    ratio = within / (each.var(0) / len(each))
    ratio = ratio[torch.isfinite(ratio)]
    return max(1.0, float(ratio.min())) if ratio.numel() else float(len(each))


def equilibration(halves: Tensor) -> float | None:
    """By how many standard errors the second half's mean differs from the first's, over chunks; the largest of its entries."""
    if len(halves) < 3:
        return None
    score = (halves.mean(0) / (halves.std(0) / len(halves) ** 0.5)).abs()
    score = score[torch.isfinite(score)]
    return float(score.max()) if score.numel() else None


def stationary(estimator: Estimator, simulation: Simulation, observable: Observable) -> TimeAverage:
    """The observable as a time average of dynamics that have a stationary density, or an error that says why not."""
    name = type(estimator).__name__
    if not isinstance(observable, TimeAverage):
        raise TypeError(
            f"{name} estimates how an equilibrium mean changes, so it takes TimeAverage(fn). What happens at a given time, "
            "such as a first passage or a final state, is a path question: use Pathwise, Girsanov or FiniteDifference."
        )
    if not isinstance(simulation.solver, SteppingSolver):
        raise TypeError(f"{name} takes a solver of a fixed step, not {type(simulation.solver).__name__}.")
    probe = simulation.starts(PROBED, torch.Generator().manual_seed(0))
    with torch.no_grad():
        simulation.dynamics.reduced_energy(probe)
    reads_bath(simulation.dynamics, observable.function, probe)
    return observable


def burn_in(estimator: Estimator, own: float, observable: TimeAverage) -> float:
    """The one burn-in of estimator and observable."""
    if own and observable.burn_in and own != observable.burn_in:
        raise ValueError(
            f"{type(estimator).__name__} has burn_in = {own:g} and the observable {observable.burn_in:g}; they must agree."
        )
    return own or observable.burn_in


REINFORCE = ScoreFunction
