"""Comparison of several methods for the gradient of one observable."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

from adjsim.adjoints import ReconstructionError
from adjsim.core.arguments import outside_inference_mode
from adjsim.core.durable.ranks import Ranks
from adjsim.core.noise import as_generator, seed_from
from adjsim.core.norms import norm
from adjsim.core.state import State
from adjsim.core.typing import Seed
from adjsim.estimators.base import Estimator
from adjsim.estimators.estimate import GradientEstimate
from adjsim.estimators.memory import release
from adjsim.estimators.replicas import Observable, Simulation
from adjsim.estimators.sharing import same_generator
from adjsim.solvers.continuous.sde import InstabilityError
from adjsim.solvers.implicit.newton import UnsolvedStepError

NOTHING_TO_PLOT = (
    "a figure needs an estimate, and no method gave an estimate: the reasons are in the failures "
    "of the comparison."
)
FAILURES = (ReconstructionError, InstabilityError, UnsolvedStepError, FloatingPointError)


@dataclass
class Comparison:
    """Estimates of one gradient by several methods.

    Attributes:
        estimates: by method name. Path and stationary estimates answer different questions and are
            shown apart.
        failures: the reason for every method without a result, by method name.
        reference: the method with which the gradients of the others are compared. Estimates of
            another estimand, or all if it is None, are compared with the first of their estimand.
    """

    estimates: dict[str, GradientEstimate]
    failures: dict[str, str] = field(default_factory=dict)
    reference: str | None = None

    def difference(self, name: str) -> float | None:
        """Compute the largest relative difference of a gradient from the reference's.

        The result is None for the reference itself.
        """
        mine = self.estimates[name]
        peers = [key for key, e in self.estimates.items() if e.estimand == mine.estimand]
        reference = self.reference if self.reference in peers else peers[0]
        if reference == name:
            return None
        theirs = self.estimates[reference]
        ratios = [_relative(mine.grad[key], theirs.grad[key]) for key in theirs.grad]
        return max(ratios, default=0.0)

    def rows(self) -> list[dict[str, Any]]:
        """Return a record for each method, of values that JSON can hold."""
        records = [
            {
                "method": name,
                "estimand": estimate.estimand,
                "value": estimate.value,
                "value_stderr": estimate.value_stderr,
                "grad": estimate.grad,
                "grad_stderr": estimate.grad_stderr,
                "relative_difference": self.difference(name),
                **estimate.diagnostics,
            }
            for name, estimate in self.estimates.items()
        ]
        records += [{"method": name, "failure": reason} for name, reason in self.failures.items()]
        return _plain(records)

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters."""
        return list(next(iter(self.estimates.values())).grad) if self.estimates else []

    def ordered(self) -> list[tuple[str, GradientEstimate]]:
        """Return the estimates with the methods of each estimand together."""
        return sorted(self.estimates.items(), key=lambda row: row[1].estimand)

    def table(self) -> Table:
        """Make a table for a terminal, with the methods of each estimand together."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        rows = self.ordered()
        several = len({estimate.estimand for _, estimate in rows}) > 1
        if several:
            table.add_column("estimand")
        names = self.parameters
        for heading in (
            "value",
            *(f"d/d {short_name(name, names)}" for name in names),
            *("rel. diff.", "energy\nevals", "seconds", "peak\nMB", "reconstr.\nerror"),
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for estimand, group in groupby(rows, lambda row: row[1].estimand):
            for name, estimate in group:
                label = [estimand] if several else []
                table.add_row(name, *label, *self._cells(name, estimate))
            table.add_section()
        return table

    def _cells(self, name: str, estimate: GradientEstimate) -> list[str]:
        info = estimate.diagnostics
        difference, error = self.difference(name), info.get("reconstruction_error")
        return [
            _number(estimate.value, estimate.value_stderr),
            *(_number(grad, estimate.grad_stderr[key]) for key, grad in estimate.grad.items()),
            "reference" if difference is None else f"{difference:.1e}",
            f"{info['energy_evaluations']}",
            f"{info['seconds']:.2f}",
            # The resident set does not resolve less than one.
            f"{info['peak_memory'] / 1e6:.1f}" if info["peak_memory"] >= 1e6 else "< 1",
            "-" if error is None else f"{error:.1e}",
        ]

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        console = Console(file=text, width=160)
        console.print(self.table())
        for remark in self.remarks():
            console.print(remark, highlight=False, soft_wrap=True)
        return text.getvalue().rstrip()

    def remarks(self) -> list[str]:
        """List, by method, reasons not to trust a result, and reasons for a missing one."""
        found = [(name, why) for name, e in self.estimates.items() for why in e.warnings]
        warnings = [f"{name}: not to be trusted, {why}." for name, why in found]
        return warnings + [f"{name}: {reason}" for name, reason in self.failures.items()]

    def plot(self) -> Figure:
        """Plot gradient (with two standard errors), time and memory of each method as bars.

        Raises:
            ValueError: no method gave an estimate.
        """
        from matplotlib.figure import Figure

        if not self.estimates:
            raise ValueError(NOTHING_TO_PLOT)
        names, found = self.parameters, self.estimates
        costs = {"seconds": ("seconds", 1), "peak memory / MB": ("peak_memory", 1e6)}
        figure = Figure(figsize=(3.2 * (len(names) + 2), 3.2), layout="constrained")
        panels = figure.subplots(1, len(names) + 2, squeeze=False)[0]
        for axis, key in zip(panels, names, strict=False):
            heights = list(map(norm_of(key), found.values()))
            errors = [2 * float(norm(e.grad_stderr[key])) for e in found.values()]
            axis.bar(list(found), heights, yerr=errors, capsize=3, color="C0")
            axis.set_title(f"gradient d/d {short_name(key, names)}")
        for axis, (title, (key, unit)) in zip(panels[len(names) :], costs.items(), strict=True):
            axis.bar(list(found), [e.diagnostics[key] / unit for e in found.values()], color="C0")
            axis.set_title(title)
        for axis in panels:
            axis.tick_params(axis="x", rotation=45)
        return figure


@outside_inference_mode()
def compare(
    simulation: Simulation[State],
    observable: Observable[State],
    estimators: Mapping[str, Estimator],
    *,
    replicas: int,
    chunks: int = 16,
    generator: Seed = None,
    compile: bool = False,
    store: str | Path | None = None,
    group: Any = None,
) -> Comparison:
    """Estimate one gradient by several estimators on the same starts and the same noise.

    Args:
        simulation: the simulation to run.
        observable: the observable to average.
        estimators: by the names to show; the first is the reference.
        replicas, chunks: numbers of independent runs of each estimator, and of groups of them whose
            spread gives the standard errors.
        generator: seeds starts and noise, as a generator or an integer; None: torch's default
            generator.
        compile: compile the runs of the methods that support it, and run the others uncompiled;
            ``diagnostics["compiled"]`` shows which.
        store: a folder that keeps finished chunks, with one subfolder a method.
        group: the process group whose ranks share the chunks.

    Returns:
        A :class:`Comparison`, which prints as a table. Its ``failures`` are methods that do not
        apply (a stationary estimator to a path question, a path score to a parameter that scales
        the noise), or whose run fails (a reconstruction error beyond its tolerance, numbers that
        are not finite or off the lattice).
    """
    if not estimators:
        raise ValueError("compare needs at least one estimator.")
    ranks = Ranks.of(group)
    seed = seed_from(same_generator(ranks, as_generator(generator)))
    result = Comparison({}, reference=next(iter(estimators)))
    for name, estimator in estimators.items():
        compiled = simulation.compile or (compile and estimator.can_compile(simulation))
        configured = replace(simulation, compile=compiled)
        try:
            estimator.check(configured, observable)
        except (TypeError, ValueError) as refusal:
            result.failures[name] = f"does not apply. {refusal}"
            continue
        # Otherwise the next method would reuse memory that this one freed, and seem to need less.
        release()
        try:
            result.estimates[name] = estimator(
                configured,
                observable,
                replicas=replicas,
                chunks=chunks,
                generator=seed,
                # The name of the method, as that of a folder.
                store=None if store is None else Path(store) / re.sub(r"[^\w.+-]", "_", name),
                group=ranks,
            )
        except (*FAILURES, OverflowError) as error:
            result.failures[name] = str(error)
    return result


def norm_of(key: str) -> Callable[[GradientEstimate], float]:
    def size(estimate: GradientEstimate) -> float:
        grad = estimate.grad[key]
        return float(grad) if grad.numel() == 1 else float(norm(grad))

    return size


def _relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    scale, difference = float(norm(theirs)), float(norm(mine - theirs))
    return difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)


def short_name(name: str, names: list[str]) -> str:
    """Return the last part of a qualified name, or all of it if ambiguous."""
    last = name.rsplit(".", 1)[-1]
    return last if sum(other.rsplit(".", 1)[-1] == last for other in names) == 1 else name


def _number(value: torch.Tensor, stderr: torch.Tensor) -> str:
    if value.numel() != 1:
        return f"|{float(norm(value)):.6g}|"
    error = float(stderr)
    return f"{float(value):.8g}" if math.isnan(error) else f"{float(value):.5g} ± {error:.1g}"


def _plain(value: Any) -> Any:
    """Convert to values that JSON can hold; NaN and infinity become None."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
