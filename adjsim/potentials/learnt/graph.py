"""Message-passing models, which are given their edges by the library's neighbour list.

Edges are in a fixed order, so they are a function of the position to the last bit. A compiled loop
holds a fixed number of edges. Those that it does not need join the first atom to itself at the
cutoff, where messages vanish.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_indices, as_whole, outside_inference_mode
from adjsim.core.box import Periodic, rows_of
from adjsim.core.declared import NOT_NEGATIVE, POSITIVE
from adjsim.core.layout import is_tracing
from adjsim.core.neighbour_list import AllImages
from adjsim.core.operators import operator, shapes_of
from adjsim.core.state import in_transform
from adjsim.core.strain import Strain
from adjsim.core.typing import Array, Energies, Positions
from adjsim.potentials.base import ForceField, Potential
from adjsim.potentials.evaluated import as_module
from adjsim.potentials.learnt.precision import ADVICE, names_of, refuse_other_dtype
from adjsim.potentials.products import derivative

# The skin as a share of the cutoff. A list is built by a tree, which costs more than evaluating
# the distances of more pairs.
SKIN = 0.25


class Edges(NamedTuple):
    """Pairs of atoms within a cutoff, and their shifts, as :class:`GraphPotential` describes them.

    ``finite``, ``(*batch,)``, says which systems have finite positions; the others have no edges.
    """

    pairs: Tensor
    shifts: Tensor
    finite: Tensor


def find_edges(
    position: Tensor,
    cutoff: float,
    box: Tensor | None = None,
    skin: float | None = None,
    strain: Strain | None = None,
    capacity: int | None = None,
) -> Edges:
    """Find the edges of positions ``(*batch, atoms, dim)``, which may be outside of the box.

    At a strain the box of each system is stretched, and shifts are differentiable by the strain.
    The list is that of the positions in the box without strain, so that it outlives many steps.
    A compiled loop gets ``capacity`` edges, the last of them without effect.
    """
    q, skin = position.detach(), SKIN * cutoff if skin is None else skin
    value = rows = None
    if strain is not None:
        value, rows = strain.value.detach(), None if strain.rows is None else strain.rows.detach()
    known = q, None if box is None else box.detach(), value, rows, cutoff, skin
    real: Tensor | None = None
    if is_tracing():
        _check_capacity(capacity, q)
        pairs, shifts, finite, real = torch.ops.adjsim.graph_edges(*known, capacity)
    elif in_transform() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        raise ValueError(
            "a neighbour list depends on the values of positions, which transforms of torch.func "
            "and torch.compile hide: use plain autograd."
        )
    else:
        pairs, shifts, finite = _near(*known)
    if strain is not None:
        stretched = strain.dilated(shifts, _of_edges(torch.exp(strain.value), pairs[1], q))
        shifts = stretched if real is None else torch.where(real, stretched, shifts)
    if box is not None and box.requires_grad:
        rows = rows_of(box).to(shifts)
        by_box = torch.round(shifts @ torch.linalg.inv(rows.detach())) @ rows
        # The same shifts, with the derivative of whole multiples of the rows of the box.
        shifts = shifts + (by_box - by_box.detach())
    return Edges(pairs, shifts, finite)


@torch.no_grad()
def _near(
    q: Tensor,
    box: Tensor | None,
    strain: Tensor | None,
    rows: Tensor | None,
    cutoff: float,
    skin: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the edges of positions, their shifts in the box without strain, and finite systems."""
    reach, rest = cutoff, q
    stretch = None if strain is None else Strain(strain, rows)
    if stretch is not None:
        rest, reach = stretch.at_rest(q, cutoff)
    receiver, sender, shifts, finite = AllImages(reach, skin, box).pairs(rest)
    assert shifts is not None
    moved = shifts
    if stretch is not None:
        moved = stretch.dilated(shifts, _of_edges(torch.exp(stretch.value), receiver, q))
    # Coordinates first: the sum of squares is then elementwise, the same for an edge in either
    # direction and at any place of the list.
    flat = q.reshape(-1, q.shape[-1])
    d = (flat.index_select(0, receiver) - flat.index_select(0, sender) + moved).T
    near = ((d * d).sum(0) < cutoff**2).nonzero().squeeze(-1)
    pairs = torch.stack([sender.index_select(0, near), receiver.index_select(0, near)])
    return pairs, shifts.index_select(0, near), finite


