"""Neural ODEs and SDEs of this library, torchdiffeq, torchsde and diffrax: the whole gradient.

The vector field is a network with two hidden layers of 64 on two variables, batch 256. The ODE is
solved by 100 steps of RK4, the SDE by 100 steps with diagonal noise. The cases of `fields.py`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchdiffeq
import torchsde
from rounds import Side, measure
from torch import Tensor, nn

import adjsim
from adjsim.adjoints.base import Adjoint

# Steps are a power of two, so that their times are exact in float32 too.
WIDTH, BATCH, STEPS, SPAN, ROUNDS = 64, 256, 100, 100 / 128, 10
# The rate of the coupling of reversible steps, 1/time.
RATE = 5.0
REPEATS = {"float32": torch.float32, "float64": torch.float64}
# Largest ratio to the best of torchdiffeq's two: of the gradient by stored states, and of one in
# constant memory or less than that of all steps.
TARGETS = {"float32": (0.5, 0.75), "float64": (0.75, 1.0)}
TARGET_SDE = 0.3


def layers() -> nn.Sequential:
    """Make a network whose weights are the same numbers in every dtype."""
    one: dict[str, Any] = {"dtype": torch.float32}
    return nn.Sequential(
        nn.Linear(2, WIDTH, **one),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH, **one),
        nn.Tanh(),
        nn.Linear(WIDTH, 2, **one),
    )


class Network(nn.Module):
    """The right-hand side, with the interfaces of all three libraries."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, sde_type: str = "ito") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sde_type = sde_type
        self.net, self.noise = layers(), layers()
        self.to(torch.get_default_dtype())

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return self.noise(y)

    f = forward


def loss(y: Any) -> Any:
    return (y * y).mean()


