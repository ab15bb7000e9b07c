"""Fits of parameters to a measured curve, such as a radial distribution function."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjsim.core.arguments import as_positive, as_whole
from adjsim.core.durable.ranks import Ranks
from adjsim.core.durable.store import Nested
from adjsim.core.noise import as_generator, seed_from
from adjsim.core.progress import progress_bar
from adjsim.core.state import State
from adjsim.core.typing import Array, Seed
from adjsim.estimators.base import Estimator, chunk_slices, mean_and_stderr
from adjsim.estimators.compare import short_name
from adjsim.estimators.estimate import GradientEstimate
from adjsim.estimators.fit.gauss_newton import Step, Target, chance_of_drift, gauss_newton
from adjsim.estimators.fit.problems import (
    Problem,
    described,
    joined,
    problems_of,
    shared_parameters,
)
from adjsim.estimators.replicas import Observable, Simulation
from adjsim.estimators.sharing import same_generator

# The mean square of the difference between the halves of the runs, in units of its variance. It is
# one at equilibrium, and beyond five once in a few thousand fits of a curve of four independent
# parts.
LARGE_DRIFT = 5.0
# Of as large a difference between the parameters that the halves fit. One sound fit in a hundred is
# taken for one that drifts.
SMALL_CHANCE = 0.01
# A fit has converged when each step is below this share of the error of its parameter.
SMALL_STEP = 0.1


@dataclass(frozen=True)
class Iteration:
    """The parameters of one evaluation, its curve with the standard error, its loss, and the step
    that it proposes.
    """

    values: dict[str, Tensor]
    simulated: Tensor
    simulated_stderr: Tensor
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
        converged: whether the fit ended by itself.
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
    simulation: Simulation[State] | Sequence[Simulation[State]],
    observable: Observable[State] | Sequence[Observable[State]],
    target: Array,
    make: Callable[[], Estimator],
    *,
    replicas: int,
    chunks: int = 8,
    iterations: int = 10,
    largest_change: float = 0.2,
    stderr: Array | None = None,
    generator: Seed = None,
    progress: bool = False,
    store: str | Path | None = None,
    group: Any = None,
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

    C removes the bias of products of two averages with the same noise, and second derivatives of g
    are left out. The first term of the covariance has the noise of the averages and of the
    derivatives. The second term is the error of the target: s is 1 with ``stderr``.
    Without, s^2 is the mean square of the residual ``target - g``, over the number of points less
    that of the parameters, less the variance of g. This takes the errors of the points as
    independent, and those of the model as errors of the target. So look at the residual: where it
    is not noise, the numbers have an error that is not shown.

    The fit ends when each step is below a tenth of the error of its parameter, unless the runs had
    not come to equilibrium, or the derivatives are mostly noise. The parameters of the dynamics
    keep the fitted values.

    Several simulations, as at several temperatures, fit one potential that they share. Their curves
    are one after the other in the target. Give ``stderr`` where their units differ.

    Args:
        simulation: the simulation; every parameter of its dynamics that requires grad is fitted.
            A sequence of them: their dynamics have the same parameters.
        observable: its mean is ``(n,)``, for example a ``TimeAverage`` of
            :func:`adjsim.smooth_radial_distribution`. A sequence: one for each simulation.
        target, stderr: ``(n,)``, the measured curve and its standard errors.
        make: makes an estimator, one for each chunk and simulation. Reweighting keeps samples
            between iterations.
        replicas, chunks: numbers of independent runs and of groups of them, at least two.
        iterations: the largest number of evaluations.
        largest_change: the largest relative change of a parameter in one step; longer steps are
            shortened. Far from the data the linear model is wrong, and a run may not survive the
            parameters that it proposes. Infinity: no limit, for parameters that may be zero.
        generator: seeds starts and noise. All iterations have the same.
        progress: show a progress bar, on a terminal.
        store: a folder that keeps the chunks of each iteration. Called again with the same
            arguments, the fit reads these, and goes on with the same bits.
        group: the process group whose ranks share the chunks. Every rank fits the same parameters.

    Raises:
        ValueError: shapes that do not agree, numbers that are not finite or out of range, a target
            that does not determine the parameters, simulations with different parameters.
    """
    data, problems = Target.of(target, stderr), problems_of(simulation, observable)
    parameters = shared_parameters(problems)
    count = sum(p.numel() for p in parameters.values())
    if count > len(data.values):
        raise ValueError(
            f"{count} parameters cannot be fitted to {len(data.values)} numbers; give more data."
        )
    as_whole("iterations", iterations, least=1)
    as_positive("largest_change", largest_change)
    as_whole("replicas", replicas, least=2)
    sizes = [part.stop - part.start for part in chunk_slices(replicas, chunks)]
    if len(sizes) < 2:
        raise ValueError(f"chunks must be at least 2, for an error; got {chunks}.")
    ranks = Ranks.of(group)
    source = same_generator(ranks, as_generator(generator))
    estimators = [[make() for _ in problems] for _ in sizes]
    seeds = [seed_from(source) for _ in sizes]
    runs = _Runs(problems, estimators, sizes, seeds)
    for estimator, problem in zip(estimators[0], problems, strict=True):
        estimator.check(*problem)
    if ranks.size > 1:
        about = {
            **described(problems, estimators[0][0]),
            **data.describe(),
            "the chunks": f"{sizes}",
            "the seeds": f"{seeds}",
            "iterations": f"{iterations}",
            "largest_change": f"{largest_change}",
        }
        ranks.agree(about)
    history, begun = list[Iteration](), time.perf_counter()
    with progress_bar(progress and ranks.first) as bar:
        task = bar.add_task("fitting", total=iterations * len(sizes), doing="")
        while True:
            now = {name: p.detach().clone() for name, p in parameters.items()}
            bar.update(task, doing=_described(now))
            folder = None if store is None else Path(store) / f"{len(history):03}"
            found = _evaluate(runs, data, ranks, folder, lambda: bar.advance(task))
            step = _unpack(found.step.change, now)
            history.append(Iteration(now, found.value, found.stderr, found.loss, step))
            change, errors = found.step.change.abs(), found.step.errors
            small = bool((change <= SMALL_STEP * errors).all())
            converged = small and not found.doubts
            if converged or len(history) == iterations:
                break
            scale = _scale(step, now, largest_change)
            with torch.no_grad():
                for name, p in parameters.items():
                    p += scale * step[name].to(p)
    warnings = found.warnings + found.doubts
    if not small:
        warnings.append(
            f"the last step is {float((change / errors).max()):.2g} standard errors, so the fit "
            "has not converged; give more iterations"
        )
    return Fit(
        now,
        _unpack(errors, now),
        found.step.covariance,
        found.value,
        found.stderr,
        data.values,
        found.loss,
        converged,
        history,
        time.perf_counter() - begun,
        warnings,
    )


