"""Constrained systems that several tests run."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

import adjsim
from tests.pressure import TURNED


def tensor(x) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


ANGLE = 1.9106
WATER = torch.tensor(
    [[0.0, 0, 0], [1, 0, 0], [math.cos(ANGLE), math.sin(ANGLE), 0]], dtype=torch.float64
)
WATER_LENGTHS = (1.0, 1.0, 2 * math.sin(ANGLE / 2))
TRIANGLE = torch.tensor([[0, 1], [0, 2], [1, 2]])


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
        exact = options.pop("exact", False)
        return adjsim.simulate(
            dynamics,
            self.start(dynamics, numbers),
            [0.0, steps * dt],
            solver=adjsim.Splitting(scheme, dt, exact=exact),
            generator=2,
            **options,
        )

    def start(self, dynamics: adjsim.Constrained, numbers: dict[str, Tensor]):
        return dynamics.init(numbers["position"], generator=1)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(x.clone()) for name, x in self.leaves.items()}


class ClustersWithMemory(MixedClusters):
    """The same clusters in a bath with a memory of two exponentials."""

    def __init__(self) -> None:
        super().__init__()
        del self.leaves["friction"]
        self.leaves |= {"rates": tensor([4.0, 1.0]), "strengths": tensor([8.0, 1.0])}

    def constrained(self, numbers: dict[str, Tensor]) -> adjsim.Constrained:
        potential = adjsim.SoftSphere(numbers["epsilon"], 1.5)
        given = {name: numbers[name] for name in ("mass", "kT", "rates", "strengths")}
        inner = adjsim.GeneralizedLangevin(potential, **given)
        return adjsim.Constrained(inner, adjsim.DistanceConstraints(self.index, numbers["length"]))


class ClustersAtPressure(MixedClusters):
    """The same clusters with a piston, and forces within the clusters too."""

    BOXES: ClassVar = {
        "orthogonal": tensor([9.0, 9.5, 10.0]),
        "tilted": tensor([[9.0, 0.0, 0.0], [1.7, 9.5, 0.0], [-1.2, 1.5, 10.0]]),
        "turned": 2.6 * TURNED,
    }

    def __init__(self, kind: str = "orthogonal", axes: str = "isotropic", chains=False) -> None:
        super().__init__()
        self.box, self.axes, self.chains = self.BOXES[kind], axes, chains
        self.leaves |= {"pressure": tensor(0.05), "tau": tensor(0.8)}
        if chains:
            self.leaves["chain_tau"] = self.leaves.pop("friction")

    @property
    def scheme(self) -> str:
        kind = adjsim.NoseHooverPiston if self.chains else adjsim.LangevinPiston
        return kind.scheme

    def constrained(self, numbers: dict[str, Tensor], **more) -> adjsim.Constrained:
        truncation = adjsim.potentials.Switched(2.0)
        potential = adjsim.LennardJones(
            numbers["epsilon"], 1.05, cutoff=2.5, box=self.box, truncation=truncation
        )
        names = {"mass", "kT", "pressure", "tau", "friction", "chain_tau"} & set(numbers)
        given = {name: numbers[name] for name in names} | more
        if self.chains:
            inner = adjsim.NoseHooverPiston(potential, axes=self.axes, **{"dof": 20, **given})
        else:
            inner = adjsim.LangevinPiston(potential, axes=self.axes, **given)
        return adjsim.Constrained(inner, adjsim.DistanceConstraints(self.index, numbers["length"]))

    def start(self, dynamics: adjsim.Constrained, numbers: dict[str, Tensor]):
        rows = 1 + torch.linspace(0.01, 0.05, 3, dtype=torch.float64)
        if self.axes == "isotropic":
            rows = rows.mean()
        box = (self.box.mT * rows).mT if self.box.ndim == 2 else self.box * rows
        return dynamics.init(numbers["position"], generator=1, box=box)


def weighted(state) -> Tensor:
    """A number in which every entry of a state has a weight of its own."""
    total = tensor(0.0)
    for k, x in enumerate(state):
        weights = torch.linspace(0.3, 1.0, x.numel(), dtype=torch.float64).reshape(x.shape)
        total = total + ((weights.flip(0) if k % 2 else weights) * x).sum()
    return total
