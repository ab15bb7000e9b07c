"""What a GPU makes of this library: the ways to sum pairs by the number of atoms, exact runs, the
cost of noise, and gradients beside torchdiffeq, torchsde, jitted JAX and jax-md, with their memory.

Float64 unless said, warm, minima of alternating runs of the whole gradient. JAX is timed on the
device that it finds. The parts that no other table can stand for come first, and
none begins a row after ``--seconds``. Each row is printed and added to ``gpu.json`` with the commit
and the card; a part that fails is reported and the next is run. The parts ``networks`` and
``liquids`` need ``pip install -c constraints.txt -e ".[bench]"`` with CUDA builds. Run::

    python benchmarks/gpu.py [--device cpu] [--small] [--seconds 540] [part ...]
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from clusters import DT, lattice, ours
from torch import Tensor, nn

import adjsim
from adjsim.adjoints.loops.runner import cache
from adjsim.core import box
from adjsim.potentials.pairs import formula
from adjsim.potentials.pairs.operator import KERNEL_CLASSES

ROUNDS, HORIZONS = 3, (1, 4)
# Atoms, steps, replicas.
LIQUIDS = [(1000, 200, None), (13, 400, 4096), (256, 400, None), (4000, 40, None)]
# Atoms whose pairs are summed in every way, also in compiled loops, the most by torch, for its
# memory, and the fewest there by a list.
PAIRS, MOST_BY_TORCH = (16000, 32000, 8000, 64000, 24000, 4000, 1000), 8000
LOOPS, LEAST_BY_LIST = (16000, 64000, 4000, 256), 4000
# Batch, width and steps of a neural differential equation.
NETWORKS = [(256, 64, 100), (65536, 64, 100)]
# Tests of a minute; ``pytest tests/devices`` takes all.
CHECKED = "bits or finds_the_pairs or (gpu_agrees and exact and compiled and (chain-3 or langevin))"
Row = dict[str, Any]


class OutOfTimeError(Exception):
    """No row begins any more."""


deadline = float("inf")


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any], device: str) -> float:
    wait(device)
    begun = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - begun


def peak(run: Callable[[], Any], device: str) -> float | None:
    """Return the megabytes that a run takes at most, on a GPU."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    wait(device)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def compared(
    name: str, sides: dict[str, Callable[[], Any]], steps: int, device: str, agree: float | None
) -> Row:
    """Time sides in alternating rounds; those that fail are reported."""
    if time.perf_counter() > deadline:
        raise OutOfTimeError(f"{name} and all after it: the time was over")
    row: Row = {"name": name, "microseconds a step": {}, "first call, s": {}, "failed": {}}
    first: dict[str, Any] = {}
    for side, run in sides.items():
        begun = time.perf_counter()
        try:
            first[side] = run()
            wait(device)
        except Exception as error:  # A side that fails is a result.
            row["failed"][side] = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc()
            continue
        row["first call, s"][side] = round(time.perf_counter() - begun, 2)
    if agree is not None:
        numbers = {side: float(getattr(found, "gradient", found)) for side, found in first.items()}
        expected = numbers[next(iter(numbers))]
        row["disagreement"] = {k: abs(x / expected - 1) for k, x in numbers.items()}
        row["agrees"] = all(x < agree for x in row["disagreement"].values())
    best = dict.fromkeys(first, float("inf"))
    for _ in range(ROUNDS):
        for side in best:
            best[side] = min(best[side], seconds(sides[side], device))
    row["microseconds a step"] = {k: round(1e6 * x / steps, 2) for k, x in best.items()}
    print(f"\n{name}" + ("" if row.get("agrees", True) else "  THE GRADIENTS DIFFER"))
    for side, x in row["microseconds a step"].items():
        print(f"  {side:28} {x:10.1f} us a step, first call {row['first call, s'][side]} s")
    for side, why in row["failed"].items():
        print(f"  {side:28} failed: {why[:100]}", flush=True)
    return row


def checks(device: str, small: bool) -> Iterator[Row]:
    """Tests on the card, before any time is taken: bits of noise, pairs of lists, exact runs."""
    root, command = Path(__file__).parents[1], [sys.executable, "-m", "pytest", "-q", "-n", "0"]
    run = subprocess.run(
        [*command, "-m", "", "-k", CHECKED, "tests/devices/test_gpu.py"],
        capture_output=True, text=True, check=False, cwd=root,
    )  # fmt: skip
    outcome = run.stdout.strip().splitlines()[-1]
    print(f"\n{CHECKED}: {outcome}", flush=True)
    failed = {} if run.returncode == 0 else {"pytest": run.stdout[-2000:]}
    yield {"name": CHECKED, "outcome": outcome, "failed": failed}


