"""The right-hand side of an ordinary differential equation, for SciPy and for its adjoint.

SciPy calls it with NumPy arrays of float64; the function is the user's, of torch tensors. What the
adjoint needs of it are the products of a cotangent with its Jacobians, by the state and by the
parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial, reduce
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjsim._params import leaves
from adjsim.ivp.foreign import computes_with_numpy, refusal, refused
from adjsim.ivp.reads import Reads, owner

Array = np.ndarray[Any, Any]


class RightHandSide:
    """dy/dt = fun(t, y, *args).

    Args:
        fun: as the user wrote it; it may return a tensor, a list of numbers and tensors, or NumPy's
            arrays.
        args: what it takes besides time and state.
        declared: tensors and modules that it reads besides.
        like: a state ``(n,)``, whose dtype and device it is called with.
        vectorized: whether it takes states ``(n, k)``.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        declared: Any,
        like: Tensor,
        vectorized: bool,
    ) -> None:
        self.fun, self.args, self.like, self.vectorized = fun, args, like.detach(), vectorized
        self.reads = Reads(fun, args, declared)
        #: Tensors that a gradient is wanted by, and what stands for each in ``fun``.
        self.parameters, self.inner = self.reads.originals, self.reads.leaves
        #: Whether ``fun`` computes with NumPy, which is found by calling it.
        self.of_arrays = False

    def tensor(self, y: Array) -> Tensor:
        """A state as the user's functions see it."""
        return torch.tensor(y, dtype=self.like.dtype, device=self.like.device)

    def time(self, t: float) -> Tensor:
        return torch.tensor(t, dtype=self.like.real.dtype, device=self.like.device)

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        """The rate of one state ``(n,)``."""
        return self.rates(t, y[:, None]).reshape(-1) if self.vectorized else self.rates(t, y)

    def rates(self, t: Tensor, y: Tensor) -> Tensor:
        """The rates of a state ``(n,)``, or of several ``(n, k)``."""
        with self.reads.held():
            return self.reads.stand_in(self._vector(self.fun(t, y, *self.reads.args)))

    def _vector(self, out: Any) -> Tensor:
        if isinstance(out, Tensor):
            return out
        rows = [torch.as_tensor(x, dtype=self.like.dtype, device=self.like.device) for x in out]
        return torch.stack(torch.broadcast_tensors(*rows))

    def with_time_derivative(
        self, states: Tensor, times: Tensor, rates: Array | None = None
    ) -> Tensor:
        """States ``(n, times)`` with the derivative by their times, which is their rate; the values
        stay. ``rates`` are given where those of ``fun`` at the very states are not the limits that
        are meant."""
        if not times.requires_grad or not times.numel():
            return states
        if rates is None:
            along = zip(times.detach().tolist(), to_numpy(states).T, strict=True)
            rates = np.stack([self.rate(t, y) for t, y in along], 1)
        return _Along.apply(states, times, torch.as_tensor(rates).to(states))

    # What SciPy calls.

    def numpy(self, t: float, y: Array) -> Array:
        """The rates of a state ``(n,)``, or of several ``(n, k)``."""
        if self.of_arrays:
            return np.asarray(self.fun(t, y, *self.args))
        with torch.no_grad():
            return to_numpy(self.rates(self.time(t), self.tensor(y)))

    def rate(self, t: float, y: Array) -> Array:
        """The rate of one state ``(n,)``."""
        return self.numpy(t, y[:, None]).reshape(-1) if self.vectorized else self.numpy(t, y)

    def jacobian(self, t: float, y: Array) -> Array:
        """d fun_i / d y_j, by automatic differentiation."""
        if self.of_arrays:
            raise refusal('fun, of which jac="autodiff" wants the Jacobian,')
        return self.rows(t, y).conj()

    # What the adjoint asks for. For a complex state a cotangent is d/dRe + i d/dIm, torch's own
    # convention.

    def rows(self, t: float, y: Array) -> Array:
        """The products of the unit vectors with the Jacobian by the state, as rows ``(n, n)``."""
        return self._products(np.array([t]), y[:, None], np.eye(y.size, dtype=y.dtype))[0]

    def matrices(self, times: Array, states: Array) -> Array:
        """What takes a cotangent to its product with the Jacobian by the state, over real numbers
        ``(times, n, n)``, at states ``(n, times)``. For complex states it is ``(times, 2 n, 2 n)``,
        since such products need not be linear over complex numbers."""
        n = len(states)
        units = np.eye(2 * n).view(complex) if np.iscomplexobj(states) else np.eye(n)
        found = self._products(times, states, units)
        return (found.view(float) if np.iscomplexobj(states) else found).swapaxes(1, 2)

    def _products(self, times: Array, states: Array, cotangents: Array) -> Array:
        """The products of cotangents ``(k, n)`` with the Jacobians at several times, ``(times, k,
        n)``, all times at once.
        """
        watched = [self._watched(float(t), y) for t, y in zip(times, states.T, strict=True)]
        found = np.zeros((len(watched), *cotangents.shape), states.dtype)
        inside = [i for i, (_, out) in enumerate(watched) if out.requires_grad]
        if not inside:
            return found
        points, outputs = [watched[i][0] for i in inside], [watched[i][1] for i in inside]
        for k, cotangent in enumerate(torch.as_tensor(cotangents).to(outputs[0])):
            rows = torch.autograd.grad(
                outputs, points, [cotangent] * len(inside), retain_graph=True, allow_unused=True
            )
            for i, row in zip(inside, rows, strict=True):
                if row is not None:
                    found[i, k] = to_numpy(row)
        return found

    def state_vjp(self, t: float, y: Array, cotangent: Array) -> Array:
        """The product of a cotangent with the Jacobian by the state."""
        x, out = self._watched(t, y)
        if not out.requires_grad:
            return np.zeros_like(cotangent)
        (pulled,) = torch.autograd.grad(
            out, x, torch.as_tensor(cotangent).to(out), allow_unused=True
        )
        return np.zeros_like(cotangent) if pulled is None else to_numpy(pulled)

    def parameter_vjp(self, times: Array, states: Array, *cotangents: Array) -> list[list[Tensor]]:
        """The products of cotangents with the Jacobian by the parameters, summed over times; states
        and each of the cotangents are ``(n, times)``."""
        with torch.enable_grad():
            rates = [
                self(self.time(t), self.tensor(y)) for t, y in zip(times, states.T, strict=True)
            ]
        found = []
        for rows in cotangents:
            pairs = [
                (r, torch.as_tensor(c).to(r))
                for r, c in zip(rates, rows.T, strict=True)
                if r.requires_grad
            ]
            outputs, weights = zip(*pairs, strict=True) if pairs else ((), ())
            grads = (
                torch.autograd.grad(
                    outputs, self.inner, weights, retain_graph=True, allow_unused=True
                )
                if pairs
                else ()
            )
            grads = grads or (None,) * len(self.inner)
            found.append(
                [
                    torch.zeros_like(x) if g is None else g
                    for x, g in zip(self.inner, grads, strict=True)
                ]
            )
        return found

    def _watched(self, t: float, y: Array) -> tuple[Tensor, Tensor]:
        """A state that requires grad and its rate, which must depend on nothing that was not
        declared.
        """
        with torch.enable_grad():
            x = self.tensor(y).requires_grad_()
            out = self(self.time(t), x)
        self.refuse_undeclared(out, x)
        return x, out

    # What is checked.

    def check(self, t: float, y: Array, gradient: bool) -> None:
        """Refuse a function of another shape, and one that reads a tensor that requires grad and
        was not declared.
        """
        at, x = self.time(t), self.tensor(y)
        with torch.no_grad(), self.reads.held():
            columns = x[:, None] if self.vectorized else x
            self.of_arrays = computes_with_numpy(self.fun, at, columns, self.reads.args)
        with torch.set_grad_enabled(gradient):
            out = torch.as_tensor(self.rate(t, y)) if self.of_arrays else self(at, x)
        if out.shape != self.like.shape:
            raise ValueError(
                f"fun returned shape {tuple(out.shape)} for a state of shape "
                f"{tuple(self.like.shape)}."
            )
        self.refuse_undeclared(out, x)

    def check_differentiable(self, t: float, y: Array) -> None:
        """Refuse a function that computes with NumPy, called where a gradient is asked for."""
        if self.of_arrays:
            raise refusal("fun")
        with refused("fun"):
            self._watched(t, y)

    def evaluate_checked(self, t: float, y: Array) -> Array:
        """The rate of one state, which must depend on nothing that was not declared."""
        return to_numpy(self._watched(t, y)[1])

    def unread(self, *points: tuple[float, Array]) -> bool:
        """Whether ``fun`` has no derivative by some argument or declared tensor at any of some
        times and states.
        """
        read = {id(leaf) for t, y in points for leaf in leaves(self._watched(t, y)[1])}
        return not self.reads.named <= read

    def refuse_undeclared(self, out: Tensor, *known: Tensor) -> None:
        """Refuse a rate whose graph ends in a tensor that requires grad and was not declared."""
        for node in _nodes(out):
            leaf = getattr(node, "variable", None)
            if self.reads.is_declared(node, leaf):
                raise ValueError(
                    "fun reads a tensor that has been computed from a declared one before: "
                    "compute it in fun, or declare it "
                    "instead."
                )
            if (
                leaf is not None
                and not self.reads.is_stand_in(leaf)
                and not any(leaf is x for x in known)
            ):
                raise ValueError(
                    f"fun reads {name_of(leaf, self.fun)}, which requires grad and was not "
                    "declared, so the adjoint would "
                    "lose its gradient. Pass it in args, declare it by params=[...], make it a "
                    "parameter of a module, or "
                    "detach() it."
                )


