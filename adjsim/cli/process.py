"""Function calls in a new process, so that their peak memory can be measured.

In one process, memory that one method frees is reused by the next, whose measured growth is then
smaller than its need. On Linux the process is a fork of a server that has imported the library. The
server only imports: it starts no OpenMP threads, which do not survive a fork, and does not use a
GPU. On other systems each process imports the library itself, since system libraries of macOS do
not survive a fork, and Windows has no fork.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

START = "forkserver" if sys.platform == "linux" else "spawn"
# Modules that the server imports. They are given by name, since adjsim.cli.job imports this module.
# Torch imports the others at the first call of autograd.grad with grad_outputs, and at the first
# trace of a formula.
PRELOAD = ["adjsim.cli.job", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"]


class ProcessDied(RuntimeError):
    """Raised if a process ended without a result, as when memory ran out."""


def run_in_process(work: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process, and return its result or raise its error; all pickle."""
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    # Pickled here, since multiprocessing would share the tensors' memory instead of copying them.
    process = context.Process(target=_serve, args=(sender, pickle.dumps((work, arguments))))
    process.start()
    try:
        sender.close()
        result, error = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        raise ProcessDied(_exit_reason(process.exitcode)) from None
    finally:
        # The result has arrived, or the caller has stopped waiting.
        process.kill()
        process.join()
        receiver.close()
    if error is not None:
        raise error
    return result


def _context() -> Any:
    context = multiprocessing.get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload(PRELOAD)
        # The server and its forks must ignore Ctrl-C from the start: the caller ends the processes
        # that it started.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, before)
    return context


def _serve(sender: Connection, data: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_caller, daemon=True).start()
    # Imported objects stay alive. Garbage collection that skips them saves 0.1 seconds each time.
    gc.freeze()
    work, arguments = pickle.loads(data)
    try:
        outcome = pickle.dumps((work(*arguments), None))
    except Exception as error:
        outcome = _pickled_error(error)
    sender.send_bytes(outcome)


def _exit_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def _pickled_error(error: Exception) -> bytes:
    """Pickle an error with its traceback as a note, or its text if pickling fails."""
    text = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(text)
    try:
        data = pickle.dumps((None, error))
        pickle.loads(data)
    except Exception:
        data = pickle.dumps((None, RuntimeError(text)))
    return data


def _exit_reason(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with exit status {code}, without a result."
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        name += ", as the system does when memory runs out; use fewer replicas or a shorter horizon"
    return f"its process was ended by {name}."
