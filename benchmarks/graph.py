"""A message-passing network's gradient through 200 steps, against torch.utils.checkpoint by hand.

The worked model (:class:`adjsim.potentials.learnt.MessagePassing`) in a periodic cell, velocity
Verlet, float64, one thread. By hand, each step is inside ``torch.utils.checkpoint`` and its force
is taken by ``autograd.grad(create_graph=True)``, with the same edges. Two ways of doing so are
measured: one call a step without reentrance, which is what torch recommends and what the ratio is
to; and with reentrance, where the force is taken once more instead of several times, but no step
can be nested or differentiated again. Gradients of the weights are compared first. Rounds
alternate between the sides, and the smallest time of each counts.

Run: python benchmarks/graph.py [atoms ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import adjsim
from adjsim.potentials.graph import GraphPotential
from adjsim.potentials.learnt import MessagePassing

STEPS, DT, MASS, CUTOFF, HIDDEN, SPACING, ROUNDS = 200, 0.02, 10.0, 5.0, 32, 3.0, 3
ATOMS = (27, 64)
# Of gradients of 200 steps, relative to the largest entry: sums in another order.
CLOSE = 1e-8


def system(atoms: int) -> tuple[GraphPotential, Tensor, Tensor]:
    """Make a model, and atoms near the sites of a cubic lattice."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    side = round(atoms ** (1 / 3))
    if side**3 != atoms:
        raise ValueError(f"atoms must be a cube, such as 27 or 64; got {atoms}.")
    length = side * SPACING
    sites = torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 3) * SPACING
    noise = [torch.randn(atoms, 3, dtype=torch.float64, generator=generator) for _ in range(2)]
    model = MessagePassing(CUTOFF, hidden=HIDDEN)
    potential = GraphPotential(model, CUTOFF, box=[length] * 3)
    return potential, sites + 0.2 * noise[0], noise[1]


def ours(adjoint: adjsim.adjoints.base.Adjoint, atoms: int) -> Callable[[], list[Tensor]]:
    potential, position, momentum = system(atoms)
    dynamics = adjsim.Hamiltonian(potential, MASS)
    start = dynamics.init(position, momentum)

    def run() -> list[Tensor]:
        found = adjsim.simulate(
            dynamics, start, [0.0, STEPS * DT], solver=adjsim.VelocityVerlet(DT), adjoint=adjoint
        )
        return gradients(found.final.position, potential)

    return run


def by_hand(reentrant: bool, atoms: int) -> Callable[[], list[Tensor]]:
    potential, position, momentum = system(atoms)

    def force(q: Tensor) -> Tensor:
        with torch.enable_grad():
            q = q if q.requires_grad else q.requires_grad_()
            (slope,) = torch.autograd.grad(potential(q), q, create_graph=True)
        return -slope

    def step(q: Tensor, p: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p = p + 0.5 * DT * f
        q = q + DT / MASS * p
        f = force(q)
        return q, p + 0.5 * DT * f, f

    def run() -> list[Tensor]:
        # Reentrant checkpoints have no gradient unless an input requires grad.
        q = position.clone().requires_grad_()
        p, f = momentum, force(q)
        for _ in range(STEPS):
            q, p, f = checkpoint(step, q, p, f, use_reentrant=reentrant)
        return gradients(q, potential)

    return run


def gradients(position: Tensor, potential: GraphPotential) -> list[Tensor]:
    potential.zero_grad()
    position.square().mean().backward()
    return [x.grad.clone() for x in potential.parameters() if x.grad is not None]


def main(sizes: list[int]) -> None:
    torch.set_num_threads(1)
    print(f"{torch.__version__}, {STEPS} steps, {HIDDEN} features, milliseconds a step")
    for atoms in sizes:
        sides = {
            "ReversibleAdjoint": ours(adjsim.ReversibleAdjoint(), atoms),
            "CheckpointAdjoint": ours(adjsim.CheckpointAdjoint(), atoms),
            "by hand": by_hand(False, atoms),
            "by hand, reentrant": by_hand(True, atoms),
        }
        best, reference = dict.fromkeys(sides, float("inf")), None
        for _ in range(ROUNDS):
            for name, run in sides.items():
                begun = time.perf_counter()
                found = run()
                best[name] = min(best[name], time.perf_counter() - begun)
                reference = found if reference is None else reference
                for x, y in zip(found, reference, strict=True):
                    if not float((x - y).abs().max()) <= CLOSE * float(y.abs().max()):
                        raise ValueError(f"the gradients of {name} differ from the others.")
        edges = system(atoms)[0].edges(system(atoms)[1]).pairs.shape[1]
        print(f"{atoms} atoms, {edges} edges")
        for name, seconds in best.items():
            print(
                f"  {name:20s} {seconds / STEPS * 1e3:8.2f}"
                f"  {seconds / best['by hand']:.2f} of by hand"
                f"  {seconds / best['by hand, reentrant']:.2f} of reentrant"
            )


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or list(ATOMS))
