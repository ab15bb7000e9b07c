"""The command line's ``fit``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import typer
from torch import Tensor

from adjsim.adjoints import CompileError, ReconstructionError
from adjsim.cli.curve import Curve, read_curve
from adjsim.cli.density import (
    ROOM,
    Density,
    piston_job,
    read_densities,
    refuse_massless,
    refuse_other_unit,
)
from adjsim.cli.fit_options import BATHS, WIDTH, FitParameters
from adjsim.cli.fit_report import report_fit
from adjsim.cli.fit_runs import Condition, Fitting, RunSettings, problems
from adjsim.cli.job import Job, job_of
from adjsim.cli.melting import (
    Preparation,
    different_density,
    melted,
    melting_temperature,
    order_of,
)
from adjsim.cli.models import SCHEMES, BathSettings
from adjsim.cli.options import (
    check_numbers,
    listed,
    memory_kernel,
    refuse,
    refuse_misplaced,
    refuse_without,
    resumable,
    was_given,
)
from adjsim.cli.parameters import command_of
from adjsim.core.box import perpendicular_widths, volume
from adjsim.core.durable.files import check_writable
from adjsim.core.durable.ranks import RankError, Ranks
from adjsim.estimators.fit.fit import fit
from adjsim.io.systems import Cutoff, System, structure

# Options that mean nothing without --target or --density.
TARGET_OPTIONS = ("target_unit", "target_density", "target_error", "r_min", "r_max", "width")
DENSITY_OPTIONS = ("density_unit", "density_error", "pressure", "piston_tau")


def fit_command(context: typer.Context, given: FitParameters) -> None:
    """Fit epsilon and sigma of a Lennard-Jones liquid to a measured g(r), to densities, or both.

    Runs of the structure at the temperatures of the measurement give g(r), the mean density and
    their gradients. Steps of Gauss and Newton fit epsilon and sigma, with errors from the spread
    over replicas.

    Writes fit.png and fit.json into the output folder.
    """
    try:
        check_numbers(context)
        at_pressure = given.density is not None
        runs = RunSettings.of(
            given.estimator, given.steps, given.burn_in, given.compile_runs, at_pressure
        )
        fitting = _fitting(context, given)
        make, observables, simulations = problems(fitting, runs)
        for observable, simulation in zip(observables, simulations, strict=True):
            make().check(simulation, observable)
        ranks = Ranks.of()
        if ranks.first:
            check_writable(given.output)
    except (ValueError, TypeError) as error:
        refuse(error)
    prepared = Preparation(fitting.order)
    with resumable(given.store):
        try:
            if given.melt or (given.melt is None and fitting.order.found):
                prepared, starts = _melted(context, given, fitting, ranks)
                make, observables, simulations = problems(fitting, runs, starts)
            found = fit(
                simulations,
                observables,
                fitting.target,
                make,
                replicas=given.replicas,
                iterations=given.iterations,
                largest_change=runs.largest_change,
                stderr=fitting.stderr,
                generator=given.seed,
                progress=True,
                store=given.store,
                group=ranks,
            )
        except ArithmeticError as error:
            system = fitting.liquid.system
            unit = f"{1 / system.time:.4g} {system.time_name}"
            refuse(ValueError(f"{error} Times in this message are in units of {unit}."))
        except (ValueError, ReconstructionError, CompileError, RankError) as error:
            # A wrong density or a crystal may be the cause.
            also = "".join(f" Note: {doubt}." for doubt in fitting.doubts + prepared.doubts)
            refuse(ValueError(f"{error}{also}"))
    if ranks.first:
        report_fit(fitting, found, _about(given, fitting, prepared, runs), given.output)


def _fitting(context: typer.Context, given: FitParameters) -> Fitting:
    """Read the structure and the measurements, and check them against each other."""
    _refuse_unused(context, given)
    at_pressure = given.density is not None
    room = ROOM if at_pressure else 1.0
    ending = Cutoff(given.cutoff, given.truncation, given.switch_start, room=room)
    system = structure(given.structure_file, given.epsilon, given.sigma, ending)
    diameter = float(system.potential.sigma.detach().mean())
    curve, box = None, system.potential.box
    if given.target is not None:
        curve = _with_errors(
            read_curve(given.target).in_angstrom(given.target_unit, diameter), given
        )
    if box is None:
        need = "constant pressure needs one" if curve is None else "g(r) needs a density"
        raise ValueError(
            f"'{given.structure_file}' has no periodic cell, and {need}; give a file with a cell."
        )
    aimed = given.target_density
    if curve is not None:
        aimed = curve.density if aimed is None else aimed
        curve = _within(box, given, curve, room)
    densities = list[Density]()
    if given.density is not None:
        refuse_massless(system)
        densities = read_densities(
            given.density, given.temperature, given.density_unit, given.density_error
        )
        refuse_other_unit(system, densities, float(volume(box)))
        _refuse_other_density(system, densities, given.temperature, aimed)
    count = _hold_others(system, given.parameters)
    density = len(system.position) / float(volume(box))
    coldest = min([x.temperature for x in densities], default=given.temperature)
    liquid = _job(context, given, system, coldest)
    fitting = Fitting(
        liquid,
        _conditions(context, given, liquid, curve, densities),
        curve,
        WIDTH * diameter if given.width is None else given.width,
        density,
        aimed,
        order_of(system.position, box),
        # At constant pressure the density of the structure is that of the start only.
        [] if at_pressure else different_density(density, aimed),
    )
    if at_pressure and count > len(fitting.target):
        raise ValueError(
            f"{len(fitting.target)} densities do not determine {count} numbers: fit fewer, as by "
            "--parameters sigma, or give a file of densities at more temperatures, or --target."
        )
    return fitting


def _refuse_unused(context: typer.Context, given: FitParameters) -> None:
    """Refuse options of a measurement that is not given."""
    if given.target is None and given.density is None:
        raise ValueError("nothing is measured: give --target, --density or both.")
    if given.target is None:
        refuse_without(context, "target", TARGET_OPTIONS)
    if given.density is None:
        refuse_without(context, "density", DENSITY_OPTIONS)
    elif given.dynamics != "langevin":
        raise ValueError(
            f"constant pressure is by a Langevin piston, not by {given.dynamics}: leave out "
            "--dynamics."
        )


def _conditions(
    context: typer.Context,
    given: FitParameters,
    liquid: Job,
    curve: Curve | None,
    densities: list[Density],
) -> list[Condition]:
    """Make the runs of each temperature at which something was measured."""
    if not densities:
        return [Condition(liquid, None, curve)]
    known = {density.temperature: density for density in densities}
    if curve is None and was_given(context, "temperature") and given.temperature not in known:
        raise ValueError(
            f"--temperature {given.temperature:g} is none of '{given.density}', which has the "
            "temperatures: leave it out."
        )
    temperatures = set(known) if curve is None else {given.temperature, *known}
    return [
        Condition(
            piston_job(
                liquid.system,
                temperature,
                given.friction,
                given.dt,
                given.pressure,
                given.piston_tau,
                given.seed,
            ),
            known.get(temperature),
            curve if temperature == given.temperature else None,
        )
        for temperature in sorted(temperatures)
    ]


def _with_errors(curve: Curve, given: FitParameters) -> Curve:
    """Return a measured g(r) with the error of an option, or refuse one without a needed error."""
    if given.target_error is None:
        if given.density is not None and curve.stderr is None:
            raise ValueError(
                f"target '{given.target}' has no column of errors, which weight it beside "
                "--density: give --target-error."
            )
        return curve
    if curve.stderr is not None:
        raise ValueError(
            f"target '{given.target}' has a column of errors: leave out --target-error."
        )
    return replace(curve, stderr=torch.full_like(curve.g, given.target_error))


def _refuse_other_density(
    system: System, densities: list[Density], temperature: float, aimed: float | None
) -> None:
    """Refuse a density of the target, per cubic angstrom, that contradicts the measured one."""
    mass = float(system.mass.mean())
    for density in densities:
        number = density.value * density.scale / mass
        if aimed is None or density.temperature != temperature:
            continue
        if different_density(number, aimed):
            raise ValueError(
                f"--density {density.value:g} {density.unit} at {temperature:g} K is {number:.4g} "
                f"atoms per cubic angstrom, and the density of the target is {aimed:.4g} "
                "(--target-density, or a comment of its file): correct one of them."
            )


def _hold_others(system: System, names: str) -> int:
    """Take no gradients by the parameters that are not named, and count the numbers of the rest."""
    known, fitted = dict(system.potential.named_parameters()), listed([names])
    for name in fitted:
        if name not in known:
            raise ValueError(f"unknown parameter '{name}'; choose from {', '.join(known)}.")
    for name, parameter in known.items():
        parameter.requires_grad_(name in fitted)
    return sum(known[name].numel() for name in set(fitted))


def _melted(
    context: typer.Context, given: FitParameters, fitting: Fitting, ranks: Ranks
) -> tuple[Preparation, Tensor]:
    """Melt the structure, once for each replica."""
    liquid = fitting.liquid
    box, heat = liquid.system.potential.box, melting_temperature(liquid)
    assert box is not None
    hot = _job(context, given, liquid.system, heat)
    starts = melted(hot, liquid, given.replicas, given.compile_runs, ranks)
    ordered = sum(order_of(start, box).found for start in starts)
    return Preparation(fitting.order, heat, ordered, given.replicas), starts


def _about(
    given: FitParameters, fitting: Fitting, prepared: Preparation, runs: RunSettings
) -> dict[str, Any]:
    """Describe the fit, for its report."""
    return {
        "target": None if given.target is None else given.target.name,
        "estimator": given.estimator,
        "width": None if fitting.curve is None else fitting.width,
        "pressure": given.pressure if fitting.at_pressure else None,
        "replicas": given.replicas,
        "burn_in_steps": runs.skip,
        "gradient_steps": runs.steps - runs.skip,
        "compiled": given.compile_runs,
        "density": fitting.density,
        "target_density": fitting.target_density,
        "order": {"peak": fitting.order.peak, "limit": fitting.order.limit},
        "melted_at": prepared.temperature,
        "starts": prepared.sentence(fitting.liquid.system.temperature_name),
        "doubts": fitting.doubts + prepared.doubts,
    }


def _within(box: Tensor, given: FitParameters, curve: Curve, room: float) -> Curve:
    """Return the part of the target that is fitted, or raise if the box is too small for it."""
    target = given.target
    r_min, r_max = given.r_min, given.r_max or float("inf")
    half = room * 0.5 * float(perpendicular_widths(box).min())
    part = curve.between(r_min, r_max)
    if len(part.r) == 0:
        raise ValueError(
            f"target '{target}' has no distances from {r_min:g} to {r_max:g} angstrom; it has "
            f"{float(curve.r[0]):g} to {float(curve.r[-1]):g}. Change --r-min or --r-max."
        )
    if float(part.r[-1]) > half:
        # Rounded down, so that the number can be given.
        limit = int(half * 100) / 100
        share = "half" if room == 1 else f"{room:g} of half"
        raise ValueError(
            f"target '{target}' has distances up to {float(part.r[-1]):g} angstrom, beyond {share} "
            f"the box of '{given.structure_file}', {half:.4g}: give --r-max {limit:g}, or a larger "
            "box."
        )
    return part


def _job(context: typer.Context, given: FitParameters, system: System, temperature: float) -> Job:
    dynamics, friction = given.dynamics, given.friction
    if dynamics not in BATHS:
        raise ValueError(f"unknown thermostat '{dynamics}'; choose one of {', '.join(BATHS)}.")
    refuse_misplaced(context, dynamics)
    if temperature == 0:
        raise ValueError("--temperature must be positive for a fit; got 0.")
    tau = 50 * given.dt if given.tau is None else given.tau
    bath = BathSettings(temperature, tau, friction, *memory_kernel(friction, None, None))
    job = job_of(system, dynamics, SCHEMES[dynamics], given.dt, bath, given.seed)
    # The bath is given, and the potential is fitted.
    job.freeze_bath()
    return job


fit_to_curve = command_of(FitParameters, fit_command)
