"""Loops as a GPU runs them, one iteration on fixed memory again and again, on the CPU."""

from __future__ import annotations

import pytest
import torch

from adjsim.compiler import inductor, loops
from adjsim.compiler.replays import replayed
from adjsim.compiler.tracing import graph_of
from tests import tiles
from tests.devices.systems import SYSTEMS
from tests.devices.test_gpu import STEPS, UNCOMPILED, WAYS, assert_agree, computed
from tests.problems import by_inductor, slow_but

SHORT = ["langevin"]
SLOW = ["chain-1", "own module", "listed", "rk4"]
ROWS = [name for name in SYSTEMS if name not in UNCOMPILED]


def once_before(iterate):
    """Run an iteration once before it is repeated, as the capture of a CUDA graph does."""
    iterate()
    return iterate


def by_replays(parts, constants, carry, exact, threads, capacity=0):
    """Let torch run the graph of an iteration, and copy its results over its inputs."""
    moved = inductor.on_device(parts, constants[0].device)
    made = replayed(
        moved, moved.start.graph, moved.body.graph, constants, carry, capacity, once_before
    )
    return made, "torch", None


@pytest.fixture
def _by_replays(monkeypatch):
    monkeypatch.setattr(loops, "compile_to_cpp", by_replays)


def agree(name, way, steps=STEPS):
    expected = computed(SYSTEMS[name](), way, False, "cpu", steps)
    assert_agree(computed(SYSTEMS[name](), way, True, "cpu", steps), expected)


@pytest.mark.usefixtures("_by_replays")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", slow_but(lambda name: name in SHORT, ROWS, marathon=lambda name: name not in SLOW)
)
def test_replayed_iterations_equal_steps(name, way):
    if way == "exact" and SYSTEMS[name]().exact is None:
        pytest.skip("it has no exact form")
    agree(name, way)


def agree_by_tiles(way):
    expected = computed(SYSTEMS["langevin"](), way, False, "cpu")
    launches = tiles.Program.launches
    with tiles.by_tiles("cpu"):
        found = computed(SYSTEMS["langevin"](), way, True, "cpu")
    assert tiles.Program.launches - launches > 2 * STEPS
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12 * float(y.abs().max()))


@pytest.mark.slow
@pytest.mark.usefixtures("_by_replays")
@pytest.mark.parametrize("way", [pytest.param("direct", marks=pytest.mark.slow), "exact"])
def test_programs_in_replayed_iterations(way):
    agree_by_tiles(way)


@pytest.mark.slow
def test_sums_of_exact_iterations_are_left_to_torch():
    from torch._inductor import config

    from adjsim.compiler.exact_kernels import OPTIONS, LeaveToTorch

    def function(x, y):
        z = torch.where(x > 0, x * y + 1, y).exp()
        return [z.sum(-1), (z @ y.T) * 2, torch.cat([z, y])[1:].mean()]

    graph = graph_of(function, *torch.rand(2, 3, 4)).graph
    LeaveToTorch()(graph)
    left = {str(node.target) for node in graph.nodes if "should_fallback" in node.meta}
    assert left == {"aten.sum.dim_IntList", "aten.mm.default", "aten.mean.default"}
    # Inductor refuses options that it does not know.
    with config.patch(OPTIONS):
        assert config.emulate_precision_casts
        assert config.eager_numerics.division_rounding


@pytest.mark.marathon
@pytest.mark.parametrize("name", ["langevin", "chain-3", "mesh", "own module"])
def test_exact_iterations_are_fused(name, monkeypatch):
    """By Inductor with the settings of a GPU: a run that does not come back raises an error."""

    def fused(parts, constants, carry, exact, threads, capacity=0):
        moved = inductor.on_device(parts, constants[0].device)
        options = inductor.options_of(True, exact, False)
        found = inductor.by_inductor(moved, constants, carry, options, with_start=True)
        return replayed(moved, *found, constants, carry, capacity, once_before), "Inductor", None

    monkeypatch.setattr(loops, "compile_to_cpp", fused)
    if name == "langevin":
        agree_by_tiles("exact")
    else:
        agree(name, "exact")


@pytest.mark.marathon
@pytest.mark.parametrize("way", ["direct", "exact"])
def test_programs_in_iterations_of_inductor(way, monkeypatch):
    monkeypatch.setattr(loops, "compile_to_cpp", by_inductor)
    agree_by_tiles(way)


@pytest.mark.usefixtures("_by_replays")
@pytest.mark.parametrize("way", [pytest.param("direct", marks=pytest.mark.slow), "exact"])
def test_a_loop_of_one_step(way):
    agree("langevin", way, steps=1)