def _of_edges(factor: Tensor, receiver: Tensor, position: Tensor) -> Tensor:
    """Return the factor of the system of each edge."""
    factor = factor.expand(*position.shape[:-2], 1, -1).flatten(0, -2)
    return factor.index_select(0, receiver // max(position.shape[-2], 1))


def _check_capacity(capacity: int | None, position: Tensor) -> None:
    if capacity is None:
        raise ValueError(
            "a compiled loop holds a fixed number of edges: give the potential capacity=, such as "
            "1.3 times the number of edges at the start, which is len(potential.edges(position)"
            ".shifts)."
        )
    if position.device.type != "cpu":
        raise ValueError(
            f"compiled loops on {position.device} hold no neighbour list of a graph: use "
            "compile=False."
        )


@operator("graph_edges")
def edges_operator(
    position: Tensor,
    box: Tensor | None,
    strain: Tensor | None,
    rows: Tensor | None,
    cutoff: float,
    skin: float,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find edges, at most ``capacity``, and which of them are real.

    The others join the first atom to itself, at the distance of the cutoff.
    """
    pairs, shifts, finite = _near(position, box, strain, rows, cutoff, skin)
    found = len(shifts)
    if found > capacity:
        raise ValueError(
            f"a graph of {found} edges does not fit into capacity={capacity}: give it a larger one."
        )
    all_pairs = pairs.new_zeros(2, capacity)
    all_pairs[:, :found] = pairs
    all_shifts = shifts.new_zeros(capacity, shifts.shape[-1])
    all_shifts[:found], all_shifts[found:, 0] = shifts, cutoff
    real = torch.arange(capacity, device=position.device).unsqueeze(-1) < found
    return all_pairs, all_shifts, finite, real


@shapes_of(edges_operator)
def _(
    position: Tensor,
    box: Tensor | None,
    strain: Tensor | None,
    rows: Tensor | None,
    cutoff: float,
    skin: float,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *batch, _, dim = position.shape
    return (
        position.new_empty((2, capacity), dtype=torch.int64),
        position.new_empty((capacity, dim)),
        position.new_empty(batch, dtype=torch.bool),
        position.new_empty((capacity, 1), dtype=torch.bool),
    )


class _GraphModel(Periodic):
    """A model of a graph, and the settings of its edges."""

    reads_values = True
    box: Tensor | None
    species: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        cutoff: float,
        *,
        species: Array | None = None,
        box: Array | None = None,
        skin: float | None = None,
        capacity: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.cutoff = as_module("model", model), POSITIVE("cutoff", cutoff)
        self.skin = None if skin is None else NOT_NEGATIVE("skin", skin)
        self.capacity = None if capacity is None else as_whole("capacity", capacity, least=1)
        with outside_inference_mode():
            self.register_box(box)
            kinds = None if species is None else as_indices("species", species)
            self.register_buffer("species", kinds)
        if kinds is not None and kinds.ndim != 1:
            raise ValueError(f"species must be (atoms,) integers; got shape {tuple(kinds.shape)}.")

    def validate(self) -> None:
        """Refuse a box, a cutoff or a skin that the constructor would refuse."""
        POSITIVE("cutoff", self.cutoff)
        if self.skin is not None:
            NOT_NEGATIVE("skin", self.skin)
        super().validate()

    @property
    def image_cutoff(self) -> None:
        """None: two atoms may have edges with several images."""

    def edges(self, position: Positions, strain: Strain | None = None) -> Edges:
        """Find the edges of positions, those that the model is given."""
        dim = position.shape[-1]
        if self.box is not None and len(self.box) != dim:
            raise ValueError(f"box has {len(self.box)} dimensions and position {dim}.")
        assert self.cutoff is not None
        box, skin = self.image_box, self.skin
        return find_edges(position, self.cutoff, box, skin, strain, self.capacity)

    def call(self, position: Tensor, edges: Tensor, shifts: Tensor, species: Any) -> Any:
        return self.model(position, edges, shifts, species)

    def evaluate(self, position: Tensor, edges: Edges, shifts: Tensor) -> Tensor:
        """Evaluate the model, and refuse a result that is no tensor of the position's dtype."""
        *batch, atoms, dim = position.shape
        species = self.species
        if species is not None:
            if len(species) != atoms:
                raise ValueError(f"species is for {len(species)} atoms and position has {atoms}.")
            if batch:
                species = species.repeat(math.prod(batch))
        name = type(self.model).__name__
        try:
            value: Any = self.call(position.reshape(-1, dim), edges.pairs, shifts, species)
        except IndexError as error:
            if species is None:
                raise
            raise ValueError(
                f"{name} looks up an index that it does not have. Species are "
                f"{int(species.min())} to {int(species.max())}; the model may know fewer."
            ) from error
        except RuntimeError:
            refuse_other_dtype(self.model, position)
            raise
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} returns {type(value).__name__} in place of a tensor. Wrap it in a module "
                "that takes the energies of the atoms out of it."
            )
        if value.dtype != position.dtype:
            raise ValueError(
                f"{name} returns {names_of({value.dtype})} for a position of "
                f"{names_of({position.dtype})}. {ADVICE}"
            )
        return value


