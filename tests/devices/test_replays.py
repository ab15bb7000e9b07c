"""Loops as a GPU runs them, one iteration on fixed memory again and again, on the CPU."""

from __future__ import annotations

import pytest
import torch

from adjsim.compiler import inductor, loops
from adjsim.compiler.replays import replayed
from tests.devices.systems import SYSTEMS
from tests.devices.test_gpu import UNCOMPILED, WAYS, computed
from tests.problems import slow_but

SHORT = ["langevin"]
SLOW = ["hamiltonian", "chain-1", "own module", "listed", "rk4", "EulerMaruyama, diagonal"]
ROWS = [name for name in SYSTEMS if name not in UNCOMPILED]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", slow_but(lambda name: name in SHORT, ROWS, marathon=lambda name: name not in SLOW)
)
def test_replayed_iterations_equal_steps(name, way, monkeypatch):
    """The graph of an iteration is run by torch, its results copied over its inputs."""

    def by_replays(parts, constants, carry, exact, threads, capacity=0):
        moved = inductor.on_device(parts, constants[0].device)
        made = replayed(moved, moved.body.graph, constants, carry, capacity, lambda f: f)
        return made, "torch", None

    monkeypatch.setattr(loops, "compile_to_cpp", by_replays)
    system = SYSTEMS[name]()
    if way == "exact" and system.exact is None:
        pytest.skip("it has no exact form")
    expected = computed(system, way, False, "cpu")
    found = computed(SYSTEMS[name](), way, True, "cpu")
    for x, y in zip(found, expected, strict=True):
        # Gradients of stiff contact are what is left of terms a million times as large.
        torch.testing.assert_close(x, y, rtol=2e-9, atol=2e-9 * float(y.abs().max()))
