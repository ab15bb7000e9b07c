"""Times of several sides of a comparison, measured in alternating rounds."""

from __future__ import annotations

from collections.abc import Callable

# Runs one side, and returns its seconds a step by name.
Side = Callable[[], dict[str, float]]


def measure(sides: dict[str, Side], rounds: int) -> dict[str, dict[str, float]]:
    """Run the sides in alternating rounds, and return their smallest times."""
    best: dict[str, dict[str, float]] = {name: side() for name, side in sides.items()}
    for _ in range(rounds):
        for name, side in sides.items():
            for what, seconds in side().items():
                best[name][what] = min(best[name][what], seconds)
    return best