def exact(device: str, small: bool) -> Iterator[Row]:
    """Lennard-Jones atoms by velocity Verlet, compiled: exact steps beside plain ones."""
    for atoms, steps, replicas in [(27, 10, None)] if small else LIQUIDS:
        size = (atoms, steps, replicas, "BAB")
        sides: dict[str, Callable[[], Any]] = {
            "adjsim": ours(*size, device=device),
            "adjsim, exact": ours(*size, True, device=device),
        }
        yield compared(sized(atoms, steps, replicas), sides, steps, device, 1e-6)


def liquids(device: str, small: bool) -> Iterator[Row]:
    """The same beside JAX and steps that are not compiled, and the memory by horizon."""
    from suite import lennard_jones

    for atoms, steps, replicas in [(27, 10, None)] if small else LIQUIDS:
        size = (atoms, steps, replicas, "BAB")
        sides: dict[str, Callable[[], Any]] = {
            "adjsim": ours(*size, device=device),
            "adjsim, not compiled": ours(*size, adjoint=adjsim.ReversibleAdjoint(), device=device),
            **lennard_jones(atoms, steps, replicas, 1.0).peers,
        }
        row = compared(sized(atoms, steps, replicas), sides, steps, device, 1e-6)
        row["megabytes by steps"] = {
            times * steps: peak(ours(atoms, times * steps, replicas, "BAB", device=device), device)
            for times in HORIZONS
        }
        print(f"  peak megabytes by steps: {row['megabytes by steps']}", flush=True)
        yield row


def sized(atoms: int, steps: int, replicas: int | None) -> str:
    return f"{atoms} atoms, {steps} steps" + (f", {replicas} replicas" if replicas else "")


def liquid(atoms: int, device: str, skin: float) -> tuple[Any, Any]:
    """A liquid with a cutoff, at the density 0.8."""
    side = (atoms / 0.8) ** (1 / 3)
    count = round(atoms ** (1 / 3) + 0.499)
    points = torch.arange(float(count), dtype=torch.float64)
    position = torch.cartesian_prod(points, points, points)[:atoms] * side / count
    epsilon = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    potential = adjsim.LennardJones(epsilon, 1.0, cutoff=2.5, box=[side] * 3, skin=skin)
    dynamics = adjsim.Hamiltonian(potential).to(device)
    drawn = torch.Generator().manual_seed(0)
    momentum = torch.randn(position.shape, generator=drawn, dtype=torch.float64)
    return dynamics, dynamics.init(position.to(device), momentum.to(device))


def pairs(device: str, small: bool) -> Iterator[Row]:
    """The ways to sum pairs, not compiled: forward and gradient."""
    for atoms in (216,) if small else PAIRS:
        few = {"torch"} if atoms <= MOST_BY_TORCH else set[str]()
        yield from by_ways(device, small, atoms, {"tiles", "list", "list, by torch"} | few, False)


def loops(device: str, small: bool) -> Iterator[Row]:
    """The ways to sum pairs in compiled loops."""
    for atoms in (216,) if small else LOOPS:
        sides = {"tiles", "list" if atoms >= LEAST_BY_LIST or small else "torch"}
        yield from by_ways(device, small, atoms, sides, True)


