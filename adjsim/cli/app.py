"""The command line: ``adjsim compare``, ``adjsim fit`` and ``adjsim cache``."""

from __future__ import annotations

import os
import sys

import typer

from adjsim.cli.cache_command import cache
from adjsim.cli.compare_command import compare
from adjsim.cli.fit_command import fit_to_curve
from adjsim.core.durable.ranks import Ranks

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    if not Ranks.of().first:
        # Of several ranks, the first one alone shows tables, progress and errors.
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


app.command("compare")(compare)
app.command("fit")(fit_to_curve)
app.command("cache")(cache)
