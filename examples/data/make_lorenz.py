"""Make lorenz.json: the derivative of the mean of z in the equations of Lorenz, by the
gradient of a path, differences of long averages and an ensemble of short runs, and the
exponents that separate them.

Shadowing has a study of its own, make_lorenz_shadowing.py. The file holds the settings,
the seed and the commit; plot_lorenz.py draws it. Run:
python examples/data/make_lorenz.py
"""

import json
import time
from pathlib import Path

import numpy as np
import torch
from studies import commit, rounded
from torch import nn

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.dynamics.fields.ode import ODE
from adjsim.solvers.runge_kutta.runge_kutta import RungeKutta

FILE = Path(__file__).with_name("lorenz.json")
SETTINGS = {
    "dt": 0.01,
    "seed": 0,
    "spin_up": 50.0,
    # Single paths.
    "paths": 256,
    "path": 20.0,
    "path_every": 0.1,
    # The ensemble of short runs.
    "ensemble": 40000,
    "groups": 5,
    "short": 3.0,
    "short_every": 0.1,
    # Long averages: systems for each value, and their length.
    "systems": 256,
    "average": 30000.0,
    # Exponents.
    "spectrum": 256,
    "spectrum_time": 40.0,
    "spectrum_burn_in": 10.0,
}
POINT = {"sigma": 10.0, "rho": 28.0, "beta": 8 / 3}
STEPS = {"sigma": (0.2, 0.5, 1.0), "rho": (0.5, 1.0, 2.0), "beta": (0.05, 0.1)}
SOLVER = RungeKutta("rk4", SETTINGS["dt"])


class Lorenz(nn.Module):
    def __init__(self, sigma, rho, beta):
        super().__init__()
        for name, value in (("sigma", sigma), ("rho", rho), ("beta", beta)):
            if isinstance(value, nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, torch.as_tensor(value))

    def forward(self, t, y):
        x, v, z = y.unbind(-1)
        return torch.stack(
            [self.sigma * (v - x), x * (self.rho - z) - v, x * v - self.beta * z], -1
        )


def height(state):
    return state.y[..., 2]


def grid(end, every):
    return np.linspace(0.0, end, round(end / every) + 1)


