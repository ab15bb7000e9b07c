"""Generalised Born with a cutoff: forces and products by a list, by all pairs and by OpenMM.

::

    python benchmarks/solvent.py 520 2000 8000

OBC2 of a ball of atoms at the density of a protein, one thread. A row has milliseconds of processor
time, minima of alternating rounds: the force, force and product by a list; both by all pairs, up to
2,000 atoms; and the force of OpenMM's CPU platform.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rounds import one_core
from torch import Tensor

import adjsim
from adjsim.core import box
from adjsim.potentials.base import force_vjp

DENSITY, CUTOFF, ROUNDS = 0.1, 10.0, 4


def ball(atoms: int) -> tuple[Tensor, adjsim.GeneralizedBorn]:
    """Make atoms on a grid in a ball, a little displaced, with random numbers."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    spacing = (1 / DENSITY) ** (1 / 3)
    count = math.ceil((3 * atoms / (4 * math.pi)) ** (1 / 3)) + 1
    line = spacing * torch.arange(-count, count + 1, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line, line)
    position = grid[grid.norm(dim=1).argsort()][:atoms] + 0.3 * drawn(atoms, 3)
    numbers = drawn(atoms) - 0.5, 1.2 + 0.5 * drawn(atoms), 0.7 + 0.2 * drawn(atoms)
    return position, adjsim.GeneralizedBorn(*numbers, cutoff=CUTOFF, constant=14.4)


def milliseconds(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Measure functions in alternating rounds."""
    best = [math.inf] * len(functions)
    for _ in range(ROUNDS):
        for k, function in enumerate(functions):
            begun = time.process_time()
            function()
            best[k] = min(best[k], 1e3 * (time.process_time() - begun))
    return best


def of_solvent(atoms: int, listed: bool) -> list[Callable[[], object]]:
    """Return the force, and the force and its product."""
    box.LISTED_WITHOUT_BOX = 1 if listed else sys.maxsize
    position, solvent = ball(atoms)
    v = torch.ones_like(position)
    assert solvent.path(position) == ("neighbour list" if listed else "all pairs, by torch")
    return [lambda: solvent.force(position), lambda: force_vjp(solvent, position, [])[1](v)]


def of_openmm(atoms: int) -> Callable[[], object]:
    """Return the force of OpenMM's CPU platform."""
    import openmm

    position, solvent = ball(atoms)
    term, system = openmm.GBSAOBCForce(), openmm.System()
    term.setNonbondedMethod(term.CutoffNonPeriodic)
    term.setCutoffDistance(CUTOFF / 10)
    numbers = solvent.charge, solvent.radius / 10, solvent.scale
    for row in zip(*(x.tolist() for x in numbers), strict=True):
        system.addParticle(12.0)
        term.addParticle(*row)
    system.addForce(term)
    platform = openmm.Platform.getPlatformByName("CPU")
    integrator = openmm.VerletIntegrator(0.001)
    places = (position / 10).numpy()
    # The first forces begin the threads.
    with one_core():
        context = openmm.Context(system, integrator, platform, {"Threads": "1"})
        context.setPositions(places)
        context.getState(getForces=True)

    @one_core()
    def evaluated() -> object:
        context.setPositions(places)
        return context.getState(getForces=True)

    return evaluated


def main() -> None:
    torch.set_num_threads(1)
    for atoms in map(int, sys.argv[1:]):
        with torch.no_grad():
            found = milliseconds([*of_solvent(atoms, True), of_openmm(atoms)])
            found += milliseconds(of_solvent(atoms, False)) if atoms <= 2000 else []
        print(atoms, *(f"{x:.1f}" for x in found), flush=True)


if __name__ == "__main__":
    main()
