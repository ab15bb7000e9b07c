"""Write neural_ode.json: a neural ODE fitted to a spiral by three libraries.

The network, data, batches and optimiser are the same, and so is the method: fixed steps
of the 3/8 rule, which torchdiffeq calls rk4. The file holds the losses, the trained
network, the times of a gradient and the memory that it takes in a fresh process. JAX
with diffrax is needed here alone; plot_neural_ode.py draws the file. Run: python
examples/data/make_neural_ode.py [training] [long]
"""

import json
import math
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
import torchdiffeq
from studies import commit, rounded
from torch import nn

import adjsim
from adjsim.core.durable.files import replacing

FILE = Path(__file__).with_name("neural_ode.json")
SETTINGS = {
    "dt": 0.025,
    "steps": 1000,
    "width": 50,
    "batch": 20,
    "horizon": 10,
    "iterations": 3000,
    "compared": 300,
    "rate": 0.01,
    "seed": 0,
    # The rate that couples the copies of the reversible steps.
    "coupling": 4.0,
    "long_batch": 64,
    "long_steps": [100, 400, 1600],
}
DT, STEPS, BATCH, HORIZON = (SETTINGS[k] for k in ("dt", "steps", "batch", "horizon"))
A = [[-0.1, 2.0], [-2.0, -0.1]]
ROWS, WEIGHTS = [[], [1 / 3], [-1 / 3, 1], [1, -1, 1]], [1 / 8, 3 / 8, 3 / 8, 1 / 8]
RULE = adjsim.Tableau(ROWS, WEIGHTS)
LIBRARIES = ("adjsim", "torchdiffeq", "diffrax")


class Network(nn.Module):
    """Two layers, of the cubes of y as in the example of torchdiffeq."""

    def __init__(self, width=SETTINGS["width"]):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
        for layer in self.layers[::2]:
            nn.init.normal_(layer.weight, std=0.1)
            nn.init.zeros_(layer.bias)

    def forward(self, t, y):
        return self.layers(y**3)


def network():
    torch.manual_seed(SETTINGS["seed"])
    return Network()


def spiral():
    truth = adjsim.ODE(lambda t, y: y**3 @ torch.tensor(A))
    times = torch.arange(STEPS + 1) * DT
    return adjsim.simulate(
        truth, truth.init([2.0, 0.0]), times, solver=adjsim.RungeKutta(RULE, DT)
    ).y


def batches(path):
    """Yield starts (batch, 2) and the paths that follow, (horizon + 1, batch, 2)."""
    generator = torch.Generator().manual_seed(SETTINGS["seed"] + 1)
    while True:
        first = torch.randperm(STEPS - HORIZON, generator=generator)[:BATCH]
        yield (
            path[first],
            torch.stack([path[first + step] for step in range(HORIZON + 1)]),
        )


def solve(library, net, y, times):
    if library == "torchdiffeq":
        return torchdiffeq.odeint(net, y, times, method="rk4")
    dynamics = adjsim.ODE(net)
    solver = adjsim.RungeKutta(RULE, DT)
    return adjsim.simulate(dynamics, dynamics.init(y), times, solver=solver).y


def train_in_torch(library, path, rates):
    """Return the losses, the seconds of each iteration and the network."""
    net = network()
    optimiser = torch.optim.Adam(net.parameters(), lr=SETTINGS["rate"])
    times, losses, seconds = torch.arange(HORIZON + 1) * DT, [], []
    data = batches(path)
    for rate in rates:
        start, target = next(data)
        begin = time.perf_counter()
        optimiser.param_groups[0]["lr"] = rate
        optimiser.zero_grad()
        loss = (solve(library, net, start, times) - target).square().mean()
        loss.backward()
        optimiser.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return losses, seconds, net


def in_diffrax():
    """Return diffrax's solve of the network, and the initial network for it."""
    import diffrax
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    rule = diffrax.ButcherTableau(
        a_lower=tuple(np.array(row, float) for row in ROWS[1:]),
        b_sol=np.array(WEIGHTS),
        # No error is estimated, since steps are fixed.
        b_error=np.zeros(4),
        c=np.array([1 / 3, 2 / 3, 1.0]),
    )

    class ThreeEighths(diffrax.AbstractERK):
        tableau: ClassVar[diffrax.ButcherTableau] = rule
        interpolation_cls: ClassVar = (
            diffrax.ThirdOrderHermitePolynomialInterpolation.from_k
        )

        def order(self, terms):
            return 4

    def rate(t, y, net):
        (first, shift), (second, offset) = net
        return jnp.tanh(y**3 @ first.T + shift) @ second.T + offset

    def solve(net, y, steps, every):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(rate),
            ThreeEighths(),
            0.0,
            steps * DT,
            DT,
            y,
            net,
            saveat=diffrax.SaveAt(ts=jnp.arange(0, steps + 1, every) * DT),
            stepsize_controller=diffrax.ConstantStepSize(),
            adjoint=diffrax.RecursiveCheckpointAdjoint(),
            max_steps=steps,
        ).ys

    layers = network().layers[::2]
    start = [
        tuple(jnp.array(x.detach().numpy()) for x in (layer.weight, layer.bias))
        for layer in layers
    ]
    return solve, start


