"""Table and files of the command line's fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ase import units
from rich import box
from rich.table import Table

from adjsim.cli.curve import Curve
from adjsim.cli.job import Job
from adjsim.cli.report import settings_of, show, write_files
from adjsim.estimators.compare import short_name
from adjsim.estimators.figures import plot_fit
from adjsim.estimators.fit.fit import Fit

UNITS = {"epsilon": "eV", "sigma": "angstrom"}


def report_fit(job: Job, found: Fit, curve: Curve, about: dict[str, Any], output: Path) -> None:
    """Print the fitted numbers and write fit.png and fit.json; ``about`` has the settings."""
    show(f"{job.title}, seed {job.seed}.")
    show(
        f"Target: {about['target']}, {len(curve.r)} distances from {float(curve.r[0]):g} to "
        f"{float(curve.r[-1]):g} angstrom. The simulated g(r) is smoothed by a Gaussian of "
        f"{about['width']:.2g} angstrom."
    )
    aimed = about["target_density"]
    show(
        f"{about['starts']} Density: {about['density']:.4g} per cubic angstrom, that of the target "
        + (f"{aimed:.4g}." if aimed is not None else "is not known (--target-density).")
    )
    rows = _rows(job, found)
    fitted = {name: with_error(row["fitted"], row["stderr"]) for name, row in rows.items()}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("parameter", "start", "fitted"):
        table.add_column(heading, justify="left" if heading == "parameter" else "right")
    for name, row in rows.items():
        table.add_row(f"{name} ({row['unit']})", f"{row['start']:.6g}", fitted[name])
    show(table)
    difference = found.simulated - found.target
    rms = float(difference.square().mean().sqrt())
    noise = float(found.simulated_stderr.square().mean().sqrt())
    show(
        f"The simulated g(r) differs from the target by {rms:.2g} (root mean square), and its "
        f"standard error is {noise:.2g}. {len(found.history)} evaluations, {found.seconds:.1f} s."
    )
    warnings = about["doubts"] + found.warnings
    for warning in warnings:
        show(f"not to be trusted, {warning}.")
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
            {"values": {name: x.tolist() for name, x in entry.values.items()}, "loss": entry.loss}
            for entry in found.history
        ],
    }
    title = ", ".join(
        f"{name} = {fitted[name]} {row['unit']}" for name, row in rows.items() if row["unit"] != "K"
    )
    write_files(output / "fit", plot_fit(found, curve.r.tolist(), title), record)


def with_error(value: float, error: float) -> str:
    """Format a number with two digits of its error."""
    exponent = int(f"{error:.1e}".split("e")[1])
    digits = max(0, 1 - exponent) if error > 0 else 6
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _rows(job: Job, found: Fit) -> dict[str, dict[str, Any]]:
    """Return one record for each number, with epsilon also as a temperature."""
    rows: dict[str, dict[str, Any]] = {}
    start = found.history[0].values
    for name, values in found.values.items():
        short = short_name(name, list(found.values))
        scales = {short: (1.0, UNITS[short])}
        if short == "epsilon":
            scales["epsilon/kB"] = (units.kB, "K")
        # The entries of a parameter of a mixture are those of its species.
        entries = [""] if values.ndim == 0 else [f" {species}" for species in job.system.species]
        columns = {"start": start[name], "fitted": values, "stderr": found.errors[name]}
        for label, (scale, unit) in scales.items():
            for i, entry in enumerate(entries):
                rows[label + entry] = {"unit": unit} | {
                    key: float(column.flatten()[i]) / scale for key, column in columns.items()
                }
    return rows
