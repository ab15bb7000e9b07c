"""The score of the path: the derivative of its log-likelihood, for parameters of the drift."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from adjsim.adjoints.sweep.passes import EagerDriver
from adjsim.adjoints.sweep.recorder import Recorder, Recording
from adjsim.adjoints.sweep.stepper import Stepper, prepare
from adjsim.core.reading import Reading
from adjsim.core.run_report import RunReport
from adjsim.core.state import AnyState, State, momentum_of
from adjsim.core.trajectory import Final, TimeAverage, Trajectory, check_times
from adjsim.dynamics.buffer import Spill
from adjsim.dynamics.fields.sde import SDE
from adjsim.estimators.base import Chunk, ChunkedEstimator, jacobian, joined_stats, weighted_mean
from adjsim.estimators.path_score import PathScore, path_score_of
from adjsim.estimators.probes import depends_on, evenly_spaced
from adjsim.estimators.replicas import Observable, Replicas, Simulation
from adjsim.estimators.score_function import outer, outer_mean
from adjsim.potentials.pairs.base import pair_paths
from adjsim.solvers.run import Run

# The effective sample size is that of weights for a parameter changed by this share of itself.
RELATIVE_SHIFT = 0.1
# Numbers of states at which an observable is tested for a dependence on momenta: starts, before any
# work, and states of a time average, during the run.
PROBED, PROBED_STEPS = 8, 8


class Girsanov(ChunkedEstimator):
    """The gradient from the likelihood of the path, for parameters of the drift::

        d<O>/dtheta = <dO/dtheta> + <(O - b) S>,     S = d log P(path)/dtheta

    It answers the path question. The observable is only evaluated, so it may be discontinuous, and
    no tangents are propagated, so chaos does no harm. The variance of S grows in proportion to the
    time. P is the density of the path that the scheme samples, held fixed while theta changes. With
    F' = dF/dtheta at the visited positions and xi the noise:

    =============================== ================================================================
    EulerMaruyama                   ``S = sum_k (dt/friction)/s  xi_k . F'_k``,
                                    s = sqrt(2 kT dt/friction)
    EulerMaruyama on an SDE         ``S = sum_k sqrt(dt) xi_k . drift'_k / diffusion_k``
    Splitting("OBABO")              ``S = sum_k h/(2 sigma) (xi_k . F'_k + c xi'_k . F'_{k+1})``
    Splitting("BAOAB"), positions   ``S = sum_k h (1 + c)/sigma  w_k a_k . F'_k``,
                                    w_0 = 1/2, else 1
    =============================== ================================================================

    with h = dt, and c and sigma of the Ornstein-Uhlenbeck flow (``p' = c p + sigma xi``). Under
    OBABO, xi_k and xi'_k are the first and the second draw of a step. Under BAOAB, the momenta
    follow from the positions, ``a_k = xi_k - xi_{k+1} + xi_{k+2} - ...``, and the observable must
    not depend on momenta, which have no path density. The control variate b is the mean of the
    observable over the other chunks. It reduces the variance and adds no bias.

    ``diagnostics["ess"]`` is the effective number of paths if a parameter changed by a tenth of
    itself and the paths were reweighted. It falls exponentially with the time.
    ``diagnostics["contributing"]`` is the number of replicas that make up the variance,
    ``(sum y^2)^2 / sum y^4`` of the contributions ``y = (O - b) S``. It is a third of the replicas
    for Gaussian y, at most the number of replicas in which a rare event happened, and zero where
    the observable was the same in all. The relative uncertainty of an error bar is about one
    over twice the square root of this number.

    Raises:
        ValueError: a parameter that scales the noise (kT, friction, mass) requires grad, whose
            score diverges as dt goes to zero; or the observable depends on momenta under BAOAB.
        TypeError: another dynamics or solver.
    """

    estimand = "path"
    # The score reads every step in Python.
    compilable: ClassVar[bool] = False

    def check(self, simulation: Simulation[State], observable: Observable[State]) -> None:
        dynamics, solver = simulation.dynamics, simulation.solver
        if path_score_of(dynamics, solver) is None:
            raise TypeError(
                "Girsanov has the path density of EulerMaruyama(dt) on OverdampedLangevin, of "
                "EulerMaruyama(dt) on an SDE with diagonal noise, and of "
                "Splitting('BAOAB', dt) and Splitting('OBABO', dt) on Langevin, not of "
                f"{solver!r} on {type(dynamics).__name__}."
            )
        simulation.refuse_captured_force("Girsanov")
        if isinstance(dynamics, SDE):
            _refuse_trained_diffusion(dynamics, simulation)
            return
        scaling = [name for name in dynamics.trainable() if not name.startswith("potential.")]
        if scaling:
            raise ValueError(
                f"Girsanov: {scaling[0]!r} scales the noise, so its path score diverges as dt "
                "goes to zero. Give it as a number, and use Pathwise for its gradient."
            )
        if _positions_only(solver):
            start, times = simulation.probes(PROBED), check_times(simulation.ts)
            frames = type(start)._make(torch.stack([x] * len(times)) for x in start)
            _refuse_momenta(observable, start, (times, frames), slopes=True)

    @torch.no_grad()
    def chunk(self, replicas: Replicas[State]) -> Chunk:
        simulation, average = replicas.simulation, replicas.average
        dynamics, solver, times = simulation.dynamics, simulation.solver, check_times(simulation.ts)
        reading = Reading(dynamics)
        tensors = reading.leaves()
        copy = reading.bound(tensors)
        run = Run(reading, tensors, copy, replicas.start, times, solver, None, replicas.noise)
        report = RunReport()
        if copy.potential is not None:
            report.pairs = pair_paths(copy.potential, replicas.start[0]) or None
        stepper, inputs = prepare(run, report)
        recorder = Recorder(average, stepper.clock)
        recording = Recording(recorder, stepper)
        kind = path_score_of(dynamics, solver)
        assert kind is not None
        score = kind(dynamics, stepper, inputs)
        path = _PathObserver(stepper, recorder, score, replicas)
        driver = EagerDriver(stepper, inputs, stepper.plan.forces(copy.potential, report=report))
        last = stepper.run(
            stepper.to_lattice(inputs.state), inputs, driver, [recording, path], run, report
        )
        score.flush(stepper.clock.last)
        states, record = recording.result()
        stats, final = report.stats(), stepper.from_lattice(last)
        trajectory = cast("Trajectory[State]", Trajectory(times, states, record, final, stats))
        # The observable may depend on momenta at the visited states only.
        if _positions_only(solver) and average is None:
            _refuse_momenta(replicas.observable, final, (times, states))
        with torch.enable_grad():
            seen = replicas.evaluate(trajectory)
            mean = seen.mean(0)
        values = seen.detach()
        own = {name: grad / path.count for name, grad in path.total.items()}
        if average is None:
            own = jacobian(mean, dynamics.trainable())
        # <O S> and S are kept apart, since the control variate comes from the other chunks.
        OS = {name: outer_mean(values, scores) for name, scores in score.total.items()}
        extra = {"O": values, "OS": OS, "S": score.total, "explicit": own}
        return Chunk(values.mean(0), own, joined_stats([stats]), extra)

    def combine(
        self, simulation: Simulation[State], parts: list[Chunk], sizes: list[int]
    ) -> dict[str, Any]:
        for i, part in enumerate(parts):
            others = [*parts[:i], *parts[i + 1 :]]
            b = torch.zeros_like(part.value)
            if others:
                b = weighted_mean([p.value for p in others], [*sizes[:i], *sizes[i + 1 :]])
            for name in part.grad:
                found = part.extra["OS"][name] - outer(b, part.extra["S"][name].mean(0))
                part.grad[name] = part.extra["explicit"][name] + found
        scores = {
            name: torch.cat([part.extra["S"][name] for part in parts]).reshape(sum(sizes), -1)
            for name in parts[0].grad
        }
        ess = float("inf")
        for name, p in simulation.dynamics.trainable().items():
            for size, column in zip(
                p.detach().reshape(-1).abs().tolist(), scores[name].unbind(1), strict=True
            ):
                weight = torch.softmax(RELATIVE_SHIFT * (size or 1.0) * column, 0)
                ess = min(ess, 1.0 / float((weight**2).sum()))
        return {"ess": ess, "contributing": _contributing(parts, scores)}


def _contributing(parts: list[Chunk], scores: dict[str, Tensor]) -> float:
    """Compute the smallest number of replicas that make up the variance of an entry."""
    seen = torch.cat([part.extra["O"] for part in parts])
    seen = seen.reshape(len(seen), -1)
    squares, least = (seen - seen.mean(0)).square(), float(len(seen))
    # An entry that is constant (where others vary) has no event to miss, and neither has a
    # parameter whose score is zero.
    squares = squares[:, squares.sum(0) > 0]
    if squares.shape[1] == 0:
        return 0.0
    for S in scores.values():
        if bool((S != 0).any()):
            y2 = squares * S.square().sum(1, keepdim=True)
            share = y2.sum(0).square() / y2.square().sum(0)
            least = min(least, float(share.nan_to_num(nan=0.0).min()))
    return least


def _refuse_trained_diffusion(sde: SDE, simulation: Simulation[Any]) -> None:
    """Refuse an SDE whose diffusion depends on a parameter, and one without noise at a start."""
    with torch.enable_grad():
        found = sde.amplitudes(float(check_times(simulation.ts)[0]), simulation.probes(PROBED))
    unread = [name for name in sde.trainable() if not name.startswith("drift_fun.")]
    if unread or any(g.requires_grad for g in found):
        raise ValueError(
            "Girsanov: the diffusion has a parameter that requires grad and scales the noise, so "
            "its path score diverges as dt goes to zero. Freeze it with requires_grad_(False), and "
            "use Pathwise for its gradient."
        )
    if any(bool((g == 0).any()) for g in found):
        raise ValueError(
            "Girsanov: the diffusion is zero for an entry of y at the start, which has no path "
            "density. Use Pathwise."
        )


class _PathObserver:
    """An observer that feeds the score with steps, and tests and differentiates a time average."""

    def __init__(
        self, stepper: Stepper, recorder: Recorder, score: PathScore, replicas: Replicas[Any]
    ) -> None:
        self.stepper, self.score, self.counted = stepper, score, recorder.counted
        self.average = replicas.average
        self.parameters, self.count = replicas.simulation.dynamics.trainable(), 0
        self.total: dict[str, Tensor] = {}
        self.before: AnyState | None = None
        probed = evenly_spaced(recorder.counted.start, stepper.clock.last, PROBED_STEPS)
        self.probed = probed if _positions_only(replicas.simulation.solver) else set[int]()

    def stops(self, stepper: Stepper) -> Iterable[int]:
        return range(1, stepper.clock.last + 1)

    def visit(self, step: int, state: AnyState, spills: Sequence[Spill]) -> None:
        after = self.stepper.from_lattice(state)
        if step > 0:
            assert self.before is not None
            self.score(step - 1, self.before, after)
            if self.average is not None:
                if step in self.counted:
                    self._differentiate(self.average.function, after)
                if step in self.probed:
                    _refuse_momenta(self.average, after, None)
        self.before = after

    def _differentiate(self, function: Callable[[Any], Tensor], state: AnyState) -> None:
        self.count += 1
        with torch.enable_grad():
            mean = function(state).mean(0)
        if self.count > 1 and not mean.requires_grad:
            return
        for name, grad in jacobian(mean, self.parameters).items():
            self.total[name] = self.total[name] + grad if name in self.total else grad


def _positions_only(solver: Any) -> bool:
    """Return whether only the positions of a scheme have a path density."""
    return getattr(solver, "scheme", None) == "BAOAB"


def _refuse_momenta(
    observable: Observable[Any],
    final: AnyState,
    run: tuple[Tensor, AnyState | None] | None,
    *,
    slopes: bool = False,
) -> None:
    """Refuse an observable whose value, or with ``slopes`` whose graph, depends on momenta.

    ``run`` are times and frames, None: the observable is a function of the state.

    Values are compared as in :mod:`adjsim.estimators.probes`. In addition, differentiation finds a
    dependence that does not change the value at the tested states.
    """

    def seen(state: AnyState) -> Tensor:
        if isinstance(observable, TimeAverage | Final):
            return observable.function(state)
        assert run is not None
        times, frames = run
        assert frames is not None
        p, moved = momentum_of(frames), momentum_of(state)
        # Different displacements of the frames change differences between frames too.
        shares = torch.linspace(0.5, 1.0, len(p), dtype=torch.float64).to(moved).square()
        moved = p + shares.reshape(-1, 1, 1, 1) * (moved - momentum_of(final))
        return observable(Trajectory(times, frames._replace(momentum=moved), None, state, {}))

    found = depends_on(seen, final, "momentum")
    if slopes and not found:
        with torch.enable_grad():
            moving = final._replace(momentum=momentum_of(final).detach().requires_grad_())
            total, p = seen(moving).sum(), momentum_of(moving)
        slope = torch.autograd.grad(total, p, allow_unused=True) if total.requires_grad else ()
        found = any(x is not None for x in slope)
    if found:
        raise ValueError(
            "Girsanov: under BAOAB only positions have a path density, and the observable "
            "depends on momenta; use Splitting('OBABO', dt)."
        )
