"""Progress bars on standard error, shown on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")


def with_progress(items: Iterable[T], description: str, total: int, enabled: bool) -> Iterator[T]:
    """Iterate over items, with a progress bar if enabled and on a terminal."""
    if not (enabled and sys.stderr.isatty()):
        return iter(items)
    from rich.console import Console
    from rich.progress import track

    return iter(track(items, description, total, console=Console(stderr=True), transient=True))


def progress_bar(enabled: bool = True) -> Progress:
    """Make a progress bar whose tasks have a field ``doing``, shown at its end."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[doing]}"))
    hidden = not (enabled and console.is_terminal)
    return Progress(*columns, console=console, transient=True, disable=hidden)
