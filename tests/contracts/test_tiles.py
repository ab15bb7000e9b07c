"""Programs of Triton for sums over pairs, run by NumPy, against torch's operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim.core import box, derived
from adjsim.core.lists_in_loops import LoopLists
from adjsim.core.rounding import Rounding
from adjsim.potentials import (
    ContinuousFunction,
    CustomPairs,
    DiscreteFunction,
    ForceShifted,
    LennardJonesMixture,
    PairPotential,
    Switched,
)
from adjsim.potentials.pairs import dense, operator
from adjsim.potentials.pairs.kernels import gpu, kernel as kernels
from tests import pressure, tiles
from tests.contracts.test_pair_operator import cell, gas
from tests.problems import parameter, slow_but

# Sums of up to a few hundred contributions, in another order than torch's.
CLOSE = 1e-12


@pytest.fixture
def by_tiles() -> Iterator[Any]:
    """Let programs evaluate pairs on the CPU; return how to turn to torch's operations."""
    with tiles.by_tiles("cpu") as turn:
        yield lambda: turn(False)


class Operations(PairPotential):
    """Operations that are printed as calls, or otherwise than in C++."""

    def __init__(self, **options):
        super().__init__(**options)
        self.a, self.b = parameter(1.3), parameter(0.7)

    def pair_energy(self, s):
        a, b, r, small = self.a, self.b, s.sqrt(), 0.5 * torch.exp(-s)
        near = ((r < a) & ~(s > 4 * b)) | (r == 1.0)
        of_one = (
            (small.sin() + small.cos() + small.tan() + small.sinh() + small.cosh() + small.acos())
            + (small.expm1() + small.log1p() + small.erf() + small.erfc() + small.atan())
            + (small.asin() + small.asinh() + (1 + s).acosh() + small.exp2())
            + (s.log2() + s.log10() + s.log() + torch.hypot(r, a * r))
        )
        whole = r.floor() + r.ceil() + r.trunc() + (a * r).round() + torch.fmod(s, b)
        chosen = torch.where(near, s, r).clamp(min=0.3) + (b * s).clamp(max=2.0)
        rest = s.rsqrt() + s.reciprocal() + torch.sigmoid(s) + s**2.5 + s**-3 + torch.sign(r - a)
        return a * of_one + whole * s + chosen + b * rest + torch.addcmul(s, r, r, value=0.1)


def tabulated(**options: Any) -> CustomPairs:
    """Pairs with functions in tables, of distances and of numbers of atoms."""
    drawn = torch.Generator().manual_seed(3)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    tables = {
        "f": ContinuousFunction(values(11), 0.3, 1.9),
        "h": DiscreteFunction(values(3)),
    }
    numbers = {"k": parameter(0.7), "q": nn.Parameter(values(24)), "t": SPECIES.double()}
    text = "q1*q2*f(r) + k*h(t1)*h(t2)*r"
    return CustomPairs(text, numbers, tables=tables, **options)


BOX = torch.tensor([5.2, 5.4, 6.0], dtype=torch.float64)
SPECIES = torch.arange(24) % 3
EXCLUSIONS = [(0, 1), (0, 2), (20, 0), (5, 9), (23, 22)]
# Replicas, and the type of numbers.
SIZES = ((3, torch.float64), (None, torch.float32))
POTENTIALS = {
    "Lennard-Jones": lambda: adjsim.LennardJones(
        parameter(1.1), parameter(0.9), cutoff=2.5, box=BOX
    ),
    "no box": lambda: adjsim.LennardJones(parameter(1.1), parameter(0.9)),
    "no cutoff": lambda: adjsim.LennardJones(parameter(1.1), parameter(0.9), box=BOX),
    "switched": lambda: adjsim.LennardJones(
        parameter(1.1), parameter(0.9), cutoff=2.5, box=BOX, truncation=Switched(2.0)
    ),
    "tilted": lambda: adjsim.LennardJones(
        parameter(1.1), parameter(0.9), cutoff=2.5, box=cell("tilted")
    ),
    "exclusions": lambda: adjsim.LennardJones(
        parameter(1.1), parameter(0.9), cutoff=2.5, box=BOX, exclusions=EXCLUSIONS
    ),
    "Morse": lambda: adjsim.Morse(
        parameter(1.1), parameter(0.4), parameter(1.2), cutoff=2.5, truncation=ForceShifted()
    ),
    "Yukawa": lambda: adjsim.Yukawa(parameter(1.1), parameter(0.6), cutoff=2.5, box=BOX),
    "charges": lambda: adjsim.Coulomb(
        nn.Parameter(torch.linspace(-1.0, 1.0, 24, dtype=torch.float64))
    ),
    "species": lambda: LennardJonesMixture(
        SPECIES, torch.tensor([1.0, 1.2, 0.9]), torch.tensor([0.8, 0.9, 1.0]), cutoff=2.5, box=BOX
    ),
    "tables": lambda: tabulated(cutoff=2.5, box=BOX),
    "Mie": lambda: adjsim.Mie(parameter(1.1), parameter(0.95), 10.5, 5.0, cutoff=2.5, box=BOX),
    "Wolf": lambda: adjsim.Wolf(
        nn.Parameter(torch.linspace(-1.0, 1.0, 24, dtype=torch.float64)), 0.8, cutoff=2.5, box=BOX
    ),
    "operations": lambda: Operations(cutoff=2.5, box=BOX),
}  # fmt: skip


