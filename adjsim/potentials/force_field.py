"""Force fields: sums of potentials whose parts have names, in eV and angstrom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.box import share_box
from adjsim.core.derived import own_tensors
from adjsim.core.neighbour_list import closest_atoms
from adjsim.potentials.base import Potential, SumPotential, force

LARGEST_ENERGY = 1e6
LARGEST_ENERGY_PER_ATOM = 100.0
"""The energies in eV, of a system and an atom, from which a start is refused. A bond has a few eV,
so positions or parameters with such an energy are in other units, or atoms lie on top of each
other."""


class ForceFieldPotential(SumPotential):
    """A sum of potentials with names, ``U = sum over parts of U_part``, in eV and angstrom.

    The parameters of a part have names that begin with its name, such as ``bonds.k`` and
    ``lennard_jones.epsilon``, and the part is an attribute, ``potential.bonds``. A part that is
    replaced (``potential.bonds = other``) is replaced in the sum.

    A tensor may belong to several parts: charges enter Coulomb's law, the scaled 1-4 pairs and the
    solvent. It has one name, under the first of the parts, and one gradient.
    Write new numbers into it, ``with torch.no_grad(): potential.coulomb.charge.copy_(...)``. An
    assignment, ``potential.coulomb.charge = ...``, would leave the former tensor in the other
    parts, so an evaluation after it is refused.

    Args:
        labels: for each part with types, what its types are called, such as ``("ALA N-CA", ...)``:
            row k of a parameter of this part is that of label k.
        parts: potentials by name.

    Raises:
        ValueError: no parts; at evaluation, a tensor that parts shared and that is no longer the
            same in all of them.
    """

    energy_unit = "eV"

    def __init__(
        self, labels: Mapping[str, Sequence[str]] | None = None, **parts: nn.Module
    ) -> None:
        # The parts are attributes of the sum itself, not entries of a list.
        nn.Module.__init__(self)
        if not parts:
            raise ValueError("a force field needs at least one part.")
        for name, part in parts.items():
            self.add_module(name, part)
        self.labels = {name: tuple(found) for name, found in (labels or {}).items()}
        self.shared = _shared_tensors(self)
        share_box(self)
        self.validate()

    def add_numbers(self, numbers: Mapping[str, nn.Parameter]) -> None:
        """Give numbers that parts hold names of the force field, which come before those of parts.

        Raises:
            ValueError: a name that a part or an attribute has.
        """
        for name, value in numbers.items():
            if hasattr(self, name):
                raise ValueError(
                    f"the number {name!r} has the name of a part or of an attribute of "
                    f"{type(self).__name__}: rename it."
                )
            self.register_parameter(name, value)
        self.shared = _shared_tensors(self)

    def validate(self) -> None:
        """Refuse parts with different boxes, and parts that shared a tensor and do so no longer."""
        super().validate()
        modules = dict(self.named_modules())
        for group in self.shared:
            found = [
                (f"{path}.{name}".lstrip("."), getattr(modules[path], name, None))
                for path, name in group
                if path in modules
            ]
            for name, tensor in found[1:]:
                first, expected = found[0]
                if not _is_one(tensor, expected):
                    raise ValueError(
                        f"{first} and {name} were one tensor and are two, since one of them was "
                        "assigned. Write numbers in place, with torch.no_grad(): "
                        f"potential.{first}.copy_(...), or assign one tensor to both."
                    )

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The parts in the order of their names, as in :class:`SumPotential`."""
        return tuple(part for part in self._modules.values() if part is not None)


def _shared_tensors(module: nn.Module) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the places, by path and name, of each tensor but boxes that is in several modules."""
    places: dict[int, list[tuple[str, str]]] = {}
    for path, part in module.named_modules():
        for name, tensor in own_tensors(part).items():
            if name != "box":
                places.setdefault(id(tensor), []).append((path, name))
    return tuple(tuple(found) for found in places.values() if len(found) > 1)


def _is_one(x: Any, y: Any) -> bool:
    """Return whether two tensors are one, or buffers that a change of dtype has made two."""
    if x is y or not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return x is y
    trained = isinstance(x, nn.Parameter) or x.requires_grad or y.requires_grad
    return not trained and x.dtype == y.dtype and torch.equal(x, y)


def refuse_high_energy(potential: Potential, position: Tensor, energy: Tensor) -> None:
    """Refuse an energy in eV that tells of wrong units or of overlapping atoms."""
    largest = min(LARGEST_ENERGY, LARGEST_ENERGY_PER_ATOM * position.shape[-2])
    bad = ~(energy.detach() < largest)
    if not bool(bad.any()):
        return
    index = tuple(bad.nonzero()[0].tolist()) if energy.ndim else ()
    q = position.detach()[index]
    i, j, distance = _worst_atoms(potential, q)
    where = f" of system {', '.join(map(str, index))}" if index else ""
    raise ValueError(
        f"the energy at the start{where} is {float(energy[index]):g} eV, and must be below "
        f"{largest:g} eV for {position.shape[-2]} atoms. The largest forces are on "
        f"atoms {i} and {j}, {distance:g} angstrom apart. Check the units: positions are in "
        "angstrom here, and bare numbers given to from_openmm in nanometres. If the units are "
        "right, move atoms that overlap."
    )


def _worst_atoms(potential: Potential, q: Tensor) -> tuple[int, int, float]:
    """Find the two atoms with the largest forces, or the closest ones if forces are not finite."""
    box = getattr(potential, "box", None)
    if len(q) < 2:
        return 0, 0, 0.0
    with torch.no_grad():
        sizes = force(potential, q).norm(dim=-1)
    if not bool(torch.isfinite(sizes).all()):
        return closest_atoms(q, box)
    i, j = sorted(sizes.topk(2).indices.tolist())
    return i, j, closest_atoms(q[[i, j]], box)[2]
