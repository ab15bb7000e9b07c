"""Constraints of distances between pairs of atoms."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from adjsim.core.arguments import as_indices
from adjsim.core.parameters import register
from adjsim.core.typing import Array, Number
from adjsim.dynamics.bodies import Bodies
from adjsim.dynamics.constraints.multipliers import (
    LengthMultipliers,
    products,
    tangent_multipliers,
)
from adjsim.dynamics.masses import Masses
from adjsim.potentials.bonded.selection import Selection, as_members, check_range

# The constraints of a cluster, whose matrix is dense.
LARGEST = 128
# The smallest eigenvalue of the matrix of a cluster, with ones on its diagonal, that counts as one
# of independent constraints. That of a rigid water is 0.3.
DEPENDENT = 1e-8


class DistanceConstraints(nn.Module):
    """Fixed distances of pairs of atoms, ``|q_i - q_j| = length``, for :class:`Constrained`.

    Constraints that share atoms form a cluster, such as a rigid water. Clusters with the same
    number of constraints are solved as one batch, with dense matrices of that size. A cluster may
    have 128 constraints; a step takes time in proportion to the cube of that number. Distances are
    those of the positions, without the images of a periodic box, so molecules have to be whole.

    Args:
        index: ``(n, 2)`` pairs of atoms.
        length: length; one number, or ``(n,)``.

    Raises:
        ValueError: a pair that is given twice, a length that is not positive, a cluster that is too
            large.
    """

    index: Tensor
    order: Tensor
    length: Tensor

    def __init__(self, index: Array, length: Number) -> None:
        super().__init__()
        found = as_indices("index", index).cpu()
        count = int(found.max()) + 1 if found.numel() else 0
        pairs = as_members("index", found, 2, count)
        register(self, "length", length, positive=True, finite=True, shapes=((), (len(pairs),)))
        _refuse_repeated(pairs, self.length.detach().expand(len(pairs)))
        atoms = _clusters(pairs, count)
        self.bodies, label = Bodies(atoms), atoms[pairs[:, 0]]
        _, cluster, sizes = label.unique(return_inverse=True, return_counts=True)
        if int(sizes.max()) > LARGEST:
            raise ValueError(
                f"{int(sizes.max())} constraints form one cluster with atom "
                f"{int(pairs[sizes[cluster].argmax(), 0])}, and a cluster may have {LARGEST}. "
                "Leave out constraints, such as those of bonds without hydrogen."
            )
        # Clusters of one size follow each other, and the constraints of each cluster too.
        order = (sizes[cluster] * len(sizes) + cluster).argsort(stable=True)
        self.register_buffer("index", pairs, persistent=False)
        self.register_buffer("order", order, persistent=False)
        self.first, self.second = (Selection(pairs[order, k], count) for k in (0, 1))
        each, ordered = sizes[cluster][order], pairs[order]
        ends = [0, *(each.diff().nonzero().flatten() + 1).tolist(), len(order)]
        self.groups = tuple((a, b, int(each[a])) for a, b in pairwise(ends))
        for k, (start, stop, size) in enumerate(self.groups):
            i, j = ordered[start:stop].reshape(-1, size, 2).unbind(-1)
            signs = torch.stack([_same(i, i) - _same(i, j), _same(j, j) - _same(j, i)])
            self.register_buffer(f"signs{k}", signs, persistent=False)

    def coefficients(self, masses: Masses, like: Tensor) -> dict[str, Tensor]:
        """Compute inverse masses, lengths, and the matrix S of each group of clusters."""
        w = 1 / masses(like)
        i, j = self.index[self.order].unbind(-1)
        each = w.expand(like.shape[-2], 1)[:, 0]
        found = {"1/m": w, "length": self.length.to(like).expand(len(self.index))[self.order]}
        found["1/m of pairs"] = each[i] + each[j]
        for k, (start, stop, size) in enumerate(self.groups):
            signs = getattr(self, f"signs{k}").to(like)
            ends = torch.stack([each[i[start:stop]], each[j[start:stop]]])
            found[f"S{k}"] = (ends.reshape(2, -1, size, 1) * signs).sum(0)
        return found

    def differences(self, x: Tensor) -> Tensor:
        """Compute x_i - x_j, ``(*batch, dim, n)``, in the order of the clusters."""
        columns = x.transpose(-1, -2)[..., : self.first.count]
        return self.first(columns) - self.second(columns)

    def forces(self, multipliers: Tensor, d: Tensor, w: Tensor, atoms: int) -> Tensor:
        """Compute G^T x, ``(*batch, atoms, dim)``, zero on atoms of infinite mass."""
        f = multipliers.unsqueeze(-2) * d
        found = self.first.transpose(f, atoms) - self.second.transpose(f, atoms)
        return found.transpose(-1, -2) * (w > 0)

    def length_multipliers(self, c: Mapping[str, Tensor], u: Tensor, d: Tensor, h: float) -> Tensor:
        """Solve ``|u + h B M^-1 G^T x| = length``, with G at the differences d, for x."""
        found: list[Tensor] = []
        for k in range(len(self.groups)):
            ends, starts, length = self._group(k, u, d, c["length"])
            found.append(LengthMultipliers.apply(ends, starts, h * c[f"S{k}"], length))
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

    def at_lengths(self, c: Mapping[str, Tensor], q: Tensor) -> Tensor:
        """Move positions by ``M^-1 G^T x`` to where all distances are right."""
        d, w = self.differences(q), c["1/m"]
        x = self.length_multipliers(c, d, d, 1.0)
        return q + w * self.forces(x, d, w, q.shape[-2])

    def check_atoms(self, atoms: int) -> None:
        """Refuse atoms that a state does not have."""
        check_range("index", self.index, atoms)

    def excess(self, q: Tensor) -> Tensor:
        """Compute the relative errors of the distances, ``(*batch, n)``, in the order of index."""
        i, j = self.index.unbind(-1)
        return (q[..., i, :] - q[..., j, :]).norm(dim=-1) / self.length.to(q) - 1

    @torch.no_grad()
    def refuse_dependent(self, c: Mapping[str, Tensor], q: Tensor) -> None:
        """Refuse clusters whose constraints do not have the full rank at a position."""
        least = max(DEPENDENT, 100 * torch.finfo(q.dtype).eps)
        for k, (start, _, size) in enumerate(self.groups):
            (d,) = self._group(k, self.differences(q))
            matrix = c[f"S{k}"] * products(d, d)
            scale = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(q.dtype).tiny).rsqrt()
            values = torch.linalg.eigvalsh(matrix * scale.unsqueeze(-1) * scale.unsqueeze(-2))
            wrong = (values[..., 0] < least).reshape(-1, values.shape[-2]).any(0)
            if bool(wrong.any()):
                first = start + size * int(wrong.nonzero()[0])
                atoms = self.index[self.order[first : first + size]].unique().tolist()
                raise ValueError(
                    f"the constraints of atoms {atoms} are not independent at the start: either "
                    "there are more than these atoms can have, or all atoms of one are of infinite "
                    "mass. Leave out some."
                )

    def _group(self, k: int, *values: Tensor) -> list[Tensor]:
        """Select the clusters of a group from values with a last axis of constraints."""
        start, stop, size = self.groups[k]
        return [x[..., start:stop].unflatten(-1, (-1, size)) for x in values]


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(-1) == y.unsqueeze(-2)).double()


def _refuse_repeated(pairs: Tensor, lengths: Tensor) -> None:
    _, number, count = pairs.sort(-1).values.unique(dim=0, return_inverse=True, return_counts=True)
    if int(count.max()) > 1:
        rows = (number == count.argmax()).nonzero().flatten()
        found = lengths[rows].unique().tolist()
        contradiction = f", with the lengths {found}, which contradict each other"
        raise ValueError(
            f"index gives the pair {pairs[rows[0]].tolist()} in the rows {rows.tolist()}"
            f"{contradiction if len(found) > 1 else ''}: give each pair once."
        )


def _clusters(pairs: Tensor, count: int) -> Tensor:
    """Return for each atom the smallest number of an atom that constraints join it to."""
    label, ends = torch.arange(count), pairs.T.flatten()
    while True:
        low = label[pairs].min(-1).values.repeat(2)
        found = label.scatter_reduce(0, ends, low, "amin")
        found = found[found]
        if torch.equal(found, label):
            return label
        label = found
