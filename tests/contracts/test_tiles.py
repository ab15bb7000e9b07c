"""Programs of Triton for sums over pairs, run by NumPy, against torch's operations."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim.potentials import ForceShifted, LennardJonesMixture, Switched
from adjsim.potentials.pairs import dense, operator
from adjsim.potentials.pairs.kernels import gpu
from tests.contracts.test_pair_operator import cell, gas
from tests.problems import parameter, slow_but

# Sums of up to a few hundred contributions, in another order than torch's.
CLOSE = 1e-12


class Pointer:
    """A place in the memory of a tensor, or an array of places."""

    def __init__(self, memory: Any, place: Any = 0) -> None:
        self.memory, self.place = memory, place

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.place + more)


def load(at: Pointer, mask: Any = True, other: Any = 0) -> Any:
    if mask is True:
        return at.memory[at.place]
    place, mask = np.broadcast_arrays(at.place, mask)
    found = np.full(place.shape, other, at.memory.dtype)
    found[mask] = at.memory[place[mask]]
    return found


def store(at: Pointer, value: Any, mask: Any) -> None:
    place, value, mask = np.broadcast_arrays(at.place, value, mask)
    at.memory[place[mask]] = value[mask]


def memory_of(x: Tensor) -> Any:
    """Return what follows the first number of a tensor in its memory."""
    length = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((length,), (1,)).numpy()


class Program:
    """A function of Triton, whose programs run one after another."""

    number: int

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*args: Any, num_warps: int, enable_fp_fusion: bool, **sizes: int) -> None:
            given = [Pointer(memory_of(x)) if isinstance(x, Tensor) else x for x in args]
            with np.errstate(all="ignore"):
                for Program.number in range(*grid):
                    self.function(*given, **sizes)

        return run


class Libdevice(ModuleType):
    """The functions of numbers, by torch."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name)
        return lambda *x: function(*map(torch.as_tensor, x)).numpy()


@pytest.fixture
def by_tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let programs evaluate pairs on the CPU; return how to turn to torch's operations."""
    language, triton = ModuleType("language"), ModuleType("triton")
    vars(language).update(
        abs=np.abs, arange=np.arange, where=np.where, zeros=np.zeros, full=np.full,
        float64=np.float64, float32=np.float32, int64=np.int64, constexpr=int,
        cast=lambda x, dtype: dtype(x), cdiv=lambda a, b: -(-a // b),
        program_id=lambda axis: Program.number, sum=np.sum, max=np.max, load=load, store=store,
    )  # fmt: skip
    vars(triton).update(jit=lambda **options: Program, language=language)
    extra = ModuleType("extra")
    vars(extra)["libdevice"] = Libdevice("libdevice")
    modules = {"triton": triton, "triton.language": language, "triton.language.extra": extra}

    def program(kernel: gpu.TritonKernel) -> Any:
        found: dict[str, Any] = {}
        # Torch asks for Triton too, so it is there for the imports of the program alone.
        with patch.dict(sys.modules, modules):
            exec(compile(kernel.source, kernel.name, "exec"), found)
        return found["pairs"]

    monkeypatch.setattr(gpu.TritonKernel, "program", property(program))
    monkeypatch.setitem(operator.KERNEL_CLASSES, "cpu", gpu.TritonKernel)

    def turn(on: bool) -> None:
        monkeypatch.setattr(gpu, "has_triton", lambda: on)
        operator._kernels_of.cache_clear()

    turn(True)
    yield lambda: turn(False)
    operator._kernels_of.cache_clear()


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
}  # fmt: skip


def computed(pair: Any, position: Tensor) -> list[Tensor]:
    """Return energy and force, with their products with cotangents."""
    wanted = [position.requires_grad_(), *pair.parameters()]
    cotangent = torch.linspace(-1.0, 2.0, position.numel(), dtype=position.dtype)
    energy, force = pair(position), pair.force(position)
    totals = energy.square().sum(), (cotangent.view_as(force) * force).sum()
    return [energy, force, *(g for x in totals for g in torch.autograd.grad(x, wanted))]


@pytest.mark.parametrize(
    ("name", "replicas", "dtype"),
    slow_but(
        lambda name, replicas, dtype: (name, replicas) in (("switched", 3), ("charges", None)),
        [(name, *size) for name in POTENTIALS for size in SIZES],
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


def test_a_table_that_requires_grad_is_left_to_torch(by_tiles):
    pair = POTENTIALS["species"]()
    pair.epsilon = nn.Parameter(pair.epsilon)
    position = gas(torch.diag(BOX), 24, 4)
    assert pair.path(position) == "all pairs, by torch: a table of its parameters requires grad"
    assert torch.equal(pair.force(position), dense.force(pair, position))
