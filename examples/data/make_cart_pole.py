"""Make cart_pole.json: a neural controller that learns to swing up a pole on a cart.

The file holds the settings, the seed, the commit, the cost of every update and the
weights of the network; plot_cart_pole.py draws it and runs the controller. Training
takes some minutes. Run: python examples/data/make_cart_pole.py
"""

import json
import math
import subprocess
import time
from pathlib import Path

import torch

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.signals.controls import NeuralController

FILE = Path(__file__).with_name("cart_pole.json")
SETTINGS = {
    "cart": 1.0,
    "bob": 0.3,
    "length": 1.0,
    "g": 9.81,
    # Of the rod and of the rail, which holds the cart at its height.
    "stiffness": 600.0,
    "largest_force": 20.0,
    "hidden": 24,
    "dt": 0.02,
    # An update takes the gradient of runs of this length. Every 0.5 the gradient with
    # respect to the state is halved.
    "length_of_runs": 3.0,
    "part": 0.5,
    "kept": 0.5,
    "runs": 64,
    "updates": 400,
    "rate": 3e-2,
    "seed": 2,
}
CART, BOB, LENGTH, G, STIFFNESS = (
    SETTINGS[key] for key in ("cart", "bob", "length", "g", "stiffness")
)
MASSES = torch.tensor([[CART], [BOB]], dtype=torch.float64)


class Sight(torch.nn.Module):
    """What the network sees: the cart, and the bob as seen from the cart.

    The numbers are divided by their usual sizes.
    """

    def forward(self, seen):
        _, x, y, x_bob, y_bob, v, w, v_bob, w_bob = seen.unbind(-1)
        parts = [x, v / 2, x_bob - x, y_bob - y, (v_bob - v) / 4, (w_bob - w) / 4]
        return torch.stack(parts, -1)


def make_network(hidden):
    """Make a network from time, positions and velocities to forces within [-1, 1]."""
    return torch.nn.Sequential(
        Sight(),
        torch.nn.Linear(6, hidden),
        torch.nn.Tanh(),
        torch.nn.Linear(hidden, hidden),
        torch.nn.Tanh(),
        torch.nn.Linear(hidden, 4),
        torch.nn.Tanh(),
    )


class CartPole(Mechanics):
    """Cart and bob, joined by a stiff spring, and a force on the cart along a rail."""

    def __init__(self, network):
        rod = adjsim.HarmonicBond([[0, 1]], k=STIFFNESS, length=LENGTH)
        rail = adjsim.Harmonic(k=[[0.0, STIFFNESS], [0.0, 0.0]])
        scale = [[SETTINGS["largest_force"], 0.0], [0.0, 0.0]]
        super().__init__(
            rod + rail + Gravity(MASSES, G),
            MASSES,
            control=NeuralController(network, scale=scale),
        )


def make_start(dynamics, angle, rate, place, velocity):
    """Make starts from the pole's angles (zero is upright) and rates, and the cart."""
    lever = torch.stack([torch.sin(angle), torch.cos(angle)], -1)
    turning = torch.stack([torch.cos(angle), -torch.sin(angle)], -1)
    # The rail carries the weight.
    cart = torch.stack(
        [place, torch.full_like(place, -(CART + BOB) * G / STIFFNESS)], -1
    )
    moving = torch.stack([velocity, torch.zeros_like(velocity)], -1)
    position = torch.stack([cart, cart + LENGTH * lever], -2)
    bob = moving + LENGTH * rate[..., None] * turning
    return dynamics.init(position, velocity=torch.stack([moving, bob], -2))


def cost(state):
    """Compute the cost rate: height missing, place, and velocity when upright."""
    lever = state.position[..., 1, :] - state.position[..., 0, :]
    speeds = state.momentum / MASSES
    relative = speeds[..., 1, :] - speeds[..., 0, :]
    height = lever[..., 1] / LENGTH
    return (
        (1 - height)
        + 0.1 * state.position[..., 0, 0] ** 2
        + 0.02 * speeds[..., 0, 0] ** 2
        + 0.02 * (relative**2).sum(-1) * (1 + height) / 2
    )


def draw_starts(dynamics, count, share, generator):
    """Draw starts within a share of the circle about upright; of all, a third hang."""

    def normal(scale):
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    angle = share * math.pi * (2 * uniform - 1)
    if share == 1:
        third = count // 3
        angle[:third] = math.pi + normal(0.3)[:third]
    return make_start(dynamics, angle, normal(1.0), normal(0.3), normal(0.3))


def run_with_cost(dynamics, state, time):
    """Run and return the final state and the mean cost rate of each system."""
    found = adjsim.simulate(
        dynamics,
        state,
        [0.0, time],
        solver=adjsim.Splitting("BAUAB", SETTINGS["dt"]),
        record=adjsim.TimeAverage(cost),
    )
    return found.final, found.record


def fade(state, kept):
    """Return the state, with a share of its gradient."""
    return type(state)(*(kept * x + (1 - kept) * x.detach() for x in state))


def train():
    generator = torch.Generator().manual_seed(SETTINGS["seed"])
    torch.manual_seed(SETTINGS["seed"])
    network = make_network(SETTINGS["hidden"])
    dynamics = CartPole(network)
    updates, rate = SETTINGS["updates"], SETTINGS["rate"]
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, updates, 0.03 * rate
    )
    parts = round(SETTINGS["length_of_runs"] / SETTINGS["part"])
    history, begin = [], time.time()
    for update in range(updates):
        # The starts are near upright at first, and anywhere in the last half.
        share = min(1.0, 0.1 + 2 * update / updates)
        state = draw_starts(dynamics, SETTINGS["runs"], share, generator)
        total = 0.0
        for _ in range(parts):
            state, part = run_with_cost(
                dynamics, fade(state, SETTINGS["kept"]), SETTINGS["part"]
            )
            total = total + part.mean() / parts
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history.append(float(total.detach()))
        if update % 20 == 0:
            print(f"{update}: cost {history[-1]:.4f}, {time.time() - begin:.0f} s")
    return network, history


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    network, history = train()
    study = {
        "made_by": "examples/data/make_cart_pole.py",
        "commit": commit,
        "settings": SETTINGS,
        "cost": [round(value, 6) for value in history],
        "weights": {
            name: [round(x, 9) for x in value.flatten().tolist()]
            for name, value in network.state_dict().items()
        },
    }
    with replacing(FILE) as temporary:
        temporary.write_text(json.dumps(study, indent=1) + "\n")


if __name__ == "__main__":
    main()