def computed(pair: Any, position: Tensor) -> list[Tensor]:
    """Return energy and force, with their products with cotangents."""
    wanted = [position.requires_grad_(), *(x for x in pair.parameters() if x.requires_grad)]
    cotangent = torch.linspace(-1.0, 2.0, position.numel()).to(position)
    energy, force = pair(position), pair.force(position)
    totals = energy.square().sum(), (cotangent.view_as(force) * force).sum()
    return [energy, force, *(g for x in totals for g in torch.autograd.grad(x, wanted))]


@pytest.mark.parametrize(
    ("name", "replicas", "dtype"),
    slow_but(
        lambda name, replicas, dtype: (name, replicas) in (("switched", 3), ("charges", None)),
        [(name, *size) for name in POTENTIALS for size in SIZES],
        # A single system in float32 takes the same programs.
        marathon=lambda name, replicas, dtype: replicas is None,
    ),
)
def test_programs_equal_operations(by_tiles, name, replicas, dtype):
    position = gas(torch.diag(BOX), 24, 1, replicas=replicas).to(dtype)
    # Atoms side by side in memory, as inside of a compiled step.
    position = position.mT.contiguous().mT
    pair = POTENTIALS[name]().to(dtype)
    assert pair.path(position) == "all pairs, by Triton"
    found = computed(pair, position)
    by_tiles()
    again = POTENTIALS[name]().to(dtype)
    assert again.path(position).endswith("by torch: Triton is not installed")
    close = CLOSE if dtype == torch.float64 else 1e-4
    for x, y in zip(found, computed(again, position), strict=True):
        torch.testing.assert_close(x, y, rtol=close, atol=close * float(y.detach().abs().max()))


@pytest.mark.parametrize("atoms", [1, 150])
def test_any_number_of_atoms(by_tiles, atoms):
    position = gas(2 * atoms ** (1 / 3) * torch.eye(3, dtype=torch.float64), atoms, 2, spread=0)
    found = computed(POTENTIALS["no box"](), position)
    by_tiles()
    for x, y in zip(found, computed(POTENTIALS["no box"](), position), strict=True):
        torch.testing.assert_close(x, y, rtol=CLOSE, atol=CLOSE * float(y.detach().abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["exclusions", "species", "tilted", "Wolf"])
def test_programs_of_lists_equal_operations(by_tiles, name, dtype, monkeypatch):
    """Those of two systems; a step longer than the skin has another list."""
    monkeypatch.setattr(box, "LISTED", 0.0)
    derived._known.clear()
    position = gas(torch.diag(BOX), 24, 1, replicas=2).to(dtype)
    pair = POTENTIALS[name]().to(dtype)
    pair.skin, other = 0.2, POTENTIALS[name]().to(dtype)
    assert pair.path(position) == "neighbour list, by Triton"
    other.skin = 0.5
    rows = [(x, computed(pair, x)) for x in (position, position + 0.3 * position.sin())]
    for x, y in zip(rows[1][1], computed(other, rows[1][0]), strict=True):
        assert torch.equal(x, y)
    by_tiles()
    again = POTENTIALS[name]().to(dtype)
    close = CLOSE if dtype == torch.float64 else 1e-4
    for place, found in rows:
        for x, y in zip(found, computed(again, place), strict=True):
            torch.testing.assert_close(x, y, rtol=close, atol=close * float(y.detach().abs().max()))


def test_systems_that_are_not_finite_have_no_list(by_tiles, monkeypatch):
    monkeypatch.setattr(box, "LISTED", 0.0)
    derived._known.clear()
    pair, q = POTENTIALS["Lennard-Jones"](), gas(torch.diag(BOX), 24, 1, replicas=2)
    q[1, 3, 0] = torch.nan
    assert pair.path(q) == pair.path(q, compiled=True) == "neighbour list, by Triton"
    # Also by the lists of an iteration that is repeated.
    for context in (nullcontext(), LoopLists().evaluated()):
        with context:
            values = pair(q), pair.force(q), pair.force_vjp(q, [])[1](torch.ones_like(q))[0]
        for x in values:
            assert not x[0].isnan().any()
            assert x[1].isnan().all()


def test_exact_runs_come_back(by_tiles):
    q = gas(torch.diag(BOX), 24, 3)

    def gradient():
        pair = POTENTIALS["Lennard-Jones"]()
        dynamics = adjsim.Hamiltonian(pair)
        start = dynamics.init(q, 0.3 * torch.ones_like(q))
        path = adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.05],
            solver=adjsim.Splitting("BAB", 0.005, exact=True),
            adjoint=adjsim.ReversibleAdjoint(),
        )
        total = path.final.position.square().sum()
        return path.final.position, torch.autograd.grad(total, list(pair.parameters()))

    (end, found), _ = gradient(), by_tiles()
    same, expected = gradient()
    assert torch.equal(end, same)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_a_species_without_a_row_has_no_force(by_tiles):
    pair = POTENTIALS["species"]()
    pair.species = torch.full((24,), 5)
    assert bool(pair.force(gas(torch.diag(BOX), 24, 4)).isnan().any())


