"""Lyapunov exponents and covariant vectors of any dynamics along its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.sweep.stepper import prepare
from adjsim.core.arguments import (
    as_flag,
    as_number,
    as_whole,
    outside_inference_mode,
    refuse_uncalled,
)
from adjsim.core.noise import Noise, as_generator, seed_from
from adjsim.core.state import as_state, stack
from adjsim.core.trajectory import check_times, step_numbers
from adjsim.core.typing import Seed, Times
from adjsim.dynamics.base import Dynamics
from adjsim.estimators.chaos.tangents import (
    TangentDriver,
    TangentRecorder,
    covariant_vectors,
    start_basis,
)
from adjsim.observables.averages import mean_with_error
from adjsim.simulation.simulate import assemble, check_dynamics, check_start
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.implicit.steps import ImplicitSolver

# Exponents printed before the rest is left out.
PRINTED = 24


@dataclass(frozen=True, eq=False)
class LyapunovSpectrum:
    """Lyapunov exponents of every system of a batch, and covariant vectors along the run.

    Attributes:
        exponents: ``(*batch, count)``, 1/time, from the largest on, up to their errors.
        rates: the mean growth rates in each interval, ``(intervals, *batch, count)``.
        times: the save times from the burn-in on, ``(intervals + 1,)``.
        size: N, the number of numbers in the state of one system.
        vectors: covariant vectors at ``vector_times``, columns of unit length,
            ``(times, *batch, N, count)``, or None. The N entries are the fields in the order of
            ``state._fields``, each flattened.
        vector_times: the save times at least a burn-in away from both ends; None without vectors.
        states: the states at ``vector_times``, time leading; None without vectors.
    """

    exponents: Tensor
    rates: Tensor
    times: Tensor
    size: int
    vectors: Tensor | None = None
    vector_times: Tensor | None = None
    states: Any = None

    @cached_property
    def stderr(self) -> Tensor:
        """The standard error of every exponent, ``(*batch, count)``.

        It comes from the intervals, corrected for autocorrelation. It is NaN with fewer than two,
        and means little below some ten autocorrelation times. The exponent of a direction that
        neither grows nor shrinks is better than it says.
        """
        lengths = self.times.diff().to(self.rates)
        if len(lengths) < 2:
            return torch.full_like(self.exponents, float("nan"))
        weights = (lengths / lengths.mean()).reshape(-1, *[1] * self.exponents.ndim)
        series = (weights * (self.rates - self.exponents)).flatten(1)
        found = [mean_with_error(column).stderr for column in series.unbind(1)]
        return self.exponents.new_tensor(found).reshape(self.exponents.shape)

    @property
    def mean(self) -> tuple[Tensor, Tensor]:
        """The exponents averaged over the batch and their standard errors, ``(count,)`` each.

        The errors come from the spread of the systems; with one system they are :attr:`stderr`.
        """
        every = self.exponents.flatten(0, -2) if self.exponents.ndim > 1 else self.exponents[None]
        if len(every) == 1:
            return every[0], self.stderr.flatten()
        return every.mean(0), every.std(0, correction=1) / len(every) ** 0.5

    @property
    def dimension(self) -> Tensor:
        """The Kaplan-Yorke dimension of the attractor, ``(*batch,)``::

            D = j + (lambda_1 + ... + lambda_j) / |lambda_{j+1}|

        j is the largest number of exponents whose sum is not negative. NaN if it needs more
        exponents.
        """
        count, falling = self.exponents.shape[-1], self.exponents.sort(-1, descending=True).values
        sums = falling.cumsum(-1)
        j = (sums >= 0).sum(-1, keepdim=True)
        below = falling.gather(-1, j.clamp(max=count - 1)).abs()
        sum_j = torch.where(j > 0, sums.gather(-1, (j - 1).clamp(min=0)), 0.0)
        all_of_them = float(self.size) if count == self.size else float("nan")
        return torch.where(j < count, j + sum_j / below, all_of_them).squeeze(-1)

    @property
    def entropy(self) -> Tensor:
        """The sum of the positive exponents, 1/time, ``(*batch,)``. NaN if it needs more of them.

        It is the Kolmogorov-Sinai entropy by Pesin's formula, and else an upper bound (Ruelle).
        """
        positive = self.exponents > 0
        unknown = positive.all(-1) & (self.exponents.shape[-1] < self.size)
        return torch.where(unknown, float("nan"), (self.exponents * positive).sum(-1))

    def __str__(self) -> str:
        means, errors = self.mean
        count, systems = len(means), self.exponents[..., 0].numel()
        lines = [
            f"{count} of {self.size} Lyapunov exponents, t = {self.times[0]:g} to "
            f"{self.times[-1]:g}, {systems} system{'s' * (systems > 1)}"
        ]
        numbered = enumerate(zip(means.tolist(), errors.tolist(), strict=True), 1)
        lines += [
            f"  {i:3d} {value: .6g}" + (f" +- {error:.2g}" if error == error else "")
            for i, (value, error) in islice(numbered, PRINTED)
        ]
        if count > PRINTED:
            lines.append(f"  ... {count} {means[-1]: .6g}")
        whole = replace(self, exponents=means)
        for name, number in (
            ("Kaplan-Yorke dimension", float(whole.dimension)),
            ("sum of positive exponents", float(whole.entropy)),
        ):
            text = f" {number:.6g}" if number == number else ": needs more exponents"
            lines.append(f"  {name}{text}")
        return "\n".join(lines)


@outside_inference_mode()
@torch.no_grad()
def lyapunov_spectrum(
    dynamics: Dynamics[Any],
    state: Any,
    ts: Times,
    *,
    solver: SteppingSolver,
    count: int | None = None,
    burn_in: float | int = 0.0,
    vectors: bool = False,
    generator: Seed = None,
    progress: bool = False,
) -> LyapunovSpectrum:
    """Compute Lyapunov exponents, and covariant vectors, along a run of steps::

        DPhi_n Q_n = Q_{n+1} R_{n+1}        lambda_i = sum_n log |R_n,ii| / T

    DPhi is the Jacobian of a step, with the noise of the step fixed, so the exponents are those of
    the discrete map, in continuous time those of the flow up to O(dt^order). Q has orthonormal
    columns, random at the start and the same in all runs, and is orthonormalised after every step
    (Benettin et al. 1980). Gradients of a path grow as exp(lambda_1 t). Exponents do not depend on
    the units of the fields; a rate in a finite time does.

    Langevin dynamics has the exponents of its random map. Variables that act on no others, such as
    the positions of a Nose-Hoover chain, add exponents of zero. Every conserved quantity of a
    Hamiltonian adds two, which fall as log(T)/T. A step that destroys a direction has an exponent
    of about log(rounding)/dt, or -inf: :class:`~adjsim.VelocityRescale` destroys that of the
    kinetic energy, and :class:`~adjsim.ESH` the length of its direction.

    A step costs two to three gradients of a step of ``count`` replicas, and more than ten for pair
    potentials, whose operator in C++ has no second derivative. Vectors take the memory of ``count``
    states and of count^2 numbers a save time; without them memory does not grow with the number of
    steps. Use it as a diagnostic of small systems, before asking for the gradient of a path.

    Args:
        dynamics: the physics.
        state: the start, from ``dynamics.init``; a batch is as many independent runs.
        ts: save times, as for :func:`adjsim.simulate`. Growth between them is averaged, and their
            spread gives standard errors, so give many, such as ``linspace(0, 200, 401)``.
        solver: a solver of explicit steps, such as ``RungeKutta("rk4", dt)`` or ``BAOAB(dt)``.
        count: number of exponents, from the largest on. None: all.
        burn_in: time at the start that is left out; vectors leave out as much at the end, in which
            the backward recursion forgets its start.
        vectors: compute covariant Lyapunov vectors, too (Ginelli et al. 2007). The Jacobian of the
            run maps each of them to a multiple of itself at a later time.
        generator: seeds the noise of stochastic dynamics, as for :func:`adjsim.simulate`.
        progress: show a progress bar, on a terminal.

    Raises:
        ValueError: a count out of range, a burn-in that leaves no interval, times off the grid;
            dynamics that are not for a further batch axis; with vectors, save times so far apart
            that a vector overflows.
        TypeError: a solver without fixed steps, or of exact, implicit or coupled steps.
        FloatingPointError: the run reached NaN or infinity; the message names the step.

    Sources: G. Benettin et al., Meccanica 15 (1980) 9; F. Ginelli et al., Phys. Rev. Lett. 99
    (2007) 130601; J. Kaplan and J. Yorke (1979); Ya. Pesin (1977).
    """
    check_dynamics(dynamics)
    _check_solver(solver)
    as_flag("vectors", vectors)
    times, start = check_times(ts), as_state(state)
    noise = Noise(seed_from(as_generator(generator))) if dynamics.stochastic else None
    run, report = assemble(dynamics, start, times, solver, None, noise, progress)
    check_start(run)
    run = run.connected()
    axes = len(run.dynamics.batch_shape(start))
    size = sum(x.shape[axes:].numel() for x in start)
    number = size if count is None else as_whole("count", count)
    if not 1 <= number <= size:
        raise ValueError(
            f"count must be from 1 to {size}, the numbers in {', '.join(start._fields)} of one "
            f"system; got {number}."
        )
    first, last = _kept(times, as_number("burn_in", burn_in), vectors)
    stepper, inputs = prepare(run, report)
    if stepper.plan.copies is not None:
        raise TypeError(
            f"{solver!r} steps a second copy of the state, whose exponents are those of the "
            "method; use RungeKutta(method, dt)."
        )
    basis = start_basis(start, axes, number)
    driver = TangentDriver(stepper, inputs, run.dynamics.potential, basis)
    driver.check_copies(start, number)
    recorder = TangentRecorder(driver, step_numbers(times, run.solver.dt)[first:], vectors)
    stepper.run(start, inputs, driver, [recorder], run, report)
    kept, growth = times[first:], torch.stack(recorder.growth)
    lengths = kept.diff().to(growth).reshape(-1, *[1] * (growth.ndim - 1))
    exponents = (growth.double().sum(0) / float(kept[-1] - kept[0])).to(growth)
    spectrum = LyapunovSpectrum(exponents, growth / lengths, kept, size)
    if not vectors:
        return spectrum
    part = slice(0, last - first + 1)
    found = covariant_vectors(recorder.bases, recorder.triangles)[part]
    states = stack(recorder.states[part])
    return replace(spectrum, vectors=torch.stack(found), vector_times=kept[part], states=states)


def _check_solver(solver: Any) -> None:
    refuse_uncalled("solver", solver)
    if not isinstance(solver, SteppingSolver):
        raise TypeError(
            "lyapunov_spectrum is for solvers of fixed steps, such as RungeKutta('rk4', dt) or "
            f"VelocityVerlet(dt); got {solver!r}."
        )
    if solver.exact:
        raise TypeError(
            "lyapunov_spectrum is not for exact=True, whose rounded steps have no derivative; "
            "leave exact out."
        )
    if isinstance(solver, ImplicitSolver):
        raise TypeError(
            "lyapunov_spectrum differentiates each step twice, which implicit steps do not allow; "
            f"use a splitting with a smaller dt than that of {solver!r}."
        )


def _kept(times: Tensor, burn_in: float, vectors: bool) -> tuple[int, int]:
    """Return the first save time after the burn-in, and the last before it at the end."""
    if not burn_in >= 0:
        raise ValueError(f"burn_in must be zero or a positive time; got {burn_in}.")
    duration, ends = float(times[-1] - times[0]), 1 + vectors
    slack = 1e-9 * duration
    first = int((times < times[0] + burn_in - slack).sum())
    last = int((times <= times[-1] - burn_in + slack).sum()) - 1
    if first >= len(times) - 1 or (vectors and first > last):
        raise ValueError(
            f"burn_in = {burn_in:g}{', left out at both ends,' * vectors} leaves no "
            f"{'save time' if vectors else 'interval of save times'} of a run of {duration:g}; "
            f"take it below {duration / ends:g}, or more save times."
        )
    return first, last
