"""Generalised Langevin dynamics: friction with a memory kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjsim.core.arguments import as_tensor
from adjsim.core.noise import NoiseStream
from adjsim.core.parameters import register
from adjsim.core.state import AnyState
from adjsim.core.typing import Number, Positions, Seed
from adjsim.dynamics.density import Canonical
from adjsim.dynamics.masses import Masses
from adjsim.dynamics.moves import Move, Scale, Shear
from adjsim.dynamics.sources import Coefficient, Combination, Field, Random, Source
from adjsim.dynamics.starts import check_shape, standard_normal
from adjsim.dynamics.terms import Holder, Term
from adjsim.dynamics.thermostats.base import Thermostat


class MemoryState(NamedTuple):
    """Position, momentum ``(*batch, atoms, dim)``, memory ``(*batch, rates, atoms, dim)``.

    The memory is in units of momentum.
    """

    position: Positions
    momentum: Positions
    memory: Float[Tensor, "*batch rates atoms dim"]


class MemoryBath(Term[MemoryState]):
    """The bath, G: a linear SDE for momentum and memory, y = (p, z_1..z_n)::

        dp   = -sum c_i z_i dt
        dz_i = (c_i p - r_i z_i) dt + sqrt(2 r_i m kT) dW_i
        c_i = sqrt(strength_i), r_i = rate_i

    that is dy = -M y dt + noise, whose stationary covariance is m kT. Its flow over h is exact in
    distribution::

        y' = E y + sqrt(m kT) L xi,    E = exp(-M h),
        L L^T = 1 - E E^T = int_0^h exp(-M s) diag(0, 2r) exp(-M^T s) ds

    E is factored into unit lower, diagonal and unit upper matrices, each applied as shears and
    scales. The pivots are one at h = 0 and must be positive, which bounds h.
    """

    def __init__(self, masses: Masses, kT: Tensor, rates: Tensor, strengths: Tensor) -> None:
        self.masses, self.kT, self.rates, self.strengths = masses, kT, rates, strengths
        self.draws = 1 + len(rates)

    def constrained(self, holder: Holder) -> Term[Any]:
        return holder.remembering(self)

    def drift(self, t: Any, state: MemoryState) -> Mapping[str, Tensor]:
        p, z = state.momentum, state.memory
        c, r = self._couplings(p)
        return {"momentum": -(c * z).sum(-3), "memory": c * p.unsqueeze(-3) - r * z}

    def diffusion(self, t: Any, state: MemoryState) -> Mapping[str, Tensor]:
        _, r = self._couplings(state.momentum)
        return {"memory": torch.sqrt(2 * r) * self.masses.thermal(state.momentum, self.kT)}

    def coefficients(self, h: float, state: MemoryState) -> dict[str, Tensor]:
        propagator, covariance = self.flow(h)
        self.refuse_long(h, lambda x: ldu(x)[1], ", or SDESolver")
        lower, pivots, upper = ldu(propagator)
        like, noise = state.momentum, amplitudes(covariance)
        found = {"p scale": pivots[0], "z scale": pivots[1:].reshape(-1, 1, 1)}
        for i in range(self.draws):
            found[f"noise {i}"] = noise[i]
            if i > 0:
                found[f"lower {i}"] = lower[i, :i]
            if i < self.draws - 1:
                found[f"upper {i}"] = upper[i, i + 1 :]
        thermal = self.masses.thermal(like, self.kT)
        return {"thermal": thermal, **{name: value.to(like) for name, value in found.items()}}

    def moves(self, h: float, state: MemoryState) -> Sequence[Move]:
        last = self.draws - 1
        fields: list[Source] = [Field("momentum"), *(Field("memory", i) for i in range(last))]
        xi: list[Source] = [Random(i) for i in range(self.draws)]

        def add(i: int, what: str, sources: list[Source], coefficient: str | None = None) -> Shear:
            name, link = ("momentum", None) if i == 0 else ("memory", i - 1)
            return Shear(name, Combination(f"{what} {i}", tuple(sources)), coefficient, link)

        upper = [add(i, "upper", fields[i + 1 :]) for i in range(last)]
        names = {"momentum": "p scale", "memory": "z scale"}
        scales = [Scale(field, Coefficient(name)) for field, name in names.items()]
        lower = [add(i, "lower", fields[:i]) for i in range(last, 0, -1)]
        noise = [add(i, "noise", xi[: i or self.draws], "thermal") for i in range(self.draws)]
        return (*upper, *scales, *lower, *noise)

    def _couplings(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return sqrt(strengths) and rates, ``(rates, 1, 1)``."""
        c, r = self.strengths.to(like).sqrt(), self.rates.to(like)
        return c.reshape(-1, 1, 1), r.reshape(-1, 1, 1)

    def matrix(self) -> Tensor:
        """Return M of dy = -M y dt + noise, float64, ``(1 + rates, 1 + rates)``."""
        c, r = self.strengths.double().sqrt(), self.rates.double()
        top = torch.cat([c.new_zeros(1), c]).unsqueeze(0)
        return torch.cat([top, torch.cat([-c.unsqueeze(1), torch.diag(r)], 1)])

    def flow(self, h: float) -> tuple[Tensor, Tensor]:
        """Compute E = exp(-M h) and 1 - E E^T, float64, by Van Loan's block exponential."""
        # Subtraction would lose all digits of the smallest entry, which is of order h^3.
        M, r = self.matrix(), self.rates.double()
        source = torch.diag(torch.cat([r.new_zeros(1), 2 * r]))
        block = torch.cat([torch.cat([-M, source], 1), torch.cat([torch.zeros_like(M), M.T], 1)])
        # The further entry of one makes the polynomial of torch one of high degree. Its polynomials
        # for small matrices have errors of 1e-10.
        exponential = torch.linalg.matrix_exp(torch.block_diag(block * h, M.new_ones(1, 1)))[
            :-1, :-1
        ]
        n = len(M)
        propagator = exponential[:n, :n]
        covariance = exponential[:n, n:] @ propagator.T
        return propagator, 0.5 * (covariance + covariance.T)

    def refuse_long(self, h: float, pivots: Callable[[Tensor], Tensor], way_out: str = "") -> None:
        """Refuse a step over which pivots of E are not positive."""

        def fits(h: float) -> bool:
            return bool((pivots(self.flow(h)[0].detach()) > 0).all())

        if fits(h):
            return
        low, high = 0.0, h
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        raise ValueError(
            f"the bath's flow over h = {h:g} cannot be made of coupling steps, which needs "
            f"h < {low:.3g}: use a smaller dt (h is dt over the number of times G occurs in the "
            f"scheme){way_out}."
        )


