"""Make exploding_gradients.json: how gradients grow in a small Lennard-Jones fluid
under five dynamics, and what truncated, short and stationary gradients make of it.

32 atoms at density 0.8 and kT = 1, in reduced units. The observable is the mean
distance of an atom to its nearest neighbour, and the parameter is sigma. Growth is
measured over 64 equilibrium starts, each with noise of its own. The file holds the
settings, the seeds and the commit; plot_exploding_gradients.py draws it. Run: python
examples/data/make_exploding_gradients.py
"""

import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from studies import commit, rounded

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.potentials import Switched

FILE = Path(__file__).with_name("exploding_gradients.json")
SETTINGS = {
    "atoms": 32,
    "density": 0.8,
    "kT": 1.0,
    "dt": 0.005,
    # The gradient of a path misses jumps of the force, so the energy ends smoothly.
    "cutoff": 1.7,
    "switched_from": 1.4,
    # Relaxation time of Berendsen and Nose-Hoover, and the friction of Langevin.
    "tau": 0.5,
    "friction": 1.0,
    "starts": 64,
    "batches": 16,
    "seed": 0,
    "long": 6.0,
    "long_every": 0.1,
    "short": 2.0,
    "short_every": 0.05,
    # Differences along single paths, and of long averages.
    "path_step": 1e-9,
    "average": 60.0,
    "step": 0.02,
}
ATOMS, KT, DT, TAU = (SETTINGS[key] for key in ("atoms", "kT", "dt", "tau"))
SIDE, DOF = (ATOMS / SETTINGS["density"]) ** (1 / 3), 3 * ATOMS - 3
BOX = [SIDE] * 3
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# Times at which all single gradients are stored, and the number of starts stored.
SINGLE, SHOWN = (0.1, 0.5, 2.0, 6.0), 8
NAMES = ("NVE", "velocity rescale", "Berendsen", "Langevin", "Nose-Hoover")


def dynamics_of(name, sigma):
    pairs = adjsim.LennardJones(
        1.0,
        sigma,
        cutoff=SETTINGS["cutoff"],
        box=BOX,
        truncation=Switched(SETTINGS["switched_from"]),
    )
    make = {
        "NVE": lambda: adjsim.Hamiltonian(pairs),
        "velocity rescale": lambda: adjsim.VelocityRescale(pairs, kT=KT, dof=DOF),
        "Berendsen": lambda: adjsim.Berendsen(pairs, kT=KT, tau=TAU, dof=DOF),
        "Langevin": lambda: adjsim.Langevin(
            pairs, kT=KT, friction=SETTINGS["friction"]
        ),
        "Nose-Hoover": lambda: adjsim.NoseHooverChain(pairs, kT=KT, tau=TAU, dof=DOF),
    }
    return make[name]()


def solver_of(name):
    scheme = {
        "NVE": "BAB",
        "velocity rescale": "BABR",
        "Berendsen": "RBABR",
        "Langevin": "BAOAB",
        "Nose-Hoover": "NBABN",
    }
    return adjsim.Splitting(scheme[name], DT)


def nearest(state):
    return adjsim.nearest_neighbour_distance(state.position, BOX)


AVERAGE = adjsim.TimeAverage(nearest, burn_in=10.0)


def grid(end, every):
    return np.linspace(0.0, end, round(end / every) + 1)


def equilibrium():
    """Return positions and momenta, (batches, starts, atoms, 3), from one long run.

    They are rounded to the digits of the file, so that a run from the file is the same
    run.
    """
    cells = torch.cartesian_prod(*[torch.arange(2.0)] * 3)
    basis = torch.tensor(
        [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]
    )
    crystal = SIDE / 2 * (cells[:, None] + basis).reshape(1, ATOMS, 3)
    langevin = dynamics_of("Langevin", 1.0)
    generator = torch.Generator().manual_seed(SETTINGS["seed"])
    start = langevin.init(
        crystal.expand(SETTINGS["starts"], -1, -1), generator=generator
    )
    with torch.no_grad():
        run = adjsim.simulate(
            langevin,
            start,
            [0.0, *(50.0 + 5.0 * k for k in range(SETTINGS["batches"]))],
            solver=solver_of("Langevin"),
            generator=generator,
            compile=True,
        )
    position = run.position[1:].remainder(SIDE)
    momentum = run.momentum[1:] - run.momentum[1:].mean(-2, keepdim=True)
    return position.round(decimals=6), momentum.round(decimals=6)


def path(name, sigma, start, times, seed, record):
    dynamics = dynamics_of(name, sigma)
    return adjsim.simulate(
        dynamics,
        dynamics.init(*start),
        times,
        solver=solver_of(name),
        record=record,
        generator=torch.Generator().manual_seed(seed),
    ).record


def tangents(name, start, times, seed):
    """Return the derivatives with respect to sigma of the distance, (times, starts),
    and of the state, (times, starts, atoms, 6).

    Forward mode gives them at all times and for each start in one run.
    """

    def both(state):
        tail = torch.cat([state.position, state.momentum], -1).flatten(1)
        return torch.cat([nearest(state)[:, None], tail], 1)

    one = torch.tensor(1.0)
    slopes = torch.func.jvp(
        lambda sigma: path(name, sigma, start, times, seed, both), (one,), (one,)
    )[1].numpy()
    return slopes[..., 0], slopes[..., 1:]


def differences(name, start, times, seed):
    """Return the derivatives of the distance by differences, (times, starts).

    Paths of a short run depend smoothly on sigma, and forward runs are much faster than
    tangents.
    """
    h = SETTINGS["path_step"]
    with torch.no_grad():
        up, down = (
            path(name, 1.0 + shift, start, times, seed, nearest) for shift in (h, -h)
        )
    return ((up - down) / (2 * h)).numpy()


