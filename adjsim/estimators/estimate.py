"""The result of an estimator: a mean, its gradient, their error bars, and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

from torch import Tensor, nn

from adjsim.core.norms import norm

# With fewer independent samples an error bar is unreliable too.
FEW_SAMPLES = 50
# With fewer contributing replicas the error bar is uncertain by more than a tenth.
FEW_CONTRIBUTING = 20
# If tangents grow by a larger factor along the run, few paths dominate the mean.
LARGE_GROWTH = 1e2
# A gradient is known if its 95 % interval reaches no further than this share of it to both sides:
# twice a tenth, the standard error, with many chunks.
KNOWN = 0.2
# A reversed path this far off has a gradient that is off by up to thirty times as much (clusters of
# Lennard-Jones atoms, with friction and without).
LARGE_RECONSTRUCTION_ERROR = 1e-3
# The probability that halves of a run in equilibrium differ by more, in some entry: that of four
# standard errors.
LARGE_DRIFT = 6.3e-5
# Entries of one tensor that are printed.
MOST_PRINTED = 100


@dataclass
class GradientEstimate:
    """A mean, its gradient, their standard errors, and the cost.

    Attributes:
        value, value_stderr: the mean of the observable, ``(...)``, and its standard error (NaN with
            one chunk).
        grad, grad_stderr: likewise the gradient, ``(..., *parameter)`` by parameter name.
        estimand: "path", "stationary", "shadowing" or "clipped path".
        diagnostics: ``energy_evaluations``, ``seconds``, ``peak_memory`` (bytes),
            ``reconstruction_error`` (None where nothing is reconstructed), ``compiled`` (whether
            runs were compiled), ``pairs`` (how each pair potential evaluated pairs, as in
            ``Trajectory.stats``; None for other potentials), ``ess`` (effective sample size: the
            number of independent samples that the estimate is worth), ``chunks``, ``replicas``, and
            more from some estimators.
    """

    value: Tensor
    value_stderr: Tensor
    grad: dict[str, Tensor]
    grad_stderr: dict[str, Tensor]
    estimand: str
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def interval(self, name: str | None = None, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Compute an interval of Student's t of the value, or of the gradient of a parameter."""
        middle, error = self.value, self.value_stderr
        if name is not None:
            middle, error = self.grad[name], self.grad_stderr[name]
        half = _student(self.diagnostics["chunks"] - 1, (1 + level) / 2) * error
        return middle - half, middle + half

    def surrogate(self, module: nn.Module) -> Tensor:
        """Return a differentiable tensor with this value and gradient, for use in a larger loss.

        The module is the dynamics that was estimated.
        """
        total = self.value.detach()
        for parameter, grad in self._parameters(module):
            shift = parameter - parameter.detach()
            axes = list(range(-parameter.ndim, 0))
            change = grad.to(parameter) * shift
            total = total + (change.sum(axes) if axes else change)
        return total

    def accumulate(self, module: nn.Module) -> None:
        """Add the gradient into the ``.grad`` of the module's parameters, as ``backward()`` does.

        The module is the dynamics that was estimated.
        """
        if self.value.numel() != 1:
            raise ValueError(
                "accumulate needs a scalar observable; its mean has shape "
                f"{tuple(self.value.shape)}. For a loss of it, write loss(estimate.surrogate("
                "dynamics)).backward()."
            )
        for parameter, grad in self._parameters(module):
            grad = grad.reshape(parameter.shape).to(parameter)
            parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad

    def _parameters(self, module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters of a module, each with its gradient."""
        parameters = dict(module.named_parameters())
        missing = [name for name in self.grad if name not in parameters]
        if missing:
            raise ValueError(
                f"{missing[0]!r} is not a parameter of {type(module).__name__}: pass the dynamics "
                "that was estimated."
            )
        return [(parameters[name], grad) for name, grad in self.grad.items()]

    @property
    def warnings(self) -> list[str]:
        """Reasons not to trust the estimate; empty if none is known.

        Few samples, and a growing gradient of a path, make errors uncertain. They are no reason
        where the gradient is known to a tenth.
        """
        info, known = self.diagnostics, self._known()
        ess, growth, lost = info.get("ess"), info.get("growth"), info.get("lost_at")
        few = ess is not None and ess < FEW_SAMPLES and info.get("replicas") != 1
        reasons: list[str] = []
        infinite = [name for name, x in self.grad.items() if not bool(x.isfinite().all())]
        if infinite:
            reasons.append(
                f"its gradient with respect to {infinite[0]} is not finite: the derivative of a "
                "path may have overflowed"
            )
        if few and not known:
            reasons.append(
                f"it is worth {ess:.3g} independent samples only, so its error is uncertain too"
            )
        contributing = info.get("contributing")
        if contributing == 0:
            reasons.append(
                "the observable was the same in all replicas, so the score cannot show an "
                "event that happened in none of them"
            )
        elif contributing is not None and contributing < FEW_CONTRIBUTING:
            reasons.append(
                f"{contributing:.2g} of {info['replicas']} replicas make up its variance, so its "
                "error is uncertain too"
            )
        if (error := info.get("reconstruction_error") or 0.0) > LARGE_RECONSTRUCTION_ERROR:
            reasons.append(
                f"reversing the steps lost the trajectory (reconstruction error {error:.1e})"
            )
        grown = growth is not None and (
            growth * info["duration"] > math.log(LARGE_GROWTH)
            or (lost or math.inf) < info["duration"]
        )
        if grown and not known:
            beyond = "" if lost is None else f"; it means little beyond a time of about {lost:.3g}"
            reasons.append(f"the gradient of a path grows as exp({growth:.3g} t){beyond}")
        if info.get("smooth") is False:
            reasons.append(
                "the observable has no derivative along a path (is it a step?), so its gradient of "
                "zero means nothing"
            )
        if (truncate := info.get("truncate")) is not None:
            reasons.append(
                f"it was cut off after {truncate:g}, which leaves out effects that last longer"
            )
        drift = info.get("equilibration")
        if drift is not None and drift > _student(
            info["chunks"] - 1, 1 - LARGE_DRIFT / 2 / self.value.numel()
        ):
            reasons.append(
                f"the two halves of the run differ by {drift:.1f} standard errors: it had not "
                "come to equilibrium"
            )
        return reasons + info.get("reasons", [])

    def _known(self) -> bool:
        """Return whether the gradient, or the value without parameters, is known to a tenth."""
        info = self.diagnostics
        independent = min(info.get("chunks", 1.0), info.get("ess") or math.inf)
        if not independent > 1:
            return False
        t = _student(independent - 1, 0.975)
        pairs = [(x, self.grad_stderr[name]) for name, x in self.grad.items()]
        return all(
            t * float(norm(error)) <= KNOWN * float(norm(x))
            for x, error in pairs or [(self.value, self.value_stderr)]
        )

    def __str__(self) -> str:
        leading, slope = self.value.ndim, "d value" if self.value.ndim else "d"
        rows = list(_rows("value", "", self.value, self.value_stderr, leading))
        for name, grad in self.grad.items():
            rows += _rows(slope, f"/d {name}", grad, self.grad_stderr[name], leading)
        width = max(len(label) for label, _ in rows)
        lines = [f"{self.estimand} estimate"]
        lines += [f"  {label:{width}}  {number}" for label, number in rows]
        if self.estimand == "shadowing":
            lines.append(
                "  the derivative of the average only where shadowing holds: the error leaves out "
                "its bias"
            )
        if self.estimand == "clipped path":
            lines.append(
                "  no derivative of a mean where cotangents were clipped: the error leaves out the "
                "bias"
            )
        lines += [f"  not to be trusted: {reason}." for reason in self.warnings]
        return "\n".join(lines)


def _rows(
    label: str, rest: str, value: Tensor, stderr: Tensor, leading: int
) -> Iterator[tuple[str, str]]:
    """Yield label and number of each entry; the indices of ``leading`` axes follow the label."""
    flat = zip(value.flatten().tolist(), stderr.flatten().tolist(), strict=True)
    indices = product(*map(range, value.shape))
    for index, (x, error) in islice(zip(indices, flat, strict=True), MOST_PRINTED):
        text = f"{label}{_index(index[:leading])}{rest}{_index(index[leading:])}"
        yield text, f"{x:.6g}" if error != error else f"{x:.6g} ± {error:.2g}"
    more = value.numel() - MOST_PRINTED
    if more > 0:
        yield f"{label}{rest}", f"and {more} entries more, norm {norm(value):.6g}"


def _index(numbers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, numbers))}]" if numbers else ""


def _student(dof: float, probability: float) -> float:
    """Return a quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(dof, probability))
