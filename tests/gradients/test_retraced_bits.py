"""Exact runs in compiled loops: forward and backward loops compute a force with the same bits."""

from __future__ import annotations

from contextlib import nullcontext

import ase.units
import pytest
import torch
from torch import nn

import adjsim
from adjsim.adjoints import ReconstructionError, ReversibleAdjoint
from adjsim.adjoints.reversible import Fingerprints
from adjsim.compiler import loops
from adjsim.core.reading import Reading
from adjsim.core.rounding import Rounding
from adjsim.io import from_openmm
from adjsim.potentials.base import force, force_vjp
from tests.contracts.test_cpp import Constants, numbers
from tests.openmm_systems import AMBER14, molecule
from tests.problems import parameter, square


def simulate(dynamics, start, dt, steps, **options):
    return adjsim.simulate(
        dynamics,
        start,
        torch.tensor([0.0, steps * dt], dtype=torch.float64),
        solver=adjsim.Splitting("BAOAB", dt, exact=True),
        adjoint=ReversibleAdjoint(),
        compile=True,
        **options,
    )


def langevin(potential):
    dynamics = adjsim.Langevin(potential, 1.0, 0.5, 1.0)
    return dynamics, dynamics.init(*square())


class ScannedTwice(torch.autograd.Function):
    """The identity, whose second derivative alone is made by an operation that is not printed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return Scanned.apply(g)


class Scanned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g):
        return g.clone()

    @staticmethod
    def backward(ctx, g):
        return g + 0 * torch.cumsum(g, -1)


class Well(nn.Module):
    def __init__(self, function=lambda x: x):
        super().__init__()
        self.k, self.function = parameter(1.3), function

    def forward(self, position):
        return (self.k * self.function(position) ** 2).sum((-1, -2))


@pytest.mark.slow
def test_an_operation_that_is_not_printed_is_retraced():
    """Torch evaluates it in the backward loop alone, at steps whose bits are those of the first."""
    found = []
    for function in (ScannedTwice.apply, lambda x: x):
        well = Well(function)
        run = simulate(*langevin(well), 0.01, 5, generator=1)
        assert run.stats["compiled_forward"] == "C++"
        run.final.position.sum().backward()
        assert run.stats["reconstruction_error"] == 0
        found.append(well.k.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_a_reproducible_force_is_not_blamed(monkeypatch):
    """Fingerprints of other bits stand for loops that differ."""

    def visit(self, step, state, spills):
        stored(self, step, state, spills)
        self.fingerprints[step] = b""

    stored = Fingerprints.visit
    monkeypatch.setattr(Fingerprints, "visit", visit)
    run = simulate(*langevin(Well()), 0.01, 5)
    with pytest.raises(ReconstructionError, match=r"reproducible without.*compiled loops of both"):
        run.final.position.sum().backward()


class Embedded(nn.Module):
    """A function of sums over partners, with a weight for each pair."""

    def __init__(self, atoms):
        super().__init__()
        rows = torch.arange(1.0, atoms + 1, dtype=torch.float64)
        self.weight = nn.Parameter(torch.sin(rows.unsqueeze(-1) * rows))
        self.scale = nn.Parameter(1 / rows)
        self.register_buffer("itself", torch.eye(atoms, dtype=torch.bool))

    def forward(self, position):
        square = (position.unsqueeze(-2) - position.unsqueeze(-3)).square().sum(-1)
        r = torch.where(self.itself, 1.0, square).sqrt()
        return (torch.tanh((self.weight * torch.exp(-r)).sum(-1)) * self.scale).sum(-1)


def computed(function, *inputs):
    """Compute a tuple of tensors in a compiled loop, in which inputs do not change."""

    def body(given, k, carry):
        return k + 1, tuple(map(loops.clone, function(*given.inputs))), ()

    spec = loops.LoopSpec(
        lambda given, carry: (torch.zeros_like(given.steps), carry),
        lambda k, count: k < count,
        body,
    )
    constants = Constants(torch.tensor(1), inputs)
    examples = tuple(torch.zeros_like(x.detach()) for x in function(*inputs))
    run, path, _ = loops.compile_loop(
        spec, nullcontext, constants, examples, exact=True, short=False, what="a test"
    )
    assert path == "C++"
    return run(constants, examples)[0]


@pytest.mark.slow
@pytest.mark.parametrize("atoms", [12, 42])
def test_a_force_has_the_bits_of_its_product(atoms):
    """The backward loop computes other sums beside those of the force."""
    potential, rounding = (
        Embedded(atoms),
        Rounding(torch.full((1, 1, 1), 2.0**-50, dtype=torch.float64)),
    )
    reading = Reading(potential)

    def forward(x, *registered):
        return (force(reading.bound(registered), x.mT, rounding=rounding).mT,)

    def backward(x, *registered):
        leaves = [y.detach().requires_grad_(y.is_floating_point()) for y in registered]
        wanted = [y for y in leaves if y.requires_grad]
        value, pullback = force_vjp(reading.bound(leaves), x.mT, wanted, rounding=rounding)
        along, found = pullback(torch.ones_like(x.mT))
        return value.mT, along.mT, *found

    inputs = numbers(3, atoms), *(x.detach() for x in reading.tensors)  # The layout in a loop.
    assert torch.equal(computed(forward, *inputs)[0], computed(backward, *inputs)[0])


class GBn2(nn.Module):
    """The solvent of Nguyen, Roe and Simmerling with necks of one length, in eV and angstrom."""

    def __init__(self, charge, radius, scale):
        super().__init__()
        self.charge, self.radius, self.scale = map(nn.Parameter, (charge, radius, scale))
        self.register_buffer("itself", torch.eye(len(charge), dtype=torch.bool))
        neck = 0.1 + 0.02 * (radius.unsqueeze(-1) + radius)
        self.neck = nn.Parameter(neck.masked_fill(self.itself, 0.0))

    def forward(self, position):
        apart = position.unsqueeze(-2) - position.unsqueeze(-3)
        square = (apart * apart).sum(-1)
        r = torch.sqrt(torch.where(self.itself, torch.ones_like(square), square))
        own = (self.radius - 0.195141).unsqueeze(-1)
        other = (self.scale * (self.radius - 0.195141)).unsqueeze(-2)
        low, high = torch.maximum(own, (r - other).abs()), r + other
        bare = 1 / low - 1 / high + 0.5 * torch.log(low / high) / r
        bare = bare + 0.25 * (r - other * other / r) * (1 / high**2 - 1 / low**2)
        inside = torch.where(own < other - r, 2 * (1 / own - 1 / low), torch.zeros_like(r))
        x = r - 3.0
        neck = self.neck / (1 + x**2 + 0.3 * x**6)
        integral = torch.where(self.itself, torch.zeros_like(r), 0.5 * bare + inside)
        psi = (integral.sum(-1) + neck.sum(-1)) * own.squeeze(-1)
        bent = torch.tanh(psi - 0.8 * psi**2 + 4.85 * psi**3)
        born = 1 / (1 / own.squeeze(-1) - bent / self.radius)
        both = born.unsqueeze(-1) * born.unsqueeze(-2)
        f = torch.sqrt(
            torch.where(self.itself, both, square + both * torch.exp(-square / 4 / both))
        )
        charges = self.charge.unsqueeze(-1) * self.charge
        return -7.2 * (1 - 1 / 78.5) * (charges / f).sum((-1, -2))


RADII = {"H": 1.2, "C": 1.7, "N": 1.55, "O": 1.5}
SCALES = {"H": 1.425952, "C": 1.058554, "N": 0.733599, "O": 1.061039}


@pytest.mark.marathon
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_solvent_of_plain_operations_is_retraced(seed):
    """5 ps of trialanine at 300 K, of which a single bit that differs would be noticed."""
    force_field, structure = from_openmm(*molecule("trialanine.pdb", AMBER14))
    radius, scale = (
        torch.tensor([table[symbol] for symbol in structure.symbols], dtype=torch.float64)
        for table in (RADII, SCALES)
    )
    solvent = GBn2(force_field.coulomb.charge.detach().clone(), radius, scale)
    dynamics = adjsim.Langevin(
        force_field + solvent, structure.mass, 300 * ase.units.kB, 0.001 / ase.units.fs
    )
    generator = torch.Generator().manual_seed(seed)
    start = dynamics.init(structure.position, generator=generator)
    run = simulate(dynamics, start, ase.units.fs, 5000, generator=generator)
    (run.final.position**2).sum().backward()
    assert run.stats["compiled_forward"] == run.stats["compiled_backward"] == "C++"
    assert run.stats["reconstruction_error"] == 0
    assert bool(solvent.neck.grad.isfinite().all())
