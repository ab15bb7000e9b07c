"""The clusters of constraints that share atoms, and an order of small bandwidth in each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Constraints of the largest cluster whose matrix is always dense, and entries of the longest row.
DENSE, WIDEST = 16, 257


def ordered(pairs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Order constraints by clusters, of which atoms have the labels of :func:`clusters`.

    Rows of the matrix of a long cluster have the width 2 b + 1, b the bandwidth of the order of
    Cuthill and McKee, by which constraints that share an atom are near each other.

    Returns:
        The order, in which clusters of one form follow each other, and for each constraint of it
        the form of its cluster, ``(n, 3)``: its size, the entries of a row, and whether the cluster
        is a triangle.
    """
    first, cluster, sizes = labels[pairs[:, 0]].unique(return_inverse=True, return_counts=True)
    number, widths = torch.arange(len(pairs)), sizes.clone()
    rank, long = number, sizes[cluster] > DENSE
    if bool(long.any()):
        place, reach = _near(pairs, cluster, sizes)
        rank = torch.where(long, place, rank)
        widths = torch.where(sizes > DENSE, torch.minimum(sizes, 2 * reach + 1), sizes)
    widest = int(widths.argmax())
    if int(widths[widest]) > WIDEST:
        raise ValueError(
            f"the {int(sizes[widest])} constraints of the cluster with atom "
            f"{int(pairs[cluster == widest][0, 0])} need a matrix with {int(widths[widest])} "
            f"entries in a row, and it may have {WIDEST}. Chains and trees of any length have "
            "few; nets have many. Leave out constraints of the net."
        )
    triangular = (sizes == 3) & (labels.bincount()[first] == 3)
    forms = torch.stack([sizes, widths, triangular], -1)[cluster]
    order = torch.from_numpy(np.lexsort((rank, cluster, *forms.T.flip(0))))
    return order, forms[order]


def around(pairs: Tensor) -> Tensor:
    """Turn the pairs of triangles, ``(m, 3, 2)``, so that each ends where the next begins."""
    total = pairs.sum(-1)
    # The atom of a pair that the next one has too.
    shared = (total + total.roll(-1, -1) - total.roll(1, -1)) // 2
    return torch.stack([shared.roll(1, -1), shared], -1)


def _near(pairs: Tensor, cluster: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return places in the order of Cuthill and McKee, and the bandwidth of each cluster."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    number = torch.arange(len(pairs))
    ends = number.repeat(2).numpy(), pairs.T.flatten().numpy()
    touched = csr_matrix((np.ones(2 * len(pairs)), ends))
    shared = (touched @ touched.T).tocsr()
    found = torch.from_numpy(reverse_cuthill_mckee(shared, symmetric_mode=True).astype(int))
    place = torch.empty_like(number).scatter(0, found, number)
    # Clusters are contiguous in the order of all.
    i, j = (torch.from_numpy(x.astype(int)) for x in shared.nonzero())
    distance = (place[i] - place[j]).abs()
    return place, torch.zeros_like(sizes).scatter_reduce(0, cluster[i], distance, "amax")


def refuse_repeated(pairs: Tensor, lengths: Tensor) -> None:
    """Refuse a pair that has two constraints."""
    _, number, count = pairs.sort(-1).values.unique(dim=0, return_inverse=True, return_counts=True)
    if int(count.max()) > 1:
        rows = (number == count.argmax()).nonzero().flatten()
        found = lengths[rows].unique().tolist()
        contradiction = f", with the lengths {found}, which contradict each other"
        raise ValueError(
            f"index gives the pair {pairs[rows[0]].tolist()} in the rows {rows.tolist()}"
            f"{contradiction if len(found) > 1 else ''}: give each pair once."
        )


def clusters(pairs: Tensor, count: int) -> Tensor:
    """Return for each atom the smallest number of an atom that constraints join it to."""
    label, ends = torch.arange(count), pairs.T.flatten()
    while True:
        low = label[pairs].min(-1).values.repeat(2)
        found = label.scatter_reduce(0, ends, low, "amin")
        found = found[found]
        if torch.equal(found, label):
            return label
        label = found