def attractor(dynamics, count, seed):
    """Return states on the attractor, (count, 3)."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.tensor([0.0, 0.0, 25.0]) + 5 * torch.randn(
        count, 3, generator=generator
    )
    with torch.no_grad():
        return adjsim.simulate(
            dynamics,
            dynamics.init(start),
            [0.0, SETTINGS["spin_up"]],
            solver=SOLVER,
            compile=True,
        ).final


def tangents(start, times):
    """Return d z / d rho of each path, (times, paths), by forward mode."""

    def path(rho):
        dynamics = ODE(Lorenz(POINT["sigma"], rho, POINT["beta"]))
        return adjsim.simulate(
            dynamics, start, times, solver=SOLVER, record=height
        ).record

    one = torch.tensor(1.0)
    return torch.func.jvp(path, (POINT["rho"] * one,), (one,))[1].numpy()


def growth(start):
    """Return the sizes of the gradients of single paths, over time.

    "final" is the gradient of z at the end of a path, and "average" that of its mean
    along the path.
    """
    dt, every = SETTINGS["dt"], round(SETTINGS["path_every"] / SETTINGS["dt"])
    times = grid(SETTINGS["path"], dt)
    slopes = tangents(start, times)
    running = np.cumsum(slopes[1:], 0) / np.arange(1, len(times))[:, None]
    found = {"times": times[every::every]}
    for key, x in (("final", slopes[1:]), ("average", running)):
        size = np.abs(x[every - 1 :: every])
        found[key] = np.quantile(size, (0.05, 0.5, 0.95), axis=1)
    logarithms = np.log(np.abs(slopes[every::every]))
    late = found["times"] >= SETTINGS["path"] / 4
    rates = np.polyfit(found["times"][late], logarithms[late], 1)[0]
    found["rate"] = [rates.mean(), rates.std(ddof=1) / len(rates) ** 0.5]
    return found


def ensemble(dynamics):
    """Return the mean gradient of short runs from the attractor, by their length.

    The start is held fixed, so the mean of z responds from zero on.
    """
    times = grid(SETTINGS["short"], SETTINGS["short_every"])
    each = SETTINGS["ensemble"] // SETTINGS["groups"]
    slopes = np.concatenate(
        [
            tangents(attractor(dynamics, each, SETTINGS["seed"] + 10 + k), times)
            for k in range(SETTINGS["groups"])
        ],
        1,
    )[1:]
    error = slopes.std(1, ddof=1) / slopes.shape[1] ** 0.5
    return {"times": times[1:], "mean": slopes.mean(1), "stderr": error}


def averages():
    """Return the mean of z and its error for every value of every parameter.

    All systems run in one batch, each with its own parameters.
    """
    rows = [dict(POINT)] + [
        {**POINT, name: POINT[name] + sign * h}
        for name, steps in STEPS.items()
        for h in steps
        for sign in (1, -1)
    ]
    each = SETTINGS["systems"]
    dynamics = ODE(
        Lorenz(
            *(
                torch.tensor([row[name] for row in rows]).repeat_interleave(each)
                for name in POINT
            )
        )
    )
    start = attractor(dynamics, len(rows) * each, SETTINGS["seed"] + 1)
    with torch.no_grad():
        means = adjsim.simulate(
            dynamics,
            start,
            [0.0, SETTINGS["average"]],
            solver=SOLVER,
            record=adjsim.TimeAverage(height),
            compile=True,
        ).record.reshape(len(rows), each)
    errors = means.std(1) / each**0.5
    return [
        {"at": row, "mean": [mean, error]}
        for row, mean, error in zip(
            rows, means.mean(1).tolist(), errors.tolist(), strict=True
        )
    ]


def differences(found):
    """Return central differences of the averages, by parameter and step."""
    by_point = {tuple(row["at"].values()): row["mean"] for row in found}
    slopes = {}
    for name, steps in STEPS.items():
        slopes[name] = {}
        for h in steps:
            up, down = (
                by_point[tuple({**POINT, name: POINT[name] + s * h}.values())]
                for s in (1, -1)
            )
            error = np.hypot(up[1], down[1]) / (2 * h)
            slopes[name][str(h)] = [(up[0] - down[0]) / (2 * h), error]
    return slopes


def spectrum(start):
    duration = SETTINGS["spectrum_time"]
    found = adjsim.lyapunov_spectrum(
        ODE(Lorenz(**POINT)),
        start,
        grid(duration, 1.0),
        solver=SOLVER,
        burn_in=SETTINGS["spectrum_burn_in"],
    )
    return dict(
        zip(("exponents", "stderr"), (x.tolist() for x in found.mean), strict=True)
    )


def store(name, study):
    with replacing(name) as file:
        file.write_text(json.dumps(rounded(study, 6), separators=(",", ":")) + "\n")


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small system
    made, begun = commit(__file__), time.perf_counter()
    dynamics = ODE(Lorenz(**POINT))
    start = attractor(dynamics, SETTINGS["paths"], SETTINGS["seed"])
    study = {
        "made_by": "examples/data/make_lorenz.py",
        "commit": made,
        "torch": torch.__version__,
        "settings": SETTINGS,
        "point": POINT,
    }

    def done(what):
        print(f"{what}: {time.perf_counter() - begun:.0f} s", flush=True)

    study["averages"] = averages()
    study["differences"] = differences(study["averages"])
    done("averages")
    study["growth"] = growth(start)
    done("growth")
    study["ensemble"] = ensemble(dynamics)
    done("ensemble")
    study["spectrum"] = spectrum(start)
    done("spectrum")
    store(FILE, study)
    done(FILE.name)


if __name__ == "__main__":
    main()
