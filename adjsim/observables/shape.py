"""Differences between shapes of one molecule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from adjsim.core.arguments import as_flag
from adjsim.core.typing import Array, Energies, Number, PositionsLike
from adjsim.observables.members import (
    centred,
    length,
    members,
    positions,
    reference_like,
    root,
    shares,
    vectors,
)
from adjsim.observables.neighbours import all_pairs, optional_box, refuse_not_finite, values_unknown
from adjsim.observables.transport import as_frames

# Rounding errors of the positions below which a difference of shapes is zero.
ROUNDING = 16.0
# Alignments to the mean structure, which converge by a factor of about (fluctuation / size)^2.
ALIGNMENTS = 200


def rmsd(
    position: PositionsLike, reference: Array, *, weights: Number | None = None, align: bool = True
) -> Energies:
    """Compute the root mean squared deviation from a reference structure, ``(*batch,)``::

        rmsd^2 = min over R, t of sum_i w_i |R q_i + t - reference_i|^2 / sum_i w_i

    R is a proper rotation, so a molecule and its mirror image differ (Kabsch, Acta Cryst. A 32, 922
    (1976)). At the minimum the derivative with respect to R is zero, so the gradient needs no
    derivative of R: it is right where singular values coincide, as in planar, linear and symmetric
    molecules. First and second derivatives are those of the minimum, higher ones are not.

    - At zero the rmsd has a kink like that of ``|x|``. Value and gradient are taken as zero there,
      and with alignment up to 16 rounding errors of the positions. A restraint or a minimiser needs
      :func:`mean_squared_deviation`, which has no kink there.
    - Where several rotations are equally good, as for a straight chain and a bent reference, the
      rmsd has a kink too. The gradient is that of a mean of these rotations. Second derivatives
      leave them out.

    Args:
        position: ``(*batch, atoms, dim)``, not wrapped into a box.
        reference: ``(atoms, dim)``, or one for each system. It may carry a gradient.
        weights: ``(atoms,)``, such as the masses, or zero for atoms that are left out; None: equal.
        align: whether to minimise over R and t; if not, R is one and t is zero.

    Raises:
        ValueError: a reference or weights of another size, weights that are negative or all zero.
    """
    q = positions("rmsd", position)
    y, w = reference_like(q, reference), shares("weights", weights, q)
    return root(_deviation(q, y, w, align), _noise(w, q, y) if align else 0.0)


def mean_squared_deviation(
    position: PositionsLike, reference: Array, *, weights: Number | None = None, align: bool = True
) -> Energies:
    """Compute the square of :func:`rmsd`, length^2, ``(*batch,)``.

    First and second derivatives are right at zero too, so it serves as an energy. Arguments, errors
    and the treatment of several equally good rotations are those of :func:`rmsd`.
    """
    q = positions("mean_squared_deviation", position)
    return _deviation(q, reference_like(q, reference), shares("weights", weights, q), align)


def _deviation(q: Tensor, y: Tensor, w: Tensor, align: bool) -> Tensor:
    if not as_flag("align", align):
        return (w * (q - y) ** 2).sum((-1, -2))
    x, y = centred(q, w), centred(y, w)
    fit = _fit(x, y, w)
    turned = x @ fit.rotation
    # The minimum to second order in the change of the products, which is zero in value.
    change = _change(fit.axes.transpose(-1, -2) @ _products(turned, y, w) @ fit.axes)
    gain = (change - change.transpose(-1, -2)) ** 2 * fit.compliance
    # What each of several rotations contributes to the gradient is zero in their mean.
    along = torch.where(fit.several, change.diagonal(dim1=-2, dim2=-1), 0.0)
    return (w * (turned - y) ** 2).sum((-1, -2)) - gain.sum((-1, -2)) / 2 + 2 * along.sum(-1)


def aligned(position: PositionsLike, reference: Array, *, weights: Number | None = None) -> Tensor:
    """Move and turn a structure to the place where it is closest to a reference.

    Rotation, translation, arguments and the order of right derivatives are those of :func:`rmsd`. A
    rotation that is not determined, as that of a linear molecule about its axis, is arbitrary, and
    its derivative is taken as zero. So atoms with a weight may not be on a line if others are not.

    Raises:
        ValueError: as :func:`rmsd`, or weights of too few atoms for a rotation of the others.
    """
    q = positions("aligned", position)
    y, w = reference_like(q, reference), _frame(weights, q)
    centre = (w * y).sum(-2, keepdim=True)
    return _superposed(centred(q, w), y - centre, w) + centre


def flexibility(
    position: Float[Tensor, "time *batch atoms dim"] | Array, weights: Number | None = None
) -> Float[Tensor, "*batch atoms"]:
    """Compute the root mean squared fluctuation (RMSF) of each atom, ``(*batch, atoms)``::

        rmsf_i = sqrt(mean over time of |x_i - mean of x_i|^2)

    x are positions :func:`aligned` to their own mean. Alignment and mean are repeated from the
    first frame until the mean is constant to rounding errors, which takes ten repetitions or so for
    a folded molecule. Atoms that move much less than the others, given by the weights, make a
    better frame.

    The gradient is that of all repetitions, and zero for an atom that does not move. Its memory is
    that of some ten trajectories for each repetition. Transforms of torch.func cannot see whether
    the mean is constant, so there all 200 repetitions are made.

    Raises:
        ValueError: NaN, fewer than two frames, weights as in :func:`aligned`, or frames that have
            no common shape, for which 200 repetitions do not converge.
    """
    q = refuse_not_finite(as_frames("position", position))
    if len(q) < 2:
        raise ValueError("flexibility needs at least two frames; position has one.")
    w = _frame(weights, q)
    x, noise = centred(q, w), _noise(w, q).mean(0).unsqueeze(-1)
    turned, mean = x, x[0]
    for _ in range(ALIGNMENTS):
        turned, before = _superposed(x, mean, w), mean
        mean = turned.mean(0)
        if not values_unknown():
            moved, size = (x.detach().abs().max() for x in (mean - before, mean))
            if bool(moved <= 10 * ROUNDING * torch.finfo(mean.dtype).eps * size):
                break
    else:
        if not values_unknown():
            raise ValueError(
                f"the mean structure still changes after {ALIGNMENTS} alignments: the frames have "
                "no common shape. Give weights that are zero for the flexible part."
            )
    return root(((turned - mean) ** 2).sum(-1).mean(0), noise)


def distance_rmsd(
    position: PositionsLike,
    reference: Array,
    pairs: Array | None = None,
    *,
    box: Array | None = None,
) -> Energies:
    """Compute the root mean squared difference of distances in a molecule, ``(*batch,)``::

        drmsd^2 = mean over pairs of (|q_i - q_j| - |reference_i - reference_j|)^2

    It needs no alignment, and does not tell a molecule from its mirror image. Its gradient is taken
    as zero where it is zero, and that of a distance of zero likewise.

    The pairs are ``(n, 2)`` indices of atoms, by default all, and the box is that of both
    structures.

    Raises:
        ValueError: a reference of another size, an index out of range, a single atom.
    """
    q = positions("distance_rmsd", position, atoms=2 if pairs is None else 1)
    y, cell = reference_like(q, reference), optional_box(box)
    if pairs is None:
        now, then = (length(all_pairs(x, cell).vector.transpose(-1, -2)) for x in (q, y))
    else:
        first, second = members("pairs", pairs, 2, q).unbind(-1)
        now, then = (length(vectors(x, first, second, cell)) for x in (q, y))
    return root(((now - then) ** 2).mean(-1))


class _Fit(NamedTuple):
    """The rotation that takes x to y, ``x @ rotation``, and its stiffness; all are constants.

    ``axes`` are those in which the inertia ``sum w x y`` of the turned x is diagonal, with entries
    s. A turn by a small angle in the plane of axes a and b costs ``(s_a + s_b) angle^2 / 2``;
    ``compliance`` is the inverse of this sum, and zero where the turn costs nothing. ``several``
    marks the axes that such turns mix, those of the plane of the smallest s; all if s is zero.
    """

    rotation: Tensor
    axes: Tensor
    compliance: Tensor
    several: Tensor


def _fit(x: Tensor, y: Tensor, w: Tensor) -> _Fit:
    with forward_ad._set_fwd_grad_enabled(False):
        # NaN has no singular values, and its system alone becomes NaN.
        u, s, v = torch.linalg.svd(_products(x, y, w).detach().nan_to_num(0.0, 0.0, 0.0))
        last = torch.where(torch.linalg.det(u @ v) < 0, -1.0, 1.0).to(s)
        signs = torch.cat([torch.ones_like(s[..., 1:]), last.unsqueeze(-1)], -1)
        s = s * signs
        stiffness = s.unsqueeze(-1) + s.unsqueeze(-2)
        # Singular values are sums, with the rounding errors of the products of both sizes.
        sizes = [(w * z.detach() ** 2).sum((-1, -2)) for z in (x, y)]
        noise = ROUNDING * torch.finfo(s.dtype).eps * (sizes[0] * sizes[1]).sqrt()
        free = stiffness <= noise[..., None, None]
        compliance = torch.where(free, 0.0, 1 / torch.where(free, 1.0, stiffness))
        plane = free.diagonal(offset=1, dim1=-2, dim2=-1)[..., -1:]
        smallest = torch.arange(s.shape[-1], device=s.device) >= s.shape[-1] - 2
        several = plane & (smallest | free.diagonal(dim1=-2, dim2=-1))
        return _Fit((u * signs.unsqueeze(-2)) @ v, v.transpose(-1, -2), compliance, several)


def _superposed(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Turn centred positions x to centred positions y."""
    fit = _fit(x, y, w)
    turned = x @ fit.rotation
    # Two steps of Newton's method about a constant minimum: they turn by zero, but carry the first
    # and second derivatives.
    for _ in range(2):
        tilt = fit.axes.transpose(-1, -2) @ _products(turned, y, w) @ fit.axes
        angle = _change(tilt - tilt.transpose(-1, -2)) * fit.compliance
        turn = fit.axes @ angle @ fit.axes.transpose(-1, -2)
        turned = turned + turned @ turn + turned @ turn @ turn / 2
    return turned


def _products(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (w * x).transpose(-1, -2) @ y


def _change(x: Tensor) -> Tensor:
    """Subtract the value and keep the derivatives, in forward mode too."""
    with forward_ad._set_fwd_grad_enabled(False):
        constant = x.detach().clone()
    return x - constant


def _frame(weights: Number | None, q: Tensor) -> Tensor:
    """Convert the weights of an alignment, which must determine where the other atoms are."""
    w = shares("weights", weights, q)
    atoms, dim = q.shape[-2:]
    count = atoms if values_unknown() else int((w > 0).sum())
    if count < min(dim, atoms):
        raise ValueError(
            f"weights must be positive for at least {min(dim, atoms)} atoms, not on a line, which "
            f"determine the rotation; got {count}."
        )
    return w


def _noise(w: Tensor, *structures: Tensor) -> Tensor:
    """Compute the mean square of the rounding errors below which an rmsd is zero."""
    squares = sum((w * x.detach() ** 2).sum((-1, -2)) for x in structures)
    return (ROUNDING * torch.finfo(w.dtype).eps) ** 2 * torch.as_tensor(squares)
