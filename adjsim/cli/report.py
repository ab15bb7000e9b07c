"""Tables and files of the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.console import Console

from adjsim.cli.job import PLAIN, Job
from adjsim.cli.sweep import Method, Question, Sweep
from adjsim.core.durable.files import replacing
from adjsim.estimators.compare import Comparison
from adjsim.estimators.figures import plot_sweep


@dataclass(frozen=True)
class Comparing:
    """The settings of a comparison on the command line.

    ``reference`` is the adjoint with which the others are compared, None: estimators are compared.
    """

    job: Job
    question: Question
    methods: list[Method]
    sweep: Sweep
    reference: str | None = None


def report_comparison(found: Comparing, results: dict[float, Comparison], output: Path) -> bool:
    """Print the tables, and write compare.png and compare.json; False: there are no numbers."""
    job, question, sweep = found.job, found.question, found.sweep
    time, runs = job.system.time_name, list[dict[str, Any]]()
    show(f"{job.title}, seed {job.seed}. Value: {question.title}.")
    for x, (horizon, replicas) in sweep.points().items():
        copies = f", {replicas} replicas" * (replicas > 1)
        show(f"\nhorizon {horizon:g} {time} ({job.steps(horizon)} steps){copies}")
        _table(results[x], job)
        runs.append({"horizon": horizon, "replicas": replicas, "methods": results[x].rows()})
    for remark in _remarks(found):
        show(remark)
    if not any(comparison.estimates for comparison in results.values()):
        return False
    label = f"horizon / {time}" if sweep.axis == "horizon" else sweep.axis
    base = "eV, angstrom, amu" if time == "fs" else "reduced units"
    units = f"{question.unit}, {base}" if question.unit else base
    record = {**settings_of(job), "observable": question.title, "runs": runs}
    write_files(output / "compare", plot_sweep(results, label, units), record)
    return True


def _remarks(found: Comparing) -> Iterator[str]:
    """Explain adjoints that differ from the others."""
    names, job = [method.name for method in found.methods], found.job
    if "backsolve" in names:
        solver, other = repr(job.continuous), "the exact flow"
        if job.model.stochastic:
            solver = "the midpoint rule of SDESolver at this dt"
            other = "other steps on the same noise"
        yield (
            f"backsolve is the continuous adjoint on {solver}: it differentiates {other}, so its "
            "difference from the others is the discretisation error of dt, not of the adjoint."
        )
    if PLAIN in names:
        yield (
            f"{PLAIN} runs and reverses the same steps in floating point. In chaos its path soon "
            "differs from the exact path, and so does its gradient. Where its reconstruction error "
            "is not small, its gradient is wrong: it belongs to no path."
        )


def settings_of(job: Job) -> dict[str, Any]:
    potential = job.system.potential
    return {
        "system": job.system.name,
        "dynamics": type(job.model).__name__,
        "scheme": job.scheme,
        "exact": job.solver.exact,
        "dt": job.dt,
        "temperature": job.temperature,
        "units": {"time": job.system.time_name, "temperature": job.system.temperature_name},
        "seed": job.seed,
        "pairs": job.pairs,
        "cutoff": potential.cutoff,
        "truncation": None if potential.cutoff is None else repr(potential.truncation),
        "skin": potential.skin,
    }


def write_files(path: Path, figure: Any, record: dict[str, Any]) -> None:
    """Write a figure and a record beside each other, and print where."""
    picture, png, text = BytesIO(), path.with_suffix(".png"), path.with_suffix(".json")
    figure.savefig(picture, format="png", dpi=130)
    with replacing(png) as temporary:
        temporary.write_bytes(picture.getvalue())
    with replacing(text) as temporary:
        temporary.write_text(json.dumps(record, indent=2), encoding="utf-8")
    show(f"\nwrote {png} and {text}")


def show(what: Any) -> None:
    """Print a table, or text that is not wrapped."""
    width = None if sys.stdout.isatty() else 160
    Console(width=width, highlight=False).print(what, soft_wrap=isinstance(what, str))


def _table(comparison: Comparison, job: Job) -> None:
    if comparison.estimates:
        show(comparison.table())
    for remark in comparison.remarks():
        show(remark)
    # The title has the path of most methods. A transform or another dtype takes another path.
    for name, estimate in comparison.estimates.items():
        for path in (estimate.diagnostics.get("pairs") or {}).values():
            if path != job.pairs:
                show(f"{name}: pairs by another path: {path}.")
