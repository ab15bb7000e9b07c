"""Make argon_study.json: the long runs behind the page plot_argon.py.

Everything is in ASE's units (eV, angstrom, amu). Run: python
examples/data/make_argon_study.py [part ...]. Without a part, all of them are run, which
takes about half an hour on one core. Each part replaces its own entry of the file.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from ase import units
from ase.build import bulk
from torch import nn

import adjsim
from adjsim._files import replacing
from adjsim.potentials import Switched

HERE = Path(__file__).resolve().parent
FILE = HERE / "argon_study.json"
WORK = Path(tempfile.gettempdir()) / "argon_study"
RDF = HERE.parents[1] / "tests" / "data" / "argon_85K_rdf.csv"
DENSITY, KT, MASS = 0.02125, 85 * units.kB, 39.948
ACCEPTED = (0.0103, 3.40)
START = (0.0085, 3.32)
PS, DT = 1000 * units.fs, 10 * units.fs
EDGES = torch.arange(2.8, 11.4001, 0.05, dtype=torch.float64)  # g is zero below
LOGS = ("potential.epsilon", "potential.sigma")
PATHWISE = adjsim.Pathwise(adjsim.ReversibleAdjoint())


def potential(atoms, theta, cutoff=None, density=DENSITY):
    """Return Lennard-Jones with trainable epsilon and sigma.

    It is switched off over the last angstrom before the cutoff, by default half the
    box. A force that jumps at the cutoff has a pathwise gradient that misses the jumps.
    """
    edge = (atoms / density) ** (1 / 3)
    cutoff = edge / 2 if cutoff is None else cutoff
    return adjsim.LennardJones(
        *(nn.Parameter(torch.tensor(float(x))) for x in theta),
        cutoff=cutoff,
        truncation=Switched(cutoff - 1),
        box=torch.full((3,), edge),
    )


def thermostatted(pair):
    return adjsim.Langevin(pair, MASS, KT, friction=1 / PS)


def liquid(pair, atoms, replicas, duration, seed, frames=1, start=None):
    """Return positions of a canonical run, (replicas * frames, atoms, 3).

    The frames are evenly spaced over the duration, and those of one replica are
    neighbours. Without a start, a lattice is melted at 300 K first.
    """
    with torch.no_grad():
        bath = thermostatted(pair)
        if start is None:
            cells = round((atoms / 4) ** (1 / 3))
            lattice = bulk("Ar", "fcc", a=float(pair.box[0]) / cells, cubic=True)
            start = torch.from_numpy(lattice.repeat(cells).get_positions())
            start = start.repeat(replicas, 1, 1)
            hot = adjsim.Langevin(pair, MASS, 300 * units.kB, friction=1 / PS)
            start = at_times(hot, start, [0.0, 10 * PS], seed).final.position
            start = at_times(bath, start, [0.0, 20 * PS], seed + 1).final.position
        times = torch.linspace(0, duration, frames + 1)
        run = at_times(bath, start, times, seed + 2)
        return run.position[1:].transpose(0, 1).flatten(0, 1)


def at_times(bath, position, times, seed):
    return adjsim.simulate(
        bath,
        bath.init(position, generator=seed),
        times,
        solver=adjsim.BAOAB(DT),
        generator=seed,
        compile=True,
    )


def histogram(position, box):
    """Return g(r) between EDGES as a histogram of each frame, (frames, bins)."""
    atoms, size = position.shape[-2], float(box.prod())
    i, j = torch.triu_indices(atoms, atoms, 1)
    shells = 4 / 3 * np.pi * (EDGES[1:] ** 3 - EDGES[:-1] ** 3)
    counts = []
    for q in position:
        apart = q[i] - q[j]
        r = (apart - box * torch.round(apart / box)).norm(dim=-1)
        counts.append(torch.histogram(r, EDGES).hist)
    return torch.stack(counts) / (atoms * (atoms - 1) / 2) * size / shells


class Structure(NamedTuple):
    """g(r) in the bins, (bins,), and its derivatives, (bins, 2).

    The derivatives are with respect to log epsilon and log sigma.
    """

    value: torch.Tensor
    slope: torch.Tensor


def structure(pair, start, duration, seed, groups=1):
    """Return the Structure of independent groups of replicas, as a list.

    A derivative is minus the covariance of g(r) with that of U/kT, which is what
    Reweighting computes, here for many bins at the cost of three energies a frame.
    """
    frames = round(duration / (0.5 * PS))
    each = len(start) // groups
    q = liquid(pair, 0, len(start), duration, seed, frames, start)
    found = []
    for part in q.split(each * frames):
        g = histogram(part, pair.box)
        u = torch.stack([part.new_zeros(len(part)), changes_with_sigma(pair, part)], 1)
        u[:, 0] = energies(pair, part)
        u = u / KT
        slope = -(g - g.mean(0)).T @ (u - u.mean(0)) / (len(g) - 1)
        found.append(Structure(g.mean(0), slope))
    return found


@torch.no_grad()
def energies(pair, position):
    return torch.cat([pair(part) for part in position.split(64)])


@torch.no_grad()
def changes_with_sigma(pair, position, h=1e-4):
    """Return dU/dlog(sigma) by central differences, whose error is of order h^2."""
    sigma = pair.sigma.detach().clone()
    ends = []
    for sign in (1, -1):
        pair.sigma.copy_(sigma * np.exp(sign * h))
        ends.append(energies(pair, position))
    pair.sigma.copy_(sigma)
    return (ends[0] - ends[1]) / (2 * h)


class Measured:
    """The measured g(r), and the fit of two parameters to it.

    ``width`` is the standard deviation of the Gaussian with which the simulated g(r) is
    convolved, and ``same`` is whether the measured one is too. With ``resolution`` the
    simulated g(r) goes through the sine transform up to the measurement's largest wave
    number instead.
    """

    def __init__(
        self, last, width=0.1, same=True, resolution=False, first=3.2, every=1
    ):
        table = np.loadtxt(RDF, delimiter=",", skiprows=5)
        r, g = torch.from_numpy(table).T
        middle = (EDGES[1:] + EDGES[:-1]) / 2
        use = (r > first - 0.01) & (r < last + 0.01)
        use &= torch.arange(len(r)) % every == 0
        self.r = r[use]
        if resolution:
            self.operator, self.offset = truncation(self.r, middle)
        else:
            self.operator, self.offset = gaussian(self.r, middle, width), 0.0
        self.g = gaussian(self.r, r, width) @ g if same else g[use]

    def seen(self, bins):
        """Return a simulated g(r) as the measurement sees it."""
        return self.operator @ bins + self.offset

    def jacobian(self, estimate):
        """Return the derivative with respect to the logarithms, (points, 2)."""
        return self.operator @ estimate.slope

    def step(self, estimate, jacobian=None):
        """Return the Gauss-Newton change of the logarithms."""
        left = self.jacobian(estimate) if jacobian is None else jacobian
        return torch.linalg.pinv(left) @ (self.g - self.seen(estimate.value))


def gaussian(r, grid, width):
    spacing = float(grid[1] - grid[0])
    if width < spacing / 2:  # too narrow for the grid: between its nearest points
        near = (1 - (r[:, None] - grid).abs() / spacing).clamp(min=0)
        return near / near.sum(1, keepdim=True)
    x = (r[:, None] - grid) / width
    return torch.exp(-x * x / 2) * (spacing / (width * np.sqrt(2 * np.pi)))


def truncation(r, grid, largest=11.75):
    """Return the sine transform of g - 1 and back, cut off at the largest wave number.

    It is an operator on g and the function to be added.
    """
    spacing = float(grid[1] - grid[0])
    below = torch.arange(spacing / 2, float(grid[0]) - spacing / 4, spacing)
    whole = torch.cat([below, grid])
    waves = [torch.sinc(largest * (r[:, None] + s * whole) / np.pi) for s in (-1, 1)]
    operator = (waves[0] - waves[1]) * largest / np.pi * whole / r[:, None] * spacing
    return operator[:, len(below) :], 1 - operator.sum(1)


def stored(**numbers):
    """Return an entry of the file, with six digits."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=HERE,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()

    def short(x):
        if isinstance(x, torch.Tensor | np.ndarray):
            x = x.tolist()
        if isinstance(x, list | tuple):
            return [short(y) for y in x]
        if isinstance(x, dict):
            return {key: short(y) for key, y in x.items()}
        return float(f"{x:.6g}") if isinstance(x, float) else x

    return {"commit": commit, "threads": torch.get_num_threads(), **short(numbers)}


def keep(atoms, result):
    """Keep the estimates of a fit, which are too large to store, for later parts."""
    WORK.mkdir(exist_ok=True)
    torch.save(result, WORK / f"fit{atoms}.pt")


def kept(atoms):
    return torch.load(WORK / f"fit{atoms}.pt", weights_only=False)


def mean_and_error(values):
    """Return mean and standard error over the leading axis."""
    x = torch.as_tensor(values)
    return x.mean(0), x.std(0) / len(x) ** 0.5


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
            torch.stack([g[n] * x for n, x in zip(LOGS, theta, strict=True)], 1)
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
                [float(g[n]) * x for n, x in zip(LOGS, ACCEPTED, strict=True)]
                for g in (e.grad, e.grad_stderr)
            ]
        print(row, flush=True)
        rows.append(row)
    return stored(seed=seed, at=ACCEPTED, replicas=len(starts), rows=rows)


# One cutoff serves all sizes.
SHORT = 8.5
WINDOWS = [0.4, 0.8, 1.2, 1.6, 2.0, 2.8]


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
    study = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in sys.argv[1:] or parts:
        study[name] = parts[name]()
        with replacing(FILE) as temporary:
            temporary.write_text(json.dumps(study) + "\n")


if __name__ == "__main__":
    main()
