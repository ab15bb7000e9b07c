"""The right-hand side of an ordinary differential equation, for SciPy and for the adjoint."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from adjsim.core.parameters import leaves
from adjsim.core.rows import pulled_rows
from adjsim.core.transforms import outside_transforms
from adjsim.ivp.connection import (
    Pull,
    Push,
    connected,
    is_tracked,
    plain,
)
from adjsim.ivp.input_tensors import InputTensors

Array = np.ndarray[Any, Any]
# A state ``(n,)`` that requires grad, or several ``(times, n)``, and their rates.
Graph = tuple[Tensor, Tensor]
# SciPy's solvers replace a smaller rtol by this.
SMALLEST_RTOL = 100 * float(np.finfo(float).eps)


class RightHandSide:
    """The right-hand side of dy/dt = fun(t, y, *args).

    States are like ``like``: ``(n,)``, or ``(n, batch)`` for problems in columns, whose times are
    ``(batch,)``. A ``vectorized`` function takes states ``(n, k)``. ``declared`` are tensors and
    modules that ``fun`` reads in addition to its arguments. ``mass`` is a mass matrix, a tensor or
    a function of (t, \\*args).
    """

    #: Whether vmap evaluates the function of each column.
    of_samples: ClassVar[bool] = False

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        declared: Any,
        like: Tensor,
        vectorized: bool = False,
        mass: Any = None,
    ) -> None:
        self.fun, self.args, self.like, self.vectorized = fun, args, like.detach(), vectorized
        self.mass = mass
        given = (*args, mass) if isinstance(mass, Tensor) else args
        self.inputs = InputTensors(fun, given, declared, like.shape[1:], self.of_samples)
        #: The arguments of ``fun`` with the tensors of the run.
        self.own_args = self.inputs.args[: len(args)]
        #: Tensors with respect to which a gradient is wanted, and their stand-ins in ``fun``.
        self.parameters, self.parameter_leaves = self.inputs.originals, self.inputs.leaves
        #: The rounding error of a number in a state.
        self.eps = float(torch.finfo(like.dtype).eps)
        #: Whether ``fun`` computes with NumPy; :meth:`check` finds out by calling it.
        self.uses_numpy = False
        #: Whether ``torch.vmap`` may evaluate the rates at several times; :meth:`graphs` tries.
        self.takes_vmap = True

    def tensor(self, y: Array) -> Tensor:
        """Convert a state to a tensor for the user's functions."""
        return torch.tensor(y, dtype=self.like.dtype, device=self.like.device)

    def time(self, t: float | Array) -> Tensor:
        """Convert a time, or the times of all columns, to a tensor for the user's functions."""
        return torch.tensor(t, dtype=self.like.real.dtype, device=self.like.device)

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the rate at one state ``(n,)``."""
        return self.rates(t, y[:, None]).reshape(-1) if self.vectorized else self.rates(t, y)

    def rates(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the rates at a state ``(n,)``, or at several ``(n, k)``."""
        out = self.evaluate(t, y)
        if isinstance(out, Tensor):
            return out
        rows = [torch.as_tensor(x, dtype=self.like.dtype, device=self.like.device) for x in out]
        return torch.stack(torch.broadcast_tensors(*rows))

    def evaluate(self, t: Tensor, y: Tensor) -> Any:
        """Evaluate ``fun`` with the tensors of the run."""
        return self.inputs.evaluate(t, y, *self.own_args)

    def matrix(self, t: Tensor) -> Tensor:
        """Return the mass matrix ``(n, n)``, or that of each column ``(n, n, batch)``."""
        if isinstance(self.mass, Tensor):
            return self.inputs.args[-1]
        return self.called(lambda t, _, *args: self.mass(t, *args), t, self.like)

    def called(self, function: Callable[..., Any], t: Tensor, y: Tensor) -> Any:
        """Call a function of (t, y, *args), such as an event, with the arguments of the run."""
        return function(t, y, *self.own_args)

    def connected(
        self,
        states: Tensor,
        start: Tensor,
        pull: Pull,
        push: Push | None = None,
        more: Sequence[Tensor] = (),
    ) -> Tensor:
        """Connect states to their start, the parameters and more, which ``pull`` reaches."""
        inputs = (start, *self.parameters, *more)
        return connected(states, inputs, pull, push) if any(map(is_tracked, inputs)) else states

    def with_time_derivative(
        self, states: Tensor, times: Tensor, rates: Array | Tensor | None = None
    ) -> Tensor:
        """Give states their derivative with respect to their times, which is their rate.

        The states have the axes of the times after their first one. ``rates`` replaces the rates of
        ``fun`` at these states where a one-sided limit is meant.
        """
        if not (times.numel() and is_tracked(times)):
            return states
        with outside_transforms():
            if rates is None:
                at, values = to_numpy(times), to_numpy(states)
                along = zip(at, values.swapaxes(0, 1), strict=True) if at.ndim else [(at, values)]
                rates = np.stack([self.rate(t, y) for t, y in along], 1).reshape(values.shape)
            known = torch.as_tensor(rates).to(plain(states))

        def pull(rows: Tensor) -> tuple[Tensor, Tensor]:
            return rows, (rows.conj() * known).real.sum(1)

        def push(rows: Tensor, along: Tensor) -> Tensor:
            return rows + (known * along[:, None]).to(rows)

        return connected(states.detach(), (states, times), pull, push)

    def with_start_time(
        self, start: Tensor, time: Tensor, rates: Array | Tensor | None = None
    ) -> Tensor:
        """Connect an initial state to its time: a start later by dt is a state smaller by f dt."""
        later = self.with_time_derivative(start.detach(), time, rates)
        return start - (later - start.detach())

    # Called by SciPy.

    def numpy(self, t: float | Array, y: Array) -> Array:
        """Return the rates at a state ``(n,)``, or at several ``(n, k)``."""
        if self.uses_numpy:
            return np.asarray(self.fun(t, y, *self.args))
        with torch.no_grad():
            return to_numpy(self.rates(self.time(t), self.tensor(y)))

    def rate(self, t: float | Array, y: Array) -> Array:
        """Return the rate at one state ``(n,)``."""
        return self.numpy(t, y[:, None]).reshape(-1) if self.vectorized else self.numpy(t, y)

    def smooth_rate(self, t: float | Array, y: Array) -> Array:
        """Return the rate at one state, without that of algebraic unknowns."""
        return self.rate(t, y)

    def solver_options(self) -> dict[str, Any]:
        """Return the options of SciPy's solver that depend on the equation."""
        return {"vectorized": self.vectorized}

    def completed(self, times: Array, states: Tensor) -> Tensor:
        """Give states ``(n, times)`` the derivatives of their algebraic unknowns."""
        return states

    def jacobian(self, t: float, y: Array) -> Array:
        """Compute the Jacobian d fun_i / d y_j by automatic differentiation."""
        if self.uses_numpy:
            raise numpy_error('fun, whose Jacobian jac="autodiff" needs,')
        return self._products([self._with_graph(t, y)], np.eye(y.size, dtype=y.dtype))[0].conj()

    # Called by the adjoint. For a complex state a cotangent is d/dRe + i d/dIm, as in torch.

    def graphs(self, times: Array, states: Array) -> list[Graph]:
        """Return the states ``(n, times)`` as tensors, and the rates there with their graphs.

        There is one graph for all times, or one for each where vmap does not take ``fun``.
        """
        if self.takes_vmap:
            try:
                return [self._graph(torch.vmap(self), times, states.T)]
            except RuntimeError:
                # A branch on a value, a random number, or an operation without a rule for vmap. The
                # loop below raises any other error again.
                self.takes_vmap = False
        return [self._with_graph(float(t), y) for t, y in zip(times, states.T, strict=True)]

    def transposed_jacobians(self, graphs: Sequence[Graph]) -> Array:
        """Compute the real matrices ``(times, n, n)`` that map a cotangent to its product.

        For complex states the matrices are ``(times, 2 n, 2 n)``, since such products need not be
        linear over complex numbers.
        """
        n, is_complex = len(self.like), self.like.is_complex()
        found = self._products(graphs, np.eye(2 * n).view(complex) if is_complex else np.eye(n))
        return (found.view(float) if is_complex else found).swapaxes(1, 2)

    def _products(self, graphs: Sequence[Graph], cotangents: Array) -> Array:
        """Compute the products ``(times, k, n)`` of cotangents ``(k, n)`` with the Jacobians."""
        points, rates = zip(*graphs, strict=True)
        count = sum(map(_count_times, rates))
        rows = torch.as_tensor(cotangents)[:, None].expand(-1, count, -1)
        found = pulled_rows(rates, points, _as_rates(rows, rates))
        by_time = [x.reshape(len(rows), -1, cotangents.shape[1]) for x in found]
        return to_numpy(torch.cat(by_time, 1)).swapaxes(0, 1)

    def linearised(self, t: float, y: Array, along: Sequence[Tensor]) -> tuple[Array, Array]:
        """Compute the Jacobian ``(n, n)``, and the rates ``(n, k)`` along tangents ``(k, ...)``.

        The tangents are those of the parameters.
        """
        x, out = self._with_graph(t, y)
        units = torch.eye(len(y)).to(out)
        by_state, *rows = pulled_rows([out], [x, *self.parameter_leaves], [units])
        pairs = zip(rows, along, strict=True)
        found = [
            row.unsqueeze(-1).flatten(1) @ tangent.to(row).unsqueeze(-1).flatten(1).T
            for row, tangent in pairs
        ]
        return to_numpy(by_state), to_numpy(sum(found, out.new_zeros(len(y), 1)))

    def state_vjp(self, t: float, y: Array, rows: Array) -> Array:
        """Compute the products of cotangents ``(k, n)`` with the Jacobian in the state."""
        x, out = self._with_graph(t, y)
        return to_numpy(pulled_rows([out], [x], [torch.as_tensor(rows).to(out)])[0])

    def parameter_vjp(self, graphs: Sequence[Graph], *rows: Array) -> list[list[Tensor]]:
        """Compute the products of cotangents ``(k, n, times)`` with the Jacobian in the parameters.

        The products are summed over times.
        """
        rates = [rate for _, rate in graphs]
        weights = [_as_rates(torch.as_tensor(w.swapaxes(1, 2)), rates) for w in rows]
        return [pulled_rows(rates, self.parameter_leaves, each) for each in weights]

    def _with_graph(self, t: float | Array, y: Array) -> Graph:
        """Return a state that requires grad, and its rate with a graph and no undeclared tensor."""
        return self._graph(self, t, y)

    def _graph(self, rate: Callable[..., Tensor], t: float | Array, y: Array) -> Graph:
        with torch.enable_grad():
            x = self.tensor(y).requires_grad_()
            out = rate(self.time(t), x)
        self.inputs.refuse_undeclared(out, x)
        return x, out

    # Checks.

    def check(self, t: float | Array, y: Array, gradient: bool) -> None:
        """Refuse another shape and, where a gradient is recorded, undeclared tensors."""
        at, x = self.time(t), self.tensor(y)
        with torch.no_grad():
            columns = x[:, None] if self.vectorized else x
            self.uses_numpy = computes_with_numpy(self.evaluate, at, columns, ())
        with torch.set_grad_enabled(gradient):
            out = torch.as_tensor(self.rate(t, y)) if self.uses_numpy else self(at, x)
        if out.shape != self.like.shape:
            raise ValueError(
                f"fun returned shape {tuple(out.shape)} for a state of shape "
                f"{tuple(self.like.shape)}."
            )
        self.inputs.refuse_undeclared(out, x)

    def check_differentiable(self, t: float | Array, y: Array) -> None:
        """Refuse a function that computes with NumPy, where a gradient is wanted."""
        if self.uses_numpy:
            raise numpy_error("fun")
        with naming_function("fun"):
            self._with_graph(t, y)

    def evaluate_checked(self, t: float | Array, y: Array) -> Array:
        """Return the rate at one state, and refuse undeclared tensors that require grad."""
        return to_numpy(self._with_graph(t, y)[1])

    def rates_checked(self, times: Array, states: Array) -> Array:
        """Return the rates ``(n, times)`` at states, and refuse undeclared tensors."""
        rates = [rate for _, rate in self.graphs(times, states)]
        return to_numpy(torch.cat([x.reshape(-1, len(states)) for x in rates])).T

    def has_unused_parameter(self, *points: tuple[float | Array, Array]) -> bool:
        """Test whether the rates at some points leave an argument or a declared tensor unused.

        The tensors of modules do not count.
        """
        read = {id(leaf) for t, y in points for leaf in leaves(self._with_graph(t, y)[1])}
        return not self.inputs.named <= read


