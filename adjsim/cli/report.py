"""Tables and files of the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.console import Console

from adjsim.adjoints import Adjoint
from adjsim.cli.job import PLAIN, Job, estimators_of, question_of
from adjsim.cli.presets import Answer, Preset, Question
from adjsim.cli.sweep import Method, Sweep
from adjsim.core.durable.files import replacing
from adjsim.estimators.compare import Comparison
from adjsim.estimators.figures import plot_sweep


@dataclass(frozen=True)
class Comparing:
    """What is compared.

    Attributes:
        preset, problem: the name of the problem, and its questions.
        quantity: the name of the question.
        names: the estimators; empty: adjoints are compared.
        dt: the step, in the units of the command line.
        sweep: the horizons and numbers of replicas.
        job: the runs of a system of atoms; None for a test problem.
        adjoints: the adjoints by their names.
    """

    preset: str
    problem: Preset
    quantity: str
    names: list[str]
    dt: float
    seed: int
    sweep: Sweep
    job: Job | None = None
    adjoints: dict[str, Adjoint] = field(default_factory=dict[str, Adjoint])

    @property
    def question(self) -> Question:
        return self.problem.questions[self.quantity]

    def methods(self, compile_runs: bool) -> list[Method]:
        if self.names:
            question = partial(question_of, self.preset, self.quantity, self.job)
            found = estimators_of(self.names, question, self.dt, self.seed, compile_runs)
        else:
            assert self.job is not None
            found = self.job.adjoints(self.adjoints, self.quantity, compile_runs)
        if compile_runs and not any(method.compiles(self.dt) for method in found):
            raise ValueError(
                "--compile: none of these methods can be compiled. The adjoints direct, checkpoint "
                "and reversible can, and so can the estimators pathwise, finite-difference, "
                "score-function and reweighting."
            )
        return found


def report_comparison(found: Comparing, results: dict[float, Comparison], output: Path) -> bool:
    """Print the tables, and write compare.png and compare.json; False: there are no numbers."""
    points, exact = found.sweep.points(), found.question.exact
    answers = dict[float, Answer]()
    show(f"{found.problem.title}, seed {found.seed}. Value: {found.question.title}.")
    for x, (horizon, _) in points.items():
        heading = _heading(found, x)
        if exact is not None:
            value, grads = answers[x] = exact.answer(horizon)
            slopes = ", ".join(f"d/d {name} {slope:.6g}" for name, slope in grads.items())
            heading += f"\n{exact.how}: {value:.6g}, {slopes}"
        _table(heading, results[x], found.job)
    for remark in _remarks(found):
        show(remark)
    if not any(comparison.estimates for comparison in results.values()):
        return False
    runs = []
    for x, (horizon, replicas) in points.items():
        run: dict[str, Any] = {"horizon": horizon, "replicas": replicas}
        if x in answers:
            run["answer"] = dict(zip(("value", "grad"), answers[x], strict=True))
        runs.append(run | {"methods": results[x].rows()})
    label = axis = found.sweep.axis
    if axis == "horizon":
        unit = found.job.system.time_name if found.job else ""
        label = f"{axis} / {unit or 'reduced units'}"
    slopes_of = {x: grads for x, (_, grads) in answers.items()}
    lines = {exact.estimand if exact else "stationary": slopes_of}
    figure = plot_sweep(results, label, lines, _units(found))
    write_files(output / "compare", figure, {**_about(found), "runs": runs})
    return True


def _about(found: Comparing) -> dict[str, Any]:
    settings: dict[str, Any] = settings_of(found.job) if found.job else {}
    if not found.names:
        return {**settings, "observable": found.quantity}
    return {
        "preset": found.preset,
        "title": found.problem.title,
        "seed": found.seed,
        "observable": found.question.title,
        **settings,
    }


def _remarks(found: Comparing) -> Iterator[str]:
    """Explain adjoints that differ from the others."""
    if "backsolve" in found.adjoints:
        assert found.job is not None
        solver, other = repr(found.job.continuous), "the exact flow"
        if found.job.model.stochastic:
            solver = "the midpoint rule of SDESolver at this dt"
            other = "other steps on the same noise"
        yield (
            f"backsolve is the continuous adjoint on {solver}: it differentiates {other}, so its "
            "difference from the others is the discretisation error of dt, not of the adjoint."
        )
    if PLAIN in found.adjoints:
        yield (
            f"{PLAIN} runs and reverses the same steps in floating point. In chaos its path soon "
            "differs from the exact path, and so does its gradient. Where its reconstruction error "
            "is not small, its gradient is wrong: it belongs to no path."
        )


def _units(found: Comparing) -> str:
    """List the units of a gradient."""
    if found.job is None:
        return "reduced units"
    base = "eV, angstrom, amu" if found.job.system.time_name == "fs" else "reduced units"
    unit = found.job.quantity(found.quantity).unit
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


def _heading(found: Comparing, x: float) -> str:
    horizon, replicas = found.sweep.points()[x]
    job = found.job
    unit = "" if job is None else f" {job.system.time_name} ({job.steps(horizon)} steps)"
    count = f", {replicas} replicas" if replicas > 1 else ""
    return f"\nhorizon {horizon:g}{unit}{count}"


def _table(heading: str, comparison: Comparison, job: Job | None) -> None:
    show(heading)
    if comparison.estimates:
        show(comparison.table())
    for remark in comparison.remarks():
        show(remark)
    # The title has the path of most methods. A transform or another dtype takes another path.
    for name, estimate in comparison.estimates.items():
        for path in (estimate.diagnostics.get("pairs") or {}).values():
            if job is not None and path != job.system.potential.path(job.system.position):
                show(f"{name}: pairs by another path: {path}.")
