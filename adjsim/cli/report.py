"""Tables and files of the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.console import Console

from adjsim.adjoints import Adjoint
from adjsim.cli.job import PLAIN, Job
from adjsim.cli.presets import Answer, Preset, Question
from adjsim.cli.sweep import Sweep
from adjsim.core.durable.files import replacing
from adjsim.estimators.compare import Comparison
from adjsim.estimators.figures import plot_sweep


@dataclass
class Report:
    """A comparison, and the additional data of its files.

    ``estimand`` is that of the exact answers. ``unit`` is that of time, and ``units`` are those of
    the gradients.
    """

    sweep: Sweep
    results: dict[float, Comparison]
    about: dict[str, Any]
    answers: dict[float, Answer]
    unit: str
    units: str
    estimand: str = "stationary"

    @property
    def empty(self) -> bool:
        """Whether no method returned a number."""
        return not any(comparison.estimates for comparison in self.results.values())

    def write(self, output: Path) -> None:
        """Write compare.png and compare.json."""
        runs = []
        for x, (horizon, replicas) in self.sweep.points().items():
            run: dict[str, Any] = {"horizon": horizon, "replicas": replicas}
            if x in self.answers:
                run["answer"] = dict(zip(("value", "grad"), self.answers[x], strict=True))
            runs.append(run | {"methods": self.results[x].rows()})
        axis = self.sweep.axis
        label = f"{axis} / {self.unit or 'reduced units'}" if axis == "horizon" else axis
        picture = BytesIO()
        exact = {self.estimand: {x: grads for x, (_, grads) in self.answers.items()}}
        plot_sweep(self.results, label, exact, self.units).savefig(picture, format="png", dpi=130)
        with replacing(output / "compare.png") as temporary:
            temporary.write_bytes(picture.getvalue())
        with replacing(output / "compare.json") as temporary:
            text = json.dumps({**self.about, "runs": runs}, indent=2)
            temporary.write_text(text, encoding="utf-8")
        _print(plain_console(), f"\nwrote {output / 'compare.png'} and {output / 'compare.json'}")


def report_adjoints(
    job: Job,
    quantity: str,
    adjoints: dict[str, Adjoint],
    sweep: Sweep,
    results: dict[float, Comparison],
) -> Report:
    """Print a comparison of adjoints."""
    console = plain_console()
    title = job.quantity(quantity).title
    _print(console, f"{job.title}, seed {job.seed}. Value: {title} at the horizon.")
    for x, comparison in results.items():
        _table(console, _heading(sweep, x, job), comparison, job)
    if "backsolve" in adjoints:
        solver, other = repr(job.continuous), "the exact flow"
        if job.model.stochastic:
            solver, other = (
                "the midpoint rule of SDESolver at this dt",
                "other steps on the same noise",
            )
        _print(
            console,
            f"backsolve is the continuous adjoint on {solver}: it differentiates {other}, so its "
            "difference from the others is the discretisation error of dt, not of the adjoint.",
        )
    if PLAIN in adjoints:
        _print(
            console,
            f"{PLAIN} runs and reverses the same steps in floating point. In chaos its path soon "
            "differs from the exact path, and so does its gradient. Where its reconstruction error "
            "is not small, its gradient is wrong: it belongs to no path.",
        )
    about = {**settings_of(job), "observable": quantity}
    return Report(sweep, results, about, {}, job.system.time_name, _units(job, quantity))


def report_estimators(
    preset: Preset,
    name: str,
    quantity: str,
    question: Question,
    job: Job | None,
    seed: int,
    sweep: Sweep,
    results: dict[float, Comparison],
) -> Report:
    """Print a comparison of estimators, with the exact answer where it is known."""
    console, answers = plain_console(), {}
    _print(console, f"{preset.title}, seed {seed}. Value: {question.title}.")
    for x, (horizon, _) in sweep.points().items():
        heading = _heading(sweep, x, job)
        if question.exact is not None:
            answers[x] = question.exact.answer(horizon)
            value, grads = answers[x]
            slopes = ", ".join(f"d/d {name} {slope:.6g}" for name, slope in grads.items())
            heading += f"\n{question.exact.how}: {value:.6g}, {slopes}"
        _table(console, heading, results[x], job)
    about = {"preset": name, "title": preset.title, "seed": seed, "observable": question.title} | (
        settings_of(job) if job else {}
    )
    unit = job.system.time_name if job else ""
    units = _units(job, quantity) if job else "reduced units"
    estimand = question.exact.estimand if question.exact else "stationary"
    return Report(sweep, results, about, answers, unit, units, estimand)


def _units(job: Job, quantity: str) -> str:
    """List the units of a gradient."""
    base = "eV, angstrom, amu" if job.system.time_name == "fs" else "reduced units"
    unit = job.quantity(quantity).unit
    return f"{unit}, {base}" if unit else base


def settings_of(job: Job) -> dict[str, Any]:
    potential = job.system.potential
    return {
        "system": job.system.name,
        "dynamics": type(job.model).__name__,
        "scheme": job.scheme,
        "exact": job.exact,
        "dt": job.solver.dt / job.system.time,
        "temperature": job.temperature,
        "units": {"time": job.system.time_name, "temperature": job.system.temperature_name},
        "seed": job.seed,
        "pairs": potential.path(job.system.position),
        "cutoff": potential.cutoff,
        "truncation": None if potential.cutoff is None else repr(potential.truncation),
        "skin": potential.skin,
    }


def plain_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


def _heading(sweep: Sweep, x: float, job: Job | None) -> str:
    horizon, replicas = sweep.points()[x]
    unit, steps = (
        ("", "") if job is None else (f" {job.system.time_name}", f" ({job.steps(horizon)} steps)")
    )
    count = f", {replicas} replicas" if replicas > 1 else ""
    return f"\nhorizon {horizon:g}{unit}{steps}{count}"


def _table(console: Console, heading: str, comparison: Comparison, job: Job | None) -> None:
    _print(console, heading)
    if comparison.estimates:
        console.print(comparison.table())
    for remark in comparison.remarks():
        _print(console, remark)
    # The title has the path of most methods. A transform or another dtype takes another path.
    for name, estimate in comparison.estimates.items():
        for path in (estimate.diagnostics.get("pairs") or {}).values():
            if job is not None and path != job.system.potential.path(job.system.position):
                _print(console, f"{name}: pairs by another path: {path}.")