def rate(times, logarithms):
    """Return the mean slope after a quarter of the time, and its error over starts."""
    late = times >= times[-1] / 4
    slopes = np.polyfit(times[late], logarithms[late], 1)[0]
    return [slopes.mean(), slopes.std(ddof=1) / len(slopes) ** 0.5]


def growth(name, start, seed):
    """Measure how single gradients and tangents of the state grow.

    Return the results, and the gradients at all times, (times, starts).
    """
    every = SETTINGS["long_every"]
    times = grid(SETTINGS["long"], every)
    gradients, state = tangents(name, start, times, seed)
    size = np.abs(gradients[1:])
    return {
        "times": times[1:],
        "quantiles": np.quantile(size, QUANTILES, axis=1),
        "rate": rate(times[1:], np.log(size)),
        "lyapunov": rate(times[1:], np.log(np.linalg.norm(state[1:], axis=2))),
        "single": {str(t): gradients[round(t / every)] for t in SINGLE},
    }, gradients


def response(name, starts, seed, exact):
    """Measure the mean gradient of short runs from equilibrium, by their length.

    "final" is the gradient of the distance at the end of the run. "average" is that of
    the mean distance along the run, which is what a long run gives if its gradient is
    truncated to parts of this length. The differences of the first starts are compared
    with their exact gradients.
    """
    times, every = grid(SETTINGS["short"], DT), round(SETTINGS["short_every"] / DT)
    found = [
        differences(name, (q, p), times, seed + k)[1:]
        for k, (q, p) in enumerate(zip(*starts, strict=True))
    ]
    apart = round(SETTINGS["long_every"] / DT)
    some = found[0][apart - 1 :: apart]
    exact = exact[1 : len(some) + 1]
    error = np.quantile(np.abs(some - exact) / (1 + np.abs(exact)), 0.99)
    # The nearest neighbour changes within the difference at few of these times.
    assert error < 1e-3, error
    single = np.concatenate(found, 1)
    count = single.shape[1]
    running = np.cumsum(single, 0) / np.arange(1, len(times))[:, None]
    return {
        "times": times[every::every],
        "runs": count,
        "difference_error": error,
        **{
            key: [
                x.mean(1)[every - 1 :: every],
                x.std(1, ddof=1)[every - 1 :: every] / count**0.5,
            ]
            for key, x in (("final", single), ("average", running))
        },
    }


def long_average(name, start, sigma, seed):
    """Return the time average of the distance of each start, (starts,)."""
    dynamics = dynamics_of(name, sigma)
    with torch.no_grad():
        return adjsim.simulate(
            dynamics,
            dynamics.init(*start),
            [0.0, SETTINGS["average"]],
            solver=solver_of(name),
            record=AVERAGE,
            generator=torch.Generator().manual_seed(seed),
            compile=True,
        ).record.numpy()


def stationary(name, start, seed):
    """Return the derivative of the long-time mean by differences, and its error.

    The long runs of the two sides have forgotten their common noise, so the error is
    that of independent means.
    """
    h = SETTINGS["step"]
    up, down = (
        long_average(name, start, 1.0 + shift, seed + k)
        for k, shift in enumerate((h, -h))
    )
    variance = (up.var(ddof=1) + down.var(ddof=1)) / len(up)
    return [(up.mean() - down.mean()) / (2 * h), math.sqrt(variance) / (2 * h)]


def equilibrium_estimators(start, seed):
    """Return the gradient by ScoreFunction and Reweighting, and their errors."""
    found = {}
    for name in ("Langevin", "Nose-Hoover"):
        dynamics = dynamics_of(name, torch.nn.Parameter(torch.tensor(1.0)))
        simulation = adjsim.Simulation(
            dynamics,
            lambda count, generator, d=dynamics: d.init(
                start[0][:count], start[1][:count]
            ),
            [0.0, SETTINGS["average"]],
            solver_of(name),
            compile=True,
        )
        for estimator in (adjsim.ScoreFunction(), adjsim.Reweighting(every=0.5)):
            estimate = estimator(
                simulation,
                AVERAGE,
                replicas=SETTINGS["starts"],
                generator=torch.Generator().manual_seed(seed),
            )
            found[f"{type(estimator).__name__}, {name}"] = {
                "gradient": [
                    part["potential.sigma"].item()
                    for part in (estimate.grad, estimate.grad_stderr)
                ],
                "warnings": estimate.warnings,
            }
    return found


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small system
    made, begun = commit(__file__), time.perf_counter()
    starts = equilibrium()
    first = starts[0][0], starts[1][0]
    study = {
        "made_by": "examples/data/make_exploding_gradients.py",
        "commit": made,
        "torch": torch.__version__,
        "settings": SETTINGS,
        "quantiles": QUANTILES,
        "starts": [x[:SHOWN].numpy() for x in first],
        "dynamics": {},
    }
    for i, name in enumerate(NAMES):
        seed = SETTINGS["seed"] + 1000 * (i + 1)
        grown, gradients = growth(name, first, seed)
        study["dynamics"][name] = {
            "seed": seed,
            "growth": grown,
            "response": response(name, starts, seed, gradients),
            "stationary": stationary(name, first, seed + 100),
        }
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    study["estimators"] = equilibrium_estimators(first, SETTINGS["seed"] + 9000)
    text = json.dumps(rounded(study, 7), separators=(",", ":"))
    with replacing(FILE) as file:
        file.write_text(text + "\n")
    print(f"{FILE.name}: {len(text) / 1e3:.0f} kB, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
