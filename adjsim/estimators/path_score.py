"""The score of a path, summed over its steps, for each scheme that has one.

``docs/theory.rst`` derives the scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.sweep.stepper import Inputs, Stepper
from adjsim.core.parameters import trainable
from adjsim.core.state import AnyState, position_of
from adjsim.dynamics.fields.sde import SDE
from adjsim.dynamics.thermostats.langevin import Langevin
from adjsim.dynamics.thermostats.overdamped import OverdampedLangevin
from adjsim.estimators.replicas import with_values
from adjsim.potentials.base import ForceField, force
from adjsim.solvers.clock import Clock
from adjsim.solvers.splitting import Splitting
from adjsim.solvers.stochastic.euler_maruyama import EulerMaruyama

# Number of steps whose forces are differentiated in one call.
STACKED_STEPS = 32


class PathScore(ABC):
    """The score of every replica's path, summed along the run."""

    def __init__(self, dynamics: Any, stepper: Stepper, inputs: Inputs) -> None:
        self.stepper, self.potential = stepper, dynamics.potential
        # The names in the dynamics, and in the potential.
        parameters = {} if self.potential is None else trainable(self.potential)
        self.names = {f"potential.{name}": name for name in parameters}
        self.values = {name: p.detach() for name, p in parameters.items()}
        replicas = len(inputs.state[0])
        self.total = {
            name: self.values[own].new_zeros((replicas, *self.values[own].shape))
            for name, own in self.names.items()
        }
        # Forces are differentiated at the positions of many steps in one call, which saves
        # overhead, unless they depend on the time.
        self.stack_size = 1 if isinstance(self.potential, ForceField) else STACKED_STEPS
        self.pending: list[tuple[Tensor, Tensor]] = []

    def add(self, position: Tensor, weight: Tensor, step: int) -> None:
        self.pending.append((position, weight))
        if len(self.pending) == self.stack_size:
            self.flush(step)

    def flush(self, step: int) -> None:
        """Differentiate the collected steps, and add them to the total."""
        if self.pending and self.total:
            positions, weights = (torch.cat(entries) for entries in zip(*self.pending, strict=True))
            t = self.stepper.clock.time(step)

            def along(values: dict[str, Tensor], q: Tensor, w: Tensor) -> Tensor:
                return with_values(
                    self.potential, values, lambda copy: (force(copy, q, t) * w).sum()
                )

            slopes = _of_each_replica(along, self.values, positions, weights)
            for name, total in self.total.items():
                found = slopes[self.names[name]].reshape(len(self.pending), *total.shape)
                self.total[name] = total + found.sum(0)
        self.pending.clear()

    def noise(self, step: int) -> tuple[Tensor, ...]:
        assert self.stepper.noise is not None
        return self.stepper.noise.of_step(step)

    @abstractmethod
    def __call__(self, step: int, before: AnyState, after: AnyState) -> None:
        """Add the step from one state to the next."""


def _of_each_replica(
    function: Callable[..., Tensor], values: dict[str, Tensor], *rows: Any
) -> dict[str, Tensor]:
    """Compute the derivative of a function with respect to values, for each row of the others."""
    in_dims = (None, *[0] * len(rows))
    return torch.func.vmap(torch.func.grad(function), in_dims=in_dims)(values, *rows)


class _EulerMaruyama(PathScore):
    def __init__(self, dynamics: OverdampedLangevin, stepper: Stepper, inputs: Inputs) -> None:
        super().__init__(dynamics, stepper, inputs)
        group = inputs.coefficients["D"]
        self.scale = _ratio(group["mobility"], group["noise"])

    def __call__(self, step: int, before: AnyState, after: AnyState) -> None:
        self.add(position_of(before), self.scale * self.noise(step)[0], step)


