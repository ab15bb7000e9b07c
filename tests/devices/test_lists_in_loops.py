"""Neighbour lists of iterations that a GPU repeats, on the CPU with NumPy in Triton's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adjsim.compiler import inductor, loops
from adjsim.compiler.replays import replayed
from adjsim.core import lists_in_loops
from adjsim.core.lists_in_loops import FixedList, LoopLists, listed_rows
from adjsim.core.neighbour_list import NearestImages
from adjsim.potentials.pairs.base import pair_paths
from adjsim.potentials.pairs.kernels import gpu
from tests import tiles
from tests.devices.systems import moving
from tests.devices.test_gpu import computed
from tests.devices.test_replays import once_before
from tests.problems import slow_but

STEPS = 12
SETTINGS = {
    "one evaluation": ((0.004,), 1.25),
    "two evaluations of replicas, no room": ((0.004, "BABAB", 2), 1.0),
    "no skin": ((0.0,), 1.25),
}


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each build of a list, whether it went to other memory."""
    build, found = FixedList.build, list[bool]()

    def noted(fixed: FixedList) -> None:
        before = fixed.stale if hasattr(fixed, "stale") else False
        build(fixed)
        found.append(fixed.stale and not before)

    monkeypatch.setattr(FixedList, "build", noted)
    return found


class Gas:
    """Atoms that fly in a box, as an iteration on fixed memory: (number, position)."""

    def __init__(self, skin: float, systems: int = 2) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.box = torch.full((3,), 5.0, dtype=torch.float64)
        shape = systems, 40, 3
        self.start = 5 * torch.rand(shape, generator=drawn, dtype=torch.float64)
        self.speed = 0.02 * torch.randn(shape, generator=drawn, dtype=torch.float64)
        self.carried = [torch.zeros((), dtype=torch.int64), self.start.clone()]
        self.exclusions = torch.tensor([[0, 1], [4, 9]])
        self.skin, self.lists, self.captures = skin, LoopLists(), 0
        self.found = dict[int, list[Tensor]]()
        self.capture()

    def listed(self) -> NearestImages:
        return NearestImages(1.3, self.skin, self.box, self.exclusions)

    def iterate(self) -> None:
        number, position = self.carried
        with self.lists.evaluated():
            self.found[int(number)] = [self.near(position), self.near(position + 0.1)]
        number += 1
        position += self.speed

    def near(self, position: Tensor) -> Tensor:
        neighbours, starts, finite = listed_rows(self.listed(), position)
        assert torch.equal(finite, torch.isfinite(position).flatten(1).all(1))
        i = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
        return self.within(position, i, neighbours[: int(starts[-1])])

    def within(self, position: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the numbers of the pairs that are within the cutoff."""
        flat = position.flatten(0, 1)
        d = flat[i] - flat[j]
        d -= self.box * (d / self.box).round()
        return (i * len(flat) + j)[d.norm(dim=-1) < 1.3]

    def capture(self) -> None:
        self.captures += 1
        self.iterate()

    def run(self, position: Tensor, count: int) -> None:
        self.found.clear()
        self.carried[0].zero_()
        self.carried[1].copy_(position)
        self.lists.repeat(count, self.carried, self.iterate, self.capture)

    def check(self, position: Tensor, count: int) -> None:
        """Compare the pairs of all iterations with those of new lists."""
        assert [*self.found] == [*range(count)]
        for number, found in self.found.items():
            for pairs, shift in zip(found, (0.0, 0.1), strict=True):
                q = position + number * self.speed + shift
                new = self.listed().built_at(q)
                assert torch.equal(pairs, self.within(q, new.i, new.j))


@pytest.mark.parametrize("skin", [0.3, 0.0])
def test_lists_of_repeated_iterations_have_the_pairs_of_new_lists(
    skin: float, builds: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from another start, whose lists need more memory, with other boxes and exclusions."""
    monkeypatch.setattr(lists_in_loops, "ROOM", 1.0)
    gas = Gas(skin)
    gas.run(gas.start, 10)
    gas.check(gas.start, 10)
    assert len(builds) > (2 if skin else 20)
    denser = 0.6 * gas.start
    gas.run(denser, 5)
    gas.check(denser, 5)
    assert gas.captures > 1
    assert any(builds)
    for change in (gas.box.sub_, gas.exclusions.add_):
        gas.run(gas.start, 1)
        change(1)
        gas.run(gas.start, 1)
        gas.check(gas.start, 1)
    lost = gas.start.clone()
    lost[1, 3, 0] = torch.nan
    gas.run(lost, 3)
    # Systems that are not finite have no pairs, and are finite again after them.
    gas.run(gas.start, 3)
    gas.check(gas.start, 3)


def test_a_build_that_was_stopped_is_made_again(
    builds: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    gas = Gas(0.3)
    build, stop = FixedList.build, [True]

    def stopped(fixed: FixedList) -> None:
        fixed.share.fill_(torch.inf)
        if stop:
            stop.clear()
            raise KeyboardInterrupt
        build(fixed)

    monkeypatch.setattr(FixedList, "build", stopped)
    with pytest.raises(KeyboardInterrupt):
        gas.run(0.6 * gas.start, 3)
    gas.run(0.6 * gas.start, 3)
    gas.check(0.6 * gas.start, 3)


@pytest.mark.parametrize(
    ("name", "way"),
    slow_but(
        lambda *_: False,
        [(name, way) for name in SETTINGS for way in ("direct", "checkpoint", "exact")],
        marathon=lambda name, way: (name, way) != ("one evaluation", "exact"),
    ),
)
def test_gradients_by_lists_in_loops(
    name: str, way: str, builds: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, room = SETTINGS[name]
    captures = []

    def capture(iterate: Callable[[], None]) -> Callable[[], None]:
        captures.append(iterate)
        return once_before(iterate)

    def by_replays(parts: Any, constants: Any, carry: Any, *_: Any) -> Any:
        moved = inductor.on_device(parts, constants[0].device)
        graphs = moved.start.graph, moved.body.graph
        return replayed(moved, *graphs, constants, carry, STEPS, capture), "torch", None

    expected = computed(moving(*settings), way, False, "cpu", STEPS)
    monkeypatch.setattr(loops, "compile_to_cpp", by_replays)
    monkeypatch.setattr(lists_in_loops, "ROOM", room)
    # NumPy takes a microsecond for each operation, so a program has many atoms.
    monkeypatch.setattr(gpu, "LISTED_ROWS", 2**9)
    with tiles.by_tiles("cpu"):
        system = moving(*settings)
        paths = pair_paths(system.dynamics.potential, system.state.position, compiled=True)
        assert {*paths.values()} == {"neighbour list, by Triton"}
        found = computed(system, way, True, "cpu", STEPS)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12 * float(y.abs().max()))
    if way == "exact":
        assert torch.equal(found[0], expected[0])
    assert len(builds) > 8
    assert len(captures) > (2 if room == 1 else 1)
