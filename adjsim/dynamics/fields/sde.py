"""Stochastic differential equations of any vector field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adjsim.core.state import AnyState, FieldState, in_transform
from adjsim.core.typing import Seed
from adjsim.dynamics.fields.ode import (
    FieldDynamics,
    Rate,
    Reversed,
    evaluated,
    refuse_shape,
    register_function,
    with_arguments,
)

NOISES = ("diagonal", "scalar", "additive", "general")


class PathState(NamedTuple):
    """A state y, ``(*batch, n)``, and the divergence of its path so far, ``(*batch, 1)``."""

    y: Tensor
    logqp: Tensor


class SDE(FieldDynamics):
    """A stochastic differential equation of any vector field::

        dy = drift(t, y) dt + diffusion(t, y) dW

    y is ``(*batch, n)``, or a named tuple of such fields. The noise W has one independent Brownian
    motion for each column of the diffusion and each system of the batch:

    ========== ======================= ============================================================
    noise      diffusion, of shape     increment
    ========== ======================= ============================================================
    "diagonal" ``(*batch, n)``         ``g_i dW_i``, a Brownian motion for each entry
    "scalar"   ``(*batch, n)``         ``g_i dW``, one Brownian motion for all entries of a system
    "additive" ``(*batch, n, m)``      ``sum_k g_ik dW_k``, where g does not depend on y
    "general"  ``(*batch, n, m)``      ``sum_k g_ik dW_k``
    ========== ======================= ============================================================

    Where g depends on y, the equation of Ito and that of Stratonovich differ, and the solver says
    which one is solved:

    ============ =================================== ==============================================
    equation     solvers of the library              methods of :class:`~adjsim.SDESolver`
    ============ =================================== ==============================================
    Ito          :class:`~adjsim.EulerMaruyama`,     euler, milstein, srk
                 :class:`~adjsim.Milstein`
    Stratonovich :class:`~adjsim.StochasticHeun`,    midpoint, heun, euler_heun, reversible_heun
                 :class:`~adjsim.ReversibleHeun`
    ============ =================================== ==============================================

    The methods of Milstein are for scalar noise and for diagonal noise whose entry g_i depends on
    y_i alone; so is srk, which also takes additive noise. Other noise has strong order 1/2 in
    general. Without noise use :class:`~adjsim.ODE`.

    The parameters of the modules are those of the dynamics, under the names ``drift_fun.*`` and
    ``diffusion_fun.*``. The limits of BacksolveAdjoint and of reversible_heun under contraction,
    which is not known beforehand, are not checked.

    Args:
        drift: maps ``(t, y)`` to the drift, of the shape of y.
        diffusion: maps ``(t, y)`` to the diffusion. For a named tuple it returns one tensor a
            field, with the same number of columns m; diagonal noise is then independent for all
            fields.
        noise: "diagonal", "scalar", "additive" or "general".
        args: further arguments of drift and diffusion, ``drift(t, y, *args)``, as of
            :class:`~adjsim.ODE`.

    Raises:
        TypeError: a class, an object that cannot be called, a function that does not take (t, y).
        ValueError: an unknown noise; drift or diffusion of another shape, additive noise that
            depends on y (when a run begins, or with the finiteness checks of fixed steps).
    """

    drift_name = "drift"
    # Fields without noise, which draw no numbers.
    quiet: tuple[str, ...] = ()
    drift_fun: Callable[..., Any]
    diffusion_fun: Callable[..., Any]

    def __init__(
        self,
        drift: Callable[..., Any],
        diffusion: Callable[..., Any],
        *,
        noise: str = "diagonal",
        args: Any = (),
    ) -> None:
        super().__init__()
        self.noise = noise
        self.validate()
        register_function(self, "drift_fun", with_arguments("drift", drift, args))
        register_function(self, "diffusion_fun", with_arguments("diffusion", diffusion, args))

    def validate(self) -> None:
        """Refuse an unknown kind of noise."""
        if self.noise not in NOISES:
            raise ValueError(f"unknown noise {self.noise!r}; choose from {', '.join(NOISES)}.")

    @property
    def rate(self) -> Rate:
        return Rate(self.drift_name, self.drift_fun, draws=1)

    def logqp(self, prior: Callable[..., Any]) -> SDE:
        """Return the equation with the divergence of its path from that of another drift::

            dlogqp = |u|^2/2 dt        diffusion(t, y) u = drift(t, y) - prior(t, y)

        Its states have the fields ``y`` and ``logqp``, from ``init(y)``. The mean of ``logqp`` at
        the end is the Kullback-Leibler divergence of the law of the paths from the law with the
        drift ``prior`` and the same diffusion (Girsanov), the prior term of a latent SDE. For
        scalar, additive and general noise u is the least-squares solution, and a difference that
        the diffusion does not span, whose divergence is infinite, is left out. An entry of diagonal
        noise that is zero counts nothing where the drifts agree. The path of y is that without
        logqp, number by number.

        Args:
            prior: maps ``(t, y)`` to the other drift, of the shape of y.
        """
        return PathDivergence(self, prior)

    def in_reverse(self) -> SDE:
        drift, diffusion = Reversed(self, "drift_fun", -1), Reversed(self, "diffusion_fun", 1)
        back = SDE(drift, diffusion, noise=self.noise)
        back.quiet, back.time_sign = self.quiet, -1
        return back

    def amplitudes(self, t: Any, state: AnyState) -> tuple[Tensor, ...]:
        """Evaluate the diffusion, by field."""
        found = evaluated("diffusion", self.diffusion_fun, t, state)
        for name, g, y in zip(state._fields, found, state, strict=True):
            expected: tuple[int, ...] = tuple(y.shape)
            if self.matrix:
                if g.ndim != y.ndim + 1 or g.shape[:-1] != y.shape:
                    raise ValueError(
                        f"diffusion maps {name} of shape {tuple(y.shape)} to {tuple(g.shape)}; "
                        f"with noise={self.noise!r} it must be {(*y.shape, 'm')}, a column for "
                        "each Brownian motion. For one Brownian motion an entry use "
                        "noise='diagonal'."
                    )
                expected = (*y.shape, found[0].shape[-1])
            refuse_shape("diffusion", name, g, expected, y)
        return found

    @property
    def matrix(self) -> bool:
        """Whether the diffusion is a matrix for each system."""
        return self.noise in ("additive", "general")

    def diffusion(self, t: Any, state: Any) -> Any:
        return type(state)(*self.amplitudes(t, state))

    def noise_increments(self, t: Any, state: AnyState, dW: Tensor) -> tuple[Tensor, ...]:
        """Compute ``diffusion(t, y) dW`` by field, for increments ``(*batch, *draw_shape)``."""
        return self.times_increment(self.amplitudes(t, state), dW, state)

    def times_increment(
        self, found: tuple[Tensor, ...], dW: Tensor, state: AnyState
    ) -> tuple[Tensor, ...]:
        """Multiply amplitudes, by field, by increments ``(*batch, *draw_shape)``."""
        if self.matrix:
            return tuple((g * dW.unsqueeze(-2)).sum(-1) for g in found)
        if self.noise == "scalar":
            return tuple(g * dW for g in found)
        loud = [y.shape[-1] for name, y in state._asdict().items() if name not in self.quiet]
        parts = iter(dW.split(loud, -1))
        names = zip(state._fields, found, strict=True)
        return tuple(g if name in self.quiet else g * next(parts) for name, g in names)

    @torch.no_grad()
    def draw_shape(self, t: float, state: AnyState) -> torch.Size:
        """Return the number of Brownian motions of one system."""
        if self.noise == "scalar":
            return torch.Size((1,))
        if self.noise == "diagonal":
            fields = state._asdict().items()
            return torch.Size((sum(y.shape[-1] for name, y in fields if name not in self.quiet),))
        start = type(state)._make(y.detach() for y in state)
        return torch.Size(self.amplitudes(t, start)[0].shape[-1:])

    def characteristic_scales(self, t: float, state: AnyState, time: float) -> dict[str, Tensor]:
        """Return the spread of the noise over a time, from the diffusion at the start."""
        found = self.amplitudes(t, state)
        sizes = (g.norm(dim=-1) if self.matrix else g.abs() for g in found)
        return dict(zip(state._fields, (math.sqrt(time) * size for size in sizes), strict=True))

    def check_rates(self, t: float, state: AnyState) -> dict[str, Tensor]:
        rates = super().check_rates(t, state)
        if in_transform():
            return rates
        rates |= self.checked("diffusion", "diffusion", self.diffusion, t, state)
        self.check_noise(t, state)
        return rates

    def check_noise(self, t: float, state: AnyState) -> None:
        if self.noise != "additive" or in_transform():
            return
        with torch.enable_grad():
            start = type(state)._make(y.detach().requires_grad_() for y in state)
            found = [g.sum() for g in self.amplitudes(t, start) if g.requires_grad]
            if not found:
                return
            slopes = torch.autograd.grad(torch.stack(found).sum(), tuple(start), allow_unused=True)
        if any(slope is not None and bool((slope != 0).any()) for slope in slopes):
            raise ValueError(
                "noise='additive' is noise whose diffusion does not depend on y, and this one "
                "does: use noise='general', or 'diagonal' for one Brownian motion an entry."
            )


class PathDivergence(SDE):
    """An equation with the divergence of its path from that of another drift, as a field."""

    state_type = PathState
    quiet = ("logqp",)

    def __init__(self, sde: SDE, prior: Callable[..., Any]) -> None:
        drift = _DriftAndRate(sde, prior)
        super().__init__(drift, drift.diffusion, noise=sde.noise)

    def logqp(self, prior: Callable[..., Any]) -> SDE:
        raise TypeError("the equation has a divergence already: call logqp on the SDE itself.")

    def init(self, y: Any, momentum: None = None, generator: Seed = None) -> PathState:
        """Make a start from y, ``(*batch, n)``, with no divergence."""
        start = super().init(y, momentum, generator)
        if not isinstance(start, FieldState):
            raise TypeError("logqp is for a state that is one tensor: join its fields along n.")
        return PathState(start.y, torch.zeros_like(start.y[..., :1]))


class _DriftAndRate(nn.Module):
    """The drift of an equation, with half the squared control that leads to it from a prior."""

    sde: SDE
    prior: Callable[..., Any]

    def __init__(self, sde: SDE, prior: Callable[..., Any]) -> None:
        super().__init__()
        self.sde = sde
        register_function(self, "prior", prior)

    def forward(self, t: Tensor, state: PathState) -> tuple[Tensor, Tensor]:
        at = FieldState(state.y)
        (drift,) = evaluated("drift", self.sde.drift_fun, t, at)
        (prior,) = evaluated("prior", self.prior, t, at)
        refuse_shape("prior", "y", prior, tuple(state.y.shape), state.y)
        (g,) = self.sde.amplitudes(t, at)
        if self.sde.noise == "diagonal":
            difference = drift - prior
            agree = (g == 0) & (difference == 0)
            control = torch.where(agree, 0.0, difference) / torch.where(agree, 1.0, g)
        else:
            columns = g if self.sde.matrix else g.unsqueeze(-1)
            control = (torch.linalg.pinv(columns) @ (drift - prior).unsqueeze(-1)).squeeze(-1)
        return drift, 0.5 * control.square().sum(-1, keepdim=True)

    def diffusion(self, t: Tensor, state: PathState) -> tuple[Tensor, Tensor]:
        (g,) = self.sde.amplitudes(t, FieldState(state.y))
        none = torch.zeros_like(state.logqp)
        return g, none.unsqueeze(-1).expand(*none.shape, g.shape[-1]) if self.sde.matrix else none


def describe_cross_terms(sde: SDE, t: float, state: AnyState) -> str | None:
    """Name the first field whose diagonal noise has off-diagonal derivatives; None without one.

    With a diagonal Jacobian, products with two vectors, each divided by its vector, are equal.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        start = type(state)._make(y.detach().requires_grad_() for y in state)
        found = sde.amplitudes(t, start)
        if not any(g.requires_grad for g in found):
            return None
        slopes: list[list[Tensor]] = []
        for _ in range(2):
            drawn = [torch.rand(g.shape, generator=generator, dtype=torch.float64) for g in found]
            along = [(1 + x).to(g) for x, g in zip(drawn, found, strict=True)]
            total = torch.stack([(g * v).sum() for g, v in zip(found, along, strict=True)]).sum()
            grads = torch.autograd.grad(
                total, tuple(start), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            slopes.append([grad / v for grad, v in zip(grads, along, strict=True)])
    for name, one, other in zip(state._fields, *slopes, strict=True):
        size = float(one.abs().amax())
        # Rounding of sums, far below the difference that any other entry makes.
        if float((one - other).abs().amax()) > 1e3 * torch.finfo(one.dtype).eps * size:
            return name
    return None
