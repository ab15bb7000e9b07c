"""Parameters and settings that a class declares once, with their meaning, default and rule.

A class writes ``length: Tensor = declared("length at rest", positive=True)`` in its body, and
``exponent: float = setting("of the repulsion", POSITIVE)`` for a number that is not trained. Its
base class, a :class:`Declaring`, makes the constructor's signature and its documentation from that,
registers the parameters, and checks the settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, cleandoc, signature
from textwrap import fill
from typing import Any, ClassVar

from adjsim.core.arguments import as_number

_REQUIRED = Parameter.empty


@dataclass(frozen=True)
class Limits:
    """The numbers that a setting may be, and the words for them in an error."""

    words: str
    hold: Callable[[float], bool]

    def __call__(self, name: str, value: Any) -> float:
        number = as_number(name, value)
        if not self.hold(number):
            raise ValueError(f"{name} must be {self.words}; got {number:g}.")
        return number


FINITE = Limits("finite", math.isfinite)
POSITIVE = Limits("positive and finite", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Limits("zero or positive, and finite", lambda x: 0 <= x < math.inf)


@dataclass(frozen=True)
class Declared:
    """A parameter or a setting that a class declares, and its meaning, with its unit.

    Attributes:
        keyword: whether it is given by its name alone.
        rule: of a parameter, the arguments of :class:`~adjsim.core.parameters.NumberRule`.
        check: converts a setting, or refuses it; None: a parameter.
    """

    meaning: str
    default: Any
    keyword: bool
    rule: Mapping[str, Any]
    check: Callable[[str, Any], Any] | None = None

    def converted(self, name: str, value: Any) -> Any:
        """Convert a setting, which may be None where that is the default."""
        assert self.check is not None
        return None if value is None and self.default is None else self.check(name, value)


def declared(meaning: str, default: Any = _REQUIRED, *, keyword: bool = False, **rule: Any) -> Any:
    """Declare a parameter in the body of a class, in the order of the constructor's arguments."""
    return Declared(meaning, default, keyword, rule)


def setting(
    meaning: str,
    check: Callable[[str, Any], Any],
    default: Any = _REQUIRED,
    *,
    keyword: bool = False,
) -> Any:
    """Declare a setting, which is not trained; ``check(name, value)`` converts or refuses it."""
    return Declared(meaning, default, keyword, {}, check)


class Declaring:
    """The base class of modules with declared parameters and settings.

    A name that a class declares again comes behind those that it inherits.

    Attributes:
        __declared__: what is declared, by name. Keys of compiled code leave such names out.
        shapes_of_declared: the sentence that says which shapes the first parameter may have.
        needed_arguments: the arguments of a base class that have no default here.
        omitted_arguments: the arguments of a base class that are not taken here.
    """

    __declared__: ClassVar[Mapping[str, Declared]] = {}
    shapes_of_declared: ClassVar[str] = ""
    needed_arguments: ClassVar[tuple[str, ...]] = ()
    omitted_arguments: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = {name: x for name, x in vars(cls).items() if isinstance(x, Declared)}
        for name in own:
            delattr(cls, name)
        if own:
            rest = {name: x for name, x in cls.__declared__.items() if name not in own}
            cls.__declared__ = rest | own
        if "{parameters}" in (cls.__doc__ or ""):
            cls.__doc__ = _documented(cls)
        if own or "__init__" in vars(cls) or len(cls.__bases__) > 1:
            cls.__signature__ = _signature_of(cls)

    @classmethod
    def given(cls, values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Assign the arguments of a constructor to what is declared."""
        try:
            bound = Signature(_arguments(cls)).bind(*values, **named)
        except TypeError as error:
            names = ", ".join(cls.__declared__)
            raise TypeError(
                f"{cls.__name__}: {error}. Its declared parameters are {names or 'none'}."
            ) from None
        bound.apply_defaults()
        return bound.arguments

    def store(self, given: Mapping[str, Any], register: Callable[..., None]) -> None:
        """Store the settings that are given, and register the parameters with their rules."""
        for name, value in given.items():
            found = self.__declared__[name]
            if found.check is None:
                register(name, value, **found.rule)
            else:
                setattr(self, name, found.converted(name, value))

    def check_settings(self) -> None:
        """Refuse settings that the constructor would refuse."""
        for name, found in self.__declared__.items():
            if found.check is not None:
                found.converted(name, getattr(self, name))


def _arguments(cls: type[Declaring]) -> list[Parameter]:
    """Return the arguments for what is declared, those that are given by name last."""
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    types: dict[str, Any] = {}
    for kind in reversed(cls.__mro__):
        types |= vars(kind).get("__annotations__", {})
    found: list[Parameter] = []
    for name, x in cls.__declared__.items():
        annotation = "Number" if x.check is None else types.get(name, Parameter.empty)
        found.append(Parameter(name, kinds[x.keyword], default=x.default, annotation=annotation))
    return sorted(found, key=lambda x: x.kind)


def _signature_of(cls: type[Declaring]) -> Signature:
    """Return the signature of the constructor, with all that is declared in its place.

    A constructor that passes on all other arguments by name has those of its base class.
    """
    own = list(signature(cls.__init__).parameters.values())[1:]
    parts = {x.name: x for x in own if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
    if len(parts) < len(own):
        writer = next(kind for kind in cls.__mro__ if "__init__" in vars(kind))
        above: Any = getattr(super(writer, cls), "__signature__", Signature())
        for x in (*_arguments(cls), *above.parameters.values()):
            parts.setdefault(x.name, x)
    kept = [
        x.replace(default=_REQUIRED) if x.name in cls.needed_arguments else x
        for x in parts.values()
        if x.name not in cls.omitted_arguments
    ]
    return Signature(sorted(kept, key=lambda x: x.kind), return_annotation=None)


def _documented(cls: type[Declaring]) -> str:
    """Return the docstring of a class with all that is declared in its list of arguments.

    It stands where the docstring has the line ``{parameters}``.
    """
    rows, shapes = list[str](), cls.shapes_of_declared
    for name, x in cls.__declared__.items():
        # The meaning of a parameter with columns, or with shapes in its rule, gives its shapes.
        shaped = shapes and x.check is None and not {"columns", "shapes"} & x.rule.keys()
        row = f"{name}: {x.meaning}{'; ' + shapes if shaped else ''}."
        rows.append(fill(row, 96, subsequent_indent=" " * 8, break_on_hyphens=False))
        shapes = "likewise" if shaped else shapes
    return cleandoc(cls.__doc__ or "").replace("{parameters}", "\n    ".join(rows))
