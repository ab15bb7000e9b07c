"""Pair potentials, written as a function of the squared distance.

On the CPU the pair operator evaluates them (:mod:`adjsim.potentials.pair_operator`). Torch
operations evaluate what the operator does not, over the pairs of a neighbour list
(:mod:`adjsim.potentials.listed_pairs`) or over all pairs (:mod:`adjsim.potentials.all_pairs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from adjsim._box import Periodic
from adjsim._derived import own_tensors, replaced
from adjsim._grid import Grid
from adjsim._inputs import as_number, describe_type, outside_inference_mode
from adjsim._pairs.exclusions import checked_exclusions
from adjsim._params import register
from adjsim._typing import Array, Energies, Number, Positions
from adjsim.potentials import all_pairs, listed_pairs
from adjsim.potentials.base import Potential, Pullback, SumPotential, derivative
from adjsim.potentials.pair_operator import PairOperator
from adjsim.potentials.truncation import Shifted, Truncation

SHIFTED = Shifted()


class PairPotential(Periodic, Potential):
    """A sum over pairs i<j of ``pair_energy(s)``, with s the squared distance.

    Subclasses write ``pair_energy``; ``pair_slope`` (du/ds) and ``pair_curvature`` (d2u/ds2) follow
    from it, or are written too.

    Args:
        cutoff: pairs at or beyond this distance are excluded. None: no cutoff.
        truncation: how the energy ends at the cutoff: :class:`~adjsim.potentials.Shifted` (to
            zero), :class:`~adjsim.potentials.ForceShifted` or
            :class:`~adjsim.potentials.Switched`.
        box: ``(dim,)`` edge lengths or ``(dim, dim)`` rows of a periodic cell; distances are to the
            nearest image. For tilted rows it is found by the least skewed rows of the same lattice.
        skin: how far beyond the cutoff the neighbour list of a large system reaches. It is built
            again when atoms have moved by half of it. None: chosen by the library. Results do not
            depend on it, to the last bit.
        exclusions: ``(n, 2)`` integers, pairs of atoms that do not interact, in any order and as
            often as they come: in a molecule, often the atoms one to three bonds apart. They
            are stored with i < j, sorted, each once. None: all pairs interact. An excluded pair
            has no energy at any image, nor any term that a truncation adds to it. The energy of a
            charge in its own field (:class:`~adjsim.potentials.ReactionField`,
            :class:`~adjsim.potentials.Wolf`) and
            :func:`~adjsim.potentials.tail_corrections` do not depend on exclusions.

    Raises:
        ValueError: a cutoff above half the smallest perpendicular width of the box. The
            width is taken after tilted rows are replaced, which makes it as large as
            possible. Up to half this width no atom interacts with two images of another.
            Exclusions that are not integers from 0, not pairs, or of an atom with itself, and,
            when evaluated, of atoms that position does not have.
    """

    box: Tensor | None
    species: Tensor | None
    exclusions: Tensor | None
    _operands: Mapping[str, Tensor] | None = None
    _tables: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        cutoff: float | None = None,
        box: Array | None = None,
        truncation: Truncation = SHIFTED,
        skin: float | None = None,
        exclusions: Array | None = None,
    ) -> None:
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

    def validate(self) -> None:
        """Refuse a box, a cutoff, a truncation or a skin that the constructor would refuse."""
        self._check_cutoff()
        for name in self._tables:
            _check_table(name, getattr(self, name))
        super().validate()

    def _check_cutoff(self) -> None:
        cutoff, skin = self.cutoff, self.skin
        if cutoff is not None and not 0 < cutoff < math.inf:
            raise ValueError(f"cutoff must be positive and finite; got {cutoff}.")
        if cutoff is None and self.truncation != SHIFTED:
            raise ValueError(f"truncation={self.truncation!r} needs a cutoff.")
        if cutoff is not None:
            self.truncation.check(cutoff)
        if skin is not None and (cutoff is None or not 0 <= skin < math.inf):
            raise ValueError(
                f"skin must be zero or positive, and finite, and needs a cutoff; got {skin}."
            )

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
        return torch.ones((), dtype=s.dtype, device=s.device)

    def forward(self, position: Positions) -> Energies:
        operator = PairOperator.of(self, position)
        if not isinstance(operator, str):
            return operator.energy(position)
        if listed_pairs.applies(self, position, "truncated_energy"):
            return listed_pairs.energy(self, position)
        return all_pairs.energy(self, position)

    def force(self, position: Positions, grid: Grid | None = None) -> Positions:
        operator = PairOperator.of(self, position)
        if not isinstance(operator, str):
            return operator.force(position, grid)
        if listed_pairs.applies(self, position, "truncated_slope"):
            return listed_pairs.force(self, position, grid)
        return all_pairs.force(self, position, grid)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None = None
    ) -> tuple[Tensor, Pullback]:
        operator = PairOperator.of(self, position)
        if not isinstance(operator, str):
            return operator.force_vjp(position, parameters, grid)
        if listed_pairs.applies(self, position, "truncated_slope", "truncated_curvature"):
            return listed_pairs.force_vjp(self, position, parameters, grid)
        return all_pairs.force_vjp(self, position, grid)

    def virial(self, position: Positions) -> Tensor:
        """Compute ``sum over i<j of d_ij F_ij``, ``(*batch, dim, dim)``.

        F_ij is the force on i from j. In a periodic box this is minus the derivative of the energy
        with respect to the strain of the box.
        """
        if listed_pairs.applies(self, position, "truncated_slope"):
            return listed_pairs.virial(self, position)
        return all_pairs.virial(self, position)

    def path(self, position: Positions) -> str:
        """Say how pairs are evaluated for such positions, and why not by the operator."""
        operator = PairOperator.of(self, position)
        if isinstance(operator, str):
            listed = listed_pairs.applies(self, position, "truncated_slope")
            return f"{'neighbour list' if listed else 'all pairs'}, by torch: {operator}"
        return "all pairs" if operator.form.layout.skin is None else "neighbour list"

    def register_pair_parameter(
        self, name: str, value: Number, *, positive: bool = False, depth: bool = False
    ) -> None:
        """Store a parameter of pairs: a number, or ``(atoms, atoms)`` and symmetric."""
        register(self, name, value, positive=positive, depth=depth)
        check_symmetric(name, getattr(self, name))
        self._tables = (*self._tables, name)

    def pair_table(self, name: str) -> Tensor:
        """Return a parameter of pairs: a number, or a table with a row and a column a species.

        Without ``species`` every atom is a species of its own. A number for each atom is returned
        as it is.
        """
        value: Tensor = getattr(self, name)
        if value.ndim == 2 and value.shape[0] == value.shape[1] > 1:
            # An optimiser may make a matrix asymmetric. A pair has one number, and one gradient.
            value = (value + value.T) / 2
        return value

    def pair_parameter(self, name: str, s: Tensor) -> Tensor:
        """Return a parameter of every pair, to broadcast against the squared distances.

        The squared distance may also be a scalar, the same for all pairs.
        """
        if self._operands is not None:
            return self._operands[name].to(s)
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
        """Return a parameter of either atom of every pair, such as their charges.

        The parameter is ``(atoms,)``; the results broadcast against the squared distances.
        """
        if self._operands is not None:
            return self._operands[name].to(s), self._operands[f"{name} of the other"].to(s)
        value: Tensor = getattr(self, name).to(s)
        if s.ndim and len(value) != s.shape[-1]:
            raise ValueError(f"{name} is for {len(value)} atoms and position has {s.shape[-1]}.")
        return value.unsqueeze(-1), value

    def with_operands(self, values: Mapping[str, Tensor]) -> PairPotential:
        """Return a copy whose formulas read these values in place of its parameters.

        A formula may read a parameter that is one number by its attribute. Tables and numbers of
        atoms are read by :meth:`pair_parameter` and :meth:`atom_parameter` alone.
        """
        numbers = {
            name: values[name]
            for name, x in own_tensors(self).items()
            if x.numel() == 1 and name in values
        }
        twin = replaced(self, numbers)
        twin._operands = values
        return twin


def pair_paths(potential: nn.Module, position: Positions) -> dict[str, str]:
    """Say how a potential, or the parts of a sum, evaluate pairs, by the name of their class."""
    parts = potential.parts if isinstance(potential, SumPotential) else [potential]
    return {
        type(part).__name__ if len(parts) == 1 else f"{type(part).__name__} {k}": part.path(
            position
        )
        for k, part in enumerate(parts)
        if isinstance(part, PairPotential)
    }


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
    difference, scale = float((value - value.T).abs().max()), float(value.abs().max())
    if difference > 8 * torch.finfo(value.dtype).eps * scale:
        i, j = divmod(int((value - value.T).abs().argmax()), len(value))
        raise ValueError(
            f"{name} must be symmetric, since a pair has one number; entries ({i}, {j}) and ({j}, "
            f"{i}) are {float(value[i, j]):g} and {float(value[j, i]):g}. ({name} + {name}.T) / 2 "
            "is symmetric."
        )
