"""Kinetic observables."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from adjsim.core.arguments import as_tensor, as_whole
from adjsim.core.typing import Array
from adjsim.observables.averages import lagged_products

Frames = Float[Tensor, "time *batch atoms dim"]


def mean_squared_displacement(
    position: Frames | Array, lags: int | None = None
) -> Float[Tensor, "lags *batch"]:
    """Compute the mean squared displacement, averaged over atoms, length^2.

    Without ``lags`` it is ``<|q(t) - q(0)|^2>`` at every frame. With a number of lags it is the
    mean over all time origins s, ``<|q(s + t) - q(s)|^2>``, at lags of 0 to ``lags - 1`` frames,
    for which frames must be evenly spaced and the system at equilibrium. Its slope gives the
    diffusion coefficient (:func:`adjsim.diffusion_coefficient`). The positions must not be wrapped
    into a box.
    """
    q = as_frames("position", position)
    if lags is None:
        return ((q - q[0]) ** 2).sum(-1).mean(-1)
    lags, frames = _lags(lags, q), len(q)
    # The mean position of each atom is subtracted, so that squares keep their digits.
    x = (q - q.detach().mean(0)).double()
    squares = x.square().sum(-1).mean(-1)
    before = torch.cat([torch.zeros_like(squares[:1]), squares.cumsum(0)])
    k = torch.arange(lags, device=q.device)
    # The squares are summed over frames 0 to frames - k - 1, and over frames k to frames - 1.
    sums = before[frames - k] + before[frames] - before[k]
    origins = (frames - k).to(x).reshape(-1, *[1] * (squares.ndim - 1))
    return (sums / origins - 2 * lagged_products(x, lags).sum(-1).mean(-1)).to(q)


def velocity_autocorrelation(velocity: Frames | Array, lags: int) -> Float[Tensor, "lags *batch"]:
    """Compute the velocity autocorrelation, averaged over atoms and time origins.

    It is ``<v(t) . v(0)> / dim``. The lags are 0 to ``lags - 1`` frames. At equilibrium it begins
    at kT/m.
    """
    v = as_frames("velocity", velocity)
    return lagged_products(v, _lags(lags, v)).mean((-1, -2))


def as_frames(name: str, value: Frames | Array) -> Tensor:
    """Convert positions or velocities in time, ``(time, *batch, atoms, dim)``, to a tensor."""
    frames = as_tensor(name, value)
    if frames.ndim < 3 or frames.numel() == 0:
        raise ValueError(
            f"{name} must be (time, *batch, atoms, dim); got shape {tuple(frames.shape)}. One "
            "particle in one dimension is (time, 1, 1)."
        )
    return frames


def _lags(lags: int, frames: Tensor) -> int:
    number = as_whole("lags", lags)
    if not 1 <= number <= len(frames):
        raise ValueError(
            f"lags must be between 1 and the number of frames, {len(frames)}; got {number}."
        )
    return number


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
