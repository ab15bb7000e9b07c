"""``adjsim cache``: the folder of compiled libraries."""

from __future__ import annotations

from typing import Annotated

import typer

from adjsim.compiler import CACHE_LIMIT, cache_entries, cache_folder, trim_cache


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all libraries.")] = False,
) -> None:
    """Show where compiled libraries are and how much they take, or remove them."""
    place = cache_folder()
    if clear:
        before = len(cache_entries(place))
        trim_cache(place, 0)
        typer.echo(f"Removed {before - len(cache_entries(place))} libraries from {place}")
        return
    found = cache_entries(place)
    size = sum(entry.size for entry in found)
    typer.echo(
        f"{place}: {len(found)} libraries with their sources, {size / 2**20:.1f} of at most "
        f"{CACHE_LIMIT / 2**20:.0f} MB. ADJSIM_CACHE chooses another folder; --clear removes them."
    )
