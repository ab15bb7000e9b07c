"""Means of time series, with errors corrected for autocorrelation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adjsim.core.arguments import as_tensor
from adjsim.core.norms import unit_of
from adjsim.core.typing import Array


class Mean(NamedTuple):
    """A mean, its standard error, and its number of independent samples."""

    value: float
    stderr: float
    ess: float


def autocorrelation_time(series: Array, window: float = 5.0) -> float:
    """Compute the integrated autocorrelation time ``1 + 2 sum_k rho(k)`` of a series, in samples.

    The series is ``(time,)``. The sum is cut at the first lag that is at least ``window`` times the
    sum up to it (Sokal 1997), beyond which noise dominates.
    """
    x = as_tensor("series", series).detach().double().flatten()
    x = x / unit_of(x)
    x = x - x.mean()
    x, n = x / unit_of(x), len(x)
    spectrum = torch.fft.rfft(x, n=2 * n)
    rho = torch.fft.irfft(spectrum.abs() ** 2, n=2 * n)[:n]
    if float(rho[0]) <= 0:
        return 1.0
    tau = 2 * torch.cumsum(rho / rho[0], 0) - 1
    stop = torch.nonzero(torch.arange(n, device=x.device) >= window * tau)
    return max(1.0, float(tau[int(stop[0]) if len(stop) else n - 1]))


def lagged_products(series: Tensor, lags: int) -> Tensor:
    """Compute ``<x(s) x(s + k)>`` of every entry, averaged over the origins s, for k < lags.

    From ``(time, ...)`` to ``(lags, ...)``, by Fourier transforms in float64. The rounding errors
    are those of the value at lag zero.
    """
    frames = len(series)
    x = series.double()
    spectrum = torch.fft.rfft(x, n=2 * frames, dim=0)
    sums = torch.fft.irfft(spectrum * spectrum.conj(), n=2 * frames, dim=0)[:lags]
    origins = torch.arange(frames, frames - lags, -1, device=x.device, dtype=x.dtype)
    return (sums / origins.reshape(-1, *[1] * (x.ndim - 1))).to(series)


def mean_with_error(series: Array) -> Mean:
    """Compute the mean and standard error of a correlated series, or of independent ones.

    The series is ``(time,)`` or ``(time, replicas)``. With several replicas the error comes from
    the spread of their means; with one, from the autocorrelation time.
    """
    x = as_tensor("series", series).detach().double()
    if x.ndim > 2:
        raise ValueError(
            f"series must be (time,) or (time, replicas); got shape {tuple(x.shape)}. Independent "
            "replicas with several axes are flattened to one by series.flatten(1)."
        )
    # Squares of large numbers overflow, and those of small ones vanish.
    unit = unit_of(x)
    x, unit = x / unit, float(unit)
    if x.ndim == 2 and x.shape[1] > 1:
        means = x.mean(0)
        stderr = float(means.std(correction=1)) / means.numel() ** 0.5
        ess = float(x.var(correction=1)) / stderr**2 if stderr > 0 else float("inf")
        return Mean(unit * float(means.mean()), unit * stderr, ess)
    x = x.flatten()
    ess = len(x) / autocorrelation_time(x)
    return Mean(unit * float(x.mean()), unit * float(x.std(correction=1)) / ess**0.5, ess)
