"""The values of the command line's options, read from their text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import typer

from adjsim.cli.parameters import option
from adjsim.cli.sweep import Sweep
from adjsim.core.durable.interruption import ending_at_once
from adjsim.core.trajectory import check_times, step_numbers
from adjsim.io.systems import TRUNCATIONS

# Options that several commands have.
TRUNCATION: Any = option("shifted", f"How the energy ends at the cutoff: {', '.join(TRUNCATIONS)}.")
SWITCH_START: Any = option(
    None,
    "Distance from which --truncation switched switches the energy off.",
    show_default="0.9 of the cutoff",
)
TAU: Any = option(
    None, "Relaxation time of nose-hoover, bussi and berendsen.", show_default="50 dt"
)
STORE: Any = option(
    None,
    "Folder that keeps finished parts. Called again with the same options, the command reads these "
    "and computes the rest.",
)
SEED: Any = option(0, "Seed of momenta and noise.")


def output(default: str) -> Any:
    """Declare the folder of the files that a command writes."""
    return option(Path(default), "Folder for the figure and the JSON file.")


# The dynamics that have the parameters of these options.
THERMOSTAT = {
    "tau": ["nose-hoover", "bussi", "berendsen"],
    "friction": ["langevin", "generalised", "overdamped", "andersen"],
    "rates": ["generalised"],
    "strengths": ["generalised"],
}

# Options whose numbers are above zero, those that may be zero, and the least of each count.
POSITIVE = (
    "epsilon", "sigma", "cutoff", "distance", "width", "r_max", "target_density", "target_error",
    "density_error", "piston_tau", "dt", "tau", "friction",
)  # fmt: skip
NOT_NEGATIVE = ("temperature", "skin", "switch_start", "r_min")
COUNTS = {"steps": 1, "burn_in": 0, "replicas": 2, "iterations": 1}
LARGEST_COUNT = 2**31 - 1
SEEDS = (-(2**63), 2**64 - 1)


def check_numbers(context: typer.Context) -> None:
    """Refuse numbers outside the range of their option, in the units of the command line."""
    for name, value in context.params.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, float):
            if name in POSITIVE and not value > 0:
                raise ValueError(f"{option} must be positive; got {value:g}.")
            if name in NOT_NEGATIVE and not value >= 0:
                raise ValueError(f"{option} must not be negative; got {value:g}.")
            if name in (*POSITIVE, *NOT_NEGATIVE) and value == float("inf"):
                raise ValueError(f"{option} must be finite; got inf.")
        elif isinstance(value, int) and name in COUNTS:
            if value < COUNTS[name]:
                raise ValueError(f"{option} must be at least {COUNTS[name]}; got {value}.")
            if value > LARGEST_COUNT:
                raise ValueError(f"{option} must be at most {LARGEST_COUNT}; got {value}.")
    seed = context.params["seed"]
    low, high = SEEDS
    if not low <= seed <= high:
        raise ValueError(
            f"--seed must be an integer of at most 64 bits, from {low} to {high}; got {seed}."
        )


def listed(entries: Iterable[str]) -> list[str]:
    """Return the values of a repeated option, of which each may be several between commas."""
    return [part.strip() for entry in entries for part in entry.split(",")]


def sweep_of(horizons: list[str], dt: float, replicas: list[str], least: int) -> Sweep:
    counts = set()
    for text in listed(replicas):
        if not text.lstrip("-").isdigit():
            raise ValueError(f"replicas '{text}' is not an integer.")
        if int(text) > LARGEST_COUNT:
            raise ValueError(f"replicas must be at most {LARGEST_COUNT}; got {text}.")
        counts.add(int(text))
    times = {_horizon(text, dt) for text in listed(horizons)}
    if min(counts) < least:
        why = " for an error bar" if least > 1 else ""
        raise ValueError(f"replicas must be at least {least}{why}; got {min(counts)}.")
    if len(times) > 1 and len(counts) > 1:
        raise ValueError(
            "give several horizons or several numbers of replicas, not both: the figure has one "
            "axis."
        )
    return Sweep(sorted(times), sorted(counts))


def _horizon(text: str, dt: float) -> float:
    try:
        horizon = float(text)
    except ValueError:
        raise ValueError(f"horizon '{text}' is not a number; write a time such as 2.5.") from None
    if not 0 < horizon < float("inf"):
        raise ValueError(f"horizon {text} is not a positive time.")
    try:
        step_numbers(check_times([0.0, horizon]), dt)
    except ValueError:
        below = max(1, int(horizon / dt)) * dt
        raise ValueError(
            f"horizon {text} is not a multiple of dt = {dt:g}; the nearest are {below:.10g} and "
            f"{below + dt:.10g}."
        ) from None
    return horizon


def memory_kernel(
    friction: float, rates: str | None, strengths: str | None
) -> tuple[list[float], list[float]]:
    if strengths is not None and rates is None:
        raise ValueError("--strengths was given without --rates; give both, equally many.")
    decays = [5 * friction] if rates is None else _numbers("rates", rates)
    even = [friction * r / len(decays) for r in decays]
    weights = even if strengths is None else _numbers("strengths", strengths)
    if len(decays) != len(weights):
        raise ValueError(
            f"--rates has {len(decays)} numbers and --strengths has {len(weights)}; give "
            "equally many."
        )
    return decays, weights


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{option} '{text}' is not a list of numbers; write, for example, 1,4."
        ) from None
    if not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"--{option} must be positive numbers; got {text}.")
    return numbers


def was_given(context: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_without(context: typer.Context, needed: str, names: Iterable[str]) -> None:
    """Refuse options that mean nothing without another one, which was not given."""
    for name in names:
        if was_given(context, name):
            raise ValueError(f"--{name.replace('_', '-')} is for --{needed}, which was not given.")


def refuse_misplaced(context: typer.Context, dynamics: str) -> None:
    """Refuse options of a thermostat that the dynamics does not have."""
    for name, users in THERMOSTAT.items():
        if dynamics not in users and was_given(context, name):
            raise ValueError(f"--{name} is for {' and '.join(users)}, not for {dynamics}.")


def refuse(error: Exception) -> NoReturn:
    """Print an error as one line, and end with status 2."""
    print(f"adjsim: {' '.join(str(error).split())}", file=sys.stderr)
    raise typer.Exit(2)


def resumable(store: Path | None) -> AbstractContextManager[Any]:
    """Return a context in which an interruption says how a command with a store goes on."""
    if store is None:
        return nullcontext()
    return ending_at_once(f"interrupted. Run the same command, with --store {store}, to go on.")
