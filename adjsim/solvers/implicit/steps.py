"""Implicit steps for stiff systems: backward Euler and the midpoint rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adjsim.compiler import LARGEST_SYSTEM
from adjsim.core.arguments import as_positive
from adjsim.core.reading import Reading
from adjsim.core.refusal import Refusal
from adjsim.core.rounding import power_of_two
from adjsim.core.rows import of_each_row
from adjsim.core.second_derivative import refuse_second_derivative
from adjsim.core.state import (
    AnyMomentumState,
    AnyState,
    PhaseState,
    State,
    in_transform,
    position_of,
)
from adjsim.core.transforms import are_forward
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.fields.ode import FieldDynamics
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.dynamics.massive import MassiveDynamics
from adjsim.dynamics.mechanics.prescribed import PrescribedStream
from adjsim.dynamics.moves import Move
from adjsim.dynamics.sources import Coefficients, MoveContext, unbroadcast
from adjsim.dynamics.terms import Kick, Stream
from adjsim.solvers.base import LETTER, Stage, SteppingSolver, StepPlan, refuse_no_equation
from adjsim.solvers.clock import check_dt
from adjsim.solvers.implicit.field import ImplicitField
from adjsim.solvers.implicit.newton import (
    StepMatrix,
    UnsolvedStepError,
    largest,
    solve_position,
)

# The letter of the stage that streams and kicks together.
STREAM_AND_KICK = "AB"
# Largest error of the position of a step, relative to the largest coordinate.
TOL = 1e-14


@dataclass(frozen=True)
class ImplicitMove(Move):
    """Stream and kick together, with the force at a position inside of the step.

    With a = theta h, b = (1 - theta) h and inverse masses c::

        x  = q + a c (p + a F(x))         q' = q + h c (p + a F(x))       p' = p + h F(x)
        x  = q' - b c (p' - b F(x))       q  = x - a c (p + a F(x))       p  = p' - h F(x)

    The second line is the inverse. Let f and J be the force at x and its Jacobian, and lambda the
    cotangents of the result. By the implicit function theorem::

        (1 - a^2 c J^T) w = h lambda_p + h a c lambda_q        r = h lambda_q + a J^T w
        lambda_q += J^T w      lambda_p += c r      lambda_c += r . (p + a f)
        lambda_theta += (dF/dtheta)^T w

    so a backward step solves one linear system and takes one product of the force.
    """

    h: float
    theta: float
    tol: float
    reading: Reading[nn.Module]

    @property
    def writes(self) -> tuple[str, ...]:
        return ("position", "momentum")

    def flow(self, state: State, context: MoveContext) -> State:
        assert isinstance(state, AnyMomentumState)
        q, p, c = state.position, state.momentum, context.coefficients["1/m"]
        if are_forward((q, p, c, *self.reading.tensors)):
            raise NotImplementedError(
                "implicit steps of a Hamiltonian have no derivatives forward in time (jvp, jacfwd, "
                "dual tensors): use a Splitting, or torch.autograd.grad."
            )
        trainable = [self.reading.tensors[i] for i in self.reading.wanted]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, p, c, *trainable)):
            q, p = _Step.apply(self, context, q, p, c, *trainable)
        else:
            q, p = self.advance(q, p, c, context)
        return state._replace(position=q, momentum=p)

    def advance(
        self, q: Tensor, p: Tensor, c: Tensor, context: MoveContext
    ) -> tuple[Tensor, Tensor]:
        """Compute the position and the momentum after the move."""
        a = self.theta * self.h
        x = solve_position(context.forces, context.t, a, c, q + a * c * p, q, self.tol)
        f = torch.where(c > 0, context.forces.values((x,), context.t)[0], 0.0)
        # It equals q + h c (p + a f), and the x of a backward step follows from it to rounding.
        return x + (1 / self.theta - 1) * (x - q), p + self.h * f

    def backward(
        self, after: State, context: MoveContext, cotangents: Cotangents, before: State | None
    ) -> State:
        assert isinstance(after, AnyMomentumState)
        h, a, c = self.h, self.theta * self.h, context.coefficients["1/m"].detach()
        x = self._inner_position(after, c, context, before)
        linear = context.forces.linear((x,), context.t)
        f = torch.where(c > 0, linear.values[0], 0.0)
        reversed_ = before is None
        if before is None:
            p = after.momentum - h * f
            before = after._replace(position=x - a * c * (p + a * f), momentum=p)
        assert isinstance(before, AnyMomentumState)
        along_q, along_p = cotangents["position"], cotangents["momentum"]
        b = torch.where(c > 0, h * along_p + h * a * c * along_q, 0.0)
        w = self._adjoint_force(x, b, c, context, reversed_)
        cotangents.add_to_force(linear, 0, w)
        # a J^T w, from the linear system.
        r = h * along_q + torch.where(c > 0, (w - b) / (a * torch.where(c > 0, c, 1.0)), 0.0)
        cotangents["momentum"] = along_p + c * r
        if context.coefficients["1/m"].requires_grad:
            grad = unbroadcast(r * (before.momentum + a * f), c)
            cotangents.add_coefficient(context.letter, "1/m", grad)
        return before

    def _inner_position(
        self, after: AnyMomentumState, c: Tensor, context: MoveContext, before: AnyState | None
    ) -> Tensor:
        """Return the position at which the step took the force."""
        if self.theta == 1:
            return after.position
        if before is not None:
            return position_of(before) + self.theta * (after.position - position_of(before))
        b = (1 - self.theta) * self.h
        z = after.position - b * c * after.momentum
        return solve_position(context.forces, context.t, b, c, z, after.position, self.tol)

    def _adjoint_force(
        self, x: Tensor, b: Tensor, c: Tensor, context: MoveContext, reversed_: bool
    ) -> Tensor:
        """Solve ``(1 - a^2 c J^T) w = b``."""
        matrix = StepMatrix(context.forces, x, context.t, self.theta * self.h, c)

        def solved(given: Mapping[str, Tensor]) -> list[Tensor]:
            return [self._solved(matrix, given["b"], c, context, reversed_)]

        return of_each_row(solved, {"b": b})[0]

    def _solved(
        self, matrix: StepMatrix, b: Tensor, c: Tensor, context: MoveContext, reversed_: bool
    ) -> Tensor:
        x = matrix.x
        scaled = torch.where(c > 0, b / torch.where(c > 0, matrix.root, 1.0), 0.0)
        # Squares of exploded cotangents overflow, those of vanished ones are zero. A power of two
        # changes no digit. The solution of a system whose cotangent is not finite is NaN.
        size = largest(scaled)
        unit = torch.where(torch.isfinite(size), power_of_two(size), torch.nan)
        scaled = torch.where(torch.isfinite(size), scaled / unit, 0.0)
        w, indefinite = matrix.solve(scaled, 8 * torch.finfo(x.dtype).eps, transposed=True)
        if bool(indefinite.any()):
            # The forward step would have been refused at the same position.
            remedy = "Use a smaller dt."
            if reversed_:
                remedy = (
                    "Reversing the steps has probably lost the trajectory: pass checkpoint_every= "
                    "to ReversibleAdjoint, or use CheckpointAdjoint()."
                )
            raise UnsolvedStepError(
                f"the implicit step at t = {float(context.t):g} has no derivative: the energy has "
                f"a negative curvature that is too large for the time of the step. {remedy}"
            )
        left = matrix.residual(w, scaled)
        if not left <= torch.finfo(x.dtype).eps ** 0.5:
            raise UnsolvedStepError(
                f"the linear system of the derivative of the implicit step at t = "
                f"{float(context.t):g} was not solved: a residual of {left:.1e} is left. Use a "
                "smaller dt."
            )
        return matrix.root * (w * unit)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, move: ImplicitMove, context: MoveContext, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, p, c, *trainable = tensors
        found = move.advance(q, p, c, context)
        # The evaluator keeps a force, which may have a graph that ends in this step.
        ctx.move, ctx.report = move, context.forces.report
        ctx.t, ctx.letter = context.t, context.letter
        ctx.save_for_backward(q, p, c, *found, *trainable)
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(
            "the gradient of an implicit step comes from a linear system", "Use a splitting."
        )
        q, p, c, after_q, after_p, *_ = ctx.saved_tensors
        reading: Reading[nn.Module] = ctx.move.reading
        leaves = reading.leaves()
        trainable, potential = reading.trainable(leaves), reading.bound(leaves)
        forces = ForceEvaluator(potential, parameters=trainable, report=ctx.report)
        coefficients = {"1/m": c.detach().requires_grad_(c.requires_grad)}
        context = MoveContext(ctx.t, ctx.letter, coefficients, None, forces)
        sums = Cotangents(dict(zip(PhaseState._fields, cotangents, strict=True)), trainable)
        after = PhaseState(after_q.detach(), after_p.detach())
        ctx.move.backward(after, context, sums, PhaseState(q.detach(), p.detach()))
        sums.complete()
        return (
            None,
            None,
            sums["position"],
            sums["momentum"],
            sums.coefficient_sums.get((ctx.letter, "1/m")),
            *(sums.parameter_sums.get(name) for name in trainable),
        )


class ImplicitSolver(SteppingSolver):
    """The base class of implicit solvers. Subclasses set ``theta`` and ``order``.

    The terms of the dynamics other than A and B act for half a step before the implicit step, and
    in reversed order for half a step after it.
    """

    theta: ClassVar[float]
    order: ClassVar[int]

    def __init__(self, dt: float, *, tol: float = TOL) -> None:
        self.dt, self.tol = check_dt(dt), as_positive("tol", tol)

    def supports_compiling(
        self, dynamics: Dynamics[Any], state: AnyState | None = None, *, undone: bool = False
    ) -> Refusal | None:
        if not isinstance(dynamics, FieldDynamics):
            return Refusal("its linear systems are solved by products, in loops of any length")
        size = 0 if state is None else sum(x.shape[-1] for x in state)
        if size > LARGEST_SYSTEM:
            return Refusal(f"its linear systems have {size} unknowns, more than {LARGEST_SYSTEM}")
        if undone and self.theta < 1:
            return Refusal("undoing a step takes an iteration, until it converges")
        return None

    def plain_plan(self, dynamics: Dynamics[State], state: State, t: float) -> StepPlan:
        if in_transform():
            raise RuntimeError(
                f"{type(self).__name__} does not go through torch.func transforms (grad, vmap, "
                "jvp): use a splitting there. For many replicas, give the state a leading batch "
                "axis instead of vmap."
            )
        if isinstance(dynamics, FieldDynamics):
            refuse_no_equation(self, dynamics)
            widths = tuple(x.shape[-1] for x in state)
            step = ImplicitField(dynamics, type(state), widths, self.dt, self.theta, self.tol)
            return StepPlan((Stage(LETTER, (step,), self.theta),), self.dt, self.order)
        assert dynamics.potential is not None
        letters, draws = self._others(dynamics), 0
        stages = list[Stage]()
        for elapsed, part in ((0.0, letters), (1.0, letters[::-1])):
            for letter in part:
                term = dynamics.terms[letter]
                half = tuple(term.moves(0.5 * self.dt, state))
                stages.append(Stage(letter, half, elapsed, draws, term.draws))
                draws += term.draws
        moves: tuple[Move, ...] = (
            ImplicitMove(self.dt, self.theta, self.tol, Reading(dynamics.potential)),
        )
        stream: Any = dynamics.terms["A"]
        if isinstance(stream, PrescribedStream):
            # Prescribed vertices move to their positions of the force, and on to those of the end.
            left = (1 - self.theta) * self.dt
            after = (stream.shear(0.0, left),) if left else ()
            moves = (stream.shear(-self.theta * self.dt, 0.0), *moves, *after)
        stages.insert(len(letters), Stage(STREAM_AND_KICK, moves, self.theta))
        return StepPlan(tuple(stages), self.dt, self.order, draws)

    def coefficients(self, dynamics: Dynamics[State], state: State) -> dict[str, Coefficients]:
        if isinstance(dynamics, FieldDynamics):
            return super().coefficients(dynamics, state)
        assert isinstance(dynamics, MassiveDynamics)
        found: dict[str, Coefficients] = {
            letter: dynamics.terms[letter].coefficients(0.5 * self.dt, state)
            for letter in self._others(dynamics)
        }
        return {**found, STREAM_AND_KICK: {"1/m": 1 / dynamics.masses(position_of(state))}}

    def _others(self, dynamics: Dynamics[State]) -> list[str]:
        """List the terms other than stream and kick."""
        known = dynamics.terms
        if not isinstance(dynamics, MassiveDynamics) or (
            type(known.get("A")) not in (Stream, PrescribedStream)
            or type(known.get("B")) is not Kick
        ):
            raise TypeError(
                f"{type(self).__name__} solves stream and kick (A and B: dq/dt = p/m, dp/dt = "
                f"F(q)) together, and {type(dynamics).__name__} has no such terms; use a splitting."
            )
        return [letter for letter in known if letter not in ("A", "B")]

    def __repr__(self) -> str:
        tol = "" if self.tol == TOL else f", tol={self.tol:g}"
        return f"{type(self).__name__}(dt={self.dt:g}{tol})"


class BackwardEuler(ImplicitSolver):
    """The backward Euler step, which damps what it does not resolve::

        q' = q + h p'/m          p' = p + h F(q')

    It is first order and stable for any step, and a mode of frequency omega shrinks by
    1/sqrt(1 + (h omega)^2) a step. Use it for stiff bodies that come to rest, with steps far above
    the bound 2/omega of explicit steps. It does not conserve the energy; :class:`ImplicitMidpoint`
    does. See Hairer and Wanner, Solving Ordinary Differential Equations II (1996).

    A step solves for q' by Newton's method with conjugate gradients on products of the Hessian (for
    a :class:`~adjsim.ForceField`, GMRES on products of its Jacobian). Its gradient is exact, by the
    implicit function theorem. Undoing a step multiplies errors by sqrt(1 + (h omega)^2), so for
    stiff systems use CheckpointAdjoint, or ReversibleAdjoint with checkpoint_every.

    The other terms of the dynamics (friction, damping, a thermostat) act for half a step before
    and after. Atoms of infinite mass stay. Prescribed vertices move to the end of the step on their
    path first, so the force is that of q'.

    An :class:`~adjsim.ODE` of any field is taken too, ``y' = y + h f(t + h, y')``, stiff ones above
    all. Newton's method then has the dense Jacobian of each system, by n products of f, so n should
    not be much above a hundred, and systems of a batch must not depend on each other. ``tol`` is
    relative to the largest entry of y, so scale entries that are much smaller. A step is refused
    where an eigenvalue of the Jacobian is real and above 1/h: its solution does not continue those
    of shorter steps. With ``compile=True``, up to n = 64, these steps are ten to several hundred
    times as fast.

    Args:
        dt: the step h, time.
        tol: largest error of the position of a step, relative to the largest coordinate. It is
            raised to four times machine epsilon.

    Raises:
        RuntimeError: a step did not converge, or its solution is not unique (a negative curvature
            exceeds m/h^2); the message gives the step and the time.
        TypeError: dynamics without stream and kick; ``compile=True`` for dynamics that have them,
            or for an ODE of more than 64 numbers a system.
    """

    theta = 1.0
    order = 1


class ImplicitMidpoint(ImplicitSolver):
    """The implicit midpoint rule, symmetric, symplectic and stable for any step::

        q' = q + h (p + p')/2m          p' = p + h F((q + q')/2)

    It is second order, and conserves quadratic invariants exactly, the energy of a harmonic system
    among them. Fast modes are neither damped nor resolved: at h omega >> 1 they change sign in each
    step. Where they should vanish use :class:`BackwardEuler`. See Hairer, Lubich and Wanner,
    Geometric Numerical Integration (2006).

    A step is solved as that of :class:`BackwardEuler`, for the midpoint, with the same treatment of
    other terms and fixed atoms. Its inverse is the step with -h, so
    :class:`~adjsim.ReversibleAdjoint` applies. A force field that depends on time is evaluated in
    the middle of the step, with prescribed vertices at their positions of that time.

    An :class:`~adjsim.ODE` of any field is taken too, ``y' = y + h f(t + h/2, (y + y')/2)``. A step
    is refused where an eigenvalue of the Jacobian is real and above 2/h. These steps go with
    ``compile=True`` up to n = 64, except for ReversibleAdjoint.

    Args:
        dt, tol: as for :class:`BackwardEuler`.

    Raises:
        RuntimeError: as :class:`BackwardEuler`, with a curvature of 4 m/h^2.
        TypeError: as :class:`BackwardEuler`.
    """

    theta = 0.5
    order = 2
