"""Small systems of every kind, and what is computed with each: the rows of the tests of devices."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import adjsim
from adjsim.core.state import State
from adjsim.potentials.charges.ewald import Ewald, ParticleMeshEwald
from adjsim.potentials.learnt.graph import GraphPotential
from tests import fields, mechanics, pressure, problems
from tests.contracts import test_elastic, test_ewald, test_graph, test_solvent, test_tiles
from tests.contracts.test_pair_operator import gas
from tests.problems import parameter, vector
from tests.sites import force_field

DT = 0.002


class System(NamedTuple):
    """A dynamics, a start and a solver; ``exact`` is None where it has no exact form."""

    dynamics: nn.Module
    state: State
    solver: Any
    exact: Any = None


def molecular(dynamics: Any, position: Tensor) -> System:
    """A start with momenta, and velocity Verlet."""
    torch.manual_seed(0)
    momentum = 0.1 * torch.randn(position.shape, dtype=torch.float64)
    state = problems.start(dynamics, position, momentum)
    verlet, exact = adjsim.Splitting("BAB", DT), adjsim.Splitting("BAB", DT, exact=True)
    return System(dynamics, state, verlet, exact)


def drawn(word: str, name: str) -> System:
    """A thermostat of the tables of problems, on four atoms in the plane."""
    case = problems.Case(name, word, "lennard-jones")
    dynamics = case.build()
    state = case.start(dynamics, *problems.square())
    exact = replace(case, exact=True).solver if case.couplings else None
    return System(dynamics, state, case.solver, exact)


def listed() -> tuple[nn.Module, Tensor]:
    """A liquid of 216 atoms, whose pairs are found by a list."""
    generator = torch.Generator().manual_seed(0)
    sites = 1.2 * torch.cartesian_prod(*[torch.arange(6, dtype=torch.float64)] * 3)
    position = sites + 0.05 * torch.randn(216, 3, generator=generator, dtype=torch.float64)
    return adjsim.LennardJones(parameter(1.0), parameter(1.0), cutoff=1.8, box=[7.2] * 3), position


def mixed() -> tuple[nn.Module, Tensor]:
    _, position = listed()
    mixture = adjsim.LennardJonesMixture(
        torch.arange(216) % 2, vector(1.1, 0.8), vector(0.95, 0.9), cutoff=1.8, box=[7.2] * 3
    )
    return mixture, position


def moving(skin: float, word: str = "BAB", replicas: int = 0) -> System:
    """A liquid that leaves the lists of a small skin after a few steps."""
    _, position = listed()
    if replicas:
        position = torch.stack([position + 0.01 * k * position.sin() for k in range(replicas)])
    pairs = adjsim.LennardJones(
        parameter(1.0), parameter(1.0), cutoff=1.8, box=[7.2] * 3, skin=skin,
        exclusions=[(0, 1), (7, 43)],
    )  # fmt: skip
    made = molecular(adjsim.Hamiltonian(pairs, parameter(1.3)), position)
    solvers = (adjsim.Splitting(word, DT, exact=exact) for exact in (False, True))
    return System(*made[:2], *solvers)


def several() -> tuple[nn.Module, Tensor]:
    """Pairs with exclusions, numbers of species and of atoms, and functions in tables."""
    made = (test_tiles.POTENTIALS[name]() for name in ("exclusions", "species", "Wolf", "tables"))
    return functools.reduce(operator.add, made), gas(torch.diag(test_tiles.BOX), 24, 1)


def joined() -> tuple[nn.Module, Tensor]:
    """A mixture and charges on a mesh, whose pairs take one pass over one list."""
    _, position = listed()
    charge = nn.Parameter((-1.0) ** torch.arange(216, dtype=torch.float64))
    options: Any = {"cutoff": 1.8, "box": [7.2] * 3, "exclusions": [[0, 1], [7, 43]]}
    mixture = adjsim.LennardJonesMixture(
        torch.arange(216) % 2, vector(1.1, 0.8), vector(0.95, 0.9), **options
    )
    return mixture + ParticleMeshEwald(charge, tolerance=1e-3, **options), position


def bonded() -> tuple[nn.Module, Tensor]:
    position = problems.square()[0]
    return problems.POTENTIALS["bonded"](), position


def ewald(make: Callable[..., Ewald | ParticleMeshEwald]) -> tuple[nn.Module, Tensor]:
    _, position, _ = test_ewald.problem()
    return make(), position


def solvent() -> tuple[nn.Module, Tensor]:
    found = test_solvent.molecule()
    return test_solvent.trainable(found), found["position"]


def graph() -> tuple[GraphPotential, Tensor]:
    return test_graph.graph(), test_graph.lattice()


def solid() -> tuple[nn.Module, Tensor]:
    return test_elastic.body("neo-hookean"), test_elastic.moved(test_elastic.SOLID, 0.02)


def body(name: str, solver: Any = None) -> System:
    dynamics = mechanics.BODIES[name]()
    state = mechanics.start_of(dynamics, *mechanics.start())
    return System(dynamics, state, solver or adjsim.Splitting(dynamics.scheme, DT))


def equation(noise: str | None, solver: Any) -> System:
    dynamics = fields.equation(noise)
    return System(dynamics, dynamics.init(fields.start()), solver)


def at_pressure(kind: str, **settings: Any) -> System:
    dynamics = pressure.piston(kind, **settings)
    word = dynamics.scheme
    exact = adjsim.Splitting(word, DT, exact=True)
    return System(dynamics, pressure.start(dynamics), adjsim.Splitting(word, DT), exact)


def potential(pair: Callable[[], tuple[nn.Module, Tensor]]) -> Callable[[], System]:
    def made() -> System:
        found, position = pair()
        return molecular(adjsim.Hamiltonian(found, parameter(1.3)), position)

    return made


def thermostats() -> dict[str, Callable[[], System]]:
    words = {**problems.SCHEMES, **problems.STOCHASTIC_SCHEMES, **problems.THERMOSTAT_SCHEMES}
    return {name: functools.partial(drawn, found[0], name) for name, found in words.items()}


SYSTEMS: dict[str, Callable[[], System]] = {
    **thermostats(),
    "listed": potential(listed),
    "listed mixture": potential(mixed),
    "bonded": potential(bonded),
    "own module": potential(lambda: (problems.Cage(), problems.square()[0])),
    "ewald": potential(lambda: ewald(test_ewald.ewald)),
    "mesh": potential(lambda: ewald(test_ewald.mesh)),
    "joined": potential(joined),
    "solvent": potential(solvent),
    "sites": potential(lambda: (force_field(None), pressure.position())),
    "graph": potential(graph),
    "solid": potential(solid),
    "piston": lambda: at_pressure("orthogonal", axes="each"),
    "piston, mesh": lambda: at_pressure("mesh"),
    "piston, chains": lambda: at_pressure("tilted", chains=True, tail=True),
    **{name: functools.partial(body, name) for name in mechanics.BODIES},
    "implicit": lambda: body("friction", adjsim.solvers.ImplicitMidpoint(DT)),
    "rk4": lambda: equation(None, adjsim.RungeKutta("rk4", DT)),
    "reversible heun": lambda: equation(None, adjsim.solvers.ReversibleHeun(DT)),
    **{
        f"{type(solver).__name__}, {noise}": functools.partial(equation, noise, solver)
        for noise, solver in (
            ("diagonal", adjsim.EulerMaruyama(DT)),
            ("general", adjsim.EulerMaruyama(DT)),
            ("additive", adjsim.EulerMaruyama(DT)),
            ("diagonal", adjsim.solvers.Milstein(DT)),
            ("diagonal", adjsim.solvers.StochasticHeun(DT)),
            ("diagonal", adjsim.solvers.ReversibleHeun(DT)),
        )
    },
}
# Those whose pairs are summed by the programs for a GPU.
TILED: dict[str, Callable[[], System]] = {
    "langevin": SYSTEMS["langevin"],
    "listed": SYSTEMS["listed"],
    "pairs": potential(several),
}