def by_ways(
    device: str, small: bool, atoms: int, chosen_ways: set[str], compiled: bool
) -> Iterator[Row]:
    """The gradient of a liquid by these ways to sum pairs."""
    steps = 10 if small else 40
    usual = box.LISTED, formula.LISTED_ON_GPU, formula.LISTED_BESIDE_TILES
    kind, never = device.split(":")[0], float("inf")
    kernels = KERNEL_CLASSES[kind]
    # From which sizes a list is made: by atoms, by pairs, and by pairs where there are tiles; and
    # whether kernels sum the pairs.
    ways = {
        "tiles": (0.0, never, never, True),
        "list": (0.0, 0.0, 0.0, True),
        "list, by torch": (0.0, 0.0, 0.0, False),
        "torch": (0.0, never, never, False),
    }

    def run(number: int, way: str) -> Callable[[], Tensor]:
        def chosen() -> None:
            box.LISTED, formula.LISTED_ON_GPU, formula.LISTED_BESIDE_TILES = ways[way][:3]
            KERNEL_CLASSES.pop(kind, None)
            KERNEL_CLASSES.update({kind: kernels} if ways[way][3] else {})

        chosen()
        # Compiled loops are found again by the numbers that they read: each way has its own skin.
        dynamics, state = liquid(atoms, device, 0.35 + 1e-9 * number)
        print(f"  {atoms} atoms: {dynamics.potential.path(state.position, compiled=compiled)}")

        def gradient() -> Tensor:
            chosen()
            final = adjsim.simulate(
                dynamics, state, [0.0, steps * DT], solver=adjsim.VelocityVerlet(DT),
                adjoint=adjsim.ReversibleAdjoint(), compile=compiled,
            ).final  # fmt: skip
            loss = final.position.square().sum()
            return torch.autograd.grad(loss, list(dynamics.parameters()))[0]

        return gradient

    sides = {way: run(k, way) for k, way in enumerate(ways) if way in chosen_ways}
    try:
        name = f"{atoms} atoms, cutoff 2.5" + (", compiled" if compiled else "")
        yield compared(name, sides, steps, device, 1e-6)
    finally:
        box.LISTED, formula.LISTED_ON_GPU, formula.LISTED_BESIDE_TILES = usual
        KERNEL_CLASSES[kind] = kernels
        cache.drop(lambda key: True)


def noise(device: str, small: bool) -> Iterator[Row]:
    """Replicas under BAOAB, beside the same without noise."""
    atoms, steps, replicas = (13, 10, 8) if small else (13, 200, 4096)
    position = lattice(atoms, replicas, device)[0]
    epsilon = nn.Parameter(torch.tensor(1.0, dtype=torch.float64, device=device))
    potential = adjsim.LennardJones(epsilon, 1.0)

    def run(dynamics: Any, word: str) -> Callable[[], Tensor]:
        dynamics = dynamics.to(device)

        def gradient() -> Tensor:
            final = adjsim.simulate(
                dynamics, dynamics.init(position, torch.zeros_like(position)),
                [0.0, steps * DT], solver=adjsim.Splitting(word, DT),
                adjoint=adjsim.ReversibleAdjoint(), compile=True, generator=1,
            ).final  # fmt: skip
            return torch.autograd.grad(final.position.square().sum(), epsilon)[0]

        return gradient

    sides = {
        "BAOAB": run(adjsim.Langevin(potential, 1.0, 1.0, 1.0), "BAOAB"),
        "BAB": run(adjsim.Hamiltonian(potential), "BAB"),
    }
    yield compared(f"{replicas} replicas of {atoms} atoms", sides, steps, device, None)
    yield from paths(device, small)


def paths(device: str, small: bool) -> Iterator[Row]:
    """A Brownian path of many entries beside the numbers of a seed, under a linear equation."""
    batch, steps = (64, 8) if small else (65536, 64)
    rate = nn.Parameter(torch.tensor(0.3, dtype=torch.float64, device=device))
    sde = adjsim.SDE(Decay(rate), lambda t, y: 0.5 * torch.ones_like(y))
    start = sde.init(torch.ones(batch, 2, dtype=torch.float64, device=device))

    def run(drawn: Any) -> Callable[[], Tensor]:
        def gradient() -> Tensor:
            solver = adjsim.EulerMaruyama(2.0**-6)
            final = adjsim.simulate(
                sde, start, [0.0, steps * 2.0**-6], solver=solver,
                adjoint=adjsim.CheckpointAdjoint(), compile=True, generator=drawn,
            ).final  # fmt: skip
            return torch.autograd.grad(final.y.square().mean(), rate)[0]

        return gradient

    sides = {"path": run(adjsim.BrownianPath(3, 2.0**-12)), "seed": run(1)}
    yield compared(f"noise of {batch} x 2 entries", sides, steps, device, None)


class Decay(nn.Module):
    """The drift -r y."""

    def __init__(self, rate: nn.Parameter) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.rate * y


