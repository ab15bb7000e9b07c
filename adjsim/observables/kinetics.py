"""How the atoms move."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from adjsim._inputs import as_tensor, as_whole
from adjsim._typing import Array

Frames = Float[Tensor, "time *batch atoms dim"]


def mean_squared_displacement(position: Frames | Array) -> Float[Tensor, "time *batch"]:
    """``|q(t) - q(0)|^2`` averaged over atoms, length^2, from positions that were not wrapped into
    a box.
    """
    q = as_tensor("position", position)
    return ((q - q[0]) ** 2).sum(-1).mean(-1)


def velocity_autocorrelation(velocity: Frames | Array, lags: int) -> Float[Tensor, "lags *batch"]:
    """``<v(t) . v(0)> / dim`` averaged over atoms and time origins, for lags of 0 to ``lags - 1``
    frames.

    It begins at kT/m at equilibrium.
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
    """The time until a walker is absorbed, or that of the last frame if it is not by then, counted from the first::

        T = sum_n (t_{n+1} - t_n) exp(-sum_{j<=n} rate_j (t_{j+1} - t_j))

    Its mean over paths is the mean first-passage time once the run is much longer; before, it is
    the mean of the shorter of the two. Frames have to be so close that nobody slips through between
    them: save every step.

    Args:
        rate: how fast a walker is absorbed where each frame finds it, 1/time. Infinite beyond a
            boundary and zero before it is the sharp question, piecewise constant along a path, so
            that :class:`~adjsim.Pathwise` sees no gradient and :class:`~adjsim.Girsanov` does. A
            smooth rate, such as ``sigmoid(x / width) / lifetime``, is another question, which both
            can answer.
        times: of the frames.
    """
    k, t = as_tensor("rate", rate), as_tensor("times", times)
    dt = (t[1:] - t[:-1]).to(k).reshape(-1, *[1] * (k.ndim - 1))
    return (dt * torch.exp(-(k[:-1] * dt).cumsum(0))).sum(0)
