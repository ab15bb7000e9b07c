"""Forces from energies, and their vector-Jacobian products.

A potential is any ``nn.Module`` that maps position ``(*batch, atoms, dim)`` to energy
``(*batch,)``. Its force is ``-dU/dq``, by automatic differentiation or in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn

from adjsim.core.arguments import refuse_uncalled
from adjsim.core.box import as_box, refuse_other_boxes, share_box
from adjsim.core.derived import derived
from adjsim.core.layout import materialise
from adjsim.core.reading import read
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Array, Energies, Positions
from adjsim.core.writes import refuse_written, version_of
from adjsim.potentials.evaluated import FOLLOWING, Evaluated, terms_of
from adjsim.potentials.joining import Alike, Digests, numbered, with_joined_pairs
from adjsim.potentials.products import (
    Pullback,
    Tensors,
    VJPSum,
    autograd_vjp,
    derived_force,
    energy_vjp,
)
from adjsim.potentials.strained import Strainable, summed_energy, summed_force, summed_vjp


class Potential(Strainable):
    """An energy ``U(q; theta)``. Subclasses write ``forward``, and may write closed forms.

    ``potential(position, box=None)`` evaluates a reading of the potential, made at the call. A box
    takes the place of that of the constructor, in every part of a sum.

    A subclass that writes an energy, and not the closed forms of its derivatives, does not inherit
    those of another energy: it is differentiated automatically.
    ``class Moved(Coulomb, inherits_forces=True)`` keeps the closed forms, of an energy that differs
    by a constant.

    Attributes:
        within_molecules: whether the energy is a sum over terms of atoms of one molecule, which
            without a box are read as they are, in a periodic system too.
        energy_unit: the unit of the energy, with positions in angstrom; None: any consistent units.
        corrects_tail: whether the energy is that of the pairs beyond a cutoff.
    """

    within_molecules: ClassVar[bool] = False
    energy_unit: ClassVar[str | None] = None
    corrects_tail: ClassVar[bool] = False

    def __init_subclass__(cls, inherits_forces: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        for written, following in FOLLOWING.items():
            if written in vars(cls) and not inherits_forces:
                for name in following:
                    having = [kind for kind in cls.__mro__ if name in vars(kind)]
                    if having and having[0] not in (cls, having[-1]):
                        setattr(cls, name, vars(having[-1])[name])

    def __call__(self, position: Positions, *, box: Array | None = None) -> Energies:
        given = None if box is None else as_box(box)
        return nn.Module.__call__(read(self, given), position)

    def forward(self, position: Positions) -> Energies:
        raise TypeError(
            f"{type(self).__name__} has no energy: write forward(position) -> (*batch,)."
        )

    def __add__(self, other: nn.Module) -> SumPotential | SumForce:
        return SumForce(self, other) if isinstance(other, ForceField) else SumPotential(self, other)

    def __radd__(self, other: nn.Module) -> SumPotential:
        return SumPotential(other, self)

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        """Compute ``-dU/dq``, differentiable when grad mode is on.

        With a rounding (``(*batch, 1, 1, 1)``, one spacing for each system), a force that is a sum
        of contributions rounds each of them before the sum. Then the sum is exact, and does not
        depend on the order.
        """
        return derived_force(self, position, rounding)

    def virial(self, position: Positions) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain.

        The result is ``(*batch, dim, dim)``. Strain deforms the positions, and the box if the
        potential has one.
        """
        raise TypeError(
            f"{type(self).__name__} has no virial(position), which the pressure and the stress "
            "need. Pair potentials and sums of them have one."
        )

    def force_vjp(
        self, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        """Compute the force, and a function v -> (v^T dF/dq, v^T dF/dtheta).

        The second product is a :class:`DeferredVJP`, a list of gradients or a :class:`VJPSum`. On a
        rounding the force has the bits of :meth:`force`.
        """
        if type(self).force is Potential.force:
            return energy_vjp(self, position, parameters, rounding)
        return autograd_vjp(lambda q: force(self, q, rounding=rounding), self, position, parameters)


class ForceField(Evaluated):
    """A force without an energy, ``F(t, q)``. Subclasses write ``forward(t, position)``.

    ``force_field(t, position)`` evaluates a reading of the field, made at the call. Examples are a
    control and a non-conservative drive. It has no invariant. Its products are differentiated
    automatically, unless a subclass writes ``force_vjp``. A sum ``a + b`` is a :class:`SumForce`.
    """

    def __call__(self, *arguments: Any) -> Positions:
        return nn.Module.__call__(read(self), *arguments)

    def forward(self, t: Any, position: Positions) -> Positions:
        raise TypeError(f"{type(self).__name__} has no force: write forward(t, position).")

    def __add__(self, other: nn.Module) -> SumForce:
        return SumForce(self, other)

    def __radd__(self, other: nn.Module) -> SumForce:
        return SumForce(other, self)

    def force(self, t: Any, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        """Compute the force, rounded as by :meth:`Potential.force`."""
        return self(t, position)

    def force_vjp(
        self, t: Any, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        """Compute the force at time t and its product, as :meth:`Potential.force_vjp` does."""
        return autograd_vjp(lambda q: self(t, q), self, position, parameters)


class _Sum(Evaluated):
    """The parts of a sum, which have one box."""

    kinds: ClassVar[tuple[str, str]]
    refused: ClassVar[tuple[type, ...]] = ()

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        summed, kind = self.kinds
        if not parts:
            raise ValueError(f"a sum of {summed} needs at least one part.")
        for part in parts:
            if not isinstance(part, nn.Module) or isinstance(part, self.refused):
                raise TypeError(
                    f"a part of a sum of {summed} is {kind}; got a {type(part).__name__}."
                )
        self.parts = nn.ModuleList(_flat(parts))
        share_box(self)
        self.validate()

    def terms(self) -> list[nn.Module]:
        return list(self.parts)

    def validate(self) -> None:
        """Refuse parts with different boxes."""
        refuse_other_boxes(self.parts)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Each part converts its own box, as ``float()`` does, and pairs in one box are summed at
        # once.
        held = [x for x in self.modules() if x._buffers.get("box") is not None]
        known = [id(x._buffers["box"]) for x in held]
        super()._apply(fn, recurse)
        shared: dict[int, Any] = {}
        for part, number in zip(held, known, strict=True):
            part._buffers["box"] = shared.setdefault(number, part._buffers["box"])
        return self


class SummedForces(Potential):
    """Base class of energies whose force is the sum of those of :meth:`summands`."""

    strained_force, strained_vjp = summed_force, summed_vjp  # pyright: ignore[reportAssignmentType]

    def summands(self, position: Tensor) -> list[nn.Module]:
        """Return modules whose energies add up to this one, for positions of a shape and type."""
        raise TypeError(f"{type(self).__name__} has no summands(position).")

    def force(self, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        summands = self.summands(position)
        return reduce(add, [force(part, position, rounding=rounding) for part in summands])

    def force_vjp(
        self, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        summands = self.summands(position)
        return _sum_vjp(
            [force_vjp(part, position, parameters, rounding=rounding) for part in summands]
        )


class SumPotential(_Sum, SummedForces, inherits_forces=True):
    """A sum of potentials, ``U = sum_k U_k``, written ``a + b``.

    Each part keeps its own closed forms, and parts with the same pairs take one pass over their
    neighbour list. The parameters of part k have names that begin with ``parts.k``. A sum has one
    box: that of the parts which have one.

    Args:
        parts: modules that map position to energy. A sum among them is replaced by its parts.

    Raises:
        TypeError: a part without an energy, such as a :class:`ForceField`.
        ValueError: no parts, parts with different boxes, or a part whose energy is not
            ``(*batch,)``.
    """

    kinds = "potentials", "a module with an energy"
    refused = (ForceField,)
    strained_energy = summed_energy  # pyright: ignore[reportAssignmentType]

    @property
    def box(self) -> Tensor | None:
        """The periodic box of the parts, None without one."""
        boxes = (getattr(part, "box", None) for part in self.parts)
        return next((box for box in boxes if box is not None), None)

    @box.setter
    def box(self, value: Array) -> None:
        shared = as_box(value)
        for part in self.modules():
            if part._buffers.get("box") is not None:
                part._buffers["box"] = shared

    def forward(self, position: Positions) -> Energies:
        energies = [part(position) for part in self.parts]
        for part, energy in zip(self.parts, energies, strict=True):
            if energy.shape != position.shape[:-2]:
                raise ValueError(
                    f"{type(part).__name__}, a part of a sum, maps position "
                    f"{tuple(position.shape)} to energy {tuple(energy.shape)}; it must be "
                    f"{tuple(position.shape[:-2])}, one number for each system."
                )
        return reduce(add, energies)

    def virial(self, position: Positions) -> Tensor:
        for part in self.parts:
            if not isinstance(part, Potential):
                raise TypeError(f"{type(part).__name__}, a part of a sum, has no virial(position).")
        return reduce(add, [cast(Potential, part).virial(position) for part in self.parts])

    @property
    def digests_of_parts(self) -> tuple[Digests | None, ...]:
        """What parts over the same pairs have in common."""
        return tuple(x.digests if isinstance(x, Evaluated) else None for x in self.parts)

    @derived("digests_of_parts")
    def alike(self) -> tuple[Alike | None, ...]:
        """Which parts have the same exclusions and species, a constant of compiled loops."""
        return numbered(self.digests_of_parts)

    def summands(self, position: Tensor) -> list[nn.Module]:
        return with_joined_pairs(self, self.parts, self.alike, position)


class SumForce(_Sum, ForceField):
    """A sum of forces of energies and of force fields, ``F = -sum_k dU_k/dq + sum_j F_j(t, q)``.

    It is written ``a + b``, where one of both is a :class:`ForceField`. Closed forms and names of
    parameters are as in :class:`SumPotential`.

    Args:
        parts: energy modules and force fields. A sum among them is replaced by its parts.

    Raises:
        TypeError: a part that is not a module.
        ValueError: no parts.
    """

    kinds = "forces", "an energy module or a ForceField"

    def forward(self, t: Any, position: Positions) -> Positions:
        return reduce(add, [force(part, position, t) for part in self.parts])

    def force(self, t: Any, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        return reduce(add, [force(part, position, t, rounding) for part in self.parts])

    def force_vjp(
        self, t: Any, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        return _sum_vjp([force_vjp(part, position, parameters, t, rounding) for part in self.parts])


def with_energy(potential: Any) -> nn.Module:
    """Return a module with an energy; refuse anything else."""
    refuse_uncalled("potential", potential)
    if not isinstance(potential, nn.Module) or isinstance(potential, ForceField):
        raise TypeError(
            f"potential must be a module with an energy; got {type(potential).__name__}."
        )
    return potential


def _flat(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Replace sums among parts by the parts of these sums."""
    flat: list[nn.Module] = []
    for part in parts:
        # A subclass, or a sum with hooks, is more than its parts.
        plain = type(part) in (SumPotential, SumForce) and not (
            part._forward_hooks or part._forward_pre_hooks
        )
        flat += terms_of(part) if plain else [part]
    return flat


def _sum_vjp(found: Sequence[tuple[Tensor, Pullback]]) -> tuple[Tensor, Pullback]:
    """Sum forces and their products."""

    def pullback(v: Tensor) -> tuple[Tensor, VJPSum]:
        products = [inner(v) for _, inner in found]
        return reduce(add, [along for along, _ in products]), VJPSum(
            tuple(rest for _, rest in products)
        )

    return reduce(add, [value for value, _ in found]), pullback


def force(
    potential: nn.Module, position: Positions, t: Any = 0.0, rounding: Rounding = UNROUNDED
) -> Positions:
    """Compute the force ``-dU/dq`` of a potential, differentiable when grad mode is on.

    Args:
        potential: an energy module, or a :class:`ForceField`.
        position: ``(*batch, atoms, dim)``, as the result.
        t: the time, which only a :class:`ForceField` reads.
        rounding: see :meth:`Potential.force`.

    Raises:
        ValueError: the potential writes into the position that it is given.
    """
    return Forces(potential, rounding).force(t, position)


def force_vjp(
    potential: nn.Module,
    position: Positions,
    parameters: Tensors,
    t: Any = 0.0,
    rounding: Rounding = UNROUNDED,
) -> tuple[Tensor, Pullback]:
    """Compute the force, detached, and a function v -> (v^T dF/dq, v^T dF/dtheta).

    The position must not require grad; the product may be taken once.
    """
    return Forces(potential, rounding).force_vjp(t, position, parameters)


class Forces:
    """The force of a module and its product by one interface ``(t, position)``, adapted once."""

    def __init__(self, potential: nn.Module, rounding: Rounding = UNROUNDED) -> None:
        self.potential = module = read(potential)
        # A force outside of exact runs need not take a rounding.
        given = (rounding,) if rounding.rounds else ()
        if isinstance(module, ForceField):
            self._force = lambda t, q: module.force(t, q, *given)
            self._vjp = lambda t, q, parameters: module.force_vjp(t, q, parameters, *given)
        elif isinstance(module, Potential):
            self._force = lambda t, q: module.force(q, *given)
            self._vjp = lambda t, q, parameters: module.force_vjp(q, parameters, *given)
        else:
            self._force = lambda t, q: derived_force(module, q, rounding)
            self._vjp = lambda t, q, parameters: energy_vjp(module, q, parameters, rounding)

    def force(self, t: Any, position: Positions) -> Positions:
        """Compute the force, as :func:`force` does."""
        position = materialise(position)
        version = version_of(position)
        value = self._force(t, position)
        refuse_written(self.potential, position, version)
        return value

    def force_vjp(
        self, t: Any, position: Positions, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Pullback]:
        """Compute the force and its product, as :func:`force_vjp` does."""
        position = materialise(position)
        version = version_of(position)
        value, pullback = self._vjp(t, position, parameters)
        refuse_written(self.potential, position, version)
        return value, lambda v: pullback(materialise(v))