class Network(nn.Module):
    """A drift and a diffusion, with the interfaces of all three libraries."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        one: Any = {"dtype": torch.float64}
        self.drift, self.diffusion = (
            nn.Sequential(
                nn.Linear(2, width, **one), nn.Tanh(), nn.Linear(width, width, **one), nn.Tanh(),
                nn.Linear(width, 2, **one),
            )
            for _ in range(2)
        )  # fmt: skip

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.drift(y)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return self.diffusion(y)

    f = forward


def networks(device: str, small: bool) -> Iterator[Row]:
    """Neural ODEs by RK4 and SDEs by Euler and Maruyama, with the gradient of the drift."""
    import torchdiffeq
    import torchsde

    for batch, width, steps in [(4, 8, 10)] if small else NETWORKS:
        network = Network(width).to(device)
        y = torch.randn(batch, 2, dtype=torch.float64).to(device)
        times = torch.tensor([0.0, 1.0], dtype=torch.float64, device=device)

        def gradient(
            final: Callable[[], Tensor], network: Network = network
        ) -> Callable[[], Tensor]:
            wanted = list(network.drift.parameters())
            return lambda: torch.autograd.grad(final().square().mean(), wanted)[0].sum()

        def own(
            adjoint: Any, dynamics: Any, solver: Any, y: Tensor = y, **settings: Any
        ) -> Callable[[], Tensor]:
            return lambda: (
                adjsim.simulate(
                    dynamics,
                    dynamics.init(y),
                    [0.0, 1.0],
                    solver=solver,
                    adjoint=adjoint,
                    **settings,
                ).final.y
            )

        rk4, ode = adjsim.RungeKutta("rk4", 1 / steps), adjsim.ODE(network)
        euler = adjsim.EulerMaruyama(1 / steps)
        sde = adjsim.SDE(network, network.g)
        direct, checkpoint = adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint()
        options = {"step_size": 1 / steps}
        odes = {
            "adjsim, Direct": own(direct, ode, rk4, compile=True),
            "adjsim, Checkpoint": own(checkpoint, ode, rk4, compile=True),
            "adjsim, not compiled": own(direct, ode, rk4),
            "torchdiffeq.odeint": lambda n=network, y=y, t=times, o=options: torchdiffeq.odeint(
                n, y, t, method="rk4", options=o
            )[-1],
            "odeint_adjoint": lambda n=network, y=y, t=times, o=options: torchdiffeq.odeint_adjoint(
                n, y, t, method="rk4", options=o
            )[-1],
        }
        sdes = {
            "adjsim, Direct": own(direct, sde, euler, compile=True, generator=1),
            "adjsim, Checkpoint": own(checkpoint, sde, euler, compile=True, generator=1),
            "adjsim, not compiled": own(direct, sde, euler, generator=1),
            "torchsde.sdeint": lambda n=network, y=y, t=times, h=1 / steps: torchsde.sdeint(
                n, y, t, dt=h, method="euler"
            )[-1],
        }
        for kind, runs, agree in (("ODE", odes, 1e-6), ("SDE", sdes, None)):
            name = f"neural {kind}, batch {batch}, width {width}"
            sides = {side: gradient(run) for side, run in runs.items()}
            yield compared(name, sides, steps, device, agree)


PARTS = {
    "checks": checks,
    "pairs": pairs,
    "loops": loops,
    "exact": exact,
    "noise": noise,
    "networks": networks,
    "liquids": liquids,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a dry run of seconds")
    parser.add_argument("--seconds", type=float, default=540.0, help="no row begins later")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this script measures a GPU.")
    global deadline
    deadline = time.perf_counter() + given.seconds
    card = torch.cuda.get_device_name() if given.device == "cuda" else "a CPU"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
    ).stdout.strip()  # fmt: skip
    found: Row = {"card": card, "torch": torch.__version__, "commit": commit}
    print(f"adjsim {commit} on {card}, torch {torch.__version__}")
    for name in given.parts or PARTS:
        begun, found[name] = time.perf_counter(), []
        try:
            for row in PARTS[name](given.device, given.small):
                found[name].append(row)
                given.out.write_text(json.dumps(found, indent=1))
        except Exception as error:  # The other parts are measured.
            if not isinstance(error, OutOfTimeError):
                traceback.print_exc()
            found[name].append({"failed": f"{type(error).__name__}: {error}"})
        print(f"  ({name}: {time.perf_counter() - begun:.0f} s)", flush=True)
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
