"""The bath with a memory, held by constraints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adjsim.dynamics.constraints.terms import ConstrainedTerm
from adjsim.dynamics.moves import Move, Scale, Shear
from adjsim.dynamics.sources import Coefficient, Combination, Field, Random, Source
from adjsim.dynamics.thermostats.gle import MemoryBath, amplitudes, ldu


class ConstrainedBath(ConstrainedTerm):
    """The bath with a memory, G, under constraints::

        dp   = -P sum c_i z_i dt
        dz_i = (c_i p - r_i z_i) dt + sqrt(2 r_i m kT) dW_i

    P is the projector of :class:`~adjsim.dynamics.constraints.terms.ConstrainedTerm`. Momenta are
    tangent, P p = p, and the memory has all components. Without the memory as a variable::

        dp = P (F - int K(t - s) p(s) ds + noise) dt

    The density ``exp(-(p . p/m + sum z_i . z_i/m) / 2kT)`` of tangent p and all z_i is stationary:

    * the couplings c_i have no divergence, and conserve the exponent, because P/m is symmetric:
      ``p . (P z)/m = (P p) . z/m = p . z/m``;
    * the other part of dz_i is an Ornstein-Uhlenbeck process with this density.

    P is constant while G acts. So p and P z_i follow the equations without constraints, and each
    (1 - P) z_i decays by itself, with noise that is independent of that of P z_i. With E and L of
    :class:`~adjsim.dynamics.thermostats.gle.MemoryBath` and n_i = exp(-rate_i h), the flow is exact
    in distribution: y = (p, P z) becomes ``E y + P sqrt(m kT) L xi``, and (1 - P) z_i becomes
    ``(1 - P) (n_i z_i + sqrt(m kT (1 - n_i^2)) xi_i)``.

    A shear may be projected. A scale may not, so p and P z_i must have the scales of their normal
    parts: 1 and n_i. These have the product det E, and E is made of them and shears alone::

        E = X Lower diag(1, n) Upper        X adds sum_i x_i z_i to p
    """

    term: MemoryBath

    def coefficients(self, h: float, state: Any) -> dict[str, Tensor]:
        bath, like = self.term, state.momentum
        rates = bath.rates.double()
        decay = torch.exp(-h * rates)
        bath.refuse_long(h, lambda E: _unscaled(E, decay.detach())[1])
        propagator, covariance = bath.flow(h)
        x, _, rest = _unscaled(propagator, decay)
        lower, _, upper = ldu(rest)
        found = {"decay": decay.reshape(-1, 1, 1), "last 0": x}
        free = torch.sqrt(-torch.expm1(-2 * h * rates))
        for i, weights in enumerate(amplitudes(covariance)):
            found[f"noise {i}"] = weights
            if i < len(rates):
                found[f"upper {i}"] = upper[i, i + 1 :]
            if i > 0:
                # The draw i - 1 has the amplitude of the normal part in all directions.
                own = torch.arange(i, device=weights.device) == i - 1
                found[f"noise {i}"] = weights - own * free[i - 1]
                found[f"from p {i}"] = lower[i, 0]
            if i > 1:
                found[f"lower {i}"] = lower[i, 1:i]
        common = super().coefficients(h, state)
        found = {name: value.to(like) for name, value in found.items()}
        thermal = bath.masses.thermal(like, bath.kT)
        normal = {f"free {i + 1}": thermal * x for i, x in enumerate(free.to(like))}
        return {**common, "thermal": thermal, **found, **normal}

    def moves(self, h: float, state: Any) -> Sequence[Move]:
        last = self.term.draws - 1
        z = [Field("memory", i) for i in range(last)]
        xi = [Random(i) for i in range(last + 1)]

        def add(i: int, what: str, sources: Sequence[Source], coefficient: Any = None) -> Shear:
            name, link = ("momentum", None) if i == 0 else ("memory", i - 1)
            total = Combination(f"{what} {i}", tuple(sources))
            return Shear(name, self._projecting(total, coefficient), None, link)

        moves: list[Move] = [add(i, "upper", z[i:]) for i in range(last)]
        moves.append(Scale("memory", Coefficient("decay")))
        for i in range(last, 0, -1):
            moves.append(Shear("memory", Field("momentum"), f"from p {i}", i - 1))
            if i > 1:
                moves.append(add(i, "lower", z[: i - 1]))
        moves += [add(0, "last", z), add(0, "noise", xi, "thermal")]
        for i in range(1, last + 1):
            moves.append(Shear("memory", Random(i - 1), f"free {i}", i - 1))
            moves.append(add(i, "noise", xi[:i], "thermal"))
        return moves


def _unscaled(E: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find x, minors and X^-1 E, whose pivots are 1 and the decays.

    A leading minor of X^-1 E is that of E less x_j times minors in which the row of z_j is the
    first. Those of rows that the minor has are zero. So the minor of p, z_1, ..., z_k and the
    product of its pivots give x_{k + 1}, from the last to the first. The minors by which x_j is
    divided are positive for small h: to leading order they are c_j h.
    """

    def minor(first: Tensor, k: int) -> Tensor:
        return torch.linalg.det(torch.cat([first.unsqueeze(0), E[1 : k + 1]])[:, : k + 1])

    row, found, minors = E[0], [], []
    for k in reversed(range(len(decay))):
        product = decay[:k].prod()
        minors.append(minor(E[k + 1], k) / product)
        found.append((minor(row, k) / product - 1) / minors[-1])
        row = row - found[-1] * E[k + 1]
    rest = torch.cat([row.unsqueeze(0), E[1:]])
    return torch.stack(found[::-1]), torch.stack(minors), rest
