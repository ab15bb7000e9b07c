"""Pair potentials, written as a function of the squared distance.

With ``s_ij = |q_i - q_j|^2`` and ``U = sum over i<j of u(s_ij)``, every derivative that the adjoint
needs follows from u' and u'' elementwise, with d_ij = q_i - q_j and, for a vector v of the shape of
q, w_ij = v_i - v_j::

    F_i           = sum_j -2 u'(s_ij) d_ij
    (dF/dq v)_i   = sum_j -4 u''(s_ij) (d_ij . w_ij) d_ij - 2 u'(s_ij) w_ij    (symmetric)
    v . dF/dtheta = sum_ij -(d_ij . w_ij) du'(s_ij)/dtheta

so that no automatic differentiation passes through the geometry. Excluded pairs (an atom with
itself, pairs beyond the cutoff) get a safe distance before any division, so that values and
gradients stay finite. Their contribution is zero: the difference of an atom with itself is zero,
and pairs beyond the cutoff are masked.

All pairs are evaluated, which is efficient up to about a thousand atoms. Internally coordinates
come first, ``(dim, atoms, atoms)``, so that the last axis is long and vectorises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module

from adjsim._box import checked_box, differences, nearest_image
from adjsim._grid import Grid
from adjsim._inputs import as_number, describe_type, outside_inference_mode
from adjsim._layout import is_tracing, materialise_contiguous, memory_order, packed, unpacked
from adjsim._params import refuse_unknown, register
from adjsim._typing import Array, Energies, Number, Positions
from adjsim.potentials.base import DeferredVJP, Potential, Pullback, derivative
from adjsim.potentials.truncation import ForceShifted, Shifted, Switched, Truncation

SHIFTED = Shifted()


class PairPotential(Potential):
    """A sum over pairs i<j of ``pair_energy(s)``, with s the squared distance.

    Subclasses write ``pair_energy``; ``pair_slope`` (du/ds) and ``pair_curvature`` (d2u/ds2) follow
    from it, or are written too.

    Args:
        cutoff: pairs at or beyond this distance are excluded. None: no cutoff.
        truncation: how the energy ends at the cutoff: :class:`~adjsim.potentials.Shifted` (to
            zero), :class:`~adjsim.potentials.ForceShifted` or
            :class:`~adjsim.potentials.Switched`.
        box: ``(dim,)`` edge lengths or ``(dim, dim)`` rows of a periodic cell; distances are to the
            nearest image. Tilted rows are replaced by the least skewed rows of the same lattice.

    Raises:
        ValueError: a cutoff above half the smallest perpendicular width of the box. The
            width is taken after tilted rows are replaced, which makes it as large as
            possible. Up to half this width no atom interacts with two images of another.
    """

    box: Tensor | None

    def __init__(
        self,
        *,
        cutoff: float | None = None,
        box: Array | None = None,
        truncation: Truncation = SHIFTED,
    ) -> None:
        super().__init__()
        self.cutoff = None if cutoff is None else as_number("cutoff", cutoff)
        self.truncation = truncation
        if self.cutoff is not None and not 0 < self.cutoff < math.inf:
            raise ValueError(f"cutoff must be positive and finite; got {cutoff}.")
        if not isinstance(truncation, Truncation):
            raise TypeError(
                "truncation must be Shifted(), ForceShifted() or Switched(start) of "
                f"adjsim.potentials; got {describe_type(truncation)}."
            )
        if self.cutoff is None and truncation != SHIFTED:
            raise ValueError(f"truncation={truncation!r} needs a cutoff.")
        if self.cutoff is not None:
            truncation.check(self.cutoff)
        with outside_inference_mode():
            self.register_buffer("box", None if box is None else checked_box(box, self.cutoff))

    def pair_energy(self, s: Tensor) -> Tensor:
        """Compute u(s), elementwise."""
        raise TypeError(f"{type(self).__name__} has no pair_energy(s).")

    def pair_slope(self, s: Tensor) -> Tensor:
        """Compute du/ds, elementwise."""
        return derivative(self.pair_energy, s)

    def pair_curvature(self, s: Tensor) -> Tensor:
        """Compute d2u/ds2, elementwise."""
        return derivative(self.pair_slope, s)

    def truncated_energy(self, s: Tensor) -> Tensor:
        """Compute the energy of a pair within the cutoff, elementwise."""
        return self.pair_energy(s) if self.cutoff is None else self.truncation.energy(self, s)

    def truncated_slope(self, s: Tensor) -> Tensor:
        """Compute the derivative of :meth:`truncated_energy`."""
        return self.pair_slope(s) if self.cutoff is None else self.truncation.slope(self, s)

    def truncated_curvature(self, s: Tensor) -> Tensor:
        """Compute the derivative of :meth:`truncated_slope`."""
        return self.pair_curvature(s) if self.cutoff is None else self.truncation.curvature(self, s)

    def safe_distance(self, s: Tensor) -> Tensor:
        """Return a squared distance for excluded pairs, where u, u' and u'' are finite."""
        return torch.ones((), dtype=s.dtype, device=s.device)

    def forward(self, position: Positions) -> Energies:
        _, s, included = self._geometry(position)
        energy = self.truncated_energy(s)
        return 0.5 * torch.where(included, energy, 0.0).sum((-1, -2))

    def force(self, position: Positions, grid: Grid | None = None) -> Positions:
        d, s, included = self._geometry(position)
        return _sum_pairs(-2 * self._masked(self.truncated_slope(s), included), d, grid)

    def force_vjp(
        self, position: Positions, parameters: Sequence[Tensor], grid: Grid | None = None
    ) -> tuple[Tensor, Pullback]:
        with torch.no_grad():
            d, s, included = self._geometry(position)
            slope = self._masked(self.truncated_slope(s), included)
            weight = -2 * slope
            value = _sum_pairs(weight, d, grid)
            weight = weight.unsqueeze(-3)

        def pullback(v: Tensor) -> tuple[Tensor, DeferredVJP | list[Tensor | None]]:
            with torch.no_grad():
                w = split_coordinates(differences(v))
                dw = sum_coordinates([x * y for x, y in zip(d, w, strict=True)])
                second = self._masked(self.truncated_curvature(s), included)
                curvature = (-4 * second * dw).unsqueeze(-3)
                rows = [(curvature * x + weight * y).sum(-1) for x, y in zip(d, w, strict=True)]
                found = DeferredVJP(self, self.truncated_slope, self._masked(-dw, included), s)
                by_rows = is_tracing() and self._elementwise_in_parameters
                return _join_coordinates(rows), self._gradient_by_rows(
                    found, parameters
                ) if by_rows else found

        return value, pullback

    def virial(self, position: Positions) -> Tensor:
        """Compute ``sum over i<j of d_ij F_ij``, ``(*batch, dim, dim)``.

        F_ij is the force on i from j. In a periodic box this is minus the derivative of the energy
        with respect to the strain of the box.
        """
        d, s, included = self._geometry(position)
        weight = -self._masked(self.truncated_slope(s), included)
        vectors = torch.cat(d, -3)
        return torch.einsum("...ij,...aij,...bij->...ab", weight, vectors, vectors)

    @property
    def _elementwise_in_parameters(self) -> bool:
        """Whether the formulas are elementwise in each scalar parameter.

        A parameter may then differ from row to row. A class states it by ``_elementwise``. The
        statement does not hold for a subclass, or an instance, that overrides a method or a
        parameter of the class, nor for a truncation of the user's.
        """
        classes = type(self).__mro__
        owner = next((c for c in classes if vars(c).get("_elementwise", False)), None)
        if owner is None or type(self.truncation) not in (Shifted, ForceShifted, Switched):
            return False
        stated = {
            name for c in owner.__mro__ for name in (*vars(c), *vars(c).get("__annotations__", ()))
        }
        below = classes[: classes.index(owner)]
        changed = {name for c in below for name in vars(c) if not name.startswith("__")}
        methods = {name for name in stated if callable(getattr(owner, name, None))}
        return not (changed & stated or vars(self).keys() & methods or self._modules)

    def register_pair_parameter(self, name: str, value: Number, *, positive: bool = False) -> None:
        """Store a parameter of pairs: a number, or ``(atoms, atoms)`` and symmetric."""
        register(self, name, value, positive=positive)
        check_symmetric(name, getattr(self, name))

    def pair_parameter(self, name: str, s: Tensor) -> Tensor:
        """Return a parameter of every pair, to broadcast against the squared distances.

        The squared distance may also be a scalar, the same for all pairs.
        """
        value: Tensor = getattr(self, name)
        if value.ndim and s.ndim and value.shape[-1] not in (1, s.shape[-1]):
            raise ValueError(
                f"{name} is for {value.shape[-1]} atoms and position has {s.shape[-1]}."
            )
        if value.ndim == 2 and value.shape[0] == value.shape[1] > 1:
            # An optimiser may make a matrix asymmetric. A pair has one number, and one gradient.
            value = (value + value.T) / 2
        return value.to(s)

    def _gradient_by_rows(
        self, deferred: DeferredVJP, parameters: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Compute the gradient with parameters expanded over the rows of pairs.

        The compiler then fuses the sum over each row with the loop over pairs of the compiled step,
        while a sum over all pairs would need another loop. A parameter with several names gets the
        sum of the gradients of its names.
        """
        rows = (*deferred.x.shape[:-1], 1)
        registered = [
            *self.named_parameters(remove_duplicate=False),
            *self.named_buffers(remove_duplicate=False),
        ]
        own = {name: p for name, p in registered if any(p is q for q in parameters)}
        stand_ins = {
            name: (p.detach().expand(rows) if p.ndim == 0 else p.detach()).requires_grad_()
            for name, p in own.items()
        }
        with torch.enable_grad(), _reparametrize_module(self, stand_ins):
            total = (deferred.weight * deferred.function(deferred.x)).sum()
        refuse_unknown(total, self, list(stand_ins.values()), f"the force of {type(self).__name__}")
        if not total.requires_grad:
            return [None] * len(parameters)
        grads = torch.autograd.grad(total, list(stand_ins.values()), allow_unused=True)
        sums: list[Tensor | None] = []
        for q in parameters:
            parts = [
                g.sum() if p.ndim == 0 else g
                for p, g in zip(own.values(), grads, strict=True)
                if p is q and g is not None
            ]
            sums.append(sum(parts[1:], parts[0]) if parts else None)
        return sums

    def _masked(self, x: Tensor, included: Tensor) -> Tensor:
        """Set pairs beyond the cutoff to zero.

        The pair of an atom with itself needs no mask, since its difference is zero.
        """
        return x if self.cutoff is None else torch.where(included, x, 0.0)

    def _geometry(self, position: Positions) -> tuple[list[Tensor], Tensor, Tensor]:
        """Compute differences by coordinate, squared distances, and the mask of included pairs.

        Squared distances and mask are ``(*batch, atoms, atoms)``.
        """
        parts = split_coordinates(differences(position))
        if self.box is not None:
            parts = nearest_image(parts, self.box.to(position), exact=self.cutoff is None)
        s, included = sum_coordinates([x * x for x in parts]), distinct(position)
        if self.cutoff is not None:
            # A comparison of numbers is faster than two masks, which compiled loops would widen.
            s = torch.where(included, s, torch.finfo(s.dtype).max)
            included = s < self.cutoff**2
        return parts, torch.where(included, s, self.safe_distance(s)), included


class LennardJones(PairPotential):
    """The Lennard-Jones potential, ``U = sum over i<j of 4 epsilon ((sigma/r)^12 - (sigma/r)^6)``.

    Args:
        epsilon: depth of the well, energy; a scalar or ``(atoms, atoms)``, symmetric.
        sigma: distance where the energy is zero, length; likewise. The minimum is at 2^(1/6) sigma.
        cutoff: pairs beyond this distance are left out. None: all pairs.
        truncation: how the energy ends at the cutoff, see
            :class:`~adjsim.potentials.PairPotential`. By default it is shifted to zero, and the
            force has a small jump. Where energy conservation matters, use 2.5 sigma or more, or
            another truncation.
        box: periodic cell, ``(dim,)`` lengths or ``(dim, dim)`` rows. Without a cutoff every pair
            counts once, at its nearest image.

    Raises:
        ValueError: epsilon or sigma is not symmetric, or is a vector. For a number per atom or
            species, with a mixing rule, see :class:`LennardJonesMixture`.
    """

    epsilon: Tensor
    sigma: Tensor
    _elementwise = True

    def __init__(
        self,
        epsilon: Number = 1.0,
        sigma: Number = 1.0,
        *,
        cutoff: float | None = None,
        box: Array | None = None,
        truncation: Truncation = SHIFTED,
    ) -> None:
        super().__init__(cutoff=cutoff, box=box, truncation=truncation)
        register(self, "epsilon", epsilon)
        register(self, "sigma", sigma, positive=True)
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Refuse parameters that are not one number for each pair."""
        check_symmetric("epsilon", self.epsilon)
        check_symmetric("sigma", self.sigma)

    def pair_parameters(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return epsilon and sigma of every pair, to broadcast against the squared distances."""
        return self.pair_parameter("epsilon", s), self.pair_parameter("sigma", s)

    def pair_energy(self, s: Tensor) -> Tensor:
        epsilon, x, _ = self._sixth(s)
        return 4 * epsilon * x * (x - 1)

    def pair_slope(self, s: Tensor) -> Tensor:
        epsilon, x, inverse = self._sixth(s)
        return 12 * epsilon * x * (1 - 2 * x) * inverse

    def pair_curvature(self, s: Tensor) -> Tensor:
        epsilon, x, inverse = self._sixth(s)
        return 24 * epsilon * x * (7 * x - 2) * (inverse * inverse)

    def safe_distance(self, s: Tensor) -> Tensor:
        return self.pair_parameters(s.detach())[1].detach() ** 2

    def _sixth(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute epsilon, (sigma/r)^6 and 1/r^2."""
        epsilon, sigma = self.pair_parameters(s)
        inverse = 1 / s
        ratio = sigma**2 * inverse
        return epsilon, ratio * ratio * ratio, inverse


def distinct(position: Tensor) -> Tensor:
    """Return which pairs are of two different atoms, ``(atoms, atoms)``.

    Atoms are compared by index, since two atoms may be at one position.
    """
    # Indices are compared in the dtype of positions and read from memory, so that a compiled loop
    # over pairs does not convert them.
    index = torch.arange(position.shape[-2], dtype=position.dtype, device=position.device)
    index = materialise_contiguous(index) if is_tracing() else index
    return index.unsqueeze(-1) != index


def check_symmetric(name: str, value: Tensor) -> None:
    """Refuse a parameter that is not one number for each pair."""
    value = value.detach()
    if value.numel() == 1 and value.ndim <= 2:
        return
    if value.ndim != 2 or value.shape[0] != value.shape[1]:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; it must be a number or (atoms, atoms). For a "
            "Lennard-Jones number per atom use LennardJonesMixture(species=range(atoms), ...)."
        )
    difference, scale = float((value - value.T).abs().max()), float(value.abs().max())
    if difference > 8 * torch.finfo(value.dtype).eps * scale:
        i, j = divmod(int((value - value.T).abs().argmax()), len(value))
        raise ValueError(
            f"{name} must be symmetric, since a pair has one number; entries ({i}, {j}) and ({j}, "
            f"{i}) are {float(value[i, j]):g} and {float(value[j, i]):g}. ({name} + {name}.T) / 2 "
            "is symmetric."
        )


def split_coordinates(d: Tensor) -> list[Tensor]:
    """Split ``(*batch, dim, atoms, atoms)`` by coordinate if the step is traced.

    The compiler then makes one loop over pairs for all coordinates, and computes common terms once.
    """
    return list(d.split(1, -3)) if is_tracing() else [d]


def sum_coordinates(parts: list[Tensor]) -> Tensor:
    """Sum over coordinates, to ``(*batch, atoms, atoms)``."""
    if len(parts) == 1:
        return parts[0].sum(-3)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.squeeze(-3)


def _join_coordinates(rows: list[Tensor]) -> Tensor:
    """Join separate coordinates ``(*batch, dim, atoms)`` to ``(*batch, atoms, dim)``."""
    if len(rows) == 1:
        return rows[0].transpose(-1, -2)
    axes, batch = rows[0].ndim, rows[0].shape[:-2]
    dim = memory_order(axes, len(batch), batch.numel()).index(axes - 1)
    return unpacked(torch.cat([packed(row.transpose(-1, -2), batch) for row in rows], dim), batch)


def _sum_pairs(weight: Tensor, d: list[Tensor], grid: Grid | None) -> Tensor:
    parts = [weight.unsqueeze(-3) * x for x in d]
    if grid is not None:
        parts = [grid.round(part) for part in parts]
    return _join_coordinates([part.sum(-1) for part in parts])
