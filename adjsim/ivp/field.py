"""The right-hand side of an ordinary differential equation, for SciPy and for its adjoint.

SciPy calls it with NumPy arrays of float64; the function is the user's, of torch tensors. What the adjoint needs of it are the
products of a cotangent with its Jacobians, by the state and by the parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from adjsim._params import leaves, trainable

Array = np.ndarray[Any, Any]


class Field:
    """dy/dt = fun(t, y, *args).

    Args:
        fun: as the user wrote it; it may return a tensor or a list of numbers and tensors.
        args: what it takes besides time and state.
        declared: tensors and modules that it reads besides.
        like: a state ``(n,)``, whose dtype and device it is called with.
        vectorized: whether it takes states ``(n, k)``.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], declared: Any, like: Tensor, vectorized: bool) -> None:
        self.fun, self.args, self.like, self.vectorized = fun, args, like.detach(), vectorized
        found = [*_tensors(_owner(fun)), *_tensors(args), *_tensors(declared)]
        self.parameters = list({id(x): x for x in found if x.requires_grad}.values())

    def tensor(self, y: Array) -> Tensor:
        """A state as the user's functions see it."""
        return torch.tensor(y, dtype=self.like.dtype, device=self.like.device)

    def time(self, t: float) -> Tensor:
        return torch.tensor(t, dtype=self.like.real.dtype, device=self.like.device)

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        """The rate of one state ``(n,)``."""
        return self._vector(self.fun(t, y[:, None], *self.args)).reshape(-1) if self.vectorized else self.rates(t, y)

    def rates(self, t: Tensor, y: Tensor) -> Tensor:
        """The rates of a state ``(n,)``, or of several ``(n, k)``."""
        return self._vector(self.fun(t, y, *self.args))

    def _vector(self, out: Any) -> Tensor:
        if isinstance(out, Tensor):
            return out
        rows = [torch.as_tensor(x, dtype=self.like.dtype, device=self.like.device) for x in out]
        return torch.stack(torch.broadcast_tensors(*rows))

    def moved(self, states: Tensor, times: Tensor) -> Tensor:
        """States ``(n, times)`` with the derivative by their times, which is their rate; the values stay."""
        if not times.requires_grad:
            return states
        with torch.no_grad():
            rates = [self(self.time(float(t)), y) for t, y in zip(times, states.detach().T, strict=True)]
        return states + torch.stack(rates, 1) * (times - times.detach()).to(states.real.dtype) if rates else states

    # What SciPy calls.

    def numpy(self, t: float, y: Array) -> Array:
        with torch.no_grad():
            return to_numpy(self.rates(self.time(t), self.tensor(y)))

    def jacobian(self, t: float, y: Array) -> Array:
        """d fun_i / d y_j, by automatic differentiation."""
        return self.rows(t, y).conj()

    # What the adjoint asks for. For a complex state a cotangent is d/dRe + i d/dIm, torch's own convention.

    def rows(self, t: float, y: Array) -> Array:
        """The products of the unit vectors with the Jacobian by the state, as rows ``(n, n)``."""
        x, out = self._watched(t, y)
        if not out.requires_grad:
            return np.zeros((y.size, y.size), y.dtype)
        found = [torch.autograd.grad(out, x, e, retain_graph=True, allow_unused=True)[0] for e in torch.eye(y.size).to(out)]
        return np.stack([np.zeros_like(y) if row is None else to_numpy(row) for row in found])

    def pull_state(self, t: float, y: Array, cotangent: Array) -> Array:
        """The product of a cotangent with the Jacobian by the state."""
        x, out = self._watched(t, y)
        if not out.requires_grad:
            return np.zeros_like(cotangent)
        (pulled,) = torch.autograd.grad(out, x, torch.as_tensor(cotangent).to(out), allow_unused=True)
        return np.zeros_like(cotangent) if pulled is None else to_numpy(pulled)

    def pull_parameters(self, times: Array, states: Array, cotangents: Array, sums: list[Tensor]) -> None:
        """Add to ``sums`` the products of cotangents with the Jacobian by the parameters, over times: states ``(n, times)``."""
        with torch.enable_grad():
            rates = [self(self.time(t), self.tensor(y)) for t, y in zip(times, states.T, strict=True)]
        for rate in rates:
            self.refuse_undeclared(rate)
        pairs = [(r, torch.as_tensor(c).to(r)) for r, c in zip(rates, cotangents.T, strict=True) if r.requires_grad]
        if not pairs:
            return
        outputs, weights = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, self.parameters, weights, allow_unused=True)
        for total, grad in zip(sums, found, strict=True):
            if grad is not None:
                total += grad

    def _watched(self, t: float, y: Array) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = self.tensor(y).requires_grad_()
            return x, self(self.time(t), x)

    # What is checked before work starts.

    def check(self, t: float, y: Array, gradient: bool) -> None:
        """Refuse a function of another shape, and one that reads a tensor that requires grad and was not declared."""
        x = self.tensor(y)
        with torch.set_grad_enabled(gradient):
            out = self(self.time(t), x.requires_grad_(gradient))
        if out.shape != self.like.shape:
            raise ValueError(f"fun returned shape {tuple(out.shape)} for a state of shape {tuple(self.like.shape)}.")
        self.refuse_undeclared(out, x)

    def refuse_undeclared(self, out: Tensor, *known: Tensor) -> None:
        declared = {id(x) for x in (*self.parameters, *known)}
        for leaf in leaves(out, self.parameters):
            if id(leaf) not in declared:
                raise ValueError(
                    f"fun reads {name_of(leaf, self.fun)}, which requires grad and was not declared, so the adjoint would "
                    "lose its gradient. Pass it in args, declare it by params=[...], make it a parameter of a module, or "
                    "detach() it."
                )


