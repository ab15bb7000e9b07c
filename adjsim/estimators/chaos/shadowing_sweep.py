"""The sweeps of shadowing: cotangents of one trajectory, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepMap:
    """The steps of a flow or a map on states ``(*batch, n)``, and an observable.

    ``rate`` is the right-hand side of the flow, its neutral direction, or None for a map, which has
    none. ``observe`` maps states to ``(*batch, m)``. The time of a step is h, 1 for a map.
    """

    step: Callable[[Tensor], Tensor]
    rate: Callable[[Tensor], Tensor] | None
    observe: Callable[[Tensor], Tensor]
    h: float


class Cotangents(NamedTuple):
    """The cotangents at the ends of K segments of R trajectories, and sums over the segments.

    The basis W is ``(K, M, R, n)``, and the particular v of m observables ``(K, m, R, n)``.
    ``metric`` and ``mixed`` are the integrals C_i of ``W^T W`` and d_i of ``W^T v``. ``triangles``
    are R_i of the orthonormalisation at the start of segment i, and ``removed`` the components b_i
    taken from v there. C and R are ``(K, R, M, M)``, d and b ``(K, m, R, M)``.
    """

    basis: Tensor
    particular: Tensor
    metric: Tensor
    mixed: Tensor
    triangles: Tensor
    removed: Tensor

    def of(self, part: slice) -> Cotangents:
        """Return the cotangents of some of the trajectories, contiguous in memory."""
        matrices = ("metric", "triangles")
        parts = [x[:, part] if k in matrices else x[:, :, part] for k, x in self._asdict().items()]
        return Cotangents(*(x.contiguous() for x in parts))


def divergence(grew: str, unstable: int) -> RuntimeError:
    """Make the error of cotangents that grow along the run."""
    return RuntimeError(
        f"the particular cotangent grew {grew} along the run: there are more unstable directions "
        f"than unstable = {unstable}. Use more."
    )


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
def sweep(steps: StepMap, states: Tensor, mean: Tensor, length: int, unstable: int) -> Cotangents:
    """Propagate the basis and the particular cotangents backward, ``length`` steps a segment.

    ::

        W_n = DPhi^T W_{n+1}          v_n = DPhi^T v_{n+1} + h dJ/du(u_n)

    At the end ``v = f (<J> - J)/|f|^2``, and W is random, orthonormal and orthogonal to f. Where a
    segment begins, f is taken out of W, ``W = Q R``, ``b = Q^T v``, and Q and v - Q b go on.
    """
    last, outputs = len(states) - 1, mean.shape[-1]
    v = states.new_zeros((outputs, *states.shape[1:]))
    if steps.rate is not None:
        f = steps.rate(states[last])
        away = (mean - steps.observe(states[last])).movedim(-1, 0).unsqueeze(-1)
        v = v + f * away / f.square().sum(-1, keepdim=True)
    generator = torch.Generator().manual_seed(0)
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
            raise divergence("without bound", unstable)
        w, triangle = _orthonormal(_without_rate(steps, w, states[first]))
        removed = torch.einsum("jrn,mrn->mrj", w, v)
        v = v - torch.einsum("jrn,mrj->mrn", w, removed)
        ends.append((*ended, metric, mixed, triangle, removed))
    return Cotangents(*(torch.stack(x) for x in zip(*reversed(ends), strict=True)))


def derivative(
    steps: StepMap,
    states: Tensor,
    found: Cotangents,
    penalty: float,
    parameters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Compute the shadowing derivatives of the averages, averaged over the trajectories.

    With the cotangent ``v + W a`` at their ends the segments are independent, so all of them go
    backward at once. The results are ``(m, *parameter)``.
    """
    ends = found.particular
    if found.basis.shape[1]:
        a = solve_segments(found, penalty)
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


def solve_segments(found: Cotangents, penalty: float) -> Tensor:
    """Minimise the size of the combined cotangent along the trajectory.

    ::

        min  sum_i a_i^T C_i a_i / 2 + d_i^T a_i        with  a_{i-1} = R_i a_i + b_i

    With the constraints as E a = b the multipliers solve
    ``(E C^-1 E^T + penalty I) mu = -b - E C^-1 d``, a block-tridiagonal system with K - 1 blocks of
    size M, and ``a = -C^-1 (d + E^T mu)``, ``(K, m, R, M)``.
    """
    _, _, metric, d, r, b = found
    count = len(metric)
    inverse = torch.linalg.inv(metric)
    # Vectors are columns from here on, with the observables as columns beside each other.
    d, b = (x.movedim(1, -1) for x in (d, b))
    unit = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    carried = r @ inverse
    pivots, sides = list[Tensor](), list[Tensor]()
    for i in range(1, count):
        pivot = inverse[i - 1] + carried[i] @ r[i].mT + penalty * unit
        side = -b[i] - inverse[i - 1] @ d[i - 1] + carried[i] @ d[i]
        if i > 1:
            # The block between the rows i - 1 and i is -R_{i-1} C_{i-1}^-1.
            factor = torch.linalg.solve(pivots[-1], -carried[i - 1]).mT
            pivot = pivot + factor @ carried[i - 1]
            side = side - factor @ sides[-1]
        pivots.append(pivot)
        sides.append(side)
    multipliers = [torch.zeros_like(d[0])] * (count + 1)
    for i in range(count - 1, 0, -1):
        multipliers[i] = torch.linalg.solve(
            pivots[i - 1], sides[i - 1] + carried[i] @ multipliers[i + 1]
        )
    a = [-inverse[i] @ (d[i] + multipliers[i + 1] - r[i].mT @ multipliers[i]) for i in range(count)]
    return torch.stack(a).movedim(-1, 1)


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
