"""Constrained systems that several tests run."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import adjsim

ANGLE = 1.9106
WATER = torch.tensor(
    [[0.0, 0, 0], [1, 0, 0], [math.cos(ANGLE), math.sin(ANGLE), 0]], dtype=torch.float64
)
WATER_LENGTHS = (1.0, 1.0, 2 * math.sin(ANGLE / 2))
TRIANGLE = torch.tensor([[0, 1], [0, 2], [1, 2]])


def tensor(x) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def waters(count: int) -> tuple[Tensor, Tensor]:
    """Positions of rigid triatomics on a line, each turned, and their constraints."""
    axis = torch.eye(3, dtype=torch.float64)
    found = [(WATER @ axis.roll(k, 0)) + tensor([2.2 * k, 0.3 * k, 0]) for k in range(count)]
    return torch.cat(found), torch.cat([TRIANGLE + 3 * k for k in range(count)])


class MixedClusters:
    """Two rigid waters and a dimer of unlike atoms, whose numbers are leaves."""

    def __init__(self) -> None:
        position, index = waters(2)
        position = torch.cat([position, tensor([[1.0, 1.5, 2.5], [1.0, 2.7, 2.5], [3, 2, 1]])])
        # The dimer comes first, so that the order of the clusters is not that of the pairs.
        self.index = torch.cat([tensor([[7, 6]]).long(), index])
        self.leaves = {
            "epsilon": tensor(0.7),
            "mass": tensor([3.0, 1, 1, 2, 1, 1.5, 2, 1, 1]),
            "kT": tensor(0.8),
            "friction": tensor(0.6),
            "length": tensor([1.2, *WATER_LENGTHS, *WATER_LENGTHS]),
            "position": position,
        }

    def constrained(self, numbers: dict[str, Tensor]) -> adjsim.Constrained:
        potential = adjsim.SoftSphere(numbers["epsilon"], 1.5)
        inner = adjsim.Langevin(potential, numbers["mass"], numbers["kT"], numbers["friction"])
        return adjsim.Constrained(inner, adjsim.DistanceConstraints(self.index, numbers["length"]))

    def run(
        self, numbers: dict[str, Tensor], steps: int, scheme: str = "BAOAB", **options
    ) -> adjsim.Trajectory:
        dynamics, dt = self.constrained(numbers), 0.02
        start = dynamics.init(numbers["position"], generator=1)
        exact = options.pop("exact", False)
        return adjsim.simulate(
            dynamics,
            start,
            [0.0, steps * dt],
            solver=adjsim.Splitting(scheme, dt, exact=exact),
            generator=2,
            **options,
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(x.clone()) for name, x in self.leaves.items()}


def weighted(state) -> Tensor:
    """A number in which every entry of position and momentum has a weight of its own."""
    weights = torch.linspace(0.3, 1.0, state.position.numel(), dtype=torch.float64)
    weights = weights.reshape(state.position.shape)
    return (weights * state.position).sum() + (weights.flip(0) * state.momentum).sum()