def test_exclusions_of_an_atom_that_there_is_not(by_tiles):
    pair = adjsim.LennardJones(exclusions=[(0, 30)])
    with pytest.raises(ValueError, match="position has 24 atoms"):
        pair.force(gas(torch.diag(BOX), 24, 4))


@pytest.mark.usefixtures("by_tiles")
def test_a_piston_says_that_torch_sums_its_pairs():
    dynamics = pressure.piston()
    state, solver = pressure.start(dynamics), adjsim.Splitting(dynamics.scheme, 0.002)
    run = adjsim.simulate(dynamics, state, [0.0, 0.002], solver=solver, generator=1)
    (path,) = run.stats["pairs"].values()
    assert path == "all pairs, by torch: systems have boxes of their own"


def test_a_table_that_requires_grad_is_left_to_torch(by_tiles):
    pair = POTENTIALS["species"]()
    pair.epsilon = nn.Parameter(pair.epsilon)
    position = gas(torch.diag(BOX), 24, 4)
    assert pair.path(position) == "all pairs, by torch: a table of its parameters requires grad"
    assert torch.equal(pair.force(position), dense.force(pair, position))


def test_a_program_that_does_not_compile_is_left_to_torch(by_tiles, monkeypatch):
    def fails(kernel):
        raise RuntimeError("a traceback\nFailed to find C compiler.")

    monkeypatch.setattr(gpu.TritonKernel, "program", property(fails))
    pair, position = POTENTIALS["switched"](), gas(torch.diag(BOX), 24, 4)
    reason = "Triton failed: RuntimeError: Failed to find C compiler."
    assert pair.path(position) == f"all pairs, by torch: {reason}"
    assert torch.equal(pair.force(position), dense.force(pair, position))


@contextmanager
def recorded() -> Iterator[list[tuple[Any, ...]]]:
    """Collect the arguments of the operator of pairs."""
    found: list[tuple[Any, ...]] = []

    def called(kernel: kernels.Kernel, inputs: kernels.PairInputs) -> list[Tensor]:
        found.append((*inputs, kernel.name))
        return kernel(inputs)

    with patch.object(operator, "evaluate", called):
        yield found


@pytest.mark.parametrize(
    ("name", "by"),
    slow_but(
        lambda *_: False,
        product(["charges", "exclusions", "species"], ["tiles", "C++"]),
        marathon=lambda name, by: by == "C++" and name != "charges",
    ),
)
def test_the_operator_is_what_torch_expects(name, by, request):
    """Its outputs have the shapes, types, strides and memory that a trace is told."""
    if by == "tiles":
        request.getfixturevalue("by_tiles")
    pair = POTENTIALS[name]()
    with recorded() as calls:
        computed(pair, gas(torch.diag(BOX), 24, 1, replicas=2).mT.contiguous().mT)
    assert len({call[-1] for call in calls}) == 3 + (name != "species")
    for call in {call[-1]: call for call in calls}.values():
        given = [[y.detach() for y in x] if isinstance(x, list | tuple) else x for x in call]
        given = [x.detach() if isinstance(x, Tensor) else x for x in given]
        torch.library.opcheck(torch.ops.adjsim.pairs, tuple(given))


@pytest.mark.slow
@pytest.mark.parametrize("listed", [False, True], ids=["all", "listed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", POTENTIALS)
def test_programs_compile_for_a_card(by_tiles, name, dtype, listed, monkeypatch):
    """Triton and the assembler of NVIDIA take them, for a card that need not be there."""
    pytest.importorskip("triton")
    if listed:
        monkeypatch.setattr(box, "LISTED", 0.0)
        derived._known.clear()
    pair, position = POTENTIALS[name]().to(dtype), gas(torch.diag(BOX), 24, 1).to(dtype)
    with recorded() as calls:
        computed(pair, position)
        pair.force(position.detach(), Rounding(torch.tensor(2.0**-30, dtype=dtype)))
    made = {call[-1]: kernels.KERNELS[call[-1]] for call in calls}
    for kernel in made.values():
        assert isinstance(kernel, gpu.TritonKernel)
        assert tiles.machine_code(kernel).startswith(b"\x7fELF")
