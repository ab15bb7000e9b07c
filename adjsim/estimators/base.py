"""What an estimator is given and what it returns.

An estimator answers: how does the mean of this observable, over replicas of this simulation, change with the parameters of
its dynamics? Two different questions go by that name, and every estimate carries the label of the one it answers:

``"path"``
    how the mean over runs from the given starts, after the given time, changes;
``"stationary"``
    how the equilibrium mean changes, to which no start belongs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adjsim._state import State
from adjsim._trajectory import Final, TimeAverage, Trajectory
from adjsim._typing import Times
from adjsim.dynamics.base import Dynamics
from adjsim.simulation import Solver

Observable = TimeAverage | Final | Callable[[Trajectory], Tensor]
Initial = Callable[[int, torch.Generator | None], State]


@dataclass(frozen=True)
class Simulation:
    """A simulation that can be run for any number of replicas.

    Args:
        dynamics: the physics; gradients are with respect to its named parameters.
        initial: ``initial(replicas, generator) -> state`` with a leading axis of that length. It is called without
            gradients: every estimator holds the starts fixed.
        ts: save times.
        solver: how the equations are integrated.
    """

    dynamics: Dynamics
    initial: Initial
    ts: Times
    solver: Solver

    def starts(self, replicas: int, generator: torch.Generator | None) -> State:
        """The starts of all replicas, checked."""
        with torch.no_grad():
            state = self.initial(replicas, generator)
        self.dynamics.check(state)
        if state.position.ndim < 3 or state.position.shape[0] != replicas:
            raise ValueError(
                f"initial({replicas}, generator) returned positions of shape {tuple(state.position.shape)}; "
                f"the leading axis must be the {replicas} replicas: ({replicas}, atoms, dim)."
            )
        return state


@dataclass
class GradientEstimate:
    """A mean, its gradient, their standard errors, and what they cost.

    Attributes:
        value, value_stderr: the mean of the observable, ``(...)``, and its standard error (NaN with one chunk).
        grad, grad_stderr: by parameter name, ``(..., *parameter)``.
        estimand: "path" or "stationary".
        diagnostics: ``energy_evaluations``, ``seconds``, ``peak_memory`` (bytes), ``reconstruction_error`` (None where
            nothing is reconstructed), ``ess`` (the number of independent replicas).
    """

    value: Tensor
    value_stderr: Tensor
    grad: dict[str, Tensor]
    grad_stderr: dict[str, Tensor]
    estimand: str
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def accumulate(self, module: nn.Module) -> None:
        """Add the gradient into the ``.grad`` of the module's parameters, as ``backward()`` does.

        Args:
            module: the dynamics that was estimated.
        """
        if self.value.numel() != 1:
            raise ValueError(f"accumulate needs a scalar observable; its mean has shape {tuple(self.value.shape)}.")
        parameters = dict(module.named_parameters())
        missing = [name for name in self.grad if name not in parameters]
        if missing:
            raise ValueError(
                f"{missing[0]!r} is no parameter of {type(module).__name__}: pass the dynamics that was estimated."
            )
        for name, grad in self.grad.items():
            parameter = parameters[name]
            grad = grad.reshape(parameter.shape).to(parameter)
            parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad

    def __str__(self) -> str:
        lines = [f"{self.estimand} estimate", f"  value {_with_error(self.value, self.value_stderr)}"]
        lines += [f"  d/d {name} {_with_error(grad, self.grad_stderr[name])}" for name, grad in self.grad.items()]
        return "\n".join(lines)


class Estimator(ABC):
    """A way to estimate the gradient of an expectation."""

    estimand: ClassVar[str]

    @abstractmethod
    def __call__(
        self,
        simulation: Simulation,
        observable: Observable,
        *,
        replicas: int,
        chunks: int = 16,
        generator: torch.Generator | None = None,
    ) -> GradientEstimate:
        """Estimate the mean of the observable and its gradient.

        Args:
            simulation: what is run.
            observable: ``TimeAverage(fn)`` or ``Final(fn)``, fn of the state to ``(replicas, ...)``; or a function of the
                :class:`Trajectory` to the same.
            replicas: number of independent runs.
            chunks: the replicas are run in so many groups, as even as possible, whose spread gives the standard errors. The
                noise of a replica does not depend on it.
            generator: seeds starts and noise; None: torch's default generator.
        """


def chunk_slices(replicas: int, chunks: int) -> list[slice]:
    """Slices that part the replicas into groups as even as possible."""
    if replicas < 1 or chunks < 1:
        raise ValueError(f"replicas and chunks must be at least 1; got {replicas} and {chunks}.")
    chunks = min(chunks, replicas)
    edges = [replicas * i // chunks for i in range(chunks + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def mean_and_stderr(means: list[Tensor], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """The mean over replicas of chunk means, and its standard error from their spread (NaN for one chunk)."""
    stacked = torch.stack(means)
    weight = torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)
    weight = (weight / weight.sum()).reshape(-1, *[1] * (stacked.ndim - 1))
    mean = (weight * stacked).sum(0)
    count = len(means)
    if count == 1:
        return mean, torch.full_like(mean, float("nan"))
    spread = (weight**2 * (stacked - mean) ** 2).sum(0) * count / (count - 1)
    return mean, spread.sqrt()


def _with_error(value: Tensor, stderr: Tensor) -> str:
    if value.numel() != 1:
        return f"tensor {tuple(value.shape)}, norm {float(value.norm()):.6g}"
    error = float(stderr)
    return f"{float(value):.6g}" if error != error else f"{float(value):.6g} +- {error:.2g}"
