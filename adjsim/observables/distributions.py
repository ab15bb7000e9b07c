"""Distributions of distances and angles."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from adjsim.core.arguments import as_number, as_positive, as_tensor, wrong_shape
from adjsim.core.box import checked_box, volume
from adjsim.core.layout import outside_tracing
from adjsim.core.typing import Array, PositionsLike
from adjsim.observables.members import points, positions
from adjsim.observables.neighbours import (
    PairVectors,
    optional_box,
    refuse_no_neighbours,
    refuse_not_finite,
    sum_over_pairs,
    values_unknown,
)

# Widths at which a Gaussian is below the rounding error of float64.
TAIL = 9.0


def radial_distribution(position: PositionsLike, edges: Array, box: Array) -> Tensor:
    """Compute the radial distribution function g(r) in periodic boxes, averaged over the batch::

        g(r) = (pairs in the shell) / (atoms (atoms - 1) / 2) * V / (shell volume)

    It is a histogram, ``(bins,)``, and has no gradient. It is 1 where the fluid has no structure.

    Args:
        position: ``(*batch, atoms, 3)``; frames and replicas are averaged alike.
        edges: ``(bins + 1,)``, increasing distances, at most half the smallest perpendicular width
            of each box.
        box: ``(3,)`` lengths or ``(3, 3)`` rows; or the box of each system, ``(*batch, 3)`` or
            ``(*batch, 3, 3)``, as that of a trajectory at constant pressure. A box of shape
            ``(3, 3)`` has rows, also where there are three systems.

    Raises:
        ValueError: fewer than two atoms, no frames, edges out of range, boxes of other systems.
    """
    q = refuse_not_finite(_fluid("radial_distribution", position, box).detach())
    bounds = as_tensor("edges", edges).detach().double().cpu()
    if bounds.ndim != 1 or len(bounds) < 2 or not bool((bounds[1:] > bounds[:-1]).all()):
        raise wrong_shape("edges", "at least two increasing distances", bounds)
    if q.numel() == 0:
        raise ValueError(f"radial_distribution needs a frame; position has shape {tuple(q.shape)}.")
    largest, atoms = float(bounds[-1]), q.shape[-2]

    def counted(pairs: PairVectors) -> Tensor:
        return torch.histogram(pairs.distance.double().cpu(), bounds).hist

    frames = q.reshape(-1, *q.shape[-2:])
    cells = [checked_box(x.detach(), largest) for x in _boxes(q, box)]
    each = cells * len(frames) if len(cells) == 1 else cells
    counts = torch.stack(
        [
            sum_over_pairs(frame, cell, largest, counted) * float(volume(cell))
            for frame, cell in zip(frames, each, strict=True)
        ]
    ).mean(0)
    shells = 4 / 3 * math.pi * (bounds[1:] ** 3 - bounds[:-1] ** 3)
    return (counts / (atoms * (atoms - 1) / 2) / shells).to(q.device)


def histogram(
    values: Array, edges: Array, *, width: float | int | None = None, period: float | None = None
) -> Tensor:
    """Compute the share of each value that is in each bin, ``(*batch, n, bins)``.

    The mean over frames is the histogram of each value, so ``TimeAverage`` of this function is that
    of a run: of distances, or with ``period=2 * math.pi`` of :func:`dihedrals`. A sum over n pools
    values, and a division by the widths of the bins makes densities.

    Without ``width`` a share is 0 or 1, as in ``numpy.histogram``: bins hold their lower edge, the
    last one both edges, NaN is in no bin, and there is no gradient. With a width the share is that
    of a Gaussian about the value, differentiable in the values::

        share of bin k = Phi((e_{k+1} - x) / width) - Phi((e_k - x) / width)
        Phi(y)         = (1 + erf(y / sqrt(2))) / 2

    A smooth histogram is that of values with noise of this width. A width of half a bin changes it
    little; a smaller one makes gradients noisy.

    Args:
        values: ``(*batch, n)``, such as distances, in the unit of the edges.
        edges: ``(bins + 1,)``, increasing.
        width: standard deviation of the Gaussian, or None.
        period: the period of angles, or None. Values are then taken in the period from the first
            edge on, and Gaussians are summed over three periods; edges span one period or less.

    Raises:
        ValueError: edges that do not increase, or span more than a period; a width or a period
            that is not positive; a width above a fifth of the period.
    """
    x = as_tensor("values", values)
    with outside_tracing():
        bounds = as_tensor("edges", edges).detach().to(x)
        if bounds.ndim != 1 or len(bounds) < 2 or not bool((bounds[1:] > bounds[:-1]).all()):
            raise wrong_shape("edges", "at least two increasing numbers", bounds)
        turn = None if period is None else as_positive("period", period)
        span = float(bounds[-1] - bounds[0])
        if turn is not None and span > turn * (1 + 1e-6):
            raise ValueError(f"edges span {span:g}, which is more than the period {turn:g}.")
    if width is None:
        x = x.detach().unsqueeze(-1)
        if turn is not None:
            x = torch.remainder(x - bounds[0], turn) + bounds[0]
        with outside_tracing():
            # The last bin holds its upper edge.
            last = torch.nextafter(bounds[-1:], torch.full_like(bounds[-1:], math.inf))
            upper = torch.cat([bounds[1:-1], last])
        return ((x >= bounds[:-1]) & (x < upper)).to(x)
    size = as_positive("width", width) * math.sqrt(2)
    # Three periods then hold all but 3e-7 of a Gaussian.
    if turn is not None and size > math.sqrt(2) * turn / 5:
        raise ValueError(f"width {width:g} is more than a fifth of the period {turn:g}.")
    if turn is None:
        below = torch.erf((bounds - x.unsqueeze(-1)) / size)
    else:
        x = x - turn * torch.floor((x.detach() - bounds[0]) / turn)
        images = (bounds - x.unsqueeze(-1) + turn * k for k in (-1, 0, 1))
        below = sum((torch.erf(image / size) for image in images), torch.zeros_like(bounds))
    return 0.5 * (below[..., 1:] - below[..., :-1])


def smooth_radial_distribution(
    position: PositionsLike, r: Array, box: Array, *, width: float
) -> Tensor:
    """Compute a radial distribution function, differentiable in position and box, ``(*batch, n)``::

        g(r) = V / (atoms (atoms - 1) / 2) * sum over i<j of K(r - r_ij) / (4 pi r_ij^2)

    K is a Gaussian of standard deviation ``width``. To leading order it adds ``width^2/2 g''(r)``
    to the true function: a tenth of the width of the first peak is a good choice.
    :func:`radial_distribution` is the exact histogram. Memory is that of n numbers for each pair.

    Args:
        position, box: as for :func:`radial_distribution`, except that frames are not averaged.
        r: ``(n,)`` distances, up to half the smallest perpendicular width of the box. Beyond this
            width there are no nearest images, so within three kernel widths of it the estimate is
            too low (by 2 width/L at the end of a cube's range).
        width: standard deviation of the kernel, length.
    """
    q = _fluid("smooth_radial_distribution", position, box)
    at, width = points("r", r, "distances"), as_positive("width", width)
    boxes = _boxes(q, box)
    if len(boxes) > 1:
        each = zip(q.reshape(-1, *q.shape[-2:]), boxes, strict=True)
        found = [smooth_radial_distribution(x, at, own, width=width) for x, own in each]
        return torch.stack(found).reshape(*q.shape[:-2], len(at))
    with outside_tracing():
        largest = float(at.detach().max())
        cell, atoms = checked_box(boxes[0], largest), q.shape[-2]
        factor = volume(cell) / (atoms * (atoms - 1) / 2)

    def density(pairs: PairVectors) -> Tensor:
        distance = pairs.distance
        return _sum_of_kernels(at, distance, factor / (4 * math.pi * distance**2), width)

    return sum_over_pairs(q, cell, largest + TAIL * width, density)


def angular_distribution(
    position: PositionsLike,
    angles: Array,
    box: Array | None = None,
    *,
    cutoff: float | int,
    width: float,
    start: float | int | None = None,
) -> Tensor:
    """Compute a differentiable distribution of angles between bonds, per radian, ``(*batch, n)``::

        p(a) = sum over triples of w_ij w_ik K(a - a_jik) / sum over triples of w_ij w_ik

    A triple is an atom i and two neighbours j<k, and a_jik is the angle at i. K is a Gaussian of
    standard deviation ``width``, reflected at 0 and pi, so p integrates to one. To leading order it
    adds ``width^2/2 p''(a)`` to the distribution. Directions without order have ``p = sin(a)/2`` in
    three dimensions and ``1/pi`` in two.

    The weight w(r) of a neighbour is one up to ``start`` and falls to zero at ``cutoff``::

        w = 1 - 10 x^3 + 15 x^4 - 6 x^5,  x = (r - start) / (cutoff - start)

    A sharp cutoff is the limit ``start -> cutoff``. There the gradient of the number of neighbours
    is lost, so the gradient is wrong. Put ``start`` and ``cutoff`` on both sides of the first
    minimum of g(r), where few neighbours have a weight between zero and one.

    Memory is that of n numbers for each triple: of the triples within the cutoff, but of all
    ``atoms (atoms - 1) (atoms - 2) / 2`` in a compiled or transformed function.

    Args:
        position: ``(*batch, atoms, dim)``, in two dimensions or more.
        angles: ``(n,)``, radians, between 0 and pi.
        box: the periodic box, or None.
        cutoff: at most half the smallest perpendicular width of the box.
        width: standard deviation of the kernel, radians, at most pi/8.
        start: None: 0.9 ``cutoff``.

    Raises:
        ValueError: an argument out of range, or a system where no atom has two neighbours.
    """
    q = positions("angular_distribution", position, least=2)
    at = points("angles", angles, "radians")
    with outside_tracing():
        if not bool(((at >= 0) & (at <= math.pi)).all()):
            raise ValueError(
                "angles must be radians between 0 and pi; got "
                f"{float(at.min()):g} to {float(at.max()):g}."
            )
    cutoff, width = as_number("cutoff", cutoff), as_number("width", width)
    start = 0.9 * cutoff if start is None else as_number("start", start)
    if not 0 < width <= math.pi / 8:
        raise ValueError(f"width must be positive and at most pi/8 radians; got {width}.")
    if not 0 <= start < cutoff:
        raise ValueError(f"start must be between 0 and the cutoff {cutoff:g}; got {start:g}.")
    cell = optional_box(box, cutoff)

    def density(pairs: PairVectors) -> Tensor:
        r = pairs.distance
        x = ((r - start) / (cutoff - start)).clamp(0, 1)
        direction, weight = pairs.vector / r.unsqueeze(-2), 1 - x**3 * (10 - 15 * x + 6 * x * x)
        first, second, sign = _bonds_at_one_atom(pairs)
        weights = weight[..., first] * weight[..., second]
        total = weights.sum(-1, keepdim=True)
        refuse_no_neighbours(total, "angular_distribution", cutoff)
        angle = _angle(direction[..., first], sign.to(q) * direction[..., second])
        return _sum_of_kernels(at, *_reflected(angle, weights, width), width) / total

    # There are many more triples than pairs, so the tree is used for small systems too.
    return sum_over_pairs(q, cell, cutoff, density, large=0)


def _sum_of_kernels(at: Tensor, centre: Tensor, weight: Tensor, width: float) -> Tensor:
    """Sum Gaussians with centres and weights ``(*batch, terms)`` at n points: ``(*batch, n)``."""
    x = (at.to(centre) - centre.unsqueeze(-1)) / (width * math.sqrt(2))
    total = (weight.unsqueeze(-1) * torch.exp(-x * x)).sum(-2)
    return total / (width * math.sqrt(2 * math.pi))


def _reflected(angle: Tensor, weight: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """Add the reflections at 0 and pi to angles, where their kernels reach into this range."""
    images = [-angle, 2 * math.pi - angle]
    if angle.ndim > 1 or values_unknown():
        return torch.cat([angle, *images], -1), torch.cat([weight] * 3, -1)
    near = [angle < TAIL * width, angle > math.pi - TAIL * width]
    images = [image[chosen] for image, chosen in zip(images, near, strict=True)]
    weights = [weight[chosen] for chosen in near]
    return torch.cat([angle, *images]), torch.cat([weight, *weights])


def _angle(a: Tensor, b: Tensor) -> Tensor:
    """Compute the angles between unit vectors ``(..., dim, n)``, accurate at 0 and pi too.

    See Kahan, "How futile are mindless assessments of roundoff" (2006), section 12.
    """
    apart, along = ((a - b) ** 2).sum(-2), ((a + b) ** 2).sum(-2)
    # The root of zero has no derivative. The distribution is even about these angles, so its
    # derivative there is zero.
    tiny = torch.finfo(a.dtype).tiny
    return 2 * torch.atan2(apart.clamp(min=tiny).sqrt(), along.clamp(min=tiny).sqrt())


def _bonds_at_one_atom(pairs: PairVectors) -> tuple[Tensor, Tensor, Tensor]:
    """List all two pairs that share an atom; -1 where it is first in one, second in the other."""
    i, j = pairs.indices()
    count = len(i)
    atom = np.concatenate([i, j])
    order = np.argsort(atom, kind="stable")
    size = np.bincount(atom, minlength=pairs.atoms)
    end = np.cumsum(size)[atom[order]]
    # Each pair is combined with the later ones of its atom.
    place = np.arange(2 * count)
    later = end - place - 1
    first = np.repeat(place, later)
    before = np.cumsum(later) - later
    second = first + 1 + np.arange(len(first)) - np.repeat(before, later)
    first, second = order[first], order[second]
    sign = np.where((first < count) == (second < count), 1.0, -1.0)
    found = (first % max(1, count), second % max(1, count), sign)
    with outside_tracing():
        one, other, signs = (torch.from_numpy(x).to(pairs.vector.device) for x in found)
    return one, other, signs


def _fluid(what: str, position: PositionsLike, box: Array | None) -> Tensor:
    """Convert the positions of several atoms in three dimensions, and refuse no box."""
    if box is None:
        raise ValueError(
            f"{what} needs a periodic box, (3,) lengths or (3, 3) rows, whose volume gives the "
            "density; got None."
        )
    return positions(what, position, dim=3, atoms=2)


def _boxes(q: Tensor, box: Array) -> list[Tensor]:
    """Return the box that all systems share, or that of each."""
    with outside_tracing():
        given, batch = as_tensor("box", box), q.shape[:-2]
        if given.ndim < 2 or given.shape == (3, 3):
            return [given]
        if given.shape[: len(batch)] != batch or given.ndim - len(batch) not in (1, 2):
            several = f", or one such for each system of {tuple(batch)}" if batch else ""
            raise wrong_shape("box", f"(3,) lengths or (3, 3) rows{several}", given)
        return list(given.reshape(-1, *given.shape[len(batch) :]))