def train_in_diffrax(path, iterations):
    """Return the losses and the seconds of each iteration, without compilation."""
    import jax
    import jax.numpy as jnp
    import optax

    solve, net = in_diffrax()

    def loss_of(net, y, target):
        return jnp.mean((solve(net, y, HORIZON, 1) - target) ** 2)

    optimiser = optax.adam(SETTINGS["rate"])
    state, losses, seconds = optimiser.init(net), [], []

    @jax.jit
    def step(net, state, y, target):
        loss, grads = jax.value_and_grad(loss_of)(net, y, target)
        updates, state = optimiser.update(grads, state)
        return loss, optax.apply_updates(net, updates), state

    data = batches(path)
    for _ in range(iterations):
        start, target = next(data)
        begin = time.perf_counter()
        loss, net, state = step(net, state, start.numpy(), target.numpy())
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
    return losses, seconds[5:]


# What the memory and time of a long gradient are measured for.
LONG = {
    "adjsim, direct": (adjsim.RungeKutta(RULE, DT), adjsim.DirectAdjoint()),
    "adjsim, checkpoints": (adjsim.RungeKutta(RULE, DT), adjsim.CheckpointAdjoint()),
    "adjsim, reversible": (
        adjsim.Coupled(RULE, DT, rate=SETTINGS["coupling"], exact=True),
        adjsim.ReversibleAdjoint(),
    ),
    "torchdiffeq, direct": torchdiffeq.odeint,
    "torchdiffeq, adjoint": torchdiffeq.odeint_adjoint,
    "diffrax, checkpoints": None,
}


def gradient_of(name, net, y, longest):
    """Return a function of a number of steps that takes the gradient of the run."""
    if name.startswith("adjsim"):
        solver, adjoint = LONG[name]
        dynamics = adjsim.ODE(net)

        def take(steps):
            last = adjsim.simulate(
                dynamics,
                dynamics.init(y),
                [0.0, steps * DT],
                solver=solver,
                adjoint=adjoint,
            ).y[-1]
            last.square().mean().backward()

    elif name.startswith("torchdiffeq"):
        options = {"method": "rk4", "options": {"step_size": DT}}

        def take(steps):
            ends = torch.tensor([0.0, steps * DT])
            LONG[name](net, y, ends, **options)[-1].square().mean().backward()

    else:
        import jax

        solve, start = in_diffrax()
        compiled = {}

        def loss(net, steps):
            return (solve(net, y.numpy(), steps, steps)[-1] ** 2).mean()

        def compile_for(steps):
            if steps not in compiled:
                gradient = jax.jit(jax.grad(lambda net: loss(net, steps)))
                compiled[steps] = gradient.lower(start).compile()
            return compiled[steps]

        def take(steps):
            jax.block_until_ready(compile_for(steps)(start))

        # The memory of the compiler is not counted.
        compile_for(longest)

    return take


def measure(name, steps):
    """Return the growth of the largest memory in a gradient, MB, and its seconds."""
    torch.manual_seed(SETTINGS["seed"])
    y = torch.randn(SETTINGS["long_batch"], 2) / 2
    take = gradient_of(name, network(), y, steps)
    # The first run loads code, which is not counted.
    take(20)
    before, begin = peak(), time.perf_counter()
    take(steps)
    seconds = time.perf_counter() - begin
    return {"MB": (peak() - before) / 1024, "seconds": seconds}


def peak():
    """Return the largest resident memory of this process, kB.

    Linux has it apart from that of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def measure_apart(name, steps):
    words = [sys.executable, __file__, name, str(steps)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def training():
    """Train with the three libraries, and go on with this one."""
    compared, iterations = SETTINGS["compared"], SETTINGS["iterations"]
    with torch.no_grad():
        path = spiral()
    constant = [SETTINGS["rate"]] * compared
    trained = {
        library: train_in_torch(library, path, constant)[:2]
        for library in LIBRARIES[:2]
    }
    trained["diffrax"] = train_in_diffrax(path, compared)
    rates = [
        SETTINGS["rate"] * (1 + math.cos(math.pi * k / iterations)) / 2
        for k in range(iterations)
    ]
    losses, _, net = train_in_torch("adjsim", path, rates)
    return {
        # All digits, since they are compared to rounding.
        "losses": {library: found[0] for library, found in trained.items()},
        "milliseconds": {
            library: 1e3 * sorted(found[1])[len(found[1]) // 10]
            for library, found in trained.items()
        },
        "fit": rounded(losses[::10], 4),
        "network": {
            name: rounded(x.tolist(), 9) for name, x in net.state_dict().items()
        },
    }


def long():
    """Measure gradients of long runs, each in a process of its own."""
    return {
        name: [rounded(measure_apart(name, n), 3) for n in SETTINGS["long_steps"]]
        for name in LONG
    }


def main(parts):
    study = json.loads(FILE.read_text()) if FILE.exists() else {}
    study |= {
        "made_by": "examples/data/make_neural_ode.py",
        "versions": {name: version(name) for name in ("torch", *LIBRARIES[1:], "jax")},
        "settings": SETTINGS,
    }
    for name in parts:
        made, begun = commit(__file__), time.perf_counter()
        study[name] = {
            "commit": made,
            "found": {"training": training, "long": long}[name](),
        }
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    with replacing(FILE) as file:
        file.write_text(json.dumps(study, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small network
    if len(sys.argv) == 3 and sys.argv[1] in LONG:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main(sys.argv[1:] or ["training", "long"])
