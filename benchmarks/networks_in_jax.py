"""The neural ODE of the benchmark in diffrax, on one thread."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

os.environ["XLA_FLAGS"] = (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1 "
    + os.environ.get("XLA_FLAGS", "")
)

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

jax.config.update("jax_enable_x64", True)


class RK4(diffrax.AbstractERK):
    """The classical method, which diffrax does not have."""

    tableau = diffrax.ButcherTableau(
        a_lower=(np.array([0.5]), np.array([0.0, 0.5]), np.array([0.0, 0.0, 1.0])),
        b_sol=np.array([1, 2, 2, 1]) / 6,
        b_error=np.zeros(4),
        c=np.array([0.5, 0.5, 1.0]),
    )
    interpolation_cls = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k

    def order(self, terms: object) -> int:
        return 4


class InJax:
    """The gradient by one of diffrax's adjoints.

    Args:
        kind: which adjoint.
        weights: weights and biases of the layers, as in torch.
        y0: the start.
        span, steps: the time span and its number of steps.
    """

    def __init__(
        self, kind: str, weights: Sequence[np.ndarray], y0: np.ndarray, span: float, steps: int
    ) -> None:
        self.weights, self.y0 = [jnp.asarray(x) for x in weights], jnp.asarray(y0)
        adjoint = (
            diffrax.DirectAdjoint() if "Direct" in kind else diffrax.RecursiveCheckpointAdjoint()
        )

        def field(t: jax.Array, y: jax.Array, weights: list[jax.Array]) -> jax.Array:
            *inner, (last, bias) = zip(weights[::2], weights[1::2], strict=True)
            for weight, shift in inner:
                y = jnp.tanh(y @ weight.T + shift)
            return y @ last.T + bias

        def loss(weights: list[jax.Array], y0: jax.Array) -> jax.Array:
            found = diffrax.diffeqsolve(
                diffrax.ODETerm(field),
                RK4(),
                0.0,
                span,
                span / steps,
                y0,
                args=weights,
                adjoint=adjoint,
                max_steps=steps + 1,
            )
            assert found.ys is not None
            return (found.ys[-1] ** 2).mean()

        self._gradient = jax.jit(jax.grad(loss))

    def gradient(self) -> Tensor:
        found = jax.block_until_ready(self._gradient(self.weights, self.y0))
        return torch.cat([torch.from_numpy(np.array(x)).flatten() for x in found])

    def side(self) -> dict[str, float]:
        begin = time.process_time()
        jax.block_until_ready(self._gradient(self.weights, self.y0))
        return {"gradient": time.process_time() - begin}
