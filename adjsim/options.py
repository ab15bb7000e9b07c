"""The values of the command line's options, read from their text."""

from __future__ import annotations

from adjsim._trajectory import check_times, step_numbers
from adjsim.job import OBSERVABLES, Sweep
from adjsim.presets import ESTIMATORS, Preset, Question, presets


def observable_names() -> str:
    known = {
        "lj13": list(OBSERVABLES),
        **{name: list(preset.questions) for name, preset in presets().items()},
    }
    return "; ".join(f"{', '.join(quantities)} for {name}" for name, quantities in known.items())


def preset_of(name: str) -> Preset:
    known = presets()
    if name not in known:
        raise ValueError(f"unknown preset '{name}'; choose one of lj13, {', '.join(known)}.")
    return known[name]


def question_named(problem: Preset, preset: str, observable: str | None) -> Question:
    known = problem.questions
    if observable is not None and observable not in known:
        raise ValueError(
            f"unknown observable '{observable}' of {preset}; choose from {', '.join(known)}."
        )
    return known[observable or next(iter(known))]


def estimator_names(requested: list[str] | None) -> list[str]:
    names = [name.strip() for entry in requested or [] for name in entry.split(",")]
    if names == ["all"]:
        return list(ESTIMATORS)
    for name in names:
        if name not in ESTIMATORS:
            raise ValueError(
                f"unknown estimator '{name}'; choose from {', '.join(ESTIMATORS)}, or all."
            )
    return names


def sweep_of(horizons: list[str], dt: float, replicas: list[str], least: int) -> Sweep:
    counts = set()
    for text in (part.strip() for entry in replicas for part in entry.split(",")):
        if not text.lstrip("-").isdigit():
            raise ValueError(f"replicas '{text}' is not an integer.")
        counts.add(int(text))
    sweep = Sweep(_horizons(horizons, dt), sorted(counts))
    sweep.check(least)
    return sweep


def memory_kernel(
    friction: float, rates: str | None, strengths: str | None
) -> tuple[list[float], list[float]]:
    if strengths is not None and rates is None:
        raise ValueError("--strengths was given without --rates; give both, equally many.")
    decays = _numbers("rates", rates) if rates is not None else [5 * friction]
    weights = (
        _numbers("strengths", strengths)
        if strengths is not None
        else [friction * r / len(decays) for r in decays]
    )
    if len(decays) != len(weights):
        raise ValueError(
            f"--rates has {len(decays)} numbers and --strengths has {len(weights)}; give "
            "equally many."
        )
    return decays, weights


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{option} '{text}' is not a list of numbers; write, for example, 1,4."
        ) from None


def _horizons(requested: list[str], dt: float) -> list[float]:
    horizons = set()
    for text in (part.strip() for entry in requested for part in entry.split(",")):
        try:
            horizon = float(text)
        except ValueError:
            raise ValueError(
                f"horizon '{text}' is not a number; write a time such as 2.5."
            ) from None
        if not 0 < horizon < float("inf"):
            raise ValueError(f"horizon {text} is not a positive time.")
        if dt > 0:
            try:
                step_numbers(check_times([0.0, horizon]), dt)
            except ValueError:
                below = max(1, int(horizon / dt)) * dt
                raise ValueError(
                    f"horizon {text} is not a multiple of dt = {dt:g}; the nearest are "
                    f"{below:.10g} and {below + dt:.10g}."
                ) from None
        horizons.add(horizon)
    return sorted(horizons)
