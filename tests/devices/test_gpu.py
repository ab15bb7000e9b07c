"""A GPU computes what the CPU computes: every system, eager and compiled, forward and backward.

A run that does not come back on its lattice raises an error, so exact rows prove more. Run where a
GPU is: pytest tests/devices
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adjsim
from adjsim.adjoints.loops import runner, uploads
from adjsim.core import lists_in_loops
from adjsim.core.brownian_path import MANY, BrownianPath
from adjsim.core.lists_in_loops import FixedList
from adjsim.core.neighbour_list import AllImages, NearestImages, NeighbourList
from adjsim.core.noise import Noise
from adjsim.potentials.pairs import formula, operator
from adjsim.potentials.pairs.base import pair_paths
from tests.contracts import test_tiles
from tests.contracts.test_pair_operator import gas
from tests.devices.calls import CALLS
from tests.devices.systems import SYSTEMS, TILED, System, moving

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# A card comes with a torch of its own.
pytestmark = pytest.mark.filterwarnings("ignore:compile=True is tested with torch")
NAMES = list(SYSTEMS) if torch.cuda.is_available() else []
CALLED = list(CALLS) if torch.cuda.is_available() else []
BY_TILES = list(TILED) if torch.cuda.is_available() else []
# A table by species that requires grad is left to torch.
LISTED = [(name, "torch") for name in ("listed", "listed mixture", "joined")]
LISTED = [("listed", "Triton"), *LISTED]
LISTED = LISTED if torch.cuda.is_available() else []
FORMULAS = list(test_tiles.POTENTIALS) if torch.cuda.is_available() else []
STEPS = 12
# Sums have other orders. Gradients of stiff contact are what is left of much larger terms: loops in
# another order of operations differ by 3e-10 on the CPU too.
RTOL = 2e-9
# A gradient that cancels to zero keeps the rounding of its terms.
ZERO = 1e-6
WAYS = ["direct", "checkpoint", "exact"]
# A list follows from the positions, and a Newton step by products has no fixed length.
UNCOMPILED = {"graph", "implicit"}


def computed(
    system: System, way: str, compiled: bool, device: str, steps: int = STEPS
) -> list[Tensor]:
    """Return the end of a run and its gradients, on the CPU."""
    dynamics = system.dynamics.to(device)
    state = type(system.state)._make(
        x.detach().to(device).requires_grad_(x.is_floating_point()) for x in system.state
    )
    adjoint: Any = {
        "direct": adjsim.DirectAdjoint(),
        "checkpoint": adjsim.CheckpointAdjoint(),
        "exact": adjsim.ReversibleAdjoint(),
    }[way]
    solver = system.exact if way == "exact" else system.solver
    path = adjsim.simulate(
        dynamics,
        state,
        [0.0, steps * solver.dt],
        solver=solver,
        adjoint=adjoint,
        generator=1,
        compile=compiled,
    )
    final = path.final[0]
    assert final.device.type == torch.device(device).type
    wanted = [x for x in (*state, *dynamics.parameters()) if x.requires_grad]
    found = torch.autograd.grad(final.square().sum(), wanted, allow_unused=True)
    gradients = (
        torch.zeros_like(x) if y is None else y for x, y in zip(wanted, found, strict=True)
    )
    return [final.detach().cpu(), *(x.cpu() for x in gradients)]


def assert_agree(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare the ends and gradients of two runs."""
    assert len(found) == len(expected)
    scale = max(float(y.abs().max()) for y in expected[1:])
    for x, y in zip(found, expected, strict=True):
        atol = RTOL * max(float(y.abs().max()), ZERO * scale)
        torch.testing.assert_close(x, y, rtol=RTOL, atol=atol)


@gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_gpu_agrees_with_cpu(name: str, way: str, compiled: bool) -> None:
    system = SYSTEMS[name]()
    if way == "exact" and system.exact is None:
        pytest.skip("it has no exact form")
    if compiled and name in UNCOMPILED:
        pytest.skip("it is not compiled on any device")
    expected = computed(system, way, False, "cpu")
    assert_agree(computed(SYSTEMS[name](), way, compiled, "cuda"), expected)


@gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BY_TILES)
def test_programs_of_pairs_agree_with_cpu(name: str, way: str, compiled: bool) -> None:
    """In eager steps, and in the captured iterations of compiled loops."""
    pytest.importorskip("triton")
    system = TILED[name]()
    paths = pair_paths(system.dynamics.to("cuda").potential, system.state.position.to("cuda"))
    assert {*paths.values()} == {"all pairs, by Triton"}
    expected = computed(TILED[name](), way, False, "cpu")
    found = computed(TILED[name](), way, compiled, "cuda")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=RTOL, atol=RTOL * float(y.abs().max()))


@gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "by"), LISTED)
def test_lists_agree_with_cpu(
    name: str, by: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists that the card builds, of systems for which it would sum all pairs."""
    expected = computed(SYSTEMS[name](), way, False, "cpu")
    monkeypatch.setattr(formula, "LISTED_ON_GPU", 0)
    monkeypatch.setattr(formula, "LISTED_BESIDE_TILES", 0)
    if by == "torch":
        monkeypatch.delitem(operator.KERNEL_CLASSES, "cuda")
    system = SYSTEMS[name]()
    paths = pair_paths(system.dynamics.to("cuda").potential, system.state.position.to("cuda"))
    assert all(path.startswith(f"neighbour list, by {by}") for path in paths.values())
    found = computed(SYSTEMS[name](), way, False, "cuda")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=RTOL, atol=RTOL * float(y.abs().max()))


@gpu
@pytest.mark.parametrize("way", WAYS)
def test_lists_of_captured_iterations_agree_with_cpu(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists that are built between the iterations of loops, with room for no more pairs."""
    pytest.importorskip("triton")
    settings, builds = (0.004, "BABAB", 2), list[FixedList]()
    expected = computed(moving(*settings), way, False, "cpu")
    build = FixedList.build
    monkeypatch.setattr(FixedList, "build", lambda x: [builds.append(x), build(x)][1])
    monkeypatch.setattr(lists_in_loops, "ROOM", 1.0)
    monkeypatch.setattr(formula, "LISTED_BESIDE_TILES", 0)
    found = computed(moving(*settings), way, True, "cuda")
    assert len(builds) > 10
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=RTOL, atol=RTOL * float(y.abs().max()))


