"""MACE models, through the graph of :mod:`adjsim.potentials.learnt.graph`.

This module does not import ``mace``: it takes a model that somebody has made or loaded.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_indices
from adjsim.core.derived import derived
from adjsim.core.parameters import point_of_differentiation
from adjsim.core.typing import Array
from adjsim.potentials.learnt.graph import GraphPotential


class MACEPotential(GraphPotential):
    """A MACE model (``mace-torch``): its energy in eV for positions in angstrom.

    The model is one of ``mace.modules``, such as ``MACE`` or ``ScaleShiftMACE``, or one loaded by
    ``torch.load``; an ASE calculator has it as ``calculator.models[0]``, with equal energies and
    forces. Put it into eval mode, and call ``model.requires_grad_(False)`` to freeze its weights.
    Pretrained models are float32: convert them with ``model.double()``, or wrap the potential in
    :class:`InPrecision`. Its scripted parts do not run in compiled loops. Models that need charges,
    spins, fields or several heads at once are not taken.

    Args:
        model: its cutoff, ``model.r_max``, is that of the graph.
        numbers: ``(atoms,)`` atomic numbers.
        box: as for :class:`GraphPotential`, periodic in all directions.
        head: index of the head whose energy is used, in a model with several.
        skin: as for :class:`GraphPotential`.

    Raises:
        TypeError: not a MACE model.
        ValueError: an element that the model does not know, a head that it does not have.

    Reference: Batatia, Kovacs, Simm, Ortner and Csanyi, Advances in Neural Information Processing
    Systems 35, 11423 (2022).
    """

    def __init__(
        self,
        model: nn.Module,
        numbers: Array,
        *,
        box: Array | None = None,
        head: int = 0,
        skin: float | None = None,
    ) -> None:
        needed = ("r_max", "atomic_numbers", "atomic_energies_fn")
        missing = [name for name in needed if not hasattr(model, name)]
        if missing:
            raise TypeError(
                f"{type(model).__name__} is not a MACE model: it has no {', '.join(missing)}. Give "
                "other models to GraphPotential(model, cutoff)."
            )
        known: list[int] = cast(Tensor, model.atomic_numbers).tolist()
        given = as_indices("numbers", numbers).flatten()
        unknown = sorted(set(given.tolist()) - set(known))
        if unknown:
            raise ValueError(f"the model does not know atomic numbers {unknown}; it knows {known}.")
        kinds = torch.tensor([known.index(n) for n in given.tolist()])
        adapted, cutoff = _Adapter(model, len(known), head), float(cast(Tensor, model.r_max))
        super().__init__(adapted, cutoff, species=kinds, box=box, skin=skin)
        self.validate()

    def validate(self) -> None:
        """Refuse a head that the model does not have, and a cutoff that is not the model's."""
        super().validate()
        adapted = cast(_Adapter, self.model)
        heads = getattr(adapted.mace, "heads", None) or ["Default"]
        if not 0 <= adapted.head < len(heads):
            raise ValueError(
                f"head must be one of 0 to {len(heads) - 1} ({heads}); got {adapted.head}."
            )
        reach = float(cast(Tensor, adapted.mace.r_max))
        if reach != self.cutoff:
            raise ValueError(
                f"the cutoff of the model, r_max, is {reach:g} and that of the graph "
                f"{self.cutoff:g}: set both, or make the potential again."
            )

    @derived("image_box")
    def cell(self) -> Tensor:
        """The rows of the box, zero without one."""
        if self.image_box is None:
            return torch.zeros(3, 3, dtype=torch.float64)
        return torch.diag(self.image_box) if self.image_box.ndim == 1 else self.image_box

    def call(self, position: Tensor, edges: Tensor, shifts: Tensor, species: Any) -> Any:
        return self.model(position, edges, shifts, species, self.cell)


class _Adapter(nn.Module):
    """Calls a MACE model with the inputs of a graph model, and returns the energies of atoms."""

    def __init__(self, model: nn.Module, kinds: int, head: int) -> None:
        super().__init__()
        self.mace, self.kinds, self.head = model, kinds, head

    def forward(
        self, position: Tensor, edges: Tensor, shifts: Tensor, species: Tensor, cell: Tensor
    ) -> Tensor:
        # MACE makes its inputs require grad. These are leaves of the call alone.
        q = position if position.requires_grad else point_of_differentiation(position)
        kinds = nn.functional.one_hot(species, self.kinds).to(position.dtype)
        # The energies of atoms are wanted, so that all atoms may be one graph.
        data = {
            "positions": q,
            "node_attrs": point_of_differentiation(kinds),
            "edge_index": edges,
            "shifts": shifts,
            "unit_shifts": torch.zeros_like(shifts),
            "cell": cell.to(position),
            "batch": torch.zeros_like(species),
            "ptr": edges.new_tensor([0, len(species)]),
            "head": edges.new_tensor([self.head]),
        }
        # Some models sum these in float64, whatever their own precision.
        return self.mace(data, compute_force=False)["node_energy"].to(position.dtype)
