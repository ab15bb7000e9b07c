"""Fits of parameters to a measured curve, such as a radial distribution function."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adjsim._inputs import as_number, as_tensor, as_whole
from adjsim._noise import as_generator, seed_from
from adjsim._params import refuse_untrainable
from adjsim._progress import progress_bar
from adjsim._state import State
from adjsim._typing import Array, Seed
from adjsim.compare import short_name
from adjsim.estimators.base import (
    Estimator,
    Observable,
    Simulation,
    chunk_slices,
    mean_and_stderr,
)
from adjsim.estimators.estimate import GradientEstimate

# With a smaller eigenvalue of the scaled M, changes of the parameters cancel in the curve.
DEGENERATE = 1e-6
# A fit has converged when each step is below this share of the error of its parameter.
SMALL_STEP = 0.1


@dataclass(frozen=True)
class Iteration:
    """The parameters of one evaluation, its curve and loss, and the step that it proposes."""

    values: dict[str, Tensor]
    simulated: Tensor
    loss: float
    step: dict[str, Tensor]


@dataclass(frozen=True)
class Fit:
    """The result of :func:`fit`.

    Attributes:
        values: the fitted parameters by name, those of the last evaluation.
        errors: their standard errors.
        covariance: of all entries of all parameters, ``(p, p)``, in the order of ``values``.
        simulated, simulated_stderr: the curve at the fitted parameters, ``(n,)``, and its standard
            error.
        target: the measured curve, ``(n,)``.
        loss: the weighted sum of squared differences.
        converged: whether the last step was small beside the errors.
        history: one entry an evaluation.
        seconds: the time that the fit took.
        warnings: reasons not to trust the fit, from the estimator and of the fit itself.
    """

    values: dict[str, Tensor]
    errors: dict[str, Tensor]
    covariance: Tensor
    simulated: Tensor
    simulated_stderr: Tensor
    target: Tensor
    loss: float
    converged: bool
    history: list[Iteration]
    seconds: float
    warnings: list[str]


def fit(
    simulation: Simulation[State],
    observable: Observable[State],
    target: Array,
    make: Callable[[], Estimator],
    *,
    replicas: int,
    chunks: int = 8,
    iterations: int = 10,
    largest_change: float = 0.1,
    stderr: Array | None = None,
    generator: Seed = None,
    progress: bool = False,
) -> Fit:
    """Fit the parameters of the dynamics to a measured curve, by Gauss-Newton steps.

    The loss is ``L = sum_r w(r) (target(r) - g(r))^2``, where g is the mean of the observable, w is
    1/stderr^2, and 1 without ``stderr``. A chunk c of the replicas gives an estimate g_c of the
    curve, and J_c of its derivative with respect to the parameters. With the means g and J of K
    chunks, the diagonal matrix W of w, and C(x, y) = sum_c (x_c - x)^T W (y_c - y) / (K (K - 1))::

        M    = J^T W J - C(J, J)
        step = M^-1 (J^T W (target - g) + C(J, g))
        z_c  = M^-1 ((J_c - J)^T W (target - g) - J^T W (g_c - g))
        cov  = sum_c z_c z_c^T / (K (K - 1)) + s^2 M^-1

    This is the method of Gauss and Newton. C removes the bias of products of two averages with the
    same noise. The first term of the covariance of the fitted numbers has the noise of the averages
    ``J^+ cov(g) J^+T``, and that of the derivatives. The second term is the error of the target: s
    is 1 with ``stderr``. Without, s^2 is the mean square of the residual ``target - g``, over the
    number of points less that of the parameters, less the variance of g. This takes the errors of
    the points as independent, and those of the model as errors of the target. So look at the
    residual: where it is not noise, the model does not describe the target, and the numbers have
    an error that is not shown. Second derivatives of g are left out.

    The fit ends when each step is below a tenth of the error of its parameter. The parameters of
    the dynamics keep the fitted values.

    Args:
        simulation: the simulation; every parameter of its dynamics that requires grad is fitted.
        observable: its mean is ``(n,)``, for example a ``TimeAverage`` of
            :func:`adjsim.smooth_radial_distribution`.
        target: ``(n,)``, the measured curve.
        make: makes an estimator, one for each chunk. Reweighting keeps samples between iterations.
        replicas: number of independent runs, at least two.
        chunks: number of groups of replicas.
        iterations: the largest number of evaluations.
        largest_change: the largest relative change of a parameter in one step; longer steps are
            shortened. Far from the data the linear model is wrong, and a run may not survive the
            parameters that it proposes. Infinity: no limit, for parameters that may be zero.
        stderr: ``(n,)``, standard errors of the target.
        generator: seeds starts and noise. All iterations have the same.
        progress: show a progress bar, on a terminal.

    Raises:
        ValueError: shapes that do not agree, numbers that are not finite, fewer than two replicas,
            more parameters than numbers in the target, a target that does not determine the
            parameters.
    """
    data = _Data.of(target, stderr)
    refuse_untrainable(simulation.dynamics)
    parameters = simulation.dynamics.trainable()
    count = sum(p.numel() for p in parameters.values())
    if count > len(data.target):
        raise ValueError(
            f"{count} parameters cannot be fitted to {len(data.target)} numbers; give more data."
        )
    if as_whole("iterations", iterations) < 1:
        raise ValueError(f"iterations must be at least 1; got {iterations}.")
    if not as_number("largest_change", largest_change) > 0:
        raise ValueError(f"largest_change must be positive; got {largest_change}.")
    if as_whole("replicas", replicas) < 2:
        raise ValueError(f"replicas must be at least 2, for an error; got {replicas}.")
    sizes = [part.stop - part.start for part in chunk_slices(replicas, chunks)]
    if len(sizes) < 2:
        raise ValueError(f"chunks must be at least 2, for an error; got {chunks}.")
    source = as_generator(generator)
    runs = [_Runs(make(), size, seed_from(source)) for size in sizes]
    runs[0].estimator.check(simulation, observable)
    history, begun = list[Iteration](), time.perf_counter()
    with progress_bar(progress) as bar:
        task = bar.add_task("fitting", total=iterations * len(runs), doing="")
        while True:
            now = {name: p.detach().clone() for name, p in parameters.items()}
            bar.update(task, doing=_described(now))
            found = _evaluate(simulation, observable, runs, data, lambda: bar.advance(task))
            step = _unpack(found.step, now)
            history.append(Iteration(now, found.value, found.loss, step))
            converged = bool((found.step.abs() <= SMALL_STEP * found.errors).all())
            if converged or len(history) == iterations:
                break
            scale = _scale(step, now, largest_change)
            with torch.no_grad():
                for name, p in parameters.items():
                    p += scale * step[name].to(p)
    warnings = list(dict.fromkeys(found.warnings))
    if not converged:
        worst = float((found.step.abs() / found.errors).max())
        warnings.append(
            f"the last step is {worst:.2g} standard errors, so the fit has not converged; give "
            "more iterations"
        )
    return Fit(
        now,
        _unpack(found.errors, now),
        found.covariance,
        found.value,
        found.stderr,
        data.target,
        found.loss,
        converged,
        history,
        time.perf_counter() - begun,
        warnings,
    )


@dataclass(frozen=True)
class _Data:
    """The target, its weights, and whether the weights are those of its errors."""

    target: Tensor
    weight: Tensor
    known: bool

    @classmethod
    def of(cls, target: Array, stderr: Array | None) -> _Data:
        y = as_tensor("target", target).detach().double().cpu()
        if y.ndim != 1 or len(y) == 0:
            raise ValueError(f"target must be (n,); got shape {tuple(y.shape)}.")
        if not bool(torch.isfinite(y).all()):
            raise ValueError("target has NaN or infinite entries.")
        if stderr is None:
            return cls(y, torch.ones_like(y), False)
        error = as_tensor("stderr", stderr).detach().double().cpu()
        if error.shape != y.shape or not bool(((error > 0) & torch.isfinite(error)).all()):
            raise ValueError(
                f"stderr must be {len(y)} positive numbers, one for each of the target; got shape "
                f"{tuple(error.shape)}, from {float(error.min()):g}."
            )
        return cls(y, 1 / error**2, True)


@dataclass(frozen=True)
class _Runs:
    """A chunk of the replicas, with an estimator that may keep its samples."""

    estimator: Estimator
    replicas: int
    seed: int


@dataclass(frozen=True)
class _Evaluation:
    """The curve at the present parameters, and the step that it proposes."""

    value: Tensor
    stderr: Tensor
    loss: float
    step: Tensor
    covariance: Tensor
    warnings: list[str]

    @property
    def errors(self) -> Tensor:
        return self.covariance.diagonal().sqrt()


def _evaluate(
    simulation: Simulation[State],
    observable: Observable[State],
    runs: list[_Runs],
    data: _Data,
    advance: Callable[[], None],
) -> _Evaluation:
    found: list[GradientEstimate] = []
    for run in runs:
        made = run.estimator(
            simulation, observable, replicas=run.replicas, chunks=1, generator=run.seed
        )
        if made.value.shape != data.target.shape:
            raise ValueError(
                f"the mean of the observable has shape {tuple(made.value.shape)} and the target "
                f"{tuple(data.target.shape)}; they must agree."
            )
        found.append(made)
        advance()
    sizes = [run.replicas for run in runs]
    share = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    g = torch.stack([made.value.double().cpu() for made in found])
    J = torch.stack(
        [
            torch.cat(
                [grad.double().cpu().reshape(len(g[0]), -1) for grad in made.grad.values()], 1
            )
            for made in found
        ]
    )
    value, stderr = mean_and_stderr(list(g), sizes)
    residual = data.target - value
    step, covariance, doubts = _gauss_newton(g, J, share, data)
    # One warning for all chunks: those of a single chunk are about its few samples.
    info = found[0].diagnostics | {
        "ess": sum(made.diagnostics["ess"] for made in found),
        "replicas": sum(sizes),
        "equilibration": None,
    }
    warnings = replace(found[0], diagnostics=info).warnings
    loss = float((data.weight * residual**2).sum())
    return _Evaluation(value, stderr, loss, step, covariance, warnings + doubts)


def _gauss_newton(
    g: Tensor, J: Tensor, share: Tensor, data: _Data
) -> tuple[Tensor, Tensor, list[str]]:
    """Compute the step and the covariance of the parameters from the chunks, and warnings."""
    mean, slope = torch.einsum("k,kn->n", share, g), torch.einsum("k,knp->np", share, J)
    residual, count = data.target - mean, len(share)
    # Deviations of the chunks, scaled so that sums of their products are covariances of the means.
    scale = (count / (count - 1)) ** 0.5 * share
    dg, dJ = scale[:, None] * (g - mean), scale[:, None, None] * (J - slope)
    biased = slope.T @ (data.weight[:, None] * slope)
    M = biased - torch.einsum("knp,n,knq->pq", dJ, data.weight, dJ)
    inverse, warnings = _inverse(M), list[str]()
    if inverse is None:
        inverse = _inverse(biased)
        warnings.append(
            "the derivatives of the curve are mostly noise; give longer runs or more replicas"
        )
    if inverse is None:
        raise ValueError(
            "the target does not determine the parameters: some change of them leaves the curve "
            "as it is. Fit fewer parameters, or give more data."
        )
    gradient = slope.T @ (data.weight * residual)
    step = inverse @ (gradient + torch.einsum("knp,n,kn->p", dJ, data.weight, dg))
    noise = torch.einsum("knp,n->kp", dJ, data.weight * residual) - dg @ (
        data.weight[:, None] * slope
    )
    z = noise @ inverse
    scatter = 1.0
    if not data.known:
        excess = float((residual**2).sum() - (dg**2).sum())
        scatter = max(0.0, excess) / max(1, len(residual) - len(step))
    return step, z.T @ z + scatter * inverse, warnings


def _inverse(M: Tensor) -> Tensor | None:
    """Return the inverse of a matrix that is positive definite, and otherwise None.

    It is scaled to ones on the diagonal first, since parameters have different units.
    """
    if not bool((M.diagonal() > 0).all()):
        return None
    scale = M.diagonal().sqrt()
    units = scale * scale[:, None]
    eigenvalues, vectors = torch.linalg.eigh(M / units)
    if float(eigenvalues[0]) < DEGENERATE:
        return None
    return (vectors / eigenvalues) @ vectors.T / units


def _described(values: dict[str, Tensor]) -> str:
    return ", ".join(
        f"{short_name(name, list(values))} {' '.join(f'{x:.4g}' for x in value.flatten().tolist())}"
        for name, value in values.items()
    )


def _unpack(entries: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Divide the entries of all parameters into parameters."""
    parts = entries.split([x.numel() for x in like.values()])
    return {
        name: part.reshape(x.shape) for (name, x), part in zip(like.items(), parts, strict=True)
    }


def _scale(step: dict[str, Tensor], values: dict[str, Tensor], limit: float) -> float:
    """Return the factor, at most one, with which no parameter changes by more than a share."""
    if math.isinf(limit):
        return 1.0
    ratios = [
        (limit * values[name].abs() / change.abs())[change != 0] for name, change in step.items()
    ]
    return min(1.0, *(float(ratio) for ratio in torch.cat(ratios)))
