"""The edges of a graph of atoms: the pairs within a cutoff, found by a neighbour list.

They are in a fixed order, so they are a function of the position to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adjsim.core.layout import is_tracing
from adjsim.core.neighbour_list import AllImages
from adjsim.core.state import in_transform

# The skin as a share of the cutoff. A list is built by a tree, which costs more than evaluating
# the distances of more pairs.
SKIN = 0.25


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
        receiver, sender, moved, finite = AllImages(
            cutoff, SKIN * cutoff if skin is None else skin, box
        ).pairs(q)
        assert moved is not None
        # Coordinates first: the sum of squares is then elementwise, the same for an edge in either
        # direction and at any place of the list.
        flat = q.reshape(-1, q.shape[-1])
        d = (flat.index_select(0, receiver) - flat.index_select(0, sender) + moved).T
        near = ((d * d).sum(0) < cutoff**2).nonzero().squeeze(-1)
        pairs = torch.stack([sender.index_select(0, near), receiver.index_select(0, near)])
        return Edges(pairs, moved.index_select(0, near), finite)
