"""The influence of waves on the energy of charges, in a box whose rows are stretched.

With the integers n of a wave, the rows h of the box, ``b_r`` the columns of its inverse and S(n)
the sum of charges times their phases::

    U = 1/2 sum over n of G(n) |S(n)|^2
    G = 4 pi share / V exp(-k^2 / 4 alpha^2) / k^2        k = sum over r of k_r, k_r = 2 pi n_r b_r
    G = -pi share / (V alpha^2)                           for n = 0

The wave n = 0 has the energy of a uniform background that makes a charged box neutral. Charges that
are stretched with the box keep their phases, so S(n) does not depend on the strain e_r of a row,
the logarithm of its stretch, and only V and ``k_r -> k_r exp(-e_r)`` do. With ``p_r = k . k_r`` and
``t = 1/k^2 + 1/(4 alpha^2)``::

    dG/de_r  = G L_r        L_r = 2 p_r t - 1
    dL_r/de_s = 4 p_r p_s / k^4 - 2 t (delta_rs p_r + k_r . k_s)

The force along the strain is ``W_r = -1/2 sum G L_r |S|^2``. A change v of the positions moves the
sums by T(n). Then ``v . F = -sum G Re(S* T)``, and for a cotangent c of W the sum
``f = v . F + c . W`` has, with ``G_c = sum over r of c_r G L_r``, the derivatives::

    by position      that of -sum Re(S* (G T + G_c S / 2)), with v fixed
    by the strain    -sum_i v_i F_i - sum G L_s Re(S* T) - 1/2 sum dG_c/de_s |S|^2

The second one is with the phases of the charges fixed. Its first term is by coordinate along the
rows, since v is fixed and its phases are not. Where one strain stretches all rows, a derivative is
the sum over them: ``L = 2 k^2 t - 3``, and ``dL/de = 4 - 4 k^2 t``.

Any energy whose G is a function h(k^2) over the volume has these derivatives, with t = -h'/h and
-dt/d(k^2) in place of 1/k^4. That of pairs with 1/r^6 has, with b = k / 2 alpha::

    4 pi h = pi^(3/2) alpha^3 / 3 ((1 - 2 b^2) exp(-b^2) + 2 sqrt(pi) b^3 erfc(b))

also for n = 0. See Essmann et al., J. Chem. Phys. 103, 8577 (1995).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.core.layout import is_tracing
from adjsim.core.operators import operator, shapes_of


class Waves(NamedTuple):
    """The waves of a box, and what their influence does not have from a strain.

    Attributes:
        numbers: ``(sides, 3, waves)`` integers. G is the mean of the sides.
        share: ``(waves,)``, over the volume of the box.
        multiplicity: ``(waves,)``, for how many waves each one stands in sums of derivatives of G.
        dual: ``(3, 3)``, the rows b_r.
        alpha: the inverse width of the Gaussians.
        power: of the distance in the energy of a pair, 1 or 6.
    """

    numbers: Tensor
    share: Tensor
    multiplicity: Tensor
    dual: Tensor
    alpha: float
    power: int


def shortened(dual: Tensor, strain: Tensor) -> Tensor:
    """Compute the rows of reciprocal cells, ``(*systems, 3, 3)``, of cells that are stretched."""
    return dual.to(strain) * torch.exp(-strain).mT


def influence(waves: Waves, strain: Tensor, c: Tensor | None = None) -> Tensor:
    """Compute G and its derivatives in columns, ``(*systems, columns, waves)``.

    They are G and dG/de_s, and with c also G_c and dG_c/de_s. Strain and c are ``(*systems, 1, 1)``
    where all rows are stretched together, and else ``(*systems, 1, 3)``.
    """
    function = torch.ops.adjsim.influence if is_tracing() else _influence
    return function(*waves, strain, c)


def _influence(
    numbers: Tensor, share: Tensor, multiplicity: Tensor, dual: Tensor, alpha: float,
    power: int, strain: Tensor, c: Tensor | None,
) -> Tensor:  # fmt: skip
    n = numbers
    # An axis for the sides, before those of coordinates and waves.
    e = strain.to(numbers).unsqueeze(-3)
    rows = 2 * math.pi * shortened(dual, e)
    metric = rows @ rows.mT
    # The part of a strain is that of its row, or the sum where it stretches all of them.
    axes = e.shape[-1]
    every = n * (metric @ n)
    square = every.sum(-2, keepdim=True)
    p = square if axes == 1 else every
    value, fall, bend = _decay(square, alpha, power)
    value = value * share * (4 * math.pi * torch.exp(-3 / axes * e.sum(-1, keepdim=True)))
    t = 2 * fall
    rate, counted = t * p - 3 / axes, multiplicity * value
    columns = [value, counted * rate]
    if c is not None:
        c = c.to(numbers).unsqueeze(-3).mT
        along = (c * rate).sum(-2, keepdim=True)
        turned = c * p + (c * p if axes == 1 else n * (metric @ (c * n)))
        slope = 4 * bend * (c * p).sum(-2, keepdim=True) * p - t * turned
        columns += [value * along, counted * (along * rate + slope)]
    found = torch.cat(columns, -2)
    return (found.mean(-3) if len(n) > 1 else found.squeeze(-3)).to(strain)


def _decay(square: Tensor, alpha: float, power: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute h(k^2), t = -h'/h and -dt/d(k^2)."""
    beta = 1 / (4 * alpha**2)
    # One for the wave n = 0, whose inverse is taken as zero.
    origin = (square == 0).to(square)
    inverse = 1 / (square + origin) - origin
    if power == 1:
        return torch.exp(-beta * square) * inverse - beta * origin, inverse + beta, inverse**2
    # Avoid sqrt(0), whose derivative is infinite: b of the wave n = 0 is zero.
    b = (beta * (square + origin)).sqrt() * (1 - origin)
    factor = math.sqrt(math.pi) * alpha**3 / 12
    # Beyond this the exponential is zero, and a ratio of scaled functions would lose its digits.
    root = b.clamp(max=27.0)
    scaled = math.sqrt(math.pi) * torch.special.erfcx(root)
    whole = 1 - 2 * root**2 + 2 * root**3 * scaled
    fall = 3 * beta * (1 - root * scaled) / whole
    second = 1.5 * beta**2 * scaled * (1 / (root + origin) - origin) / whole
    return factor * torch.exp(-(b**2)) * whole, fall, second - fall**2


