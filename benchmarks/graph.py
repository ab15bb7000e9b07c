"""A message-passing network's gradient through 200 steps, against torch.utils.checkpoint by hand.

The worked model (:class:`adjsim.potentials.MessagePassing`) in a periodic cell, velocity
Verlet, float64, one thread. By hand, steps are inside ``torch.utils.checkpoint`` and each force is
taken by ``autograd.grad(create_graph=True)``, with the same edges. Three ways are measured:

- ``by hand``: a checkpoint for each step, without reentrance, as torch recommends. The inner
  gradient unpacks saved tensors, so the energy is evaluated three times a step.
- ``segments``: a checkpoint for about sqrt(steps) steps, as is usual for memory. Every force
  inside runs its segment again, so the cost of a step grows with the length of the segment.
- ``reentrant``: a checkpoint for each step with reentrance, which evaluates the energy twice a
  step, as reversal does. It cannot be nested or differentiated again, and keeps every state.

Gradients of the weights are compared first. Rounds alternate between the sides, and the smallest
time of each counts. The product of a force takes two thirds of a step of reversal on a quiet
machine, and every side takes it once, so the ratio depends mostly on the rest.

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
from adjsim.potentials import MessagePassing
from adjsim.potentials.learnt.graph import GraphPotential

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


def by_hand(atoms: int, *, reentrant: bool = False, length: int = 1) -> Callable[[], list[Tensor]]:
    potential, position, momentum = system(atoms)

    def force(q: Tensor) -> Tensor:
        with torch.enable_grad():
            q = q if q.requires_grad else q.requires_grad_()
            (slope,) = torch.autograd.grad(potential(q), q, create_graph=True)
        return -slope

    def steps(count: int, q: Tensor, p: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for _ in range(count):
            p = p + 0.5 * DT * f
            q = q + DT / MASS * p
            f = force(q)
            p = p + 0.5 * DT * f
        return q, p, f

    def run() -> list[Tensor]:
        # Reentrant checkpoints have no gradient unless an input requires grad.
        q = position.clone().requires_grad_()
        p, f = momentum, force(q)
        for start in range(0, STEPS, length):
            count = min(length, STEPS - start)
            q, p, f = checkpoint(steps, count, q, p, f, use_reentrant=reentrant)
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
            "by hand": by_hand(atoms),
            "segments": by_hand(atoms, length=round(STEPS**0.5)),
            "reentrant": by_hand(atoms, reentrant=True),
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
        hand = ("by hand", "segments", "reentrant")
        for name, seconds in best.items():
            ratios = "  ".join(f"{seconds / best[other]:5.2f} of {other}" for other in hand)
            print(f"  {name:18s} {seconds / STEPS * 1e3:7.2f}  {ratios}")


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or list(ATOMS))
