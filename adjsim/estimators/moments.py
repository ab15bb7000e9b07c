"""The moments of an equal-time covariance, as one function of the state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from adjsim.core.rounding import power_of_two
from adjsim.core.state import AnyState
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.probes import reduced_energy
from adjsim.estimators.replicas import checked, with_values


class Moments:
    """The moments of an observable O and of ``du/dtheta`` at a state.

    The result is one vector in float64: O of every replica, and the means over replicas of O^2, of
    ``du/dtheta``, of ``O du/dtheta`` and of ``dO/dtheta``. Calls change nothing on the object, so a
    compiled loop can average it. The cache of compiled loops is keyed by the averaged function, so
    one object serves all chunks.

    u has the terms of the ``bath``, or not. The rounded mean of O at the start is subtracted before
    products are taken, so that they keep their digits. So the bits of products depend on the start,
    and all chunks need the same.
    """

    def __init__(
        self,
        dynamics: Dynamics[Any],
        function: Callable[[Any], Tensor],
        bath: bool,
        start: AnyState,
    ) -> None:
        self.dynamics, self.function, self.bath = dynamics, function, bath
        with torch.no_grad():
            seen = checked(function(start), start).to(torch.float64)
        self.shift = _offset(seen.reshape(len(seen), -1))
        self.names = list(dynamics.trainable())

    def equals(self, other: Moments) -> bool:
        """Return whether two moments are the same function of the state."""
        # Two reads of a method make two objects.
        same = isinstance(self.function, MethodType) and self.function == other.function
        return (
            self.dynamics is other.dynamics
            and (same or self.function is other.function)
            and self.bath == other.bath
            and self.names == other.names
            and torch.equal(self.shift, other.shift)
        )

    def __call__(self, state: AnyState) -> Tensor:
        registered = dict(self.dynamics.named_parameters()) | dict(self.dynamics.named_buffers())
        parameters = {name: registered[name] for name in self.names}
        with torch.enable_grad():
            if all(p.requires_grad for p in parameters.values()):
                seen, u = self._evaluate(state, self.dynamics)
            else:
                # In a compiled loop the parameters are inputs, which do not require grad.
                parameters = {name: p.detach().requires_grad_() for name, p in parameters.items()}
                evaluate = partial(self._evaluate, state)
                seen, u = with_values(self.dynamics, parameters, evaluate)
            rows = checked(seen, state).reshape(len(seen), -1).to(torch.float64)
            entries = rows.mean(0).unbind()
            values = rows.detach() - self.shift
            weights = torch.stack([torch.ones_like(u), *values.to(u).unbind(1)]) / len(u)
            if len(u) < len(weights):
                # A pass for each replica, of which there are fewer than weights.
                units = torch.eye(len(u), dtype=u.dtype, device=u.device)
                each = torch.stack([self._slopes(u, parameters, unit) for unit in units])
                slopes = [weights.to(each) @ each]
            else:
                slopes = [self._slopes(u, parameters, weight) for weight in weights]
            # Skipped for an observable without parameters: a curve and a network would give many
            # derivatives, all zero.
            if seen.requires_grad:
                slopes += [self._slopes(entry, parameters, None) for entry in entries]
        parts = [values, values.square().mean(0), *slopes]
        return torch.cat([part.to(torch.float64).reshape(-1) for part in parts])

    def _evaluate(self, state: AnyState, dynamics: Dynamics[Any]) -> tuple[Tensor, Tensor]:
        return self.function(state), reduced_energy(dynamics, state, self.bath)

    @staticmethod
    def _slopes(output: Tensor, parameters: dict[str, Tensor], weight: Tensor | None) -> Tensor:
        """Compute the derivative with respect to all parameters, joined; zero for unused ones."""
        wanted = list(parameters.values())
        if not wanted:
            return output.new_zeros(0)
        found = [torch.zeros_like(p) for p in wanted]
        if output.requires_grad:
            found = torch.autograd.grad(
                output, wanted, weight, retain_graph=True, materialize_grads=True
            )
        return torch.cat([g.detach().reshape(-1) for g in found])

    def unpack(self, average: Tensor, values: Tensor) -> dict[str, Any]:
        """Return the averages by name, in float64, in the shapes of ``values`` and parameters."""
        shape, count = values.shape[1:], values[0].numel()
        trainable = self.dynamics.trainable()
        sizes = [p.numel() for p in trainable.values()]
        numbers = [values.numel(), count, (1 + count) * sum(sizes), count * sum(sizes)]
        # Explicit derivatives that were skipped are zero.
        padding = average.new_zeros(sum(numbers) - len(average))
        each, squares, slopes, explicit = torch.cat([average, padding]).split(numbers)
        each, shift = each.reshape(values.shape), self.shift.reshape(shape)
        mean, square = each.mean(0), squares.reshape(shape)
        G, OG = slopes.reshape(1 + count, -1).split([1, count])

        def by_name(rows: Tensor, leading: torch.Size) -> dict[str, Tensor]:
            parts = rows.split(sizes, 1) if sizes else ()
            return {
                name: part.reshape((*leading, *p.shape))
                for (name, p), part in zip(trainable.items(), parts, strict=True)
            }

        return {
            "O": mean + shift,
            "each": each + shift,
            "variance": square - mean**2,
            "G": by_name(G, torch.Size()),
            "OG": by_name(OG + self.shift.unsqueeze(-1) * G, shape),
            "dO": by_name(explicit.reshape(count, -1), shape),
        }


def _offset(values: Tensor) -> Tensor:
    """Round the mean over replicas, so that compiled loops, of which it is a constant, serve again.

    The values that remain are up to 128 spreads large, and their products lose 4 of 16 digits.
    """
    mean, spread = values.mean(0), values.std(0, correction=0)
    unit = power_of_two(torch.where(spread > 0, 128 * spread, 1.0))
    rounded = torch.where(spread > 0, torch.round(mean / unit) * unit, mean)
    return torch.nan_to_num(rounded, 0.0, 0.0, 0.0)