class _Runs(NamedTuple):
    """The simulations with their observables, and the chunks of the replicas.

    Each chunk has an estimator of each simulation, which may keep its samples.
    """

    problems: list[Problem]
    estimators: list[list[Estimator]]
    sizes: list[int]
    seeds: list[int]


class _Evaluation(NamedTuple):
    """The curve, the step that it proposes, and reasons not to trust the curve, or the step."""

    value: Tensor
    stderr: Tensor
    loss: float
    step: Step
    warnings: list[str]
    doubts: list[str]


def _evaluate(
    runs: _Runs, data: Target, ranks: Ranks, folder: Path | None, advance: Callable[[], None]
) -> _Evaluation:
    """Estimate the curve and its derivatives, keep the chunks in a folder, and find the step."""

    count = len(runs.problems)

    def estimated(i: int) -> Nested:
        made = joined(
            [
                estimator(
                    *problem,
                    replicas=runs.sizes[i],
                    chunks=1,
                    generator=runs.seeds[i],
                    store=None if folder is None else folder / f"{i * count + k:05}",
                    group=Ranks(None),
                )
                for k, (estimator, problem) in enumerate(
                    zip(runs.estimators[i], runs.problems, strict=True)
                )
            ]
        )
        if made.value.shape != data.values.shape:
            raise ValueError(
                f"the mean of the observable has shape {tuple(made.value.shape)} and the target "
                f"{tuple(data.values.shape)}; they must agree."
            )
        advance()
        return list(vars(made).values())

    sizes = runs.sizes
    found = [GradientEstimate(*parts) for parts in ranks.share(len(sizes), estimated)]
    share = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    g = torch.stack([made.value.double().cpu() for made in found])
    slopes = [
        [grad.double().cpu().reshape(len(g[0]), -1) for grad in made.grad.values()]
        for made in found
    ]
    J = torch.stack([torch.cat(columns, 1) for columns in slopes])
    value, stderr = mean_and_stderr(list(g), sizes)
    step = gauss_newton(g, J, share, data)
    # One warning for all chunks: those of a single chunk are about its few samples.
    info = found[0].diagnostics | {
        "ess": sum(made.diagnostics["ess"] for made in found),
        "replicas": sum(sizes),
        "equilibration": None,
    }
    warnings, doubts = replace(found[0], diagnostics=info).warnings, list(step.doubts)
    drifts: list[Any] = [made.diagnostics.get("drift") for made in found]
    if all(x is not None for x in drifts):
        doubts += _drifting(torch.stack(drifts).double().cpu(), data.weight, step.response)
    loss = float((data.weight * (data.values - value) ** 2).sum())
    return _Evaluation(value, stderr, loss, step, warnings, doubts)


def _drifting(drift: Tensor, weight: Tensor, response: Tensor) -> list[str]:
    """Warn if the halves of the runs differ, ``(K, n)``, by more than the noise of the chunks."""
    between = float((weight * drift.mean(0) ** 2).sum()) * len(drift)
    within = float((weight * drift.var(0)).sum())
    chance = chance_of_drift(drift, response)
    if between > LARGE_DRIFT * within:
        differ = "give different curves, beyond their noise"
    elif chance < SMALL_CHANCE:
        differ = f"fit different parameters, beyond their errors (by chance: {chance:.1g})"
    else:
        return []
    return [
        f"the two halves of the runs {differ}: the runs had not come to equilibrium; give a longer "
        "burn-in"
    ]


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
