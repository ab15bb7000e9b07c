"""Motion in time: displacements, correlations, first passages and transport coefficients."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from adjsim.core.arguments import as_number, as_positive, as_tensor, as_whole, wrong_shape
from adjsim.core.typing import Array, Energies, Number
from adjsim.observables.averages import lagged_products
from adjsim.observables.thermodynamics import checked_temperature

# The rounding error of a lag that is a number of frames, in frames.
ROUNDING = 1e-6

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
            infinite rate beyond it and zero before it, of which :class:`~adjsim.Pathwise` sees no
            gradient and :class:`~adjsim.Girsanov` does. A smooth rate, such as
            ``sigmoid(x / width) / lifetime``, is a different observable, for which both work.
        times: the times of the frames.
    """
    k, t = as_tensor("rate", rate), as_tensor("times", times)
    dt = (t[1:] - t[:-1]).to(k).reshape(-1, *[1] * (k.ndim - 1))
    return (dt * torch.exp(-(k[:-1] * dt).cumsum(0))).sum(0)


def diffusion_coefficient(
    position: Float[Tensor, "time *batch atoms dim"] | Array,
    times: Float[Tensor, " time"] | Array,
    *,
    start: float | int,
    stop: float | int,
) -> Energies:
    """Compute the self-diffusion coefficient, length^2/time, ``(*batch,)``::

        D = slope of <|q(s + t) - q(s)|^2> / (2 dim),  start <= t <= stop

    The mean squared displacement is over atoms and over all time origins s. The slope is that of
    the least-squares line through the lags t in the window.

    - ``start`` must be longer than the time in which velocities forget their direction. For
      Langevin dynamics with friction g, the slope at ``t >= 1/g`` is 1 - exp(-g t) of its limit.
    - The mean at lag t has ``atoms * (length of the run) / t`` independent samples, so a window
      beyond a tenth of the run adds noise.
    - In a periodic box of side L, D is smaller than in an infinite system by
      ``2.837 kT / (6 pi viscosity L)`` (Yeh and Hummer, J. Phys. Chem. B 108, 15873 (2004)).

    The lags of a run are correlated, so residuals of the line say nothing about the error. Take it
    from independent replicas, by :func:`adjsim.mean_with_error`.

    The positions are not wrapped into a box, and the times, ``(time,)``, are evenly spaced.

    Raises:
        ValueError: another shape, uneven times, a window of fewer than two lags of the run.
    """
    q = as_frames("position", position)
    length, spacing = _even_times(times, len(q))
    start, stop = as_number("start", start), as_number("stop", stop)
    if not 0 <= start < stop <= length * (1 + 1e-9):
        raise ValueError(
            f"start and stop must be lags with 0 <= start < stop <= {length:g}, the length of the "
            f"run; got {start:g} and {stop:g}."
        )
    first, last = math.ceil(start / spacing - ROUNDING), math.floor(stop / spacing + ROUNDING)
    if last <= first:
        raise ValueError(
            f"the window from {start:g} to {stop:g} needs at least two lags, and the frames are "
            f"{spacing:g} apart: use a longer window or save more often."
        )
    lag = torch.arange(first, last + 1, device=q.device, dtype=torch.float64) * spacing
    weight = (lag - lag.mean()) / (lag - lag.mean()).square().sum()
    moved = mean_squared_displacement(q.double(), last + 1)[first:]
    return ((moved * weight.reshape(-1, *[1] * (moved.ndim - 1))).sum(0) / (2 * q.shape[-1])).to(q)


def viscosity(
    stress: Float[Tensor, "time *batch dim dim"] | Array,
    times: Float[Tensor, " time"] | Array,
    volume: float | int,
    kT: Number,
    *,
    stop: float | int,
) -> Float[Tensor, "lags *batch"]:
    """Compute the shear viscosity by Green and Kubo's integral, as a function of its upper limit::

        eta(t) = V / ((dim - 1) (dim + 2) kT) * int_0^t sum over a, b of <P_ab(0) P_ab(s)> ds

    P is the traceless symmetric part of the stress. In an isotropic fluid the sum over all a and b
    is ``(dim - 1) (dim + 2)`` times the autocorrelation of one off-diagonal component, so every
    independent component contributes (Daivis and Evans, J. Chem. Phys. 100, 541 (1994)). The mean
    is over all time origins, the integral is the trapezoidal rule. The result, ``(lags, *batch)``,
    energy time / volume, is for limits 0, spacing, 2 spacing, ... up to ``stop``.

    - Read the viscosity where eta(t) reaches a plateau. Beyond it noise grows with ``sqrt(t)``: for
      Gaussian stress, the relative error of one component is ``2 sqrt(t / length of the run)``
      (Jones and Mandadapu, J. Chem. Phys. 136, 154102 (2012)), divided by the root of their number,
      ``(dim - 1) (dim + 2) / 2``. Take it from independent replicas, by
      :func:`adjsim.mean_with_error`.
    - A limit before the plateau, and frames farther apart than the fastest decay of the stress, are
      biases that this error does not contain.
    - The dynamics must conserve momentum. Friction (Langevin) damps the flow that is measured.

    Args:
        stress: ``(time, *batch, dim, dim)``, energy/volume, such as :func:`adjsim.stress` of a
            trajectory. The sign does not matter.
        times: ``(time,)``, evenly spaced.
        volume, kT: as for :func:`adjsim.dielectric_constant`.
        stop: the largest upper limit of the integral, time, at most the length of the run.

    Raises:
        ValueError: another shape, uneven times, a number that is not positive, a limit shorter than
            the spacing or longer than the run.
    """
    p, size = as_tensor("stress", stress), as_positive("volume", volume)
    if p.ndim < 3 or p.shape[-1] != p.shape[-2] or p.shape[-1] not in (2, 3):
        raise wrong_shape("stress", "(time, *batch, dim, dim) with dim 2 or 3", p)
    temperature = checked_temperature(kT, p, p.shape[1:-2])
    (length, spacing), stop = _even_times(times, len(p)), as_number("stop", stop)
    if not spacing * (1 - 1e-9) <= stop <= length * (1 + 1e-9):
        raise ValueError(
            f"stop must be between {spacing:g}, the spacing of the frames, and {length:g}, the "
            f"length of the run; got {stop:g}."
        )
    dim = p.shape[-1]
    trace = p.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    shear = (p + p.transpose(-1, -2)) / 2 - trace * torch.eye(dim, dtype=p.dtype).to(p) / dim
    products = lagged_products(shear, math.floor(stop / spacing + ROUNDING) + 1).sum((-1, -2))
    steps = torch.cumulative_trapezoid(products, dx=spacing, dim=0)
    integral = torch.cat([torch.zeros_like(products[:1]), steps])
    return size / ((dim - 1) * (dim + 2) * temperature) * integral


def _even_times(times: Array, frames: int) -> tuple[float, float]:
    """Check that times belong to the frames and are evenly spaced; return length and spacing."""
    t = as_tensor("times", times).detach().double().cpu()
    if t.ndim != 1 or len(t) != frames or frames < 2:
        raise wrong_shape("times", f"({frames},), one for each of at least two frames", t)
    length = float(t[-1] - t[0])
    spacing = length / (frames - 1)
    even = t[0] + spacing * torch.arange(frames, dtype=torch.float64)
    if not spacing > 0 or not bool(((t - even).abs() <= 1e-3 * spacing).all()):
        raise ValueError(
            "times must increase in even steps, since the mean is over time origins; got steps of "
            f"{float(t.diff().min()):g} to {float(t.diff().max()):g}. Save at evenly spaced times."
        )
    return length, spacing
