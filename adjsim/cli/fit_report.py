"""Table and files of the command line's fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ase import units
from rich import box
from rich.table import Table
from torch import Tensor

from adjsim.cli.fit_runs import Fitting
from adjsim.cli.job import Job
from adjsim.cli.report import settings_of, show, write_files
from adjsim.estimators.compare import short_name
from adjsim.estimators.figures import plot_fit
from adjsim.estimators.fit.fit import Fit

UNITS = {"epsilon": "eV", "sigma": "angstrom"}


def report_fit(fitting: Fitting, found: Fit, about: dict[str, Any], output: Path) -> None:
    """Print the fitted numbers and write fit.png and fit.json; ``about`` has the settings."""
    job, curve = fitting.conditions[0].job, fitting.curve
    is_density = torch.tensor(fitting.is_density)
    densities, radial = (_part(found, mask) for mask in (is_density, ~is_density))
    temperatures = [condition.job.temperature for condition in fitting.conditions]
    show(f"{job.titled(temperatures)}, seed {job.seed}.")
    if curve is not None:
        show(
            f"Target: {about['target']}, {len(curve.r)} distances from {float(curve.r[0]):g} to "
            f"{float(curve.r[-1]):g} angstrom. The simulated g(r) is smoothed by a Gaussian of "
            f"{about['width']:.2g} angstrom."
        )
    show(f"{about['starts']} {_density_sentence(fitting, about)}")
    rows = _rows(job, found)
    fitted = {name: with_error(row["fitted"], row["stderr"]) for name, row in rows.items()}
    table = _table("parameter", "start", "fitted")
    for name, row in rows.items():
        table.add_row(f"{name} ({row['unit']})", f"{row['start']:.6g}", fitted[name])
    show(table)
    records = _density_records(fitting, densities)
    if records:
        table = _table(f"density ({records[0]['unit']})", "measured", "start", "fitted")
        for record in records:
            cells = [
                with_error(record[key], record[f"{key}_stderr"])
                for key in ("measured", "start", "fitted")
            ]
            table.add_row(f"at {record['temperature']:g} K", *cells)
        show(table)
    difference = radial.simulated - radial.target
    rms = float(difference.square().mean().sqrt())
    noise = float(radial.simulated_stderr.square().mean().sqrt())
    cost = f"{len(found.history)} evaluations, {found.seconds:.1f} s."
    if curve is not None:
        show(
            f"The simulated g(r) differs from the target by {rms:.2g} (root mean square), and its "
            f"standard error is {noise:.2g}. {cost}"
        )
    else:
        show(cost)
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
        "seconds": found.seconds,
        "warnings": warnings,
        "densities": records,
        "evaluations": [
            {"values": {name: x.tolist() for name, x in entry.values.items()}, "loss": entry.loss}
            for entry in found.history
        ],
    }
    if curve is not None:
        record |= {
            "rms_difference": rms,
            "curve": {
                "r": curve.r.tolist(),
                "measured": radial.target.tolist(),
                "measured_stderr": None if curve.stderr is None else curve.stderr.tolist(),
                "simulated": radial.simulated.tolist(),
                "simulated_stderr": radial.simulated_stderr.tolist(),
            },
        }
    title = ", ".join(
        f"{name} = {fitted[name]} {row['unit']}" for name, row in rows.items() if row["unit"] != "K"
    )
    distances = [] if curve is None else curve.r.tolist()
    write_files(output / "fit", plot_fit(radial, distances, title, records), record)


def _part(found: Fit, mask: Tensor) -> Fit:
    """Return the fit of some of its measured numbers, with the loss of all of them."""
    history = [
        replace(
            entry,
            simulated=entry.simulated[mask],
            simulated_stderr=entry.simulated_stderr[mask],
        )
        for entry in found.history
    ]
    return replace(
        found,
        simulated=found.simulated[mask],
        simulated_stderr=found.simulated_stderr[mask],
        target=found.target[mask],
        history=history,
    )


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    return table


def _density_sentence(fitting: Fitting, about: dict[str, Any]) -> str:
    """Say at which density or pressure the runs are."""
    if fitting.at_pressure:
        pressure = f"{about['pressure']:g} bar"
        return f"Pressure: {pressure}, with a correction for the pairs beyond the cutoff."
    aimed = fitting.target_density
    return f"Density: {fitting.density:.4g} per cubic angstrom, that of the target " + (
        f"{aimed:.4g}." if aimed is not None else "is not known (--target-density)."
    )


def _density_records(fitting: Fitting, found: Fit) -> list[dict[str, Any]]:
    """Return a record of each measured density, and of the simulated ones with their errors."""
    known = [x.density for x in fitting.conditions if x.density is not None]
    start = found.history[0]
    return [
        {
            "temperature": density.temperature,
            "unit": density.unit,
            "measured": density.value,
            "measured_stderr": density.stderr,
            "start": float(start.simulated[i]),
            "start_stderr": float(start.simulated_stderr[i]),
            "fitted": float(found.simulated[i]),
            "fitted_stderr": float(found.simulated_stderr[i]),
        }
        for i, density in enumerate(known)
    ]


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
