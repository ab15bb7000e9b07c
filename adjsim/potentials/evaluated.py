"""Base classes: modules whose evaluations begin with a reading, and that declare their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from adjsim.core.arguments import describe_type, refuse_uncalled_class
from adjsim.core.declared import Declaring
from adjsim.core.derived import MADE, Made, are
from adjsim.core.parameters import register
from adjsim.core.reading import read


def _reads(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of a potential evaluate a reading of it."""

    @wraps(method)
    def evaluated(self: nn.Module, *args: Any, **options: Any) -> Any:
        return method(read(self), *args, **options)

    return evaluated


STRAINED = "strained_force", "strained_vjp"
READING_METHODS = {"force", "force_vjp", "virial", "strained_energy", *STRAINED}
# Methods that follow from another one, and have to be written anew where it is.
FOLLOWING = {
    "forward": ("force", "force_vjp", "virial", "strained_energy", *STRAINED),
    "force": ("force_vjp", *STRAINED),
    "linearised": STRAINED,
    "element": ("slope", "curvature"),
    "slope": ("curvature",),
    "pair_energy": ("pair_slope", "pair_curvature"),
    "pair_slope": ("pair_curvature",),
    "radial_energy": ("radial_slope", "radial_curvature"),
    "radial_slope": ("radial_curvature",),
}


@runtime_checkable
class ListedPairs(Protocol):
    """A sum over the pairs of a neighbour list."""

    def joined(self, others: Sequence[Any], /) -> tuple[list[Any], nn.Module]:
        """Return those of others that are over the same pairs, and the sum of this one and them."""
        ...


class Evaluated(nn.Module):
    """Base class of modules whose evaluations begin with a reading."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in READING_METHODS & vars(cls).keys():
            setattr(cls, name, _reads(vars(cls)[name]))

    def terms(self) -> list[nn.Module]:
        """Return the parts of a sum, or the module itself."""
        return [self]

    def evaluated_parts(self, position: Tensor) -> tuple[list[nn.Module], Tensor]:
        """Return the parts, and the positions of the particles at which they are evaluated."""
        return self.terms(), position

    def listed_pairs(self, position: Tensor) -> tuple[ListedPairs | None, list[nn.Module]]:
        """Return a sum over listed pairs that is part of the energy, if any, and the rest."""
        return None, [self]


def terms_of(potential: nn.Module) -> list[nn.Module]:
    """Return the parts of a sum, or the potential itself."""
    return potential.terms() if isinstance(potential, Evaluated) else [potential]


def with_joined_pairs(
    whole: nn.Module, parts: Iterable[nn.Module], position: Tensor
) -> list[nn.Module]:
    """Return the parts of a sum, of which those over the same listed pairs are joined.

    A copy of the whole that a reading has made keeps what it has joined.
    """
    given = list(parts)
    split = [
        part.listed_pairs(position) if isinstance(part, Evaluated) else (None, [part])
        for part in given
    ]
    sums = [pairs for pairs, _ in split if pairs is not None]
    if len(sums) < 2:
        return given
    made: Made | None = vars(whole).get(MADE)
    known: Any = None if made is None else made.evaluators.get(ListedPairs)
    if known is None or not are(known[0], sums):
        known = sums, sums[0].joined(sums[1:])
        if made is not None:
            made.evaluators[ListedPairs] = known
    same, joint = known[1]
    if not same:
        return given
    found = [joint]
    for part, (pairs, rest) in zip(given, split, strict=True):
        found += rest if any(pairs is x for x in (sums[0], *same)) else [part]
    return found


def as_module(name: str, value: Any) -> nn.Module:
    """Return a module; refuse anything else."""
    refuse_uncalled_class(name, value)
    if not isinstance(value, nn.Module):
        raise TypeError(
            f"{name} must be an nn.Module; got {describe_type(value)}. Write a function as the "
            "forward method of a module."
        )
    return value


class DeclaredModule(Declaring, nn.Module):
    """A module of declared numbers and settings. A number whose default is None may be left out."""

    def __init__(self, *values: Any, **named: Any) -> None:
        given = self.given(values, named)
        super().__init__()
        self.store(given, self._register)
        self.validate()

    def _register(self, name: str, value: Any, **rule: Any) -> None:
        if value is None and self.__declared__[name].default is None:
            self.register_buffer(name, None)
        else:
            register(self, name, cast(Any, value), **rule)

    def validate(self) -> None:
        """Refuse settings that are out of range, and numbers that do not go together."""
        self.check_settings()
