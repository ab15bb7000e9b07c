"""The interface of estimators.

An estimator answers: how does the mean of this observable, over replicas of this simulation, change
with the parameters of its dynamics? This is two different questions, and every estimate carries the
label of its question:

``"path"``
    how the mean over runs from the given starts, after the given time, changes;
``"stationary"``
    how the equilibrium mean changes, which does not depend on a start.

Replicas are run in chunks. Standard errors come from the spread of independent chunks, so intervals
are Student's t with one degree of freedom fewer than the number of chunks.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Generic

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from adjsim._inputs import outside_inference_mode
from adjsim._noise import Noise, as_generator, seed_from
from adjsim._params import refuse_untrainable
from adjsim._state import AnyState, State, as_state, select
from adjsim._trajectory import Final, TimeAverage, Trajectory
from adjsim._typing import Seed, Times
from adjsim.adjoints.base import Adjoint
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.memory import PeakMemory
from adjsim.simulation import Solver, run
from adjsim.solvers.base import SteppingSolver

Observable = TimeAverage | Final | Callable[[Trajectory[State]], Tensor]
Initial = Callable[[int, torch.Generator | None], State]

# With fewer independent samples an error bar is unreliable too.
FEW_SAMPLES = 50
# With fewer contributing replicas the error bar is uncertain by more than a tenth.
FEW_CONTRIBUTING = 20
# If tangents grow by more along the run, few paths dominate the mean.
LARGE_GROWTH = 1e2


@dataclass(frozen=True)
class Simulation(Generic[State]):
    """A simulation that can be run for any number of replicas.

    Args:
        dynamics: the physics; gradients are with respect to its named parameters.
        initial: ``initial(replicas, generator) -> state`` with a leading axis of that length. It is
            called without gradients: every estimator holds the starts fixed.
        ts: save times.
        solver: how the equations are integrated.
        compile: run in compiled loops of steps (see :func:`~adjsim.simulate`), for solvers of a
            fixed step. Pathwise then takes :class:`~adjsim.ReversibleAdjoint`. Girsanov and
            ForwardSensitivity handle every step in Python and are not compiled. Chunks of one size
            compile once.
    """

    dynamics: Dynamics[State]
    initial: Initial[State]
    ts: Times
    solver: Solver
    compile: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.compile and not isinstance(self.solver, SteppingSolver):
            raise TypeError(
                "compile=True is for solvers of fixed steps, such as Splitting; not for "
                f"{self.solver!r}."
            )

    def starts(self, replicas: int, generator: Seed) -> State:
        """Make and check the starts of all replicas."""
        with torch.no_grad():
            state = as_state(self.initial(replicas, as_generator(generator)))
        self.dynamics.check(state)
        if state.position.ndim < 3 or state.position.shape[0] != replicas:
            raise ValueError(
                f"initial({replicas}, generator) returned positions of shape "
                f"{tuple(state.position.shape)}; the leading axis must be the {replicas} replicas: "
                f"({replicas}, atoms, dim)."
            )
        return state

    @property
    def duration(self) -> float:
        """The time from the start to the last save."""
        return float(self.ts[-1] - self.ts[0])


@dataclass
class GradientEstimate:
    """A mean, its gradient, their standard errors, and their cost.

    Attributes:
        value, value_stderr: the mean of the observable, ``(...)``, and its standard error (NaN with
            one chunk).
        grad, grad_stderr: by parameter name, ``(..., *parameter)``.
        estimand: "path" or "stationary".
        diagnostics: ``energy_evaluations``, ``seconds``, ``peak_memory`` (bytes),
            ``reconstruction_error`` (None where nothing is reconstructed), ``compiled`` (whether
            runs were compiled), ``ess`` (the number of independent samples that the estimate is
            worth), ``chunks``, ``replicas``, and more from some estimators.
    """

    value: Tensor
    value_stderr: Tensor
    grad: dict[str, Tensor]
    grad_stderr: dict[str, Tensor]
    estimand: str
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def interval(self, name: str | None = None, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Compute the confidence interval of the gradient of a parameter, or of the value.

        It is Student's t over the chunks.
        """
        middle, error = (
            (self.value, self.value_stderr)
            if name is None
            else (self.grad[name], self.grad_stderr[name])
        )
        half = float(stdtrit(self.diagnostics["chunks"] - 1, (1 + level) / 2)) * error
        return middle - half, middle + half

    def surrogate(self, module: nn.Module) -> Tensor:
        """Return a tensor with this value, whose gradient is the estimate.

        It is for use in a larger loss.

        Args:
            module: the dynamics that was estimated.
        """
        parameters = self._parameters(module)
        total = self.value.detach()
        for name, grad in self.grad.items():
            parameter = parameters[name]
            shift = parameter - parameter.detach()
            axes = list(range(-parameter.ndim, 0))
            product = grad.to(parameter) * shift
            total = total + (product.sum(axes) if axes else product)
        return total

    def accumulate(self, module: nn.Module) -> None:
        """Add the gradient into the ``.grad`` of the module's parameters, as ``backward()`` does.

        Args:
            module: the dynamics that was estimated.
        """
        if self.value.numel() != 1:
            raise ValueError(
                "accumulate needs a scalar observable; its mean has shape "
                f"{tuple(self.value.shape)}."
            )
        parameters = self._parameters(module)
        for name, grad in self.grad.items():
            parameter = parameters[name]
            grad = grad.reshape(parameter.shape).to(parameter)
            parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad

    def _parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        parameters = dict(module.named_parameters())
        missing = [name for name in self.grad if name not in parameters]
        if missing:
            raise ValueError(
                f"{missing[0]!r} is no parameter of {type(module).__name__}: pass the dynamics "
                "that was estimated."
            )
        return parameters

    @property
    def warnings(self) -> list[str]:
        """Reasons not to trust the estimate, a sentence each; empty if none is known."""
        info, found = self.diagnostics, []
        ess, error, growth = info.get("ess"), info.get("reconstruction_error"), info.get("growth")
        if ess is not None and ess < FEW_SAMPLES and info.get("replicas") != 1:
            found.append(
                f"it is worth {ess:.3g} independent samples only, so its error is uncertain too"
            )
        contributing = info.get("contributing")
        if contributing is not None and contributing < FEW_CONTRIBUTING:
            found.append(
                f"{contributing:.2g} of {info['replicas']} replicas make up its variance, so its "
                "error is uncertain too"
                if contributing > 0
                else "the observable was the same in all replicas, so its score cannot show what "
                "none of them saw"
            )
        if error is not None and error > 1e-6:
            found.append(
                f"reversing the steps lost the trajectory (reconstruction error {error:.1e})"
            )
        lost = info.get("lost_at")
        if growth is not None and (
            growth * info["duration"] > math.log(LARGE_GROWTH)
            or (lost or math.inf) < info["duration"]
        ):
            beyond = "" if lost is None else f"; it means little beyond a time of about {lost:.3g}"
            found.append(f"the gradient of a path grows as exp({growth:.3g} t){beyond}")
        if info.get("smooth") is False:
            found.append(
                "the observable has no derivative along a path (is it a step?), so its zero means "
                "nothing"
            )
        if info.get("truncate") is not None:
            found.append(
                f"it was cut off after {info['truncate']:g}, which leaves out effects that last "
                "longer"
            )
        drift = info.get("equilibration")
        if drift is not None and drift > 4:
            found.append(
                f"the two halves of the run differ by {drift:.1f} standard errors: it had not "
                "come to equilibrium"
            )
        return found

    def __str__(self) -> str:
        lines = [
            f"{self.estimand} estimate",
            f"  value {_with_error(self.value, self.value_stderr)}",
        ]
        lines += [
            f"  d/d {name} {_with_error(grad, self.grad_stderr[name])}"
            for name, grad in self.grad.items()
        ]
        lines += [f"  not to be trusted: {reason}." for reason in self.warnings]
        return "\n".join(lines)