@gpu
@pytest.mark.parametrize("kind", [NearestImages, AllImages])
def test_a_card_finds_the_pairs_of_the_cpu(kind: type[NeighbourList]) -> None:
    drawn = torch.Generator().manual_seed(0)
    position = 20 * torch.rand(2, 4000, 3, generator=drawn, dtype=torch.float64)
    box = torch.tensor([17.0, 18.0, 19.0], dtype=torch.float64)
    found, expected = (
        kind(2.0, 0.3, box.to(device)).pairs(position.to(device)) for device in ("cuda", "cpu")
    )
    for x, y in zip(found, expected, strict=True):
        assert x is y is None or torch.equal(x.cpu(), y)


@gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FORMULAS)
def test_programs_of_formulas_agree_with_cpu(name: str, dtype: torch.dtype) -> None:
    """Those of every formula, which the assembler of the card has compiled."""
    pytest.importorskip("triton")
    position = gas(torch.diag(test_tiles.BOX), 24, 1, replicas=3).to(dtype)
    expected, found = (
        test_tiles.computed(
            test_tiles.POTENTIALS[name]().to(device, dtype), position.detach().to(device)
        )
        for device in ("cpu", "cuda")
    )
    close = 1e-12 if dtype == torch.float64 else 1e-4
    for x, y in zip(found, expected, strict=True):
        atol = close * float(y.detach().abs().max())
        torch.testing.assert_close(x.cpu(), y, rtol=close, atol=atol)


@gpu
@pytest.mark.parametrize("name", CALLED)
def test_calls_agree_with_cpu(name: str) -> None:
    expected, found = CALLS[name]("cpu"), CALLS[name]("cuda")
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.is_cuda
        torch.testing.assert_close(x.cpu(), y, rtol=RTOL, atol=RTOL * float(y.abs().max()))


@gpu
@pytest.mark.parametrize("way", ["direct", "exact"])
def test_noise_is_drawn_while_loops_run(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread, in five loops of eight steps, and copied from pinned memory."""
    monkeypatch.setattr(runner, "FINITE_EVERY", 8)
    copy, pinned = uploads.CudaQueue.copy, list[bool]()

    def noted(queue: uploads.CudaQueue, rows: Tensor, length: int) -> Any:
        pinned.append(rows.is_pinned())
        return copy(queue, rows, length)

    monkeypatch.setattr(uploads.CudaQueue, "copy", noted)
    expected = computed(SYSTEMS["langevin"](), way, False, "cpu", 40)
    found = computed(SYSTEMS["langevin"](), way, True, "cuda", 40)
    assert len(pinned) >= 4
    assert all(pinned)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=RTOL, atol=RTOL * float(y.abs().max()))


@gpu
def test_noise_has_the_same_bits() -> None:
    like = torch.zeros(3, 4, 3, dtype=torch.float64)
    for step in (0, 31, 32, 1000):
        # Few numbers are drawn on the CPU, and many on the card.
        for shape in ((3, 12), (777, 39)):
            for dtype in (torch.float64, torch.float32):
                on_cpu = Noise(3, first=5)(step, shape, like.to(dtype))
                assert torch.equal(
                    Noise(3, first=5)(step, shape, like.to("cuda", dtype)).cpu(), on_cpu
                )


@gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_paths_have_the_same_bits(dtype: torch.dtype) -> None:
    """Steps of several sizes, forward and back, of so many entries that the card draws them."""
    like, shape = torch.zeros((), dtype=dtype), (700, 39)
    for size in (2.0**-8, 7 * 2.0**-12):
        drawn = []
        for device in ("cpu", "cuda"):
            noise = BrownianPath(3, 2.0**-12).steps(-size, size)
            spans = [noise.span(k, 12, shape, like.to(device), 40) for k in (0, 12, 5)]
            drawn.append(torch.cat([part.cpu() for parts in spans for part in parts]))
        assert MANY < 12 * 700 * 39
        assert torch.equal(*drawn)


@gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [x for x in ("rk4", "langevin", "listed") if x in NAMES])
def test_rows_of_cotangents_agree_with_single_ones(name: str, compiled: bool) -> None:
    """Autograd propagates them in a thread of its own."""
    system = SYSTEMS[name]()
    dynamics, state = (
        system.dynamics.to("cuda"),
        type(system.state)._make(x.detach().to("cuda") for x in system.state),
    )
    final = adjsim.simulate(
        dynamics, state, [0.0, STEPS * system.solver.dt], solver=system.solver,
        adjoint=adjsim.CheckpointAdjoint(), generator=1, compile=compiled,
    ).final[0]  # fmt: skip
    wanted = [x for x in dynamics.parameters() if x.requires_grad]
    drawn = torch.Generator().manual_seed(2)
    rows = torch.randn(3, *final.shape, generator=drawn, dtype=final.dtype).to("cuda")
    together = torch.autograd.grad(final, wanted, rows, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(final, wanted, row, retain_graph=True) for row in rows]
    assert_agree(list(together), [torch.stack(x) for x in zip(*each, strict=True)])
