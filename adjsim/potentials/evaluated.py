"""The base class of potentials and force fields: every evaluation begins with a reading."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from adjsim.core.reading import read


def _reads(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of a potential evaluate a reading of it."""

    @wraps(method)
    def evaluated(self: nn.Module, *args: Any, **options: Any) -> Any:
        return method(read(self), *args, **options)

    return evaluated


# Methods that follow from another one, and have to be written anew where it is.
FOLLOWING = {
    "forward": ("force", "force_vjp", "virial"),
    "force": ("force_vjp",),
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
        for name in ("force", "force_vjp", "virial"):
            if name in vars(cls):
                setattr(cls, name, _reads(vars(cls)[name]))

    def terms(self) -> list[nn.Module]:
        """Return the parts of a sum, or the module itself."""
        return [self]


def take_from_base(cls: type, name: str) -> None:
    """Give a class that does not write a method that of the first class that has it."""
    having = [kind for kind in cls.__mro__ if name in vars(kind)]
    if having and having[0] is not cls and having[0] is not having[-1]:
        setattr(cls, name, vars(having[-1])[name])


def terms_of(potential: nn.Module) -> list[nn.Module]:
    """Return the parts of a sum, or the potential itself."""
    return potential.terms() if isinstance(potential, Evaluated) else [potential]