@dataclass
class Chunk:
    """The results of a group of replicas: mean, gradient, and data that all chunks combine."""

    value: Tensor
    grad: dict[str, Tensor]
    stats: dict[str, Any]
    extra: Any = None


class Estimator(ABC):
    """A way to estimate the gradient of an expectation."""

    estimand: ClassVar[str]

    @abstractmethod
    def __call__(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        *,
        replicas: int,
        chunks: int = 16,
        generator: Seed = None,
    ) -> GradientEstimate:
        """Estimate the mean of the observable and its gradient.

        Args:
            simulation: the simulation to run.
            observable: ``TimeAverage(fn)`` or ``Final(fn)``, with fn from the state to ``(replicas,
                ...)``, or a function from the :class:`Trajectory` to the same.
            replicas: number of independent runs.
            chunks: number of groups, as even as possible, in which the replicas run. Their spread
                gives the standard errors. The noise of a replica does not depend on the chunks.
            generator: seeds starts and noise, as a generator or a whole number; None: torch's
                default generator.
        """

    def can_compile(self, simulation: Simulation[State]) -> bool:
        """Return whether its runs can be compiled."""
        return isinstance(simulation.solver, SteppingSolver)

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        """Refuse, before any work, a simulation or an observable that does not apply."""
        return

    def finish(
        self, parts: list[Chunk], sizes: list[int], diagnostics: dict[str, Any]
    ) -> GradientEstimate:
        """Combine the chunks into the estimate."""
        value, value_stderr = mean_and_stderr([part.value for part in parts], sizes)
        pairs = {
            name: mean_and_stderr([part.grad[name] for part in parts], sizes)
            for name in parts[0].grad
        }
        errors = [e for part in parts if (e := part.stats.get("reconstruction_error")) is not None]
        return GradientEstimate(
            value,
            value_stderr,
            {name: pair[0] for name, pair in pairs.items()},
            {name: pair[1] for name, pair in pairs.items()},
            self.estimand,
            {
                "energy_evaluations": sum(part.stats["energy_evaluations"] for part in parts),
                "reconstruction_error": max(errors) if errors else None,
                "chunks": len(parts),
                "replicas": sum(sizes),
                "ess": float(sum(sizes)),
                **diagnostics,
            },
        )


