"""Controls: forces that are functions of time, and of the state if they are feedback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.arguments import outside_inference_mode
from adjsim.core.parameters import register
from adjsim.core.reading import read
from adjsim.core.typing import Array, Number, Positions
from adjsim.potentials.base import ForceField
from adjsim.potentials.bonded.selection import Selection, as_vertices
from adjsim.potentials.evaluated import as_module


class Placement(nn.Module):
    """Place rows at chosen vertices, None for all, with zero at all others."""

    def __init__(self, index: Array | None, name: str = "index") -> None:
        super().__init__()
        self.count: int | None = None
        if index is None:
            return
        with outside_inference_mode():
            found = as_vertices(index, name)
            if len(found.unique()) != len(found):
                raise ValueError(f"{name} must not repeat a vertex; got {found.tolist()}.")
            self.count, self.reach = len(found), int(found.max()) + 1
            self.vertices = Selection(found, self.reach)

    def forward(self, value: Tensor, position: Tensor) -> Tensor:
        """Place ``(*batch, vertices, dim)``, or values that broadcast to it."""
        *batch, atoms, dim = position.shape
        shape = (*batch, atoms if self.count is None else self.count, dim)
        if self.count is not None and self.reach > atoms:
            raise ValueError(
                f"index names vertex {self.reach - 1} and position has {atoms} vertices, numbered "
                "from 0."
            )
        try:
            rows = value.to(position).expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"the force of a control must be {tuple(shape[-2:])}, a row for each of its "
                f"vertices; got shape {tuple(value.shape)}."
            ) from error
        if self.count is None:
            return rows
        return self.spread(rows, atoms)

    def spread(self, rows: Tensor, atoms: int) -> Tensor:
        """Return the rows of so many atoms, ``(*batch, atoms, dim)``."""
        return self.vertices.transpose(rows.transpose(-1, -2), atoms).transpose(-1, -2)


class OpenLoop(ForceField):
    """A force that is a function of time alone, ``F_i(t) = signal(t)_i``.

    Args:
        signal: maps a time to ``(vertices, dim)``, or to a shape that broadcasts to it; see
            :mod:`adjsim.potentials.signals.signals`. Its numbers are the parameters of the control.
        index: ``(vertices,)`` integers, the vertices on which the force acts; None for all of them.

    Raises:
        ValueError: an index that is negative or repeats a vertex; at evaluation, one that the
            position does not have.
    """

    def __init__(self, signal: nn.Module, index: Array | None = None) -> None:
        super().__init__()
        self.signal = as_module("signal", signal)
        self.placed = Placement(index)

    def forward(self, t: Any, position: Positions) -> Positions:
        return self.placed(self.signal(t), position)


class Controller(nn.Module, ABC):
    """A feedback force, ``u(t, q, v)``. Subclasses write ``forward(t, position, velocity)``.

    The dynamics gives it the velocity, zero for fixed and prescribed vertices:
    ``Mechanics(potential, mass, control=controller)``. A sum of forces does not see velocities.
    """

    def __call__(self, *arguments: Any, **named: Any) -> Positions:
        if len(arguments) + len(named) != 3:
            raise TypeError(
                f"{type(self).__name__} reads velocities, which a potential does not see: give it "
                "to the dynamics, Mechanics(potential, mass, control=...)."
            )
        return nn.Module.__call__(read(self), *arguments, **named)

    @abstractmethod
    def forward(self, t: Any, position: Positions, velocity: Positions) -> Positions:
        """Compute the force ``(*batch, atoms, dim)`` at time t."""


class NeuralController(Controller):
    """Feedback by a network, ``u = scale * network([t, q, v])``.

    The network sees one row of ``1 + 2 atoms dim`` numbers for each system: the time, the positions
    and the velocities, each from the first vertex to the last one. It returns the forces on the
    vertices that the index names. If it ends with a bounded function such as ``nn.Tanh``, the scale
    is the largest force.

    Args:
        network: maps ``(*batch, 1 + 2 atoms dim)`` to ``(*batch, vertices dim)``, in the dtype of
            the run; in float64, ``network.double()``.
        index: ``(vertices,)`` integers, the vertices on which the force acts; None for all of them.
        scale: a number, or ``(vertices, dim)``, or a shape that broadcasts to it; zero for
            coordinates without an actuator.

    Raises:
        ValueError: at evaluation, a network whose result has another shape.
    """

    scale: Tensor

    def __init__(
        self, network: nn.Module, *, index: Array | None = None, scale: Number = 1.0
    ) -> None:
        super().__init__()
        self.network = as_module("network", network)
        self.placed = Placement(index)
        register(self, "scale", scale)

    def forward(self, t: Any, position: Positions, velocity: Positions) -> Positions:
        *batch, atoms, dim = position.shape
        time = position.new_zeros((*batch, 1)) + t
        seen = torch.cat([time, position.flatten(-2), velocity.flatten(-2)], -1)
        found: Tensor = self.network(seen)
        vertices = atoms if self.placed.count is None else self.placed.count
        if found.shape != (*batch, vertices * dim):
            raise ValueError(
                f"the network of {type(self).__name__} maps {tuple(seen.shape)} to "
                f"{tuple(found.shape)}; it must be {(*batch, vertices * dim)}, a force on each of "
                f"{vertices} vertices in {dim} dimensions."
            )
        return self.placed(self.scale.to(found) * found.unflatten(-1, (vertices, dim)), position)
