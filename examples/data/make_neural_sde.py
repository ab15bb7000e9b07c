"""Write neural_sde.json: a neural SDE trained to the bridge of an Ornstein-Uhlenbeck
process through three measurements.

The drift is trained by the variational objective. The file holds the losses, the
trained network; plot_neural_sde.py draws it. Run: python
examples/data/make_neural_sde.py
"""

import json
import math
import time
from importlib.metadata import version
from pathlib import Path

import torch
from studies import commit, rounded
from torch import nn

import adjsim
from adjsim.core.durable.files import replacing

FILE = Path(__file__).with_name("neural_sde.json")
SETTINGS = {
    "rate": 1.0,
    "amplitude": 1.0,
    "measured": [1.2, -0.5, 1.0],
    "error": 0.5,
    "steps_a_unit": 32,
    "width": 32,
    "replicas": 128,
    "iterations": 500,
    "learning_rate": 0.01,
    "seed": 0,
}
A, S, ERROR = (SETTINGS[k] for k in ("rate", "amplitude", "error"))
MEASURED = SETTINGS["measured"]
DT = 1 / SETTINGS["steps_a_unit"]
TIMES = [float(k) for k in range(len(MEASURED) + 1)]


class Control(nn.Module):
    """A network u(t, x): the interval, the time in it and x, to the control."""

    def __init__(self):
        super().__init__()
        width, count = SETTINGS["width"], len(MEASURED)
        self.register_buffer("begin", torch.arange(float(count)))
        self.layers = nn.Sequential(
            nn.Linear(count + 2, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        )
        nn.init.zeros_(self.layers[-1].weight)
        nn.init.zeros_(self.layers[-1].bias)

    def forward(self, t, x):
        inside = ((t >= self.begin) & (t < self.begin + 1)).to(x)
        phase = (inside * (t - self.begin)).sum()
        seen = torch.cat([inside, phase.reshape(1)]).expand(*x.shape[:-1], -1)
        return self.layers(torch.cat([seen, x], -1))


class Drift(nn.Module):
    """The drift of (x, l), with l the logarithm of dQ/dP along the path."""

    def __init__(self, control):
        super().__init__()
        self.control = control

    def forward(self, t, y):
        u = self.control(t, y[..., :1])
        return torch.cat([S * u - A * y[..., :1], u**2 / 2], -1)


class Diffusion(nn.Module):
    """The diffusion of (x, l), which one Brownian motion drives."""

    def __init__(self, control):
        super().__init__()
        self.control = control

    def forward(self, t, y):
        u = self.control(t, y[..., :1])
        return torch.cat([torch.full_like(u, S), u], -1)


def paths(control, replicas, seed):
    dynamics = adjsim.SDE(Drift(control), Diffusion(control), noise="scalar")
    start = dynamics.init(torch.zeros(replicas, 2))
    solver = adjsim.EulerMaruyama(DT)
    return adjsim.simulate(dynamics, start, TIMES, solver=solver, generator=seed).y


def log_likelihood(x):
    """Return log p(measured | path), (replicas,), from x, (times, replicas)."""
    residual = (torch.tensor(MEASURED)[:, None] - x[1:]) / ERROR
    constant = math.log(2 * math.pi * ERROR**2) / 2
    return -(residual**2 / 2 + constant).sum(0)


def loss_of(control, seed):
    y = paths(control, SETTINGS["replicas"], seed)
    return (y[-1, :, 1] - log_likelihood(y[..., 0])).mean()


def train():
    """Return the losses and the control."""
    torch.manual_seed(SETTINGS["seed"])
    control = Control()
    optimiser = torch.optim.Adam(control.parameters(), lr=SETTINGS["learning_rate"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimiser, SETTINGS["iterations"]
    )
    losses = []
    for k in range(SETTINGS["iterations"]):
        optimiser.zero_grad()
        loss = loss_of(control, SETTINGS["seed"] + k)
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if k % 100 == 0:
            print(f"step {k}: {loss.item():.4f}", flush=True)
    return losses, control


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small network
    made, begun = commit(__file__), time.perf_counter()
    losses, control = train()
    study = {
        "made_by": "examples/data/make_neural_sde.py",
        "commit": made,
        "torch": version("torch"),
        "settings": SETTINGS,
        "losses": rounded(losses, 12),
        "network": {k: rounded(x.tolist(), 9) for k, x in control.state_dict().items()},
    }
    text = json.dumps(study, separators=(",", ":"))
    with replacing(FILE) as file:
        file.write_text(text + "\n")
    print(f"{FILE.name}: {len(text) / 1e3:.0f} kB, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
