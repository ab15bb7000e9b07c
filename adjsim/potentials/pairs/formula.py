"""The formula of a pair potential, and the parameters that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_number, describe_type, outside_inference_mode
from adjsim.core.box import Periodic
from adjsim.core.cache_key import UninspectableError, cache_key
from adjsim.core.declared import POSITIVE, Declaring
from adjsim.core.derived import own_tensors, replaced
from adjsim.core.parameters import register
from adjsim.core.refusal import Refusal
from adjsim.core.typing import Array, Number
from adjsim.potentials.pairs.kernels.exclusions import checked_exclusions, digest_of
from adjsim.potentials.pairs.kernels.kernel import ATOM, FUNCTION, NUMBER, TABLE
from adjsim.potentials.pairs.truncation import Shifted, Truncation
from adjsim.potentials.products import derivative

SHIFTED = Shifted()

# The rule of a number for each atom.
ATOMS: dict[str, Any] = {"shapes": (("atoms",),), "each": "one number for each atom"}
F = TypeVar("F", bound="PairFormula")
# A number of each pair, one of its first atom and one of its second atom, or the coefficients of a
# function at places.
Operand = Tensor | tuple[Tensor, Tensor] | Callable[[Tensor], Tensor]


class PairFormula(Declaring, Periodic):
    """The energy u(s) of a pair at the squared distance s, its cutoff and its parameters.

    It sums nothing: :class:`~adjsim.potentials.PairPotential`, which documents the arguments,
    chooses how the pairs of a position are found and summed.
    """

    box: Tensor | None
    species: Tensor | None
    exclusions: Tensor | None
    # The class of each atom, and ``(classes, classes)``, which of them interact; None: all do.
    classes: Tensor | None = None
    partners: Tensor | None = None
    _operands: Mapping[str, Operand] | None = None
    # The parameters of pairs: those declared without ``shapes``.
    _tables: tuple[str, ...] = ()

    # The parameter of pairs that is the root of ``safe_distance``; None: one.
    safe_length: ClassVar[str | None] = None
    # Whether its functions cost more than they would gain in the loops of a compiled step, which
    # evaluate each pair at both of its atoms.
    costly: ClassVar[bool] = False
    # The names of functions of tables that the formulas call. Their coefficients are operands.
    tables: tuple[str, ...] = ()
    shapes_of_declared = "a number or ``(atoms, atoms)``, symmetric"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__declared__:
            cls._tables = tuple(
                name
                for name, x in cls.__declared__.items()
                if x.check is None and "shapes" not in x.rule
            )

    def __init__(
        self,
        *values: Number,
        cutoff: float | None = None,
        box: Array | None = None,
        truncation: Truncation = SHIFTED,
        skin: float | None = None,
        exclusions: Array | None = None,
        **named: Number,
    ) -> None:
        given = self.given(values, named)
        super().__init__()
        self.cutoff = None if cutoff is None else as_number("cutoff", cutoff)
        self.truncation = truncation
        if not isinstance(truncation, Truncation):
            raise TypeError(
                "truncation must be Shifted(), ForceShifted() or Switched(start) of "
                f"adjsim.potentials; got {describe_type(truncation)}."
            )
        self.skin = None if skin is None else as_number("skin", skin)
        self._check_cutoff()
        with outside_inference_mode():
            self.register_box(box)
            self.register_buffer("species", None)
            pairs = None if exclusions is None else checked_exclusions(exclusions)
            self.register_buffer("exclusions", pairs)
        self.store(given, partial(register, self))
        for name in self._tables:
            check_symmetric(name, getattr(self, name))
        if type(self).__init__ is PairFormula.__init__:
            self.validate()

    def validate(self) -> None:
        """Refuse a box, a number or a setting that the constructor would refuse."""
        self._check_cutoff()
        self.check_settings()
        for name in self._tables:
            _check_table(name, getattr(self, name))
        super().validate()

    def _check_cutoff(self) -> None:
        cutoff, skin, name = self.cutoff, self.skin, type(self).__name__
        if cutoff is not None:
            POSITIVE("cutoff", cutoff)
            self.truncation.check(cutoff)
        elif "cutoff" in self.needed_arguments:
            raise TypeError(f"{name} needs a cutoff.")
        if self.truncation != SHIFTED and "truncation" in self.omitted_arguments:
            raise TypeError(f"{name} takes no truncation; got {self.truncation!r}.")
        if cutoff is None and self.truncation != SHIFTED:
            raise ValueError(f"truncation={self.truncation!r} needs a cutoff.")
        if skin is not None and (cutoff is None or not 0 <= skin < math.inf):
            raise ValueError(
                f"skin must be zero or positive, and finite, and needs a cutoff; got {skin}."
            )

    @property
    def digests(self) -> tuple[str | None, str | None]:
        """What formulas with the same exclusions, and with the same species, have in common."""
        return digest_of(self.exclusions), digest_of(self.species)

    def pair_energy(self, s: Tensor) -> Tensor:
        """Compute u(s), elementwise."""
        raise TypeError(f"{type(self).__name__} has no pair_energy(s).")

    def pair_slope(self, s: Tensor) -> Tensor:
        """Compute du/ds, elementwise."""
        return derivative(self.pair_energy, s)

    def pair_curvature(self, s: Tensor) -> Tensor:
        """Compute d2u/ds2, elementwise."""
        return derivative(self.pair_slope, s)

    def truncated_energy(self, s: Tensor) -> Tensor:
        """Compute the energy of a pair within the cutoff, elementwise."""
        return self.pair_energy(s) if self.cutoff is None else self.truncation.energy(self, s)

    def truncated_slope(self, s: Tensor) -> Tensor:
        """Compute the derivative of :meth:`truncated_energy`."""
        return self.pair_slope(s) if self.cutoff is None else self.truncation.slope(self, s)

    def truncated_curvature(self, s: Tensor) -> Tensor:
        """Compute the derivative of :meth:`truncated_slope`."""
        return self.pair_curvature(s) if self.cutoff is None else self.truncation.curvature(self, s)

    def safe_distance(self, s: Tensor) -> Tensor:
        """Return a squared distance for excluded pairs, where u, u' and u'' are finite."""
        if self.safe_length is None:
            return torch.ones((), dtype=s.dtype, device=s.device)
        return self.pair_parameter(self.safe_length, s.detach()).detach() ** 2

    def pair_table(self, name: str) -> Tensor:
        """Return a parameter of pairs: a number, or a table with a row and a column a species.

        Without ``species`` every atom is a species of its own. A number for each atom is returned
        as it is, and the coefficients of a function as ``(1, 1, coefficients)``.
        """
        if name in self.tables:
            return getattr(self, name).coefficients.reshape(1, 1, -1)
        value: Tensor = getattr(self, name)
        if value.ndim == 2 and value.shape[0] == value.shape[1] > 1:
            # An optimiser may make a matrix asymmetric. A pair has one number, and one gradient.
            value = (value + value.T) / 2
        return value

    def pair_parameter(self, name: str, s: Tensor) -> Tensor:
        """Return a parameter of every pair, to broadcast against the squared distances s."""
        if self._operands is not None:
            operand: Any = self._operands[name]
            return (operand if isinstance(operand, Tensor) else operand[0]).to(s)
        value = self.pair_table(name)
        if value.ndim == 2 and self.species is not None:
            if s.ndim and len(self.species) != s.shape[-1]:
                raise ValueError(
                    f"species is for {len(self.species)} atoms and position has {s.shape[-1]}."
                )
            value = value[self.species.unsqueeze(-1), self.species]
        if value.ndim and s.ndim and value.shape[-1] not in (1, s.shape[-1]):
            raise ValueError(
                f"{name} is for {value.shape[-1]} atoms and position has {s.shape[-1]}."
            )
        return value.to(s)

    def atom_parameter(self, name: str, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return a parameter ``(atoms,)`` of either atom of every pair, to broadcast against s."""
        if self._operands is not None:
            first, second = cast(tuple[Tensor, Tensor], self._operands[name])
            return first.to(s), second.to(s)
        value: Tensor = getattr(self, name).to(s)
        if s.ndim and len(value) != s.shape[-1]:
            raise ValueError(f"{name} is for {len(value)} atoms and position has {s.shape[-1]}.")
        return value.unsqueeze(-1), value

    def operand_names(self) -> list[str]:
        """Return the names of the tensors that formulas read by pair: all but box and species."""
        parametrised: Mapping[str, Tensor] = {
            name: getattr(self, name) for name in getattr(self, "parametrizations", ())
        }
        return [
            name
            for name, x in {**own_tensors(self), **parametrised}.items()
            if x.is_floating_point() and name not in ("box", "species")
        ] + list(self.tables)

    def with_operands(self: F, values: Mapping[str, Operand]) -> F:
        """Return a copy whose formulas read these values in place of its parameters.

        A formula may read a parameter that is one number by its attribute. Tables and numbers of
        atoms are read by :meth:`pair_parameter` and :meth:`atom_parameter` alone.
        """
        numbers = {
            name: value
            for name, x in own_tensors(self).items()
            if x.numel() == 1 and isinstance(value := values.get(name), Tensor)
        }
        twin = replaced(self, numbers)
        twin._operands = values
        return twin

    def bare(self: F) -> F:
        """Return a copy whose tensors, but operands, have no values.

        Potentials of one class share kernels. So the values of tensors other than operands cannot
        be read: a trace that reads one is an error.
        """
        tensors = own_tensors(self) | {"exclusions": None}
        twin = replaced(
            self,
            {name: None if x is None else x.detach().to("meta") for name, x in tensors.items()},
        )
        # A trace cannot read parametrised values either, so the parametrisations are left out.
        submodules = {k: x for k, x in twin._modules.items() if k != "parametrizations"}
        vars(twin)["_modules"] = submodules
        return twin

    def layout(self) -> tuple[Any, ...]:
        """Return names, shapes and types of the tensors, which a formula may read.

        They are the number of atoms, for example, but none of exclusions.
        """
        return tuple(
            (name, x.shape, x.dtype)
            for name, x in own_tensors(self).items()
            if name != "exclusions"
        )

    def attributes(self) -> list[Any]:
        """Return the values of the attributes, any of which a formula may read."""
        return list(vars(self).values())

    def formula_key(self) -> tuple[Any, ...]:
        """Build the key of the formulas, which potentials of one class share."""
        found = cache_key(self)
        if found.opaque:
            raise UninspectableError(found.opaque[0])
        return found.dtype, found.modules

    def other_modules(self) -> list[nn.Module]:
        """Return the modules that formulas may read and that are no functions of tables."""
        return [
            part
            for name, part in self.named_modules()
            if name and not name.startswith("parametrizations.") and name not in self.tables
        ]


def _check_table(name: str, value: Tensor) -> None:
    if value.ndim > 2 or (value.numel() > 1 and (value.ndim < 2 or len({*value.shape}) > 1)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; it must be a number or (atoms, atoms). For a "
            "Lennard-Jones number per atom use LennardJonesMixture(species=range(atoms), ...)."
        )


def check_symmetric(name: str, value: Tensor) -> None:
    """Refuse a parameter that is not one number for each pair."""
    value = value.detach()
    _check_table(name, value)
    if value.numel() == 1:
        return
    gap = (value - value.T).abs()
    if float(gap.max()) > 8 * torch.finfo(value.dtype).eps * float(value.abs().max()):
        i, j = divmod(int(gap.argmax()), len(value))
        raise ValueError(
            f"{name} must be symmetric, since a pair has one number; entries ({i}, {j}) and ({j}, "
            f"{i}) are {float(value[i, j]):g} and {float(value[j, i]):g}. ({name} + {name}.T) / 2 "
            "is symmetric."
        )


def kind_of(operand: Tensor) -> str:
    """Return the kind of an operand: a number, one for each atom, or a table by species.

    The coefficients of a function are ``(1, 1, coefficients)``.
    """
    if operand.ndim == 3:
        return FUNCTION
    return NUMBER if operand.numel() == 1 else ATOM if operand.ndim == 1 else TABLE


def misshapen(species: Tensor | None, atoms: int, operands: Mapping[str, Tensor]) -> Refusal | None:
    """Return what is wrong with the shapes of operands."""
    if species is not None and species.shape != (atoms,):
        return Refusal(f"species has shape {tuple(species.shape)} for {atoms} atoms")
    rows = {len(x) for x in operands.values() if kind_of(x) == TABLE}
    if species is None:
        rows.add(atoms)
    for name, x in operands.items():
        kind = kind_of(x)
        square = kind != TABLE or (x.ndim == 2 and x.shape[0] == x.shape[1] and len(rows) == 1)
        if not square or (kind == ATOM and len(x) != atoms):
            return Refusal(f"{name} has shape {tuple(x.shape)} for {atoms} atoms")
    return None


def read_at(coefficients: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the operand of a function, for torch operations."""
    return lambda place: coefficients.flatten()[place.long()]


# Up to these numbers of pairs, of all systems of a batch, all pairs take less time than a list on a
# GPU, by torch and by a kernel of tiles: a list is bound by launches and by what the host reads.
# Measured, the second in compiled loops, see benchmarks/README.md.
LISTED_ON_GPU, LISTED_BESIDE_TILES = 7e6, 1.3e8


def skin_of(pair: Periodic, position: Tensor, by_tiles: bool = False) -> float | None:
    """Return the skin of the neighbour list; None: evaluate all pairs."""
    smallest, atoms = pair.smallest_listed, position.shape[-2]
    if smallest is None or atoms < smallest:
        return None
    limit = LISTED_BESIDE_TILES if by_tiles else LISTED_ON_GPU
    few = position.device.type != "cpu" and position.shape[:-1].numel() * atoms < limit
    return None if few else pair.list_skin