@operator("influence")
def influence_operator(
    numbers: Tensor, share: Tensor, multiplicity: Tensor, dual: Tensor, alpha: float,
    power: int, strain: Tensor, c: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute the influence in a traced step, with the bits of an eager one."""
    return _influence(numbers, share, multiplicity, dual, alpha, power, strain, c)


@shapes_of(influence_operator)
def _(numbers: Tensor, share: Tensor, *rest: Any) -> Tensor:
    *_, strain, c = rest
    columns = (1 + strain.shape[-1]) * (1 if c is None else 2)
    return strain.new_empty((*strain.shape[:-2], columns, len(share)))


def wave_virial(energies: Tensor, vectors: Tensor, alpha: float, power: int) -> Tensor:
    """Compute the virial of waves with these energies ``(*batch, waves)``.

    A wave has the virial ``e (1 - 2 t k k^T)``, since V and k change with strain, and S(k) does
    not. The wave k = 0 has the unit matrix.
    """
    _, factor, _ = _decay((vectors * vectors).sum(-1), alpha, power)
    unit = torch.eye(3, dtype=vectors.dtype, device=vectors.device)
    return energies.sum(-1)[..., None, None] * unit - 2 * torch.einsum(
        "...k,ka,kb->...ab", energies * factor, vectors, vectors
    )