class _Along(torch.autograd.Function):
    """States at times, whose derivative by the times is their rate."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, times: Tensor, rates: Tensor) -> Tensor:
        ctx.rates, ctx.dtype = rates, times.dtype
        return states.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        refuse_second()
        by_time = (grad_outputs[0].conj() * ctx.rates).real.sum(0)
        return grad_outputs[0], by_time.to(ctx.dtype), None


def refuse_second() -> None:
    """Called in a backward: it has no graph of its own."""
    if torch.is_grad_enabled():
        raise RuntimeError("solve_ivp has first derivatives only: leave out create_graph=True.")


def to_numpy(x: Tensor) -> Array:
    """As SciPy computes: in double precision, on the CPU."""
    return (
        x.detach()
        .to("cpu", torch.complex128 if x.is_complex() else torch.float64)
        .resolve_conj()
        .numpy()
    )


def as_state(y0: Any) -> Tensor:
    """A state ``(n,)`` of what a user gives: a tensor, numbers, or a list of both."""
    if not isinstance(y0, Tensor):
        tensors = [x for x in y0 if isinstance(x, Tensor)] if isinstance(y0, list | tuple) else []
        if tensors:
            dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
            dtype = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
            if any(isinstance(x, complex) for x in y0):
                dtype = torch.promote_types(dtype, torch.complex64)
            y0 = torch.stack(
                [torch.as_tensor(x, dtype=dtype, device=tensors[0].device).reshape(()) for x in y0]
            )
        else:
            y0 = np.asarray(y0)
            y0 = torch.tensor(y0, dtype=torch.complex128 if np.iscomplexobj(y0) else torch.float64)
    if not (y0.is_floating_point() or y0.is_complex()):
        y0 = y0.double()
    if y0.ndim != 1:
        raise ValueError(f"y0 must be of shape (n,); got {tuple(y0.shape)}.")
    return y0


def as_times(t: Any, like: Tensor) -> Tensor:
    """Times in double precision, whatever the state's."""
    if isinstance(t, list | tuple) and any(isinstance(x, Tensor) for x in t):
        return torch.stack([as_times(x, like).reshape(()) for x in t])
    return (
        t.double().to(like.device)
        if isinstance(t, Tensor)
        else torch.tensor(np.asarray(t, float), device=like.device)
    )


def name_of(leaf: Tensor, fun: Callable[..., Any]) -> str:
    """A tensor by the name under which a function reads it, where that can be told."""
    places = (
        [(f"a plain attribute of {type(owner(fun)).__name__}", vars(owner(fun)))]
        if owner(fun) is not None
        else []
    )
    plain = fun.forward if isinstance(fun, nn.Module) else fun
    while isinstance(plain, partial | MethodType):
        if isinstance(plain, partial):
            places.append(
                ("an argument of a partial", {**plain.keywords, **dict(enumerate(plain.args))})
            )
        plain = plain.func if isinstance(plain, partial) else plain.__func__
    if inspect.isfunction(plain):
        seen = inspect.getclosurevars(plain)
        places.append(("", {**seen.globals, **seen.nonlocals}))
    for where, names in places:
        for name, value in names.items():
            if value is leaf or (
                isinstance(value, Tensor) and any(x is leaf for x in leaves(value))
            ):
                return f"'{name}'" + (f" ({where})" if where else "")
    return f"a tensor of shape {tuple(leaf.shape)}"


def _nodes(x: Tensor) -> Iterator[Any]:
    """Of the graph of a tensor."""
    seen, queue = set(), [x.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        queue.extend(parent for parent, _ in node.next_functions)
