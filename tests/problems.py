"""Systems to test on: small, smooth, with every parameter trainable; and what their answers are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim.compiler.inductor import compile_with_torch
from adjsim.compiler.to_cpp import Compiled, Parts
from adjsim.core.state import State
from adjsim.dynamics import Dynamics
from adjsim.potentials.pairs.kernels.cpu import lists
from adjsim.solvers.base import SteppingSolver

# For tests of chaotic runs, whose sweeps warn that their gradients grow.
chaotic = pytest.mark.filterwarnings("ignore:the cotangents of the state grew")


def parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


class Cage(nn.Module):
    """A plain module with no closed forms: Morse pairs in a quartic cage. Its force goes through
    automatic differentiation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.width, self.stiffness = parameter(1.2), parameter(1.1), parameter(0.3)

    def forward(self, position: Tensor) -> Tensor:
        i, j = torch.triu_indices(position.shape[-2], position.shape[-2], offset=1)
        r = (position[..., i, :] - position[..., j, :]).norm(dim=-1)
        pairs = self.depth * (1 - torch.exp(-self.width * (r - 1.1))) ** 2
        return pairs.sum(-1) + self.stiffness * (position**4).sum((-1, -2))


def vector(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


POTENTIALS: dict[str, Callable[[], nn.Module]] = {
    "harmonic": lambda: adjsim.Harmonic(parameter(1.3), parameter(0.2)),
    "double-well": lambda: adjsim.DoubleWell(parameter(0.7)),
    "asymmetric": lambda: adjsim.AsymmetricDoubleWell(parameter(0.7), parameter(-0.3)),
    "muller-brown": lambda: adjsim.MullerBrown(),
    "lennard-jones": lambda: adjsim.LennardJones(parameter(1.1), parameter(0.95)),
    "cutoff": lambda: adjsim.LennardJones(
        parameter(1.1), parameter(0.95), cutoff=1.75, box=[3.6, 3.7]
    ),
    "tilted": lambda: adjsim.LennardJones(
        parameter(1.1), parameter(0.95), cutoff=1.75, box=[[3.6, 0.0], [0.6, 3.6]]
    ),
    "mixture": lambda: adjsim.LennardJonesMixture(
        torch.tensor([0, 1, 0, 1]),
        nn.Parameter(torch.tensor([1.1, 0.8], dtype=torch.float64)),
        nn.Parameter(torch.tensor([0.95, 0.9], dtype=torch.float64)),
    ),
    "bonded": lambda: (
        adjsim.MorseBond([[0, 1], [0, 2]], vector(1.1, 0.9), parameter(1.5), parameter(1.1))
        + adjsim.HarmonicAngle([[1, 0, 2]], parameter(1.3), parameter(1.7))
        + adjsim.CosineAngle([[0, 1, 3], [0, 2, 3]], parameter(0.8), vector(1.4), types=[0, 0])
        + adjsim.UreyBradley([[0, 2, 3]], parameter(0.7), parameter(1.8))
        + adjsim.PositionRestraint([3], parameter(0.5), nn.Parameter(torch.ones(1, 2).double()))
    ),
    "plain-module": Cage,
}

DYNAMICS: dict[str, Callable[[nn.Module], Dynamics]] = {
    "hamiltonian": lambda potential: adjsim.Hamiltonian(potential, parameter(1.4)),
    "hamiltonian-masses": lambda potential: adjsim.Hamiltonian(
        potential, nn.Parameter(torch.tensor([1.0, 1.5, 0.8, 2.0], dtype=torch.float64))
    ),
    "chain-1": lambda potential: adjsim.NoseHooverChain(
        potential, parameter(1.4), parameter(0.6), parameter(0.5), length=1
    ),
    "chain-3": lambda potential: adjsim.NoseHooverChain(
        potential, parameter(1.4), parameter(0.6), parameter(0.5)
    ),
    "esh": lambda potential: adjsim.ESH(potential),
}

SCHEMES = {
    "hamiltonian": ["BAB", "ABA", "BA", "BABAB"],
    "hamiltonian-masses": ["BAB"],
    "chain-1": ["NBABN"],
    "chain-3": ["NBABN", "BNANB", "ANBNA", "BAN"],
    "esh": ["EAE", "AEA", "AE"],
}


STOCHASTIC: dict[str, Callable[[nn.Module], Dynamics]] = {
    "langevin": lambda potential: adjsim.Langevin(
        potential, parameter(1.4), parameter(0.6), parameter(0.8)
    ),
    "langevin-atoms": lambda potential: adjsim.Langevin(
        potential, vector(1.0, 1.5, 0.8, 2.0), parameter(0.6), vector(0.5, 2.0, 1.0, 3.0)
    ),
    "generalised-1": lambda potential: adjsim.GeneralizedLangevin(
        potential, parameter(1.4), parameter(0.6), vector(1.5), vector(2.0)
    ),
    "generalised-2": lambda potential: adjsim.GeneralizedLangevin(
        potential, vector(1.0, 1.5, 0.8, 2.0), parameter(0.6), vector(1.0, 4.0), vector(1.0, 8.0)
    ),
    "overdamped": lambda potential: adjsim.OverdampedLangevin(
        potential, parameter(0.6), parameter(3.0)
    ),
}

STOCHASTIC_SCHEMES = {
    "langevin": ["BAOAB", "OBABO", "ABOBA", "OABAO", "BAO"],
    "langevin-atoms": ["BAOAB"],
    "generalised-1": ["BAGAB"],
    "generalised-2": ["GBABG", "BAGAB", "AGBGA"],
    "overdamped": ["EulerMaruyama", "LeimkuhlerMatthews"],
}

# Thermostats that have no invariant, or no inverse, or do not sample the canonical distribution.
THERMOSTATS: dict[str, Callable[[nn.Module], Dynamics]] = {
    "velocity-rescale": lambda potential: adjsim.VelocityRescale(
        potential, vector(1.0, 1.5, 0.8, 2.0), parameter(0.6)
    ),
    "berendsen": lambda potential: adjsim.Berendsen(
        potential, parameter(1.4), parameter(0.6), parameter(0.5)
    ),
    "bussi": lambda potential: adjsim.Bussi(
        potential, vector(1.0, 1.5, 0.8, 2.0), parameter(0.6), parameter(0.5), dof=6
    ),
    # The rate has no gradient. An atom collides about once in a run of 25 steps of 0.01.
    "andersen": lambda potential: adjsim.Andersen(
        potential, parameter(1.4), parameter(0.6), rate=4.0
    ),
}

THERMOSTAT_SCHEMES = {
    "velocity-rescale": ["BABR"],
    "berendsen": ["BABR", "RBABR"],
    "bussi": ["BABR", "RBABR"],
    "andersen": ["BABC", "CBABC"],
}

UNDERDAMPED = [
    (d, s) for d, words in STOCHASTIC_SCHEMES.items() for s in words if d != "overdamped"
]


def slow_but(
    short: Callable[..., bool],
    rows: Iterable[Any],
    marathon: Callable[..., bool] = lambda *_: False,
) -> list[Any]:
    """The rows of a table, marked slow but for those of the default tests and marathons."""

    def marked(row: Any) -> Any:
        entries = row if isinstance(row, tuple) else (row,)
        if short(*entries):
            return row
        mark = pytest.mark.marathon if marathon(*entries) else pytest.mark.slow
        return pytest.param(*entries, marks=mark)

    return [marked(row) for row in rows]


def by_inductor(
    parts: Parts,
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    exact: bool,
    threads: int,
    capacity: int = 0,
) -> tuple[Compiled, str, None]:
    """Compile a loop as on a GPU, in place of :func:`adjsim.compiler.to_cpp.compile_to_cpp`."""
    return *compile_with_torch(parts, constants, carry, exact, False, capacity), None


def square(replicas: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Four atoms in the plane, bound and moving: position and momentum."""
    generator = torch.Generator().manual_seed(7)
    corners = torch.tensor([[0.0, 0.0], [1.15, 0.1], [-0.05, 1.2], [1.1, 1.1]], dtype=torch.float64)
    shift = 0.02 * torch.randn(*replicas, 4, 2, generator=generator, dtype=torch.float64)
    momentum = 0.4 * torch.randn(*replicas, 4, 2, generator=generator, dtype=torch.float64)
    return corners + shift, momentum


@dataclass(frozen=True)
class Case:
    """A dynamics, a scheme (a word, or the name of a solver) and a potential: one row of a table
    test.
    """

    dynamics: str
    scheme: str
    potential: str
    exact: bool = False

    def build(self) -> Dynamics:
        return {**DYNAMICS, **STOCHASTIC, **THERMOSTATS}[self.dynamics](
            POTENTIALS[self.potential]()
        )

    def start(self, dynamics: Dynamics, position: Tensor, momentum: Tensor) -> State:
        return start(dynamics, position, momentum)

    @property
    def dt(self) -> float:
        return 0.001 if self.potential == "muller-brown" else 0.01

    @property
    def solver(self) -> SteppingSolver:
        named = {
            "EulerMaruyama": adjsim.EulerMaruyama,
            "LeimkuhlerMatthews": adjsim.LeimkuhlerMatthews,
        }
        return (
            named[self.scheme](self.dt)
            if self.scheme in named
            else adjsim.Splitting(self.scheme, self.dt, exact=self.exact)
        )

    @property
    def invertible(self) -> bool:
        return self.dynamics not in ("overdamped", "velocity-rescale", "andersen")

    @property
    def couplings(self) -> bool:
        """Whether it is made of shears and scales, so that it has an exact form."""
        return self.dynamics not in ("overdamped", "esh", *THERMOSTATS)

    def __str__(self) -> str:
        return f"{self.dynamics}-{self.scheme}-{self.potential}"


def start(dynamics: Dynamics, position: Tensor, momentum: Tensor, seed: int = 5) -> State:
    """A start whose bath variables, if any, are always the same draw."""
    if isinstance(dynamics, adjsim.OverdampedLangevin):
        return dynamics.init(position)
    return dynamics.init(position, momentum, seed)


def schemes() -> list[Case]:
    """Every scheme on the Lennard-Jones system."""
    every = {**SCHEMES, **STOCHASTIC_SCHEMES, **THERMOSTAT_SCHEMES}
    return [Case(d, s, "lennard-jones") for d, words in every.items() for s in words]


def potentials() -> list[Case]:
    """Every other potential under one scheme of each kind."""
    kinds = [
        ("hamiltonian", "BAB"),
        ("chain-3", "NBABN"),
        ("esh", "EAE"),
        ("langevin", "BAOAB"),
        ("overdamped", "EulerMaruyama"),
    ]
    return [
        Case(d, s, p) for (d, s), p in itertools.product(kinds, POTENTIALS) if p != "lennard-jones"
    ]


def lists_built():
    """The number of neighbour lists that this process has built."""
    return lists(torch.float64).neighbours_builds()
