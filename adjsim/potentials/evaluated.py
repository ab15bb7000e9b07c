"""Base classes: modules whose evaluations begin with a reading, and that declare their numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from torch import Tensor, nn

from adjsim.core.arguments import describe_type, refuse_uncalled_class
from adjsim.core.declared import Declaring
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

    @property
    def digests(self) -> tuple[Any, Any] | None:
        """What is equal for the same exclusions, and for the same species; None without pairs."""
        return None

    def listed_pairs(self, position: Tensor) -> tuple[Any, list[nn.Module]]:
        """Return a sum over listed pairs that is part of the energy, or None, and the rest."""
        return None, [self]


def terms_of(potential: nn.Module) -> list[nn.Module]:
    """Return the parts of a sum, or the potential itself."""
    return potential.terms() if isinstance(potential, Evaluated) else [potential]


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
