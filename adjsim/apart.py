"""Work in a process of its own, so that the memory it takes is its own.

Memory that one method frees is reused by the next, whose growth at the peak is then less than the
method needs. Each method of the command line therefore runs in a process that has run nothing else.
On Linux the process is a fork of a server that has imported the library, so that the import is paid
once. The server only imports: it starts no OpenMP threads, which do not survive a fork, and does
not touch a GPU. Elsewhere each process imports the library itself, since system libraries of macOS
do not survive a fork and Windows has none.
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
# Names, since imports run one way. The second is what torch imports at the first gradient of given
# cotangents.
PRELOAD = ["adjsim.job", "torch.fx.experimental.symbolic_shapes"]


class ProcessDied(RuntimeError):
    """The process of a piece of work ended without a result."""


def apart(work: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process of its own and return its result.

    Args:
        work: the function. The function, its arguments and its result must pickle.
        arguments: its arguments.

    Raises:
        ProcessDied: if the process ended without a result, as when the system kills it because
            memory ran out.
        Exception: what the function raised, with the traceback of the process as a note.
    """
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
        raise ProcessDied(_reason(process.exitcode)) from None
    finally:
        # Its work is done, or nobody waits for it any more.
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
        # The server and its forks ignore Ctrl-C from their first moment: the caller ends the
        # processes it has started.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, before)
    return context


def _serve(sender: Connection, data: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    # What was imported stays, so collections need not look at it: a tenth of a second each.
    gc.freeze()
    work, arguments = pickle.loads(data)
    try:
        outcome = pickle.dumps((work(*arguments), None))
    except Exception as error:
        outcome = _pickled(error)
    sender.send_bytes(outcome)


def _end_with_the_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def _pickled(error: Exception) -> bytes:
    """The error with its traceback as a note; an error that does not pickle is described."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        data = pickle.dumps((None, error))
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(
            (None, RuntimeError("".join(traceback.format_exception(error)).rstrip()))
        )
    return data


def _reason(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with exit status {code} before it had a result."
    name = signal.Signals(-code).name
    memory = (
        ", as the system does when memory runs out; fewer replicas or a shorter horizon take less"
        if name == "SIGKILL"
        else ""
    )
    return f"its process was ended by {name}{memory}."