def start(batch: int = BATCH) -> Tensor:
    drawn = torch.randn(batch, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return drawn.to(torch.get_default_dtype())


class Task:
    """One way to a gradient: a function that returns the last state of a network's run."""

    def __init__(self, network: Network, run: Callable[[], Tensor]) -> None:
        self.network, self.run = network, run

    def gradient(self) -> Tensor:
        """Return the gradient with respect to the parameters of the drift."""
        self.network.zero_grad()
        loss(self.run()).backward()
        found = (p.grad for p in self.network.net.parameters())
        return torch.cat([x.flatten() for x in found if x is not None])

    def side(self) -> dict[str, float]:
        begin = time.process_time()
        self.gradient()
        return {"gradient": time.process_time() - begin}


def own_ode(adjoint: Adjoint, solver: Any, batch: int = BATCH) -> Task:
    network, y0 = Network(), start(batch)
    dynamics = adjsim.ODE(network)
    return Task(
        network,
        lambda: (
            adjsim.simulate(
                dynamics,
                dynamics.init(y0),
                [0.0, SPAN],
                solver=solver,
                adjoint=adjoint,
                compile=True,
            ).final.y
        ),
    )


def of_torchdiffeq(solve: Callable[..., Any], steps: int = STEPS, batch: int = BATCH) -> Task:
    network, y0 = Network(), start(batch)
    times, options = torch.tensor([0.0, SPAN]), {"step_size": SPAN / steps}
    return Task(network, lambda: solve(network, y0, times, method="rk4", options=options)[-1])


def ode_tasks(steps: int, batch: int) -> dict[str, Callable[[], Task]]:
    """Return the ways to the gradient of the neural ODE."""
    rk4, coupled = (
        adjsim.RungeKutta("rk4", SPAN / steps),
        adjsim.Coupled("rk4", SPAN / steps, rate=RATE),
    )
    reversible = adjsim.ReversibleAdjoint(checkpoint_every=steps, tol=1e-3)
    return {
        "Direct": lambda: own_ode(adjsim.DirectAdjoint(), rk4, batch),
        "Checkpoint": lambda: own_ode(adjsim.CheckpointAdjoint(), rk4, batch),
        "Coupled, Reversible": lambda: own_ode(reversible, coupled, batch),
        "odeint": lambda: of_torchdiffeq(torchdiffeq.odeint, steps, batch),
        "odeint_adjoint": lambda: of_torchdiffeq(torchdiffeq.odeint_adjoint, steps, batch),
    }


def in_jax(kind: str, steps: int, batch: int) -> Any:
    """Return the gradient of the same network by one of diffrax's adjoints."""
    from networks_in_jax import InJax

    weights = [p.detach().numpy() for p in Network().net.parameters()]
    return InJax(kind, weights, start(batch).numpy(), SPAN, steps)


DIFFRAX = ("diffrax Direct", "diffrax RecursiveCheckpoint")


def neural_ode() -> list[list[str]]:
    """Rows of dtype, method, milliseconds, ratios to torchdiffeq and to diffrax, error."""
    rows: list[list[str]] = []
    for name, dtype in REPEATS.items():
        torch.set_default_dtype(dtype)
        tasks: dict[str, Any] = {what: make() for what, make in ode_tasks(STEPS, BATCH).items()}
        tasks |= {kind: in_jax(kind, STEPS, BATCH) for kind in DIFFRAX}
        times = {
            what: found["gradient"]
            for what, found in measure({w: x.side for w, x in tasks.items()}, ROUNDS).items()
        }
        torch.set_default_dtype(torch.float64)
        fine = adjsim.RungeKutta("rk4", SPAN / STEPS / 4)
        exact = own_ode(adjsim.DirectAdjoint(), fine).gradient()
        theirs = min(times["odeint"], times["odeint_adjoint"])
        jax = min(times[kind] for kind in DIFFRAX)
        limits = dict(zip(("Direct", "Checkpoint"), TARGETS[name], strict=True))
        for what, task in tasks.items():
            target = f" (target {limits[what]})" if what in limits else ""
            error = float((task.gradient().double() - exact).norm() / exact.norm())
            rows.append(
                [
                    name,
                    what,
                    f"{1e3 * times[what]:.1f}",
                    f"{times[what] / theirs:.2f}{target}",
                    f"{times[what] / jax:.2f}",
                    f"{error:.1e}",
                ]
            )
    torch.set_default_dtype(torch.float64)
    return rows


def own_sde(solver: Any, adjoint: Adjoint, compile: bool = True) -> Task:
    network, y0 = Network(), start()
    dynamics = adjsim.SDE(network, network.g)
    return Task(
        network,
        lambda: (
            adjsim.simulate(
                dynamics,
                dynamics.init(y0),
                [0.0, SPAN],
                solver=solver,
                adjoint=adjoint,
                generator=1,
                compile=compile,
            ).final.y
        ),
    )


def of_torchsde(solve: Callable[..., Any], method: str, sde_type: str, **options: Any) -> Task:
    network, y0 = Network(sde_type), start()
    times = torch.tensor([0.0, SPAN])
    return Task(
        network,
        lambda: solve(network, y0, times, method=method, dt=SPAN / STEPS, **options)[-1],
    )


def neural_sde() -> list[list[str]]:
    """Rows of dtype, method, milliseconds, ratio to the best of torchsde, error.

    The error is that of the gradient on the same path, against uncompiled steps in float64.
    torchsde draws other paths.
    """
    rows: list[list[str]] = []
    reversible = partial(
        of_torchsde,
        torchsde.sdeint_adjoint,
        "reversible_heun",
        "stratonovich",
        adjoint_method="adjoint_reversible_heun",
    )
    euler = adjsim.EulerMaruyama(SPAN / STEPS)
    for name, dtype in REPEATS.items():
        torch.set_default_dtype(dtype)
        tasks = {
            "EulerMaruyama, Direct": own_sde(euler, adjsim.DirectAdjoint()),
            "EulerMaruyama, Checkpoint": own_sde(euler, adjsim.CheckpointAdjoint()),
            "sdeint, euler": of_torchsde(torchsde.sdeint, "euler", "ito"),
            "sdeint_adjoint, euler": of_torchsde(torchsde.sdeint_adjoint, "euler", "ito"),
            "sdeint, heun": of_torchsde(torchsde.sdeint, "heun", "stratonovich"),
            "sdeint_adjoint, heun": of_torchsde(torchsde.sdeint_adjoint, "heun", "stratonovich"),
            "sdeint_adjoint, reversible_heun": reversible(),
        }
        sides: dict[str, Side] = {what: task.side for what, task in tasks.items()}
        times = {what: x["gradient"] for what, x in measure(sides, ROUNDS // 2).items()}
        theirs = min(seconds for what, seconds in times.items() if "sdeint" in what)
        torch.set_default_dtype(torch.float64)
        exact = own_sde(euler, adjsim.DirectAdjoint(), compile=False).gradient()
        for what, seconds in times.items():
            ratio, error = f"{seconds / theirs:.2f}", ""
            if "sdeint" not in what:
                ratio += f" (target {TARGET_SDE})"
                found = tasks[what].gradient().double()
                error = f"{float((found - exact).norm() / exact.norm()):.1e}"
            rows.append([name, what, f"{1e3 * seconds:.1f}", ratio, error])
    torch.set_default_dtype(torch.float64)
    return rows


MEMORY_BATCH, SHORT, LONG = 32, 1_000, 10_000


def growth(what: str, steps: int) -> float:
    """Return the growth of the peak resident set by one gradient, in MiB, after a short one."""

    def make(steps: int) -> Any:
        if what in DIFFRAX:
            return in_jax(what, steps, MEMORY_BATCH)
        return ode_tasks(steps, MEMORY_BATCH)[what]()

    make(100).gradient()
    task, before = make(steps), peak()
    task.gradient()
    return peak() - before


def peak() -> float:
    """Return the peak resident set of this process alone, in MiB; getrusage has its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) / 1024


def memory() -> list[list[str]]:
    """Rows of method and growth of the resident set, in a fresh process each."""
    rows: list[list[str]] = []
    for what in [*ode_tasks(STEPS, BATCH), *DIFFRAX]:
        found = [
            subprocess.run(
                [sys.executable, __file__, what, str(steps)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for steps in (SHORT, LONG)
        ]
        rows.append([what, *(f"{float(x):.1f}" for x in found)])
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(growth(sys.argv[1], int(sys.argv[2])))
