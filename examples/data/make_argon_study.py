"""Make argon_study.json: the long runs behind the page plot_argon.py.

Run: python examples/data/make_argon_study.py [part ...]. Without a part, all of them
are run, which takes about half an hour on one core. Each part replaces its own entry of
the file. Later parts need the samples of the fit, which it keeps in the folder of
temporary files.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from argon_liquid import (
    DENSITY,
    DT,
    KT,
    MASS,
    PS,
    Measured,
    liquid,
    mean_and_error,
    potential,
    structure,
    thermostatted,
)
from studies import commit

import adjsim
from adjsim.core.durable.files import replacing

HERE = Path(__file__).resolve().parent
FILE = HERE / "argon_study.json"
WORK = Path(tempfile.gettempdir()) / "argon_study"
ACCEPTED = (0.0103, 3.40)
START = (0.0085, 3.32)
NAMES = ("potential.epsilon", "potential.sigma")
PATHWISE = adjsim.Pathwise(adjsim.ReversibleAdjoint())
# One cutoff serves all sizes of which D is computed.
SHORT = 8.5
WINDOWS = [0.4, 0.8, 1.2, 1.6, 2.0, 2.8]


def stored(**numbers):
    """Return an entry of the file, with six digits."""

    def short(x):
        if isinstance(x, torch.Tensor | np.ndarray):
            x = x.tolist()
        if isinstance(x, list | tuple):
            return [short(y) for y in x]
        if isinstance(x, dict):
            return {key: short(y) for key, y in x.items()}
        return float(f"{x:.6g}") if isinstance(x, float) else x

    return short(numbers)


def keep(atoms, result):
    """Keep the estimates of a fit, which are too large to store, for later parts."""
    WORK.mkdir(exist_ok=True)
    torch.save(result, WORK / f"fit{atoms}.pt")


def kept(atoms):
    return torch.load(WORK / f"fit{atoms}.pt", weights_only=False)


def fit(seed=1000):
    """Fit 108 and 256 atoms by Gauss-Newton steps from a wrong start."""
    found = {}
    for atoms, last, cutoff in ((108, 8.2, None), (256, 10.8, 10.2)):
        data, theta = Measured(last), torch.tensor(START)
        history = [theta]
        position = liquid(potential(atoms, theta, cutoff), atoms, 16, 5 * PS, seed)
        for i in range(6):
            pair, own = potential(atoms, theta, cutoff), seed + 10 * (i + 1)
            position = liquid(pair, atoms, 16, 10 * PS, own, start=position)
            (made,) = structure(pair, position, 25 * PS, own + 3)
            change = data.step(made)
            # A longer step would leave the range where g(r) is nearly linear in sigma.
            theta = theta * torch.exp(change * min(1.0, 0.03 / float(change[1].abs())))
            history.append(theta)
            print(f"{atoms} atoms: {theta.tolist()}", flush=True)
        pair = potential(atoms, theta, cutoff)
        position = liquid(
            pair, atoms, 32, 20 * PS, seed + 100, start=position.repeat(2, 1, 1)
        )
        made = structure(pair, position, 50 * PS, seed + 103, groups=8)
        found[str(atoms)] = {
            "history": torch.stack(history),
            **solved(data, made, theta),
        }
        print(f"{atoms} atoms: {found[str(atoms)]['fitted']}", flush=True)
        keep(atoms, (theta, made))
    return stored(seed=seed, **found)


def solved(data, made, theta):
    """Solve the fit, linear about theta, for each of several independent structures."""
    slopes = torch.stack([data.jacobian(e) for e in made])
    # The mean derivative has less noise than each, and less of a bias from it.
    changes = torch.stack([data.step(e, slopes.mean(0)) for e in made])
    fitted = theta * torch.exp(changes)
    value, error = mean_and_error(fitted)
    curve, curve_error = mean_and_error(torch.stack([data.seen(e.value) for e in made]))
    left = data.g - curve - slopes.mean(0) @ changes.mean(0)
    return {
        "at": theta,
        "fitted": value,
        "error": error,
        "replicas": fitted,
        "misfit": float(left.square().mean().sqrt()),
        "r": data.r,
        "measured": data.g,
        "curve": curve,
        "curve error": curve_error,
        "slope": slopes.mean(0),
        "slope error": mean_and_error(slopes)[1],
    }


def variants(seed=5000):
    """Repeat the fit of 256 atoms with one choice changed at a time."""
    theta, made = kept(256)
    few = ("fitted", "error", "misfit")
    readings = {
        "both convolved, width 0.1": Measured(10.8),
        "simulation convolved, width 0.1": Measured(10.8, same=False),
        "simulation convolved, width 0.05": Measured(10.8, 0.05, same=False),
        "neither convolved": Measured(10.8, 0.0, same=False),
        "simulation at the resolution of the measurement": Measured(
            10.8, same=False, resolution=True
        ),
        "r up to 8.2": Measured(8.2),
        "r up to 5.2, the first peak": Measured(5.2),
        "r from 5.2, without the first peak": Measured(10.8, first=5.2),
    }
    found = {name: solved(data, made, theta) for name, data in readings.items()}
    for name, atoms, cutoff, density in (
        ("cutoff 8.5", 256, 8.5, DENSITY),
        ("500 atoms", 500, 10.2, DENSITY),
        ("500 atoms, cutoff 14", 500, 14.0, DENSITY),
        ("density 1 % higher", 256, 10.2, 1.01 * DENSITY),
    ):
        pair = potential(atoms, theta, cutoff, density)
        start = liquid(pair, atoms, 16, 10 * PS, seed)
        other = structure(pair, start, 50 * PS, seed + 3, groups=8)
        found[name] = solved(Measured(10.8), other, theta)
    found = {name: {key: x[key] for key in few} for name, x in found.items()}
    for name, x in found.items():
        print(name, x, flush=True)
    return stored(seed=seed, at=theta, **found)


def projection(left, data, box):
    """Return a function of the state: the two changes of the logarithms that a fit to
    its g(r) asks for, (replicas, 2).
    """
    solver = torch.linalg.pinv(left)

    def wanted(state):
        seen = adjsim.smooth_radial_distribution(state.position, data.r, box, width=0.1)
        return (data.g - seen) @ solver.T

    return adjsim.Final(wanted)


def paths(pair, start, duration, observable, seed, chunks=32):
    """Return the estimate of an observable over Langevin runs from given positions."""
    bath = thermostatted(pair)
    simulation = adjsim.Simulation(
        bath,
        lambda replicas, generator: bath.init(start[:replicas], generator=generator),
        [0.0, duration],
        solver=adjsim.BAOAB(DT),
        compile=True,
    )
    return PATHWISE(
        simulation, observable, replicas=len(start), chunks=chunks, generator=seed
    )


def path(seed=2000):
    """Take the gradient of g(r) along short runs of 108 atoms, and fit with it."""
    theta, estimates = kept(108)
    data = Measured(8.2, every=2)
    left = torch.stack([data.jacobian(e) for e in estimates]).mean(0)

    def response(theta, start, duration, seed):
        """Return the change that a fit asks for, and minus its derivative."""
        pair = potential(108, theta)
        wanted = projection(left, data, pair.box)
        e = paths(pair, start, duration, wanted, seed)
        slope, error = (
            torch.stack([g[n] * x for n, x in zip(NAMES, theta, strict=True)], 1)
            for g in (e.grad, e.grad_stderr)
        )
        return e.value, e.value_stderr, -slope, error

    pair = potential(108, theta)
    starts = liquid(pair, 108, 32, 8 * 5 * PS, seed, frames=8)
    durations = [0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0]
    slopes, errors = [], []
    for i, duration in enumerate(durations):
        *_, slope, error = response(theta, starts, duration * PS, seed + i)
        print(duration, slope.tolist(), error.tolist(), flush=True)
        slopes.append(slope)
        errors.append(error)
    best, horizon = torch.tensor(START), 1.0
    history, last = [best], liquid(potential(108, best), 108, 32, 5 * PS, seed + 50)
    for i in range(7):
        pair = potential(108, best)
        frames = 2 if i < 5 else 16
        last = liquid(pair, 108, 32, 10 * PS, seed + 60 + 10 * i, start=last)
        starts = liquid(
            pair, 108, 32, frames * 5 * PS, seed + 63 + 10 * i, frames, start=last
        )
        last = starts[frames - 1 :: frames]
        value, stderr, slope, _ = response(
            best, starts, horizon * PS, seed + 66 + 10 * i
        )
        change = torch.linalg.solve(slope, value)
        best = best * torch.exp(change * min(1.0, 0.03 / float(change[1].abs())))
        history.append(best)
        print("path fit", best.tolist(), (stderr * best).tolist(), flush=True)
    error = (torch.linalg.inv(slope) * stderr).square().sum(1).sqrt() * best
    return stored(
        seed=seed,
        at=theta,
        durations=durations,
        slopes=torch.stack(slopes),
        errors=torch.stack(errors),
        horizon=horizon,
        replicas=[256, len(starts)],
        reweighted=solved(data, estimates, theta)["fitted"],
        history=torch.stack(history),
        fitted=best,
        error=error,
    )


def newtonian(pair, start, duration, observable, seed, estimator=PATHWISE, chunks=32):
    """Return the estimate of an observable over runs at constant energy."""
    dynamics = adjsim.Hamiltonian(pair, MASS)

    def initial(replicas, generator):
        at = start[:replicas]
        momentum = dynamics.thermal_momentum(at, KT, generator)
        return dynamics.init(at, momentum - momentum.mean(1, keepdim=True))

    simulation = adjsim.Simulation(
        dynamics,
        initial,
        torch.linspace(0, duration, round(duration / (0.1 * PS)) + 1),
        solver=adjsim.VelocityVerlet(DT),
        compile=True,
    )
    return estimator(
        simulation, observable, replicas=len(start), chunks=chunks, generator=seed
    )


def diffusion(start, stop, pair=None):
    """Return a function of the trajectory: D of each replica, in angstrom^2/ps.

    With a potential, its gradient contains that of the canonical distribution of the
    starts, minus the covariance of D with the derivative of U/kT.
    """

    def coefficient(run):
        D = PS * adjsim.diffusion_coefficient(
            run.position, run.times, start=start * PS, stop=stop * PS
        )
        if pair is None:
            return D
        u = pair(run.position[0].detach()) / KT
        centred = (D - D.mean()).detach() * len(D) / (len(D) - 1)
        return D - centred * (u - u.detach())

    return coefficient


def gradient(seed=3000):
    """Take the gradient of the diffusion coefficient of 108 atoms along short runs."""
    pair, durations = potential(108, ACCEPTED, SHORT), WINDOWS
    starts = liquid(pair, 108, 64, 16 * 4 * PS, seed, frames=16)
    # A covariance about the mean of a chunk is unbiased if the chunk's starts are
    # independent, so a chunk has one frame of each of many replicas.
    starts = starts.unflatten(0, (64, 16)).transpose(0, 1).flatten(0, 1)
    quotient, rows = adjsim.FiniteDifference(1e-7), []
    for i, stop in enumerate(durations):
        row = {"stop": stop}
        for name, chosen, estimator, few, chunks in (
            ("path of a few", None, PATHWISE, starts[:32], 2),
            ("differences", None, quotient, starts[:32], 2),
            ("path", None, PATHWISE, starts[::2], 32),
            ("whole", pair, PATHWISE, starts, 32),
        ):
            observable = diffusion(stop / 2, stop, chosen)
            e = newtonian(pair, few, stop * PS, observable, seed + i, estimator, chunks)
            row["value"] = [float(e.value), float(e.value_stderr)]
            row[name] = [
                [float(g[n]) * x for n, x in zip(NAMES, ACCEPTED, strict=True)]
                for g in (e.grad, e.grad_stderr)
            ]
        print(row, flush=True)
        rows.append(row)
    return stored(seed=seed, at=ACCEPTED, replicas=len(starts), rows=rows)


def coefficients(pair, atoms, batches, seed, replicas=64):
    """Return D between 2 and 5 ps, and D up to each of WINDOWS, with errors.

    The mean is over runs of 20 ps at constant energy from canonical starts.
    """
    dynamics, found = adjsim.Hamiltonian(pair, MASS), []
    times = torch.linspace(0, 20 * PS, 201)
    start = liquid(pair, atoms, replicas, 10 * PS, seed)
    for k in range(batches):
        start = liquid(pair, atoms, replicas, 5 * PS, seed + 5 * k + 3, start=start)
        momentum = dynamics.thermal_momentum(start, KT, seed + k)
        with torch.no_grad():
            run = adjsim.simulate(
                dynamics,
                dynamics.init(start, momentum - momentum.mean(1, keepdim=True)),
                times,
                solver=adjsim.VelocityVerlet(DT),
                compile=True,
            )
            spans = [(2.0, 5.0), *((stop / 2, stop) for stop in WINDOWS)]
            found.append(torch.stack([diffusion(*span)(run) for span in spans], 1))
        start = run.final.position
    value, error = mean_and_error(torch.cat(found))
    return value, error


def sizes(seed=4000):
    """Compute the diffusion coefficient for three sizes and several parameters."""
    fitted = kept(256)[0]
    found, shifts = {}, {"epsilon": (0.04, 0), "sigma": (0, 0.01)}
    for name, theta, atoms, batches, replicas in (
        ("accepted", ACCEPTED, 108, 6, 64),
        ("accepted", ACCEPTED, 256, 3, 64),
        ("accepted", ACCEPTED, 500, 3, 32),
        ("fitted", fitted.tolist(), 256, 3, 64),
    ):
        pair = potential(atoms, theta, SHORT)
        value = coefficients(pair, atoms, batches, seed, replicas)
        found[f"{name}, {atoms}"] = value
        print(name, atoms, value, flush=True)
    for name, shift in shifts.items():
        around = []
        for sign in (1, -1):
            theta = [x * np.exp(sign * d) for x, d in zip(ACCEPTED, shift, strict=True)]
            pair = potential(108, theta, SHORT)
            around.append(coefficients(pair, 108, 6, seed + 100))
        (up, a), (down, b) = around
        found[name] = (
            (up - down) / (2 * max(shift)),
            (a**2 + b**2).sqrt() / (2 * max(shift)),
        )
        print(name, found[name], flush=True)
    return stored(seed=seed, windows=WINDOWS, shifts=shifts, at=ACCEPTED, **found)


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    parts = {f.__name__: f for f in (fit, variants, path, gradient, sizes)}
    head = commit(__file__)  # before the runs, since the code is that of now
    study = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in sys.argv[1:] or parts:
        study[name] = {"commit": head, **parts[name]()}
        with replacing(FILE) as temporary:
            temporary.write_text(json.dumps(study) + "\n")


if __name__ == "__main__":
    main()
