"""A compiled loop, and its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from adjsim.adjoints.loops.compilation import Constant, LoopSpec


class LoopConstants(NamedTuple):
    """The inputs that do not change in a loop.

    Attributes:
        steps, first: the number of steps of the loop, and the number of the first.
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


@dataclass(eq=False)
class Loop:
    """A compiled loop.

    Attributes:
        function: the compiled function of constants and carry.
        path: how it was compiled.
        fixed_evaluations: energy evaluations outside of its iterations.
        evaluations_per_step: energy evaluations in each iteration.
        constants: the tensors that it has captured.
        seconds: the time of its calls since the last check (:mod:`adjsim.adjoints.loops.check`);
            infinite before the first.
        check_seconds: the shortest time of a check; 0 before the first.
        rounding: the largest difference that rounding is known to make in one step, for each tensor
            of the carry; empty where none is known.
        stale: whether a value that it does not read anew has been found to have changed.
    """

    function: Callable[[LoopConstants, Any], tuple[Any, list[Tensor]]] | None = None
    path: str = ""
    fixed_evaluations: int = 0
    evaluations_per_step: int = 0
    constants: list[Constant] = field(default_factory=list)
    seconds: float = math.inf
    check_seconds: float = 0.0
    rounding: list[float] = field(default_factory=list)
    stale: bool = False


# Specifies a loop of a runner, and counts the energy evaluations of the compiled loop.
Specify = Callable[[Any, Loop], LoopSpec[Any, Any]]


@dataclass(frozen=True)
class LoopKind:
    """A kind of loops, such as forward steps that store their states.

    Attributes:
        differentiates: whether autograd runs in it, so that parameters and coefficients are leaves.
        backward: whether it is a loop of the backward pass.
        uncompiled: specifies the same steps without compilation; None: ``specify``.
    """

    specify: Specify
    differentiates: bool = False
    backward: bool = False
    uncompiled: Specify | None = None
