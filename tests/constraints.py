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


class LongChain:
    """A chain of rods with a side chain, whose constraints have a band, and a water."""

    rods = 20

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        chain = torch.arange(self.rods + 1, dtype=torch.float64)
        position = torch.stack([chain % 2, chain, 0.1 * chain], -1)
        branch = position[5] + tensor([[0.0, 0.3, 1.0], [0.5, 0.2, 1.9]])
        water, triangle = waters(1)
        position = torch.cat([position, branch, water + tensor([5.0, 0, 0])])
        rows = torch.arange(self.rods)
        n = self.rods + 1
        index = torch.stack([rows, rows + 1], -1)
        index = torch.cat([index, tensor([[5, n], [n, n + 1]]).long(), triangle + n + 2])
        index = index[torch.randperm(len(index), generator=generator)]
        length = (position[index[:, 0]] - position[index[:, 1]]).norm(dim=-1)
        mass = 1 + torch.rand(len(position), generator=generator, dtype=torch.float64)
        self.index, self.leaves = index, {"length": length, "mass": mass, "position": position}

    def run(self, numbers: dict[str, Tensor], **options) -> adjsim.Trajectory:
        potential = adjsim.Harmonic(0.3)
        inner = adjsim.Langevin(potential, numbers["mass"], 0.5, 0.4)
        held = adjsim.Constrained(inner, adjsim.DistanceConstraints(self.index, numbers["length"]))
        start = held.init(numbers["position"], generator=1)
        solver = adjsim.Splitting("BAOAB", 0.02, exact=options.pop("exact", False))
        return adjsim.simulate(held, start, [0.0, 0.08], solver=solver, generator=2, **options)


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
