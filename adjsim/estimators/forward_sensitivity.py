"""Tangents carried along with the run."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adjsim._noise import Noise
from adjsim._state import State
from adjsim._trajectory import TimeAverage
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.estimators.base import Chunk, ChunkedEstimator, Observable, Simulation, checked, look
from adjsim.simulation import run


class ForwardSensitivity(ChunkedEstimator):
    """The pathwise gradient by forward differentiation: the tangent of the state, by one entry of one parameter, is carried
    along with the run.

    It equals :class:`Pathwise` to rounding. A run is made for every entry of every parameter, in the memory of a run without
    a gradient, and observables along the way cost nothing more: for few parameters and many observables, such as a whole curve
    in time. For many parameters use :class:`Pathwise`.
    """

    estimand: ClassVar[str] = "path"

    def check(self, simulation: Simulation, observable: Observable) -> None:
        if getattr(simulation.solver, "exact", False):
            raise TypeError("ForwardSensitivity does not go with exact=True, which has no forward derivative; use Pathwise.")

    def chunk(self, simulation: Simulation, observable: Observable, start: State, noise: Noise | None) -> Chunk:
        module, parameters = _Run(simulation, observable, start, noise), simulation.dynamics.trainable()
        values = {f"dynamics.{name}": p.detach() for name, p in parameters.items()}

        def mean(numbers: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(module, numbers, ())

        if not parameters:
            value = module().detach()
            return Chunk(value, {}, {"energy_evaluations": module.evaluations})
        value = torch.zeros(())
        grads: dict[str, Tensor] = {}
        for name, p in parameters.items():
            columns = []
            for i in range(p.numel()):
                along = {key: torch.zeros_like(x) for key, x in values.items()}
                along[f"dynamics.{name}"].reshape(-1)[i] = 1.0
                value, column = torch.func.jvp(mean, (values,), (along,))[:2]
                columns.append(column)
            grads[name] = torch.stack(columns, -1).reshape((*value.shape, *p.shape)).detach()
        return Chunk(value.detach(), grads, {"energy_evaluations": module.evaluations})

    def __repr__(self) -> str:
        return "ForwardSensitivity()"


class _Run(nn.Module):
    """The simulation as a function of its dynamics' parameters."""

    def __init__(self, simulation: Simulation, observable: Observable, start: State, noise: Noise | None) -> None:
        super().__init__()
        self.dynamics = simulation.dynamics
        self._made: dict[str, Any] = {"simulation": simulation, "observable": observable, "start": start, "noise": noise}
        self.evaluations = 0

    def forward(self) -> Tensor:
        simulation, observable, start, noise = self._made.values()
        record = observable if isinstance(observable, TimeAverage) else None
        made = run(self.dynamics, start, simulation.ts, simulation.solver, DirectAdjoint(), record, noise)
        self.evaluations += made.stats["energy_evaluations"]
        return checked(look(observable, made), start).mean(0)