def amplitudes(covariance: Tensor) -> list[Tensor]:
    """Factor the covariance of the noise: the weights of the draws 0, 1, ... in p, z_1, z_2, ..."""
    # The memory comes first in the Cholesky factor, so that its draws are, to leading order in h,
    # the Brownian increments of the SDE.
    rows = torch.linalg.cholesky(covariance.roll((-1, -1), (0, 1)))
    return [rows[-1], *(rows[i, : i + 1] for i in range(len(rows) - 1))]


def ldu(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor into unit lower, diagonal and unit upper matrices, without exchanges of rows."""
    lower = unit = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    for j in range(len(matrix) - 1):
        factors = torch.cat([matrix.new_zeros(j + 1), matrix[j + 1 :, j] / matrix[j, j]])
        matrix = matrix - torch.outer(factors, matrix[j])
        lower = lower + torch.outer(factors, unit[j])
    pivots = matrix.diagonal()
    return lower, pivots, matrix / pivots.unsqueeze(-1)


class GeneralizedLangevin(Thermostat[MemoryState]):
    """Langevin dynamics with a memory kernel, and noise by the fluctuation-dissipation theorem::

        dq = p/m dt
        dp = (F(q) - int_0^t K(t - s) p(s) ds) dt + noise
        K(t) = sum_i strengths_i exp(-rates_i t)

    K acts on momentum, so ``int K dt = sum strengths_i / rates_i`` is the friction of the
    memoryless limit. One extra variable carries each exponential; see Ceriotti, Bussi and
    Parrinello, J. Chem. Theory Comput. 6, 1170 (2010). Terms: A (stream), B (kick), G
    (:class:`MemoryBath`). Schemes: "BAGAB" (positions exact for harmonic forces), "GBABG", others.

    Args:
        potential, mass: see :class:`~adjsim.dynamics.MassiveDynamics`.
        kT: temperature, energy; one number.
        rates: decay of each exponential, 1/time; numbers or a 1-D tensor.
        strengths: weight of each exponential at t = 0, 1/time^2; as many as rates.
    """

    state_type = MemoryState
    rates: Tensor
    strengths: Tensor

    def __init__(
        self,
        potential: nn.Module,
        mass: Number = 1.0,
        kT: Number = 1.0,
        rates: Number = (1.0,),
        strengths: Number = (1.0,),
    ) -> None:
        super().__init__(potential, mass, kT)
        for name, value in (("rates", rates), ("strengths", strengths)):
            given = as_tensor(name, value)
            if given.ndim != 1 or given.numel() == 0:
                raise ValueError(
                    f"{name} must list at least one number; got shape {tuple(given.shape)}."
                )
            register(self, name, given, positive=True)
        if self.rates.shape != self.strengths.shape:
            raise ValueError(
                f"there are {len(self.rates)} rates and {len(self.strengths)} strengths; give as "
                "many of each."
            )

    @property
    def terms(self) -> dict[str, Term[Any]]:
        return {**self.motion, "G": self.bath}

    @property
    def bath(self) -> MemoryBath:
        return MemoryBath(self.masses, self.kT, self.rates, self.strengths)

    def started(self, position: Tensor, p: Tensor | None, generator: Seed) -> tuple[Tensor, ...]:
        """Draw the memory at equilibrium, beside position and momentum."""
        moving = super().started(position, p, generator)
        xi = standard_normal(position, generator, NoiseStream.MEMORY, (len(self.rates),))
        return (*moving, self.masses.thermal(position, self.kT) * xi)

    def check(self, state: AnyState) -> None:
        super().check(state)
        *batch, atoms, dim = state[0].shape
        check_shape(state, "memory", (*batch, len(self.rates), atoms, dim))

    def stationary_density(self) -> Canonical:
        """Declare the canonical density. Each memory variable is distributed as a momentum."""
        return Canonical(self, {"memory": lambda state: self.masses(state.memory)})

    def characteristic_scales(self, t: float, state: MemoryState, time: float) -> dict[str, Tensor]:
        found = super().characteristic_scales(t, state, time)
        return {**found, "memory": found["momentum"]}

    def damping(self, state: MemoryState) -> float:
        return float(torch.linalg.eigvals(self.bath.matrix().detach()).real.max())
