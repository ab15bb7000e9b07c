"""The command ``adjsim``, whose version and list of commands are printed at once.

Importing the library takes seconds, since it imports torch. It is imported for everything else.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

overview = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="adjsim: gradients through physical simulation.",
)


@overview.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    pass


@overview.command()
def compare() -> None:
    """Compare adjoint gradients with backpropagation, or gradient estimators with each other."""


@overview.command()
def fit() -> None:
    """Fit epsilon and sigma of a Lennard-Jones liquid to a measured g(r), to densities, or both."""


@overview.command()
def cache() -> None:
    """Show where compiled libraries are and how much they take, or remove them."""


def main() -> None:
    """Run the command with the arguments of the process."""
    first = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if first == "--version":
        print(f"adjsim {version('adjsim')}")
    elif first == "--help":
        overview(prog_name="adjsim")
    else:
        from adjsim.cli.app import app

        app(prog_name="adjsim")
