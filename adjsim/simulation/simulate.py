"""The function :func:`simulate`, which checks its arguments and runs the adjoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjsim.adjoints.base import Adjoint
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.adjoints.durable.run_end import check_continues
from adjsim.adjoints.loops.contraction import reversed_growth_in_loops
from adjsim.adjoints.reversible import ReversibleAdjoint
from adjsim.core.agreement import perturbed
from adjsim.core.arguments import (
    as_flag,
    as_number,
    describe_type,
    leave_to_python,
    outside_inference_mode,
    refuse_uncalled,
)
from adjsim.core.brownian_path import BrownianPath
from adjsim.core.durable.manifest import (
    Saving,
    describe_module,
    describe_object,
    tensor_fingerprint,
    versions,
)
from adjsim.core.durable.store import Store
from adjsim.core.noise import Noise, as_generator, seed_of_run
from adjsim.core.run_report import RunReport
from adjsim.core.state import State, as_state, detached, in_transform, position_of
from adjsim.core.trajectory import (
    Record,
    RunEnd,
    TimeAverage,
    Trajectory,
    check_record,
    check_times,
)
from adjsim.core.transforms import are_forward, in_forward_mode
from adjsim.core.typing import Seed, Times
from adjsim.dynamics.base import Dynamics, named_rates
from adjsim.potentials.base import force
from adjsim.potentials.pairs.base import pair_paths
from adjsim.simulation.backwards import mirrored
from adjsim.simulation.between_steps import Extension, between_steps, interpolated
from adjsim.simulation.start_checks import check_rates
from adjsim.simulation.transforms import FORWARD, run_outside
from adjsim.solvers.base import SteppingSolver
from adjsim.solvers.continuous.base import ContinuousSolver
from adjsim.solvers.run import Run

Solver = SteppingSolver | ContinuousSolver


def simulate(
    dynamics: Dynamics[State],
    state: State | None,
    ts: Times,
    *,
    solver: Solver,
    adjoint: Adjoint = DirectAdjoint(),
    record: Record[State] = None,
    generator: Seed | BrownianPath = None,
    compile: bool = False,
    progress: bool = False,
    store: str | Path | None = None,
    every: float | int = 60.0,
    continues: Trajectory[State] | None = None,
) -> Trajectory[State]:
    """Run the dynamics from a state and return its trajectory, connected to autograd.

    The adjoint propagates gradients from the trajectory to the start and to every parameter of the
    dynamics that requires grad. If neither the start nor a parameter requires grad, the trajectory
    has no graph, and its repr contains "no gradient": make the number of interest an
    ``nn.Parameter``. The path does not depend on the save times, on the record or on the adjoint.
    Under ``torch.inference_mode`` a run equals a run under ``torch.no_grad``.

    Args:
        dynamics: the physics.
        state: the start, from ``dynamics.init``. The run has its dtype and device. Fields may be
            arrays or lists.
        ts: save times, a list, array, range or tensor. ``ts[0]`` is the time of the start, and the
            start is the first frame. They may decrease for an :class:`~adjsim.ODE`, and for an
            :class:`~adjsim.SDE` on a :class:`~adjsim.BrownianPath`. With a
            fixed-step solver each save time must be an integer number of steps after ``ts[0]``, to
            a thousandth of a step; between the steps of an ODE the state is that of Hermite's cubic
            interpolation. There is no gradient with respect to times (:func:`~adjsim.solve_ivp` has
            one).
        solver: how the equations are integrated.
        adjoint: how the gradient is taken.
        record: a function of the state, whose values are saved instead of the states, or a
            :class:`TimeAverage`. It may depend on the parameters of the dynamics.
        generator: seeds the noise of stochastic dynamics, as a generator or an integer; None:
            torch's default generator. A :class:`~adjsim.BrownianPath` gives noise that belongs to
            times instead of steps. Other noise is a function of the seed, the step and the replica
            alone. Starts have a stream of their own, so their seed may be used again. (In
            ``torch.func.vmap`` every sample gets the same noise; give the state a batch axis
            instead.)
        compile: run forward and backward in compiled loops of steps of a fixed size, with any
            adjoint that the solver goes with, except for implicit steps of a Hamiltonian or a body.
            The gradient then has no graph of its own. It needs a C++ compiler. The first run of a
            kind compiles for a few seconds, on a GPU for up to a minute
            (``trajectory.stats["compile_seconds"]``), and the result is kept across processes.
            Operations without a C++ translation (``stats["compiled_forward"]`` names them) are
            evaluated by torch inside the loop. A different number of steps, seed, parameter value
            or save time does not compile again, and neither does a dynamics made anew in the same
            way.
            Anything else that a potential or a record reads (numbers, arrays, functions, tensors
            that are not registered, globals, a class made anew) is baked in, and a change of it
            compiles again. A change that no inspection finds, such as that of a
            patched function, is found by a comparison with one step without compilation: at the
            first call of each dynamics, then so rarely that it takes at most a fortieth of the time
            of the loops, and at every call with an object that cannot be inspected. Gradients
            agree with uncompiled ones to rounding, and exact runs to the last bit, unless the force
            has functions such as exp, or powers above the third.
        progress: show a progress bar, on a terminal.
        store: a folder in which the run saves itself, forward and backward. Called again with the
            same arguments, also by another process, it goes on from its last save, and ends with
            the same bits as without an interruption, if the number of threads is the same. Ctrl-C
            and SIGTERM then end the process after the current step, with a save. The run needs
            steps of a solver and a gradient without a graph: :class:`ReversibleAdjoint`,
            :class:`CheckpointAdjoint`, or none. Give ``generator`` a seed. Remove the folder when
            the gradient has been taken.
        every: seconds between two saves.
        continues: a trajectory from whose end the run goes on, by the same steps, on the same noise
            and lattice; ``state`` is then None, and ``ts[0]`` the trajectory's last time. Two
            halves have the frames of one whole run to the last bit. Gradients flow through both
            halves, and differ from those of a whole run in the order of sums alone.

    Raises:
        ValueError: times off the grid, wrong shapes, NaN or infinite input, a start without a
            finite energy (such as two atoms at one place), a scheme that misses a term, a step
            that is too long for the stiffness of a body (the message has the bound), a body that
            penetrates a surface during the run (it names the step), a tensor that requires grad
            and is not registered, a module that draws random numbers or writes to its buffers (it
            names the module).
        TypeError: a solver and an adjoint that do not go together; a class or a function in place
            of an object; a record that cannot be called.
        FloatingPointError: the run reached NaN or infinity; the message names the step.
        OverflowError: an exact run left its lattice; the message names the step.
        StoreError: the store is of another computation, in use, damaged or not writable.
    """
    check_dynamics(dynamics)
    as_flag("compile", compile)
    as_flag("progress", progress)
    path = generator if isinstance(generator, BrownianPath) else None
    seed = None if isinstance(generator, BrownianPath) else as_generator(generator)
    end, noise = None, path if dynamics.stochastic else None
    if continues is not None:
        times = check_times(ts, either=True)
        # A run backwards in time counts the time -t.
        times = -times if times[1] < times[0] else times
        end = check_continues(
            continues.end, state, times, solver, generator, dynamics.reference_box
        )
        state = continues.final
        if dynamics.stochastic and end.seed is not None:
            noise = Noise(end.seed, end.first, end.step)
    elif dynamics.stochastic and path is None:
        noise = Noise(seed_of_run(seed))
    if state is None:
        raise TypeError("state must be a start, such as dynamics.init(position); got None.")
    kept = None if store is None else (Store(store), as_number("every", every))
    if kept is not None and not kept[1] > 0:
        raise ValueError(f"every must be a positive number of seconds; got {every}.")
    options = progress, compile, kept, end
    return run(dynamics, state, ts, solver, adjoint, record, noise, *options)


leave_to_python(simulate)


@outside_inference_mode()
def run(
    dynamics: Dynamics[State],
    state: State,
    ts: Times,
    solver: Solver,
    adjoint: Adjoint,
    record: Record[State],
    noise: Noise | BrownianPath | None,
    progress: bool = False,
    compile: bool = False,
    store: tuple[Store, float] | None = None,
    continues: RunEnd | None = None,
) -> Trajectory[State]:
    """Run :func:`simulate` on given noise, such as the part of one chunk of a larger batch."""
    _check_pair(solver, adjoint)
    check_record(record)
    times, state = check_times(ts, either=True), as_state(state)
    if in_transform() and (compile or not adjoint.keeps_graph):
        settings = noise, progress, compile, store, continues
        # Made inside of a transform, a tensor is one of it.
        saves = [float(t) for t in times]
        return run_outside(
            lambda copy, start, saved: run(copy, start, saves, solver, adjoint, saved, *settings),
            dynamics,
            state,
            record,
        )
    if in_forward_mode() and (compile or not adjoint.keeps_graph):
        function = record.function if isinstance(record, TimeAverage) else record
        # Rates have the tangents of tensors that are not registered.
        rates = rates_at_start(dynamics, state, float(times[0]), function, 0.0).values()
        if are_forward(chain(state, dynamics.parameters(), dynamics.buffers(), rates)):
            raise FORWARD()
    if times[1] < times[0]:
        back, path = mirrored(dynamics, noise, solver, times)
        settings = record, path, progress, compile, store, continues
        found = run(back, state, -times, solver, adjoint, *settings)
        found.times = times
        if found._extension is not None:
            found._extension = replace(found._extension, sign=-1.0)
        if "step_times" in found.stats:
            found.stats["step_times"] = -found.stats["step_times"]
        return found
    between = between_steps(dynamics, times, solver)
    if between is not None:
        settings = solver, adjoint, None, noise, progress, compile, store, continues
        found = run(dynamics, state, between.grid, *settings)
        return interpolated(found, times, between, record)
    path = noise if isinstance(noise, BrownianPath) else None
    seeded = None if isinstance(noise, BrownianPath) else noise
    this, report = assemble(dynamics, state, times, solver, record, seeded, progress, compile, path)
    this = replace(this, continues=continues, clip=adjoint.clip)
    if path is not None:
        drawn = this.solver.on_path(path, this.dynamics, state, float(times[0]))
        this, report.seed = replace(this, noise=drawn), path.seed
    if store is not None:
        function = record.function if isinstance(record, TimeAverage) else record
        measure = partial(rates_at_start, this.dynamics, state, float(times[0]), function)
        this = replace(this, saving=Saving(*store, run_manifest(this, adjoint), measure))
        report.resumed_at = None
    if compile:
        _check_compiled(this, adjoint)
    adjoint.check(this)
    if not in_transform():
        check_start(this)
    try:
        states, saved, final, end = adjoint.run(this, report)
    except FloatingPointError:
        # The error of rates that are not finite at the start is clearer.
        with torch.no_grad():
            this.dynamics.check_rates(float(times[0]), detached(state))
        raise
    stats = report.stats()
    extension = None if states is None else Extension.of(this, states, stats.get("step_times"))
    return Trajectory(times, states, saved, final, stats, end, extension)


def assemble(
    dynamics: Dynamics[State],
    state: State,
    times: Tensor,
    solver: Solver,
    record: Record[State],
    noise: Noise | None,
    progress: bool = False,
    compile: bool = False,
    path: BrownianPath | None = None,
) -> tuple[Run[State], RunReport]:
    """Check the parts of a run against each other, and return the run and its report."""
    reading, tensors, dynamics, key = check_rates(dynamics, state, float(times[0]), record, compile)
    if isinstance(solver, SteppingSolver):
        refusal = solver.supports_compiling(dynamics, state) if compile else None
        if refusal is not None:
            raise TypeError(
                f"compile=True is not for {solver!r} of {type(dynamics).__name__}: "
                f"{refusal.reason}. Leave compile=True out."
            )
        measure = partial(reversed_growth_in_loops, reading, tensors, key) if compile else None
        solver = solver.resolved(dynamics, state, times, path, measure)
    report = RunReport()
    if noise is not None:
        report.seed = noise.seed
    if dynamics.potential is not None:
        point = (x.detach() for x in dynamics.force_point(state))
        report.pairs = pair_paths(dynamics.potential, *point, compiled=compile) or None
    settings = solver, record, noise, progress, compile
    return Run(reading, tensors, dynamics, state, times, *settings, key=key), report


def check_start(run: Run[State]) -> None:
    """Refuse a step that is too long for the start."""
    if isinstance(run.solver, SteppingSolver):
        with torch.no_grad():
            run.solver.check(run.plan, run.dynamics, detached(run.state), float(run.times[0]))


def check_dynamics(dynamics: Any) -> None:
    """Refuse anything that is not a dynamics."""
    refuse_uncalled("dynamics", dynamics)
    if not isinstance(dynamics, Dynamics):
        raise TypeError(
            f"dynamics must be one such as Hamiltonian(potential); got {describe_type(dynamics)}."
        )


def _check_pair(solver: Any, adjoint: Any) -> None:
    refuse_uncalled("solver", solver)
    refuse_uncalled("adjoint", adjoint)
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver must be a solver such as VelocityVerlet(dt) or ODESolver(); got {solver!r}."
        )
    if not isinstance(adjoint, Adjoint):
        raise TypeError(f"adjoint must be an adjoint such as ReversibleAdjoint(); got {adjoint!r}.")
    if not isinstance(solver, adjoint.accepts):
        fitting = sorted(
            kind.__name__ for kind in Adjoint.__subclasses__() if isinstance(solver, kind.accepts)
        )
        raise TypeError(
            f"{type(adjoint).__name__} does not go with {type(solver).__name__}; these do: "
            f"{', '.join(fitting)}."
        )


def _check_compiled(run: Run[State], adjoint: Adjoint) -> None:
    if not isinstance(run.solver, SteppingSolver):
        raise TypeError(
            "compile=True is for solvers of fixed steps, such as Splitting; not for "
            f"{run.solver!r}."
        )
    if run.needs_gradient and isinstance(adjoint, ReversibleAdjoint):
        kind, solver = type(run.dynamics).__name__, run.solver
        refusal = solver.supports_compiling(run.dynamics, run.state, undone=True)
        refusals = [
            (f"the steps of {solver!r}", refusal),
            *((f"term {x.letter!r} of {kind}", y.no_compiled_inverse) for x, y in run.plan.moves),
        ]
        for what, refusal in refusals:
            if refusal is not None:
                raise TypeError(
                    f"compile=True cannot undo {what}: {refusal.reason}. Leave compile=True out, "
                    "use CheckpointAdjoint(), or run under torch.no_grad()."
                )


def run_manifest(run: Run[State], adjoint: Adjoint) -> dict[str, str]:
    """Describe a run by everything that its numbers depend on."""
    if not isinstance(run.solver, SteppingSolver):
        raise TypeError(
            f"store= is for solvers that take steps, such as Splitting; not for {run.solver!r}."
        )
    if isinstance(adjoint, DirectAdjoint) and run.needs_gradient and not run.compile:
        raise TypeError(
            "store=: the graph of DirectAdjoint() cannot be saved. Use ReversibleAdjoint() or "
            "CheckpointAdjoint(), or run under torch.no_grad()."
        )
    record, noise, end, times = run.record, run.noise, run.continues, run.times
    fields = run.state._asdict()
    average = isinstance(record, TimeAverage)
    return {
        "the computation": "a run",
        **versions(),
        **describe_module(run.dynamics, record.function if average else record),
        **{f"{name} of the start": tensor_fingerprint(x) for name, x in fields.items()},
        "ts": f"{times.tolist()}" if len(times) < 5 else tensor_fingerprint(times),
        "the solver": describe_object(run.solver, "the solver"),
        "the adjoint": describe_object(adjoint, "the adjoint"),
        "the record": f"a time average {record.steps}" if average else f"{type(record)}",
        "the seed": "none" if noise is None else noise.describe(),
        "the step that it continues": "none" if end is None else f"{end.step}",
        "compile": f"{run.compile}",
        "whether a gradient is wanted": f"{run.needs_gradient}",
    }


@torch.no_grad()
def rates_at_start(
    dynamics: Dynamics[State],
    state: State,
    t: float,
    function: Callable[[State], Tensor] | None,
    change: float,
) -> dict[str, Tensor]:
    """Evaluate the force or the rates at a start, and a function of it, such as a record.

    Each number of the start is changed by a part of itself.
    """
    start = detached(state)
    if change:
        start = type(state)._make(perturbed(x, change) for x in start)
    if dynamics.potential is None:
        found = named_rates("drift", dynamics.drift(t, start))
        if dynamics.stochastic:
            found |= named_rates("diffusion", dynamics.diffusion(t, start))
    else:
        found = {"the force": force(dynamics.potential, position_of(start), t)}
    return found if function is None else {**found, "the record": function(start)}
