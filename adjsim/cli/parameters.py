"""Commands whose options are the fields of a data class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from inspect import Parameter, Signature, cleandoc
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

P = TypeVar("P")


def option(default: Any, help: str, *names: str, **settings: Any) -> Any:
    """Declare a field of a data class as an option; MISSING: the option has to be given."""
    return field(default=default, metadata={"typer": typer.Option(*names, help=help, **settings)})


def command_of(kind: type[P], run: Callable[[typer.Context, P], None]) -> Callable[..., None]:
    """Make a command of a data class of options and a function, whose docstring is the help."""
    hints = get_type_hints(kind)
    parts = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for part in fields(kind):  # pyright: ignore[reportArgumentType]
        annotation = Annotated[hints[part.name], part.metadata["typer"]]
        default = Parameter.empty if part.default is MISSING else part.default
        parts.append(
            Parameter(part.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    def command(context: typer.Context, **values: Any) -> None:
        run(context, kind(**values))

    command.__name__, paragraphs = run.__name__, cleandoc(run.__doc__ or "").split("\n\n")
    # The lines of a paragraph are joined, so that the help breaks them at the terminal's width.
    command.__doc__ = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    command.__annotations__ = {part.name: part.annotation for part in parts}
    command.__signature__ = Signature(parts)
    return command
