"""Parameters that a class declares once, with their meaning, default and rule.

A class writes ``length: Tensor = declared("length at rest", positive=True)`` in its body. Its base
class, a :class:`Declaring`, makes the signature and the documentation of the constructor from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, cleandoc, signature
from typing import Any, ClassVar

_REQUIRED = Parameter.empty


@dataclass(frozen=True)
class Declared:
    """A parameter that a class declares: its meaning, with its unit, its default and its rule.

    The rule holds the arguments of a :class:`~adjsim.core.parameters.NumberRule`.
    """

    meaning: str
    default: Any
    rule: Mapping[str, Any]


def declared(meaning: str, default: Any = _REQUIRED, **rule: Any) -> Any:
    """Declare a parameter in the body of a class, in the order of the constructor's arguments."""
    return Declared(meaning, default, rule)


class Declaring:
    """The base class of modules with declared parameters.

    Attributes:
        __declared__: the parameters by their names. Keys of compiled code leave such names out.
        shapes_of_declared: the sentence that says which shapes the first parameter may have.
    """

    __declared__: ClassVar[Mapping[str, Declared]] = {}
    shapes_of_declared: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = {name: x for name, x in vars(cls).items() if isinstance(x, Declared)}
        for name in own:
            delattr(cls, name)
        if own:
            cls.__declared__ = {**cls.__declared__, **own}
            cls.__doc__ = _documented(cls, own)
        if own or "__init__" in vars(cls):
            # The declared parameters stand in the place of ``*values``.
            parts: list[Parameter] = []
            for part in list(signature(cls.__init__).parameters.values())[1:]:
                if part.kind is Parameter.VAR_POSITIONAL:
                    parts += _parameters(cls)
                elif part.kind is not Parameter.VAR_KEYWORD:
                    parts.append(part)
            cls.__signature__ = Signature(parts, return_annotation=None)

    @classmethod
    def given(cls, values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Assign the arguments of a constructor to the declared parameters."""
        try:
            bound = Signature(_parameters(cls)).bind(*values, **named)
        except TypeError as error:
            names = ", ".join(cls.__declared__)
            raise TypeError(
                f"{cls.__name__}: {error}. Its declared parameters are {names or 'none'}."
            ) from None
        bound.apply_defaults()
        return bound.arguments


def _parameters(cls: type[Declaring]) -> list[Parameter]:
    return [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=x.default, annotation="Number")
        for name, x in cls.__declared__.items()
    ]


def _documented(cls: type[Declaring], own: Mapping[str, Declared]) -> str:
    """Return the docstring of a class with its parameters in place of the line ``{parameters}``."""
    text = cleandoc(cls.__doc__ or "")
    rows: list[str] = []
    for name, x in own.items():
        shapes = "likewise" if rows and cls.shapes_of_declared else cls.shapes_of_declared
        # The meaning of a parameter with several columns gives its shapes.
        shapes = "" if "columns" in x.rule else shapes
        rows.append(f"{name}: {x.meaning}{'; ' + shapes if shapes else ''}.")
    return text.replace("{parameters}", "\n    ".join(rows))
