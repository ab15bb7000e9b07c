"""Liquids of a few atoms in boxes that move, for tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import adjsim
from adjsim.core.strain import Strain
from adjsim.potentials.charges.ewald.dispersion import LennardJonesMesh
from adjsim.potentials.pairs.long_range import LongRangeCorrection
from adjsim.potentials.strained import reference_box
from tests.problems import parameter
from tests.sites import force_field

TILTED = torch.tensor([[3.6, 0.0, 0.0], [0.7, 3.5, 0.0], [-0.5, 0.6, 3.7]], dtype=torch.float64)
# Other rows of a lattice with the same widths, in an orientation of their own, of which nearest
# images are found by reduced rows.
_TURN = torch.linalg.matrix_exp(
    torch.tensor([[0.0, 0.4, -0.7], [-0.4, 0.0, 0.3], [0.7, -0.3, 0.0]], dtype=torch.float64)
)
_ROWS = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
TURNED = 1.05 * _ROWS @ TILTED @ _TURN


def at(module: nn.Module, value: Tensor) -> Strain:
    """The strain of the box of a module."""
    return Strain.of(reference_box(module), value)


class OwnPairs(nn.Module):
    """A module of a user's own, with a box that it reads as a buffer, and no closed forms."""

    def __init__(self, box: list[float]) -> None:
        super().__init__()
        self.register_buffer("box", torch.tensor(box, dtype=torch.float64))
        self.k = parameter(0.7)

    def forward(self, position: Tensor) -> Tensor:
        d = position.unsqueeze(-2) - position.unsqueeze(-3)
        d = d - self.box * torch.round(d.detach() / self.box)
        return self.k * torch.exp(-(d**2).sum(-1)).sum((-1, -2)) / 2


def bonded(pairs, box) -> nn.Module:
    """Terms of molecules that go around the box."""
    return (
        adjsim.HarmonicBond([[0, 1], [2, 3], [0, 7]], parameter(4.0), parameter(1.3), box=box)
        + adjsim.HarmonicAngle([[0, 1, 3], [7, 0, 2]], parameter(2.0), parameter(1.7), box=box)
        + adjsim.PeriodicTorsion(
            [[0, 1, 3, 2], [5, 4, 0, 7]], parameter(0.8), 2, parameter(0.4), box=box
        )
        + adjsim.ScaledPairs(pairs, [[4, 7], [1, 2]], parameter(0.5))
    )


def potential(kind: str = "orthogonal") -> nn.Module:
    """A potential in three dimensions for eight atoms, with every number trainable."""
    box = torch.tensor([3.6, 3.7, 3.8]).double()
    box = TILTED if kind.startswith("tilted") else TURNED if kind.startswith("turned") else box
    switched = adjsim.potentials.Switched(1.2)
    pairs = adjsim.LennardJones(
        parameter(1.1), parameter(0.95), cutoff=1.6, box=box, truncation=switched
    )
    if kind == "mixture":
        return adjsim.LennardJonesMixture(
            torch.tensor([0, 1] * 4),
            nn.Parameter(torch.tensor([1.1, 0.8], dtype=torch.float64)),
            nn.Parameter(torch.tensor([0.95, 0.9], dtype=torch.float64)),
            cutoff=1.6,
            box=box,
            exclusions=[[0, 1], [2, 5]],
        )
    if kind.endswith(("ewald", "mesh")):
        # Not neutral, with excluded pairs of which one is of two images.
        charge = nn.Parameter(torch.tensor([0.8, -0.8] * 3 + [0.8, -0.5], dtype=torch.float64))
        sums = adjsim.ParticleMeshEwald if kind.endswith("mesh") else adjsim.Ewald
        excluded = [[0, 1], [0, 4]]
        return pairs + sums(charge, cutoff=1.6, box=box, tolerance=1e-3, exclusions=excluded)
    if kind.endswith("dispersed"):
        return LennardJonesMesh(
            torch.tensor([0, 1] * 4),
            nn.Parameter(torch.tensor([1.1, 0.8], dtype=torch.float64)),
            nn.Parameter(torch.tensor([0.95, 0.9], dtype=torch.float64)),
            cutoff=1.6,
            box=box,
            tolerance=1e-3,
            exclusions=[[0, 1], [0, 4]],
        )
    if kind.endswith("bonded"):
        return bonded(pairs, box)
    if kind.endswith("sites"):
        return force_field(box)
    if kind.endswith("graph"):
        # The cutoff is above half the box: two atoms have edges with several images.
        with torch.random.fork_rng():
            torch.manual_seed(4)
            model = adjsim.potentials.MessagePassing(2.3, hidden=4)
        return adjsim.GraphPotential(model, 2.3, box=box)
    if kind == "network":
        with torch.random.fork_rng():
            torch.manual_seed(4)
            return adjsim.potentials.PairNetwork(4, 1.6, box)
    if kind == "dispersion":
        mixture = potential("mixture")
        return mixture + adjsim.potentials.pairs.tail.DispersionCorrection(mixture)
    if kind == "custom":
        # The first five atoms with the last four, of which one is in both sets.
        number = torch.arange(8)
        custom = adjsim.potentials.CustomPairs(
            "k*q1*q2*exp(-r/l)/r",
            {"k": parameter(1.3), "l": parameter(0.6), "q": nn.Parameter(number.double() % 2 + 1)},
            groups=[(number < 5, number > 3)],
            cutoff=1.6,
            box=box,
            truncation=switched,
        )
        return custom + LongRangeCorrection(custom, 8)
    if kind == "own":
        return OwnPairs([3.6, 3.7, 3.8])
    if kind == "sum":
        bonds = adjsim.HarmonicBond([[0, 1], [2, 3]], parameter(4.0), parameter(1.6))
        return pairs + bonds + OwnPairs([3.6, 3.7, 3.8])
    return pairs


def position(batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Eight atoms near a cubic lattice, some of them in other images of the box."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.cartesian_prod(*[torch.arange(2, dtype=torch.float64)] * 3) * 1.2
    shift = 0.08 * torch.randn(*batch, 8, 3, generator=generator, dtype=torch.float64)
    return corners + shift


def piston(kind: str = "orthogonal", axes: str = "isotropic", chains=False, **numbers):
    """A piston with Langevin baths or chains, with every number trainable."""
    given = {"mass": 1.4, "kT": 0.6, "pressure": 0.3, "tau": 0.5}
    given["chain_tau" if chains else "friction"] = 0.8
    made = {name: parameter(value) for name, value in given.items()} | numbers
    kind_of = adjsim.NoseHooverPiston if chains else adjsim.LangevinPiston
    return kind_of(potential(kind), axes=axes, **made)


def start(dynamics, batch: tuple[int, ...] = ()):
    """A start with a box of its own in each system, larger than that of the potential."""
    state = dynamics.init(position(batch), generator=3)
    state = type(state)(*(x.detach() for x in state))
    size = torch.linspace(0.04, 0.07, 3, dtype=torch.float64)[: state.strain.shape[-1]]
    more = 0.01 * torch.arange(max(1, state.strain[..., :1].numel()), dtype=torch.float64)
    strain = size + more.reshape((*batch, 1, 1))
    stretched = at(dynamics.potential, strain).dilated(state.position, torch.exp(strain))
    return state._replace(strain=strain, position=stretched)
