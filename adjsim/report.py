"""Tables and files of the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.console import Console

from adjsim._files import replacing
from adjsim.adjoints import Adjoint
from adjsim.compare import Comparison
from adjsim.figures import plot_sweep
from adjsim.job import OBSERVABLES, PLAIN, Job, Sweep
from adjsim.presets import Answer, Preset, Question


@dataclass
class Report:
    """A comparison, and the additional data of its files.

    ``estimand`` is that of the exact answers.
    """

    sweep: Sweep
    results: dict[float, Comparison]
    about: dict[str, Any]
    answers: dict[float, Answer]
    unit: str
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
        units = "eV, angstrom, amu" if self.unit == "fs" else "reduced units"
        plot_sweep(self.results, label, exact, units).savefig(picture, format="png", dpi=130)
        with replacing(output / "compare.png") as temporary:
            temporary.write_bytes(picture.getvalue())
        with replacing(output / "compare.json") as temporary:
            text = json.dumps({**self.about, "runs": runs}, indent=2)
            temporary.write_text(text, encoding="utf-8")
        _print(_console(), f"\nwrote {output / 'compare.png'} and {output / 'compare.json'}")


def report_adjoints(
    job: Job,
    quantity: str,
    adjoints: dict[str, Adjoint],
    sweep: Sweep,
    results: dict[float, Comparison],
) -> Report:
    """Print a comparison of adjoints."""
    console = _console()
    _print(
        console, f"{job.title}, seed {job.seed}. Value: {OBSERVABLES[quantity][0]} at the horizon."
    )
    for x, comparison in results.items():
        _table(console, _heading(sweep, x, job), comparison)
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
    return Report(sweep, results, {**_about(job), "observable": quantity}, {}, job.system.time_name)


def report_estimators(
    preset: Preset,
    name: str,
    question: Question,
    job: Job | None,
    seed: int,
    sweep: Sweep,
    results: dict[float, Comparison],
) -> Report:
    """Print a comparison of estimators, with the exact answer where it is known."""
    console, answers = _console(), {}
    _print(console, f"{preset.title}, seed {seed}. Value: {question.title}.")
    for x, (horizon, _) in sweep.points().items():
        heading = _heading(sweep, x, job)
        if question.exact is not None:
            answers[x] = question.exact.answer(horizon)
            value, grads = answers[x]
            slopes = ", ".join(f"d/d {name} {slope:.6g}" for name, slope in grads.items())
            heading += f"\n{question.exact.how}: {value:.6g}, {slopes}"
        _table(console, heading, results[x])
    about = {"preset": name, "title": preset.title, "seed": seed, "observable": question.title} | (
        _about(job) if job else {}
    )
    unit = job.system.time_name if job else ""
    estimand = question.exact.estimand if question.exact else "stationary"
    return Report(sweep, results, about, answers, unit, estimand)


def _about(job: Job) -> dict[str, Any]:
    return {
        "system": job.system.name,
        "dynamics": type(job.model).__name__,
        "scheme": job.scheme,
        "exact": job.exact,
        "dt": job.solver.dt / job.system.time,
        "temperature": job.temperature,
        "units": {"time": job.system.time_name, "temperature": job.system.temperature_name},
        "seed": job.seed,
    }


def _console() -> Console:
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


def _table(console: Console, heading: str, comparison: Comparison) -> None:
    _print(console, heading)
    if comparison.estimates:
        console.print(comparison.table())
    for remark in comparison.remarks():
        _print(console, remark)
