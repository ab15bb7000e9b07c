"""The analytic pair force and its products against nested automatic differentiation, both compiled.

The same Lennard-Jones energy is used twice: as ``adjsim.LennardJones``, whose force, Hessian-vector
product and parameter gradient follow from the derivatives of a pair's energy with respect to its
squared distance, and as a plain module, whose force is a gradient and whose products are gradients
of that gradient. Velocity Verlet, forward and reversible backward, one thread, warm, medians of
alternating runs. Run: python benchmarks/analytic_against_nested.py
"""

from __future__ import annotations

import statistics
import time

import torch
from clusters import lattice
from suite import parameter
from torch import Tensor, nn

import adjsim

DT, ROUNDS = 0.002, 7


class Nested(nn.Module):
    """The energy alone. Pairs of an atom with itself get a distance of one before any division."""

    def __init__(self) -> None:
        super().__init__()
        self.epsilon, self.sigma = parameter(1.0), parameter(1.0)

    def forward(self, position: Tensor) -> Tensor:
        same = torch.eye(position.shape[-2], dtype=position.dtype, device=position.device)
        d = position.unsqueeze(-2) - position.unsqueeze(-3)
        x = (self.sigma**2 / ((d * d).sum(-1) + same)) ** 3
        return (4 * self.epsilon * x * (x - 1) * (1 - same)).sum((-1, -2)) / 2


def gradient(dynamics: adjsim.Hamiltonian, atoms: int, steps: int) -> tuple[float, float, Tensor]:
    """Return the seconds a step forward, and forward and backward, and the gradients in one row."""
    start = [x.requires_grad_() for x in lattice(atoms, None)]
    begun = time.perf_counter()
    run = adjsim.simulate(
        dynamics,
        dynamics.init(*start),
        [0.0, steps * DT],
        solver=adjsim.VelocityVerlet(DT),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=True,
    )
    forward = time.perf_counter() - begun
    grads = torch.autograd.grad(run.final.position.square().sum(), [*dynamics.parameters(), *start])
    both = time.perf_counter() - begun
    return forward / steps, both / steps, torch.cat([grad.reshape(-1) for grad in grads])


def main() -> None:
    torch.set_num_threads(1)
    print(
        "microseconds a step: analytic, nested, ratio (median of each; ratio of runs next to each "
        "other)"
    )
    for atoms, steps in ((13, 1024), (108, 256), (256, 100)):
        potentials = adjsim.LennardJones(parameter(1.0), parameter(1.0)), Nested()
        analytic, nested = (adjsim.Hamiltonian(potential) for potential in potentials)
        torch.testing.assert_close(
            gradient(analytic, atoms, steps)[2],
            gradient(nested, atoms, steps)[2],
            rtol=1e-9,
            atol=1e-9,
        )
        pairs = [
            (gradient(analytic, atoms, steps), gradient(nested, atoms, steps))
            for _ in range(ROUNDS)
        ]
        for i, what in enumerate(("forward", "forward and back")):
            mine, other = (
                1e6 * statistics.median(pair[side][i] for pair in pairs) for side in (0, 1)
            )
            ratios = sorted(pair[1][i] / pair[0][i] for pair in pairs)
            spread = f"{ratios[0]:.1f} to {ratios[-1]:.1f}"
            print(
                f"{atoms:4d} atoms, {what:17s} {mine:7.1f} {other:7.1f}   "
                f"{statistics.median(ratios):.1f} ({spread})",
                flush=True,
            )


if __name__ == "__main__":
    main()
