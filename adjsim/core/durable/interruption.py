"""Ends of a run by Ctrl-C or SIGTERM, at a moment that the run chooses."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NoReturn, Self


class Interruption:
    """Notes Ctrl-C and SIGTERM while it is active.

    A second signal ends the process as it would without this class.
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
        _end(self._number, line)

    def __enter__(self) -> Self:
        self._former = _handled_by(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        _restore(self._former)

    def _note(self, number: int, frame: Any) -> None:
        if self.requested:
            _restore(self._former)
            os.kill(os.getpid(), number)
        self._number = number


@contextmanager
def ending_at_once(line: str) -> Generator[None, None, None]:
    """End the process at Ctrl-C or SIGTERM, with a line, where everything finished is saved."""
    former = _handled_by(lambda number, frame: _end(number, line))
    try:
        yield
    finally:
        _restore(former)


def _end(number: int, line: str) -> NoReturn:
    if line:
        print(f"adjsim: {line}", file=sys.stderr)
    raise SystemExit(128 + number)


def _handled_by(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Set a handler, and return the former ones by signal.

    Signals that the process ignores, as a child of the command line does, are left alone. Only the
    main thread of a process receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heeded = (n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN)
    return {number: signal.signal(number, handler) for number in heeded}


def _restore(former: dict[int, Any]) -> None:
    for number, handler in former.items():
        # None stands for a handler that was not set by Python.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
