"""Kinds of virtual sites: weighted averages, sites out of a plane, sites in local coordinates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.arguments import as_indices, outside_inference_mode
from adjsim.core.coordinates import Vector
from adjsim.core.declared import declared
from adjsim.core.typing import Array, Number
from adjsim.potentials.bonded.selection import as_vertices
from adjsim.potentials.bonded.terms import Terms
from adjsim.potentials.sites.offsets import Crossed, Framed, Offset, Weighted

# Stands for the number of atoms of a site after the first, in a shape.
OTHERS = -1


class SiteGroup(Terms):
    """Virtual sites of one kind, each at its first atom plus an offset, ``x = q_0 + s(d)``.

    The displacements d are those of the other atoms of the site from the first one.

    Args:
        site: ``(sites,)`` integers, the number of each site among all particles.
        index: ``(sites, members)`` integers, the atoms that a site follows, counted among atoms
            with mass.
        types: ``(sites,)`` integers, the type of each site. None: sites have parameters of their
            own.

    Attributes:
        linear: whether the offset is linear in the displacements.
    """

    linear: ClassVar[bool] = False
    shapes_of_declared = ""

    site: Tensor

    def __init__(
        self,
        site: Array,
        index: Array,
        *values: Number,
        types: Array | None = None,
        **named: Number,
    ) -> None:
        self.members = as_indices("index", index).shape[-1]
        self.steps = tuple((0, k) for k in range(1, self.members))
        super().__init__(index, *values, types=types, **named)
        with outside_inference_mode():
            self.register_buffer("site", as_vertices(site, "site"), persistent=False)
        if len(self.site) != len(self.index):
            raise ValueError(
                f"site has {len(self.site)} numbers of particles and index {len(self.index)} rows: "
                "give one for each site."
            )

    @abstractmethod
    def offset(self, d: Sequence[Vector]) -> Offset:
        """Compute the offsets at displacements."""
        raise TypeError(f"{type(self).__name__} has no offset(d).")

    def register_term_parameter(
        self, name: str, value: Number, *, columns: tuple[int, ...] = (), **rule: Any
    ) -> None:
        columns = tuple(self.members - 1 if n == OTHERS else n for n in columns)
        super().register_term_parameter(name, value, columns=columns, **rule)

    def offset_and_rate(self, x: Tensor) -> Tensor:
        """Compute offsets and their derivatives along changes, joined by coordinate.

        The argument joins the displacements and their changes, ``(*batch, 2 others dim, sites)``.
        """
        d, v = ([[part] for part in half.chunk(len(self.steps), -2)] for half in x.chunk(2, -2))
        offset = self.offset(d)
        return torch.cat([*offset.value, *offset.push(v)], -2)


class AverageSites(SiteGroup):
    """Weighted averages of atoms, ``x = (1 - sum_k w_k) q_0 + sum_k w_k q_k``.

    The weights sum to one, so that sites move with their molecule. These are the
    ``TwoParticleAverageSite`` and ``ThreeParticleAverageSite`` of OpenMM, such as the site of
    TIP4P-Ew and OPC.

    Args:
        site, index, types: see :class:`SiteGroup`.
        {parameters}
    """

    linear = True

    weight: Tensor = declared(
        "w, of the atoms after the first; ``(others,)``, ``(sites, others)`` or "
        "``(types, others)``",
        columns=(OTHERS,),
    )

    def offset(self, d: Sequence[Vector]) -> Offset:
        return Weighted(self.term_parameters("weight", d[0][0]), d)


class OutOfPlaneSites(SiteGroup):
    """Sites out of the plane of three atoms, ``x = q_0 + w_1 d_1 + w_2 d_2 + c d_1 x d_2``.

    These are the ``OutOfPlaneSite`` of OpenMM, such as the lone pairs of TIP5P.

    Args:
        site, index, types: see :class:`SiteGroup`.
        {parameters}
    """

    dim = 3

    weight: Tensor = declared(
        "w, ``(2,)``, ``(sites, 2)`` or ``(types, 2)``",
        columns=(OTHERS,),
    )
    cross: Tensor = declared("c, 1/length; a number, one for each site or one for each type")

    def offset(self, d: Sequence[Vector]) -> Offset:
        x = d[0][0]
        return Crossed(self.term_parameters("weight", x), self.term_parameter("cross", x), d)


class LocalCoordinatesSites(SiteGroup):
    """Sites at fixed coordinates in axes that follow three or more atoms::

        x = q_0 + sum_k o_k d_k + x e + y (n x e) + z n        e = a/|a|      n = a x b/|a x b|

    The axes are those of the vectors ``a = sum_k x_k d_k`` and ``b = sum_k y_k d_k``. These are the
    ``LocalCoordinatesSite`` of OpenMM, such as lone pairs of CHARMM. Where a has no length, or b is
    along a, the axes that have no direction are zero, and so are the derivatives of their parts.

    Args:
        site, index, types: see :class:`SiteGroup`.
        {parameters}
    """

    dim = 3

    point: Tensor = declared(
        "the coordinates x, y and z, a length; ``(3,)``, ``(sites, 3)`` or ``(types, 3)``",
        columns=(3,),
    )
    origin: Tensor = declared(
        "the weights o of the atoms after the first; ``(others,)``, ``(sites, others)`` or "
        "``(types, others)``",
        columns=(OTHERS,),
    )
    x_axis: Tensor = declared("likewise, the weights of a", columns=(OTHERS,))
    y_axis: Tensor = declared("likewise, the weights of b", columns=(OTHERS,))

    def offset(self, d: Sequence[Vector]) -> Offset:
        origin, x_axis, y_axis, point = (
            self.term_parameters(name, d[0][0]) for name in ("origin", "x_axis", "y_axis", "point")
        )
        return Framed(origin, (x_axis, y_axis), point, d)
