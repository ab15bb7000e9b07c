"""The sweeps of shadowing: cotangents of one trajectory, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from adjsim.estimators.chaos.shadowing_system import Segments, solve_segments


@dataclass(frozen=True)
class StepMap:
    """The steps of a flow or a map on states ``(*batch, n)``, and an observable.

    Attributes:
        step: maps states to the states one step later.
        rate: maps states to the right-hand side of the flow, its neutral direction; None for a map,
            which has none.
        observe: maps states to the observables, ``(*batch, m)``.
        h: the time of a step; 1 for a map.
    """

    step: Callable[[Tensor], Tensor]
    rate: Callable[[Tensor], Tensor] | None
    observe: Callable[[Tensor], Tensor]
    h: float


class Cotangents(NamedTuple):
    """The cotangents at the ends of K segments, and the sums over the segments.

    Attributes:
        basis: W at the ends, ``(K, M, R, n)``.
        particular: v at the ends, ``(K, m, R, n)``.
        segments: the data of the least-squares problem.
    """

    basis: Tensor
    particular: Tensor
    segments: Segments

    def of(self, part: slice) -> Cotangents:
        """Return the cotangents of some of the trajectories, contiguous in memory."""
        metric, mixed, triangles, removed = self.segments
        segments = (metric[:, part], mixed[:, :, part], triangles[:, part], removed[:, :, part])
        return Cotangents(
            self.basis[:, :, part].contiguous(),
            self.particular[:, :, part].contiguous(),
            Segments(*(x.contiguous() for x in segments)),
        )


class DivergenceError(RuntimeError):
    """Raised when cotangents grow along the run, since unstable directions were left out."""


def trajectory(steps: StepMap, start: Tensor, count: int) -> Tensor:
    """Run ``count`` steps without a graph, and return all states, ``(count + 1, R, n)``."""
    states = start.new_empty((count + 1, *start.shape))
    states[0] = start
    with torch.no_grad():
        for i in range(count):
            states[i + 1] = steps.step(states[i])
    return states


def averages(steps: StepMap, states: Tensor) -> Tensor:
    """Average the observables over the ends of the steps, ``(R, m)``."""
    with torch.no_grad():
        # A thousand states at a time bound the memory. A sum along the last axis has the same bits
        # for any number of replicas.
        parts = [
            steps.observe(part).movedim(0, -1).contiguous().sum(-1)
            for part in states[1:].split(1000)
        ]
    return reduce(torch.add, parts) / (len(states) - 1)


@torch.no_grad()
def sweep(
    steps: StepMap, states: Tensor, mean: Tensor, length: int, unstable: int, seed: int = 0
) -> Cotangents:
    """Propagate the basis and the particular cotangents backward, ``length`` steps a segment.

    ::

        W_n = DPhi^T W_{n+1}          v_n = DPhi^T v_{n+1} + h dJ/du(u_n)

    At the end ``v = f (<J> - J)/|f|^2``, and W is random, orthonormal and orthogonal to f. Where a
    segment begins, f is taken out of W, ``W = Q R``, ``b = Q^T v``, and Q and v - Q b go on.

    Raises:
        DivergenceError: a cotangent is not finite.
    """
    last, outputs = len(states) - 1, mean.shape[-1]
    v = states.new_zeros((outputs, *states.shape[1:]))
    if steps.rate is not None:
        f = steps.rate(states[last])
        away = (mean - steps.observe(states[last])).movedim(-1, 0).unsqueeze(-1)
        v = v + f * away / f.square().sum(-1, keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    # One draw for all trajectories, so that none depends on the number of others.
    drawn = torch.randn(unstable, 1, states.shape[-1], generator=generator, dtype=torch.float64)
    drawn = drawn.to(states).expand(-1, states.shape[1], -1)
    w = _orthonormal(_without_rate(steps, drawn, states[last]))[0]
    ends: list[tuple[Tensor, ...]] = []
    for first in range(last - length, -1, -length):
        metric = states.new_zeros((states.shape[1], unstable, unstable))
        mixed = states.new_zeros((outputs, states.shape[1], unstable))
        ended = (w, v)
        for n in range(first + length - 1, first - 1, -1):
            metric = metric + steps.h * torch.einsum("jrn,krn->rjk", w, w)
            mixed = mixed + steps.h * torch.einsum("jrn,mrn->mrj", w, v)
            w, v = _back(steps, states[n], w, v)
        if not bool(torch.isfinite(v).all()):
            raise DivergenceError
        w, triangle = _orthonormal(_without_rate(steps, w, states[first]))
        removed = torch.einsum("jrn,mrn->mrj", w, v)
        v = v - torch.einsum("jrn,mrj->mrn", w, removed)
        ends.append((*ended, metric, mixed, triangle, removed))
    basis, particular, *sums = (torch.stack(x) for x in zip(*reversed(ends), strict=True))
    return Cotangents(basis, particular, Segments(*sums))


def derivative(
    steps: StepMap,
    states: Tensor,
    found: Cotangents,
    penalty: float,
    parameters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Compute the shadowing derivatives of the averages, averaged over the trajectories.

    With the cotangent ``v + W a`` at the end of each segment the segments are independent, so all
    of them go backward at once, with one cotangent each. The results are ``(m, *parameter)``.
    """
    ends = found.particular
    if found.basis.shape[1]:
        a = solve_segments(found.segments, penalty)
        ends = ends + torch.einsum("kjrn,kmrj->kmrn", found.basis, a)
    parts = states[:-1].unflatten(0, (len(ends), -1))
    weight = 1 / ((len(states) - 1) * steps.h * states.shape[1])
    wanted, totals = list(parameters.values()), []
    for m, cotangent in enumerate(ends.unbind(1)):
        sums = [torch.zeros_like(x) for x in wanted]
        for part in reversed(parts.unbind(1)):
            with torch.enable_grad():
                y = part.detach().requires_grad_()
                whole = (cotangent * steps.step(y)).sum() + steps.h * steps.observe(y)[..., m].sum()
            cotangent, *grads = torch.autograd.grad(
                whole, [y, *wanted], allow_unused=True, materialize_grads=True
            )
            sums = [x + g for x, g in zip(sums, grads, strict=True)]
        totals.append(sums)
    return {
        name: weight * torch.stack([sums[i] for sums in totals])
        for i, name in enumerate(parameters)
    }


def _back(steps: StepMap, state: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Take all cotangents back through one step, and add the derivative of the observables."""
    count, outputs = len(w), len(v)
    with torch.enable_grad():
        y = state.detach().expand(count + outputs, *state.shape).clone().requires_grad_()
        after = (torch.cat([w, v]) * steps.step(y)).sum()
        seen = steps.observe(y[count:]).diagonal(dim1=0, dim2=-1).sum()
        whole = after + steps.h * seen
    (found,) = torch.autograd.grad(whole, y)
    return found[:count], found[count:]


def _without_rate(steps: StepMap, w: Tensor, state: Tensor) -> Tensor:
    """Take the neutral direction out of cotangents."""
    if steps.rate is None:
        return w
    f = steps.rate(state)
    return w - f * (w * f).sum(-1, keepdim=True) / f.square().sum(-1, keepdim=True)


def _orthonormal(w: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormalise cotangents ``(M, R, n)``, and return them with the triangular factors."""
    q, r = torch.linalg.qr(w.movedim(0, -1))
    return q.movedim(-1, 0), r
