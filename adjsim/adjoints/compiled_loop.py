"""A compiled loop, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from adjsim.adjoints.loops import Constant


class LoopConstants(NamedTuple):
    """The inputs that do not change in a loop.

    Attributes:
        steps: the number of steps of the loop.
        first: the number of its first step.
        begin: the time of step 0.
        coefficients: the coefficients, by letter and name.
        parameters: all tensors of the dynamics.
        spacings: the spacings of a lattice.
        noise: the noise of its steps; empty without noise.
        average: in a backward loop, the cotangent of a time average at each step; else empty.
        states: in a backward loop that reads stored states, the fields of the states before its
            steps, and what these steps have saved; else empty.
    """

    steps: Tensor
    first: Tensor
    begin: Tensor
    coefficients: dict[str, dict[str, Tensor]]
    parameters: tuple[Tensor, ...]
    spacings: dict[str, Tensor]
    noise: tuple[Tensor, ...] = ()
    average: tuple[Tensor, ...] = ()
    states: tuple[Tensor, ...] = ()


@dataclass
class Loop:
    """A compiled loop.

    Attributes:
        function: the compiled function of constants and carry.
        path: how it was compiled, for the statistics of a run.
        fixed_evaluations: energy evaluations outside of its iterations.
        evaluations_per_step: energy evaluations in each iteration.
        constants: the tensors that it has captured.
    """

    function: Callable[[LoopConstants, Any], tuple[Any, list[Tensor]]] | None = None
    path: str = ""
    fixed_evaluations: int = 0
    evaluations_per_step: int = 0
    constants: list[Constant] = field(default_factory=list)
