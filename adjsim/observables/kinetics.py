"""Kinetic observables."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from adjsim._inputs import as_tensor, as_whole
from adjsim._typing import Array

Frames = Float[Tensor, "time *batch atoms dim"]


def mean_squared_displacement(position: Frames | Array) -> Float[Tensor, "time *batch"]:
    """Compute ``|q(t) - q(0)|^2`` averaged over atoms, length^2.

    The positions must not be wrapped into a box.
    """
    q = as_tensor("position", position)
    return ((q - q[0]) ** 2).sum(-1).mean(-1)


def velocity_autocorrelation(velocity: Frames | Array, lags: int) -> Float[Tensor, "lags *batch"]:
    """Compute the velocity autocorrelation, averaged over atoms and time origins.

    It is ``<v(t) . v(0)> / dim``. The lags are 0 to ``lags - 1`` frames. At equilibrium it begins
    at kT/m.
    """
    v, lags = as_tensor("velocity", velocity), as_whole("lags", lags)
    frames = v.shape[0]
    if not 1 <= lags <= frames:
        raise ValueError(f"lags must be between 1 and the number of frames, {frames}; got {lags}.")
    products = [(v[: frames - k] * v[k:]).mean((0, -1, -2)) for k in range(lags)]
    return torch.stack(products)


def first_passage_time(
    rate: Float[Tensor, "time *batch"] | Array, times: Float[Tensor, " time"] | Array
) -> Float[Tensor, "*batch"]:
    """Compute the time until a walker is absorbed, at most the length of the run::

        T = sum_n (t_{n+1} - t_n) exp(-sum_{j<=n} rate_j (t_{j+1} - t_j))

    If the run is much longer than the passage, the mean of T over paths is the mean first-passage
    time. Otherwise it is the mean of the passage time, capped at the length of the run. Save every
    step, so that no walker crosses the boundary and returns between two frames.

    Args:
        rate: the rate, 1/time, at which a walker is absorbed at each frame. A sharp boundary is an
            infinite rate beyond it and zero before it. This rate is piecewise constant along a
            path, so :class:`~adjsim.Pathwise` sees no gradient and :class:`~adjsim.Girsanov` does.
            A smooth rate, such as ``sigmoid(x / width) / lifetime``, is a different observable,
            for which both work.
        times: the times of the frames.
    """
    k, t = as_tensor("rate", rate), as_tensor("times", times)
    dt = (t[1:] - t[:-1]).to(k).reshape(-1, *[1] * (k.ndim - 1))
    return (dt * torch.exp(-(k[:-1] * dt).cumsum(0))).sum(0)
