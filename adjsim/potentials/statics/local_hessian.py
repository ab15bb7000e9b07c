"""Sparse Hessians of atoms that interact with near atoms alone, found by products and factorised.

Two atoms that share no neighbour can be displaced in one product, since their responses do not
overlap (Curtis, Powell and Reid, J. Inst. Math. Appl. 13, 117 (1974)). So a Hessian costs dim
products for each colour of a colouring in which such atoms may share a colour. The range of the
interaction is not known: a range is assumed, and the matrix that follows from it is compared with
the Hessian on random vectors. A matrix that fails is discarded, and a longer range is tried.
"""

from __future__ import annotations

from itertools import count
from typing import Any, cast

import numpy as np
import scipy.sparse as sparse
import torch
from scipy.sparse.linalg import splu
from scipy.spatial import KDTree

from adjsim.potentials.statics.curvature import Hessian, IterativeInverse, extreme, operator

# Assumed ranges, in units of the largest distance of an atom to its nearest neighbour.
RANGES = (1.8, 2.7, 4.0)
# Largest allowed difference between the matrix and the Hessian on a random vector, in epsilons of
# the product.
AGREEMENT = 2**16


def local_hessian(hessian: Hessian, pattern: Any = None) -> Any:
    """Find the Hessian as a sparse matrix, or return None if that does not spare products.

    ``pattern`` is a matrix ``(free, free)`` that is nonzero where atoms are taken to interact. If
    it is wrong or None, the pattern is taken from distances.
    """
    found = None if pattern is None else _recovered(hessian, pattern)
    if found is not None:
        return found
    q = hessian.restrict(hessian.q).reshape(-1, hessian.q.shape[-1])
    if not len(q) > 1:
        return None
    tree = KDTree(q)
    spacing = float(tree.query(q, k=2)[0][:, 1].max())
    for multiple in RANGES:
        pairs = tree.query_pairs(multiple * spacing, output_type="ndarray")
        if not 2 * len(pairs) < len(q) ** 2 / 4:
            return None
        both = np.concatenate([pairs, pairs[:, ::-1], np.repeat(np.arange(len(q))[:, None], 2, 1)])
        found = _recovered(hessian, _ones(both[:, 0], both[:, 1], len(q)))
        if found is not None:
            return found
    return None


def atom_pattern(matrix: Any, dim: int) -> Any:
    """Return the matrix ``(atoms, atoms)`` that is nonzero where the blocks of a matrix are."""
    entries = matrix.tocoo()
    kept = entries.data != 0
    return _ones(entries.row[kept] // dim, entries.col[kept] // dim, matrix.shape[0] // dim)


def _ones(i: np.ndarray, j: np.ndarray, atoms: int) -> Any:
    """Return a matrix ``(atoms, atoms)`` of ones at these rows and columns."""
    return sparse.csr_matrix((np.ones(len(i)), (i, j)), shape=(atoms, atoms))


def _recovered(hessian: Hessian, pattern: Any) -> Any:
    """Recover a matrix of this pattern from products; None if the Hessian is not of it."""
    atoms, dim = pattern.shape[0], hessian.q.shape[-1]
    colour = _colouring(pattern @ pattern)
    colours = int(colour.max()) + 1
    if colours > atoms / 2:
        return None
    probes = np.zeros((colours, dim, atoms, dim))
    for axis in range(dim):
        probes[colour, axis, np.arange(atoms), axis] = 1.0
    found = hessian.products(probes.reshape(colours * dim, -1)).reshape(probes.shape)
    entries = pattern.tocoo()
    # Rows of a block are coordinates of the atom of its row, columns those of the other atom.
    blocks = found[colour[entries.col], :, entries.row, :].transpose(0, 2, 1)
    shape = hessian.shape
    matrix = sparse.bsr_matrix((blocks, pattern.indices, pattern.indptr), shape=shape).tocsc()
    matrix.eliminate_zeros()
    matrix = 0.5 * (matrix + matrix.T)
    tests = np.random.default_rng(0).standard_normal((2, shape[0]))
    expected = hessian.products(tests)
    allowed = AGREEMENT * float(torch.finfo(hessian.q.dtype).eps)
    error = np.linalg.norm((matrix @ tests.T).T - expected)
    return matrix.tocsc() if error <= allowed * np.linalg.norm(expected) else None


def _colouring(conflicts: Any) -> np.ndarray:
    """Give each atom the first colour that none of those in conflict with it has."""
    colour = np.full(conflicts.shape[0], -1)
    starts, others = conflicts.indptr, conflicts.indices
    for i in range(len(colour)):
        taken = set(colour[others[starts[i] : starts[i + 1]]].tolist())
        colour[i] = next(mine for mine in count() if mine not in taken)
    return colour


def positive_factor(matrix: Any, shift: float) -> Any:
    """Factorise a symmetric matrix plus ``shift 1``; None if the sum is not positive."""
    shifted = matrix + shift * sparse.identity(matrix.shape[0])
    options = {"SymmetricMode": True}
    matrix = cast(Any, shifted.tocsc())
    factor = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
    # By Sylvester's law of inertia pivots on the diagonal have the signs of the eigenvalues.
    diagonal = np.array_equal(factor.perm_r, factor.perm_c)
    return factor if diagonal and bool((factor.U.diagonal() > 0).all()) else None


class LocalInverse(IterativeInverse):
    """The pseudo-inverse of a sparse Hessian by a factorisation.

    With the flat directions N as columns, the least-norm solution is x of::

        [ H    N ] [x]   [b]
        [ N^T  0 ] [y] = [0]
    """

    def __init__(self, hessian: Hessian, matrix: Any) -> None:
        self.matrix, self._factor = matrix, None
        super().__init__(hessian)

    def estimate(self, b: np.ndarray) -> np.ndarray:
        b = self.project(b)
        x = self.solution(b)
        # One refinement brings the residual to rounding.
        return self.project(x + self.solution(b - self.matrix @ x))

    def _largest(self) -> float:
        return abs(extreme(self.matrix, "LM", 1e-2)[0])

    def check(self) -> None:
        if positive_factor(self.matrix, self.soft_limit) is None:
            self._check_lowest(extreme(self.matrix, "SA", 1e-3)[0])
        super().check()

    def _softest(self) -> np.ndarray:
        # No curvature is far below zero, so the lowest one is the one nearest to zero, whose
        # inverse is the largest.
        return extreme(operator(self.hessian.shape, self.solution), "LM", 1e-3)[1]

    def solution(self, b: np.ndarray) -> np.ndarray:
        """Solve the system above without refinement."""
        columns = self.flat.shape[1]
        if self._factor is None or self._factor[0] != columns:
            # The shift is below the rounding of the matrix. It keeps a matrix regular that has
            # flat directions which are not known yet.
            shift = self.epsilon * self.largest_curvature
            whole = self.matrix + shift * sparse.identity(self.hessian.shape[0])
            if columns:
                whole = sparse.bmat([[whole, self.flat], [self.flat.T, None]])
            self._factor = columns, splu(cast(Any, whole.tocsc()))
        solved = self._factor[1].solve(np.concatenate([b.ravel(), np.zeros(columns)]))
        return solved[: b.size]