class ChunkedEstimator(Estimator):
    """An estimator that runs its replicas chunk by chunk. Subclasses implement ``chunk``."""

    @outside_inference_mode()
    def __call__(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        *,
        replicas: int,
        chunks: int = 16,
        generator: Seed = None,
    ) -> GradientEstimate:
        refuse_untrainable(simulation.dynamics)
        slices, generator = chunk_slices(replicas, chunks), as_generator(generator)
        self.check(simulation, observable)
        starts = simulation.starts(replicas, generator)
        seed = seed_from(generator) if simulation.dynamics.stochastic else None
        parts: list[Chunk] = []
        with PeakMemory(starts.position.device) as memory:
            begun = time.perf_counter()
            for part in slices:
                noise = None if seed is None else Noise(seed, part.start)
                parts.append(self.chunk(simulation, observable, select(starts, part), noise))
            sizes = [part.stop - part.start for part in slices]
            diagnostics = self.combine(simulation, parts, sizes)
            seconds = time.perf_counter() - begun
        compiled = simulation.compile and self.can_compile(simulation)
        return self.finish(
            parts,
            sizes,
            {"seconds": seconds, "peak_memory": memory.bytes, "compiled": compiled, **diagnostics},
        )

    @abstractmethod
    def chunk(
        self,
        simulation: Simulation[State],
        observable: Observable[State],
        start: State,
        noise: Noise | None,
    ) -> Chunk:
        """Run a group of replicas."""

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        """Finish the chunks where that needs all of them, and return more diagnostics."""
        return {}