def to_numpy(x: Tensor) -> Array:
    """As SciPy computes: in double precision, on the CPU."""
    return x.detach().to("cpu", torch.complex128 if x.is_complex() else torch.float64).resolve_conj().numpy()


def as_state(y0: Any) -> Tensor:
    """A state ``(n,)`` of what a user gives: a tensor, numbers, or a list of both."""
    if not isinstance(y0, Tensor):
        tensors = [x for x in y0 if isinstance(x, Tensor)] if isinstance(y0, list | tuple) else []
        if tensors:
            like = tensors[0] if tensors[0].is_floating_point() else tensors[0].double()
            y0 = torch.stack([torch.as_tensor(x).to(like).reshape(()) for x in y0])
        else:
            y0 = torch.tensor(np.asarray(y0), dtype=torch.complex128 if np.iscomplexobj(y0) else torch.float64)
    if not (y0.is_floating_point() or y0.is_complex()):
        y0 = y0.double()
    if y0.ndim != 1:
        raise ValueError(f"y0 must be of shape (n,); got {tuple(y0.shape)}.")
    return y0


def as_times(t: Any, like: Tensor) -> Tensor:
    """Times in double precision, whatever the state's."""
    if isinstance(t, list | tuple) and any(isinstance(x, Tensor) for x in t):
        return torch.stack([as_times(x, like).reshape(()) for x in t])
    return t.double().to(like.device) if isinstance(t, Tensor) else torch.tensor(np.asarray(t, float), device=like.device)


def name_of(leaf: Tensor, fun: Callable[..., Any]) -> str:
    """A tensor by the name under which a function reads it, where that can be told."""
    plain = fun.forward if isinstance(fun, nn.Module) else fun
    while isinstance(plain, partial | MethodType):
        plain = plain.func if isinstance(plain, partial) else plain.__func__
    owner = _owner(fun)
    if owner is not None:
        for name, value in vars(owner).items():
            if value is leaf:
                return f"'{name}' (a plain attribute of {type(owner).__name__})"
    if inspect.isfunction(plain):
        seen = inspect.getclosurevars(plain)
        for name, value in {**seen.globals, **seen.nonlocals}.items():
            if value is leaf or (isinstance(value, Tensor) and any(x is leaf for x in leaves(value))):
                return f"'{name}'"
    return f"a tensor of shape {tuple(leaf.shape)}"


def _owner(fun: Any) -> Any:
    """The object that a function belongs to, if it does."""
    while isinstance(fun, partial):
        fun = fun.func
    return fun.__self__ if isinstance(fun, MethodType) else fun if isinstance(fun, nn.Module) else None


def _tensors(tree: Any) -> Iterable[Tensor]:
    for node in tree_leaves(list(tree) if isinstance(tree, Iterator) else tree):
        if isinstance(node, nn.Module):
            yield from trainable(node).values()
        elif isinstance(node, Tensor):
            yield node
