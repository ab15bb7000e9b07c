"""Make lorenz_shadowing.json: the derivative of the mean of z in the equations of
Lorenz by shadowing, with respect to all parameters.

The file holds the settings, the seed and the commit; plot_lorenz.py draws it. Run:
python examples/data/make_lorenz_shadowing.py
"""

import time
from pathlib import Path

import torch
from make_lorenz import POINT, SOLVER, Lorenz, attractor, height, store
from studies import commit
from torch import nn

import adjsim
from adjsim.dynamics.fields.ode import ODE

FILE = Path(__file__).with_name("lorenz_shadowing.json")
SETTINGS = {
    "seed": 100,
    "replicas": 96,
    "duration": 200.0,
    "unstable": 2,
    "segment": 1.0,
}


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small system
    made, begun = commit(__file__), time.perf_counter()
    dynamics = ODE(Lorenz(*(nn.Parameter(torch.tensor(x)) for x in POINT.values())))
    start = attractor(dynamics, SETTINGS["replicas"], SETTINGS["seed"])
    simulation = adjsim.Simulation(
        dynamics,
        lambda count, generator: type(start)(start.y[:count]),
        [0.0, SETTINGS["duration"]],
        SOLVER,
    )
    estimate = adjsim.Shadowing(SETTINGS["unstable"], SETTINGS["segment"])(
        simulation,
        adjsim.TimeAverage(height),
        replicas=SETTINGS["replicas"],
        generator=torch.Generator().manual_seed(SETTINGS["seed"]),
    )
    study = {
        "made_by": "examples/data/make_lorenz_shadowing.py",
        "commit": made,
        "torch": torch.__version__,
        "settings": SETTINGS,
        "gradient": {
            name: [
                part[f"fun.{name}"].item()
                for part in (estimate.grad, estimate.grad_stderr)
            ]
            for name in POINT
        },
    }
    store(FILE, study)
    print(estimate)
    print(f"{FILE.name}: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