def observe(
    simulation: Simulation[State],
    observable: Observable[State],
    start: State,
    adjoint: Adjoint,
    noise: Noise | None,
) -> tuple[Tensor, Trajectory[State]]:
    """Run replicas, and return the observable ``(replicas, ...)`` and the trajectory."""
    record = observable if isinstance(observable, TimeAverage) else None
    trajectory = run(
        simulation.dynamics,
        start,
        simulation.ts,
        simulation.solver,
        adjoint,
        record,
        noise,
        compile=simulation.compile,
    )
    return checked(evaluate(observable, trajectory), start), trajectory


def evaluate(observable: Observable[State], trajectory: Trajectory[State]) -> Tensor:
    """Return the observable of a trajectory.

    A time average was recorded by the run.
    """
    if isinstance(observable, TimeAverage):
        assert trajectory.record is not None
        return trajectory.record
    if isinstance(observable, Final):
        return observable.function(trajectory.final)
    return observable(trajectory)


def checked(values: Tensor, start: AnyState) -> Tensor:
    count = start.position.shape[0]
    if values.shape[:1] != (count,):
        raise ValueError(
            f"the observable has shape {tuple(values.shape)}; its leading axis must be the "
            f"{count} replicas."
        )
    return values


def jacobian(mean: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the derivative of each entry of the mean, by input.

    It is zero where there is no dependence.
    """
    if not inputs or not mean.requires_grad:
        return {name: x.new_zeros((*mean.shape, *x.shape)) for name, x in inputs.items()}
    wanted = list(inputs.values())
    rows: list[list[Tensor]] = []
    with torch.enable_grad():
        entries = mean.reshape(-1).unbind()
    for i, entry in enumerate(entries):
        found = torch.autograd.grad(
            entry, wanted, retain_graph=i + 1 < len(entries), allow_unused=True
        )
        rows.append(
            [
                torch.zeros_like(x) if g is None else g.detach()
                for g, x in zip(found, wanted, strict=True)
            ]
        )
    columns = zip(*rows, strict=True)
    return {
        name: torch.stack(column).reshape((*mean.shape, *x.shape))
        for (name, x), column in zip(inputs.items(), columns, strict=True)
    }


def stacked(columns: list[Tensor], value: Tensor, parameter: Tensor) -> Tensor:
    """Join the derivatives with respect to the entries of a parameter."""
    if not columns:
        return value.new_zeros((*value.shape, *parameter.shape))
    return torch.stack(columns, -1).reshape((*value.shape, *parameter.shape))


def chunk_slices(replicas: int, chunks: int) -> list[slice]:
    """Divide the replicas into groups as even as possible."""
    if replicas < 1 or chunks < 1:
        raise ValueError(f"replicas and chunks must be at least 1; got {replicas} and {chunks}.")
    chunks = min(chunks, replicas)
    edges = [replicas * i // chunks for i in range(chunks + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def weighted_mean(values: list[Tensor], sizes: list[int]) -> Tensor:
    """Compute the mean over replicas from chunk means."""
    total = sum(sizes)
    return torch.stack(
        [value * (size / total) for value, size in zip(values, sizes, strict=True)]
    ).sum(0)


def mean_and_stderr(means: list[Tensor], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Compute mean and standard error from chunk means.

    The error is NaN for one chunk.
    """
    mean, count, total = weighted_mean(means, sizes), len(means), sum(sizes)
    if count == 1:
        return mean, torch.full_like(mean, float("nan"))
    squares = [
        ((value - mean) * (size / total)) ** 2 for value, size in zip(means, sizes, strict=True)
    ]
    return mean, (torch.stack(squares).sum(0) * count / (count - 1)).sqrt()


def _with_error(value: Tensor, stderr: Tensor) -> str:
    if value.numel() != 1:
        return f"tensor {tuple(value.shape)}, norm {float(value.norm()):.6g}"
    error = float(stderr)
    return f"{float(value):.6g}" if error != error else f"{float(value):.6g} +- {error:.2g}"
