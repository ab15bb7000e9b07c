"""Table and files of the command line's fit."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

from ase import units
from rich import box
from rich.table import Table
from torch import Tensor

from adjsim.cli.curve import Curve
from adjsim.cli.job import Job
from adjsim.cli.report import plain_console, settings_of
from adjsim.core.durable.files import replacing
from adjsim.estimators.compare import short_name
from adjsim.estimators.figures import plot_fit
from adjsim.estimators.fit.fit import Fit

UNITS = {"epsilon": "eV", "sigma": "angstrom"}


def report_fit(job: Job, found: Fit, curve: Curve, about: dict[str, Any], output: Path) -> None:
    """Print the fitted numbers, and write fit.png and fit.json.

    Args:
        job: the system and its dynamics.
        found: the fit.
        curve: the measured curve that was fitted.
        about: the settings of the fit, for the file.
        output: the folder.
    """
    console = plain_console()
    console.print(f"{job.title}, seed {job.seed}.", soft_wrap=True)
    console.print(
        f"Target: {about['target']}, {len(curve.r)} distances from {float(curve.r[0]):g} to "
        f"{float(curve.r[-1]):g} angstrom. The simulated g(r) is smoothed by a Gaussian of "
        f"{about['width']:.2g} angstrom.",
        soft_wrap=True,
    )
    aimed = about["target_density"]
    console.print(
        f"{about['starts']} Density: {about['density']:.4g} per cubic angstrom, that of the target "
        + (f"{aimed:.4g}." if aimed is not None else "is not known (--target-density)."),
        soft_wrap=True,
    )
    rows = _rows(job, found)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("parameter", "start", "fitted"):
        table.add_column(heading, justify="left" if heading == "parameter" else "right")
    for name, row in rows.items():
        table.add_row(
            f"{name} ({row['unit']})",
            f"{row['start']:.6g}",
            with_error(row["fitted"], row["stderr"]),
        )
    console.print(table)
    difference = found.simulated - found.target
    rms = float(difference.square().mean().sqrt())
    noise = float(found.simulated_stderr.square().mean().sqrt())
    console.print(
        f"The simulated g(r) differs from the target by {rms:.2g} (root mean square), and its "
        f"standard error is {noise:.2g}. {len(found.history)} evaluations, {found.seconds:.1f} s.",
        soft_wrap=True,
    )
    warnings = about["doubts"] + found.warnings
    for warning in warnings:
        console.print(f"not to be trusted, {warning}.", soft_wrap=True)
    record = {
        **settings_of(job),
        **{name: x for name, x in about.items() if name != "doubts"},
        "parameters": rows,
        "covariance": found.covariance.tolist(),
        "converged": found.converged,
        "loss": found.loss,
        "rms_difference": rms,
        "seconds": found.seconds,
        "warnings": warnings,
        "curve": {
            "r": curve.r.tolist(),
            "measured": found.target.tolist(),
            "measured_stderr": None if curve.stderr is None else curve.stderr.tolist(),
            "simulated": found.simulated.tolist(),
            "simulated_stderr": found.simulated_stderr.tolist(),
        },
        "evaluations": [
            {
                "values": {name: x.tolist() for name, x in entry.values.items()},
                "loss": entry.loss,
            }
            for entry in found.history
        ],
    }
    picture = BytesIO()
    title = ", ".join(
        f"{name} = {with_error(row['fitted'], row['stderr'])} {row['unit']}"
        for name, row in rows.items()
        if row["unit"] != "K"
    )
    plot_fit(found, curve.r.tolist(), title).savefig(picture, format="png", dpi=130)
    with replacing(output / "fit.png") as temporary:
        temporary.write_bytes(picture.getvalue())
    with replacing(output / "fit.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2), encoding="utf-8")
    console.print(f"\nwrote {output / 'fit.png'} and {output / 'fit.json'}", soft_wrap=True)


def with_error(value: float, error: float) -> str:
    """Format a number with two digits of its error."""
    digits = max(0, 1 - _exponent(error)) if error > 0 else 6
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _exponent(x: float) -> int:
    return int(f"{x:.1e}".split("e")[1])


def _rows(job: Job, found: Fit) -> dict[str, dict[str, Any]]:
    """Return one record for each number, with epsilon also as a temperature."""
    rows: dict[str, dict[str, Any]] = {}
    start = found.history[0].values
    for name in found.values:
        short = short_name(name, list(found.values))
        scales = {short: (1.0, UNITS[short])}
        if short == "epsilon":
            scales["epsilon/kB"] = (units.kB, "K")
        for label, (scale, unit) in scales.items():
            entries = zip(
                _labels(label, found.values[name], job),
                found.values[name].flatten().tolist(),
                found.errors[name].flatten().tolist(),
                start[name].flatten().tolist(),
                strict=True,
            )
            for key, value, error, first in entries:
                rows[key] = {
                    "unit": unit,
                    "start": first / scale,
                    "fitted": value / scale,
                    "stderr": error / scale,
                }
    return rows


def _labels(label: str, values: Tensor, job: Job) -> list[str]:
    """Return the names of the entries of a parameter, with the species of a mixture."""
    if values.ndim == 0:
        return [label]
    return [f"{label} {species}" for species in job.system.species]
