"""``adjsim cache``: the folder of compiled libraries."""

from __future__ import annotations

from typing import Annotated

import typer

from adjsim.compiler.cache import LIMIT, entries, folder, trim


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all libraries.")] = False,
) -> None:
    """Show where compiled libraries are and how much they take, or remove them."""
    place = folder()
    if clear:
        before = len(entries(place))
        trim(place, 0)
        typer.echo(f"Removed {before - len(entries(place))} libraries from {place}")
        return
    found = entries(place)
    size = sum(entry.size for entry in found)
    typer.echo(
        f"{place}: {len(found)} libraries with their sources, {size / 2**20:.1f} of at most "
        f"{LIMIT / 2**20:.0f} MB. ADJSIM_CACHE chooses another folder; --clear removes them."
    )