def _count_times(rate: Tensor) -> int:
    return len(rate) if rate.ndim == 2 else 1


def _as_rates(rows: Tensor, rates: Sequence[Tensor]) -> list[Tensor]:
    """Split cotangents ``(k, times, n)`` of rates among the graphs of the rates."""
    parts = rows.split([_count_times(x) for x in rates], 1)
    pairs = zip(parts, rates, strict=True)
    return [part.reshape(len(part), *rate.shape).to(rate) for part, rate in pairs]


def describe_shape(value: Any) -> str:
    """Describe what a function of the user's returned, by its shape or its type."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def to_numpy(x: Tensor) -> Array:
    """Convert a tensor to a double precision array, as SciPy uses."""
    with outside_transforms():
        wide = plain(x).to("cpu", torch.complex128 if x.is_complex() else torch.float64)
        return wide.resolve_conj().numpy()


def as_state(y0: Any) -> Tensor:
    """Convert a tensor, numbers, or a list of both to a state ``(n,)``, or to ``(n, batch)``."""
    if not isinstance(y0, Tensor):
        tensors = [x for x in y0 if isinstance(x, Tensor)] if isinstance(y0, list | tuple) else []
        if not tensors:
            y0 = np.asarray(y0)
            y0 = torch.tensor(y0, dtype=torch.complex128 if np.iscomplexobj(y0) else torch.float64)
        elif len(tensors) == len(y0) and all(x.ndim == 1 and len(x) > 1 for x in tensors):
            y0 = torch.stack(tensors)
        else:
            dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
            dtype = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
            if any(isinstance(x, complex) for x in y0):
                dtype = torch.promote_types(dtype, torch.complex64)
            y0 = torch.stack(
                [torch.as_tensor(x, dtype=dtype, device=tensors[0].device).reshape(()) for x in y0]
            )
    if y0.ndim not in (1, 2):
        raise ValueError(f"y0 must be of shape (n,) or (n, batch); got {tuple(y0.shape)}.")
    y0 = y0.clone() if y0.is_inference() else y0
    return y0 if y0.is_floating_point() or y0.is_complex() else y0.double()


def as_times(t: Any, like: Tensor) -> Tensor:
    """Convert times to double precision, whatever the dtype of the state."""
    if isinstance(t, list | tuple) and any(isinstance(x, Tensor) for x in t):
        return torch.stack([as_times(x, like).reshape(()) for x in t])
    return (
        t.double().to(like.device)
        if isinstance(t, Tensor)
        else torch.tensor(np.asarray(t, float), device=like.device)
    )


def check_tolerance(name: str, value: Any) -> None:
    """Refuse a negative tolerance, and NaN, with which no step would be accepted."""
    if not np.all(np.asarray(value, float) >= 0):
        raise ValueError(f"{name} must be zero or positive; got {value}.")


def computes_with_numpy(
    function: Callable[..., Any], t: Tensor, y: Tensor, args: tuple[Any, ...]
) -> bool:
    """Test whether a function returns arrays for tensors, or accepts arrays only."""
    try:
        return _is_array(function(t, y, *args))
    except Exception as error:
        try:
            function(float(t), y.cpu().numpy(), *args)
        except Exception:
            raise error from None
        return True


def _is_array(out: Any) -> bool:
    if isinstance(out, list | tuple):
        return any(map(_is_array, out)) and not any(isinstance(x, Tensor) for x in out)
    return isinstance(out, np.ndarray | np.generic)


def numpy_error(function: str) -> TypeError:
    """Make the error for a function that computes with NumPy where a gradient is wanted."""
    return TypeError(
        f"{function} computes with NumPy, and no gradient flows through NumPy. Write it with "
        "torch. If no gradient is wanted, detach() the tensors that require grad, or call "
        "solve_ivp() under torch.no_grad()."
    )


@contextmanager
def naming_function(function: str) -> Generator[None, None, None]:
    """Name the function in torch's error about converting a tensor that requires grad."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "numpy()" not in str(error):
            raise
        raise numpy_error(function) from error