class GraphPotential(_GraphModel, Potential):
    """An energy from a message-passing model, with edges from the library's neighbour list.

    The model is called as ``model(position, edges, shifts, species)`` and returns the energies of
    the atoms. All systems of a batch are one graph, whose atoms are numbered one system after
    another; no edge joins two systems. With N atoms in all systems and E edges::

        position   (N, dim)
        edges      (2, E) int64, sender and receiver, every pair in both directions, sorted by the
                   receiver, then the sender, then the image
        shifts     (E, dim), zero without a box:
                   vector = position[receiver] - position[sender] + shifts
        species    (N,) int64, or None

    MACE, NequIP and SchNet take edges in this form. The edges are the pairs closer than the cutoff,
    in a box with every image: two atoms may have several edges, and an atom edges with its own
    images. The messages of the model must vanish smoothly at the cutoff, with their first two
    derivatives; otherwise the force or its derivative jumps there, and energy drifts.

    Edges are a function of the position to the last bit, so exact runs are retraced if the model is
    reproducible: on a GPU sums by atomic operations are not, see
    ``torch.use_deterministic_algorithms``. In float32 keep positions near the box.

    Forces and products come from automatic differentiation. A force costs one pass forward and one
    back, and the product of an adjoint two to three times as much.

    With ``compile=True`` the model is printed, and each step of the loop asks the list for its
    edges. The loop holds ``capacity`` of them. Those that it does not need join the first atom to
    itself at the distance of the cutoff, where the messages must vanish. A model that counts edges,
    to divide by their number, is not right there.

    Args:
        model: returns ``(N,)`` or ``(N, 1)`` energies of atoms. For one system it may return the
            energy of the system, ``()`` or ``(1,)``.
        cutoff: edges are shorter than this distance, which may be larger than half the box.
        species: ``(atoms,)`` integers, such as types or atomic numbers; passed on.
        box, skin: see :class:`PairPotential`.
        capacity: the number of edges, of all systems together, that a compiled loop holds; only
            ``compile=True`` needs it. A graph with more is an error of the run.

    Raises:
        TypeError: a model that is not an ``nn.Module``, or does not return a tensor.
        ValueError: a cutoff that is not positive, species for another number of atoms or that the
            model does not know, a result of another shape or dtype.
    """

    def forward(self, position: Positions) -> Energies:
        edges = self.edges(position)
        return self._energy(position, edges, edges.shifts)

    def strained_energy(self, position: Positions, strain: Strain) -> Energies:
        edges = self.edges(position, None if self.box is None else strain)
        return self._energy(position, edges, edges.shifts)

    def virial(self, position: Positions) -> Tensor:
        """Compute minus the derivative of the energy with respect to strain."""
        edges, (*batch, atoms, dim) = self.edges(position), position.shape
        owner = edges.pairs[1] // max(atoms, 1)

        def strained(strain: Tensor) -> Tensor:
            moved = edges.shifts
            if self.box is not None:
                by = strain.reshape(-1, dim, dim)[owner]
                moved = moved + (moved.unsqueeze(-2) @ by).squeeze(-2)
            return self._energy(position + position @ strain, edges, moved)

        return -derivative(strained, position.new_zeros(*batch, dim, dim))

    def _energy(self, position: Tensor, edges: Edges, shifts: Tensor) -> Tensor:
        """Sum the energies of atoms in each system."""
        *batch, atoms, _ = position.shape
        value, count = self.evaluate(position, edges, shifts), math.prod((*batch, atoms))
        if value.shape in ((count,), (count, 1)):
            energy = value.reshape(*batch, atoms).sum(-1)
        elif value.numel() == 1 and math.prod(batch) == 1:
            energy = value.reshape(tuple(batch))
        else:
            total = " It returns one energy for a whole batch." if value.numel() == 1 else ""
            raise ValueError(
                f"{type(self.model).__name__} returns shape {tuple(value.shape)} for {count} atoms "
                f"in {math.prod(batch)} systems; it must be the energies of the atoms, ({count},) "
                f"or ({count}, 1).{total}"
            )
        return _marked(energy, edges.finite)


class GraphForce(_GraphModel, ForceField):
    """A force from a message-passing model that has no energy.

    The model is called as by :class:`GraphPotential` and returns the forces on the atoms, ``(N,
    dim)``. Such a force is in general not conservative, so there is no invariant.

    Args:
        model: its forces must not be derivatives that it takes itself, which it could not under
            ``torch.no_grad``, in which forward runs are made. Give the energy of such a model to
            :class:`GraphPotential`.
        cutoff, species, box, skin, capacity: as for :class:`GraphPotential`.

    Raises:
        TypeError, ValueError: as :class:`GraphPotential`.
    """

    def forward(self, t: Any, position: Positions) -> Positions:
        edges = self.edges(position)
        value = self.evaluate(position, edges, edges.shifts)
        if value.numel() != position.numel() or value.shape[-1:] != position.shape[-1:]:
            raise ValueError(
                f"{type(self.model).__name__} returns shape {tuple(value.shape)}; the forces on "
                f"the atoms are {(math.prod(position.shape[:-1]), position.shape[-1])}."
            )
        return _marked(value.reshape(position.shape), edges.finite)


def _marked(value: Tensor, finite: Tensor) -> Tensor:
    """Set the results of systems whose positions are not finite to NaN."""
    lost = torch.where(finite, 0.0, torch.nan).to(value)
    return value + lost.reshape(finite.shape + (1,) * (value.ndim - finite.ndim))
