"""Ends of a run by Ctrl-C or SIGTERM, at a moment that the run chooses."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn, Self


class Interruption:
    """Notes Ctrl-C and SIGTERM while it is active.

    A second signal ends the process as it would without this class.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._handlers = ExitStack()

    @property
    def requested(self) -> bool:
        """Whether there was a signal."""
        return self._number is not None

    def end(self, line: str) -> NoReturn:
        """Print one line, and end the process with the status of the signal."""
        assert self._number is not None
        _end(self._number, line)

    def __enter__(self) -> Self:
        self._handlers = _handled_by(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers.close()

    def _note(self, number: int, frame: Any) -> None:
        if self.requested:
            self._handlers.close()
            os.kill(os.getpid(), number)
        self._number = number


def ending_at_once(line: str) -> ExitStack:
    """End the process at Ctrl-C or SIGTERM, with a line, where everything finished is saved."""
    return _handled_by(lambda number, frame: _end(number, line))


def _end(number: int, line: str) -> NoReturn:
    if line:
        print(f"adjsim: {line}", file=sys.stderr)
    raise SystemExit(128 + number)


def _handled_by(handler: Callable[[int, Any], None]) -> ExitStack:
    """Set a handler, and return a context at whose end the former ones are set again.

    Signals that the process ignores, as a child of the command line does, are left alone. Only the
    main thread of a process receives signals.
    """
    stack = ExitStack()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:
                former = signal.signal(number, handler)
                # None stands for a handler that was not set by Python.
                stack.callback(signal.signal, number, former or signal.SIG_DFL)
    return stack
