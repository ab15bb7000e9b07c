"""Constraints of distances between pairs of atoms."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_indices
from adjsim.core.layout import outside_tracing
from adjsim.core.parameters import register
from adjsim.core.typing import Array, Number
from adjsim.dynamics.bodies import Bodies
from adjsim.dynamics.constraints.multipliers import (
    LengthMultipliers,
    Solution,
    TriangleMultipliers,
    tangent_multipliers,
)
from adjsim.dynamics.constraints.ordering import around, clusters, ordered, refuse_repeated
from adjsim.dynamics.constraints.systems import diagonals, places, products, window
from adjsim.dynamics.masses import Masses
from adjsim.potentials.bonded.selection import Selection, as_members, check_range

# The smallest eigenvalue of the matrix of a cluster, with ones on its diagonal, that counts as one
# of independent constraints. That of a rigid water is 0.3.
DEPENDENT = 1e-8
# Atoms of a cluster that an error names.
NAMED = 12


class Group(NamedTuple):
    """Clusters of one form, in the order of the clusters: constraints start to stop."""

    start: int
    stop: int
    size: int
    width: int
    triangular: int


class DistanceConstraints(nn.Module):
    """Fixed distances of pairs of atoms, ``|q_i - q_j| = length``, for :class:`Constrained`.

    Constraints that share atoms form a cluster, such as a rigid water or all bonds of a protein.
    Clusters of one form are solved as one batch. Up to 16 constraints have a dense matrix. A longer
    cluster of n has a band of half width b, in an order of Cuthill and McKee, and a step takes time
    in proportion to n b^2: b is 1 for a chain, and about 10 for a protein. It may be 128. Distances
    are those of the positions, without the images of a periodic box, so molecules have to be whole.

    Args:
        index: ``(n, 2)`` pairs of atoms.
        length: length; one number, or ``(n,)``.

    Raises:
        ValueError: a pair that is given twice, a length that is not positive, a cluster whose
            band is too wide.
    """

    index: Tensor
    order: Tensor
    pairs: Tensor
    length: Tensor

    def __init__(self, index: Array, length: Number) -> None:
        super().__init__()
        # The pairs are constants, also where a transform of torch.func makes the lengths.
        with outside_tracing():
            found = as_indices("index", index).cpu()
            count = int(found.max()) + 1 if found.numel() else 0
            pairs = as_members("index", found, 2, count)
        register(self, "length", length, positive=True, finite=True, shapes=((), (len(pairs),)))
        refuse_repeated(pairs, self.length.detach().expand(len(pairs)))
        with outside_tracing():
            self._set_clusters(pairs, count)

    def _set_clusters(self, pairs: Tensor, count: int) -> None:
        labels = clusters(pairs, count)
        order, forms = ordered(pairs, labels)
        self.bodies = Bodies(labels)
        self.register_buffer("index", pairs, persistent=False)
        self.register_buffer("order", order, persistent=False)
        changes = (forms.diff(dim=0) != 0).any(-1).nonzero().flatten() + 1
        ends = [0, *changes.tolist(), len(order)]
        self.groups = tuple(Group(a, b, *forms[a].tolist()) for a, b in pairwise(ends))
        turned = pairs[order]
        for k, (start, stop, size, width, triangular) in enumerate(self.groups):
            if triangular:
                turned[start:stop] = around(turned[start:stop].reshape(-1, 3, 2)).flatten(0, 1)
            i, j = turned[start:stop].reshape(-1, size, 2).unbind(-1)
            columns = places(size, width)
            offset = columns - torch.arange(size).unsqueeze(-1)
            # Places outside of a cluster, which are kept within it, have no entry.
            inside = (width == size) | (offset == torch.arange(width) - width // 2)
            along_i, along_j = i[:, columns], j[:, columns]
            of_i = _same(i, along_i) - _same(i, along_j)
            of_j = _same(j, along_j) - _same(j, along_i)
            self.register_buffer(f"signs{k}", torch.stack([of_i, of_j]) * inside, persistent=False)
        self.register_buffer("pairs", turned, persistent=False)
        self.ends = Selection(turned.T.flatten(), count)

    def coefficients(self, masses: Masses, like: Tensor) -> dict[str, Tensor]:
        """Compute inverse masses, lengths, and the matrix S of each group of clusters."""
        w = 1 / masses(like)
        i, j = self.pairs.unbind(-1)
        each = w.expand(like.shape[-2], 1)[:, 0]
        found = {"1/m": w, "length": self.length.to(like).expand(len(self.index))[self.order]}
        found["1/m of pairs"] = each[i] + each[j]
        for k, (start, stop, size, *_) in enumerate(self.groups):
            signs = getattr(self, f"signs{k}").to(like)
            ends = torch.stack([each[i[start:stop]], each[j[start:stop]]])
            found[f"S{k}"] = (ends.reshape(2, -1, size, 1) * signs).sum(0)
        return found

    def differences(self, x: Tensor) -> Tensor:
        """Compute x_i - x_j, ``(*batch, dim, n)``, in the order of the clusters."""
        first, second = self.ends(x.transpose(-1, -2)[..., : self.ends.count]).chunk(2, -1)
        return first - second

    def forces(self, multipliers: Tensor, d: Tensor, w: Tensor, atoms: int) -> Tensor:
        """Compute G^T x, ``(*batch, atoms, dim)``, zero on atoms of infinite mass."""
        f = multipliers.unsqueeze(-2) * d
        return self.ends.transpose(torch.cat([f, -f], -1), atoms).transpose(-1, -2) * (w > 0)

    def length_multipliers(self, c: Mapping[str, Tensor], u: Tensor, d: Tensor, h: float) -> Tensor:
        """Solve ``|u + h B M^-1 G^T x| = length``, with G at the differences d, for x."""
        found: list[Tensor] = []
        for k, group in enumerate(self.groups):
            ends, starts, length = self._group(k, u, d, c["length"])
            solution = TriangleMultipliers if group.triangular else LengthMultipliers
            found.append(solution.apply(ends, starts, h * c[f"S{k}"], length))
        return torch.cat([x.flatten(-2) for x in found], -1)

    def length_slopes(self, c: Mapping[str, Tensor], e: Tensor, d: Tensor, v: Tensor) -> Tensor:
        """Compute dx/dn of :meth:`length_multipliers` at ``u + n v`` and h = 1, with its ends e."""
        found: list[Tensor] = []
        for k in range(len(self.groups)):
            ends, starts, changes = self._group(k, e, d, v)
            found.append(-Solution.apply(ends, starts, c[f"S{k}"], (ends * changes).sum(-3)))
        return torch.cat([x.flatten(-2) for x in found], -1)

    def tangent_multipliers(self, c: Mapping[str, Tensor], d: Tensor, v: Tensor) -> Tensor:
        """Solve ``G M^-1 (p - G^T y) = 0`` for y, with the differences v of velocities M^-1 p."""
        found: list[Tensor] = []
        for k in range(len(self.groups)):
            differences, velocities = self._group(k, d, v)
            found.append(tangent_multipliers(differences, velocities, c[f"S{k}"]))
        return torch.cat([y.flatten(-2) for y in found], -1)

    def project(self, c: Mapping[str, Tensor], position: Tensor, p: Tensor) -> Tensor:
        """Compute P(q) p, with ``P = 1 - G^T (G M^-1 G^T)^-1 G M^-1``."""
        d, w = self.differences(position), c["1/m"]
        y = self.tangent_multipliers(c, d, self.differences(w * p))
        return p - self.forces(y, d, w, p.shape[-2])

    def reactions(
        self, c: Mapping[str, Tensor], d: Tensor, p: Tensor, force: Tensor | None = None
    ) -> Tensor:
        """Solve ``G M^-1 (F - G^T x) = -|v|^2`` for x: the constraints pull with -G^T x."""
        v = self.differences(c["1/m"] * p)
        needed = d * ((v * v).sum(-2, keepdim=True) / (d * d).sum(-2, keepdim=True))
        if force is not None:
            needed = needed + self.differences(c["1/m"] * force)
        return self.tangent_multipliers(c, d, needed)

    def drift(
        self, c: Mapping[str, Tensor], q: Tensor, p: Tensor, h: float
    ) -> tuple[Tensor, Tensor]:
        """Compute the RATTLE drift over a time h; its inverse is the drift over -h."""
        d, w, atoms = self.differences(q), c["1/m"], q.shape[-2]
        x = self.length_multipliers(c, d + h * self.differences(w * p), d, h)
        half = p + self.forces(x, d, w, atoms)
        end = q + h * w * half
        return end, self.project(c, end, half)

    def at_lengths(self, c: Mapping[str, Tensor], q: Tensor, start: Tensor | None = None) -> Tensor:
        """Move positions by ``M^-1 G^T x``, with G at a start, to where all distances are right.

        Without a start G is that of the positions.
        """
        u, w = self.differences(q), c["1/m"]
        d = u if start is None else self.differences(start)
        x = self.length_multipliers(c, u, d, 1.0)
        return q + w * self.forces(x, d, w, q.shape[-2])

    def check_atoms(self, atoms: int) -> None:
        """Refuse atoms that a state does not have."""
        check_range("index", self.index, atoms)

    def first_atoms(self, atoms: int) -> Tensor:
        """Return for each atom the first one that constraints join it to, or itself."""
        labels = self.bodies.members.index
        rest = torch.arange(len(labels), atoms, device=labels.device)
        return torch.cat([labels, rest])

    def excess(self, q: Tensor) -> Tensor:
        """Compute the relative errors of the distances, ``(*batch, n)``, in the order of index."""
        i, j = self.index.unbind(-1)
        return (q[..., i, :] - q[..., j, :]).norm(dim=-1) / self.length.to(q) - 1

    @torch.no_grad()
    def refuse_dependent(self, c: Mapping[str, Tensor], q: Tensor) -> None:
        """Refuse clusters whose constraints do not have the full rank at a position."""
        least = max(DEPENDENT, 100 * torch.finfo(q.dtype).eps)
        for k, (start, _, size, width, _) in enumerate(self.groups):
            (d,) = self._group(k, self.differences(q))
            found = _dependent(c[f"S{k}"] * products(d, d, width), least)
            wrong = found.reshape(-1, found.shape[-1]).any(0)
            if bool(wrong.any()):
                first = start + size * int(wrong.nonzero()[0])
                atoms = self.pairs[first : first + size].unique().tolist()
                more = f" and {len(atoms) - NAMED} more" if len(atoms) > NAMED else ""
                raise ValueError(
                    f"the constraints of atoms {atoms[:NAMED]}{more} are not independent at the "
                    "start: either there are more than these atoms can have, or all atoms of one "
                    "are of infinite mass. Leave out some."
                )

    def _group(self, k: int, *values: Tensor) -> list[Tensor]:
        """Select the clusters of a group from values with a last axis of constraints."""
        start, stop, size, *_ = self.groups[k]
        return [x[..., start:stop].unflatten(-1, (-1, size)) for x in values]


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(-1) == y).double()


def _dependent(matrix: Tensor, least: float) -> Tensor:
    """Return for each matrix, with ones on its diagonal, whether an eigenvalue is below a number.

    If none is, the matrix less that number times the identity has a decomposition of Cholesky.
    """
    size, width = matrix.shape[-2:]
    number = torch.arange(size)
    scale = matrix[..., number, number if width == size else width // 2]
    scale = scale.clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
    scaled = matrix * scale.unsqueeze(-1) * window(scale, width)
    if width == size:
        rest = scaled - least * torch.eye(size).to(scaled)
        return torch.linalg.cholesky_ex(rest).info > 0
    lower = diagonals(scaled).reshape(-1, width, size)[:, width // 2 :].cpu().double()
    lower[:, 0] -= least
    found = [not _is_definite(x.numpy()) for x in lower]
    return torch.tensor(found).to(matrix.device).reshape(matrix.shape[:-2])


def _is_definite(lower: Any) -> bool:
    from scipy.linalg import LinAlgError, cholesky_banded

    try:
        cholesky_banded(lower, lower=True, check_finite=False)
    except LinAlgError:
        return False
    return True
