"""Stored frames of equilibrium runs, and their weights for other parameters."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from adjsim.core.durable.ranks import Ranks
from adjsim.core.reading import Reading
from adjsim.core.rows import pulled, pulled_rows
from adjsim.core.state import State, select
from adjsim.core.trajectory import TimeAverage
from adjsim.dynamics import Constrained
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.base import Chunk, Request, jacobian
from adjsim.estimators.probes import depends_on_bath, reduced_energy
from adjsim.estimators.replicas import Simulation, checked
from adjsim.estimators.sharing import Work

# Rows of cotangents times numbers of a frame, from which the derivative of each frame is taken by a
# call of its own: there the overhead of a call is as long as its arithmetic.
LARGE = 4096


@dataclass
class Samples(Generic[State]):
    """Frames of a rank's chunks, flattened over time and replicas.

    The reduced energies are those at sampling, without the terms of the bath and with them, and
    ``start`` has the parameters at sampling.
    """

    simulation: Simulation[State]
    sizes: list[int]
    skip: float
    states: dict[int, State]
    energies: dict[int, list[Tensor]]
    evaluations: int
    pairs: Any
    rank: int
    support: list[Tensor]
    start: dict[str, Tensor]

    def check_support(self) -> None:
        """Raise an error if no weights turn the frames to those of the dynamics as it is now."""
        if not self._has_support(self.simulation.dynamics):
            raise RuntimeError(
                "a box or a constraint has changed since the frames were sampled; call Reweighting."
            )

    def serve(self, request: Request[State], skip: float, ranks: Ranks) -> bool:
        """Return whether weights can turn the samples to those of a request."""
        return (
            self.simulation is request.simulation
            and (self.sizes, self.skip, self.rank) == (request.sizes, skip, ranks.rank)
            and self._has_support(request.simulation.dynamics)
        )

    def _has_support(self, dynamics: Dynamics[State]) -> bool:
        now = support_of(dynamics)
        return len(now) == len(self.support) and all(map(torch.equal, now, self.support))

    def depends_on_bath(self, observable: TimeAverage, ranks: Ranks) -> bool:
        # At the ends of the runs, as ScoreFunction: every test evaluates the observable many times.
        ends = (select(x, slice(-self.sizes[i], None)) for i, x in self.states.items())
        dynamics = self.simulation.dynamics
        own = any(depends_on_bath(dynamics, observable.function, end) for end in ends)
        return any(ranks.exchange(own))

    def log_weight(
        self,
        i: int,
        bath: bool,
        dynamics: Dynamics[State] | None = None,
        frames: slice = slice(None),
    ) -> Tensor:
        """Compute the log weights of a chunk's frames for a dynamics; None: that of the runs."""
        now = self.simulation.dynamics if dynamics is None else dynamics
        states = select(self.states[i], frames)
        return self.energies[i][bath][frames] - reduced_energy(now, states, bath)

    @torch.no_grad()
    def weigh(self, observable: TimeAverage, work: Work) -> Weights:
        """Compute the weights of all chunks, on every rank."""
        bath = self.depends_on_bath(observable, work.ranks)
        return Weights(bath, work.shared(len(self.sizes), lambda i: self.log_weight(i, bath)))

    @torch.no_grad()
    def share_of(self, names: Set[str], ranks: Ranks) -> float:
        """Return the effective share if parameters of other names had not changed."""
        reading = Reading(self.simulation.dynamics)
        tensors = [
            x if name in names else self.start.get(name, x)
            for name, x in zip(reading.names, reading.tensors, strict=True)
        ]
        dynamics = reading.bound(tensors)
        # Without the variables of a bath, which the potential does not depend on.
        parts = ranks.share(len(self.sizes), lambda i: self.log_weight(i, False, dynamics))
        return effective_share_of(torch.cat(parts))

    def reweighted(self, i: int, observable: TimeAverage, weights: Weights) -> Chunk:
        """Compute one chunk's means of w O and of w, and their derivatives.

        Weights are relative to the largest of all chunks, so that none overflows::

            dA = mean of (w O dlog w + w dO)      dB = mean of (w dlog w)
        """
        w = weights.of_chunk(i).to(self.energies[i][0])
        with torch.enable_grad():
            values = checked(observable.function(self.states[i]), self.states[i])
            mean = weighted(w, values).mean(0)
        own = jacobian(mean, self.simulation.dynamics.trainable())
        seen = values.detach().reshape(len(w), -1)
        seen = seen.to(torch.promote_types(seen.dtype, w.dtype))
        rows = torch.cat([weighted(w, seen), w[:, None]], 1).T / len(w)
        both = self._slopes(i, weights.of_bath, rows)
        extra: dict[str, Any] = {
            "A": mean.detach(),
            "B": w.mean(),
            "dA": {name: x + both[name][:-1].reshape(x.shape) for name, x in own.items()},
            "dB": {name: x[-1] for name, x in both.items()},
            "w": w,
            "O": seen.reshape(-1, self.sizes[i], seen.shape[1]),
        }
        return Chunk(extra["A"], dict(extra["dA"]), {"energy_evaluations": 2}, extra)

    def _slopes(self, i: int, bath: bool, rows: Tensor) -> dict[str, Tensor]:
        """Multiply rows ``(k, frames)`` by the derivatives of the log weights by the parameters.

        The log weight of a frame depends on this frame alone. So the derivative of large frames is
        taken one frame after another, once for all rows.
        """
        parameters = self.simulation.dynamics.trainable()
        inputs = list(parameters.values())
        if len(rows) * sum(x[0].numel() for x in self.states[i]) <= LARGE:
            with torch.enable_grad():
                logs = self.log_weight(i, bath)
            found = pulled_rows([logs], inputs, [rows.to(logs)])
        else:
            found = [rows.new_zeros((len(rows), *x.shape)) for x in inputs]
            for frame, row in enumerate(rows.T):
                with torch.enable_grad():
                    logs = self.log_weight(i, bath, frames=slice(frame, frame + 1))
                slopes = pulled([logs], inputs, [torch.ones_like(logs)])
                for total, slope in zip(found, slopes, strict=True):
                    total.view(len(rows), slope.numel()).addr_(row, slope.to(row).flatten())
        return {name: x.to(p.dtype) for (name, p), x in zip(parameters.items(), found, strict=True)}


def support_of(dynamics: Dynamics[State]) -> list[Tensor]:
    """Return copies of the tensors on which the space of the states and its measure depend.

    They are the boxes, and the pairs, lengths and masses of constraints: the measure on these is
    det(G M^-1 G^T)^(1/2), of which a mass that is one number is a factor.
    """
    found = [part._buffers.get("box") for part in dynamics.modules()]
    for part in dynamics.modules():
        if isinstance(part, Constrained):
            mass = part.masses.mass
            found += [part.constraints.index, part.constraints.length]
            found += [mass] if mass.numel() > 1 else []
    return [x.detach().clone() for x in found if x is not None]


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    return weights.reshape(-1, *[1] * (values.ndim - 1)) * values


@dataclass(frozen=True)
class Weights:
    """The log weights of the frames of each chunk, with energies of the bath or without."""

    of_bath: bool
    logs: list[Tensor]

    @property
    def effective_share(self) -> float:
        return effective_share_of(torch.cat(self.logs))

    def of_chunk(self, i: int) -> Tensor:
        """Return the weights of a chunk, relative to the largest of all chunks."""
        return torch.exp(self.logs[i] - max(float(x.max()) for x in self.logs))


def effective_share_of(logs: Tensor) -> float:
    w = torch.softmax(logs, 0)
    return 1.0 / float((w**2).sum() * len(w))
