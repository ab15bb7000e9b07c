"""Liquid argon for make_argon_study.py: canonical runs, g(r), and the fit to neutrons.

Everything is in ASE's units (eV, angstrom, amu). Parameters are epsilon and sigma, and
derivatives are with respect to their logarithms.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from ase import units
from ase.build import bulk
from torch import nn

import adjsim
from adjsim.potentials import Switched

RDF = Path(__file__).resolve().parents[2] / "tests" / "data" / "argon_85K_rdf.csv"
DENSITY, KT, MASS = 0.02125, 85 * units.kB, 39.948
PS, DT = 1000 * units.fs, 10 * units.fs
EDGES = torch.arange(2.8, 11.4001, 0.05, dtype=torch.float64)  # g is zero below


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


def mean_and_error(values):
    """Return mean and standard error over the leading axis."""
    x = torch.as_tensor(values)
    return x.mean(0), x.std(0) / len(x) ** 0.5
