"""A test of whether an observable depends on momenta."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from adjsim.core.state import AnyState, momentum_of
from adjsim.core.trajectory import Final, TimeAverage, Trajectory, check_times
from adjsim.estimators.probes import depends_on
from adjsim.estimators.replicas import Observable, Simulation


class MomentumCheck:
    """A test of whether an observable depends on momenta, which have no path density under BAOAB.

    In the test, momenta are displaced and values are compared, since automatic differentiation does
    not see a dependence behind ``detach()`` or through a comparison. In addition, differentiation
    finds a dependence that does not change the value at the tested states.
    """

    def __init__(self, observable: Observable[Any], times: Tensor) -> None:
        self.observable, self.times = observable, times

    @classmethod
    def of(cls, simulation: Simulation[Any], observable: Observable[Any]) -> MomentumCheck | None:
        """Return the test of an observable of this simulation, or None if it may read momenta."""
        restricted = getattr(simulation.solver, "scheme", None) == "BAOAB"
        return cls(observable, check_times(simulation.ts)) if restricted else None

    def refuse_momenta(self, final: AnyState, frames: AnyState | None) -> None:
        """Refuse an observable whose value changes with the momenta of these states."""
        if depends_on(lambda state: self._seen(state, final, frames), final, "momentum"):
            self._refuse()

    def refuse_slopes(self, final: AnyState, frames: AnyState | None) -> None:
        """Refuse an observable whose graph reaches the momenta."""
        with torch.enable_grad():
            moving = final._replace(momentum=momentum_of(final).detach().requires_grad_())
            seen = self._seen(moving, final, frames)
        if not seen.requires_grad:
            return
        (slope,) = torch.autograd.grad(seen.sum(), momentum_of(moving), allow_unused=True)
        if slope is not None:
            self._refuse()

    def _seen(self, state: AnyState, final: AnyState, frames: AnyState | None) -> Tensor:
        """Evaluate the observable with displaced momenta.

        The displacements of the frames differ, so differences between frames change too.
        """
        if isinstance(self.observable, TimeAverage | Final):
            return self.observable.function(state)
        assert frames is not None
        shares = (
            torch.linspace(0.5, 1.0, len(momentum_of(frames)), dtype=torch.float64)
            .to(momentum_of(state))
            .square()
        )
        along = momentum_of(state) - momentum_of(final)
        moved = momentum_of(frames) + shares.reshape(-1, 1, 1, 1) * along
        return self.observable(
            Trajectory(self.times, frames._replace(momentum=moved), None, state, {})
        )

    @staticmethod
    def _refuse() -> NoReturn:
        raise ValueError(
            "Girsanov: under BAOAB only positions have a path density, and the observable depends "
            "on momenta; use Splitting('OBABO', dt)."
        )
