"""Steady states of vector fields, by Newton's method and the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjsim.core.arguments import as_positive, as_whole, describe_type
from adjsim.core.reading import read
from adjsim.core.second_derivative import once_differentiable
from adjsim.core.state import in_transform
from adjsim.core.transforms import in_forward_mode
from adjsim.dynamics.fields.ode import ODE
from adjsim.solvers.implicit.field import Linear, jacobian, largest

# Halvings of a Newton step that makes the rates larger.
HALVINGS = 30
# A Newton step leaves half of the distance to a double root, more to a root of higher order, and
# about the square of the distance to a simple one.
SLOW = 0.4
# Times at which a field must have the same rates.
TIMES = (0.0, 1.0, 17.3)
Rates = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SteadyState:
    """A steady state and its stability. A copy, and one from a file, have no gradient.

    Attributes:
        y: the state, ``(*batch, n)`` or a named tuple, as the start was given.
        eigenvalue: the eigenvalue of the Jacobian with the largest real part, ``(*batch,)``,
            complex, without a gradient. Of a pair it is that with a positive imaginary part.
        iterations: the number of Newton steps.
    """

    y: Any
    eigenvalue: Tensor
    iterations: int

    @property
    def stable(self) -> Tensor:
        """Whether small displacements decay, ``(*batch,)``: all eigenvalues have Re < 0."""
        return self.eigenvalue.real < 0

    def __reduce__(self) -> Any:
        y = self.y
        y = y.detach() if isinstance(y, Tensor) else type(y)._make(x.detach() for x in y)
        return SteadyState, (y, self.eigenvalue, self.iterations)


def steady_state(ode: Any, y: Any, *, tol: float = 1e-10, max_iterations: int = 50) -> SteadyState:
    """Find the steady state near a start, as a function of the parameters::

        f(y*; theta) = 0        dy* = -J^-1 (df/dtheta) dtheta        J = df/dy at y*

    by the implicit function theorem, with f the rates of the equation. Newton steps are halved
    where they make the rates of a system larger. They are neither stored nor differentiated: the
    backward pass solves one linear system with J for each system of a batch, and its gradient has
    no graph. Gradients flow to all tensors that f reads, and not to the start. Tangents of dual
    tensors flow from them in the same way.

    A layer of an equilibrium network (DEQ), z = g(z, x), is the field ``g(z, x) - z``.

    The Jacobian is dense: each Newton step takes n backward passes through f and memory for n^2
    numbers a system. Do not use it for more than about a thousand entries, where a limit cycle is
    sought, or where the solution of the initial value problem decides which of several steady
    states is meant: begin at its end.

    Args:
        ode: the equation, whose rates do not depend on the time.
        y: where to start, ``(*batch, n)``, or a state of the equation.
        tol: the last change of y, relative to the largest entry of its system. Newton's method is
            quadratic, so the error is about its square, or rounding.
        max_iterations: the largest number of Newton steps.

    Returns:
        ``y``, ``eigenvalue``, ``stable`` and ``iterations``, see :class:`SteadyState`.

    Raises:
        TypeError: the equation is not an ``ODE``.
        ValueError: the rates depend on the time, or systems of the batch on each other; the call is
            inside of a transform of ``torch.func``.
        RuntimeError: Newton's method did not converge; the Jacobian is singular, since a quantity
            is conserved (the message names the combination) or steady states are not isolated.
    """
    if not isinstance(ode, ODE):
        raise TypeError(f"ode must be an ODE; got {describe_type(ode)}. Wrap a function: ODE(fun).")
    tol, max_iterations = as_positive("tol", tol), as_whole("max_iterations", max_iterations, 1)
    if in_transform():
        raise ValueError(
            "torch.func (vmap, jacrev, jvp, grad) does not take steady_state: use "
            "torch.autograd.grad, with is_grads_batched=True for a Jacobian, and the batch axes of "
            "y in place of vmap."
        )
    equation, start = read(ode), ode.init(y)
    equation.check_rates(0.0, start)
    kind, widths = type(start), [x.shape[-1] for x in start]

    def rates(x: Tensor, t: float = 0.0) -> Tensor:
        return torch.cat(tuple(equation.drift(t, kind._make(x.split(widths, -1)))), -1)

    x = torch.cat(tuple(start), -1).detach()
    _refuse_time(rates, x)
    x, matrix, iterations = _newton(rates, x, tol, max_iterations)
    # A start of zeros may hide that y is multiplied by the time, and the steady state a sum.
    _refuse_time(rates, x)
    _refuse_time(rates, x + 1e-3 * (1 + x.abs()))
    # Parameters may have tangents, which the iterations do not differentiate.
    x, matrix = x.detach(), matrix.detach()
    if torch.is_grad_enabled() or in_forward_mode():
        # Equal to x, with the derivative of the theorem: x and J are constants here.
        moved = once_differentiable(rates(x), "the gradient of a steady state has a linear system")
        x = x - torch.linalg.solve(matrix, moved - moved.detach())
    values = torch.linalg.eigvals(matrix)
    # Of a pair with equal real parts, rounding does not decide.
    order = values.real + torch.finfo(values.real.dtype).eps * values.imag.sign() * values.abs()
    leading = values.gather(-1, order.argmax(-1, keepdim=True)).squeeze(-1)
    state = kind._make(x.split(widths, -1))
    return SteadyState(state if hasattr(y, "_fields") else state[0], leading, iterations)


@torch.no_grad()
def _refuse_time(rates: Callable[[Tensor, float], Tensor], x: Tensor) -> None:
    """Refuse rates that depend on the time at a state, if they are finite there."""
    first, *others = (rates(x, t) for t in TIMES)
    if not all(torch.equal(first, other) for other in others) and bool(first.isfinite().all()):
        raise ValueError(
            "fun depends on the time (or draws random numbers), so it has no steady state: fix the "
            "time, as in ODE(lambda t, y: fun(t0, y)), and call eval() on modules with dropout."
        )


@torch.no_grad()
def _newton(rates: Rates, x: Tensor, tol: float, most: int) -> tuple[Tensor, Tensor, int]:
    """Return the steady state, the Jacobian there and the number of steps."""
    allowed, scale = max(tol, 4 * torch.finfo(x.dtype).eps), largest(x)
    done = torch.zeros_like(scale, dtype=torch.bool)
    # The number of the last steps in a row whose changes are more than SLOW of the ones before.
    slow, last = torch.zeros_like(scale, dtype=torch.int64), torch.full_like(scale, torch.inf)
    count = 0
    while True:
        rate, matrix = _linear(rates, x)
        _refuse_singular(rates, x, matrix)
        if bool(done.all()) or count == most:
            break
        change = -torch.linalg.solve(matrix, rate)
        # A rate is rounding where a small relative change of J and y makes it zero.
        terms = (matrix.abs() * x.abs().unsqueeze(-2)).sum(-1)
        rounded = (rate.abs() <= 8 * torch.finfo(x.dtype).eps * terms).all(-1)
        share, size = torch.ones_like(scale), rate.norm(dim=-1)
        small = largest(change) <= torch.finfo(x.dtype).eps ** 0.5 * torch.maximum(
            scale, largest(x)
        )
        for _ in range(HALVINGS):
            trial = x + share.unsqueeze(-1) * change
            worse = ~(rates(trial).norm(dim=-1) <= size) & ~rounded & ~small
            if not bool(worse.any()):
                break
            share = torch.where(worse, share / 2, share)
        x = x + share.unsqueeze(-1) * change
        scale = torch.maximum(scale, largest(x))
        count += 1
        shrinks, moves = largest(change) <= SLOW * last, last > allowed * scale
        slow = torch.where(moves, torch.where((share < 1) | shrinks, 0, slow + 1), slow)
        last = largest(change)
        done = (share == 1) & ((last <= allowed * scale) | rounded)
    folded = done & (slow >= 3)
    if bool(folded.any()):
        system = int(folded.flatten().to(torch.int8).argmax())
        raise RuntimeError(
            f"the steady state{_of(system, folded)} is a multiple root, since Newton's method was "
            "not quadratic: the Jacobian is singular there, and the state has no derivative."
        )
    if not bool(done.all()):
        system = int(done.flatten().to(torch.int8).argmin())
        left = float(largest(rate).flatten()[system])
        raise RuntimeError(
            f"no steady state was found near the start{_of(system, done)}: after {most} Newton "
            f"steps rates of {left:.2g} are left. Start nearer to it, such as from the end of a "
            "run of simulate() or solve_ivp(), or raise max_iterations."
        )
    return x, matrix, count


def _linear(rates: Rates, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rates and their Jacobian at a state."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        rate = rates(point)
    if not rate.requires_grad:
        return rate, torch.zeros_like(x).unsqueeze(-1).expand(*x.shape, x.shape[-1])
    matrix = jacobian(rate, point)
    unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    if x.ndim > 1 and bool(Linear(point, rate, unit - matrix).coupled(1.0)):
        raise ValueError(
            "a steady state is found for each system of the batch alone, and in this field systems "
            "depend on each other: put them into one system, along the last axis."
        )
    return rate.detach(), matrix


def _refuse_singular(rates: Rates, x: Tensor, matrix: Tensor) -> None:
    """Refuse a singular Jacobian, and name the combination of the state that is conserved."""
    eps, tiny = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny
    rows = matrix.abs().amax(-1, keepdim=True).clamp(min=tiny)
    scaled = matrix / rows
    scaled = scaled / scaled.abs().amax(-2, keepdim=True).clamp(min=tiny)
    if not bool(torch.isfinite(scaled).all()):
        raise RuntimeError(
            "the Jacobian of fun is not finite on the way to a steady state: start nearer to it."
        )
    singular = _is_singular(torch.linalg.svdvals(scaled))
    if not bool(singular.any()):
        return
    system = int(singular.flatten().to(torch.int8).argmax())
    weights = _conserved(rates, x, system)
    if weights is not None:
        terms = [f"{w:+.4g} y[{k}]" for k, w in enumerate(weights.tolist()) if abs(w) > 1e3 * eps]
        named = " ".join(terms[:8]) + (" ..." if len(terms) > 8 else "")
        raise RuntimeError(
            f"the Jacobian is singular{_of(system, singular)}: {named} is conserved, so there is a "
            "steady state for each of its values. Replace one entry of y by this combination and "
            "the others, with its value as a parameter."
        )
    raise RuntimeError(
        f"the Jacobian is singular{_of(system, singular)} on the way to a steady state: there the "
        "branch of steady states folds, or a direction of y has no effect. Start elsewhere."
    )


def _is_singular(sizes: Tensor) -> Tensor:
    """Return whether the smallest of the singular values ``(*batch, n)`` is rounding."""
    rounding = 16 * sizes.shape[-1] * torch.finfo(sizes.dtype).eps
    return sizes[..., -1] <= rounding * sizes[..., 0]


def _conserved(rates: Rates, x: Tensor, system: int) -> Tensor | None:
    """Return the weights of a linear combination of one system's state that is conserved, if any.

    The weights annihilate the rates at all states, of which some nearby ones stand for all.
    """
    size, generator = x.shape[-1], torch.Generator().manual_seed(0)
    around = x.abs() + torch.where(largest(x) > 0, largest(x), 1.0).unsqueeze(-1)
    shares = torch.rand((size + 4, size), generator=generator, dtype=torch.float64).to(x)
    found = [rates(x + share * around).reshape(-1, size)[system] for share in shares]
    every = torch.stack(found, -1)
    rows = every.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    if not bool(torch.isfinite(every).all()):
        return None
    left, sizes, _ = torch.linalg.svd(every / rows)
    weights = left[:, -1] / rows.squeeze(-1)
    return weights / weights[weights.abs().argmax()] if bool(_is_singular(sizes)) else None


def _of(system: int, systems: Tensor) -> str:
    return f" of system {system}" if systems.numel() > 1 else ""
