"""Order in a structure, and starts of a liquid melted from a crystal.

A face-centred crystal stays superheated at the temperature of its liquid: no defect starts the
melting of a small periodic box. Averages over its vibrations are then taken for those of a liquid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adjsim.cli.job import Job
from adjsim.core.box import volume
from adjsim.core.durable.ranks import Ranks
from adjsim.core.noise import seed_from
from adjsim.core.progress import progress_bar

# The largest structure factor of a simple liquid at equilibrium: it freezes beyond, by the rule of
# Hansen and Verlet, Phys. Rev. 184, 151 (1969).
FREEZING = 2.85
# The share of liquid structures that are taken for ordered ones, at most.
CHANCE = 1e-3
# The largest wavevector, times the cube root of the volume of an atom. First Bragg peaks are at 5.4
# (diamond), 6.3 (simple cubic), 6.5 (hcp), 6.9 (fcc) and 7.1 (bcc).
LARGEST = 8.0
# Well above the melting temperature at densities of a liquid: kT in units of epsilon, and of kT.
HOT = 3.0
# A share of the density. Distances change by a third of it, and a fitted sigma has an error of half
# a per cent.
SAME_DENSITY = 0.02
# Steps between draws of new momenta, of which each brings the thermostat's temperature at once.
STAGE = 250
# Stages at the temperature of the liquid, and at most of the melting.
COLD_STAGES, HOT_STAGES = 8, 80


@dataclass(frozen=True)
class Order:
    """The third highest value of the structure factor, and the limit of a liquid.

    A crystal has Bragg peaks along at least three independent wavevectors, of up to S = atoms. In a
    liquid S(k) of one structure is distributed exponentially, with a mean of at most 2.85. Three of
    M wavevectors are then above x with a probability of at most ``binom(M, 3) exp(-3 x / 2.85)``,
    which is 1e-3 at the limit. Vibrations along each axis by a share u of the distance of
    neighbours lower the peak of an fcc crystal to ``atoms exp(-(7.7 u)^2)``, 0.55 atoms at u = 0.1.
    So from 54 atoms on, a crystal is found up to its melting; of 32 atoms up to about u = 0.08.
    """

    peak: float
    limit: float

    @property
    def found(self) -> bool:
        return self.peak > self.limit


def order_of(position: Tensor, box: Tensor) -> Order:
    """Measure the long-range order of one structure, ``(atoms, 3)``, in a periodic box."""
    q, rows = position.detach().double(), box.detach().double()
    rows = torch.diag(rows) if rows.ndim == 1 else rows
    largest = LARGEST * (len(q) / float(volume(rows))) ** (1 / 3)
    fractional = q @ torch.linalg.inv(rows)
    # exp(2 pi i n x) for each Miller index n, whose products over three axes are the plane waves.
    counts = [int(largest * float(row.norm()) / (2 * math.pi)) for row in rows]
    indices = [torch.arange(-n, n + 1, dtype=torch.float64) for n in counts]
    first, second, third = (
        torch.polar(torch.ones(len(n), len(q), dtype=torch.float64), 2 * math.pi * n[:, None] * x)
        for n, x in zip(indices, fractional.T, strict=True)
    )
    amplitude = torch.stack([(wave * second) @ third.T for wave in first])
    values = (amplitude.abs() ** 2 / len(q)).flatten()
    k = 2 * math.pi * torch.cartesian_prod(*indices) @ torch.linalg.inv(rows).T
    # k and -k have the same S, and are at equal distances from the middle, k = 0.
    middle = len(k) // 2
    values = values[middle + 1 :][k[middle + 1 :].norm(dim=1) <= largest]
    triples = math.comb(len(values), 3)
    if triples == 0:
        return Order(0.0, math.inf)
    return Order(float(values.topk(3).values[-1]), FREEZING / 3 * math.log(triples / CHANCE))


@dataclass(frozen=True)
class Preparation:
    """The way in which the starts of a fit were made from a structure of this order.

    ``temperature`` is that of the melting, in the units of the command line, None: it was not
    melted. Of all melted ``starts``, ``ordered`` have long-range order again.
    """

    order: Order
    temperature: float | None = None
    ordered: int = 0
    starts: int = 0

    def sentence(self, unit: str) -> str:
        """Say whether the structure is ordered, and whether it was melted."""
        numbers = (
            f"S(k) reaches {self.order.peak:.3g}, the limit of a liquid is {self.order.limit:.3g}"
        )
        kind = "has long-range order" if self.order.found else "is disordered, as a liquid is"
        done = "It was not melted."
        if self.temperature is not None:
            done = f"It was melted at {self.temperature:.4g} {unit} and cooled, once a replica."
        return f"The structure {kind} ({numbers}). {done}"

    @property
    def doubts(self) -> list[str]:
        """Reasons not to take averages of the starts for those of a liquid."""
        if self.temperature is None and self.order.found:
            return [
                "the structure has long-range order, and was not melted: a crystal may stay "
                "superheated, and its g(r) is not that of the liquid; leave out --no-melt"
            ]
        if self.ordered:
            return [
                f"{self.ordered} of {self.starts} melted starts had long-range order again after "
                "the cooling: the model freezes at this temperature and density"
            ]
        return []


def different_density(structure: float, target: float | None) -> list[str]:
    """Warn of a target whose density is not that of the structure, both per cubic angstrom."""
    if target is None or abs(structure / target - 1) <= SAME_DENSITY:
        return []
    return [
        f"the structure has {structure:.4g} atoms per cubic angstrom, and the target {target:.4g}: "
        f"the fitted numbers answer for the difference of {100 * (structure / target - 1):+.1f} %; "
        "scale the cell"
    ]


def melting_temperature(job: Job) -> float:
    """Return the temperature at which :func:`melted` melts, in the units of the command line."""
    deepest = float(job.system.potential.epsilon.detach().max()) / job.system.temperature
    return HOT * max(deepest, job.temperature)


def melted(hot: Job, cold: Job, count: int, compile: bool, ranks: Ranks) -> Tensor:
    """Melt the structure ``count`` times and cool each liquid, ``(count, atoms, 3)``.

    Each runs as the job ``hot`` until it has no order and its atoms have moved by the distance of
    neighbours (root mean square), and then as ``cold``. Momenta are drawn again at every stage.
    """
    source = torch.Generator().manual_seed(cold.seed)
    # The first seeds of this generator are those of the fit's runs.
    seeds = [seed_from(source) for _ in range(2 * count)][count:]
    bar = progress_bar(ranks.first)
    task = bar.add_task("melting", total=math.ceil(count / ranks.size), doing="")

    def one(i: int) -> Tensor:
        generator = torch.Generator().manual_seed(seeds[i])
        position = _molten(hot, generator, compile)
        for _ in range(COLD_STAGES):
            position = _stage(cold, position, generator, compile)
        bar.advance(task)
        return position

    with bar:
        found = ranks.share(count, one)
    return torch.stack([torch.as_tensor(x) for x in found])


def _molten(job: Job, generator: torch.Generator, compile: bool) -> Tensor:
    start = position = job.system.position
    moved, box = 0.0, job.system.potential.box
    assert box is not None
    spacing = (float(volume(box)) / len(start)) ** (1 / 3)
    for _ in range(HOT_STAGES):
        position = _stage(job, position, generator, compile)
        moved = float((position - start).square().sum(-1).mean().sqrt())
        if moved > spacing and not order_of(position, box).found:
            return position
    raise ValueError(
        f"the structure did not melt in {HOT_STAGES * STAGE} steps at {job.temperature:.4g} "
        f"{job.system.temperature_name}: its atoms moved by {moved:.3g} angstrom, and in a liquid "
        f"they move by {spacing:.3g}. Give a larger --dt, or a structure of the liquid and "
        "--no-melt."
    )


@torch.no_grad()
def _stage(job: Job, position: Tensor, generator: torch.Generator, compile: bool) -> Tensor:
    return job.run(job.start(position[None], generator), STAGE, generator, compile).position[0]
