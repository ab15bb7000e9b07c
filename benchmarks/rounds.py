"""Times of several sides of a comparison, measured in alternating rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and those that begin meanwhile, on one core.

    The threads of OpenMM's CPU platform hand over to each other several times a step, even with one
    thread for the forces. On two cores the step of a small system waits for the other core to wake
    up, which takes up to thirty times as long as the step.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
