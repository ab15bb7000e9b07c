"""The edges of a graph of atoms: which pairs are within a cutoff, found by a neighbour list.

The list is a cache. It holds the pairs within the cutoff and a skin, with the number of boxes
between them, and is built again once an atom has moved by half of the skin. The edges are those of
its pairs that are within the cutoff, in a fixed order. So they are a function of the position, to
the last bit, and nobody has to keep the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.core.arguments import outside_inference_mode
from adjsim.core.layout import is_tracing
from adjsim.core.neighbour_search import images_within
from adjsim.core.state import in_transform

# The skin as a share of the cutoff. A list is built by a tree, which costs more than evaluating
# the distances of more pairs.
SKIN = 0.25
# Lists, the newest first, up to this number and to this number of pairs, unless one has more.
KEPT, PAIRS = 16, 2**23


class Edges(NamedTuple):
    """Pairs of atoms within a cutoff, in both directions.

    Atoms are numbered one system after another.

    Attributes:
        pairs: ``(2, edges)`` int64, the sender and the receiver, sorted by the receiver, then by
            the sender, then by the image.
        shifts: ``(edges, dim)``, so that the vector from the sender to the receiver is
            ``position[receiver] - position[sender] + shifts``. Zero without a box.
        finite: ``(*batch,)``, which systems have finite positions; the others have no edges.
    """

    pairs: Tensor
    shifts: Tensor
    finite: Tensor


@dataclass(frozen=True)
class _Listed:
    key: Any
    position: Tensor
    edges: Edges


_lists: list[_Listed] = []
_lock = Lock()


def find_edges(
    position: Tensor, cutoff: float, box: Tensor | None = None, skin: float | None = None
) -> Edges:
    """Find the edges of positions ``(*batch, atoms, dim)``, with all periodic images.

    Args:
        position: the positions. Atoms may be outside the box.
        cutoff: edges are shorter than this distance.
        box: a box from :func:`~adjsim.core.box.checked_box`; None: no box. The cutoff may be larger
            than the box. Then two atoms have an edge for each image within the cutoff, and an atom
            has edges with its own images.
        skin: how far beyond the cutoff the list reaches; None: chosen by the library. Edges do not
            depend on it.

    Raises:
        ValueError: the values of positions are hidden, in a transform of torch.func or a trace.
    """
    if is_tracing() or in_transform() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        raise ValueError(
            "a neighbour list depends on the values of positions, which compile=True and "
            "transforms of torch.func hide: use compile=False and plain autograd."
        )
    with torch.no_grad():
        q = position.detach()
        listed = _list(q, cutoff, box, SKIN * cutoff if skin is None else skin).edges
        # Coordinates first: the sum of squares is then elementwise, the same for an edge in either
        # direction and at any place of the list.
        flat = q.reshape(-1, q.shape[-1])
        sender, receiver = listed.pairs
        d = (flat.index_select(0, receiver) - flat.index_select(0, sender) + listed.shifts).T
        near = ((d * d).sum(0) < cutoff**2).nonzero().squeeze(-1)
        pairs, shifts = listed.pairs.index_select(1, near), listed.shifts.index_select(0, near)
        return Edges(pairs, shifts, listed.finite)


def _list(position: Tensor, cutoff: float, box: Tensor | None, skin: float) -> _Listed:
    """Return a list that contains all edges."""
    cell = None if box is None else tuple(box.flatten().tolist())
    key = (position.shape, position.dtype, position.device, cutoff + skin, cell)
    with _lock:
        known = [entry for entry in _lists if entry.key == key]
    old: _Listed | None = None
    for entry in known:
        moved = 2 * float((position - entry.position).square().sum(-1).max()) ** 0.5
        if moved <= skin:
            return entry
        if moved <= 4 * skin:
            old = entry  # The list of the same run, which it does not need again.
    with outside_inference_mode():
        found = _build(key, position.clone(), cutoff + skin, box)
    if bool(found.edges.finite.all()):
        with _lock:
            _lists[:] = [found, *(entry for entry in _lists if entry is not old)][:KEPT]
            while len(_lists) > 1 and sum(len(entry.edges.shifts) for entry in _lists) > PAIRS:
                _lists.pop()
    return found


def _build(key: Any, position: Tensor, reach: float, box: Tensor | None) -> _Listed:
    finite = torch.isfinite(position).flatten(-2).all(-1)
    *_, atoms, dim = position.shape
    # Differences of positions far from the box are rounded.
    size = float(position.nan_to_num(0, 0, 0).abs().amax()) if position.numel() else 0.0
    rounded = 16 * torch.finfo(position.dtype).eps * size
    empty = torch.empty(2, 0, dtype=torch.int64, device=position.device)
    pairs, shifts = [empty], [position.new_zeros(0, dim)]
    rows = None if box is None else (torch.diag(box) if box.ndim == 1 else box).to(position)
    for k, (q, whole) in enumerate(
        zip(position.reshape(-1, atoms, dim), finite.flatten().tolist(), strict=True)
    ):
        if whole and atoms:
            receiver, sender, n = images_within(q, box, reach + rounded)
            pairs.append(torch.stack([sender, receiver]) + k * atoms)
            # From the sender to the receiver the image counts backwards. Products and sums are
            # elementwise, so that a shift has the same bits wherever it is in the list.
            moved = torch.zeros_like(n, dtype=position.dtype)
            for number, row in zip(n.T, [] if rows is None else rows, strict=rows is not None):
                moved = moved - number.unsqueeze(-1) * row
            shifts.append(moved)
    return _Listed(key, position, Edges(torch.cat(pairs, 1), torch.cat(shifts), finite))
