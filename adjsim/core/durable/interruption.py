"""Ends of a run by Ctrl-C or SIGTERM, at a moment that the run chooses."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Notes Ctrl-C and SIGTERM while it is active.

    A second signal ends the process as it would without this class. Only the main thread of a
    process receives signals; in another thread nothing is noted.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._former: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether there was a signal."""
        return self._number is not None

    def end(self, line: str) -> NoReturn:
        """Print one line, and end the process with the status of the signal."""
        assert self._number is not None
        print(f"adjsim: {line}", file=sys.stderr)
        raise SystemExit(128 + self._number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._note) for number in _heeded()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            # None stands for a handler that was not set by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former = {}

    def _note(self, number: int, frame: Any) -> None:
        if self.requested:
            self.__exit__()
            os.kill(os.getpid(), number)
        self._number = number


def _heeded() -> list[signal.Signals]:
    """List the signals that the process does not ignore, as a child of the command line does."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def ending_at_once(line: str) -> Generator[None, None, None]:
    """End the process at Ctrl-C or SIGTERM, where everything finished is saved.

    Args:
        line: printed if it is not empty.
    """

    def end(number: int, frame: Any) -> NoReturn:
        if line:
            print(f"adjsim: {line}", file=sys.stderr)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, end) for number in _heeded()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
