"""SDE solvers, by torchsde, for the summed drift and diffusion of all terms.

Time is counted in steps, and step k has the same noise as in every other solver
(:class:`adjsim.core.noise.Noise`), so no noise is stored.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from adjsim.core.brownian_path import BrownianPath, PathNoise
from adjsim.core.noise import Noise
from adjsim.core.state import AnyState, State, in_transform
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.fields.sde import SDE, describe_cross_terms
from adjsim.solvers.base import refuse_no_equation
from adjsim.solvers.clock import check_dt
from adjsim.solvers.continuous.base import ContinuousSolver, Fields, VectorField
from adjsim.solvers.run import Run

STRATONOVICH = ("midpoint", "heun", "euler_heun", "reversible_heun")
ITO = ("euler", "milstein", "srk")
BACKSOLVE_LIMIT = 5.0
REVERSIBLE_HEUN_LIMIT = 2.0


class InstabilityError(ValueError):
    """Raised before a run if friction would make the run or its gradient unstable."""


class SDESolver(ContinuousSolver):
    """Solve ``dy = drift dt + diffusion dW`` with a method of torchsde.

    Methods of Stratonovich: midpoint, heun, euler_heun, reversible_heun. Methods of Ito: euler,
    milstein, srk; the last two are not for general noise. In molecular dynamics the amplitude of
    the noise does not depend on the state, so both solve one equation; for an :class:`~adjsim.SDE`
    they differ. (log_ode needs the areas of the noise, which are not drawn.) Steps have length dt,
    and save times must lie on them. The path does not depend on the save times.

    The error of reversible_heun grows as exp(friction T) over a run of length T, also forward. It
    is refused beyond friction T = 2.

    For molecular runs prefer a splitting (:func:`~adjsim.BAOAB`): it samples far better at the same
    dt, costs one force a step, and has an exact gradient at any friction.

    Args:
        method: a name of torchsde.
        dt: the step, time.
    """

    averages_ends: ClassVar[bool] = True

    def __init__(self, method: str = "midpoint", *, dt: float) -> None:
        if method not in STRATONOVICH + ITO:
            raise ValueError(
                f"unknown SDE method {method!r}; choose from {', '.join(STRATONOVICH + ITO)}."
            )
        self.method, self.dt = method, check_dt(dt)
        self.of_ito = method in ITO

    def on_path(
        self, path: BrownianPath, dynamics: Dynamics[State], state: State, t: float
    ) -> PathNoise:
        if self.method == "srk":
            raise TypeError(
                "a BrownianPath has one increment a step, and srk draws two numbers: give a seed "
                "as generator, or use SDESolver('milstein', dt=...)."
            )
        assert self.dt is not None
        return path.steps(t, self.dt)

    def check(self, run: Run[State], backsolve: dict[str, Any] | None) -> None:
        refuse_no_equation(self, run.dynamics, noise=True)
        name = type(run.dynamics).__name__
        if not run.dynamics.stochastic:
            raise TypeError(
                f"SDESolver is for dynamics with noise, and {name} has none: use ODESolver() or a "
                "splitting."
            )
        if backsolve is not None and any(value is not None for value in backsolve.values()):
            raise ValueError(
                "BacksolveAdjoint takes no tolerances with SDESolver, whose steps are fixed: make "
                "its dt smaller."
            )
        if isinstance(run.dynamics, SDE):
            self._check_noise(run.dynamics, float(run.times[0]), run.state)
        if self.method != "reversible_heun" and backsolve is None:
            return
        rate, what = run.dynamics.damping(run.state), f"{run.dynamics.damping_name} x time"
        total, gap = float(run.times[-1] - run.times[0]), float(run.times.diff().max())
        instead = (
            "the steps of a splitting such as BAOAB(dt) (LeimkuhlerMatthews(dt) for overdamped "
            "dynamics)"
        )
        if self.method == "reversible_heun" and rate * total > REVERSIBLE_HEUN_LIMIT:
            raise InstabilityError(
                f"reversible_heun is unstable under friction: {what} is {rate * total:.3g} "
                f"here and the limit {REVERSIBLE_HEUN_LIMIT:g}. Use {instead}, or another method "
                "such as 'midpoint'."
            )
        if backsolve is not None and rate * gap > BACKSOLVE_LIMIT:
            raise InstabilityError(
                f"errors of the continuous adjoint grow as exp({what}) between save "
                f"times: {what} is {rate * gap:.3g} here and the limit {BACKSOLVE_LIMIT:g}. "
                f"Save at least every {BACKSOLVE_LIMIT / rate:.3g}, or use {instead} with "
                "ReversibleAdjoint() or CheckpointAdjoint()."
            )

    def _check_noise(self, sde: SDE, t: float, state: AnyState) -> None:
        """Refuse a method that is wrong for the noise of an equation."""
        if self.method not in ("milstein", "srk"):
            return
        rest = "euler (Ito), or midpoint, heun or euler_heun (Stratonovich)"
        if sde.noise == "general":
            raise TypeError(
                f"{self.method} is for diagonal, scalar and additive noise; general noise takes "
                f"{rest}."
            )
        if sde.noise == "diagonal" and not in_transform():
            name = describe_cross_terms(sde, t, state)
            if name is not None:
                raise ValueError(
                    f"{self.method} needs diagonal noise whose entry g_i depends on y_i alone, and "
                    f"the diffusion of {name} mixes entries: use {rest}."
                )

    def integrate(self, field: VectorField[State], start: Fields, times: Tensor) -> Fields:
        from torchsde import sdeint, sdeint_adjoint

        run = field.run
        assert run.noise is not None
        equation = _Equation(field, start, "ito" if self.method in ITO else "stratonovich")
        noise = _StepNoise(run.noise, equation, draws=2 if self.method == "srk" else 1)
        options: dict[str, Any] = {"bm": noise, "method": self.method, "dt": 1.0}
        solve: Any = sdeint
        if field.backsolve is not None:
            solve = partial(sdeint_adjoint, adjoint_params=field.backsolve["params"])
        return equation.fields(solve(equation, equation.flat(start), times, **options))

    def __repr__(self) -> str:
        return f"SDESolver({self.method!r}, dt={self.dt:g})"


class _Equation(torch.nn.Module):
    """The equation for torchsde, in units of the step.

    Diagonal noise has one flat row for the whole batch. Other noise has one row, and one matrix of
    its diffusion, for each system.
    """

    def __init__(self, field: VectorField[State], start: Fields, sde_type: str) -> None:
        super().__init__()
        self._field, self.sde_type = field, sde_type
        dynamics = field.run.dynamics
        self.noise_type = dynamics.noise if isinstance(dynamics, SDE) else "diagonal"
        batch = dynamics.batch_shape(field.run.state)
        self.rows = 1 if self.noise_type == "diagonal" else batch.numel()
        self.shapes = [x.shape for x in start]
        self.sizes = [x.numel() // self.rows for x in start]
        assert field.unit is not None
        self._root = math.sqrt(field.unit)

    def flat(self, fields: Fields) -> Tensor:
        return torch.cat([x.reshape(self.rows, -1) for x in fields], 1)

    def fields(self, flat: Tensor) -> Fields:
        """Split rows into fields; time may lead."""
        parts, lead = zip(flat.split(self.sizes, -1), self.shapes, strict=True), flat.shape[:-2]
        return tuple(x.reshape((*lead, *shape)) for x, shape in parts)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        return self.flat(self._field(t, self.fields(y)))

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        field, dynamics = self._field, self._field.run.dynamics
        amplitudes = tuple(dynamics.diffusion(field.time(t), field.state(self.fields(y))))
        if self.noise_type == "diagonal":
            return self.flat(amplitudes) * self._root
        pairs = zip(amplitudes, self.sizes, strict=True)
        return torch.cat([g.reshape(self.rows, size, -1) for g, size in pairs], 1) * self._root

    @torch.no_grad()
    def noisy(self) -> list[bool]:
        """Return which fields have noise; all fields of an SDE."""
        run = self._field.run
        if isinstance(run.dynamics, SDE):
            return [name not in run.dynamics.quiet for name in run.state._fields]
        return [bool((x != 0).any()) for x in run.dynamics.diffusion(run.times[0], run.state)]


class _StepNoise:
    """The increments of whole steps, those of a splitting with each stochastic letter once."""

    levy_area_approximation = "space-time"

    def __init__(self, noise: Noise, equation: _Equation, draws: int) -> None:
        run = equation._field.run
        dynamics, state = run.dynamics, run.state
        self._noise, self._draws, self._like = noise, draws, state[0]
        self._replicas = dynamics.batch_shape(state).numel()
        draw = dynamics.draw_shape(float(run.times[0]), state).numel()
        self._width = draw * sum(term.draws for term in dynamics.terms.values())
        # Diagonal noise has an entry for each entry of the state. Other noise has its own columns.
        self._layout: list[tuple[int, bool]] | None = None
        if equation.noise_type == "diagonal":
            self._layout = list(zip(equation.sizes, equation.noisy(), strict=True))

    def __call__(
        self, ta: Any, tb: Any = None, return_U: bool = False, return_A: bool = False
    ) -> Any:
        step = round(float(ta))
        if tb is None or abs(float(ta) - step) > 1e-9 or abs(float(tb) - step - 1) > 1e-9:
            raise ValueError(f"noise is defined over whole steps, not from {float(ta)} to {tb}.")
        drawn = self._noise(step, (self._replicas, self._draws * self._width), self._like)
        rows = [self._row(part) for part in drawn.split(self._width, 1)]
        if not return_U:
            return rows[0]
        # int_0^1 W ds given W(1): half of W(1), plus an independent Gaussian of variance 1/12.
        return rows[0], 0.5 * rows[0] + rows[1] / math.sqrt(12)

    def _row(self, drawn: Tensor) -> Tensor:
        """Return diagonal noise as one flat row like the state, zero for fields without noise."""
        if self._layout is None:
            return drawn
        parts, used = [], 0
        for size, noisy in self._layout:
            if noisy:
                width = size // self._replicas
                parts.append(drawn[:, used : used + width].reshape(size))
                used += width
            else:
                parts.append(self._like.new_zeros(size))
        return torch.cat(parts).unsqueeze(0)

    @property
    def shape(self) -> tuple[int, int]:
        if self._layout is None:
            return (self._replicas, self._width)
        return (1, sum(size for size, _ in self._layout))
