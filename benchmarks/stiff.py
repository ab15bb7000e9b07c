"""Implicit steps of van der Pol's oscillator and their gradient, against diffrax, on one thread.

Backward Euler with 1,000 steps of 0.02, one oscillator with mu = 100, or 1,000 with mu from 1 to
1,000. The gradient is that of the last positions with respect to all mu. diffrax solves its steps
by Newton's method to a relative error of 1e-10, this library to 1e-14. The case `stiff` of
`fields.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rounds import Side, measure
from torch import Tensor, nn

import adjsim
from adjsim.adjoints.base import Adjoint

STEPS, DT, ROUNDS = 1_000, 0.02, 5
BATCHES = {"one oscillator": [100.0], "1,000 oscillators": torch.logspace(0, 3, 1_000).tolist()}


class VanDerPol(nn.Module):
    def __init__(self, mu: list[float]) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.tensor(mu))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        x, v = y.unbind(-1)
        return torch.stack([v, self.mu * (1 - x**2) * v - x], -1)


def own(mu: list[float], adjoint: Adjoint) -> Callable[[], Tensor]:
    field = VanDerPol(mu)
    dynamics, y0 = adjsim.ODE(field), torch.tensor([2.0, 0.0]).expand(len(mu), 2)

    def gradient() -> Tensor:
        run = adjsim.simulate(
            dynamics,
            dynamics.init(y0),
            [0.0, STEPS * DT],
            solver=adjsim.BackwardEuler(DT),
            adjoint=adjoint,
            compile=True,
        )
        return torch.autograd.grad(run.final.y[:, 0].sum(), field.mu)[0]

    return gradient


def in_jax(mu: list[float], adjoint: str) -> Callable[[], Tensor]:
    # Importing jax takes seconds, and the other cases do not need it. This import sets its flags.
    from networks_in_jax import diffrax, jax, jnp, np
    from optimistix import Newton

    solver = diffrax.ImplicitEuler(root_finder=Newton(rtol=1e-10, atol=1e-12))
    adjoints: dict[str, Any] = {
        "DirectAdjoint": diffrax.DirectAdjoint,
        "RecursiveCheckpointAdjoint": diffrax.RecursiveCheckpointAdjoint,
    }

    def field(t: Any, y: Any, mu: Any) -> Any:
        return jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])

    def last(mu: Any) -> Any:
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            solver,
            0.0,
            STEPS * DT,
            DT,
            jnp.array([2.0, 0.0]),
            args=mu,
            adjoint=adjoints[adjoint](),
            stepsize_controller=diffrax.ConstantStepSize(),
            max_steps=STEPS + 1,
        )
        assert found.ys is not None
        return found.ys[-1, 0]

    compiled = jax.jit(jax.grad(lambda mu: jax.vmap(last)(mu).sum()))
    given = jnp.asarray(mu)
    return lambda: torch.from_numpy(np.array(jax.block_until_ready(compiled(given))))


def timed(gradient: Callable[[], Tensor]) -> Side:
    def side() -> dict[str, float]:
        begin = time.process_time()
        gradient()
        return {"gradient": time.process_time() - begin}

    return side


def stiff() -> list[list[str]]:
    """Rows of case, method, milliseconds, ratio to diffrax's best, difference of the gradient."""
    rows: list[list[str]] = []
    for case, mu in BATCHES.items():
        ways = {
            "BackwardEuler, Direct": own(mu, adjsim.DirectAdjoint()),
            "BackwardEuler, Checkpoint": own(mu, adjsim.CheckpointAdjoint()),
            **{
                f"diffrax, {adjoint}": in_jax(mu, adjoint)
                for adjoint in ("DirectAdjoint", "RecursiveCheckpointAdjoint")
            },
        }
        known = ways["BackwardEuler, Direct"]()
        best = measure({name: timed(way) for name, way in ways.items()}, ROUNDS)
        times = {name: found["gradient"] for name, found in best.items()}
        peer = min(seconds for name, seconds in times.items() if "diffrax" in name)
        for name, way in ways.items():
            error = float((way() - known).abs().max() / known.abs().max())
            ms, ratio = 1e3 * times[name], times[name] / peer
            rows.append([case, name, f"{ms:.2f}", f"{ratio:.3f}", f"{error:.1e}"])
    return rows