class _FieldEulerMaruyama(PathScore):
    """The score of an SDE with diagonal noise, ``sum_k sqrt(dt) xi_k . (drift' / diffusion)``."""

    def __init__(self, dynamics: SDE, stepper: Stepper, inputs: Inputs) -> None:
        super().__init__(dynamics, stepper, inputs)
        self.dynamics, replicas = dynamics, len(inputs.state[0])
        self.values = {name: p.detach() for name, p in dynamics.trainable().items()}
        self.total = {name: p.new_zeros((replicas, *p.shape)) for name, p in self.values.items()}

    def __call__(self, step: int, before: AnyState, after: AnyState) -> None:
        t = self.stepper.clock.time(step)
        parts = self.noise(step)[0].split([y.shape[-1] for y in before], -1)
        assert isinstance(self.stepper.clock, Clock)
        scale, diffusion = self.stepper.clock.dt**0.5, self.dynamics.amplitudes(t, before)
        weights = tuple(scale * _ratio(xi, g) for xi, g in zip(parts, diffusion, strict=True))

        def along(
            values: dict[str, Tensor], fields: tuple[Tensor, ...], w: tuple[Tensor, ...]
        ) -> Tensor:
            state = type(before)._make(fields)
            rates = with_values(self.dynamics, values, lambda copy: copy.drift(t, state))
            return torch.cat([x * y for x, y in zip(rates, w, strict=True)]).sum()

        found = _of_each_replica(along, self.values, tuple(before), weights)
        self.total = {name: total + found[name] for name, total in self.total.items()}


class _OBABO(PathScore):
    def __init__(self, dynamics: Langevin, stepper: Stepper, inputs: Inputs) -> None:
        super().__init__(dynamics, stepper, inputs)
        self.c = inputs.coefficients["O"]["decay"]
        self.scale = _ratio(inputs.coefficients["B"]["h"], inputs.coefficients["O"]["noise"])

    def __call__(self, step: int, before: AnyState, after: AnyState) -> None:
        first, second = self.noise(step)
        self.add(position_of(before), self.scale * first, step)
        self.add(position_of(after), self.scale * self.c * second, step + 1)


class _BAOAB(PathScore):
    def __init__(self, dynamics: Langevin, stepper: Stepper, inputs: Inputs) -> None:
        super().__init__(dynamics, stepper, inputs)
        group = inputs.coefficients["O"]
        # A position gets two half kicks ("h" is dt/2): the last of one step and the first of the
        # next. The initial position gets one.
        self.half = _ratio(inputs.coefficients["B"]["h"], group["noise"]) * (1 + group["decay"])
        self.alternating_sum = torch.zeros_like(position_of(inputs.state))
        for step in range(stepper.clock.last - 1, -1, -1):
            self.alternating_sum = self.noise(step)[0] - self.alternating_sum

    def __call__(self, step: int, before: AnyState, after: AnyState) -> None:
        kicks = 1 if step == 0 else 2
        self.add(position_of(before), kicks * self.half * self.alternating_sum, step)
        self.alternating_sum = self.noise(step)[0] - self.alternating_sum


def _ratio(drift: Tensor, noise: Tensor) -> Tensor:
    """Divide drift by noise; the ratio is zero for pinned atoms, which have neither."""
    return torch.where(noise != 0, drift / torch.where(noise != 0, noise, 1.0), 0.0)


def path_score_of(dynamics: Any, solver: Any) -> type[PathScore] | None:
    """Return the score of the paths of a scheme, or None if it has no known density."""
    if type(solver) is EulerMaruyama:
        if isinstance(dynamics, SDE):
            diagonal = dynamics.noise == "diagonal" and not dynamics.quiet
            return _FieldEulerMaruyama if diagonal else None
        return _EulerMaruyama if isinstance(dynamics, OverdampedLangevin) else None
    if isinstance(dynamics, Langevin) and isinstance(solver, Splitting):
        return {"BAOAB": _BAOAB, "OBABO": _OBABO}.get(solver.scheme)
    return None
